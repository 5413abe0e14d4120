"""One rank of the runs of tests/distributed/test_acco.py, whose steps have two halves.

    python tests/support/acco_worker.py JOB.json

The job: {"folder": swap folder, "out": folder for <name>.rank<R>.pt, "runs": [{"name", ...}, ...]}; what a run may have: `Job`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# run as a script, so this folder is first on the path
import cutting
import deepspeed
import harness
import torch
from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param
from memory_reads import counted
from rank_worker import hear
from torch import nn

VOCAB, WIDTH = 53, 37
ADAM = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.01}  # an eps beside which no rounding counts
NUM_DESCENTS = 25
CURVATURES = (1.0, 3.0, 6.0)
FAR = 1e6  # an eps beside which no gradient counts: then Adam without momenta is gradient descent at the rate lr / eps
Batch = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH + 4), nn.Linear(WIDTH + 4, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(nn.functional.layer_norm(hidden, hidden.shape[-1:]))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), labels.flatten())


class Frozen(Model):
    """Trains neither its embedding nor its second block."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.embed, self.blocks[1]):
            module.requires_grad_(False)


def batches(counts: Sequence[Sequence[int]], rank: int, repeated: bool = False, blank: int | None = None) -> list[list[Batch]]:
    """Per step the micro-batches of a rank, of different lengths. `repeated`: each step has the same ones twice. `blank`: the
    step whose first half weighs nothing (`items_of`)."""
    steps = []
    for step, own in enumerate(counts):
        count = own[rank] // 2 if repeated else own[rank]
        made = []
        for index in range(count):
            generator = torch.Generator().manual_seed(1000 * step + 100 * rank + index)
            ids = torch.randint(0, VOCAB, (1, 6 + (3 * index + step + rank) % 5), generator=generator)
            is_blank = step == blank and index < count // 2
            made.append({"input_ids": ids[:, :-1], "labels": ids[:, 1:] * (not is_blank)})
        steps.append(made * 2 if repeated else made)
    return steps


def items_of(batch: Batch) -> int:
    """What a micro-batch weighs in the mean of a run that is `weighted`."""
    return batch["labels"].numel() if batch["labels"].any() else 0


class Bowl(nn.Module):
    """A quadratic: each block adds half its curvature times the square of its only parameter."""

    class Side(nn.Module):
        def __init__(self, curvature: float) -> None:
            super().__init__()
            self.curvature, self.place = curvature, nn.Parameter(torch.ones(1))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + self.curvature / 2 * self.place.square()

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))
        self.blocks = nn.ModuleList(Bowl.Side(curvature) for curvature in CURVATURES)

    def forward(self, start: torch.Tensor) -> torch.Tensor:
        hidden = start + self.offset.square()
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.sum()


class TokenLoss:
    """The model's own loss, a mean over its tokens, with the number of these."""

    def __call__(self, loss: torch.Tensor, _: Batch) -> torch.Tensor:
        return loss

    def num_items(self, batch: Batch) -> int:
        return items_of(batch)


@dataclass(frozen=True)
class Job:
    """A run over `counts`, per step the micro-batches of each rank. `acco`: the section's; None: exact steps. `zero`: further
    keys of zero_optimization; `top`: of the JSON, None for one that it has not. `shares`: whether the ranks of a host can share
    memory."""

    name: str
    counts: list[list[int]]
    acco: dict[str, Any] | None = None
    kind: str = "train"
    repeated: bool = False
    micro_batches: int = 4
    dtype: str = "fp32"
    clip: float = 0.5
    weighted: bool = False
    blank: int | None = None
    frozen: bool = False
    rate: float = 0.0
    first: int = 0
    section: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    shares: bool = True

    def config(self, folder: Path) -> dict[str, Any]:
        section = self.section | ({} if self.acco is None else {"acco": self.acco})
        made = harness.base_config(
            folder,
            num_micro_batches=self.micro_batches,
            dtype=self.dtype,
            clip=self.clip,
            section=section,
            params="cpu",
            optimizer="cpu",
        )
        made["optimizer"]["params"] |= ADAM
        made["scheduler"]["params"] |= {"warmup_min_lr": ADAM["lr"] / 10, "warmup_max_lr": ADAM["lr"]}
        made["zero_optimization"] |= self.zero
        return {key: value for key, value in (made | self.top).items() if value is not None}

    @property
    def build(self) -> type[Model]:
        return Frozen if self.frozen else Model

    def batches(self, rank: int) -> list[list[Batch]]:
        return batches(self.counts, rank, self.repeated, self.blank)


def own(shares: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """A rank's shares without what stands behind a parameter's end, which is nobody's."""
    found, num_ranks = {}, torch.distributed.get_world_size()
    for name, share in shares.items():
        numel = weights[name.partition("/")[0]].numel()
        found[name] = share.flatten()[: max(0, numel - rank * -(-numel // num_ranks))]
    return found


def contents(engine: Any, model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Weights, and this rank's masters and moments."""
    weights = harness.read_weights(model)
    return weights | own(harness.read_state(engine, model), weights, rank)


def train(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """The steps. What each committed: losses, norms, gradients, the learning rate of each and that behind it; weights and state
    at the end."""
    rates: list[float] = []

    def between(engine: Any, _: int) -> None:
        rates.append(engine.get_lr()[0])

    loss_fn = TokenLoss() if job.weighted else None
    run = harness.run_arm(job.config(folder), job.build, job.batches(rank), vertical=True, between=between, loss_fn=loss_fn)
    run.state = own(run.state, run.weights, rank)
    run.grads = [own(grads, run.weights, rank) for grads in run.grads]
    return vars(run) | {"rates": rates, "taken": [ADAM["lr"] / 10, *rates[:-1]]}


def untouched(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """Which of this rank's masters, moments, steps and powers are others behind each tentative step than before it."""
    from ds_vertical.engine.acco.tentative import TentativeStep

    changed: list[list[str]] = []
    predicted: list[bool] = []
    with harness.running(job.config(folder), Model, vertical=True) as (engine, model):
        del model
        stepper, driver = engine.optimizer.stepper, engine.optimizer.driver

        def state() -> dict[str, torch.Tensor]:
            pieces = {
                f"{index}/{kind}": flat.clone()
                for index, chunk in enumerate(stepper.chunks)
                for kind, flat in zip(("master", "exp_avg", "exp_avg_sq"), chunk.resident(), strict=True)
            }
            weights = {name: p.ds_tensor.detach().clone() for name, p in engine.module.named_parameters()}
            powers = driver.powers
            numbers = torch.tensor([powers.step, powers.beta1, powers.beta2, powers.anchor, driver.num_decided])
            inside = engine.optimizer.kernel._powers
            return pieces | weights | {"powers": numbers, "kernel": torch.tensor([inside.step, inside.anchor])}

        step = TentativeStep.step

        def watched(self: TentativeStep, unit: Any) -> Any:
            before = state()
            ticket = step(self, unit)
            if ticket is not None:
                ticket.wait()
            predicted.append(ticket is not None)
            changed.append(harness.differing(before, state()))
            return ticket

        TentativeStep.step = watched  # type: ignore[method-assign]
        try:
            for each in job.batches(rank):
                engine.train_batch(iter(each))
        finally:
            TentativeStep.step = step  # type: ignore[method-assign]
    return {"changed": [each for each in changed if each], "num": sum(predicted)}


def resumed(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """The steps, with a save and a load in another engine behind the second one."""
    saved, steps = folder.parent / job.name, job.batches(rank)
    with harness.running(job.config(folder), job.build, vertical=True) as (engine, model):
        losses = [engine.train_batch(iter(step)).item() for step in steps[:2]]
        engine.save_checkpoint(str(saved))
    with harness.running(job.config(folder), job.build, vertical=True) as (engine, model):
        engine.load_checkpoint(str(saved))
        losses += [engine.train_batch(iter(step)).item() for step in steps[2:]]
        return {"losses": losses, "contents": contents(engine, model, rank), "lr": engine.get_lr()}


def evaluated(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """The steps, with an evaluation and a read of the weights behind each; both are of the committed weights."""
    seen, steps = [], job.batches(rank)
    with harness.running(job.config(folder), Model, vertical=True) as (engine, model):
        losses = []
        for step in steps:
            losses.append(engine.train_batch(iter(step)).item())
            value = engine.eval_batch(iter(step[:1])).item()
            plain = Model()
            plain.load_state_dict(harness.read_weights(model))
            seen.append((value, plain(**step[0]).item()))
        return {"losses": losses, "seen": seen, "contents": contents(engine, model, rank), "lr": engine.get_lr()}


def failing(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """In the third step rank 1 fails in the first half, then in the second; then the step is taken as it should be."""
    steps, told, losses = job.batches(rank), [], []

    def fail_at(number: int) -> Callable[[torch.Tensor, Batch], torch.Tensor]:
        calls = iter(range(number))

        def failing_loss(loss: torch.Tensor, _: Batch) -> torch.Tensor:
            if rank == 1 and next(calls, None) is None:
                raise RuntimeError("no luck here")
            return loss

        return failing_loss

    with harness.running(job.config(folder), Model, vertical=True) as (engine, model):
        for number, step in enumerate(steps):
            if number == 2:
                told = [hear(partial(engine.train_batch, iter(step), fail_at(each))) for each in (0, 3)]
            losses.append(engine.train_batch(iter(step)).item())
        return {"told": told, "losses": losses, "contents": contents(engine, model, rank), "lr": engine.get_lr()}


class Gate:
    """Holds the reductions of gradients back from the first half's last REDUCE on, while steps are `watched`, until `open` is
    called; unless it `holds` none. `is_behind`: that REDUCE has been issued. `passed`: reductions that have come through here;
    `late`: those that nobody has let through in time."""

    def __init__(self, holds: bool = True) -> None:
        self.watched = self.is_behind = False
        self.passed = self.late = 0
        self._holds = holds
        self._is_open = threading.Event()
        self._is_open.set()

    @property
    def is_closed(self) -> bool:
        return not self._is_open.is_set()

    def open(self) -> None:
        self._is_open.set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[Gate]:
        from ds_vertical.distributed import levels
        from ds_vertical.engine.acco.halves import FirstHalf

        exchanged, scattered, reduce_unit = levels._exchanged, torch.distributed.reduce_scatter_tensor, FirstHalf.reduce_unit
        line = ThreadPoolExecutor(1)  # of one level's reductions, in their order

        def exchanged_later(rows: torch.Tensor, group: Any) -> torch.Tensor:
            self._hold()
            return exchanged(rows, group)

        def scattered_later(share: torch.Tensor, buffer: torch.Tensor, group: Any, async_op: bool) -> Any:
            def scatter() -> None:
                self._hold()
                scattered(share, buffer, group=group)

            assert async_op
            return SimpleNamespace(wait=line.submit(scatter).result)

        def reduced(half: FirstHalf, unit: Any, *args: Any) -> bool:
            if unit == "pre" and self.watched:
                self.is_behind = True
                if self._holds:
                    self._is_open.clear()
            return reduce_unit(half, unit, *args)

        levels._exchanged, FirstHalf.reduce_unit = exchanged_later, reduced  # type: ignore[method-assign]
        torch.distributed.reduce_scatter_tensor = scattered_later
        try:
            yield self
        finally:
            self.open()
            line.shutdown()
            levels._exchanged, FirstHalf.reduce_unit = exchanged, reduce_unit  # type: ignore[method-assign]
            torch.distributed.reduce_scatter_tensor = scattered

    def _hold(self) -> None:
        self.late += not self._is_open.wait(0 if self.late else 30)
        self.passed += 1


@contextlib.contextmanager
def ahead_of(owner: Any, name: str, act: Callable[..., None]) -> Iterator[None]:
    """Within the block `act` is called with the arguments of each call of a method, ahead of it."""
    method = getattr(owner, name)

    def watched(*args: Any) -> Any:
        act(*args)
        return method(*args)

    setattr(owner, name, watched)
    try:
        yield
    finally:
        setattr(owner, name, method)


def beside(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """The steps, where in each the first half's last gradients are held back until the second half comes to NORM@-1. `opened`:
    the last forward that each step has begun by then."""
    from ds_vertical.engine.acco.halves import SecondHalf
    from ds_vertical.engine.handlers import _Training

    opened: list[str] = []
    last = ""

    def note(_: Any, event: Any) -> None:
        nonlocal last
        last = str(event)

    def let_through(_: Any) -> None:
        opened.append(last)
        gate.open()

    notes, opens = ahead_of(_Training, "forward", note), ahead_of(SecondHalf, "left", let_through)
    with Gate().installed() as gate, notes, opens:
        gate.watched = True
        found = train(job, folder, rank)
    return found | {"opened": opened, "passed": gate.passed, "late": gate.late}


def broken(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """Behind two steps one that fails at many places while the first half's last gradients are held back: on rank 1 alone, or
    on both ranks by an interrupt. Each time it is taken again; `in_flight`: where it failed with gradients on their way."""
    from ds_vertical.engine.acco import halves, loop, tentative
    from ds_vertical.engine.handlers import _Training
    from ds_vertical.engine.zero3.step_driver import StepDriver

    steps, told, in_flight, losses = job.batches(rank), [], [], []
    due: list[BaseException] = []

    def fail(*_: Any) -> None:
        if gate.is_behind and due:
            in_flight.extend([place] * gate.is_closed)
            raise due.pop()

    def let_through(*_: Any) -> None:
        gate.open()

    places: dict[str, tuple[Any, str, Callable[..., None]]] = {
        "left": (halves._Half, "reducing", fail),
        "between": (loop.HalvesLoop, "_run_half", fail),
        "forward": (_Training, "forward", fail),
        "waiting": (halves.SecondHalf, "left", fail),
        "deciding": (tentative.TentativeStep, "decide", fail),
        "made": (tentative.TentativeStep, "step", fail),
    }
    alone = ("left", "forward", "waiting", "made")  # elsewhere one rank's error would leave the other one in a collective
    gate = Gate(holds=job.section.get("overlap", True))
    with harness.running(job.config(folder), Model, vertical=True) as (engine, model), gate.installed():
        for number, step in enumerate(steps):
            tries = [(each, RuntimeError("no luck")) for each in alone] + [(each, KeyboardInterrupt()) for each in places]
            for place, error in tries if number == 2 else ():
                due[:] = [error] if rank == 1 or isinstance(error, KeyboardInterrupt) else []
                gate.watched, gate.is_behind = True, False
                # a rank that does not fail there lets its gradients through where it waits for them
                opens = ahead_of(halves.SecondHalf, "left", let_through)
                with opens, ahead_of(*places[place]), ahead_of(StepDriver, "abandon", let_through):
                    try:
                        told.append((place, hear(partial(engine.train_batch, iter(step)))[0]))
                    except KeyboardInterrupt:
                        told.append((place, "KeyboardInterrupt"))
                gate.watched = False
                gate.open()
            losses.append(engine.train_batch(iter(step)).item())
        found = {"told": told, "in_flight": in_flight, "passed": gate.passed, "late": gate.late, "losses": losses}
        return found | {"contents": contents(engine, model, rank), "lr": engine.get_lr()}


def poisoned(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """Behind two steps one whose gradients are not finite on rank 1, from micro-batch `job.first` on, then the same step as it
    should be: what counts. `plain`: the loss of that step at the weights that are committed ahead of it."""
    steps, calls = job.batches(rank), iter(range(job.first))

    def poison(loss: torch.Tensor, _: Batch) -> torch.Tensor:
        return loss * float("inf") if rank == 1 and next(calls, None) is None else loss

    with harness.running(job.config(folder), Model, vertical=True) as (engine, model):
        for step in steps[:2]:
            engine.train_batch(iter(step))
        before = contents(engine, model, rank)
        engine.train_batch(iter(steps[2]), poison)
        found = {"skipped": engine.skipped_steps, "changed": harness.differing(before, contents(engine, model, rank))}
        found["predicts"] = engine._steps._prediction.is_there
        plain = Model()
        plain.load_state_dict(harness.read_weights(model))
        found["plain"] = sum(plain(**batch).item() for batch in steps[2]) / len(steps[2])
        losses = [engine.train_batch(iter(step)).item() for step in steps[2:]]
        return found | {"losses": losses, "again": engine._steps._prediction.is_there}


def written(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """Behind two steps a user writes a master: whether the next step still predicts with what was there."""
    steps = job.batches(rank)
    with harness.running(job.config(folder), Model, vertical=True) as (engine, model):
        for step in steps[:2]:
            engine.train_batch(iter(step))
        before = engine._steps._prediction.is_there
        param = model.get_parameter("head.weight")
        safe_set_local_fp32_param(param, safe_get_local_fp32_param(param) * 1.5)
        return {"before": before, "behind": engine._steps._prediction.is_there}


def gathered(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """Behind two steps a user writes a weight: the loss of the next step, both halves of which see that."""
    steps = job.batches(rank)
    with harness.running(job.config(folder), Model, vertical=True) as (engine, model):
        for step in steps[:2]:
            engine.train_batch(iter(step))
        before, head = engine._steps._prediction.is_there, list(model.head.parameters())
        with deepspeed.zero.GatheredParameters(head):
            pass
        read = engine._steps._prediction.is_there
        with deepspeed.zero.GatheredParameters(head, modifier_rank=0), torch.no_grad():
            for param in head:
                param.zero_()
        return {"before": before, "read": read, "loss": engine.train_batch(iter(steps[2])).item()}


def told(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """What `initialize`, or else the first step, says."""
    try:
        with harness.running(job.config(folder), Model, vertical=True) as (engine, _):
            return {"told": hear(lambda: engine.train_batch(iter(job.batches(rank)[0])))}
    except ValueError as error:
        return {"told": (type(error).__name__, str(error), 0.0)}


def by_calls(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """What a loop of the three calls is told."""
    import ds_vertical

    step = job.batches(rank)[0]
    with harness.running(job.config(folder), Model, vertical=True) as (engine, _):
        return {"told": hear(lambda: [engine(**batch) for batch in ds_vertical.look_ahead(step)])}


def ending(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """An epoch that leaves one micro-batch to rank 1 in its second step: what the ranks are told, and the loss of a step whose
    iterators go on into the next epoch, as they are told to do."""
    epoch = job.batches(rank)[0]
    data = iter(epoch)
    with harness.running(job.config(folder), Model, vertical=True) as (engine, _):
        engine.train_batch(data)
        told = hear(partial(engine.train_batch, data))
        rest = epoch[job.micro_batches :]
        again = engine.train_batch(itertools.chain(rest, epoch)).item()
        return {"told": told, "again": again, "steps": engine.global_steps, "brought": engine._loop.shares.counts}


def elastic(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """Steps whose counts the ranks choose by what they measure: what each step brought, and the learning rates."""
    data, counts, rates = itertools.cycle(job.batches(rank)[0]), [], []
    with harness.running(job.config(folder), Model, vertical=True) as (engine, _):
        for _ in job.counts:
            loss = engine.train_batch(data).item()
            counts.append(engine._loop.shares.counts)
            rates.append(engine.get_lr()[0])
        return {"counts": counts, "rates": rates, "loss": loss}


def cut(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """Both ranks are interrupted at the same boundary of a function of `engine/acco`, at one after the other. What went on with
    other numbers than a run that nobody interrupts."""
    steps, made = job.batches(rank), job.config(folder)
    made["scheduler"]["params"]["warmup_num_steps"] = 10 * len(steps)  # each step of the scheduler is another rate
    make = partial(harness.build_engine, made, Model, vertical=True)
    read = partial(contents, rank=rank)
    with cutting.Trials(folder / "cut" / str(rank), lambda _: make(), steps, read=read) as trials:
        own = {site: n for site, n in trials.found.items() if site.file.startswith("engine/acco/")}
        sent = [cutting.chosen(Counter(own))]
        torch.distributed.broadcast_object_list(sent, 0)  # the first rank's: all are cut at the same ones
        for each in sent[0]:
            trials.cut(each)
    reached = cutting.are_reached(sent[0])
    return {"wrong": trials.wrong, "torn": trials.torn, "whole": trials.whole, "reached": reached, "num": len(sent[0])}


def descend(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """The losses of gradient descent on `Bowl`, at the rate of `job.rate`."""
    made = job.config(folder)
    made["optimizer"]["params"] |= {"lr": job.rate * FAR, "eps": FAR, "betas": [0.0, 0.0], "weight_decay": 0.0}
    del made["scheduler"]
    step = [{"start": torch.zeros(1)}] * job.micro_batches
    with harness.running(made, Bowl, vertical=True) as (engine, _):
        return {"losses": [engine.train_batch(iter(step)).item() for _ in range(NUM_DESCENTS)]}


KINDS = {
    **{"train": train, "untouched": untouched, "resumed": resumed, "evaluated": evaluated, "failing": failing},
    **{"descend": descend, "poisoned": poisoned, "written": written, "gathered": gathered, "told": told, "by calls": by_calls},
    **{"ending": ending, "elastic": elastic, "cut": cut, "beside": beside, "broken": broken},
}


def main(job: Path) -> None:
    given = json.loads(job.read_text())
    torch.set_num_threads(1)
    harness.start_process_group()
    rank = torch.distributed.get_rank()
    for entry in given["runs"]:
        each = Job(**entry)
        with counted(each.shares) as gathers:
            found = KINDS[each.kind](each, Path(given["folder"]), rank)
        torch.save(found | {"gathers": dict(gathers)}, Path(given["out"]) / f"{each.name}.rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
