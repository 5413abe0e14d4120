"""One rank of the runs of tests/distributed/test_uneven.py, in which ranks bring different numbers of micro-batches.

    python tests/support/uneven_worker.py JOB.json

The job: {"folder": swap folder, "out": folder for <name>.rank<R>.pt, "runs": [{"name", ...}, ...]}; what a run may have: `Job`.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

# run as a script, so this folder is first on the path
import harness
import torch
from rank_worker import SIZES, VOCAB, OddModel, hear, poison

from ds_vertical.distributed import ranks
from ds_vertical.io import host
from ds_vertical.types import Tier

COUNTS: dict[int, list[tuple[int, ...]]] = {  # by ranks: per step, the micro-batches of each rank
    1: [(4,), (4,), (2,)],
    2: [(3, 1), (1, 3), (1, 1)],
    4: [(1, 2, 1, 3), (2, 1, 1, 1)],
}
NUM_ELASTIC_STEPS = 5
Batch = dict[str, torch.Tensor]


class TokenLoss:
    """The model's own loss, a mean over its tokens, with the number of these."""

    def __call__(self, loss: torch.Tensor, _: Batch) -> torch.Tensor:
        return loss

    def num_items(self, batch: Batch) -> int:
        return batch["labels"].numel()


def steps_of(counts: list[tuple[int, ...]]) -> list[list[Batch]]:
    """Per step all ranks' micro-batches, ragged."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for step, own in enumerate(counts):
        ids = [torch.randint(0, VOCAB, (1, 4 + (3 * index + step) % 7), generator=generator) for index in range(sum(own))]
        found.append([{"input_ids": each[:, :-1], "labels": each[:, 1:]} for each in ids])
    return found


def batches(counts: list[tuple[int, ...]], rank: int) -> list[list[Batch]]:
    """Those of a rank."""
    return [step[sum(own[:rank]) : sum(own[: rank + 1])] for own, step in zip(counts, steps_of(counts), strict=True)]


@dataclass(frozen=True)
class Job:
    """A run over `counts`. `weighted`: by tokens. `tier`: of parameters and state. `kind`: what is done besides
    training. `slow_s`: seconds that a micro-batch takes longer on rank 1."""

    name: str
    counts: list[list[int]]
    vertical: bool = True
    weighted: bool = False
    tier: str = "nvme"
    kind: str = "train"
    micro_batches: int = 3
    clip: float = 0.5
    section: dict[str, Any] = field(default_factory=dict)
    slow_s: float = 0.0

    def config(self, folder: Path) -> dict[str, Any]:
        made = harness.base_config(
            folder,
            num_micro_batches=self.micro_batches,
            dtype="fp32",
            clip=self.clip,
            section=self.section,
            params=self.tier,
            optimizer=self.tier,
            sub_group_size=200_001,  # less than half a matrix
        )
        return harness.small_buffers(made, 300_000) if self.tier == "nvme" else made

    def batches(self, rank: int) -> list[list[Batch]]:
        return batches([tuple(each) for each in self.counts], rank)

    @property
    def loss_fn(self) -> TokenLoss | None:
        return TokenLoss() if self.weighted else None


build = OddModel


def straight(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """The steps: losses, samples, weights and state."""
    with harness.running(job.config(folder), build, vertical=True) as (engine, model):
        losses = [engine.train_batch(iter(step)).item() for step in job.batches(rank)]
        weights, state = harness.read_weights(model), harness.own_state(engine, model, rank)
        return {"losses": losses, "samples": engine.global_samples, "weights": weights, "state": state}


def train(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """The steps."""
    return vars(harness.run_arm(job.config(folder), build, job.batches(rank), vertical=job.vertical, loss_fn=job.loss_fn))


def watched(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """The steps, with a monitor: its rows, and what the counters say behind each step."""
    made, monitors = job.config(folder), folder.parent / job.name
    made["csv_monitor"] = {"enabled": True, "output_path": str(monitors), "job_name": f"rank{rank}"}
    with harness.running(made, build, vertical=True) as (engine, _):
        seen = []
        for step in job.batches(rank):
            engine.train_batch(iter(step))
            seen.append((engine.global_samples, engine.global_steps, engine.get_lr(), engine._loop.shares.num_tokens))
    rows = {path.name: path.read_text() for path in monitors.glob("rank0/*.csv")}
    return {"seen": seen, "rows": rows, "tokens": [sum(b["input_ids"].numel() for b in step) for step in job.batches(rank)]}


def failing(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """A step in which the rank with fewer micro-batches fails, then one whose gradients are not finite there, and the steps."""
    first, *rest = job.batches(rank)

    def refuse(loss: torch.Tensor, _: Batch) -> torch.Tensor:
        if rank == 1:
            raise RuntimeError("no loss")
        return loss

    class NoItems(TokenLoss):
        def num_items(self, batch: Batch) -> int:
            if rank == 1:
                raise RuntimeError("no items")
            return super().num_items(batch)

    with harness.running(job.config(folder), build, vertical=True) as (engine, model):
        told = [hear(lambda each=each: engine.train_batch(iter(first), each)) for each in (refuse, NoItems())]
        engine.train_batch(iter(first), poison(rank))
        skipped, samples = engine.skipped_steps, engine.global_samples
        for step in (first, *rest):
            engine.train_batch(iter(step))
        return {"told": told, "skipped": skipped, "samples": samples, "weights": harness.read_weights(model)}


def resumed(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """The steps with a save and a load in another engine behind the first one."""
    saved, (first, *rest) = folder.parent / job.name, job.batches(rank)
    with harness.running(job.config(folder), build, vertical=True) as (engine, model):
        engine.train_batch(iter(first))
        engine.save_checkpoint(str(saved))
    with harness.running(job.config(folder), build, vertical=True) as (engine, model):
        engine.load_checkpoint(str(saved))
        losses = [engine.train_batch(iter(step)).item() for step in rest]
        return {
            "losses": losses,
            "samples": engine.global_samples,
            "weights": harness.read_weights(model),
            "state": harness.own_state(engine, model, rank),
        }


def refused(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """What this rank is told by the first step, and by one with equal numbers behind it."""
    first = job.batches(rank)[0]
    with harness.running(job.config(folder), build, vertical=True) as (engine, _):
        told = hear(lambda: engine.train_batch(iter(first)))
        return {"told": told, "then": hear(lambda: engine.train_batch(iter(first[:1])))}


def elastic(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """Steps of an endless iterator; a micro-batch takes longer on rank 1 by far. Rank 0 writes what the engine says to
    <name>.log. How many micro-batches each rank took, and what they computed."""
    endless = iter([batch for _ in range(20) for step in job.batches(rank) for batch in step])
    taken, losses, log = [], [], io.StringIO()

    def slow(loss: torch.Tensor, _: Batch) -> torch.Tensor:
        time.sleep(job.slow_s * rank)
        return loss

    with contextlib.redirect_stdout(log), harness.running(job.config(folder), build, vertical=job.vertical) as (engine, model):
        for _ in range(NUM_ELASTIC_STEPS):
            losses.append(engine.train_batch(endless, slow).item())
            taken.append(engine._loop.shares.counts if job.vertical else ())
        weights, state = harness.read_weights(model), harness.own_state(engine, model, rank)
        samples = engine.global_samples
    if rank == 0:
        (folder.parent / f"{job.name}.log").write_text(log.getvalue())
    torch.distributed.barrier()
    found = {"taken": taken, "losses": losses, "samples": samples, "weights": weights, "state": state}
    return found | {"log": log.getvalue()}


def by_calls(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """What a loop of the three calls is told."""
    import ds_vertical

    whole = job.batches(rank)[0][:1] * job.micro_batches
    with harness.running(job.config(folder), build, vertical=True) as (engine, _):
        return {"told": hear(lambda: [engine(**batch) for batch in ds_vertical.look_ahead(whole)])}


def several_calls(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """What micro-steps are told that call the model twice, where of rank 0's alone there is something to move; twice."""
    batches = job.batches(rank)[0]
    with harness.running(job.config(folder), build, vertical=True) as (engine, _):

        def micro_step(batch: Batch) -> None:
            engine.backward(engine(**batch) + engine(**batch))
            engine.step()

        runs = [partial(micro_step, batch) for batch in batches]
        return {"told": [hear(lambda: engine.train_window(runs, batches)) for _ in range(2)]}


def stock_calls(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """What a loop of the three calls, and a Trainer's micro-step, are told in the stock arm; then a step is taken."""
    from ds_vertical.engine.integrations.stock_calls import in_micro_step

    step = job.batches(rank)[0]
    with harness.running(job.config(folder), build, vertical=False) as (engine, _):
        calls = (lambda: engine(**step[0])), (lambda: in_micro_step(engine, step[0], lambda: engine(**step[0])))
        told = [hear(call) for call in calls]
        return {"told": told, "then": hear(lambda: engine.train_batch(iter(step * job.micro_batches)))}


def stock_items(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """What the stock arm's step says whose `num_items` fails on one rank, then a step."""

    class NoItems(TokenLoss):
        def num_items(self, batch: Batch) -> int:
            if rank == 1:
                raise RuntimeError("no items")
            return super().num_items(batch)

    step = job.batches(rank)[0]
    with harness.running(job.config(folder), build, vertical=False) as (engine, _):
        told = hear(lambda: engine.train_batch(iter(step), NoItems()))
        return {"told": [told], "then": hear(lambda: engine.train_batch(iter(step), TokenLoss()))}


def kept(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """Two steps of runs whose counts grow from 3 to 5 on rank 0, or to 4, where there is room for 4.5 micro-batches: of what
    is kept, and of what passes between layers where nothing is. What each step says, what the engine does, and how many steps
    there were."""
    batch, plenty, said = job.batches(rank)[0][:1], 8 << 30, dict[str, Any]()

    @contextlib.contextmanager
    def running(keep: str, most: int, host_bytes: int) -> Iterator[tuple[Any, list[str]]]:
        log, out = folder.parent / f"{keep} {most}.log", io.StringIO()
        log.write_text(f"elastic: from step 1: micro-batches 3 3\nelastic: from step 2: micro-batches {most} {6 - most}")
        elastic = {"counts": str(log)} | ({} if most == 5 else {"max_micro_batches": most})
        section = {"elastic": elastic, "activations": {"keep": keep}, "host_memory_bytes": host_bytes}
        told: list[str] = []
        made = replace(job, section=section).config(folder)
        with contextlib.redirect_stdout(out), harness.running(made, build, vertical=True) as (engine, _):
            yield engine, told
            for _ in range(2):
                try:
                    engine.train_batch(iter(batch * 5))
                except (RuntimeError, ValueError) as error:
                    told.append(f"{type(error).__name__}: {error}")
            said[f"{keep} {most}"] = told, out.getvalue(), engine.global_steps

    with mock.patch.object(host, "resident_bytes", lambda: 1 << 30):
        with running("everything", 4, plenty) as (engine, _):
            left = min(ranks.all_gathered(engine._keeping._left))
        of_one = engine._keeping.store.resting[Tier.DEVICE][1] // engine._loop.shares.counts[rank]
        room = {"everything": max(ranks.all_gathered(of_one)), "none": 3 * 4 * SIZES["fp32"][1] * batch[0]["input_ids"].numel()}
        for keep, most in (("everything", 5), ("everything", 4), ("none", 5), ("none", 4)):
            enough = plenty - 2 * (left - round(4.5 * max(ranks.all_gathered(room[keep]))))  # of two ranks
            with running(keep, most, enough):
                pass
    return said


def told(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """What `initialize` says to this section."""
    try:
        harness.build_engine(job.config(folder), build, vertical=job.vertical)
    except (RuntimeError, ValueError) as error:
        return {"told": (type(error).__name__, str(error), 0.0)}
    return {"told": ("nothing", "", 0.0)}


KINDS = {
    "straight": straight,
    "train": train,
    "watched": watched,
    "failing": failing,
    "resumed": resumed,
    "refused": refused,
    "elastic": elastic,
    "told": told,
    "by calls": by_calls,
    "kept": kept,
    "several calls": several_calls,
    "stock calls": stock_calls,
    "stock items": stock_items,
}


def main(job: Path) -> None:
    given = json.loads(job.read_text())
    torch.set_num_threads(1)
    harness.start_process_group()
    rank = torch.distributed.get_rank()
    for entry in given["runs"]:
        each = Job(**entry)
        torch.save(KINDS[each.kind](each, Path(given["folder"]), rank), Path(given["out"]) / f"{each.name}.rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
