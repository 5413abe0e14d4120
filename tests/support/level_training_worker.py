"""One rank of the four-rank runs of tests/distributed/test_levels_engine.py, started with the launcher's variables set.

    python tests/support/level_training_worker.py JOB.json

The job: {"folder": swap folder, "out": folder for <name>.rank<R>.pt, "runs": [{"name", ...}, ...]}; what a run may have: `Job`.
The ranks are on one host, and two of them are a node.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

# run as a script, so this folder is first on the path
import harness
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from hops import act_in
from memory_reads import counted
from rank_worker import SIZES, VOCAB, OddBlock, OddModel, OddScale, hear, poison

from ds_vertical.distributed import levels
from ds_vertical.distributed.topology import Level
from ds_vertical.distributed.unit_levels import LevelReductions, topology_for

NUM_RANKS = int(os.environ.get("WORLD_SIZE", "4"))
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


class ScaledBlock(OddBlock):
    """With a small parameter, which may stay on the device."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.scale = OddScale(args[0])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(self.scale(hidden))


class ScaledModel(OddModel):
    def __init__(self) -> None:
        super().__init__("bf16")
        _, width, inner = SIZES["bf16"]
        self.blocks = torch.nn.ModuleList(ScaledBlock(width, inner, 10 * index + 10) for index in range(3))


@dataclass(frozen=True)
class Job:
    """A run of some steps. `levels`: the section's; None: one level. `zero`: further keys of zero_optimization. `kind`: what
    is done besides training. `places`: of "params" and "optimizer" the device where it is not "nvme"; `persistence`: the
    elements up to which a parameter stays on the device. `sets`: state is set behind the first step (`set_state`). `shares`:
    whether the ranks of a host can share memory."""

    name: str
    levels: dict[str, Any] | None = None
    zero: dict[str, Any] | None = None
    kind: str = "train"
    micro_batches: int = 2
    steps: int = 2
    clip: float = 0.0
    section: dict[str, Any] | None = None
    hop: str = ""
    places: dict[str, str] | None = None
    persistence: int = 0
    dtype: str = "fp32"
    sets: bool = False
    shares: bool = True

    def config(self, folder: Path) -> dict[str, Any]:
        """Blocks on SSD, embedding and head in host memory: they are a little smaller."""
        made = harness.base_config(
            folder,
            num_micro_batches=self.micro_batches,
            dtype=self.dtype,
            clip=self.clip,
            section=dict(self.section or {}) | ({} if self.levels is None else {"levels": self.levels}),
            sub_group_size=400_001,
            persistence=self.persistence,
            **(self.places or {}),
        )
        if self.levels is not None:
            made["zero_optimization"]["zero_hpz_partition_size"] = 2
        made["zero_optimization"] |= self.zero or {}
        return harness.small_buffers(made, 600_000)

    def batches(self, rank: int) -> list[list[dict[str, torch.Tensor]]]:
        """Per step, this rank's micro-batches, ragged."""
        generator = torch.Generator().manual_seed(7)
        steps = []
        for step in range(self.steps):
            lengths = [4 + (index + step) % 5 for index in range(self.micro_batches * NUM_RANKS)]
            every = [torch.randint(0, VOCAB, (1, length), generator=generator) for length in lengths]
            own = every[rank * self.micro_batches : (rank + 1) * self.micro_batches]
            steps.append([{"input_ids": ids[:, :-1], "labels": ids[:, 1:]} for ids in own])
        return steps


def set_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Changes the value and the first moment of a parameter in host memory and of one on SSD, by DeepSpeed's calls. Returns
    what these gave before, and asserts that they give what was set."""
    gave = {}
    for name in ("embed.weight", "blocks.1.up.weight"):
        param = model.get_parameter(name)
        gave[name], moment = safe_get_full_fp32_param(param), safe_get_full_optimizer_state(param, "exp_avg")
        gave[f"{name} exp_avg"], value, other = moment, gave[name] * 1.25, moment * 0.5
        safe_set_full_fp32_param(param, value)
        safe_set_full_optimizer_state(param, other, "exp_avg")
        assert torch.equal(safe_get_full_fp32_param(param), value)
        assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), other)
    return gave


def train(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """The steps, and an evaluation behind each."""
    evaluated: list[float] = []
    texts: list[str] = []
    gave: dict[str, torch.Tensor] = {}

    def between(engine: Any, step: int) -> None:
        if step == 0 and job.sets:
            gave.update(set_state(engine.module))
        evaluated.append(engine.eval_batch(iter(job.batches(rank)[step])).item())
        texts.append(engine.ran.to_text())

    run = harness.run_arm(job.config(folder), partial(OddModel, "bf16"), job.batches(rank), vertical=True, between=between)
    run.state = harness.own_shares(run.state, run.weights, rank)
    run.grads = [harness.own_shares(grads, run.weights, rank) for grads in run.grads]
    return vars(run) | {"evaluated": evaluated, "schedule": texts[-1], "gave": gave}


def train_both_arms(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """The steps by one JSON, but for `enabled`."""
    found = {}
    for arm in ("vertical", "stock"):  # the latter's groups for hpZ stay in the process
        model = partial(OddModel, "bf16")
        run = harness.run_arm(job.config(folder), model, job.batches(rank), vertical=arm == "vertical")
        found[arm] = {"losses": run.losses, "norms": run.norms, "weights": run.weights}
    return found


def train_in_one_hop(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """As `train`, and each gradient goes to its owner in one hop over all ranks, and is added there in the levels' order."""

    def start(reductions: Any, unit: Any, sums: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        topology, numels = topology_for(reductions.settings), [total.numel() for total in sums]
        terms = levels.cut_into_chunks(sums, range(NUM_RANKS), NUM_RANKS)
        received = torch.empty_like(terms)
        torch.distributed.all_to_all_single(received, terms)
        chunk = levels.tree_sum(received, [topology.width(level) for level in (Level.PAIR, Level.NODE, Level.WORLD)])
        sizes = levels.shard_sizes(numels, NUM_RANKS)
        lengths = [max(0, min(size, numel - rank * size)) for size, numel in zip(sizes, numels, strict=True)]
        shares = [place[:length] for place, length in zip(chunk.split(sizes), lengths, strict=True)]
        return lambda: shares

    with mock.patch.object(LevelReductions, "start", start):
        return train(job, folder, rank)


def contents(engine: Any, model: torch.nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Weights, and this rank's masters and moments."""
    return harness.read_weights(model) | harness.own_state(engine, model, rank)


def resume(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """A step and a save with levels, then one step more: in this engine, and in one with a single level that resumes there; and
    the other way round."""
    saved, steps = folder.parent / "saved", job.batches(rank)
    flat = Job(job.name)
    found: dict[str, Any] = {}
    for first, second in ((job, flat), (flat, job)):
        tag = "from levels" if first is job else "from flat"
        with harness.running(first.config(folder), partial(OddModel, "bf16"), vertical=True) as (engine, model):
            engine.train_batch(iter(steps[0]))
            engine.save_checkpoint(str(saved), tag=tag)
            before = contents(engine, model, rank)
        with harness.running(second.config(folder), partial(OddModel, "bf16"), vertical=True) as (engine, model):
            engine.load_checkpoint(str(saved), tag=tag)
            found[tag] = harness.differing(before, contents(engine, model, rank))
            engine.train_batch(iter(steps[1]))
            found[f"{tag}, then"] = harness.read_weights(model)
    return found


def suffer(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """A rank cannot read a parameter in the forward, then in an evaluation; its step is taken again behind each."""
    steps, told = job.batches(rank), []
    with harness.running(job.config(folder), partial(OddModel, "bf16"), vertical=True) as (engine, model):
        engine.train_batch(iter(steps[0]))
        engine.flush()
        path = Path(engine.param_store.files.by_unit[2][0].path)  # not among those that are read ahead
        content = path.read_bytes()
        for call in (lambda: engine.train_batch(iter(steps[1])), lambda: engine.eval_batch(iter(steps[1]))):
            if rank == 1:
                path.write_bytes(content[:4096])
            told.append(hear(call))
            path.write_bytes(content)
        engine.train_batch(iter(steps[1]))
        return {"told": told, "weights": harness.read_weights(model)}


def written(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """Between two steps and two evaluations a user writes a parameter in host memory and one on SSD."""
    first, second = job.batches(rank)
    with harness.running(job.config(folder), partial(OddModel, "bf16"), vertical=True) as (engine, model):
        engine.train_batch(iter(first))
        evaluated = [engine.eval_batch(iter(first)).item()]
        for name, factor in (("embed.weight", 1.5), ("blocks.1.up.weight", 0.5)):
            param = model.get_parameter(name)
            with GatheredParameters([param], modifier_rank=0), torch.no_grad():
                param.mul_(factor if rank == 0 else 1.0)
        evaluated.append(engine.eval_batch(iter(first)).item())
        loss = engine.train_batch(iter(second)).item()
        stood = engine.ran.standing
        return {"evaluated": evaluated, "loss": loss, "stood": stood, "weights": harness.read_weights(model)}


def suffer_first(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """Rank 1 fails in the forward of its very first step, behind the last layer; the step is taken again. `places`: where its
    parameters rest, of which small ones stay on the device."""
    first, second = job.batches(rank)
    with harness.running(job.config(folder), ScaledModel, vertical=True) as (engine, model):

        def failing(loss: torch.Tensor, _: Any) -> torch.Tensor:
            if rank == 1:
                raise OSError("no luck here")
            return loss

        told = hear(lambda: engine.train_batch(iter(first), failing))
        for step in (first, second):
            engine.train_batch(iter(step))
        return {"told": told, "weights": harness.read_weights(model)}


def poisoned(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """A step whose gradients are not finite on rank 1 alone, and one that is: which of them count."""
    good, bad = job.batches(rank)
    with harness.running(job.config(folder), partial(OddModel, "bf16"), vertical=True) as (engine, model):
        before = harness.read_weights(model)
        engine.train_batch(iter(bad), poison(rank))
        skipped = engine.skipped_steps, harness.differing(before, harness.read_weights(model))
        loss = engine.train_batch(iter(good)).item()
        return {"skipped": skipped, "loss": loss, "changed": harness.differing(before, harness.read_weights(model))}


def killed(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """A step and a save. In the second step rank 1 is killed within a hop of the event that `job.hop` names. Nobody else
    returns."""

    def die(members: list[int]) -> None:
        (folder.parent / "failing").write_text(json.dumps(members))
        os.kill(os.getpid(), signal.SIGKILL)

    with harness.running(job.config(folder), partial(OddModel, "bf16"), vertical=True) as (engine, model):
        first, second = job.batches(rank)
        engine.train_batch(iter(first))
        engine.save_checkpoint(str(folder.parent / "saved"))
        torch.save(contents(engine, model, rank), folder.parent / f"at the save.rank{rank}.pt")
        if rank == 1:
            act_in(job.hop, 2, 1, die)
        engine.train_batch(iter(second))
    raise AssertionError("a step without rank 1")


def loaded(job: Job, folder: Path, rank: int) -> dict[str, Any]:
    """Behind `killed`, in other processes: what the checkpoint does not bring back, and the second step."""
    expected = torch.load(folder.parent / f"at the save.rank{rank}.pt", weights_only=True)
    with harness.running(job.config(folder), partial(OddModel, "bf16"), vertical=True) as (engine, model):
        engine.load_checkpoint(str(folder.parent / "saved"))
        found = harness.differing(expected, contents(engine, model, rank))
        engine.train_batch(iter(job.batches(rank)[1]))
        return {"differing": found, "weights": harness.read_weights(model)}


KINDS = {
    **{
        "train": train,
        "both arms": train_both_arms,
        "resume": resume,
        "suffer": suffer,
        "suffer first": suffer_first,
        "written": written,
    },
    **{"poisoned": poisoned, "killed": killed, "loaded": loaded, "one hop": train_in_one_hop},
}


def main(job: Path) -> None:
    given = json.loads(job.read_text())
    harness.start_process_group()
    rank = torch.distributed.get_rank()
    folder = Path(given["folder"])
    for entry in given["runs"]:
        each = Job(**entry)
        with counted(each.shares) as gathers:
            found = KINDS[each.kind](each, folder, rank)
        torch.save(found | {"gathers": dict(gathers)}, Path(given["out"]) / f"{each.name}.rank{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
