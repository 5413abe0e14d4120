"""How many micro-batches each rank is given, by what they have measured and by what a log says; and that no collective of a
step depends on it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from harness import start_process_group

from ds_vertical.config.section import load_section
from ds_vertical.distributed import elastic
from ds_vertical.distributed.elastic import (
    ComputeMeter,
    ElasticCounts,
    even_counts,
    fastest_counts,
    open_elastic,
    read_counts,
)
from ds_vertical.distributed.step_shares import Brought, StepShares
from ds_vertical.errors import ConfigError
from ds_vertical.schedule.events import EVERYTHING, Event, Op, Outside
from ds_vertical.schedule.passes import TrainingStep, build_training
from ds_vertical.schedule.trace import Tracer
from ds_vertical.types import PRE, SUF, ElasticSettings

# what ranks do together: gathers, hops, reductions, votes at RELEASE, the norm
TOGETHER = {Op.FETCH, Op.SPREAD, Op.REDUCE, Op.CROSS, Op.RELEASE, Op.NORM}
HALF: dict[str, Any] = {"halves": True, "made": frozenset({PRE, 0}), "copy_share": 1.0, "standing": (), "delayed": True}
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "snake": {"snake": True},
    "two ahead": {"window": 2},
    "nothing ahead": {"window": 0},
    "early": {"early": True, "delayed": True, "ahead": True, "reduces_beside": True},
    "held": {"hold": EVERYTHING, "reduces_beside": True},
    "levels": {"copy_share": 0.5, "reduces_beside": True},
    "two calls": {"calls": 2},
    "ends fetched": {"outside": Outside(True, apart=(PRE, SUF))},
    "first half": {**HALF, "leaves": True},
    "second half": {**HALF, "left": 2.0},
}


@pytest.mark.parametrize("name", STEPS)
def test_the_order_of_collectives_is_the_same_for_every_number_of_micro_batches(name: str) -> None:
    found = []
    for num_layers, count in itertools.product((1, 4), (1, 2, 3, 8)):
        schedule = build_training(TrainingStep(num_layers, count, **STEPS[name]))
        found.append((num_layers, [(e.op, e.layer, e.step_offset) for e in schedule.events if e.op in TOGETHER]))
    for num_layers in (1, 4):
        first, *others = [events for layers, events in found if layers == num_layers]
        assert all(events == first for events in others)


def test_counts_are_those_with_which_the_slowest_rank_is_done_soonest() -> None:
    assert fastest_counts([100, 400], 16, (1, 15)) == (13, 3)
    assert fastest_counts([100, 400], 16, (4, 15)) == (12, 4)
    assert fastest_counts([100, 400], 16, (1, 10)) == (10, 6)
    assert fastest_counts([100, 100, 100], 7, (1, 5)) == (3, 2, 2)
    assert even_counts(7, 3) == (3, 2, 2)
    for times in ((3, 7, 11), (5, 5, 90), (1, 2, 3)):
        best = min(
            max(count * each for count, each in zip(counts, times, strict=True))
            for counts in itertools.product(range(1, 11), repeat=3)
            if sum(counts) == 12
        )
        chosen = fastest_counts(times, 12, (1, 10))
        assert sum(chosen) == 12 and max(count * each for count, each in zip(chosen, times, strict=True)) == best


LOG = """
ds_vertical: elastic: from step 1: micro-batches 4 4
something else: step 2 of 9, loss 7.1
ds_vertical: elastic: from step 3: micro-batches 6 2
[rank0] ds_vertical: elastic: from step 6: micro-batches 7 1
ds_vertical: elastic: from step 5: micro-batches 4 4
"""


def test_a_log_is_read_line_by_line_and_a_resumed_run_replaces_what_came_later() -> None:
    assert read_counts(LOG, ElasticSettings(), 4, 2) == {1: (4, 4), 3: (6, 2), 5: (4, 4)}


def test_engines_of_one_process_are_told_apart_in_one_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_process_group()
    monkeypatch.setattr(elastic, "_num_engines", 0)
    monkeypatch.setattr(elastic.ranks, "world_size", lambda: 2)
    engines = []
    for total in (8, 12):
        open_elastic(ElasticSettings(), 4)  # of an engine whose construction fails
        made = open_elastic(ElasticSettings(total=total), 4)
        assert made is not None
        made.count_engine()
        engines.append(made)
    for step in (1, 2):
        for each in engines:
            each.begin(step)
    log = capsys.readouterr().out
    assert "ds_vertical: elastic: from step 1: micro-batches 4 4" in log
    assert "ds_vertical: elastic: engine 2: from step 1: micro-batches 6 6" in log
    assert read_counts(log, ElasticSettings(), 4, 2) == {1: (4, 4)}
    assert read_counts(log, ElasticSettings(total=12), 4, 2, number=2) == {1: (6, 6)}
    with pytest.raises(ConfigError, match=r"the counts of engines 1, 2 of one process, and this is engine 3 .*; write a file"):
        read_counts(log, ElasticSettings(counts="log"), 4, 2, number=3)
    alone = "\n".join(line for line in log.splitlines() if "engine 2" in line)
    assert read_counts(alone, ElasticSettings(total=12), 4, 2, number=3) == {1: (6, 6)}


def by_the_log(text: str) -> ElasticCounts:
    start_process_group()
    settings = ElasticSettings(counts="log")
    return ElasticCounts(settings, 8, 7, read_counts(text, settings, 4, 2))


def test_what_a_run_says_that_takes_its_counts_from_a_log_changes_nothing_there(capsys: pytest.CaptureFixture[str]) -> None:
    replayed = by_the_log(LOG)
    assert [replayed.begin(step) for step in (1, 2, 3)] == [4, 4, 6]
    told = capsys.readouterr().out
    assert "by the log, from step 3: micro-batches 6 2" in told
    settings = ElasticSettings()
    assert read_counts(LOG + told, settings, 4, 2) == read_counts(LOG, settings, 4, 2), "step 5 has its line still"


def test_a_log_that_begins_behind_the_run_is_refused_there() -> None:
    replayed = by_the_log("elastic: from step 6: micro-batches 6 2")
    assert replayed.begin(6) == 6, "a run that was resumed, from its own log"
    with pytest.raises(
        ConfigError, match=r'elastic\.counts: got "log", whose first counts hold from step 6 on, .* step 5; write'
    ):
        replayed.begin(5)


def test_a_line_says_once_that_an_iterator_had_fewer_than_its_rank_was_to_take(capsys: pytest.CaptureFixture[str]) -> None:
    replayed = by_the_log(LOG)
    brought = [StepShares(tuple(map(Brought, counts))) for counts in ((6, 2), (4, 2), (3, 2))]
    told = []
    for shares in brought:
        replayed.note(3, shares)
        told.append(capsys.readouterr().out)
    assert "the ranks bring 4 2 micro-batches to step 3, in place of 6 2: an iterator has ended; give" in told[1]
    assert told[0] == told[2] == ""


def test_seconds_of_a_step_that_starts_over_do_not_count() -> None:
    start_process_group()
    measuring = ElasticCounts(ElasticSettings(), 8, 7)
    tracer = measuring.metered(Tracer())

    def run(seconds: float) -> None:
        for event in (Event(Op.F, 0, 0), Event(Op.HEAD, SUF, 0)):
            tracer.span("compute", event, 0.0, seconds)

    assert measuring.nanoseconds(1) == 0
    run(0.1)  # and is cut
    assert measuring.nanoseconds(1) == 0
    run(2.0)
    assert measuring.nanoseconds(2) == 4_000_000_000


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("nothing", {}, "no line such as"),
        (LOG, {"total": 9}, "got micro-batches 4, 4 from step 1 on, which are 8 together, with total 9; write"),
        (LOG, {"max_micro_batches": 5}, "got micro-batches 6, 2 from step 3 on, with max_micro_batches 5; write"),
        (LOG, {"min_micro_batches": 3}, "got micro-batches 6, 2 from step 3 on, with min_micro_batches 3; write"),
        ("elastic: from step 1: micro-batches 4 2 2", {}, "for 3 ranks, in a run of 2; write"),
    ],
)
def test_a_log_of_other_counts_is_refused(text: str, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=r"vertical_schedule\.elastic\.counts: ") as error:
        read_counts(text, ElasticSettings(counts="log", **settings), 4, 2)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"elastic": {"min_micro_batches": 3, "max_micro_batches": 2}},
            "elastic.min_micro_batches: got 3 with max_micro_batches 2",
        ),
        ({"elastic": {"min_micro_batches": 0}}, "elastic.min_micro_batches: got 0; need an integer >= 1"),
        ({"elastic": {"total": "all"}}, 'elastic.total: got "all"; need an integer >= 1, or null'),
        ({"elastic": {"count": "log"}}, 'elastic.count: unknown key; did you mean "counts"?'),
        ({"elastic": {}, "order": "horizontal"}, 'elastic: got {} with order "horizontal"'),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_section({"vertical_schedule": section})
    assert f"vertical_schedule.{message}" in str(error.value)


def test_one_rank_is_refused() -> None:
    start_process_group()
    with pytest.raises(ConfigError, match=r"vertical_schedule\.elastic: got .* with one rank, .*; remove it"):
        open_elastic(ElasticSettings(), 4)
    assert open_elastic(None, 4) is None


def test_the_most_of_a_rank_is_what_the_least_of_the_others_leaves() -> None:
    assert ElasticSettings(min_micro_batches=2).most_of(4, 3) == 8
    assert ElasticSettings(max_micro_batches=5).most_of(4, 3) == 5
    assert ElasticSettings(total=6, max_micro_batches=5).most_of(4, 3) == 4


def test_seconds_of_a_micro_batch_are_those_of_its_events_alone() -> None:
    meter = ComputeMeter(Tracer())
    assert meter.take() is None
    for micro_batch in range(2):
        for event in (Event(Op.F, 0, micro_batch), Event(Op.HEAD, SUF, micro_batch), Event(Op.B, 0, micro_batch)):
            meter.span("compute", event, 1.0, 2.0)
    meter.span("compute", Event(Op.NORM), 0.0, 9.0)
    assert meter.take() == 3.0 and meter.take() is None


def test_losses_count_by_what_all_ranks_bring() -> None:
    even, uneven = (StepShares(tuple(map(Brought, counts))) for counts in ((4, 4), (3, 1)))
    assert even.mean_over == 4 and isinstance(even.mean_over, int), "the bits of a division by M"
    assert uneven.mean_over == 2.0 and uneven.total == 4 and uneven.weights(None) is None
    weighted = StepShares((Brought(2, 30), Brought(1, 10)))
    assert weighted.weights([10, 20]) == [0.75, 1.5]
    assert StepShares.of([each.numbers() for each in weighted.ranks]) == weighted
    for shares, items in ((StepShares((Brought(1, 5), Brought(1))), [5]), (StepShares((Brought(1, 0), Brought(1, 0))), [0])):
        with pytest.raises(ValueError, match="num_items"):
            shares.weights(items)
