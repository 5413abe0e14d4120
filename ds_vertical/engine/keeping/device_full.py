"""A step that ends as a device with memory of its own is full: what the user is told, and what would fit.

Where the device held kept values of forwards, these are the reason. How many of them fit depends on what else a step takes, on
logits above all, of which no formula knows. So the forwards and backwards of the step run once more, without an optimizer step,
and keep nothing: that shows what they take, and whether the step fits at all without kept values. Of what is then left a part
may be used (`USED`), beyond what such a run does not show: gradients on their way to the host, the norm's copy, the gradients
of the first backward of a kind of block, which runs both ways.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from ds_vertical.compat import accelerator
from ds_vertical.engine.assembly import StepParts
from ds_vertical.engine.keeping.planner import USED, USED_ON_SSD
from ds_vertical.errors import MemoryBudgetError
from ds_vertical.io.streams import is_out_of_memory
from ds_vertical.planner.kept_activations import IN_TRANSIT, ON_DEVICE, kept_cells, num_cells
from ds_vertical.planner.memory_budget import BACKWARD, LEAVING, NORM, BudgetItem
from ds_vertical.types import ActivationSettings, Tier

BytesTaken = Callable[[], int | None]  # bytes of the device that a step takes which keeps nothing; None: not to be shown
_KEY: Final = "vertical_schedule.activations"
_NOT_SHOWN: Final = (BACKWARD, NORM, LEAVING)  # of the budget's items, by a run of forwards and backwards
_WHOLE: Final = (
    "; nothing of this step counts, and the run is as it was before it, but its micro-batches have been taken from the iterator"
)
_SHARES: Final = 1000  # a share that is advised is a multiple of 1 / _SHARES


class DeviceFullError(MemoryBudgetError, torch.OutOfMemoryError):
    """Values that forwards have kept have filled a device. The message has their bytes, and each change of the JSON that makes
    the step fit. Nothing of the step counts: a loop that catches torch's OutOfMemoryError may leave the step out and go on.
    """


@dataclass(frozen=True)
class Shown:
    """What a run of the step without kept values has shown. `taken`: bytes of the device that it took; None: not known. `fits`:
    False where the device had no room for it. `raised`: another error that ended it."""

    taken: int | None = None
    fits: bool = True
    raised: str = ""


@dataclass(frozen=True)
class KeptHere:
    """What a step has kept. `settings`: those in force; `held`: (cells, bytes) on the device as it was full; `cell_bytes`: of
    the largest cell; `num_layers`, `num_micro_batches`: of the step."""

    settings: ActivationSettings
    held: tuple[int, int]
    cell_bytes: int
    num_layers: int
    num_micro_batches: int

    @property
    def num_cells(self) -> int:
        """Those that can keep."""
        return num_cells(self.num_layers, self.num_micro_batches)

    @property
    def told(self) -> str:
        """For messages."""
        cells, held = self.held
        return (
            f"{cells} of {self.num_cells} forwards (one layer of one micro-batch each) have kept {held} bytes on it for their"
            " backwards"
        )

    def fitting_share(self, room: int) -> float:
        """Of all cells, a share whose values take no more than `room` bytes of the device, and which is smaller than the one
        that has filled it; 0 where no cell fits."""
        now = self.settings.kept_shares.get(Tier.DEVICE, 0.0)
        moved = sum(share for tier, share in self.settings.kept_shares.items() if tier is not Tier.DEVICE)
        left = USED * room - (ON_DEVICE * self.cell_bytes if moved else 0)
        count = min(int(max(0.0, left) / self.cell_bytes), int(USED * now * self.num_cells))
        return int(_SHARES * count / self.num_cells) / _SHARES

    def fits_in(self, tier: Tier, rooms: Mapping[Tier, float | None], device: int) -> bool:
        """Whether all that is kept would fit where `keep_device` is `tier`. `rooms`: bytes that are left of each; `device`: of
        the device."""
        if self.settings.keep_host_share or ON_DEVICE * self.cell_bytes > USED * device:
            return False
        share = self.settings.kept_shares.get(Tier.DEVICE, 0.0)
        placed = list(kept_cells(self.num_layers, self.num_micro_batches, {tier: share}).values())
        passing = IN_TRANSIT if tier is Tier.SSD else 0
        needed = {
            Tier.HOST: (placed.count(Tier.HOST) + passing) * self.cell_bytes / USED,
            Tier.SSD: placed.count(Tier.SSD) * self.cell_bytes / USED_ON_SSD,
        }
        found = {each: rooms[each] for each in needed}
        return all(room is None or needed[each] <= room for each, room in found.items())


class DeviceFull:
    """Explains torch's error for a full device in the steps of one engine."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts

    @contextlib.contextmanager
    def explaining(self, num_micro_batches: int, taken: BytesTaken | None) -> Iterator[None]:
        """Around a step, or what precedes one. Where kept values have filled the device: raises DeviceFullError; torch's
        error gets a note otherwise. `taken`: runs once more what has failed, keeping nothing; None where nothing is kept."""
        store = self._parts.keeping.store
        if store is not None:
            store.abandoned = 0, 0
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error) or accelerator.is_one_memory():
                raise
            try:
                self._explain(error, num_micro_batches, taken)
            finally:
                accelerator.forget_peak()  # what did not fit is no step's peak
            raise

    def _explain(self, error: Exception, num_micro_batches: int, taken: BytesTaken | None) -> None:
        """Give torch's `error` its note, or raise DeviceFullError. A step that has torn the state is not run again."""
        kept, shown = None if taken is None else self._kept(num_micro_batches), Shown()
        if kept is not None and taken is not None and self._parts.optimizer.live.failure is None:
            _let_go(error)
            free = accelerator.free_device_bytes() or 0
            shown = _shown_by(taken, error)
            if shown.fits:
                raise DeviceFullError(self._message(kept, free, shown)) from error
        error.add_note(self._note(kept, shown.fits))

    def _kept(self, num_micro_batches: int) -> KeptHere | None:
        """What the step has kept on the device; None where that is nothing."""
        keeping = self._parts.keeping
        settings, store = keeping.settings, keeping.store
        if store is None or not store.abandoned[1] or not settings.kept_shares.get(Tier.DEVICE):
            return None
        return KeptHere(settings, store.abandoned, store.most_bytes, self._parts.layers.num_layers, num_micro_batches)

    # ---- what is told

    def _message(self, kept: KeptHere, free: int, shown: Shown) -> str:
        """`free`: bytes of the device between two steps; `shown`: what of these a step takes that keeps nothing."""
        keys = kept.settings
        part = "" if keys.keep_outputs is None else f", {keys.keep_outputs} of each block's products"
        got = f'null, and the run has chosen "{keys.keep}"{part}' if self._parts.keeping.is_chosen else f'"{keys.keep}"'
        told = (
            f"{_KEY}.keep: got {got}; the device is full: it is out of memory. {kept.told}, up to {kept.cell_bytes} each;"
            f" {free} bytes of it are free between two steps"
        )
        if shown.taken is None:
            raised = f"; run once more without kept values, this step has raised {shown.raised}" if shown.raised else ""
            less = f'{self._written(keys)}a smaller "keep_share" (now {keys.keep_share:g}), or ' if not part else ""
            return f'{told}{raised}; write {less}"keep": "none", in {_KEY}{_WHOLE}'
        not_shown = sum(item.num_bytes for item in self._parts.budget.on_device if item.what in _NOT_SHOWN)
        room = free - shown.taken - not_shown
        told = f"{told}, and without kept values this step takes {shown.taken} of them"
        if room < 0:
            less = "; ".join(self._smaller(keeps=False))
            return (
                f"{told}, beside up to {not_shown} bytes of gradients on their way: it may not fit without kept values either;"
                f' in {_KEY} write "keep": "none", and what takes less beside: {less}{_WHOLE}'
            )
        return f"{told}; in {_KEY} write {' or '.join(self._remedies(kept, room))}{_WHOLE}"

    def _remedies(self, kept: KeptHere, room: int) -> Iterator[str]:
        """Changes of the section each of which makes the step fit. `room`: bytes of the device for what is kept."""
        keeping, keys = self._parts.keeping, kept.settings
        if keys.keep_outputs is not None:  # no key asks for a part of the products: all of them would take more
            yield '"keep": "none"'
            return
        policy = f'"keep": "{keys.keep}", ' if keeping.is_chosen else ""
        share = kept.fitting_share(room)
        if share:
            yield f'{self._written(keys)}"keep_share": {share:g} (now {keys.keep_share:g})'
        rooms = keeping.room()
        for other in (Tier.HOST, Tier.SSD):
            if kept.fits_in(other, rooms, room):
                yield f'{policy}"keep_device": "{other}"'
                break
        yield '"keep": "none"'

    def _written(self, keys: ActivationSettings) -> str:
        """What to write ahead of a share: where `keep` is null, no share may be."""
        return f'"keep": "{keys.keep}", "keep_device": "device", ' if self._parts.keeping.is_chosen else ""

    def _note(self, kept: KeptHere | None, fits: bool) -> str:
        """Beside torch's own error. `fits`: nothing has shown that the step does not fit whatever it keeps."""
        items = self._parts.budget.on_device
        counted = ", ".join(f"{item.what} {item.num_bytes}" for item in items)
        also = "" if fits else " Without kept values, too, this step does not fit."
        held = "" if kept is None else f" {kept.told}."
        return (
            f"ds_vertical: the device is full.{also}{held} The budget at the start has counted {_total(items)} bytes of it for"
            f" this rank ({counted}), and leaves out what depends on the tokens: logits and loss, inputs of layers, what one"
            f" layer's forward and backward hold of a micro-batch, and kept values. {accelerator.free_device_bytes()} bytes are"
            f" free now. What takes less: {'; '.join(self._smaller())}"
        )

    def _smaller(self, keeps: bool = True) -> Iterator[str]:
        """What takes less of a device, as far as it is not written already. `keeps`: kept values are among it."""
        vertical, activations = self._parts.vertical, self._parts.vertical.activations
        yield "a smaller train_micro_batch_size_per_gpu, or shorter sequences"
        if vertical.prefetch_layers:
            yield f'"vertical_schedule.prefetch_layers": 0 (now {vertical.prefetch_layers})'
        if vertical.blocks_per_layer > 1:
            yield f'"vertical_schedule.blocks_per_layer": 1 (now {vertical.blocks_per_layer})'
        if sum(activations.shares.values()) < 1:
            yield f'"{_KEY}.device": "host"'
        if keeps and activations.keep not in (None, "none"):
            yield f'"{_KEY}.keep": "none" (now "{activations.keep}")'


def _total(items: tuple[BudgetItem, ...]) -> int:
    return sum(item.num_bytes for item in items)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that have led to it, each once."""
    each: BaseException | None = error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__


def _let_go(error: BaseException) -> None:
    """Of the frames that an error has left, whose variables hold memory of the device as long as the error lives."""
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)
    gc.collect()
    accelerator.synchronize()


def _shown_by(taken: BytesTaken, failed: Exception) -> Shown:
    """What `taken` shows, which may end by any error of the user's code. `failed`: that of the step, which is being handled,
    and so is where each chain of errors ends."""
    try:
        return Shown(taken())
    except Exception as error:
        _let_go(error)
        if any(is_out_of_memory(each) for each in itertools.takewhile(lambda each: each is not failed, _chain(error))):
            return Shown(fits=False)
        return Shown(raised=f"{type(error).__name__}: {error}")
