"""What a checkpoint costs: seconds and bytes of save and load, and the steps after a save, vertical beside stock.

    python benchmarks/saves.py [--dtype fp32] [--model gpt_101m] [--saves 3]

Each arm trains on SSD, saves to the same disk (to new tags, then to one that is there, a step after each), and loads. Seconds
end when the files are on the disk: ours syncs them, stock's save is followed by sync(2). Writes benchmarks/saves/NAME.json and
the table in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import portable
import report
import run

sys.path.insert(0, str(run.ROOT / "scripts"))

WARM_UP = 3  # steps before the first save
TOKENS = 8
RESULT = "saves.json"


# ---- under the launcher


def train_and_save(options: argparse.Namespace) -> dict[str, Any]:
    """One arm in this process; what it measured."""
    import model_config
    import torch
    import train
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    import ds_vertical
    from ds_vertical.cli.bench import machine_info

    shape = model_config.resolve(options.model, [], None, TOKENS)
    config = ds_vertical.prepare(str(options.deepspeed_config))
    torch.manual_seed(0)
    zero_init = HfDeepSpeedConfig(config)  # zero.Init while it lives
    model = train.build_model(shape, config)
    engine, *_ = ds_vertical.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    batch = train.to_batch(torch.randint(0, shape.vocab_size, (1, TOKENS)).numpy(), engine.device)

    def step() -> float:
        start = time.perf_counter()
        engine.train_batch(iter([batch] * engine.gradient_accumulation_steps()))
        return time.perf_counter() - start

    folder = options.out / "checkpoints"
    steps, saves = [step() for _ in range(WARM_UP)], []
    for number in range(options.saves):
        tag = f"tag{number % (options.saves - 1)}"  # the last one is there already
        try:
            found: dict[str, Any] = measured(lambda tag=tag: engine.save_checkpoint(str(folder), tag=tag))
        except FileExistsError as error:  # stock's
            found = {"failed": type(error).__name__}
        saves.append(found | {"tag": tag, "step_after_s": step()})
    loads = [measured(lambda: engine.load_checkpoint(str(folder), tag="tag0"))]
    step()
    num_elements = sum(getattr(param, "ds_numel") for param in model.parameters())  # noqa: B009  # zero.Init sets it
    content = {"steps_s": steps, "saves": saves, "loads": loads, "parameters": num_elements}
    engine.destroy()
    del zero_init
    return content | {"machine": machine_info.describe_machine(), "config": config}


def measured(call: Any) -> dict[str, float]:
    """Seconds until what a call has written is on the disk, and bytes as the kernel counts them for this process."""
    os.sync()
    before, start = counted(), time.perf_counter()
    call()
    returned = time.perf_counter() - start
    os.sync()
    synced = time.perf_counter() - start
    after = counted()
    return {"returned_s": returned, "synced_s": synced} | {name: after[name] - before[name] for name in after}


def counted() -> dict[str, int]:
    """Bytes that this process has read from disks and given to the kernel to write, as /proc/self/io counts them."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(fields[name]) for name in ("read_bytes", "write_bytes")}


# ---- both arms


def run_arm(arm: str, config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Raises CalledProcessError."""
    out = (options.runs / arm).resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    path = out / "config.json"
    path.write_text(json.dumps(config))
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--num_accelerators", "1"]
    words = [__file__, "--worker", "--deepspeed_config", str(path), "--out", str(out), "--model", options.model]
    with (out / "log").open("wb") as log:
        subprocess.run(
            [*launcher, *words, "--saves", str(options.saves)], cwd=run.ROOT, check=True, stdout=log, stderr=subprocess.STDOUT
        )
    shutil.rmtree(out / "checkpoints")
    return json.loads((out / RESULT).read_text())


def main() -> None:
    """Measures both arms and rewrites benchmarks/README.md; with --worker, one arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt_101m")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--saves", type=int, default=3, help="two or more")
    parser.add_argument("--runs", type=Path, default=run.ROOT / "runs" / "saves", help="folder for logs and checkpoints")
    parser.add_argument("--benchmarks", type=Path, default=run.ROOT / "benchmarks", help="folder for result and table")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed_config", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        (options.out / RESULT).write_text(json.dumps(train_and_save(options), indent=2))
        return
    from ds_vertical.cli.bench.arms import build_arms

    settings = ["gradient_clipping=0.0", *(["bf16.enabled=false"] if options.dtype == "fp32" else [])]
    arms = build_arms(run.ROOT / "configs" / "gpt_101m_cpu.json", run.ROOT / "configs" / "stock_pipelined.json", settings)
    found = {name: run_arm(name, getattr(arms, name), options) for name in ("stock", "vertical")}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    content = {"date": date, "model": options.model, "dtype": options.dtype, "command": sys.argv, "arms": found}
    target = options.benchmarks / "saves" / f"{options.model}_{options.dtype}_{date[:10]}.json"
    portable.write(target, content, options.runs, "saves")
    run.write_table(options.benchmarks / "ab")
    print(report.saves_table(content))


if __name__ == "__main__":
    main()
