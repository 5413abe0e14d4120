"""The engine that trains layer-major: DeepSpeed's, with its calls overridden, from its construction to its end."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from ds_vertical import interrupts
from ds_vertical.compat import accelerator, engine
from ds_vertical.compat.ops import load
from ds_vertical.distributed import ranks
from ds_vertical.distributed.elastic import ElasticCounts
from ds_vertical.engine.acco.steps import steps_of
from ds_vertical.engine.assembly import Assembly, HostBudget, StepParts, open_tracer
from ds_vertical.engine.checkpoint import shared_dir
from ds_vertical.engine.checkpoint.run_state import FurtherState
from ds_vertical.engine.integrations.engine_calls import CallableEngine
from ds_vertical.engine.integrations.three_calls import ThreeCalls
from ds_vertical.engine.module_hooks import load_identity_node
from ds_vertical.engine.progress import Progress
from ds_vertical.engine.run_log import network_of
from ds_vertical.engine.self_check.first_step import FirstStepCheck
from ds_vertical.engine.signals import Stopping
from ds_vertical.engine.zero3.chunks import check_optimizer
from ds_vertical.engine.zero3.optimizer import VerticalStage3
from ds_vertical.io.runs.this_host import host_id, host_names
from ds_vertical.model.batch import LossFn
from ds_vertical.model.compiled_blocks import refuse_engine_compile
from ds_vertical.model.layers import LayerMap
from ds_vertical.model.thread_state import HostPart, HostState, autocast_device_types, capture_host_by
from ds_vertical.offload.param_store import ParamStore
from ds_vertical.planner.run_record import KeptRecord
from ds_vertical.schedule.events import Schedule
from ds_vertical.types import RunSettings


class VerticalEngine(CallableEngine):
    """DeepSpeed's engine with layer-major training: `train_batch`, `eval_batch`, and forward in evaluation mode.

    `vertical`: the resolved section. `folder`: of the run, on SSD; None: it has none. `budget`: what the memory check allows.
    `elastic`: how many micro-batches each rank brings; None: all bring as many. `begun` gets the engine first of all: where its
    construction fails, `destroy` gives back what it has.
    """

    optimizer: VerticalStage3
    module: nn.Module

    def __init__(
        self,
        *args: Any,
        vertical: RunSettings,
        layers: LayerMap,
        folder: Path | None,
        budget: HostBudget,
        elastic: ElasticCounts | None = None,
        begun: Callable[[VerticalEngine], None] = lambda _: None,
        **kwargs: Any,
    ) -> None:
        begun(self)
        self.vertical, self.layers, self.host_bytes, self._steps = vertical, layers, budget.needed, steps_of(vertical)
        self.tracer = open_tracer(vertical.trace)
        super().__init__(*args, **kwargs)
        self._build(folder, budget, elastic)

    def _build(self, folder: Path | None, budget: HostBudget, elastic: ElasticCounts | None) -> None:
        """Make what a step works with. One by one: `destroy` closes the parts that there are, where the next one fails."""
        vertical, layers = self.vertical, self.layers
        progress = self._meter(folder, elastic)
        made_of = self.module, self.optimizer, vertical, layers, self.tracer, engine.aio_config(self)
        assembly = Assembly(*made_of, self._steps, elastic, budget.fewer)
        with interrupts.deferred(firmly=True):  # nothing is locked or started that `destroy` would not find
            assembly.give_memory_back()
            self._params = assembly.open_params()
            assembly.start_pipeline(self._params, budget.is_short)
            self._gradients = assembly.open_gradients(budget)
            self._activations = assembly.open_activations(folder, budget.left)
            self._keeping = assembly.open_keeping(budget.planner, folder, budget.left, self._activations)
        if vertical.on_signal is not None:
            shared_dir.check_at_start(Path(vertical.on_signal.save_dir), self.use_node_local_storage())
        self._stopping = Stopping(vertical.on_signal, self.optimizer.timing)
        self._stopping.listen()
        self._state = assembly.watch_state()
        self._runner = assembly.new_runner(self._params, self._activations, self._stopping, self._state, budget.left)
        made = self._params, self._gradients, self._activations, self._keeping, self._state, self._runner
        parts = StepParts(self, vertical, layers, self.optimizer, *made, folder, budget)
        self.self_check = FirstStepCheck(parts)
        self._loop = self._steps.new_loop(parts, self.self_check, self.tracer, progress)
        self._loop.elastic = elastic
        if elastic is not None:
            elastic.count_engine()
        calls = self.optimizer.calls
        self._three_calls = three = ThreeCalls(
            self._loop, calls, self.self_check, has_heard=lambda: self._stopping.has_heard, snake=vertical.snake
        )
        calls.restore, calls.tear, calls.admit = three.restore, self.optimizer.condition.tear, three.admit
        hosts = ranks.all_gathered(host_id())
        copies = self._params.copies
        shared = copies is not None and copies.shares_memory, self.optimizer.shares_memory
        self.network, self.host_names = network_of(vertical.levels, hosts, *shared), host_names(hosts)
        accelerator.log(f"ds_vertical: {assembly.describe(self._params)}")

    def _meter(self, folder: Path | None, elastic: ElasticCounts | None) -> Progress:
        """Let what traces the events measure the run's progress, too, and how long a rank computes."""
        progress = Progress(self, self.vertical.progress, folder)
        self.tracer = progress.metered(self.tracer)
        if elastic is not None:
            self.tracer = elastic.metered(self.tracer)
        return progress

    def _configure_zero_optimizer(self, optimizer: object) -> Any:  # override
        check_optimizer(optimizer)
        load_identity_node()  # a compile belongs ahead of the steps
        _load_state_reader()
        with engine.substituted_stage3(partial(VerticalStage3, layers=self.layers, vertical=self.vertical)):
            return super()._configure_zero_optimizer(optimizer)

    # ---- training and evaluation

    def train_batch(self, data_iter: Iterable[object] | None = None, loss_fn: LossFn | None = None) -> torch.Tensor:
        """One optimizer step over up to `gradient_accumulation_steps` micro-batches.

        `data_iter` yields micro-batches: dict (keyword arguments of the model), tuple (positional) or tensor; None takes
        the engine's own dataloader. `loss_fn(outputs, batch)` defaults to the model's own loss. With 0 < m < M
        micro-batches left, the mean is over m. Returns the mean loss, a 0-d fp32 tensor.

        Raises StopIteration, with nothing touched, when no micro-batch is left.
        """
        with self._stopping.obeyed(self), self.optimizer.calls.call("train_batch"), ranks.collective_section("train_batch"):
            return self._loop.train_batch(data_iter, loss_fn)

    def eval_batch(self, data_iter: Iterable[object], loss_fn: LossFn | None = None) -> torch.Tensor:
        """Mean loss over up to `gradient_accumulation_steps` micro-batches, in evaluation mode, without gradients.

        Raises StopIteration when no micro-batch is left.
        """
        with self._stopping.obeyed(self), self.optimizer.calls.call("eval_batch"), ranks.collective_section("eval_batch"):
            return self._loop.eval_batch(data_iter, loss_fn)

    def compile(self, *_: object, **__: object) -> NoReturn:  # override
        """Raises ConfigError: blocks are compiled one by one, ahead of `initialize`."""
        refuse_engine_compile()

    @property
    def ran(self) -> Schedule | None:
        """The schedule of the last step, or of the one that failed; None ahead of the first one."""
        return self._loop.ran

    @property
    def kept(self) -> KeptRecord | None:
        """What the forwards of the last step have kept for their backwards; None: nothing."""
        return self._keeping.record

    # ---- between steps

    def flush(self) -> None:
        """Take the optimizer steps that the last `train_batch` left to the next forward. Whatever reads the weights
        through DeepSpeed does this by itself; calling it twice is harmless. Raises RuntimeError within another call."""
        with self.optimizer.calls.call("flush"):
            self.optimizer.flush()

    def destroy(self) -> None:
        """As DeepSpeed's, and give the host buffers back. Signals wait until it is over. Calling it twice is harmless."""
        if (calls := getattr(getattr(self, "optimizer", None), "calls", None)) is not None:
            calls.check_process("destroy")
        if (stopping := getattr(self, "_stopping", None)) is not None:
            stopping.close()  # first: what it puts back is what waits for signals then
        params = getattr(self, "_params", None)  # absent where the engine's construction failed
        stores = [getattr(self, name, None) for name in ("_activations", "_keeping")]
        with interrupts.deferred(firmly=True), contextlib.ExitStack() as cleanup:
            # each is called, the last one first, whatever another one raises
            if params is None:
                cleanup.callback(super().destroy)
            else:
                cleanup.callback(_close_behind, self.optimizer, super().destroy, params.close, self._steps.close)
                cleanup.callback(self.optimizer.close)
            for store in stores:
                if store is not None:
                    cleanup.callback(store.close)
            if (three_calls := getattr(self, "_three_calls", None)) is not None:
                cleanup.callback(three_calls.close)

    @property
    def param_store(self) -> ParamStore:
        """Where this rank's parameters rest between their uses, and their host buffers."""
        return self._params

    @property
    def further_state(self) -> Mapping[str, FurtherState]:
        """What checkpoints have besides, by its name there."""
        return self._steps.further

    @property
    def stream_seed(self) -> int | None:
        """Base of the micro-batches' random streams; None where the caller's own stream is used."""
        return self._loop.seed

    @stream_seed.setter
    def stream_seed(self, seed: int | None) -> None:
        """Set the base, as a checkpoint that was loaded has it."""
        self._loop.seed = seed


def _load_state_reader() -> None:
    """Let the compiled op capture what torch keeps per thread on the host, or Python where that cannot be had."""
    capture_host_by(_capture_by(load.state_reader(), autocast_device_types()))


@functools.cache
def _capture_by(
    reader: Callable[[Sequence[torch.device]], load.StateReader] | None, kinds: tuple[str, ...]
) -> Callable[[], HostPart]:
    """One object for all engines of a process."""
    return HostState.capture if reader is None else reader([torch.device(kind) for kind in kinds]).capture


def _close_behind(optimizer: VerticalStage3, *closing: Callable[[], None]) -> None:
    """Close what an optimizer's last steps go through, the last one first, once it owes none: where an interrupt has cut its
    `close`, the next `destroy` takes these steps, and then closes this."""
    if optimizer.is_owing:
        return
    with contextlib.ExitStack() as cleanup:
        for each in closing:
            cleanup.callback(each)
