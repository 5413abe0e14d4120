"""Condense pytest's JUnit report into the JSON that is committed: date, commit, machine, counts, duration, failures.

Usage: python scripts/record_tests.py JUNIT.xml RESULT.json COMMAND
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import portable  # noqa: E402


def git(*arguments: str) -> str:
    """What git prints; empty where it fails."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()


def machine() -> dict[str, object]:
    """What the tests ran on, with the versions of torch and DeepSpeed."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "deepspeed": importlib.metadata.version("deepspeed"),
    }


def condense(junit: Path) -> dict[str, object]:
    """Counts over all suites of the report; a test that failed or stopped with an error counts as failed."""
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))
    total, bad, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites for name in names)
        for names in (["tests"], ["failures", "errors"], ["skipped"])
    )
    failures = [
        f"{case.get('classname')}::{case.get('name')}"
        for suite in suites
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    seconds = sum(float(suite.get("time", 0)) for suite in suites)
    return {
        "passed": total - bad - skipped,
        "failed": bad,
        "skipped": skipped,
        "duration_s": round(seconds, 1),
        "failures": failures,
    }


def main() -> int:
    """Writes the record of a report, as the module says. Returns 0."""
    junit, result = map(Path, sys.argv[1:3])
    # the file is committed after the run: the commit it names is the one that was tested, "dirty" if there was more
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "command": sys.argv[3],
    }
    portable.write(result, record | condense(junit) | {"machine": machine()}, ROOT / "runs" / "tests", "tests")
    print(f"wrote {result}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
