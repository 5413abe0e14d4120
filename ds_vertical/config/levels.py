"""DeepSpeed's keys of ZeRO++ in the vertical arm: what they mean there, and what they are refused with.

`zero_hpz_partition_size` and its neighbours stand in `zero_optimization`, where the stock arm reads them. In the vertical arm
zero.Init must make plain partitions, so `prepare` moves them into the section.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter, ValidationError

from ds_vertical.config.file import DeepSpeedJson
from ds_vertical.config.section import SECTION, Levels, show
from ds_vertical.errors import ConfigError
from ds_vertical.types import OFFLOAD_DEVICES, Tier

_ZERO: Final = "zero_optimization"
PARTITION_SIZE: Final = f"{_ZERO}.zero_hpz_partition_size"
_LEVELS: Final = f"{SECTION}.levels"
# Key of `zero_optimization` -> key of the section's `levels`, and DeepSpeed's value for "off"
_MOVED: Final[Mapping[str, tuple[str, object]]] = {
    "zero_hpz_partition_size": ("ranks_per_node", 1),
    "zero_quantized_weights": ("quantized_weights", False),
    "zero_quantized_gradients": ("quantized_gradients", False),
}
# What the stock arm quantises, and what comes of it where it has no kernels that do
_ZERO_INIT_FAILS: Final = "zero.Init fails"
_QUANTIZED_BY_STOCK: Final = {
    "zero_quantized_weights": _ZERO_INIT_FAILS,
    "zero_quantized_nontrainable_weights": _ZERO_INIT_FAILS,
    "zero_quantized_gradients": "the first backward fails where DeepSpeed counts several nodes (ranks divided by LOCAL_SIZE, or"
    " by NUMA nodes where that is not set), and elsewhere the key does nothing",
}
# By the type of the value for "off": what reads a value as DeepSpeed does, what a value must be, and an example
_READERS: Final[Mapping[type, tuple[TypeAdapter[Any], str, str]]] = {
    int: (TypeAdapter(Annotated[int, Field(ge=0)]), "an integer >= 1", "2"),
    bool: (TypeAdapter(bool), "true or false", "true"),
}


def move_levels(config: Mapping[str, object]) -> DeepSpeedJson:
    """A shallow copy of a whole configuration, with the section on top, in which the section says what DeepSpeed's keys of
    ZeRO++ have said, and these are gone. Raises ConfigError for values that DeepSpeed refuses, and where both say something,
    and not the same."""
    zero, section = config.get(_ZERO), config.get(SECTION)
    if not isinstance(zero, Mapping) or not isinstance(section, Mapping) or not any(key in zero for key in _MOVED):
        return dict(config)
    levels = section.get("levels", {})
    if not isinstance(levels, Mapping):
        return dict(config)  # which `load_section` refuses
    if faults := _value_faults(zero):
        raise ConfigError("\n".join(faults))
    moved = dict(levels)
    for key, (name, off) in _MOVED.items():
        value = _value(zero.get(key), off)
        if moved.get(name) not in (None, value) and key in zero:
            raise ConfigError(
                f"{_LEVELS}.{name}: got {show(moved[name])} with {_ZERO}.{key} {show(zero[key])}; they mean the same: remove"
                f" {_LEVELS}.{name}"
            )
        if value != off:
            moved[name] = value
    kept = {key: value for key, value in zero.items() if key not in _MOVED}
    return {**config, _ZERO: kept, SECTION: {**section, "levels": moved} if moved else section}


def _value_faults(zero: Mapping[object, object]) -> list[str]:
    """The values of DeepSpeed's keys that it refuses."""
    faults = []
    for key, (_, off) in _MOVED.items():
        if _value(written := zero.get(key), off) is None:
            _, need, example = _READERS[type(off)]
            faults.append(f"{_ZERO}.{key}: got {show(written)}; need {need}; write e.g. {example}, or remove it")
    return faults


def _value(written: object, off: object) -> object:
    """What DeepSpeed makes of a value; None where it refuses it."""
    if written is None or written == "auto":
        return off
    try:
        return _READERS[type(off)][0].validate_python(written) or off
    except ValidationError:
        return None


def levels_faults(levels: Levels) -> list[str]:
    """What is wrong with the section's `levels`, as `move_levels` has left them."""
    default, faults = Levels(), []
    if levels.ranks_per_node > 1:
        return faults
    for key in Levels.model_fields:
        value = getattr(levels, key)
        if key == "ranks_per_node" or value == getattr(default, key):
            continue
        name = next((f"{_ZERO}.{zero_key}" for zero_key, (name, _) in _MOVED.items() if name == key), f"{_LEVELS}.{key}")
        faults.append(
            f"{name}: got {show(value)} without {PARTITION_SIZE}, so that there is one level; write {PARTITION_SIZE}, the"
            " number of ranks on a node, or remove it"
        )
    return faults


def stock_levels_faults(config: Mapping[str, object], device: str | None) -> list[str]:
    """What the stock arm would fail on with words of its own, with stage 3: hpZ puts its second copy where parameters rest, and
    that must be memory; weights and gradients are quantised by kernels that the CPU has not. `device`: what the ranks compute
    on; None: nobody knows."""
    zero = config.get(_ZERO)
    if not isinstance(zero, Mapping) or zero.get("stage") != 3:
        return []
    faults = [
        f"{_ZERO}.{key}: got {show(zero[key])} in the stock arm on the CPU, for which DeepSpeed has no kernels that quantise:"
        f" {what}; remove it"
        for key, what in _QUANTIZED_BY_STOCK.items()
        if device == "cpu" and _value(zero.get(key), False)
    ]
    size, param = _value(zero.get("zero_hpz_partition_size"), 1), zero.get("offload_param")
    on_ssd = isinstance(param, Mapping) and param.get("device") == OFFLOAD_DEVICES[Tier.SSD]
    if not on_ssd or not isinstance(size, int) or size <= 1:
        return faults
    return [
        *faults,
        f"{PARTITION_SIZE}: got {size} with {_ZERO}.offload_param.device {show(OFFLOAD_DEVICES[Tier.SSD])} in the stock arm, in"
        f' which DeepSpeed makes its second copy on that device, and fails; write {_ZERO}.offload_param.device "cpu", or'
        f" remove {PARTITION_SIZE}",
    ]
