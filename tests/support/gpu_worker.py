"""Cases of tests/engine/test_gpu_engine.py, in a process of their own on the accelerator that DS_ACCELERATOR names.

    python tests/support/gpu_worker.py FOLDER '[{"case": "bits", ...}, ...]'

Where a case's `device` is "late", that is the tests' late device. Prints what each case found as the last line, a JSON list. An
assertion that fails ends the process. The bits of two runs are equal where the kernels are deterministic: torch is told so, and
whoever starts the process sets CUBLAS_WORKSPACE_CONFIG.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

# run as a script, so this folder is first on the path
import harness
import torch
from chunks import a_chunk, no_queue
from models import VOCAB, MixerBlock, MixerModel, token_batches
from torch.nn.attention import SDPBackend, sdpa_kernel

from ds_vertical.io.streams import works_beside_host
from ds_vertical.offload.grad_store import GradientFile, HeldGradients, ReducedSums
from ds_vertical.offload.state_files import Chunk

LIMIT_S = 230  # then the process says where its Python threads are
NUM_STEPS = 6
NUM_MICRO_BATCHES = 3
NUM_LAYERS = 8
WIDTH = 768  # each matrix over 1 MiB in two bytes an element
SPIN_CYCLES = 100_000_000  # some 60 ms of a GPU, longer than all reads of a small model take
# 2^21 times a gradient is too large for fp16: halved (hysteresis 1) until it fits, doubled after every second good step
SCALE = {"enabled": True, "initial_scale_power": 21, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 1}


def spin(device: torch.device) -> None:
    """Keep a device busy that runs beside the host; one that is the host has nothing to run ahead of."""
    if device.type == "cuda":
        torch.cuda._sleep(SPIN_CYCLES)


class SpinningBlock(MixerBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spin(x.device)
        return super().forward(x)


class SpinningModel(MixerModel):
    """Its layers take so long that whatever does not wait for them would be there first."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for block in self.blocks:
            block.__class__ = SpinningBlock


def config_of(folder: Path, **options: Any) -> dict[str, Any]:
    return harness.small_buffers(harness.base_config(folder, **options), WIDTH * WIDTH)


def bits(folder: Path, dtype: str, **options: Any) -> dict[str, Any]:
    """Stock against the vertical arm: losses, norms, gradients, weights, masters and moments. fp16 with overflows."""
    extra = {"fp16": SCALE} if dtype == "fp16" else {}
    config = config_of(folder, num_micro_batches=NUM_MICRO_BATCHES, dtype=dtype, **options, **extra)
    batches = token_batches(NUM_STEPS if dtype == "fp16" else 2, NUM_MICRO_BATCHES, rows=1, shortest=5)
    stock, vertical = harness.run_both(config, partial(MixerModel, 3, WIDTH, dropout=0.1), batches)
    assert stock.ssd_bytes == vertical.ssd_bytes > 0 and stock.weights and stock.grads[0]
    skipped = stock.counters["skipped_steps"]
    if dtype == "fp16":  # a skipped step has no gradients to compare, and stock's norm of it means nothing
        assert 0 < skipped < NUM_STEPS - 1 and stock.losses == vertical.losses
        finite = [index for index, norm in enumerate(stock.norms) if norm > 0 and torch.isfinite(torch.tensor(norm))]
        for run in (stock, vertical):
            run.grads, run.norms = [run.grads[i] for i in finite], [run.norms[i] for i in finite]
    harness.assert_identical(stock, vertical)
    return {"steps": len(stock.grads), "skipped": skipped}


def activations(folder: Path, dtype: str) -> dict[str, Any]:
    """Layer inputs and gradients that leave while layers compute, and come back: the bits of those that stay."""
    batches = token_batches(2, 5, rows=1, shortest=5)
    build = partial(SpinningModel, 3, WIDTH, dropout=0.1)
    runs = []
    for place in ("device", "host", "ssd"):
        section = {"seed": 7, "activations": {"device": place}}
        config = config_of(folder, num_micro_batches=5, dtype=dtype, section=section)
        runs.append(harness.run_arm(config, build, batches, vertical=True))
    for moved in runs[1:]:
        harness.assert_identical(runs[0], moved)
    return {"steps": len(runs[0].grads)}


def resumes(folder: Path, dtype: str) -> dict[str, Any]:
    """Three steps and a save after the second: the third again in an engine that loads, after other draws of the device's
    random numbers, which here decide what is dropped."""
    extra = {"fp16": SCALE} if dtype == "fp16" else {}
    section = {"seed_micro_batches": False, "optimizer_delay": 0.5}
    config = config_of(folder / "ssd", num_micro_batches=2, dtype=dtype, clip=0.0, section=section, **extra)
    build, batches = partial(MixerModel, 3, WIDTH, dropout=0.1), token_batches(3, 2, rows=1, shortest=5)
    ends = []
    with harness.running(config, build, vertical=True) as (engine, model):
        for batch in batches[:2]:
            engine.train_batch(iter(batch))
        engine.save_checkpoint(str(folder / "saved"))
        loss = engine.train_batch(iter(batches[2])).item()
        ends.append(harness.read_weights(model) | harness.read_state(engine, model))
    with harness.running(config, build, vertical=True) as (engine, model):
        torch.rand(3, device=engine.device)
        engine.load_checkpoint(str(folder / "saved"))
        assert engine.train_batch(iter(batches[2])).item() == loss
        ends.append(harness.read_weights(model) | harness.read_state(engine, model))
    return {"differing": harness.differing(*ends), "tensors": len(ends[0])}


def settings(folder: Path, names: list[str]) -> dict[str, Any]:
    """Settings by name, of `late_worker`, for which the late device has the CPU's bits: here they are to have stock's on this
    device. Those that call what stock has not, between the steps, have the bits of the same calls with nothing beside anything.
    By name: what differs, or how the training has failed (None: nothing), and bytes of the device (`note_device`)."""
    import late_worker

    found: dict[str, Any] = {}
    for index, name in enumerate(names):
        case, place = late_worker.CASES[name], folder / str(index)
        for each in ("own", "reference"):
            (place / each).mkdir(parents=True)
        device: dict[str, int] = {}
        try:
            own = late_worker.train(case, place / "own", *note_device(device))
            if case.between is late_worker.nothing_between:
                reference = late_worker.train(case, place / "reference", vertical=False)
            else:
                plain = {**case.options, "section": {**(case.options["section"] or {}), "overlap": False}}
                reference = late_worker.train(replace(case, options=plain), place / "reference")
            harness.assert_identical(reference, own)
            found[name] = {"wrong": None, **device}
        except Exception:
            found[name] = {"wrong": traceback.format_exc()[-1500:], **device}
    return found


def note_device(found: dict[str, int]) -> tuple[Any, Any]:
    """`watch` and `look` of `late_worker.train`: the most bytes of the device that its steps have taken beyond what was taken
    ahead of them, and those that its budget has. Nothing where the device is the host."""
    import late_worker

    if not torch.cuda.is_available() or os.environ.get("DS_ACCELERATOR") == "cpu":
        return nullcontext, lambda *_: None
    before = active_bytes("current")

    @contextmanager
    def watch() -> Iterator[None]:
        torch.cuda.reset_peak_memory_stats()
        yield
        found["peak"] = max(found.get("peak", 0), active_bytes("peak") - before)

    def look(engine: Any, model: Any, config: dict[str, Any]) -> None:
        found["budget"] = late_worker.device_budget(engine, model, config)

    return watch, look


def full(folder: Path) -> dict[str, Any]:
    """Steps that fill the device, and training with what the messages say to write: what differs from a run that keeps nothing.
    `kept`, `chosen`: cells."""
    import full_device_worker as worker

    reference = worker.train(folder, {"keep": "none"}, worker.LARGE, worker.batches_of(worker.LARGE, 2))
    found = worker.study(folder, worker.LARGE)

    def differing(run: harness.Run) -> list[str]:
        return harness.differing(reference.weights | reference.state, run.weights | run.state)

    kept, chosen = found["kept"], found["chosen"]
    return {
        "kinds": [kept["kind"], *(each["kind"] for each in found["short"].values())],
        "text": kept["text"],
        "left": [kept["differing"], *(each["differing"] for each in found["short"].values())],
        "mended": {change: differing(run) for change, run in found["mended"].items()},
        "chosen": differing(chosen["run"]),
        "cells": 0 if chosen["kept"] is None else sum(count for _, count in chosen["kept"].cells),
    }


def attention(folder: Path, dtype: str, backend: str) -> dict[str, Any]:
    """A Llama whose attention is one kernel of torch's, whose backward is told to be deterministic: stock's bits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def build() -> torch.nn.Module:
        sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 12}
        return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=VOCAB, tie_word_embeddings=False))

    name = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}[backend]
    batches = token_batches(2, NUM_MICRO_BATCHES, rows=1, shortest=128)
    with sdpa_kernel([name]):
        stock, own = harness.run_both(config_of(folder, num_micro_batches=NUM_MICRO_BATCHES, dtype=dtype), build, batches)
    harness.assert_identical(stock, own)
    return {"steps": len(stock.grads)}


def compiled(folder: Path, dtype: str) -> dict[str, Any]:
    """Blocks whose kernels torch's compiler makes: the bits of the same blocks under stock."""

    def build() -> torch.nn.Module:
        model = MixerModel(3, WIDTH)
        for block in model.blocks:
            block.compile()
        return model

    batches = [[batch] * NUM_MICRO_BATCHES for [batch] in token_batches(2, 1, rows=1, shortest=32)]  # of one length
    config, frames = config_of(folder, num_micro_batches=NUM_MICRO_BATCHES, dtype=dtype), torch._dynamo.utils.counters["frames"]
    stock = harness.run_arm(config, build, batches, vertical=False)
    before = frames["ok"]
    own = harness.run_arm(config, build, batches, vertical=True)
    harness.assert_identical(stock, own)
    return {"steps": len(stock.grads), "frames": frames["ok"] - before}


def ahead(folder: Path, dtype: str, window: int) -> dict[str, Any]:
    """A forward whose layers take long. `busy`: the device still computes when the host has issued it; `grown`: bytes of
    device memory that it had taken at most; `layer`, `rest`: bytes of a layer's parameters, of all others."""
    config = config_of(folder, num_micro_batches=1, dtype=dtype, section={"prefetch_layers": window})
    batch = token_batches(1, 1, rows=1, shortest=5)[0]
    with harness.running(config, partial(SpinningModel, NUM_LAYERS, WIDTH), vertical=True) as (engine, model):
        sizes = {name: p.ds_numel * p.element_size() for name, p in model.named_parameters()}
        layer = sum(size for name, size in sizes.items() if name.startswith("blocks.0."))
        expected = engine.eval_batch(iter(batch)).item()  # first launches and allocations out of the way
        on_gpu = engine.device.type == "cuda"
        before = active_bytes("current") if on_gpu else 0
        loss = engine.eval_batch(iter(batch))
        busy = on_gpu and not torch.cuda.current_stream().record_event().query()
        assert loss.item() == expected
        grown = active_bytes("peak") - before if on_gpu else 0
    return {"busy": busy, "grown": grown, "layer": layer, "rest": sum(sizes.values()) - NUM_LAYERS * layer}


def read(held: HeldGradients, chunk: Chunk, found: list[torch.Tensor]) -> None:
    found.extend(held.data(part).clone() for part in chunk.parts("all"))


def gradients(_: Path, device: str) -> dict[str, Any]:
    """Another thread reads gradients that a busy device has yet to send. As in a step, a sum is given up once it is on its way,
    and its memory is the next one's. `page_locked`: memory of copies."""
    chunk, beside = a_chunk(0.5), works_beside_host(torch.device(device))
    held = HeldGradients([chunk], GradientFile(Path(), [], no_queue), False, page_locked=beside)
    size, page_locked = sum(chunk.sizes), beside
    torch.empty(1, pin_memory=beside)  # torch asks the late device what is page-locked only once it has made some by itself
    for busy in (False, True):  # at first without, which makes the page-locked memory and loads the kernels
        values = torch.arange(float(size), device=device) + busy
        if busy and device == "cuda":
            torch.cuda._sleep(1_000_000_000)
        flat = values.clone()  # behind what keeps the device busy
        sums = ReducedSums(list(flat.split(list(chunk.sizes))), None if beside else flat, lambda _: None)
        held.hold(3, [0], sums, early=True, final=True)
        del flat, sums, values
        behind = torch.full((2, size), -1.0, device=device)  # in memory that is free by then
        if busy and beside:
            parts = list(held._units[3].parts.values())
            assert all(part.copied is not None and not part.copied.query() for part in parts)  # the host has not waited
            page_locked = all(part.memory.tensor.is_pinned() for part in parts)
        found: list[torch.Tensor] = []
        reader = threading.Thread(target=read, args=(held, chunk, found))
        reader.start()
        reader.join()
        assert torch.equal(torch.cat(found), torch.arange(float(size)) + busy)
        assert behind.sum().item() == -2.0 * size
    return {"page_locked": page_locked}


def active_bytes(which: str) -> int:
    """Bytes of the device's memory that are taken, or that the device has yet to be done with."""
    torch.cuda.synchronize()
    if which == "current":
        torch.cuda.empty_cache()  # takes in what was freed behind the device
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_stats()[f"active_bytes.all.{which}"]


CASES = {
    "bits": bits,
    "activations": activations,
    "resumes": resumes,
    "settings": settings,
    "full": full,
    "attention": attention,
    "compiled": compiled,
    "ahead": ahead,
    "gradients": gradients,
}


def main(folder: str, listed: str) -> int:
    faulthandler.dump_traceback_later(LIMIT_S)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)  # leaves attention as matrix products, whose backward is deterministic
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    found, cases = [], json.loads(listed)
    if any(case.get("device") == "late" for case in cases):
        import late_accelerator

        late_accelerator.use()
    for index, case in enumerate(cases):
        place = Path(folder, str(index))
        place.mkdir()
        found.append(CASES[case.pop("case")](place, **case))
    print(json.dumps(found), flush=True)
    if torch.distributed.is_initialized():  # an engine's; torch's destructor would, as Python ends, and may never end then
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
