"""Host memory for more than the host has: tensors mapped from files of a folder that nobody can see."""

from __future__ import annotations

from pathlib import Path

import torch

from ds_vertical.distributed import ranks
from ds_vertical.errors import StorageError
from ds_vertical.io import files


class Scratch:
    """Flat tensors of this rank in mapped files of a folder, which have lost their names already and are gone with them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / f"scratch{ranks.rank()}"

    def check_room(self, num_bytes: int, what: str) -> None:
        """Raise StorageError unless so many bytes fit beside the files made of them. `what`: is written, for the message."""
        available = files.free_bytes(self._folder)
        if 2 * num_bytes > available:
            raise StorageError(
                f"{self._folder}: {what} needs {2 * num_bytes} bytes for this rank until it is complete"
                f" ({2 * num_bytes / 2**30:.2f} GiB), the file system has {available} free; free space or save elsewhere"
            )

    def tensor(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Zeros, with blocks on the disk: a page that found none would end the process."""
        files.preallocate({self._path: numel * dtype.itemsize})
        try:
            return torch.from_file(str(self._path), shared=True, size=numel, dtype=dtype)
        finally:
            files.remove_files([self._path])

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's values in a mapped file."""
        return self.tensor(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor.detach())
