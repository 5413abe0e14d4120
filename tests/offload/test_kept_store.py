"""What of a block's forward may leave the device: memory that nobody else can reach, at its end and when it is saved."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from torch.autograd.graph import saved_tensors_hooks

from ds_vertical.compat import pinned_memory
from ds_vertical.compat.ops import load
from ds_vertical.errors import MemoryBudgetError, StorageError
from ds_vertical.io import files
from ds_vertical.model.kept.slots import KeptStorage, Slots, unpack
from ds_vertical.offload.kept_store import Growth, KeptStore
from ds_vertical.offload.tensor_swapper import HostMemory, TensorSwapper, moved_remedy
from ds_vertical.planner.budget.fewer import FewerMicroBatches
from ds_vertical.types import HOLDING, ElasticSettings, Tier

CELL = (0, 0)
SIZE = 4096


def settled() -> tuple[list[KeptStorage], torch.Tensor, list[Any]]:
    """A forward that saves three results, one of which a module holds: what may move, what is held, and the graph's nodes."""
    start = torch.linspace(-1, 1, SIZE).requires_grad_()
    slots = Slots([], [start])
    with saved_tensors_hooks(slots.pack, unpack):
        results = [start.tanh(), start.exp(), start.sigmoid()]
    nodes: list[Any] = [result.grad_fn for result in results]
    held = results[1].detach()
    del results
    return slots.settle(), held, nodes


def test_what_others_hold_at_the_end_of_a_forward_is_not_kept() -> None:
    values, held, _ = settled()
    assert len(values) == 2 and all(value.is_private for value in values)
    assert held.untyped_storage().data_ptr() not in {value.storage.data_ptr() for value in values}


@contextlib.contextmanager
def on_ssd(folder: Path) -> Iterator[KeptStore]:
    """A store whose cell rests on SSD."""
    memory = HostMemory(pinned_memory.lock_host_bytes, pinned_memory.unlock_host_bytes)
    queue = partial(load.new_disk_queue, get_aio_config({}))
    store = KeptStore(TensorSwapper(folder / "kept.bin", queue, memory, torch.device("cpu"), 3, None), None)
    try:
        store.open_step({CELL: Tier.SSD})
        yield store
    finally:
        store.close()


def test_where_the_ssd_is_full_a_policy_that_keeps_less_is_advised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, _, nodes = settled()
    boundary: Any = SimpleNamespace(kept=lambda layer: values)
    monkeypatch.setattr(files, "free_bytes", lambda path: 8)
    told = r'free \d+ bytes or use another nvme_path, or write "vertical_schedule.activations.keep": "products" or "none" \(now'
    with on_ssd(tmp_path) as store, pytest.raises(StorageError, match=told):
        store.save(CELL, boundary)
    assert len(nodes) == 3 and all(value.in_memory and value.storage.nbytes() == 4 * SIZE for value in values)


def test_what_is_advised_where_memory_is_full_changes_something() -> None:
    products, everything = (KeptStore(None, 0, policy=policy, may_advise_ssd=policy == "everything") for policy in HOLDING)
    assert '"keep": "free" or "none" (now "products"), or, where' in products.remedy()
    assert '"keep": "products" or "none" (now "everything"), "keep_device": "ssd", or, where' in everything.remedy()
    assert '"device": "ssd"' in moved_remedy(may_advise_ssd=True) and '"ssd"' not in moved_remedy()


@pytest.mark.parametrize("gives_up", [False, True])
@pytest.mark.parametrize("tier", [Tier.HOST, Tier.SSD])
def test_host_memory_without_room_for_one_cell_is_told_or_the_cell_is_given_up(
    tmp_path: Path, tier: Tier, gives_up: bool
) -> None:
    """With fewer micro-batches there is none, either. What rests on SSD passes through host memory."""
    values, _, _ = settled()
    forgotten: list[int] = []
    boundary: Any = SimpleNamespace(kept=lambda layer: values, forget_kept=forgotten.append)
    told = (
        rf'keep: got "everything"; of one micro-batch one layer keeps {8 * SIZE} bytes .* leaves 8192; write a smaller train_'
    )
    with on_ssd(tmp_path) as store:
        assert store.swapper is not None
        store.swapper.host_tier.limit = 8192
        store.open_step({CELL: tier})
        store.gives_up = gives_up
        store.note(CELL, boundary)
        with contextlib.nullcontext() if gives_up else pytest.raises(MemoryBudgetError, match=told):
            assert store.save(CELL, boundary) is None
        assert forgotten == [0] * gives_up and store.resting == {Tier.DEVICE: (0, 0) if gives_up else (1, 8 * SIZE)}
        assert store.num_bytes["device"] == (0 if gives_up else 8 * SIZE)
        assert store.num_bytes["host"] == store.num_bytes["ssd"] == 0 and all(value.in_memory for value in values)


def test_memory_that_somebody_has_taken_hold_of_since_stays(tmp_path: Path) -> None:
    """Between the end of a forward and its save other blocks of the layer run, and a node of autograd shows what it saved."""
    values, _, nodes = settled()
    taken = nodes[2]._saved_result
    expected = taken.clone()
    boundary: Any = SimpleNamespace(kept=lambda layer: values)
    with on_ssd(tmp_path) as store:
        store.note(CELL, boundary)
        ticket = store.save(CELL, boundary)
        assert ticket is not None
        ticket.wait()
        assert [value.in_memory for value in values] == [False, True]
        assert torch.equal(taken, expected) and store.resting[Tier.SSD] == (1, 4 * SIZE)
        loaded = store.load(CELL)
        assert loaded is not None
        loaded.wait()
        assert torch.equal(nodes[0]._saved_result, torch.linspace(-1, 1, SIZE).tanh())
        store.drop(CELL)


def test_the_first_step_refuses_more_micro_batches_than_there_is_room_for_and_says_how_many_fit() -> None:
    """Three cells of 100 bytes for each micro-batch, and room for 20 of these."""

    def first_step(most: int, sizes: Sequence[int] = (100,), logged: bool = False) -> str:
        store = KeptStore(None, 6050)
        settings = ElasticSettings(max_micro_batches=most, counts="run.log" if logged else None)  # of two ranks with 32
        store.growth = Growth(most, 6050, lambda count: 3 * count, FewerMicroBatches(16, 2, settings).fitting)
        store.open_step({}, 3 * 16)
        for cell in itertools.product(range(3), range(16)):
            size = sizes[cell[1] % len(sizes)]
            boundary: Any = SimpleNamespace(kept=lambda layer, size=size: [SimpleNamespace(num_bytes=size)])
            try:
                store.note(cell, boundary)
            except MemoryBudgetError as error:
                assert cell == (2, 15), "behind the last forward"
                return str(error)
        return ""

    told = first_step(31)
    assert "48 forwards of this step have kept 4800 bytes" in told and "they would have 9300 bytes" in told
    assert 'write "vertical_schedule.elastic.max_micro_batches": 20 (now 31), "keep": "products"' in told
    assert first_step(20) == "" and '"vertical_schedule.elastic.max_micro_batches": 20 (now 21), ' in first_step(21)
    assert 'the log of a run that had it, as "counts"' in first_step(21, logged=True)
    unequal = first_step(31, (60, 100))
    assert "they would have 7440 bytes" in unequal and '_batches": 20 (now' in unequal, "as large as the largest, they fit"
    total, bound = (
        '"vertical_schedule.elastic.total": 30 (now 32)',
        '"vertical_schedule.elastic.max_micro_batches": 15 (now 31)',
    )
    assert f"write {total} and {bound}, " in first_step(31, (127,)), "16 are needed, and do not fit"
    store = KeptStore(None, 6050)
    store.growth, store.most_bytes = Growth(31, 6050, lambda count: 3 * count, FewerMicroBatches(16, 2).fitting), 2017
    assert store.remedy().startswith('write "keep": "products"'), "three cells of one do not fit"
