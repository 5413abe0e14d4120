"""Model families for the parity tests: one row each, about 7-15 M parameters, four layers or more, matrices of 1 MiB.

`hidden = intermediate = 512` makes a square matrix 1 MiB in fp32, the size from which a shard lives on SSD.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    PretrainedConfig,
)
from transformers.initialization import no_init_weights

VOCAB = 300
HIDDEN = 512
NUM_LAYERS = 4
Batch = dict[str, torch.Tensor]

# what most configurations call their sizes
_SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
_GPT2_SIZES = {"n_embd": HIDDEN, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 64, "n_inner": HIDDEN}
_BLOOM_SIZES = {"hidden_size": HIDDEN, "n_layer": NUM_LAYERS, "n_head": 4}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
_SLIDING = {"sliding_window": 4}  # shorter than the micro-batches, so that it masks something
_T5_SIZES = {"d_model": HIDDEN, "d_ff": HIDDEN, "d_kv": 128, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
_BART_SIZES = {
    "d_model": HIDDEN,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": HIDDEN,
    "decoder_ffn_dim": HIDDEN,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Family:
    """A row: `model_type` of Hugging Face and the settings that make it small.

    Untied (t5 too, whose configuration always ties), every family gives stock's bits. `stock_on_host`: why stock itself
    computes something else with its parameters and optimizer on SSD (empty: it does not); then it is run with both in host
    memory, which moves no bits.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    model_type: str = ""
    tied: bool = False
    encoder_decoder: bool = False
    stock_on_host: str = ""

    def config(self) -> PretrainedConfig:
        """The configuration, without a KV cache."""
        ids = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        settings = ids | {"tie_word_embeddings": self.tied, "use_cache": False} | dict(self.settings)
        return AutoConfig.for_model(self.model_type or self.name, **settings)

    def builder(self) -> Callable[[], nn.Module]:
        """What builds the model, its parameters filled from torch's random stream.

        The model's class is imported here: decorated classes that are imported under zero.Init lose their decoration.
        """
        return partial(_build, self.model_class(), self.config(), self.tied)

    def model_class(self) -> Any:
        """The language model's class."""
        mapping = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if self.encoder_decoder else MODEL_FOR_CAUSAL_LM_MAPPING
        return mapping[type(self.config())]

    def batches(self, num_steps: int, num_micro_batches: int) -> list[list[Batch]]:
        return ragged_batches(num_steps, num_micro_batches, self.encoder_decoder)


def _modern(name: str, stock_on_host: str = "", **settings: Any) -> Family:
    return Family(name, _SIZES | settings, stock_on_host=stock_on_host)


_VIEWS = "experts are views of one parameter, saved for backward over a swap buffer that stock has meanwhile reused"
_ODD = _VIEWS + "; gradients at offsets that SSD reads refuse (compat, [Note: aligned gradients])"
_UNUSED = "a parameter without a gradient is stepped with whatever the swap buffer held"

FAMILIES = (
    Family("gpt2", _GPT2_SIZES),  # dropout 0.1, as in opt and bart
    Family("gptj", _GPT2_SIZES | {"rotary_dim": 64}),
    Family("opt", _SIZES | {"ffn_dim": HIDDEN, "word_embed_proj_dim": HIDDEN}),
    Family("bloom", _BLOOM_SIZES),
    Family("falcon", _SIZES | {"ffn_hidden_size": HIDDEN, "new_decoder_architecture": False, "multi_query": False}),
    _modern("gpt_neox"),
    _modern("phi", resid_pdrop=0.0),
    _modern("phi3"),
    _modern("llama"),
    _modern("mistral", **_SLIDING),
    _modern("qwen3", head_dim=128, use_sliding_window=True, max_window_layers=2, **_SLIDING),
    _modern("olmo2"),
    _modern("glm4", head_dim=128),
    _modern("gemma", head_dim=128),
    _modern("gemma2", head_dim=128, **_SLIDING),
    _modern("gemma3_text", head_dim=128, sliding_window_pattern=2, **_SLIDING),
    _modern("gemma4_text", head_dim=128, hidden_size_per_layer_input=64, vocab_size_per_layer_input=VOCAB, **_SLIDING),
    _modern("mixtral", _VIEWS, num_local_experts=4, num_experts_per_tok=2, intermediate_size=128),
    _modern("qwen3_moe", _VIEWS, head_dim=128, num_experts=4, **_MOE),
    _modern("gpt_oss", _ODD, head_dim=128, num_local_experts=4, num_experts_per_tok=2, intermediate_size=128, **_SLIDING),
    _modern(
        "deepseek_v3",
        _VIEWS,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=HIDDEN,
        q_lora_rank=HIDDEN,
        num_mtp_layers=0,
        **_MOE,
    ),
    _modern(
        "qwen3_next",
        _ODD,
        head_dim=128,
        num_experts=4,
        shared_expert_intermediate_size=HIDDEN,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        **_MOE,
    ),
    Family("t5", _T5_SIZES | {"decoder_start_token_id": 0}, encoder_decoder=True, stock_on_host=_UNUSED),
    Family("bart", _BART_SIZES | {"decoder_start_token_id": 2}, encoder_decoder=True, stock_on_host=_UNUSED),
)


def _build(model_class: Any, config: PretrainedConfig, tied: bool) -> nn.Module:
    with no_init_weights():  # under zero.Init a model's own initialisation meets empty tensors
        model = model_class._from_config(copy.deepcopy(config))
        if tied:
            model.tie_weights()
    fill(model)
    return model


def fill(model: nn.Module) -> None:
    """Give every parameter a value of its own, inside zero.Init too, where models cannot initialise themselves.

    Matrices keep the scale of their inputs; biases and sinks are small; other vectors (norms) lie about 1.
    """
    import deepspeed

    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
            if param.dim() > 1:
                param.normal_(0.0, 1.0 / math.sqrt(param.shape[-1]))
            elif name.endswith(("bias", "sinks")):
                param.normal_(0.0, 0.05)
            else:
                param.uniform_(0.8, 1.2)


def ragged_batches(num_steps: int, num_micro_batches: int, encoder_decoder: bool = False) -> list[list[Batch]]:
    """Per step, micro-batches of 2 sequences of 5, 6, 7, ... tokens, the second one padded on the right."""
    generator = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(num_steps):
        steps.append([_batch(5 + index, encoder_decoder, generator) for index in range(num_micro_batches)])
    return steps


def _batch(length: int, encoder_decoder: bool, generator: torch.Generator) -> Batch:
    ids = torch.randint(3, VOCAB, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    ids[1, -2:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if encoder_decoder:
        labels = torch.randint(3, VOCAB, (2, length + 2), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Pair(nn.Module):
    """A residual block of two square matrices, over ids already embedded."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, HIDDEN)
        self.down = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


def sequential() -> nn.Module:
    """A plain nn.Sequential: embedding, four blocks, head; ids in, logits out."""
    blocks = [Pair() for _ in range(NUM_LAYERS)]
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), *blocks, nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB))
    fill(model)
    return model


class SideBlock(Pair):
    """Takes a tensor made before the layers and the trace of the layer before; returns a tuple."""

    def forward(  # type: ignore[override]
        self, hidden: torch.Tensor, *, side: torch.Tensor, trace: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        normed = self.norm(hidden)
        mixed = torch.tanh(self.up(normed) * side)
        if trace is not None:
            mixed = mixed + 0.5 * trace
        return hidden + self.down(mixed), {"trace": normed * normed.mean(-1, keepdim=True)}


class Handwritten(nn.Module):
    """What hand-written models do: glue with weights of its own between the layers, one tensor made before the layers and
    used by all of them and by the suffix, tuples out of layers, a long skip connection, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.side = nn.Linear(HIDDEN, HIDDEN)
        self.gains = nn.ParameterList([torch.empty(HIDDEN) for _ in range(NUM_LAYERS)])
        self.stack = nn.ModuleList([SideBlock() for _ in range(NUM_LAYERS)])
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.frozen = nn.Parameter(torch.empty(HIDDEN, HIDDEN), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(ids)
        side = torch.sigmoid(self.side(embedded @ self.frozen))
        hidden, trace, first = embedded, None, None
        for gain, block in zip(self.gains, self.stack, strict=True):
            hidden, extra = block(hidden * gain, side=side, trace=trace)
            trace = extra["trace"]
            first = hidden if first is None else first
        return self.head(torch.nn.functional.layer_norm(hidden + first, (HIDDEN,)) * side)


def handwritten() -> nn.Module:
    model = Handwritten()
    fill(model)
    return model


def ids_of(batches: list[list[Batch]]) -> list[list[tuple[torch.Tensor]]]:
    """The same micro-batches for a model that takes ids alone."""
    return [[(batch["input_ids"],) for batch in step] for step in batches]


def next_token_loss(logits: torch.Tensor, batch: tuple[torch.Tensor]) -> torch.Tensor:
    (ids,) = batch
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
