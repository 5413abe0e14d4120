#!/usr/bin/env bash
# Set up, then ruff, pyright and the tests. Without arguments: everything but the slow tests, under 10 minutes.
#   bash scripts/test.sh [--all] [PYTEST ARGUMENTS ...]
# --all runs the slow tests too and writes the result to benchmarks/tests_all.json. DS_VERTICAL_TEST_WORKERS: processes (3), of
# OMP_NUM_THREADS (1) threads each. Idle processes take tests from the others' ends, so that most modules stay in one process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Where Python may keep no bytecode, as in some containers, each of hundreds of processes compiles the package anew.
export PYTHONDONTWRITEBYTECODE=
bash scripts/setup.sh

marks=()
report=
if [ "${1:-}" = --all ]; then
    shift
    report=$(mktemp)
    trap 'rm -f "$report"' EXIT
else
    marks+=("not slow")
fi
# The tests' DeepSpeed computes on the CPU; those marked gpu start processes for CUDA, and are left out where torch sees none.
export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"
if nvidia-smi -L >/dev/null 2>&1; then
    .venv/bin/python -m ds_vertical.cli.main build-ops # setup.sh has built those for CUDA
fi
[ -n "$(command -v chromium chromium-browser google-chrome)" ] || marks+=("not browser")
expression=$(printf '%s and ' "${marks[@]}")

# Pyright takes one core. On another one the tests are compiled once, which each of their processes would do at its start.
.venv/bin/python -m pytest --collect-only -qq -p no:cacheprovider >/dev/null 2>&1 &
compiling=$!

# one failing check does not hide what the next would say
failed=()
.venv/bin/ruff check || failed+=(ruff)
.venv/bin/ruff format --check || failed+=(format)
.venv/bin/pyright || failed+=(pyright)
wait "$compiling" || true # what is wrong with them is told below
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
.venv/bin/python -m pytest -n "${DS_VERTICAL_TEST_WORKERS:-3}" --dist worksteal -m "${expression% and }" --durations=15 ${report:+--junitxml="$report"} "$@" || failed+=(pytest)

if [ -n "$report" ]; then
    .venv/bin/python scripts/record_tests.py "$report" benchmarks/tests_all.json \
        "bash scripts/test.sh --all${*:+ $*}" >&2
fi
if [ "${#failed[@]}" -gt 0 ]; then
    echo "scripts/test.sh: failed: ${failed[*]}" >&2
    exit 1
fi
