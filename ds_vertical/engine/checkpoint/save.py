"""Saving a run with state on SSD: `save` writes a folder that `load.load` continues from, bit for bit.

Files of state and of parameters are linked into the folder where it is on their file system (`state_files`, [Note: frozen
files]); with several SSDs those of the others on their own (`parts`, [Note: parts]). Otherwise they are copied. What rests in
host memory is written out.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ds_vertical.compat import zero_optimizer, zero_params
from ds_vertical.compat.zero_params import ZeroParam
from ds_vertical.distributed import ranks
from ds_vertical.engine.checkpoint import manifest, parts, run_state
from ds_vertical.engine.checkpoint.manifest import FileRange, RankManifest, SavedFile, TensorEntry
from ds_vertical.engine.checkpoint.manifest_schema import SIGNPOST
from ds_vertical.engine.checkpoint.shared_dir import Place, Places, check_all_see, find_places, mend
from ds_vertical.engine.checkpoint.tag_dir import TagFolder, check_tag, sync_file, sync_folder, write_synced
from ds_vertical.errors import CheckpointError, StorageError
from ds_vertical.interrupts import deferred
from ds_vertical.io import files
from ds_vertical.io.checksums import LARGEST_READ, Piece, checksum
from ds_vertical.io.disk_errors import remedy
from ds_vertical.io.runs import held_folders, stripes
from ds_vertical.io.runs.run_dir import fail, owned
from ds_vertical.offload.chunking import FP32_BYTES
from ds_vertical.offload.state_files import KINDS

SCRIPT = Path(__file__).with_name("zero_to_fp32.py")  # travels with checkpoints: the way out of them without us
MEMORY, LOOSE = "memory.bin", "loose.pt"  # tensors that rest in host memory; scheduler, random states, buffers, client state
POINTS = (
    "folder made",
    "memory written",
    "files shared",
    "files set aside",
    "rank complete",
    "folder complete",
    "switched",
    "latest written",
)


def reach(point: str) -> None:
    """The save has come to one of POINTS; nothing happens here, but tests end a save."""
    assert point in POINTS


def save(
    engine: run_state.TrainedEngine,
    save_dir: Path,
    tag: str,
    client_state: Mapping[str, object],
    save_latest: bool,
    exclude_frozen: bool,
) -> Path:
    """Save the whole state as `<save_dir>/<tag>`; returns that. All ranks succeed or raise, and an earlier checkpoint of the
    same tag stays loadable until the new one is complete. Collective.

    Raises CheckpointError (tag, client state), StorageError or OSError (files), OtherRankError, TornStateError.
    """
    with ranks.all_or_none("save_checkpoint"):
        check_tag(tag, save_dir)
        _check_loadable("client_state", client_state)
    with ranks.all_or_none("save_checkpoint"):
        engine.optimizer.flush()
        engine.optimizer.stepper.make_whole()
    with new_folder(save_dir, tag, save_latest, (SCRIPT.name,), engine.use_node_local_storage()) as (folder, places):
        with ranks.all_or_none("save_checkpoint"):
            place = manifest.rank_folder(folder.beside, ranks.rank())
            data = RankSave(engine, place, exclude_frozen).write(client_state)
        every = ranks.all_gathered((len(data), checksum(data)))
        with ranks.all_or_none("save_checkpoint"):
            if places.is_first:
                hosts = places.every if places.are_several else None
                write_synced(folder.beside / SIGNPOST, _saved_as_bytes({}))
                write_synced(folder.beside / manifest.NAME, manifest.folder_manifest(tag, every, hosts))
                _place_script(folder)
    return folder.path


@contextlib.contextmanager
def new_folder(
    save_dir: Path, tag: str, save_latest: bool, scripts: Sequence[str], node_local: bool = False
) -> Iterator[tuple[TagFolder, Places]]:
    """A folder for all ranks to write to (`beside`), which takes the tag's place at the block's end. All ranks leave the block,
    or all raise, and then an earlier checkpoint of the tag is as it was; the block itself must agree likewise. Collective.
    `scripts`: names of those that the block puts among the tags. `node_local`: hosts that do not share `save_dir` have a folder
    each.

    Raises CheckpointError, StorageError, OtherRankError.
    """
    asked = ranks.all_gathered((str(save_dir), tag, secrets.token_hex(4), socket.gethostname()))
    if any(other[:2] != asked[0][:2] for other in asked):
        raise CheckpointError(f"save_checkpoint: the ranks do not agree on folder and tag: {sorted({a[:2] for a in asked})}")
    with ranks.all_or_none("save_checkpoint"):
        _refuse_runs_own(save_dir)
    folder, places = TagFolder(save_dir, tag, asked[0][2]), _places(save_dir, asked[0][3], node_local)
    try:
        with ranks.all_or_none("save_checkpoint"):
            if places.is_first:
                folder.make([*scripts, *([manifest.LATEST] if save_latest else [])])
            reach("folder made")
        check_all_see(folder.beside, save_dir, "save_checkpoint", places.own)
        yield folder, places
        with ranks.all_or_none("save_checkpoint"):
            if places.is_first:
                reach("folder complete")
                folder.switch(keep=places.are_several)
                reach("switched")
    except BaseException:
        if places.is_first:
            folder.discard()
        raise
    with ranks.all_or_none("save_checkpoint"):
        if places.is_first:
            folder.settle()
            if save_latest:
                folder.write_latest()
        reach("latest written")


def _refuse_runs_own(save_dir: Path) -> None:
    if (run := owned(save_dir)) is not None:
        raise CheckpointError(
            f"save_checkpoint: {save_dir} lies in the folder of this run, {run.path}, which is deleted with all in it when"
            f" the run ends; save beside it, for example to {run.path.parent / 'checkpoints'}"
        )


def _places(save_dir: Path, host: str, node_local: bool) -> Places:
    """Who makes the folders. `host`: rank 0's. Collective."""
    if node_local and ranks.ranks_on_this_host() < ranks.world_size():
        places = find_places(save_dir, "save_checkpoint")
        if places.are_several:
            mend(save_dir)
        return places
    return Places((Place(host, tuple(range(ranks.world_size()))),), ranks.rank())


def _place_script(folder: TagFolder) -> None:
    """Beside the tags, where DeepSpeed puts its own; a file that is there already is not written again."""
    data, there = SCRIPT.read_bytes(), folder.path.with_name(SCRIPT.name)
    if not there.is_file() or there.read_bytes() != data:
        folder.place(SCRIPT.name, data, f"copy {SCRIPT} there by hand, and save again", mode=0o700)


class RankSave:
    """One rank's share of a save, into `folder`."""

    def __init__(self, engine: run_state.TrainedEngine, folder: Path, exclude_frozen: bool) -> None:
        self._exclude_frozen = exclude_frozen
        self._engine = engine
        self._optimizer = engine.optimizer
        self._generations = engine.optimizer.stepper.generations
        self._folder = folder
        self._names = {id(param): name for name, param in engine.module.named_parameters()}
        self._sources: dict[Path, str] = {}  # files of the run -> names in the checkpoint
        self._wholes: dict[Path, Path] = {}  # files of the run -> the one of which they are, where it lies on several SSDs
        self._wanted: dict[Path, list[tuple[int, int]]] = {}  # [start, end) of each
        self._places: dict[int, dict[str, list[FileRange]]] = {}  # by id(param), by kind
        self._memory: list[torch.Tensor] = []  # shares that rest in host memory or on the device, as they lie in MEMORY
        self._memory_bytes = 0
        self._tensors: dict[str, TensorEntry] = {}

    def write(self, client_state: Mapping[str, object]) -> bytes:
        """Everything but the folder's manifest; returns the rank's own."""
        self._find_state()
        self._find_weights()
        self._describe()
        try:
            self._folder.mkdir(mode=0o700)
            os.chmod(self._folder, 0o700)  # whatever the umask takes away
            self._check_room()
            saved = self._write_memory(client_state)
            reach("memory written")
            saved |= self._write_files()
            data = self._manifest(saved).to_json()
            write_synced(self._folder / manifest.NAME, data)
            for place in parts.places_of(self._folder):
                for folder in (place, place.parent, place.parent.parent):
                    sync_folder(folder)
            sync_folder(self._folder)
        except OSError as error:
            raise fail(error.filename or self._folder, "save", error, remedy(error.errno)) from error
        reach("rank complete")
        return data

    # ---- what there is

    def _find_state(self) -> None:
        sets: dict[int, list[Sequence[Path]]] = {}
        chunks = self._optimizer.stepper.chunks
        for index, part, paths in self._generations.on_ssd():
            known = sets.setdefault(index, [])
            if paths not in known:
                known.append(paths)
            for kind, extent in zip(KINDS, chunks[index].extents(part, paths), strict=True):
                name = f"chunk{index}.{kind}.{known.index(paths)}"
                self._want(extent.path, name, extent.offset, extent.num_bytes)
                for param, _, in_part, count in chunks[index].overlaps(part):
                    start = (part.start + in_part) * FP32_BYTES
                    self._place_file(param, kind, (extent.path, name, start, count * FP32_BYTES))
        for chunk in chunks:
            if chunk.resident is not None:
                for kind, flat in zip(KINDS, chunk.resident(), strict=True):
                    for param, share in zip(chunk.params, flat.narrow(0, 0, chunk.numel).split(list(chunk.sizes)), strict=True):
                        self._remember(param, kind, share)

    def _find_weights(self) -> None:
        on_ssd = {id(shard.param): shard for shard in self._engine.param_store.files.shards()}
        for number, param in enumerate(self._engine.module.parameters()):
            if self._exclude_frozen and not (param.requires_grad or self._optimizer.steps(param)):
                continue
            shard = on_ssd.get(id(param))
            if shard is None:
                self._remember(param, "weight", zero_params.shard(param))
            else:
                name, path = f"weight{number}", Path(shard.path)
                self._want(path, name, 0, shard.num_bytes)
                self._place_file(param, "weight", (path, name, 0, shard.numel * param.element_size()))

    def _want(self, path: Path, name: str, start: int, num_bytes: int) -> None:
        """These bytes of a file belong to the checkpoint."""
        for span in stripes.stripes_of(path, start, num_bytes):
            each = Path(span.path)
            self._sources.setdefault(each, _name_of(name, path, span))
            self._wholes[each] = path
            self._wanted.setdefault(each, []).append((span.offset, span.offset + span.num_bytes))

    def _place_file(self, param: ZeroParam, kind: str, found: tuple[Path, str, int, int]) -> None:
        """A parameter's tensor has bytes of a file: its path, its name in the checkpoint, the first byte, how many."""
        path, name, start, num_bytes = found
        for span in stripes.stripes_of(path, start, num_bytes):
            self._place(param, kind, FileRange(_name_of(name, path, span), span.offset, span.num_bytes))

    def _place(self, param: ZeroParam, kind: str, found: FileRange) -> None:
        ranges = self._places.setdefault(id(param), {}).setdefault(kind, [])
        last = ranges[-1] if ranges else None
        if last is not None and last.file == found.file and last.offset + last.num_bytes == found.offset:
            ranges[-1] = FileRange(last.file, last.offset, last.num_bytes + found.num_bytes)
        else:
            ranges.append(found)

    def _remember(self, param: ZeroParam, kind: str, share: torch.Tensor) -> None:
        self._place(param, kind, FileRange(MEMORY, self._memory_bytes, share.nbytes))
        self._memory.append(share.detach())
        self._memory_bytes += share.nbytes

    def _describe(self) -> None:
        optimizer = self._optimizer
        group_of: dict[int, tuple[int, int]] = {}
        for index, params in enumerate(optimizer.fp16_groups):
            entry = zero_optimizer.group_of(optimizer, index), int(zero_optimizer.moments(optimizer, index)["step"])
            group_of |= {id(param): entry for param in params}
        for name, param in dict[str, ZeroParam](self._engine.module.named_parameters()).items():
            group, step = group_of.get(id(param), (None, 0))
            places = {kind: tuple(ranges) for kind, ranges in self._places.get(id(param), {}).items()}
            shape, dtype = zero_params.full_shape(param), str(param.dtype).removeprefix("torch.")
            self._tensors[name] = TensorEntry(shape, dtype, param.partition_numel(), group, step, places)

    # ---- files

    def _write_memory(self, client_state: Mapping[str, object]) -> dict[str, SavedFile]:
        loose = run_state.loose_ends(self._engine)
        _check_loadable("the learning rate scheduler's state", loose["lr_scheduler"])
        loose |= {"buffers": run_state.buffers_of(self._engine), "client_state": dict(client_state)}
        saved = {LOOSE: _write_pieces(self._folder / LOOSE, [_saved_as_bytes(loose)])}
        return saved | {MEMORY: _write_tensors(self._folder / MEMORY, self._memory)} if self._memory else saved

    def _write_files(self) -> dict[str, SavedFile]:
        shared, saved = set(), {}
        for path, name in self._sources.items():
            target = self._folder / name
            _check_whole(path, max(end for _, end in self._wanted[path]))
            if _link(path, target) or parts.link_part(path, target):
                shared.add(self._wholes[path])
            else:
                _copy(path, target, self._wanted[path])
            sync_file(target)
            pieces = [piece for start, end in self._wanted[path] for piece in self._pieces(path, start, end)]
            saved[name] = SavedFile(held_folders.status(path).st_size, tuple(sorted(pieces)))
        reach("files shared")
        with deferred(firmly=True):
            try:
                self._generations.set_aside(shared)
                self._engine.param_store.files.set_aside(shared)
            except StorageError:
                raise  # every file is as it was
            except BaseException as error:  # an interrupt, or files that could not be put back
                self._optimizer.condition.tear(error)
                raise
        reach("files set aside")
        return saved

    def _pieces(self, path: Path, start: int, end: int) -> list[Piece]:
        return self._optimizer.checksums.pieces(path, start, end)

    def _check_room(self) -> None:
        """Raise StorageError where what must be copied or written out has no room."""
        device = self._folder.stat().st_dev
        away = [path for path in self._sources if held_folders.status(path).st_dev != device]
        copied = [path for path in away if not parts.can_link(path, self._folder)]
        needed = self._memory_bytes + sum(end - start for path in copied for start, end in self._wanted[path])
        available = files.free_bytes(self._folder)
        if needed > available:
            raise StorageError(
                f"{self._folder}: a copy of this rank's files needs {needed} bytes ({needed / 2**30:.2f} GiB), the file system"
                f" has {available} free ({available / 2**30:.2f} GiB); free {needed - available} bytes or save elsewhere"
            )

    def _manifest(self, saved: Mapping[str, SavedFile]) -> RankManifest:
        numbers = run_state.numbers_of(self._engine)
        try:
            json.dumps(numbers)
        except TypeError as error:
            raise CheckpointError(f"save_checkpoint: the optimizer's groups hold what is no plain number: {error}") from error
        settings = run_state.settings_of(self._engine)
        tied = run_state.tied_names(self._engine)
        return RankManifest(ranks.rank(), ranks.world_size(), saved, self._tensors, settings, numbers, tied)


def _name_of(name: str, path: Path, span: stripes.Stripe) -> str:
    """The name in the checkpoint of a file of the run: of one that lies on several SSDs, the SSD's number is in it."""
    return f"{name}.bin" if span.path == os.fspath(path) else f"{name}.ssd{span.lane}.bin"


def _check_loadable(what: str, content: object) -> None:
    """Raise CheckpointError for what could only be unpickled."""
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"save_checkpoint: {what}: holds more than tensors, numbers, strings and collections of these, and checkpoints are"
            f" never unpickled; save that by other means ({str(error).strip().splitlines()[0]})"
        ) from error


def _saved_as_bytes(content: object) -> memoryview:
    """What torch.save writes; to a file itself it would fail without an errno."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getbuffer()


def _write_tensors(path: Path, tensors: Sequence[torch.Tensor]) -> SavedFile:
    """Write tensors one after another into a new file, with no copy of more than one of them."""
    return _write_pieces(path, map(_bytes_of, tensors))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _write_pieces(path: Path, buffers: Iterable[memoryview]) -> SavedFile:
    """Write bytes into a new file (mode 0600) that survives a power cut."""
    pieces: list[Piece] = []
    offset = 0
    with files.naming(path, "write"):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb", buffering=0) as file:
            os.fchmod(fd, 0o600)
            for data in buffers:
                for start in range(0, len(data), LARGEST_READ):
                    piece = data[start : start + LARGEST_READ]
                    _write_all(file.fileno(), piece)
                    pieces.append(Piece(offset, len(piece), checksum(piece)))
                    offset += len(piece)
            os.fsync(fd)
    return SavedFile(offset, tuple(pieces))


def _write_all(fd: int, data: memoryview | bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _check_whole(path: Path, num_bytes: int) -> None:
    """Raise StorageError for a file that somebody has cut or removed: a link to it would be found damaged at the load."""
    with files.naming(path, "save"):
        found = held_folders.status(path).st_size
        if found < num_bytes:
            raise OSError(errno.ENODATA, f"the file ends at byte {found} of {num_bytes}")


def _link(path: Path, target: Path) -> bool:
    """Whether the file could be linked."""
    try:
        held_folders.link(path, target)
    except OSError as error:
        if error.errno in parts.NO_LINKS:
            return False
        raise
    return True


def _copy(path: Path, target: Path, wanted: list[tuple[int, int]]) -> None:
    """Copy ranges of a file to the same places of a new one (mode 0600)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        with files.naming(path, "open"):
            source = stack.enter_context(os.fdopen(held_folders.open_file(path), "rb", buffering=0)).fileno()
        with files.naming(target, "write"):
            fd = stack.enter_context(os.fdopen(os.open(target, flags, 0o600), "wb", buffering=0)).fileno()
            os.fchmod(fd, 0o600)
            os.truncate(fd, os.fstat(source).st_size)
        for start, data in _pieces_of(source, path, wanted):
            with files.naming(target, "write"):
                os.lseek(fd, start, os.SEEK_SET)
                _write_all(fd, data)


def _pieces_of(fd: int, path: Path, wanted: list[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
    for start, end in wanted:
        while start < end:
            with files.naming(path, "read"):
                data = os.pread(fd, min(LARGEST_READ, end - start), start)
                if not data:
                    raise OSError(errno.EIO, f"nothing can be read from byte {start} on")
            yield start, data
            start += len(data)
