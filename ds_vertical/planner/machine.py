"""A machine as a plan needs it: its rates, the bytes that its tiers have free, operations per second.

`ds-vertical limits` measures them; for machines that nobody here has the package ships files with assumed numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from ds_vertical.errors import CostsError
from ds_vertical.types import Machine, Tier, TierBytes, check_number

SHIPPED: Final = Path(__file__).resolve().parent / "machines"
_CAPACITIES: Final = {tier: f"{tier}_bytes" for tier in Tier}  # the keys of "capacity"


@dataclass(frozen=True)
class Profile:
    """A machine's rates and sizes.

    `capacity`: bytes that training may take of each tier of the whole machine, None where that is not known. `flops_per_s`: by
    dtype, as matrix products reach it. `assumed`: what the numbers rest on where nobody measured them. `aio`: the settings that
    were fastest, None where none were tried.
    """

    name: str
    machine: Machine
    capacity: TierBytes
    flops_per_s: Mapping[str, float]
    assumed: tuple[str, ...] = ()
    date: str | None = None
    aio: Mapping[str, object] | None = None

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
        return cls(name, Machine.from_dict(report), sizes, speeds, assumed, report.get("date"), report.get("aio"))


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
