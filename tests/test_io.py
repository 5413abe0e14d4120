"""What reaches the SSD, by the kernel's count: bytes read per step, files made before the first step, files refused."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
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
    start_process_group,
)
from models import MixerModel, token_batches

import ds_vertical
from ds_vertical import compat, storage
from ds_vertical.files import StorageError
from ds_vertical.layers import Unit
from ds_vertical.transfer import Ticket

NUM_LAYERS = 5
WIDTH = 512  # a matrix is 1 MiB in fp32
MATRIX_BYTES = 4 * WIDTH * WIDTH
build = partial(MixerModel, NUM_LAYERS, WIDTH, dropout=0.1)
ELEMENTS = sum(p.numel() for p in build().parameters())
MATRIX_ELEMENTS = NUM_LAYERS * 2 * WIDTH * WIDTH
# Three fp32 files for each chunk (the embedding and the head make one above 1 MiB too), and a gradient's for each matrix.
OPTIMIZER_BYTES = 12 * ELEMENTS + 4 * MATRIX_ELEMENTS


def config(folder: Path, num_micro_batches: int = 2, **options: Any) -> dict[str, Any]:
    made = base_config(folder, num_micro_batches=num_micro_batches, dtype="fp32", clip=0.5, **options)
    if made["zero_optimization"]["offload_param"]["device"] == "nvme":
        made["zero_optimization"]["offload_param"] |= {"buffer_count": 12, "buffer_size": 300_000}
    return made


def read_bytes() -> int:
    """Bytes that this process has had read from block devices; reads past the page cache (O_DIRECT) all count."""
    match = re.search(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1])


class RecordingParams:
    """The engine's own ParamStore, with a note of every fetch and of each file that it reads."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.fetched: list[Unit] = []
        self.files: Counter[str] = Counter()
        for buffer in store._buffers:
            buffer.issue_read = partial(self._issue_read, buffer.issue_read)

    def fetch(self, unit: Unit) -> Ticket:
        self.fetched.append(unit)
        return self.store.fetch(unit)

    def _issue_read(self, issue: Any, path: str, start: int, num_bytes: int) -> None:
        self.files[path] += 1
        issue(path, start, num_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


# ---- bytes per step


class OneStep:
    """A second step (the first has its own start-up), with what was read in it."""

    def __init__(self, folder: Path, num_micro_batches: int, section: dict[str, Any] | None = None) -> None:
        made = config(folder, num_micro_batches, section=section)
        engine, model = build_engine(made, build, vertical=True)
        try:
            self.window = engine.vertical.prefetch_layers
            first, second = token_batches(2, num_micro_batches)
            engine.train_batch(iter(first))
            self.params = engine._sweeps.params = RecordingParams(engine._params)
            before = read_bytes()
            engine.train_batch(iter(second))
            self.read_bytes = read_bytes() - before
            self.layer_files = [
                {str(compat.swap_file(p).path) for p in engine.layers.units[layer] if compat.is_on_ssd(p)}
                for layer in range(NUM_LAYERS)
            ]
        finally:
            dispose(engine)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[int, OneStep]:
    return {m: OneStep(tmp_path_factory.mktemp(f"m{m}"), m) for m in (2, 8)}


def test_bytes_read_per_step_do_not_depend_on_the_number_of_micro_batches(steps: dict[int, OneStep]) -> None:
    assert steps[8].read_bytes == pytest.approx(steps[2].read_bytes, rel=0.01)


def test_bytes_read_per_step_are_the_formulas(steps: dict[int, OneStep]) -> None:
    """Each matrix once per sweep, in fp32, less the layers kept at the turn; state and gradients, which this step still
    sends through SSD, once."""
    for step in steps.values():
        num_layer_reads = 2 * NUM_LAYERS - (step.window + 1)
        assert step.read_bytes == pytest.approx(num_layer_reads * 2 * MATRIX_BYTES + OPTIMIZER_BYTES, rel=0.01)


def test_every_layer_is_fetched_once_per_sweep_and_the_prefix_once(steps: dict[int, OneStep]) -> None:
    for step in steps.values():
        kept = range(NUM_LAYERS - step.window - 1, NUM_LAYERS)  # at the turn from forward to backward
        expected = {"pre": 1} | {layer: 1 if layer in kept else 2 for layer in range(NUM_LAYERS)}
        assert 1 <= len(kept) < NUM_LAYERS
        assert Counter(step.params.fetched) == expected
        for layer, files in enumerate(step.layer_files):
            assert len(files) == 2
            assert {step.params.files[file] for file in files} == {expected[layer]}


def test_horizontal_order_reads_more_with_every_micro_batch(tmp_path: Path, steps: dict[int, OneStep]) -> None:
    """The measurement sees it when layers are read once per micro-batch."""
    horizontal = OneStep(tmp_path, 3, {"order": "horizontal"})
    assert horizontal.read_bytes > steps[2].read_bytes + 2 * NUM_LAYERS * 2 * MATRIX_BYTES


# ---- files before the first step


def optimizer_sizes(engine: Any) -> dict[str, tuple[int, int]]:
    """File name -> (size, bytes of blocks really allocated) of the optimizer's folder."""
    folder = Path(engine.optimizer.optimizer_swapper.swap_folder)
    return {p.name: (p.stat().st_size, p.stat().st_blocks * 512) for p in folder.iterdir() if p.is_file()}


def test_initialize_preallocates_every_file_of_the_optimizer(tmp_path: Path) -> None:
    engine, _ = build_engine(config(tmp_path), build, vertical=True)
    try:
        before = optimizer_sizes(engine)
        assert all(allocated >= size for size, allocated in before.values())
        assert sum(size for size, _ in before.values()) == pytest.approx(OPTIMIZER_BYTES, rel=0.01)
        for step in token_batches(2, 2):
            engine.train_batch(iter(step))
        assert optimizer_sizes(engine) == before
    finally:
        dispose(engine)


# ---- files refused


def written_model(prepared: dict[str, Any]) -> torch.nn.Module:
    """A model whose parameters zero.Init has put in their tiers; no engine yet."""
    start_process_group()
    with deepspeed.zero.Init(config_dict_or_path=prepared):
        return build()


def initialize(model: torch.nn.Module, prepared: dict[str, Any]) -> Any:
    return ds_vertical.initialize(model=model, model_parameters=list(model.parameters()), config=prepared)


@pytest.mark.parametrize("fault", ["short", "long", "missing"])
def test_a_parameter_file_of_the_wrong_size_is_refused_with_the_numbers(tmp_path: Path, fault: str) -> None:
    prepared = ds_vertical.prepare(config(tmp_path))
    model = written_model(prepared)
    files = [compat.swap_file(p).path for p in model.parameters() if compat.is_on_ssd(p)]
    assert len(files) == 2 * NUM_LAYERS
    victim = files[3]
    size = victim.stat().st_size
    if fault == "missing":
        victim.unlink()
    else:
        os.truncate(victim, size + (4096 if fault == "long" else -4096))
    found = {"short": f"{size - 4096} bytes", "long": f"{size + 4096} bytes", "missing": "No such file"}[fault]
    before = read_bytes()
    with pytest.raises(StorageError) as caught:
        initialize(model, prepared)
    assert read_bytes() - before < MATRIX_BYTES, "a file was read before all were checked"
    message = str(caught.value)
    assert message.startswith(f"1 of {2 * NUM_LAYERS} files")
    assert str(victim) in message and found in message and f"expected {size}" in message


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file system of `size_bytes` at `folder`; where mounting is not allowed, a folder that is said to be one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    if not mounted:
        entries = dict(f_bavail=size_bytes // 4096, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**entries))
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def small_files(size_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `size_bytes`: the kernel refuses, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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
    match = re.search(r"needs (\d+) more bytes .* has (\d+) free .*; free (\d+) bytes", str(caught.value))
    assert match is not None, str(caught.value)
    needed, free, missing = map(int, match.groups())
    assert needed == pytest.approx(OPTIMIZER_BYTES, rel=0.01)
    assert (16 << 20) - 65536 <= free <= 16 << 20
    assert missing == needed - free


def _release(prepared: dict[str, Any]) -> None:
    """Give the folder up while its file system is still there."""
    folder = storage.owned(prepared["zero_optimization"]["offload_optimizer"]["nvme_path"])
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


class LateReads:
    """A real aio handle whose reads start only when they are waited for: as late as a read may ever arrive."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.asked: list[tuple[torch.Tensor, str, int]] = []

    def async_pread(self, buffer: torch.Tensor, path: str, offset: int) -> int:
        buffer.fill_(255)  # NaN
        self.asked.append((buffer, path, offset))
        return 0

    def wait(self) -> int:
        for buffer, path, offset in self.asked:
            self.handle.async_pread(buffer, path, offset)
        self.asked = []
        return self.handle.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)


def test_reads_that_arrive_late_are_waited_for_in_a_failing_step_too(tmp_path: Path, alone: list[Run]) -> None:
    engine, model = build_engine(config(tmp_path), BUILDS[1], vertical=True)
    try:
        buffers = engine._params._buffers
        for buffer in buffers:
            buffer.handle = LateReads(buffer.handle)
        fault = model.get_submodule("blocks.0.up").register_forward_pre_hook(_fail)
        with pytest.raises(ArithmeticError) as caught:
            engine.train_batch(iter(DATA[1][0]))
        assert f"fetch 1 ({2 * MATRIX_BYTES} bytes)" in caught.value.__notes__[0], "nothing was in flight"
        fault.remove()
        assert engine._params.fetched == []
        assert [buffer.num_reads for buffer in buffers] == [0] * len(buffers)
        losses = [engine.train_batch(iter(step)).item() for step in DATA[1]]
        assert_as_alone(alone[1], engine, model, losses)
    finally:
        dispose(engine)


def _fail(*_: Any) -> None:
    raise ArithmeticError("on purpose")
