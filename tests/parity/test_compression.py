"""Masters compressed on SSD: the bits are stock's, fewer bytes move, and whoever looks at the state finds whole masters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param, safe_set_full_optimizer_state
from harness import (
    Run,
    assert_identical,
    base_config,
    build_engine,
    contents,
    differing,
    dispose,
    read_state,
    read_weights,
    run_arm,
    running,
    small_buffers,
)
from late import LateWrites
from models import MixerModel, token_batches
from tier_runs import CLIPS, FREE, NUM_STEPS, WIDTH, config, mixer, stock_runs

from ds_vertical.errors import TornStateError
from ds_vertical.io.checksums import ChecksumError
from ds_vertical.io.runs import stripes
from ds_vertical.offload.masters.compressed import StaleRecordError
from ds_vertical.offload.step_pipeline import StepJob

slow = pytest.mark.slow
BATCHES = token_batches(NUM_STEPS, 2)
BUILD = partial(mixer, "bf16")


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, float], Run]:
    """Stock's run of the same JSON, trained once."""
    return stock_runs(tmp_path_factory)


def compressed(folder: Path, clip: float = 0.0, **section: Any) -> dict[str, Any]:
    return config(folder, "bf16", clip, optimizer_compression=True, **section)


def share_compressed(engine: Any) -> float:
    """Of the layers' parts on SSD, those whose masters are compressed now. (What is outside them rests in host memory here.)"""
    optimizer = engine.optimizer
    chunks = [optimizer.stepper.chunks[i] for unit in engine.layers.units if unit != "pre" for i in optimizer.chunks_of(unit)]
    every = {part for chunk in chunks if chunk.files is not None for part in chunk.parts("all")}
    return len(every.intersection(optimizer.stepper.masters.parts)) / len(every)


def train(made: dict[str, Any], build: Callable[[], Any] = BUILD, batches: Sequence[Any] = BATCHES) -> tuple[Run, list[float]]:
    """A run, and after each of its steps what `share_compressed` says."""
    seen: list[float] = []

    def note(engine: Any, _: int) -> None:
        engine.flush()
        seen.append(share_compressed(engine))

    return run_arm(made, build, batches, vertical=True, between=note), seen


# ---- whatever the timing


@pytest.mark.parametrize(
    ("clip", "delay", "speculation"),
    [
        (0.0, 0.3, None),
        (CLIPS, 0.3, True),  # every early step is redone
        *(pytest.param(0.0, delay, None, marks=slow) for delay in (None, 0.0, 1.0)),
        *(pytest.param(FREE, delay, True, marks=slow) for delay in (0.0, 0.3)),  # none is
        *(pytest.param(CLIPS, delay, False, marks=slow) for delay in (0.0, 1.0)),
        pytest.param(FREE, None, None, marks=slow),
    ],
)
def test_bits_are_stocks(
    tmp_path: Path, stock: Callable[[str, float], Run], clip: float, delay: float | None, speculation: bool | None
) -> None:
    made = compressed(tmp_path, clip, optimizer_delay=delay, optimizer_speculation=speculation)
    vertical, seen = train(made)
    assert_identical(stock("bf16", clip), vertical)
    assert min(seen) > 0.9, seen


@slow
@pytest.mark.parametrize(
    "more",
    [
        {"gradient_host_share": 0.0, "optimizer_delay": 1.0},
        {"gradient_host_share": 0.0, "optimizer_delay": 0.3},
        {"on_nonfinite": "stop", "optimizer_delay": 0.3},  # steps in place, one generation of files
        {"overlap": False, "optimizer_delay": 0.3},
        {"verify": True, "optimizer_delay": 0.3},
        {"keep_gradients": True},
        {"outside_layers": "fetched", "optimizer_delay": 0.3},
        {"order": "horizontal"},
        {"optimizer_host_share": 0.3, "optimizer_delay": 0.3},
        {"prefetch_layers": 0},
        {"prefetch_layers": 3, "optimizer_delay": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("clip", [0.0, CLIPS])
def test_bits_are_stocks_beside_other_settings(
    tmp_path: Path, stock: Callable[[str, float], Run], clip: float, more: dict[str, Any]
) -> None:
    vertical, seen = train(compressed(tmp_path, clip, **more))
    assert_identical(stock("bf16", clip), vertical)
    assert min(seen) > 0.5, seen


@slow
@pytest.mark.parametrize("options", [{"max_in_cpu": 600_000}, {"persistence": None}], ids=str)
def test_bits_are_stocks_wherever_parameters_rest(tmp_path: Path, options: dict[str, Any]) -> None:
    section = {"seed": 11, "optimizer_delay": 0.3, "optimizer_compression": True}
    made = base_config(tmp_path, num_micro_batches=2, dtype="bf16", clip=0.0, section=section, **options)
    made = small_buffers(made, 600_000)
    stock = run_arm(made, BUILD, BATCHES, vertical=False)
    vertical, seen = train(made)
    assert_identical(stock, vertical)
    assert min(seen) > 0.1, seen  # with `max_in_cpu` some of the parameters rest in host memory


ODD: list[tuple[float, dict[str, Any]]] = [
    (0.0, {"optimizer_delay": 0.3}),
    (CLIPS, {"optimizer_delay": 0.5, "optimizer_speculation": True, "verify": True}),
]


@slow
@pytest.mark.parametrize(("clip", "more"), ODD, ids=str)
def test_bits_are_stocks_where_parts_end_within_parameters(tmp_path: Path, clip: float, more: dict[str, Any]) -> None:
    """Odd sizes, and several parts of one sub-group in one parameter. Stock runs in host memory: on SSD it garbles gradients
    whose offset in a sub-group is no multiple of 512 bytes (docs/architecture.md)."""
    options: dict[str, Any] = {"num_micro_batches": 2, "clip": clip, "sub_group_size": 4_000_000}
    odd = partial(MixerModel, 2, 1501)
    stock = run_arm(base_config(tmp_path, params="cpu", optimizer="cpu", **options), odd, BATCHES[:3], vertical=False)
    made = base_config(tmp_path, section={"seed": 11, "optimizer_compression": True} | more, **options)
    vertical, seen = train(small_buffers(made, 2_400_000), build=odd, batches=BATCHES[:3])
    assert_identical(stock, vertical)
    assert min(seen) > 0.5, seen


@slow
def test_bits_are_stocks_with_several_ssds(tmp_path: Path, stock: Callable[[str, float], Run]) -> None:
    paths = [str(tmp_path / name) for name in ("one", "two")]
    for path in paths:
        Path(path).mkdir()
    made = compressed(Path(paths[0]), nvme_paths=paths, optimizer_delay=0.3)
    vertical, seen = train(made)
    assert_identical(stock("bf16", 0.0), vertical)
    assert min(seen) > 0.9, seen


@pytest.mark.parametrize("skips", [False, True], ids=["redo then redo", "redo then skip"])
def test_an_early_step_waits_for_what_its_buffer_still_writes(tmp_path: Path, skips: bool) -> None:
    """Each early step is discarded. The last layer is fetched once: the forward's redone step and the early step that follows
    have one buffer, and writes leave it as late as they may."""

    def loss_of() -> Callable[[torch.Tensor, Any], torch.Tensor]:
        calls = count()
        return lambda found, _: found * float("nan") if skips and next(calls) // 2 == 1 else found  # two micro-batches a step

    made = compressed(tmp_path, CLIPS, optimizer_delay=0.0, optimizer_speculation=True)
    batches = BATCHES[:2] if skips else BATCHES
    stock = run_arm(made, BUILD, batches, vertical=False, loss_fn=loss_of())
    with running(made, BUILD, vertical=True) as (engine, model):
        writes = engine.param_store.writer._native = LateWrites(engine.param_store.writer.native)
        loss = loss_of()
        for step in batches:
            engine.train_batch(iter(step), loss)
        assert writes.num_asked and engine.skipped_steps == skips
        assert not differing(stock.weights, read_weights(model))
        assert not differing(stock.state, read_state(engine, model))


# ---- how few bytes


def moved_bytes(engine: Any, step: list[Any]) -> tuple[int, int]:
    """Bytes that the optimizer's pipeline reads and writes in a step."""
    engine.flush()
    pipeline = engine.optimizer.pipeline
    before = pipeline.reader.num_read_bytes, pipeline.writer.num_written_bytes
    engine.train_batch(iter(step))
    engine.flush()
    return pipeline.reader.num_read_bytes - before[0], pipeline.writer.num_written_bytes - before[1]


@pytest.mark.parametrize(("delay", "read", "written"), [(0.0, 10, 10), pytest.param(1.0, 12, 10, marks=slow)])
def test_a_step_moves_two_bytes_fewer(tmp_path: Path, delay: float, read: int, written: int) -> None:
    with running(compressed(tmp_path, optimizer_delay=delay), BUILD, vertical=True) as (engine, _):
        for step in BATCHES[:2]:
            engine.train_batch(iter(step))
        optimizer = engine.optimizer
        chunks = [(unit, optimizer.stepper.chunks[i]) for unit in engine.layers.units for i in optimizer.chunks_of(unit)]
        in_layers, outside = (
            sum(chunk.numel for unit, chunk in chunks if chunk.files is not None and (unit == "pre") is ends)
            for ends in (False, True)
        )
        moved = moved_bytes(engine, BATCHES[2])
        assert share_compressed(engine) == 1.0 and in_layers > 4 * outside
        assert moved == pytest.approx((read * in_layers + 12 * outside, written * in_layers + 12 * outside), rel=0.01)


# ---- whoever looks at the state, or writes it


def write_masters(engine: Any) -> None:
    for name, param in engine.module.named_parameters():
        if name.startswith("blocks.1."):
            master = safe_get_full_fp32_param(param)
            safe_set_full_fp32_param(param, master + 0.25)
            safe_set_full_optimizer_state(param, torch.full_like(master, 0.01), "exp_avg_sq")


def write_parameters(engine: Any) -> None:
    """The masters stand, in stock as here."""
    for name, param in engine.module.named_parameters():
        if name in ("blocks.1.up.weight", "blocks.1.up.bias", "blocks.2.down.weight"):
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
                param.add_(0.5)


@pytest.mark.parametrize("act", [write_parameters, pytest.param(write_masters, marks=slow)])
@pytest.mark.parametrize("delay", [0.3, pytest.param(1.0, marks=slow)])
def test_a_user_writes_whole_masters(tmp_path: Path, act: Callable[[Any], None], delay: float) -> None:
    runs: list[Run] = []
    for key in ({}, {"optimizer_compression": True}):
        made = config(tmp_path, "bf16", 0.0, optimizer_delay=delay, **key)
        between = lambda engine, step: act(engine) if step == 1 else None  # noqa: E731
        runs.append(run_arm(made, BUILD, BATCHES, vertical=True, between=between))
    assert_identical(*runs)


@slow
@pytest.mark.parametrize("delay", [0.3, 1.0])
def test_a_user_finds_whole_masters(tmp_path: Path, delay: float) -> None:
    """In the middle of the run, and those that the next step makes of them."""
    runs: list[Run] = []
    found: list[dict[str, torch.Tensor]] = []

    def read(engine: Any, step: int) -> None:
        if step in (1, 2):
            if engine.optimizer.stepper.masters is not None:
                engine.flush()
                assert share_compressed(engine) > 0.9
            masters = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
            found.append({name: master.clone() for name, master in masters.items() if master is not None})

    for key in ({}, {"optimizer_compression": True}):
        made = config(tmp_path, "bf16", 0.0, optimizer_delay=delay, **key)
        runs.append(run_arm(made, BUILD, BATCHES, vertical=True, between=read))
    assert_identical(*runs)
    assert len(found) == 4 and not differing(found[0], found[2]) and not differing(found[1], found[3])
    assert differing(found[0], found[1])


@pytest.mark.parametrize("within", [False, True], ids=["between steps", "within a step"])
def test_an_engine_is_destroyed_with_compressed_masters(tmp_path: Path, within: bool) -> None:
    """State may be read after it, as without compression, unless it has cut a step."""
    engine, model = build_engine(compressed(tmp_path, optimizer_delay=0.3), BUILD, vertical=True)
    marker = tmp_path / "destroyed"  # a list would be taken back with the step

    def destroy(*_: Any) -> Any:
        engine.destroy()
        marker.touch()
        raise KeyboardInterrupt

    try:
        for step in BATCHES[:2]:
            engine.train_batch(iter(step))
        engine.flush()
        assert engine.optimizer.stepper.masters.parts
        if within:
            with pytest.raises(KeyboardInterrupt):
                engine.train_batch(iter(BATCHES[2]), destroy)
            assert marker.exists()
            return
        engine.destroy()
        ended = contents(engine, model)
    finally:
        dispose(engine)
    whole = config(tmp_path, "bf16", 0.0, optimizer_delay=0.3)
    run = run_arm(whole, BUILD, BATCHES[:2], vertical=True)
    assert not differing({**run.weights, **run.state}, ended)


def test_a_compressed_part_is_not_stepped_beside_the_files_of_its_parameters(tmp_path: Path) -> None:
    """Its file has no masters that a step might read."""
    with running(compressed(tmp_path, optimizer_delay=0.3), BUILD, vertical=True) as (engine, _):
        engine.train_batch(iter(BATCHES[0]))
        engine.flush()
        masters = engine.optimizer.stepper.masters
        job = StepJob("step 1", [], lambda _: None, [])
        with pytest.raises(
            StaleRecordError, match="step 1: its masters are compressed, and no update of its parameters' files"
        ):
            masters.compress([(masters.parts[0], job)], None, {}, lambda _: 0)


REFUSED = (
    r'optimizer_compression": true: called within a step.*; call it between two, or write ".*optimizer_compression": false'
)


def test_a_write_within_a_step_is_refused_with_what_to_write(tmp_path: Path) -> None:
    with running(compressed(tmp_path, optimizer_delay=0.3), BUILD, vertical=True) as (engine, model):
        for step in BATCHES[:2]:
            engine.train_batch(iter(step))
        engine.flush()
        before = contents(engine, model)
        weight = model.blocks[1].up.weight
        hook = model.register_forward_pre_hook(lambda *_: engine.optimizer.flush_state())
        with pytest.raises(RuntimeError, match=REFUSED):
            engine.train_batch(iter(BATCHES[2]))
        hook.remove()
        assert not differing(before, contents(engine, model))

        def write(*_: Any) -> None:
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
                weight.add_(0.5)

        engine.train_batch(iter(BATCHES[2]))
        engine.flush()
        hook = model.register_forward_pre_hook(write)
        with pytest.raises(RuntimeError, match=REFUSED):
            engine.train_batch(iter(BATCHES[3]))
        hook.remove()
        engine.train_batch(iter(BATCHES[3]))


# ---- a value that is not what it was when the part was compressed


def low_paths(engine: Any) -> Iterator[Path]:
    for chunk in engine.optimizer.stepper.chunks:
        yield from (path for whole in chunk.low_files or () for path in map(Path, stripes.files_of(whole)))


@pytest.mark.parametrize("delay", [0.0, 1.0])
def test_a_parameters_file_that_somebody_changes_is_noticed(tmp_path: Path, delay: float) -> None:
    """Written past all hooks. The step in the backward computes with it, the delayed one reads it: neither trains on."""
    with running(compressed(tmp_path, optimizer_delay=delay), BUILD, vertical=True) as (engine, _):
        for step in BATCHES[:2]:
            engine.train_batch(iter(step))
        engine.flush()
        shard = next(s for s in engine.param_store.files.shards() if s.param is engine.module.blocks[1].down.weight)
        with open(shard.path, "r+b") as file:
            file.seek(4096)
            file.write(bytes(64))
        with pytest.raises(ChecksumError):
            engine.train_batch(iter(BATCHES[2]))
            engine.flush()
        with pytest.raises(TornStateError):
            engine.train_batch(iter(BATCHES[3]))


@slow
def test_a_value_in_memory_that_somebody_changes_is_read_again(tmp_path: Path, stock: Callable[[str, float], Run]) -> None:
    """As in stock, what a hook writes into a gathered weight is gone with it; here the early step meets it, too."""

    calls: list[int] = []

    def spoil(module: Any, *_: Any) -> None:
        calls.append(0)
        if len(calls) % 2 == 0:  # behind the step's last micro-batch
            with torch.no_grad():
                module.weight.data[0, 0] = 7.0

    def hooked() -> Any:
        model = mixer("bf16")
        model.blocks[1].down.register_full_backward_hook(spoil)
        return model

    with running(compressed(tmp_path, optimizer_delay=0.0), hooked, vertical=True) as (engine, model):
        for step in BATCHES:
            engine.train_batch(iter(step))
        found = contents(engine, model)
    run = stock("bf16", 0.0)
    assert not differing({**run.weights, **run.state}, found)


# ---- parts that are not compressed


@pytest.mark.slow
def test_masters_with_many_exceptions_stay_whole_until_they_have_few(tmp_path: Path) -> None:
    """Numbers with few bits, such as those of fp16, are ties once in eight."""

    def spoil(engine: Any, step: int) -> None:
        if step == 0:
            param = engine.module.blocks[0].down.weight
            ties = torch.full((WIDTH["bf16"], WIDTH["bf16"]), 1.0).view(torch.int32) | 0x8000
            safe_set_full_fp32_param(param, ties.view(torch.float32))
            for kind in ("exp_avg", "exp_avg_sq"):
                safe_set_full_optimizer_state(param, torch.zeros(ties.shape), kind)

    runs: list[Run] = []
    seen: list[float] = []

    def between(engine: Any, step: int) -> None:
        spoil(engine, step)
        if engine.optimizer.stepper.masters is not None:
            engine.flush()
            seen.append(share_compressed(engine))

    for key in ({}, {"optimizer_compression": True}):
        made = config(tmp_path, "bf16", 0.0, optimizer_delay=0.3, **key)
        made["optimizer"]["params"] |= {"lr": 0.0, "weight_decay": 0.0}
        made["scheduler"]["params"] |= {"warmup_min_lr": 0.0, "warmup_max_lr": 0.0}
        runs.append(run_arm(made, BUILD, BATCHES, vertical=True, between=between))
    assert_identical(*runs)
    assert seen[0] == 0.0 and 0.5 < seen[1] < 1.0, seen  # its own parts stay whole: the step changes nothing


@slow
def test_a_step_that_is_skipped_leaves_every_part_as_it_was(tmp_path: Path) -> None:
    runs: list[Run] = []

    for key in ({}, {"optimizer_compression": True}):
        calls = count()

        def loss(found: torch.Tensor, _: Any, calls: Iterator[int] = calls) -> torch.Tensor:
            return found * float("nan") if next(calls) // 2 == 2 else found  # two micro-batches a step

        made = config(tmp_path, "bf16", 0.0, optimizer_delay=0.3, **key)
        runs.append(run_arm(made, BUILD, BATCHES, vertical=True, loss_fn=loss))
    a, b = runs
    assert not differing(a.weights, b.weights) and not differing(a.state, b.state) and a.counters == b.counters
    assert a.counters["skipped_steps"] == 1
