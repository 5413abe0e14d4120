"""The folder of `ds-vertical ab --out`: an earlier `ab`'s files are taken away, others' never are."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from ab_runs import BASE, write
from run_owners import digest

from ds_vertical.cli import ab_folder
from ds_vertical.cli.bench import ab
from ds_vertical.errors import ConfigError


def test_what_an_earlier_ab_has_left_is_taken_away(tmp_path: Path) -> None:
    out = ab_folder.take(tmp_path / "out")
    for name in ("stock.0.metrics", "traced.1.trace"):
        (ab_folder.make(out, name) / "rank0.jsonl").write_text("of an earlier run")
    (out / "ab.json").write_text("an earlier result")
    for name in ("thesis.tex", ".writable", "stock.old.metrics"):
        (out / name).write_text("mine")
    assert ab_folder.take(tmp_path / "out") == out
    assert {path.name for path in out.iterdir()} == {ab_folder.AB_MARK, "thesis.tex", ".writable", "stock.old.metrics"}
    ab_folder.make(out, "stock.0.metrics")


FOLDERS = ("stock.0.metrics", "vertical.3.trace")
FILES = ("ab.json", "vertical.json", "stock.0.log")


PLACES = [*((name, False) for name in (*FOLDERS, *FILES)), *((name, True) for name in FOLDERS)]


@pytest.mark.parametrize(("name", "marked"), PLACES)
def test_others_files_are_neither_deleted_nor_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, marked: bool
) -> None:
    """`marked`: in a folder that an `ab` has marked; what that makes there has a mark, too."""
    out, script = tmp_path / "out", write(tmp_path, "script.py", "raise SystemExit('must not run')")
    out.mkdir()
    if marked:
        ab_folder.take(out)
    theirs = out / name / "thesis.tex" if name in FOLDERS else out / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("mine")
    (out / ".writable").write_text("mine")
    before = digest(out)
    config = write(tmp_path, "config.json", BASE)
    assert ab.main(["--config", str(config), "--out", str(out), "--", str(script)]) == 2
    told = capsys.readouterr().err
    assert re.search(rf"--out {out}: holds {re.escape(name)}, and nothing says that an `ab` has written it", told), told
    assert digest(out) == before


def test_a_folder_copied_from_another_abs_is_not_this_ones(tmp_path: Path) -> None:
    for name in ("one", "other"):
        ab_folder.make(ab_folder.take(tmp_path / name), "stock.0.metrics")
    shutil.rmtree(tmp_path / "one" / "stock.0.metrics")
    shutil.copytree(tmp_path / "other" / "stock.0.metrics", tmp_path / "one" / "stock.0.metrics")
    before = digest(tmp_path)
    with pytest.raises(ConfigError, match=r"holds stock\.0\.metrics, and nothing says"):
        ab_folder.take(tmp_path / "one")
    assert digest(tmp_path) == before


def test_a_link_under_such_a_name_is_not_followed(tmp_path: Path) -> None:
    out, outside = ab_folder.take(tmp_path / "out"), ab_folder.take(tmp_path / "outside")
    shutil.copy(out / ab_folder.AB_MARK, outside / ab_folder.AB_MARK)
    (outside / "thesis.tex").write_text("mine")
    (out / "stock.0.metrics").symlink_to(outside)
    before = digest(outside)
    ab_folder.take(out)
    assert digest(outside) == before
