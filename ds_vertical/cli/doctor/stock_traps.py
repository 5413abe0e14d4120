"""What stock DeepSpeed 0.19.8 does with a JSON that nobody would expect, as far as the JSON alone shows it.

One row of `TRAPS` per trap: the arms that step into it, and a function that takes a Target and yields CheckResults with
the line to write.
Imports neither torch nor deepspeed. The defaults are those of 0.19.8 (zero/config.py, zero/offload_config.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from ds_vertical.cli.doctor.check import Arm, CheckResult, Target, error, split_fault, warning
from ds_vertical.config.cross_check import max_in_cpu_warning
from ds_vertical.config.deepspeed_keys import AIO_KEYS
from ds_vertical.config.section import show
from ds_vertical.types import OFFLOAD_DEVICES, Tier

_ZERO: Final = "zero_optimization"
_PARAM: Final = f"{_ZERO}.offload_param"
_STATE: Final = f"{_ZERO}.offload_optimizer"
_SECTOR_BYTES: Final = 512
_OLD_AIO_KEYS: Final = {"num_threads": "intra_op_parallelism", "thread_count": "intra_op_parallelism"}


class Trap(NamedTuple):
    """The arms that step into a trap, and the function that looks for it in a Target's JSON."""

    arms: frozenset[Arm]
    find: Callable[[Target], Iterator[CheckResult]]


def find_traps(case: Target) -> Iterator[CheckResult]:
    """The findings of every trap for the arms that the JSON is to run in."""
    for trap in TRAPS if case.config is not None else ():
        if trap.arms & case.arms:
            only = "" if case.arms <= trap.arms else f"{', '.join(trap.arms)} arm: "
            yield from (replace(finding, found=only + finding.found) for finding in trap.find(case))


def _params_on_ssd(case: Target) -> bool:
    return case.at(f"{_PARAM}.device") == OFFLOAD_DEVICES[Tier.SSD]


def _state_on_ssd(case: Target) -> bool:
    return case.at(f"{_STATE}.device") == OFFLOAD_DEVICES[Tier.SSD]


def _number(value: object, default: float) -> tuple[float, str]:
    """A setting's value and where it comes from; its default where it is not written, or is no number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value, "as written"
    return default, "DeepSpeed's default"


def _stage3(case: Target, name: str, default: float) -> tuple[float, str]:
    """A setting that may be written with or without its prefix."""
    with_prefix = case.at(f"{_ZERO}.stage3_{name}")
    return _number(case.at(f"{_ZERO}.{name}") if with_prefix is None else with_prefix, default)


# ---- parameters


def _max_in_cpu(case: Target) -> Iterator[CheckResult]:
    for line in max_in_cpu_warning(case.config or {}):
        yield warning(split_fault(line)[0], '"max_in_cpu": 0  # in offload_param')


def _buffer_size(case: Target) -> Iterator[CheckResult]:
    if _params_on_ssd(case) and case.at(f"{_PARAM}.buffer_size") is None:
        yield warning(
            f'{_PARAM}.buffer_size: not written, 100000000 elements: zero.Init dies in "More elements ... than buffer size"'
            " where a rank's share of one parameter is larger (an embedding of 128256 x 4096 has 525336576 elements)",
            '"buffer_size": ELEMENTS_OF_THE_LARGEST_PARAMETER  # in offload_param',
        )


def _not_enough_buffers(case: Target) -> Iterator[CheckResult]:
    if not _params_on_ssd(case):
        return
    count, count_origin = _number(case.at(f"{_PARAM}.buffer_count"), 5)
    size, _ = _number(case.at(f"{_PARAM}.buffer_size"), 1e8)
    reuse, reuse_origin = _stage3(case, "max_reuse_distance", 1e9)
    if reuse > count * size:
        yield warning(
            f"{_ZERO}.stage3_max_reuse_distance: {reuse:.0f} elements ({reuse_origin}): parameters that are used again within"
            f" that many keep their buffers, of which there are {count:.0f} x {size:.0f} elements ({count_origin}): stock dies"
            ' in "Not enough buffers ... for swapping"',
            '"stage3_max_reuse_distance": 0',
        )
    elif case.at(f"{_PARAM}.buffer_count") is None:
        yield warning(
            f"{_PARAM}.buffer_count: not written, 5: one tensor takes a whole buffer, whatever its size, and stock dies in"
            ' "Not enough buffers ... for swapping" where a module with its prefetch needs more',
            '"buffer_count": 32  # in offload_param',
        )


def _prefetch(case: Target) -> Iterator[CheckResult]:
    bucket, origin = _stage3(case, "prefetch_bucket_size", 5e7)
    if _params_on_ssd(case) and bucket > 0:
        yield warning(
            f"{_ZERO}.stage3_prefetch_bucket_size: {bucket:.0f} ({origin}): with parameters on SSD stock may die in the third"
            ' forward pass, "param N already assigned swap buffer id" (patches/0001)',
            '"stage3_prefetch_bucket_size": 0',
        )


def _saves_nothing(case: Target) -> Iterator[CheckResult]:
    names = ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
    if case.at(f"{_ZERO}.stage") == 3 and not any(case.at(f"{_ZERO}.{name}") for name in names):
        yield warning(
            f"{_ZERO}.{names[0]}: not true: save_16bit_model of stock saves no weights with stage 3", f'"{names[0]}": true'
        )


# ---- optimizer


def _pipeline_buffers(case: Target) -> Iterator[CheckResult]:
    """Adam has four tensors per sub-group: those being stepped, with `pipeline_read` the next ones, with `pipeline_write` the
    last ones, of which the gradient's buffer is given back with those that are still being written."""
    if not _state_on_ssd(case):
        return
    count, origin = _number(case.at(f"{_STATE}.buffer_count"), 4)
    reads, writes = (case.at(f"{_STATE}.pipeline_{way}") is True for way in ("read", "write"))
    needed = 4 + 4 * reads + 4 * writes
    if count < needed:
        flags = " and ".join(f"pipeline_{way}" for way, on in (("read", reads), ("write", writes)) if on) or "Adam"
        yield warning(
            f"{_STATE}.buffer_count: {count:.0f} ({origin}): {flags} needs {needed} as soon as there are several sub-groups:"
            " stock runs out of swap buffers",
            f'"buffer_count": {needed}  # in offload_optimizer',
        )


def _sub_group_size(case: Target) -> Iterator[CheckResult]:
    if not _state_on_ssd(case):
        return
    size, origin = _number(case.at(f"{_ZERO}.sub_group_size"), 1e9)
    count, _ = _number(case.at(f"{_STATE}.buffer_count"), 4)
    if size >= 1e9:
        yield warning(
            f"{_ZERO}.sub_group_size: {size:.0f} ({origin}): stock locks {count:.0f} buffers of 4 bytes x the largest sub-group"
            f" (the whole model up to {size:.0f} parameters): {4 * count:.0f} bytes of memory per parameter on SSD",
            '"sub_group_size": 100000000',
        )


def _clipping(case: Target) -> Iterator[CheckResult]:
    if case.at("gradient_clipping") is None:
        yield warning(
            "gradient_clipping: not written: DeepSpeed 0.19.8 clips at 1.0 then, versions before did not clip",
            '"gradient_clipping": 1.0 to keep it, or "gradient_clipping": 0.0 for none',
        )


def _accumulation(case: Target) -> Iterator[CheckResult]:
    halves = [name for name in ("bf16", "bfloat16", "fp16") if case.at(f"{name}.enabled") is True]
    if halves and case.at("data_types.grad_accum_dtype") is None and case.at("gradient_accumulation_steps") != 1:
        yield warning(
            f"data_types.grad_accum_dtype: not written: the gradients of the micro-batches are summed in {halves[0]}, and small"
            " ones are lost",
            '"data_types": {"grad_accum_dtype": "fp32"}',
        )


def _one_micro_batch(case: Target) -> Iterator[CheckResult]:
    accumulation, micro, train = (
        case.at(key) for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")
    )
    if accumulation == 1 or (accumulation is None and (train is None or train == micro)):
        yield warning(
            "gradient_accumulation_steps: M is 1, and with one micro-batch per step layer-major order is stock's order: it"
            " gains from 2 on, in proportion",
            '"gradient_accumulation_steps": 16',
        )


# ---- aio


def _aio_keys(case: Target) -> Iterator[CheckResult]:
    aio = (case.config or {}).get("aio")
    for key, value in aio.items() if isinstance(aio, Mapping) else ():
        if key in AIO_KEYS:
            continue
        near = _OLD_AIO_KEYS.get(key) or next(iter(difflib.get_close_matches(str(key), sorted(AIO_KEYS), n=1)), None)
        origin = ", which ds_nvme_tune prints," if key == "num_threads" else ""
        known = ", ".join(sorted(AIO_KEYS))
        remedy = f'"{near}": {show(value)}  # in aio, in its place' if near else f"remove it; known: {known}"
        yield warning(f"aio.{key}: DeepSpeed reads no such key{origin} and ignores it", remedy)


def _aio_values(case: Target) -> Iterator[CheckResult]:
    aio = (case.config or {}).get("aio")
    for key, value in aio.items() if isinstance(aio, Mapping) else ():
        if key in ("single_submit", "overlap_events", "use_gds"):
            if not isinstance(value, bool):
                meant = "true" if str(value).lower() in ("true", "1") else "false"
                yield error(f"aio.{key}: got {show(value)}; a queue takes true or false, without quotes", f'"{key}": {meant}')
        elif key in AIO_KEYS and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            whole = int(value) if isinstance(value, float) and value >= 1 else 1 << 20 if key == "block_size" else 8
            yield error(f"aio.{key}: got {show(value)}; a queue takes an integer of 1 or more", f'"{key}": {whole}')
        elif key == "block_size" and value % _SECTOR_BYTES:
            yield error(
                f"aio.block_size: got {value}; direct I/O takes multiples of {_SECTOR_BYTES} bytes only",
                f'"block_size": {max(1, round(value / 2**20)) << 20}',
            )


_STOCK: Final[frozenset[Arm]] = frozenset({"stock"})
_BOTH: Final[frozenset[Arm]] = frozenset({"stock", "vertical"})
TRAPS: Final = (
    Trap(_STOCK, _max_in_cpu),  # `cross_check` says it for the vertical arm
    Trap(_BOTH, _buffer_size),
    Trap(_STOCK, _not_enough_buffers),
    Trap(_STOCK, _prefetch),
    Trap(_STOCK, _saves_nothing),
    Trap(_STOCK, _pipeline_buffers),
    Trap(_STOCK, _sub_group_size),
    Trap(_BOTH, _clipping),
    Trap(_BOTH, _accumulation),
    Trap(frozenset({"vertical"}), _one_micro_batch),
    Trap(_BOTH, _aio_keys),
    Trap(_BOTH, _aio_values),
)
