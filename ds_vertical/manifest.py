"""What a checkpoint consists of, as JSON: files with sizes and checksums, and where in them each parameter's tensors are.

A checkpoint is `<folder>/<tag>` with one folder per rank, `rank<r>`. The rank's own manifest names the files beside it; the
folder's manifest, written last, names the ranks' manifests. Imports neither torch nor deepspeed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ds_vertical.checksums import ALGORITHM, Piece, checksum, is_whole

FORMAT = 1
NAME = "ds_vertical.json"  # of the folder's manifest, and of each rank's
LATEST = "latest"
NUM_SHOWN = 5


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be saved or loaded; the message names the file or setting, and what to do."""


class Range(NamedTuple):
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
class SavedTensor:
    """A parameter. `numel`: elements of the rank's share; `group`: of the optimizer, None where it does not have it; `step`:
    the optimizer steps it has taken. `places`: by kind ("weight", "master", "exp_avg", "exp_avg_sq"), the ranges that make up
    the share; without "weight" for a frozen parameter that the save left out."""

    shape: tuple[int, ...]
    dtype: str
    numel: int
    group: int | None
    step: int
    places: Mapping[str, tuple[Range, ...]]


@dataclass(frozen=True)
class RankManifest:
    """`settings`: of the run, by JSON path; `numbers`: what else is plain numbers (`runstate`); `tied`: second names of
    parameters and buffers, each with the first."""

    rank: int
    world_size: int
    files: Mapping[str, SavedFile]
    tensors: Mapping[str, SavedTensor]
    settings: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        return (json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> RankManifest:
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


def _tensor(entry: Mapping[str, Any]) -> SavedTensor:
    places = {kind: tuple(Range(*each) for each in ranges) for kind, ranges in entry["places"].items()}
    return SavedTensor(tuple(entry["shape"]), entry["dtype"], entry["numel"], entry["group"], entry["step"], places)


def rank_folder(tag_folder: Path, rank: int) -> Path:
    return tag_folder / f"rank{rank}"


def folder_manifest(tag: str, ranks: Sequence[tuple[int, int]]) -> bytes:
    """The folder's manifest, given size and checksum of every rank's."""
    found = {str(rank): {"num_bytes": size, "checksum": each} for rank, (size, each) in enumerate(ranks)}
    head = {"format": FORMAT, "written_by": "ds_vertical", "checksums": ALGORITHM, "tag": tag}
    entry = head | {"world_size": len(ranks), "ranks": found}
    return (json.dumps(entry, indent=1) + "\n").encode()


def read_folder(tag_folder: Path) -> dict[str, Any]:
    """The folder's manifest. Raises CheckpointError: no such folder, one of stock DeepSpeed, another format."""
    path = tag_folder / NAME
    if not tag_folder.is_dir():
        there = ", ".join(complete_tags(tag_folder.parent)) or "none"
        raise CheckpointError(f"{tag_folder}: there is no such checkpoint; complete ones in {tag_folder.parent}: {there}")
    if not path.is_file():
        stock = next((file.name for pattern in ("*_states.pt", "zero") for file in tag_folder.glob(pattern)), None)
        if stock is not None:
            raise CheckpointError(
                f"{tag_folder}: a checkpoint of stock DeepSpeed ({stock}), which cannot be resumed here: what it has of state"
                " on SSD lies in stock's order and lacks CPU Adam's powers of beta, the rest would need unpickling. Load it"
                " with stock, save the weights with save_16bit_model and start from those"
            )
        raise CheckpointError(f"{tag_folder}: no {NAME} in it: no checkpoint, or not a complete one; name another tag")
    found = _object(path)
    if found.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {found.get('format')!r}; this version reads format {FORMAT}")
    return found


def read_rank(tag_folder: Path, rank: int) -> RankManifest:
    """A rank's manifest, checked against the folder's. Raises CheckpointError."""
    ranks = read_folder(tag_folder).get("ranks", {})
    path = rank_folder(tag_folder, rank) / NAME
    if str(rank) not in ranks:
        raise CheckpointError(f"{tag_folder}: saved by {len(ranks)} rank(s); rank {rank} was none of them")
    try:
        data = path.read_bytes()
        if ranks[str(rank)] != {"num_bytes": len(data), "checksum": checksum(data)}:
            raise CheckpointError(f"{path}: not as it was saved (size or checksum differ)")
        return RankManifest.from_json(data)
    except OSError as error:
        raise CheckpointError(f"{path}: read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{path}: not a manifest ({error})") from error


def faults(folder: Path, files: Mapping[str, SavedFile]) -> Iterator[str]:
    """What is wrong with a rank's files: missing, of another size, bytes that have changed. Reads all of them."""
    for name, saved in files.items():
        path = folder / name
        try:
            num_bytes = path.stat().st_size
            if num_bytes != saved.num_bytes:
                yield f"{path}: {num_bytes} bytes, {saved.num_bytes} were saved"
                continue
            bad = [piece for piece in saved.pieces if not is_whole(path, piece)]
            yield from (f"{path}: bytes {piece.offset} to {piece.end} have another checksum than when saved" for piece in bad)
        except (OSError, EOFError) as error:
            yield f"{path}: {getattr(error, 'strerror', None) or error}"


def check(tag_folder: Path, manifest: RankManifest) -> None:
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
    found = [path for path in folder.glob(f"*/{NAME}") if not path.parent.name.startswith(".")]
    return [path.parent.name for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)]


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not a manifest ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a manifest")
    return found
