"""A checkpoint in DeepSpeed's own format, which stock loads with parameters and optimizer in host memory.

Stock finds state by the place in its own sub-groups, so chunks along layers are put together again in that order. The flat
tensors are mapped from files that nobody can see and that are gone with them: what does not fit into host memory goes to the
disk of the checkpoint. CPU Adam's powers of beta have no place in the format: stock takes them anew from pow().
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from ds_vertical.compat import stock_checkpoint, zero_optimizer, zero_params
from ds_vertical.compat.engine import DeepSpeedEngine
from ds_vertical.compat.stock_checkpoint import StockCheckpoint, StockGroup
from ds_vertical.compat.zero_params import ZeroParam
from ds_vertical.distributed import ranks
from ds_vertical.engine.checkpoint import manifest
from ds_vertical.engine.checkpoint.leftovers import PORTABLE, mark_portable
from ds_vertical.engine.checkpoint.run_state import TrainedEngine
from ds_vertical.engine.checkpoint.save import new_folder
from ds_vertical.engine.checkpoint.scratch import Scratch
from ds_vertical.engine.checkpoint.shared_dir import KEY
from ds_vertical.engine.checkpoint.tag_dir import TagFolder, check_tag, sync_file
from ds_vertical.engine.zero3.optimizer import VerticalStage3
from ds_vertical.errors import CheckpointError, StorageError
from ds_vertical.io import files
from ds_vertical.io.runs import held_folders, stripes
from ds_vertical.io.runs.run_dir import fail
from ds_vertical.offload.chunking import FP32_BYTES
from ds_vertical.offload.param_shards import Shard
from ds_vertical.offload.state_files import KINDS


def save_stock(
    engine: TrainedEngine, save_dir: Path, tag: str, client_state: Mapping[str, object], save_latest: bool, exclude_frozen: bool
) -> Path:
    """Save as `<save_dir>/<tag>` for stock; returns that. Atomic and collective as `save.save`.

    Needs twice the checkpoint's size on its disk until it is complete. Raises CheckpointError (tag), StorageError or OSError
    (files), OtherRankError, TornStateError; what pickle raises of `client_state`.
    """
    is_apart = engine.use_node_local_storage() and ranks.ranks_on_this_host() < ranks.world_size()
    with ranks.all_or_none("save_checkpoint"):
        check_tag(tag, save_dir)
        scripts = () if manifest.complete_tags(save_dir) else stock_checkpoint.SCRIPTS  # the one that reads those stays
        if is_apart:
            raise CheckpointError(
                f"save_checkpoint(portable=True) with {KEY}: a checkpoint for stock DeepSpeed has all ranks' files in one"
                " folder; write false there, and a save_dir that all hosts share"
            )
    with ranks.all_or_none("save_checkpoint"):
        engine.optimizer.flush()
        engine.optimizer.stepper.make_whole()
    with new_folder(save_dir, tag, save_latest, scripts) as (folder, _):
        with ranks.all_or_none("save_checkpoint"):
            if ranks.rank() == 0:
                _mark(folder)
        zero_optimizer.partition_all(engine.optimizer)  # only shards of parameters, until all ranks have written theirs
        with ranks.all_or_none("save_checkpoint", partial(zero_optimizer.gather_persistent, engine.optimizer)):
            _write(engine, folder.beside, client_state, exclude_frozen)
            if ranks.rank() == 0 and scripts:
                stock_checkpoint.place_stock_scripts(cast(DeepSpeedEngine, engine), save_dir)
    return folder.path


def _mark(folder: TagFolder) -> None:
    """Say of the folder beside that what comes into it is ours. Raises StorageError."""
    with files.naming(folder.beside / PORTABLE, "write"):
        mark_portable(folder.beside, folder.run)


def _write(engine: TrainedEngine, folder: Path, client_state: Mapping[str, object], exclude_frozen: bool) -> None:
    """This rank's files, in the folder."""
    frozen = {} if exclude_frozen else _frozen_on_ssd(engine)
    scratch = Scratch(folder)
    try:
        scratch.check_room(
            _num_bytes(engine.optimizer) + sum(shard.num_bytes for shard in frozen.values()), "a portable checkpoint"
        )
        groups = _gather(engine.optimizer, scratch)
        shares = {key: _share(shard, scratch) for key, shard in frozen.items()}

        def share_of(param: ZeroParam) -> torch.Tensor:
            found = shares.get(id(param))
            return zero_params.shard(param).detach().to("cpu", copy=True) if found is None else found

        checkpoint = StockCheckpoint(folder, groups, share_of, client_state, exclude_frozen)
        stock_checkpoint.write_stock_files(cast(DeepSpeedEngine, engine), checkpoint, _save)
    except OSError as error:
        raise fail(error.filename or folder, "save", error, "free space there or save to another folder") from error


def _save(content: object, path: str) -> None:
    try:
        torch.save(content, path)
    except RuntimeError as error:  # what torch makes of a failed write, without the reason
        reason = str(error).partition("\n")[0]
        raise StorageError(f"{path}: write: {reason}; free space there or save to another folder") from error
    os.chmod(path, 0o600)
    sync_file(Path(path))


# ---- state


def _num_bytes(optimizer: VerticalStage3) -> int:
    """Of this rank's masters and moments."""
    numel = sum(param.partition_numel() for params in optimizer.stock_groups for param in params)
    return len(KINDS) * FP32_BYTES * numel


def _gather(optimizer: VerticalStage3, scratch: Scratch) -> list[StockGroup]:
    """All state of this rank, in stock's sub-groups."""
    groups = [_group(optimizer, params, scratch) for params in optimizer.stock_groups]
    places = {id(param): (group, start) for group in groups for param, start in _starts(group.params)}

    def targets(param: ZeroParam, first: int, count: int) -> list[torch.Tensor]:
        group, start = places[id(param)]
        return [getattr(group, kind).narrow(0, start + first, count) for kind in KINDS]

    stepper = optimizer.stepper
    for index, part, paths in stepper.generations.on_ssd():
        for param, first, in_part, count in stepper.chunks[index].overlaps(part):
            for target, path in zip(targets(param, first, count), paths, strict=True):
                _read(path, (part.start + in_part) * FP32_BYTES, target)
    for chunk in stepper.chunks:
        if chunk.resident is None:
            continue
        for param, start in _starts(chunk.params):
            count = param.partition_numel()
            for target, flat in zip(targets(param, 0, count), chunk.resident(), strict=True):
                target.copy_(flat.detach().narrow(0, start, count))
    return groups


def _group(optimizer: VerticalStage3, params: Sequence[ZeroParam], scratch: Scratch) -> StockGroup:
    """One of stock's sub-groups, whose state is to be filled in."""
    chunk = next(index for index, members in enumerate(optimizer.fp16_groups) if any(each is params[0] for each in members))
    step = int(zero_optimizer.moments(optimizer, chunk)["step"])
    flats = [scratch.tensor(sum(param.partition_numel() for param in params)) for _ in KINDS]
    return StockGroup(params, zero_optimizer.group_of(optimizer, chunk), step, *flats)


def _starts(params: Sequence[ZeroParam]) -> Iterator[tuple[ZeroParam, int]]:
    """Each parameter with the first element of its share, where shares are neighbours."""
    start = 0
    for param in params:
        yield param, start
        start += param.partition_numel()


# ---- weights that are not trained


def _frozen_on_ssd(engine: TrainedEngine) -> dict[int, Shard]:
    """By id(param); those that are trained come from their masters."""
    return {id(shard.param): shard for shard in engine.param_store.files.shards() if not engine.optimizer.steps(shard.param)}


def _share(shard: Shard, scratch: Scratch) -> torch.Tensor:
    target = scratch.tensor(shard.numel, shard.param.dtype)
    _read(Path(shard.path), 0, target)
    return target


def _read(path: Path, offset: int, target: torch.Tensor) -> None:
    """Fill a tensor (contiguous, in host memory) with a file's bytes from `offset` on. Raises OSError."""
    array: Any = target.view(torch.uint8).numpy()
    whole = memoryview(array)
    for span in stripes.stripes_of(path, offset, len(whole)):
        view, place = whole[span.start : span.start + span.num_bytes], span.offset
        with os.fdopen(held_folders.open_file(span.path), "rb", buffering=0) as file:
            while view:
                count = os.preadv(file.fileno(), [view], place)
                if not count:
                    raise OSError(errno.EIO, f"the file ends at byte {place}", span.path)
                view, place = view[count:], place + count
