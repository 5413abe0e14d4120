"""The processes that train one model together: their numbers, and what they tell each other outside a step."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn, ParamSpec, TypeVar

import torch

from ds_vertical.compat import accelerator
from ds_vertical.compat.accelerator import dist, init_distributed
from ds_vertical.compat.ops import cache
from ds_vertical.distributed.failure_watch import FailureWatch, chain, end_now, end_process
from ds_vertical.errors import OtherRankError
from ds_vertical.io import host
from ds_vertical.io.runs import run_dir
from ds_vertical.io.runs.this_host import host_id

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# of tensors into one, under its name in torch 2.13, or in those before
ALL_GATHER: Final = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)

_Group = torch.distributed.ProcessGroup
_groups: dict[
    tuple[str, tuple[tuple[int, ...], ...]], tuple[object, _Group]
] = {}  # by purpose and ranks, with the process group's store
_watch: FailureWatch | None = None
_watched: object = None  # the process group's store


def rank() -> int:
    """This process's number among the ranks, from 0."""
    return dist.get_rank()


def world_size() -> int:
    """The number of ranks."""
    return dist.get_world_size()


def own_group(purpose: str) -> torch.distributed.ProcessGroup | None:
    """A process group of all ranks, in which nothing but the collectives of one purpose is issued; None with one rank.
    Collective, at the first call for a purpose. Its collectives may take as long as those of the group that there is. On a GPU
    it is that group: kernels of several NCCL communicators would have to be ordered alike on all ranks."""
    if world_size() == 1:
        return None
    if accelerator.device_name() != "cpu":
        return torch.distributed.group.WORLD
    return _made_once(purpose, (tuple(range(world_size())),))


def own_subgroup(purpose: str, parts: Sequence[tuple[int, ...]]) -> torch.distributed.ProcessGroup | None:
    """As `own_group`, of those ranks among whom this one is: `parts` has each rank once, in ascending order, and is the same on
    all ranks. Collective among all ranks. None where this rank is by itself. On a GPU one group serves all purposes: its ranks
    issue kernels in one order."""
    if all(len(members) == 1 for members in parts):
        return None
    return _made_once(purpose if accelerator.device_name() == "cpu" else "", tuple(parts))


def _made_once(purpose: str, parts: tuple[tuple[int, ...], ...], backend: str | None = None) -> torch.distributed.ProcessGroup:
    """All ranks make the groups of all parts, in one order: torch names a group by how many a rank has made. A group is made
    again where the process group's store is another one."""
    store = torch.distributed.distributed_c10d._get_default_store()
    key = purpose, parts
    if key not in _groups or _groups[key][0] is not store:
        whole = torch.distributed.group.WORLD
        assert whole is not None  # there are ranks
        limit = whole._get_backend(torch.device(accelerator.device_name())).options._timeout
        made = {members: torch.distributed.new_group(list(members), limit, backend) for members in parts}
        own = next(group for members, group in made.items() if rank() in members)
        assert isinstance(own, torch.distributed.ProcessGroup)  # this rank is in it
        _groups[key] = store, own
    return _groups[key][1]


def host_group() -> torch.distributed.ProcessGroup | None:
    """The process group in which ranks tell each other numbers and words: over host memory, so that no rank waits for its
    device. None, for the group that there is, where the device is the host. Collective, at the first call."""
    if accelerator.device_name() == "cpu" or world_size() == 1:
        return None
    return _made_once("words", (tuple(range(world_size())),), backend="gloo")


def all_gathered(value: T) -> list[T]:
    """Every rank's value, which pickle takes, in the order of the ranks. Collective."""
    found: list[T] = [value] * world_size()
    if world_size() > 1:
        torch.distributed.all_gather_object(found, value, group=host_group())
    return found


@dataclass
class Said:
    """Numbers that ranks tell each other where they agree that none has failed. `own`: this rank's, which the block sets (their
    number is the same on all ranks); `of_all`: behind the block, every rank's."""

    own: list[int]
    of_all: list[list[int]] = field(default_factory=list)


@contextlib.contextmanager
def all_or_none(what: str, then: Callable[[], None] = lambda: None, num_said: int = 0) -> Iterator[Said]:
    """All ranks leave the block, or all of them raise: those without an error of their own OtherRankError. Collective; the
    block itself must have no collective that another rank's error would leave alone. `then`, which may be collective, follows
    on all ranks either way; not after an interrupt, or where the ranks do not hear each other any more. Where all errors have a
    true `starts_over`, every rank raises such a one: all do once more what the block ends. One with a true `is_everyones` is
    raised by every rank, whatever its own is. One with a true `ends_run` is raised at once: the others wait elsewhere for this
    rank. `num_said`: of the numbers that the ranks tell each other beside that."""
    error: Exception | None = None
    said = Said([0] * num_said)
    try:
        yield said
    except Exception as raised:
        if getattr(raised, "ends_run", False):
            raise
        error = raised
    if not _none_has_failed(error is None, said):
        again = error if getattr(error, "starts_over", False) else None
        told = all_gathered(None if error is None else (f"{type(error).__name__}: {error}", again))
        others = [(f"rank {number}: {each[0]}", each[1]) for number, each in enumerate(told) if each is not None]
        if all(each is not None for _, each in others):
            everyones = (each for _, each in others if getattr(each, "is_everyones", False))
            error = next(everyones, error or others[0][1])
        elif error is None or again is not None:
            first = next(text for text, each in others if each is None)
            error = OtherRankError(f"{what} failed on {len(others)} of {len(told)} ranks; {first}")
    if error is not None:
        raise_after(error, then)
    then()


def _none_has_failed(is_well: bool, said: Said) -> bool:
    """Whether no rank has failed; one collective brings this and what the ranks say."""
    if world_size() == 1 or not said.own:
        said.of_all = [said.own]
        return is_well if world_size() == 1 else is_true_on_all_ranks(is_well)
    every = numbers_of_all([int(is_well), *said.own])
    said.of_all = [numbers for _, *numbers in every]
    return all(well for well, *_ in every)


def raise_after(error: Exception, then: Callable[[], None]) -> NoReturn:
    """Raise `error` after a call of `then`, whose own error becomes a note."""
    try:
        then()
    except Exception as other:
        error.add_note(f"and then {type(other).__name__}: {other}")
    raise error


# ---- failures


def collective_section(what: str) -> contextlib.AbstractContextManager[None]:
    """A block in which all ranks do the same, `what`: one rank's failure ends all. See `FailureWatch.section`. With one rank
    the block does nothing. Raises OtherRankError."""
    global _watch, _watched
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return contextlib.nullcontext()
    store = torch.distributed.distributed_c10d._get_default_store()
    if store is None:  # MPI
        return contextlib.nullcontext()
    if _watch is None or _watched is not store:
        number, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        # a connection of its own: over the group's the watch would wait behind whatever the script waits for there
        own = getattr(store, "clone", lambda: store)()
        own_keys = torch.distributed.distributed_c10d.PrefixStore("ds_vertical", own)
        _watch, _watched = FailureWatch(own_keys, number, count, lambda cause: end_process(cause, [run_dir.release_all])), store
    return _watch.section(what)


def collective(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method that all ranks call: each call is a `collective_section` of the method's name."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with collective_section(method.__name__):
            return method(*args, **kwargs)

    return call


@atexit.register
def _leave() -> None:
    """The others learn how this process ends: of an error that nobody has caught, too. After the loss of a host such an error
    ends the process here: torch's own exit would wait for connections to that host."""
    if _watch is None:
        return
    error = getattr(sys, "last_value", None)
    if _watch.is_host_lost and any(isinstance(each, OtherRankError) for each in chain(error)):
        end_now([run_dir.release_all, logging.shutdown])  # `_watch` has told the others already
    _watch.close(error)


def _forget_in_child() -> None:
    """A forked child has no thread that watches, and is no rank."""
    global _watch
    _watch = None


os.register_at_fork(after_in_child=_forget_in_child)


def ranks_on_this_host() -> int:
    """The number of ranks that run on the host of this one. Collective."""
    return all_gathered(host_id()).count(host_id())


def most_ranks_on_a_host() -> int:
    """The number of ranks of the host that runs most of them. Collective."""
    return max(Counter(all_gathered(host_id())).values())


def ranks_on_these_cores() -> int:
    """Ranks of this host that may run on some core of this one's, itself among them."""
    name, cores = host_id(), os.sched_getaffinity(0)
    return sum(other == name and bool(theirs & cores) for other, theirs in all_gathered((name, cores)))


def limit_heaps() -> None:
    """Where several ranks compute on the CPU: as `io.host.use_one_heap`, ahead of the threads of their groups."""
    if accelerator.device_name() == "cpu" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        host.use_one_heap()


def start_distributed() -> None:
    """Initialise the distributed back end if nobody has. On the CPU it has a compiled op, which comes from the user's cache: in
    DeepSpeed's own folder a process waits for ever for one that was killed while it compiled there."""
    limit_heaps()
    if not dist.is_initialized():
        _refuse_bare_python()
        cache.activate()
        init_distributed(dist_backend=accelerator.get_accelerator().communication_backend_name())
    if not accelerator.get_accelerator().is_synchronized_device():  # nobody has bound this rank to its device before zero.Init
        accelerator.get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if accelerator.device_name() == "cpu":
        dist.barrier()
        accelerator.unlink_shared_workspace(rank())


def common_run_id(run_id: str) -> str:
    """Rank 0's run id, on every rank; initialises the distributed back end if nobody has."""
    start_distributed()
    shared = [run_id]
    torch.distributed.broadcast_object_list(shared, src=0, device=torch.device(accelerator.device_name()))
    return shared[0]


def is_true_on_all_ranks(flag: bool) -> bool:
    """Whether every rank gives a true `flag`. Collective."""
    return bool(_over_ranks(torch.tensor([int(flag)]), dist.ReduceOp.MIN).item())


def largest_of_all_ranks(number: int) -> int:
    """The largest that a rank gives. Collective."""
    return int(_over_ranks(torch.tensor([number]), dist.ReduceOp.MAX).item())


def numbers_of_all(numbers: Sequence[int]) -> list[list[int]]:
    """Every rank's integers, of which each rank gives as many. Collective."""
    every = torch.zeros(world_size(), len(numbers), dtype=torch.int64)
    every[rank()] = torch.tensor(numbers)
    return _over_ranks(every, dist.ReduceOp.SUM).tolist()


def sum_of_all_ranks(number: float) -> float:
    """The sum, in fp64. Collective."""
    return float(_over_ranks(torch.tensor([number], dtype=torch.float64), dist.ReduceOp.SUM).item())


def _over_ranks(numbers: torch.Tensor, operation: dist.ReduceOp) -> torch.Tensor:
    """`numbers` of all ranks in one, in host memory. Collective."""
    if world_size() > 1:
        dist.all_reduce(numbers, op=operation, group=host_group())
    return numbers


def _refuse_bare_python() -> None:
    """Without a launcher's variables DeepSpeed would look for MPI, and end in a missing module."""
    launchers = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "AZUREML_EXPERIMENT_ID")
    if not any(name in os.environ for name in launchers) and importlib.util.find_spec("mpi4py") is None:
        raise RuntimeError("no launcher started this process; write: deepspeed SCRIPT.py --deepspeed_config CONFIG.json")
