"""The order of gathers, whenever shards come and whichever unit is waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ds_vertical.distributed.gather_queue import GatherQueue, UnitGather
from ds_vertical.types import PRE


class Unit:
    """Shards that come when told, and a note of what is issued and waited for."""

    def __init__(self, name: str, log: list[str], error: OSError | None = None) -> None:
        self.name, self.log, self.error = name, log, error
        self.is_there = False
        self.gather = UnitGather(int(name) if name.isdecimal() else PRE, self.issue, lambda: self.is_there)

    def issue(self) -> Callable[[], None]:
        if self.error is not None:
            raise self.error
        self.log.append(f"issue {self.name}")
        return lambda: self.log.append(f"wait {self.name}")


def fetched(queue: GatherQueue, names: str, log: list[str]) -> list[Unit]:
    units = [Unit(name, log) for name in names]
    for unit in units:
        queue.add(unit.gather)
    return units


def test_a_gather_is_issued_ahead_of_its_use_once_its_shards_and_those_before_it_have_come() -> None:
    log: list[str] = []
    queue = GatherQueue(in_order=True, early=True)
    a, b, c = fetched(queue, "abc", log)
    b.is_there = True
    queue.advance()
    assert log == []  # it is the turn of a
    a.is_there = True
    queue.advance()
    assert (log, queue.num_issued) == (["issue a", "issue b"], 2)
    queue.complete(c.gather)
    queue.complete(a.gather)
    assert log[2:] == ["issue c", "wait c", "wait a"]


def test_who_waits_for_a_later_unit_issues_the_earlier_ones_first() -> None:
    log: list[str] = []
    queue = GatherQueue(in_order=True, early=True)
    _, b = fetched(queue, "ab", log)
    queue.complete(b.gather)
    assert log == ["issue a", "issue b", "wait b"]


def test_without_overlap_and_with_one_rank_nothing_is_issued_ahead_of_its_use() -> None:
    for in_order, expected in ((True, ["issue a", "issue b", "wait b"]), (False, ["issue b", "wait b"])):
        log: list[str] = []
        queue = GatherQueue(in_order=in_order, early=False)
        a, b = fetched(queue, "ab", log)
        a.is_there = b.is_there = True
        queue.advance()
        assert log == []
        queue.complete(b.gather)
        assert log == expected


def led(queue: GatherQueue, unit: int) -> bool:
    """Whether a reduction ahead of the unit's backward waits for a gather."""
    ticket = queue.lead(unit)
    if ticket is not None:
        ticket.wait()
    return ticket is not None


def test_where_gathers_lead_the_next_units_is_issued_ahead_of_a_reduction_whether_or_not_its_shards_have_come() -> None:
    """When they come differs from rank to rank."""
    for is_there in (True, False):
        log: list[str] = []
        queue = GatherQueue(in_order=True, early=False, leads=True)
        two, _ = fetched(queue, "21", log)
        two.is_there = is_there
        queue.advance()
        ticket = queue.lead(2)
        assert ticket is not None and ticket.what == "fetch 2" and log == []
        ticket.wait()
        assert log == ["issue 2"] and queue.num_issued == 1
        queue.complete(two.gather)
        assert led(queue, 1) and log == ["issue 2", "wait 2", "issue 1"]


def test_a_reduction_waits_for_no_gather_but_those_up_to_the_next_units() -> None:
    """With two layers ahead, say: layer 4 has been gathered, and layers 3 and 2 are still read."""
    log: list[str] = []
    queue = GatherQueue(in_order=True, early=False, leads=True)
    four, *_ = fetched(queue, "432", log)
    queue.complete(four.gather)
    assert not led(queue, 4), "it is there"
    assert queue.lead(1) is None and queue.lead(None) is None, "it is fetched later, or no backward is left"
    assert log == ["issue 4", "wait 4"]
    assert led(queue, 2) and log[2:] == ["issue 3", "issue 2"]
    assert not led(queue, 2) and queue.num_issued == 3, "it is on its way"


def test_what_other_code_has_had_made_whole_leads_no_more() -> None:
    log: list[str] = []
    queue = GatherQueue(in_order=True, early=False, leads=True)
    fetched(queue, "432", log)
    queue.settle()
    fetched(queue, "1", log)
    assert [led(queue, unit) for unit in (4, 3, 2, 1)] == [False, False, False, True]
    assert log[-1] == "issue 1" and queue.num_issued == 4


def test_where_gathers_do_not_lead_none_is_issued_ahead_of_a_reduction() -> None:
    log: list[str] = []
    queue = GatherQueue(in_order=True, early=False)
    fetched(queue, "2", log)
    assert queue.lead(2) is None and log == []


def test_ranks_that_leave_have_issued_the_same() -> None:
    log: list[str] = []
    queue = GatherQueue(in_order=True, early=True)
    fetched(queue, "ab", log)
    queue.issue_all()
    queue.issue_all()
    assert log == ["issue a", "issue b"]


def test_a_gather_whose_shards_failed_does_not_count_and_is_tried_again() -> None:
    log: list[str] = []
    queue = GatherQueue(in_order=True, early=True)
    (a,) = fetched(queue, "a", log)
    a.error, a.is_there = OSError("no such disk"), True
    with pytest.raises(OSError, match="no such disk"):
        queue.advance()
    assert queue.num_issued == 0
    a.error = None
    queue.complete(a.gather)
    assert (log, queue.num_issued) == (["issue a", "wait a"], 1)


def test_a_pass_that_failed_leaves_nothing_to_issue() -> None:
    log: list[str] = []
    queue = GatherQueue(in_order=True, early=True)
    a, _ = fetched(queue, "ab", log)
    queue.clear()
    a.is_there = True
    queue.advance()
    queue.issue_all()
    assert log == []


def test_other_codes_gather_finds_whole_what_is_fetched_on_every_rank() -> None:
    """Whichever gathers have been issued by then; a gather's own call of the same code does not wait for itself."""
    for is_there in (True, False):
        log: list[str] = []
        queue = GatherQueue(in_order=True, early=True)
        a, b = fetched(queue, "ab", log)
        a.is_there = is_there
        issue = b.gather.issue

        def issue_beside(issue: Callable[[], Callable[[], None]] = issue, queue: GatherQueue = queue) -> Callable[[], None]:
            queue.settle()
            return issue()

        b.gather.issue = issue_beside
        queue.advance()
        queue.settle()
        assert sorted(log) == ["issue a", "issue b", "wait a", "wait b"] and queue.num_issued == 2
        queue.settle()
        assert len(log) == 4


def test_a_unit_that_is_given_up_is_gathered_no_more() -> None:
    log: list[str] = []
    queue = GatherQueue(in_order=True, early=True)
    a, b = fetched(queue, "ab", log)
    queue.forget(a.gather)
    queue.complete(b.gather)
    assert log == ["issue b", "wait b"]
