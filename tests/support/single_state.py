"""Models that keep one kind of state each, and nothing else: what the self-check has to find where that kind is not handled.

`stateful_models` has those that mix kinds, and those that keep one already.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from families import VOCAB, Family, fill
from stateful import Base, Block
from stateful_models import RangeBlock, SharedUserDict, SharingBlock
from torch import nn
from transformers import IBertConfig, IBertForMaskedLM
from transformers.initialization import no_init_weights

# ---- keys that later blocks read, with gradient


class LastReadsBlock(SharingBlock):
    """The last block alone reads the keys, as with `num_kv_shared_layers` 1."""

    def forward(self, x: torch.Tensor, shared: Any, *args: Any) -> Any:
        return self.body(x) if self.index == 2 else super().forward(x, shared)


class LastReads(SharedUserDict):
    block = LastReadsBlock


class KeysInAContextBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        if self.index == 1:
            self.context.keys = self.up(x)
        return self.body(x * torch.sigmoid(self.context.keys) if self.index > 1 else x)


class KeysInAContext(Base):
    """The object in which the keys lie is held by the modules, and is no argument."""

    block = KeysInAContextBlock

    def __init__(self) -> None:
        super().__init__()
        self.context = SimpleNamespace(keys=None)
        for block in self.blocks:
            block.context = self.context

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.context.keys = None
        return ()


# ---- what one part of the forward sets, and another reads


class GainBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * self.gain)


class PlainMask(Base):
    """The model sets an attribute of its blocks, without gradient."""

    block = GainBlock

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        for block in self.blocks:
            block.gain = (x.detach().mean((0, 2), keepdim=True) > 0) + 0.5
        return ()


class ForTheSuffix(Base):
    """The code ahead of the blocks sets what the code behind them reads."""

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.level = x.detach().mean().item()
        return ()

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return self.level * x.mean()


class PlainStatisticBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.statistic = x.detach().abs().mean()
        return self.body(x)


class PlainStatistics(Base):
    block = PlainStatisticBlock

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return sum(block.statistic for block in self.blocks) * x.mean()


NUMBERS: list[float] = []


class GlobalNumbersBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        NUMBERS.append(x.detach().square().mean().item())
        return self.body(x)


class GlobalNumbers(Base):
    block = GlobalNumbersBlock

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        NUMBERS.clear()
        return ()

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return sum(NUMBERS) * x.mean()


class ContextGainBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * self.context.gain)


class ContextGain(Base):
    """The model writes into an object that all blocks share."""

    block = ContextGainBlock

    def __init__(self) -> None:
        super().__init__()
        self.context = SimpleNamespace(gain=1.0)
        for block in self.blocks:
            block.context = self.context

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.context.gain = 1.0 + x.detach().mean().item()
        return ()


# ---- what makes the recompute another function


class CounterBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.calls = 0

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.calls += 1
        return self.body(x * (1 + 0.05 * self.calls))


class Counters(Base):
    block = CounterBlock


class NotedCounterBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.note = SimpleNamespace(calls=0)

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.note.calls += 1
        return self.body(x * (1 + 0.05 * self.note.calls))


class NotedCounters(Base):
    """Each block counts in a context object of its own."""

    block = NotedCounterBlock


class ResetCounterBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.context.calls += 1
        return self.body(x * (1 + 0.05 * self.context.calls))


class ResetCounter(ContextGain):
    """All blocks count in one context object, which each forward resets."""

    block = ResetCounterBlock

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.context.calls = 0
        return ()


class PythonDepthBlock(Block):
    """Stochastic depth by Python's random numbers, by a factor: stock adds to what a parameter without gradient had."""

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return x + (self.body(x) - x) * (1.5 if random.random() > 0.5 else 0.25)


class PythonDepth(Base):
    block = PythonDepthBlock


class TorchDepthBlock(Block):
    """The same by torch's default generator."""

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return x + (self.body(x) - x) * (1.5 if torch.rand(()) > 0.5 else 0.25)


class TorchDepth(Base):
    block = TorchDepthBlock


# ---- buffers that are replaced


class UnreadRangeBlock(RangeBlock):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        super().forward(x)
        return self.body(x)


class UnreadRanges(Base):
    """Nothing that is trained depends on the ranges."""

    block = UnreadRangeBlock


def ibert() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": VOCAB}
    config = IBertConfig(**sizes, max_position_embeddings=64, quant_mode=True, pad_token_id=0)
    with no_init_weights():
        model = IBertForMaskedLM._from_config(config)
    fill(model)
    return model


# ---- models of Hugging Face whose layers share keys and values

_SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
_PER_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB, "sliding_window": 4}
_GEMMA = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "max_position_embeddings": 64} | _SMALL | _PER_LAYER
_TYPES = {"layer_types": ["sliding_attention", "full_attention"] * 3}
_GEMMA3N = {"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 6}
GEMMAS = (
    Family("gemma3n_text", _GEMMA | _TYPES | _GEMMA3N),
    Family("gemma4_text", _GEMMA | _TYPES),
)

SINGLE: list[type[Base]] = [
    *(LastReads, KeysInAContext),
    *(PlainMask, ForTheSuffix, PlainStatistics, GlobalNumbers, ContextGain),
    *(Counters, NotedCounters, ResetCounter, PythonDepth, TorchDepth),
    UnreadRanges,
]
