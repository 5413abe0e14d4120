"""Runs DeepSpeed's own tests of what we touch against stock and against our engine, and writes both outcomes side by side.

    python tests/upstream/judge.py --deepspeed /path/to/DeepSpeed --out benchmarks/judges.json

`--deepspeed`: a checkout, or a git directory, of https://github.com/deepspeedai/DeepSpeed; nothing is changed there. How its
tests meet our engine: `judged.py`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import portable  # noqa: E402

ARMS = ("stock", "vertical")
_ZERO, _V1 = "unit/runtime/zero", "unit/v1/zero"
SELECTED = (
    f"{_ZERO}/test_nvme_checkpointing.py",
    f"{_ZERO}/test_zero_tensor_fragment.py",
    f"{_V1}/test_zero.py::TestZeroUnbalancedGradients",
    f"{_V1}/test_zero.py::TestZero3RepeatForwardLoop",
    f"{_V1}/test_zero.py::TestZeroAdamOptimizerStepCount",
    f"{_V1}/test_zero.py::TestZero3SwitchModes",
    f"{_V1}/test_zero_user_backward.py::TestZeroUserBackwardBasic",
    f"{_V1}/test_zero_user_backward.py::TestZeroUserBackwardGradAccumulation::test_grad_accumulation",
)


def main() -> None:
    """Runs both arms and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", type=Path, required=True, help="checkout or git directory of DeepSpeed")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--only", nargs="+", default=SELECTED, metavar="TEST", help="below tests/, as pytest names them")
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ds_vertical.judge.") as folder:
        tests = Path(folder, "tests")
        commit = copy_tests(options.deepspeed, tests)
        with ThreadPoolExecutor() as pool:  # side by side
            found = pool.map(lambda arm: run(arm, tests, list(options.only)), options.arms)
            outcomes = dict(zip(options.arms, found, strict=True))
    found = {"date": datetime.date.today().isoformat(), "deepspeed": commit, "tests": together(outcomes)}
    print("\n".join(table(found["tests"])))
    if options.out:
        portable.write(options.out, found, ROOT / "runs" / "judge", "judge")


def copy_tests(source: Path, target: Path) -> str:
    """A copy of DeepSpeed's tests that meets our engine; the commit they are of."""
    git = ["git", f"--git-dir={source if (source / 'HEAD').is_file() else source / '.git'}"]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    archive = target.parent / "tests.tar"
    subprocess.run([*git, "archive", "-o", str(archive), "HEAD", "tests"], check=True)
    shutil.unpack_archive(archive, target.parent, filter="data")
    with (target / "unit" / "__init__.py").open("a") as file:
        file.write("\nimport judged\n\njudged.install()\n")
    return commit


def run(arm: str, tests: Path, selected: list[str]) -> dict[str, tuple[str, str]]:
    """{test: (outcome, first line of why)} of one arm."""
    report = tests / f"{arm}.xml"
    paths = [str(ROOT), str(HERE), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"DS_VERTICAL_JUDGED": arm, "LOCAL_SIZE": "2", "DS_UNITTEST_TIMEOUT": "180", "OMP_NUM_THREADS": "1"}
    settings["PYTEST_XDIST_WORKER"] = f"gw{ARMS.index(arm)}"  # which gives each arm ports of its own
    settings |= {"PYTHONPATH": os.pathsep.join(paths), "DS_DISABLE_REUSE_DIST_ENV": "1", "TMPDIR": str(tests.parent)}
    with (tests / f"{arm}.log").open("w") as log:
        command = _command(report)
        subprocess.run([*command, *selected], cwd=tests, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT)
    return read_report(report)


def _command(report: Path) -> list[str]:
    plugins = ["-p", "no:cacheprovider", "-p", "judged"]
    return [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", *plugins, f"--junitxml={report}"]


def read_report(report: Path) -> dict[str, tuple[str, str]]:
    """What pytest has written; nothing where it ended without a word (its tests end it where one hangs)."""
    found: dict[str, tuple[str, str]] = {}
    if not report.exists():
        return found
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"
        outcome, why = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = {"failure": "failed", "error": "failed"}.get(child.tag, child.tag)
                why = ((child.get("message") or "").strip().splitlines() or [""])[0][:300]
        found[name] = outcome, why
    return found


def together(outcomes: dict[str, dict[str, tuple[str, str]]]) -> list[dict[str, Any]]:
    """Both arms' outcomes by test."""
    names = dict.fromkeys(name for found in outcomes.values() for name in found)
    rows = []
    for name in names:
        each = {arm: found.get(name, ("missing", "")) for arm, found in outcomes.items()}
        rows.append({"test": name} | {arm: {"outcome": outcome, "why": why} for arm, (outcome, why) in each.items()})
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    arms = [arm for arm in ARMS if any(arm in row for row in rows)]
    lines = [f"| test | {' | '.join(arms)} |", "|---" * (len(arms) + 1) + "|"]
    for row in rows:
        cells = [" ".join(filter(None, (row[arm]["outcome"], row[arm]["why"]))) for arm in arms]
        lines.append(f"| {row['test']} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
