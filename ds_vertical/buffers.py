"""Buffers of modules while a forward runs for the second time, and in a step that does not count."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from ds_vertical.changes import Changed
from ds_vertical.layers import LayerError

_SMALL_BUFFER = 1 << 16  # elements of a buffer up to which a recompute may write it: it is copied and put back


@contextlib.contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Undo what a block's second run writes to its buffers: running statistics move once per micro-batch, in F.

    Small ones are put back; a large one that is written is refused with LayerError.
    """
    small = [(buffer, buffer.clone()) for buffer in module.buffers() if buffer.numel() <= _SMALL_BUFFER]
    large = [(buffer, buffer._version) for buffer in module.buffers() if buffer.numel() > _SMALL_BUFFER]
    yield
    with torch.no_grad():
        for buffer, copy in small:
            buffer.copy_(copy)
    for buffer, version in large:
        if buffer._version != version:
            raise LayerError(
                f"a buffer of {buffer.numel()} elements in {type(module).__name__} is written in every forward; layer-major"
                " training runs each forward twice: keep such state out of the blocks"
            )


@contextlib.contextmanager
def buffers_of_whole_steps(module: nn.Module, num_decided: Callable[[], int]) -> Iterator[None]:
    """Undo what a step that is left, or fails, has written to small buffers of the model (running statistics), unless it
    counts: unless `num_decided`, of the steps that do, has grown by then."""
    before = num_decided()
    kept = [(buffer, buffer.clone()) for buffer in module.buffers() if buffer.numel() <= _SMALL_BUFFER]

    def put_back() -> None:
        if num_decided() == before:
            with torch.no_grad():
                for buffer, copy in kept:
                    buffer.copy_(copy)

    with Changed(put_back, only_if_failed=True):
        yield
