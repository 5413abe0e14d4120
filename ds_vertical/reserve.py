"""Memory that is kept for the next tensor of its size: given back to the system and asked for again, it would be faulted in
page by page in every step."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class Reserve:
    """1-d tensors that `make(numel)` makes, taken by their size and put back by whoever is done with them, from any thread.

    [Note: best fit] A tensor of the very size asked for is preferred, then the smallest one below twice that size. So a new
    one is made only while all that would fit are taken, and a reserve holds no more of a size than were ever taken at a time.
    """

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._spare: list[torch.Tensor] = []
        self.num_bytes = 0  # of all tensors, taken or not

    def take(self, numel: int) -> torch.Tensor:
        """A tensor of `numel` elements or somewhat more, contents undefined."""
        with self._lock:
            fitting = [spare for spare in self._spare if numel <= spare.numel() <= 2 * numel]
            if fitting:
                found = min(fitting, key=torch.Tensor.numel)
                self._spare = [spare for spare in self._spare if spare is not found]
                return found
        made = self._make(numel)
        with self._lock:
            self.num_bytes += made.numel() * made.element_size()
        return made

    def put_back(self, tensor: torch.Tensor) -> None:
        """The tensor's contents are wanted no longer. Twice is harmless as long as nobody took it between: an interrupt may
        leave a tensor with two owners, who both give it up."""
        with self._lock:
            if not any(spare is tensor for spare in self._spare):
                self._spare.append(tensor)

    def clear(self) -> None:
        """Give up what is not taken."""
        with self._lock:
            self.num_bytes -= sum(spare.numel() * spare.element_size() for spare in self._spare)
            self._spare = []
