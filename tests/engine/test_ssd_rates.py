"""Several SSDs as they are meant: file systems of their own on disks that are slow, read at the sum of their rates."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from faults import loop_disk
from harness import contents, differing, running
from own_cache import own_cache
from places import SUPPORT
from resuming import assert_whole, config_in, loaded, model_of, train

from ds_vertical.cli.bench import disk_limit
from ds_vertical.engine.checkpoint import parts
from ds_vertical.errors import ConfigError, StorageError
from ds_vertical.io import files

MB = 1_000_000
READ_BPS = (100 * MB, 200 * MB)
DISK_BYTES = 256 << 20


@contextlib.contextmanager
def slow_disks(folder: Path, *read_bps: int) -> Iterator[tuple[list[Path], disk_limit.LimitedGroup]]:
    """File systems of their own, and a group in which each is read at its own limit."""
    limits = [disk_limit.Limit(each, 20_000 * MB) for each in read_bps]
    with contextlib.ExitStack() as stack:
        disks = [stack.enter_context(loop_disk(folder / f"ssd{number}", 3 << 30)).folder for number in range(len(limits))]
        try:
            group = stack.enter_context(disk_limit.limited(limits, disks))
        except ConfigError as error:
            pytest.skip(str(error))
        yield disks, group


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_unequal_slow_disks_are_read_at_the_sum_of_their_rates(tmp_path: Path) -> None:
    """In steps, in fetches of one layer at a time, which wait for each other, and of what forwards have kept: the median of
    each. Shares are those of the rates that `ds-vertical limits` has measured; with equal shares the slower disk decides."""
    inherited = {key: value for key, value in os.environ.items() if key != "DS_VERTICAL_LIMITS"}
    measured, total = inherited | own_cache(tmp_path / "cache"), sum(READ_BPS)
    rates: dict[str, dict[str, Any]] = {}
    with slow_disks(tmp_path, *READ_BPS) as (disks, group):
        report = tmp_path / "limits.json"
        command = [sys.executable, "-m", "ds_vertical.cli.main", "limits", "--path", *map(str, disks), "--out", str(report)]
        subprocess.run(group.wrap([*command, "--size-mb", "128", "--rounds", "3", "--no-fio"]), check=True, env=measured)
        for shares, environment in (("by rates", measured), ("equal", measured | {"DS_VERTICAL_LIMITS": ""})):
            out = tmp_path / f"{shares}.json"
            command = [sys.executable, str(SUPPORT / "ssd_rate_worker.py"), str(out), *(str(disk / "runs") for disk in disks)]
            subprocess.run(group.wrap(command), check=True, env=environment)
            rates[shares] = json.loads(out.read_text())
            for disk in disks:
                shutil.rmtree(disk / "runs")
    known = json.loads(report.read_text())
    print(json.dumps(rates), known["ssds"], known["at_once"])
    # the lesser of the sum and of one measurement at once, which nothing repeats
    assert abs(known["machine"]["ssd_read_bytes_per_s"] / total - 1) < 0.15, (known["ssds"], known["at_once"])
    assert [ssd["share"] for ssd in known["ssds"]] == pytest.approx([each / total for each in READ_BPS], rel=0.15)
    for kind in ("bytes_on_each", "kept_on_each"):
        on_each = rates["by rates"][kind]
        assert on_each[1] / on_each[0] == pytest.approx(READ_BPS[1] / READ_BPS[0], rel=0.2)
    for kind in ("steps", "layers", "kept"):
        assert median(rates["by rates"][kind]) == pytest.approx(total, rel=0.1), (kind, rates)
        assert median(rates["equal"][kind]) == pytest.approx(2 * min(READ_BPS), rel=0.1), (kind, rates)


# ---- checkpoints: hard links stay within one file system


@contextlib.contextmanager
def two_disks(folder: Path) -> Iterator[Path]:
    """A folder with ssd0 and ssd1, file systems of their own."""
    folder.mkdir()
    with loop_disk(folder / "ssd0", DISK_BYTES), loop_disk(folder / "ssd1", DISK_BYTES):
        yield folder


def on_both(folder: Path, **options: Any) -> dict[str, Any]:
    config = config_in(folder / "ssd0", **options)
    paths = [str(folder / ssd) for ssd in ("ssd0", "ssd1")]
    return config | {"vertical_schedule": config["vertical_schedule"] | {"nvme_paths": paths}}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.slow
def test_a_checkpoint_links_on_each_disk_and_is_copied_where_it_cannot(tmp_path: Path) -> None:
    with running(config_in(tmp_path / "one"), model_of, vertical=True) as (engine, model):
        losses = train(engine, range(5))
        expected = contents(engine, model)
    with two_disks(tmp_path / "disks") as disks:
        saved, beside = disks / "ssd0" / "saved", disks / "ssd1" / parts.PARTS_FOLDER
        with running(on_both(disks), model_of, vertical=True) as (engine, model):
            found = train(engine, range(2))
            free = files.free_bytes(disks / "ssd0") + files.free_bytes(disks / "ssd1")
            engine.save_checkpoint(str(saved), tag="mine")
            rank = saved / "mine" / "rank0"
            linked = [path for path in rank.iterdir() if path.is_symlink()]
            assert linked and all(".ssd1." in path.name and path.resolve().stat().st_nlink == 2 for path in linked)
            assert all(path.stat().st_nlink == 2 for path in rank.glob("*.ssd0.bin"))
            taken = free - files.free_bytes(disks / "ssd0") - files.free_bytes(disks / "ssd1")
            frozen = sum(path.stat().st_size for path in rank.glob("*.ssd?.bin"))
            assert frozen <= taken < frozen + 8 * MB, "the new files of the next step, and what rests in memory"
            found += train(engine, range(2, 3))
            first = names_in(beside)
            engine.save_checkpoint(str(saved), tag="mine")
            assert len(names_in(beside)) == 1 and names_in(beside) != first, "the parts of the replaced folder are gone"
            engine.save_checkpoint(str(tmp_path / "elsewhere"), tag="mine")
            copies = [path for path in (tmp_path / "elsewhere" / "mine" / "rank0").iterdir() if ".ssd" in path.name]
            assert copies and all(path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1 for path in copies)
            assert found + train(engine, range(3, 5)) == losses
            assert differing(expected, contents(engine, model)) == []
        for folder in (saved, tmp_path / "elsewhere"):
            assert_whole(folder, "mine")
            with loaded(config_in(tmp_path / "other"), folder, tag="mine") as (engine, model):
                assert train(engine, range(3, 5)) == losses[3:]
                assert differing(expected, contents(engine, model)) == []
            script = [sys.executable, str(folder / "zero_to_fp32.py"), str(folder), str(tmp_path / "exported")]
            subprocess.run(script, check=True)
            assert list((tmp_path / "exported").iterdir())
        assert [each.is_used for each in parts.find_parts(disks / "ssd1")] == [True]
        shutil.rmtree(saved / "mine")
        (orphan,) = parts.find_parts(disks / "ssd1")
        assert not orphan.is_used and orphan.checkpoint == saved / "mine"


@pytest.mark.slow
def test_one_disk_without_room_for_its_share_is_refused_by_name_before_a_file_is_made(tmp_path: Path) -> None:
    disks = tmp_path / "disks"
    disks.mkdir()
    with loop_disk(disks / "ssd0", DISK_BYTES), loop_disk(disks / "ssd1", 10 << 20):
        with pytest.raises(StorageError, match=rf"^{disks}/ssd1/\S+: this rank needs \d+ more bytes .* has \d+ free; free \d+"):
            with running(on_both(disks), model_of, vertical=True):
                pass
        assert not [path for path in disks.rglob("*.ssd?") if "optimizer" in path.parts]
