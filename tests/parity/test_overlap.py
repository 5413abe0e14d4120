"""N2: timing never changes values. Random settings against the debugging oracle (no overlap, nothing ahead, nothing delayed,
all state in host memory), bit for bit: losses, norms, gradients, weights, masters and moments.

[Note: slow disk] Every operation is given to the real queue only after a random pause, on a thread of its own: data arrive
late and in any order, and memory is read late. Who uses either before its wait computes something else.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from harness import Run, TwoMemories, assert_identical, base_config, run_arm, small_buffers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from models import MixerModel, token_batches

from ds_vertical.compat.ops import load
from ds_vertical.engine import assembly
from ds_vertical.engine import handlers as sweeps
from ds_vertical.engine.zero3 import optimizer as zero3_optimizer
from ds_vertical.io.aio import DiskQueue
from ds_vertical.offload.cpu_adam import CpuAdam
from ds_vertical.schedule.events import Event, Op
from ds_vertical.schedule.executor import Executor, Handler

NUM_STEPS = 3
WIDTH = {False: {"fp32": 64, "bf16": 64}, True: {"fp32": 512, "bf16": 768}}  # on SSD a matrix must have 1 MiB
LONGEST_PAUSE_S = 0.006


@dataclass(frozen=True)
class Numbers:
    """What the values depend on."""

    num_layers: int
    num_micro_batches: int
    dtype: str
    clip: float
    sub_group_size: int
    wide: bool


@dataclass(frozen=True)
class Timing:
    """What they do not depend on. `params`, `optimizer`: where the state rests; `pauses`: seed of the disk's."""

    section: tuple[tuple[str, Any], ...]
    params: str
    optimizer: str
    pauses: int
    persistence: int | None = 0


ORACLE = Timing((("overlap", False), ("prefetch_layers", 0), ("optimizer_delay", 0.0)), "cpu", "cpu", 0)


def run(numbers: Numbers, timing: Timing, folder: Path) -> Run:
    section = dict(timing.section)
    if moved := section.pop("moved", None):
        section["activations"] = dict(zip(("device", "share", "host_share"), moved, strict=True))
    config = base_config(
        folder,
        num_micro_batches=numbers.num_micro_batches,
        dtype=numbers.dtype,
        clip=numbers.clip,
        sub_group_size=numbers.sub_group_size,
        params=timing.params,
        optimizer=timing.optimizer,
        persistence=timing.persistence,
        section={"seed": 7, "layers": ["blocks"]} | section,
    )
    if timing.params == "nvme":
        small_buffers(config, 600_000)
    build = partial(MixerModel, numbers.num_layers, WIDTH[numbers.wide][numbers.dtype], dropout=0.1, vocab=61)
    batches = token_batches(NUM_STEPS, numbers.num_micro_batches, vocab=61, rows=1, shortest=3)
    # Where host and device are one memory nothing would move to the host.
    apart = mock.patch.object(assembly, "accelerator", TwoMemories()) if moved else contextlib.nullcontext()
    with apart:
        return run_arm(config, build, batches, vertical=True)


@functools.lru_cache(maxsize=64)
def oracle(numbers: Numbers) -> Run:
    return run(numbers, ORACLE, Path("unused"))


# ---- the slow disk


class SlowQueue:
    """A native queue behind random pauses; see [Note: slow disk]."""

    def __init__(self, inner: Any, pause: Callable[[], float]) -> None:
        self._inner = inner
        self._pause = pause
        self._pool = ThreadPoolExecutor(8)
        self._under_way: dict[int, Future[Any]] = {}
        self._next = 0

    def _issue(self, issue: Callable[..., int], *args: Any) -> int:
        pause = self._pause()

        def do() -> Any:
            time.sleep(pause)
            return self._inner.wait(issue(*args))

        self._next += 1
        self._under_way[self._next] = self._pool.submit(do)
        return self._next

    def read(self, *args: Any) -> int:
        return self._issue(self._inner.read, *args)

    def write(self, *args: Any) -> int:
        return self._issue(self._inner.write, *args)

    def wait(self, operation: int) -> Any:
        return self._under_way.pop(operation).result()

    def poll(self, operation: int) -> Any:
        return self.wait(operation) if self._under_way[operation].done() else None

    def wait_all(self) -> None:
        wait_for(list(self._under_way.values()))
        self._pool.shutdown()

    def pending(self) -> int:
        return len(self._under_way)


def slow_disk(monkeypatch: pytest.MonkeyPatch, seed: int) -> list[DiskQueue]:
    """From now on every queue of a new engine is slow; returns those made."""
    generator = random.Random(seed)
    queues: list[DiskQueue] = []

    def new_queue(aio: Mapping[str, Any], *_: Any) -> DiskQueue:
        inner = load.checked_aio().Queue(aio["block_size"], aio["queue_depth"], aio["single_submit"])
        queues.append(DiskQueue(SlowQueue(inner, lambda: generator.choice((0.0, LONGEST_PAUSE_S * generator.random())))))
        return queues[-1]

    monkeypatch.setattr(assembly, "new_disk_queue", new_queue)
    return queues


# ---- random settings


Moved = tuple[str, float, float]
TO_HOST: list[Moved | None] = [None, ("host", 0.5, 0.0), ("host", 1.0, 0.0)]
TO_SSD: list[Moved | None] = [None, ("ssd", 0.5, 0.0), ("ssd", 1.0, 0.0), ("ssd", 0.5, 0.5), ("host", 1.0, 0.0)]
PERSISTENCE = st.sampled_from([0, 0, 600, None])  # 600: norms and biases


def sections(moved: list[Moved | None]) -> st.SearchStrategy[tuple[tuple[str, Any], ...]]:
    """`moved`: where activations rest, with the shares of the micro-batches that rest there and in host memory."""
    return st.fixed_dictionaries(
        {
            "overlap": st.sampled_from([True, True, False]),
            "prefetch_layers": st.sampled_from([None, 0, 1, 2, 3]),
            "optimizer_delay": st.sampled_from([None, 0.0, 0.25, 0.5, 1.0]),
            "optimizer_speculation": st.sampled_from([None, True, False]),
            "order": st.sampled_from(["vertical", "vertical", "horizontal"]),
            "on_nonfinite": st.sampled_from(["skip", "stop"]),
            "gradient_host_share": st.sampled_from([None, 0.0, 0.5]),
            "keep_gradients": st.sampled_from([False, False, True]),
            "moved": st.sampled_from(moved),
            "verify": st.booleans(),
        }
    ).map(lambda section: tuple(section.items()))


def fits(timing: Timing) -> bool:
    """Whether the JSON is not refused: gradients that wait on SSD do so beside the optimizer state, and are not kept."""
    section = dict(timing.section)
    return section["gradient_host_share"] is None or (timing.optimizer == "nvme" and not section["keep_gradients"])


IN_MEMORY = st.tuples(
    st.builds(
        Numbers,
        st.sampled_from([1, 2, 3, 5]),
        st.integers(1, 4),
        st.sampled_from(["fp32", "bf16"]),
        st.sampled_from([0.0, 1.0, 0.05]),
        st.sampled_from([5_001, 20_001, 700_001]),
        st.just(False),
    ),
    st.builds(Timing, sections(TO_HOST), st.sampled_from(["none", "cpu"]), st.just("cpu"), st.just(0), PERSISTENCE).filter(
        fits
    ),
)
ON_SSD = st.tuples(
    st.builds(
        Numbers,
        st.sampled_from([4, 7]),  # many layers, and little to compute in each
        st.integers(1, 3),
        st.sampled_from(["fp32", "fp32", "bf16"]),
        st.sampled_from([0.0, 0.05]),
        st.sampled_from([300_001, 700_001]),
        st.just(True),
    ),
    st.builds(
        Timing,
        sections(TO_SSD),
        st.sampled_from(["nvme", "nvme", "cpu"]),
        st.sampled_from(["nvme", "nvme", "cpu"]),
        st.integers(1, 10**6),
        PERSISTENCE,
    ).filter(lambda timing: fits(timing) and "nvme" in (timing.params, timing.optimizer)),
)


def check(strategy: st.SearchStrategy[tuple[Numbers, Timing]], count: int, folder: Path) -> set[tuple[Numbers, Timing]]:
    """Compare `count` different random settings with the oracle; returns them."""
    compared: set[tuple[Numbers, Timing]] = set()

    @settings(
        max_examples=4 * count,  # of which some are alike
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def compare(drawn: tuple[Numbers, Timing]) -> None:
        if len(compared) == count or drawn in compared:
            return
        numbers, timing = drawn
        with pytest.MonkeyPatch.context() as monkeypatch:
            queues = slow_disk(monkeypatch, timing.pauses) if timing.pauses else []
            found = run(numbers, timing, folder)
        assert_identical(oracle(numbers), found)
        if timing.params == "nvme":
            assert 0 < found.ssd_bytes <= sum(queue.num_read_bytes for queue in queues), "the disk was hardly used"
        compared.add(drawn)

    compare()
    return compared


def test_random_settings_in_memory(tmp_path: Path) -> None:
    assert len(check(IN_MEMORY, 4, tmp_path)) == 4


@pytest.mark.slow
def test_random_settings_on_a_slow_disk(tmp_path: Path) -> None:
    assert len(check(ON_SSD, 3, tmp_path)) == 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_random_settings_in_memory(tmp_path: Path) -> None:
    assert len(check(IN_MEMORY, 105, tmp_path)) >= 100


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_random_settings_on_a_slow_disk(tmp_path: Path) -> None:
    compared = check(ON_SSD, 22, tmp_path)
    assert len(compared) >= 20
    early = [t for n, t in compared if n.clip == 0 and t.optimizer == "nvme" and dict(t.section)["optimizer_delay"] != 1.0]
    assert len(early) >= 3, "hardly any setting steps early"
    waiting = [t for _, t in compared if dict(t.section)["gradient_host_share"] is not None]
    assert len(waiting) >= 4, "hardly any gradient waits on SSD"
    moving = [t for _, t in compared if dict(t.section)["moved"]]
    assert len(moving) >= 4, "hardly any activation moves"
    resident = [t for n, t in compared if t.persistence != 0 and n.clip == 0]
    assert len(resident) >= 2, "hardly any parameter stays on the device beside early steps"


@pytest.mark.parametrize("host_share", [0.0, 1.0])
def test_without_overlap_no_event_finds_anything_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_share: float
) -> None:
    """Reads, writes of state, of new parameters, of gradients and of activations, early and delayed steps. Nor does a piece of
    an optimizer step, of which some (biases) have their state in memory."""
    queues = slow_disk(monkeypatch, 1)
    found: list[str] = []

    class Watched(Executor):
        def __init__(self, handlers: Mapping[Op, Handler], **kwargs: Any) -> None:
            super().__init__({op: partial(self.watch, handler) for op, handler in handlers.items()}, **kwargs)

        def watch(self, handler: Handler, event: Event) -> Any:
            look(event)
            return handler(event)

    class WatchedAdam(CpuAdam):
        def update(self, *args: Any) -> None:
            look("CPU Adam")
            super().update(*args)

    def look(what: object) -> None:
        found.extend(f"{what}: queue {number}" for number, queue in enumerate(queues) if cast(Any, queue.native).pending())

    monkeypatch.setattr(sweeps, "Executor", Watched)
    monkeypatch.setattr(zero3_optimizer, "CpuAdam", WatchedAdam)
    numbers = Numbers(4, 2, "fp32", 0.0, 1, True)  # each parameter a chunk
    moved = ("activations", {"device": "ssd"})
    section = (("overlap", False), ("optimizer_delay", 0.5), ("gradient_host_share", host_share), moved)
    assert run(numbers, Timing(section, "nvme", "nvme", 1), tmp_path).ssd_bytes
    assert sum(queue.num_written_bytes for queue in queues) and not found
