"""The benchmarks of held-out losses: a record goes on with what is missing in it, and nothing writes over other runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import acco_loss  # noqa: E402
import quantised_loss  # noqa: E402

LOSSES = [{"step": 0, "loss": 5.5}, {"step": 2, "loss": 5.0}]
RECORDS = sorted((ROOT / "benchmarks" / "acco").glob("*.json"))


def written(path: Path, words: list[str], **changed: Any) -> Path:
    """A record of two runs that these words ask for. `changed`: settings; None: the record does not have them."""
    settings = acco_loss.settings_of(acco_loss.parsed(words)) | changed
    given = {name: value for name, value in settings.items() if value is not None}
    record = {"settings": given, "held_out": {"exact.0": LOSSES, "acco.0": LOSSES}}
    path.write_text(json.dumps(record))
    return path


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    few = ["--steps", "2", "--eval-every", "2", "--micro-batches", "2", "--tokens", "8", "--seeds", "0"]
    return [*few, "--arms", "exact,acco", "--out", str(tmp_path / "record.json")]


def test_a_record_with_all_runs_stays_as_it_is(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "record.json", words)
    before = path.read_bytes()
    assert acco_loss.main(words) == 0
    assert path.read_bytes() == before
    assert '"over_exact": {"exact": {"0": 1.0}, "acco": {"0": 1.0}}' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"lr": 1e-3}, "its runs have lr 0.001, and those asked for have 0.0006; write that record's settings, or --out FILE"),
        ({"warmup_num_steps": 8}, "its runs have warmup_num_steps 8, and those asked for have 2"),
        ({"text": "0123"}, 'its runs have text "0123", and those asked for have "[0-9a-f]+"; write --out FILE'),
        ({"text": None}, 'its runs have a text that it does not say, and those asked for have "[0-9a-f]+"; write --out FILE'),
        ({"more": 1}, "its runs have more 1, and those asked for have null"),
    ],
)
def test_other_runs_are_not_overwritten(tmp_path: Path, words: list[str], changed: dict[str, Any], told: str) -> None:
    path = written(tmp_path / "record.json", words, **changed)
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=told.replace(".", r"\.")):
        acco_loss.main([*words, "--seeds", "0,1"])
    assert path.read_bytes() == before


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_of_the_tree_goes_on_or_is_refused(path: Path, tmp_path: Path) -> None:
    """With the settings that it says; asked for no run that it lacks, the command leaves it as it is."""
    record = json.loads(path.read_text())
    settings, copied = record["settings"], tmp_path / path.name
    copied.write_bytes(path.read_bytes())
    words = ["--model", settings["model"], "--steps", str(settings["steps"]), "--lr", str(settings["lr"])]
    words += ["--schedule", settings["schedule"], "--out", str(copied)]
    words += ["--warm-up", str(settings["warmup_num_steps"])] if "warmup_num_steps" in settings else []
    seeds = sorted({run.partition(".")[2] for run in record["held_out"]})
    asked = [*words, "--arms", "exact,acco", "--seeds", ",".join(seeds)]
    if "text" in settings and settings["text"] == acco_loss.settings_of(acco_loss.parsed(asked))["text"]:
        assert acco_loss.main(asked) in (0, 1)
    else:
        with pytest.raises(SystemExit, match="its runs have .*(text|warmup_num_steps)"):
            acco_loss.main(asked)
    assert copied.read_bytes() == path.read_bytes()


def test_a_run_is_noted_with_its_commit_and_packages() -> None:
    first = acco_loss.noted({"settings": {"steps": 2}}, "exact.0", LOSSES, {"commit": "abc", "changed": False})
    both = acco_loss.noted(first, "acco.0", [*LOSSES[:1], {"step": 2, "loss": 5.2}], {"commit": "def", "changed": True})
    assert both["settings"] == {"steps": 2} and list(both["held_out"]) == ["exact.0", "acco.0"]
    assert [(each["commit"], each["changed"]) for each in both["runs"].values()] == [("abc", False), ("def", True)]
    assert all(each["versions"]["torch"] and each["date"] for each in both["runs"].values())
    assert both["over_exact"]["acco"]["0"] == pytest.approx(1.04) and both["met"] == {"acco": False}


def test_quantised_runs_are_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert quantised_loss.recorded(path, {"steps": 2}) == {}
    path.write_text(json.dumps({"settings": {"steps": 2}, "held_out": {"exact": LOSSES}}))
    assert quantised_loss.recorded(path, {"steps": 2})["held_out"] == {"exact": LOSSES}
    with pytest.raises(SystemExit, match="its runs have steps 2, and those asked for have 3"):
        quantised_loss.recorded(path, {"steps": 3})


SKIPPING = """
import runpy, sys
sys.path[:0] = {paths}
import delayed_steps
from ds_vertical.engine.acco import steps

class Loop(delayed_steps.DelayedLoop):
    number = 0

    def run_schedules(self, bodies, scale_of):
        Loop.number += 1
        if Loop.number != 3:
            return super().run_schedules(bodies, scale_of)
        hook = list(self.engine.module.modules())[-1].register_forward_hook(lambda _, given, out: out * float("nan"))
        try:
            return super().run_schedules(bodies, scale_of)
        finally:
            hook.remove()

    def conclude_prediction(self, counts):
        super().conclude_prediction(counts)
        if self.engine.global_rank == 0:
            print("concluded", Loop.number, counts, self._weights_of.prediction.is_there, flush=True)

steps.HalvesLoop = Loop
sys.argv[0] = str(delayed_steps.TRAIN)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_delayed_step_that_is_skipped_leaves_none_due(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of step 3 is NaN: what it computed with is forgotten, and step 4 computes with what step 2 made."""
    script, config = tmp_path / "skipping.py", tmp_path / "config.json"
    script.write_text(SKIPPING.format(paths=[str(ROOT / "benchmarks"), str(ROOT / "scripts")]))
    monkeypatch.setattr(acco_loss, "NUM_RANKS", 2)
    monkeypatch.setitem(acco_loss.ARMS, "dpu", (acco_loss.ARMS["dpu"][0], script))
    options = acco_loss.parsed([*words, "--steps", "4", "--schedule", "constant"])
    config.write_text(json.dumps(acco_loss.build_config(ROOT / "configs" / "gpt_13m_cpu.json", "dpu", options)))
    (port,) = acco_loss.free_ports(1)
    losses = acco_loss.train(config, tmp_path / "out", "dpu", 0, port, options)
    log = Path(f"{tmp_path / 'out'}.log").read_text()
    concluded = [line.partition("concluded ")[2] for line in log.splitlines() if "concluded " in line]
    assert concluded == ["1 True True", "2 True True", "3 False False", "4 True True"]
    assert [each["step"] for each in losses] == [0, 2, 4] and losses[-1]["loss"] < losses[-2]["loss"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_command_goes_on_with_the_runs_that_are_missing(tmp_path: Path, words: list[str]) -> None:
    path, alone = tmp_path / "record.json", [*words, "--arms", "exact"]
    assert acco_loss.main(alone) == 0
    first = json.loads(path.read_text())
    assert list(first["held_out"]) == ["exact.0"] and first["settings"]["text"]
    assert acco_loss.main(words) in (0, 1)
    both = json.loads(path.read_text())
    assert both["held_out"]["exact.0"] == first["held_out"]["exact.0"] and both["runs"]["exact.0"] == first["runs"]["exact.0"]
    assert [each["step"] for each in both["held_out"]["acco.0"]] == [0, 2]
    assert both["held_out"]["acco.0"][0] == both["held_out"]["exact.0"][0], "before the first step nothing differs"
