"""Embedding and head fetched where they are used: the bits of stock, away in mid-model, and read once a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, Family
from harness import assert_identical, base_config, contents, differing, run_arm, running, small_buffers
from models import next_token_loss, tiny_gpt2, tiny_neox, token_batches
from torch import nn

from ds_vertical.compat import zero_params
from ds_vertical.io.buffers import HostBuffer

FETCHED = {"outside_layers": "fetched"}
NUM_LAYERS = 3
VOCAB, WIDTH = 1061, 768  # so that embedding and head are files


class Scaled(nn.Module):
    """Glue with weights of its own ahead of each block, a prefix whose backward needs its weights, and an untied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.widen = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.gains = self.new_gains()

    def new_gains(self) -> nn.ParameterList | None:
        return nn.ParameterList([torch.linspace(0.5, 1.5, WIDTH) for _ in range(NUM_LAYERS)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.widen(torch.tanh(self.embed(input_ids)))
        for index, block in enumerate(self.blocks):
            hidden = hidden + block(hidden if self.gains is None else hidden * self.gains[index])
        return next_token_loss(self.head(hidden), labels)


class Plain(Scaled):
    """The same without glue: its prefix runs backward with weights that were away meanwhile."""

    def new_gains(self) -> None:
        return None


class Normed(Plain):
    """A module ahead of the blocks is given the weight of one that is defined behind them, as in SEW-D."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.behind = nn.Embedding(VOCAB, WIDTH)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.widen(torch.tanh(self.embed(input_ids))) + self.norm(self.behind.weight)[: input_ids.shape[1]]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return next_token_loss(self.head(hidden), labels)


class Viewing(Plain):
    """Ahead of the blocks autograd saves a view of a weight, which is away until that code runs backward."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.embed(input_ids)) @ self.widen.weight.t()
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return next_token_loss(self.head(hidden), labels)


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=VOCAB, num_hidden_layers=NUM_LAYERS, use_cache=False, tie_word_embeddings=False)
    return LlamaForCausalLM(config)


KEPT_ON_SSD = {"device": "ssd", "keep": "everything", "keep_device": "ssd"}
BOTH = ("pre", "suf")
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "neox": (partial(tiny_neox, num_layers=NUM_LAYERS, dropout=0.1), BOTH),
    "gpt2": (partial(tiny_gpt2, num_layers=NUM_LAYERS), BOTH),
    "llama": (tiny_llama, BOTH),
    "plain": (Plain, BOTH),
    "glue": (Scaled, ("suf",)),
    "viewing": (Viewing, BOTH),
    "tied gpt2": (partial(tiny_gpt2, num_layers=NUM_LAYERS, tied=True), ()),
}


def config_in(folder: Path, section: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return small_buffers(base_config(folder, section=FETCHED | (section or {}), **options), 1_100_000)


class Watched:
    """Between two steps: what the schedule says, which ends were whole within a block, how often each file was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.apart: list[tuple[Any, ...]] = []
        self.whole: set[Any] = set()
        self.reads: Counter[str] = Counter()
        self.engine: Any = None
        issue = HostBuffer.issue_read

        def counted(buffer: HostBuffer, path: str, *args: Any, **options: Any) -> None:
            self.reads[path] += 1
            issue(buffer, path, *args, **options)

        monkeypatch.setattr(HostBuffer, "issue_read", counted)

    def __call__(self, engine: Any, step: int) -> None:
        self.apart.append(engine.ran.outside.apart)
        if step == 0:
            self.engine = engine
            engine.layers.blocks[1].module.register_forward_hook(lambda *_: self.whole.update(self.now()))
        self.reads_of = {u: [self.reads[s.path] for s in shards] for u, shards in engine._params.files.by_unit.items()}

    def now(self) -> set[Any]:
        units = self.engine.layers.units
        return {unit for unit in BOTH for param in units.get(unit, ()) if not zero_params.is_partitioned(param)}


@pytest.mark.parametrize(
    ("name", "dtype", "count", "options"),
    [
        ("plain", "fp32", 3, {"clip": 1.0}),
        pytest.param("neox", "bf16", 3, {"clip": 1.0}, marks=pytest.mark.slow),
        *(
            pytest.param(name, dtype, count, {"clip": clip}, marks=pytest.mark.slow)
            for name in MODELS
            if name != "tied gpt2"
            for dtype in ("bf16", "fp32")
            for count, clip in ((1, 0.0), (4, 1.0), (4, 0.0))
        ),
        pytest.param("plain", "bf16", 3, {"clip": 0.0, "section": {"optimizer_delay": 1.0}}, marks=pytest.mark.slow),
        pytest.param("plain", "fp32", 3, {"clip": 1.0, "params": "cpu", "optimizer": "cpu"}, marks=pytest.mark.slow),
        pytest.param("neox", "bf16", 3, {"clip": 0.0, "section": {"on_nonfinite": "stop"}}, marks=pytest.mark.slow),
        pytest.param("neox", "bf16", 3, {"clip": 1.0, "section": {"gradient_host_share": 0.3}}, marks=pytest.mark.slow),
        pytest.param("glue", "bf16", 3, {"clip": 1.0, "section": {"overlap": False}}, marks=pytest.mark.slow),
        pytest.param("neox", "bf16", 3, {"clip": 1.0, "section": {"self_check": True, "verify": True}}, marks=pytest.mark.slow),
        *(
            pytest.param(name, "bf16", 3, {"clip": 1.0, "section": {"activations": own}}, marks=pytest.mark.slow)
            for name, own in (("neox", KEPT_ON_SSD), ("glue", KEPT_ON_SSD), ("plain", {"device": "ssd", "keep": "products"}))
        ),
    ],
)
def test_ends_that_are_fetched_where_they_are_used_have_stocks_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, count: int, options: dict[str, Any]
) -> None:
    build, apart = MODELS[name]
    batches, seen = token_batches(3, count, rows=1, shortest=4), Watched(monkeypatch)
    config = config_in(tmp_path, dtype=dtype, num_micro_batches=count, **options)
    stock = run_arm(config, build, batches, vertical=False)
    seen.reads.clear()
    vertical = run_arm(config, build, batches, vertical=True, between=seen)
    assert_identical(stock, vertical)
    assert seen.apart == [apart] * 3
    assert seen.whole == set(BOTH) - set(apart)


def test_a_weight_of_the_suffix_that_a_module_of_the_prefix_is_given_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock has its parameters in host memory: on SSD it takes another second step."""
    batches, seen = token_batches(2, 2, rows=1, shortest=4), Watched(monkeypatch)
    config = config_in(tmp_path, dtype="fp32", num_micro_batches=2)
    in_memory = base_config(tmp_path, dtype="fp32", num_micro_batches=2, params="cpu", optimizer="cpu")
    stock = run_arm(in_memory, Normed, batches, vertical=False)
    assert_identical(stock, run_arm(config, Normed, batches, vertical=True, between=seen))
    assert seen.apart == [("pre",)] * 2


def test_an_end_is_read_once_a_step_though_it_is_fetched_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Watched(monkeypatch)
    config = config_in(tmp_path, {"optimizer_delay": 1.0, "optimizer_speculation": False, "prefetch_layers": 0}, clip=1.0)
    with running(config, Plain, vertical=True) as (engine, _):
        for step, micro_batches in enumerate(token_batches(3, 3, rows=1, shortest=4)):
            seen.reads.clear()
            engine.train_batch(iter(micro_batches))
            seen(engine, step)
            assert max(seen.reads_of["pre"]) <= 1 and max(seen.reads_of["suf"]) <= 1
            assert not engine._params.fetched and max(seen.reads_of[0]) >= 1


def test_the_log_says_how_much_stays_where_an_end_is_found_in_use_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(config_in(tmp_path, num_micro_batches=1, dtype="bf16"), Scaled, vertical=True) as (engine, _):
        (micro_batches,) = token_batches(1, 1, rows=1, shortest=4)
        engine.train_batch(iter(micro_batches))
        elements = sum(param.ds_numel for param in engine.layers.units["pre"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "unit pre stays on the device all step" in line]
    assert len(lines) == 1 and f": {elements * (2 + 4) / 2**20:.1f} MiB of parameters and gradient sums" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_has_the_same_bits_either_way(tmp_path: Path, family: Family) -> None:
    batches = family.batches(2, 2)
    runs = [
        run_arm(
            config_in(tmp_path, {"outside_layers": value, "self_check": True}, num_micro_batches=2),
            family.builder(),
            batches,
            vertical=True,
        )
        for value in ("fetched", "resident")
    ]
    assert_identical(*runs)


@pytest.mark.slow
def test_weights_that_are_tied_stay_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, _ = MODELS["tied gpt2"]
    batches, seen = token_batches(2, 3, rows=1, shortest=4), Watched(monkeypatch)
    runs = [
        run_arm(config_in(tmp_path, {"outside_layers": value}), build, batches, vertical=True, between=seen)
        for value in ("fetched", "resident")
    ]
    assert_identical(*runs)
    assert seen.apart == [()] * 4


@pytest.mark.slow
def test_a_checkpoint_of_one_way_goes_on_in_the_other(tmp_path: Path) -> None:
    """Chunks differ; state is found by parameter."""
    batches = token_batches(4, 2, rows=1, shortest=4)
    ends: list[dict[str, torch.Tensor]] = []
    for first, then in (("resident", "resident"), ("resident", "fetched"), ("fetched", "resident")):
        made = [config_in(tmp_path, {"outside_layers": each}, num_micro_batches=2) for each in (first, then)]
        with running(made[0], Scaled, vertical=True) as (engine, _):
            for micro_batches in batches[:2]:
                engine.train_batch(iter(micro_batches))
            engine.save_checkpoint(str(tmp_path / f"{first} {then}"))
        with running(made[1], Scaled, vertical=True) as (engine, model):
            engine.load_checkpoint(str(tmp_path / f"{first} {then}"))
            for micro_batches in batches[2:]:
                engine.train_batch(iter(micro_batches))
            loss = engine.eval_batch(iter(batches[0]))
            ends.append(contents(engine, model) | {"loss": loss.reshape(1)})
    assert not differing(ends[0], ends[1]) and not differing(ends[0], ends[2])
