"""What `ds-vertical limits` has kept of several SSDs: their shares of a file, and their rates together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_vertical.engine import machine_cache


def report(read: float | None, write: float, room: int) -> dict[str, Any]:
    rates = {"ssd_read_bytes_per_s": read, "ssd_write_bytes_per_s": write, "adam_elements_per_s": 5.0}
    return {"machine": rates, "rates": {**rates}, "capacity": {"ssd_bytes": room, "host_bytes": 7}}


def test_several_ssds_have_the_sum_of_their_reads_and_the_slowest_share_decides_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = {"/ssd0": report(3e9, 3e9, 100), "/ssd1": report(1e9, 0.5e9, 90)}
    monkeypatch.delenv("DS_VERTICAL_LIMITS", raising=False)
    monkeypatch.setattr(machine_cache, "cached_report", lambda folder: kept.get(str(folder)))
    monkeypatch.setattr(machine_cache, "file_system_of", lambda folder: int(str(folder)[-1]))
    assert machine_cache.shares_of(["/ssd0", "/ssd1"]) == (0.75, 0.25)
    joint = machine_cache.training_report("/ssd0", ["/ssd1"])
    assert joint is not None and joint["machine"] == joint["rates"]
    assert joint["machine"] == {"ssd_read_bytes_per_s": 4e9, "ssd_write_bytes_per_s": 2e9, "adam_elements_per_s": 5.0}
    assert joint["capacity"] == {"ssd_bytes": 100 / 0.75, "host_bytes": 7}
    assert kept["/ssd0"]["machine"]["ssd_read_bytes_per_s"] == 3e9
    # one that is not measured, or that does not say
    assert machine_cache.training_report("/ssd0", ["/ssd2"]) is None
    assert machine_cache.shares_of(["/ssd0", "/ssd2"]) == (0.5, 0.5)
    assert machine_cache.shares_by_rates([kept["/ssd0"], report(None, 1e9, 1)], (0, 1)) == (0.5, 0.5)
    # whoever names other rates, or none, has equal shares
    monkeypatch.setenv("DS_VERTICAL_LIMITS", "")
    assert machine_cache.shares_of(["/ssd0", "/ssd1"]) == (0.5, 0.5)
    assert machine_cache.training_report(Path("/ssd0"), ["/ssd1"]) is None


def test_the_slowest_host_decides_each_rate() -> None:
    quick, slow = report(3e9, 1e9, 100), report(1e9, 2e9, 90)
    quick["machine"] |= {
        "ssd_read_together_bytes_per_s": 2e9,
        "host_cores": 8,
        "adam_cores": 4,
        "ssd_latency_s": 1e-5,
        "launch_s": 1e-3,
        "schedule_forward_s": 2e-3,
        "schedule_backward_s": 1e-3,
        "one_memory": True,
    }
    slow["machine"] |= {"launch_s": 2e-3, "schedule_forward_s": 1e-3, "schedule_backward_s": 3e-3}
    slow["machine"] |= {"ssd_read_together_bytes_per_s": None, "host_cores": 2, "adam_cores": None, "ssd_latency_s": 1e-4}
    quick["machine"] |= {"net_local_bytes_per_s": 4e9, "net_local_beside_bytes_per_s": 3e9}
    slow["machine"] |= {"net_local_bytes_per_s": 2e9, "net_local_beside_bytes_per_s": None}  # none was measured beside
    found = machine_cache.slowest_report([quick, slow])
    assert found is not None and found["machine"] == {
        "ssd_read_bytes_per_s": 1e9,
        "ssd_write_bytes_per_s": 1e9,
        "ssd_read_together_bytes_per_s": 1e9,
        "adam_elements_per_s": 5.0,
        "host_cores": 2,
        "adam_cores": 2,
        "ssd_latency_s": 1e-4,
        "launch_s": 2e-3,
        "schedule_forward_s": 2e-3,
        "schedule_backward_s": 3e-3,
        "one_memory": True,
        "net_local_bytes_per_s": 2e9,
        "net_local_beside_bytes_per_s": 2e9,
    }
    assert found["capacity"] == {"ssd_bytes": 90, "host_bytes": 7}
    assert quick["machine"]["host_cores"] == 8
    assert machine_cache.slowest_report([quick, quick]) is quick
    assert machine_cache.slowest_report([quick, None]) is None and machine_cache.slowest_report([None]) is None


def test_a_report_that_was_kept_while_amds_graphics_were_taken_for_none_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_VERTICAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    machine_cache.keep_report({"kept": "before"}, tmp_path)
    monkeypatch.delenv("DS_ACCELERATOR")
    node = tmp_path / "kfd"
    node.touch()
    monkeypatch.setattr(machine_cache, "_GPU_NODES", (str(tmp_path / "nvidia0"), str(node)))
    assert machine_cache.cached_report(tmp_path) == {"kept": "before"}
    machine_cache.keep_report({"kept": "now"}, tmp_path)
    assert machine_cache.cached_report(tmp_path) == {"kept": "now"}
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert machine_cache.cached_report(tmp_path) == {"kept": "before"}


def test_folders_on_one_disk_count_it_once() -> None:
    slow, fast = report(1e9, 1e9, 30), report(3e9, 2e9, 90)
    alone = machine_cache.joint_report([slow, slow], machine_cache.shares_by_rates([slow, slow], (7, 7)), (7, 7))
    assert alone["rates"] == slow["rates"] and alone["capacity"] == slow["capacity"]
    shares = machine_cache.shares_by_rates([slow, fast, slow], (7, 8, 7))
    assert shares == (0.125, 0.75, 0.125)
    assert machine_cache.joint_report([slow, fast, slow], shares, (7, 8, 7))["rates"]["ssd_read_bytes_per_s"] == 4e9


def test_disks_together_are_no_faster_than_they_were_at_once() -> None:
    measured = machine_cache.at_once((9, 8), {"ssd_read_bytes_per_s": 3.5e9, "ssd_write_bytes_per_s": 9e9, "other": 1.0})
    reports = [each | {"at_once": measured} for each in (report(3e9, 3e9, 60), report(1e9, 1e9, 20))]
    joint = machine_cache.joint_report(reports, (0.75, 0.25), (9, 8))
    assert joint["rates"] == joint["machine"]
    assert joint["rates"] == {"ssd_read_bytes_per_s": 3.5e9, "ssd_write_bytes_per_s": 4e9, "adam_elements_per_s": 5.0}
    assert joint["capacity"]["ssd_bytes"] == 80
    # it says nothing of other disks, and nothing where one report is of another measurement
    for two, disks in ((reports, (9, 7)), ([reports[0], report(1e9, 1e9, 20)], (9, 8))):
        assert machine_cache.joint_report(two, (0.75, 0.25), disks)["rates"]["ssd_read_bytes_per_s"] == 4e9
