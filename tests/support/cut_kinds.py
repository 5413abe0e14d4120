"""Engines in each way of taking a step, to be cut anywhere."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import base_config, build_engine, small_buffers
from models import MixerBlock, MixerModel, next_token_loss, token_batches
from torch import nn

import ds_vertical
from ds_vertical.errors import LoopError

STEPS = [list(step) for step in token_batches(20, 2)]


BUILD = partial(MixerModel, 2, 512)


class StatefulBlock(MixerBlock):
    """Keeps state of each kind: set for it by the model (`gain`), its own counter, generator and running buffer, a list that
    all blocks append to, and Python's random numbers."""

    def __init__(self, width: int, notes: list[torch.Tensor], index: int) -> None:
        super().__init__(width)
        self.notes, self.calls, self.gain = notes, 0, 1.0
        self.own = torch.Generator().manual_seed(index)
        self.register_buffer("running", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scale = self.gain + 0.01 * self.calls + 0.1 * torch.rand(1, generator=self.own) + 0.1 * random.random()
        out = super().forward(x * scale + 0.1 * self.running)
        self.notes.append(out.square().mean())  # with gradient
        self.running.mul_(0.9).add_(0.1 * out.detach().mean((0, 1)))
        return out


class StatefulModel(MixerModel):
    """Sets what its blocks read, and takes the sum of what they have noted."""

    def __init__(self, num_layers: int = 2, width: int = 512) -> None:
        super().__init__(num_layers, width)
        self.notes: list[torch.Tensor] = []
        self.blocks = nn.ModuleList(StatefulBlock(width, self.notes, index) for index in range(num_layers))
        self.seen = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        self.seen += input_ids.shape[1]
        self.notes.clear()
        x = self.embed(input_ids)
        for block in self.blocks:
            block.gain = 1.0 + 0.01 * input_ids.shape[1] + 0.001 * self.seen
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else next_token_loss(logits, labels) + 0.01 * torch.stack(self.notes).sum()


def state_of(model: nn.Module) -> dict[str, Any]:
    """What the modules keep beside parameters, and the generators that the forwards draw from or that the script has."""
    found: dict[str, Any] = {f"buffer {name}": buffer.tolist() for name, buffer in model.named_buffers()}
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key in ("calls", "gain", "seen")}
        generator = getattr(module, "own", None)
        if generator is not None:
            own["own"] = generator.get_state().tolist()
        notes = getattr(module, "notes", None)
        if notes is not None:
            own["notes"] = [each.item() for each in notes]
        if own:
            found[f"state of {name}"] = own
    return found | {"Python's random": random.getstate()}


SECTION = {"seed": 3}


# overflows in the first steps, then doubled after every second good one
SCALE = {"enabled": True, "initial_scale_power": 21, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 1}


# what decides how a step is taken: when, from where, and what may be thrown away again
KINDS: dict[str, dict[str, Any]] = {
    "early": {"clip": 0.0},
    "delayed": {"clip": 0.05, "section": SECTION | {"optimizer_delay": 1.0}},
    "speculating": {"clip": 0.05},
    "half": {"clip": 0.0, "section": SECTION | {"optimizer_delay": 0.5}},
    "at once": {"clip": 0.05, "section": SECTION | {"optimizer_delay": 0.0, "optimizer_speculation": False}},
    "in place": {"clip": 0.0, "section": SECTION | {"on_nonfinite": "stop"}},
    "activations": {"clip": 0.0, "section": SECTION | {"activations": {"device": "ssd"}}},
    "products": {"clip": 0.0, "section": SECTION | {"activations": {"keep": "products"}}},
    "everything": {"clip": 0.05, "section": SECTION | {"activations": {"keep": "everything", "keep_device": "ssd"}}},
    "gradients": {"clip": 0.05, "section": SECTION | {"gradient_host_share": 0.0, "optimizer_speculation": False}},
    "shared": {"clip": 0.05, "section": SECTION | {"optimizer_host_share": 0.6}},
    "read ahead": {
        "clip": 0.05,
        "section": SECTION | {"optimizer_speculation": False, "optimizer_read_ahead_bytes": 1 << 26},
    },
    "fetched": {"clip": 0.05, "section": SECTION | {"outside_layers": "fetched"}},
    "no overlap": {"clip": 0.0, "section": SECTION | {"overlap": False}},
    "memory": {"clip": 0.05, "params": "cpu", "optimizer": "cpu"},
    "persistent": {"clip": 0.0, "persistence": None},
    "fp16": {"clip": 0.05, "dtype": "fp16", "fp16": SCALE},
    "stateful": {"clip": 0.05},
    "two ssds": {"clip": 0.05},
    "verify": {"clip": 0.05, "section": SECTION | {"verify": True}},
    "compressed": {"clip": 0.0, "dtype": "bf16", "section": SECTION | {"optimizer_compression": True, "optimizer_delay": 0.5}},
    "compressed late": {"clip": 0.05, "dtype": "bf16", "section": SECTION | {"optimizer_compression": True}},
}
FIRST: dict[str, dict[str, Any]] = {
    "first step": {"clip": 0.05},
    "self-check": {"clip": 0.05, "section": SECTION | {"self_check": True}},
    # where products rest is open: the first step is measured, and the choice is made behind it
    "first step, products": {"clip": 0.05, "section": SECTION | {"activations": {"keep": "products"}}},
    "first step, everything": {
        "clip": 0.05,
        "section": SECTION | {"activations": {"keep": "everything", "keep_device": "ssd"}},
    },
}  # in these the first step of each engine is cut
BUILDS: dict[str, Callable[[], nn.Module]] = dict.fromkeys(("stateful", *FIRST), StatefulModel) | dict.fromkeys(
    ("compressed", "compressed late"), partial(MixerModel, 2, 768)
)


def make(kind: str, folder: Path) -> tuple[Any, nn.Module]:
    options = {"num_micro_batches": 2, "dtype": "fp32", "section": SECTION} | (KINDS | FIRST)[kind]
    if kind == "two ssds":
        options["section"] = SECTION | {"nvme_paths": [str(folder), str(folder / "beside")]}
    config = base_config(folder, **options)
    given = config if kind == "memory" else small_buffers(config, 600_000)
    return build_engine(given, BUILDS.get(kind, BUILD), vertical=True)


def evaluate(engine: Any) -> None:
    engine.eval_batch(iter(STEPS[0]))


def three_calls(engine: Any) -> None:
    """The engine's next step, in a loop of the three calls. Where the loop is cut between two of them, the next call of the
    engine says that the step is half-way, and drops it."""
    try:
        for batch in ds_vertical.look_ahead(STEPS[engine.global_steps]):
            engine.backward(engine(**batch))
            engine.step()
    except BaseException:
        with contextlib.suppress(LoopError):
            engine.flush()
        raise
