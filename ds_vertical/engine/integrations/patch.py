"""`ds_vertical.patch()`: scripts that call DeepSpeed by its own names, or through Trainer and Accelerate, take the section.

[Note: a model's own folder] Stock's zero.Init clears the folder that it writes to, so two of them cannot share one. Each
zero.Init claims a run's folder of its own, and `initialize` finds the folder of its model by the model's parameters: the script
has one configuration, with the bare nvme_path, and gives it to both.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ds_vertical import interrupts
from ds_vertical.compat import accelerator, entry_points, zero_params
from ds_vertical.compat import engine as compat_engine
from ds_vertical.compat.engine import DeepSpeedEngine
from ds_vertical.config.file import DeepSpeedJson, read_as_written
from ds_vertical.config.section import SECTION, load_section, with_section_on_top
from ds_vertical.engine import api
from ds_vertical.engine.integrations import accelerate, three_calls, trainer
from ds_vertical.engine.integrations.after_import import when_imported
from ds_vertical.engine.integrations.lightning import refuse_lightning
from ds_vertical.engine.integrations.made_trainers import bridge_trainers
from ds_vertical.errors import ConfigError
from ds_vertical.io.files import make_run_private
from ds_vertical.io.host import keep_cores_for_this_thread
from ds_vertical.io.runs import run_dir

_told: set[str] = set()
_without_optimizer: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()


def patch() -> None:
    """Let this process's calls of `deepspeed.initialize` and `deepspeed.zero.Init` take a configuration with the section, and
    the loops of Trainer, of Accelerate and of the three calls train layer-major by it.

    Call it before the script builds its model. Calling it twice is harmless. Raises DeepSpeedVersionError for a DeepSpeed, and
    RuntimeError for a transformers or an accelerate, whose functions are not those that it replaces.
    """
    if entry_points.is_replaced():
        return
    with interrupts.deferred(firmly=True):  # all of it or nothing
        when_imported("transformers.trainer", lambda: bridge_trainers(trainer.bridge))
        when_imported("accelerate.data_loader", accelerate.see_accelerate_loaders)
        three_calls.see_torch_loaders()
        if accelerator.is_one_memory():
            keep_cores_for_this_thread()  # ahead of the first collective, which may be Accelerate's
        entry_points.replace(_initialize, _config_of_init)


def _initialize(**arguments: Any) -> entry_points.Engines:
    """What `deepspeed.initialize` does in a patched process."""
    args = arguments.get("args")
    given = next((arguments[name] for name in ("config", "config_params") if arguments.get(name) is not None), None)
    config = _readable(getattr(args, "deepspeed_config", None) if given is None else given)
    section = None if config is None else load_section(config)
    if config is None or section is None:
        _tell(f"the configuration has no {SECTION} section: DeepSpeed's own order trains")
        return entry_points.original_initialize(**arguments)
    if section.enabled:
        refuse_lightning()
    model = arguments.get("model")
    if isinstance(model, nn.Module):
        config = _in_folder_of(model, config)
    args, _ = api.single_config(args, arguments.get("config"), arguments.get("config_params"))  # refuses two configurations
    arguments |= {"args": args, "config": config, "config_params": None}
    if arguments.get("optimizer") is None and config.get("optimizer") is None:
        return _initialize_inference(config, arguments)
    if section.enabled and isinstance(model, nn.Module):
        _take_over(model)
    return api.initialize(**arguments)


def _initialize_inference(config: DeepSpeedJson, arguments: Mapping[str, object]) -> entry_points.Engines:
    """An engine that trains nothing, such as that of a reference model: DeepSpeed's own, in a folder of its own."""
    del config[SECTION]
    returned = entry_points.original_initialize(**{**arguments, "config": api.prepare(config)})
    for folder in run_dir.claimed():
        make_run_private(folder)
    _without_optimizer.add(returned[0])
    _tell("an engine without an optimizer is DeepSpeed's own: its forwards read every layer for each batch")
    return returned


def _take_over(model: nn.Module) -> None:
    """Leave the model to the engine that is about to be made, where one without an optimizer has had it: TRL computes reference
    log-probs with such a one ahead of the training. Its hooks would hold on to layers that the schedule gives up."""
    parameters = {id(param) for param in model.parameters()}
    for engine in list(_without_optimizer):
        if any(id(param) in parameters for param in compat_engine.model_of(engine).parameters()):
            compat_engine.take_hooks_off(engine)
            _without_optimizer.discard(engine)
            _tell("the model had an engine without an optimizer: from here on it calls the model through the new one's hooks")


def _config_of_init(given: object) -> object:
    """What `deepspeed.zero.Init` gets for a configuration: see [Note: a model's own folder]."""
    config = _readable(given)
    section = None if config is None else load_section(config)
    if config is None or section is None:
        return given
    if section.enabled:
        refuse_lightning()
    return api.prepare(config)


def _readable(given: object) -> DeepSpeedJson | None:
    """The configuration, with the section on top; None for what nobody can read, of which DeepSpeed tells in its own words.
    Raises ConfigError where both places have a section."""
    if not isinstance(given, dict | str | os.PathLike):
        return None
    try:
        written = read_as_written(given)
    except ConfigError:
        return None
    return with_section_on_top(written)


def _in_folder_of(model: nn.Module, config: DeepSpeedJson) -> DeepSpeedJson:
    """The configuration with the model's own folder in the place of each nvme_path above it, where zero.Init has claimed one.
    Raises ConfigError where several have written the model."""
    folders = sorted(set(_run_folders(model)))
    if len(folders) > 1:
        raise ConfigError(
            f"initialize(model=...): parts of the model were built under {len(folders)} zero.Init contexts, of which each has"
            f" a folder of its own ({', '.join(map(str, folders))}); build the whole model under one deepspeed.zero.Init"
        )
    for section in api.offload_sections(config) if folders else ():
        own = Path(os.path.realpath(section["nvme_path"])) / folders[0].name
        if run_dir.owned(own) is not None:
            section["nvme_path"] = str(own)
    if folders and (several := api.several_paths(config)):
        config[SECTION]["nvme_paths"] = [str(Path(os.path.realpath(path)) / folders[0].name) for path in several]
    return config


def _run_folders(model: nn.Module) -> Iterator[Path]:
    for param in model.parameters():
        written = zero_params.swap_folder(param)
        claimed = None if written is None else run_dir.owned(written)
        if claimed is not None:
            yield claimed.path


def _tell(line: str) -> None:
    """Log a line once in this process."""
    if line not in _told:
        _told.add(line)
        accelerator.log(f"ds_vertical: {line}")
