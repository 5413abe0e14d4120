"""Run one script of Hugging Face's Trainer in both arms, in this process, and collect what users see of it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from harness import base_config, differing, dispose, read_weights, small_buffers, start_process_group

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
HOST = {"params": "cpu", "optimizer": "cpu"}
NOT_COMPARED = ("runtime", "per_second", "time", "flos")


@dataclass
class Seen:
    """What one arm shows: each log entry, the order of the callbacks' events, and the weights at the end."""

    logs: list[dict[str, Any]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


def trainer_config(
    folder: Path, *, vertical: bool, num_micro_batches: int = 4, rows: int = 2, **options: Any
) -> dict[str, Any]:
    """The JSON of a Trainer script; the stock arm without the section. The Trainer brings the scheduler."""
    config = small_buffers(base_config(folder, num_micro_batches=num_micro_batches, weight_decay=0.0, **options))
    config["train_micro_batch_size_per_gpu"] = rows
    del config["scheduler"], config["data_types"]
    if not vertical:
        del config["vertical_schedule"]
    return config


def tiny_llama(num_layers: int = 3, hidden: int = 256, dropout: float = 0.0, vocab: int = 512) -> Any:
    """Llama with random weights, seeded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": num_layers, "vocab_size": vocab}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": dropout}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=128, use_cache=False))


def noting_llama(**sizes: Any) -> Any:
    """Each layer keeps a list that its hook appends to, so the first step starts over."""
    model = tiny_llama(**sizes)
    for layer in model.model.layers:
        layer.notes = []
        layer.register_forward_hook(lambda module, inputs, outputs: module.notes.append(len(module.notes)))
    return model


def token_rows(count: int, length: int = 24, vocab: int = 512, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Rows of a dataset: random tokens, as many of the labels masked as the row's number says."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        ids = torch.randint(vocab, (length,), generator=generator)
        labels = ids.clone()
        labels[: index % 7] = -100
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return rows


def arguments_for(folder: Path, config: dict[str, Any], kind: Callable[..., Any] | None = None, **options: Any) -> Any:
    """TrainingArguments (or a subclass) that fit the JSON."""
    from transformers import TrainingArguments

    given: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": config["train_micro_batch_size_per_gpu"],
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": config["gradient_accumulation_steps"],
        "learning_rate": config["optimizer"]["params"]["lr"],
        "warmup_steps": 2,
        "max_grad_norm": config["gradient_clipping"],
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": "bf16" in config,
        "disable_tqdm": True,
        "deepspeed": config,
    }
    return (kind or TrainingArguments)(**(given | options))


@contextmanager
def arm(vertical: bool) -> Iterator[None]:
    """Within the block the libraries make the vertical engine from a JSON that has the section, or do as launched plainly."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    start_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        with patched() if vertical else stock():
            yield
    finally:
        unset_hf_deepspeed_config()


@contextmanager
def stock() -> Iterator[None]:
    """Nothing is changed."""
    yield


@contextmanager
def patched() -> Iterator[None]:
    """As `ds_vertical.patch()`, until the end of the block. Loaders are not looked ahead: Trainer takes whole windows."""
    import deepspeed
    from transformers import Trainer

    import ds_vertical
    from ds_vertical.compat import entry_points
    from ds_vertical.engine.integrations import accelerate, three_calls

    initialize, init, made = deepspeed.initialize, deepspeed.zero.Init.__init__, Trainer.__init__
    with (
        patch.object(three_calls, "see_torch_loaders", lambda: None),
        patch.object(accelerate, "see_accelerate_loaders", lambda: None),
    ):
        ds_vertical.patch()
    try:
        yield
    finally:
        deepspeed.initialize, deepspeed.zero.Init.__init__, Trainer.__init__ = initialize, init, made
        entry_points._stock.clear()


def recorder(seen: Seen) -> Any:
    """A callback that writes down each event and each log entry."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.events.append("on_log")
            seen.logs.append({k: v for k, v in logs.items() if not any(word in k for word in NOT_COMPARED)})

    def noting(event: str) -> Callable[..., None]:
        return lambda self, args, state, control, **_: seen.events.append(f"{event} {state.global_step} {state.epoch}")

    for event in (name for name in dir(TrainerCallback) if name.startswith("on_") and name != "on_log"):
        setattr(Recorder, event, noting(event))
    return Recorder()


def run_arm(folder: Path, *, vertical: bool, train: Callable[[Path, dict[str, Any], Seen], Any], **options: Any) -> Seen:
    """One arm. `train(folder, config, seen)` is the script; it returns its trainer, which has trained."""
    folder.mkdir(parents=True, exist_ok=True)
    seen = Seen()
    with arm(vertical):
        trainer = train(folder, copy.deepcopy(trainer_config(folder, vertical=vertical, **options)), seen)
        engine = trainer.model_wrapped
        try:
            assert type(engine).__name__ == ("VerticalEngine" if vertical else "DeepSpeedEngine")
            seen.weights = read_weights(trainer.model)
            seen.more |= {
                name: getattr(engine, name) for name in ("global_steps", "global_samples", "micro_steps", "skipped_steps")
            }
        finally:
            dispose(engine)
            trainer.accelerator.free_memory()
    del trainer, engine
    gc.collect()
    return seen


def assert_same(stock: Seen, vertical: Seen) -> None:
    """Losses, norms, learning rates, evaluations, the events' order, DeepSpeed's counters, final weights."""
    assert stock.logs == vertical.logs
    assert stock.events == vertical.events
    assert stock.more == vertical.more
    assert not differing(stock.weights, vertical.weights)


def both(folder: Path, train: Callable[[Path, dict[str, Any], Seen], Any], **options: Any) -> tuple[Seen, Seen]:
    """(stock with state in host memory, vertical with all on SSD): stock on SSD is wrong for some of these models."""
    stock = run_arm(folder / "stock", vertical=False, train=train, **(options | HOST))
    return stock, run_arm(folder / "vertical", vertical=True, train=train, **options)
