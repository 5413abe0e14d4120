"""Tensors that are noted beside the storage that they share, and forgotten."""

from __future__ import annotations

import sys
from types import FrameType

import torch

from ds_vertical.model import tensor_refs


def test_a_noted_tensor_is_forgotten_by_no_code_of_pythons() -> None:
    """Python prints and drops an interrupt that comes while a reference calls its code back."""
    tensor = torch.ones(4)
    alias, called = tensor_refs.note_alias(tensor.view(2, 2)), []
    assert any(each is alias for each in tensor_refs.over(tensor.untyped_storage(), []))

    def note(frame: FrameType, what: str, _: object) -> None:
        if what == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        del alias
    finally:
        sys.setprofile(None)
    assert not called
    assert not tensor_refs.over(tensor.untyped_storage(), [])


def test_storages_whose_tensors_are_gone_are_dropped() -> None:
    kept = [torch.ones(4) for _ in range(10)]
    for tensor in kept:
        tensor_refs.note_alias(tensor)
    gone = [torch.ones(4) for _ in range(500)]
    for tensor in gone:
        tensor_refs.note_alias(tensor)
    del gone, tensor
    for tensor in [torch.ones(4) for _ in range(1200)]:
        tensor_refs.note_alias(tensor)
    assert len(tensor_refs._aliases) < 1500
    assert all(tensor_refs.over(tensor.untyped_storage(), []) for tensor in kept)
