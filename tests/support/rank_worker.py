"""One rank of the two-rank runs of tests/distributed/test_ranks.py, started with the launcher's variables set.

    python tests/support/rank_worker.py JOB.json

The job: {"folder": swap folder, "out": folder for rank<R>.pt, "runs": [{"name", "dtype", "vertical", "options"}, ...]},
the options those of `config`; with "alone" in the place of "runs" nothing else is tried.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

# run as a script, so this folder is first on the path
import harness
import numpy as np
import rank_persistent
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from faults import small_files
from torch import nn

NUM_STEPS = 3
NUM_MICRO_BATCHES = 2
# vocabulary, width, inner width: odd, so that no matrix can be halved, and just so large that its half is over 1 MiB
SIZES = {"fp32": (725, 725, 727), "bf16": (1021, 1025, 1027)}
VOCAB, WIDTH, INNER = SIZES["fp32"]


@cache
def drawn(rows: int, columns: int, seed: int) -> np.ndarray:
    """Kept, for twenty engines in a process."""
    values = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
    bits = (values / np.float32(columns**0.5)).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


class OddLinear(nn.Linear):
    """No bias; weights that bf16 holds exactly, so that runs in either dtype start from the same ones."""

    def __init__(self, rows: int, columns: int, seed: int) -> None:
        self.seed = seed
        super().__init__(columns, rows, bias=False)

    def reset_parameters(self) -> None:
        self.weight.data.copy_(torch.from_numpy(drawn(self.out_features, self.in_features, self.seed)))


class OddBlock(nn.Module):
    def __init__(self, width: int, inner: int, seed: int) -> None:
        super().__init__()
        self.up = OddLinear(inner, width, seed)
        self.down = OddLinear(width, inner, seed + 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = nn.functional.layer_norm(hidden, hidden.shape[-1:])
        return hidden + self.down(nn.functional.gelu(self.up(normed)))


class OddModel(nn.Module):
    """Every matrix is a sub-group of stock's own: stock cannot read a gradient's file to an odd offset (patches/).

    Its sizes are those for runs in `dtype`; it may train in another one.
    """

    def __init__(self, dtype: str = "fp32") -> None:
        super().__init__()
        vocab, width, inner = SIZES[dtype]
        self.embed = OddLinear(vocab, width, 1)  # used as a table of rows
        self.blocks = nn.ModuleList(OddBlock(width, inner, 10 * index + 10) for index in range(3))
        self.head = OddLinear(vocab, width, 2)
        self.scale = OddScale(vocab)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.embedding(input_ids, self.embed.weight)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.scale(self.head(nn.functional.layer_norm(hidden, hidden.shape[-1:])))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class OddScale(nn.Module):
    """A small parameter, which stays in host memory."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(vocab))

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * self.weight


def batches(rank: int, num_ranks: int) -> list[list[dict[str, torch.Tensor]]]:
    """Per step, this rank's micro-batches: ragged, and of other lengths on the other rank."""
    generator = torch.Generator().manual_seed(7)
    steps = []
    for step in range(NUM_STEPS):
        micro_batches = []
        for index in range(NUM_MICRO_BATCHES * num_ranks):
            ids = torch.randint(0, VOCAB, (1, 4 + index + step), generator=generator)
            if index // NUM_MICRO_BATCHES == rank:
                micro_batches.append({"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
        steps.append(micro_batches)
    return steps


def config(
    folder: Path,
    dtype: str,
    num_micro_batches: int = NUM_MICRO_BATCHES,
    tier: str = "nvme",
    clip: float = 0.5,
    delay: float | None = None,
    share: float | None = None,
    state_share: float | None = None,
) -> dict[str, Any]:
    made = harness.base_config(
        folder,
        num_micro_batches=num_micro_batches,
        dtype=dtype,
        clip=clip,
        section={"optimizer_delay": delay, "gradient_host_share": share, "optimizer_host_share": state_share},
        params=tier,
        optimizer=tier,
        sub_group_size=200_001 if dtype == "fp32" else 400_001,  # less than half a matrix
    )
    return harness.small_buffers(made, 300_000 if dtype == "fp32" else 600_000) if tier == "nvme" else made


def by_three_calls(prepared: dict[str, Any], rank: int) -> dict[str, Any]:
    """The steps of `batches` in a loop of the three calls, instead of `train_batch`."""
    import ds_vertical

    losses, norms = [], []
    with harness.running(prepared, partial(OddModel, "bf16"), vertical=True) as (engine, model):
        for batch in ds_vertical.look_ahead([batch for step in batches(rank, 2) for batch in step]):
            loss = engine(**batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(engine.get_global_grad_norm())
        return {
            "losses": losses,
            "norms": norms[NUM_MICRO_BATCHES - 1 :: NUM_MICRO_BATCHES],
            "weights": harness.read_weights(model),
        }


class Poison(torch.autograd.Function):
    """Identity whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * float("nan")


def poison(rank: int) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    """A `loss_fn` whose gradients are not finite on rank 1."""
    return lambda loss, _: Poison.apply(loss) if rank == 1 else loss


def stop(folder: Path, rank: int, clip: float) -> list[str]:
    """A good step, then one whose gradients are not finite on rank 1 only: what this rank is told, then and later."""
    made = config(folder, "fp32", clip=clip)
    made["vertical_schedule"]["on_nonfinite"] = "stop"
    told = []
    with harness.running(made, OddModel, vertical=True) as (engine, _):
        good, bad, _ = batches(rank, 2)
        engine.train_batch(iter(good))
        for call in (
            lambda: engine.train_batch(iter(bad), poison(rank)),
            lambda: engine.train_batch(iter(good)),
            lambda: engine.save_checkpoint(str(folder.parent / "stopped")),
        ):
            try:
                call()
                told.append("nothing")
            except (ArithmeticError, RuntimeError) as error:
                told.append(type(error).__name__)
    return told


def watch(folder: Path, rank: int) -> dict[str, Any]:
    """Two steps with the line drawn whatever stderr is, and a monitor: what this rank wrote there."""
    made = config(folder, "fp32", tier="cpu")
    made["vertical_schedule"]["progress"] = True
    monitors = folder.parent / "monitors"
    made["csv_monitor"] = {"enabled": True, "output_path": str(monitors), "job_name": f"rank{rank}"}
    with (
        harness.running(made, OddModel, vertical=True) as (engine, model),
        mock.patch.object(sys, "stderr", io.StringIO()) as err,
    ):
        for step in batches(rank, 2)[:2]:
            engine.train_batch(iter(step))
        return {
            "network": asdict(engine.network),
            "written": [written_state(model.embed.weight, key) for key in (None, "exp_avg")],
            "line": err.getvalue(),
            "rows": {path.name: path.read_text() for path in monitors.glob(f"rank{rank}/*.csv")},
            "tokens": [sum(batch["input_ids"].numel() for batch in step) for step in batches(rank, 2)[:2]],
        }


def written_state(param: nn.Parameter, key: str | None) -> bool:
    """Whether a parameter that ranks share unequally has the master (`key` None) or moment that a user writes."""
    value = torch.arange(float(param.ds_numel)).reshape(param.ds_shape)
    if key is None:
        safe_set_full_fp32_param(param, value)
        return torch.equal(safe_get_full_fp32_param(param), value)
    safe_set_full_optimizer_state(param, value, key)
    return torch.equal(safe_get_full_optimizer_state(param, key), value)


def lack_room(folder: Path, rank: int, delay: float | None) -> Any:
    """Two steps where rank 1 has room for one generation of files only: this rank's regime, second generation of files and
    losses; or the error's name."""
    from ds_vertical.engine import disk_check
    from ds_vertical.errors import StorageError
    from ds_vertical.io import files

    made = config(folder, "fp32", clip=0.0, delay=delay)
    one = 12 * (2 * VOCAB * WIDTH + 6 * INNER * WIDTH) // 2  # bytes of this rank's state, about
    checked: list[list[str]] = []

    def free_bytes_here(path: Path) -> int:
        """Up to the check for both ranks; then the other one has taken its half."""
        return one * 3 // 2 if checked else one * 3

    def check_disk(*args: Any, check: Any = disk_check.check_disk) -> list[str]:
        checked.append(check(*args))
        return checked[-1]

    try:
        with (
            mock.patch.object(files, "free_bytes", files.free_bytes if rank == 0 else free_bytes_here),
            mock.patch.object(disk_check, "check_disk", check_disk),
        ):
            engine, _ = harness.build_engine(made, OddModel, vertical=True)
    except StorageError as error:
        return type(error).__name__
    second = [str(path) for path in Path(engine.optimizer.optimizer_swapper.swap_folder).rglob("generation_1/*")]
    losses = [engine.train_batch(iter(step)).item() for step in batches(rank, 2)[:2]]
    possible = engine.optimizer.timing.possible
    harness.dispose(engine)
    return {"possible": possible, "second": second, "losses": losses}


def lack_shared_room(folder: Path) -> str:
    """The disk that both ranks share has room for one and a half of them: the error's name and text."""
    from ds_vertical.errors import StorageError
    from ds_vertical.io import files

    one = 12 * (2 * VOCAB * WIDTH + 6 * INNER * WIDTH) // 2
    with mock.patch.object(files, "free_bytes", lambda path: one * 3 // 2):
        try:
            harness.build_engine(config(folder, "fp32", clip=0.0), OddModel, vertical=True)
        except StorageError as error:
            return str(error)
    return "nothing"


def lack_gradient_room(folder: Path, rank: int) -> tuple[str, list[str]]:
    """The gradients' file does not fit on rank 1: the error's name, and what is left of such a file."""
    from ds_vertical.errors import StorageError
    from ds_vertical.io import files

    made = config(folder, "fp32", delay=1.0, share=0.0)
    free_bytes, asked = files.free_bytes, []

    def free_bytes_here(path: Path) -> int:
        asked.append(path)
        return 0 if rank == 1 and has_state(path) else free_bytes(path)

    def has_state(path: Path) -> bool:  # the state's files are there already when the gradients' is made
        return any(path.rglob("exp_avg*.tensor.swp"))

    with mock.patch.object(files, "free_bytes", free_bytes_here):
        try:
            harness.build_engine(made, OddModel, vertical=True)
        except StorageError as error:
            return type(error).__name__, [str(path) for each in asked for path in each.rglob("gradients.swp")]
    return "nothing", []


def resume(folder: Path, rank: int) -> dict[str, Any]:
    """A save that fails on rank 1, one that does not, a step, and that step again in an engine that resumes: what this rank
    was told, what was left beside the checkpoint, and the names that differ."""
    from ds_vertical.engine.checkpoint import save

    def fail(point: str) -> None:
        if point == "memory written":
            raise ValueError("no luck here")

    made, saved = config(folder, "fp32", clip=0.0, delay=0.3), folder.parent / "saved"
    steps, told, ends = batches(rank, 2), "nothing", []
    with harness.running(made, OddModel, vertical=True) as (engine, model):
        engine.train_batch(iter(steps[0]))
        try:
            with mock.patch.object(save, "reach", fail if rank == 1 else save.reach):
                engine.save_checkpoint(str(saved), tag="failed")
        except (ValueError, RuntimeError) as error:
            told = f"{type(error).__name__}: {error}"
        left = sorted(path.name for path in saved.iterdir())
        engine.train_batch(iter(steps[1]))
        engine.save_checkpoint(str(saved), tag="good")
        engine.train_batch(iter(steps[2]))
        ends.append(harness.read_weights(model) | harness.read_state(engine, model))
    with harness.running(made, OddModel, vertical=True) as (engine, model):
        engine.load_checkpoint(str(saved))
        engine.train_batch(iter(steps[2]))
        ends.append(harness.read_weights(model) | harness.read_state(engine, model))
    return {"told": told, "left": left, "differing": harness.differing(*ends)}


def hear(call: Callable[[], Any]) -> tuple[str, str, float]:
    """The error's name and text, and how long it took to come."""
    start = time.monotonic()
    try:
        call()
    except (OSError, RuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", time.monotonic() - start


def suffer(folder: Path, rank: int, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Rank 1 cannot write what it steps early, then not read a parameter; each step is taken when that is over. What this rank
    was told, and the names that differ from those of a run without faults."""
    made, steps, saved = config(folder, "fp32", clip=0.0, delay=0.3), batches(rank, 2), folder.parent / "rescued"
    told = []
    with harness.running(made, OddModel, vertical=True) as (engine, model):
        engine.train_batch(iter(steps[0]))
        engine.flush()
        with small_files(1 << 18) if rank == 1 else contextlib.nullcontext():
            told.append(hear(lambda: engine.train_batch(iter(steps[1]))))
        engine.save_checkpoint(str(saved))
        engine.train_batch(iter(steps[1]))
        engine.flush()
        path = Path(engine.param_store.files.by_unit[2][0].path)  # not among those that are read ahead
        content = path.read_bytes()
        for call in (lambda: engine.train_batch(iter(steps[2])), lambda: engine.eval_batch(iter(steps[2]))):
            os.truncate(path, len(content) if rank == 0 else 4096)
            told.append(hear(call))
            path.write_bytes(content)
        engine.train_batch(iter(steps[2]))
        found = harness.read_weights(model) | harness.read_state(engine, model)
        counts = {name: param.ds_numel - rank * param.partition_numel() for name, param in model.named_parameters()}
    expected, found = (
        {name: share.flatten()[: counts[name.partition("/")[0]]] for name, share in each.items()} for each in (expected, found)
    )  # what stands behind a parameter's end in its last share is nobody's
    return {"told": told, "differing": harness.differing(expected, found)}


def tear(folder: Path, rank: int, delay: float) -> list[tuple[str, str, float]]:
    """Rank 1 cannot write what it steps in place: what this rank is told by the next steps and by a save. With a `delay` of 0
    it learns of that behind the norm, where the ranks have no collective any more; with 1 mostly in the next forward."""
    made, steps = config(folder, "fp32", clip=0.5 if delay == 0.0 else 0.0, delay=delay), batches(rank, 2)
    made["vertical_schedule"]["optimizer_speculation"] = False
    with harness.running(made, OddModel, vertical=True) as (engine, _):
        engine.train_batch(iter(steps[0]))
        engine.flush()
        with small_files(1 << 18) if rank == 1 else contextlib.nullcontext():
            told = [hear(lambda step=step: engine.train_batch(iter(step))) for step in (*steps[1:], steps[0])]
        told.append(hear(lambda: engine.save_checkpoint(str(folder.parent / "torn"))))
    return told


def exits(folder: Path, rank: int, dtype: str) -> dict[str, Any]:
    """Two steps, saved in our format and in stock's, and one more from there: in this engine, with the powers of beta that
    stock takes after a load, and in stock's, in host memory. The names that differ, what both scripts make of the weights, and
    this rank's masters."""
    from deepspeed.utils import zero_to_fp32 as stock_script

    from ds_vertical.engine.checkpoint import zero_to_fp32
    from ds_vertical.offload.cpu_adam import Powers

    saved, portable, steps = folder.parent / f"{dtype} saved", folder.parent / f"{dtype} portable", batches(rank, 2)

    def contents(engine: Any, model: nn.Module) -> dict[str, torch.Tensor]:
        return harness.read_weights(model) | harness.read_state(engine, model)

    build = partial(OddModel, dtype)
    with harness.running(config(folder, dtype), build, vertical=True) as (engine, model):
        for step in steps[:2]:
            engine.train_batch(iter(step))
        engine.save_checkpoint(str(saved))
        engine.save_checkpoint(str(portable), portable=True)
        masters, weights, before = harness.read_state(engine, model), harness.read_weights(model), contents(engine, model)
        engine.optimizer.driver.powers = Powers.made_with((0.9, 0.999))
        engine.train_batch(iter(steps[2]))
        after = contents(engine, model)
    with harness.running(config(folder, dtype, tier="cpu"), build, vertical=False) as (engine, model):
        engine.load_checkpoint(str(portable))
        differing = harness.differing(before, contents(engine, model))
        engine.train_batch(iter(steps[2]))
        gaps = harness.largest_relative(after, contents(engine, model))
    by_stock = stock_script.get_fp32_state_dict_from_zero_checkpoint(str(portable))
    return {
        "differing": differing,
        "goes on": {name: gap for name, gap in gaps.items() if gap > (1e-6 if dtype == "fp32" else 1e-2)},
        "exported": zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(saved),
        "by stock": {name: tensor.float() for name, tensor in by_stock.items()},
        "masters": masters,
        "weights": weights,
    }


def ends(folder: Path, rank: int) -> dict[str, Any]:
    """A run with what lies outside the layers on the device all step, one with it fetched where it is used, and one in which
    the second rank's loss computes with the embedding, too: what is known of the ends by then, and the weights."""
    results: dict[str, Any] = {}
    for value in ("resident", "fetched"):
        made = config(folder, "fp32", delay=0.3, clip=0.0)
        made["vertical_schedule"] |= {"outside_layers": value}
        results[value] = vars(harness.run_arm(made, OddModel, batches(rank, 2), vertical=True))
        results[f"one rank, {value}"] = penalised(folder, rank, value)
    results["one rank fails"] = failing(folder, rank)
    return results


def penalised(folder: Path, rank: int, value: str) -> dict[str, Any]:
    """The steps of a run in which the second rank's loss computes with the embedding."""
    made = config(folder, "fp32")
    made["vertical_schedule"] |= {"outside_layers": value}
    with harness.running(made, OddModel, vertical=True) as (engine, model):

        def loss_fn(loss: torch.Tensor, _: Any) -> torch.Tensor:
            return loss + 0.1 * model.embed.weight.square().mean() if rank == 1 else loss

        losses = [engine.train_batch(iter(step), loss_fn).item() for step in batches(rank, 2)]
        return {
            "apart": engine.ran.outside.apart,
            "losses": losses,
            "weights": harness.read_weights(model),
            "steps": engine.global_steps,
        }


def failing(folder: Path, rank: int) -> dict[str, Any]:
    """A step in which the second rank's loss computes with the embedding while the first one's fails, between two that do
    neither."""
    made = config(folder, "fp32")
    made["vertical_schedule"] |= {"outside_layers": "fetched"}
    with harness.running(made, OddModel, vertical=True) as (engine, model):

        def loss_fn(loss: torch.Tensor, _: Any) -> torch.Tensor:
            if rank == 0:
                raise ArithmeticError("no loss")
            return loss + 0.1 * model.embed.weight.square().mean()

        first, second, *_ = batches(rank, 2)
        engine.train_batch(iter(first))
        try:
            engine.train_batch(iter(second), loss_fn)
        except Exception as error:
            failure = type(error).__name__
        engine.train_batch(iter(second))
        return {"failure": failure, "apart": engine.ran.outside.apart, "steps": engine.global_steps}


def trained(runs: list[dict[str, Any]], folder: Path, rank: int) -> dict[str, Any]:
    """What each of the runs has computed, by its name, and its folder."""
    import ds_vertical

    results: dict[str, Any] = {"folders": {}}
    for run in runs:
        prepared = ds_vertical.prepare(config(folder, run["dtype"], **run.get("options", {})))
        results["folders"][run["name"]] = prepared["zero_optimization"]["offload_param"]["nvme_path"]
        made = harness.run_arm(prepared, partial(OddModel, run["dtype"]), batches(rank, 2), vertical=run["vertical"])
        results[run["name"]] = vars(made)
    return results


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    harness.start_process_group()
    import ds_vertical

    rank = int(os.environ["RANK"])
    if "exits" in job:
        results = {dtype: exits(Path(job["folder"]), rank, dtype) for dtype in job["exits"]}
        torch.save(results, Path(job["out"]) / f"rank{rank}.pt")
        return 0
    if "ends" in job:
        torch.save(ends(Path(job["folder"]), rank), Path(job["out"]) / f"rank{rank}.pt")
        return 0
    if "alone" in job:
        torch.save(trained(job["alone"], Path(job["folder"]), rank), Path(job["out"]) / f"rank{rank}.pt")
        return 0
    original = config(Path(job["folder"]), "bf16")
    twice = [ds_vertical.prepare(original)["zero_optimization"]["offload_param"]["nvme_path"] for _ in range(2)]
    results = trained(job["runs"], Path(job["folder"]), rank) | {"prepared twice": twice}
    results["three calls"] = by_three_calls(ds_vertical.prepare(original), rank)
    results["stop"] = [stop(Path(job["folder"]), rank, clip) for clip in (0.0, 0.5)]
    results["room"] = [lack_room(Path(job["folder"]), rank, delay) for delay in (None, 0.3)]
    results["shared room"] = lack_shared_room(Path(job["folder"]))
    results["watched"] = watch(Path(job["folder"]), rank)
    results["gradient room"] = lack_gradient_room(Path(job["folder"]), rank)
    kept = config(Path(job["folder"]), "fp32"), OddModel, batches(rank, 2), rank
    results["persistent"] = rank_persistent.trained(*kept)
    results["persistent failed"] = rank_persistent.failing(*kept, poison(rank), Path(job["out"]) / "failed")
    results["resumed"] = resume(Path(job["folder"]), rank)
    whole = results["fp32 delay 0.3"]
    results["suffered"] = suffer(Path(job["folder"]), rank, whole["weights"] | whole["state"])
    results["torn"] = [tear(Path(job["folder"]), rank, delay) for delay in (1.0, 0.0)]
    torch.save(results, Path(job["out"]) / f"rank{rank}.pt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
