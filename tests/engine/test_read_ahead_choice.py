"""How much host memory state that is read before the norm may take: what all else leaves, as the table at the start says."""

from __future__ import annotations

import re
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
from ds_vertical.engine.memory_check import Forecast, check_memory, groups_of, read_ahead_bytes
from ds_vertical.model.layers import map_layers
from ds_vertical.types import RunSettings

MIB = 1 << 20
WIDTH, NUM_LAYERS = 512, 8
ENOUGH = 8 << 30


class Choice:
    """The memory check of a small model under a limit."""

    def __init__(self, folder: Path, clip: float = 1.0, **section: Any) -> None:
        start_process_group()
        self.network = MixerModel(NUM_LAYERS, WIDTH)
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
def test_it_takes_four_fifths_of_what_all_else_leaves_and_is_no_reason_for_a_refusal(tmp_path: Path) -> None:
    choice = Choice(tmp_path)
    _, needed, _ = choice.checked()
    count, each = len(choice.pieces), max(choice.pieces)
    assert choice.forecast.ahead == count - 4 > 4
    for limit in (needed, needed + each, needed + 3 * each, needed + 2 * count * each):
        lines, again, left = choice.checked(limit)
        assert again == needed and left >= limit - needed
        assert choice.forecast.ahead == min(count - 4, int(0.8 * (limit - needed) // each))
        told = [line for line in lines if "state read ahead" in line]
        assert len(told) == (choice.forecast.ahead > 0)
        (total,) = (float(line.split()[2]) for line in lines if line.startswith("host") and line.split()[1] == "total")
        assert round(total * MIB) == pytest.approx(needed + choice.forecast.ahead * each, abs=MIB / 10)
        assert total * MIB <= limit + MIB / 10


@pytest.mark.usefixtures("no_growth")
def test_a_number_is_the_most_bytes_of_it(tmp_path: Path) -> None:
    each = max(Choice(tmp_path).pieces)
    for asked, slots in ((0, 0), (each - 1, 0), (3 * each + 1, 3), (10**12, len(Choice(tmp_path).pieces) - 4)):
        choice = Choice(tmp_path, optimizer_read_ahead_bytes=asked)
        choice.checked()
        found = choice.settled()
        assert choice.forecast.ahead == slots and found.optimizer_read_ahead_bytes == slots * each
        reason = found.reasons["optimizer_read_ahead_bytes"]
        assert reason == (
            "as written" if not asked else f"{asked} as written: whole pieces of state in 80% of what the memory budget leaves"
        )


@pytest.mark.parametrize(
    ("clip", "section", "why"),
    [
        (0.0, {}, "0, early steps do not wait for the norm"),
        (0.0, {"optimizer_delay": 1.0}, None),
        (1.0, {"overlap": False}, "0, without overlap nothing is read ahead"),
        (1.0, {"elastic": {}}, "0, since elastic may give a rank more micro-batches"),
        (1.0, {"elastic": {}, "optimizer_read_ahead_bytes": 10**12}, None),
        (1.0, {"optimizer_host_share": 1.0}, "0, no state is on SSD"),
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


def test_the_memory_is_what_the_table_says_and_is_taken_from_the_second_step_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small_buffers(base_config(tmp_path, num_micro_batches=2, dtype="fp32", clip=0.05), 1_100_000)
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
