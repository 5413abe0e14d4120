"""What a Trainer counts in a step, or an evaluation, that starts over: once, as in stock's order."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer_runs import Seen, arguments_for, assert_same, both, noting_llama, recorder, token_rows

from ds_vertical.engine.integrations.counted import MOST_PARTS, CountedByTrainer


@dataclass
class Meter:
    """As a script of the user's has it."""

    values: list[float] = field(default_factory=list)


def test_all_that_a_trainers_attributes_lead_to_is_put_back() -> None:
    from transformers import TrainerState

    trainer = SimpleNamespace(seen=3, lost=[1], metrics={"train": collections.defaultdict(list)}, meter=Meter([0.5]))
    trainer.total, trainer.weights = torch.zeros(2), torch.zeros(1 << 17)
    trainer.state = TrainerState(global_step=7, log_history=[{}] * 2)
    trainer.rows = [{"row": index} for index in range(MOST_PARTS)]
    values, lost, said = trainer.meter.values, trainer.lost, []
    noted = CountedByTrainer(trainer, said.append)
    for _ in range(2):
        trainer.seen, trainer.lost, trainer.late = trainer.seen + 1, [], 1
        trainer.metrics["train"]["loss"].append(0.1)
        trainer.meter.values.append(1.5)
        trainer.total += 1
        trainer.state.global_step += 2
        noted.put_back()
        assert (trainer.seen, trainer.lost, trainer.metrics) == (3, [1], {"train": {}})
        assert trainer.lost is lost and trainer.meter.values is values and values == [0.5]
        assert not hasattr(trainer, "late") and trainer.total.tolist() == [0, 0] and trainer.state.global_step == 7
    assert (
        said == ["SimpleNamespace.rows is too large to be put back: what this step's micro-steps count in it counts twice"] * 2
    )
    trainer.weights += 1
    noted.put_back()
    assert said[-2].startswith("SimpleNamespace.weights is too large to be put back")


@pytest.mark.slow
@pytest.mark.parametrize("self_check", [False, True])
def test_a_subclass_counts_each_micro_step_once(tmp_path: Path, self_check: bool) -> None:
    from transformers import Trainer

    class Counting(Trainer):
        num_steps = 0

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.num_steps += 1
            loss = super().training_step(model, inputs, *args, **kwargs)
            self.meter = getattr(self, "meter", Meter())
            self.meter.values.append(loss.item())
            self.total = getattr(self, "total", torch.zeros(())).add_(loss)
            return loss

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.state.num_input_tokens_seen += inputs["input_ids"].numel()
            return super().compute_loss(model, inputs, *args, **kwargs)

        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            found = super().prediction_step(model, inputs, *args, **kwargs)
            self.meter.values.append(found[0].item())
            return found

    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        args = arguments_for(folder, config, eval_strategy="epoch", include_num_input_tokens_seen="all")
        given = {"train_dataset": token_rows(22), "eval_dataset": token_rows(10, seed=2), "callbacks": [recorder(seen)]}
        trainer = Counting(model=noting_llama(), args=args, **given)
        trainer.train()
        seen.more |= {"counted": (trainer.num_steps, trainer.state.num_input_tokens_seen, trainer.meter.values)}
        seen.more["total"] = trainer.total.item()
        seen.more["notes"] = [len(layer.notes) for layer in trainer.model.model.layers]
        return trainer

    stock, vertical = both(tmp_path, train, section={"self_check": self_check})
    assert stock.more["counted"][0] == 22
    assert_same(stock, vertical)
