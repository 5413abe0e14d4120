"""Which ranks make the nodes of a run, and what is refused; training over levels is in test_levels_engine.py."""

from __future__ import annotations

import pytest

from ds_vertical.distributed.topology import Topology
from ds_vertical.distributed.unit_levels import topology_on
from ds_vertical.errors import ConfigError
from ds_vertical.types import LevelSettings

A, B = "a boot1", "b boot2"


@pytest.mark.parametrize(
    ("hosts", "settings", "found"),
    [
        ([A, A, B, B], LevelSettings(2), Topology(4, 2, 2)),
        ([A, A, A, A], LevelSettings(2), Topology(4, 2, 2)),
        ([A, A, A, A, B, B, B, B], LevelSettings(2, gradients=4), Topology(8, 4, 2)),
        ([A, A], LevelSettings(2), Topology(2, 2, 2)),
    ],
)
def test_neighbours_on_one_host_are_a_node(hosts: list[str], settings: LevelSettings, found: Topology) -> None:
    assert topology_on(hosts, settings) == found


@pytest.mark.parametrize(
    ("hosts", "size", "told"),
    [
        ([A, A, B, B], 3, "(vertical_schedule.levels.ranks_per_node): got 3, which does not divide the number of ranks, 4"),
        ([A, B, A, B], 2, "zero_hpz_partition_size (vertical_schedule.levels.ranks_per_node): got 2, for which hosts"),
        (
            [A, B, A, B],
            2,
            "ranks of a host must be neighbours, but a has ranks 0, 2; b has ranks 1, 3; list each host once",
        ),
        ([A, A, A, B, B, B], 2, "ranks_per_node): got 2, which does not divide"),
        ([A, A, A, A, B, B], 2, "ranks_per_node): got 2, for which hosts share the ranks in another way: hosts need equal"),
        ([A, A, B, B], 4, "a node is not on one host: rank 0 on a, rank 1 on a, rank 2 on b, rank 3 on b"),
    ],
)
def test_ranks_that_make_no_such_nodes_are_refused(hosts: list[str], size: int, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        topology_on(hosts, LevelSettings(size))
    assert told in str(caught.value)
