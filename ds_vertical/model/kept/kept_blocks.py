"""What the block calls of one micro-batch have kept, and the backward that takes it instead of computing it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from ds_vertical.model.block_call import BlockCall, BlockGraph, requires_grad
from ds_vertical.model.kept.block_backward import InputGradients, Leaves, all_finite, run_backward, same_gradients
from ds_vertical.model.kept.kinds import MOST_VIEWS_LEFT, OTHER_OPERATIONS, KeptKinds, Kind
from ds_vertical.model.kept.recording import Recording
from ds_vertical.model.kept.replay import Grab, OperationsDiffer, Replay, Results
from ds_vertical.model.kept.slots import VIEW_LEFT, KeptStorage, Slots, unpack
from ds_vertical.model.layers import Block
from ds_vertical.model.state.restart import StateMissed
from ds_vertical.model.thread_state import entered

Mode = contextlib.AbstractContextManager[object]
Again = Callable[[Mode], contextlib.AbstractContextManager[BlockGraph]]  # runs a block's forward again, within a context


@dataclass(eq=False)
class KeptCall:
    """What one block call keeps. `values`: the storages that may leave the device; `num_bytes`: of all that it made and keeps.

    `twins`, `keys` and `outputs`: those of the block's graph, where the graph is kept; the twins stand in no other list, so
    that their holders can be counted. `slots`: of what that graph saved. `results`: of operations, where these are kept.
    `shown`: a copy of the outputs of the call that was recorded.
    """

    kind: Kind
    values: list[KeptStorage] = field(default_factory=list)
    twins: list[object] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    outputs: list[object] = field(default_factory=list)
    slots: Slots | None = None
    results: Results = field(default_factory=Results)
    shown: list[torch.Tensor | None] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values, wherever they are."""
        return sum(value.num_bytes for value in self.values)

    def take_graph(self) -> BlockGraph:
        """The block's graph, which is no longer kept."""
        twins = {key: twin for key, twin in zip(self.keys, self.twins, strict=True) if isinstance(twin, torch.Tensor)}
        graph = BlockGraph(twins, self.outputs)
        self.twins, self.outputs = [], []
        return graph


class KeptBlocks:
    """Keeps what the policy of each block call says. One for each micro-batch; `kinds` is the model's.

    `calls`: what is kept by the block's number, from the block's forward to its backward. `compiled`: which blocks are.
    """

    def __init__(self, kinds: KeptKinds, blocks: Sequence[Block], compiled: Sequence[bool]) -> None:
        self.calls: dict[int, KeptCall] = {}
        self._kinds = kinds
        self._blocks = blocks
        self._compiled = compiled

    # ---- forward

    @contextlib.contextmanager
    def keeping(self, block: int, call: BlockCall) -> Iterator[Keeping | None]:
        """Within the block its forward runs; afterwards `Keeping.finish` and `settle` are due."""
        members = self._kinds.members(block, self._blocks[block])
        kind = self._kinds.of(block, self._blocks[block], call, self._compiled[block])
        match kind.policy:
            case "none":
                yield None
            case "everything":
                slots = Slots(members.params, call.args, members.places)
                with entered(saved_tensors_hooks(slots.pack, unpack)):
                    yield Keeping(KeptCall(kind, slots=slots))
            case "free" | "products":
                if kind.plan is None:
                    recording = Recording([*call.args, *members.params, *self._blocks[block].module.buffers()])
                    with recording.watching(members.modules), entered(saved_tensors_hooks(recording.pack, unpack), recording):
                        yield Keeping(KeptCall(kind), recording)
                elif kind.policy == "products":
                    grab = Grab(kind.plan)
                    with entered(grab):
                        yield Keeping(KeptCall(kind, results=grab.results), grab=grab)
                else:
                    yield Keeping(KeptCall(kind))

    def settle(self, block: int, keeping: Keeping, leaves: Sequence[object]) -> None:
        """The block's call is recorded and its outputs are dropped, but for `leaves` in their places: keep what there is."""
        kept, recording = keeping.call, keeping.recording
        if keeping.grab is not None and (keeping.grab.differs or not keeping.grab.is_over):
            self._kinds.separate(block, kept.kind, self._blocks[block])
            return
        if kept.slots is not None and not kept.slots.sees_all():
            kept.kind.num_views_left += 1
            if kept.kind.num_views_left >= MOST_VIEWS_LEFT:
                self._kinds.give_up(kept.kind, self._blocks[block], VIEW_LEFT)
            return
        kept.kind.num_views_left = 0
        if recording is not None:
            plan, reason = recording.plan(kept.kind.policy, leaves, self._kinds.outputs)
            if plan is None:
                self._kinds.give_up(kept.kind, self._blocks[block], reason, of_recomputes=True)
                return
            kept.kind.plan, kept.shown = plan, list(recording.outputs)
            kept.results = Results.of_recording(recording, plan)
        kept.values = kept.results.settle() if kept.slots is None else kept.slots.settle()
        self.calls[block] = kept

    # ---- backward

    def backward(
        self,
        block: int,
        grads: Sequence[torch.Tensor | None],
        waiting: Mapping[int, torch.Tensor],
        again: Again,
    ) -> InputGradients:
        """Run a block backward, with what its call has kept where there is something. `again`: its forward, run once more."""
        kept = self.calls.pop(block, None)
        if kept is None or kept.kind.policy == "none" or not self._is_current(block, kept):
            with again(contextlib.nullcontext()) as graph:
                return run_backward(graph, grads, waiting)
        if not kept.kind.is_tried or kept.shown:
            return self._try(block, kept, grads, waiting, again)
        try:
            with self._graph(block, kept, again, poison=False) as graph:
                return run_backward(graph, grads, waiting)
        except OperationsDiffer:
            self._kinds.separate(block, kept.kind, self._blocks[block])
        with again(contextlib.nullcontext()) as graph:
            return run_backward(graph, grads, waiting)

    def _is_current(self, block: int, kept: KeptCall) -> bool:
        """Whether nothing that was saved has been written in place since; where it has, the block computes it again."""
        if kept.slots is None or kept.slots.are_current():
            return True
        self._kinds.give_up(
            kept.kind, self._blocks[block], "what autograd saves in its forward is written in place before its backward"
        )
        return False

    @contextlib.contextmanager
    def _graph(self, block: int, kept: KeptCall, again: Again, poison: bool) -> Iterator[BlockGraph]:
        """The block's graph with all values that a backward reads, made of what was kept. Raises OperationsDiffer."""
        if kept.slots is not None:
            yield kept.take_graph()
            return
        assert kept.kind.plan is not None
        replay = Replay(kept.kind.plan, kept.results, poison, self._kinds.members(block, self._blocks[block]).modules)
        with again(replay) as graph:
            if replay.differs or not replay.is_over:
                raise OperationsDiffer
            yield graph

    def _try(
        self,
        block: int,
        kept: KeptCall,
        grads: Sequence[torch.Tensor | None],
        waiting: Mapping[int, torch.Tensor],
        again: Again,
    ) -> InputGradients:
        """Run backward both ways, and compare. See [Note: trial] in `kinds`. Returns what the plain way gives."""
        mine: list[torch.Tensor | None] = []
        found: InputGradients = {}
        order: list[int] = []
        differs = None
        try:
            with self._graph(block, kept, again, poison=True) as graph:
                leaves = Leaves.of(graph)
                order = [id(leaf) for leaf in leaves.tensors]
                with leaves.apart(mine):
                    found = run_backward(graph, grads, waiting)
        except OperationsDiffer:
            differs = OTHER_OPERATIONS
        with again(contextlib.nullcontext()) as graph:
            self._check_forward(block, kept, graph)
            leaves = Leaves.of(graph)
            theirs: list[torch.Tensor | None] = []
            with leaves.apart(theirs):
                plain = run_backward(graph, grads, waiting)
            leaves.add(theirs)
        own = dict(zip(order, mine, strict=True))
        other = {id(leaf): grad for leaf, grad in zip(leaves.tensors, theirs, strict=True)}
        keys = list(plain)
        alike = own.keys() == other.keys() and same_gradients([own[key] for key in other], list(other.values()))
        if differs is None and not (alike and same_gradients([found.get(key) for key in keys], list(plain.values()))):
            differs = "the gradients of its first backward differ from those of a whole recompute"
        if differs is not None:
            self._kinds.give_up(kept.kind, self._blocks[block], differs, of_recomputes=differs is OTHER_OPERATIONS)
        kept.kind.is_tried |= all_finite([*theirs, *plain.values()])  # NaN would hide NaN
        return plain

    def _check_forward(self, block: int, kept: KeptCall, graph: BlockGraph) -> None:
        """Raises StateMissed where the forward that was recorded has given other outputs than the one of `graph`: compiled
        functions run otherwise while torch shows its operations. The step then starts over, and records nothing there."""
        now = [value.detach() for value in graph.outputs if isinstance(value, torch.Tensor)]
        if kept.shown and not same_gradients(now, kept.shown):
            told = "its forward computes other bits while its operations are recorded"
            self._kinds.give_up(kept.kind, self._blocks[block], told, of_recomputes=True)
            raise StateMissed("")


@dataclass(eq=False)
class Keeping:
    """A block's forward that is under way, and what it is to keep. `recording`: of the kind's first call."""

    call: KeptCall
    recording: Recording | None = None
    grab: Grab | None = None

    def finish(self, twins: Mapping[int, torch.Tensor], outputs: Sequence[object], leaves: Sequence[object]) -> None:
        """The block has run: keep the ends of its graph, not its outputs, whose memory is the next layer's. `leaves`: of the
        outputs."""
        if self.recording is not None:
            self.recording.finish(outputs, leaves)
        if self.call.slots is not None:
            self.call.keys, self.call.twins = list(twins), list(twins.values())
            self.call.outputs = [get_gradient_edge(value) if requires_grad(value) else None for value in outputs]
