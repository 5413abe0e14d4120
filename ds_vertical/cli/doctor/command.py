"""`ds-vertical doctor`: what on this machine and in a DeepSpeed JSON would keep a run from working, with what mends it."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from ds_vertical.cli.doctor.check import CheckResult, Target
from ds_vertical.cli.doctor.worker import LIMIT_S, Check, run_checks

_ERRORS_FOUND: Final = 1
_EPILOG: Final = """example:
  ds-vertical doctor --config ds_config.json --nvme-path /mnt/nvme

Exit status: 0 where nothing was found that keeps a run from working, 1 with an error among the findings, 2 for bad usage.
Nothing is compiled, and nothing is left on the disk."""

# A further check is a further row: it takes a Target and yields CheckResults. In order: those before `internals` import no
# DeepSpeed through `compat`, which clears stale compile locks.
CHECKS: Final = (
    Check("versions", "ds_vertical.cli.doctor.installation.supported_versions"),
    Check("environment", "ds_vertical.cli.doctor.installation.environment"),
    Check("ninja", "ds_vertical.cli.doctor.installation.ninja"),
    Check("compile locks", "ds_vertical.cli.doctor.installation.compile_locks"),
    Check("memory", "ds_vertical.cli.doctor.hardware.host_memory"),
    Check("aio events", "ds_vertical.cli.doctor.hardware.aio_events"),
    Check("other work", "ds_vertical.cli.doctor.hardware.other_work"),
    Check("config", "ds_vertical.cli.doctor.config_checks.refusals"),
    Check("launch", "ds_vertical.cli.doctor.config_checks.launch"),
    Check("keys", "ds_vertical.cli.doctor.config_checks.near_misses"),
    Check("auto", "ds_vertical.cli.doctor.config_checks.autos"),
    Check("traps", "ds_vertical.cli.doctor.stock_traps.find_traps"),
    Check("ssd", "ds_vertical.cli.doctor.ssd_path.existence"),
    Check("file system", "ds_vertical.cli.doctor.ssd_path.file_system"),
    Check("several SSDs", "ds_vertical.cli.doctor.ssd_path.separate_disks"),
    Check("free space", "ds_vertical.cli.doctor.ssd_path.space"),
    Check("other runs", "ds_vertical.cli.doctor.ssd_path.runs"),
    Check("device", "ds_vertical.cli.doctor.hardware.device"),
    Check("processor", "ds_vertical.cli.doctor.hardware.processor"),
    Check("internals", "ds_vertical.cli.doctor.installation.internals", "pip install --force-reinstall ds-vertical"),
    Check("reader", "ds_vertical.cli.doctor.config_checks.deepspeed_reader"),
    Check("optimizer", "ds_vertical.cli.doctor.config_checks.optimizer"),
    Check("precision", "ds_vertical.cli.doctor.config_checks.precision"),
    Check("ops", "ds_vertical.cli.doctor.installation.ops", "ds-vertical build-ops --force"),
    Check("page-locked", "ds_vertical.cli.doctor.hardware.page_locked", "ulimit -l unlimited"),
    Check("huge pages", "ds_vertical.cli.doctor.hardware.huge_pages"),
    Check(
        "direct I/O",
        "ds_vertical.cli.doctor.ssd_path.round_trip",
        "mount | grep nvme  # is the disk still there, and its server?",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Examines, prints a line per finding as it comes, or one JSON object. Returns 1 where one is an error, else 0."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.config is not None and not options.config.is_file():
        parser.error(f"--config {options.config}: no such file; name a DeepSpeed JSON")
    if options.limit <= 0:
        parser.error(f"--limit {options.limit:g}: write a number of seconds above 0")
    found = []
    for finding in run_checks(CHECKS, Target(options.config, options.nvme_path, options.arm), options.limit):
        found.append(finding)
        if not options.json:
            print("\n".join(_lines(finding)), flush=True)
    counts = {severity: Counter(finding.severity for finding in found)[severity] for severity in ("error", "warning", "ok")}
    if options.json:
        print(json.dumps({"counts": counts, "findings": [asdict(finding) for finding in found]}, indent=2))
    else:
        print(", ".join(f"{count} {severity}" for severity, count in counts.items()))
    return _ERRORS_FOUND if counts["error"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds-vertical doctor",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, help="DeepSpeed JSON to examine")
    parser.add_argument("--nvme-path", type=Path, help="folder on the SSD to examine (default: those in the JSON)")
    parser.add_argument(
        "--arm", choices=("stock", "vertical", "both"), help='arm that the JSON is for; "both" for `ab` (default: as it says)'
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help=f"seconds that a check may be silent (default {LIMIT_S:g})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _lines(finding: CheckResult) -> Iterator[str]:
    yield f"{finding.severity:8}{finding.check:14}{finding.found}"
    if finding.remedy:
        yield f"{'':22}-> {finding.remedy}"


if __name__ == "__main__":
    sys.exit(main())
