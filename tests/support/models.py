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


def tiny_neox(num_layers: int = 4, hidden: int = 512, dropout: float = 0.0) -> nn.Module:
    """GPT-NeoX of Hugging Face: nn.Linear throughout, ten times faster in bf16 on a CPU than GPT-2's Conv1D."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        use_cache=False,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )
    return GPTNeoXForCausalLM(config)


def token_batches(
    num_steps: int, num_micro_batches: int, seed: int = 1, vocab: int = VOCAB, rows: int = 2, shortest: int = 11
) -> list[list[dict[str, Any]]]:
    """Ragged micro-batches: `rows` sequences of `shortest`, `shortest` + 1, ... tokens, labels included."""
    generator = torch.Generator().manual_seed(seed)
    steps = []
    for _ in range(num_steps):
        lengths = [shortest + index for index in range(num_micro_batches)]
        ids = [torch.randint(0, vocab, (rows, length), generator=generator) for length in lengths]
        steps.append([{"input_ids": each, "labels": each} for each in ids])
    return steps


class MixerBlock(nn.Module):
    """A cheap transformer block: causal attention of the tokens with themselves (no parameters of its own) between two
    square matrices. 512 wide in fp32, each matrix is exactly 1 MiB; biases and norms stay small."""

    def __init__(self, width: int, inner: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner or width)
        self.down = nn.Linear(inner or width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.up(self.norm(x))
        mixed = nn.functional.scaled_dot_product_attention(states, states, states, is_causal=True)
        return x + self.dropout(self.down(nn.functional.gelu(mixed)))


class MixerModel(nn.Module):
    """Embedding, `num_layers` blocks, norm, head. `forward(input_ids)` gives logits; with labels the mean loss."""

    def __init__(
        self, num_layers: int = 3, width: int = 512, inner: int | None = None, dropout: float = 0.0, vocab: int = VOCAB
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(MixerBlock(width, inner, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else next_token_loss(logits, labels)


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each token given those before it, in fp32."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
