"""The operations of one block call, as torch dispatches them, and what of them a backward needs.

[Note: values] A value is what a storage holds between two writes: (storage, how often it was written). An operation makes
values (of new storages, and of those that it writes) and reads some. Needed are: what autograd saved; what somebody else holds
after the call (a module as its cache, an autograd context as its attribute), but not the call's outputs, whose gradients alone
are needed; what an operation needs that has to run anyhow: one that draws random numbers, so that the generator
goes on as in the forward, one that tells Python a number, and one that writes memory from outside the call. Operations of which
no needed value comes are left out, but for those that write memory which is computed. A kept result stands for the last value
of its storage. So what writes that storage in place is left out, too (ZeRO-3's linear adds the bias to its product so), and
where an earlier value is needed the result is not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Final, Literal

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ds_vertical.interrupts import Changed
from ds_vertical.model.kept.slots import AliasSlot, Layout, is_plain
from ds_vertical.model.tensor_refs import is_over, key_of
from ds_vertical.model.thread_state import Modes
from ds_vertical.types import ActivationPolicy

_aten: Final = torch.ops.aten
UNSEEN: Final = frozenset((_aten.detach.default, torch.ops.prim.device.default))  # hooks add some, or none
_UNINITIALIZED: Final = frozenset(
    (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
)
_FACTORIES: Final = _UNINITIALIZED | frozenset(
    (_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.rand_like)
)
_PRODUCTS: Final = frozenset((_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution, _aten.linear, _aten.addmv))
_ATTENTION: Final = "_scaled_dot_product"

Action = Literal["run", "skip", "keep"]
StandIn = Literal["kept", "empty"]  # memory in the place of a result that is not computed
Keywords = dict[str, object]
_Value = tuple[int, int]


@dataclass(frozen=True)
class NewStorage:
    """A storage that an operation makes, and the places of the results that lie over it."""

    num_bytes: int
    device: torch.device
    results: tuple[tuple[int, Layout], ...]


@dataclass(frozen=True)
class Operation:
    """One operation as it was recorded. Storages are named by their keys.

    `form`: its arguments, tensors by how they lie in memory. `given`: for each result that is an argument over the same
    memory, the argument's place. `fresh`: the storages that it makes. `results`, `spec`: what it returns, flattened, tensors by
    how they lie in memory. `dropout`: an attention's share of weights that are dropped. `summed`: of a product, over how many
    elements each element of its result sums.
    """

    func: OpOverload
    form: tuple[Hashable, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    fresh: dict[int, NewStorage]
    given: dict[int, int]
    results: list[object]
    spec: pytree.TreeSpec
    dropout: float
    summed: int = 0

    @property
    def is_view(self) -> bool:
        """Whether it computes nothing: all results lie over its arguments, of which it writes none."""
        return self._num_tensors > 0 and not (self.writes or self.fresh)

    @property
    def draws(self) -> bool:
        """Whether it takes random numbers."""
        is_steady = _ATTENTION in str(self.func) and self.dropout == 0.0
        return torch.Tag.nondeterministic_seeded in self.func.tags and not is_steady

    @property
    def must_run(self) -> bool:
        """Whether it has to run whatever is needed of it: it draws random numbers, or gives Python no tensor but a number."""
        makes = self.writes or self.fresh
        mixed = bool(self.writes and self.fresh) or (not self.is_view and len(self.given) + self._num_fresh < self._num_tensors)
        return self.draws or mixed or (not makes and not self.is_view)

    @property
    def _num_fresh(self) -> int:
        return sum(len(new.results) for new in self.fresh.values())

    @property
    def _num_tensors(self) -> int:
        return sum(isinstance(result, Layout) for result in self.results)

    @property
    def packet(self) -> object:
        """The operation without its overload."""
        return self.func.overloadpacket

    @cached_property
    def reads_values(self) -> bool:
        """Whether it reads what its arguments hold."""
        return not self.is_view and self.packet not in _FACTORIES

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product or an attention."""
        return self.packet in _PRODUCTS or _ATTENTION in str(self.func)


@dataclass(frozen=True)
class Start:
    """A moment of a block call: a module inside the block is called. `module`: its number among the block's; `call`: which of
    its calls it is; `operation`: the number of the operation that comes next."""

    module: int
    call: int
    operation: int


@dataclass(frozen=True)
class CallPlan:
    """What a recompute does with each operation, in their order. `keeps`: by operation, the new storages that are kept.

    `start`: where a recompute begins to follow the plan: all operations before run. None: with the first one.
    """

    operations: tuple[Operation, ...]
    actions: tuple[Action, ...]
    keeps: dict[int, tuple[int, ...]]
    start: Start | None = None

    @cached_property
    def num_writes(self) -> Counter[int]:
        """How many operations write each storage in place, by the storage's key."""
        return Counter(key for operation in self.operations for key in operation.writes)

    @cached_property
    def stands(self) -> dict[int, StandIn]:
        """The storages for which something stands in a recompute, by key."""
        found: dict[int, StandIn] = {}
        for index, (operation, action) in enumerate(zip(self.operations, self.actions, strict=True)):
            kept = self.keeps.get(index, ())
            for number, key in enumerate(operation.fresh if action != "run" else ()):
                found[key] = "kept" if number in kept else "empty"
        return found


def argument_forms(args: Sequence[object]) -> tuple[Hashable, ...]:
    """Arguments, flattened: tensors by how they lie in memory, the others as they are."""
    return tuple(
        (arg.size(), arg.stride(), arg.dtype) if isinstance(arg, torch.Tensor) and arg.layout is torch.strided else _hashed(arg)
        for arg in args
    )


def _hashed(value: object) -> Hashable:
    return value if isinstance(value, Hashable) else repr(value)


class Recording(TorchDispatchMode):
    """Records the operations of one block call. `outside`: the tensors that were there before: arguments, parameters, buffers.

    Storages are held as long as the recording is, so that no two have one key; tensors are not.
    """

    def __init__(self, outside: Sequence[object]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.saved: set[int] = set()
        self.obstacle: str | None = None
        self.outputs: list[torch.Tensor] = []
        self._outside: set[int] = set()
        self._made: set[int] = set()
        self._num_saved: Counter[int] = Counter()  # tensors over a storage that stand for saved ones
        self._held: set[int] = set()  # storages made in the call that the graph holds, but not as saved tensors
        self._entries: list[Start] = []  # where a recompute might begin to follow a plan
        for tensor in outside:
            if isinstance(tensor, torch.Tensor) and is_plain(tensor):
                self._outside.add(self._key(tensor))

    def watching(self, modules: Sequence[nn.Module]) -> Changed:
        """Within the block calls of the modules inside a block are noted; `modules`: the block's, itself the first."""
        handles: list[RemovableHandle] = []

        def noted(number: int) -> Callable[..., None]:
            calls = count()

            def note(*_: object) -> None:
                call, modes = next(calls), Modes.capture()
                # the block's own modes, inside which a recompute would have to put its own, are not on
                if modes.operations[-1:] == (self,) and modes.packings and modes.packings[-1].pack == self.pack:
                    self._entries.append(Start(number, call, len(self.operations)))

            return note

        def put_on() -> None:
            for number, module in enumerate(modules[1:], 1):
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # it takes no hooks
                handles.append(module.register_forward_pre_hook(noted(number)))

        def take_off() -> None:
            for handle in handles:
                handle.remove()

        return Changed(take_off, put_on)

    def pack(self, tensor: torch.Tensor) -> AliasSlot:
        """Note that autograd saves a tensor."""
        if is_plain(tensor):
            self.saved.add(self._key(tensor))
            self._num_saved[self._key(tensor)] += 1
        else:
            self.obstacle = f"it saves a {type(tensor).__name__}"
        return AliasSlot(tensor.detach(), tensor._version)

    def finish(self, outputs: Sequence[object], leaves: Sequence[object]) -> None:
        """The call is over and has given these outputs, of which `leaves` were made. Its graph is still there."""
        known = {id(value): value for value in (*outputs, *leaves) if isinstance(value, torch.Tensor)}
        over = self._num_saved + Counter(key_of(value.untyped_storage()) for value in known.values())
        self._held = {key for key in self._made if not is_over(self.storages[key], over[key])}
        self.outputs = [value.detach().clone() for value in outputs if isinstance(value, torch.Tensor)]

    def __torch_dispatch__(  # override
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: Keywords | None = None
    ) -> object:
        """Run the operation and record it."""
        kwargs = kwargs or {}
        if func in UNSEEN:
            return func(*args, **kwargs)
        flat = pytree.tree_leaves((args, kwargs))
        form = argument_forms(flat)
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        known = [self._key(tensor) for tensor in tensors if is_plain(tensor)]
        returned = func(*args, **kwargs)
        results, spec = pytree.tree_flatten(returned)
        if torch.Tag.dynamic_output_shape in func.tags:
            self.obstacle = "the shapes in it depend on the values of tensors"
        if not all(is_plain(v) for v in (*tensors, *results) if isinstance(v, torch.Tensor)):
            self.obstacle = "it computes with tensors of other kinds than torch's own dense ones"
            return returned
        self._outside.update(key for key in known if key not in self._made)
        written = [self._key(value) for value in written_args(func, args, kwargs)]
        fresh, given = self._places(results, flat, set(known))
        layouts: list[object] = [Layout.of(value) if isinstance(value, torch.Tensor) else value for value in results]
        reads = () if func.overloadpacket in _FACTORIES else tuple(known)
        dropout, summed = _dropout(func, args, kwargs), _summed(func, tensors)
        self.operations.append(Operation(func, form, reads, tuple(written), fresh, given, layouts, spec, dropout, summed))
        self._made.update(fresh)
        return returned

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = key_of(storage)
        self.storages.setdefault(key, storage)
        return key

    def _places(
        self, results: Sequence[object], flat: Sequence[object], known: set[int]
    ) -> tuple[dict[int, NewStorage], dict[int, int]]:
        """The new storages among the results, and the arguments that are results."""
        over: dict[int, list[tuple[int, Layout]]] = {}
        given: dict[int, int] = {}
        for place, value in enumerate(results):
            if not isinstance(value, torch.Tensor):
                continue
            key = self._key(value)
            if key not in known:
                over.setdefault(key, []).append((place, Layout.of(value)))
                continue
            for index, argument in enumerate(flat):
                if (
                    isinstance(argument, torch.Tensor)
                    and self._key(argument) == key
                    and Layout.of(argument) == Layout.of(value)
                ):
                    given.setdefault(place, index)
        held = self.storages
        fresh = {key: NewStorage(held[key].nbytes(), held[key].device, tuple(places)) for key, places in over.items()}
        return fresh, given

    def escaped(self, leaves: Sequence[object]) -> set[int]:
        """The storages made in the call that somebody holds besides the call's outputs, of which `leaves` are left. To be
        asked once the graph is dropped; what the graph has held, if not as a saved tensor, is among them."""
        over = Counter(key_of(leaf.untyped_storage()) for leaf in leaves if isinstance(leaf, torch.Tensor))
        return self._held | {key for key in self._made if not is_over(self.storages[key], over[key])}

    def plan(
        self, policy: ActivationPolicy, leaves: Sequence[object], outputs: int | None = None
    ) -> tuple[CallPlan | None, str]:
        """The plan of further calls; or None, and why there is none. `leaves`: see `escaped`; `outputs`: see `point_name`."""
        if self.obstacle is not None:
            return None, self.obstacle
        flow = _Flow(self.operations, self._outside, {*self.saved, *self.escaped(leaves)})
        if flow.reads_unwritten():
            return None, "code that torch does not dispatch, such as a kernel of its own, writes memory in it"
        keepable = {
            index
            for index, operation in enumerate(self.operations)
            if policy == "products" and operation.is_product and operation.fresh and not operation.must_run
        }
        plan = flow.plan(keepable)
        if outputs is not None:
            plan = flow.plan(set(_most_saving(plan)[:outputs]))
        first = next((index for index, action in enumerate(plan.actions) if action != "run"), 0)
        before = [entry for entry in self._entries if entry.operation <= first]
        return replace(plan, start=before[-1] if before else None), ""


def _most_saving(plan: CallPlan) -> list[int]:
    """The operations whose results a plan keeps, those first that save most floating-point operations for their bytes; of equal
    ones the later first, as in `cli.plan.block_ops`."""

    def benefit(index: int) -> float:
        kept = plan.keeps[index]
        news = [new for number, new in enumerate(plan.operations[index].fresh.values()) if number in kept]
        elements = sum(layout.size.numel() for new in news for _, layout in new.results[:1])
        return plan.operations[index].summed * elements / max(1, sum(new.num_bytes for new in news))

    return sorted(plan.keeps, key=lambda index: (-benefit(index), -index))


def _summed(func: OpOverload, tensors: Sequence[torch.Tensor]) -> int:
    """See `Operation`; 0 of what is no product."""
    if _ATTENTION in str(func):
        keys = tensors[1] if len(tensors) > 1 else None  # read for the weights, and values for their sum
        return 0 if keys is None or keys.dim() < 2 else 2 * keys.size(-2)  # 0: an operation of the user's with such a name
    if func.overloadpacket not in _PRODUCTS:
        return 0
    if func.overloadpacket is _aten.convolution:
        return tensors[1][:1].numel()
    if func.overloadpacket is _aten.linear:
        return tensors[0].size(-1)
    return tensors[-2].size(-1)  # of two factors, behind what is added to their product


def written_args(func: OpOverload, args: Sequence[object], kwargs: Keywords) -> list[torch.Tensor]:
    """The arguments that the operation writes, by its schema."""
    found: list[object] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += pytree.tree_leaves(value)
    return [value for value in found if isinstance(value, torch.Tensor)]


def _dropout(func: OpOverload, args: Sequence[object], kwargs: Keywords) -> float:
    """The argument `dropout_p` of an operation; 0 where it has none, or its default."""
    names = [argument.name for argument in func._schema.arguments]
    value = {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p", 0.0)
    return float(value) if isinstance(value, int | float) else 1.0


@dataclass
class _Flow:
    """Which values each operation makes and reads. `roots`: storages whose last value is needed. See [Note: values]."""

    operations: Sequence[Operation]
    outside: set[int]
    roots: set[int]
    reads: list[list[_Value]] = field(default_factory=list)
    made: dict[_Value, int] = field(default_factory=dict)
    last: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for index, operation in enumerate(self.operations):
            self.reads.append([(key, self.last[key]) for key in operation.reads])
            for key in {*operation.writes, *operation.fresh}:
                self.last[key] += 1
                self.made[key, self.last[key]] = index

    def reads_unwritten(self) -> bool:
        """Whether something needs memory that, as far as torch knows, nobody has written."""
        empty = {
            (key, 1)
            for operation in self.operations
            if operation.packet in _UNINITIALIZED
            for key, new in operation.fresh.items()
            if new.num_bytes
        }
        read = {
            value
            for operation, values in zip(self.operations, self.reads, strict=True)
            if not operation.is_view
            for value in values
            if value[0] not in operation.writes
        }
        return bool(empty & (read | {(key, self.last[key]) for key in self.roots}))

    def plan(self, keepable: set[int]) -> CallPlan:
        """The plan in which results of the operations `keepable` are kept where they are needed, as far as that is right."""
        written: set[int] = set()
        while True:
            run, kept = self._needed(keepable, written)
            wrong = {self.made[key, 1] for key in kept if self._touchers(key) & run}
            late = self._writes_of_computed(run)
            if not wrong and not late:
                break
            keepable, written = keepable - wrong, written if wrong else written | late
        keeps: dict[int, tuple[int, ...]] = {}
        for index in sorted({self.made[key, 1] for key in kept}):
            fresh = list(self.operations[index].fresh)
            keeps[index] = tuple(number for number, key in enumerate(fresh) if key in kept)
        actions: list[Action] = []
        for index, operation in enumerate(self.operations):
            computes = index in run or operation.is_view
            actions.append("keep" if index in keeps else "run" if computes else "skip")
        return CallPlan(tuple(self.operations), tuple(actions), keeps)

    def _touchers(self, key: int) -> set[int]:
        """The operations that make or write a storage."""
        return {self.made[key, version] for version in range(1, self.last[key] + 1)}

    def _writes_of_computed(self, run: set[int]) -> set[int]:
        """The operations that do not run, and write memory that one which runs has made. Nothing needs what they write. But
        another call may write other memory there, whose value is needed: only a write that runs tells."""
        return {
            index
            for index, operation in enumerate(self.operations)
            if index not in run and any(self.made[key, 1] in run for key in operation.writes)
        }

    def _needed(self, keepable: set[int], written: set[int]) -> tuple[set[int], set[int]]:
        """The operations that run, and the storages that are kept. `written`: operations that have to run for what they
        write."""
        run: set[int] = set()
        kept: set[int] = set()
        work: list[_Value] = [(key, self.last[key]) for key in self.roots]
        for index, operation in enumerate(self.operations):
            if index in written or operation.must_run or any(key in self.outside for key in operation.writes):
                run.add(index)
                work += self.reads[index]
        done: set[_Value] = set()
        while work:
            value = work.pop()
            if value in done:
                continue
            done.add(value)
            maker = self.made.get(value)
            if maker is None:
                continue  # it was there before
            if value[1] == self.last[value[0]] and self.made.get((value[0], 1)) in keepable and value[0] not in self.outside:
                kept.add(value[0])
                continue
            run.add(maker)
            work += self.reads[maker]
        return run, kept
