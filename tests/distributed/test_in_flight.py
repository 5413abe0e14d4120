"""Collectives in flight in a real run of two ranks, or of four over levels: told by the order in which the executor does
things, not by times."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import in_flight_worker
import pytest
from processes import start_ranks

pytestmark = pytest.mark.timeout(300)
USES = ("F", "B")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has noted, by "True" and "False", with overlap and without."""
    return noted(tmp_path_factory.mktemp("in_flight"), 2)


@pytest.fixture(scope="module")
def ran_over_levels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """As `ran`, of four ranks, of which two each are a node."""
    return noted(tmp_path_factory.mktemp("in_flight_over_levels"), 4, "2")


def noted(folder: Path, num_ranks: int, *words: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(Path(in_flight_worker.__file__)), str(folder), *words]
    start_ranks(command, folder, num_ranks=num_ranks, forked=True)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def gathers(run: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Per fetch of a layer its unit, the event by whose end its gather has been issued, and the layer's first use behind it."""
    events = run["events"]
    fetches = [index for index, event in enumerate(events) if event["op"] == "FETCH"]
    found = []
    for number, fetch in enumerate(fetches, start=run["start"] + 1):
        unit = events[fetch]["unit"]
        use = next((i for i, e in enumerate(events) if i > fetch and e["op"] in USES and e["unit"] == unit), None)
        if use is not None:
            found.append((unit, next(i for i, event in enumerate(events) if event["gathers"] >= number), use))
    return found


def test_a_layers_gather_is_issued_ahead_of_its_first_use(ran: list[dict[str, Any]]) -> None:
    """All but those of a pass's first layers, which are used as soon as they are fetched."""
    for rank in ran:
        early = [unit for unit, issued, use in gathers(rank["True"]) if issued < use]
        assert len(gathers(rank["True"])) >= 5 and len(early) >= len(gathers(rank["True"])) - 2, gathers(rank["True"])
    assert gathers(ran[0]["True"]) == gathers(ran[1]["True"])


def test_without_overlap_each_gather_is_waited_for_at_once(ran: list[dict[str, Any]]) -> None:
    for rank in ran:
        events = rank["False"]["events"]
        fetched = [(index, event["unit"]) for index, event in enumerate(events) if event["op"] == "FETCH"]
        assert fetched and all(f"fetch {unit}" in events[index + 1]["waited"] for index, unit in fetched)


def backwards_beside(run: Mapping[str, Any], op: str) -> dict[str, list[str]]:
    """Per layer, of which layers there are backwards between its event `op` and the wait for its reduction."""
    events, found = run["events"], {}
    for index, event in enumerate(events):
        if event["op"] == op and event["unit"].isdigit():
            waited = next(i for i, e in enumerate(events) if f"reduce {event['unit']}" in e["waited"])
            found[event["unit"]] = [e["unit"] for e in events[index + 1 : waited] if e["op"] == "B"]
    return found


def test_a_layers_reduction_is_under_way_in_the_backward_of_the_next_one(ran: list[dict[str, Any]]) -> None:
    """Of both micro-batches."""
    for rank in ran:
        assert backwards_beside(rank["False"], "REDUCE") == {"0": [], "1": [], "2": []}
        beside = backwards_beside(rank["True"], "REDUCE")
        assert beside.keys() == {"0", "1", "2"} and (beside["2"], beside["1"]) == (["1", "1"], ["0", "0"])


@pytest.mark.slow
def test_over_levels_a_layers_cross_is_under_way_in_the_backward_of_the_next_one(ran_over_levels: list[dict[str, Any]]) -> None:
    for rank in ran_over_levels:
        assert backwards_beside(rank["False"], "CROSS") == {"0": [], "1": [], "2": []}
        beside = backwards_beside(rank["True"], "CROSS")
        assert beside.keys() == {"0", "1", "2"} and (beside["2"], beside["1"]) == (["1", "1"], ["0", "0"])


@pytest.mark.slow
def test_over_levels_waiting_at_once_has_the_same_bits(ran_over_levels: list[dict[str, Any]]) -> None:
    assert len({rank[overlap]["digest"] for rank in ran_over_levels for overlap in ("True", "False")}) == 1


def test_waiting_at_once_has_the_same_bits(ran: list[dict[str, Any]]) -> None:
    assert len({rank[overlap]["digest"] for rank in ran for overlap in ("True", "False")}) == 1
