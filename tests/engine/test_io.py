"""What reaches the SSD, by the kernel's count: bytes read per step, files made before the first step, files refused."""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from faults import small_disk, small_files
from harness import (
    Run,
    base_config,
    build_engine,
    differing,
    dispose,
    read_grads,
    read_state,
    read_weights,
    run_arm,
    running,
    start_process_group,
)
from late import LateReads
from models import MixerModel, token_batches
from moved_bytes import complete_transfers, disk_bytes
from other_job import Other

import ds_vertical
from ds_vertical.cli import clean
from ds_vertical.compat import zero_params
from ds_vertical.errors import StorageError
from ds_vertical.io.aio import DiskError
from ds_vertical.io.runs import run_dir
from ds_vertical.io.runs.run_dirs import FoundRun, find_runs
from ds_vertical.io.ticket import Ticket
from ds_vertical.schedule.events import Unit
from ds_vertical.schedule.levels import Arrival

NUM_LAYERS = 5
WIDTH = 512  # a matrix is 1 MiB in fp32
MATRIX_BYTES = 4 * WIDTH * WIDTH
build = partial(MixerModel, NUM_LAYERS, WIDTH, dropout=0.1)
ELEMENTS = sum(p.numel() for p in build().parameters())
MATRIX_ELEMENTS = NUM_LAYERS * 2 * WIDTH * WIDTH
STATE_BYTES = 12 * ELEMENTS  # three fp32 files for each chunk (the embedding and the head make one above 1 MiB too)


def config(folder: Path, num_micro_batches: int = 2, clip: float = 0.5, **options: Any) -> dict[str, Any]:
    """Clipping, so that all of a step is left to the next forward."""
    made = base_config(folder, num_micro_batches=num_micro_batches, dtype="fp32", clip=clip, **options)
    if made["zero_optimization"]["offload_param"]["device"] == "nvme":
        made["zero_optimization"]["offload_param"] |= {"buffer_count": 12, "buffer_size": 300_000}
    return made


read_bytes = partial(disk_bytes, "read")


class RecordingParams:
    """The engine's own ParamStore, with a note of every fetch and of each file that it reads."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.fetched: list[Unit] = []
        self.files: Counter[str] = Counter()
        for buffer in store.buffers.every:
            buffer.issue_read = partial(self._issue_read, buffer.issue_read)

    def fetch(self, unit: Unit, step: Ticket | None = None, arrival: Arrival = Arrival()) -> Ticket:  # noqa: B008 - frozen
        self.fetched.append(unit)
        return self.store.fetch(unit, step, arrival)

    def _issue_read(self, issue: Any, path: str, start: int, num_bytes: int, offset: int = 0) -> None:
        self.files[path] += 1
        issue(path, start, num_bytes, offset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


# ---- bytes per step


class OneStep:
    """A third step, with what was read and written in it. (The first one starts up, and until the second nobody has
    written the moments, which the disk then knows to be zero.)"""

    def __init__(self, folder: Path, num_micro_batches: int, section: dict[str, Any] | None = None, clip: float = 0.5) -> None:
        made = config(folder, num_micro_batches, clip, section=section)
        engine, model = build_engine(made, build, vertical=True)
        try:
            self.window = engine.vertical.prefetch_layers
            *before, last = token_batches(3, num_micro_batches)
            for step in before:
                engine.train_batch(iter(step))
            self.params = engine._runner.params = RecordingParams(engine._params)
            complete_transfers(engine)
            read, written = read_bytes(), disk_bytes("write")
            engine.train_batch(iter(last))
            complete_transfers(engine)
            self.read_bytes = read_bytes() - read
            self.written_bytes = disk_bytes("write") - written
            self.layer_files = [
                {str(zero_params.swap_file(p).path) for p in engine.layers.units[layer] if zero_params.is_on_ssd(p)}
                for layer in range(NUM_LAYERS)
            ]
        finally:
            dispose(engine)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[int, OneStep]:
    return {m: OneStep(tmp_path_factory.mktemp(f"m{m}"), m) for m in (2, 8)}


def test_bytes_read_per_step_do_not_depend_on_the_number_of_micro_batches(steps: dict[int, OneStep]) -> None:
    assert steps[8].read_bytes == pytest.approx(steps[2].read_bytes, rel=0.01)


def test_bytes_per_step_are_the_formulas(steps: dict[int, OneStep]) -> None:
    """State once in, once out; each matrix out once and in once for the backward, less the layers kept at the turn: the
    forward has them from their delayed steps. Gradients never leave memory."""
    for step in steps.values():
        num_layer_reads = NUM_LAYERS - (step.window + 1)
        assert step.read_bytes == pytest.approx(num_layer_reads * 2 * MATRIX_BYTES + STATE_BYTES, rel=0.01)
        assert step.written_bytes == pytest.approx(NUM_LAYERS * 2 * MATRIX_BYTES + STATE_BYTES, rel=0.01)


# share left to the next forward -> matrices that are read for the forward. At 0.5 that is one per layer: `down` comes from
# its delayed step, and `up`, stepped early, is read beside it. Stepped after the norm, two layers are still in memory.
@pytest.mark.parametrize(
    ("clip", "delay", "forward_reads"),
    [(0.0, 0.0, 2 * NUM_LAYERS), (0.0, 0.5, NUM_LAYERS), (0.0, 1.0, 0), (0.5, 0.0, 2 * (NUM_LAYERS - 2))],
)
def test_bytes_per_step_of_every_regime(tmp_path: Path, clip: float, delay: float, forward_reads: int) -> None:
    step = OneStep(tmp_path, 2, {"optimizer_delay": delay, "optimizer_speculation": False}, clip)
    num_reads = forward_reads + (NUM_LAYERS - (step.window + 1)) * 2
    assert step.read_bytes == pytest.approx(num_reads * MATRIX_BYTES + STATE_BYTES, rel=0.01)
    assert step.written_bytes == pytest.approx(NUM_LAYERS * 2 * MATRIX_BYTES + STATE_BYTES, rel=0.01)


@pytest.mark.parametrize(
    ("clip", "delay", "speculation", "held", "recalled"),
    [
        (0.5, 1.0, False, 1.0, 1.0),
        (0.0, 0.5, None, 0.5, 0.5),
        pytest.param(1e6, 0.5, True, 1.0, 0.5, marks=pytest.mark.slow),
    ],
    ids=["all wait", "the delayed wait", "all may be redone"],
)
def test_gradients_go_to_ssd_once_and_come_back_once(
    tmp_path: Path, clip: float, delay: float, speculation: bool | None, held: float, recalled: float
) -> None:
    """By the kernel's count: what the step moves more than with gradients in memory."""
    section = {"optimizer_delay": delay, "optimizer_speculation": speculation}
    memory, ssd = (OneStep(tmp_path / str(share), 2, section | {"gradient_host_share": share}, clip) for share in (1.0, 0.0))
    assert ssd.written_bytes - memory.written_bytes == pytest.approx(held * 4 * ELEMENTS, rel=0.03)
    assert ssd.read_bytes - memory.read_bytes == pytest.approx(recalled * 4 * ELEMENTS, rel=0.03)


@pytest.mark.parametrize("window", [0, 2])
def test_a_unit_arrives_where_the_device_is_no_further_behind_than_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """The device's place is taken by marks: it has computed what somebody waited for, and nothing else."""
    left: list[Mark] = []
    behind: list[int] = []
    gather = zero_params.gather
    monkeypatch.setattr(zero_params, "gather", lambda *given, **named: (behind.append(len(left)), gather(*given, **named))[1])
    with running(config(tmp_path, section={"prefetch_layers": window}), build, vertical=True) as (engine, _):
        engine._params._landing._backlog._record = partial(Mark, left)
        engine.train_batch(iter(token_batches(1, 2)[0]))
        assert max(behind) == window and len(behind) > NUM_LAYERS
        engine._params.release_all()
        assert not engine._params._landing._backlog._events


class Mark:
    """An event in a list, as long as nobody has waited for it."""

    def __init__(self, left: list[Mark]) -> None:
        self.left = left
        left.append(self)

    def synchronize(self) -> None:
        del self.left[: self.left.index(self) + 1]


def test_every_layer_is_fetched_once_per_sweep_and_the_prefix_once(steps: dict[int, OneStep]) -> None:
    """The first fetch of a layer takes over what its delayed step made; a second one reads each file."""
    for step in steps.values():
        kept = range(NUM_LAYERS - step.window - 1, NUM_LAYERS)  # at the turn from forward to backward
        expected = {"pre": 1} | {layer: 1 if layer in kept else 2 for layer in range(NUM_LAYERS)}
        assert 1 <= len(kept) < NUM_LAYERS
        assert Counter(step.params.fetched) == expected
        for layer, files in enumerate(step.layer_files):
            assert len(files) == 2
            assert {step.params.files[file] for file in files} == {expected[layer] - 1}


def test_horizontal_order_reads_more_with_every_micro_batch(tmp_path: Path, steps: dict[int, OneStep]) -> None:
    """The measurement sees it when layers are read once per micro-batch."""
    horizontal = OneStep(tmp_path, 3, {"order": "horizontal"})
    assert horizontal.read_bytes > steps[2].read_bytes + 2 * NUM_LAYERS * 2 * MATRIX_BYTES


# ---- files before the first step


def file_sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """Path -> (size, bytes of blocks really allocated) of the swap files in and below a folder."""
    found = {str(p.relative_to(folder)): p.stat() for p in folder.rglob("*.swp")}
    return {name: (stat.st_size, stat.st_blocks * 512) for name, stat in found.items()}


@pytest.mark.parametrize(("clip", "speculation", "generations"), [(0.5, False, 1), (0.5, None, 2), (0.0, False, 2)])
def test_initialize_preallocates_every_file(tmp_path: Path, clip: float, speculation: bool | None, generations: int) -> None:
    """Early steps have a second generation of files, for parameters too."""
    section = {"optimizer_speculation": speculation}
    engine, model = build_engine(config(tmp_path, clip=clip, section=section), build, vertical=True)
    try:
        folders = [Path(engine.optimizer.optimizer_swapper.swap_folder)]
        folders.append(next(folder for p in model.parameters() if (folder := zero_params.swap_folder(p)) is not None))
        before = [file_sizes(folder) for folder in folders]
        assert all(allocated >= size for sizes in before for size, allocated in sizes.values())
        totals = [sum(size for size, _ in sizes.values()) for sizes in before]
        assert totals == pytest.approx([generations * STATE_BYTES, generations * 4 * MATRIX_ELEMENTS], rel=0.01)
        for step in token_batches(2, 2):
            engine.train_batch(iter(step))
        engine.flush()
        assert [file_sizes(folder) for folder in folders] == before
    finally:
        dispose(engine)


# ---- files refused


@pytest.fixture(autouse=True, scope="module")
def process_group() -> None:
    start_process_group()


def written_model(prepared: dict[str, Any]) -> torch.nn.Module:
    """A model whose parameters zero.Init has put in their tiers; no engine yet."""
    start_process_group()
    with deepspeed.zero.Init(config_dict_or_path=prepared):
        return build()


def initialize(model: torch.nn.Module, prepared: dict[str, Any]) -> Any:
    return ds_vertical.initialize(model=model, model_parameters=list(model.parameters()), config=prepared)


@pytest.mark.parametrize("fault", ["short", "long", "missing", "hole"])
def test_a_parameter_file_of_the_wrong_size_is_refused_with_the_numbers(tmp_path: Path, fault: str) -> None:
    prepared = ds_vertical.prepare(config(tmp_path))
    model = written_model(prepared)
    files = [zero_params.swap_file(p).path for p in model.parameters() if zero_params.is_on_ssd(p)]
    assert len(files) == 2 * NUM_LAYERS
    victim = files[3]
    size = victim.stat().st_size
    if fault == "missing":
        victim.unlink()
    elif fault == "hole":  # a write in its middle has failed, the last one has not
        data = victim.read_bytes()
        os.truncate(victim, 8192)
        with victim.open("r+b") as file:
            file.seek(size - 4096)
            file.write(data[-4096:])
    else:
        os.truncate(victim, size + (4096 if fault == "long" else -4096))
    found = {"short": f"{size - 4096} bytes", "long": f"{size + 4096} bytes", "missing": "No such file"}
    before = read_bytes()
    with pytest.raises(StorageError) as caught:
        initialize(model, prepared)
    assert read_bytes() - before < MATRIX_BYTES, "a file was read before all were checked"
    message = str(caught.value)
    assert message.startswith(f"1 of {2 * NUM_LAYERS} files")
    assert str(victim) in message and found.get(fault, "at byte 8192") in message and f"expected {size}" in message


def test_a_file_that_cannot_get_its_blocks_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    prepared = ds_vertical.prepare(config(tmp_path, params="cpu"))
    model = written_model(prepared)
    with small_files(1 << 19), pytest.raises(StorageError) as caught:
        initialize(model, prepared)
    message = str(caught.value)
    assert re.search(r"\.tensor\.swp: preallocate \d{7} bytes: File too large \(errno EFBIG\)", message)
    assert re.search(r"\(\d+ bytes are free\)", message)
    assert list(tmp_path.rglob("*.swp")) == []


def test_too_little_space_is_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 16 << 20, monkeypatch):
        prepared = ds_vertical.prepare(config(disk, params="cpu"))
        model = written_model(prepared)
        with pytest.raises(StorageError) as caught:
            initialize(model, prepared)
        assert list(disk.rglob("*.swp")) == []
        _release(prepared)
    match = re.search(r"needs (\d+) more bytes .* has (\d+) free; free (\d+) bytes", str(caught.value))
    assert match is not None, str(caught.value)
    needed, free, missing = map(int, match.groups())
    assert needed == pytest.approx(STATE_BYTES, rel=0.01)
    assert (16 << 20) - 65536 <= free <= 16 << 20
    assert missing == needed - free


def _release(prepared: dict[str, Any]) -> None:
    """Give the folder up while its file system is still there."""
    folder = run_dir.owned(prepared["zero_optimization"]["offload_optimizer"]["nvme_path"])
    assert folder is not None
    folder.release()


# ---- engines that take turns, reads that arrive late

DATA = [token_batches(2, 2, seed) for seed in (1, 2)]
BUILDS = [partial(MixerModel, num_layers, WIDTH) for num_layers in (3, 4)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    folder = tmp_path_factory.mktemp("alone")
    return [run_arm(config(folder), each, data, vertical=True) for each, data in zip(BUILDS, DATA, strict=True)]


def assert_as_alone(run: Run, engine: Any, model: torch.nn.Module, losses: list[float]) -> None:
    assert losses == run.losses
    assert differing(run.grads[-1], read_grads(engine, model)) == []
    assert differing(run.weights, read_weights(model)) == []
    assert differing(run.state, read_state(engine, model)) == []


def test_two_engines_on_one_nvme_path_do_not_touch_each_others_files(tmp_path: Path, alone: list[Run]) -> None:
    made: list[tuple[Any, torch.nn.Module]] = []
    losses: list[list[float]] = [[], []]
    try:
        for each in BUILDS:
            made.append(build_engine(config(tmp_path), each, vertical=True))
        assert len(list(tmp_path.iterdir())) == 2
        for step in range(2):
            for index, (engine, _) in enumerate(made):
                losses[index].append(engine.train_batch(iter(DATA[index][step])).item())
        for index, (engine, model) in enumerate(made):
            assert_as_alone(alone[index], engine, model, losses[index])
    finally:
        for engine, _ in made:
            dispose(engine)


# gradients and activations on SSD, and a second generation of state: every kind of file there is
EVERYWHERE = {
    "activations": {"device": "ssd"},
    "gradient_host_share": 0.0,
    "optimizer_delay": 0.5,
    "optimizer_speculation": True,
}


def pid_of(run: FoundRun) -> int:
    (owner,) = run.live
    assert owner is not None
    return owner.pid


def private_files(folder: Path) -> str:
    """Asserts mode 0700 of every folder, 0600 of every file; returns the files' paths below the run's folder."""
    modes = {path: path.lstat().st_mode for path in (folder, *folder.rglob("*"))}
    wanted = {path: 0o700 if stat.S_ISDIR(mode) else 0o600 for path, mode in modes.items()}
    assert {path: stat.S_IMODE(mode) for path, mode in modes.items()} == wanted
    return " ".join(str(path.relative_to(folder)) for path, mode in modes.items() if stat.S_ISREG(mode))


@pytest.mark.parametrize("vertical", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_jobs_on_one_nvme_path_finish_as_if_alone_and_a_killed_ones_folder_goes(
    tmp_path: Path, alone: list[Run], vertical: bool
) -> None:
    disk, out = tmp_path / "ssd", tmp_path / "out.pt"
    theirs = dict(config=config(disk, section=EVERYWHERE), num_layers=3, seed=1, vertical=vertical, out=str(out))
    with Other(tmp_path, **theirs) as other:
        engine, model = build_engine(config(disk), BUILDS[1], vertical=vertical)
        try:
            other.heard("built")
            losses = []
            for step in DATA[1]:
                other.proceed()  # both compute now
                losses.append(engine.train_batch(iter(step)).item())
                other.heard("stepped")
            here = {pid_of(run): run.folder for run in find_runs(disk)}
            assert set(here) == {os.getpid(), other.process.pid}
            other.proceed()
            other.heard("finished")
            files = private_files(here[other.process.pid])
            kinds = ["param", "exp_avg_sq", *(["generation_1", "gradients.swp", "activations/"] if vertical else [])]
            assert all(kind in files for kind in kinds), files
            other.process.send_signal(signal.SIGKILL)
            other.process.wait(timeout=200)
            assert [run.state for run in find_runs(disk) if run.folder == here[other.process.pid]] == ["stale"]
            assert clean.main(["--path", str(disk), "--remove"]) == 0
            assert list(disk.iterdir()) == [here[os.getpid()]]
            assert_as_alone(alone[1], engine, model, losses)
        finally:
            dispose(engine)
    their_losses, their_weights, their_state = torch.load(out, weights_only=True)
    assert their_losses == alone[0].losses
    assert differing(alone[0].weights, their_weights) == [] and differing(alone[0].state, their_state) == []


def test_reads_that_arrive_late_are_waited_for_in_a_failing_step_too(tmp_path: Path, alone: list[Run]) -> None:
    engine, model = build_engine(config(tmp_path), BUILDS[1], vertical=True)
    try:
        buffers = engine._params.buffers.every
        late = LateReads.of(engine)
        fault = model.get_submodule("blocks.0.up").register_forward_pre_hook(_fail)
        with pytest.raises(ArithmeticError) as caught:
            engine.train_batch(iter(DATA[1][0]))
        assert f"fetch 1 ({2 * MATRIX_BYTES} bytes)" in caught.value.__notes__[0], "nothing was in flight"
        fault.remove()
        assert engine._params.fetched == []
        assert [buffer.reads for buffer in buffers] == [[]] * len(buffers)
        assert not late.left and not late.finished, "a read outlives its step"
        losses = [engine.train_batch(iter(step)).item() for step in DATA[1]]
        assert_as_alone(alone[1], engine, model, losses)
    finally:
        dispose(engine)


def test_a_file_that_becomes_short_stops_the_step_with_its_name_and_place(tmp_path: Path, alone: list[Run]) -> None:
    engine, model = build_engine(config(tmp_path), BUILDS[1], vertical=True)
    try:
        path = zero_params.swap_file(model.get_submodule("blocks.2").up.weight).path
        content = path.read_bytes()
        os.truncate(path, MATRIX_BYTES // 2)
        with pytest.raises(DiskError) as caught:
            engine.train_batch(iter(DATA[1][0]))
        error = caught.value
        assert (error.errno, error.filename, error.operation) == (errno.ENODATA, str(path), "read")
        assert (error.offset, error.num_bytes) == (MATRIX_BYTES // 2, MATRIX_BYTES)
        assert "2F0  <-- here" in error.__notes__[0]
        assert engine._params.fetched == []
        path.write_bytes(content)
        losses = [engine.train_batch(iter(step)).item() for step in DATA[1]]
        assert_as_alone(alone[1], engine, model, losses)
    finally:
        dispose(engine)


def _fail(*_: Any) -> None:
    raise ArithmeticError("on purpose")
