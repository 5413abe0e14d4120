"""N1 over model families: each trains in the real engine with its layers on SSD and gives the bits of stock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from families import FAMILIES, Family, handwritten, ids_of, next_token_loss, ragged_batches, sequential
from harness import (
    MIN_SSD_BYTES,
    Run,
    assert_identical,
    base_config,
    differing,
    largest_relative,
    run_arm,
    small_buffers,
    two_memories,
)
from torch import nn

from ds_vertical.compat import zero_params

CLIP = 0.05  # far below every gradient norm here, so clipping acts on every step
NUM_STEPS = 3
NUM_MICRO_BATCHES = 3
TIED_TOLERANCE = 1e-6
BY_NAME = {family.name: family for family in FAMILIES}


def config_in(folder: Path, where: str = "nvme", **options: Any) -> dict[str, Any]:
    options = {"dtype": "fp32", "clip": CLIP, "params": where, "optimizer": where, "weight_decay": 0.1} | options
    config = base_config(folder, num_micro_batches=NUM_MICRO_BATCHES, **options)
    return small_buffers(config, 1_100_000) if where == "nvme" else config


def assert_layers_on_ssd(engine: Any, step: int) -> None:
    """Four layers or more, the big matrices of each on SSD, and with them nearly all of the layer."""
    if step or type(engine).__name__ != "VerticalEngine":
        return
    assert engine.layers.num_layers >= 4
    for layer in range(engine.layers.num_layers):
        params = engine.layers.units[layer]
        on_ssd = [param for param in params if zero_params.is_on_ssd(param)]
        assert all(zero_params.is_on_ssd(param) for param in params if zero_params.shard_bytes(param) >= MIN_SSD_BYTES)
        assert len(on_ssd) >= 2
        total = sum(map(zero_params.shard_bytes, params))
        assert sum(map(zero_params.shard_bytes, on_ssd)) > 0.8 * total, f"layer {layer}"


def run_pair(
    folder: Path, build: Callable[[], nn.Module], batches: Any, stock_on_host: bool = False, **options: Any
) -> tuple[Run, Run]:
    """(stock, vertical), clipped on every step, the vertical arm's layers on SSD."""
    on_ssd = config_in(folder, **options.pop("config", {}))
    stock_config = config_in(folder, "cpu") if stock_on_host else on_ssd
    stock = run_arm(stock_config, build, batches, vertical=False, **options)
    vertical = run_arm(on_ssd, build, batches, vertical=True, between=assert_layers_on_ssd, **options)
    assert len(stock.norms) == len(batches)
    assert min(stock.norms) > 2 * CLIP, "clipping must act on every step"
    assert stock.ssd_bytes == (0 if stock_on_host else vertical.ssd_bytes)
    assert vertical.ssd_bytes >= 8 * MIN_SSD_BYTES
    return stock, vertical


SLOW = pytest.mark.slow
# One family of each kind stays in the fast suite; these differ little from one of them, or (the last) take 20 s.
TWINS = {"mistral", "olmo2", "glm4", "phi", "phi3", "gemma", "gemma2", "gemma3_text", "qwen3", "gptj", "opt", "bloom"}
TWINS |= {"gpt2", "falcon", "qwen3_moe", "gpt_oss", "bart", "gpt_neox", "qwen3_next"}
# test_parity trains gpt_neox, and test_parameter_groups gpt2


@pytest.mark.parametrize("family", [pytest.param(f, id=f.name, marks=[SLOW] if f.name in TWINS else []) for f in FAMILIES])
def test_family_is_bit_identical_to_stock(tmp_path: Path, family: Family) -> None:
    batches = family.batches(NUM_STEPS, NUM_MICRO_BATCHES)
    assert_identical(*run_pair(tmp_path, family.builder(), batches, stock_on_host=bool(family.stock_on_host)))


# ---- what forwards keep for their backwards

# Families of which some block keeps nothing under a policy, and why.
_EXPERTS = "the shapes in it depend on the values of tensors"
FALLS_BACK: dict[tuple[str, str], str] = {
    (name, policy): _EXPERTS
    for name in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")
    for policy in ("free", "products")
}
KEEPS = {
    "free": {"keep": "free"},
    "products": {"keep": "products", "keep_device": "ssd"},
    "everything": {"keep": "everything", "keep_device": "ssd"},
}


@lru_cache(maxsize=1)
def stock_run(name: str) -> Run:
    """Stock's run of a family, which the tests of its policies share."""
    family = BY_NAME[name]
    with TemporaryDirectory(prefix="ds_vertical_families.") as folder:
        config = config_in(Path(folder), "cpu" if family.stock_on_host else "nvme")
        return run_arm(config, family.builder(), family.batches(NUM_STEPS, NUM_MICRO_BATCHES), vertical=False)


@SLOW
@pytest.mark.parametrize("policy", KEEPS)
@pytest.mark.parametrize("name", BY_NAME)
def test_family_is_bit_identical_to_stock_with_every_policy(tmp_path: Path, name: str, policy: str) -> None:
    """Micro-batches of other lengths are other kinds of calls, each tried in the first step and kept in the others."""
    found, _ = run_keeping(tmp_path, name, KEEPS[policy])
    falls_back = found != {(policy, True)}
    assert falls_back == ((name, policy) in FALLS_BACK), found


def run_keeping(folder: Path, name: str, activations: dict[str, Any]) -> tuple[set[tuple[str, bool]], dict[str, int]]:
    """Compare a family's steps with stock's. Returns by which policies calls are kept and whether these are tried, and how many
    cells have rested in each tier."""
    found: set[tuple[str, bool]] = set()
    cells: dict[str, int] = {}

    def note(engine: Any, step: int) -> None:
        assert_layers_on_ssd(engine, step)
        found.clear()
        found.update((kind.policy, kind.is_tried) for kind in engine._runner.kinds.found)
        cells.clear()
        cells.update((tier.value, count) for tier, count in engine.kept.cells if count)
        cells["all"] = NUM_MICRO_BATCHES * (engine.layers.num_layers - 1)

    family, config = BY_NAME[name], config_in(folder, section={"activations": activations})
    batches = family.batches(NUM_STEPS, NUM_MICRO_BATCHES)
    vertical = run_arm(config, family.builder(), batches, vertical=True, between=note)
    assert_identical(stock_run(name), vertical)
    return found, cells


@SLOW
@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize(("name", "policy"), [("llama", "products"), ("llama", "everything"), ("mixtral", "everything")])
def test_a_dense_family_and_one_of_experts_keep_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, policy: str, tier: str
) -> None:
    """What all families keep on SSD, two of them keep in the other tiers."""
    if tier == "host":
        two_memories(monkeypatch)
    found, cells = run_keeping(tmp_path, name, {"keep": policy, "keep_device": tier})
    assert found == {(policy, True)} and cells == {tier: cells["all"], "all": cells["all"]}


@pytest.mark.parametrize("build", [sequential, handwritten])
def test_models_of_ones_own_are_bit_identical_to_stock(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    batches = ids_of(ragged_batches(NUM_STEPS, NUM_MICRO_BATCHES))
    assert_identical(*run_pair(tmp_path, build, batches, loss_fn=next_token_loss))


@pytest.mark.parametrize("name", ["mixtral", *(pytest.param(name, marks=SLOW) for name in ("gpt_oss", "qwen3_next", "t5"))])
def test_stock_on_ssd_is_wrong_where_the_table_says_so(tmp_path: Path, name: str) -> None:
    """Stock in host memory agrees with the vertical arm; on SSD stock does not agree with itself."""
    family = BY_NAME[name]
    assert family.stock_on_host
    build, batches = family.builder(), family.batches(2, NUM_MICRO_BATCHES)
    on_host = run_arm(config_in(tmp_path, "cpu"), build, batches, vertical=False)
    on_ssd = run_arm(config_in(tmp_path), build, batches, vertical=False)
    assert differing(on_host.state, on_ssd.state), "stock is right here: compare it on SSD"


# ---- tied weights


@pytest.mark.parametrize(
    ("name", "lr"),
    [
        ("gpt2", 1e-3),
        pytest.param("t5", 2e-5, marks=SLOW),  # at 1e-4 up to 1.7e-6 on a CPU with AVX-512
        pytest.param("gemma2", 1e-3, marks=SLOW),
        *(pytest.param(name, 1e-4, marks=SLOW) for name in ("opt", "bloom", "gemma4_text", "bart")),
    ],
)
def test_tied_weights_within_the_tolerance(tmp_path: Path, name: str, lr: float) -> None:
    """A tied gradient sums every use in the head before those in the embedding, for all micro-batches; else it is the same.

    Later steps start from weights that differ in their last bits. Adam turns a gradient that is nothing but rounding (the
    bias of keys: softmax ignores it) into a full step, so at lr 1e-3 those biases differ by up to 8e-6.
    """
    family = replace(BY_NAME[name], tied=True)
    build, batches = family.builder(), family.batches(5, NUM_MICRO_BATCHES)
    stock, vertical = run_pair(tmp_path, build, batches, config={"lr": lr})
    assert len(differing(stock.grads[0], vertical.grads[0])) == 1, "the tied tensor, and no other, differs in the first step"
    assert stock.losses[0] == vertical.losses[0]
    assert largest(stock.grads[0], vertical.grads[0]) < TIED_TOLERANCE
    assert largest(stock.weights, vertical.weights) < TIED_TOLERANCE


def largest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(largest_relative(a, b).values())


@SLOW
def test_tied_weights_in_bf16(tmp_path: Path) -> None:
    family = replace(BY_NAME["gpt2"], tied=True, settings=dict(BY_NAME["gpt2"].settings) | {"n_inner": 2048})
    build, batches = family.builder(), family.batches(2, NUM_MICRO_BATCHES)
    stock, vertical = run_pair(tmp_path, build, batches, config={"dtype": "bf16"})
    tied = "transformer.wte.weight"
    assert set(differing(stock.grads[0], vertical.grads[0])) <= {tied}
    assert largest_relative(stock.grads[0], vertical.grads[0])[tied] <= 2**-7
    assert stock.losses == pytest.approx(vertical.losses, rel=1e-3)


# ---- dropout, frozen parameters, groups


def test_dropout_is_on_and_bit_identical(tmp_path: Path) -> None:
    """The rows of gpt2, opt, t5 and bart drop out; without their random streams put back, losses would differ."""
    dropping, quiet = BY_NAME["opt"], replace(BY_NAME["opt"], settings=dict(BY_NAME["opt"].settings) | {"dropout": 0.0})
    assert dropping.config().dropout == BY_NAME["gpt2"].config().resid_pdrop == 0.1
    batches = dropping.batches(1, NUM_MICRO_BATCHES)
    runs = [run_arm(config_in(tmp_path), each.builder(), batches, vertical=True) for each in (dropping, quiet)]
    assert runs[0].losses != runs[1].losses


def freeze(model: nn.Module, prefixes: Iterable[str]) -> list[nn.Parameter]:
    """Freeze what starts with a prefix; returns what is left to train."""
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(tuple(prefixes)))
    return [param for param in model.parameters() if param.requires_grad]


@pytest.mark.parametrize(
    "frozen",
    [
        ("model.embed_tokens", "model.layers.0.", "model.layers.2."),  # nothing below layer 1 needs a gradient
        ("model.layers.1.", "model.layers.3.self_attn"),  # gradients pass through a frozen layer
    ],
    ids=["embedding and whole layers", "a layer in the middle"],
)
def test_frozen_parameters(tmp_path: Path, frozen: tuple[str, ...]) -> None:
    batches = BY_NAME["llama"].batches(2, NUM_MICRO_BATCHES)
    groups = partial(freeze, prefixes=frozen)
    stock, vertical = run_pair(tmp_path, BY_NAME["llama"].builder(), batches, groups=groups)
    assert_identical(stock, vertical)
    assert not any(name.startswith(frozen) for name in vertical.grads[0])


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not; the head learns at a rate of its own."""
    head = [param for name, param in model.named_parameters() if name.startswith("lm_head")]
    rest = [(name, param) for name, param in model.named_parameters() if not name.startswith("lm_head")]
    vectors = [param for name, param in rest if name.endswith("bias") or ".ln_" in name]
    matrices = [param for name, param in rest if not (name.endswith("bias") or ".ln_" in name)]
    return [
        {"params": matrices, "weight_decay": 0.3},
        {"params": vectors, "weight_decay": 0.0},
        {"params": head, "weight_decay": 0.1, "lr": 3e-3},
    ]


def test_parameter_groups(tmp_path: Path) -> None:
    batches = BY_NAME["gpt2"].batches(2, NUM_MICRO_BATCHES)
    no_schedule = {"scheduler": {}}  # WarmupLR would give every group one rate
    stock, vertical = run_pair(tmp_path, BY_NAME["gpt2"].builder(), batches, groups=decay_groups, config=no_schedule)
    assert_identical(stock, vertical)
    assert len(vertical.counters["lr"]) == 3 and len(set(vertical.counters["lr"])) == 2
