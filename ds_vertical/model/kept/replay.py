"""A block's forward that computes only what its plan says, and the results of operations that it takes instead.

[Note: other calls] A plan is made of one call. Another call may run the same operations with other arguments, where values or
a module's attributes decide which of two tensors goes on, or which one autograd saves. So a recompute checks what it does: no
operation that runs may read memory in the place of a result that was left out, autograd may save none, and in-place operations
must write what they wrote as they were recorded: kept results hold what those have left in them. One that runs may write what
autograd has saved, which no trial with other values shows: slots hold the counts of writes (`slots`).

[Note: start] To follow an operation takes some microseconds of Python, as long as a small kernel. Ahead of the first operation
that is left out there is nothing to do: what runs there is computed, whichever operations these are, and autograd saves it by
itself, with counts of writes of its own. So the plan is followed only from the last call of a module inside the block on that
comes before (`recording.Start`): in a transformer's block under "free" that is its last product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from types import TracebackType

import torch
from torch import nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ds_vertical.interrupts import Changed
from ds_vertical.model.kept.recording import (
    UNSEEN,
    CallPlan,
    Keywords,
    NewStorage,
    Operation,
    Recording,
    StandIn,
    Start,
    argument_forms,
    written_args,
)
from ds_vertical.model.kept.slots import AliasSlot, KeptStorage, is_plain, unpack
from ds_vertical.model.tensor_refs import is_over, key_of
from ds_vertical.model.thread_state import Modes


class OperationsDiffer(Exception):  # noqa: N818 - a request to compute the block as a whole, as StopIteration is one to stop
    """A call runs other operations than those that were recorded."""


class Results:
    """The kept results of one call: by operation, one storage for each of its plan's."""

    def __init__(self) -> None:
        self.kept: dict[int, list[KeptStorage]] = {}

    def hold(self, plan: CallPlan, index: int, results: Sequence[object]) -> None:
        """Keep what an operation has given."""
        news = list(plan.operations[index].fresh.values())
        storages: list[KeptStorage] = []
        for number in plan.keeps[index]:
            result = results[news[number].results[0][0]]
            assert isinstance(result, torch.Tensor)
            storages.append(KeptStorage(result.untyped_storage()))
        self.kept[index] = storages

    @classmethod
    def of_recording(cls, recording: Recording, plan: CallPlan) -> Results:
        """Those of the call that was recorded."""
        results = cls()
        for index, numbers in plan.keeps.items():
            keys = list(plan.operations[index].fresh)
            results.kept[index] = [KeptStorage(recording.storages[keys[number]]) for number in numbers]
        recording.storages.clear()
        return results

    def part(self, whole: CallPlan, plan: CallPlan) -> Results | None:
        """Of these results, which are `whole`'s, those that `plan` keeps; None where it keeps others."""
        found = Results()
        for index, numbers in plan.keeps.items():
            own = dict(zip(whole.keeps.get(index, ()), self.kept.get(index, ()), strict=True))
            if not own.keys() >= set(numbers):
                return None
            found.kept[index] = [own[number] for number in numbers]
        return found

    @property
    def num_bytes(self) -> int:
        """Of all storages."""
        return sum(value.num_bytes for storages in self.kept.values() for value in storages)

    def settle(self) -> list[KeptStorage]:
        """The call is over, its graph and outputs are dropped: copy what others hold, too. Returns all storages."""
        values = [value for storages in self.kept.values() for value in storages]
        for value in values:
            if not is_over(value.storage, 0):
                value.storage = value.storage.clone()
        return values


class _Followed(TorchDispatchMode):
    """Follows a call along its plan."""

    def __init__(self, plan: CallPlan) -> None:
        super().__init__()
        self.plan = plan
        self.differs = False
        self._index = 0

    @property
    def is_over(self) -> bool:
        """Whether all operations of the plan have come."""
        return self._index == len(self.plan.operations)

    def __torch_dispatch__(  # override
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: Keywords | None = None
    ) -> object:
        """Run the operation, or what the plan says instead."""
        kwargs = kwargs or {}
        if func in UNSEEN or self.differs:
            return func(*args, **kwargs)
        index, self._index = self._index, self._index + 1
        if index >= len(self.plan.operations) or self.plan.operations[index].func is not func:
            self.differs = True
            return self.left(func, args, kwargs)
        return self.follow(index, func, args, kwargs)

    def left(self, func: OpOverload, args: tuple[object, ...], kwargs: Keywords) -> object:
        """The call has left the plan with this operation."""
        return func(*args, **kwargs)

    def follow(self, index: int, func: OpOverload, args: tuple[object, ...], kwargs: Keywords) -> object:
        """The operation is the one at `index` of the plan."""
        raise NotImplementedError


class Grab(_Followed):
    """A forward whose results are kept as the plan says. It computes everything, on the plan or off it."""

    def __init__(self, plan: CallPlan) -> None:
        super().__init__(plan)
        self.results = Results()

    def follow(self, index: int, func: OpOverload, args: tuple[object, ...], kwargs: Keywords) -> object:
        """Run the operation, and keep its results."""
        returned = func(*args, **kwargs)
        if self.plan.actions[index] == "keep":
            if argument_forms(pytree.tree_leaves((args, kwargs))) != self.plan.operations[index].form:
                self.differs = True
            else:
                self.results.hold(self.plan, index, pytree.tree_leaves(returned))
        return returned


class Replay(_Followed):
    """A recompute that leaves out operations. `results`: of the call, those that were kept. With `poison` the memory in the
    place of what is left out is NaN. `modules`: the block's, itself the first. See [Note: other calls]."""

    def __init__(self, plan: CallPlan, results: Results, poison: bool, modules: Sequence[nn.Module]) -> None:
        super().__init__(plan)
        self._results = results
        self._poison = poison
        self._modules = modules
        self._empty_keys: dict[int, StorageWeakRef] = {}  # a reference keeps the key, and not the memory
        self._pending: dict[int, int] = {}  # of kept storages, by key: in-place operations that are yet to come
        self._hooks = saved_tensors_hooks(self._pack, unpack)
        self._follows = False
        self._start = Changed(lambda: None)

    def __enter__(self) -> Replay:  # override
        start = self.plan.start
        if start is None:
            self._begin()
        elif start.module < len(self._modules):
            self._start = self._starting(start, self._modules[start.module])
            self._start.__enter__()
        return self

    def __exit__(  # override
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._follows:
            super().__exit__(kind, error, trace)
            self._hooks.__exit__(kind, error, trace)
        self._start.__exit__(kind)
        self._results = Results()  # hooks and this object hold each other: what was kept would stay until Python looks for such

    def _begin(self) -> None:
        self._follows = True
        self._hooks.__enter__()
        super().__enter__()

    def _starting(self, start: Start, module: nn.Module) -> Changed:
        """Within the block the plan is followed from a call of a module on."""
        handles: list[RemovableHandle] = []
        over: list[bool] = []  # an interrupt may come between the hook and its handle: such a hook stays, and does nothing
        calls, outer = count(), Modes.capture()

        def enter(*_: object) -> None:
            if over:
                return
            now = Modes.capture()
            if next(calls) == start.call and (now.operations, now.packings) == (outer.operations, outer.packings):
                self._index = start.operation
                self._begin()

        def put_on() -> None:
            handles.append(module.register_forward_pre_hook(enter))

        def take_off() -> None:
            over.append(True)
            for handle in handles:
                handle.remove()

        return Changed(take_off, put_on)

    def left(self, func: OpOverload, args: tuple[object, ...], kwargs: Keywords) -> object:
        """Raises OperationsDiffer: what this operation reads may be missing."""
        raise OperationsDiffer

    def follow(self, index: int, func: OpOverload, args: tuple[object, ...], kwargs: Keywords) -> object:
        """Run the operation, or give what stands for its results. Raises OperationsDiffer."""
        action, operation = self.plan.actions[index], self.plan.operations[index]
        written = written_args(func, args, kwargs) if func._schema.is_mutable else []
        if action == "run":
            reads = _tensors((*args, *kwargs.values())) if operation.reads_values and self._stands else ()
            if any(map(self._is_missing, reads)) or any(self._standing(tensor) == "kept" for tensor in written):
                self._leave()
            return func(*args, **kwargs)
        flat = pytree.tree_leaves((args, kwargs))
        if argument_forms(flat) != operation.form or not self._write(operation, written):
            self._leave()
        kept = dict(zip(self.plan.keeps.get(index, ()), self._results.kept.get(index, ()), strict=True))
        return self._stand_in(operation, flat, kept)

    @property
    def _stands(self) -> bool:
        """Whether something stands for a result so far."""
        return bool(self._empty_keys or self._pending)

    def _leave(self) -> None:
        self.differs = True
        raise OperationsDiffer

    def _pack(self, tensor: torch.Tensor) -> AliasSlot:
        if self._stands and self._is_missing(tensor):
            self.differs = True
        with no_dispatch():
            return AliasSlot(tensor.detach(), tensor._version)

    def _standing(self, tensor: torch.Tensor) -> StandIn | None:
        """What a tensor's memory is in the place of a result that is not computed; None: it is not."""
        key = _key(tensor)
        return "empty" if key in self._empty_keys else "kept" if key in self._pending else None

    def _is_missing(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor does not hold what an operation is to read: nothing, or what is written in place later on."""
        key = _key(tensor)
        return key in self._empty_keys or self._pending.get(key, 0) > 0

    def _write(self, operation: Operation, written: Sequence[torch.Tensor]) -> bool:
        """Leave in-place writes out. Returns whether they are to memory of the same standing as those that were recorded."""
        for key, tensor in zip(operation.writes, written, strict=True):
            standing = self._standing(tensor)
            if standing != self.plan.stands.get(key):
                return False
            if standing == "kept":
                self._pending[_key(tensor)] -= 1
        return True

    def _stand_in(self, operation: Operation, flat: Sequence[object], kept: dict[int, KeptStorage]) -> object:
        """What an operation would return, over kept memory or over memory of any content."""
        results: list[object] = list(operation.results)
        for place, argument in operation.given.items():
            results[place] = flat[argument]
        for number, (key, new) in enumerate(operation.fresh.items()):
            values = kept.get(number)
            storage = self._empty(new) if values is None else values.resident
            if values is None:
                self._empty_keys[key_of(storage)] = StorageWeakRef(storage)
            else:
                self._pending[key_of(storage)] = self.plan.num_writes[key]
            for place, layout in new.results:
                results[place] = layout.over(storage)
        return pytree.tree_unflatten(results, operation.spec)

    def _empty(self, new: NewStorage) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(new.num_bytes, device=new.device)
        if self._poison:
            for _, layout in new.results:
                layout.over(storage).fill_(_poison(layout.dtype))
        return storage


def _key(tensor: torch.Tensor) -> int:
    """Of the tensor's storage; 0 where it has none of its own."""
    return key_of(tensor.untyped_storage()) if is_plain(tensor) else 0


def _tensors(values: Sequence[object]) -> Iterator[torch.Tensor]:
    """The tensors among an operation's arguments, and in their lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, torch.Tensor))


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max
