"""A cache for the reports of `ds-vertical limits` of a test's own, in which nothing has to be compiled."""

from __future__ import annotations

from pathlib import Path

from ds_vertical.compat.ops.cache import cache_root, jit_folder


def own_cache(folder: Path) -> dict[str, str]:
    """The environment's variables for a cache at `folder`, which is made; its ops are those of this process's cache."""
    root, jit = cache_root(), jit_folder()
    folder.mkdir()
    (folder / "ops").symlink_to(root, target_is_directory=True)
    return {"DS_VERTICAL_CACHE": str(folder), "TORCH_EXTENSIONS_DIR": str(folder / "ops" / jit.relative_to(root))}
