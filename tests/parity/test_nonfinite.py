"""`on_nonfinite`: a step whose gradients are not finite is skipped whole, or ends the run; what the state is worth then."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import utils as fragments
from harness import (
    MIN_SSD_BYTES,
    assert_identical,
    base_config,
    contents,
    counters,
    differing,
    run_both,
    running,
    small_buffers,
)
from models import MixerModel, token_batches
from spoilt import GOOD, NAN, SpoilableModel

from ds_vertical import NonFiniteError, TornStateError

WIDTH = {"fp32": 512, "bf16": 1024}  # square matrices of 1 MiB and more
slow = pytest.mark.slow
CASES = [
    ("fp32", "first"),
    ("fp32", "last"),
    pytest.param("bf16", "first", marks=slow),
    ("bf16", "last"),
]


def config(folder: Path, dtype: str, clip: float, on_nonfinite: str, **section: Any) -> dict[str, Any]:
    section |= {"on_nonfinite": on_nonfinite}
    return small_buffers(base_config(folder, num_micro_batches=2, dtype=dtype, clip=clip, section=section), 1_100_000)


def step(engine: Any, number: int, spoil: tuple[str, float] = GOOD) -> None:
    """A step of two micro-batches, of which the second is spoilt."""
    ids = torch.randint(0, 16, (2, 1, 4), generator=torch.Generator().manual_seed(number))
    engine.train_batch(iter([{"input_ids": ids[0], "spoil": GOOD}, {"input_ids": ids[1], "spoil": spoil}]))


def bytes_in(folder: Path) -> int:
    """Bytes of blocks allocated in the run's folder."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*.swp"))


# ---- skip


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize(
    ("dtype", "where"), [("fp32", "first"), *(pytest.param("bf16", where, marks=slow) for where in ("first", "last"))]
)
def test_a_skipped_step_changes_nothing(tmp_path: Path, dtype: str, where: str, clip: float) -> None:
    """Neither where somebody looks between, nor where what is due meets it."""
    ends = []
    for spoils in (True, False):
        with running(config(tmp_path, dtype, clip, "skip"), partial(SpoilableModel, WIDTH[dtype]), vertical=True) as pair:
            engine, model = pair
            step(engine, 0)
            if spoils:
                step(engine, 1, (where, NAN))
                before = contents(engine, model)
                step(engine, 2, (where, NAN))
                assert differing(before, contents(engine, model)) == []
                assert engine.skipped_steps == 2
            ends.append(contents(engine, model))
    assert differing(*ends) == []


# ---- stop: torn


def assert_refuses_everything(engine: Any, model: Any, folder: Path) -> None:
    param = model.blocks[0].weight
    routes = {
        "train_batch": lambda: step(engine, 5),
        "eval_batch": lambda: engine.eval_batch(iter([{"input_ids": torch.zeros(1, 3, dtype=torch.long), "spoil": GOOD}])),
        "module": lambda: model.eval()(torch.zeros(1, 3, dtype=torch.long), GOOD),
        "GatheredParameters": lambda: deepspeed.zero.GatheredParameters([param]).__enter__(),
        "flush": engine.flush,
        "state_dict": engine.optimizer.state_dict,
        "save_checkpoint": lambda: engine.save_checkpoint(str(folder / "saved")),
        "save_16bit_model": lambda: engine.save_16bit_model(str(folder / "saved")),
        "master": lambda: fragments.safe_get_full_fp32_param(param),
        "moment": lambda: fragments.safe_get_full_optimizer_state(param, "exp_avg"),
        "local master": lambda: fragments.safe_get_local_fp32_param(param),
        "set master": lambda: fragments.safe_set_full_fp32_param(param, torch.zeros(param.ds_shape)),
        "set moment": lambda: fragments.safe_set_local_optimizer_state(param, torch.zeros(param.ds_shape), "exp_avg"),
    }
    for name, route in routes.items():
        with pytest.raises(TornStateError, match="no checkpoint has been saved.*NonFiniteError") as raised:
            route()
        assert isinstance(raised.value.__cause__, NonFiniteError), name
    assert not list(folder.rglob("*.bin")) + list(folder.rglob("*.pt")), "torn state was saved"


@pytest.mark.parametrize(("dtype", "where"), CASES)
def test_stepped_in_place_a_step_that_is_not_finite_tears_the_state(tmp_path: Path, dtype: str, where: str) -> None:
    """NaN in the first layer to finish its backward (the last), when nothing else is known yet, and in the last one."""
    made = config(tmp_path, dtype, 0.0, "stop")
    with running(made, partial(SpoilableModel, WIDTH[dtype]), vertical=True) as (engine, model):
        assert engine.optimizer.timing.early
        step(engine, 0)
        step(engine, 1)
        with pytest.raises(NonFiniteError, match='on_nonfinite is "stop"') as raised:
            step(engine, 2, (where, NAN))
        assert "the live state is torn" in "".join(raised.value.__notes__)
        assert_refuses_everything(engine, model, tmp_path)
        assert counters(engine)["global_steps"] == 2


def test_a_torn_state_names_the_last_good_tag(tmp_path: Path) -> None:
    """Where it is torn and where it is refused; a new engine goes on from that tag."""
    made, saved, good = config(tmp_path, "fp32", 0.0, "stop"), str(tmp_path / "saved"), 'the last good tag is "good" in .*saved'
    with running(made, partial(SpoilableModel, 512), vertical=True) as (engine, model):
        step(engine, 0)
        engine.save_checkpoint(saved, tag="good")
        before = contents(engine, model)
        with pytest.raises(NonFiniteError) as raised:
            step(engine, 1, ("last", NAN))
        assert re.search(good, "".join(raised.value.__notes__))
        with pytest.raises(TornStateError, match=good):
            engine.save_checkpoint(saved, tag="bad")
    with running(made, partial(SpoilableModel, 512), vertical=True) as (engine, model):
        path, _ = engine.load_checkpoint(saved)
        assert path is not None and Path(path).parent.name == "good" and not Path(saved, "bad").exists()
        assert differing(before, contents(engine, model)) == []
        step(engine, 1)


class Fault(Exception):
    """Raised by the model on purpose."""


def test_any_error_amid_steps_in_place_tears_the_state(tmp_path: Path) -> None:
    """In the forward, before the first early step, it does not."""
    made = config(tmp_path, "fp32", 0.0, "stop")
    with running(made, partial(SpoilableModel, 512), vertical=True) as (engine, model):
        step(engine, 0)

        def fail(*_: Any) -> None:
            raise Fault

        hook = model.blocks[1].register_forward_hook(fail)
        with pytest.raises(Fault):
            step(engine, 1)
        hook.remove()
        step(engine, 1)
        hook = model.embed.weight.register_hook(fail)  # the last gradient of the backward
        with pytest.raises(Fault) as raised:
            step(engine, 2)
        hook.remove()
        assert "the live state is torn" in "".join(raised.value.__notes__)
        with pytest.raises(TornStateError, match="Fault"):
            step(engine, 2)


# ---- stop: whole


@pytest.mark.parametrize(
    ("clip", "section"), [(1.0, {"optimizer_speculation": True}), (1.0, {}), (0.0, {"optimizer_delay": 1})], ids=str
)
@pytest.mark.parametrize(
    ("dtype", "where"),
    [("fp32", "first"), ("fp32", "last"), *(pytest.param("bf16", where, marks=slow) for where in ("first", "last"))],
)
def test_where_nothing_was_stepped_the_state_is_whole(
    tmp_path: Path, dtype: str, where: str, clip: float, section: dict[str, Any]
) -> None:
    """It may be saved, and trained on as if the step had not been."""
    ends = []
    for spoils in (True, False):
        made = config(tmp_path, dtype, clip, "stop", **section)
        with running(made, partial(SpoilableModel, WIDTH[dtype]), vertical=True) as (engine, model):
            step(engine, 0)
            if spoils:
                with pytest.raises(NonFiniteError) as raised:
                    step(engine, 1, (where, NAN))
                assert "torn" not in "".join(raised.value.__notes__)
                assert engine.save_16bit_model(str(tmp_path / "saved"))
            step(engine, 2)
            ends.append((contents(engine, model), counters(engine)))
    assert differing(ends[0][0], ends[1][0]) == []
    assert ends[0][1] == ends[1][1]


@pytest.mark.parametrize("clip", [0.0, 1.0], ids=["torn", "whole"])
def test_what_stays_on_the_device_is_there_after_a_step_that_ends_the_run(tmp_path: Path, clip: float) -> None:
    """Nothing flushes in between, and the values are those before the step."""
    made = config(tmp_path, "fp32", clip, "stop")
    del made["zero_optimization"]["stage3_param_persistence_threshold"]
    with running(made, partial(SpoilableModel, 512), vertical=True) as (engine, model):
        step(engine, 0)
        before = [block.bias.detach().clone() for block in model.blocks]
        assert all(bias.numel() == 512 and bias.any() for bias in before)
        with pytest.raises(NonFiniteError):
            step(engine, 1, ("last", NAN))
        assert (engine.optimizer.live.failure is not None) == (clip == 0)
        assert [torch.equal(block.bias, bias) for block, bias in zip(model.blocks, before, strict=True)] == [True] * 3


# ---- stop: bits and bytes


@pytest.mark.parametrize(
    ("dtype", "delay"),
    [("fp32", None), ("fp32", 0.0), *(pytest.param(*case, marks=slow) for case in (("fp32", 0.5), ("bf16", None)))],
)
def test_steps_in_place_have_stocks_bits(tmp_path: Path, dtype: str, delay: float | None) -> None:
    made = config(tmp_path, dtype, 0.0, "stop", optimizer_delay=delay)
    stock, vertical = run_both(made, partial(MixerModel, 3, WIDTH[dtype]), token_batches(4, 2))
    assert_identical(stock, vertical)
    assert vertical.ssd_bytes >= 3 * 2 * MIN_SSD_BYTES


@pytest.mark.parametrize(("clip", "on_nonfinite", "generations"), [(0.0, "skip", 2), (0.0, "stop", 1), (1.0, "stop", 2)])
def test_stopping_costs_no_second_generation(tmp_path: Path, clip: float, on_nonfinite: str, generations: int) -> None:
    with running(config(tmp_path, "bf16", clip, on_nonfinite), partial(SpoilableModel, 1024), vertical=True) as (engine, _):
        on_ssd = 3 * 1024**2 * (2 + 12)  # the layers' matrices; their biases are in the files of their chunk's state
        before = bytes_in(tmp_path)
        assert before == pytest.approx(generations * on_ssd, rel=0.01)
        step(engine, 0)
        engine.flush()
        assert bytes_in(tmp_path) == before
