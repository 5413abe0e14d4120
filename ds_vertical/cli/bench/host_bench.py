"""What a step costs the host's cores beside the model: transfers, CPU Adam, and the schedule's own code.

`core_s_per_byte`, `core_share`: what transfers and CPU Adam take from a computation beside them. `event_s`: seconds that the
schedule's code takes for an event of computation. Where host and device are one memory the thread that walks the schedule
computes as well, so these seconds are part of every step. They are measured on a model that computes next to nothing, with
stores that move nothing: a step by the schedule against the same forwards and backwards by plain autograd.

[Note: cores and bytes] The kernel submits, pins pages and completes on the cores that compute, and a virtual disk is served by
the host of the virtual machine, often on the same ones; transfers and products share the memory's bandwidth too. All of it is
counted at once, as seconds of a core per byte: by how much the same products slow down beside transfers, times the cores that
they compute on, over the bytes per second that were moved meanwhile.

[Note: cores and teams] A computation on all cores waits at the end of each operation for its slowest thread. A thread of CPU
Adam on one core of two thus takes more than half of it: as much as all, where both are also bound by memory. So its share is
measured as well: what the same products lose beside it in a second, over the seconds' worth of its own work that it does. It is
more than 1 where both at a time are slower than in turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch
from torch import nn

from ds_vertical.cli.bench.ssd_bench import median_s
from ds_vertical.distributed.gather_queue import GatherQueue
from ds_vertical.engine.handlers import ScheduleRunner
from ds_vertical.io.ticket import Ticket
from ds_vertical.model.layers import map_layers
from ds_vertical.model.micro_batch import Body
from ds_vertical.offload.grad_accumulator import GradientStore, ParamFacts
from ds_vertical.offload.state_files import StepShare
from ds_vertical.schedule.events import Op, Unit
from ds_vertical.schedule.levels import Arrival
from ds_vertical.schedule.passes import TrainingStep, build_training

_WINDOW_S = 0.25  # long against a product and a transfer, short against what others do on a shared machine
_TOKENS, _WIDTH, _WEIGHTS = 8, 1024, 12  # 50 MB of weights: more than caches hold, as a layer's


def core_s_per_byte(transfer: Callable[[], int], num_cores: int, num_pairs: int) -> float:
    """Seconds of a core that a byte takes from computation beside it, 0 or more.

    `transfer` moves some bytes in both directions, waits until they are moved, and returns how many they were. It is called in
    another thread. Raises what `transfer` raises.
    """
    pairs = _beside(transfer, num_pairs)
    return max(0.0, median((1 - left) * num_cores / bytes_per_s for left, bytes_per_s in pairs))


def core_share(work: Callable[[], int], num_pairs: int) -> float:
    """Seconds of all cores, 0 or more, that a second of `work` takes from what computes on them; 1 where doing both at a time
    is as fast as in turn. `work` does a piece and returns its size; it is called in another thread. Raises what `work`
    raises."""
    found = []
    for left, rate in _beside(work, num_pairs):
        mover = _Mover(work)
        mover.start()
        time.sleep(_WINDOW_S)
        found.append((1 - left) * mover.stop() / rate)
    return max(0.0, median(found))


def _beside(work: Callable[[], int], num_pairs: int) -> Iterator[tuple[float, float]]:
    """The products' rate beside `work` over that without it, and the work's rate meanwhile; again and again, one after the
    other, so that a drift of the machine hits both."""
    compute = _products()
    compute(_WINDOW_S)
    for _ in range(num_pairs):
        alone = compute(_WINDOW_S)
        mover = _Mover(work)
        mover.start()
        beside = compute(_WINDOW_S)
        yield beside / alone, mover.stop()


class _Mover(threading.Thread):
    """Repeats some work until it is stopped; `stop` returns its rate (bytes per second), and raises what went wrong."""

    def __init__(self, work: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._stopped = threading.Event()
        self._done = 0
        self._seconds = 0.0
        self._error: BaseException | None = None

    def run(self) -> None:
        start = time.perf_counter()
        try:
            self._done = self._work()
            while not self._stopped.is_set():
                self._done += self._work()
        except BaseException as error:  # raised by stop, in the caller's thread
            self._error = error
        self._seconds = time.perf_counter() - start

    def stop(self) -> float:
        self._stopped.set()
        self.join()
        if self._error is not None:
            raise self._error
        return self._done / self._seconds


def _products() -> Callable[[float], float]:
    """Products of few tokens with more weights than caches hold, for so many seconds: products per second."""
    inputs = torch.ones(_TOKENS, _WIDTH)
    weights: list[torch.Tensor] = [torch.ones(_WIDTH, _WIDTH) for _ in range(_WEIGHTS)]

    def compute(seconds: float) -> float:
        count, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds:
            for each in weights:
                torch.nn.functional.linear(inputs, each)
            count += len(weights)
        return count / passed

    return compute


_LAYERS = _MICRO_BATCHES = 8
_COMPUTE = (Op.F, Op.HEAD, Op.B)
_STEPS = 5  # timed together


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.gain


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = _Block()
        self.blocks = nn.ModuleList(_Block() for _ in range(_LAYERS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.sum()


class _Memory:
    """Parameters that are where they are, and an optimizer that steps none."""

    host_bytes = 0
    copies = None
    recalls = False
    gathers = GatherQueue(in_order=False, early=False)

    def fetch(self, unit: Unit, step: Ticket | None = None, arrival: Arrival = Arrival()) -> Ticket:  # noqa: B008 - frozen
        return Ticket(f"fetch {unit}", lambda: None)

    def fetch_ahead(self, unit: Unit) -> Ticket | None:
        return None

    def release(self, unit: Unit, comes_back: bool = False) -> None: ...

    def release_all(self) -> None: ...

    def reduce_unit(
        self, unit: Unit, sums: Iterator[torch.Tensor], flat: torch.Tensor | None, give_back: Callable[[torch.Tensor], None]
    ) -> bool:
        return False

    def hold_unit(self, unit: Unit) -> Ticket | None: ...

    def reducing(self, unit: Unit, leaves: bool = False) -> Ticket | None: ...

    def open_step(self) -> None: ...

    open_left = open_step

    def step_early(self, unit: Unit) -> Ticket | None: ...

    def expect_steps(self, units: Sequence[Unit], share: StepShare | None) -> None: ...

    def early_writes(self) -> Ticket | None: ...

    left = early_writes

    def conclude_early(self) -> None: ...

    def step_unit(self, unit: Unit) -> Ticket | None: ...

    step_ahead = stepped_ahead = step_unit

    def is_left(self, unit: Unit) -> bool:
        return False

    def abandon(self) -> None: ...


def event_s(rounds: int) -> float:
    """Seconds per event of computation (F, HEAD, B), 0 or more: the median of `rounds`."""
    model, memory = _Model(), _Memory()
    layers = map_layers(model, ["blocks"])
    facts = ParamFacts(nn.Parameter.numel, lambda param: param.dtype)
    sums = GradientStore(layers.units, torch.float32, facts, pairs=True)
    sweeps = ScheduleRunner(layers, memory, overlap=True)
    schedule = build_training(TrainingStep(_LAYERS, _MICRO_BATCHES))
    runs: list[Callable[[], torch.Tensor]] = [partial(model, torch.ones(1)) for _ in range(_MICRO_BATCHES)]

    def scheduled() -> None:
        for _ in range(_STEPS):
            sweeps.train(schedule, [Body(run, seed) for seed, run in enumerate(runs)], sums, memory, lambda loss: loss)

    def plain() -> None:
        for _ in range(_STEPS):
            for run in runs:
                run().backward()
            model.zero_grad()

    num_events = _STEPS * sum(event.op in _COMPUTE for event in schedule.events)
    return max(0.0, (median_s(scheduled, rounds) - median_s(plain, rounds)) / num_events)
