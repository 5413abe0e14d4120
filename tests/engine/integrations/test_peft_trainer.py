"""Trainer on a model of PEFT, with its own gradient checkpointing asked for: it resumes, and saves its adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import differing
from safetensors.torch import load_file
from trainer_runs import Seen, arguments_for, recorder, run_arm, tiny_llama, token_rows


@pytest.mark.slow
def test_a_lora_run_resumes_and_saves_its_adapter(tmp_path: Path) -> None:
    def train(folder: Path, config: dict[str, Any], seen: Seen, resume: bool = False) -> Any:
        from peft import LoraConfig, get_peft_model
        from transformers import Trainer

        given: dict[str, Any] = dict(save_strategy="steps", save_steps=2, gradient_checkpointing=True)
        args = arguments_for(folder, config, max_steps=4, num_train_epochs=2, **given)
        torch.manual_seed(3)
        model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        trainer = Trainer(model=model, args=args, train_dataset=token_rows(22), callbacks=[recorder(seen)])
        trainer.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-2") if resume else None)
        trainer.save_model(str(folder / "final"))
        return trainer

    whole = run_arm(tmp_path, vertical=True, train=train)
    saved = load_file(next(tmp_path.rglob("final/adapter_model.safetensors")))
    adapters = {name.replace(".default", ""): weight for name, weight in whole.weights.items() if "lora" in name}
    assert adapters and differing(adapters, saved) == []
    rest = run_arm(tmp_path, vertical=True, train=lambda *words: train(*words, resume=True))
    assert [log for log in whole.logs if "grad_norm" in log][-2:] == [log for log in rest.logs if "grad_norm" in log]
    assert not differing(whole.weights, rest.weights)
