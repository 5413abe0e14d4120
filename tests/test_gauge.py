"""How fast the host is between two steps: measured while the process that asks is stopped."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ds_vertical import gauge

ASKING = """
import threading, time
from ds_vertical import gauge

def count():
    while True:
        stamps.append(time.monotonic())
        time.sleep(0.02)

stamps = []
threading.Thread(target=count, daemon=True).start()
time.sleep(0.5)
seconds = gauge.measure_between_steps(8, "float32", 1)
time.sleep(0.5)
pauses = [after - before for before, after in zip(stamps, stamps[1:])]
print(seconds, max(pauses))
"""


def test_the_process_that_asks_stands_still_meanwhile() -> None:
    with gauge.serving() as path:
        for _ in range(2):
            command = [sys.executable, "-c", ASKING]
            env = os.environ | {gauge.VARIABLE: path}
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
            assert done.returncode == 0, done.stderr
            seconds, pause = map(float, done.stdout.split())
            assert 1e-5 < seconds < 1 and pause >= 0.9


def test_nobody_is_asked_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(gauge.VARIABLE, raising=False)
    assert gauge.measure_between_steps(8, "float32", 1) is None


def test_more_work_takes_longer() -> None:
    few, many = gauge.Gauge(1, "float32"), gauge.Gauge(512, "float32")
    assert min(many.sample() for _ in range(5)) > 2 * min(few.sample() for _ in range(5))


def test_the_measuring_process_ends_with_the_block() -> None:
    with gauge.serving() as path:
        assert subprocess.run(["pgrep", "-f", path], capture_output=True).stdout
    assert not subprocess.run(["pgrep", "-f", path], capture_output=True).stdout
    assert not os.path.exists(path)
