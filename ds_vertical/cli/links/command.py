"""`ds-vertical limits --links`: launches a rank on each slot of a hostfile, and reports what the links between them carry."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ds_vertical.cli.bench.launch import local_options
from ds_vertical.cli.bench.machine_info import accelerator, describe_machine, versions
from ds_vertical.cli.common import JsonObject
from ds_vertical.cli.links import worker_lines
from ds_vertical.errors import ConfigError
from ds_vertical.io.atomic_file import check_out, write_out

_BAD_INPUT = 2
_WORKER = "ds_vertical.cli.links.worker"
_LINES_SHOWN = 15
_EXAMPLE = """example:
  ds-vertical limits --links --hostfile hostfile --out links.json
  ds-vertical limits --links --num-ranks 8 --out links.json
  ds-vertical limits --links --hostfile hostfile -- --master_port 29501

What follows `--` goes to the deepspeed launcher. All hosts must find this package, and the variables of .deepspeed_env.
"""


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table, writes JSON. Returns 0; 2 for bad input, and where the ranks fail."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:cut])
    try:
        check_out(options.out)
        report = measure_links(options, words[cut + 1 :])
        text = json.dumps(report, indent=2, allow_nan=False)
        if options.out:
            write_out(options.out, text + "\n")
    except (ConfigError, OSError) as error:
        print(f"ds-vertical limits --links: {error}", file=sys.stderr)
        return _BAD_INPUT
    print(text if options.json else "\n".join(_lines(report, options.out)))
    return 0


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="ds-vertical limits", description=__doc__, epilog=_EXAMPLE, formatter_class=form)
    parser.add_argument("--links", action="store_true", required=True, help="measure the links between ranks, and nothing else")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--hostfile", type=Path, help="DeepSpeed's: a line `HOST slots=N` for each host")
    where.add_argument("--num-ranks", type=int, help="measure this many ranks of this host")
    parser.add_argument("--size-mb", type=int, default=64, help="MB of a unit that is sent (default 64)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="of this many the fastest counts for rates, the median for cores and while ranks compute (default 5)",
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--no-keep", action="store_true", help="do not keep the rates in the cache of rank 0's user")
    parser.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    return parser


def measure_links(options: argparse.Namespace, launcher_words: Sequence[str] = ()) -> JsonObject:
    """The report. Raises ConfigError for options that make no sense, hosts that cannot be used, and ranks that fail."""
    for name in ("size_mb", "rounds", "num_ranks"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: write 1 or more")
    if options.hostfile is not None and not options.hostfile.is_file():
        raise ConfigError(f"--hostfile {options.hostfile}: no such file; write one with a line `HOST slots=N` for each host")
    found = _measured(_command(options, launcher_words))
    if not found["links"]:
        raise ConfigError("one rank has no links; write --num-ranks 2 or more, or a hostfile with several slots")
    return found | {
        "settings": {"size_mb": options.size_mb, "rounds": options.rounds},
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "facts": describe_machine(),
        "versions": versions(),
    }


def _command(options: argparse.Namespace, launcher_words: Sequence[str]) -> list[str]:
    hosts = ["--hostfile", str(options.hostfile)] if options.num_ranks is None else local_options(options.num_ranks)
    counts = ["--size-mb", str(options.size_mb), "--rounds", str(options.rounds), *["--no-keep"] * options.no_keep]
    return [sys.executable, "-m", "deepspeed.launcher.runner", *hosts, *launcher_words, "--module", _WORKER, *counts]


def _measured(command: Sequence[str]) -> JsonObject:
    """What rank 0 says. Raises ConfigError where it says nothing, or why the hosts cannot be used."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = os.environ | {"DS_ACCELERATOR": accelerator(), "PATH": path}
    run = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = run.stdout.decode(errors="replace").splitlines()
    refused = worker_lines.after(lines, worker_lines.REFUSED)
    if refused is not None:
        raise ConfigError(refused)
    result = worker_lines.after(lines, worker_lines.RESULT)
    if result is None:
        shown = "\n".join(f"    {line}" for line in lines[-_LINES_SHOWN:])
        raise ConfigError(
            f"the ranks ended with status {run.returncode} and without a result; the end of their output:\n{shown}"
        )
    return json.loads(result)


def _lines(report: JsonObject, out: Path | None) -> list[str]:
    """For the terminal."""
    links, hosts, pair = report["links"], report["hosts"], report["pair"]
    shown = [f"{len(hosts)} host(s) with {report['ranks_per_host']} rank(s) each: {', '.join(hosts)}"]
    what = {
        "pair": "into a rank, from its pair's other",
        "local": "into a rank, from its host's others",
        "cross": "into a host, from the others",
    }
    for name, meaning in what.items():
        if f"{name}_bytes_per_s" in (measured := links | pair):
            rate, latency = measured[f"{name}_bytes_per_s"], measured[f"{name}_latency_s"]
            shown.append(f"{meaning:36}{rate * 1e-9:10.3f} GB/s {latency * 1e3:10.3f} ms")
        if f"{name}_beside_bytes_per_s" in links:
            shown.append(f"{'  while the ranks compute':36}{links[f'{name}_beside_bytes_per_s'] * 1e-9:10.3f} GB/s")
    if pair and "pair_ranks" not in links:
        shown.append("a pair has no link of its own: its rate is less than 1.3 times that of its host, and is not counted")
    if "core_s_per_byte" in links:
        shown.append(f"{'of a core, for what a rank receives':36}{links['core_s_per_byte'] * 1e9:10.3f} s/GB")
        each = links["one_level_core_s_per_byte"] * 1e9
        shown.append(f"{'of a core, from all ranks at once':36}{each:10.3f} s/GB")
        shown.append(f"{'of a core, for what a rank rounds':36}{links['round_core_s_per_element'] * 1e9:10.3f} s/G elements")
    if "memory_core_s_per_byte" in links:
        each = links["memory_core_s_per_byte"] * 1e9
        shown.append(f"{'of a core, in memory of its host':36}{each:10.3f} s/GB")
    if "kept" in report:
        shown.append(f"kept, for the bound of runs on them, on {hosts[0]}: {report['kept']}")
    return shown + ([f"written: {out}"] if out else [])
