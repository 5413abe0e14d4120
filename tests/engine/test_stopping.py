"""SIGTERM and SIGINT: the step under way is left or finished, the checkpoint is that of a run that did not stop, and the exit
status says which."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import failing_worker
import pytest
import torch
from failing_worker import run
from harness import contents, differing, running, start_process_group
from models import MixerModel
from processes import free_port
from resuming import BATCHES, config_in, loaded, model_of, train

from ds_vertical.engine import signals
from ds_vertical.engine.checkpoint import manifest
from ds_vertical.engine.signals import FINISHED, Stopping
from ds_vertical.offload.speculation import StepTiming
from ds_vertical.types import SignalSettings

NUM_STEPS = 4
slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(500)


def signalling(number: signal.Signals) -> Callable[[Any, Any], Any]:
    """A loss function in which this process gets a signal."""

    def loss(outputs: Any, batch: Any) -> Any:
        os.kill(os.getpid(), number)
        return outputs

    return loss


def drawing(step: int) -> Iterator[Any]:
    """A step's micro-batches from a loader that draws from torch's random numbers, as one that shuffles does."""
    for batch in BATCHES[step]:
        torch.rand(())
        yield batch


def train_drawing(engine: Any, steps: range) -> list[float]:
    return [engine.train_batch(drawing(step)).item() for step in steps]


@pytest.mark.parametrize(
    ("section", "number", "status", "num_steps"),
    [
        ({"seed_micro_batches": False}, signal.SIGTERM, 143, 1),
        ({"on_nonfinite": "stop"}, signal.SIGINT, FINISHED, 2),
        pytest.param({}, signal.SIGINT, 130, 1, marks=slow),
        pytest.param({"optimizer_delay": 1.0, "on_nonfinite": "stop"}, signal.SIGTERM, 143, 1, marks=slow),
        pytest.param({"order": "horizontal"}, signal.SIGTERM, 143, 1, marks=slow),
    ],
    ids=str,
)
def test_a_run_that_was_asked_to_stop_goes_on_as_if_it_had_not(
    tmp_path: Path, section: dict[str, Any], number: signal.Signals, status: int, num_steps: int
) -> None:
    """A step in place is finished; every other one is left."""
    made = config_in(tmp_path / "ssd", section=section | {"on_signal": {"save_dir": str(tmp_path / "saved")}})
    with running(made, model_of, vertical=True) as (engine, model):
        losses, expected = train_drawing(engine, range(NUM_STEPS)), contents(engine, model)
    with running(made, model_of, vertical=True) as (engine, model):
        train_drawing(engine, range(1))
        with pytest.raises(SystemExit) as ended:
            engine.train_batch(drawing(1), signalling(number))
        assert ended.value.code == status
    assert manifest.complete_tags(tmp_path / "saved") == [f"global_step{num_steps}"]
    with loaded(made, tmp_path / "saved") as (engine, model):
        assert engine.global_steps == num_steps
        assert train_drawing(engine, range(num_steps, NUM_STEPS)) == losses[num_steps:]
        assert differing(expected, contents(engine, model)) == []


def test_between_two_steps_handlers_of_others_are_called_and_put_back(tmp_path: Path) -> None:
    heard: list[int] = []

    def mine(number: int, frame: Any) -> None:
        heard.append(number)

    before, interrupt = signal.signal(signal.SIGTERM, mine), signal.getsignal(signal.SIGINT)  # a shell's "&" ignores it
    try:
        made = config_in(tmp_path / "ssd", section={"on_signal": {"save_dir": str(tmp_path / "saved"), "tag": "asked"}})
        with running(made, model_of, vertical=True) as (engine, _):
            train(engine, range(1))
            assert signal.getsignal(signal.SIGINT) is not interrupt
            for _ in range(2):  # launchers send it more than once
                os.kill(os.getpid(), signal.SIGTERM)
            assert heard == [signal.SIGTERM] * 2
            with pytest.raises(SystemExit) as ended:
                train(engine, range(1, 2))
            assert (ended.value.code, engine.global_steps) == (143, 1)
        assert (tmp_path / "saved" / "latest").read_text() == "asked"
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGTERM, before)


class NormedModel(MixerModel):
    """Running statistics ahead of the blocks, and among the tensors that are saved."""

    def __init__(self) -> None:
        super().__init__(2, 512)
        self.statistics = torch.nn.BatchNorm1d(512, affine=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.statistics(self.embed(input_ids).detach().flatten(0, 1))
        return super().forward(input_ids, labels)


def test_a_step_that_is_left_has_moved_no_running_statistics(tmp_path: Path) -> None:
    made = config_in(tmp_path / "ssd", section={"on_signal": {"save_dir": str(tmp_path / "saved")}})
    with running(made, NormedModel, vertical=True) as (engine, model):
        train(engine, range(1))
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with pytest.raises(SystemExit):
            engine.train_batch(iter(BATCHES[1]), signalling(signal.SIGTERM))
        assert buffers["statistics.num_batches_tracked"] == 2
        assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
        engine._stopping._number = None  # asked by nobody
        train(engine, range(1, 2))
        assert not any(torch.equal(buffers[name], buffer) for name, buffer in model.statistics.named_buffers("statistics"))


def test_a_signal_before_the_batches_end_is_obeyed_at_their_end(tmp_path: Path) -> None:
    made = config_in(tmp_path / "ssd", section={"on_signal": {"save_dir": str(tmp_path / "saved")}})

    def batches() -> Iterator[Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield from ()

    with running(made, model_of, vertical=True) as (engine, _):
        train(engine, range(1))
        with pytest.raises(SystemExit) as ended:
            engine.train_batch(batches())
        assert ended.value.code == 143
    assert manifest.complete_tags(tmp_path / "saved") == ["global_step1"]


def stopping_in(folder: str) -> Stopping:
    start_process_group()
    made = Stopping(SignalSettings(folder, None), StepTiming(None, None, certain=True, in_files=True))
    made.listen()
    return made


@pytest.fixture
def asked() -> Any:
    """What a signal does beside a step."""
    made = stopping_in("/nowhere")
    yield made
    made.close()


@pytest.mark.parametrize("own", [True, False])
def test_of_two_that_hear_the_first_may_be_closed_first(own: bool) -> None:
    """Its handler is put back by the second, and then stands for what was there before both."""
    heard: list[int] = []
    handler = (lambda number, frame: heard.append(number)) if own else signal.SIG_DFL
    before = signal.signal(signal.SIGTERM, handler)
    try:
        first, second = stopping_in("/first"), stopping_in("/second")
        first.close()
        second.close()
        if own:
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == [signal.SIGTERM]
        else:
            with pytest.raises(SystemExit) as ended:
                os.kill(os.getpid(), signal.SIGTERM)
            assert ended.value.code == 143
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_who_asks_again_is_obeyed_at_once(asked: Stopping, monkeypatch: pytest.MonkeyPatch) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(signals, "SECOND_SIGNAL_S", 0.0)
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_forked_child_ends_at_once(asked: Stopping) -> None:
    """A data loader's worker takes no steps behind which it could end."""
    child = os.fork()
    if child == 0:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# ---- several ranks


def digests(folder: Path, how: str) -> list[str]:
    found = run(folder, how, 1)
    assert found.codes == [0, 0], found.logs
    return [line for log in found.logs for line in log.splitlines() if line.startswith("digest ")]


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_has_all_leave_the_step(tmp_path: Path, rank: int) -> None:
    """And go on with the bits of a run that was not asked."""
    found = run(tmp_path, "signal", rank)
    assert found.codes == [128 + signal.SIGTERM] * 2, found.logs
    assert manifest.complete_tags(tmp_path / "saved") == ["global_step1"]
    assert list((tmp_path / "swap").iterdir()) == []
    expected = digests(tmp_path, "whole")
    assert len(expected) == 2 and digests(tmp_path, "resume") == expected


@slow
def test_a_rank_that_fails_in_a_step_that_is_left_ends_both_without_a_checkpoint(tmp_path: Path) -> None:
    found = run(tmp_path, "asked", 1)
    assert found.codes == [1, 1], found.logs
    assert "ValueError: no luck here" in found.logs[1]
    assert "rank 1: ValueError: no luck here" in found.logs[0]
    assert found.seconds < 60 and not (tmp_path / "saved").exists()
    assert list((tmp_path / "swap").iterdir()) == []


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_steps_in_place_are_finished_by_all_ranks(tmp_path: Path, rank: int) -> None:
    found = run(tmp_path, "finish", rank)
    assert found.codes == [FINISHED, FINISHED], found.logs
    assert manifest.complete_tags(tmp_path / "saved") == ["global_step2"]
    assert list((tmp_path / "swap").iterdir()) == []


@slow
def test_deepspeeds_launcher_ends_a_run_with_its_checkpoint(tmp_path: Path) -> None:
    """It passes SIGTERM on to one rank after the other, each with 30 s to end."""
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    launch = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}", f"--master_port={free_port()}"]
    command = [*launch, "--no_local_rank", failing_worker.__file__, str(tmp_path), "loop", "0"]
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "failing").exists() and launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(100)
    finally:
        launcher.kill()
        launcher.wait()
    text = (tmp_path / "log").read_text()
    assert len(manifest.complete_tags(tmp_path / "saved")) == 1, text
    assert f"exit status {128 + signal.SIGTERM}" in text
    assert list((tmp_path / "swap").iterdir()) == [], "a rank was killed"
