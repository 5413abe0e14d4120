"""What a checkpoint consists of, as JSON: files with sizes and checksums, and where in them each parameter's tensors are.

A checkpoint is `<folder>/<tag>` with one folder per rank, `rank<r>`. The rank's own manifest names the files beside it; the
folder's manifest, written last, names the ranks' manifests. Where hosts have folders of their own, each has the same folder's
manifest, and its own ranks' folders. Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ds_vertical.engine.checkpoint.manifest_schema import FORMAT, NAME, folder_faults, rank_faults
from ds_vertical.errors import CheckpointError
from ds_vertical.io.checksums import ALGORITHM, Piece, checksum, checksum_of
from ds_vertical.io.regular_file import is_plain_name, open_regular, parse_json, read_regular

LATEST = "latest"
NUM_SHOWN = 5
_MOST_BYTES = 1 << 26  # of the folder's manifest, which names each rank's with its size
_MOST_RANK_BYTES = 1 << 31
_MOST_LATEST_BYTES = 1 << 12


class FileRange(NamedTuple):
    """Bytes [offset, offset + num_bytes) of a file of the rank."""

    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class SavedFile:
    """A file of the rank. `pieces`: those of its bytes that belong to the checkpoint; others may be anything."""

    num_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A parameter. `numel`: elements of the rank's share; `group`: of the optimizer, None where it does not have it; `step`:
    the optimizer steps it has taken. `places`: by kind ("weight", "master", "exp_avg", "exp_avg_sq"), the ranges that make up
    the share; without "weight" for a frozen parameter that the save left out."""

    shape: tuple[int, ...]
    dtype: str
    numel: int
    group: int | None
    step: int
    places: Mapping[str, tuple[FileRange, ...]]


@dataclass(frozen=True)
class RankManifest:
    """`settings`: of the run, by JSON path; `numbers`: what else is plain numbers (`run_state`); `tied`: second names of
    parameters and buffers, each with the first."""

    rank: int
    world_size: int
    files: Mapping[str, SavedFile]
    tensors: Mapping[str, TensorEntry]
    settings: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The manifest as it is written to the rank's folder."""
        return (json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> RankManifest:
        """The manifest that `to_json` has written."""
        found = json.loads(data)
        files = {
            name: SavedFile(entry["num_bytes"], tuple(Piece(*piece) for piece in entry["pieces"]))
            for name, entry in found["files"].items()
        }
        return cls(
            found["rank"],
            found["world_size"],
            files,
            {name: _tensor(entry) for name, entry in found["tensors"].items()},
            found["settings"],
            found["numbers"],
            found["tied"],
        )

    @property
    def num_bytes(self) -> int:
        """Of all pieces."""
        return sum(piece.num_bytes for file in self.files.values() for piece in file.pieces)


def _tensor(entry: Mapping[str, Any]) -> TensorEntry:
    places = {kind: tuple(FileRange(*each) for each in ranges) for kind, ranges in entry["places"].items()}
    return TensorEntry(tuple(entry["shape"]), entry["dtype"], entry["numel"], entry["group"], entry["step"], places)


def rank_folder(tag_folder: Path, rank: int) -> Path:
    """The folder of one rank's files in a checkpoint."""
    return tag_folder / f"rank{rank}"


def folder_manifest(
    tag: str, ranks: Sequence[tuple[int, int]], hosts: Sequence[tuple[str, Sequence[int]]] | None = None
) -> bytes:
    """The folder's manifest, given size and checksum of every rank's. `hosts`: the names of those that have folders of their
    own, with their ranks."""
    found = {str(rank): {"num_bytes": size, "checksum": each} for rank, (size, each) in enumerate(ranks)}
    head = {"format": FORMAT, "written_by": "ds_vertical", "checksums": ALGORITHM, "tag": tag}
    entry: dict[str, Any] = head | {"world_size": len(ranks), "ranks": found}
    if hosts is not None:
        entry["hosts"] = [{"name": name, "ranks": list(numbers)} for name, numbers in hosts]
    return (json.dumps(entry, indent=1) + "\n").encode()


def save_id(tag_folder: Path) -> int | None:
    """What tells a save from all others: the checksum of the folder's manifest, in which those of all ranks' are. None where
    there is none to be read."""
    try:
        return checksum(read_regular(tag_folder / NAME, _MOST_BYTES))
    except OSError:
        return None


def read_folder(tag_folder: Path) -> dict[str, Any]:
    """The folder's manifest. Raises CheckpointError: no such folder, one of stock DeepSpeed, another format."""
    path = tag_folder / NAME
    if not is_plain_name(tag_folder.name) or not tag_folder.is_dir():
        there = ", ".join(complete_tags(tag_folder.parent)) or "none"
        raise CheckpointError(f"{tag_folder}: there is no such checkpoint; complete ones in {tag_folder.parent}: {there}")
    if not os.path.lexists(path):
        stock = next((file.name for pattern in ("*mp_rank_*_states.pt", "zero") for file in tag_folder.glob(pattern)), None)
        if stock is not None:
            raise CheckpointError(
                f"{tag_folder}: a checkpoint of stock DeepSpeed ({stock}), which cannot be resumed here: what it has of state"
                " on SSD lies in stock's order and lacks CPU Adam's powers of beta, the rest would need unpickling. Load it"
                " with stock, save the weights with save_16bit_model and start from those"
            )
        raise CheckpointError(f"{tag_folder}: no {NAME} in it: no checkpoint, or not a complete one; name another tag")
    data = _read(path, _MOST_BYTES)
    found = _parsed(path, data)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a manifest")
    if found.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {found.get('format')!r}; this version reads format {FORMAT}")
    _raise_for(path, folder_faults(data))
    return found


def read_rank(tag_folder: Path, rank: int) -> RankManifest:
    """A rank's manifest, checked against the folder's and by the schema, whole. Raises CheckpointError."""
    folder = read_folder(tag_folder)
    described = folder["ranks"].get(str(rank))
    path = rank_folder(tag_folder, rank) / NAME
    if described is None:
        raise CheckpointError(f"{tag_folder}: saved by {folder['world_size']} rank(s); rank {rank} was none of them")
    data = _read(path, _MOST_RANK_BYTES)
    if described != {"num_bytes": len(data), "checksum": checksum(data)}:
        raise CheckpointError(f"{path}: not as it was saved (size or checksum differ)")
    _parsed(path, data)
    _raise_for(path, rank_faults(data, rank, folder["world_size"]))
    return RankManifest.from_json(data)


def read_latest(folder: Path) -> str | None:
    """The tag that `latest` in a folder names; None where there is no such file. Raises CheckpointError."""
    path = folder / LATEST
    try:
        tag = read_regular(path, _MOST_LATEST_BYTES).decode().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: read: {error.strerror}; name a tag to load, or write one into it") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not a tag ({error}); name a tag to load, or write one into it") from error
    if not is_plain_name(tag):
        raise CheckpointError(
            f"{path}: names {_short(tag)}, which is no folder beside it; name a tag to load, or write one into it"
        )
    return tag


def _read(path: Path, limit: int) -> bytes:
    try:
        return read_regular(path, limit)
    except OSError as error:
        raise CheckpointError(f"{path}: read: {error.strerror}") from error


def _parsed(path: Path, data: bytes) -> Any:
    try:
        return parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"{path}: not a manifest ({error})") from error


def _raise_for(path: Path, found: list[str]) -> None:
    if found:
        more = [f"... and {len(found) - NUM_SHOWN} more"] if len(found) > NUM_SHOWN else []
        shown = "\n".join(found[:NUM_SHOWN] + more)
        raise CheckpointError(f"{path}: not a manifest that can be loaded; take another tag\n{shown}")


def _short(text: str) -> str:
    return repr(text) if len(text) <= 60 else repr(text[:60]) + "..."


def faults(folder: Path, files: Mapping[str, SavedFile]) -> Iterator[str]:
    """What is wrong with a rank's files: missing, no files, of another size, bytes that have changed. Reads all of them."""
    for name, saved in files.items():
        path = folder / name
        try:
            fd = open_regular(path)
        except OSError as error:
            yield f"{path}: {error.strerror}"
            continue
        try:
            yield from _content_faults(path, fd, saved)
        finally:
            os.close(fd)


def _content_faults(path: Path, fd: int, saved: SavedFile) -> Iterator[str]:
    num_bytes = os.fstat(fd).st_size
    if num_bytes != saved.num_bytes:
        yield f"{path}: {num_bytes} bytes, {saved.num_bytes} were saved"
        return
    try:
        bad = [piece for piece in saved.pieces if checksum_of(fd, path, piece.offset, piece.num_bytes) != piece.checksum]
        yield from (f"{path}: bytes {piece.offset} to {piece.end} have another checksum than when saved" for piece in bad)
    except (OSError, EOFError) as error:
        yield f"{path}: {getattr(error, 'strerror', None) or error}"


def check_manifest(tag_folder: Path, manifest: RankManifest) -> None:
    """Raise CheckpointError, naming the last good tag beside it, unless every file of the rank is as it was saved."""
    found = list(faults(rank_folder(tag_folder, manifest.rank), manifest.files))
    if found:
        more = [f"... and {len(found) - NUM_SHOWN} more"] if len(found) > NUM_SHOWN else []
        shown = "\n".join(found[:NUM_SHOWN] + more)
        raise CheckpointError(f"{tag_folder}: damaged; {advice(tag_folder, manifest.rank)}\n{shown}")


def advice(tag_folder: Path, rank: int) -> str:
    """What to load instead of a damaged checkpoint: the newest other one whose files of this rank are as they were saved."""
    for tag in complete_tags(tag_folder.parent):
        folder = tag_folder.parent / tag
        try:
            is_good = tag != tag_folder.name and not any(faults(rank_folder(folder, rank), read_rank(folder, rank).files))
        except CheckpointError:
            continue
        if is_good:
            return f'the last good tag is "{tag}" in {folder.parent}'
    return f"no other tag in {tag_folder.parent} is good"


def complete_tags(folder: Path) -> list[str]:
    """Tags of the checkpoints in a folder, the newest first."""
    if not folder.is_dir():
        return []
    found: list[tuple[int, str]] = []
    for path in folder.glob(f"*/{NAME}"):
        with contextlib.suppress(OSError):  # a link to nowhere, or gone meanwhile
            if not path.parent.name.startswith("."):
                found.append((path.stat().st_mtime_ns, path.parent.name))
    return [tag for _, tag in sorted(found, key=lambda each: each[0], reverse=True)]
