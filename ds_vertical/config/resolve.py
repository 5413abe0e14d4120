"""What a null in the section means where a fixed rule decides, and the section in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

from ds_vertical.config.section import SECTION, VerticalConfig, show
from ds_vertical.types import (
    AccoSettings,
    ActivationSettings,
    ElasticSettings,
    LevelSettings,
    RunSettings,
    SignalSettings,
    Tier,
)

# --- null means "choose for me" ------------------------------------------------------------------------------------


_LATER: Mapping[str, str] = {
    "layers": "discovered in the model",
    "optimizer_delay": "0.25 where layers can be stepped during the backward, else 1",
    "optimizer_speculation": "where it would lately have come true",
    "optimizer_read_ahead_bytes": "half of what host_memory_bytes leaves, where steps wait for the norm",
    "host_memory_bytes": "what the machine has at start",
    "nvme_paths": "nvme_path alone",
    "elastic": "all ranks bring as many micro-batches",
    "acco": "exact steps",
    "progress": "where rank 0's stderr is a terminal",
    "self_check": "at the start of a run, and after a resume with another model",
    "on_signal": "no checkpoint, the run ends at once",
}


def resolve(section: VerticalConfig, initial_seed: int | None = None) -> RunSettings:
    """Apply the fixed rule of every null.

    prefetch_layers: 1 with overlap, 0 without; gradient_host_share: 1 (less at initialize where memory is short);
    optimizer_host_share: 0 (more at initialize where `host_memory_bytes` leaves room);
    activations.device: "device"; keep, keep_device: nothing is kept until they are chosen behind the first step;
    with acco: optimizer_delay 1, no speculation, keep none, keep_device "device";
    seed: `initial_seed`, torch.initial_seed() at initialize;
    others: see `_LATER`.
    """
    values: dict[str, Any] = section.model_dump()
    written = section.model_fields_set
    reasons = {key: "as written" if key in written else "default" for key in values}
    reasons |= {key: f"null: {rule}" for key, rule in _LATER.items() if values[key] is None}
    if section.prefetch_layers is None:
        values["prefetch_layers"] = 1 if section.overlap else 0
        reasons["prefetch_layers"] = f"null: {values['prefetch_layers']} as overlap is {show(section.overlap)}"
    if section.gradient_host_share is None:
        values["gradient_host_share"] = 1.0
        reasons["gradient_host_share"] = "null: 1, host memory has room for what waits"
    if section.optimizer_host_share is None:
        values["optimizer_host_share"] = 0.0
        reasons["optimizer_host_share"] = "null: 0, nothing says that host memory has room for it"
    if section.seed is None:
        values["seed"] = initial_seed
        reasons["seed"] = "null: torch.initial_seed() at initialize"
    signal = section.on_signal
    values["activations"] = ActivationSettings(**dict(section.activations))
    values["levels"] = LevelSettings(**dict(section.levels))
    values["elastic"] = None if section.elastic is None else ElasticSettings(**dict(section.elastic))
    if section.acco is not None:
        values["acco"] = AccoSettings(section.acco.copies)
        _settle_halves(values, reasons)
    values["on_signal"] = None if signal is None else SignalSettings(**dict(signal))
    return RunSettings(**values, reasons=MappingProxyType(reasons))


def _settle_halves(values: dict[str, object], reasons: dict[str, str]) -> None:
    """With two halves a step all of the optimizer step is left to the next half, and the choice behind the first step of what
    forwards keep, which knows steps of one pass only, is off."""
    values["optimizer_delay"], values["optimizer_speculation"] = 1.0, False
    reasons["optimizer_delay"] = reasons["optimizer_speculation"] = "acco: the next half takes the steps"
    activations = values["activations"]
    if not isinstance(activations, ActivationSettings) or not activations.is_open:
        return
    if activations.keep is None:
        values["activations"] = replace(activations, keep="none")
        reasons["activations"] += "; acco: a null keep is none"
    else:
        values["activations"] = replace(activations, keep_device=Tier.DEVICE)
        reasons["activations"] += "; acco: a null keep_device is device"


def explain(section: VerticalConfig | RunSettings, initial_seed: int | None = None) -> list[str]:
    """One start-up line per key: JSON path, value in force, where it comes from."""
    resolved = section if isinstance(section, RunSettings) else resolve(section, initial_seed)
    keys = [entry.name for entry in fields(resolved) if entry.name != "reasons"]
    return [f"{SECTION}.{key} = {_shown(getattr(resolved, key))} ({resolved.reasons[key]})" for key in keys]


def _shown(value: object) -> str:
    return show(asdict(value) if is_dataclass(value) and not isinstance(value, type) else value)
