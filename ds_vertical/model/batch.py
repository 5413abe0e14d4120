"""Micro-batches of one step: take them from the iterator, give them to the model, find the loss. The same in both arms."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ds_vertical.io.streams import works_beside_host

LossFn = Callable[[Any, Any], torch.Tensor]
LossOf = Callable[[Callable[[], Any]], torch.Tensor]  # of what runs a forward's suffix and returns its outputs, the loss


def own_loss(finish: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The loss of a forward that returns it."""
    return finish()


def collect(data_iter: Iterator[Any], most: int, device: torch.device) -> list[Any]:
    """Up to `most` micro-batches, their tensors moved to `device`. Raises StopIteration when there is none.

    All are taken before the first is moved. So an interrupt in code of ours leaves the iterator where a step begins or ends.
    """
    taken = list(islice(data_iter, most))
    if not taken:
        raise StopIteration
    return [to_device(batch, device) for batch in taken]


def as_iterator(data: Iterable[Any]) -> Iterator[Any]:
    """Accept an iterator, or one that only iterates (a list of micro-batches).

    Raises TypeError for a single micro-batch: its keys, or the rows of a tensor, are no micro-batches.
    """
    if isinstance(data, Mapping | torch.Tensor):
        raise TypeError(f"expected an iterator of micro-batches, got one {type(data).__name__}; write iter([micro_batch])")
    return data if isinstance(data, Iterator) else iter(data)


def to_device(batch: Any, device: torch.device) -> Any:
    """The micro-batch with every tensor on `device`; other values as they are. The caller's tensors may be written again at
    once."""
    if isinstance(batch, Mapping):  # BatchEncoding of Hugging Face is one, not a dict
        return {key: to_device(value, device) for key, value in batch.items()}
    return pytree.tree_map(lambda v: _moved(v, device) if isinstance(v, torch.Tensor) else v, batch)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device. Of one in host memory a page-locked copy is made first: the host would wait for a copy of other
    memory, and for all that the device has been given before it. Torch keeps that copy until the device has read it."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
    if not plain or tensor.device.type != "cpu" or not works_beside_host(device):
        return tensor.to(device)
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor).to(device, non_blocking=True)


def call_model(module: Callable[..., Any], batch: Any) -> Any:
    """Call a model with a micro-batch: a dict as keyword arguments, a tuple or list as positional ones, any other value as
    one."""
    if isinstance(batch, Mapping):
        return module(**batch)
    if isinstance(batch, tuple | list):
        return module(*batch)
    return module(batch)


def loss_of(outputs: Any, batch: Any, loss_fn: LossFn | None) -> torch.Tensor:
    """`loss_fn(outputs, batch)`, or the model's own loss: `outputs.loss`, `outputs["loss"]`, `outputs[0]`, `outputs`.

    Raises ValueError when that is no scalar tensor.
    """
    loss = loss_fn(outputs, batch) if loss_fn is not None else _own_loss(outputs)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(
            f"the loss must be a tensor with one element, got {got}; pass loss_fn(outputs, batch) to train_batch, or labels"
            " in the micro-batch so that the model returns its own loss"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        source = "loss_fn(outputs, batch)" if loss_fn is not None else "the model"
        raise ValueError(f"the loss that {source} returned requires no gradient (was it detached?): nothing would be trained")
    return loss


def _own_loss(outputs: Any) -> Any:
    if getattr(outputs, "loss", None) is not None:
        return outputs.loss
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    if isinstance(outputs, tuple | list) and outputs:
        return outputs[0]
    return outputs


def mean_loss(losses: list[torch.Tensor]) -> torch.Tensor:
    """Mean over the micro-batches in fp32, a 0-d tensor on the losses' device."""
    return torch.stack([loss.detach().float().reshape(()) for loss in losses]).mean()


def items_of(loss_fn: LossFn | None, batches: Sequence[object]) -> list[int] | None:
    """What each micro-batch weighs in the mean of the losses: `loss_fn.num_items(batch)`, an integer >= 0, where the loss
    function has that; else None: all the same. Raises ValueError for other values."""
    num_items = getattr(loss_fn, "num_items", None)
    if num_items is None:
        return None
    found = [num_items(batch) for batch in batches]
    for each in found:
        if isinstance(each, bool) or float(each) != int(each) or int(each) < 0:
            raise ValueError(f"loss_fn.num_items(batch): got {each!r}; return the number of items (tokens) of the loss's mean")
    return [int(each) for each in found]


def count_tokens(batches: list[Any]) -> int:
    """Elements of `input_ids` (or of the first tensor) summed over the micro-batches."""
    return sum(_first_tensor(batch).numel() for batch in batches)


def form_of(batch: Any) -> Hashable:
    """A value that is equal for micro-batches of the same structure: keys, types, dtypes and numbers of dimensions."""
    leaves, spec = pytree.tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
    return repr(spec), tuple((v.dtype, v.dim()) if isinstance(v, torch.Tensor) else type(v) for v in leaves)


def _first_tensor(batch: Any) -> torch.Tensor:
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
        return batch["input_ids"]
    return next((v for v in pytree.tree_leaves(batch) if isinstance(v, torch.Tensor)), torch.empty(0))


def stream_seed(seed: int, step: int, micro_batch: int, rank: int) -> int:
    """The seed of one micro-batch's random streams; well mixed, so that neighbouring steps share nothing."""
    digest = hashlib.blake2b(f"{seed}/{step}/{micro_batch}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
