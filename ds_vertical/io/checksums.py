"""Checksums of pieces of files, taken in memory as the pieces are written, so that saving a file need not read it.

XXH3 with 64 bits, by the xxhash package: some ten times as fast as zlib's CRC-32 (17.7 and 2.2 GiB/s on one core of an EPYC),
which would take the time of a core that computes. It finds damage; it is no protection against somebody who intends it.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import xxhash

from ds_vertical.interrupts import Descriptor
from ds_vertical.io.runs import held_folders, stripes

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

    Data = Buffer | NDArray[Any]

ALGORITHM: Final = "xxh3_64"
LARGEST_READ: Final = 1 << 23


class Piece(NamedTuple):
    """Bytes [offset, offset + num_bytes) of a file and the checksum of them."""

    offset: int
    num_bytes: int
    checksum: int

    @property
    def end(self) -> int:
        """The byte behind the piece."""
        return self.offset + self.num_bytes


def checksum(data: Data) -> int:
    """The XXH3 checksum, 64 bits, of a contiguous buffer of bytes."""
    return xxhash.xxh3_64_intdigest(data)  # type: ignore[arg-type] - it takes every buffer


class ChecksumError(RuntimeError):
    """A piece of a file is not what was written there. `path`, `offset`, `num_bytes`: the piece."""

    def __init__(self, path: str, written: Piece, found: int) -> None:
        super().__init__(
            f"{path}: read of {written.num_bytes} bytes at offset {written.offset}: the disk has returned other bytes than were"
            f" written (checksum {found:016x}, of those written {written.checksum:016x}); resume from the last good checkpoint,"
            " on another disk if it happens again"
        )
        self.path = path
        self.offset = written.offset
        self.num_bytes = written.num_bytes


class Checksums:
    """What was last written to each file, piece by piece. From any thread. Writes past it must be told by `forget`.

    [Note: verify] With `verify` what is read is held against what was written. Reads need not have the extents of the writes:
    checked are the pieces that lie wholly inside what was read. Bytes of which nobody knows anything (written by DeepSpeed
    itself) are learned, and checked from their next read on. Bytes of a piece that was read in part only are neither; so it
    goes after a load or a write by the user, until the next step has written them in its own pieces.
    `num_checked_bytes`, `num_learned_bytes`, `num_passed_bytes`: how many of each kind there were.
    """

    def __init__(self, verify: bool = False) -> None:
        self.verify = verify
        self.num_checked_bytes = self.num_learned_bytes = self.num_passed_bytes = 0
        self._lock = threading.Lock()
        self._files: dict[str, dict[int, Piece]] = {}

    def note(self, path: str | os.PathLike[str], offset: int, data: Data) -> None:
        """`data`, a contiguous buffer of bytes, is being written to a file from `offset` on. Other threads run meanwhile."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type] - arrays are buffers
        for span in stripes.stripes_of(path, offset, len(view)):
            part = view[span.start : span.start + span.num_bytes]
            self._note(span.path, Piece(span.offset, span.num_bytes, checksum(part)))

    def check(self, path: str | os.PathLike[str], offset: int, data: Data) -> None:
        """`data`, a contiguous buffer of bytes, has been read from a file from `offset` on; see [Note: verify]. Other threads
        run meanwhile. Without `verify` nothing happens. Raises ChecksumError."""
        if not self.verify:
            return
        view = memoryview(data).cast("B")  # type: ignore[arg-type] - arrays are buffers
        for span in stripes.stripes_of(path, offset, len(view)):
            self._check(span.path, span.offset, view[span.start : span.start + span.num_bytes])

    def _check(self, name: str, offset: int, view: memoryview) -> None:
        """Of a single file."""
        known, unknown = self._within(name, offset, offset + len(view))
        for piece in known:
            found = checksum(view[piece.offset - offset : piece.end - offset])
            if found != piece.checksum:
                raise ChecksumError(name, piece, found)
        for start, end in unknown:
            self.note(name, start, view[start - offset : end - offset])
        num_checked, num_learned = sum(piece.num_bytes for piece in known), sum(end - start for start, end in unknown)
        with self._lock:
            self.num_checked_bytes += num_checked
            self.num_learned_bytes += num_learned
            self.num_passed_bytes += len(view) - num_checked - num_learned

    def move(self, path: str | os.PathLike[str], new: str | os.PathLike[str]) -> None:
        """The file has another name now."""
        with self._lock:
            for old, name in zip(stripes.files_of(path), stripes.files_of(new), strict=True):
                if (pieces := self._files.pop(os.fspath(old), None)) is not None:
                    self._files[os.fspath(name)] = pieces

    def forget(self, path: str | os.PathLike[str]) -> None:
        """The file was written by somebody else, or is gone."""
        with self._lock:
            for each in stripes.files_of(path):
                self._files.pop(os.fspath(each), None)

    def clear(self) -> None:
        """Forget all files: state was written past the checksums."""
        with self._lock:
            self._files.clear()

    def pieces(self, path: str | os.PathLike[str], start: int, end: int) -> list[Piece]:
        """Pieces that make up bytes [start, end) of a file, one of a striped file's; read from it, and kept, where nobody
        noted them. Raises OSError."""
        found = self._tiles(os.fspath(path), start, end)
        if found is None:
            found = list(read_pieces(Path(path), start, end))
            for piece in found:
                self._note(os.fspath(path), piece)
        return found

    def _note(self, path: str, piece: Piece) -> None:
        with self._lock:
            pieces = self._files.setdefault(path, {})
            same = pieces.get(piece.offset)
            if same is None or same.num_bytes != piece.num_bytes:
                for other in [other for other in pieces.values() if other.offset < piece.end and piece.offset < other.end]:
                    del pieces[other.offset]
            pieces[piece.offset] = piece

    def _within(self, path: str, start: int, end: int) -> tuple[list[Piece], list[tuple[int, int]]]:
        """Pieces that lie wholly inside bytes [start, end) of a file, and the ranges there of which no piece has a byte."""
        with self._lock:
            pieces = self._files.get(path, {})
            exact = pieces.get(start)
            if exact is not None and exact.end == end:
                return [exact], []
            near = sorted(piece for piece in pieces.values() if piece.offset < end and start < piece.end)
        gaps, position = [], start
        for piece in near:
            if position < piece.offset:
                gaps.append((position, piece.offset))
            position = piece.end
        if position < end:
            gaps.append((position, end))
        return [piece for piece in near if start <= piece.offset and piece.end <= end], gaps

    def _tiles(self, path: str, start: int, end: int) -> list[Piece] | None:
        with self._lock:
            pieces, found = self._files.get(path, {}), []
            while start < end:
                if (piece := pieces.get(start)) is None or piece.end > end:
                    return None
                found.append(piece)
                start = piece.end
        return found


def read_pieces(path: Path, start: int, end: int) -> list[Piece]:
    """Checksums of bytes [start, end) of a file, read in pieces. Raises OSError, EOFError where the file is shorter."""
    found = []
    with Descriptor(partial(held_folders.open_file, path)) as fd:
        while start < end:
            num_bytes = min(LARGEST_READ, end - start)
            found.append(Piece(start, num_bytes, checksum_of(fd, path, start, num_bytes)))
            start += num_bytes
    return found


def checksum_of(fd: int, path: Path, start: int, num_bytes: int) -> int:
    """Of bytes of an open file. Raises OSError, EOFError where the file is shorter."""
    state, left = xxhash.xxh3_64(), num_bytes
    while left:
        data = os.pread(fd, min(left, LARGEST_READ), start)
        if not data:
            raise EOFError(f"{path}: the file ends at byte {start}, {left} bytes too early")
        state.update(data)
        start += len(data)
        left -= len(data)
    return state.intdigest()
