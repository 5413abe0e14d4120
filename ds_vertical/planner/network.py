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

[Note: three levels] The table is of w = g = n: w ranks share a copy of the weights, g add their gradients first. Where these
differ, a collective over levels has up to three hops (`distributed.topology`): over w neighbours; over g/w ranks, each w behind
the one before; over W/g ranks, each g behind the one before. A hop of k ranks sends along a ring (weights), or from each to
each (gradients). A ring of c bytes a rank brings (k - 1) c into each of its ranks, over one edge into each node. From each to
each, c bytes come from each of the k - 1 others. So what the levels gain in bytes depends on where nodes end:

- g = n, w < n (Frontier's pairs of a node): the table's bytes between nodes, and more within a node for a FETCH out of a copy
  that has more in each rank: p/w.
- g > n: the second hop crosses the link with the sums of w ranks alone: q/w per rank, and not q/g.
- g < n: a node's own ranks are in the third hop, too.

[Note: memory of a node] On the CPU the ranks of a node have their parts of copies in memory that they share (`in_memory`;
`distributed.host_memory`). Then what is gathered of a copy that is kept moves over no link. Each rank copies it, in place of
the copy of what has come into parameters. What w ranks add first they add out of such memory, too, if it is not rounded
(`sums_in_memory`). Both take the cores what `limits --links` has measured there, or what a copy takes.

[Note: pairs] Where `pair_ranks` neighbours of a node have a faster link of their own (the two GCDs of a card on Frontier), a
hop among them alone is on it, "net_pair". A hop of more ranks counts as on the node's links, also what it moves within pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from ds_vertical.errors import CostsError
from ds_vertical.planner.machine import Machine
from ds_vertical.types import check_number

NetLane = Literal["net_pair", "net_local", "net_cross"]
LINKS: Final[dict[NetLane, str]] = {
    "net_pair": "links within a pair",
    "net_local": "links within a node",
    "net_cross": "links between nodes",
}
COPY_SHARES: Final = (1.0, 0.75, 0.5, 0.25, 0.0)  # that a search tries
_FP32_BYTES: Final = 4
_SCALE_BYTES: Final = 4 / 256  # of an element: a block's scale, as the section has blocks by default
INT8_BYTES: Final = 1 + _SCALE_BYTES  # of a weight, with `zero_quantized_weights`
INT4_BYTES: Final = 0.5 + _SCALE_BYTES  # of a gradient across nodes, with `zero_quantized_gradients`


@dataclass(frozen=True)
class Hop:
    """A collective, or a part of it, on one lane. `num_bytes`: into a node on "net_cross", else into a rank.
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
    those whose copy the node keeps, on the device from step to step with `stands`. `reduces_twice`: gloo's reduce-scatter is an
    all-reduce. Bytes of an element on the way: `weight_bytes` (null: as in memory), `gradient_bytes` within a node and across
    (null: as they are summed). `copy_ranks`, `sum_ranks`: w and g of [Note: three levels] (null: the ranks of a node); w
    divides the ranks of a node and g, g divides all ranks, and is a part or a multiple of a node. `pair_ranks`: see
    [Note: pairs]; they divide the ranks of a node. `in_memory`, `sums_in_memory`: see [Note: memory of a node].
    """

    num_nodes: int = 1
    ranks_per_node: int = 1
    levels: bool = False
    copy_share: float = 1.0
    reduces_twice: bool = False
    weight_bytes: float | None = None
    gradient_bytes: tuple[float | None, float | None] = (None, None)
    copy_ranks: int | None = None
    sum_ranks: int | None = None
    stands: bool = False
    pair_ranks: int = 1
    in_memory: bool = False
    sums_in_memory: bool = False

    def __post_init__(self) -> None:
        for key in ("num_nodes", "ranks_per_node", "pair_ranks"):
            check_number("network", key, getattr(self, key), 1, "a whole number, 1 or more", whole=True)
        in_turn = ((self.w, self.ranks_per_node), (self.w, self.g), (self.g, self.num_ranks))
        whole_nodes = math.gcd(self.g, self.ranks_per_node) == min(self.g, self.ranks_per_node)
        if not whole_nodes or any(part < 1 or whole % part for part, whole in in_turn):
            raise CostsError(
                f"network: copy_ranks {self.w} and sum_ranks {self.g} do not fit {self.num_nodes} nodes of"
                f" {self.ranks_per_node} ranks; copy_ranks divides the other two, sum_ranks all ranks"
            )
        if self.ranks_per_node % self.pair_ranks:
            raise CostsError(f"network: pair_ranks {self.pair_ranks} does not divide the {self.ranks_per_node} ranks of a node")

    @property
    def w(self) -> int:
        """Ranks that share a copy of the weights."""
        return self.copy_ranks or self.ranks_per_node

    @property
    def g(self) -> int:
        """Ranks that add their gradients before these cross the link."""
        return self.sum_ranks or self.ranks_per_node

    @property
    def num_ranks(self) -> int:
        """Of all nodes."""
        return self.num_nodes * self.ranks_per_node

    def with_ranks(self, per_node: int) -> Network:
        """The same with other ranks on each node."""
        pairs = math.gcd(per_node, self.pair_ranks)
        return replace(self, ranks_per_node=per_node, levels=self.levels and per_node > 1, pair_ranks=pairs)

    @property
    def with_less_memory(self) -> Network | None:
        """The same without copies, then with one level; None where that is what it has."""
        if not self.levels:
            return None
        return replace(self, copy_share=0.0) if self.copy_share else replace(self, levels=False)

    def gather(self, elements: float, element_bytes: float) -> tuple[Hop, ...]:
        """A FETCH over all ranks at once."""
        return self._ring(self.num_ranks, 1, elements * element_bytes / self.num_ranks)

    def local_gather(self, elements: float, element_bytes: float, kept: bool = True) -> tuple[Hop, ...]:
        """A FETCH from the copies of a node's ranks, which are `kept` or not."""
        return () if kept and reads_memory(self) else self._ring(self.w, 1, elements * element_bytes / self.w)

    def spread(self, elements: float, element_bytes: float, kept: bool = False) -> tuple[Hop, ...]:
        """A SPREAD: to the copy, which is `kept` or not, then to the whole unit out of it."""
        return self.to_copy(elements, element_bytes) + self.local_gather(elements, element_bytes, kept)

    def to_copy(self, elements: float, element_bytes: float) -> tuple[Hop, ...]:
        """What of a SPREAD makes the copy. A rank rounds its own part, and reads its copy."""
        sent, (w, g) = elements * (self.weight_bytes or element_bytes), (self.w, self.g)
        rounded = 0.0 if self.weight_bytes is None else elements * (1 / self.num_nodes + self.ranks_per_node / w)
        hops = self._ring(self.num_ranks // g, g, sent / self.num_ranks) + self._ring(g // w, w, sent / g)
        return (*(replace(hop, rounded=rounded) for hop in hops[:1]), *hops[1:])

    def reduce(self, elements: float, element_bytes: float) -> tuple[Hop, ...]:
        """A REDUCE: over the node with two levels, else over all ranks."""
        if not self.levels:
            twice = 2 if self.reduces_twice else 1
            return self._ring(self.num_ranks, 1, twice * elements * element_bytes / self.num_ranks)
        bits, (w, g) = self.gradient_bytes[0], (self.w, self.g)
        hops: tuple[Hop, ...] = ()
        for width, stride in ((1 if adds_in_memory(self) else w, 1), (g // w, w)):
            rounded = 0.0 if bits is None else 2 * elements * self.ranks_per_node / stride
            hops += self._each_to_each(width, stride, elements * (bits or element_bytes) / (width * stride), rounded)
        return hops

    def cross(self, elements: float, element_bytes: float) -> tuple[Hop, ...]:
        """A CROSS. Ranks round what they send, and read as much."""
        bits = self.gradient_bytes[1]
        rounded = 0.0 if bits is None else 2 * elements * self.ranks_per_node / self.g
        sent = elements * (bits or element_bytes) / self.num_ranks
        return self._each_to_each(self.num_ranks // self.g, self.g, sent, rounded)

    def sweep(self, elements: float, element_bytes: float, again: bool) -> tuple[Hop, ...]:
        """The hops of all FETCHes of a sweep, of so many elements; `again`: they have been fetched in the sweep before."""
        if not self.levels:
            return self.gather(elements, element_bytes)
        copied = self.copy_share * elements if again or reads_memory(self) else 0.0
        of_copies = self.local_gather(copied, element_bytes) if again else self.spread(copied, element_bytes, kept=True)
        return self.spread(elements - copied, element_bytes) + of_copies

    def _ring(self, width: int, stride: int, num_bytes: float) -> tuple[Hop, ...]:
        """A gather of `num_bytes` from each rank of a hop: as fast as the ring's slowest edge, where it crosses at all."""
        near, into_rank = _on_node(width, stride, self.ranks_per_node), (width - 1) * num_bytes
        received = into_rank * self.ranks_per_node
        if near == width:
            return _hop(_near_lane(self.pair_ranks, width * stride), into_rank, received)
        return _hop("net_cross", into_rank * self.ranks_per_node / near, received)

    def _each_to_each(self, width: int, stride: int, num_bytes: float, rounded: float) -> tuple[Hop, ...]:
        """`num_bytes` from each rank of a hop to each other one. `rounded`: see `Hop`."""
        near, ranks = _on_node(width, stride, self.ranks_per_node), self.ranks_per_node
        within, across = (near - 1) * num_bytes, (width - near) * num_bytes * ranks
        lane = "net_local" if near < width else _near_lane(self.pair_ranks, width * stride)
        first = _hop(lane, within, within * ranks, rounded)
        return first + _hop("net_cross", across, across, 0.0 if first else rounded)


def reads_memory(network: Network) -> bool:
    """Whether ranks read copies that are kept, and of which each has a part, in memory that they share."""
    return network.in_memory and network.w > 1


def adds_in_memory(network: Network) -> bool:
    """Whether the terms of the first sums are in memory that their ranks share."""
    return network.levels and network.sums_in_memory and network.w > 1 and network.gradient_bytes[0] is None


def is_rounded(network: Network) -> bool:
    """Whether weights or gradients are sent in fewer bits."""
    return any(each is not None for each in (network.weight_bytes, *network.gradient_bytes))


def sent_over_levels(elements: float, param_bytes: float, copy_ranks: int, rounded: float, window: int) -> float:
    """Bytes of a device beside the host that a unit's weights take on their way over levels, besides the full parameters: the
    part of a copy that `copy_ranks` share, and the chunks that are gathered of all parts. Parts of `window` units more may be
    there, by which the device is behind the host. `rounded`: numbers of one parameter that a rank rounds there, or reads,
    which takes three times their fp32 (`distributed.quantize`)."""
    return elements * param_bytes * (1 + (1 + window) / copy_ranks) + 3 * _FP32_BYTES * rounded


def with_pairs(network: Network, machine: Machine) -> Network:
    """The network with the pairs of a node that have a link of their own on this machine; see [Note: pairs]."""
    return replace(network, pair_ranks=math.gcd(network.ranks_per_node, machine.net_pair_ranks or 1))


def network_from_json(fields: Mapping[str, Any]) -> Network:
    """From `dataclasses.asdict` in JSON, which has no tuples."""
    return Network(**{**fields, "gradient_bytes": tuple(fields["gradient_bytes"])})


def other_networks(network: Network, what: Literal["ranks", "copies", "bits"]) -> Iterator[Network]:
    """What a search tries beside a network with levels: other w and g that divide a node, of two ranks and more (no copy of one
    rank's own is a level, and larger g move more over the link, see [Note: three levels]); fewer copies, and all ranks at once;
    or weights, gradients between nodes, or both rounded on their way."""
    if not network.levels:
        return
    if what == "ranks":
        both = ((w, g) for g in _divisors(network.ranks_per_node) for w in _divisors(g))
        yield from (replace(network, copy_ranks=w, sum_ranks=g) for w, g in both if (w, g) != (network.w, network.g))
    elif what == "copies":
        yield from (replace(network, copy_share=share) for share in COPY_SHARES if share < network.copy_share)
        yield replace(network, levels=False)
    else:
        bits = ((INT8_BYTES, None), (None, INT4_BYTES), (INT8_BYTES, INT4_BYTES))
        yield from (replace(network, weight_bytes=weights, gradient_bytes=(None, sums)) for weights, sums in bits)


def _divisors(number: int) -> Iterator[int]:
    """From 2 on."""
    return (n for n in range(2, number + 1) if number % n == 0)


def _on_node(width: int, stride: int, ranks_per_node: int) -> int:
    """Of a hop's ranks, which have numbers `stride` apart, those of one node."""
    return max(1, min(width, ranks_per_node // stride))


def _near_lane(pair_ranks: int, span: int) -> NetLane:
    """The links of a hop within a node, whose ranks are among `span` neighbours; see [Note: pairs]."""
    return "net_local" if pair_ranks % span else "net_pair"


def _hop(lane: NetLane, num_bytes: float, received: float, rounded: float = 0.0) -> tuple[Hop, ...]:
    return (Hop(lane, num_bytes, received, rounded),) if num_bytes else ()


def seconds_of(hop: Hop, machine: Machine) -> float:
    """Seconds of a hop on a machine whose links are idle; 0 where the machine says nothing of its links."""
    name = hop.lane.removeprefix("net_")
    rate, latency = getattr(machine, f"net_{name}_bytes_per_s"), getattr(machine, f"net_{name}_latency_s")
    return latency + hop.num_bytes / rate if rate else 0.0


def knows_links(machine: Machine, network: Network) -> bool:
    """Whether the machine says what each link carries that collectives of this network go over."""
    lanes = {hop.lane for hop in network.sweep(1.0, 1.0, again=False)}
    lanes |= {hop.lane for hop in (*network.reduce(1.0, 1.0), *(network.cross(1.0, 1.0) if network.levels else ()))}
    return all(getattr(machine, f"{lane}_bytes_per_s") is not None for lane in lanes)


@dataclass(frozen=True)
class LevelChoice:
    """What a plan says of levels, as keys of the section. `ranks_per_node`: w; `gradients`: g."""

    ranks_per_node: int
    gradients: int
    copy_share: float
    quantized_weights: bool = False
    quantized_gradients: bool = False

    @property
    def keys(self) -> dict[str, object]:
        """The section's `levels`, without the bits where nothing is rounded. `gradients` always stands there: its null depends
        on the hosts of the run."""
        rounded = {name: True for name in ("quantized_weights", "quantized_gradients") if getattr(self, name)}
        counts = {"ranks_per_node": self.ranks_per_node, "gradients": self.gradients}
        return {**counts, "copy_share": self.copy_share, **rounded}

    @property
    def num_rounded(self) -> int:
        """Of weights and gradients those that are sent with fewer bits."""
        return self.quantized_weights + self.quantized_gradients


def level_choice(network: Network | None) -> LevelChoice | None:
    """What a plan with this network says of levels; None where there is one level."""
    if network is None or not network.levels:
        return None
    rounded = network.weight_bytes is not None, network.gradient_bytes[1] is not None
    return LevelChoice(network.w, network.g, network.copy_share, *rounded)
