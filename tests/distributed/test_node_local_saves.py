"""Saves to a folder of each host's own: whole on all hosts or undone on all, wherever a rank is killed; and what a load says of
a host whose files are others, or gone. Two hosts of benchmarks/rig, a process on each."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_local_worker import Pair
from two_hosts import TwoHosts, wait_for

from ds_vertical.distributed import host_beats
from ds_vertical.engine.checkpoint.save import POINTS

pytestmark = [pytest.mark.two_hosts, pytest.mark.timeout(300)]
ENDED_S = 15.0 + 5.0  # from the loss of a host; other work may share the cores
OF_A_FOLDER = [point for point in POINTS if point.startswith(("folder", "switched", "latest"))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with TwoHosts(tmp_path_factory.mktemp("rig")) as hosts:
        made = Pair(hosts)
        yield made
        made.close()


@pytest.fixture
def saved(pair: Pair) -> Iterator[str]:
    """A path at which each host has a folder of its own, with the checkpoint "one" in it."""
    folder = f"{pair.hosts.own}/saved"
    assert pair.run(["save", folder, "one", "first"]) == [["saved by 2"]] * 2
    yield folder
    for each in own_folders(pair):
        shutil.rmtree(each)


def own_folders(pair: Pair) -> list[Path]:
    return [host.own / "saved" for host in pair.hosts.hosts]


def test_each_host_saves_its_ranks_files_and_names_the_tag(pair: Pair, saved: str) -> None:
    for rank, folder in enumerate(own_folders(pair)):
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "one"]
        assert sorted(path.name for path in (folder / "one").iterdir()) == ["ds_vertical.json", f"rank{rank}"]
    manifests = {(folder / "one" / "ds_vertical.json").read_bytes() for folder in own_folders(pair)}
    assert len(manifests) == 1, "each has the manifests of all ranks gathered"
    expected = [[f"one: first of rank {rank}"] * 2 for rank in range(2)]
    assert pair.run(["load", saved], ["load", saved, "one"]) == expected


def test_hosts_that_share_the_folder_save_as_without_the_setting(pair: Pair) -> None:
    folder = pair.hosts.shared / "together"
    assert pair.run(["save", str(folder), "one", "first"], ["load", str(folder)]) == [
        ["saved by 1", f"one: first of rank {rank}"] for rank in range(2)
    ]
    assert sorted(path.name for path in (folder / "one").iterdir()) == ["ds_vertical.json", "rank0", "rank1"]
    assert "hosts" not in (folder / "one" / "ds_vertical.json").read_text()


CASES = [(1, ["switched"]), *(pytest.param(killed, OF_A_FOLDER, marks=pytest.mark.slow) for killed in range(2))]


@pytest.mark.parametrize(("killed", "points"), CASES)
def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before_it_on_all_hosts(
    pair: Pair, saved: str, killed: int, points: list[str]
) -> None:
    """To the tag that is there, and to a new one. Behind the switch on all hosts the new save counts."""
    for point in points:
        for tag in ("one", "two"):
            done = point == "latest written"
            outs = pair.start(["end_at", point, killed, "kill"], ["save", saved, tag, f"at {point}"])
            wait_for(outs[1 - killed].exists, 60)
            assert not outs[killed].exists()
            text = f"at {point}" if tag == "one" and done else "first"
            found = pair.run(["load", saved, "one"], ["load", saved])
            assert [each[0] for each in found] == [f"one: {text} of rank {rank}" for rank in range(2)], (point, tag)
            if not done:
                assert [each[1] for each in found] == [each[0] for each in found], (point, tag)
            again = pair.run(["save", saved, "one", "first"], ["load", saved])
            assert again == [["saved by 2", f"one: first of rank {rank}"] for rank in range(2)], (point, tag)
            for folder in own_folders(pair):
                assert [path.name for path in folder.glob(".*")] == [], "left beside the tags"
                shutil.rmtree(folder / "two", ignore_errors=True)


def test_a_host_that_vanishes_in_a_save_ends_the_other_and_leaves_the_checkpoint_before_it(pair: Pair, saved: str) -> None:
    pair.start(["end_at", "folder made", 1, "stay"], ["watched", "save", saved, "one", "second"])
    first, second = own_folders(pair)
    wait_for(lambda: any(second.glob(".one.*")) and any(first.glob(".one.*")), 60)
    before = pair.errors(0)
    pair.hosts.hosts[1].set_link(False)
    for pid in pair.ranks(1):
        os.kill(pid, signal.SIGKILL)
    try:
        ended_s = wait_for(lambda: not pair.ranks(0), 60)
    finally:
        pair.hosts.hosts[1].set_link(True)
    said = pair.errors(0).removeprefix(before)
    assert "OtherRankError: save: host nodeB (rank 1) has said nothing for 10 s: it is down, cut off from" in said, said
    assert ended_s < ENDED_S, said
    assert pair.run(["load", saved]) == [[f"one: first of rank {rank}"] for rank in range(2)]


def test_an_error_on_one_host_undoes_the_switch_of_the_other(pair: Pair, saved: str) -> None:
    for tag in ("one", "two"):
        for failing in range(2):
            found = pair.run(["end_at", "folder complete", failing, "raise"], ["save", saved, tag, "second"], ["load", saved])
            assert "the disk of this host is gone" in found[failing][1]
            assert found[1 - failing][1].startswith("OtherRankError: save_checkpoint failed on 1 of 2 ranks")
            assert [each[2] for each in found] == [f"one: first of rank {rank}" for rank in range(2)]
            for folder in own_folders(pair):
                assert sorted(path.name for path in folder.iterdir()) == ["latest", "one"]


def test_a_mix_of_tags_is_refused_with_both_named(pair: Pair, saved: str) -> None:
    """Where one of them is not on all hosts; where both are, the older one is loaded."""
    pair.run(["save", saved, "two", "second"])
    second = own_folders(pair)[1]
    (second / "latest").write_text("one")
    assert pair.run(["load", saved]) == [[f"one: first of rank {rank}"] for rank in range(2)]
    (second / "two").rename(second / ".two")
    for (said,) in pair.run(["load", saved]):
        assert said == (
            f"CheckpointError: {saved}/latest: names different tags on the hosts: host nodeA (rank 0): two; host nodeB"
            " (rank 1): one. Give a tag that all hosts have (complete on all hosts: one), or write it into that file on"
            " each host"
        )
    (second / "latest").unlink()
    for (said,) in pair.run(["load", saved]):
        assert "host nodeA (rank 0): two; host nodeB (rank 1): no such file" in said
    (second / ".two").rename(second / "two")
    expected = [[f"{tag}: {text} of rank {rank}" for tag, text in (("two", "second"), ("one", "first"))] for rank in range(2)]
    assert pair.run(["load", saved, "two"], ["load", saved, "one"]) == expected


def test_a_lost_hosts_files_are_named(pair: Pair, saved: str) -> None:
    """Its folder is gone; or the hosts have changed places, and each holds the other's files."""
    first, second = own_folders(pair)
    pair.run(["save", saved, "two", "second"])
    shutil.rmtree(second / "two")
    for (said,) in pair.run(["load", saved, "two"]):
        assert said.startswith(
            f"CheckpointError: {saved}: of the tag two, host nodeB (rank 1) lacks two/ds_vertical.json,"
            " two/rank1/ds_vertical.json, saved on host nodeB. List the hosts in the hostfile in the order of the save"
        )
        assert said.endswith("or load another tag (complete on all hosts: one)")
    (first / "one").rename(first / "kept")
    (second / "one").rename(first / "one")
    (first / "kept").rename(second / "one")
    for (said,) in pair.run(["load", saved, "one"]):
        assert "host nodeA (rank 0) lacks one/rank0/ds_vertical.json, saved on host nodeA" in said
        assert "host nodeB (rank 1) lacks one/rank1/ds_vertical.json, saved on host nodeB" in said


@pytest.mark.slow
def test_different_saves_under_one_tag_are_refused(pair: Pair, saved: str) -> None:
    second = own_folders(pair)[1]
    shutil.copytree(second / "one", second / "kept")
    pair.run(["save", saved, "one", "second"])
    shutil.rmtree(second / "one")
    (second / "kept").rename(second / "one")
    for (said,) in pair.run(["load", saved]):
        assert f"{saved}/one: the hosts hold different saves under this tag: host nodeA (rank 0): one of save " in said


def test_a_link_that_drops_and_returns_is_used_again(pair: Pair) -> None:
    outs = pair.start(["count", 40, 0.1])
    wait_for(lambda: pair.hosts.inbound_bytes()["nodeB"] > 5000, 10)
    pair.hosts.hosts[1].set_link(False)
    time.sleep(5)
    pair.hosts.hosts[1].set_link(True)
    wait_for(lambda: all(out.exists() for out in outs), 30)
    assert {out.read_text() for out in outs} == {f"[{3 * sum(range(40))}]"}


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_host_whose_ranks_are_stopped_for_longer_than_its_silence_may_last_goes_on(pair: Pair, stopped: int) -> None:
    before = pair.hosts.inbound_bytes()["nodeB"]
    outs = pair.start(["count", 100, 0.1])
    wait_for(lambda: pair.hosts.inbound_bytes()["nodeB"] > before + 5000, 30)
    pids = pair.ranks(stopped)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(host_beats.SILENCE_S + 4)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: all(out.exists() for out in outs), 60)
    assert {out.read_text() for out in outs} == {f"[{3 * sum(range(100))}]"}
