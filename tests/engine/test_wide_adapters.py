"""PEFT makes adapters in fp32 over a base in bf16: small ones train as under stock, and those that would go to SSD, where
DeepSpeed's files have one dtype, are refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import BATCHES, llama
from harness import base_config, differing, dispose, read_weights, small_buffers, start_process_group
from torch import nn

import ds_vertical
from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import load_section
from ds_vertical.engine.memory_check import Forecast, groups_of
from ds_vertical.errors import ConfigError
from ds_vertical.model.layers import map_layers
from ds_vertical.planner.memory_budget import INIT_BUFFERS

WIDTH, BUFFER = 768, 700_416  # elements; of a buffer what is written, in whole blocks


def config_of(folder: Path, vertical: bool, tier: str) -> dict[str, Any]:
    config = base_config(folder, num_micro_batches=2, section={"seed": 7}, params=tier, optimizer=tier)
    config["vertical_schedule"]["enabled"] = vertical
    return small_buffers(config, 700_000) if tier == "nvme" else config


def adapted(prepared: dict[str, Any], rank: int, **options: Any) -> nn.Module:
    """As scripts make it: the base under zero.Init, its adapters after that."""
    import deepspeed
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=prepared):
        base = llama()
    return get_peft_model(base, LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]), **options)


def trained(folder: Path, vertical: bool, tier: str, rank: int, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    start_process_group()
    prepared = ds_vertical.prepare(config_of(folder, vertical, tier))
    model = adapted(prepared, rank, **options)
    model.train()
    parameters = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = ds_vertical.initialize(model=model, model_parameters=parameters, config=prepared)
    try:
        losses = [engine.train_batch(iter(copy.deepcopy(BATCHES[step]))).item() for step in range(3)]
        return losses, read_weights(model)
    finally:
        dispose(engine)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [8, 400])
def test_fp32_adapters_that_rest_in_memory_have_stocks_bits(tmp_path: Path, rank: int) -> None:
    """Of 400: more than 1 MiB in fp32, and less in the dtype of DeepSpeed's files, which decides."""
    stock = trained(tmp_path / "stock", False, "cpu", rank)
    ours = trained(tmp_path / "ours", True, "nvme", rank)
    assert any(weight.dtype is torch.float32 for weight in ours[1].values())
    assert stock[0] == ours[0] and not differing(stock[1], ours[1])


@pytest.mark.parametrize(("where", "times"), [("base", 0), ("nothing", 1)])
def test_buffers_are_locked_at_initialize_where_nothing_was_built_under_zero_init(
    tmp_path: Path, where: str, times: int
) -> None:
    """Adapters that PEFT puts outside go through the buffers of the base, whose pages have been given back."""
    import deepspeed
    from peft import LoraConfig, get_peft_model

    start_process_group()
    prepared = ds_vertical.prepare(config_of(tmp_path, True, "nvme"))
    section = load_section(prepared)
    assert section is not None
    with deepspeed.zero.Init(config_dict_or_path=prepared, enabled=where != "nothing"):
        base = llama()
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    forecast = Forecast(map_layers(model), groups_of(model, None, None), prepared, resolve(section, 0))
    few, many = (forecast.changed(INIT_BUFFERS, count).setup_bytes for count in (100, 1100))
    assert few > 0 and many - few == times * 1000 * 2 * BUFFER


def test_fp32_adapters_that_would_go_to_ssd_are_refused(tmp_path: Path) -> None:
    start_process_group()
    prepared = ds_vertical.prepare(config_of(tmp_path, True, "nvme"))
    rank = -(-(1 << 19) // WIDTH)  # 524,544 elements: 1 MiB in bf16
    message = (
        rf"q_proj\.lora_A\.default\.weight: got torch\.float32, {rank * WIDTH} elements a rank.*autocast_adapter_dtype=False"
    )
    with pytest.raises(ConfigError, match=message):
        ds_vertical.initialize(model=adapted(prepared, rank), config=prepared)
    forecast_of(prepared, adapted(prepared, rank - 1))  # a smaller one is not refused


def forecast_of(prepared: dict[str, Any], model: nn.Module) -> Forecast:
    from ds_vertical.engine.api import refuse_wide

    refuse_wide(model, prepared)
    section = load_section(prepared)
    assert section is not None
    return Forecast(map_layers(model), groups_of(model, None, None), prepared, resolve(section, 0))


@pytest.mark.slow
def test_bf16_adapters_of_that_size_train_on_ssd(tmp_path: Path) -> None:
    rank = -(-(1 << 19) // WIDTH)
    stock = trained(tmp_path / "stock", False, "cpu", rank, autocast_adapter_dtype=False)
    ours = trained(tmp_path / "ours", True, "nvme", rank, autocast_adapter_dtype=False)
    assert stock[0] == ours[0] and not differing(stock[1], ours[1])


def test_the_budget_counts_four_bytes_of_each_fp32_element(tmp_path: Path) -> None:
    start_process_group()
    prepared = ds_vertical.prepare(config_of(tmp_path, True, "nvme"))
    model = adapted(prepared, 8)
    wide = sum(param.numel() for param in model.parameters() if param.dtype is torch.float32)
    assert wide == 2 * 2 * 2 * 8 * WIDTH
    items = {item.what: item.num_bytes for item in forecast_of(prepared, model).further(0)}
    assert items["parameters that stay fp32"] == 2 * wide  # beside the two that every parameter has
