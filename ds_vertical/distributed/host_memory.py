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

[Note: the file] The memory is a file in /dev/shm. Its bytes are reserved when it is made: where /dev/shm is too small that
fails at the start, and no write fails later. Containers of one machine may have one name, and /dev/shm apart. So the rank that
makes the file writes random bytes into it, and the others look for these in what they have opened. Then the file loses its
name: once no process has it mapped it is gone, however they have ended. Where one rank fails in any of that, all do without.
"""

from __future__ import annotations

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
        self._used: dict[int, int] = {}  # of the own region: the ends of the parts in use, by their beginnings
        self._given_up: deque[int] = deque()  # of those the beginnings of what nobody has any more

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory of this rank's region, for as long as the tensor is there; None where there is no room. Out of the smallest
        gap that is large enough: what has just been given up is the place of the next part of its size."""
        while self._given_up:
            del self._used[self._given_up.popleft()]
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        own = self._regions[self._number]
        ends, starts = [0, *sorted(self._used.values())], [*sorted(self._used), len(own)]
        gaps = [(start - end, end) for end, start in zip(ends, starts, strict=True) if start - end >= max(1, num_bytes)]
        if not gaps:
            return None
        _, first = min(gaps)
        self._used[first] = min(len(own), first + padded(max(1, num_bytes)))
        taken = own[first : first + num_bytes].view(dtype).view(*shape)
        weakref.finalize(taken, self._given_up.append, first).atexit = False
        return taken

    def has(self, part: torch.Tensor) -> bool:
        """Whether `part` lies in this rank's region."""
        return self._place(part) != _ELSEWHERE

    def parts_of_all(self, part: torch.Tensor, group: ProcessGroup) -> list[torch.Tensor] | None:
        """The parts of all ranks of the group, of the same shape; this rank's is `part`. None, on all ranks, where one has its
        part elsewhere. The parts are whole, and stay so until the ranks meet once more."""
        places = torch.empty(group.size(), dtype=torch.int64)
        ranks.ALL_GATHER(places, torch.tensor([self._place(part)]), group=group)
        if _ELSEWHERE in places:
            return None
        pairs = zip(self._regions, places.tolist(), strict=True)
        return [region[first : first + part.nbytes].view(part.dtype).view(part.shape) for region, first in pairs]

    def close(self) -> None:
        """Let go of the memory. It stays as long as there are tensors in it."""
        self._regions = torch.empty(len(self._regions), 0, dtype=torch.uint8)

    def _place(self, part: torch.Tensor) -> int:
        own = self._regions[self._number]
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
    size = _HEAD + len(members) * num_bytes
    path, token = _FOLDER / f"ds_vertical.{secrets.token_hex(8)}", secrets.token_bytes(32)
    mapped, fault = None, ""
    try:
        if ranks.rank() == members[0]:
            mapped, fault = _mapped(path, size, token, makes=True)
        path, token, others = ranks.all_gathered((path, token, fault))[members[0]]
        if ranks.rank() != members[0] and not others:
            mapped, fault = _mapped(path, size, token, makes=False)
        faults = ranks.all_gathered(fault)
    finally:
        if ranks.rank() == members[0]:
            path.unlink(missing_ok=True)
    told = next(((number, each) for number, each in enumerate(faults) if each), None)
    if told is None and mapped is not None:
        return SharedMemory(mapped, members.index(ranks.rank()), len(members))
    number, why = told or (0, "")
    accelerator.log(
        f"ds_vertical: the ranks of a host send each other {what} that they could share in memory ({size / 2**20:.1f} MiB of"
        f" {_FOLDER}): rank {number}: {why}"
    )
    return None


def _mapped(path: Path, size: int, token: bytes, makes: bool) -> tuple[torch.Tensor | None, str]:
    """The file's memory, or why there is none. `makes`: the file is to be made, with `token` at its beginning; else that must
    be there."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if makes else 0), 0o600)
        try:
            if makes:
                os.posix_fallocate(fd, 0, size)
                os.pwrite(fd, token, 0)
            elif os.fstat(fd).st_size != size or os.pread(fd, len(token), 0) != token:
                return None, f"{path} is not what another rank of this host has made"
            return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8), ""
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        return None, f"{type(error).__name__}: {error}"
