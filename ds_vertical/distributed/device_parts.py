"""What collectives over levels take from host memory to a device, and back: shards, and a rank's parts of the node's copies.

[Note: levels beside a device] On a device beside the host the thread that launches its work issues all collectives, in the
order of the schedule, in the stream that computes. Collectives of torch that nobody waits for later come between what the
stream was given before and what it is given next. So no two of them are ever under way on a rank, of whatever groups: hops of
weights, hops of gradients, DeepSpeed's own, the user's. Kernels of several communicators of NCCL cannot wait for each other
crosswise where all ranks issue them in one order into one stream. That is reasoned: it has run on simulated devices alone.

- A unit's hops are issued where the unit is first used, whatever has been read by then. When shards come differs from rank to
  rank, and must not decide. Those of its gradients are issued at its REDUCE. Ahead of that no other unit's are, as gathers over
  one level are (`gather_queue`, [Note: gathers ahead of reductions]): in the stream that computes nothing would be gained.
- So hops overlap with nothing that the same device computes, and not with each other. What does overlap: reads of the SSD, CPU
  Adam, the copies below, and whatever the host does: it issues and goes on. It waits for no hop.
- Copies to the device go through the stream of the store's fetches (`CopyStream`), and begin at once: while the device computes
  what it has been given before. What is computed next comes behind them, and so do hops of what they bring.
- A gather over one level, such as the self-check's in torch's order, is in the stream of the fetches. It waits there for what
  the stream that computes was given before, and the device computes nothing more until it is over.
- A hop that fails while it is issued, for lack of memory say, leaves the other ranks in it. So it raises `levels.HopError`,
  with which the run ends. What a unit's hops are of is made ahead of its first hop: that may fail, and the ranks leave the
  pass together.
- A part of a copy that is kept in host memory leaves in a stream of its own, behind its first gather and beside what follows.
  It comes back in the stream of the fetches. Events order the two; the host waits for neither.
- Memory for such parts is page-locked, and kept for the next part of its size. That one leaves behind what the stream that
  computes has been given, and so behind the copy back of the one before.

Sums are those of `levels`, [Note: trees]: additions in fp32, one after the other, and a division: the processor's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ds_vertical.compat import pinned_memory
from ds_vertical.io import streams
from ds_vertical.io.buffers import Reserve

Carry = Callable[[Callable[[], Sequence[torch.Tensor]]], streams.IssuedCopies]


@dataclass(frozen=True, eq=False)
class RestingPart:
    """A rank's part of a copy in page-locked host memory. `copied`: the event behind its way there."""

    memory: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype
    copied: streams.DeviceEvent


class DeviceParts:
    """See [Note: levels beside a device]. `carry`: as `CopyStream.run`, of the stream of fetches."""

    def __init__(self, device: torch.device) -> None:
        self.carry: Carry = streams.CopyStream(device).run
        self._device = device
        self._outgoing = streams.new_stream(device)
        self._reserve = Reserve(pinned_memory.lock_host_bytes)
        self._back: streams.DeviceEvent | None = None  # behind the last copy out of the memory of parts

    def joined(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Flat shards of one dtype, one behind the other, for what the device's current stream is given next. Those in host
        memory are left alone until the copies that `carry` has issued are complete."""
        sizes, made = [shard.numel() for shard in shards], list[torch.Tensor]()

        def issue() -> list[torch.Tensor]:
            made.append(torch.empty(sum(sizes), dtype=shards[0].dtype, device=self._device))
            for shard, place in zip(shards, made[0].split(sizes), strict=True):
                if not streams.works_beside_host(shard.device):
                    place.copy_(shard, non_blocking=True)
            return made

        self.carry(issue).land()
        for shard, place in zip(shards, made[0].split(sizes), strict=True):
            if streams.works_beside_host(shard.device):
                place.copy_(shard)
        return made[0]

    def make_room(self, sizes: Sequence[int]) -> None:
        """Have memory for parts of so many bytes that are `put` next. Raises OSError where the system has none."""
        taken: list[torch.Tensor] = []
        try:
            for size in sizes:
                taken.append(self._reserve.take(size))
        finally:
            for memory in taken:
                self._reserve.put_back(memory)

    def put(self, part: torch.Tensor) -> RestingPart:
        """Take a part to host memory, as the device's current stream has it by then. The part may be given up at once."""
        assert self._outgoing is not None  # there is a device beside the host
        memory = self._reserve.take(part.nbytes)
        self._outgoing.wait_stream(streams.current_stream(self._device))  # and so for whatever is on its way out of the memory
        with streams.given_to(self._outgoing):
            memory[: part.nbytes].copy_(part.view(torch.uint8).view(-1), non_blocking=True)
        part.record_stream(self._outgoing)
        return RestingPart(memory, part.shape, part.dtype, streams.record_event(self._outgoing))

    def back(self, resting: RestingPart) -> torch.Tensor:
        """The part, for what the device's current stream is given next. It rests where it is, too."""
        made = list[torch.Tensor]()

        def issue() -> list[torch.Tensor]:
            resting.copied.wait(streams.current_stream(self._device))
            made.append(torch.empty(resting.shape, dtype=resting.dtype, device=self._device))
            flat = made[0].view(torch.uint8).view(-1)
            flat.copy_(resting.memory[: flat.numel()], non_blocking=True)
            return made

        copies = self.carry(issue)
        self._back = copies.copied
        copies.land()
        return made[0]

    def give_up(self, resting: RestingPart) -> None:
        """Nobody asks for the part any more. A copy of it may be under way."""
        self._reserve.put_back(resting.memory)

    def close(self) -> None:
        """Give back the memory of all parts that were given up, once no copy uses it. Twice is harmless."""
        if self._outgoing is not None:
            self._outgoing.synchronize()
        if self._back is not None:
            self._back.synchronize()
        self._reserve.clear()
