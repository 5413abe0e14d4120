"""A script of Hugging Face's Trainer in both arms: everything that users see of it, bit for bit."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import DeepSpeedEngine
from harness import differing
from trainer_runs import HOST, Seen, arguments_for, assert_same, both, recorder, run_arm, tiny_llama, token_rows
from trl_data import adapter

from ds_vertical.distributed import ranks
from ds_vertical.engine.integrations import eval_windows
from ds_vertical.engine.integrations.engine_calls import CallableEngine
from ds_vertical.engine.self_check.diagnosis import SelfCheckError
from ds_vertical.engine.train_loop import seeded
from ds_vertical.errors import ConfigError, LayerError, LoopError
from ds_vertical.model.batch import stream_seed


def trained(seen: Seen, args: Any, kind: Any = None, **options: Any) -> Any:
    """A Trainer that has trained a tiny Llama on 11 micro-batches an epoch."""
    from transformers import Trainer

    given = {"model": tiny_llama(), "train_dataset": token_rows(22), "eval_dataset": token_rows(10, seed=2)}
    trainer = (kind or Trainer)(args=args, **(given | {"callbacks": [recorder(seen)]} | options))
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_two_epochs_with_short_windows_and_evaluations(tmp_path: Path, dtype: str) -> None:
    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        return trained(seen, arguments_for(folder, config, eval_strategy="epoch"))

    on_host = {"params": "cpu"} if dtype == "fp32" else {}  # stock would write such a model to SSD as bf16
    stock, vertical = both(tmp_path, train, dtype=dtype, section={"self_check": True}, **on_host)
    assert_same(stock, vertical)
    assert [log["grad_norm"] > 1 for log in stock.logs if "grad_norm" in log] == [True] * 6, "clipping must act"
    assert sum("eval_loss" in log for log in stock.logs) == 2


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["label smoothing", "compute_loss_func", "metrics of logits", "metrics of tokens", "averaged loss"]
)
def test_losses_of_other_kinds(tmp_path: Path, kind: str) -> None:
    def metrics(prediction: Any) -> dict[str, float]:
        return {"mean": float(prediction.predictions.astype("float64").mean())}

    def tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)

    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        more = {"label_smoothing_factor": 0.1} if kind == "label smoothing" else {}
        args = arguments_for(folder, config, num_train_epochs=1, eval_strategy="epoch", **more)
        model = tiny_llama()
        if kind == "averaged loss":  # the Trainer divides each micro-batch's mean by their number
            model.accepts_loss_kwargs = False
        options: dict[str, Any] = {
            "compute_loss_func": {"compute_loss_func": own_loss},
            "metrics of logits": {"compute_metrics": metrics},
            "metrics of tokens": {
                "compute_metrics": metrics,
                "preprocess_logits_for_metrics": lambda found, _: found.argmax(-1),
            },
        }.get(kind, {})
        trainer = trained(seen, args, model=model, **options)
        assert trainer.model_accepts_loss_kwargs is (kind != "averaged loss")
        return trainer

    assert_same(*both(tmp_path, train))


@pytest.mark.slow
def test_early_stopping_and_the_best_checkpoint(tmp_path: Path) -> None:
    from transformers import EarlyStoppingCallback

    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        saving = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True, "save_total_limit": 1}
        args = arguments_for(folder, config, num_train_epochs=6, **saving)
        trainer = trained(seen, args, callbacks=[recorder(seen), EarlyStoppingCallback(1)])
        seen.more["stopped"] = trainer.state.global_step
        return trainer

    stock, vertical = both(tmp_path, train, lr=1e-2)
    for seen in (stock, vertical):
        del seen.more["micro_steps"]  # stock's load leaves it as it is
    assert_same(stock, vertical)
    assert stock.more["stopped"] < 18


@pytest.mark.slow
def test_a_resumed_run_is_one_that_did_not_stop(tmp_path: Path) -> None:
    def train(folder: Path, config: dict[str, Any], seen: Seen, steps: int = 6, resume: bool = False) -> Any:
        from transformers import Trainer

        args = arguments_for(folder, config, max_steps=6, save_strategy="steps", save_steps=2, num_train_epochs=2)
        stop = [] if steps == 6 else [stopping_at(steps)]
        rows = token_rows(22)
        trainer = Trainer(model=tiny_llama(), args=args, train_dataset=rows, callbacks=[recorder(seen), *stop])
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer

    whole = run_arm(tmp_path / "whole", vertical=True, train=train)
    part = tmp_path / "part"
    run_arm(part, vertical=True, train=lambda *given: train(*given, steps=4))
    rest = run_arm(part, vertical=True, train=lambda *given: train(*given, resume=True))
    assert [log for log in whole.logs if "grad_norm" in log][-2:] == [log for log in rest.logs if "grad_norm" in log]
    assert not differing(whole.weights, rest.weights)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_run_goes_on_from_a_checkpoint_of_stocks(tmp_path: Path, kind: str) -> None:
    """As a stock run that resumes there goes on."""
    from peft import get_peft_model
    from transformers import Trainer

    def train(folder: Path, config: dict[str, Any], seen: Seen, resume: str | None = None) -> Any:
        saving = {"save_strategy": "steps", "save_steps": 2} if resume is None else {}
        args = arguments_for(folder, config, max_steps=4, **saving)
        model = tiny_llama() if kind == "full" else get_peft_model(tiny_llama(), adapter())
        trainer = Trainer(model=model, args=args, train_dataset=token_rows(22), callbacks=[recorder(seen)])
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    run_arm(tmp_path / "saved", vertical=False, train=train, **HOST)
    checkpoint = str(tmp_path / "saved" / "out" / "checkpoint-2")
    stock, vertical = both(tmp_path, lambda *given: train(*given, resume=checkpoint))
    assert_same(stock, vertical)
    assert [log["epoch"] for log in stock.logs if "grad_norm" in log] == [1, 1 + 4 / 11], "two steps are left"


@pytest.mark.parametrize(
    ("saving", "gathers", "is_looked_at"),
    [
        ({"save_strategy": "steps"}, True, True),
        pytest.param({"save_strategy": "epoch", "save_on_each_node": True}, False, True, marks=pytest.mark.slow),
        ({"save_strategy": "no"}, False, False),
        pytest.param({"save_strategy": "steps", "save_only_model": True}, False, True, marks=pytest.mark.slow),
        pytest.param({"save_strategy": "steps", "save_only_model": True}, True, False, marks=pytest.mark.slow),
    ],
)
def test_the_first_step_looks_at_the_folder_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saving: dict[str, Any], gathers: bool, is_looked_at: bool
) -> None:
    """A file in the folder's place is in the way of whoever looks; this rank hears of more ranks on its host than there are. A
    Trainer that is to save the model alone saves a checkpoint where it does not gather the weights."""
    from transformers import Trainer

    monkeypatch.setattr(ranks, "ranks_on_this_host", lambda: 2)

    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = gathers
        args = arguments_for(folder, config, max_steps=1, **saving)
        trainer = Trainer(model=tiny_llama(num_layers=2), args=args, train_dataset=token_rows(8), callbacks=[stopping_at(1)])
        Path(args.output_dir).rmdir()
        Path(args.output_dir).touch()
        with suppress(OSError):
            trainer.train()
        seen.more["steps"] = trainer.state.global_step
        return trainer

    seen = run_arm(tmp_path, vertical=True, train=train)
    assert seen.more["steps"] == (0 if is_looked_at else 1)


@pytest.mark.parametrize(
    ("kind", "save_only_model", "is_on_one_host"),
    [
        pytest.param("full", True, False, marks=pytest.mark.slow),
        ("lora", False, False),
        pytest.param("lora", False, True, marks=pytest.mark.slow),
    ],
)
def test_the_first_step_refuses_a_folder_on_each_host_where_weights_are_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, save_only_model: bool, is_on_one_host: bool
) -> None:
    """Those of PEFT's models are, whatever the JSON says. On one host nobody is apart."""
    from peft import get_peft_model
    from transformers import Trainer

    gather = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    shared = "pass save_on_each_node=False and an output_dir on a file system that all hosts share"
    cause, remedy = {"full": (f"{gather} true", f"write {gather} false into the JSON, or {shared}")}.get(
        kind, ("a model of PEFT", shared)
    )

    if not is_on_one_host:
        monkeypatch.setattr(ranks, "ranks_on_this_host", lambda: 2)

    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = kind == "full"
        saving = {"save_strategy": "steps", "save_on_each_node": True, "save_only_model": save_only_model}
        args = arguments_for(folder, config, max_steps=1, **saving)
        model = tiny_llama(num_layers=2) if kind == "full" else get_peft_model(tiny_llama(num_layers=2), adapter())
        trainer = Trainer(model=model, args=args, train_dataset=token_rows(8), callbacks=[stopping_at(1)])
        with nullcontext() if is_on_one_host else pytest.raises(ConfigError) as caught:
            trainer.train()
        assert trainer.state.global_step == is_on_one_host
        if caught is not None:
            told = str(caught.value)
            assert told.startswith(f"TrainingArguments.save_on_each_node: got True with {cause} on several hosts: ")
            assert told.endswith(f"would stand still; {remedy}")
        return trainer

    run_arm(tmp_path, vertical=True, train=train)


def stopping_at(step: int) -> Any:
    """A callback that ends training there, as a time limit would."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = control.should_training_stop or state.global_step == step

    return Stop()


@pytest.mark.slow
def test_a_micro_step_that_cannot_be_followed_is_named_and_leaves_no_step(tmp_path: Path) -> None:
    from transformers import Trainer

    class Chained(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            logits = model(**inputs).logits
            return model(inputs_embeds=logits[..., :256], labels=inputs["labels"]).loss

    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        args = arguments_for(folder, config, max_steps=1)
        trainer = Chained(model=tiny_llama(num_layers=2), args=args, train_dataset=token_rows(16), callbacks=[recorder(seen)])
        with pytest.raises(LayerError, match="depends, with its gradient, on an earlier call of it"):
            trainer.train()
        return trainer

    seen = run_arm(tmp_path, vertical=True, train=train)
    assert seen.more["global_steps"] == 0
    assert not any("grad_norm" in log for log in seen.logs)


@pytest.mark.slow
def test_dropout_is_stocks_where_that_seeds_its_micro_batches(tmp_path: Path) -> None:
    from transformers import Trainer

    class Seeded(Trainer):
        """Stock's arm, whose micro-batches have the streams that `ds-vertical ab` gives them."""

        number = 0

        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(model, DeepSpeedEngine) or isinstance(model, CallableEngine):
                return super().training_step(model, *args, **kwargs)
            index, self.number = self.number % 4, self.number + 1
            with seeded(stream_seed(42, model.global_steps, index, 0)):
                return super().training_step(model, *args, **kwargs)

    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        model, rows = tiny_llama(dropout=0.1), token_rows(24)
        return trained(seen, arguments_for(folder, config), kind=Seeded, model=model, train_dataset=rows)

    assert_same(*both(tmp_path, train))


@contextmanager
def noting_fetches(trainer: Any, fetched: list[Any]) -> Iterator[None]:
    """Each read of a layer in the block is written down."""
    store = trainer.model_wrapped.param_store
    fetch = store.fetch
    with patch.object(store, "fetch", lambda unit, *further: fetched.append(unit) or fetch(unit, *further)):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("loss_only", [True, False])
def test_an_evaluation_reads_each_layer_once_for_each_window(tmp_path: Path, loss_only: bool) -> None:
    fetched: list[Any] = []

    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        rows = token_rows(16, seed=2)  # 8 micro-batches: 4 and 4; a first window of another size would make it three
        trainer = trained(seen, arguments_for(folder, config, max_steps=1), eval_dataset=rows)
        with noting_fetches(trainer, fetched):
            trainer.evaluate() if loss_only else trainer.predict(rows)
        return trainer

    run_arm(tmp_path, vertical=True, train=train)
    assert fetched.count(1) == 2


def with_a_namespace() -> Any:
    """A Llama whose layers read what the model's forward has put into an object that nobody looks after."""
    model, aside = tiny_llama(), argparse.Namespace(scale=1.0)
    model.register_forward_pre_hook(
        lambda _, args, kwargs: setattr(aside, "scale", 1 + kwargs["input_ids"].float().mean().item() / 512), with_kwargs=True
    )
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: (args[0] * aside.scale, *args[1:]))
    return model


@pytest.mark.slow
def test_an_evaluation_ahead_of_the_first_step_is_stocks_whatever_the_model_keeps(tmp_path: Path) -> None:
    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        from transformers import Trainer

        args = arguments_for(folder, config, max_steps=1, eval_on_start=True)
        given = {"train_dataset": token_rows(22), "eval_dataset": token_rows(10, seed=2), "callbacks": [recorder(seen)]}
        trainer = Trainer(model=with_a_namespace(), args=args, **given)
        is_stock = "vertical_schedule" not in config
        with nullcontext() if is_stock else pytest.raises(SelfCheckError, match="horizontal"):
            trainer.train()
        return trainer

    stock, vertical = both(tmp_path, train, dtype="fp32", section={"self_check": None}, params="cpu")
    assert stock.logs[0] == vertical.logs[0] and "eval_loss" in stock.logs[0]


@pytest.mark.slow
def test_as_many_micro_batches_with_logits_share_a_window_as_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first window shows how many, and starts over; from then on that is known. What a function of the user's makes of the
    logits counts in their place."""
    reads: list[int] = []
    logit_bytes = 2 * 24 * 512 * 2  # of a micro-batch, in bf16
    monkeypatch.setattr(eval_windows, "MOST_WAITING_BYTES", 5 * logit_bytes // 2)

    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        trainer = trained(seen, arguments_for(folder, config, max_steps=1))

        def predictions() -> Any:
            fetched: list[Any] = []
            with noting_fetches(trainer, fetched):
                found = trainer.predict(token_rows(16, seed=2)).predictions
            reads.append(fetched.count(1))
            return found

        logits = predictions()
        assert (logits == predictions()).all()
        trainer.preprocess_logits_for_metrics = lambda found, labels: found.argmax(-1)
        tokens = predictions()
        assert (tokens == predictions()).all() and (tokens == logits.argmax(-1)).all()
        return trainer

    run_arm(tmp_path, vertical=True, train=train)
    assert reads == [1 + 4, 4, 3, 2]  # of 8: (4,) 2, 2, 2, 2; then 2, 2, 2, 2; then 2, 4, 2; then 4, 4


@pytest.mark.slow
@pytest.mark.parametrize("vertical", [False, True])
def test_a_training_behind_an_evaluation_is_refused_where_stock_breaks(tmp_path: Path, vertical: bool) -> None:
    """The evaluation makes the Trainer's engine, without an optimizer, and no other is made."""
    from transformers import Trainer

    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        rows = {"train_dataset": token_rows(22), "eval_dataset": token_rows(10, seed=2)}
        trainer = Trainer(model=tiny_llama(), args=arguments_for(folder, config), callbacks=[recorder(seen)], **rows)
        assert trainer.evaluate()["eval_loss"] > 0
        kind, message = (
            (LoopError, "Trainer.evaluate.*ahead of train.*in another Trainer with a copy")
            if vertical
            else (AttributeError, "backward")
        )
        with pytest.raises(kind, match=message):
            trainer.train()
        trainer.model_wrapped.destroy()
        raise NotTrained

    with pytest.raises(NotTrained):
        run_arm(tmp_path, vertical=vertical, train=train, **({} if vertical else HOST))


class NotTrained(Exception):  # noqa: N818 - ends an arm that is as it should be
    pass


@pytest.mark.slow
def test_an_evaluation_that_calls_the_model_twice_is_in_stocks_order(tmp_path: Path) -> None:
    from transformers import Trainer

    class Twice(Trainer):
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            first = super().prediction_step(model, inputs, *args, **kwargs)
            second = super().prediction_step(model, inputs, *args, **kwargs)
            assert torch.equal(first[0], second[0])
            return first

    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        return trained(seen, arguments_for(folder, config, num_train_epochs=2, eval_strategy="epoch"), kind=Twice)

    assert_same(*both(tmp_path, train))


# ---- generation


def prompts() -> list[dict[str, torch.Tensor]]:
    return [{name: each[name] for name in ("input_ids", "attention_mask")} for each in token_rows(6, length=8, seed=4)]


def generating(model: Any) -> list[int]:
    ids = prompts()[0]["input_ids"][None]
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    return found[0].tolist()


@pytest.mark.slow
def test_an_evaluation_and_a_callback_generate_as_under_stock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

    class Generating(TrainerCallback):
        def __init__(self, found: list[Any]) -> None:
            self.found = found

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.found.append(generating(model))

    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        more = {"predict_with_generate": True, "generation_max_length": 12, "max_steps": 2}
        args = arguments_for(folder, config, Seq2SeqTrainingArguments, **more)
        seen.more["generated"] = found = []
        callbacks = [recorder(seen), Generating(found)]
        model = tiny_llama()
        model.config.pad_token_id = 0  # which the Trainer pads with
        trainer = trained(seen, args, kind=Seq2SeqTrainer, model=model, callbacks=callbacks)
        found.append(trainer.predict(prompts()).predictions.tolist())
        return trainer

    stock, vertical = both(tmp_path, train, lr=1e-2)
    assert len(stock.more["generated"]) == 3
    assert_same(stock, vertical)
    assert (
        "reads all layers for each batch: Seq2SeqTrainer.prediction_step: LlamaForCausalLM.generate" in capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_micro_step_that_generates_is_refused_and_leaves_no_step(tmp_path: Path) -> None:
    from transformers import Trainer

    class Generating(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            generating(self.model)
            return super().compute_loss(model, inputs, *args, **kwargs)

    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        args = arguments_for(folder, config, max_steps=1)
        trainer = Generating(model=tiny_llama(), args=args, train_dataset=token_rows(16), callbacks=[recorder(seen)])
        with pytest.raises(LoopError, match=r"LlamaForCausalLM\.generate: called within a micro-step.*between two steps"):
            trainer.train()
        return trainer

    seen = run_arm(tmp_path, vertical=True, train=train)
    assert seen.more["global_steps"] == 0
    assert not any("grad_norm" in log for log in seen.logs)
