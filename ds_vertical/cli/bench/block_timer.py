"""Seconds of one micro-batch through the pieces of a Hugging Face model: the prefix before its layers, a layer, the suffix.

The timer runs the pieces as the schedule does: forwards with a graph, as in training; the backward of one layer from the
gradient of its output, and then each parameter's gradient into an fp32 sum. It calls a piece several times in a row, as the
micro-batches of a layer do, so that the caches hold as much of the weights as in training. The model has two layers, with
weights of any value, or as many as have a block of each kind. The process keeps the memory that it frees, as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ds_vertical.io import streams
from ds_vertical.io.host import available_bytes, keep_freed_memory
from ds_vertical.model.block_call import BlockGraph
from ds_vertical.model.compiled_blocks import is_compiled
from ds_vertical.model.hf import build_model, read_fields
from ds_vertical.model.kept.probe import Probe
from ds_vertical.model.layers import LayerMap, kind_names, map_layers
from ds_vertical.offload.grad_accumulator import GradientStore, ParamFacts, SumPlace
from ds_vertical.types import HOLDING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LAYERS = 2, 4, 8  # of a model; the least that has layers to be found, and more where these have not all kinds of blocks
_CALLS = 4  # of a layer in a row, of which the first two are left out: gradients are summed in pairs
_LEAST_S = 3.0  # of measuring a piece: on a shared machine a burst of others' work is shorter than half of it
_MOST_ROUNDS = 100
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ANY_NUMBER = 1 << 30
_KEPT_BYTES = 1 << 30
Output = torch.Tensor | tuple[torch.Tensor, ...]  # of a layer: hidden states, with what some layers return behind them


@dataclass(frozen=True)
class BlockBatch:
    """A micro-batch of `tokens` in `sequences`, for a model in `dtype` (bf16, fp16, fp32)."""

    tokens: int
    sequences: int
    dtype: str


@dataclass(frozen=True)
class ShortModel:
    """A model with `num_layers` of its layers. `kinds`: the names of its blocks' kinds (`kind_names`) that are timed."""

    kinds: Sequence[str] = ()
    num_layers: int = _LAYERS[0]


@dataclass
class _Capture:
    """What the first block of each kind is called with, by its number, and what the last layer returns."""

    calls: dict[int, tuple[tuple[object, ...], dict[str, object]]] = field(default_factory=dict)
    prefix_end: float = 0.0
    suffix_start: float = 0.0
    entered: torch.Tensor | None = None  # the first layer's input, at the end of the prefix's graph
    left: torch.Tensor | None = None  # the last layer's output, cut off from the graph behind it


def _shorten(count: int, config: PreTrainedConfig) -> None:
    known = getattr(config, "num_hidden_layers", count)  # some configurations have none
    config.num_hidden_layers, config.use_cache = min(count, max(_LAYERS[0], known)), False


def short_model(kinds: Sequence[str], model: Path, dtype: str, device: str, num_timers: int = 1) -> ShortModel:
    """Of `_LAYERS` the least number with blocks of all these kinds; the first where none has them, or memory has no room for
    twice as many parameters in each of the processes that time the model at once."""
    if len(kinds) < 2:
        return ShortModel(kinds)
    free = available_bytes() if device == "cpu" else streams.module_of(torch.device(device)).mem_get_info()[0]
    room, itemsize = free / num_timers, _DTYPES[dtype].itemsize
    for count in _LAYERS:
        with FakeTensorMode():
            network = build_model(str(model), read_fields(model), partial(_shorten, count))
        if 2 * itemsize * sum(param.numel() for param in network.parameters()) > room:
            break
        if set(kinds) <= set(kind_names(block.module for block in map_layers(network, None).blocks)):
            return ShortModel(kinds, count)
    return ShortModel(kinds)


_SHORTEST = ShortModel()


class BlockTimer:
    """Times the pieces of `model` (a file with a Hugging Face configuration) on `device`.

    `zero_linear`: ZeRO-3's linear replaces torch's. This process keeps that linear, and the memory that it frees, from now on.
    `short`: the layers that it has, and the kinds of blocks that are timed besides the first's; `firsts`: the number of the
    first block of each that there is.
    """

    def __init__(
        self, model: Path, batch: BlockBatch, device: str, zero_linear: bool = False, short: ShortModel = _SHORTEST
    ) -> None:
        keep_freed_memory(_KEPT_BYTES)
        if zero_linear:
            from ds_vertical.compat.zero_params import zero3_linear_wrap

            nn.functional.linear = zero3_linear_wrap  # as zero.Init does
        network = build_model(str(model), read_fields(model), partial(_shorten, short.num_layers))
        self.network: nn.Module = network.to(device=device, dtype=_DTYPES[batch.dtype])
        self.layers: LayerMap = map_layers(self.network, None)
        names = kind_names(block.module for block in self.layers.blocks)
        self.firsts = {name: names.index(name) for name in (names[0], *short.kinds) if name in names}
        self.ids = torch.zeros(batch.sequences, batch.tokens // batch.sequences, dtype=torch.long, device=device)
        facts = ParamFacts(nn.Parameter.numel, lambda param: param.dtype)
        self.on_host = device == "cpu"
        self.sums = GradientStore(self.layers.units, torch.float32, facts, place=SumPlace(device), pairs=self.on_host)
        beside = streams.module_of(torch.device(device)) if streams.works_beside_host(torch.device(device)) else None
        self.synchronize: Callable[[], None] = (lambda: None) if beside is None else beside.synchronize

    @cached_property
    def once(self) -> _Capture:
        """One forward of the model, run when first asked for."""
        return self._run()

    def rates(self, rounds: int) -> dict[str, float]:
        """Seconds of a layer's forward and backward, of the prefix, and of the suffix with its backward.

        A layer's are means over `rounds` times a few calls, or over more where the calls are short: a step has the machine's
        slow moments, too. The others are medians. `activation_bytes`: bytes of a layer's input. `gauge_s`, where the device is
        the host: what `block_s` would return for the time in which the layer was timed. `launch_s`, elsewhere: see the method
        of this name. `free_saved_s`, `products_saved_s`,
        `everything_saved_s`: of the layer's forward, what each activation policy saves in its backward; `products_kept_bytes`,
        `everything_kept_bytes`: what it keeps. A policy that the layer cannot have is left out. `products_2_saved_s`, ...: of
        parts of the products, see `types.point_name`.
        """
        layer = self.rates_of(0, rounds)
        gauge_s = layer["layer_forward_s"] + layer["layer_backward_s"]
        layer |= {"gauge_s": gauge_s} if self.on_host else {"launch_s": self.launch_s()}
        pre, head, embed = zip(*(self._outside() for _ in _rounds(max(3, rounds), _LEAST_S)), strict=True)
        assert self.once.entered is not None
        size = float(self.once.entered.numel() * self.once.entered.element_size())
        outside = {"pre_forward_s": median(pre), "pre_backward_s": median(embed), "head_s": median(head)}
        return layer | outside | {"activation_bytes": size}

    def rates_of(self, number: int, rounds: int) -> dict[str, float]:
        """Of `rates` those of the block of this number."""
        passes = list(self._passes(rounds, _LEAST_S, number=number))
        forward, backward = (fmean(column) for column in zip(*passes, strict=True))
        return {"layer_forward_s": forward, "layer_backward_s": backward} | self._kept(forward, number)

    def launch_s(self, calls: int = 20) -> float:
        """Seconds in which the host issues a layer's forward, without a graph, to a device that computes meanwhile; the median
        of some calls."""
        block, (args, kwargs) = self.layers.blocks[0].module, self._inputs()
        found = []
        for _ in range(calls):
            self.synchronize()
            start = perf_counter()
            with torch.no_grad():
                block(*args, **kwargs)
            found.append(perf_counter() - start)
        return median(found)

    def _kept(self, forward_s: float, number: int) -> dict[str, float]:
        """What activation policies save and keep, see `rates`, where a block's forward takes `forward_s` in the mean."""
        block, probe = self.layers.blocks[number], Probe(self.synchronize)
        args, kwargs = self._inputs(number)

        @contextmanager
        def again(within: AbstractContextManager[object]) -> Iterator[BlockGraph]:
            with within:
                graph = BlockGraph({}, pytree.tree_leaves(block.module(*args, **kwargs)))
            yield graph  # who held the block's output here would make it a value that is needed, see `recording`

        probe.backward(block, is_compiled(block.module), [*args, *kwargs.values()], again, lambda _: {})
        found = probe.found[block.kind]
        scale = forward_s / found.forward_s  # the probe takes the least times
        rates = {f"{point.name}_saved_s": scale * point.saved_s for point in found.points}
        return rates | {f"{p.name}_kept_bytes": float(p.num_bytes) for p in found.points if p.policy in HOLDING}

    def _inputs(self, number: int = 0) -> tuple[tuple[object, ...], dict[str, object]]:
        """What a block is called with, as in its backward."""
        args, kwargs = self.once.calls[number]
        return _leaves(args), dict(zip(kwargs, _leaves(kwargs.values()), strict=True))

    def block_s(self, least_s: float) -> float:
        """Seconds of a block's forward and backward, the mean over `least_s` or more."""
        return fmean(forward + backward for forward, backward in self._passes(1, least_s, _ANY_NUMBER))

    def _run(self) -> _Capture:
        """The whole forward, with the graph cut before the suffix."""
        seen = _Capture()

        def before(number: int, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            seen.calls[number] = args, kwargs
            if number == 0:
                self.synchronize()
                seen.prefix_end = perf_counter()
                seen.entered = next(value for value in (*args, *kwargs.values()) if _differentiable(value))

        def after(_: nn.Module, args: object, output: Output) -> Output:
            tensor = output[0] if isinstance(output, tuple) else output
            seen.left = tensor.detach().requires_grad_()
            self.synchronize()
            seen.suffix_start = perf_counter()
            return (seen.left, *output[1:]) if isinstance(output, tuple) else seen.left

        blocks = self.layers.blocks
        hooks = [blocks[-1].module.register_forward_hook(after)]
        for number in self.firsts.values():
            hooks.append(blocks[number].module.register_forward_pre_hook(partial(before, number), with_kwargs=True))
        try:
            self.loss = self.network(input_ids=self.ids, labels=self.ids).loss
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    def _outside(self) -> tuple[float, float, float]:
        """Seconds of the prefix, of the suffix with its backward, of the prefix's backward; sums of gradients included."""
        start = perf_counter()
        seen = self._run()
        self.loss.backward()
        self.sums.add("pre")
        self.synchronize()
        end = perf_counter()
        assert seen.entered is not None
        backward_s = 0.0
        if seen.entered.grad_fn is not None:
            seen.entered.backward(torch.ones_like(seen.entered))
            self.sums.add("pre")
            self.synchronize()
            backward_s = perf_counter() - end
        return seen.prefix_end - start, end - seen.suffix_start, backward_s

    def _passes(self, rounds: int, least_s: float, most: int = _MOST_ROUNDS, number: int = 0) -> Iterator[tuple[float, float]]:
        """Seconds of a block's forward, and of its backward with the sum of its gradients, again and again."""
        block, unit = self.layers.blocks[number].module, number
        args, kwargs = self._inputs(number)
        for _ in _rounds(rounds, least_s, most):
            for call in range(_CALLS):
                start = perf_counter()
                output = block(*args, **kwargs)
                self.synchronize()
                middle = perf_counter()
                tensor = output[0] if isinstance(output, tuple) else output
                tensor.backward(torch.ones_like(tensor))
                self.sums.add(unit)
                self.synchronize()
                end = perf_counter()
                if call > 1:
                    yield middle - start, end - middle
            self.sums.drop(unit)  # the next round copies its first gradients, as each step does


def _rounds(least: int, least_s: float, most: int = _MOST_ROUNDS) -> Iterator[int]:
    """Counts `least` rounds, and on until they have taken `least_s`, or to `most`."""
    start = perf_counter()
    for count in range(max(least, most)):
        if count >= least and perf_counter() - start >= least_s:
            return
        yield count


def _differentiable(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _leaves(values: Iterable[object]) -> tuple[object, ...]:
    """Inputs of a layer as they are in its backward: those that carry a gradient are leaves."""
    return tuple(value.detach().requires_grad_() if _differentiable(value) else value for value in values)
