"""What `optimizer_host_share` null means: a part of what a written `host_memory_bytes` leaves; nothing that others may need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import base_config, small_buffers, start_process_group
from models import MixerModel

from ds_vertical.compat import accelerator
from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import load_section
from ds_vertical.engine import autotune, memory_check
from ds_vertical.engine.memory_check import Forecast, groups_of
from ds_vertical.model.layers import map_layers
from ds_vertical.planner import memory_budget
from ds_vertical.types import RunSettings, Tier

WIDTH, NUM_LAYERS = 512, 20
LIMIT = 8 << 30
ACTIVATIONS = "since activations take host memory"


class StateChoice:
    """What `optimizer_host_share` null means for a model on a device with memory of its own, and what each share takes."""

    def __init__(self, folder: Path, clip: float = 0.0, params: str = "nvme", **section: Any) -> None:
        start_process_group()
        self.network = MixerModel(NUM_LAYERS, WIDTH)
        self.layers, self.groups = map_layers(self.network, None), groups_of(self.network, None, None)
        section = {"host_memory_bytes": LIMIT, "optimizer_delay": 0.3} | section
        made = base_config(folder, num_micro_batches=4, dtype="fp32", clip=clip, params=params, section=section)
        self.made = small_buffers(made, 1_100_000) if params == "nvme" else made
        loaded = load_section(self.made)
        assert loaded is not None
        self.section = loaded

    def forecast_of(self, resolved: RunSettings) -> Forecast:
        return Forecast(self.layers, self.groups, self.made, resolved)

    def resolved(self, **changes: Any) -> RunSettings:
        return replace(resolve(self.section), **changes)

    def needed(self, share: float) -> int:
        forecast = self.forecast_of(self.resolved(optimizer_host_share=share))
        items = memory_budget.budget(forecast.shape, forecast.terms, forecast.further(7))
        return max(memory_budget.total_bytes(items, Tier.HOST), 7 + forecast.setup_bytes)

    def chosen(self, allowed: int = LIMIT) -> RunSettings:
        return autotune.choose_state_share(self.section, self.resolved(), self.forecast_of, (allowed, 7))


@pytest.fixture
def two_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "is_one_memory", lambda: False)
    monkeypatch.setattr(accelerator, "free_device_bytes", lambda: None)
    monkeypatch.setattr(memory_check.host, "available_bytes", lambda: 8 * LIMIT)  # whoever else runs here


@pytest.mark.usefixtures("two_memories")
def test_state_takes_a_part_of_what_all_else_leaves_of_host_memory(tmp_path: Path) -> None:
    """To the byte. A run that fits without fits with its share."""
    choice = StateChoice(tmp_path)
    shares = [count / 20 for count in range(21)]
    sizes = {share: choice.needed(share) for share in shares}
    assert sizes[1.0] - sizes[0.0] > 12 * NUM_LAYERS * 2 * WIDTH**2
    enough = sizes[0.0] + (sizes[0.5] - sizes[0.0]) * 5 // 4
    for allowed in (sizes[0.0] - 1, sizes[0.0], enough - 2, enough + 2, sizes[1.0], 2 * sizes[1.0]):
        found = choice.chosen(allowed)
        most = sizes[0.0] + 0.8 * (allowed - sizes[0.0])
        assert found.optimizer_host_share == max([s for s in shares if sizes[s] <= most], default=0.0)
        assert allowed < sizes[0.0] or sizes[found.optimizer_host_share] <= allowed
        told = {0.0: "none", 1.0: "all"}.get(found.optimizer_host_share, "no more")
        said = f"null: 80% of what host_memory_bytes and the machine leave beside the rest holds {told} of it"
        assert found.reasons["optimizer_host_share"] == said
    assert 0.5 <= choice.chosen(enough + 2).optimizer_host_share < 0.6 > choice.chosen(enough - 2).optimizer_host_share > 0.4


@pytest.mark.usefixtures("two_memories")
def test_a_limit_above_what_the_machine_has_free_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is resident, and what is free, is this run's; the JSON's limit is far above both."""
    choice = StateChoice(tmp_path)
    none, half, both = (choice.needed(share) for share in (0.0, 0.5, 1.0))
    monkeypatch.setattr(memory_check.host, "resident_bytes", lambda: none // 2)
    for free, least, most in ((0, 0.0, 0.0), (2 * both, 1.0, 1.0), (none - none // 2 + (half - none) * 5 // 4 + 2, 0.5, 0.55)):
        monkeypatch.setattr(memory_check.host, "available_bytes", lambda free=free: free)
        assert least <= choice.chosen(100 * both).optimizer_host_share <= most


@pytest.mark.usefixtures("two_memories")
def test_a_run_whose_ssd_lacks_a_second_generation_fits_with_its_share(tmp_path: Path) -> None:
    """All gradients then wait, unless the JSON demands early steps, of which `initialize` says that the SSD is too small."""
    shares = {}
    for written in (None, 0.25):  # null: 0.25, too
        choice = StateChoice(tmp_path, optimizer_delay=written)
        none, whole = choice.needed(0.0), choice.needed(1.0)
        gradients = 3 * NUM_LAYERS * 2 * WIDTH**2  # 4 bytes each of the 75 % that are stepped early
        assert choice.forecast_of(choice.resolved()).timing.generations == 2
        allowed = none + gradients + (whole - none) // 2
        found = choice.chosen(allowed)
        forecast = choice.forecast_of(found)
        forecast.timing.give_up()
        items = memory_budget.budget(forecast.shape, replace(forecast.terms, **memory_budget.LEAN), forecast.further(7))
        shares[written] = found.optimizer_host_share, memory_budget.total_bytes(items, Tier.HOST) <= allowed
        if written is None:
            assert choice.chosen(none + gradients // 2).optimizer_host_share == 0.0
    assert shares[None][0] < shares[0.25][0] and shares[None][1] and shares[None][0] > 0.0


@pytest.mark.usefixtures("two_memories")
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_either_the_new_values_of_early_steps_count_beside_the_state_or_all_gradients_that_wait_without_them(
    tmp_path: Path, clip: float
) -> None:
    choice = StateChoice(tmp_path, clip, "cpu", optimizer_delay=None)

    def needed(share: float) -> int:
        forecast, terms = choice.forecast_of(choice.resolved(optimizer_host_share=share)), []
        terms.append(replace(forecast.terms, **memory_budget.LEAN))
        terms.append(replace(terms[0], held_share=1.0, early_share=0.0))
        items = [memory_budget.budget(forecast.shape, each, forecast.further(7)) for each in terms]
        return max(*(memory_budget.total_bytes(each, Tier.HOST) for each in items), 7 + forecast.setup_bytes)

    sizes = {count / 20: needed(count / 20) for count in range(21)}
    for allowed in (sizes[0.0] + (sizes[0.5] - sizes[0.0]) * 5 // 4 + 2, 2 * sizes[0.0], sizes[0.0]):
        most = sizes[0.0] + 0.8 * (allowed - sizes[0.0])
        assert choice.chosen(allowed).optimizer_host_share == max(share for share in sizes if sizes[share] <= most)


@pytest.mark.usefixtures("two_memories")
def test_the_share_that_is_chosen_passes_the_check_of_the_budget(tmp_path: Path) -> None:
    choice = StateChoice(tmp_path)
    params = list(choice.network.parameters())
    _, baseline = memory_check.host_room(params, LIMIT)
    limit = choice.needed(0.4) - 7 + baseline
    resolved = autotune.choose_state_share(choice.section, choice.resolved(), choice.forecast_of, (limit, baseline))
    assert 0.2 < resolved.optimizer_host_share < 0.4
    table, needed, left = memory_check.check_memory(choice.forecast_of(resolved), params, limit)
    assert needed <= limit and left > 0
    assert any("optimizer state at rest" in line and line.endswith("vertical_schedule.optimizer_host_share") for line in table)


@pytest.mark.usefixtures("two_memories")
@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"host_memory_bytes": None}, "since host_memory_bytes is null"),
        ({"activations": {"device": "host"}}, ACTIVATIONS),
        ({"activations": {"device": "ssd"}}, ACTIVATIONS),
        ({"activations": {"keep": "everything", "keep_device": "host"}}, ACTIVATIONS),
        (
            {"activations": {"keep": "products", "keep_host_share": 0.5, "keep_share": 0.5}},
            ACTIVATIONS,
        ),
    ],
    ids=str,
)
def test_no_state_is_put_into_memory_that_others_may_need(tmp_path: Path, section: dict[str, Any], why: str) -> None:
    found = StateChoice(tmp_path, **section).chosen()
    assert found.optimizer_host_share == 0.0 and found.reasons["optimizer_host_share"].startswith(f"null: 0, {why}")


@pytest.mark.usefixtures("two_memories")
def test_a_share_that_is_written_stays_and_what_is_kept_on_the_device_does_not_matter(tmp_path: Path) -> None:
    written = StateChoice(tmp_path, optimizer_host_share=0.15)
    assert written.chosen() == written.resolved() and written.chosen().reasons["optimizer_host_share"] == "as written"
    assert StateChoice(tmp_path, activations={"keep": "everything"}).chosen().optimizer_host_share == 1.0
    in_host = StateChoice(tmp_path)
    in_host.made["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    assert in_host.chosen().reasons["optimizer_host_share"] == "null: 0, the JSON puts no optimizer state on SSD"


@pytest.mark.usefixtures("two_memories")
@pytest.mark.parametrize(
    ("written", "planned", "clip", "share", "delay"),
    [
        (0.0, 0.0, 0.0, 0.95, 0.0),  # some is left to be stepped early
        (0.0, 0.0, 1.0, 1.0, 0.0),  # without speculation all steps come behind the norm in any case
        (0.3, 0.3, 0.0, 1.0, 0.3),
        (None, 0.0, 0.0, 1.0, 1.0),
        (None, 0.5, 0.0, 1.0, 1.0),
        (None, None, 0.0, 1.0, 1.0),
    ],
)
def test_where_no_state_is_left_to_step_early_all_is_left_to_the_next_forward(
    tmp_path: Path, written: float | None, planned: float | None, clip: float, share: float, delay: float
) -> None:
    """A delay of 0 that is written stays, and so does some state on SSD. `planned`: by the machine's rates."""
    choice = StateChoice(tmp_path, optimizer_delay=written, optimizer_speculation=False if clip else None)
    choice.made["gradient_clipping"] = clip
    resolved = choice.resolved(optimizer_delay=planned)
    found = autotune.choose_state_share(choice.section, resolved, choice.forecast_of, (LIMIT, 7))
    timing = choice.forecast_of(found).timing
    assert (found.optimizer_host_share, timing.delay) == (share, delay)
    assert timing.possible == (share < 1) and timing.leaves_steps == (not clip)
    assert ("no state is left on SSD" in found.reasons["optimizer_delay"]) == (written is None and planned is not None)


def test_no_state_is_put_into_memory_in_which_the_device_computes(tmp_path: Path) -> None:
    assert ACTIVATIONS in StateChoice(tmp_path).chosen().reasons["optimizer_host_share"]


@pytest.mark.usefixtures("two_memories")
def test_all_ranks_take_the_share_that_fits_on_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = StateChoice(tmp_path)
    for others, share in (([0.5, 0.25], 0.5), ([0.25], 0.25), ([], 0.0)):
        monkeypatch.setattr(autotune.ranks, "all_gathered", lambda own, others=others: [own, others])
        assert choice.chosen().optimizer_host_share == share
