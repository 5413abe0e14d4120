"""What is not trained takes no optimizer state, no gradients and no writes: the memory and disk of a 7B model with LoRA
adapters, by hand. The model lies on the meta device, so nothing of it is allocated."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import base_config, start_process_group
from torch import nn

from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import load_section
from ds_vertical.distributed import ranks as distributed_ranks
from ds_vertical.engine import disk_check
from ds_vertical.engine.memory_check import Forecast, check_memory, groups_of
from ds_vertical.errors import MemoryBudgetError
from ds_vertical.io import files, host
from ds_vertical.model.layers import map_layers
from ds_vertical.offload.grad_accumulator import LARGE
from ds_vertical.planner import memory_budget
from ds_vertical.planner.closed_forms import vertical_traffic

GIB, MIB = 1 << 30, 1 << 20
LAYERS, HIDDEN, INNER, VOCAB = 32, 4096, 11008, 32000
LAYER = 4 * HIDDEN**2 + 3 * HIDDEN * INNER  # matrices; norms beside them are in memory
PRE = 2 * VOCAB * HIDDEN


@cache
def llama_7b(rank: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        vocab_size=VOCAB,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        return get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]), autocast_adapter_dtype=False)


def forecast_in(folder: Path, rank: int, clip: float = 1.0) -> tuple[Forecast, dict[str, Any], Any]:
    start_process_group()
    config = base_config(folder, num_micro_batches=16, clip=clip, sub_group_size=10**9)
    section = load_section(config)
    assert section is not None
    resolved = resolve(section, 0)
    model = llama_7b(rank)
    return Forecast(map_layers(model), groups_of(model, None, None), config, resolved), config, resolved


@pytest.mark.parametrize(("rank", "on_ssd"), [(8, False), (64, True)])
def test_memory_is_that_of_adapters_and_a_few_layers(tmp_path: Path, rank: int, on_ssd: bool) -> None:
    """State under 1 MiB a layer stays in host memory, larger state goes to SSD."""
    forecast, _, _ = forecast_in(tmp_path, rank)
    items = {item.what: item.num_bytes for item in memory_budget.budget(forecast.shape, forecast.terms)}
    adapters = LAYERS * 4 * rank * HIDDEN
    assert forecast.shape.stepped_elements == adapters
    assert items.get("optimizer state at rest", 0) == (0 if on_ssd else 12 * adapters)  # 48 MiB; 84 GB before
    assert items["gradients"] == 4 * adapters
    buffers = 2 * (memory_budget.layer_buffers(1, LAYERS) * LAYER + PRE)
    assert items["parameter buffers"] == pytest.approx(buffers, rel=0.001)  # 2.0 GiB, the files' ends included
    norms = 2 * HIDDEN * (2 * LAYERS + 1)  # in bytes; as small as the adapters, which rest beside them
    assert items["parameters at rest"] == pytest.approx(norms + 2 * adapters, rel=0.001)
    made = adapters // LAYERS if rank * HIDDEN < LARGE else rank * HIDDEN  # large ones are added one by one
    assert items["one layer's backward"] == 2 * (made + 2 * adapters // LAYERS) + 2 * VOCAB * HIDDEN
    slots = 4 * 12 * adapters // LAYERS * 3 // 4 if on_ssd else 0  # a quarter of each layer steps in the next forward
    assert items.get("optimizer slots", 0) == slots
    assert sum(items.values()) < 2.6 * GIB


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_two_halves_a_step_predict_and_sum_the_adapters_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """Beside two copies of the whole base."""
    start_process_group()
    monkeypatch.setattr(distributed_ranks, "world_size", lambda: num_ranks)
    config = base_config(tmp_path, num_micro_batches=16, params="cpu", optimizer="cpu", section={"acco": {}})
    section = load_section(config)
    assert section is not None
    model = llama_7b(8)
    forecast = Forecast(map_layers(model), groups_of(model, None, None), config, resolve(section, 0))
    items = {item.what: item.num_bytes for item in forecast.further(0)}
    assert forecast.shape.stepped_elements == (adapters := LAYERS * 4 * 8 * HIDDEN)
    assert items["predicted shards"] == 2 * 2 * adapters // num_ranks
    assert items["gradients of half a step"] == 4 * adapters // num_ranks
    assert items["two copies of the weights"] == 2 * 2 * forecast.shape.num_elements


def test_what_is_sent_over_levels_are_the_adapters_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_process_group()
    monkeypatch.setattr(distributed_ranks, "world_size", lambda: 4)
    config = base_config(tmp_path, num_micro_batches=16, params="cpu", optimizer="cpu")
    section = load_section(config)
    assert section is not None
    levels = replace(resolve(section, 0).levels, ranks_per_node=2, copy_share=1.0)
    model = llama_7b(8)
    forecast = Forecast(map_layers(model), groups_of(model, None, None), config, replace(resolve(section, 0), levels=levels))
    items = {item.what: item.num_bytes for item in forecast.further(0)}
    assert items["gradients sent over levels"] == 2 * 4 * 4 * 8 * HIDDEN
    assert items["copies of the weights"] == pytest.approx(2 * LAYERS * LAYER // 2, rel=0.01)


def test_the_check_takes_what_is_enough_and_refuses_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 64 * GIB)
    forecast, _, _ = forecast_in(tmp_path, 8)
    resident = host.resident_bytes()
    lines, needed, _ = check_memory(forecast, [], resident + 3 * GIB)
    assert needed < resident + 3 * GIB and "optimizer state at rest" in "\n".join(lines)
    with pytest.raises(MemoryBudgetError, match=r"most is parameter buffers"):
        check_memory(forecast, [], resident + GIB)


@pytest.mark.parametrize(("rank", "state"), [(8, 0), (64, LAYERS * 12 * 4 * 64 * HIDDEN)])
def test_the_disk_needs_the_adapters_state_alone(
    tmp_path: Path, rank: int, state: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the base's file, which `from_pretrained` has written."""
    forecast, config, resolved = forecast_in(tmp_path, rank, clip=0.0)
    assert forecast.files.state == state and forecast.files.parameters == 0
    assert forecast.files.num_files == LAYERS * 7 + 2 + (3 * LAYERS if state else 0)
    monkeypatch.setattr(files, "free_bytes", lambda path: 2 * state + MIB)  # the base once more would be 13 GB
    disk_check.check_disk(forecast, config, resolved, (1 << 40, 0))


def test_a_step_writes_the_adapters_state_and_reads_the_base_twice(tmp_path: Path) -> None:
    forecast, _, _ = forecast_in(tmp_path, 64)
    moved = vertical_traffic(forecast.shape, 16, kept=0)
    adapters = LAYERS * 4 * 64 * HIDDEN
    assert moved.state_written == moved.state_read == 12 * adapters
    assert moved.parameters_written <= 2 * adapters
    assert moved.parameters_read == pytest.approx(2 * (2 * LAYERS * LAYER + PRE), rel=0.01)
