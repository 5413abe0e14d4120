"""The hostfile of `ds-vertical ab`: what is refused, and what ranks on other hosts are handed."""

from __future__ import annotations

from pathlib import Path

import pytest
from ab_runs import BASE, SCRIPT, write

from ds_vertical.cli.bench import ab
from ds_vertical.cli.bench.hosts import Hosts, read_hostfile
from ds_vertical.errors import ConfigError


def test_a_hostfile_is_read_as_deepspeed_does(tmp_path: Path) -> None:
    path = write(tmp_path, "hostfile", "# two of them\n\nnode1 slots=2\nnode2   slots=4 # fast\n")
    found = read_hostfile(path, "10.0.0.1")
    assert (found.slots, found.num_ranks) == ({"node1": 2, "node2": 4}, 6)
    assert found.options(29500) == ["--hostfile", str(path), "--master_port", "29500", "--master_addr", "10.0.0.1"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("node1 slots=2\nnode2\n", "line 2: got 'node2'; write each host once, as `HOST slots=NUMBER`"),
        ("node1 slots=2\nnode1 slots=2\n", "line 2: got host node1 for the second time; write each host once"),
        ("node1 slots=0\nnode2 slots=1\n", "line 1: got 'node1 slots=0'"),
        ("node1 slots=2\n", "names 1 host; write two or more, or leave --hostfile out and write --num-ranks"),
        ("", "names 0 hosts; write two or more"),
    ],
)
def test_a_hostfile_that_cannot_be_used_is_refused_by_line(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_hostfile(write(tmp_path, "hostfile", text))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--hostfile", "nowhere"],
            "--hostfile nowhere: [Errno 2] No such file or directory: 'nowhere'; write a file of lines",
        ),
        (["--hostfile", "HOSTFILE", "--num-ranks", "2"], "--num-ranks 2: --hostfile says how many ranks each host has"),
        (["--hostfile", "HOSTFILE", "--ssd-limit", "1M,1M"], "--ssd-limit: it limits this machine's disks"),
        (["--hostfile", "HOSTFILE", "--machine", "one"], "--machine: got 1 of them for 2 hosts; write one for each host"),
        (["--machine", "one", "--machine", "two"], "--machine two: it is for several hosts; write --hostfile FILE beside it"),
        (["--master-addr", "node1"], "--master-addr: it is for several hosts"),
    ],
)
def test_options_that_do_not_fit_several_hosts_are_refused(tmp_path: Path, words: list[str], told: str) -> None:
    hostfile = write(tmp_path, "hostfile", "node1 slots=2\nnode2 slots=2\n")
    given = [str(hostfile) if word == "HOSTFILE" else word for word in words]
    own = ["--config", str(write(tmp_path, "base.json", BASE)), "--out", str(tmp_path / "out")]
    with pytest.raises(ConfigError) as caught:
        ab.parse([*own, *given, "--", str(write(tmp_path, "script.py", SCRIPT))])
    assert told in str(caught.value) and not (tmp_path / "out").exists()


def test_ranks_get_the_users_variables_and_then_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "home", ".deepspeed_env", "ONE=home\n")
    write(tmp_path, ".deepspeed_env", "ONE=here\n\nTWO=here")
    Hosts(Path("hostfile"), {"a": 1, "b": 1}).write_environment(tmp_path / "env", {"TWO": "run", "THREE": "run"})
    assert (tmp_path / "env").read_text() == "ONE=home\nONE=here\nTWO=here\nTWO=run\nTHREE=run\n"


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ssh = write(tmp_path, "ssh", '#!/bin/sh\n[ "$1" = node1 ] || { echo "no route to host" >&2; exit 255; }\n')
    ssh.chmod(0o755)
    with pytest.raises(ConfigError) as caught:
        Hosts(Path("hostfile"), {"node1": 1, "node2": 1}).check_shared(tmp_path)
    assert f"--out {tmp_path}: host node2 does not see it (no route to host); name a folder on a file system" in str(
        caught.value
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ssh"], "the token is left"
