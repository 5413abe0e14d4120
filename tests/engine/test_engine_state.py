"""What a step leaves as it was: after an exception anywhere in it, and the state that a forward sets or finds."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness import (
    Run,
    assert_identical,
    base_config,
    counters,
    differing,
    read_weights,
    run_arm,
    run_both,
    running,
    small_buffers,
)
from models import MixerBlock, MixerModel, next_token_loss, token_batches
from torch import nn
from toy import facts

from ds_vertical.model import stubs
from ds_vertical.model.thread_state import ThreadState

NUM_MICRO_BATCHES = 3


def config_in(folder: Path, **top: Any) -> dict[str, Any]:
    options = {"dtype": "fp32", "clip": 0.05, "section": {"seed": 5}} | top
    return small_buffers(base_config(folder, num_micro_batches=NUM_MICRO_BATCHES, **options))


# ---- exceptions


class Tripped(Exception):
    """Raised by the models of this file on purpose."""


class TripBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise Tripped("backward")


class TripBlock(MixerBlock):
    """`arm(first, last)`: raise in the calls with these numbers, counted from the arming."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.counter = ModuleType("counter")  # of which no copy is taken: recomputes count on
        self.counter.calls_to_trip = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter.calls_to_trip -= 1
        if self.counter.calls_to_trip == 0:
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                raise Tripped("layer")
        return super().forward(x)


class TripModel(MixerModel):
    """Raises at `where`, for its second micro-batch, inside nested contexts that its unwinding has to leave."""

    def __init__(self) -> None:
        super().__init__(3, dropout=0.1)
        self.blocks = nn.ModuleList(TripBlock(512, dropout=0.1) for _ in range(3))
        self.where = ""
        self.forwards = 0
        self.inside = 0

    def arm(self, where: str) -> None:
        self.where, self.forwards = where, 0
        # in layer-major order a block's first calls are its forwards, then come its recomputes
        self.blocks[1].counter.calls_to_trip = {"layer": 2, "recompute": NUM_MICRO_BATCHES + 2}.get(where, 0)

    def trip(self, where: str) -> None:
        if self.where == where and self.forwards == 2:
            raise Tripped(where)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        self.inside += 1
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
                yield
        finally:
            self.inside -= 1

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        with self.entered():
            self.forwards += 1
            number = self.forwards
            x = self.embed(input_ids)
            with torch.no_grad():
                self.trip("prefix")
            for index, block in enumerate(self.blocks):
                if index == 2 and number == 2 and self.where == "glue":
                    raise Tripped("glue")
                x = block(x)
            if number == 2 and self.where == "backward":
                x = TripBackward.apply(x)
            if number == 2 and self.where == "suffix":
                raise Tripped("suffix")
            logits = self.head(self.norm(x))
        return logits if labels is None else next_token_loss(logits, labels)


def standing(engine: Any, model: nn.Module) -> dict[str, Any]:
    """All that a failed step must leave as it found it."""
    modules = dict(model.named_modules())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return facts(ThreadState.capture()) | {
        "forwards": {name: module.__dict__.get("forward") for name, module in modules.items()},
        "hooks": {name: [list(getattr(module, kind)) for kind in hooks] for name, module in modules.items()},
        "training": [module.training for module in modules.values()],
        "counters": counters(engine),
        "boundary": engine.is_gradient_accumulation_boundary(),
        "gathered": [name for name, p in model.named_parameters() if p.ds_status.name == "AVAILABLE"],
        "grads": [name for name, p in model.named_parameters() if p.grad is not None],
        "fetched": engine._params.fetched,
        "sums": engine._gradients.num_bytes,
    }


def parked() -> list[Any]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, stubs.Coroutine) and each and not each.dead]


def failing_loss(where: str) -> Callable[[Any, Any], torch.Tensor]:
    notes = ModuleType("notes")  # no state of a forward
    notes.calls = 0

    def loss_fn(logits: torch.Tensor, labels: Any) -> torch.Tensor:
        notes.calls += 1
        if where == "loss_fn" and notes.calls == 2:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                raise Tripped("loss_fn")
        return next_token_loss(logits, labels)

    return loss_fn


def tensors(batches: list[list[dict[str, Any]]]) -> list[list[torch.Tensor]]:
    return [[batch["input_ids"] for batch in step] for step in batches]


STEPS = tensors(token_batches(3, NUM_MICRO_BATCHES))


@pytest.fixture(scope="module")
def untroubled(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same training where nothing fails."""
    return run_arm(config_in(tmp_path_factory.mktemp("untroubled")), TripModel, STEPS, vertical=True, loss_fn=next_token_loss)


# where -> the event under which it happens
WHERE = {
    "prefix": "preF1",
    "layer": "1F1",
    "glue": "2F1",
    "suffix": "sufHEAD1",
    "loss_fn": "sufHEAD1",
    "backward": "sufHEAD1",
    "recompute": "1B1",
}


@pytest.mark.parametrize("where", WHERE)
def test_an_exception_leaves_everything_as_it_was(tmp_path: Path, untroubled: Run, where: str) -> None:
    with running(config_in(tmp_path), TripModel, vertical=True) as (engine, model):
        losses = [engine.train_batch(iter(STEPS[0]), next_token_loss).item()]
        before, weights = standing(engine, model), read_weights(model)
        model.arm(where)
        with pytest.raises(Tripped) as raised:
            engine.train_batch(iter(STEPS[1]), failing_loss(where))
        assert not parked()
        assert standing(engine, model) == before
        assert model.inside == 0, "a parked forward's own clean-up did not run"
        assert not differing(weights, read_weights(model))
        assert_window(raised.value, WHERE[where])
        model.arm("")
        losses += [engine.train_batch(iter(batches), next_token_loss).item() for batches in STEPS[1:]]
        assert losses == untroubled.losses
        assert not differing(untroubled.weights, read_weights(model))


def assert_window(error: BaseException, event: str) -> None:
    notes = "\n".join(error.__notes__)
    (marked,) = [line for line in notes.splitlines() if line.endswith("<-- here")]
    assert marked.split()[1] == event
    assert "in flight: " in notes and "held: " in notes


def test_an_exception_in_evaluation_leaves_everything_as_it_was(tmp_path: Path, untroubled: Run) -> None:
    with running(config_in(tmp_path), TripModel, vertical=True) as (engine, model):
        engine.train_batch(iter(STEPS[0]), next_token_loss)
        before = standing(engine, model)
        model.arm("glue")
        with pytest.raises(Tripped):
            engine.eval_batch(iter(STEPS[1]), next_token_loss)
        model.arm("")
        assert not parked() and standing(engine, model) == before and model.inside == 0
        for batches in STEPS[1:]:
            engine.train_batch(iter(batches), next_token_loss)
        assert not differing(untroubled.weights, read_weights(model))


def test_a_failing_iterator_touches_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[Any]:
        yield STEPS[0][0]
        raise Tripped("data")

    with running(config_in(tmp_path), TripModel, vertical=True) as (engine, model):
        before = standing(engine, model)
        with pytest.raises(Tripped):
            engine.train_batch(broken(), next_token_loss)
        assert standing(engine, model) == before and model.forwards == 0


# ---- thread state: autocast, grad mode, context variables

GAIN: ContextVar[float] = ContextVar("GAIN", default=0.0)
LENGTH: ContextVar[int] = ContextVar("LENGTH", default=-1)


class WatchingBlock(MixerBlock):
    """Notes under which state each call runs; what it computes depends on two context variables."""

    def __init__(self) -> None:
        super().__init__(512)
        self.seen = ModuleType("seen")  # of which no copy is taken: a recompute's calls count, too
        self.seen.calls = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.calls.append((torch.is_autocast_enabled("cpu"), GAIN.get(), LENGTH.get(), x.shape[1]))
        return super().forward(x) + GAIN.get() * LENGTH.get() * torch.tanh(self.up(x))


class WatchingModel(MixerModel):
    """`inside`: run the blocks under an autocast of the model's own; `frozen_prefix`: embed under no_grad."""

    inside = False
    frozen_prefix = False

    def __init__(self) -> None:
        super().__init__(2)
        self.blocks = nn.ModuleList(WatchingBlock() for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        LENGTH.set(input_ids.shape[1])
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen_prefix):
            x = self.embed(input_ids)
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.inside else contextlib.nullcontext():
            for block in self.blocks:
                x = block(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else next_token_loss(logits, labels)


class InsideModel(WatchingModel):
    inside = True


class FrozenPrefixModel(WatchingModel):
    frozen_prefix = True


def short_batches() -> list[list[dict[str, Any]]]:
    """One sequence of 3, 4, 5 tokens: the processor may have no bf16 arithmetic."""
    generator = torch.Generator().manual_seed(2)
    ids = [[torch.randint(0, 200, (1, 3 + m), generator=generator) for m in range(NUM_MICRO_BATCHES)] for _ in range(2)]
    return [[{"input_ids": each, "labels": each} for each in step] for step in ids]


def watched(
    folder: Path, build: type[WatchingModel] = WatchingModel, loss_fn: Any = None, **top: Any
) -> tuple[Run, Run, set[tuple[Any, ...]]]:
    """(stock, vertical, the states that the vertical arm's block calls ran under, recomputes included)."""
    seen: set[tuple[Any, ...]] = set()

    def note(engine: Any, step: int) -> None:
        if type(engine).__name__ == "VerticalEngine":
            calls = [call for block in engine.module.blocks for call in block.seen.calls]
            runs = 2 * len(engine.module.blocks) - 1  # the last layer runs once: no recompute
            assert len(calls) == (step + 1) * NUM_MICRO_BATCHES * runs
            seen.update(calls)

    batches: Any = short_batches()
    if loss_fn is not None:
        batches = tensors(batches)
    stock, vertical = run_both(config_in(folder, **top), build, batches, loss_fn=loss_fn, between=note)
    return stock, vertical, seen


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_arm(config_in(tmp_path_factory.mktemp("plain")), WatchingModel, short_batches(), vertical=False)


@pytest.mark.parametrize("where", ["outside", "inside", "loss_fn", "section"])
def test_autocast(tmp_path: Path, plain: Run, where: str) -> None:
    options: dict[str, Any] = {}
    if where == "inside":
        options["build"] = InsideModel
    if where == "section":
        options["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if where == "loss_fn":

        def loss_fn(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                scores = logits[:, :-1].flatten(0, 1) @ torch.eye(logits.shape[-1])
            assert scores.dtype == torch.bfloat16
            return nn.functional.cross_entropy(scores.float(), ids[:, 1:].flatten())

        options["loss_fn"] = loss_fn
    with torch.autocast("cpu", dtype=torch.bfloat16) if where == "outside" else contextlib.nullcontext():
        stock, vertical, seen = watched(tmp_path, **options)
    assert_identical(stock, vertical)
    assert {state[0] for state in seen} == {where != "loss_fn"}
    assert vertical.losses != plain.losses, "nothing was computed in bf16"
    assert not torch.is_autocast_enabled("cpu")


def test_grad_mode_inside_the_model(tmp_path: Path, plain: Run) -> None:
    """Stock with its optimizer in host memory: on SSD it takes what a buffer holds for a gradient that never came."""
    stock, vertical, _ = watched(tmp_path, FrozenPrefixModel, optimizer="cpu")
    assert_identical(stock, vertical)
    assert_identical(stock, run_arm(config_in(tmp_path), FrozenPrefixModel, short_batches(), vertical=True))
    assert vertical.losses[0] == plain.losses[0] and vertical.grads[0]["embed.weight"].abs().max() == 0


def test_context_variables_of_the_caller_and_of_the_prefix(tmp_path: Path, plain: Run) -> None:
    token = GAIN.set(0.25)
    try:
        stock, vertical, seen = watched(tmp_path)
    finally:
        GAIN.reset(token)
    assert_identical(stock, vertical)
    assert vertical.losses != plain.losses
    assert {(gain, length) for _, gain, length, _ in seen} == {(0.25, 3), (0.25, 4), (0.25, 5)}
    assert all(length == found for _, _, length, found in seen), "a call saw another micro-batch's variable"
