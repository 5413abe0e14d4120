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
from harness import assert_identical, base_config, run_both
from small import VARIANTS, batch, loss_of, small_model
from torch import nn

NUM_STEPS = 2
NUM_MICRO_BATCHES = 2

# kind: model types; how `small` makes those that are no plain text model: (variant, tokens of an image, video)
KINDS: dict[str, tuple[str, ...]] = {
    "causal": (
        *("openai-gpt", "gpt_neo", "codegen", "biogpt", "stablelm", "starcoder2", "cohere", "olmo", "persimmon", "arcee"),
        *("granite", "mpt", "xglm", "ctrl", "xlnet", "inkling_text"),
    ),
    "mixture of experts": ("olmoe", "phimoe", "granitemoe", "qwen2_moe", "ernie4_5_moe"),
    "recurrent": ("mamba", "rwkv", "falcon_mamba", "recurrent_gemma", "jamba"),
    "masked": (
        *("albert", "bert", "roberta", "electra", "distilbert", "xlm", "flaubert", "funnel", "fnet", "mpnet", "deberta-v2"),
        *("rembert", "modernbert", "big_bird", "ibert"),
    ),
    "encoder-decoder": ("pegasus", "mbart", "m2m_100", "blenderbot", "marian"),
    "vision": ("convnext", "hiera", "vit", "swin", "deit", "dinov2", "segformer", "poolformer"),
    "audio": ("whisper", "moonshine", "canary", "cohere_asr"),
    "vision-language": ("paligemma", "llava", "siglip", "git", "aya_vision", "ovis2"),
    "sequence classification": ("deberta-v2", "roberta", "llama", "gpt2"),
    "question answering": ("bert", "distilbert", "electra", "roberta"),
}
HOW: dict[str, tuple[int, int, bool]] = {
    "moonshine": (1, 0, False),
    "swin": (2, 0, False),
    "paligemma": (0, 16, False),
    "llava": (0, 16, False),
    "aya_vision": (0, 4, False),
    "ovis2": (0, 16, False),
}
FAST = ("openai-gpt", "albert", "xlm", "funnel", "siglip", "convnext", "whisper", "paligemma")
HEADS = ("sequence classification", "question answering")


def build(kind: str, model_type: str) -> nn.Module:
    variant = VARIANTS[HOW.get(model_type, (0, 0, False))[0]]
    return small_model(model_type, variant, kind if kind in HEADS else None)[1]


def steps(kind: str, model_type: str) -> list[list[dict[str, Any]]]:
    model = build(kind, model_type)
    _, tokens, video = HOW.get(model_type, (0, 0, False))
    count = NUM_STEPS * NUM_MICRO_BATCHES
    each = [batch(model, index, tokens, video) for index in range(count)]
    return [each[start : start + NUM_MICRO_BATCHES] for start in range(0, count, NUM_MICRO_BATCHES)]


def own_loss(outputs: Any, _: Any) -> torch.Tensor:
    return loss_of(outputs)


def rows() -> list[Any]:
    return [
        pytest.param(kind, name, id=f"{kind}-{name}", marks=[] if name in FAST and kind not in HEADS else pytest.mark.slow)
        for kind, names in KINDS.items()
        for name in names
    ]


@pytest.mark.parametrize(("kind", "model_type"), rows())
def test_a_small_model_of_this_kind_has_the_bits_of_stock(tmp_path: Path, kind: str, model_type: str) -> None:
    options: dict[str, Any] = {"dtype": "fp32", "clip": 0.05, "params": "cpu", "optimizer": "cpu", "weight_decay": 0.1}
    config = base_config(tmp_path, num_micro_batches=NUM_MICRO_BATCHES, **options)
    make: Callable[[], nn.Module] = partial(build, kind, model_type)
    assert_identical(*run_both(config, make, steps(kind, model_type), loss_fn=own_loss, under_zero_init=False))
