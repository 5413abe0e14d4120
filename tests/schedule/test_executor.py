"""The executor over in-memory handlers: what it calls, when it waits, what it says on failure. Then whole steps of a
small model through the handlers that the engine uses, against plain autograd, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from toy import Log, ToyTraining, facts, plain_step, toy_inputs, toy_model

from ds_vertical.errors import ScheduleError
from ds_vertical.io.ticket import Ticket
from ds_vertical.model.micro_batch import Body
from ds_vertical.model.thread_state import ThreadState
from ds_vertical.schedule.events import Event, Op, Schedule, parse_events
from ds_vertical.schedule.executor import Executor
from ds_vertical.schedule.passes import TrainingStep, build_evaluation, build_training

# 2 layers, 2 micro-batches, window 1: written out by hand. Layer 1 stays from its forward to its backward, and layer 0
# too: it comes back within the window.
STEP = (
    "preFETCH preF0 preF1 0FETCH 1FETCH 0F0 0F1 1F0 sufHEAD0 1B0 1F1 sufHEAD1 1B1 1REDUCE 1RELEASE"
    " 0B0 0B1 0REDUCE 0RELEASE preB0 preB1 preREDUCE preRELEASE NORM preSTEP 0STEP 1STEP"
)
# where each fetch is complete: just before the first event that uses the unit
STEP_WITH_WAITS = STEP.replace("preF0", "[preFETCH] preF0").replace(" 0F0", " [0FETCH] 0F0").replace(" 1F0", " [1FETCH] 1F0")


def piece(text: str) -> Schedule:
    """Some events of a step: the executor does not ask for a whole one."""
    return Schedule(2, 2, parse_events(text))


def executed(schedule: Schedule, **options: Any) -> str:
    log = Log()
    Executor(log.handlers(), **options).run(schedule)
    return " ".join(log.lines)


# ---- order and waits


def test_every_event_runs_once_in_order_and_waits_where_its_dependencies_say() -> None:
    assert executed(build_training(TrainingStep(2, 2, window=1))) == STEP_WITH_WAITS


def test_without_overlap_every_issue_is_waited_for_at_once() -> None:
    expected = STEP
    for unit in ("pre", "0", "1"):
        expected = expected.replace(f"{unit}FETCH", f"{unit}FETCH [{unit}FETCH]")
    assert executed(build_training(TrainingStep(2, 2, window=1)), overlap=False) == expected


def test_a_fetch_is_waited_for_once_and_a_second_fetch_of_the_layer_again() -> None:
    text = "preFETCH 0FETCH preF0 preF1 0F0 0F1 0RELEASE 0FETCH 1FETCH 1F0 sufHEAD0 1B0 0B0"
    expected = (
        "preFETCH 0FETCH [preFETCH] preF0 preF1 [0FETCH] 0F0 0F1 0RELEASE 0FETCH 1FETCH [1FETCH] 1F0 sufHEAD0 1B0 [0FETCH] 0B0"
    )
    assert executed(piece(text)) == expected


def test_nothing_is_left_in_flight_at_the_end() -> None:
    lines = executed(piece("preFETCH preF0 0FETCH 1FETCH"))
    assert lines == "preFETCH [preFETCH] preF0 0FETCH 1FETCH [0FETCH] [1FETCH]"


def test_a_ticket_that_is_complete_already_is_not_waited_for_again() -> None:
    waits: list[str] = []
    ticket = Ticket("fetch pre", lambda: waits.append("pre"))

    def fetch(_: Event) -> Ticket:
        ticket.wait()
        return ticket

    Executor({Op.FETCH: fetch, Op.F: lambda event: None}).run(piece("preFETCH preF0"))
    assert waits == ["pre"]
    assert ticket.done


def test_a_schedule_with_a_missing_dependency_runs_nothing() -> None:
    log = Log()
    with pytest.raises(ScheduleError, match="needs the parameters of 0"):
        Executor(log.handlers()).run(piece("preFETCH preF0 0F0"))
    assert log.lines == []


# ---- failures


def test_a_failure_shows_the_events_around_it_what_is_in_flight_and_the_bytes_held() -> None:
    log = Log(fail_at="0F1")
    executor = Executor(log.handlers(), held_bytes=lambda: {"host": 4096, "device": 7})
    with pytest.raises(ArithmeticError, match="no 0F1") as caught:
        executor.run(build_training(TrainingStep(2, 2, window=1)))
    assert caught.value.__notes__ == [
        "ds_vertical schedule, around the failing event:\n"
        "     2  preF1\n"
        "     3  0FETCH\n"
        "     4  1FETCH\n"
        "     5  0F0\n"
        "     6  0F1  <-- here\n"
        "     7  1F0\n"
        "     8  sufHEAD0\n"
        "     9  1B0\n"
        "    10  1F1\n"
        "in flight: fetch 1 (1000 bytes); held: host 4096 bytes, device 7 bytes"
    ]


def test_a_failed_transfer_shows_at_the_event_that_waited_for_it() -> None:
    log = Log(fail_in_wait="1FETCH")
    with pytest.raises(OSError, match="1FETCH broke") as caught:
        Executor(log.handlers()).run(build_training(TrainingStep(2, 2, window=1)))
    (note,) = caught.value.__notes__
    assert "1F0  <-- here" in note
    assert note.endswith("in flight: nothing; held: nothing")
    assert log.lines[-1] == "0F1"


def test_a_transfer_that_fails_after_the_last_event_shows_the_end_of_the_schedule() -> None:
    with pytest.raises(OSError, match="1FETCH broke") as caught:
        Executor(Log(fail_in_wait="1FETCH").handlers()).run(piece("preFETCH preF0 1FETCH"))
    assert "     2  1FETCH\n     3  (end)  <-- here" in caught.value.__notes__[0]


# ---- a step of a small model: the real handlers, weights that are NaN unless fetched and waited for


def toy_steps(num_steps: int, num_micro_batches: int, overlap: bool = True, **schedule: Any) -> Any:
    """Losses and gradients of every step and the final weights, layer-major; then the same by plain autograd."""
    inputs = toy_inputs(num_micro_batches)
    model, plain = toy_model(), toy_model()
    training = ToyTraining(model, overlap, schedule.get("early", False))
    seeds = [10 * step for step in range(num_steps)]
    ours = []
    for seed in seeds:
        built = build_training(TrainingStep(4, num_micro_batches, due=frozenset(training.optimizer.due), **schedule))
        ours.append(training.step(built, [partial(model, x) for x in inputs], seed))
    training.optimizer.flush()
    theirs = [plain_step(plain, [partial(plain, x) for x in inputs], seed) for seed in seeds]
    assert training.optimizer.num_norms == num_steps
    assert training.params.fetched == []
    assert training.gradients.num_bytes == 0
    return ours, training.weights(), theirs, {name: p.detach() for name, p in plain.named_parameters()}


def assert_plain_bits(ours: Any, weights: Any, theirs: Any, plain_weights: Any) -> None:
    for (losses, grads), (plain_losses, plain_grads) in zip(ours, theirs, strict=True):
        assert losses == plain_losses
        assert grads.keys() == plain_grads.keys()
        assert [name for name in grads if not torch.equal(grads[name], plain_grads[name])] == []
    assert [name for name in weights if not torch.equal(weights[name], plain_weights[name])] == []


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("order", ["vertical", "horizontal"])
def test_steps_have_the_bits_of_plain_autograd(order: str, window: int, overlap: bool) -> None:
    assert_plain_bits(*toy_steps(2, 3, overlap, order=order, window=window))


@pytest.mark.parametrize("order", ["vertical", "horizontal"])
@pytest.mark.parametrize(
    "steps",
    [{"delayed": True}, {"delayed": True, "lead": 1}, {"delayed": True, "early": True}],
    ids=["delayed", "lead1", "early"],
)
@pytest.mark.parametrize("window", [0, 2])
def test_delayed_and_early_steps_have_the_bits_of_plain_autograd(order: str, steps: dict[str, Any], window: int) -> None:
    assert_plain_bits(*toy_steps(3, 2, order=order, window=window, **steps))


@pytest.mark.parametrize("steps", [{"delayed": True}, {"delayed": True, "early": True}, {"early": True}], ids=str)
@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_issued_ahead_of_the_next_step_has_the_bits_of_plain_autograd(steps: dict[str, Any], overlap: bool) -> None:
    """A step issued ahead is taken when the next schedule waits for it; the weights it makes are NaN until then."""
    assert_plain_bits(*toy_steps(3, 2, overlap, window=1, ahead=True, **steps))


def test_snake_sums_in_another_order_only() -> None:
    ours, weights, theirs, plain_weights = toy_steps(1, 3, snake=True)
    assert ours[0][0] == theirs[0][0]
    gap = max((weights[name] - plain_weights[name]).abs().max().item() for name in weights)
    assert gap < 1e-6


def test_evaluation_gives_the_outputs_of_plain_calls() -> None:
    model, plain = toy_model().eval(), toy_model().eval()
    training = ToyTraining(model)
    inputs = toy_inputs(3)
    with torch.no_grad():
        ours = training.sweeps.evaluate(build_evaluation(4, 3), [Body(partial(model, x), None) for x in inputs])
        theirs = [plain(x) for x in inputs]
    assert [value.item() for value in ours] == [value.item() for value in theirs]
    assert training.params.fetched == []


class Fault(Exception):
    """Raised on purpose."""


@pytest.mark.parametrize(
    ("where", "occurrence", "event"),
    [("prefix", 2, "preF1"), ("glue 2", 1, "2F0"), ("block", 2, "1F1"), ("suffix", 3, "sufHEAD2"), ("block", 5, "1B1")],
    ids=["prefix", "glue", "layer", "suffix", "recompute"],
)
def test_a_failure_leaves_everything_as_before_and_the_next_step_right(where: str, occurrence: int, event: str) -> None:
    inputs = toy_inputs(3)
    model, plain = toy_model(), toy_model()
    training = ToyTraining(model)
    calls = 0

    def count(name: str) -> None:
        nonlocal calls
        calls += name == where
        if name == where and calls == occurrence:
            raise Fault(where)

    model.at = count
    hook = model.blocks[1].drop.register_forward_pre_hook(lambda *_: count("block"))
    forwards = {name: module.forward for name, module in model.named_modules()}
    before = facts(ThreadState.capture())
    bodies = [partial(model, x) for x in inputs]
    with pytest.raises(Fault) as caught:
        training.step(build_training(TrainingStep(4, 3)), bodies, seed=0)
    assert f" {event}  <-- here" in caught.value.__notes__[0]
    assert facts(ThreadState.capture()) == before
    assert {name: module.forward for name, module in model.named_modules()} == forwards
    assert not any("forward" in vars(module) for module in model.modules())
    assert training.params.fetched == []
    assert training.gradients.num_bytes == 0
    assert all(param.grad is None for param in model.parameters())
    hook.remove()
    losses, grads = training.step(build_training(TrainingStep(4, 3)), bodies, seed=0)
    plain_losses, plain_grads = plain_step(plain, [partial(plain, x) for x in inputs], seed=0)
    assert losses == plain_losses
    assert [name for name in grads if not torch.equal(grads[name], plain_grads[name])] == []
