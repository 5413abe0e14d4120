"""The autograd graph of one micro-batch outside its blocks, run backward one segment at a time.

[Note: segments] Segment 0 is the prefix, segment b the glue between the blocks b-1 and b, the last one the suffix. A node of
the graph belongs to the segment in which the forward made it; autograd's sequence numbers tell which that is. Later segments
and blocks may use a tensor, too (every decoder block the encoder's states, one block each the per-layer embeddings). The
gradients that they give wait until the backward reaches the tensor's own segment. So each node runs once and frees its memory
then. The gradients of a tensor are added one by one in the order in which stock's whole graph adds them, which gives the same
bits.

[Note: edges in a row] An edge into an earlier segment may lead to another such edge, or to a parameter that the running segment
uses as well (an early tensor in all glue, and residuals around the blocks). Autograd then stops at neither: it takes the
gradient at the first one, and runs on to the second one. So a hook on the first one's node lets nothing through. What lies
between the two runs with undefined gradients, which autograd's own nodes pass on without computing; nodes written in Python
get zeros. It keeps its memory for its own segment.

[Note: segments of several calls] Where a micro-batch calls the model several times, each call has segments of its own: its
prefix, its glue, and a suffix that goes on to the next call. In the backward the suffixes of all calls come first, the last one
first, and then each layer in all calls. So a call must not depend on what an earlier call has given: that one's suffix would
have to run behind this one's prefix. Such a gradient is refused where it arrives. What both calls take from ahead of the first
one is in segment 0, which runs last in any case.

[Note: hooks of tensors] A hook that the model's code puts on a tensor (`Tensor.register_hook`) gets the sum of all gradients of
that tensor in stock, once. Here autograd calls it for each gradient that stops at the tensor, to wait for the tensor's segment,
and once more in that segment. So a hook that is put on in a forward does nothing for a gradient that stops (`watching_hooks`).
The gradient of a parameter outside the layers comes from several segments, too: where it has hooks, these wait for the last
one (`ParameterHooks`).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ds_vertical.errors import LayerError
from ds_vertical.interrupts import Changed
from ds_vertical.model.state.containers import is_internal

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_Key = tuple[Node, int]
Taken = tuple[torch.Tensor, Callable[[torch.Tensor], None]]  # a gradient, and the function that puts it back
_Place = tuple[int, int]  # tells a node, and one of its outputs, from others
_OF_A_LEAF: Final = -1

_stops: set[_Place] = set()  # where gradients stop in the backward under way
_hooked: set[_Place] = set()  # the tensors on which code has put a hook in this pass


@dataclass(frozen=True)
class _Waiting:
    edge: GradientEdge
    grad: torch.Tensor

    @property
    def key(self) -> _Key:
        return self.edge.node, self.edge.output_nr


class Segments:
    """Where the segments of one micro-batch begin, and the gradients that wait for theirs.

    `num_blocks`: of the model; `num_calls`: of the model by the micro-batch's code. `through`: called ahead of a backward that
    runs past its segment, down to the prefix. `explain`: called with the leaves of a backward that failed and with its error;
    it may raise another one. `outside`: ids of the parameters of which no gradient is taken before the prefix has run backward.
    """

    def __init__(
        self,
        num_blocks: int,
        num_calls: int = 1,
        through: Callable[[], None] | None = None,
        explain: Callable[[Iterable[object], RuntimeError], None] = lambda *_: None,
        outside: Collection[int] = (),
    ) -> None:
        self._per_call = num_blocks + 1
        self._num_calls = num_calls
        self._through = through or (lambda: None)
        self._explain = explain
        self.hooks = ParameterHooks(outside)
        self._floor = 0  # segments below it, but for segment 0, must get no gradient now
        self._starts = [0]
        self._output_of: dict[Node, int] = {}
        self._waiting: dict[_Key, _Waiting] = {}
        # Only the nodes behind a node written in Python own it; a reference from Python does not. So the nearest node behind it
        # that Python can own is kept until the prefix's backward is over, and no more of the graph than that.
        self._owners: list[Node | GradientEdge] = []

    @contextlib.contextmanager
    def apart(self, call: int) -> Iterator[None]:
        """Within the block the layers of a call run backward. Raises LayerError where a gradient arrives at what an earlier
        call has given: see [Note: segments of several calls]."""
        self._floor = call * self._per_call
        try:
            yield
        finally:
            self._floor = 0

    def begin(self, leaves: Iterable[object]) -> None:
        """Begin the next segment: a block has run, `leaves` stand for its outputs, and nodes made from here on belong to it. Or
        a further call of the model begins, with its prefix and no `leaves`."""
        self._starts.append(torch.autograd._get_sequence_nr())  # pyright: ignore[reportPrivateImportUsage]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                self._output_of[take_as_it_comes(leaf)] = len(self._starts) - 1

    def take(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Remove the gradient that waits at `tensor`, and return it; None where none waits."""
        edge = get_gradient_edge(tensor)
        waiting = self._waiting.pop((edge.node, edge.output_nr), None)
        return None if waiting is None else waiting.grad

    def wait(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """Let a gradient of `tensor` wait for the tensor's segment, added to one that waits already. Raises LayerError as
        `apart` says."""
        if self._floor:
            self._refuse_chain(get_gradient_edge(tensor).node)
        self._wait(_Waiting(get_gradient_edge(tensor), grad))

    def take_waiting(self, wanted: Callable[[torch.Tensor], bool]) -> list[Taken]:
        """Take the wanted ones of the gradients that wait, each with the function that puts it back; its place in the order
        stays."""
        taken: list[Taken] = []
        for key, waiting in self._waiting.items():
            if wanted(waiting.grad):
                taken.append((waiting.grad, partial(self._put_back, key, waiting.edge)))
        for _, put_back in taken:
            put_back(torch.empty(0))
        return taken

    def _put_back(self, key: _Key, edge: GradientEdge, grad: torch.Tensor) -> None:
        self._waiting[key] = _Waiting(edge, grad)

    def run_suffix(self, loss: torch.Tensor) -> None:
        """Run the last segment backward, from the loss, and the suffixes of all calls of the model."""
        self.wait(loss, torch.ones_like(loss))
        for call in reversed(range(self._num_calls)):
            self.run(self._per_call - 1, call)

    def run(self, segment: int, call: int = 0) -> None:
        """Run a segment of one call of the model backward from the gradients that wait in it.

        Gradients of parameters, and of the leaves of block outputs with which the segment starts, go to their `.grad`. Those of
        tensors made in earlier segments wait.
        """
        segment += call * self._per_call
        roots = [waiting for waiting in self._waiting.values() if self._segment_of(waiting.edge.node) == segment]
        for root in roots:
            del self._waiting[root.key]
        earlier, leaves = self._reach(roots, segment)
        for node, _ in earlier if self._floor else ():
            self._refuse_chain(node)
        try:
            with self.hooks.waiting([leaf.variable for leaf in leaves if leaf not in self._output_of]):  # type: ignore[attr-defined]
                if not earlier:
                    _run_to_leaves(roots)
                elif _nested(list(earlier), leaves):
                    self._through()
                    with _nothing_behind(earlier):
                        self._run_in_part(roots, list(earlier), leaves, past_edges=True)
                else:
                    self._run_in_part(roots, list(earlier), leaves)
        except RuntimeError as error:
            self._explain((leaf.variable for leaf in leaves), error)  # type: ignore[attr-defined]
            raise
        self._owners += (owner for (node, _), owner in earlier.items() if isinstance(node, FunctionCtx))
        if self._num_calls == 1:  # of several calls all are kept: a gradient for an earlier call's output is to be recognised
            self._output_of = {node: own for node, own in self._output_of.items() if own < segment}

    def clear(self) -> None:
        """Forget all gradients and nodes: after the prefix's backward, or after an error."""
        self._waiting.clear()
        self.hooks.forget()
        self._output_of.clear()
        self._owners.clear()

    def _wait(self, waiting: _Waiting) -> None:
        known = self._waiting.get(waiting.key)
        if known is not None:
            waiting = _Waiting(known.edge, known.grad + waiting.grad)
        self._waiting[waiting.key] = waiting

    def _refuse_chain(self, node: Node) -> None:
        if 0 < self._segment_of(node) < self._floor:
            raise LayerError(CHAINED)

    def _segment_of(self, node: Node) -> int:
        if _is_leaf(node):
            return self._output_of.get(node, 0)
        return bisect_right(self._starts, node._sequence_nr()) - 1  # type: ignore[attr-defined]

    def _reach(self, roots: Sequence[_Waiting], segment: int) -> tuple[dict[_Key, Node | GradientEdge], list[Node]]:
        """From the roots, within the segment: edges into earlier segments, with what owns each, and leaves."""
        earlier: dict[_Key, Node | GradientEdge] = {}
        leaves: dict[Node, None] = {}
        stack: list[tuple[Node, Node | GradientEdge]] = list({root.edge.node: root.edge for root in roots}.items())
        seen = {node for node, _ in stack}
        while stack:
            node, owner = stack.pop()
            if not isinstance(node, FunctionCtx):
                owner = node
            if _is_leaf(node):
                leaves[node] = None
                continue
            for following, output_nr in node.next_functions:
                if following is None or following in seen:
                    continue
                is_parameter = _is_leaf(following) and following not in self._output_of
                if not is_parameter and self._segment_of(following) < segment:
                    earlier.setdefault((following, output_nr), owner)
                else:
                    seen.add(following)
                    stack.append((following, owner))
        return earlier, list(leaves)

    def _run_in_part(
        self, roots: Sequence[_Waiting], earlier: Sequence[_Key], leaves: Sequence[Node], past_edges: bool = False
    ) -> None:
        # What waits at an earlier edge starts the sum there: [Note: segments], one by one.
        seeds = [self._waiting.pop(key) for key in earlier if key in self._waiting]
        edges = [GradientEdge(*key) for key in earlier]
        with _stopping_at([*earlier, *_behind(earlier)] if past_edges and _hooked else earlier):
            grads = torch.autograd.grad(
                [each.edge for each in (*roots, *seeds)],
                [*edges, *(GradientEdge(leaf, 0) for leaf in leaves)],
                [each.grad for each in (*roots, *seeds)],
                allow_unused=True,
                retain_graph=past_edges,  # nodes behind the edges run once more, in their own segment
            )
        for edge, grad in zip(edges, grads[: len(edges)], strict=True):
            if grad is not None:
                self._wait(_Waiting(edge, grad))
        for leaf, grad in zip(leaves, grads[len(edges) :], strict=True):
            if grad is not None:
                variable: torch.Tensor = leaf.variable  # type: ignore[attr-defined]
                variable.grad = grad if variable.grad is None else variable.grad + grad


def take_as_it_comes(leaf: torch.Tensor) -> Node:
    """Let a leaf's gradient have the layout that it comes in, as it has in stock, whose graph goes on there; autograd would lay
    it out as the leaf is, and reductions round by the layout. Returns the node to which that is said: it has to be held until
    a graph has it.
    """
    node = _accumulator(leaf)
    reference = weakref.ref(leaf)  # weak: a further reference would keep its memory (`tensor_refs`)

    def take(grads: tuple[torch.Tensor | None, ...]) -> tuple[None] | None:
        (grad,), target = grads, reference()
        if grad is None or target is None:
            return None
        target.grad = grad if target.grad is None else target.grad + grad
        return (None,)

    node.register_prehook(take)  # type: ignore[attr-defined]
    return node


def _accumulator(leaf: torch.Tensor) -> Node:
    """As `get_gradient_edge` finds it, in less time."""
    view = leaf.view_as(leaf).grad_fn if torch.is_grad_enabled() else None
    node = None if view is None else view.next_functions[0][0]
    return get_gradient_edge(leaf).node if node is None else node


def _is_leaf(node: Node) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _run_to_leaves(roots: Sequence[_Waiting]) -> None:
    if roots:
        torch.autograd.backward([root.edge for root in roots], [root.grad for root in roots])


def _nested(edges: Sequence[_Key], leaves: Sequence[Node]) -> bool:
    """Whether one of the edges, or one of the leaves, can be reached through another edge's node."""
    if len(edges) < 2 and not leaves:
        return False
    wanted = {*edges, *((leaf, 0) for leaf in leaves)}
    nodes = {node for node, _ in edges}
    for start in nodes:
        seen, stack = {start}, [start]
        while stack:
            for following, output_nr in stack.pop().next_functions:
                if following is None:
                    continue
                if (following, output_nr) in wanted and following is not start:
                    return True
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
    return False


class ParameterHooks:
    """The hooks of the parameters `outside` the layers, by their ids: each is called once, with the whole gradient of one
    micro-batch. See [Note: hooks of tensors]."""

    def __init__(self, outside: Collection[int] = ()) -> None:
        self._outside = outside
        self._waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # parameters with hooks, and their gradients so far

    @contextlib.contextmanager
    def waiting(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Within the block no hook of such a parameter among the leaves is called; what is made of its gradient waits."""
        hooked = [each for each in leaves if each._backward_hooks and id(each) in self._outside]
        kept = [(hooks, dict(hooks)) for each in hooked if (hooks := each._backward_hooks) is not None]

        def take_off() -> None:
            for hooks, _ in kept:
                hooks.clear()

        def put_back() -> None:
            for hooks, before in kept:
                hooks.update(before)

        with Changed(put_back, take_off):
            yield
        for param in hooked:
            grad, param.grad = param.grad, None
            if grad is not None:
                before = self._waiting.get(id(param))
                self._waiting[id(param)] = param, grad if before is None else before[1] + grad

    def call(self) -> None:
        """The prefix has run backward: call the hooks."""
        for param, total in self._waiting.values():
            for hook in list((param._backward_hooks or {}).values()):
                made = hook(total)
                total = total if made is None else made
            param.grad = total
        self._waiting.clear()

    def forget(self) -> None:
        """Forget the gradients, after an error."""
        self._waiting.clear()


def watching_hooks() -> contextlib.AbstractContextManager[None]:
    """Within the block hooks that are put on tensors are called as in stock."""
    register = torch.Tensor.register_hook

    @functools.wraps(register)
    def register_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], object]) -> object:
        of_users = tensor.requires_grad and not is_internal(hook)
        return register(tensor, _once(tensor, hook) if of_users else hook)

    def put_back() -> None:
        torch.Tensor.register_hook = register  # type: ignore[method-assign]
        _hooked.clear()
        _stops.clear()  # an interrupt may have left some

    def take_over() -> None:
        torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]

    return Changed(put_back, take_over)


@contextlib.contextmanager
def _stopping_at(edges: Iterable[tuple[Node, int]]) -> Iterator[None]:
    """Within the block gradients stop at these edges."""
    stops = [_place_of(node, output_nr) for node, output_nr in edges if _hooked]
    with Changed(_stops.clear, partial(_stops.update, stops)):
        yield


def _once(tensor: torch.Tensor, hook: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
    edge = get_gradient_edge(tensor)
    place = _place_of(edge.node, edge.output_nr)
    _hooked.add(place)

    @functools.wraps(hook, updated=())
    def call(grad: torch.Tensor) -> object:
        return None if place in _stops else hook(grad)

    return call


def _place_of(node: Node, output_nr: int) -> _Place:
    """By its number: a reference to the node would keep it, and it holds its hooks."""
    if _is_leaf(node):
        return id(node.variable), _OF_A_LEAF  # type: ignore[attr-defined]
    return node._sequence_nr(), output_nr  # type: ignore[attr-defined]


def _behind(edges: Iterable[_Key]) -> list[_Key]:
    """The outputs of nodes that the edges lead to."""
    found, stack = set[_Key](), list(edges)
    while stack:
        for following, output_nr in stack.pop()[0].next_functions:
            if following is not None and (key := (following, output_nr)) not in found and not _is_leaf(following):
                found.add(key)
                stack.append(key)
    return list(found)


def _nothing_behind(edges: Iterable[_Key]) -> Changed:
    """Within the block the nodes that the edges lead to get no gradient."""
    handles: list[RemovableHandle] = []

    def put_on() -> None:
        for node in {node for node, _ in edges if not _is_leaf(node)}:
            handles.append(node.register_prehook(_undefined))  # type: ignore[arg-type]

    def take_off() -> None:
        for handle in handles:
            handle.remove()

    return Changed(take_off, put_on)


def _undefined(grads: tuple[torch.Tensor | None, ...]) -> tuple[None, ...]:
    return (None,) * len(grads)


CHAINED = (
    "a call of the model was given what depends, with its gradient, on an earlier call of it for the same micro-batch, or on"
    " code between the two; layer-major order runs both calls backward layer by layer together: detach what is handed on, or"
    " set vertical_schedule.enabled to false"
)
OWN_BACKWARD = (
    "loss_fn, or the model's forward, has called backward() itself: train_batch runs the backward of the loss that it is given,"
    " and both would be added; return the sum of all losses and call no backward"
)
