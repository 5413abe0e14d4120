"""The files of a checkpoint as DeepSpeed itself writes them."""

from __future__ import annotations

from ds_vertical.compat import version  # noqa: F401 - refuses another DeepSpeed before its private names are imported

# isort: split

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ds_vertical.compat.zero_params import ZeroParam

# ---- DeepSpeed's own format


@dataclass(frozen=True)
class StockGroup:
    """A sub-group as stock makes them, with this rank's state of it, flat fp32. `group`: of the torch optimizer."""

    params: Sequence[ZeroParam]
    group: int
    step: int
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


def write_stock_files(
    engine: Any,
    folder: Path,
    groups: Sequence[StockGroup],
    share_of: Callable[[ZeroParam], torch.Tensor],
    client_state: Mapping[str, Any],
    exclude_frozen: bool,
    write: Callable[[Any, str], None],
) -> None:
    """Let DeepSpeed write this rank's two files of a checkpoint, as if `groups` were the optimizer's sub-groups.

    `folder`: of the tag; `share_of`: this rank's share of a parameter that is not trained, flat; `write(content, path)`: one of
    the files. Parameters must be partitioned.
    """
    optimizer = engine.optimizer
    states = {g.master: {"step": g.step, "exp_avg": g.exp_avg, "exp_avg_sq": g.exp_avg_sq} for g in groups}
    layout = {
        "fp16_groups": [list(group.params) for group in groups],
        "sub_group_to_group_id": {number: group.group for number, group in enumerate(groups)},
        "fp32_partitioned_groups_flat": [group.master for group in groups],
        "state_dict": optimizer._rigid_state_dict,
    }
    writer = {
        "checkpoint_engine": SimpleNamespace(save=lambda state_dict, path: write(state_dict, path)),
        "_get_param_fragment_func": share_of,
        "_copy_recovery_script": lambda save_path: None,
    }
    with _holding(optimizer, layout), _holding(optimizer.optimizer, {"state": states}), _holding(engine, writer):
        engine._save_checkpoint(str(folder.parent), folder.name, client_state, exclude_frozen)
        engine._save_zero_checkpoint(str(folder.parent), folder.name)


def place_stock_scripts(engine: Any, folder: Path) -> None:
    """Copy DeepSpeed's scripts that convert its checkpoints into a folder of such; to be changed by others under no umask."""
    engine._copy_recovery_script(str(folder))
    for script in (folder / "zero_to_fp32.py", folder / "zero_to_torch.py"):
        if script.is_file():
            script.chmod(script.stat().st_mode & 0o755)


@contextlib.contextmanager
def _holding(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Within the block the object's own attributes are these."""
    own = vars(owner)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            del own[name]
        own.update(before)
