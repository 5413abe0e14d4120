"""What `deepspeed.zero.Init` takes of host memory while a model is built whose parameters are to be on SSD.

[Note: buffers] Before the first parameter is made it locks all of `buffer_count` x `buffer_size` by mlock, on any device and
whatever `pin_memory` says, so that all their pages are resident. Each parameter is written through one of them. The vertical
arm gives their pages back at `initialize`. So they count against the time in which the model is built, not against the steps.
A rank's buffer holds its shard of a parameter. One would do for the vertical arm; two hold what a module has itself, its weight
and its bias, which stock and `from_pretrained` gather at a time. Stock, which trains with the same JSON, wants some to spare.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final

from ds_vertical.planner.linear_program import SPARE
from ds_vertical.planner.memory_budget import LATER_BYTES, MEASURED_KEY, BudgetItem, planned_setup
from ds_vertical.planner.model_shape import ModelShape

LEAST_BUFFERS: Final = 2
_FEW_BUFFERS: Final = 8  # that a plan counts where there is room
_MOST_BUFFERS: Final = 32
_LARGE: Final = 50_000_000  # elements of a parameter, from which on the buffers are few


def buffer_elements(largest_parameter: int, num_ranks: int) -> int:
    """`buffer_size`: the largest shard's elements."""
    return -(-largest_parameter // num_ranks)


def build_bytes(
    shape: ModelShape, largest_parameter: int, further: tuple[BudgetItem, ...], one_memory: bool, count: int
) -> int:
    """Host memory in all while the model is built with so many buffers: what of `further` the process holds by then, the
    buffers, what stays in memory as no file is so small, and a parameter before it is cut into shards, which is made on the
    device."""
    held = sum(item.num_bytes - LATER_BYTES for item in further if item.key == MEASURED_KEY)
    elements = count * buffer_elements(largest_parameter, shape.num_shards) + one_memory * largest_parameter
    elements += shape.small.parameters
    return held + elements * shape.param_bytes


def ahead_of_steps(
    shape: ModelShape, largest_parameter: int, further: tuple[BudgetItem, ...], one_memory: bool, limit: float | None
) -> tuple[int, int]:
    """What a planned run takes of host memory before it steps: `setup_bytes` and `build_bytes` of `LpProblem`. The latter with
    few buffers, or as many of these as `limit` bytes hold."""
    taken = partial(build_bytes, shape, largest_parameter, further, one_memory)
    room = math.inf if limit is None else limit * (1 - SPARE)
    return planned_setup(shape, largest_parameter, further), taken(_fitting(_FEW_BUFFERS, room, taken))


def buffer_count(largest_parameter: int, room: float, taken: Callable[[int], int]) -> int:
    """As many buffers as `room` holds, of those that are of use. `taken`: see `build_bytes`."""
    return _fitting(_FEW_BUFFERS if largest_parameter >= _LARGE else _MOST_BUFFERS, room, taken)


def _fitting(most: int, room: float, taken: Callable[[int], int]) -> int:
    return next((count for count in range(most, LEAST_BUFFERS, -1) if taken(count) <= room), LEAST_BUFFERS)
