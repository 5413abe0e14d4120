"""What a schedule's handlers tell the optimizer of the steps to come, and how much host memory their state is read into.

[Note: before the norm] With clipping all steps wait for the norm. Their state need not: which steps come behind the norm, and
in which order, is known from the turn from forward to backward on. So the handlers tell all of them there, and the pipeline
reads their state during the backward and beside the norm. Behind the norm CPU Adam and the writes are left.

[Note: what is left] That state takes what all else leaves of the host memory that the budget allows. The rest is known at the
turn: by then a step has all that passes between its layers, and all that its forwards keep. So the handlers measure it there,
in each step, and the pipeline uses as many of its further slots as half of the rest holds, and as half of what the machine has
available. The most that any of the last steps has had counts, since state that was read waits in its slot until the next
forward, in which as much comes into memory again.

[Note: more than before] Longer micro-batches bring more in their forward already, ahead of the turn, beside the slots of the
step before. What has entered the first layer shows it as soon as all of them have left that layer. Where that is more than in
any of the last steps, what passes and what is kept is taken to grow alike, and slots give their memory back at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from ds_vertical.compat import accelerator
from ds_vertical.distributed import ranks
from ds_vertical.engine.zero3.interface import Optimizer
from ds_vertical.io import host
from ds_vertical.model.micro_batch import MicroBatch
from ds_vertical.offload.activation_store import ActivationStore
from ds_vertical.offload.kept_store import KeptStore
from ds_vertical.offload.state_files import StepShare
from ds_vertical.offload.step_pipeline import StepPipeline
from ds_vertical.planner.memory_budget import USED_BY_READING
from ds_vertical.schedule.events import EARLY, Event, Op, Schedule
from ds_vertical.types import Tier

_STEPS: Final = 4  # of the last ones, whose most counts


class ReadAheadRoom:
    """Host memory of one engine for state that is read before the norm. `left`: bytes that the memory budget leaves for what
    passes between layers, for what is kept, and for this. See [Note: what is left]."""

    def __init__(self, pipeline: StepPipeline, left: int) -> None:
        self._pipeline = pipeline
        self._left = left
        self._held: deque[int] = deque(maxlen=_STEPS)
        self._entering: deque[int] = deque(maxlen=_STEPS)

    def foresee(self, entering: int) -> None:
        """So many bytes have entered the first layer, in all micro-batches of the step. See [Note: more than before]."""
        most = max(self._entering, default=0)
        self._entering.append(entering)
        if entering > most > 0 and self._held and self._pipeline.reads.has_further:
            self._pipeline.reads.allow(USED_BY_READING * max(0.0, self._left - max(self._held) * entering / most))

    def open(self, held: int) -> bool:
        """A step is at its turn, and has `held` bytes of that memory. Returns whether any is left. The
        pipeline's thread is not started for it: the first step does that, behind its norm."""
        self._held.append(held)
        if self._pipeline.thread is None:
            return False
        there = host.available_bytes() // ranks.ranks_on_this_host() + self._pipeline.reads.held_bytes
        self._pipeline.reads.allow(USED_BY_READING * max(0, min(self._left - max(self._held), there)))
        return self._pipeline.reads.has_further


class StepHints:
    """Tells the optimizer which steps come, as the events of one schedule are issued. `room`: None where no state is read
    before the norm; `held`: bytes of host memory that passing and kept activations have; `entering`: bytes that enter the first
    layer."""

    def __init__(
        self,
        schedule: Schedule,
        optimizer: Optimizer,
        room: ReadAheadRoom | None,
        held: Callable[[], int],
        entering: Callable[[], int],
    ) -> None:
        self._coming = schedule.coming
        self._teller = schedule.teller_of_rest
        self._units = schedule.outside.around(range(schedule.num_layers))
        self._rest: StepShare = "delayed" if schedule.early else "all"
        self._optimizer = optimizer
        self._room = room
        self._held, self._entering = held, entering
        self._foreseen = room is None
        self._is_open: bool | None = None  # None: the turn has not come

    def tell(self, event: Event) -> None:
        """The event has been issued, or is about to be computed."""
        if not self._foreseen and event.op in (Op.F, Op.HEAD) and event.layer != 0 and isinstance(event.layer, int):
            self._foreseen = True
            assert self._room is not None
            self._room.foresee(self._entering())
        if event.op is Op.HEAD and self._is_open is None:
            self._is_open = self._room is not None and self._room.open(self._held())
        coming = self._coming.get(event)
        if coming is not None and coming.layer is not None:
            self._optimizer.expect_steps((coming.layer,), "early" if coming.part == EARLY else None)
        if self._is_open and event == self._teller:
            self._optimizer.expect_steps(self._units, self._rest)


def entering_bytes(micro_batches: Sequence[MicroBatch]) -> int:
    """Bytes of the tensors that have entered the first layer in all micro-batches, wherever they rest by now."""
    return sum(tensor.numel() * tensor.element_size() for each in micro_batches for tensor in each.boundary.inputs(0))


def host_bytes_held(
    schedule: Schedule, micro_batches: Sequence[MicroBatch], stores: Sequence[ActivationStore | KeptStore | None]
) -> int:
    """Bytes of host memory that hold what passes between the layers, and what forwards keep, at the turn of a step. Where the
    device has memory of its own, of those alone that leave it."""
    tiers = (Tier.HOST, Tier.DEVICE) if accelerator.is_one_memory() else (Tier.HOST,)
    held = sum(store.num_bytes.get(tier, 0) for store in stores if store is not None for tier in tiers)
    if Tier.DEVICE not in tiers:
        return held
    count, sizes = schedule.num_layers, dict[tuple[int, int], int]()
    for number, micro_batch in enumerate(micro_batches):
        for tensor in (tensor for layer in range(count) for tensor in micro_batch.boundary.inputs(layer)):
            storage = tensor.untyped_storage()
            sizes[number, storage.data_ptr()] = storage.nbytes()
    passing = schedule.calls * sum(sizes.values())
    return held + passing * (count + 1) // max(1, count - 1)  # the last layer's inputs, and the gradients of one layer, too
