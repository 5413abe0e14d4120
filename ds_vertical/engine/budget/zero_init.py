"""What zero.Init's buffers take of host memory, while a model is built and at `initialize`.

A model that was built under zero.Init comes without them: their pages have been given back, and stock's set-up reads parameters
through one of them at a time, or, with `fast_init`, through as many as these fill. One that was built outside lies whole in
memory as DeepSpeed makes its zero.Init, whose buffers then stay locked until the optimizer has been set up. Where anything has
been built under zero.Init it makes no other: adapters that PEFT has put outside go through the buffers that there are.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ds_vertical.compat import stock_config, swap_buffers
from ds_vertical.config.file import DeepSpeedJson
from ds_vertical.distributed import ranks
from ds_vertical.io import host


def tight_buffers(config: DeepSpeedJson, limit: int | None) -> list[str]:
    """A line for the log, ahead of the model, where zero.Init's buffers leave it no room. `limit`: bytes of host memory that
    all ranks of this host may use; None: nobody has written any."""
    locked = stock_config.locked_by_zero_init(config)
    if limit is None or not locked:
        return []
    held, allowed = host.resident_bytes(), limit // ranks.ranks_on_this_host()
    if held + locked <= allowed:
        return []
    count, size, _ = stock_config.buffers_of_zero_init(config, locked)
    fitting = max(0, allowed - held) * count // locked - 1  # a parameter that is being built takes as much as one
    less = f'"buffer_count": {fitting} (now {count})'
    if fitting < 1:
        less = (
            '"buffer_count": 1, and the elements of the largest shard as "buffer_size", or more "host_memory_bytes" where that'
            " is written"
        )
    return [
        f"warning: zero_optimization.offload_param: zero.Init locks {locked} bytes ({count} x {size} elements) while the model"
        f" is built, beside {held} of the process, and vertical_schedule.host_memory_bytes allows {allowed}: a process that"
        f" the kernel holds to that ends there; write {less}"
    ]


def with_buffers(params: Iterable[nn.Parameter], config: DeepSpeedJson, setup_bytes: int, filled_bytes: int) -> int:
    """Bytes that are there at a time until the optimizer has been set up, which takes `setup_bytes` without the buffers, and
    reads `filled_bytes` into these, as far as there are so many."""
    held, locked = list(params), stock_config.locked_by_zero_init(config)
    taken = locked if swap_buffers.are_outside(held) else min(locked, filled_bytes)
    return max(setup_bytes, swap_buffers.whole_bytes(held)) + taken
