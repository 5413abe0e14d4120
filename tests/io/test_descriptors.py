"""Descriptors of what is opened for a moment: no interrupt leaves one open, nor ends the process over transfers in flight."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cutting import CtrlC, chosen, recorded
from stock_aio import load_aio, new_handle

from ds_vertical.compat.swap_handles import HeldHandle
from ds_vertical.io import checksums, files, remove_tree
from ds_vertical.io.regular_file import read_regular
from ds_vertical.io.runs import held_folders, run_lock
from ds_vertical.io.runs.run_dir import RunFolder

NUM_BYTES = 4096


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


@pytest.mark.parametrize("action", [look_into, hold_a_new_folder, preallocate, read_the_lock, checksum_the_lock])
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


def drop_in_flight(folder: Path) -> None:
    """Start writes through DeepSpeed's handle, and give it up without a wait."""
    handle = HeldHandle(new_handle(load_aio(None)))
    memory = torch.ones(64 * NUM_BYTES, dtype=torch.uint8)
    for index in range(4):
        handle.async_pwrite(memory, str(folder / str(index)), 0)
    del handle
    gc.collect()
    assert all((folder / str(index)).stat().st_size == memory.nbytes for index in range(4))


def test_a_handle_that_goes_while_it_writes_ends_no_process(tmp_path: Path) -> None:
    """DeepSpeed's own ends it with an assertion in C++, as after Ctrl-C while zero.Init writes the model."""
    child = os.fork()
    if child == 0:
        try:
            drop_in_flight(tmp_path)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
