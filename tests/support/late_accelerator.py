"""DeepSpeed's accelerator over the late device, and collectives on its memory. See `late_device`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import deepspeed.accelerator
import late_device
import torch
import torch.distributed as dist
from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

BACKEND = "late_gloo"


class LateAccelerator(CPU_Accelerator):
    """As CUDA's where the device works beside the host; DeepSpeed's ops are the processor's."""

    def __init__(self) -> None:
        super().__init__()
        self._name = late_device.NAME
        self._communication_backend_name = BACKEND
        self._compile_backend = "eager"

    def is_synchronized_device(self) -> bool:
        return False

    # ---- the device

    def device_name(self, device_index: int | None = None) -> str:
        return late_device.NAME if device_index is None else f"{late_device.NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.accelerator.device_index(device_index)

    def set_device(self, device_index: int) -> None:
        torch.accelerator.set_device_index(device_index)

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        return torch.accelerator.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        torch.accelerator.synchronize(device_index)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == late_device.NAME

    # ---- random numbers

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        late_device.generator(device_index).set_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return late_device.generator(device_index).get_state()

    def manual_seed(self, seed: int) -> None:
        late_device.generator().manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return late_device.generator().initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return late_device.generator(device_index)

    # ---- streams and events

    @property
    def Stream(self) -> type[torch.Stream]:  # noqa: N802 - DeepSpeed's name
        return torch.Stream

    def stream(self, stream: torch.Stream) -> contextlib.AbstractContextManager[Any]:
        return stream

    def current_stream(self, device_index: int | None = None) -> torch.Stream:
        return torch.accelerator.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> torch.Stream:
        index = self.current_device() if device_index is None else device_index
        return torch.Stream(stream_id=0, device_index=index, device_type=int(torch._C._autograd.DeviceType.PrivateUse1))

    @property
    def Event(self) -> type[torch.Event]:  # noqa: N802 - DeepSpeed's name
        return torch.Event

    # ---- memory

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.accelerator.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.accelerator.max_memory_allocated(device_index)

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        torch.accelerator.reset_peak_memory_stats(device_index)

    reset_peak_memory_stats = reset_max_memory_cached = reset_max_memory_allocated
    memory_cached = memory_reserved = memory_allocated
    max_memory_cached = max_memory_reserved = max_memory_allocated

    def memory_stats(self, device_index: int | None = None) -> Any:
        return torch.accelerator.memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.accelerator.get_memory_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.accelerator.get_memory_info(device_index)[0]

    pin_memory = DeepSpeedAccelerator.pin_memory
    _torch_pins_host_memory = True

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=tensor.dtype, pin_memory=True)

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        late_device.library().register_host(address, num_bytes)
        return True

    def unregister_host_memory(self, address: int) -> None:
        assert late_device.library().unregister_host(address)

    # ---- numbers

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class LateWork:
    """A collective that was given to its group's stream. `point`: in that stream, behind it. `over`: the event there; None: it
    was of host memory, and is over."""

    name: str
    point: tuple[int, int]
    over: torch.Event | None

    def wait(self, *_: object, **__: object) -> bool:
        """Have the stream that is current here go on behind it."""
        if self.over is not None:
            self.over.wait(torch.accelerator.current_stream())
        return True

    def is_completed(self) -> bool:
        """Kernels compute at once."""
        return True


class LateGroup(dist.ProcessGroup):
    """Gloo over the device's memory. As with NCCL a group has a stream of its own: a collective is a kernel of it, behind what
    the stream has been given that is current when it is called. Who waits for it has the current stream go on behind it.

    `works`: the collectives of all groups since somebody has emptied the list.
    """

    works: ClassVar[list[LateWork]] = []

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._stream: torch.Stream | None = None

    def run(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> LateWork:
        """Issue one of gloo's collectives."""
        tensors = list(_late_tensors(args))
        if not tensors:
            getattr(self._gloo, name)(*args, **kwargs).wait()
            return LateWork(name, (0, 0), None)
        if self._stream is None:
            self._stream = torch.Stream(tensors[0].device)
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            getattr(self._gloo, name)(*map(_over_host_memory, args), **kwargs).wait()
            over = torch.Event(self._stream.device)
            over.record(self._stream)
        for tensor in tensors:
            tensor.record_stream(self._stream)
        work = LateWork(name, late_device.library().point(self._stream.stream_id, self._stream.device_index), over)
        self.works.append(work)
        return work

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo  # with the time that a collective may take


def _over_host_memory(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        late = value.device.type == late_device.NAME
        return late_device.library().in_a_kernel(value) if late else value
    return [_over_host_memory(each) for each in value] if isinstance(value, list) else value


def _late_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield from [value] if value.device.type == late_device.NAME else []
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _late_tensors(each)


def _passing(name: str) -> Any:
    return lambda self, *args, **kwargs: self.run(name, args, kwargs)


def beside() -> list[str]:
    """The collectives of `LateGroup.works` that what the current stream is given next does not wait for."""
    return [work.name for work in LateGroup.works if not late_device.library().is_behind(*work.point)]


# torch's name of a collective, where it differs from gloo's
_NAMES = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}
_NAMES |= {"all_to_all_single": "alltoall_base"}
_SAME = ("allgather", "allgather_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier")
_SAME += ("broadcast", "gather", "monitored_barrier", "recv", "reduce", "reduce_scatter", "scatter", "send")
_SAME += ("_allgather_base", "_reduce_scatter_base")
for _name, _gloo_name in (_NAMES | dict(zip(_SAME, _SAME, strict=True))).items():
    setattr(LateGroup, _name, _passing(_gloo_name))


def use() -> None:
    """Make the late device torch's accelerator and DeepSpeed's, in this process."""
    late_device.use()
    deepspeed.accelerator.set_accelerator(LateAccelerator())
    dist.Backend.register_backend(BACKEND, LateGroup, devices=["cpu", late_device.NAME])
