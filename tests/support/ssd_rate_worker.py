"""Trains on several SSDs and writes down how fast they were read: `python ssd_rate_worker.py OUT.json PATH [PATH ...]`.

Run it in a group whose reads of each disk are limited, or it measures the machine's memory. A limit lets what was saved in idle
time through at once, so the first reads do not count.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

# run as a script, so this folder is first on the path
import torch
from harness import base_config, running, small_buffers
from models import MixerBlock, MixerModel, token_batches
from torch import nn

from ds_vertical.schedule.trace import Span, now, read_trace, union

NUM_STEPS, NUM_LAYERS, WIDTH = 7, 4, 2048
NUM_FETCHES, MEASURED = 24, 4  # fetches, of which so many rounds are measured each by itself
UNCOUNTED = 2  # steps, and rounds of all layers
KEPT_WIDTH, KEPT_ROWS, KEPT_TOKENS, NUM_SAVED = 512, 8, 256, 24
NUM_CELLS = (NUM_LAYERS - 2) * 3  # that keep on SSD, of three micro-batches


class SavingBlock(MixerBlock):
    """Autograd saves much of its forward, which computes little."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.down(self.up(self.norm(x[:, :1]))))
        for _ in range(NUM_SAVED):
            x = x * gate
        return x


def saving_model() -> nn.Module:
    model = MixerModel(NUM_LAYERS, KEPT_WIDTH)
    model.blocks = nn.ModuleList(SavingBlock(KEPT_WIDTH) for _ in range(NUM_LAYERS))
    return model


def main(out: Path, paths: list[str]) -> None:
    """One JSON object: bytes per second while anything was read, of each step, and of layers' parameters, one after the other,
    several times; and of what forwards have kept, of each step."""
    found = steps_and_layers(out, paths)
    out.write_text(json.dumps(found | kept_values(out, paths)))


def kept_values(out: Path, paths: list[str]) -> dict[str, Any]:
    """Of steps that keep everything on SSD: bytes per second while any of it was read, and what there was to read."""
    trace = out.parent / f"{out.stem} kept trace"
    kept = {"keep": "everything", "keep_device": "ssd"}
    section = {"nvme_paths": paths, "optimizer_delay": 1.0, "trace": str(trace), "activations": kept}
    config = base_config(paths[0], num_micro_batches=3, dtype="fp32", clip=0.0, params="cpu", section=section)
    with running(config, saving_model, vertical=True) as (engine, _):
        for batch in token_batches(NUM_STEPS, 3, rows=KEPT_ROWS, shortest=KEPT_TOKENS):
            engine.train_batch(iter(batch))
        resting = {tier.value: num_bytes for tier, num_bytes in engine.kept.num_bytes}
        cells = {tier.value: count for tier, count in engine.kept.cells}
        sizes = [sum(path.stat().st_size for path in Path(each).rglob("kept*.ssd*")) for each in paths]
    assert cells["ssd"] == NUM_CELLS, cells
    reads = [[span for span in step.spans if _is_kept(span)] for step in read_trace(trace / "rank0.jsonl")[UNCOUNTED:]]
    assert all(sum(span.bytes for span in step) >= resting["ssd"] > 5e7 * NUM_CELLS for step in reads), resting
    return {"kept": list(map(read_rate, reads)), "kept_on_each": sizes}


def _is_kept(span: Span) -> bool:
    return span.resource == "ssd_read" and re.match(r"kept\d+\.bin", span.name) is not None


def steps_and_layers(out: Path, paths: list[str]) -> dict[str, Any]:
    """Of steps that keep nothing, and of fetches."""
    trace = out.parent / f"{out.stem} trace"
    section = {"nvme_paths": paths, "optimizer_delay": 1.0, "trace": str(trace), "activations": {"keep": "none"}}
    config = base_config(paths[0], num_micro_batches=1, dtype="fp32", clip=0.0, section=section)
    build = partial(MixerModel, NUM_LAYERS, WIDTH)
    with running(small_buffers(config, 9_000_000), build, vertical=True) as (engine, _):
        for batch in token_batches(NUM_STEPS, 1):
            engine.train_batch(iter(batch))
        engine.flush()
        fetch_layers(engine, UNCOUNTED * NUM_LAYERS)
        fetched = [fetch_layers(engine, NUM_FETCHES // MEASURED) for _ in range(MEASURED)]
        sizes = [sum(path.stat().st_size for path in Path(each).rglob("*.ssd*")) for each in paths]
    steps = read_trace(trace / "rank0.jsonl")[UNCOUNTED:]
    rates = [read_rate([span for span in step.spans if span.resource == "ssd_read"]) for step in steps]
    return {"steps": rates, "layers": fetched, "bytes_on_each": sizes}


def read_rate(reads: Sequence[Span]) -> float:
    """Bytes per second while any of them was under way."""
    return sum(span.bytes for span in reads) / union((span.start, span.end) for span in reads)


def fetch_layers(engine: Any, count: int) -> float:
    """Bytes per second of layers' parameters, one layer after the other."""
    start, num_bytes = now(), 0
    for number in range(count):
        ticket = engine.param_store.fetch(number % NUM_LAYERS)
        ticket.wait()
        num_bytes += ticket.num_bytes
        engine.param_store.release(number % NUM_LAYERS)
    return num_bytes / (now() - start)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
