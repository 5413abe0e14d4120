"""A rank whose part of a pass fails takes part in every gather and reduction that the others will do, once, in their order, and
raises its error where they decide."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from toy import ToyTraining, toy_inputs, toy_model

from ds_vertical.distributed.gather_queue import GatherQueue
from ds_vertical.errors import OtherRankError, StepLeft
from ds_vertical.model.micro_batch import Body
from ds_vertical.model.state.restart import StateMissed
from ds_vertical.schedule.events import Op, Schedule
from ds_vertical.schedule.levels import Arrival
from ds_vertical.schedule.passes import TrainingStep, build_evaluation, build_training

NUM_LAYERS = 3
LEADING = [(None, window, True) for window in (0, 1, 2)]  # one level, layers ahead, gathers ahead of reductions


class Fault(Exception):
    """Raised on purpose."""


class Ranks:
    """Writes down what a rank does together with others, whether by its own part of the pass or for their sake. `fails_at`:
    which of the arrivals of parameters, or of the reductions, fails ahead of the collective, or behind it ("hold"); or which of
    the optimizer's steps behind the norm ("step")."""

    def __init__(self, training: ToyTraining, fails_at: tuple[str, int] = ("", 0)) -> None:
        self.done: list[str] = []
        self.fault: type[Fault] = Fault
        self.num_gathers, self.num_reductions, self.num_votes = 7, 5, 3  # of earlier passes
        self.fails_at = fails_at
        self.leaves_at = -1  # the vote, counted, at which all leave
        self.agreed: list[BaseException | None] = []
        params: Any = training.params
        optimizer: Any = training.optimizer
        issue, reduce_unit, open_step = params.issue, optimizer.reduce_unit, optimizer.open_step
        step_unit = optimizer.step_unit

        def issuing(unit: Any, step: Any) -> Any:
            self.fail_if_due("gather")
            self.num_gathers += 1
            self.done.append(f"gather {unit}")
            return issue(unit, step)

        def reducing(unit: Any, *args: Any) -> bool:
            self.fail_if_due("reduce")
            self.num_reductions += 1
            self.done.append(f"reduce {unit}")
            self.fail_if_due("hold")
            return reduce_unit(unit, *args)

        def voting() -> bool:
            self.fail_if_due("release")
            self.num_votes += 1
            return self.vote()

        def deciding() -> None:
            self.agreed.append(None)
            open_step()

        def deciding_before() -> None:
            self.agreed.append(None)
            self.done.append("norm before")

        def stepping(unit: Any) -> Any:
            self.fail_if_due("step")
            self.done.append(f"step {unit}")
            return step_unit(unit)

        self.gathers_lead = training.params.gathers.leads
        params.copies, optimizer.is_left = self, self.is_left
        params.issue, optimizer.reduce_unit, optimizer.open_step = issuing, reducing, deciding
        optimizer.step_unit, optimizer.open_left = stepping, deciding_before
        training.sweeps.others, training.sweeps.leave = self, voting

    @property
    def together(self) -> tuple[list[str], list[str]]:
        """What of it the ranks do together, all but their own steps: gathers, which have a process group of their own, and the
        rest."""
        return together(self.done)

    @property
    def in_line(self) -> list[str]:
        """All of that in one order, as beside a device."""
        return [each for each in self.done if not each.startswith("step")]

    def fail_if_due(self, what: str) -> None:
        if what == self.fails_at[0]:
            self.fails_at = what, self.fails_at[1] - 1
            if self.fails_at[1] < 0:
                raise self.fault(what)

    def gather(self, unit: Any, arrival: Arrival) -> None:
        self.done.append(f"gather {unit}")

    def renew(self, unit: Any) -> None:
        """Of this rank's own accord."""
        self.num_gathers += 1
        self.renew_copy(unit)

    def renew_copy(self, unit: Any) -> None:
        self.done.append(f"gather {unit} ahead")

    def is_left(self, unit: Any) -> bool:
        return unit == 1

    def reductions_of(self, unit: Any) -> int:
        return 1

    def reduce(self, unit: Any, number: int) -> None:
        self.done.append(f"reduce {unit}")

    def vote(self) -> bool:
        self.done.append("vote")
        return self.done.count("vote") - 1 == self.leaves_at

    def agree(self, error: Exception | None) -> None:
        self.agreed.append(error)
        if error is not None:
            raise error


def together(done: Sequence[str]) -> tuple[list[str], list[str]]:
    """See `Ranks.together`."""
    gathers = [each for each in done if each.startswith("gather")]
    return gathers, [each for each in done if not each.startswith(("gather", "step", "norm"))]


def settle_at_gradient(training: ToyTraining, _: object, __: object, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda _: training.params.gathers.settle())


def trained(
    schedule: Schedule,
    overlap: bool,
    fails_at: tuple[str, int] = ("", 0),
    leads: bool | None = None,
    settles_at: Collection[int] = (),
    num_norms: int = 0,
) -> Ranks:
    """`leads`: beside a device, where no gather is issued before its unit is used, but for those ahead of reductions.
    `num_norms`: at which the ranks have asked each other before the failure.
    `settles_at`: the layers whose output's gradient a user's code looks at, and gathers parameters there."""
    training = ToyTraining(toy_model(schedule.num_layers), overlap)
    if leads is not None:
        training.params.gathers = GatherQueue(in_order=True, early=False, leads=leads)
    for layer in settles_at:
        training.model.blocks[layer].register_forward_hook(partial(settle_at_gradient, training))
    ranks = Ranks(training, fails_at)
    if any(event.op is Op.MAKE for event in schedule.events):
        half: Any = training.optimizer  # with nothing due of a step before, and nothing left: see `acco.halves`
        half.step_unit, half.is_left = (lambda _: None), (lambda _: False)
    bodies = [partial(training.model, each) for each in toy_inputs(2)]
    if not fails_at[0]:
        training.step(schedule, bodies, 1)
    else:
        with pytest.raises(Fault) as raised:
            training.step(schedule, bodies, 1)
        asked = num_norms + (fails_at[0] == "step")
        assert ranks.agreed == [*[None] * asked, raised.value]
        assert not any("may not know" in note for note in raised.value.__notes__)
        assert training.params.fetched == []
    return ranks


UNITS = frozenset({"pre", *range(NUM_LAYERS)})
HALF = TrainingStep(NUM_LAYERS, 2, copy_share=1.0, delayed=True, halves=True, made=UNITS)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("standing", [frozenset(), UNITS])
def test_a_half_that_fails_anywhere_leaves_nobody_alone(overlap: bool, standing: frozenset[Any]) -> None:
    """Copies for the next half are made while this one computes."""
    schedule = build_training(replace(HALF, standing=standing))
    expected = trained(schedule, overlap)
    assert sum(each.endswith(" ahead") for each in expected.done) == len(UNITS), "although the step of one is left"
    for what, word in {"gather": "gather", "reduce": "reduce", "hold": "reduce", "release": "vote"}.items():
        number = sum(each.startswith(word) and not each.endswith(" ahead") for each in expected.done)
        for at in range(number):
            assert trained(schedule, overlap, (what, at)).together == expected.together


@pytest.mark.parametrize("overlap", [True, False])
def test_a_first_half_that_fails_anywhere_is_left_by_all_at_its_end(overlap: bool) -> None:
    """It has no norm, at which the ranks ask each other elsewhere."""
    schedule = build_training(replace(HALF, standing=UNITS, leaves=True))
    expected = trained(schedule, overlap)
    assert expected.agreed == [None], "at the end"
    for what, word in {"gather": "gather", "reduce": "reduce", "hold": "reduce", "release": "vote"}.items():
        number = sum(each.startswith(word) and not each.endswith(" ahead") for each in expected.done)
        for at in range(number):
            assert trained(schedule, overlap, (what, at)).together == expected.together, (what, at)


@pytest.mark.parametrize("leads", [None, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_second_half_that_fails_is_left_at_the_next_of_its_norms(overlap: bool, leads: bool | None) -> None:
    """At NORM@-1 where the rank fails ahead of that: nobody reduces anything then, and all have issued the gathers of what is
    fetched by then, whether or not its shards had come (`leads`: see `trained`). Behind it, all go on to NORM; copies are made
    at once here, so that those are in line only with gathers that are not late."""
    schedule = build_training(replace(HALF, standing=UNITS, left=1.0))
    expected = trained(schedule, overlap, leads=leads)
    assert expected.agreed == [None, None, None], "at NORM@-1, at NORM, and at the end"
    before = expected.done.index("norm before")
    for what, word in {"gather": "gather", "reduce": "reduce", "hold": "reduce", "release": "vote"}.items():
        own = [place for place, each in enumerate(expected.done) if each.startswith(word) and not each.endswith(" ahead")]
        for at, place in enumerate(own if leads is None else [each for each in own if each < before]):
            found = trained(schedule, overlap, (what, at), leads, num_norms=int(place > before))
            wanted = expected.together if place > before else together(expected.done[:before])
            assert found.together == wanted, (what, at)
    assert any(place < before for place in own) and any(place > before for place in own)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("order", "share"), [("vertical", None), ("horizontal", None), ("vertical", 0.0), ("vertical", 1.0)])
def test_a_step_that_fails_anywhere_leaves_nobody_alone(overlap: bool, order: str, share: float | None) -> None:
    """With one level, and over two, with and without copies of the weights."""
    schedule = build_training(TrainingStep(NUM_LAYERS, 2, order=order, copy_share=share))
    expected = trained(schedule, overlap)
    assert expected.agreed == [None, None], "at the norm, and at the end"
    for what, word in {"gather": "gather", "reduce": "reduce", "hold": "reduce", "release": "vote", "step": "step"}.items():
        number = sum(each.startswith(word) for each in expected.done)
        assert number > NUM_LAYERS
        for at in range(number):
            assert trained(schedule, overlap, (what, at)).together == expected.together


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("share", "window", "leads"), [(None, 1, False), (0.0, 1, False), (1.0, 1, False), *LEADING])
def test_beside_a_device_the_ranks_do_everything_in_one_order(
    overlap: bool, share: float | None, window: int, leads: bool
) -> None:
    """Of a rank that fails, too: its gathers, reductions and votes are in one line there."""
    schedule = build_training(TrainingStep(NUM_LAYERS, 2, copy_share=share, window=window, reduces_beside=leads))
    expected = trained(schedule, overlap, leads=leads)
    for what, word in {"gather": "gather", "reduce": "reduce", "hold": "reduce", "release": "vote"}.items():
        for at in range(sum(each.startswith(word) for each in expected.done)):
            assert trained(schedule, overlap, (what, at), leads=leads).in_line == expected.in_line, (what, at)


@pytest.mark.parametrize("order", ["vertical", "horizontal"])
def test_where_gathers_lead_each_reduction_comes_behind_the_gather_of_the_next_unit(order: str) -> None:
    """A layer that is still there from the forward needs none, and no layer is ahead with a window of 0."""

    def backward(window: int, leads: bool) -> list[str]:
        schedule = build_training(TrainingStep(NUM_LAYERS, 2, order, window=window, reduces_beside=True))
        done = trained(schedule, True, leads=leads).in_line
        return [each for each in done[done.index("reduce 2") : done.index("reduce 0")] if each != "vote"]

    assert backward(1, leads=True) == ["reduce 2", "gather 0", "reduce 1"]
    assert backward(1, leads=False) == ["reduce 2", "reduce 1", "gather 0"]
    assert backward(0, leads=True) == ["reduce 2", "gather 1", "reduce 1", "gather 0"]


def backward_of(done: Sequence[str]) -> list[str]:
    """From the last layer's reduction to the first one's, with the gather that leads the former."""
    work = [each for each in done if each != "vote"]
    first = next(at for at, each in enumerate(work) if each.startswith("reduce"))
    return work[first - 1 : work.index("reduce 0") + 1]


# By layers, layers ahead, and those at whose output's gradient a user's code gathers. The turn keeps the last layers.
LED = {
    (5, 1, ()): "gather 4, reduce 4, gather 2, reduce 3, gather 1, reduce 2, gather 0, reduce 1, reduce 0",
    (5, 2, ()): "gather 4, reduce 4, gather 2, reduce 3, gather 1, reduce 2, gather 0, reduce 1, reduce 0",
    (5, 4, ()): "gather 4, reduce 4, reduce 3, gather 1, reduce 2, gather 0, reduce 1, reduce 0",
    (8, 4, ()): "gather 7, reduce 7, reduce 6, gather 4, reduce 5, gather 3, reduce 4, gather 2, reduce 3, gather 1, reduce 2,"
    " gather 0, reduce 1, reduce 0",
    (
        8,
        4,
        (6,),
    ): "gather 3, reduce 7, reduce 6, reduce 5, reduce 4, gather 2, reduce 3, gather 1, reduce 2, gather 0, reduce 1, reduce 0",
}


@pytest.mark.parametrize(("num_layers", "window", "settles_at"), LED)
def test_a_reduction_comes_behind_the_gather_of_the_next_backwards_unit_and_ahead_of_later_ones(
    num_layers: int, window: int, settles_at: tuple[int, ...]
) -> None:
    """On a rank that fails, too, behind what it has had made whole."""
    schedule = build_training(TrainingStep(num_layers, 2, window=window, reduces_beside=True))
    expected = trained(schedule, True, leads=True, settles_at=settles_at).in_line
    assert ", ".join(backward_of(expected)) == LED[num_layers, window, settles_at]
    behind = len(expected) if not settles_at else expected[::-1].index("gather 3")  # events that all come behind the settling
    for what, word in {"gather": "gather", "hold": "reduce"}.items():
        number = sum(each.startswith(word) for each in expected)
        first = number - sum(each.startswith(word) for each in expected[len(expected) - behind :])
        for at in range(first, number):
            found = trained(schedule, True, (what, at), leads=True, settles_at=settles_at).in_line
            assert found == expected, (what, at)


class HopFault(Fault):
    """As `levels.HopError`."""

    ends_run = True


def test_a_rank_whose_hop_has_failed_takes_part_in_nothing_more() -> None:
    """The others are in that hop, and what it did now they would take for the hop's rest."""
    training = ToyTraining(toy_model(NUM_LAYERS))
    ranks = Ranks(training, ("gather", 2))
    ranks.fault = HopFault
    with pytest.raises(HopFault):
        training.step(build_training(TrainingStep(NUM_LAYERS, 2)), [partial(training.model, each) for each in toy_inputs(2)], 1)
    assert ranks.in_line == ["gather pre", "gather 0"] and ranks.agreed == []


@pytest.mark.parametrize("delayed", [True, False])
def test_a_rank_that_fails_behind_the_norm_helps_to_make_the_copies_for_the_next_step(delayed: bool) -> None:
    step = TrainingStep(NUM_LAYERS, 2, copy_share=1.0, standing=(0,), delayed=delayed, ahead=delayed)
    schedule = build_training(step)
    expected = trained(schedule, True)
    copies = [each for each in expected.done if each.endswith(" ahead")]
    assert len(copies) == (NUM_LAYERS if delayed else NUM_LAYERS + 1), "a unit whose step is left has none"
    for what in ("gather", "step"):
        number = sum(each.startswith(what) and not each.endswith("ahead") for each in expected.done)
        for at in range(number):
            found = trained(schedule, True, (what, at))
            assert found.together[1] == expected.together[1]
            wanted = expected.together[0] if what == "step" else [e for e in expected.together[0] if not e.endswith("ahead")]
            assert found.together[0] == wanted


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("early", [True, False])
def test_where_the_others_leave_a_step_the_one_that_failed_leaves_it_too(overlap: bool, early: bool) -> None:
    """And says there that it has failed: the others must not go on to a checkpoint without it. Whether or not the shards of
    what is fetched had come: all leave with the same gathers issued."""
    schedule = build_training(TrainingStep(NUM_LAYERS, 2))

    def left(fails_at: tuple[str, int], leaves_at: int) -> tuple[list[str], list[str]]:
        training = ToyTraining(toy_model(NUM_LAYERS), overlap)
        training.params.gathers = GatherQueue(in_order=True, early=early)
        ranks = Ranks(training, fails_at)
        ranks.leaves_at = leaves_at
        with pytest.raises(Fault if fails_at[0] else StepLeft) as raised:
            training.step(schedule, [partial(training.model, each) for each in toy_inputs(2)], 1)
        assert ranks.agreed == [raised.value if fails_at[0] else None] and training.params.fetched == []
        return ranks.together

    everything = ["gather pre", "gather 0", "gather 1"], ["vote"]
    assert left(("", 0), 0) == left(("gather", 2), 0) == everything, "where what is fetched fails behind the vote, too"
    for leaves_at in (0, 3):
        expected = left(("", 0), leaves_at)
        assert expected[1].count("vote") == leaves_at + 1 and expected[1][-1] == "vote"
        for at in range(leaves_at or 1):
            assert left(("gather", at), leaves_at) == left(("release", at), leaves_at) == expected


def test_where_gathers_lead_all_leave_a_step_in_one_order() -> None:
    """Also a rank that has failed ahead of the vote, in a gather that leads or in the reduction behind it."""
    schedule = build_training(TrainingStep(NUM_LAYERS, 2, window=2, reduces_beside=True))

    def left(fails_at: tuple[str, int], leaves_at: int) -> list[str]:
        training = ToyTraining(toy_model(NUM_LAYERS))
        training.params.gathers = GatherQueue(in_order=True, early=False, leads=True)
        ranks = Ranks(training, fails_at)
        ranks.leaves_at = leaves_at
        with pytest.raises(Fault if fails_at[0] else StepLeft):
            training.step(schedule, [partial(training.model, each) for each in toy_inputs(2)], 1)
        return ranks.in_line

    for leaves_at in range(NUM_LAYERS):
        expected = left(("", 0), leaves_at)
        assert expected.count("vote") == leaves_at + 1
        for what, word in (("gather", "gather"), ("reduce", "reduce"), ("hold", "reduce")):
            last = len(expected) - 1 - expected[::-1].index("vote")  # what comes behind it all issue as they leave
            for at in range(sum(each.startswith(word) for each in expected[:last])):
                assert left((what, at), leaves_at) == expected, (leaves_at, what, at)


class Missing(Ranks):
    """This rank is to start over, and another one has failed."""

    def fail_if_due(self, what: str) -> None:
        try:
            super().fail_if_due(what)
        except Fault as fault:
            raise StateMissed("state") from fault

    def agree(self, error: Exception | None) -> None:
        raise OtherRankError("rank 1 failed")


def test_no_rank_starts_over_alone() -> None:
    training = ToyTraining(toy_model(NUM_LAYERS))
    ranks = Missing(training, ("gather", 3))
    with pytest.raises(OtherRankError, match="rank 1 failed") as raised:
        training.step(build_training(TrainingStep(NUM_LAYERS, 2)), [partial(training.model, each) for each in toy_inputs(2)], 1)
    assert isinstance(raised.value.__cause__, StateMissed) and training.params.fetched == [] and ranks.done


def test_an_evaluation_is_decided_at_its_end() -> None:
    schedule = build_evaluation(NUM_LAYERS, 2)
    done = []
    for fails_at in (("", 0), ("gather", 0), ("gather", 2)):
        training = ToyTraining(toy_model(NUM_LAYERS))
        ranks = Ranks(training, fails_at)
        bodies = [Body(partial(training.model, each), None) for each in toy_inputs(2)]
        if not fails_at[0]:
            training.sweeps.evaluate(schedule, bodies)
            assert ranks.agreed == [None]
        else:
            with pytest.raises(Fault) as raised:
                training.sweeps.evaluate(schedule, bodies)
            assert ranks.agreed == [raised.value]
        done.append(ranks.together)
    assert done[0] == done[1] == done[2] != ([], [])
