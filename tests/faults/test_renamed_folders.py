"""A neighbour who may rename in nvme_path puts his own folder, or a link to one, in the place of a run's, with files of the
same names and sizes: the run goes on in its own, with its bits, and nothing of his is read, written or deleted."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from harness import contents, differing, running, start_process_group
from resuming import CLIP, Tensors, config_in, loaded, model_of, train
from run_owners import digest

import ds_vertical
from ds_vertical.errors import StorageError
from ds_vertical.io.runs import run_dir

EVERYTHING_ON_SSD = {"device": "ssd", "keep": "everything", "keep_device": "ssd"}
slow = pytest.mark.slow


class Neighbour:
    """Who acts in `root`, an nvme_path with the folder of one run. `name`: which folder he takes the place of, below the run's;
    `by_link`: his is elsewhere, and a link to it stands there."""

    def __init__(self, root: Path, name: str, by_link: bool) -> None:
        self.root, self.name, self.by_link = root, name, by_link
        self.theirs = Path()

    def act(self) -> None:
        (run,) = (path for path in run_dir.claimed() if path.parent == self.root.resolve())
        place, moved = run / self.name, self.root / "moved"
        place.rename(moved)
        self.theirs = self.root / "outside" if self.by_link else place
        for path in (moved, *sorted(moved.rglob("*"))):
            copy = self.theirs / path.relative_to(moved)
            copy.mkdir() if path.is_dir() else copy.write_bytes(b"\x7f" * path.stat().st_size)  # 3.4e38 each
            if os.geteuid() == 0:
                os.chown(copy, 1000, 1000)  # another user's
        if self.by_link:
            place.symlink_to(self.theirs)
        self.before = self._looked_at()

    def _looked_at(self) -> dict[str, bytes | None]:
        """What there is, with the files as if nobody had read them."""
        found = digest(self.theirs)
        for path in self.theirs.rglob("*"):
            os.utime(path, ns=(0, path.stat().st_mtime_ns))
        return found

    def assert_unharmed(self) -> None:
        """Nobody has read or written his files, nor made or deleted any."""
        read = [path for path in self.theirs.rglob("*") if path.is_file() and path.stat().st_atime_ns]
        assert read == [] and self._looked_at() == self.before


def release(root: Path) -> None:
    """End the run whose folder is in `root`, as its process does when it ends."""
    for path in run_dir.claimed():
        if path.parent == root.resolve() and (folder := run_dir.owned(path)) is not None:
            folder.release()


@pytest.fixture
def neighbour_of(tmp_path: Path) -> Iterator[Callable[[str, bool, str], Neighbour]]:
    made: list[Neighbour] = []

    def make(name: str, by_link: bool, ssd: str = "ssd0") -> Neighbour:
        made.append(Neighbour(tmp_path / ssd, name, by_link))
        return made[-1]

    yield make
    for neighbour in made:
        release(neighbour.root)
        shutil.rmtree(neighbour.root)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Tensors]:
    """Losses and contents of a run of its own: four steps."""
    with running(config_of(tmp_path_factory.mktemp("own")), model_of, vertical=True) as (engine, model):
        return train(engine, range(4)), contents(engine, model)


def config_of(folder: Path, ssds: int = 1) -> dict[str, Any]:
    """All that may be on SSD is: parameters, state, gradients that wait for the norm, activations and kept ones."""
    section: dict[str, Any] = {"gradient_host_share": 0.0, "activations": EVERYTHING_ON_SSD}
    if ssds > 1:
        section["nvme_paths"] = [str(folder / f"ssd{number}") for number in range(ssds)]
    return config_in(folder / "ssd0", clip=CLIP, section=section)


@pytest.mark.parametrize("by_link", [False, True], ids=["folder", "link"])
@pytest.mark.parametrize(
    ("name", "ssd"),
    [("", "ssd0"), pytest.param("zero_stage_3", "ssd0", marks=slow), pytest.param("", "ssd1", marks=slow)],
    ids=["run", "inner", "second-ssd"],
)
def test_a_run_goes_on_in_its_own_folder(
    tmp_path: Path,
    neighbour_of: Callable[..., Neighbour],
    expected: tuple[list[float], Tensors],
    caplog: pytest.LogCaptureFixture,
    name: str,
    ssd: str,
    by_link: bool,
) -> None:
    """Between two steps; evaluations, stock's own reads, a save and its links follow. With another SSD's folder, too."""
    neighbour = neighbour_of(name, by_link, ssd)
    with running(config_of(tmp_path, 1 if ssd == "ssd0" else 2), model_of, vertical=True) as (engine, model):
        losses = train(engine, range(2))
        neighbour.act()
        losses += train(engine, range(2, 4))
        assert losses == expected[0]
        for param in model.parameters():  # DeepSpeed's swapper reads and writes the same
            master, moment = safe_get_full_fp32_param(param), safe_get_full_optimizer_state(param, "exp_avg")
            assert master is not None and moment is not None and master.abs().max() < 100 > moment.abs().max()
            safe_set_full_fp32_param(param, master)
        assert differing(contents(engine, model), expected[1]) == []
        engine.save_checkpoint(str(tmp_path / "saved"), tag="good")
        neighbour.assert_unharmed()
        further = train(engine, range(4, 5))
    neighbour.assert_unharmed()
    if not name:
        release(neighbour.root)
        assert f"it is {neighbour.root.resolve()}/moved now; delete it by hand" in caplog.text
        neighbour.assert_unharmed()
    with loaded(config_of(tmp_path / "later"), tmp_path / "saved", tag="good") as (engine, model):
        assert differing(contents(engine, model), expected[1]) == []
        assert train(engine, range(4, 5)) == further


@pytest.mark.parametrize("by_link", [False, True], ids=["folder", "link"])
@pytest.mark.parametrize("when", ["building", "built"])
def test_a_model_is_built_and_prepared_in_its_own_folder(
    tmp_path: Path, neighbour_of: Callable[..., Neighbour], expected: tuple[list[float], Tensors], when: str, by_link: bool
) -> None:
    """zero.Init writes the parameters, `initialize` makes the folders and files of everything else."""
    neighbour = neighbour_of("", by_link)

    def build() -> torch.nn.Module:
        if when == "building":
            neighbour.act()
            return model_of()
        model = model_of()
        neighbour.act()
        return model

    with running(config_of(tmp_path), build, vertical=True) as (engine, model):
        assert train(engine, range(4)) == expected[0]
        assert differing(contents(engine, model), expected[1]) == []
    neighbour.assert_unharmed()


class Outside:
    """Somebody's folder, with the names in it that DeepSpeed's have, and a link to it in the place of one of the run's."""

    def __init__(self, root: Path, place: str) -> None:
        self.ssd, self.folder, self.place = root / "ssd0", root / "outside", place
        for inner in ("fp32", "bf16", "float32params", "bfloat16params", "optimizer"):
            (self.folder / inner / "rank0").mkdir(parents=True)
            (self.folder / inner / "rank0" / "thesis.tex").write_text("mine")
        self.before = digest(self.folder)

    def link(self) -> None:
        (run,) = (path for path in run_dir.claimed() if path.parent == self.ssd.resolve())
        (run / self.place).symlink_to(self.folder)

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        told = f"/{self.place}.*: make the folder: .*a file or a link is where a folder belongs"
        with pytest.raises(StorageError, match=told):
            yield
        assert digest(self.folder) == self.before
        release(self.ssd)


def test_a_link_where_zero_init_makes_its_folder_is_refused(tmp_path: Path) -> None:
    """DeepSpeed deletes and makes it by path."""
    start_process_group()
    outside = Outside(tmp_path, "zero_stage_3")
    prepared = ds_vertical.prepare(config_of(tmp_path))
    outside.link()
    with outside.refused():
        deepspeed.zero.Init(config_dict_or_path=prepared)


def test_a_link_where_the_optimizer_makes_its_folder_is_refused(tmp_path: Path) -> None:
    outside = Outside(tmp_path, "zero_stage_3/optimizer")

    def build() -> torch.nn.Module:
        outside.link()
        return model_of()

    with outside.refused(), running(config_of(tmp_path), build, vertical=True):
        pass
