"""One of two ranks whose models keep state that is not the same on both: `state_worker.py FOLDER CASE`.

Prints one line of JSON, which differs from case to case.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

# run as a script, so this folder is first on the path
import harness
import torch
from stateful import Base, Block, CountUp, InANamespace, M, batches, config_in

RANK = int(os.environ["RANK"])
LARGE = 70_000  # elements: more than are copied in each step


class CountingBlock(Block):
    """Counts from the first step on; `seen` grows once it is to `start`."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.calls, self.seen, self.start = 0, list[float](), False
        self.collected: list[int] = []  # by a hook of the backward
        self.register_buffer("table", torch.zeros(LARGE))

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.calls += 1
        if self.start:
            self.seen.append(x.mean().item())
        return self.body(x * (1 + 0.05 * self.calls))


class Counting(Base):
    block = CountingBlock


class EvalCountBlock(Block):
    """All blocks count up one counter in evaluations: no order but stock's gives it."""

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.counter[0] += not self.training
        return self.body(x * (1 + 0.01 * self.counter[0]))


class EvalCountUp(CountUp):
    block = EvalCountBlock


@contextlib.contextmanager
def running(
    folder: Path, build: Callable[[], Any], self_check: bool | None = False, num_micro_batches: int = M, **section: Any
) -> Iterator[tuple[Any, Any]]:
    config = config_in(folder, params="cpu", optimizer="cpu", section={"self_check": self_check} | section)
    config["gradient_accumulation_steps"] = num_micro_batches
    with harness.running(config, build, vertical=True) as made:
        yield made


def told(call: Callable[[], Any]) -> str:
    """The name and the text of what a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def start(model: Any, rank: int) -> None:
    for block in model.blocks if rank == RANK else ():
        block.start = True


def late(folder: Path) -> dict[str, Any]:
    """State that begins to change in the second step, on rank 0 alone."""
    losses = []
    with running(folder, Counting, self_check=True) as (engine, model):
        for index, step in enumerate(batches(3)):
            losses.append(engine.train_batch(iter(step)).item())
            if index == 0:
                start(model, 0)
        return {
            "losses": losses,
            "weights": harness.digest(harness.read_weights(model)),
            "calls": [block.calls for block in model.blocks],
            "seen": [len(block.seen) for block in model.blocks],
        }


def alone(folder: Path) -> dict[str, Any]:
    """Steps that end on one rank for a reason of its own: the first step learns on rank 0 while the loss fails on rank 1;
    later the loss fails there while a hook of the backward has collected something on rank 0; then rank 1 finds new state while
    such a hook has written on rank 0 what cannot be put back; then state on rank 0 cannot be followed. Steps in between have no
    fault."""
    first, second, third = batches(3)

    def fail(loss: torch.Tensor, _: Any) -> torch.Tensor:
        if RANK == 1:
            raise ArithmeticError("no loss")
        return loss

    def write(*_: Any) -> None:
        model.blocks[0].table.data.add_(1)

    def hooked(hook: Callable[..., None], *given: Any) -> str:
        with contextlib.ExitStack() as stack:
            if RANK == 0:
                stack.callback(model.blocks[0].register_full_backward_hook(hook).remove)
            return told(lambda: engine.train_batch(iter(second), *given))

    with running(folder, Counting) as (engine, model):
        said = [told(lambda: engine.train_batch(iter(first), fail)), told(lambda: engine.train_batch(iter(first)))]
        calls = [block.calls for block in model.blocks]
        said.append(hooked(lambda *_: model.blocks[0].collected.append(1), fail))
        start(model, 1)
        said.append(hooked(write))
        said.append(told(lambda: engine.train_batch(iter(second))))
        if RANK == 0:
            model.blocks[1].lines = itertools.count()
        uses = (lambda: engine.train_batch(iter(third))), (lambda: engine.eval_batch(iter(third)))
        said += [told(use) for use in uses]
        if RANK == 0:
            del model.blocks[1].lines
        said += [told(use) for use in uses]
        return {"told": said, "steps": engine.global_steps, "calls": calls, "seen": len(model.blocks[0].seen)}


def evaluations(folder: Path) -> dict[str, Any]:
    """Evaluations of other numbers of micro-batches on rank 1 than on rank 0, of a model that no such order gets right."""
    said = {}
    for counts in ((1, 1), (M, 1), (1, 2), (M, 2)):
        with running(folder, EvalCountUp, self_check=None) as (engine, model):
            engine.train_batch(iter(batches(1)[0]))
            step = batches(1)[0][: counts[RANK]]
            said[str(counts)] = told(partial(engine.eval_batch, iter(step))), model.blocks[0].counter[0]
            engine.train_batch(iter(batches(1)[0]))
    return said


def first_evaluations(folder: Path) -> dict[str, Any]:
    """Evaluations ahead of any training, of a model that layer-major order gets wrong. Rank 1 has fewer micro-batches than
    rank 0, then more. In between the loss fails on rank 1 as rank 0 goes on alone, or in the other's last micro-batch."""
    found: dict[str, Any] = {}
    for order in ("vertical", "horizontal"):
        with running(folder, InANamespace, self_check=None, order=order) as (engine, model):
            plain = InANamespace()
            plain.load_state_dict(harness.read_weights(model))
            plain.eval()
            said, right = [], []
            for counts, failing in (((M, 1), False), ((M, 1), True), ((1, M), True), ((1, M), False)):
                step, losses = batches(1)[0][: counts[RANK]], list[float]()

                def loss_fn(loss: torch.Tensor, _: Any, losses: list[float] = losses, last: int = failing * len(step)) -> Any:
                    losses.append(loss.item())
                    if RANK == 1 and len(losses) == last:
                        raise ArithmeticError("no loss")
                    return loss

                said.append(told(lambda step=step, loss_fn=loss_fn: engine.eval_batch(iter(step), loss_fn)).partition(":")[0])
                with torch.no_grad():
                    right.append(losses == [plain(**each).item() for each in step][: len(losses)] and len(losses))
            found[order] = {"told": said, "right": right, "forwards": model.aside.forwards}
            found[order]["trained"] = told(lambda: engine.train_batch(iter(batches(1)[0]))).partition(":")[0]
    return found


def shorter_first_step(folder: Path) -> list[str]:
    """Steps of a model that layer-major order gets wrong: of one micro-batch on each rank, then of as many as the JSON has them
    bring. These are more than `gradient_accumulation_steps`, which is 1."""
    with running(folder, InANamespace, self_check=None, num_micro_batches=1, elastic={"total": 2 * M}) as (engine, _):
        steps = batches(1)[0][:1], batches(1)[0]
        return [told(partial(engine.train_batch, iter(step))).partition(":")[0] for step in steps]


def main(folder: str, case: str) -> None:
    cases: dict[str, Callable[[Path], Any]] = {
        "late": late,
        "alone": alone,
        "evaluations": evaluations,
        "first evaluations": first_evaluations,
        "shorter first step": shorter_first_step,
    }
    print(json.dumps(cases[case](Path(folder))))


if __name__ == "__main__":
    main(*sys.argv[1:])
