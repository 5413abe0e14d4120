"""The base of a model with adapters is not trained: it lies on SSD, is read, and costs neither writes nor files of an
optimizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from adapters import lora, lora_config, train
from harness import build_engine, dispose
from moved_bytes import complete_transfers, disk_bytes

from ds_vertical.compat import zero_params

WIDTH, NUM_LAYERS, MATRICES = 768, 2, 7
PAGE = 4096


@pytest.mark.parametrize(("rank", "on_ssd"), [(8, False), (128, True)])
def test_a_frozen_base_costs_no_writes_and_no_optimizer_files(tmp_path: Path, rank: int, on_ssd: bool) -> None:
    """Of small adapters nothing goes to SSD; of larger ones their masters and moments."""
    state_bytes = 12 * NUM_LAYERS * 4 * rank * WIDTH if on_ssd else 0
    base_bytes = 2 * NUM_LAYERS * MATRICES * WIDTH**2
    engine, model = build_engine(lora_config(tmp_path, clip=0.0), partial(lora, rank), vertical=True, under_zero_init=False)
    try:
        of_base = {zero_params.swap_file(param).path for param in model.parameters() if zero_params.is_on_ssd(param)}
        assert len(of_base) == NUM_LAYERS * MATRICES

        def other_files() -> dict[Path, int]:
            return {path: path.stat().st_size for path in tmp_path.rglob("*.swp") if str(path) not in map(str, of_base)}

        files = other_files()
        assert sum(files.values()) == pytest.approx(2 * state_bytes, rel=0.01)  # two generations
        train(engine, range(2))
        complete_transfers(engine)
        read, written = disk_bytes("read"), disk_bytes("write")
        train(engine, range(2, 3))
        complete_transfers(engine)
        assert disk_bytes("write") - written == pytest.approx(state_bytes, rel=0.01, abs=16 * PAGE)
        assert disk_bytes("read") - read >= base_bytes
        assert other_files() == files
    finally:
        dispose(engine)
