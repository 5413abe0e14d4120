"""Writes a run's log, `account.jsonl`: the facts of one vertical engine, and after each step the schedule that it ran."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ds_vertical.compat import accelerator, zero_params
from ds_vertical.distributed import ranks
from ds_vertical.planner.network import Network
from ds_vertical.planner.run_record import AccountWriter, ExecutedStep, RunInfo, Share
from ds_vertical.types import LevelSettings, Tier

_BLOCK_SCALE_BYTES = 4


class Follower:
    """What each step of one engine ran; made before or right after its first step, and asked after every step."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._num_steps = 0
        self._due: Share = "delayed"

    def step(self) -> ExecutedStep:
        """The step that has just ended."""
        self._num_steps += 1
        ran = ExecutedStep(self._num_steps, self._engine.ran, self._due, kept=self._engine.kept)
        self._due = self._engine.optimizer.driver.backlog.share  # of what this step has left to the next one
        return ran


class RunLogger:
    """Keeps the account of one engine in `folder`; made before its first recorded step."""

    def __init__(self, engine: Any, folder: Path, tokens: int) -> None:
        self._follower = Follower(engine)
        self._writer = AccountWriter(folder, facts_of(engine, tokens))

    def step(self, gauge_s: float | None = None) -> None:
        """Note the step that has just ended, and how fast the host is behind it."""
        ran = self._follower.step()
        self._writer.step(ran.schedule, ran.due, gauge_s, ran.kept)


def facts_of(engine: Any, tokens: int) -> RunInfo:
    """`tokens` of one micro-batch."""
    optimizer, units = engine.optimizer, engine.layers.units
    chunks = {unit: [optimizer.stepper.chunks[index] for index in optimizer.scheduled_chunks_of(unit)] for unit in units}
    params = [param for members in units.values() for param in members]
    elements = {unit: sum(zero_params.full_numel(param) for param in members) for unit, members in units.items()}
    on_ssd = sum(chunk.numel for chunk in optimizer.stepper.chunks if chunk.files)
    parts = [part for members in chunks.values() for chunk in members for part in (*chunk.early, *chunk.delayed)]
    world, num_bytes = ranks.world_size(), sum(map(zero_params.shard_bytes, params))
    return RunInfo(
        elements=elements,
        early_elements={unit: sum(chunk.boundary for chunk in members) for unit, members in chunks.items()},
        delayed_elements={unit: sum(c.numel - c.boundary for c in members) for unit, members in chunks.items()},
        blocks_per_layer=engine.vertical.blocks_per_layer,
        param_bytes=params[0].element_size(),
        gradient_bytes=optimizer.gradient_accumulation_dtype.itemsize,
        dtype=str(params[0].dtype).removeprefix("torch."),
        num_shards=world,
        generations=optimizer.timing.generations,
        slots=len(optimizer.slots),
        part_elements=max((part.numel for part in parts), default=0),
        parameters_on_ssd=sum(map(zero_params.shard_bytes, filter(zero_params.is_on_ssd, params))) / (num_bytes or 1),
        state_on_ssd=min(1.0, on_ssd * world / (sum(elements.values()) or 1)),
        one_memory=accelerator.device_name() == "cpu",
        host_bytes=engine.host_bytes,
        sequences=engine.train_micro_batch_size_per_gpu(),
        tokens=tokens,
        threads=torch.get_num_threads(),
        model=model_config(engine.module),
        overlap=engine.vertical.overlap,
        gradients_on_ssd=optimizer.gradients_on_ssd,
        activations_on_host=engine.vertical.activations.shares[Tier.HOST],
        activations_on_ssd=engine.vertical.activations.shares[Tier.SSD],
        apart=engine.layers.outside.apart,
        file_elements={unit: sum(chunk.numel for chunk in members if chunk.files) for unit, members in chunks.items()},
        ahead=len(optimizer.further_slots),
        compressed=engine.vertical.optimizer_compression,
        network=engine.network,
    )


def network_of(
    settings: LevelSettings, hosts: Sequence[str], in_memory: bool = False, sums_in_memory: bool = False
) -> Network | None:
    """How the ranks lie on hosts, and what their collectives have of levels. `hosts`: each rank's, see `host_id`. `in_memory`,
    `sums_in_memory`: whether ranks of a host share memory for copies, and for terms of sums. None for one rank, and for hosts
    that have unequal numbers of ranks, of which `Network` knows nothing."""
    per_host = set(Counter(hosts).values())
    if len(hosts) == 1 or len(per_host) > 1:
        return None
    num_hosts, ranks_per_host = len({*hosts}), per_host.pop()
    scale = _BLOCK_SCALE_BYTES / settings.block
    sums = [None if bits is None or not settings.quantized_gradients else bits / 8 + scale for bits in settings.gradient_bits]
    return Network(
        num_nodes=num_hosts,
        ranks_per_node=ranks_per_host,
        levels=settings.are_on,
        copy_share=1.0 if settings.share is None else settings.share,
        reduces_twice=accelerator.device_name() == "cpu",
        weight_bytes=1 + scale if settings.quantized_weights else None,
        gradient_bytes=(sums[0], sums[1]),
        copy_ranks=settings.ranks_per_node if settings.are_on else None,
        sum_ranks=settings.sum_ranks(num_hosts, ranks_per_host) if settings.are_on else None,
        stands=settings.copy_on_device,
        in_memory=in_memory,
        sums_in_memory=sums_in_memory,
    )


def model_config(module: torch.nn.Module) -> dict[str, Any] | None:
    """The Hugging Face configuration, None where the model has none."""
    config: Any = getattr(module, "config", None)
    return json.loads(config.to_json_string()) if hasattr(config, "to_json_string") else None
