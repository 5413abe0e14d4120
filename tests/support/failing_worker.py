"""One of two ranks of which one fails, or is asked to stop, in its second step; for test_failing_ranks.py, test_stopping.py.

    python tests/support/failing_worker.py FOLDER HOW RANK

Nothing is caught or cleaned up but what HOW says: the error leaves the script, as users' do.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# run as a script, so this folder is first on the path
import forks
import harness
import rank_worker
import torch
from processes import free_port


def raise_error(outputs: Any, batch: Any) -> Any:
    raise ValueError("no luck here")


def kill(outputs: Any, batch: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def ask(outputs: Any, batch: Any) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)
    return outputs


def ask_and_raise(outputs: Any, batch: Any) -> Any:
    """The others must not end with a checkpoint that this rank is not in."""
    return raise_error(ask(outputs, batch), batch)


LOSSES = {"kill": kill, "signal": ask, "finish": ask, "asked": ask_and_raise}


def cut_state(engine: Any) -> None:
    """Cut every file of state short, so that the next read of one fails."""
    engine.optimizer.pipeline.wait_idle()
    for chunk in engine.optimizer.stepper.chunks:
        for path in (path for files in chunk.files or () for path in files if path.exists()):
            os.truncate(path, 4096)


def state_without_padding(engine: Any, model: Any, rank: int) -> dict[str, torch.Tensor]:
    """What lies behind the end of a parameter, in the last rank's share, is whatever was there."""
    numel = {name: param.ds_numel for name, param in model.named_parameters()}
    shares = harness.read_state(engine, model)
    ends = {name: numel[name.rpartition("/")[0]] - rank * share.numel() for name, share in shares.items()}
    return {name: share[: max(0, ends[name])] for name, share in shares.items()}


def prepare_vote(optimizer: Any, dies: bool) -> None:
    """One has its norm, and is gone where the ranks agree that the step counts; the other tells of the next collective."""
    if dies:
        optimizer.step_persistent = partial(kill, None)
    else:
        optimizer.gather_persistent = lambda: print("gathers")


def fail(engine: Any, how: str, steps: list[Any]) -> None:
    if how == "disk":
        cut_state(engine)
        for step in steps:
            engine.train_batch(iter(step))
    elif how == "portable":
        cut_state(engine)
    elif how in LOSSES:
        engine.train_batch(iter(steps[0]), LOSSES[how])
    elif how in ("loop", "vote"):
        for step in itertools.cycle(steps):
            engine.train_batch(iter(step))
    elif how == "data":
        return
    elif how == "outside":
        raise KeyError("in the user-written code")
    elif how in ("stay", "again"):
        try:
            engine.train_batch(iter(steps[0]), raise_error)
        except ValueError:
            if how == "stay":
                time.sleep(200)
            engine.train_batch(iter(steps[1]))
    else:
        engine.train_batch(iter(steps[0]), raise_error)


def main() -> int:
    folder, how, failing = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    harness.start_process_group()
    rank = int(os.environ["RANK"])
    asked = how in ("signal", "finish", "asked", "loop", "resume", "whole")
    in_place = {"clip": 0.0} if how == "finish" else {}
    tier = "nvme" if asked or how in ("disk", "portable") else "cpu"
    made = rank_worker.config(folder / "swap", "fp32", tier=tier, **in_place)
    if asked:
        made["vertical_schedule"]["on_signal"] = {"save_dir": str(folder / "saved")}
    if how == "portable":
        made["vertical_schedule"]["optimizer_delay"] = 1.0
    if in_place:
        made["vertical_schedule"]["on_nonfinite"] = "stop"
    engine, model = harness.build_engine(made, rank_worker.OddModel, vertical=True)
    first, *others = rank_worker.batches(rank, 2)
    if how in ("resume", "whole"):
        if how == "resume":
            engine.load_checkpoint(str(folder / "saved"))
        for step in (first, *others)[engine.global_steps :]:
            engine.train_batch(iter(step))
        print("digest", harness.digest(harness.read_weights(model) | state_without_padding(engine, model, rank)))
        (folder / "failing").touch()
        return 0
    engine.train_batch(iter(first))
    if how == "vote":
        prepare_vote(engine.optimizer, rank == failing)
    if rank == failing:
        (folder / "failing").touch()
        fail(engine, how, others)
    if how == "portable":
        engine.save_checkpoint(str(folder / "saved"), portable=True)
    elif rank != failing:
        for step in itertools.cycle(others) if how == "loop" else others:
            engine.train_batch(iter(step))
    return 0


@dataclass
class Outcome:
    """Of both ranks: exit status and output. `seconds`: from one rank's failure to the end of the other."""

    codes: list[int]
    logs: list[str]
    seconds: float


def run(folder: Path, how: str, failing: int, forked: bool = False) -> Outcome:
    """`forked`: as forks.py has it, with engines."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    processes: list[subprocess.Popen[bytes] | forks.Fork] = []
    command = [sys.executable, __file__, str(folder), how, str(failing)]
    for rank, log in enumerate(logs):
        env = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        if forked:
            processes.append(forks.Fork(command, Path.cwd(), env, (log, log), engine=True))
            continue
        with log.open("w") as out:
            processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
    try:
        processes[1 - failing].wait(300)
        ended = time.time()
        if how == "stay":
            processes[failing].kill()
        processes[failing].wait(100)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [log.read_text() for log in logs]
    assert (folder / "failing").exists(), "\n".join(texts)
    codes = [process.wait() for process in processes]
    return Outcome(codes, texts, ended - (folder / "failing").stat().st_mtime)


if __name__ == "__main__":
    sys.exit(main())
