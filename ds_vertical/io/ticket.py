"""A transfer that has been started and is to be waited for."""

from __future__ import annotations

from collections.abc import Callable


class Ticket:
    """A transfer in flight: `wait` completes it, once; later calls return at once."""

    def __init__(
        self, what: str, wait: Callable[[], None], num_bytes: int = 0, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        self.what = what
        self.num_bytes = num_bytes
        self._wait: Callable[[], None] | None = wait
        self._is_over = is_over

    @property
    def done(self) -> bool:
        """Whether `wait` has completed the transfer."""
        return self._wait is None

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return, or raise, at once. False where nobody can tell before."""
        return self._wait is None or self._is_over()

    def after(self, earlier: Ticket) -> Ticket:
        """One ticket for both, the earlier one waited for first."""

        def wait() -> None:
            earlier.wait()
            self.wait()

        return Ticket(self.what, wait, self.num_bytes)

    def wait(self) -> None:
        """Complete the transfer. Raises what the transfer raises; then the next call waits again."""
        if self._wait is not None:
            self._wait()
            self._wait = None  # not before: an interrupted wait is no completed one
