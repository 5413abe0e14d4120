"""What the hooks of a backward can reach: lists that they fill, counters, objects.

`module_state` surveys what a forward reaches. A hook of the backward need not be among that: what it writes to is looked for
from the hook itself. Two orders of layers fill such a list in two orders, so it is put back, and not compared.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from ds_vertical.model.state.containers import called, is_foreign
from ds_vertical.model.state.survey import Names, StateSlot, survey

_OF_MODULES = "_backward_hooks", "_backward_pre_hooks"
_OF_PARAMETERS = "_backward_hooks", "_post_accumulate_grad_hooks"
_OF_ALL = "_global_backward_hooks", "_global_backward_pre_hooks"


def survey_backward(model: nn.Module) -> tuple[list[StateSlot], list[Names]]:
    """Every place where the user's hooks of modules' and parameters' backward may keep state."""
    return survey(nn.Module(), [], list(_user_hooks(model)))[:2]


def _user_hooks(model: nn.Module) -> Iterator[Any]:
    owners = [(torch_module, _OF_ALL)]
    owners += [(module, _OF_MODULES) for module in model.modules()]
    owners += [(param, _OF_PARAMETERS) for param in model.parameters()]
    for owner, names in owners:
        for hook in (hook for name in names for hook in list((getattr(owner, name, None) or {}).values())):
            if isinstance(hook, types.BuiltinMethodType):  # notes.append, say
                yield partial(hook, hook.__self__)
            elif not is_foreign(next(called(hook), type(hook))):
                yield hook
