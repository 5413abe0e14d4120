"""Steps leave nothing behind: descriptors, threads, memory, locked memory, files and bytes on SSD stay flat."""

from __future__ import annotations

import gc
import os
from dataclasses import astuple, dataclass
from functools import partial
from operator import gt
from pathlib import Path
from typing import Any

import pytest
from harness import base_config, read_weights, running, small_buffers
from models import MixerModel, token_batches
from processes import status

from ds_vertical import look_ahead
from ds_vertical.engine.integrations.three_calls import OpenStep

MIB = 1 << 20
MAX_GROWTH = 8 * MIB  # of the resident set between the warm-up and the end; a gradient lost in each step is 6 MiB a step


@dataclass(frozen=True)
class Held:
    """What the process and its run's folder hold. No number may grow. Threads of an earlier test may end."""

    descriptors: int
    threads: int
    locked_kib: int
    num_files: int
    file_bytes: int
    blocks: int

    @classmethod
    def now(cls, folder: Path) -> Held:
        files = [path.stat() for path in folder.rglob("*") if path.is_file()]
        return cls(
            len(os.listdir("/proc/self/fd")),
            status("Threads"),
            status("VmLck"),
            len(files),
            sum(file.st_size for file in files),
            sum(file.st_blocks for file in files),
        )


def watch(
    folder: Path,
    clip: float,
    delay: float,
    share: float | None,
    *,
    num_steps: int,
    warm_up: int,
    every: int,
    most: int = MAX_GROWTH,
    saved: Path | None = None,
    **section: Any,
) -> None:
    """Train, evaluate and read the weights each `every` steps, then save to `saved`, to the same tag each time; from step
    `warm_up` on nothing may grow, the resident set by less than `most` bytes."""
    section |= {"optimizer_delay": delay, "gradient_host_share": share}
    config = base_config(folder, num_micro_batches=2, dtype="fp32", clip=clip, section=section)
    seen: list[Held] = []
    resident: list[int] = []
    with running(small_buffers(config), partial(MixerModel, 3), vertical=True) as (engine, model):
        for number, batch in enumerate(token_batches(num_steps, 2, rows=1, shortest=4), start=1):
            engine.train_batch(iter(batch))
            if number % every == 0:
                engine.eval_batch(iter(batch))  # and so a flush
                read_weights(model)
                if number >= warm_up:
                    gc.collect()
                    seen.append(Held.now(folder))
                    resident.append(1024 * status("VmRSS"))
                if saved is not None:
                    engine.save_checkpoint(str(saved), tag="one")
    assert len(seen) == 1 + (num_steps - warm_up) // every
    assert not [held for held in seen if any(map(gt, astuple(held), astuple(seen[0])))], seen
    assert seen[0].num_files > 6 and seen[0].locked_kib > 0
    settled = resident[len(resident) // 3 :]  # before that the allocators still take memory that they keep
    assert settled[-1] - settled[0] < most, resident


def test_a_few_steps_leave_nothing_behind(tmp_path: Path) -> None:
    watch(tmp_path, 0.0, 0.5, None, num_steps=24, warm_up=12, every=4, most=32 * MIB)  # 12 gradients: 72 MiB


def test_a_loop_of_the_three_calls_leaves_no_step_behind(tmp_path: Path) -> None:
    """Each one kept its micro-batches. A loss that the script keeps must not keep its step."""
    config = base_config(tmp_path, num_micro_batches=2, dtype="fp32")
    losses = []
    with running(small_buffers(config), partial(MixerModel, 2), vertical=True) as (engine, _):
        for batch in look_ahead([batch for step in token_batches(3, 2, rows=1, shortest=4) for batch in step]):
            losses.append(engine(**batch))
            engine.backward(losses[-1])
            engine.step()
        gc.collect()
        steps = [each for each in gc.get_objects() if type(each) is OpenStep]
        assert engine.global_steps == 3
    assert len(steps) <= 1  # the last one, whose counts the engine has


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.25, 1.0])
def test_saves_leave_nothing_in_the_folder_of_the_run(tmp_path: Path, delay: float) -> None:
    """The files that each of them freezes are written anew in the next steps; the frozen ones are the checkpoint's alone."""
    (tmp_path / "ssd").mkdir()
    # an even number of steps between two saves: which generation counts, and so which is frozen, alternates
    watch(tmp_path / "ssd", 0.0, delay, None, num_steps=24, warm_up=12, every=2, most=32 * MIB, saved=tmp_path / "saved")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("clip", "delay", "share", "section"),
    [
        (0.05, 1.0, None, {}),
        (0.05, 0.0, None, {}),
        (0.0, 0.5, None, {}),
        (0.05, 0.5, 0.5, {}),
        (0.0, 0.25, None, {"activations": {"device": "ssd"}, "verify": True}),
    ],
    ids=str,
)
def test_two_hundred_steps_leave_nothing_behind(
    tmp_path: Path, clip: float, delay: float, share: float | None, section: dict[str, Any]
) -> None:
    watch(tmp_path, clip, delay, share, num_steps=200, warm_up=40, every=20, **section)
