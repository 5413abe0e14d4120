"""What other libraries do that layer-major order cannot follow is refused by name, with what to write instead.

Lightning and bitsandbytes are no dependencies of this project: where they are not installed, their tests are skipped
(`pip install --no-deps lightning pytorch-lightning lightning-utilities torchmetrics bitsandbytes`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import base_config, small_buffers, start_process_group
from trainer_runs import Seen, arguments_for, patched, run_arm, tiny_llama, token_rows
from words import tokenizer

import ds_vertical
from ds_vertical.errors import ConfigError, LoopError

pytestmark = pytest.mark.slow


def refusal(folder: Path, train: Callable[[Path, dict[str, Any], Seen], Any], kind: type[Exception]) -> str:
    """What a run of Trainer ends with; it has logged no loss."""
    seen = Seen()

    def watched(at: Path, config: dict[str, Any], _: Seen) -> Any:
        return train(at, config, seen)

    with pytest.raises(kind) as raised:
        run_arm(folder, vertical=True, train=watched)
    assert not [log for log in seen.logs if "loss" in log]
    return str(raised.value)


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_trainers_that_generate_in_their_micro_steps_are_refused(tmp_path: Path, name: str) -> None:
    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        import trl
        from datasets import Dataset
        from trainer_runs import recorder

        more = {"num_generations": 2, "max_completion_length": 4, "beta": 0.0, "gradient_checkpointing": False}
        args = arguments_for(folder, config, getattr(trl, f"{name}Config"), **more)
        data = Dataset.from_dict({"prompt": [f"w{row} w2 w3" for row in range(16)]})
        trainer = getattr(trl, f"{name}Trainer")(
            model=tiny_llama(vocab=128),
            reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
            args=args,
            train_dataset=data,
            processing_class=tokenizer(),
            callbacks=[recorder(seen)],
        )
        trainer.train()
        return trainer

    said = refusal(tmp_path, train, LoopError)
    assert said.startswith(f"{name}Trainer: its micro-steps generate text") and "vertical_schedule.enabled to false" in said


def test_each_of_trls_trainers_that_generates_is_known_by_name() -> None:
    """Of the installed TRL, by its source: a trainer that makes the model generate in its steps."""
    import ast

    import trl

    from ds_vertical.engine.integrations import trainer

    found = set()
    for path in Path(trl.__file__).parent.rglob("*_trainer.py"):
        for each in ast.parse(path.read_text()).body:
            if isinstance(each, ast.ClassDef) and each.name.endswith("Trainer") and _generates(each):
                found.add(each.name)
    offline = {"ORPOTrainer", "CPOTrainer"}  # they generate for a table of an evaluation, which nobody asks for by default
    assert found - offline <= set(trainer._GENERATING) and {"GRPOTrainer", "RLOOTrainer"} <= found


def _generates(cls: Any) -> bool:
    import ast

    calls = (each.func for each in ast.walk(cls) if isinstance(each, ast.Call))
    return any(isinstance(call, ast.Attribute) and call.attr == "generate" for call in calls)


def test_a_trainer_that_compiles_the_model_is_refused(tmp_path: Path) -> None:
    def train(folder: Path, config: dict[str, Any], seen: Seen) -> Any:
        from trainer_runs import recorder
        from transformers import Trainer

        args = arguments_for(folder, config, torch_compile=True, torch_compile_backend="aot_eager")
        trainer = Trainer(model=tiny_llama(), args=args, train_dataset=token_rows(16), callbacks=[recorder(seen)])
        trainer.train()
        return trainer

    said = refusal(tmp_path, train, RuntimeError)
    assert "leave torch_compile out of TrainingArguments" in said and "block.compile()" in said


@pytest.mark.parametrize("package", ["lightning.fabric", "lightning.pytorch", "lightning_fabric", "pytorch_lightning"])
def test_lightnings_strategy_is_refused(tmp_path: Path, package: str) -> None:
    """Its own code up to `deepspeed.initialize` and `deepspeed.zero.Init`; its trainers run it on CUDA alone."""
    strategies = pytest.importorskip(f"{package}.strategies.deepspeed")
    start_process_group()
    config = small_buffers(base_config(tmp_path))
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)))

    def engine_of(given: dict[str, Any]) -> Any:
        strategy = strategies.DeepSpeedStrategy(config=given, parallel_devices=[torch.device("cpu")])
        make = getattr(strategy, "_initialize_engine", None) or strategy._setup_model_and_optimizer
        return make(model, None)

    with patched():
        with pytest.raises(
            ConfigError, match=r"vertical_schedule: Lightning's DeepSpeedStrategy drives this engine.*Accelerate"
        ):
            engine_of(copy.deepcopy(config))
        strategy = strategies.DeepSpeedStrategy(config=copy.deepcopy(config))
        strategy._config_initialized = True  # what its trainers fill in ahead of this
        with pytest.raises(ConfigError, match="Lightning's DeepSpeedStrategy"):
            with (getattr(strategy, "model_sharded_context", None) or strategy.module_sharded_context)():
                pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
def test_quantised_parameters_are_refused_by_class(tmp_path: Path, kind: str) -> None:
    modules = pytest.importorskip("bitsandbytes.nn")
    start_process_group()
    model = tiny_llama()
    projection = model.model.layers[1].mlp.up_proj
    options = {"has_fp16_weights": False} if kind == "Linear8bitLt" else {}
    quantised = getattr(modules, kind)(projection.in_features, projection.out_features, bias=False, **options)
    quantised.load_state_dict(projection.state_dict())
    model.model.layers[1].mlp.up_proj = quantised.requires_grad_(False).to("cpu")
    assert type(quantised.weight).__module__.startswith("bitsandbytes")
    message = r"model\.layers\.1\.mlp\.up_proj\.weight: got a \w+, which bitsandbytes quantises.*without quantization_config"
    trained = [param for param in model.parameters() if param.requires_grad]
    with pytest.raises(ConfigError, match=message):
        ds_vertical.initialize(model=model, model_parameters=trained, config=base_config(tmp_path))
    assert list(tmp_path.iterdir()) == []
