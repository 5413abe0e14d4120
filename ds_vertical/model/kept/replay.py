"""A block's forward that computes only what its plan says, and the results of operations that it takes instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ds_vertical.model.kept.recording import UNSEEN, CallPlan, Keywords, NewStorage, Operation, Recording, argument_forms
from ds_vertical.model.kept.slots import KeptStorage
from ds_vertical.model.tensor_refs import is_over


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
    place of what is left out is NaN."""

    def __init__(self, plan: CallPlan, results: Results, poison: bool) -> None:
        super().__init__(plan)
        self._results = results
        self._poison = poison

    def left(self, func: OpOverload, args: tuple[object, ...], kwargs: Keywords) -> object:
        """Raises OperationsDiffer: what this operation reads may be missing."""
        raise OperationsDiffer

    def follow(self, index: int, func: OpOverload, args: tuple[object, ...], kwargs: Keywords) -> object:
        """Run the operation, or give what stands for its results. Raises OperationsDiffer."""
        action, operation = self.plan.actions[index], self.plan.operations[index]
        if action == "run":
            return func(*args, **kwargs)
        flat = pytree.tree_leaves((args, kwargs))
        if argument_forms(flat) != operation.form:
            self.differs = True
            raise OperationsDiffer
        kept = dict(zip(self.plan.keeps.get(index, ()), self._results.kept.get(index, ()), strict=True))
        return self._stand_in(operation, flat, kept)

    def _stand_in(self, operation: Operation, flat: Sequence[object], kept: dict[int, KeptStorage]) -> object:
        """What an operation would return, over kept memory or over memory of any content."""
        results: list[object] = list(operation.results)
        for place, argument in operation.given.items():
            results[place] = flat[argument]
        for number, new in enumerate(operation.fresh.values()):
            values = kept.get(number)
            storage = self._empty(new) if values is None else values.resident
            for place, layout in new.results:
                results[place] = layout.over(storage)
        return pytree.tree_unflatten(results, operation.spec)

    def _empty(self, new: NewStorage) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(new.num_bytes, device=new.device)
        if self._poison:
            for _, layout in new.results:
                layout.over(storage).fill_(_poison(layout.dtype))
        return storage


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max
