"""`save_pretrained` with full weights. Hugging Face's own call, on a model whose weights the ranks share out, writes tensors of
shape (0,) and says nothing; here it writes what the model is, or raises."""

from __future__ import annotations

import contextlib
import inspect
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType

import torch
from torch import nn

from ds_vertical.compat import engine as compat_engine
from ds_vertical.compat import zero_params
from ds_vertical.compat.engine import DeepSpeedEngine
from ds_vertical.compat.zero_params import ZeroParam
from ds_vertical.distributed import ranks
from ds_vertical.engine.checkpoint.scratch import Scratch
from ds_vertical.engine.zero3.optimizer import VerticalStage3
from ds_vertical.errors import ConfigError
from ds_vertical.io import host

_CALL = "save_pretrained"
_SHARD = "5GB"  # of a file: safetensors copies what goes into one


def save_pretrained(engine: DeepSpeedEngine, save_directory: str | os.PathLike[str], **options: object) -> None:
    """Write the engine's model, or its adapters if PEFT has made these, as the model's own `save_pretrained` would outside any
    engine: full weights in the model's dtype. All ranks call it, between two steps; rank 0 writes. In both arms.

    `options`: go to the model's `save_pretrained`. Weights that half of the free host memory does not hold pass through files
    in the folder that nobody can see. Raises ConfigError (a model without such a call), StorageError, OtherRankError,
    TornStateError; RuntimeError within a step.
    """
    _save(engine, compat_engine.model_of(engine), Path(save_directory), options)


def write_full_weights(engine: DeepSpeedEngine) -> None:
    """Have `save_pretrained` of the engine's model, and of each part of it that has one, write full weights from now on: with
    one rank. With several it raises ConfigError, since scripts call it on rank 0 only, and a gather takes all. A call that is
    given the weights (`state_dict`) is left as it is."""
    for module in compat_engine.model_of(engine).modules():
        if callable(getattr(type(module), _CALL, None)):
            vars(module)[_CALL] = _FullSave(engine, module)


class _FullSave:
    """In the place of a module's `save_pretrained`. A copy of the module has its class's own again."""

    def __init__(self, engine: DeepSpeedEngine, module: nn.Module) -> None:
        self._engine, self._module = weakref.ref(engine), weakref.ref(module)

    def __call__(self, *args: object, **kwargs: object) -> object:
        engine, module = self._engine(), self._module()
        assert module is not None  # it holds this object
        original = _original(module)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        if given.get("state_dict") is not None or not given.get("is_main_process", True):
            return original(*args, **kwargs)
        if engine is None or ranks.world_size() > 1:
            raise ConfigError(
                f"{type(module).__name__}.save_pretrained: its weights are shared out, and this call would write tensors of"
                " shape (0,); write ds_vertical.save_pretrained(engine, folder) on all ranks"
            )
        return _save(engine, module, Path(str(given.pop("save_directory"))), given)

    def __deepcopy__(self, memo: Mapping[int, nn.Module]) -> MethodType:
        module = self._module()
        assert module is not None
        return MethodType(_function(module), memo[id(module)])


def _function(module: nn.Module) -> Callable[..., object]:
    """The class's own `save_pretrained`."""
    return getattr(type(module), _CALL)


def _original(module: nn.Module) -> Callable[..., object]:
    return MethodType(_function(module), module)


def _save(engine: DeepSpeedEngine, module: nn.Module, folder: Path, options: Mapping[str, object]) -> object:
    """Write `module`, all of the engine's model or a part of it. Collective."""
    _check_saves(module)
    optimizer = engine.optimizer
    vertical = optimizer if isinstance(optimizer, VerticalStage3) else None  # None: the stock arm
    turn = contextlib.nullcontext() if vertical is None else vertical.calls.call(_CALL)  # of this frame: see `call_guard`
    with ranks.collective_section(_CALL), turn:
        if vertical is not None:
            with ranks.all_or_none(_CALL):
                vertical.live.check_whole()
        if not compat_engine.partitions_weights(engine):
            return _original(module)(folder, is_main_process=ranks.rank() == 0, **options)
        wanted = _wanted(module, options)
        with ranks.all_or_none(_CALL):
            copied = _copier(module, wanted, folder) if ranks.rank() == 0 else None
        further = () if copied is None else (copied,)
        state = compat_engine.consolidated_weights(engine, wanted, *further, root=module)
        with ranks.all_or_none(_CALL):
            return None if state is None else _original(module)(folder, state_dict=state, **_with_shards(module, options))


def _check_saves(module: nn.Module) -> None:
    call = getattr(type(module), _CALL, None)
    if not callable(call):
        raise ConfigError(
            f"save_pretrained(engine): the model {type(module).__name__} has no save_pretrained of its own; write"
            " engine.save_16bit_model(folder)"
        )
    kinds = inspect.signature(call).parameters.values()
    if not any(each.name == "state_dict" or each.kind is each.VAR_KEYWORD for each in kinds):
        raise ConfigError(
            f"save_pretrained(engine): {type(module).__name__}.save_pretrained takes no state_dict, and so would write tensors"
            " of shape (0,); write engine.save_16bit_model(folder)"
        )


def _with_shards(module: nn.Module, options: Mapping[str, object]) -> dict[str, object]:
    """The options, and files of a size that memory holds where nobody has chosen one."""
    shards = "max_shard_size" in inspect.signature(_function(module)).parameters
    return ({"max_shard_size": _SHARD} if shards else {}) | dict(options)


# ---- which weights


def _wanted(module: nn.Module, options: Mapping[str, object]) -> Callable[[str, ZeroParam], bool]:
    """Which parameters are to be gathered: all, or those of the adapters and what else is trained."""
    if not _saves_adapters(module):
        return lambda name, param: True
    adapters: dict[str, object] = getattr(module, "peft_config", {})
    for name, config in adapters.items():
        if getattr(config, "is_prompt_learning", False):
            raise ConfigError(
                f"save_pretrained(engine): PEFT computes what it saves of prompts ({name!r}) from weights that are shared"
                " out; write engine.save_16bit_model(folder)"
            )
    names = _names_of_adapters(module, list(adapters), options.get("save_embedding_layers", "auto"))
    return lambda name, param: name in names or param.requires_grad


def _saves_adapters(module: nn.Module) -> bool:
    """Whether the model's `save_pretrained` is PEFT's, which writes adapters only. (So does transformers', of a model that was
    given adapters by itself, out of all weights.)"""
    return _function(module).__module__.partition(".")[0] == "peft"


def _names_of_adapters(module: nn.Module, adapters: list[str], save_embedding_layers: object) -> set[str]:
    """The parameters that PEFT picks, as it shows on a state dict of tensors that can be told apart."""
    from peft import get_peft_model_state_dict

    picked: set[str] = set()
    for adapter in adapters:
        marks = {name: torch.empty(0) for name in module.state_dict()}
        names = {id(mark): name for name, mark in marks.items()}
        found = get_peft_model_state_dict(module, dict(marks), adapter, save_embedding_layers=save_embedding_layers)  # type: ignore[arg-type]
        picked |= {names[id(mark)] for mark in found.values() if id(mark) in names}
    return picked


def _copier(
    module: nn.Module, wanted: Callable[[str, ZeroParam], bool], folder: Path
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What makes the copies where memory does not hold all; None: memory holds them. Makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    num_bytes = sum(zero_params.full_numel(p) * p.element_size() for name, p in module.named_parameters() if wanted(name, p))
    if 2 * num_bytes <= host.available_bytes():
        return None
    scratch = Scratch(folder)
    scratch.check_room(num_bytes, _CALL)
    return scratch.copy
