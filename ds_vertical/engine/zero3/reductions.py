"""Gradients of one unit at a time: averaged over the ranks, their norms noted, and held until their step.

[Note: reductions in flight] With several ranks the event REDUCE of a unit copies the unit's sums and issues the collectives, in
a process group for reductions alone. The events that need the result, such as the unit's early STEP, stand behind the next
unit's backward (`place_behind`). So the reduction is under way during that backward. Meanwhile the copies are in memory besides
the next unit's sums: one unit's gradients. With `overlap: false` the executor waits for each REDUCE at once.

[Note: reductions left] Of a step with two halves the first half's last reductions are under way beyond the end of its schedule
(`schedule.halves`, [Note: gradients left]). Their tickets stand in `_left` until the second half waits for them. A reduction
sends copies. So where the second half is cut ahead of that, the tickets are forgotten, and nothing else need be done: all ranks
have issued them, or do so as they go with the others (`distributed.collective_replay`). They end by themselves, and nobody
takes what they bring.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ds_vertical.compat import zero_optimizer
from ds_vertical.compat.gradient_norm import NormMemory
from ds_vertical.distributed import ranks
from ds_vertical.engine.zero3.chunks import ChunkedStage3
from ds_vertical.io import host
from ds_vertical.io.ticket import Ticket
from ds_vertical.offload.grad_store import HeldGradients, ReducedSums
from ds_vertical.schedule.events import Unit

_Reduction = tuple[Sequence[nn.Parameter], Callable[[], list[torch.Tensor]]]  # of parameters, and what waits for their shares


def _as_it_is(_: nn.Parameter, share: torch.Tensor) -> torch.Tensor:
    return share


@dataclass(frozen=True)
class ShareSink:
    """Where reduced shares go: `gradients` holds them until their step. `whole`: what a parameter's share becomes ahead of its
    norm; it may change the share in place."""

    gradients: HeldGradients
    whole: Callable[[nn.Parameter, torch.Tensor], torch.Tensor] = _as_it_is


class UnitReductions:
    """What the event REDUCE of a schedule calls.

    `num_reductions`: collectives that this rank has issued so far to reduce gradients. `norm_memory`: host memory in which the
    norms of a step are computed. `sink`: where shares go that are reduced from now on. `trimmed`: units ahead of whose REDUCE
    freed memory goes back to the system, see [Note: freed memory] in `io.host`.
    """

    def __init__(self, optimizer: ChunkedStage3, gradients: HeldGradients) -> None:
        self.num_reductions = 0
        self.norm_memory = NormMemory()
        self._optimizer = optimizer
        self._gradients = gradients
        self.sink = ShareSink(gradients)
        self.trimmed: Collection[Unit] = ()
        self._under_way: dict[Unit, Ticket] = {}
        self._left: dict[Unit, Ticket] = {}

    def reduce_unit(
        self, unit: Unit, sums: Iterator[torch.Tensor], flat: torch.Tensor | None, give_back: Callable[[torch.Tensor], None]
    ) -> bool:
        """Average a unit's summed gradients over the ranks, and hold this rank's share until its step. With one rank that is
        done on return. With several it is done when the ticket of `reducing` has been waited for.

        `sums`: one flat sum per parameter of `in_chunk_order(unit)`, in the accumulation dtype (overwritten). All sums are
        neighbours in `flat`. Where `flat` is None, each sum is taken, copied and given up ahead of the next one. Returns
        whether `flat` itself is held now. Then it goes to `give_back` after the step, from any thread.
        """
        if unit in self.trimmed:
            host.trim()
        if not self._optimizer.in_chunk_order(unit):
            return False
        reductions, sink = self._start(unit, sums), self.sink
        if ranks.world_size() == 1:
            return self._hold(unit, ReducedSums(self._shares(reductions, sink), flat, give_back), sink)
        started = list(reductions)

        def finish() -> None:
            self._hold(unit, ReducedSums(self._shares(started, sink), None, give_back), sink)

        self._under_way[unit] = Ticket(f"reduce {unit}", finish)
        return False

    def reducing(self, unit: Unit, leaves: bool = False) -> Ticket | None:
        """The ticket that waits for the unit's reduction; None with one rank. To be asked for once after `reduce_unit`.
        `leaves`: the ticket of `left` waits for it, too, see [Note: reductions left]."""
        ticket = self._under_way.pop(unit, None)
        if leaves and ticket is not None:
            self._left[unit] = ticket
        return ticket

    def left(self) -> Ticket | None:
        """Waits for all reductions that the schedule before has left, in the order in which they were issued. None where it has
        left none."""
        return Ticket(f"reduce {', '.join(map(str, self._left))}", self._take_left) if self._left else None

    def forget_left(self) -> None:
        """The step in which they were left was cut."""
        self._left.clear()

    def open_left(self) -> None:
        """Raises RuntimeError: a step that is one schedule leaves nothing to the next one."""
        raise RuntimeError("NORM@-1 belongs to steps of two halves")

    def _take_left(self) -> None:
        while self._left:
            unit, ticket = next(iter(self._left.items()))
            ticket.wait()
            del self._left[unit]

    def _start(self, unit: Unit, sums: Iterator[torch.Tensor]) -> Iterator[_Reduction]:
        """Start the unit's reductions, one after the other."""
        for params in self._optimizer.reductions(unit):
            finish = self._optimizer.start_reduction(unit, [next(sums) for _ in params])
            self.num_reductions += 1  # not before: an error ahead of the collective leaves the other ranks alone in it
            yield params, finish
        for _ in sums:  # it has none left, and ends
            raise RuntimeError(f"unit {unit} has more sums than parameters")

    def _shares(self, reductions: Iterable[_Reduction], sink: ShareSink) -> Iterator[torch.Tensor]:
        """This rank's share of each sum, one after the other. Notes each share's norm."""
        for params, finish in reductions:
            shares = finish()
            for param in params:
                share = sink.whole(param, shares.pop(0))
                zero_optimizer.note_gradient(self._optimizer, param, share, self.norm_memory)
                yield share
                del share  # the sum's memory is free for what is reduced next

    def _hold(self, unit: Unit, reduced: ReducedSums, sink: ShareSink) -> bool:
        optimizer, timing = self._optimizer, self._optimizer.timing
        early = timing.early
        final = early and timing.final and optimizer.clip_grad == 0.0
        if reduced.flat is not None:
            reduced = ReducedSums(list(reduced.shares), reduced.flat, reduced.give_back)
        return sink.gradients.hold(unit, optimizer.chunks_of(unit), reduced, early=early, final=final)
