"""What would train silently wrong is refused: with the setting's name, before anything is allocated where that can be known,
and otherwise with the engine as good as new."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import ragged_batches
from harness import base_config, build_engine, start_process_group
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

import ds_vertical
from ds_vertical.compat import accelerator
from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import load_section
from ds_vertical.engine.acco.refusals import refuse_acco
from ds_vertical.errors import ConfigError, LayerError

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "vocab_size": 300,
}


def tiny(model_type: str, **settings: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **(BART if model_type == "bart" else SIZES), **settings)
    auto = AutoModelForSeq2SeqLM if model_type == "bart" else AutoModelForCausalLM
    return auto.from_config(config)


def with_layerdrop_in_a_module() -> nn.Module:
    model = tiny("opt", ffn_dim=32, word_embed_proj_dim=32)
    model.model.decoder.layerdrop = 0.25
    return model


def shared_module() -> nn.Module:
    model = tiny("llama")
    model.model.layers[2].mlp = model.model.layers[0].mlp
    return model


# ---- known at initialize


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tiny("opt", ffn_dim=32, word_embed_proj_dim=32, layerdrop=0.1), r"model\.config\.layerdrop: got 0\.1"),
        (lambda: tiny("bart", encoder_layerdrop=0.2), r"model\.config\.encoder_layerdrop: got 0\.2"),
        (lambda: tiny("bart", decoder_layerdrop=0.2), r"model\.config\.decoder_layerdrop: got 0\.2"),
        (with_layerdrop_in_a_module, r"model\.model\.decoder\.layerdrop: got 0\.25"),
        (
            lambda: tiny("mixtral", num_local_experts=2, output_router_logits=True),
            r"model\.config\.output_router_logits: got True",
        ),
        (lambda: tiny("llama", output_hidden_states=True), r"model\.config\.output_hidden_states: got True"),
        (
            lambda: tiny("llama", attn_implementation="eager", output_attentions=True),
            r"model\.config\.output_attentions: got True",
        ),
        (shared_module, r"'model\.layers\.2' shares the module .* with 'model\.layers\.0'"),
        (lambda: nn.Linear(8, 8), r"vertical_schedule\.layers: no stack of repeated modules"),
    ],
)
def test_settings_are_refused_before_anything_exists(tmp_path: Path, build: Callable[[], nn.Module], message: str) -> None:
    assert_refused(tmp_path, build(), message)


@pytest.mark.parametrize("name", ["Params4bit", "Int8Params"])
def test_quantised_bases_are_refused_by_class(tmp_path: Path, name: str) -> None:
    """As bitsandbytes names its classes; the package itself is not installed here."""
    start_process_group()
    model = tiny("llama")
    quantised = type(name, (nn.Parameter,), {})
    model.model.layers[1].mlp.up_proj.weight = quantised(torch.zeros(32, 32, dtype=torch.uint8), requires_grad=False)
    message = rf"model\.layers\.1\.mlp\.up_proj\.weight: got a {name}, which bitsandbytes.*without quantization_config"
    with pytest.raises(ConfigError, match=message):
        ds_vertical.initialize(model=model, model_parameters=list(model.parameters()), config=base_config(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_frozen_whole_is_refused(tmp_path: Path) -> None:
    start_process_group()
    model = tiny("llama").requires_grad_(False)
    with pytest.raises(ConfigError, match="none of the model's parameters requires a gradient"):
        ds_vertical.initialize(model=model, config=base_config(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["model.blocks"], r"vertical_schedule\.layers: got 'model\.blocks', which the model LlamaForCausalLM does not have"),
        (["model.layers", "model.layers.1"], r"vertical_schedule\.layers: names 'model\.layers\.1' twice"),
    ],
    ids=str,
)
def test_wrong_paths_are_refused_before_anything_exists(tmp_path: Path, layers: list[str], message: str) -> None:
    assert_refused(tmp_path, tiny("llama"), message, layers=layers)


def assert_refused(folder: Path, model: nn.Module, message: str, **section: Any) -> None:
    """LayerError from initialize; no folder, file, partitioned parameter or changed forward is left behind."""
    start_process_group()
    config = base_config(folder, section={"enabled": True, **section})
    hooks = hooks_of(model)
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    with pytest.raises(LayerError, match=message):
        ds_vertical.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    assert list(folder.iterdir()) == []
    assert not any(hasattr(param, "ds_id") for param in model.parameters())
    assert hooks_of(model) == hooks
    assert [module.__dict__.get("forward") for module in model.modules()] == forwards


def hooks_of(model: nn.Module) -> list[Any]:
    return [(list(module._forward_pre_hooks), list(module._forward_hooks)) for module in model.modules()]


def test_the_same_setting_is_allowed_with_the_section_disabled(tmp_path: Path) -> None:
    """The refusals are about layer-major order only."""
    start_process_group()
    config = base_config(tmp_path, params="cpu", optimizer="cpu", dtype="fp32", section={"enabled": False})
    model = tiny("llama", output_hidden_states=True)
    engine, *_ = ds_vertical.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    try:
        assert engine.train_batch(iter(ragged_batches(1, 3)[0])) > 0
    finally:
        engine.destroy()


# ---- known only when a step runs


def settings_of(folder: Path) -> dict[str, Any]:
    return base_config(folder, dtype="fp32", params="cpu", optimizer="cpu")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, nn.Module]]:
    engine, model = build_engine(
        settings_of(tmp_path_factory.mktemp("llama")), lambda: tiny("llama", use_cache=False), vertical=True
    )
    yield engine, model
    engine.destroy()


@pytest.mark.parametrize("flag", ["output_router_logits", "output_hidden_states", "output_attentions", "use_cache"])
def test_flags_in_a_batch_are_refused(llama: tuple[Any, nn.Module], flag: str) -> None:
    batches = [dict(batch) for batch in ragged_batches(1, 3)[0]]
    batches[1][flag] = True
    assert_step_refused(*llama, batches, rf"batch\['{flag}'\]: got True")
    batches[1][flag] = False
    if flag != "output_router_logits":  # which llama does not take
        assert llama[0].train_batch(iter(batches)) > 0


def test_a_kv_cache_that_the_code_asks_for_is_refused(llama: tuple[Any, nn.Module]) -> None:
    engine, model = llama
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | {"use_cache": True}), with_kwargs=True)
    try:
        message = r"block model\.layers\.0 got a DynamicCache.*model\.config\.use_cache = False"
        assert_step_refused(engine, model, ragged_batches(1, 3)[0], message)
    finally:
        hook.remove()
    assert engine.train_batch(iter(ragged_batches(1, 3)[0])) > 0


CHECKPOINTING = "ds_vertical: the model's gradient checkpointing is switched off (4 modules): the schedule recomputes"
CACHE = "ds_vertical: model.config.use_cache is set to False"


def test_checkpointing_and_caches_are_switched_off_with_a_line(
    tmp_path: Path, llama: tuple[Any, nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the engine is built, and where somebody switches them on again; the numbers are those without."""

    def checkpointing() -> nn.Module:
        model = tiny("llama")
        model.activation_checkpointing_enable()
        assert model.config.use_cache is True
        return model

    batches = ragged_batches(2, 3)
    engine, _ = build_engine(settings_of(tmp_path), lambda: tiny("llama", use_cache=False), vertical=True)
    expected = [engine.train_batch(iter(step)).item() for step in batches]
    engine.destroy()
    assert CHECKPOINTING not in capsys.readouterr().out
    engine, model = build_engine(settings_of(tmp_path), checkpointing, vertical=True)
    assert not model.is_activation_checkpointing and model.config.use_cache is False
    assert (said := capsys.readouterr().out).count(CHECKPOINTING) == said.count(CACHE) == 1
    assert engine.train_batch(iter(batches[0])).item() == expected[0]
    assert CHECKPOINTING not in (said := capsys.readouterr().out) and CACHE not in said
    model.activation_checkpointing_enable()
    model.config.use_cache = True
    assert engine.train_batch(iter(batches[1])).item() == expected[1]
    assert (said := capsys.readouterr().out).count(CHECKPOINTING) == said.count(CACHE) == 1
    engine.destroy()


def assert_step_refused(engine: Any, model: nn.Module, batches: list[Any], message: str) -> None:
    """LayerError from train_batch; counters and every forward are as before."""
    names = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
    before = [getattr(engine, name) for name in names]
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    with pytest.raises(LayerError, match=message):
        engine.train_batch(iter(batches))
    assert [getattr(engine, name) for name in names] == before
    assert [module.__dict__.get("forward") for module in model.modules()] == forwards
    assert torch.is_grad_enabled()
    assert all(param.grad is None for param in model.parameters())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.spoils = ""

    def forward(self, hidden: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
        if self.spoils == "hidden":
            hidden.add_(1)
        elif self.spoils == "side":
            side.mul_(2)
        return hidden + torch.tanh(self.linear(hidden)) * side


class Unruly(nn.Module):
    """Runs its blocks in the order given by `order`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.order = [0, 1, 2]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden, side = self.embed(inputs), inputs.mean(-1, keepdim=True)
        for index in self.order:
            hidden = self.blocks[index](hidden, side)
        return hidden.square().mean()


def batches_of_inputs(num_steps: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(2, 3 + index, 4, generator=generator) for index in range(3)] for _ in range(num_steps)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of a run in which nothing was refused."""
    engine, _ = build_engine(settings_of(tmp_path_factory.mktemp("undisturbed")), Unruly, vertical=True)
    try:
        return [engine.train_batch(iter(step)).item() for step in batches_of_inputs(3)]
    finally:
        engine.destroy()


IN_PLACE = r"block blocks\.1 writes one of its inputs in place.*write a copy"


@pytest.mark.parametrize(
    ("order", "spoils", "message"),
    [
        ([1, 0, 2], "", r"the model called block blocks\.1 out of turn.*order of execution in vertical_schedule\.layers"),
        ([0, 2], "", r"the model called block blocks\.2 out of turn"),
        ([0, 0, 1, 2], "", r"the model called block blocks\.0 out of turn"),
        ([0, 1, 2, 2], "", r"the model called a block once more after its last layer"),
        ([0, 1, 2, 0], "", r"the model called a block once more after its last layer"),
        ([0, 1], "", r"the model's forward ended before block blocks\.2"),
        ([], "", r"the model's forward ended before block blocks\.0"),
        ([0, 1, 2], "hidden", IN_PLACE),
        ([0, 1, 2], "side", IN_PLACE),
    ],
    ids=str,
)
def test_unruly_forwards_are_refused_and_leave_the_engine_good(
    tmp_path: Path, undisturbed: list[float], order: list[int], spoils: str, message: str
) -> None:
    engine, model = build_engine(settings_of(tmp_path), Unruly, vertical=True)
    assert isinstance(model, Unruly)
    steps = batches_of_inputs(3)
    try:
        losses = [engine.train_batch(iter(steps[0])).item()]
        model.order, model.blocks[1].spoils = order, spoils
        assert_step_refused(engine, model, [batch.clone() for batch in steps[1]], message)
        model.order, model.blocks[1].spoils = [0, 1, 2], ""
        losses += [engine.train_batch(iter(step)).item() for step in steps[1:]]
    finally:
        engine.destroy()
    assert losses == undisturbed


def test_acco_with_one_rank_is_refused(tmp_path: Path) -> None:
    start_process_group()
    config = base_config(tmp_path, num_micro_batches=2, params="cpu", optimizer="cpu", section={"acco": {}})
    with pytest.raises(ConfigError, match=r'vertical_schedule\.acco: got \{"copies": "rank"\} with one rank, .*; remove it'):
        ds_vertical.prepare(config)


def test_acco_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead of anything that a GPU would do, so that the device's name is all that is put in its place."""
    section = load_section({"vertical_schedule": {"acco": {}}})
    assert section is not None
    monkeypatch.setattr(accelerator, "device_name", lambda: "cuda")
    with pytest.raises(ConfigError, match=r'got \{"copies": "rank"\} on cuda; its copies of the weights work on the CPU alone'):
        refuse_acco(resolve(section), {})
