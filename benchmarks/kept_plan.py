"""What a plan keeps in a row of `kept.py`, and the simulator's seconds of each arm.

The arms of a row differ in nothing but `activations`, while `search.choose` would also choose where the optimizer's state rests
and when it steps. So these are given here. The linear program mixes the tiers of one policy at a time, and the simulator ranks
the mixtures in whole cells. The plan is the simplest of those within a hundredth of the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from ds_vertical.planner import linear_program, memory_budget
from ds_vertical.planner.candidate import POLICIES, Candidate, Choice, simplicity
from ds_vertical.planner.kept_activations import KeepMenu, KeptShare, PolicyPoint, mean_menu, rounded
from ds_vertical.planner.linear_program import LpProblem
from ds_vertical.planner.machine import Profile
from ds_vertical.planner.model_shape import Division, ModelSpec, Seconds, shape_of
from ds_vertical.types import HOLDING, ActivationPolicy, Tier

WINDOW: Final = 1  # prefetch_layers of all arms
DELAY: Final = 0.25  # their optimizer_delay: the rest is stepped in the backward
_EQUAL: Final = 1.01
_MOVES_NOTHING: Final = {
    "parameters_in_host": 0.0,
    "activations_on_host": 0.0,
    "activations_on_ssd": 0.0,
    "gradients_on_ssd": 0.0,
}
LIBRARIES: Final = memory_budget.BudgetItem(Tier.HOST, "interpreter and libraries", 800 << 20, "(measured)")


@dataclass(frozen=True)
class Planner:
    """The step of one row, on a machine as it was measured for it. `host_bytes`: of host memory that the run may take (None:
    what the machine has free)."""

    spec: ModelSpec
    seconds: Seconds
    profile: Profile
    num_micro_batches: int
    host_bytes: float | None = None

    def plan(self, tiers: Sequence[Tier]) -> Candidate:
        """The plan that keeps in `tiers`, or nothing."""
        found = [candidate for candidate in self._ways(tiers) if self._fits(candidate)] or [self.candidate(None)]
        fastest = min(candidate.estimate_s for candidate in found)
        return min((c for c in found if c.estimate_s <= _EQUAL * fastest), key=simplicity)

    def best_holding(self, tiers: Sequence[Tier]) -> ActivationPolicy:
        """Of the policies that keep bytes the one with the fastest step, though keeping nothing may be faster still."""
        holding = [c for c in self._ways(tiers) if c.choice.policy in HOLDING]
        return min(holding, key=lambda c: c.estimate_s).choice.policy if holding else "everything"

    def predicted_s(self, activations: Mapping[str, Any]) -> float:
        """Seconds of a step with the JSON's `activations`."""
        return self.candidate(self.kept_of(activations)).estimate_s

    def candidate(self, kept: KeptShare | None) -> Candidate:
        """The row's step with so much kept."""
        shape = replace(self._case.shape, kept=kept)
        choice = Choice(1, self.num_micro_batches, 1, WINDOW, DELAY, True, shape.placement, kept=kept)
        return Candidate(choice, replace(self._case, shape=shape), 0.0, ())

    def kept_of(self, activations: Mapping[str, Any]) -> KeptShare | None:
        """What the JSON's `activations` keep, as `activations_of` writes them."""
        policy: ActivationPolicy = activations.get("keep") or "none"
        if policy == "none":
            return None
        tier = Tier(activations.get("keep_device") or Tier.DEVICE)
        shares = {tier: activations.get("keep_share", 1.0)}
        if tier is Tier.SSD:
            shares[Tier.HOST] = activations.get("keep_host_share", 0.0)
        return KeptShare(self._point(policy), *(shares.get(each, 0.0) for each in Tier))

    def menu(self, policy: ActivationPolicy) -> KeepMenu | None:
        """The one point of a policy; None where nothing has been counted."""
        rate = self.profile.flops_per_byte(self.spec.dtype)
        counted = (
            replace(menu, points=tuple(p for p in menu.points if p.policy == policy and p.outputs is None))
            for menu in self.spec.menus
        )
        return mean_menu([menu.menu(1, self.seconds, rate) for menu in counted])

    def _point(self, policy: ActivationPolicy) -> PolicyPoint:
        """The same; of a policy that saves nothing its bytes alone."""
        menu = self.menu(policy)
        if menu is not None and menu.points:
            return menu.points[0]
        sizes = (point.num_bytes for counted in self.spec.menus for point in counted.points if point.policy == policy)
        return PolicyPoint(policy, max(sizes, default=0), 0.0)

    @cached_property
    def _case(self) -> LpProblem:
        machine, spec = self.profile.machine, self.spec
        division = Division(1, generations=2, part_elements=memory_budget.PART_ELEMENTS)
        terms = memory_budget.BudgetTerms(self.num_micro_batches, WINDOW, held_share=DELAY, one_memory=machine.one_memory)
        limits = {**self.profile.capacity, Tier.HOST: self.host_bytes or self.profile.capacity[Tier.HOST]}
        copy = memory_budget.norm_copy(spec.largest_parameter, machine.one_memory)
        reducing = memory_budget.reduce_bytes(spec.largest_parameter, machine.one_memory)
        shape = replace(shape_of(spec, self.seconds, division), reduce_bytes=reducing)
        return LpProblem(shape, machine, terms, limits, DELAY, True, (LIBRARIES, copy), fixed=_MOVES_NOTHING)

    def _ways(self, tiers: Sequence[Tier]) -> Iterator[Candidate]:
        """Nothing kept; each policy in the shares that the program gives it, and of all cells in one tier."""
        yield self.candidate(None)
        for policy in POLICIES[1:]:
            menu = self.menu(policy)
            if menu is None or not menu.points:
                continue
            places = tuple(tiers) if policy in HOLDING else (Tier.DEVICE,)
            solution = linear_program.solve(replace(self._case, menu=menu, keep_tiers=places))
            mixed = {tier: min(1.0, share) for _, tier, share in solution.kept} if solution is not None else {}
            for shares in (mixed, *({tier: 1.0} for tier in places)):
                kept = KeptShare(menu.points[0], *(shares.get(tier, 0.0) for tier in Tier))
                kept = rounded(kept, self._case.shape.num_layers, self.num_micro_batches)
                if kept.total:
                    yield self.candidate(kept)

    def _fits(self, candidate: Candidate) -> bool:
        limits = ((tier, limit) for tier, limit in self._case.limits.items() if limit is not None)
        case = candidate.case
        return all(linear_program.tier_bytes(case, case.shape.placement, tier) <= limit for tier, limit in limits)


def activations_of(kept: KeptShare | None) -> dict[str, Any]:
    """The JSON's `activations` that keep so much. On a machine with one memory the device's share is host memory's."""
    if kept is None:
        return {"keep": "none"}
    policy, near = kept.point.policy, kept.device + kept.host
    if policy not in HOLDING:
        return {"keep": policy}
    if not kept.ssd:
        tier = Tier.DEVICE if kept.device else Tier.HOST
        return {"keep": policy, "keep_device": tier.value} | ({"keep_share": near} if near < 1 else {})
    shares = {"keep_share": kept.ssd} if kept.ssd < 1 else {}
    return {"keep": policy, "keep_device": Tier.SSD.value} | shares | ({"keep_host_share": near} if near else {})
