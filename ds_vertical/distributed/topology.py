"""Which ranks share a copy of the weights, which add gradients first, and which are on the other side of the slow link.

[Note: levels] Ranks are numbered node by node: rank c * g + b * w + a. W ranks in all are cut twice.

- The w ranks of a *pair* share one copy of the weights. They have the same c and b. Gathers stay among them.
- The g ranks of a *node* add their gradients before a byte crosses to another node. They have the same c.
- All W ranks are the *world*. Each owns 1/W of the weights, gradients and state, as DeepSpeed lays it out.

w divides g, and g divides W. A hop of a collective is among the ranks that differ in one of the three numbers alone: a
(`Level.PAIR`, w ranks), b (`Level.NODE`, g/w ranks) or c (`Level.WORLD`, W/g ranks).

A unit's weights are W chunks of equal size: rank r owns chunk r. Here chunks are always ordered by (a, b, c) of their owners
(`Topology.order`), and not by rank. So every hop moves chunks that are neighbours in memory: the copy of a rank with number a
is the chunks of all owners with the same a.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Level(enum.Enum):
    """Which of a rank's three numbers differs among the ranks of a hop, see [Note: levels]."""

    PAIR = "pair"
    NODE = "node"
    WORLD = "world"


@dataclass(frozen=True)
class Topology:
    """See [Note: levels]. `world`: W, `node`: g, `pair`: w, all in ranks. Raises ConfigError where one does not divide the
    next."""

    world: int
    node: int
    pair: int

    def num_chunks(self, level: Level) -> int:
        """Chunks of a unit that a rank holds: W/w of a copy (PAIR), W/g of a node share (NODE), 1 of its own (WORLD)."""
        raise NotImplementedError

    def hop(self, level: Level, rank: int) -> tuple[int, ...]:
        """The ranks with which `rank` has a hop of a level, itself among them, in ascending order."""
        raise NotImplementedError

    @property
    def order(self) -> tuple[int, ...]:
        """The ranks, ordered by (a, b, c): the order of chunks in memory."""
        raise NotImplementedError

    def copy_order(self, rank: int) -> tuple[int, ...]:
        """The owners of the chunks of a rank's copy, in the order of the chunks: W/w neighbours of `order`."""
        raise NotImplementedError

    def node_share_order(self, rank: int) -> tuple[int, ...]:
        """The owners of the chunks of a rank's node share, in the order of the chunks: W/g neighbours of `order`."""
        raise NotImplementedError


def topology_of(hosts: Sequence[str], pair: int | None = None, node: int | None = None) -> Topology:
    """The topology of ranks on `hosts` (`host_id()` of each rank, in the order of the ranks).

    `pair`: w, as `zero_hpz_partition_size` gives it; None: the ranks of a node. `node`: g; None: the ranks of a host, or w
    where that is more. Raises ConfigError, with the names of hosts and the numbers of their ranks: where the ranks of a host
    are not neighbours, where hosts have unequal numbers of ranks, and for numbers that do not divide.
    """
    raise NotImplementedError
