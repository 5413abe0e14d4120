"""Early steps before the norm is known: kept where they came true, redone where not, the same bits either way."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import Run, assert_identical, base_config, run_arm, small_buffers
from models import tiny_neox, token_batches

from ds_vertical.offload.speculation import StepTiming

BUILD = partial(tiny_neox, num_layers=3)


def arm(folder: Path, clip: float, vertical: bool, dtype: str = "fp32", **section: Any) -> tuple[Run, list[tuple[bool, bool]]]:
    """A run of three steps, and for each whether it was tried early and whether that came true."""
    seen: list[tuple[bool, bool]] = []
    note = StepTiming.note

    def noted(self: StepTiming, tried: bool, hit: bool) -> None:
        seen.append((tried, hit))
        note(self, tried, hit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTiming, "note", noted)
        config = small_buffers(base_config(folder, dtype=dtype, clip=clip, section=section), 1_100_000)
        return run_arm(config, BUILD, token_batches(3, 3, rows=1, shortest=4), vertical=vertical), seen


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("dtype", "delay", "clip"),
    [
        pytest.param("fp32", 0.0, None, id="0.0-both"),
        pytest.param("bf16", 0.0, None, id="0.0-both-bf16", marks=SLOW),
        pytest.param("bf16", 0.4, None, id="0.4-both", marks=SLOW),
        pytest.param("bf16", 0.0, 1.0, id="0.0-all-miss", marks=SLOW),
        pytest.param("bf16", 0.4, 1.0, id="0.4-all-miss", marks=SLOW),
        pytest.param("bf16", 0.0, 1e3, id="0.0-all-hit", marks=SLOW),
        pytest.param("bf16", 0.4, 1e3, id="0.4-all-hit", marks=SLOW),
    ],
)
def test_bits_are_stocks_whether_or_not_it_comes_true(tmp_path: Path, clip: float | None, delay: float, dtype: str) -> None:
    if clip is None:
        norms = sorted(arm(tmp_path, 1e3, vertical=False, dtype=dtype)[0].norms)
        clip = (norms[0] + norms[1]) / 2
    stock, _ = arm(tmp_path, clip, vertical=False, dtype=dtype)
    vertical, seen = arm(tmp_path, clip, vertical=True, dtype=dtype, optimizer_speculation=True, optimizer_delay=delay)
    assert_identical(stock, vertical)
    assert seen == [(True, norm < clip) for norm in stock.norms]
    if clip not in (1.0, 1e3):
        assert {hit for _, hit in seen} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("every", [2, None])
def test_the_hit_rate_is_printed_with_the_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str], every: int | None) -> None:
    config = base_config(tmp_path, dtype="fp32", clip=1e3, section={"optimizer_speculation": True}, steps_per_print=2)
    small_buffers(config, 1_100_000)
    if every is None:
        del config["steps_per_print"]  # DeepSpeed's default, with which it prints no steps
    run_arm(config, BUILD, token_batches(3, 3, rows=1, shortest=4), vertical=True)
    lines = [line for line in capfd.readouterr().out.splitlines() if "tried early" in line]
    assert lines == (["ds_vertical: step 2: 100% of the steps tried early came true"] if every else [])


def test_history_decides_when_nobody_does(tmp_path: Path) -> None:
    """The first step is never tried; without clipping the second is, with clipping none."""
    _, calm = arm(tmp_path, 1e3, vertical=True)
    _, clipped = arm(tmp_path, 1.0, vertical=True)
    assert calm == [(False, True), (True, True), (True, True)]
    assert clipped == [(False, False)] * 3


def test_the_rate_follows_the_last_steps() -> None:
    timing = StepTiming(None, None, certain=False, in_files=True)
    assert not timing.early and timing.hit_rate is None
    for _ in range(20):
        timing.note(tried=timing.early, hit=True)
    assert timing.early and timing.hit_rate == 1.0
    misses = 0
    while timing.early:
        timing.note(tried=True, hit=False)
        misses += 1
    assert 4 <= misses <= 9
    assert timing.hit_rate == pytest.approx(19 / (19 + misses))


@pytest.mark.parametrize(
    ("arguments", "possible", "delay", "leaves"),
    [
        ((None, None, True, True), True, 0.25, True),
        ((None, None, False, True), True, 0.25, True),
        ((None, False, False, True), False, 1.0, True),
        ((None, None, True, False), False, 1.0, True),
        ((0.0, False, False, True), False, 0.0, False),
        ((0.0, None, True, True), True, 0.0, True),
        ((1.0, True, False, True), False, 1.0, True),
    ],
)
def test_what_settings_allow(arguments: tuple[Any, ...], possible: bool, delay: float, leaves: bool) -> None:
    timing = StepTiming(*arguments)
    assert (timing.possible, timing.delay, timing.leaves_steps) == (possible, delay, leaves)
    timing.give_up()
    assert not timing.early
