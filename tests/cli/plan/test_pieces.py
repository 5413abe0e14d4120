"""A model's pieces are timed on as many processes at once as there are ranks that share the cores."""

from __future__ import annotations

import pytest

from ds_vertical.cli.plan.fake_run import read_spec
from ds_vertical.cli.plan.pieces import time_pieces
from ds_vertical.errors import ConfigError
from ds_vertical.model.hf import named_shape, read_fields

pytestmark = pytest.mark.slow  # processes that import torch and measure for seconds


def test_ranks_that_share_the_cores_are_timed_side_by_side() -> None:
    fields = read_fields(named_shape("gpt_13m"))
    found = time_pieces(read_spec("gpt_13m", fields, 8, "bf16", None), fields, 1, 2)
    assert all(seconds > 0 for seconds in found.pieces.values())
    assert 0.5 < found.block_backward / found.block_forward < 20
    assert list(found.saved_shares) == ["GPTNeoXLayer"]


def test_each_kind_of_block_is_timed() -> None:
    """Of six blocks the third and the last are of another kind: a model of two layers has none of it."""
    sizes = {"num_hidden_layers": 6, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    fields = {"model_type": "recurrent_gemma", **sizes, "block_types": ["attention", "attention", "recurrent"]}
    spec = read_spec("two_kinds", fields, 8, "bf16", None)
    assert [menu.num_blocks for menu in spec.menus] == [4, 2] and len({menu.kind for menu in spec.menus}) == 2
    found = time_pieces(spec, fields, 1)
    assert set(found.saved_shares) == {menu.kind for menu in spec.menus} and all(found.saved_shares.values())


def test_a_process_that_cannot_time_the_model_is_named() -> None:
    fields = read_fields(named_shape("gpt_13m"))
    spec = read_spec("gpt_13m", fields, 8, "bf16", None)
    with pytest.raises(
        ConfigError, match="gpt_13m with micro-batches of 1 cannot be timed here .a process that times the model"
    ):
        time_pieces(spec, {**fields, "model_type": "absent"}, 1, 2)
