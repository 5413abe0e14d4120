"""Every file under configs/: DeepSpeed accepts it, our section is valid, models have the size that their name says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from places import ROOT
from transformers import AutoConfig, AutoModelForCausalLM

from ds_vertical.cli.bench.arms import build_arms
from ds_vertical.config.cross_check import check
from ds_vertical.config.section import load_section

CONFIGS = ROOT / "configs"
TRAINING = sorted(CONFIGS.glob("*.json"))
MODELS = sorted((CONFIGS / "models").glob("*.json"))
UNITS = {"m": 10**6, "b": 10**9}
# What each training configuration is made for; file names say it but for the stock arms of gpt_101m_cpu.
MODEL_OF = {
    "gpt_13m_cpu": "gpt_13m",
    "gpt_101m_cpu": "gpt_101m",
    "stock_best": "gpt_101m",
    "stock_pipelined": "gpt_101m",
    "llama_3_8b_gpu": "llama_3_8b",
    "gpt_65b_gpu": "gpt_65b",
    "gpt_175b_gpu": "gpt_175b",
}

PLANNED = {"gpt_13b", "gpt_20b"}  # shapes without a training configuration: for `ds-vertical plan` alone


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def meta_model(name: str) -> torch.nn.Module:
    """The model of this name without memory behind it."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIGS / "models" / f"{name}.json"))


def test_the_files_are_those_that_are_documented() -> None:
    assert {path.stem for path in TRAINING} == set(MODEL_OF)
    assert {path.stem for path in MODELS} == set(MODEL_OF.values()) | PLANNED


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_deepspeed_and_the_section_accept_it(path: Path) -> None:
    config = load(path)
    DeepSpeedConfig(dict(config))
    section = load_section(config)
    assert section is not None
    assert check(config, section) == []


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_nothing_that_matters_is_left_to_a_default(path: Path) -> None:
    config = load(path)
    zero = config["zero_optimization"]
    assert zero["stage"] == 3
    assert config["gradient_clipping"] == 1.0
    assert config["data_types"]["grad_accum_dtype"] == "fp32"
    assert config["optimizer"]["type"] in ("Adam", "AdamW")
    assert "aio" in config and "stage3_param_persistence_threshold" in zero and "enabled" in config["bf16"]
    assert zero["offload_param"] | {"device": "nvme", "max_in_cpu": 0} == zero["offload_param"]
    assert zero["offload_optimizer"]["device"] == "nvme"
    assert zero["offload_param"]["nvme_path"] == zero["offload_optimizer"]["nvme_path"] == "/tmp/ds_vertical"


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_buffers_hold_the_largest_parameter_of_its_model(path: Path) -> None:
    """zero.Init asserts this for every parameter that it swaps; it is the first thing to break when a shape grows."""
    config = load(path)
    largest = max(parameter.numel() for parameter in meta_model(MODEL_OF[path.stem]).parameters())
    assert config["zero_optimization"]["offload_param"]["buffer_size"] >= largest
    assert config["zero_optimization"]["reduce_bucket_size"] >= largest


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_model_has_the_parameters_that_its_name_says(path: Path) -> None:
    match = re.search(r"_(\d+)([mb])$", path.stem)
    assert match is not None
    size = int(match[1]) * UNITS[match[2]]
    model = meta_model(path.stem)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(size, rel=0.01)
    config = AutoConfig.from_pretrained(path)
    assert config.tie_word_embeddings is False
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_folder_with_the_file_as_config_json_loads_too(path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(path.read_text())
    folder, file = (AutoConfig.from_pretrained(where).to_dict() for where in (tmp_path, path))
    assert folder | {"_name_or_path": file["_name_or_path"]} == file


def test_small_models_have_no_dropout_and_their_matrices_go_to_ssd() -> None:
    bytes_per_element = {"gpt_13m_cpu": 4, "gpt_101m_cpu": 2}
    for name, width in bytes_per_element.items():
        assert load(CONFIGS / f"{name}.json")["bf16"]["enabled"] is (width == 2)
        model = meta_model(MODEL_OF[name])
        assert all(module.p == 0.0 for module in model.modules() if isinstance(module, torch.nn.Dropout))
        block = model.get_submodule("gpt_neox.layers.0")
        matrices = [parameter for parameter in block.parameters() if parameter.dim() == 2]
        assert len(matrices) == 4
        assert all(matrix.numel() * width >= 1 << 20 for matrix in matrices)


def test_stock_best_is_a_stock_arm_of_gpt_101m() -> None:
    arms = build_arms(CONFIGS / "gpt_101m_cpu.json", CONFIGS / "stock_best.json", [])
    zero = arms.stock["zero_optimization"]
    assert zero["offload_optimizer"]["pipeline_read"] and zero["offload_optimizer"]["pipeline_write"]
    assert zero["offload_optimizer"]["buffer_count"] >= 12
