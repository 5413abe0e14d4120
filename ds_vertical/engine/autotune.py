"""What `null` means for timing and for what rests in host memory, on this machine and for this very model, the same on all
ranks.

Timing is the planner's choice where the machine has been measured. It never changes values, so a poor estimate costs time and
nothing else. Gradients wait in host memory, which is faster than any SSD, as far as that holds them.

[Note: state in host memory] The JSON has put the optimizer's state on SSD, so a run may fill host memory with it only where the
JSON says how much the run may use (`host_memory_bytes`), and never more than the machine has free. A run that fits
without state in memory must fit with it. So the state comes last, when all else that the budget counts has been chosen, and
takes a part of what is left: the choice of `activations.keep`, and the script, may need some of it. And it takes nothing where
activations may leave the device, or the device is the host: how many bytes of host memory they then need shows with the first
batch, when the state has its place.

[Note: nothing left to step early] Where a share leaves nothing on SSD, all steps wait for the norm. With `optimizer_delay` 0
none of them is left to the next forward, beside which they would run, so that the whole step would run by itself. A 0 that the
JSON has is kept, and some state stays on SSD; one that was chosen is dropped.

[Note: less waits] What is stepped in the next forward has a gradient that waits, 4 bytes a parameter. On SSD it would be
written and read once more, a quarter of what its step moves. Beside a device the forward may take long enough to hide that.
Where the device is the host, the same cores compute and step. So there the share that is delayed shrinks until what waits fits
into host memory. It stays where the SSD has no room for what early steps need: these may be given up then, and all waits.

[Note: early steps given up] With clipping, where the JSON asks for no early steps, they are taken only in steps that will
probably ask for no clipping. What they need is there in every step: new values beside the old ones, of parameters that rest in
host memory. Where these send gradients to the SSD, in every step, or leave no room for the run, all steps wait for the norm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from torch import nn

from ds_vertical.config.section import SECTION, VerticalConfig
from ds_vertical.distributed import ranks
from ds_vertical.engine.budget.room import machine_room
from ds_vertical.engine.memory_check import Forecast, read_ahead_bytes
from ds_vertical.errors import ConfigError, CostsError
from ds_vertical.model.compiled_blocks import any_compiled
from ds_vertical.offload.speculation import StepTiming
from ds_vertical.planner import memory_budget
from ds_vertical.planner.candidate import Candidate, Choice
from ds_vertical.planner.linear_program import LpProblem
from ds_vertical.planner.machine import Profile
from ds_vertical.planner.memory_budget import STATE_SHARES, USED_BY_STATE
from ds_vertical.planner.model_shape import ModelShape, Seconds, outside_elements, shaped
from ds_vertical.planner.search import DELAYS, WINDOWS, tune_timing
from ds_vertical.types import ActivationSettings, RunSettings, Tier, TierBytes, per_tier

_MOST_TOKENS: Final = 2048  # of a sequence, where the model's configuration allows more
_DTYPES: Final = {2: "bf16", 4: "fp32"}
_DELAYS: Final = DELAYS[::2]
_SHARES: Final = 16  # of the waiting gradients, and of the copies, tried from all to none
_DELAY_STEPS: Final = 5  # shares of the fixed rule's delay that are tried, from all to none
_STATE_KEY: Final = "optimizer_host_share"
_IMPORTED_BYTES: Final = 32 << 20  # at most: what choices leave of the room

# bytes of host memory that this rank may take in all, and beside its parameters: `budget.room.host_room`
Room = tuple[int, int]


def choose_copy_share(resolved: RunSettings, forecast_of: Callable[[RunSettings], Forecast], room: Room) -> RunSettings:
    """`resolved` with the largest `levels.copy_share` that host memory has room for, where the JSON leaves it null. What has no
    copy crosses the link once more in a step. Where nothing fits, none; then other choices make room, or the budget says so."""
    levels = resolved.levels
    if not levels.are_on or levels.copy_share is not None:
        return resolved

    def with_share(share: float) -> RunSettings:
        return replace(resolved, levels=replace(levels, copy_share=share))

    fitting = (share for share in _shares() if _needed(forecast_of(with_share(share)), room) <= room[0])
    share = min(ranks.all_gathered(next(fitting, 0.0)))
    reason = f"{resolved.reasons['levels']}; copy_share null: {'all fit' if share == 1 else 'host memory holds no more copies'}"
    return replace(with_share(share), reasons=MappingProxyType({**resolved.reasons, "levels": reason}))


def _shares(steps: int = _SHARES) -> Iterator[float]:
    return (count / steps for count in range(steps, -1, -1))


def _needed(forecast: Forecast, room: Room, gives_up: bool = False) -> int:
    """Bytes of host memory, with gradients added one by one, which gives up less speed than anything on SSD. `gives_up`: early
    steps, whatever the forecast says."""
    least = replace(forecast.terms, **memory_budget.LEAN, **memory_budget.NOTHING_EARLY if gives_up else {})
    return memory_budget.total_bytes(memory_budget.budget(forecast.shape, least, forecast.further(room[1])), Tier.HOST)


def late_copies(section: VerticalConfig, resolved: RunSettings, timing: StepTiming) -> list[str]:
    """A line for the log where the node has few standing copies that nobody has asked for: by the default `optimizer_delay`, or
    by a share of the state in host memory, which is not stepped early. `timing`: of the run."""
    share, delay, written = resolved.optimizer_host_share, timing.delay, section.optimizer_delay
    shared = timing.possible and share > 0
    if not resolved.levels.copy_on_device or written or not (shared or (delay and written is None)):
        return []
    null = f"{SECTION}.optimizer_delay is null, by which {delay:.0%} of each unit's step is"
    resting = f"{SECTION}.{_STATE_KEY} is {share:g}, by which the steps of that share of the state are"
    causes = " and ".join([null] * bool(delay) + [resting] * shared)
    advice = ", ".join(['"optimizer_delay": 0'] * bool(delay) + [f'"{_STATE_KEY}": 0'] * shared)
    return [
        f"warning: {SECTION}.levels.copy_on_device: got true, and {causes} left to the next forward; such a unit has no"
        f" standing copy and crosses the link there; write {advice}"
    ]


def choose_delay(
    section: VerticalConfig, resolved: RunSettings, forecast_of: Callable[[RunSettings], Forecast], room: Room
) -> RunSettings:
    """`resolved` with a smaller `optimizer_delay` than the fixed rule's, where host memory has no room for all that waits by
    that, and the JSON leaves both the delay and where gradients wait null. Not for a run that may give up its early steps, for
    want of room on the SSD: then all waits. See [Note: less waits]. Collective."""
    forecast = forecast_of(resolved)
    written = section.optimizer_delay is not None or section.gradient_host_share is not None
    if written or resolved.keep_gradients or not (forecast.terms.one_memory and forecast.timing.final):
        return resolved

    def needed(delay: float) -> int:
        return _needed(forecast_of(replace(resolved, optimizer_delay=delay)), room)

    rule = forecast.timing.delay
    fitting = (delay for share in _shares(_DELAY_STEPS) if needed(delay := share * rule) <= room[0])
    delay = min(ranks.all_gathered(next(fitting, 0.0)))
    if delay == rule:
        return resolved
    reason = f"null: {delay:g}, host memory holds no more gradients that wait for the next forward"
    reasons = MappingProxyType({**resolved.reasons, "optimizer_delay": reason})
    return replace(resolved, optimizer_delay=delay, reasons=reasons)


def choose_early_steps(
    section: VerticalConfig, resolved: RunSettings, forecast_of: Callable[[RunSettings], Forecast], room: Room
) -> RunSettings:
    """`resolved` without early steps, where nobody asks for them, and more gradients can wait in host memory then. See
    [Note: early steps given up]. Collective."""
    timing = forecast_of(resolved).timing
    written = section.optimizer_delay is not None or section.optimizer_speculation is not None
    if written or timing.certain or not timing.possible:
        return resolved
    late, is_open = replace(resolved, optimizer_delay=1.0), section.gradient_host_share is None and not resolved.keep_gradients
    shares = list(_shares()) if is_open else [resolved.gradient_host_share]

    def waiting(resolved: RunSettings) -> float:
        """The largest share of the gradients that host memory holds; below 0 where it holds none, and not the run."""
        each = ((share, forecast_of(replace(resolved, gradient_host_share=share))) for share in shares)
        return next((share for share, forecast in each if _needed(forecast, room) <= room[0]), -1.0)

    early, given_up = (min(every) for every in zip(*ranks.all_gathered((waiting(resolved), waiting(late))), strict=True))
    if early >= given_up:
        return resolved
    reason = "null: 1, host memory holds more of what waits without the new values of early steps"
    return replace(late, reasons=MappingProxyType({**resolved.reasons, "optimizer_delay": reason}))


def choose_gradient_tier(
    section: VerticalConfig, resolved: RunSettings, forecast_of: Callable[[RunSettings], Forecast], room: Room
) -> RunSettings:
    """`resolved` with the largest `gradient_host_share` that host memory has room for, where the JSON leaves it null and the
    optimizer's state is on SSD, beside which the others can wait. Where nothing fits, the least; then the budget says so."""
    if section.gradient_host_share is not None or resolved.keep_gradients or not forecast_of(resolved).state_in_files:
        return resolved

    def needed(share: float) -> int:
        return _needed(forecast_of(replace(resolved, gradient_host_share=share)), room)

    shares = list(_shares())
    fitting = (share for share in shares if needed(share) <= room[0])
    share = min(ranks.all_gathered(next(fitting, None) or min(shares, key=needed)))
    if share == 1.0:
        return resolved
    reason = f"null: host memory holds no more of what waits; {1 - share:.0%} waits on SSD"
    reasons = MappingProxyType({**resolved.reasons, "gradient_host_share": reason})
    return replace(resolved, gradient_host_share=share, reasons=reasons)


def choose_state_share(
    section: VerticalConfig, resolved: RunSettings, forecast_of: Callable[[RunSettings], Forecast], room: Room
) -> RunSettings:
    """`resolved` with the largest `optimizer_host_share` that fits on every rank, where the JSON leaves it null; all other
    choices that the budget counts have been made. See [Note: state in host memory] and [Note: nothing left to step early].
    Collective."""
    if section.optimizer_host_share is not None:
        return resolved
    share, why = 0.0, _why_no_state(resolved, forecast_of(resolved))
    if why is None:
        fitting = _fitting_states(resolved, forecast_of, room)
        if section.optimizer_delay == 0 and _timing(resolved, forecast_of, 0.0).possible:
            fitting = [each for each in fitting if _timing(resolved, forecast_of, each).possible]
        every = ranks.all_gathered(fitting)
        share = max(set.intersection(*map(set, every)), default=0.0)
        held = {1.0: "all", 0.0: "none"}.get(share, "no more")
        why = f"{USED_BY_STATE:.0%} of what host_memory_bytes and the machine leave beside the rest holds {held} of it"
    chosen = replace(resolved, optimizer_host_share=share)
    reasons = {**resolved.reasons, _STATE_KEY: f"null: {why}"}
    planned = section.optimizer_delay is None and resolved.optimizer_delay not in (None, 1)
    if planned and not forecast_of(chosen).timing.possible:
        chosen = replace(chosen, optimizer_delay=None)
        reasons["optimizer_delay"] = "null: 1, as no state is left on SSD that could be stepped early"
    return replace(chosen, reasons=MappingProxyType(reasons))


def _timing(resolved: RunSettings, forecast_of: Callable[[RunSettings], Forecast], share: float) -> StepTiming:
    return forecast_of(replace(resolved, optimizer_host_share=share)).timing


def _why_no_state(resolved: RunSettings, forecast: Forecast) -> str | None:
    """Why none of the state is put into host memory, whatever there is of it; None where it may be."""
    if not forecast.state_in_files:
        return "0, the JSON puts no optimizer state on SSD"
    if forecast.terms.one_memory or not _stay_on_device(resolved.activations):
        return "0, since activations take host memory, and how much shows with the first batch; a plan counts them"
    if resolved.host_memory_bytes is None:
        return "0, since host_memory_bytes is null, and the machine's free memory is not this run's alone; write either"
    return None


def _stay_on_device(activations: ActivationSettings) -> bool:
    """Whether the JSON moves nothing of the activations, and keeps nothing, off the device."""
    kept = (share for tier, share in activations.kept_shares.items() if tier is not Tier.DEVICE)
    return not any((*activations.shares.values(), *kept))


def _fitting_states(resolved: RunSettings, forecast_of: Callable[[RunSettings], Forecast], room: Room) -> list[float]:
    """The shares of the state, above none, for which this rank has room, by the JSON and on the machine, also while stock's
    optimizer is set up."""

    def needed(share: float) -> int:
        other = forecast_of(replace(resolved, optimizer_host_share=share))
        may = other.timing.generations == 2 and not other.timing.demanded  # where the SSD lacks a second generation
        return max(*(_needed(other, room, gives_up) for gives_up in {False, may}), room[1] + other.setup_bytes)

    least = needed(0.0)
    most = least + USED_BY_STATE * (min(room[0], machine_room()) - least)
    return [share for share in _shares(STATE_SHARES) if share and needed(share) <= most]


def spared(room: Room) -> Room:
    """Less of the room, for choices: what they import is the process's by the time of the memory check, which would refuse
    them."""
    allowed, baseline = room
    return allowed - min(_IMPORTED_BYTES, allowed // 100), baseline


def choose_all(
    section: VerticalConfig,
    resolved: RunSettings,
    forecast_of: Callable[[RunSettings], Forecast],
    model: nn.Module,
    report: Mapping[str, object] | None,
    room: Room,
) -> RunSettings:
    """`resolved` with every null replaced that host memory or the machine's rates decide before the first step, once
    `choose_delay` has been asked: what stock has in host memory, then timing, and of what these leave the state. `report`: see
    `choose_timing`. The choices leave some of the room: see `spared`. Collective."""
    room = spared(room)
    resolved = choose_copy_share(resolved, forecast_of, room)
    resolved = choose_early_steps(section, resolved, forecast_of, room)
    resolved = choose_gradient_tier(section, resolved, forecast_of, room)
    resolved = choose_timing(section, resolved, forecast_of(resolved).paired(room), model, report, room)
    return choose_state_share(section, resolved, forecast_of, room)


def settle_read_ahead(section: VerticalConfig, resolved: RunSettings, forecast: Forecast) -> RunSettings:
    """`resolved` with the bytes of host memory for state that is read before the norm, as the memory check has found them."""
    found, asked = read_ahead_bytes(forecast), section.optimizer_read_ahead_bytes
    if found == asked:
        return resolved
    why = forecast.why_ahead
    reason = f"null: {why}" if asked is None else f"{asked} as written: {why}"
    reasons = MappingProxyType({**resolved.reasons, "optimizer_read_ahead_bytes": reason})
    return replace(resolved, optimizer_read_ahead_bytes=found, reasons=reasons)


def refuse_fetched_compiled(resolved: RunSettings, model: nn.Module) -> None:
    """Raise ConfigError for `outside_layers` "fetched" beside compiled modules, in which `OutsideWatch` sees no uses."""
    if resolved.outside_layers == "fetched" and any_compiled(model):
        raise ConfigError(
            f'{SECTION}.outside_layers: got "fetched" for a model with compiled modules, in which uses of parameters cannot be'
            ' seen; write "resident"'
        )


def choose_timing(
    section: VerticalConfig,
    resolved: RunSettings,
    forecast: Forecast,
    model: nn.Module,
    report: Mapping[str, Any] | None,
    room: Room,
) -> RunSettings:
    """`resolved` with `prefetch_layers` and `optimizer_delay` planned where the JSON leaves them null. `report`: of
    `ds-vertical limits`, None where there is none: then the fixed rules stand. `forecast`: by these. The plan is for the rank
    with the least room, on the host with the most ranks."""
    free = [key for key in ("prefetch_layers", "optimizer_delay") if getattr(section, key) is None]
    if not (free and resolved.overlap and resolved.order == "vertical"):
        return resolved
    chosen, ranks_here = None, ranks.most_ranks_on_a_host()
    room = min(ranks.all_gathered(room), key=_left)
    if report is not None and ranks.rank() == 0:
        with contextlib.suppress(CostsError):  # of an older version, or nothing that this model can be planned by: the rules
            profile, tokens = Profile.from_dict("this machine", report), _tokens(model, forecast.micro_batch_size)
            problem = _problem(resolved, forecast, profile, tokens, room, ranks_here)
            chosen = None if problem is None else _chosen(section, resolved, forecast, problem, profile)
    planned = ranks.all_gathered(chosen)[0]
    if planned is None:
        return resolved
    window, delay, reason = planned
    values = {"prefetch_layers": window, "optimizer_delay": delay}
    told = [key for key in free if values[key] is not None and (key != "optimizer_delay" or delay != resolved.optimizer_delay)]
    reasons = MappingProxyType({**resolved.reasons, **{key: f"null: {reason}" for key in told}})
    return replace(resolved, **{key: values[key] for key in free}, reasons=reasons)


def _left(room: Room) -> int:
    allowed, baseline = room
    return allowed - baseline


def _chosen(
    section: VerticalConfig, resolved: RunSettings, forecast: Forecast, problem: LpProblem, profile: Profile
) -> tuple[int, float | None, str]:
    """(prefetch_layers, optimizer_delay, why) for the JSON's nulls. Raises CostsError."""
    timing, terms = forecast.timing, forecast.terms
    early = timing.possible and timing.certain
    choice = Choice(1, terms.num_micro_batches, 1, terms.window, timing.delay, early, problem.shape.placement)
    windows = WINDOWS[:2] if section.prefetch_layers is None else (resolved.prefetch_layers,)
    delays = _DELAYS if section.optimizer_delay is None and early else (timing.delay,)
    best, rule = tune_timing(problem, choice, windows, [delay for delay in delays if delay < 1])
    delay = best.choice.delay if section.optimizer_delay is None and early else resolved.optimizer_delay
    return best.choice.window, delay, _reason(best, rule, profile)


def _problem(
    resolved: RunSettings, forecast: Forecast, profile: Profile, tokens: int, room: Room, ranks_here: int
) -> LpProblem | None:
    """This model on this rank's part of the machine; None where the profile cannot tell. `tokens`: of a micro-batch. Raises
    CostsError."""
    seconds = _estimate(forecast.shape, profile, resolved.blocks_per_layer, tokens)
    if seconds is None:
        return None
    machine = profile.machine.shared(ranks_here)
    seconds = seconds.times(ranks_here if machine.one_memory else 1)
    timing = forecast.timing
    shape = shaped(forecast.shape, seconds, resolved.blocks_per_layer)
    allowed, baseline = room
    limits: TierBytes = per_tier({Tier.DEVICE: None, Tier.HOST: allowed, Tier.SSD: None})
    early = timing.possible and timing.certain
    return LpProblem(shape, machine, forecast.terms, limits, timing.delay, early, forecast.further(baseline))


def _reason(best: Candidate, rule: Candidate, profile: Profile) -> str:
    gain = rule.estimate_s / best.estimate_s - 1
    why = f"{gain:.0%} faster than the fixed rule" if best is not rule else "the fixed rule, which nothing beats"
    return f"planned from the limits of {profile.date}: {why}"


def _tokens(model: nn.Module, micro_batch_size: int) -> int:
    """Of a micro-batch, before there is one: whole sequences."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    if not (isinstance(positions, int) and positions > 0):  # XLNet's is -1: no limit
        return micro_batch_size * _MOST_TOKENS
    return micro_batch_size * min(_MOST_TOKENS, positions)


def _estimate(shape: ModelShape, profile: Profile, blocks_per_layer: int, tokens: int) -> Seconds | None:
    """Of one block, from its elements: two operations each and token in a forward."""
    rate = profile.flops_per_s.get(_DTYPES.get(shape.param_bytes, ""))
    if rate is None:
        return None
    forward = 2 * max(shape.layer_elements) / blocks_per_layer * tokens / rate
    head = 2 * outside_elements(shape) / 2 * tokens / rate  # of what is outside the layers, half is the head
    return Seconds(forward, 2 * forward, 0.0, 0.0, 3 * head)
