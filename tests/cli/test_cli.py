"""`ds-vertical`: the table of commands, cheap help, arguments handed on untouched."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import ds_vertical
from ds_vertical.cli import main

SCRIPT = Path(sys.prefix) / "bin" / "ds-vertical"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, timeout=200, check=False)


def test_help_lists_every_command_and_imports_no_torch() -> None:
    code = (
        "import sys\nfrom ds_vertical.cli import main\ntry: main.main(['--help'])\n"
        "except SystemExit: pass\nprint('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200).stdout
    assert out.strip().endswith("False")
    assert all(name in out for name in main.COMMANDS)


def test_installed_script_tells_its_version() -> None:
    assert run("--version").stdout == f"ds-vertical {ds_vertical.__version__}\n"


@pytest.mark.parametrize("name", sorted(main.COMMANDS))
def test_every_command_leads_to_a_main_that_takes_argv(name: str) -> None:
    command = main.COMMANDS[name]
    function = getattr(importlib.import_module(command.module), command.function)
    assert len(inspect.signature(function).parameters) == 1


@pytest.mark.parametrize("name", sorted(main.COMMANDS))
def test_every_command_answers_help_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: some of them import torch and DeepSpeed for it."""
    try:
        status = main.main([name, "--help"])
    except SystemExit as ended:
        status = ended.code
    told = capsys.readouterr()
    assert not status and told.out.startswith(f"usage: ds-vertical {name}"), told.err


def test_the_installed_script_hands_a_commands_help_on() -> None:
    result = run("doctor", "--help")
    assert result.returncode == 0 and result.stdout.startswith("usage: ds-vertical doctor"), result.stderr


@pytest.mark.parametrize("arguments", [(), ("abb",), ("build-ops", "--forse")])
def test_wrong_usage_exits_2_and_says_so(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.returncode == 2 and "usage: ds-vertical" in result.stderr


def test_arguments_after_the_command_arrive_untouched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "echo_command.py").write_text("received = []\ndef main(argv):\n    received.extend(argv)\n    return 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(main.COMMANDS, "echo", main.Command("for this test", "echo_command", "main"))
    assert main.main(["echo", "--steps", "3", "--", "train.py", "--help"]) == 7
    assert importlib.import_module("echo_command").received == ["--steps", "3", "--", "train.py", "--help"]


def test_build_ops_is_immediate_when_nothing_is_missing() -> None:
    result = run("build-ops")
    assert result.returncode == 0 and result.stderr == "" and "ops are ready in" in result.stdout
