"""`python -m ds_vertical.run` and `ds-vertical run`: the script sees what it sees in a plain launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from processes import free_port
from scripts_as_they_are import CONFIG, TRAIN

RUN = ("-m", "ds_vertical.run")
LAUNCHER = ("-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--num_accelerators", "1")
SEES = """
import json, sys
from pathlib import Path
import helper
main = sys.modules["__main__"]
print(json.dumps([
    sys.argv, sys.path[0], __name__, __file__, bool(__package__), __spec__ is None, main.__dict__ is globals(), helper.__name__,
    [name in sys.modules for name in ("torch", "deepspeed", "transformers")],
]))
"""
FAILS = """
import sys
def inner(value):
    raise ValueError(value)
if sys.argv[1] == "exit":
    sys.exit(int(sys.argv[2]))
inner("broken")
"""


# what a launcher tells each rank
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}


def python(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    environment = os.environ | (ALONE if tuple(command[1:3]) == RUN else {})
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, timeout=200, env=environment, stdin=subprocess.DEVNULL
    )


def script(folder: Path, text: str) -> Path:
    (folder / "sub").mkdir()
    (folder / "sub" / "helper.py").write_text("")
    path = folder / "sub" / "train.py"
    path.write_text(text)
    return path


def test_a_script_sees_what_it_sees_in_a_plain_launch(tmp_path: Path) -> None:
    path = script(tmp_path, SEES)
    for given in (path, path.relative_to(tmp_path)):
        plain, ours = (python(*how, given, "--lr", "1", "--", "-m", cwd=tmp_path) for how in ((), RUN))
        assert plain.returncode == ours.returncode == 0, ours.stderr
        assert json.loads(ours.stdout) == json.loads(plain.stdout)
    assert "has not used DeepSpeed" in ours.stderr, "nothing was trained by the section, in silence"


def test_the_launchers_rank_stands_behind_the_script(tmp_path: Path) -> None:
    path = script(tmp_path, SEES)
    ours = python(*RUN, "--local_rank=3", path, "--lr", "1", cwd=tmp_path)
    assert json.loads(ours.stdout)[0] == [str(path), "--local_rank=3", "--lr", "1"]


def test_a_module_runs_as_python_runs_it(tmp_path: Path) -> None:
    path = script(tmp_path, SEES)
    (path.parent / "job").mkdir()
    (path.parent / "job" / "__init__.py").touch()
    (path.parent / "job" / "train.py").write_text(SEES)
    plain, ours = (python(*how, "-m", "job.train", "--lr", "1", cwd=path.parent) for how in ((), RUN))
    assert json.loads(ours.stdout) == json.loads(plain.stdout), ours.stderr


def test_tracebacks_and_exit_codes_are_a_plain_launchs(tmp_path: Path) -> None:
    path = script(tmp_path, FAILS)
    for arguments, status in ((["error"], 1), (["exit", "7"], 7), (["exit", "0"], 0)):
        plain, ours = (python(*how, path.relative_to(tmp_path), *arguments, cwd=tmp_path) for how in ((), RUN))
        assert ours.returncode == plain.returncode == status
        assert ours.stderr == plain.stderr and ("broken" in ours.stderr) == (status == 1)


@pytest.mark.parametrize("arguments", [(), ("--lr",), ("missing.py",)])
def test_wrong_usage_exits_2_and_says_so(arguments: Sequence[str], tmp_path: Path) -> None:
    done = python(*RUN, *arguments, cwd=tmp_path)
    assert done.returncode == 2 and "usage: python -m ds_vertical.run SCRIPT.py" in done.stderr
    assert arguments != ("missing.py",) or "missing.py: no such script" in done.stderr


@pytest.mark.parametrize(
    "how",
    [
        pytest.param([*LAUNCHER, "--module", "ds_vertical.run"], id="deepspeed --module", marks=pytest.mark.slow),
        pytest.param(RUN, id="python -m", marks=pytest.mark.slow),
        pytest.param(["-m", "torch.distributed.run", "--standalone", *RUN], id="torchrun -m", marks=pytest.mark.slow),
        pytest.param(["-m", "ds_vertical.cli.main", "run", *LAUNCHER[2:]], id="ds-vertical run", marks=pytest.mark.slow),
    ],
)
def test_a_plain_script_trains_layer_major(how: Sequence[str], tmp_path: Path) -> None:
    path = script(tmp_path, TRAIN)
    config = tmp_path / "config.json"
    ssd = tmp_path / "ssd"
    config.write_text(json.dumps(CONFIG).replace("/ssd", str(ssd)))
    words = list(how)
    if "--hostfile" in words:  # other jobs of this machine may have the launcher's usual port
        place = words.index("--hostfile")
        words[place:place] = ["--master_port", str(free_port())]
    done = python(*words, path, "--deepspeed_config", config, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "vertical schedule ACTIVE" in done.stdout + done.stderr
    assert "engine VerticalEngine" in done.stdout
    assert list(ssd.iterdir()) == [], "a run's folder was left behind"
