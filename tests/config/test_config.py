"""The "vertical_schedule" section: what is read, what is refused and in which words, what null becomes."""

from __future__ import annotations

import base64
import copy
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from ds_vertical.config.cross_check import check
from ds_vertical.config.file import read_as_written, read_config
from ds_vertical.config.resolve import explain, resolve
from ds_vertical.config.section import SECOND_PLACE, SECTION, OnSignal, VerticalConfig, load_section
from ds_vertical.errors import ConfigError

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 1000000,
        "offload_param": {"device": "nvme", "nvme_path": "/ssd", "max_in_cpu": 0},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/ssd"},
    },
}

# Top-level keys that DeepSpeed 0.19.8 reads or removed, as its constants and config files name them.
DEEPSPEED_KEYS = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    steps_per_print dump_state disable_python_gc disable_allgather communication_data_type checkpoint data_types
    seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor gradient_allreduce_op
    zero_optimization activation_checkpointing comms_logger tensorboard wandb csv_monitor comet gradient_clipping
    fp16 bf16 bfloat16 torch_autocast optimizer scheduler zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    flops_profiler wall_clock_breakdown memory_breakdown autotuning use_data_before_expert_parallelism hybrid_engine
    pipeline data_efficiency aio dataloader_drop_last log_level datastates weight_quantization compile timers
    tensor_parallel expert_parallel vocabulary_size sequence_parallel_size data_parallel_size nebula elasticity
    sparse_attention quantize_training graph_harvesting curriculum_learning progressive_layer_drop eigenvalue amp
    compression_training sparse_gradients allgather_size zero_init inference_mode
""".split()


def changed(path: str, value: Any) -> dict[str, Any]:
    """BASE with one value set at a dotted path."""
    config = copy.deepcopy(BASE)
    *parents, last = path.split(".")
    place = config
    for key in parents:
        place = place.setdefault(key, {})
    place[last] = value
    return config


def without(path: str) -> dict[str, Any]:
    config = copy.deepcopy(BASE)
    *parents, last = path.split(".")
    place = config
    for key in parents:
        place = place[key]
    del place[last]
    return config


def faults_of(config: dict[str, Any], section: dict[str, Any] | None = None) -> list[str]:
    """The fault lines of `check`, which must refuse."""
    with pytest.raises(ConfigError) as caught:
        check(config, VerticalConfig(**(section or {})))
    return str(caught.value).splitlines()


# --- reading -------------------------------------------------------------------------------------------------------


def test_read_config_copies_a_dict_deeply() -> None:
    original = copy.deepcopy(BASE)
    read = read_config(original)
    read["zero_optimization"]["offload_param"]["nvme_path"] = "/elsewhere"
    assert original == BASE


def test_read_config_reads_files_by_str_and_path(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(BASE))
    assert read_config(file) == read_config(str(file)) == BASE


def test_read_config_reads_comments_and_trailing_commas_as_deepspeed_does(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{\n  // M\n  "gradient_accumulation_steps": 4, # same\n  "fp16": {"enabled": false,},\n}\n')
    assert read_config(file) == {"gradient_accumulation_steps": 4, "fp16": {"enabled": False}}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=8), json_values, max_size=4), st.booleans())
def test_read_config_round_trips_base64(config: dict[str, Any], url_safe: bool) -> None:
    encode = base64.urlsafe_b64encode if url_safe else base64.b64encode
    assert read_config(encode(json.dumps(config, ensure_ascii=False).encode()).decode()) == config


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"zero_optimization": {"stage": 3, "stage": 2}}'])
def test_read_config_refuses_duplicate_keys(tmp_path: Path, text: str) -> None:
    file = tmp_path / "twice.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"twice\.json: duplicate keys \"(a|stage)\"; keep one"):
        read_config(file)
    with pytest.raises(ConfigError, match="duplicate keys"):
        read_config(base64.urlsafe_b64encode(text.encode()).decode())


def test_read_config_refuses_duplicate_keys_in_a_commented_file(tmp_path: Path) -> None:
    file = tmp_path / "twice.json"
    file.write_text('{ // comment\n"a": 1, "a": 2}')
    with pytest.raises(ConfigError, match='duplicate keys "a"'):
        read_config(file)


def test_read_config_names_file_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "cut.json"
    file.write_text('{\n  "fp16": {"enabled": true\n')
    with pytest.raises(ConfigError, match=r"cut\.json: not valid JSON: .* at line \d+ column \d+"):
        read_config(file)


def test_read_config_refuses_what_is_no_object(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    file.write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"list\.json: got \[1, 2\]; need one JSON object"):
        read_config(file)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("ds_confg.json", '"ds_confg.json" is neither an existing file nor base64'),
        ("a" * 500, "no file; read as base64|neither an existing file nor base64"),
        (Path("/nonexistent/ds.json"), "/nonexistent/ds.json: no such file"),
        (3, "got a int; need a dict, the path"),
        (None, "got a NoneType; need a dict"),
    ],
)
def test_read_config_refuses_what_is_no_configuration(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(config)


def test_read_config_refuses_a_folder_and_undecodable_bytes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read it"):
        read_config(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match=r"latin\.json: cannot read it"):
        read_config(tmp_path / "latin.json")


# --- the section ---------------------------------------------------------------------------------------------------


def test_absent_section_is_none_and_empty_section_is_all_defaults() -> None:
    assert load_section(BASE) is None
    assert load_section({**BASE, SECTION: {}}) == VerticalConfig()
    assert VerticalConfig().model_dump() == {
        "enabled": True,
        "order": "vertical",
        "layers": None,
        "blocks_per_layer": 1,
        "snake": False,
        "overlap": True,
        "prefetch_layers": None,
        "optimizer_delay": None,
        "optimizer_speculation": None,
        "on_nonfinite": "skip",
        "gradient_host_share": None,
        "optimizer_host_share": None,
        "optimizer_read_ahead_bytes": None,
        "optimizer_compression": False,
        "keep_gradients": False,
        "host_memory_bytes": None,
        "outside_layers": "resident",
        "nvme_paths": None,
        "activations": {
            **{"device": None, "share": 1.0, "host_share": 0.0},
            **{"keep": None, "keep_device": None, "keep_share": 1.0, "keep_host_share": 0.0},
        },
        "levels": {
            **{"ranks_per_node": 1, "quantized_weights": False, "quantized_gradients": False, "gradients": None},
            **{"copy_share": None, "copy_on_device": False, "gradient_bits": (None, 4), "block": 256},
        },
        "elastic": None,
        "acco": None,
        "seed_micro_batches": True,
        "seed": None,
        "trace": None,
        "progress": None,
        "verify": False,
        "self_check": None,
        "on_signal": None,
    }


sections = st.fixed_dictionaries(
    {},
    optional={
        "enabled": st.booleans(),
        "order": st.sampled_from(["vertical", "horizontal"]),
        "layers": st.none()
        | st.lists(st.from_regex(r"[a-z_]{1,5}(\.[0-9a-z_]{1,4}){0,3}", fullmatch=True), min_size=1, unique=True),
        "blocks_per_layer": st.integers(1, 10**6),
        "snake": st.booleans(),
        "overlap": st.booleans(),
        "prefetch_layers": st.none() | st.integers(0, 100),
        "optimizer_delay": st.none() | st.floats(0, 1) | st.integers(0, 1),
        "optimizer_speculation": st.none() | st.booleans(),
        "on_nonfinite": st.sampled_from(["skip", "stop"]),
        "gradient_host_share": st.none() | st.floats(0, 1) | st.integers(0, 1),
        "optimizer_host_share": st.none() | st.floats(0, 1) | st.integers(0, 1),
        "optimizer_read_ahead_bytes": st.none() | st.integers(0, 10**12),
        "optimizer_compression": st.booleans(),
        "keep_gradients": st.booleans(),
        "seed_micro_batches": st.booleans(),
        "self_check": st.none() | st.booleans(),
        "seed": st.none() | st.integers(0, 2**64 - 1),
        "trace": st.none() | st.just("runs/trace"),
        "verify": st.booleans(),
        "on_signal": st.none() | st.just({"save_dir": "saved", "tag": None}),
    },
)


@settings(max_examples=80, deadline=None)
@given(sections)
def test_section_round_trips_through_json(section: dict[str, Any]) -> None:
    loaded = load_section({SECTION: section})
    assert loaded is not None
    for key, value in section.items():
        expected = tuple(value) if isinstance(value, list) else OnSignal(**value) if isinstance(value, dict) else value
        assert getattr(loaded, key) == expected
    assert load_section({SECTION: json.loads(loaded.model_dump_json())}) == loaded
    assert hash(loaded) == hash(load_section({SECTION: section}))


def test_section_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        VerticalConfig().snake = True  # pyright: ignore[reportAttributeAccessIssue]


def test_every_key_has_a_description() -> None:
    assert all(entry.description for entry in VerticalConfig.model_fields.values())


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"snakee": True}, 'vertical_schedule.snakee: unknown key; did you mean "snake"? known keys: enabled, order'),
        ({"Block_Per_Layer": 2}, 'vertical_schedule.Block_Per_Layer: unknown key; did you mean "blocks_per_layer"?'),
        ({"prefetch": 2}, 'vertical_schedule.prefetch: unknown key; did you mean "prefetch_layers"?'),
        ({"zzz": 1}, "vertical_schedule.zzz: unknown key; known keys: enabled, order, layers"),
        ({"blocks_per_layer": 0}, "vertical_schedule.blocks_per_layer: got 0; need an integer >= 1; write e.g. 1"),
        ({"blocks_per_layer": 2.0}, "vertical_schedule.blocks_per_layer: got 2.0; need an integer >= 1"),
        ({"blocks_per_layer": True}, "vertical_schedule.blocks_per_layer: got true; need an integer >= 1"),
        ({"blocks_per_layer": None}, "vertical_schedule.blocks_per_layer: got null; need an integer >= 1"),
        ({"snake": None}, "vertical_schedule.snake: got null; need true or false; write e.g. false"),
        ({"on_signal": True}, 'vertical_schedule.on_signal: got true; need an object with "save_dir" and "tag", or null;'),
        ({"on_signal": {}}, "vertical_schedule.on_signal.save_dir: got {}; need the path of a folder; write e.g."),
        ({"on_signal": {"save_dir": ""}}, 'vertical_schedule.on_signal.save_dir: got ""; need the path of a folder'),
        ({"on_signal": {"save_dir": "a", "tags": "b"}}, 'vertical_schedule.on_signal.tags: unknown key; did you mean "tag"?'),
        ({"verify": 1}, "vertical_schedule.verify: got 1; need true or false; write e.g. false"),
        ({"snake": "true"}, 'vertical_schedule.snake: got "true"; need true or false'),
        ({"overlap": 1}, "vertical_schedule.overlap: got 1; need true or false"),
        ({"enabled": "auto"}, 'vertical_schedule.enabled: got "auto" ("auto" is not a value here'),
        ({"seed": "auto"}, 'vertical_schedule.seed: got "auto" ("auto" is not a value here: null'),
        ({"seed": -1}, "vertical_schedule.seed: got -1; need an integer >= 0"),
        ({"seed": 2**64}, "vertical_schedule.seed: got 18446744073709551616; need an integer >= 0 and < 2^64"),
        ({"seed": 1.0}, "vertical_schedule.seed: got 1.0; need an integer"),
        ({"trace": ""}, 'vertical_schedule.trace: got ""; need the path of a folder, or null'),
        ({"trace": True}, "vertical_schedule.trace: got true; need the path of a folder, or null"),
        ({"seed_micro_batches": 0}, "vertical_schedule.seed_micro_batches: got 0; need true or false"),
        ({"prefetch_layers": -1}, "vertical_schedule.prefetch_layers: got -1; need an integer >= 0, or null"),
        ({"prefetch_layers": "auto"}, 'vertical_schedule.prefetch_layers: got "auto" ('),
        ({"optimizer_delay": 1.5}, "vertical_schedule.optimizer_delay: got 1.5; need a number from 0 to 1, or null"),
        ({"optimizer_delay": -0.1}, "vertical_schedule.optimizer_delay: got -0.1; need a number from 0 to 1, or null"),
        ({"optimizer_delay": math.nan}, "vertical_schedule.optimizer_delay: got NaN; need a number from 0 to 1, or null"),
        ({"optimizer_delay": True}, "vertical_schedule.optimizer_delay: got true; need a number from 0 to 1, or null"),
        ({"optimizer_speculation": 1}, "vertical_schedule.optimizer_speculation: got 1; need true, false or null"),
        ({"on_nonfinite": "ignore"}, 'vertical_schedule.on_nonfinite: got "ignore"; need "skip" or "stop"; write e.g. "skip"'),
        ({"on_nonfinite": None}, "vertical_schedule.on_nonfinite: got null; need"),
        ({"gradient_host_share": 2}, "vertical_schedule.gradient_host_share: got 2; need a number from 0 to 1, or null"),
        (
            {"optimizer_read_ahead_bytes": -1},
            "vertical_schedule.optimizer_read_ahead_bytes: got -1; need an integer >= 0, or null (half of what",
        ),
        (
            {"optimizer_read_ahead_bytes": 0.5},
            "vertical_schedule.optimizer_read_ahead_bytes: got 0.5; need an integer >= 0, or null (half of what",
        ),
        (
            {"optimizer_host_share": -0.1},
            "vertical_schedule.optimizer_host_share: got -0.1; need a number from 0 to 1, or null",
        ),
        ({"keep_gradients": 1}, "vertical_schedule.keep_gradients: got 1; need true or false"),
        ({"optimizer_delay": "auto"}, 'vertical_schedule.optimizer_delay: got "auto" ('),
        ({"order": "snake"}, 'vertical_schedule.order: got "snake"; need "vertical" or "horizontal"'),
        ({"order": "Vertical"}, 'vertical_schedule.order: got "Vertical"; need "vertical" or "horizontal"'),
        ({"layers": []}, "vertical_schedule.layers: got []; need null (discover) or a list"),
        ({"layers": "model.layers"}, 'vertical_schedule.layers: got "model.layers"; need null (discover) or a list'),
        ({"layers": "auto"}, 'vertical_schedule.layers: got "auto" ("auto" is not a value here'),
        ({"layers": ["model.layers", 3]}, "vertical_schedule.layers[1]: got 3; need"),
        ({"layers": ["model..layers"]}, 'vertical_schedule.layers[0]: got "model..layers"; need'),
        ({"layers": [""]}, 'vertical_schedule.layers[0]: got ""; need'),
        ({"layers": ["a.b", "a.b"]}, 'vertical_schedule.layers: got "a.b" more than once'),
    ],
)
def test_wrong_sections_are_refused_with_path_value_and_remedy(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_section({SECTION: section})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_all_faults_of_a_section_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_section({SECTION: {"snake": 1, "overlop": True, "seed": "x"}})
    paths = {line.split(":")[0] for line in str(caught.value).splitlines()}
    assert paths == {"vertical_schedule.snake", "vertical_schedule.overlop", "vertical_schedule.seed"}


@pytest.mark.parametrize("value", [None, True, False, [], "on", 1])
def test_section_that_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^vertical_schedule: got {re.escape(json.dumps(value))}; need an object"):
        load_section({SECTION: value})


@pytest.mark.parametrize(
    "name",
    """vertical_shedule verticalschedule vertical-schedule VerticalSchedule vertical_schedules vertical_scheduler
    vertical_sched verticl_schedule vertcal_shedule veritcal_schedule Vertical_Schedule VERTICAL_SCHEDULE vertical
    ds_vertical ds_vertical_schedule schedule_vertical vertical.schedule _vertical_schedule vert_sched vert_schedule
    layer_major layer_major_schedule""".split(),
)
def test_near_misses_of_the_section_name_are_refused(name: str) -> None:
    words = rf'^{re.escape(name)}: unknown section; did you mean "vertical_schedule"\?'
    with pytest.raises(ConfigError, match=words):
        load_section({**BASE, name: {}})
    with pytest.raises(ConfigError, match=words):
        load_section({**BASE, SECTION: {}, name: {}})


def test_deepspeed_and_private_keys_are_no_near_misses() -> None:
    private = ["schedule", "lr_schedule", "warmup_schedule", "parallel_schedule", "my_notes", "vertices", 3]
    assert load_section(dict.fromkeys([*DEEPSPEED_KEYS, *private], {})) is None


@pytest.mark.parametrize(
    "name", ["offload_params", "offload_parameters", "ofload_param", "offload_optimizers", "offload-optimizer"]
)
def test_near_misses_of_the_offload_sections_are_refused(name: str) -> None:
    near = "offload_param" if "par" in name else "offload_optimizer"
    with pytest.raises(ConfigError, match=rf'^zero_optimization\.{name}: unknown section; did you mean "{near}"\?'):
        load_section(changed(f"zero_optimization.{name}", {}))


def test_no_key_that_deepspeed_knows_is_a_near_miss() -> None:
    from deepspeed.runtime import constants
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    top = {value for value in vars(constants).values() if isinstance(value, str) and re.fullmatch(r"[a-z0-9_]+", value)}
    fields = DeepSpeedZeroConfig.model_fields
    zero = {*fields, *(field.alias for field in fields.values() if field.alias)}
    assert len(top) > 50 and {"offload_param", "cpu_offload_param"} < zero
    assert load_section(dict.fromkeys(top, {}) | {"zero_optimization": dict.fromkeys(zero, {})}) is None


def test_zero_optimization_is_the_sections_second_place(tmp_path: Path) -> None:
    config = changed(SECOND_PLACE, {"snake": True})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    expected = changed(SECTION, {"snake": True})
    for written in (config, str(path), base64.urlsafe_b64encode(path.read_bytes()).decode()):
        assert read_config(written) == expected, "DeepSpeed must not see a key of zero_optimization that it refuses"
    assert load_section(config) == VerticalConfig(snake=True)
    assert config == changed(SECOND_PLACE, {"snake": True}), "the caller's own dict was changed"
    assert read_as_written(str(path)) == config


def test_deepspeed_without_ds_vertical_refuses_the_second_place() -> None:
    import pydantic
    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(changed(SECTION, {}))  # ignored in silence: stock would train
    with pytest.raises(pydantic.ValidationError, match=rf"{SECTION}\n +Extra inputs are not permitted"):
        DeepSpeedConfig(changed(SECOND_PLACE, {}))


@pytest.mark.parametrize("read", [read_config, load_section])
def test_a_section_in_both_places_is_refused(read: Callable[[dict[str, Any]], object]) -> None:
    config = changed(SECOND_PLACE, {"enabled": True}) | {SECTION: {"enabled": False}}
    with pytest.raises(ConfigError) as caught:
        read(config)
    told = str(caught.value)
    assert told.startswith(f'{SECTION} and {SECOND_PLACE}: got {{"enabled": false}} and {{"enabled": true}}; ')
    assert told.endswith("remove the one at the top level")


def test_a_misspelt_section_inside_zero_optimization_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf'^zero_optimization\.vertical_shedule: .* did you mean "{SECTION}"\? Rename it$'):
        load_section(changed("zero_optimization.vertical_shedule", {}))


# --- cross-checks --------------------------------------------------------------------------------------------------


def test_base_configuration_passes_without_warnings() -> None:
    assert check(BASE, VerticalConfig()) == []


@pytest.mark.parametrize("param", ["nvme", "nvme in part", "cpu", "none", "absent"])
@pytest.mark.parametrize("optimizer", ["nvme", "cpu"])
@pytest.mark.parametrize("persistence", [0, None])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_unchanged_stage_3_configurations_pass(
    param: str, optimizer: str, persistence: int | None, num_micro_batches: int
) -> None:
    config = changed("gradient_accumulation_steps", num_micro_batches)
    zero = config["zero_optimization"]
    zero["offload_param"] = {"device": param.split()[0], "nvme_path": "/ssd", "max_in_cpu": 0}
    if param == "absent":
        del zero["offload_param"]
    if param == "nvme in part":
        zero["offload_param"]["max_in_cpu"] = 1000
    zero["offload_optimizer"] = {"device": optimizer, "nvme_path": "/ssd"}
    if persistence is not None:
        zero["stage3_param_persistence_threshold"] = persistence
    warnings = check(config, VerticalConfig())
    assert [line.split(":")[0] for line in warnings] == (
        ["zero_optimization.offload_param.max_in_cpu"] if param == "nvme in part" else []
    )


@pytest.mark.parametrize("fp16", [{}, {"loss_scale": 0}, {"loss_scale": "auto"}, {"loss_scale": 1024}, {"enabled": False}])
def test_stopping_at_overflows_needs_a_static_loss_scale(fp16: dict[str, Any]) -> None:
    config = changed("fp16", {"enabled": True} | fp16)
    assert check(config, VerticalConfig()) == []
    if fp16.get("loss_scale") == 1024 or "enabled" in fp16:
        assert check(config, VerticalConfig(on_nonfinite="stop")) == []
        return
    with pytest.raises(ConfigError, match=r'^vertical_schedule.on_nonfinite: got "stop" with fp16.loss_scale (0|noth)'):
        check(config, VerticalConfig(on_nonfinite="stop"))


# path, refused value, another that passes
REFUSED = [
    ("zero_optimization.stage", 2, 3),
    ("zero_optimization.stage", None, 3),
    ("zero_optimization.offload_optimizer.device", "none", "cpu"),
    ("zero_optimization.offload_optimizer.device", "gpu", "nvme"),
    ("zero_optimization.offload_optimizer.nvme_path", None, "/ssd"),
    ("zero_optimization.offload_optimizer.nvme_path", "", Path("/ssd")),
    ("zero_optimization.offload_optimizer.super_offload", True, False),
    ("zero_optimization.offload_optimizer.ratio", 0.5, 1.0),
    ("zero_optimization.offload_param.nvme_path", None, "/ssd"),
    ("zero_optimization.offload_param.nvme_path", 7, "/ssd"),
    ("zero_optimization.offload_param.device", "ssd", "cpu"),
    ("zero_optimization.offload_param.max_in_cpu", -1, 0),
    ("zero_optimization.offload_param.max_in_cpu", 0.5, 0),
    ("zero_optimization.offload_param.max_in_cpu", "many", 0),
    ("zero_optimization.offload_param.max_in_cpu", "1e9", 0),
    ("zero_optimization.offload_param.max_in_cpu", [1], 0),
    ("zero_optimization.zenflow", {}, None),
    ("zero_optimization.zero_quantized_nontrainable_weights", True, False),
    ("optimizer.type", "Lion", "adam"),
    ("optimizer.type", "OneBitAdam", "AdamW"),
    ("optimizer.type", 3, None),
    ("optimizer.params.torch_adam", True, False),
    ("optimizer.legacy_fusion", True, False),
    ("bf16.bf16_master_weights_and_grads", True, False),
    ("bf16.bf16_optimizer_states", True, False),
    ("fp16.fp16_master_weights_and_grads", True, False),
    ("managed_gradient_accumulation", False, True),
    ("prescale_gradients", True, False),
    ("gradient_predivide_factor", 2.0, 1.0),
    ("aio.use_gds", True, False),
    ("aio.use_gds", "false", False),
    ("gradient_allreduce_op", "sum", "Mean"),
    ("hybrid_engine.enabled", True, False),
    ("compile.deepcompile", True, False),
    ("pipeline", {"stages": 2}, {}),
    ("tensor_parallel.autotp_size", 2, 0),
    ("tensor_parallel.tp.tp_size", 2, 1),
    ("tensor_parallel.tensor_parallel.tp_size", 2, 1),
    ("expert_parallel.enabled", True, False),
    ("sequence_parallel_size", 2, 1),
    ("data_efficiency.enabled", True, False),
    ("amp", {"enabled": True}, None),
    ("curriculum_learning", {"enabled": True}, None),
    ("progressive_layer_drop", {"enabled": True}, None),
    ("eigenvalue", {}, None),
    ("compression_training", {}, None),
    ("sparse_gradients", True, None),
    ("gradient_accumulation_steps", 0, 1),
    ("gradient_accumulation_steps", True, 1),
    ("gradient_accumulation_steps", "4", "auto"),
    ("train_micro_batch_size_per_gpu", 0, "auto"),
    ("train_batch_size", 6, 8),
    ("zero_optimization", True, BASE["zero_optimization"]),
    ("optimizer", "AdamW", BASE["optimizer"]),
    ("zero_optimization.offload_optimizer", "cpu", {"device": "cpu"}),
]


@pytest.mark.parametrize(("path", "value", "fine"), REFUSED, ids=lambda value: str(value)[:40])
def test_each_refusal_names_path_and_value_and_its_remedy_passes(path: str, value: Any, fine: Any) -> None:
    faults = faults_of(changed(path, value))
    shown = "nothing" if value is None else json.dumps(value)
    matching = [line for line in faults if line.startswith(f"{path}: got {shown}")]
    assert len(matching) == 1, faults
    assert re.search(r"; (write|remove|give)\b", matching[0]), matching
    assert check(changed(path, fine), VerticalConfig()) == []


def test_a_max_in_cpu_of_null_is_refused_by_its_path() -> None:
    """DeepSpeed takes none, and no `max_in_cpu` at all; its error lacks the path."""
    path = "zero_optimization.offload_param.max_in_cpu"
    assert faults_of(changed(path, None)) == [f"{path}: got null; it is a number of elements; write 0 or more"]
    for taken in (without(path), changed(path, 1e9), changed(path, "1000"), changed(path, "auto")):
        assert [line.partition(":")[0] for line in check(taken, VerticalConfig())] == [path], "a warning"


def test_every_refusal_rule_has_a_case() -> None:
    from ds_vertical.config.cross_check import _REFUSALS

    tested = {path for path, _, _ in REFUSED}
    assert {rule.path.replace("bfloat16", "bf16") for rule in _REFUSALS} <= tested


def test_old_spelling_of_the_bf16_section_is_checked_too() -> None:
    faults = faults_of(changed("bfloat16", {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}))
    assert [line.split(":")[0] for line in faults] == [
        "bfloat16.bf16_master_weights_and_grads",
        "bfloat16.bf16_optimizer_states",
    ]


def test_missing_sections_are_named() -> None:
    assert faults_of(without("zero_optimization"))[0].startswith("zero_optimization.stage: got nothing")
    (fault,) = faults_of(without("zero_optimization.offload_optimizer"))
    assert fault == (
        'zero_optimization.offload_optimizer.device: got nothing; the optimizer step runs on the host; write "cpu" or "nvme"'
    )


def test_deprecated_cpu_offload_counts_as_the_optimizer_on_cpu() -> None:
    config = without("zero_optimization.offload_optimizer")
    config["zero_optimization"]["cpu_offload"] = True
    assert check(config, VerticalConfig()) == []


def test_all_cross_check_faults_are_reported_at_once() -> None:
    config = changed("zero_optimization.stage", 1)
    config["amp"] = {}
    config["optimizer"]["type"] = "Lamb"
    paths = {line.split(":")[0] for line in faults_of(config, {"order": "horizontal", "snake": True})}
    assert paths == {"zero_optimization.stage", "amp", "optimizer.type", "vertical_schedule.snake"}


def test_disabled_section_checks_nothing() -> None:
    assert check({"amp": {}, "zero_optimization": {"stage": 0}}, VerticalConfig(enabled=False)) == []


def test_snake_needs_the_vertical_order() -> None:
    (fault,) = faults_of(BASE, {"order": "horizontal", "snake": True})
    assert fault.startswith("vertical_schedule.snake: got true")
    assert check(BASE, VerticalConfig(snake=True)) == []
    assert check(BASE, VerticalConfig(order="horizontal")) == []


def test_settings_that_must_stay_allowed() -> None:
    config = copy.deepcopy(BASE)
    config |= {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 12},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "tensor_parallel": {},
        "data_efficiency": {"enabled": False, "data_sampling": {"curriculum_learning": {"enabled": True}}},
        "steps_per_print": 10,
        "scheduler": {"type": "WarmupLR", "params": {}},
    }
    config["zero_optimization"] |= {"load_from_fp32_weights": False, "round_robin_gradients": True}
    config["optimizer"]["params"]["lr"] = "auto"
    assert check(config, VerticalConfig()) == []


@pytest.mark.parametrize(
    ("sizes", "fault"),
    [
        ({}, "train_micro_batch_size_per_gpu: got nothing, and no train_batch_size either"),
        ({"gradient_accumulation_steps": 4}, "train_micro_batch_size_per_gpu: got nothing"),
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "train_batch_size: got 7; it is"),
        ({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 2}, "train_batch_size: got 1; it is"),
        ({"train_batch_size": 2.5}, "train_batch_size: got 2.5; need an integer >= 1"),
        ({"train_batch_size": 8}, None),
        ({"train_micro_batch_size_per_gpu": 2}, None),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, None),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}, None),
    ],
)
def test_number_of_micro_batches_must_be_written_or_derivable(sizes: dict[str, Any], fault: str | None) -> None:
    config = {key: value for key, value in BASE.items() if "batch" not in key and "accumulation" not in key} | sizes
    if fault is None:
        assert check(config, VerticalConfig()) == []
    else:
        (line,) = faults_of(config)
        assert line.startswith(fault)


@pytest.mark.parametrize(
    ("share", "device", "told"),
    [
        (0.5, "cpu", 'got 0.5 with zero_optimization.offload_optimizer.device "cpu", with which all'),
        (0, "cpu", 'in host memory; write 1 or null, or zero_optimization.offload_optimizer.device "nvme"'),
        *((share, "nvme", None) for share in (0, 0.5, 1, None)),
        (1, "cpu", None),
        (None, "cpu", None),
    ],
)
def test_a_share_of_the_state_is_of_what_is_to_be_on_ssd(share: float | None, device: str, told: str | None) -> None:
    offload = {"device": device} | ({"nvme_path": "/ssd"} if device == "nvme" else {})
    config = changed("zero_optimization.offload_optimizer", offload)
    if told is None:
        assert check(config, VerticalConfig(optimizer_host_share=share)) == []
    else:
        with pytest.raises(ConfigError) as refused:
            check(config, VerticalConfig(optimizer_host_share=share))
        assert str(refused.value).startswith("vertical_schedule.optimizer_host_share: got ") and told in str(refused.value)


@pytest.mark.parametrize(
    ("num_bytes", "device", "told"),
    [(1, "cpu", 'got 1 with zero_optimization.offload_optimizer.device "cpu"'), (0, "cpu", None), (None, "cpu", None)]
    + [(1, "nvme", None)],
)
def test_only_state_on_ssd_is_read_before_the_norm(num_bytes: int | None, device: str, told: str | None) -> None:
    offload = {"device": device} | ({"nvme_path": "/ssd"} if device == "nvme" else {})
    config = changed("zero_optimization.offload_optimizer", offload)
    section = VerticalConfig(optimizer_read_ahead_bytes=num_bytes)
    if told is None:
        assert check(config, section) == []
        return
    with pytest.raises(ConfigError) as refused:
        check(config, section)
    assert str(refused.value).startswith(f"vertical_schedule.optimizer_read_ahead_bytes: {told}")
    assert 'write 0 or null, or zero_optimization.offload_optimizer.device "nvme"' in str(refused.value)


@pytest.mark.parametrize(
    ("section", "device", "told"),
    [
        ({"gradient_host_share": 0.5}, "cpu", "vertical_schedule.gradient_host_share: got 0.5 with zero_optimization"),
        ({"gradient_host_share": 0, "keep_gradients": True}, "nvme", "vertical_schedule.keep_gradients: got true with"),
        ({"gradient_host_share": 0}, "nvme", None),
        ({"gradient_host_share": 1, "keep_gradients": True}, "cpu", None),
        ({"keep_gradients": True}, "cpu", None),
    ],
)
def test_gradients_wait_on_ssd_beside_the_state_and_are_not_kept_there(
    section: dict[str, Any], device: str, told: str | None
) -> None:
    offload = {"device": device} | ({"nvme_path": "/ssd"} if device == "nvme" else {})
    config = changed("zero_optimization.offload_optimizer", offload)
    if told is None:
        assert check(config, VerticalConfig(**section)) == []
        return
    with pytest.raises(ConfigError) as caught:
        check(config, VerticalConfig(**section))
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("bf16", {"enabled": False}, "true with bf16.enabled false, and only a parameter in bf16 has the high half"),
        (
            "zero_optimization.offload_optimizer",
            {"device": "cpu"},
            'offload_optimizer.device "cpu"; compressed are masters on SSD',
        ),
        ("zero_optimization.offload_param", {"device": "cpu"}, 'offload_param.device "cpu"; compressed are masters on SSD'),
        ("bf16", {"enabled": "auto"}, None),
    ],
)
def test_masters_are_compressed_beside_bf16_parameters_on_ssd(path: str, value: object, told: str | None) -> None:
    config = changed("bf16", {"enabled": True})
    assert not [line for line in check(config, VerticalConfig(optimizer_compression=True)) if "compression" in line]
    *above, last = path.split(".")
    (config[above[0]] if above else config)[last] = value
    check(config, VerticalConfig())
    if told is None:
        check(config, VerticalConfig(optimizer_compression=True))
        return
    with pytest.raises(ConfigError) as refused:
        check(config, VerticalConfig(optimizer_compression=True))
    assert str(refused.value).startswith("vertical_schedule.optimizer_compression: got true with ")
    assert told in str(refused.value)
    assert str(refused.value).endswith('or "optimizer_compression": false')


# --- warnings ------------------------------------------------------------------------------------------------------


def test_max_in_cpu_warns_with_its_default_and_as_written() -> None:
    (warning,) = check(without("zero_optimization.offload_param.max_in_cpu"), VerticalConfig())
    assert warning.startswith("zero_optimization.offload_param.max_in_cpu: 1000000000 (DeepSpeed's default")
    assert warning.endswith("write 0 to put all parameters on SSD")
    (warning,) = check(changed("zero_optimization.offload_param.max_in_cpu", 5e6), VerticalConfig())
    assert warning.startswith("zero_optimization.offload_param.max_in_cpu: 5000000 (as written)")
    shared = VerticalConfig(optimizer_host_share=0.5)
    assert check(changed("zero_optimization.offload_param.max_in_cpu", 5e6), shared) == []  # as a plan writes it
    assert len(check(without("zero_optimization.offload_param.max_in_cpu"), shared)) == 1
    config = without("zero_optimization.offload_param.max_in_cpu")
    config["zero_optimization"]["offload_param"]["device"] = "cpu"
    assert check(config, VerticalConfig()) == []


def test_reading_ahead_of_the_norm_without_overlap_warns() -> None:
    for written, num_warnings in ((10**9, 1), (0, 0), (None, 0)):
        section = VerticalConfig(overlap=False, optimizer_read_ahead_bytes=written)
        warnings = [each for each in check(BASE, section) if "optimizer_read_ahead_bytes" in each]
        assert len(warnings) == num_warnings
        assert all(each.startswith(f"vertical_schedule.optimizer_read_ahead_bytes: got {written} with") for each in warnings)


def test_prefetch_without_overlap_warns() -> None:
    (warning,) = check(BASE, VerticalConfig(prefetch_layers=2, overlap=False))
    assert warning.startswith("vertical_schedule.prefetch_layers: got 2 with vertical_schedule.overlap false")
    assert check(BASE, VerticalConfig(prefetch_layers=0, overlap=False)) == []
    assert check(BASE, VerticalConfig(overlap=False)) == []


@pytest.mark.parametrize(
    ("path", "value", "quiet"),
    [
        ("activation_checkpointing", {"partition_activations": True}, {}),
        ("memory_breakdown", True, False),
        ("wall_clock_breakdown", True, False),
        ("flops_profiler.enabled", True, False),
    ],
)
def test_ignored_settings_warn(path: str, value: Any, quiet: Any) -> None:
    (warning,) = check(changed(path, value), VerticalConfig())
    assert warning.startswith(f"{path}: got {json.dumps(value)}; ")
    assert check(changed(path, quiet), VerticalConfig()) == []


# --- null ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("overlap", "prefetch"), [(True, 1), (False, 0)])
def test_null_prefetch_follows_overlap(overlap: bool, prefetch: int) -> None:
    resolved = resolve(VerticalConfig(overlap=overlap))
    assert resolved.prefetch_layers == prefetch
    assert resolved.reasons["prefetch_layers"].startswith("null: ")


def test_null_seed_is_the_initial_seed_and_a_written_one_stays() -> None:
    assert resolve(VerticalConfig(), initial_seed=77).seed == 77
    assert resolve(VerticalConfig(seed=5), initial_seed=77).seed == 5
    assert resolve(VerticalConfig()).seed is None


@settings(max_examples=50, deadline=None)
@given(sections)
def test_resolve_keeps_everything_that_was_written(section: dict[str, Any]) -> None:
    loaded = load_section({SECTION: section})
    assert loaded is not None
    resolved = resolve(loaded)
    for key, value in loaded.model_dump().items():
        if value is not None:
            found = getattr(resolved, key)
            shown = {name: each for name, each in asdict(found).items() if name in value} if is_dataclass(found) else found
            assert shown == value  # a run's settings also have what no key of the JSON asks for
            assert resolved.reasons[key] == ("as written" if key in section else "default")


def test_explain_prints_every_key_with_its_origin() -> None:
    lines = explain(VerticalConfig(snake=True), initial_seed=9)
    assert [re.split(r"[ .]", line)[1] for line in lines] == list(VerticalConfig.model_fields)
    assert "vertical_schedule.snake = true (as written)" in lines
    assert "vertical_schedule.blocks_per_layer = 1 (default)" in lines
    assert "vertical_schedule.prefetch_layers = 1 (null: 1 as overlap is true)" in lines
    delay = "vertical_schedule.optimizer_delay = null (null: 0.25 where layers can be stepped during the backward, else 1)"
    assert delay in lines
    assert "vertical_schedule.seed = 9 (null: torch.initial_seed() at initialize)" in lines
    assert "vertical_schedule.layers = null (null: discovered in the model)" in lines
    assert explain(resolve(VerticalConfig(snake=True), 9)) == lines


def test_config_and_storage_import_neither_torch_nor_deepspeed() -> None:
    code = "import sys, ds_vertical.config.cross_check, ds_vertical.io.files; print({'torch', 'deepspeed'} & set(sys.modules))"
    root = ROOT
    assert subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True, timeout=200).strip() == "set()"


# ---- several SSDs

PATHS = f"{SECTION}.nvme_paths"


@pytest.mark.parametrize(
    ("paths", "config", "told"),
    [
        (
            ["/other", "/ssd1"],
            BASE,
            rf'^{PATHS}\[0\]: got "/other" with zero_optimization.offload_param.nvme_path "/ssd"; .*"nvme_paths": \["/ssd",',
        ),
        (
            ["/ssd", "/ssd/../ssd/"],
            BASE,
            rf'{PATHS}\[1\]: got "/ssd/../ssd/", the same folder as "/ssd"; write one folder for each',
        ),
        (["/ssd", "/ssd1"], changed("aio", {"use_gds": True}), r"^aio.use_gds: got true; .*; write false or remove it"),
        (
            ["/ssd", "/ssd1"],
            changed("zero_optimization.offload_param", None)
            | {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
            rf'^{PATHS}: got \["/ssd", "/ssd1"\], and neither .* has device "nvme"; remove it, or give',
        ),
    ],
    ids=["another first", "twice", "gds", "nothing on SSD"],
)
def test_paths_on_several_ssds_are_refused_by_name(paths: list[str], config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check(config, VerticalConfig(nvme_paths=tuple(paths)))


@pytest.mark.parametrize("value", ["/ssd", [], ["/ssd", 7], ["/ssd", " "]])
def test_paths_that_are_no_list_of_folders_are_refused(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{PATHS}(\[1\])?: got .*; need null or a list of folders, .*write e.g. \[\"/ssd0\""
    ):
        load_section({SECTION: {"nvme_paths": value}})


def test_paths_whose_first_is_nvme_path_pass_and_the_stock_arm_takes_any() -> None:
    assert check(BASE, VerticalConfig(nvme_paths=("/ssd/", "/ssd1"))) == check(BASE, VerticalConfig())
    assert check(BASE, VerticalConfig(enabled=False, nvme_paths=("/other",))) == []
