"""What docs/acco.md shows of runs: the ratios are those of the records, and the picture is what its script draws of a trace."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from places import ROOT

from ds_vertical.schedule.trace import RecordingTracer, Span, StepTrace, Wait

sys.path.insert(0, str(ROOT / "benchmarks"))

import acco_rounds  # noqa: E402

PAGE = (ROOT / "docs" / "acco.md").read_text()
ARMS = {  # as the page names them: the arm of the record
    "exact, one group": "exact",
    "exact, levels": "exact_levels",
    "ZeRO-1": "stock_zero1",
    "a node": "acco_node",
    "each rank": "acco",
}
TABLE = {  # as the records' table names them
    "all ranks in one group": "exact",
    "exact delayed step over levels": "exact_levels",
    "ZeRO-1 of DeepSpeed": "stock_zero1",
    "copies of a node": "acco_node",
    "copies of each rank": "acco",
}
RECORDS = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "twonode").glob("*_1gbit_m16_*acco*.json")]


def rows(columns: int, pattern: str) -> list[list[str]]:
    """The cells of the page's table rows with so many columns whose text has `pattern`."""
    found = [line.strip("| ").split("|") for line in PAGE.splitlines() if line.startswith("| ") and re.search(pattern, line)]
    return [[cell.strip() for cell in cells] for cells in found if len(cells) == columns]


def records() -> dict[str, dict[str, Any]]:
    """The records by the number that the page gives them: those of its table's day, tokens and arms."""
    named: dict[str, tuple[str, str, set[str]]] = {}
    for number, day, tokens, arm, *_ in rows(7, r"^\| \d \| 20"):
        named.setdefault(number, (day, tokens, set()))[2].add(next(own for text, own in TABLE.items() if text in arm))
    found = {}
    for number, (day, tokens, arms) in named.items():
        (found[number],) = [
            each
            for each in RECORDS
            if each["date"].startswith(day) and each["tokens"] == int(tokens) and set(each["arms"]) == arms
        ]
    return found


def seconds(record: dict[str, Any], arm: str) -> list[float]:
    """Of the arm's steps but the first, which warms up."""
    return [step["step_s"] for step in record["arms"][arm]["steps"][1:]]


def test_each_ratio_is_that_of_the_medians_of_its_record() -> None:
    shown, known = rows(8, r"\bmet\b"), records()
    assert sorted(cells[0] for cells in shown) == sorted(known) and len(shown) == len(RECORDS)
    for number, copies, over, tokens, ratio, turns, asked, said in shown:
        acco, other, record = ARMS[copies], ARMS[over], known[number]
        assert set(record["arms"]) == {acco, other} and record["tokens"] == int(tokens)
        medians = [median(seconds(record, arm)) for arm in (other, acco)]
        single = [a / b for a, b in zip(seconds(record, other), seconds(record, acco), strict=True)]
        assert ratio == f"{medians[0] / medians[1]:.3f}"
        assert turns == f"{min(single):.2f} to {max(single):.2f}"
        assert said.startswith("met") == (float(ratio) >= float(asked))


def test_each_row_of_the_records_table_has_their_numbers() -> None:
    shown, known = rows(7, r"^\| \d \| 20"), records()
    assert len(shown) == 2 * len(RECORDS) == 2 * len(known)
    for number, _, _, arm, step_s, inbound, link_s in shown:
        found = known[number]["arms"][next(own for text, own in TABLE.items() if text in arm)]
        assert [f"{found[key]:.2f}" for key in ("step_s", "link_bound_s")] == [step_s, link_s]
        assert abs(int(inbound) - found["inbound_bytes_per_step"] / 1e6) <= 1


def test_the_cores_were_as_busy_as_the_page_says_and_all_kept_everything() -> None:
    busy = [found["busy_cores"] / 2 for record in RECORDS for found in record["arms"].values()]
    assert f"{100 * min(busy):.0f} to {100 * max(busy):.0f} % busy" in PAGE
    (later,) = [record for record in RECORDS if "Xeon" in record["machine"]["cpu"]]
    cores = [later["arms"][arm]["busy_cores"] for arm in ("stock_zero1", "acco_node")]
    assert f"{cores[0]:.2f} and {cores[1]:.2f} of 2 cores busy" in " ".join(PAGE.split())
    sections = [found["vertical_schedule"] for record in RECORDS for found in record["configs"].values()]
    assert {json.dumps(each.get("activations")) for each in sections if each["enabled"]} == {'{"keep": "everything"}'}


def test_the_schedules_are_those_of_the_halves() -> None:
    for half in ("first", "second"):
        _, _, events = (ROOT / "tests" / "golden" / f"halves_{half}_w1.txt").read_text().partition("\n")
        assert f"```text\n{events}```" in PAGE


# ---- the picture


def span(resource: str, name: str, start: float, end: float) -> Span:
    return Span(1, "MainThread", resource, name, start, start, end, 0)


STEP = StepTrace(
    *(1, 0.0, 10.0, 0.0),
    [
        *(span("compute", "preF0", 0.0, 1.0), span("compute", "0B0", 1.0, 2.0), span("compute", "0REDUCE", 2.0, 2.1)),
        *(span("compute", "preF0", 3.0, 4.0), span("compute", "NORM@-1", 4.0, 4.2), span("compute", "NORM", 4.2, 5.0)),
        *(span("adam", "step 1, chunk 0 from 0", 0.5, 0.6), span("adam", "predict 1, chunk 0 from 0", 3.5, 3.6)),
        *(
            span("net_cross", "1SPREAD", 0.6, 0.7),
            span("net_cross", "0CROSS", 2.0, 3.9),
            span("net_local", "0REDUCE", 2.0, 2.1),
        ),
    ],
    [Wait(1, "MainThread", "fetch 0", "0F0", 0.9, 1.0), Wait(1, "another", "x", "y", 0.0, 9.0)],
)


def test_a_rank_that_waits_for_others_does_not_compute() -> None:
    found: dict[int, list[str]] = {}
    for lane, each in acco_rounds.lanes_of(STEP):
        found.setdefault(lane, []).append(each.name)
    assert found == {
        acco_rounds.FIRST: ["preF0", "0B0"],
        acco_rounds.SECOND: ["preF0"],
        acco_rounds.COMMITS: ["step 1, chunk 0 from 0"],
        acco_rounds.PREDICTS: ["predict 1, chunk 0 from 0"],
        acco_rounds.WEIGHTS: ["1SPREAD"],
        acco_rounds.GRADIENTS: ["0CROSS"],
        acco_rounds.WAITS: ["0REDUCE", "NORM@-1", "NORM", "fetch 0"],
    }


def test_a_step_that_has_no_halves_is_refused() -> None:
    with pytest.raises(ValueError, match="1 schedules in the step"):
        list(acco_rounds.lanes_of(StepTrace(1, 0.0, 1.0, 0.0, STEP.spans[:3])))


def test_the_script_draws_a_trace(tmp_path: Path) -> None:
    tracer = RecordingTracer(tmp_path, 0)
    for _ in range(2):
        with tracer.step():
            for each in STEP.spans:
                tracer.span(each.resource, each.name, each.start, each.end)
    out = tmp_path / "picture.svg"
    acco_rounds.main([str(tracer.path), "--out", str(out)])
    drawn = out.read_text()
    assert drawn.count("<rect") == 1 + len(STEP.spans) - 1  # the ground, and all but the hop within a node
    assert ">5.00 s<" in drawn


def test_the_picture_has_the_scripts_lanes() -> None:
    """Twelve layers and a prefix: each is committed, predicted, sent twice and summed twice."""
    picture = (ROOT / "docs" / "acco_rounds.svg").read_text()
    assert all(f">{name}<" in picture for name in acco_rounds.LANES)
    bars = [picture.count(f'fill="{colour}"') for colour in acco_rounds.COLOURS]
    assert bars[acco_rounds.COMMITS] == bars[acco_rounds.PREDICTS] == 12 + 1
    assert bars[acco_rounds.WEIGHTS] == bars[acco_rounds.GRADIENTS] == 2 * (12 + 1)
    assert bars[acco_rounds.FIRST] == bars[acco_rounds.SECOND] > 0 and bars[acco_rounds.WAITS] > 0
