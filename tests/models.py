"""Small models for parity tests, with weight matrices of at least 1 MiB so that they live on SSD."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB = 257


def tiny_gpt2(num_layers: int = 4, hidden: int = 512, dropout: float = 0.0, tied: bool = False) -> nn.Module:
    """GPT-2 of Hugging Face; its c_attn and mlp matrices are >= 1 MiB in bf16 too."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=hidden,
        n_layer=num_layers,
        n_head=4,
        vocab_size=VOCAB,
        n_positions=64,
        tie_word_embeddings=tied,
        use_cache=False,
        resid_pdrop=dropout,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
    )
    return GPT2LMHeadModel(config)


def token_batches(num_steps: int, num_micro_batches: int, seed: int = 1, vocab: int = VOCAB) -> list[list[dict[str, Any]]]:
    """Ragged micro-batches: 2 sequences of 11, 12, 13, ... tokens, labels included."""
    generator = torch.Generator().manual_seed(seed)
    steps = []
    for _ in range(num_steps):
        lengths = [11 + index for index in range(num_micro_batches)]
        ids = [torch.randint(0, vocab, (2, length), generator=generator) for length in lengths]
        steps.append([{"input_ids": each, "labels": each} for each in ids])
    return steps
