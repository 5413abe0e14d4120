"""Values of the DeepSpeed JSON that are left to "auto", which only Hugging Face's Trainer and Accelerate fill in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from ds_vertical.config import SECTION, ConfigError

_ZERO: Final = "zero_optimization"
_REMOVE: Final = "remove the key: DeepSpeed's default"

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
        return f'{self.path}: got "auto", which only Hugging Face\'s Trainer fills in: {self.harm}'


def find_unfilled(config: Mapping[str, Any]) -> Iterator[Unfilled]:
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


def refuse_unfilled(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for every value that DeepSpeed would fail on or misunderstand."""
    harmful = [each for each in find_unfilled(config) if not each.harmless]
    if harmful:
        told = (f"{each.found}; {each.line if each.line == _REMOVE else f'write {each.line}'}" for each in harmful)
        raise ConfigError("\n".join(told))


def _autos(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """(dotted path, line to write) of every "auto"."""
    for key, below in value.items() if isinstance(value, Mapping) else ():
        place = f"{path}.{key}".lstrip(".")
        if below == "auto":
            instead = _INSTEAD.get(place)
            yield place, f'"{key}": {instead}' if instead else _REMOVE
        else:
            yield from _autos(below, place)
