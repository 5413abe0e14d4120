"""Cross-check the "vertical_schedule" section against the rest of the DeepSpeed JSON: what is refused, what warns.

One row of `_REFUSALS` per setting that layer-major training cannot honour. `find_unfilled` finds the values that are left to
"auto", which only Hugging Face's Trainer and Accelerate fill in.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, SupportsFloat, cast

from ds_vertical.config.acco import acco_faults
from ds_vertical.config.levels import levels_faults, move_levels, stock_levels_faults
from ds_vertical.config.section import SECTION, VerticalConfig, is_count, load_section, show
from ds_vertical.errors import ConfigError
from ds_vertical.types import OFFLOAD_DEVICES, Tier

MAX_IN_CPU_DEFAULT = 1_000_000_000  # elements; DeepSpeed 0.19.8, runtime/zero/offload_config.py


def value_at(config: Mapping[str, object], path: str) -> object:
    """The value at a dotted path; None where absent, null, or "auto" (the Hugging Face trainer fills it in later)."""
    value: object = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or value.get(key) is None:
            return None
        value = value[key]
    return None if isinstance(value, str) and value == "auto" else value


def _true(value: object) -> bool:
    """As DeepSpeed's lax pydantic models read a flag, strings included."""
    if isinstance(value, str):
        return value.lower() in ("1", "true", "t", "yes", "y", "on")
    return bool(value)


def _false(value: object) -> bool:
    return not _true(value)


def _present(value: object) -> bool:
    return value is not None


def _filled(value: object) -> bool:
    return bool(value)


def _number(value: object) -> float:
    try:
        return float(cast("SupportsFloat | str", value))
    except (TypeError, ValueError):
        return math.nan


def _above_one(value: object) -> bool:
    return _number(value) > 1


def _not_one(value: object) -> bool:
    return _number(value) != 1


def _no_count(value: object) -> bool:
    return not is_count(value)


@dataclass(frozen=True)
class _Refusal:
    """A setting that the vertical arm refuses: where, when, why, and what to write instead."""

    path: str
    refuses: Callable[[object], bool]
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
_COUNT = "it is a number of elements"
_REFUSALS = (
    _Refusal(f"{_ZERO}.zenflow", _present, "ZenFlow's delayed updates are not exact", _REMOVE),
    _Refusal(f"{_ZERO}.zero_quantized_nontrainable_weights", _true, _PLAIN, _OFF),
    _Refusal(f"{_ZERO}.offload_param.max_in_cpu", _no_count, _COUNT, "write 0 or more"),
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
    _Refusal("aio.use_gds", _filled, "every transfer from or to an SSD goes through host memory", _OFF),
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
    *("tensor_parallel", "hybrid_engine", "compile", "data_efficiency", "flops_profiler", "expert_parallel", "checkpoint"),
)


def check(config: Mapping[str, object], section: VerticalConfig, device: str | None = None) -> list[str]:
    """Cross-check an enabled section against the rest of the JSON; where it is disabled, only what stock fails on with words
    that do not help. `device`: what the ranks compute on, as DeepSpeed names it; None: nobody knows.

    Supported: ZeRO stage 3; parameters on nvme, cpu or none; optimizer state on nvme or cpu, stepped on the host by
    DeepSpeed's CPU Adam; data parallelism. Returns warnings (JSON path first). Raises ConfigError with every fault.
    """
    if not section.enabled:
        if faults := stock_levels_faults(config, device):
            raise ConfigError("\n".join(faults))
        return []
    faults = _object_faults(config)
    if not faults:
        faults = [*_zero_faults(config), *_optimizer_faults(config), *_batch_faults(config), *_refusal_faults(config)]
        faults += _loss_scale_faults(config, section)
    if section.snake and section.order == "horizontal":
        faults.append(
            f'{SECTION}.snake: got true with {SECTION}.order "horizontal"; snake reorders micro-batches from one layer '
            'to the next, which only the vertical order has; write "snake": false or "order": "vertical"'
        )
    faults += _state_faults(config, section)
    faults += _compression_faults(config, section)
    faults += _gradient_faults(config, section)
    faults += _activation_faults(config, section)
    faults += _path_faults(config, section)
    faults += _level_faults(config, section)
    node_local = value_at(config, "checkpoint.use_node_local_storage")
    if not isinstance(node_local, bool | None):
        faults.append(f"checkpoint.use_node_local_storage: got {show(node_local)}; write true or false")
    if faults:
        raise ConfigError("\n".join(faults))
    return _warnings(config, section)


def _state_faults(config: Mapping[str, object], section: VerticalConfig) -> list[str]:
    """A share of the state, and memory to read it into, have a meaning where the rest is on SSD."""
    share, path = section.optimizer_host_share, f"{_ZERO}.offload_optimizer.device"
    device = value_at(config, path)
    if device == OFFLOAD_DEVICES[Tier.SSD]:
        return []
    found = (
        ("optimizer_host_share", share, share not in (None, 1), "1 or null"),
        ("optimizer_read_ahead_bytes", section.optimizer_read_ahead_bytes, section.optimizer_read_ahead_bytes, "0 or null"),
    )
    return [
        f"{SECTION}.{key}: got {show(value)} with {path} {_got(device)}, with which all optimizer state is in"
        f' host memory; write {instead}, or {path} "nvme"'
        for key, value, is_wrong, instead in found
        if is_wrong
    ]


def _compression_faults(config: Mapping[str, object], section: VerticalConfig) -> list[str]:
    """Half a master is in a parameter where that is its rounding to bf16, and where both are in files."""
    if not section.optimizer_compression:
        return []
    key = f"{SECTION}.optimizer_compression: got true"
    faults = []
    half = [config.get(name) for name in ("bf16", "bfloat16")]
    enabled = [each.get("enabled") for each in half if isinstance(each, Mapping)]
    if not any(each == "auto" or _true(each) for each in enabled):
        faults.append(
            f"{key} with bf16.enabled {_got(value_at(config, 'bf16.enabled'))}, and only a parameter in bf16 has the high half"
            ' of its fp32 master; write "bf16": {"enabled": true}, or "optimizer_compression": false'
        )
    for name, what in (("offload_optimizer", "masters"), ("offload_param", "their parameters")):
        device = value_at(config, f"{_ZERO}.{name}.device")
        if device != OFFLOAD_DEVICES[Tier.SSD]:
            faults.append(
                f"{key} with {_ZERO}.{name}.device {_got(device)}; compressed are masters on SSD, beside parameters on SSD: no"
                f' {what} are there; write "nvme", or "optimizer_compression": false'
            )
    return faults


def _gradient_faults(config: Mapping[str, object], section: VerticalConfig) -> list[str]:
    """Gradients that wait on SSD have their file beside the optimizer's, and nobody can read them there."""
    share, path = section.gradient_host_share, f"{_ZERO}.offload_optimizer.device"
    if share is None or share == 1:
        return []
    faults = []
    device = value_at(config, path)
    if device != OFFLOAD_DEVICES[Tier.SSD]:
        faults.append(
            f"{SECTION}.gradient_host_share: got {show(share)} with {path} {_got(device)}; gradients wait beside the optimizer"
            f' state; write 1 or null, or {path} "nvme"'
        )
    if section.keep_gradients:
        faults.append(
            f"{SECTION}.keep_gradients: got true with {SECTION}.gradient_host_share {show(share)}; kept gradients are in host"
            ' memory; write "keep_gradients": false, or "gradient_host_share": 1'
        )
    return faults


def _activation_faults(config: Mapping[str, object], section: VerticalConfig) -> list[str]:
    """What rests on SSD needs a folder of this run, which an offload section with device "nvme" brings."""
    devices = [value_at(config, f"{_ZERO}.{name}.device") for name in ("offload_param", "offload_optimizer")]
    if OFFLOAD_DEVICES[Tier.SSD] in devices:
        return []
    return [
        f'{SECTION}.activations.{key}: got "ssd", and there is no folder for its file, since neither {_ZERO}.offload_param nor'
        f' {_ZERO}.offload_optimizer has device "nvme"; write "host", or give one of them "device": "nvme" and an nvme_path'
        for key in ("device", "keep_device")
        if getattr(section.activations, key) is Tier.SSD
    ]


def _level_faults(config: Mapping[str, object], section: VerticalConfig) -> list[str]:
    """Of the section's levels and of its `acco`, whether the keys of levels still stand in `zero_optimization` or not."""
    try:
        moved = load_section(move_levels({**config, SECTION: section.model_dump(exclude_unset=True)}))
    except ConfigError as error:
        return str(error).splitlines()
    return [] if moved is None else [*levels_faults(moved.levels), *acco_faults(partial(value_at, config), moved)]


def _path_faults(config: Mapping[str, object], section: VerticalConfig) -> list[str]:
    """Several SSDs: the first one is where DeepSpeed itself puts its files, and no two are the same folder."""
    paths, where = section.nvme_paths, f"{SECTION}.nvme_paths"
    if paths is None:
        return []
    names = [f"{_ZERO}.{name}" for name in ("offload_param", "offload_optimizer")]
    on_ssd = [name for name in names if value_at(config, f"{name}.device") == OFFLOAD_DEVICES[Tier.SSD]]
    faults = []
    if not on_ssd:
        faults.append(
            f'{where}: got {show(list(paths))}, and neither {names[0]} nor {names[1]} has device "nvme"; remove it, or give'
            f' one of them "device": "nvme" and "nvme_path": {show(paths[0])}'
        )
    for name in on_ssd:
        first = value_at(config, f"{name}.nvme_path")
        if isinstance(first, str | os.PathLike) and os.path.realpath(first) != os.path.realpath(paths[0]):
            first = os.fspath(first)
            faults.append(
                f"{where}[0]: got {show(paths[0])} with {name}.nvme_path {show(first)}; the first entry is DeepSpeed's"
                f' nvme_path; write "nvme_paths": [{show(first)}, ...]'
            )
    seen: dict[str, str] = {}
    for number, path in enumerate(paths):
        real = os.path.realpath(path)
        if real in seen:
            faults.append(
                f"{where}[{number}]: got {show(path)}, the same folder as {show(seen[real])}; write one folder for each SSD"
            )
        seen.setdefault(real, path)
    return faults


def _object_faults(config: Mapping[str, object]) -> list[str]:
    faults = []
    for path in _OBJECTS:
        value = value_at(config, path)
        if value is not None and not isinstance(value, Mapping):
            faults.append(f"{path}: got {show(value)}; need an object; write e.g. {_OBJECT_EXAMPLES.get(path, '{}')}")
    return faults


_OBJECT_EXAMPLES = {
    _ZERO: '{"stage": 3, "offload_optimizer": {"device": "cpu"}} (the old true/false form means stage 1)',
    "optimizer": '{"type": "AdamW", "params": {"lr": 1e-4}}',
    f"{_ZERO}.offload_optimizer": '{"device": "cpu"}',
    f"{_ZERO}.offload_param": '{"device": "cpu"}',
}


def _zero_faults(config: Mapping[str, object]) -> list[str]:
    faults = []
    stage = value_at(config, f"{_ZERO}.stage")
    if isinstance(stage, bool) or _number(stage) != 3:
        faults.append(f"{_ZERO}.stage: got {_got(stage)}; the vertical schedule needs ZeRO stage 3; write 3")
    path = f"{_ZERO}.offload_optimizer.device"
    device = value_at(config, path)
    if device is None and _true(value_at(config, f"{_ZERO}.cpu_offload")):
        device = OFFLOAD_DEVICES[Tier.HOST]  # DeepSpeed's deprecated spelling of the same thing
    if device not in (OFFLOAD_DEVICES[Tier.HOST], OFFLOAD_DEVICES[Tier.SSD]):
        faults.append(f'{path}: got {_got(device)}; the optimizer step runs on the host; write "cpu" or "nvme"')
    device = value_at(config, f"{_ZERO}.offload_param.device")
    if device is not None and device not in OFFLOAD_DEVICES.values():
        faults.append(f'{_ZERO}.offload_param.device: got {show(device)}; write "nvme", "cpu" or "none"')
    section = value_at(config, f"{_ZERO}.offload_param")
    if isinstance(section, Mapping) and section.get("max_in_cpu", 0) is None:
        faults.append(f"{_ZERO}.offload_param.max_in_cpu: got null; {_COUNT}; write 0 or more")
    for name in ("offload_param", "offload_optimizer"):
        nvme_path = value_at(config, f"{_ZERO}.{name}.nvme_path")
        if value_at(config, f"{_ZERO}.{name}.device") != OFFLOAD_DEVICES[Tier.SSD] or isinstance(nvme_path, os.PathLike):
            continue
        if not isinstance(nvme_path, str) or not nvme_path.strip():
            faults.append(
                f'{_ZERO}.{name}.nvme_path: got {_got(nvme_path)} with device "nvme"; '
                'write a folder on the SSD, e.g. "/mnt/nvme/swap"'
            )
    return faults


def _got(value: object) -> str:
    return "nothing" if value is None else show(value)


def _optimizer_faults(config: Mapping[str, object]) -> list[str]:
    name = value_at(config, "optimizer.type")
    if name is None or (isinstance(name, str) and name.lower() in ("adam", "adamw")):
        return []
    return [f'optimizer.type: got {show(name)}; {_ADAM}; write "AdamW" or "Adam"']


def _batch_faults(config: Mapping[str, object]) -> list[str]:
    """M must be written or follow from the batch sizes; each of the three that is written must be an integer >= 1."""
    keys = ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
    faults = [
        f"{key}: got {show(value)}; need an integer >= 1; write e.g. 1"
        for key in keys
        if (value := value_at(config, key)) is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
    ]
    if faults:
        return faults
    accumulation, micro, train = (cast("int | None", value_at(config, key)) for key in keys)
    if all(config.get(key) is None for key in keys[1:]):
        fault = "train_micro_batch_size_per_gpu: got nothing, and no train_batch_size either, so M cannot be derived; "
        return [fault + "write it, e.g. 1, beside gradient_accumulation_steps"]
    divisor = (micro or 1) * (accumulation or 1)
    if train is not None and train % divisor:
        fault = f"train_batch_size: got {train}; it is train_micro_batch_size_per_gpu ({_got(micro)}) x "
        return [fault + f"gradient_accumulation_steps ({_got(accumulation)}) x ranks; write a multiple of {divisor}"]
    return []


def _loss_scale_faults(config: Mapping[str, object], section: VerticalConfig) -> list[str]:
    """With a dynamic loss scale overflows are routine: they are how the scale is found."""
    scale = value_at(config, "fp16.loss_scale")
    if (
        section.on_nonfinite == "skip"
        or not _true(value_at(config, "fp16.enabled"))
        or (scale is not None and _number(scale) != 0)
    ):
        return []
    return [
        f'{SECTION}.on_nonfinite: got "stop" with fp16.loss_scale {_got(scale)}, a dynamic loss scale, which is found by steps'
        ' that overflow; write "skip", or a static fp16.loss_scale, e.g. 1024'
    ]


def _refusal_faults(config: Mapping[str, object]) -> list[str]:
    faults = []
    for rule in _REFUSALS:
        value = value_at(config, rule.path)
        if value is not None and rule.refuses(value):
            faults.append(f"{rule.path}: got {show(value)}; {rule.why}; {rule.remedy}")
    return faults


def _warnings(config: Mapping[str, object], section: VerticalConfig) -> list[str]:
    written = value_at(config, f"{_ZERO}.offload_param.max_in_cpu") is not None
    fills_memory = written and section.optimizer_host_share  # as plans write it: both in host memory on purpose
    warnings = [] if fills_memory else max_in_cpu_warning(config)
    if not section.overlap and section.prefetch_layers:
        warnings.append(
            f"{SECTION}.prefetch_layers: got {section.prefetch_layers} with {SECTION}.overlap false, where every fetch "
            'is waited for at once; prefetching only costs memory: write 0 or null, or "overlap": true'
        )
    if not section.overlap and section.optimizer_read_ahead_bytes:
        warnings.append(
            f"{SECTION}.optimizer_read_ahead_bytes: got {section.optimizer_read_ahead_bytes} with {SECTION}.overlap false,"
            ' where no state is read ahead: write 0 or null, or "overlap": true'
        )
    ignored = {
        "activation_checkpointing": "ignored: the schedule recomputes every layer itself",
        "memory_breakdown": "reports stock's forward/backward/step only, which train_batch does not call",
        "wall_clock_breakdown": "times stock's forward/backward/step only, which train_batch does not call",
        "flops_profiler.enabled": "profiles stock's forward only, which train_batch does not call",
    }
    for path, why in ignored.items():
        value = value_at(config, path)
        if value and (isinstance(value, Mapping) or _true(value)):
            warnings.append(f"{path}: got {show(value)}; {why}; remove it")
    return warnings


def max_in_cpu_warning(config: Mapping[str, object]) -> list[str]:
    """One line where parameters that are to be on SSD stay in host memory, in either arm."""
    if value_at(config, f"{_ZERO}.offload_param.device") != OFFLOAD_DEVICES[Tier.SSD]:
        return []
    path = f"{_ZERO}.offload_param.max_in_cpu"
    written = value_at(config, path)
    num_elements = MAX_IN_CPU_DEFAULT if written is None else _number(written)
    if not num_elements > 0:
        return []
    origin = "DeepSpeed's default, as it is not written" if written is None else "as written"
    effect = 'up to that many elements of each rank\'s parameters stay in host memory although device is "nvme"'
    return [f"{path}: {num_elements:.0f} ({origin}): {effect}; write 0 to put all parameters on SSD"]


_REMOVE_KEY: Final = "remove the key: DeepSpeed's default"

# What to write for the keys that Hugging Face's examples leave to "auto".
_INSTEAD: Final = {
    "train_micro_batch_size_per_gpu": "1",
    "gradient_accumulation_steps": "16",
    "gradient_clipping": "1.0",
    "bf16.enabled": "true",
    "fp16.enabled": "false",
    "optimizer.params.lr": "1e-4",
    "optimizer.params.betas": "[0.9, 0.999]",
    "optimizer.params.eps": "1e-8",
    "optimizer.params.weight_decay": "0.01",
    "scheduler.params.warmup_min_lr": "0",
    "scheduler.params.warmup_max_lr": "1e-4",
    "scheduler.params.warmup_num_steps": "100",
    "scheduler.params.total_num_steps": "10000",
    f"{_ZERO}.reduce_bucket_size": "500000000",
    f"{_ZERO}.stage3_prefetch_bucket_size": "0",
    f"{_ZERO}.stage3_param_persistence_threshold": "100000",
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": "true",
}
_OWN: Final = ("data_types.keep_in_fp32_modules", "pipeline")  # here it is a value of DeepSpeed's own
# Sections whose reader takes "auto" for an absent key (runtime/config_utils.py); everywhere else it arrives as a string.
_LENIENT: Final = (_ZERO, "bf16", "bfloat16", "fp16")


class Unfilled(NamedTuple):
    """`line`: to write instead, or what else to do. `harm`: what DeepSpeed does; where it takes its default, training goes on
    (`harmless`)."""

    path: str
    line: str
    harm: str
    harmless: bool

    @property
    def found(self) -> str:
        """Path and harm, for messages."""
        return f'{self.path}: got "auto", which only Hugging Face\'s Trainer fills in: {self.harm}'


def find_unfilled(config: Mapping[str, object]) -> Iterator[Unfilled]:
    """All but those of `vertical_schedule`, which its own reader refuses, and those that DeepSpeed means."""
    for path, line in _autos(config, ""):
        if path.startswith(SECTION) or path.startswith(_OWN):
            continue
        lenient = path.partition(".")[0] in _LENIENT
        if lenient and not path.endswith(".enabled"):
            yield Unfilled(path, line, "DeepSpeed takes its default", True)
        elif lenient:
            yield Unfilled(path, line, "DeepSpeed takes it for false, and the model is not trained in that precision", False)
        else:
            yield Unfilled(path, line, "DeepSpeed fails on it", False)


def refuse_unfilled(config: Mapping[str, object]) -> None:
    """Raise ConfigError for every value that DeepSpeed would fail on or misunderstand."""
    harmful = [each for each in find_unfilled(config) if not each.harmless]
    if harmful:
        told = (f"{each.found}; {each.line if each.line == _REMOVE_KEY else f'write {each.line}'}" for each in harmful)
        raise ConfigError("\n".join(told))


def _autos(value: object, path: str) -> Iterator[tuple[str, str]]:
    """(dotted path, line to write) of every "auto"."""
    for key, below in value.items() if isinstance(value, Mapping) else ():
        place = f"{path}.{key}".lstrip(".")
        if below == "auto":
            instead = _INSTEAD.get(place)
            yield place, f'"{key}": {instead}' if instead else _REMOVE_KEY
        else:
            yield from _autos(below, place)
