"""Sum each unit's gradients over the micro-batches on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ds_vertical.errors import LayerError
from ds_vertical.interrupts import Changed
from ds_vertical.io import host
from ds_vertical.io.buffers import Reserve
from ds_vertical.model.autograd_segments import OWN_BACKWARD
from ds_vertical.model.kept.block_backward import is_apart
from ds_vertical.model.state.restart import GradientMissed
from ds_vertical.model.tensor_refs import is_alone
from ds_vertical.schedule.events import Unit
from ds_vertical.types import LARGE_GRADIENT

if TYPE_CHECKING:
    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

LARGE = LARGE_GRADIENT
_PIECE = 1 << 19  # elements that are added to at a time, or more: in fp32 as much as two cores' second caches hold
_GRAIN = 1 << 15  # of which torch gives each thread this many at least


@dataclass(frozen=True)
class ParamFacts:
    """What the sums need to know of a parameter, which may be partitioned while it is asked.

    `numel`: its elements, all ranks' together; `rounding`: the dtype that stock would communicate its gradient in; `steps`:
    whether the optimizer has it; `is_watched`: whether code of others runs in a unit's backward, which may look at gradients.
    """

    numel: Callable[[nn.Parameter], int]
    rounding: Callable[[nn.Parameter], torch.dtype]
    steps: Callable[[nn.Parameter], bool] = lambda _: True
    is_watched: Callable[[Unit], bool] = lambda _: False


@dataclass(frozen=True)
class SumPlace:
    """Where sums lie: on `device`; `joined`: those of a unit one after the other in one piece of memory, which may be held as
    it is. Else each has memory of its own, which is free once its parameter has been reduced."""

    device: str = "cpu"
    joined: bool = True


class UnitSums:
    """A unit's sums under way, flat, one for each trainable parameter. `flat`: the memory in which all of them lie, one after
    the other; None where each has its own.

    [Note: no sum yet] A sum with memory of its own is made for a parameter's second gradient. The first one waits as autograd
    has made it, in the model's dtype. So with one micro-batch there is no sum beside the gradients. Where that is the sum's
    dtype, too, the first gradient becomes the sum.
    """

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, new: Callable[[int], torch.Tensor], joined: bool) -> None:
        self._sizes = sizes
        self._dtype = dtype
        self._new = new
        self.flat = new(sum(sizes)) if joined else None
        self._memory: list[torch.Tensor | None] = [None] * len(sizes)
        if self.flat is not None and sizes:
            self._memory = list(self.flat.narrow(0, 0, sum(sizes)).split(list(sizes)))
        self._touched = [False] * len(sizes)  # whether anything has been added; the memory's content is undefined before
        self._waiting: list[torch.Tensor | None] = [None] * len(sizes)
        self._adopted: set[int] = set()  # whose sums lie where autograd has made the first gradient

    @property
    def num_bytes(self) -> int:
        """Bytes of the sums and of the gradients that wait."""
        sums = self._memory if self.flat is None else [self.flat]
        return sum(each.numel() * each.element_size() for each in (*sums, *self._waiting) if each is not None)

    def is_empty(self, index: int) -> bool:
        """Whether no gradient of a parameter has come yet."""
        return not self._touched[index] and self._waiting[index] is None

    def is_waiting(self, index: int) -> bool:
        """Whether a gradient of a parameter waits for its next one."""
        return self._waiting[index] is not None

    def wait(self, index: int, grad: torch.Tensor) -> None:
        """Let a gradient wait for the parameter's next one; none may wait already."""
        self._waiting[index] = grad

    def add(self, index: int, *grads: torch.Tensor) -> None:
        """Add gradients to a parameter's sum, one after the other, behind the one that waits."""
        earlier, self._waiting[index] = self._waiting[index], None
        if earlier is not None and self._memory[index] is None and earlier.dtype is self._dtype and earlier.is_contiguous():
            self._memory[index], self._touched[index], earlier = earlier.view(-1), True, None
            self._adopted.add(index)
        contributions = grads if earlier is None else (earlier, *grads)
        total = self._total(index)
        for piece, *parts in _pieces(total, contributions, self._touched[index]):
            _accumulate(piece, parts, self._touched[index])
        self._touched[index] = self._touched[index] or bool(contributions)

    def settle(self) -> None:
        """Add what waits."""
        for index, waiting in enumerate(self._waiting):
            if waiting is not None:
                self.add(index)

    def complete(self, index: int) -> torch.Tensor:
        """A parameter's sum; zeros where no micro-batch contributed."""
        if self._waiting[index] is not None:
            self.add(index)
        total = self._total(index)
        if not self._touched[index]:
            total.zero_()
        return total

    def leave(self, index: int) -> torch.Tensor:
        """A parameter's sum in the accumulation dtype, where each has memory of its own: the caller's from now on."""
        waiting = self._waiting[index]
        if waiting is not None and not self._touched[index]:  # see [Note: no sum yet]
            self._waiting[index] = None
            return waiting.reshape(-1).to(self._dtype)
        total, self._memory[index] = self.complete(index), None
        return total

    def memory(self) -> list[torch.Tensor]:
        """The memory, made for them, of the sums that have not left."""
        own = (each for index, each in enumerate(self._memory) if index not in self._adopted)
        return [each for each in own if each is not None] if self.flat is None else [self.flat]

    def _total(self, index: int) -> torch.Tensor:
        if (total := self._memory[index]) is None:
            total = self._memory[index] = self._new(self._sizes[index])
        return total.narrow(0, 0, self._sizes[index])


class MadeGradients:
    """Hears of the gradients of a unit's large parameters as autograd makes them, from the unit's first backward of a step to
    its REDUCE. `take`: called with a parameter's number; whether it has taken the gradient.

    [Note: as they are made] A gradient is added to its sum as soon as it is made, so that a layer's gradients are not all in
    memory beside the sum. The hook for that is on the node that sets `param.grad`, behind all hooks that users have put there
    or on the parameter: they find the gradient as ever. Hooks may also look at gradients of other parameters. So a layer in
    whose backward code of others runs has its gradients taken behind the whole backward, and so has every layer where a
    micro-batch's code calls the model several times. Autograd may come to a parameter twice in one backward (two blocks of a
    layer share it, or a checkpoint inside the block runs a backward of its own). Its two gradients are to be added in the
    model's dtype, as in stock, ahead of the sum. The second one shows that the first was taken too soon: the step starts over,
    and from then on all gradients are taken behind the whole backward of their layer.
    """

    def __init__(self, params: Mapping[int, nn.Parameter], take: Callable[[int], bool]) -> None:
        self.again = False  # whether autograd has come to a parameter twice in one backward
        self._take = take
        self._taken: set[int] = set()
        self._is_open = False
        self._nodes: list[Node] = []  # which autograd would forget with the graph, and the hooks with them
        self._handles: list[RemovableHandle] = []
        for index, param in params.items():
            node = get_gradient_edge(param).node
            self._nodes.append(node)
            self._handles.append(node.register_hook(partial(self._made, index, param)))

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Within the block one backward of the unit runs."""
        self._taken.clear()
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()

    def _made(self, index: int, param: nn.Parameter, *_: object) -> None:
        if not self._is_open or is_apart(param):
            return
        if index in self._taken:
            self.again = True
        elif self._take(index):
            self._taken.add(index)


class UnitGradients:
    """Which parameters of each unit have gradients, and refusals of gradients that must not be there."""

    def __init__(self, units: Mapping[Unit, Sequence[nn.Parameter]], facts: ParamFacts) -> None:
        trainable: dict[Unit, list[nn.Parameter]] = {
            unit: [p for p in params if p.requires_grad] for unit, params in units.items()
        }
        self._units: dict[Unit, list[nn.Parameter]] = {
            unit: [p for p in params if facts.steps(p)] for unit, params in trainable.items()
        }
        self._untrained = [p for params in units.values() for p in params if not p.requires_grad]
        # gradients of parameters that the optimizer does not have: made by autograd, and thrown away
        self._unwanted = {unit: [p for p in params if not facts.steps(p)] for unit, params in trainable.items()}
        self._facts = facts
        self._heard: Callable[[nn.Parameter], None] | None = None

    def heard_by(self, note: Callable[[nn.Parameter], None]) -> Changed:
        """Within the block `note` is called with each parameter whose gradient is about to be moved, or thrown away."""
        return Changed(partial(self._let_hear, None), partial(self._let_hear, note))

    def _let_hear(self, note: Callable[[nn.Parameter], None] | None) -> None:
        self._heard = note

    def _tell(self, param: nn.Parameter) -> None:
        if self._heard is not None and param.grad is not None:
            self._heard(param)

    def params(self, unit: Unit) -> list[nn.Parameter]:
        """The unit's trainable parameters, in the order of its sums."""
        return self._units[unit]

    def rounding(self, param: nn.Parameter) -> torch.dtype:
        """What a parameter's gradient is rounded to ahead of its sum, unless that is coarser."""
        return self._facts.rounding(param)

    def refuse_strays(self) -> None:
        """Raises RuntimeError where a parameter has a gradient already: it would enter the step's sum."""
        if strays := [p for params in (*self._units.values(), *self._unwanted.values()) for p in params if p.grad is not None]:
            raise RuntimeError(
                f"{len(strays)} parameters have a .grad before train_batch, from a backward outside it; it would be added to"
                " this step's gradients: set it to None (model.zero_grad()) first"
            )

    def refuse_frozen(self, name_of: Mapping[int, str]) -> None:
        """Raises LayerError where a parameter that the optimizer has is frozen by now: its moments would move it on. And where
        one that was frozen is no longer. `name_of`: by id."""
        frozen = [name_of.get(id(p), "?") for params in self._units.values() for p in params if not p.requires_grad]
        if frozen:
            raise LayerError(
                f"{frozen[0]}: requires_grad was set to False after initialize ({len(frozen)} parameter(s)); the optimizer"
                " still has it and would move it on by its moments and weight decay: freeze parameters before initialize (save"
                " the weights with save_16bit_model, and build a new engine from them), or give them a parameter group of their"
                " own whose lr and weight_decay you set to 0"
            )

        thawed = [name_of.get(id(p), "?") for p in self._untrained if p.requires_grad]
        if thawed:
            raise LayerError(
                f"{thawed[0]}: requires_grad was set to True after initialize ({len(thawed)} parameter(s)), and no gradient of"
                " it would be summed: let it be True before initialize, or set it to False again"
            )

    def refuse_own_backward(self) -> None:
        """Raises LayerError where parameters around the layers have gradients before a micro-batch's own backward."""
        both = (self._units, self._unwanted)
        params = [p for table in both for unit, members in table.items() if not isinstance(unit, int) for p in members]
        if any(param.grad is not None for param in params):
            raise LayerError(OWN_BACKWARD)


class Arrivals:
    """Which unit's gradients wait for those of the next micro-batch, with `pairs`: see [Note: gradients in pairs]. `alone`: a
    layer whose never do. `expected`: micro-batches of the step, None where that is not known."""

    def __init__(self, pairs: bool) -> None:
        self.pairs = pairs
        self.alone: Unit | None = None
        self.expected: int | None = None
        self._paired: Unit | None = None
        self._num_added: dict[Unit, int] = {}  # micro-batches, since the unit's last REDUCE

    def are_paired(self, unit: Unit) -> bool:
        """Whether gradients of a layer wait in this step."""
        return self.pairs and unit != self.alone and self.expected != 1

    def note(self, unit: Unit) -> None:
        """All of a micro-batch's gradients of the unit have come."""
        self._num_added[unit] = self._num_added.get(unit, 0) + 1

    def forget(self, unit: Unit) -> None:
        """The unit's sums have left."""
        self._num_added.pop(unit, None)

    def waits(self, unit: Unit) -> tuple[Unit | None, bool]:
        """Whether gradients of the unit that come now wait; and another unit, whose gradients no longer do."""
        last = self.expected is not None and self._num_added.get(unit, 0) + 1 >= self.expected
        if not self.are_paired(unit) or not isinstance(unit, int) or last:
            return None, False
        before, self._paired = self._paired, unit
        return (before if before != unit else None), True


class GradientStore(UnitGradients):
    """Sums of `param.grad` per unit, in the gradient accumulation dtype.

    Gradients of parameters that the optimizer does not have are thrown away. The store calls `begin` with a unit whose next
    sums are about to be made: what is held of its last ones is needed no longer. `trims_above`: bytes of gradients outside
    the layers; behind each backward that makes more of them, freed memory goes back ([Note: freed memory] in `io.host`).

    The first contribution is copied and later ones are added in the order of the `add` calls, each after rounding to the
    dtype that stock would communicate it in: the bits of stock's accumulation.

    [Note: gradients in pairs] A sum of a layer is larger than the host's caches, so each addition reads and writes all of it
    from memory, in a time in which the cores could do nothing else. With `pairs` a layer's gradients therefore wait for those
    of the next micro-batch, and both are added piece by piece, while the piece of the sum is in the caches: the same additions
    in the same order. Both are then added behind the whole backward, and not as they are made: that took 7 % more of a step of
    16 small micro-batches. No more than one layer's wait. Gradients whose memory other tensors share do not wait, since other
    code might write there meanwhile; nor do those of what stands around the layers, since others come in between.
    """

    def __init__(
        self,
        units: Mapping[Unit, Sequence[nn.Parameter]],
        dtype: torch.dtype,
        facts: ParamFacts,
        begin: Callable[[Unit], None] = lambda _: None,
        place: SumPlace = SumPlace(),
        pairs: bool = False,
    ) -> None:
        super().__init__(units, facts)
        self._dtype = dtype
        self._begin = begin
        self._joined = place.joined
        self.arrivals = Arrivals(pairs)
        self._on_host = torch.device(place.device).type == "cpu"
        self._sums: dict[Unit, UnitSums] = {}
        self._one_by_one, self._late = True, False  # whether gradients are added as they are made; never more: see the note
        self._made: dict[Unit, MadeGradients] = {}
        self.trims_above: int | None = None
        self.reserve = Reserve(partial(torch.empty, dtype=dtype, device=place.device))
        # a GPU's memory is torch's to keep, for whatever comes next
        self._new = (
            self.reserve.take if place.joined or self._on_host else partial(torch.empty, dtype=dtype, device=place.device)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the sums under way, and of the gradients that wait for the next ones."""
        return sum(sums.num_bytes for sums in self._sums.values())

    # ---- gradients come

    def expect(self, num_micro_batches: int, num_calls: int = 1) -> None:
        """A step of so many micro-batches begins, each of which calls the model so often."""
        self.arrivals.expected, self._one_by_one = num_micro_batches, num_calls == 1

    @contextlib.contextmanager
    def adding(self, unit: Unit) -> Iterator[None]:
        """Within the block a layer's backward runs, once, and gradients are added as they are made; `add` follows with the
        rest. Raises GradientMissed where the step has to start over: see [Note: as they are made]."""
        if not (paired := self.arrivals.are_paired(unit)) and unit in self._sums:
            self._sums[unit].settle()  # the first gradients: ahead of the next ones
        behind = self._late or paired or self._facts.is_watched(unit)
        if behind or not self._one_by_one:
            yield
            return
        if unit not in self._made:
            params = {i: p for i, p in enumerate(self._units[unit]) if self._facts.numel(p) >= LARGE}
            self._made[unit] = MadeGradients(params, partial(self._add, unit, made=True))
        made = self._made[unit]
        with made.opened():
            yield
        if made.again:
            self._late = True
            raise GradientMissed(f"layer {unit}")

    def add(self, unit: Unit) -> None:
        """A micro-batch's backward of the unit is over: move every `param.grad` into its sum and clear it."""
        for param in self._unwanted[unit]:
            self._tell(param)
            param.grad = None
        moved = [self._add(unit, index) for index in range(len(self._units[unit]))]
        if self.trims_above is not None and not isinstance(unit, int):
            sizes = (self._facts.numel(param) * param.element_size() for param in self._units[unit])
            if sum(size for size, has in zip(sizes, moved, strict=True) if has) > self.trims_above:
                host.trim()
        self.arrivals.note(unit)

    def _add(self, unit: Unit, index: int, made: bool = False) -> bool:
        """Move one parameter's gradient, which autograd has `made` just now. False where there is none, and for one that is to
        wait where it is, until `add`."""
        param, waits = self._units[unit][index], False
        if param.grad is None or ((waits := self._is_to_wait(unit, index)) and made):
            return False
        self._tell(param)
        grad, sums = _take(param, self._facts.rounding), self._open(unit)
        if waits and is_alone(grad):
            sums.wait(index, grad)
        else:
            sums.add(index, grad)
        return True

    def _is_to_wait(self, unit: Unit, index: int) -> bool:
        """Whether a gradient that comes now waits for the parameter's next one."""
        sums = self._sums.get(unit)
        if sums is not None and sums.is_waiting(index):
            return False
        is_first = not self._joined and (sums is None or sums.is_empty(index))  # see [Note: no sum yet]
        paired, waits = self.arrivals.waits(unit)
        if paired in self._sums:
            self._sums[paired].settle()
        return waits or is_first

    def _open(self, unit: Unit) -> UnitSums:
        if unit not in self._sums:
            self._begin(unit)
            sizes = [self._facts.numel(param) for param in self._units[unit]]
            self._sums[unit] = UnitSums(sizes, self._dtype, self._new, self._joined)
        return self._sums[unit]

    # ---- sums leave

    def take(self, unit: Unit) -> list[torch.Tensor]:
        """The unit's sums, flat, one per trainable parameter; zeros where no micro-batch contributed."""
        sums = self._open(unit)
        return [sums.complete(index) for index in range(len(self._units[unit]))]

    def hand_over(self, unit: Unit) -> Iterator[torch.Tensor]:
        """The unit's sums, as `take` has them. Where each has its own memory, a sum is the caller's as it comes: its memory is
        free when the caller is done with it."""
        sums = self._open(unit)
        put_back = self.reserve.put_back if self._on_host else None
        return iter(self.take(unit)) if sums.flat is not None else _leaving(sums, len(self._units[unit]), put_back)

    def flat(self, unit: Unit) -> torch.Tensor | None:
        """The memory of the unit's sums, which lie in it one after the other from its start; None where each has its own."""
        return self._open(unit).flat

    def drop(self, unit: Unit) -> None:
        """Give the unit's memory back for the next one."""
        sums = self._sums.get(unit)
        self.give_away(unit)
        for each in sums.memory() if sums is not None and (self._joined or self._on_host) else ():
            self.reserve.put_back(each)

    def give_away(self, unit: Unit) -> None:
        """Forget the unit's sums: their memory is the caller's now, which may put it back into `reserve`."""
        self._sums.pop(unit, None)
        self.arrivals.forget(unit)
        if made := self._made.pop(unit, None):
            made.end()

    def free(self) -> None:
        """The step's last gradient has left: give up the memory kept for further units, where the next forward wants it.
        Host memory is kept."""
        if not self._on_host:
            self.reserve.clear()

    def drop_all(self) -> None:
        """Forget all sums and gradients, after an error."""
        for unit in self._units:
            self.drop(unit)
        self.free()
        for params in (*self._units.values(), *self._unwanted.values()):
            for param in params:
                param.grad = None


def _leaving(sums: UnitSums, count: int, put_back: Callable[[torch.Tensor], None] | None) -> Iterator[torch.Tensor]:
    memory = [] if put_back is None else sums.memory()
    for index in range(count):
        yield sums.leave(index)
    for each in memory:  # not before: sums that nothing has been added to would take it
        assert put_back is not None
        put_back(each)


def _take(param: nn.Parameter, rounding: Callable[[nn.Parameter], torch.dtype]) -> torch.Tensor:
    """The parameter's gradient, which it has, rounded as stock does, cleared there."""
    assert param.grad is not None
    grad, dtype = param.grad.detach(), rounding(param)
    param.grad = None
    if dtype != grad.dtype and torch.finfo(dtype).bits <= torch.finfo(grad.dtype).bits:
        grad = grad.to(dtype)
    return grad


def _pieces(total: torch.Tensor, grads: Sequence[torch.Tensor], touched: bool) -> Iterable[Sequence[torch.Tensor]]:
    """A flat sum and what is added to it, in pieces on the host for several gradients ([Note: gradients in pairs]), and for one
    of another dtype: torch copies all that it adds to the dtype of a sum that has been `touched`, in new memory."""
    size = max(_PIECE, _GRAIN * torch.get_num_threads())
    gains = total.device.type == "cpu" and (len(grads) > 1 or (touched and any(each.dtype != total.dtype for each in grads)))
    if not gains or total.numel() <= size or not all(grad.is_contiguous() for grad in grads):
        return [(total, *grads)]
    return zip(*(tensor.view(-1).split(size) for tensor in (total, *grads)), strict=True)


def _accumulate(total: torch.Tensor, grads: Sequence[torch.Tensor], touched: bool) -> None:
    """Add gradients to a sum, one after the other; the first is copied into one that has not been `touched`."""
    for grad in grads:
        target = total.view(grad.shape)
        if touched:
            target.add_(grad)
        else:
            target.copy_(grad)
            touched = True
