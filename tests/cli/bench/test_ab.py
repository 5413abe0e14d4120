"""`ds-vertical ab`: the arms' files, what is refused before anything runs, the verdict on losses, and real launches."""

from __future__ import annotations

import copy
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ab_runs import BASE, SCRIPT, make_run, wait_for_pid, write
from deepspeed.runtime import config as deepspeed_config
from places import ROOT
from processes import is_alive

from ds_vertical.cli import ab_folder
from ds_vertical.cli.bench import ab
from ds_vertical.cli.bench.arms import Arms, build_arms, ssd_folders
from ds_vertical.cli.bench.comparison import (
    ComparisonError,
    Contract,
    Run,
    check_runs,
    compare_losses,
    comparison_table,
    contract_of,
    describe_losses,
    summarize_arm,
)
from ds_vertical.config.deepspeed_keys import TOP_LEVEL_KEYS
from ds_vertical.engine.metrics import Agreement
from ds_vertical.errors import ConfigError
from ds_vertical.planner.run_record import KeptRecord


def changed(path: str, value: object) -> dict[str, Any]:
    """BASE with the value at a dotted path; None removes it."""
    config = copy.deepcopy(BASE)
    holder = config
    *parents, last = path.split(".")
    for parent in parents:
        holder = holder.setdefault(parent, {})
    if value is None:
        del holder[last]
    else:
        holder[last] = value
    return config


def arms(folder: Path, assignments: Sequence[str] = (), base: object = BASE, **kwargs: Any) -> Arms:
    return build_arms(write(folder, "base.json", base), None, assignments, **kwargs)


def arms_with_stock(folder: Path, stock: object) -> Arms:
    return build_arms(write(folder, "base.json", BASE), write(folder, "other.json", stock), [])


# --- the arms' configurations --------------------------------------------------------------------------------------


def test_arms_differ_in_nothing_but_enabled(tmp_path: Path) -> None:
    built = arms(tmp_path)
    assert built.stock == BASE | {"vertical_schedule": {"enabled": False}}
    assert built.vertical == BASE | {"vertical_schedule": {"enabled": True}}


@pytest.mark.parametrize("enabled", [True, False])
def test_section_is_kept_and_switched(tmp_path: Path, enabled: bool) -> None:
    section = {"enabled": enabled, "blocks_per_layer": 2, "seed": 7}
    built = arms(tmp_path, base=BASE | {"vertical_schedule": section})
    assert built.stock["vertical_schedule"] == section | {"enabled": False}
    assert built.vertical["vertical_schedule"] == section | {"enabled": True}


def test_set_reaches_both_arms_and_makes_the_objects_on_the_way(tmp_path: Path) -> None:
    assignments = ["gradient_accumulation_steps=16", "aio.queue_depth=32", "vertical_schedule.seed=3"]
    built = arms(tmp_path, [*assignments, 'communication_data_type="fp32"'])
    for arm in (built.stock, built.vertical):
        assert arm["gradient_accumulation_steps"] == 16
        assert arm["aio"] == {"queue_depth": 32}
        assert arm["communication_data_type"] == "fp32"
        assert arm["vertical_schedule"]["seed"] == 3


@pytest.mark.parametrize("enabled", [True, False])
def test_what_deepspeed_alone_fails_on_is_refused_before_anything_runs(tmp_path: Path, enabled: bool) -> None:
    section = {"vertical_schedule": {"enabled": enabled}}
    arms(tmp_path, base=BASE | section)
    hpz, int8 = "zero_optimization.zero_hpz_partition_size", "zero_optimization.zero_quantized_weights"
    with pytest.raises(ConfigError, match=f"base.json: {hpz}: got 2 with .*offload_param.device .*in the stock arm"):
        arms(tmp_path, [f"{hpz}=2"], BASE | section)
    with pytest.raises(ConfigError, match=f"base.json: {int8}: got true in the stock arm on the CPU"):
        arms(tmp_path, [f"{hpz}=2", f"{int8}=true", 'zero_optimization.offload_param.device="cpu"'], BASE | section)
    int4 = "zero_optimization.zero_quantized_gradients"
    with pytest.raises(ConfigError, match=f"base.json: {int4}: got true in the stock arm on the CPU"):
        arms(tmp_path, [f"{hpz}=2", f"{int4}=true", 'zero_optimization.offload_param.device="cpu"'], BASE | section)
    alone = arms(tmp_path, [f"{hpz}=2", f"{int8}=true", f"{int4}=true"], BASE | section, with_stock=False)
    assert alone.vertical["zero_optimization"]["zero_hpz_partition_size"] == 2


def test_set_reaches_the_stock_config_too(tmp_path: Path) -> None:
    stock = changed("zero_optimization.stage3_prefetch_bucket_size", 0)
    built = build_arms(write(tmp_path, "b.json", BASE), write(tmp_path, "s.json", stock), ["gradient_clipping=0.5"])
    assert (built.stock["gradient_clipping"], built.vertical["gradient_clipping"]) == (0.5, 0.5)
    assert built.stock["zero_optimization"]["stage3_prefetch_bucket_size"] == 0
    assert "stage3_prefetch_bucket_size" not in built.vertical["zero_optimization"]


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("gradient_acumulation_steps=16", "gradient_accumulation_steps"),
        ("vertical_shedule.snake=true", "vertical_schedule"),
        ("nonsense=1", "DeepSpeed knows no key"),
        ("gradient_accumulation_steps", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("zero_optimization..stage=3", "KEY=VALUE"),
        ("optimizer.type=AdamW", "'optimizer.type=\"AdamW\"'"),
        ("bf16.enabled.x=1", "holds no keys"),
        ("aio.queue_dept=3", "queue_depth"),
        ("zero_optimization.subgroup_size=3", "sub_group_size"),
        ("zero_optimization.stage=2", "stage 3"),
        ("zero_optimization.sub_group_size=-1", "sub_group_size"),
        ("vertical_schedule.snek=true", "snake"),
        ("train_batch_size=3", "train_batch_size"),
    ],
)
def test_senseless_set_is_refused_by_name(tmp_path: Path, assignment: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        arms(tmp_path, [assignment])


def test_counts_that_a_run_measures_are_refused_and_those_of_a_log_reach_both_arms(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vertical_schedule\.elastic\.counts: got null, .*; write the log of a run"):
        arms(tmp_path, ["vertical_schedule.elastic={}"])
    built = arms(tmp_path, ['vertical_schedule.elastic.counts="run.log"'])
    assert (
        built.stock["vertical_schedule"]["elastic"] == built.vertical["vertical_schedule"]["elastic"] == {"counts": "run.log"}
    )


def test_batch_sizes_must_fit_the_ranks(tmp_path: Path) -> None:
    assert arms(tmp_path, ["train_batch_size=4"], num_ranks=2).stock["train_batch_size"] == 4
    with pytest.raises(ConfigError, match=r"got 4, .* 1 ranks is 2"):
        arms(tmp_path, ["train_batch_size=4"], num_ranks=1)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("aio", {"block_size": 1048576, "queue_depth": 64, "intra_op_parallelism": 4}),
        ("aio.single_submit", True),
        ("zero_optimization.offload_param.buffer_count", 30),
        ("zero_optimization.offload_param.buffer_size", 12345),
        ("zero_optimization.offload_param.pin_memory", False),
        ("zero_optimization.offload_optimizer.buffer_count", 12),
        ("zero_optimization.offload_optimizer.pipeline_read", True),
        ("zero_optimization.offload_optimizer.pipeline_write", True),
        ("zero_optimization.offload_optimizer.fast_init", True),
        ("zero_optimization.stage3_prefetch_bucket_size", 0),
        ("zero_optimization.prefetch_bucket_size", 0),
        ("zero_optimization.stage3_max_live_parameters", 10),
        ("zero_optimization.stage3_max_reuse_distance", 0),
        ("zero_optimization.overlap_comm", False),
        ("zero_optimization.contiguous_gradients", False),
    ],
)
def test_stock_config_may_differ_in_transfer_settings(tmp_path: Path, path: str, value: object) -> None:
    stock = changed(path, value)
    assert arms_with_stock(tmp_path, stock).stock == stock | {"vertical_schedule": {"enabled": False}}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("zero_optimization.sub_group_size", 2000),
        ("zero_optimization.sub_group_size", None),
        ("zero_optimization.reduce_bucket_size", 1000),
        ("zero_optimization.stage3_param_persistence_threshold", 0),
        ("zero_optimization.memory_efficient_linear", False),
        ("zero_optimization.offload_param.max_in_cpu", 1000),
        ("zero_optimization.offload_param.device", "cpu"),
        ("zero_optimization.offload_param.nvme_path", "/tmp/elsewhere"),
        ("zero_optimization.offload_optimizer.device", "cpu"),
        ("bf16.enabled", False),
        ("data_types.grad_accum_dtype", "bf16"),
        ("communication_data_type", "fp32"),
        ("gradient_clipping", 0.5),
        ("gradient_clipping", None),
        ("gradient_accumulation_steps", 4),
        ("train_micro_batch_size_per_gpu", 2),
        ("optimizer.type", "Adam"),
        ("optimizer.params.lr", 2e-3),
        ("scheduler", {"type": "WarmupLR", "params": {}}),
    ],
)
def test_stock_config_that_moves_bits_or_places_data_elsewhere_is_refused(tmp_path: Path, path: str, value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        arms_with_stock(tmp_path, changed(path, value))
    text = str(refused.value)
    assert path in text and "base.json" in text and "other.json" in text
    assert ("absent" if value is None or path not in json_paths(BASE) else json.dumps(value)) in text


def json_paths(config: object, prefix: str = "") -> set[str]:
    if not isinstance(config, dict):
        return {prefix}
    return {prefix}.union(*(json_paths(value, f"{prefix}.{key}".lstrip(".")) for key, value in config.items()))


def test_stock_configs_own_section_cannot_change_the_seeds(tmp_path: Path) -> None:
    base = write(tmp_path, "base.json", BASE | {"vertical_schedule": {"seed": 1}})
    stock = write(tmp_path, "stock.json", BASE | {"vertical_schedule": {"seed": 2}})
    assert build_arms(base, stock, []).stock["vertical_schedule"] == {"seed": 1, "enabled": False}


def test_several_ssds_are_the_vertical_arms_and_stock_keeps_all_in_the_first(tmp_path: Path) -> None:
    paths = ["/tmp/ds_vertical", "/mnt/ssd1", "/mnt/ssd2"]
    built = arms(tmp_path, base=BASE | {"vertical_schedule": {"nvme_paths": paths}})
    assert ssd_folders(built.vertical) == paths
    (warning,) = built.warnings
    assert "nvme_paths: the stock arm has no such key" in warning and f"keeps everything in {paths[0]};" in warning
    alone = arms(tmp_path, ["vertical_schedule.nvme_paths=null"], base=built.vertical)
    assert alone.warnings == () and ssd_folders(alone.vertical) == [paths[0]] == ssd_folders(alone.stock)
    assert arms(tmp_path, base=BASE | {"vertical_schedule": {"nvme_paths": paths[:1]}}).warnings == ()


def test_the_ssds_of_a_run_are_those_of_what_it_offloads_there() -> None:
    assert ssd_folders(BASE) == ["/tmp/ds_vertical"]
    other = changed("zero_optimization.offload_optimizer.nvme_path", "/mnt/other")
    assert ssd_folders(other) == ["/mnt/other", "/tmp/ds_vertical"]
    assert ssd_folders(changed("zero_optimization.offload_param.device", "cpu")) == ["/tmp/ds_vertical"]
    nowhere = json.loads(json.dumps(BASE).replace('"nvme"', '"cpu"'))
    assert ssd_folders(nowhere) == [] == ssd_folders(nowhere | {"vertical_schedule": {"nvme_paths": ["/mnt/ssd0"]}})


def test_known_keys_are_those_that_deepspeed_reads() -> None:
    asked: set[str] = set()

    class Recording(dict):
        def __getitem__(self, key: str) -> Any:
            asked.add(key)
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            asked.add(str(key))
            return super().__contains__(key)

        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

    deepspeed_config.DeepSpeedConfig(Recording(BASE))
    removed = set(deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert len(asked - removed) > 30
    assert asked - removed - {"amp"} <= TOP_LEVEL_KEYS


# --- bad input, before anything runs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "{config}", "--", "{missing}"], "no such script"),
        (["--config", "{config}", "--"], "write `-- SCRIPT"),
        (["--config", "{config}"], "write `-- SCRIPT"),
        (["--config", "{missing}", "--", "{script}"], "missing: no such file"),
        (["--config", "{broken}", "--", "{script}"], "broken.json: not valid JSON"),
        (["--config", "{list}", "--", "{script}"], "list.json"),
        (["--config", "{stage2}", "--", "{script}"], "stage2.json: zero_optimization.stage"),
        (["--config", "{config}", "--stock-config", "{missing}", "--", "{script}"], "missing: no such file"),
        (["--config", "{config}", "--set", "oops=1", "--", "{script}"], "--set oops=1"),
        (["--config", "{config}", "--steps", "1", "--", "{script}"], "--steps 1"),
        (["--config", "{config}", "--repeat", "0", "--", "{script}"], "--repeat 0"),
        (["--config", "{config}", "--machine", "{missing}", "--", "{script}"], "--machine"),
        (["--config", "{config}", "--machine", "{missing}", "--no-bound", "--", "{script}"], "or --no-bound"),
        (["--config", "{config}", "--links", "{missing}", "--", "{script}"], "missing: FileNotFoundError"),
        (["--config", "{config}", "--links", "{links}", "--", "{script}"], "links.speed: no such key"),
        (["--config", "{config}", "--links", "{links}", "--no-bound", "--", "{script}"], "or --no-bound"),
        (["--config", "{config}", "--num-ranks", "0", "--", "{script}"], "--num-ranks 0"),
        (["--config", "{config}", "--out", "{config}", "--", "{script}"], "cannot write there"),
        (["--config", "{config}", "--", "{script}", "--deepspeed_config", "x"], "--deepspeed_config"),
        (["--config", "{config}", "--", "{script}", "--deepspeed_config=x"], "--deepspeed_config"),
    ],
)
def test_bad_input_is_refused_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    files = {
        "config": write(tmp_path, "config.json", BASE),
        "broken": write(tmp_path, "broken.json", '{"zero_optimization": '),
        "list": write(tmp_path, "list.json", [1]),
        "links": write(tmp_path, "links.json", {"links": {"speed": 1.0}}),
        "stage2": write(tmp_path, "stage2.json", changed("zero_optimization.stage", 2)),
        "script": write(tmp_path, "script.py", "raise SystemExit('must not run')"),
        "missing": tmp_path / "missing",
    }
    before = sorted(tmp_path.iterdir())
    assert ab.main([argument.format(**files) for argument in arguments]) == 2
    assert words in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("named", [["--deepspeed_config", "{config}"], ["--deepspeed_config={config}"]])
def test_a_scripts_arguments_may_name_the_json_that_both_arms_start_from(tmp_path: Path, named: list[str]) -> None:
    config, script = write(tmp_path, "config.json", BASE), write(tmp_path, "script.py", "")
    words = [each.format(config=config) for each in named]
    plan = ab.parse(["--config", str(config), "--out", str(tmp_path / "ab"), "--", str(script), *words])
    assert plan.script_arguments == tuple(words)


# --- the verdict ---------------------------------------------------------------------------------------------------


LOSSES = [(3.0, 2.0), (2.5, 1.5), (2.0, 1.0)]
CLOSE = [LOSSES[0], (2.5002, 1.5), LOSSES[2]]
EXACT = Contract(1e-3, ())
TOLERANT = Contract(1e-3, ("tied weights",))


def test_equal_losses_are_equal_even_when_not_a_number() -> None:
    losses = [(3.0, math.nan), (math.inf, 1.0)]
    verdict = compare_losses([make_run("stock", 0, losses), make_run("vertical", 0, losses)], EXACT)
    assert (verdict.agreement, verdict.first, verdict.max_relative) == (Agreement.EQUAL, None, 0.0)


def test_last_bit_of_one_micro_batch_counts_where_the_contract_is_exact() -> None:
    near = [LOSSES[0], (2.5, math.nextafter(1.5, 2.0)), LOSSES[2]]
    runs = [make_run("stock", 0, LOSSES), make_run("vertical", 0, near)]
    exact, tolerant = compare_losses(runs, EXACT), compare_losses(runs, TOLERANT)
    assert (exact.agreement, tolerant.agreement) == (Agreement.DIFFERENT, Agreement.WITHIN)
    assert exact.first is not None and (exact.first.step, exact.first.micro_batch) == (2, 1)
    assert "tied weights" in describe_losses(tolerant, 3)
    text = describe_losses(exact, 3)
    assert "DIFFERENT" in text and "1.5 in stock.0" in text and "1.5000000000000002 in vertical.0" in text


def test_beyond_the_tolerance_names_the_first_step_beyond_it() -> None:
    far = [(3.001, 2.0), (2.5, 1.5 * 1.01), (2.0, 9.0)]
    verdict = compare_losses([make_run("stock", 0, LOSSES), make_run("vertical", 0, far)], TOLERANT)
    assert verdict.agreement is Agreement.DIFFERENT
    assert verdict.first is not None and verdict.first.step == 2
    assert verdict.max_relative == pytest.approx(8 / 9)


def test_not_finite_against_finite_is_different_whatever_the_tolerance() -> None:
    runs = [make_run("stock", 0, [(1.0,)]), make_run("vertical", 0, [(math.nan,)])]
    assert compare_losses(runs, Contract(1e9, ("tied weights",))).agreement is Agreement.DIFFERENT


def test_an_arm_that_does_not_repeat_itself_is_seen() -> None:
    other = [*LOSSES[:2], (2.0, 1.1)]
    runs = [make_run("stock", 0, LOSSES), make_run("vertical", 0, LOSSES), make_run("stock", 1, other)]
    verdict = compare_losses(runs, EXACT)
    assert verdict.first is not None and verdict.first.right_run == "stock.1"


@pytest.mark.parametrize(
    ("changes", "num_ranks", "tied", "reasons", "tolerance"),
    [
        ({}, 1, False, (), 1e-3),
        ({}, 1, True, ("tied weights",), 1e-3),
        ({}, 1, None, ("the model may have tied weights",), 1e-3),
        ({}, 2, False, ("2 ranks",), 1e-3),
        ({"bf16": {"enabled": False}}, 1, False, (), 1e-6),
        ({"bf16": {"enabled": False}, "data_types": {}}, 1, False, (), 1e-6),
        ({"data_types": {}}, 1, False, ("gradients summed in bf16",), 1e-3),
        ({"vertical_schedule": {"snake": True}}, 1, False, ("snake order",), 1e-3),
    ],
)
def test_contract_is_exact_unless_there_is_a_reason(
    changes: dict[str, Any], num_ranks: int, tied: bool | None, reasons: tuple[str, ...], tolerance: float
) -> None:
    assert contract_of(BASE | changes, num_ranks, tied) == Contract(tolerance, reasons)


def test_bits_of_a_device_whose_kernels_need_not_repeat_them_are_not_asked_for() -> None:
    """As of a Llama on an H200, whose arms differed by 2e-4 in the second step: nothing had asked for such kernels."""
    runs = [make_run(arm, 0, losses, tied=False, repeatable=False) for arm, losses in (("stock", LOSSES), ("vertical", CLOSE))]
    verdict = compare_losses(runs, contract_of(BASE, 1, *ab._told(runs)))
    assert verdict.agreement is Agreement.WITHIN and "torch.use_deterministic_algorithms" in describe_losses(verdict, 3)
    strict = [make_run(arm, 0, losses, tied=False) for arm, losses in (("stock", LOSSES), ("vertical", CLOSE))]
    assert compare_losses(strict, contract_of(BASE, 1, *ab._told(strict))).agreement is Agreement.DIFFERENT


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (make_run("vertical", 0, LOSSES, engine="DeepSpeedEngine"), "instead of VerticalEngine"),
        (make_run("vertical", 0, LOSSES[:2]), "2 steps instead of 3"),
        (make_run("vertical", 0, LOSSES, num_ranks=2), "2 ranks instead of 1"),
        (make_run("vertical", 0, [(3.0,), (2.5,), (2.0,)]), "micro-batches"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(wrong: Run, words: str) -> None:
    stock = make_run("stock", 0, LOSSES)
    check_runs([stock, make_run("vertical", 0, LOSSES)], 3, 1)
    with pytest.raises(ComparisonError, match=words):
        check_runs([stock, wrong], 3, 1)


def test_summary_leaves_out_first_steps_sums_bytes_and_takes_the_slowest_rank() -> None:
    runs = [make_run("stock", repeat, LOSSES, step_s=1.0 + repeat, num_ranks=2) for repeat in range(2)]
    summary = summarize_arm(runs)
    assert summary.step_s_by_repeat == ((1.5, 1.5), (2.5, 2.5))
    assert summary.step_s == 2.0
    assert summary.tokens_per_s == 16 / 2.0
    assert (summary.read_bytes_per_step, summary.write_bytes_per_step) == (300, 20)
    assert summary.peak_host_bytes == 2 * 1002
    assert summary.losses == (2.5, 2.0, 1.5)


def test_a_steps_loss_is_the_mean_of_its_micro_batches_whichever_ranks_bring_them() -> None:
    few, many = (make_run("stock", 0, [losses] * 2).ranks[0] for losses in ([1.0], [3.0, 3.0, 3.0]))
    assert summarize_arm([Run("stock", 0, {0: few, 1: many})]).losses == (2.5, 2.5)


def test_table_shows_both_arms_and_their_ratio() -> None:
    stock, vertical = (summarize_arm([make_run(arm, 0, LOSSES, step_s)]) for arm, step_s in (("stock", 3.0), ("vertical", 1.5)))
    text = comparison_table({"stock": stock, "vertical": vertical})
    assert re.search(r"^step +3 s +1\.5 s +2\.00$", text, re.M)
    assert "DeepSpeedEngine" in text and "VerticalEngine" in text
    assert re.search(r"^step +1\.5 s$", comparison_table({"vertical": vertical}), re.M)
    assert "peak device memory" not in text and "peak_device_bytes" not in stock.to_json(True)


def test_a_devices_peak_is_the_fullest_ones() -> None:
    records = [make_run("stock", 0, LOSSES, peak_device_bytes=size).ranks[0] for size in (3_000_000, 5_000_000)]
    summary = summarize_arm([Run("stock", 0, dict(enumerate(records)))])
    assert summary.to_json(True)["peak_device_bytes"] == 5_000_000
    assert re.search(r"^peak device memory +5 MB$", comparison_table({"stock": summary}), re.M)


# --- real launches -------------------------------------------------------------------------------------------------


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`ds-vertical ab` as a process, 3 steps of SCRIPT in each arm."""
    return subprocess.run(ab_command(folder, *arguments), capture_output=True, text=True, timeout=280)


def ab_command(folder: Path, *arguments: str) -> list[str]:
    script, config = write(folder, "script.py", SCRIPT), write(folder, "config.json", BASE)
    own = ["--config", str(config), "--out", str(folder / "out"), "--steps", "3"]
    return [sys.executable, "-m", "ds_vertical.cli.main", "ab", *own, "--", str(script), *arguments]


def test_equal_arms_give_a_table_and_a_report(tmp_path: Path) -> None:
    done = launch(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kept for the backward: nothing" in done.stdout
    assert done.stdout.index("equal bit for bit") < done.stdout.index("stock/vertical") < done.stdout.index("no bound: ")
    report = json.loads((tmp_path / "out" / "ab.json").read_text())
    assert report["losses_equal"] is True and "kept no account" in report["yardstick"]["missing"]
    assert report["speedup"] == report["arms"]["stock"]["step_s"] / report["arms"]["vertical"]["step_s"]
    for arm, engine, enabled in (("stock", "DeepSpeedEngine", False), ("vertical", "VerticalEngine", True)):
        entry = report["arms"][arm]
        assert entry["engine"] == engine
        assert entry["losses"] == [3.5, 3.5, 3.5]
        assert entry["tokens_per_s"] == pytest.approx(8 / entry["step_s"])
        assert entry["peak_host_bytes"] > 0 and entry["read_bytes_per_step"] >= 0 <= entry["write_bytes_per_step"]
        written = json.loads((tmp_path / "out" / f"{arm}.json").read_text())
        assert written == report["configs"][arm] == BASE | {"vertical_schedule": {"enabled": enabled}}
    assert report["command"][:2] == ["ds-vertical", "ab"] and report["versions"]["deepspeed"] == "0.19.8"
    asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert head.startswith(report["versions"]["commit"].removesuffix("-dirty"))


@pytest.mark.slow
def test_the_vertical_arm_alone_and_traced(tmp_path: Path) -> None:
    command = ab_command(tmp_path)
    command[command.index("--") : command.index("--")] = ["--vertical-only", "--trace", "--no-bound"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "ab.json").read_text())
    assert list(report["arms"]) == ["vertical"] == list(report["configs"])
    assert report["speedup"] is None and "yardstick" not in report and "stock" not in done.stdout
    traced = json.loads((tmp_path / "out" / "traced.json").read_text())
    assert traced["vertical_schedule"] == {"enabled": True, "trace": str(tmp_path / "out" / "traced.0.trace")}


@pytest.mark.slow
def test_a_real_run_is_measured_against_its_bound(tmp_path: Path) -> None:
    config = json.loads((ROOT / "configs" / "gpt_13m_cpu.json").read_text())
    for name in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][name]["nvme_path"] = str(tmp_path / "ssd")
    config["vertical_schedule"] |= {"activations": {"keep": "everything", "keep_device": "ssd"}}
    script = [str(ROOT / "scripts" / "train.py"), "--model", "gpt_13m", "--seq", "8"]
    own = ["--config", str(write(tmp_path, "config.json", config)), "--out", str(tmp_path / "out"), "--steps", "4"]
    command = [sys.executable, "-m", "ds_vertical.cli.main", "ab", *own, "--vertical-only", "--trace", "--", *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "out" / "ab.json").read_text())
    found, kept = written["yardstick"], written["kept"]
    assert kept["policy"] == "everything" and kept["bytes"]["ssd"] > 1e5
    assert f"kept for the backward: {KeptRecord.from_json(kept).describe()}" in done.stdout
    assert found["bound_s"] > 0 and not found["without_compute"] and found["simulated_s"] > 0
    assert found["bytes"]["over_table"] == pytest.approx(1.0, abs=0.1)
    assert 0 <= found["outside_share"] < 1 and found["trace_cost_share"] > 0
    assert found["limits"]["settings"]["tokens"] == 8 * config["train_micro_batch_size_per_gpu"]
    ahead, after = found["rates_by_repeat"][0]
    assert ahead["layer_forward_s"] > 0 and ahead != after
    assert "bound of the vertical step" in done.stdout and "simulated makespan" in done.stdout


@pytest.mark.slow
def test_different_losses_fail_without_any_speed(tmp_path: Path) -> None:
    (ab_folder.take(tmp_path / "out") / "ab.json").write_text("an earlier result")
    done = launch(tmp_path, "--shift", "0.001")
    assert done.returncode == 1
    assert "step 1, micro-batch 1" in done.stdout and "4.0 in stock.0, 4.001 in vertical.0" in done.stdout
    report = json.loads((tmp_path / "out" / "ab.json").read_text())
    assert (report["losses_equal"], report["speedup"]) == (False, None)
    assert report["losses_verdict"]["first_difference"]["step"] == 1
    for text in (done.stdout, json.dumps(report["arms"])):
        assert "tokens" not in text and "step_s" not in text and "stock/vertical" not in text


@pytest.mark.slow
def test_failing_arm_shows_the_end_of_its_log(tmp_path: Path) -> None:
    done = launch(tmp_path, "--fail-in", "stock")
    assert done.returncode == 1
    assert "stock.0 ended with status" in done.stderr and "this arm fails" in done.stderr
    assert str(tmp_path / "out" / "stock.0.log") in done.stderr
    assert not (tmp_path / "out" / "ab.json").exists()
    assert not (tmp_path / "out" / "vertical.0.log").exists()


@pytest.mark.slow
def test_ended_ab_ends_its_run(tmp_path: Path) -> None:
    with subprocess.Popen(ab_command(tmp_path, "--hang"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        pid = wait_for_pid(tmp_path / "out" / "stock.0.log", process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 128 + signal.SIGTERM
    assert not is_alive(pid)
