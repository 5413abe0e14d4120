"""Errors and interrupts at awkward moments of the optimizer's step, and a checkpoint loaded while a step is due."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from cutting import chosen, recorded
from deepspeed.utils import safe_get_full_grad
from harness import base_config, contents, differing, running, small_buffers
from late import LateSteps
from models import MixerModel, token_batches
from places import SUPPORT

from ds_vertical.compat import zero_optimizer
from ds_vertical.compat.ops.load import new_disk_queue
from ds_vertical.engine.zero3.step_driver import StepPhase
from ds_vertical.interrupts import AGAIN_S, Changed, LaidAside, deferred, num_open, num_shields, take_back
from ds_vertical.io.ticket import Ticket
from ds_vertical.offload.grad_accumulator import GradientStore, ParamFacts
from ds_vertical.offload.stepper import Stepper

BUILD = partial(MixerModel, 3, 512)
STEPS = [list(step) for step in token_batches(4, 2)]


def on_ssd(folder: Path, clip: float) -> dict[str, Any]:
    return small_buffers(base_config(folder, num_micro_batches=2, dtype="fp32", clip=clip, section={"seed": 3}), 600_000)


def assert_torn(engine: Any, save: Callable[[], Any]) -> None:
    """It can be neither trained on nor saved, and says so."""
    for use in (lambda: engine.train_batch(iter(STEPS[1])), save):
        with pytest.raises(Exception, match="the live state is torn"):
            use()


@pytest.mark.parametrize("persistence", [0, None])
def test_a_checkpoint_loaded_while_a_step_is_due_is_the_checkpoint(tmp_path: Path, persistence: int | None) -> None:
    config = base_config(tmp_path, num_micro_batches=2, dtype="fp32", params="cpu", optimizer="cpu", persistence=persistence)
    with running(config, BUILD, vertical=True) as (engine, model):
        engine.train_batch(iter(STEPS[0]))
        engine.save_checkpoint(str(tmp_path / "saved"))
        saved = contents(engine, model)
        engine.train_batch(iter(STEPS[1]))
        assert engine.optimizer.driver.backlog.pending
        engine.load_checkpoint(str(tmp_path / "saved"))
        assert not differing(saved, contents(engine, model))
        engine.train_batch(iter(STEPS[1]))
        assert differing(saved, contents(engine, model))


def test_a_step_interrupted_after_its_norm_counts_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes ahead of COMMIT: the norm has made the early parts count."""
    with running(on_ssd(tmp_path / "a", 0.0), BUILD, vertical=True) as (engine, model):
        for step in STEPS[:2]:
            engine.train_batch(iter(step))
        expected = contents(engine, model)
    with running(on_ssd(tmp_path / "b", 0.0), BUILD, vertical=True) as (engine, model):
        engine.train_batch(iter(STEPS[0]))
        conclude = engine.optimizer.driver.conclude_early

        def interrupted() -> None:
            assert engine.optimizer.driver.phase is StepPhase.COMMITTING
            monkeypatch.setattr(engine.optimizer.driver, "conclude_early", conclude)
            raise KeyboardInterrupt

        monkeypatch.setattr(engine.optimizer.driver, "conclude_early", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.train_batch(iter(STEPS[1]))
        assert not differing(expected, contents(engine, model))


@pytest.mark.parametrize("place", ["counting", "parameters"])
def test_an_interrupt_while_a_step_is_made_to_count_tears_the_state_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Some chunks have been counted, or the masters count already and the parameters do not yet."""
    with running(on_ssd(tmp_path, 0.0), BUILD, vertical=True) as (engine, _):
        engine.train_batch(iter(STEPS[0]))
        moments, asked = zero_optimizer.moments, []

        def interrupted(*arguments: Any) -> Any:
            asked.append(arguments)
            if place == "parameters" or (engine.optimizer.driver.phase.counts and len(asked) % 3 == 0):
                raise KeyboardInterrupt
            return moments(*arguments)

        with monkeypatch.context() as patch:
            if place == "parameters":
                patch.setattr(engine.param_store.updates, "commit", interrupted)
            else:
                patch.setattr(zero_optimizer, "moments", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.train_batch(iter(STEPS[1]))
        assert_torn(engine, lambda: engine.save_checkpoint(str(tmp_path / "out")))
        assert not (tmp_path / "out").exists()


def test_an_interrupt_while_a_step_is_issued_tears_the_state_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(on_ssd(tmp_path, 1.0), BUILD, vertical=True) as (engine, _):
        engine.train_batch(iter(STEPS[0]))

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Stepper, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.train_batch(iter(STEPS[1]))
        assert_torn(engine, lambda: engine.save_16bit_model(str(tmp_path / "out")))


def test_a_flush_interrupted_in_its_wait_leaves_the_step_to_the_next_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(folder: Path) -> dict[str, Any]:
        section = {"optimizer_delay": 1.0, "seed": 5}
        return small_buffers(base_config(folder, num_micro_batches=2, dtype="fp32", clip=0.05, section=section), 600_000)

    build = partial(MixerModel, 4, 512)
    with running(config(tmp_path / "a"), build, vertical=True) as (engine, model):
        losses = [engine.train_batch(iter(step)).item() for step in STEPS[:2]]
        expected = contents(engine, model)
    with running(config(tmp_path / "b"), build, vertical=True) as (engine, model):
        LateSteps(engine)
        assert engine.train_batch(iter(STEPS[0])).item() == losses[0]
        wait = Ticket.wait

        def interrupted(ticket: Ticket) -> None:
            if ticket.what == "step 2":
                monkeypatch.setattr(Ticket, "wait", wait)
                raise KeyboardInterrupt
            wait(ticket)

        monkeypatch.setattr(Ticket, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.flush()
        assert 2 in engine.optimizer.driver.backlog.pending
        assert engine.train_batch(iter(STEPS[1])).item() == losses[1]
        assert not differing(expected, contents(engine, model))


def test_whether_a_gradient_is_gone_does_not_depend_on_time(tmp_path: Path) -> None:
    """The steps issued ahead are waited for: on several ranks a gradient must be gone on all of them or on none."""

    def gone(model: Any) -> list[bool]:
        found = []
        for block in model.blocks:
            try:
                assert safe_get_full_grad(block.up.weight) is not None
                found.append(False)
            except RuntimeError:
                found.append(True)
        return found

    seen = []
    for late in (True, False):
        config = on_ssd(tmp_path / str(late), 0.05)
        config["vertical_schedule"] |= {"optimizer_delay": 1.0, "optimizer_speculation": False}
        with running(config, partial(MixerModel, 4, 512), vertical=True) as (engine, model):
            if late:
                LateSteps(engine)
            engine.train_batch(iter(STEPS[0]))
            if not late:
                engine.optimizer.pipeline.wait_idle()
            seen.append(gone(model))
    assert seen == [[True, True, False, False]] * 2


class Alarm(Exception):
    """What a handler of SIGALRM raises here, as one for a time limit does."""


@contextlib.contextmanager
def alarm(after_s: float) -> Iterator[None]:
    """SIGALRM `after_s` after the block begins, whose handler raises Alarm; the handler before comes back."""

    def ring(*_: Any) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_is_laid_aside_is_put_back_wherever_that_is_cut() -> None:
    def turn(aside: LaidAside) -> None:
        try:
            aside.lay(0, 0)
        finally:
            aside.put_back()

    undone: list[int] = []
    with Changed(partial(undone.append, 0)), Changed(partial(undone.append, 1)):
        aside = LaidAside()
        with recorded() as found:
            turn(aside)
        cuts = chosen(found)
        assert len(cuts) > 4
        for cut in cuts:
            aside = LaidAside()
            with contextlib.suppress(KeyboardInterrupt), cut:
                turn(aside)
            aside.put_back()
            assert cut.done and num_open() == 2
    assert undone == [1, 0]


@contextlib.contextmanager
def cut_in(code: CodeType, number: int) -> Iterator[list[int]]:
    """KeyboardInterrupt ahead of the `number`-th bytecode that runs of a function; the list says whether it was raised."""
    left = [number]
    raised: list[int] = []

    def local(frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            left[0] -= 1
            if left[0] == 0:
                raised.append(number)
                raise KeyboardInterrupt
        return local

    def begin(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        return local

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        yield raised
    finally:
        sys.settrace(before)


def test_blocks_that_are_laid_aside_are_put_back_once_wherever_that_is_cut() -> None:
    """Ahead of each bytecode: an inner block, which is equal to the outer one."""
    number, was_raised = 0, True
    with deferred(), deferred():
        while was_raised:
            aside, number = LaidAside(), number + 1
            aside.lay(0, 1)
            with contextlib.suppress(KeyboardInterrupt), cut_in(LaidAside.put_back.__code__, number) as raised:
                aside.put_back()
            was_raised = bool(raised)
            aside.put_back()
            assert num_shields() == 2, number
    assert number > 20 and num_shields() == 0


def test_nobody_hears_of_gradients_after_a_check_that_was_cut() -> None:
    """Wherever the end of its block is cut, and although the error is kept, as a debugger does."""
    facts = ParamFacts(torch.nn.Parameter.numel, lambda param: param.dtype)
    store = GradientStore({0: [torch.nn.Parameter(torch.zeros(3))]}, torch.float32, facts)

    end = type(store.heard_by(lambda _: None)).__exit__.__code__
    number, kept, was_raised = 0, [], True
    while was_raised:
        number += 1
        try:
            with cut_in(end, number) as raised, store.heard_by(lambda _: None):
                pass
        except KeyboardInterrupt as error:
            kept.append(error)
        was_raised = bool(raised)
        take_back()
        assert store._heard is None, number
    assert len(kept) == number - 1 > 10


def test_a_signal_in_a_wait_for_the_disk_loses_no_completion(tmp_path: Path) -> None:
    """It comes while the wait is under way, and is obeyed between the answer and its use."""
    num_bytes = 16 << 20
    (tmp_path / "file").write_bytes(os.urandom(num_bytes))
    buffer = torch.empty(num_bytes + 4096, dtype=torch.uint8)
    address = buffer.data_ptr() + -buffer.data_ptr() % 4096
    queue = new_disk_queue({"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False})
    num_interrupted = 0
    for _ in range(40):
        transfer = queue.read(address, num_bytes, tmp_path / "file")
        try:
            with alarm(0.001):
                transfer.wait()
        except Alarm:
            num_interrupted += 1
        assert transfer.wait().num_transferred == num_bytes
    assert num_interrupted > 10, "no wait was interrupted"
    assert queue.num_read_bytes == 40 * num_bytes
    queue.close()


class Sleeper(MixerModel):
    """A model whose forward takes as long as it is told."""

    seconds = 0.0

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            time.sleep(0.05)
        return super().forward(*args, **kwargs)


def test_a_signal_in_the_models_own_code_is_obeyed_there(tmp_path: Path) -> None:
    with running(on_ssd(tmp_path, 0.0), partial(Sleeper, 3, 512), vertical=True) as (engine, model):
        engine.train_batch(iter(STEPS[0]))
        before = contents(engine, model)
        model.seconds, start = 20.0, time.monotonic()
        with pytest.raises(Alarm), alarm(0.3):
            engine.train_batch(iter(STEPS[1]))
        assert time.monotonic() - start < 5
        model.seconds = 0.0
        assert engine.global_steps == 1 and not differing(before, contents(engine, model))
        engine.train_batch(iter(STEPS[1]))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_in_a_backward_waits_for_the_end_of_its_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, a second apart, it does not."""
    with running(on_ssd(tmp_path, 0.0), BUILD, vertical=True) as (engine, model):
        engine.train_batch(iter(STEPS[0]))
        before = contents(engine, model)
        add, sent = engine._gradients.add, []

        def press(times: int, unit: Any) -> None:
            add(unit)
            while len(sent) < times:
                sent.append(time.monotonic())
                signal.raise_signal(signal.SIGINT)
                time.sleep(1.1 if times > 1 else 0)
            sent.append("came back")

        for times in (1, 2):
            sent.clear()
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(engine._gradients, "add", partial(press, times))
                engine.train_batch(iter(STEPS[1]))
            assert ("came back" in sent) == (times == 1)
            assert engine.global_steps == 1 and not differing(before, contents(engine, model))
        engine.train_batch(iter(STEPS[1]))


NUM_SIGNALS = dict.fromkeys(("early", "delayed", "activations", "memory"), 250)  # a thousand
NUM_SIGNALS |= {"stateful": 250, "everything": 250, "first step": 100, "self-check": 100}  # minutes each


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", NUM_SIGNALS)
def test_ctrl_c_at_random_times(tmp_path: Path, kind: str) -> None:
    """None is silent, and none leaves a state that cannot go on."""
    worker, count = SUPPORT / "interrupt_worker.py", NUM_SIGNALS[kind]
    command = [sys.executable, str(worker), str(tmp_path), kind, str(count), "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    print(kind, result)
    assert sum(result["seen"].values()) == count == result["right"], result
    assert not result["wrong"] and not result["torn"], result


def test_a_second_signal_closes_all_blocks_in_which_signals_wait() -> None:
    """What its handler raises may cut the end of the outermost one, and nobody else would close that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with deferred(firmly=True):
            signal.raise_signal(signal.SIGINT)
            assert num_shields() == 1
            time.sleep(AGAIN_S)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert num_shields() == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
