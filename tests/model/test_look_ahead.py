"""Loaders that can be looked at ahead, and the model's coming calls told from them and verified."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ds_vertical.errors import LoopError
from ds_vertical.model.look_ahead import Call, Peekable, comes_from, is_fetching, look_ahead, predict


def make_batches(count: int = 4) -> list[dict[str, torch.Tensor]]:
    return [
        {"input_ids": torch.arange(8).view(2, 4) + 10 * index, "labels": torch.arange(8).view(2, 4) + 10 * index + (index > 0)}
        for index in range(count)
    ]


def ids_of(batches: list[Any]) -> list[int]:
    return [int(batch["input_ids"][0, 0]) for batch in batches]


def test_who_peeks_takes_nothing_from_whoever_iterates() -> None:
    loader = look_ahead(make_batches())
    first = next(loader)
    assert ids_of(loader.peek(2)) == [10, 20]
    assert ids_of(loader.peek(9)) == [10, 20, 30]
    assert loader.last is first
    assert ids_of(list(loader)) == [10, 20, 30]
    assert loader.last is None
    with pytest.raises(StopIteration):
        next(loader)


class MarkingLoader:
    """As Accelerate's: says which batch is its last, and what it does when it is asked past that cannot be taken back."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.end_of_dataloader = False
        self.has_ended = False

    def __iter__(self) -> Iterator[Any]:
        self.end_of_dataloader = False
        for index, batch in enumerate(self.batches):
            self.end_of_dataloader = index == len(self.batches) - 1
            yield batch
        self.has_ended = True


def test_nobody_looks_past_a_batch_that_is_marked_as_the_last() -> None:
    loader = MarkingLoader(make_batches(3))
    ahead = look_ahead(loader)
    seen = []
    for _ in ahead:
        assert len(ahead.peek(5)) == 2 - len(seen)
        assert not loader.has_ended
        seen.append(loader.end_of_dataloader)
    assert seen == [False, False, True]
    assert loader.has_ended


def test_a_loader_within_a_loader_is_its_own_affair() -> None:
    inside = []

    def outer() -> Iterator[Any]:
        inside.append(is_fetching())
        yield from make_batches(1)

    next(look_ahead(outer()))
    assert inside == [True]
    assert not is_fetching()


def test_the_same_loader_wrapped_twice_is_one() -> None:
    ahead = look_ahead(make_batches())
    assert look_ahead(ahead, lambda batch: batch) is ahead
    assert ahead.inputs is not None


def told(call: Call, ahead: Peekable, most: int = 3) -> list[Call]:
    prediction = predict(call, most, whole=True)
    assert prediction.source is ahead
    return list(prediction.calls)


def test_arguments_by_name_are_told_by_identity_and_by_name() -> None:
    ahead = look_ahead(make_batches())
    batch: Any = next(ahead)
    assert torch.equal(batch["input_ids"], batch["labels"])  # as long as these are equal only their names tell them apart
    for given in (batch, {name: value.clone() for name, value in batch.items()}):
        calls = told(Call((), {**given, "use_cache": False}), ahead)
        assert [int(call.kwargs["labels"][0, 0]) for call in calls] == [0, 11, 21]  # type: ignore[index]
        assert calls[2].kwargs["use_cache"] is False


def test_parts_of_tensors_and_other_dtypes_are_told() -> None:
    ahead = look_ahead([{"tokens": torch.arange(5).view(1, 5) + 10 * index} for index in range(3)])
    tokens: Any = next(ahead)
    tokens = tokens["tokens"]
    calls = told(Call((tokens[:, :-1].contiguous(),), {"labels": tokens[:, 1:], "weights": tokens.float()}), ahead)
    assert calls[1].args[0].tolist() == [[10, 11, 12, 13]]  # type: ignore[attr-defined]
    assert calls[1].args[0].is_contiguous()  # type: ignore[attr-defined]
    assert calls[2].kwargs["labels"].tolist() == [[21, 22, 23, 24]]  # type: ignore[attr-defined]
    assert calls[2].kwargs["weights"].dtype is torch.float32  # type: ignore[attr-defined]


def test_what_lies_in_containers_is_told() -> None:
    ahead = look_ahead([([torch.ones(2) * index, torch.ones(3) * index], f"task {index}") for index in range(3)])
    pair: Any = next(ahead)
    calls = told(Call(({"images": list(pair[0]), "task": "mine"}, pair[1]), {}), ahead)
    given: Any = calls[2].args[0]
    assert given["images"][1].tolist() == [2, 2, 2]
    assert given["task"] == "mine"
    assert calls[2].args[1] == "task 2"


def test_inputs_say_how_a_batch_becomes_arguments() -> None:
    ahead = look_ahead(make_batches(), lambda batch: {"ids": batch["input_ids"] * 2})  # type: ignore[index]
    batch: Any = next(ahead)
    prediction = predict(Call((), {"ids": batch["input_ids"] * 2}), 2, whole=True)
    assert int(prediction.calls[1].kwargs["ids"][0, 0]) == 20  # type: ignore[index]
    with pytest.raises(LoopError, match=r"inputs\(batch\) gives another argument ids"):
        predict(Call((), {"ids": batch["input_ids"]}), 2, whole=True)


def test_of_two_loaders_that_one_is_asked_whose_batch_it_is() -> None:
    other, ahead = look_ahead(make_batches()), look_ahead(make_batches())
    next(other)
    batch: Any = next(ahead)
    call = Call((), batch)
    assert predict(call, 2, whole=True).source is ahead
    assert comes_from(call, ahead)
    assert not comes_from(call, other)


# ---- what is refused


def test_a_batch_from_no_known_loader_is_refused() -> None:
    gc.collect()
    with pytest.raises(LoopError, match=r"iterate over ds_vertical\.look_ahead\(loader\)"):
        predict(Call((torch.full((2,), 7777.5),), {}), 2, whole=True)
    assert predict(Call((torch.full((2,), 7777.5),), {}), 1, whole=True).source is None  # one micro-batch: nothing to be told


def test_an_input_that_requires_grad_is_refused() -> None:
    with pytest.raises(LoopError, match="argument x requires grad"):
        predict(Call((), {"x": torch.ones(2, requires_grad=True)}), 1, whole=True)


def test_a_loader_that_ends_inside_a_step_is_refused_where_the_loop_counts_on() -> None:
    ahead = look_ahead(make_batches(3))
    batch: Any = next(ahead)
    with pytest.raises(LoopError, match="ends 1 micro-batches before the step does"):
        predict(Call((), batch), 4, whole=True)
    assert len(predict(Call((), batch), 4, whole=False).calls) == 3
    marking = look_ahead(MarkingLoader(make_batches(3)))
    batch = next(marking)
    assert len(predict(Call((), batch), 4, whole=True).calls) == 3


def test_a_call_that_differs_from_what_was_told_is_refused_by_its_argument() -> None:
    ahead = look_ahead(make_batches())
    batch: Any = next(ahead)
    prediction = predict(Call((), {**batch, "scale": 2}), 3, whole=True)
    batch = next(ahead)
    prediction.verify(1, Call((), {**batch, "scale": 2}))
    prediction.verify(1, Call((), {**{name: value.clone() for name, value in batch.items()}, "scale": 2}))
    with pytest.raises(LoopError, match="micro-batch 2 of 3: argument scale is not what"):
        prediction.verify(1, Call((), {**batch, "scale": 3}))
    with pytest.raises(LoopError, match="argument labels is not what"):
        prediction.verify(1, Call((), {**batch, "scale": 2, "labels": batch["labels"] + 1}))
    with pytest.raises(LoopError, match="argument mask is not what"):
        prediction.verify(1, Call((), {**batch, "scale": 2, "mask": None}))
    batch["labels"][0, 0] = -100  # the same tensor, which forwards that have begun have seen otherwise
    with pytest.raises(LoopError, match="argument labels is not what"):
        prediction.verify(1, Call((), {**batch, "scale": 2}))


def test_a_batch_of_another_structure_is_refused_by_what_it_lacks() -> None:
    ahead = look_ahead([{"x": torch.ones(1), "y": torch.zeros(1)}, {"x": torch.ones(1)}])
    batch: Any = next(ahead)
    with pytest.raises(LoopError, match=r"has no \['y'\]"):
        predict(Call((), batch), 2, whole=True)
