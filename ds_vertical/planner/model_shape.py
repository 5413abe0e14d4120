"""What a plan has to know of a model: elements, operations, bytes and seconds, before anybody has run it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ds_vertical.errors import CostsError
from ds_vertical.planner.kept_activations import KeepMenu, KeptShare, PolicyPoint, concave, mean_menu, thinned
from ds_vertical.planner.network import Network
from ds_vertical.schedule.events import Outside
from ds_vertical.types import LARGE_GRADIENT, PRE, SUF, ActivationPolicy, Placement, TensorKind, Unit, check_number, refuse

REPLAY_S: Final = 10e-6  # of the host, for an operation that a recompute with left-out operations runs (assumed)
_HALF_BYTES: Final = 2  # of a master: its low half, or the bf16 parameter that has the other one
DTYPE_BYTES: Final = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class SufShape:
    """The unit behind the last layer: its elements, and those that the optimizer steps, on all ranks; bytes of its parameter
    files on this rank (null: what elements and placement say)."""

    elements: int
    gradients: int
    files: int | None = None


@dataclass(frozen=True)
class SmallTensors:
    """What stays in host memory wherever the JSON puts it, since DeepSpeed makes no files so small: elements of this rank's
    `parameters`, and of those whose optimizer `state` does."""

    parameters: int = 0
    state: int = 0


@dataclass(frozen=True)
class FreedBytes:
    """What a backward makes and frees again: the most of any unit's, and of a layer's. `in_layers`: the latter, with what
    autograd keeps of the layer's forward, as far as that is known."""

    most: int = 0
    of_layers: int = 0
    in_layers: int = 0


@dataclass(frozen=True)
class ModelShape:
    """A model as the schedule sees it: elements per unit, seconds per micro-batch, bytes.

    `forward_s`, `backward_s`: one layer (of largest size), one micro-batch; backward without the recompute, with the sum
    into the gradient. Smaller layers cost in proportion to their elements. `head_s`: suffix, loss and their backward.
    `activation_bytes`: what passes from a layer to the next for one micro-batch. `num_shards`: ranks that share each parameter.
    `state_bytes`: per element, fp32 master and two moments. `generations`: copies of the files of state and parameters on SSD
    (2 where steps may be discarded). `part_elements`: most elements of a piece that goes through the optimizer pipeline by
    itself (null: a unit or its part at once). `working_bytes`: what a layer needs on the device while it runs backward for one
    micro-batch. `reduce_bytes`: what a REDUCE needs beside the sums. `files`: bytes of the parameter files of `pre` and of each
    layer on this rank, `gradients`: their elements that the optimizer steps, `slot_bytes`: of the largest piece's state (null:
    what placement, elements and `part_elements` say). `kept`: what forwards keep for backwards (null: nothing). `suf`: the unit
    of what the suffix alone uses (null: that belongs to `pre`); `apart`: the units outside the layers that are away where other
    code runs, see `Outside`. `network`: how the ranks lie on nodes (null: collectives take no time). `state_places`: of units
    with other shares than the placement's, the elements whose state this rank has in files and in memory. `compressed`: of each
    master in files the low half is read and written; any step but an early one reads the parameter, too. `small`: what files
    are too small for (none, where `files` and `placement` leave it out). `freed`: what backwards free, where autograd keeps
    nothing for them. `copied`: elements of this rank's parameters in memory whose state is in files (null: what the placement
    says). `blocks_per_layer`: of a layer of largest size. Raises CostsError.
    """

    pre_elements: int
    layer_elements: tuple[int, ...]
    forward_s: float
    backward_s: float
    activation_bytes: int
    pre_forward_s: float = 0.0
    pre_backward_s: float = 0.0
    head_s: float = 0.0
    param_bytes: int = 2
    gradient_bytes: int = 4
    state_bytes: int = 12
    num_shards: int = 1
    generations: int = 1
    part_elements: int | None = None
    recompute_last: bool = True
    working_bytes: int = 0
    reduce_bytes: int = 0
    placement: Placement = Placement()
    files: tuple[int, ...] | None = None
    gradients: tuple[int, ...] | None = None
    slot_bytes: int | None = None
    kept: KeptShare | None = None
    suf: SufShape | None = None
    apart: tuple[Unit, ...] = ()
    network: Network | None = None
    state_places: tuple[tuple[Unit, float, float], ...] = ()
    compressed: bool = False
    small: SmallTensors = SmallTensors()
    freed: FreedBytes = FreedBytes()
    copied: float | None = None
    blocks_per_layer: int = 1

    def __post_init__(self) -> None:
        if not self.layer_elements:
            raise refuse("model", "layer_elements", self.layer_elements, "the elements of each layer, at least one")
        for elements in (each for each in self._units if type(each) is not int or each < 0):  # few of many layers
            check_number("model", "layer_elements and pre_elements", elements, 0, "whole numbers, 0 or more", whole=True)
        for key in ("forward_s", "backward_s", "pre_forward_s", "pre_backward_s", "head_s"):
            check_number("model", key, getattr(self, key), 0.0, "seconds, 0 or more")
        for key in ("activation_bytes", "gradient_bytes", "state_bytes", "working_bytes", "reduce_bytes"):
            check_number("model", key, getattr(self, key), 0, "bytes, 0 or more", whole=True)
        for key in ("param_bytes", "num_shards", "generations", "blocks_per_layer"):
            check_number("model", key, getattr(self, key), 1, "a whole number, 1 or more", whole=True)
        if self.part_elements is not None:
            check_number("model", "part_elements", self.part_elements, 1, "elements, 1 or more, or null", whole=True)

    @property
    def num_layers(self) -> int:
        """Of the schedule: each of `blocks_per_layer` blocks."""
        return len(self.layer_elements)

    @property
    def num_elements(self) -> int:
        """Of all units, on all ranks."""
        return outside_elements(self) + sum(self.layer_elements)

    @property
    def suf_elements(self) -> int:
        """Of `suf`, on all ranks; 0 where it is no unit."""
        return 0 if self.suf is None else self.suf.elements

    @property
    def outside(self) -> Outside:
        """The units outside the layers, as schedules move them."""
        return Outside(self.suf is not None, self.apart)

    @property
    def unit_files(self) -> tuple[float, ...]:
        """Bytes of the parameter files of `pre` and of each layer on this rank. Where a share of the parameters is in memory, a
        plan counts each unit's as whole: a run has whole parameters there, of which a unit may have few."""
        each = self.param_bytes * (self.in_files(TensorKind.PARAMETERS) > 0) / self.num_shards
        return tuple(elements * each for elements in self._units) if self.files is None else self.files

    @property
    def suf_gradients(self) -> int:
        """Elements of `suf` that have a gradient, on all ranks."""
        return 0 if self.suf is None else self.suf.gradients

    @property
    def second_bytes(self) -> float:
        """Bytes of a second generation of files for each element that is stepped: its state, and the parameter. What has its
        state in memory has none."""
        each = state_file_bytes(self) + self.param_bytes * self.in_files(TensorKind.PARAMETERS)
        return each * self.in_files(TensorKind.STATE)

    def in_files(self, kind: TensorKind) -> float:
        """The share of `kind` that rests in files."""
        return self.placement.in_files(kind)

    @property
    def unit_gradients(self) -> tuple[int, ...]:
        """Elements of `pre` and of each layer that have a gradient, on all ranks."""
        return self._units if self.gradients is None else self.gradients

    @property
    def stepped_elements(self) -> int:
        """Of all units, on all ranks: those of parameters that are trained."""
        return sum(self.unit_gradients) + self.suf_gradients

    @property
    def _units(self) -> tuple[int, ...]:
        return (self.pre_elements, *self.layer_elements)

    def elements(self, unit: Unit | None) -> int:
        """All elements of `pre`, `suf` or of a layer. Raises CostsError for a layer it lacks."""
        if not isinstance(unit, int):
            return self.pre_elements if unit == PRE else self.suf_elements if unit == SUF else 0
        if unit >= self.num_layers:
            raise CostsError(f"the schedule names layer {unit}; the model has {self.num_layers}")
        return self.layer_elements[unit]

    def shard(self, unit: Unit | None) -> float:
        """Elements of a unit that this rank keeps."""
        return self.elements(unit) / self.num_shards

    def stepped(self, unit: Unit | None) -> float:
        """Elements of a unit that this rank's optimizer steps."""
        if unit == SUF:
            return self.suf_gradients / self.num_shards
        if self.gradients is None or not self.elements(unit):
            return self.shard(unit)
        return self.gradients[1 + unit if isinstance(unit, int) else 0] / self.num_shards


def state_elements(shape: ModelShape, unit: Unit | None) -> tuple[float, float]:
    """Of the elements of a unit that this rank's optimizer steps, those with their state in files, and in memory."""
    for other, in_files, in_memory in shape.state_places:
        if other == unit:
            return in_files, in_memory
    in_files = shape.stepped(unit) * shape.in_files(TensorKind.STATE)
    return in_files, shape.stepped(unit) - in_files


def state_written(shape: ModelShape) -> int:
    """Bytes of state in files that a step writes for each element."""
    return shape.state_bytes - _HALF_BYTES * shape.compressed


def state_read(shape: ModelShape, early: bool) -> int:
    """Bytes that a step reads for each element whose state is in files, `early` or not."""
    return state_written(shape) if early else shape.state_bytes


def state_file_bytes(shape: ModelShape) -> int:
    """Bytes of one generation of files of state for each element: compressed masters have files beside the whole ones'."""
    return shape.state_bytes + _HALF_BYTES * shape.compressed


def outside_elements(shape: ModelShape) -> int:
    """Elements of the units outside the layers, on all ranks."""
    return shape.pre_elements + shape.suf_elements


def suf_files(shape: ModelShape) -> float:
    """Bytes of the parameter files of `suf` on this rank; as `ModelShape.unit_files`."""
    if shape.suf is not None and shape.suf.files is not None:
        return float(shape.suf.files)
    return shape.suf_elements * shape.param_bytes * (shape.in_files(TensorKind.PARAMETERS) > 0) / shape.num_shards


@dataclass(frozen=True)
class CountedPoint:
    """What a policy saves of the recompute of one block over one sequence, for `num_bytes` that rest: floating-point
    operations, and bytes that all left-out operations read and make. `num_run`: operations that are still run. `outputs`: see
    `PolicyPoint`."""

    policy: ActivationPolicy
    num_bytes: int
    flops: float
    moved_bytes: int
    num_run: int
    outputs: int | None = None


@dataclass(frozen=True)
class CountedMenu:
    """What one kind of block offers to keep; `flops` and `moved_bytes` of its whole forward over one sequence."""

    kind: str
    num_blocks: int
    flops: float
    moved_bytes: int
    points: tuple[CountedPoint, ...]

    def menu(self, sequences: int, seconds: Seconds, flops_per_byte: float) -> KeepMenu:
        """Seconds and bytes of a micro-batch of so many sequences. A byte that is read or made counts as `flops_per_byte`
        operations; each operation that is run again costs `REPLAY_S` besides. Where a point of this kind has been timed, that
        counts instead, and so in proportion where all outputs of its policy have been, and not so many."""
        whole = (self.flops + flops_per_byte * self.moved_bytes) or 1.0
        timed = seconds.saved_shares.get(self.kind, {})
        counted = [(point, (point.flops + flops_per_byte * point.moved_bytes) / whole) for point in self.points]
        full = {point.policy: share for point, share in counted if point.outputs is None}
        points = []
        for point, share in counted:
            saved = share * seconds.block_forward - REPLAY_S * point.num_run
            if point.policy in timed:
                part = share / full[point.policy] if full.get(point.policy) else 1.0
                saved = part * timed[point.policy] * seconds.block_forward
            made = PolicyPoint(point.policy, sequences * point.num_bytes, max(0.0, saved), point.outputs)
            points.append(replace(made, saved_s=timed[made.name] * seconds.block_forward) if made.name in timed else made)
        return KeepMenu(self.kind, self.num_blocks, thinned(concave(points)))


@dataclass(frozen=True)
class ModelSpec:
    """A model and a sequence length, in tokens. `block_elements`: parameters' elements of each block in order of execution;
    `pre_elements`: those of all that is outside the blocks.

    `block_flops`: floating-point operations of one block's forward over one sequence, `pre_flops` and `head_flops` of what
    stands before and behind the blocks. `passed_bytes`: what passes between two blocks for one sequence; `block_saved_bytes`
    and `head_saved_bytes`: what autograd keeps of one block's and of the suffix's forward. `largest_parameter`: elements.
    `trained`: of the elements outside the blocks and of each block, those that are trained (None: all). `block_frozen_flops`
    and `head_frozen_flops`: of the forward's operations, those with weights that are not trained. `menus`: what each kind of
    block may keep for its backward. `suf`: of the elements outside the blocks, those that the suffix alone uses (null: none are
    known to be such); `apart`: the units outside the layers that may be away (`layers`, [Note: two ends]). `block_sizes`:
    elements of each parameter of the largest block, `outside_sizes`: of each outside the blocks (none: no parameter is small);
    `trained_sizes`: both, of those that are trained, and of the block that has most of them (None: all).
    `ends_in_turn`: whether the forwards' sources show that nothing but the suffix uses `suf`. `made_by_products`: whether
    all large gradients are made by matrix products or lookups. `sums_in_fp32`: whether kernels of the host sum a gradient in a
    copy in fp32.
    """

    name: str
    sequence_length: int
    dtype: str
    pre_elements: int
    block_elements: tuple[int, ...]
    largest_parameter: int
    block_flops: float
    pre_flops: float
    head_flops: float
    passed_bytes: int
    block_saved_bytes: int
    head_saved_bytes: int
    menus: tuple[CountedMenu, ...] = ()
    trained: tuple[int, ...] | None = None
    block_frozen_flops: float = 0.0
    head_frozen_flops: float = 0.0
    suf: SufShape | None = None
    apart: tuple[Unit, ...] = ()
    block_sizes: tuple[int, ...] = ()
    outside_sizes: tuple[int, ...] = ()
    trained_sizes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    ends_in_turn: bool = False
    made_by_products: bool = False
    sums_in_fp32: bool = True

    @property
    def num_elements(self) -> int:
        """Of all parameters."""
        return self.pre_elements + sum(self.block_elements)

    @property
    def trained_elements(self) -> int:
        """Of all parameters that are trained."""
        return self.num_elements if self.trained is None else sum(self.trained)

    @property
    def flops(self) -> float:
        """Operations of forward and backward over one sequence; what is computed again is not counted."""
        return 3 * (self.pre_flops + len(self.block_elements) * self.block_flops + self.head_flops)

    def shortened(self, sequence_length: int) -> ModelSpec:
        """The model with shorter sequences, nearly: what passes and what is kept shrink in proportion; seconds do not."""
        part = sequence_length / self.sequence_length
        names = ("passed_bytes", "block_saved_bytes", "head_saved_bytes")
        sizes = {name: math.ceil(part * getattr(self, name)) for name in names}
        return replace(self, sequence_length=sequence_length, **sizes, menus=())

    def menu(self, sequences: int, blocks_per_layer: int, seconds: Seconds, flops_per_byte: float) -> KeepMenu | None:
        """What a layer may keep of its forward for a micro-batch: bytes and seconds of the mean layer. None where nothing has
        been counted."""
        mean = mean_menu([menu.menu(sequences, seconds, flops_per_byte) for menu in self.menus])
        return None if mean is None else mean.times(blocks_per_layer)

    def layers(self, blocks_per_layer: int) -> tuple[int, ...]:
        """Elements of each layer of so many consecutive blocks; the last may have fewer."""
        return _by_layer(self.block_elements, blocks_per_layer)

    def gradients(self, blocks_per_layer: int) -> tuple[int, ...] | None:
        """Trained elements outside the blocks and of each layer; None: all."""
        return None if self.trained is None else (self.trained[0], *_by_layer(self.trained[1:], blocks_per_layer))


def _by_layer(blocks: tuple[int, ...], blocks_per_layer: int) -> tuple[int, ...]:
    return tuple(sum(blocks[i : i + blocks_per_layer]) for i in range(0, len(blocks), blocks_per_layer))


@dataclass(frozen=True)
class Seconds:
    """Seconds that one micro-batch takes in the pieces of a model: in one block's forward and backward (without recompute), in
    the prefix, in the suffix (`head`, forward and backward together). `saved_shares`: by the class of a block, the share of its
    forward that each point of a menu, by its name, saves in its backward, as far as that has been timed."""

    block_forward: float
    block_backward: float
    pre_forward: float
    pre_backward: float
    head: float
    saved_shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def pieces(self) -> dict[str, float]:
        """The seconds by their names."""
        names = ("block_forward", "block_backward", "pre_forward", "pre_backward", "head")
        return {name: getattr(self, name) for name in names}

    def times(self, factor: float) -> Seconds:
        """All of them so much longer."""
        return replace(self, **{name: factor * seconds for name, seconds in self.pieces.items()})


def without_frozen(spec: ModelSpec, seconds: Seconds) -> Seconds:
    """`seconds`, of a model that is trained whole, for what of it is trained: a backward, which has twice its forward's
    operations, leaves half of those with frozen weights out, since these have no gradient."""
    if spec.trained is None:
        return seconds
    block, head = 2 * spec.block_flops, 3 * spec.head_flops
    return replace(
        seconds,
        block_backward=seconds.block_backward * (1 - spec.block_frozen_flops / block if block else 1),
        pre_backward=seconds.pre_backward if spec.trained[0] else 0.0,
        head=seconds.head * (1 - spec.head_frozen_flops / head if head else 1),
    )


def estimated(spec: ModelSpec, sequences: int, flops_per_s: float) -> Seconds:
    """Seconds at a rate of floating-point operations: a backward has twice as many as its forward, the head has both; see
    `without_frozen`."""
    if not flops_per_s > 0:
        raise CostsError(f"flops_per_s: got {flops_per_s!r}; write a rate above 0, per second")
    forward = sequences * spec.block_flops / flops_per_s
    pre, head = (sequences * flops / flops_per_s for flops in (spec.pre_flops, spec.head_flops))
    return without_frozen(spec, Seconds(forward, 2 * forward, pre, 2 * pre, 3 * head))


def shaped(shape: ModelShape, seconds: Seconds, blocks_per_layer: int = 1) -> ModelShape:
    """`shape` with the seconds of its pieces; its last layer is not recomputed, as in the vertical order."""
    forward_s, backward_s = blocks_per_layer * seconds.block_forward, blocks_per_layer * seconds.block_backward
    outside = {"pre_forward_s": seconds.pre_forward, "pre_backward_s": seconds.pre_backward, "head_s": seconds.head}
    blocks = {"blocks_per_layer": blocks_per_layer, "forward_s": forward_s, "backward_s": backward_s}
    return replace(shape, **blocks, **outside, recompute_last=False)


@dataclass(frozen=True)
class Division:
    """How a model and its batch are cut up: `sequences` of a micro-batch, blocks of a layer, ranks that share each parameter
    (`num_shards`); `generations`, `part_elements`, `placement` and `network` as in `ModelShape`. `apart`: what lies outside the
    layers is fetched where it is used, as far as the model lets it. `one_memory`: device and host are one."""

    sequences: int
    blocks_per_layer: int = 1
    num_shards: int = 1
    generations: int = 1
    part_elements: int | None = None
    placement: Placement = Placement()
    apart: bool = False
    network: Network | None = None
    one_memory: bool = False


def kernel_copy_bytes(largest_trained: int, largest_frozen: int, param_bytes: int, in_fp32: bool) -> int:
    """A kernel's own copy of the largest gradient, where it sums that `in_fp32`, or of the largest parameter that is not
    trained, in the kernel's order. Both: elements of a parameter."""
    return max(4 * in_fp32 * largest_trained, param_bytes * largest_frozen)


def _freed(spec: ModelSpec, division: Division) -> FreedBytes:
    """What a backward needs besides parameters and sums: gradients that have been made and not added yet, of a layer the small
    ones and a large one, of the code ahead of the layers all, or behind them; and a kernel's own copy."""
    param_bytes, largest, blocks = DTYPE_BYTES[spec.dtype], spec.largest_parameter, division.blocks_per_layer
    outside, *layers = spec.gradients(blocks) or (spec.pre_elements, *spec.layers(blocks))
    suf = spec.suf.gradients if spec.suf is not None and (division.apart or spec.ends_in_turn) else 0
    trained, in_block = min(largest, max(outside, *layers)), max(spec.block_sizes, default=largest)
    frozen, in_fp32 = spec.trained is not None, spec.sums_in_fp32
    made = max(_made_at_once(spec, division, max(layers)), outside - suf, suf)
    most = param_bytes * made + kernel_copy_bytes(trained, frozen * largest, param_bytes, in_fp32)
    made = _made_at_once(replace(spec, largest_parameter=in_block), division, max(layers))
    of_layers = param_bytes * made + kernel_copy_bytes(min(in_block, max(layers)), frozen * in_block, param_bytes, in_fp32)
    return FreedBytes(most, min(of_layers, most), of_layers + blocks * division.sequences * spec.block_saved_bytes)


def _made_at_once(spec: ModelSpec, division: Division, most: int) -> int:
    """Elements of a layer's gradients that are there at a time, of `most` that it has."""
    small = sum(size for size in spec.block_sizes if size < LARGE_GRADIENT)
    return min(most, division.blocks_per_layer * small + spec.largest_parameter)


def _working_bytes(spec: ModelSpec, division: Division) -> int:
    """What a backward needs besides parameters and sums, with what autograd keeps of the forward. A device's kernels make no
    copies while the most of that is there, those of the host do."""
    param_bytes, trained = DTYPE_BYTES[spec.dtype], spec.gradients(division.blocks_per_layer)
    outside, *layers = trained or (spec.pre_elements, *spec.layers(division.blocks_per_layer))
    suf = spec.suf.gradients if spec.suf is not None and (division.apart or spec.ends_in_turn) else None
    in_block, in_suffix = (division.sequences * saved for saved in (spec.block_saved_bytes, spec.head_saved_bytes))
    in_layer = param_bytes * _made_at_once(spec, division, max(layers)) + division.blocks_per_layer * in_block
    in_head = param_bytes * (outside if suf is None else suf) + in_suffix + in_block
    in_prefix = param_bytes * (outside - (suf or 0))
    needed, largest = max(in_layer, in_head, in_prefix), spec.largest_parameter
    if division.one_memory:
        frozen = 0 if spec.trained is None else largest
        return needed + kernel_copy_bytes(min(largest, max(outside, *layers)), frozen, param_bytes, spec.sums_in_fp32)
    copied = 0 if trained is None else largest * param_bytes
    return max(copied + needed, _freed(spec, division).most)


def shape_of(spec: ModelSpec, seconds: Seconds, division: Division) -> ModelShape:
    """The model as the schedule sees it. `seconds`: of one micro-batch of that many sequences."""
    blocks_per_layer, sequences = division.blocks_per_layer, division.sequences
    gradients = spec.gradients(blocks_per_layer)
    suf = spec.suf if division.apart else None
    pre_elements = spec.pre_elements - (0 if suf is None else suf.elements)
    if gradients is not None and suf is not None:
        gradients = (gradients[0] - suf.gradients, *gradients[1:])
    shape = ModelShape(
        *(pre_elements, spec.layers(blocks_per_layer), 0.0, 0.0, sequences * spec.passed_bytes),
        param_bytes=DTYPE_BYTES[spec.dtype],
        num_shards=division.num_shards,
        generations=division.generations,
        part_elements=division.part_elements,
        working_bytes=_working_bytes(spec, division),
        freed=_freed(spec, division),
        placement=division.placement,
        gradients=gradients,
        suf=suf,
        apart=spec.apart if division.apart else (),
        network=division.network,
    )
    return shaped(shape, seconds, blocks_per_layer)
