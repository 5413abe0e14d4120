"""Texts and an adapter for TRL's trainers, without a download."""

from __future__ import annotations

from typing import Any

SFT_ROWS = [" ".join(f"w{(7 * row + 3 * i) % 125}" for i in range(10 + row % 20)) for row in range(22)]


def adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
