"""`ds-vertical build-ops`: compile the ops ahead of the first run."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_vertical.compat.ops import cache, load


def main(argv: list[str] | None = None) -> int:
    """`ds-vertical build-ops`: compile what is missing; DeepSpeed and torch are imported only where something is."""
    description = "Compile the ops into this user's cache, once per machine."
    parser = argparse.ArgumentParser(prog="ds-vertical build-ops", description=description)
    parser.add_argument("--force", action="store_true", help="throw this machine's ops away and compile them again")
    force = parser.parse_args(argv).force
    start = time.monotonic()
    cache.set_environment()
    needed = load.needed_ops()
    for name in needed if force else ():
        cache.forget(name)
    extensions = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    own = cache.is_own_folder()
    missing = [name for name in needed if not own or cache.ready_library(name) is None]
    if missing:
        cache.say(f"{len(missing)} of {len(needed)} ops are to be compiled: {', '.join(missing)}")
        cache.activate()
    with_fallback: dict[str, Callable[[], Any]] = {
        load.FREE_ADAM.build_name: load.free_adam,
        load.IDENTITY_NODE.build_name: load.identity_node,
        load.BLOCK_QUANTIZE.build_name: load.block_quantizer,
    }
    loaded = {name: with_fallback.get(name, lambda name=name: needed[name]().load(verbose=False))() for name in missing}
    slow = [name for name, op in loaded.items() if op is None or isinstance(op, load.PiecewiseAdam)]
    if slow:
        print(f"{', '.join(slow)}: not compiled, slower stand-ins work in their place; see above", file=sys.stderr)
        return 1
    print(f"the ops are ready in {cache.cache_folder() if own else extensions} ({time.monotonic() - start:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
