"""Small models of every kind in the real engine against real stock: losses, gradients, weights and optimizer state bit for bit.

Everything rests in host memory, which moves no bits; `test_families.py` has families whose layers are on SSD, and
`test_sweep.py` every type that transformers can make small.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SLOW_MEMBERS
from families import FAMILIES
from harness import assert_identical, base_config, run_both
from small import VARIANTS, small_config, small_model
from small_inputs import Attempt, batch, loss_of
from torch import nn
from transformers import Gemma4ForConditionalGeneration, Gemma4TextConfig

NUM_STEPS = 2
NUM_MICRO_BATCHES = 2

# kind: model types; how `small` makes those that are no plain text model: (variant, what micro-batches hold)
KINDS: dict[str, tuple[str, ...]] = {
    "causal": (
        *("openai-gpt", "gpt_neo", "codegen", "biogpt", "stablelm", "starcoder2", "cohere", "olmo", "persimmon", "arcee"),
        *("granite", "mpt", "xglm", "ctrl", "xlnet", "inkling_text", "gemma3n_text", "nemotron", "ministral"),
    ),
    "mixture of experts": ("olmoe", "phimoe", "granitemoe", "qwen2_moe", "ernie4_5_moe", "deepseek_v2", "dbrx", "kimi_linear"),
    "recurrent": (
        *("mamba", "rwkv", "falcon_mamba", "recurrent_gemma", "jamba", "mamba2", "bamba", "zamba2", "granitemoehybrid"),
        "nemotron_h",
    ),
    "masked": (
        *("albert", "bert", "roberta", "electra", "distilbert", "xlm", "flaubert", "funnel", "fnet", "mpnet", "deberta-v2"),
        *("rembert", "modernbert", "big_bird", "ibert", "esm", "mobilebert"),
    ),
    "encoder-decoder": ("pegasus", "mbart", "m2m_100", "blenderbot", "marian", "t5gemma"),
    "vision": ("convnext", "hiera", "vit", "swin", "deit", "dinov2", "segformer", "poolformer", "conditional_detr"),
    "audio": ("whisper", "moonshine", "canary", "cohere_asr", "qwen2_audio", "voxtral", "wav2vec2-bert"),
    "vision-language": (
        *("paligemma", "llava", "siglip", "git", "aya_vision", "ovis2", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "llama4"),
        *("mistral3", "gemma4", "idefics3", "mllama", "blip"),
    ),
    "sequence classification": ("deberta-v2", "roberta", "llama", "gpt2"),
    "question answering": ("bert", "distilbert", "electra", "roberta"),
}
HOW: dict[str, tuple[int, Attempt]] = {
    "deepseek_v2": (1, Attempt()),
    "moonshine": (1, Attempt()),
    "swin": (2, Attempt()),
    "mobilebert": (4, Attempt()),
    "wav2vec2-bert": (0, Attempt(turned=True)),
    "qwen2_audio": (0, Attempt(sound_tokens=64)),
    "voxtral": (0, Attempt(sound_tokens=128)),
    "blip": (0, Attempt(everything=True)),
    "idefics3": (0, Attempt(16, video=True)),
    **dict.fromkeys(("paligemma", "llava", "ovis2", "gemma4"), (0, Attempt(16))),
    **dict.fromkeys(("aya_vision", "qwen2_vl", "qwen2_5_vl", "qwen3_5", "llama4", "mistral3"), (0, Attempt(4))),
}
PLAIN = (0, Attempt())
# At least one of each kind stays in the fast suite, here or (the kinds below) in `test_families.py`.
FAST = {
    *(("recurrent", "mamba"), ("masked", "albert"), ("vision", "convnext"), ("audio", "whisper")),
    *(("vision-language", "paligemma"), ("sequence classification", "gpt2"), ("question answering", "distilbert")),
    ("encoder-decoder", "marian"),
}
FAST_ELSEWHERE = {"causal": "llama", "mixture of experts": "mixtral"}
HEADS = ("sequence classification", "question answering")


def build(kind: str, model_type: str) -> nn.Module:
    variant = VARIANTS[HOW.get(model_type, PLAIN)[0]]
    return small_model(model_type, variant, kind if kind in HEADS else None)[1]


def sharing_gemma(num_shared: int) -> nn.Module:
    """Text and images, as the released E2B and E4B have them: the last text layers read the keys and values of those before."""
    config: Any = small_config("gemma4", VARIANTS[0])
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    words = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), config.text_config.vocab_size)
    layers = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 4}
    shared = {"num_kv_shared_layers": num_shared, "hidden_size_per_layer_input": 16, "max_position_embeddings": 64}
    config.text_config = Gemma4TextConfig(**sizes, **words, **layers, **shared)
    torch.manual_seed(0)
    return Gemma4ForConditionalGeneration(config).train()


def steps(model: nn.Module, model_type: str) -> list[list[dict[str, Any]]]:
    attempt = HOW.get(model_type, PLAIN)[1]
    count = NUM_STEPS * NUM_MICRO_BATCHES
    each = [batch(model, index, attempt) for index in range(count)]
    return [each[start : start + NUM_MICRO_BATCHES] for start in range(0, count, NUM_MICRO_BATCHES)]


def own_loss(outputs: Any, _: Any) -> torch.Tensor:
    return loss_of(outputs)


def rows() -> list[Any]:
    return [
        pytest.param(kind, name, id=f"{kind}-{name}", marks=[] if (kind, name) in FAST else pytest.mark.slow)
        for kind, names in KINDS.items()
        for name in names
    ]


@pytest.mark.parametrize(("kind", "model_type"), rows())
def test_a_small_model_of_this_kind_has_the_bits_of_stock(tmp_path: Path, kind: str, model_type: str) -> None:
    options: dict[str, Any] = {"dtype": "fp32", "clip": 0.05, "params": "cpu", "optimizer": "cpu", "weight_decay": 0.1}
    config = base_config(tmp_path, num_micro_batches=NUM_MICRO_BATCHES, **options)
    make: Callable[[], nn.Module] = partial(build, kind, model_type)
    assert_identical(*run_both(config, make, steps(make(), model_type), loss_fn=own_loss, under_zero_init=False))


@pytest.mark.slow
@pytest.mark.parametrize("num_shared", [1, 2])
def test_gemma_4_whose_text_layers_share_keys_and_values(tmp_path: Path, num_shared: int) -> None:
    options: dict[str, Any] = {"dtype": "fp32", "clip": 0.05, "params": "cpu", "optimizer": "cpu", "weight_decay": 0.1}
    config = base_config(tmp_path, num_micro_batches=NUM_MICRO_BATCHES, **options)
    make = partial(sharing_gemma, num_shared)
    assert_identical(*run_both(config, make, steps(make(), "gemma4"), loss_fn=own_loss, under_zero_init=False))


def test_the_suite_holds_sixty_families_of_eight_kinds_and_a_fast_row_of_each() -> None:
    """With the families whose layers are on SSD (`test_families.py`). Sixty are in the slow suite, ten in the fast one."""
    elsewhere = {family.name for family in FAMILIES}
    assert len({name for names in KINDS.values() for name in names} | elsewhere) >= 60
    assert len(KINDS) >= 8
    assert {kind for kind, _ in FAST} | FAST_ELSEWHERE.keys() == set(KINDS)
    assert all(name in KINDS[kind] for kind, name in FAST)
    assert elsewhere.issuperset(FAST_ELSEWHERE.values())
    here, there = "test_kinds.py::test_a_small_model_of_this_kind", "test_families.py::test_family_is_bit_identical_to_stock"
    slow = {name for name in SLOW_MEMBERS if name.startswith((here, there))}
    assert not any(f"[{kind}-{name}]" in each for kind, name in FAST for each in slow)
    assert not {f"{there}[{name}]" for name in FAST_ELSEWHERE.values()} & slow
