"""What forwards keep for their backwards: stock's bits with every policy, wherever it rests."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from faults import loop_disk
from harness import (
    Run,
    assert_identical,
    base_config,
    contents,
    counters,
    differing,
    read_weights,
    run_arm,
    running,
    two_memories,
)
from models import MixerBlock, MixerModel, tiny_gpt2, tiny_neox, token_batches
from torch import nn

from ds_vertical.errors import LayerError, MemoryBudgetError, StorageError

MIXER = partial(MixerModel, 4, 512, dropout=0.1)
POLICIES = ("free", "products", "everything")
PLACES = [("free", "device"), *((policy, tier) for policy in POLICIES[1:] for tier in ("device", "host", "ssd"))]
NUM_STEPS = 3


def settings(policy: str, tier: str | None) -> dict[str, Any]:
    return {"keep": policy, "keep_device": tier} if policy in ("products", "everything") else {"keep": policy}


def config_in(
    folder: Path, count: int, activations: dict[str, Any], dtype: str = "fp32", clip: float = 1.0, **section: Any
) -> dict[str, Any]:
    whole = {"seed": 7, "activations": activations, **section}
    return base_config(folder, num_micro_batches=count, dtype=dtype, params="cpu", clip=clip, section=whole)


def batches_of(count: int) -> list[list[dict[str, Any]]]:
    return token_batches(NUM_STEPS, count, rows=1, shortest=5)


class Kept:
    """Between steps: by which policies calls are kept, whether all have been tried, and how many cells each tier has held.
    `policy`: as the run's record has it."""

    def __init__(self) -> None:
        self.policy = ""
        self.policies: set[tuple[str, bool]] = set()
        self.cells: dict[str, int] = {}

    def __call__(self, engine: Any, step: int) -> None:
        kinds, record = engine._runner.kinds, engine.kept
        self.policies = {(kind.policy, kind.is_tried) for kind in kinds.found} if kinds is not None else set()
        self.cells = {tier.value: cells for tier, cells in record.cells if cells} if record is not None else {}
        self.policy = record.policy if record is not None else "none"


def compare(
    folder: Path,
    build: Callable[[], nn.Module],
    count: int,
    activations: dict[str, Any],
    plain: Run | None = None,
    **options: Any,
) -> Kept:
    """Compare all that some steps make with stock's, or with `plain`."""
    kept = Kept()
    if plain is None:
        plain = run_arm(config_in(folder, count, {}, **options), build, batches_of(count), vertical=False)
    config = config_in(folder, count, activations, **options)
    assert_identical(plain, run_arm(config, build, batches_of(count), vertical=True, between=kept))
    return kept


@pytest.mark.parametrize("policy", ["products", "everything"])
def test_stocks_bits_with_kept_values_on_ssd(tmp_path: Path, policy: str) -> None:
    """Of the layer before the last nothing goes to SSD."""
    kept = compare(tmp_path, MIXER, 2, settings(policy, "ssd"))
    assert kept.policies == {(policy, True)} and kept.cells == {"ssd": 4, "device": 2}


def counts_of(folder: Path, activations: dict[str, Any], count: int) -> dict[str, int]:
    """The cells that have rested in each tier in a step."""
    kept = Kept()
    with running(config_in(folder, count, activations), MIXER, vertical=True) as (engine, _):
        engine.train_batch(iter(batches_of(count)[0]))
        kept(engine, 0)
    return kept.cells


def test_shares_of_the_cells_keep_on_ssd_and_in_host_memory(tmp_path: Path) -> None:
    """Of 6 cells 4 keep, 2 of them in memory; of those for the SSD the ones of the layer before the last are in memory, too."""
    found = counts_of(tmp_path, settings("everything", "ssd") | {"keep_share": 0.34, "keep_host_share": 0.33}, 2)
    assert sum(found.values()) == 4 and found["ssd"] <= 2 <= found["device"]


@pytest.mark.parametrize(("policy", "is_computed_again"), [("none", True), ("everything", False)])
def test_with_everything_kept_no_layer_runs_twice(tmp_path: Path, policy: str, is_computed_again: bool) -> None:
    """By the forwards of layer norms: those of a step against those of an evaluation."""
    batches = batches_of(2)
    with running(config_in(tmp_path, 2, settings(policy, "device")), MIXER, vertical=True) as (engine, _):
        engine.train_batch(iter(batches[0]))  # what is tried and recorded runs twice
        in_step = norms_of(partial(engine.train_batch, iter(batches[1])))
        in_evaluation = norms_of(partial(engine.eval_batch, iter(batches[1])))
    assert in_evaluation > 8 and (in_step > in_evaluation) is is_computed_again
    assert is_computed_again or in_step == in_evaluation


def norms_of(call: Callable[[], object]) -> int:
    """How often a call runs a layer norm forward."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    return sum(event.name == "aten::native_layer_norm" for event in profiler.events())


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("policy", "tier"), PLACES)
def test_stocks_bits_with_every_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, tier: str, share: float
) -> None:
    if tier == "host":
        two_memories(monkeypatch)
    beside = {"keep_host_share": 0.25} if policy != "free" and tier != "host" and share == 0.5 else {}
    activations = settings(policy, tier) | {"keep_share": share} | beside
    kept = compare(tmp_path, MIXER, 4, activations)
    count = round(12 * (share + beside.get("keep_host_share", 0.0)))
    assert kept.policies == ({(policy, True)} if count else set())
    on_ssd = round(8 * share)  # of the layer before the last nothing goes there
    resting = {"ssd": on_ssd, "device": count - on_ssd} if tier == "ssd" else {tier: count}
    assert kept.cells == ({place: cells for place, cells in resting.items() if cells} if policy != "free" else {})


@lru_cache(maxsize=4)
def stock_run(dtype: str, dropout: float, count: int, clip: float) -> Run:
    """Stock's run, which the rows of its policies share."""
    with TemporaryDirectory(prefix="ds_vertical_kept.") as folder:
        config = config_in(Path(folder), count, {}, dtype=dtype, clip=clip)
        return run_arm(config, mixer(dtype, dropout), batches_of(count), vertical=False)


def mixer(dtype: str, dropout: float) -> Callable[[], nn.Module]:
    return partial(MixerModel, 4, 1024 if dtype == "bf16" else 512, dropout=dropout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "tier"), [("none", "device"), *PLACES]
)  # of the decorators the first one runs through first
@pytest.mark.parametrize("clip", [0.0, 1e-3])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_stocks_bits_with_every_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, tier: str, dtype: str, dropout: float, count: int, clip: float
) -> None:
    plain = stock_run(dtype, dropout, count, clip)
    if tier == "host":
        two_memories(monkeypatch)
    kept = compare(tmp_path, mixer(dtype, dropout), count, settings(policy, tier), plain, dtype=dtype, clip=clip)
    assert kept.policies == ({(policy, True)} if policy != "none" else set())
    resting = {"ssd": 2 * count, "device": count} if tier == "ssd" else {tier: 3 * count}
    assert kept.cells == (resting if policy in ("products", "everything") else {})


class HardBlock(MixerBlock):
    """The module holds an activation; autograd saves expanded, transposed and sliced tensors, and what is written in place."""

    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.up(self.norm(x))
        self.last = states.detach()
        large = torch.mm(x.flatten(0, 1), self.down.weight.t())
        large += self.up.bias
        gate = large.t().contiguous().t().sigmoid() * x[..., :1].flatten(0, 1).expand(-1, x.shape[-1])
        piece = states[..., 1:9].exp().sum(-1, keepdim=True).relu_()
        return x + self.dropout(self.down(torch.tanh(states * gate.view_as(states)))) + 1e-3 * piece


def hard_model() -> nn.Module:
    model = MixerModel(4, 512)
    model.blocks = nn.ModuleList(HardBlock(512, dropout=0.1) for _ in range(4))
    return model


@pytest.mark.parametrize("policy", [*(pytest.param(each, marks=pytest.mark.slow) for each in POLICIES[:2]), "everything"])
def test_what_a_module_holds_stays_where_it_is(tmp_path: Path, policy: str) -> None:
    models: list[Any] = []

    def build() -> nn.Module:
        models.append(hard_model())
        return models[-1]

    kept = compare(tmp_path, build, 2, settings(policy, "ssd"))
    stock, own = ([block.last for block in model.blocks] for model in models)
    assert all(torch.equal(one, other) for one, other in zip(stock, own, strict=True))
    assert kept.policies == {(policy, True)} and (policy == "free" or kept.cells["ssd"] == 4)


class CountingBlock(MixerBlock):
    """Each forward writes a buffer in place that autograd has saved in the one before."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(0.99)
        return super().forward(x * self.scale)


def counting_model() -> nn.Module:
    model = MixerModel(4, 512)
    model.blocks = nn.ModuleList(CountingBlock(512) for _ in range(4))
    return model


def test_blocks_that_cannot_keep_everything_keep_their_products(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept = compare(tmp_path, counting_model, 2, settings("everything", "ssd"))
    assert {policy for policy, _ in kept.policies} == {"none", "products"} and ("products", True) in kept.policies
    assert kept.policy == "products" and kept.cells == {"ssd": 4, "device": 2}
    line = 'activations.keep: "products" in place of "everything" for CountingBlock (blocks.'
    assert capfd.readouterr().out.count(line) == 1


def test_values_that_nobody_has_brought_back_fail_the_step_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_arm(config_in(tmp_path, 2, {}), MIXER, batches_of(2), vertical=True)
    with running(config_in(tmp_path, 2, settings("everything", "ssd")), MIXER, vertical=True) as (engine, model):
        losses = [engine.train_batch(iter(batches_of(2)[0])).item()]
        with monkeypatch.context() as patched, pytest.raises(LayerError, match="are away; the schedule did not load them"):
            patched.setattr(engine._keeping.store, "load", lambda cell: None)
            engine.train_batch(iter(batches_of(2)[1]))
        losses += [engine.train_batch(iter(each)).item() for each in batches_of(2)[1:]]
        assert losses == expected.losses and differing(read_weights(model), expected.weights) == []


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["device", "ssd"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "build", [partial(tiny_gpt2, 4, dropout=0.1), partial(tiny_neox, 4, dropout=0.1)], ids=["gpt2", "neox"]
)
def test_hugging_face_models(tmp_path: Path, build: Callable[[], nn.Module], policy: str, tier: str) -> None:
    batches = token_batches(2, 3, rows=1, shortest=5)
    activations = settings(policy, tier)
    plain = run_arm(config_in(tmp_path, 3, {}), build, batches, vertical=False)
    assert_identical(plain, run_arm(config_in(tmp_path, 3, activations | {"device": "ssd"}), build, batches, vertical=True))
    with running(config_in(tmp_path, 3, activations), build, vertical=True) as (engine, _):
        engine.train_batch(iter(batches[0]))
        assert {(kind.policy, kind.is_tried) for kind in engine._runner.kinds.found} == {(policy, True)}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "section",
    [
        {"snake": True},
        {"order": "horizontal"},
        {"blocks_per_layer": 2},  # of six blocks, so that one layer is ahead of the last two
        {"overlap": False},
        {"prefetch_layers": 2},
        {"self_check": True, "verify": True},
        {"outside_layers": "fetched"},
    ],
)
def test_the_same_bits_in_every_order(tmp_path: Path, policy: str, section: dict[str, Any]) -> None:
    """Stock's, or with `snake` those of the same order where nothing is kept."""
    blocks = section.get("blocks_per_layer", 1)
    build, num_layers = (MIXER, 4) if blocks == 1 else (partial(MixerModel, 3 * blocks, 512, dropout=0.1), 3)
    plain = None
    if "snake" in section:  # which adds gradients in another order than stock
        plain = run_arm(config_in(tmp_path, 3, {"keep": "none"}, **section), build, batches_of(3), vertical=True)
    kept = compare(tmp_path, build, 3, settings(policy, "ssd"), plain, **section)
    assert kept.policies == {(policy, True)}
    assert kept.cells == ({"ssd": 3 * (num_layers - 2), "device": 3} if policy != "free" else {})


@pytest.mark.slow
@pytest.mark.parametrize("then", ["none", *POLICIES])
@pytest.mark.parametrize("first", ["none", *POLICIES])
def test_a_resume_with_another_policy_has_the_same_bits(tmp_path: Path, first: str, then: str) -> None:
    batches = token_batches(4, 2, rows=1, shortest=5)
    train = lambda engine, steps: [engine.train_batch(iter(batches[step])).item() for step in steps]  # noqa: E731
    saving, resuming = (config_in(tmp_path / "ssd", 2, settings(policy, "ssd")) for policy in (first, then))
    with running(saving, MIXER, vertical=True) as (engine, model):
        train(engine, range(2))
        engine.save_checkpoint(str(tmp_path / "saved"))
        losses, expected, numbers = train(engine, range(2, 4)), contents(engine, model), counters(engine)
    with running(resuming, MIXER, vertical=True) as (engine, model):
        torch.manual_seed(999)  # whatever the new process has drawn
        path, _ = engine.load_checkpoint(str(tmp_path / "saved"))
        assert path is not None and train(engine, range(2, 4)) == losses
        assert differing(expected, contents(engine, model)) == [] and counters(engine) == numbers
        kinds = engine._runner.kinds
        assert {kind.policy for kind in kinds.found} == {then} if then != "none" else kinds is None


@pytest.mark.slow
def test_a_step_that_keeps_more_than_memory_has_fails_whole(tmp_path: Path) -> None:
    batches = token_batches(2, 2, rows=1, shortest=5)
    expected = run_arm(config_in(tmp_path, 2, {}), MIXER, batches[:1], vertical=True)
    with running(config_in(tmp_path, 2, settings("everything", "device")), MIXER, vertical=True) as (engine, _):
        store = engine._keeping.store
        one_cell = r'activations\.keep: got "everything"; .* one layer keeps \d+ bytes .* leaves 1000'
        several = r'activations\.keep: \d+ bytes .* leaves \d+; write fewer .*"products"'
        limit = store.device_limit
        # Behind the first refusal the store knows the first cell; the second one is longer, and less than twice as large.
        for room, told in ((lambda: 1000, one_cell), (lambda: 2 * store.most_bytes - 1000, several)):
            store.device_limit = room()
            with pytest.raises(MemoryBudgetError, match=told):
                engine.train_batch(iter(batches[0]))
            assert store.num_bytes["device"] == 0 and engine.global_steps == 0
        store.device_limit = limit
        assert [engine.train_batch(iter(batches[0])).item()] == expected.losses
        assert store.num_bytes["device"] == 0 < store.most_bytes


@pytest.mark.slow
def test_an_ssd_that_is_full_as_kept_bytes_grow_fails_the_step_whole(tmp_path: Path) -> None:
    """Longer micro-batches than before keep more."""
    (short, _, again), (long,) = batches_of(2), token_batches(1, 2, rows=1, shortest=300)
    steps = [short, long, again]
    expected = run_arm(config_in(tmp_path / "ssd", 2, {}), MIXER, steps, vertical=True)
    with loop_disk(tmp_path / "disk", 384 << 20) as disk:
        made = config_in(disk.folder / "ssd", 2, settings("everything", "ssd"))
        with running(made, MIXER, vertical=True) as (engine, model):
            losses = [engine.train_batch(iter(short)).item()]
            filler, store = disk.fill(), engine._keeping.store
            told = r"/kept: preallocate: needs \d+ more bytes .* has \d+ free .*; free \d+ bytes or use another nvme_path, or "
            told += r'write "vertical_schedule.activations.keep": "products" or "none" \(now "everything"\)'
            with pytest.raises(StorageError, match=told):
                engine.train_batch(iter(long))
            assert (engine.global_steps, store.num_bytes["device"], store.num_bytes["ssd"]) == (1, 0, 0)
            filler.unlink()
            losses += [engine.train_batch(iter(each)).item() for each in (long, again)]
            assert losses == expected.losses and differing(read_weights(model), expected.weights) == []


@pytest.mark.slow
def test_kept_values_on_ssd_leave_memory_and_come_back_once(tmp_path: Path) -> None:
    batches = token_batches(2, 3, rows=1, shortest=8)
    with running(config_in(tmp_path, 3, settings("everything", "ssd")), MIXER, vertical=True) as (engine, _):
        engine.train_batch(iter(batches[0]))
        queues = engine._keeping.store.swapper.queues
        before = [queue.num_read_bytes + queue.num_written_bytes for queue in queues]
        engine.train_batch(iter(batches[1]))
        read, written = (queue.num_read_bytes + queue.num_written_bytes - b for queue, b in zip(queues, before, strict=True))
        assert read == written > 0
        assert engine._keeping.store.num_bytes["ssd"] == 0
        assert next(tmp_path.rglob("kept/kept0.bin")).stat().st_size >= written
