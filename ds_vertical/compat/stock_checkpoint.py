"""The files of a checkpoint as DeepSpeed itself writes them."""

from __future__ import annotations

from ds_vertical.compat import version  # noqa: F401 - refuses another DeepSpeed before its private names are imported

# isort: split

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import zero_to_fp32

from ds_vertical.compat.zero_params import ZeroParam
from ds_vertical.interrupts import Changed

# ---- DeepSpeed's own format


@dataclass(frozen=True)
class StockGroup:
    """A sub-group as stock makes it, with this rank's state of it. `group`: the number of its group in the torch optimizer;
    `step`: steps taken; `master`, `exp_avg`, `exp_avg_sq`: flat fp32 tensors on the host."""

    params: Sequence[ZeroParam]
    group: int
    step: int
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


@dataclass(frozen=True)
class StockCheckpoint:
    """What this rank saves in DeepSpeed's format.

    `folder`: that of the tag, which exists; `groups`: the state, in stock's sub-groups; `frozen_share`: gives this rank's share
    of a parameter that is not trained, flat; `client_state`: the caller's; `exclude_frozen`: leave frozen parameters out.
    """

    folder: Path
    groups: Sequence[StockGroup]
    frozen_share: Callable[[ZeroParam], torch.Tensor]
    client_state: Mapping[str, Any]
    exclude_frozen: bool


def write_stock_files(engine: DeepSpeedEngine, checkpoint: StockCheckpoint, write: Callable[[Any, str], None]) -> None:
    """Let DeepSpeed write this rank's two files of a checkpoint, as if its groups were the optimizer's sub-groups.

    DeepSpeed calls `write(content, path)` for each file. Parameters must be partitioned. Raises what `write` raises.
    """
    optimizer: Any = engine.optimizer
    folder, groups = checkpoint.folder, checkpoint.groups
    states = {g.master: {"step": g.step, "exp_avg": g.exp_avg, "exp_avg_sq": g.exp_avg_sq} for g in groups}
    layout = {
        "fp16_groups": [list(group.params) for group in groups],
        "sub_group_to_group_id": {number: group.group for number, group in enumerate(groups)},
        "fp32_partitioned_groups_flat": [group.master for group in groups],
        "state_dict": optimizer._rigid_state_dict,
    }
    writer = {
        "checkpoint_engine": SimpleNamespace(save=lambda state_dict, path: write(state_dict, path)),
        "_get_param_fragment_func": checkpoint.frozen_share,
        "_copy_recovery_script": lambda save_path: None,
    }
    with _replaced(optimizer, layout), _replaced(optimizer.optimizer, {"state": states}), _replaced(engine, writer):
        engine._save_checkpoint(str(folder.parent), folder.name, checkpoint.client_state, checkpoint.exclude_frozen)
        engine._save_zero_checkpoint(str(folder.parent), folder.name)


SCRIPTS: Final = ("zero_to_fp32.py", "zero_to_torch.py")


def place_stock_scripts(engine: DeepSpeedEngine, folder: Path) -> None:
    """Copy into `folder` the scripts with which DeepSpeed converts its checkpoints. Only their owner may write to them,
    whatever the umask. Raises OSError."""
    engine._copy_recovery_script(str(folder))
    for script in map(folder.joinpath, SCRIPTS):
        if script.is_file():
            script.chmod(script.stat().st_mode & 0o755)


StockFile = dict[str, Any]  # what torch.load gives of one of DeepSpeed's files, or of a part of it


def read_stock_files(engine: DeepSpeedEngine, folder: Path) -> tuple[StockFile, StockFile]:
    """This rank's files of model and optimizer in a checkpoint of DeepSpeed's, mapped: they take memory as they are used. Of
    what is no tensor, number or string they may hold DeepSpeed's loss scalers only. Raises OSError, pickle.UnpicklingError and
    what torch raises of a damaged file."""
    names = engine._get_ckpt_name(str(folder.parent), folder.name), engine._get_zero_ckpt_name(str(folder.parent), folder.name)
    with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum]):
        model, state = (torch.load(name, map_location="cpu", mmap=True, weights_only=True) for name in names)
    return model, state["optimizer_state_dict"]


# ---- DeepSpeed's own reader of fp32 weights


def let_stock_read(is_ours: Callable[[Path], bool], read: Callable[[Path, bool], dict[str, object]]) -> None:
    """Have `deepspeed.utils.zero_to_fp32` in this process read a checkpoint's folder for which `is_ours` is true by
    `read(folder, exclude_frozen_parameters)`: a state dict of tensors that `contiguous()` gives. All its functions go through
    the one that is replaced, whatever names a script has imported. Harmless when called twice."""
    stock = zero_to_fp32._get_fp32_state_dict_from_zero_checkpoint
    if getattr(stock, "reads_ours", False):
        return

    def state_dict(ds_checkpoint_dir: str, exclude_frozen_parameters: bool) -> object:
        folder = Path(ds_checkpoint_dir)
        return (
            read(folder, exclude_frozen_parameters) if is_ours(folder) else stock(ds_checkpoint_dir, exclude_frozen_parameters)
        )

    vars(state_dict)["reads_ours"] = True
    setattr(zero_to_fp32, stock.__name__, state_dict)


def _replaced(owner: object, values: Mapping[str, object]) -> Changed:
    """Within the block these attributes of the object itself have these values."""
    own = vars(owner)
    before = {name: own[name] for name in values if name in own}

    def put_back() -> None:
        for name in values:
            own.pop(name, None)  # an interrupt may have come ahead of the last time's end
        own.update(before)

    return Changed(put_back, lambda: own.update(values))
