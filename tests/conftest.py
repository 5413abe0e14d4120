"""Environment of every test: the CPU, the op cache, no downloads; gpu and browser tests only where there is a GPU, a browser.

DeepSpeed takes the CPU on a machine with a GPU, too: the tests speak of what is true there (one memory, one rank per process
over gloo, kernels without atomics). A gpu test that needs an engine starts a process of its own with DS_ACCELERATOR=cuda.
"""

from __future__ import annotations

import os
import sys

import browser
import pytest
import torch

from ds_vertical.compat.ops import cache

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # is_available asks the driver, and sets CUDA up in no process
HAS_GPU = torch.cuda.is_available()
ABSENT = [marker for marker, present in (("gpu", HAS_GPU), ("browser", browser.find() is not None)) if not present]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_VERTICAL_LIMITS", "")  # what a null means must not depend on what was measured here
# before anything imports DeepSpeed, and inherited by the processes that tests start
cache.set_environment()


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
        cache.activate()
