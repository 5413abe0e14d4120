"""Writes that torch does not count, by `.data` and into NumPy arrays: stock's bits, or refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import assert_identical, run_both, running
from stateful import Base, Block, batches, config_in

from ds_vertical import interrupts
from ds_vertical.errors import LayerError
from ds_vertical.model.state import fingerprints, snapshot
from ds_vertical.model.state.fingerprints import LARGEST_NUMEL, fingerprint, same_fingerprint, sums_of_bits
from ds_vertical.model.state.snapshot import Snapshot
from ds_vertical.model.state.survey import StateSlot, entry_of

slow = pytest.mark.slow
NUMEL = 70_000  # more than are copied in each step
Write = Callable[[Any], object]


def add(block: Any) -> None:
    block.table.data.add_(0.01)


def lerp(block: Any) -> None:
    block.table.data.lerp_(torch.ones(NUMEL), 0.01)


def through_numpy(block: Any) -> None:
    block.table.numpy()[...] = block.table.numpy() + np.float32(0.01)


def into_array(block: Any) -> None:
    block.array += 0.01


class WritingBlock(Block):
    """Writes where nobody counts it, once it is to."""

    write: Write

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("table", torch.zeros(NUMEL))
        self.array, self.start = np.zeros(NUMEL), False

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        if self.start:
            type(self).write(self)
        return self.body(x * (1 + self.table[0] + float(self.array[0])))


def writing(how: Write, at_once: bool = False) -> type[Base]:
    class HowBlock(WritingBlock):
        write = staticmethod(how)

        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.start = at_once

    class Writing(Base):
        block = HowBlock

    return Writing


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("how", [add, pytest.param(lerp, marks=slow), pytest.param(through_numpy, marks=slow), into_array])
def test_a_large_one_that_begins_late_is_refused_by_name(tmp_path: Path, how: Write, num_micro_batches: int) -> None:
    """It has not been copied: neither can each micro-batch be given its own, nor the recompute what the block found."""
    config = config_in(tmp_path, section={"self_check": False}) | {"gradient_accumulation_steps": num_micro_batches}
    with running(config, writing(how), vertical=True) as (engine, model):
        for step in batches(2):
            engine.train_batch(iter(step[:num_micro_batches]))
        for block in model.blocks:
            block.start = True
        name = "array" if how is into_array else "table"
        with pytest.raises(
            LayerError, match=rf"blocks\.\d\.{name} \(70000 elements\) is written during the forward, .*first time"
        ):
            engine.train_batch(iter(batches(1)[0][:num_micro_batches]))
        assert engine.global_steps == 2 and interrupts.num_open() == 0


@pytest.mark.parametrize("how", [pytest.param(add, marks=slow), into_array])
def test_one_that_writes_from_the_first_step_on_has_stocks_bits(tmp_path: Path, how: Write) -> None:
    assert_identical(*run_both(config_in(tmp_path), writing(how, at_once=True), batches()))


def test_what_the_user_writes_between_two_steps_is_no_write_of_a_forward(tmp_path: Path) -> None:
    def between(engine: Any, step: int) -> None:
        for block in engine.module.blocks:
            add(block)
            into_array(block)

    assert_identical(*run_both(config_in(tmp_path), writing(add), batches(), between=between))


def test_a_step_that_starts_over_for_something_else_does_not_hide_it(tmp_path: Path) -> None:
    """The step's first run has written what nobody can put back."""

    class NotingBlock(WritingBlock):
        write = staticmethod(add)

        def forward(self, x: torch.Tensor, *args: Any) -> Any:
            if self.start:
                self.note = x.detach().mean()  # seen at once
            return super().forward(x)

    class Noting(Base):
        block = NotingBlock

    with running(config_in(tmp_path, section={"self_check": False}), Noting, vertical=True) as (engine, model):
        engine.train_batch(iter(batches(1)[0]))
        for block in model.blocks:
            block.start = True
        with pytest.raises(LayerError, match=r"blocks\.\d\.table \(70000 elements\)"):
            engine.train_batch(iter(batches(1)[0]))


# ---- more of them than a step reads


def pieces_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a look reads a tenth of the four blocks' tables and arrays."""
    monkeypatch.setattr(snapshot, "MOST_BYTES", 4 * NUMEL * (4 + 8) // 10)


def add_to_one(block: Any) -> None:
    """Between two of the pieces."""
    block.table.data[NUMEL // 4] += 0.01


def test_where_there_are_too_many_bytes_pieces_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.zeros(NUMEL), torch.zeros(3, NUMEL, dtype=torch.int64), torch.zeros(1).expand(1 << 40)]
    read: list[int] = []

    def counted(tensor: torch.Tensor, share: float) -> list[torch.Tensor]:
        found = pieces(tensor, share)
        read.append(sum(piece.nbytes for piece in found))
        return found

    pieces = fingerprints._pieces
    monkeypatch.setattr(fingerprints, "_pieces", counted)
    total = sum(fingerprints.num_bytes_read(tensor) for tensor in tensors)
    for most in (total, total // 10, total // 100_000):
        monkeypatch.setattr(snapshot, "MOST_BYTES", most)
        places = [StateSlot(str(index), -1, entry_of({"t": each}, "t")) for index, each in enumerate(tensors)]
        taken = Snapshot(places, [], closely=False)
        assert not list(taken.changes(whole=True))
        first, second = sum(read[: len(read) // 2]), sum(read[len(read) // 2 :])
        assert first == second <= max(most, 2 * (4 + 8 + 4)) and first > 0.8 * most, (most, read)
        read.clear()
        for tensor in tensors[:2]:
            for index in (0, -1):
                tensor.data.view(-1)[index] += 1
                assert len(list(taken.changes(whole=True))) == 1
                tensor.data.view(-1)[index] -= 1
        read.clear()


def test_a_write_to_all_of_a_tensor_is_refused_though_pieces_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One to an element between the pieces is not seen: docs/state.md says so."""
    pieces_alone(monkeypatch)
    for how in (add, add_to_one):
        with running(config_in(tmp_path, section={"self_check": False}), writing(how), vertical=True) as (engine, model):
            engine.train_batch(iter(batches(1)[0]))
            for block in model.blocks:
                block.start = True
            refused = pytest.raises(LayerError, match=r"blocks\.\d\.table \(70000 elements\)")
            with refused if how is add else contextlib.nullcontext():
                engine.train_batch(iter(batches(1)[0]))


# ---- made by the forward itself


class AddingBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        owner, mean = self.owner[0], x.detach().mean()
        owner.total.data.add_(mean)
        owner.sums[0] += float(mean)
        if args:
            args[0]["total"].data.add_(mean)
        return self.body(x * (1 + owner.total[0] + float(owner.sums[0]) + (args[0]["total"] if args else 0)))


class MadeInForward(Base):
    """A tensor and an array that each forward makes, and its blocks write without being counted. `numel`: of both."""

    block = AddingBlock
    numel = 1

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.owner = (self,)

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.total, self.sums = torch.zeros(self.numel), np.zeros(self.numel)
        return ()


class MadeLarge(MadeInForward):
    numel = NUMEL


class Given(MadeInForward):
    """And one in a dict that the blocks are given."""

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        super().begin(x)
        return ({"total": torch.zeros(())},)


@pytest.mark.parametrize("case", [MadeInForward, pytest.param(MadeLarge, marks=slow), pytest.param(Given, marks=slow)])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_what_a_forward_makes_and_blocks_write_has_stocks_bits(
    tmp_path: Path, case: type[Base], num_micro_batches: int
) -> None:
    config = config_in(tmp_path) | {"gradient_accumulation_steps": num_micro_batches}
    assert_identical(*run_both(config, case, [step[:num_micro_batches] for step in batches()]))


# ---- fingerprints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float64, torch.complex64])
@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 70_000])
def test_a_fingerprint_tells_each_element(dtype: torch.dtype, numel: int) -> None:
    tensor = torch.zeros(numel, dtype=dtype)
    before, sums = fingerprint(tensor), sums_of_bits(tensor)
    assert same_fingerprint(before, fingerprint(tensor.clone())) and same_fingerprint(sums, sums_of_bits(tensor.clone()))
    for index in {0, numel // 2, numel - 1} if numel else ():
        tensor[index] = 1
        assert not same_fingerprint(before, fingerprint(tensor)) and not same_fingerprint(sums, sums_of_bits(tensor))
        tensor[index] = 0


def test_a_fingerprint_is_of_elements_wherever_they_lie() -> None:
    for tensor in (torch.arange(24.0).view(4, 6).t(), torch.arange(3.0).as_strided((2, 2), (1, 1))):
        before = fingerprint(tensor)
        assert same_fingerprint(before, fingerprint(tensor))
        tensor.data[1, 0] += 1
        assert not same_fingerprint(before, fingerprint(tensor))
    expanded = torch.zeros(1).expand(1 << 40)
    before = fingerprint(expanded)
    expanded.untyped_storage().fill_(1)
    assert not same_fingerprint(before, fingerprint(expanded))


def test_a_part_of_larger_memory_has_no_fingerprint() -> None:
    """It may lie in a buffer of parameters, where others come and go."""
    part = torch.zeros(24)[4:12]
    before = fingerprint(part)
    part += 1
    assert same_fingerprint(before, fingerprint(part))


def test_sums_of_bits_tell_that_elements_have_changed_places() -> None:
    for numel in (5000, 100):
        tensor = torch.zeros(numel).index_fill_(0, torch.tensor([3]), 1)
        assert not torch.equal(sums_of_bits(tensor), sums_of_bits(tensor.roll(1)))


def test_of_a_huge_tensor_blocks_are_looked_at() -> None:
    tensor = torch.zeros(LARGEST_NUMEL + 12345, dtype=torch.uint8)
    before = fingerprint(tensor)
    for index in (0, len(tensor) - 1):
        tensor[index] = 1
        assert not same_fingerprint(before, fingerprint(tensor))
        tensor[index] = 0
    assert same_fingerprint(before, fingerprint(tensor))
