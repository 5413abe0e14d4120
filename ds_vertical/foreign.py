"""Models that were built before, or beside, the configuration of this run: what of them is refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_vertical import compat, storage
from ds_vertical.config import ConfigError


def _offload_sections(config: dict[str, Any]) -> Iterable[dict[str, Any]]:
    zero = config.get("zero_optimization") or {}
    for name in ("offload_param", "offload_optimizer"):
        section = zero.get(name) if isinstance(zero, dict) else None
        if isinstance(section, dict) and section.get("device") == "nvme" and section.get("nvme_path"):
            yield section


def run_folder(config: dict[str, Any]) -> Path | None:
    """The first nvme_path in use; of a prepared configuration it is the run's folder."""
    return next((Path(section["nvme_path"]) for section in _offload_sections(config)), None)


def nvme_paths(config: dict[str, Any]) -> list[str]:
    """Those in use."""
    return [section["nvme_path"] for section in _offload_sections(config)]


def unclaimed_paths(config: dict[str, Any]) -> list[str]:
    """The nvme_paths in use that `prepare` has not replaced by this run's folder."""
    return [s["nvme_path"] for s in _offload_sections(config) if storage.owned(s["nvme_path"]) is None]


def refuse_foreign_model(model: nn.Module, config: dict[str, Any]) -> None:
    """Refuse a model whose parameters zero.Init has already written below another path than this run's."""
    roots = [Path(section["nvme_path"]).resolve() for section in _offload_sections(config)]
    unclaimed = unclaimed_paths(config)
    for param in model.parameters():
        folder = compat.swap_folder(param)
        if folder is None:
            continue
        if unclaimed or not any(folder.resolve().is_relative_to(root) for root in roots):
            raise ConfigError(
                f"zero_optimization.offload_param.nvme_path: the model's parameters lie in {folder}, written by zero.Init"
                " outside the folder of this run; before building the model write\n"
                "    config = ds_vertical.prepare(config)\n"
                "and pass that config to zero.Init (or HfDeepSpeedConfig) and to initialize"
            )


def refuse_late_fp32(model: nn.Module, config: dict[str, Any]) -> None:
    """Refuse an fp32 model that DeepSpeed would partition at initialize as bf16: see patches/0002."""
    on_ssd = ((config.get("zero_optimization") or {}).get("offload_param") or {}).get("device") == "nvme"
    if on_ssd and compat.rounds_late_fp32(config) and not compat.is_partitioned_model(model):
        raise ConfigError(
            "zero_optimization.offload_param.device: DeepSpeed would write this fp32 model to SSD as bf16, since it was not"
            " built under zero.Init (patches/README.md, 0002); build it under\n"
            "    with deepspeed.zero.Init(config_dict_or_path=ds_vertical.prepare(config)):"
        )


def refuse_float64(model: nn.Module) -> None:
    """Refuse to build an engine where torch makes float64, which DeepSpeed's buffers and CPU Adam do not take."""
    if torch.get_default_dtype() is torch.float64:
        raise ConfigError(
            "torch.get_default_dtype(): got torch.float64, of which DeepSpeed would make its buffers; write"
            " torch.set_default_dtype(torch.float32) before ds_vertical.initialize"
        )
    for name, param in model.named_parameters():
        if param.dtype is torch.float64:
            raise ConfigError(
                f"model parameter {name}: got torch.float64, which CPU Adam does not step; call model.float(), or build the"
                " model under deepspeed.zero.Init(config_dict_or_path=ds_vertical.prepare(config))"
            )
