"""A small checkpoint as files, without tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_vertical.engine.checkpoint import manifest
from ds_vertical.engine.checkpoint.manifest import FileRange, RankManifest, SavedFile, TensorEntry
from ds_vertical.io.checksums import checksum, read_pieces

CONTENT = b"0123456789"


def numbers() -> dict[str, Any]:
    """What a run is besides its tensors, as c81cdc9 wrote it."""
    group = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0, "bias_correction": True, "amsgrad": False}
    return {
        "counters": {"global_steps": 7, "global_samples": 14, "micro_steps": 14, "skipped_steps": 0},
        "loss_scaler": {},
        "adam_w_mode": True,
        "groups": [group],
        "powers": {"step": 7, "beta1": 0.9, "beta2": 0.999, "anchor": 1},
        "has_scheduler": False,
        "stream_seed": 7,
    }


def write_checkpoint(folder: Path, tag: str, rank_count: int = 1) -> RankManifest:
    """A small checkpoint; rank 0's manifest."""
    found, first = [], None
    for rank in range(rank_count):
        place = manifest.rank_folder(folder / tag, rank)
        place.mkdir(parents=True)
        (place / "chunk.bin").write_bytes(CONTENT)
        saved = SavedFile(len(CONTENT), tuple(read_pieces(place / "chunk.bin", 2, 8)))
        places = {"weight": (FileRange("chunk.bin", 2, 4), FileRange("chunk.bin", 6, 2))}
        tensors = {"w": TensorEntry((3, 1), "bfloat16", 3, None, 0, places)}
        made = RankManifest(rank, rank_count, {"chunk.bin": saved}, tensors, {"a.b": 0.1}, numbers())
        data = made.to_json()
        (place / manifest.NAME).write_bytes(data)
        found.append((len(data), checksum(data)))
        first = first or made
    (folder / tag / manifest.NAME).write_bytes(manifest.folder_manifest(tag, found))
    assert first is not None
    return first
