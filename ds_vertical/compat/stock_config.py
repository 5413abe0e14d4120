"""What DeepSpeed reads out of a JSON. Private names of DeepSpeed are not used here."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: F401 - used by others
from deepspeed.runtime.config import DeepSpeedConfig  # noqa: F401 - used by others
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from deepspeed.runtime.swap_tensor.utils import AIO_ALIGNED_BYTES, MIN_AIO_BYTES
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.utils import get_norm_dtype

from ds_vertical.compat.zero_params import ZeroParam
from ds_vertical.errors import ConfigError
from ds_vertical.types import IN_FILES, OFFLOAD_DEVICES, Tier

_ZERO = "zero_optimization"
_TIERS = {device: tier for tier, device in OFFLOAD_DEVICES.items()}

# ---- what of the JSON decides about memory


@dataclass(frozen=True)
class OffloadSettings:
    """DeepSpeed's settings, its defaults filled in. Sizes in elements where they are not called bytes."""

    params_tier: Tier
    state_tier: Tier
    max_in_cpu: int
    sub_group_size: int
    alignment_bytes: int  # of sizes of files
    least_bytes: int  # smaller shards stay in memory
    largest_persistent: int  # of the parameters that stay on the device, if `all_persistent` is not reached
    all_persistent: int
    init_buffers: int = 0  # of zero.Init, for parameters in files
    fast_init: bool = False  # stock's optimizer reads parameters into many of these at a time while it is set up

    @classmethod
    def read(cls, config: dict[str, Any]) -> OffloadSettings:
        """The settings of a DeepSpeed JSON. Raises pydantic.ValidationError for a section that DeepSpeed refuses."""
        zero = DeepSpeedZeroConfig(**config.get("zero_optimization", {}))
        param, optimizer, aio = zero.offload_param, zero.offload_optimizer, get_aio_config(config)
        params_tier = Tier.DEVICE if param is None else _TIERS[OffloadDeviceEnum(param.device).value]
        return cls(
            params_tier,
            Tier.DEVICE if optimizer is None else _TIERS[OffloadDeviceEnum(optimizer.device).value],
            int(param.max_in_cpu) if param is not None and IN_FILES[params_tier] else 0,
            int(zero.sub_group_size),
            AIO_ALIGNED_BYTES * aio["intra_op_parallelism"],
            max(MIN_AIO_BYTES, aio["block_size"]),
            int(zero.param_persistence_threshold),
            int(zero.model_persistence_threshold),
            int(param.buffer_count) if param is not None and IN_FILES[params_tier] else 0,
            optimizer is not None and optimizer.device == OffloadDeviceEnum.nvme and bool(optimizer.fast_init),
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Those that a smaller number may mend: `sub_group_size`, `max_in_cpu`, `buffer_count` of offload_param."""
        return self.sub_group_size, self.max_in_cpu, self.init_buffers

    @property
    def params_in_files(self) -> bool:
        """Whether parameters rest in files, as far as the other settings do not keep them in memory."""
        return IN_FILES[self.params_tier]

    @property
    def state_in_files(self) -> bool:
        """Whether the optimizer's state rests in files, as far as it is not too small for that."""
        return IN_FILES[self.state_tier]

    def host_rooms(self, groups: Iterable[int]) -> list[int]:
        """Of the optimizer's groups, which have so many elements on this rank, how many of each stay in host memory though
        parameters are to be on SSD: `max_in_cpu` is for all groups of one rank together, and the first ones have it first."""
        found, passed = [], 0
        for numel in groups:
            left = max(0, self.max_in_cpu - passed)
            found.append(min(numel, left) or 1)  # a group without room has a buffer of one element in stock
            passed += numel
        return found

    def persistent(self, sizes: Iterable[int]) -> list[bool]:
        """Of parameters of these elements, in the model's order, which stay on the device: as `mark_persistent_parameters`."""
        found, total = [], 0
        for numel in sizes:
            found.append(numel <= self.largest_persistent and total + numel <= self.all_persistent)
            total += numel * found[-1]
        return found


def aio_settings(config: Mapping[str, object]) -> dict[str, int]:
    """The `aio` section with DeepSpeed's defaults."""
    return get_aio_config(config)


def locked_by_zero_init(config: dict[str, Any]) -> int:
    """Bytes of the buffers that zero.Init locks for parameters on SSD; 0 without."""
    param = DeepSpeedZeroConfig(**config.get("zero_optimization", {})).offload_param
    if param is None or param.device != OffloadDeviceEnum.nvme:
        return 0
    width, alignment = 2 if wants_half(config) else 4, OffloadSettings.read(config).alignment_bytes
    return int(param.buffer_count) * -(-int(param.buffer_size) * width // alignment) * alignment


def buffers_of_zero_init(config: dict[str, Any], lockable: int) -> tuple[int, int, int]:
    """The buffer_count and buffer_size (elements) of parameters on SSD, and the largest size of which so many fit into
    `lockable` bytes."""
    param = DeepSpeedZeroConfig(**config["zero_optimization"]).offload_param
    assert param is not None
    width, alignment = 2 if wants_half(config) else 4, OffloadSettings.read(config).alignment_bytes
    largest = lockable // int(param.buffer_count) // alignment * alignment // width
    return int(param.buffer_count), int(param.buffer_size), largest


def wants_half(config: Mapping[str, object]) -> bool:
    """Whether the JSON asks for parameters of two bytes an element."""
    sections = (config.get(name) for name in ("bf16", "bfloat16", "fp16"))
    return any(section.get("enabled") for section in sections if isinstance(section, Mapping))


def has_dynamic_scale(config: Mapping[str, object]) -> bool:
    """Whether the JSON asks for fp16 with a loss scale that changes from step to step."""
    fp16 = config.get("fp16")
    return isinstance(fp16, Mapping) and bool(fp16.get("enabled")) and not fp16.get("loss_scale")


def element_bytes(units: Iterable[Sequence[ZeroParam]], config: dict[str, Any]) -> int:
    """Bytes of a parameter's element once DeepSpeed has converted the model: the largest, of the parameters of `units`. In
    half precision those that stay fp32 (see `zero_params.keeps_dtypes`) have more."""
    return 2 if wants_half(config) else max(param.element_size() for params in units for param in params)


def norm_bytes() -> int:
    """Bytes of one element in the copy of a gradient from which DeepSpeed takes its norm."""
    return get_norm_dtype().itemsize


def check_zero(zero: Mapping[str, Any]) -> None:
    """Check the `zero_optimization` section as DeepSpeed does when a run has started. Raises ConfigError, a line per fault."""
    import pydantic
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**zero)
    except pydantic.ValidationError as error:
        lines = []
        for detail in error.errors():
            path = ".".join(str(part) for part in (_ZERO, *detail["loc"]))
            known = frozenset(name for name in (*DeepSpeedZeroConfig.model_fields, *zero))
            near = difflib.get_close_matches(str(detail["loc"][-1]), sorted(known - {detail["loc"][-1]}), n=1)
            hint = f'; did you mean "{near[0]}"?' if detail["type"] == "extra_forbidden" and near else ""
            lines.append(f"{path}: got {json.dumps(detail['input'], default=str)}; {detail['msg']}{hint}")
        raise ConfigError("\n".join(lines)) from None
