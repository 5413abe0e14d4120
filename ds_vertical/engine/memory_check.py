"""The memory budget of a run that is about to start: its model and JSON in the terms of `memory_budget`, against what the host
has.

Activations are left out: how large they are shows with the first batch. So what is asked of a device is the least that it
needs: the logits of a large vocabulary come on top.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from ds_vertical.compat import accelerator, gradient_norm, stock_config, zero_params
from ds_vertical.config.file import DeepSpeedJson, num_micro_batches
from ds_vertical.config.section import SECTION
from ds_vertical.distributed import ranks as distributed_ranks
from ds_vertical.engine.budget.changed import with_key
from ds_vertical.engine.budget.freed import freed_bytes
from ds_vertical.engine.budget.further import acco_items, compression_items, level_items
from ds_vertical.engine.budget.room import host_room
from ds_vertical.engine.budget.zero_init import with_buffers
from ds_vertical.engine.zero3.planned_chunks import PlannedChunk, PlannedShards
from ds_vertical.errors import MemoryBudgetError
from ds_vertical.io import host
from ds_vertical.model.layers import LayerMap
from ds_vertical.offload.chunking import ALIGNMENT, FP32_BYTES, boundary, split_chunk
from ds_vertical.offload.masters.compressed import low_file_bytes, value_bytes
from ds_vertical.offload.speculation import StepTiming
from ds_vertical.planner import memory_budget
from ds_vertical.planner.budget.check import check_budget
from ds_vertical.planner.budget.fewer import FewerMicroBatches
from ds_vertical.planner.memory_budget import STATE_SHARE, STATE_SHARES, USED_BY_READING, BudgetItem, BudgetTerms
from ds_vertical.planner.model_shape import ModelShape, SufShape
from ds_vertical.schedule.events import Unit
from ds_vertical.types import NORM_ELEMENTS, PRE, SUF, Placement, RunSettings, TensorKind, Tier

_MOMENTS: Final = 3  # master, exp_avg, exp_avg_sq
# In the limit that is advised, where it is more than the `SPREAD` of what the process takes: of all that the run needs, for the
# holes between its blocks, up to so many bytes.
_HOLES, _MOST_HOLES = 0.05, 128 << 20
_SHARES: Final = (0.75, 0.5, 0.25, 0.0)
_LIMIT: Final = f"{SECTION}.host_memory_bytes"

_Room = tuple[int, int]  # see `room.host_room`


@dataclass(frozen=True)
class FileBytes:
    """Bytes of this rank's files: `parameters` (which the optimizer steps), one generation of optimizer state, the gradients
    that wait on SSD, and those that would without early steps, to within half a piece. `second`: of the parameters' second
    generation, which those have whose state is in files. `num_files`: of parameters, and of chunks of state. `shared`: of the
    state that rests in host memory by a share, and is written to each checkpoint. `low`: of one generation of compressed
    masters' files, which no checkpoint shares."""

    parameters: int
    second: int
    state: int
    gradients: int
    all_gradients: int
    num_files: int
    shared: int
    low: int


class Forecast:
    """What this rank will hold, from the model, the parameters that the optimizer steps (groups) and the JSON.

    `host_share`: of the state that the JSON puts into files, the share that rests in host memory instead; `changed`: the
    forecast with another number at a path of the JSON.
    """

    def __init__(
        self, layers: LayerMap, groups: Sequence[Sequence[nn.Parameter]], config: dict[str, Any], resolved: RunSettings
    ) -> None:
        self._layers = layers
        self._resolved = resolved
        self._json, self._config = stock_config.OffloadSettings.read(config), config
        self.host_share = resolved.optimizer_host_share if self._json.state_in_files else 0.0
        self.changed: Callable[[str, float], Forecast] = lambda path, value: Forecast(
            layers, groups, *with_key(config, resolved, path, value)
        )
        self._one_memory = accelerator.is_one_memory()
        self._param_bytes = stock_config.element_bytes(layers.units.values(), config)
        self._shards = PlannedShards(layers, groups, self._json, self._param_bytes, self.host_share)
        self.chunks = self._shards.chunks
        clip = float(config.get("gradient_clipping", 1.0) or 0.0)  # DeepSpeed clips to 1 where nothing is written
        dynamic = stock_config.has_dynamic_scale(config)
        self._certain = clip == 0.0 and not dynamic
        delay, speculation = resolved.optimizer_delay, resolved.optimizer_speculation
        in_files = self._json.state_in_files and (not self.host_share or self._shards.steps_on_ssd)
        self.timing = StepTiming(delay, speculation, self._certain, in_files, resolved.on_nonfinite == "stop")
        self._rounds = config.get("communication_data_type") is not None
        self.pairs, self.keeps_freed = resolved.order == "vertical", True  # in another order layers take turns
        self.ahead = 0  # slots for state that is read before the norm, once all else is known
        self.most_ahead: int | None = None  # of these, that open files allow; None: any number
        self.why_ahead = ""
        self.fewer = _fewer(config, resolved, self._shards.num_shards)
        self.micro_batch_size = int(config.get("train_micro_batch_size_per_gpu") or 1)

    @property
    def params(self) -> list[nn.Parameter]:
        """All of the model, also those that no optimizer steps."""
        return [param for params in self._layers.units.values() for param in params]

    @property
    def state_in_files(self) -> bool:
        """Whether the JSON puts the optimizer's state into files."""
        return self._json.state_in_files

    @property
    def uses_ssd(self) -> bool:
        """Whether the JSON puts parameters, the optimizer's state or activations into files."""
        moved = self._resolved.activations.shares[Tier.SSD] > 0
        return self._json.params_in_files or self._json.state_in_files or moved

    @property
    def files(self) -> FileBytes:
        """Bytes of the files that this rank will make."""
        in_files, chunks = self._shards.in_files, [chunk for chunk in self.chunks if chunk.state_in_files]
        stepped, early = ({id(param) for chunk in some for param in chunk.params} for some in (self.chunks, chunks))
        parameters, second = (sum(self._shards.file_bytes(p) for p in in_files if id(p) in ids) for ids in (stepped, early))
        state = sum(_MOMENTS * self._shards.aligned(chunk.numel * FP32_BYTES) for chunk in chunks)
        compressed = chunks if self._resolved.optimizer_compression else []
        low = sum(low_file_bytes(chunk.numel, memory_budget.PART_ELEMENTS) for chunk in compressed)
        waiting = (1 - self._resolved.gradient_host_share) * sum(chunk.numel for chunk in self.chunks) * FP32_BYTES
        num_files = len(in_files) + _MOMENTS * len(chunks)
        resting = sum(chunk.numel for chunk in self.chunks if not chunk.state_in_files) if self.host_share else 0
        shared = _MOMENTS * FP32_BYTES * resting
        return FileBytes(parameters, second, state, round(self._held_share * waiting), round(waiting), num_files, shared, low)

    # ---- in the terms of `memory_budget`

    @property
    def shape(self) -> ModelShape:
        """The model, and where its tensors will rest."""
        units, shards, in_files = self._layers.units, self._shards, self._shards.in_files
        every: tuple[Unit, ...] = (PRE, *range(self._layers.num_layers))  # that every model has; `suf` is counted apart
        elements = {unit: sum(map(zero_params.full_numel, params)) for unit, params in units.items()}
        stepped, file_ids = shards.stepped, {id(param) for param in in_files}
        trained = {u: sum(zero_params.full_numel(p) for p in params if id(p) in stepped) for u, params in units.items()}
        files = {u: sum(shards.file_bytes(p) for p in params if id(p) in file_ids) for u, params in units.items()}
        pre, *layer_elements = (elements[unit] for unit in every)
        rank = sum(elements.values()) / shards.num_shards
        resting = rank - sum(map(shards.numel, in_files))
        freed = freed_bytes(self._layers, stepped, self._param_bytes, self._rounds)
        return ModelShape(
            pre,
            tuple(layer_elements),
            0.0,
            0.0,
            0,
            param_bytes=self._param_bytes,
            num_shards=shards.num_shards,
            generations=self.timing.generations,
            part_elements=memory_budget.PART_ELEMENTS,
            working_bytes=freed.most,
            freed=freed,
            reduce_bytes=_reduce_bytes(self.chunks, shards.num_shards, self._one_memory),
            placement=Placement(
                {
                    TensorKind.PARAMETERS: {Tier.SSD: _share(1 - resting / rank)},
                    TensorKind.STATE: {Tier.SSD: shards.state_on_ssd},
                    TensorKind.GRADIENTS: {Tier.SSD: 1 - self._resolved.gradient_host_share},
                }
            ),
            files=tuple(files[unit] for unit in every),
            gradients=tuple(trained[unit] for unit in every),
            slot_bytes=max(self._piece_bytes, default=0),
            suf=SufShape(elements[SUF], trained[SUF], files[SUF]) if SUF in units else None,
            apart=self._layers.outside.apart,
            compressed=self._resolved.optimizer_compression,
            copied=shards.copied,
        )

    @property
    def terms(self) -> BudgetTerms:
        """How the run uses memory: its micro-batches, buffers and slots."""
        return BudgetTerms(
            self.fewer.most,  # with `elastic` a rank may bring more than the JSON has for each
            self._resolved.prefetch_layers,
            slots=memory_budget.num_slots(len(self._piece_bytes), self._resolved.overlap),
            held_share=self._held_share,
            one_memory=self._one_memory,
            pairs=self.pairs,
            shares_state=self.host_share > 0,
            ahead=self.ahead,
            keeps_freed=self.keeps_freed,
            early_share=1.0 - self.timing.delay if self.timing.possible else 0.0,
        )

    @property
    def waits_for_no_pair(self) -> bool:
        """Whether memory keeps gradients from waiting that otherwise would."""
        in_turn = self._resolved.order != "vertical" or self.fewer.most == 1
        return self._one_memory and not (in_turn or self.pairs)

    def paired(self, room: tuple[int, int]) -> Forecast:
        """This forecast, with gradients that wait for the next micro-batch's, and freed memory kept, only where these fit.
        `room`: see `room.host_room`."""
        (allowed, baseline), shape = room, self.shape
        further = self.further(baseline)

        def fits(terms: BudgetTerms) -> bool:
            return memory_budget.total_bytes(memory_budget.budget(shape, terms, further), Tier.HOST) <= allowed

        terms = memory_budget.with_room(replace(self.terms, keeps_freed=True), fits, host.is_trimmed())
        self.pairs, self.keeps_freed = terms.pairs, terms.keeps_freed
        return self

    @property
    def _held_share(self) -> float:
        """Of the gradients, the share that waits for its step: all that may be redone, or that users may read later."""
        if not self.timing.final or self._resolved.keep_gradients:
            return 1.0
        return memory_budget.waiting_share(self.timing.delay, self._shards.state_on_ssd)

    def further(self, baseline_bytes: int) -> tuple[BudgetItem, ...]:
        """What the formulas do not know: `baseline_bytes` of the process as it is, and working memory beside the buffers."""
        largest_chunk = max((chunk.numel for chunk in self.chunks), default=0)
        largest = max((size for chunk in self.chunks for size in chunk.sizes), default=0)
        copied = gradient_norm.copied_bytes(largest) if self._one_memory and largest else 0
        return (
            BudgetItem(
                Tier.HOST, "interpreter and libraries", baseline_bytes + memory_budget.LATER_BYTES, memory_budget.MEASURED_KEY
            ),
            BudgetItem(Tier.HOST, "fp64 copy for a norm", copied, "(largest parameter)"),
            memory_budget.scaled_gradient(largest_chunk, self._certain),
            *compression_items(self._shards, self._resolved),
            BudgetItem(Tier.HOST, "parameters that stay fp32", self._wide_bytes, "(their dtype)"),
            *level_items(self._layers, self._resolved, self._shards),
            *acco_items(self._layers, self._resolved, self._shards),
        )

    @property
    def _wide_bytes(self) -> int:
        """What parameters of more bytes an element than `element_bytes` take beyond those: PEFT makes adapters in fp32."""
        params = [param for members in self._layers.units.values() for param in members]
        if not zero_params.keeps_dtypes(params):
            return 0
        return sum(self._shards.numel(param) * max(0, param.element_size() - self._param_bytes) for param in params)

    @property
    def setup_bytes(self) -> int:
        """What stock's buffers and copies take until its optimizer has been set up, before there are buffers of ours."""
        of_all = self.chunks if self._json.state_in_files else ()  # stock's buffers are as large as the largest of all chunks
        state = max((chunk.numel for chunk in of_all), default=0)
        staged = max((chunk.numel for chunk in self.chunks if chunk.params_in_files), default=0) * self._param_bytes
        resting = sum(chunk.numel for chunk in of_all if not chunk.state_in_files)  # masters, and stock's zeroed gradients
        setup = memory_budget.stock_setup(state, staged, resting)
        read = (chunk.numel for chunk in of_all if chunk.params_in_files and chunk.state_in_files)
        return with_buffers(self.params, self._config, setup, self._json.fast_init * sum(read) * self._param_bytes)

    # ---- sizes

    @property
    def _piece_bytes(self) -> list[int]:
        """Bytes that each piece in the optimizer's pipeline reads: its state, and its gradient where some wait on SSD."""
        early_share = 1.0 - self.timing.delay if self.timing.possible else 0.0
        found = []
        for chunk in self.chunks:
            if not chunk.state_in_files and not chunk.persistent and self._resolved.gradient_host_share < 1:
                parts = split_chunk(0, 0, chunk.numel, memory_budget.PART_ELEMENTS)
                found += [FP32_BYTES * (part.numel + -part.numel % ALIGNMENT) for part in parts]
            elif chunk.state_in_files:
                middle, end = boundary(chunk.sizes, 0.0 if chunk.persistent else early_share), chunk.numel
                alignment = self._json.alignment_bytes // FP32_BYTES
                most = memory_budget.PART_ELEMENTS
                parts = (*split_chunk(0, 0, middle, most), *split_chunk(0, middle, end, most))
                padding = -end % alignment
                for part in parts:
                    numel = part.numel + padding * (part.start + part.numel == end)
                    recalled = numel if self._resolved.gradient_host_share < 1 else 0
                    beside = value_bytes(part.numel, len(chunk.params)) if self._resolved.optimizer_compression else 0
                    found.append(FP32_BYTES * (_MOMENTS * numel + recalled) + beside)
        return found


def _reduce_bytes(chunks: Sequence[PlannedChunk], num_shards: int, one_memory: bool) -> int:
    """What the REDUCE of the largest parameter needs beside the sums: on a device for the norm of this rank's share, and where
    sums have memory of their own for a copy in fp32, or in the order of the ranks."""
    largest = max((size for chunk in chunks for size in chunk.sizes), default=0)
    whole = max((zero_params.full_numel(param) for chunk in chunks for param in chunk.params), default=0)
    copied = memory_budget.reduced_bytes(whole, num_shards)
    if one_memory:
        return copied if num_shards > 1 else 0
    return min(largest, NORM_ELEMENTS) * stock_config.norm_bytes() + copied


def groups_of(model: nn.Module, model_parameters: Any, optimizer: Any) -> list[list[nn.Parameter]]:
    """The optimizer's groups of trainable parameters, as `deepspeed.initialize` is given them."""
    given = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else model_parameters
    if given is None:
        given = model.parameters()
    entries: list[Any] = list(given)
    groups = [entry["params"] for entry in entries] if entries and isinstance(entries[0], dict) else [entries]
    listed = [[group] if isinstance(group, nn.Parameter) else group for group in groups]
    return [[param for param in group if param.requires_grad] for group in listed]


def _fewer(config: DeepSpeedJson, resolved: RunSettings, num_ranks: int) -> FewerMicroBatches:
    batch, halves = config.get("train_batch_size"), resolved.acco is not None
    is_derived = not isinstance(config.get("gradient_accumulation_steps"), int)
    counted = num_micro_batches(config, num_ranks), num_ranks, resolved.elastic
    return FewerMicroBatches(*counted, halves, batch if isinstance(batch, int) else None, is_derived)


def check_memory(forecast: Forecast, params: Iterable[nn.Parameter], limit: int | None) -> tuple[list[str], int, int]:
    """The budget as lines for the log, its bytes of host memory, and those that it leaves for activations, and for state that
    is read before the norm. `limit`: bytes of host memory that all ranks of this host may use; None: what it has.

    The forecast knows from then on how much memory there is for that state, which the lines count, and the bytes do not. Gives
    the pages of zero.Init's buffers back first. Raises MemoryBudgetError, on every rank, where one rank's budget does not fit.
    """
    ranks_here = distributed_ranks.ranks_on_this_host()
    allowed, baseline = host_room(params, limit)
    forecast.ahead = 0
    shape, terms, further = forecast.shape, forecast.terms, forecast.further(baseline)
    items = memory_budget.budget(shape, terms, further)
    setup = baseline + forecast.setup_bytes
    fault = _fault(forecast, (allowed, baseline), limit, ranks_here)
    told = distributed_ranks.all_gathered((fault, None if fault is None else _fitting_share(forecast, (allowed, baseline))))
    faults = [found for found, _ in told if found is not None]
    if faults:
        shares = [share for found, share in told if found]
        raise MemoryBudgetError(_with_less_state(fault or faults[0], forecast.host_share, shares))
    whose = f"{_LIMIT} over {ranks_here} ranks" if limit is not None else "what the machine has"
    title = f"memory of this rank, activations not counted; host memory allowed: {allowed / 2**20:.0f} MiB ({whose})"
    later = memory_budget.total_bytes(items, Tier.HOST)
    needed, left = max(later, setup), allowed - later  # the set-up is over by then
    forecast.ahead, forecast.why_ahead = _slots_ahead(forecast, allowed - needed)
    lines = [
        title,
        *memory_budget.budget_lines(memory_budget.with_setup(memory_budget.budget(shape, forecast.terms, further), setup)),
    ]
    if forecast.waits_for_no_pair:
        lines.append(
            "no room for gradients that wait for the next micro-batch's: each is added to its sum by itself; same values"
        )
    if terms.one_memory and not terms.keeps_freed and shape.freed.most > shape.freed.of_layers:
        lines.append(
            "no room to keep what the largest gradients free: the system maps their memory anew each time, which takes time;"
            f' more free memory avoids it, or where it is written a larger "{_LIMIT}"; same values'
        )
    return lines, needed, left


def read_ahead_bytes(forecast: Forecast) -> int:
    """Of host memory, for state that is read before the norm; known behind `check_memory`."""
    return forecast.ahead * max(forecast._piece_bytes, default=0)


def num_waiting(forecast: Forecast) -> int:
    """Pieces of state in files that may be read before the norm: where early steps are always tried, the delayed ones."""
    timing, most = forecast.timing, memory_budget.PART_ELEMENTS
    always = timing.possible and forecast._resolved.optimizer_speculation is True
    early_share, count = 1.0 - timing.delay if timing.possible else 0.0, 0
    for chunk in forecast.chunks:
        if chunk.state_in_files and not chunk.persistent:
            middle = boundary(chunk.sizes, early_share)
            early = 0 if always else len(split_chunk(0, 0, middle, most))
            count += early + len(split_chunk(0, middle, chunk.numel, most))
    return count


def why_nothing_ahead(forecast: Forecast) -> str | None:
    """Why no state is read before the norm whatever memory there is; None where it may be."""
    resolved = forecast._resolved
    if not any(chunk.state_in_files for chunk in forecast.chunks):
        return "0, no state is on SSD"
    if not resolved.overlap:
        return "0, without overlap nothing is read ahead"
    if forecast.timing.final:
        return "0, early steps do not wait for the norm"
    if not num_waiting(forecast):
        return "0, all state is stepped early"
    if resolved.optimizer_read_ahead_bytes is not None:
        return None
    if resolved.elastic is not None:
        return "0, since elastic may give a rank more micro-batches, which bring their activations"
    if resolved.host_memory_bytes is None:
        return "0, since host_memory_bytes is null, and the machine's free memory is not this run's alone; write either"
    return None


def _slots_ahead(forecast: Forecast, left: int) -> tuple[int, str]:
    """Slots for state that is read before the norm, in what the budget leaves, and why so many."""
    if (why := why_nothing_ahead(forecast)) is not None:
        return 0, why
    wanted, each, asked = num_waiting(forecast), max(forecast._piece_bytes), forecast._resolved.optimizer_read_ahead_bytes
    in_memory = memory_budget.slots_ahead(wanted, each, left)
    in_key = memory_budget.slots_ahead(wanted, each, math.inf, asked)
    open_files = wanted if forecast.most_ahead is None else forecast.most_ahead
    count = min(in_memory, in_key, open_files)
    if count == wanted:
        return count, f"all {wanted} pieces of state that wait for the norm"
    limit = f"{USED_BY_READING:.0%} of the {max(0, left) / 2**20:.0f} MiB that the memory budget leaves"
    limit = "what is written" if count == in_key else "the limit on open files" if count == open_files else limit
    return count, f"{count} of {wanted} pieces of state that wait for the norm, limited by {limit}"


def fits_with(forecast: Forecast, room: _Room, path: str, value: float, spares: bool = False, gives_up: bool = False) -> bool:
    """Whether the run fits with another number at a path of the JSON. `spares`: of a run that fits as it is, so that a change
    that needs more must leave what an advised limit has beyond the need; `gives_up`: early steps, whatever the timing says."""
    (allowed, baseline), other = room, forecast.changed(path, value)
    other.pairs, other.keeps_freed = forecast.pairs, forecast.keeps_freed
    if spares:  # early steps are given up behind the memory check, all else ahead of it
        other.paired(room if gives_up else (0, baseline))
    needed = _needed(other, baseline, **memory_budget.NOTHING_EARLY if gives_up else {})
    is_more = spares and needed > _needed(forecast, baseline, pairs=other.pairs, keeps_freed=other.keeps_freed)
    return needed + is_more * _headroom(needed, baseline) <= allowed


def _needed(forecast: Forecast, baseline: int, **changed: float) -> int:
    """Bytes of host memory, also while stock's optimizer is set up. `changed`: of the forecast's `terms`."""
    items = memory_budget.budget(forecast.shape, replace(forecast.terms, **changed), forecast.further(baseline))
    return max(memory_budget.total_bytes(items, Tier.HOST), baseline + forecast.setup_bytes)


def _fitting_share(forecast: Forecast, room: _Room) -> float | None:
    """The largest share of the state in host memory that fits, where the present one is what does not; None where none is."""

    def fits(share: float) -> bool:
        return fits_with(forecast, room, STATE_SHARE, share)

    now = forecast.host_share
    tried = (count / STATE_SHARES for count in range(STATE_SHARES - 1, -1, -1))
    return None if not now or fits(now) else next((share for share in tried if share < now and fits(share)), None)


def _mending(forecast: Forecast, room: _Room) -> list[str]:
    """Numbers in the JSON, besides those of `check_budget` and the state's share, each of which alone makes the run fit."""
    resolved, (sub_group, in_host, buffers) = forecast._resolved, forecast._json.sizes
    halves = [sub_group >> n for n in range(1, sub_group.bit_length())]
    tried: list[tuple[str, float, Sequence[float]]] = [(memory_budget.SUB_GROUP, sub_group, halves)]
    tried.append(("zero_optimization.offload_param.max_in_cpu", in_host, [int(share * in_host) for share in _SHARES]))
    tried.append((memory_budget.INIT_BUFFERS, buffers, range(buffers - 1, 0, -1)))
    if forecast.state_in_files and not resolved.keep_gradients:
        tried.append((f"{SECTION}.gradient_host_share", resolved.gradient_host_share, _SHARES))
    if forecast.timing.possible:  # fewer gradients wait with a smaller one, fewer early values with a larger
        delay, less = forecast.timing.delay, _SHARES if forecast.timing.certain else ()
        tried.append((f"{SECTION}.optimizer_delay", delay, [*(share for share in less if share < delay), 1.0]))
    found = []
    for path, now, values in tried:
        others = (value for value in values if value < now or value == 1.0)  # all that is made larger is a delay, to 1
        fitting = (value for value in others if fits_with(forecast, room, path, value))
        if (value := next(fitting, None)) is not None:
            found.append(f'"{path}": {_in_full(value)} (now {_in_full(now)})')
    return found


def _in_full(value: float) -> str:
    """A number as the JSON has it: sizes with all their digits."""
    return f"{value:g}" if value % 1 else str(int(value))


def _with_less_state(fault: str, now: float, shares: Sequence[float | None]) -> str:
    """The message of a refusal, with a share of the state in host memory that fits on all ranks; `shares`: see
    `_fitting_share`, of those where memory is short."""
    fitting = [share for share in shares if share is not None]
    if len(fitting) < len(shares):
        return fault
    first, *others = fault.splitlines()
    return "\n".join((f'{first} or "{STATE_SHARE}": {min(fitting):g} (now {now:g})', *others))


def _fault(forecast: Forecast, room: _Room, limit: int | None, ranks: int) -> str | None:
    """Why the run does not fit, and what makes it fit; None where it does."""
    allowed, baseline = room
    shape, terms, further, setup = forecast.shape, forecast.terms, forecast.further(baseline), baseline + forecast.setup_bytes
    limits = {Tier.HOST: allowed, Tier.DEVICE: accelerator.free_device_bytes()}
    try:
        check_budget(shape, terms, further, limits, setup, forecast.fewer)
    except MemoryBudgetError as error:
        needed = _needed(forecast, baseline)
        if needed <= allowed:
            return str(error)
        first, *others = str(error).splitlines()
        further_advice = _mending(forecast, room)
        if limit is not None:
            further_advice.append(f'"{_LIMIT}": {round((needed + _headroom(needed, baseline)) * ranks)} (now {limit})')
        if "; write " not in first and further_advice:
            first, further_advice[0] = first.partition("; ")[0], f"; write {further_advice[0]}"
            return "\n".join((first + " or ".join(further_advice), *others))
        return "\n".join((" or ".join([first, *further_advice]), *others))
    return None


def _headroom(needed: int, baseline: int) -> float:
    """What an advised limit has beyond the bytes that are needed, of which the process has `baseline` already."""
    return max(memory_budget.SPREAD * baseline, min(_HOLES * needed, _MOST_HOLES))


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
