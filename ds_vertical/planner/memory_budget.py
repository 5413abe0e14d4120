"""How much memory a run needs, by closed formulas, before anything is allocated; and the check against a budget.

P elements of this rank, M micro-batches, L layers, layers of at most N elements, window w, A bytes per activation:

    host    parameter buffers    b N and `pre`, in the parameters' dtype; b of `layer_buffers`, which is w + 3
            optimizer slots      slots x part x state bytes
            state read ahead     as many further slots as were chosen
            gradients            4P of the share that waits there, 4N of a few layers for what is stepped early or goes to SSD
            activations          M L A of the share that is kept there
            freed memory         with one memory, what the C library keeps of what a backward frees, or where short a layer's
            kept for the backward  M K of all layers that rests there, K of a micro-batch; buffers of cells, where some move
            at rest              parameters and state that are not on SSD
            early values         parameters at rest whose early steps may yet not count: their new values, until the norm
    device  parameters           (w + 1) N and `pre`, gathered (none where they are the host's buffers)
            gradient sums        4N of one layer (with M = 1 its gradients as autograd makes them) and of `pre`: a layer's sums
                                 leave one by one, ahead of the next layer's; where `pre` and `suf` are apart, the moment counts
                                 that has most of parameters and sums (`_of_units`)
            activations          M L A + 2 A: layer inputs, and the gradients between two layers
            kept                 M K_device of what forwards keep, and 4 cells where any move
            working              what one layer's backward needs for one micro-batch, and on the host the gradients of the last
            gradients on their way  of a unit, while the next one's are summed: with several ranks 4N, whose reduction is under
                                 way; beside the host 4N of this rank's shares, which leave for it
                                 (none where w is 0: then the host waits for them)
            norm of a gradient   what a REDUCE needs beside the sums, beyond the working memory, which is free then

Where device and host are one memory, all of it is the host's; with one rank the gathered parameters are then the buffers and
the sums the gradients that wait, and count once. The total is what is allocated, so it is at least what `memory_timeline`
finds in use. What a formula cannot know (the interpreter, what stock allocates) is handed in as further items.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from ds_vertical.planner.model_shape import ModelShape, ModelSpec, SmallTensors, state_elements, state_file_bytes, suf_files
from ds_vertical.planner.network import is_rounded, sent_over_levels
from ds_vertical.schedule.events import LEAD, MAX_STEPS
from ds_vertical.types import NORM_COPIED, NORM_ELEMENTS, PRE, REDUCED_TOGETHER, SUF, TensorKind, Tier, Unit

SLOTS: Final = 4  # pieces of state in the optimizer's pipeline at a time
PART_ELEMENTS: Final = 1 << 21  # of such a piece, at most
STOCK_BUFFERS: Final = 4  # what stock needs for its own uses of a chunk of state: master, moments, gradient
LATER_BYTES: Final = 96 << 20  # what libraries load at their first use (ops, kernels' code), and heap between buffers
SUB_GROUP: Final = "zero_optimization.sub_group_size"
INIT_BUFFERS: Final = "zero_optimization.offload_param.buffer_count"
_FP32_BYTES: Final = 4
_PROCESS: Final = 704 << 20  # bytes of host memory that a process holds beside a model, where nobody has measured them
SPREAD: Final = 0.1  # of them: by so much more in one start than in another
_LARGE_MODEL: Final = 1_000_000_000  # elements of a model, from which on chunks are large
MEASURED_KEY: Final = "(measured)"
STATE_SHARE: Final = "vertical_schedule.optimizer_host_share"
STATE_SHARES: Final = 20  # of the optimizer's state in host memory, which are tried
USED_BY_STATE: Final = 0.8  # of the host memory that all else leaves, where such a share is chosen
READ_AHEAD: Final = "vertical_schedule.optimizer_read_ahead_bytes"
USED_BY_READING: Final = 0.5  # of the host memory that all else leaves, for state that is read ahead of the norm
BACKWARD: Final = "one layer's backward"
NORM: Final = "norm of a gradient"
LEAVING: Final = "gradients on their way"
_KEEP: Final = "vertical_schedule.activations.keep"
_LEVELS: Final = "zero_optimization.zero_hpz_partition_size"
_IN_FLIGHT: Final = f"(up to {SLOTS} pieces; one without overlap)"


def waiting_share(delay: float, state_in_files: float) -> float:
    """Of all gradients, those that wait for their step where the others are stepped early for good: a share `delay` of those
    whose state is in files, and all whose state rests in memory, which has no second generation."""
    return delay + (1 - delay) * (1 - state_in_files)


def num_slots(num_pieces: int, overlap: bool) -> int:
    """Pieces of state in memory at a time. Without overlap one: it is read, computed and written before the next is read."""
    return min(SLOTS if overlap else 1, num_pieces)


def slots_ahead(num_pieces: int, slot_bytes: float, room: float, most_bytes: float | None = None) -> int:
    """Slots for state that is read ahead of the norm: for all pieces, as far as a part of the `room` that all else leaves holds
    them. `most_bytes`: that they may take, None: any number."""
    held = min(USED_BY_READING * max(0.0, room), math.inf if most_bytes is None else most_bytes)
    return num_pieces if held >= num_pieces * slot_bytes else int(held // slot_bytes)


@dataclass(frozen=True)
class BudgetTerms:
    """What the formulas take besides the model: what a run's settings come down to, and so no setting itself.

    `engine.memory_check` derives them from `RunSettings` and the JSON, `search` from what it varies (`Choice`). `window`:
    `prefetch_layers`. `slots`: pieces of state in memory at a time; `ahead`: more of them, for what is read ahead of the norm.
    `held_share`: of all gradients, the share that waits for its step (1 where steps follow NORM or may be redone, else
    `waiting_share`). `gradient_layers`: layers whose gradients are under way otherwise: as many as are stepped or written to
    SSD at a time, and one more. `pairs`: whether a layer's gradients wait for those of the next micro-batch, where device and
    host are one memory: in layer-major order, and where there is room. `keeps_freed`: whether, where they are, the C library
    keeps what any backward frees; else pieces that are larger than all that a layer's backward frees go back to the kernel, and
    the last layer's gradients, which would wait while the suffix's are made, do not wait.
    `shares_state`: of the state that goes to SSD otherwise, a share that was chosen rests in host memory. `early_share`: of the
    steps of state in files, those that may be taken before the norm.
    """

    num_micro_batches: int
    window: int = 1
    slots: int = SLOTS
    held_share: float = 1.0
    gradient_layers: int = MAX_STEPS + 1
    one_memory: bool = False
    pairs: bool = True
    shares_state: bool = False
    ahead: int = 0
    keeps_freed: bool = True
    early_share: float = 0.0


SPARE_SHARE: Final = 0.1  # of what a run needs: with less room beyond it freed memory goes back within each step
LEAN: Final = {"pairs": False, "keeps_freed": False}  # of `BudgetTerms`: what a run gives up before it is refused
NOTHING_EARLY: Final = {"held_share": 1.0, "early_share": 0.0}  # where early steps are given up: all gradients wait
_GIVEN_UP: Final = ({}, {"keeps_freed": False}, {"pairs": False}, LEAN)  # in turn; adding in pairs saves most time


def with_room(terms: BudgetTerms, fits: Callable[[BudgetTerms], bool], trims: bool = True) -> BudgetTerms:
    """`terms`, which have both `pairs` and `keeps_freed`, or one of them, or none, as memory has room. `trims`: whether the C
    library gives freed memory back when it is told to; where it does not, it keeps what any backward frees."""
    tried = [dataclasses.replace(terms, **less) for less in _GIVEN_UP if trims or "keeps_freed" not in less]
    return next((each for each in tried if fits(each)), tried[-1])


@dataclass(frozen=True)
class BudgetItem:
    """Bytes of one purpose in one tier; `key`: the JSON path that changes them most directly, in brackets what else does."""

    tier: Tier
    what: str
    num_bytes: int
    key: str


def libraries(process_bytes: float | None) -> BudgetItem:
    """What a planned run's process holds beside the model, as measured on its machine (`ds-vertical limits`), and a little
    more; where that is None, an assumption."""
    held = _PROCESS if process_bytes is None else round((1 + SPREAD) * process_bytes)
    return BudgetItem(Tier.HOST, "interpreter and libraries", held + LATER_BYTES, MEASURED_KEY)


def reduce_bytes(largest_parameter: int, num_shards: int, one_memory: bool) -> int:
    """What a REDUCE needs beside the sums: an fp32 copy of a parameter's gradient, on the host with several ranks alone, and on
    a device the fp64 copy of this rank's share from which stock takes its norm. `largest_parameter`: elements."""
    copied = reduced_bytes(largest_parameter, num_shards)
    if one_memory:
        return copied if num_shards > 1 else 0
    return copied + 8 * min(-(-largest_parameter // num_shards), NORM_ELEMENTS)


def reduced_bytes(largest_parameter: int, num_shards: int) -> int:
    """What one collective reduces, in fp32: with several ranks small parameters go together."""
    return _FP32_BYTES * max(largest_parameter, REDUCED_TOGETHER if num_shards > 1 else 0)


def largest_trained(spec: ModelSpec) -> int:
    """Elements of the largest parameter that is trained: no other has a gradient."""
    return spec.largest_parameter if spec.trained_sizes is None else max(map(max, filter(None, spec.trained_sizes)), default=0)


def norm_copy(largest_parameter: int, one_memory: bool) -> BudgetItem:
    """The copy of a gradient in host memory of which its norm is taken; of a larger one there is none."""
    num_bytes = 8 * min(largest_parameter, NORM_COPIED) if one_memory else 0
    return BudgetItem(Tier.HOST, "fp64 copy for a norm", num_bytes, "(largest parameter)")


def kept_bytes(shape: ModelShape, terms: BudgetTerms) -> tuple[int, int]:
    """How large pieces may be that the C library keeps when they are freed, and how much it keeps behind the last in use. Twice
    what a layer's backward frees: with just that, the heap's end would go back each time, and be mapped anew."""
    pieces = backward_bytes(shape, terms) if terms.keeps_freed else shape.freed.of_layers
    return pieces, 2 * max(pieces, shape.freed.of_layers + _paired_bytes(shape, terms))


def scaled_gradient(largest_chunk: int, certain: bool) -> BudgetItem:
    """A piece of a gradient, multiplied for clipping or the loss scale; none where early steps are `certain` to be final.
    `largest_chunk`: elements."""
    num_bytes = 0 if certain else 4 * min(PART_ELEMENTS, largest_chunk)
    return BudgetItem(Tier.HOST, "scaled gradient", num_bytes, "gradient_clipping")


def sub_group_size(num_elements: int) -> int:
    """DeepSpeed's key in a plan for a model of so many elements: those with which a chunk of the optimizer's state is full."""
    return 100_000_000 if num_elements >= _LARGE_MODEL else 8_000_000


def as_run(shape: ModelShape, spec: ModelSpec, one_memory: bool, least_file_bytes: int) -> ModelShape:
    """`shape` with what a run of `spec` takes besides: for a REDUCE, and what has no file."""
    small = _small(shape, spec, least_file_bytes)
    reducing = reduce_bytes(largest_trained(spec), shape.num_shards, one_memory)
    return dataclasses.replace(shape, reduce_bytes=reducing, small=small)


def _small(shape: ModelShape, spec: ModelSpec, least: int) -> SmallTensors:
    """Of this rank's parameters those that make no file, and those whose state may make none: their unit has no others, a
    share of it leaves so little, or it is cut into chunks, the last of which may have no others. `least`: bytes of a file."""
    shards, blocks = shape.num_shards, len(spec.block_elements)
    sizes = [*blocks * spec.block_sizes, *spec.outside_sizes]
    parameters = sum(size for size in sizes if size // shards * shape.param_bytes < least) // shards
    of_blocks, of_outside = spec.trained_sizes or (spec.block_sizes, spec.outside_sizes)
    in_block, outside = (
        sum(size for size in each if size // shards * _FP32_BYTES < least) / shards for each in (of_blocks, of_outside)
    )
    most: dict[Unit, float] = dict.fromkeys(shape.outside.units, outside)
    most |= {layer: in_block * math.ceil(blocks / shape.num_layers) for layer in range(shape.num_layers)}
    state, is_shared = 0.0, 0 < shape.in_files(TensorKind.STATE) < 1
    uneven = max(of_blocks, default=0) / shards if is_shared else 0.0  # a run shares whole parameters
    for unit, small in most.items():
        in_files = state_elements(shape, unit)[0]
        if (in_files - uneven) * _FP32_BYTES < least:
            state += min(shape.stepped(unit) if is_shared else in_files, least / _FP32_BYTES)
        elif in_files > sub_group_size(shape.num_elements):
            state += min(small, in_files)
    state = min(state, shape.stepped_elements / shards * shape.in_files(TensorKind.STATE))
    return SmallTensors(parameters, math.ceil(state))


def planned_setup(shape: ModelShape, largest_parameter: int, further: tuple[BudgetItem, ...]) -> int:
    """Host memory that a planned run takes in all while stock's optimizer is set up: `stock_setup`, and of `further` what the
    process holds by then. A parameter may exceed a chunk's full size."""
    held = sum(item.num_bytes - LATER_BYTES for item in further if item.key == MEASURED_KEY)
    full = sub_group_size(shape.num_elements) + largest_parameter / shape.num_shards
    chunk = math.ceil(min(largest_unit(shape), full))
    in_files, stepped = shape.in_files(TensorKind.STATE), shape.stepped_elements / shape.num_shards
    staged = chunk * shape.param_bytes if shape.in_files(TensorKind.PARAMETERS) else 0
    resting = min(stepped, (1 - in_files) * stepped + shape.small.state)
    return held + (stock_setup(chunk, staged, math.ceil(resting)) if in_files else staged)


def with_setup(items: tuple[BudgetItem, ...], setup_bytes: float, build_bytes: float = 0.0) -> tuple[BudgetItem, ...]:
    """`items`, and what the set-up, which takes `setup_bytes` of host memory in all, takes beyond them, if anything; or, where
    that is more, what it takes to build the model ahead of it, with `build_bytes` in all."""
    beyond = round(max(setup_bytes, build_bytes)) - total_bytes(items, Tier.HOST)
    what, key = ("stock's set-up", SUB_GROUP) if setup_bytes >= build_bytes else ("zero.Init's buffers", INIT_BUFFERS)
    return (*items, BudgetItem(Tier.HOST, f"{what} beyond the rest", beyond, key)) if beyond > 0 else items


def stock_setup(state_chunk: int, staged_bytes: int, resting: int) -> int:
    """What stock's buffers and copies take while its optimizer is set up: its buffers for a chunk of state, as large as the
    largest one that may go to SSD (`state_chunk`), and an fp32 copy; the same chunk's parameters on their way (`staged_bytes`);
    masters and zeroed gradients of the elements whose state rests in memory instead (`resting`)."""
    return (STOCK_BUFFERS + 1) * 4 * state_chunk + staged_bytes + 2 * 4 * resting


def halves_items(
    num_elements: int, stepped: int, param_bytes: int, gradient_bytes: int, num_ranks: int, copy_ranks: int
) -> tuple[BudgetItem, ...]:
    """What a rank needs besides where a step has two halves (`schedule.halves`): two copies of the weights, shared by
    `copy_ranks` ranks, and this rank's shares of the predicted weights (`engine.acco.prediction`, [Note: two predictions]) and
    of the first half's gradients. `num_elements`: of the model; `stepped`: of what of it is trained."""
    own, acco = -(-stepped // num_ranks), "vertical_schedule.acco"
    copies = -(-2 * num_elements * param_bytes // copy_ranks)
    return (
        BudgetItem(Tier.DEVICE, "two copies of the weights", copies, f"{acco}.copies"),
        BudgetItem(Tier.HOST, "predicted shards", 2 * own * param_bytes, acco),
        BudgetItem(Tier.HOST, "gradients of half a step", own * gradient_bytes, acco),
    )


def layer_buffers(window: int, num_layers: int) -> int:
    """Host buffers for layers: of those in the window, of the one that computes, of those whose steps are under way."""
    return min(max(window + MAX_STEPS, LEAD) + 1, num_layers)


def budget(shape: ModelShape, terms: BudgetTerms, further: tuple[BudgetItem, ...] = ()) -> tuple[BudgetItem, ...]:
    """What is needed of device and host memory, largest first in each tier; of host memory alone where both are one."""
    items = [*_host(shape, terms), *_device(shape, terms), *further]
    if terms.one_memory:
        items = [dataclasses.replace(item, tier=Tier.HOST) for item in items]
    return tuple(sorted((item for item in items if item.num_bytes), key=lambda item: (item.tier, -item.num_bytes)))


def total_bytes(items: tuple[BudgetItem, ...], tier: Tier) -> int:
    """The sum of a tier's items."""
    return sum(item.num_bytes for item in items if item.tier == tier)


def ssd_items(shape: ModelShape, terms: BudgetTerms) -> tuple[BudgetItem, ...]:
    """What rests on this rank's SSD, largest first."""
    return tuple(sorted((item for item in _ssd(shape, terms) if item.num_bytes), key=lambda item: -item.num_bytes))


def _ssd(shape: ModelShape, terms: BudgetTerms) -> Iterator[BudgetItem]:
    stepped, rank = (elements / shape.num_shards for elements in (shape.stepped_elements, shape.num_elements))
    state = stepped * state_file_bytes(shape) * shape.in_files(TensorKind.STATE)
    yield _item(Tier.SSD, "optimizer state", state, "zero_optimization.offload_optimizer.device")
    weights = rank * shape.param_bytes * shape.in_files(TensorKind.PARAMETERS)
    yield _item(Tier.SSD, "parameters", weights, "zero_optimization.offload_param.device")
    second = stepped * shape.second_bytes * (shape.generations - 1)
    yield _item(Tier.SSD, "second generation of both", second, "vertical_schedule.on_nonfinite")
    waiting = stepped * shape.gradient_bytes * terms.held_share * shape.in_files(TensorKind.GRADIENTS)
    yield _item(Tier.SSD, "waiting gradients", waiting, "vertical_schedule.gradient_host_share")
    inputs = terms.num_micro_batches * (shape.num_layers + 2) * shape.activation_bytes  # and the gradients between two layers
    inputs *= shape.in_files(TensorKind.ACTIVATIONS)
    yield _item(Tier.SSD, "inputs of layers", inputs, "vertical_schedule.activations.device")
    if shape.kept is not None:
        resting = shape.kept.resting_bytes(shape.num_layers, terms.num_micro_batches)
        yield _item(Tier.SSD, "kept for the backward", resting[Tier.SSD], _KEEP)


def _host(shape: ModelShape, terms: BudgetTerms) -> Iterator[BudgetItem]:
    rank = shape.num_elements / shape.num_shards
    pre_files, *layer_files = shape.unit_files
    outside_files = pre_files + suf_files(shape)
    buffers = layer_buffers(terms.window, sum(map(bool, layer_files))) * max(layer_files) + outside_files
    yield _item(Tier.HOST, "parameter buffers", buffers, "vertical_schedule.prefetch_layers")
    resting = rank * shape.placement.share(TensorKind.PARAMETERS, Tier.HOST)
    small = shape.small.parameters if shape.in_files(TensorKind.PARAMETERS) else 0.0  # a share is of other units, it may be
    resting = min(rank, resting + small) * shape.param_bytes
    yield _item(Tier.HOST, "parameters at rest", resting, "zero_optimization.offload_param.device")
    copied = terms.early_share * _copied(shape) * shape.param_bytes
    yield _item(Tier.HOST, "early values of parameters", copied, "vertical_schedule.optimizer_delay")
    stepped = shape.stepped_elements / shape.num_shards
    resting = stepped * shape.state_bytes * shape.placement.share(TensorKind.STATE, Tier.HOST)
    resting += shape.small.state * shape.state_bytes
    key = STATE_SHARE if terms.shares_state else "zero_optimization.offload_optimizer.device"
    yield _item(Tier.HOST, "optimizer state at rest", resting, key)
    yield _item(Tier.HOST, "optimizer slots", terms.slots * slot_bytes(shape, terms), _IN_FLIGHT)
    yield _item(Tier.HOST, "state read ahead", terms.ahead * slot_bytes(shape, terms), READ_AHEAD)
    decides = "optimizer_delay" if terms.held_share < 1 else "gradient_host_share"  # nothing is stepped early for good
    yield _item(Tier.HOST, "gradients", _gradients(shape, terms) * shape.gradient_bytes, f"vertical_schedule.{decides}")
    kept = terms.num_micro_batches * shape.num_layers * shape.activation_bytes
    kept *= shape.placement.share(TensorKind.ACTIVATIONS, Tier.HOST)
    yield _item(Tier.HOST, "activations", kept, "gradient_accumulation_steps")
    kept = terms.one_memory * (shape.freed.most if terms.keeps_freed else shape.freed.of_layers)  # for pieces of other sizes
    yield _item(Tier.HOST, "freed memory that is kept", kept, "train_micro_batch_size_per_gpu")
    yield from _kept(shape, terms, Tier.HOST)
    yield from _levels(shape, terms)


def _copied(shape: ModelShape) -> float:
    """Elements of this rank's parameters in memory that are stepped with state in files, at most. Where a share of the
    parameters is in memory, all of it may be: so what a plan chooses counts in proportion."""
    if shape.copied is not None:
        return shape.copied
    if not shape.in_files(TensorKind.STATE):
        return 0.0
    if not shape.in_files(TensorKind.PARAMETERS):
        return shape.stepped_elements / shape.num_shards * shape.in_files(TensorKind.STATE)
    in_host = shape.placement.share(TensorKind.PARAMETERS, Tier.HOST)
    return in_host * shape.num_elements / shape.num_shards + shape.small.parameters


def _levels(shape: ModelShape, terms: BudgetTerms) -> Iterator[BudgetItem]:
    """With collectives over two levels: this rank's parts of the copies that the node keeps, and what is sent at a time."""
    if (network := shape.network) is None or not network.levels:
        return
    place, what = (Tier.DEVICE, "standing copies") if network.stands else (Tier.HOST, "copies")
    copied = network.copy_share * (shape.num_elements if network.stands else sum(shape.layer_elements)) * shape.param_bytes
    yield _item(place, f"{what} of the weights", copied / network.w, "vertical_schedule.levels.copy_share")
    gradients, largest = 2 * shape.gradient_bytes * max(shape.unit_gradients), max(shape.pre_elements, *shape.layer_elements)
    yield _item(Tier.DEVICE, "gradients sent over levels", gradients, _LEVELS)
    weights = sent_over_levels(largest, shape.param_bytes, network.w, is_rounded(network) * largest / network.w, terms.window)
    yield _item(Tier.DEVICE, "weights sent over levels", 0 if terms.one_memory else max(0, weights - gradients), _LEVELS)


def slot_bytes(shape: ModelShape, terms: BudgetTerms) -> float:
    """Bytes of the largest piece that goes through the optimizer's pipeline from or to SSD."""
    if shape.slot_bytes is not None:
        return shape.slot_bytes
    gradient = shape.gradient_bytes if shape.in_files(TensorKind.GRADIENTS) and terms.held_share else 0
    state = shape.state_bytes if shape.in_files(TensorKind.STATE) else 0
    return _largest_piece(shape) * (state + gradient)


def _gradients(shape: ModelShape, terms: BudgetTerms) -> float:
    """Elements of gradients in host memory: those that wait there, those being stepped early, those that leave for SSD. With
    the sums in the same memory (`_aliased`) those count until their unit's last element has left."""
    pre, *layers = (elements / shape.num_shards for elements in shape.unit_gradients)
    outside, largest = pre + shape.suf_gradients / shape.num_shards, max(layers)
    rank = outside + sum(layers)
    waits, on_ssd = terms.held_share, shape.in_files(TensorKind.GRADIENTS)
    passing = min(rank, terms.gradient_layers * largest + outside)
    sums = 0.0
    if waits < 1:
        sums = passing * (1.0 if _aliased(shape, terms) else 1 - waits)
    elif on_ssd and _aliased(shape, terms):
        sums = min(rank, largest + outside)
    return waits * (rank * (1 - on_ssd) + passing * on_ssd) + sums + (1 - waits) * shape.small.state


def _device(shape: ModelShape, terms: BudgetTerms) -> Iterator[BudgetItem]:
    count = terms.num_micro_batches
    parameters, sums = (0, 0) if _aliased(shape, terms) else _of_units(shape, terms)
    yield _item(Tier.DEVICE, "parameters", parameters, "vertical_schedule.prefetch_layers")
    yield _item(Tier.DEVICE, "gradient sums", sums, "vertical_schedule.blocks_per_layer")
    off = shape.placement.away(TensorKind.ACTIVATIONS)
    inputs, passing = count * shape.num_layers + 2, count * min(2, shape.num_layers) + 1  # the last layer is fused
    inputs = inputs * (1 - off) + passing * off
    yield _item(Tier.DEVICE, "activations between layers", inputs * shape.activation_bytes, "gradient_accumulation_steps")
    yield _item(Tier.DEVICE, BACKWARD, backward_bytes(shape, terms), "train_micro_batch_size_per_gpu")
    reducing = max(0, shape.reduce_bytes - backward_bytes(shape, terms))
    yield _item(Tier.DEVICE, NORM, reducing, "(largest parameter)")
    reducing, leaves = shape.num_shards > 1, not terms.one_memory and terms.window > 0
    leaving = 1 / shape.num_shards if leaves else 0.0
    under_way = max(shape.unit_gradients) * shape.gradient_bytes * (reducing + leaving)
    yield _item(Tier.DEVICE, LEAVING, under_way, "vertical_schedule.overlap")
    yield from _kept(shape, terms, Tier.DEVICE)


def _kept(shape: ModelShape, terms: BudgetTerms, tier: Tier) -> Iterator[BudgetItem]:
    """What forwards keep for their backwards: at rest, and on its way to another tier and back."""
    if shape.kept is not None:
        resting = shape.kept.resting_bytes(shape.num_layers, terms.num_micro_batches)
        yield _item(tier, "kept for the backward", resting[tier], _KEEP)
        yield _item(tier, "kept values on their way", shape.kept.buffer_bytes()[tier], _KEEP)


def backward_bytes(shape: ModelShape, terms: BudgetTerms) -> int:
    """What one layer's backward needs for one micro-batch; on the host, where gradients wait for the next micro-batch's, all of
    the layer's are there at a time, and those that wait: see [Note: gradients in pairs] in `grad_accumulator`. Where freed
    memory goes back, none wait while gradients are made outside the layers."""
    goes_back = terms.one_memory and not terms.keeps_freed
    return max(shape.working_bytes, (shape.freed.in_layers if goes_back else shape.working_bytes) + _paired_bytes(shape, terms))


def _paired_bytes(shape: ModelShape, terms: BudgetTerms) -> int:
    waits = terms.one_memory and terms.pairs and terms.num_micro_batches > 1
    return waits * 2 * max(shape.unit_gradients[1:]) * shape.param_bytes


def _largest_piece(shape: ModelShape) -> float:
    """Elements of the largest piece that goes through the optimizer's pipeline, at most: where a unit is cut depends on its
    parameters' sizes and on what of it is stepped early."""
    largest = largest_unit(shape)
    return largest if shape.part_elements is None else min(largest, shape.part_elements)


def largest_unit(shape: ModelShape) -> float:
    """Elements that this rank's optimizer steps of the unit that has most of them."""
    return max(shape.stepped(unit) for unit in shape.outside.around(range(shape.num_layers)))


def num_pieces(shape: ModelShape) -> int:
    """Pieces of this rank's state that are read from files, where units are cut into equal ones."""
    elements = (state_elements(shape, unit)[0] for unit in shape.outside.around(range(shape.num_layers)))
    return sum(math.ceil(count / (shape.part_elements or count)) for count in elements if count)


def _aliased(shape: ModelShape, terms: BudgetTerms) -> bool:
    """Whether a unit's parameters and gradient sums on the device are this rank's shards in host memory."""
    return terms.one_memory and shape.num_shards == 1


def _of_units(shape: ModelShape, terms: BudgetTerms) -> tuple[int, int]:
    """Bytes of gathered units and of gradient sums on the device, at the moment that has most of both: between the ends, at the
    last layer with the suffix, or at the prefix, behind the first layer."""
    pre, *layers = shape.unit_gradients
    outside: dict[Unit, tuple[int, int]] = {PRE: (shape.pre_elements, pre), SUF: (shape.suf_elements, shape.suf_gradients)}
    largest = sorted(shape.layer_elements, reverse=True)
    layer_sums = max(layers) * (shape.gradient_bytes if terms.num_micro_batches > 1 else shape.param_bytes)
    moments = [(sum(largest[: terms.window + 1]), layer_sums, 0)]
    if SUF in shape.apart:
        moments.append((moments[0][0] + outside[SUF][0], layer_sums, outside[SUF][1]))
    if PRE in shape.apart:
        moments.append((sum(largest[: terms.window]) + outside[PRE][0], 0, outside[PRE][1]))
    stays, sums = (sum(outside[unit][n] for unit in shape.outside.staying) for n in (0, 1))
    found = [(shape.param_bytes * (p + stays), g + shape.gradient_bytes * (s + sums)) for p, g, s in moments]
    return max(found, key=sum)


def _item(tier: Tier, what: str, num_bytes: float, key: str) -> BudgetItem:
    return BudgetItem(tier, what, round(num_bytes), key)


def budget_lines(items: tuple[BudgetItem, ...]) -> list[str]:
    """A table with one line per item and one per tier."""
    lines = [f"{'tier':<8}{'what':<28}{'MiB':>12}  decided by"]
    for tier in dict.fromkeys(item.tier for item in items):
        for item in (item for item in items if item.tier == tier):
            lines.append(f"{tier:<8}{item.what:<28}{item.num_bytes / 2**20:>12.1f}  {item.key}")
        lines.append(f"{tier:<8}{'total':<28}{total_bytes(items, tier) / 2**20:>12.1f}")
    return lines
