"""Chooses what forwards keep, where `activations.keep` is null, and in which tier, where that is written and
`activations.keep_device` is null: behind the first step, which has measured the model's blocks.

With the machine's rates known the planner's linear program and simulator choose policy, tier and shares. Without them nothing
is known of the SSD: where parameters or optimizer state are on one nothing is kept, otherwise everything for which the memory
budget leaves room on the device. Nothing is kept where nothing is gained, and where anything that the choice needs is unknown.

A written policy is kept in any case, and so is a written share. The plan then chooses among the tiers, and pairs of tiers, that
have room for all of it. Where there is no plan, and where no tier has room, the fixed rule stands: all rests on the device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from ds_vertical.distributed import ranks
from ds_vertical.engine.keeping.measured import MeasuredStep, agreed
from ds_vertical.engine.memory_check import Forecast
from ds_vertical.errors import CostsError, ScheduleError
from ds_vertical.planner import linear_program
from ds_vertical.planner.candidate import Candidate, Choice, difference
from ds_vertical.planner.kept_activations import KeptShare, keep_keys, num_cells, rounded
from ds_vertical.planner.linear_program import LpProblem
from ds_vertical.planner.machine import Profile
from ds_vertical.planner.model_shape import ModelShape, shaped
from ds_vertical.planner.search import tune_keeping, tune_tier
from ds_vertical.types import ActivationSettings, RunSettings, TensorKind, Tier

_LATER: Final = "chosen behind the first step, which measures what it would save"
_TIER_LATER: Final = "chosen behind the first step, which keeps nothing, and measures how much that would be"
USED: Final = 0.8  # of the room that is left in memory: later steps may need some of it
USED_ON_SSD: Final = 0.5  # of the free bytes: checkpoints need some, too


@dataclass(frozen=True)
class KeepChoice:
    """What is kept from now on, as the section's keys, and why."""

    settings: ActivationSettings
    reason: str


@dataclass(frozen=True)
class KeepPlanner:
    """Chooses for one run. `forecast`: of what its ranks hold; `report`: of `ds-vertical limits`, None where there is none;
    `allowed`, `baseline`: bytes of host memory as `budget.room.host_room` has them."""

    forecast: Forecast
    resolved: RunSettings
    report: Mapping[str, Any] | None
    allowed: int
    baseline: int

    def settled(self) -> str | None:
        """Why the fixed rule stands whatever the first step shows, by which nothing is kept, or a written policy on the device;
        None where it is worth a measurement. Collective."""
        forecast, resolved = self.forecast, self.resolved
        if forecast.shape.num_layers < 2:
            return "the last layer keeps its graph anyway, and there is no other"
        if self._is_written and (forecast.terms.one_memory and not forecast.uses_ssd):
            return "there is no other tier"
        if self._is_written and not resolved.activations.keep_share:
            return "a keep_share of 0 keeps nothing"
        if resolved.order != "vertical" or not resolved.overlap:
            return "plans are made for the vertical order with overlap alone"
        planned = self.report is not None and importlib.util.find_spec("scipy") is not None
        if not ranks.all_gathered(planned)[0] and (forecast.uses_ssd or self._is_written):
            missing = "run `ds-vertical limits`" if self.report is None else "install scipy"
            unknown = "the rates of this machine's SSD are not known, which may decide the step"
            return f"{unknown if forecast.uses_ssd else 'the rates of this machine are not known'}; {missing} for a plan"
        return None

    @property
    def _is_written(self) -> bool:
        """Whether the JSON has the policy, and leaves the tier alone."""
        return self.resolved.activations.keep is not None

    # ---- the choice

    def choose(self, own: MeasuredStep) -> KeepChoice:
        """What all ranks keep from now on. `own`: what this rank has measured. Collective."""
        step = agreed(ranks.all_gathered(own))
        here = ranks.most_ranks_on_a_host()
        chosen = self._chosen(step, here) if ranks.rank() == 0 else None
        found = ranks.all_gathered(chosen)[0]
        assert found is not None
        return found

    def _chosen(self, step: MeasuredStep, ranks_here: int) -> KeepChoice:
        if step.menu and not step.points:
            return self._fixed("no policy saves time in these blocks")
        if not step.points:
            if self._is_written:
                return self._fixed("; ".join(("the first step shows no bytes that a block would keep", *step.reasons)))
            why = "; ".join(step.reasons) or "no block's backward has run that could be measured"
            return self._fixed(f"no block can keep anything: {why}")
        try:
            if self.report is not None and importlib.util.find_spec("scipy") is not None:
                return self._planned(step, Profile.from_dict("this machine", self.report), ranks_here)
        except (CostsError, ScheduleError) as error:  # a report of an older version, or sizes that no plan can be made of
            if self.forecast.uses_ssd or self._is_written:
                return self._fixed(f"no plan can be made ({error})")
        return self._by_rule(step)

    def _planned(self, step: MeasuredStep, profile: Profile, ranks_here: int) -> KeepChoice:
        """By the planner. Raises CostsError."""
        problem = self.problem(step, profile, ranks_here)
        timing, terms = self.forecast.timing, self.forecast.terms
        choice = Choice(1, terms.num_micro_batches, 1, terms.window, timing.delay, problem.early, problem.shape.placement)
        source = f"planned from the limits of {profile.date} and the first step"
        if self._is_written:
            return self._in_a_tier(problem, choice, source)
        best, plain, second = tune_keeping(problem, choice)
        if best is plain:
            return self._fixed(f'{source}: no policy is faster than "none" by 1 %{_beside(best, second)}')
        return self._kept(best.choice.kept, f"{source}: {_gain(best, plain)}{_beside(best, second)}")

    def _in_a_tier(self, problem: LpProblem, choice: Choice, source: str) -> KeepChoice:
        """The written policy, for the written share of the cells."""
        best, plain, second = tune_tier(problem, choice, self.resolved.activations.keep_share)
        if best is None:
            return self._fixed(f"{source}: no tier has room for all of it")
        beside = _beside(best, second) or "; no other tier has room for all of it"
        return self._kept(best.choice.kept, f"{source}: {_gain(best, plain)}{beside}")

    def _by_rule(self, step: MeasuredStep) -> KeepChoice:
        """Everything that the device has room for; nothing is on SSD, so nothing but memory decides."""
        point = step.keep_menu(self._num_layers, self._blocks).points[-1]
        count, room = num_cells(self._num_layers, self.forecast.terms.num_micro_batches), self._room(step, Tier.DEVICE)
        share = 1.0 if room is None or not point.num_bytes else min(1.0, USED * room / (count * point.num_bytes))
        kept = rounded(KeptShare(point, device=share), self._num_layers, self.forecast.terms.num_micro_batches)
        if not kept.total:
            return self._fixed("the memory budget leaves no room for what a layer would keep")
        return self._kept(kept, "nothing rests on SSD, and the memory budget has room for it")

    def problem(self, step: MeasuredStep, profile: Profile, ranks_here: int) -> LpProblem:
        """This model, as the first step has shown it, on this rank's part of the machine. Raises CostsError."""
        forecast, resolved = self.forecast, self.resolved
        machine, timing = profile.machine.shared(ranks_here), forecast.timing
        if machine.one_memory != forecast.terms.one_memory:
            raise CostsError("machine.one_memory: the limits were measured with another accelerator")
        if machine.one_memory:  # the seconds of the step's own backwards have that code in them
            machine = replace(machine, schedule_backward_s=0.0)
        moved = forecast.shape.placement.with_shares(TensorKind.ACTIVATIONS, resolved.activations.shares)
        placed = replace(forecast.shape, placement=moved, activation_bytes=step.input_bytes)
        shape = shaped(placed, step.seconds, self._blocks)
        early = timing.possible and timing.certain
        menu = step.keep_menu(self._num_layers, self._blocks)
        further = forecast.further(self.baseline)
        terms = replace(forecast.terms, ahead=0)  # state that is read ahead takes what keeping leaves
        open_problem = LpProblem(shape, machine, terms, dict.fromkeys(Tier), timing.delay, early, further, menu)
        return replace(open_problem, limits=self._limits(open_problem, shape, step), keep_tiers=self._tiers(step))

    def _limits(self, problem: LpProblem, shape: ModelShape, step: MeasuredStep) -> dict[Tier, float | None]:
        """Bytes per tier: what the run takes of it by the planner's own formulas, and a part of the room that is left."""
        used = {Tier.DEVICE: USED, Tier.HOST: USED, Tier.SSD: USED_ON_SSD}
        limits: dict[Tier, float | None] = {}
        for tier in Tier:
            taken, room = linear_program.tier_bytes(problem, shape.placement, tier), self._room(step, tier)
            limits[tier] = None if room is None else taken + used[tier] * room + 1.0
        return limits

    def _tiers(self, step: MeasuredStep) -> tuple[Tier, ...]:
        """Where anything may be kept: not where there is no room at all."""
        return tuple(tier for tier in Tier if self._room(step, tier) != 0)

    def _room(self, step: MeasuredStep, tier: Tier) -> float | None:
        """Further bytes of a tier; the memory budget has left what passes between layers uncounted. On a device what is left
        beside the step counts it, but later steps may have more micro-batches."""
        room, terms = step.room[tier], self.forecast.terms
        if room is None or tier is Tier.SSD:
            return room
        shares = self.resolved.activations.shares
        if tier is Tier.DEVICE and not terms.one_memory:
            later = terms.num_micro_batches - (step.num_micro_batches or terms.num_micro_batches)
            stays = 1 - shares[Tier.SSD] - shares[Tier.HOST]
            return max(0.0, room - stays * max(0, later) * self._num_layers * step.input_bytes)
        resting = 1 - shares[Tier.SSD] if terms.one_memory else shares[Tier.HOST]
        return max(0.0, room - resting * (terms.num_micro_batches * self._num_layers + 2) * step.input_bytes)

    @property
    def _num_layers(self) -> int:
        return self.forecast.shape.num_layers

    @property
    def _blocks(self) -> int:
        return self.resolved.blocks_per_layer

    def _fixed(self, reason: str) -> KeepChoice:
        """Nothing is kept, or what the JSON asks for on the device."""
        if self._is_written:
            return KeepChoice(replace(self.resolved.activations, keep_device=Tier.DEVICE), reason)
        return self._kept(None, reason)

    def _kept(self, kept: KeptShare | None, reason: str) -> KeepChoice:
        keys = keep_keys(kept, self.forecast.terms.one_memory)
        if "keep_device" in keys:
            keys["keep_device"] = Tier(keys["keep_device"])
        if self._is_written and "keep_host_share" not in keys:
            keys.pop("keep_share", None)  # as it is written
        keys["keep_outputs"] = None if kept is None else kept.point.outputs
        return KeepChoice(replace(self.resolved.activations, **keys), reason)


def _gain(best: Candidate, plain: Candidate) -> str:
    """What keeping gains or, where the JSON asks for it, loses."""
    gain = 1 - best.estimate_s / plain.estimate_s
    return f'{abs(gain):.0%} {"less" if gain >= 0 else "more"} time a step than with "none"'


def _beside(best: Candidate, second: Candidate | None) -> str:
    """What the runner-up loses."""
    if second is None:
        return ""
    loss = second.estimate_s / best.estimate_s - 1
    more = "more" if loss >= 0 else "less, and is not as simple"
    return f"; the runner-up, {difference(best.choice, second.choice)}, takes {abs(loss):.1%} {more}"


def open_choice(planner: KeepPlanner) -> tuple[RunSettings, KeepPlanner | None]:
    """The settings with which a run starts, and its planner where what is kept, or its tier, is null and still to choose. Where
    it is null the settings say why. Collective."""
    resolved, activations = planner.resolved, planner.resolved.activations
    if not activations.is_open:
        return resolved, None
    settled = planner.settled()
    if activations.keep is None:
        told = f"keep null: {_LATER}" if settled is None else f"keep null: none: {settled}"
    else:
        told = f"keep_device null: {_TIER_LATER}" if settled is None else f"keep_device null: device: {settled}"
        activations = activations if settled is None else replace(activations, keep_device=Tier.DEVICE)
    own = resolved.reasons.get("activations", "default")
    reasons = MappingProxyType({**resolved.reasons, "activations": f"{own}; {told}"})
    return replace(resolved, activations=activations, reasons=reasons), planner if settled is None else None
