"""Environment of every test: the CPU where there is no GPU, the op cache, no downloads, no gpu tests without a GPU, no browser
tests without a browser."""

from __future__ import annotations

import os
import shutil
import sys

import browser
import pytest

from ds_vertical import opcache

HAS_GPU = shutil.which("nvidia-smi") is not None
ABSENT = [marker for marker, present in (("gpu", HAS_GPU), ("browser", browser.find() is not None)) if not present]
if not HAS_GPU:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_VERTICAL_LIMITS", "")  # what a null means must not depend on what was measured here
# before anything imports DeepSpeed, and inherited by the processes that tests start
opcache.set_environment()


# The modules with a fixture of a minute: not last, when idle workers would take parts of them and each make that fixture.
FIRST = {"test_ranks.py"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in FIRST)
    without = [item for item in items if any(item.get_closest_marker(marker) for marker in ABSENT)]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]


def pytest_runtest_setup(item: pytest.Item) -> None:
    # tests that use DeepSpeed without ds_vertical must not compile ops of their own either
    if "deepspeed" in sys.modules:
        opcache.activate()
