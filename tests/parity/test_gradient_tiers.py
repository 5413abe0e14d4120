"""Where gradients wait for their step, and for how long: a few layers' worth in memory, the rest in the host's share or on
SSD; the bits are stock's wherever they wait."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import (
    Run,
    assert_identical,
    differing,
    read_grads,
    read_state,
    read_weights,
    run_arm,
    running,
)
from late import LateWrites
from models import token_batches
from spoilt import GOOD, SPOILT, SpoilableModel, spoilt_batches
from tier_runs import CLIPS, FREE, NUM_STEPS, config, mixer, stock_runs

from ds_vertical.errors import TornStateError
from ds_vertical.io.aio import DiskError
from ds_vertical.schedule.events import MAX_STEPS

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, float], Run]:
    """Stock's run of the same JSON, trained once."""
    return stock_runs(tmp_path_factory)


# ---- N1, N2: wherever they wait


@pytest.mark.parametrize(
    ("dtype", "clip", "delay", "speculation", "share"),
    [
        ("fp32", 0.0, 0.3, None, 0.0),
        ("fp32", 0.0, 1.0, None, 0.5),
        ("fp32", CLIPS, 1.0, False, 0.0),
        ("fp32", CLIPS, 0.3, True, 0.5),  # every early step is redone
        ("fp32", FREE, 0.3, True, 0.0),  # none is
        pytest.param("fp32", CLIPS, 0.0, False, 0.5, marks=slow),
        pytest.param("fp32", CLIPS, 0.0, True, 0.0, marks=slow),
        pytest.param("fp32", FREE, 0.0, True, 0.5, marks=slow),
        pytest.param("fp32", FREE, None, None, 0.3, marks=slow),
        *(pytest.param("bf16", clip, 0.3, True, share, marks=slow) for clip in (0.0, CLIPS) for share in (0.0, 0.5)),
    ],
)
def test_bits_are_stocks_wherever_gradients_wait(
    tmp_path: Path,
    stock: Callable[[str, float], Run],
    dtype: str,
    clip: float,
    delay: float | None,
    speculation: bool | None,
    share: float,
) -> None:
    seen: list[int] = []

    def note(engine: Any, step: int) -> None:
        held = engine.optimizer.gradients
        seen.append(held.file.num_bytes)

    section = {"optimizer_delay": delay, "optimizer_speculation": speculation, "gradient_host_share": share}
    made = config(tmp_path, dtype, clip, **section)
    vertical = run_arm(made, partial(mixer, dtype), token_batches(NUM_STEPS, 2), vertical=True, between=note)
    assert_identical(stock(dtype, clip), vertical)
    assert set(seen) != {0}, "nothing waited on SSD"


@pytest.mark.parametrize(
    ("clip", "speculation"),
    [(FREE, True), *(pytest.param(*case, marks=slow) for case in ((0.0, None), (FREE, False)))],
)
def test_skipped_steps_drop_what_waits_on_ssd(tmp_path: Path, clip: float, speculation: bool | None) -> None:
    section = {"optimizer_delay": 0.3, "optimizer_speculation": speculation}
    runs = [
        run_arm(
            config(tmp_path, "fp32", clip, **section, **more),
            partial(SpoilableModel, 512),
            spoilt_batches(),
            vertical=vertical,
        )
        for vertical, more in ((False, {}), (True, {"gradient_host_share": 0.0}))
    ]
    for run in runs:  # a NaN differs from itself, and nobody sees the gradients of a skipped step
        run.losses = [repr(loss) for loss in run.losses]
        run.grads = [grads for grads, spoil in zip(run.grads, SPOILT, strict=True) if spoil == GOOD]
    assert_identical(*runs)


# ---- how much memory


def unit_bytes(engine: Any) -> dict[Any, int]:
    return {unit: 4 * sum(p.ds_numel for p in params) for unit, params in engine.layers.units.items()}


def waiting_bytes(engine: Any) -> int:
    """Bytes of the sums and of what was copied from them, spare ones included: the most there ever was."""
    return engine._gradients.reserve.num_bytes + engine.optimizer.gradients.num_bytes


@pytest.mark.parametrize("num_layers", [12, pytest.param(6, marks=slow)])
def test_with_early_steps_a_few_layers_gradients_are_in_memory(tmp_path: Path, num_layers: int) -> None:
    """Whatever the number of layers: those being stepped, the one being summed, and `pre`."""
    made = config(tmp_path, "fp32", 0.0, optimizer_delay=0.0)
    with running(made, partial(mixer, "fp32", num_layers), vertical=True) as (engine, _):
        for step in token_batches(3, 2):
            engine.train_batch(iter(step))
            sizes = unit_bytes(engine)
            assert waiting_bytes(engine) <= (MAX_STEPS + 1) * sizes[0] + sizes["pre"]
        assert num_layers * sizes[0] > waiting_bytes(engine)
        assert engine.optimizer.grad_partitions_flat_buffer.numel() == 0, "stock's buffer of the whole partition"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("clip", "delay", "speculation"), [(0.0, 0.5, None), (CLIPS, 1.0, False), (FREE, 0.5, True)])
def test_memory_is_made_once(tmp_path: Path, clip: float, delay: float, speculation: bool | None, overlap: bool) -> None:
    """What waits and a few layers; after the first steps nothing more is ever made, unless transfers take another time."""
    section = {"optimizer_delay": delay, "optimizer_speculation": speculation, "overlap": overlap}
    with running(config(tmp_path, "fp32", clip, **section), partial(mixer, "fp32", 8), vertical=True) as (engine, _):
        seen = []
        for step in token_batches(5, 2):
            engine.train_batch(iter(step))
            seen.append(waiting_bytes(engine))
        sizes = unit_bytes(engine)
        waits = delay if clip == 0.0 else 1.0
        passing = (MAX_STEPS + 1) * sizes[0] + sizes["pre"] if clip == 0.0 else 0
        assert seen[-1] <= 1.01 * waits * sum(sizes.values()) + passing
        assert overlap or seen[2:] == [seen[2]] * 3


@pytest.mark.parametrize(("clip", "delay", "speculation"), [(0.0, 1.0, None), (CLIPS, 0.5, True)])
def test_on_ssd_a_few_layers_gradients_are_in_memory(
    tmp_path: Path, clip: float, delay: float, speculation: bool | None
) -> None:
    section = {"optimizer_delay": delay, "optimizer_speculation": speculation, "gradient_host_share": 0.0}
    with running(config(tmp_path, "fp32", clip, **section), partial(mixer, "fp32", 12), vertical=True) as (engine, _):
        for step in token_batches(2, 2):
            engine.train_batch(iter(step))
        sizes = unit_bytes(engine)
        written = (MAX_STEPS + 1) * sizes[0] + sizes["pre"]  # copied, and on their way to the file
        assert waiting_bytes(engine) <= 1.01 * written + sizes[0] + sizes["pre"]


# ---- for readers


def test_the_route_to_gradients_says_how_to_keep_them(tmp_path: Path) -> None:
    from deepspeed import utils as fragments

    batches = token_batches(2, 2)
    for keep in (False, True):
        made = config(tmp_path, "fp32", 0.0, optimizer_delay=0.5, keep_gradients=keep)
        with running(made, partial(mixer, "fp32"), vertical=True) as (engine, model):
            param = model.blocks[1].up.weight
            assert fragments.safe_get_full_grad(param) is None
            for step in batches:
                engine.train_batch(iter(step))
                if not keep:
                    for call in (fragments.safe_get_full_grad, fragments.safe_get_local_grad):
                        with pytest.raises(RuntimeError, match='"vertical_schedule": {"keep_gradients": true}'):
                            call(param)
                    continue
                for flushed in (False, True):
                    if flushed:
                        engine.flush()
                    found = {n: fragments.safe_get_full_grad(p).flatten() for n, p in model.named_parameters()}
                    assert not differing(read_grads(engine, model), found)


# ---- files that are written late, and faults of the disk


@pytest.mark.parametrize("share", [0.0, pytest.param(0.5, marks=slow)])
def test_gradients_written_late_are_written_before_their_memory_is_used_again(
    tmp_path: Path, stock: Callable[[str, float], Run], share: float
) -> None:
    made = config(tmp_path, "fp32", CLIPS, optimizer_delay=0.3, optimizer_speculation=True, gradient_host_share=share)
    with running(made, partial(mixer, "fp32"), vertical=True) as (engine, model):
        writer = engine.optimizer.gradients.file.writer
        writer._native = LateWrites(writer.native)
        losses = [engine.train_batch(iter(step)).item() for step in token_batches(NUM_STEPS, 2)]
        assert writer.native.num_asked > NUM_STEPS
        expected = stock("fp32", CLIPS)
        assert losses == expected.losses
        assert differing(expected.weights, read_weights(model)) == []
        assert differing(expected.state, read_state(engine, model)) == []


def test_a_gradient_that_cannot_be_written_fails_the_step_whole(tmp_path: Path, stock: Callable[[str, float], Run]) -> None:
    """The step before it stays due, this one is as if it had not been; with the disk mended training goes on."""
    made = config(tmp_path, "fp32", CLIPS, optimizer_delay=0.3, optimizer_speculation=True, gradient_host_share=0.0)
    batches = token_batches(NUM_STEPS, 2)
    with running(made, partial(mixer, "fp32"), vertical=True) as (engine, model):
        losses = [engine.train_batch(iter(batches[0])).item()]
        engine.flush()
        path = next(tmp_path.rglob("gradients.swp"))
        size = path.stat().st_size
        path.unlink()
        path.mkdir()
        for _ in range(2):
            with pytest.raises(DiskError) as raised:
                engine.train_batch(iter(batches[1]))
            assert raised.value.filename == str(path) and raised.value.operation == "write"
            assert engine.optimizer.live.failure is None
        path.rmdir()
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        losses += [engine.train_batch(iter(step)).item() for step in batches[1:]]
        expected = stock("fp32", CLIPS)
        assert losses == expected.losses
        assert differing(expected.weights, read_weights(model)) == []
        assert differing(expected.state, read_state(engine, model)) == []


def test_a_gradient_that_cannot_be_read_tears_the_state(tmp_path: Path) -> None:
    made = config(tmp_path, "fp32", CLIPS, optimizer_delay=1.0, gradient_host_share=0.5)
    with running(made, partial(mixer, "fp32"), vertical=True) as (engine, model):
        engine.train_batch(iter(token_batches(1, 2)[0]))
        path = next(tmp_path.rglob("gradients.swp"))
        os.truncate(path, 4096)
        with pytest.raises(DiskError, match="gradients.swp"):
            engine.flush()
        with pytest.raises(TornStateError):
            read_weights(model)
