"""The report of a run over several hosts: their folders joined, and the slowest host named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import places
import pytest

from ds_vertical.cli.report import command
from ds_vertical.cli.report.run_folder import joined_hosts, open_folder
from ds_vertical.errors import ConfigError

RECORDED = places.RECORDED / "ab"
Record = dict[str, Any]


def as_recorded(record: Record) -> None:
    """Leave it."""


def with_a_slow_disk(record: Record) -> None:
    """The whole step reads, as of a disk that limits it."""
    if record.get("resource") == "ssd_read":
        record["start"] = record["issue"]
        record["end"] += 0.4


def waiting_in_collectives(record: Record) -> None:
    """As of a host that waits for another one in each reduction: that is no work."""
    if record["kind"] == "span" and record["name"].endswith("REDUCE"):
        record["end"] += 0.4


def host_folder(
    path: Path, host: str, rank: int, change: Callable[[Record], None] = as_recorded, host_id: str | None = None
) -> Path:
    """What a host has written of the recorded run as its `rank`. `host_id`: None as in earlier versions."""
    for kind in ("trace", "metrics"):
        (path / f"traced.0.{kind}").mkdir(parents=True)
    lines = (RECORDED / "traced.0.trace" / "rank0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    records[0] |= {"host": host, "rank": rank} | ({} if host_id is None else {"host_id": host_id})
    for record in records:
        change(record)
    text = "".join(f"{json.dumps(record)}\n" for record in records)
    (path / "traced.0.trace" / f"rank{rank}.jsonl").write_text(text)
    shutil.copy(RECORDED / "traced.0.metrics" / "rank0.jsonl", path / "traced.0.metrics" / f"rank{rank}.jsonl")
    return path


def test_folders_of_several_hosts_are_one_run_and_the_slowest_host_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        host_folder(tmp_path / "a" / "run", "nodeA", 0, waiting_in_collectives),
        host_folder(tmp_path / "b" / "run", "nodeB", 1, with_a_slow_disk),
    ]
    assert command.main([*map(str, folders), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"nodeB is the slowest host: SSD read took [0-9.]+ s at [0-9.e+]+ MB/s of its step .* MB/s on nodeA\.", said
    )
    (run,) = command.write(folders, tmp_path / "out")["runs"]
    found = run["sections"]["hosts"]
    assert (found["slowest"], found["resource"]) == ("nodeB", "ssd_read")
    assert [(each["host"], each["ranks"]) for each in found["hosts"]] == [("nodeA", (0,)), ("nodeB", (1,))]
    assert "nodeB is the slowest host" in (tmp_path / "out" / "report.html").read_text()
    (joined,) = joined_hosts([open_folder(folder) for folder in folders])
    assert [line.rank for line in joined.timelines()] == [0, 1] and list(joined.records["traced.0"]) == [0, 1]


def test_hosts_from_one_image_are_told_apart_by_their_boots(tmp_path: Path) -> None:
    changes = (as_recorded, with_a_slow_disk, as_recorded, with_a_slow_disk)
    folders = [
        host_folder(tmp_path / str(rank), "clone", rank, change, f"clone boot{rank % 2}") for rank, change in enumerate(changes)
    ]
    (run,) = command.write(folders, tmp_path / "out")["runs"]
    found = run["sections"]["hosts"]
    assert [(each["host"], each["ranks"]) for each in found["hosts"]] == [
        ("clone (ranks 0, 2)", (0, 2)),
        ("clone (ranks 1, 3)", (1, 3)),
    ]
    assert found["slowest"] == "clone (ranks 1, 3)" and " on clone (ranks 0, 2)." in found["told"]


def test_where_no_host_stands_out_none_is_named(tmp_path: Path) -> None:
    folders = [host_folder(tmp_path / name, name, rank) for rank, name in enumerate(("nodeA", "nodeB"))]
    (run,) = command.write(folders, tmp_path / "out")["runs"]
    assert run["sections"]["hosts"]["slowest"] is None
    assert run["sections"]["hosts"]["told"] == "No host is notably slower than the others."


def test_hosts_folders_in_one_folder_are_found(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for rank, name in enumerate(("nodeB", "nodeA")):
        made = host_folder(tmp_path / name, name, rank)
        (made / "traced.0.trace").rename(tmp_path / "run" / f"{name}.trace")
    folder = open_folder(tmp_path / "run")
    assert list(folder.traces) == ["nodeB"] and [line.host for line in folder.timelines()] == ["nodeB", "nodeA"]


def test_folders_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    first, second = (host_folder(tmp_path / name, name, rank) for rank, name in enumerate(("nodeA", "nodeB")))
    with pytest.raises(ConfigError, match="nodeB: has no rank 0: name the folder of the host that has it first"):
        command.write([second, first], tmp_path / "out")
    with pytest.raises(ConfigError, match=r"holds rank 1, which .*nodeB/traced\.0\.trace has too"):
        command.write([first, second, second], tmp_path / "out")
