"""A rank that measures the links, launched by `ds-vertical limits --links` on all hosts.

All ranks gather at the same time, as in training: first the ranks of each host among themselves, then those that have the same
place on their hosts. A rate is of the slowest rank, since ranks wait for each other in every layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Final

import torch

from ds_vertical.cli.links.worker_lines import REFUSED, RESULT
from ds_vertical.compat.accelerator import device_name, synchronize
from ds_vertical.distributed import ranks
from ds_vertical.distributed.topology import Level, Topology, topology_of
from ds_vertical.errors import ConfigError
from ds_vertical.io.runs.this_host import host_id

_TINY_ROUNDS: Final = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; rank 0 prints the rates as one line of JSON. Returns 2 for hosts that cannot be used."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    parser.add_argument("--size-mb", type=int, required=True, help="of what is gathered")
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args(argv)
    ranks.start_distributed()
    hosts = ranks.all_gathered(host_id())
    try:
        topology = topology_of(hosts)
    except ConfigError as error:
        _say(f"{REFUSED}{error}")
        return 2
    links = _links(topology, options.size_mb << 20, options.rounds)
    names = list(dict.fromkeys(host.partition(" ")[0] for host in hosts))
    _say(RESULT + json.dumps({"links": links, "hosts": names, "ranks_per_host": topology.pair, "device": device_name()}))
    ranks.is_true_on_all_ranks(True)  # nobody leaves before all have measured
    return 0


def _say(line: str) -> None:
    if ranks.rank() == 0:
        print(f"\n{line}", flush=True)


def _links(topology: Topology, num_bytes: int, rounds: int) -> dict[str, float]:
    """Rates and latencies of the links that there are: none within a host with one rank, none between hosts on one host. Of
    ranks that compute on the host's cores also the seconds of a core for each byte that a rank receives."""
    links: dict[str, float] = {}
    core_s = received = 0.0
    for name, level, receivers in (("local", Level.PAIR, 1), ("cross", Level.WORLD, topology.pair)):
        group = _group(topology, level)
        others = topology.width(level) - 1
        if not others:
            continue
        share = num_bytes // (others + 1)
        tiny_s, _ = _gather_s(group, others + 1, 1, _TINY_ROUNDS)
        whole_s, cores_s = _gather_s(group, others + 1, share, rounds)
        links[f"{name}_bytes_per_s"] = receivers * others * share / max(whole_s - tiny_s, 1e-9)
        links[f"{name}_latency_s"] = tiny_s
        core_s, received = core_s + cores_s, received + others * share
    return links | ({"core_s_per_byte": core_s / received} if received and device_name() == "cpu" else {})


def _group(topology: Topology, level: Level) -> torch.distributed.ProcessGroup:
    """The process group of this rank's hop of a level. Collective: all ranks make all groups, in one order."""
    group, _ = torch.distributed.new_subgroups_by_enumeration([list(hop) for hop in topology.hops(level)])
    assert isinstance(group, torch.distributed.ProcessGroup)  # every rank is in a hop
    return group


def _gather_s(group: torch.distributed.ProcessGroup, count: int, share: int, rounds: int) -> tuple[float, float]:
    """Seconds of an all-gather in which each of `count` ranks gives `share` bytes: those of the slowest rank in the fastest
    round, and those of cores in the mean of ranks and rounds."""
    own = torch.ones(share, dtype=torch.uint8, device=device_name())
    all_shares = [torch.empty_like(own) for _ in range(count)]
    taken = []
    for _ in range(1 + rounds):  # the first one connects the ranks
        ranks.is_true_on_all_ranks(True)
        begin, cores = time.perf_counter(), time.process_time()
        torch.distributed.all_gather(all_shares, own, group=group)
        synchronize()
        taken.append((time.perf_counter() - begin, time.process_time() - cores))
    each = ranks.all_gathered(taken[1:])
    of_rounds = [max(seconds for seconds, _ in same) for same in zip(*each, strict=True)]
    return min(of_rounds), statistics.mean(cores for taken in each for _, cores in taken)


if __name__ == "__main__":
    sys.exit(main())
