"""The compiled ops of this package: those of DeepSpeed that it uses, and its own over DeepSpeed's shipped sources.

[Note: our own ops] Each is one file in csrc/ that is compiled together with sources from the installed DeepSpeed, if it needs
any, with the flags of DeepSpeed's builder for the same kernel, so that the machine code of the kernel is the same. The name
under which the op is built and cached ends in a hash of our file and flags: an edited source is another op, and clones do not
take turns rebuilding each other's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from ds_vertical.compat.ops import cache
from ds_vertical.errors import ConfigError
from ds_vertical.io.aio import DiskQueue, NativeQueue, Observer
from ds_vertical.io.runs import stripes

if TYPE_CHECKING:
    import torch
    from deepspeed.ops.op_builder.builder import OpBuilder

CSRC = Path(__file__).parent / "csrc"
PIECE_NUMEL = 1 << 20


@dataclass(frozen=True)
class OwnOp:
    """An op of ours: `source` in csrc/, `shipped` sources of DeepSpeed, and `stock`, the builder whose flags it takes, ahead of
    `flags` of its own. `otherwise`: what is said where it cannot be compiled: what stands in and costs, or what to do."""

    name: str
    source: str
    shipped: tuple[str, ...]
    stock: str
    otherwise: str
    flags: tuple[str, ...] = ()

    @property
    def build_name(self) -> str:
        """Name of the compiled library; see [Note: our own ops]."""
        made_of = (CSRC / self.source).read_bytes() + " ".join(self.flags).encode()
        return f"{self.name}_{hashlib.sha256(made_of).hexdigest()[:8]}"

    def builder(self) -> OpBuilder:
        """A DeepSpeed builder of this op."""
        builder: Any = _stock_builder(self.stock)
        builder.name = self.build_name
        builder.sources = lambda: [str(CSRC / self.source), *self.shipped]
        stock_flags = builder.cxx_args
        builder.cxx_args = lambda: [*stock_flags(), *self.flags]
        return builder

    def load(self) -> ModuleType:
        """The compiled module. Raises RuntimeError, with `otherwise`, where it cannot be compiled; ConfigError."""
        cache.activate()
        builder: Any = self.builder()  # whose `load` has no types of its own
        try:
            module: ModuleType = builder.load(verbose=False)
        except ConfigError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"{CSRC / self.source} could not be compiled or loaded ({type(error).__name__}:"
                f" {str(error).partition(chr(10))[0]}); {self.otherwise}; the compiler's words are above,"
                " `ds-vertical build-ops` tries again"
            ) from error
        return module

    def load_or_warn(self) -> ModuleType | None:
        """As `load`. None, and a RuntimeWarning, where it cannot be compiled. Raises ConfigError."""
        try:
            return self.load()
        except RuntimeError as error:
            warnings.warn(f"ds_vertical: {error}", RuntimeWarning, stacklevel=3)
            return None


FREE_ADAM = OwnOp(
    "free_adam",
    "free_adam.cpp",
    ("csrc/adam/cpu_adam_impl.cpp",),
    "CPUAdamBuilder",
    f"DeepSpeed's cpu_adam stands in, in pieces of {PIECE_NUMEL} elements: same result, but each piece holds Python's lock",
)
CHECKED_AIO = OwnOp(
    "checked_aio",
    "checked_aio.cpp",
    ("csrc/aio/common/deepspeed_aio_types.cpp", "csrc/aio/common/deepspeed_aio_utils.cpp"),
    "AsyncIOBuilder",
    "`ds-vertical doctor` says what is missing, such as libaio's headers (Debian: libaio-dev)",
)
IDENTITY_NODE = OwnOp(
    "joint",  # under this name in the caches of users
    "joint.cpp",
    (),
    "CPUAdamBuilder",
    "nodes written in Python stand in: same result, some percent slower",
)
HOST_STATE = OwnOp(
    "host_state",
    "host_state.cpp",
    (),
    "CPUAdamBuilder",
    "Python captures what torch keeps per thread: same result, a few percent slower",
)
BLOCK_QUANTIZE = OwnOp(
    "block_quantize",
    "block_quantize.cpp",
    (),
    "CPUAdamBuilder",
    "torch stands in: same result, several times slower and with more memory",
    ("-ffp-contract=off",),  # a fused multiply-add would round once where the same code in torch rounds twice
)
MASTER_HALVES = OwnOp(
    "master_halves", "master_halves.cpp", (), "CPUAdamBuilder", "torch stands in: same result, several times slower"
)
OWN_OPS = (FREE_ADAM, CHECKED_AIO, IDENTITY_NODE, HOST_STATE, BLOCK_QUANTIZE, MASTER_HALVES)


def _stock_builder(class_name: str) -> OpBuilder:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder

    accelerator = get_accelerator()
    assert accelerator is not None  # DeepSpeed falls back to the CPU
    made: Any = PinMemoryBuilder() if class_name == "PinMemoryBuilder" else accelerator.create_op_builder(class_name)
    return made


LINKED_BY_OTHERS = "pin_memory"  # which async_io, and our op over its sources, load ahead of themselves


def needed_ops() -> dict[str, Callable[[], OpBuilder]]:
    """Ops that this package uses here, library name to builder; LINKED_BY_OTHERS first."""
    stock = {LINKED_BY_OTHERS: "PinMemoryBuilder", "cpu_adam": "CPUAdamBuilder", "async_io": "AsyncIOBuilder"}
    if cache.accelerator_name() == "cpu":
        stock["deepspeed_shm_comm"] = "ShareMemCommBuilder"
    builders: dict[str, Callable[[], OpBuilder]] = {name: functools.partial(_stock_builder, cls) for name, cls in stock.items()}
    return builders | {op.build_name: op.builder for op in OWN_OPS}


def num_files(builder: OpBuilder) -> int:
    """Files that the compile of an op has."""
    sources: Any = builder.sources()
    return len(sources)


# ---- CPU Adam


class AdamModule(Protocol):
    """DeepSpeed's `cpu_adam` functions, and a bound on the threads. `adam_update` lets other Python threads run.

    adam_update(id, step, lr, beta1, beta2, eps, weight_decay, bias_correction, params, grads, exp_avg, exp_avg_sq): the
    tensors are contiguous, in host memory, of one size; gradients have the parameters' dtype, both moments one dtype.
    ValueError otherwise, and for an id that `create_adam` did not make. Updates of one id take turns.
    """

    def create_adam(self, optimizer_id: int, /, *settings: float) -> int:
        """Make the optimizer of an id: lr, beta1, beta2, eps, weight_decay, whether it is AdamW, whether it logs."""
        ...

    def destroy_adam(self, optimizer_id: int, /) -> int:
        """Forget the optimizer of an id."""
        ...

    def adam_update(self, optimizer_id: int, /, *args: float | torch.Tensor) -> int:
        """Take one step in place, of the tensors that come last; see above."""
        ...

    def set_num_threads(self, num_threads: int, /) -> None:
        """OpenMP threads of the updates that the calling thread will make; 0: OpenMP's choice."""
        ...


class PiecewiseAdam:
    """An AdamModule over DeepSpeed's own binding, which holds the interpreter lock: called in pieces of PIECE_NUMEL
    elements, so that the lock is free between two. A multiple of the kernel's vectors: every element is rounded as in
    one call."""

    def __init__(self, stock: AdamModule) -> None:
        self._stock = stock
        self._turns: dict[int, threading.Lock] = {}
        self._limit = threading.local()
        self._openmp = ctypes.CDLL("libgomp.so.1")  # the one that the kernel runs on, loaded already

    def create_adam(self, optimizer_id: int, /, *settings: float) -> int:
        """As `AdamModule`'s."""
        self._turns.setdefault(optimizer_id, threading.Lock())
        return self._stock.create_adam(optimizer_id, *settings)

    def destroy_adam(self, optimizer_id: int, /) -> int:
        """As `AdamModule`'s."""
        self._turns.pop(optimizer_id, None)
        return self._stock.destroy_adam(optimizer_id)

    def set_num_threads(self, num_threads: int, /) -> None:
        """As `AdamModule`'s. Raises ValueError for a negative number."""
        if num_threads < 0:
            raise ValueError("num_threads must be 0 (OpenMP's choice) or more")
        self._limit.num_threads = num_threads

    def adam_update(self, optimizer_id: int, /, *args: float | torch.Tensor) -> int:
        """As `AdamModule`'s, piece by piece. Raises ValueError."""
        settings, tensors = args[:7], _tensors(args[7:])
        turn = self._turns.get(optimizer_id)
        if turn is None:
            raise ValueError(f"there is no CPU Adam optimizer {optimizer_id}")
        flat = [tensor.view(-1) for tensor in tensors]
        with turn:
            for start in range(0, max(1, len(flat[0])), PIECE_NUMEL):
                self._update_piece(optimizer_id, settings, [tensor[start : start + PIECE_NUMEL] for tensor in flat])
        return 0

    def _update_piece(
        self, optimizer_id: int, settings: Sequence[float | torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> None:
        before = self._openmp.omp_get_max_threads()
        limit = getattr(self._limit, "num_threads", 0)
        if limit:
            self._openmp.omp_set_num_threads(limit)
        try:
            self._stock.adam_update(optimizer_id, *settings, *tensors)
        finally:
            self._openmp.omp_set_num_threads(before)


def _tensors(arguments: Sequence[Any]) -> Sequence[torch.Tensor]:
    """The four tensors of an update. Raises ValueError for tensors that CPU Adam does not take."""
    params, grads, exp_avg, exp_avg_sq = arguments
    if any(t.device.type != "cpu" or not t.is_contiguous() or t.numel() != params.numel() for t in arguments):
        raise ValueError("CPU Adam takes four contiguous tensors of one size in host memory")
    if grads.dtype != params.dtype or exp_avg.dtype != exp_avg_sq.dtype:
        raise ValueError("CPU Adam takes gradients in the parameters' dtype, and both moments in one dtype")
    return arguments


@functools.cache
def free_adam() -> AdamModule:
    """CPU Adam that computes outside the interpreter lock, bit for bit DeepSpeed's.

    Where our binding cannot be compiled a RuntimeWarning says so, and DeepSpeed's is used in pieces. Raises what
    DeepSpeed raises where its own op cannot be had either.
    """
    module: Any = FREE_ADAM.load_or_warn()
    if module is None:
        stock: Any = _stock_builder("CPUAdamBuilder").load(verbose=False)
        module = PiecewiseAdam(stock)
    return module


# ---- aio


class AioModule(Protocol):
    """The op of `checked_aio`. `Queue(block_size, queue_depth, single_submit)`: block size in bytes, depth in blocks. Raises
    ValueError for what the kernel does not take."""

    Queue: Callable[..., NativeQueue]


@functools.cache
def checked_aio() -> AioModule:
    """The module of `Queue`, reads and writes past the page cache with every result checked: see `ds_vertical.io.aio`.

    Raises RuntimeError where it cannot be compiled (libaio's headers are missing, as DeepSpeed's own op says then).
    """
    module: Any = CHECKED_AIO.load()
    return module


def new_disk_queue(aio: Mapping[str, Any], observer: Observer | None = None) -> DiskQueue:
    """A queue with the JSON's `aio` settings, whose operations `observer` hears of.

    One thread keeps as many blocks in flight as DeepSpeed's `intra_op_parallelism` threads would; `overlap_events` is
    always on. With several SSDs each has as many blocks in flight.
    """
    depth = aio["queue_depth"] * aio["intra_op_parallelism"]
    natives = [checked_aio().Queue(aio["block_size"], depth, aio["single_submit"]) for _ in range(stripes.most_lanes())]
    queue = DiskQueue(*natives)
    queue.observer = observer
    return queue


# ---- autograd


@functools.cache
def identity_node() -> Callable[[torch.Tensor], torch.Tensor] | None:
    """From a tensor to the same one behind a node of its own in the graph, without the interpreter in forward or backward.

    None where it cannot be compiled, as a RuntimeWarning says: a node written in Python gives the same result, more slowly.
    """
    module = IDENTITY_NODE.load_or_warn()
    return None if module is None else module.joint


# ---- what torch keeps per thread


class StateReader(Protocol):
    """`capture()` gives the state of the calling thread: a `HostPart` of `ds_vertical.model.thread_state`, with the attributes
    of its `HostState`."""

    capture: Callable[[], Any]


@functools.cache
def state_reader() -> Callable[[Sequence[torch.device]], StateReader] | None:
    """What makes a reader for the kinds of some devices. None where it cannot be compiled, as a RuntimeWarning says: Python
    captures the same then, more slowly."""
    module: Any = HOST_STATE.load_or_warn()
    return None if module is None else module.StateReader


# ---- collectives in few bits


class QuantizeModule(Protocol):
    """The kernel of `ds_vertical.distributed.quantize`, which says what it computes. Its calls let other Python threads run. A
    tensor's rows are in host memory, elements of a row neighbours. ValueError for what it does not take."""

    def quantize(self, values: torch.Tensor, packed: torch.Tensor, bits: int, block: int, threads: int, /) -> None:
        """Overwrite rows of bytes with what rows of fp32, bf16 or fp16 are rounded to."""
        ...

    def dequantize(self, packed: torch.Tensor, values: torch.Tensor, bits: int, block: int, threads: int, add: bool, /) -> None:
        """Overwrite rows of values with what rows of bytes stand for, or add that to rows of fp32."""
        ...


@functools.cache
def block_quantizer() -> QuantizeModule | None:
    """The compiled kernel. None where it cannot be compiled, as a RuntimeWarning says: torch gives the same bits then."""
    module: Any = BLOCK_QUANTIZE.load_or_warn()
    return module


# ---- masters in two halves


class HalvesModule(Protocol):
    """The kernel of `ds_vertical.offload.masters.halves`, which says what it computes. Its calls let other Python threads run.
    Tensors are 1-d and contiguous, in host memory. ValueError for what it does not take."""

    def split(
        self, master: torch.Tensor, rounded: Sequence[torch.Tensor], low: torch.Tensor, most: int, threads: int, /
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Overwrite `low`. Returns places and high halves of the exceptions; None where there are more than `most`."""
        ...

    def join(
        self,
        low: torch.Tensor,
        rounded: Sequence[torch.Tensor],
        places: torch.Tensor,
        high: torch.Tensor,
        master: torch.Tensor,
        threads: int,
        /,
    ) -> None:
        """Overwrite `master`."""
        ...


@functools.cache
def master_halves() -> HalvesModule | None:
    """The compiled kernel. None where it cannot be compiled, as a RuntimeWarning says: torch gives the same bits then."""
    module: Any = MASTER_HALVES.load_or_warn()
    return module
