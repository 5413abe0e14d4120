"""Where a command writes its result: refused early, put in place whole or not at all."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from faults import small_files

from ds_vertical.cli import main
from ds_vertical.errors import ConfigError
from ds_vertical.io.atomic_file import check_out, write_out


def test_a_new_file_has_the_modes_that_the_user_wants(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_out(tmp_path / "new", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "new").read_text() == "text"
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_a_file_that_is_there_keeps_its_modes_and_its_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o604)
    (tmp_path / "link").symlink_to("file")
    check_out(tmp_path / "link")
    assert (tmp_path / "file").read_text() == "old"
    write_out(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o604
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_what_was_there_stays_where_the_disk_has_no_room(tmp_path: Path) -> None:
    out = tmp_path / "ds_config.json"
    out.write_text("old")
    with small_files(100), pytest.raises(ConfigError, match=r"ds_config\.json: cannot be written \(File too large\)"):
        write_out(out, "new" * 1000)
    assert out.read_text() == "old" and os.listdir(tmp_path) == ["ds_config.json"]


def test_a_stream_is_written_to_and_not_replaced() -> None:
    script = "from pathlib import Path; from ds_vertical.io.atomic_file import *; out = Path('/dev/stdout');"
    script += "check_out(out); write_out(out, 'text')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "text"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--model", "gpt_65b", "--tokens-per-step", "65536", "--machine", "a100_server"],
        ["limits"],
        ["limits", "--ssd-limit", "300M,500M"],
    ],
)
@pytest.mark.parametrize(("out", "why"), [("/proc/nosuch/x.json", "No such file"), (".", "folder")])
def test_a_command_says_so_before_its_work(
    arguments: list[str], out: str, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for work in ("cli.plan.command.plan", "cli.bench.limits.measure", "cli.bench.limits._run_limited"):
        monkeypatch.setattr(f"ds_vertical.{work}", lambda *_: pytest.fail("the work has begun"))
    assert main.main([*arguments, "--out", out]) == 2
    shown = capsys.readouterr()
    assert f"--out {out}: cannot be written" in shown.err and why in shown.err and not shown.out
