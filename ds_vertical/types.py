"""What every package shares: tiers, where things rest, the settings of a run.

A leaf: it imports `errors` only, so that each package may import it. It describes, and derives what follows from one
description alone; reading files and choosing values is done in `config` and `planner`.

[Note: a new tier] A tier is added to `Tier`, and to `RESTING_PLACES` for each kind that may rest there. Code that only has to
know whether bytes are read and written as files asks `Placement.in_files`, which follows from `IN_FILES`. Everything else that
has to know of it then fails until it says how: tables over all tiers are made by `per_tier`, which fails where it lacks one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal, Self, TypeVar

from ds_vertical.errors import CostsError

PRE: Final = "pre"
SUF: Final = "suf"
REDUCED_TOGETHER: Final = 1 << 22  # elements of the parameters that one collective reduces, or one larger parameter
NORM_ELEMENTS: Final = 250_000_000  # of a gradient, of which stock takes the norm at a time
LARGE_GRADIENT: Final = 1 << 18  # elements from which on a gradient is added as soon as it is made
NORM_COPIED: Final = 1 << 22  # elements of a gradient in host memory up to which its norm is taken of a copy
# A layer's number, or a part of what lies outside the layers. `suf`: what follows the last layer, as a unit of parameters only
# where they are apart from the others (`outside_layers`); `pre`: all other parameters outside the layers.
Unit = int | Literal["pre", "suf"]
Order = Literal["vertical", "horizontal"]
OutsideLayers = Literal["resident", "fetched"]  # parameters outside the layers: there from end to end, or where they are used
Copies = Literal["rank", "node"]  # who keeps whole copies of the weights in steps of two halves
ActivationPolicy = Literal["none", "free", "products", "everything"]  # what a layer's forward keeps for its backward
HOLDING: Final = ("products", "everything")  # the policies with which bytes of it rest in a tier meanwhile
BELOW: Final[Mapping[ActivationPolicy, ActivationPolicy]] = (
    MappingProxyType(  # in the place of a policy that a block cannot have
        {"everything": "products", "products": "free", "free": "none"}
    )
)

_Value = TypeVar("_Value")


def point_name(policy: ActivationPolicy, outputs: int | None) -> str:
    """Of a point of a block's menu: the policy or, where a call keeps no more than so many products' results, those that save
    most operations for their bytes, the number behind it ("products_2")."""
    return policy if outputs is None else f"{policy}_{outputs}"


# ---- tiers


class Tier(StrEnum):
    """A kind of memory in which tensors rest between uses; the value is its spelling in JSON and on disk."""

    DEVICE = "device"
    HOST = "host"
    SSD = "ssd"


def per_tier(table: Mapping[Tier, _Value]) -> Mapping[Tier, _Value]:
    """`table` itself, read-only. Raises NotImplementedError where it says nothing of a tier; see [Note: a new tier]."""
    missing = [tier.value for tier in Tier if tier not in table]
    if missing:
        raise NotImplementedError(f"a table over all tiers says nothing of {', '.join(missing)}; add it there")
    return MappingProxyType(dict(table))


# Whether what rests in a tier lies in files, which are read ahead of a use and written after a change.
IN_FILES: Final = per_tier({Tier.DEVICE: False, Tier.HOST: False, Tier.SSD: True})
# How DeepSpeed spells a tier as "device" of its offload sections.
OFFLOAD_DEVICES: Final = per_tier({Tier.DEVICE: "none", Tier.HOST: "cpu", Tier.SSD: "nvme"})
TierBytes = Mapping[Tier, float | None]  # bytes of each tier that may be used; None: not limited, or not known


class TensorKind(StrEnum):
    """What rests in a tier. Gradients are those that wait for their step; activations what passes between two layers."""

    PARAMETERS = "parameters"
    STATE = "state"
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"


# Per kind the tiers in which it may rest. The first one has whatever no share puts elsewhere.
RESTING_PLACES: Final[Mapping[TensorKind, tuple[Tier, ...]]] = {
    TensorKind.PARAMETERS: (Tier.HOST, Tier.SSD),
    TensorKind.STATE: (Tier.HOST, Tier.SSD),
    TensorKind.GRADIENTS: (Tier.HOST, Tier.SSD),
    TensorKind.ACTIVATIONS: (Tier.DEVICE, Tier.HOST, Tier.SSD),
}
# Name of a share, as plans and run records spell it -> what it is of: parameters_on_ssd, ..., activations_on_ssd.
SHARE_NAMES: Final[Mapping[str, tuple[TensorKind, Tier]]] = {
    f"{kind}_on_{tier}": (kind, tier) for kind, (_, *others) in RESTING_PLACES.items() for tier in others
}


class Placement(Mapping[TensorKind, Mapping[Tier, float]]):
    """Per kind, the share in [0, 1] of it that rests in each tier; a kind's shares add up to 1. Cannot be changed.

    Shares of activations are of the micro-batches, each of which rests in one tier. Those of gradients are of the gradients
    that wait for their step.
    """

    def __init__(self, shares: Mapping[TensorKind, Mapping[Tier, float]] | None = None) -> None:
        """`shares`: what does not rest in a kind's first tier (`RESTING_PLACES`). A kind that it lacks: parameters and state
        are on SSD, gradients in host memory, activations on the device. Raises CostsError for shares that are none."""
        given = {**_USUAL_SHARES, **(shares or {})}
        self._shares = {kind: _complete_shares(kind, given[kind]) for kind in TensorKind}
        self._in_files = {
            kind: sum((share for tier, share in shares.items() if IN_FILES[tier]), 0.0) for kind, shares in self._shares.items()
        }

    @classmethod
    def of(cls, **shares: float) -> Self:
        """From shares by their names (`SHARE_NAMES`), such as `gradients_on_ssd=0.5`; the others are the usual ones."""
        given: dict[TensorKind, dict[Tier, float]] = {}
        for name, share in shares.items():
            kind, tier = SHARE_NAMES[name]
            given.setdefault(kind, {})[tier] = share
        return cls(given)

    def __getitem__(self, kind: TensorKind) -> Mapping[Tier, float]:
        return MappingProxyType(self._shares[kind])

    def __iter__(self) -> Iterator[TensorKind]:
        return iter(self._shares)

    def __len__(self) -> int:
        return len(self._shares)

    def __hash__(self) -> int:
        return hash(tuple(self.named().items()))

    def __repr__(self) -> str:
        return f"Placement.of({', '.join(f'{name}={share!r}' for name, share in self.named().items())})"

    def share(self, kind: TensorKind, tier: Tier) -> float:
        """The share of `kind` that rests in `tier`; 0 where it may not rest there."""
        return self._shares[kind].get(tier, 0.0)

    def away(self, kind: TensorKind) -> float:
        """The share of `kind` that does not rest in the first of its tiers."""
        first, *others = RESTING_PLACES[kind]
        return sum(self._shares[kind][tier] for tier in others)

    def in_files(self, kind: TensorKind) -> float:
        """The share of `kind` that rests in tiers of files (`IN_FILES`)."""
        return self._in_files[kind]

    def with_shares(self, kind: TensorKind, shares: Mapping[Tier, float]) -> Placement:
        """This placement with other shares of one kind; what `shares` does not name is in the kind's first tier."""
        return Placement({**{other: self._moved(other) for other in self._shares}, kind: shares})

    def named(self) -> dict[str, float]:
        """The shares under their names (`SHARE_NAMES`), as plans and run records have them."""
        return {name: self._shares[kind][tier] for name, (kind, tier) in SHARE_NAMES.items()}

    def _moved(self, kind: TensorKind) -> Mapping[Tier, float]:
        return {tier: self._shares[kind][tier] for tier in RESTING_PLACES[kind][1:]}


_USUAL_SHARES: Final[Mapping[TensorKind, Mapping[Tier, float]]] = {
    TensorKind.PARAMETERS: {Tier.SSD: 1.0},
    TensorKind.STATE: {Tier.SSD: 1.0},
    TensorKind.GRADIENTS: {},
    TensorKind.ACTIVATIONS: {},
}


def _complete_shares(kind: TensorKind, given: Mapping[Tier, float]) -> dict[Tier, float]:
    first, *others = RESTING_PLACES[kind]
    for tier, share in given.items():
        if tier not in others:
            raise CostsError(f"placement.{kind}: got a share for {tier}; write shares for {', '.join(others)}")
        check_share(f"placement.{kind}_on_{tier}", share)
    shares = {tier: given.get(tier, 0.0) for tier in others}
    away = sum(shares.values())
    if away > 1:
        last = others[-1]
        room = 1 - sum(shares[tier] for tier in others[:-1])
        raise refuse("placement", f"{kind}_on_{last}", shares[last], f"{room}")
    return {first: 1 - away, **shares}


# ---- the settings of a run


@dataclass(frozen=True)
class ActivationSettings:
    """The tier of layer inputs and gradients between layers. `share`, `host_share`: of the micro-batches. `keep`: what else of
    a layer's forward is kept for its backward (None: nothing so far), in the tier `keep_device` (None: see `is_open`).
    `keep_share`: of the cells, those that keep there; `keep_host_share`: further ones, which keep in host memory.
    `keep_outputs`: with "products", how many products' results a block's call keeps, see `point_name`; no key of the JSON."""

    device: Tier | None
    share: float
    host_share: float
    keep: ActivationPolicy | None = None
    keep_device: Tier | None = None
    keep_share: float = 1.0
    keep_host_share: float = 0.0
    keep_outputs: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether it is left to the run what is kept, or in which tier; that is settled at the start, or behind the first step.
        With a `keep_host_share` the others rest on the device."""
        return self.keep is None or (self.keep in HOLDING and self.keep_device is None and not self.keep_host_share)

    @property
    def kept_shares(self) -> Mapping[Tier, float]:
        """Of the cells (one layer of one micro-batch each), those that follow `keep`, by the tier where what they keep rests;
        empty where nothing is kept, and while that is open."""
        if self.keep == "none" or self.is_open:
            return {}
        return {Tier.HOST: self.keep_host_share, self.keep_device or Tier.DEVICE: self.keep_share}

    @property
    def shares(self) -> Mapping[Tier, float]:
        """The shares of the micro-batches whose activations leave the device, per tier that they go to."""
        shares = {Tier.DEVICE: (0.0, 0.0), Tier.HOST: (self.share, 0.0), Tier.SSD: (self.host_share, self.share)}
        on_host, on_ssd = per_tier(shares)[self.device or Tier.DEVICE]
        return {Tier.HOST: on_host, Tier.SSD: on_ssd}


@dataclass(frozen=True)
class LevelSettings:
    """Collectives over two levels: the ranks of a node, and the nodes. `ranks_per_node`: those that share a copy of the
    weights; 1: there is one level. `quantized_weights`: weights cross the link as INT8, `quantized_gradients`: gradients in
    `gradient_bits` (within a node, across; None: as they are), each in blocks of `block` elements with a scale of their own.
    `gradients`: ranks that add their gradients before these cross the link (None: see `sum_ranks`). `copy_share`: of the units
    that are fetched again in the backward, those whose copy the node keeps (None: all), on the device with
    `copy_on_device`."""

    ranks_per_node: int = 1
    quantized_weights: bool = False
    quantized_gradients: bool = False
    gradients: int | None = None
    copy_share: float | None = None
    copy_on_device: bool = False
    gradient_bits: tuple[int | None, int | None] = (None, 4)
    block: int = 256

    @property
    def are_on(self) -> bool:
        """Whether there are two levels."""
        return self.ranks_per_node > 1

    def sum_ranks(self, num_hosts: int, per_host: int) -> int:
        """`gradients`, where these ranks are on `num_hosts` hosts, `per_host` on each. None is all ranks of a host: a gradient
        then crosses the slow link once for a host, and not once for each copy that the host has. On one host no link is slow;
        there, and with one level, None is `ranks_per_node`."""
        if self.gradients is not None:
            return self.gradients
        return per_host if self.are_on and num_hosts > 1 else self.ranks_per_node

    @property
    def share(self) -> float | None:
        """The share of the units whose copy is kept; None where there is one level."""
        return None if not self.are_on else 1.0 if self.copy_share is None else self.copy_share


@dataclass(frozen=True)
class ElasticSettings:
    """How many micro-batches a rank brings to a step: at least and at most (None: what the others' least leaves), and of all
    ranks `total` (None: the JSON's number for each). `counts`: the log of a run whose counts are taken again."""

    min_micro_batches: int = 1
    max_micro_batches: int | None = None
    total: int | None = None
    counts: str | None = None

    def total_of(self, micro_batches: int, num_ranks: int) -> int:
        """Of all ranks in a step, where the JSON has `micro_batches` for each."""
        return micro_batches * num_ranks if self.total is None else self.total

    def most_of(self, micro_batches: int, num_ranks: int) -> int:
        """The most that one rank may bring."""
        left = self.total_of(micro_batches, num_ranks) - self.min_micro_batches * (num_ranks - 1)
        return left if self.max_micro_batches is None else min(left, self.max_micro_batches)


@dataclass(frozen=True)
class AccoSettings:
    """Steps of two halves. `copies`: who keeps the two copies of the weights, each rank whole ones or a node together."""

    copies: Copies = "rank"


@dataclass(frozen=True)
class SignalSettings:
    """The checkpoint that is saved when a signal asks the run to end: its folder, its tag (None: `global_step<n>`)."""

    save_dir: str
    tag: str | None


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run: the section `vertical_schedule` with every null replaced by its rule, or by what was chosen.

    `reasons` says for each key where its value comes from. `layers` stays None where the model is to be searched, `seed` where
    the caller has not given torch's yet. Each field is the key of that name: see
    `config.section`."""

    enabled: bool
    order: Order
    layers: tuple[str, ...] | None
    blocks_per_layer: int
    snake: bool
    overlap: bool
    prefetch_layers: int
    optimizer_delay: float | None
    optimizer_speculation: bool | None
    on_nonfinite: Literal["skip", "stop"]
    gradient_host_share: float
    optimizer_host_share: float
    optimizer_read_ahead_bytes: int | None
    optimizer_compression: bool
    keep_gradients: bool
    host_memory_bytes: int | None
    outside_layers: OutsideLayers
    nvme_paths: tuple[str, ...] | None
    activations: ActivationSettings
    levels: LevelSettings
    elastic: ElasticSettings | None
    acco: AccoSettings | None
    seed_micro_batches: bool
    seed: int | None
    trace: str | None
    progress: bool | None
    verify: bool
    self_check: bool | None
    on_signal: SignalSettings | None
    reasons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)


# ---- numbers from outside


def refuse(where: str, key: str, value: object, wanted: str) -> CostsError:
    """The error for a number that describes no machine or model: its path, the value found, and what to write instead."""
    return CostsError(f"{where}.{key}: got {value!r}; write {wanted}")


def check_number(where: str, key: str, value: object, least: float, wanted: str, *, whole: bool = False) -> None:
    """Raise CostsError unless `value` is a finite number, a `whole` one, and `least` or more."""
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or value < least:
        raise refuse(where, key, value, wanted)


def check_share(name: str, value: object) -> None:
    """Raise CostsError unless `value` is a share."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise CostsError(f"{name}: got {value!r}; write a share from 0 to 1")
