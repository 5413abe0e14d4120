"""How much host memory state that is read before the norm may take: what all else leaves, as the table at the start says."""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import base_config, running, small_buffers, start_process_group
from models import MixerModel, token_batches
from pages import resident_pages

from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import load_section
from ds_vertical.engine import memory_check
from ds_vertical.engine.autotune import settle_read_ahead
from ds_vertical.engine.memory_check import Forecast, check_memory, groups_of, num_waiting, read_ahead_bytes
from ds_vertical.engine.zero3 import read_ahead
from ds_vertical.model.layers import map_layers
from ds_vertical.types import RunSettings

MIB = 1 << 20
WIDTH, NUM_LAYERS = 512, 8
ENOUGH = 8 << 30
HALF: dict[str, Any] = {"optimizer_read_ahead_bytes": None, "host_memory_bytes": ENOUGH}


class Choice:
    """The memory check of a small model under a limit."""

    def __init__(self, folder: Path, clip: float = 1.0, **section: Any) -> None:
        start_process_group()
        self.network = MixerModel(NUM_LAYERS, WIDTH)
        section = HALF | section
        made = small_buffers(base_config(folder, num_micro_batches=2, dtype="fp32", clip=clip, section=section), 1_100_000)
        loaded = load_section(made)
        assert loaded is not None
        self.section, self.resolved = loaded, resolve(loaded, 0)
        self.forecast = Forecast(
            map_layers(self.network, None), groups_of(self.network, None, None), made, self.resolved
        ).paired((ENOUGH, 0))

    def checked(self, limit: int = ENOUGH) -> tuple[list[str], int, int]:
        return check_memory(self.forecast, self.network.parameters(), limit)

    def settled(self) -> RunSettings:
        return settle_read_ahead(self.section, self.resolved, self.forecast)

    @property
    def pieces(self) -> list[int]:
        return self.forecast._piece_bytes


@pytest.fixture
def no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process takes as much in each check."""
    taken = memory_check.host.resident_bytes()
    monkeypatch.setattr(memory_check.host, "resident_bytes", lambda: taken)


@pytest.mark.usefixtures("no_growth")
def test_it_takes_half_of_what_all_else_leaves_and_is_no_reason_for_a_refusal(tmp_path: Path) -> None:
    choice = Choice(tmp_path)
    _, needed, _ = choice.checked()
    count, each = len(choice.pieces), max(choice.pieces)
    assert choice.forecast.ahead == count == num_waiting(choice.forecast) > 4
    for limit in (needed, needed + each, needed + 3 * each, needed + 2 * count * each):
        lines, again, left = choice.checked(limit)
        assert again == needed and left >= limit - needed
        assert choice.forecast.ahead == (fitting := min(count, int(0.5 * (limit - needed) // each)))
        told, why = (
            f"{fitting} of {count}",
            f"limited by 50% of the {(limit - needed) / MIB:.0f} MiB that the memory budget leaves",
        )
        told, why = (f"all {count}", "") if fitting == count else (told, why)
        reason = choice.settled().reasons["optimizer_read_ahead_bytes"]
        assert reason.startswith(f"null: {told} pieces of state that wait for the norm") and reason.endswith(why)
        told = [line for line in lines if "state read ahead" in line]
        assert len(told) == (choice.forecast.ahead > 0)
        (total,) = (float(line.split()[2]) for line in lines if line.startswith("host") and line.split()[1] == "total")
        assert round(total * MIB) == pytest.approx(needed + choice.forecast.ahead * each, abs=MIB / 10)
        assert total * MIB <= limit + MIB / 10


@pytest.mark.usefixtures("no_growth")
def test_a_number_is_the_most_bytes_of_it(tmp_path: Path) -> None:
    each = max(Choice(tmp_path).pieces)
    for asked, slots in ((0, 0), (each - 1, 0), (3 * each + 1, 3), (10**12, len(Choice(tmp_path).pieces))):
        choice = Choice(tmp_path, optimizer_read_ahead_bytes=asked)
        choice.checked()
        found = choice.settled()
        assert choice.forecast.ahead == slots and found.optimizer_read_ahead_bytes == slots * each
        reason = found.reasons["optimizer_read_ahead_bytes"]
        of = f"{slots} of {len(choice.pieces)}" if asked < 10**12 else f"all {slots}"
        why = f"{of} pieces of state that wait for the norm" + ", limited by what is written" * (asked < 10**12)
        assert reason == (f"{asked} as written: {why}" if asked else "as written")


@pytest.mark.parametrize(
    ("clip", "section", "why"),
    [
        (0.0, {}, "0, early steps do not wait for the norm"),
        (0.0, {"optimizer_delay": 1.0}, None),
        (1.0, {"overlap": False}, "0, without overlap nothing is read ahead"),
        (1.0, {"elastic": {}}, "0, since elastic may give a rank more micro-batches"),
        (1.0, {"elastic": {}, "optimizer_read_ahead_bytes": 10**12}, None),
        (1.0, {"host_memory_bytes": None}, "0, since host_memory_bytes is null, and the machine's free memory is not"),
        (1.0, {"host_memory_bytes": None, "optimizer_read_ahead_bytes": 10**12}, None),
        (1.0, {"optimizer_host_share": 1.0}, "0, no state is on SSD"),
        (1.0, {"optimizer_host_share": 1.0, "gradient_host_share": 0.5}, "0, no state is on SSD"),
        (1.0, {"optimizer_speculation": True, "optimizer_delay": 0.0}, "0, all state is stepped early"),
        (1.0, {"optimizer_speculation": False, "optimizer_delay": 0.0}, None),
        (1.0, {"optimizer_speculation": True}, None),
    ],
)
def test_it_is_nothing_where_no_state_waits(tmp_path: Path, clip: float, section: dict[str, Any], why: str | None) -> None:
    choice = Choice(tmp_path, clip, **section)
    lines, *_ = choice.checked()
    found = choice.settled()
    assert (choice.forecast.ahead > 0) == (why is None) == any("state read ahead" in line for line in lines)
    assert read_ahead_bytes(choice.forecast) == found.optimizer_read_ahead_bytes
    if why is not None:
        assert found.reasons["optimizer_read_ahead_bytes"].startswith(f"null: {why}")


@pytest.mark.usefixtures("no_growth")
@pytest.mark.parametrize("share", [0.6, 1.0])
def test_state_in_host_memory_is_no_piece_of_it(tmp_path: Path, share: float) -> None:
    """Whatever the gradients on SSD: their pieces go through the pipeline, but are not read ahead."""
    choice = Choice(tmp_path, optimizer_speculation=False, optimizer_host_share=share, gradient_host_share=0.5)
    choice.checked()
    on_ssd = [chunk for chunk in choice.forecast.chunks if chunk.state_in_files]
    assert choice.forecast.ahead == len(on_ssd) < len(choice.pieces)
    assert bool(on_ssd) == (share < 1)


@pytest.mark.usefixtures("no_growth")
def test_activations_take_the_memory_of_state_that_is_read_ahead(tmp_path: Path) -> None:
    """Longer sequences, under a limit: the pages go back in the step that brings them, and are taken again some steps later."""
    made = small_buffers(
        base_config(tmp_path, num_micro_batches=2, dtype="fp32", clip=0.05, section=HALF),
        1_100_000,
    )
    made["vertical_schedule"] |= {"optimizer_speculation": False}
    _, needed, _ = Choice(tmp_path, optimizer_speculation=False).checked()
    made["vertical_schedule"]["host_memory_bytes"] = needed + (80 << 20)
    with running(made, partial(MixerModel, NUM_LAYERS, WIDTH), vertical=True) as (engine, _):
        room, slots = engine._runner.room, engine.optimizer.further_slots
        each, left = slots[0].numel(), room._left

        def step(length: int) -> int:
            """Of the further slots, those that hold memory behind it."""
            (batch,) = token_batches(1, 2, rows=1, shortest=length)
            engine.train_batch(iter(batch))
            return sum(resident_pages(slot) > 0 for slot in slots)

        step(11)
        before = step(11)
        assert before == min(len(slots), int(0.5 * (left - max(room._held)) // each)) >= 2
        longer = step(500)
        assert longer == max(0, int(0.5 * (left - max(room._held)) // each)) < before
        for _ in range(3):
            assert step(11) == longer
        assert step(11) == before


@pytest.mark.slow
@pytest.mark.usefixtures("no_growth")
def test_longer_micro_batches_find_the_memory_that_the_budget_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the turn of a step that brings more than all before, its activations and the slots of the step before fit."""
    made = small_buffers(base_config(tmp_path, num_micro_batches=2, dtype="fp32", clip=0.05, section=HALF), 1_100_000)
    made["vertical_schedule"] |= {"optimizer_speculation": False}
    _, needed, _ = Choice(tmp_path, optimizer_speculation=False).checked()
    made["vertical_schedule"]["host_memory_bytes"] = needed + (80 << 20)
    with running(made, partial(MixerModel, NUM_LAYERS, WIDTH), vertical=True) as (engine, _):
        room, slots = engine._runner.room, engine.optimizer.further_slots
        before_turn, held = [], []
        opened = room.open

        def opening(num_bytes: int) -> bool:
            held.append(num_bytes)
            before_turn.append(sum(map(resident_pages, slots)) * mmap.PAGESIZE)
            return opened(num_bytes)

        monkeypatch.setattr(room, "open", opening)
        for length in (11, 11, 11, 1000):
            (batch,) = token_batches(1, 2, rows=1, shortest=length)
            engine.train_batch(iter(batch))
        assert before_turn[2] > 2 * slots[0].numel()  # of the steps before, where nothing needs it
        assert held[3] > 10 * held[2] and held[3] + before_turn[2] > room._left  # so they would not fit
        assert held[3] + before_turn[3] <= room._left


def test_it_is_never_more_than_half_of_what_the_machine_has_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = small_buffers(
        base_config(tmp_path, num_micro_batches=2, dtype="fp32", clip=0.05, section=HALF),
        1_100_000,
    )
    with running(made, partial(MixerModel, NUM_LAYERS, WIDTH), vertical=True) as (engine, _):
        slots, reads = engine.optimizer.further_slots, engine.optimizer.pipeline.reads
        usual = len(engine.optimizer.slots)
        for there, expected in ((10**12, len(slots)), (2 * slots[0].numel(), 0)):
            monkeypatch.setattr(read_ahead.host, "available_bytes", lambda there=there: there)
            for batch in token_batches(2, 2):
                held = reads.held_bytes
                engine.train_batch(iter(batch))
            assert reads.most - usual == (expected or 1 + held // 2 // slots[0].numel())


def test_the_memory_is_what_the_table_says_and_is_taken_from_the_second_step_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small_buffers(
        base_config(tmp_path, num_micro_batches=2, dtype="fp32", clip=0.05, section=HALF),
        1_100_000,
    )
    with running(config, partial(MixerModel, NUM_LAYERS, WIDTH), vertical=True) as (engine, _):
        slots = engine.optimizer.further_slots
        told = re.findall(
            r"host +state read ahead +([0-9.]+)  vertical_schedule.optimizer_read_ahead_bytes", capfd.readouterr().out
        )
        assert [round(float(each), 1) for each in told] == [round(sum(slot.numel() for slot in slots) / MIB, 1)] and slots
        assert engine.vertical.optimizer_read_ahead_bytes == sum(slot.numel() for slot in slots)
        pages = []
        for batch in token_batches(3, 2):
            pages.append(sum(map(resident_pages, slots)))
            engine.train_batch(iter(batch))
        assert pages[:2] == [0, 0] and pages[2] > 0
        uses: tuple[Callable[[], object], ...] = (
            engine.optimizer.flush,
            partial(engine.eval_batch, iter(token_batches(1, 2)[0])),
            partial(engine.save_checkpoint, str(tmp_path / "saved")),
        )
        for use in uses:
            engine.train_batch(iter(token_batches(1, 2)[0]))
            assert sum(map(resident_pages, slots)) > 0, "they stay for the next step"
            use()
            assert sum(map(resident_pages, slots)) == 0
