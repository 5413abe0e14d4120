"""fp32 weights out of a checkpoint of ds_vertical, for use without DeepSpeed.

    python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR [-t TAG] [--safe_serialization] [--max_shard_size 5GB]

`engine.save_checkpoint` puts a copy of this file beside its tags, where DeepSpeed puts its own of the same command line. It
stands alone: it needs torch, safetensors where these are asked for, and neither ds_vertical nor DeepSpeed. Checksums are
verified where the package xxhash is installed. Tensors are gathered from all ranks one by one, and no more than one file of
weights is in memory at a time. Nothing is unpickled.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

try:
    from xxhash import xxh3_64
except ImportError:
    xxh3_64 = None

# as in ds_vertical's manifest.py, checksums.py and checkpoint.py
FORMAT, ALGORITHM = 1, "xxh3_64"
NAME, LATEST, LOOSE = "ds_vertical.json", "latest", "loose.pt"
PIECE_BYTES = 1 << 23
FolderName = str | os.PathLike[str]
UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}

debug = False


class ExportError(RuntimeError):
    """A checkpoint that cannot be converted; the message names the file and what to do."""


class SavedTensor:
    """A tensor that is read when `contiguous()` is called, and again each time; of `shape` and `dtype`."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._read = read

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def contiguous(self) -> torch.Tensor:
        """The tensor, read from the checkpoint now."""
        return self._read()


class Checkpoint:
    """The folder of a tag. Raises ExportError: no such folder, not complete, of another format, damaged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        described = _folder_manifest(folder)
        _refuse_missing(folder, [(host["name"], host["ranks"]) for host in described.get("hosts") or ()])
        self._ranks = [_Rank(folder / f"rank{n}", described["ranks"][str(n)]) for n in range(described["world_size"])]
        self._tensors: Mapping[str, Any] = self._ranks[0].entry["tensors"]
        self._tied: Mapping[str, str] = self._ranks[0].entry["tied"]

    def state(self, exclude_frozen_parameters: bool) -> dict[str, SavedTensor]:
        """Buffers, parameters that are not trained, trained ones, then names for a second time, as DeepSpeed's; verified."""
        untrained = [name for name, entry in self._tensors.items() if entry["group"] is None and not exclude_frozen_parameters]
        frozen = [name for name in untrained if self._tensors[name]["places"]]
        if left_out := len(untrained) - len(frozen):
            print(f"warning: the save has left out {left_out} parameters that are not trained", file=sys.stderr)
        trained = [name for name, entry in self._tensors.items() if entry["group"] is not None]
        for rank in self._ranks:
            rank.verify(frozen + trained, with_buffers=rank is self._ranks[0])
        if xxh3_64 is None:
            print("warning: checksums were not verified: the package xxhash is not installed", file=sys.stderr)
        state = {name: _buffer(value) for name, value in self._ranks[0].load(LOOSE)["buffers"].items()}
        state |= {name: self._parameter(name) for name in frozen + trained}
        return state | {name: state[first] for name, first in self._tied.items() if first in state}

    def _parameter(self, name: str) -> SavedTensor:
        own = _dtype(self._tensors[name]["dtype"])
        dtype = torch.float32 if own.is_floating_point else own
        return SavedTensor(self._tensors[name]["shape"], dtype, lambda: self._gather(name, dtype))

    def _gather(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The shares of all ranks one after another, cut to the parameter's size: the last one ends with padding."""
        shape = self._tensors[name]["shape"]
        full, start = torch.empty(math.prod(shape), dtype=dtype), 0
        for rank in self._ranks:
            count = min(rank.share(name), full.numel() - start)
            rank.read(name, full.narrow(0, start, count))
            start += count
        if start < full.numel():
            raise ExportError(f"{self._folder}: {name} has {full.numel()} elements, the ranks' shares only {start}")
        if debug:
            print(f"{name}: {list(shape)} from {len(self._ranks)} ranks")
        return full.view(shape)


class _Rank:
    """One rank's files. `described`: size and checksum of its manifest, as the folder's has them."""

    def __init__(self, folder: Path, described: Mapping[str, int]) -> None:
        self._folder = folder
        data, self.entry = _manifest(folder / NAME)
        if len(data) != described["num_bytes"] or (xxh3_64 is not None and _checksum([data]) != described["checksum"]):
            raise ExportError(f"{folder / NAME}: not as it was saved (size or checksum differ); take another tag")

    def share(self, name: str) -> int:
        return self.entry["tensors"][name]["numel"]  # padding included

    def verify(self, names: Sequence[str], with_buffers: bool) -> None:
        """Raise ExportError unless all files of these parameters are as they were saved."""
        needed = {LOOSE} if with_buffers else set()
        for name in names:
            kind, dtype = self._stored(name)
            for file, offset, num_bytes in self.entry["tensors"][name]["places"][kind]:
                total = self.entry["files"][file]["num_bytes"]
                if num_bytes % dtype.itemsize or not 0 <= offset <= offset + num_bytes <= total:
                    raise ExportError(f"{self._folder}: {name}: no {num_bytes} bytes at {offset} of {file}, of {total}")
                needed.add(file)
        for file in sorted(needed):
            self._verify_file(file, self.entry["files"][file])

    def read(self, name: str, target: torch.Tensor) -> None:
        """Fill `target` (1-d, contiguous) with the first elements of the rank's share."""
        kind, dtype = self._stored(name)
        start = 0
        for file, offset, num_bytes in self.entry["tensors"][name]["places"][kind]:
            count = min(num_bytes // dtype.itemsize, target.numel() - start)
            for data in _pieces(self._path(file), offset, count * dtype.itemsize):
                piece = torch.frombuffer(data, dtype=dtype)
                target.narrow(0, start, piece.numel()).copy_(piece)
                start += piece.numel()
        if start < target.numel():
            raise ExportError(f"{self._folder}: {name} is {target.numel() - start} elements short")

    def load(self, file: str) -> dict[str, Any]:
        """What rests in a file of tensors, mapped: it takes memory as it is used."""
        try:
            return torch.load(str(self._path(file)), map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # of many types, where nobody has verified the file
            reason = str(error).partition("\n")[0]
            raise ExportError(f"{self._folder / file}: cannot be loaded ({reason})") from error

    def _stored(self, name: str) -> tuple[str, torch.dtype]:
        """Which of a parameter's tensors is taken: the fp32 master, or the weight of one that is not trained."""
        entry = self.entry["tensors"][name]
        return ("master", torch.float32) if "master" in entry["places"] else ("weight", _dtype(entry["dtype"]))

    def _path(self, file: str) -> Path:
        if Path(file).name != file or file == "..":
            raise ExportError(f"{self._folder / NAME}: names a file elsewhere: {file}")
        return self._folder / file

    def _verify_file(self, file: str, entry: Mapping[str, Any]) -> None:
        path = self._path(file)
        found = path.stat().st_size if path.is_file() else "no"
        if found != entry["num_bytes"]:
            raise ExportError(f"{path}: {found} bytes, {entry['num_bytes']} were saved; take another tag")
        for offset, num_bytes, checksum in entry["pieces"] if xxh3_64 is not None else ():
            if _checksum(_pieces(path, offset, num_bytes)) != checksum:
                raise ExportError(
                    f"{path}: bytes {offset} to {offset + num_bytes} have another checksum than when saved; take another tag"
                )


def _folder_manifest(folder: Path) -> dict[str, Any]:
    path = folder / NAME
    if not folder.is_dir():
        raise ExportError(f"{folder}: there is no such checkpoint; complete ones in {folder.parent}: {_tags(folder.parent)}")
    if not os.path.lexists(path):
        if any(folder.glob("*mp_rank_*_states.pt")):
            raise ExportError(
                f"{folder}: in DeepSpeed's own format, which its own script converts:"
                f" python -m deepspeed.utils.zero_to_fp32 {folder.parent} OUTPUT_DIR -t {folder.name}"
            )
        raise ExportError(f"{folder}: no {NAME} in it: no checkpoint, or not a complete one; name another tag with -t")
    _, found = _manifest(path)
    if found.get("format") != FORMAT or found.get("checksums") != ALGORITHM:
        raise ExportError(
            f"{path}: format {found.get('format')!r} with checksums {found.get('checksums')!r}; this file reads format"
            f" {FORMAT} with {ALGORITHM}: take the zero_to_fp32.py of the version that saved it"
        )
    return found


def _refuse_missing(folder: Path, hosts: Sequence[tuple[str, list[int]]]) -> None:
    """Raise ExportError where hosts have saved to folders of their own, and not all of these are together here."""
    for host, saved in hosts:
        missing = [f"rank{rank}" for rank in saved if not (folder / f"rank{rank}").is_dir()]
        if missing:
            names = ", ".join(missing)
            raise ExportError(
                f"{folder}: lacks {names}, which host {host} has saved to a folder of its own: copy {names} from"
                f" {folder.resolve()} there into this folder"
            )


def _tags(folder: Path) -> str:
    found = sorted(path.parent.name for path in folder.glob(f"*/{NAME}") if not path.parent.name.startswith("."))
    return ", ".join(found) or "none"


def _manifest(path: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        with _open(path) as file:
            data = file.readall()
        return data, json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ExportError(f"{path}: cannot be read ({reason}); take another tag") from error


def _open(path: Path) -> Any:
    """A regular file, to read; opening a FIFO would wait for somebody who writes."""
    file = open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ExportError(f"{path}: not a regular file; take another tag")
    return file


def _latest(folder: Path) -> str:
    path = folder / LATEST
    try:
        with _open(path) as file:
            return file.read(4096).decode().strip()
    except (OSError, ValueError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None) or error
        raise ExportError(f"{path}: {reason}; name a tag with -t (complete ones: {_tags(folder)})") from error


def _pieces(path: Path, start: int, num_bytes: int) -> Iterator[bytearray]:
    """Bytes [start, start + num_bytes) of a file in pieces of whole elements."""
    with _open(path) as file:
        file.seek(start)
        while num_bytes:
            view = memoryview(data := bytearray(min(num_bytes, PIECE_BYTES)))
            while view:
                count = file.readinto(view)
                if not count:
                    raise ExportError(f"{path}: ends {num_bytes} bytes too early; take another tag")
                view = view[count:]
            num_bytes -= len(data)
            yield data


def _checksum(pieces: Any) -> int:
    state = xxh3_64()  # type: ignore[misc]
    for data in pieces:
        state.update(data)
    return state.intdigest()


def _dtype(name: str) -> torch.dtype:
    if not isinstance(found := getattr(torch, name, None), torch.dtype):
        raise ExportError(f"dtype {name!r}: unknown to torch {torch.__version__}")
    return found


def _buffer(value: torch.Tensor) -> SavedTensor:
    dtype = torch.float32 if value.is_floating_point() else value.dtype
    return SavedTensor(value.shape, dtype, lambda: value.to(dtype, copy=True).contiguous())


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: FolderName, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """The model's state dict in fp32 on the host, out of `<checkpoint_dir>/<tag>` (None: the tag that `latest` names).

    `lazy_mode`: values are no tensors but give one, read then, by `.contiguous()`. What has two names is one tensor. Raises
    ExportError before anything is gathered: no checkpoint, a damaged one, one in DeepSpeed's own format."""
    folder = Path(checkpoint_dir)
    if tag is None:
        if (folder / NAME).is_file():
            raise ExportError(f"{folder}: is the folder of one tag; give the one above it, and -t {folder.resolve().name}")
        tag = _latest(folder)
    try:
        if tag in ("", ".", "..") or "/" in tag or len(os.fsencode(tag)) > 255:
            raise ExportError(f"{folder}: there is no such checkpoint: {tag[:60]!r} is no name of a folder in it")
        state = Checkpoint(folder / tag).state(exclude_frozen_parameters)
    except (LookupError, TypeError, ValueError, AttributeError, OSError) as error:
        raise ExportError(f"{folder / tag}: a manifest in it is none ({type(error).__name__}: {error})") from error
    return dict(state) if lazy_mode else _tensors(state, shared=True)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: FolderName,
    output_dir: FolderName,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 state dict to `output_dir` as `pytorch_model.bin` or `model.safetensors`, or as numbered files of at most
    `max_shard_size` (None: any size) with an index. Raises ExportError as `get_fp32_state_dict_from_zero_checkpoint`."""
    save = _saver(safe_serialization)
    limit = None if max_shard_size is None else _num_bytes(max_shard_size)
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode=True)
    whole = "model.safetensors" if safe_serialization else "pytorch_model.bin"
    shards = _split(state, limit)
    stem, _, ending = whole.rpartition(".")
    last = len(shards)
    names = [f"{stem}-{number:05d}-of-{last:05d}.{ending}" for number in range(1, last + 1)] if last > 1 else [whole]
    (output := Path(output_dir)).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".zero_to_fp32-", dir=output) as parts:  # a new folder, which nobody else uses
        for name, members in zip(names, shards, strict=True):
            shard = {member: state[member] for member in members}
            save(_tensors(shard, shared=not safe_serialization), str(part := Path(parts, name)))
            os.replace(part, output / name)
            print(f"{output / name}: {len(members)} tensors")
    if len(shards) > 1:
        files = {member: name for name, members in zip(names, shards, strict=True) for member in members}
        total = sum(each.num_bytes for each in {id(each): each for each in state.values()}.values())
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (output / f"{whole}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_state_dict_from_zero_checkpoint(model: Any, checkpoint_dir: FolderName, tag: str | None = None) -> Any:
    """The model, moved to the host, with the checkpoint's fp32 weights in it. For a model outside any engine."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def _tensors(state: Mapping[str, SavedTensor], shared: bool) -> dict[str, torch.Tensor]:
    """Read; those under two names once if `shared`, else each by itself (safetensors takes no tensor twice)."""
    read: dict[int, torch.Tensor] = {}
    found = {}
    for name, saved in state.items():
        if id(saved) in read:
            found[name] = read[id(saved)] if shared else read[id(saved)].clone()
        else:
            found[name] = read[id(saved)] = saved.contiguous()
    return found


def _saver(safe_serialization: bool) -> Callable[[dict[str, torch.Tensor], str], None]:
    if not safe_serialization:
        return torch.save
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ExportError("safe_serialization needs the package safetensors: pip install safetensors") from error
    return lambda tensors, path: save_file(tensors, path, metadata={"format": "pt"})


def _num_bytes(size: str | int) -> int:
    if isinstance(size, int):
        return size
    text = size.strip()
    try:
        return int(float(text[:-2]) * UNITS[text[-2:].upper()])
    except (KeyError, ValueError):
        raise ExportError(f"max_shard_size {size!r}: write digits and one of {', '.join(UNITS)}, such as 5GB") from None


def _split(state: Mapping[str, SavedTensor], limit: int | None) -> list[list[str]]:
    """Names per file, in order; a tensor beyond the limit has a file of its own, a second name goes where the first is."""
    shards: list[list[str]] = []
    current: list[str] = []
    place: dict[int, list[str]] = {}
    num_bytes = 0
    for name, saved in state.items():
        if id(saved) in place:
            place[id(saved)].append(name)
            continue
        if limit is not None and saved.num_bytes > limit:
            shards.append([name])
            place[id(saved)] = shards[-1]
            continue
        if limit is not None and num_bytes + saved.num_bytes > limit:
            shards.append(current)
            current, num_bytes = [], 0
        current.append(name)
        num_bytes += saved.num_bytes
        place[id(saved)] = current
    return [*shards, current] if current or not shards else shards


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    global debug
    parser = argparse.ArgumentParser(description="fp32 weights out of a checkpoint of ds_vertical")
    parser.add_argument("checkpoint_dir", help="the folder given to save_checkpoint")
    parser.add_argument("output_dir", help="folder for the files of weights")
    parser.add_argument("--max_shard_size", default="5GB", help="the most bytes of one file, with a unit (%(default)s)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors, not files of torch.save")
    parser.add_argument("-t", "--tag", help="the checkpoint's tag, e.g. global_step1; else the one that `latest` names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out parameters that are not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="print what is read")
    given = vars(parser.parse_args(arguments))
    debug = given.pop("debug")
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**given)
    except (RuntimeError, OSError) as error:  # torch's own, too: a disk that is full
        print(f"zero_to_fp32.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
