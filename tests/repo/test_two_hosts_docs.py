"""What docs/results.md shows of two hosts, and of a cluster on paper: the numbers are those of the records, and what was asked
for is met."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

TWONODE = ROOT / "benchmarks" / "twonode"
PAGE = (ROOT / "docs" / "results.md").read_text()
SECTION = PAGE[PAGE.index("## Two hosts on a slow link") : PAGE.index("## One slow host")]
ON_PAPER = PAGE[PAGE.index("### A cluster on paper") : PAGE.index("## The demo")]
LINKS = {"500 Mbit/s": "500mbit", "1 Gbit/s": "1gbit", "2 Gbit/s": "2gbit"}
PROCESSORS = {"EPYC": "AMD EPYC", "Xeon": "Intel(R) Xeon(R) Processor"}
ARMS = {  # as the tables of bytes name them
    "stock ZeRO-3": "stock",
    "stock with hpZ": "stock_hpz",
    "layer-major, all ranks in one group": "flat",
    "layer-major, levels": "levels",
    "layer-major, levels, INT8": "int8",
    "layer-major, levels, INT8 and INT4": "int8_int4",
}
MOVED = "inbound_bytes_per_step"
RECORDS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in TWONODE.glob("gpt_101m_*.json")}


def table(head: str, number: int = 0, section: str = SECTION) -> list[list[str]]:
    """The cells of the rows below a head that begins so. `number`: of the tables with such a head, from 0."""
    lines = section.splitlines()
    start = [place for place, line in enumerate(lines) if line.startswith(head)][number] + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def is_shown(text: str, value: float) -> bool:
    """Whether the text is the value, rounded to as many places as the text has."""
    return text == f"{value:.{len(text.partition('.')[2])}f}"


def step_rows() -> list[list[str]]:
    return table("| arms | link | M | measured |")


def record_of(names: list[str], link: str, count: str, measured: str) -> dict[str, Any]:
    day, _, processor = measured.partition(", ")
    (found,) = [
        record
        for record in RECORDS.values()
        if record["arms"].keys() >= {*names}
        and (record["rate"], record["micro_batches"], record["tokens"]) == (LINKS[link], int(count), 8)
        and record["date"].startswith(f"2026-{day}")
        and record["machine"]["cpu"] == PROCESSORS[processor]
        and len(next(iter(record["arms"].values()))["steps"]) == 6  # five behind the first one
    ]
    return found


@pytest.mark.parametrize("row", step_rows(), ids=" ".join)
def test_a_row_of_steps_has_the_numbers_of_its_record(row: list[str]) -> None:
    arms, link, count, measured, step_s, link_s, ratio, asked, moved, fewer, asked_fewer, busy = row
    names = re.findall(r"`(\w+)`", arms)
    record = record_of(names, link, count, measured)
    first, second = (record["arms"][name] for name in names)
    for texts, key, unit in ((step_s, "step_s", 1), (link_s, "link_bound_s", 1), (busy, "busy_cores", 1), (moved, MOVED, 1e6)):
        for text, arm in zip(texts.split(", "), (first, second), strict=True):
            assert is_shown(text, arm[key] / unit), key
    assert is_shown(ratio, first["step_s"] / second["step_s"]) and is_shown(fewer, first[MOVED] / second[MOVED])
    for found, text in ((first["step_s"] / second["step_s"], asked), (first[MOVED] / second[MOVED], asked_fewer)):
        assert text == "-" or found >= float(text)
    assert all(arm["inbound_over_formula"] == pytest.approx(1, abs=0.004) for arm in (first, second))
    alike = {*names} <= {"flat_sync", "flat", "levels"}  # the others round weights or gradients
    assert (first["losses"] == second["losses"]) == alike


def test_what_was_asked_for_is_asked_of_a_row() -> None:
    """The table that the project was given."""
    asked = {(row[0], row[1], row[2], row[7], row[10]) for row in step_rows() if (row[7], row[10]) != ("-", "-")}
    assert asked == {
        ("`flat_sync`, `flat`", "2 Gbit/s", "4", "1.25", "-"),
        ("`flat`, `levels`", "500 Mbit/s", "4", "1.8", "2.75"),
        ("`flat`, `levels`", "500 Mbit/s", "16", "-", "2.75"),
        ("`flat`, `levels`", "1 Gbit/s", "4", "1.4", "-"),
        ("`levels`, `int8`", "500 Mbit/s", "4", "-", "1.18"),
        ("`levels`, `int8_int4`", "500 Mbit/s", "4", "1.3", "3.7"),
    }


def test_rounding_has_the_held_out_losses_of_its_record() -> None:
    record = json.loads((ROOT / "benchmarks" / "quantised" / "gpt_13m_300_2026-11-26.json").read_text())
    *steps, last = table("| step | exact | INT8 weights |")
    for number, *texts in steps:
        for text, arm in zip(texts, record["arms"], strict=True):
            (found,) = [each["loss"] for each in record["held_out"][arm] if each["step"] == int(number)]
            assert is_shown(text, found)
    for text, arm in zip(last[1:], record["arms"], strict=True):
        shown, _, asked = text.partition(" (asked ")
        assert float(shown) == pytest.approx(record["over_exact"][arm], abs=6e-5)
        assert not asked or record["over_exact"][arm] <= float(asked.rstrip(")"))


def plans() -> Iterator[tuple[Mapping[str, Any], str, Mapping[str, float]]]:
    """The record of each prediction, its arm, and what is predicted of it."""
    for path in TWONODE.glob("plan_*.json"):
        for name, arms in json.loads(path.read_text()).items():
            for arm, found in arms.items():
                yield RECORDS[Path(name).stem], arm, found


def test_the_rows_of_plans_are_those_of_the_predictions() -> None:
    rows = table("| processor | arm | link | measured s | predicted s |")
    left = [*plans()]
    assert len(rows) == len(left)
    for processor, arm, link, measured, predicted, ratio, within in rows:
        mine = [
            each
            for each in left
            if (each[0]["rate"], each[1]) == (LINKS[link.removesuffix(", again")], arm.strip("`"))
            and each[0]["machine"]["cpu"] == PROCESSORS[processor]
            and is_shown(measured, each[2]["measured_s"])
        ]
        (match,) = mine
        left.remove(match)
        found = match[2]
        assert is_shown(predicted, found["predicted_s"]) and is_shown(ratio, found["predicted_over_measured"])
        assert (within == "yes") == (abs(found["predicted_over_measured"] - 1) <= 0.15)


def newest(arm: str, count: int, key: str) -> float | None:
    """What the last record that has counted these bytes of the arm says, in MB."""
    found = [
        (record["date"], record["arms"][arm][key] / 1e6)
        for record in RECORDS.values()
        if arm in record["arms"] and (record["micro_batches"], record["tokens"]) == (count, 8) and key in record["arms"][arm]
    ]
    return max(found)[1] if found else None


@pytest.mark.parametrize(("number", "key"), [(0, MOVED), (1, "within_bytes_per_step")], ids=["into a host", "within one"])
def test_the_bytes_of_steps_are_those_of_the_newest_records(number: int, key: str) -> None:
    """With ZeRO++ a micro-batch brings 1 byte of weights and 0.5 of gradients a parameter, half of it into a host: an eighth
    of what stock ZeRO-3 sends in bf16 over a ring of four ranks. Within a host it has half of stock's bytes."""
    rows = table("| | M = 1 | M = 4 | M = 16 |", number)
    assert [name for name, *_ in rows if name not in ARMS] == ["ZeRO++ by its formulas"]
    for name, *cells in rows:
        for count, cell in zip((1, 4, 16), cells, strict=True):
            text, _, how = cell.replace(",", "").partition(" ")
            found = newest(ARMS.get(name, "stock"), count, key)
            assert found is not None and how == ("(measured)" if name in ARMS else "(derived)")
            expected = found if name in ARMS else found / (2 if number else 8)
            assert float(text) == pytest.approx(expected, abs=1, rel=0.005), (name, count)


# ---- a cluster on paper

FRONTIER = json.loads((ROOT / "benchmarks" / "plans" / "frontier_2026-11-28.json").read_text())["rows"]


def planned(nodes: str, tokens: int, assumed: bool) -> dict[str, Any]:
    """The record of the plan for so many nodes, with so many tokens a step for each."""
    wanted = f"--tokens-per-step {int(nodes) * tokens} --machine frontier_node --num-ranks 8 --nodes {nodes} "
    (found,) = [row for row in FRONTIER if wanted in row["options"] and assumed == ("--assume-levels" in row["options"])]
    return found


def with_levels(plan: dict[str, Any], copy_ranks: int) -> float:
    """Seconds of the plan that was compared with the chosen one, and in which so many ranks share a copy."""
    (found,) = [each for each in plan["others"] if f"levels.ranks_per_node {copy_ranks}," in each["differs"]]
    return found["step_over_chosen"] * plan["step_s"]


def test_the_cluster_on_paper_is_that_of_its_record() -> None:
    rows = table("| nodes | GCDs |", section=ON_PAPER)
    assert [row[0] for row in rows] == ["1", "2", "8", "48"]
    alone = planned("1", 262_144, False)["flops_per_s"]
    for nodes, ranks, step_s, levels_s, flops, over_one, moved, stock_s in rows:
        plan = planned(nodes, 262_144, False)
        assert int(ranks) == 8 * int(nodes) and is_shown(step_s, plan["step_s"]) and is_shown(stock_s, plan["stock"]["step_s"])
        assert is_shown(flops, plan["flops_per_s"] / int(ranks) / 1e12)
        assert is_shown(over_one, plan["flops_per_s"] / int(nodes) / alone)
        assert is_shown(moved, plan["into_node_bytes"] / 1e9)
        assert levels_s == "-" if nodes == "1" else is_shown(levels_s, with_levels(planned(nodes, 262_144, True), 8))
    for nodes, step_s, by_two, by_eight in table("| nodes | chosen, one level, s |", section=ON_PAPER):
        plan = planned(nodes, 16_384, True)
        assert is_shown(step_s, plan["step_s"])
        assert is_shown(by_two, with_levels(plan, 2)) and is_shown(by_eight, with_levels(plan, 8))
