"""`save_pretrained` writes full weights: of the model, of adapters, of a part, by our call and by the library's own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import llama, lora, lora_config, train
from harness import build_engine, contents, differing, dispose, read_weights, running
from resuming import config_in, model_of
from safetensors.torch import load_file

import ds_vertical
from ds_vertical.errors import ConfigError
from ds_vertical.io import host


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def test_a_model_is_written_whole_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With state due of the step before, tied weights, and weights that half of the memory does not hold."""
    from transformers import AutoModelForCausalLM

    config = lora_config(tmp_path / "ssd", section={"optimizer_delay": 0.5})
    with running(config, lambda: llama(tie_word_embeddings=True), vertical=True) as (engine, model):
        losses = train(engine, range(3))
        expected = contents(engine, model)
    with running(config, lambda: llama(tie_word_embeddings=True), vertical=True) as (engine, model):
        assert train(engine, range(2)) == losses[:2]
        model.save_pretrained(tmp_path / "own")
        with monkeypatch.context() as patch:
            patch.setattr(host, "available_bytes", lambda: 0)
            ds_vertical.save_pretrained(engine, tmp_path / "ours", max_shard_size="5MB")
        model.model.save_pretrained(tmp_path / "part")
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: ds_vertical.save_pretrained(engine, tmp_path / "no"))
        with pytest.raises(RuntimeError, match=r"engine\.save_pretrained\(\): called within engine\.train_batch"):
            train(engine, range(2, 3))
        hook.remove()
        weights = read_weights(model)
        assert sorted(path.suffix for path in (tmp_path / "ours").iterdir() if "scratch" in path.name) == []
        assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
        assert train(engine, range(2, 3)) == losses[2:]
        assert differing(expected, contents(engine, model)) == []
    for folder in ("own", "ours"):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert differing(weights, dict(saved.named_parameters())) == []
    part = weights_in(tmp_path / "part")
    assert differing({name: weights[f"model.{name}"] for name in part}, part) == []


def test_adapters_are_written_alone(tmp_path: Path) -> None:
    """A frozen one, too, which `requires_grad` would leave out; and the base by its own call."""
    from peft import LoraConfig, PeftModel

    def build() -> Any:
        model = lora(rank=8)
        model.add_adapter("kept", LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
        return model

    engine, model = build_engine(lora_config(tmp_path / "ssd"), build, vertical=True, under_zero_init=False)
    try:
        train(engine, range(1))
        ds_vertical.save_pretrained(engine, tmp_path / "ours")
        model.save_pretrained(str(tmp_path / "own"))
        model.get_base_model().save_pretrained(tmp_path / "base")
        weights = read_weights(model)
        gathered = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)  # as Trainer.save_model does
        model.save_pretrained(str(tmp_path / "trainer"), state_dict=gathered)
    finally:
        dispose(engine)
    for folder in ("ours", "own"):
        saved = weights_in(tmp_path / folder)
        assert saved and all("lora" in name for name in saved)
        loaded = PeftModel.from_pretrained(
            lora(rank=8).unload().to(torch.bfloat16), tmp_path / folder, autocast_adapter_dtype=False
        )
        loaded.load_adapter(str(tmp_path / folder / "kept"), "kept", autocast_adapter_dtype=False)
        adapters = {name: weights[name] for name, _ in loaded.named_parameters() if "lora" in name}
        assert differing(adapters, {name: dict(loaded.named_parameters())[name].cpu() for name in adapters}) == []
    assert weights_in(tmp_path / "trainer").keys() == weights_in(tmp_path / "ours").keys()
    assert "model.layers.0.mlp.up_proj.weight" in str(weights_in(tmp_path / "base").keys())
    assert all(tensor.numel() for tensor in weights_in(tmp_path / "base").values())


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, _):
        with pytest.raises(ConfigError, match=r"MixerModel has no save_pretrained of its own; write engine\.save_16bit_model"):
            ds_vertical.save_pretrained(engine, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_the_stock_arm_writes_whole_models_too(tmp_path: Path) -> None:
    config = lora_config(tmp_path / "ssd", params="cpu", optimizer="cpu")
    with running(config, llama, vertical=False) as (engine, model):
        train(engine, range(1))
        ds_vertical.save_pretrained(engine, tmp_path / "out")
        weights = read_weights(model)
    assert differing(weights, weights_in(tmp_path / "out")) == []


def test_a_copy_of_the_model_saves_itself(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    with running(lora_config(tmp_path / "ssd", params="cpu", optimizer="cpu"), llama, vertical=True) as (_, model):
        save = copy.deepcopy({"model": model.config, "call": vars(model)["save_pretrained"]}, {id(model): "the copy"})["call"]
    assert save.__func__ is LlamaForCausalLM.save_pretrained and save.__self__ == "the copy"
