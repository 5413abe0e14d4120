"""A small model's plan and the memory budget of the run that the plan's JSON makes, side by side, without training anything."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from harness import start_process_group
from torch import nn

from ds_vertical.cli.plan.deepspeed_json import TrainingOptions, write_config
from ds_vertical.cli.plan.fake_run import read_spec
from ds_vertical.config.cross_check import check
from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import load_section
from ds_vertical.engine import memory_check
from ds_vertical.engine.budget.kernel_copies import sums_in_fp32
from ds_vertical.model.hf import build_model
from ds_vertical.model.layers import map_layers
from ds_vertical.planner import linear_program, machine, memory_budget, search
from ds_vertical.planner.candidate import Candidate, fits
from ds_vertical.planner.model_shape import ModelSpec, estimated
from ds_vertical.planner.search import Task
from ds_vertical.types import Tier, TierBytes

LENGTH = 32  # tokens of a sequence
BASELINE = search._LIBRARIES.num_bytes - memory_budget.LATER_BYTES  # of the process, as plans assume it
_GPU = machine.read_profile("a100_server").machine
CPU = replace(_GPU, one_memory=True, copy_in_bytes_per_s=None, copy_out_bytes_per_s=None)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _neox(width: int, layers: int, words: int, *, tied: bool = False) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 64}
    return {"model_type": "gpt_neox", "num_hidden_layers": layers, "vocab_size": words, "tie_word_embeddings": tied, **sizes}


def _llama(width: int, layers: int, words: int, *, tied: bool = False) -> dict[str, Any]:
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, **heads}
    return {"model_type": "llama", "num_hidden_layers": layers, "vocab_size": words, "tie_word_embeddings": tied, **sizes}


MODELS = {
    "gpt": _neox(512, 4, 8000),
    "gpt, tied": _neox(1024, 3, 20_011, tied=True),
    "llama, wide vocabulary": _llama(512, 3, 64_000, tied=True),
    "llama, many layers": _llama(256, 14, 4000),
    "llama, small layers": _llama(128, 6, 3001),
    "gpt, one layer above a sub-group": _neox(1280, 2, 5000),
}


@cache
def spec_of(name: str, dtype: str) -> ModelSpec:
    spec = read_spec(name, fields_of(name), LENGTH, dtype)
    return replace(spec, sums_in_fp32=not spec.made_by_products or sums_in_fp32(_DTYPES[dtype]))  # of this machine


@cache
def _model(name: str, dtype: str) -> nn.Module:
    with torch.device("meta"):
        return build_model(name, fields_of(name), lambda config: None, dtype=_DTYPES[dtype])


def fields_of(name: str) -> dict[str, Any]:
    return {**MODELS[name], "max_position_embeddings": 2 * LENGTH}


@dataclass(frozen=True)
class Setting:
    """What the search varies of one plan, and what it is given."""

    name: str
    dtype: str
    clip: float
    num_micro_batches: int
    blocks_per_layer: int = 1
    window: int = 1
    delay: float = 1.0
    state_on_ssd: float = 1.0
    num_ranks: int = 1  # of one host, each with the bytes that are given
    process_bytes: int | None = None  # that `ds-vertical limits` has measured

    @property
    def baseline(self) -> int:
        """What the run's process holds beside its model."""
        return BASELINE if self.process_bytes is None else self.process_bytes

    @property
    def spec(self) -> ModelSpec:
        return spec_of(self.name, self.dtype)

    @property
    def task(self) -> Task:
        spec = self.spec
        tokens = LENGTH * self.num_micro_batches * self.num_ranks
        options = {"clip": self.clip, "micro_batch_size": 1, "keep": False, "num_ranks": self.num_ranks}
        return Task(spec, tokens, lambda size: estimated(spec, size, 1e11), **options)

    def search(self, host_bytes: float) -> search._Search:
        norm = memory_budget.norm_copy(self.spec.largest_parameter, True)
        libraries = memory_budget.libraries(self.process_bytes)
        return search._Search(self.task, CPU, limits(host_bytes), (libraries, norm), window=self.window)

    def candidate(self, host_bytes: float) -> Candidate | None:
        """What the search would make of the setting; None where it finds no room."""
        timing = search._Timing(self.state_on_ssd, self.delay, self.delay < 1)
        sizes = search._Sizes(1, self.num_micro_batches, self.blocks_per_layer)
        case = self.search(host_bytes)._case(sizes, timing, self.task.seconds(1))
        solution = linear_program.solve(case)
        if solution is None:
            return None
        found = search._candidate(case, 1, self.blocks_per_layer, solution, window=self.window)
        return found if fits(found) else None

    def config(self, candidate: Candidate, host_bytes: float) -> dict[str, Any]:
        config = write_config(candidate, self.spec, TrainingOptions(self.clip, ("/ssd",), locked=False))
        config["vertical_schedule"]["host_memory_bytes"] = int(host_bytes)
        return config

    def forecast(self, config: dict[str, Any]) -> memory_check.Forecast:
        return forecast_of(self.name, self.dtype, config)


def limits(host_bytes: float) -> TierBytes:
    return {Tier.DEVICE: None, Tier.HOST: host_bytes, Tier.SSD: 1e12}


def forecast_of(name: str, dtype: str, config: dict[str, Any]) -> memory_check.Forecast:
    """What `initialize` reckons with for the model and this JSON."""
    start_process_group()
    section = load_section(config)
    assert section is not None
    check(config, section)
    resolved, model = resolve(section, 0), _model(name, dtype)
    layers = map_layers(model, None, resolved.blocks_per_layer, apart=resolved.outside_layers == "fetched")
    return memory_check.Forecast(layers, memory_check.groups_of(model, None, None), config, resolved)


def planned_bytes(candidate: Candidate) -> dict[str, int]:
    return _by_name(candidate.items)


def run_bytes(forecast: memory_check.Forecast, baseline: int = BASELINE) -> dict[str, int]:
    items = memory_budget.budget(forecast.shape, forecast.terms, forecast.further(baseline))
    return _by_name(memory_budget.with_setup(items, baseline + forecast.setup_bytes))


def _by_name(items: tuple[memory_budget.BudgetItem, ...]) -> dict[str, int]:
    return {item.what: item.num_bytes for item in items if item.tier is Tier.HOST}
