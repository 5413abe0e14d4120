"""What a save that an interrupt has cut leaves: the last checkpoint whole, `latest` at a whole one, and nothing for good."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_kinds import STEPS, make
from cutting import Cut, Site, are_reached, chosen, recorded
from harness import contents, differing, dispose

from ds_vertical.engine.checkpoint import manifest
from ds_vertical.errors import TornStateError

Tensors = dict[str, torch.Tensor]
BASE, NEXT = "base", "next"
# With its mark empty; made, and nobody knows it yet; without its mark
AROUND_A_FOLDER = ("_write_mark c_return fchmod", "TagFolder._hold_new return", "remove_named call")


class Saves:
    """An engine with a checkpoint after its second step (`base`), from which each cut save starts over.

    `tag`: of the save that is cut. "again" is there already, with what `base` has; "new" is not.
    """

    def __init__(self, folder: Path, kind: str, tag: str) -> None:
        self.saved, self._tag = folder / "saved", tag
        self._make = partial(make, kind)
        self._folder, self._made = folder, 0
        self._engine, self._model = self._new()
        self._train(2)
        self._engine.save_checkpoint(str(self.saved), tag=BASE)
        self.first = contents(self._engine, self._model)
        self._ready()
        self.second = contents(self._engine, self._model)
        self.torn = 0

    def _new(self) -> Any:
        self._made += 1
        return self._make(self._folder / str(self._made))

    def _train(self, end: int) -> None:
        while self._engine.global_steps < end:
            self._engine.train_batch(iter(STEPS[self._engine.global_steps]))

    def _ready(self) -> None:
        """The third step is behind the engine, and the folder holds what it is to hold before the save that is cut."""
        if self._tag == "again":
            self._engine.save_checkpoint(str(self.saved), tag=self._tag)
        self._train(3)

    def save(self) -> None:
        self._engine.save_checkpoint(str(self.saved), tag=self._tag)

    def start_over(self) -> None:
        """The engine and the folder are as after the second step."""
        self._load(BASE, self.first)
        for tag in {self._tag, NEXT}:
            shutil.rmtree(self.saved / tag, ignore_errors=True)
        (self.saved / manifest.LATEST).write_text(BASE)
        self._ready()

    def _load(self, tag: str | None, *expected: Tensors) -> None:
        """A load has the bits of one of `expected`."""
        self._engine.load_checkpoint(str(self.saved), tag=tag)
        found = contents(self._engine, self._model)
        assert any(not differing(each, found) for each in expected), f"{tag or 'latest'} has other bits than a step's"

    def cut(self, cut: Cut) -> None:
        """Cut the save, and look at what it leaves; then save again."""
        with contextlib.suppress(KeyboardInterrupt), cut:
            self.save()
        self._check_folder()
        try:
            assert not differing(self.second, contents(self._engine, self._model))
        except TornStateError:
            self.torn += 1
            self._drop()
            self._engine, self._model = self._new()
        named = manifest.read_latest(self.saved)
        may_be_old = named == BASE or self._tag == "again"
        self._load(None, *(() if named == BASE else (self.second,)), *((self.first,) if may_be_old else ()))
        self._engine.save_checkpoint(str(self.saved), tag=NEXT)
        self._check_folder()
        strays = [path.name for path in self.saved.iterdir() if path.name.startswith(".")]
        assert not strays, f"left for good: {strays}"
        assert manifest.read_latest(self.saved) == NEXT

    def _check_folder(self) -> None:
        """Each tag is whole, the last one is there, and `latest` names one of them."""
        tags = manifest.complete_tags(self.saved)
        assert {BASE, manifest.read_latest(self.saved)} <= set(tags) <= {BASE, self._tag, NEXT}, tags
        for tag in tags:
            manifest.check_manifest(self.saved / tag, manifest.read_rank(self.saved / tag, 0))

    def forget(self) -> None:
        """What a cut has left where it should not: the next one is judged by itself."""
        for path in self.saved.glob(".*"):
            shutil.rmtree(path)

    def _drop(self) -> None:
        with contextlib.suppress(Exception):  # of one that is torn
            dispose(self._engine)

    def close(self) -> None:
        self._drop()


def saves(folder: Path, kind: str, tag: str, count: int | None, at: Callable[[Site], bool] = bool) -> None:
    """Cut a save in `count` places, evenly spread, or in all; in those that `at` takes."""
    run = Saves(folder, kind, tag)
    wrong: list[str] = []
    try:
        with recorded() as found:
            run.save()
        cuts = [cut for cut in chosen(found, count) if at(cut.site)]
        for cut in cuts:
            run.start_over()
            try:
                run.cut(cut)
            except Exception as error:
                wrong.append(f"{cut}: {type(error).__name__}: {error}")
                run.forget()
    finally:
        run.close()
    reached = sum(bool(cut.done) for cut in cuts)
    print(f"save to a tag {tag}, {kind}: {len(cuts)} cuts, {reached} reached, {run.torn} marked torn: {len(wrong)} wrong")
    assert not wrong, "\n".join(wrong)
    assert len(found) > 300, f"boundaries of functions are not seen: {len(found)}"
    assert are_reached(cuts), [str(cut) for cut in cuts if not cut.done]


@pytest.mark.parametrize("tag", ["new", "again"])
def test_a_save_that_is_cut_leaves_whole_checkpoints_and_the_next_one_works(tmp_path: Path, tag: str) -> None:
    saves(tmp_path, "delayed", tag, 3)


def test_a_folder_beside_the_tags_is_gone_where_its_making_and_its_deletion_are_cut(tmp_path: Path) -> None:
    saves(
        tmp_path, "early", "new", None, lambda site: f"{site.function} {site.event} {site.callee}".rstrip() in AROUND_A_FOLDER
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("tag", ["new", "again"])
@pytest.mark.parametrize("kind", ["early", "delayed", "memory"])
def test_a_save_that_is_cut_anywhere_leaves_whole_checkpoints_and_the_next_one_works(
    tmp_path: Path, kind: str, tag: str
) -> None:
    saves(tmp_path, kind, tag, None)
