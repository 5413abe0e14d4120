"""What two halves a step need of the ranks and of the device; the rest is in `config.acco`."""

from __future__ import annotations

import json
from typing import Final

from ds_vertical.compat import accelerator
from ds_vertical.config.acco import odd_fault
from ds_vertical.config.file import DeepSpeedJson, num_micro_batches
from ds_vertical.distributed import ranks
from ds_vertical.distributed.topology import PAIR_KEY
from ds_vertical.distributed.unit_levels import topology_for
from ds_vertical.errors import ConfigError
from ds_vertical.types import LevelSettings, RunSettings

_KEY: Final = "vertical_schedule.acco"


def refuse_acco(settings: RunSettings, config: DeepSpeedJson) -> None:
    """Raise ConfigError, on all ranks alike, where the section asks for two halves a step that these ranks, their device, or
    their numbers of micro-batches do not have. Collective where it asks for any."""
    if not settings.enabled or settings.acco is None:
        return
    got = f"{_KEY}: got {json.dumps(vars(settings.acco))}"
    if accelerator.device_name() != "cpu":
        raise ConfigError(
            f"{got} on {accelerator.device_name()}; its copies of the weights work on the CPU alone so far; remove it"
        )
    ranks.start_distributed()
    num_ranks = ranks.world_size()
    if num_ranks == 1:
        raise ConfigError(f"{got} with one rank, whose gradients travel to nobody; remove it")
    if settings.levels.ranks_per_node == num_ranks:
        raise ConfigError(
            f"{PAIR_KEY}: got {num_ranks} with {_KEY} on {num_ranks} ranks, all of which then share a copy: nothing would"
            ' be sent ahead; write fewer, or remove it and write "copies": "rank"'
        )
    count = num_micro_batches(config, num_ranks)
    fault = odd_fault(count, f" (train_batch_size over {num_ranks} ranks)") if settings.elastic is None else None
    if fault is not None:
        raise ConfigError(fault)
    if not settings.levels.are_on:
        topology_for(LevelSettings())
