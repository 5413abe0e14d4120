"""What every package shares: tiers, where things rest, the settings of a run, a model's sizes and a machine's rates.

A leaf: it imports `errors` only, so that each package may import it. It describes, and derives what follows from one
description alone; reading files and choosing values is done in `config` and `planner`.

[Note: a new tier] A tier is added to `Tier`, and to `RESTING_PLACES` for each kind that may rest there. Code that only has to
know whether bytes are read and written as files asks `Placement.in_files`, which follows from `IN_FILES`. Everything else that
has to know of it then fails until it says how: tables over all tiers are made by `per_tier`, which fails at import, and
branches end in `assert_never`, which the type checker refuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal, Self, TypeVar, assert_never

from ds_vertical.errors import CostsError

PRE: Final = "pre"
SUF: Final = "suf"
Unit = int | Literal["pre", "suf"]  # a layer's number; `pre`: all parameters outside the layers; `suf`: what follows the last
Order = Literal["vertical", "horizontal"]

_Value = TypeVar("_Value")
_MOST_LOAD: Final = 0.9  # of the host cores, which transfers can take: a computation beside them goes on


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
    """The tier of layer inputs and gradients between layers. `share`, `host_share`: of the micro-batches."""

    device: Tier | None
    share: float
    host_share: float

    @property
    def shares(self) -> Mapping[Tier, float]:
        """The shares of the micro-batches whose activations leave the device, per tier that they go to."""
        match self.device:
            case None | Tier.DEVICE:
                return {Tier.HOST: 0.0, Tier.SSD: 0.0}
            case Tier.HOST:
                return {Tier.HOST: self.share, Tier.SSD: 0.0}
            case Tier.SSD:
                return {Tier.HOST: self.host_share, Tier.SSD: self.share}
        assert_never(self.device)


@dataclass(frozen=True)
class SignalSettings:
    """The checkpoint that is saved when a signal asks the run to end: its folder, its tag (None: `global_step<n>`)."""

    save_dir: str
    tag: str | None


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run: the section `vertical_schedule` with every null replaced by its rule, or by what was chosen.

    `reasons` says for each key where its value comes from. `layers` stays None where the model is to be searched, `seed` where
    the caller has not given torch's yet. Each field is the key of that name: see `config.section`."""

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
    keep_gradients: bool
    host_memory_bytes: int | None
    nvme_paths: tuple[str, ...] | None
    activations: ActivationSettings
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


# ---- the machine


@dataclass(frozen=True)
class Machine:
    """Rates of one machine, as one rank sees them.

    `ssd_*_together_bytes_per_s`: with reads and writes under way at the same time; null: as alone. `copy_in`: host to
    device; `copy_host`: within host memory (null: no time). `one_memory`: host and device are one (the CPU accelerator):
    there are no copies, and compute, CPU Adam and casts share the host cores. `adam_elements_per_s`: CPU Adam on
    `adam_cores` cores (null: all), fp32 state in memory; `cast_elements_per_s`: fp32 to the parameters' dtype on as many
    (null: part of Adam's rate); `checksum_bytes_per_s`: the checksum of what is written, on one core (null: no time).
    `adam_core_share`: seconds of all host cores that a second of CPU Adam takes from what computes there, as measured
    (null: as `adam_cores` of them; counted where `one_memory`). `norm_elements_per_s`: the norm that stock takes of each
    summed gradient (null: no time). `ssd_core_s_per_byte`: seconds of a host core that a byte read or written takes from
    what computes there (null: none; counted where `one_memory`). Latencies are seconds per event.
    `from_dict` reads the JSON of `ds-vertical limits`.
    """

    ssd_read_bytes_per_s: float
    ssd_write_bytes_per_s: float
    adam_elements_per_s: float
    host_cores: int
    one_memory: bool
    copy_in_bytes_per_s: float | None = None
    copy_out_bytes_per_s: float | None = None
    copy_host_bytes_per_s: float | None = None
    ssd_read_together_bytes_per_s: float | None = None
    ssd_write_together_bytes_per_s: float | None = None
    cast_elements_per_s: float | None = None
    checksum_bytes_per_s: float | None = None
    norm_elements_per_s: float | None = None
    adam_cores: int | None = None
    adam_core_share: float | None = None
    ssd_core_s_per_byte: float | None = None
    ssd_latency_s: float = 0.0
    copy_latency_s: float = 0.0
    compute_latency_s: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            self._check(each.name, getattr(self, each.name), each.default is None)
        for lane in ("in", "out"):
            if not self.one_memory and getattr(self, f"copy_{lane}_bytes_per_s") is None:
                raise refuse("machine", f"copy_{lane}_bytes_per_s", None, "bytes per second, or one_memory: true")
        for lane in ("read", "write"):
            alone, together = (getattr(self, f"ssd_{lane}_{way}bytes_per_s") for way in ("", "together_"))
            if together is not None and together > alone:
                raise refuse("machine", f"ssd_{lane}_together_bytes_per_s", together, f"at most the rate alone, {alone}")
        if self.adam_cores is not None and self.adam_cores > self.host_cores:
            raise refuse("machine", "adam_cores", self.adam_cores, f"at most host_cores, {self.host_cores}, or null")

    @staticmethod
    def _check(key: str, value: object, optional: bool) -> None:
        if value is None and optional:
            return
        null = " or null" if optional else ""
        if key == "one_memory":
            if not isinstance(value, bool):
                raise refuse("machine", key, value, "true or false")
        elif key.endswith("_cores"):
            check_number("machine", key, value, 1, f"a number of cores, 1 or more{null}", whole=True)
        elif key.endswith("_share"):
            check_number("machine", key, value, 0.0, f"seconds per second, 0 or more{null}")
        elif key.endswith("_per_s"):
            check_number("machine", key, value, 1e-9, f"a rate above 0, per second{null}")
        else:
            check_number("machine", key, value, 0.0, "seconds, 0 or more")

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Read the object `{"machine": {FIELD: VALUE, ...}, ...}` or the inner object alone.

        Keys are the fields of this class with the units in their names; those with a default may be left out. Beside
        "machine", other keys (date, name, command) are allowed and ignored; inside it an unknown key is an error.
        Raises CostsError naming the key.
        """
        inner = values.get("machine", values)
        if not isinstance(inner, Mapping):
            raise refuse("limits", "machine", inner, "an object of rates")
        names = {each.name: each.default is MISSING for each in fields(cls)}
        unknown = sorted(set(inner) - set(names))
        missing = [name for name, required in names.items() if required and name not in inner]
        if unknown:
            raise CostsError(f"machine.{unknown[0]}: no such key; there are {', '.join(names)}")
        if missing:
            raise CostsError(f"machine.{missing[0]}: missing; run `ds-vertical limits` again, or write its value")
        return cls(**inner)

    def slowed(self, factor: float) -> Self:
        """This machine, when its host's cores take `factor` times as long for everything."""
        names = ("adam_elements_per_s", "cast_elements_per_s", "checksum_bytes_per_s", "norm_elements_per_s")
        rates = {name: rate / factor for name in names if (rate := getattr(self, name)) is not None}
        load = None if self.ssd_core_s_per_byte is None else self.ssd_core_s_per_byte * factor
        return replace(self, ssd_core_s_per_byte=load, compute_latency_s=self.compute_latency_s * factor, **rates)

    def shared(self, num_ranks: int) -> Self:
        """This machine as each of `num_ranks` ranks sees it, which all do the same at the same time: they share one SSD and one
        host, and each has a device of its own and a link to it."""
        names = ["adam_elements_per_s", "cast_elements_per_s", "checksum_bytes_per_s", "copy_host_bytes_per_s"]
        names += [f"ssd_{lane}_{way}bytes_per_s" for lane in ("read", "write") for way in ("", "together_")]
        names += ["norm_elements_per_s"] if self.one_memory else []
        return replace(self, **{name: rate / num_ranks for name in names if (rate := getattr(self, name)) is not None})

    def adam_s(self, elements: float, written_bytes: float) -> float:
        """Seconds of the cores of CPU Adam for a step: the update, the cast, and the checksums of what is written."""
        update = elements / self.adam_elements_per_s
        cast = elements / self.cast_elements_per_s if self.cast_elements_per_s else 0.0
        return update + cast + (written_bytes / self.checksum_bytes_per_s if self.checksum_bytes_per_s else 0.0)

    @property
    def adam_share(self) -> float:
        """Seconds of all host cores that a second of CPU Adam takes beside a computation: more than one where both at a time
        are slower than in turn."""
        if self.one_memory and self.adam_core_share is not None:
            return self.adam_core_share
        return (self.adam_cores or self.host_cores) / self.host_cores

    @property
    def least_adam_share(self) -> float:
        """`adam_share` in the best order: where both at a time are slower, in turn."""
        return min(1.0, self.adam_share)

    def ssd_load(self, bytes_per_s: float) -> float:
        """The share of the host cores that transfers at this rate take from the computation, where it runs on these."""
        load = (self.ssd_core_s_per_byte or 0.0) * bytes_per_s / self.host_cores
        return min(load, _MOST_LOAD) if self.one_memory else 0.0

    @property
    def read_together(self) -> float:
        """The SSD's read rate beside writes, against reads alone."""
        return (self.ssd_read_together_bytes_per_s or self.ssd_read_bytes_per_s) / self.ssd_read_bytes_per_s

    @property
    def write_together(self) -> float:
        """The SSD's write rate beside reads, against writes alone."""
        return (self.ssd_write_together_bytes_per_s or self.ssd_write_bytes_per_s) / self.ssd_write_bytes_per_s


# ---- the model


@dataclass(frozen=True)
class ModelShape:
    """A model as the schedule sees it: elements per unit, seconds per micro-batch, bytes.

    `forward_s`, `backward_s`: one layer (of largest size), one micro-batch; backward without the recompute, with the sum
    into the gradient. Smaller layers cost in proportion to their elements. `head_s`: suffix, loss and their backward.
    `activation_bytes`: what passes from a layer to the next for one micro-batch. `num_shards`: ranks that share each
    parameter. `state_bytes`: per element, fp32 master and two moments. `generations`: copies of the files of state and
    parameters on SSD (2 where steps may be discarded). `part_elements`: most elements of a piece that
    goes through the optimizer pipeline by itself (null: a unit or its part at once). `working_bytes`: what a layer needs on
    the device while it runs backward for one micro-batch. `files`: bytes of the parameter files of `pre` and of each layer on
    this rank, `gradients`: their elements that the optimizer steps, `slot_bytes`: of the largest piece's state (null: what
    placement, elements and `part_elements` say). Raises CostsError.
    """

    pre_elements: int
    layer_elements: tuple[int, ...]
    forward_s: float
    backward_s: float
    activation_bytes: int
    pre_forward_s: float = 0.0
    pre_backward_s: float = 0.0
    head_s: float = 0.0
    param_bytes: int = 2
    gradient_bytes: int = 4
    state_bytes: int = 12
    num_shards: int = 1
    generations: int = 1
    part_elements: int | None = None
    recompute_last: bool = True
    working_bytes: int = 0
    placement: Placement = Placement()
    files: tuple[int, ...] | None = None
    gradients: tuple[int, ...] | None = None
    slot_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.layer_elements:
            raise refuse("model", "layer_elements", self.layer_elements, "the elements of each layer, at least one")
        for elements in (self.pre_elements, *self.layer_elements):
            check_number("model", "layer_elements and pre_elements", elements, 0, "whole numbers, 0 or more", whole=True)
        for key in ("forward_s", "backward_s", "pre_forward_s", "pre_backward_s", "head_s"):
            check_number("model", key, getattr(self, key), 0.0, "seconds, 0 or more")
        for key in ("activation_bytes", "gradient_bytes", "state_bytes", "working_bytes"):
            check_number("model", key, getattr(self, key), 0, "bytes, 0 or more", whole=True)
        for key in ("param_bytes", "num_shards", "generations"):
            check_number("model", key, getattr(self, key), 1, "a whole number, 1 or more", whole=True)
        if self.part_elements is not None:
            check_number("model", "part_elements", self.part_elements, 1, "elements, 1 or more, or null", whole=True)

    @property
    def num_layers(self) -> int:
        """Of the schedule: each of `blocks_per_layer` blocks."""
        return len(self.layer_elements)

    @property
    def num_elements(self) -> int:
        """Of all units, on all ranks."""
        return self.pre_elements + sum(self.layer_elements)

    @property
    def unit_files(self) -> tuple[float, ...]:
        """Bytes of the parameter files of `pre` and of each layer on this rank."""
        each = self.param_bytes * self.in_files(TensorKind.PARAMETERS) / self.num_shards
        return tuple(elements * each for elements in self._units) if self.files is None else self.files

    @property
    def written_bytes(self) -> float:
        """Bytes written to SSD for each element that is stepped: its state, and the parameter."""
        return self.state_bytes * self.in_files(TensorKind.STATE) + self.param_bytes * self.in_files(TensorKind.PARAMETERS)

    def in_files(self, kind: TensorKind) -> float:
        """The share of `kind` that rests in files."""
        return self.placement.in_files(kind)

    @property
    def unit_gradients(self) -> tuple[int, ...]:
        """Elements of `pre` and of each layer that have a gradient, on all ranks."""
        return self._units if self.gradients is None else self.gradients

    @property
    def stepped_elements(self) -> int:
        """Of all units, on all ranks: those of parameters that are trained."""
        return sum(self.unit_gradients)

    @property
    def _units(self) -> tuple[int, ...]:
        return (self.pre_elements, *self.layer_elements)

    def elements(self, unit: Unit | None) -> int:
        """All elements of `pre` or of a layer. `suf` has none of its own. Raises CostsError for a layer it lacks."""
        if not isinstance(unit, int):
            return self.pre_elements if unit == PRE else 0
        if unit >= self.num_layers:
            raise CostsError(f"the schedule names layer {unit}; the model has {self.num_layers}")
        return self.layer_elements[unit]

    def shard(self, unit: Unit | None) -> float:
        """Elements of a unit that this rank keeps."""
        return self.elements(unit) / self.num_shards

    def stepped(self, unit: Unit | None) -> float:
        """Elements of a unit that this rank's optimizer steps."""
        if self.gradients is None or not self.elements(unit):
            return self.shard(unit)
        return self.gradients[1 + unit if isinstance(unit, int) else 0] / self.num_shards
