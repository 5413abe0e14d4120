"""What tests of the choice behind the first step are made of: a run's planner, a report, a first step with given numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from harness import base_config, start_process_group
from models import MixerModel

from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import load_section
from ds_vertical.engine.keeping.measured import MeasuredStep
from ds_vertical.engine.keeping.planner import KeepChoice, KeepPlanner
from ds_vertical.engine.memory_check import Forecast, groups_of
from ds_vertical.model.layers import map_layers
from ds_vertical.planner.model_shape import Seconds
from ds_vertical.types import ActivationPolicy, Tier

MIXER = partial(MixerModel, 4, 512, dropout=0.1)
COUNT = 4
MENU: dict[ActivationPolicy, tuple[float, float]] = {"free": (0.0, 0.01), "products": (2e6, 0.03), "everything": (6e6, 0.04)}
ROOM: dict[Tier, float | None] = {Tier.DEVICE: 1e9, Tier.HOST: 1e9, Tier.SSD: 1e12}


def config(folder: Path, place: str = "cpu", count: int = COUNT, **section: Any) -> dict[str, Any]:
    """Parameters and optimizer state at `place`; keys of the section."""
    return base_config(
        folder, num_micro_batches=count, dtype="fp32", params=place, optimizer=place, clip=0.0, section={"seed": 11, **section}
    )


def report(read: float = 2e9, write: float = 2e9, **machine: Any) -> dict[str, Any]:
    """Of a machine whose host is the device, unless `machine` has other fields."""
    rates = {"ssd_read_bytes_per_s": read, "ssd_write_bytes_per_s": write, "adam_elements_per_s": 1e10, "host_cores": 2}
    return {"machine": rates | {"one_memory": True} | machine, "rates": {"fp32_flops_per_s": 1e9}, "date": "2026-11-22"}


def step(block_s: float = 0.05, menu: Any = None, room: Any = None) -> MeasuredStep:
    """A first step whose blocks take so long in a forward, of which the menu saves its part."""
    menu = {policy: (size, saved * block_s / 0.05) for policy, (size, saved) in (MENU if menu is None else menu).items()}
    return MeasuredStep(Seconds(block_s, 2 * block_s, 0.0, 0.0, 0.0), 100_000, menu, ("some reason",), room or ROOM)


def planner(folder: Path, found: dict[str, Any] | None, place: str = "nvme", count: int = COUNT, **section: Any) -> KeepPlanner:
    """What chooses for a run of the mixer with this report."""
    start_process_group()
    made, network = config(folder, place, count, **section), MIXER()
    own = load_section(made)
    assert own is not None
    resolved = resolve(own)
    forecast = Forecast(map_layers(network, None), groups_of(network, None, None), made, resolved)
    return KeepPlanner(forecast, resolved, found, 4_000_000_000, 7)


def kept(choice: KeepChoice) -> tuple[Any, ...]:
    """What it keeps, and where."""
    settings = choice.settings
    return settings.keep, settings.keep_device, settings.keep_share, settings.keep_host_share
