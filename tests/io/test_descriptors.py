"""Descriptors of what is opened for a moment: no interrupt leaves one open, nor ends the process over transfers in flight."""

from __future__ import annotations

import gc
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import forks
import pytest
from cutting import CtrlC, chosen, recorded

from ds_vertical.interrupts import Descriptor
from ds_vertical.io import checksums, files, remove_tree
from ds_vertical.io.regular_file import read_regular
from ds_vertical.io.runs import held_folders, run_lock
from ds_vertical.io.runs.run_dir import RunFolder

NUM_BYTES = 4096
SUPPORT = str(Path(__file__).parents[1] / "support")


@pytest.fixture(autouse=True)
def python_hears_ctrl_c() -> Iterator[None]:
    """In the background of a shell it does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    claimed = RunFolder.claim(tmp_path, "run1", 0)
    yield claimed
    claimed.release()


def look_into(run: RunFolder) -> None:
    with remove_tree.opened(run.path):
        pass


def hold_a_new_folder(run: RunFolder) -> None:
    tree = held_folders.HeldTree(run.path, held_folders.HeldFolder(lambda: os.open(run.path, remove_tree.FOLDER)))
    tree.folder(f"{run.path}/zero/rank0", make=True)


def preallocate(run: RunFolder) -> None:
    path = run.path / "file"
    files.preallocate({path: NUM_BYTES})
    path.unlink()


def read_the_lock(run: RunFolder) -> None:
    assert read_regular(run.lock_path, NUM_BYTES)
    assert run_lock.owner_above(run.path) is not None


def checksum_the_lock(run: RunFolder) -> None:
    assert checksums.read_pieces(run.lock_path, 0, 8)


def descriptors() -> list[str]:
    """What each open one has open."""
    found = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(path) for path in found if os.path.lexists(path))  # the listing's own is gone


@pytest.mark.parametrize(
    "action",
    [
        look_into,
        hold_a_new_folder,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (preallocate, read_the_lock, checksum_the_lock)),
    ],
)
def test_ctrl_c_at_any_boundary_leaves_no_descriptor_open(run: RunFolder, action: Callable[[RunFolder], None]) -> None:
    action(run)
    with recorded() as found:
        action(run)
    gc.collect()
    before = descriptors()
    cuts = chosen(found, kind=CtrlC)
    for cut in cuts:
        try:
            with cut:
                action(run)
        except KeyboardInterrupt:
            pass
        (run.path / "file").unlink(missing_ok=True)
        if descriptors() != before:
            gc.collect()  # not each time: it takes as long as all else
        assert descriptors() == before, str(cut)
    assert sum(bool(cut.done) for cut in cuts) > 0.9 * len(cuts) > 0


IN_FLIGHT = """
import gc, pathlib, sys
sys.path.append(sys.argv[2])
import torch
from stock_aio import load_aio, new_handle
from ds_vertical.compat.swap_handles import HeldHandle
handle = HeldHandle(new_handle(load_aio(None)))
memory = torch.ones(1 << 20, dtype=torch.uint8)
names = [f"{sys.argv[1]}/{index}" for index in range(4)]
for name in names:
    handle.async_pwrite(memory, name, 0)
del handle
gc.collect()
print(*(pathlib.Path(name).stat().st_size for name in names))
"""


def test_a_handle_that_goes_while_it_writes_ends_no_process(tmp_path: Path) -> None:
    """DeepSpeed's own ends it with an assertion in C++, as after Ctrl-C while zero.Init writes the model."""
    done = forks.run(tmp_path, [sys.executable, "-c", IN_FLIGHT, str(tmp_path), SUPPORT], dict(os.environ), 100, engine=True)
    assert (done.returncode, done.stdout.split()[-4:]) == (0, 4 * [str(1 << 20)]), done.stderr


def test_a_forked_child_waits_for_none_of_its_parents_transfers(tmp_path: Path) -> None:
    forked = IN_FLIGHT.replace(
        "del handle", "import os\nif (pid := os.fork()) == 0: sys.exit()\nos.waitpid(pid, 0)\ndel handle"
    )
    done = forks.run(tmp_path, [sys.executable, "-c", forked, str(tmp_path), SUPPORT], dict(os.environ), 100, engine=True)
    assert (done.returncode, done.stdout.split()[-4:]) == (0, 4 * [str(1 << 20)]), done.stderr


def test_ctrl_c_while_a_descriptor_is_closed_leaves_it_to_nobody(run: RunFolder) -> None:
    """Python's own function that closes it is cut right behind its first call."""
    before = descriptors()
    opened = Descriptor(lambda: os.open(run.path, remove_tree.FOLDER))

    def hook(frame: FrameType, event: str, _: object) -> None:
        if event == "c_return" and frame.f_code is weakref.finalize.__call__.__code__:
            sys.setprofile(None)
            signal.getsignal(signal.SIGINT)(signal.SIGINT, frame)  # type: ignore[operator, misc]

    sys.setprofile(hook)
    try:
        with pytest.raises(KeyboardInterrupt):
            opened.close()
    finally:
        sys.setprofile(None)
    assert descriptors() == before
