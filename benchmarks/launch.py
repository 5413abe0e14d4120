"""What the thread that launches takes for a layer's forward (F) and backward (B), beyond plain calls of the same Llama block.

    python benchmarks/launch.py [--rounds 6] [--layers 6] [--micro-batches 8] [--tokens 8] [--width 64]

On the late device of the tests, whose kernels compute at once: a call takes Python, torch's way to the kernel, and a kernel of
a few numbers. So of a small block nearly all of the difference is the schedule's own code. In each round the engine takes a
step, and then the block is called as often: its forward without a graph, as an F is; and a forward with one, its backward, and
the sum of its gradients in fp32, as a B is. Writes benchmarks/launch/NAME.json.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import commits
import portable
import report

ROOT = portable.ROOT
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import torch  # noqa: E402
from torch import nn  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from ds_vertical.schedule.events import Event, Op  # noqa: E402
from ds_vertical.schedule.trace import Tracer  # noqa: E402

harness, late_accelerator = (importlib.import_module(name) for name in ("harness", "late_accelerator"))
VOCABULARY = 128


class EventSeconds(Tracer):
    """Notes the seconds of F and B of layers but the last, whose backward follows its forward at once."""

    def __init__(self, last: int) -> None:
        self.found: dict[Op, list[float]] = defaultdict(list)
        self._last = last

    def span(
        self, resource: str, name: object, start: float, end: float, num_bytes: int = 0, *, issue: float | None = None
    ) -> None:
        """See `Tracer.span`."""
        if isinstance(name, Event) and name.op in (Op.F, Op.B) and isinstance(name.layer, int) and name.layer != self._last:
            self.found[name.op].append(end - start)


class PlainBlock:
    """A block of a model of its own, called as the model calls it."""

    def __init__(self, options: argparse.Namespace, ids: torch.Tensor) -> None:
        model = build(options)
        nn.Module.to(model, device=ids.device, dtype=torch.bfloat16)
        self._block: nn.Module = model.model.layers[1]
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        handle = self._block.register_forward_pre_hook(self._note, with_kwargs=True)
        with torch.no_grad():
            model(input_ids=ids)
        handle.remove()
        self._sums = [torch.zeros(param.shape, device=ids.device) for param in self._block.parameters()]

    def _note(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs

    def forward_s(self) -> float:
        """Seconds of a forward without a graph."""
        with torch.no_grad():
            return seconds(lambda: self._block(*self._args, **self._kwargs))

    def backward_s(self) -> float:
        """Seconds of a forward with a graph, its backward, and the sum of its gradients."""
        entered, *others = self._args
        entered = entered.detach().requires_grad_()

        def call() -> None:
            left = self._block(entered, *others, **self._kwargs)
            left = left[0] if isinstance(left, tuple) else left
            torch.autograd.backward(left, torch.ones_like(left))
            for param, total in zip(self._block.parameters(), self._sums, strict=True):
                assert param.grad is not None
                total.add_(param.grad)
                param.grad = None

        return seconds(call)


def seconds(call: Callable[[], object]) -> float:
    """That a call takes."""
    start = perf_counter()
    call()
    return perf_counter() - start


def build(options: argparse.Namespace) -> LlamaForCausalLM:
    """A Llama with short layers."""
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(shape)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """By operation the medians of each round: of the engine, and of the plain block."""
    late_accelerator.use()
    config = harness.base_config(folder, num_micro_batches=options.micro_batches, params="cpu", optimizer="cpu", clip=0.0)
    config["vertical_schedule"] |= {"activations": {"keep": "none"}}
    engine, _ = harness.build_engine(config, lambda: build(options), vertical=True, recording=False)
    batches = [torch.randint(0, VOCABULARY, (1, options.tokens)) for _ in range(options.micro_batches)]
    batches = [{"input_ids": ids, "labels": ids} for ids in batches]
    plain = PlainBlock(options, batches[0]["input_ids"].to(engine.device))
    found: dict[str, dict[str, list[float]]] = {name: {"engine_s": [], "plain_s": []} for name in ("F", "B")}
    try:
        for number in range(options.rounds + 1):
            engine._runner.tracer = own = EventSeconds(options.layers - 1)
            engine.train_batch(iter(batches))
            calls = range((options.layers - 1) * options.micro_batches)
            plainly = {"F": [plain.forward_s() for _ in calls], "B": [plain.backward_s() for _ in calls]}
            for op in (Op.F, Op.B) if number else ():  # the first step makes what later ones have
                found[op.name]["engine_s"].append(median(own.found[op]))
                found[op.name]["plain_s"].append(median(plainly[op.name]))
    finally:
        harness.dispose(engine)
    return found


def main() -> int:
    """Measures, records, and prints a line for F and for B."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 6), ("layers", 6), ("micro-batches", 8), ("tokens", 8), ("width", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--benchmarks", type=Path, default=ROOT / "benchmarks", help="folder for the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    settings = {key: getattr(options, key) for key in ("rounds", "layers", "micro_batches", "tokens", "width")}
    content = commits.made_of() | {"checkout": commits.describe(ROOT), **settings, **found}
    name = f"llama_w{options.width}_s{options.tokens}_{report.instructions()}_{content['date'][:10]}"
    portable.write(options.benchmarks / "launch" / f"{name}.json", content, ROOT / "runs" / "launch", "launch")
    for op, each in found.items():
        engine_s, plain_s = (median(each[key]) for key in ("engine_s", "plain_s"))
        print(f"{op}: {1e3 * engine_s:.3f} ms, a plain call {1e3 * plain_s:.3f} ms, {1e3 * (engine_s - plain_s):.3f} ms more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
