"""Reads and writes on the SSD, past the page cache, every result checked.

[Note: order] The operations of one queue are issued to the kernel in their order but may complete in any other: what must
follow an operation is issued after its `wait`. The memory of an operation must neither move nor be used until then;
`DiskQueue` does not hold it; what is in flight when the process ends is completed first. Address, length and offset are
multiples of ALIGNMENT_BYTES, as O_DIRECT demands. A write that makes its file longer is done by the kernel at once, in the
queue's thread (ext4): preallocate.

[Note: one call] The native queue tells of each completion once. So it is asked by a call of C that puts the answer away itself:
an interrupt comes between two bytecodes, and would lose what the one has returned and the other not stored.

[Note: lanes of a queue] With several SSDs a queue has a native one for each: in one alone, what waits for a slow SSD would keep
back what is behind it and for another. A transfer of a file that lies on several of them (`stripes`) is one operation for each
of its spans, complete when all are.
"""

from __future__ import annotations

import atexit
import errno
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from ds_vertical.interrupts import waiting
from ds_vertical.io.disk_errors import remedy
from ds_vertical.io.runs import held_folders, stripes
from ds_vertical.io.runs.held_folders import HeldFolder
from ds_vertical.io.runs.stripes import Stripe

ALIGNMENT_BYTES = 512


class Completion(NamedTuple):
    """What the kernel made of one operation. Times are those of `time.monotonic_ns`."""

    start_ns: int
    end_ns: int
    errno: int
    call: str
    offset: int
    num_transferred: int


class NativeQueue(Protocol):
    """The queue that the op `checked_aio` makes. Its results are the fields of a Completion. Thread-safe."""

    def read(self, address: int, num_bytes: int, path: bytes, offset: int, folder: int, /) -> int:
        """Issue a read of a file's bytes from `offset` on to `address`; returns the operation's number. `folder`: the
        descriptor of the one in which `path` is a name, and no link; -1 for a path that is looked up as it is."""
        ...

    def write(self, address: int, num_bytes: int, path: bytes, offset: int, folder: int, /) -> int:
        """Issue a write of the bytes at `address` to a file, from `offset` on; returns the operation's number. `folder`: as
        of a read."""
        ...

    def wait(self, operation: int, /) -> tuple[int, int, int, str, int, int]:
        """Block until the operation is complete; returns its result, once."""
        ...

    def poll(self, operation: int, /) -> tuple[int, int, int, str, int, int] | None:
        """The result, once, of an operation that is complete; None of one in flight."""
        ...

    def wait_all(self) -> None:
        """Block until no operation is in flight; their results can still be asked for."""
        ...

    def pending(self) -> int:
        """The number of operations in flight."""
        ...


class DiskError(OSError):
    """A read or write that did not move all its bytes.

    `errno`, `strerror` and `filename` as in any OSError; `operation`: "read" or "write"; `call`: what failed, that or
    "open"; `offset`: position in the file of the first byte not transferred; `num_bytes`: bytes wanted;
    `num_transferred`: bytes before `offset`.
    """

    def __init__(self, operation: str, path: str, address: int, num_bytes: int, start: int, result: Completion) -> None:
        super().__init__(result.errno, _reason(result, address, num_bytes, start), path)
        self.operation = operation
        self.call = result.call
        self.offset = result.offset
        self.num_bytes = num_bytes
        self.num_transferred = result.num_transferred

    def __str__(self) -> str:
        name = errno.errorcode.get(self.errno or 0, str(self.errno))
        return (
            f"{self.filename}: {self.operation} of {self.num_bytes} bytes failed in {self.call} at offset {self.offset}"
            f" after {self.num_transferred} bytes: {self.strerror} ({name}); {remedy(self.errno)}"
        )


def _reason(result: Completion, address: int, num_bytes: int, start: int) -> str:
    if result.call == "read" and result.errno == errno.ENODATA:
        return f"the file ends at byte {result.offset}"
    parts = {"address": address, "length": num_bytes, "offset": start}
    unaligned = [f"{name} {value}" for name, value in parts.items() if value % ALIGNMENT_BYTES]
    if result.errno == errno.EINVAL and unaligned:
        return f"not a multiple of {ALIGNMENT_BYTES}: {', '.join(unaligned)}"
    if result.errno == errno.EINVAL and result.call == "open":
        return "the file system does not support O_DIRECT"
    return os.strerror(result.errno)


class Transfer:
    """An operation in flight. `num_bytes`: its length; `is_read`: its direction."""

    def __init__(self, queue: DiskQueue, is_read: bool, address: int, span: Stripe) -> None:
        """Issue the operation: `span` of a file, from or to the memory `span.start` behind `address`."""
        self.path, self.offset, self.num_bytes, start, self._lane = span
        self.is_read = is_read
        self._address = address + start
        self._queue = queue
        self._lock = threading.Lock()
        self._answers: list[tuple[int, int, int, str, int, int]] = []
        self._completion: Completion | None = None
        native = queue.lane(self._lane)
        issue = native.read if is_read else native.write
        try:
            folder, name = queue.locate(self.path)
        except OSError as error:  # told by `wait`, as what goes wrong later
            now = time.monotonic_ns()
            self._completion = Completion(now, now, error.errno or errno.EIO, "open", self.offset, 0)
            return
        self._id = issue(self._address, self.num_bytes, os.fsencode(name), self.offset, folder)

    @property
    def operations(self) -> Sequence[Transfer]:
        """The transfers of single files that it consists of: itself."""
        return (self,)

    @property
    def done(self) -> bool:
        """Whether nothing is in flight any more; raises nothing."""
        with self._lock:
            if self._completion is None:
                if not self._answers:
                    self._answers.extend(
                        filter(None, map(self._queue.lane(self._lane).poll, (self._id,)))
                    )  # see [Note: one call]
                self._take()
            return self._completion is not None

    @waiting
    def wait(self) -> Completion:
        """Complete the operation; later calls answer at once, the same. Raises DiskError when bytes are missing."""
        with self._lock:
            if self._completion is None:
                if not self._answers:
                    self._answers.extend(map(self._queue.lane(self._lane).wait, (self._id,)))  # see [Note: one call]
                self._take()
            completion = self._completion
        assert completion is not None
        if completion.errno:
            operation = "read" if self.is_read else "write"
            error = DiskError(operation, self.path, self._address, self.num_bytes, self.offset, completion)
            if not self.is_read:
                self._queue.failed_writes.setdefault(self, error)
            raise error
        return completion

    def _take(self) -> None:
        if self._answers:
            self._completion = done = Completion(*self._answers[0])
            self._queue.count(self.is_read, done.num_transferred)
            if self._queue.observer is not None:
                resource = "ssd_read" if self.is_read else "ssd_write"
                # monotonic_ns and perf_counter are one clock on Linux
                span = (done.start_ns * 1e-9, done.end_ns * 1e-9)
                self._queue.observer.span(resource, os.path.basename(self.path), *span, done.num_transferred)  # noqa: PTH119 - fast


class StripedTransfer(Transfer):
    """Operations in flight on several SSDs that move one range of a file that lies on them."""

    def __init__(self, queue: DiskQueue, is_read: bool, address: int, whole: Stripe, parts: Sequence[Stripe]) -> None:
        self.path, self.offset, self.num_bytes, *_ = whole
        self.is_read = is_read
        self._operations: list[Transfer] = []
        for part in parts:
            self._operations.append(Transfer(queue, is_read, address, part))

    @property
    def operations(self) -> Sequence[Transfer]:
        """The transfers of single files that it consists of."""
        return self._operations

    @property
    def done(self) -> bool:
        """Whether nothing is in flight any more; raises nothing."""
        return all([operation.done for operation in self._operations])

    def wait(self) -> Completion:
        """Complete all operations. Raises the first DiskError once they are."""
        found: list[Completion] = []
        error: DiskError | None = None
        for operation in self._operations:
            try:
                found.append(operation.wait())
            except DiskError as failure:
                error = error or failure
        if error is not None:
            raise error
        start, end = min(each.start_ns for each in found), max(each.end_ns for each in found)
        return Completion(start, end, 0, found[0].call, self.offset, sum(each.num_transferred for each in found))


class Observer(Protocol):
    """Is told of every operation that the caller of a queue has seen complete."""

    def span(self, resource: str, name: object, start: float, end: float, num_bytes: int = 0) -> None:
        """`resource` ("ssd_read" or "ssd_write") has worked on the file `name` from `start` to `end`, in seconds of
        `time.perf_counter`, and moved `num_bytes`."""
        ...


class DiskQueue:
    """One queue per direction and purpose, since operations of one queue share its depth.

    `num_read_bytes`, `num_written_bytes`: bytes transferred by the operations that were seen to complete. `observer` is told
    of each as work of "ssd_read" or "ssd_write". `others`: native queues for the SSDs behind the first: see [Note: lanes of a
    queue].
    """

    observer: Observer | None = None

    def __init__(self, native: NativeQueue, *others: NativeQueue) -> None:
        self._native: NativeQueue | None = native
        self._others = others
        self._lock = threading.Lock()
        self.num_read_bytes = 0
        self.num_written_bytes = 0
        self.failed_writes: dict[Transfer, DiskError] = {}  # in the order in which they were waited for
        self._folders: set[HeldFolder] = set()  # that operations were given: no run's end closes them while one is in flight
        _OPEN.add(self)

    @property
    def native(self) -> NativeQueue:
        """The queue of the op. Raises ValueError once `close` has been called."""
        if self._native is None:
            raise ValueError("the queue was closed")
        return self._native

    def lane(self, number: int) -> NativeQueue:
        """The native queue for the SSD of this number; the first one where there is none for it. Raises as `native`."""
        first = self.native
        return self._others[number - 1] if 0 < number <= len(self._others) else first

    @property
    def write_error(self) -> DiskError | None:
        """The first write that was seen to fail, and not forgotten."""
        return next(iter(self.failed_writes.values()), None)

    def give_up(self, writes: Iterable[Transfer]) -> None:
        """Complete writes that nobody needs any more, and forget what came of them."""
        for write in writes:
            complete(write)
            for operation in write.operations:
                self.failed_writes.pop(operation, None)

    @waiting
    def settle(self) -> None:
        """Return when nothing is in flight, of what an interrupt has made somebody forget either."""
        if self._native is not None:
            for native in (self._native, *self._others):
                native.wait_all()

    def read(self, address: int, num_bytes: int, path: str | os.PathLike[str], offset: int = 0) -> Transfer:
        """Start reading bytes [offset, offset + num_bytes) of `path` to `address`. Returns at once."""
        return self._issue(True, address, Stripe(os.fspath(path), offset, num_bytes))

    def write(self, address: int, num_bytes: int, path: str | os.PathLike[str], offset: int = 0) -> Transfer:
        """Start writing `num_bytes` at `address` to `path` from byte `offset`; makes the file. Returns at once."""
        return self._issue(False, address, Stripe(os.fspath(path), offset, num_bytes))

    def locate(self, path: str) -> tuple[int, str]:
        """Where an operation finds its file, as the native queue takes it: the descriptor of a folder of the run, or -1, and a
        name. Raises OSError."""
        folder, name = held_folders.locate(path)
        if folder is None:
            return -1, name
        self._folders.add(folder)
        return folder.fd, name

    def _issue(self, is_read: bool, address: int, whole: Stripe) -> Transfer:
        parts = stripes.stripes_of(whole.path, whole.offset, whole.num_bytes)
        if len(parts) == 1:
            return Transfer(self, is_read, address, parts[0])
        return StripedTransfer(self, is_read, address, whole, parts)

    def count(self, is_read: bool, num_bytes: int) -> None:
        """Add the bytes of an operation that was seen to complete; from any thread."""
        with self._lock:
            if is_read:
                self.num_read_bytes += num_bytes
            else:
                self.num_written_bytes += num_bytes

    def close(self) -> None:
        """Complete what is in flight; nothing can be issued afterwards, nor waited for. Twice is harmless."""
        if self._native is not None:
            for native in (self._native, *self._others):
                native.wait_all()
            self._native, self._others = None, ()
            self.forget_folders()

    def forget_folders(self) -> None:
        """Hold no folder any more: nothing is in flight, or it is another process's."""
        self._folders.clear()


def complete(transfer: Transfer) -> bool:
    """Wait for a transfer whose failure the caller need not raise; returns whether it has moved all its bytes."""
    try:
        transfer.wait()
    except OSError:
        return False
    return True


_OPEN: weakref.WeakSet[DiskQueue] = weakref.WeakSet()


def _forget_in_child() -> None:
    """What is in flight is a forked child's parent's, and so are the folders that queues hold."""
    for queue in list(_OPEN):
        queue.forget_folders()
    _OPEN.clear()


os.register_at_fork(after_in_child=_forget_in_child)


@atexit.register
def _complete_all() -> None:
    """A process may end without closing its queues, and the memory of their operations goes before they do."""
    for queue in list(_OPEN):
        queue.close()
