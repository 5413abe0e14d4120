"""`ds-vertical doctor`: real checks on real files, locks, processes and disks; what dies, hangs or raises; exit status."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import harness
import pytest

from ds_vertical.cli.doctor import command as doctor
from ds_vertical.cli.doctor import hardware, installation, ssd_path
from ds_vertical.cli.doctor.check import CheckResult, Target
from ds_vertical.cli.doctor.worker import Check, run_checks
from ds_vertical.cli.report import summary
from ds_vertical.compat.ops import build_lock, cache, load
from ds_vertical.io import files
from ds_vertical.io.runs import run_dir

HOME = Path(summary.__file__).parents[3]  # of the package under test
CHEAP = ("config", "keys", "auto", "traps", "ssd", "file system", "free space", "other runs")

BROKEN_CHECKS = """
import os, signal, sys, time
from ds_vertical.cli.doctor.check import ok

def fine(case):
    print("words that belong to nobody")
    yield ok(f"fine: {case.nvme_path}")

def raising(case):
    yield ok("what came before is told")
    raise KeyError("the key")

def dying(case):
    print("assertion failed: pinned", file=sys.stderr, flush=True)
    os.abort()

def leaving(case):
    os._exit(3)

def hanging(case):
    yield ok("still here")
    time.sleep(600)
"""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "broken_checks.py").write_text(BROKEN_CHECKS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def checks_of(*names: str) -> list[Check]:
    return [Check(f"{index} {name}", f"broken_checks.{name}", "what mends it") for index, name in enumerate(names)]


def bad(found: Iterator[CheckResult]) -> list[CheckResult]:
    return [finding for finding in found if finding.severity != "ok"]


# ---- checks that fail themselves


def test_a_check_that_raises_dies_or_leaves_takes_no_other_along(broken: Path) -> None:
    names = ("fine", "raising", "fine", "dying", "leaving", "no_such", "fine")
    found = list(run_checks(checks_of(*names), Target(nvme_path=broken)))
    told = {finding.check: finding for finding in found if finding.severity == "error"}
    assert [finding.check for finding in found if finding.found == f"fine: {broken}"] == ["0 fine", "2 fine", "6 fine"]
    assert "what came before is told" in [finding.found for finding in found]
    assert set(told) == {"1 raising", "3 dying", "4 leaving", "5 no_such"}
    assert "KeyError: 'the key' (broken_checks.py:" in told["1 raising"].found
    assert told["3 dying"].found == "the check died: signal SIGABRT; its last words: assertion failed: pinned"
    assert told["3 dying"].remedy == "what mends it"
    assert told["4 leaving"].found.startswith("the check died: exit status 3")
    assert "AttributeError" in told["5 no_such"].found


def test_a_check_that_hangs_is_given_up_and_ended(broken: Path) -> None:
    still, given_up, after = run_checks(checks_of("hanging", "fine"), Target(), limit_s=4.0)
    assert still.severity == "ok" and after.check == "1 fine"
    assert given_up.severity == "error" and "said nothing for 4 s" in given_up.found and given_up.check == "0 hanging"
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(broken).encode() in _bytes(path)]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


def test_workers_that_cannot_start_are_told_once(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", str(broken / "nowhere"))
    found = list(run_checks(checks_of("fine", "fine"), Target()))
    assert len(found) == 1 and found[0].severity == "error" and "the checks cannot be run" in found[0].found


# ---- the command


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The whole command on this machine, in one run."""
    folder = tmp_path_factory.mktemp("ssd")
    config = harness.base_config(folder / "swap")
    (folder / "swap").mkdir()
    (folder / "ds_config.json").write_text(json.dumps(config))
    command = [Path(sys.prefix) / "bin" / "ds-vertical", "doctor", "--json", "--config", folder / "ds_config.json"]
    env = {name: value for name, value in os.environ.items() if name not in ("TORCH_EXTENSIONS_DIR", "WORLD_SIZE")}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False), folder


def test_a_machine_that_works_has_no_errors_and_every_check_has_run(
    healthy: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, folder = healthy
    report = json.loads(done.stdout)  # one object and nothing else
    errors = [finding for finding in report["findings"] if finding["severity"] == "error"]
    assert done.returncode == 0 and errors == [] and report["counts"]["error"] == 0, (errors, done.stderr)
    assert all(set(finding) == {"severity", "found", "remedy", "check"} for finding in report["findings"])
    assert all(bool(finding["remedy"]) is (finding["severity"] != "ok") for finding in report["findings"])
    silent_where_well = {"environment", "keys", "auto", "traps", "ssd", "several SSDs", "optimizer", "precision"}
    ran = {finding["check"] for finding in report["findings"]}
    assert {check.name for check in doctor.CHECKS} - silent_where_well <= ran
    found = "\n".join(finding["found"] for finding in report["findings"] if finding["severity"] == "ok")
    assert all(name in found for name in load.needed_ops()), found
    assert f"{folder / 'swap'}: 8.0 MiB written past the page cache (O_DIRECT) and read back, the same bytes" in found
    assert list((folder / "swap").iterdir()) == [], "the doctor left something"


def run_cheap(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(doctor, "CHECKS", tuple(check for check in doctor.CHECKS if check.name in CHEAP))
    return doctor.main([str(argument) for argument in arguments])


def test_an_error_is_exit_status_1_with_what_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = harness.base_config(tmp_path)
    config["zero_optimization"]["stage"] = 2
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    assert run_cheap(monkeypatch, "--config", tmp_path / "ds_config.json", "--limit", 100) == 1
    lines = capsys.readouterr().out.splitlines()
    index = next(index for index, line in enumerate(lines) if line.startswith("error   config"))
    assert "zero_optimization.stage: got 2" in lines[index] and lines[index + 1].strip() == "-> write 3"
    assert lines[-1].startswith("1 error, 0 warning, ")


def test_warnings_alone_are_exit_status_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cheap(monkeypatch, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["counts"]["warning"] == 1
    assert report["findings"][0]["remedy"] == "ds-vertical doctor --nvme-path /mnt/nvme"


@pytest.mark.parametrize("arguments", [["--config", "/no/such.json"], ["--limit", "0"], ["--arm", "left"], ["--nvme"]])
def test_bad_usage_is_exit_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        doctor.main(arguments)
    assert exit_info.value.code == 2 and "usage: ds-vertical doctor" in capsys.readouterr().err


def test_help_has_an_example_and_the_command_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom ds_vertical.cli.doctor import command\ntry: command.main(['--help'])\n"
        "except SystemExit: pass\nprint([name for name in ('torch', 'deepspeed', 'pydantic') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200).stdout
    assert "ds-vertical doctor --config ds_config.json" in out and out.endswith("[]\n")


def test_every_row_of_the_table_names_a_check() -> None:
    assert len({check.name for check in doctor.CHECKS}) == len(doctor.CHECKS)
    known = {f"{module.__name__}.{name}" for module in MODULES for name in vars(module)}
    assert {check.function for check in doctor.CHECKS} <= known


MODULES = [sys.modules[f"ds_vertical.cli.doctor.{name}"] for name in ("hardware", "installation", "ssd_path")]
MODULES += [__import__(f"ds_vertical.cli.doctor.{name}", fromlist=[name]) for name in ("config_checks", "stock_traps")]


# ---- what is installed


def test_versions_are_held_to_what_the_package_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bad(installation.supported_versions(Target())) == []
    (fine,) = installation.supported_versions(Target())
    assert "deepspeed 0.19.8" in fine.found and "transformers " in fine.found
    for name, version in (("deepspeed", "0.18.1"), ("transformers", "4.1.0")):
        metadata = tmp_path / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)  # found first
    wrong, optional = bad(installation.supported_versions(Target()))
    assert wrong.severity == "error" and wrong.remedy == "pip install 'deepspeed==0.19.8'" and "0.18.1" in wrong.found
    assert optional.severity == "warning" and optional.remedy == "pip install 'transformers>=5'"


def test_a_required_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "ds_vertical-9.dist-info"
    metadata.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: ds-vertical", "Version: 9", "Requires-Python: >=3.99"]
    lines += ["Requires-Dist: ds-no-such-package>=2", 'Requires-Dist: ds-not-asked-for; extra == "dev"']
    (metadata / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    python, missing = bad(installation.supported_versions(Target()))
    assert "needs >=3.99" in python.found
    assert missing.severity == "error" and missing.remedy == "pip install 'ds-no-such-package>=2'"


def test_ninjas_of_two_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version in (("a", "1.11.1"), ("b", "1.13.0"), ("c", "1.13.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ninja").write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / name / "ninja").chmod(0o755)
    (tmp_path / "again").symlink_to(tmp_path / "b")

    def said(*names: str) -> CheckResult:
        monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / name) for name in names))
        (finding,) = installation.ninja(Target())
        return finding

    mixed = said("a", "b")
    assert mixed.severity == "warning" and f"{tmp_path}/a/ninja (1.11.1), {tmp_path}/b/ninja (1.13.0)" in mixed.found
    assert mixed.remedy == f"export PATH={sys.prefix}/bin:$PATH"
    assert said("b", "again").severity == said("b", "c").severity == "ok"
    assert said("empty").severity == "warning" and "not on PATH" in said("empty").found
    own = opcache_ninja()
    monkeypatch.setenv("PATH", os.pathsep.join([str(own.parent), str(tmp_path / "a")]))
    (first,) = installation.ninja(Target())
    assert first.severity == "ok" and f"stands before {tmp_path}/a/ninja" in first.found


def opcache_ninja() -> Path:
    """The ninja of this environment, which scripts/setup.sh installs."""
    own = Path(sys.prefix) / "bin" / "ninja"
    assert own.exists()
    return own


def test_variables_that_send_a_run_somewhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_EXTENSIONS_DIR", "WORLD_SIZE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert list(installation.environment(Target())) == []
    wrong = {"TORCH_EXTENSIONS_DIR": "/elsewhere", "WORLD_SIZE": "2"}
    wrong |= {"OMP_NUM_THREADS": "1"} if len(os.sched_getaffinity(0)) > 1 else {}
    for name, value in wrong.items():
        monkeypatch.setenv(name, value)
    said = bad(installation.environment(Target()))
    assert [finding.found.split()[0] for finding in said] == list(wrong)
    assert all(finding.severity == "warning" and finding.remedy.startswith("unset ") for finding in said)


HOLD = "import sys\nlock = open(sys.argv[1], 'w')\nprint('held', flush=True)\nsys.stdin.read()"
BUILD = "import sys, pathlib\nfrom ds_vertical.compat.ops.build_lock import build_turn\n"
BUILD += "with build_turn(pathlib.Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()"


@pytest.fixture
def hold() -> Iterator[Any]:
    """Start a process that holds something until the test ends."""
    started = []

    def start(code: str, *arguments: object, kill: bool = False) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        pipe = subprocess.PIPE
        env = os.environ | {"PYTHONPATH": str(HOME)}
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline().startswith("held")
        if kill:
            process.send_signal(signal.SIGKILL)
            process.wait()
        return process

    yield start
    for process in started:
        process.communicate()


def test_live_locks_are_told_from_stale_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: Any) -> None:
    monkeypatch.setenv("DS_VERTICAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(build_lock, "RELEASE_S", 0.1)
    (nothing,) = installation.compile_locks(Target())
    assert nothing.severity == "ok"
    key = cache.cache_root() / "ds-key"
    live, stale = key / "jit-1234" / "cpu_adam" / "lock", key / "jit-1234" / "async_io" / "lock"
    stock, users = tmp_path / "xdg/torch_extensions/py311_cpu/cpu_adam/lock", tmp_path / "own" / "pin_memory" / "lock"
    for lock in (live, stale, stock, users):
        lock.parent.mkdir(parents=True)
        lock.touch()
    compiler = hold(HOLD, live)
    builder = hold(BUILD, key)
    said = {finding.found.split(":")[0]: finding for finding in installation.compile_locks(Target())}
    assert f"process {compiler.pid} compiles cpu_adam" in said[str(live)].found
    assert said[str(live)].remedy.startswith("wait for it")
    for lock in (stale, stock, users):
        assert "stale" in said[str(lock)].found and said[str(lock)].remedy == f"rm {lock}"
        assert lock.exists(), "the doctor mends nothing by itself"
    assert f"process {builder.pid} on " in said[str(key)].found
    assert len(said) == 5
    builder.communicate()
    assert build_lock.builder(key) is None and build_lock.builder(tmp_path / "no such") is None


OPS = [
    Check("ops", "ds_vertical.cli.doctor.installation.ops"),
    Check("page-locked", "ds_vertical.cli.doctor.hardware.page_locked"),
    Check("direct I/O", "ds_vertical.cli.doctor.ssd_path.round_trip"),
]


def test_ops_that_are_missing_or_damaged_are_told_and_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("DS_VERTICAL_CACHE", str(tmp_path / "cache"))
    library = cache.cache_folder() / "lib" / "cpu_adam.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"no library")
    library.with_suffix(".json").write_text(json.dumps({"size_bytes": 10}))
    before = sorted(tmp_path.rglob("*"))
    found = list(run_checks(OPS, Target(nvme_path=tmp_path)))
    missing, damaged, *others = bad(iter(found))
    total = len(load.needed_ops())
    assert missing.severity == "warning" and missing.found.startswith(f"{total - 1} of {total} ops are not compiled")
    assert missing.remedy == "ds-vertical build-ops"
    assert damaged.severity == "error" and "the op cpu_adam does not load: ImportError" in damaged.found
    assert damaged.remedy == "ds-vertical build-ops --force"
    assert others[-1].check == "direct I/O" and "can be written; direct I/O not tried" in others[-1].found
    assert all(finding.remedy == "ds-vertical build-ops" for finding in others)
    assert sorted(tmp_path.rglob("*")) == before, "something was compiled or left"


@pytest.mark.slow
@pytest.mark.parametrize("value", ["gpu", ""])
def test_an_accelerator_that_deepspeed_does_not_know(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", value)
    (error,) = run_checks([Check("device", "ds_vertical.cli.doctor.hardware.device")], Target())
    assert error.severity == "error" and f"DS_ACCELERATOR is {value!r}" in error.found
    assert error.remedy == "unset DS_ACCELERATOR"


# ---- the machine

# arguments: pairs of a limit and a JSON ("" for none), the limits falling: a process may not raise its own again
LITTLE_LOCKED = """
import os, resource, sys
from pathlib import Path
from ds_vertical.cli.doctor.check import Target
from ds_vertical.cli.doctor.hardware import host_memory
cases = [(int(limit), Target(Path(file) if file else None)) for limit, file in zip(sys.argv[1::2], sys.argv[2::2])]
for _, case in cases:
    list(host_memory(case))  # whatever it imports, and each JSON, while all may be read
resource.setrlimit(resource.RLIMIT_MEMLOCK, (cases[0][0], cases[0][0]))
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)  # root may lock what it likes
for limit, case in cases:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
    print("CASE")
    for finding in host_memory(case):
        print(finding.severity, finding.found, "->", finding.remedy)
"""


def test_a_memlock_limit_is_held_against_the_buffers_of_the_json(tmp_path: Path) -> None:
    config = harness.base_config(tmp_path)
    config["zero_optimization"]["offload_param"] |= {"buffer_count": 3, "buffer_size": 1 << 20}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    file = str(tmp_path / "ds_config.json")
    command = [sys.executable, "-c", LITTLE_LOCKED, str(7 << 20), file, str(4 << 20), file, str(4 << 20), ""]
    told = forks.run(tmp_path, command, os.environ, timeout=200).stdout
    enough, short, without = told.split("CASE\n")[1:]
    assert "error memlock limit: 4.0 MiB may be page-locked, and the parameter buffers (3 x 1048576 elements" in short
    assert "need 6.0 MiB: DeepSpeed dies in an assertion -> ulimit -l unlimited" in short
    assert "warning memlock limit: 7.0 MiB" in enough
    assert "warning memlock limit: 4.0 MiB" in without
    if os.geteuid() == 0:
        assert "memlock limit: none" in [finding.found for finding in hardware.host_memory(Target())]


def test_buffers_that_do_not_fit_into_memory(tmp_path: Path) -> None:
    config = harness.base_config(tmp_path)
    config["zero_optimization"]["offload_param"] |= {"buffer_count": 1000, "buffer_size": 10**10}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    error = bad(hardware.host_memory(Target(tmp_path / "ds_config.json")))[0]
    assert error.severity == "error" and "1000 x 10000000000 elements of 2 bytes) need 18626.5 GiB" in error.found
    assert '"buffer_count"' in error.remedy


def test_the_kernels_limit_of_asynchronous_operations() -> None:
    (fine,) = hardware.aio_events(Target())
    most = Path("/proc/sys/fs/aio-max-nr").read_text().strip()
    assert fine.severity == "ok" and f"of {most} events are taken" in fine.found


# ---- the folder on the SSD


def at(path: Path | str) -> Target:
    return Target(nvme_path=Path(path))


def test_folders_that_are_not_there_or_are_none(tmp_path: Path) -> None:
    assert list(ssd_path.existence(at(tmp_path))) == []
    (missing,) = ssd_path.existence(at(tmp_path / "a" / "b"))
    assert missing.severity == "warning" and f"made below {tmp_path}" in missing.found
    assert missing.remedy.startswith(f"mkdir -p {tmp_path}/a/b")
    (tmp_path / "file").touch()
    (file,) = ssd_path.existence(at(tmp_path / "file" / "below"))
    assert file.severity == "error" and f"{tmp_path}/file is not a folder" in file.found
    assert not (tmp_path / "a").exists()


def test_memory_is_no_ssd() -> None:
    (said,) = ssd_path.file_system(at("/dev/shm"))
    assert said.severity == "warning" and "tmpfs: memory, not an SSD" in said.found and '"nvme_path"' in said.remedy


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda1 rw
30 22 0:40 / /mnt/with\\040space rw,nosuid - nfs4 server:/x rw
31 22 259:1 / /mnt/nvme ro,relatime - xfs /dev/nvme0n1 rw
32 22 259:1 / /mnt/nvme rw,relatime - ext4 /dev/nvme1n1 rw,errors=remount-ro
33 22 259:2 / /mnt/nvme2 rw,relatime - ext4 /dev/nvme2n1 ro
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/mnt/nvme/swap", ("/mnt/nvme", "ext4", "/dev/nvme1n1", False)),  # mounted over the one before
        ("/mnt/nvme2", ("/mnt/nvme2", "ext4", "/dev/nvme2n1", True)),
        ("/mnt/nvme3", ("/", "ext4", "/dev/vda1", False)),
        ("/mnt/with space/x", ("/mnt/with space", "nfs4", "server:/x", False)),
    ],
)
def test_the_deepest_and_last_mount_holds_a_path(path: str, expected: tuple[str, str, str, bool]) -> None:
    assert files.mount_of(Path(path), MOUNTS) == files.Mount(Path(expected[0]), *expected[1:])


def status(**changes: int) -> os.statvfs_result:
    names = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_flag", "f_namemax")
    values = dict(f_bsize=4096, f_frsize=4096, f_blocks=1 << 24, f_bavail=1 << 23, f_files=1000, f_favail=900) | changes
    return os.statvfs_result([values.get(name, 0) for name in names])


@pytest.mark.parametrize(
    ("changes", "severity", "words"),
    [
        ({}, "ok", "32.0 GiB of 64.0 GiB free: the state of 2454 M parameters, or of 1227 M with a second generation"),
        ({"f_bavail": 1 << 19}, "warning", "2.0 GiB of 64.0 GiB free"),
        ({"f_bavail": 1 << 10}, "error", "too little room on the disk: 4.0 MiB of 64.0 GiB free"),
        ({"f_favail": 0}, "error", "no inode is free"),
        ({"f_files": 0, "f_favail": 0}, "ok", "32.0 GiB"),  # file systems without a table of them, such as btrfs
    ],
)
def test_free_space_is_judged(changes: dict[str, int], severity: str, words: str) -> None:
    said = ssd_path.judge_space(Path("/ssd"), status(**changes))
    assert said.severity == severity and words in said.found and bool(said.remedy) is (severity != "ok")


def test_a_round_trip_moves_bytes_and_leaves_nothing(tmp_path: Path) -> None:
    (said,) = ssd_path.round_trip(at(tmp_path / "not yet there"))
    assert said.severity == "ok" and "8.0 MiB written past the page cache (O_DIRECT) and read back" in said.found
    assert list(tmp_path.iterdir()) == []


def test_other_bytes_than_were_written_are_seen(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"written")
    assert ssd_path.came_back(b"written", b"written", tmp_path / "file")
    assert not ssd_path.came_back(b"written", b"wrItten", tmp_path / "file")
    assert not ssd_path.came_back(b"cached", b"cached", tmp_path / "file")


@pytest.mark.parametrize("path", ["/sys", "/proc"])
def test_a_folder_that_takes_no_files_is_a_sentence(path: str) -> None:
    (said,) = ssd_path.round_trip(at(path))
    assert said.severity == "error" and said.found.startswith(path) and "takes no files" in said.remedy


@pytest.mark.parametrize("aio", [{"single_submit": "false"}, {"block_size": 1_000_000}])
def test_an_aio_section_that_no_queue_takes_is_a_sentence(tmp_path: Path, aio: dict[str, Any]) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(harness.base_config(tmp_path) | {"aio": aio}))
    (said,) = ssd_path.round_trip(Target(tmp_path / "ds_config.json", tmp_path))
    assert said.severity == "error" and said.found.startswith("aio: no queue") and said.remedy.startswith('"aio": {')
    assert list(tmp_path.iterdir()) == [tmp_path / "ds_config.json"]


CUT = """
import resource, signal, sys
from pathlib import Path
from ds_vertical.cli.doctor import ssd_path
from ds_vertical.cli.doctor.check import Target
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
for finding in ssd_path.round_trip(Target(nvme_path=Path(sys.argv[1]))):
    print(finding.severity, finding.found, "->", finding.remedy)
"""


def test_a_file_that_cannot_grow_is_a_sentence(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    beside = tmp_path_factory.mktemp("output")
    done = forks.run(beside, [sys.executable, "-c", CUT, str(tmp_path)], os.environ, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "error " in done.stdout and "preallocate 8388608 bytes: File too large (errno EFBIG)" in done.stdout
    assert list(tmp_path.iterdir()) == []


def may_mount() -> bool:
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


MOUNTED = """
set -e
mount -t tmpfs -o {options} none "$0"
cd {home}
exec {python} -c 'import sys; from pathlib import Path; from ds_vertical.cli.doctor import ssd_path
from ds_vertical.cli.doctor.check import Target
case = Target(nvme_path=Path(sys.argv[1]))
for check in (ssd_path.file_system, ssd_path.space, ssd_path.round_trip):
    for finding in check(case): print(finding.severity, finding.found, "->", finding.remedy)' "$0"
"""


@pytest.mark.skipif(not may_mount(), reason="this user may not mount a file system of its own")
@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ("ro", ["error {0}: tmpfs of none is mounted read-only at {0} -> mount -o remount,rw {0}", "Read-only file system"]),
        pytest.param(
            "size=1m",
            [
                "error {0}: too little room on the disk: 1.0 MiB of 1.0 MiB free",
                "preallocate: needs 8388608 more bytes",
                "-> free ",
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_disk_that_is_read_only_or_full_is_a_sentence(tmp_path: Path, options: str, lines: list[str]) -> None:
    script = MOUNTED.format(options=options, home=HOME, python=sys.executable)
    command = ["unshare", "-m", "sh", "-c", script, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stdout, done.stderr
    assert all(line.format(tmp_path) in done.stdout for line in lines), done.stdout


# ---- who else is there

CLAIM = "import sys\nfrom ds_vertical.io.runs.run_dir import RunFolder\nfolder = RunFolder.claim(sys.argv[1], sys.argv[2], 0)\n"
CLAIM += "print('held', flush=True)\nsys.stdin.read()"


def test_live_runs_are_told_from_dead_ones(tmp_path: Path, hold: Any) -> None:
    (nobody,) = ssd_path.runs(at(tmp_path))
    assert nobody.severity == "ok"
    live = hold(CLAIM, tmp_path, "live")
    dead = hold(CLAIM, tmp_path, "dead", kill=True)
    (tmp_path / "dead" / "state.swp").write_bytes(bytes(3 << 20))
    entry = json.loads((tmp_path / "live" / "rank0.lock").read_text())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rank0.lock").write_text(
        json.dumps(entry | {"host": "node7", "pid": 1, "run": "elsewhere", "boot": "of node7"})
    )
    (tmp_path / "zero_stage_3").mkdir()
    (tmp_path / "just a folder").mkdir()
    (tmp_path / "20260131-235959-node7-1f2e3d4c").mkdir()
    said = {Path(finding.found.split(": ")[0]).name: finding for finding in ssd_path.runs(at(tmp_path))}
    nameless = said.pop("20260131-235959-node7-1f2e3d4c")
    assert set(said) == {"live", "dead", "elsewhere", "zero_stage_3"}
    assert "without a lock that says so" in nameless.found and f"rm -r {tmp_path}/20260131-235959-node7" in nameless.remedy
    assert f"a live run (pid {live.pid} on host {socket.gethostname()}" in said["live"].found
    assert "3.0 MiB left by a run that is dead" in said["dead"].found and f"pid {dead.pid} " in said["dead"].found
    assert said["dead"].remedy == f"ds-vertical clean --path {tmp_path} --remove"
    assert "a run of another host (pid 1 on host node7" in said["elsewhere"].found
    assert "stock run" in said["zero_stage_3"].found
    assert all(finding.severity == "warning" for finding in said.values())
    live.communicate()
    assert not (tmp_path / "live").exists(), "the doctor disturbed a live run"


def test_the_folder_of_a_run_is_refused_as_an_nvme_path(tmp_path: Path) -> None:
    folder = run_dir.RunFolder.claim(tmp_path, "mine", 0)
    (said,) = ssd_path.round_trip(at(folder.path / "below"))
    assert said.severity == "error" and "is the folder of a run" in said.found
    assert said.remedy == "give the original configuration, whose nvme_path is the bare SSD folder"
    folder.release()


def test_paths_are_the_jsons_unless_one_is_named(tmp_path: Path) -> None:
    config = harness.base_config("/ssd/a")
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = "/ssd/b"
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    file = tmp_path / "ds_config.json"
    assert Target(file).nvme_paths == (Path("/ssd/a"), Path("/ssd/b"))
    assert Target(file, tmp_path).nvme_paths == (tmp_path,)
    config["zero_optimization"]["offload_param"]["device"] = "cpu"
    file.write_text(json.dumps(config))
    assert Target(file).nvme_paths == (Path("/ssd/b"),)
    file.write_text(json.dumps({"zero_optimization": {"offload_param": "nvme"}}))
    assert Target(file).nvme_paths == ()


@pytest.mark.parametrize(
    ("mode", "level"),
    [
        ("always [madvise] never", "ok"),
        ("[always] madvise never", "ok"),
        ("always madvise [never]", "warning"),
        (None, "warning"),
    ],
)
def test_huge_pages_that_the_kernel_does_not_grant_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str | None, level: str
) -> None:
    file = tmp_path / "enabled"
    if mode is not None:
        file.write_text(mode + "\n")
    monkeypatch.setattr(hardware, "_HUGE_PAGES", file)
    (found,) = hardware.huge_pages(Target())
    assert found.severity == level and (mode or "absent") in found.found
    usual = f"echo madvise > {file}  # as root"
    assert found.remedy == ("" if level == "ok" else usual if mode else "a kernel with transparent huge pages")


def test_paths_of_several_ssds_are_all_examined_and_two_on_one_disk_are_told(tmp_path: Path) -> None:
    for name in ("ssd0", "ssd1"):
        (tmp_path / name).mkdir()
    paths = [str(tmp_path / "ssd0"), str(tmp_path / "ssd1"), "/dev/shm"]
    zero = {"offload_param": {"device": "nvme", "nvme_path": paths[0]}}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"zero_optimization": zero, "vertical_schedule": {"nvme_paths": paths}}))
    case = Target(config)
    assert case.nvme_paths == tuple(map(Path, paths))
    same, other = ssd_path.separate_disks(case)
    assert (same.severity, other.severity) == ("warning", "ok")
    assert f"{paths[1]}: on the same disk as {paths[0]}" in same.found and f"{paths[2]}: on another disk than" in other.found
    assert len(list(ssd_path.space(case))) == 3
    assert list(ssd_path.separate_disks(Target(nvme_path=tmp_path))) == []
