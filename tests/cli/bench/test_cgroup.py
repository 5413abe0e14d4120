"""Disk limits: real groups and real reads where this machine permits them, its refusal where not; both interfaces' texts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ab_runs import BASE, SCRIPT, wait_for_pid, write
from faults import loop_disk

from ds_vertical.cli.bench import ab, disk_limit
from ds_vertical.cli.bench.disk_limit import (
    BlockDevice,
    Controller,
    Limit,
    LimitedGroup,
    controllers,
    disk_of,
    limited,
    parse_limit,
)
from ds_vertical.errors import ConfigError

READ_BYTES = 8 << 20
DISK_BYTES = 256 << 20
SLOW = Limit(read_bps=16 << 20, write_bps=1 << 30)  # half a second for READ_BYTES

# Reads a file past the page cache and prints the seconds it took.
READER = """
import mmap, os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
buffer = mmap.mmap(-1, 1 << 20)
start = time.perf_counter()
while os.readv(descriptor, [buffer]):
    pass
print(time.perf_counter() - start)
"""


def groups_of_this_process() -> list[Path]:
    return sorted(Path("/sys/fs/cgroup").rglob(f"ds_vertical.{os.getpid()}"))


def is_permitted(path: Path) -> bool:
    """Whether this machine allows limits; a refusal is checked for what it has to say."""
    try:
        with limited(SLOW, [path]):
            return True
    except ConfigError as error:
        assert "--ssd-limit" in str(error) and ("run as root" in str(error) or "block device" in str(error))
        return False


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "data"
    with path.open("wb") as sink:
        sink.write(os.urandom(READ_BYTES))
        os.fsync(sink.fileno())
    yield path


def seconds_to_read(path: Path, prefix: list[str]) -> float:
    done = subprocess.run([*prefix, sys.executable, "-c", READER, str(path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


# ---- the real thing


def test_a_limited_process_reads_as_fast_as_the_limit_says(file: Path) -> None:
    if not is_permitted(file):
        assert groups_of_this_process() == []
        return
    expected = READ_BYTES / SLOW.read_bps
    for _ in range(10):  # what else runs may hold a reader up, but none is faster than the limit
        free = seconds_to_read(file, [])
        with limited(SLOW, [file]) as group:
            assert [group.folder] == groups_of_this_process()
            slow = seconds_to_read(file, group.wrap([]))
        assert slow > 0.7 * expected
        assert groups_of_this_process() == []
        # a disk slower than the limit shows nothing
        if slow < max(3 * expected, 3 * free) and (slow > 2 * free or free > expected):
            return
    raise AssertionError(f"a limited process never read at the limit: {slow} s, without it {free} s")


def test_the_group_is_removed_after_a_failure_with_a_process_still_in_it(file: Path) -> None:
    if not is_permitted(file):
        return
    process = None
    try:
        with pytest.raises(RuntimeError, match="broke"), limited(SLOW, [file]) as group:
            process = subprocess.Popen(group.wrap(["sleep", "600"]))
            wait_until(lambda: str(process.pid) in (group.folder / "cgroup.procs").read_text().split())
            raise RuntimeError("broke")
        assert groups_of_this_process() == []
        assert process.poll() is None  # no longer limited, but not ended either
    finally:
        if process is not None:
            process.kill()
            process.wait()


def test_a_group_that_a_killed_process_left_is_removed(file: Path) -> None:
    if not is_permitted(file):
        return
    ended = subprocess.Popen(["true"])
    ended.wait()
    with limited(SLOW, [file]) as group:
        stale = group.folder.parent / f"ds_vertical.{ended.pid}"
    stale.mkdir()
    with limited(SLOW, [file]):
        assert not stale.exists()


@pytest.mark.slow
def test_ab_limits_its_runs_and_says_so(tmp_path: Path) -> None:
    with _ab(tmp_path, "--ssd-limit", "300M,500e6") as process:
        output, errors = process.communicate(timeout=280)
    if not is_permitted(tmp_path):
        assert process.returncode == 2 and "--ssd-limit" in errors
        return
    assert process.returncode == 0, errors
    disk = disk_of(tmp_path)
    assert f"SSD limited to 300 MB/s read, 500 MB/s write, on {disk.name} ({disk.number})" in output
    limit = json.loads((tmp_path / "out" / "ab.json").read_text())["ssd_limit"]
    assert (limit["read_bytes_per_s"], limit["write_bytes_per_s"]) == (300_000_000, 500_000_000)
    assert limit["disks"] == [{"name": disk.name, "device": disk.number}]
    assert "ds_vertical." in (tmp_path / "out" / "stock.0.log").read_text()  # the script printed its groups
    assert not list(Path("/sys/fs/cgroup").rglob(f"ds_vertical.{process.pid}"))


@pytest.mark.slow
def test_ab_limits_each_of_two_ssds_and_keeps_stock_on_the_first(tmp_path: Path) -> None:
    with loop_disk(tmp_path / "ssd0", DISK_BYTES), loop_disk(tmp_path / "ssd1", DISK_BYTES):
        paths = [str(tmp_path / name / "swap") for name in ("ssd0", "ssd1")]
        with _ab(tmp_path, "--ssd-limit", "300M,500e6", "--no-bound", paths=paths) as process:
            output, errors = process.communicate(timeout=280)
        if not is_permitted(tmp_path / "ssd0"):
            assert process.returncode == 2 and "--ssd-limit" in errors
            return
        assert process.returncode == 0, errors
        disks = [disk_of(path) for path in paths]
        assert f"SSD limited to 300 MB/s read, 500 MB/s write each, on {disks[0]}, {disks[1]}, cgroup" in output
        assert f"keeps everything in {paths[0]}; for one SSD" in output
    limit = json.loads((tmp_path / "out" / "ab.json").read_text())["ssd_limit"]
    assert limit["disks"] == [{"name": disk.name, "device": disk.number} for disk in disks]
    assert not list(Path("/sys/fs/cgroup").rglob(f"ds_vertical.{process.pid}"))


@pytest.mark.slow
def test_each_of_two_disks_is_read_at_its_own_limit(tmp_path: Path) -> None:
    limits = [SLOW, Limit(SLOW.read_bps * 2, SLOW.write_bps)]
    with loop_disk(tmp_path / "ssd0", DISK_BYTES), loop_disk(tmp_path / "ssd1", DISK_BYTES):
        files = [tmp_path / name / "data" for name in ("ssd0", "ssd1")]
        for file in files:
            file.write_bytes(os.urandom(4 * READ_BYTES))
            os.sync()
        if not is_permitted(files[0]):
            return
        with limited(limits, files) as group:
            seconds = [min(seconds_to_read(file, group.wrap([])) for _ in range(3)) for file in files]
    for taken, limit in zip(seconds, limits, strict=True):  # what a pause has saved is let through at once
        assert taken > 0.7 * 4 * READ_BYTES / limit.read_bps
    assert seconds[1] < 0.75 * seconds[0], "the second one's limit is its own"


@pytest.mark.slow
def test_an_ended_ab_removes_its_group(tmp_path: Path) -> None:
    if not is_permitted(tmp_path):
        return
    with _ab(tmp_path, "--ssd-limit", "300M,500M", script_arguments=("--hang",)) as process:
        wait_for_pid(tmp_path / "out" / "stock.0.log", process)
        assert list(Path("/sys/fs/cgroup").rglob(f"ds_vertical.{process.pid}"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 128 + signal.SIGTERM
    assert not list(Path("/sys/fs/cgroup").rglob(f"ds_vertical.{process.pid}"))


def _ab(
    folder: Path, *options: str, script_arguments: tuple[str, ...] = (), paths: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """`ds-vertical ab` over the script of test_ab, which here prints its control groups, with state below `folder`, or in
    `paths`."""
    config = json.loads(json.dumps(BASE).replace("/tmp/ds_vertical", paths[0] if paths else str(folder / "swap")))
    config |= {"vertical_schedule": {"nvme_paths": paths}} if paths else {}
    script = write(folder, "script.py", 'print(open("/proc/self/cgroup").read(), flush=True)\n' + SCRIPT)
    own = ["--config", str(write(folder, "config.json", config)), "--out", str(folder / "out"), "--steps", "2", *options]
    command = [sys.executable, "-m", "ds_vertical.cli.main", "ab", *own, "--", str(script), *script_arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- refusals


def test_a_path_in_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="/dev/shm/x/y lies on tmpfs, which has no block device"):
        disk_of("/dev/shm/x/y")


def test_ab_refuses_before_anything_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_memory = json.loads(json.dumps(BASE).replace("/tmp/ds_vertical", "/dev/shm/ds_vertical"))
    second_in_memory = BASE | {"vertical_schedule": {"nvme_paths": ["/tmp/ds_vertical", "/dev/shm/ds_vertical"]}}
    nowhere = json.loads(json.dumps(BASE).replace('"nvme"', '"cpu"'))
    script = write(tmp_path, "script.py", "raise SystemExit('must not run')")
    for config, option, words in (
        (in_memory, "300M,500M", "lies on tmpfs"),
        (second_in_memory, "300M,500M", "/dev/shm/ds_vertical lies on tmpfs"),
        (nowhere, "300M,500M", "keeps nothing on SSD"),
        (BASE, "fast", "write READ,WRITE"),
    ):
        path = write(tmp_path, "config.json", config)
        arguments = ["--config", str(path), "--out", str(tmp_path / "out"), "--ssd-limit", option, "--", str(script)]
        assert ab.main(arguments) == 2
        assert words in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_machine_without_the_controller_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk_limit, "controllers", lambda *_: [])
    monkeypatch.setattr(disk_limit, "disk_of", lambda _: BlockDevice("vda", "254:0"))
    with pytest.raises(ConfigError, match="no cgroup file system with such a controller is mounted"), limited(SLOW, [tmp_path]):
        pass


def test_a_group_that_cannot_be_made_is_refused_with_the_kernels_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2" / "cgroup.controllers").write_text("cpu memory")
    places = [Controller(tmp_path / "v2", 2), Controller(tmp_path / "absent", 1), Controller(tmp_path, 1)]
    monkeypatch.setattr(disk_limit, "controllers", lambda *_: places)
    monkeypatch.setattr(disk_limit, "disk_of", lambda _: BlockDevice("vda", "254:0"))
    monkeypatch.setattr(disk_limit, "_remove", lambda folder: folder.exists() and folder.rmdir())
    with pytest.raises(ConfigError) as refusal, limited(SLOW, [tmp_path]):
        pass
    lines = str(refusal.value).splitlines()
    assert "the io controller is not available there" in lines[1]
    assert "No such file or directory" in lines[2]
    assert "the kernel has no blkio.throttle.read_bps_device" in lines[3]


@pytest.mark.parametrize("text", ["", "300M", "300M,", "1,2,3", "0,5", "-1,5", "300X,5", "nan,5", "0.2,1G", "1e400,5"])
def test_a_senseless_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write READ,WRITE"):
        parse_limit(text)


@pytest.mark.parametrize("text", ["300e6,500e6", "300M,500M", "300MB,500mb", "300000000,0.5G", " 3e+8 , 500000K "])
def test_a_limit_is_read_in_all_its_spellings(text: str) -> None:
    assert parse_limit(text) == Limit(300_000_000, 500_000_000)


def test_binary_units() -> None:
    assert parse_limit("1Ki,1.5GiB") == Limit(1024, 3 << 29)


# ---- which disk, which group


def test_the_limit_of_a_partition_goes_to_its_disk(tmp_path: Path) -> None:
    status = tmp_path.stat()
    number = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    disk, block = tmp_path / "sys" / "sda", tmp_path / "block"
    (disk / "sda1").mkdir(parents=True)
    (disk / "dev").write_text("8:0\n")
    (disk / "sda1" / "partition").write_text("1\n")
    (disk / "sda1" / "dev").write_text(f"{number}\n")
    block.mkdir()
    (block / number).symlink_to(disk / "sda1")
    assert disk_of(tmp_path / "not" / "there" / "yet", block) == BlockDevice("sda", "8:0")


MOUNTS_V1 = "38 31 0:35 / {top} rw,relatime - cgroup cgroup rw,blkio\n39 31 0:36 / /x rw - cgroup cgroup rw,pids\n"
MOUNTS_V2 = "41 31 0:38 / {top} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def test_v1_groups_are_made_in_the_group_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "docker" / "abc").mkdir(parents=True)
    mounts = MOUNTS_V1.format(top=tmp_path)
    assert controllers(mounts, "8:pids:/p\n7:blkio:/docker/abc\n0::/") == [Controller(tmp_path / "docker" / "abc", 1)]
    assert controllers(mounts, "7:blkio:/not/visible\n") == [Controller(tmp_path, 1)]


def test_v2_groups_are_tried_upward(tmp_path: Path) -> None:
    (tmp_path / "user.slice" / "run").mkdir(parents=True)
    found = controllers(MOUNTS_V2.format(top=tmp_path), "0::/user.slice/run\n")
    folders = (tmp_path / "user.slice" / "run", tmp_path / "user.slice", tmp_path)
    assert found == [Controller(folder, 2) for folder in folders]


def test_several_disks_have_a_limit_each() -> None:
    fast, slow = Limit(300_000_000, 500_000_000), Limit(100_000_000, 50_000_000)
    disks = [BlockDevice("vda", "254:0"), BlockDevice("vdb", "254:16")]
    alike = LimitedGroup(Path("/g"), 2, dict.fromkeys(disks, fast))
    assert alike.describe() == "300 MB/s read, 500 MB/s write each, on vda (254:0), vdb (254:16), cgroup v2"
    found = alike.to_json()
    assert (found["read_bytes_per_s"], found["write_bytes_per_s"]) == (300_000_000, 500_000_000)
    assert found["disks"] == [{"name": "vda", "device": "254:0"}, {"name": "vdb", "device": "254:16"}]
    unlike = LimitedGroup(Path("/g"), 1, dict(zip(disks, (fast, slow), strict=True)))
    first, second = "300 MB/s read, 500 MB/s write, on vda (254:0)", "100 MB/s read, 50 MB/s write, on vdb (254:16)"
    assert unlike.describe() == f"{first}; {second}, cgroup v1"
    assert unlike.to_json()["read_bytes_per_s"] == 100_000_000


def test_texts_of_both_interfaces() -> None:
    limit, disk = Limit(3, 5), BlockDevice("vda", "254:0")
    assert Controller(Path("/"), 2).settings(limit, disk) == [("io.max", "254:0 rbps=3 wbps=5")]
    assert Controller(Path("/"), 1).settings(limit, disk) == [
        ("blkio.throttle.read_bps_device", "254:0 3"),
        ("blkio.throttle.write_bps_device", "254:0 5"),
    ]
