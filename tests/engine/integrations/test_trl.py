"""TRL's trainers in both arms: everything that users see of them, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_runs import Seen, arguments_for, assert_same, both, noting_llama, recorder, tiny_llama
from trl_data import SFT_ROWS, adapter
from words import tokenizer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["full", "lora", "packed"])
def test_sft(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        data = Dataset.from_dict({"text": SFT_ROWS})
        more = {"packing": True, "max_length": 32} if kind == "packed" else {}
        args = arguments_for(folder, config, SFTConfig, gradient_checkpointing=False, **({"eval_strategy": "epoch"} | more))
        model, seen_by = tiny_llama(vocab=128), [recorder(seen)]
        options = {"peft_config": adapter()} if kind == "lora" else {}
        given = {"train_dataset": data, "eval_dataset": data.select(range(6)), "processing_class": tokenizer()}
        trainer = SFTTrainer(model=model, args=args, callbacks=seen_by, **given, **options)
        trainer.train()
        return trainer

    assert_same(*both(tmp_path, train, section={"self_check": None}))  # which must not count in TRL's metrics
    assert "they agree" in (said := capsys.readouterr().out) and "trained without the check" not in said


def test_dpo_with_a_reference_model(tmp_path: Path) -> None:
    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        rows = [{"prompt": each[:12], "chosen": f" {each[12:]}", "rejected": " w1 w2 w3"} for each in SFT_ROWS]
        args = arguments_for(folder, config, DPOConfig, gradient_checkpointing=False, num_train_epochs=1)
        model, reference = tiny_llama(vocab=128), tiny_llama(vocab=128)
        given = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer()}
        trainer = DPOTrainer(model=model, ref_model=reference, args=args, callbacks=[recorder(seen)], **given)
        trainer.train()
        return trainer

    assert_same(*both(tmp_path, train))


def test_dpo_with_references_that_are_computed_ahead(tmp_path: Path) -> None:
    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        rows = [{"prompt": each[:12], "chosen": f" {each[12:]}", "rejected": " w1 w2 w3"} for each in SFT_ROWS]
        more = {"precompute_ref_log_probs": True, "num_train_epochs": 1, "eval_strategy": "epoch"}
        args = arguments_for(folder, config, DPOConfig, gradient_checkpointing=False, **more)
        data = Dataset.from_list(rows)
        given = {"train_dataset": data, "eval_dataset": data.select(range(6)), "processing_class": tokenizer()}
        trainer = DPOTrainer(model=tiny_llama(vocab=128), args=args, callbacks=[recorder(seen)], **given)
        assert trainer._precompute_engine is not None
        seen.more["references"] = list(trainer.train_dataset["ref_chosen_logps"])
        trainer.train()
        return trainer

    stock, vertical = both(tmp_path, train, lr=1e-2)
    assert_same(stock, vertical)
    assert stock.more["references"]


def test_a_reward_model(tmp_path: Path) -> None:
    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        import torch
        from datasets import Dataset
        from transformers import LlamaForSequenceClassification
        from trl import RewardConfig, RewardTrainer

        torch.manual_seed(0)
        settings = tiny_llama(vocab=128).config
        settings.num_labels, settings.pad_token_id = 1, 0
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(settings)
        rows = [{"chosen": each, "rejected": f"{each[:12]} w1 w2 w3"} for each in SFT_ROWS]
        args = arguments_for(folder, config, RewardConfig, gradient_checkpointing=False, num_train_epochs=1)
        given = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer()}
        trainer = RewardTrainer(model=model, args=args, callbacks=[recorder(seen)], **given)
        trainer.train()
        return trainer

    assert_same(*both(tmp_path, train))


def test_the_metrics_of_a_trl_trainer_have_one_entry_for_each_micro_step(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    entries: list[list[int]] = []

    class Noting(SFTTrainer):
        def log(self, *args: Any, **kwargs: Any) -> None:
            entries[-1].append(len(self._metrics["train"]["mean_token_accuracy"]))
            super().log(*args, **kwargs)

    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        entries.append([])
        data = Dataset.from_dict({"text": SFT_ROWS})
        args = arguments_for(folder, config, SFTConfig, gradient_checkpointing=False, eval_strategy="epoch")
        given = {"train_dataset": data, "eval_dataset": data.select(range(6)), "processing_class": tokenizer()}
        trainer = Noting(model=noting_llama(vocab=128), args=args, callbacks=[recorder(seen)], **given)
        trainer.train()
        return trainer

    assert_same(*both(tmp_path, train))
    assert entries[0] == entries[1] and entries[0][:2] == [4, 4]
