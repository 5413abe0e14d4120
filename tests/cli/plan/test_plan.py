"""`ds-vertical plan`: the command, its JSON, and the DeepSpeed JSON that it writes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from harness import dispose, start_process_group
from places import ROOT
from transformers import AutoConfig, AutoModelForCausalLM

import ds_vertical
from ds_vertical.cli import main
from ds_vertical.cli.plan import counted_specs, fake_run
from ds_vertical.cli.plan.command import plan_lines
from ds_vertical.config.cross_check import check
from ds_vertical.config.deepspeed_keys import AIO
from ds_vertical.config.section import load_section
from ds_vertical.engine import machine_cache
from ds_vertical.errors import ConfigError, CostsError
from ds_vertical.model import hf
from ds_vertical.planner import machine as profile
from ds_vertical.planner import memory_budget, search
from ds_vertical.planner.candidate import Candidate, Choice
from ds_vertical.planner.linear_program import LpProblem
from ds_vertical.planner.model_shape import ModelShape, Seconds
from ds_vertical.planner.search import PlanError
from ds_vertical.types import Tier

SHAPES = ROOT / "configs" / "models"


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    status = main.main(["plan", *options])
    return status, *capsys.readouterr()


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    status, out, err = run(capsys, *options, "--json")
    assert status == 0, err
    return json.loads(out)


# ---- the model


SLOW_SHAPES = [pytest.param(name, marks=pytest.mark.slow) for name in hf.shape_names() if name != "gpt_13m"]


@pytest.mark.parametrize("name", ["gpt_13m", *SLOW_SHAPES])
def test_the_specs_that_are_shipped_are_those_of_the_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted again: `python -m ds_vertical.cli.plan.counted_specs` where they are not. Others have none, and none has one with
    another major version of transformers."""
    path = hf.SHAPES / f"{name}.json"
    fields = hf.read_fields(path)
    length = counted_specs.default_length(fields)
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)  # ZeRO-3 puts its own there when a test trains
    assert counted_specs.counted_spec(path, fields, length, "bf16") == fake_run.read_spec(name, fields, length, "bf16")
    others = (fields, length // 2, "bf16"), (fields, length, "fp32"), ({**fields, "x": 1}, length, "bf16")
    assert [counted_specs.counted_spec(path, *other) for other in others] == [None] * 3
    assert counted_specs.counted_spec(Path("elsewhere") / path.name, fields, length, "bf16") is None
    relative = Path(os.path.relpath(path))
    assert counted_specs.counted_spec(relative, fields, length, "bf16") is not None
    monkeypatch.setattr(counted_specs.metadata, "version", lambda _: "99.1")
    assert counted_specs.counted_spec(path, fields, length, "bf16") is None


@pytest.mark.parametrize("name", ["gpt_13m", "llama_3_8b"])
def test_the_spec_has_the_models_own_sizes(name: str) -> None:
    fields = hf.read_fields(SHAPES / f"{name}.json")
    spec = fake_run.read_spec(name, fields, 64, "bf16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(SHAPES / f"{name}.json"))
    assert spec.num_elements == sum(param.numel() for param in model.parameters())
    assert len(spec.block_elements) == model.config.num_hidden_layers
    hidden = model.config.hidden_size
    assert spec.passed_bytes == 64 * hidden * 2
    # Two operations for each weight and token, and the products of attention.
    attention = 2 * 64 * 64 * hidden * 2 / 2
    assert spec.block_flops == pytest.approx(2 * 64 * spec.block_elements[0] + attention, rel=0.02)
    assert spec.head_flops == pytest.approx(2 * 64 * hidden * model.config.vocab_size, rel=0.02)
    (menu,) = spec.menus
    points = {point.policy: point for point in menu.points if point.outputs is None}
    down = 2 * 64 * hidden * model.config.intermediate_size  # no gradient reads what the MLP's last product makes
    assert menu.num_blocks == len(spec.block_elements) and menu.flops == pytest.approx(spec.block_flops)
    assert points["free"].num_bytes == 0 and points["free"].flops == pytest.approx(down)
    assert points["products"].flops == points["everything"].flops == menu.flops
    assert points["everything"].num_bytes < spec.block_saved_bytes  # which has the block's input, too
    heads = {"gpt_13m": 3 + 1 + 4, "llama_3_8b": 1.5 + 1 + 7}[name]  # q, k, v; attention's product; up (and gate), in widths
    attention = 1
    assert points["products"].num_bytes == (heads + attention) * 64 * hidden * 2


def test_what_autograd_keeps_of_a_block_is_what_it_keeps_in_a_real_one() -> None:
    fields = hf.read_fields(SHAPES / "gpt_13m.json")
    spec = fake_run.read_spec("gpt_13m", fields, 128, "fp32")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**fields, "use_cache": False}))
    block = model.get_submodule("gpt_neox.layers.0")
    kept: dict[int, int] = {}
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    alive = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    own = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return own(*args, **kwargs)

    block.forward = forward
    model(input_ids=torch.zeros(1, 128, dtype=torch.long))
    assert sum(kept.values()) == pytest.approx(spec.block_saved_bytes, rel=0.35)


def test_a_configuration_without_a_longest_sequence_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """-1 positions, as XLNet's configuration has it, are none: c81cdc9 planned for sequences of -1 tokens."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 300}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "max_position_embeddings": -1, **sizes}))
    options = ["--model", str(path), "--machine", "a100_server", "--tokens-per-step", "8192"]
    assert planned(capsys, *options)["model"]["sequence_length"] == 2048
    assert planned(capsys, *options, "--sequence-length", "4096")["model"]["sequence_length"] == 4096


# ---- machines


@pytest.mark.parametrize("name", profile.shipped())
def test_shipped_machines_are_read_and_say_what_they_assume(name: str) -> None:
    found = profile.read_profile(name)
    assert found.assumed and found.date is None and all(found.capacity.values())
    assert {"bf16", "fp16", "fp32"} == set(found.flops_per_s) and not found.machine.one_memory


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"capacity": []}, "capacity: got"),
        ({"capacity": {"host_bytes": "many"}}, "capacity.host_bytes: got 'many'"),
        ({"rates": {"bf16_flops_per_s": -1}}, "rates.bf16_flops_per_s: got -1"),
        ({"rates": {"process_bytes": 0}}, "rates.process_bytes: got 0; write bytes, or null"),
        ({"machine": {}}, "machine.ssd_read_bytes_per_s: missing"),
    ],
)
def test_a_broken_machine_is_refused_by_its_key(tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    report = json.loads((profile.SHIPPED / "a100_server.json").read_text()) | change
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(report))
    with pytest.raises(CostsError, match=fault):
        profile.read_profile(str(path))


def test_limits_are_kept_per_disk_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_VERTICAL_CACHE", str(tmp_path / "cache"))
    assert machine_cache.cached_report(tmp_path) is None
    path = machine_cache.keep_report({"date": "today"}, tmp_path)
    assert machine_cache.cached_report(tmp_path / "not" / "yet" / "there") == {"date": "today"}
    machine_cache.keep_report({"date": "tomorrow"}, tmp_path)
    assert machine_cache.cached_report(tmp_path) == {"date": "tomorrow"} and list(path.parent.iterdir()) == [path]
    other = machine_cache.report_path("/dev/shm")
    assert other != path and other.parent == path.parent
    path.write_text("{")
    assert machine_cache.cached_report(tmp_path) is None


def test_training_uses_the_file_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_VERTICAL_LIMITS", "")
    assert machine_cache.training_report(tmp_path) is None
    file = tmp_path / "limits.json"
    file.write_text('{"date": "now"}')
    monkeypatch.setenv("DS_VERTICAL_LIMITS", str(file))
    assert machine_cache.training_report(tmp_path) == {"date": "now"}
    monkeypatch.setenv("DS_VERTICAL_LIMITS", str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="DS_VERTICAL_LIMITS=.*none.json"):
        machine_cache.training_report(tmp_path)


# ---- the command


def test_a_plan_for_8b_on_a_desktop_writes_a_json_that_deepspeed_and_the_section_accept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ds.json"
    options = ["--model", "llama_3_8b", "--tokens-per-step", "65536", "--machine", "rtx4090_desktop"]
    status, shown, err = run(capsys, *options, "--nvme-path", str(tmp_path), "--out", str(out))
    assert status == 0, err
    phrases = ("llama_3_8b: 8.03 G parameters", "assumed, not measured", "bound", "TB written a day", "instead: ", "host    ")
    assert all(phrase in shown for phrase in phrases)
    config = json.loads(out.read_text())
    DeepSpeedConfig(dict(config))
    section = load_section(config)
    assert section is not None and check(config, section) == []
    assert section.optimizer_host_share, "the step without takes a quarter longer"
    batch = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert batch * 2048 == 65536
    assert config["zero_optimization"]["offload_param"].get("buffer_size", 1 << 40) >= 128256 * 4096
    assert section.prefetch_layers is not None and section.optimizer_delay is not None


@pytest.mark.slow
def test_a_plan_for_several_ssds_has_their_rates_together_and_writes_their_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same rates as one SSD that is twice as fast."""
    rates = json.loads((ROOT / "ds_vertical" / "planner" / "machines" / "rtx4090_desktop.json").read_text())
    fast = json.loads(json.dumps(rates))
    for key in [key for key in fast["machine"] if key.startswith("ssd_") and key.endswith("bytes_per_s")]:
        fast["machine"][key] *= 2
    fast["capacity"]["ssd_bytes"] *= 2
    kept = {"/ssd0": rates, "/ssd1": rates, "/fast": fast}
    monkeypatch.setattr("ds_vertical.cli.plan.command.cached_report", lambda folder: kept.get(str(folder)))
    monkeypatch.setattr("ds_vertical.cli.plan.command.disks_of", lambda folders: range(len(folders)))
    monkeypatch.setattr("ds_vertical.cli.plan.command.time_pieces", lambda *_: Seconds(2e-4, 4e-4, 1e-5, 1e-5, 6e-4))
    options = ("--model", "gpt_101m", "--tokens-per-step", "8192", "--micro-batch-size", "2", "--host-memory", "1.8G")
    two, one = planned(capsys, *options, "--nvme-path", "/ssd0", "/ssd1"), planned(capsys, *options, "--nvme-path", "/fast")
    assert two["config"]["zero_optimization"]["offload_optimizer"]["device"] == "nvme" and two["resource"].startswith("ssd")
    assert (two["step_s"], two["ssd_bytes"]) == (pytest.approx(one["step_s"]), one["ssd_bytes"])
    assert two["config"]["vertical_schedule"].pop("nvme_paths") == ["/ssd0", "/ssd1"]
    assert "nvme_paths" not in one["config"]["vertical_schedule"]
    paths = json.dumps(two["config"]).replace("/ssd0", "/fast")
    assert json.loads(paths) == one["config"]
    status, _, err = run(capsys, *options, "--nvme-path", "/ssd0", "/not_measured")
    assert status == 2 and "has not been measured" in err


@pytest.mark.parametrize("slow_ssd", [True, False])
def test_what_a_plan_writes_trains_as_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str], slow_ssd: bool) -> None:
    """With so little memory that the state rests on SSD, a part in memory where the SSD is slow. What runs is event for event
    the schedule that the plan simulated, with as much state in memory."""
    rates = {key: value for key, value in asdict(profile.read_profile("a100_server").machine).items()}
    rates |= {"one_memory": True, "copy_in_bytes_per_s": None, "copy_out_bytes_per_s": None}
    if slow_ssd:
        rates |= {f"ssd_{way}_bytes_per_s": 3e8 for way in ("read", "write")}
        rates |= {f"ssd_{way}_together_bytes_per_s": 2e8 for way in ("read", "write")}
    report = {"machine": rates, "capacity": {"ssd_bytes": 1e12}, "rates": {"fp32_flops_per_s": 1e11}}
    (tmp_path / "machine.json").write_text(json.dumps(report))
    out, ssd = tmp_path / "ds.json", tmp_path / "ssd"
    options = ["--model", "gpt_13m", "--tokens-per-step", "64", "--sequence-length", "16", "--micro-batch-size", "1"]
    options += ["--machine", str(tmp_path / "machine.json"), "--nvme-path", str(ssd), "--dtype", "fp32", "--clip", "0"]
    found = planned(capsys, *options, "--host-memory", "1.1G", "--out", str(out))
    config = json.loads(out.read_text())
    assert config == found["config"]
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "nvme"
    assert config["vertical_schedule"].pop("host_memory_bytes") == 1_100_000_000  # of a process without a suite's libraries
    start_process_group()
    on_ssd = config["zero_optimization"]["offload_param"]["device"] == "nvme"
    config = ds_vertical.prepare(config) if on_ssd else config
    with deepspeed.zero.Init(config_dict_or_path=config) if on_ssd else contextlib.nullcontext():
        model = hf.build_model("gpt_13m", hf.read_fields(SHAPES / "gpt_13m.json"), lambda config: None)
    batch = {"input_ids": torch.arange(16).reshape(1, 16)}
    batch["labels"] = batch["input_ids"]
    engine, *_ = ds_vertical.initialize(model=model, model_parameters=model.parameters(), config=config)
    try:
        losses = [float(engine.train_batch(iter([batch] * 4))) for _ in range(3)]
        assert losses[2] < losses[0]
        at_rest = (i for i in found["memory"] if i["what"] == "optimizer state at rest" and i["tier"] == "host")
        planned_bytes = sum(item["num_bytes"] for item in at_rest)
        chunks = engine.optimizer.stepper.chunks
        resting = 12 * sum(chunk.numel for chunk in chunks if chunk.files is None)
        piece = 12 * max(chunk.numel for chunk in chunks)
        assert 0 <= config["vertical_schedule"]["optimizer_host_share"] < 1
        assert (config["vertical_schedule"]["optimizer_host_share"] > 0) == slow_ssd
        if slow_ssd:
            assert planned_bytes - piece < resting <= planned_bytes, (resting, planned_bytes)
        fields = found["setting"]
        choice = Choice.from_json(fields)
        nothing: Any = None
        machine = profile.read_profile(str(tmp_path / "machine.json")).machine
        shape = ModelShape(1, (1,) * engine.layers.num_layers, 0.0, 0.0, 0)  # on the host's memory nothing is apart
        simulated = Candidate(choice, LpProblem(shape, machine, nothing, nothing, nothing, nothing), 0.0, ())
        assert engine.ran == simulated.schedule(engine.layers.num_layers), "another schedule was planned with"
    finally:
        dispose(engine)


def test_a_plan_for_several_ranks_says_how_many_micro_batches_elastic_may_give_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = asdict(profile.read_profile("a100_server").machine)
    rates |= {"one_memory": True, "copy_in_bytes_per_s": None, "copy_out_bytes_per_s": None}
    report = {"machine": rates, "capacity": {"ssd_bytes": 1e12}, "rates": {"fp32_flops_per_s": 1e11}}
    (tmp_path / "machine.json").write_text(json.dumps(report))
    options = ["--model", "gpt_13m", "--tokens-per-step", "65536", "--sequence-length", "256", "--micro-batch-size", "1"]
    options += ["--machine", str(tmp_path / "machine.json"), "--dtype", "fp32", "--num-ranks", "2"]
    found = planned(capsys, *options, "--host-memory", "2.7G")
    count, elastic = found["setting"]["num_micro_batches"], found["elastic"]
    assert (count, elastic["most"]) == (128, 255)
    items = {item["what"]: item["num_bytes"] for item in found["memory"] if item["tier"] == "host"}
    inputs, num_layers = 256 * 512 * 4, 4 // found["setting"]["blocks_per_layer"]
    assert items["activations between layers"] == (num_layers * count + 2) * inputs
    of_one = num_layers * inputs + items.get("kept for the backward", 0) / count
    assert elastic["fitting"] == count + (1.35e9 - sum(items.values())) // of_one < 255, items
    assert f'write "elastic": {{"max_micro_batches": {elastic["fitting"]}}}' in "\n".join(plan_lines(found))
    roomy = planned(capsys, *options, "--host-memory", "64G")
    assert roomy["elastic"] == {"most": 255, "fitting": 255}
    assert "a rank has room for 255 micro-batches, the most that elastic may give it" in "\n".join(plan_lines(roomy))


def test_blocks_below_a_mebibyte_make_no_smaller_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed makes none under 1 MiB, whatever `ds-vertical limits --tune-aio` has found to be fastest."""
    options = ["--model", "gpt_13m", "--tokens-per-step", "4096", "--sequence-length", "256", "--host-memory", "1038M"]
    report, resting = json.loads((profile.SHIPPED / "rtx4090_desktop.json").read_text()), []
    for block_size in (1 << 18, 1 << 20):
        (file := tmp_path / f"{block_size}.json").write_text(json.dumps(report | {"aio": AIO | {"block_size": block_size}}))
        found = planned(capsys, *options, "--machine", str(file))
        resting.append([item["num_bytes"] for item in found["memory"] if item["what"] == "optimizer state at rest"])
    assert resting[0] == resting[1] != []


def test_a_plan_counts_what_a_process_holds_on_its_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a tenth more, since starts differ; 704 MiB where nobody has measured it. Libraries load 96 MiB later."""
    report = json.loads((profile.SHIPPED / "rtx4090_desktop.json").read_text())
    for held, counted in ((None, 800 << 20), (500 << 20, 646 << 20), (2000 << 20, 2296 << 20)):
        (file := tmp_path / "machine.json").write_text(
            json.dumps(report | {"rates": report["rates"] | {"process_bytes": held}})
        )
        found = planned(capsys, "--model", "gpt_13m", "--tokens-per-step", "2048", "--machine", str(file))
        assert [item["num_bytes"] for item in found["memory"] if item["what"] == "interpreter and libraries"] == [counted]


@pytest.mark.slow
def test_a_small_host_puts_parameters_on_ssd_and_a_small_device_activations(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "llama_3_8b", "--tokens-per-step", "131072", "--machine", "rtx4090_desktop"]
    found = planned(capsys, *options, "--host-memory", "24G")
    placement, config = found["setting"]["placement"], found["config"]
    assert placement["parameters_on_ssd"] > 0 and config["zero_optimization"]["offload_param"]["device"] == "nvme"
    assert sum(item["num_bytes"] for item in found["memory"] if item["tier"] == "host") <= 24e9
    assert sum(item["num_bytes"] for item in found["memory"] if item["tier"] == "device") <= 23e9
    assert config["vertical_schedule"]["host_memory_bytes"] == 24 * 10**9
    share = config["vertical_schedule"]["gradient_host_share"]
    assert share == pytest.approx(1 - placement["gradients_on_ssd"], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "status", "fault"),
    [
        (["--model", "gpt_66b"], 2, "did you mean gpt_65b"),
        (["--model", "/nowhere/config.json"], 2, "no such file"),
        (["--model", "CONFIG:nope"], 2, "transformers does not take its configuration (ValueError: Unrecognized"),
        (["--model", "CONFIG:gpt_neox"], 2, "hidden size is not divisible"),
        (["--model", "CONFIG:resnet"], 2, "transformers cannot build it as a causal language model"),
        (["--model", "gpt_13m", "--machine", "a200"], 2, "no machine of that name"),
        (["--model", "gpt_13m", "--tokens-per-step", "0"], 2, "--tokens-per-step 0: write 1 or more"),
        (["--model", "gpt_13m", "--clip", "-1"], 2, "--clip -1"),
        (["--model", "gpt_13m", "--tokens-per-step", "1024", "--micro-batch-size", "64"], 2, "write 4 or less"),
        (["--model", "gpt_13m", "--host-memory", "much"], 2, "--host-memory: 'much' is no amount of bytes: write one as 64G"),
        (["--model", "gpt_13m", "--host-memory", "0"], 2, "--host-memory: '0'"),
        (["--model", "gpt_13m", "--sequence-length", "100000"], 2, "positions; write"),
        (["--model", "llama_3_8b", "--machine", "rtx4090_desktop", "--host-memory", "3e9"], 1, "MiB short"),
    ],
)
def test_bad_input_is_answered_in_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], status: int, fault: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": options[1].removeprefix("CONFIG:"), "hidden_size": 13}))
    options = [str(file) if option.startswith("CONFIG:") else option for option in options]
    given = {"--tokens-per-step": "8192", "--machine": "a100_server"}
    words = [word for key, value in given.items() if key not in options for word in (key, value)]
    got, out, err = run(capsys, *options, *words)
    assert got == status and fault in err and not out and "Traceback" not in err
    assert len(err) < 1000


def test_a_machine_that_has_not_been_measured_is_told_how(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_VERTICAL_CACHE", str(tmp_path))
    status, _, err = run(capsys, "--model", "gpt_13m", "--tokens-per-step", "64")
    assert status == 2 and "ds-vertical limits --path" in err


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["0", "1.0"])  # without clipping there are many more regimes
def test_175b_is_planned_in_under_ten_seconds(clip: str) -> None:
    """The command, start included; processor time, since others may use the machine."""
    command = [sys.executable, "-m", "ds_vertical.cli.main", "plan", "--model", "gpt_175b", "--tokens-per-step", "65536"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, "--machine", "a100_server", "--clip", clip], check=True, capture_output=True, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10


@pytest.mark.parametrize("host_memory", ["120G", "64G"])
def test_175b_fits_one_card_of_24_gb(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, host_memory: str
) -> None:
    """By the memory of its leanest setting, which fetches no layer ahead; the slow test below makes the plan."""
    asked: list[tuple[Any, ...]] = []

    def note(*given: Any) -> None:
        asked.append(given)
        raise PlanError("asked")

    monkeypatch.setattr("ds_vertical.cli.plan.command.choose", note)
    options = ["--model", "gpt_175b", "--tokens-per-step", "65536", "--clip", "0", "--machine", "rtx4090_desktop"]
    run(capsys, *options, "--host-memory", host_memory)
    ((task, machine, limits, _),) = asked
    further = (search._LIBRARIES, memory_budget.norm_copy(task.spec.largest_parameter, machine.one_memory))
    lean = search._Search(task, machine, limits, further, window=0)
    assert lean.fits()
    assert not replace(lean, limits={**limits, Tier.DEVICE: 20e9}).fits()


@pytest.mark.slow
@pytest.mark.parametrize("host_memory", ["120G", "64G"])
def test_175b_is_planned_on_one_card_of_24_gb(capsys: pytest.CaptureFixture[str], host_memory: str) -> None:
    options = ["--model", "gpt_175b", "--tokens-per-step", "65536", "--clip", "0", "--machine", "rtx4090_desktop"]
    found = planned(capsys, *options, "--host-memory", host_memory)
    needed = {tier: sum(item["num_bytes"] for item in found["memory"] if item["tier"] == tier) for tier in Tier}
    assert needed["device"] <= 23e9 and needed["host"] <= 1e9 * int(host_memory.removesuffix("G"))
    assert found["ssd_bytes"] == needed["ssd"] <= 3.6e12
    on_ssd = {item["what"]: item["num_bytes"] for item in found["memory"] if item["tier"] == "ssd"}
    assert on_ssd["optimizer state"] == 12 * found["model"]["elements"] and "second generation of both" not in on_ssd
    assert all(item["what"] and item["key"] for item in found["memory"])
    section = found["config"]["vertical_schedule"]
    assert section["outside_layers"] == "fetched" and section["on_nonfinite"] == "stop" and section["prefetch_layers"] == 0
    assert found["config"]["zero_optimization"]["offload_param"]["device"] == "nvme"
    names = [point["name"] for point in found["menu"]]  # not the chosen policy alone
    assert {"free", "products", "everything"} <= set(names) and 4 <= len(names) <= 6


@pytest.mark.slow
def test_175b_beside_twelve_ssds_keeps_products_in_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """A row of docs/results.md: 66.5 TFLOP/s."""
    options = ["--model", "gpt_175b", "--tokens-per-step", "16384", "--sequence-length", "1024", "--clip", "0"]
    found = planned(capsys, *options, "--machine", "rtx4090_12_ssds")
    needed = {tier: sum(item["num_bytes"] for item in found["memory"] if item["tier"] == tier) for tier in Tier}
    room = profile.read_profile("rtx4090_12_ssds").capacity
    assert all(0 < needed[tier] <= (room[tier] or 0.0) for tier in Tier) and found["ssd_bytes"] == needed["ssd"]
    kept = found["setting"]["kept"]
    assert kept["policy"] == "products" and kept["host"] > 0.99 and found["traffic"]["kept_written"] == 0
    assert found["setting"]["window"] == 0 and found["flops_per_s"] == pytest.approx(66.5e12, rel=0.02)


@pytest.mark.slow
def test_advice_for_175b_on_a_small_host_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "gpt_175b", "--tokens-per-step", "65536", "--clip", "0", "--machine", "rtx4090_desktop"]
    status, _, err = run(capsys, *options, "--host-memory", "40G")
    assert status == 1
    found = re.search(r"short of host memory: \d+ MiB short.*it takes (\d+) GB more host memory", err)
    assert found is not None, err
    planned(capsys, *options, "--host-memory", f"{40 + int(found[1])}G")


@pytest.mark.slow
def test_all_advice_on_a_small_device_is_true(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def on(device_bytes: float) -> str:
        shipped = json.loads((Path(profile.__file__).parent / "machines" / "rtx4090_desktop.json").read_text())
        file = tmp_path / f"{device_bytes}.json"
        file.write_text(json.dumps(shipped | {"capacity": shipped["capacity"] | {"device_bytes": device_bytes}}))
        return str(file)

    options = ["--model", "llama_3_8b", "--clip", "0"]
    status, _, err = run(capsys, *options, "--tokens-per-step", "16384", "--machine", on(8.5e9))
    advice = re.search(r"device memory: \d+ MiB short.*\(--tokens-per-step (\d+)\) or (\d+) GB more device memory", err)
    assert status == 1 and advice is not None, err
    planned(capsys, *options, "--tokens-per-step", advice[1], "--machine", on(8.5e9))
    planned(capsys, *options, "--tokens-per-step", "16384", "--machine", on(8.5e9 + 1e9 * int(advice[2])))


def test_what_does_not_fit_is_refused_and_never_timed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the user's own machine, where timing a block of a large model would take more memory than there is."""
    report = {"machine": asdict(profile.read_profile("a100_server").machine), "capacity": {"host_bytes": 2e9, "ssd_bytes": 1e9}}
    monkeypatch.setattr("ds_vertical.cli.plan.command.cached_report", lambda path: report)
    monkeypatch.setattr("ds_vertical.cli.plan.command.time_pieces", lambda *_: pytest.fail("a block was timed"))
    status, out, err = run(capsys, "--model", "gpt_175b", "--tokens-per-step", "4096")
    assert status == 1 and not out and "host memory: " in err and "MiB short" in err
    assert re.search(r"it takes \d+ GB more host memory \(--host-memory", err)


def test_ranks_of_one_machine_share_its_ssd_and_its_host(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "llama_3_8b", "--machine", "h200_server", "--micro-batch-size", "1", "--clip", "0"]
    alone = planned(capsys, *options, "--tokens-per-step", "16384")
    eight = planned(capsys, *options, "--tokens-per-step", str(8 * 16384), "--num-ranks", "8")
    assert eight["tokens_per_step"] == 8 * alone["tokens_per_step"]
    # Each rank steps an eighth of the model on an eighth of the cores: no faster than one rank on all of them.
    assert eight["busy_s"]["adam"] == pytest.approx(alone["busy_s"]["adam"], rel=0.01)
    machine = profile.read_profile("h200_server").machine
    shared = machine.shared(8)
    assert shared.ssd_read_bytes_per_s == machine.ssd_read_bytes_per_s / 8
    assert shared.adam_elements_per_s == machine.adam_elements_per_s / 8
    assert shared.copy_in_bytes_per_s == machine.copy_in_bytes_per_s  # a link of its own
