"""Whole micro-steps of a loop of one's own: the bits of `train_batch`, and what is refused, with nothing touched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import base_config, build_engine, differing, dispose, read_weights, running, small_buffers
from models import tiny_neox, token_batches

from ds_vertical.errors import LayerError, LoopError

NUM = 3
build = partial(tiny_neox, num_layers=2, hidden=256, dropout=0.1)


def micro_step(engine: Any, batch: dict[str, torch.Tensor], index: int) -> float:
    """As a loop of the three calls has it, without looking whether it is the last one."""
    outputs = engine(**batch)
    engine.backward(outputs.loss)
    engine.step()
    return outputs.loss.item()


def by_accelerate(engine: Any, batch: dict[str, torch.Tensor], index: int) -> float:
    """As Accelerate has it: the boundary is set, the loss has been divided, and `step` comes at the boundary alone."""
    loss = engine(**batch).loss
    engine.set_gradient_accumulation_boundary(index == NUM - 1)
    engine.backward(loss / NUM, scale_wrt_gas=False)
    if engine.is_gradient_accumulation_boundary():
        engine.step()
    return loss.item()


def window(engine: Any, step: Callable[..., Any], batches: list[Any]) -> list[Any]:
    return engine.train_window([partial(step, engine, batch, index) for index, batch in enumerate(batches)], batches)


@pytest.mark.parametrize("step", [micro_step, pytest.param(by_accelerate, marks=pytest.mark.slow)])
def test_a_window_has_the_bits_of_train_batch(tmp_path: Path, step: Callable[..., float]) -> None:
    steps = token_batches(3, NUM, rows=1)
    seen = []
    for by_window in (False, True):
        config = small_buffers(
            base_config(tmp_path / str(by_window), num_micro_batches=NUM, dtype="fp32", section={"self_check": by_window})
        )
        with running(config, build, vertical=True) as (engine, model):
            losses = []
            for batches in steps:
                if by_window:
                    found = window(engine, step, batches)
                    losses.append(torch.tensor(found).mean().item())
                else:
                    losses.append(engine.train_batch(iter(batches)).item())
            counters = engine.global_steps, engine.global_samples, engine.micro_steps if step is micro_step else 0
            seen.append((losses, engine.get_global_grad_norm(), engine.get_lr(), counters, read_weights(model)))
    assert seen[0][:3] == seen[1][:3]
    assert seen[1][3] == (3, 9, 9 if step is micro_step else 0)
    assert not differing(seen[0][4], seen[1][4])


def once_more_in_the_second(engine: Any, batch: Any, index: int) -> None:
    engine.backward(sum(engine(**batch).loss for _ in range(1 + index)))


def past_the_engine(engine: Any, batch: Any, index: int) -> None:
    engine.backward(engine.module(**batch).loss)


def no_backward(engine: Any, batch: Any, index: int) -> None:
    engine(**batch)


def two_backwards(engine: Any, batch: Any, index: int) -> None:
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.backward(loss)


def detached(engine: Any, batch: Any, index: int) -> None:
    engine.backward(engine(**batch).loss.detach())


def step_at_each(engine: Any, batch: Any, index: int) -> None:
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(**batch).loss)
    engine.step()


def no_step(engine: Any, batch: Any, index: int) -> None:
    engine.backward(engine(**batch).loss)


def step_first(engine: Any, batch: Any, index: int) -> None:
    engine(**batch)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def fails(engine: Any, batch: Any, index: int) -> None:
    micro_step(engine, batch, index)
    if index == 1:
        raise KeyboardInterrupt


WRONG: list[tuple[Callable[..., None], type[BaseException], str]] = [
    (past_the_engine, LoopError, "micro-step 0 .* has not called the engine's forward before; call engine"),
    (once_more_in_the_second, LayerError, r"micro-batch 1 of the step calls the model more than 1 time\(s\)"),
    (no_backward, LoopError, r"micro-step 0 .* has not called engine.backward\(loss\)"),
    (two_backwards, LoopError, "micro-step 0 .* calls engine.backward a second time; add the losses"),
    (detached, LoopError, "a tensor with one element, computed with gradients"),
    (step_at_each, LoopError, r"micro-step 0 .* calls engine.step\(\) at a boundary, and more micro-batches"),
    (no_step, LoopError, r"micro-step 2 .* has not called engine.step\(\)"),
    (step_first, LoopError, r"calls engine.step\(\) ahead of engine.backward"),
    (fails, KeyboardInterrupt, ""),
]


def test_what_cannot_be_followed_is_named_and_has_not_been(tmp_path: Path) -> None:
    batches = token_batches(1, NUM, rows=1)[0]
    weights = []
    for name, wrong in (("clean", []), ("wrong", WRONG)):
        engine, model = build_engine(
            small_buffers(base_config(tmp_path / name, num_micro_batches=NUM, dtype="fp32")), build, vertical=True
        )
        try:
            for step, error, message in wrong:
                with pytest.raises(error, match=message):
                    window(engine, step, batches)
                assert engine.global_steps == 0
                with pytest.raises(LoopError, match=r"engine.backward\(loss\): there was no engine\(...\)"):
                    engine.backward(torch.ones((), requires_grad=True))
            window(engine, micro_step, batches)
            weights.append(read_weights(model))
        finally:
            dispose(engine)
    assert not differing(*weights)


def test_the_user_s_code_stands_alone_behind_its_model_call(tmp_path: Path) -> None:
    batches = token_batches(1, NUM, rows=1)[0]
    current: list[int] = []
    seen: list[tuple[int, int]] = []

    def step(engine: Any, batch: Any, index: int) -> None:
        engine.train()  # as Trainer has it; it changes nothing, so the step does not start over
        seen.append((index, current[-1]))
        loss = engine(**batch).loss
        seen.append((index, current[-1]))
        engine.backward(loss)
        engine.step()

    config = small_buffers(base_config(tmp_path, num_micro_batches=NUM, dtype="fp32"))
    with running(config, build, vertical=True) as (engine, _):
        runs = [partial(step, engine, batch, index) for index, batch in enumerate(batches)]
        engine.train_window(runs, batches, current.append)
    assert all(index == told for index, told in seen)
    assert sorted(seen) == [(index, index) for index in range(NUM) for _ in range(2)]


class Total:
    """What micro-steps have counted, and how often that was put back."""

    def __init__(self) -> None:
        self.count, self.before, self.num_put_back = 0, 0, 0

    def put_back(self) -> None:
        self.count, self.num_put_back = self.before, self.num_put_back + 1


def noting_neox() -> Any:
    """A hook on a layer appends to a list of that layer's, so the first step starts over."""
    model: Any = build()
    layer = model.gpt_neox.layers[0]
    layer.notes = []
    layer.register_forward_hook(lambda module, _, __: module.notes.append(1))
    return model


def test_what_micro_steps_count_counts_once(tmp_path: Path) -> None:
    """In a self-check, whose calls do not count, and in a step that starts over."""
    batches = token_batches(1, NUM, rows=1)[0]
    for checked in (True, False):
        total = Total()

        def counting(engine: Any, batch: Any, index: int, total: Total = total) -> None:
            total.count += 1
            micro_step(engine, batch, index)
            total.count += 1

        config = small_buffers(
            base_config(tmp_path / str(checked), num_micro_batches=NUM, dtype="fp32", section={"self_check": checked})
        )
        with running(config, build if checked else noting_neox, vertical=True) as (engine, _):
            runs = [partial(counting, engine, batch, index) for index, batch in enumerate(batches)]
            engine.train_window(runs, batches, counted=total)
        assert total.num_put_back > 0 and total.count == 2 * NUM
