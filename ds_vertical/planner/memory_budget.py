"""How much memory a run needs, by closed formulas, before anything is allocated; and the check against a budget.

P elements of this rank, M micro-batches, L layers, layers of at most N elements, window w, A bytes per activation:

    host    parameter buffers    b N and `pre`, in the parameters' dtype; b of `layer_buffers`, which is w + 3
            optimizer slots      slots x part x (state + parameter bytes)
            gradients            4P of the share that waits there, 4N of a few layers for what is stepped early or goes to SSD
            activations          M L A of the share that is kept there
            at rest              parameters and state that are not on SSD
    device  parameters           (w + 1) N and `pre`, gathered (none where they are the host's buffers)
            gradient sums        4N of one layer (two while one is copied out) and of `pre`
            activations          M L A + 2 A: layer inputs, and the gradients between two layers
            working              what one layer's backward needs for one micro-batch, and on the host the gradients of the last

Where device and host are one memory, all of it is the host's; with one rank the gathered parameters are then the buffers and
the sums the gradients that wait, and count once. The total is what is allocated, so it is at least what `memory_timeline`
finds in use. What a formula cannot know (the interpreter, what stock allocates) is handed in as further items.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ds_vertical.errors import MemoryBudgetError
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.schedule.events import LEAD, MAX_STEPS, PRE

SLOTS: Final = 4  # pieces of state in the optimizer's pipeline at a time
PART_ELEMENTS: Final = 1 << 21  # of such a piece, at most
STOCK_BUFFERS: Final = 4  # what stock needs for its own uses of a chunk of state: master, moments, gradient
_IN_FLIGHT: Final = f"(up to {SLOTS} pieces; one without overlap)"
_KNOBS: Final = (
    # field of Settings, JSON path, least value
    ("window", "vertical_schedule.prefetch_layers", 0),
    ("num_micro_batches", "gradient_accumulation_steps", 1),
)


def num_slots(num_pieces: int, overlap: bool) -> int:
    """Pieces of state in memory at a time. Without overlap one: it is read, computed and written before the next is read."""
    return min(SLOTS if overlap else 1, num_pieces)


@dataclass(frozen=True)
class Settings:
    """What decides about memory besides the model.

    `slots`: pieces of state in memory at a time. `held_share`: of all gradients, the share that waits for its step (1
    where steps follow NORM or may be redone, alpha for delayed parts, 0 where every step is early). `gradient_layers`:
    layers whose gradients are under way otherwise: as many as are stepped or written to SSD at a time, and one more.
    `layer_major`: the order of the micro-batches.
    """

    num_micro_batches: int
    window: int = 1
    slots: int = SLOTS
    held_share: float = 1.0
    gradient_layers: int = MAX_STEPS + 1
    one_memory: bool = False
    layer_major: bool = True


@dataclass(frozen=True)
class BudgetItem:
    """Bytes of one purpose in one tier; `key`: the JSON path that changes them most directly, in brackets what else does."""

    tier: str
    what: str
    num_bytes: int
    key: str


def layer_buffers(window: int, num_layers: int) -> int:
    """Host buffers for layers: of those in the window, of the one that computes, of those whose steps are under way."""
    return min(max(window + MAX_STEPS, LEAD) + 1, num_layers)


def budget(shape: ModelShape, settings: Settings, further: tuple[BudgetItem, ...] = ()) -> tuple[BudgetItem, ...]:
    """What is needed, largest first in each tier; tiers "device" and "host", or "host" alone with one memory."""
    items = [*_host(shape, settings), *_device(shape, settings), *further]
    if settings.one_memory:
        items = [dataclasses.replace(item, tier="host") for item in items]
    return tuple(sorted((item for item in items if item.num_bytes), key=lambda item: (item.tier, -item.num_bytes)))


def total_bytes(items: tuple[BudgetItem, ...], tier: str) -> int:
    return sum(item.num_bytes for item in items if item.tier == tier)


def _host(shape: ModelShape, settings: Settings) -> Iterator[BudgetItem]:
    placement, rank = shape.placement, shape.num_elements / shape.num_shards
    pre_files, *layer_files = shape.unit_files
    buffers = layer_buffers(settings.window, sum(map(bool, layer_files))) * max(layer_files) + pre_files
    yield _item("host", "parameter buffers", buffers, "vertical_schedule.prefetch_layers")
    resting = rank * shape.param_bytes * (1 - placement.parameters_on_ssd)
    yield _item("host", "parameters at rest", resting, "zero_optimization.offload_param.device")
    resting = rank * shape.state_bytes * (1 - placement.state_on_ssd)
    yield _item("host", "optimizer state at rest", resting, "zero_optimization.offload_optimizer.device")
    yield _item("host", "optimizer slots", settings.slots * _slot_bytes(shape, settings), _IN_FLIGHT)
    yield _item("host", "gradients", _gradients(shape, settings) * shape.gradient_bytes, "vertical_schedule.optimizer_delay")
    kept = settings.num_micro_batches * shape.num_layers * shape.activation_bytes * placement.activations_on_host
    yield _item("host", "activations", kept, "gradient_accumulation_steps")


def _slot_bytes(shape: ModelShape, settings: Settings) -> float:
    """Bytes of the largest piece that goes through the optimizer's pipeline from or to SSD."""
    if shape.slot_bytes is not None:
        return shape.slot_bytes
    placement = shape.placement
    gradient = shape.gradient_bytes if placement.gradients_on_ssd and settings.held_share else 0
    state = shape.state_bytes * placement.state_on_ssd + shape.param_bytes * placement.parameters_on_ssd
    return _largest_piece(shape) * ((state if placement.state_on_ssd else 0.0) + gradient)


def _gradients(shape: ModelShape, settings: Settings) -> float:
    """Elements of gradients in host memory: those that wait there, those being stepped early, those that leave for SSD. With
    the sums in the same memory (`_aliased`) those count until their unit's last element has left."""
    pre, *layers = (elements / shape.num_shards for elements in shape.unit_gradients)
    rank, largest = pre + sum(layers), max(layers)
    waits, on_ssd = settings.held_share, shape.placement.gradients_on_ssd
    passing = min(rank, settings.gradient_layers * largest + pre)
    sums = 0.0
    if waits < 1:
        sums = passing * (1.0 if _aliased(shape, settings) else 1 - waits)
    elif on_ssd and _aliased(shape, settings):
        sums = min(rank, largest + pre)
    return waits * (rank * (1 - on_ssd) + passing * on_ssd) + sums


def _device(shape: ModelShape, settings: Settings) -> Iterator[BudgetItem]:
    count, (pre, *layers) = settings.num_micro_batches, shape.unit_gradients
    parameters = 0 if _aliased(shape, settings) else _fetched(shape, settings) * shape.param_bytes
    yield _item("device", "parameters", parameters, "vertical_schedule.prefetch_layers")
    at_once = 1 if settings.one_memory else min(2, shape.num_layers)
    sums = 0 if _aliased(shape, settings) else (at_once * max(layers) + pre) * shape.gradient_bytes
    yield _item("device", "gradient sums", sums, "vertical_schedule.blocks_per_layer")
    off = shape.placement.activations_off_device
    kept, passing = count * shape.num_layers + 2, count * min(2, shape.num_layers) + 1  # the last layer is fused
    inputs = kept * (1 - off) + passing * off
    yield _item("device", "activations between layers", inputs * shape.activation_bytes, "gradient_accumulation_steps")
    yield _item("device", "one layer's backward", backward_bytes(shape, settings), "train_micro_batch_size_per_gpu")


def backward_bytes(shape: ModelShape, settings: Settings) -> int:
    """What one layer's backward needs for one micro-batch; on the host it has the gradients of the one before beside it, which
    wait in layer-major order: see [Note: gradients in pairs] in `grad_accumulator`."""
    waits = settings.one_memory and settings.layer_major and settings.num_micro_batches > 1
    return shape.working_bytes + waits * max(shape.unit_gradients[1:]) * shape.param_bytes


def _largest_piece(shape: ModelShape) -> float:
    """Elements of the largest piece that goes through the optimizer's pipeline: units are cut into equal ones."""
    shards = [shape.shard(unit) for unit in (PRE, *range(shape.num_layers))]
    if shape.part_elements is None:
        return max(shards)
    return max(shard / max(1, math.ceil(shard / shape.part_elements)) for shard in shards)


def _aliased(shape: ModelShape, settings: Settings) -> bool:
    """Whether a unit's parameters and gradient sums on the device are this rank's shards in host memory."""
    return settings.one_memory and shape.num_shards == 1


def _fetched(shape: ModelShape, settings: Settings) -> int:
    """Most elements of gathered units at a time."""
    largest = sorted(shape.layer_elements, reverse=True)[: settings.window + 1]
    return sum(largest) + shape.pre_elements


def _item(tier: str, what: str, num_bytes: float, key: str) -> BudgetItem:
    return BudgetItem(tier, what, round(num_bytes), key)


def budget_lines(items: tuple[BudgetItem, ...]) -> list[str]:
    """A table with one line per item and one per tier."""
    lines = [f"{'tier':<8}{'what':<28}{'MiB':>12}  decided by"]
    for tier in dict.fromkeys(item.tier for item in items):
        for item in (item for item in items if item.tier == tier):
            lines.append(f"{tier:<8}{item.what:<28}{item.num_bytes / 2**20:>12.1f}  {item.key}")
        lines.append(f"{tier:<8}{'total':<28}{total_bytes(items, tier) / 2**20:>12.1f}")
    return lines


def check_budget(
    shape: ModelShape,
    settings: Settings,
    further: tuple[BudgetItem, ...] = (),
    *,
    host_bytes: int | None = None,
    device_bytes: int | None = None,
) -> tuple[BudgetItem, ...]:
    """The budget, if it fits into the bytes given (None: not checked). Raises MemoryBudgetError for all tiers at once."""
    items = budget(shape, settings, further)
    limits = {"host": host_bytes, "device": device_bytes}
    over = [tier for tier, limit in limits.items() if limit is not None and total_bytes(items, tier) > limit]
    if over:
        faults = "\n".join(_fault(shape, settings, further, tier, limits[tier] or 0) for tier in over)
        raise MemoryBudgetError(faults + "\n" + "\n".join(budget_lines(items)))
    return items


def _fault(shape: ModelShape, settings: Settings, further: tuple[BudgetItem, ...], tier: str, limit: int) -> str:
    items = budget(shape, settings, further)
    needed = total_bytes(items, tier)
    remedies = [
        f'"{key}": {fitting} (now {getattr(settings, name)})'
        for name, key, least in _KNOBS
        if (fitting := _fitting(shape, settings, further, tier, limit, name, least)) is not None
    ]
    if remedies:
        remedy = f"write {' or '.join(remedies)}"
    else:
        smallest = dataclasses.replace(settings, **{name: least for name, _, least in _KNOBS})
        left = total_bytes(budget(shape, smallest, further), tier)
        together = " and ".join(f'"{key}": {least}' for _, key, least in _KNOBS)
        item = next(item for item in items if item.tier == tier and not item.key.startswith("("))
        remedy = f"{together} would need {left}; most is {item.what}, {item.num_bytes} bytes: change {item.key}"
    return f"{tier} memory: needs {needed} bytes, {limit} are allowed, {needed - limit} too few; {remedy}"


def _fitting(
    shape: ModelShape, settings: Settings, further: tuple[BudgetItem, ...], tier: str, limit: int, name: str, least: int
) -> int | None:
    """The largest value of one setting, below the present one, with which the tier fits."""
    for value in range(getattr(settings, name) - 1, least - 1, -1):
        changed = dataclasses.replace(settings, **{name: value})
        if total_bytes(budget(shape, changed, further), tier) <= limit:
            return value
    return None
