"""A model's pieces are timed on as many processes at once as there are ranks that share the cores."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from transformers import PreTrainedConfig

from ds_vertical.cli.bench import block_timer
from ds_vertical.cli.bench.block_timer import ShortModel, short_model
from ds_vertical.cli.common import JsonObject
from ds_vertical.cli.plan import pieces
from ds_vertical.cli.plan.fake_run import read_spec
from ds_vertical.cli.plan.pieces import time_pieces
from ds_vertical.errors import ConfigError
from ds_vertical.model.hf import named_shape, read_fields

SIZES = {"num_hidden_layers": 6, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
TWO_KINDS = {"model_type": "recurrent_gemma", **SIZES, "block_types": ["attention", "attention", "recurrent"]}


@pytest.mark.slow  # processes that import torch and measure for seconds
def test_ranks_that_share_the_cores_are_timed_side_by_side() -> None:
    fields = read_fields(named_shape("gpt_13m"))
    found = time_pieces(read_spec("gpt_13m", fields, 8, "bf16", None), fields, 1, 2)
    assert all(seconds > 0 for seconds in found.pieces.values())
    assert 0.5 < found.block_backward / found.block_forward < 20
    assert list(found.saved_shares) == ["GPTNeoXLayer"]


@pytest.mark.slow  # processes that import torch and measure for seconds
def test_each_kind_of_block_is_timed() -> None:
    """Of six blocks the third and the last are of another kind: a model of two layers has none of it."""
    spec = read_spec("two_kinds", TWO_KINDS, 8, "bf16", None)
    assert [menu.num_blocks for menu in spec.menus] == [4, 2] and len({menu.kind for menu in spec.menus}) == 2
    found = time_pieces(spec, TWO_KINDS, 1)
    assert set(found.saved_shares) == {menu.kind for menu in spec.menus} and all(found.saved_shares.values())


@pytest.mark.slow  # processes that import torch and measure for seconds
def test_a_process_that_cannot_time_the_model_is_named() -> None:
    fields = read_fields(named_shape("gpt_13m"))
    spec = read_spec("gpt_13m", fields, 8, "bf16", None)
    with pytest.raises(
        ConfigError, match="gpt_13m with micro-batches of 1 cannot be timed here .a process that times the model"
    ):
        time_pieces(spec, {**fields, "model_type": "absent"}, 1, 2)


def test_processes_side_by_side_build_as_many_layers_each_as_all_have_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one process alone has room for the four layers that have both kinds."""
    spec = read_spec("two_kinds", TWO_KINDS, 8, "bf16", None)
    kinds = [menu.kind for menu in spec.menus]
    model = tmp_path / "config.json"
    model.write_text(json.dumps(TWO_KINDS))
    assert short_model(kinds, model, "bf16", "cpu", 2) == ShortModel(kinds, 4)
    for free in itertools.count(1 << 16, 1 << 16):
        monkeypatch.setattr(block_timer, "available_bytes", lambda free=free: free)
        if short_model(kinds, model, "bf16", "cpu").num_layers == 4:
            break
    assert short_model(kinds, model, "bf16", "cpu", 2).num_layers == 2
    orders: list[JsonObject] = []
    monkeypatch.setattr(pieces, "_timed_together", lambda order, count: orders.append(order) or [FIRST, SECOND])
    assert time_pieces(spec, TWO_KINDS, 1, 2).saved_shares == {"A": {"free": 0.5}}, "one process alone has timed B"
    assert [(order["num_layers"], order["kinds"]) for order in orders] == [(2, kinds)]


RATES = {"layer_forward_s": 1.0, "layer_backward_s": 2.0, "free_saved_s": 0.5}
OUTSIDE = RATES | {"pre_forward_s": 0.1, "pre_backward_s": 0.1, "head_s": 0.1}
FIRST, SECOND = {"rates": OUTSIDE, "kinds": {"A": RATES, "B": RATES}}, {"rates": OUTSIDE, "kinds": {"A": RATES}}


def test_a_configuration_without_a_number_of_layers_is_shortened() -> None:
    config = PreTrainedConfig()
    assert not hasattr(config, "num_hidden_layers")
    block_timer._shorten(4, config)
    assert config.num_hidden_layers == 4 and config.use_cache is False
