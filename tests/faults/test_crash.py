"""Runs that are killed (SIGKILL) at any moment go on from their last checkpoint in a new process, with the bits of one that was
never killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from crash_worker import EVERY, NUM_TAGS, Log, Starter, bytes_below, evaluate
from harness import contents, differing, running
from resuming import assert_whole, config_in, model_of, train

from ds_vertical.cli import clean
from ds_vertical.engine.checkpoint import manifest, save
from ds_vertical.engine.checkpoint.save import POINTS
from ds_vertical.io.runs import held_folders

NUM_KILLS = 50
NUM_SOAK_STEPS = 500
MIB = 1 << 20
slow = pytest.mark.slow


# ---- the points of a save


@pytest.mark.parametrize("tag", ["new", "again"])
def test_a_process_killed_at_any_point_of_a_save_leaves_a_checkpoint_that_loads(tmp_path: Path, tag: str) -> None:
    """A child forked in the middle of the run saves to a new tag, or again to one that is there, and is killed. The parent
    loads what `latest` names, with its bits, and the next save deletes what was left."""
    ssd, folder = tmp_path / "ssd", tmp_path / "saved"
    with running(config_in(ssd), model_of, vertical=True) as (engine, model):
        train(engine, range(1))
        engine.save_checkpoint(str(folder), tag="base")
        first = contents(engine, model)
        losses = train(engine, range(1, 2))
        second = contents(engine, model)
        engine.load_checkpoint(str(folder), tag="base")
        for number, point in enumerate(POINTS):
            shutil.rmtree(folder / "new", ignore_errors=True)
            engine.save_checkpoint(str(folder), tag="again" if tag == "again" else "base")
            assert_whole(folder, "base", *{tag} & {"again"})
            assert train(engine, range(1, 2)) == losses
            kill_in_save(engine, ssd, folder, tag, point)
            switched = number >= POINTS.index("switched")
            assert set(manifest.complete_tags(folder)) == {"base"} | ({tag} if switched or tag == "again" else set()), point
            named = (folder / "latest").read_text()
            assert named == (tag if tag == "again" or point == "latest written" else "base")
            engine.load_checkpoint(str(folder))
            assert differing(second if switched and named == tag else first, contents(engine, model)) == [], point
            if switched:
                engine.load_checkpoint(str(folder), tag=tag)
                assert differing(second, contents(engine, model)) == [], point
                engine.load_checkpoint(str(folder), tag="base")
        engine.save_checkpoint(str(folder), tag="last")
        assert_whole(folder, "base", tag, "last")


def kill_in_save(engine: Any, ssd: Path, folder: Path, tag: str, point: str) -> None:
    """In a child, which has none of the parent's threads. What it does to the run's files goes with it, as the folder of a
    killed run would: the parent has to load a checkpoint."""
    engine.flush()
    before = set(ssd.rglob("*"))
    [tree] = [tree for folder in ssd.iterdir() if (tree := held_folders.tree_of(folder)) is not None]
    child = os.fork()
    if child == 0:
        try:
            held_folders.hold(tree)  # a child has let go of it
            engine.optimizer.calls._pid = os.getpid()  # else refused; what this child does is what a killed process would
            torch.set_num_threads(1)  # the others are the parent's
            save.reach = lambda reached: os.kill(os.getpid(), signal.SIGKILL) if reached == point else None
            engine.save_checkpoint(str(folder), tag=tag)
        finally:
            os._exit(1)
    end = time.monotonic() + 120
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    assert os.waitstatus_to_exitcode(ended[1]) == -signal.SIGKILL and time.monotonic() <= end, point
    for path in set(ssd.rglob("*")) - before:
        path.unlink()


# ---- processes


class Story:
    """One training that takes many processes: its folders, its log, and what it should have computed."""

    def __init__(self, folder: Path, starter: Starter) -> None:
        self.ssd, self.saved = folder / "ssd", folder / "saved"
        self.ssd.mkdir()
        self.log = Log(folder / "log")
        self._job = {"ssd": str(self.ssd), "saved": str(self.saved), "log": str(folder / "log")}
        self._starter = starter
        self._folder = folder
        self.phases: Counter[str] = Counter()

    def start(self, **job: Any) -> None:
        self._starter.start(**self._job, **job)

    def kill(self) -> None:
        """Kill the process that runs; check what it leaves and what it has told, and remove its folder on the SSD."""
        self._starter.kill()
        self.assert_killed()

    def assert_killed(self) -> None:
        assert self._starter.ended() == -signal.SIGKILL, self._starter.errors()
        lines = self.log.lines()
        self.phases[{"ready": "loaded", "loss": "training"}.get(lines[-1][0], lines[-1][0]) if lines else "building"] += 1
        if (self.saved / "latest").exists():
            tags = manifest.complete_tags(self.saved)
            assert (self.saved / "latest").read_text() in tags
            for tag in tags:
                manifest.check_manifest(self.saved / tag, manifest.read_rank(self.saved / tag, 0))
        assert clean.main(["--path", str(self.ssd), "--remove"]) == 0
        for nameless in self.ssd.iterdir():  # killed before it had written its name
            clean.main(["--path", str(self.ssd), "--remove", nameless.name])
        assert list(self.ssd.iterdir()) == []

    def finish(self, end: int, **job: Any) -> dict[str, torch.Tensor]:
        """Let it end by itself; returns weights and state."""
        out = self._folder / "out"
        self.start(end=end, out=str(out), **job)
        assert self._starter.ended() == 0, self._starter.errors()
        assert not [path for path in self.saved.iterdir() if path.name.startswith(".")], "a killed save has left something"
        return torch.load(out)

    def values(self, word: str) -> dict[int, str]:
        """What was told of each step, by all processes the same."""
        found: dict[int, str] = {}
        for line in self.log.lines():
            if line[0] == word:
                assert found.setdefault(int(line[1]), line[2]) == line[2], f"{word} of step {line[1]}"
        return found


def assert_uninterrupted(story: Story, found: dict[str, torch.Tensor], end: int) -> None:
    """Losses and contents are those of one process that was left alone, which does nothing but train, and evaluate where the
    story has."""
    told, evaluated, steps = story.values("loss"), story.values("eval"), range(end)
    expected: dict[int, str] = {}
    with running(config_in(story.ssd, delay=1.0), model_of, vertical=True) as (engine, model):
        for step in steps:
            expected[step] = train_one(engine, step).hex()
            if step + 1 in evaluated:
                assert evaluated[step + 1] == evaluate(engine), f"evaluation after step {step}"
        assert differing(contents(engine, model), found) == []
    assert told == {step: expected[step] for step in told} and told.keys() >= set(steps)


def train_one(engine: Any, step: int) -> float:
    return train(engine, range(step % 24, step % 24 + 1))[0]


@slow
@pytest.mark.timeout(900)
def test_new_processes_go_on_after_kills_at_every_point_of_a_save(tmp_path: Path) -> None:
    with Starter(tmp_path) as starter:
        story = Story(tmp_path, starter)
        for number, point in enumerate(POINTS):
            for tag in ("again", f"new{number}"):
                story.start(point=point, tag=tag)
                story.assert_killed()
        assert story.phases["saving"] == 2 * len(POINTS)
        latest = [line for line in story.log.lines() if line[0] == "ready"][-1]
        end = int(latest[1]) + 2 * EVERY
        found = story.finish(end)
    assert_uninterrupted(story, found, end)


@slow
@pytest.mark.timeout(1800)
def test_a_run_killed_fifty_times_at_random_instants_has_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    """Most instants lie in training and saving, every fifth anywhere from the start of the process."""
    seed = 20261122
    draw = random.Random(seed)
    with Starter(tmp_path) as starter:
        story = Story(tmp_path, starter)
        start, ready_s, three_saves_s = time.monotonic(), 0.0, 0.0
        for kill in range(NUM_KILLS):
            before = len(story.log.lines())
            story.start()
            if kill == 0:  # how long things take here
                story.log.wait_for(lambda lines: bool(lines))
                ready_s = time.monotonic() - start
                story.log.wait_for(lambda lines: sum(line[0] == "saved" for line in lines) == 3)
                three_saves_s = time.monotonic() - start - ready_s
            elif kill % 5 == 4:
                time.sleep(draw.uniform(0.0, ready_s + three_saves_s))
            else:
                story.log.wait_for(lambda lines, before=before: len(lines) > before)
                time.sleep(draw.uniform(0.0, three_saves_s))
            story.kill()
        last = max(story.values("loss"))
        end = last - last % EVERY + 2 * EVERY
        found = story.finish(end)
    print(f"seed {seed}: {NUM_KILLS} kills, last told by the killed: {dict(story.phases)}; {end} steps")
    assert story.phases["saving"] and story.phases["training"]
    assert_uninterrupted(story, found, end)


# ---- soak


@slow
@pytest.mark.timeout(1800)
def test_five_hundred_steps_with_saves_loads_evaluations_and_kills_hold_nothing_more(tmp_path: Path) -> None:
    seed = 5
    draw = random.Random(seed)
    disk: list[int] = []
    with Starter(tmp_path) as starter:
        story = Story(tmp_path, starter)

        def num_steps() -> int:
            return sum(line[0] == "loss" for line in story.log.lines())

        while num_steps() < NUM_SOAK_STEPS:
            most = num_steps() + draw.randrange(30, 90)
            story.start(soak=seed)
            story.log.wait_for(lambda lines, most=most: sum(line[0] == "loss" for line in lines) >= most)
            time.sleep(draw.uniform(0.0, 0.2))
            story.kill()
            disk.append(bytes_below(story.saved))
        at = int(next(line for line in reversed(story.log.lines()) if line[0] == "loss")[1])
        found = story.finish(at + 100, soak=seed)
    print(f"seed {seed}: {num_steps()} steps in {len(disk) + 1} processes; {Counter(line[0] for line in story.log.lines())}")
    assert_flat(story.log.lines())
    largest = max(bytes_below(story.saved / tag) for tag in manifest.complete_tags(story.saved))
    assert max(disk) <= (NUM_TAGS + 1) * largest + MIB, "more than the tags and what one killed save has left"
    assert len(story.values("eval")) > 20
    assert_uninterrupted(story, found, at + 100)


def assert_flat(lines: list[list[str]]) -> None:
    """Descriptors, threads and locked memory of each process are the same all the time, and so is the most that its folder on
    the SSD holds, nearly; its memory is after a start-up."""
    lives: list[list[list[int]]] = []
    for line in lines:
        if line[0] == "ready":
            lives.append([])
        elif line[0] == "held":
            lives[-1].append([int(word) for word in line[1:]])
    longest = max(lives, key=len)
    for held in lives:
        assert all(each[:3] == held[-1][:3] for each in held[10:]), held
    third = len(longest) // 3
    settled = [resident for *_, resident, _ in longest[third:]]
    assert settled[-1] - settled[0] < 16 * MIB // 1024, settled
    on_ssd = [num_bytes for *_, num_bytes in longest]
    # files that nobody removes would add some 30 MiB with each save; what two saves in a row freeze may come late
    assert 0 < max(on_ssd[2 * third :]) <= max(on_ssd[: 2 * third]) + 64 * MIB, on_ssd
