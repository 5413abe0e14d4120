"""The report: what its page holds, what it leaves out and says so, its charts, and the page in a real browser."""

from __future__ import annotations

import base64
import json
import re
import shutil
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import markupsafe
import places
import pytest
from browser import Browser

from ds_vertical.cli.report import command
from ds_vertical.cli.report import summary as findings
from ds_vertical.cli.report.charts import clusters, merged
from ds_vertical.cli.report.colors import ARM_COLORS, FAINT, INK, OTHER, RESOURCE_COLORS, STALL, colour
from ds_vertical.cli.report.run_folder import names, open_folder
from ds_vertical.cli.report.summary import summarize_run
from ds_vertical.schedule.trace import RESOURCES as TRACED
from ds_vertical.schedule.trace import optimizer_overlap, summarize, union

RECORDED = places.RECORDED / "ab"
KEYS = ("timeline", "kinds", "rates", "bound", "memory", "arms", "losses", "overlap")
WITHOUT_CHART = ("arms",)
PNG = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """Tags with attributes, in order, and the text of each section."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._section = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._section = dict(attrs)["id"] or ""

    def handle_data(self, data: str) -> None:
        self.texts[self._section] = f"{self.texts.get(self._section, '')} {data}"

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """(folder, what was said) of the recorded run's report."""
    out = tmp_path_factory.mktemp("report")
    return out, command.write([RECORDED], out)


def page_of(out: Path) -> Page:
    return Page((out / "report.html").read_text())


# ---- the page


def test_every_section_is_there_and_says_something(written: tuple[Path, dict[str, Any]]) -> None:
    found = page_of(written[0])
    assert [attrs["id"] for attrs in found.all("section")] == [f"run1-{key}" for key in KEYS]
    for key in KEYS:
        assert re.search(r"\d\.\d|\d MB", found.texts[f"run1-{key}"]), key
    (run,) = written[1]["runs"]
    assert run["missing"] == [] and set(run["sections"]) == set(KEYS)
    text = (written[0] / "report.html").read_text()
    assert "fetch 0" in text and "COMMIT" in text  # stalls are named by what caused them
    assert "equal bit for bit" in found.texts["run1-losses"]


def test_the_page_needs_nothing_from_outside(written: tuple[Path, dict[str, Any]]) -> None:
    found, text = page_of(written[0]), (written[0] / "report.html").read_text()
    assert found.all("script") == [] and not re.search(r"https?://|url\(|@import", text)
    outward = [attrs[key] for _, attrs in found.tags for key in ("src", "href") if key in attrs]
    assert outward and all(link and link.startswith(("#", "data:")) for link in outward)
    ids = {attrs["id"] for _, attrs in found.tags if "id" in attrs}
    assert {link[1:] for link in outward if link and link.startswith("#")} <= ids


def test_an_ab_json_of_another_shape_is_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(tmp_path, "old", "ab.json")
    ab = json.loads((folder / "ab.json").read_text())
    del ab["arms"]["vertical"]["losses"]
    (folder / "ab.json").write_text(json.dumps(ab))
    assert command.main([str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "lacks 'losses'" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_charts_lie_beside_the_page_and_in_it(written: tuple[Path, dict[str, Any]]) -> None:
    out, told = written
    files = [Path(path) for path in told["charts"]]
    assert [path.stem for path in files] == [key for key in KEYS if key not in WITHOUT_CHART]
    images = [attrs for attrs in page_of(out).all("img")]
    for path, image in zip(files, images, strict=True):
        data, source = path.read_bytes(), image["src"]
        assert source is not None and image["alt"]
        assert data == base64.b64decode(source.removeprefix("data:image/png;base64,")) and data.startswith(PNG)
        width, height = struct.unpack(">II", data[16:24])
        assert width == 1650 and 150 < height < 1500 and len(data) > 5000


def test_figures_are_those_of_the_files(written: tuple[Path, dict[str, Any]]) -> None:
    (run,) = written[1]["runs"]
    ab = json.loads((RECORDED / "ab.json").read_text())
    shown, sections = run["summary"], run["sections"]
    assert shown["stock_s"] == ab["arms"]["stock"]["step_s"] and shown["vertical_s"] == ab["arms"]["vertical"]["step_s"]
    assert shown["speedup"] == pytest.approx(ab["speedup"])
    assert shown["bound_s"] == pytest.approx(ab["yardstick"]["bound_s"]) and shown["busiest"] == ab["yardstick"]["resource"]
    assert shown["step_over_bound"] == pytest.approx(ab["yardstick"]["step_over_bound"])
    assert sections["losses"] == {arm: ab["arms"][arm]["losses"] for arm in ("stock", "vertical")}
    assert sections["arms"]["speedup"] == ab["speedup"]
    found = summarize_run(open_folder(RECORDED), "x")
    step = found.measured
    assert step is not None
    summary = summarize(step)
    idle = sum(reason["seconds"] for reason in sections["timeline"]["measured"])
    assert idle == pytest.approx(summary.step_s - summary.busy_s["compute"])
    rate = findings.measured_rates(step, found)["ssd_read"]
    assert rate.busy_s == pytest.approx(summary.busy_s["ssd_read"])
    assert sum(rate.over_time) * rate.step_s / len(rate.over_time) == pytest.approx(rate.num_bytes)
    assert rate.alone == ab["yardstick"]["limits"]["machine"]["ssd_read_bytes_per_s"]
    taken = findings.overlap_of(step)
    assert taken is not None and taken.share == pytest.approx(optimizer_overlap(step), abs=0.02)
    assert shown["peak_host_bytes"] == ab["arms"]["vertical"]["peak_host_bytes"]


def test_the_step_shown_is_the_middle_one_or_the_one_asked_for() -> None:
    folder = open_folder(RECORDED)
    lengths = {step.step: step.end - step.start for step in folder.timelines()[0].steps}
    middle = summarize_run(folder, "x").measured
    assert middle is not None and middle.step != 1
    later = sorted(length for number, length in lengths.items() if number > 1)
    assert lengths[middle.step] == later[(len(later) - 1) // 2]
    first = summarize_run(folder, "x", 1).measured
    assert first is not None and first.step == 1


def test_names_from_files_are_text_and_nothing_else(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>&\"'"
    folder = copied(tmp_path, evil, "ab.json", "traced.0.trace")
    ab = json.loads((folder / "ab.json").read_text())
    ab["command"], ab["machine"]["cpu"] = ["ds-vertical", evil], evil
    ab["losses_verdict"]["agreement"] = evil
    (folder / "ab.json").write_text(json.dumps(ab))
    for path in folder.rglob("rank0.jsonl"):
        path.write_text(path.read_text().replace('"fetch 0"', json.dumps(evil)))
    command.write([folder], tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    assert str(markupsafe.escape(evil)) in text and "<img src=x" not in text
    assert all(attrs.keys() == {"alt", "src"} for attrs in page_of(tmp_path / "out").all("img"))


# ---- several runs, and what a run does not have


def copied(tmp_path: Path, name: str, *wanted: str) -> Path:
    """A folder with these of the recorded files."""
    folder = tmp_path / name
    folder.mkdir()
    for pattern in wanted:
        for path in RECORDED.glob(pattern):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
    return folder


def test_several_runs_are_compared_in_one_table(tmp_path: Path) -> None:
    bare = copied(tmp_path, "trace only", "traced.0.trace")
    told = command.write([copied(tmp_path, "ab only", "ab.json"), bare], tmp_path / "out")
    found = page_of(tmp_path / "out")
    assert [attrs["id"] for attrs in found.all("section")] == [f"run{run}-{key}" for run in (1, 2) for key in KEYS]
    assert found.texts[""].count("trace only") >= 2  # in the table, and over its sections
    first, second = told["runs"]
    assert first["summary"]["vertical_s"] is not None is not second["summary"]["compute_share"]
    assert first["summary"]["compute_share"] is None is second["summary"]["vertical_s"]
    assert len({Path(path).name for path in told["charts"]}) == len(told["charts"])
    assert any(Path(path).name.startswith("trace-only.run2.") for path in told["charts"])


@pytest.mark.parametrize(
    ("wanted", "without"),
    [
        (("traced.0.trace",), {"bound", "arms", "losses"}),
        (("ab.json",), {"timeline", "kinds", "rates", "memory", "overlap"}),
        (("vertical.0.metrics",), {"timeline", "kinds", "rates", "bound", "memory", "arms", "overlap"}),
        (("traced.0.metrics", "limits.json"), {"kinds", "rates", "arms", "overlap"}),
    ],
)
def test_what_a_run_does_not_have_is_left_out_with_a_line(tmp_path: Path, wanted: tuple[str, ...], without: set[str]) -> None:
    folder = copied(tmp_path, "run", *wanted)
    (run,) = command.write([folder], tmp_path / "out")["runs"]
    found = page_of(tmp_path / "out")
    charts = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert charts.isdisjoint(without)
    shown = set(KEYS) - without - set(WITHOUT_CHART)
    assert charts == shown
    lines = " ".join(run["missing"])
    for key in without:
        assert re.search(r"ds-vertical|DS_VERTICAL", found.texts[f"run1-{key}"]), key
    assert "ds-vertical" in lines


def test_where_the_losses_differ_no_speed_is_shown(tmp_path: Path) -> None:
    folder = copied(tmp_path, "run", "ab.json", "stock.0.metrics")
    ab = json.loads((folder / "ab.json").read_text())
    ab["losses_verdict"]["agreement"], ab["speedup"] = "different", None
    for arm in ab["arms"].values():
        for key in ("step_s", "tokens_per_s", "step_s_by_repeat"):
            del arm[key]
    (folder / "ab.json").write_text(json.dumps(ab))
    (run,) = command.write([folder], tmp_path / "out")["runs"]
    summary = run["summary"]
    assert [summary[name] for name in ("stock_s", "vertical_s", "speedup", "step_over_bound")] == [None] * 4
    assert run["sections"]["bound"]["seconds"] == {} and run["sections"]["arms"]["speedup"] is None
    assert "no speed is shown" in page_of(tmp_path / "out").texts["run1-arms"]


def test_the_limit_of_several_disks_is_told_of_each(tmp_path: Path) -> None:
    folder = copied(tmp_path, "run", "ab.json", "traced.0.metrics", "traced.0.trace")
    ab = json.loads((folder / "ab.json").read_text())
    disks = [{"name": name, "device": device} for name, device in (("vda", "254:0"), ("vdb", "254:16"))]
    for count, told in ((2, "500 MB/s written, each of 2 disks."), (1, "500 MB/s written.")):
        ab["ssd_limit"] = {"read_bytes_per_s": 3e8, "write_bytes_per_s": 5e8, "disks": disks[:count]}
        (folder / "ab.json").write_text(json.dumps(ab))
        command.write([folder], tmp_path / str(count))
        assert f"limited for this run: 300 MB/s read, {told}" in page_of(tmp_path / str(count)).texts["run1-rates"]


def test_what_the_forwards_kept_is_told(tmp_path: Path) -> None:
    folder = copied(tmp_path, "run", "ab.json", "traced.0.metrics", "traced.0.trace")
    account = folder / "traced.0.metrics" / "account.jsonl"
    *before, last = account.read_text().splitlines()
    kept = {"policy": "products", "shares": {"ssd": 1.0}, "cells": {"device": 0, "ssd": 6}, "bytes": {"ssd": 4_500_000}}
    account.write_text("\n".join([*before, json.dumps(json.loads(last) | {"kept": kept})]) + "\n")
    command.write([folder], tmp_path / "out")
    told = 'Kept for the backward in the last step, on rank 0: "products": 6 cells, 4.5 MB on ssd.'
    assert told in page_of(tmp_path / "out").texts["run1-memory"]


def test_two_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [copied(tmp_path / each, "ab", "ab.json") for each in ("a", "b") if (tmp_path / each).mkdir() is None]
    assert names([open_folder(folder) for folder in folders]) == ["a/ab", "b/ab"]


def test_a_loss_that_is_no_number_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(tmp_path, "run", "vertical.0.metrics", "stock.0.metrics")
    for path in folder.glob("*.metrics/rank0.jsonl"):
        *lines, last = path.read_text().splitlines()
        fields = json.loads(last)
        fields["loss"] = "nan"
        path.write_text("\n".join([*lines, json.dumps(fields)]) + "\n")
    assert command.main([str(folder), "--out", str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["runs"][0]["summary"]["last_loss"] == "nan"


# ---- the command


def test_the_command_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(copied(tmp_path, "run", "ab.json")), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert re.search(r"run: step \d.*stock / vertical .*step / bound", said) and "left out: Timeline of a step" in said
    assert f"written: {tmp_path / 'out' / 'report.html'}, and 2 charts" in said


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent", "no such folder; name a folder that"),
        ("empty", "no trace, no step records and no ab.json in it"),
        ("trace", r"rank0.jsonl, line \d+: no record of a trace.*remove the line"),
        ("records", "rank0.jsonl: a line is not a step record.*remove the line"),
        ("account", "account.jsonl: no account of a run.*remove the line"),
        ("ab.json", "ab.json: .*remove the line if the run was killed"),
        ("limits.json", "limits.json: machine.ssd_read_bytes_per_s: missing.*write a file with `ds-vertical limits --out`"),
    ],
)
def test_a_folder_that_does_not_do_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    folder = tmp_path / "run"
    if name == "empty":
        folder.mkdir()
    elif name != "absent":
        shutil.copytree(RECORDED, folder)
        path = {
            "trace": folder / "traced.0.trace" / "rank0.jsonl",
            "records": folder / "vertical.0.metrics" / "rank0.jsonl",
            "account": folder / "traced.0.metrics" / "account.jsonl",
        }.get(name, folder / name)
        path.write_text('{"machine": {}}' if name == "limits.json" else path.read_text()[:-40])
    assert command.main([str(folder), "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and re.search(words, captured.err) and captured.err.count("\n") == 1
    assert captured.err.startswith("ds-vertical report: ") and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--step", "99"], "--step 99: not in .*; write one from 1 to"),
        (["--out", "/proc/nosuch"], "--out /proc/nosuch: cannot write there"),
    ],
)
def test_options_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert command.main([str(RECORDED), *options]) == 2
    captured = capsys.readouterr()
    assert re.search(words, captured.err) and "Traceback" not in captured.err


def test_without_matplotlib_the_command_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert command.main([str(RECORDED), "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'ds-vertical[plot]'" in capsys.readouterr().err


# ---- colours and shapes


def test_no_two_resources_look_alike() -> None:
    assert set(TRACED) <= set(RESOURCE_COLORS) and colour("unheard of") == OTHER
    colours = [*RESOURCE_COLORS.values(), *ARM_COLORS.values(), OTHER, STALL, FAINT]
    assert len(set(colours)) == len(colours) and INK not in RESOURCE_COLORS.values()
    assert all(re.fullmatch("#[0-9A-F]{6}", value) for value in colours)


def test_what_is_drawn_as_one_is_near() -> None:
    assert merged([(3, 4), (0, 1), (1.2, 2), (0.5, 1.1)], 0.15) == [(0, 2), (3, 4)]
    assert merged([(0, 1), (1, 2)], 0.0) == [(0, 2)]
    assert union(merged([(0, 1), (5, 6)], 0.0)) == 2
    points = [(1, 5.0), (2, 0.0), (3, 5.5), (4, 9.0)]
    assert clusters(points, 1.0) == [([2], 0.0), ([1, 3], 5.25), ([4], 9.0)]


# ---- a real browser


@pytest.mark.browser
def test_the_page_works_in_chromium(written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    page = written[0] / "report.html"
    with Browser(tmp_path / "profile") as browser:
        browser.open(page, width=1280)
        images = browser.evaluate("Promise.all([...document.images].map(i => i.decode().then(() => i.naturalWidth)))")
        assert len(images) == len(KEYS) - len(WITHOUT_CHART) and all(width > 0 for width in images)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 1280
        assert browser.evaluate(
            "[...document.querySelectorAll('img, p, h2')].every(e => e.getBoundingClientRect().right <= 1280)"
        )
        shown = "[...document.querySelectorAll('section')].filter(s => s.getBoundingClientRect().height > 40).map(s => s.id)"
        assert browser.evaluate(shown) == [f"run1-{key}" for key in KEYS]
        asked = [event["request"]["url"] for event in browser.told("Network.requestWillBeSent")]
        assert [url for url in asked if not url.startswith("data:")] == [page.resolve().as_uri()]
        assert browser.told("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded") == []
        assert browser.screenshot(1280, 900).startswith(PNG)


@pytest.mark.browser
def test_the_browser_would_tell_of_faults(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text('<div style="width:3000px">x</div><img src="missing.png"><script>console.error("no")</script>')
    with Browser(tmp_path / "profile") as browser:
        browser.open(page, width=1280)
        assert browser.evaluate("document.documentElement.scrollWidth") >= 3000
        assert browser.told("Runtime.consoleAPICalled")
        assert len(browser.told("Network.requestWillBeSent")) == 2
        assert browser.evaluate("document.images[0].naturalWidth") == 0
