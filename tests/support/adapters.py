"""A small Llama with LoRA adapters, as PEFT makes one: its base is frozen, and lies on SSD where the JSON says so."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from harness import base_config, small_buffers
from torch import nn

_IDS = torch.randint(0, 256, (8, 2, 1, 6), generator=torch.Generator().manual_seed(0))
BATCHES = [[{"input_ids": ids, "labels": ids} for ids in step] for step in _IDS]


def llama(width: int = 768, **settings: Any) -> nn.Module:
    """Two layers whose square matrices have more than 1 MiB in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    given: dict[str, Any] = dict(hidden_size=width, intermediate_size=width, num_hidden_layers=2, num_attention_heads=4)
    given |= {"vocab_size": 256, "max_position_embeddings": 64, "use_cache": False} | settings
    return LlamaForCausalLM(LlamaConfig(**given))


def lora(rank: int = 128, **settings: Any) -> nn.Module:
    """A layer's adapters of rank 128 have enough state to lie on SSD."""
    torch.manual_seed(0)  # the base that a script would load
    return adapted(llama(**settings), rank)


def adapted(base: nn.Module, rank: int) -> nn.Module:
    """The base, frozen, with adapters."""
    from peft import LoraConfig, get_peft_model

    made: Any = base
    return get_peft_model(made, LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


def lora_config(folder: Path, **options: Any) -> dict[str, Any]:
    """For `lora`: bf16, two micro-batches; `options` as those of `base_config`."""
    section = {"seed": 7} | options.pop("section", {})
    config = base_config(folder, num_micro_batches=2, section=section, **options)
    return config if options.get("params") == "cpu" else small_buffers(config, 700_000)


def train(engine: Any, steps: range) -> list[float]:
    """Losses of the steps."""
    return [engine.train_batch(iter(copy.deepcopy(BATCHES[step]))).item() for step in steps]
