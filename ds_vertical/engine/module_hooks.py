"""Take DeepSpeed's own module hooks off while a schedule runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ds_vertical.compat.ops import load
from ds_vertical.compat.zero_params import apply_to_tensors_only
from ds_vertical.interrupts import Changed
from ds_vertical.model.compiled_blocks import any_compiled, graph_break, refuse_compiled_around
from ds_vertical.model.tensor_refs import note_alias

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Joint(torch.autograd.Function):
    """A tensor as it is, behind a node of its own in the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # one method: with setup_context torch binds names per call
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def load_joint() -> Callable[[torch.Tensor], torch.Tensor]:
    """What puts a node of its own behind a tensor: compiled, or, where that cannot be had, written in Python. That one is also
    for what Python alone knows: tensors of users' own types, and the compiler's."""
    compiled = load.joint()

    def joint(tensor: torch.Tensor) -> torch.Tensor:
        plain = type(tensor) in _PLAIN and not tensor.is_nested and not torch.compiler.is_compiling()
        return compiled(tensor) if plain and compiled is not None else _Joint.apply(tensor)

    return joint


def _joint_hook(noted: bool, breaks: bool) -> Callable[..., Any]:
    """What stands where one of stock's backward hooks stood: see [Note: joints]. `noted`: its tensor is known as one over the
    memory of the tensor before it. `breaks`: no compiler looks into it."""
    joint = load_joint()
    apart = (lambda tensor: note_alias(joint(tensor))) if noted else joint

    def hook(module: torch.nn.Module, inputs: Any, *output: Any) -> Any:
        return apply_to_tensors_only(apart, output[0] if output else inputs)

    return torch.compiler.disable(hook) if breaks else hook


@contextlib.contextmanager
def suspended_hooks(engine: Any, *, noted: bool = False) -> Iterator[None]:
    """Take DeepSpeed's own module hooks off for the block; users' hooks stay, and every order is as before afterwards.

    [Note: joints] To hear of the backward pass, stock puts an identity node at every module's positional inputs and at its
    outputs. That decides the order in which autograd adds the gradients of a tensor used more than once, hence the last
    bits (RMSNorm uses its input twice, its caller once more). Such nodes stay: gradients come out with stock's bits. And a list
    among a module's positional arguments is a copy, as in stock, in evaluation too: what the module appends nobody sees.
    `noted`: what they make is told to `tensor_refs`. Where modules are compiled hooks that do nothing stay, see
    [Note: compiled blocks].
    """
    offload = engine.optimizer.parameter_offload
    handles: list[Any] = [*offload.forward_hooks, *offload.backward_hooks, offload.fwd_pre_hook]
    handles += [engine.module_forward_pre_hook, engine.module_forward_post_hook]
    breaks = any_compiled(engine.module)
    in_place: dict[int, Callable[..., Any]] = {}
    if breaks:
        refuse_compiled_around(engine.module, engine.layers.blocks)
        in_place |= {handle.id: graph_break for handle in list[Any]([*offload.forward_hooks, *offload.backward_hooks])}
    in_place |= dict.fromkeys((handle.id for handle in list[Any](offload.backward_hooks)), _joint_hook(noted, breaks))
    ids: dict[int, set[int]] = {}
    hooks: dict[int, Any] = {}
    for handle in handles:
        owner: Any = handle.hooks_dict_ref() if handle is not None else None
        if handle is not None and owner is not None:
            hooks[id(owner)] = owner
            ids.setdefault(id(owner), set()).add(handle.id)
    kept = {key: list(owner.items()) for key, owner in hooks.items()}
    as_before: dict[int, list[tuple[int, Any]]] = {}

    def suspend() -> None:
        for key, owner in hooks.items():
            for hook_id in ids[key]:
                if hook_id in in_place:
                    owner[hook_id] = in_place[hook_id]
                else:
                    owner.pop(hook_id, None)

    def put_back() -> None:
        for key, owner in hooks.items():
            if key not in as_before:  # an interrupt may have emptied it since
                added = [item for item in owner.items() if item[0] not in dict(kept[key])]
                removed = {hook_id for hook_id, _ in kept[key]} - ids[key] - set(owner)
                as_before[key] = [(hook_id, own) for hook_id, own in kept[key] if hook_id not in removed] + added
            owner.clear()
            owner.update(as_before[key])

    with Changed(put_back, suspend):
        yield
