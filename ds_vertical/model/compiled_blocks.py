"""Blocks that `torch.compile` has compiled.

[Note: compiled blocks] A compiled block runs the same kernels in layer-major order as under stock. Its forward is compiled; the
stub that hands its call to the schedule is not. Under stock, DeepSpeed's hooks at the modules inside a block end the compiler's
graphs there, and which operations share a kernel decides the last bits. So hooks that do nothing stand at the same modules
here.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
from torch import nn

from ds_vertical.errors import LayerError
from ds_vertical.interrupts import Changed
from ds_vertical.model.layers import Block

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REMEDY = (
    "compile the blocks instead, before ds_vertical.initialize:"
    " `for block in model.layers: block.compile()`, with the model's own stack of blocks"
)


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module go through `torch.compile`: by `module.compile()`, or wrapped."""
    forward = module.__dict__.get("forward")
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        or hasattr(forward, "_torchdynamo_orig_callable")
    )


def any_compiled(model: nn.Module) -> bool:
    """Whether calls of any module of the model go through `torch.compile`."""
    return any(map(is_compiled, model.modules()))


def refuse_compiled_around(model: nn.Module, blocks: tuple[Block, ...]) -> None:
    """Refuse a module that is compiled together with blocks inside it: a forward could not stop at these. Raises LayerError."""
    above = {""} | {path.rsplit(".", count)[0] for path in (b.path for b in blocks) for count in range(1, path.count(".") + 1)}
    for path, module in model.named_modules():
        if path in above and is_compiled(module):
            name = f"model.{path}" if path else "the model"
            raise LayerError(f"{name} is compiled as a whole (torch.compile); layer-major order stops at each block: {_REMEDY}")


def refuse_engine_compile() -> NoReturn:
    """Raises RuntimeError, which says why `engine.compile()` is not available, and what to compile instead."""
    raise RuntimeError(
        "engine.compile() is not available with vertical_schedule: it compiles the model as a whole, and layer-major order"
        " stops at each block; leave torch_compile out of TrainingArguments, or the dynamo backend out of Accelerate's"
        f" configuration, where they have called it; {_REMEDY}, or set vertical_schedule.enabled to false"
    )


def raw_forward(module: nn.Module) -> Callable[..., object]:
    """A block's forward without its hooks, compiled where the block is."""
    compiled, own = module._compiled_call_impl, module.__dict__.get("forward")
    if compiled is None:
        return module.forward

    def run(*args: object, **kwargs: object) -> object:
        with _bare(module, own):
            return compiled(*args, **kwargs)

    return run


@contextlib.contextmanager
def _bare(module: nn.Module, own: Callable[..., object] | None) -> Iterator[None]:
    """The module without hooks, and with its own forward (None: that of its class), which its compiled call looks for."""
    kept = {name: module.__dict__[name] for name in (*_HOOKS, "forward") if name in module.__dict__}

    def strip() -> None:
        for name in _HOOKS:
            object.__setattr__(module, name, OrderedDict())
        module.__dict__.pop("forward", None)
        if own is not None:
            object.__setattr__(module, "forward", own)

    def put_back() -> None:
        for name, value in kept.items():
            object.__setattr__(module, name, value)

    with Changed(put_back, strip):
        yield


@torch.compiler.disable
def graph_break(*_: object) -> None:
    """A hook that ends the compiler's graph, as stock's do: see [Note: compiled blocks]."""
