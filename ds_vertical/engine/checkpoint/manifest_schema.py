"""What the manifests of a checkpoint may say, checked before anything that they say is used.

A checksum tells that a manifest is as it was written, not that what was written makes sense: one that was made by hand, or by a
program with a fault, has it too. Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ds_vertical.io.regular_file import is_plain_name

FORMAT: Final = 1
NAME: Final = "ds_vertical.json"
# Of a file without content in each tag's folder. DeepSpeed's zero_to_fp32.py takes it for one of its own, and says its name in
# the error with which it ends.
SIGNPOST: Final = "read_this_with_the_zero_to_fp32.py_in_the_folder_above_model_states.pt"
STATE: Final = ("master", "exp_avg", "exp_avg_sq")  # of the optimizer, in fp32
ITEM_BYTES: Final = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
_STATE_BYTES: Final = 4
_NUM_SHOWN: Final = 5

NonNegative = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Plain = bool | int | float | str | None


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Open(BaseModel):
    """Keys that it does not name may be there too."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


# ---- the folder's


class RankEntry(_Strict):
    """What the folder's manifest says of one rank's own: its bytes and their checksum."""

    num_bytes: NonNegative
    checksum: NonNegative


class HostEntry(_Strict):
    """A host that has saved to a folder of its own, and the ranks whose files that folder has."""

    name: str
    ranks: list[NonNegative]


class FolderManifest(_Strict):
    """The manifest of a whole checkpoint, which is written last. `hosts`: where each has a folder of its own."""

    format: Literal[1]
    written_by: str
    checksums: Literal["xxh3_64"]
    tag: str
    world_size: Annotated[int, Field(ge=1)]
    ranks: dict[str, RankEntry]
    hosts: list[HostEntry] | None = None

    @model_validator(mode="after")
    def _names_every_rank(self) -> FolderManifest:
        if set(self.ranks) != set(map(str, range(self.world_size))):
            raise ValueError(f"ranks: of world size {self.world_size}, got {sorted(self.ranks)[:_NUM_SHOWN]}")
        saved = sorted(rank for host in self.hosts or () for rank in host.ranks)
        if self.hosts is not None and saved != list(range(self.world_size)):
            raise ValueError(f"hosts: each of {self.world_size} ranks once, got {saved[:_NUM_SHOWN]}")
        return self


# ---- a rank's


class FileSchema(_Strict):
    """One file of a rank: its bytes, and (offset, bytes, checksum) of its pieces."""

    num_bytes: NonNegative
    pieces: list[tuple[NonNegative, Annotated[int, Field(ge=1)], NonNegative]]


class Tensor(_Strict):
    """One parameter of the model: its shape, its dtype, and where this rank's share of it is."""

    shape: list[NonNegative]
    dtype: str
    numel: NonNegative
    group: NonNegative | None
    step: NonNegative
    places: dict[Literal["weight", "master", "exp_avg", "exp_avg_sq"], list[tuple[str, NonNegative, NonNegative]]]


class Counters(_Strict):
    """The engine's counters: every version has saved these four, and a load sets attributes of the engine by their names."""

    global_steps: NonNegative
    global_samples: NonNegative
    micro_steps: NonNegative
    skipped_steps: NonNegative


class PowersSchema(_Strict):
    """CPU Adam's powers of beta after so many steps."""

    step: NonNegative
    beta1: Beta
    beta2: Beta
    anchor: NonNegative

    @model_validator(mode="after")
    def _is_taken_from_a_step_before(self) -> PowersSchema:
        if self.anchor > self.step:
            raise ValueError(f"anchor {self.anchor} is after step {self.step}")
        return self


class Group(_Open):
    """Of the optimizer, without its parameters: `params` in it would replace the engine's."""

    lr: Number
    betas: tuple[Beta, Beta]
    eps: Number
    weight_decay: Number
    bias_correction: bool = True

    @model_validator(mode="after")
    def _leaves_parameters_alone(self) -> Group:
        if "params" in (self.model_extra or {}):
            raise ValueError("params: no save writes a group's parameters")
        return self


class LossScaler(_Strict):
    """The numbers of a dynamic loss scale."""

    cur_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    cur_iter: NonNegative
    last_overflow_iter: int
    cur_hysteresis: int


class Numbers(_Open):
    """The run's numbers besides its tensors: see `run_state.numbers_of`."""

    counters: Counters
    loss_scaler: LossScaler | Annotated[dict[str, float], Field(max_length=0)]
    adam_w_mode: bool
    groups: list[Group]
    powers: PowersSchema
    has_scheduler: bool
    stream_seed: int | None
    checked_model: str | None = None
    checked_state: list[str] = Field(default_factory=list)


class Rank(_Strict):
    """The manifest of one rank's files."""

    format: Literal[1]
    rank: NonNegative
    world_size: Annotated[int, Field(ge=1)]
    files: dict[str, FileSchema]
    tensors: dict[str, Tensor]
    settings: dict[str, Plain]
    numbers: Numbers
    tied: dict[str, str]


def folder_faults(data: bytes) -> list[str]:
    """What is wrong with the folder's manifest, given its bytes."""
    return _faults_of(FolderManifest, data)[1]


def rank_faults(data: bytes, rank: int, world_size: int) -> list[str]:
    """What is wrong with a rank's manifest, given its bytes and what the folder's says of it: nothing, or the first few."""
    found, faults = _faults_of(Rank, data)
    if found is None:
        return faults
    if (found.rank, found.world_size) != (rank, world_size):
        faults.append(f"rank {found.rank} of {found.world_size}: the folder's manifest has it as {rank} of {world_size}")
    faults += _file_faults(found.files)
    if not faults:
        faults += _tensor_faults(found)
        faults += _step_faults(found.tensors, found.numbers.powers.step)
    return faults


def _faults_of(schema: type[Any], data: bytes) -> tuple[Any, list[str]]:
    try:
        return schema.model_validate_json(data), []
    except ValidationError as error:
        return None, [_told(fault) for fault in error.errors(include_url=False)]


def _told(fault: Any) -> str:
    where = ".".join(map(str, fault["loc"])) or "the JSON"
    got = repr(fault["input"])
    shown = "" if fault["type"] in ("missing", "json_invalid") else f", got {got if len(got) <= 60 else got[:60] + '...'}"
    return f"{where}: {fault['msg']}{shown}"


def _file_faults(files: Mapping[str, FileSchema]) -> Iterator[str]:
    for name, file in files.items():
        if not is_plain_name(name) or name == NAME:
            yield f"files: names a file elsewhere: {name!r}"
        for offset, num_bytes, _ in file.pieces:
            if offset + num_bytes > file.num_bytes:
                yield f"files.{name}: a piece of bytes {offset} to {offset + num_bytes}, of {file.num_bytes}"


def _tensor_faults(rank: Rank) -> Iterator[str]:
    covered = {name: _merged(file.pieces) for name, file in rank.files.items()}
    taken: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name, tensor in rank.tensors.items():
        yield from (f"tensors.{name}: {fault}" for fault in _shape_faults(tensor, rank))
        for kind, ranges in tensor.places.items():
            where = f"tensors.{name}.places.{kind}"
            item_bytes = ITEM_BYTES.get(tensor.dtype, 1) if kind == "weight" else _STATE_BYTES
            total = sum(num_bytes for _, _, num_bytes in ranges)
            if total != tensor.numel * item_bytes:
                yield f"{where}: {total} bytes, and {tensor.numel} elements of {item_bytes} are {tensor.numel * item_bytes}"
            for file, offset, num_bytes in ranges:
                shown = f"{where}: bytes {offset} to {offset + num_bytes} of {file}"
                if file not in rank.files:
                    yield f"{shown}, a file that is not listed"
                elif num_bytes % item_bytes:
                    yield f"{shown} are no whole elements of {item_bytes} bytes"
                elif num_bytes and not _is_within(covered[file], offset, offset + num_bytes):
                    yield f"{shown}: not all of them are in the file, with a checksum"
                elif num_bytes:
                    taken[file].append((offset, offset + num_bytes, where))
    yield from _overlaps(taken)


def _shape_faults(tensor: Tensor, rank: Rank) -> Iterator[str]:
    if tensor.dtype not in ITEM_BYTES:
        yield f"dtype {tensor.dtype!r} is not known here"
    if tensor.numel * rank.world_size < prod(tensor.shape):
        yield f"{rank.world_size} share(s) of {tensor.numel} elements are less than its shape {tensor.shape}"
    state = [kind for kind in tensor.places if kind in STATE]
    if tensor.group is None and state:
        yield f"not trained, but with {', '.join(state)}"
    if tensor.group is not None:
        if tensor.group >= len(rank.numbers.groups):
            yield f"group {tensor.group}, and there are {len(rank.numbers.groups)}"
        yield from (f"{kind} is missing" for kind in ("weight", *STATE) if kind not in tensor.places)


def _step_faults(tensors: Mapping[str, Tensor], powers: int) -> Iterator[str]:
    """An optimizer step takes all parameters of all groups, and a save waits for its delayed parts. So their steps are one
    number, and CPU Adam's powers of beta are those of that step. `powers`: the step of these; 0 where a checkpoint of stock's
    was loaded and no step has come since, for CPU Adam then begins anew, and the parameters' steps go on."""
    first: dict[int, tuple[str, int]] = {}
    for name, tensor in tensors.items():
        if tensor.group is None:
            continue
        other, step = first.setdefault(tensor.group, (name, tensor.step))
        if step != tensor.step:
            yield f"tensors.{name}: step {tensor.step}, and {other} of the same group has {step}"
    wanted = powers or min((step for _, step in first.values()), default=0)
    for group, (name, step) in first.items():
        if step != wanted:
            than = f"numbers.powers.step is {powers}" if powers else f"another group has {wanted}"
            yield f"tensors.{name}: step {step} in group {group}, and {than}"


def _merged(pieces: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """The bytes of which there are checksums, as [start, end) that do not touch, in order."""
    found: list[tuple[int, int]] = []
    for start, end in sorted((offset, offset + num_bytes) for offset, num_bytes, _ in pieces):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _is_within(merged: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    index = bisect.bisect_right(merged, start, key=lambda bounds: bounds[0]) - 1
    return index >= 0 and end <= merged[index][1]


def _overlaps(taken: Mapping[str, list[tuple[int, int, str]]]) -> Iterator[str]:
    for file, ranges in taken.items():
        ranges.sort()
        for (_, end, one), (start, _, other) in zip(ranges, ranges[1:], strict=False):
            if start < end:
                yield f"{other}: bytes of {file} from {start} on are those of {one} as well"
