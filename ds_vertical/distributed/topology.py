"""Which ranks share a copy of the weights, which add gradients first, and which are on the other side of the slow link.

[Note: levels] Ranks are numbered node by node: rank c * g + b * w + a. W ranks in all are cut twice.

- The w ranks of a *pair* share one copy of the weights. They have the same c and b. Gathers stay among them.
- The g ranks of a *node* add their gradients before a byte crosses to another node. They have the same c.
- All W ranks are the *world*. Each owns 1/W of the weights, gradients and state, as DeepSpeed lays it out.

The section's `levels.ranks_per_node` is w, and DeepSpeed's `zero_hpz_partition_size` likewise: to users a "node" is what shares
a copy. Where `levels.gradients` says nothing g is the ranks of a host, or w on one host alone (`LevelSettings.sum_ranks`).
`planner.network` has the ranks of a host beside these two.

w divides g, and g divides W. A hop of a collective is among the ranks that differ in one of the three numbers alone: a
(`Level.PAIR`, w ranks), b (`Level.NODE`, g/w ranks) or c (`Level.WORLD`, W/g ranks).

A unit's weights are W chunks of equal size: rank r owns chunk r. Here chunks are always ordered by (a, b, c) of their owners
(`Topology.order`), and not by rank. So every hop moves chunks that are neighbours in memory: the copy of a rank with number a
is the chunks of all owners with the same a.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ds_vertical.errors import ConfigError

# w by both names that a user may have written: `prepare` has moved the first one into the second
PAIR_KEY: Final = "zero_optimization.zero_hpz_partition_size (vertical_schedule.levels.ranks_per_node)"
_NODE_KEY: Final = "vertical_schedule.levels.gradients"


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

    def __post_init__(self) -> None:
        if self.node < 1 or self.world % self.node:
            raise ConfigError(
                f"{_NODE_KEY}: got {self.node}, which does not divide the {self.world} ranks; write a number that does"
            )
        if self.pair < 1 or self.node % self.pair:
            raise ConfigError(
                f"{PAIR_KEY}: got {self.pair}, which does not divide the {self.node} ranks that add their gradients first"
                f" ({_NODE_KEY}); write a number that does"
            )

    def width(self, level: Level) -> int:
        """The number of ranks of a hop: w, g/w or W/g."""
        return {Level.PAIR: self.pair, Level.NODE: self.node // self.pair, Level.WORLD: self.world // self.node}[level]

    def num_chunks(self, level: Level) -> int:
        """Chunks of a unit that a rank holds: W/w of a copy (PAIR), W/g of a node share (NODE), 1 of its own (WORLD)."""
        return {Level.PAIR: self.world // self.pair, Level.NODE: self.world // self.node, Level.WORLD: 1}[level]

    def hop(self, level: Level, rank: int) -> tuple[int, ...]:
        """The ranks with which `rank` has a hop of a level, itself among them, in ascending order."""
        step = {Level.PAIR: 1, Level.NODE: self.pair, Level.WORLD: self.node}[level]
        width = self.width(level)
        first = rank - rank // step % width * step
        return tuple(range(first, first + width * step, step))

    def hops(self, level: Level) -> tuple[tuple[int, ...], ...]:
        """All hops of a level, each once."""
        return tuple(sorted({self.hop(level, rank) for rank in range(self.world)}))

    @property
    def order(self) -> tuple[int, ...]:
        """The ranks, ordered by (a, b, c): the order of chunks in memory."""
        return tuple(
            c * self.node + b * self.pair + a
            for a in range(self.pair)
            for b in range(self.node // self.pair)
            for c in range(self.world // self.node)
        )

    def copy_order(self, rank: int) -> tuple[int, ...]:
        """The owners of the chunks of a rank's copy, in the order of the chunks: W/w neighbours of `order`."""
        return self._neighbours(rank, self.num_chunks(Level.PAIR))

    def node_share_order(self, rank: int) -> tuple[int, ...]:
        """The owners of the chunks of a rank's node share, in the order of the chunks: W/g neighbours of `order`."""
        return self._neighbours(rank, self.num_chunks(Level.NODE))

    def _neighbours(self, rank: int, count: int) -> tuple[int, ...]:
        """Those that hold the chunk of `rank`, where `order` is cut into runs of `count`."""
        order = self.order
        first = order.index(rank) // count * count
        return order[first : first + count]


def topology_of(hosts: Sequence[str], pair: int | None = None, node: int | None = None) -> Topology:
    """The topology of ranks on `hosts` (`host_id()` of each rank, in the order of the ranks).

    `pair`: w, as `zero_hpz_partition_size` gives it; None: the ranks of a host, or g where that is less. `node`: g; None: the
    ranks of a host. Raises ConfigError, with the names of hosts and the numbers of their ranks: where
    the ranks of a host are not neighbours, where hosts have unequal numbers of ranks, and for numbers that do not divide.
    """
    ranks = ranks_of_hosts(hosts, pair)
    per_host = len(hosts) // len(ranks)
    _refuse_numbers(per_host, pair, node, _named(ranks))
    pair = pair or min(per_host, node or per_host)
    return Topology(world=len(hosts), node=node or per_host, pair=pair)


def ranks_of_hosts(hosts: Sequence[str], pair: int | None = None) -> dict[str, list[int]]:
    """The ranks of each host. Raises ConfigError, in which `pair` is what was asked for, where the ranks of a host are not
    neighbours, and where hosts have unequal numbers of ranks."""
    ranks = {host: [rank for rank, each in enumerate(hosts) if each == host] for host in dict.fromkeys(hosts)}
    asked = "hostfile" if pair is None else f"{PAIR_KEY}: got {pair}, for which hosts share the ranks in another way"
    if any(numbers != list(range(numbers[0], numbers[-1] + 1)) for numbers in ranks.values()):
        raise ConfigError(
            f"{asked}: the ranks of a host must be neighbours, but {_named(ranks)}; list each host once in the hostfile, and"
            " let the launcher number the ranks host by host"
        )
    if len({len(numbers) for numbers in ranks.values()}) > 1:
        raise ConfigError(
            f"{asked}: hosts need equal numbers of ranks, but {_named(ranks)}; give all hosts the same slots= in the hostfile"
        )
    return ranks


def _refuse_numbers(per_host: int, pair: int | None, node: int | None, named: str) -> None:
    """Raise ConfigError for a w or a g that does not divide the ranks of a host. A g of several hosts would send sums over the
    link inside the hop that is to be within a host, and unquantised."""
    fitting = [n for n in range(1, per_host + 1) if not per_host % n]
    if pair is not None and pair not in fitting:
        raise ConfigError(
            f"{PAIR_KEY}: got {pair}, which does not divide the ranks of a host ({named}); write"
            f" {_advised_pairs(fitting, node if node in fitting else None, node is not None)}"
        )
    if node is not None and (node not in fitting or node % (pair or 1)):
        multiples = [str(n) for n in fitting if not n % (pair or 1)]
        beside_pair = "" if pair is None else f"{PAIR_KEY} {pair} and "
        raise ConfigError(
            f"{_NODE_KEY}: got {node}, which does not fit {beside_pair}the ranks of a host ({named}); write one of"
            f" {', '.join([*multiples, 'null'])}"
        )


def _advised_pairs(advised: Sequence[int], node: int | None, has_node: bool) -> str:
    """Numbers to write for w. `node`: a g that may stay; where there is one that may not, it has to go as well. Beside a w of 1
    no g may stand at all."""
    if not has_node:
        return f"one of {', '.join(map(str, advised))}"
    several = [n for n in advised if n > 1]
    beside = [n for n in several if node is not None and not node % n]
    if beside:
        return f"one of {', '.join(map(str, beside))}"
    return f"one of {', '.join(map(str, several))}, and {_NODE_KEY} null" if several else f"1, and {_NODE_KEY} null"


def _named(ranks: Mapping[str, Sequence[int]]) -> str:
    """Hosts by their names, with the numbers of their ranks. Of two of one name, the boot tells which is which."""
    names = [host.partition(" ")[0] for host in ranks]
    texts = []
    for (host, numbers), name in zip(ranks.items(), names, strict=True):
        boot = f" (boot {host.partition(' ')[2][:8]})" if names.count(name) > 1 else ""
        texts.append(f"{name}{boot} has rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}")
    return "; ".join(texts)
