"""Whether there is room for the most micro-batches that `vertical_schedule.elastic` may give a rank, by what the first step
shows."""

from __future__ import annotations

from collections import Counter

from ds_vertical.compat import accelerator
from ds_vertical.distributed import ranks
from ds_vertical.distributed.elastic import ElasticCounts
from ds_vertical.model.boundary_tensors import BoundaryTensors
from ds_vertical.offload.kept_store import Growth, KeptStore
from ds_vertical.planner.budget.fewer import FewerMicroBatches
from ds_vertical.planner.kept_activations import ON_DEVICE, kept_cells
from ds_vertical.schedule.events import Cell
from ds_vertical.types import ActivationSettings, Tier

_Counts = tuple[ElasticCounts, FewerMicroBatches]  # of a run, and how its JSON has fewer


def growth(counts: _Counts, num_layers: int, limit: int, settings: ActivationSettings, num_passes: int) -> Growth:
    """What the counts let a rank keep by these settings. `limit`: bytes of host memory for it, on the rank that has fewest.
    `num_passes`: one after the other, that share a step's micro-batches."""
    (elastic, fewer), one_memory = counts, accelerator.is_one_memory()
    resting = Tier.DEVICE if one_memory else Tier.HOST

    def cells(num_micro_batches: int) -> int:
        of_pass = -(-num_micro_batches // num_passes)
        tiers = Counter(kept_cells(num_layers, of_pass, settings.kept_shares, one_memory).values())
        return tiers[resting] + (ON_DEVICE if one_memory and len(tiers) > (Tier.DEVICE in tiers) else 0)

    return Growth(elastic.most, limit, cells, fewer.fitting)


class PassingBytes:
    """What passes between layers takes of host memory, which is the device's: no budget counts it ahead of the first step.
    `limit`, `num_passes`: see `growth`."""

    def __init__(self, counts: _Counts, num_layers: int, limit: int, num_passes: int) -> None:
        self._elastic, self._fewer = counts
        self._num_passes = num_passes
        self._num_layers = num_layers
        self._limit = limit
        self._sizes: dict[tuple[int, int], int] = {}  # of storages, by micro-batch and address
        self._seen: set[int] = set()  # micro-batches

    def heard_by(self, store: KeptStore | None) -> KeptStore:
        """The store whose cells this hears of, in a step that begins; one that holds nothing where there is none."""
        self._sizes.clear()
        self._seen.clear()
        store = KeptStore(None, None) if store is None else store
        store.listener = self._note
        return store

    def _note(self, cell: Cell, boundary: BoundaryTensors) -> None:
        layer, micro_batch = cell
        self._seen.add(micro_batch)
        for storage in (tensor.untyped_storage() for tensor in boundary.inputs(layer)):
            self._sizes[micro_batch, storage.data_ptr()] = storage.nbytes()

    def tell(self, store: KeptStore | None) -> None:
        """Behind the step: warn of what would not fit, with the bound that does. Collective."""
        kept = 0
        if store is not None:
            store.listener = None
            kept = store.resting.get(Tier.DEVICE, (0, 0))[1]
        waiting = sum(self._sizes.values()) * self._num_layers // max(1, self._num_layers - 1)  # the last layer's inputs, too
        of_one = ranks.largest_of_all_ranks(-(-(waiting + kept) // max(1, len(self._seen))))
        most = self._elastic.most
        if not of_one or of_one * -(-most // self._num_passes) <= self._limit:
            return
        remedy = self._fewer.fitting(lambda count: of_one * -(-count // self._num_passes) <= self._limit)
        accelerator.log(
            f"ds_vertical: warning: elastic: what passes between layers, and what forwards keep, has taken {of_one} bytes of"
            f" host memory for each micro-batch; a rank may be given {most}, and the memory budget (see the start) leaves"
            f" {self._limit}; write {remedy or 'a smaller train_micro_batch_size_per_gpu, or shorter sequences'}"
        )
