"""Where things are in the repository, for tests, whichever folder of tests/ they are in."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent  # what the processes that tests start need on their path
TESTS = SUPPORT.parent
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
RECORDED = TESTS / "recorded"
