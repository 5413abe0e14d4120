"""Tiers and placements: shares by name, what is refused, and that a table lacking a tier says so."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from collections.abc import Mapping

import pytest

import ds_vertical.planner
import ds_vertical.types
from ds_vertical.errors import CostsError
from ds_vertical.planner import linear_program
from ds_vertical.planner.activation_tiers import activation_tiers
from ds_vertical.types import (
    RESTING_PLACES,
    SHARE_NAMES,
    ActivationSettings,
    Placement,
    TensorKind,
    Tier,
    per_tier,
)


def test_shares_have_the_names_that_plans_and_run_records_hold() -> None:
    recorded = ["parameters_on_ssd", "state_on_ssd", "gradients_on_ssd", "activations_on_host", "activations_on_ssd"]
    assert list(SHARE_NAMES) == recorded
    assert Placement().named() == dict(zip(recorded, (1.0, 1.0, 0.0, 0.0, 0.0), strict=True))
    placed = Placement.of(gradients_on_ssd=0.25, activations_on_host=0.5, activations_on_ssd=0.125)
    assert Placement.of(**placed.named()) == placed != Placement() and hash(placed) == hash(Placement.of(**placed.named()))
    assert pickle.loads(pickle.dumps(placed)) == placed


def test_the_shares_of_a_kind_add_up_and_stay_where_they_may_rest() -> None:
    placed = Placement.of(parameters_on_ssd=0.25, activations_on_host=0.5, activations_on_ssd=0.125)
    assert placed[TensorKind.PARAMETERS] == {Tier.HOST: 0.75, Tier.SSD: 0.25}
    assert placed[TensorKind.ACTIVATIONS] == {Tier.DEVICE: 0.375, Tier.HOST: 0.5, Tier.SSD: 0.125}
    assert all(sum(shares.values()) == 1 for shares in placed.values())
    assert placed.away(TensorKind.ACTIVATIONS) == 0.625 and placed.share(TensorKind.STATE, Tier.DEVICE) == 0
    moved = placed.with_shares(TensorKind.ACTIVATIONS, {Tier.SSD: 1.0})
    assert moved[TensorKind.ACTIVATIONS][Tier.DEVICE] == 0 and moved[TensorKind.PARAMETERS] == placed[TensorKind.PARAMETERS]
    with pytest.raises(CostsError, match="placement.state: got a share for device; write shares for ssd"):
        Placement({TensorKind.STATE: {Tier.DEVICE: 0.5}})


def test_a_tier_is_spelled_as_in_json() -> None:
    assert [*Tier] == ["device", "host", "ssd"] and f"{Tier.SSD}" == "ssd"
    assert {tier for places in RESTING_PLACES.values() for tier in places} == set(Tier), "a tier in which nothing may rest"


def test_a_table_that_lacks_a_tier_says_which() -> None:
    with pytest.raises(NotImplementedError, match="says nothing of host, ssd; add it there"):
        per_tier({Tier.DEVICE: 1})


def test_every_table_over_tiers_has_each_tier() -> None:
    """Sizes, distances, files, remedies: what a new tier has to say is asked for by a table of its own, at import."""
    names = [name for _, name, _ in pkgutil.iter_modules(ds_vertical.planner.__path__)]
    modules = [ds_vertical.types, *(importlib.import_module(f"ds_vertical.planner.{name}") for name in names)]
    tables = {
        (module.__name__, name): set(value)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, Mapping) and value and all(isinstance(key, Tier) for key in value)
    }
    assert {module.rpartition(".")[2] for module, _ in tables} >= {"types", "machine", "costs", "linear_program", "search"}
    assert {where: missing for where, known in tables.items() if (missing := set(Tier) - known)} == {}


def test_the_linear_program_or_the_search_decides_about_every_resting_place() -> None:
    """Of a kind's tiers all but one have a share that is chosen; the search tries both tiers of the state."""
    for kind, tiers in RESTING_PLACES.items():
        chosen = {tier for of, tier in linear_program.CHOSEN.values() if of is kind}
        assert len(set(tiers) - chosen) == 1 or (kind is TensorKind.STATE and tiers == (Tier.HOST, Tier.SSD)), kind


def test_the_share_in_files_is_that_of_the_tiers_of_files() -> None:
    placed = Placement.of(parameters_on_ssd=0.1, activations_on_host=0.5, activations_on_ssd=0.3)
    assert {kind: placed.in_files(kind) for kind in TensorKind} == {kind: placed.share(kind, Tier.SSD) for kind in TensorKind}


@pytest.mark.parametrize(
    ("device", "tiers"),
    [
        (None, ["device"] * 4),
        (Tier.DEVICE, ["device"] * 4),
        (Tier.HOST, ["host", "device", "host", "device"]),
        (Tier.SSD, ["ssd", "host", "ssd", "device"]),
    ],
)
def test_the_section_says_where_each_micro_batch_rests(device: Tier | None, tiers: list[str]) -> None:
    settings = ActivationSettings(device, share=0.5, host_share=0.25)
    assert sorted(activation_tiers(4, settings.shares)) == sorted(tiers)
