"""N3: a run that stops and resumes has the bits of one that never did, with all state on SSD; a checkpoint is complete or
absent, and nothing that happens to the run afterwards changes a byte of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import numpy
import pytest
import torch
from deepspeed.utils import safe_set_full_fp32_param
from faults import flip
from harness import (
    base_config,
    build_engine,
    contents,
    counters,
    differing,
    dispose,
    read_weights,
    running,
)
from places import SUPPORT
from resuming import BATCHES, CLIP, assert_whole, config_in, loaded, model_of, train
from torch import nn

from ds_vertical import errors
from ds_vertical.engine.checkpoint import manifest, save
from ds_vertical.engine.checkpoint.save import POINTS
from ds_vertical.errors import CheckpointError
from ds_vertical.io import files as io_files
from ds_vertical.io.runs import run_dir

slow = pytest.mark.slow


def assert_goes_on(folder: Path, config: dict[str, Any], dtype: str, stop: int, end: int) -> None:
    """One run to the end, one that saves at `stop` and goes on, one that resumes there."""
    build = partial(model_of, dtype)
    with running(config, build, vertical=True) as (engine, model):
        losses = train(engine, range(end))
        expected, numbers = contents(engine, model), counters(engine)
    with running(config, build, vertical=True) as (engine, model):
        assert train(engine, range(stop)) == losses[:stop]
        engine.save_checkpoint(str(folder))
        before = digests(folder)
        assert train(engine, range(stop, end)) == losses[stop:]
        assert differing(expected, contents(engine, model)) == []
    assert digests(folder) == before, "the run has written to its checkpoint"
    with loaded(config, folder, dtype) as (engine, model):
        assert train(engine, range(stop, end)) == losses[stop:]
        assert differing(expected, contents(engine, model)) == []
        assert counters(engine) == numbers


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# ---- N3


@pytest.mark.parametrize(
    ("dtype", "clip", "delay", "stop"),
    [
        ("fp32", 0.0, 0.25, 2),
        pytest.param("bf16", CLIP, 1.0, 2, marks=slow),
        *(pytest.param("fp32", clip, delay, 5, marks=slow) for clip in (0.0, CLIP) for delay in (0.0, 0.25, 1.0)),
        *(pytest.param("bf16", clip, delay, 5, marks=slow) for clip in (0.0, CLIP) for delay in (0.25, 1.0)),
        pytest.param("bf16", CLIP, None, 5, marks=slow),
        pytest.param("fp32", 0.0, 0.25, 20, marks=slow),
        pytest.param("bf16", CLIP, 1.0, 20, marks=slow),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    tmp_path: Path, dtype: str, clip: float, delay: float | None, stop: int
) -> None:
    assert_goes_on(tmp_path / "saved", config_in(tmp_path / "ssd", dtype, clip, delay), dtype, stop, stop + 3)


@slow
@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no second file system")
def test_on_another_file_system_files_are_copied(tmp_path: Path) -> None:
    folder = Path("/dev/shm") / f"ds_vertical_test_{os.getpid()}"
    assert os.stat("/dev/shm").st_dev != tmp_path.stat().st_dev
    try:
        assert_goes_on(folder, config_in(tmp_path, clip=CLIP, delay=1.0), "fp32", 1, 3)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    ("clip", "options"),
    [
        (CLIP, {"section": {"optimizer_speculation": True}}),
        (0.0, {"section": {"on_nonfinite": "stop"}}),
        (0.0, {"sub_group_size": 300_001, "delay": 0.5}),
        (0.0, {"persistence": None, "max_in_cpu": 600_000}),
        (CLIP, {"optimizer": "cpu"}),
        (0.0, {"params": "cpu"}),
        (0.0, {"params": "none"}),
        (CLIP, {"section": {"gradient_host_share": 0.0}, "delay": 1.0}),
        (0.0, {"section": {"optimizer_host_share": 0.6}}),
        (CLIP, {"section": {"optimizer_host_share": 0.6, "optimizer_speculation": True}}),
        (0.0, {"section": {"optimizer_host_share": 1.0}}),
        (0.0, {"section": {"seed_micro_batches": False}}),
        (0.0, {"section": {"seed": None}}),
    ],
    ids=str,
)
@slow
def test_every_regime_and_tier_resumes(tmp_path: Path, clip: float, options: dict[str, Any]) -> None:
    assert_goes_on(tmp_path / "saved", config_in(tmp_path / "ssd", "fp32", clip, **options), "fp32", 2, 5)


OTHERS: list[dict[str, Any]] = [
    {"delay": 1.0, "section": {"prefetch_layers": 2}},
    {"delay": 0.0, "section": {"overlap": False}},
    {"params": "cpu", "optimizer": "cpu"},
    {"section": {"activations": {"device": "ssd"}, "keep_gradients": True}},
    {"optimizer": "cpu", "persistence": None},
    {"section": {"on_nonfinite": "stop"}},  # steps in place, one generation of files
    {"clip": 1e6, "section": {"optimizer_speculation": True}},  # clips nothing
    {"section": {"verify": True}},
    {"section": {"optimizer_host_share": 0.6}},
    {"section": {"optimizer_host_share": 1}},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
@slow
def test_another_timing_or_tier_at_resume_has_the_same_bits(tmp_path: Path, other: dict[str, Any]) -> None:
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        train(engine, range(2))
        engine.save_checkpoint(str(tmp_path / "saved"))
        losses, expected = train(engine, range(2, 5)), contents(engine, model)
    with loaded(config_in(tmp_path / "ssd", **other), tmp_path / "saved") as (engine, model):
        assert train(engine, range(2, 5)) == losses
        assert differing(expected, contents(engine, model)) == []


@pytest.mark.parametrize("other", [{}, {"optimizer_host_share": 0.3, "optimizer_delay": 1.0}, {"optimizer_host_share": 1.0}])
@slow
def test_another_share_of_state_in_host_memory_at_resume_has_the_same_bits(tmp_path: Path, other: dict[str, Any]) -> None:
    made = config_in(tmp_path / "ssd", section={"optimizer_host_share": 0.6})
    with running(made, model_of, vertical=True) as (engine, model):
        train(engine, range(2))
        engine.save_checkpoint(str(tmp_path / "saved"))
        losses, expected = train(engine, range(2, 5)), contents(engine, model)
    with loaded(config_in(tmp_path / "ssd", section=other), tmp_path / "saved") as (engine, model):
        assert train(engine, range(2, 5)) == losses
        assert differing(expected, contents(engine, model)) == []


def test_loading_into_the_run_that_saved_goes_back(tmp_path: Path) -> None:
    """With parameters read ahead, steps due, state in both generations, and two checkpoints that share files with the run."""
    random.seed(3)
    made = config_in(tmp_path / "ssd", delay=0.0, section={"seed_micro_batches": False})
    with running(made, model_of, vertical=True) as (engine, model):
        train(engine, range(1))
        engine.save_checkpoint(str(tmp_path / "saved"), tag="one", client_state={"note": [1, "two"], "seen": torch.arange(3)})
        first = contents(engine, model)
        engine.save_checkpoint(str(tmp_path / "saved"), tag="again")
        drawn = random.random(), torch.rand(1).item(), numpy.random.random()
        losses = train(engine, range(1, 3))
        engine.save_checkpoint(str(tmp_path / "saved"), tag="three")
        before = digests(tmp_path / "saved")
        for _ in range(2):
            train(engine, range(3, 4))
            assert engine._params.ahead, "nothing was read ahead"
            path, client_state = engine.load_checkpoint(str(tmp_path / "saved"), tag="one")
            assert path == str(tmp_path / "saved" / "one" / manifest.NAME)
            assert client_state is not None and client_state["note"] == [1, "two"]
            assert client_state["seen"].tolist() == [0, 1, 2]
            assert differing(first, contents(engine, model)) == []
            assert (random.random(), torch.rand(1).item(), numpy.random.random()) == drawn
            assert train(engine, range(1, 3)) == losses
        assert (tmp_path / "saved" / "latest").read_text() == "three"
        assert digests(tmp_path / "saved") == before
        assert_whole(tmp_path / "saved", "one", "again", "three")


# ---- cheap and still safe


def test_a_save_shares_files_and_reads_no_state(tmp_path: Path) -> None:
    """Files of state are those of the run, which are never written again; their checksums come from memory."""
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        train(engine, range(2))
        engine.flush()
        of_run = {path.stat().st_ino for path in (tmp_path / "ssd").rglob("*.swp")}
        read, state = [], read_pieces_of(engine, lambda path: read.append(path.name))
        with state:
            engine.save_checkpoint(str(tmp_path / "saved"), tag="one")
        # what no step has written yet is what zero.Init and DeepSpeed have: nothing here
        assert read == []
        folder = tmp_path / "saved" / "one" / "rank0"
        shared = [path for path in folder.iterdir() if path.stat().st_nlink > 1]
        assert {path.stat().st_ino for path in shared} <= of_run
        files = {path.name for path in folder.glob("*.bin")} - {save.MEMORY}
        assert {path.name for path in shared} == files and len(shared) > 9
        frozen = {path.stat().st_ino for path in shared}
        train(engine, range(2, 5))
        engine.optimizer.flush_state()
        chunks = engine.optimizer.stepper.chunks
        live = {path for chunk in chunks if chunk.files for generation in chunk.files for path in generation}
        live |= {Path(path) for shard in engine.param_store.files.shards() for path in shard.paths}
        assert not frozen & {path.stat().st_ino for path in live}
        engine.save_checkpoint(str(tmp_path / "saved"), tag="two")
        assert_whole(tmp_path / "saved", "one", "two")
        modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "saved" / "one").rglob("*")}
        assert modes == {0o600, 0o700}


@contextlib.contextmanager
def read_pieces_of(engine: Any, hear: Any) -> Iterator[None]:
    """`hear` of every file that the engine's checksums are read from."""
    from ds_vertical.io import checksums

    real = checksums.read_pieces
    checksums.read_pieces = lambda path, start, end: (hear(path), real(path, start, end))[1]
    try:
        yield
    finally:
        checksums.read_pieces = real


def test_writes_by_the_user_leave_a_checkpoint_alone(tmp_path: Path) -> None:
    """DeepSpeed's own routes to weights and masters write files, too; and the next save has what they wrote."""
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        param = model.blocks[0].up.weight

        def write(value: float) -> None:
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                param.data.fill_(value)

        train(engine, range(1))
        write(0.5)
        engine.save_checkpoint(str(tmp_path / "saved"), tag="one")
        before = digests(tmp_path / "saved" / "one")
        write(0.25)
        safe_set_full_fp32_param(model.blocks[1].up.weight, torch.full((512, 512), 0.5))
        assert digests(tmp_path / "saved" / "one") == before
        expected = contents(engine, model)
        assert torch.equal(expected["blocks.0.up.weight"], torch.full((512, 512), 0.25))
        engine.save_checkpoint(str(tmp_path / "saved"), tag="two")
        train(engine, range(1, 2))
        engine.load_checkpoint(str(tmp_path / "saved"), tag="two")
        assert differing(expected, contents(engine, model)) == []
        assert digests(tmp_path / "saved" / "one") == before
        assert_whole(tmp_path / "saved", "one", "two")


@slow
def test_evaluation_after_a_save_reads_what_is_current(tmp_path: Path) -> None:
    with running(config_in(tmp_path / "ssd", section={"prefetch_layers": 2}), model_of, vertical=True) as (engine, _):
        train(engine, range(2))
        loss = engine.eval_batch(iter(BATCHES[5])).item()
        engine.save_checkpoint(str(tmp_path / "saved"))
        assert engine.eval_batch(iter(BATCHES[5])).item() == loss


# ---- complete or absent


class Stopped(Exception):
    """Raised in a save on purpose."""


@pytest.mark.parametrize("tag", ["one", pytest.param("two", marks=slow)])
def test_a_save_that_is_interrupted_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str) -> None:
    """At every point, saving to the same tag or another; then the run goes on as if nobody had tried to save."""
    folder = tmp_path / "saved"
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        train(engine, range(1))
        engine.save_checkpoint(str(folder), tag="one")
        first = contents(engine, model)
        train(engine, range(1, 2))
        second = contents(engine, model)
        for number, point in enumerate(POINTS):
            monkeypatch.setattr(save, "reach", partial(stop_at, point))
            with pytest.raises(Stopped):
                engine.save_checkpoint(str(folder), tag=tag)
            switched = number >= POINTS.index("switched")
            assert_whole(folder, *sorted({"one", tag} if switched else {"one"}))
            named = tag if number >= POINTS.index("latest written") else "one"
            assert (folder / "latest").read_text() == named
            engine.load_checkpoint(str(folder))
            assert differing(second if switched and named == tag else first, contents(engine, model)) == [], point
            if not switched:
                train(engine, range(1, 2))
                assert differing(second, contents(engine, model)) == [], point
            elif named != tag:
                engine.load_checkpoint(str(folder), tag=tag)


def stop_at(point: str, reached: str) -> None:
    if reached == point:
        raise Stopped(point)


def test_a_save_without_room_is_refused_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_vertical.errors import StorageError
    from ds_vertical.io import files as io_files

    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        train(engine, range(1))
        engine.save_checkpoint(str(tmp_path / "saved"), tag="one")
        expected = contents(engine, model)
        real = io_files.free_bytes
        for full, said in (("saved", "a copy of this rank's files needs"), ("ssd", "needs .* more bytes")):
            full_folder = tmp_path / full
            monkeypatch.setattr(io_files, "free_bytes", lambda p, full=full_folder: 4096 if p.is_relative_to(full) else real(p))
            with pytest.raises(StorageError, match=said):
                engine.save_checkpoint(str(tmp_path / "saved"), tag="two")
            monkeypatch.undo()
        assert_whole(tmp_path / "saved", "one")
        assert differing(expected, contents(engine, model)) == []
        train(engine, range(1, 2))


# ---- refusals


def saved_checkpoint(tmp_path: Path, **options: Any) -> Path:
    with running(config_in(tmp_path / "ssd", **options), model_of, vertical=True) as (engine, _):
        train(engine, range(1))
        engine.save_checkpoint(str(tmp_path / "saved"), tag="one")
    return tmp_path / "saved"


def test_of_a_folder_of_stocks_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything in host memory, where stock itself would unpickle it."""
    given = base_config(tmp_path, num_micro_batches=2, dtype="fp32", params="cpu", optimizer="cpu")
    with running(given, model_of, vertical=False) as (engine, _):
        train(engine, range(1))
        engine.save_checkpoint(str(tmp_path / "saved"), tag="stock")
    with running(given, model_of, vertical=True) as (engine, model):
        train(engine, range(1))
        before = contents(engine, model)
        real, safely = torch.load, list[bool]()

        def load(*words: Any, **options: Any) -> Any:
            safely.append(options["weights_only"])
            return real(*words, **options)

        monkeypatch.setattr(torch, "load", load)
        for options in ({}, {"load_module_only": True}, {"load_optimizer_states": False}):
            path, _ = engine.load_checkpoint(str(tmp_path / "saved"), **options)
            assert path is not None
        assert safely == [True] * 6
        with pytest.raises(RuntimeError, match=r"load with engine\.load_checkpoint"):
            engine.optimizer.load_state_dict([engine.optimizer.state_dict()])
        monkeypatch.undo()
        assert differing(before, contents(engine, model)) == []
        train(engine, range(1))


def test_what_is_damaged_or_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    """With the live state as it was."""
    folder = saved_checkpoint(tmp_path)
    for tag in ("flipped", "missing", "short"):
        shutil.copytree(folder / "one", folder / tag)
    flip(folder / "flipped" / "rank0" / "chunk1.exp_avg.0.bin", 5000)
    (folder / "missing" / "rank0" / "loose.pt").unlink()
    os.truncate(folder / "short" / "rank0" / "weight3.bin", 4096)
    (folder / "stock").mkdir()
    (folder / "stock" / "mp_rank_00_model_states.pt").touch()
    said = {
        "flipped": 'the last good tag is "one"(.|\n)*chunk1.exp_avg.0.bin: bytes .* another checksum',
        "missing": "loose.pt: No such file",
        "short": "weight3.bin: 4096 bytes, 1048576 were saved",
        "stock": "of stock DeepSpeed",
        "absent": "no such checkpoint; complete ones",
    }
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        before = contents(engine, model)
        for tag, message in said.items():
            with pytest.raises(CheckpointError, match=message):
                engine.load_checkpoint(str(folder), tag=tag)
        assert engine.load_checkpoint(str(tmp_path / "nowhere")) == (None, None)
        with pytest.raises(CheckpointError, match="custom_load_fn=.*: not available here; leave it out"):
            engine.load_checkpoint(str(folder), tag="one", custom_load_fn=print)
        with pytest.raises(CheckpointError, match="client_state: holds more than"):
            engine.save_checkpoint(str(folder), tag="bad", client_state={"path": tmp_path})
        with pytest.raises(CheckpointError, match="not usable"):
            engine.save_checkpoint(str(folder), tag="a/b")
        model.register_buffer("extra", torch.zeros(2))
        with pytest.raises(CheckpointError, match="buffer extra: not in the checkpoint"):
            engine.load_checkpoint(str(folder), tag="one")
        assert differing(before, contents(engine, model)) == []
        train(engine, range(1))


def test_a_save_within_a_step_or_into_the_runs_folder_is_refused(tmp_path: Path) -> None:
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        train(engine, range(1))
        expected = contents(engine, model)
        (folder,) = [path for path in run_dir.claimed() if path.is_relative_to(tmp_path)]
        for portable in (False, True):
            with pytest.raises(CheckpointError, match="lies in the folder of this run"):
                engine.save_checkpoint(str(folder / "checkpoints"), portable=portable)
        hook = model.blocks[1].register_forward_pre_hook(lambda *_: engine.save_checkpoint(str(tmp_path / "saved")) and None)
        with pytest.raises(CheckpointError, match="save_checkpoint: called within a step"):
            train(engine, range(1, 2))
        hook.remove()
        assert not (tmp_path / "saved").exists() and differing(expected, contents(engine, model)) == []
        train(engine, range(1, 2))


@pytest.mark.parametrize(
    ("width", "dtype", "said"),
    [
        pytest.param(640, "fp32", r"embed.weight: shape \[257, 640\] here, \[257, 512\] in the checkpoint", marks=slow),
        pytest.param(512, "bf16", "embed.weight: dtype bfloat16 here, float32 in the checkpoint", marks=slow),
    ],
)
def test_another_model_is_refused_by_name(tmp_path: Path, width: int, dtype: str, said: str) -> None:
    folder = saved_checkpoint(tmp_path)
    made = config_in(tmp_path / "ssd", dtype)
    with running(made, partial(model_of, dtype, width), vertical=True) as (engine, model):
        before = contents(engine, model)
        with pytest.raises(CheckpointError, match=said):
            engine.load_checkpoint(str(folder))
        assert differing(before, contents(engine, model)) == []


@slow
def test_other_parameter_groups_are_refused_by_name(tmp_path: Path) -> None:
    folder = saved_checkpoint(tmp_path)

    def two_groups(model: nn.Module) -> Any:
        params = list(model.parameters())
        return [{"params": params[:2]}, {"params": params[2:]}]

    engine, _ = build_engine(config_in(tmp_path / "ssd"), model_of, vertical=True, groups=two_groups)
    with pytest.raises(CheckpointError, match="2 parameter groups here, 1 in the checkpoint"):
        engine.load_checkpoint(str(folder))
    dispose(engine)


@slow
def test_other_order_is_taken_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With other chunks and clipping, too; the state that is loaded has the same bits."""
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        train(engine, range(1))
        engine.save_checkpoint(str(tmp_path / "saved"))
        expected = contents(engine, model)
    section = {"blocks_per_layer": 2, "snake": True}
    made = config_in(tmp_path / "ssd", clip=1.0, section=section, sub_group_size=300_001)
    with loaded(made | {"gradient_accumulation_steps": 3}, tmp_path / "saved") as (engine, model):
        said = capsys.readouterr().out
        assert "vertical_schedule.blocks_per_layer is 2, and was 1" in said and "vertical_schedule.snake is True" in said
        assert "gradient_accumulation_steps is 3, and was 2" in said and "gradient_clipping is 1.0, and was 0.0" in said
        assert "zero_optimization.sub_group_size is 300001, and was 700001" in said
        assert differing(expected, contents(engine, model)) == []
        engine.train_batch(iter([*BATCHES[1], *BATCHES[2]]))
        assert engine.global_steps == 2


@slow
def test_weights_alone(tmp_path: Path) -> None:
    """Of another run: weights and masters are the checkpoint's, the rest stays as it is."""
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        train(engine, range(2))
        saved = contents(engine, model)
        engine.save_checkpoint(str(tmp_path / "saved"), client_state={"note": 1})
        train(engine, range(2, 4))
        own, numbers = contents(engine, model), counters(engine)
        _, client_state = engine.load_checkpoint(str(tmp_path / "saved"), load_module_only=True)
        found = contents(engine, model)
        assert client_state == {"note": 1} and counters(engine) == numbers
        for name, tensor in found.items():
            assert torch.equal(tensor, own[name] if "/exp_avg" in name else saved[name]), name
        train(engine, range(4, 5))


# ---- new processes

WORKER = """
import json, sys
from pathlib import Path
import torch
from harness import build_engine, dispose
from harness import contents
from resuming import config_in, model_of, train
job = json.loads(sys.argv[1])
config = config_in(Path(job["ssd"]), job["dtype"], job["clip"], job["delay"])
engine, model = build_engine(config, lambda: model_of(job["dtype"]), vertical=True)
if job["load"]:
    engine.load_checkpoint(job["saved"])
losses = train(engine, range(*job["steps"]))
if job["save"]:
    engine.save_checkpoint(job["saved"])
torch.save({"losses": losses} | contents(engine, model), job["out"])
dispose(engine)
"""


def in_new_process(tmp_path: Path, out: str, **job: Any) -> dict[str, Any]:
    job |= {"ssd": str(tmp_path / "ssd"), "saved": str(tmp_path / "saved"), "out": str(tmp_path / out)}
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    subprocess.run([sys.executable, "-c", WORKER, json.dumps(job)], check=True, env=os.environ | {"PYTHONPATH": path})
    return torch.load(tmp_path / out)


@slow
@pytest.mark.parametrize("stop", [2, 5, 20])
@pytest.mark.parametrize(("dtype", "clip", "delay"), [("fp32", 0.0, 0.25), ("bf16", CLIP, 1.0)])
def test_a_new_process_goes_on_with_the_same_bits(tmp_path: Path, dtype: str, clip: float, delay: float, stop: int) -> None:
    job = {"dtype": dtype, "clip": clip, "delay": delay}
    whole = in_new_process(tmp_path, "whole", load=False, save=False, steps=[0, stop + 3], **job)
    first = in_new_process(tmp_path, "first", load=False, save=True, steps=[0, stop], **job)
    second = in_new_process(tmp_path, "second", load=True, save=False, steps=[stop, stop + 3], **job)
    assert whole.pop("losses") == first.pop("losses") + second.pop("losses")
    assert differing(whole, second) == []


def test_frozen_weights_can_be_left_out(tmp_path: Path) -> None:
    """They stay as they are at a load; what is trained is the checkpoint's."""

    def build() -> nn.Module:
        model = model_of()
        next(model.parameters()).requires_grad_(False)
        return model

    with running(config_in(tmp_path / "ssd"), build, vertical=True) as (engine, model):
        train(engine, range(1))
        engine.save_checkpoint(str(tmp_path / "saved"), exclude_frozen_parameters=True)
        expected = contents(engine, model)
        frozen = next(model.parameters())
        with deepspeed.zero.GatheredParameters([frozen], modifier_rank=0):
            frozen.data.add_(1.0)
        changed = read_weights(model)
        train(engine, range(1, 2))
        engine.load_checkpoint(str(tmp_path / "saved"))
        name = next(name for name, _ in model.named_parameters())
        assert differing(expected, contents(engine, model)) == [name]
        assert torch.equal(changed[name], read_weights(model)[name])


def test_frozen_weights_that_a_checkpoint_shares_take_no_more_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the place of the shared one is made when somebody writes them, and nothing is lost where there is no room."""

    def build() -> nn.Module:
        model = model_of()
        model.blocks[0].up.weight.requires_grad_(False)
        return model

    with running(config_in(tmp_path / "ssd"), build, vertical=True) as (engine, model):
        train(engine, range(1))
        frozen = model.blocks[0].up.weight
        shard = next(shard for shard in engine.param_store.files.shards() if shard.param is frozen)
        own, trained = Path(shard.path), model.blocks[1].up.weight
        for tag in ("one", "two"):
            trained.requires_grad_(False)  # for now: the optimizer will step it
            engine.save_checkpoint(str(tmp_path / "saved"), tag=tag)
            trained.requires_grad_(True)
            stepped = next(shard for shard in engine.param_store.files.shards() if shard.param is trained)
            assert Path(stepped.paths[stepped.generation]).exists()
            assert not own.exists() and Path(shard.path).stat().st_nlink == 2 + (tag == "two")
        losses = train(engine, range(1, 2))
        expected, before = contents(engine, model), digests(tmp_path / "saved")

        def write() -> None:
            with deepspeed.zero.GatheredParameters([frozen], modifier_rank=0):
                frozen.data.fill_(0.25)

        with monkeypatch.context() as patch:
            patch.setattr(io_files, "free_bytes", lambda path: 1000)
            with pytest.raises(errors.StorageError, match="needs 1048576"):
                write()
        assert digests(tmp_path / "saved") == before and not own.exists()
        assert differing(expected, contents(engine, model)) == []
        with monkeypatch.context() as patch:
            patch.setattr(io_files, "free_bytes", lambda path: 1000)
            with pytest.raises(errors.StorageError, match="needs 1048576"):
                engine.load_checkpoint(str(tmp_path / "saved"), tag="one")
        assert differing(expected, contents(engine, model)) == []
        write()
        assert own.stat().st_blocks * 512 >= own.stat().st_size == 1 << 20 and shard.path == str(own)
        assert torch.equal(read_weights(model)["blocks.0.up.weight"], torch.full((512, 512), 0.25))
        assert digests(tmp_path / "saved") == before
        engine.load_checkpoint(str(tmp_path / "saved"), tag="one")
        assert train(engine, range(1, 2)) == losses
        assert differing(expected, contents(engine, model)) == []
        assert_whole(tmp_path / "saved", "one", "two")
