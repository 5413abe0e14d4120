"""What a null in the section means where a fixed rule decides, and the section in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal

from ds_vertical.config.section import SECTION, VerticalConfig, show

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
    optimizer_delay: float | None
    optimizer_speculation: bool | None
    on_nonfinite: Literal["skip", "stop"]
    gradient_host_share: float
    keep_gradients: bool
    host_memory_bytes: int | None
    activations: Mapping[str, Any]
    seed_micro_batches: bool
    seed: int | None
    trace: str | None
    progress: bool | None
    verify: bool
    self_check: bool | None
    on_signal: Mapping[str, Any] | None
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)

    @property
    def moved_shares(self) -> tuple[float, float]:
        """The shares of the micro-batches whose activations rest in host memory and on SSD."""
        device, share = self.activations["device"] or "device", self.activations["share"]
        return {"host": (share, 0.0), "ssd": (self.activations["host_share"], share)}.get(device, (0.0, 0.0))


_LATER: Mapping[str, str] = {
    "layers": "discovered in the model",
    "optimizer_delay": "0.25 where layers can be stepped during the backward, else 1",
    "optimizer_speculation": "where it would lately have come true",
    "host_memory_bytes": "what the machine has at start",
    "progress": "where rank 0's stderr is a terminal",
    "self_check": "at the start of a run, and after a resume with another model",
    "on_signal": "no checkpoint, the run ends at once",
}


def resolve(section: VerticalConfig, initial_seed: int | None = None) -> Resolved:
    """Apply the fixed rule of every null.

    prefetch_layers: 1 with overlap, 0 without; gradient_host_share: 1 (less at initialize where memory is short);
    activations.device: "device"; seed: `initial_seed`, torch.initial_seed() at initialize; others: see `_LATER`.
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
    if section.seed is None:
        values["seed"] = initial_seed
        reasons["seed"] = "null: torch.initial_seed() at initialize"
    return Resolved(**values, reasons=MappingProxyType(reasons))


def explain(section: VerticalConfig | Resolved, initial_seed: int | None = None) -> list[str]:
    """One start-up line per key: JSON path, value in force, where it comes from."""
    resolved = section if isinstance(section, Resolved) else resolve(section, initial_seed)
    keys = [entry.name for entry in fields(resolved) if entry.name != "reasons"]
    return [f"{SECTION}.{key} = {show(getattr(resolved, key))} ({resolved.reasons[key]})" for key in keys]
