"""One call of a block: what its backward needs of it, and the tensors that it takes and gives."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from typing import Final, TypeGuard

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ds_vertical.model.state.block_state import BlockState, replace_in_objects, tensors_in_objects
from ds_vertical.model.tensor_refs import key_of
from ds_vertical.model.thread_state import Modes, ThreadState

Position = tuple[int, ...]
ArgumentPlan = tuple[tuple[int, ...], tuple[tuple[str, int], ...]]  # see `CallForm`


@dataclass(frozen=True)
class BlockGraph:
    """A block's autograd graph from end to end: the twins of its inputs by the inputs' ids, and its outputs (flattened)."""

    twins: dict[int, torch.Tensor]
    outputs: list[object]


@dataclass
class BlockCall:
    """What the backward of one block call needs: its arguments, the thread's state and modes at its entry, leaves made of its
    outputs.

    `function`: what was called, the block's forward or its call with hooks. `args`: the first `num_given` are the arguments,
    flattened by `form`; the others are tensors that the block found in modules and objects (`found`). `versions`: how often
    each tensor among them had been written in place at the call. The rest is filled in once the block has run. `leaves`: those
    of the returned values, then those of what the block has written elsewhere, at the positions `written`. `graph` is None
    where the backward recomputes the block.
    """

    function: Callable[..., object]
    args: list[object]
    num_given: int
    form: CallForm
    found: BlockState | None
    state: ThreadState
    modes: Modes
    context: contextvars.Context
    versions: list[int]
    written: list[Position] = field(default_factory=list)
    leaves: list[object] = field(default_factory=list)
    graph: BlockGraph | None = None

    def drop_leaf_grads(self) -> list[torch.Tensor | None]:
        """The gradients of the outputs, in the order of `leaves`, None for one that got none. Forgets the leaves."""
        grads = [leaf.grad if isinstance(leaf, torch.Tensor) else None for leaf in self.leaves]
        self.leaves = []
        return grads


def tensors_among(values: Iterable[object]) -> list[torch.Tensor]:
    """The tensors among the values, each once."""
    return list({id(value): value for value in values if isinstance(value, torch.Tensor)}.values())


# ---- arguments


@dataclass(frozen=True)
class CallForm:
    """How the arguments of a call consist of values. `spec`: that, as torch has it.

    `plan`: the same for a call whose arguments are values and tuples of values: for each of them the number of values, or ONE
    for a value by itself; those by position, and those by name. None for other calls.
    """

    spec: pytree.TreeSpec
    plan: ArgumentPlan | None = None

    def arguments(self, values: Iterable[object]) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments of such a call, by position and by name, made of its values."""
        if self.plan is None:
            args, kwargs = pytree.tree_unflatten(values, self.spec)
            return args, kwargs
        by_position, by_name = self.plan
        rest = iter(values)
        taken = tuple([next(rest) if count == ONE else tuple(islice(rest, count)) for count in by_position])
        return taken, {name: next(rest) if count == ONE else tuple(islice(rest, count)) for name, count in by_name}


ONE: Final = -1
TAKEN_BY_TORCH: Final = -2  # see `_taken_apart`
_VALUES: Final = frozenset(
    (torch.Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device, list, dict)
)


def flattened(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[list[object], CallForm]:
    """The values of a call's arguments, and how the arguments consist of them. Lists and dicts are values: a block gets them as
    the very objects that the caller gave, and may write into them.

    Torch takes a call apart in the time of several kernels. So the commonest ones are known by their plans.
    """
    values: list[object] = []
    by_position = tuple([_taken_apart(value, values) for value in args])
    by_name = tuple([(name, _taken_apart(value, values)) for name, value in kwargs.items()])
    if TAKEN_BY_TORCH not in by_position and all(count != TAKEN_BY_TORCH for _, count in by_name):
        return values, _form((by_position, by_name))
    leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=partial(_is_given_as_it_is, kwargs))
    return leaves, CallForm(spec)


@lru_cache(maxsize=256)
def _form(plan: ArgumentPlan) -> CallForm:
    """The form of all calls with a plan. Torch's is found by a call with None in the place of each value."""
    by_position, by_name = plan
    args = tuple([_nones(count) for count in by_position])
    return CallForm(pytree.tree_structure((args, {name: _nones(count) for name, count in by_name})), plan)


def _nones(count: int) -> tuple[None, ...] | None:
    return None if count == ONE else (None,) * count


def _taken_apart(value: object, values: list[object]) -> int:
    """Append the values that an argument consists of. Returns their number, ONE, or TAKEN_BY_TORCH."""
    if type(value) in _VALUES:
        values.append(value)
        return ONE
    if type(value) is tuple and _VALUES.issuperset(map(type, value)):
        values += value
        return len(value)
    return TAKEN_BY_TORCH


def _is_given_as_it_is(kwargs: dict[str, object], value: object) -> bool:
    return isinstance(value, list | dict) and value is not kwargs


# ---- tensors


def with_state(flat: list[object], found: BlockState | None) -> list[object]:
    """A block's arguments and, behind them, the tensors that it finds elsewhere."""
    given = set(map(id, flat))
    return flat if found is None else [*flat, *(tensor for tensor in found.inputs() if id(tensor) not in given)]


def written_by(found: BlockState | None, outputs: Sequence[object], but: Collection[int] = ()) -> dict[Position, torch.Tensor]:
    """The tensors that require grad which a block has written, by position: into what it found, then into objects that it
    returned. Those with an id in `but` were there before the call, and are left out."""
    written = {(0, *place): tensor for place, tensor in found.written(but).items()} if found is not None else {}
    return written | {(1, *place): tensor for place, tensor in tensors_in_objects(outputs) if id(tensor) not in but}


def put_leaves(found: BlockState | None, outputs: Sequence[object], leaves: dict[int, torch.Tensor]) -> None:
    """Let leaves stand for the tensors that a block has written, by the tensors' ids: in what it found and what it returned."""
    if found is not None:
        found.replace(leaves)
    replace_in_objects(outputs, leaves)


def requires_grad(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor that requires grad."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def versions_of(values: Sequence[object]) -> list[int]:
    """How often each tensor has been written in place; inference tensors keep no count (nor does autograd save them)."""
    return [value._version for value in values if isinstance(value, torch.Tensor) and not value.is_inference()]


def changed(values: Sequence[object], versions: Sequence[int], kept: Collection[int]) -> bool:
    """Whether a tensor among the values has been written in place since its count stood in `versions`.

    Tensors over storages with a key in `kept` do not count: the elements that they held are kept elsewhere.
    """
    now = versions_of(values)
    if now == versions:
        return False
    counted = [value for value in values if isinstance(value, torch.Tensor) and not value.is_inference()]
    return any(a != b and key_of(t.untyped_storage()) not in kept for t, a, b in zip(counted, now, versions, strict=True))


def leaf_of(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf that stands for a tensor behind its block: the same storage, no graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def twins_of(values: Sequence[object], twins: dict[int, torch.Tensor]) -> list[object]:
    """The values with twins in the place of tensors: see `twin_of`."""
    return [twin_of(value, twins) for value in values]


def twin_of(value: object, twins: dict[int, torch.Tensor]) -> object:
    """A detached copy (same storage) of a tensor at a block's boundary, the same copy for the same tensor.

    `twins`: the copies so far, by the tensors' ids; one that requires grad is added. Parameters and other values are
    themselves.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return value
    if not value.requires_grad:
        return value.detach()
    if id(value) not in twins:
        twins[id(value)] = value.detach().requires_grad_()
    return twins[id(value)]
