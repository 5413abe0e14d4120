"""Take DeepSpeed's own module hooks off while a schedule runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ds_vertical.compat.engine import DeepSpeedEngine, model_of, module_hooks
from ds_vertical.compat.ops import load
from ds_vertical.compat.zero_params import apply_to_tensors_only, reading_plainly
from ds_vertical.interrupts import Changed
from ds_vertical.model.compiled_blocks import any_compiled, graph_break, refuse_compiled_around
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.tensor_refs import note_alias

Hook = Callable[..., Any]  # a module's, of any of torch's kinds

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _IdentityNode(torch.autograd.Function):
    """A tensor as it is, behind a node of its own in the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # one method: with setup_context torch binds names per call
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def load_identity_node() -> Callable[[torch.Tensor], torch.Tensor]:
    """What puts a node of its own behind a tensor: compiled, or, where that cannot be had, written in Python. That one is also
    for what Python alone knows: tensors of users' own types, and the compiler's."""
    compiled = load.identity_node()

    def behind_node(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is torch.nn.Parameter:
            tensor.detach()  # shows the parameter to `stubs.OutsideWatch`, which neither of the nodes' own calls passes
        plain = type(tensor) in _PLAIN and not tensor.is_nested and not torch.compiler.is_compiling()
        return compiled(tensor) if plain and compiled is not None else _IdentityNode.apply(tensor)

    return behind_node


def _identity_hook(noted: bool, breaks: bool) -> Hook:
    """What stands where one of stock's backward hooks stood: see [Note: joints]. `noted`: its tensor is known as one over the
    memory of the tensor before it. `breaks`: no compiler looks into it."""
    behind_node = load_identity_node()
    apart = (lambda tensor: note_alias(behind_node(tensor))) if noted else behind_node

    def hook(module: torch.nn.Module, inputs: Any, *output: Any) -> Any:
        return apply_to_tensors_only(apart, output[0] if output else inputs)

    return torch.compiler.disable(hook) if breaks else hook


@contextlib.contextmanager
def suspended_hooks(engine: DeepSpeedEngine, layers: LayerMap, *, noted: bool = False) -> Iterator[None]:
    """Take DeepSpeed's own module hooks off for the block; users' hooks stay, and every order is as before afterwards.

    [Note: joints] To hear of the backward pass, stock puts an identity node at every module's positional inputs and at its
    outputs. That decides the order in which autograd adds the gradients of a tensor used more than once, hence the last
    bits (RMSNorm uses its input twice, its caller once more). Such nodes stay: gradients come out with stock's bits. And a list
    among a module's positional arguments is a copy, as in stock, in evaluation too: what the module appends nobody sees.
    `noted`: what they make is told to `tensor_refs`. Where modules are compiled hooks that do nothing stay, see
    [Note: compiled blocks].
    """
    stock, model = module_hooks(engine), model_of(engine)
    breaks = any_compiled(model)
    in_place: dict[int, Hook] = {}
    if breaks:
        refuse_compiled_around(model, layers.blocks)
        in_place |= {handle.id: graph_break for handle in (*stock.forward, *stock.backward)}
    in_place |= dict.fromkeys((handle.id for handle in stock.backward), _identity_hook(noted, breaks))
    hooks = _HooksOfModules((*stock.forward, *stock.backward, *stock.others), in_place)
    with Changed(hooks.put_back, hooks.suspend), reading_plainly(() if breaks else model.modules()):
        yield


class _HooksOfModules:
    """The tables in which torch keeps modules' hooks, as far as some of their handles are in them.

    `in_place`: by the id of a handle, the hook that takes the place of its own while hooks are suspended.
    """

    def __init__(self, handles: Iterable[RemovableHandle | None], in_place: Mapping[int, Hook]) -> None:
        self._in_place = in_place
        self._ids: dict[int, set[int]] = {}  # of the handles, by the id of their table
        self._tables: dict[int, MutableMapping[int, Hook]] = {}
        for handle in handles:
            table: MutableMapping[int, Hook] | None = handle.hooks_dict_ref() if handle is not None else None
            if handle is not None and table is not None:
                self._tables[id(table)] = table
                self._ids.setdefault(id(table), set()).add(handle.id)
        self._kept = {key: list(table.items()) for key, table in self._tables.items()}
        self._as_before: dict[int, list[tuple[int, Hook]]] = {}

    def suspend(self) -> None:
        """Take the handles' hooks off, or replace them."""
        for key, table in self._tables.items():
            for hook_id in self._ids[key]:
                if hook_id in self._in_place:
                    table[hook_id] = self._in_place[hook_id]
                else:
                    table.pop(hook_id, None)

    def put_back(self) -> None:
        """Every hook in its place, but those that somebody has removed meanwhile; what was added since comes last."""
        for key, table in self._tables.items():
            ids, kept = self._ids[key], self._kept[key]
            if key not in self._as_before:  # an interrupt may have emptied it since
                added = [item for item in table.items() if item[0] not in dict(kept)]
                removed = {hook_id for hook_id, _ in kept} - ids - set(table)
                self._as_before[key] = [(hook_id, own) for hook_id, own in kept if hook_id not in removed] + added
            table.clear()
            table.update(self._as_before[key])
