"""Host memory for the layer inputs that rest where they are made, where the device is the host.

Layer-major order keeps the inputs of all layers for all micro-batches until their backward. How large they are shows with the
first batch, when the memory budget has long been settled; what it has left is theirs. On a device of its own too large an
M ends in that device's own error; here the kernel would kill the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ds_vertical.memory import MemoryBudgetError
from ds_vertical.microbatch import MicroBatch
from ds_vertical.schedule import Event, Schedule

_TOLD_BY = 1  # the first layer whose inputs another one has made


class Allowance:
    """`limit`: bytes of host memory for this rank's layer inputs; None: they rest elsewhere."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit

    def check(self, event: Event, schedule: Schedule, micro_batches: Sequence[MicroBatch]) -> None:
        """A micro-batch has been through a layer. The first one of those that rest tells, behind its second layer, what all of
        them will take: inputs of every layer, and gradients between two. Raises MemoryBudgetError where that is too much,
        ahead of the memory's end."""
        resting = [index for index in range(len(micro_batches)) if index not in schedule.moved]
        if self._limit is None or event.layer != _TOLD_BY or resting[:1] != [event.micro_batch]:
            return
        first, count = micro_batches[resting[0]], len(resting) if schedule.order == "vertical" else 1
        before, after = (_storages(first.inputs(layer)) for layer in (_TOLD_BY - 1, _TOLD_BY))
        added = sum(num_bytes for address, num_bytes in after.items() if address not in before)
        needed = count * (schedule.num_layers + 1) * added
        if needed > self._limit:
            raise MemoryBudgetError(
                f"activations: {count} micro-batches' inputs of {schedule.num_layers} layers and gradients between two, {added}"
                f" bytes each, need {needed} bytes of host memory, the budget leaves {self._limit}; write"
                ' "vertical_schedule.activations": {"device": "ssd"}, a smaller gradient_accumulation_steps or'
                " train_micro_batch_size_per_gpu, or a larger vertical_schedule.host_memory_bytes where one is written"
            )


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by address."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}
