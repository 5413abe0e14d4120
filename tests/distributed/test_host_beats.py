"""When a host counts as lost: the heartbeats of two hosts in one process over torch's store; real hosts are in
test_two_hosts.py."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

import pytest
import torch.distributed

from ds_vertical.distributed import host_beats
from ds_vertical.distributed.host_beats import HostBeats, Listener, any_answers

SILENCE_S = 0.4


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_beats, "BEAT_S", 0.02)
    monkeypatch.setattr(host_beats, "SILENCE_S", SILENCE_S)
    monkeypatch.setattr(host_beats, "DOUBT_S", SILENCE_S / 4)


def ranks_of(hosts: str) -> list[HostBeats]:
    """One rank per letter, which names its host; all have introduced themselves."""
    store = torch.distributed.HashStore()
    ranks = [HostBeats(store, rank, len(hosts), host) for rank, host in enumerate(hosts)]
    for each in [*ranks, *ranks]:
        each.exchange()
    return ranks


class Listening(Listener):
    """A socket of this process, as a rank's that is stopped: its kernel answers."""

    def __init__(self, server: socket.socket) -> None:
        super().__init__()
        self.close()
        self.address = server.getsockname()


def let_pass(seconds: float, of: list[HostBeats], speaking: list[HostBeats], found: Callable[[], bool] = lambda: False) -> bool:
    """Let all watches tick and the speaking ranks beat for a while, or until something is found."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not found():
        for each in of:
            each.tick()
        for each in speaking:
            each.exchange()
        time.sleep(0.005)
    return found()


def test_nobody_is_lost_while_all_beat() -> None:
    ranks = ranks_of("aabb")
    let_pass(2 * SILENCE_S, ranks, ranks)
    assert all(each.are_several and each.lost(()) == [] for each in ranks)


def test_one_host_has_no_heartbeats() -> None:
    ranks = ranks_of("aa")
    let_pass(2 * SILENCE_S, ranks, ranks[:1])
    assert all(not each.are_several and each.lost(()) == [] for each in ranks)
    with ranks[0].doubt() as patience_s:
        assert patience_s == 0.0


def test_rank_0_finds_a_host_that_is_silent_and_names_its_ranks_once() -> None:
    ranks = ranks_of("aabb")
    let_pass(3 * SILENCE_S, ranks, ranks[:2])
    reports = ranks[0].lost(())
    assert [(report.rank, report.kind) for report in reports] == [(2, "lost"), (3, "lost")]
    assert "(ranks 2, 3) has said nothing for " in reports[0].describe() and "it is down" in reports[0].describe()
    assert ranks[0].lost(()) == [] and ranks[1].lost(()) == []


def test_the_first_of_several_lost_hosts_is_told_ahead_of_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(host_beats, "any_answers", lambda addresses: bool(asked.append(addresses)))  # takes up to a second
    ranks = ranks_of("abcd")
    let_pass(3 * SILENCE_S, ranks, ranks[:1])
    for told, number in ([1], 1), ([2], 2), ([3], 3), ([], 3):
        assert [report.rank for report in ranks[0].lost(())] == told and len(asked) == number


def test_a_host_of_which_one_rank_still_speaks_is_not_lost() -> None:
    ranks = ranks_of("aabb")
    let_pass(2 * SILENCE_S, ranks, ranks[:3])
    assert ranks[0].lost(()) == []


def test_a_host_whose_ranks_have_ended_is_not_lost() -> None:
    ranks = ranks_of("ab")
    let_pass(2 * SILENCE_S, ranks, ranks[:1])
    assert ranks[0].lost({1}) == []


def test_a_failed_collective_makes_a_shorter_silence_suspicious() -> None:
    ranks = ranks_of("ab")
    let_pass(SILENCE_S / 2, ranks, ranks[:1])
    assert ranks[0].lost(()) == []
    with ranks[0].doubt() as patience_s:
        assert patience_s > SILENCE_S
        assert len(ranks[0].lost(())) == 1
    let_pass(SILENCE_S / 2, ranks, ranks)
    assert ranks[0].lost(()) == []


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_host_whose_ranks_are_stopped_is_not_lost_for_a_while(monkeypatch: pytest.MonkeyPatch, stopped: int) -> None:
    """Until they have been stopped for too long, or are killed: then the kernel refuses."""
    monkeypatch.setattr(host_beats, "_ASK_S", 0.05)
    for end in ("killed", "for too long"):
        store = torch.distributed.HashStore()
        with socket.create_server(("127.0.0.1", 0)) as server:
            listeners = [Listening(server) if rank == stopped else None for rank in range(2)]
            ranks = [HostBeats(store, rank, 2, "ab"[rank], listeners[rank]) for rank in range(2)]
            for each in [*ranks, *ranks]:
                each.exchange()
            speaking = ranks[1 - stopped]
            let_pass(2 * SILENCE_S, ranks, [speaking] if stopped else [])
            assert speaking.lost(()) == []
            if end == "for too long":
                monkeypatch.setattr(host_beats, "STOPPED_S", 0.1)
            else:
                server.close()
            let_pass(0.2, ranks, [speaking] if stopped else [])
            assert [report.rank for report in speaking.lost(())] == [stopped]


def test_a_listener_is_found_while_its_process_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    listener = Listener()
    assert listener.address is not None and listener.address[0] == "127.0.0.1"
    assert any_answers([listener.address])
    listener.take()
    said, says = os.pipe()
    child = os.fork()
    if child == 0:  # a worker that outlives its rank holds nothing
        os.write(says, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(said, 1)
    listener.close()
    assert not any_answers([listener.address])
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    monkeypatch.delenv("MASTER_ADDR")
    assert Listener().address is None


def test_the_others_find_that_the_store_does_not_answer() -> None:
    ranks = ranks_of("aab")
    let_pass(2 * SILENCE_S, ranks, ranks[:2])
    assert ranks[1].lost(()) == []
    assert "(ranks 0, 1) has not answered for " in ranks[2].lost(())[0].describe()


def test_the_others_find_at_once_that_the_store_is_closed() -> None:
    ranks = ranks_of("ab")
    for each in ranks:
        each.close()
    assert ranks[0].lost(()) == []
    assert "(rank 0) has closed the store" in ranks[1].lost(())[0].describe()
    assert ranks_of("ab")[1].lost(()) == []


def test_a_process_that_was_stopped_takes_no_silence_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_beats, "_TICK_S", 0.05)
    ranks = ranks_of("ab")
    let_pass(0.1, ranks, ranks)
    time.sleep(2 * SILENCE_S)
    for each in ranks:
        each.tick()
        assert each.lost(()) == []
