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
from families import FAMILIES
from harness import assert_identical, base_config, run_both
from small import VARIANTS, small_model
from small_inputs import Attempt, batch, loss_of
from torch import nn

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
}
FAST_ELSEWHERE = {"causal": "llama", "mixture of experts": "mixtral", "encoder-decoder": "t5"}
HEADS = ("sequence classification", "question answering")


def build(kind: str, model_type: str) -> nn.Module:
    variant = VARIANTS[HOW.get(model_type, PLAIN)[0]]
    return small_model(model_type, variant, kind if kind in HEADS else None)[1]


def steps(kind: str, model_type: str) -> list[list[dict[str, Any]]]:
    model = build(kind, model_type)
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
    assert_identical(*run_both(config, make, steps(kind, model_type), loss_fn=own_loss, under_zero_init=False))


def test_the_suite_holds_sixty_families_of_eight_kinds_and_a_fast_row_of_each() -> None:
    """With the families whose layers are on SSD (`test_families.py`)."""
    elsewhere = {family.name for family in FAMILIES}
    assert len({name for names in KINDS.values() for name in names} | elsewhere) >= 60
    assert len(KINDS) >= 8
    assert {kind for kind, _ in FAST} | FAST_ELSEWHERE.keys() == set(KINDS)
    assert all(name in KINDS[kind] for kind, name in FAST)
    assert elsewhere.issuperset(FAST_ELSEWHERE.values())
