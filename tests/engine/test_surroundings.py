"""What of the process keeps files from being written is told by `prepare`, and by `initialize`, before anything is made."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from harness import base_config, run_both, running, small_buffers
from models import MixerModel, token_batches
from places import SUPPORT

import ds_vertical
from ds_vertical.errors import ConfigError

PREPARE = """
import json, sys
import ds_vertical
from ds_vertical.errors import ConfigError
try:
    getattr(ds_vertical, sys.argv[2])(config=json.loads(sys.argv[1]))
except ConfigError as error:
    print("refused:", ascii(str(error)))
"""
TRAIN = """
import sys
from pathlib import Path
from harness import build_engine, dispose
from harness import contents
from resuming import config_in, model_of, train
folder = Path(sys.argv[1].encode("ascii").decode("unicode_escape"))
engine, model = build_engine(config_in(folder / "ssd \\u00e9"), model_of, vertical=True)
train(engine, range(1))
engine.save_checkpoint(str(folder / "\\u00fcber"), tag="\\u00e4")
train(engine, range(1, 2))
assert engine.load_checkpoint(str(folder / "\\u00fcber"))[0] is not None
dispose(engine)
print("trained", sys.getfilesystemencoding(), (folder / "\\u00fcber" / "\\u00e4" / "rank0").is_dir())
"""
C_LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}


def python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    env = os.environ | {"PYTHONPATH": path} | environment
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=250, check=False)


def config_text(folder: Path) -> str:
    import json

    return json.dumps(base_config(folder, num_micro_batches=2))


def test_optimised_python_writes_no_files() -> None:
    """What both calls ask first; without torch, whose modules python -O would compile anew."""
    done = python("-O", "-c", "from ds_vertical.io.preflight import check_process as check; check([]); check(['/ssd'])")
    assert done.returncode == 1 and "nvme_path: got '/ssd' under python -O" in done.stderr, done.stderr
    assert "run python without -O" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("call", ["prepare", "initialize"])
def test_optimised_python_is_refused(tmp_path: Path, call: str) -> None:
    """DeepSpeed submits its transfers within assert statements: without them zero.Init writes nothing."""
    done = python("-O", "-c", PREPARE, config_text(tmp_path / "ssd"), call)
    assert "nvme_path: got '" in done.stdout and "under python -O" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "run python without -O" in done.stdout and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["prepare", pytest.param("initialize", marks=pytest.mark.slow)])
def test_a_path_that_the_locale_cannot_name_is_refused(tmp_path: Path, call: str) -> None:
    done = python("-c", PREPARE, config_text(tmp_path / "ssd é"), call, PYTHONUTF8="0", **C_LOCALE)
    assert "file names are ascii" in done.stdout and "set LC_ALL=C.UTF-8" in done.stdout, done.stdout + done.stderr[-2000:]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_paths_beyond_ascii_work_under_a_c_locale(tmp_path: Path) -> None:
    """Python takes UTF-8 there unless it is told not to."""
    done = python("-c", TRAIN, str(tmp_path), **C_LOCALE)
    assert "trained utf-8 True" in done.stdout, done.stdout[-500:] + done.stderr[-2000:]


def test_a_umask_that_takes_the_owners_rights_is_refused(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        with pytest.raises(ConfigError, match="got '.*ssd' under the umask 0777.*set the umask 0077"):
            ds_vertical.prepare(base_config(tmp_path / "ssd", num_micro_batches=2))
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == []


def test_under_the_umask_0_a_run_is_its_owners_alone_and_has_stocks_bits(tmp_path: Path) -> None:
    steps = token_batches(2, 2)
    config, usual = (
        small_buffers(base_config(tmp_path / name, num_micro_batches=2, dtype="fp32")) for name in ("ssd", "usual")
    )
    runs = run_both(usual, MixerModel, steps)
    before = os.umask(0)
    try:
        with running(config, MixerModel, vertical=True) as (engine, _):
            losses = [engine.train_batch(iter(step)).item() for step in steps]
            (folder,) = (tmp_path / "ssd").iterdir()
            modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder, *folder.rglob("*"))}
            engine.save_checkpoint(str(tmp_path / "saved"), tag="tag")
    finally:
        os.umask(before)
    assert losses == runs[0].losses == runs[1].losses
    assert not modes[folder.parent] & 0o002  # or others might rename what is below
    assert modes[folder] == 0o700 and len(modes) > 5  # what DeepSpeed makes below is for nobody else, whatever its modes
    saved = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "saved").rglob("*")]
    assert saved and not any(mode & 0o022 for mode in saved)
