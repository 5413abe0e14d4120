"""How much host memory a rank may take."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ds_vertical.compat import swap_buffers
from ds_vertical.distributed import ranks as distributed_ranks
from ds_vertical.io import host


def host_room(params: Iterable[nn.Parameter], limit: int | None) -> tuple[int, int]:
    """(bytes of host memory that this rank may take in all, those that it takes beside its parameters). `limit`: see
    `check_memory`. Gives the pages of zero.Init's buffers back first, and of what was freed while the model was built.
    Collective."""
    held = list(params)
    swap_buffers.rest_stock_buffers(held)
    host.trim()
    if distributed_ranks.world_size() > 1:
        distributed_ranks.is_true_on_all_ranks(True)  # what is free is measured once all of this host's have given theirs back
    allowed = machine_room() if limit is None else limit // distributed_ranks.ranks_on_this_host()
    return allowed, max(0, host.resident_bytes() - swap_buffers.bytes_in_memory(held))


def machine_room() -> int:
    """Bytes of host memory that this rank may take in all by what the machine has free now, whatever the JSON says."""
    return host.room_bytes(distributed_ranks.ranks_on_this_host())
