"""What micro-batches are given: tensors that a forward may write in place, put back ahead of a further run of it.

A step or an evaluation that starts over runs its forwards again, and the self-checks run some of them besides. Stock runs each
once. So its tensors are to hold then what they held before the first run. Which forwards write theirs the first whole run
shows: until then there is a copy of each tensor, and afterwards of those of such forwards alone.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

import torch
from torch.utils import _pytree as pytree

from ds_vertical.errors import LayerError
from ds_vertical.model.micro_batch import Body
from ds_vertical.model.state.module_state import differs


class HeldInputs:
    """The tensors that some forwards are given, as they are now. `unwritten`: kinds of forwards that write none of them: of
    these there are no copies."""

    def __init__(self, bodies: Sequence[Body], unwritten: Collection[Hashable] = ()) -> None:
        self._kinds = [_kind_of(body) for body in bodies]
        self._held = [
            _Held(number, tensor, copied=kind not in unwritten)
            for number, (body, kind) in enumerate(zip(bodies, self._kinds, strict=True))
            for tensor in _tensors_of(body.given)
        ]

    def put_back(self, refuse: bool = True) -> None:
        """Let the tensors hold what they held. Raises LayerError where one was written of which there is no copy; without
        `refuse` it stays as it is."""
        for each in self._held:
            each.put_back(refuse)

    def written(self) -> dict[Hashable, bool]:
        """By the kinds of forwards, whether one of them has written a tensor that it is given."""
        found = dict.fromkeys(self._kinds, False)
        for each in self._held:
            found[self._kinds[each.number]] |= each.is_written()
        return found


class InputHabits:
    """Which kinds of forwards write none of the tensors that they are given, as far as whole runs have shown."""

    def __init__(self) -> None:
        self._unwritten: set[Hashable] = set()

    def held(self, bodies: Sequence[Body]) -> HeldInputs:
        """What these forwards are given, ahead of their first run."""
        return HeldInputs(bodies, self._unwritten)

    def note(self, held: HeldInputs) -> None:
        """A whole run of these forwards is over."""
        written = held.written()
        self._unwritten -= {kind for kind, is_written in written.items() if is_written}
        self._unwritten |= {kind for kind, is_written in written.items() if not is_written}

    def forget(self) -> None:
        """A run has failed, maybe since there was no copy: the next one has copies of all."""
        self._unwritten.clear()


class _Held:
    """One tensor of the forward `number`."""

    def __init__(self, number: int, tensor: torch.Tensor, copied: bool) -> None:
        self.number = number
        self._tensor = tensor
        self._version = _version_of(tensor)
        self._copy = tensor.detach().clone() if copied or self._version is None else None

    def is_written(self) -> bool:
        """Whether it holds something else, or torch has counted a write."""
        if self._version is not None and _version_of(self._tensor) != self._version:
            return True
        return self._copy is not None and bool(differs(self._tensor.detach(), self._copy))

    def put_back(self, refuse: bool) -> None:
        """Let it hold what it held. Raises LayerError where that is not known any more, if it is to `refuse` that."""
        if not self.is_written():
            return
        if self._copy is None or self._tensor.shape != self._copy.shape:
            if not refuse:
                return
            shape = tuple(self._tensor.shape)
            raise LayerError(
                f"micro-batch {self.number}: the forward has written a tensor of shape {shape} that it is given in place, for"
                " the first time, in a run that has to start over, and nobody has a copy of what it held: write a copy of it"
            )
        with torch.no_grad():
            self._tensor.data.copy_(self._copy)


def _version_of(tensor: torch.Tensor) -> int | None:
    """Torch's count of writes; None: it does not count them."""
    return None if tensor.is_inference() else tensor._version


def _kind_of(body: Body) -> Hashable:
    return body.form, tuple(getattr(each, "__code__", id(each)) for each in body.functions)


def _tensors_of(given: object) -> Iterator[torch.Tensor]:
    """The tensors in a micro-batch that a forward can write as such: plain ones, with elements of their own."""
    for value in pytree.tree_leaves(dict(given) if isinstance(given, Mapping) else given):
        if type(value) is torch.Tensor and value.layout is torch.strided and value.device.type != "meta":
            yield value
