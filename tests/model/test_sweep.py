"""Every model type that transformers can make small trains layer-major with the gradients of plain autograd, or is refused."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import sweep
import torch
import transformers
from places import ROOT, SUPPORT

from ds_vertical.errors import LayerError

FAMILIES = ROOT / "docs" / "families.md"


@pytest.mark.parametrize(("gap", "result"), [(0, "exact"), (5e-6, "rounding"), (5e-5, "differs")])
def test_what_is_above_the_contracts_tolerance_is_no_rounding(gap: float, result: str) -> None:
    losses, grads = [torch.ones(())], {"weight": torch.ones(4)}
    found = sweep._verdict(losses, grads, {}, losses, {"weight": torch.ones(4) * (1 + gap)}, {})
    assert found["result"] == result
    row = {"type": "some", "kind": "causal", "class": "Some", **found}
    assert ("| differs | 1 |" in sweep.table([row], "# Heading")) == (result == "differs")


ROWS = [
    {"type": "a", "kind": "causal", "class": "A", "result": "exact"},
    {"type": "b", "kind": "causal", "class": "B", "result": "exact"},
    {"type": "c", "kind": "causal", "class": "C", "result": "exact", "named": ["c.0"]},
    {"type": "d", "kind": "vision", "class": "D", "result": "rounding", "figure": 1e-7, "where": "w", "count": "1 of 9"},
    {"type": "e", "kind": "vision", "class": "E", "result": "refused", "words": "no layers | none"},
    {"type": "f", "result": "no model", "words": ""},
    {"type": "g", "result": "no package", "words": "timm"},
    {"type": "h", "result": "not made", "words": "plain torch"},
]


def test_the_committed_table_tells_what_has_become_worse() -> None:
    before = sweep.results_of(sweep.table(ROWS, "# Heading"))
    assert before == {row["type"]: sweep.result_of(row) for row in ROWS}
    for lost in "not made", "fails", "no package", "differs":
        assert set(sweep.worse(before, dict.fromkeys(before, lost))) == set("abcde")
    assert sweep.worse(before, before | {"a": "rounding", "d": "exact", "h": "exact"}) == {"a": "exact, now rounding"}


def test_the_committed_table_is_read_whole() -> None:
    text = FAMILIES.read_text()
    found = Counter(sweep.results_of(text).values())
    titles = {title: result for result, title in sweep._TITLES.items()}
    counts = dict(re.findall(r"^\| (.+) \| (\d+) \|$", text, re.MULTILINE))
    assert {titles[title]: int(count) for title, count in counts.items() if count != "0"} == found


def test_the_table_says_of_fetched_ends_what_their_rows_say() -> None:
    here = [row | {"commit": "a1"} for row in ROWS]
    assert sweep._fetched(here, []) == ""
    assert "each of the 8\ntypes had the same result as in this table (at a1)" in sweep._fetched(here, here)
    said = sweep._fetched(here, [*here[:-1], here[-1] | {"result": "fails"}])
    assert "7 of the 8\ntypes had the same result" in said and "not h (fails)" in said


@pytest.mark.parametrize(("phase", "result"), [("ours", "fails"), ("plain", "not made")])
def test_what_is_ended_in_our_own_pass_fails(phase: str, result: str) -> None:
    def compared(model_type: str) -> dict[str, object]:
        sweep._tell(phase)
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    assert sweep.in_a_child("some", compared)["result"] == result


def test_our_own_pass_has_a_limit_of_its_own_and_plain_torch_what_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused attempt is over: plain torch's next one, which takes too long, is no failure of ours."""
    monkeypatch.setattr(sweep, "LIMIT_S", 0.5)

    def burn(seconds: float) -> None:
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    def compared(own_s: float, plain_s: float) -> dict[str, object]:
        burn(0.3)
        with contextlib.suppress(LayerError), sweep._own_pass():
            burn(own_s)
            raise LayerError("refused")
        burn(plain_s)
        return {"result": "exact"}

    found = [sweep.in_a_child("some", lambda _, pair=pair: compared(*pair)) for pair in ((0.3, 0.0), (0.3, 0.4), (0.8, 0.0))]
    assert [row["result"] for row in found] == ["exact", "not made", "fails"]


@pytest.mark.parametrize(("phase", "result"), [("ours", "fails"), ("plain", "refused")])
def test_a_refusal_stays_where_plain_torch_is_ended_at_another_variant(
    monkeypatch: pytest.MonkeyPatch, phase: str, result: str
) -> None:
    tried: list[object] = []

    def compared(model_type: str, variant: object) -> dict[str, object]:
        tried.append(variant)
        if len(tried) > 1:
            sweep._tell(phase)
            os.kill(os.getpid(), signal.SIGKILL)
        return {"type": model_type, "result": "refused", "words": "no layers"}

    monkeypatch.setattr(sweep, "_compared", compared)
    assert sweep.in_a_child("some")["result"] == result


@pytest.mark.parametrize(("where", "result"), [("run_vertical", "fails"), ("run_plain", "not made")])
def test_a_lack_of_memory_of_our_own_pass_fails(monkeypatch: pytest.MonkeyPatch, where: str, result: str) -> None:
    def lacking(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(sweep, where, lacking)
    assert sweep.compare("gpt2")["result"] == result


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("ends", ["resident", "fetched"])
def test_every_type_is_exact_to_rounding_or_refused(tmp_path: Path, ends: str) -> None:
    """`DS_VERTICAL_FAMILIES=docs/families.md` writes the table as well. Weights are NaN while they are away."""
    committed = FAMILIES.read_text()  # this run may write another one
    before = sweep.results_of(committed)
    out = tmp_path / "rows.jsonl"
    paths = os.pathsep.join([str(SUPPORT), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_VERTICAL_ENDS": ends}
    subprocess.run([sys.executable, str(SUPPORT / "sweep.py"), str(out)], env=environment, check=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    if (named := os.environ.get("DS_VERTICAL_FAMILIES")) and ends == "resident":
        subprocess.run([sys.executable, str(SUPPORT / "sweep.py"), str(out), "--table", named], env=environment, check=True)
    bad = {row["type"]: row for row in rows if row["result"] in ("differs", "fails")}
    assert not bad
    assert not sweep.worse(before, {row["type"]: sweep.result_of(row) for row in rows})
    if transformers.__version__ in committed:
        assert {row["type"] for row in rows} == before.keys()
