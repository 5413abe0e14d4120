"""What two halves a step do to the loss: the same run with exact steps, with `acco`, and with a delay of one step (DPU).

    python benchmarks/acco_loss.py [--steps 300] [--seeds 0,1,2] [--arms exact,acco,dpu] [--lr 6e-4] [--jobs 1]

Each arm trains on four ranks of this machine, with the same text, micro-batches and seeds. So all arms have summed as many
gradients at each step. The figure of an arm is its held-out loss at the end over that of "exact", by seed. "dpu" is the delayed
update of ZeRO-Offload, as `delayed_steps.py` has it: each step is taken with the gradients of the weights before the last step.
What a delay does grows with the learning rate: 6e-4 is that of ACCO's own runs. Its warm-up takes a tenth of the steps, unless
`--warm-up` says otherwise. Behind it the rate falls along half a cosine, as in those runs, or it stays (`--schedule constant`).

Writes benchmarks/acco/MODEL_STEPS_lrRATE_SCHEDULE.json as soon as a run has ended, with the held-out losses, the text's hash,
and each run's commit and packages. The same command goes on with the runs that are missing there. Where the record has
other settings or another text, the command is refused, and nothing is written. Other work on the machine changes nothing but
the time, so that with `--jobs` several runs train beside each other: of four ranks each, and some 4 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

import commits
from quantised_loss import held_out, recorded

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import text_data  # noqa: E402

NUM_RANKS: Final = 4
TRAIN, DELAYED = ROOT / "scripts" / "train.py", ROOT / "benchmarks" / "delayed_steps.py"
ARMS: Final[dict[str, tuple[dict[str, Any], Path]]] = {  # by name: what the section has, and what is launched
    "exact": ({}, TRAIN),
    "acco": ({"acco": {"copies": "rank"}}, TRAIN),
    "dpu": ({"acco": {"copies": "rank"}}, DELAYED),
}
MOST: Final = {"acco": 1.01}  # held-out loss over that of "exact", as required; "dpu" is shown beside it


def scheduler(options: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's, with a linear warm-up from a tenth of the rate."""
    warm_up = {"warmup_num_steps": options.warm_up, "warmup_type": "linear"}
    if options.schedule == "constant":
        return {"type": "WarmupLR", "params": warm_up | {"warmup_min_lr": options.lr / 10, "warmup_max_lr": options.lr}}
    return {"type": "WarmupCosineLR", "params": warm_up | {"total_num_steps": options.steps, "warmup_min_ratio": 0.1}}


def build_config(source: Path, arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """The JSON of an arm: one sequence to a micro-batch, all in host memory."""
    config = json.loads(source.read_text())
    config["optimizer"]["params"]["lr"] = options.lr
    config["scheduler"] = scheduler(options)
    zero = config["zero_optimization"]
    zero |= {name: {"device": "cpu", "pin_memory": False} for name in ("offload_param", "offload_optimizer")}
    section = config["vertical_schedule"] | ARMS[arm][0]
    own = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": options.micro_batches}
    return config | own | {"vertical_schedule": section}


def free_ports(count: int) -> list[int]:
    """Ports of this host that nobody has; all of them at once, so that no two are the same."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def train(config: Path, out: Path, arm: str, seed: int, port: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The held-out losses of one run, by step. Raises RuntimeError with the end of its output."""
    words = ["--model", options.model, "--steps", str(options.steps), "--eval-every", str(options.eval_every)]
    words += ["--seq", str(options.tokens), "--eval-batches", "32", "--seed", str(seed), "--out", str(out)]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", os.devnull]
    launcher += ["--num_accelerators", str(NUM_RANKS), "--master_port", str(port)]
    launcher += [str(ARMS[arm][1]), "--deepspeed_config", str(config)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    packages = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": threads, "PYTHONPATH": packages}
    log = Path(f"{out}.log")
    with log.open("wb") as sink:
        status = subprocess.run([*launcher, *words], env=environment, stdout=sink, stderr=subprocess.STDOUT).returncode
    if status:
        raise RuntimeError("\n".join(log.read_text(errors="replace").splitlines()[-30:]))
    return held_out((out / "metrics.jsonl").read_text())


def summary(losses: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """By arm, each seed's last held-out loss over that of "exact", and whether the mean is as required. `losses`: by run, which
    is named ARM.SEED."""
    last = {tuple(run.split(".")): found[-1]["loss"] for run, found in losses.items()}
    over: dict[str, dict[str, float]] = {}
    for (arm, seed), loss in last.items():
        if ("exact", seed) in last:
            over.setdefault(arm, {})[seed] = loss / last["exact", seed]
    met = {arm: sum(over[arm].values()) / len(over[arm]) <= most for arm, most in MOST.items() if arm in over}
    return {"over_exact": over, "met": met}


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt_13m", help="shape in configs/models, with a JSON configs/MODEL_cpu.json")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step, on each rank")
    parser.add_argument("--tokens", type=int, default=64, help="of a micro-batch")
    parser.add_argument("--lr", type=float, default=6e-4, help="learning rate, behind the warm-up")
    parser.add_argument("--schedule", choices=("cosine", "constant"), default="cosine", help="of the rate, behind the warm-up")
    parser.add_argument("--warm-up", type=int, metavar="STEPS", help="of the rate (default: a tenth of the steps)")
    parser.add_argument("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0, 1, 2])
    parser.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS), help="with exact among them")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the record (default: see above)")
    options = parser.parse_args(words)
    if options.warm_up is None:
        options.warm_up = max(2, options.steps // 10)
    name = f"{options.model}_{options.steps}_lr{options.lr:g}_{options.schedule}.json"
    options.out = options.out or ROOT / "benchmarks" / "acco" / name
    return options


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a record have in common. `text`: of what they read, a hash, which is that of the cached tokens."""
    names = ("model", "steps", "eval_every", "micro_batches", "tokens", "lr", "schedule")
    text = text_data.build([], text_data.default_cache()).folder.name
    return {name: getattr(options, name) for name in names} | {"warmup_num_steps": options.warm_up, "text": text}


def noted(record: dict[str, Any], run: str, losses: list[dict[str, Any]], commit: dict[str, Any]) -> dict[str, Any]:
    """The record with one more run. `commit`: of this repository as the run began."""
    made, held_out = commits.made_of(), record.get("held_out", {}) | {run: losses}
    own = {"date": made["date"], "versions": made["versions"], **commit}
    return record | made | {"runs": record.get("runs", {}) | {run: own}, "held_out": held_out, **summary(held_out)}


def main(words: Sequence[str] | None = None) -> int:
    """Trains what is missing, `--jobs` runs at a time; returns 0 where all ratios are as required."""
    options = parsed(words)
    settings, commit = settings_of(options), commits.describe(ROOT)
    record = recorded(options.out, settings) or {"settings": settings}
    there = record.get("held_out", {})
    missing = [(arm, seed) for seed in options.seeds for arm in options.arms if f"{arm}.{seed}" not in there]
    with tempfile.TemporaryDirectory(prefix="ds_vertical.loss.") as folder, ThreadPoolExecutor(options.jobs) as pool:
        runs = {}
        for (arm, seed), port in zip(missing, free_ports(len(missing)), strict=True):
            run, config = f"{arm}.{seed}", Path(folder, f"{arm}.{seed}.json")
            made = build_config(ROOT / "configs" / f"{options.model}_cpu.json", arm, options)
            config.write_text(json.dumps(made))
            runs[pool.submit(train, config, Path(folder, run), arm, seed, port, options)] = run
        for ended in as_completed(runs):
            if ended.exception() is None:
                last = ended.result()
                print(f"{runs[ended]}: " + ", ".join(f"{each['loss']:.4f} at {each['step']}" for each in last), flush=True)
                record = noted(record, runs[ended], last, commit)
                options.out.parent.mkdir(exist_ok=True)
                options.out.write_text(json.dumps(record, indent=2) + "\n")
    for each in runs:
        each.result()  # raises what has ended a run, once the others have been recorded
    found = summary(record["held_out"])
    print(json.dumps(found), f"recorded: {options.out}")
    return 0 if all(found["met"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
