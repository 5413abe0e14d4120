"""Loaders whose coming batches can be looked at, and the model's coming calls, which are told from them.

A loop of three calls hands over one micro-batch at a time, but a step in layer-major order begins with all of them. So the
first call of the model in a step says how its arguments follow from the batch that its loader has yielded last (`Recipe`). The
batches that the loader yields next give the other calls of the step (`predict`). Each of these is compared with what the loop
really passes when its turn comes (`Prediction.verify`).

[Note: in place] A tensor that a loop changes in place is the same object afterwards, but the forwards that have begun have seen
other values. So a told tensor is noted with its version, and an object that is the same counts only at that version.

[Note: the last batch] Accelerate's loaders say of the batch that they have yielded last that it is their last one
(`end_of_dataloader`), and end when they are asked for one more: they leave the list of active loaders then. So nobody looks
past a batch that is marked so. Whoever takes a batch finds the mark as it was when the loader yielded that batch.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ds_vertical.errors import LoopError

Path = tuple[object, ...]  # keys and indices from a batch, or a call, to what lies in it
Inputs = Callable[[object], object]  # of a batch, the model's arguments: a mapping by name, else by position

REMEDY: Final = (
    "either give the model what the data loader yields (put the change into its collate_fn), or say how a batch becomes the"
    " model's arguments: for batch in ds_vertical.look_ahead(loader, inputs=lambda batch: dict(...)), or call"
    " engine.train_batch(data_iter)"
)
_END_MARK: Final = "end_of_dataloader"  # Accelerate's, of its loaders: see [Note: the last batch]


@dataclass(frozen=True)
class Call:
    """One call of the model: its arguments."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]

    @property
    def whole(self) -> tuple[object, ...]:
        """All arguments as one value."""
        return (*self.args, dict(self.kwargs))


# ---- loaders


class _Inside(threading.local):
    depth = 0


_inside = _Inside()
_live: weakref.WeakSet[Peekable] = weakref.WeakSet()
_clock = itertools.count(1)


class Peekable(Iterator[object]):
    """An iterator over batches that can be looked at before somebody takes them.

    `loader`: whose batches `source` yields; `inputs`: the user's word on how a batch becomes the model's arguments. `last`: the
    batch that was taken last; None before the first and after the end. `has_mark`: the loader says which batch is its last.
    """

    def __init__(self, source: Iterator[object], loader: object = None, inputs: Inputs | None = None) -> None:
        self.inputs = inputs
        self.last: object = None
        self.has_mark = hasattr(loader, _END_MARK)
        self._source = source
        self._loader = loader
        self._ahead: deque[tuple[object, bool]] = deque()  # batches, and whether each is marked as the last
        self._taken_is_last = self._ended = False
        self.taken_at = 0  # when `last` was taken, by a clock of all iterators
        _live.add(self)

    def __iter__(self) -> Peekable:
        return self

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]  # as the loader's own iterator has it

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["_source"], name)

    def __next__(self) -> object:
        try:
            if not self._ahead:
                self._fetch()
        except StopIteration:
            self.last = None
            raise
        self.last, self._taken_is_last = self._ahead.popleft()
        self.taken_at = next(_clock)
        self._show_mark()
        return self.last

    def peek(self, count: int) -> list[object]:
        """Up to `count` of the batches that come next; fewer where the loader ends before."""
        while len(self._ahead) < count and not self._ended and not self._knows_the_last():
            try:
                self._fetch()
            except StopIteration:
                break
        self._show_mark()
        return [batch for batch, _ in list(self._ahead)[:count]]

    def _knows_the_last(self) -> bool:
        return self._ahead[-1][1] if self._ahead else self._taken_is_last

    def _fetch(self) -> None:
        if self._ended:
            raise StopIteration
        try:
            with _Fetching():
                batch = next(self._source)
        except StopIteration:
            self._ended = True
            raise
        self._ahead.append((batch, bool(getattr(self._loader, _END_MARK, False))))

    def _show_mark(self) -> None:
        """Let the loader say of the batch that was taken last what it has said when it yielded that."""
        if self.has_mark and not self._ended:
            setattr(self._loader, _END_MARK, self._taken_is_last)


class _Fetching:
    """In the block a loader makes a batch: the loaders that it asks for that are its own affair."""

    def __enter__(self) -> None:
        _inside.depth += 1

    def __exit__(self, *_: object) -> None:
        _inside.depth -= 1


def is_fetching() -> bool:
    """Whether this thread is within a loader that makes a batch."""
    return _inside.depth > 0


def look_ahead(loader: Iterable[object], inputs: Inputs | None = None) -> Peekable:
    """Iterate over a loader's batches so that the engine can see those that come.

    For loops that call `engine(...)`, `engine.backward(loss)` and `engine.step()`: `for batch in look_ahead(loader):`. Any
    iterable of batches will do. `inputs(batch)`: the model's arguments where the loop makes them from a batch: a mapping (by
    name), a tuple or list (by position), or one value. It must not draw random numbers, and not change the batch.
    """
    found = iter(loader)
    if isinstance(found, Peekable):
        found.inputs = inputs
        return found
    return Peekable(found, loader, inputs)


# ---- how a call follows from a batch


@dataclass(frozen=True)
class _Constant:
    value: object

    def of(self, batch: object) -> object:
        return self.value


@dataclass(frozen=True)
class _Taken:
    """What lies at `path` of a batch; of a tensor the part `cut`, as `like` is: on its device, of its dtype, contiguous."""

    path: Path
    cut: tuple[object, ...] | None = None
    like: torch.Tensor | None = None

    def of(self, batch: object) -> object:
        value = at_path(batch, self.path)
        if self.like is None or not isinstance(value, torch.Tensor):
            return value
        value = _as_like(value if self.cut is None else value[self.cut], self.like)  # type: ignore[index]
        return value.contiguous() if self.like.is_contiguous() else value


@dataclass(frozen=True)
class _Mapped:
    parts: Mapping[object, Rule]

    def of(self, batch: object) -> object:
        return {key: rule.of(batch) for key, rule in self.parts.items()}


@dataclass(frozen=True)
class _Listed:
    parts: Sequence[Rule]
    kind: type

    def of(self, batch: object) -> object:
        made = [rule.of(batch) for rule in self.parts]
        return self.kind(*made) if hasattr(self.kind, "_fields") else self.kind(made)


Rule = _Constant | _Taken | _Mapped | _Listed

_CUTS: Final = ((Ellipsis, slice(None, -1)), (Ellipsis, slice(1, None)))  # inputs and targets of next tokens


class Recipe:
    """How one call of the model follows from a batch of its loader. `score`: of how much of the call that is known."""

    def __init__(self, call: Call, batch: object) -> None:
        self._nodes = [(path, value) for path, value in nodes_of(batch) if path or isinstance(value, torch.Tensor)]
        self._same = {id(value): path for path, value in reversed(self._nodes) if not isinstance(value, (str, int, float))}
        self.score = 0
        self._args = [self._rule(value, index) for index, value in enumerate(call.args)]
        self._kwargs = {name: self._rule(value, name) for name, value in call.kwargs.items()}

    def call_for(self, batch: object) -> Call:
        """The call that follows from another batch. Raises LoopError where that has another structure."""
        return Call(tuple(rule.of(batch) for rule in self._args), {name: rule.of(batch) for name, rule in self._kwargs.items()})

    def _rule(self, value: object, key: object) -> Rule:
        if id(value) in self._same and (value is not None and not isinstance(value, bool)):
            self.score += 2  # more than a value that may be equal by chance
            return _Taken(self._same[id(value)])
        if isinstance(value, torch.Tensor):
            return self._tensor_rule(value, key)
        if isinstance(value, dict):
            return _Mapped({name: self._rule(each, name) for name, each in value.items()})
        if isinstance(value, (list, tuple)):
            return _Listed([self._rule(each, index) for index, each in enumerate(value)], type(value))
        for path, own in self._nodes:
            if path and path[-1] == key and type(own) is type(value) and is_same(own, value):
                return _Taken(path)
        return _Constant(value)

    def _tensor_rule(self, value: torch.Tensor, key: object) -> Rule:
        """Of several tensors with these values that of the same name, or place; the whole one rather than a part."""
        tensors = [(path, own) for path, own in self._nodes if isinstance(own, torch.Tensor)]
        tensors.sort(key=lambda each: not (each[0] and each[0][-1] == key))
        for cut in (None, *_CUTS):
            for path, own in tensors:
                if cut is not None and own.dim() == 0:
                    continue
                part = own if cut is None else own[cut]
                if part.shape == value.shape and is_same(_as_like(part, value), value):
                    self.score += 1
                    return _Taken(path, cut, value)
        return _Constant(value)


def nodes_of(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """A value and all that mappings, lists and tuples in it hold, each with its path."""
    yield path, value
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from nodes_of(each, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from nodes_of(each, (*path, index))


def at_path(value: object, path: Path) -> object:
    """What lies at a path. Raises LoopError where nothing does."""
    for key in path:
        try:
            value = value[key]  # type: ignore[index]
        except (LookupError, TypeError) as error:
            raise LoopError(
                f"the data loader's next batch has no {_shown(path)}, which the batch before it has; {REMEDY}"
            ) from error
    return value


def is_same(told: object, found: object) -> bool:
    """Whether two values are equal: tensors in device, dtype, shape and values (NaN equals NaN), others as Python has it."""
    if told is found:
        return True
    if isinstance(told, torch.Tensor) or isinstance(found, torch.Tensor):
        return isinstance(told, torch.Tensor) and isinstance(found, torch.Tensor) and _are_equal(told, found)
    try:
        return bool(told == found)
    except (ValueError, RuntimeError):  # several truths: arrays
        return False


def _are_equal(told: torch.Tensor, found: torch.Tensor) -> bool:
    if (told.shape, told.dtype, told.device) != (found.shape, found.dtype, found.device):
        return False
    if torch.equal(told, found):
        return True
    if not found.is_floating_point():
        return False
    return torch.equal(told.isnan(), found.isnan()) and torch.equal(told.nan_to_num(), found.nan_to_num())


def _as_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return value.to(like.device, like.dtype)


def _shown(path: Path) -> str:
    return "".join(f"[{key!r}]" for key in path)


# ---- prediction


class Prediction:
    """The calls of the model that one step makes, the first one as the loop has made it. `source`: the loader's iterator from
    which the others are told; None where there is only one."""

    def __init__(self, calls: Sequence[Call], source: Peekable | None) -> None:
        self.calls = calls
        self.source = source
        self._versions = [_versions(call) for call in calls]  # see [Note: in place]

    def verify(self, micro_batch: int, found: Call) -> None:
        """Raise LoopError where the loop calls the model otherwise than was told of this micro-batch."""
        told = self.calls[micro_batch]
        path = _difference(told.whole, found.whole, self._versions[micro_batch])
        if path is None:
            return
        what = "the number of arguments" if not path else f"argument {_argument(path, found)}"
        raise LoopError(
            f"engine(...), micro-batch {micro_batch + 1} of {len(self.calls)}: {what} is not what the data loader has told of"
            f" it when micro-batch 1 was called: the loop changes batches between the loader and the model; {REMEDY}"
        )


def predict(call: Call, most: int, whole: bool) -> Prediction:
    """This call of the model, and those that follow it in a step of up to `most` micro-batches.

    `whole`: a step that the loader's end would cut short is refused, unless the loader itself marks its last batch: the loop
    counts on, into the next epoch. Raises LoopError.
    """
    for path, value in nodes_of(call.whole):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise LoopError(
                f"engine(...): argument {_argument(path, call)} requires grad; layer-major order trains what the model holds"
                " alone: move the module that makes this tensor into the model, or detach the tensor"
            )
    if most == 1:
        return Prediction([call], None)
    source, follow = _source_of(call)
    coming = source.peek(most - 1)
    if whole and not source.has_mark and len(coming) < most - 1:
        raise LoopError(
            f"engine(...): the data loader ends {most - 1 - len(coming)} micro-batches before the step does"
            f" (gradient_accumulation_steps is {most}); DeepSpeed would go on with the next epoch's, which nobody can see yet:"
            " give the loader a number of batches that gradient_accumulation_steps divides (drop_last), or end the loop before"
        )
    return Prediction([call, *map(follow, coming)], source)


def comes_from(call: Call, source: Peekable | None) -> bool:
    """Whether a call is made of the batch that was taken last from this iterator, rather than of another one's."""
    if source is None:
        return False
    try:
        return _source_of(call)[0] is source
    except LoopError:
        return True  # changed on the way: nothing says that the loop has gone on to another loader


def _source_of(call: Call) -> tuple[Peekable, Callable[[object], Call]]:
    """The iterator whose last batch the call is made of, and what makes calls of further ones. Raises LoopError."""
    best: tuple[int, Peekable, Callable[[object], Call]] | None = None
    stated = ""
    for source in sorted(_live, key=lambda each: -each.taken_at):  # of several with the same batch the one in use
        if source.last is None:
            continue
        if source.inputs is not None:
            told = _stated(source.inputs, source.last)
            path = _difference(told.whole, call.whole, {})
            if path is None:
                return source, _stating(source.inputs)
            stated = f"; look_ahead's inputs(batch) gives another argument {_argument(path, told)}"
            continue
        recipe = Recipe(call, source.last)
        if recipe.score and (best is None or recipe.score > best[0]):
            best = recipe.score, source, recipe.call_for
    if best is None:
        raise LoopError(
            "engine(...) in training mode: no argument is a tensor of the batch that a data loader has yielded last, so the"
            f" step's other micro-batches cannot be told{stated}; iterate over"
            f" ds_vertical.look_ahead(loader), whatever yields the batches; {REMEDY}"
        )
    return best[1:]


def _stating(inputs: Inputs) -> Callable[[object], Call]:
    return lambda batch: _stated(inputs, batch)


def _stated(inputs: Inputs, batch: object) -> Call:
    given = inputs(batch)
    if isinstance(given, Mapping):
        return Call((), dict(given))
    return Call(tuple(given) if isinstance(given, (list, tuple)) else (given,), {})


# ---- verification


def _versions(call: Call) -> dict[int, int]:
    tensors = [value for _, value in nodes_of(call.whole) if isinstance(value, torch.Tensor)]
    return {id(tensor): tensor._version for tensor in tensors if not tensor.is_inference()}


def _difference(told: object, found: object, versions: Mapping[int, int], path: Path = ()) -> Path | None:
    """The path of the first difference; None where there is none."""
    if told is found and isinstance(found, torch.Tensor):
        return None if found.is_inference() or versions.get(id(found), found._version) == found._version else path
    if isinstance(told, Mapping) and isinstance(found, Mapping):
        if told.keys() != found.keys():
            return (*path, *sorted(map(str, told.keys() ^ found.keys()))[:1])
        pairs = [(key, told[key], found[key]) for key in found]
    elif isinstance(told, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(told) != len(found):
            return path
        pairs = [(index, *both) for index, both in enumerate(zip(told, found, strict=True))]
    else:
        return None if is_same(told, found) else path
    differences = (_difference(one, other, versions, (*path, key)) for key, one, other in pairs)
    return next((each for each in differences if each is not None), None)


def _argument(path: Path, call: Call) -> str:
    """An argument as the loop has written it: by name, or by its number from 1."""
    first, *rest = path
    if first == len(call.args) and rest:
        return f"{rest[0]}{_shown(tuple(rest[1:]))}"
    return f"number {int(str(first)) + 1}{_shown(tuple(rest))}" if isinstance(first, int) else str(first)
