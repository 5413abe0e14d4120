"""What quantised collectives do to the loss: the same run with exact, INT8 and INT8 + INT4 collectives over two levels.

    python benchmarks/quantised_loss.py [--steps 300] [--eval-every 50] [--arms exact,int8,int8_int4] [--model gpt_13m]

Each arm trains on four ranks of this machine. Two of them share a copy of the weights, as if they were a node. So half of the
hops is over "nodes", and weights and gradients are rounded as they are on two hosts. The arms see the same text, seeds and
micro-batches. The figure of an arm is its held-out loss at the end over that of "exact". Writes
benchmarks/quantised/MODEL_STEPS_DATE.json with each held-out loss as soon as an arm has ended. The same command goes on with
the arms that are missing there. Where the record has other settings, the command is refused. Other work on the machine changes
nothing but the time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
NUM_RANKS: Final = 4
RANKS_PER_NODE: Final = 2
ARMS: Final[dict[str, dict[str, Any]]] = {
    "exact": {},
    "int8": {"zero_quantized_weights": True},
    "int8_int4": {"zero_quantized_weights": True, "zero_quantized_gradients": True},
}
MOST: Final = {"exact": 1.0, "int8": 1.01, "int8_int4": 1.02}  # held-out loss over that of "exact", as required


def build_config(source: Path, arm: str, micro_batches: int, nvme_path: Path) -> dict[str, Any]:
    """The JSON of an arm: one sequence to a micro-batch."""
    config = json.loads(source.read_text())
    zero = config["zero_optimization"]
    for name in ("offload_param", "offload_optimizer"):
        zero[name]["nvme_path"] = str(nvme_path)
    zero |= {"zero_hpz_partition_size": RANKS_PER_NODE, **ARMS[arm]}
    return config | {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches}


def train(config: Path, out: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The held-out losses of one run, by step. Raises RuntimeError with the end of its output."""
    script = ROOT / "scripts" / "train.py"
    words = ["--model", options.model, "--steps", str(options.steps), "--eval-every", str(options.eval_every)]
    words += ["--seq", str(options.tokens), "--eval-batches", "32", "--out", str(out)]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", os.devnull]
    launcher += ["--num_accelerators", str(NUM_RANKS), str(script), "--deepspeed_config", str(config)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
    log = out.with_suffix(".log")
    with log.open("wb") as sink:
        status = subprocess.run([*launcher, *words], env=environment, stdout=sink, stderr=subprocess.STDOUT).returncode
    if status:
        raise RuntimeError("\n".join(log.read_text(errors="replace").splitlines()[-30:]))
    return held_out((out / "metrics.jsonl").read_text())


def held_out(metrics: str) -> list[dict[str, Any]]:
    """The lines of a run's metrics that have a held-out loss."""
    found = [json.loads(line) for line in metrics.splitlines()]
    return [{"step": entry["step"], "loss": entry["held_out_loss"]} for entry in found if "held_out_loss" in entry]


def summary(losses: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Each arm's last held-out loss over that of "exact", and whether it is as required."""
    exact = losses["exact"][-1]["loss"]
    ratios = {arm: found[-1]["loss"] / exact for arm, found in losses.items()}
    return {"over_exact": ratios, "met": {arm: ratio <= MOST[arm] for arm, ratio in ratios.items()}}


def recorded(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The record of the arms that have ended before; empty where there is none. Raises SystemExit where it has other settings:
    their losses do not compare, and one record of both would say otherwise."""
    if not path.exists():
        return {}
    record: dict[str, Any] = json.loads(path.read_text())
    there: dict[str, Any] = record.get("settings", {})
    for name in (name for name in there | settings if there.get(name, ...) != settings.get(name, ...)):
        said = f"{name} {json.dumps(there[name])}" if name in there else f"a {name} that it does not say"
        other = "" if name == "text" else "that record's settings, or "  # no option chooses the text
        raise SystemExit(
            f"{path}: its runs have {said}, and those asked for have {json.dumps(settings.get(name))}; write {other}--out FILE"
            " for another record"
        )
    return record


def main() -> int:
    """Trains the arms one after the other; returns 0 where all ratios are as required."""
    from commits import made_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt_13m", help="shape in configs/models, with a JSON configs/MODEL_cpu.json")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step, on each rank")
    parser.add_argument("--tokens", type=int, default=64, help="of a micro-batch")
    parser.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS), help="with exact among them")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the record (default: see above)")
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("model", "steps", "micro_batches", "tokens")}
    name = f"{options.model}_{options.steps}_{datetime.date.today().isoformat()}.json"
    path = options.out or ROOT / "benchmarks" / "quantised" / name
    losses = recorded(path, settings).get("held_out", {})
    with tempfile.TemporaryDirectory(prefix="ds_vertical.loss.") as folder:
        for arm in [arm for arm in options.arms if arm not in losses]:
            ssd = Path(folder, f"{arm}.ssd")
            ssd.mkdir()
            config = Path(folder, f"{arm}.json")
            made = build_config(ROOT / "configs" / f"{options.model}_cpu.json", arm, options.micro_batches, ssd)
            config.write_text(json.dumps(made))
            losses[arm] = train(config, Path(folder, arm), options)
            print(f"{arm}: " + ", ".join(f"{each['loss']:.4f} at {each['step']}" for each in losses[arm]), flush=True)
            found = summary(losses)
            result = {
                **made_of(),
                "settings": settings,
                "arms": {arm: ARMS[arm] for arm in losses},
                "held_out": losses,
                **found,
            }
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(result, indent=2) + "\n")
    found = summary(losses)
    print(json.dumps(found), f"written: {path}")
    return 0 if all(found["met"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
