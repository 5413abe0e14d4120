"""What `null` means for timing where this machine has been measured: the planner's choice for this very model, the same on
all ranks. Timing never changes values, so a poor estimate costs time and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from torch import nn

from ds_vertical import ranks
from ds_vertical.budget import Forecast, host_room
from ds_vertical.config import Resolved, VerticalConfig
from ds_vertical.costs import ModelShape
from ds_vertical.machine import CostsError
from ds_vertical.outline import Seconds, shaped
from ds_vertical.planner import DELAYS, WINDOWS, Candidate, Setting, tune
from ds_vertical.profile import Profile
from ds_vertical.program import Case, Limits

_MOST_TOKENS: Final = 2048  # of a sequence, where the model's configuration allows more
_DTYPES: Final = {2: "bf16", 4: "fp32"}
_DELAYS: Final = DELAYS[::2]


def choose_timing(
    section: VerticalConfig, resolved: Resolved, forecast: Forecast, model: nn.Module, report: Mapping[str, Any] | None
) -> Resolved:
    """`resolved` with `prefetch_layers` and `optimizer_delay` planned where the JSON leaves them null. `report`: of
    `ds-vertical limits`, None where there is none: then the fixed rules stand. `forecast`: by these."""
    free = [key for key in ("prefetch_layers", "optimizer_delay") if getattr(section, key) is None]
    if not (free and resolved.overlap and resolved.order == "vertical"):
        return resolved
    room = host_room(model.parameters(), resolved.host_memory_bytes)  # all ranks take part, measured or not
    chosen = None
    if report is not None and ranks.rank() == 0:
        chosen = _chosen(section, resolved, forecast, model, report, room)
    planned = ranks.all_gathered(chosen)[0]
    if planned is None:
        return resolved
    window, delay, reason = planned
    values = {"prefetch_layers": window, "optimizer_delay": delay}
    reasons = MappingProxyType({**resolved.reasons, **{key: f"null: {reason}" for key in free if values[key] is not None}})
    return replace(resolved, **{key: values[key] for key in free}, reasons=reasons)


def _chosen(
    section: VerticalConfig,
    resolved: Resolved,
    forecast: Forecast,
    model: nn.Module,
    report: Mapping[str, Any],
    room: tuple[int, int],
) -> tuple[int, float | None, str] | None:
    """(prefetch_layers, optimizer_delay, why) for the JSON's nulls; None where the report cannot tell. `room`: `host_room`."""
    try:
        profile = Profile.from_dict("this machine", report)
    except CostsError:
        return None  # of an older version; measuring again mends it
    seconds = _estimate(forecast.shape, profile, resolved.blocks_per_layer, _tokens(model, forecast.micro_batch_size))
    if seconds is None:
        return None
    regime, settings = forecast.regime, forecast.settings
    early = regime.possible and regime.certain
    shape = shaped(forecast.shape, seconds, resolved.blocks_per_layer)
    setting = Setting(1, settings.num_micro_batches, 1, settings.window, regime.delay, early, shape.placement)
    allowed, baseline = room
    limits, further = Limits(None, allowed, None), forecast.further(baseline)
    case = Case(shape, profile.machine, settings, limits, regime.delay, early, further)
    windows = WINDOWS[:2] if section.prefetch_layers is None else (resolved.prefetch_layers,)
    delays = _DELAYS if section.optimizer_delay is None and early else (regime.delay,)
    best, rule = tune(case, setting, windows, [delay for delay in delays if delay < 1])
    delay = best.setting.delay if section.optimizer_delay is None and early else resolved.optimizer_delay
    return best.setting.window, delay, _reason(best, rule, profile)


def _reason(best: Candidate, rule: Candidate, profile: Profile) -> str:
    gain = rule.estimate_s / best.estimate_s - 1
    why = f"{gain:.0%} faster than the fixed rule" if best is not rule else "the fixed rule, which nothing beats"
    return f"planned from the limits of {profile.date}: {why}"


def _tokens(model: nn.Module, micro_batch_size: int) -> int:
    """Of a micro-batch, before there is one: whole sequences."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    return micro_batch_size * min(_MOST_TOKENS, positions if isinstance(positions, int) else _MOST_TOKENS)


def _estimate(shape: ModelShape, profile: Profile, blocks_per_layer: int, tokens: int) -> Seconds | None:
    """Of one block, from its elements: two operations each and token in a forward."""
    rate = profile.flops_per_s.get(_DTYPES.get(shape.param_bytes, ""))
    if rate is None:
        return None
    forward = 2 * max(shape.layer_elements) / blocks_per_layer * tokens / rate
    head = 2 * shape.pre_elements / 2 * tokens / rate  # of what is outside the layers, half is the head
    return Seconds(forward, 2 * forward, 0.0, 0.0, 3 * head)
