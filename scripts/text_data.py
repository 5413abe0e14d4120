"""Byte-level text for language modelling: token files built once, memory-mapped, sampled without any state.

Tokens are the bytes 0..255 and `END_OF_TEXT` (256) after each document. Without paths of one's own the text is the
Python standard library's sources, which every machine that can run this has. A data set is a folder of the cache
named by its content: `train.bin`, `held_out.bin` (uint16) and `manifest.json`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

END_OF_TEXT = 256
NUM_TOKEN_IDS = 257
# One document in this many is held out, chosen by its hash, so that adding files moves no other file across.
HELD_OUT_SHARE = 20
_FORMAT_VERSION = 1
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

Tokens = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class TextData:
    """A built data set: its folder and the two memory-mapped token streams, each one-dimensional."""

    folder: Path
    train: Tokens
    held_out: Tokens


@dataclass(frozen=True)
class Document:
    """One text file: the name it goes by in the manifest, its bytes' hash and size."""

    path: Path
    name: str
    sha256: str
    num_bytes: int


def default_cache() -> Path:
    """Where data sets lie unless the user says otherwise: the XDG cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_vertical" / "text"


def standard_library_files() -> list[tuple[Path, str]]:
    """(path, name) of the standard library's Python sources, tests left out, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [name for name in names if not _SKIPPED_FOLDERS & set(name.parts[:-1])]
    # _sysconfigdata describes one build of Python; everything else is the same text on every machine.
    kept = [name for name in kept if not name.name.startswith("_sysconfigdata")]
    return [(root / name, name.as_posix()) for name in sorted(kept, key=Path.as_posix)]


def files_under(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """(path, name) of the user's files; a folder stands for all regular files below it. Sorted within each folder.

    Raises FileNotFoundError for a path that does not exist.
    """
    files: list[tuple[Path, str]] = []
    for path in paths:
        if path.is_dir():
            below = sorted(entry for entry in path.rglob("*") if entry.is_file())
            files += [(entry, f"{path.name}/{entry.relative_to(path).as_posix()}") for entry in below]
        elif path.is_file():
            files.append((path, path.name))
        else:
            raise FileNotFoundError(f"--text {path}: no such file or folder")
    return files


def build(paths: Sequence[Path], cache: Path) -> TextData:
    """The data set of these paths (none: the standard library), built in `cache` unless it lies there already.

    Safe to call from several processes at once: a set is written beside its place and renamed into it.
    Raises ValueError when there is too little text to train on, FileNotFoundError for a missing path.
    """
    documents = [_read_document(path, name) for path, name in (files_under(paths) or standard_library_files())]
    documents = [document for document in documents if document.num_bytes > 0]
    if not documents:
        raise ValueError(f"--text {' '.join(map(str, paths))}: there is no text in it")
    folder = cache / _content_key(documents)
    if not (folder / "manifest.json").is_file():
        _build_folder(documents, folder)
    return TextData(folder, _map_tokens(folder / "train.bin"), _map_tokens(folder / "held_out.bin"))


def sample_batch(tokens: Tokens, batch_size: int, seq_len: int, key: Sequence[int]) -> npt.NDArray[np.int64]:
    """[batch_size, seq_len] token ids, a function of `key` alone, e.g. (seed, step, micro-batch, rank).

    Raises ValueError if the stream is shorter than one sequence.
    """
    starts = np.random.default_rng(list(key)).integers(0, _num_starts(tokens, seq_len), size=batch_size)
    return np.stack([tokens[start : start + seq_len] for start in starts]).astype(np.int64)


def train_batches(
    tokens: Tokens, batch_size: int, seq_len: int, num_micro_batches: int, seed: int, rank: int, step: int = 0
) -> Iterator[npt.NDArray[np.int64]]:
    """The endless stream of micro-batches, from `step` on; batch (step, m) is the same whatever came before it."""
    while True:
        for micro_batch in range(num_micro_batches):
            yield sample_batch(tokens, batch_size, seq_len, (seed, step, micro_batch, rank))
        step += 1


def held_out_batches(
    tokens: Tokens, batch_size: int, seq_len: int, num_batches: int, rank: int, num_ranks: int
) -> Iterator[npt.NDArray[np.int64]]:
    """`num_batches` fixed batches of this rank: windows spread evenly over the held-out text, no two ranks alike."""
    num_windows = num_batches * batch_size * num_ranks
    starts = np.linspace(0, _num_starts(tokens, seq_len) - 1, num_windows).astype(np.int64)[rank::num_ranks]
    for batch in starts.reshape(num_batches, batch_size):
        yield np.stack([tokens[start : start + seq_len] for start in batch]).astype(np.int64)


def _num_starts(tokens: Tokens, seq_len: int) -> int:
    if len(tokens) < seq_len:
        raise ValueError(f"--seq {seq_len}: the text has only {len(tokens)} tokens; write a smaller --seq or add text")
    return len(tokens) - seq_len + 1


def _read_document(path: Path, name: str) -> Document:
    content = path.read_bytes()
    return Document(path, name, hashlib.sha256(content).hexdigest(), len(content))


def _content_key(documents: Sequence[Document]) -> str:
    digest = hashlib.sha256(f"format {_FORMAT_VERSION} share {HELD_OUT_SHARE}".encode())
    for document in documents:
        digest.update(f"{document.name}\0{document.sha256}\n".encode())
    return digest.hexdigest()[:16]


def _build_folder(documents: Sequence[Document], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        shares = _held_out_shares(documents)
        num_train, num_held_out = _write_streams(beside, documents, shares)
        manifest = {
            "format": _FORMAT_VERSION,
            "num_train_tokens": num_train,
            "num_held_out_tokens": num_held_out,
            "documents": [
                {"name": document.name, "sha256": document.sha256, "num_bytes": document.num_bytes, "held_out": share}
                for document, share in zip(documents, shares, strict=True)
            ],
        }
        (beside / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        try:
            beside.rename(folder)
        except OSError:
            # Another process was faster: the name is the content, so its folder is as good as ours.
            if not (folder / "manifest.json").is_file():
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _held_out_shares(documents: Sequence[Document]) -> list[float]:
    """The share of each document that is held out: 0 or 1, or the tail of a lone one; never all, never nothing."""
    if len(documents) == 1:
        return [1 / HELD_OUT_SHARE]
    shares = [1.0 if int(document.sha256[:8], 16) % HELD_OUT_SHARE == 0 else 0.0 for document in documents]
    if len(set(shares)) == 1:
        chosen = min(range(len(documents)), key=lambda index: documents[index].sha256)
        shares = [1.0 if index == chosen else 0.0 for index in range(len(documents))]
    return shares


def _write_streams(folder: Path, documents: Sequence[Document], shares: Sequence[float]) -> tuple[int, int]:
    """Writes train.bin and held_out.bin, one document in memory at a time; returns their numbers of tokens."""
    num_train = num_held_out = 0
    with (folder / "train.bin").open("wb") as train, (folder / "held_out.bin").open("wb") as held_out:
        for document, share in zip(documents, shares, strict=True):
            tokens = _tokens_of(document)
            cut = len(tokens) - math.ceil(len(tokens) * share)
            train.write(tokens[:cut].tobytes())
            held_out.write(tokens[cut:].tobytes())
            num_train += cut
            num_held_out += len(tokens) - cut
        for file in (train, held_out):
            file.flush()
            os.fsync(file.fileno())
    return num_train, num_held_out


def _tokens_of(document: Document) -> Tokens:
    content = document.path.read_bytes()
    if hashlib.sha256(content).hexdigest() != document.sha256:
        raise ValueError(f"{document.path} changed while it was read; start again")
    return np.append(np.frombuffer(content, np.uint8).astype("<u2"), np.array([END_OF_TEXT], "<u2"))


def _map_tokens(path: Path) -> Tokens:
    return np.memmap(path, dtype="<u2", mode="r")
