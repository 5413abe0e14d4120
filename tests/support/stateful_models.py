"""Models whose forward keeps state outside its own variables: one class per kind of state."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from stateful import WIDTH, Base, Block
from torch import nn

# ---- state set by the model, read by blocks


class MaskBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * self.mask)


class MaskOnBlocks(Base):
    block = MaskBlock

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        for block in self.blocks:
            block.mask = torch.sigmoid(x.mean((0, 2), keepdim=True))  # requires grad
        return ()


class ContextBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        context = self.context
        context.seen.append(x.detach().mean())
        context.calls += 1
        out = self.body(x * context.gain)
        if context.calls == 2:
            context.side = out.mean(-1, keepdim=True)  # with gradient, read by later blocks and by the suffix
        elif context.calls > 2:
            out = out + 0.1 * context.side
        return out


class SharedContext(Base):
    """One context object that the model and all blocks share; each forward begins by resetting it."""

    block = ContextBlock

    def __init__(self) -> None:
        super().__init__()
        self.context = SimpleNamespace(seen=[], calls=0, gain=1.0, side=None)
        for block in self.blocks:
            block.context = self.context

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.context.seen.clear()
        self.context.calls, self.context.side = 0, None
        self.context.gain = 1.0 + 0.01 * x.shape[1]
        return ()

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.context.seen) * x.mean() + self.context.side.square().mean()


NOTES: list[torch.Tensor] = []


def reset_globals() -> None:
    """What the models keep in this module, and the generators of Python and NumPy, as ahead of each run."""
    NOTES.clear()
    random.seed(5)
    np.random.seed(5)


class GlobalListBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        NOTES.append(x.square().mean())  # with gradient
        return self.body(x)


class GlobalList(Base):
    block = GlobalListBlock

    def end(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.stack(NOTES).sum()
        NOTES.clear()
        return 0.1 * total


class BufferOfModelBlock(Block):
    def forward(self, x: torch.Tensor, load: torch.Tensor) -> Any:
        load.add_(x.detach().abs().mean())
        return self.body(x)


class BufferOfModel(Base):
    block = BufferOfModelBlock

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(()))

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.load.zero_()
        return (self.load,)

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return self.load.clone() * x.mean()


class BufferOfParentBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.parent[0].load.add_(x.detach().abs().mean())
        return self.body(x)


class BufferThroughParent(BufferOfModel):
    block = BufferOfParentBlock

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.parent = (self,)

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.load.zero_()
        return ()


# ---- what blocks leave for the suffix


class StatisticBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.statistic = x.detach().abs().mean()
        self.auxiliary = self.up(x).square().mean()  # with gradient
        return self.body(x)


class Statistics(Base):
    block = StatisticBlock

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return sum(block.statistic * x.mean() + 0.01 * block.auxiliary for block in self.blocks)


class NamespaceBlock(Block):
    def forward(self, x: Any, *args: Any) -> Any:
        x = x.hidden if isinstance(x, SimpleNamespace) else x
        return SimpleNamespace(hidden=self.body(x), extra=[x.mean(), "text"])


class Namespaces(Base):
    """Blocks that return objects."""

    block = NamespaceBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        extra = []
        for block in self.blocks:
            x = block(x)
            extra.append(x.extra[0])
        return self.head(x.hidden).square().mean() + torch.stack(extra).sum()


class NoneBlock(Block):
    def forward(self, x: Any, *args: Any) -> None:
        x["hidden"] = self.body(x["hidden"])


class Nones(Base):
    """Blocks that return nothing and write into a dict that they are given."""

    block = NoneBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        carrier = {"hidden": self.embed(x)}
        for block in self.blocks:
            block(carrier)
        return self.head(carrier["hidden"]).square().mean()


@dataclass
class Carrier:
    keys: Any = None
    log: Any = None


class SharingBlock(Block):
    """The first half stores keys with gradient in an object, the second half reads them."""

    def forward(self, x: torch.Tensor, shared: Any, *args: Any) -> Any:
        get = shared.get if hasattr(shared, "get") else lambda key: getattr(shared, key)
        if self.index == 1:
            value = (self.up(x), [self.down(x), None])
            if isinstance(shared, Carrier):
                shared.keys = value
            else:
                shared["keys"] = value
        if self.index >= 2:
            first, (second, _) = get("keys")
            x = x * torch.sigmoid(first) + second
        return self.body(x)


class SharedDict(Base):
    block = SharingBlock
    carrier: Callable[[], Any] = dict

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        return (type(self).carrier(),)


class SharedUserDict(SharedDict):
    carrier = collections.UserDict


class SharedDataclass(SharedDict):
    carrier = Carrier


class ListBlock(Block):
    def forward(self, x: torch.Tensor, states: list[torch.Tensor]) -> Any:
        if states:
            x = x + 0.1 * states[-1]
        out = self.body(x)
        states.append(out if self.index % 2 else torch.tanh(out))
        return out


class SharedList(Base):
    block = ListBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, states = self.embed(x), []
        for block in self.blocks:
            x = block(x, states)
        return self.head(x).square().mean() + sum(state.mean() for state in states)


# ---- state that makes the recompute another one


class GeneratorBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.generator = torch.Generator().manual_seed(index)

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * (torch.rand(x.shape, generator=self.generator) > 0.3))


class OwnGenerators(Base):
    block = GeneratorBlock


class PythonRandomBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        kept = random.random() > 0.3  # stochastic depth; stock adds to what a parameter without gradient had, so all have one
        return x + (self.body(x * random.uniform(0.5, 1.5)) - x) * kept


class PythonRandom(Base):
    block = PythonRandomBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * random.uniform(0.5, 1.5))


class NumpyRandomBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * float(np.random.rand()))


class NumpyRandom(Base):
    block = NumpyRandomBlock


class NumpyGeneratorBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.rng, self.old = np.random.default_rng(index), random.Random(index)

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * float(self.rng.random()) * self.old.random())


class NumpyGenerators(Base):
    block = NumpyGeneratorBlock


class CountingBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.calls = 0
        self.note = SimpleNamespace(calls=0, sizes=[])

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.calls += 1
        self.note.calls += 2
        self.note.sizes.append(x.shape[1])
        return self.body(x * (1 + 0.01 * self.calls + 0.02 * self.note.calls + 0.001 * sum(self.note.sizes)))


class Counting(Base):
    block = CountingBlock


class SpectralBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("u", torch.nn.functional.normalize(torch.ones(WIDTH), dim=0))

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        weight = self.up.weight
        with torch.no_grad():  # one step of the power iteration, in place
            v = torch.nn.functional.normalize(weight.t() @ self.u, dim=0)
            self.u.copy_(torch.nn.functional.normalize(weight @ v, dim=0))
        sigma = self.u.clone() @ (weight @ v)
        return x + self.down(torch.tanh(torch.nn.functional.linear(x, weight / sigma, self.up.bias)))


class Spectral(Base):
    block = SpectralBlock


class TorchSpectralBlock(Block):
    """torch's own spectral norm: a parametrization whose buffers each forward moves in place, behind the weight's name."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.up = torch.nn.utils.parametrizations.spectral_norm(self.up)


class TorchSpectral(Base):
    """Under zero.Init its first forward fails, in stock as well: the parametrization reads a weight that is not there."""

    block = TorchSpectralBlock


class SkippingBlock(Block):
    """Stochastic depth that hands its input on as it is: not even a view of it. Each block runs for some micro-batch."""

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return x if self.training and x.shape[1] == 3 + self.index % 2 else self.body(x)


class Skipping(Base):
    block = SkippingBlock


class CodeBookBlock(Block):
    """A code book larger than any that was put back by copying, moved by each forward."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("codes", torch.linspace(-1, 1, 2000 * WIDTH).view(2000, WIDTH))

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        flat = x.detach().reshape(-1, WIDTH)
        nearest = torch.cdist(flat, self.codes).argmin(-1)
        out = self.body(x + self.codes[nearest].view_as(x))
        self.codes[nearest] = self.codes[nearest].lerp(flat, 0.1)
        return out


class CodeBooks(Base):
    block = CodeBookBlock


class RangeBlock(Block):
    """Buffers that are replaced, not written, as I-BERT's activation ranges are."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("x_min", torch.zeros(1))
        self.register_buffer("x_max", torch.zeros(1))

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.x_min = self.x_min * 0.9 + x.detach().min() * 0.1
        self.x_max = self.x_max * 0.9 + x.detach().max() * 0.1
        return self.body(x / (self.x_max - self.x_min + 1))


class Ranges(Base):
    block = RangeBlock


class NormBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x) + self.norm.running_mean.detach() * x


class FilledNormBlock(NormBlock):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.norm(x.detach().flatten(0, 1))
        return super().forward(x)


class FilledStatistics(Base):
    """Running statistics move without a trace in the buffer's version."""

    block = FilledNormBlock


CASES: list[type[Base]] = [
    MaskOnBlocks,
    SharedContext,
    GlobalList,
    BufferOfModel,
    BufferThroughParent,
    Statistics,
    Namespaces,
    Nones,
    SharedDict,
    SharedUserDict,
    SharedDataclass,
    SharedList,
    OwnGenerators,
    PythonRandom,
    NumpyRandom,
    NumpyGenerators,
    Counting,
    Spectral,
    CodeBooks,
    Ranges,
    FilledStatistics,
]


class Keeper:
    """A hook that keeps a block's output, and a loss that uses it."""

    def __init__(self, where: str, detached: bool) -> None:
        self.where, self.detached = where, detached
        self.kept: dict[str, torch.Tensor] = {}
        self.notes: list[torch.Tensor] = []
        self.module: Any = None

    def keep(self, module: Any, output: torch.Tensor) -> None:
        output = output.detach() if self.detached else output
        if self.where == "dict":
            self.kept["hidden"] = output
        elif self.where == "list":
            self.notes.append(output)
        else:
            self.module, module.kept = module, output

    def loss_fn(self, loss: torch.Tensor, _: Any) -> torch.Tensor:
        places = {"dict": lambda: self.kept["hidden"], "list": self.notes.pop, "attribute": lambda: self.module.kept}
        return loss * (1 + places[self.where]().square().mean())
