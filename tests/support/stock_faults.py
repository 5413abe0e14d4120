"""Stock DeepSpeed, all on SSD, on disks that really fail, and resumed from its own checkpoint after a kill: what it makes of
that, for docs/reliability.md. As root, for the disks.

    python tests/support/stock_faults.py FOLDER [FAULT ...]

One JSON object per fault on standard output. Each run is a process of its own, because stock may abort or hang.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from processes import say

LIMIT_S = 120
MIB = 1 << 20
FAULTS = ("none", "no room for blocks", "no more writes", "blocks lost", "read-only", "immutable", "truncated", "missing")


def train(job: dict[str, Any]) -> int:
    """Steps `first` to `end` of stock; before `asks_at` the parent is asked to do its worst."""
    from harness import build_engine, contents
    from resuming import config_in, model_of
    from resuming import train as train_steps

    if job.get("alone"):
        engine, model = without_us(config_in(Path(job["ssd"])))
        train_steps = steps_without_us
    else:
        engine, model = build_engine(config_in(Path(job["ssd"])), model_of, vertical=False)
    if "load" in job:
        say("loaded", engine.load_checkpoint(job["load"])[0])
    for step in range(job["first"], job["end"]):
        if step == job.get("asks_at"):
            print("? ", flush=True)
            sys.stdin.readline()
        say("loss", train_steps(engine, range(step, step + 1))[0])
    if "save" in job:
        say("saved", engine.save_checkpoint(job["save"]))
        os.kill(os.getpid(), signal.SIGKILL)
    import torch

    torch.save(contents(engine, model), job["out"])
    return 0


def without_us(config: dict[str, Any]) -> tuple[Any, Any]:
    """Stock's engine with nothing of ours around it: `prepare` would give each job a folder of its own."""
    import deepspeed
    import torch
    from harness import start_process_group
    from resuming import model_of

    start_process_group()
    del config["vertical_schedule"]
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = model_of()
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0], model


def steps_without_us(engine: Any, steps: range) -> list[float]:
    from resuming import BATCHES

    losses = []
    for step in steps:
        of_micro_batches = []
        for batch in BATCHES[step]:
            loss = engine(**batch)
            engine.backward(loss)
            engine.step()
            of_micro_batches.append(loss.item())
        losses.append(sum(of_micro_batches) / len(of_micro_batches))
    return losses


def run(job: dict[str, Any], worst: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """What a run says, and how it ends."""
    command = [sys.executable, __file__, "--job", json.dumps(job), "."]
    pipe = subprocess.PIPE
    errors = Path(job["out"]).with_suffix(".err")
    with errors.open("w") as log, subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True) as process:
        signal.signal(signal.SIGALRM, lambda *_: process.kill())
        signal.alarm(LIMIT_S)
        assert process.stdin is not None and process.stdout is not None
        lines: list[tuple[str, Any]] = []
        for line in process.stdout:
            if line.startswith("? "):
                worst()
                process.stdin.write("\n")
                process.stdin.flush()
            elif line.startswith("@ "):
                lines.append(tuple(json.loads(line[2:])))
        code = process.wait()
        signal.alarm(0)
    last = "" if code == 0 else (errors.read_text().strip().splitlines() or [""])[-1][-300:]
    losses = [what for word, what in lines if word == "loss"]
    return {"exit code": code, "losses": losses, "last words": last, "said": [line for line in lines if line[0] != "loss"]}


@contextlib.contextmanager
def disk_of(fault: str, folder: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """The folder for stock's files, and what makes it fail."""
    import faults

    ssd = folder / "disk" / "ssd"

    def file(index: int = 0) -> Path:
        return sorted(ssd.rglob("*exp_avg-*.swp"))[index]

    def fill(room: Path) -> None:
        with (room / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while filler.write(bytes(MIB // 16)):
                pass

    with contextlib.ExitStack() as stack:
        if fault in ("no more writes", "blocks lost"):
            disk = stack.enter_context(faults.loop_disk(folder / "disk", 256 * MIB))
            yield ssd, {"no more writes": disk.refuse_writes, "blocks lost": disk.lose_blocks}[fault]
        elif fault == "no room for blocks":
            room = stack.enter_context(faults.full_room(folder / "room", 96 * MIB))
            stack.enter_context(faults.loop_disk(folder / "disk", 256 * MIB, room))
            yield ssd, lambda: fill(room)
        else:
            ssd.mkdir(parents=True)
            yield (
                ssd,
                {
                    "none": lambda: None,
                    "read-only": lambda: stack.enter_context(faults.read_only(ssd)) and None,
                    "immutable": lambda: stack.enter_context(faults.immutable(file())) and None,
                    "truncated": lambda: os.truncate(file(), 4096),
                    "missing": lambda: file().unlink(),
                }[fault],
            )


def compared(expected: Path, found: Path) -> str:
    import torch
    from harness import differing

    if not found.exists():
        return "nothing"
    tensors = torch.load(expected)
    return f"{len(differing(tensors, torch.load(found)))} of {len(tensors)} tensors differ"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job")
    parser.add_argument("folder", type=Path)
    parser.add_argument("faults", nargs="*", metavar="FAULT")
    args = parser.parse_args()
    if args.job:
        return train(json.loads(args.job))
    shutil.rmtree(args.folder, ignore_errors=True)
    whole = args.folder / "whole"
    for fault in args.faults or (*FAULTS, "killed and resumed", "second job"):
        folder = args.folder / fault.replace(" ", "_")
        folder.mkdir(parents=True)
        if fault == "killed and resumed":
            saved, ssd = str(folder / "saved"), str(folder / "ssd")
            first = run({"ssd": ssd, "first": 0, "end": 3, "save": saved, "out": str(folder / "first")})
            found = run({"ssd": ssd, "first": 3, "end": 5, "load": saved, "out": str(folder / "out")})
            found["losses"] = first["losses"] + found["losses"]
        elif fault == "second job":
            job = {"ssd": str(folder / "ssd"), "first": 0, "end": 5, "alone": True}
            others: list[dict[str, Any]] = []
            worst = partial(lambda job, others: others.append(run(job)), job | {"out": str(folder / "other")}, others)
            found = run(job | {"asks_at": 3, "out": str(folder / "out")}, worst) | {"the other": others}
        else:
            with disk_of(fault, folder) as (ssd, worst):
                at = 0 if fault == "no room for blocks" else 3  # later all blocks are there
                job = {"ssd": str(ssd), "first": 0, "end": 5, "asks_at": at, "out": str(folder / "out")}
                found = run(job, worst)
        expected = folder / "other" if fault == "second job" else whole  # that had the disk to itself
        if not expected.exists():
            os.link(folder / "out", expected)
        print(json.dumps({"fault": fault, "end": compared(expected, folder / "out")} | found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
