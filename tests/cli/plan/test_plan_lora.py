"""Plans of a model whose adapters alone are trained: the same memory as the run's own forecast finds, by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import base_config, start_process_group
from planned_runs import CPU, limits
from torch import nn

from ds_vertical.cli.plan.deepspeed_json import TrainingOptions, write_config
from ds_vertical.cli.plan.fake_run import Lora, read_spec
from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import load_section
from ds_vertical.distributed import ranks as distributed_ranks
from ds_vertical.engine.memory_check import Forecast, groups_of
from ds_vertical.errors import ConfigError
from ds_vertical.model.layers import map_layers
from ds_vertical.planner import memory_budget, search
from ds_vertical.planner.budget.zero_init import build_bytes
from ds_vertical.planner.candidate import with_state_in_memory
from ds_vertical.planner.model_shape import Division, estimated, shape_of
from ds_vertical.planner.search import Task, choose
from ds_vertical.types import REDUCED_TOGETHER, Placement

GIB = 1 << 30
LAYERS, HIDDEN, INNER, VOCAB, LENGTH = 32, 4096, 11008, 32000, 64
MATRICES = 4 * HIDDEN**2 + 3 * HIDDEN * INNER
PRE = 2 * VOCAB * HIDDEN
LLAMA_7B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
SMALL = LLAMA_7B | {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
SMALL |= {"num_key_value_heads": 16, "vocab_size": 4000}


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "targets"), [(8, ()), (64, ("q_proj", "k_proj", "v_proj", "o_proj"))])
def test_a_7b_models_adapters_alone_have_state_gradients_and_writes(rank: int, targets: tuple[str, ...]) -> None:
    spec = read_spec("llama_7b", LLAMA_7B, LENGTH, "bf16", Lora(rank, targets))
    adapters = 2 * rank * HIDDEN * (len(targets) or 2)  # of a block; PEFT's own targets are q_proj and v_proj
    assert spec.trained == (0, *[adapters] * LAYERS) and spec.trained_elements == LAYERS * adapters
    assert spec.num_elements == PRE + HIDDEN + LAYERS * (MATRICES + 2 * HIDDEN + adapters)
    shape = shape_of(spec, estimated(spec, 1, 1e12), Division(1, placement=Placement.of(state_on_ssd=0.0)))
    terms = memory_budget.BudgetTerms(16, 1, one_memory=True)
    items = {item.what: item.num_bytes for item in memory_budget.budget(shape, terms)}
    assert items["optimizer state at rest"] == 12 * LAYERS * adapters  # 50 MB and 800 MB; 84 GB for the whole model
    assert items["gradients"] == 4 * LAYERS * adapters
    layer = MATRICES + 2 * HIDDEN + adapters
    buffers = 2 * (memory_budget.layer_buffers(1, LAYERS) * layer + PRE + HIDDEN)
    assert items["parameter buffers"] == buffers
    assert shape.working_bytes < 2 * adapters + 2 * VOCAB * HIDDEN + GIB
    assert sum(items.values()) < 4 * GIB


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_a_share_of_the_adapters_state_is_what_a_run_has_in_host_memory(tmp_path: Path, share: float) -> None:
    """Frozen matrices of a block are larger than all of its adapters; how a run shares those says nothing of these."""
    spec = read_spec("llama", SMALL, LENGTH, "bf16", Lora(512))
    shape = shape_of(spec, estimated(spec, 1, 1e12), Division(1))
    shape = memory_budget.as_run(with_state_in_memory(shape, share), spec, one_memory=True, least_file_bytes=1 << 20)
    terms = memory_budget.BudgetTerms(16, 1, one_memory=True, shares_state=True)
    planned = {item.what: item.num_bytes for item in memory_budget.budget(shape, terms)}
    start_process_group()
    config = base_config(tmp_path, num_micro_batches=16, sub_group_size=8_000_000, section={"optimizer_host_share": share})
    section = load_section(config)
    assert section is not None
    model = adapted_llama()
    forecast = Forecast(map_layers(model), groups_of(model, None, None), config, resolve(section, 0))
    run = {item.what: item.num_bytes for item in memory_budget.budget(forecast.shape, forecast.terms)}
    state = 12 * spec.trained_elements
    assert state == 12 * forecast.shape.stepped_elements
    assert run.get("optimizer state at rest", 0) <= planned.get("optimizer state at rest", 0) + 4096
    spare = state / 8 if share == 0.9 else 0  # of four adapters of a layer, what may be too small for a file beside the others
    assert planned.get("optimizer state at rest", 0) <= min(share * state + spare, state) + 4096
    assert run["gradients"] == planned["gradients"] == 4 * spec.trained_elements


def adapted_llama() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SMALL)).to(torch.bfloat16)
        return get_peft_model(model, LoraConfig(r=512, target_modules=["q_proj", "v_proj"]), autocast_adapter_dtype=False)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_reduction_copies_what_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """As many bytes as a run finds, though a frozen embedding is far larger than any adapter."""
    spec = read_spec("llama", SMALL | {"vocab_size": 20_000}, LENGTH, "bf16", Lora(512))
    assert memory_budget.largest_trained(spec) == 512 * 1024 < spec.largest_parameter == 20_000 * 1024
    shape = shape_of(spec, estimated(spec, 1, 1e12), Division(1, num_shards=num_ranks))
    start_process_group()
    monkeypatch.setattr(distributed_ranks, "world_size", lambda: num_ranks)
    config = base_config(tmp_path, num_micro_batches=16)
    section = load_section(config)
    assert section is not None
    model = adapted_llama()
    forecast = Forecast(map_layers(model), groups_of(model, None, None), config, resolve(section, 0))
    found = memory_budget.as_run(shape, spec, one_memory=True, least_file_bytes=1 << 20).reduce_bytes
    assert found == forecast.shape.reduce_bytes == (num_ranks > 1) * 4 * REDUCED_TOGETHER


def test_a_plan_for_adapters_has_as_many_buffers_as_memory_holds(tmp_path: Path) -> None:
    """There is no state whose set-up takes more. None is refused for want of eight."""
    spec = read_spec("llama", SMALL | {"vocab_size": 64_000, "num_hidden_layers": 40}, LENGTH, "bf16", Lora(8))
    task = Task(spec, 2 * LENGTH, lambda size: estimated(spec, size, 1e11), micro_batch_size=1, keep=False)
    limit = search._LIBRARIES.num_bytes + 900e6
    found = choose(task, CPU, limits(limit)).chosen
    config = write_config(found, spec, TrainingOptions(1.0, (str(tmp_path),), locked=False))
    count = config["zero_optimization"]["offload_param"]["buffer_count"]
    taken = partial(build_bytes, found.shape, spec.largest_parameter, found.case.further)
    assert 2 < count < 8 and taken(True, count) <= limit < taken(True, count + 1)
    assert taken(True, count) - taken(False, count) == 2 * spec.largest_parameter  # beside a device it is made there
    norms = [item.num_bytes for item in found.items if item.what == "fp64 copy for a norm"]
    assert norms == [8 * memory_budget.largest_trained(spec)] == [8 * 8 * 1024]


@pytest.mark.slow
def test_a_backward_has_no_products_for_frozen_weights() -> None:
    whole = estimated(read_spec("llama_7b", LLAMA_7B, LENGTH, "bf16"), 1, 1e12)
    adapted = estimated(read_spec("llama_7b", LLAMA_7B, LENGTH, "bf16", Lora(8)), 1, 1e12)
    assert whole.block_backward == pytest.approx(2 * whole.block_forward)
    assert adapted.block_forward == pytest.approx(whole.block_forward, rel=0.01)
    assert adapted.block_backward == pytest.approx(adapted.block_forward, rel=0.02)
    assert adapted.head == pytest.approx(whole.head * 2 / 3, rel=0.02) and adapted.pre_backward == 0


@pytest.mark.parametrize(
    ("targets", "words"), [(("nope",), r"--lora 8: tiny: Target modules .*--lora-targets, e\.g\. q_proj,v_proj")]
)
def test_names_that_the_model_lacks_are_refused(targets: tuple[str, ...], words: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
    with pytest.raises(ConfigError, match=words):
        read_spec("tiny", LLAMA_7B | sizes, 16, "bf16", Lora(8, targets))
