"""One micro-batch's forward and backward as torch alone runs them: one graph from end to end, no block is run twice.

Only the layer that is computed has its parameters in memory. Its hooks fetch it; whatever autograd saves of its parameters is
looked up again, and what else it saves goes to a file where host memory is short.

[Note: saved by layers alone] Torch takes a saved tensor through hooks and gives the backward a new object over its memory,
which has none of the attributes that DeepSpeed gives its parameters. A backward written in Python may ask for them: that of
TRL's head reads `ds_status` of its weight. So the hooks see what layers save, and nothing of the code around them, whose
parameters are in memory from end to end. A backward within a layer that asks cannot be given an answer: `PlainOrderError`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from ds_vertical.errors import LayerError
from ds_vertical.io.host import available_bytes
from ds_vertical.io.ticket import Ticket
from ds_vertical.model.autograd_segments import OWN_BACKWARD
from ds_vertical.model.forward_coroutine import refuse_call_run_again
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.stubs import calls_through
from ds_vertical.model.tensor_refs import key_of
from ds_vertical.schedule.events import Unit


class ParamSource(Protocol):
    """Where a unit's parameters come from."""

    def fetch(self, unit: Unit) -> Ticket:
        """Have the unit's full parameters on the device once the ticket has been waited for."""
        ...

    def release(self, unit: Unit) -> None:
        """Give the unit's full parameters up."""
        ...


_AHEAD: Final = "forward ahead of the first layer", None
_FORBIDDEN: Final = "saved tensor hooks"  # in torch's message where a transform, such as torch.func.grad, forbids them


class PlainOrderError(RuntimeError):
    """This pass cannot run the model, which trains without it: see [Note: saved by layers alone]. The cause is what the model
    has raised."""


class PlainOrder:
    """Runs micro-batches in stock's order. `folder`: for what does not fit into memory; None: the system's."""

    def __init__(self, layers: LayerMap, params: ParamSource, folder: Path | None) -> None:
        self._layers = layers
        self._params = params
        self._resident: Unit | None = None
        self._unit_of = layers.unit_of()
        self._param_of: dict[int, nn.Parameter] = {}  # by storage, of what is resident
        self._saved = _Saved(folder)
        self.place: tuple[str, int | None] = _AHEAD  # for messages: what runs, and of which block
        self._in_forward = False

    @contextlib.contextmanager
    def opened(
        self, note_output: Callable[[int, object], None], note_gradient: Callable[[nn.Parameter], None]
    ) -> Iterator[PlainOrder]:
        """Within the block models run with their layers fetched as they come. `note_output` hears of each block's output, by
        the block's number, `note_gradient` of each parameter of a layer that has its gradient."""

        def note(param: nn.Parameter) -> None:
            if self._in_forward:
                raise LayerError(OWN_BACKWARD)
            note_gradient(param)

        with contextlib.ExitStack() as stack:
            stack.callback(self._saved.close)
            stack.push(_unless_interrupted(self._release))
            for number, layer in ((block, index) for index, blocks in enumerate(self._layers.layers) for block in blocks):
                module = self._layers.blocks[number].module
                stack.enter_context(calls_through(module, partial(self._call, number, layer, note_output)))
            for unit, params in self._layers.units.items():
                for param in params if isinstance(unit, int) else ():
                    if param.requires_grad:
                        stack.callback(param.register_post_accumulate_grad_hook(note).remove)
            for unit in self._layers.outside.units:
                ticket = self._params.fetch(unit)
                stack.push(_unless_interrupted(partial(self._params.release, unit)))
                ticket.wait()
            yield self

    def run(self, body: Callable[[], torch.Tensor], scale: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Forward, loss and backward of one micro-batch. Returns its loss. Raises LayerError where `body` runs one itself,
        PlainOrderError where this pass is the cause that the model fails, and else what the model raises."""
        self.place, self._in_forward = _AHEAD, True
        try:
            loss = body()
            self._in_forward = False
            if self._have_gradients_around():
                raise LayerError(OWN_BACKWARD)
            self.place = "backward of the loss, ahead of the layers'", None
            scale(loss).backward()
        except Exception as failure:
            if self._is_ours(failure):
                raise PlainOrderError(str(failure)) from failure
            raise
        self._saved.clear()
        return loss.detach()

    def _have_gradients_around(self) -> bool:
        return any(param.grad is not None for unit in self._layers.outside.units for param in self._layers.units[unit])

    def _is_ours(self, failure: Exception) -> bool:
        """Whether the model has failed at a saved tensor that has lost what only its parameter has, or since hooks are
        forbidden to it."""
        if isinstance(failure, AttributeError) and type(failure.obj) is torch.Tensor:
            params = (param for members in self._layers.units.values() for param in members)
            return any(failure.name in vars(param) for param in params)
        return type(failure) is RuntimeError and _FORBIDDEN in str(failure)

    def _call(self, number: int, layer: int, note_output: Callable[[int, object], None], run: Callable[[], object]) -> object:
        """A block's whole call, hooks included. Raises LayerError where the caller would run it again in the backward."""
        refuse_call_run_again(self._layers.blocks[number])
        self._enter("forward of", number, layer)
        with saved_tensors_hooks(self._pack, self._unpack):
            output = run()
        note_output(number, output)
        self.place = "forward behind", number
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._enter("backward of", number, layer))  # the layer's backward begins
        return output

    def _enter(self, phase: str, number: int, layer: int) -> None:
        self.place = phase, number
        self._need(layer)

    def _need(self, unit: Unit) -> None:
        if self._resident == unit:
            return
        self._release()
        ticket = self._params.fetch(unit)
        self._resident = unit
        ticket.wait()
        self._param_of = {key_of(param.untyped_storage()): param for param in self._layers.units[unit]}

    def _release(self) -> None:
        if self._resident is not None:
            unit, self._resident, self._param_of = self._resident, None, {}
            self._params.release(unit)

    def _pack(self, tensor: torch.Tensor) -> Any:
        param = self._param_of.get(key_of(tensor.untyped_storage()))
        if param is None or param.dtype != tensor.dtype:
            return self._saved.put(tensor)
        return param, tensor.size(), tensor.stride(), tensor.storage_offset() - param.storage_offset()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, tuple):
            return self._saved.get(packed)
        param, size, stride, offset = packed
        self._need(self._unit_of[id(param)])
        return param.data.as_strided(size, stride, param.data.storage_offset() + offset)


def _unless_interrupted(release: Callable[[], None]) -> Callable[..., None]:
    """`release` as a callback of an exit stack, which an interrupt leaves out: it may have cut the gather of what would be
    released, so that DeepSpeed refused to. The step that it ends then gives up all parameters (`ParamStore.release_all`)."""

    def leave(kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            release()

    return leave


class _Saved:
    """What autograd saves: where it is, as long as a quarter of the memory that was free at first is enough, then in a file."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._in_memory = 0
        self._most = available_bytes() // 4

    def put(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.device.type == "meta":
            return _Kept(tensor)
        self._in_memory += tensor.nbytes
        if self._in_memory <= self._most:
            return _Kept(tensor if tensor.device.type == "cpu" else tensor.cpu(), tensor.device)
        self._in_memory -= tensor.nbytes
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  # closed with the check
        host = tensor.detach().contiguous().cpu()
        offset = self._file.seek(0, 2)
        self._file.write(host.view(-1).view(torch.uint8).numpy().data)
        return _Filed(offset, host.shape, host.dtype, tensor.device)

    def get(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, _Kept):
            return kept.tensor if kept.device is None else kept.tensor.to(kept.device)
        assert self._file is not None
        self._file.seek(kept.offset)
        flat = torch.empty(kept.shape, dtype=kept.dtype)
        self._file.readinto(flat.view(-1).view(torch.uint8).numpy().data)  # type: ignore[attr-defined]
        return flat.to(kept.device)

    def clear(self) -> None:
        """Nothing of the graph is needed any more."""
        self._in_memory = 0
        if self._file is not None:
            self._file.truncate(0)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _Kept:
    def __init__(self, tensor: torch.Tensor, device: torch.device | None = None) -> None:
        self.tensor, self.device = tensor, device


class _Filed:
    def __init__(self, offset: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.offset, self.shape, self.dtype, self.device = offset, shape, dtype, device
