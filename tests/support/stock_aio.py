"""What DeepSpeed's aio makes of writes cut short and of a truncated file: what tests/upstream/test_patches.py runs as a process
of its own, because stock aborts it.

    python tests/support/stock_aio.py FOLDER [--build FOLDER]

One JSON object per case on standard output, written before the next case starts. `--build` compiles async_io there,
from the sources of the DeepSpeed that is first on PYTHONPATH, instead of taking the finished one from the op cache.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from ds_vertical.compat.ops import cache

MIB = 1 << 20
BLOCK_BYTES = MIB // 2
TENSOR_BYTES = 2 * MIB


def load_aio(build_folder: Path | None) -> Any:
    cache.activate()
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder

    if build_folder is not None:
        PinMemoryBuilder().load(verbose=False)  # not patched, so from the cache
        build_folder.mkdir(exist_ok=True)
        os.environ["TORCH_EXTENSIONS_DIR"] = str(build_folder)
    accelerator: Any = get_accelerator()
    return accelerator.create_op_builder("AsyncIOBuilder").load(verbose=False)


def new_handle(aio: Any, single_submit: bool = False, overlap_events: bool = True) -> Any:
    # a depth of 2, so that blocks queue up and control blocks are used again
    return aio.aio_handle(BLOCK_BYTES, 2, single_submit, overlap_events, 1)


def locked_tensor(handle: Any, num_bytes: int = TENSOR_BYTES) -> torch.Tensor:
    tensor = handle.new_cpu_locked_tensor(num_bytes, torch.empty(0, dtype=torch.uint8))
    return tensor.copy_(torch.arange(num_bytes, dtype=torch.int32).remainder(251))


def outcome(handle: Any, submitted: int) -> int | str:
    """What `wait` answered; "refused" if there is nothing to wait for."""
    if submitted != 0:
        return "refused"
    try:
        return handle.wait()
    except RuntimeError as error:
        return str(error)


def report(case: str, **facts: Any) -> None:
    print(json.dumps({"case": case, **facts}), flush=True)


def write_limited(aio: Any, file: Path, limit_bytes: int, **modes: bool) -> dict[str, Any]:
    """Write TENSOR_BYTES where files may have `limit_bytes` only (a full disk needs no root this way)."""
    handle = new_handle(aio, **modes)
    tensor = locked_tensor(handle)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))  # Python ignores the signal, SIGXFSZ
    try:
        waited = outcome(handle, handle.async_pwrite(tensor, str(file), 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    again = outcome(handle, handle.async_pwrite(tensor, f"{file}.again", 0))
    return {"waited": waited, "file_bytes": file.stat().st_size, "again": again, **modes}


def round_trip(aio: Any, file: Path, **modes: bool) -> dict[str, Any]:
    """A healthy write and read whose last block is a small one."""
    handle = new_handle(aio, **modes)
    tensor = locked_tensor(handle, TENSOR_BYTES + BLOCK_BYTES + 4096)
    written = outcome(handle, handle.async_pwrite(tensor, str(file), 0))
    back = torch.zeros_like(locked_tensor(handle, tensor.numel()))
    read = outcome(handle, handle.async_pread(back, str(file), 0))
    return {"written": written, "read": read, "equal": torch.equal(tensor, back), **modes}


def read_truncated(aio: Any, whole: Path, short: Path) -> dict[str, Any]:
    """Two reads on one handle; the second file is shorter than its buffer. The first is never waited for."""
    handle = new_handle(aio)
    tensor, other = locked_tensor(handle), locked_tensor(handle)
    submitted = [handle.async_pread(tensor, str(whole), 0), handle.async_pread(other, str(short), 0)]
    del handle
    gc.collect()
    return {"submitted": submitted}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--build", type=Path)
    args = parser.parse_args()
    aio = load_aio(args.build)
    for index, (single, overlap) in enumerate(itertools.product((False, True), repeat=2)):
        modes = {"single_submit": single, "overlap_events": overlap}
        report("healthy", **round_trip(aio, args.folder / f"healthy{index}", **modes))
        # the last block is cut in the middle; the last two blocks find no room at all
        report("short", **write_limited(aio, args.folder / f"short{index}", TENSOR_BYTES - BLOCK_BYTES // 2, **modes))
        report("full", **write_limited(aio, args.folder / f"full{index}", TENSOR_BYTES - 2 * BLOCK_BYTES, **modes))
    report("truncated", **read_truncated(aio, args.folder / "short0.again", args.folder / "full0"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
