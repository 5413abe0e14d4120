"""The section's `acco`: what it means, and what is refused beside it, before anything is allocated."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ds_vertical.config.acco import with_acco
from ds_vertical.config.cross_check import check
from ds_vertical.config.resolve import explain, resolve
from ds_vertical.config.section import load_section
from ds_vertical.errors import ConfigError
from ds_vertical.types import AccoSettings

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
STATE_ON_SSD = {"offload_optimizer": {"device": "nvme", "nvme_path": "/ssd"}}
PARAMS_ON_SSD = {"offload_param": {"device": "nvme", "nvme_path": "/ssd"}}
PERSISTENCE = "stage3_param_persistence_threshold"


def changed(section: dict[str, Any], zero: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    config = copy.deepcopy(BASE) | top
    config["zero_optimization"] |= zero or {}
    config["vertical_schedule"] = {"acco": {}} | section
    return config


def faults_of(config: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        section = load_section(config)
        assert section is not None
        check(config, section)
    return str(caught.value).splitlines()


def test_the_key_is_off_unless_it_is_written() -> None:
    assert resolve(load_section({"vertical_schedule": {}})).acco is None  # type: ignore[arg-type]
    assert resolve(load_section(changed({}))).acco == AccoSettings("rank")  # type: ignore[arg-type]


def test_it_settles_when_steps_are_taken_and_that_nothing_is_chosen() -> None:
    section = load_section(changed({}))
    assert section is not None and check(changed({}), section) == []
    settings = resolve(section)
    assert (settings.optimizer_delay, settings.optimizer_speculation, settings.activations.keep) == (1.0, False, "none")
    lines = explain(settings)
    assert 'vertical_schedule.acco = {"copies": "rank"} (as written)' in lines
    assert "vertical_schedule.optimizer_delay = 1.0 (acco: the next half takes the steps)" in lines


def test_what_is_written_to_be_kept_is_kept() -> None:
    section = load_section(changed({"activations": {"keep": "everything"}}))
    assert section is not None and resolve(section).activations.keep == "everything"


@pytest.mark.parametrize("copies", ["rank", "node"])
def test_a_node_has_copies_where_ranks_share_them(copies: str) -> None:
    zero = {"zero_hpz_partition_size": 2} if copies == "node" else {}
    config = changed({"acco": {"copies": copies}}, zero)
    section = load_section(config)
    assert section is not None and check(config, section) == []


@pytest.mark.parametrize(
    ("section", "zero", "top", "told"),
    [
        ({}, {}, {"gradient_accumulation_steps": 5}, "gradient_accumulation_steps: got 5 with vertical_schedule.acco"),
        ({}, {}, {"gradient_accumulation_steps": 5}, "write 4 or 6, or remove acco"),
        ({}, {}, {"gradient_accumulation_steps": 1}, "gradient_accumulation_steps: got 1 with vertical_schedule.acco"),
        ({}, {}, {"gradient_accumulation_steps": 1}, "write 2, or remove acco"),
        ({"elastic": {}}, {}, {}, "vertical_schedule.elastic.min_micro_batches: got 1 with vertical_schedule.acco"),
        ({"elastic": {}}, {}, {}, "write 2 or more"),
        ({"optimizer_speculation": True}, {}, {}, "vertical_schedule.optimizer_speculation: got true with"),
        ({"optimizer_delay": 0.5}, {}, {}, "vertical_schedule.optimizer_delay: got 0.5 with"),
        ({"order": "horizontal"}, {}, {}, 'vertical_schedule.acco: got {"copies": "rank"} with order "horizontal"'),
        ({}, STATE_ON_SSD, {}, "zero_optimization.offload_optimizer.device: got"),
        ({}, STATE_ON_SSD, {}, "move 36 bytes for each parameter and step to and from the SSD, where the exact step moves 24;"),
        ({}, STATE_ON_SSD | PARAMS_ON_SSD, {"bf16": {"enabled": True}}, "move 48 bytes"),
        ({}, STATE_ON_SSD | PARAMS_ON_SSD, {"bf16": {"enabled": True}}, "the exact step moves 30; write"),
        ({}, STATE_ON_SSD | PARAMS_ON_SSD, {"bf16": {"enabled": False}}, "move 60 bytes"),
        ({}, STATE_ON_SSD | PARAMS_ON_SSD, {}, "the exact step moves 36; write"),
        ({}, PARAMS_ON_SSD, {}, "zero_optimization.offload_param.device: got"),
        ({}, {PERSISTENCE: 1000}, {}, f"zero_optimization.{PERSISTENCE}: got 1000 with vertical_schedule.acco"),
        ({"acco": {"copies": "node"}}, {}, {}, 'vertical_schedule.acco.copies: got "node" without'),
        ({}, {"zero_hpz_partition_size": 2}, {}, 'vertical_schedule.acco.copies: got "rank" with'),
        (
            {"acco": {"copies": "node"}, "levels": {"copy_share": 0.5}},
            {"zero_hpz_partition_size": 2},
            {},
            "vertical_schedule.levels.copy_share: got 0.5 with vertical_schedule.acco",
        ),
        (
            {"acco": {"copies": "node"}, "levels": {"copy_on_device": True}},
            {"zero_hpz_partition_size": 2},
            {},
            "vertical_schedule.levels.copy_on_device: got true with vertical_schedule.acco",
        ),
        ({"acco": {"copies": "both"}}, {}, {}, 'vertical_schedule.acco.copies: got "both"; need "rank" or "node"'),
        ({"acco": {"copy": "rank"}}, {}, {}, 'vertical_schedule.acco.copy: unknown key; did you mean "copies"?'),
        ({"acco": True}, {}, {}, 'vertical_schedule.acco: got true; need an object with "copies"'),
    ],
)
def test_faults_name_path_value_and_remedy(
    section: dict[str, Any], zero: dict[str, Any], top: dict[str, Any], told: str
) -> None:
    faults = faults_of(changed(section, zero, **top))
    assert any(told in fault for fault in faults), faults


def test_elastic_counts_may_be_odd() -> None:
    config = changed({"elastic": {"min_micro_batches": 2}}, gradient_accumulation_steps=5)
    section = load_section(config)
    assert section is not None and check(config, section) == []


def test_no_parameter_stays_on_the_device() -> None:
    assert with_acco(changed({}))["zero_optimization"][PERSISTENCE] == 0
    assert with_acco(changed({}, {PERSISTENCE: "auto"}))["zero_optimization"][PERSISTENCE] == 0
    for other in ({"acco": None}, {"enabled": False}):
        assert PERSISTENCE not in with_acco(changed(other))["zero_optimization"]
