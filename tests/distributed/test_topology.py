"""Pairs, nodes and the world; hosts that cannot be levels."""

from __future__ import annotations

import re

import pytest

from ds_vertical.distributed.topology import Level, Topology, topology_of
from ds_vertical.errors import ConfigError

SHAPES = [
    (world, node, pair)
    for world in (1, 2, 4, 6, 8, 12)
    for node in range(1, world + 1)
    for pair in range(1, node + 1)
    if world % node == 0 and node % pair == 0
]


@pytest.mark.parametrize(("world", "node", "pair"), SHAPES)
def test_hops_bring_each_chunk_to_its_owner_and_a_copy_to_each_rank(world: int, node: int, pair: int) -> None:
    """What spread, gather, reduce and cross do, with sets of ranks in the place of chunks."""
    topology = Topology(world, node, pair)
    assert sorted(topology.order) == list(range(world))
    held = {rank: [rank] for rank in range(world)}
    for level in (Level.WORLD, Level.NODE):
        held = {rank: [owner for other in topology.hop(level, rank) for owner in held[other]] for rank in range(world)}
    assert held == {rank: list(topology.copy_order(rank)) for rank in range(world)}
    assert {len(copy) for copy in held.values()} == {topology.num_chunks(Level.PAIR)}
    assert all(owner % pair == rank % pair for rank, copy in held.items() for owner in copy)
    held = {rank: [owner for other in topology.hop(Level.PAIR, rank) for owner in held[other]] for rank in range(world)}
    assert all(tuple(whole) == topology.order for whole in held.values())
    for level in (Level.PAIR, Level.NODE, Level.WORLD):
        for rank, whole in held.items():
            hop = topology.hop(level, rank)
            assert rank in hop and len(hop) == topology.width(level)
            size = len(whole) // len(hop)
            held[rank] = whole[hop.index(rank) * size : (hop.index(rank) + 1) * size]
        if level is Level.NODE:
            assert {rank: tuple(share) for rank, share in held.items()} == {
                rank: topology.node_share_order(rank) for rank in range(world)
            }
    assert held == {rank: [rank] for rank in range(world)}


def test_two_nodes_of_two_share_a_copy_in_strides() -> None:
    topology = topology_of(["a boot1", "a boot1", "b boot2", "b boot2"])
    assert topology == Topology(world=4, node=2, pair=2)
    assert [topology.copy_order(rank) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [topology.hop(Level.PAIR, 3), topology.hop(Level.NODE, 3), topology.hop(Level.WORLD, 3)] == [(2, 3), (3,), (1, 3)]


def test_what_is_not_said_is_a_host() -> None:
    one, two = ["a x"] * 8, ["a x"] * 4 + ["b y"] * 4
    assert topology_of(one) == Topology(8, 8, 8)
    assert topology_of(two) == Topology(8, 4, 4)
    assert topology_of(two, pair=2) == Topology(8, 4, 2)
    assert topology_of(two, node=2) == Topology(8, 2, 2)
    assert topology_of(one, pair=2, node=4) == Topology(8, 4, 2)  # on one host, as if there were two
    assert topology_of(two, pair=1, node=4) == Topology(8, 4, 1)


REFUSED = {
    "interleaved": (["a x", "b y", "a x", "b y"], None, None, r"hostfile: .*neighbours.* a has ranks 0, 2; b has ranks 1, 3;"),
    "unequal": (["a x", "a x", "b y"], None, None, r"hostfile: .*equal.* a has ranks 0, 1; b has rank 2; .*slots"),
    "one name": (
        ["a 12345678-9", "a 2345678-9", "a 2345678-9"],
        None,
        None,
        r"a \(boot 12345678\) has rank 0; a \(boot 2345678-\)",
    ),
    "pair": (["a x"] * 4, 3, None, r"ranks_per_node\): got 3, which does not .*a has ranks 0, 1, 2, 3.*one of 1, 2, 4$"),
    "pair over a half host": (
        ["a x"] * 6 + ["b y"] * 6,
        4,
        None,
        r"ranks_per_node\): got 4, which does not .*one of 1, 2, 3, 6$",
    ),
    "zero": (["a x"] * 4, 0, None, r"ranks_per_node\): got 0, which does not"),
    "node": (["a x"] * 4, None, 3, r"levels\.gradients: got 3, which does not .*one of 1, 2, 4, null$"),
    "node over two hosts": (
        ["a x"] * 4 + ["b y"] * 4,
        2,
        8,
        r"levels\.gradients: got 8, which does not fit .* 2 and the ranks of a host \(a has .*one of 2, 4, null$",
    ),
    "pair above node": (
        ["a x"] * 4,
        4,
        2,
        r"levels\.gradients: got 2, which does not fit .*_node\) 4 .*one of 4, null$",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_levels_is_refused(fault: str) -> None:
    hosts, pair, node, words = REFUSED[fault]
    with pytest.raises(ConfigError, match=words):
        topology_of(hosts, pair, node)


@pytest.mark.parametrize("numbers", [(4, 3, 1), (4, 2, 3), (4, 0, 1), (4, 4, 0)])
def test_numbers_that_do_not_divide_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=re.escape("does not divide")):
        Topology(*numbers)
