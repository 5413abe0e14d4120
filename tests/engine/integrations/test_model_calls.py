"""Micro-steps that call the model several times: each call is a forward through the schedule, with stock's bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import DeepSpeedEngine
from harness import base_config, differing, read_weights, running, small_buffers
from models import tiny_neox, token_batches
from torch.nn.functional import cosine_similarity
from trainer_runs import HOST, Seen, arguments_for, assert_same, both, recorder, run_arm, tiny_llama, token_rows
from trl_data import SFT_ROWS, adapter
from words import tokenizer

from ds_vertical.engine.integrations.engine_calls import CallableEngine
from ds_vertical.engine.train_loop import seeded
from ds_vertical.errors import LayerError
from ds_vertical.model.batch import stream_seed

pytestmark = pytest.mark.slow
NUM = 3
build = partial(tiny_neox, num_layers=2, hidden=128)


def window(engine: Any, loss_of: Callable[[Any, Any], torch.Tensor], batches: list[Any]) -> list[float]:
    """A step over the batches in either arm; the losses."""

    def micro_step(batch: Any) -> float:
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    if isinstance(engine, CallableEngine):
        return engine.train_window([partial(micro_step, batch) for batch in batches], batches)
    return [micro_step(batch) for batch in batches]


def contrastive(engine: Any, batch: Any) -> torch.Tensor:
    """Two calls with gradients, whose results meet in one loss, one of them used twice."""
    first = engine(**batch)
    second = engine(input_ids=batch["input_ids"].flip(1), labels=batch["labels"])
    near = cosine_similarity(first.logits.float().mean(1), second.logits.float().mean(1)).mean()
    return first.loss + 0.5 * second.loss - near * first.loss


def plain(engine: Any, batch: Any) -> torch.Tensor:
    return engine(**batch).loss


def three_times(engine: Any, batch: Any) -> torch.Tensor:
    """Three calls, the first one without gradients and past the engine, the last one without any use."""
    with torch.no_grad():
        reference = engine.module(**batch).logits
    outputs = engine(**batch)
    with torch.no_grad():
        engine(**batch)
    return outputs.loss + (outputs.logits - reference.roll(1, 0)).float().square().mean()


def losses_of(folder: Path, steps: list[list[Any]], kinds: list[Any], *, vertical: bool, **options: Any) -> tuple[Any, ...]:
    options = options if vertical else {k: v for k, v in options.items() if k != "section"} | HOST
    config = small_buffers(base_config(folder, num_micro_batches=len(steps[0]), **options))
    with running(config, build, vertical=vertical) as (engine, model):
        seen = []
        for batches, kind in zip(steps, kinds, strict=True):
            seen.append((window(engine, kind, batches), engine.get_global_grad_norm()))
        return seen, engine.global_steps, read_weights(model)


@pytest.mark.parametrize(
    ("order", "dtype", "num"),
    [("vertical", "bf16", NUM), ("vertical", "fp32", NUM), ("vertical", "bf16", 1), ("horizontal", "bf16", NUM)],
)
def test_losses_norms_and_weights_are_stocks(tmp_path: Path, order: str, dtype: str, num: int) -> None:
    kinds = [contrastive, plain, three_times, contrastive]
    steps = token_batches(len(kinds), num, rows=2)
    section = {"order": order, "self_check": True}
    stock, ours = (
        losses_of(tmp_path / str(v), steps, kinds, vertical=v, dtype=dtype, clip=0.5, section=section) for v in (False, True)
    )
    assert stock[:2] == ours[:2]
    assert all(norm > 0.5 for _, norm in stock[0]), "clipping must act"
    assert not differing(stock[2], ours[2])


# ---- what is learned, and what is refused


def test_a_number_that_changes_is_followed_and_one_that_differs_in_a_step_is_refused(tmp_path: Path) -> None:
    fetched: list[Any] = []
    steps = token_batches(5, 2, rows=1)

    def differing_calls(engine: Any, batch: Any) -> torch.Tensor:
        return contrastive(engine, batch) if batch["input_ids"].shape[1] == 11 else plain(engine, batch)

    def chained(engine: Any, batch: Any) -> torch.Tensor:
        embedded = engine(**batch).logits[..., :128]
        return engine(inputs_embeds=embedded, labels=batch["labels"]).loss

    config = small_buffers(base_config(tmp_path, num_micro_batches=2, section={"prefetch_layers": 0, "self_check": False}))
    with running(config, partial(build, num_layers=3), vertical=True) as (engine, _):
        for kind, message in (
            (differing_calls, "micro-batch 1 .* calls the model fewer than 2"),
            (chained, "detach what is handed on"),
        ):
            with pytest.raises(LayerError, match=message):
                window(engine, kind, steps[0])
        assert engine.global_steps == 0
        fetch = engine.param_store.fetch
        with patch.object(engine.param_store, "fetch", lambda unit, *more: fetched.append(unit) or fetch(unit, *more)):
            for kind, count in ((contrastive, 3), (contrastive, 3), (plain, None), (plain, 2)):
                fetched.clear()
                window(engine, kind, steps.pop())
                if count is not None:  # of a layer in the middle: each call's forward, and one backward
                    assert fetched.count(1) == count


# ---- Trainer and TRL


def pairs_of(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """A contrastive loss of two calls, in the manner of SimCSE."""
    one, other = (model(**inputs) for _ in range(2))
    anchors, positives = (each.logits.float().mean(1) for each in (one, other))
    near = cosine_similarity(anchors[:, None], positives[None], dim=-1) / 0.1
    return torch.nn.functional.cross_entropy(near, torch.arange(len(near))) + one.loss


def contrastive_trainer(*, seeds: bool) -> type:
    from transformers import Trainer

    class Contrastive(Trainer):
        """`seeds`: stock's micro-batches have the streams that `ds-vertical ab` gives them."""

        number = 0

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            loss = pairs_of(model, inputs)
            return (loss, {"loss": loss}) if return_outputs else loss

        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if not seeds or not isinstance(model, DeepSpeedEngine) or isinstance(model, CallableEngine):
                return super().training_step(model, *args, **kwargs)
            index, self.number = self.number % 4, self.number + 1
            with seeded(stream_seed(42, model.global_steps, index, 0)):
                return super().training_step(model, *args, **kwargs)

    return Contrastive


@pytest.mark.parametrize("case", ["short windows and evaluations", "dropout", "one micro-batch"])
def test_a_contrastive_trainer(tmp_path: Path, case: str) -> None:
    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        dropout = 0.1 if case == "dropout" else 0.0
        args = arguments_for(folder, config, eval_strategy="no" if dropout else "epoch", num_train_epochs=1 if dropout else 2)
        rows = {"train_dataset": token_rows(24 if dropout else 22), "eval_dataset": token_rows(10, seed=2)}
        kind = contrastive_trainer(seeds=dropout > 0)
        trainer = kind(model=tiny_llama(dropout=dropout), args=args, callbacks=[recorder(seen)], **rows)
        trainer.train()
        return trainer

    stock, vertical = both(tmp_path, train, num_micro_batches=1 if case == "one micro-batch" else 4)
    assert_same(stock, vertical)
    assert all(log["grad_norm"] > 1 for log in stock.logs if "grad_norm" in log), "clipping must act"


def test_an_evaluation_reads_each_layer_once_for_each_call_of_a_window(tmp_path: Path) -> None:
    fetched: list[Any] = []

    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        args = arguments_for(folder, config, max_steps=1)
        rows = {"train_dataset": token_rows(8), "eval_dataset": token_rows(18, seed=2)}
        trainer = contrastive_trainer(seeds=False)(model=tiny_llama(), args=args, callbacks=[recorder(seen)], **rows)
        trainer.train()
        trainer.evaluate()  # which learns that there are two calls
        engine = trainer.model_wrapped
        fetch = engine.param_store.fetch
        with patch.object(engine.param_store, "fetch", lambda unit, *more: fetched.append(unit) or fetch(unit, *more)):
            trainer.evaluate()
        return trainer

    run_arm(tmp_path, vertical=True, train=train)
    assert fetched.count(1) == 3 * 2  # 9 micro-batches: 4, 4, 1


def test_dpo_with_the_model_without_its_adapter_as_the_reference(tmp_path: Path) -> None:
    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        rows = [{"prompt": each[:12], "chosen": f" {each[12:]}", "rejected": " w1 w2 w3"} for each in SFT_ROWS]
        more = {"eval_strategy": "epoch", "num_train_epochs": 1}
        args = arguments_for(folder, config, DPOConfig, gradient_checkpointing=False, **more)
        data = Dataset.from_list(rows)
        given = {"train_dataset": data, "eval_dataset": data.select(range(6)), "processing_class": tokenizer()}
        model = tiny_llama(vocab=128)
        trainer = DPOTrainer(model=model, args=args, callbacks=[recorder(seen)], peft_config=adapter(), **given)
        trainer.train()
        return trainer

    stock, vertical = both(tmp_path, train, lr=1e-2)
    assert_same(stock, vertical)
    assert any(log.get("eval_rewards/margins") for log in stock.logs), "the reference must be another model by then"


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_sft_with_label_smoothing(tmp_path: Path, kind: str) -> None:
    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        data = Dataset.from_dict({"text": SFT_ROWS})
        more = {"eval_strategy": "epoch", "num_train_epochs": 1, "label_smoothing_factor": 0.1}
        args = arguments_for(folder, config, SFTConfig, gradient_checkpointing=False, **more)
        options = {"peft_config": adapter()} if kind == "lora" else {}
        given = {"train_dataset": data, "eval_dataset": data.select(range(6)), "processing_class": tokenizer()}
        trainer = SFTTrainer(model=tiny_llama(vocab=128), args=args, callbacks=[recorder(seen)], **given, **options)
        trainer.train()
        return trainer

    assert_same(*both(tmp_path, train))
