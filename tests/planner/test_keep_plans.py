"""What plans keep of a forward for its backward, at the settings of the benchmarks, and advice for what does not fit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ds_vertical.planner import linear_program, search
from ds_vertical.planner.candidate import Choice
from ds_vertical.planner.kept_activations import KeptShare, PolicyPoint
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.memory_timeline import changes
from ds_vertical.planner.model_shape import CountedMenu, CountedPoint, ModelSpec, Seconds
from ds_vertical.planner.search import Plan, PlanError, Task, choose
from ds_vertical.types import Tier

# One memory, two cores; the disk alone, and both directions together.
FULL = Machine(2.6e9, 3.73e9, 1.58e9, 2, True, None, None, 5e9, 1.46e9, 2.1e9, norm_elements_per_s=9.3e8, adam_core_share=0.999)
LIMITED = replace(
    FULL,
    ssd_read_bytes_per_s=3e8,
    ssd_write_bytes_per_s=5e8,
    ssd_read_together_bytes_per_s=None,
    ssd_write_together_bytes_per_s=None,
)


def spec(tokens: int) -> ModelSpec:
    """gpt_101m, with what `plan` counts of one of its blocks at so many tokens."""
    unit, flops = 2 * tokens * 1024, 2 * 12 * 1024**2 * tokens
    counted = (
        CountedPoint("free", 0, 0.32 * flops, 24 * unit, 22),
        CountedPoint("products", 9 * unit, 1.0 * flops, 75 * unit, 17),
        CountedPoint("everything", 18 * unit, 1.0 * flops, 122 * unit, 0),
    )
    menu = CountedMenu("GPTNeoXLayer", 8, flops, 122 * unit, counted)
    blocks = (12_596_224,) * 8
    return ModelSpec(
        "gpt_101m", tokens, "bf16", 559_104, blocks, 4_194_304, flops, 0, flops / 50, unit, 20 * unit, 4 * unit, (menu,)
    )


def plan(tokens: int, num_micro_batches: int, machine: Machine, host: float = 20e9, policy_free: bool = True) -> Plan:
    forward, backward = {8: (0.003, 0.0078), 512: (0.040, 0.090)}[tokens]
    pieces = Seconds(forward, backward, 0.0005, 0.0002, 0.001 if tokens == 8 else 0.02)
    task = Task(
        spec(tokens), tokens * num_micro_batches, lambda _: pieces, clip=0.0, micro_batch_size=1, flops_per_byte=20, keep=policy_free
    )
    return choose(task, machine, {Tier.DEVICE: None, Tier.HOST: host, Tier.SSD: 50e9})


def test_nothing_is_kept_where_the_ssd_decides() -> None:
    """The control: four micro-batches of 8 tokens at 300/500 MB/s."""
    found = plan(8, 4, LIMITED)
    assert found.chosen.choice.policy == "none" and found.chosen.choice.kept is None
    other = found.best_otherwise
    assert other is not None and other.estimate_s >= 0.99 * found.chosen.estimate_s  # what the runner-up loses is known


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "count", "most"), [(8, 16, 0.88), (512, 4, 0.85)])
def test_everything_is_kept_in_memory_where_the_cores_decide(tokens: int, count: int, most: float) -> None:
    kept, plain = plan(tokens, count, FULL), plan(tokens, count, FULL, policy_free=False)
    choice = kept.chosen.choice
    assert choice.policy == "everything" and choice.kept is not None and choice.kept.device == 1.0
    assert kept.chosen.estimate_s <= most * plain.chosen.estimate_s


@pytest.mark.slow
def test_where_memory_is_short_the_ssd_takes_what_is_kept_and_wears() -> None:
    kept, plain = plan(512, 6, LIMITED, host=1.35e9), plan(512, 6, LIMITED, host=1.35e9, policy_free=False)
    chosen = kept.chosen
    assert chosen.choice.kept is not None and chosen.choice.kept.ssd > 0
    cells = 6 * 6  # of the last two layers none
    assert chosen.traffic.kept_written == cells * chosen.choice.kept.point.num_bytes == chosen.traffic.kept_read
    assert chosen.traffic.written > plain.chosen.traffic.written
    assert chosen.estimate_s < 0.97 * plain.chosen.estimate_s
