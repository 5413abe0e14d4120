"""What the collectives of a unit move over the links between ranks, and how long that takes.

[Note: volumes] W ranks on R nodes of n ranks; p bytes of a unit's weights, q bytes of its gradients, of all ranks together.

    levels   event            into a rank from its node      into a node from the others
    one      FETCH            -                              (W - 1)/W p: a ring has one edge into each node
    one      REDUCE           -                              (W - 1)/W q, twice where a reduce-scatter is an all-reduce (gloo)
    two      SPREAD           (n - 1)/n p                    (R - 1)/R p
    two      FETCH of a copy  (n - 1)/n p                    0
    two      REDUCE           (n - 1)/n q                    0
    two      CROSS            0                              (R - 1)/R q

On one node what one level moves comes into a rank from its node. Within a node all ranks receive at a time, each at its rate.
The link between nodes is one for all ranks of a node. Measured bytes agree with the table to 2 % (docs/multi-node.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from ds_vertical.planner.machine import Machine
from ds_vertical.types import check_number

NetLane = Literal["net_local", "net_cross"]
LINKS: Final[dict[NetLane, str]] = {"net_local": "links within a node", "net_cross": "links between nodes"}
COPY_SHARES: Final = (1.0, 0.75, 0.5, 0.25, 0.0)  # that a search tries


@dataclass(frozen=True)
class Hop:
    """A collective, or a part of it, on one lane. `num_bytes`: into a rank on "net_local", into a node on "net_cross".
    `received`: what all ranks of a node receive, from whomever. `rounded`: numbers that all ranks of a node round to fewer bits
    for it, or read from them."""

    lane: NetLane
    num_bytes: float
    received: float
    rounded: float = 0.0


@dataclass(frozen=True)
class Network:
    """How the ranks of a plan lie on nodes. Raises CostsError.

    `levels`: whether collectives have two levels, see [Note: volumes]. `copy_share`: of the units that are fetched again,
    those whose copy the node keeps. `reduces_twice`: gloo's reduce-scatter is an all-reduce. Bytes of an element on the way:
    `weight_bytes` (null: as in memory), `gradient_bytes` within a node and across (null: as they are summed).
    """

    num_nodes: int = 1
    ranks_per_node: int = 1
    levels: bool = False
    copy_share: float = 1.0
    reduces_twice: bool = False
    weight_bytes: float | None = None
    gradient_bytes: tuple[float | None, float | None] = (None, None)

    def __post_init__(self) -> None:
        for key in ("num_nodes", "ranks_per_node"):
            check_number("network", key, getattr(self, key), 1, "a whole number, 1 or more", whole=True)

    @property
    def num_ranks(self) -> int:
        """Of all nodes."""
        return self.num_nodes * self.ranks_per_node

    def with_ranks(self, per_node: int) -> Network:
        """The same with other ranks on each node."""
        return replace(self, ranks_per_node=per_node, levels=self.levels and per_node > 1)

    @property
    def with_less_memory(self) -> Network | None:
        """The same without copies, then with one level; None where that is what it has."""
        if not self.levels:
            return None
        return replace(self, copy_share=0.0) if self.copy_share else replace(self, levels=False)

    def gather(self, elements: float, element_bytes: float) -> tuple[Hop, ...]:
        """A FETCH over all ranks at once."""
        return self._ring(elements * element_bytes)

    def local_gather(self, elements: float, element_bytes: float) -> tuple[Hop, ...]:
        """A FETCH from the copies of a node's ranks."""
        return self._within(elements * element_bytes)

    def spread(self, elements: float, element_bytes: float) -> tuple[Hop, ...]:
        """A SPREAD: over the nodes, then over the node. A rank rounds its own part, and reads that of all nodes."""
        rounded = 0.0 if self.weight_bytes is None else elements * (1 + 1 / self.num_nodes)
        across = self._across(elements * (self.weight_bytes or element_bytes), rounded)
        return across + self._within(elements * element_bytes)

    def reduce(self, elements: float, element_bytes: float) -> tuple[Hop, ...]:
        """A REDUCE: over the node with two levels, else over all ranks."""
        if self.levels:
            within = self.gradient_bytes[0]
            rounded = 0.0 if within is None else 2 * elements * self.ranks_per_node
            return self._within(elements * (within or element_bytes), rounded)
        return self._ring(elements * element_bytes * (2 if self.reduces_twice else 1))

    def cross(self, elements: float, element_bytes: float) -> tuple[Hop, ...]:
        """A CROSS. Ranks round what they send, and read as much."""
        across = self.gradient_bytes[1]
        return self._across(elements * (across or element_bytes), 0.0 if across is None else 2 * elements)

    def sweep(self, elements: float, element_bytes: float, again: bool) -> tuple[Hop, ...]:
        """The hops of all FETCHes of a sweep, of so many elements; `again`: they have been fetched in the sweep before."""
        if not self.levels:
            return self.gather(elements, element_bytes)
        copied = self.copy_share * elements if again else 0.0
        return self.spread(elements - copied, element_bytes) + self.local_gather(copied, element_bytes)

    def _ring(self, num_bytes: float) -> tuple[Hop, ...]:
        into_rank = (self.num_ranks - 1) / self.num_ranks * num_bytes
        return _hop("net_cross" if self.num_nodes > 1 else "net_local", into_rank, into_rank * self.ranks_per_node)

    def _within(self, num_bytes: float, rounded: float = 0.0) -> tuple[Hop, ...]:
        into_rank = (self.ranks_per_node - 1) / self.ranks_per_node * num_bytes
        return _hop("net_local", into_rank, into_rank * self.ranks_per_node, rounded)

    def _across(self, num_bytes: float, rounded: float) -> tuple[Hop, ...]:
        into_node = (self.num_nodes - 1) / self.num_nodes * num_bytes
        return _hop("net_cross", into_node, into_node, rounded)


def _hop(lane: NetLane, num_bytes: float, received: float, rounded: float = 0.0) -> tuple[Hop, ...]:
    return (Hop(lane, num_bytes, received, rounded),) if num_bytes else ()


def seconds_of(hop: Hop, machine: Machine) -> float:
    """Seconds of a hop on a machine whose links are idle; 0 where the machine says nothing of its links."""
    name = hop.lane.removeprefix("net_")
    rate, latency = getattr(machine, f"net_{name}_bytes_per_s"), getattr(machine, f"net_{name}_latency_s")
    return latency + hop.num_bytes / rate if rate else 0.0


def copy_share(network: Network | None) -> float | None:
    """Of the units that are fetched again, those whose copy the node keeps; None where there is one level."""
    return network.copy_share if network is not None and network.levels else None
