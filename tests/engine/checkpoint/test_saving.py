"""Weights in and out: from_pretrained and save_16bit_model with everything on SSD; checkpoints in host memory."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    MIN_SSD_BYTES,
    base_config,
    build_engine,
    bytes_on_ssd,
    contents,
    counters,
    differing,
    read_weights,
    running,
    small_buffers,
    start_process_group,
)
from models import MixerModel, tiny_gpt2, token_batches
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import ds_vertical

HIDDEN = {"fp32": 512, "bf16": 768}  # the smallest widths whose square matrices are 1 MiB and more


@contextlib.contextmanager
def hugging_face_under(prepared: dict[str, Any]) -> Iterator[None]:
    """from_pretrained partitions models while this block runs."""
    kept = HfDeepSpeedConfig(prepared)
    try:
        yield
    finally:
        del kept
        unset_hf_deepspeed_config()


def ssd_config(folder: Path, dtype: str, gathers: bool) -> dict[str, Any]:
    config = small_buffers(base_config(folder, dtype=dtype, num_micro_batches=1), 4 * HIDDEN[dtype] ** 2)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = gathers
    return config


def from_pretrained(folder: Path, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])


def engine_from_pretrained(source: Path, config: dict[str, Any], dtype: str, vertical: bool) -> tuple[Any, Any]:
    start_process_group()
    config = config | {"vertical_schedule": {"enabled": vertical, "seed": 1}}
    prepared = ds_vertical.prepare(config)
    with hugging_face_under(prepared):
        model = from_pretrained(source, dtype)
    model.train()
    return ds_vertical.initialize(model=model, model_parameters=list(model.parameters()), config=prepared)[0], model


@pytest.mark.parametrize(("dtype", "gathers"), [("fp32", False), ("fp32", True), ("bf16", False)])
def test_from_pretrained_train_save_read_back(
    tmp_path: Path, dtype: str, gathers: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(4)
    original = tiny_gpt2(2, HIDDEN[dtype]).to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    original.save_pretrained(tmp_path / "original")
    ends: dict[bool, dict[str, torch.Tensor]] = {}
    for vertical in (False, True):
        config = ssd_config(tmp_path / "ssd", dtype, gathers)
        engine, model = engine_from_pretrained(tmp_path / "original", config, dtype, vertical)
        assert not differing(dict(original.named_parameters()), read_weights(model))
        assert bytes_on_ssd(model) >= 8 * MIN_SSD_BYTES
        for step in token_batches(2 if dtype == "fp32" else 1, 1):
            engine.train_batch(iter(step))
        ends[vertical] = read_weights(model)
        if vertical:
            assert engine.save_16bit_model(str(tmp_path / "saved"))
            assert not differing(ends[True], read_weights(model)), "saving changed the weights"
        engine.destroy()
    assert not differing(*ends.values())
    assert differing(ends[True], dict(original.named_parameters())), "training changed nothing"
    assert ("gathers although" in capsys.readouterr().out) == (not gathers)
    saved = from_pretrained(tmp_path / "saved", dtype)
    assert not differing(ends[True], dict(saved.named_parameters()))
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["n_layer"] == 2


def test_training_goes_on_after_saving(tmp_path: Path) -> None:
    batches = token_batches(3, 1)
    ends = []
    for saves in (False, True):
        config = ssd_config(tmp_path, "fp32", gathers=False)
        with running(config, partial(MixerModel, 2), vertical=True) as (engine, model):
            engine.train_batch(iter(batches[0]))
            if saves:
                assert engine.save_16bit_model(str(tmp_path / "out"), "weights.bin")
                written = torch.load(tmp_path / "out" / "weights.bin")
                assert not differing(read_weights(model), written)
            for batch in batches[1:]:
                engine.train_batch(iter(batch))
            ends.append(contents(engine, model))
    assert not differing(*ends)


def test_saved_weights_leave_frozen_ones_out_and_keep_tied_ones_tied(tmp_path: Path) -> None:
    def build() -> Any:
        model = tiny_gpt2(2, 128, tied=True)
        model.transformer.wpe.requires_grad_(False)
        return model

    config = base_config(tmp_path, dtype="fp32", params="none", optimizer="cpu")
    with running(config, build, vertical=True) as (engine, model):
        engine.save_16bit_model(str(tmp_path), "all.bin")
        engine.save_16bit_model(str(tmp_path), "trained.bin", exclude_frozen_parameters=True)
        weights = read_weights(model)
    everything, trained = torch.load(tmp_path / "all.bin"), torch.load(tmp_path / "trained.bin")
    assert everything.keys() - trained.keys() == {"transformer.wpe.weight"}
    assert everything.keys() - weights.keys() == {"lm_head.weight"}
    assert everything["lm_head.weight"].data_ptr() == everything["transformer.wte.weight"].data_ptr()
    assert not differing(weights, {name: everything[name] for name in weights})


# ---- DeepSpeed's own checkpoints


def captured(engine: Any, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights and state, and the counters but micro_steps, which DeepSpeed's checkpoints leave out."""
    counts = counters(engine)
    del counts["micro_steps"]
    return contents(engine, model), counts


@pytest.mark.slow
@pytest.mark.parametrize("params", ["cpu", "none"])
def test_checkpoints_in_host_memory(tmp_path: Path, params: str) -> None:
    config = base_config(tmp_path, dtype="fp32", params=params, optimizer="cpu", section={"seed": 1})
    build, batches = partial(MixerModel, 3, dropout=0.1), token_batches(4, 3)
    with running(config, build, vertical=True) as (engine, model):
        for step in batches[:2]:
            engine.train_batch(iter(step))
        saved, counts = captured(engine, model)
        assert engine.save_checkpoint(str(tmp_path / "checkpoint"), client_state={"note": "mine"})
        after_save = [engine.train_batch(iter(step)).item() for step in batches[2:]]
        assert differing(saved, captured(engine, model)[0])
        path, client = engine.load_checkpoint(str(tmp_path / "checkpoint"))
        assert path is not None and client["note"] == "mine"
        found, found_counts = captured(engine, model)
        assert not differing(saved, found) and found_counts == counts
        assert engine.train_batch(iter(batches[2])).item() == after_save[0]
    gc.collect()
    engine, model = build_engine(config, build, vertical=True)  # a new process would do the same
    engine.load_checkpoint(str(tmp_path / "checkpoint"))
    found, found_counts = captured(engine, model)
    assert not differing(saved, found) and found_counts == counts
    assert engine.train_batch(iter(batches[2])).item() == after_save[0]
    engine.destroy()
