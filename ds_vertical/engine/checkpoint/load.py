"""Loading what `save.save` has written, so that the run goes on as if it had not stopped, bit for bit.

Tensors are found by parameter, not by file: a run may hold them in other tiers and other chunks than the one that saved
them. All of a rank's files are verified before the first byte of the live state is touched.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from ds_vertical.compat import accelerator, zero_optimizer, zero_params
from ds_vertical.compat.zero_params import ZeroParam
from ds_vertical.distributed import ranks
from ds_vertical.engine.checkpoint import manifest, run_state, shared_dir
from ds_vertical.engine.checkpoint.manifest import NUM_SHOWN, FileRange, RankManifest, TensorEntry
from ds_vertical.engine.checkpoint.save import LOOSE
from ds_vertical.engine.checkpoint.stock_load import StockSource, is_stock
from ds_vertical.errors import CheckpointError, StorageError
from ds_vertical.io import files
from ds_vertical.io.checksums import Checksums
from ds_vertical.io.regular_file import is_plain_name, open_regular
from ds_vertical.io.runs import held_folders, stripes
from ds_vertical.offload.chunking import FP32_BYTES
from ds_vertical.offload.consistency import HALF_LOADED
from ds_vertical.offload.state_files import KINDS, Chunk

_PIECE = 1 << 21  # elements moved at a time


@dataclass(frozen=True)
class Wanted:
    """What is to be loaded besides the weights: moments, steps and the optimizer's numbers; the scheduler; counters and random
    states. `strict`: parameters and buffers must be the model's; else those that only one of the two has are left alone, as
    long as the optimizer's state has a place and a source."""

    optimizer: bool
    scheduler: bool
    run: bool
    strict: bool = True

    @property
    def kinds(self) -> Sequence[str]:
        """Of optimizer state: the masters are weights."""
        return KINDS if self.optimizer else KINDS[:1]


def latest_tag(load_dir: Path) -> str | None:
    """The tag that `latest` names; None, with a warning, where there is no such file."""
    tag = manifest.read_latest(load_dir)
    if tag is None:
        there = ", ".join(manifest.complete_tags(load_dir)) or "none"
        accelerator.log(
            f"ds_vertical: warning: no file {load_dir / manifest.LATEST}; name a tag to load (complete ones: {there})"
        )
    return tag


def load(engine: run_state.TrainedEngine, load_dir: Path, tag: str, wanted: Wanted) -> tuple[str, dict[str, Any]]:
    """Replace the live state by that of `<load_dir>/<tag>`. Returns the path of its manifest and the client state. Collective.

    Raises CheckpointError before anything is touched: no checkpoint, a damaged one (with the last good tag), one that does not
    fit this run. An error after that leaves the live state torn.
    """
    folder = load_dir / tag
    if is_plain_name(tag):
        shared_dir.settle(load_dir, tag)
    with ranks.all_or_none("load_checkpoint"):
        if not is_plain_name(tag):
            raise CheckpointError(f"load_checkpoint: tag {tag!r}: no name of a folder in {load_dir}")
        source: _Source = StockSource(engine, folder) if is_stock(folder) else _OwnSource(folder)
        _check_fits(engine, folder, source.saved, wanted)
        source.verify()
        loading = _Loading(engine, source, wanted)
        _raise_for(folder, loading.loose_faults())
        loading.make_room()
    with ranks.all_or_none("load_checkpoint"):
        engine.optimizer.flush_state()  # what is due belongs to the state that is replaced
    zero_optimizer.partition_all(engine.optimizer)
    try:
        with ranks.all_or_none("load_checkpoint", partial(zero_optimizer.gather_persistent, engine.optimizer)):
            client_state = loading.run()
    except BaseException as error:
        engine.optimizer.condition.tear(error, HALF_LOADED)
        engine.optimizer.condition.tell(error)
        raise
    _warn(engine, source.saved)
    return str(source.path), client_state


# ---- what may not change


def _check_fits(engine: run_state.TrainedEngine, folder: Path, saved: RankManifest, wanted: Wanted) -> None:
    faults = list(_differences(engine, saved, wanted))
    if wanted.optimizer and not faults:
        faults = list(_optimizer_differences(engine, saved))
    if wanted.scheduler and bool(engine.lr_scheduler) != bool(saved.numbers["has_scheduler"]):
        faults.append(f"scheduler: {bool(engine.lr_scheduler)} here, {bool(saved.numbers['has_scheduler'])} there")
    _raise_for(folder, faults)


def _raise_for(folder: Path, faults: list[str]) -> None:
    if faults:
        more = [f"... and {len(faults) - NUM_SHOWN} more"] if len(faults) > NUM_SHOWN else []
        shown = "\n".join(faults[:NUM_SHOWN] + more)
        remedy = "build the model and write the JSON as they were when it was saved"
        raise CheckpointError(f"{folder}: does not fit this run; {remedy}\n{shown}")


def _differences(engine: run_state.TrainedEngine, saved: RankManifest, wanted: Wanted) -> Iterator[str]:
    if saved.world_size != ranks.world_size():
        yield f"world size: {ranks.world_size()} here, {saved.world_size} in the checkpoint"
        return
    here = dict(engine.module.named_parameters())
    for name, param in here.items():
        if name not in saved.tensors and (wanted.strict or wanted.optimizer and engine.optimizer.steps(param)):
            yield f"{name}: not in the checkpoint"
    for name, there in saved.tensors.items():
        if name not in here and (wanted.strict or wanted.optimizer and there.group is not None):
            yield f"{name}: in the checkpoint only"
    for name, param in here.items():
        if (found := saved.tensors.get(name)) is not None:
            yield from _tensor_differences(name, param, found, wanted.strict or wanted.optimizer)


def _tensor_differences(name: str, param: ZeroParam, there: TensorEntry, whole: bool) -> Iterator[str]:
    """`whole`: what is trained must have its weights in the checkpoint."""
    shape, dtype = zero_params.full_shape(param), str(param.dtype).removeprefix("torch.")
    if shape != there.shape:
        yield f"{name}: shape {list(shape)} here, {list(there.shape)} in the checkpoint"
    elif param.partition_numel() != there.numel:
        yield f"{name}: a share of {param.partition_numel()} elements here, {there.numel} in the checkpoint"
    if whole and param.requires_grad and not there.places:
        yield f"{name}: trained here; the checkpoint was saved without it, as a frozen one"
    if dtype != there.dtype:
        yield f"{name}: dtype {dtype} here, {there.dtype} in the checkpoint"


def _optimizer_differences(engine: run_state.TrainedEngine, saved: RankManifest) -> Iterator[str]:
    optimizer, numbers = engine.optimizer, saved.numbers
    inner: Any = optimizer.optimizer  # DeepSpeed's CPU Adam
    if bool(inner.adam_w_mode) != numbers["adam_w_mode"]:
        yield f"optimizer.params.adam_w_mode: {bool(inner.adam_w_mode)} here, {numbers['adam_w_mode']} in the checkpoint"
    if len(inner.param_groups) != len(numbers["groups"]):
        yield f"optimizer: {len(inner.param_groups)} parameter groups here, {len(numbers['groups'])} in the checkpoint"
    if bool(zero_optimizer.loss_scaler_numbers(optimizer)) != bool(numbers["loss_scaler"]):
        yield "fp16.loss_scale: dynamic here or in the checkpoint, and static in the other"
    chunks = enumerate(optimizer.fp16_groups)
    group_of = {id(p): zero_optimizer.group_of(optimizer, index) for index, params in chunks for p in params}
    for name, param in engine.module.named_parameters():
        here = group_of.get(id(param))
        there = saved.tensors[name].group if name in saved.tensors else None
        if here != there:
            yield f"{name}: {_group(here)} here, {_group(there)} in the checkpoint"


def _group(number: int | None) -> str:
    return "not trained" if number is None else f"parameter group {number}"


def _warn(engine: run_state.TrainedEngine, saved: RankManifest) -> None:
    here = run_state.settings_of(engine)
    for key in [key for key in here if key in saved.settings and here[key] != saved.settings[key]]:
        accelerator.log(
            f"ds_vertical: warning: {key} is {here[key]}, and was {saved.settings[key]} when the checkpoint was saved: the bits"
            " of a run that did not stop are not promised"
        )


# ---- bytes


class _Source(Protocol):
    """One rank's share of a checkpoint. `path`: what was loaded, for the caller."""

    path: Path
    has_random: bool  # states of generators

    @property
    def saved(self) -> RankManifest:
        """What there is."""
        ...

    def verify(self) -> None:
        """Raise CheckpointError unless all of it is as it was saved."""

    def loose(self) -> run_state.LooseEnds:
        """What is neither parameters nor their state. Raises CheckpointError, StorageError."""
        ...

    def read(self, name: str, kind: str, target: torch.Tensor, first: int) -> None:
        """Fill `target` (1-d, host memory, contiguous, the kind's dtype) with elements from `first` on."""


class _OwnSource:
    """Of ours: shares of tensors out of a rank's folder, by parameter and kind."""

    has_random = True

    def __init__(self, tag_folder: Path) -> None:
        self._tag_folder, self.path = tag_folder, tag_folder / manifest.NAME
        self.saved = manifest.read_rank(tag_folder, ranks.rank())
        self._folder = manifest.rank_folder(tag_folder, self.saved.rank)

    def verify(self) -> None:
        """By sizes and checksums."""
        manifest.check_manifest(self._tag_folder, self.saved)

    def loose(self) -> run_state.LooseEnds:
        """From a file of its own."""
        return _read_loose(self._folder / LOOSE)

    def read(self, name: str, kind: str, target: torch.Tensor, first: int) -> None:
        """From the file ranges that the manifest names."""
        view = _bytes_of(target)
        start = first * target.element_size()
        for found in self.saved.tensors[name].places[kind]:
            inside = max(0, start)
            count = min(found.num_bytes - inside, len(view))
            if count > 0:
                self._read_range(found, inside, view[:count])
                view = view[count:]
            start -= found.num_bytes
        if view:
            raise CheckpointError(f"{self._folder}: {kind} of {name} is {len(view)} bytes short")

    def _read_range(self, found: FileRange, inside: int, view: memoryview) -> None:
        _fill(self._folder / found.file, found.offset + inside, view)


def _read_loose(path: Path) -> run_state.LooseEnds:
    """Raises CheckpointError for a file that is none or would have to be unpickled, StorageError where it cannot be read."""
    try:
        with files.naming(path, "read"), os.fdopen(open_regular(path), "rb") as file:
            return torch.load(file, weights_only=True, map_location="cpu")
    except StorageError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than tensors, numbers, strings and collections of these, which no save of ours writes, and is"
            " not unpickled: that can run anything"
        ) from error
    except Exception as error:  # of many types, by what torch finds in a file that it has not written
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path}: cannot be loaded ({type(error).__name__}: {reason}); take another tag") from error


class _Loading:
    """One rank's share of a load."""

    def __init__(self, engine: run_state.TrainedEngine, source: _Source, wanted: Wanted) -> None:
        self._engine = engine
        self._optimizer = engine.optimizer
        self._saved = source.saved
        self._wanted = wanted
        self._names = {id(param): name for name, param in engine.module.named_parameters()}
        self._reader = source
        self._loose = source.loose()

    def loose_faults(self) -> list[str]:
        """What of the loose ends could not be put back: none, others than they must be, or of another model."""
        wanted = self._wanted
        run = wanted.run and self._reader.has_random
        return list(run_state.loose_faults(self._engine, self._loose, wanted.scheduler, run, wanted.strict))

    def make_room(self) -> None:
        """Have a file to write for every weight. Raises StorageError."""
        for shard in self._engine.param_store.files.shards():
            shard.make_room()

    def run(self) -> dict[str, Any]:
        """Put the saved state in the place of the live one. Returns the client state."""
        with torch.no_grad():
            self._load_weights()
            for index, chunk in enumerate(self._optimizer.stepper.chunks):
                if chunk.files is None:
                    self._load_resident(chunk)
                else:
                    self._load_files(chunk)
                if self._wanted.optimizer:
                    steps = {self._saved.tensors[self._names[id(param)]].step for param in chunk.params}
                    (zero_optimizer.moments(self._optimizer, index)["step"],) = steps
            run_state.set_buffers(self._engine, self._loose["buffers"])
        run_state.set_further_state(self._engine, self._loose if self._wanted.optimizer else None)
        if self._wanted.optimizer:
            run_state.set_optimizer(self._engine, self._saved.numbers)
        if self._wanted.scheduler and self._engine.lr_scheduler is not None:
            self._engine.lr_scheduler.load_state_dict(self._loose["lr_scheduler"])
        if self._wanted.run:
            run_state.set_counters(self._engine, self._saved.numbers)
            if self._reader.has_random:
                run_state.set_random_states(self._loose)
        return self._loose["client_state"]

    def _load_weights(self) -> None:
        shard_files = self._engine.param_store.files
        on_ssd = {id(shard.param): shard for shard in shard_files.shards()}
        for param in self._engine.module.parameters():
            name, shard = self._names[id(param)], on_ssd.get(id(param))
            if not self._is_saved(name):
                continue  # a frozen one, which the save left out, or one that the checkpoint does not know
            if shard is None:
                share = zero_params.shard(param)
                found = torch.empty(share.numel(), dtype=share.dtype)
                self._reader.read(name, "weight", found, 0)
                share.copy_(found)
                continue
            shard_files.note_writing([param])
            shard_files.note_write([param])
            elements = shard.num_bytes // param.element_size()
            with _Writer(Path(shard.path), self._optimizer.checksums) as writer:
                for first in range(0, elements, _PIECE):
                    piece = torch.zeros(min(_PIECE, elements - first), dtype=param.dtype)
                    count = min(piece.numel(), shard.numel - first)
                    if count > 0:
                        self._reader.read(name, "weight", piece[:count], first)
                    writer.write(first * param.element_size(), piece)

    def _is_saved(self, name: str) -> bool:
        """Whether the checkpoint has the parameter's values."""
        return name in self._saved.tensors and "weight" in self._saved.tensors[name].places

    def _load_resident(self, chunk: Chunk) -> None:
        assert chunk.resident is not None
        for kind, flat in zip(self._wanted.kinds, chunk.resident(), strict=False):
            for param, share in zip(chunk.params, flat.narrow(0, 0, chunk.numel).split(list(chunk.sizes)), strict=True):
                if self._is_saved(self._names[id(param)]):
                    found = torch.empty(share.numel(), dtype=share.dtype)
                    self._read_state(param, kind, found, 0)
                    share.copy_(found)

    def _load_files(self, chunk: Chunk) -> None:
        """Generation 0 of the chunk, which holds all of its state after a `flush_state`, and is shared with no checkpoint."""
        assert chunk.files is not None
        stay = any(not self._is_saved(self._names[id(param)]) for param in chunk.params)  # some of it stays as it is
        for number, kind in enumerate(self._wanted.kinds):
            with _Writer(chunk.files[0][number], self._optimizer.checksums) as writer:
                for part in chunk.parts("all"):
                    extent = chunk.extents(part)[number]
                    state = torch.zeros(extent.num_bytes // FP32_BYTES, dtype=torch.float32)
                    if stay:
                        _fill(chunk.files[0][number], extent.offset, _bytes_of(state))
                    for param, first, in_part, count in chunk.overlaps(part):
                        if self._is_saved(self._names[id(param)]):
                            self._read_state(param, kind, state.narrow(0, in_part, count), first)
                    writer.write(extent.offset, state)

    def _read_state(self, param: ZeroParam, kind: str, target: torch.Tensor, first: int) -> None:
        name = self._names[id(param)]
        if kind in self._saved.tensors[name].places or kind != KINDS[0]:
            self._reader.read(name, kind, target, first)
            return
        weight = torch.empty(target.numel(), dtype=param.dtype)  # not trained when it was saved: the master is the weight
        self._reader.read(name, "weight", weight, first)
        target.copy_(weight)


class _Writer:
    """Writes a file of the run through the page cache, and keeps its checksums; on leaving, all is on the disk."""

    def __init__(self, path: Path, checksums: Checksums) -> None:
        self._path = path
        self._checksums = checksums
        self._fds: dict[str, int] = {}  # by the files that it consists of

    def __enter__(self) -> _Writer:
        with contextlib.ExitStack() as undo:
            for each in stripes.files_of(self._path):
                with files.naming(each, "open"):
                    self._fds[str(each)] = fd = held_folders.open_file(each, os.O_WRONLY | os.O_NOFOLLOW)
                undo.callback(os.close, fd)
            undo.pop_all()
        return self

    def write(self, offset: int, data: torch.Tensor) -> None:
        view = _bytes_of(data)
        self._checksums.note(self._path, offset, view)
        for span in stripes.stripes_of(self._path, offset, len(view)):
            part, place = view[span.start : span.start + span.num_bytes], span.offset
            with files.naming(span.path, "write"):
                while part:
                    count = os.pwrite(self._fds[span.path], part, place)
                    part, place = part[count:], place + count

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.ExitStack() as cleanup:
            for fd in self._fds.values():
                cleanup.callback(os.close, fd)
            for path, fd in self._fds.items() if kind is None else ():
                with files.naming(path, "sync"):
                    os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _fill(path: Path, position: int, view: memoryview) -> None:
    """Fill `view` with a file's bytes from `position` on. Raises CheckpointError where it ends too early, StorageError."""
    for span in stripes.stripes_of(path, position, len(view)):
        _fill_from(span, view[span.start : span.start + span.num_bytes])


def _fill_from(span: stripes.Stripe, view: memoryview) -> None:
    position = span.offset
    with files.naming(span.path, "read"), os.fdopen(held_folders.open_file(span.path), "rb", buffering=0) as file:
        while view:
            count = os.preadv(file.fileno(), [view], position)
            if not count:
                raise CheckpointError(f"{span.path}: ends at byte {position}")
            view, position = view[count:], position + count


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)
