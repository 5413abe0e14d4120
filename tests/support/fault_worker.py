"""Runs whose I/O fails under the aio binding (tests/support/failing_aio.c), in a process that was started for it; what came of
each is written down. `--stock` trains stock DeepSpeed under the same faults, one process each, because it may abort or hang.

    python tests/support/fault_worker.py FOLDER [CASE ...]            # ours, as tests/faults/test_injected.py does
    python tests/support/fault_worker.py --stock FOLDER [CASE ...]
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

# run as a script, so this folder is first on the path
import injected
from processes import say

NUM_TRIES = 2
STOCK_LIMIT_S = 120
CLIP = 0.05  # acts on every step
ANYWHERE = ".tensor.swp"  # state and parameters
State = Literal["whole", "torn", "unharmed"]


@dataclass(frozen=True)
class Case:
    """Operations `kind` on files with `name` in their path fail with `number` (0: they move a part of their bytes), in the step
    that follows two good ones. `last`: only the last of them; else from a random one on, `count` of them. `state`: what
    becomes of ours."""

    name: str
    kind: injected.Kind
    number: int
    state: State
    clip: float = 0.0
    delay: float = 0.25
    count: int = -1
    last: bool = False
    section: dict[str, Any] = field(default_factory=dict)


# in the first and the third step early parts are written to the second generation of files, and the delayed ones in place, to
# the first
_NEW, _OLD, _PARAMETER = "generation_1/exp_avg_sq-", "rank0/exp_avg-", "_param.tensor.swp"
_ON_SSD = {"activations": {"device": "ssd"}}
_HELD = {"gradient_host_share": 0.0}
_SHARED = {"optimizer_host_share": 0.6}
CASES: dict[str, Case] = {
    "early write, ENOSPC": Case(_NEW, "write", errno.ENOSPC, "whole"),
    "early write, EIO": Case(_NEW, "write", errno.EIO, "whole"),
    "last early write, EIO": Case(_NEW, "write", errno.EIO, "whole", last=True),
    "early write, all early, ENOSPC": Case(ANYWHERE, "write", errno.ENOSPC, "whole", delay=0.0),
    "early write, speculating, ENOSPC": Case(
        _NEW, "write", errno.ENOSPC, "whole", clip=CLIP, section={"optimizer_speculation": True}
    ),
    "early write, state shared, ENOSPC": Case(_NEW, "write", errno.ENOSPC, "whole", section=_SHARED),
    "early write of a parameter, EIO": Case(_PARAMETER, "write", errno.EIO, "whole", delay=0.0),
    "early read, EIO": Case("exp_avg_sq-", "read", errno.EIO, "whole", delay=0.0, count=1),
    "parameter read, EIO": Case(_PARAMETER, "read", errno.EIO, "whole", count=1),
    "early write, EACCES": Case(_NEW, "open to write", errno.EACCES, "whole"),
    "early write, EROFS": Case(_NEW, "open to write", errno.EROFS, "whole"),
    "early write, ENAMETOOLONG": Case(_NEW, "open to write", errno.ENAMETOOLONG, "whole"),
    "parameter read, EACCES": Case(_PARAMETER, "open to read", errno.EACCES, "whole", count=1),
    "parameter read, ENOENT": Case(_PARAMETER, "open to read", errno.ENOENT, "whole", count=1),
    "gradient write, ENOSPC": Case("gradients.swp", "write", errno.ENOSPC, "whole", clip=CLIP, delay=1.0, section=_HELD),
    "activation write, ENOSPC": Case("activations", "write", errno.ENOSPC, "whole", section=_ON_SSD),
    "activation read, EIO": Case("activations", "read", errno.EIO, "whole", section=_ON_SSD),
    "write in place, ENOSPC": Case(ANYWHERE, "write", errno.ENOSPC, "torn", delay=1.0),
    "write in place, EIO": Case(ANYWHERE, "write", errno.EIO, "torn", clip=CLIP, delay=1.0),
    "read for a step in place, EIO": Case("exp_avg-", "read", errno.EIO, "torn", delay=1.0, count=1),
    "delayed write, EIO": Case(_OLD, "write", errno.EIO, "torn"),
    "gradient read, EIO": Case("gradients.swp", "read", errno.EIO, "torn", clip=CLIP, delay=1.0, count=1, section=_HELD),
    "write in place, state shared, EIO": Case(ANYWHERE, "write", errno.EIO, "torn", delay=1.0, section=_SHARED),
    "short reads": Case(ANYWHERE, "read", 0, "unharmed", count=20),
    "short writes": Case(ANYWHERE, "write", 0, "unharmed", count=20),
}


@dataclass
class Outcome:
    """Of one try. `error`, `text`: of the step; `seconds`: until it came; `failed`: operations that the library made fail;
    `state`: what became of the run; `remarks`: what is not as it should be."""

    case: str
    error: str
    text: str
    notes: list[str]
    seconds: float
    failed: int
    state: State
    remarks: list[str]


class Worker:
    """Tries cases below a folder. `other`: a folder on another file system where there is one."""

    def __init__(self, folder: Path, other: Path) -> None:
        self._folder = folder
        self._other = other
        self._references: dict[float, tuple[list[float], Any, Any]] = {}

    def reference(self, clip: float) -> tuple[list[float], Any, Any]:
        """Five losses, and weights and state after two steps and after five, of a run without faults."""
        from harness import contents, running
        from resuming import config_in, model_of, train

        if clip not in self._references:
            with running(config_in(self._folder / "reference", clip=clip), model_of, vertical=True) as (engine, model):
                losses = train(engine, range(2))
                two = contents(engine, model)
                losses += train(engine, range(2, 5))
                self._references[clip] = losses, two, contents(engine, model)
        return self._references[clip]

    def attempt(self, name: str, draw: random.Random) -> Outcome:
        from harness import contents, differing, running
        from resuming import config_in, loaded, model_of, train

        case = CASES[name]
        losses, two, five = self.reference(case.clip)
        saved, rescued = self._folder / "saved", self._other / "rescued"
        config = config_in(self._folder / "ssd", clip=case.clip, delay=case.delay, section=dict(case.section))
        remarks: list[str] = []

        def check(is_right: bool, remark: str) -> None:
            if not is_right:
                remarks.append(remark)

        def check_end(engine: Any, model: Any, first: int) -> None:
            check(train(engine, range(first, 5)) == losses[first:], f"losses from step {first} on")
            check(differing(five, contents(engine, model)) == [], "weights or state at the end")

        with running(config, model_of, vertical=True) as (engine, model):
            number = passed(case, lambda: (train(engine, range(1)), engine.flush()), draw)
            engine.save_checkpoint(str(saved), tag="good")
            train(engine, range(1, 2))
            engine.flush()
            start = time.monotonic()
            with injected.failing(case.name, case.kind, case.number, number, 1 if case.last else case.count):
                error = hear(lambda: (train(engine, range(2, 3)), engine.flush()))
                seconds, failed = time.monotonic() - start, injected.num_failed()
                state: State = "unharmed" if error is None else "whole" if engine.optimizer.live.failure is None else "torn"
                if state == "whole":
                    engine.save_checkpoint(str(rescued), tag="rescued")
                elif state == "torn":
                    refusal = hear(lambda: engine.save_checkpoint(str(saved), tag="torn"))
                    check(type(refusal).__name__ == "TornStateError", f"a torn state was saved: {refusal}")
            if state == "whole":
                check(differing(two, contents(engine, model)) == [], "the state after the fault")
            if state != "torn":
                check_end(engine, model, 3 if state == "unharmed" else 2)
        if state != "unharmed":
            folder, tag, first = (rescued, "rescued", 2) if state == "whole" else (saved, "good", 1)
            with loaded(config_in(self._folder / "ssd", clip=case.clip), folder, tag=tag) as (engine, model):
                check_end(engine, model, first)
        for each in (saved, rescued):
            shutil.rmtree(each, ignore_errors=True)
        notes = [] if error is None else list(getattr(error, "__notes__", []))
        kind, text = ("", "") if error is None else (type(error).__name__, str(error))
        return Outcome(name, kind, text, notes, seconds, failed, state, remarks)


def passed(case: Case, step: Callable[[], Any], draw: random.Random) -> int:
    """How many of the case's operations are let pass, given a step without faults: all but the last, or a random number."""
    with injected.failing(case.name, case.kind, 0, count=0):
        step()
    seen = injected.num_seen()
    return seen - 1 if case.last else draw.randrange(max(1, seen // 4))


def hear(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except (OSError, RuntimeError) as error:
        return error
    return None


# ---- stock


def train_stock(folder: Path, name: str) -> int:
    """Three steps of stock, the fault in the third, then two more; says what came of each on standard output."""
    from harness import build_engine, contents
    from resuming import config_in, model_of, train

    case = CASES[name]
    engine, model = build_engine(config_in(folder / "ssd", clip=case.clip), model_of, vertical=False)
    say("losses", train(engine, range(2)))
    pattern = ANYWHERE if case.name in (_NEW, _OLD) else case.name
    start = time.monotonic()
    with injected.failing(pattern, case.kind, case.number, 3, case.count):
        try:
            say("losses", train(engine, range(2, 3)))
        except Exception as error:
            say("raised", f"{type(error).__name__}: {error} ({time.monotonic() - start:.1f} s)")
    say("failed operations", injected.num_failed())
    say("losses", train(engine, range(3, 5)))
    import torch

    torch.save(contents(engine, model), folder / "end")
    say("trained on", True)
    return 0


def run_stock(folder: Path, name: str, expected: tuple[list[float], Any, Any]) -> None:
    """One case in a process of its own: prints what stock made of it."""
    import torch
    from harness import differing

    own = folder / "stock"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    command = [sys.executable, __file__, "--stock-one", name, str(own)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STOCK_LIMIT_S)
        end = f"exit code {done.returncode}"
        lines = [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("@ ")]
        last = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [""])[-1]
    except subprocess.TimeoutExpired as error:
        end, last = f"hangs: killed after {STOCK_LIMIT_S} s", ""
        lines = [json.loads(line[2:]) for line in (error.stdout or b"").decode().splitlines() if line.startswith("@ ")]
    losses = [loss for word, what in lines if word == "losses" for loss in what]
    found = {word: what for word, what in lines if word != "losses"}
    found |= {
        "losses": f"{len(losses)} of 5, {'equal' if losses == expected[0][: len(losses)] else 'others than'} the reference"
    }
    if (own / "end").exists():
        found["at the end"] = f"{len(differing(expected[2], torch.load(own / 'end')))} of {len(expected[2])} tensors differ"
    print(json.dumps({"case": name, "end": end, "last words": last[-300:]} | found), flush=True)


# ---- the command


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--stock-one", metavar="CASE")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*")
    args = parser.parse_args()
    if "DS_VERTICAL_FAILING_AIO" not in os.environ:  # started by hand
        args.folder.mkdir(parents=True, exist_ok=True)
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | injected.environment(injected.build(args.folder)))
    if args.stock_one:
        return train_stock(args.folder, args.stock_one)
    other = Path("/dev/shm") / f"ds_vertical_faults_{os.getpid()}" if os.path.isdir("/dev/shm") else args.folder / "other"
    worker, draw = Worker(args.folder, other), random.Random(args.seed)
    print(f"seed {args.seed}", file=sys.stderr)
    try:
        for name in args.cases or CASES:
            if args.stock and CASES[name].name in ("activations", "gradients.swp"):
                continue  # stock has no such files
            if args.stock:
                run_stock(args.folder, name, worker.reference(CASES[name].clip))
                continue
            for _ in range(NUM_TRIES):
                print("@ " + json.dumps(asdict(worker.attempt(name, draw))), flush=True)
    finally:
        shutil.rmtree(other, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
