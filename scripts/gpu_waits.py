"""A step in which each wait of the host for a GPU is named, by the line that waits.

    python scripts/gpu_waits.py --config configs/gpt_13m_cpu.json [--model gpt_13m] [--seq 64]

Trains two steps of a small model; in the second torch warns of each operation for which the host waits (its sync debug mode).
Without CUDA nothing is watched, which it says, and both steps are plain.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import warnings
from collections import Counter
from pathlib import Path

import deepspeed
import model_config
import torch
from transformers import AutoModelForCausalLM

import ds_vertical
from ds_vertical.config.file import read_config

_WAITS = "called a synchronizing"  # in torch's words; that the mode is on it says in others


def alone() -> None:
    """The variables of a launcher that starts one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
        os.environ.setdefault(name, str(value))


def is_on_gpu() -> bool:
    """Whether the steps are taken on one whose waits torch can tell."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda"


def watched(step: object) -> Counter[str]:
    """The waits of a call, by file and line."""
    assert callable(step)
    on_gpu = is_on_gpu()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
    return Counter(f"{Path(each.filename).name}:{each.lineno}" for each in found if _WAITS in str(each.message))


def main() -> int:
    """Prints a line for each place that waits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--model", default="gpt_13m")
    parser.add_argument("--seq", type=int, default=64)
    options = parser.parse_args()
    alone()
    config = ds_vertical.prepare(read_config(options.config))
    shape = model_config.resolve(options.model, (), None, options.seq)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = AutoModelForCausalLM.from_config(shape)
    engine, *_ = ds_vertical.initialize(model=model, model_parameters=model.parameters(), config=config)
    count = engine.gradient_accumulation_steps()
    ids = torch.randint(0, shape.vocab_size, (count, engine.train_micro_batch_size_per_gpu(), options.seq))

    def step() -> None:
        engine.train_batch(iter([{"input_ids": each, "labels": each} for each in ids]))

    step()
    waits = watched(step)
    for place, number in waits.most_common():
        print(f"{number:6} {place}")
    told = f"{waits.total()} waits of the host" if is_on_gpu() else "not watched (no CUDA): waits of the host"
    print(f"{told} in a step of {shape.num_hidden_layers} layers and {count} micro-batches")
    engine.destroy()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
