"""`ds-vertical limits`: real measurements, small; what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from own_cache import own_cache
from places import ROOT
from processes import free_port

from ds_vertical.cli.bench import block_timer, fio, limits, machine_info
from ds_vertical.engine import machine_cache
from ds_vertical.model.kept.recording import CallPlan, Recording
from ds_vertical.planner import memory_budget
from ds_vertical.planner.machine import Machine, Profile
from ds_vertical.types import ActivationPolicy

MODEL = ROOT / "configs" / "models" / "gpt_13m.json"


def watch_plans(monkeypatch: pytest.MonkeyPatch) -> dict[str, CallPlan]:
    """The plans that recordings make from now on, by policy."""
    made: dict[str, CallPlan] = {}
    real = Recording.plan

    def plan(
        self: Recording, policy: ActivationPolicy, leaves: list[object], outputs: int | None = None
    ) -> tuple[CallPlan | None, str]:
        found, reason = real(self, policy, leaves, outputs)
        if found is not None and outputs is None:
            made[policy] = found
        return found, reason

    monkeypatch.setattr(Recording, "plan", plan)
    return made


def skipped_products(plan: CallPlan) -> int:
    """How many matrix products a recompute leaves out."""
    pairs = zip(plan.operations, plan.actions, strict=True)
    return sum(operation.is_product and action == "skip" for operation, action in pairs)


def test_rates_are_measured_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = watch_plans(monkeypatch)
    out = tmp_path / "limits.json"
    options = ["--path", str(tmp_path), "--size-mb", "4", "--rounds", "1", "--model", str(MODEL), "--out", str(out)]
    options.append("--no-keep")
    assert limits.main([*options, "--dtype", "fp32", "--tokens", "16"]) == 0
    report = json.loads(out.read_text())
    rates = report["rates"]
    names = {f"{name}_bytes_per_s" for name in ("ssd_read", "ssd_write", "ssd_read_together", "copy_host")}
    assert names | {"adam_elements_per_s", "norm_elements_per_s", "layer_forward_s"} <= set(rates)
    differences = {"layer_backward_s", "ssd_core_s_per_byte", "adam_core_share", "compute_latency_s"}  # noise at this size
    differences |= {f"{point}_saved_s" for point in ("free", "products_1", "products_2", "products", "everything")}
    assert skipped_products(plans["free"]) == 1, "the layer's last product, which no gradient reads"
    assert differences <= set(rates) and all(value > 0 for name, value in rates.items() if name not in differences)
    assert rates["everything_kept_bytes"] >= rates["products_kept_bytes"] > rates["products_2_kept_bytes"]
    assert rates["products_2_kept_bytes"] > rates["products_1_kept_bytes"]
    assert report["ssd_limit"] is None and report["facts"]["num_cores"] > 0
    assert f"{rates['ssd_read_bytes_per_s'] / 1e9:.3f} GB/s" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [out]
    machine = Machine.from_dict(report)  # the rates together are at most those alone, whatever the noise
    assert machine.read_together <= 1 and machine.write_together <= 1
    assert 0 <= machine.adam_share == rates["adam_core_share"]
    assert 0 <= machine.compute_latency_s < 0.01
    assert machine.copy_host_bytes_per_s == rates["copy_host_bytes_per_s"]
    assert rates["gauge_s"] == pytest.approx(rates["layer_forward_s"] + rates["layer_backward_s"])
    assert 2e8 < rates["process_bytes"] < 2e9 and Profile.from_dict("here", report).process_bytes == rates["process_bytes"]
    assert report["capacity"]["host_bytes"] > rates["process_bytes"]
    pieces = {"layer_forward_s", "layer_backward_s", "pre_forward_s", "pre_backward_s", "head_s"}
    assert pieces <= set(rates) and rates["activation_bytes"] == 16 * 512 * 4


SCRIPT = """
import sys, torch, deepspeed, ds_vertical
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer
from transformers.integrations import HfDeepSpeedConfig
offload = {"device": "nvme", "nvme_path": sys.argv[1]}
zero = {"stage": 3, "offload_optimizer": offload, "offload_param": offload | {"max_in_cpu": 0, "buffer_size": 2000000}}
config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero, "vertical_schedule": {}}
config = ds_vertical.prepare(config | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
held = HfDeepSpeedConfig(config)
sizes = {"num_hidden_layers": 24, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=2000), dtype=torch.bfloat16)
ds_vertical.initialize(model=model, config=config)[0].destroy()
"""


@pytest.mark.parametrize(
    ("script", "found", "told"),
    [
        ("echo hello; echo; echo 'ds_vertical process: 7000000'; echo bye 5", {"process_bytes": 7e6}, ""),
        ("echo ds_vertical process: 7; echo no device >&2; exit 3", {}, "has ended with 3:\nno device"),
        ("echo 7000000", {}, "has ended with 0"),
        ("exec sleep 60", {}, "took more than 0.5 s"),
    ],
    ids=["others talk too", "no device", "says nothing", "too long"],
)
def test_a_process_that_cannot_tell_what_it_holds_costs_the_report_one_field(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    found: dict[str, float],
    told: str,
) -> None:
    """A program in the interpreter's place says what a process may say."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(machine_info, "_LIMIT_S", 0.5 if "sleep" in script else 60)
    monkeypatch.setattr(sys, "executable", str(program))
    assert machine_info.process_rate() == found
    error = capsys.readouterr().err
    assert (told in error and error.startswith("ds-vertical limits: plans will assume ")) if told else error == ""


@pytest.mark.slow
def test_a_plan_counts_as_much_of_a_process_as_initialize_measures(tmp_path: Path) -> None:
    """Of a user's script with Hugging Face's Trainer at hand and a model of 24 layers, built as Hugging Face builds it."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command, own = [sys.executable, "-c", SCRIPT, str(tmp_path)], os.environ | alone
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=300)
    found = re.search(r"interpreter and libraries +([0-9.]+)  \(measured\)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    planned = memory_budget.libraries(machine_info.process_bytes()).num_bytes
    assert 0.9 * planned < float(found[1]) * 2**20 <= planned


@pytest.mark.slow
def test_the_report_as_json_alone_is_what_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_VERTICAL_CACHE", str(tmp_path / "cache"))
    options = ["--path", str(tmp_path), "--size-mb", "4", "--rounds", "1", "--no-fio"]
    assert limits.main([*options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rates"]["adam_elements_per_s"] > 0 and report == machine_cache.cached_report(tmp_path)


def test_a_cache_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DS_VERTICAL_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(limits, "measure", lambda options: pytest.fail("the work has begun"))
    assert limits.main(["--path", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "cannot be written" in said and "DS_VERTICAL_CACHE" in said and "--no-keep" in said


@pytest.mark.parametrize(
    ("option", "value", "fault"),
    [
        ("--path", "/proc", "--path /proc: cannot be written (No such file or directory); name a folder"),
        ("--model", "gpt_14m", "did you mean gpt_13m"),
        ("--model", "nope.json", "transformers does not take its configuration"),
    ],
)
def test_bad_input_is_answered_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str, value: str, fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nope.json").write_text('{"model_type": "nope"}')
    monkeypatch.setattr(limits, "ssd_rates", lambda *_: pytest.fail("the work has begun"))
    assert limits.main([option, value]) == 2
    assert fault in capsys.readouterr().err


def test_aio_settings_that_make_no_queue_are_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "copy_rates", lambda *_: pytest.fail("the work has begun"))
    config = tmp_path / "ds_config.json"
    config.write_text('{"aio": {"block_size": "auto"}}')
    assert limits.main(["--path", str(tmp_path), "--config", str(config), "--size-mb", "1", "--no-keep"]) == 2
    assert "aio: no queue can be made of" in capsys.readouterr().err


def test_gradients_of_a_models_pieces_are_summed_where_the_model_is() -> None:
    timer = block_timer.BlockTimer(MODEL, block_timer.BlockBatch(16, 1, "fp32"), "meta")  # any device but the host
    timer.sums.add("pre")
    assert {total.device.type for total in timer.sums.take("pre")} == {"meta"}


def test_fio_is_named_where_it_is_absent_and_compared_where_it_is_there() -> None:
    rates = {"ssd_read_bytes_per_s": 3.0, "ssd_write_bytes_per_s": 2.0}
    assert limits.fio_line(rates) == fio.ABSENT and "apt-get install fio" in fio.ABSENT
    measured = rates | {"fio_read_bytes_per_s": 2.0, "fio_write_bytes_per_s": 2.0}
    assert limits.fio_line(measured) == "ours / fio: read 1.50, write 1.00"


def test_fio_is_asked_for_the_same_transfers(tmp_path: Path) -> None:
    aio = {"block_size": 131072, "queue_depth": 4, "intra_op_parallelism": 2}
    words = fio.command(tmp_path, 1 << 20, 3, aio, ["read", "write"])
    same = {"--direct=1", "--bs=131072", "--iodepth=4", "--numjobs=2", "--size=524288", "--offset_increment=524288"}
    assert same <= set(words) and "--rw=read" in words and "--rw=write" in words


def test_fio_has_its_memory_in_huge_pages_as_we_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in fio's place says what it was started with; the user's own tunables stay."""
    program = tmp_path / "fio"
    program.write_text('#!/bin/sh\necho "$GLIBC_TUNABLES" "$@" >> ' + f"{tmp_path}/asked\n" + "echo '{\"jobs\": []}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.perturb=7")
    fio.fio_rates(tmp_path, 1 << 20, 1, {"block_size": 65536, "queue_depth": 2, "intra_op_parallelism": 1})
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 3
    for line in asked:
        assert line.startswith("glibc.malloc.perturb=7:glibc.malloc.hugetlb=1 ") and " --iomem_align=2097152 " in line


@pytest.mark.skipif(not fio.installed(), reason="fio is not installed")
def test_fio_measures(tmp_path: Path) -> None:
    rates = fio.fio_rates(tmp_path, 1 << 20, 1, {"block_size": 65536, "queue_depth": 2, "intra_op_parallelism": 1})
    assert len(rates) == 4 and min(rates.values()) > 0


@pytest.mark.slow
def test_a_micro_batch_of_several_sequences_and_threads(tmp_path: Path) -> None:
    out = tmp_path / "limits.json"
    options = ["--path", str(tmp_path), "--size-mb", "1", "--rounds", "1", "--model", str(MODEL), "--out", str(out)]
    options.append("--no-keep")
    assert limits.main([*options, "--dtype", "fp32", "--tokens", "8", "--sequences", "2", "--threads", "1"]) == 0
    report = json.loads(out.read_text())
    assert report["rates"]["activation_bytes"] == 8 * 512 * 4 and report["settings"]["threads"] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--path", "/no/such"], "--path /no/such: no such folder"),
        (["--rounds", "0"], "--rounds 0: write 1 or more"),
        (["--threads", "0"], "--threads 0: write 1 or more"),
        (["--tokens", "9", "--sequences", "2", "--model", str(MODEL)], "--tokens 9: write a multiple of --sequences, 2"),
        (["--ssd-limit", "fast"], "write READ,WRITE"),
        (["--path", "/dev/shm", "--ssd-limit", "1M,1M"], "lies on tmpfs"),
    ],
)
def test_bad_input_is_refused(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert limits.main(options) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_several_paths_are_measured_one_by_one_and_at_once_and_told_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in own_cache(tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    paths = [tmp_path / "ssd0", tmp_path / "ssd1"]
    for path in paths:
        path.mkdir()
    options = ["--path", *map(str, paths), "--size-mb", "4", "--rounds", "1", "--no-fio"]
    assert limits.main([*options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    reads = [ssd["rates"]["ssd_read_bytes_per_s"] for ssd in report["ssds"]]
    together = report["at_once"]["rates"]["ssd_read_bytes_per_s"]
    assert report["machine"]["ssd_read_bytes_per_s"] == min(*reads, together) == report["rates"]["ssd_read_bytes_per_s"]
    assert report["at_once"]["disks"] == [tmp_path.stat().st_dev], "one disk, whose rate two folders do not double"
    assert report["capacity"]["ssd_bytes"] <= shutil.disk_usage(tmp_path).total
    assert [ssd["share"] for ssd in report["ssds"]] == [0.5, 0.5]
    assert [list(path.iterdir()) for path in paths] == [[], []]
    assert [ssd["path"] for ssd in report["ssds"]] == list(map(str, paths))
    Machine.from_dict(report)
    kept = machine_cache.cached_report(paths[1])  # both are on one file system, so the second one's is kept
    assert kept is not None and kept["rates"]["ssd_read_bytes_per_s"] == reads[1] and kept["ssds"] is None
    assert limits.main([*options, "--no-keep"]) == 0
    assert f"{paths[0]}: 50.0% of each file" in capsys.readouterr().out
