"""The "vertical_schedule" section of a DeepSpeed JSON: its keys, and the check of it.

Imports neither torch nor deepspeed, so a JSON can be checked in milliseconds. Everything that is wrong with a
configuration is a `ConfigError` which names the JSON path, the value found and what to write instead; all faults
found are reported at once, one per line.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictStr, StringConstraints
from pydantic_core import ErrorDetails

from ds_vertical.errors import ConfigError
from ds_vertical.types import HOLDING, ActivationPolicy, Copies, Order, OutsideLayers, Tier

SECTION = "vertical_schedule"
SECOND_PLACE = f"zero_optimization.{SECTION}"  # where DeepSpeed without ds_vertical refuses the section instead of ignoring it


def _list_to_tuple(value: object) -> object:
    """JSON has only lists; the model is frozen and hashable, so it holds tuples."""
    return tuple(value) if isinstance(value, list) else value


def _bytes_to_text(value: object) -> object:
    """pydantic takes b"ssd" for the member of that value, which no JSON can hold: its text is refused like any other word."""
    return repr(value) if isinstance(value, bytes | bytearray) else value


DottedPath = Annotated[StrictStr, StringConstraints(pattern=r"^[^\s.]+(\.[^\s.]+)*$")]
NvmePath = Annotated[StrictStr, StringConstraints(pattern=r"\S")]
NvmePaths = Annotated[tuple[NvmePath, ...], BeforeValidator(_list_to_tuple), Field(min_length=1)]
LayerPaths = Annotated[tuple[DottedPath, ...], BeforeValidator(_list_to_tuple), Field(min_length=1)]


class Activations(BaseModel):
    """Where what passes between layers rests: inputs of layers for each micro-batch, and the gradients between two layers."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)

    device: Annotated[Tier, Field(strict=False), BeforeValidator(_bytes_to_text)] | None = None
    """The tier they go to. Null: "device", where they are made."""
    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the micro-batches that go there; the others stay on the device."""
    host_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """With "ssd": a further share of the micro-batches that goes to host memory."""
    keep: ActivationPolicy | None = None
    """What else of a layer's forward is kept for its backward, which computes the rest again. Null: chosen behind the first
    step, with `keep_device` and both shares; none where nothing is gained, or what decides it is not known."""
    keep_device: Annotated[Tier, Field(strict=False), BeforeValidator(_bytes_to_text)] | None = None
    """The tier where that rests until the backward. Null: chosen behind the first step, for a written `keep`, too; "device"
    where no plan can be made, and beside a `keep_host_share`."""
    keep_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the cells (one layer, one micro-batch) that keep, where `keep_device` says; the others compute all again."""
    keep_host_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """With "ssd" or "device": a further share of the cells, whose kept values rest in host memory."""


class Levels(BaseModel):
    """Collectives over the ranks of a node, and over the nodes."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)

    ranks_per_node: Annotated[int, Field(ge=1)] = 1
    """Ranks that share a copy of the weights; 1: one level. `prepare` moves `zero_optimization.zero_hpz_partition_size`
    here."""
    quantized_weights: bool = False
    """Whether weights cross the link as INT8. `prepare` moves `zero_optimization.zero_quantized_weights` here."""
    quantized_gradients: bool = False
    """Whether gradients travel quantised. `prepare` moves `zero_optimization.zero_quantized_gradients` here."""
    gradients: Annotated[int, Field(ge=1)] | None = None
    """Ranks that add their gradients before these cross the link: a multiple of the ranks of a node. Null: those of a host,
    where there are several hosts; else those of a node."""
    copy_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of the units that are fetched again in the backward, the share whose copy a node keeps in host memory. Null: as
    much as it has room for."""
    copy_on_device: bool = False
    """Keep copies of all units on the device instead, from one optimizer step to the next."""
    gradient_bits: Annotated[tuple[Literal[4, 8] | None, Literal[4, 8] | None], BeforeValidator(_list_to_tuple)] = (None, 4)
    """With quantised gradients, their bits within a node and across nodes. Null: as they are."""
    block: Annotated[int, Field(ge=2, multiple_of=2)] = 256
    """Neighbours that are quantised with one scale."""


class Elastic(BaseModel):
    """How many micro-batches each rank brings to a step."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)

    min_micro_batches: Annotated[int, Field(ge=1)] = 1
    """Of a rank, at least."""
    max_micro_batches: Annotated[int, Field(ge=1)] | None = None
    """Of a rank, at most. Null: what the least of the others leaves. The memory budget counts so many."""
    total: Annotated[int, Field(ge=1)] | None = None
    """Of all ranks together. Null: `gradient_accumulation_steps` for each."""
    counts: Annotated[StrictStr, StringConstraints(min_length=1)] | None = None
    """The log of a run, whose counts are taken again. Null: by the measured seconds of a micro-batch."""


class Acco(BaseModel):
    """Two halves a step: one half computes while the gradients of the other one travel, and are stepped."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)

    copies: Copies = "rank"
    """Who keeps the two copies of the weights: each rank whole ones, or the ranks of a node together."""


class OnSignal(BaseModel):
    """The checkpoint to save when SIGTERM or SIGINT asks the run to end."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)

    save_dir: Annotated[StrictStr, StringConstraints(min_length=1)]
    """The folder, as `save_checkpoint` takes it."""
    tag: Annotated[StrictStr, StringConstraints(min_length=1)] | None = None
    """Null: `global_step<n>`."""


class VerticalConfig(BaseModel):
    """The section as written. `None` means "choose for me" (see `resolve`); the string "auto" is refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)

    enabled: bool = True
    """Layer-major training; false: the stock arm. That arm is a plain DeepSpeedEngine with the same train_batch."""
    order: Order = "vertical"
    """Walk layer by layer (vertical) or micro-batch by micro-batch (horizontal)."""
    layers: LayerPaths | None = None
    """Dotted paths of the stacks of blocks; null: discovered in the model."""
    blocks_per_layer: Annotated[int, Field(ge=1)] = 1
    """Consecutive blocks that the schedule moves as one layer."""
    snake: bool = False
    """Reverse the order of micro-batches at every second layer. Vertical order only."""
    overlap: bool = True
    """False: wait for every transfer where it is issued; same values. The debugging oracle."""
    prefetch_layers: Annotated[int, Field(ge=0)] | None = None
    """Layers read ahead of their use; null: 1, or 0 without overlap."""
    optimizer_delay: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of each layer stepped in the next forward; null: chosen. Null is 0.25 where the rest can be stepped during the
    backward (no clipping, static loss scale, optimizer on SSD), else 1. With clipping or a dynamic loss scale,
    and no speculation, nothing is known before the norm: then any share above 0 delays the whole step."""
    optimizer_speculation: bool | None = None
    """Step before the norm is known; null: by recent norms. A step whose norm asks for clipping is redone. Null:
    where it would lately have come true, if there is room on the SSD for a second generation of files."""
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """Skip a step that is not finite, or stop the run. skip: the whole step, as in stock. stop: train_batch raises
    NonFiniteError on every rank. Without clipping the early steps are then taken in place, with one generation of files
    (14 bytes per parameter less on the SSD), so that the live state is torn afterwards. Not with a dynamic loss scale."""
    gradient_host_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of waiting gradients kept in host memory; null: what fits. The others wait on SSD, written and read once."""
    optimizer_host_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of optimizer state on nvme kept in host memory; null: chosen. Whole parameters, spread evenly over the layers.
    Their steps wait for the norm."""
    optimizer_read_ahead_bytes: Annotated[int, Field(ge=0)] | None = None
    """Memory for state read before the norm; null: half of host_memory_bytes' rest. At most so many bytes for each rank; 0:
    state is read into the pipeline's few slots alone. For steps that wait for the norm: with clipping, a dynamic loss scale."""
    optimizer_compression: bool = False
    """Store half of each fp32 master; its bf16 parameter has the rest. Same bits, 2 bytes a parameter fewer written and,
    of what is stepped in the backward, read. One rank on the CPU, bf16, parameters and optimizer state on nvme."""
    keep_gradients: bool = False
    """Keep the last step's gradients for safe_get_full_grad and safe_get_local_grad. They stay in host memory (4 bytes per
    parameter) until the next step sums new ones."""
    host_memory_bytes: Annotated[int, Field(ge=1)] | None = None
    """Host memory for all ranks of a host; null: what is available. Checked before anything is allocated."""
    outside_layers: OutsideLayers = "resident"
    """Embedding and head: on the device all step, or fetched where used. "fetched": what the code ahead of the first layer uses
    is there for that code, what the code behind the last layer uses for that one. Same values."""
    nvme_paths: NvmePaths | None = None
    """Folders on several SSDs, nvme_path the first; null: nvme_path alone. Each file is spread over all of them."""
    activations: Activations = Activations()
    """Where layer inputs and gradients between layers rest; what is kept."""
    levels: Levels = Levels()
    """Collectives over the ranks of a node, then over the nodes."""
    elastic: Elastic | None = None
    """Give faster ranks more micro-batches; null: all bring as many. Vertical order only."""
    acco: Acco | None = None
    """Compute half a step while the other half's weights travel; not exact. Null: exact steps. State in host memory."""
    seed_micro_batches: bool = True
    """Give each micro-batch a random stream of its own, in both arms. From (seed, step, micro-batch, rank)."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    """Base of the micro-batches' random streams; null: torch.initial_seed(). As it is at initialize."""
    trace: Annotated[StrictStr, StringConstraints(min_length=1)] | None = None
    """Folder for each step's spans, waits and counters; null: off. One JSONL file per rank (`trace.py`)."""
    progress: bool | None = None
    """Show a progress line on rank 0; null: on a terminal. It has tokens/s, fraction of the bound, busiest resource."""
    verify: bool = False
    """Check each read against the checksum taken when it was written. Of optimizer state, parameters, waiting gradients."""
    self_check: bool | None = None
    """Compare two micro-batches with torch's own order before the first step. Where outputs, losses or gradients differ
    from the schedule's, the run ends. Null: at the start of a run, and after a resume with another model."""
    on_signal: OnSignal | None = None
    """Save a checkpoint when SIGTERM or SIGINT ends the run. It ends between two steps. Null: at once, without one."""


_NESTED: Mapping[str, type[BaseModel]] = {
    "activations": Activations,
    "levels": Levels,
    "elastic": Elastic,
    "acco": Acco,
    "on_signal": OnSignal,
}

# What each key accepts, and an example; the start of the error for a wrong value.
_EXPECTED: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("enabled", "overlap", "seed_micro_batches"), ("true or false", "true")),
    **dict.fromkeys(("snake", "optimizer_compression", "keep_gradients", "verify"), ("true or false", "false")),
    **dict.fromkeys(("optimizer_speculation", "progress", "self_check"), ("true, false or null", "null")),
    "order": ('"vertical" or "horizontal"', '"vertical"'),
    "layers": ("null (discover) or a list with at least one dotted module path", '["model.layers"] or null'),
    "blocks_per_layer": ("an integer >= 1", "1"),
    "prefetch_layers": ("an integer >= 0, or null", "1 or null"),
    "optimizer_delay": ("a number from 0 to 1, or null", "1 or null"),
    "on_nonfinite": ('"skip" or "stop"', '"skip"'),
    "gradient_host_share": ("a number from 0 to 1, or null", "0.5 or null"),
    "optimizer_host_share": ("a number from 0 to 1, or null", "0.5 or null"),
    "optimizer_read_ahead_bytes": ("an integer >= 0, or null (half of what host_memory_bytes leaves)", "4000000000 or null"),
    "host_memory_bytes": ("an integer >= 1, or null (what the machine has)", "32000000000 or null"),
    "outside_layers": ('"resident" or "fetched"', '"fetched"'),
    "nvme_paths": ("null or a list of folders, one on each SSD, the first as in nvme_path", '["/ssd0", "/ssd1"] or null'),
    "activations": (
        'an object with "device", "share", "host_share", "keep", "keep_device", "keep_share", "keep_host_share"',
        '{"device": "ssd"}',
    ),
    "activations.device": (", ".join(f'"{tier}"' for tier in Tier) + " or null", '"ssd"'),
    "activations.share": ("a number from 0 to 1", "0.5"),
    "activations.host_share": ("a number from 0 to 1", "0.25"),
    "activations.keep": (", ".join(f'"{policy}"' for policy in get_args(ActivationPolicy)) + " or null", '"everything"'),
    "activations.keep_device": (", ".join(f'"{tier}"' for tier in Tier) + " or null", '"ssd"'),
    "activations.keep_share": ("a number from 0 to 1", "0.5"),
    "activations.keep_host_share": ("a number from 0 to 1", "0.25"),
    "levels": (f"an object with {', '.join(map(json.dumps, Levels.model_fields))}", '{"copy_share": 0.5}'),
    "levels.ranks_per_node": ("an integer >= 1", "2"),
    **dict.fromkeys(("levels.quantized_weights", "levels.quantized_gradients"), ("true or false", "false")),
    "levels.gradients": ("an integer >= 1, or null", "4 or null"),
    "levels.copy_share": ("a number from 0 to 1, or null", "0.5 or null"),
    "levels.copy_on_device": ("true or false", "false"),
    "levels.gradient_bits": ("two of null, 4 and 8: within a node, and across nodes", "[null, 4]"),
    "levels.block": ("an even integer >= 2", "256"),
    "elastic": (
        'an object with "min_micro_batches", "max_micro_batches", "total", "counts", or null',
        '{"min_micro_batches": 2} or null',
    ),
    "elastic.min_micro_batches": ("an integer >= 1", "1"),
    "elastic.max_micro_batches": ("an integer >= 1, or null", "32 or null"),
    "elastic.total": ("an integer >= 1, or null (gradient_accumulation_steps of each rank)", "64 or null"),
    "elastic.counts": ("the path of a run's log, or null (by measured seconds)", '"runs/train.log" or null'),
    "acco": ('an object with "copies", or null (exact steps)', '{"copies": "rank"} or null'),
    "acco.copies": (" or ".join(f'"{each}"' for each in get_args(Copies)), '"rank"'),
    "seed": ("an integer >= 0 and < 2^64, or null", "1234 or null"),
    "trace": ("the path of a folder, or null (off)", '"runs/trace" or null'),
    "on_signal": ('an object with "save_dir" and "tag", or null', '{"save_dir": "checkpoints"} or null'),
    "on_signal.save_dir": ("the path of a folder", '"checkpoints"'),
    "on_signal.tag": ("a name, or null (global_step<n>)", '"signal" or null'),
}


# --- the section ---------------------------------------------------------------------------------------------------


def with_section_on_top(config: Mapping[str, object]) -> dict[str, object]:
    """A shallow copy of a whole DeepSpeed configuration; a section inside `zero_optimization` stands at the top level in it.

    So DeepSpeed ignores the section, and our readers have one place to look at. Raises ConfigError where both have one.
    """
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping) or SECTION not in zero:
        return dict(config)
    if SECTION in config:
        raise ConfigError(
            f"{SECTION} and {SECOND_PLACE}: got {show(config[SECTION])} and {show(zero[SECTION])}; the section has two places,"
            " and one of them is enough; remove the one at the top level"
        )
    kept = {key: value for key, value in zero.items() if key != SECTION}
    return {**config, "zero_optimization": kept, SECTION: zero[SECTION]}


def load_section(config: Mapping[str, object]) -> VerticalConfig | None:
    """The validated section of a whole DeepSpeed configuration, from either of its two places, or None where it has none.

    Raises ConfigError for unknown keys, wrong values, a section in both places, and keys that look like its misspelt name.
    """
    config = with_section_on_top(config)
    _refuse_near_misses(config)
    if SECTION not in config:
        return None
    section = config[SECTION]
    if not isinstance(section, Mapping):
        hint = f'{{"enabled": {show(section)}}}' if isinstance(section, bool) else '{} or {"enabled": true}'
        raise ConfigError(f"{SECTION}: got {show(section)}; need an object; write e.g. {hint}, or leave it out")
    try:
        parsed = VerticalConfig.model_validate(dict(section))
    except pydantic.ValidationError as error:
        # A union reports one error per branch; the user needs one line per key.
        lines = {_section_path(detail): _section_fault(detail) for detail in error.errors()}
        raise ConfigError("\n".join(lines.values())) from None
    _refuse_repeated_layers(parsed)
    _refuse_fetched_in_turn(parsed)
    _refuse_shares(parsed.activations)
    _refuse_idle_tier(parsed.activations)
    _refuse_keep_shares(parsed.activations)
    _refuse_elastic(parsed)
    return parsed


def _section_path(detail: ErrorDetails) -> str:
    path, known = SECTION, [*VerticalConfig.model_fields]
    for part in detail["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in known or len(detail["loc"]) == 1 or path.removeprefix(f"{SECTION}.") in _NESTED:
            path += f".{part}"
            known = [*_NESTED[part].model_fields] if part in _NESTED else []
    return path


def _section_fault(detail: ErrorDetails) -> str:
    path = _section_path(detail)
    key = re.sub(r"\[.*", "", path.removeprefix(f"{SECTION}."))
    if detail["type"] == "extra_forbidden":
        known = list(_NESTED.get(key.partition(".")[0] if "." in key else "", VerticalConfig).model_fields)
        near = difflib.get_close_matches(key.rpartition(".")[2].lower(), known, n=1, cutoff=0.5)
        guess = f'did you mean "{near[0]}"? ' if near else ""
        return f"{path}: unknown key; {guess}known keys: {', '.join(known)}"
    need, example = _EXPECTED[key]
    auto = ' ("auto" is not a value here: null or no key at all means "choose for me")'
    return f"{path}: got {show(detail['input'])}{auto if detail['input'] == 'auto' else ''}; need {need}; " + (
        f"write e.g. {example}"
    )


def _refuse_repeated_layers(section: VerticalConfig) -> None:
    paths = section.layers or ()
    repeated = sorted({path for path in paths if paths.count(path) > 1})
    if repeated:
        raise ConfigError(f"{SECTION}.layers: got {show(repeated[0])} more than once; write each path once")


def _refuse_fetched_in_turn(section: VerticalConfig) -> None:
    if section.outside_layers == "fetched" and section.order == "horizontal":
        raise ConfigError(
            f'{SECTION}.outside_layers: got "fetched" with order "horizontal", in which every micro-batch uses both ends of the'
            ' model in turn; write "resident" or null, or "order": "vertical"'
        )


def _refuse_shares(activations: Activations) -> None:
    path, device = f"{SECTION}.activations", activations.device
    default = Activations()
    shares = [key for key in ("share", "host_share") if getattr(activations, key) != getattr(default, key)]
    if device in (None, Tier.DEVICE) and shares:
        raise ConfigError(
            f"{path}.{shares[0]}: got {show(getattr(activations, shares[0]))} with device {show(device)}, where"
            ' nothing is moved; remove it, or write "device": "ssd" or "host"'
        )
    if device is Tier.HOST and activations.host_share:
        raise ConfigError(f'{path}.host_share: got {activations.host_share} with device "host"; write "share" instead')
    if activations.host_share and activations.share + activations.host_share > 1:
        written = "" if "share" in shares else " (the default)"
        raise ConfigError(
            f"{path}.share: got {activations.share}{written} with host_share {activations.host_share}, more than"
            f" all micro-batches; write {round(1 - activations.host_share, 9)} or less"
        )


def _refuse_idle_tier(activations: Activations) -> None:
    """A tier for what is kept, where nothing is."""
    keep, device = activations.keep, activations.keep_device
    if device is None or keep in HOLDING:
        return
    why = "which keeps no bytes" if keep == "free" else "with which nothing is kept"
    raise ConfigError(
        f"{SECTION}.activations.keep_device: got {show(device)} with keep {show(keep)}, {why}; remove it, or write"
        ' "keep": "products" or "everything"'
    )


def _refuse_keep_shares(activations: Activations) -> None:
    """Shares of the cells that keep, where none do, or more than all would."""
    keep, device, share, host_share = (getattr(activations, f"keep{end}") for end in ("", "_device", "_share", "_host_share"))
    path, default = f"{SECTION}.activations", Activations()
    written = [key for key in ("keep_share", "keep_host_share") if getattr(activations, key) != getattr(default, key)]
    if keep in (None, "none") and written:
        why = "which chooses the share, too" if keep is None else "with which nothing is kept"
        raise ConfigError(
            f"{path}.{written[0]}: got {show(getattr(activations, written[0]))} with keep {show(keep)}, {why}; remove it, or"
            ' write "keep": "products" or "everything"'
        )
    if host_share and keep not in HOLDING:
        raise ConfigError(f"{path}.keep_host_share: got {host_share} with keep {show(keep)}, which keeps no bytes; remove it")
    if host_share and device is Tier.HOST:
        raise ConfigError(f'{path}.keep_host_share: got {host_share} with keep_device "host"; write "keep_share" instead')
    if share + host_share > 1 + 1e-9:
        told = "" if "keep_share" in written else " (the default)"
        raise ConfigError(
            f"{path}.keep_share: got {share}{told} with keep_host_share {host_share}, more than all cells; write"
            f" {round(1 - host_share, 9)} or less"
        )


def _refuse_elastic(section: VerticalConfig) -> None:
    """Bounds of which the least is the larger one, and the order in which collectives depend on the micro-batches."""
    elastic, path = section.elastic, f"{SECTION}.elastic"
    if elastic is None:
        return
    least, most = elastic.min_micro_batches, elastic.max_micro_batches
    if most is not None and least > most:
        raise ConfigError(
            f"{path}.min_micro_batches: got {least} with max_micro_batches {most}; write {most} or less, or"
            f' "max_micro_batches": {least}'
        )
    if section.order == "horizontal":
        raise ConfigError(
            f'{path}: got {show(elastic.model_dump(exclude_unset=True))} with order "horizontal", in which each micro-batch'
            ' gathers the weights anew; remove it, or write "order": "vertical"'
        )


def _refuse_near_misses(config: Mapping[str, object]) -> None:
    """DeepSpeed ignores unknown top-level keys, so a misspelt section would silently train the stock arm."""
    faults = [
        f'{key}: unknown section; did you mean "{SECTION}"? Rename it (DeepSpeed would silently ignore it)'
        for key in config
        if _resembles_section(key)
    ]
    zero = config.get("zero_optimization")
    if isinstance(zero, Mapping):
        nested = [key for key in zero if _resembles_section(key)]
        faults += [f'zero_optimization.{key}: unknown section; did you mean "{SECTION}"? Rename it' for key in nested]
        faults += [
            f'zero_optimization.{key}: unknown section; did you mean "{near}"? Rename it'
            for key in zero
            for near in ("offload_param", "offload_optimizer")
            if _resembles_offload(key, near)
        ]
    if faults:
        raise ConfigError("\n".join(faults))


@functools.lru_cache(maxsize=1024)
def _resembles_section(key: object) -> bool:
    if not isinstance(key, str) or key == SECTION:
        return False
    letters, wanted = _letters(key), _letters(SECTION)
    if letters in ("vertical", "dsvertical") or ("vert" in letters and "sched" in letters):
        return True
    if letters.startswith("layermajor"):  # what the schedule is, by another name
        return True
    return difflib.SequenceMatcher(None, letters, wanted).ratio() >= 0.8


@functools.lru_cache(maxsize=1024)
def _resembles_offload(key: object, name: str) -> bool:
    if not isinstance(key, str) or key == name:
        return False
    letters, wanted = _letters(key), _letters(name)
    return letters.startswith(wanted) or difflib.SequenceMatcher(None, letters, wanted).ratio() >= 0.9


def _letters(key: str) -> str:
    return re.sub(r"[^a-z]", "", key.lower())


def is_count(value: object) -> bool:
    """Whether DeepSpeed's lax pydantic models read a value as an integer from 0 on."""
    try:
        return pydantic.TypeAdapter(int).validate_python(value) >= 0
    except pydantic.ValidationError:
        return False


def show(value: object) -> str:
    """A value as JSON, for messages, cut at 80 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
