"""What a user calls: initialize, prepare, train_batch, eval_batch and the rest, in both arms."""

from __future__ import annotations

import argparse
import base64
import csv
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from harness import (
    assert_identical,
    base_config,
    counters,
    differing,
    read_grads,
    read_weights,
    run_arm,
    run_both,
    running,
    small_buffers,
    start_process_group,
)
from models import MixerModel, next_token_loss, tiny_gpt2, token_batches
from torch import nn
from user_calls import build_model, host_config, initialize, ssd_config

import ds_vertical
from ds_vertical.errors import ConfigError, LoopError

# ---- micro-batches in


def reshaped(batches: list[list[dict[str, Any]]], form: str) -> list[list[Any]]:
    def one(batch: dict[str, Any]) -> Any:
        pair = (batch["input_ids"], batch["labels"])
        return {"dict": batch, "tuple": pair, "list": list(pair), "tensor": batch["input_ids"]}[form]

    return [[one(batch) for batch in step] for step in batches]


@pytest.fixture(scope="module")
def dict_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    config = ssd_config(tmp_path_factory.mktemp("dict"))
    return run_arm(config, build_model, token_batches(2, 2), vertical=False).losses


@pytest.mark.parametrize("form", ["dict", "tuple", "list", "tensor"])
def test_forms_of_micro_batches(tmp_path: Path, dict_losses: list[float], form: str) -> None:
    loss_fn = next_token_loss if form == "tensor" else None
    batches = reshaped(token_batches(2, 2), form)
    stock, vertical = run_both(ssd_config(tmp_path), build_model, batches, loss_fn=loss_fn)
    assert_identical(stock, vertical)
    assert vertical.losses == dict_losses


@pytest.mark.parametrize("vertical", [False, True], ids=["stock", "vertical"])
def test_no_micro_batch_left_touches_nothing(tmp_path: Path, vertical: bool) -> None:
    with running(ssd_config(tmp_path), build_model, vertical=vertical) as (engine, model):
        engine.train_batch(iter(token_batches(1, 2)[0]))
        model.eval()
        weights, counts, rng = read_weights(model), counters(engine), torch.get_rng_state()
        with pytest.raises(StopIteration):
            engine.train_batch(iter([]))
        assert not differing(weights, read_weights(model))
        assert counters(engine) == counts
        assert torch.equal(torch.get_rng_state(), rng)
        assert not model.training
        engine.train_batch(iter(token_batches(1, 2)[0]))
        assert engine.global_steps == 2


def train_until_empty(engine: Any, data: Iterator[Any]) -> list[float]:
    losses = []
    while True:
        try:
            losses.append(engine.train_batch(data).item())
        except StopIteration:
            return losses


def test_a_short_last_batch_is_divided_by_its_own_number(tmp_path: Path) -> None:
    data = token_batches(1, 7)[0]  # M = 4: 4 + 3
    ends: dict[bool, tuple[Any, ...]] = {}
    for vertical in (False, True):
        with running(ssd_config(tmp_path, 4), build_model, vertical=vertical) as (engine, model):
            losses = train_until_empty(engine, iter(data))
            # 7 micro-batches are no multiple of 4: by stock's own count the next boundary would come one too early
            losses.append(engine.train_batch(iter(data)).item())
            ends[vertical] = (losses, counters(engine), read_weights(model), read_grads(engine, model))
    (stock_losses, stock_counts, *stock_tensors), (losses, counts, *tensors) = ends[False], ends[True]
    assert losses == stock_losses and len(losses) == 3
    assert counts == stock_counts
    assert counts["micro_steps"] == 4 + 3 + 4 and counts["global_samples"] == 11 and counts["global_steps"] == 3
    assert not any(differing(a, b) for a, b in zip(stock_tensors, tensors, strict=True))


@pytest.mark.parametrize("vertical", [False, True], ids=["stock", "vertical"])
def test_three_of_four_equal_three_of_three(tmp_path: Path, vertical: bool) -> None:
    batches = token_batches(1, 3)
    short = run_arm(ssd_config(tmp_path, 4), build_model, batches, vertical=vertical)
    full = run_arm(ssd_config(tmp_path, 3), build_model, batches, vertical=vertical)
    assert_identical(full, short)


def test_own_dataloader(tmp_path: Path) -> None:
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 200, (5, 9))]
    ends: dict[bool, tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]] = {}
    for vertical in (False, True):
        config = host_config(enabled=vertical, seed=3)
        engine = initialize(config=config, training_data=data)
        losses = [engine.train_batch().item() for _ in range(2)]  # 6 samples of 5: the second epoch begins
        ends[vertical] = (losses, read_weights(engine.module), counters(engine))
        engine.destroy()
    assert ends[False][0] == ends[True][0]
    assert not differing(ends[False][1], ends[True][1])
    assert ends[False][2] == ends[True][2]


def test_no_data_at_all_says_so() -> None:
    engine = initialize(config=host_config())
    with pytest.raises(ValueError, match="initialize was given no training_data"):
        engine.train_batch()
    engine.destroy()


# ---- what engines report


def test_monitor_scheduler_and_counters(tmp_path: Path) -> None:
    for vertical in (False, True):
        monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": str(vertical)}
        config = ssd_config(tmp_path / "ssd", csv_monitor=monitor)
        run_arm(config, build_model, token_batches(3, 2), vertical=vertical)
    rows = {
        vertical: {path.name: list(csv.reader(path.open())) for path in (tmp_path / str(vertical)).glob("Train_Samples_*.csv")}
        for vertical in (False, True)
    }
    assert rows[True] == rows[False] and set(rows[True]) == {"Train_Samples_lr.csv", "Train_Samples_train_loss.csv"}
    assert [row[0] for row in rows[True]["Train_Samples_lr.csv"]] == ["step", "2", "4", "6"]


def test_start_up_line_and_max_in_cpu_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(ssd_config(tmp_path, max_in_cpu=10**6), build_model, vertical=True) as (_, model):
        printed = capsys.readouterr().out
        on_ssd = sum(p.ds_numel * 4 for p in model.parameters() if p.ds_tensor.final_location == "nvme")
        in_host = sum(p.ds_numel * 4 for p in model.parameters()) - on_ssd
    active = [line for line in printed.splitlines() if "ACTIVE" in line]
    assert len(active) == 1 and on_ssd and f"device 0, host {in_host}, ssd {on_ssd};" in active[0]
    assert "3 layers of 1 block(s) in blocks" in active[0]
    assert "warning: zero_optimization.offload_param.max_in_cpu: 1000000" in printed
    with running(ssd_config(tmp_path), build_model, vertical=True):
        assert "max_in_cpu" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("width", "max_in_cpu", "reason"),
    [
        (64, 0, "(every parameter's shard is under 1048576 bytes, and stays in memory as in stock);"),
        pytest.param(
            512,
            10**9,
            '("zero_optimization.offload_param.max_in_cpu" keeps all in memory, as in stock);',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_start_up_line_says_why_no_parameter_is_on_ssd(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], width: int, max_in_cpu: int, reason: str
) -> None:
    with running(ssd_config(tmp_path, max_in_cpu=max_in_cpu), partial(MixerModel, 2, width), vertical=True) as (_, model):
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "ACTIVE" in line)
        assert f"host {4 * sum(p.ds_numel for p in model.parameters())}, ssd 0 {reason}" in line


@pytest.mark.parametrize(("name", "args"), [("backward", (1,)), ("step", ())])
def test_stocks_own_calls_out_of_turn_are_refused(name: str, args: tuple[Any, ...]) -> None:
    engine = initialize(config=host_config())
    with pytest.raises(LoopError, match=r"there was no engine\(\.\.\.\) in training mode before it"):
        getattr(engine, name)(*args)
    engine.destroy()


# ---- between steps


def gpt2_config(folder: Path) -> dict[str, Any]:
    return small_buffers(base_config(folder, dtype="fp32", num_micro_batches=2, section={"seed": 5}), 1_100_000)


def test_evaluation_and_generation_between_steps(tmp_path: Path) -> None:
    """Train, eval_batch, engine(...), generate, model(...), train: each as in stock, and the training as if alone."""
    steps, (held_out,) = token_batches(2, 2), token_batches(1, 2, seed=9)
    seen: dict[str, dict[str, Any]] = {}

    def look(engine: Any, step: int) -> None:
        model, prompt = engine.module, held_out[0]["input_ids"][:1, :5]
        found: dict[str, Any] = {"eval_batch": engine.eval_batch(iter(held_out)).item()}
        assert model.training
        model.eval()
        found["engine"] = engine(input_ids=prompt).logits
        with torch.no_grad():
            found["model"] = model(input_ids=prompt).logits
            found["generate"] = model.generate(prompt, max_new_tokens=3, do_sample=False)
        model.train()
        assert not found["engine"].requires_grad or type(engine).__name__ == "DeepSpeedEngine"
        seen.setdefault(type(engine).__name__, {})[str(step)] = found

    build = partial(tiny_gpt2, num_layers=2, dropout=0.1)
    stock, vertical = run_both(gpt2_config(tmp_path), build, steps, between=look)
    alone = run_arm(gpt2_config(tmp_path), build, steps, vertical=True)
    assert_identical(stock, vertical)
    assert_identical(alone, vertical)
    for step, found in seen["DeepSpeedEngine"].items():
        ours = seen["VerticalEngine"][step]
        assert ours["eval_batch"] == found["eval_batch"]
        for name in ("engine", "model", "generate"):
            assert torch.equal(ours[name], found[name]), name
        assert torch.equal(ours["engine"], ours["model"])
    assert seen["VerticalEngine"]["0"]["eval_batch"] != seen["VerticalEngine"]["1"]["eval_batch"]


@pytest.mark.parametrize("where", ["hook", "pre_hook"])
def test_hooks_of_the_user_run_once_per_micro_batch(tmp_path: Path, where: str) -> None:
    calls: list[int] = []
    with running(ssd_config(tmp_path, 3), build_model, vertical=True) as (engine, model):
        for index, block in enumerate(model.blocks):
            if where == "hook":
                block.register_forward_hook(lambda *_, index=index: calls.append(index))
            else:
                block.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
        engine.train_batch(iter(token_batches(1, 3)[0]))
        assert sorted(calls) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        calls.clear()
        engine.eval_batch(iter(token_batches(1, 3)[0]))
        assert sorted(calls) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


# ---- configurations


@pytest.mark.parametrize("form", ["dict", "path", "base64", "args", "config_params", "positional"])
def test_forms_of_the_configuration(tmp_path: Path, form: str) -> None:
    config = host_config()
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    kwargs: dict[str, Any] = {
        "dict": {"config": config},
        "path": {"config": str(path)},
        "base64": {"config": encoded},
        "args": {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=0)},
        "config_params": {"config_params": config},
    }.get(form, {})
    if form == "positional":
        start_process_group()
        model = MixerModel(2, 64)
        given = (None, model, None, list(model.parameters()), None, None, None, None, None, None, config)
        engine = ds_vertical.initialize(*given)[0]
    else:
        engine = initialize(**kwargs)
    assert type(engine).__name__ == "VerticalEngine"
    assert engine.train_batch(iter(token_batches(1, 3)[0])).item() > 0
    if form == "args":
        assert kwargs["args"].deepspeed_config == str(path), "the caller's args were changed"
    engine.destroy()


def test_no_configuration_and_two_configurations_are_refused(tmp_path: Path) -> None:
    args = argparse.Namespace(deepspeed_config=str(tmp_path / "ds.json"))
    with pytest.raises(ConfigError, match="pass one: config=ds_vertical.prepare"):
        initialize(config=host_config(), args=args)
    with pytest.raises(ConfigError, match="no configuration given"):
        initialize()


@pytest.mark.parametrize("section", [None, {"enabled": False}], ids=["absent", "disabled"])
def test_without_the_section_the_engine_is_stocks(section: dict[str, Any] | None) -> None:
    config = host_config()
    del config["vertical_schedule"]
    engine = initialize(config=config if section is None else config | {"vertical_schedule": section})
    assert type(engine) is deepspeed.DeepSpeedEngine
    batches = token_batches(2, 3)
    loss = engine.train_batch(iter(batches[0]))
    assert loss.shape == () and loss.dtype == torch.float32 and engine.global_steps == 1
    assert engine.eval_batch(iter(batches[0])).item() < loss.item()
    engine.backward(engine(**batches[1][0]))  # stock's own calls are still there
    assert engine.micro_steps == 3
    engine.destroy()


def test_near_miss_of_the_sections_name_is_refused() -> None:
    config = host_config()
    config["vertical_shedule"] = config.pop("vertical_schedule")
    for call in (partial(initialize, config=config), partial(ds_vertical.prepare, config)):
        with pytest.raises(ConfigError, match='vertical_shedule: unknown section; did you mean "vertical_schedule"'):
            call()


# ---- prepare


def test_prepare_gives_each_run_a_folder_and_a_prepared_config_back(tmp_path: Path) -> None:
    start_process_group()
    config = base_config(tmp_path)
    first, second = ds_vertical.prepare(config), ds_vertical.prepare(config)
    folders = [each["zero_optimization"]["offload_param"]["nvme_path"] for each in (first, second)]
    assert len({*folders}) == 2 and all(Path(folder).parent == tmp_path for folder in folders)
    assert config["zero_optimization"]["offload_param"]["nvme_path"] == str(tmp_path), "the caller's config was changed"
    for prepared, folder in zip((first, second), folders, strict=True):
        assert prepared["zero_optimization"]["offload_optimizer"]["nvme_path"] == folder
        assert ds_vertical.prepare(prepared) == prepared


def test_levels_that_the_ranks_do_not_make_are_refused_ahead_of_all_else(tmp_path: Path) -> None:
    start_process_group()
    config = ssd_config(tmp_path)
    config["zero_optimization"]["zero_hpz_partition_size"] = 2
    for call in (partial(initialize, config=config), partial(ds_vertical.prepare, config)):
        with pytest.raises(ConfigError, match=r"zero_hpz_partition_size .*: got 2, .* divide the number of ranks, 1;"):
            call()
    assert not list(tmp_path.iterdir())


def build_under(config: dict[str, Any]) -> nn.Module:
    start_process_group()
    with deepspeed.zero.Init(config_dict_or_path=config):
        return MixerModel(2)


def test_a_model_built_under_an_unprepared_path_is_refused(tmp_path: Path) -> None:
    config = ssd_config(tmp_path)
    model = build_under({key: value for key, value in config.items() if key != "vertical_schedule"})
    for given in (config, ds_vertical.prepare(config)):
        with pytest.raises(ConfigError, match=r"config = ds_vertical\.prepare\(config\)"):
            ds_vertical.initialize(model=model, model_parameters=list(model.parameters()), config=given)


def test_a_model_built_under_another_runs_path_is_refused(tmp_path: Path) -> None:
    config = ssd_config(tmp_path)
    model = build_under(ds_vertical.prepare(config))
    with pytest.raises(ConfigError, match="outside the folder of this run"):
        ds_vertical.initialize(model=model, model_parameters=list(model.parameters()), config=ds_vertical.prepare(config))


# ---- what is compiled


def node_names(loss: torch.Tensor) -> set[str]:
    """Of the graph above a loss, up to the last layer's output."""
    found, left = set[str](), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            found.add(node.name())
            left += [later for later, _ in node.next_functions]
    return found


@pytest.mark.parametrize("order", ["vertical", "horizontal"])
def test_an_engine_has_the_compiled_joints_and_sums_in_pairs_where_layers_do_not_take_turns(order: str) -> None:
    names: set[str] = set()

    def note(outputs: Any, batch: Any) -> torch.Tensor:
        loss = next_token_loss(outputs, batch)
        names.update(node_names(loss))
        return loss

    engine = initialize(config=host_config(order=order))
    engine.train_batch(iter(reshaped(token_batches(1, 3), "tensor")[0]), note)
    joints = {name for name in names if "Joint" in name}
    assert joints
    assert not any("_IdentityNodeBackward" in name for name in joints)
    assert engine._gradients.arrivals.pairs is (order == "vertical")


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("train_batch_size",), "auto", "; remove the key: DeepSpeed's default"),
        (("gradient_clipping",), "auto", '; write "gradient_clipping": 1.0'),
        (("gradient_accumulation_steps",), "auto", '; write "gradient_accumulation_steps": 16'),
        (("optimizer", "params", "lr"), "auto", '; write "lr": 1e-4'),
        (("bf16",), {"enabled": "auto"}, '; write "enabled": true'),
    ],
)
def test_what_only_a_trainer_fills_in_is_refused_before_anything_is_made(
    tmp_path: Path, path: tuple[str, ...], value: Any, told: str
) -> None:
    config = ssd_config(tmp_path / "swap")
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ConfigError) as refusal:
        ds_vertical.initialize(model=build_model(), config=config)
    said = str(refusal.value)
    assert 'got "auto", which only Hugging Face\'s Trainer fills in' in said and told in said
    assert not (tmp_path / "swap").exists()
