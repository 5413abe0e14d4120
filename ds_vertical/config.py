"""The "vertical_schedule" section of a DeepSpeed JSON: reading, validating, cross-checking, resolving.

Imports neither torch nor deepspeed, so a JSON can be checked in milliseconds. Everything that is wrong with a
configuration is a `ConfigError` which names the JSON path, the value found and what to write instead; all faults
found are reported at once, one per line.
"""

from __future__ import annotations

import base64
import binascii
import copy
import difflib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictStr, StringConstraints

SECTION = "vertical_schedule"
MAX_IN_CPU_DEFAULT = 1_000_000_000  # elements; DeepSpeed 0.19.8, runtime/zero/offload_config.py


class ConfigError(ValueError):
    """A configuration that cannot run as written. One fault per line: JSON path, value got, what to write instead."""


def _list_to_tuple(value: Any) -> Any:
    """JSON has only lists; the model is frozen and hashable, so it holds tuples."""
    return tuple(value) if isinstance(value, list) else value


DottedPath = Annotated[StrictStr, StringConstraints(pattern=r"^[^\s.]+(\.[^\s.]+)*$")]
LayerPaths = Annotated[tuple[DottedPath, ...], BeforeValidator(_list_to_tuple), Field(min_length=1)]


class VerticalConfig(BaseModel):
    """The section as written. `None` means "choose for me" (see `resolve`); the string "auto" is refused."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)

    enabled: bool = True
    """False: the stock arm, a plain DeepSpeedEngine with the same train_batch."""
    order: Literal["vertical", "horizontal"] = "vertical"
    """vertical: all micro-batches of a layer before the next layer; horizontal: all layers of a micro-batch first."""
    layers: LayerPaths | None = None
    """Dotted paths of the layers' modules. Null: discovered in the model."""
    blocks_per_layer: Annotated[int, Field(ge=1)] = 1
    """Consecutive blocks that the schedule moves as one layer."""
    snake: bool = False
    """Reverse the order of micro-batches from one layer to the next (vertical order only)."""
    overlap: bool = True
    """False: every transfer is waited for right after it is issued; the debugging oracle, same values."""
    prefetch_layers: Annotated[int, Field(ge=0)] | None = None
    """Layers whose fetch is issued ahead of use. Null: 1 with overlap, 0 without."""
    seed_micro_batches: bool = True
    """Give each micro-batch its own random stream from (seed, step, micro-batch, rank), in both arms."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    """Seed of these streams. Null: torch.initial_seed() at initialize."""


# What each key accepts, and an example; the start of the error for a wrong value.
_EXPECTED: Mapping[str, tuple[str, str]] = {
    "enabled": ("true or false", "true"),
    "order": ('"vertical" or "horizontal"', '"vertical"'),
    "layers": ("null (discover) or a list with at least one dotted module path", '["model.layers"] or null'),
    "blocks_per_layer": ("an integer >= 1", "1"),
    "snake": ("true or false", "false"),
    "overlap": ("true or false", "true"),
    "prefetch_layers": ("an integer >= 0, or null", "1 or null"),
    "seed_micro_batches": ("true or false", "true"),
    "seed": ("an integer >= 0 and < 2^64, or null", "1234 or null"),
}


# --- reading -------------------------------------------------------------------------------------------------------


def read_config(config: dict[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """The DeepSpeed configuration as a dict of the caller's own.

    Accepts what deepspeed.initialize does: a dict (deep-copied), the path of a JSON file (comments allowed, as hjson
    reads them) or base64 of JSON (url-safe or standard alphabet). Raises ConfigError, also on duplicate keys.
    """
    if isinstance(config, dict):
        return copy.deepcopy(config)
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(
            f"config: got a {type(config).__name__}; need a dict, the path of a JSON file, or base64 of JSON"
        )
    if os.path.exists(config):
        return _read_file(Path(config))
    if not isinstance(config, str):
        raise ConfigError(f"config: {os.fspath(config)}: no such file; write the path of a DeepSpeed JSON")
    return _read_base64(config)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise ConfigError(f"duplicate keys {', '.join(map(_show, repeated))}; keep one of each")
    return dict(pairs)


def _parse(text: str, source: str, comments: bool) -> dict[str, Any]:
    try:
        parsed = json.loads(text, object_pairs_hook=_unique_pairs)
    except json.JSONDecodeError as error:
        parsed = _parse_hjson(text) if comments else None
        if parsed is None:
            raise ConfigError(
                f"{source}: not valid JSON: {error.msg} at line {error.lineno} column {error.colno}; mend it there"
            ) from error
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f'{source}: got {_show(parsed)}; need one JSON object, e.g. {{"zero_optimization": ...}}')
    return parsed


def _parse_hjson(text: str) -> Any:
    """DeepSpeed reads files with hjson, so comments and trailing commas that run under stock must run here too."""
    import hjson  # a dependency of deepspeed

    try:
        return hjson.loads(text, object_pairs_hook=_unique_pairs)
    except hjson.HjsonDecodeError:
        return None  # the caller reports the position that the JSON parser found


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read it: {error}; write the path of a readable UTF-8 JSON file") from error
    return _parse(text, str(path), comments=True)


def _read_base64(config: str) -> dict[str, Any]:
    shown = config if len(config) <= 60 else config[:60] + "..."
    compact = "".join(config.split()).replace("-", "+").replace("_", "/")
    try:
        text = base64.b64decode(compact, validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ConfigError(
            f'config: "{shown}" is neither an existing file nor base64 of JSON ({error}); write the path of a '
            "DeepSpeed JSON, a dict, or base64.urlsafe_b64encode of its text"
        ) from error
    return _parse(text, f'config: "{shown}" is no file; read as base64', comments=False)


# --- the section ---------------------------------------------------------------------------------------------------


def load_section(config: Mapping[str, Any]) -> VerticalConfig | None:
    """The validated section of a whole DeepSpeed configuration, or None where it has none.

    Raises ConfigError for unknown keys, wrong values, and top-level keys that look like a misspelt section name.
    """
    _refuse_near_misses(config)
    if SECTION not in config:
        return None
    section = config[SECTION]
    if not isinstance(section, Mapping):
        hint = f'{{"enabled": {_show(section)}}}' if isinstance(section, bool) else '{} or {"enabled": true}'
        raise ConfigError(f"{SECTION}: got {_show(section)}; need an object; write e.g. {hint}, or leave it out")
    try:
        parsed = VerticalConfig.model_validate(dict(section))
    except pydantic.ValidationError as error:
        # A union reports one error per branch; the user needs one line per key.
        lines = {_section_path(detail): _section_fault(detail) for detail in error.errors()}
        raise ConfigError("\n".join(lines.values())) from None
    _refuse_repeated_layers(parsed)
    return parsed


def _section_path(detail: Mapping[str, Any]) -> str:
    path = SECTION
    for part in detail["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in VerticalConfig.model_fields or len(detail["loc"]) == 1:
            path += f".{part}"
    return path


def _section_fault(detail: Mapping[str, Any]) -> str:
    path, key = _section_path(detail), str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        known = list(VerticalConfig.model_fields)
        near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.5)
        guess = f'did you mean "{near[0]}"? ' if near else ""
        return f"{path}: unknown key; {guess}known keys: {', '.join(known)}"
    need, example = _EXPECTED[key]
    auto = ' ("auto" is not a value here: null or no key at all means "choose for me")'
    return f"{path}: got {_show(detail['input'])}{auto if detail['input'] == 'auto' else ''}; need {need}; " + (
        f"write e.g. {example}"
    )


def _refuse_repeated_layers(section: VerticalConfig) -> None:
    paths = section.layers or ()
    repeated = sorted({path for path in paths if paths.count(path) > 1})
    if repeated:
        raise ConfigError(f"{SECTION}.layers: got {_show(repeated[0])} more than once; write each path once")


def _refuse_near_misses(config: Mapping[str, Any]) -> None:
    """DeepSpeed ignores unknown top-level keys, so a misspelt section would silently train the stock arm."""
    faults = [
        f'{key}: unknown section; did you mean "{SECTION}"? Rename it (DeepSpeed would silently ignore it)'
        for key in config
        if _resembles_section(key)
    ]
    zero = config.get("zero_optimization")
    if isinstance(zero, Mapping):
        nested = [key for key in zero if key == SECTION or _resembles_section(key)]
        faults += [f'zero_optimization.{key}: "{SECTION}" belongs at the top level; move it there' for key in nested]
    if faults:
        raise ConfigError("\n".join(faults))


def _resembles_section(key: Any) -> bool:
    if not isinstance(key, str) or key == SECTION:
        return False
    letters, wanted = re.sub(r"[^a-z]", "", key.lower()), SECTION.replace("_", "")
    if letters in ("vertical", "dsvertical") or ("vertical" in letters and "sched" in letters):
        return True
    return difflib.SequenceMatcher(None, letters, wanted).ratio() >= 0.8


# --- values in the rest of the JSON --------------------------------------------------------------------------------


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _get(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where absent, null, or "auto" (the Hugging Face trainer fills it in later)."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or value.get(key) is None:
            return None
        value = value[key]
    return None if isinstance(value, str) and value == "auto" else value


def _true(value: Any) -> bool:
    """As DeepSpeed's lax pydantic models read a flag, strings included."""
    if isinstance(value, str):
        return value.lower() in ("1", "true", "t", "yes", "y", "on")
    return bool(value)


def _false(value: Any) -> bool:
    return not _true(value)


def _present(value: Any) -> bool:
    return value is not None


def _filled(value: Any) -> bool:
    return bool(value)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _above_one(value: Any) -> bool:
    return _number(value) > 1


def _not_one(value: Any) -> bool:
    return _number(value) != 1


@dataclass(frozen=True)
class _Refusal:
    """A setting that the vertical arm refuses: where, when, why, and what to write instead."""

    path: str
    refuses: Callable[[Any], bool]
    why: str
    remedy: str


_OFF = "write false or remove it"
_REMOVE = "remove it"
_REMOVED = "DeepSpeed 0.19.8 has removed this"
_ADAM = "the step is DeepSpeed's CPU Adam with fp32 state"
_ZERO = "zero_optimization"
_PLAIN = "only plain ZeRO-3 partitions are fetched layer by layer"
_REDUCE = "each layer's gradient sum is reduced once, as an unscaled mean"
_PARALLEL = "only data parallelism is supported"
_REFUSALS = (
    _Refusal(f"{_ZERO}.zenflow", _present, "ZenFlow's delayed updates are not exact", _REMOVE),
    _Refusal(f"{_ZERO}.zero_hpz_partition_size", _above_one, _PLAIN, "write 1 or remove it"),
    _Refusal(f"{_ZERO}.zero_quantized_weights", _true, _PLAIN, _OFF),
    _Refusal(f"{_ZERO}.zero_quantized_nontrainable_weights", _true, _PLAIN, _OFF),
    _Refusal(f"{_ZERO}.zero_quantized_gradients", _true, _REDUCE, _OFF),
    _Refusal(f"{_ZERO}.offload_optimizer.super_offload", _true, "SuperOffload replaces the optimizer", _OFF),
    _Refusal(f"{_ZERO}.offload_optimizer.ratio", _not_one, "the whole step runs on the host", "write 1.0 or remove it"),
    _Refusal("optimizer.params.torch_adam", _true, _ADAM, _OFF),
    _Refusal("optimizer.legacy_fusion", _true, _ADAM, _OFF),
    _Refusal("bf16.bf16_master_weights_and_grads", _true, _ADAM, _OFF),
    _Refusal("bf16.bf16_optimizer_states", _true, _ADAM, _OFF),
    _Refusal("bfloat16.bf16_master_weights_and_grads", _true, _ADAM, _OFF),
    _Refusal("bfloat16.bf16_optimizer_states", _true, _ADAM, _OFF),
    _Refusal("fp16.fp16_master_weights_and_grads", _true, _ADAM, _OFF),
    _Refusal("managed_gradient_accumulation", _false, "train_batch owns the boundary", "write true or remove it"),
    _Refusal("prescale_gradients", _true, _REDUCE, _OFF),
    _Refusal("gradient_predivide_factor", _not_one, _REDUCE, "write 1.0 or remove it"),
    _Refusal("gradient_allreduce_op", lambda v: str(v).lower() != "mean", _REDUCE, 'write "mean" or remove it'),
    _Refusal("hybrid_engine.enabled", _true, "the hybrid engine replaces VerticalEngine", _OFF),
    _Refusal("compile.deepcompile", _true, "DeepCompile schedules the layers itself", _OFF),
    _Refusal("pipeline", _filled, "pipeline parallelism schedules micro-batches itself", _REMOVE),
    _Refusal("tensor_parallel.autotp_size", _above_one, _PARALLEL, "write 0 or remove the section"),
    _Refusal("tensor_parallel.tp.tp_size", _above_one, _PARALLEL, "write 1 or remove the section"),
    _Refusal("tensor_parallel.tensor_parallel.tp_size", _above_one, _PARALLEL, "write 1 or remove the section"),
    _Refusal("expert_parallel.enabled", _true, _PARALLEL, _OFF),
    _Refusal("sequence_parallel_size", _above_one, _PARALLEL, "write 1 or remove it"),
    _Refusal("data_efficiency.enabled", _true, "it changes the batches inside stock's forward", _OFF),
    _Refusal("amp", _present, f"{_REMOVED} (Apex)", 'remove it; use "bf16", "fp16" or "torch_autocast"'),
    _Refusal("curriculum_learning", _present, _REMOVED, _REMOVE),
    _Refusal("progressive_layer_drop", _present, _REMOVED, _REMOVE),
    _Refusal("eigenvalue", _present, _REMOVED, _REMOVE),
    _Refusal("compression_training", _present, _REMOVED, _REMOVE),
    _Refusal("sparse_gradients", _present, _REMOVED, _REMOVE),
)

_OBJECTS = (
    *(_ZERO, f"{_ZERO}.offload_param", f"{_ZERO}.offload_optimizer", "optimizer", "optimizer.params", "bf16", "fp16"),
    *("tensor_parallel", "hybrid_engine", "compile", "data_efficiency", "flops_profiler", "expert_parallel"),
)


def check(config: Mapping[str, Any], section: VerticalConfig) -> list[str]:
    """Cross-check an enabled section against the rest of the JSON; nothing is checked where it is disabled.

    Supported: ZeRO stage 3; parameters on nvme, cpu or none; optimizer state on nvme or cpu, stepped on the host by
    DeepSpeed's CPU Adam; data parallelism. Returns warnings (JSON path first). Raises ConfigError with every fault.
    """
    if not section.enabled:
        return []
    faults = _object_faults(config)
    if not faults:
        faults = [*_zero_faults(config), *_optimizer_faults(config), *_batch_faults(config), *_refusal_faults(config)]
    if section.snake and section.order == "horizontal":
        faults.append(
            f'{SECTION}.snake: got true with {SECTION}.order "horizontal"; snake reorders micro-batches from one layer '
            'to the next, which only the vertical order has; write "snake": false or "order": "vertical"'
        )
    if faults:
        raise ConfigError("\n".join(faults))
    return _warnings(config, section)


def _object_faults(config: Mapping[str, Any]) -> list[str]:
    faults = []
    for path in _OBJECTS:
        value = _get(config, path)
        if value is not None and not isinstance(value, Mapping):
            faults.append(f"{path}: got {_show(value)}; need an object; write e.g. {_OBJECT_EXAMPLES.get(path, '{}')}")
    return faults


_OBJECT_EXAMPLES = {
    _ZERO: '{"stage": 3, "offload_optimizer": {"device": "cpu"}} (the old true/false form means stage 1)',
    "optimizer": '{"type": "AdamW", "params": {"lr": 1e-4}}',
    f"{_ZERO}.offload_optimizer": '{"device": "cpu"}',
    f"{_ZERO}.offload_param": '{"device": "cpu"}',
}


def _zero_faults(config: Mapping[str, Any]) -> list[str]:
    faults = []
    stage = _get(config, f"{_ZERO}.stage")
    if isinstance(stage, bool) or _number(stage) != 3:
        faults.append(f"{_ZERO}.stage: got {_got(stage)}; the vertical schedule needs ZeRO stage 3; write 3")
    path = f"{_ZERO}.offload_optimizer.device"
    device = _get(config, path)
    if device is None and _true(_get(config, f"{_ZERO}.cpu_offload")):
        device = "cpu"  # DeepSpeed's deprecated spelling of the same thing
    if device not in ("cpu", "nvme"):
        faults.append(f'{path}: got {_got(device)}; the optimizer step runs on the host; write "cpu" or "nvme"')
    device = _get(config, f"{_ZERO}.offload_param.device")
    if device not in (None, "none", "cpu", "nvme"):
        faults.append(f'{_ZERO}.offload_param.device: got {_show(device)}; write "nvme", "cpu" or "none"')
    for name in ("offload_param", "offload_optimizer"):
        nvme_path = _get(config, f"{_ZERO}.{name}.nvme_path")
        if _get(config, f"{_ZERO}.{name}.device") != "nvme" or isinstance(nvme_path, os.PathLike):
            continue
        if not isinstance(nvme_path, str) or not nvme_path.strip():
            faults.append(
                f'{_ZERO}.{name}.nvme_path: got {_got(nvme_path)} with device "nvme"; '
                'write a folder on the SSD, e.g. "/mnt/nvme/swap"'
            )
    return faults


def _got(value: Any) -> str:
    return "nothing" if value is None else _show(value)


def _optimizer_faults(config: Mapping[str, Any]) -> list[str]:
    name = _get(config, "optimizer.type")
    if name is None or (isinstance(name, str) and name.lower() in ("adam", "adamw")):
        return []
    return [f'optimizer.type: got {_show(name)}; {_ADAM}; write "AdamW" or "Adam"']


def _batch_faults(config: Mapping[str, Any]) -> list[str]:
    """M must be written or follow from the batch sizes; each of the three that is written must be an integer >= 1."""
    keys = ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
    faults = [
        f"{key}: got {_show(value)}; need an integer >= 1; write e.g. 1"
        for key in keys
        if (value := _get(config, key)) is not None
        and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
    ]
    if faults:
        return faults
    accumulation, micro, train = (_get(config, key) for key in keys)
    if all(config.get(key) is None for key in keys[1:]):
        fault = "train_micro_batch_size_per_gpu: got nothing, and no train_batch_size either, so M cannot be derived; "
        return [fault + "write it, e.g. 1, beside gradient_accumulation_steps"]
    divisor = (micro or 1) * (accumulation or 1)
    if train is not None and train % divisor:
        fault = f"train_batch_size: got {train}; it is train_micro_batch_size_per_gpu ({_got(micro)}) x "
        return [fault + f"gradient_accumulation_steps ({_got(accumulation)}) x ranks; write a multiple of {divisor}"]
    return []


def _refusal_faults(config: Mapping[str, Any]) -> list[str]:
    faults = []
    for rule in _REFUSALS:
        value = _get(config, rule.path)
        if value is not None and rule.refuses(value):
            faults.append(f"{rule.path}: got {_show(value)}; {rule.why}; {rule.remedy}")
    return faults


def _warnings(config: Mapping[str, Any], section: VerticalConfig) -> list[str]:
    warnings = [*_max_in_cpu_warning(config)]
    if not section.overlap and section.prefetch_layers:
        warnings.append(
            f"{SECTION}.prefetch_layers: got {section.prefetch_layers} with {SECTION}.overlap false, where every fetch "
            'is waited for at once; prefetching only costs memory: write 0 or null, or "overlap": true'
        )
    ignored = {
        "activation_checkpointing": "ignored: the schedule recomputes every layer itself",
        "memory_breakdown": "reports stock's forward/backward/step only, which train_batch does not call",
        "wall_clock_breakdown": "times stock's forward/backward/step only, which train_batch does not call",
        "flops_profiler.enabled": "profiles stock's forward only, which train_batch does not call",
    }
    for path, why in ignored.items():
        value = _get(config, path)
        if value and (isinstance(value, Mapping) or _true(value)):
            warnings.append(f"{path}: got {_show(value)}; {why}; remove it")
    return warnings


def _max_in_cpu_warning(config: Mapping[str, Any]) -> list[str]:
    if _get(config, f"{_ZERO}.offload_param.device") != "nvme":
        return []
    path = f"{_ZERO}.offload_param.max_in_cpu"
    written = _get(config, path)
    num_elements = MAX_IN_CPU_DEFAULT if written is None else _number(written)
    if not num_elements > 0:
        return []
    origin = "DeepSpeed's default, as it is not written" if written is None else "as written"
    effect = 'up to that many parameter elements stay in host memory although device is "nvme"'
    return [f"{path}: {num_elements:.0f} ({origin}): {effect}; write 0 to put all parameters on SSD"]


# --- null means "choose for me" ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resolved:
    """The section with every null replaced by its rule; `reasons` says for each key where its value comes from.

    `layers` stays None where the model is to be searched, `seed` where the caller has not given torch's yet.
    """

    enabled: bool
    order: Literal["vertical", "horizontal"]
    layers: tuple[str, ...] | None
    blocks_per_layer: int
    snake: bool
    overlap: bool
    prefetch_layers: int
    seed_micro_batches: bool
    seed: int | None
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)


def resolve(section: VerticalConfig, initial_seed: int | None = None) -> Resolved:
    """Apply the fixed rule of every null.

    layers: discovered in the model; prefetch_layers: 1 with overlap, 0 without; seed: `initial_seed`, which is
    torch.initial_seed() at initialize. Nothing else is ever chosen: snake and blocks_per_layer are as written or
    their defaults.
    """
    values: dict[str, Any] = section.model_dump()
    written = section.model_fields_set
    reasons = {key: "as written" if key in written else "default" for key in values}
    if section.layers is None:
        reasons["layers"] = "null: discovered in the model"
    if section.prefetch_layers is None:
        values["prefetch_layers"] = 1 if section.overlap else 0
        reasons["prefetch_layers"] = f"null: {values['prefetch_layers']} as overlap is {_show(section.overlap)}"
    if section.seed is None:
        values["seed"] = initial_seed
        reasons["seed"] = "null: torch.initial_seed() at initialize"
    return Resolved(**values, reasons=MappingProxyType(reasons))


def explain(section: VerticalConfig | Resolved, initial_seed: int | None = None) -> list[str]:
    """One start-up line per key: JSON path, value in force, where it comes from."""
    resolved = section if isinstance(section, Resolved) else resolve(section, initial_seed)
    keys = [entry.name for entry in fields(resolved) if entry.name != "reasons"]
    return [f"{SECTION}.{key} = {_show(getattr(resolved, key))} ({resolved.reasons[key]})" for key in keys]
