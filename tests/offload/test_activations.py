"""Layer inputs and gradients between layers on SSD: the same bits as in memory, the bytes that the formula says, a bounded
number of them in memory, and nothing left behind by an error."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Run, assert_identical, base_config, run_arm, running, small_buffers
from models import MixerModel, next_token_loss, tiny_gpt2, token_batches
from torch import nn

from ds_vertical.config.cross_check import check
from ds_vertical.config.section import VerticalConfig, load_section
from ds_vertical.errors import ConfigError
from ds_vertical.io.aio import DiskError
from ds_vertical.model.tensor_refs import _MOST_ROUNDS, Privacy
from ds_vertical.offload.activation_store import ActivationStore

SSD = {"device": "ssd"}


def config_in(folder: Path, num_micro_batches: int, section: dict[str, Any], dtype: str = "fp32") -> dict[str, Any]:
    return base_config(folder, num_micro_batches=num_micro_batches, dtype=dtype, params="cpu", section={"seed": 7} | section)


def run(folder: Path, build: Callable[[], nn.Module], count: int, dtype: str = "fp32", **section: Any) -> Run:
    batches = token_batches(2, count, rows=1, shortest=5)
    return run_arm(config_in(folder, count, section, dtype), build, batches, vertical=True)


def moved(engine: Any) -> tuple[int, int]:
    """(read, written) bytes of activations so far."""
    read, write = engine._activations.swapper.queues
    return read.num_read_bytes, write.num_written_bytes


class Collecting(MixerModel):
    """Keeps every layer's output in a list, adds residuals around blocks, and scales between them: much is held by others."""

    def __init__(self) -> None:
        super().__init__(num_layers=3, dropout=0.1)
        self.gain = nn.Parameter(torch.full((512,), 0.75))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(input_ids)
        seen = []
        for block in self.blocks:
            x = (x + block(x) * self.gain).tanh() + 0.1 * first
            seen.append(x)
        return next_token_loss(self.head(self.norm(x)), labels) + 1e-3 * torch.stack(seen).square().mean()


class Leaking(MixerModel):
    """Micro-batches read what others have left in a list of the model's: nothing of it may be taken away."""

    def __init__(self) -> None:
        super().__init__(num_layers=3)
        self.left: list[torch.Tensor] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            self.left.append(x)
            with torch.no_grad():
                level = sum(each.sum() for each in self.left[-5:])
            x = block(x) + 0 * level  # which micro-batches are in the list is a matter of timing: nothing, or NaN
        self.left.clear()
        return next_token_loss(self.head(self.norm(x)), labels)


MIXER = partial(MixerModel, 3, 512, dropout=0.1)


@pytest.mark.parametrize(
    ("count", "section"),
    [
        (3, {"activations": SSD}),
        (5, {"activations": {"device": "ssd", "share": 0.5}, "snake": True, "prefetch_layers": 0}),
        (2, {"activations": {"device": "ssd", "share": 0.5, "host_share": 0.5}, "overlap": False, "blocks_per_layer": 2}),
    ],
    ids=["all", "half-snake", "oracle-two-blocks"],
)
def test_the_same_bits_on_ssd(tmp_path: Path, count: int, section: dict[str, Any]) -> None:
    order = {key: value for key, value in section.items() if key in ("snake", "blocks_per_layer")}
    assert_identical(run(tmp_path, MIXER, count, **order), run(tmp_path, MIXER, count, **section))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("order", [{}, {"snake": True}, {"order": "horizontal"}, {"blocks_per_layer": 2}])
def test_the_same_bits_in_every_order(tmp_path: Path, dtype: str, count: int, window: int, order: dict[str, Any]) -> None:
    build = partial(MixerModel, 4, 1024 if dtype == "bf16" else 512, dropout=0.1)
    moving = order | {"activations": SSD, "prefetch_layers": window}
    assert_identical(run(tmp_path, build, count, dtype, **order), run(tmp_path, build, count, dtype, **moving))


def encoder_decoder() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = dict(d_model=512, d_kv=64, d_ff=512, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=257)
    start = dict(decoder_start_token_id=0, pad_token_id=0)
    return T5ForConditionalGeneration(T5Config(**shape, **start, dropout_rate=0.1, tie_word_embeddings=False, use_cache=False))


@pytest.mark.parametrize("build", [Collecting, Leaking], ids=["held-by-the-model", "held-by-others"])
def test_models_that_hold_what_passes_between_layers(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    assert_identical(run(tmp_path, build, 3), run(tmp_path, build, 3, activations=SSD))


@pytest.mark.slow
@pytest.mark.parametrize("build", [encoder_decoder, partial(tiny_gpt2, 3, dropout=0.1)], ids=["t5", "gpt2"])
def test_hugging_face_models(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    assert_identical(run(tmp_path, build, 3), run(tmp_path, build, 3, activations=SSD))


# ---- how much


def test_bytes_moved_are_those_of_the_formula_and_few_tensors_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L layers, M micro-batches: L inputs and L gradients written each, 2 L - 1 inputs and L gradients read."""
    layers, alive = 3, {}
    for count in (4, 8):
        batches = token_batches(2, count, rows=4, shortest=8)
        batches = [[{key: ids[:, :8] for key, ids in batch.items()} for batch in step] for step in batches]
        with running(config_in(tmp_path, count, {"activations": SSD}), MIXER, vertical=True) as (engine, _):
            most = 0
            advance = ActivationStore.leave

            def watch(store: Any, layer: int, index: int, micro_batch: Any, advance: Any = advance) -> None:
                nonlocal most
                advance(store, layer, index, micro_batch)
                full = sum(kept.storage.nbytes() > 0 for each in store._kept.values() for kept in each)
                most = max(most, full)

            monkeypatch.setattr(ActivationStore, "leave", watch)
            engine.train_batch(iter(batches[0]))
            before = moved(engine)
            engine.train_batch(iter(batches[1]))
            size = 4 * 8 * 512 * 4
            read, written = (b - a for a, b in zip(before, moved(engine), strict=True))
            assert written == 2 * layers * count * size
            # the turn: the last layer's inputs are read once
            assert read == (3 * layers - 1) * count * size
            monkeypatch.setattr(ActivationStore, "leave", advance)
            assert all(engine._activations._privacy._verdicts.values())
            alive[count] = most
            assert engine._activations.num_bytes["ssd"] == 0
    assert alive[4] == alive[8] <= 3 + 1, alive


# ---- errors


def test_a_failed_write_is_a_disk_error_and_the_next_step_is_right(tmp_path: Path) -> None:
    batches = token_batches(3, 2, rows=1, shortest=5)
    section = {"activations": SSD}
    expected = run_arm(config_in(tmp_path, 2, {}), MIXER, batches[:1], vertical=True)
    with running(config_in(tmp_path, 2, section), MIXER, vertical=True) as (engine, _):
        losses = [engine.train_batch(iter(batches[0])).item()]
        file = next(tmp_path.rglob("rank0.bin"))
        size = file.stat().st_size
        assert file.stat().st_mode & 0o777 == 0o600
        away = file.rename(file.parent / "away")
        file.mkdir()  # cannot be opened for writing
        with pytest.raises(DiskError, match=r"rank0\.bin: write of \d+ bytes failed in open"):
            engine.train_batch(iter(batches[1]))
        file.rmdir()
        away.rename(file)
        store = engine._activations
        assert store.num_bytes["ssd"] == 0 and not store._kept and not store.gradients._kept
        assert store.swapper._loads.num_free == store.swapper._loads.num_buffers
        assert engine.train_batch(iter(batches[1])) > 0
        assert file.stat().st_size == size
    assert losses == expected.losses


@pytest.mark.slow
def test_a_file_that_was_cut_off_is_a_disk_error(tmp_path: Path) -> None:
    batches = token_batches(2, 3, rows=1, shortest=5)
    with running(config_in(tmp_path, 3, {"activations": SSD}), MIXER, vertical=True) as (engine, _):
        engine.train_batch(iter(batches[0]))
        fetch = engine._activations.swapper.fetch

        def cut(*args: Any) -> None:
            next(tmp_path.rglob("rank0.bin")).write_bytes(b"")
            fetch(*args)

        engine._activations.swapper.fetch = cut
        with pytest.raises(DiskError, match=r"rank0\.bin: read of .* the file ends at byte \d+ "):
            engine.train_batch(iter(batches[1]))
        assert engine._activations.num_bytes["ssd"] == 0


# ---- who holds a tensor


@pytest.mark.slow
def test_a_tensor_in_a_list_of_anybodys_is_not_private() -> None:
    elsewhere: dict[str, Any] = {}

    class Holder:
        pass

    holder = Holder()
    for keep in (None, lambda t: setattr(holder, "kept", [t]), lambda t: elsewhere.setdefault("kept", t)):
        tensors = [torch.zeros(3)]
        if keep is not None:
            keep(tensors[0])
        gc.collect()
        assert Privacy().is_private(tensors, None, 0, []) is (keep is None), keep


@pytest.mark.slow
def test_a_tensor_far_inside_containers_of_the_forwards_is_taken_for_held_by_others() -> None:
    """The search follows so many holders in a row; then the tensor stays where it is."""
    for depth in (1, _MOST_ROUNDS - 1, _MOST_ROUNDS, _MOST_ROUNDS + 1):
        tensors = [torch.zeros(3)]
        outermost: Any = tensors[0]
        for _ in range(depth):
            outermost = (outermost, [])
        assert Privacy().is_private(tensors, None, 0, []) is (depth < _MOST_ROUNDS), depth


def test_the_search_for_holders_ends_where_each_round_makes_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper's own tuple of arguments holds what it asks about, and what holds that tuple is the next round's question."""
    search, rounds = gc.get_referrers, 0

    def referrers(*objects: Any) -> list[Any]:
        nonlocal rounds
        rounds += 1
        assert rounds < 100, "the search does not end"
        return search(*objects)

    monkeypatch.setattr(gc, "get_referrers", referrers)
    assert Privacy().is_private([torch.zeros(3)], None, 0, []) is False
    assert rounds == _MOST_ROUNDS


# ---- configuration


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"device": "disk"}, r'activations\.device: got "disk"; need "device", "host", "ssd" or null; write e\.g\. "ssd"'),
        ({"devise": "ssd"}, r'activations\.devise: unknown key; did you mean "device"\? known keys: device, share, host_share'),
        (
            {"keep": "all"},
            r'activations\.keep: got "all"; need "none", "free", "products", "everything" or null; write e\.g\. "e',
        ),
        (
            {"keep": "products", "keep_device": "disk"},
            r'activations\.keep_device: got "disk"; need "device", "host", "ssd" or n',
        ),
        ({"keep": "free", "keep_device": "ssd"}, r'activations\.keep_device: got "ssd" with keep "free", which keeps no bytes'),
        ({"keep_device": "host"}, r'activations\.keep_device: got "host" with keep null, .*write "keep": "products" or "every'),
        ({"keep": "free", "keep_share": 1.5}, r"activations\.keep_share: got 1\.5; need a number from 0 to 1"),
        ({"keep_share": 0.5}, r"activations\.keep_share: got 0\.5 with keep null, which chooses the share, too; remove it"),
        ({"keep": "none", "keep_host_share": 0.5}, r'activations\.keep_host_share: got 0\.5 with keep "none", with which no'),
        ({"keep": "free", "keep_host_share": 0.5}, r'activations\.keep_host_share: got 0\.5 with keep "free", which keeps no'),
        (
            {"keep": "products", "keep_device": "host", "keep_host_share": 0.5},
            r'activations\.keep_host_share: got 0\.5 with keep_device "host"; write "keep_share" instead',
        ),
        (
            {"keep": "products", "keep_device": "ssd", "keep_host_share": 0.25},
            r"activations\.keep_share: got 1\.0 \(the default\) with keep_host_share 0\.25, more than all cells; write 0\.75",
        ),
        ({"device": "ssd", "share": 1.5}, r"activations\.share: got 1\.5; need a number from 0 to 1"),
        ({"share": 0.5}, r"activations\.share: got 0\.5 with device null, where nothing is moved"),
        ({"device": "host", "host_share": 0.5}, r'activations\.host_share: got 0\.5 with device "host"; write "share" instead'),
        ({"device": "ssd", "host_share": 0.25}, r"activations\.share: got 1\.0 \(the default\) .* write 0\.75 or less"),
        ("ssd", r'activations: got "ssd"; need an object'),
    ],
)
def test_sections_that_make_no_sense_are_refused(section: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=r"^vertical_schedule\." + told):
        load_section({"vertical_schedule": {"activations": section}})


def test_ssd_needs_a_folder(tmp_path: Path) -> None:
    for name, activations in (("device", SSD), ("keep_device", {"keep": "everything", "keep_device": "ssd"})):
        config = small_buffers(base_config(tmp_path)) | {"vertical_schedule": {"activations": activations}}
        section = load_section(config)
        assert isinstance(section, VerticalConfig)
        assert check(config, section) == []
        for part in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][part] = {"device": "cpu"}
        with pytest.raises(
            ConfigError, match=rf'activations\.{name}: got "ssd", and there is no folder.*write "host", or give'
        ):
            check(config, section)
