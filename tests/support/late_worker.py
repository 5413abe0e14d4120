"""Training on the late device. Run by tests/parity/test_late_training.py, in a process of their own, and by
tests/distributed/test_late_ranks.py in one for each rank:

    python tests/support/late_worker.py FOLDER late|cpu NAME...

Leaves by case what it has computed, and found, in FOLDER/NAME.pt, or FOLDER/NAME.RANK.pt: an `Outcome`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

# run as a script, so this folder is first on the path
import harness
import pytest
import torch
from late_models import (
    BESIDE,
    FAILS_BACKWARD,
    FAILS_FORWARD,
    NUM_LAYERS,
    READS_ALONE,
    WIDTH,
    Failure,
    LookingBlock,
    build_buffered,
    build_compiled,
    build_model,
)
from models import tiny_neox, token_batches
from torch import nn

NUM_MICRO_BATCHES = 3
SHORTEST = 5  # tokens of the first micro-batch of a step
BUFFERED = "fp32, buffers in and around the layers"
COMPILED = "fp32, compiled blocks"
DEEPER = "fp32, clipped, twice the layers"
REDONE = "bf16, early steps that are redone, activations in host memory"
ON_SSD = "fp32, late steps, kept values and gradients on SSD"
IN_MEMORY = "fp32, all in host memory, small ones persistent, generates"
RESUMED = "bf16, half of the state in host memory, asked to stop, resumed in a new engine"
KEPT_ON_SSD = {"activations": {"keep": "products", "keep_device": "ssd"}}


def use_engine(engine: Any, batches: harness.Batches, folder: Path) -> list[float]:
    """An evaluation, steps that fail in the forward and in the backward, a checkpoint, a step, and the checkpoint again."""
    losses = [engine.eval_batch(iter(batches[0]))]
    for longest in (FAILS_FORWARD, FAILS_BACKWARD):
        [failing] = token_batches(1, NUM_MICRO_BATCHES, rows=1, shortest=longest - NUM_MICRO_BATCHES + 1)
        with pytest.raises(Failure):
            engine.train_batch(iter(failing))
    engine.save_checkpoint(str(folder / "saved"))
    losses.append(engine.train_batch(iter(batches[1])))
    losses.append(engine.eval_batch(iter(batches[0])))
    engine.load_checkpoint(str(folder / "saved"))
    losses.append(engine.eval_batch(iter(batches[0])))
    return [loss.item() for loss in losses]


def fail_alone(engine: Any, batches: harness.Batches, _: Path) -> list[float]:
    """A step whose forward fails on rank 0, which goes with the others to where they all raise; and a step."""
    from ds_vertical.errors import OtherRankError

    step: Any = batches[0]
    error: type[Exception] = OtherRankError
    if os.environ.get("RANK", "0") == "0":
        [step] = token_batches(1, NUM_MICRO_BATCHES, rows=1, shortest=FAILS_FORWARD - NUM_MICRO_BATCHES + 1)
        error = Failure
    with pytest.raises(error):
        engine.train_batch(iter(step))
    return [engine.train_batch(iter(batches[1])).item()]


def ask_to_stop(engine: Any, batches: harness.Batches, folder: Path) -> list[float]:
    """A step in which the process gets a signal: it is left behind the layer that computes, and a checkpoint is saved."""

    def signalling(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return outputs

    with pytest.raises(SystemExit) as ended:
        engine.train_batch(iter(batches[0]), signalling)
    return [float(str(ended.value.code)), engine.global_steps, len(list((folder / "saved").glob("global_step*")))]


def generate(engine: Any, batches: harness.Batches, _: Path) -> list[float]:
    """A prompt's next tokens."""
    prompt = batches[0][0]["input_ids"][:1, :5].to(engine.device)
    engine.module.eval()
    found = engine.module.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False, pad_token_id=0
    )
    engine.module.train()
    return found.flatten().tolist()


def has_state_in_memory(engine: Any, *_: Any) -> list[float]:
    """Null has put all of it there beside the device, whose host memory nothing else needs, and nothing on the CPU."""
    beside = engine.device.type != "cpu"
    assert engine.vertical.optimizer_host_share == float(beside), engine.vertical.reasons["optimizer_host_share"]
    return []


def begin_to_write(*_: Any) -> list[float]:
    """From now on each forward changes a buffer that it has only read so far."""
    READS_ALONE[:] = [0]
    return []


def begin_to_write_behind_the_first(*_: Any) -> list[float]:
    """As `begin_to_write`, but for each step's first micro-batch: nobody has to try what a forward resets then, which a loop of
    the three calls could not bear in the middle of a step."""
    READS_ALONE[:] = [SHORTEST]
    return []


def by_train_batch(engine: Any, batches: harness.Batches) -> Iterator[torch.Tensor]:
    """The loss of each step."""
    for batch in batches:
        yield engine.train_batch(iter(batch))


def by_three_calls(engine: Any, batches: harness.Batches) -> Iterator[torch.Tensor]:
    """The mean of each step's losses."""
    import ds_vertical

    losses = []
    for batch in ds_vertical.look_ahead([batch for step in batches for batch in step]):
        loss = engine(**{key: each.to(engine.device) for key, each in batch.items()})
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        if len(losses) % NUM_MICRO_BATCHES == 0:
            yield torch.stack(losses[-NUM_MICRO_BATCHES:]).mean()


def nothing_between(*_: Any) -> list[float]:
    """No calls between the steps."""
    return []


@dataclass(frozen=True)
class Case:
    """`options`: of `harness.base_config`. `fast`: whether the fast suite has it. `between`: called after the first step with
    the engine, batches for it and a folder; gives losses to compare. `listens`: whether the JSON has `on_signal`. `steps`: the
    loop, which gives a loss for each step. `zero`: further keys of zero_optimization. `records`: whether gradients are kept,
    each copied to the host at once. `resumes`: whether a new engine loads a checkpoint at the end, and takes a step."""

    options: dict[str, Any]
    num_steps: int = 2
    fast: bool = False
    between: Callable[[Any, harness.Batches, Path], list[float]] = nothing_between
    listens: bool = False
    build: Callable[[], nn.Module] = build_model
    steps: Callable[[Any, harness.Batches], Iterator[torch.Tensor]] = by_train_batch
    zero: Mapping[str, object] = field(default_factory=dict)
    records: bool = False
    resumes: bool = False


def _case(dtype: str, clip: float, section: dict[str, Any] | None = None, **options: Any) -> Case:
    return Case({"dtype": dtype, "clip": clip, "section": section} | options)


IN_HOST = _case("fp32", 0.0, params="cpu", optimizer="cpu")
WRITTEN_LATER = replace(_case("fp32", 1.0), num_steps=3, fast=True, between=begin_to_write, build=build_buffered)
CASES = {
    "bf16, clipped": replace(_case("bf16", 1.0), fast=True),
    "fp32, clipped": replace(_case("fp32", 1.0), fast=True),
    BUFFERED: replace(_case("fp32", 1.0), fast=True, build=build_buffered),
    "fp32, a buffer that is written from the second step on": replace(WRITTEN_LATER, fast=False),
    "fp32, a buffer that is written from the second step on, by the three calls": replace(
        WRITTEN_LATER, steps=by_three_calls, between=begin_to_write_behind_the_first
    ),
    "bf16, with other calls between the steps": replace(_case("bf16", 1.0), fast=True, between=use_engine),
    "fp32, all in host memory, with other calls": replace(
        _case("fp32", 0.0, params="cpu", optimizer="cpu"), between=use_engine
    ),
    "fp32, half of each layer late": _case("fp32", 0.0, {"optimizer_delay": 0.5}),
    "bf16, all late": _case("bf16", 1.0, {"optimizer_delay": 1.0}),
    "bf16, early steps that are redone": _case("bf16", 0.05, {"optimizer_speculation": True, "optimizer_delay": 0.3}),
    "bf16, early steps that count": _case("bf16", 1e6, {"optimizer_speculation": True, "optimizer_delay": 0.3}),
    "bf16, activations in host memory": _case("bf16", 0.0, {"activations": {"device": "host"}}),
    "bf16, activations on SSD": _case("bf16", 0.0, {"activations": {"device": "ssd"}}),
    "bf16, kept in host memory": _case("bf16", 0.0, {"activations": {"keep": "everything", "keep_device": "host"}}),
    "bf16, kept on SSD": _case("bf16", 0.0, {"activations": {"keep": "products", "keep_device": "ssd"}}),
    "fp32, gradients on SSD": _case("fp32", 0.0, {"optimizer_delay": 1.0, "gradient_host_share": 0.0}),
    "fp32, state where host memory has room": replace(
        _case("fp32", 0.0, {"host_memory_bytes": 8 << 30, "optimizer_delay": 0.5}), between=has_state_in_memory
    ),
    "fp32, half of the state in host memory": _case("fp32", 0.0, {"optimizer_host_share": 0.5, "optimizer_delay": 0.5}),
    "fp32, parameters in host memory": _case("fp32", 1.0, params="cpu"),
    "bf16, all in host memory": _case("bf16", 1.0, params="cpu", optimizer="cpu"),
    "bf16, parameters on the device": _case("bf16", 1.0, params="none", optimizer="cpu"),
    "fp32, small ones persistent": _case("fp32", 1.0, persistence=None),
    "bf16, nothing beside anything": _case("bf16", 1.0, {"overlap": False}),
    "fp32, no layer ahead": _case("fp32", 1.0, {"prefetch_layers": 0}),
    "bf16, asked to stop": replace(_case("bf16", 1.0), num_steps=1, between=ask_to_stop, listens=True),
    "fp32, generates": replace(_case("fp32", 1.0), between=generate, build=partial(tiny_neox, NUM_LAYERS, 256, dropout=0.1)),
    COMPILED: replace(_case("fp32", 1.0), build=build_compiled),
    DEEPER: replace(_case("fp32", 1.0), fast=True, build=partial(build_model, 2 * NUM_LAYERS)),
    REDONE: replace(
        _case("bf16", 0.05, {"optimizer_speculation": True, "optimizer_delay": 0.3, "activations": {"device": "host"}}),
        fast=True,
    ),
    ON_SSD: replace(_case("fp32", 0.0, KEPT_ON_SSD | {"optimizer_delay": 1.0, "gradient_host_share": 0.0}), fast=True),
    IN_MEMORY: replace(
        _case("fp32", 1.0, params="cpu", optimizer="cpu", persistence=None),
        fast=True,
        between=generate,
        build=partial(tiny_neox, NUM_LAYERS, 256, dropout=0.1),
    ),
    RESUMED: replace(
        _case("bf16", 1.0, {"optimizer_host_share": 0.5}),
        num_steps=1,
        fast=True,
        between=ask_to_stop,
        listens=True,
        resumes=True,
    ),
}
LISTENING = "bf16, listening for signals"
FLAT = "fp32, one level"
LEVELS = "fp32, levels"
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


def _levels(
    dtype: str, clip: float, section: dict[str, Any] | None = None, zero: Mapping[str, object] | None = None, **options: Any
) -> Case:
    """Two ranks share a copy."""
    return replace(_case(dtype, clip, section, **options), zero={"zero_hpz_partition_size": 2, **(zero or {})})


COPIES_IN_A_NODE = "fp32, levels, a node of two copies"
NODES = {"levels": {"gradients": 4}}  # of which two ranks each share a copy
STANDING = {"levels": {"copy_on_device": True}, "optimizer_delay": 0}
ON_LEVELS = {
    LEVELS: _levels("fp32", 1.0),
    "bf16, levels, gradients noted": replace(_levels("bf16", 0.0), records=True),
    "bf16, levels, half of the copies": _levels("bf16", 1.0, {"levels": {"copy_share": 0.5}}),
    "bf16, levels, no copies, other calls": replace(_levels("bf16", 1.0, {"levels": {"copy_share": 0}}), between=use_engine),
    "fp32, levels, with other calls": replace(_levels("fp32", 1.0), between=use_engine),
    "bf16, levels, INT8 and INT4": _levels("bf16", 1.0, zero=QUANTIZED),
    "fp32, levels, INT8 everywhere": _levels("fp32", 1.0, {"levels": {"gradient_bits": [8, 8]}}, QUANTIZED),
    "fp32, levels, copies on the device": replace(_levels("fp32", 0.0, STANDING), num_steps=3),
    "bf16, levels, copies on the device, other calls": replace(
        _levels("bf16", 1.0, STANDING, params="cpu", optimizer="cpu"), num_steps=3, between=use_engine
    ),
    "bf16, levels, copies on the device, INT8": replace(
        _levels("bf16", 1.0, STANDING, {"zero_quantized_weights": True}), num_steps=3
    ),
    "fp32, levels, small ones persistent": _levels("fp32", 1.0, persistence=None),
    "bf16, levels, parameters on the device": _levels("bf16", 1.0, params="none", optimizer="cpu"),
    "bf16, levels, late steps": _levels("bf16", 0.0, {"optimizer_delay": 0.5}),
    "bf16, levels, nothing beside anything": _levels("bf16", 1.0, {"overlap": False}),
    COPIES_IN_A_NODE: _levels("fp32", 1.0, NODES),
    "bf16, levels, a node of two copies, INT8 everywhere": _levels(
        "bf16", 1.0, {"levels": {"gradients": 4, "gradient_bits": [8, 8]}}, QUANTIZED
    ),
    "fp32, levels, rank 0 fails alone": replace(_levels("fp32", 1.0), between=fail_alone),
}
STANDS = [name for name in ON_LEVELS if "copies on the device" in name]
_LOOKING = partial(build_model, block_class=LookingBlock)
ONE_LEVEL = {
    "bf16, one level, with other calls": replace(_case("bf16", 1.0), between=use_engine),
    "fp32, one level, rank 0 fails alone": replace(_case("fp32", 1.0), between=fail_alone),
    "bf16, one level, two layers ahead": replace(_case("bf16", 0.0, {"prefetch_layers": 2}), records=True),
    "bf16, one level, no layer ahead": _case("bf16", 1.0, {"prefetch_layers": 0}),
    "bf16, one level, late steps": _case("bf16", 0.0, {"optimizer_delay": 0.5}),
    "bf16, one level, parameters on the device": _case("bf16", 1.0, params="none", optimizer="cpu"),
    "bf16, one level, nothing beside anything": _case("bf16", 1.0, {"overlap": False}),
}
ON_RANKS = {
    LISTENING: replace(_case("bf16", 1.0), listens=True, build=_LOOKING),
    FLAT: _case("fp32", 1.0),
    **ONE_LEVEL,
    **ON_LEVELS,
}


@dataclass(frozen=True)
class Fetched:
    """Of a unit that is about to be used: whether its copies to the device were issued before, and are not complete yet."""

    is_issued: bool
    is_under_way: bool


@dataclass
class Outcome:
    """What training has given; on the late device also the host's waits of each step, what was wrong, bytes of host memory
    that are still registered with the device once the engine is gone; bytes of the device that the budget has for the training,
    and that it has taken at most. `lanes`: the threads that issue collectives over levels; `hops`: the levels over which they
    go. `leads`: what a rank that fails is told of whether the others' gathers lead. `beside`: of the last step, for each
    backward of a LookingBlock and a micro-batch, the collectives that are under way when it begins. `fetches`: of the last
    step."""

    run: harness.Run | None = None
    waits: list[Counter[Any]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    registered: int = -1
    budget: int = -1
    peak: int = -1
    lanes: list[str] = field(default_factory=list)
    hops: list[str] = field(default_factory=list)
    leads: bool = False
    beside: list[tuple[int, list[str]]] = field(default_factory=list)
    fetches: list[Fetched] = field(default_factory=list)
    error: str | None = None


Watch = Callable[[], AbstractContextManager[Any]]


@contextmanager
def noting_fetches() -> Iterator[list[Fetched]]:
    """Has the block's fetches, each as it stood when its unit was about to be used."""
    from ds_vertical.distributed.gather_queue import GatherQueue, UnitGather
    from ds_vertical.io.streams import IssuedCopies

    complete, found = GatherQueue.complete, list[Fetched]()

    def note(queue: GatherQueue, gather: UnitGather) -> None:
        copies = getattr(gather.wait, "__self__", None)
        copied = copies.copied if isinstance(copies, IssuedCopies) else None
        found.append(Fetched(gather.wait is not None, copied is not None and not copied.query()))
        complete(queue, gather)

    GatherQueue.complete = note
    try:
        yield found
    finally:
        GatherQueue.complete = complete


def device_budget(engine: Any, model: nn.Module, config: dict[str, Any]) -> int:
    """Bytes of the device that `initialize` has found to be needed, activations not counted."""
    from ds_vertical.engine.memory_check import Forecast, groups_of
    from ds_vertical.planner.memory_budget import budget, total_bytes
    from ds_vertical.types import Tier

    forecast = Forecast(engine.layers, groups_of(model, None, None), config, engine.vertical)
    return total_bytes(budget(forecast.shape, forecast.terms, forecast.further(0)), Tier.DEVICE)


def train(
    case: Case,
    folder: Path,
    watch: Watch = nullcontext,
    look: Callable[[Any, nn.Module, Any], None] = lambda *_: None,
    *,
    vertical: bool = True,
) -> harness.Run:
    """All that `harness.Run` has, gradients where the case records them: reading them waits. Each step is within `watch`;
    `look` has the engine, its model and its JSON at the end of the last one."""
    config = harness.base_config(folder, num_micro_batches=NUM_MICRO_BATCHES, **case.options)
    config["zero_optimization"] |= case.zero
    if case.options.get("params", "nvme") == "nvme":
        harness.small_buffers(config, WIDTH * WIDTH)
    if case.listens:
        config["vertical_schedule"]["on_signal"] = {"save_dir": str(folder / "saved")}
    engine, model = harness.build_engine(config, case.build, vertical=vertical, recording=case.records)
    run = harness.Run()
    losses, others = [], []
    rank = int(os.environ.get("RANK", "0"))
    batches = token_batches(case.num_steps + 2, NUM_MICRO_BATCHES, 1 + rank, rows=1, shortest=SHORTEST)
    try:
        steps = case.steps(engine, batches[: case.num_steps])
        for step in range(case.num_steps):
            with watch():
                losses.append(next(steps))
            run.norms.append(float(engine.get_global_grad_norm()))
            if case.records:
                run.grads.append(harness.read_grads(engine, model))
            if step == 0:
                others = case.between(engine, batches[-2:], folder)
        assert next(steps, None) is None
        look(engine, model, config)
        if case.resumes:
            engine, model = build_anew(engine, case, config, folder)
            with watch():
                losses.append(engine.train_batch(iter(batches[-1])))
        run.losses = [loss.item() for loss in losses] + others
        run.weights, run.state = harness.read_weights(model), harness.read_state(engine, model)
        if torch.distributed.get_world_size() > 1:
            run.state = harness.own_shares(run.state, run.weights, rank)
            run.grads = [harness.own_shares(grads, run.weights, rank) for grads in run.grads]
    finally:
        harness.dispose(engine)
    return run


def build_anew(engine: Any, case: Case, config: dict[str, Any], folder: Path) -> tuple[Any, nn.Module]:
    """A new engine and its model, from the checkpoint that a signal had the old one save, or that it saves now."""
    saved = folder / "saved"
    if not saved.exists():
        engine.save_checkpoint(str(saved))
    harness.dispose(engine)
    engine, model = harness.build_engine(config, case.build, vertical=True, recording=case.records)
    engine.load_checkpoint(str(saved))
    return engine, model


def lanes() -> list[str]:
    """The threads on which collectives over levels wait for each other, by their names."""
    return [each.name for each in threading.enumerate() if each.name.startswith(("ds_vertical weights", "ds_vertical grad"))]


def hops(engine: Any) -> list[str]:
    """The levels of several ranks, by their names. Collective."""
    from ds_vertical.distributed.topology import Level
    from ds_vertical.distributed.unit_levels import topology_for

    topology = topology_for(engine.vertical.levels) if engine.vertical.levels.are_on else None
    return [] if topology is None else [level.value for level in Level if topology.width(level) > 1]


def outcome(case: Case, folder: Path) -> Outcome:
    import late_accelerator
    import late_device

    found = Outcome()

    @contextmanager
    def watch() -> Iterator[None]:
        BESIDE.clear()
        late_accelerator.LateGroup.works.clear()
        torch.accelerator.reset_peak_memory_stats()
        with noting_fetches() as found.fetches, late_device.waits() as waits:
            yield
        found.waits.append(waits)
        found.beside = list(BESIDE)
        found.peak = max(found.peak, torch.accelerator.memory_stats()["active_bytes.all.peak"] - before)

    def look(engine: Any, model: nn.Module, config: dict[str, Any]) -> None:
        found.budget, found.lanes, found.hops = device_budget(engine, model, config), lanes(), hops(engine)
        found.leads = engine._runner.others is not None and engine._runner.others.gathers_lead

    before = torch.accelerator.memory_stats()["active_bytes.all.current"]
    try:
        found.run = train(case, folder, watch, look)
    except Exception:
        found.error = traceback.format_exc()
    gc.collect()
    found.registered = late_device.library().page_locked_bytes()[0]
    found.violations = late_device.library().take_violations()
    return found


def main(folder: str, device: str, *names: str) -> int:
    if device == "late":
        import late_accelerator

        late_accelerator.use()
    num_ranks, rank = (int(os.environ.get(name, least)) for name, least in (("WORLD_SIZE", 1), ("RANK", 0)))
    for index, name in enumerate(names):
        place, case = Path(folder, f"{device}{index}"), (CASES | ON_RANKS)[name]
        place.mkdir(exist_ok=True)
        found = outcome(case, place) if device == "late" else Outcome(train(case, place), lanes=lanes())
        torch.save(found, Path(folder, f"{name}.pt" if num_ranks == 1 else f"{name}.{device}{rank}.pt"))
    return 0


if __name__ == "__main__":
    import late_worker  # what is pickled is of a module that the test imports, too

    sys.exit(late_worker.main(*sys.argv[1:]))
