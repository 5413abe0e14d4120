"""Sum each unit's gradients over the micro-batches on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ds_vertical.errors import LayerError
from ds_vertical.io.buffers import Reserve
from ds_vertical.model.autograd_segments import OWN_BACKWARD
from ds_vertical.model.tensor_refs import is_alone
from ds_vertical.schedule.events import Unit

Gradients = Sequence[torch.Tensor | None]  # of a unit's parameters, from one micro-batch
_PIECE = 1 << 19  # elements that are added to at a time, or more: in fp32 as much as two cores' second caches hold
_GRAIN = 1 << 15  # of which torch gives each thread this many at least


@dataclass(frozen=True)
class ParamFacts:
    """What the sums need to know of a parameter, which may be partitioned while it is asked.

    `numel`: its elements, all ranks' together; `rounding`: the dtype that stock would communicate its gradient in; `steps`:
    whether the optimizer has it.
    """

    numel: Callable[[nn.Parameter], int]
    rounding: Callable[[nn.Parameter], torch.dtype]
    steps: Callable[[nn.Parameter], bool] = lambda _: True


@dataclass(frozen=True)
class UnitSums:
    """A unit's sums under way: `totals`, flat, one per trainable parameter, one after the other from the start of `flat`;
    `touched`: whether anything has been added to each, whose content is undefined before."""

    flat: torch.Tensor
    totals: list[torch.Tensor]
    touched: list[bool]

    def add(self, *by_micro_batch: Gradients) -> None:
        """Add the gradients of micro-batches, one after the other."""
        for index, (total, *contributions) in enumerate(zip(self.totals, *by_micro_batch, strict=True)):
            grads = [grad for grad in contributions if grad is not None]
            for piece, *parts in _pieces(total, grads):
                _accumulate(piece, parts, self.touched[index])
            self.touched[index] = self.touched[index] or bool(grads)


class GradientStore:
    """Sums of `param.grad` per unit, in the gradient accumulation dtype, on `device`.

    Gradients of parameters that the optimizer does not have are thrown away. The store calls `begin` with a unit whose next
    sums are about to be made: what is held of its last ones is needed no longer.

    The first contribution is copied and later ones are added in the order of the `add` calls, each after rounding to the
    dtype that stock would communicate it in: the bits of stock's accumulation.

    [Note: gradients in pairs] A sum of a layer is larger than the host's caches, so each addition reads and writes all of it
    from memory, in a time in which the cores could do nothing else. With `pairs` a layer's gradients therefore wait for those
    of the next micro-batch, and both are added piece by piece, while the piece of the sum is in the caches: the same additions
    in the same order. No more than one layer's wait. Gradients whose memory other tensors share do not wait, since other code
    might write there meanwhile; nor do those of what stands around the layers, since others come in between.
    """

    def __init__(
        self,
        units: Mapping[Unit, Sequence[nn.Parameter]],
        dtype: torch.dtype,
        facts: ParamFacts,
        begin: Callable[[Unit], None] = lambda _: None,
        device: str = "cpu",
        pairs: bool = False,
    ) -> None:
        trainable = {unit: [p for p in params if p.requires_grad] for unit, params in units.items()}
        self._units = {unit: [p for p in params if facts.steps(p)] for unit, params in trainable.items()}
        # gradients of parameters that the optimizer does not have: made by autograd, and thrown away
        self._unwanted = {unit: [p for p in params if not facts.steps(p)] for unit, params in trainable.items()}
        self._facts = facts
        self._begin = begin
        self._on_host = torch.device(device).type == "cpu"
        self._pairs = pairs
        self._sums: dict[Unit, UnitSums] = {}
        self._waiting: tuple[Unit, Gradients] | None = None
        self.reserve = Reserve(lambda numel: torch.empty(numel, dtype=dtype, device=device))

    @property
    def num_bytes(self) -> int:
        """Bytes of the sums under way, and of the gradients that wait for the next ones."""
        waiting = [grad for grad in self._waiting[1] if grad is not None] if self._waiting else []
        return sum(
            tensor.numel() * tensor.element_size() for tensor in (*(sums.flat for sums in self._sums.values()), *waiting)
        )

    def params(self, unit: Unit) -> list[nn.Parameter]:
        """The unit's trainable parameters, in the order of `take`'s sums."""
        return self._units[unit]

    def refuse_strays(self) -> None:
        """Raises RuntimeError where a parameter has a gradient already: it would enter the step's sum."""
        strays = [p for params in (*self._units.values(), *self._unwanted.values()) for p in params if p.grad is not None]
        if strays:
            raise RuntimeError(
                f"{len(strays)} parameters have a .grad before train_batch, from a backward outside it; it would be added to"
                " this step's gradients: set it to None (model.zero_grad()) first"
            )

    def refuse_frozen(self, name_of: Mapping[int, str]) -> None:
        """Raises LayerError where a parameter that the optimizer has is frozen by now: its moments would move it on.
        `name_of`: by id."""
        frozen = [name_of.get(id(p), "?") for params in self._units.values() for p in params if not p.requires_grad]
        if frozen:
            raise LayerError(
                f"{frozen[0]}: requires_grad was set to False after initialize ({len(frozen)} parameter(s)); the optimizer"
                " still has it and would move it on by its moments and weight decay: freeze parameters before initialize (save"
                " the weights with save_16bit_model, and build a new engine from them), or give them a parameter group of their"
                " own whose lr and weight_decay you set to 0"
            )

    def refuse_own_backward(self) -> None:
        """Raises LayerError where parameters around the layers have gradients before a micro-batch's own backward."""
        outside = [unit for unit in self._units if not isinstance(unit, int)]
        params = [param for unit in outside for param in (*self._units[unit], *self._unwanted[unit])]
        if any(param.grad is not None for param in params):
            raise LayerError(OWN_BACKWARD)

    def add(self, unit: Unit) -> None:
        """Move every `param.grad` of the unit into its sum and clear it."""
        for param in self._unwanted[unit]:
            param.grad = None
        params = self._units[unit]
        if all(param.grad is None for param in params):
            return
        if unit not in self._sums:
            self._open(unit)
        grads = [_take(param, self._facts.rounding) for param in params]
        if self._waiting is not None and self._waiting[0] == unit:
            (_, earlier), self._waiting = self._waiting, None
            self._sums[unit].add(earlier, grads)
        elif self._pairs and isinstance(unit, int) and all(grad is None or is_alone(grad) for grad in grads):
            self._settle()
            self._waiting = unit, grads
        else:
            self._sums[unit].add(grads)

    def _settle(self) -> None:
        """Sum what waits."""
        if self._waiting is not None:
            (unit, grads), self._waiting = self._waiting, None
            self._sums[unit].add(grads)

    def take(self, unit: Unit) -> list[torch.Tensor]:
        """The unit's sums, flat, one per trainable parameter; zeros where no micro-batch contributed."""
        if self._waiting is not None and self._waiting[0] == unit:
            self._settle()
        if unit not in self._sums:
            self._open(unit)
        sums = self._sums[unit]
        for total, touched in zip(sums.totals, sums.touched, strict=True):
            if not touched:
                total.zero_()
        return sums.totals

    def flat(self, unit: Unit) -> torch.Tensor:
        """The memory of the unit's sums, which lie in it one after the other from its start."""
        return self._sums[unit].flat

    def drop(self, unit: Unit) -> None:
        """Give the unit's memory back for the next one."""
        sums = self._sums.get(unit)
        self.give_away(unit)
        if sums is not None:
            self.reserve.put_back(sums.flat)

    def give_away(self, unit: Unit) -> None:
        """Forget the unit's sums: their memory is the caller's now, which may put it back into `reserve`."""
        if self._waiting is not None and self._waiting[0] == unit:
            self._waiting = None
        self._sums.pop(unit, None)

    def free(self) -> None:
        """The step's last gradient has left: give up the memory kept for further units, where the next forward wants it.
        Host memory is kept."""
        if not self._on_host:
            self.reserve.clear()

    def drop_all(self) -> None:
        """Forget all sums and gradients, after an error."""
        self._waiting = None
        for unit in list(self._sums):
            self.drop(unit)
        self.free()
        for params in self._units.values():
            for param in params:
                param.grad = None

    def _open(self, unit: Unit) -> None:
        params = self._units[unit]
        sizes = [self._facts.numel(param) for param in params]
        self._begin(unit)
        flat = self.reserve.take(sum(sizes))
        totals = list(flat.narrow(0, 0, sum(sizes)).split(sizes)) if sizes else []
        self._sums[unit] = UnitSums(flat, totals, [False] * len(params))


def _take(param: nn.Parameter, rounding: Callable[[nn.Parameter], torch.dtype]) -> torch.Tensor | None:
    """The parameter's gradient, rounded as stock does, cleared there."""
    if param.grad is None:
        return None
    grad, dtype = param.grad.detach(), rounding(param)
    param.grad = None
    if dtype != grad.dtype and torch.finfo(dtype).bits <= torch.finfo(grad.dtype).bits:
        grad = grad.to(dtype)
    return grad


def _pieces(total: torch.Tensor, grads: Sequence[torch.Tensor]) -> Iterable[Sequence[torch.Tensor]]:
    """A flat sum and what is added to it, in pieces where several gradients are. See [Note: gradients in pairs]."""
    if len(grads) < 2 or not all(grad.is_contiguous() for grad in grads):
        return [(total, *grads)]
    size = max(_PIECE, _GRAIN * torch.get_num_threads())
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
