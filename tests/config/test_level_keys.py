"""DeepSpeed's keys of ZeRO++ and the section's `levels`: what they mean in either arm, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from deepspeed.runtime.comm.coalesced_collectives import all_to_all_quant_reduce
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

from ds_vertical.config.cross_check import check
from ds_vertical.config.levels import move_levels
from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import VerticalConfig, load_section
from ds_vertical.errors import ConfigError
from ds_vertical.types import LevelSettings

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


def changed(zero: dict[str, Any], levels: dict[str, Any] | None = None) -> dict[str, Any]:
    config = copy.deepcopy(BASE)
    config["zero_optimization"] |= zero
    config["vertical_schedule"] = {} if levels is None else {"levels": levels}
    return config


def faults_of(config: dict[str, Any]) -> list[str]:
    section = load_section(config)
    assert section is not None
    with pytest.raises(ConfigError) as caught:
        check(config, section)
    return str(caught.value).splitlines()


def settings_of(config: dict[str, Any]) -> LevelSettings:
    section = load_section(move_levels(config))
    assert section is not None
    return resolve(section).levels


def test_without_keys_there_is_one_level() -> None:
    assert settings_of(changed({})) == LevelSettings()
    assert not LevelSettings().are_on and LevelSettings().share is None


def test_deepspeeds_keys_go_to_the_section_and_leave_plain_partitions_to_zero_init() -> None:
    zero = {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": "true"}
    config = changed(zero, {"copy_share": 0.5})
    moved = move_levels(config)
    assert moved["zero_optimization"] == BASE["zero_optimization"]
    assert settings_of(config) == LevelSettings(2, True, True, copy_share=0.5)
    assert move_levels(moved) == moved, "what `prepare` has made may be prepared again"
    assert check(config, VerticalConfig(levels=load_section(config).levels)) == []  # type: ignore[union-attr]
    assert check(moved, load_section(moved)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "flag"), [(2, True), ("2", "yes"), (2.0, 1), ("2.0", "on")])
def test_values_mean_what_deepspeed_makes_of_them(size: Any, flag: Any) -> None:
    zero = {"zero_hpz_partition_size": size, "zero_quantized_weights": flag}
    read = DeepSpeedZeroConfig(**zero)
    assert (read.zero_hpz_partition_size, read.zero_quantized_weights) == (2, True)
    assert settings_of(changed(zero)) == LevelSettings(2, True)


@pytest.mark.parametrize("off", [1, 0, None, "1", "auto"])
def test_deepspeeds_values_for_off_leave_one_level(off: Any) -> None:
    assert settings_of(changed({"zero_hpz_partition_size": off, "zero_quantized_weights": False})) == LevelSettings()


def test_the_share_of_copies() -> None:
    assert settings_of(changed({"zero_hpz_partition_size": 4})).share == 1.0
    assert settings_of(changed({"zero_hpz_partition_size": 4}, {"copy_share": 0.25})).share == 0.25


@pytest.mark.parametrize(
    ("zero", "levels", "told"),
    [
        ({"zero_quantized_weights": True}, {}, "zero_optimization.zero_quantized_weights: got true without"),
        ({"zero_quantized_gradients": 1}, {}, "zero_optimization.zero_quantized_gradients: got true without"),
        ({}, {"copy_share": 0.5}, "vertical_schedule.levels.copy_share: got 0.5 without"),
        ({}, {"gradients": 4}, "vertical_schedule.levels.gradients: got 4 without"),
        ({}, {"gradient_bits": [8, 4]}, "vertical_schedule.levels.gradient_bits: got [8, 4] without"),
        ({}, {"copy_on_device": True}, "vertical_schedule.levels.copy_on_device: got true without"),
        ({"zero_hpz_partition_size": 2}, {"ranks_per_node": 4}, "vertical_schedule.levels.ranks_per_node: got 4 with"),
        ({"zero_hpz_partition_size": "two"}, {}, 'zero_optimization.zero_hpz_partition_size: got "two"'),
        ({"zero_hpz_partition_size": -2}, {}, "zero_optimization.zero_hpz_partition_size: got -2; need an integer >= 1"),
        ({"zero_hpz_partition_size": 2.5}, {}, "zero_optimization.zero_hpz_partition_size: got 2.5"),
        ({"zero_hpz_partition_size": 2, "zero_quantized_weights": 2}, {}, "zero_optimization.zero_quantized_weights: got 2"),
        ({"zero_quantized_gradients": "maybe"}, {}, 'zero_optimization.zero_quantized_gradients: got "maybe"; need true or'),
    ],
)
def test_each_refusal_names_path_and_value_and_what_to_write(zero: Any, levels: Any, told: str) -> None:
    faults = [line for line in faults_of(changed(zero, levels)) if line.startswith(told)]
    assert len(faults) == 1 and ("write" in faults[0] or "remove" in faults[0])


@pytest.mark.parametrize(
    ("key", "value", "need"),
    [
        ("copy_share", 1.5, "a number from 0 to 1, or null"),
        ("gradients", "bf16", "an integer >= 1, or null"),
        ("gradient_bits", [4], "two of null, 4 and 8"),
        ("gradient_bits", [None, 3], "two of null, 4 and 8"),
        ("block", 3, "an even integer >= 2"),
        ("copy_on_device", "yes", "true or false"),
        ("copy", 0.5, 'did you mean "copy_share"'),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_needed(key: str, value: Any, need: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_section(changed({}, {key: value}))
    assert str(caught.value).startswith(f"vertical_schedule.levels.{key}")
    assert need in str(caught.value)


def test_the_stock_arm_with_hpz_on_ssd_is_refused_where_deepspeed_would_fail() -> None:
    on_ssd = {"zero_hpz_partition_size": 2, "offload_param": {"device": "nvme", "nvme_path": "/ssd"}}
    config = changed(on_ssd) | {"vertical_schedule": {"enabled": False}}
    (fault,) = faults_of(config)
    assert fault.startswith("zero_optimization.zero_hpz_partition_size: got 2 with zero_optimization.offload_param.device")
    config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    assert check(config, VerticalConfig(enabled=False)) == []


@pytest.mark.parametrize(
    ("key", "called", "what"),
    [
        ("zero_quantized_weights", CUDAQuantizer, "zero.Init fails"),
        ("zero_quantized_nontrainable_weights", CUDAQuantizer, "zero.Init fails"),
        (
            "zero_quantized_gradients",
            partial(all_to_all_quant_reduce, [], {}),
            "fails where .*LOCAL_SIZE.*does nothing",
        ),
    ],
    ids=["weights", "weights that are not trained", "gradients"],
)
def test_the_stock_arm_that_quantises_is_refused_on_the_cpu_where_deepspeed_fails(
    key: str, called: Callable[[], object], what: str
) -> None:
    config = changed({key: True})
    assert check(config, VerticalConfig(enabled=False), "cuda:0") == check(config, VerticalConfig(enabled=False)) == []
    told = f"^zero_optimization.{key}: got true in the stock arm on the CPU.*: .*{what}; remove it$"
    with pytest.raises(ConfigError, match=told):
        check(config, VerticalConfig(enabled=False), "cpu")
    with pytest.raises(ValueError, match="not been implemented on CPU"):  # as DeepSpeed would say it
        called()
    assert check(changed({key: False}), VerticalConfig(enabled=False), "cpu") == []
    without_zero_init = changed({key: True, "stage": 2})
    assert check(without_zero_init, VerticalConfig(enabled=False), "cpu") == []
