"""Check that all hosts see one `save_dir`: all ranks write into one folder, which rank 0 makes and puts in place."""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path

from ds_vertical.distributed import ranks
from ds_vertical.engine.checkpoint.tag_dir import make_folder
from ds_vertical.errors import CheckpointError


def check_seen(path: Path, save_dir: Path, makers_host: str) -> None:
    """Raise CheckpointError where this rank does not see the new folder or file that rank 0 has just made in `save_dir`."""
    if not path.exists():
        raise CheckpointError(
            f"{save_dir}: host {socket.gethostname()} does not see what rank 0 on host {makers_host} has just written there."
            " All hosts need one folder for a checkpoint; write a path on a file system that they share, such as NFS or Lustre"
        )


def check_at_start(save_dir: Path) -> None:
    """Let all ranks look for a file that rank 0 writes into `save_dir` and removes again. Rank 0 makes the folder where there
    is none. Does nothing where all ranks are on one host. Collective.

    Raises CheckpointError, OtherRankError; on rank 0 OSError.
    """
    if ranks.ranks_on_this_host() == ranks.world_size():
        return
    token, host = ranks.all_gathered((secrets.token_hex(8), socket.gethostname()))[0]
    path, is_first = save_dir / f".ds_vertical.{token}", ranks.rank() == 0
    try:
        with ranks.all_or_none("vertical_schedule.on_signal.save_dir"):
            if is_first:
                make_folder(save_dir)
                path.touch()
        with ranks.all_or_none("vertical_schedule.on_signal.save_dir"):
            check_seen(path, save_dir, host)
    finally:
        if is_first:
            with contextlib.suppress(OSError):
                path.unlink()
