"""What forwards keep for their backwards, over device, host memory and SSD.

A cell, one layer of one micro-batch, moves as a whole: the storages that its block calls have kept and that nobody else holds
(`model.kept.slots`). Their bytes go out behind the layer's forward and come back ahead of its backward, into the same storages.
What is small, or held by other code, stays on the device.

Where a run has chosen by itself what to keep, a cell for which a tier has no room keeps nothing, in that step: its backward
computes all again. What the JSON asks for fails instead.

Where device and host are one memory, what stays on the device takes host memory: it is counted against what the memory budget
leaves. In two memories what rests in host memory is. How much of the device is free for the rest shows as that runs out, which
ends the step: see `engine.keeping.device_full`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from ds_vertical.errors import MemoryBudgetError, StorageError
from ds_vertical.io.ticket import Ticket
from ds_vertical.model.boundary_tensors import BoundaryTensors
from ds_vertical.model.kept.slots import KeptStorage
from ds_vertical.offload.activation_store import SMALLEST_BYTES
from ds_vertical.offload.tensor_swapper import SwappedTensor, TensorSwapper
from ds_vertical.schedule.events import Cell, Event, Op
from ds_vertical.schedule.executor import Handler
from ds_vertical.types import BELOW, ActivationPolicy, Tier

_MORE_MEMORY = 'where it is set, a larger "vertical_schedule.host_memory_bytes"'
ONE_CELL_REMEDY = f'write a smaller train_micro_batch_size_per_gpu, "keep": "free" or "none", or, {_MORE_MEMORY}'
_KEY = "vertical_schedule.activations.keep"


@dataclass
class Growth:
    """What the counts of `vertical_schedule.elastic` let a rank keep in host memory.

    `most`: of its micro-batches; `limit`: bytes for it, on the rank that has fewest. `cells`: how many cells a number of
    micro-batches has there at a time. `fitting`: what to write for the most micro-batches that pass a test.
    """

    most: int
    limit: int
    cells: Callable[[int], int]
    fitting: Callable[[Callable[[int], bool]], str | None]
    _noted: list[int] = field(default_factory=list)  # bytes of each cell of the step under way
    _num_cells: int = 0  # of that step, as far as they can keep anything
    _fits: bool = False

    def open_step(self, num_cells: int) -> None:
        """A step begins, of which so many cells can keep something."""
        self._noted, self._num_cells = [], num_cells

    def note(self, kept: int, remedy: Callable[[], str]) -> None:
        """A cell's forward has kept so many bytes. With the last one of the first step: raises MemoryBudgetError where the most
        micro-batches would not fit, by the mean cell. Else they are taken to fit from then on."""
        self._noted.append(kept)
        if self._fits or len(self._noted) < self._num_cells:
            return
        sizes = [size for size in self._noted if size]
        needed = self.cells(self.most) * sum(sizes) // max(1, len(sizes))
        if needed > self.limit:
            raise MemoryBudgetError(
                f"{_KEY}: {len(sizes)} forwards of this step have kept {sum(sizes)} bytes for their backwards; with"
                f" {self.most} micro-batches, the most that vertical_schedule.elastic lets a rank bring, they would have"
                f" {needed} bytes in host memory at a time, and the memory budget (see the start) leaves {self.limit};"
                f" {remedy()}"
            )
        self._fits = True

    def remedy(self, cell_bytes: int) -> str | None:
        """The most micro-batches for which there is room, as what to write; None where there is for none. `cell_bytes`: of the
        largest cell so far."""
        return self.fitting(lambda count: self.cells(count) * cell_bytes <= self.limit)


class KeptStore:
    """Where the kept values of each cell are. `swapper`: moves them; None where none leave the device.

    `device_limit`: bytes that they may take on the device; None: any number. `gives_up`: a cell for which there is no room
    keeps nothing. `policy`: the JSON's, for messages; `may_advise_ssd`: whether they may name the SSD. `resting`: of the step
    under way, or of the last one, the cells and bytes that each tier has held.
    """

    def __init__(
        self,
        swapper: TensorSwapper | None,
        device_limit: int | None,
        gives_up: bool = False,
        policy: ActivationPolicy = "everything",
        may_advise_ssd: bool = False,
    ) -> None:
        self.swapper = swapper
        self.device_limit = device_limit
        self.gives_up = gives_up
        self._policy: ActivationPolicy = policy
        self._may_advise_ssd = may_advise_ssd
        self.listener: Callable[[Cell, BoundaryTensors], None] | None = None  # hears of each cell's forward
        self.fewer: str | None = "fewer gradient_accumulation_steps"  # how to have fewer micro-batches; None: there are none
        self.growth: Growth | None = None  # None: all steps have as many micro-batches as the first one
        self.most_bytes = 0  # of one cell, so far
        self.abandoned = 0, 0  # cells, and bytes, that the device held for them where a step has failed
        self._most_moved = 0  # likewise, in whole pages
        self.resting: dict[Tier, tuple[int, int]] = {}
        self._tiers: Mapping[Cell, Tier] = {}
        self._on_device: dict[Cell, int] = {}
        self._away: dict[Cell, tuple[SwappedTensor, list[KeptStorage]]] = {}

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes held per tier."""
        held: dict[str, int] = {Tier.DEVICE: sum(self._on_device.values())}
        if self.swapper is not None:
            held |= {Tier.HOST: self.swapper.host_bytes, Tier.SSD: self.swapper.ssd_bytes}
        return held

    def open_step(self, tiers: Mapping[Cell, Tier], num_cells: int = 0) -> None:
        """`tiers`: where the cells that leave the device rest, in the step that begins. `num_cells`: of those that could keep
        something."""
        self._tiers = tiers
        self.resting, self.abandoned = {}, (0, 0)
        if self.growth is not None:
            self.growth.open_step(num_cells)

    def handlers(self, boundary_of: Callable[[int], BoundaryTensors]) -> dict[Op, Handler]:
        """What the schedule's events do here. `boundary_of`: the tensors of a micro-batch, by its number."""
        return {
            Op.KSAVE: lambda event: self.save(cell_of(event), boundary_of(cell_of(event)[1])),
            Op.KLOAD: lambda event: self.load(cell_of(event)),
            Op.KDROP: lambda event: self.drop(cell_of(event)),
        }

    def note(self, cell: Cell, boundary: BoundaryTensors) -> None:
        """The cell's forward has kept values. Raises MemoryBudgetError where they take more of the device than they may; where
        one cell alone does, ahead of any buffer or file for what is kept. See also `Growth.note`."""
        kept = sum(value.num_bytes for value in boundary.kept(cell[0]))
        self.most_bytes = max(self.most_bytes, kept)
        if kept:
            self._place(cell, kept, boundary)
        if self.listener is not None:
            self.listener(cell, boundary)
        if self.growth is not None:
            self.growth.note(kept, self.remedy)

    def _place(self, cell: Cell, kept: int, boundary: BoundaryTensors) -> None:
        """Count a cell that keeps so many bytes. Raises MemoryBudgetError, see `note`."""
        if not self.gives_up:
            _check_one_cell(self._policy, kept, self.device_limit)
        held = sum(self._on_device.values()) + kept
        if self.device_limit is not None and held > self.device_limit and self.gives_up:
            boundary.forget_kept(cell[0])
            return
        self._on_device[cell] = kept
        self._count(Tier.DEVICE, 1, kept)
        if self.device_limit is not None and held > self.device_limit:
            raise MemoryBudgetError(
                f"{_KEY}: {held} bytes of host memory, which is the device's, hold what {len(self._on_device)} forwards have"
                f" kept for their backwards, {kept} the last one, and the memory budget (see the start) leaves"
                f" {self.device_limit}; {self.remedy()}"
            )

    def remedy(self) -> str:
        """What to write where there is no room for the cells of a step."""
        fewer = self.fewer
        if self.growth is not None:
            fewer = self.growth.remedy(max(self.most_bytes, self._most_moved))
        fewer = "" if fewer is None else f"{fewer}, "
        on_ssd = '"keep_device": "ssd", ' if self._may_advise_ssd else ""
        return f'write {fewer}"keep": "{BELOW[self._policy]}" or "none" (now "{self._policy}"), {on_ssd}or, {_MORE_MEMORY}'

    @property
    def _rest_less(self) -> str:
        """What to write where the SSD has no room for what a cell keeps."""
        return f'write "{_KEY}": "{BELOW[self._policy]}" or "none" (now "{self._policy}"), or a smaller "keep_share" beside it'

    def forget(self, cell: Cell) -> None:
        """The cell's backward is over: its values are used up."""
        self._on_device.pop(cell, None)

    def save(self, cell: Cell, boundary: BoundaryTensors) -> Ticket | None:
        """Save the cell's values where they rest, and give their memory on the device up.

        Raises StorageError where the file cannot grow, MemoryBudgetError where host memory has no room; a store that `gives_up`
        keeps nothing of the cell then.
        """
        assert self.swapper is not None
        values = [value for value in boundary.kept(cell[0]) if _is_movable(value)]
        if not values:
            return None
        size, limit = sum(value.num_bytes for value in values), self.swapper.host_tier.limit
        try:
            _check_one_cell(self._policy, size, limit)  # to SSD it goes through host memory
            swapped = self.swapper.put([_bytes(value) for value in values], self._tiers[cell])
        except (MemoryBudgetError, StorageError) as error:
            if not self.gives_up:
                if isinstance(error, StorageError):
                    raise StorageError(f"{error}, or {self._rest_less}") from error
                raise
            self._count(Tier.DEVICE, -1, -self._on_device.pop(cell, 0))
            boundary.forget_kept(cell[0])
            return None
        self._away[cell] = swapped, values
        self._most_moved = max(self._most_moved, swapped.num_bytes)
        for value in values:
            value.in_memory = False
            value.storage.resize_(0)
        self._on_device[cell] = self._on_device.get(cell, 0) - size
        self._count(Tier.DEVICE, -1, -size)
        self._count(self._tiers[cell], 1, size)
        return Ticket(f"save kept {cell[0]} of {cell[1]}", partial(self.swapper.wait_written, swapped), swapped.num_bytes)

    def load(self, cell: Cell) -> Ticket | None:
        """Bring the cell's values back; the ticket's wait completes it."""
        if cell not in self._away:
            return None
        swapper, (swapped, values) = self.swapper, self._away[cell]
        assert swapper is not None

        def land() -> list[torch.Tensor]:
            for value in values:
                value.storage.resize_(value.num_bytes)
            return [_bytes(value) for value in values]

        def wait() -> None:
            swapper.arrive(swapped)
            for value in values:
                value.in_memory = True

        swapper.fetch(swapped, land)
        self._on_device[cell] = self._on_device.get(cell, 0) + sum(value.num_bytes for value in values)
        return Ticket(f"load kept {cell[0]} of {cell[1]}", wait, swapped.num_bytes)

    def _count(self, tier: Tier, num_cells: int, num_bytes: int) -> None:
        """Add to what a tier has held in the step; a cell counts where most of its bytes go."""
        cells, held = self.resting.get(tier, (0, 0))
        self.resting[tier] = cells + num_cells, held + num_bytes

    def drop(self, cell: Cell) -> None:
        """Forget the cell's values: its backward is over."""
        swapped, _ = self._away.pop(cell, (None, []))
        if swapped is not None and self.swapper is not None:
            self.swapper.drop(swapped)

    def abandon(self) -> None:
        """After an error: complete what is in flight, and forget everything. What is away is lost with the step."""
        if self.swapper is not None:
            self.swapper.abandon()
        if any(self._on_device.values()):  # not where all is forgotten already
            self.abandoned = len(self._on_device), sum(self._on_device.values())
        self._away.clear()
        self._on_device.clear()

    def close(self) -> None:
        """Give buffers and queues back; twice is harmless."""
        if self.swapper is not None:
            self.swapper.close()


def cell_of(event: Event) -> Cell:
    """The layer and micro-batch that an event is about."""
    assert isinstance(event.layer, int) and event.micro_batch is not None
    return event.layer, event.micro_batch


def _check_one_cell(policy: ActivationPolicy, kept: int, limit: int | None) -> None:
    """Raises MemoryBudgetError where there is no room in host memory for what a single cell keeps, whatever M is."""
    if limit is not None and kept > limit:
        raise MemoryBudgetError(
            f'{_KEY}: got "{policy}"; of one micro-batch one layer keeps {kept} bytes in host memory, and the memory budget'
            f" (see the start) leaves {limit}; {ONE_CELL_REMEDY}"
        )


def _is_movable(value: KeptStorage) -> bool:
    return value.num_bytes >= SMALLEST_BYTES and value.storage.resizable() and value.is_private


def _bytes(value: KeptStorage) -> torch.Tensor:
    storage = value.storage
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
