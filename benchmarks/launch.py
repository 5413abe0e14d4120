"""What the thread that launches takes for a layer's forward (F) and backward (B), beyond plain calls of the same Llama block.

    python benchmarks/launch.py [--rounds 6] [--layers 6] [--micro-batches 8] [--tokens 8] [--width 64] [--gpu]

Seconds are the launching thread's own: while it waits, or other processes have its core, they stand still. (A device's backward
has a thread of torch's own, whose seconds are not among these.) Of a small block a call takes Python, torch's way to the
kernels, and kernels of a few numbers. So nearly all of the difference is the schedule's own code. The engine takes a step a
round. Behind each F in it the block is called: its forward, with the graph that a training's forward makes. Behind each B: a
forward, its backward, and the sum of its gradients in fp32. So both find the caches as the other has left them. A round's
figure is the lowest decile of its calls: what else runs on the machine slows some down, and speeds none up.

All of that happens on the late device of the tests, and in a process of its own on the CPU. The late device keeps books of each
operation (`op_s`: what a plain forward takes longer there, for each of its operations). The engine runs more operations than
the plain call. So `beyond_s`, the schedule's own time, is the difference without those books. With --gpu all happens on a GPU
instead, which keeps no books. Writes benchmarks/launch/NAME.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from time import thread_time
from types import MappingProxyType
from typing import Any

import commits
import portable
import report

ROOT = portable.ROOT
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from ds_vertical.schedule.events import Event, Op  # noqa: E402
from ds_vertical.schedule.trace import Tracer  # noqa: E402

VOCABULARY = 128
DEVICES = ("late", "cpu")
GPU = "cuda"
Seconds = dict[str, list[float]]


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class EventCosts(Tracer):
    """Notes the seconds of F and B of layers but the last, whose backward follows its forward at once; the operations; and the
    seconds of a plain call behind each. `plain`: these, by the name of the operation."""

    def __init__(
        self, last: int, plain: Mapping[str, Callable[[], object]] = MappingProxyType({}), operations: Operations | None = None
    ) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.operations: dict[str, list[int]] = defaultdict(list)
        self.plain_seconds: dict[str, list[float]] = defaultdict(list)
        self._last = last
        self._plain = plain
        self._counter = operations
        self._before = thread_time(), 0  # behind the event before

    def span(
        self, resource: str, name: object, start: float, end: float, num_bytes: int = 0, *, issue: float | None = None
    ) -> None:
        """See `Tracer.span`."""
        now, count = thread_time(), 0 if self._counter is None else self._counter.count
        if isinstance(name, Event) and name.op in (Op.F, Op.B) and isinstance(name.layer, int) and name.layer != self._last:
            self.seconds[name.op.name].append(now - self._before[0])
            self.operations[name.op.name].append(count - self._before[1])
            if (call := self._plain.get(name.op.name)) is not None:
                with torch.enable_grad():
                    self.plain_seconds[name.op.name].append(seconds(call))
        self._before = thread_time(), count


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

    def forward(self) -> torch.Tensor:
        """A forward with its graph."""
        entered, *others = self._args
        left = self._block(entered.detach().requires_grad_(), *others, **self._kwargs)
        return left[0] if isinstance(left, tuple) else left

    def backward(self) -> None:
        """A forward, its backward, and the sum of its gradients."""
        left = self.forward()
        torch.autograd.backward(left, torch.ones_like(left))
        for param, total in zip(self._block.parameters(), self._sums, strict=True):
            assert param.grad is not None
            total.add_(param.grad)
            param.grad = None


def seconds(call: Callable[[], object]) -> float:
    """Of this thread that a call takes."""
    start = thread_time()
    call()
    return thread_time() - start


def low(values: list[float]) -> float:
    """The lowest decile."""
    return sorted(values)[len(values) // 10]


def operations(call: Callable[[], object]) -> int:
    """That a call runs."""
    with Operations() as counter:
        call()
    return counter.count


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


@contextlib.contextmanager
def an_engine(options: argparse.Namespace, folder: Path) -> Iterator[Any]:
    """An engine on the device, with parameters, sums and state in host memory."""
    if options.device == "late":
        importlib.import_module("late_accelerator").use()
    harness = importlib.import_module("harness")
    config = harness.base_config(folder, num_micro_batches=options.micro_batches, params="cpu", optimizer="cpu", clip=0.0)
    config["vertical_schedule"] |= {"activations": {"keep": "none"}}
    engine, _ = harness.build_engine(config, lambda: build(options), vertical=True, recording=False)
    try:
        yield engine
    finally:
        harness.dispose(engine)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """On one device, by operation: the figures of each round of the engine and of the plain block, and torch's operations."""
    found: dict[str, dict[str, Any]] = {name: {"engine_s": [], "plain_s": []} for name in ("F", "B")}
    with an_engine(options, folder) as engine:
        batches = [torch.randint(0, VOCABULARY, (1, options.tokens)) for _ in range(options.micro_batches)]
        batches = [{"input_ids": ids, "labels": ids} for ids in batches]
        plain = PlainBlock(options, batches[0]["input_ids"].to(engine.device))
        calls = {"F": plain.forward, "B": plain.backward}
        for number in range(options.rounds + 1):
            engine._runner.tracer = own = EventCosts(options.layers - 1, calls)
            engine.train_batch(iter(batches))
            for name in calls if number else ():  # the first step makes what later ones have
                found[name]["engine_s"].append(low(own.seconds[name]))
                found[name]["plain_s"].append(low(own.plain_seconds[name]))
        with Operations() as counter:
            engine._runner.tracer = own = EventCosts(options.layers - 1, operations=counter)
            engine.train_batch(iter(batches))
        for name, call in calls.items():
            found[name] |= {"engine_ops": median(own.operations[name]), "plain_ops": operations(call)}
    return found


def in_a_process(options: argparse.Namespace, device: str) -> dict[str, dict[str, Any]]:
    """`measure` in a process of its own: the late device is torch's accelerator for good."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "found.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--device", device, "--result", str(result)]
        accelerator = GPU if device == GPU else "cpu"
        subprocess.run(command, check=True, env=os.environ | {"DS_ACCELERATOR": accelerator, "OMP_NUM_THREADS": "1"})
        found: dict[str, dict[str, Any]] = json.loads(result.read_text())
    return found


def beyond(found: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """`op_s`, and `beyond_s` of F and B on each device: see the module."""
    plain_s = {device: median(each["F"]["plain_s"]) for device, each in found.items()}
    op_s = (plain_s["late"] - plain_s["cpu"]) / found["late"]["F"]["plain_ops"] if "late" in found else 0.0
    made: dict[str, Any] = {"op_s": op_s}
    for device, figures in found.items():
        for name, each in figures.items():
            more_ops = (each["engine_ops"] - each["plain_ops"]) if device == "late" else 0
            made[f"{device}_{name}_s"] = median(each["engine_s"]) - median(each["plain_s"]) - more_ops * op_s
    return made


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line."""
    for name, default in (("rounds", 6), ("layers", 6), ("micro-batches", 8), ("tokens", 8), ("width", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--benchmarks", type=Path, default=ROOT / "benchmarks", help="folder for the result")
    parser.add_argument("--gpu", action="store_true", help="on a GPU, in place of the late device and the CPU")
    parser.add_argument("--device", choices=(*DEVICES, GPU), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measures, records, and prints a line for F and for B on each device."""
    options = options_of(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    torch.set_num_threads(1)
    if options.device:
        with tempfile.TemporaryDirectory() as folder:
            options.result.write_text(json.dumps(measure(options, Path(folder))))
        return 0
    load = os.getloadavg()[0]
    found = {device: in_a_process(options, device) for device in ((GPU,) if options.gpu else DEVICES)}
    settings = {key: getattr(options, key) for key in ("rounds", "layers", "micro_batches", "tokens", "width")}
    content = commits.made_of() | {"checkout": commits.describe(ROOT), "load_before": load, **settings, **found}
    content["beyond"] = made = beyond(found)
    where = GPU if options.gpu else report.instructions()
    name = f"llama_w{options.width}_s{options.tokens}_{where}_{content['date'][:10]}"
    portable.write(options.benchmarks / "launch" / f"{name}.json", content, ROOT / "runs" / "launch", "launch")
    for device, figures in found.items():
        for op, each in figures.items():
            engine_s, plain_s = (median(each[key]) for key in ("engine_s", "plain_s"))
            print(
                f"{device} {op}: {1e3 * engine_s:.3f} ms, a plain call {1e3 * plain_s:.3f} ms; {each['engine_ops']:.0f} and"
                f" {each['plain_ops']} operations; {1e3 * made[f'{device}_{op}_s']:.3f} ms beyond the call"
            )
    if not options.gpu:
        print(f"the late device's books: {1e6 * made['op_s']:.1f} us an operation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
