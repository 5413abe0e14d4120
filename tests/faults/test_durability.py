"""What a save has synced when: a power cut between any two of its system calls leaves the earlier checkpoint or the new one.

No power is cut here. The calls of a whole `save_checkpoint` are noted in their order, and held against the rule that each name
comes after what it names: bytes, then the names in a rank's folder, then those in the tag's, then the switch, then `latest`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import running
from resuming import config_in, model_of, train

from ds_vertical.engine.checkpoint import manifest, tag_dir

Call = tuple[str, int, int]  # what, inode, bytes of the file then


class Calls(list[Call]):
    """The system calls that make bytes and names survive, in their order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        sync, exchange, rename, replace = os.fsync, tag_dir._exchange, os.rename, os.replace

        def synced(fd: int) -> None:
            sync(fd)
            status = os.fstat(fd)
            self.append(("sync", status.st_ino, status.st_size))

        def exchanged(one: Path, other: Path) -> bool:
            done = exchange(one, other)
            if done:
                self.append(("named", inode(other), 0))
            return done

        def renamed(call: Any, one: Any, other: Any, **folders: int) -> None:
            call(one, other, **folders)
            status = os.stat(other, dir_fd=folders.get("dst_dir_fd"))
            self.append(("named", status.st_ino, 0))

        patch.setattr(os, "fsync", synced)
        patch.setattr(tag_dir, "_exchange", exchanged)
        patch.setattr(os, "rename", lambda one, other, **folders: renamed(rename, one, other, **folders))
        patch.setattr(os, "replace", lambda one, other, **folders: renamed(replace, one, other, **folders))

    def named(self, path: Path) -> int:
        """When the path came to mean what it means now."""
        return max(index for index, call in enumerate(self) if call[:2] == ("named", inode(path)))

    def synced(self, path: Path) -> Iterator[int]:
        """Whenever the file, with all the bytes that it has now, or the folder was synced."""
        for index, (what, number, num_bytes) in enumerate(self):
            if what == "sync" and number == inode(path) and (path.is_dir() or num_bytes == path.stat().st_size):
                yield index


def inode(path: Path) -> int:
    return path.stat().st_ino


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("params", ["nvme", "cpu"])
def test_each_name_comes_after_what_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, params: str, again: bool) -> None:
    """To a new tag, and to one that is there; what is linked, and what rests in memory and is written."""
    saved, tag = tmp_path / "saved", tmp_path / "saved" / "one"
    with running(config_in(tmp_path / "ssd", params=params), model_of, vertical=True) as (engine, _):
        train(engine, range(1))
        if again:
            engine.save_checkpoint(str(saved), tag="one")
            train(engine, range(1, 2))
        with monkeypatch.context() as patch:
            calls = Calls(patch)
            engine.save_checkpoint(str(saved), tag="one")
        rank, switched = manifest.rank_folder(tag, 0), calls.named(tag)
        files = [path for path in rank.iterdir() if path.name != manifest.NAME]
        assert len(files) > 5
        of_rank = min(calls.synced(rank))
        for path in files:
            assert min(calls.synced(path)) < min(calls.synced(rank / manifest.NAME)), path
        assert max(min(calls.synced(path)) for path in rank.iterdir()) < of_rank
        assert min(calls.synced(tag / manifest.NAME)) < max(calls.synced(tag)) < switched
        assert of_rank < min(calls.synced(tag / manifest.NAME))
        latest = saved / "latest"
        assert min(calls.synced(latest)) < calls.named(latest)
        assert any(switched < index < calls.named(latest) for index in calls.synced(saved)), "latest may name what is not there"
        assert any(index > calls.named(latest) for index in calls.synced(saved))
