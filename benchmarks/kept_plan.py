"""What a plan keeps in a row of `kept.py`, and the simulator's seconds of each arm.

The arms of a row differ in nothing but `activations`, while `search.choose` would also choose where the optimizer's state rests
and when it steps. So these are given here, and `search.tune_keeping` chooses as it does behind the first step of a run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from ds_vertical.planner import memory_budget
from ds_vertical.planner.candidate import POLICIES, Candidate, Choice
from ds_vertical.planner.kept_activations import KeepMenu, KeptShare, PolicyPoint, keep_keys, mean_menu
from ds_vertical.planner.linear_program import LpProblem
from ds_vertical.planner.machine import Profile
from ds_vertical.planner.model_shape import Division, ModelSpec, Seconds, shape_of
from ds_vertical.planner.search import tune_keeping
from ds_vertical.types import HOLDING, ActivationPolicy, Tier

WINDOW: Final = 1  # prefetch_layers of all arms
DELAY: Final = 0.25  # their optimizer_delay: the rest is stepped in the backward
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
        best, *_ = tune_keeping(
            replace(self._case, menu=self._menu(POLICIES), keep_tiers=tuple(tiers)), self.candidate(None).choice
        )
        return best

    def best_on_ssd(self) -> ActivationPolicy:
        """Of the policies that keep bytes the one with the fastest step, where all of them rest on SSD; keeping nothing may be
        faster still."""
        return min(HOLDING, key=lambda policy: self.predicted_s({"keep": policy, "keep_device": Tier.SSD.value}))

    def keys(self, candidate: Candidate) -> dict[str, Any]:
        """The JSON's `activations` of a plan."""
        return keep_keys(candidate.choice.kept, self.profile.machine.one_memory)

    def predicted_s(self, activations: Mapping[str, Any]) -> float:
        """Seconds of a step with the JSON's `activations`."""
        return self.candidate(self.kept_of(activations)).estimate_s

    def candidate(self, kept: KeptShare | None) -> Candidate:
        """The row's step with so much kept."""
        shape = replace(self._case.shape, kept=kept)
        choice = Choice(1, self.num_micro_batches, 1, WINDOW, DELAY, True, shape.placement, kept=kept)
        return Candidate(choice, replace(self._case, shape=shape), 0.0, ())

    def kept_of(self, activations: Mapping[str, Any]) -> KeptShare | None:
        """What the JSON's `activations` keep, or a part of the products (`kept.chosen_in`)."""
        policy: ActivationPolicy = activations.get("keep") or "none"
        if policy == "none":
            return None
        tier = Tier(activations.get("keep_device") or Tier.DEVICE)
        shares = {tier: activations.get("keep_share", 1.0)}
        if tier is Tier.SSD:
            shares[Tier.HOST] = activations.get("keep_host_share", 0.0)
        return KeptShare(self._point(policy, activations.get("keep_outputs")), *(shares.get(each, 0.0) for each in Tier))

    def menu(self, policy: ActivationPolicy, outputs: int | None = None) -> KeepMenu | None:
        """The one point of a policy; None where nothing has been counted."""
        return self._menu((policy,), outputs)

    def _menu(self, policies: Collection[str], outputs: int | None = None) -> KeepMenu | None:
        rate = self.profile.flops_per_byte(self.spec.dtype)
        counted = (
            replace(menu, points=tuple(p for p in menu.points if p.policy in policies and p.outputs == outputs))
            for menu in self.spec.menus
        )
        return mean_menu([menu.menu(1, self.seconds, rate) for menu in counted])

    def _point(self, policy: ActivationPolicy, outputs: int | None = None) -> PolicyPoint:
        """The same; of a policy that saves nothing its bytes alone."""
        menu = self.menu(policy, outputs)
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
        reducing = memory_budget.reduce_bytes(spec.largest_parameter, 1, machine.one_memory)
        shape = replace(shape_of(spec, self.seconds, division), reduce_bytes=reducing)
        return LpProblem(shape, machine, terms, limits, DELAY, True, (LIBRARIES, copy), fixed=_MOVES_NOTHING)
