"""DeepSpeed's ZeRO stage-3 optimizer with chunks along layers, gradients held in host memory and a step taken unit by unit.

Overridden private methods of DeepSpeed are marked `override` and listed in `compat.deepspeed_members`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_vertical.compat import accelerator, pinned_memory, zero_optimizer, zero_params
from ds_vertical.compat.ops import load
from ds_vertical.config.resolve import Resolved
from ds_vertical.distributed import ranks
from ds_vertical.engine import disk_check
from ds_vertical.engine.call_guard import FLUSHED, Calls
from ds_vertical.engine.zero3.chunks import ChunkedStage3, make_chunks
from ds_vertical.errors import NonFiniteError, StorageError
from ds_vertical.interrupts import Changed
from ds_vertical.io import files
from ds_vertical.io.aio import DiskQueue
from ds_vertical.io.checksums import ChecksumError, Checksums
from ds_vertical.io.ticket import Ticket
from ds_vertical.model.layers import LayerMap
from ds_vertical.offload.consistency import WHOLE, StateGuard
from ds_vertical.offload.cpu_adam import AdamSettings, CpuAdam, Powers
from ds_vertical.offload.grad_store import GradientFile, HeldGradients, beyond_host
from ds_vertical.offload.speculation import StepTiming
from ds_vertical.offload.state_files import StepShare
from ds_vertical.offload.step_pipeline import StepPipeline
from ds_vertical.offload.stepper import PendingStep, Stepper, Updates, bytes_read
from ds_vertical.planner import memory_budget
from ds_vertical.schedule.events import DELAYED, EVERYTHING, Unit
from ds_vertical.schedule.trace import Tracer

_KERNEL_IDS = 1 << 20  # ids of our own kernel's objects: beyond those that DeepSpeed counts up, in case they share a table


class VerticalStage3(ChunkedStage3):
    """Stage 3 whose sub-groups are chunks of one unit (a layer, or what lies outside the layers).

    A step is `open_step` (norm, overflow), then `step_unit` for each unit, at once or in the next forward. Numbers are
    those of stock's own sub-groups: the norm is combined in stock's grouping and CPU Adam is cut as in `chunking`.
    """

    def __init__(self, *args: Any, layers: LayerMap, vertical: Resolved, **kwargs: Any) -> None:
        self._vertical = vertical
        stops = vertical.on_nonfinite == "stop"
        self._new_regime = partial(StepTiming, vertical.optimizer_delay, vertical.optimizer_speculation, stops=stops)
        self.regime = self._new_regime(certain=False, on_ssd=False)  # another where the state turns out to be on SSD
        self.condition, self.calls = StateGuard(), Calls()
        self.checksums = Checksums(vertical.verify)  # of this rank's files of state and parameters
        self._dynamic_scale = bool(kwargs.get("dynamic_loss_scale"))
        self._tried = self._hit = False  # whether parts of this step have been taken early; count, and are not committed yet
        self._share: StepShare = "delayed"  # of every unit that is due
        self.counts = False  # a step has been decided, be it to skip it, that the engine has not counted yet
        self._apart = False  # the ranks have not agreed that all is well since one of them failed
        self._settled = True  # nothing due, nothing in flight
        self._due: PendingStep | None = None
        self._left: dict[Unit, None] = {}  # units whose step is due, in the order of their next use
        self._ahead: dict[Unit, Ticket] = {}  # steps issued for the next forward, which has not taken them over yet
        self._norm_memory = zero_optimizer.NormMemory()
        self._inside = self.num_reductions = self.num_decided = 0  # running schedules; units reduced, steps that count
        super().__init__(*args, layers=layers, **kwargs)

    def start_pipeline(
        self, new_queue: Callable[[], DiskQueue], updates: Updates, tracer: Tracer, begin: Callable[[], None]
    ) -> None:
        """Make the optimizer's own pipeline; `updates` takes the new parameters, `begin` is called on its thread."""
        early_share = 1.0 - self.regime.delay if self.regime.possible else 0.0
        chunks = make_chunks(self, self._stock_groups, early_share, self.regime.generations)
        share: StepShare = "delayed" if self.regime.final else "all"
        units, chunks_of = self._layer_map.units, self.scheduled_chunks_of
        waiting = {unit: [p for i in chunks_of(unit) for p in chunks[i].parts(share)] for unit in units}
        beyond = beyond_host(waiting, self._vertical.gradient_host_share)
        self.holding = None if not beyond else DELAYED if self.regime.final else EVERYTHING
        numel = sum(part.numel for parts in waiting.values() for part in parts)
        self.gradients_on_ssd = sum(part.numel for part in beyond) / (numel or 1)  # of those that wait
        file = GradientFile(zero_optimizer.gradient_file(self) if beyond else Path(), beyond, new_queue, self.checksums)
        disk_check.require(file.sizes)
        self.gradients = HeldGradients(chunks, file, self._vertical.keep_gradients, accelerator.device_name() != "cpu")
        sizes = bytes_read(chunks, file.extents)
        overlap = self._vertical.overlap
        self._slots = [pinned_memory.lock_host_bytes(max(sizes)) for _ in range(memory_budget.num_slots(len(sizes), overlap))]
        self._pipeline = StepPipeline(self._slots, new_queue(), new_queue(), tracer, begin, self.checksums, overlap)
        self._updates = updates
        made_of = (chunks, self._kernel(self.optimizer), self._pipeline, updates, self.checksums)
        self._stepper = Stepper(*made_of, overlap=overlap)
        self.powers = Powers.made_with(self.optimizer.defaults["betas"])

    def _kernel(self, adam: Any) -> CpuAdam:
        """CPU Adam outside the interpreter lock, with the settings of DeepSpeed's optimizer object."""
        module, kernel_id = load.free_adam(), _KERNEL_IDS + adam.opt_id
        group = adam.defaults
        rates = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        module.create_adam(kernel_id, *rates, adam.adam_w_mode, False)
        self._destroy_kernel = lambda: module.destroy_adam(kernel_id)
        return CpuAdam(module, kernel_id, group["betas"])

    def describe(self) -> str:
        """When the optimizer steps, for the start-up line."""
        return f"{self.regime.describe()}; pipeline {self.host_bytes}"

    @property
    def host_bytes(self) -> int:
        """Bytes of the pipeline's slots and of held gradients."""
        return sum(slot.numel() for slot in self._slots) + self.gradients.num_bytes

    # ---- set-up

    def initialize_ds_offload(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As stock, then check every parameter file that zero.Init wrote before anything is read from one."""
        offload = super().initialize_ds_offload(module, *args, **kwargs)
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
        super()._configure_tensor_swapping(offload_optimizer_config.model_copy(update=plain), aio_config)
        self._allocate_files()

    def _allocate_files(self) -> None:
        """Files of one generation; of two where early steps need them, as long as every rank has room or somebody asked."""
        dynamic_scale = self._dynamic_scale and self.dtype == torch.float16  # other dtypes have a static one, whatever is asked
        certain = self.clip_grad == 0.0 and not dynamic_scale
        self.regime = self._new_regime(certain=certain, on_ssd=self.swap_optimizer)
        stepped = [param for chunk in self.fp16_groups for param in chunk if zero_params.is_on_ssd(param)]
        shards = {zero_params.second_generation(f.path): f.num_bytes for f in map(zero_params.swap_file, stepped)}
        one, both = (zero_optimizer.optimizer_files(self, generations) for generations in (1, 2))
        disk_check.make_files(self.regime, one, both | shards)

    def _setup_for_real_optimizer(self) -> None:  # override
        zero_optimizer.set_up(self)

    # ---- gradients

    def create_reduce_and_remove_grad_hooks(self) -> None:  # override
        """None: the schedule reduces each unit once. (Stock also reads every parameter here to install its hooks.)"""
        self.leaf_parameters = defaultdict(list)

    def reduce_unit(
        self, unit: Unit, sums: Sequence[torch.Tensor], flat: torch.Tensor, give_back: Callable[[torch.Tensor], None]
    ) -> bool:
        """Average a unit's summed gradients over the ranks and hold each rank's share until its step.

        `sums`: one flat sum per parameter of `in_chunk_order(unit)`, in the accumulation dtype (overwritten), all of them
        neighbours in `flat`. Returns whether `flat` itself is held now: then it goes to `give_back`, from any thread.
        """
        params = self.in_chunk_order(unit)
        shares = zero_optimizer.reduce(self, params, sums) if params else []
        self.num_reductions += 1  # not before: an error ahead of the collective leaves the other ranks alone in it
        if not params:
            return False
        for param, share in zip(params, shares, strict=True):
            zero_optimizer.note_gradient(self, param, share, self._norm_memory)
        early = self.regime.early
        final = early and self.regime.final and self.clip_grad == 0.0
        return self.gradients.hold(unit, self.chunks_of(unit), shares, flat, give_back, early=early, final=final)

    def hold_unit(self, unit: Unit) -> Ticket | None:
        """Start writing what of a unit's gradients waits on SSD."""
        return self.gradients.write(unit)

    def _get_norm_groups(self) -> list[torch.Tensor]:  # override
        """Stock rounds the norm to fp32 once per sub-group, so it is combined in stock's grouping, not in chunks."""
        return [zero_optimizer.group_norm(self, group) for group in self._stock_groups]

    def held_share(self, param: Any) -> torch.Tensor | None:  # for the routes
        for index, chunk in enumerate(self.fp16_groups):
            for place, member in enumerate(chunk):
                if member is param:
                    if ticket := self._ahead.get(self._unit_of[id(param)]):
                        ticket.wait()  # so that it is given up on every rank or on none: gathering is a collective
                    return self.gradients.share(index, place)
        return None

    # ---- the step

    @property
    def due(self) -> tuple[Unit, ...]:
        """Units whose step of the last train_batch has not been issued yet."""
        return tuple(self._left)

    @property
    def pending(self) -> tuple[Unit, ...]:
        """Units whose step of the last train_batch nobody has waited for: issued for the next forward, or due."""
        return (*self._ahead, *self._left)

    def open_step(self) -> None:
        """Take the global norm and decide whether the step is skipped (non-finite norm, overflow); else what is not
        stepped early is due. Raises NonFiniteError instead of skipping where the regime stops; OtherRankError where another
        rank's part of the step has failed. What stays on the device is back there, also where all ranks raise."""
        with self.agreed("train_batch"):
            if self._left:
                raise RuntimeError(f"units {list(self._left)} have not taken the step before this one")
        self._settled = False  # the persistent parameters have been partitioned, whatever comes of the norm
        guess = float(self.loss_scale)  # before it is updated
        scale_as_before = partial(zero_optimizer.set_loss_scaler_numbers, self, zero_optimizer.loss_scaler_numbers(self))
        with Changed(lambda: self.counts or scale_as_before(), only_if_failed=True):
            norm = zero_optimizer.open_step(self)
            self._norm_memory.clear()
            if norm is None and self.regime.stops:
                error = NonFiniteError('the norm of the gradients is not finite, and vertical_schedule.on_nonfinite is "stop"')
                ranks.raise_after(error, self.gather_persistent)
            with self.agreed("train_batch", self.gather_persistent):
                if norm is not None:
                    self._let_count(zero_optimizer.combined_scale(self, norm), guess)
                else:
                    self.counts = True
                    self.regime.note(self._tried, False)
                    if not self._tried:
                        self.gradients.conclude((), hit=False)

    def _let_count(self, scale: Any, guess: float) -> None:
        came_true = float(scale) == guess
        self.regime.note(self._tried, came_true)
        settings = self._settings()
        with self.condition.torn_if_interrupted():
            self.counts = True
            due = self._decide(settings, scale, hit=came_true and self._tried)
            self.step_persistent(lambda unit, chunks: self._stepper.step(unit, chunks, due, "all"))

    def _decide(self, settings: list[AdamSettings], scale: Any, hit: bool) -> PendingStep:
        """The step counts: all chunks are one step further, and what has not been stepped early is due."""
        for index, setting in enumerate(settings):
            zero_optimizer.moments(self, index)["step"] = setting.step
        self.powers = settings[-1].powers
        self._due = due = PendingStep(settings, self.gradients, None if float(scale) == 1.0 else 1.0 / scale)
        self._share = "delayed" if hit else "all"
        share, chunks, units = self._share, self._stepper.chunks, self._layer_map.units
        self._left = dict.fromkeys(u for u in units if any(chunks[i].parts(share) for i in self.scheduled_chunks_of(u)))
        self._hit = hit
        self.num_decided += 1
        return due

    def _settings(self) -> list[AdamSettings]:
        """Per chunk the hyper-parameters of the step that is being taken, with the powers of beta that stock has then: it goes
        from group to group, as chunks are numbered."""
        settings, powers = [], self.powers
        for index in range(len(self.fp16_groups)):
            group = zero_optimizer.parameter_group(self, index)
            powers = powers.after(zero_optimizer.moments(self, index)["step"] + 1, *group["betas"])
            settings.append(AdamSettings.of_group(group, powers))
        return settings

    def step_early(self, unit: Unit) -> Ticket | None:
        """Issue the early parts of a unit whose gradient is complete; `conclude_early` says whether they count."""
        self._tried = True
        guess = float(self.loss_scale)  # the divisor, if the norm asks for no clipping
        due = PendingStep(self._settings(), self.gradients, None if guess == 1.0 else 1.0 / guess)
        return self._stepper.step(unit, self.scheduled_chunks_of(unit), due, "early")

    def early_writes(self) -> Ticket | None:
        """What of the early steps is on its way to the second generation; None where there is nothing."""
        return Ticket("early writes", self._complete) if self._tried and self.regime.generations > 1 else None

    def _complete(self) -> None:
        self._pipeline.drain()
        self._updates.close_updates()

    def conclude_early(self) -> None:
        """Commit the early steps if the norm has left the factor they were taken with; else discard them. A step that
        counts is then due whole."""
        if hit := self._hit:
            with self.condition.torn_if_interrupted():  # masters that count and parameters that do not
                self._stepper.commit()
        else:
            self._stepper.discard()
        self._hit = False
        self.gradients.conclude(self._left, hit)
        if self._left and self._stepper.torn:
            raise RuntimeError("steps taken in place have not come true: clipping or the loss scale were changed in mid-step")

    def expect_step(self, unit: Unit, early: bool) -> None:
        if early or unit in self._left:
            self._stepper.expect(unit, self.scheduled_chunks_of(unit), "early" if early else self._share)

    def step_unit(self, unit: Unit) -> Ticket | None:
        """Issue what is due of a unit: read state, CPU Adam, write state and parameters."""
        if unit not in self._left or self._due is None:
            return None
        with self.condition.torn_if_interrupted():  # the unit's step is neither taken nor due
            ticket = self._stepper.step(unit, self.scheduled_chunks_of(unit), self._due, self._share)
            del self._left[unit]
        return ticket

    def step_ahead(self, unit: Unit) -> Ticket | None:
        """Issue what is due of a unit in the step that made it; the next forward waits for `stepped_ahead`."""
        with self.condition.torn_if_interrupted():  # nobody would wait for it
            if ticket := self.step_unit(unit):
                self._ahead[unit] = ticket
        return ticket

    def stepped_ahead(self, unit: Unit) -> Ticket | None:
        return self._ahead.pop(unit, None)

    def step(self, closure: Any = None) -> None:  # override
        """Conclude the step that the schedule opened; the engine calls this where stock would take the whole step."""
        if not self.counts:
            raise RuntimeError("optimizer.step() outside a schedule: call engine.train_batch(data_iter)")
        self.counts = self._tried = False
        zero_optimizer.close_step(self)

    # ---- outside the schedule

    @contextlib.contextmanager
    def schedule_running(self) -> Iterator[None]:
        """Within the block the schedule fetches parameters, and knows what is due: no flush. Raises as `check_whole`."""
        self.check_whole()
        with self.inside():
            try:
                yield
            except BaseException as error:
                if self._stepper.torn or isinstance(error, ChecksumError):
                    self.condition.tear(error)
                if self.failure is not None:
                    self.condition.tell(error)
                elif isinstance(error, (OSError, StorageError)):
                    error.add_note(WHOLE)
                raise

    @contextlib.contextmanager
    def agreed(self, what: str, then: Callable[[], None] = lambda: None) -> Iterator[None]:
        """As `ranks.all_or_none`. After another rank's failure nothing is done with it that it may not be there for."""
        self._apart = ranks.world_size() > 1
        with ranks.all_or_none(what, then):
            yield
        self._apart = False

    @property
    def failure(self) -> BaseException | None:
        """What kept a step from being completed: a transfer or computation of state or of new parameters."""
        return self.condition.failure or self._pipeline.error or self._updates.error

    def check_whole(self) -> None:
        """Raise where a step failed in part: what failed, if nobody has been told, else TornStateError."""
        if failure := self.failure:
            self.condition.refuse(failure)

    def abandon(self) -> None:
        """After an error in a schedule: complete what is in flight and let early steps not have been (in place, they have torn
        the state), unless the norm has made them count: the rest of that step is due. What failed beside the current state is
        forgotten with the early steps. Raises nothing; twice is harmless."""
        self._pipeline.wait_idle()
        if error := self.gradients.abandon(self._left):
            self.condition.tear(error)
        if self._hit and self.failure is None:
            self.conclude_early()
        else:
            self._stepper.discard()
            self._pipeline.recover()
        self._ahead.clear()  # complete, or torn
        self._tried = self._hit = False

    def flush(self) -> None:
        """Take what is left of the last step and bring all state to where it rests. Every use of the weights, gradients
        or state outside a schedule calls this first."""
        if self._inside and self.calls.is_mine:
            return
        with self.calls.joined("flush"):
            if self._settled:
                self.check_whole()
                return
            self.calls.leaves(FLUSHED)
            with contextlib.ExitStack() as finally_:
                finally_.callback(self.gather_persistent, settled=True)  # all ranks are in it, whatever has failed on this one
                with self.schedule_running():
                    for unit in tuple(self._left):
                        if ticket := self.step_ahead(unit):  # the next forward waits for it where an interrupt ends this wait
                            ticket.wait()
                        self._updates.close_updates()
                    self._complete()
            self._ahead.clear()
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
            if self.failure is None and not self._apart:
                self.flush_state()
        finally:
            self._pipeline.close()
            self.gradients.close()
            self._destroy_kernel()
            self._destroy_kernel = lambda: None
            while self._slots:
                pinned_memory.unlock_host_bytes(self._slots.pop())
