"""Finding the layers of a model: real Hugging Face models on the meta device, and small ones that show one rule each."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from families import FAMILIES, NUM_LAYERS, Family, Handwritten, Pair
from places import ROOT
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from ds_vertical.errors import LayerError
from ds_vertical.model.layers import LayerMap, map_layers

MODELS = ROOT / "configs" / "models"

CONTAINERS = {
    **dict.fromkeys(("gpt2", "gptj", "bloom", "falcon"), ["transformer.h"]),
    "opt": ["model.decoder.layers"],
    "gpt_neox": ["gpt_neox.layers"],
    "t5": ["encoder.block", "decoder.block"],
    "bart": ["model.encoder.layers", "model.decoder.layers"],
}


class Mixture(nn.Module):
    """A block with a stack of its own inside: experts that outweigh everything else."""

    def __init__(self, num_experts: int = 6) -> None:
        super().__init__()
        self.gate = nn.Linear(8, num_experts)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(num_experts)])


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], num_layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([make() for _ in range(num_layers)])
        self.head = nn.Linear(8, 16)


def paths(layers: LayerMap) -> list[str]:
    return [block.path for block in layers.blocks]


def containers(layers: LayerMap) -> list[str]:
    return list(dict.fromkeys(path.rpartition(".")[0] for path in paths(layers)))


def assert_partition(model: nn.Module, layers: LayerMap) -> None:
    """Every parameter in exactly one unit, and a layer's parameters inside its blocks."""
    assigned = [id(param) for params in layers.units.values() for param in params]
    assert len(assigned) == len(set(assigned))
    assert set(assigned) == {id(param) for param in model.parameters()}
    for index, layer in enumerate(layers.layers):
        inside = {id(param) for block in layer for param in layers.blocks[block].module.parameters()}
        assert {id(param) for param in layers.units[index]} <= inside


# ---- real models


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_blocks_of_every_family_are_found(family: Family) -> None:
    with torch.device("meta"):
        model = family.model_class()._from_config(family.config())
    layers = map_layers(model)
    assert layers.num_layers == NUM_LAYERS
    assert containers(layers) == CONTAINERS.get(family.name, ["model.layers"])
    assert_partition(model, layers)


@pytest.mark.parametrize("name", ["gpt_101m", "llama_3_8b"])
def test_the_shapes_of_the_repository_are_found(name: str) -> None:
    settings = json.loads((MODELS / f"{name}.json").read_text())
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = map_layers(model)
    assert layers.num_layers == config.num_hidden_layers
    in_layers = sum(param.numel() for index in range(layers.num_layers) for param in layers.units[index])
    assert in_layers + sum(param.numel() for param in layers.units["pre"]) == sum(p.numel() for p in model.parameters())
    assert len({sum(p.numel() for p in layers.units[index]) for index in range(layers.num_layers)}) == 1


# ---- discovery


def test_stacks_inside_a_block_are_not_layers() -> None:
    model = Stack(Mixture)
    layers = map_layers(model)
    assert paths(layers) == [f"blocks.{index}" for index in range(4)]
    assert_partition(model, layers)


def test_sequential_takes_the_longest_run_of_one_kind() -> None:
    model = nn.Sequential(nn.Embedding(16, 512), Pair(), Pair(), Pair(), nn.LayerNorm(512), nn.Linear(512, 16))
    layers = map_layers(model)
    assert paths(layers) == ["1", "2", "3"]
    assert {id(param) for param in layers.units["pre"]} == {id(p) for index in (0, 4, 5) for p in model[index].parameters()}


def test_modules_without_parameters_end_a_run() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    assert paths(map_layers(model)) == ["2", "3", "4"]


def test_a_light_list_is_not_a_stack_of_layers() -> None:
    model = Stack(Mixture)
    model.norms = nn.ModuleList([nn.LayerNorm(8) for _ in range(5)])
    assert containers(map_layers(model)) == ["blocks"]


def test_a_hand_written_model() -> None:
    with torch.device("meta"):
        model = Handwritten()
    layers = map_layers(model)
    assert containers(layers) == ["stack"] and layers.num_layers == 4
    assert all(any(param is gain for param in layers.units["pre"]) for gain in model.gains)
    assert_partition(model, layers)


def test_nothing_to_find_says_what_to_write() -> None:
    with pytest.raises(LayerError, match=r"vertical_schedule\.layers: no stack .*Linear.*e\.g\. \["):
        map_layers(nn.Linear(8, 8))


# ---- shared parameters


def test_parameters_that_layers_share_lie_outside_the_layers() -> None:
    model = Stack(lambda: nn.Linear(8, 8))
    shared = model.blocks[0].weight
    model.blocks[2].weight = shared
    layers = map_layers(model)
    assert any(param is shared for param in layers.units["pre"])
    assert [len(layers.units[index]) for index in range(4)] == [1, 2, 1, 2]
    assert_partition(model, layers)


def test_a_parameter_shared_with_the_head_lies_outside_the_layers() -> None:
    model = Stack(lambda: nn.Linear(8, 8))
    model.head.weight = model.blocks[3].weight
    layers = map_layers(model)
    assert any(param is model.head.weight for param in layers.units["pre"])
    assert_partition(model, layers)


def test_a_parameter_used_twice_inside_one_layer_stays_there() -> None:
    model = Stack(lambda: nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}))
    model.blocks[1]["b"].weight = model.blocks[1]["a"].weight
    layers = map_layers(model)
    assert any(param is model.blocks[1]["a"].weight for param in layers.units[1])
    assert_partition(model, layers)


# ---- paths


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["blocks"], ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        (["blocks.1", "blocks.2"], ["blocks.1", "blocks.2"]),  # the rest runs as glue
        (["blocks.0.experts"], [f"blocks.0.experts.{index}" for index in range(6)]),
        (["blocks", "head"], ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]),
    ],
    ids=str,
)
def test_dotted_paths(given: list[str], found: list[str]) -> None:
    model = Stack(Mixture)
    layers = map_layers(model, given)
    assert paths(layers) == found
    assert_partition(model, layers)


def test_paths_keep_their_order() -> None:
    assert paths(map_layers(Stack(Mixture), ["blocks.2", "blocks.0"])) == ["blocks.2", "blocks.0"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["blokcs"], r"got 'blokcs', which the model Stack does not have.*\"blocks\""),
        (["blocks.7"], r"got 'blocks\.7'"),
        ([], r"names no block"),
        (["empty"], r"names no block"),
        (["blocks", "blocks.0"], r"'blocks\.0' twice"),
        (["blocks.1", "blocks.1"], r"'blocks\.1' twice"),
        (["blocks.0", "blocks.0.experts"], r"'blocks\.0\.experts\.0' shares the module Linear with 'blocks\.0'"),
    ],
    ids=str,
)
def test_wrong_paths_are_refused(given: list[str], message: str) -> None:
    model = Stack(Mixture)
    model.empty = nn.ModuleList()
    with pytest.raises(LayerError, match=message):
        map_layers(model, given)


def test_a_module_that_two_blocks_share_is_refused() -> None:
    model = Stack(Mixture)
    model.blocks[3].gate = model.blocks[0].gate
    with pytest.raises(LayerError, match=r"'blocks\.3' shares the module Linear with 'blocks\.0'"):
        map_layers(model)


# ---- several blocks per layer


def test_blocks_per_layer_with_a_shorter_last_layer() -> None:
    layers = map_layers(Stack(Mixture, 7), blocks_per_layer=3)
    assert layers.layers == (range(0, 3), range(3, 6), range(6, 7))


def test_layers_do_not_straddle_containers() -> None:
    family = next(family for family in FAMILIES if family.name == "t5")
    with torch.device("meta"):
        model = family.model_class()._from_config(family.config())
    assert map_layers(model, blocks_per_layer=3).layers == (range(0, 2), range(2, 4))
    assert map_layers(model, ["encoder.block", "decoder.block"], 3).layers == (range(0, 2), range(2, 4))
    singles = ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]
    assert map_layers(model, singles, 4).layers == (range(0, 2), range(2, 4))


def test_the_start_up_line_names_the_containers() -> None:
    assert map_layers(Stack(Mixture, 6), blocks_per_layer=2).describe() == "3 layers of 2 block(s) in blocks"


# ---- models whose layers are not one list


def on_meta(model_type: str, auto: type = AutoModelForMaskedLM, **settings: object) -> nn.Module:
    config = AutoConfig.for_model(model_type, **settings)
    with torch.device("meta"):
        return auto.from_config(config)


def test_lists_in_a_list_are_opened() -> None:
    model = on_meta("funnel", block_sizes=[2, 1], num_decoder_layers=2, d_model=64, n_head=4, d_head=16, d_inner=64)
    found = ["funnel.encoder.blocks.0", "funnel.encoder.blocks.1", "funnel.decoder.layers"]
    assert containers(map_layers(model)) == found
    named = map_layers(model, ["funnel.encoder.blocks"])
    assert paths(named) == [f"funnel.encoder.blocks.{at}" for at in ("0.0", "0.1", "1.0")]
    assert_partition(model, map_layers(model))


def test_a_module_without_state_may_be_shared() -> None:
    model = Stack(Mixture)
    model.blocks[3].activation = model.blocks[0].activation = nn.Tanh()
    assert map_layers(model).num_layers == 4
    model.blocks[3].norm = model.blocks[0].norm = nn.BatchNorm1d(8, affine=False)  # its statistics are state
    with pytest.raises(LayerError, match=r"'blocks\.3' shares the module BatchNorm1d"):
        map_layers(model)


@pytest.mark.parametrize("groups", [1, 2])
def test_layers_that_run_again_and_again_are_one(groups: int) -> None:
    model = on_meta("albert", hidden_size=64, num_attention_heads=4, num_hidden_groups=groups, num_hidden_layers=4)
    layers = map_layers(model)
    assert paths(layers) == ["albert.encoder"]
    assert_partition(model, layers)


def test_towers_come_in_the_order_in_which_they_run() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = on_meta("siglip", AutoModel, text_config=sizes, vision_config=sizes | {"image_size": 32, "patch_size": 8})
    assert [name for name, _ in model.named_children()] == ["text_model", "vision_model"]
    assert containers(map_layers(model)) == ["vision_model.encoder.layers", "text_model.encoder.layers"]


class SideBySide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.first = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.norms = nn.ModuleList([nn.LayerNorm(16) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(3):
            x = self.norms[index](x + self.first[index](x))
            x = self.second[index](x)
        return x


def test_stacks_side_by_side_are_one() -> None:
    wanted = [f"{name}.{index}" for index in range(3) for name in ("first", "second")]
    assert paths(map_layers(SideBySide())) == wanted


@pytest.mark.parametrize("model_type", ["xlm", "flaubert"])
def test_attentions_that_write_a_cache_are_glue(model_type: str) -> None:
    model = on_meta(model_type, emb_dim=64, n_layers=3, n_heads=4)
    assert containers(map_layers(model)) == ["transformer.ffns"]
