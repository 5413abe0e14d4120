"""State that begins to change late, is replaced by the user, or hides where the first search does not come: stock's bits, too.

Each case trains four steps and evaluates after two of them, without the self-check.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import differing, read_weights, running
from stateful import NUM_LAYERS, Base, Block, CountUp, M, Model, batches, config_in
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import BaseModelOutput

from ds_vertical import interrupts
from ds_vertical.errors import LayerError

USERS = types.ModuleType("users_module")  # a module of the user's own, as `import users_module` gives it
USERS.MASK = 1.0
PACKAGE = types.ModuleType("users_package")  # `import users_package.inner`
PACKAGE.inner = types.ModuleType("users_package.inner")
PACKAGE.inner.SETTING = 1.0
COUNTS: contextvars.ContextVar[dict[Any, Any]] = contextvars.ContextVar("counts")
OF_THREAD = threading.local()


# ---- changes that begin in the third step


class LateDictBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.note, self.start = {"calls": 0}, False

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        if not self.start:
            return self.body(x)
        self.note["calls"] += 1
        return self.body(x * (1 + 0.1 * self.note["calls"]))


class LateDict(Base):
    block = LateDictBlock


class LateGeneratorBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.generator, self.other, self.start = torch.Generator().manual_seed(index), random.Random(index), False

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        if self.start:
            x = x * (torch.rand(x.shape, generator=self.generator) > 0.3) * self.other.random()
        return self.body(x)


class LateGenerator(Base):
    block = LateGeneratorBlock


class LateTensorBlock(Block):
    """A plain attribute, and a batch norm that begins to keep statistics: its kernel counts no writes."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.sum, self.norm, self.start = torch.zeros(()), nn.BatchNorm1d(48), False

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.norm.train(self.start and self.training)
        if self.start:
            self.sum.add_(x.detach().mean() + 1)
            x = x * (1 + self.sum)
        return self.body(self.norm(x.transpose(1, 2)).transpose(1, 2))


class LateTensor(Base):
    block = LateTensorBlock


class GrowingBlock(Block):
    """Nobody does anything: a list grows after the sixth call."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.calls, self.queue = 0, list[torch.Tensor]()

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.calls += 1
        if self.calls > 6:
            self.queue.append(x.detach().mean())
        return self.body(x * (1 + sum(self.queue)))


class Growing(Base):
    block = GrowingBlock


class LateAuxBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.context, self.start = SimpleNamespace(aux=None), False

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.context.aux = self.up(x).square().mean() if self.start else None
        return self.body(x)


class LateAux(Base):
    block = LateAuxBlock

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return 0.1 * sum((b.context.aux for b in self.blocks if b.context.aux is not None), x.new_zeros(()))


def start(_: Any, model: Model, step: int) -> None:
    for block in model.blocks if step == 1 else ():
        block.start = True


# ---- set by the code around the blocks, in containers of theirs


class ConfiguredBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.settings: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * self.settings["mask"])


class Configured(Base):
    block = ConfiguredBlock

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        for block in self.blocks:
            block.settings["mask"] = torch.sigmoid(x.mean((0, 2), keepdim=True))
        return ()


class NotedBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.notes: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.notes.append(x.square().mean())
        return self.body(x * (1 + 0.1 * len(self.notes)))


class ClearedFirst(Base):
    """Every forward begins by emptying lists that are empty as long as no forward has filled them."""

    block = NotedBlock

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        for block in self.blocks:
            block.notes.clear()
        return ()

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return 0.1 * sum((note for block in self.blocks for note in block.notes), x.new_zeros(()))


class EvalNotedBlock(NotedBlock):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x) if self.training else super().forward(x)


class ClearedInEvaluation(ClearedFirst):
    block = EvalNotedBlock


# ---- tensors written in place


class InPlaceBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        total, found = self.owner[0].total, args[0]
        total.add_(x.detach().mean())
        found["sum"] += x.detach().mean()
        return self.body(x * (1 + total + found["sum"]))


class InPlace(Base):
    """A tensor, and one in a dict, made by each forward and written in place by the blocks."""

    block = InPlaceBlock

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.owner = (self,)

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.total = torch.zeros(())
        return ({"sum": torch.zeros(())},)


class AddingBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.context.aux += self.up(x).square().mean()
        args[0]["aux"] += self.down(x).square().mean()
        return self.body(x)


class Added(Base):
    """`aux += loss`: a number in the first block, in the others a tensor with gradient that is written in place."""

    block = AddingBlock

    def __init__(self) -> None:
        super().__init__()
        self.context = SimpleNamespace(aux=0.0)
        for block in self.blocks:
            block.context = self.context

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.context.aux, self.given = 0.0, {"aux": 0.0}
        return (self.given,)

    def end(self, x: torch.Tensor) -> torch.Tensor:
        return 0.1 * (self.context.aux + self.given["aux"])


class ReshapedBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("means", torch.zeros(1))
        self.sums = torch.zeros(1)

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        scale = 1 + 0.1 * self.means.mean() + 0.1 * self.sums.mean()
        self.means.data = torch.sigmoid(x.detach().mean((0, 2)) + self.means.mean())
        self.sums.data = torch.cat([self.sums, torch.sigmoid(x.detach().mean()).view(1)])
        return self.body(x * scale)


class Reshaped(Base):
    """A buffer that each micro-batch gives a shape of its own by `.data = ...`, and a tensor that grows so."""

    block = ReshapedBlock

    def left(self) -> list[Any]:
        return [block.sums.tolist() for block in self.blocks]


class GivenAwayBlock(Block):
    """Keeps a tensor, and gives another one its memory; then writes through either."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("lent", torch.zeros(3))
        self.kept, self.calls = torch.zeros(3), 0

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        scale = 1 + 0.1 * self.kept.mean() + 0.1 * self.lent.mean()
        self.calls += 1
        if self.calls % 2:
            self.kept = torch.sigmoid(x.detach().mean((0, 1))[:3] + self.kept)
            self.lent.data = self.kept
        if self.index % 2:
            self.lent += 0.1
        else:
            self.kept += 0.1
        return self.body(x * scale)


class GivenAway(Base):
    """Two tensors of a block over one memory, which every second forward replaces."""

    block = GivenAwayBlock

    def left(self) -> list[Any]:
        return [
            [block.kept.tolist(), block.lent.tolist(), block.kept.data_ptr() == block.lent.data_ptr()] for block in self.blocks
        ]


class LentBlock(Block):
    """A large buffer that is given other memory, from the third step on by memory with the same elements in it."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("table", torch.zeros(8, 48))
        self.rows = [torch.full((8, 48), 0.1 * number) for number in range(3)]
        self.start = False

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        if self.start:
            self.table.data = self.rows[x.shape[1] - 3]
        self.table += 0.01
        return self.body(x + self.table[0])


class Lent(Base):
    """A buffer that is given memory of tensors in a list, one for each micro-batch, in which it then writes."""

    block = LentBlock

    def left(self) -> list[Any]:
        return [[row.tolist() for row in block.rows] for block in self.blocks]


class ReadFurtherOnBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("load", torch.zeros(()))

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.load.add_(0.1 * torch.sigmoid(x.detach().mean()))
        return self.body(x * (1 + self.others[0].load))


class ReadFurtherOn(Base):
    """Each block writes its buffer in place; all blocks read the first one's."""

    block = ReadFurtherOnBlock

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.others = [self.blocks[0]]


class ReadByHooks(Base):
    """The same by hooks on the blocks."""

    block = ReadFurtherOnBlock

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.others = [block]
            block.register_forward_hook(self.scaled)

    def scaled(self, block: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + self.blocks[0].load)


class Usage(Base):
    """A count that blocks write and nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("usage", torch.zeros(4))
        for block in self.blocks:
            block.register_forward_hook(self.count)

    def count(self, block: Any, *_: Any) -> None:
        self.usage[block.index] += 1.0


# ---- where state hides


def counter() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("sum", torch.zeros(()))


class HidingBlock(Block):
    """In a closure, in an array, and in a module that is none of the model's."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.count, self.array, self.others = counter(), np.zeros(2), [Recorder()]

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.array[0] += 1
        other = self.others[0]
        other.calls += 1
        other.sum.add_(0.1)
        return self.body(x * (1 + 0.05 * (self.count() + float(self.array[0]) + other.calls) + other.sum))


class Hiding(Base):
    block = HidingBlock


class ElsewhereBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        counts = COUNTS.get()
        counts["calls"] += 1
        return self.body(x * OF_THREAD.mask * USERS.MASK * (1 + 0.1 * counts["calls"]))


class Elsewhere(Base):
    """In a module that the user imports, in a thread's own object, in a context variable."""

    block = ElsewhereBlock

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        USERS.MASK = torch.sigmoid(x.detach().mean((0, 2), keepdim=True))
        OF_THREAD.mask = torch.sigmoid(x.detach().amax((0, 2), keepdim=True))
        COUNTS.set({"calls": 0})
        return ()


class SettingBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * PACKAGE.inner.SETTING)


class SetInAPackage(Base):
    """In a module inside a package that the user imports."""

    block = SettingBlock

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        PACKAGE.inner.SETTING = torch.sigmoid(x.detach().mean((0, 2), keepdim=True))
        return ()


class OutputBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        out = self.body(x)
        self.last = BaseModelOutput(last_hidden_state=out, hidden_states=(out.mean(),))
        return self.last


class KeptOutputs(Base):
    """transformers' outputs, which are dicts that refuse `update`."""

    block = OutputBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x).last_hidden_state
        return self.head(x).square().mean() + sum(0.1 * block.last.hidden_states[0] for block in self.blocks)


class SuffixBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * (1 + 0.1 * self.owner[0].steps))


class CountedInTheSuffix(Base):
    block = SuffixBlock
    steps = 0  # of the class: the first forward makes it an attribute of the model's

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.owner = (self,)

    def end(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x.new_zeros(())


class ScaledBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        found = self.owner[0].found
        return self.body(x if found["gate"] is None else x * found["gate"])


class ClearedAtTheEnd(Base):
    """From the third step on the prefix sets a gate that the suffix takes away: nothing has changed in the end. One micro-batch
    alone sets a number that the next one sets back."""

    block = ScaledBlock

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] = {"gate": None, "number": 1.0}
        for block in self.blocks:
            block.owner, block.start = (self,), False

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        if self.blocks[0].start:
            self.found["number"] = 2.0 if x.shape[1] == 4 else 1.0
            self.found["gate"] = torch.sigmoid(x.detach().mean((0, 2), keepdim=True)) * self.found["number"]
        return ()

    def end(self, x: torch.Tensor) -> torch.Tensor:
        self.found["gate"] = None
        return x.new_zeros(())


class ModedBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.acts, self.start = nn.ModuleList([nn.Tanh(), nn.Sigmoid()]), False
        self.act, self.probe = self.acts[0], nn.Identity()

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(self.act(x) * (2.0 if self.probe.training else 1.0))


class Moded(Base):
    """From the third step on the prefix sets modes, and swaps a submodule, as the micro-batch wants it."""

    block = ModedBlock

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        for block in self.blocks if self.blocks[0].start else ():
            block.probe.train(x.shape[1] == 4)
            block.act = block.acts[x.shape[1] % 2]
        return ()


class AppendedBlock(NotedBlock):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.notes.append(x.square().mean())
        return self.body(x * (1 + 0.1 * len(self.owner[0].blocks[0].notes)))


class Appended(Base):
    """The code behind each block fills the first one's list, which all blocks read and the suffix clears."""

    block = AppendedBlock

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.owner = (self,)
            block.register_forward_hook(self.note)

    def note(self, module: Any, args: Any, output: torch.Tensor) -> None:
        self.blocks[0].notes.append(output.detach().mean())

    def end(self, x: torch.Tensor) -> torch.Tensor:
        total = 0.1 * sum((note for block in self.blocks for note in block.notes), x.new_zeros(()))
        for block in self.blocks:
            block.notes.clear()
        return total


class Deep(Appended):
    """More layers than a step may start over."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(AppendedBlock(index) for index in range(4, 12))
        for block in self.blocks[4:]:
            block.owner = (self,)


class GradientBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norms: list[float] = []

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        out = self.body(x)
        if out.requires_grad:
            out.register_hook(lambda grad: self.norms.append(grad.norm().item()))
        return out


class Gradients(Base):
    """What hooks of the backward collect."""

    block = GradientBlock


class GateModule(nn.Module):
    def forward(self, x: torch.Tensor) -> None:
        self.gate = torch.sigmoid(x.detach().mean((0, 2), keepdim=True))


class GatedBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * self.gates[0].gate * NEW)


class Named(Base):
    """Names that nothing stands for until the first forward: of a module that is none of the model's, of a global."""

    block = GatedBlock

    def __init__(self) -> None:
        super().__init__()
        self.gates = [GateModule()]
        for block in self.blocks:
            block.gates = self.gates

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        global NEW
        NEW = 1 + torch.sigmoid(x.detach().amax((0, 2), keepdim=True))
        self.gates[0](x)
        return ()


class CollectingBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any, collected: list[torch.Tensor]) -> Any:
        for each in (*args, collected):
            each.append(0.1 * self.up(x).square().mean())
        return self.body(x)


class Collecting(Base):
    """Lists that are empty as the first block gets them. Of one among the positional arguments stock's hooks make a copy."""

    block = CollectingBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lists: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, lists[0], collected=lists[1])
        assert [len(each) for each in lists] == [0, NUM_LAYERS]
        return self.head(x).square().mean() + sum(lists[1], x.new_zeros(()))


class Counter:
    """Counts in a private slot, in an attribute, and in a `__dict__` that is another one after each call."""

    __slots__ = ("__calls", "__dict__")

    def __init__(self) -> None:
        self.__calls = self.sizes = 0

    def next(self) -> float:
        self.__calls += 1
        self.sizes += 1
        self.__dict__ = {**self.__dict__, f"call {self.__calls % 3}": self.__calls}
        return self.__calls + 0.5 * self.sizes + 0.25 * len(self.__dict__)


class Attributed:
    def __init__(self) -> None:
        self.calls = 0

    def next(self) -> float:
        self.__dict__ = {"calls": self.calls + 1}
        return self.calls


class Switched:
    """Its `__dict__` is one of two that are kept."""

    def __init__(self) -> None:
        self.tables: list[dict[str, Any]] = []
        self.tables += [{"tables": self.tables, "calls": start} for start in (1, 5)]

    def next(self) -> float:
        self.__dict__ = self.tables[self.tables[0]["calls"] % 2]
        self.tables[0]["calls"] += 1
        return self.calls


class AnswersAll:
    """Has no `__dict__`, and gives None for all that it has not."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0.0

    def __getattr__(self, name: str) -> None:
        return None

    def next(self) -> float:
        self.calls = -self.calls - 1 if self.calls >= 0 else -self.calls
        return self.calls


class Signed:
    def __init__(self) -> None:
        self.zero = 0.0

    def next(self) -> float:
        self.zero = -self.zero
        return math.copysign(1, self.zero)


class SlottedBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.counters = [Counter(), Attributed(), Switched(), AnswersAll(), Signed()]

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * (1 + 0.1 * sum(each.next() for each in self.counters)))


class Slotted(Base):
    block = SlottedBlock


class SlottedList(list[Any]):
    __slots__ = ("calls", "inner")


class SlottedDict(dict[str, Any]):
    __slots__ = ("calls",)


class AttributedList(list[Any]):
    """Has attributes beside its elements."""


class SubclassedBlock(Block):
    """Counts in a slot of a list and of a dict, which have elements as well."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.kept, self.named = SlottedList([1.0]), SlottedDict(scale=0.01)
        self.kept.calls = self.named.calls = 0

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.kept.calls += 1
        self.kept.inner = x.detach().mean()
        self.named.calls += 2
        return self.body(x * (1 + 0.01 * self.kept.calls + self.named["scale"] * self.named.calls) + self.kept.inner)


class Subclassed(Base):
    """And hooks that append to a list that has an attribute and to one that has a slot; nobody reads them."""

    block = SubclassedBlock

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.slotted = AttributedList([0]), SlottedList()
        self.sizes.name, self.slotted.calls = "sizes", 0
        for block in self.blocks:
            block.register_forward_hook(self.note)

    def note(self, block: Any, args: Any, output: torch.Tensor) -> None:
        self.sizes.append(output.shape[1])
        self.slotted.append(block.index)
        self.slotted.calls += 1

    def left(self) -> list[Any]:
        counts = [(block.kept.calls, list(block.kept), block.named.calls, dict(block.named)) for block in self.blocks]
        return [counts, list(self.sizes), vars(self.sizes), list(self.slotted), self.slotted.calls]


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


class Outer(Child):
    def __init__(self) -> None:
        super().__init__()
        self.child = Child()


class FreeBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.free = [Outer()]

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        outer = self.free[0]
        outer.calls += 2
        outer.child.calls += 1
        return self.body(x * (1 + 0.1 * outer.calls + 0.1 * outer.child.calls))


class Free(Base):
    """A module that is not registered and its child, which keep state under the same name; one is replaced after each step."""

    block = FreeBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.free[0].child.calls = 0
        x = super().forward(x)
        for block in self.blocks:
            block.free[0].child.calls += 1
        return x


def replace_free(_: Any, model: Model, step: int) -> None:
    for block in model.blocks:
        block.free = [Outer()]


# ---- what users do between steps


class NoteBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.note = SimpleNamespace(calls=0, sizes=[])

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.note.calls += 1
        self.note.sizes.append(x.shape[1])
        return self.body(x * (1 + 0.1 * self.note.calls))


class Replaced(Base):
    block = NoteBlock


def replace_notes(_: Any, model: Model, step: int) -> None:
    for block in model.blocks:
        block.note = SimpleNamespace(calls=0, sizes=[])


class Distillation(nn.Module):
    """A loss that is a module, and holds what a hook has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: torch.Tensor | None = None

    def keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.kept = output

    def forward(self, loss: torch.Tensor, _: Any) -> torch.Tensor:
        return loss if self.kept is None else loss * (1 + self.kept.square().mean())


def a_loss_from_the_third_step(engine: Any, model: Model, step: int) -> None:
    if step == 1:
        model.blocks[1].register_forward_hook(model.loss[0].keep)


class WithLoss(Base):
    def __init__(self) -> None:
        super().__init__()
        self.loss = (Distillation(),)


# ---- hooks on blocks


class Tally:
    """Counts the calls of its hooks, and scales by the number."""

    def __init__(self) -> None:
        self.calls = 0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 + 0.01 * self.calls)

    def ahead(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (self.scaled(args[0]), *args[1:])

    def behind(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return self.scaled(output)


class TallyModule(nn.Module, Tally):
    """A tally that is a module, and none of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


class CountedTwice(Base):
    """One object counts in a pre-hook and in a forward hook of one block."""

    tally: Callable[[], Any] = Tally

    def __init__(self) -> None:
        super().__init__()
        self.tallies = [type(self).tally() for _ in self.blocks]
        for block, tally in zip(self.blocks, self.tallies, strict=True):
            block.register_forward_pre_hook(tally.ahead)
            block.register_forward_hook(tally.behind)

    def left(self) -> list[Any]:
        return [tally.calls for tally in self.tallies]


class CountedTwiceByModule(CountedTwice):
    tally = TallyModule


class HookedBlock(Block):
    """Its own attribute counts in a pre-hook, in its forward and in a forward hook."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.calls = 0
        self.register_forward_pre_hook(HookedBlock.ahead)
        self.register_forward_hook(HookedBlock.behind)

    def ahead(self, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        self.calls += 1
        return (args[0] * (1 + 0.01 * self.calls),)

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.calls += 1
        return self.body(x * (1 + 0.01 * self.calls))

    def behind(self, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output * (1 + 0.01 * self.calls)


class Hooked(Base):
    block = HookedBlock

    def left(self) -> list[Any]:
        return [block.calls for block in self.blocks]


def scaled_by_keyword(block: Any, args: Any, output: torch.Tensor, *, calls: int) -> torch.Tensor:
    block.hook[0].keywords["calls"] = calls + 1
    return output * (1 + 0.01 * calls)


class Keywords(Base):
    """A hook of all blocks that counts in a keyword of its own partial. Each forward begins with a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hook = (partial(scaled_by_keyword, calls=0),)
        for block in self.blocks:
            block.hook = self.hook
            block.register_forward_hook(self.hook[0])

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.hook[0].keywords["calls"] = 10 * x.shape[1]
        return ()

    def left(self) -> list[Any]:
        return [self.hook[0].keywords]


class TallyHook(Tally):
    """Is a hook itself, of either kind."""

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor | None = None) -> Any:
        return self.ahead(module, args) if output is None else self.behind(module, args, output)


class PutOnByTheForward(Base):
    """The forward puts a hook that counts on each block, beside one that counts, and takes it off."""

    def __init__(self) -> None:
        super().__init__()
        self.tallies, self.others = [[TallyHook() for _ in self.blocks] for _ in range(2)]
        for block, tally in zip(self.blocks, self.tallies, strict=True):
            block.register_forward_pre_hook(tally)
            block.register_forward_hook(tally)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handles = [block.register_forward_hook(other) for block, other in zip(self.blocks, self.others, strict=True)]
        x = super().forward(x)
        for handle in handles:
            handle.remove()
        return x

    def left(self) -> list[Any]:
        return [tally.calls for tally in (*self.tallies, *self.others)]


def scaled_once(block: nn.Module, tally: Tally) -> None:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return tally.scaled(output)

    handle = block.register_forward_hook(hook)


class TakenOffByItself(PutOnByTheForward):
    """The forward puts a hook that counts on each block. The hook takes itself off when it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, other in zip(self.blocks, self.others, strict=True):
            scaled_once(block, other)
        return Base.forward(self, x)


class ReplacedByTheForward(CountedTwice):
    """Each forward begins by taking hooks off. One micro-batch's puts them on again at its end, the others' at once."""

    def __init__(self) -> None:
        super().__init__()
        self.handles = {block: block.register_forward_hook(tally.behind) for block, tally in self._pairs()}

    def _pairs(self) -> list[tuple[Any, Any]]:
        return list(zip(self.blocks, self.tallies, strict=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, tally in self._pairs():
            self.handles.pop(block).remove()
            if x.shape[1] != 4:
                self.handles[block] = block.register_forward_hook(tally.behind)
        x = super().forward(x)
        for block, tally in self._pairs() if not self.handles else ():
            self.handles[block] = block.register_forward_hook(tally.behind)
        return x


# ---- the tests


def outcome(case: type[Base], folder: Path, between: Any, *, vertical: bool, **section: Any) -> dict[str, Any]:
    USERS.MASK = PACKAGE.inner.SETTING = OF_THREAD.mask = 1.0
    config = config_in(folder, section={"self_check": False} | section)
    found: dict[str, Any] = {"losses": [], "norms": [], "evaluations": []}
    with running(config, case, vertical=vertical) as (engine, model):
        loss_fn = model.loss[0] if isinstance(model, WithLoss) else None
        for index, step in enumerate(batches(4)):
            found["losses"].append(engine.train_batch(iter(step), loss_fn).item())
            found["norms"].append(float(engine.get_global_grad_norm()))
            if index % 2 == 0:
                found["evaluations"].append(engine.eval_batch(iter(batches(1, seed=9 + index)[0]), loss_fn).item())
            between(engine, model, index)
        found["norms of gradients"] = [sorted(block.norms) for block in model.blocks if hasattr(block, "norms")]
        found["left"] = model.left() if hasattr(model, "left") else []
        found["weights"] = read_weights(model) | {name: buffer.clone() for name, buffer in model.named_buffers()}
    return found


class Late(Base):
    """Does something else from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.calls += 1
        return ()

    def is_late(self) -> bool:
        return self.calls > 2 * M


class LateHookOfATensor(Late):
    """Puts a hook on a tensor that all blocks' code uses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.embed(x) * 1.5
        self.begin(x)
        if self.is_late() and early.requires_grad:
            early.register_hook(lambda grad: grad * 2)
        for block in self.blocks:
            x = block(x + early)
        return self.head(x).square().mean()


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


class LateMode(Late):
    """Goes through its blocks inside a mode of torch's functions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with Doubled() if self.is_late() else contextlib.nullcontext():
            return super().forward(x)


@pytest.fixture(autouse=True)
def users_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if it had been imported from a file beside the script."""
    USERS.__file__ = str(Path(__file__).with_name("users_module.py"))
    PACKAGE.__file__ = str(Path(__file__).with_name("users_package") / "__init__.py")
    for module in (USERS, PACKAGE, PACKAGE.inner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield


def nothing(*_: Any) -> None:
    pass


CASES: dict[type[Base], Any] = {
    **dict.fromkeys((LateDict, LateGenerator, LateTensor, LateAux), start),
    **dict.fromkeys((Growing, Configured, ClearedFirst, ClearedInEvaluation, InPlace, Added, Usage), nothing),
    **dict.fromkeys((Hiding, Elsewhere, KeptOutputs, Appended, Deep, Named, Gradients, Collecting), nothing),
    **dict.fromkeys((ClearedAtTheEnd, Moded), start),
    Replaced: replace_notes,
    Slotted: nothing,
    Free: replace_free,
    WithLoss: a_loss_from_the_third_step,
    **dict.fromkeys((CountedTwice, CountedTwiceByModule, Hooked), nothing),
    **dict.fromkeys((PutOnByTheForward, TakenOffByItself, ReplacedByTheForward), nothing),
    **dict.fromkeys((Keywords, Subclassed, SetInAPackage, Reshaped), nothing),
    **dict.fromkeys((ReadFurtherOn, ReadByHooks, GivenAway, LateHookOfATensor, LateMode), nothing),
    Lent: start,
}
SLOW = {
    LateGenerator,
    LateAux,
    Usage,
    KeptOutputs,
    ClearedInEvaluation,
    Appended,
    Named,
    Growing,
    Replaced,
    Elsewhere,
    Configured,
    Gradients,
    CountedTwiceByModule,
    TakenOffByItself,
    ReplacedByTheForward,
    Moded,
    Deep,
    Free,
    Added,
    Slotted,
    Hooked,
    Keywords,
    Reshaped,
    Lent,
    ReadByHooks,
    ClearedAtTheEnd,
    LateHookOfATensor,
    LateMode,
}


def assert_same(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    for key in ("losses", "norms", "evaluations", "norms of gradients", "left"):
        assert stock[key] == ours[key], key
    assert not differing(stock["weights"], ours["weights"])


@pytest.mark.parametrize("case", [pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in CASES])
def test_it_has_stocks_bits(tmp_path: Path, case: type[Base]) -> None:
    arms = [outcome(case, tmp_path / str(vertical), CASES[case], vertical=vertical) for vertical in (False, True)]
    assert_same(*arms)


@pytest.mark.parametrize(
    "case",
    [
        CountUp,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (CountedInTheSuffix, Configured, InPlace, Usage)),
    ],
)
def test_horizontal_runs_as_stock_does(tmp_path: Path, case: type[Base]) -> None:
    """Also what no other order can follow, and evaluations between the steps."""
    stock = outcome(case, tmp_path / "stock", nothing, vertical=False)
    assert_same(stock, outcome(case, tmp_path / "ours", nothing, vertical=True, order="horizontal"))


@pytest.mark.slow
@pytest.mark.parametrize("self_check", [False, True])
def test_a_lone_micro_batch_runs_as_stock_does(tmp_path: Path, self_check: bool) -> None:
    """What the end of a forward changes is what the next one begins with, and no recompute of this one."""
    runs = []
    for vertical in (False, True):
        config = config_in(tmp_path / str(vertical), section={"self_check": self_check}) | {"gradient_accumulation_steps": 1}
        with running(config, CountedInTheSuffix, vertical=vertical) as (engine, model):
            losses = [engine.train_batch(iter(step[:1])).item() for step in batches(3)]
            runs.append((losses, read_weights(model)))
    assert runs[0][0] == runs[1][0] and not differing(runs[0][1], runs[1][1])


class Thawing(Base):
    """Its last block learns in no forward, though its parameters say so between them."""

    def begin(self, x: torch.Tensor) -> tuple[Any, ...]:
        self.blocks[2].up.weight.requires_grad_(False)
        return ()

    def end(self, x: torch.Tensor) -> torch.Tensor:
        self.blocks[2].up.weight.requires_grad_(True)
        return x.new_zeros(())


class LargeBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.large = torch.zeros((1 << 24) + 8) if index == 1 else torch.zeros(1)

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        self.large[:1].add_(1.0)
        return self.body(x)


class Large(Base):
    block = LargeBlock


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (Thawing, r"the forward has set requires_grad of blocks\.2\.up\.weight to False"),
        (Large, r"blocks\.1\.large is written during the forward, or given other memory, and has 16777224 elements"),
    ],
)
@pytest.mark.parametrize("self_check", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_cannot_be_followed_is_refused_by_name(tmp_path: Path, case: type[Base], named: str, self_check: bool) -> None:
    with running(config_in(tmp_path, section={"self_check": self_check}), case, vertical=True) as (engine, _):
        with pytest.raises(LayerError, match=named):
            engine.train_batch(iter(batches(1)[0]))
        assert engine.global_steps == 0 and interrupts.num_open() == 0


class LargeLentBlock(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.large, self.other, self.start = torch.zeros((1 << 16) + 8), torch.zeros((1 << 16) + 8), False

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        if self.start:
            self.large.data = self.other
        return self.body(x + self.large[0])


class LargeLent(Base):
    block = LargeLentBlock


def test_a_large_tensor_that_is_given_other_memory_late_is_refused_by_name(tmp_path: Path) -> None:
    with running(config_in(tmp_path, section={"self_check": False}), LargeLent, vertical=True) as (engine, model):
        engine.train_batch(iter(batches(1)[0]))
        for block in model.blocks:
            block.start = True
        with pytest.raises(
            LayerError, match=r"blocks\.\d\.large \(65544 elements\) is .*given other memory, for the first time"
        ):
            engine.train_batch(iter(batches(1)[0]))
        assert engine.global_steps == 1 and interrupts.num_open() == 0


def test_state_that_the_next_micro_batch_finds_is_refused_under_snake(tmp_path: Path) -> None:
    with running(config_in(tmp_path, section={"snake": True}), Replaced, vertical=True) as (engine, _):
        with pytest.raises(LayerError, match=r'blocks\.0\.note.*: write "snake": false'):
            engine.train_batch(iter(batches(1)[0]))


class RandomBlock(Block):
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.body(x * (random.random() + torch.rand(()) + float(np.random.rand())))


class Random(Base):
    block = RandomBlock


def test_micro_batches_of_an_evaluation_have_numbers_of_their_own(tmp_path: Path) -> None:
    """And the caller draws afterwards what it would have drawn without it."""
    same = [batches(1)[0][0]] * M
    with running(config_in(tmp_path), Random, vertical=True) as (engine, _):
        before = torch.get_rng_state(), random.getstate()
        losses: list[float] = []
        for _ in range(2):
            engine.eval_batch(iter(same), lambda loss, _: losses.append(loss.item()) or loss)
        assert len(set(losses)) == len(losses) >= 2 * M
        assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


# ---- what users do between steps to a model that has kept no state


def held_in_a_cell() -> tuple[Callable[..., Any], Callable[[Any], None]]:
    """A function that gives what its default, or else its cell, holds: a class so far."""
    held: Any = int

    def get(default: Any = None) -> Any:
        return held if default is None else default

    def hold(value: Any) -> None:
        nonlocal held
        held = value

    return get, hold


class QuietBlock(Block):
    """Reads what is there, and writes into a list of notes where there is one."""

    scale: dict[Any, Any] = {"of": 1.0}

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.settings: dict[Any, Any] = {"inner": SimpleNamespace(calls=None)}
        self.noted, self.hold = held_in_a_cell()
        self.register_forward_hook(as_it_is)

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        for notes in (self.settings, COUNTS.get({}), self.scale, self.noted()):
            each = notes.get(self.index) if isinstance(notes, dict) else None
            if each is not None:
                each.append(0.1 * (len(each) + 1) * x.shape[1])
                x = x * (1 + each[-1])
        inner = self.settings["inner"]
        if inner.calls is not None:
            inner.calls += 1
            x = x * inner.calls
        return self.body(x * self.scale["of"])


class Quiet(Base):
    block = QuietBlock


def as_it_is(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output


def give_notes(model: Model) -> None:
    for block in model.blocks:
        block.settings[block.index] = []


def give_counter(model: Model) -> None:
    for block in model.blocks:
        block.settings["inner"] = SimpleNamespace(calls=0)


def fill_cells(model: Model) -> None:
    for block in model.blocks:
        block.hold({block.index: []})


def set_defaults(model: Model) -> None:
    for block in model.blocks:
        block.noted.__defaults__ = ({block.index: []},)


def swap_hooks(model: Model) -> None:
    for block in model.blocks:
        calls: list[int] = []
        block._forward_hooks.popitem()

        def count(module: nn.Module, args: Any, output: torch.Tensor, calls: list[int] = calls) -> torch.Tensor:
            calls.append(1)
            return output * (1 + 0.1 * len(calls))

        block.register_forward_hook(count)


def set_of_class(model: Model) -> None:
    QuietBlock.scale = {"of": 1.5} | {block.index: [] for block in model.blocks}


def set_context(model: Model) -> None:
    COUNTS.set({block.index: [] for block in model.blocks})


@pytest.mark.parametrize("change", [give_notes, give_counter, fill_cells, set_defaults, swap_hooks, set_of_class, set_context])
def test_what_is_changed_after_four_steps_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Model], None]
) -> None:
    """Each step has to look for state anew: what held a class, or nothing, in the steps before may hold a list in this one."""
    arms = []
    for vertical in (False, True):
        monkeypatch.setattr(QuietBlock, "scale", {"of": 1.0})
        config = config_in(tmp_path / str(vertical), section={"self_check": False})
        arms.append(contextvars.copy_context().run(trained_and_changed, config, change, vertical))
    assert arms[0][0] == arms[1][0] and not differing(arms[0][1], arms[1][1])


def trained_and_changed(config: dict[str, Any], change: Callable[[Model], None], vertical: bool) -> tuple[list[float], Any]:
    """Losses and norms of six steps, and the weights. Ahead of the fifth something is changed."""
    losses: list[float] = []
    with running(config, Quiet, vertical=vertical) as (engine, model):
        for index, step in enumerate(batches(6)):
            if index == 4:
                change(model)
            losses += [engine.train_batch(iter(step)).item(), float(engine.get_global_grad_norm())]
        return losses, read_weights(model)
