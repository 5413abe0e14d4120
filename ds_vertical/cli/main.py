"""The console script `ds-vertical`: a table of subcommands, imported when called, so that `--help` needs no torch."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand: its line in `--help`, and the function that takes the words behind it and returns the exit status."""

    help: str
    module: str
    function: str


COMMANDS = {
    "run": Command("launch a script as it is, with the section of its JSON in force", "ds_vertical.cli.run", "main"),
    "ab": Command(
        "run one script with stock ZeRO-Infinity and with the vertical schedule, and compare",
        "ds_vertical.cli.bench.ab",
        "main",
    ),
    "limits": Command("measure this machine: SSD, copies, CPU Adam, one layer", "ds_vertical.cli.bench.limits", "main"),
    "plan": Command(
        "how to train a model on a machine: settings, predicted step, the JSON", "ds_vertical.cli.plan.command", "main"
    ),
    "doctor": Command("say what keeps a run from working here, and what mends it", "ds_vertical.cli.doctor.command", "main"),
    "clean": Command("list the folders of runs on the SSD, remove those of dead ones", "ds_vertical.cli.clean", "main"),
    "trace": Command("a run's timeline for Perfetto, from a measured or a simulated run", "ds_vertical.cli.trace", "main"),
    "report": Command("one page about runs: timeline, stalls, bound, memory, losses", "ds_vertical.cli.report.command", "main"),
    "build-ops": Command("compile the ops once for this user and machine", "ds_vertical.cli.build_ops", "main"),
}


def _parser() -> argparse.ArgumentParser:
    from ds_vertical import __version__

    description = "Layer-major training on DeepSpeed's ZeRO-Infinity."
    parser = argparse.ArgumentParser(prog="ds-vertical", description=description)
    parser.add_argument("--version", action="version", version=f"ds-vertical {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        # add_help=False: `ds-vertical ab --help` is answered by the command's own parser
        commands.add_parser(name, help=command.help, add_help=False)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns its exit status (0 is success, 2 a usage error, raised as SystemExit by argparse)."""
    arguments = sys.argv[1:] if argv is None else argv
    # only the command itself is ours to parse: everything after it, `--` included, belongs to the command
    chosen = _parser().parse_args(arguments[:1]).command
    command = COMMANDS[chosen]
    function = getattr(importlib.import_module(command.module), command.function)
    return function(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
