"""What a run takes of the machine besides memory, against what there is, before a file of it is made: the disk, open files, the
kernel's events of asynchronous I/O, its limit of locked memory. What `prepare` can know already is checked there: memory that
zero.Init locks.

All ranks decide together: another schedule on one rank would leave the others in a collective for ever.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from ds_vertical.compat import accelerator, pinned_memory, stock_config, swap_buffers, zero_params
from ds_vertical.config.file import DeepSpeedJson
from ds_vertical.config.section import SECTION
from ds_vertical.distributed import ranks
from ds_vertical.engine import machine_cache
from ds_vertical.engine.memory_check import Forecast, fits_with
from ds_vertical.errors import MemoryBudgetError, StorageError
from ds_vertical.io import files, host
from ds_vertical.io.disk_errors import remedy
from ds_vertical.io.runs import held_folders, stripes
from ds_vertical.io.runs.run_dir import fail
from ds_vertical.io.runs.this_host import host_id
from ds_vertical.offload.chunking import FP32_BYTES
from ds_vertical.offload.speculation import StepTiming
from ds_vertical.planner import memory_budget
from ds_vertical.planner.memory_budget import STATE_SHARE, STATE_SHARES
from ds_vertical.types import RunSettings, Tier

_SPARE: Final = 64  # the run's folders, and open files of everybody else: sockets of the process group, a monitor, data
_STOCK_FILES: Final = 8  # that DeepSpeed's optimizer swapper has open at a time
_STOCK_HANDLES: Final = 2  # of asynchronous I/O, which it makes after this check
_STRIPED_QUEUES: Final = 2  # of ours, through which DeepSpeed's swappers move files that lie on several SSDs
_READ_PER_PART: Final = 4  # master, moments, gradient
_SUB_GROUP: Final = memory_budget.SUB_GROUP
_AIO: Final = Path("/proc/sys/fs")


@dataclass(frozen=True)
class _Place:
    """A folder on a file system, its share of the run's bytes, the ranks of this host that have files there, and the bytes that
    are free for each of them."""

    folder: Path
    share: float
    sharing: int
    free: int


@dataclass(frozen=True)
class DiskNeed:
    """Bytes of this rank's files in one folder's file system, beside those of its parameters, which are there.

    `free`: for this rank; `sharing` ranks of this host have as much each, beside one another. `second`: a second generation of
    files for early steps. `frozen`: what the step after a checkpoint on that file system writes anew, because the
    checkpoint shares the files of before, and what of the state is in host memory; at most.
    """

    folder: Path
    sharing: int
    free: int
    state: int
    second: int
    gradients: int
    frozen: int

    @property
    def needed(self) -> int:
        """Bytes that this rank's files take in all."""
        return self.state + self.second + self.gradients

    @property
    def left(self) -> int:
        """Bytes that stay free for this rank; negative where they do not suffice."""
        return self.free - self.needed

    @property
    def told(self) -> str:
        """What is free, in words."""
        return f"{self.free} free" + (f" for each of {self.sharing} ranks" if self.sharing > 1 else "")

    @property
    def parts(self) -> str:
        """What takes them, in words."""
        sizes = {"optimizer state": self.state, "second generation": self.second, "waiting gradients": self.gradients}
        return ", ".join(f"{what} {_mib(count)}" for what, count in sizes.items() if count)


def check_disk(forecast: Forecast, config: dict[str, Any], resolved: RunSettings, room: tuple[int, int]) -> list[str]:
    """Lines for the log. `room`: of host memory, see `room.host_room`. Raises StorageError, on every rank, with the numbers of
    all that does not fit on this one, or on another one; ahead of that what `check_locked` raises."""
    check_locked(forecast, config)
    disks = _disks(forecast, config, places := _places(forecast, config))
    faults, lines = [], _one_file_system(resolved.nvme_paths or ())
    advice = _advice(forecast, config, resolved, places, room) if any(disk.left < 0 for disk in disks) else []
    for disk in disks:
        where = "" if len(disks) == 1 else f"{disk.folder}: "
        faults += _disk_faults(disk, resolved, advice)
        lines.append(f"{where}disk of this rank, beside its parameters: {disk.parts}; free: {_mib(disk.free)}")
        lines.append(where + _frozen(disk))
    if forecast.files.num_files:
        faults += [*_descriptor_faults(forecast, config, resolved), *_event_faults(forecast, config, resolved)]
    others = [found for found in ranks.all_gathered(faults) if found]
    if others:
        raise StorageError("\n".join(faults or others[0]))
    return lines


def check_before_the_model(config: dict[str, Any]) -> None:
    """Raise MemoryBudgetError where zero.Init could not lock its buffers, on which DeepSpeed dies in an assertion. It
    locks them by mlock on any device."""
    needed = stock_config.locked_by_zero_init(config)
    lockable = host.lockable_bytes()
    if lockable is not None and needed > lockable:
        count, size, largest = stock_config.buffers_of_zero_init(config, lockable)
        raise MemoryBudgetError(
            f"locked memory: zero_optimization.offload_param's buffer_count x buffer_size need {needed} bytes, {lockable} are"
            f" allowed; raise the limit (ulimit -l {host.limit_to_lock(needed)}), write smaller ones (of {count} x"
            f" {size} elements; {count} x {largest} fit), or run as a user who may lock any amount (CAP_IPC_LOCK)"
        )


def check_locked(forecast: Forecast, config: dict[str, object]) -> None:
    """Raise MemoryBudgetError, on every rank, where one may not lock as much as it has to: first DeepSpeed's buffers, by mlock
    on any device, then ours in their place, which a device's driver may lock."""
    items = memory_budget.budget(forecast.shape, forecast.terms)
    ours = sum(item.num_bytes for item in items if item.what in ("parameter buffers", "optimizer slots"))
    stock = _locked_by_stock(forecast, config)
    fault = _lock_fault(ours if pinned_memory.counts_as_locked() else 0, stock, partial(_smaller_sub_group, forecast, config))
    faults = [found for found in ranks.all_gathered(fault) if found is not None]
    if faults:
        raise MemoryBudgetError(fault or faults[0])


def _lock_fault(ours: int, stock: Mapping[str, int], fitting: Callable[[int], int | None]) -> str | None:
    """What to say on this rank. `fitting`: a sub_group_size with which DeepSpeed's buffers fit into so many bytes."""
    needed, lockable = max(ours, sum(stock.values())), host.lockable_bytes()
    if lockable is None or needed <= lockable:
        return None
    told, smaller = "", ","
    if needed > ours:
        told = f" for DeepSpeed's buffers ({', '.join(f'{what}: {size}' for what, size in stock.items() if size)})"
        fits = fitting(lockable) if ours <= lockable else None  # our own buffers stay as they are
        if fits is not None:
            smaller = f", write smaller ones there ({_SUB_GROUP}: {fits} fits),"
        elif ours <= lockable and stock.keys() != {_SUB_GROUP}:  # with one parameter a sub-group is too large
            smaller = ", write smaller ones there,"
    return (
        f"locked memory: needs {needed} bytes{told}, {lockable} are allowed; raise the limit"
        f" (ulimit -l {host.limit_to_lock(needed)}){smaller} or run as a user who may lock any amount (CAP_IPC_LOCK)"
    )


def _locked_by_stock(forecast: Forecast, config: dict[str, object]) -> dict[str, int]:
    """By what decides about them, bytes that DeepSpeed will lock while its optimizer is set up, all at a time: the buffers for
    parameters, unless zero.Init has had them before; those for the largest chunk of state; and one for its parameters, in
    whole, where some are stepped on SSD."""
    found: dict[str, int] = {}
    json, chunks = stock_config.OffloadSettings.read(config), forecast.chunks
    if not swap_buffers.parameter_swappers(forecast.params):  # adapters made outside have none until they join the base's
        found["zero_optimization.offload_param.buffer_count x buffer_size"] = stock_config.locked_by_zero_init(config)
    largest = max(chunks, key=lambda chunk: chunk.numel, default=None)
    if largest is None:
        return found
    state = swap_buffers.aligned_bytes([largest.numel * FP32_BYTES], json.alignment_bytes)
    whole = [zero_params.full_numel(param) * forecast.shape.param_bytes for param in largest.params]
    stepped = swap_buffers.aligned_bytes(whole, json.alignment_bytes)
    found[_SUB_GROUP] = memory_budget.STOCK_BUFFERS * state * json.state_in_files + stepped * any(
        chunk.params_in_files for chunk in chunks
    )
    return found


def _smaller_sub_group(forecast: Forecast, config: dict[str, object], lockable: int) -> int | None:
    """A sub_group_size below the JSON's with which what DeepSpeed locks fits into `lockable` bytes, if there is one."""
    now = stock_config.OffloadSettings.read(config).sub_group_size
    largest = max((chunk.numel for chunk in forecast.chunks), default=0)
    tried = (size for size in (now >> n for n in range(1, now.bit_length())) if size < largest)  # others change nothing
    stocks = ((size, _locked_by_stock(forecast.changed(_SUB_GROUP, size), config)) for size in tried)
    return next((size for size, stock in stocks if sum(stock.values()) <= lockable), None)


# ---- disk


def holds_second(forecast: Forecast, config: dict[str, Any]) -> bool:
    """Whether the SSDs of every rank hold what early steps need: a second generation of files, unless they take none.
    Collective."""
    disks = _disks(forecast, config, _places(forecast, config), demanded=False)
    return all(ranks.all_gathered(forecast.timing.generations == 1 or all(disk.second for disk in disks)))


def _places(forecast: Forecast, config: DeepSpeedJson) -> list[_Place]:
    """Where the run's files lie; nothing where no state of the optimizer is to be on SSD. Collective."""
    shares = _shares(config) if forecast.files.state or forecast.files.all_gradients else {}
    every = ranks.all_gathered([(host_id(), device) for device in shares])
    found = []
    for device, (folder, share) in shares.items():
        sharing = sum((host_id(), device) in others for others in every)
        found.append(_Place(folder, share, sharing, files.free_bytes(folder) // sharing))
    return found


def _disks(forecast: Forecast, config: DeepSpeedJson, places: Sequence[_Place], demanded: bool | None = None) -> list[DiskNeed]:
    """What goes to each of `places`. `demanded`: whether early steps are taken without room for their files, too; None: as the
    timing says."""
    wanted = forecast.files
    demanded = forecast.timing.demanded if demanded is None else demanded
    params = (config["zero_optimization"].get("offload_param") or {}).get("nvme_path")
    beside = wanted.parameters if params and _device(Path(params)) in map(_device, (each.folder for each in places)) else 0
    state = wanted.state + wanted.low
    second = state + (wanted.second if beside else 0)
    fits = all((state + second) * place.share <= place.free for place in places)
    takes_second = forecast.timing.generations == 2 and (demanded or fits)
    held = wanted.gradients if takes_second or forecast.timing.generations == 1 else wanted.all_gradients
    frozen = wanted.state * (2 if takes_second else 1) + beside + wanted.shared
    sizes = (state, second if takes_second else 0, held, frozen)
    return [
        DiskNeed(place.folder, place.sharing, place.free, *(math.ceil(size * place.share) for size in sizes))
        for place in places
    ]


def _shares(config: dict[str, Any]) -> dict[int, tuple[Path, float]]:
    """By file system, a folder on it and its share of the run's bytes."""
    paths = (config.get(SECTION) or {}).get("nvme_paths")
    if not paths:
        folder = Path((config["zero_optimization"].get("offload_optimizer") or {}).get("nvme_path") or "/")
        return {_device(folder): (folder, 1.0)}
    found: dict[int, tuple[Path, float]] = {}
    for path, share in zip(paths, machine_cache.shares_of(paths), strict=True):
        folder, others = found.get(_device(Path(path)), (Path(path), 0.0))
        found[_device(Path(path))] = folder, others + share
    return found


def _one_file_system(paths: Sequence[str]) -> list[str]:
    """A warning for each path on the same file system as one before it."""
    first: dict[int, str] = {}
    doubles = [(first[device], path) for path in paths if first.setdefault(device := _device(Path(path)), path) != path]
    return [
        f"warning: {SECTION}.nvme_paths: {one} and {path} lie on one file system, which is read no faster for it; write one"
        " folder for each SSD"
        for one, path in doubles
    ]


def _disk_faults(disk: DiskNeed, resolved: RunSettings, advice: Sequence[str]) -> Iterator[str]:
    if disk.left < 0:
        yield (
            f"{disk.folder}: this rank needs {disk.needed} more bytes beside its parameters ({disk.parts}), the file system has"
            f" {disk.told}; free {-disk.left * disk.sharing} bytes or {' or '.join([*advice, 'use another nvme_path'])}"
        )
    elif _lacks_checkpoint(disk, resolved):
        assert resolved.on_signal is not None
        yield (
            f"{SECTION}.on_signal.save_dir: {resolved.on_signal.save_dir} is on the file system of nvme_path, where a"
            f" checkpoint needs up to {disk.frozen} bytes more, and {disk.left} are left; write a folder on another one, or"
            f" free {(disk.frozen - disk.left) * disk.sharing} bytes"
        )


def _lacks_checkpoint(disk: DiskNeed, resolved: RunSettings) -> bool:
    """Whether a checkpoint that `on_signal` asks for lies where there is no room for it."""
    saved = None if resolved.on_signal is None else Path(resolved.on_signal.save_dir)
    return saved is not None and disk.left < disk.frozen and _device(saved) == _device(disk.folder)


def _advice(
    forecast: Forecast, config: DeepSpeedJson, resolved: RunSettings, places: Sequence[_Place], room: tuple[int, int]
) -> list[str]:
    """The least numbers in the section each of which alone makes this rank's files fit, where host memory has room for what
    then rests there. `room`: see `check_disk`."""
    if forecast.host_share and (config.get(SECTION) or {}).get("optimizer_host_share") is None:
        forecast = forecast.changed(STATE_SHARE, 0.0)  # null takes what all else leaves, which may be nothing then

    largest = min(memory_budget.PART_ELEMENTS, max((chunk.numel for chunk in forecast.chunks), default=0))
    half_piece = FP32_BYTES * largest // 2  # by which gradients' files may be larger than was said

    def mends(path: str, value: float) -> bool:
        other = forecast.changed(path, value)
        disks = _disks(other, config, places)
        gives_up = other.timing.generations == 2 and not any(disk.second for disk in disks)
        fits = not any(disk.left < bool(disk.gradients) * half_piece or _lacks_checkpoint(disk, resolved) for disk in disks)
        return fits and fits_with(forecast, room, path, value, spares=True, gives_up=gives_up)

    steps = [count / STATE_SHARES for count in range(1, STATE_SHARES + 1)]
    now = {"optimizer_delay": forecast.timing.delay, "gradient_host_share": resolved.gradient_host_share}
    now["optimizer_host_share"] = forecast.host_share
    found = []
    for key, present in now.items():
        values = [value for value in steps if value > present] if key != "optimizer_delay" else [1.0]  # no other saves a file
        value = next((each for each in values if mends(f"{SECTION}.{key}", each)), None)
        found += [] if value is None else [f'"{SECTION}.{key}": {value:g}']
    return found


def _frozen(disk: DiskNeed) -> str:
    told = f"a checkpoint on that file system takes up to {_mib(disk.frozen)} more, {_mib(max(0, disk.left))} are left"
    return told if disk.left >= disk.frozen else f"warning: {told}: save to another one"


def _device(path: Path) -> int:
    """Of the file system that a path lies on, or will."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists()).stat().st_dev


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


# ---- the process and the kernel


def _queues(forecast: Forecast, resolved: RunSettings, ahead: int) -> list[float]:
    """Of each queue of asynchronous I/O, how many operations may be in it at a time: each has its file open. `ahead`: slots for
    state that is read before the norm."""
    shards = [forecast.files.num_files] * 2  # parameters read, written
    slots = forecast.terms.slots + ahead
    slots = math.inf if resolved.optimizer_compression else slots  # parts read files of many parameters, too
    parts = [slots * _READ_PER_PART, slots * (_READ_PER_PART - 1)]
    gradients = [math.inf] * (resolved.gradient_host_share < 1)
    settings = resolved.activations
    activations = [math.inf] * (2 * (settings.shares[Tier.SSD] > 0) + 2 * (settings.keep_device is Tier.SSD))
    return [*shards, *parts, *gradients, *activations]


def _depth(config: Mapping[str, object]) -> int:
    aio = stock_config.aio_settings(config)
    return aio["queue_depth"] * aio["intra_op_parallelism"]


def limit_ahead(forecast: Forecast, config: DeepSpeedJson, resolved: RunSettings) -> None:
    """Tell the forecast how many slots for state that is read before the norm the hard limit on open files allows, where it
    does not allow any number: they are no reason for a refusal."""
    hard, depth = resource.getrlimit(resource.RLIMIT_NOFILE)[1], _depth(config)
    most = depth  # more of them bring no more operations into a queue
    while most and hard != resource.RLIM_INFINITY and _open_files(forecast, config, resolved, most) > hard:
        most -= 1
    forecast.most_ahead = None if most == depth else most


def _open_files(forecast: Forecast, config: DeepSpeedJson, resolved: RunSettings, ahead: int) -> int:
    """How many files this process may come to have open at a time. `ahead`: see `_queues`."""
    count = ((config["zero_optimization"].get("offload_param") or {}).get("buffer_count")) or _STOCK_FILES
    ssds = len(resolved.nvme_paths or [""])
    ours = ssds * sum(min(_depth(config), most) + 1 for most in _queues(forecast, resolved, ahead))
    return int(len(os.listdir("/proc/self/fd")) + ours + count + _STOCK_FILES + _SPARE)  # noqa: PTH208  # names, no paths


def _descriptor_faults(forecast: Forecast, config: dict[str, Any], resolved: RunSettings) -> Iterator[str]:
    """Raises the soft limit as far as this run needs it and the hard one lets it. A plan behind the first step may do without
    its files, so that these are no fault."""
    ssds = len(resolved.nvme_paths or [""])
    needed = _open_files(forecast, config, resolved, forecast.terms.ahead)
    is_open = resolved.activations.is_open and resolved.activations.keep is not None
    later = ssds * 2 * (_depth(config) + 1) if is_open else 0  # for kept values, should the plan have them on SSD
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        yield (
            f"open files: this rank needs up to {needed}, {hard} are allowed; raise the limit (ulimit -Hn {needed}), or write a"
            " smaller aio.queue_depth"
        )
    elif soft != resource.RLIM_INFINITY and needed + later > soft:
        most = needed + later if hard == resource.RLIM_INFINITY else min(needed + later, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _event_faults(forecast: Forecast, config: dict[str, Any], resolved: RunSettings) -> Iterator[str]:
    try:
        taken, most = (int((_AIO / name).read_text()) for name in ("aio-nr", "aio-max-nr"))
    except OSError:
        return  # a container that hides them
    here = ranks.ranks_on_this_host()
    ssds = len(resolved.nvme_paths or [""])
    striped = _STRIPED_QUEUES * ssds if ssds > 1 else 0
    needed = here * _depth(config) * (len(_queues(forecast, resolved, 0)) * ssds + _STOCK_HANDLES + striped)
    if needed > most - taken:
        yield (
            f"asynchronous I/O: the {here} ranks of this host need {needed} events, {most - taken} of the kernel's {most} are"
            f" left; sysctl -w fs.aio-max-nr={taken + 2 * needed} as root, or write a smaller aio.queue_depth"
        )


def make_files(timing: StepTiming, one: Mapping[Path, int], both: Mapping[Path, int]) -> None:
    """Preallocate one generation of this rank's files; both where the timing needs them, as long as every rank has room. If
    not the timing is told, or StorageError raised where early steps were asked for. Collective."""
    if timing.generations == 2:
        problem = preallocate_on_all_ranks(both)
        if problem is None:
            return
        if timing.demanded:
            raise problem
        accelerator.log(
            "ds_vertical: no early steps, for want of room for a second generation of files, so that all gradients wait until"
            f" after the norm, 4 bytes per parameter, which the budget above may not count: {problem}"
        )
        timing.give_up()
    require(one)


def require(wanted: Mapping[Path, int]) -> None:
    """Preallocate this rank's files, or raise StorageError on every rank. Collective."""
    problem = preallocate_on_all_ranks(wanted)
    if problem is not None:
        raise problem


def preallocate_on_all_ranks(wanted: Mapping[Path, int]) -> StorageError | None:
    """`files.preallocate` of this rank's files on every rank, or on none. Collective.

    Returns None, or why not: this rank's own error, or that another rank has one.
    """
    there: set[Path] = set()
    problem = None
    try:
        there.update(path for path in wanted if any(map(held_folders.exists, stripes.files_of(path))))
        files.preallocate(wanted)
    except StorageError as error:
        problem = error
    except OSError as error:
        problem = fail(error.filename or "preallocate", "look for the file", error, remedy(error.errno))
    if ranks.is_true_on_all_ranks(problem is None):
        return None
    if problem is None:
        files.remove_files(path for path in wanted if path not in there)
        problem = StorageError("another rank could not preallocate its files; its own output says why")
    return problem
