"""A checkpoint of stock DeepSpeed, read to go on from: what stock has saved with its optimizer in host memory.

Stock finds state by its place in its own sub-groups, whose parameters the checkpoint names in order. CPU Adam's powers of beta
are those of a new process of stock's. Random states are not in the format. Nothing is unpickled but DeepSpeed's loss scalers.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from ds_vertical.compat import stock_checkpoint, zero_optimizer
from ds_vertical.compat.engine import DeepSpeedEngine
from ds_vertical.compat.stock_checkpoint import StockFile
from ds_vertical.distributed import ranks
from ds_vertical.engine.checkpoint.manifest import RankManifest, TensorEntry
from ds_vertical.engine.checkpoint.manifest_schema import NAME, STATE
from ds_vertical.engine.checkpoint.run_state import LooseEnds, TrainedEngine
from ds_vertical.errors import CheckpointError
from ds_vertical.offload.cpu_adam import Powers

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_NO_CLIENTS = (
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
    *("lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "dp_world_size", "mp_world_size"),
    *("ds_config", "ds_version", "checkpoint_parallel_dimensions", "universal_checkpoint_info", *_COUNTERS),
)


def is_stock(folder: Path) -> bool:
    """Whether the folder of a tag is one of stock's."""
    return not os.path.lexists(folder / NAME) and any(folder.glob("*mp_rank_*_model_states.pt"))


class StockSource:
    """One rank's share of a checkpoint of stock's. `saved`: as a manifest of ours would describe it, without files.

    Raises CheckpointError with the reason where it cannot be resumed here.
    """

    has_random = False

    def __init__(self, engine: TrainedEngine, folder: Path) -> None:
        self._folder, self.path = folder, folder
        model, state = self._files(engine)
        if "param_shapes" not in model or "fp32_flat_groups" not in state:
            raise self._refusal("it is not one of ZeRO stage 3")
        self._model, inner = model, state["optimizer_state_dict"]
        self._flats: dict[str, list[torch.Tensor]] = {"master": list(state["fp32_flat_groups"])}
        states = [inner["state"].get(index, {}) for index in range(len(self._flats["master"]))]
        for kind in STATE[1:]:
            self._flats[kind] = [each.get(kind, torch.empty(0)) for each in states]
        self._frozen: Mapping[str, torch.Tensor] = model.get("frozen_param_fragments") or {}
        self._starts: dict[str, tuple[int, int]] = {}
        self.saved = self._described(engine, state["loss_scaler"], inner["param_groups"], states)
        if len(steps := {each.step for each in self.saved.tensors.values() if each.group is not None}) > 1:
            raise self._refusal(
                f"its sub-groups have taken {min(steps)} and {max(steps)} steps, but a step of the optimizer takes all of them"
            )

    def verify(self) -> None:
        """Stock keeps no checksums."""

    def loose(self) -> LooseEnds:
        """Scheduler, buffers and client state."""
        buffers = {name: self._model["module"][name] for name in self._model["buffer_names"]}
        client_state = {key: value for key, value in self._model.items() if key not in _NO_CLIENTS}
        return {"lr_scheduler": self._model["lr_scheduler"], "random": {}, "buffers": buffers, "client_state": client_state}

    def read(self, name: str, kind: str, target: torch.Tensor, first: int) -> None:
        """Fill `target` (1-d, host memory) with elements of this rank's share from `first` on; weights are cast masters."""
        if kind == "weight" and name in self._frozen:
            target.copy_(self._frozen[name].flatten().narrow(0, first, target.numel()))
            return
        group, start = self._starts[name]
        target.copy_(self._flats["master" if kind == "weight" else kind][group].narrow(0, start + first, target.numel()))

    # ---- what there is

    def _files(self, engine: TrainedEngine) -> tuple[StockFile, StockFile]:
        try:
            return stock_checkpoint.read_stock_files(cast(DeepSpeedEngine, engine), self._folder)
        except pickle.UnpicklingError as error:
            reason = str(error).partition("\n")[0]
            raise self._refusal(f"it holds more than tensors, numbers and strings, and is not unpickled ({reason})") from error
        except Exception as error:  # of many types, by what torch finds in a file
            reason = str(error).partition("\n")[0]
            raise self._refusal(f"this rank's files cannot be read ({type(error).__name__}: {reason})") from error

    def _refusal(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}: a checkpoint of stock DeepSpeed that cannot be resumed here: {reason}. Load it with stock, save"
            " the weights with save_16bit_model and start from those"
        )

    def _described(
        self, engine: TrainedEngine, scaler: object, groups: list[StockFile], states: list[StockFile]
    ) -> RankManifest:
        world_size = int(self._model["dp_world_size"])
        here = dict(engine.module.named_parameters())
        group_of = {index: number for number, group in enumerate(groups) for index in group["params"]}

        def entry(name: str, shape: torch.Size, group: int | None, step: int, kinds: tuple[str, ...]) -> TensorEntry:
            dtype = str(here[name].dtype).removeprefix("torch.") if name in here else "float32"
            share = -(-math.prod(shape) // world_size)
            return TensorEntry(tuple(shape), dtype, share, group, step, dict.fromkeys(kinds, ()))

        tensors: dict[str, TensorEntry] = {}
        for index, shapes in enumerate(self._model["param_shapes"]):
            start, step = 0, int(states[index].get("step", 0))
            for name, shape in shapes.items():
                self._starts[name] = index, start
                tensors[name] = entry(name, shape, group_of.get(index), step, ("weight", *STATE))
                start += tensors[name].numel
            if any(flats[index].numel() < start for flats in self._flats.values()):
                raise self._refusal("its optimizer state was on SSD, and lies in stock's order in files of its own")
        for name, shape in (self._model.get("frozen_param_shapes") or {}).items():
            tensors[name] = entry(name, shape, None, 0, ("weight",) if name in self._frozen else ())
            if name in self._frozen and self._frozen[name].numel() < tensors[name].numel:
                raise self._refusal(f"{name}, which is not trained, was on SSD and is not in it")
        return RankManifest(ranks.rank(), world_size, {}, tensors, {}, self._numbers(engine, scaler, groups))

    def _numbers(self, engine: TrainedEngine, scaler: object, groups: list[StockFile]) -> LooseEnds:
        adam: Any = engine.optimizer.optimizer
        holder: Any = SimpleNamespace(loss_scaler=scaler)
        return {
            "counters": {name: int(self._model[name]) for name in _COUNTERS},
            "loss_scaler": zero_optimizer.loss_scaler_numbers(holder),
            "adam_w_mode": bool(adam.adam_w_mode),  # not in the format
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "powers": asdict(Powers.made_with(tuple(groups[0]["betas"]))),
            "has_scheduler": self._model["lr_scheduler"] is not None,
            "stream_seed": engine.stream_seed,
            "checked_model": engine.self_check.checked_model,
            "checked_state": sorted(engine.self_check.checked_state),
        }
