"""Memory that the ranks of one host share: what one of them puts there the others read, and no socket carries it.

[Note: memory of a host] On the CPU the ranks that share a copy of the weights have mapped one piece of memory. Each has a
region of it, all of one size, and puts its parts of copies there. Three things make a gather out of them:

- Each rank tells the others where its part lies: 8 bytes through their process group. So all parts are complete by then.
- Each rank copies all parts to where it needs them.
- The ranks meet in their process group once more. Behind that nobody reads the parts, and other values may take their place.

Sums over these ranks are made in the same way out of a piece of their own: a part is all terms of a rank, and each rank adds
those of its own sums, in the order in which they are added where they are sent.

A rank whose part lies elsewhere says so at first. Then the ranks send each other the parts, as they do without such memory.
That is so for a rank whose step has failed, which takes part with zeros, and where a region has no room. Which parts a rank has
put where need not be the same on all ranks. A rank that is gone is noticed by the process group: nobody watches the memory
itself to learn what another rank does.

[Note: the file] The memory is a file in /dev/shm. Containers of one machine may have one name, and /dev/shm apart. So the rank
that makes the file writes random bytes into it, and the others look for these in what they have opened. Then the file loses its
name: once no process has it open or mapped it is gone, however they have ended. Only then its maker reserves its bytes, since
of a rank that is killed while the file has a name it stays, and until then that is one page. Where /dev/shm is too small that
fails at the start, and no write fails later. Where one rank fails in any of that, all do without.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch.distributed import ProcessGroup

from ds_vertical.compat import accelerator
from ds_vertical.distributed import ranks

_FOLDER: Final = Path("/dev/shm")
_ALIGNMENT: Final = 64  # of parts
_HEAD: Final = 4096  # bytes ahead of the regions, which begin with the random ones
_ELSEWHERE: Final = -1


def padded(num_bytes: int) -> int:
    """What a part of so many bytes takes of a region."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class SharedMemory:
    """This rank's view of memory that the ranks of a group share, see [Note: memory of a host]. `number`: this rank's in the
    group. Parts may be taken on one thread at a time, and given up on any."""

    def __init__(self, mapped: torch.Tensor, number: int, count: int) -> None:
        self._regions = mapped[_HEAD:].view(count, -1)
        self._number = number
        self._count = itertools.count()
        self._used: dict[int, tuple[int, int]] = {}  # of the own region, by their numbers: (beginning, end) of the parts in use
        self._given_up: deque[int] = deque()  # the numbers of those that nobody has any more

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory of this rank's region, for as long as the tensor is there; None where there is no room. Out of the smallest
        gap that is large enough: what has just been given up is the place of the next part of its size."""
        own = self._regions[self._number]
        if not len(own):
            return None  # closed, which a collective that is still under way need not know
        while self._given_up:  # in this order: an interrupt between the two loses no place
            self._used.pop(self._given_up[0], None)
            self._given_up.popleft()
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        used = sorted(self._used.values())
        ends, starts = [0, *(end for _, end in used)], [*(start for start, _ in used), len(own)]
        gaps = [(start - end, end) for end, start in zip(ends, starts, strict=True) if start - end >= max(1, num_bytes)]
        if not gaps:
            return None
        _, first = min(gaps)
        number, taken = next(self._count), own[first : first + num_bytes].view(dtype).view(*shape)
        weakref.finalize(taken, self._given_up.append, number).atexit = False  # first: what is in use is given up some day
        self._used[number] = first, min(len(own), first + padded(max(1, num_bytes)))
        return taken

    def has(self, part: torch.Tensor) -> bool:
        """Whether `part` lies in this rank's region."""
        return self._place(part, self._regions) != _ELSEWHERE

    def parts_of_all(self, part: torch.Tensor, group: ProcessGroup) -> list[torch.Tensor] | None:
        """The parts of all ranks of the group, of the same shape; this rank's is `part`. None, on all ranks, where one has its
        part elsewhere. The parts are whole, and stay so until the ranks meet once more."""
        places, regions = torch.empty(group.size(), dtype=torch.int64), self._regions  # which may be closed meanwhile
        ranks.ALL_GATHER(places, torch.tensor([self._place(part, regions)]), group=group)
        if _ELSEWHERE in places:
            return None
        pairs = zip(regions, places.tolist(), strict=True)
        return [region[first : first + part.nbytes].view(part.dtype).view(part.shape) for region, first in pairs]

    def close(self) -> None:
        """Let go of the memory, from any thread. It stays as long as there are tensors in it. There is no room any more."""
        self._regions = torch.empty(len(self._regions), 0, dtype=torch.uint8)

    def _place(self, part: torch.Tensor, regions: torch.Tensor) -> int:
        own = regions[self._number]
        first = part.data_ptr() - own.data_ptr()
        return first if len(own) and 0 <= first <= len(own) - part.nbytes else _ELSEWHERE


class PartPlace:
    """Where a rank puts what others are to read: in `memory`, if there is any, and room in it. `read`: waits until the ranks of
    the host have read what may lie there now."""

    def __init__(self, memory: SharedMemory | None, read: Callable[[], None] = lambda: None) -> None:
        self._memory = memory
        self._read = read

    def new(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor of the dtype of `like`."""
        if self._memory is None:
            return like.new_empty(shape)
        found = self._memory.take(shape, like.dtype)
        if found is None:
            self._read()
            found = self._memory.take(shape, like.dtype)
        return like.new_empty(shape) if found is None else found

    def settled(self, part: torch.Tensor) -> torch.Tensor:
        """The part, where it is to stay."""
        if self._memory is None or self._memory.has(part):
            return part
        return self.new(tuple(part.shape), part).copy_(part)


# ---- how it is made


def shared_by(groups: Sequence[tuple[int, ...]], num_bytes: int, what: str) -> SharedMemory | None:
    """Memory that the ranks of each of the groups share, `num_bytes` for each rank. None, on all ranks, where it cannot be
    made; a line on rank 0 says why. Collective among all ranks. `groups`: has each rank once, and is the same on all;
    `what`: for the line."""
    members = next(group for group in groups if ranks.rank() in group)
    size, mapped = _HEAD + len(members) * num_bytes, None
    with contextlib.ExitStack() as open_files:
        fd, faults = _opened_by_all(members, size, open_files)
        if fd is not None and not any(faults):
            mapped, fault = _mapped(fd, size, reserves=ranks.rank() == members[0])
            faults = ranks.all_gathered(fault)
    told = next(((number, each) for number, each in enumerate(faults) if each), None)
    if told is None and mapped is not None:
        return SharedMemory(mapped, members.index(ranks.rank()), len(members))
    number, why = told or (0, "")
    accelerator.log(
        f"ds_vertical: the ranks of a host send each other {what} that they could share in memory ({size / 2**20:.1f} MiB of"
        f" {_FOLDER}): rank {number}: {why}"
    )
    return None


def _opened_by_all(members: Sequence[int], size: int, open_files: contextlib.ExitStack) -> tuple[int | None, list[str]]:
    """(a file that these ranks have opened, and that has no name any more; of all ranks why one has none). `open_files`: closes
    it. Collective."""
    makes = ranks.rank() == members[0]
    path, token = _FOLDER / f"ds_vertical.{secrets.token_hex(8)}", secrets.token_bytes(32)
    fd, fault = None, ""
    try:
        if makes:
            fd, fault = _opened(path, size, token, True, open_files)
        path, token, others = ranks.all_gathered((path, token, fault))[members[0]]
        if not makes and not others:
            fd, fault = _opened(path, size, token, False, open_files)
        return fd, ranks.all_gathered(fault)
    finally:
        if makes:
            path.unlink(missing_ok=True)


def _opened(path: Path, size: int, token: bytes, makes: bool, open_files: contextlib.ExitStack) -> tuple[int | None, str]:
    """The file, or why there is none. `makes`: it is to be made, with `token` at its beginning, and takes a page; else the
    token must be there."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if makes else 0), 0o600)
        open_files.callback(os.close, fd)
        if makes:
            os.truncate(fd, size)
            os.pwrite(fd, token, 0)
        elif os.fstat(fd).st_size != size or os.pread(fd, len(token), 0) != token:
            return None, f"{path} is not what another rank of this host has made"
    except (OSError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"
    return fd, ""


def _mapped(fd: int, size: int, reserves: bool) -> tuple[torch.Tensor | None, str]:
    """The file's memory, or why there is none. `reserves`: its bytes are to be reserved, which one rank does for all."""
    try:
        if reserves:
            os.posix_fallocate(fd, 0, size)
        return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8), ""
    except (OSError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"
