"""A folder on an SSD with a run in it and others' folders beside, and what a neighbour may do there who may rename."""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_owners import digest, mark_parts, write_lock

from ds_vertical.cli import clean
from ds_vertical.engine.checkpoint import parts
from ds_vertical.io import files as io_files
from ds_vertical.io.runs import run_dirs
from ds_vertical.io.runs.run_dir import RunFolder

RUN = "20260131-235959-node7-1f2e3d4c"
CALLS = ("open", "os.listdir", "os.scandir", "os.remove", "os.rmdir", "os.rename", "os.chmod")
CALLS += ("os.mkdir", "os.link", "os.truncate")  # of audit events


class Place:
    """An nvme_path with a dead run, or one of this process, and with folders of others."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True)
        self.root, self.run, self.outside = root, root / RUN, root / "outside"
        self.home = root / parts.PARTS_FOLDER / "step5.0badcafe"
        for folder in (self.outside, self.outside / "zero", self.outside / "zero" / "rank0", self.outside / "rank0"):
            folder.mkdir()
            for name in ("state.swp", "thesis.tex", "rank0.lock", "weight3.ssd1.bin"):
                (folder / name).write_text(f"mine, in {folder.name}")
        shutil.copytree(self.outside, root / "theirs")
        self.before = digest(self.outside)
        self.inner = "zero"  # a folder in the run's

    def fill(self, run: Path) -> None:
        (run / "zero" / "rank0").mkdir(parents=True)
        for folder in (run, run / "zero", run / "zero" / "rank0"):
            with (folder / "state.swp").open("xb") as file:  # "x": not through a link of the neighbour's
                file.write(b"x" * 100)

    def dead(self) -> Callable[[], Any]:
        made = write_lock(self.root.parent / f"made in {self.root.name}", run=RUN)  # out of the neighbour's reach
        self.fill(made)
        try:
            made.rename(self.run)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return lambda: run_dirs.remove_run(self.run, named=True)

    def own(self) -> Callable[[], Any]:
        folder = RunFolder.claim(self.root, RUN, 0)
        self.fill(self.run)
        return folder.release

    def files(self) -> Callable[[], Any]:
        RunFolder.claim(self.root, RUN, 0)
        self.fill(self.run)
        return lambda: (io_files.make_run_private(self.run), io_files.remove_files([self.run / "zero" / "rank0" / "state.swp"]))

    def cleaned(self) -> Callable[[], Any]:
        self.dead()
        return lambda: clean.main(["--path", str(self.root), "--remove", RUN])

    def grown(self) -> Callable[[], Any]:
        RunFolder.claim(self.root, RUN, 0)
        self.fill(self.run)
        places = (self.run / "zero" / "rank0", self.run / "zero", self.run / "zero" / "rank0" / "new" / "below")
        sizes = {folder / name: 8192 for folder in places for name in ("new.swp", "state.swp")}
        return lambda: io_files.preallocate(sizes)

    def aside(self) -> Callable[[], Any]:
        RunFolder.claim(self.root, RUN, 0)
        self.fill(self.run)
        places = (self.run / "zero" / "rank0", self.run / "zero")
        pairs = {folder / "state.swp": folder / "state.swp.1" for folder in places}
        return lambda: io_files.set_aside(pairs, vacated=[places[1] / "state.swp"])

    def parts(self) -> Callable[[], Any]:
        (self.home / "rank0").mkdir(parents=True)
        (self.home / "rank0" / "weight3.ssd1.bin").write_bytes(b"x" * 100)
        mark_parts(self.home, self.root / "step5", "0badcafe")
        return lambda: parts.remove_parts(self.home)

    def harmed(self) -> bool:
        places = (self.outside, self.root / "theirs", self.run, self.home)
        kept = [folder for folder in places if (folder / "thesis.tex").exists()]
        modes = {stat.S_IMODE(path.stat().st_mode) for folder in kept for path in (folder, *folder.rglob("*")) if path.is_dir()}
        changed = [folder for folder in (self.outside, *kept) if digest(folder) != self.before]
        return bool(changed) or len(kept) < 2 or modes != {0o755}

    # what a neighbour may do

    def link_run(self) -> None:
        self.run.rename(self.root / "moved")
        self.run.symlink_to(self.outside)

    def replace_run(self) -> None:
        self.run.rename(self.root / "moved")
        (self.root / "theirs").rename(self.run)

    def link_home(self) -> None:
        self.home.rename(self.root / "moved")
        self.home.symlink_to(self.outside)

    def replace_home(self) -> None:
        self.home.rename(self.root / "moved")
        (self.root / "theirs").rename(self.home)

    def link_zero(self) -> None:
        (self.run / "zero").rename(self.root / "moved")
        (self.run / "zero").symlink_to(self.outside / "zero")

    def link_rank(self) -> None:
        (self.run / "zero" / "rank0").rename(self.root / "moved")
        (self.run / "zero" / "rank0").symlink_to(self.outside / "zero" / "rank0")
