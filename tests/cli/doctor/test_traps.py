"""What the doctor says of a JSON: refusals, misspelt keys, "auto", and stock's traps, which stock really steps into."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import harness
import pytest
from places import ROOT, SUPPORT

from ds_vertical.cli.doctor import config_checks, stock_traps
from ds_vertical.cli.doctor.check import Arm, CheckResult, Target
from ds_vertical.cli.doctor.stock_traps import TRAPS
from ds_vertical.compat.ops import load
from ds_vertical.config.section import SECOND_PLACE, SECTION

CONFIGS = sorted((ROOT / "configs").glob("*.json"))
Check = Callable[[Target], Iterator[CheckResult]]
ZERO = "zero_optimization"
PARAM = f"{ZERO}.offload_param"
STATE = f"{ZERO}.offload_optimizer"


def clean(folder: Path) -> dict[str, Any]:
    """A JSON of which nothing is to be said in either arm."""
    config = harness.base_config(folder, num_micro_batches=4)
    config[ZERO]["stage3_gather_16bit_weights_on_model_save"] = True
    return config


def case_of(folder: Path, edits: dict[str, Any] | None = None, arm: Any = None) -> Target:
    """A file with the clean JSON, values set at dotted paths; `...` takes a key out."""
    config = clean(folder)
    for path, value in (edits or {}).items():
        *above, key = path.split(".")
        holder = config
        for part in above:
            holder = holder.setdefault(part, {})
        if value is ...:
            holder.pop(key, None)
        else:
            holder[key] = copy.deepcopy(value)
    file = folder / "ds_config.json"
    file.write_text(json.dumps(config))
    return Target(file, None, arm)


def bad(check: Check, case: Target) -> list[CheckResult]:
    return [finding for finding in check(case) if finding.severity != "ok"]


def only(check: Check, case: Target) -> CheckResult:
    found = bad(check, case)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("arm", [None, "stock", "vertical", "both"])
def test_nothing_is_said_of_a_clean_json(tmp_path: Path, arm: str | None) -> None:
    case = case_of(tmp_path, arm=arm)
    checks = (config_checks.refusals, config_checks.near_misses, config_checks.autos, stock_traps.find_traps)
    assert [finding for check in checks for finding in bad(check, case)] == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_of_our_own_files_only_what_is_true_is_said(path: Path) -> None:
    case = Target(path)
    checks = (config_checks.refusals, config_checks.near_misses, config_checks.autos, stock_traps.find_traps)
    said = [finding for check in checks for finding in bad(check, case)]
    assert all(finding.severity == "warning" for finding in said)
    keys = {finding.found.partition(":")[0].rpartition(".")[2] for finding in said}
    prefetches = json.loads(path.read_text())[ZERO]["stage3_prefetch_bucket_size"] > 0
    saves = {"stage3_gather_16bit_weights_on_model_save"} if path.stem.startswith("stock_") else set()
    assert keys == saves | ({"stage3_prefetch_bucket_size"} if prefetches else set())


def test_of_readmes_json_nothing_is_said(tmp_path: Path) -> None:
    text = next(text for text in re.findall(r"```json\n(.*?)```", (ROOT / "README.md").read_text(), re.S))
    (tmp_path / "ds_config.json").write_text(text)
    case = Target(tmp_path / "ds_config.json")
    checks = (config_checks.refusals, config_checks.near_misses, config_checks.autos, stock_traps.find_traps)
    assert [finding for check in checks for finding in bad(check, case)] == []


# ---- what initialize refuses


@pytest.mark.parametrize(
    ("text", "found", "remedy"),
    [
        ("{", "not valid JSON: Expecting property name", "mend it there"),
        ('{"a": 1, "a": 2}', 'duplicate keys "a"', "keep one of each"),
        ("[]", "got []", "need one JSON object"),
    ],
)
def test_a_file_that_is_no_json_is_one_finding(tmp_path: Path, text: str, found: str, remedy: str) -> None:
    (tmp_path / "ds_config.json").write_text(text)
    case = Target(tmp_path / "ds_config.json")
    error = only(config_checks.refusals, case)
    assert error.severity == "error" and found in error.found and remedy in error.remedy
    others = [config_checks.near_misses, config_checks.autos, config_checks.deepspeed_reader, config_checks.precision]
    others.append(stock_traps.find_traps)
    assert case.config is None and [finding for check in others for finding in check(case)] == []


@pytest.mark.parametrize(
    ("edits", "found", "remedy"),
    [
        ({f"{ZERO}.stage": 2}, f"{ZERO}.stage: got 2; the vertical schedule needs ZeRO stage 3", "write 3"),
        ({"optimizer.type": "Lion"}, 'optimizer.type: got "Lion"', 'write "AdamW" or "Adam"'),
        ({"vertical_schedule.prefetch": 2}, "vertical_schedule.prefetch: unknown key", 'did you mean "prefetch_layers"?'),
        ({"vertical_schedule.snake": "auto"}, '"auto" is not a value here', "write e.g. false"),
        ({"vertical_schedul": {}}, "vertical_schedul: unknown section", 'did you mean "vertical_schedule"?'),
        ({f"{ZERO}.zenflow": {}}, f"{ZERO}.zenflow: got {{}}; ZenFlow's delayed updates are not exact", "remove it"),
    ],
)
def test_what_initialize_refuses_is_an_error_in_its_words(
    tmp_path: Path, edits: dict[str, Any], found: str, remedy: str
) -> None:
    error = only(config_checks.refusals, case_of(tmp_path, edits))
    assert error.severity == "error" and found in error.found and remedy in error.found + error.remedy


def test_every_fault_is_told_at_once_and_warnings_are_warnings(tmp_path: Path) -> None:
    assert len(bad(config_checks.refusals, case_of(tmp_path, {f"{ZERO}.stage": 1, "optimizer.type": "SGD"}))) == 2
    warning = only(config_checks.refusals, case_of(tmp_path, {f"{PARAM}.max_in_cpu": ...}))
    assert warning.severity == "warning" and warning.remedy == "write 0 to put all parameters on SSD"


def test_the_arm_decides_what_is_refused(tmp_path: Path) -> None:
    edits = {"vertical_schedule.enabled": False, "optimizer.type": "Lion"}
    assert bad(config_checks.refusals, case_of(tmp_path, edits)) == []
    assert "optimizer.type" in only(config_checks.refusals, case_of(tmp_path, edits, arm="vertical")).found
    hpz = {f"{ZERO}.zero_hpz_partition_size": 2}
    assert bad(config_checks.refusals, case_of(tmp_path, hpz)) == []
    for edits, arm in ((hpz, "both"), (hpz | {"vertical_schedule.enabled": False}, None)):
        error = only(config_checks.refusals, case_of(tmp_path, edits, arm=arm))
        assert "zero_hpz_partition_size: got 2" in error.found and "in the stock arm" in error.found
    quantized = {f"{ZERO}.zero_quantized_weights": True, "vertical_schedule.enabled": False}
    assert "on the CPU" in only(config_checks.refusals, case_of(tmp_path, quantized)).found
    absent = case_of(tmp_path, {"vertical_schedule": ...})
    assert absent.arms == {"stock"} and "the stock arm" in [*config_checks.refusals(absent)][0].found
    assert case_of(tmp_path, arm="both").arms == set(get_args(Arm)) and case_of(tmp_path).arms == {"vertical"}


# ---- misspelt keys and "auto"


def test_keys_that_deepspeed_ignores_are_told_with_what_was_meant(tmp_path: Path) -> None:
    edits = {"gradient_acumulation_steps": 8, "stage3_max_reuse_distance": 0, "my_notes": "x"}
    misspelt, nested, unknown = bad(config_checks.near_misses, case_of(tmp_path, edits))
    assert misspelt.severity == "error" and misspelt.remedy == '"gradient_accumulation_steps": 8'
    assert nested.severity == "error" and nested.remedy == f'"stage3_max_reuse_distance" inside {ZERO}'
    assert unknown.severity == "warning" and unknown.remedy == "remove it"


@pytest.mark.parametrize(
    ("path", "severity", "remedy"),
    [
        ("gradient_clipping", "error", '"gradient_clipping": 1.0'),
        ("optimizer.params.lr", "error", '"lr": 1e-4'),
        ("train_micro_batch_size_per_gpu", "error", '"train_micro_batch_size_per_gpu": 1'),
        ("bf16.enabled", "error", '"enabled": true'),
        (f"{ZERO}.stage3_prefetch_bucket_size", "warning", '"stage3_prefetch_bucket_size": 0'),
        (f"{PARAM}.pin_memory", "warning", "remove the key"),
    ],
)
def test_auto_is_told_with_what_to_write(tmp_path: Path, path: str, severity: str, remedy: str) -> None:
    found = only(config_checks.autos, case_of(tmp_path, {path: "auto"}))
    assert found.severity == severity and found.found.startswith(f'{path}: got "auto"') and remedy in found.remedy


def test_auto_where_deepspeed_means_it_is_nothing(tmp_path: Path) -> None:
    assert bad(config_checks.autos, case_of(tmp_path, {"data_types.keep_in_fp32_modules": "auto"})) == []


def test_launch_says_what_a_plain_launch_does_with_the_section(tmp_path: Path) -> None:
    for edits, told in (
        ({SECTION: {}}, "trains in DeepSpeed's own order without a word"),
        ({SECOND_PLACE: {}}, 'fails ("Extra inputs are not permitted")'),
    ):
        (found,) = config_checks.launch(case_of(tmp_path, {SECTION: ...} | edits))
        assert found.severity == "ok" and found.found.startswith(f"{next(iter(edits))}: launched plainly")
        assert told in found.found and "ds-vertical run SCRIPT" in found.found
    assert list(config_checks.launch(case_of(tmp_path, {SECTION: {"enabled": False}}))) == []
    assert list(config_checks.launch(case_of(tmp_path, {SECTION: ...}))) == []


def test_an_auto_beside_a_section_for_trainers_is_a_warning(tmp_path: Path) -> None:
    path = "optimizer.params.lr"
    edits = {path: "auto", SECTION: ..., SECOND_PLACE: {}}
    assert only(config_checks.autos, case_of(tmp_path, edits)).severity == "warning"
    assert only(config_checks.autos, case_of(tmp_path, {path: "auto"})).severity == "error"


def test_deepspeed_reads_auto_as_the_findings_say(tmp_path: Path) -> None:
    """The two kinds of section: where "auto" means an absent key, and where it arrives as a string."""
    from deepspeed.runtime.config import DeepSpeedConfig

    def read(path: str) -> Any:
        return DeepSpeedConfig(case_of(tmp_path, {path: "auto"}).config or {})

    assert read("bf16.enabled").bfloat16_config.enabled is False
    assert read(f"{ZERO}.stage3_prefetch_bucket_size").zero_config.prefetch_bucket_size == 5e7
    assert read("gradient_clipping").gradient_clipping == "auto"
    with pytest.raises(TypeError):
        read("train_micro_batch_size_per_gpu")


# ---- DeepSpeed's own reader


@pytest.mark.parametrize(
    ("edits", "found", "remedy"),
    [
        ({f"{ZERO}.stage3_prefetch_bucket": 0}, f"{ZERO}.stage3_prefetch_bucket: got 0", 'did you mean "'),
        ({f"{PARAM}.buffer_cout": 5}, f"{PARAM}.buffer_cout", ""),
        ({"fp16": {"enabled": True}}, "cannot be simultaneously enabled", "mend it in"),
        ({"bf16.enable": True}, ".enable: got true", 'remove or mend "enable"'),
        ({"elasticity": {}}, "Elastic training has been removed", "mend it in"),
    ],
)
def test_what_deepspeeds_reader_refuses_is_an_error(tmp_path: Path, edits: dict[str, Any], found: str, remedy: str) -> None:
    error = only(config_checks.deepspeed_reader, case_of(tmp_path, edits))
    assert error.severity == "error" and found in error.found and remedy in error.remedy


def test_deepspeeds_reader_is_not_asked_about_auto_nor_about_ranks(tmp_path: Path) -> None:
    edits = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", f"{PARAM}.pin_memory": "auto"}
    assert bad(config_checks.deepspeed_reader, case_of(tmp_path, edits)) == []
    eight_ranks = {"train_batch_size": 32, "gradient_accumulation_steps": 4}
    assert bad(config_checks.deepspeed_reader, case_of(tmp_path, eight_ranks)) == []


def test_arguments_that_cpu_adam_does_not_take(tmp_path: Path) -> None:
    edits = {"optimizer.params": {"learning_rate": 1e-4, "beta": [0.9, 0.95], "max_grad_norm": 1.0, "eps": 1e-8}}
    remedies = [finding.remedy for finding in bad(config_checks.optimizer, case_of(tmp_path, edits))]
    assert remedies == ['"lr": 0.0001', '"betas": [0.9, 0.95]', '"gradient_clipping": 1.0, at the top level']
    assert bad(config_checks.optimizer, case_of(tmp_path)) == []


def test_a_precision_that_the_device_lacks(tmp_path: Path) -> None:
    from ds_vertical.compat import accelerator

    said = bad(config_checks.precision, case_of(tmp_path, {"fp16": {"enabled": True}, "bf16": ...}))
    assert bool(said) is not accelerator.get_accelerator().is_fp16_supported()
    late = bad(config_checks.precision, case_of(tmp_path, {"bf16": ...}))
    assert bool(late) is not accelerator.get_accelerator().is_fp16_supported()
    assert all("zero.Init" in finding.remedy for finding in late)


# ---- stock's traps

STOCK_TRAPS = [
    ({f"{PARAM}.max_in_cpu": ...}, f"{PARAM}.max_in_cpu: 1000000000", '"max_in_cpu": 0'),
    ({f"{ZERO}.stage3_max_reuse_distance": ...}, "Not enough buffers", '"stage3_max_reuse_distance": 0'),
    ({f"{PARAM}.buffer_count": ...}, f"{PARAM}.buffer_count: not written, 5", '"buffer_count": 32'),
    ({f"{ZERO}.stage3_prefetch_bucket_size": ...}, "50000000 (DeepSpeed's default)", '"stage3_prefetch_bucket_size": 0'),
    ({f"{ZERO}.stage3_prefetch_bucket_size": 9}, "9 (as written)", '"stage3_prefetch_bucket_size": 0'),
    ({f"{STATE}.pipeline_read": True}, "pipeline_read needs 8", '"buffer_count": 8'),
    ({f"{STATE}.pipeline_read": True, f"{STATE}.pipeline_write": True}, "pipeline_write needs 12", '"buffer_count": 12'),
    ({f"{STATE}.buffer_count": 3}, "Adam needs 4", '"buffer_count": 4'),
    ({f"{ZERO}.sub_group_size": ...}, "20 bytes of memory per parameter", '"sub_group_size": 100000000'),
    (
        {f"{ZERO}.stage3_gather_16bit_weights_on_model_save": ...},
        "saves no weights",
        '"stage3_gather_16bit_weights_on_model_save": true',
    ),
]
TRAPS_OF_BOTH = [
    ({f"{PARAM}.buffer_size": ..., f"{PARAM}.buffer_count": 5}, "More elements ... than buffer size", '"buffer_size": '),
    ({"gradient_clipping": ...}, "clips at 1.0", '"gradient_clipping": 0.0'),
    ({"data_types": ...}, "summed in bf16", '"data_types": {"grad_accum_dtype": "fp32"}'),
    ({"aio.num_threads": 4}, "which ds_nvme_tune prints", '"intra_op_parallelism": 4'),
    ({"aio.queue_dept": 4}, "aio.queue_dept: DeepSpeed reads no such key and ignores it", '"queue_depth": 4'),
    ({"aio.single_submit": "false"}, 'aio.single_submit: got "false"', '"single_submit": false'),
    ({"aio.block_size": 1e6}, "aio.block_size: got 1000000.0", '"block_size": 1000000'),
    ({"aio.block_size": 1000000}, "multiples of 512 bytes", '"block_size": 1048576'),
    ({"aio.queue_depth": 0}, "aio.queue_depth: got 0", '"queue_depth": 8'),
]


@pytest.mark.parametrize(("edits", "found", "remedy"), STOCK_TRAPS)
def test_a_trap_of_stock_alone_is_told_for_the_stock_arm_alone(
    tmp_path: Path, edits: dict[str, Any], found: str, remedy: str
) -> None:
    said = only(stock_traps.find_traps, case_of(tmp_path, edits, arm="stock"))
    assert found in said.found and remedy in said.remedy
    assert bad(stock_traps.find_traps, case_of(tmp_path, edits)) == []
    assert only(stock_traps.find_traps, case_of(tmp_path, edits, arm="both")).found.startswith("stock arm: ")


@pytest.mark.parametrize(("edits", "found", "remedy"), TRAPS_OF_BOTH)
def test_a_trap_of_both_arms_is_told_for_each(tmp_path: Path, edits: dict[str, Any], found: str, remedy: str) -> None:
    for arm in ("stock", "vertical", "both"):
        said = only(stock_traps.find_traps, case_of(tmp_path, edits, arm=arm))
        assert found in said.found and remedy in said.remedy


def test_one_micro_batch_gains_nothing(tmp_path: Path) -> None:
    for edits in ({"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": ...}):
        said = only(stock_traps.find_traps, case_of(tmp_path, edits))
        assert "M is 1" in said.found and said.remedy == '"gradient_accumulation_steps": 16'


def test_traps_of_the_ssd_are_none_without_it(tmp_path: Path) -> None:
    memory = {f"{PARAM}": {"device": "cpu"}, f"{STATE}": {"device": "cpu"}, f"{ZERO}.stage3_max_reuse_distance": ...}
    assert bad(stock_traps.find_traps, case_of(tmp_path, memory, arm="both")) == []


def test_every_trap_has_arms_and_a_place_in_the_tests() -> None:
    assert all(trap.arms <= set(get_args(Arm)) for trap in TRAPS)
    assert len({trap.find for trap in TRAPS}) == len(TRAPS)


# ---- and they are true


@pytest.mark.parametrize("aio", [{"single_submit": "false"}, {"block_size": 1e6}, {"block_size": 1_000_000}])
def test_a_queue_takes_no_such_settings(aio: dict[str, Any]) -> None:
    settings = {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False}
    load.new_disk_queue(settings).close()
    with pytest.raises((TypeError, ValueError)):
        load.new_disk_queue(settings | aio)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({f"{ZERO}.stage3_max_reuse_distance": ..., f"{PARAM}.buffer_count": 5}, "Not enough buffers"),
        ({f"{PARAM}.buffer_size": 500_000}, "More elements 589824 than buffer size"),
        ({f"{STATE}.pipeline_read": True, f"{STATE}.pipeline_write": True, f"{STATE}.buffer_count": 11}, "swap buffers"),
        ({f"{STATE}.pipeline_read": True, f"{STATE}.buffer_count": 7}, "swap buffers"),
        ({f"{STATE}.pipeline_write": True, f"{STATE}.buffer_count": 7}, "swap buffers"),
        ({f"{STATE}.buffer_count": 3}, "AssertionError"),
        ({"aio.single_submit": "false"}, "TypeError"),
    ],
)
def test_stock_dies_of_it(tmp_path: Path, edits: dict[str, Any], words: str) -> None:
    done = train(tmp_path, edits)
    assert done.returncode != 0 and words in done.stdout + done.stderr, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "edits",
    [
        {f"{ZERO}.stage3_max_reuse_distance": 0, f"{PARAM}.buffer_count": 5},
        {f"{STATE}.pipeline_read": True, f"{STATE}.pipeline_write": True, f"{STATE}.buffer_count": 12},
        {f"{STATE}.pipeline_read": True, f"{STATE}.buffer_count": 8},
        {f"{STATE}.pipeline_write": True, f"{STATE}.buffer_count": 8},
        {"aio.num_threads": 4},
    ],
)
def test_and_lives_with_what_is_to_be_written(tmp_path: Path, edits: dict[str, Any]) -> None:
    done = train(tmp_path, edits)
    assert done.returncode == 0 and done.stdout.count("LOSS") == 3, done.stderr[-2000:]


def train(folder: Path, edits: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    once = {"gradient_accumulation_steps": 1, f"{ZERO}.sub_group_size": 500_000, "vertical_schedule": ...}
    case = case_of(folder, once | edits)
    command = [sys.executable, str(SUPPORT / "stock_trap.py"), str(case.config_path), "3"]
    return subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=250, check=False)
