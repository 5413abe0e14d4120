"""What is issued at a step's end for the next forward: once, before `train_batch` returns, for the values of then, and
without effect on any bit, whatever comes between the two steps."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from harness import base_config, contents, differing, read_weights, running, small_buffers
from late import LateReads, LateSteps, SoonReads
from models import MixerModel, token_batches

from ds_vertical.engine.zero3.optimizer import VerticalStage3
from ds_vertical.errors import TornStateError
from ds_vertical.io.aio import DiskError

NUM_LAYERS = 4
VOCAB = 600  # the embedding and the head have more than 1 MiB each: `pre` is on SSD as well
BUILD = partial(MixerModel, NUM_LAYERS, vocab=VOCAB)
BATCHES = token_batches(8, 2, vocab=VOCAB, rows=1, shortest=5)
DELAYED, EARLY = 1.0, 0.0  # optimizer_delay: everything in the next forward, with clipping; or nothing, without
slow = pytest.mark.slow
Tensors = dict[str, torch.Tensor]


def config_in(folder: Path, delay: float, window: int | None = None, **section: Any) -> dict[str, Any]:
    chosen = {"optimizer_delay": delay, "prefetch_layers": window, "seed": 5} | section
    clip = 0.05 if delay == DELAYED else 0.0
    return small_buffers(base_config(folder, num_micro_batches=2, dtype="fp32", clip=clip, section=chosen), 320_000)


def step(engine: Any, number: int) -> float:
    return engine.train_batch(iter(BATCHES[number])).item()


def files_of(engine: Any, unit: Any) -> set[str]:
    return {os.path.basename(path) for shard in engine._params.files.by_unit[unit] for path in shard.paths}


def reads_by_unit(engine: Any, issued: list[str]) -> dict[Any, float]:
    """How often each unit was read."""
    counts = Counter(issued)
    files = {unit: files_of(engine, unit) for unit in engine.layers.units}
    return {unit: sum(counts[name] for name in names) / len(names) for unit, names in files.items()}


# ---- order and bytes


def test_where_host_and_device_are_one_memory_a_block_computes_on_the_bytes_that_were_read(tmp_path: Path) -> None:
    seen: list[bool] = []
    with running(config_in(tmp_path, EARLY), BUILD, vertical=True) as (engine, model):
        places = [
            (buffer.data.data_ptr(), buffer.data.data_ptr() + buffer.data.numel()) for buffer in engine._params.buffers.every
        ]

        def look(module: Any, _: Any) -> None:
            seen.append(any(start <= module.weight.data_ptr() < stop for start, stop in places))

        for block in model.blocks:
            block.up.register_forward_pre_hook(look)
        step(engine, 0)
    assert len(seen) >= 2 * NUM_LAYERS and all(seen), "copied"


@pytest.mark.parametrize(("window", "kept"), [(1, [3, 2]), pytest.param(3, [3, 2, 1], marks=slow)])
def test_reads_for_the_next_step_are_issued_before_train_batch_returns_and_once(
    tmp_path: Path, window: int, kept: list[int]
) -> None:
    """With all steps early nothing is handed over: what the next forward needs first is read, and not read again."""
    with running(config_in(tmp_path, EARLY, window), BUILD, vertical=True) as (engine, _):
        reads = LateReads.of(engine)
        step(engine, 0)
        ahead = {"pre", *range(min(window, 2))}
        for number in (1, 2):
            expected = {
                os.path.basename(shard.paths[shard.generation]) for u in ahead for shard in engine._params.files.by_unit[u]
            }
            assert {os.path.basename(path).decode() for _, _, path, *_ in reads.left.values()} == expected
            before = len(reads.issued) - len(reads.left)  # what is under way belongs to the next step
            step(engine, number)
            issued = reads.issued[before : len(reads.issued) - len(reads.left)]
            twice = {layer: 1 if layer in kept else 2 for layer in range(NUM_LAYERS)}
            assert reads_by_unit(engine, issued) == {"pre": 1} | twice
        assert engine.optimizer.driver.backlog.pending == ()


def test_nothing_is_issued_ahead_without_a_window(tmp_path: Path) -> None:
    with running(config_in(tmp_path, EARLY, 0), BUILD, vertical=True) as (engine, _):
        reads = LateReads.of(engine)
        step(engine, 0)
        assert reads.issued and not reads.left and not engine._params.ahead


def test_without_overlap_no_read_of_parameters_is_under_way_beside_cpu_adam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a part of a shard's new values lies beside is read before the step, and its pieces are stepped after that."""
    left: list[int] = []
    with running(config_in(tmp_path, 0.5, 0, overlap=False), BUILD, vertical=True) as (engine, _):
        reads, kernel = LateReads.of(engine), engine.optimizer.stepper.kernel
        update = kernel.update

        def watched(*args: Any) -> None:
            left.append(len(reads.left))
            update(*args)

        monkeypatch.setattr(kernel, "update", watched)
        for number in range(2):
            step(engine, number)
        engine.flush()
    assert len(left) >= 4 * NUM_LAYERS and not any(left) and reads.issued


def test_delayed_steps_are_issued_before_train_batch_returns_and_once(tmp_path: Path) -> None:
    """The first units' steps are under way; the next schedule takes them over, bit for bit as if it had issued them."""
    ends, losses, state_bytes = [], [], []
    for window in (0, 1):
        with running(config_in(tmp_path, DELAYED, window), BUILD, vertical=True) as (engine, model):
            late = LateSteps(engine)
            losses.append([])
            for number in range(3):
                losses[-1].append(step(engine, number))
                computed = late.num_parts
                backlog = engine.optimizer.driver.backlog
                assert backlog.pending == ("pre", *range(NUM_LAYERS))
                assert backlog.due == (tuple(range(2, NUM_LAYERS)) if window else backlog.pending)
                assert bool(late.num_left) == (window > 0)
                assert late.num_parts == computed, "train_batch waited for what the next step needs"
            engine.flush()
            assert engine.optimizer.driver.backlog.pending == ()
            pipeline = engine.optimizer.pipeline
            state_bytes.append((pipeline.reader.num_read_bytes, pipeline.writer.num_written_bytes))
            ends.append(contents(engine, model))
    assert losses[0] == losses[1] and not differing(*ends)
    assert state_bytes[0] == state_bytes[1] and min(state_bytes[0]) > 3 * 12 * 2**20


# ---- what comes between two steps


def evaluate(engine: Any, model: Any) -> list[float]:
    """Twice, over another number of micro-batches than a step has, then one forward."""
    sizes = (3, 1)
    losses = [engine.eval_batch(iter(token_batches(1, size, seed=9, vocab=VOCAB)[0][:2])).item() for size in sizes]
    model.eval()
    return [*losses, engine(**BATCHES[0][0]).item()]


def gather(engine: Any, model: Any) -> list[float]:
    return [weight.double().sum().item() for weight in read_weights(model).values()]


def written(model: Any) -> list[Any]:
    return [model.blocks[0].up.weight, model.embed.weight, model.blocks[2].down.weight, model.blocks[1].up.bias]


def write_gathered(engine: Any, model: Any) -> list[float]:
    with deepspeed.zero.GatheredParameters(written(model), modifier_rank=0):
        for param in written(model):
            param.data.mul_(1.5)
    return []


def write_through_the_swapper(engine: Any, model: Any) -> list[float]:
    """As stock's optimizer does when it loads a checkpoint."""
    engine.flush()
    for param in written(model)[:2]:
        values = torch.linspace(-0.1, 0.1, param.ds_numel)
        param.nvme_swapper.swap_out_partitioned_params(dst_fp16_params=[param], src_fp32_params=[values])
    return []


BETWEEN: list[Callable[[Any, Any], list[float]]] = [evaluate, gather, write_gathered, write_through_the_swapper]


def trained(config: dict[str, Any], between: Callable[[Any, Any], list[float]], arrive: Any) -> tuple[list[float], Tensors]:
    """Losses and what was seen between steps, the last of which has fewer micro-batches; the weights and state at the end."""
    with running(config, BUILD, vertical=True) as (engine, model):
        params = engine._params
        if arrive is not None:
            reads, _ = arrive.of(engine), LateSteps(engine)
        seen = []
        for number in range(3):
            seen.append(step(engine, number))
            if arrive is not None:
                assert params.ahead or engine.optimizer.driver.backlog.ahead, "nothing is in flight"
            seen += between(engine, model)
        seen.append(engine.train_batch(iter(BATCHES[3][:1])).item())
        engine.flush()
        if arrive is not None:
            held = [unit for unit in params.ahead if unit != "pre"]
            assert params.buffers.layers.num_free + len(held) == params.buffers.layers.num_buffers
            assert params.buffers.outside["pre"].num_free + ("pre" in params.ahead) == 1
            assert reads.issued
        return seen, contents(engine, model)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[list[float], Tensors]]:
    """The same without overlap: nothing is ever ahead."""
    runs: dict[Any, tuple[list[float], Tensors]] = {}

    def get(delay: float, between: Any) -> tuple[list[float], Tensors]:
        if (delay, between) not in runs:
            config = config_in(tmp_path_factory.mktemp("oracle"), delay, 0, overlap=False)
            runs[delay, between] = trained(config, between, None)
        return runs[delay, between]

    return get


def between_cases() -> list[Any]:
    fast = [(DELAYED, evaluate, LateReads), (EARLY, evaluate, LateReads), (EARLY, write_gathered, SoonReads)]
    fast += [(EARLY, write_through_the_swapper, SoonReads)]
    every = [(d, b, a) for d in (DELAYED, EARLY) for b in BETWEEN for a in (LateReads, SoonReads)]
    return [pytest.param(*case, marks=[] if case in fast else [slow]) for case in every]


@pytest.mark.parametrize(("delay", "between", "arrive"), between_cases())
def test_whatever_comes_between_two_steps_is_as_if_nothing_were_ahead(
    tmp_path: Path, oracle: Callable[..., tuple[list[float], Tensors]], delay: float, between: Any, arrive: Any
) -> None:
    seen, state = trained(config_in(tmp_path, delay, 2), between, arrive)
    expected, expected_state = oracle(delay, between)
    assert seen == expected
    assert not differing(expected_state, state)


# ---- failures and ends


def cut(path: str) -> Callable[[], None]:
    """Cut a file short; returns what puts it back."""
    contents = Path(path).read_bytes()
    os.truncate(path, 4096)

    def restore() -> None:
        Path(path).write_bytes(contents)

    return restore


def test_a_read_ahead_that_fails_is_told_by_the_next_step_which_can_be_repeated(tmp_path: Path) -> None:
    """The unit whose read fails is the second; the reads of the others, under way too, do not stay behind."""
    ends = []
    for fails in (False, True):
        with running(config_in(tmp_path, EARLY, 2), BUILD, vertical=True) as (engine, model):
            LateReads.of(engine)
            step(engine, 0)
            if fails:
                shard = engine._params.files.by_unit[1][0]
                path = shard.paths[shard.generation]
                restore = cut(path)
                with pytest.raises(DiskError, match=r"read of .* failed in read at offset 4096") as raised:
                    step(engine, 1)
                assert raised.value.filename == path and raised.value.operation == "read" and raised.value.errno
                assert "1F0  <-- here" in "".join(raised.value.__notes__) and "torn" not in "".join(raised.value.__notes__)
                assert not engine._params.ahead and not engine._params.fetched
                restore()
            step(engine, 1)
            step(engine, 2)
            ends.append(contents(engine, model))
    assert not differing(*ends)


def test_a_step_ahead_that_fails_between_two_calls_is_told_by_the_next_one(tmp_path: Path) -> None:
    with running(config_in(tmp_path, DELAYED), BUILD, vertical=True) as (engine, model):
        step(engine, 0)
        optimizer: VerticalStage3 = engine.optimizer
        optimizer.flush()
        chunk = optimizer.stepper.chunks[optimizer.chunks_of(1)[0]]
        assert chunk.files is not None
        name = chunk.files[0][1].name
        cut(str(chunk.files[0][1]))
        step(engine, 1)
        optimizer.pipeline.wait_idle()
        with pytest.raises(DiskError, match="failed in read at offset 4096") as raised:
            step(engine, 2)
        assert name in str(raised.value) and "live state is torn" in "".join(raised.value.__notes__)
        for use in (partial(step, engine, 2), partial(read_weights, model), engine.flush):
            with pytest.raises(TornStateError, match=name):
                use()


@pytest.mark.parametrize("delay", [DELAYED, EARLY])
def test_destroy_completes_what_is_ahead(tmp_path: Path, delay: float) -> None:
    with running(config_in(tmp_path, delay), BUILD, vertical=True) as (engine, _):
        reads, late = LateReads.of(engine), LateSteps(engine)
        step(engine, 0)
        assert bool(reads.left) == (delay == EARLY)
        assert bool(late.num_left) == (delay == DELAYED)
        computed = late.num_parts
        engine.destroy()
        assert not reads.left and (late.num_parts > computed) == (delay == DELAYED)
        assert not engine._params.buffers.every and engine.optimizer.slots == []
