"""Reads the spec of a Hugging Face model from its configuration alone: sizes, operations and saved bytes.

The model is built and run with torch's fake tensors, which have shapes and no memory. (On the meta device models ask for the
values of tensors, which they do not do with fake ones.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import FunctionCtx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ds_vertical.cli.common import JsonObject
from ds_vertical.cli.plan.block_ops import BlockRecord
from ds_vertical.engine.budget.kernel_copies import are_made_by_products
from ds_vertical.errors import ConfigError, LayerError
from ds_vertical.model.hf import build_model, refused
from ds_vertical.model.layers import LayerMap, kind_names, map_layers
from ds_vertical.planner.model_shape import CountedMenu, ModelSpec, SufShape
from ds_vertical.types import SUF

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class _Attention(torch.autograd.Function):
    """Attention as fused kernels do it: keeps its inputs and its output, never the square of the sequence length."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, out)
        return out


@dataclass(frozen=True)
class _Mark:
    """What had been counted when a forward entered or left a block."""

    flops: float
    kept_bytes: int
    passed_bytes: int


@dataclass
class _Meter:
    """Operations and kept bytes, counted on while pieces of a model run."""

    attention_flops: float = 0.0
    kept: dict[int, int] = field(default_factory=dict)  # by storage
    weights: frozenset[int] = frozenset()
    alive: list[torch.Tensor] = field(default_factory=list)  # a storage's number is free again once it is gone
    record: BlockRecord | None = None  # of the block that runs, where it is the first of its kind
    left_out: tuple[float, int] = (0.0, 0)  # operations and kept bytes of the blocks that were not run

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: object = None,
        *args: object,
        **kwargs: object,
    ) -> torch.Tensor:
        """Stands in for torch's; counts two products of the length squared, halved where the mask is causal."""
        causal = kwargs.get("is_causal", len(args) > 1 and args[1])
        products = 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        flops = products / 2 if causal else products
        self.attention_flops += flops
        found = cast(torch.Tensor, _Attention.apply(query, key, value))
        if self.record is not None:
            self.record.note_attention(flops, (query, key, value), found)
        return found

    def mark(self, flops: float, passed_bytes: int) -> _Mark:
        """What has been counted so far. `flops`: of all operations but attention."""
        left_out, kept_bytes = self.left_out
        return _Mark(flops + self.attention_flops + left_out, kept_bytes + sum(self.kept.values()), passed_bytes)

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts the bytes of a tensor that a backward will want, each storage once. Returns the tensor."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number not in self.weights and number not in self.kept:
            self.kept[number] = storage.nbytes()
            self.alive.append(tensor)
        if self.record is not None:
            self.record.note_saved(tensor)
        return tensor


@dataclass(frozen=True)
class Lora:
    """Adapters of a rank at the modules with these names (none: those that PEFT takes for a model of this type)."""

    rank: int
    targets: tuple[str, ...] = ()


def read_spec(name: str, fields: JsonObject, sequence_length: int, dtype: str, lora: Lora | None = None) -> ModelSpec:
    """The spec of a causal language model. `fields`: of its Hugging Face configuration. `lora`: its adapters alone are trained,
    in the model's dtype.

    Raises ConfigError where transformers cannot build it, it has no layers to be found, or PEFT does not take the adapters.
    """
    adapters = {} if lora is None else _adapters(name, fields, dtype, lora)
    with FakeTensorMode():
        model = _model(name, fields, dtype)
        if lora is not None:
            _adapt(model, adapters, lora.rank)
        return _read(name, model, sequence_length, dtype)


def _adapters(name: str, fields: JsonObject, dtype: str, lora: Lora) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the adapters that PEFT makes, by the path of their module; from a model without memory, as PEFT
    cannot convert fake tensors."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=lora.rank, target_modules=list(lora.targets) or None, task_type="CAUSAL_LM")
    advice = "write the names of linear modules of its blocks with --lora-targets, e.g. q_proj,v_proj"
    with torch.device("meta"):
        try:
            adapted = get_peft_model(_model(name, fields, dtype), settings, autocast_adapter_dtype=False)
        except ValueError as error:  # PEFT's own, for names that the model lacks, or a type for which it knows none
            raise ConfigError(f"--lora {lora.rank}: {name}: {str(error).splitlines()[0]}; {advice}") from error
    found = {}
    for path, module in adapted.get_base_model().named_modules():
        down, up = getattr(module, "lora_A", {}), getattr(module, "lora_B", {})
        if "default" in down:
            found[path] = down["default"].weight.shape[1], up["default"].weight.shape[0]
    trained = sum(param.numel() for param in adapted.parameters() if param.requires_grad)
    if trained != lora.rank * sum(map(sum, found.values())):
        raise ConfigError(f"--lora-targets {','.join(lora.targets)}: adapters of modules that are not linear; {advice}")
    return found


class _Adapted(nn.Module):
    """A linear module with an adapter beside it."""

    def __init__(self, base: nn.Module, sizes: tuple[int, int], rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(sizes[0], rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, sizes[1], bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.base(x) + self.up(self.down(x)))


def _adapt(model: PreTrainedModel, adapters: dict[str, tuple[int, int]], rank: int) -> None:
    """Freeze a model, and put adapters beside its modules."""
    model.requires_grad_(False)
    dtype = next(model.parameters()).dtype
    for path, sizes in adapters.items():
        parent, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent), last, _Adapted(model.get_submodule(path), sizes, rank, dtype))


def _read(name: str, model: PreTrainedModel, sequence_length: int, dtype: str) -> ModelSpec:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions and 0 < positions < sequence_length:  # XLNet's are -1: no limit
        raise ConfigError(f"--sequence-length {sequence_length}: {name} has {positions} positions; write {positions} or less")
    try:
        layers = map_layers(model, apart=True)
    except LayerError as error:
        raise ConfigError(f"--model {name}: {error}") from error
    blocks = [block.module for block in layers.blocks]
    try:
        marks, end, menus = _run(model, blocks, sequence_length)
    except Exception as error:  # whatever a model raises that wants more than tokens and labels
        raise refused(name, "it does not run on tokens and labels alone", error) from error
    middle = [(entered, left) for entered, left in zip(marks[::2], marks[1::2], strict=True)]
    flops = [left.flops - entered.flops for entered, left in middle]
    kept = [left.kept_bytes - entered.kept_bytes for entered, left in middle]
    return ModelSpec(
        name=name,
        sequence_length=sequence_length,
        dtype=dtype,
        pre_elements=sum(param.numel() for unit in layers.outside.units for param in layers.units[unit]),
        block_elements=tuple(sum(param.numel() for param in block.parameters()) for block in blocks),
        largest_parameter=max(param.numel() for param in model.parameters()),
        block_flops=sum(flops) / len(flops),
        pre_flops=marks[0].flops,
        head_flops=end.flops - marks[-1].flops,
        passed_bytes=max(mark.passed_bytes for mark in marks),
        block_saved_bytes=max(kept),
        head_saved_bytes=end.kept_bytes - marks[-1].kept_bytes,
        menus=menus,
        suf=_suf(layers),
        ends_in_turn=bool(layers.used_behind),
        apart=layers.outside.apart,
        block_sizes=max((tuple(map(nn.Parameter.numel, block.parameters())) for block in blocks), key=sum),
        outside_sizes=tuple(param.numel() for unit in layers.outside.units for param in layers.units[unit]),
        made_by_products=are_made_by_products(param.shape for param in model.parameters()),
        **_frozen(model, layers, sequence_length, end.flops - marks[-1].flops, sum(flops) / len(flops)),
    )


def _suf(layers: LayerMap) -> SufShape | None:
    if SUF not in layers.units:
        return None
    params = layers.units[SUF]
    return SufShape(sum(map(nn.Parameter.numel, params)), sum(param.numel() for param in params if param.requires_grad))


def _frozen(
    model: PreTrainedModel, layers: LayerMap, sequence_length: int, head_flops: float, block_flops: float
) -> JsonObject:
    """Of a model that is trained in part: the fields of its spec that say so."""
    if all(param.requires_grad for param in model.parameters()):
        return {}
    blocks = [block.module for block in layers.blocks]
    outside = [param for unit in layers.outside.units for param in layers.units[unit]]
    around = tuple(param.numel() for param in outside if param.requires_grad)
    inside = [tuple(param.numel() for param in block.parameters() if param.requires_grad) for block in blocks]
    per_token = 2 * sum(map(_frozen_weights, blocks)) / len(blocks)
    head = model.get_output_embeddings()
    return {
        "trained": (sum(around), *map(sum, inside)),
        "trained_sizes": (max(inside, key=sum), around),
        "block_frozen_flops": min(block_flops, sequence_length * per_token),
        "head_frozen_flops": min(head_flops, 2 * sequence_length * (0 if head is None else _frozen_weights(head))),
    }


def _frozen_weights(module: nn.Module) -> int:
    """Elements of the frozen matrices of linear modules."""
    linear = (each for each in module.modules() if isinstance(each, nn.Linear))
    return sum(each.weight.numel() for each in linear if not each.weight.requires_grad)


def _model(name: str, fields: JsonObject, dtype: str) -> PreTrainedModel:
    def adjust(config: PreTrainedConfig) -> None:
        config.get_text_config().use_cache = config.use_cache = False

    return build_model(name, fields, adjust, dtype=TORCH_DTYPES[dtype], attn_implementation="sdpa").train()


def _run(
    model: PreTrainedModel, blocks: list[nn.Module], sequence_length: int
) -> tuple[list[_Mark], _Mark, tuple[CountedMenu, ...]]:
    """One sequence through the model: a mark where each block is entered and left, one at the end, what each kind may keep."""
    meter = _Meter(weights=frozenset(param.untyped_storage()._cdata for param in model.parameters()))
    counter, costs = FlopCounterMode(display=False), _Likeness(meter, blocks)
    marks: list[_Mark] = []
    names, resting = kind_names(blocks), set[int]()
    kind_of, menus = dict(zip(map(id, blocks), names, strict=True)), dict[str, CountedMenu]()

    def mark(value: object = None) -> _Mark:
        tensor = value[0] if isinstance(value, tuple) and value else value
        passed = tensor.numel() * tensor.element_size() if isinstance(tensor, torch.Tensor) else 0
        return meter.mark(counter.get_total_flops(), passed)

    def entered(block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        marks.append(mark(args))
        if kind_of[id(block)] not in menus:
            meter.record = BlockRecord()
            resting.update(_storages((args, kwargs)))
            meter.record.__enter__()

    def left(block: nn.Module, args: tuple[object, ...], output: object) -> None:
        if meter.record is not None:
            meter.record.__exit__(None, None, None)
            kind, meter.record, record = kind_of[id(block)], None, meter.record
            menus[kind] = record.menu(kind, names.count(kind), meter.weights | resting)
        marks.append(mark(output))
        costs.note(block, marks[-2], marks[-1], output)

    hooks = [b.register_forward_pre_hook(entered, with_kwargs=True) for b in blocks]
    hooks += [b.register_forward_hook(left) for b in blocks]
    ids = torch.zeros(1, sequence_length, dtype=torch.long)
    try:
        with _attention_by(meter), torch.autograd.graph.saved_tensors_hooks(meter.note, lambda tensor: tensor), counter:
            model(input_ids=ids, labels=ids)
    finally:
        for hook in hooks:
            hook.remove()
    return marks, mark(), tuple(menus.values())


class _Likeness:
    """Leaves out the blocks of a kind behind two that cost the same, one after the other: a plan of 96 blocks needs no more of
    them. Each left out counts as those two did."""

    def __init__(self, meter: _Meter, blocks: Sequence[nn.Module]) -> None:
        self._meter = meter
        self._ahead: dict[_Kind, list[nn.Module]] = {}
        for block in reversed(blocks):
            self._ahead.setdefault(_kind(block), []).append(block)
        self._last: dict[_Kind, tuple[float, int]] = {}

    def note(self, block: nn.Module, entered: _Mark, left: _Mark, output: object) -> None:
        """A block has run, between these marks."""
        kind, costs = _kind(block), (left.flops - entered.flops, left.kept_bytes - entered.kept_bytes)
        ahead = self._ahead[kind]
        del ahead[-1:]  # it is over; one that is called several times is over already
        if self._last.get(kind) == costs:
            for other in ahead:
                other.forward = partial(self._leave_out, costs, output)
        self._last[kind] = costs

    def _leave_out(self, costs: tuple[float, int], output: object, *args: object, **kwargs: object) -> object:
        """In the place of a block's forward."""
        self._meter.left_out = (self._meter.left_out[0] + costs[0], self._meter.left_out[1] + costs[1])
        return pytree.tree_map_only(torch.Tensor, lambda each: torch.empty_like(each, requires_grad=each.requires_grad), output)


def _storages(values: object) -> set[int]:
    """The numbers of the storages of all tensors in arguments."""
    return {value.untyped_storage()._cdata for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)}


_Kind = tuple[str, int]


def _kind(block: nn.Module) -> _Kind:
    """Blocks of one class and size are of one kind."""
    return type(block).__name__, sum(param.numel() for param in block.parameters())


@contextmanager
def _attention_by(meter: _Meter) -> Iterator[None]:
    own = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = meter.attention  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = own
