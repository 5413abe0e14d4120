"""How fast the host is between two steps: measured while the process that asks is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from places import ROOT

from ds_vertical.cli.bench import host_speed_server
from ds_vertical.cli.bench.block_timer import BlockBatch, BlockTimer
from ds_vertical.engine import metrics

MODEL = ROOT / "configs" / "models" / "gpt_13m.json"

ASKING = """
import json, sys, threading, time
from ds_vertical.engine import metrics

def count():
    while True:
        stamps.append(time.monotonic())
        time.sleep(0.02)

stamps = []
threading.Thread(target=count, daemon=True).start()
for _ in range(int(sys.argv[2])):
    stamps.clear()
    time.sleep(0.5)
    seconds = metrics.measure_between_steps(json.loads(sys.argv[1]), {"tokens": 8, "sequences": 1, "dtype": "fp32"}, 1)
    time.sleep(0.5)
    pauses = [after - before for before, after in zip(stamps, stamps[1:])]
    print(seconds, max(pauses))
"""


def test_the_process_that_asks_stands_still_meanwhile() -> None:
    with host_speed_server.serving() as path:
        command = [sys.executable, "-c", ASKING, MODEL.read_text(), "2"]
        env = os.environ | {metrics.VARIABLE: path}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        found = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
        assert len(found) == 2
        for seconds, pause in found:
            assert 1e-5 < seconds < 1 and pause >= 0.9  # a second of its layer, in its absence


def test_nobody_is_asked_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(metrics.VARIABLE, raising=False)
    assert metrics.measure_between_steps(json.loads(MODEL.read_text()), asdict(BlockBatch(8, 1, "fp32")), 1) is None


def test_a_model_without_a_configuration_is_not_gauged() -> None:
    def asks(*_: object) -> None:
        raise AssertionError("asked for a model that cannot be built")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(metrics.VARIABLE, "/nobody")
        patch.setattr(metrics.socket, "socket", asks)
        assert metrics.measure_between_steps(None, asdict(BlockBatch(8, 1, "fp32")), 1) is None
        with pytest.raises(AssertionError, match="asked"):
            metrics.measure_between_steps({}, asdict(BlockBatch(8, 1, "fp32")), 1)


def test_a_stopped_process_goes_on_when_the_one_that_measures_is_killed() -> None:
    with host_speed_server.serving() as path:
        env = os.environ | {metrics.VARIABLE: path}
        command = [sys.executable, "-c", ASKING, MODEL.read_text(), "1"]
        asking = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        status = Path("/proc", str(asking.pid), "stat")
        end = time.monotonic() + 60
        while status.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < end, "was never stopped"
            time.sleep(0.01)
        (keeper,) = map(int, subprocess.run(["pgrep", "-f", path], capture_output=True, text=True).stdout.split())
        os.kill(keeper, signal.SIGKILL)
        try:
            out, _ = asking.communicate(timeout=60)
        finally:
            asking.kill()
    assert asking.returncode == 0 and out.startswith("None ")


def test_more_work_takes_longer() -> None:
    few, many = (BlockTimer(MODEL, BlockBatch(tokens, 1, "fp32"), "cpu").block_s(0.2) for tokens in (1, 256))
    assert many > 2 * few


def test_the_measuring_process_ends_with_the_block() -> None:
    with host_speed_server.serving() as path:
        assert subprocess.run(["pgrep", "-f", path], capture_output=True).stdout
    assert not subprocess.run(["pgrep", "-f", path], capture_output=True).stdout
    assert not os.path.exists(path)
