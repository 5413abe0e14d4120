"""State that is read before the norm: the bits are stock's with all of it, a part and none; as much is read as has room."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param, safe_set_full_optimizer_state
from harness import Run, assert_identical, contents, differing, run_arm, running
from models import token_batches
from pages import resident_pages
from tier_runs import CLIPS, FREE, NUM_STEPS, mixer, stock_runs
from tier_runs import config as config_of

from ds_vertical.engine.zero3.step_driver import StepDriver

ALL, NONE, PART = None, 0, 2
slow = pytest.mark.slow
_ALL_EARLY = ("bf16", None, True)  # a quarter of each layer's parameters is less than the smallest of them
_IN_BF16 = ((None, False), (None, True), (0.5, True))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, float], Run]:
    """Stock's run of the same JSON, trained once."""
    return stock_runs(tmp_path_factory)


def config(folder: Path, dtype: str, clip: float, **section: Any) -> dict[str, Any]:
    """With host memory that a null of `optimizer_read_ahead_bytes` may take."""
    return config_of(folder, dtype, clip, **{"host_memory_bytes": 8 << 30} | section)


@contextmanager
def read_at_norm(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """At each norm, of how many jobs the state is being read, or has been."""
    found: list[int] = []
    open_step = StepDriver.open_step

    def noted(driver: StepDriver) -> None:
        pipeline, end = driver._pipeline, time.monotonic() + 60
        while pipeline.thread is not None and pipeline.reads.may_read_ahead:  # a slot's writes may be under way
            assert time.monotonic() < end
            time.sleep(0.001)
        found.append(sum(1 for _ in pipeline.reads.expected.begun()))
        open_step(driver)

    with monkeypatch.context() as patch:
        patch.setattr(StepDriver, "open_step", noted)
        yield found


def in_slots(asked: int | None, dtype: str, folder: Path) -> int | None:
    """The bytes of the key for so many slots."""
    if not asked:
        return asked
    with running(config(folder, dtype, CLIPS), partial(mixer, dtype), vertical=True) as (engine, _):
        return asked * engine.optimizer.slots[0].numel() + 1


# ---- N1, N2: however much is read


@pytest.mark.parametrize(
    ("dtype", "clip", "delay", "speculation", "asked"),
    [
        *(("fp32", CLIPS, None, False, asked) for asked in (ALL, PART)),
        pytest.param("fp32", CLIPS, None, False, NONE, marks=slow),
        *(pytest.param("fp32", CLIPS, delay, False, asked, marks=slow) for delay in (0.0, 0.3) for asked in (ALL, PART, NONE)),
        *(pytest.param("fp32", clip, 0.3, True, asked, marks=slow) for clip in (CLIPS, FREE) for asked in (ALL, PART, NONE)),
        *(pytest.param("fp32", FREE, None, None, asked, marks=slow) for asked in (ALL, PART)),
        *(pytest.param("fp32", 0.0, delay, None, ALL, marks=slow) for delay in (0.3, 1.0)),
        *(pytest.param("bf16", CLIPS, delay, speculation, ALL, marks=slow) for delay, speculation in _IN_BF16),
    ],
)
def test_bits_are_stocks_however_much_is_read_before_the_norm(
    tmp_path: Path,
    stock: Callable[[str, float], Run],
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    clip: float,
    delay: float | None,
    speculation: bool | None,
    asked: int | None,
) -> None:
    section = {"optimizer_delay": delay, "optimizer_speculation": speculation}
    section["optimizer_read_ahead_bytes"] = in_slots(asked, dtype, tmp_path / "sizes")
    with read_at_norm(monkeypatch) as found:
        made = config(tmp_path, dtype, clip, **section)
        vertical = run_arm(made, partial(mixer, dtype), token_batches(NUM_STEPS, 2), vertical=True)
    assert_identical(stock(dtype, clip), vertical)
    final = clip == 0.0 and delay != 1.0
    assert len(found) == NUM_STEPS and found[0] == 0
    nothing = asked == NONE or final or (dtype, delay, speculation) == _ALL_EARLY
    assert all(count == 0 if nothing else count > 0 for count in found[1:]), found


@slow
@pytest.mark.parametrize(
    "more",
    [
        {"gradient_host_share": 0.0},
        {"gradient_host_share": 0.5, "optimizer_speculation": True, "optimizer_delay": 0.3},
        {"optimizer_host_share": 0.6},
        {"overlap": False},
        {"verify": True},
        {"prefetch_layers": 0},
        {"snake": False, "prefetch_layers": 3},
        {"outside_layers": "fetched"},
        {"order": "horizontal"},
        {"activations": {"device": "ssd"}},
        {"activations": {"keep": "everything"}},
    ],
    ids=str,
)
def test_bits_are_stocks_beside_other_settings(
    tmp_path: Path, stock: Callable[[str, float], Run], more: dict[str, Any]
) -> None:
    made = config(tmp_path, "fp32", CLIPS, **({"optimizer_speculation": False} | more))
    vertical = run_arm(made, partial(mixer, "fp32"), token_batches(NUM_STEPS, 2), vertical=True)
    assert_identical(stock("fp32", CLIPS), vertical)


@pytest.mark.parametrize("asked", [ALL, pytest.param(PART, marks=slow)])
def test_state_that_a_user_writes_between_two_steps_is_trained_on(tmp_path: Path, asked: int | None) -> None:
    """The step before has been taken by then; what was read before its norm was read for it."""

    def write(engine: Any, step: int) -> None:
        if step == 1:
            for name, param in engine.module.named_parameters():
                if name.startswith("blocks.1."):
                    master = safe_get_full_fp32_param(param)
                    safe_set_full_fp32_param(param, master + 0.25)
                    safe_set_full_optimizer_state(param, master.new_full(master.shape, 0.01), "exp_avg_sq")

    section = {"optimizer_read_ahead_bytes": in_slots(asked, "fp32", tmp_path / "sizes")}
    runs = []
    for vertical in (False, True):
        made = config(tmp_path, "fp32", CLIPS, **(section if vertical else {}))
        runs.append(run_arm(made, partial(mixer, "fp32"), token_batches(NUM_STEPS, 2), vertical=vertical, between=write))
    assert_identical(*runs)


# ---- how much is read


@pytest.mark.parametrize("speculation", [False, True], ids=["waiting", "speculating"])
def test_state_is_read_before_the_norm_as_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speculation: bool
) -> None:
    """With early steps the delayed parts alone; the norm waits for the early steps' writes, and gives nothing up."""
    section: dict[str, Any] = {"optimizer_delay": 0.5, "optimizer_speculation": speculation}
    section["optimizer_read_ahead_bytes"] = None
    with read_at_norm(monkeypatch) as found:
        with running(config(tmp_path, "fp32", FREE, **section), partial(mixer, "fp32"), vertical=True) as (engine, _):
            chunks, slots = engine.optimizer.stepper.chunks, len(engine.optimizer.slots)
            wanted = sum(len(chunk.parts("delayed" if speculation else "all")) for chunk in chunks if chunk.files)
            assert len(engine.optimizer.further_slots) == wanted > slots // 2
            for batch in token_batches(4, 2):
                engine.train_batch(iter(batch))
    assert found[0] == 0 and found[1:] == [wanted] * 3


# ---- what was read in vain


@pytest.mark.slow
@pytest.mark.parametrize("asked", [ALL, NONE])
def test_a_step_that_fails_in_its_backward_leaves_nothing_of_what_it_read(tmp_path: Path, asked: int | None) -> None:
    """And the step that is taken again has its bits."""
    made = config(tmp_path, "fp32", CLIPS, optimizer_speculation=False, optimizer_read_ahead_bytes=asked)
    results = []
    for fails in (False, True):
        with running(made, partial(mixer, "fp32"), vertical=True) as (engine, model):
            first, second, third = token_batches(3, 2)
            engine.train_batch(iter(first))
            engine.optimizer.flush()
            if fails:

                def fail(grad: Any) -> None:
                    raise ArithmeticError("in the backward")

                handle = model.blocks[0].up.weight.register_hook(fail)
                with pytest.raises(ArithmeticError, match="in the backward"):
                    engine.train_batch(iter(second))
                handle.remove()
                pipeline = engine.optimizer.pipeline
                assert list(pipeline.reads.expected.begun()) == [] and not pipeline.reader.native.pending()
                further = engine.optimizer.further_slots
                assert bool(sum(map(resident_pages, further))) == (asked is ALL)
                engine.optimizer.flush()
                assert sum(map(resident_pages, further)) == 0
            engine.train_batch(iter(second))
            engine.train_batch(iter(third))
            results.append(contents(engine, model))
    assert not differing(*results)
