"""DeepSpeed's ZeRO stage-3 optimizer with chunks along layers, gradients held in host memory and a step taken unit by unit.

Overridden private methods of DeepSpeed are marked `override` and listed in `compat.OVERRIDES`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from ds_vertical import compat, compat_state, files, memory, native
from ds_vertical.adam import AdamSettings, CpuAdam
from ds_vertical.chunks import Cut, Piece, adam_cuts
from ds_vertical.config import ConfigError
from ds_vertical.disk import DiskQueue
from ds_vertical.held import HeldGradients
from ds_vertical.layers import LayerMap, Unit
from ds_vertical.pipeline import StepPipeline
from ds_vertical.regime import Regime
from ds_vertical.routes import StateRoutes
from ds_vertical.stepper import Chunk, Due, Share, Stepper, Updates, slot_bytes
from ds_vertical.storage import StorageError
from ds_vertical.trace import Tracer
from ds_vertical.transfer import Ticket

_STOCK_BUFFERS = memory.STOCK_BUFFERS
_SLOTS = memory.SLOTS
_KERNEL_IDS = 1 << 20  # ids of our own kernel's objects: beyond those that DeepSpeed counts up, in case they share a table
_PART_NUMEL = memory.PART_ELEMENTS
_TORN = (
    "the live state is torn: part of it has taken a step that the rest has not. It can be neither trained on nor read nor"
    " saved; build a new engine from the last weights or checkpoint that were saved"
)



class TornStateError(RuntimeError):
    """Some of the live state has taken a step that the rest has not, and cannot. `__cause__`: what failed."""


def check_optimizer(optimizer: Any) -> None:
    """Raise ConfigError unless `optimizer` is DeepSpeed's CPU Adam, whose rounding the chunks reproduce."""
    if type(optimizer) is not DeepSpeedCPUAdam:
        raise ConfigError(
            f"optimizer: got {type(optimizer).__name__}; vertical_schedule needs DeepSpeed's CPU Adam: write"
            ' "optimizer": {"type": "AdamW", ...} with zero_optimization.offload_optimizer set, and pass no other optimizer'
        )


class VerticalStage3(StateRoutes):
    """Stage 3 whose sub-groups are chunks of one unit (a layer, or what lies outside the layers).

    A step is `open_step` (norm, overflow), then `step_unit` for each unit, at once or in the next forward. Numbers are
    those of stock's own sub-groups: the norm is combined in stock's grouping and CPU Adam is cut as in `chunks`.
    """

    def __init__(
        self, *args: Any, layers: LayerMap, delay: float | None, speculation: bool | None, **kwargs: Any
    ) -> None:
        self._layers = layers
        self._wanted = (delay, speculation)
        self.regime = Regime(*self._wanted, certain=False, on_ssd=False)  # another where the state turns out to be on SSD
        self._dynamic_scale = bool(kwargs.get("dynamic_loss_scale"))
        self._tried = False  # whether parts of this step have been taken early
        self._hit = False  # whether they count, and have not been committed yet
        self._broken: BaseException | None = None
        self._share: Share = "delayed"  # of every unit that is due
        self._unit_of = layers.unit_of()
        self._stock_groups: list[list[compat.ZeroParam]] = []
        self._opened = False
        self._inside = 0
        self._settled = True  # nothing due, nothing in flight
        self._due: Due | None = None
        self._left: dict[Unit, None] = {}  # units whose step is due, in the order of their next use
        super().__init__(*args, **kwargs)
        self._stepped = {id(param) for chunk in self.fp16_groups for param in chunk}
        self._gradients = HeldGradients([[p.partition_numel() for p in chunk] for chunk in self.fp16_groups])

    def start_pipeline(self, reader: DiskQueue, writer: DiskQueue, updates: Updates, tracer: Tracer) -> None:
        """Make the optimizer's own pipeline; `updates` takes the new parameters."""
        chunks = [self._chunk(index, cuts) for index, cuts in enumerate(self._cut_chunks())]
        size = slot_bytes(chunks)
        count = min(_SLOTS, sum(len(c.early) + len(c.delayed) for c in chunks if c.files)) if size else 0
        self._slots = [compat.lock_host_bytes(size) for _ in range(count)]
        self._pipeline = StepPipeline(self._slots, reader, writer, tracer)
        self._updates = updates
        self._stepper = Stepper(chunks, self._kernel(self.optimizer), self._pipeline, updates)

    def _kernel(self, adam: Any) -> CpuAdam:
        """CPU Adam outside the interpreter lock, with the settings of DeepSpeed's optimizer object."""
        module, kernel_id = native.free_adam(), _KERNEL_IDS + adam.opt_id
        group = adam.defaults
        rates = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        module.create_adam(kernel_id, *rates, adam.adam_w_mode, False)
        self._destroy_kernel = lambda: module.destroy_adam(kernel_id)
        return CpuAdam(module, kernel_id)

    def describe(self) -> str:
        """When the optimizer steps, for the start-up line."""
        return f"{self.regime.describe()}; pipeline {self.host_bytes}"

    @property
    def host_bytes(self) -> int:
        """Bytes of the pipeline's slots and of held gradients."""
        return sum(slot.numel() for slot in self._slots) + self._gradients.num_bytes

    # ---- chunks

    def _create_fp16_sub_groups(self, params_group: list[nn.Parameter]) -> list[list[nn.Parameter]]:  # override
        """Chunks: parameters of one unit, split by sub_group_size. Stock's own sub-groups are remembered for the numerics."""
        self._stock_groups += super()._create_fp16_sub_groups(params_group)
        chunks: list[list[nn.Parameter]] = []
        for unit in self._layers.units:
            members = [param for param in params_group if self._unit_of[id(param)] == unit]
            if members:
                chunks += super()._create_fp16_sub_groups(members)
        return chunks

    def _cut_chunks(self) -> list[tuple[Cut, ...]]:
        place: dict[int, tuple[int, int]] = {}
        for group in self._stock_groups:
            total, offset = sum(param.partition_numel() for param in group), 0
            for param in group:
                place[id(param)] = (offset, total)
                offset += param.partition_numel()
        return [adam_cuts([Piece(p.partition_numel(), *place[id(p)]) for p in chunk]) for chunk in self.fp16_groups]

    def _chunk(self, index: int, cuts: Sequence[Cut]) -> Chunk:
        params = self.fp16_groups[index]
        sizes = [param.partition_numel() for param in params]
        on_ssd = compat_state.is_chunk_on_ssd(self, index)
        early_share = 1.0 - self.regime.delay if self.regime.possible and on_ssd else 0.0
        early, delayed = Chunk.shares(index, sizes, early_share, _PART_NUMEL)
        return Chunk(
            params,
            sizes,
            cuts,
            early,
            delayed,
            compat_state.file_numel(self, index) if on_ssd else sum(sizes),
            compat_state.state_files(self, index) if on_ssd else None,
            None if on_ssd else partial(compat_state.resident_state, self, index),
        )

    def steps(self, param: nn.Parameter) -> bool:
        """Whether the parameter belongs to the optimizer."""
        return id(param) in self._stepped

    def chunks_of(self, unit: Unit) -> list[int]:
        """Sub-group numbers of a unit's chunks, ascending."""
        return [index for index, chunk in enumerate(self.fp16_groups) if self._unit_of[id(chunk[0])] == unit]

    def in_chunk_order(self, unit: Unit) -> list[nn.Parameter]:
        """The unit's parameters that the optimizer has, chunk by chunk: so a chunk's gradient sums are neighbours."""
        return [param for index in self.chunks_of(unit) for param in self.fp16_groups[index]]

    # ---- set-up

    def initialize_ds_offload(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As stock, then check every parameter file that zero.Init wrote before anything is read from one."""
        offload = super().initialize_ds_offload(module, *args, **kwargs)
        written = [compat.swap_file(param) for param in module.parameters() if compat.is_on_ssd(param)]
        files.check_files({file.path: file.num_bytes for file in written})
        return offload

    def _configure_tensor_swapping(self, offload_optimizer_config: Any, aio_config: Any) -> None:  # override
        """As stock with no more buffers than its own uses need, then preallocate every file of the optimizer."""
        plain = {"buffer_count": _STOCK_BUFFERS, "pipeline_read": False, "pipeline_write": False, "pipeline": False}
        super()._configure_tensor_swapping(offload_optimizer_config.model_copy(update=plain), aio_config)
        self._allocate_files()

    def _allocate_files(self) -> None:
        """Files of one generation; of two where early steps may be taken, as long as there is room or somebody asked."""
        dynamic_scale = self._dynamic_scale and self.dtype == torch.float16  # other dtypes have a static one, whatever is asked
        certain = self.clip_grad == 0.0 and not dynamic_scale
        self.regime = Regime(*self._wanted, certain, self.swap_optimizer)
        one = compat_state.optimizer_files(self, 1)
        if self.regime.possible:
            stepped = [param for chunk in self.fp16_groups for param in chunk if compat.is_on_ssd(param)]
            shards = {compat.second_generation(f.path): f.num_bytes for f in map(compat.swap_file, stepped)}
            try:
                return files.preallocate(compat_state.optimizer_files(self, 2) | shards)
            except StorageError as error:
                if self.regime.demanded:
                    raise
                compat.log(f"ds_vertical: no early steps, for want of room for a second generation of files: {error}")
                self.regime.give_up()
        files.preallocate(one)

    def _setup_for_real_optimizer(self) -> None:  # override
        compat_state.set_up(self)

    # ---- gradients

    def create_reduce_and_remove_grad_hooks(self) -> None:  # override
        """None: the schedule reduces each unit once. (Stock also reads every parameter here to install its hooks.)"""
        self.leaf_parameters = defaultdict(list)

    def reduce_unit(self, unit: Unit, sums: Sequence[torch.Tensor], flat: torch.Tensor) -> bool:
        """Average a unit's summed gradients over the ranks and hold each rank's share until its step.

        `sums`: one flat sum per parameter of `in_chunk_order(unit)`, in the accumulation dtype (overwritten), all of them
        neighbours in `flat`. Returns whether `flat` itself is held now: then it comes back through `reclaim`.
        """
        params = self.in_chunk_order(unit)
        if not params:
            return False
        shares = compat_state.reduce(self, params, sums)
        kept = self._gradients.hold(unit, self.chunks_of(unit), shares, flat)
        held = [view for index in self.chunks_of(unit) for view in self._gradients.views(index)]
        for param, share, view in zip(params, shares, held, strict=True):
            compat_state.note_gradient(self, param, share, view)
        return kept

    def reclaim(self, unit: Unit) -> torch.Tensor | None:
        """Give the memory back that `reduce_unit` kept, for the unit's next sums."""
        return self._gradients.reclaim(unit)

    def _get_norm_groups(self) -> list[torch.Tensor]:  # override
        """Stock rounds the norm to fp32 once per sub-group, so it is combined in stock's grouping, not in chunks."""
        return [compat_state.group_norm(self, group) for group in self._stock_groups]

    def held_share(self, param: Any) -> torch.Tensor | None:  # for the routes
        for index, chunk in enumerate(self.fp16_groups):
            for place, member in enumerate(chunk if self._gradients.holds(index) else ()):
                if member is param:
                    return self._gradients.views(index)[place]
        return None

    # ---- the step

    @property
    def due(self) -> tuple[Unit, ...]:
        """Units whose step of the last train_batch has not been issued yet."""
        return tuple(self._left)

    def open_step(self) -> None:
        """Take the global norm and decide whether the step is skipped (non-finite norm, overflow); else what is not
        stepped early is due."""
        if self._left:
            raise RuntimeError(f"units {list(self._left)} have not taken the step before this one")
        self._settled = False  # the persistent parameters have been partitioned, whatever comes of the norm
        guess = self._scale_guess()  # before the loss scale is updated
        norm = compat_state.open_step(self)
        self._opened, self._hit = True, False
        if norm is None:
            self.regime.note(self._tried, False)
            return
        scale = compat_state.combined_scale(self, norm)
        settings = self._settings()
        for index, setting in enumerate(settings):
            compat_state.moments(self, index)["step"] = setting.step
        self._hit = float(scale) == guess
        self.regime.note(self._tried, self._hit)
        self._due = Due(settings, self._gradients, None if float(scale) == 1.0 else 1.0 / scale)
        self._hit = self._hit and self._tried
        whole = not self._hit
        self._share = "all" if whole else "delayed"
        chunks = self._stepper.chunks
        self._left = dict.fromkeys(
            u for u in self._layers.units if any(chunks[i].parts(self._share) for i in self.chunks_of(u))
        )

    def _settings(self) -> list[AdamSettings]:
        """Per chunk the hyper-parameters of the step that is being taken."""
        return [
            AdamSettings.of_group(compat_state.parameter_group(self, index), compat_state.moments(self, index)["step"] + 1)
            for index in range(len(self.fp16_groups))
        ]

    def _scale_guess(self) -> float:
        """What the gradients are divided by if the norm asks for no clipping."""
        return float(self.loss_scale)

    def step_early(self, unit: Unit) -> Ticket | None:
        """Issue the early parts of a unit whose gradient is complete; `conclude_early` says whether they count."""
        self._tried = True
        guess = self._scale_guess()
        due = Due(self._settings(), self._gradients, None if guess == 1.0 else 1.0 / guess)
        return self._stepper.step(unit, self.chunks_of(unit), due, "early")

    def conclude_early(self) -> None:
        """Commit the early steps if the norm has left the factor they were taken with; else discard them. A step that
        counts is then due whole."""
        if self._hit:
            self._hit = False
            self._stepper.commit()
        else:
            self._stepper.discard()

    def step_unit(self, unit: Unit) -> Ticket | None:
        """Issue what is due of a unit: read state, CPU Adam, write state and parameters."""
        if unit not in self._left:
            return None
        assert self._due is not None
        del self._left[unit]
        try:
            return self._stepper.step(unit, self.chunks_of(unit), self._due, self._share)
        except BaseException as error:  # an interrupt, too: the unit's step is neither taken nor due
            self._broken = error
            raise

    def step(self, closure: Any = None) -> None:  # override
        """Conclude the step that the schedule opened; the engine calls this where stock would take the whole step."""
        if not self._opened:
            raise RuntimeError("optimizer.step() outside a schedule: call engine.train_batch(data_iter)")
        self._opened = self._tried = False
        compat_state.close_step(self)

    # ---- outside the schedule

    @contextlib.contextmanager
    def schedule_running(self) -> Iterator[None]:
        """Within the block parameters are fetched by the schedule, which knows what is due: nothing is flushed.

        Raises TornStateError ahead of the block where an earlier step has failed.
        """
        self.check_whole()
        self._inside += 1
        try:
            yield
        except BaseException as error:
            if self.failure is not None:
                error.add_note(_TORN)
            raise
        finally:
            self._inside -= 1

    @property
    def failure(self) -> BaseException | None:
        """What kept a step from being completed: a transfer or computation of state or of new parameters."""
        return self._broken or self._pipeline.error or self._updates.error

    def check_whole(self) -> None:
        """Raise TornStateError where a step failed in part. Nothing may read the live state then, or save it."""
        if failure := self.failure:
            raise TornStateError(f"{_TORN}; what failed: {type(failure).__name__}: {failure}") from failure

    def abandon(self) -> None:
        """After an error in a schedule: complete what is in flight and let early steps not have been, unless the norm has
        been taken and made them count: the rest of that step is due. Raises nothing."""
        self._pipeline.wait_idle()
        if self._hit and self.failure is None:
            self.conclude_early()
        else:
            self._stepper.discard()
        self._tried = self._hit = False

    def flush(self) -> None:
        """Take what is left of the last step and bring all state to where it rests. Every use of the weights, gradients
        or state outside a schedule calls this first."""
        if not self._inside:
            self.check_whole()
        if self._inside or self._settled:
            return
        with self.schedule_running():
            for unit in tuple(self._left):
                ticket = self.step_unit(unit)
                if ticket is not None:
                    ticket.wait()
                self._updates.close_updates()
            self._pipeline.drain()
            self._updates.close_updates()
            compat_state.gather_persistent(self)
        self._settled = True

    def flush_state(self) -> None:
        """`flush`, and all optimizer state in the files in which DeepSpeed looks for it."""
        self.flush()
        if not self._inside:
            self._stepper.gather_state()

    def close(self) -> None:
        """`flush_state`, then end the pipeline's thread and give its memory back; harmless when called twice."""
        if not hasattr(self, "_pipeline"):
            return
        try:
            if self.failure is None:
                self.flush_state()
        finally:
            self._pipeline.close()
            self._destroy_kernel()
            self._destroy_kernel = lambda: None
            while self._slots:
                compat.unlock_host_bytes(self._slots.pop())
