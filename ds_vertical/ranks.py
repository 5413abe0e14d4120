"""The processes that train one model together: their numbers, and what they tell each other outside a step."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist

from ds_vertical import compat


class OtherRankError(RuntimeError):
    """What this rank was asked for has failed on another one; the message says how."""


def rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def all_gathered(value: Any) -> list[Any]:
    """Every rank's value, in the order of the ranks."""
    found: list[Any] = [value] * world_size()
    if world_size() > 1:
        torch.distributed.all_gather_object(found, value)
    return found


@contextlib.contextmanager
def agreed(what: str) -> Iterator[None]:
    """All ranks leave the block, or all of them raise: those without an error of their own OtherRankError. Collective; the
    block itself must have no collective that another rank's error would leave alone."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if world_size() > 1 and not is_true_on_all_ranks(error is None):
        said = all_gathered(None if error is None else f"{type(error).__name__}: {error}")
        others = [f"rank {number}: {text}" for number, text in enumerate(said) if text is not None]
        if error is None:
            raise OtherRankError(f"{what} failed on {len(others)} of {len(said)} ranks; {others[0]}")
    if error is not None:
        raise error


def ranks_on_this_host() -> int:
    return all_gathered(socket.gethostname()).count(socket.gethostname())


def ranks_on_these_cores() -> int:
    """Ranks of this host that may run on some core of this one's, itself among them."""
    host, cores = socket.gethostname(), os.sched_getaffinity(0)
    return sum(other == host and bool(theirs & cores) for other, theirs in all_gathered((host, cores)))


def start_distributed() -> None:
    """Initialise the distributed back end if nobody has."""
    if not dist.is_initialized():
        _refuse_bare_python()
        deepspeed.init_distributed(dist_backend=compat.get_accelerator().communication_backend_name())
    if not compat.get_accelerator().is_synchronized_device():  # nobody has bound this rank to its device before zero.Init
        compat.get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))


def common_run_id(run_id: str) -> str:
    """Rank 0's run id, on every rank; initialises the distributed back end if nobody has."""
    start_distributed()
    shared = [run_id]
    torch.distributed.broadcast_object_list(shared, src=0, device=torch.device(compat.device_name()))
    return shared[0]


def is_true_on_all_ranks(flag: bool) -> bool:
    """Whether every rank gives a true `flag`. Collective."""
    votes = torch.tensor([int(flag)], device=compat.device_name())
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


def _refuse_bare_python() -> None:
    """Without a launcher's variables DeepSpeed would look for MPI, and end in a missing module."""
    launchers = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "AZUREML_EXPERIMENT_ID")
    if not any(name in os.environ for name in launchers) and importlib.util.find_spec("mpi4py") is None:
        raise RuntimeError("no launcher started this process; write: deepspeed SCRIPT.py --deepspeed_config CONFIG.json")
