"""The late device: torch's device "late", which does nothing before somebody waits for it. For tests of what runs on a GPU.

Its memory is its own, its kernels are the processor's (so they have its bits), and it catches what a fast GPU hides:

- a copy to or from page-locked memory happens when it is waited for; until then its target holds poison (0xFF, a NaN);
- a race: two uses of memory on two streams, one of them a write, that no wait orders; it raises, whichever came first;
- memory that is freed while another stream may use it, neither waited for nor recorded (`record_stream`);
- memory never written: a fresh tensor holds poison;
- each wait of the host, by the line that waits: `waits`. A copy of pageable memory is one, "async" or not.

It does not catch what real hardware decides: kernels' own choices, rates, fragmentation. It may be loaded once in a process,
and is torch's accelerator from then on: `late_worker.py` is run in a process of its own.

Late kernels are those of `late_csrc`, compiled at first use as this package's ops are, and kept where those are.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_vertical.compat.ops import cache, load

SOURCES = Path(__file__).parent / "late_csrc"
NAME = "late"


@dataclass(frozen=True)
class LateOp(load.OwnOp):
    """The device's library, whose name ends in a hash of all its sources."""

    @property
    def build_name(self) -> str:
        text = b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir())) + " ".join(self.flags).encode()
        return f"{self.name}_{hashlib.sha256(text).hexdigest()[:8]}"


LATE_OP = LateOp(
    "late_device",
    str(SOURCES / "world.cpp"),
    tuple(str(SOURCES / f"{name}.cpp") for name in ("backend", "kernels", "binding")),
    "CPUAdamBuilder",
    ("-O1", "-g0"),
)


@functools.cache
def library() -> Any:
    """The compiled device, not yet torch's."""
    ready = cache.ready_library(LATE_OP.build_name)
    if ready is None:
        cache.activate()
        return LATE_OP.builder().load(verbose=False)
    loader = importlib.machinery.ExtensionFileLoader(LATE_OP.build_name, str(ready))
    spec = importlib.util.spec_from_file_location(LATE_OP.build_name, ready, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@functools.cache
def use() -> Any:
    """Make it torch's accelerator in this process. Returns `library()`."""
    found = library()
    found.register()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    return found


def _module() -> types.ModuleType:
    """`torch.late`, with what torch and DeepSpeed call of `torch.cuda`."""
    made: Any = types.ModuleType(f"torch.{NAME}")
    made.is_available = made.is_initialized = lambda: True
    made.is_bf16_supported = lambda *_: True
    made._is_in_bad_fork = lambda: False
    made.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    made.device_count = lambda: library().num_devices
    made.current_device = torch.accelerator.current_device_index
    made.set_device = torch.accelerator.set_device_index
    made.synchronize = torch.accelerator.synchronize
    made.current_stream = torch.accelerator.current_stream
    made.set_stream = torch.accelerator.set_stream
    made.Stream, made.Event = torch.Stream, torch.Event
    made.stream = lambda stream: stream  # a context manager by itself
    made.get_device_name = lambda _=0: "late device"
    made.memory_allocated = torch.accelerator.memory_allocated
    made.max_memory_allocated = torch.accelerator.max_memory_allocated
    made.memory_reserved = torch.accelerator.memory_allocated  # it holds none for later tensors
    made.mem_get_info = torch.accelerator.get_memory_info
    made.get_rng_state = lambda device=None: generator(device).get_state()
    made.set_rng_state = lambda state, device=None: generator(device).set_state(state)
    made.manual_seed = made.manual_seed_all = lambda seed: generator().manual_seed(seed)
    made.initial_seed = lambda: generator().initial_seed()
    return made


def generator(device: int | torch.device | str | None = None) -> torch.Generator:
    """The device's own: it is the processor's, with a state of its own."""
    index = device if isinstance(device, int) else (None if device is None else torch.device(device).index)
    return library().default_generator(torch.accelerator.current_device_index() if index is None else index)


# ---- what is counted


@dataclass(frozen=True)
class Wait:
    """A kind of wait of the host: what it has waited for (event, stream, device, item, copy, a kernel), and where."""

    what: str
    site: str


_PASSED_OVER = (str(Path(torch.__file__).parent), str(Path(__file__)), str(Path(contextlib.__file__)))


def _site() -> str:
    """The innermost line of Python outside of torch, as file:function; "a thread without Python" on torch's own."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        frame = frame.f_back
    if frame is None:
        return "a thread without Python"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"


@contextlib.contextmanager
def waits() -> Iterator[Counter[Wait]]:
    """Counts the waits of the block that had something to wait for. Not within another."""
    found: Counter[Wait] = Counter()

    def tell(what: str, _: int) -> None:
        found[Wait(what, _site())] += 1

    library().set_on_wait(tell)
    try:
        yield found
    finally:
        library().set_on_wait(None)


@contextlib.contextmanager
def noting() -> Iterator[list[str]]:
    """Within the block what is wrong does not raise; the list has it afterwards."""
    found: list[str] = []
    library().take_violations()
    library().set_raises(False)
    try:
        yield found
    finally:
        found += library().take_violations()
        library().set_raises(True)
