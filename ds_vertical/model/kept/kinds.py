"""Kinds of block calls: those of one class, with arguments of one form, keep the same way.

[Note: trial] Whether a way of keeping gives a block the gradients that it has without, its first call of a kind shows: that
call's backward runs both ways, and the bits are compared. In that trial all memory that the way leaves out of the computation
is filled with NaN, so that what reads it shows. Where a bit differs the kind gives its policy up. What the step computes comes
from the plain way, however the trial ends. Gradients that are not finite tell nothing, and the next call is tried.

[Note: falls] A kind that gives its policy up keeps nothing of the calls that have begun. Later calls are of a kind with the
next lower policy, which has a trial of its own, and so on down to "none". What forbids to leave operations out of a recompute
forbids "products" and "free" alike, and "none" follows at once. Each rank falls by itself, and says so in its own output: what
another one keeps changes neither its schedule, in which events of cells that keep nothing do nothing, nor its bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field

import torch
from torch import nn

from ds_vertical.model.block_call import BlockCall
from ds_vertical.model.kept.members import Members, runs_users_code
from ds_vertical.model.kept.recording import CallPlan
from ds_vertical.model.layers import Block, LayerMap
from ds_vertical.model.state.containers import SIMPLE
from ds_vertical.schedule.events import Cell, Unit
from ds_vertical.types import BELOW, ActivationPolicy

OTHER_OPERATIONS = "it does not run the same operations each time"
MOST_VIEWS_LEFT = 3  # calls in a row, see `Kind`
_MOST_KINDS = 256  # with a plan of their own each; calls of further kinds keep nothing


@dataclass(eq=False)
class Kind:
    """How the calls of one kind keep. `policy`: in force, "none" once it is given up; `below`: of its later calls then.
    `is_tried`: the trial has been passed. `plan`: of the operations that the backward leaves out or finds ready; None until a
    call has been recorded, and where there is nothing to plan.
    `num_views_left`: calls in a row behind which more tensors lay over a parameter's memory than ahead of them. One may be
    another thread's, which steps parameters of other layers in the same memory: that call keeps nothing."""

    policy: ActivationPolicy
    below: ActivationPolicy = "none"
    is_tried: bool = False
    plan: CallPlan | None = None
    num_views_left: int = 0


@dataclass(eq=False)
class KeptKinds:
    """The kinds of one model's block calls, in all steps. `policy`: the one that the run asks for; `say` takes lines for the
    user's log. `outputs`: with "products", how many each call keeps, see `types.point_name`. `cells`: of the step under way,
    those that keep (layer and micro-batch); None: all."""

    policy: ActivationPolicy
    say: Callable[[str], None]
    outputs: int | None = None
    cells: Collection[Cell] | None = None
    _members: dict[int, Members] = field(default_factory=dict, init=False)
    _kinds: dict[Hashable, Kind] = field(default_factory=dict, init=False)
    _own: set[int] = field(default_factory=set, init=False)  # blocks that are a class of their own
    _said: set[tuple[type, ActivationPolicy, str]] = field(default_factory=set, init=False)

    @property
    def found(self) -> list[Kind]:
        """The kinds so far."""
        return list(self._kinds.values())

    @property
    def in_force(self) -> ActivationPolicy:
        """The policy by which calls keep: the one asked for, but where all that keep have fallen to the same other one."""
        found: set[ActivationPolicy] = {kind.policy for kind in self.found if kind.policy != "none"}
        return found.pop() if len(found) == 1 else self.policy

    def blocks_of(self, micro_batch: int, layers: LayerMap) -> frozenset[int]:
        """The blocks of a micro-batch that keep, by their numbers."""
        keeping = (own for layer, own in enumerate(layers.layers) if self.cells is None or (layer, micro_batch) in self.cells)
        return frozenset(block for own in keeping for block in own)

    def of(self, index: int, block: Block, call: BlockCall, compiled: bool) -> Kind:
        """The kind of a call of a block, by the block's number, for which `members` has been asked. `compiled`: the block's
        forward is."""
        policy, members = self.policy, self._members[index]
        while policy != "none":
            reason = obstacle(members, policy, compiled)
            if reason is not None:
                self._note(block, "none", reason)
                break
            key = self._key(policy, index, members, call)
            kind = self._kinds.get(key)
            if kind is None and len(self._kinds) >= _MOST_KINDS:
                told = f"its calls have come in {_MOST_KINDS} forms, and each is planned for and tried by itself"
                self._note(block, "none", told)
                break
            if kind is None:
                below = BELOW[policy] if obstacle(members, BELOW[policy], compiled) is None else "none"
                kind = self._kinds[key] = Kind(policy, below)
            if kind.policy != "none":
                return kind
            policy = kind.below
        return Kind("none")

    def members(self, index: int, block: Block) -> Members:
        """Of a block, by the block's number."""
        known = self._members.get(index)
        if known is None or not known.are_current():
            known = self._members[index] = Members(block.module)
        return known

    def give_up(self, kind: Kind, block: Block, reason: str, of_recomputes: bool = False) -> None:
        """The kind's policy is not right: later calls fall to the next lower one. `of_recomputes`: the reason forbids to leave
        operations out of any recompute, and they keep nothing. See [Note: falls]."""
        if kind.policy != "none":
            kind.policy, kind.plan = "none", None
            kind.below = "none" if of_recomputes else kind.below
            self._note(block, kind.below, reason)

    def separate(self, index: int, kind: Kind, block: Block) -> None:
        """A call of the block ran other operations than those planned: let the block be a kind of its own, once; where it is
        one, keep nothing of it."""
        if index in self._own:
            self.give_up(kind, block, OTHER_OPERATIONS, of_recomputes=True)
        self._own.add(index)

    def _key(self, policy: ActivationPolicy, index: int, members: Members, call: BlockCall) -> Hashable:
        state = call.state
        exact = policy != "everything"  # what autograd saves is told anew in each call, operations are planned once
        forms = tuple([_form_of(value, exact) for value in call.args])
        own = index if exact and index in self._own else -1
        trained = members.trained  # decides what autograd saves
        about_block = type(members.modules[0]), own, members.modes, trained
        given = call.form.spec if call.form.plan is None else call.form.plan  # the latter is compared in less time
        return policy, *about_block, forms, given, state.grad, state.inference, state.autocast

    def _note(self, block: Block, instead: ActivationPolicy, reason: str) -> None:
        said = type(block.module), instead, reason
        if said not in self._said:
            self._said.add(said)
            place = f"{type(block.module).__name__} ({block.path})"
            self.say(f'vertical_schedule.activations.keep: "{instead}" in place of "{self.policy}" for {place}: {reason}')


def _form_of(value: object, exact: bool) -> Hashable:
    """What of an argument decides which operations run, as far as the argument tells."""
    if isinstance(value, torch.Tensor):
        sizes = (value.size(), value.stride()) if exact and value.layout is torch.strided else value.dim()
        return type(value), sizes, value.dtype, value.device, value.requires_grad
    return (type(value), value) if type(value) in SIMPLE else type(value)


def obstacle(members: Members, policy: ActivationPolicy, compiled: bool) -> str | None:
    """Why no call of a block can be kept under the policy; None where some may. `compiled`: the block's forward is."""
    if policy != "everything":
        if compiled or members.has_compiled:
            return "it is compiled, and one operation cannot be left out of a compiled kernel"
        if members.has_forward_hooks:
            return "modules inside it have forward hooks, which may read what the backward leaves out"
    if members.has_backward_hooks:
        return "it has hooks of the backward, which would run twice in the trial"
    return None


def runs_others_code(layers: LayerMap, unit: Unit) -> bool:
    """Whether hooks of users run in the backward of a layer, those of all modules included; False for `pre`."""
    if any(getattr(nn.modules.module, name, None) for name in ("_global_backward_hooks", "_global_backward_pre_hooks")):
        return True
    if not isinstance(unit, int):
        return False
    modules = (layers.blocks[block].module for block in layers.layers[unit])
    return any(runs_users_code(module.modules(), module.parameters()) for module in modules)
