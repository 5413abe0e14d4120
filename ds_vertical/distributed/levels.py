"""Collectives over the levels of a cluster, in flight: spread and gather weights, reduce gradients and send them across.

[Note: lanes] Each direction (weights, gradients) has a mesh of torch's, of the dimensions "world", "node" and "pair": so each
level has a process group per direction. On the CPU each such group has a thread: a lane. A lane takes its hops first in, first
out. A collective of several hops goes from lane to lane. All ranks issue collectives in the order of one schedule, so the order
in each lane is the same on all ranks, whatever the other lanes do. A rank whose hop has failed issues none behind it any more:
its hops would meet other ones of the other ranks. Every later collective of that direction raises that hop's error. Beside a
device the calling thread issues all hops at once, in the stream that computes: see `device_parts`, [Note: levels beside a
device]. A collective is over there when it is issued, and its result for what the same stream is given next. A hop that fails
there raises HopError from the call that issues it, and so does every later call, in both directions.

[Note: trees] A sum goes to its owner hop by hop: all-to-all of the ranks' terms, then their addition in fp32, in ascending
order of ranks. The sum is rounded to the dtype of communication at the end of each hop. The first hop is over w ranks, then
over g/w, then over W/g. So the bits of a sum depend on the topology's numbers alone.

[Note: bytes] P: bytes of a whole unit, in the dtype of its collective. What a collective holds at most, the tensors that it was
given included, on top of which gloo holds a gather's result once more while the gather is under way:

- spread: P/W of the share and P/w of the copy; where g/w > 1, P g/(w W) of the first hop too.
- gather: P/w of the copy and P, and what the chunks are joined to. Out of a host's memory: P/w, and what they are joined to.
- reduce: 2 P, while the first hop's terms are exchanged; then P and P/w, as out of a host's memory from the start.
- cross: 2 P/g, then P/g and P/W.

With a quantizer what is sent and received has bits/8 bytes an element, and 4 bytes a block. Sums of its terms are in fp32 then.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ds_vertical.compat import accelerator
from ds_vertical.distributed import ranks
from ds_vertical.distributed.host_memory import PartPlace, SharedMemory
from ds_vertical.distributed.quantize import Quantizer
from ds_vertical.distributed.topology import Level, Topology
from ds_vertical.schedule.trace import Tracer, now

T = TypeVar("T")

_PIECE_NUMEL: Final = 1 << 17  # of a sum: what is added in fp32 at a time

_RESOURCES: Final = {Level.PAIR: "net_local", Level.NODE: "net_local", Level.WORLD: "net_cross"}  # of traces


class HopError(RuntimeError):
    """A hop has failed beside a device, where a rank issues all hops in one line. The other ranks wait in it for this one, and
    none can go on: a rank that raises this takes part in nothing more, and the failure watch ends the others."""

    ends_run = True


class _Received(threading.local):
    """Of a lane's last hop."""

    num_bytes = 0


_received = _Received()

_Job = Callable[[], threading.Event | None]  # returns what is to be set behind it, once nothing that the job holds is there

# A hop takes its argument out of a list, so that nobody else keeps the memory, and returns the next hop's.
_Hop = Callable[[list[torch.Tensor]], torch.Tensor]
_Hops = Sequence[tuple[Level, _Hop]]
_GroupHop = Callable[[ProcessGroup, list[torch.Tensor]], torch.Tensor]
_Rows = Callable[[Sequence[torch.Tensor] | torch.Tensor], None]


class Issued(Generic[T]):
    """A collective that this rank has issued. `form`: makes the result of what the last hop gives. `what`: for traces."""

    def __init__(self, form: Callable[[torch.Tensor], T], what: str = "") -> None:
        self.what = what
        self._form = form
        self._over = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._over.is_set()

    @property
    def error(self) -> BaseException | None:
        """What a hop has failed with so far."""
        return self._error

    def wait(self) -> T:
        """The result, once it has come. May be called again. Raises what a hop has failed with."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def end(self, last: list[torch.Tensor]) -> threading.Event:
        """The collective's last hop has given this, which is taken out of the list. `wait` returns once the caller has set the
        event: it first lets go of whatever it holds itself, in whose place others then find room."""
        self._result.append(self._form(last.pop()))
        return self._over

    def fail(self, error: BaseException) -> threading.Event:
        """The collective has failed with this. `wait` raises it once the caller has set the event."""
        self._error = error
        return self._over


def _nothing_to_wait_for() -> None:
    """Nothing in memory of a host was read so far."""


class LevelCollectives:
    """See [Note: lanes] and [Note: bytes]. Made on all ranks together. Chunks are ordered by `topology.order`. S is the
    elements of a chunk: a rank's shards of all parameters of a unit, which DeepSpeed has padded. Tensors given are contiguous,
    and belong to the collective until it is over. A hop of one rank moves nothing, and rounds nothing."""

    def __init__(self, topology: Topology) -> None:
        if topology.world != ranks.world_size():
            raise ValueError(f"{topology} is none of {ranks.world_size()} ranks")
        self.topology = topology
        threaded, failed = accelerator.device_name() == "cpu", list[BaseException]()
        self._weights, self._gradients = (
            _Direction(name, topology, [] if threaded else failed, threaded) for name in ("weights", "gradients")
        )
        # each waits until all of a pair have read what gathers out of memory, or reductions, were of
        self._read = self._summed = _nothing_to_wait_for
        order = topology.order
        self._by_rank = sorted(range(len(order)), key=order.__getitem__)

    def trace(self, tracer: Tracer) -> None:
        """Note each hop from now on, under the name `what` of its collective: a hop within a node as work of "net_local",
        another one as work of "net_cross"."""
        self._weights.tracer = self._gradients.tracer = tracer

    def spread(
        self, share: torch.Tensor, quantizer: Quantizer | None = None, what: str = "", memory: SharedMemory | None = None
    ) -> Issued[torch.Tensor]:
        """From this rank's own chunk (S elements) to its copy: the chunks of `topology.copy_order(rank)`, (W/w, S).

        With a quantizer each chunk is rounded once, by its owner, whose copy has the rounded values, too. The padding must be
        finite then, see `clear_padding`. The hop across nodes comes first. `memory`: where the copy is to lie, if it has room.
        """
        place, levels = PartPlace(memory, self._read), (Level.WORLD, Level.NODE)
        last = None if quantizer is not None else functools.partial(_all_gathered, place=place)
        hops = _in_bytes(self._weights.hops(levels, _all_gathered, last), quantizer)
        return self._weights.issue(share.view(1, -1), hops, place.settled, what)

    def gather(
        self,
        copy: torch.Tensor | Issued[torch.Tensor],
        quantizer: Quantizer | None = None,
        what: str = "",
        join: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list,
        memory: SharedMemory | None = None,
    ) -> Issued[list[torch.Tensor]]:
        """From the copies of a pair to the whole unit: what `join` makes of the chunks of all W ranks, in the order of the
        ranks. `copy`: what `spread` gives, over or not. With a quantizer each chunk is rounded, whether it was before or not,
        in the same way on all ranks. `memory`: where copies may lie, the same on all ranks; `join` then leaves no chunk."""

        def joined(chunks: Sequence[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
            return join([chunks[place] for place in self._by_rank])

        if memory is None or quantizer is not None or self._weights.group(Level.PAIR) is None:
            hops = _in_bytes(self._weights.hops((Level.PAIR,), _all_gathered), quantizer)
            return self._weights.issue(copy, hops, joined, what)
        made: list[list[torch.Tensor]] = []
        reads = functools.partial(_read_in_memory, memory, lambda chunks: made.append(joined(chunks)))
        issued = self._weights.issue(copy, self._weights.hops((Level.PAIR,), reads), lambda _: made.pop(), what)
        self._read = self._weights.issue(copy, self._weights.hops((Level.PAIR,), _met), lambda _: None, what).wait
        return issued

    def reduce(
        self, rows: torch.Tensor, quantizer: Quantizer | None = None, what: str = "", memory: SharedMemory | None = None
    ) -> Issued[torch.Tensor]:
        """From this rank's terms of all chunks, (W, S), to the sums over its node of the chunks of
        `topology.node_share_order(rank)`, (W/g, S). `rows`: ordered by `topology.order`, see `cut_into_chunks`. Hops: pair,
        then node. With a quantizer the terms of each hop are rounded. `memory`: where rows may lie (`room`), the same on all
        ranks."""
        scattered = functools.partial(_scattered_sums, quantizer)
        if memory is None or quantizer is not None or self._gradients.group(Level.PAIR) is None:
            hops = self._gradients.hops((Level.PAIR, Level.NODE), scattered)
            return self._gradients.issue(rows, hops, lambda sums: sums, what)
        within = self._gradients.hops((Level.PAIR,), functools.partial(_summed_in_memory, memory))
        across = self._gradients.hops((Level.NODE,), scattered) if self._gradients.group(Level.NODE) else []
        issued = self._gradients.issue(rows, [*within, *across], lambda sums: sums, what)
        self._summed = self._gradients.issue(rows, self._gradients.hops((Level.PAIR,), _met), lambda _: None, what).wait
        return issued

    def room(self, memory: SharedMemory | None) -> PartPlace:
        """Where rows for `reduce` are made."""
        return PartPlace(memory, self._summed)

    def cross(
        self, node_share: torch.Tensor | Issued[torch.Tensor], quantizer: Quantizer | None = None, what: str = ""
    ) -> Issued[torch.Tensor]:
        """From the sums over each node to the sums over all ranks of this rank's own chunk (S elements). `node_share`: what
        `reduce` gives, over or not."""
        hops = self._gradients.hops((Level.WORLD,), functools.partial(_scattered_sums, quantizer))
        return self._gradients.issue(node_share, hops, lambda sums: sums.view(-1), what)

    def close(self) -> None:
        """End the lanes' threads, once the hops that were issued are over. No collective may be issued any more."""
        self._weights.close()
        self._gradients.close()


# ---- lanes


class _Lane:
    """Runs what it is given, first in, first out: on a thread of its own, or at once on the caller's."""

    def __init__(self, name: str, threaded: bool) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threaded = threaded
        if threaded:
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, job: _Job) -> None:
        if self._threaded:
            self._jobs.put(job)
        elif (over := job()) is not None:
            over.set()

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            over = job()
            del job  # and the memory that it holds
            if over is not None:
                over.set()


def _mesh(purpose: str, topology: Topology) -> DeviceMesh | None:
    """The ranks as torch's mesh, of the levels that have several ranks, outermost first; None where there is no such level.
    torch's own `init_device_mesh` would use the group of all ranks again, whose collectives come from another thread.
    Collective among all ranks."""
    cut = f"{topology.world}/{topology.node}/{topology.pair}"
    made = {level: ranks.own_subgroup(f"{purpose} {level.value} {cut}", topology.hops(level)) for level in Level}
    groups = {level.value: group for level, group in reversed(made.items()) if group is not None}
    if not groups:
        return None
    numbers = torch.arange(topology.world).view([topology.width(Level(name)) for name in groups])
    return DeviceMesh.from_group([*groups.values()], accelerator.device_name(), mesh=numbers, mesh_dim_names=tuple(groups))


class _Direction:
    """The lanes and the mesh of the weights, or of the gradients; see [Note: lanes]. `mesh`: see `_mesh`. `failed`: takes what
    a hop fails with; behind that none is issued. `threaded`: hops have threads of their own."""

    def __init__(self, name: str, topology: Topology, failed: list[BaseException], threaded: bool) -> None:
        self.mesh = _mesh(name, topology)
        self._threaded = threaded
        self._lanes = {level: _Lane(f"ds_vertical {name} {level.value}", threaded) for level in Level}
        self.tracer = Tracer()
        self._failed = failed

    def hops(self, levels: Sequence[Level], hop: _GroupHop, last: _GroupHop | None = None) -> _Hops:
        """`hop` over each level that has several ranks, and `last` in its place over the last of them; over none, what is given
        stays as it is."""
        groups = [(level, group) for level in levels if (group := self.group(level)) is not None]
        made = [(level, functools.partial(hop, group)) for level, group in groups[:-1]]
        made += [(level, functools.partial(last or hop, group)) for level, group in groups[-1:]]
        return made or [(levels[0], list.pop)]

    def group(self, level: Level) -> ProcessGroup | None:
        """The ranks of this one's hop of a level; None where it is by itself."""
        if self.mesh is None or level.value not in (self.mesh.mesh_dim_names or ()):
            return None
        return self.mesh.get_group(level.value)

    def issue(
        self, given: torch.Tensor | Issued[torch.Tensor], hops: _Hops, form: Callable[[torch.Tensor], T], what: str
    ) -> Issued[T]:
        """Send what is given through the hops. Without threads it raises HopError where one has failed, now or before."""
        issued = Issued(form, what)
        self._enter(issued, given.wait if isinstance(given, Issued) else [given].pop, hops)
        if not self._threaded and (error := issued.error) is not None:
            if not isinstance(error, Exception):
                raise error  # an interrupt of this thread
            raise HopError(f"a collective over levels has failed on this rank, which ends the run: {what}: {error}") from error
        return issued

    def _enter(self, issued: Issued[T], take: Callable[[], torch.Tensor], hops: _Hops) -> None:
        """`take` gives what the first of the hops is of; called once, on that hop's lane."""
        (level, hop), *rest = hops
        takes = [take]
        del take  # which may hold what it gives

        def job() -> threading.Event | None:
            try:
                if self._failed:
                    raise self._failed[0]
                held = [takes.pop()()]
                start = now()
                with torch.no_grad():  # a thread has a mode of its own
                    held.append(hop(held))
                if _moves(hop):
                    self.tracer.span(_RESOURCES[level], issued.what, start, now(), _received.num_bytes)
                if not rest:
                    return issued.end(held)
                self._enter(issued, held.pop, rest)
            except BaseException as error:
                self._failed.append(error)
                return issued.fail(error)
            return None

        self._lanes[level].put(job)

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()


# ---- hops


def _all_gathered(group: ProcessGroup, held: list[torch.Tensor], place: PartPlace = PartPlace(None)) -> torch.Tensor:  # noqa: B008
    """The rows of all ranks of the group, in the order of the ranks, at `place`."""
    rows = held.pop()
    found = place.new((group.size() * len(rows), rows.shape[1]), rows)
    _received.num_bytes = found.nbytes - rows.nbytes
    ranks.ALL_GATHER(found.view(torch.uint8), rows.view(torch.uint8), group=group)
    return found


def _read_in_memory(memory: SharedMemory, found: _Rows, group: ProcessGroup, held: list[torch.Tensor]) -> torch.Tensor:
    """Call `found` with the rows of all ranks of the group, in the order of the ranks: out of the host's memory, where all have
    theirs there. Returns this rank's rows."""
    rows = held.pop()
    parts = memory.parts_of_all(rows, group)
    _received.num_bytes = 0  # unless they are sent
    found(_all_gathered(group, [rows]) if parts is None else [row for part in parts for row in part])
    return rows


def _met(group: ProcessGroup, held: list[torch.Tensor]) -> torch.Tensor:
    """This rank's rows, which none of the group reads any more."""
    torch.distributed.barrier(group=group)
    return held.pop()


def _moves(hop: _Hop) -> bool:
    """Whether a hop brings this rank anything."""
    return hop is not list.pop and not (isinstance(hop, functools.partial) and hop.func is _met)


def _exchanged(rows: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Of the rows, the n-th part goes to the n-th rank of the group, and the n-th part of the result comes from there."""
    found = torch.empty_like(rows)
    _received.num_bytes = rows.nbytes - rows.nbytes // group.size()
    torch.distributed.all_to_all_single(found.view(torch.uint8), rows.view(torch.uint8), group=group)
    return found


def _scattered_sums(quantizer: Quantizer | None, group: ProcessGroup, held: list[torch.Tensor]) -> torch.Tensor:
    """Of all ranks' rows the sums of this rank's part."""
    rows = held.pop()
    count, numel, dtype = group.size(), rows.shape[1], rows.dtype
    if quantizer is None:
        terms = _exchanged(rows, group)
        del rows
        return tree_sum(terms.view(count, -1, numel), (count,))
    packed = quantizer.quantize(rows)
    del rows
    first, *others = _exchanged(packed, group).chunk(count)
    totals = torch.empty(len(first), numel, dtype=torch.float32, device=first.device)
    quantizer.dequantize(first, totals)
    for each in others:
        quantizer.add(each, totals)
    return totals.to(dtype)


def _summed_in_memory(memory: SharedMemory, group: ProcessGroup, held: list[torch.Tensor]) -> torch.Tensor:
    """As `_scattered_sums`, out of the host's memory where all ranks of the group have their rows there."""
    rows = held.pop()
    parts, count = memory.parts_of_all(rows, group), group.size()
    if parts is None:
        return _scattered_sums(None, group, [rows])
    _received.num_bytes = 0
    return _sum([part.chunk(count)[group.rank()] for part in parts])


def _in_bytes(hops: _Hops, quantizer: Quantizer | None) -> _Hops:
    """Hops that hand rows on as they are: of the rows rounded by `quantizer` ahead of the first, and read behind the last."""
    if quantizer is None or hops[0][1] is list.pop:
        return hops
    given: list[tuple[torch.dtype, int]] = []  # its dtype, and the length of its rows

    def pack(held: list[torch.Tensor]) -> torch.Tensor:
        rows = held.pop()
        given.append((rows.dtype, rows.shape[1]))
        return quantizer.quantize(rows)

    def unpack(held: list[torch.Tensor]) -> torch.Tensor:
        packed, (dtype, numel) = held.pop(), given[0]
        rows = packed.new_empty(len(packed), numel, dtype=dtype)
        quantizer.dequantize(packed, rows)
        return rows

    def packed_first(held: list[torch.Tensor]) -> torch.Tensor:
        return hops[0][1]([pack(held)])

    first = [(hops[0][0], packed_first), *hops[1:]]
    level, last = first[-1]
    return [*first[:-1], (level, lambda held: unpack([last(held)]))]


# ---- sums


def tree_sum(terms: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    """The sum over the first dimension of `terms`, one hop after the other, see [Note: trees]: the first of `widths` is the
    number of neighbours that are added first."""
    for width in widths:
        sums = [_sum(each) for each in terms.split(width)]
        terms = torch.stack(sums) if len(sums) > 1 else sums[0].unsqueeze(0)
    (total,) = terms
    return total


def _sum(terms: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    total = torch.empty_like(terms[0])
    flat, rows = total.view(-1), [each.reshape(-1) for each in terms]
    for first in range(0, flat.numel(), _PIECE_NUMEL):
        pieces = [row[first : first + _PIECE_NUMEL] for row in rows]
        piece = pieces[0].to(torch.float32, copy=True)
        for each in pieces[1:]:
            piece += each
        flat[first : first + _PIECE_NUMEL] = piece
    return total


# ---- DeepSpeed's layout


def shard_sizes(numels: Sequence[int], count: int) -> list[int]:
    """The elements of a rank's shard of each tensor, of `count` ranks; those at the tensor's end may be padding."""
    return [-(-numel // count) for numel in numels]


def clear_padding(share: torch.Tensor, numels: Sequence[int], rank: int, count: int) -> None:
    """Overwrite the padding in a rank's own chunk with zeros. DeepSpeed leaves there what was in memory: inf or nan there would
    make a rounded block nan."""
    for shard, numel, size in zip(share.split(shard_sizes(numels, count)), numels, shard_sizes(numels, count), strict=True):
        shard[max(0, numel - rank * size) :] = 0


def cut_into_chunks(
    tensors: Sequence[torch.Tensor],
    order: Sequence[int],
    divisor: int = 1,
    room: PartPlace = PartPlace(None),  # noqa: B008
) -> torch.Tensor:
    """Flat tensors, divided, as DeepSpeed partitions them over the ranks: (W, S), a row for each rank of `order`. A row has the
    rank's shard of each tensor, one behind the other. Each tensor is padded with zeros to a multiple of W. `room`: of the
    rows."""
    sizes, first = shard_sizes([each.numel() for each in tensors], len(order)), tensors[0]
    rows, divided_by = room.new((len(order), sum(sizes)), first), divisor
    if first.device.type != "cpu":  # by a number GPUs multiply; in fp32, as 16 bits have no 257
        divided_by = torch.full((1,), divisor, dtype=torch.float32, device=first.device)
    for row, rank in zip(rows, order, strict=True):
        for each, size, place in zip(tensors, sizes, row.split(sizes), strict=True):
            piece = each[rank * size : (rank + 1) * size]
            own, padding = place.split([piece.numel(), size - piece.numel()])
            own.copy_(piece) if divisor == 1 else torch.div(piece, divided_by, out=own)
            padding.zero_()
    return rows


def joined_chunks(chunks: Sequence[torch.Tensor], numels: Sequence[int]) -> list[torch.Tensor]:
    """The flat tensors, of `numels` elements, from all ranks' chunks in the order of the ranks: undoes `cut_into_chunks`."""
    found, first = [], 0
    for numel, size in zip(numels, shard_sizes(numels, len(chunks)), strict=True):
        lengths = [min(size, max(0, numel - rank * size)) for rank in range(len(chunks))]
        found.append(torch.cat([chunk[first : first + length] for chunk, length in zip(chunks, lengths, strict=True)]))
        first += size
    return found
