"""A certain hop of the collectives over levels, for tests that stop a rank inside it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import torch

from ds_vertical.distributed import levels

# by the event that sends it: the function of `distributed.levels`, and whether the hop is between nodes
HOPS: Final = {
    "SPREAD": ("_all_gathered", True),
    "FETCH": ("_read_in_memory", False),
    "REDUCE": ("_summed_in_memory", False),
    "CROSS": ("_scattered_sums", True),
}


def act_in(event: str, ranks_per_node: int, number: int, act: Callable[[list[int]], None]) -> None:
    """Let this rank `act`, with the ranks of the hop, in hop `number` (from 0) of those of an event that begin from now on.
    Each kind of hop has a thread of its own, so that no other hop is counted."""
    name, across = HOPS[event]
    hop, counted = getattr(levels, name), itertools.count()

    def acting(*given: Any, **named: Any) -> torch.Tensor:
        group = next(each for each in given if isinstance(each, torch.distributed.ProcessGroup))
        members = torch.distributed.get_process_group_ranks(group)
        if len({rank // ranks_per_node for rank in members}) == (len(members) if across else 1) and next(counted) == number:
            act(members)
        return hop(*given, **named)

    setattr(levels, name, acting)
