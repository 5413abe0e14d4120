"""DeepSpeed's ZeRO stage-3 optimizer with chunks along layers, gradients held in host memory and a step taken unit by unit.

Overridden private methods of DeepSpeed are marked `override` and listed in `compat.deepspeed_members`.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_vertical.compat import accelerator, engine, pinned_memory, swap_handles, zero_optimizer, zero_params
from ds_vertical.compat.ops import load
from ds_vertical.compat.zero_optimizer import DeepSpeedCPUAdam
from ds_vertical.distributed import ranks
from ds_vertical.distributed.unit_levels import LevelReductions
from ds_vertical.engine import disk_check
from ds_vertical.engine.call_guard import FLUSHED, Calls
from ds_vertical.engine.zero3.chunks import REDUCTIONS, ChunkedStage3, make_chunks
from ds_vertical.engine.zero3.live_state import LiveState
from ds_vertical.engine.zero3.step_driver import StepDriver, StepPhase
from ds_vertical.io import files, host
from ds_vertical.io.aio import DiskQueue
from ds_vertical.io.checksums import Checksums
from ds_vertical.io.runs import stripes
from ds_vertical.model.layers import LayerMap
from ds_vertical.offload.chunking import Part
from ds_vertical.offload.consistency import StateGuard
from ds_vertical.offload.cpu_adam import CpuAdam, Powers
from ds_vertical.offload.grad_store import GradientFile, HeldGradients, beyond_host
from ds_vertical.offload.masters.compressed import low_file_bytes
from ds_vertical.offload.speculation import StepTiming
from ds_vertical.offload.state_files import StepShare
from ds_vertical.offload.step_pipeline import PipelineSettings, StepPipeline
from ds_vertical.offload.stepper import Stepper, Updates, bytes_read
from ds_vertical.planner import memory_budget
from ds_vertical.schedule.events import DELAYED, EVERYTHING, Unit
from ds_vertical.schedule.trace import Tracer
from ds_vertical.types import RunSettings

_KERNEL_IDS = 1 << 20  # ids of our own kernel's objects: beyond those that DeepSpeed counts up, in case they share a table


class VerticalStage3(ChunkedStage3):
    """Stage 3 whose sub-groups are chunks of one unit (a layer, or what lies outside the layers).

    Here are DeepSpeed's methods that it overrides, and its life: set-up, flush, end. `driver` takes the steps. Numbers are
    those of stock's own sub-groups: the norm is combined in stock's grouping and CPU Adam is cut as in `chunking`.

    Public attributes: `timing`, `condition`, `calls`, `live`, `checksums` from the start on; `driver`, `stepper`, `pipeline`,
    `kernel`, `slots`, `further_slots`, `gradients`, `holding` and `gradients_on_ssd` from `start_pipeline` on. `is_owing`:
    whether `close` has still to take the last steps: it has neither taken them nor failed at it.
    """

    is_owing = True

    def __init__(self, *args: Any, layers: LayerMap, vertical: RunSettings, **kwargs: Any) -> None:
        self._vertical, self.compresses = vertical, vertical.optimizer_compression
        stops = vertical.on_nonfinite == "stop"
        self._new_timing = partial(StepTiming, vertical.optimizer_delay, vertical.optimizer_speculation, stops=stops)
        self.timing = self._new_timing(certain=False, in_files=False)  # another where the state turns out to be on SSD
        self.condition, self.calls = StateGuard(), Calls()
        self.live = LiveState(self.condition, self.calls)
        self.checksums = Checksums(vertical.verify)  # of this rank's files of state and parameters
        self.after_writes = [self.checksums.clear]
        self._dynamic_scale = bool(kwargs.get("dynamic_loss_scale"))
        super().__init__(*args, layers=layers, host_share=vertical.optimizer_host_share, **kwargs)

    def start_pipeline(
        self, new_queue: Callable[[], DiskQueue], updates: Updates, tracer: Tracer, begin: Callable[[], None]
    ) -> None:
        """Make the optimizer's own pipeline; `updates` takes the new parameters, `begin` is called on its thread."""
        ranks.own_group(REDUCTIONS)  # not first where one rank's step has failed ahead of it
        units, chunks_of = self.layer_map.units, self.scheduled_chunks_of
        if (levels := self._vertical.levels).are_on:
            self.level_reductions = LevelReductions(levels, map(self.reductions, units), self.gradient_accumulation_dtype)
        early_share = 1.0 - self.timing.delay if self.timing.possible else 0.0
        chunks = make_chunks(self, early_share, self.timing.generations)
        share: StepShare = "delayed" if self.timing.final else "all"
        waiting: dict[Unit, list[Part]] = {unit: [p for i in chunks_of(unit) for p in chunks[i].parts(share)] for unit in units}
        beyond = beyond_host(waiting, self._vertical.gradient_host_share)
        self.holding = None if not beyond else DELAYED if self.timing.final else EVERYTHING
        numel = sum(part.numel for parts in waiting.values() for part in parts)
        self.gradients_on_ssd = sum(part.numel for part in beyond) / (numel or 1)  # of those that wait
        file = GradientFile(zero_optimizer.gradient_file(self) if beyond else Path(), beyond, new_queue, self.checksums)
        for path, num_bytes in file.sizes.items():
            stripes.spread_file(path, num_bytes)
        disk_check.require(file.sizes)
        self.gradients = HeldGradients(
            chunks,
            file,
            self._vertical.keep_gradients,
            page_locked=accelerator.device_name() != "cpu",
            leaves_beside=self._vertical.prefetch_layers > 0,
        )
        sizes, overlap = bytes_read(chunks, file.extents), self._vertical.overlap
        self.slots = [pinned_memory.lock_host_bytes(max(sizes)) for _ in range(memory_budget.num_slots(len(sizes), overlap))]
        self.further_slots = _further_slots(self._vertical.optimizer_read_ahead_bytes or 0, max(sizes, default=0))
        adam = self.optimizer
        assert isinstance(adam, DeepSpeedCPUAdam)  # see `check_optimizer`
        self.kernel = own_kernel(adam)
        settings = PipelineSettings(tracer, begin, self.checksums, overlap, self.further_slots)
        self.pipeline = StepPipeline(self.slots, new_queue(), new_queue(), settings)
        self._updates = updates
        self.stepper = Stepper(chunks, self.kernel, self.pipeline, updates, self.checksums, overlap=overlap)
        self.live.watch(lambda: self.stepper.torn, self.pipeline, updates)
        powers = Powers.made_with(self.optimizer.defaults["betas"])
        self.driver = StepDriver(self, self.stepper, self.pipeline, self.gradients, powers)

    def describe(self) -> str:
        """When the optimizer steps, for the start-up line."""
        return f"{self.timing.describe()}; pipeline {self.host_bytes}"

    @property
    def host_bytes(self) -> int:
        """Bytes of the pipeline's slots and of held gradients."""
        return sum(slot.numel() for slot in (*self.slots, *self.further_slots)) + self.gradients.num_bytes

    # ---- set-up

    def initialize_ds_offload(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As stock, then check every parameter file that zero.Init wrote before anything is read from one. From then on a
        direct call of the model is refused in a forked child."""
        offload = super().initialize_ds_offload(module, *args, **kwargs)
        engine.check_forwards(offload, partial(self.calls.check_process, "module"))
        written = [zero_params.swap_file(param) for param in module.parameters() if zero_params.is_on_ssd(param)]
        files.check_files({file.path: file.num_bytes for file in written})
        return offload

    def _configure_tensor_swapping(self, offload_optimizer_config: Any, aio_config: Any) -> None:  # override
        """As stock with no more buffers than its own uses need, then preallocate every file of the optimizer."""
        plain = {
            "buffer_count": memory_budget.STOCK_BUFFERS,
            "pipeline_read": False,
            "pipeline_write": False,
            "pipeline": False,
        }
        with swap_handles.set_up_below(offload_optimizer_config) as below:
            super()._configure_tensor_swapping(below.model_copy(update=plain), aio_config)
        swap_handles.hold_optimizer(self, offload_optimizer_config, below)
        self._allocate_files()

    def _allocate_files(self) -> None:
        """Files of one generation; of two where early steps need them, and every rank has room or the JSON asks for them."""
        dynamic_scale = self._dynamic_scale and self.dtype == torch.float16  # other dtypes have a static one, whatever is asked
        certain = self.clip_grad == 0.0 and not dynamic_scale
        scheduled = [i for i in range(len(self.fp16_groups)) if not self.is_persistent_chunk(i)]
        on_ssd = partial(zero_optimizer.is_chunk_on_ssd, self)
        in_files = self.swap_optimizer and (not self._vertical.optimizer_host_share or any(map(on_ssd, scheduled)))
        self.timing = self._new_timing(certain=certain, in_files=in_files)
        early = [chunk for index, chunk in enumerate(self.fp16_groups) if on_ssd(index)]  # state in memory is stepped late
        stepped = [param for chunk in early for param in chunk if zero_params.is_on_ssd(param)]
        shards = {zero_params.second_generation(f.path): f.num_bytes for f in map(zero_params.swap_file, stepped)}
        one, both = (zero_optimizer.optimizer_files(self, n) | low_file_sizes(self, n) for n in (1, 2))
        for path, num_bytes in both.items():
            stripes.spread_file(path, num_bytes)
        for path, num_bytes in shards.items():
            stripes.spread_file(path, num_bytes, whole=True)
        disk_check.make_files(self.timing, one, both | shards)

    def _setup_for_real_optimizer(self) -> None:  # override
        zero_optimizer.set_up(self)

    # ---- gradients

    def create_reduce_and_remove_grad_hooks(self) -> None:  # override
        """None: the schedule reduces each unit once. (Stock also reads every parameter here to install its hooks.)"""
        self.leaf_parameters = defaultdict(list)

    def _get_norm_groups(self) -> list[torch.Tensor]:  # override
        """Stock rounds the norm to fp32 once per sub-group, so it is combined in stock's grouping, not in chunks."""
        return zero_optimizer.group_norms(self, self.stock_groups)

    def held_share(self, param: nn.Parameter) -> torch.Tensor | None:
        """See `StateRoutes.held_share`."""
        for index, chunk in enumerate(self.fp16_groups):
            for place, member in enumerate(chunk):
                if member is param:
                    if ticket := self.driver.backlog.ahead.get(self._unit_of[id(param)]):
                        ticket.wait()  # so that it is given up on every rank or on none: gathering is a collective
                    return self.gradients.share(index, place)
        return None

    def step(self, closure: Any = None) -> None:  # override
        """Conclude the step that the schedule opened; the engine calls this where stock would take the whole step."""
        if not self.driver.phase.counts:
            raise RuntimeError("optimizer.step() outside a schedule: call engine.train_batch(data_iter)")
        self.driver.transition(StepPhase.IDLE)
        zero_optimizer.close_step(self)

    # ---- outside the schedule

    def flush(self) -> None:
        """Take the steps of units that the last train_batch left due, and bring all state to where it rests.

        Every use of the weights, gradients or state outside a schedule calls this first."""
        if self.live.num_inside and self.calls.is_mine:
            return
        driver, backlog = self.driver, self.driver.backlog
        with self.calls.joined("flush"):
            if backlog.settled:
                self.live.check_whole()
                self.pipeline.wait_idle()
                self.pipeline.reads.give_memory_back()  # of a step that failed
                return
            self.calls.leaves(FLUSHED)
            with contextlib.ExitStack() as finally_:
                finally_.callback(self.gather_persistent, settled=True)  # all ranks are in it, whatever has failed on this one
                self.live.check_whole()
                with self.live.schedule_running():
                    for unit in backlog.due:
                        if ticket := driver.step_ahead(unit):  # the next forward waits for it where an interrupt ends this wait
                            ticket.wait()
                        self._updates.close_updates()
                    self.stepper.complete()
                    self.pipeline.reads.give_memory_back()
            backlog.ahead.clear()
            backlog.settled = True

    def flush_state(self) -> None:
        """`flush`, and all optimizer state in the files in which DeepSpeed looks for it. Raises RuntimeError within a step that
        finds compressed masters there."""
        self.flush()
        if self.stepper.masters is not None:
            self.live.refuse_compressed_inside("a use of optimizer state")
        if not self.live.num_inside:
            self.stepper.gather_state()
            self.pipeline.reads.give_memory_back()  # its jobs may have had further slots

    def close(self) -> None:
        """`flush_state` (state may be read after it) unless a step is under way, then end the pipeline's thread and give its
        memory back; harmless when called twice. Where KeyboardInterrupt or SystemExit cuts `flush_state` all stays, and the
        next call ends it."""
        if not hasattr(self, "pipeline"):
            self.is_owing = False  # the engine's construction failed
            return
        try:
            if self.is_owing and self.live.failure is None and not self.live.apart and not self.live.is_inside:
                self.flush_state()
            self.is_owing = False
        except Exception:
            self.is_owing = False
            raise
        finally:
            if not self.is_owing:
                with contextlib.ExitStack() as finally_:  # each of them, whatever the others raise; the last one first
                    finally_.callback(_unlock, self.slots)
                    finally_.callback(_rest, self.further_slots)
                    finally_.callback(self.kernel.close)
                    finally_.callback(self.gradients.close)
                    if self.level_reductions is not None:
                        finally_.callback(self.level_reductions.close)
                    finally_.callback(self.pipeline.close)


def low_file_sizes(optimizer: ChunkedStage3, generations: int) -> dict[Path, int]:
    """The files of compressed masters, with their sizes in bytes; none where masters stay whole."""
    chunks = range(len(optimizer.fp16_groups)) if optimizer.compresses else ()
    return {
        path: low_file_bytes(zero_optimizer.chunk_numel(optimizer, index), memory_budget.PART_ELEMENTS)
        for index in chunks
        if zero_optimizer.is_chunk_on_ssd(optimizer, index)
        for path in zero_optimizer.low_files(optimizer, index)[:generations]
    }


def _unlock(slots: list[torch.Tensor]) -> None:
    """Give them back, each of them, and forget them."""
    with contextlib.ExitStack() as finally_:
        while slots:
            finally_.callback(pinned_memory.unlock_host_bytes, slots.pop())


def _further_slots(num_bytes: int, each: int) -> list[torch.Tensor]:
    """So many slots of `each` bytes as `num_bytes` hold, for state that is read before the norm; see [Note: further slots] in
    `state_prefetch`. None, with a line in the log, where the system has no such memory."""
    if not each or num_bytes < each:
        return []
    stride = -(-each // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        memory = pinned_memory.map_host_bytes(num_bytes // each * stride)
    except OSError as error:
        accelerator.log(f"ds_vertical: no state is read before the norm: {error}")
        return []
    return [memory.narrow(0, start, each) for start in range(0, memory.numel(), stride)]


def _rest(slots: list[torch.Tensor]) -> None:
    """Give their memory back, and forget them."""
    for slot in slots:
        host.rest_pages(slot.data_ptr(), slot.numel())
    slots.clear()


def own_kernel(adam: DeepSpeedCPUAdam, number: int = 1) -> CpuAdam:
    """CPU Adam outside the interpreter lock, with the settings of DeepSpeed's optimizer object. `number`: from 1 on, of an
    engine's objects."""
    module, kernel_id = load.free_adam(), number * _KERNEL_IDS + adam.opt_id
    group = adam.defaults
    rates = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    module.create_adam(kernel_id, *rates, adam.adam_w_mode, False)
    return CpuAdam(module, kernel_id, group["betas"])
