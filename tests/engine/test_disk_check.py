"""Disk, open files, events and locked memory: what a run takes of each is what was said, and too little is refused with the
numbers before a file is made."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import pytest
from faults import small_disk
from harness import base_config, build_engine, dispose, running, small_buffers, start_process_group
from models import MixerModel, token_batches
from places import SUPPORT

import ds_vertical.engine.api
from ds_vertical.compat import zero_optimizer
from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import load_section
from ds_vertical.engine import disk_check
from ds_vertical.engine.memory_check import Forecast, groups_of
from ds_vertical.errors import StorageError
from ds_vertical.io import files
from ds_vertical.io.runs import run_dir
from ds_vertical.model.layers import map_layers
from ds_vertical.planner import memory_budget
from ds_vertical.types import RunSettings, Tier

MIB = 1 << 20
BUILD = partial(MixerModel, 3)
slow = pytest.mark.slow


def config_in(folder: Path, clip: float = 0.0, section: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    made = base_config(folder, dtype="fp32", clip=clip, section=section, **options)
    return small_buffers(made) if options.get("params", "nvme") == "nvme" else made


# ---- disk


@pytest.mark.parametrize(
    ("clip", "section"),
    [
        (0.0, {"optimizer_delay": 0.25}),
        (1.0, {"optimizer_delay": 1.0, "gradient_host_share": 0.25}),
        (0.0, {"optimizer_delay": 0.25, "optimizer_host_share": 0.6}),
        (0.0, {"optimizer_delay": 0.25, "optimizer_compression": True}),
    ],
    ids=["two generations", "gradients wait", "state shared", "masters compressed"],
)
def test_the_files_are_as_large_as_was_said(tmp_path: Path, clip: float, section: dict[str, Any]) -> None:
    made = config_in(tmp_path, clip, section)
    compresses = section.get("optimizer_compression", False)
    if compresses:
        made = small_buffers(made | {"bf16": {"enabled": True}}, 600_000)
    with running(made, partial(MixerModel, 3, 768) if compresses else BUILD, vertical=True) as (engine, model):
        forecast = Forecast(engine.layers, groups_of(model, None, None), made, engine.vertical)
        said = forecast.files
        optimizer = engine.optimizer
        assert said.state == sum(zero_optimizer.optimizer_files(optimizer, 1).values())
        assert said.parameters == sum(shard.num_bytes for shard in engine.param_store.files.shards())
        assert said.num_files == len(list(engine.param_store.files.shards())) + len(
            zero_optimizer.optimizer_files(optimizer, 1)
        )
        written = sum(path.stat().st_size for path in tmp_path.rglob("gradients.swp"))
        assert abs(said.gradients - written) <= MIB and (written > 0) == (clip > 0)
        second = sum(path.stat().st_size for path in tmp_path.rglob("generation_1/*"))
        assert second == (said.state + said.low + said.second if clip == 0 else 0)
        assert (said.low > 0) == compresses
        assert said.low == sum(path.stat().st_size for path in tmp_path.rglob("low-*") if "generation_1" not in path.parts)
        assert said.second < said.parameters if said.shared else said.second == said.parameters
        engine.train_batch(iter(token_batches(1, 3, rows=1, shortest=4)[0]))
        engine.flush()
        before = allocated(tmp_path)
        engine.save_checkpoint(str(tmp_path / "saved"))
        frozen = said.state * (2 if second else 1) + said.parameters  # of both generations, where parts of both are current
        frozen += said.shared
        told = "\n".join(disk_check.check_disk(forecast, made, engine.vertical, (1 << 40, 0)))
        assert f"takes up to {frozen / MIB:.1f} MiB more" in told  # no low halves: no checkpoint shares them
        least = (
            0.5 if compresses else 0.8
        )  # no parameter of that model starts where a chunk may be cut: it is all of one generation
        assert least * frozen < allocated(tmp_path) - before < frozen + 4 * MIB, "besides what is small"


def allocated(folder: Path) -> int:
    """Bytes on the disk, each file once, whatever names it has."""
    found = {status.st_ino: status.st_blocks * 512 for path in folder.rglob("*") if (status := path.lstat())}
    return sum(found.values())


def on_disk(folder: Path, size_bytes: int, monkeypatch: pytest.MonkeyPatch, **section: Any) -> str:
    """What building an engine with its state on so small a file system is refused with."""
    with small_disk(folder, size_bytes, monkeypatch):
        with pytest.raises(StorageError) as raised:
            build_engine(config_in(folder, section=section, params="cpu"), BUILD, vertical=True)
        assert not list(folder.rglob("*.swp")), "files were made"
        for path in [path for path in run_dir.claimed() if path.is_relative_to(folder)]:  # while it is there
            claimed = run_dir.owned(path)
            assert claimed is not None
            claimed.release()
    return str(raised.value)


def trains(folder: Path, size_bytes: int, monkeypatch: pytest.MonkeyPatch, **section: Any) -> bool:
    """Whether `initialize` accepts the run on so small a file system."""
    with small_disk(folder, size_bytes, monkeypatch):
        engine, _ = build_engine(config_in(folder, section=section, params="cpu"), BUILD, vertical=True)
        dispose(engine)
    return True


def test_too_little_room_is_refused_with_what_would_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One generation of this model's state takes 21 MiB, its gradients 7."""
    told = on_disk(tmp_path / "one", 30 * MIB, monkeypatch, optimizer_delay=0.5)  # asks for early steps
    match = re.search(r"needs (\d+) more bytes .*second generation .* has (\d+) free; free (\d+) bytes or", told)
    assert match is not None, told
    needed, free, missing = map(int, match.groups())
    assert missing == needed - free > 0 and needed > 42 * MIB
    assert 'or "vertical_schedule.optimizer_delay": 1 or ' in told and told.endswith(" or use another nvme_path")
    assert trains(tmp_path / "one mended", 30 * MIB, monkeypatch, optimizer_delay=1.0)
    told = on_disk(tmp_path / "two", 25 * MIB, monkeypatch, optimizer_delay=1.0, gradient_host_share=0.0)
    assert "waiting gradients" in told and 'or "vertical_schedule.gradient_host_share": 0.6 or ' in told
    assert trains(tmp_path / "two mended", 25 * MIB, monkeypatch, optimizer_delay=1.0, gradient_host_share=0.6)
    told = on_disk(tmp_path / "three", 10 * MIB, monkeypatch)
    assert "optimizer_delay" not in told and "second generation" not in told
    advised = re.search(r'bytes or "vertical_schedule.optimizer_host_share": (0.\d+) or use another nvme_path', told)
    assert advised is not None and trains(tmp_path / "four", 10 * MIB, monkeypatch, optimizer_host_share=float(advised[1]))


class Planned:
    """What `initialize` checks of a model's run, whose SSD has so many bytes free."""

    def __init__(self, folder: Path, clip: float = 0.0, params: str = "nvme", **section: Any) -> None:
        start_process_group()
        self.made = config_in(folder, clip, section, params=params)
        self.layers, loaded = map_layers(model := BUILD(), None), load_section(self.made)
        assert loaded is not None
        self.resolved = resolve(loaded)
        self.forecast = Forecast(self.layers, groups_of(model, None, None), self.made, self.resolved)

    def needed(self, is_lean: bool = True) -> int:
        """Host memory, also where early steps are given up, behind all checks. `is_lean`: with all given up that goes before a
        refusal, ahead of them."""
        gives_up = not disk_check.holds_second(self.forecast, self.made) and not self.forecast.timing.demanded
        less = memory_budget.LEAN if is_lean or not gives_up else {}
        terms = replace(self.forecast.terms, **less | memory_budget.NOTHING_EARLY if gives_up else less)
        items = memory_budget.budget(self.forecast.shape, terms, self.forecast.further(0))
        return max(memory_budget.total_bytes(items, Tier.HOST), self.forecast.setup_bytes)

    def refused(self, allowed: int, baseline: int = 0) -> str | None:
        """What the check of the disk says where so many bytes of host memory are allowed. `baseline`: the process has them."""
        self.forecast.paired((allowed, baseline))
        try:
            disk_check.check_disk(self.forecast, self.made, self.resolved, (allowed, baseline))
        except StorageError as error:
            return str(error)
        return None

    def advised(self, allowed: int, baseline: int = 0) -> dict[str, float]:
        message = self.refused(allowed, baseline)
        assert message is not None and message.count(";") == 1
        return {key: float(value) for key, value in re.findall(r'"vertical_schedule\.(\w+)": ([\d.]+)', message)}


@pytest.mark.parametrize(
    ("free", "clip", "section", "advised"),
    [
        (40, 0.0, {"optimizer_delay": 0.5}, {"optimizer_delay", "optimizer_host_share"}),
        (25, 0.0, {"gradient_host_share": 0.0, "params": "cpu"}, {"gradient_host_share", "optimizer_host_share"}),
        (40, 1.0, {"optimizer_speculation": True}, {"optimizer_delay", "optimizer_host_share"}),
        (25, 1.0, {"optimizer_delay": 1.0, "gradient_host_share": 0.0}, {"gradient_host_share", "optimizer_host_share"}),
        (25, 0.0, {"optimizer_delay": 0.5, "gradient_host_share": 0.0}, {"optimizer_host_share"}),
        (25, 0.0, {"gradient_host_share": 0.0}, {"gradient_host_share", "optimizer_host_share"}),
        (10, 0.0, {"optimizer_delay": 1.0}, {"optimizer_host_share"}),
    ],
    ids=["early", "given up, cpu", "speculating", "gradients", "early, gradients", "early given up", "state"],
)
def test_every_number_that_a_short_disk_advises_makes_the_run_fit_in_memory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, clip: float, section: dict[str, Any], advised: set[str]
) -> None:
    """By making the change. What takes memory that is not there is not advised: with `optimizer_delay` 1 all gradients wait."""
    monkeypatch.setattr(files, "free_bytes", lambda path: free * MIB)
    planned = Planned(tmp_path, clip, **section)
    found = planned.advised(1 << 40)
    assert set(found) == advised

    def needed(key: str, value: float, is_lean: bool = True) -> int:
        changed: dict[str, Any] = {**section, key: value}
        other = Planned(tmp_path, clip, **changed)
        assert other.refused(1 << 40) is None, (key, value)
        return other.needed(is_lean)

    for key, value in found.items():
        least = needed(key, value)
        assert planned.advised(int(1.06 * needed(key, value, is_lean=False)) + MIB)[key] == value
        fewer = planned.advised(least - MIB)
        assert fewer.get(key) != value, "there is no memory for it"
        assert all(needed(*each) <= least - MIB for each in fewer.items())


def test_a_short_disk_advises_what_takes_no_more_memory_than_the_run_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that has none to spare: without early steps there are no new values beside the old ones."""
    monkeypatch.setattr(files, "free_bytes", lambda path: 30 * MIB)
    now, late = (Planned(tmp_path, 1.0, "cpu", optimizer_speculation=True, optimizer_delay=delay) for delay in (0.0, 1.0))
    held = 400 * MIB  # by the process, a tenth of which is to spare in an advised limit
    assert late.needed() < now.needed() and late.refused(held + now.needed(), held) is None
    assert now.advised(held + now.needed(), held)["optimizer_delay"] == 1.0
    assert "optimizer_delay" not in now.advised(held + late.needed() - 1, held)


def test_room_for_a_checkpoint_is_told_and_demanded_where_one_is_sure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The step after it writes new files beside those that the checkpoint shares."""
    with running(config_in(tmp_path), BUILD, vertical=True):
        told = capfd.readouterr().out
    said = re.search(r"a checkpoint on that file system takes up to ([\d.]+) MiB more, [\d.]+ MiB are left\n", told)
    assert said is not None and float(said[1]) > 3 * 6
    monkeypatch.setattr(files, "free_bytes", lambda path: 50 * MIB)
    with running(config_in(tmp_path), BUILD, vertical=True):
        assert "warning: a checkpoint on that file system takes up to" in capfd.readouterr().out
    asks = {"on_signal": {"save_dir": str(tmp_path / "saved")}}
    with pytest.raises(StorageError, match="on_signal.save_dir: .* is on the file system of nvme_path, where a checkpoint"):
        build_engine(config_in(tmp_path, section=asks), BUILD, vertical=True)


# ---- open files, events


def forecast(on_ssd: int) -> Any:
    return SimpleNamespace(files=SimpleNamespace(num_files=on_ssd), terms=SimpleNamespace(slots=4, ahead=0), most_ahead=None)


def settings(**keys: Any) -> RunSettings:
    section = load_section({"vertical_schedule": keys})
    assert section is not None
    return resolve(section)


def test_open_files_are_counted_and_the_soft_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than can be in flight: a deep queue of a small model needs few, a model of many parameters a queue's depth."""
    resolved, before = settings(), resource.getrlimit(resource.RLIMIT_NOFILE)
    made = config_in(Path("/ssd")) | {"aio": {"queue_depth": 5000}}
    open_now = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 100, before[1]))
        assert list(disk_check._descriptor_faults(forecast(10), made, resolved)) == []
        raised, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert open_now + 100 < raised < open_now + 250 and hard == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    monkeypatch.setattr(disk_check.resource, "getrlimit", lambda _: (1000, 10_000))
    (fault,) = disk_check._descriptor_faults(forecast(10**6), made, resolved)
    told = re.search(r"open files: this rank needs up to (\d+), 10000 are allowed; raise the limit \(ulimit -Hn", fault)
    assert told is not None and 10_000 < int(told[1]) < 10_700 + open_now


def test_a_rank_that_cannot_look_for_its_files_tells_the_others(tmp_path: Path) -> None:
    """It comes to the collective with the reason, in place of an exception ahead of it."""
    start_process_group()
    folder = run_dir.RunFolder.claim(tmp_path, "run1", 0)
    (folder.path / "zero").mkdir()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        problem = disk_check.preallocate_on_all_ranks({folder.path / "zero" / "file": 4096})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        folder.release()
    assert re.fullmatch(rf"{folder.path}/zero: .*EMFILE\); raise the limit of open files \(ulimit -n\)", str(problem))


@pytest.mark.parametrize(("spare", "most"), [(1000, None), (0, 0), (-50, 0), (5 * 7, 5)])
def test_state_read_ahead_takes_as_many_files_as_the_limit_allows(
    monkeypatch: pytest.MonkeyPatch, spare: int, most: int | None
) -> None:
    """Seven each: four that are read, three that are written. They are no reason for a refusal. `spare`: of the limit, beyond
    what all else takes."""
    made, resolved, planned = config_in(Path("/ssd")) | {"aio": {"queue_depth": 64}}, settings(), forecast(10)
    monkeypatch.setattr(disk_check.os, "listdir", lambda _: [""] * 10)
    hard = disk_check._open_files(planned, made, resolved, 0) + spare
    monkeypatch.setattr(disk_check.resource, "getrlimit", lambda _: (hard, hard))
    disk_check.limit_ahead(planned, made, resolved)
    assert planned.most_ahead == most
    planned.terms.ahead = 50 if most is None else most
    assert bool(list(disk_check._descriptor_faults(planned, made, resolved))) == (spare < 0)


@pytest.mark.parametrize("hard", [10_000, 500, resource.RLIM_INFINITY])
def test_files_of_a_tier_that_is_still_open_are_counted_and_are_no_fault(monkeypatch: pytest.MonkeyPatch, hard: int) -> None:
    """The two queues of kept values, as far as the hard limit lets the soft one go. The plan may do without them."""
    made, limits = config_in(Path("/ssd")) | {"aio": {"queue_depth": 200}}, list[tuple[int, int]]()
    monkeypatch.setattr(disk_check.os, "listdir", lambda _: [""] * 10)
    monkeypatch.setattr(disk_check.resource, "getrlimit", lambda _: (1, hard))
    monkeypatch.setattr(disk_check.resource, "setrlimit", lambda _, both: limits.append(both))
    for keys in ({"keep": "everything", "keep_device": "device"}, {"keep": "everything"}):
        assert list(disk_check._descriptor_faults(forecast(10), made, settings(activations=keys))) == []
    (least, _), (most, _) = limits
    depth = disk_check._depth(made)
    assert least < 500 and most == (500 if hard == 500 else least + 2 * (depth + 1))


def test_the_kernels_events_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.start_process_group()
    monkeypatch.setattr(disk_check, "_AIO", tmp_path)
    (tmp_path / "aio-nr").write_text("900\n")
    (tmp_path / "aio-max-nr").write_text("1000\n")
    resolved = settings()
    made = config_in(Path("/ssd")) | {"aio": {"queue_depth": 4, "intra_op_parallelism": 4}}
    assert list(disk_check._event_faults(forecast(10), made, resolved)) == []  # six queues of 16
    made["aio"]["queue_depth"] = 5
    (fault,) = disk_check._event_faults(forecast(10), made, resolved)
    assert "need 120 events, 100 of the kernel's 1000 are left; sysctl -w fs.aio-max-nr=1140" in fault


FEW_FILES = """
import json, os, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import harness, models
harness.start_process_group()
made = json.loads(sys.argv[2])
limit = len(os.listdir("/proc/self/fd")) + 40
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
try:
    harness.build_engine(made, models.MixerModel, vertical=True)
except Exception as error:
    print(type(error).__name__, error)
    print(sorted(path.name for path in Path(sys.argv[3]).rglob("*.swp")))
"""


@slow
def test_a_process_that_may_open_few_files_is_refused_before_one_is_made(tmp_path: Path) -> None:
    made = config_in(tmp_path / "ssd", params="cpu")
    arguments = [str(SUPPORT), json.dumps(made), str(tmp_path / "ssd")]
    done = subprocess.run([sys.executable, "-c", FEW_FILES, *arguments], capture_output=True, text=True, timeout=300)
    assert "StorageError open files: this rank needs up to" in done.stdout, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


LITTLE_LOCKED = """
import json, os, resource, sys
import ds_vertical.engine.engine, ds_vertical.engine.disk_check as headroom
headroom.check_before_the_model(json.loads(sys.argv[1]))  # whatever it imports, while all may be read
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4 << 20, 4 << 20))
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)  # root may lock what it likes
try:
    headroom.check_before_the_model(json.loads(sys.argv[1]))
except ValueError as error:
    print(type(error).__name__, error)
"""


@slow
def test_buffers_that_cannot_be_locked_are_refused_before_the_model_is_built(tmp_path: Path) -> None:
    made = base_config(tmp_path)
    made["zero_optimization"]["offload_param"] |= {"buffer_count": 3, "buffer_size": 1 << 20}
    done = subprocess.run([sys.executable, "-c", LITTLE_LOCKED, json.dumps(made)], capture_output=True, text=True, timeout=300)
    told = rf"MemoryBudgetError locked memory: .* need {6 * MIB} bytes, \d+ are allowed; raise the limit \(ulimit -l 6144\)"
    assert re.search(told, done.stdout), done.stdout + done.stderr


def test_a_run_that_is_short_of_memory_gives_up_early_steps_where_the_disk_is_short_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No null is made a delay that would ask for them."""
    monkeypatch.setenv("DS_VERTICAL_LIMITS", "")  # no plan
    monkeypatch.setattr(ds_vertical.engine.api, "host_room", lambda *_: (1, 7))
    folder = tmp_path / "short"
    with small_disk(folder, 36 * MIB, monkeypatch):
        engine, _ = build_engine(config_in(folder, params="cpu"), BUILD, vertical=True)
        assert engine.optimizer.timing.delay == 1.0 and not engine.optimizer.timing.possible
        dispose(engine)
    assert "no early steps, for want of room" in capfd.readouterr().out
