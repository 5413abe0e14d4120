"""Texts, a tokenizer and an adapter for TRL's trainers, without a download."""

from __future__ import annotations

from typing import Any

SFT_ROWS = [" ".join(f"w{(7 * row + 3 * i) % 125}" for i in range(10 + row % 20)) for row in range(22)]


def tokenizer() -> Any:
    """One token for each of 125 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(125))]
    vocabulary = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
