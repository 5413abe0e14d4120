"""Files spread over several SSDs: the bits of stock with one, in training, in stock's own calls, saved, loaded and exported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_identical, base_config, differing, run_arm, running, small_buffers
from models import MixerModel, token_batches

from ds_vertical.io.runs import run_dir, stripes

BUILD = partial(MixerModel, 3)


def on_two(folder: Path, section: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """A configuration whose files are spread over two folders."""
    paths = {"nvme_paths": [str(folder / "ssd0"), str(folder / "ssd1")]}
    return small_buffers(base_config(folder / "ssd0", section=(section or {}) | paths, **options))


def test_two_ssds_give_stocks_bits_and_every_file_lies_on_both(tmp_path: Path) -> None:
    config = on_two(tmp_path, {"gradient_host_share": 0.5, "activations": {"device": "ssd"}, "verify": True}, dtype="fp32")
    batches = token_batches(3, 3)
    found: list[Path] = []

    def look(engine: Any, step: int) -> None:
        found[:] = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]

    stock = run_arm(config, BUILD, batches, vertical=False)
    vertical = run_arm(config, BUILD, batches, vertical=True, between=look)
    assert_identical(stock, vertical)
    kinds = {"param.tensor": "*_param.tensor.swp", "exp_avg": "exp_avg-*", "gradients": "gradients.swp", "activations": "rank0.bin"}
    for kind, pattern in kinds.items():
        first, second = (sorted(p.relative_to(tmp_path / ssd) for p in found if p.match(f"{pattern}.{ssd}") and p.is_relative_to(tmp_path / ssd)) for ssd in ("ssd0", "ssd1"))
        assert first and [p.with_suffix("") for p in first] == [p.with_suffix("") for p in second], kind
    assert not [path for path in found if path.suffix not in (".ssd0", ".ssd1")], found
