"""What ranks tell each other of failures: two ranks in one process over torch's store; the real ones are in
test_failing_ranks.py."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch.distributed

from ds_vertical.distributed import failure_watch, host_beats, ranks
from ds_vertical.distributed.failure_log import RankReport
from ds_vertical.distributed.failure_watch import FailureWatch
from ds_vertical.distributed.host_peers import Process, process_status
from ds_vertical.errors import OtherRankError, StepLeft
from ds_vertical.io.runs import run_dir

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3021"
GRACE_S = 1.0


class Pair:
    """The watches of two ranks. `ended`: the causes for which a rank's process would have been ended."""

    def __init__(self) -> None:
        store = torch.distributed.HashStore()
        self.ended: list[list[str]] = [[], []]
        self.done = [threading.Event(), threading.Event()]
        self.ranks = [FailureWatch(store, rank, 2, partial(self._end, rank)) for rank in range(2)]
        deadline = time.monotonic() + 60
        while any(len(watch.peers.processes) < 2 for watch in self.ranks) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _end(self, rank: int, cause: str) -> None:
        self.ended[rank].append(cause)
        self.done[rank].set()
        raise SystemExit  # the thread; a process in the real end_process

    def fail(self, rank: int, error: BaseException) -> None:
        with pytest.raises(type(error)), self.ranks[rank].section("train_batch"):
            raise error

    def wait_for_ever(self, rank: int) -> str:
        """As in a collective that never ends: the cause for which the rank is ended."""
        with self.ranks[rank].section("train_batch"):
            assert self.done[rank].wait(60), "nobody has ended this rank"
        return self.ended[rank][0]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    for name, seconds in (("POLL_S", 0.01), ("GRACE_S", GRACE_S), ("HEARD_S", 0.3)):
        monkeypatch.setattr(failure_watch, name, seconds)
    both = Pair()
    yield both
    for watch in both.ranks:
        watch.close(None)


def test_what_follows_from_another_ranks_failure_names_the_cause(pair: Pair) -> None:
    pair.fail(1, ValueError("no luck"))
    with pytest.raises(OtherRankError) as raised, pair.ranks[0].section("train_batch"):
        raise RuntimeError(GLOO)
    assert str(raised.value) == "train_batch: rank 1 failed in train_batch: ValueError: no luck"
    assert raised.value.__suppress_context__, "the socket's error would be printed above the cause"
    assert GLOO in "".join(raised.value.__notes__)


def test_what_is_raised_while_such_an_error_is_handled_follows_from_it_too(pair: Pair) -> None:
    pair.fail(1, ValueError("no luck"))
    with pytest.raises(OtherRankError, match="no luck") as raised, pair.ranks[0].section("train_batch"):
        try:
            raise RuntimeError(GLOO)
        finally:
            raise AssertionError("cannot partition a param in flight")
    assert GLOO in "".join(raised.value.__notes__)


def test_the_first_failure_is_the_cause_whatever_follows(pair: Pair) -> None:
    pair.fail(1, ValueError("the first"))
    pair.ranks[1].tell("train_batch", ValueError("the second"))
    with pytest.raises(OtherRankError, match="the first"), pair.ranks[0].section("train_batch"):
        raise RuntimeError(GLOO)


def test_an_error_of_this_ranks_own_stays_its_own(pair: Pair) -> None:
    pair.fail(1, ValueError("elsewhere"))
    with pytest.raises(RuntimeError, match="^CUDA out of memory$"), pair.ranks[0].section("train_batch"):
        raise RuntimeError("CUDA out of memory")


def test_a_failure_inside_is_told_once_by_the_outermost_section(pair: Pair) -> None:
    with pytest.raises(ValueError), pair.ranks[1].section("outer"), pair.ranks[1].section("inner"):
        raise ValueError("deep")
    with pytest.raises(OtherRankError, match="^outer: rank 1 failed in outer: ValueError: deep"):
        with pair.ranks[0].section("outer"), pair.ranks[0].section("inner"):
            raise RuntimeError(GLOO)


def test_a_rank_that_waits_for_ever_is_ended(pair: Pair) -> None:
    pair.fail(1, ValueError("no luck"))
    assert pair.wait_for_ever(0).startswith("train_batch: rank 1 failed in train_batch: ValueError: no luck")


def test_a_rank_that_is_killed_ends_the_others(pair: Pair) -> None:
    child = subprocess.Popen(["sleep", "100"])
    here = Process.me()
    pair.ranks[0].peers.processes[1] = Process(here.home, child.pid, process_status(child.pid)[1])
    with pair.ranks[0].section("save_checkpoint"):
        time.sleep(0.2)
    assert not pair.ranks[0].log.entries, "the other one lives"
    child.kill()
    try:
        assert f"rank 1 is gone without a word (pid {child.pid})" in pair.wait_for_ever(0)
    finally:
        child.wait()


def test_a_killed_ranks_sockets_may_close_before_it_is_gone(pair: Pair) -> None:
    child = subprocess.Popen(["sleep", "100"])
    pair.ranks[0].peers.processes[1] = Process(Process.me().home, child.pid, process_status(child.pid)[1])
    threading.Timer(0.3, child.kill).start()
    with pytest.raises(OtherRankError, match="rank 1 is gone"), pair.ranks[0].section("train_batch"):
        raise RuntimeError(GLOO)
    child.wait()


def test_patience_with_a_collectives_error_is_measured_by_the_clock_that_finds_hosts_lost(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy host that clock is slow, and so is the verdict that a host is lost."""
    monkeypatch.setattr(failure_watch, "PATIENCE_S", 0.05)
    monkeypatch.setattr(host_beats, "_TICK_S", 0.0001)
    lost = RankReport(1, "lost", 1 << 62, "", "host b (rank 1) has said nothing")
    threading.Timer(0.5, lambda: pair.ranks[0].log.entries.append(lost)).start()
    with pytest.raises(OtherRankError, match="host b") as raised, pair.ranks[0].section("train_batch"):
        assert not pair.ranks[0].is_host_lost
        raise RuntimeError(GLOO)
    assert pair.ranks[0].is_host_lost and GLOO in "".join(raised.value.__notes__)


@pytest.mark.parametrize("lost", [True, False])
def test_an_error_that_nobody_catches_ends_the_process_at_once_where_a_host_is_lost(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: bool
) -> None:
    said = tmp_path / "said"
    kind = "lost" if lost else "failed"
    pair.ranks[0].log.entries.append(RankReport(1, kind, 1 << 62, "", "host b (rank 1) has said nothing"))
    gc.collect()  # what other tests have left: a child that collected it would wait for threads that it has not
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 1)
            monkeypatch.setattr(ranks, "_watch", pair.ranks[0])
            monkeypatch.setattr(sys, "stdout", os.fdopen(1, "w"))
            monkeypatch.setattr(sys, "last_value", OtherRankError("train_batch: host b"), raising=False)
            monkeypatch.setattr(run_dir, "release_all", lambda: print("released"))
            ranks._leave()
        finally:
            os._exit(7)  # as torch's own exit, which comes behind this one
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (1 if lost else 7)
    assert said.read_text() == ("released\n" if lost else "")


def test_failures_that_all_share_leave_the_ranks_in_step(pair: Pair) -> None:
    for rank in (0, 1):
        pair.fail(rank, ArithmeticError(f"not finite, says {rank}"))
    for watch in pair.ranks:
        with watch.section("train_batch"):
            time.sleep(1.5 * GRACE_S)  # inside, and nobody else is to be waited for
    assert pair.ended == [[], []]


def test_a_rank_that_failed_alone_does_not_go_on(pair: Pair) -> None:
    pair.fail(1, ValueError("no luck"))
    with pytest.raises(OtherRankError, match="this rank has failed in its last call, and rank 0 has not"):
        with pair.ranks[1].section("train_batch"):
            raise AssertionError("it would meet the others in the wrong collective")


def test_no_more_data_is_no_failure(pair: Pair) -> None:
    pair.fail(1, StopIteration())
    with pair.ranks[1].section("train_batch"):
        pair.fail(0, ValueError("told"))
    assert [entry.rank for entry in pair.ranks[0].log.entries] == [0]


def test_what_all_ranks_have_decided_is_no_failure(pair: Pair) -> None:
    """So nobody waits for it to be everybody's: what follows may begin at once, however long another rank cleans up."""
    pair.fail(1, StepLeft())
    with pair.ranks[1].section("save_checkpoint"):
        pair.fail(0, ValueError("told"))
    assert [entry.rank for entry in pair.ranks[0].log.entries] == [0]


def test_a_rank_that_ends_early_is_named(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_watch, "PATIENCE_S", 0.2)
    pair.ranks[1].close(None)
    with pytest.raises(OtherRankError, match="rank 1 has ended without an error: do all ranks have as many batches"):
        with pair.ranks[0].section("train_batch"):
            raise RuntimeError(GLOO)


def test_an_error_that_nobody_catches_is_told_at_the_end(pair: Pair) -> None:
    pair.ranks[1].close(KeyError("in the script"))
    assert "rank 1 failed: KeyError: 'in the script'" in pair.wait_for_ever(0)


def test_a_process_is_known_among_all_of_its_pid() -> None:
    me = Process.me()
    assert me.is_alive() and me.pid == os.getpid()
    assert not me._replace(start_ticks="1").is_alive()
    child = subprocess.Popen(["true"])
    found = me._replace(pid=child.pid, start_ticks=process_status(child.pid)[1])
    deadline = time.monotonic() + 60
    while found.is_alive() and time.monotonic() < deadline:  # nobody has asked after it: its pid is still taken
        time.sleep(0.01)
    assert not found.is_alive()
    child.wait()
    assert not found.is_alive()


def test_a_rank_that_has_died_is_gone_only_once_its_last_words_have_been_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late this rank comes to look: the store's answer is on its way when the process is seen dead."""
    watch = pair.ranks[1]
    exchanged, held = watch.log.exchange, threading.Event()
    monkeypatch.setattr(watch.log, "exchange", lambda: (held.wait(2), exchanged())[1])
    pair.fail(0, ValueError("no such batch"))
    monkeypatch.setattr(watch.peers, "gone", lambda ended: iter([] if 0 in ended else [(0, watch.peers.processes[0])]))
    threading.Timer(0.3, held.set).start()
    assert "ValueError: no such batch" in pair.wait_for_ever(1)


def test_behind_a_host_that_has_gone_with_the_store_nobody_is_blamed_who_ends_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of this host has noticed first and has ended, and could tell nobody any more."""
    watch = pair.ranks[1]
    lost = RankReport(0, "lost", 1 << 62, "", "host nodeA (rank 0) has closed the store of the process group")
    monkeypatch.setattr(watch.log, "is_open", False)
    monkeypatch.setattr(watch.beats, "lost", lambda ended: [] if 0 in ended else [lost])
    monkeypatch.setattr(watch.peers, "gone", lambda ended: iter([] if 5 in ended else [(5, watch.peers.processes[1])]))
    assert "host nodeA (rank 0) has closed the store" in pair.wait_for_ever(1)
    assert [entry.kind for entry in watch.log.entries] == ["lost", "gone"]
