"""Disks that fail, under a run with all state on SSD: an exception in the training thread that says what to do, a state that is
whole wherever there were two generations of it, torn and never saved where there was one, and no checkpoint lost."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from faults import full_room, immutable, loop_disk, mapped_disk, small_files
from harness import build_engine, contents, differing, dispose, running, start_process_group
from resuming import CLIP, Tensors, config_in, loaded, model_of, train

import ds_vertical
from ds_vertical.engine.checkpoint.manifest import complete_tags
from ds_vertical.errors import CheckpointError, StorageError, TornStateError
from ds_vertical.io.aio import DiskError
from ds_vertical.io.disk_errors import remedy
from ds_vertical.offload.consistency import WHOLE

MIB = 1 << 20
DISK_BYTES = 256 * MIB  # the run takes some 40 MiB of it, and as much again after a save
LIMIT_S = 10.0
slow = pytest.mark.slow


@dataclass(frozen=True)
class Reference:
    """A run without faults: five losses; weights and state before the first step, after two steps and after five."""

    losses: list[float]
    none: Tensors
    two: Tensors
    five: Tensors


@pytest.fixture(scope="module")
def reference() -> Iterator[Callable[[float], Reference]]:
    made: dict[float, Reference] = {}

    def of(clip: float) -> Reference:
        if clip not in made:
            with tempfile.TemporaryDirectory() as folder:
                with running(config_in(Path(folder), clip=clip), model_of, vertical=True) as (engine, model):
                    none = contents(engine, model)
                    losses = train(engine, range(2))
                    two = contents(engine, model)
                    losses += train(engine, range(2, 5))
                    made[clip] = Reference(losses, none, two, contents(engine, model))
        return made[clip]

    yield of


@contextlib.contextmanager
def told(number: int, *words: str, said: str | None = None) -> Iterator[None]:
    """The block raises, in this thread and in time, what names the errno, the other words, and the remedy (`said`)."""
    start = time.monotonic()
    with pytest.raises((DiskError, StorageError)) as raised:
        yield
    assert time.monotonic() - start < LIMIT_S
    text = str(raised.value)
    for word in (errno.errorcode[number], remedy(number) if said is None else said, *words):
        assert word in text, text


@contextlib.contextmanager
def told_whole(number: int, *words: str, said: str | None = None) -> Iterator[None]:
    """As `told`, and that the live state is whole."""
    with told(number, *words, said=said):
        try:
            yield
        except Exception as error:
            assert WHOLE in error.__notes__
            raise


def assert_goes_on(engine: Any, model: Any, expected: Reference, first: int = 2) -> None:
    assert train(engine, range(first, 5)) == expected.losses[first:]
    assert differing(expected.five, contents(engine, model)) == []


def assert_rescued(engine: Any, model: Any, expected: Reference, folder: Path, before: Tensors) -> None:
    """The live state is that of the step before, and can be saved in `folder`."""
    assert differing(before, contents(engine, model)) == []
    engine.save_checkpoint(str(folder), tag="rescued")
    assert differing(before, contents(engine, model)) == []


def assert_refused(engine: Any, folder: Path) -> None:
    """The torn state can be neither trained on nor saved; what was saved before is there."""
    for refused in (lambda: train(engine, range(4, 5)), lambda: engine.save_checkpoint(str(folder), tag="torn")):
        with pytest.raises(TornStateError, match='the last good tag is "good"'):
            refused()
    assert complete_tags(folder) == ["good"]


def assert_resumes(folder: Path, tag: str, config: dict[str, Any], expected: Reference, first: int = 2) -> None:
    """In a new engine, on a disk that works."""
    with loaded(config, folder, tag=tag) as (engine, model):
        assert_goes_on(engine, model, expected, first)


# ---- two generations: the step is not taken


EARLY: list[Any] = [
    (0.0, {"delay": 0.25}),
    pytest.param(0.0, {"delay": 0.0}, marks=slow),
    pytest.param(0.0, {"delay": 0.25, "section": {"overlap": False}}, marks=slow),
    pytest.param(CLIP, {"delay": 0.25, "section": {"optimizer_speculation": True}}, marks=slow),
]


@pytest.mark.parametrize(("clip", "options"), EARLY, ids=str)
def test_a_step_whose_early_part_cannot_be_written_is_not_taken(
    tmp_path: Path, reference: Callable[[float], Reference], clip: float, options: dict[str, Any]
) -> None:
    """The kernel takes the beginning of every file and no more."""
    expected = reference(clip)
    made = config_in(tmp_path / "ssd", clip=clip, **options)
    with running(made, model_of, vertical=True) as (engine, model):
        train(engine, range(2))
        engine.flush()
        for _ in range(2):
            with small_files(MIB // 4), told_whole(errno.EFBIG, "write of", str(tmp_path / "ssd")):
                train(engine, range(2, 3))
        assert_rescued(engine, model, expected, tmp_path / "saved", expected.two)
        assert_goes_on(engine, model, expected)
    assert_resumes(tmp_path / "saved", "rescued", made, expected)


@pytest.mark.parametrize("kind", ["state", pytest.param("parameter", marks=slow)])
def test_the_last_early_part_that_cannot_be_written_is_noticed_by_its_own_step(
    tmp_path: Path, reference: Callable[[float], Reference], kind: str
) -> None:
    """The file of the unit that is stepped last is a folder: everything has been computed when that shows."""
    expected = reference(0.0)
    made = config_in(tmp_path / "ssd")
    with running(made, model_of, vertical=True) as (engine, model):
        train(engine, range(2))
        engine.flush()
        with blocked(early_target(engine, kind, "pre" if kind == "state" else 0)) as path:
            with told_whole(errno.EISDIR, "write of", "failed in open", str(path)):
                train(engine, range(2, 3))
            assert_rescued(engine, model, expected, tmp_path / "saved", expected.two)
        assert_goes_on(engine, model, expected)
    assert_resumes(tmp_path / "saved", "rescued", made, expected)


@contextlib.contextmanager
def blocked(path: Path) -> Iterator[Path]:
    """There is a folder where the file was."""
    aside = path.with_name("aside")
    path.rename(aside)
    path.mkdir()
    try:
        yield path
    finally:
        path.rmdir()
        aside.rename(path)


@slow
def test_a_disk_without_room_for_the_blocks_that_it_promised(tmp_path: Path, reference: Callable[[float], Reference]) -> None:
    """ENOSPC in the middle of a step, from a thinly provisioned disk; the run goes on when there is room."""
    expected = reference(0.0)
    made = config_in(tmp_path / "disk" / "ssd")
    with full_room(tmp_path / "room", 96 * MIB) as room, loop_disk(tmp_path / "disk", DISK_BYTES, room):
        with running(made, model_of, vertical=True) as (engine, model):
            filler = fill(room)
            with told_whole(errno.ENOSPC, "write of", str(tmp_path / "disk")):
                train(engine, range(1))
            assert_rescued(engine, model, expected, tmp_path / "saved", expected.none)
            filler.unlink()
            assert_goes_on(engine, model, expected, first=0)
    assert_resumes(tmp_path / "saved", "rescued", config_in(tmp_path / "ssd"), expected, first=0)


def fill(room: Path) -> Path:
    filler = room / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(MIB // 16)):
            pass
    return filler


@slow
@pytest.mark.parametrize("delay", [0.25, 0.0])
def test_a_drive_that_takes_no_more_writes(tmp_path: Path, reference: Callable[[float], Reference], delay: float) -> None:
    """EIO from the block layer; the last committed step is saved to another disk, and goes on there."""
    expected = reference(0.0)
    with loop_disk(tmp_path / "disk", DISK_BYTES) as disk:
        with running(config_in(tmp_path / "disk" / "ssd", delay=delay), model_of, vertical=True) as (engine, model):
            train(engine, range(2))
            engine.flush()
            disk.refuse_writes()
            with told_whole(errno.EIO, "write of", str(tmp_path / "disk")):
                train(engine, range(2, 3))
            assert_rescued(engine, model, expected, tmp_path / "saved", expected.two)
            with told_whole(errno.EIO, "write of"):
                train(engine, range(2, 3))
    assert_resumes(tmp_path / "saved", "rescued", config_in(tmp_path / "ssd"), expected)


@slow
def test_a_file_system_that_becomes_read_only(tmp_path: Path, reference: Callable[[float], Reference]) -> None:
    """As one does that has found an error in itself."""
    expected = reference(0.0)
    with loop_disk(tmp_path / "disk", DISK_BYTES) as disk:
        with running(config_in(tmp_path / "disk" / "ssd"), model_of, vertical=True) as (engine, model):
            train(engine, range(2))
            engine.flush()
            disk.become_read_only()
            with told_whole(errno.EROFS, "write of", "failed in open", str(tmp_path / "disk")):
                train(engine, range(2, 3))
            assert_rescued(engine, model, expected, tmp_path / "saved", expected.two)
    assert_resumes(tmp_path / "saved", "rescued", config_in(tmp_path / "ssd"), expected)


@slow
@pytest.mark.parametrize("kind", ["state", "parameter"])
def test_a_file_that_may_not_be_written(tmp_path: Path, reference: Callable[[float], Reference], kind: str) -> None:
    """EPERM, for root as well."""
    expected = reference(0.0)
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        train(engine, range(2))
        engine.flush()
        path = early_target(engine, kind, 1)
        with immutable(path):
            with told_whole(errno.EPERM, "write of", "failed in open", str(path)):
                train(engine, range(2, 3))
            assert_rescued(engine, model, expected, tmp_path / "saved", expected.two)
        assert_goes_on(engine, model, expected)
    assert_resumes(tmp_path / "saved", "rescued", config_in(tmp_path / "ssd"), expected)


def early_target(engine: Any, kind: str, unit: Any) -> Path:
    """A file of the unit that the next early step writes."""
    if kind == "parameter":
        return Path(engine.param_store.files.by_unit[unit][0].target(True))
    return part_of(engine, unit, lambda generations, part: generations.target(part, True))


def part_of(engine: Any, unit: Any, files: Callable[[Any, Any], Any]) -> Path:
    """The file of the first moment of a unit's first early part."""
    optimizer = engine.optimizer
    part = next(part for index in optimizer.chunks_of(unit) for part in optimizer.stepper.chunks[index].early)
    return files(optimizer.stepper.generations, part)[1].path


@slow
def test_activations_that_find_no_room(tmp_path: Path, reference: Callable[[float], Reference]) -> None:
    """A file that grows in the first step, on a full disk."""
    expected = reference(0.0)
    with loop_disk(tmp_path / "disk", DISK_BYTES) as disk:
        made = config_in(tmp_path / "disk" / "ssd", section={"activations": {"device": "ssd"}})
        with running(made, model_of, vertical=True) as (engine, model):
            filler = disk.fill()
            with no_room("activations"):
                train(engine, range(1))
            assert_rescued(engine, model, expected, tmp_path / "saved", expected.none)
            filler.unlink()
            assert_goes_on(engine, model, expected, first=0)


@slow
def test_a_model_that_does_not_fit_while_it_is_built_is_refused(tmp_path: Path) -> None:
    """zero.Init writes before anybody knows how much that will be; DeepSpeed takes no notice of what fails."""
    start_process_group()
    with loop_disk(tmp_path / "disk", DISK_BYTES) as disk:
        made = config_in(tmp_path / "disk" / "ssd", optimizer="cpu")
        prepared = ds_vertical.prepare(made)
        filler = disk.fill()
        os.truncate(filler, filler.stat().st_size - 2 * MIB)
        with deepspeed.zero.Init(config_dict_or_path=prepared):
            model = model_of()
        with pytest.raises(StorageError, match=r"files are missing, of the wrong size.*disk full\?(.|\n)*: 0 bytes"):
            ds_vertical.initialize(model=model, model_parameters=list(model.parameters()), config=prepared)


# ---- one generation: the state is torn, and the last checkpoint loads


TORN: list[Any] = [
    (0.0, {"delay": 1.0}),
    pytest.param(CLIP, {"delay": 1.0}, marks=slow),
    pytest.param(CLIP, {"delay": 0.0, "section": {"optimizer_speculation": False}}, marks=slow),
    pytest.param(0.0, {"section": {"on_nonfinite": "stop"}}, marks=slow),
]


@pytest.mark.parametrize(("clip", "options"), TORN, ids=str)
def test_a_step_in_place_that_cannot_be_written_tears_the_state(
    tmp_path: Path, reference: Callable[[float], Reference], clip: float, options: dict[str, Any]
) -> None:
    expected = reference(clip)
    made = config_in(tmp_path / "ssd", clip=clip, **options)
    with running(made, model_of, vertical=True) as (engine, _):
        train(engine, range(2))
        engine.save_checkpoint(str(tmp_path / "saved"), tag="good")
        train(engine, range(2, 3))
        engine.flush()
        with small_files(MIB // 4), told(errno.EFBIG, "write of", str(tmp_path / "ssd")):
            train(engine, range(3, 5))
        assert_refused(engine, tmp_path / "saved")
    assert_resumes(tmp_path / "saved", "good", made, expected)


@slow
def test_a_drive_that_takes_no_more_writes_in_place(tmp_path: Path, reference: Callable[[float], Reference]) -> None:
    expected = reference(CLIP)
    with loop_disk(tmp_path / "disk", DISK_BYTES) as disk:
        with running(config_in(tmp_path / "disk" / "ssd", clip=CLIP, delay=1.0), model_of, vertical=True) as (engine, _):
            train(engine, range(2))
            engine.save_checkpoint(str(tmp_path / "saved"), tag="good")  # copies: another file system
            train(engine, range(2, 3))
            engine.flush()
            disk.refuse_writes()
            with told(errno.EIO, "write of", str(tmp_path / "disk")):
                train(engine, range(3, 5))
            assert_refused(engine, tmp_path / "saved")
    assert_resumes(tmp_path / "saved", "good", config_in(tmp_path / "ssd", clip=CLIP), expected)


@slow
def test_a_disk_without_room_for_what_follows_a_save(tmp_path: Path, reference: Callable[[float], Reference]) -> None:
    """A save on the run's own disk has frozen its files; those that take their place find no blocks for what is stepped in the
    next forward. The checkpoint, which shares the frozen ones, is whole."""
    expected = reference(0.0)
    with full_room(tmp_path / "room", 128 * MIB) as room, loop_disk(tmp_path / "disk", DISK_BYTES, room):
        saved = tmp_path / "disk" / "saved"
        with running(config_in(tmp_path / "disk" / "ssd", delay=1.0), model_of, vertical=True) as (engine, _):
            train(engine, range(2))
            engine.save_checkpoint(str(saved), tag="good")
            filler = fill(room)
            with told(errno.ENOSPC, "write of", str(tmp_path / "disk")):
                train(engine, range(2, 4))
            assert_refused(engine, saved)
        filler.unlink()
        assert_resumes(saved, "good", config_in(tmp_path / "ssd"), expected)


# ---- what cannot be read


def lose(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    else:
        os.truncate(path, 4096)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("state", "truncated"),
        ("state", "missing"),
        ("parameter", "truncated"),
        ("parameter", "missing"),
    ],
)
@slow
def test_a_file_that_is_cut_or_gone_is_named_and_never_saved(
    tmp_path: Path, reference: Callable[[float], Reference], kind: str, how: str
) -> None:
    """Nothing has been stepped; but what is lost cannot be saved either, and the last checkpoint is there."""
    expected, number = reference(0.0), {"missing": errno.ENOENT, "truncated": errno.ENODATA}[how]
    made = config_in(tmp_path / "ssd")
    with running(made, model_of, vertical=True) as (engine, _):
        train(engine, range(2))
        engine.save_checkpoint(str(tmp_path / "saved"), tag="good")
        train(engine, range(2, 4))
        engine.flush()
        path = current_file(engine, kind)
        lose(path, how)
        with told(number, "read of", str(path)):
            train(engine, range(4, 5))
        with told(number, str(path)):
            engine.save_checkpoint(str(tmp_path / "saved"), tag="bad")
        assert complete_tags(tmp_path / "saved") == ["good"]
    assert_resumes(tmp_path / "saved", "good", made, expected)


def current_file(engine: Any, kind: str) -> Path:
    if kind == "parameter":
        return Path(next(iter(engine.param_store.files.by_unit[1])).path)
    return part_of(engine, 1, lambda generations, part: generations.source(part))


@slow
@pytest.mark.parametrize("how", ["blocks", "file system"])
def test_a_drive_that_gives_nothing_back(tmp_path: Path, reference: Callable[[float], Reference], how: str) -> None:
    """EIO on every read of a block, or on everything; the checkpoint on another disk goes on."""
    expected = reference(0.0)
    with loop_disk(tmp_path / "disk", DISK_BYTES) as disk:
        engine, _ = build_engine(config_in(tmp_path / "disk" / "ssd"), model_of, vertical=True)
        with contextlib.ExitStack() as end:
            end.callback(partial(suppressed, partial(dispose, engine)))
            train(engine, range(2))
            engine.save_checkpoint(str(tmp_path / "saved"), tag="good")
            train(engine, range(2, 3))
            engine.flush()
            {"blocks": disk.lose_blocks, "file system": disk.shut_down}[how]()
            with told(errno.EIO, str(tmp_path / "disk")):
                train(engine, range(3, 5))
            with told(errno.EIO, str(tmp_path / "disk")):
                engine.save_checkpoint(str(tmp_path / "saved"), tag="bad")
            assert complete_tags(tmp_path / "saved") == ["good"]
    assert_resumes(tmp_path / "saved", "good", config_in(tmp_path / "ssd"), expected)


@slow
def test_blocks_that_the_device_mapper_fails(tmp_path: Path, reference: Callable[[float], Reference]) -> None:
    expected = reference(0.0)
    with mapped_disk(tmp_path / "disk", DISK_BYTES) as fail:
        engine, _ = build_engine(config_in(tmp_path / "disk" / "ssd"), model_of, vertical=True)
        with contextlib.ExitStack() as end:
            end.callback(partial(suppressed, partial(dispose, engine)))
            train(engine, range(2))
            engine.save_checkpoint(str(tmp_path / "saved"), tag="good")
            fail()
            with told(errno.EIO, str(tmp_path / "disk")):
                train(engine, range(2, 5))
    assert_resumes(tmp_path / "saved", "good", config_in(tmp_path / "ssd"), expected)


def suppressed(call: Callable[[], Any]) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # the run's folder cannot be removed
        call()


# ---- saving


@slow
def test_a_full_disk_is_told_by_the_save_and_the_run_goes_on(tmp_path: Path, reference: Callable[[float], Reference]) -> None:
    expected = reference(0.0)
    with loop_disk(tmp_path / "disk", 8 * MIB) as disk:  # the checkpoint's files would not fit
        with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
            train(engine, range(2))
            with no_room(str(tmp_path / "disk")):
                engine.save_checkpoint(str(tmp_path / "disk" / "saved"))
            disk.fill()
            with told(errno.ENOSPC, str(tmp_path / "disk")):
                engine.save_checkpoint(str(tmp_path / "disk" / "saved"))
            assert [path.name for path in (tmp_path / "disk" / "saved").iterdir()] == []
            assert_rescued(engine, model, expected, tmp_path / "saved", expected.two)
            assert_goes_on(engine, model, expected)


@contextlib.contextmanager
def no_room(*words: str) -> Iterator[None]:
    """The refusal that is computed before anything is written."""
    with pytest.raises(StorageError, match=r"free \d+ bytes") as raised:
        yield
    assert all(word in str(raised.value) for word in words), raised.value


@slow
@pytest.mark.parametrize("how", ["writes", "file system"])
def test_a_failing_disk_is_told_by_the_save_and_the_earlier_tag_stays(
    tmp_path: Path, reference: Callable[[float], Reference], how: str
) -> None:
    expected = reference(0.0)
    with loop_disk(tmp_path / "disk", DISK_BYTES) as disk:
        saved = tmp_path / "disk" / "saved"
        with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
            train(engine, range(1))
            engine.save_checkpoint(str(saved), tag="good")
            train(engine, range(1, 2))
            {"writes": disk.refuse_writes, "file system": disk.shut_down}[how]()
            with told(errno.EIO, str(saved)):
                engine.save_checkpoint(str(saved), tag="bad")
            assert_rescued(engine, model, expected, tmp_path / "saved", expected.two)
            assert_goes_on(engine, model, expected)


def test_names_that_are_too_long_are_told_before_anything_is_made(tmp_path: Path) -> None:
    deep = tmp_path / "/".join(["d" * 200] * 20)
    with told(errno.ENAMETOOLONG, str(deep), said="write a folder whose path has at most"):
        build_engine(config_in(deep), model_of, vertical=True)
    assert list(tmp_path.iterdir()) == []


@slow
def test_a_tag_that_is_too_long_is_told_and_the_run_goes_on(tmp_path: Path, reference: Callable[[float], Reference]) -> None:
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        train(engine, range(2))
        with pytest.raises(CheckpointError, match="has 256 bytes; write one of at most 241"):
            engine.save_checkpoint(str(tmp_path / "saved"), tag="t" * 256)
        assert_goes_on(engine, model, reference(0.0))
