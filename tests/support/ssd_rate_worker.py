"""Trains on several SSDs and writes down how fast they were read: `python ssd_rate_worker.py OUT.json PATH [PATH ...]`.

Run it in a group whose reads of each disk are limited, or it measures the machine's memory.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

# run as a script, so this folder is first on the path
from harness import base_config, running, small_buffers
from models import MixerModel, token_batches

from ds_vertical.schedule.trace import now, read_trace, union

NUM_STEPS, NUM_LAYERS, WIDTH = 3, 4, 2048


def main(out: Path, paths: list[str]) -> None:
    """One JSON object: bytes per second while anything was read in a step, and of one layer's parameters alone."""
    trace = out.parent / "trace"
    section = {"nvme_paths": paths, "optimizer_delay": 1.0, "trace": str(trace)}
    config = base_config(paths[0], num_micro_batches=1, dtype="fp32", clip=0.0, section=section)
    build = partial(MixerModel, NUM_LAYERS, WIDTH)
    with running(small_buffers(config, 9_000_000), build, vertical=True) as (engine, _):
        for batch in token_batches(NUM_STEPS, 1):
            engine.train_batch(iter(batch))
        engine.flush()
        layers: list[float] = []
        for layer in (*range(NUM_LAYERS), *range(NUM_LAYERS)):
            start = now()
            ticket = engine.param_store.fetch(layer)
            ticket.wait()
            layers.append(ticket.num_bytes / (now() - start))
            engine.param_store.release(layer)
        sizes = [sum(path.stat().st_size for path in Path(each).rglob("*.ssd*")) for each in paths]
    steps = read_trace(trace / "rank0.jsonl")[1:]
    reads = [[span for span in step.spans if span.resource == "ssd_read"] for step in steps]
    rates = [sum(s.bytes for s in spans) / union((s.start, s.end) for s in spans) for spans in reads]
    out.write_text(json.dumps({"steps": rates, "layers": layers, "bytes_on_each": sizes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
