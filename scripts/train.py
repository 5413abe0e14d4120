"""Trains a language model on bytes of text, stock or layer-major as the DeepSpeed JSON says.

    deepspeed scripts/train.py --deepspeed_config configs/gpt_13m_cpu.json --model gpt_13m --steps 40 --eval-every 10

Batch size, M (gradient_accumulation_steps), optimizer and schedule come from the JSON; its nvme_path must name a folder
on the SSD (the files under configs/ say /tmp/ds_vertical). Without --text it reads the Python standard library.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import deepspeed.comm as dist  # noqa: E402
import model_config  # noqa: E402
import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402
import text_data  # noqa: E402
import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402
from transformers import AutoModelForCausalLM, PretrainedConfig  # noqa: E402
from transformers.integrations.deepspeed import HfDeepSpeedConfig  # noqa: E402

import ds_vertical  # noqa: E402

Batch = dict[str, torch.Tensor]


def parse_arguments() -> argparse.Namespace:
    """The command line; the deepspeed launcher adds --local_rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", required=True, metavar="JSON")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="gpt_13m", help="shape in configs/models, HF config, or HF model type")
    parser.add_argument("--dims", nargs="*", default=[], metavar="KEY=JSON", help="fields of the model's config")
    parser.add_argument("--dropout", type=float, help="replaces every dropout rate of the model")
    parser.add_argument("--text", nargs="*", type=Path, default=[], metavar="PATH", help="files or folders to train on")
    parser.add_argument("--cache", type=Path, default=text_data.default_cache(), help="folder for token files")
    parser.add_argument("--seq", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--eval-every", type=int, default=0, metavar="K", help="held-out loss each K steps (0: never)")
    parser.add_argument("--eval-batches", type=int, default=8, metavar="E", help="micro-batches, rounded up to M")
    parser.add_argument("--log-every", type=int, default=10, metavar="K", help="a line each K steps without a terminal")
    parser.add_argument("--seed", type=int, default=0, help="initial weights, batches")
    parser.add_argument("--deterministic", action="store_true", help="kernels that repeat their bits, on a GPU, too")
    parser.add_argument("--out", type=Path, help="folder for metrics.jsonl (default runs/train-<date>)")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="go on from the last checkpoint there, if any, and save one at the end"
    )
    parser.add_argument("--checkpoint-every", type=int, default=0, metavar="K", help="and one each K steps (0: none)")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the 16-bit model there at the end")
    args = parser.parse_args()
    least_of = {"seq": 2, "steps": 1, "eval_every": 0, "eval_batches": 1, "log_every": 1, "checkpoint_every": 0}
    for name, least in least_of.items():
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: write {least} or more")
    if args.checkpoint_every and args.checkpoint is None:
        parser.error("--checkpoint-every: write --checkpoint DIR as well")
    return args


def build_model(shape: PretrainedConfig, config: dict[str, Any]) -> torch.nn.Module:
    """The model in the configuration's dtype, initialised as its authors do.

    While an HfDeepSpeedConfig lives, from_config() builds under zero.Init, so that each parameter is partitioned and on
    its tier from the first moment, and gathers module after module to initialise it.
    """
    dtype = torch.float32
    for section, narrow in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(section, {}).get("enabled"):
            dtype = narrow
    return AutoModelForCausalLM.from_config(shape, dtype=dtype)


def build_data(args: argparse.Namespace) -> text_data.TextData:
    """The token files: built by the first process of each machine, mapped by all."""
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    if first:
        text_data.build(args.text, args.cache)
    dist.barrier()
    return text_data.build(args.text, args.cache)


def to_batch(token_ids: npt.NDArray[np.int64], device: torch.device) -> Batch:
    """[batch, seq] ids as the model's keyword arguments; the model shifts the labels itself."""
    ids = torch.from_numpy(token_ids).to(device)
    return {"input_ids": ids, "labels": ids.clone()}


def mean_over_ranks(loss: torch.Tensor) -> float:
    """A scalar's mean over all ranks."""
    total = loss.detach().float().reshape(1).clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@dataclass
class Trainer:
    """One training run: engine, text and where its numbers go."""

    args: argparse.Namespace
    engine: Any
    data: text_data.TextData

    def train(self, log: Log) -> None:
        """Steps until --steps are done, those of an earlier process among them, or the engine's budget of steps is spent."""
        done = log.num_steps
        batches = self._train_batches(done)
        if self.args.eval_every:
            log.held_out(done, self.held_out_loss())
        for step in range(done + 1, self.args.steps + 1):
            start = time.perf_counter()
            try:
                loss = mean_over_ranks(self.engine.train_batch(batches))
            except StopIteration:
                break
            log.step(step, loss, time.perf_counter() - start, self._facts())
            if self.args.eval_every and (step % self.args.eval_every == 0 or step == self.args.steps):
                log.held_out(step, self.held_out_loss())
            if self.args.checkpoint_every and step % self.args.checkpoint_every == 0 and step < self.args.steps:
                self.save_checkpoint()
        if self.args.checkpoint is not None and log.num_steps > done:
            self.save_checkpoint()
        if self.args.eval_every and log.last_held_out_step != log.num_steps:
            log.held_out(log.num_steps, self.held_out_loss())

    def save_checkpoint(self) -> None:
        """Saves into the folder that --checkpoint names."""
        self.engine.save_checkpoint(str(self.args.checkpoint))

    def held_out_loss(self) -> float:
        """Mean loss over the fixed held-out batches of all ranks."""
        num_micro_batches = self.engine.gradient_accumulation_steps()
        num_calls = -(-self.args.eval_batches // num_micro_batches)
        token_ids = text_data.held_out_batches(
            self.data.held_out,
            self.engine.train_micro_batch_size_per_gpu(),
            self.args.seq,
            num_calls * num_micro_batches,
            dist.get_rank(),
            dist.get_world_size(),
        )
        batches = (to_batch(ids, self.engine.device) for ids in token_ids)
        losses = [self.engine.eval_batch(itertools.islice(batches, num_micro_batches)) for _ in range(num_calls)]
        return sum(mean_over_ranks(loss) for loss in losses) / num_calls

    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.engine.train_batch_size() * self.args.seq

    def _train_batches(self, step: int) -> Iterator[Batch]:
        token_ids = text_data.train_batches(
            self.data.train,
            self.engine.train_micro_batch_size_per_gpu(),
            self.args.seq,
            self.engine.gradient_accumulation_steps(),
            self.args.seed,
            dist.get_rank(),
            step,
        )
        return (to_batch(ids, self.engine.device) for ids in token_ids)

    def _facts(self) -> dict[str, Any]:
        norm = self.engine.get_global_grad_norm()
        return {"grad_norm": None if norm is None else float(norm), "lr": self.engine.get_lr()[0]}


class Log:
    """Rank 0's view of the run: metrics.jsonl, and a progress bar on a terminal or a line now and then without one. `done`:
    steps of the processes before, whose metrics stay."""

    def __init__(self, path: Path | None, num_steps: int, tokens_per_step: int, every: int, done: int) -> None:
        self.num_steps, self.last_held_out_step = done, -1
        self.losses: list[float] = []
        self.held_out_losses: list[float] = []
        self.seconds: list[float] = []
        self._tokens_per_step, self._every, self._total = tokens_per_step, every, num_steps
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a" if done else "w", encoding="ascii", buffering=1)
        self._bar = tqdm(total=num_steps, initial=done, unit="step", disable=path is None or not sys.stderr.isatty())

    def step(self, step: int, loss: float, step_s: float, facts: dict[str, Any]) -> None:
        """Records one training step."""
        self.num_steps = step
        self.losses.append(loss)
        self.seconds.append(step_s)
        self._write({"step": step, "loss": loss, "step_s": step_s, "tokens": self._tokens_per_step} | facts)
        self._bar.update()
        self._bar.set_postfix(loss=f"{loss:.3f}")
        if step % self._every == 0:
            self._say(f"step {step}/{self._total}: loss {loss:.4f}, {step_s:.2f} s")

    def held_out(self, step: int, loss: float) -> None:
        """Records the held-out loss after `step` steps."""
        self.last_held_out_step = step
        self.held_out_losses.append(loss)
        self._write({"step": step, "held_out_loss": loss})
        if self._bar.disable:
            self._say(f"step {step}/{self._total}: held-out loss {loss:.4f}")
        else:
            self._bar.write(f"step {step}: held-out loss {loss:.4f}")

    def close(self) -> str:
        """Ends bar and file; the run in one line."""
        self._bar.close()
        where = ""
        if self._file is not None:
            self._file.close()
            where = f", metrics in {self._file.name}"
        if not self.losses:
            return f"trained 0 steps{where}"
        # The first step pays for warm-up; with one step there is nothing else to go by.
        seconds = self.seconds[1:] or self.seconds
        rate = self._tokens_per_step * len(seconds) / sum(seconds)
        losses = f"loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f}"
        if self.held_out_losses:
            losses += f", held-out {self.held_out_losses[0]:.4f} -> {self.held_out_losses[-1]:.4f}"
        return f"trained {len(self.losses)} steps: {losses}, {rate:.0f} tokens/s{where}"

    def _write(self, fields: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(fields) + "\n")

    def _say(self, line: str) -> None:
        if self._file is not None and self._bar.disable:
            print(line, flush=True)


def metrics_path(out: Path | None) -> Path:
    """Where this run's metrics.jsonl goes: --out, or beside the records of an A/B, or a folder of its own."""
    folder = out or os.environ.get("DS_VERTICAL_METRICS") or f"runs/train-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    return Path(folder) / "metrics.jsonl"


def main() -> None:
    """Builds model and data, trains, says how it went."""
    args = parse_arguments()
    try:
        shape = model_config.resolve(args.model, args.dims, args.dropout, args.seq)
        text_data.files_under(args.text)
        config = ds_vertical.prepare(args.deepspeed_config)
    except (ValueError, OSError) as error:
        raise SystemExit(f"train.py: {error}") from None
    torch.manual_seed(args.seed)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which torch refuses matrix products on a GPU
        torch.use_deterministic_algorithms(True)
        # which torch does for code that reads it
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    zero_init = HfDeepSpeedConfig(config)
    model = build_model(shape, config)
    engine, *_ = ds_vertical.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    trainer = Trainer(args, engine, build_data(args))
    path = metrics_path(args.out) if dist.get_rank() == 0 else None
    if args.checkpoint is not None and (args.checkpoint / "latest").exists():
        engine.load_checkpoint(str(args.checkpoint))
    log = Log(path, args.steps, trainer.tokens_per_step(), args.log_every, engine.global_steps)
    trainer.train(log)
    if args.save is not None:
        engine.save_16bit_model(str(args.save))
    line = log.close()
    engine.destroy()
    del zero_init
    if path is not None:
        print(line, flush=True)
    dist.destroy_process_group()  # torch's destructor would, as Python ends: on a GPU such a process may never end


if __name__ == "__main__":
    main()
