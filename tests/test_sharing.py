"""Two jobs that train on one nvme_path at the same time, of which one is killed: neither notices the other."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Run, base_config, build_engine, differing, dispose, read_state, read_weights, run_arm
from models import MixerModel, token_batches

from ds_vertical import clean, tenants

NUM_STEPS = 2
DATA = [token_batches(NUM_STEPS, 2, seed) for seed in (1, 2)]
BUILDS = [partial(MixerModel, num_layers, 512) for num_layers in (2, 3)]  # a matrix is 1 MiB in fp32
MARK = "@ "  # before what the other job says; DeepSpeed prints, too
# gradients and activations on SSD, and a second generation of state: every kind of file there is
EVERYWHERE = {
    "activations": {"device": "ssd"},
    "gradient_host_share": 0.0,
    "optimizer_delay": 0.5,
    "optimizer_speculation": True,
}
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")  # variables for one process only


def config(folder: Path, **section: Any) -> dict[str, Any]:
    made = base_config(folder, num_micro_batches=2, dtype="fp32", clip=0.5, section=section)
    made["zero_optimization"]["offload_param"] |= {"buffer_count": 12, "buffer_size": 300_000}
    return made


def say(word: str) -> None:
    """As the other job: tell the test, and wait for its answer."""
    print(f"\n{MARK}{word}", flush=True)
    sys.stdin.readline()


def other_job(folder: Path, out: Path, vertical: bool) -> None:
    """Trains the first model; runs in a process of its own, under a umask that forbids nobody anything."""
    os.umask(0)
    engine, model = build_engine(config(folder, **EVERYWHERE), BUILDS[0], vertical=vertical)
    losses = []
    say("built")
    for step in DATA[0]:
        losses.append(engine.train_batch(iter(step)).item())
        say("stepped")
    torch.save((losses, read_weights(model), read_state(engine, model)), out)
    say("finished")


class Other:
    """The other job, a line at a time."""

    def __init__(self, folder: Path, out: Path, vertical: bool, errors: Path) -> None:
        code = "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import test_sharing\n"
        code += "test_sharing.other_job(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == 'True')"
        command = [sys.executable, "-c", code, str(Path(__file__).parent), str(folder), str(out), str(vertical)]
        env = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
        self.errors = errors
        with open(errors, "w") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, env=env
            )

    def heard(self, word: str) -> None:
        assert self.process.stdout is not None
        said = next((line for line in self.process.stdout if line.startswith(MARK)), "")
        assert said == f"{MARK}{word}\n", self.errors.read_text()[-3000:]

    def proceed(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def other(folder: Path, out: Path, vertical: bool, errors: Path) -> Iterator[Other]:
    job = Other(folder, out, vertical, errors)
    try:
        yield job
    finally:
        job.process.kill()
        job.process.communicate()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """What each job computes with the disk to itself."""
    folder = tmp_path_factory.mktemp("alone")
    return [run_arm(config(folder), build, data, vertical=True) for build, data in zip(BUILDS, DATA, strict=True)]


def assert_private(folder: Path) -> list[str]:
    """Mode 0700 of every folder, 0600 of every file; returns the files' paths below the run's folder."""
    paths = [folder, *folder.rglob("*")]
    modes = {path: (stat.S_ISDIR(path.lstat().st_mode), stat.S_IMODE(path.lstat().st_mode)) for path in paths}
    assert {path: oct(mode) for path, (is_folder, mode) in modes.items() if mode != (0o700 if is_folder else 0o600)} == {}
    return [str(path.relative_to(folder)) for path, (is_folder, _) in modes.items() if not is_folder]


@pytest.mark.parametrize("vertical", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_jobs_on_one_nvme_path_finish_as_if_alone_and_a_killed_ones_folder_goes(
    tmp_path: Path, alone: list[Run], vertical: bool
) -> None:
    disk, out = tmp_path / "ssd", tmp_path / "out.pt"
    with other(disk, out, vertical, tmp_path / "errors") as job:
        engine, model = build_engine(config(disk), BUILDS[1], vertical=vertical)
        try:
            losses = []
            job.heard("built")
            assert [tenant.state for tenant in tenants.tenants(disk)] == ["live", "live"]
            for step in DATA[1]:
                job.proceed()  # both compute now
                losses.append(engine.train_batch(iter(step)).item())
                job.heard("stepped")
            (theirs,) = (tenant.folder for tenant in tenants.tenants(disk) if _pid(tenant) == job.process.pid)
            job.proceed()
            job.heard("finished")
            files = assert_private(theirs)
            job.process.send_signal(signal.SIGKILL)
            job.process.wait(timeout=200)
            assert theirs.is_dir(), "nothing was left to remove"
            assert clean.main(["--path", str(disk), "--remove"]) == 0
            assert not theirs.exists() and len(list(disk.iterdir())) == 1
            assert losses == alone[1].losses
            assert differing(alone[1].weights, read_weights(model)) == []
            assert differing(alone[1].state, read_state(engine, model)) == []
        finally:
            dispose(engine)
    their_losses, their_weights, their_state = torch.load(out, weights_only=True)
    assert their_losses == alone[0].losses
    assert differing(alone[0].weights, their_weights) == [] and differing(alone[0].state, their_state) == []
    print(files)


def _pid(tenant: tenants.Tenant) -> int:
    (owner,) = tenant.live
    assert owner is not None
    return owner.pid
