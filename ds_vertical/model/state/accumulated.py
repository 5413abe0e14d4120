"""Sums, at the end of a step, of what its forwards have each added to the same item of state.

A hook that appends to a list, or counts, does so in every forward. In stock's order the next forward goes on where the last one
ended. Here each forward begins with what the item held before the step. So what each has added is added up afterwards, in
stock's order.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Hashable, Sequence

import torch

from ds_vertical.model.state.containers import MISSING, Attribute, Container, Contents, owner_key, same_value
from ds_vertical.model.state.module_state import Elements, Pairs, lies_over


def sum_up(before: Pairs, versions: Sequence[Pairs]) -> Pairs:
    """The last of the `versions` (one for each micro-batch, in order) with what all of them have added to the version `before`.

    Elements are added to lists and sets, behind those of before, and to numbers what they have grown by. A value that a forward
    has set anew is the last version's.
    """
    was = {owner_key(container): contents for container, contents in before}
    found = [{owner_key(container): contents for container, contents in version} for version in versions]
    result: dict[Hashable, tuple[Container, Contents]] = {}
    for container, contents in versions[-1]:
        key = owner_key(container)
        own = [version[key] for version in found if key in version]
        result[key] = container, _contents(container, was.get(key, Contents()), own) if len(own) > 1 else contents
    return _with_new_lists(tuple(result.values()), was, found)


def sum_of_tensors(before: Elements, versions: Sequence[Elements]) -> Elements:
    """`before` with what each version has added to it, element by element, in their order.

    Of truth values, and of versions that differ in memory or shape, the last version.
    """
    total = before.copy
    if total.dtype == torch.bool or not all(lies_over(each.memory, before.memory) for each in versions):
        return versions[-1]
    for each in versions:
        total = total + (each.copy - before.copy)
    return Elements(total, before.memory)


def _contents(container: Container, before: Contents, versions: Sequence[Contents]) -> Contents:
    if not any(isinstance(key, Attribute) for key in versions[-1]):
        return _elements(container, before, versions)
    start, *found = [_split(each) for each in (before, *versions)]
    added = _elements(container, start[0], [elements for elements, _ in found])
    return Contents({**added, **_entries(start[1], [attributes for _, attributes in found])})


def _split(contents: Contents) -> tuple[Contents, Contents]:
    """The elements of a collection, and its attributes."""
    named = Contents((key, value) for key, value in contents.items() if isinstance(key, Attribute))
    return Contents((key, value) for key, value in contents.items() if key not in named), named


def _elements(container: Container, before: Contents, versions: Sequence[Contents]) -> Contents:
    if isinstance(container.owner, deque) and container.owner.maxlen is not None:
        return _of_bounded(container.owner.maxlen, before, versions)
    if isinstance(container.owner, list | deque):
        return Contents(enumerate(_sequence(list(before.values()), [list(each.values()) for each in versions])))
    if isinstance(container.owner, set):
        if all(before.keys() <= each.keys() for each in versions):
            return Contents((key, value) for each in versions for key, value in each.items())
        return versions[-1]
    return _entries(before, versions)


def _entries(before: Contents, versions: Sequence[Contents]) -> Contents:
    last = versions[-1]
    own = ((key, [each[key] for each in versions if key in each]) for key in last)
    return Contents((key, _number(before.get(key, MISSING), found)) for key, found in own)


def _sequence(before: list[object], versions: Sequence[list[object]]) -> list[object]:
    start = len(before)
    if any(len(each) < start or not _begins_with(each, before) for each in versions):
        return versions[-1]
    return before + [value for each in versions for value in each[start:]]


def _of_bounded(longest: int, before: Contents, versions: Sequence[Contents]) -> Contents:
    """A deque with a greatest length: what was there and what all forwards have appended, the last of it that finds room."""
    start = list(before.values())
    added: list[object] = []
    for each in versions:
        values = list(each.values())
        kept = next(
            (n for n in range(min(len(start), len(values)), -1, -1) if _begins_with(values, start[len(start) - n :])), 0
        )
        added += values[kept:]
    return Contents(enumerate([*start, *added][-longest:]))


def _begins_with(values: list[object], start: list[object]) -> bool:
    return all(map(operator.is_, start, values)) or all(map(same_value, start, values))


def _number(before: object, versions: Sequence[object]) -> object:
    numbers = [each for each in versions if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(numbers) < len(versions) or len(versions) < 2:
        return versions[-1]
    start = 0 if before is MISSING else before
    if isinstance(start, bool) or not isinstance(start, int | float) or any(each < start for each in numbers):
        return versions[-1]
    return start + sum(each - start for each in numbers)


def _with_new_lists(result: Pairs, was: dict[Hashable, Contents], found: Sequence[dict[Hashable, Contents]]) -> Pairs:
    """Where each forward has put a new list under the same key of a container, let the last one hold the others' values,
    too."""
    pairs = {owner_key(container): (container, contents) for container, contents in result}
    for key, (_, contents) in list(pairs.items()):
        for name, value in contents.items():
            own = [version[key][name] for version in found if name in version.get(key, {})]
            made = all(isinstance(each, list) for each in own) and len({id(each) for each in own}) == len(own) > 1
            if not made or name in was.get(key, {}) or id(value) not in pairs:
                continue
            parts = [_split(version[id(each)]) for version, each in zip(found, own, strict=False) if id(each) in version]
            joined = enumerate(each for elements, _ in parts for each in elements.values())
            pairs[id(value)] = pairs[id(value)][0], Contents({**dict(joined), **parts[-1][1]})
    return tuple(pairs.values())
