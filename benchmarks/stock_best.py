"""Times stock ZeRO-Infinity with other transfer settings: which are fastest, which fail (benchmarks/stock_best.md).

    python benchmarks/stock_best.py --out runs/stock_best [--only NAME ...] [--passes 2] [--steps 5] [--seq 2]

One run per candidate and pass, every other pass backwards so that a drift of the machine hits none alone: the stock arm
of configs/gpt_101m_cpu.json with the candidate's settings, scripts/train.py under the deepspeed launcher. Short
sequences leave little to compute, so that transfers decide; the least of the steps is what other load disturbs least.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

from ds_vertical.cli.bench.arms import build_arms
from ds_vertical.engine.metrics import METRICS_VARIABLE, STEPS_VARIABLE, read_records

ROOT = Path(__file__).resolve().parent.parent
PARAM, OPTIMIZER = "zero_optimization.offload_param", "zero_optimization.offload_optimizer"
PIPELINE = (f"{OPTIMIZER}.pipeline_read=true", f"{OPTIMIZER}.pipeline_write=true", f"{OPTIMIZER}.buffer_count=12")
PREFETCH, REUSE = "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_max_reuse_distance"
LIVE = "zero_optimization.stage3_max_live_parameters"

CANDIDATES: dict[str, tuple[str, ...]] = {
    "as_gpt_101m_cpu": (),
    "pipeline": PIPELINE,
    "pipeline_read_only": (f"{OPTIMIZER}.pipeline_read=true", f"{OPTIMIZER}.buffer_count=12"),
    "prefetch_1": (*PIPELINE, f"{PREFETCH}=1"),
    "prefetch_4m": (*PIPELINE, f"{PREFETCH}=4194304"),
    "prefetch_13m": (*PIPELINE, f"{PREFETCH}=12600000", f"{PARAM}.buffer_count=40"),
    "prefetch_default": (*PIPELINE, f"{PREFETCH}=50000000", f"{PARAM}.buffer_count=40"),
    "reuse_4m": (*PIPELINE, f"{REUSE}=4194304", f"{LIVE}=100000000"),
    "reuse_13m": (*PIPELINE, f"{REUSE}=12600000", f"{LIVE}=100000000", f"{PARAM}.buffer_count=40"),
    "depth_32": (*PIPELINE, "aio.queue_depth=32"),
    "reuse_4m_depth_32": (*PIPELINE, f"{REUSE}=4194304", f"{LIVE}=100000000", "aio.queue_depth=32"),
    "prefetch_4m_depth_32": (*PIPELINE, f"{PREFETCH}=4194304", "aio.queue_depth=32"),
    "all_three": (*PIPELINE, f"{PREFETCH}=4194304", f"{REUSE}=4194304", f"{LIVE}=100000000", "aio.queue_depth=32"),
    "threads_2": (*PIPELINE, "aio.intra_op_parallelism=2"),
    "threads_4": (*PIPELINE, "aio.intra_op_parallelism=4"),
    "single_submit": (*PIPELINE, "aio.single_submit=true"),
    "no_overlap_events": (*PIPELINE, "aio.overlap_events=false"),
    "block_256k": (*PIPELINE, "aio.block_size=262144", "aio.queue_depth=32"),
}


def measure(name: str, settings: tuple[str, ...], out: Path, num_steps: int, seq_len: int) -> dict[str, object]:
    """Runs one candidate; seconds and bytes per step without the first, or the line on which it failed."""
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = folder / "stock.json"
    config.write_text(json.dumps(build_arms(ROOT / "configs" / "gpt_101m_cpu.json", None, settings).stock, indent=2))
    launcher = (sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--num_accelerators", "1")
    script = ("scripts/train.py", "--deepspeed_config", str(config), "--model", "gpt_101m", "--seq", str(seq_len))
    environment = os.environ | {METRICS_VARIABLE: str(folder / "metrics"), STEPS_VARIABLE: str(num_steps)}
    with (folder / "log").open("wb") as log:
        status = subprocess.run(
            [*launcher, *script], env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        ).returncode
    if status != 0:
        lines = (folder / "log").read_text(errors="replace").splitlines()
        return {"failed": next((line for line in reversed(lines) if "Error" in line or "Assert" in line), lines[-1])}
    steps = read_records(folder / "metrics")[0][1:]
    return {
        "least_s": round(min(step.step_s for step in steps), 2),
        "all_s": [round(step.step_s, 2) for step in steps],
        "read_MB": round(median(step.read_bytes for step in steps) / 1e6),
        "write_MB": round(median(step.write_bytes for step in steps) / 1e6),
        "loss": steps[-1].loss,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Measures the candidates one after the other; a line each on the terminal and in results.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=list(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seq", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="for every candidate, e.g. another M")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for number in range(args.passes):
        for name in args.only if number % 2 == 0 else reversed(args.only):
            result = {"name": name} | measure(name, (*CANDIDATES[name], *args.set), args.out.resolve(), args.steps, args.seq)
            print(json.dumps(result), flush=True)
            with (args.out / "results.jsonl").open("a") as results:
                results.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
