"""The modules and parameters inside a block, which each of its calls asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import is_

from torch import nn

from ds_vertical.model.compiled_blocks import is_compiled
from ds_vertical.model.kept.slots import places_by_id
from ds_vertical.model.state.containers import is_internal

_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_PARAM_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Members:
    """The modules of a block, itself the first, and its parameters, in torch's order. Torch finds them by a walk that takes as
    long as some kernels; whether they are still the same shows in less. `places`: see
    `slots.places_by_id`."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        self.params = list(module.parameters())
        self.places = places_by_id(self.params)
        self._named = list(self._now())

    def are_current(self) -> bool:
        """Whether no module of the block has got, lost or changed a module or a parameter since."""
        now = list(self._now())
        return len(now) == len(self._named) and all(map(is_, now, self._named))

    def _now(self) -> Iterator[object]:
        for module in self.modules:
            if module._modules:
                yield from module._modules.values()
            if module._parameters:
                yield from module._parameters.values()

    @property
    def modes(self) -> tuple[bool, ...]:
        """Of each module: is it in training?"""
        return tuple([module.training for module in self.modules])

    @property
    def trained(self) -> tuple[bool, ...]:
        """Of each parameter: does it require grad?"""
        return tuple([param.requires_grad for param in self.params])

    @property
    def has_compiled(self) -> bool:
        """Whether a module inside the block is compiled; the block itself is not asked."""
        return any(map(is_compiled, self.modules[1:]))

    @property
    def has_forward_hooks(self) -> bool:
        """Whether users' hooks run in the forward of a module inside the block. The block's own do not run in its recompute."""
        return any(map(_has_users, self.modules[1:], [_FORWARD_HOOKS] * len(self.modules)))

    @property
    def has_backward_hooks(self) -> bool:
        """Whether users' hooks run in a module's backward: its modules' and its parameters'."""
        return runs_users_code(self.modules, self.params)


def runs_users_code(modules: Iterable[nn.Module], params: Iterable[nn.Parameter]) -> bool:
    """Whether hooks of users run in the backward of modules and parameters."""
    if any(_has_users(module, _BACKWARD_HOOKS) for module in modules):
        return True
    return any(_has_users(param, _PARAM_HOOKS) for param in params)


def _has_users(owner: object, names: Sequence[str]) -> bool:
    """Whether a user's hook is in one of an owner's tables."""
    for name in names:
        table = getattr(owner, name, None)
        if table and not all(map(is_internal, table.values())):
            return True
    return False
