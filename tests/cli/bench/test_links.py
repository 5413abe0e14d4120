"""`ds-vertical limits --links`: what the links between ranks carry, measured under the launcher."""

from __future__ import annotations

import datetime
import json
import mmap
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import start_process_group
from own_cache import own_cache
from two_hosts import TwoHosts, launch

from ds_vertical.cli.links import hop_timer, worker
from ds_vertical.cli.links.worker import has_own_link
from ds_vertical.cli.main import main
from ds_vertical.engine.machine_cache import kept_links, links_path


def test_ranks_of_one_host_have_links_of_their_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And two neighbours have one. They are kept for runs of as many ranks."""
    out = tmp_path / "links.json"
    for name, value in own_cache(tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    assert main(["limits", "--links", "--num-ranks", "4", "--size-mb", "8", "--rounds", "3", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    links = report["links"]
    assert (len(report["hosts"]), report["ranks_per_host"], report["device"]) == (1, 4, "cpu")
    of_bytes = {"core_s_per_byte", "one_level_core_s_per_byte", "memory_core_s_per_byte"}
    cores = {"round_core_s_per_element", *of_bytes}
    pair = report["pair"]
    assert set(pair) == {"pair_ranks", "pair_bytes_per_s", "pair_latency_s"} and pair["pair_ranks"] == 2
    own = pair["pair_bytes_per_s"] >= 1.3 * links["local_bytes_per_s"]
    rates = {"local_bytes_per_s", "local_latency_s", "local_beside_bytes_per_s"}  # there is no other host
    assert set(links) == {*rates, *cores, *(pair if own else ())}
    for link in ("pair", "local"):
        assert 1e7 < (links | pair)[f"{link}_bytes_per_s"] < 1e11 and 0 < (links | pair)[f"{link}_latency_s"] < 1
    assert all(1e-11 < links[name] < 1e-7 for name in of_bytes)
    assert links["memory_core_s_per_byte"] < links["core_s_per_byte"], "sockets cost more than memory"
    assert 1e-11 < links["round_core_s_per_element"] < 1e-6
    shown = capfd.readouterr().out
    assert f"while the ranks compute{links['local_beside_bytes_per_s'] * 1e-9:21.3f} GB/s" in shown
    assert all(f"into a rank, from its {others}" in shown for others in ("pair's other", "host's others"))
    assert ("a pair has no link of its own" in shown) is not own
    assert "into a host" not in shown and f"written: {out}" in shown
    assert f": {links_path(1, 4, 'cpu')}\n" in shown
    here = [platform.node()]
    assert kept_links(here, 4, "cpu") == links
    assert kept_links([*here, "b"], 1, "cpu") is None and kept_links(here, 4, "cuda") is None
    kept = json.loads(links_path(1, 4, "cpu").read_text())
    assert kept["hosts"] == here and datetime.datetime.fromisoformat(kept["date"]) <= datetime.datetime.now(datetime.UTC)
    for spoilt in ({"no such key": 1.0}, links | {"local_bytes_per_s": 0.0}):
        links_path(1, 4, "cpu").write_text(json.dumps(kept | {"links": spoilt}))
        assert kept_links(here, 4, "cpu") is None


def test_a_pair_has_a_link_of_its_own_where_it_is_clearly_faster_than_its_host() -> None:
    """Else plans and bounds would have a second link, beside the one that it is a part of."""
    links = {"local_bytes_per_s": 1e9}
    own = [has_own_link({"pair_bytes_per_s": rate}, links) for rate in (0.9e9, 1.2e9, 1.31e9, 4e9)]
    assert own == [False, False, True, True] and not has_own_link({}, {})


def test_a_rate_leaves_the_latency_out() -> None:
    assert worker.rate_of(8, 5.0, 1.0) == 2.0


def hop_of(work: Callable[[], object], thread: ThreadPoolExecutor) -> tuple[hop_timer.TimedHop]:
    return (hop_timer.TimedHop(lambda _: SimpleNamespace(wait=thread.submit(work).result), torch.ones(1)),)


def test_what_a_hop_takes_of_the_cores_is_counted_without_the_computation_beside_it() -> None:
    start_process_group()
    numbers = torch.ones(1 << 20)

    def work() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            numbers.add_(1.0)

    begin = time.process_time()
    with ThreadPoolExecutor(1) as thread:
        found = hop_timer.beside_computing(hop_of(work, thread), 3)
    assert 0.05 <= found.core_s < 0.07
    assert found.core_s <= found.seconds < 1
    assert time.process_time() - begin > 4 * 0.05, "nothing was computed meanwhile"


def test_rounds_count_once_one_takes_no_fresh_pages() -> None:
    start_process_group()
    held, sizes, left = list[mmap.mmap](), list[int](), [0, 4096, 4096, 0, 4096]

    def work() -> None:
        pages = left.pop(0)
        held.append(mmap.mmap(-1, max(1, pages) * mmap.PAGESIZE))
        held[-1].madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(pages):
            held[-1][page * mmap.PAGESIZE] = 1

    with ThreadPoolExecutor(1) as thread:

        def hops(size: int) -> tuple[hop_timer.TimedHop]:
            sizes.append(size)
            return hop_of(work, thread)

        hop_timer.warm(hops, 8)
    assert sizes == [8 + hop_timer.LARGER, 8]
    assert len(held) == 4  # the first one connects the ranks, whatever it takes


@pytest.mark.slow
@pytest.mark.two_hosts
def test_the_link_between_two_hosts_has_the_rate_of_the_interface(tmp_path: Path) -> None:
    with TwoHosts(tmp_path, "500mbit") as hosts:
        launch.write_settings(hosts, 2)
        words = ["limits", "--links", "--hostfile", launch.HOSTFILE, "--size-mb", "16", "--no-keep", "--json"]
        command = [sys.executable, "-m", "ds_vertical.cli.main", *words]
        run = subprocess.run(command, cwd=hosts.shared, env=launch.environment(hosts), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert (report["hosts"], report["ranks_per_host"]) == (["nodeA", "nodeB"], 2)
    assert 0.7 * 500e6 / 8 < report["links"]["cross_bytes_per_s"] < 1.02 * 500e6 / 8  # this machine may be busy
    beside = report["links"]["cross_beside_bytes_per_s"] / report["links"]["cross_bytes_per_s"]
    assert 0.55 < beside <= 1, "half of it would be that of one of a host's two ranks"
    assert report["pair"] == {}, "a pair of ranks is all of a host"
    assert report["links"]["local_bytes_per_s"] > report["links"]["cross_bytes_per_s"] and "kept" not in report


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--num-ranks", "0"], "--num-ranks 0: write 1 or more"),
        (["--num-ranks", "2", "--size-mb", "0"], "--size-mb 0: write 1 or more"),
        (["--hostfile", "absent"], "--hostfile absent: no such file; write one with a line `HOST slots=N` for each host"),
    ],
)
def test_bad_input_is_refused_before_a_launch(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["limits", "--links", *words]) == 2
    assert told in capsys.readouterr().err
