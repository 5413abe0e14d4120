"""One training process for `bridges.py`: the same model and rows in one of four loops, which waits between its steps.

    python [-m ds_vertical.run] bridge_loops.py --loop trainer --config JSON --answers DESCRIPTOR [...]

The loops are written as their libraries' documentation writes them: `train_batch`, Hugging Face's Trainer, DeepSpeed's three
calls, Accelerate. Launched plainly, with a JSON without the section, they are the stock arm. A line of standard input is a
number of steps to take, or `evaluate N`: the mean loss of N held-out rows. The answer has each step's seconds, loss (in
hexadecimal; of Trainer what it logs) and bytes that this process read from disk, or the evaluation's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

NUM_ROWS: Final = 1 << 16  # of the training set: more than a run takes
ROW = dict[str, Any]
Evaluate = Callable[[int], None]


class Turns:
    """The other end of `inturn.Stepper`: says what to do next, and answers with what has been done."""

    def __init__(self, answers: int) -> None:
        self._answers = os.fdopen(answers, "w", buffering=1)
        self._left, self._steps = 0, list[dict[str, Any]]()
        self._start, self._start_bytes, self._started = 0.0, 0, False

    def between_steps(self, loss: float | None, evaluate: Evaluate | None) -> bool:
        """Call it ahead of the first step, without a loss, and behind each step with its loss. Waits until another step is
        wanted, and evaluates where that is wanted; False: end the loop."""
        if self._started:
            assert loss is not None
            self._steps.append(self._since_start() | {"loss": loss.hex()})
            self._left -= 1
        else:
            self._tell("ready")
        self._started = True
        while self._left == 0:
            if self._steps:
                self._tell(self._steps)
                self._steps = []
            line = sys.stdin.readline().split()
            if not line:
                return False
            if line[0] == "evaluate":
                assert evaluate is not None
                self._begin()
                evaluate(int(line[1]))
                self._tell(self._since_start())
            else:
                self._left = int(line[0])
        self._begin()
        return True

    def _begin(self) -> None:
        self._start, self._start_bytes = time.perf_counter(), bytes_read()

    def _since_start(self) -> dict[str, Any]:
        return {"step_s": time.perf_counter() - self._start, "read_bytes": bytes_read() - self._start_bytes}

    def _tell(self, content: Any) -> None:
        print(json.dumps(content), file=self._answers)


def bytes_read() -> int:
    """Bytes that this process has had read from disks since it started."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


class Rows:
    """A dataset of random tokens by number: {"input_ids": int64 [tokens], "labels": the same}."""

    def __init__(self, count: int, vocabulary: int, tokens: int) -> None:
        self._count, self._vocabulary, self._tokens = count, vocabulary, tokens

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> ROW:
        import torch

        ids = torch.randint(0, self._vocabulary, (self._tokens,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids.clone()}


class Task:
    """The JSON, the model's shape and the rows; `folder` is for what the libraries write."""

    def __init__(self, options: argparse.Namespace) -> None:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
        import model_config

        self.config = json.loads(options.config.read_text())
        self.tokens, self.folder = options.tokens, str(options.config.parent / "out")
        self.shape = model_config.resolve(options.model, [], None, options.tokens)

    def rows(self, count: int) -> Any:
        """A dataset of that many rows."""
        return Rows(count, self.shape.vocab_size, self.tokens)

    def loader(self, count: int) -> Any:
        """Its micro-batches, in order."""
        import torch

        size = self.config["train_micro_batch_size_per_gpu"]
        return torch.utils.data.DataLoader(cast("torch.utils.data.Dataset[ROW]", self.rows(count)), batch_size=size)

    def model(self) -> Any:
        """The model, built as its library's documentation does: under zero.Init where transformers knows of the JSON."""
        import torch
        import train

        torch.manual_seed(0)
        return train.build_model(self.shape, self.config)


def train_batch(task: Task, turns: Turns) -> None:
    """The loop that README calls a loop of your own."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    import ds_vertical

    config = ds_vertical.prepare(task.config)
    zero_init = HfDeepSpeedConfig(config)
    model = task.model()
    engine, *_ = ds_vertical.initialize(model=model, model_parameters=cast(Any, list(model.parameters())), config=config)

    def evaluate(count: int) -> None:
        held_out = iter(task.loader(count))
        for _ in range(count // engine.train_batch_size()):
            engine.eval_batch(held_out)

    batches: Iterator[ROW] = iter(task.loader(NUM_ROWS))
    loss = None
    while turns.between_steps(loss, evaluate):
        loss = engine.train_batch(batches).item()
    del zero_init


def trainer(task: Task, turns: Turns) -> None:
    """Hugging Face's Trainer; it waits behind each step's log."""
    from transformers import Trainer, TrainerCallback, default_data_collator

    class Waiting(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.go_on(None, control)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                self.go_on(logs["loss"], control)

        def go_on(self, loss: float | None, control: Any) -> None:
            if not turns.between_steps(loss, lambda count: made.evaluate(task.rows(count))):
                os._exit(0)  # Trainer would make another step first

    args = _training_arguments(task)
    made: Any = Trainer(
        model=task.model(),
        args=args,
        train_dataset=task.rows(NUM_ROWS),
        data_collator=default_data_collator,
        callbacks=[Waiting()],
    )
    made.train()


def _training_arguments(task: Task) -> Any:
    from transformers import TrainingArguments

    config, adam = task.config, task.config["optimizer"]["params"]
    return TrainingArguments(
        output_dir=task.folder,
        deepspeed=config,
        per_device_train_batch_size=config["train_micro_batch_size_per_gpu"],
        per_device_eval_batch_size=config["train_micro_batch_size_per_gpu"],
        gradient_accumulation_steps=config["gradient_accumulation_steps"],
        max_grad_norm=config["gradient_clipping"],
        bf16=config.get("bf16", {}).get("enabled", False),
        learning_rate=adam["lr"],
        adam_beta1=adam["betas"][0],
        adam_beta2=adam["betas"][1],
        adam_epsilon=adam["eps"],
        weight_decay=adam["weight_decay"],
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=os.environ.get("DS_ACCELERATOR") == "cpu",
    )


def three_calls(task: Task, turns: Turns) -> None:
    """DeepSpeed's own three calls."""
    import deepspeed
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    zero_init = HfDeepSpeedConfig(task.config)
    model = task.model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=cast(Any, list(model.parameters())), config=task.config)
    losses: list[Any] = []
    if not turns.between_steps(None, None):
        return
    for batch in task.loader(NUM_ROWS):
        loss = engine(**{name: value.to(engine.device) for name, value in batch.items()}).loss
        engine.backward(loss)
        losses.append(loss.detach())
        at_end = engine.is_gradient_accumulation_boundary()
        engine.step()
        if at_end:
            if not turns.between_steps(_mean(losses), None):
                break
            losses = []
    del zero_init


def accelerate(task: Task, turns: Turns) -> None:
    """A loop of Accelerate's."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim

    made: Any = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=task.config))
    model: Any = task.model()
    model, optimizer, loader = made.prepare(model, DummyOptim(model.parameters()), task.loader(NUM_ROWS))
    losses: list[Any] = []
    if not turns.between_steps(None, None):
        return
    model.train()
    for batch in loader:
        with made.accumulate(model):
            loss = model(**batch).loss
            made.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if made.sync_gradients:
            if not turns.between_steps(_mean(losses), None):
                break
            losses = []


def _mean(losses: list[Any]) -> float:
    return sum(loss.item() for loss in losses) / len(losses)


LOOPS: Final = {"train_batch": train_batch, "trainer": trainer, "three_calls": three_calls, "accelerate": accelerate}


def main() -> None:
    """Trains as told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=LOOPS, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--answers", type=int, required=True)
    options = parser.parse_args()
    from ds_vertical.compat.ops import cache

    cache.set_environment()
    cache.activate()  # the stock arm, too, takes the ops that are compiled already
    LOOPS[options.loop](Task(options), Turns(options.answers))


if __name__ == "__main__":
    main()
