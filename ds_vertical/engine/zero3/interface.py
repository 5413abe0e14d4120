"""What the handlers of a schedule ask of the parameters and of the optimizer, and what they tell a self-check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from ds_vertical.distributed.gather_queue import GatherQueue
from ds_vertical.io.ticket import Ticket
from ds_vertical.offload.param_store import StandingCopies
from ds_vertical.offload.state_files import StepShare
from ds_vertical.schedule.levels import Arrival
from ds_vertical.types import Unit


class Params(Protocol):
    """Where a unit's parameters come from."""

    def fetch(self, unit: Unit, step: Ticket | None = None, arrival: Arrival = ...) -> Ticket:
        """Have the unit's full parameters on the device once the ticket has been waited for. `step`: makes their values.
        `arrival`: over which levels they come."""
        ...

    @property
    def gathers(self) -> GatherQueue:
        """Those of the units that are fetched, over the ranks."""
        ...

    @property
    def copies(self) -> StandingCopies | None:
        """The node's copies that stand from one step to the next; None where there is one level."""
        ...

    @property
    def recalls(self) -> bool:
        """Whether an early step of a unit finds the values in memory that its last release has left there."""
        ...

    def fetch_ahead(self, unit: Unit) -> Ticket | None:
        """Start reading what the next `fetch` of the unit needs, if that is not in memory."""

    def release(self, unit: Unit, comes_back: bool = False) -> None:
        """Give the unit's full parameters up. `comes_back`: its values are needed once more before they change."""

    def release_all(self) -> None:
        """Give up all units' full parameters, wherever a pass was cut."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory in its buffers."""
        ...


class Optimizer(Protocol):
    """What takes a unit's gradient sums and steps the unit."""

    def reduce_unit(
        self, unit: Unit, sums: Iterator[torch.Tensor], flat: torch.Tensor | None, give_back: Callable[[torch.Tensor], None]
    ) -> bool:
        """Average a unit's sums over the ranks and hold this rank's share. Returns whether `flat` is held now."""
        ...

    def reducing(self, unit: Unit, leaves: bool = False) -> Ticket | None:
        """Once after `reduce_unit`: what waits for the other ranks' part of it; None where there is none. `leaves`: the next
        schedule waits for it, see `left`."""

    def left(self) -> Ticket | None:
        """What waits for the reductions that the schedule before has left; None where it has left none."""

    def open_left(self) -> None:
        """These are over: take the norm of that schedule's gradients, and decide what they are for."""

    def hold_unit(self, unit: Unit) -> Ticket | None:
        """Start writing what of a unit's gradients waits on SSD."""

    def open_step(self) -> None:
        """Take the global norm, and decide whether the step counts."""

    def step_early(self, unit: Unit) -> Ticket | None:
        """Issue the parts of a unit that are stepped before the norm is known."""

    def expect_steps(self, units: Sequence[Unit], share: StepShare | None) -> None:
        """A hint: these steps will be issued next, in this order. `share`: of each unit; None: what is due."""

    def early_writes(self) -> Ticket | None:
        """What the norm waits for: a write of an early step that fails fails the step as a whole."""

    def conclude_early(self) -> None:
        """Commit the early steps, or discard them, as the norm says."""

    def step_unit(self, unit: Unit) -> Ticket | None:
        """Issue what is due of a unit; None where nothing is."""

    def step_ahead(self, unit: Unit) -> Ticket | None:
        """As `step_unit`, for the next schedule."""

    def stepped_ahead(self, unit: Unit) -> Ticket | None:
        """Once after `step_ahead`: what the unit's parameters wait for; None where there is nothing."""

    def is_left(self, unit: Unit) -> bool:
        """Whether the last step that was decided has left the unit, or a part of it, to be stepped behind that."""
        ...

    def abandon(self) -> None:
        """After an error in the middle of a step: complete the steps under way, and let early ones not have been."""


class GradientNotes(Protocol):
    """Hears of what the self-check's backwards make in the layers."""

    def note_gradient(self, micro_batch: int, param: nn.Parameter) -> None:
        """A parameter has its gradient of a micro-batch, ahead of its sum."""
        ...

    def note_sum(self, param: nn.Parameter, total: torch.Tensor, rounded: torch.dtype) -> None:
        """A parameter's gradients are summed, in this flat tensor. `rounded`: what each was rounded to, if it was finer."""
        ...
