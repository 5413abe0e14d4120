"""The models that `late_worker` trains."""

from __future__ import annotations

from functools import partial

import torch
from models import MixerBlock, MixerModel, next_token_loss
from torch import nn

NUM_LAYERS = 3
FAILS_FORWARD, FAILS_BACKWARD = 20, 30  # tokens of the last micro-batch of a step that fails
WIDTH = 768  # a matrix of two bytes an element is over 1 MiB, and so on SSD
LARGE_ROWS = 100  # of a buffer of more elements than are copied in each step


class FailingBlock(MixerBlock):
    """With sequences of one length its forward raises Failure, with those of another its backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == FAILS_FORWARD:
            raise Failure
        result = super().forward(x)
        if x.shape[1] == FAILS_BACKWARD and result.requires_grad:
            result.register_hook(fail)
        return result


# A LookingBlock's number, and the collectives that are under way when its backward begins. Sorted by micro-batches.
BESIDE: list[tuple[int, list[str]]] = []


class LookingBlock(FailingBlock):
    """Its backward looks around."""

    number: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        if result.requires_grad:
            result.register_hook(partial(look_around, self.number))
        return result


def look_around(number: int, grad: torch.Tensor) -> None:
    if grad.device.type == "late":
        import late_accelerator

        BESIDE.append((number, late_accelerator.beside()))


class Failure(Exception):
    """As users' code may raise it."""


def fail(_: torch.Tensor) -> None:
    raise Failure


def build_model(num_layers: int = NUM_LAYERS, block_class: type[FailingBlock] = FailingBlock) -> MixerModel:
    model = MixerModel(num_layers, WIDTH, dropout=0.1)
    for number, block in enumerate(model.blocks):
        block.__class__ = block_class
        block.number = number
    return model


def build_compiled() -> nn.Module:
    """Blocks compiled as far as the device goes: traced, with the backward that torch.compile makes, in eager's kernels."""
    torch._dynamo.reset()
    model = MixerModel(NUM_LAYERS, WIDTH, dropout=0.1)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


class BufferedBlock(MixerBlock):
    """Reads a small buffer, and one that is too large to be copied in each step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.table[: x.shape[1]] + self.shift)


READS_ALONE = [1000]  # not an attribute of the model: an engine learns anew of a model where somebody has set one


class BufferedModel(MixerModel):
    """Reads a buffer behind its layers. A micro-batch of more tokens than READS_ALONE writes it ahead of them, where torch does
    not count it."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if input_ids.shape[1] > READS_ALONE[0]:
            self.scale.data.mul_(1.125)
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)) * self.scale
        return logits if labels is None else next_token_loss(logits, labels)


def build_buffered() -> BufferedModel:
    """Buffers in the layers and outside of them, such as rotary frequencies and causal masks."""
    READS_ALONE[:] = [1000]
    model = BufferedModel(NUM_LAYERS, WIDTH, dropout=0.1)
    model.register_buffer("scale", torch.ones(()))
    for block in model.blocks:
        block.__class__ = BufferedBlock
        block.register_buffer("shift", torch.full((WIDTH,), 0.01))
        block.register_buffer("table", torch.full((LARGE_ROWS, WIDTH), 0.5))
    return model
