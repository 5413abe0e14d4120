"""The runner of the table of shapes: every row is a command that `ds-vertical ab` takes; the table is made from the files."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from ds_vertical.cli.bench import ab, machine_info
from ds_vertical.engine.keeping.keeping import describe_keeping
from ds_vertical.errors import ConfigError
from ds_vertical.types import ActivationSettings, Tier

sys.path.insert(0, str(ROOT / "benchmarks"))

import bridges  # noqa: E402
import busy  # noqa: E402
import chart  # noqa: E402
import commits  # noqa: E402
import gains  # noqa: E402
import inturn  # noqa: E402
import kept  # noqa: E402
import portable  # noqa: E402
import report  # noqa: E402
import run  # noqa: E402
import settings  # noqa: E402
from rig import steps  # noqa: E402


def test_every_row_is_a_command_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert len({row.name for row in run.ROWS}) == len(run.ROWS)
    for row in (*run.ROWS, *run.rows(None, "fp32")):
        for count in row.micro_batches if isinstance(row.micro_batches, tuple) else [row.micro_batches]:
            words = [word for word in row.command(tmp_path / row.name, 4, 2, count) if word not in ("--ssd-limit", run.LIMIT)]
            plan = ab.parse(words[2:])
            assert plan.arms.vertical["gradient_accumulation_steps"] == count
            assert plan.arms.vertical["gradient_clipping"] == row.clip
            assert plan.arms.vertical["bf16"]["enabled"] == (row.dtype == "bf16")
            assert plan.script_arguments[-2:] == ("--seq", str(row.tokens))
            assert plan.with_stock == (row.stock is not None) and plan.with_bound == plan.with_trace == (not row.straight)


def test_the_most_important_rows_come_first() -> None:
    names = [row.name for row in run.ROWS]
    assert names[:4] == ["m16_s8_clip0", "m16_s8_clip0_300_500", "m16_s8_clip1", "m16_s8_clip1_300_500"]
    assert "straight" in names and "m16_s8_clip0_stock_best" in names
    assert {row.name for row in run.rows(2)} >= {"m16_s2_clip0", "straight_s2", "m16_s32_clip0"}
    assert {row.name for row in run.rows(None, "fp32")} >= {"m16_s8_clip0_300_500_fp32", "straight_fp32"}


def test_estimates_follow_what_is_known() -> None:
    row = run.Row(16)
    known = {row.name: (10.0, 2.0)}
    assert row.seconds(4, 1, known) == run.LIMITS_S + 3 * run.SETUP_S + 4 * (10 + 2 + 2)
    assert run.Row((4, 8), stock=None).seconds(2, 1, {}) > 0


def test_a_row_with_a_result_of_today_and_one_too_long_are_left_out(tmp_path: Path) -> None:
    target = tmp_path / "ab" / "x.json"
    target.parent.mkdir()
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--budget", "0", "--results", str(target.parent)]
    done = subprocess.run([*command, "--only", "m16_s8_clip0"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "m16_s8_clip0: left out" in done.stdout and (tmp_path / "README.md").is_file()
    wrong = subprocess.run([*command, "--only", "m3"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 2 and "--only m3: there are m16_s8_clip0" in wrong.stderr


def test_a_line_through_steps() -> None:
    straight = report.fit_line({4: 3.0, 8: 5.0, 16: 9.0})
    assert straight == pytest.approx({"slope_s": 0.5, "at_0_s": 1.0, "r_squared": 1.0, "max_deviation": 0.0})
    bent = report.fit_line({4: 3.0, 8: 5.0, 16: 12.0})
    assert bent["r_squared"] < 1 and bent["max_deviation"] > 0.05


CONTENT = {
    "arms": {
        "stock": {"step_s": 29.45, "peak_host_bytes": 1.2e9},
        "vertical": {"step_s": 5.32, "peak_host_bytes": 1.1e9},
    },
    "speedup": 5.54,
    "ssd_limit": {"read_bytes_per_s": 300e6, "write_bytes_per_s": 500e6},
    "machine": {"num_cores": 2, "cpu": "AMD EPYC"},
    "configs": {
        "vertical": {"gradient_accumulation_steps": 16, "gradient_clipping": 0.0, "bf16": {"enabled": True}},
    },
    "command": ["ds-vertical", "ab", "--stock-config", "configs/stock_best.json", "--", "scripts/train.py", "--seq", "8"],
    "yardstick": {
        "bound_s": 5.0,
        "resource": "ssd_read",
        "step_over_bound": 1.06,
        "simulated_s": 5.1,
        "bytes": {"read_over_table": 1.001, "written_over_table": 0.99},
        "host_memory": {"peak_over_formula": 1.05},
        "outside_share": 0.011,
    },
}


UNSTEADY = CONTENT | {"yardstick": CONTENT["yardstick"] | {"steady": False}}


def test_the_table_has_every_result(tmp_path: Path) -> None:
    found = report.results(ROOT / "benchmarks" / "ab")
    text = report.markdown(found)
    assert len(found) >= 7 and all(result.file in text for result in found)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len({line.count("|") for line in rows}) == 1
    (tmp_path / "gpt_101m_m16_s8_clip0_300_500_avx512_2026-11-22.json").write_text(json.dumps(CONTENT))
    fit = report.fit_line({4: 1.0, 8: 2.0})
    straight = CONTENT | {"kind": "straight", "fit": fit, "step_s": {"4": [1.0, 1.1, 0.9], "8": [2.0]}}
    (tmp_path / "gpt_101m_straight_avx512_2026-11-22.json").write_text(json.dumps(straight))
    text = report.markdown(report.results(tmp_path))
    cells = (
        "| 16 | 8 | bf16 | 0 | 300/500 MB/s | stock_best | 29.45 | 5.32 | 5.54 | 5.00 ssd_read | 1.06 | 5.10 | 1.001 | 0.990 |"
        " 1.1% | 1.05 | 0.92 | 2026-11-22, 2 cores AMD EPYC avx512 |"
    )
    assert "| 1.06 ~ |" in report.markdown([replace(report.results(tmp_path)[0], content=UNSTEADY)])
    assert cells in text and "1.00 s at M = 4, 2.00 s at M = 8" in text and "R^2 1.0000" in text


def test_gains_are_runs_of_the_vertical_arm_and_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    options = argparse.Namespace(micro_batches=8, dtype="fp32", ssd_limit="", steps=4, tokens=8)
    texts = set()
    for change in gains.CHANGES.values():
        plan = ab.parse(gains.command(change, options, tmp_path, None)[2:])
        assert not plan.with_stock and plan.with_bound
        texts.add(json.dumps(plan.arms.vertical, sort_keys=True))
    assert len(texts) == len(gains.CHANGES), "a change changes nothing"
    rows = {"default": {"step_s": [2.0, 3.0, 2.5], "simulated_s": 2.0}, "overlap": {"step_s": [5.0], "simulated_s": 3.0}}
    kept = {key: CONTENT[key] for key in ("machine", "ssd_limit")} | {"date": "2026-11-22T00:00:00", "rows": rows}
    text = report.markdown([], [kept | {"micro_batches": 8, "tokens": 8, "dtype": "fp32"}])
    assert "| overlap | 5.00 | 3.00 | 2.00 | 1.50 |" in text and "| default | 2.50 | 2.00 | 1.00 | 1.00 |" in text


@pytest.mark.slow
def test_saves_are_measured_in_both_arms(tmp_path: Path) -> None:
    """The real arms, a small model: ours links its files, stock copies all of its optimizer's state."""
    words = [sys.executable, str(ROOT / "benchmarks" / "saves.py"), "--model", "gpt_13m", "--dtype", "fp32", "--saves", "3"]
    subprocess.run([*words, "--runs", str(tmp_path / "runs"), "--benchmarks", str(tmp_path)], check=True, timeout=400)
    (found,) = (tmp_path / "saves").glob("gpt_13m_fp32_*.json")
    content = json.loads(found.read_text())
    arms, count = content["arms"], content["arms"]["vertical"]["parameters"]
    ours, theirs = (arms[arm]["saves"][1]["write_bytes"] / count for arm in ("vertical", "stock"))
    assert ours < 6 < 24 < theirs  # ours: the delayed part of the last step, and what rests in host memory
    assert "failed" not in arms["vertical"]["saves"][2]  # stock cannot save to a tag that is there
    text = (tmp_path / "README.md").read_text()
    assert "| vertical | save tag0 |" in text and "| stock | load |" in text


def test_a_measurement_names_the_commit_and_what_differs_from_it_but_for_results(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        names = ["-c", "user.name=me", "-c", "user.email=me@example.com"]
        return subprocess.run(["git", "-C", str(tmp_path), *names, *words], capture_output=True, text=True, check=True).stdout

    code, result = tmp_path / "code.py", tmp_path / "benchmarks" / "row.json"
    result.parent.mkdir()
    assert machine_info._commit(tmp_path) is None
    git("init", "-q")
    assert machine_info._commit(tmp_path) is None
    for path in (code, result):
        path.write_text("first")
    git("add", ".")
    git("commit", "-qm", "first")
    head = git("rev-parse", "HEAD")[:12]
    result.write_text("another")
    assert machine_info._commit(tmp_path) == head
    code.write_text("another")
    assert machine_info._commit(tmp_path) == f"{head}-dirty"


BUSY_CONTENT = {
    "date": "2026-11-24T08:40:00+00:00",
    "model": "gpt_101m",
    "machine": {"num_cores": 2, "cpu": "AMD EPYC"},
    "checkout": {"commit": "abc", "changed": False},
    "stock": "stock_pipelined",
    "micro_batches": 16,
    "tokens": 8,
    "clip": 0.0,
    "rounds": 2,
    "losses_equal": True,
    "step_s": {
        "nothing": {"stock": [9.0, 11.0], "vertical": [2.0, 3.0]},
        "one busy core": {"stock": [14.0, 16.0], "vertical": [5.0, 5.0]},
    },
}


def test_steps_beside_other_work_are_held_against_those_alone() -> None:
    table = report.busy_table(BUSY_CONTENT)
    assert "| nothing | 10.00 | 2.50 | 4.00 | 1.00 | 1.00 |" in table and "equal bit for bit" in table
    assert "| one busy core | 15.00 | 5.00 | 3.00 | 1.50 | 2.00 |" in table
    assert table in report.markdown([], busy=[BUSY_CONTENT])


class NoTrainer:
    """Trains nothing."""

    def __init__(self, *_: object) -> None: ...

    def wait_ready(self) -> None: ...

    def close(self) -> None: ...


def test_a_row_beside_other_work_names_the_checkout_that_trained_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder's own package is the one that is installed: a row of 8b134c2 said "c81cdc9110ca-dirty" of it."""
    installed = {"torch": "2.13.0", "ds-vertical": "0.0.9", "commit": "c81cdc9110ca-dirty", "python": "3.11.7"}
    monkeypatch.setattr(machine_info, "versions", lambda: dict(installed))
    monkeypatch.setattr(inturn, "Trainer", NoTrainer)
    monkeypatch.setattr(busy, "measure", lambda *_: {key: BUSY_CONTENT[key] for key in ("step_s", "losses_equal")})
    monkeypatch.setattr(run, "write_table", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["busy.py", "--benchmarks", str(tmp_path), "--folder", str(tmp_path / "ssd")])
    assert busy.main() == 0
    (path,) = (tmp_path / "busy").iterdir()
    content = json.loads(path.read_text())
    assert content["versions"] == {"torch": "2.13.0", "python": "3.11.7"} and "c81cdc9" not in path.read_text()
    assert content["checkout"] == commits.describe(ROOT) and content["step_s"] == BUSY_CONTENT["step_s"]
    assert content["checkout"]["commit"] in report.busy_table(content) and str(tmp_path) not in path.read_text()


def test_what_settings_gain_is_the_median_of_the_ratios_within_the_turns() -> None:
    """The machine is three times as slow in the last turn: no ratio sees it, the medians of the seconds do."""

    def answer(step_s: float, read_bytes: int, loss: str = "0x1p+2") -> dict[str, Any]:
        return {"step_s": step_s, "read_bytes": read_bytes, "write_bytes": 100, "loss": loss}

    turns = [{"without": answer(2.0 * slow, 1000), "with": answer(1.5 * slow, 900)} for slow in (1.0, 1.0, 3.0)]
    rounds = [{"warm_up": {arm: [answer(9.0, 5)] for arm in ("without", "with")}, "turns": turns}]
    found = settings.summary(rounds, ["without", "with"])
    assert found["median_ratio"]["with"] == {"step_s": 0.75, "read_bytes": 0.9, "write_bytes": 1.0}
    assert found["median"]["without"]["step_s"] == 2.0 and found["losses_equal"]
    turns[1]["with"]["loss"] = "0x1.0000000000001p+2"
    assert not settings.summary(rounds, ["without", "with"])["losses_equal"]


@pytest.mark.parametrize("arms", [["--arm", "one"], ["--arm", "one", "--arm", "one", "overlap=false"]])
def test_settings_need_two_arms_of_different_names(arms: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.main(["name", *arms])
    assert "write two or more, each with a name of its own" in capsys.readouterr().err


def test_the_arms_of_the_example_differ_in_state_that_is_read_ahead() -> None:
    """Null is 0 where `host_memory_bytes` is not written, which the configuration has not."""
    assert settings.__doc__ is not None
    lines = re.findall(r"--arm (\w+) (.*)", settings.__doc__.partition("[--clip")[0].replace(" --arm", "\n --arm"))
    options = argparse.Namespace(config=ROOT / "configs" / "gpt_101m_cpu.json", micro_batches=16, clip=1.0)
    arms = {name: settings.config_of(words.split(), options)["vertical_schedule"] for name, words in lines}
    assert [*arms] == ["without", "with"] and arms["without"]["optimizer_read_ahead_bytes"] == 0
    assert arms["with"]["optimizer_read_ahead_bytes"] is None and arms["with"]["host_memory_bytes"] > 10**9


@pytest.mark.slow
def test_settings_step_in_turn_and_move_the_bytes_that_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: dict[str, Any] = {}
    monkeypatch.setattr(settings.portable, "write", lambda _, content, *__: recorded.update(content))
    small = ["--model", "gpt_13m", "--config", str(ROOT / "configs" / "gpt_13m_cpu.json"), "--micro-batches", "2"]
    wanted = ["--rounds", "1", "--turns", "2", "--warm-up", "1", "--folder", str(tmp_path)]
    arms = ["--arm", "vertical", "--arm", "horizontal", 'order="horizontal"', "zero_optimization.sub_group_size=1000000"]
    assert settings.main(["name", *small, *wanted, *arms]) == 0
    assert recorded["median_ratio"]["horizontal"]["read_bytes"] > 1.05
    assert recorded["configs"]["horizontal"]["zero_optimization"]["sub_group_size"] == 1_000_000
    assert recorded["configs"]["horizontal"]["vertical_schedule"]["order"] == "horizontal"


@pytest.mark.slow
def test_two_checkouts_step_in_turn(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    small = ["--model", "gpt_13m", "--config", str(ROOT / "configs" / "gpt_13m_cpu.json"), "--micro-batches", "2"]
    wanted = ["--rounds", "2", "--pairs", "3", "--warm-up", "1", "--busy", "1", "--folder", str(tmp_path), "--out", str(out)]
    assert commits.main([str(ROOT), "HEAD", *small, *wanted]) == 0
    found = json.loads(out.read_text())
    assert [[pair["order"] for pair in each["pairs"]] for each in found["rounds"]] == [["AB", "BA", "AB"]] * 2
    pairs = [pair for each in found["rounds"] for pair in each["pairs"]]
    assert all(pair["ratio"] == pair["B"] / pair["A"] for pair in pairs)
    assert found["median_ratio"] == statistics.median(pair["ratio"] for pair in pairs)
    assert found["losses_equal"] and found["busy"] == 1 and found["micro_batches"] == 2
    assert found["commits"]["A"]["commit"] == found["commits"]["B"]["commit"] and not found["commits"]["B"]["changed"]
    assert not [text for text in (str(ROOT), str(tmp_path)) if text in out.read_text()]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    worktrees = subprocess.run(["git", "-C", str(ROOT), "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in worktrees


def turn_of(order: list[str], **answers: dict[str, Any]) -> dict[str, Any]:
    return {"order": order, **answers}


def test_a_loops_cost_is_the_median_of_the_ratios_within_the_turns() -> None:
    """The machine is twice as slow in the second turn: no ratio sees it, the medians of the seconds do."""
    loops = {"train_batch": 2.0, "trainer": 2.02, "three_calls": 2.06, "accelerate": 2.08}
    turns = [
        turn_of([*loops], **{name: {"step_s": seconds * speed, "loss": (5.0).hex()} for name, seconds in loops.items()})
        for speed in (1, 2, 1.5)
    ]
    turns[0]["trainer"]["loss"] = (5.5).hex()
    found = bridges.summary("overhead", [{"turns": turns[:2]}, {"turns": turns[2:]}])
    assert found["median"]["train_batch"] == 3.0 and found["losses_differ_by"] == pytest.approx(0.1)
    assert found["median_ratio"] == pytest.approx({"trainer": 1.01, "three_calls": 1.03, "accelerate": 1.04})
    reads = [{"trainer": {"read_bytes": 184e6, "loss": "0x1p0"}, "stock trainer": {"read_bytes": 1e9, "loss": "0x1p0"}}]
    assert bridges.summary("reads", [{"turns": reads}])["median_ratio"] == {"trainer": 0.184}


@pytest.mark.slow
@pytest.mark.parametrize("figure", bridges.CONTESTANTS)
def test_loops_that_stay_as_they_are_step_in_turn(figure: str, tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "gpt_13m_cpu.json")
    small = ["--model", "gpt_13m", "--config", config, "--stock-config", config, "--micro-batches", "2"]
    words = ["--rounds", "1", "--turns", "2", "--warm-up", "1", "--folder", str(tmp_path / "ssd")]
    assert bridges.main(["--figure", figure, *small, *words, "--benchmarks", str(tmp_path)]) == 0
    (path,) = (tmp_path / "bridges").iterdir()
    content = json.loads(path.read_text())
    names = {each.name for each in bridges.CONTESTANTS[figure]}
    (found,) = content["rounds"]
    assert {*content["median"]} == names and all(names < turn.keys() for turn in found["turns"])
    assert found["turns"][0]["order"] != found["turns"][1]["order"]
    assert content.get("losses_differ_by", 0) < 1e-3
    ratios = content["median_ratio"]
    if figure == "reads":  # at M = 2: half of stock's
        assert 0.3 < ratios["trainer"] < 0.7
    if figure == "evaluation":
        assert ratios["trainer"] == pytest.approx(1, abs=0.05)
    assert "vertical_schedule" not in content["configs"]["stock"] and "vertical_schedule" in content["configs"]["vertical"]
    assert str(tmp_path) not in path.read_text() and f"| over {content['divided_by']}" in (tmp_path / "README.md").read_text()
    assert not [*(tmp_path / "ssd").iterdir()], "files were left on the SSD"


KEPT_ARMS = {"none": (10.0, 10.0), "plan": (8.2, 8.0), "share 1": (8.0, 8.5)}  # measured, predicted seconds


def kept_row(change: dict[str, Any], losses: dict[str, float]) -> tuple[kept.Row, dict[str, Any]]:
    """A row's summary: the machine is twice as slow in the second turn, which no ratio sees."""
    row = replace(kept.ROWS[2], **change)
    steps = {arm: {"loss": losses.get(arm, 5.0).hex(), "step_s": seconds} for arm, (seconds, _) in KEPT_ARMS.items()}
    turns = [
        turn_of([*steps], **{arm: step | {"step_s": speed * step["step_s"]} for arm, step in steps.items()})
        for speed in (1, 2, 1.5)
    ]
    warm_up = {arm: [{"loss": (6.0).hex(), "step_s": 20.0}] for arm in steps}
    rounds = [{"warm_up": warm_up, "turns": turns[:2]}, {"warm_up": warm_up, "turns": turns[2:]}]
    planned = {"keep": "everything", "keep_device": "ssd", "keep_share": 0.75}
    return row, kept.summary(row, rounds, {arm: each for arm, (_, each) in KEPT_ARMS.items()}, planned)


def test_what_is_kept_is_held_against_none_within_the_turns_and_against_what_is_required() -> None:
    row, found = kept_row({}, {})
    assert found["median_s"]["none"] == 15.0 and found["losses_equal"]
    assert found["median_ratio"] == pytest.approx({"none": 1.0, "plan": 0.82, "share 1": 0.8})
    assert found["predicted_ratio"] == pytest.approx({"none": 1.0, "plan": 0.8, "share 1": 0.85})
    required = {each["what"]: (each["value"], each["met"]) for each in found["required"]}
    assert required["plan over none"] == (pytest.approx(0.82), True)
    assert required["plan over the best share"] == (pytest.approx(1.025), True)
    assert required["predicted over measured, none"] == (pytest.approx(2 / 3), False)
    assert not kept_row({}, {"plan": 5.5})[1]["losses_equal"]
    control = {each["what"]: each["met"] for each in kept_row({"most": {}, "shares": ()}, {})[1]["required"]}
    assert not control["plan over none"] and not control["the plan keeps nothing"]
    config = {"vertical_schedule": {"activations": {"keep": "everything", "keep_device": "ssd", "keep_share": 0.75}}}
    content = {key: BUSY_CONTENT[key] for key in ("date", "machine", "checkout")} | found
    content |= {"micro_batches": 6, "tokens": 512, "host_memory_bytes": None, "ssd_limit": CONTENT["ssd_limit"]}
    content |= {"row": row.name, "configs": dict.fromkeys(KEPT_ARMS, config)}
    table = report.kept_table([content])
    cells = "| 6 | 512 | 300/500 MB/s | - | plan | everything, 75% on ssd | 12.30 | 0.820 | 0.88 | 0.800 | 0.65 | equal |"
    assert cells in table
    chosen = {"plan": {"keep": "products", "keep_device": "device", "keep_share": 0.5}}
    assert "| plan | products, 50% on device | 12.30 |" in report.kept_table([content | {"chosen": chosen}])
    part = {"plan": {**chosen["plan"], "keep_outputs": 2}}
    assert "| plan | products (2 a block), 50% on device | 12.30 |" in report.kept_table([content | {"chosen": part}])


def test_what_a_run_with_the_default_has_chosen_is_read_from_its_log() -> None:
    """The line that the engine prints, and the one of a run that has nothing to choose."""
    told = describe_keeping(ActivationSettings(None, 0.0, 0.0, "everything", Tier.SSD, 0.75, 0.25))
    found = kept.chosen_in(f"ds_vertical: a line\nds_vertical: vertical_schedule.{told} (null: planned (so), 5% less)\n")
    assert found["activations"] == {
        "keep": "everything",
        "keep_device": "ssd",
        "keep_share": 0.75,
        "keep_host_share": 0.25,
    }
    assert found["reason"] == "planned (so), 5% less"
    told = describe_keeping(ActivationSettings(None, 0.0, 0.0, "products", Tier.SSD, 1.0, 0.0, 2))
    part = {"keep": "products", "keep_device": "ssd", "keep_share": 1.0, "keep_outputs": 2}
    assert kept.chosen_in(f"vertical_schedule.{told} (null: why)")["activations"] == part
    for policy, keys in (("none", {"keep": "none"}), ("free", {"keep": "free", "keep_share": 1.0})):
        told = describe_keeping(ActivationSettings(None, 0.0, 0.0, policy))
        assert kept.chosen_in(f"vertical_schedule.{told} (null: why)")["activations"] == keys
    settled = kept.chosen_in("activations (default; keep null: none: plans are made for the vertical order alone)")
    assert settled == {"activations": kept.NOTHING, "reason": "plans are made for the vertical order alone"}
    with pytest.raises(ConfigError, match="null: the log does not say"):
        kept.chosen_in("keep null: chosen behind the first step, which measures what it would save")
    row, _ = kept_row({}, {})
    ratios = {"none": 1.0, "plan": 0.82, "share 1": 0.8, "null": 0.5}  # null may keep in memory, where the row's plan may not
    content = {"median_ratio": ratios, "predicted_over_measured": {}, "plan_keeps_nothing": False}
    assert {each["what"]: each["met"] for each in kept._required(row, content)}["plan over the best share"]


def test_a_row_with_keys_that_the_build_lacks_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = kept.ROWS[2]
    assert row.name == "m6_s512_300_500_on_ssd" and len({each.name for each in kept.ROWS}) == len(kept.ROWS)
    with pytest.raises(ConfigError, match=r"m6_s512_300_500_on_ssd: left out: .*activations\.keep_nothing is no key"):
        kept.refuse_unknown(row, ["keep", "keep_nothing"])
    for keeps in ({"keep": "none"}, {"keep": "free"}, {"keep": "products", "keep_device": "ssd"}):
        config = kept.config_of(row, keeps, argparse.Namespace(config=ROOT / "configs" / "gpt_101m_cpu.json"))
        section = config["vertical_schedule"]
        assert config["gradient_accumulation_steps"] == 6 and section["activations"] == keeps
        assert (section["prefetch_layers"], section["optimizer_delay"]) == (kept.WINDOW, kept.DELAY)
    assert kept.main(["--list", "--rounds", "1", "--turns", "3"]) == 0
    minutes = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(minutes) == len(kept.ROWS) and sum(minutes) < 26


@pytest.mark.slow
def test_what_is_kept_is_measured_in_turn(tmp_path: Path) -> None:
    """A real row with a small model; its plan is made from the rates of a recorded machine."""
    words = ["--model", "gpt_13m", "--config", str(ROOT / "configs" / "gpt_13m_cpu.json"), "--folder", str(tmp_path / "ssd")]
    words += ["--machine", str(ROOT / "tests" / "recorded" / "ab" / "limits.json"), "--benchmarks", str(tmp_path)]
    assert kept.main(["--only", "m4_s512", "--rounds", "1", "--turns", "2", "--warm-up", "1", *words]) == 0
    (path,) = (tmp_path / "kept").iterdir()
    content = json.loads(path.read_text())
    assert content["losses_equal"] and {*content["median_s"]} == {"none", "plan", "free", "null"}
    orders = [turn["order"] for turn in content["rounds"][0]["turns"]]
    assert orders == [["none", "plan", "free", "null"], ["plan", "free", "null", "none"]]
    assert content["configs"]["free"]["vertical_schedule"]["activations"] == {"keep": "free"}
    assert content["configs"]["null"]["vertical_schedule"]["activations"] == {"keep": None}
    assert content["chosen"]["null"]["keep"] in ("none", "free", "products", "everything")
    assert content["rounds"][0]["chosen"]["null"]["reason"].startswith("planned from the limits of ")
    assert all(content["predicted_s"].values()) and str(tmp_path) not in path.read_text()
    assert "| 4 | 512 | full | - | free | free |" in (tmp_path / "README.md").read_text()
    assert not [*(tmp_path / "ssd").iterdir()], "files were left on the SSD"


# ------------------------------------------------------------------------------- what is recorded, and what is made from it

RECORDED = [*(ROOT / "benchmarks").rglob("*.json"), *(ROOT / "tests" / "recorded").rglob("*.json*")]


def test_a_rank_whose_turn_it_is_not_takes_nothing_of_the_cores(tmp_path: Path) -> None:
    pipe = steps.turns_path(tmp_path, 0)
    os.mkfifo(pipe)
    found: list[tuple[list[int], float]] = []  # the steps that the rank takes, and its seconds of a core
    waiting = threading.Thread(target=lambda: found.append((list(steps.told(pipe)), time.thread_time())))
    writer = os.open(pipe, os.O_RDWR)
    waiting.start()
    for word in (steps.TURN, steps.TURN, steps.END):
        time.sleep(0.4)
        os.write(writer, f"{word}\n".encode())
    waiting.join(10)
    os.close(writer)
    assert found[0][0] == [1, 2] and found[0][1] < 0.01  # a look every 5 ms took 0.03


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_record_has_a_path_of_one_machine(path: Path) -> None:
    assert portable.machine_paths(path.read_text()) == []


def test_a_record_names_folders_of_this_repository(tmp_path: Path) -> None:
    runs = tmp_path / "elsewhere"
    words = ["--out", str(runs / "m16"), "--config", str(ROOT / "configs" / "a.json"), "/home/someone/model", "/ssd/data"]
    content = {"command": words, "nvme_path": "/tmp/ds_vertical/20261122-1335-vm-31399d13", "twice": {"at": "/tmp/ds_vertical"}}
    portable.write(tmp_path / "new" / "record.json", content, runs, "bench")
    assert json.loads((tmp_path / "new" / "record.json").read_text()) == {
        "command": ["--out", "runs/bench/m16", "--config", "configs/a.json", ".../model", "/ssd/data"],
        "nvme_path": "/tmp/ds_vertical",
        "twice": {"at": "/tmp/ds_vertical"},
    }
    assert portable.machine_paths("at /root/x, /work/main and /tmp/ds_vertical/run; not a/tmp/b or ~/.cache/tmp/c") == [
        "/root/x,",
        "/work/main",
        "/tmp/ds_vertical/run;",
    ]


def test_the_ssd_of_records_is_that_of_the_configurations() -> None:
    for path in (ROOT / "configs").glob("*.json"):
        zero = json.loads(path.read_text())["zero_optimization"]
        assert {zero[key]["nvme_path"] for key in ("offload_param", "offload_optimizer")} == {portable.SSD}


def test_the_chart_and_the_tables_are_those_of_the_records(tmp_path: Path) -> None:
    found = report.results(chart.RECORDS)
    shown = chart.points(found)
    assert list(shown) == [4, 8, 16, 32]
    assert chart.CHART.read_text() == chart.svg(shown), "run: python benchmarks/chart.py --write"
    assert chart.PAGE.read_text() == chart.replaced(chart.PAGE.read_text(), found), "run: python benchmarks/chart.py --write"
    picture = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("!["))
    ends = [f"{chart.seconds(shown, arm)[count]:.2f} s" for arm in ("stock", "vertical") for count in (4, 32)]
    assert all(each in picture for each in ends), "README's words for the chart have other figures than the records"
    for folder in ("ab", "gains", "saves", "busy", "bridges", "kept"):
        (tmp_path / folder).symlink_to(ROOT / "benchmarks" / folder)
    run.write_table(tmp_path / "ab")
    assert (tmp_path / "README.md").read_text() == (ROOT / "benchmarks" / "README.md").read_text(), "run.py --table"
