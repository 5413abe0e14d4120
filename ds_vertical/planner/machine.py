"""A machine as a plan needs it: its rates, the bytes that its tiers have free, operations per second.

`ds-vertical limits` measures them; for machines that nobody here has the package ships files with assumed numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Self

from ds_vertical.errors import CostsError
from ds_vertical.types import Tier, TierBytes, check_number, refuse

_MOST_LOAD: Final = 0.9  # of the host cores, which transfers can take: a computation beside them goes on
_EVEN: Final = 0.5  # of the host cores, which a computation and collectives have where each wants more: the kernel's division
# What collectives take of the cores
NET_CORES: Final = (
    "net_core_s_per_byte",
    "net_one_level_core_s_per_byte",
    "net_round_core_s_per_element",
    "net_memory_core_s_per_byte",
)
# Of links: the rate alone, and that while ranks compute
_BESIDE: Final = {f"net_{link}_bytes_per_s": f"net_{link}_beside_bytes_per_s" for link in ("local", "cross")}
LAUNCHES: Final = ("launch_s", "schedule_forward_s", "schedule_backward_s")  # of the thread that launches
SHIPPED: Final = Path(__file__).resolve().parent / "machines"
_PAIR_RANKS: Final = "pair_ranks"  # of links, the one that is a whole number
_CAPACITIES: Final = {tier: f"{tier}_bytes" for tier in Tier}  # the keys of "capacity"


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
    what computes there (null: none; counted where `one_memory`). `net_local_bytes_per_s`: what comes into a rank from the
    others of its node while all receive; `net_cross_bytes_per_s`: into a node from the others (null: links take no time; see
    `network`). `net_local_beside_bytes_per_s`, `net_cross_beside_bytes_per_s`: the same while ranks compute on the host's cores
    (null: as else; counted where `one_memory`). `net_pair_bytes_per_s`: as the first, of `net_pair_ranks` neighbours that have
    a faster link of their own. `net_core_s_per_byte`: as `ssd_core_s_per_byte`, for a byte that a rank receives over levels;
    `net_one_level_core_s_per_byte`: over all ranks at once (null: the same), where gloo adds what it receives piece by piece,
    while over levels it is added once all of it has come. `net_round_core_s_per_element`: seconds of a host core for a number
    that is rounded to fewer bits, or read from them, for a collective (null: none; counted where `one_memory`).
    `net_memory_core_s_per_byte`: the same for a byte that a rank gathers out of memory that its host's ranks share, or adds in
    it (null: as a copy within host memory). Latencies are seconds per event. `launch_s`: seconds of the host's thread to issue
    a block's forward to a device beside it, which computes meanwhile; a backward takes two of them, its recompute one.
    `schedule_forward_s`, `schedule_backward_s`: what the schedule's own code takes on that thread on top of these (where
    `one_memory`, on top of the computation), for a block's forward and backward of a micro-batch; the defaults are what
    `benchmarks/launch.py` has found on one core. `compute_latency_s` is what that code takes of a smallest event.
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
    net_pair_ranks: int | None = None
    net_pair_bytes_per_s: float | None = None
    net_local_bytes_per_s: float | None = None
    net_cross_bytes_per_s: float | None = None
    net_local_beside_bytes_per_s: float | None = None
    net_cross_beside_bytes_per_s: float | None = None
    net_core_s_per_byte: float | None = None
    net_one_level_core_s_per_byte: float | None = None
    net_round_core_s_per_element: float | None = None
    net_memory_core_s_per_byte: float | None = None
    net_pair_latency_s: float = 0.0
    net_local_latency_s: float = 0.0
    net_cross_latency_s: float = 0.0
    ssd_latency_s: float = 0.0
    copy_latency_s: float = 0.0
    compute_latency_s: float = 0.0
    launch_s: float = 0.0
    schedule_forward_s: float = 0.0006
    schedule_backward_s: float = 0.0009

    def __post_init__(self) -> None:
        for each in fields(self):
            self.check_value(each.name, getattr(self, each.name), each.default is None)
        for lane in ("in", "out"):
            if not self.one_memory and getattr(self, f"copy_{lane}_bytes_per_s") is None:
                raise refuse("machine", f"copy_{lane}_bytes_per_s", None, "bytes per second, or one_memory: true")
        for lane in ("read", "write"):
            alone, together = (getattr(self, f"ssd_{lane}_{way}bytes_per_s") for way in ("", "together_"))
            if together is not None and together > alone:
                raise refuse("machine", f"ssd_{lane}_together_bytes_per_s", together, f"at most the rate alone, {alone}")
        for rate, key in _BESIDE.items():
            alone, beside = getattr(self, rate), getattr(self, key)
            if beside is not None and (alone is None or beside > alone):
                raise refuse("machine", key, beside, f"at most {rate}, {alone}" if alone else f"null, as {rate} is")
        if (self.net_pair_ranks is None) != (self.net_pair_bytes_per_s is None):
            raise refuse("machine", "net_pair_ranks", self.net_pair_ranks, "a number with net_pair_bytes_per_s, or neither")
        if self.adam_cores is not None and self.adam_cores > self.host_cores:
            raise refuse("machine", "adam_cores", self.adam_cores, f"at most host_cores, {self.host_cores}, or null")

    @staticmethod
    def check_value(key: str, value: object, optional: bool) -> None:
        """Raise CostsError unless the field `key` takes the value."""
        if value is None and optional:
            return
        null = " or null" if optional else ""
        if key == "one_memory":
            if not isinstance(value, bool):
                raise refuse("machine", key, value, "true or false")
        elif key.endswith("_cores"):
            check_number("machine", key, value, 1, f"a number of cores, 1 or more{null}", whole=True)
        elif key.endswith("_ranks"):
            check_number("machine", key, value, 2, f"a number of ranks, 2 or more{null}", whole=True)
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
        costs = ("ssd_core_s_per_byte", *NET_CORES)
        rates |= {name: cost * factor for name in costs if (cost := getattr(self, name)) is not None}
        rates |= {name: getattr(self, name) * factor for name in ("compute_latency_s", *LAUNCHES)}
        return replace(self, **rates)

    def with_links(self, links: Mapping[str, float]) -> Self:
        """This machine with what `ds-vertical limits --links` has measured. Raises CostsError naming the key."""
        _refuse_links(links)
        return replace(self, **link_fields(links))

    def shared(self, num_ranks: int) -> Self:
        """This machine as each of `num_ranks` ranks sees it, which all do the same at the same time: they share one SSD and one
        host, and each has a device of its own and a link to it. Where they compute on the host's cores, the schedule's own
        code in more ranks than cores waits for its turn."""
        names = ["adam_elements_per_s", "cast_elements_per_s", "checksum_bytes_per_s", "copy_host_bytes_per_s"]
        names += [f"ssd_{lane}_{way}bytes_per_s" for lane in ("read", "write") for way in ("", "together_")]
        names += ["norm_elements_per_s"] if self.one_memory else []
        rates = {name: rate / num_ranks for name in names if (rate := getattr(self, name)) is not None}
        turns = max(1.0, num_ranks / self.host_cores) if self.one_memory else 1.0
        own = {name: turns * getattr(self, name) for name in ("schedule_forward_s", "schedule_backward_s", "compute_latency_s")}
        return replace(self, **rates, **own)

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

    def load(self, ssd_bytes_per_s: float) -> float:
        """The share of the host cores that transfers at this rate take from the computation, where it runs on these."""
        cores = (self.ssd_core_s_per_byte or 0.0) * ssd_bytes_per_s
        return min(cores / self.host_cores, _MOST_LOAD) if self.one_memory else 0.0

    def net_core_s(self, received: float, levels: bool) -> float:
        """Seconds of a host core that so many bytes take which ranks receive, over levels or over all ranks at once."""
        each = self.net_core_s_per_byte if levels else self.net_one_level_core_s_per_byte or self.net_core_s_per_byte
        return received * (each or 0.0) * self.one_memory

    def link_beside(self, lane: str) -> float:
        """The part of its speed that a link has while ranks compute on the host's cores; a pair's has that of its node."""
        lane = "net_local" if lane == "net_pair" else lane
        alone, beside = (getattr(self, f"{lane}_{way}bytes_per_s") for way in ("", "beside_"))
        return beside / alone if self.one_memory and alone and beside else 1.0

    def divided(self, ssd_bytes_per_s: float, net_cores: float, computes: bool) -> tuple[float, float]:
        """The parts of its own speed that a computation, and that collectives have, with the SSD at this speed of its own, and
        collectives that at theirs need so many cores. Those that need less than the half of all cores keep their speed."""
        if not self.one_memory:
            return 1.0, 1.0
        wanted = net_cores / self.host_cores
        taken = min(wanted, _EVEN if computes else 1.0)
        left = 1 - min(self.load(ssd_bytes_per_s) + taken, _MOST_LOAD)
        return left, taken / wanted if wanted else 1.0

    @property
    def read_together(self) -> float:
        """The SSD's read rate beside writes, against reads alone."""
        return (self.ssd_read_together_bytes_per_s or self.ssd_read_bytes_per_s) / self.ssd_read_bytes_per_s

    @property
    def write_together(self) -> float:
        """The SSD's write rate beside reads, against writes alone."""
        return (self.ssd_write_together_bytes_per_s or self.ssd_write_bytes_per_s) / self.ssd_write_bytes_per_s


@dataclass(frozen=True)
class Profile:
    """A machine's rates and sizes.

    `capacity`: bytes that training may take of each tier of the whole machine, None where that is not known. `flops_per_s`: by
    dtype, as matrix products reach it. `assumed`: what the numbers rest on where nobody measured them. `aio`: the settings that
    were fastest, None where none were tried. `memory_bytes_per_s`: of the device's memory. `process_bytes`: of host memory,
    that a process holds beside its model; None where nobody has measured them.
    """

    name: str
    machine: Machine
    capacity: TierBytes
    flops_per_s: Mapping[str, float]
    assumed: tuple[str, ...] = ()
    date: str | None = None
    aio: Mapping[str, object] | None = None
    memory_bytes_per_s: float | None = None
    process_bytes: float | None = None

    def flops_per_byte(self, dtype: str) -> float:
        """Operations of matrix products in the time of a byte that the device reads or writes; 0 where that is not known."""
        copied = self.machine.copy_host_bytes_per_s if self.machine.one_memory else None
        rate = self.memory_bytes_per_s or (2 * copied if copied else None)  # a copy reads and writes
        return self.flops_per_s.get(dtype, 0.0) / rate if rate else 0.0

    @classmethod
    def from_dict(cls, name: str, report: Mapping[str, Any]) -> Self:
        """From the report of `ds-vertical limits`, or a shipped file. Raises CostsError naming the key."""
        capacity = report.get("capacity")
        capacity = {} if capacity is None else capacity
        if not isinstance(capacity, Mapping):
            raise CostsError(f"capacity: got {capacity!r}; write an object with {', '.join(_CAPACITIES.values())}")
        for key in _CAPACITIES.values():
            if capacity.get(key) is not None:
                check_number("capacity", key, capacity[key], 1, "bytes, 1 or more, or null")
        rates: Mapping[str, Any] = report.get("rates") or {}
        speeds = {key.removesuffix("_flops_per_s"): value for key, value in rates.items() if key.endswith("_flops_per_s")}
        for dtype, value in speeds.items():
            check_number("rates", f"{dtype}_flops_per_s", value, 1.0, "operations per second")
        sizes = {tier: capacity.get(key) for tier, key in _CAPACITIES.items()}
        assumed = tuple(report.get("assumed") or ())
        further = {key: rates.get(key) for key in ("memory_bytes_per_s", "process_bytes")}
        for key, value in further.items():
            if value is not None:
                check_number("rates", key, value, 1.0, "bytes per second, or null" if "_per_s" in key else "bytes, or null")
        return cls(name, Machine.from_dict(report), sizes, speeds, assumed, report.get("date"), report.get("aio"), **further)


def shipped() -> list[str]:
    """Names of the machines that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def read_profile(name: str) -> Profile:
    """A shipped machine by its name, or a file of `ds-vertical limits --out`. Raises CostsError."""
    path = SHIPPED / f"{name}.json" if name in shipped() else Path(name)
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CostsError(
            f"--machine {name}: no such file, and no machine of that name ({', '.join(shipped())}); write one of these, or the"
            " path of a file that `ds-vertical limits --out` has written"
        ) from None
    except (OSError, ValueError) as error:
        raise CostsError(f"--machine {name}: {error}; write the path of a file of `ds-vertical limits --out`") from error
    if not isinstance(report, dict):
        raise CostsError(f"--machine {name}: no object; write the path of a file of `ds-vertical limits --out`")
    return Profile.from_dict(path.stem, report)


def link_fields(links: Mapping[str, float]) -> dict[str, float | None]:
    """The fields of a machine that `links` decide: a rate beside a computation belongs to the rate alone that it came with."""
    given = {f"net_{name}": value for name, value in links.items()}
    return {key: None for rate, key in _BESIDE.items() if rate in given} | given


def _refuse_links(links: Mapping[str, float]) -> None:
    """Raise CostsError for a key that a machine has not, or a number that none has."""
    known = {each.name for each in fields(Machine)}
    if unknown := sorted(name for name in links if f"net_{name}" not in known):
        raise CostsError(f"links.{unknown[0]}: no such key; run `ds-vertical limits --links` again")
    for name, value in links.items():
        Machine.check_value(f"net_{name}", value, optional=False)


def read_links(path: Path) -> dict[str, float]:
    """What a file of `ds-vertical limits --links --out` has measured, as `Machine.with_links` takes it. Raises CostsError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["links"].items()
        links = {name: value if name == _PAIR_RANKS else float(value) for name, value in found}
        _refuse_links(links)
        return links
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        advice = "write the path of a file of `ds-vertical limits --links --out`"
        raise CostsError(f"--links {path}: {type(error).__name__}: {error}; {advice}") from error
