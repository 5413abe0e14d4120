"""fp16 with a loss scale that follows overflows, against stock: skipped steps, scales and every bit of the result.

Where there is no GPU the CPU does the arithmetic, which torch can; DeepSpeed only takes fp16 there for a processor that is
fast at it, so both arms are told that it is.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_identical, base_config, contents, differing, read_weights, run_arm, running
from models import MixerModel, token_batches

from ds_vertical.errors import CheckpointError

STEPS = 6
MIXER = partial(MixerModel, 3, 768, dropout=0.1)  # each matrix over 1 MiB
# 2^21 times a gradient is too large for fp16: halved (hysteresis 1) until it fits, doubled after every second good step
SCALE = {"enabled": True, "initial_scale_power": 21, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 1}
STATIC = {"enabled": True, "loss_scale": 128}


pytestmark = pytest.mark.usefixtures("fp16_allowed")


def scales_of(arm: list[float]) -> Any:
    return lambda engine, _: arm.append(float(engine.optimizer.cur_scale))


@pytest.mark.parametrize(
    ("clip", "section"),
    [
        (0.0, {}),
        (1.0, {}),
        pytest.param(0.0, {"optimizer_delay": 0.0}, marks=pytest.mark.slow),
        pytest.param(1.0, {"optimizer_speculation": True, "optimizer_delay": 0.5}, marks=pytest.mark.slow),
        pytest.param(0.0, {"optimizer_speculation": False}, marks=pytest.mark.slow),
        (1.0, {"activations": {"device": "ssd", "share": 0.7}}),
    ],
)
def test_overflows_and_all_bits_are_stocks(tmp_path: Path, clip: float, section: dict[str, Any]) -> None:
    batches = token_batches(STEPS, 3, rows=1, shortest=5)
    runs, scales = [], []
    for arm in ("stock", "vertical"):
        config = base_config(tmp_path / arm, dtype="fp16", clip=clip, section=section, fp16=SCALE)
        (tmp_path / arm).mkdir()
        scales.append([])
        runs.append(run_arm(config, MIXER, batches, vertical=arm == "vertical", between=scales_of(scales[-1])))
    stock, vertical = runs
    assert stock.ssd_bytes == vertical.ssd_bytes > 0
    assert scales[0] == scales[1] and len(set(scales[0])) > 2
    assert 0 < stock.counters["skipped_steps"] < STEPS - 1
    assert stock.losses == vertical.losses and stock.counters == vertical.counters
    finite = [index for index, norm in enumerate(stock.norms) if norm > 0 and torch.isfinite(torch.tensor(norm))]
    assert finite and [stock.norms[i] for i in finite] == [vertical.norms[i] for i in finite]
    for run in runs:
        run.grads, run.norms = [run.grads[i] for i in finite], [run.norms[i] for i in finite]
    assert_identical(stock, vertical)


def test_a_resumed_run_has_the_loss_scale_of_one_that_went_on(tmp_path: Path) -> None:
    """Every number of the scaler, which decides when the scale grows or shrinks next, and the bits that come of it."""
    batches, saved = token_batches(STEPS, 3, rows=1, shortest=5), str(tmp_path / "saved")
    scale = SCALE | {"hysteresis": 2}  # its count is one of the numbers
    config = base_config(tmp_path / "ssd", dtype="fp16", clip=0.0, section={"optimizer_delay": 0.5}, fp16=scale)

    def scaler(engine: Any) -> dict[str, Any]:
        return {key: value for key, value in vars(engine.optimizer.loss_scaler).items() if isinstance(value, int | float)}

    ends = []
    with running(config, MIXER, vertical=True) as (engine, model):
        for batch in batches[:3]:
            engine.train_batch(iter(batch))
        engine.save_checkpoint(saved)
        then = scaler(engine)
        losses = [engine.train_batch(iter(batch)).item() for batch in batches[3:]]
        ends.append((losses, engine.skipped_steps, scaler(engine)))
        expected = contents(engine, model)
    with running(config, MIXER, vertical=True) as (engine, model):
        fresh = scaler(engine)
        assert {key for key in then if fresh[key] != then[key]} >= {"cur_scale", "cur_iter", "cur_hysteresis"}
        engine.load_checkpoint(saved)
        assert scaler(engine) == then
        losses = [engine.train_batch(iter(batch)).item() for batch in batches[3:]]
        ends.append((losses, engine.skipped_steps, scaler(engine)))
        assert differing(expected, contents(engine, model)) == []
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_a_static_loss_scale_does_not_take_a_dynamic_ones_checkpoint(tmp_path: Path) -> None:
    batches, saved = token_batches(1, 3, rows=1, shortest=5), str(tmp_path / "saved")
    dynamic, static = (base_config(tmp_path / "ssd", dtype="fp16", fp16=each) for each in (SCALE, STATIC))
    for first, second in ((dynamic, static), (static, dynamic)):
        with running(first, MIXER, vertical=True) as (engine, _):
            engine.train_batch(iter(batches[0]))
            engine.save_checkpoint(saved, tag="one")
        with running(second, MIXER, vertical=True) as (engine, model):
            before = read_weights(model)
            with pytest.raises(CheckpointError, match=r"fp16.loss_scale: dynamic here or in the checkpoint, and static"):
                engine.load_checkpoint(saved)
            assert differing(before, read_weights(model)) == []
            engine.train_batch(iter(batches[0]))
