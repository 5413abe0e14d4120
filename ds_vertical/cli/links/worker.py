"""A rank that measures the links, launched by `ds-vertical limits --links` on all hosts.

All ranks send at the same time, through training's own collectives and threads: first the ranks of each host among themselves,
then those that have the same place on their hosts. Where a host has four ranks or more, and an even number, each rank also
sends to the neighbour with which it is a pair, such as the two GCDs of one card. Half of the bytes are gathered, as weights
are, and half are exchanged and added, as gradients are. A pair has a link of its own where a rank receives at least 1.3 times
what it receives from all of its host: else it is the host's link once more, and must not count beside that one.

What all ranks at once gather and sum, as without levels, is measured for what it takes of the cores, and so is what the ranks
of a host gather and add in memory that they share. A rate is of the slowest rank, since ranks wait for each other in every
layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import torch

from ds_vertical.cli.links import hop_timer
from ds_vertical.cli.links.hop_timer import TimedHop
from ds_vertical.cli.links.worker_lines import REFUSED, RESULT
from ds_vertical.compat.accelerator import device_name
from ds_vertical.distributed import ranks
from ds_vertical.distributed.host_memory import padded, shared_by
from ds_vertical.distributed.levels import LevelCollectives
from ds_vertical.distributed.quantize import Quantizer
from ds_vertical.distributed.topology import Level, Topology, topology_of
from ds_vertical.engine.machine_cache import keep_links
from ds_vertical.errors import ConfigError
from ds_vertical.io.host import keep_freed_memory
from ds_vertical.io.runs.this_host import host_id, host_names

_TINY_ROUNDS: Final = 20
_KEPT: Final = 8  # times what is gathered
_FP32_BYTES: Final = 4
_ROUNDED: Final = 1 << 22  # numbers at a time
_PAIR: Final = 2  # ranks
_PAIR_GAIN: Final = 1.3  # of a pair's rate over its host's, from which on the pair has a link of its own


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; rank 0 prints the rates as one line of JSON. Returns 2 for hosts that cannot be used."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    parser.add_argument("--size-mb", type=int, required=True, help="of what is gathered")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--no-keep", action="store_true")
    options = parser.parse_args(argv)
    ranks.start_distributed()
    keep_freed_memory(_KEPT * options.size_mb << 20)  # as training does
    torch.set_num_threads(1)  # as threads beside the one that trains have it
    hosts = ranks.all_gathered(host_id())
    try:
        topology = topology_of(hosts)
    except ConfigError as error:
        _say(f"{REFUSED}{error}")
        return 2
    links = _links(topology, options.size_mb << 20, options.rounds)
    pair = _pair_link(topology, options.size_mb << 20, options.rounds)
    if has_own_link(pair, links):
        links |= pair
    names = list(dict.fromkeys(host.partition(" ")[0] for host in hosts))
    found = {"links": links, "pair": pair, "hosts": names, "ranks_per_host": topology.pair, "device": device_name()}
    if links and not options.no_keep and ranks.rank() == 0:
        found |= {"kept": _kept(links, host_names(hosts), topology.pair)}
    _say(RESULT + json.dumps(found))
    ranks.is_true_on_all_ranks(True)  # nobody leaves before all have measured
    return 0


def _say(line: str) -> None:
    if ranks.rank() == 0:
        print(f"\n{line}", flush=True)


def _kept(links: dict[str, float], hosts: Sequence[str], ranks_per_host: int) -> str:
    """Where this host's user has the links now, or why they are not kept."""
    try:
        return str(keep_links(links, hosts, ranks_per_host, device_name()))
    except ConfigError as error:
        return f"nowhere: {error}"


def _links(topology: Topology, num_bytes: int, rounds: int) -> dict[str, float]:
    """Rates and latencies of the links that there are: none within a host with one rank, none between hosts on one host. Of
    ranks that compute on the host's cores also the rates while they do, and the seconds of a core for each byte that a rank
    receives, or has in memory that its host's ranks share, and for each number that it rounds to fewer bits or reads."""
    collectives, links = LevelCollectives(topology), dict[str, float]()
    core_s = received = 0.0
    size, computes = _size(topology, num_bytes), device_name() == "cpu"
    for name, level, receivers in (("local", Level.PAIR, 1), ("cross", Level.WORLD, topology.pair)):
        if topology.width(level) == 1:
            continue
        rate, latency, moved = _link(collectives, level, size, rounds)
        links |= {f"{name}_bytes_per_s": receivers * rate, f"{name}_latency_s": latency}
        received += moved
        if computes:
            hops = _hops(collectives, level, size)
            beside = hop_timer.beside_computing(hops, rounds)
            links[f"{name}_beside_bytes_per_s"] = receivers * min(rate, rate_of(moved, beside.seconds, latency * len(hops)))
            core_s += beside.core_s
    if received and computes:
        links |= {"core_s_per_byte": core_s / received, "one_level_core_s_per_byte": _one_level_core_s(size, rounds)}
        links |= {"round_core_s_per_element": _round_core_s(rounds), **_memory_core_s(collectives, size, rounds)}
    collectives.close()
    return links


def _link(collectives: LevelCollectives, level: Level, size: int, rounds: int) -> tuple[float, float, int]:
    """Of the hops of a level: bytes a second into a rank, the seconds of the smallest, and the bytes that come into a rank."""
    topology, hops_of = collectives.topology, partial(_hops, collectives, level)
    hops = hop_timer.warm(hops_of, size)
    tiny_s, whole_s = hop_timer.seconds(hops_of(1), _TINY_ROUNDS), hop_timer.seconds(hops, rounds)
    moved = len(hops) * (topology.width(level) - 1) * topology.num_chunks(level) * size * _FP32_BYTES
    return rate_of(moved, whole_s, tiny_s), tiny_s / len(hops), moved


def rate_of(num_bytes: int, whole_s: float, latency_s: float) -> float:
    """Bytes a second of what takes `whole_s` with its latency."""
    return num_bytes / max(whole_s - latency_s, 1e-9)


def _size(topology: Topology, num_bytes: int) -> int:
    """Numbers of a rank's chunk."""
    return max(1, num_bytes // _FP32_BYTES // topology.world)


def _pair_link(topology: Topology, num_bytes: int, rounds: int) -> dict[str, float]:
    """What two neighbours send each other, all pairs at the same time. Nothing where a host has not
    two pairs or more."""
    if topology.pair <= _PAIR or topology.pair % _PAIR:
        return {}
    collectives = LevelCollectives(Topology(world=topology.world, node=_PAIR, pair=_PAIR))
    rate, latency, _ = _link(collectives, Level.PAIR, _size(topology, num_bytes), rounds)
    collectives.close()
    return {"pair_ranks": _PAIR, "pair_bytes_per_s": rate, "pair_latency_s": latency}


def has_own_link(pair: Mapping[str, float], links: Mapping[str, float]) -> bool:
    """Whether a pair's rate is clearly more than that of the other links of its host, `links`."""
    return bool(pair) and pair["pair_bytes_per_s"] >= _PAIR_GAIN * links["local_bytes_per_s"]


def _one_level_core_s(size: int, rounds: int) -> float:
    """Seconds of a core for each byte that a rank receives where a gather and a sum are over all ranks at once. gloo's
    reduce-scatter is an all-reduce: twice the bytes of a gather."""
    world = ranks.world_size()
    collectives = LevelCollectives(Topology(world=world, node=world, pair=world))
    group = ranks.own_subgroup("limits", [tuple(range(world))])

    def hops(size: int) -> tuple[TimedHop, ...]:
        share = torch.empty(size)

        def summed(rows: torch.Tensor) -> torch.distributed.Work | None:
            return torch.distributed.reduce_scatter_tensor(share, rows.view(-1), group=group, async_op=True)

        return TimedHop(collectives.gather, _chunks(1, size)), TimedHop(summed, _chunks(world, size))

    core_s = hop_timer.beside_computing(hop_timer.warm(hops, size), rounds).core_s
    collectives.close()
    return core_s / (3 * (world - 1) * size * _FP32_BYTES)


def _hops(collectives: LevelCollectives, level: Level, size: int) -> tuple[TimedHop, ...]:
    """A gather and a sum over a level alone, of chunks of `size` numbers. Each brings a rank its chunks from each of the
    others."""
    world, copied = collectives.topology.world, collectives.topology.num_chunks(Level.PAIR)
    if level is Level.PAIR:
        return TimedHop(collectives.gather, _chunks(copied, size)), TimedHop(collectives.reduce, _chunks(world, size))
    return TimedHop(collectives.spread, _chunks(1, size)), TimedHop(collectives.cross, _chunks(copied, size))


def _chunks(count: int, size: int) -> torch.Tensor:
    return torch.ones(count, size, device=device_name())


def _memory_core_s(collectives: LevelCollectives, size: int, rounds: int) -> dict[str, float]:
    """Seconds of a core for each byte of a unit that each rank of a host gathers out of memory that they share, and adds in it,
    in the mean of both; nothing where they share none."""
    topology = collectives.topology
    counts = topology.num_chunks(Level.PAIR), topology.world
    lengths = [count * (size + hop_timer.LARGER) for count in counts]
    room = sum(padded(length * _FP32_BYTES) for length in lengths)
    memory = shared_by(topology.hops(Level.PAIR), room, "what limits measures") if topology.pair > 1 else None
    parts = [] if memory is None else [memory.take((length,), torch.float32) for length in lengths]
    copied, rows = parts or (None, None)
    if copied is None or rows is None:
        return {}
    gather = partial(collectives.gather, memory=memory, join=lambda chunks: [torch.stack(chunks)])
    collectives_of = (gather, copied.fill_(1.0)), (partial(collectives.reduce, memory=memory), rows.fill_(1.0))

    def hops(size: int) -> tuple[TimedHop, ...]:
        pairs = zip(counts, collectives_of, strict=True)
        return tuple(TimedHop(start, part[: count * size].view(count, size)) for count, (start, part) in pairs)

    core_s = hop_timer.beside_computing(hop_timer.warm(hops, size), rounds).core_s
    return {"memory_core_s_per_byte": core_s / (2 * topology.world * size * _FP32_BYTES)}


def _round_core_s(rounds: int) -> float:
    """Seconds of a core for a number that is rounded, or read, in the mean of both, of 8 and 4 bits, of ranks and rounds."""
    rows, taken = torch.ones(1, _ROUNDED), []
    for _ in range(1 + rounds):  # the first one may compile
        ranks.is_true_on_all_ranks(True)
        cores = time.process_time()
        for quantizer in (Quantizer(8), Quantizer(4)):
            quantizer.dequantize(quantizer.quantize(rows), rows)
        taken.append((time.process_time() - cores) / (4 * _ROUNDED))
    return statistics.mean(each for same in ranks.all_gathered(taken[1:]) for each in same)


if __name__ == "__main__":
    sys.exit(main())
