"""Measures what each way of keeping would save: the seconds and bytes of one call of each kind of block.

[Note: probe] In one step that keeps nothing, the first backward of each kind of block recomputes its forward some times more:
as it is; with what autograd saves in slots, whose bytes "everything" would keep; and with the operations left out that "free"
and "products" leave out, and parts of the products (`PARTS`). What a policy saves is the least time of a whole recompute less
the least time of its own. Nothing of this reaches the step, whose gradients come from a recompute of their own. A way that
cannot be measured is not on the menu. Of a model with many kinds a training step measures the commonest few; and where none of
a class has been measured, the first block of that class that runs backward, but no parts of its products.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from ds_vertical.errors import LayerError
from ds_vertical.model.block_call import BlockGraph, leaf_of, requires_grad
from ds_vertical.model.kept.block_backward import InputGradients
from ds_vertical.model.kept.kept_blocks import Again, Mode
from ds_vertical.model.kept.kinds import obstacle
from ds_vertical.model.kept.members import Members
from ds_vertical.model.kept.recording import CallPlan, Recording
from ds_vertical.model.kept.replay import OperationsDiffer, Replay, Results
from ds_vertical.model.kept.slots import VIEW_LEFT, Slots, unpack
from ds_vertical.model.layers import Block, BlockKind
from ds_vertical.model.thread_state import entered
from ds_vertical.types import ActivationPolicy, point_name

Backward = Callable[[BlockGraph], InputGradients]
_ROUNDS: Final = 3  # of each way, one after the other; the least counts
_MOST_KINDS: Final = 4  # that are measured for being common
PARTS: Final = (1, 2, 4)  # numbers of products that are measured besides all of them
_UNKNOWN: Final = (LayerError, RuntimeError, TypeError, ValueError, NotImplementedError, OperationsDiffer)  # of a way to keep


@dataclass(frozen=True)
class KeptPoint:
    """What a policy would keep of one call, in bytes, and the seconds of the call's recompute that it would save. `outputs`: of
    "products", see `types.point_name`."""

    policy: ActivationPolicy
    num_bytes: int
    saved_s: float
    outputs: int | None = None

    @property
    def name(self) -> str:
        """Of the point."""
        return point_name(self.policy, self.outputs)


@dataclass(frozen=True, eq=False)
class _Way:
    """A recompute that leaves operations out, by its `plan`, and takes `results`; see `KeptPoint`."""

    policy: ActivationPolicy
    plan: CallPlan
    results: Results
    outputs: int | None = None

    @property
    def name(self) -> str:
        """Of its point."""
        return point_name(self.policy, self.outputs)


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of one call of a kind of block: of a recompute and of the backward behind it. `input_bytes`: of what passes to
    the block. `points`: what it may keep. `reasons`: why it may not keep by the other policies."""

    forward_s: float
    backward_s: float
    input_bytes: int
    points: tuple[KeptPoint, ...]
    reasons: tuple[str, ...] = ()


@dataclass(eq=False)
class _Call:
    """One call of a block that is measured. `inputs`: what it was given, flattened."""

    block: Block
    inputs: Sequence[object]
    again: Again
    synchronize: Callable[[], None]

    @property
    def params(self) -> list[nn.Parameter]:
        """The block's, in order."""
        return list(self.block.module.parameters())

    @property
    def modules(self) -> list[nn.Module]:
        """The block's, itself the first."""
        return list(self.block.module.modules())

    def timed(self, within: Mode) -> float:
        """Seconds of a recompute within a context."""
        self.synchronize()
        start = perf_counter()
        with self.again(within):
            self.synchronize()
            return perf_counter() - start

    def slots(self) -> tuple[Slots, Mode]:
        """Slots for what autograd saves in a recompute, and the context that fills them."""
        slots = Slots(self.params, self.inputs)
        return slots, saved_tensors_hooks(slots.pack, unpack)

    def saved_bytes(self) -> int | None:
        """Of what "everything" would keep; None where it cannot keep all."""
        slots, hooks = self.slots()
        with self.again(hooks) as graph:
            _leaves = _ends(graph, keep_graph=True)
            return sum(kept.num_bytes for kept in slots.settle()) if slots.sees_all() else None

    def ways(self, numbers: Sequence[int]) -> tuple[list[_Way], str]:
        """How "free" and "products", and parts of the latter with so many each, leave out operations; and why there is no
        way."""
        recording = Recording([*self.inputs, *self.params, *self.block.module.buffers()])
        hooks = saved_tensors_hooks(recording.pack, unpack)
        with recording.watching(self.modules), self.again(entered(hooks, recording)) as graph:
            recording.finish(graph.outputs, ())
            leaves = _ends(graph, keep_graph=False)
            free, reason = recording.plan("free", leaves)
            products, _ = recording.plan("products", leaves)
            parts = [(count, recording.plan("products", leaves, count)[0]) for count in numbers]
            del leaves
        if free is None or products is None:
            return [], reason
        results = Results.of_recording(recording, products)
        results.settle()
        ways = [_Way("free", free, Results()), _Way("products", products, results)]
        for count, plan in parts:
            own = None if plan is None or count >= len(products.keeps) else results.part(products, plan)
            ways += [] if plan is None or own is None else [_Way("products", plan, own, count)]
        return ways, ""


def _ends(graph: BlockGraph, keep_graph: bool) -> list[object]:
    """Leaves in the place of the graph's outputs, as the next layer has them; of the graph the ends alone, or nothing."""
    leaves = [leaf_of(value) if isinstance(value, torch.Tensor) else value for value in graph.outputs]
    edges = [get_gradient_edge(value) if requires_grad(value) else None for value in graph.outputs]
    graph.outputs[:] = edges if keep_graph else []
    return leaves


def common_kinds(blocks: Sequence[Block]) -> frozenset[BlockKind]:
    """The commonest kinds of blocks, a few of them."""
    return frozenset(kind for kind, _ in Counter(block.kind for block in blocks).most_common(_MOST_KINDS))


@dataclass(eq=False)
class Probe:
    """Measures the first backward of kinds of block in one step, see [Note: probe]. `synchronize`: waits for the device.

    `common`: the kinds of which each is measured; None: all. `part_rounds`: how often parts of the products are timed; 0: they
    are no points. `found`: by kind.
    """

    synchronize: Callable[[], None] = lambda: None
    common: Collection[BlockKind] | None = None
    part_rounds: int = _ROUNDS
    found: dict[BlockKind, BlockTimes] = field(default_factory=dict)

    def wants(self, block: Block) -> bool:
        """Whether a backward of the block is to be measured."""
        if block.kind in self.found:
            return False
        return self._is_common(block) or all(cls is not type(block.module) for cls, _ in self.found)

    def _is_common(self, block: Block) -> bool:
        return self.common is None or block.kind in self.common

    def backward(self, block: Block, compiled: bool, inputs: Sequence[object], again: Again, run: Backward) -> InputGradients:
        """Measure a block's call, then recompute it and `run` it backward. `inputs`: what the call was given."""
        call = _Call(block, inputs, again, self.synchronize)
        reasons: list[str] = []
        whole_s, points = self._measure(call, compiled, reasons)
        with again(contextlib.nullcontext()) as graph:
            self.synchronize()
            start = perf_counter()
            gradients = run(graph)
            self.synchronize()
            backward_s = perf_counter() - start
        given = {id(value): value.nbytes for value in inputs if isinstance(value, torch.Tensor) and requires_grad(value)}
        passed = sum(given.values()) - sum(given.get(id(param), 0) for param in call.params)
        self.found[block.kind] = BlockTimes(whole_s, backward_s, passed, tuple(points), tuple(reasons))
        return gradients

    def _measure(self, call: _Call, compiled: bool, reasons: list[str]) -> tuple[float, list[KeptPoint]]:
        """Seconds of a whole recompute, and what each policy would save of it; `reasons` gets why one would not."""
        ways = {way.name: way for way in self._ways(call, compiled, reasons)}
        saved_bytes = self._saved_bytes(call, compiled, reasons)
        whole: list[float] = []
        hooked: list[float] = []
        replayed: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(_ROUNDS):
            with_parts = _ROUNDS - number <= self.part_rounds
            whole.append(call.timed(contextlib.nullcontext()))
            if saved_bytes is not None:
                hooked.append(call.timed(call.slots()[1]))
            for name, way in [(name, way) for name, way in ways.items() if with_parts or way.outputs is None]:
                try:
                    replayed[name].append(call.timed(Replay(way.plan, way.results, False, call.modules)))
                except _UNKNOWN as error:
                    reasons.append(f'"{name}": {str(error) or "it does not run the same operations each time"}')
                    del ways[name]
        least = min(whole)
        points = [
            KeptPoint(way.policy, way.results.num_bytes, max(0.0, least - min(replayed[name])), way.outputs)
            for name, way in ways.items()
        ]
        if saved_bytes is not None:
            # what packing takes in the forward, unpacking takes in the backward at most
            points.append(KeptPoint("everything", saved_bytes, max(0.0, least - 2 * max(0.0, min(hooked) - least))))
        return least, points

    def _ways(self, call: _Call, compiled: bool, reasons: list[str]) -> list[_Way]:
        """See `_Call.ways`."""
        why = obstacle(Members(call.block.module), "products", compiled)
        ways: list[_Way] = []
        if why is None:
            try:
                ways, why = call.ways(PARTS if self.part_rounds and self._is_common(call.block) else ())
            except _UNKNOWN as error:
                why = str(error)
        if why:
            reasons.append(f'"free", "products": {why}')
        return ways

    @staticmethod
    def _saved_bytes(call: _Call, compiled: bool, reasons: list[str]) -> int | None:
        """See `_Call.saved_bytes`."""
        why = obstacle(Members(call.block.module), "everything", compiled)
        if why is None:
            try:
                found = call.saved_bytes()
            except _UNKNOWN as error:
                found, why = None, str(error)
            else:
                why = None if found is not None else VIEW_LEFT
            if found is not None:
                return found
        reasons.append(f'"everything": {why}')
        return None
