"""Every route to the weights, gradients and optimizer state sees the last step, although part of it was left to the next
forward; and training goes on as if nobody had looked, or from what was written.

Stock (state in host memory, where it is right) and the vertical arm train side by side; every route is taken on both. What
the vertical arm issues ahead of the next step is in flight then: no part of a step is computed before somebody waits for
it, and parameters are read as soon as they may be, so that a copy which a write makes old is old; or, in two regimes, no
sooner than somebody waits for them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import utils as fragments
from harness import (
    MIN_SSD_BYTES,
    build_engine,
    bytes_on_ssd,
    contents,
    differing,
    dispose,
    read_grads,
    read_state,
    read_weights,
    running,
    small_buffers,
)
from late import LateReads, LateSteps, SoonReads
from models import tiny_gpt2, token_batches
from places import SUPPORT
from regimes import ALL_EARLY, DELAYED, EARLY, HOST, LATE, NUM_MICRO_BATCHES, REGIMES, build_model, config_in
from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors = dict[str, torch.Tensor]
Route = Callable[[Any, Any, Path], Tensors]


FROZEN = "blocks.1.down.weight"  # where all is delayed: read ahead beside the new values of its layer


def build_frozen() -> nn.Module:
    model = build_model()
    model.get_parameter(FROZEN).requires_grad_(False)
    return model


class Pair:
    """Both arms after the same steps. `sound`: whether they can be used by another test."""

    def __init__(self, folder: Path, regime: str) -> None:
        options = REGIMES[regime]
        build = build_frozen if regime in (DELAYED, LATE) else build_model
        self.batches = iter(token_batches(200, NUM_MICRO_BATCHES))
        self.sound = True
        self.leaves_steps = options["section"]["optimizer_delay"] > 0
        self.arms: dict[bool, tuple[Any, Any]] = {}
        stock = options | {"params": "cpu", "optimizer": "cpu"}
        for vertical, chosen in ((False, stock), (True, options)):
            self.arms[vertical] = build_engine(config_in(folder, **chosen), build, vertical=vertical)
        self.late = LateSteps(self.vertical)
        self.reads = None
        if options.get("params", "nvme") == "nvme":
            self.reads = (LateReads if regime in (EARLY, LATE) else SoonReads).of(self.vertical)

    def step(self) -> None:
        """One step of both; afterwards the vertical arm has issued what it could for its next forward."""
        batch = next(self.batches)
        losses = {vertical: engine.train_batch(iter(batch)).item() for vertical, (engine, _) in self.arms.items()}
        assert losses[False] == losses[True]
        backlog = self.vertical.optimizer.driver.backlog
        if self.leaves_steps:
            assert backlog.pending == ("pre", 0, 1, 2) and backlog.due == (2,), "nothing is left to do"
            assert self.late.num_left, "nothing is in flight"
            assert self.reads is None or self.reads.left or self.reads.done, "nothing is read ahead"
        else:
            assert list(self.vertical._params.ahead) == [0] and not backlog.pending

    @property
    def vertical(self) -> Any:
        return self.arms[True][0]

    def take(self, route: Route, folder: Path) -> dict[bool, Tensors]:
        taken = {}
        for vertical, (engine, model) in self.arms.items():
            (folder / str(vertical)).mkdir()
            taken[vertical] = route(engine, model, folder / str(vertical))
        return taken

    def assert_equal(self) -> None:
        states = [contents(engine, model) for engine, model in self.arms.values()]
        assert not differing(*states)

    def close(self) -> None:
        for engine, _ in self.arms.values():
            dispose(engine)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    """The pair of a regime; a new one where a test failed on the last."""
    made: dict[str, Pair] = {}

    def give(regime: str) -> Pair:
        for other in [name for name, pair in made.items() if name != regime or not pair.sound]:
            made.pop(other).close()
        if regime not in made:
            made[regime] = Pair(tmp_path_factory.mktemp("pair"), regime)
            made[regime].step()
        return made[regime]

    yield give
    for pair in made.values():
        pair.close()


# ---- routes that read


def token_ids() -> torch.Tensor:
    return token_batches(1, 1, seed=9)[0][0]["input_ids"]


def eval_batch(engine: Any, model: Any, folder: Path) -> Tensors:
    return {"loss": engine.eval_batch(iter(token_batches(1, NUM_MICRO_BATCHES, seed=7)[0])).view(1)}


def called(call: Callable[..., torch.Tensor], model: Any) -> Tensors:
    model.eval()
    with torch.no_grad():
        logits = call(input_ids=token_ids()).clone()
    model.train()
    return {"logits": logits}


def engine_call(engine: Any, model: Any, folder: Path) -> Tensors:
    return called(engine, model)


def module_call(engine: Any, model: Any, folder: Path) -> Tensors:
    return called(model, model)


def save_weights(engine: Any, model: Any, folder: Path) -> Tensors:
    assert engine.save_16bit_model(str(folder), "weights.bin")
    return torch.load(folder / "weights.bin")


def gathered(engine: Any, model: Any, folder: Path) -> Tensors:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def bare_state_dict(engine: Any, model: Any, folder: Path) -> Tensors:
    """Without gathering: what stays on the device."""
    return {name: value.clone() for name, value in model.state_dict().items() if value.numel()}


def state_dict(engine: Any, model: Any, folder: Path) -> Tensors:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: value.clone() for name, value in model.state_dict().items()}


def each(model: Any, read: Callable[..., torch.Tensor | None], *args: Any) -> Tensors:
    """What a call gives of every parameter that the optimizer has."""
    found = {name: read(param, *args) for name, param in model.named_parameters()}
    assert {name for name, value in found.items() if value is None} <= {FROZEN}
    return {name: value.clone().flatten() for name, value in found.items() if value is not None}


def full_master(engine: Any, model: Any, folder: Path) -> Tensors:
    return each(model, fragments.safe_get_full_fp32_param)


def local_master(engine: Any, model: Any, folder: Path) -> Tensors:
    return each(model, fragments.safe_get_local_fp32_param)


def moments(read: Callable[..., torch.Tensor], model: Any) -> Tensors:
    return {f"{name}/{kind}": value for kind in MOMENTS for name, value in each(model, read, kind).items()}


def full_moments(engine: Any, model: Any, folder: Path) -> Tensors:
    return moments(fragments.safe_get_full_optimizer_state, model)


def local_moments(engine: Any, model: Any, folder: Path) -> Tensors:
    return moments(fragments.safe_get_local_optimizer_state, model)


def gradient(read: Callable[..., torch.Tensor], engine: Any, model: Any, folder: Path) -> Tensors:
    """Stock forgets its gradients in its step, but for the share that the harness finds."""
    return each(model, read) if type(engine).__name__ == "VerticalEngine" else read_grads(engine, model)


full_gradient = partial(gradient, fragments.safe_get_full_grad)
local_gradient = partial(gradient, fragments.safe_get_local_grad)


def optimizer_state_dict(engine: Any, model: Any, folder: Path) -> Tensors:
    names = {param.ds_id: name for name, param in model.named_parameters()}
    found: Tensors = {}
    for params, flat in zip(engine.optimizer.fp16_groups, engine.optimizer.state_dict()["fp32_flat_groups"], strict=True):
        sizes = [param.partition_numel() for param in params]
        found |= {names[p.ds_id]: part.clone() for p, part in zip(params, flat.split(sizes), strict=True)}
    return found


def checkpoint(engine: Any, model: Any, folder: Path) -> Tensors:
    engine.save_checkpoint(str(folder))
    weights = read_weights(model)
    path, _ = engine.load_checkpoint(str(folder))
    assert path is not None
    assert not differing(weights, read_weights(model))
    return weights | read_state(engine, model)


READS: list[Route] = [
    eval_batch,
    engine_call,
    module_call,
    save_weights,
    gathered,
    state_dict,
    full_master,
    local_master,
    full_moments,
    local_moments,
    full_gradient,
    local_gradient,
]
IN_HOST_MEMORY: list[Route] = [optimizer_state_dict, checkpoint]


def name_of(route: Any) -> str:
    if isinstance(route, partial):
        return route.args[0].__name__
    return getattr(route, "__name__", str(route))


def cases(routes: list[Route], fast: list[Route]) -> list[Any]:
    """Every route in every regime; where slow tests are left out, the `fast` ones where half is early."""
    everything = [(regime, route) for regime in REGIMES for route in routes]
    slow = [regime != EARLY or route not in fast for regime, route in everything]
    return [
        pytest.param(*case, marks=[pytest.mark.slow] * late, id=f"{name_of(case[1])}, {case[0]}")
        for case, late in zip(everything, slow, strict=True)
    ]


PERSISTENT = [regime for regime in REGIMES if "persistence" in REGIMES[regime]]
READ_CASES = cases(READS, [gathered, full_moments, full_gradient])
READ_CASES += [(HOST, route) for route in IN_HOST_MEMORY] + [(regime, bare_state_dict) for regime in PERSISTENT]


@pytest.mark.parametrize(("regime", "route"), READ_CASES)
def test_a_route_reads_what_stock_reads(tmp_path: Path, pairs: Callable[[str], Pair], regime: str, route: Route) -> None:
    pair = pairs(regime)
    pair.sound = False
    pair.step()
    taken = pair.take(route, tmp_path)
    assert not differing(taken[False], taken[True])
    pair.step()
    pair.assert_equal()
    on_ssd = bytes_on_ssd(pair.arms[True][1])
    assert on_ssd == (0 if regime == HOST else 6 * MIN_SSD_BYTES)
    pair.sound = True


# ---- routes that write


def chosen(model: Any, weights: bool = False) -> list[tuple[str, Any]]:
    """A parameter on SSD, a small one, and one outside the layers; of `weights` one that may be frozen, too."""
    named = dict(model.named_parameters())
    names = ("blocks.0.up.weight", "blocks.2.norm.bias", "head.weight", *([FROZEN] if weights else []))
    return [(name, named[name]) for name in names]


def new_value(numel: int) -> torch.Tensor:
    return torch.rand(numel, generator=torch.Generator().manual_seed(numel)) * 0.02


def write_gathered(engine: Any, model: Any, folder: Path) -> Tensors:
    for _, param in chosen(model, weights=True):
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            param.data.copy_(new_value(param.ds_numel).view(param.ds_shape))
    return gathered(engine, model, folder)


def load_state_dict(engine: Any, model: Any, folder: Path) -> Tensors:
    values = {name: new_value(param.ds_numel).view(param.ds_shape) for name, param in chosen(model, weights=True)}
    with deepspeed.zero.GatheredParameters([param for _, param in chosen(model, weights=True)], modifier_rank=0):
        model.load_state_dict(values, strict=False)
    return gathered(engine, model, folder)


def write_each(write: Callable[..., None], model: Any, *args: Any) -> None:
    for _, param in chosen(model):
        value = new_value(param.ds_numel)
        write(param, value.view(param.ds_shape) if "full" in write.__name__ else value, *args)


def write_full_master(engine: Any, model: Any, folder: Path) -> Tensors:
    write_each(fragments.safe_set_full_fp32_param, model)
    return full_master(engine, model, folder)


def write_local_master(engine: Any, model: Any, folder: Path) -> Tensors:
    write_each(fragments.safe_set_local_fp32_param, model)
    return local_master(engine, model, folder)


def write_full_moments(engine: Any, model: Any, folder: Path) -> Tensors:
    for kind in MOMENTS:
        write_each(fragments.safe_set_full_optimizer_state, model, kind)
    return full_moments(engine, model, folder)


def write_local_moments(engine: Any, model: Any, folder: Path) -> Tensors:
    for kind in MOMENTS:
        write_each(fragments.safe_set_local_optimizer_state, model, kind)
    return local_moments(engine, model, folder)


WRITES: list[Route] = [
    write_gathered,
    load_state_dict,
    write_full_master,
    write_local_master,
    write_full_moments,
    write_local_moments,
]


@pytest.mark.parametrize(("regime", "route"), cases(WRITES, [write_gathered, write_full_moments]))
def test_training_goes_on_from_what_was_written(
    tmp_path: Path, pairs: Callable[[str], Pair], regime: str, route: Route
) -> None:
    pair = pairs(regime)
    pair.sound = False
    pair.step()
    taken = pair.take(route, tmp_path)
    assert not differing(taken[False], taken[True])
    written = sum(torch.equal(value.flatten(), new_value(value.numel())) for value in taken[True].values())
    assert written >= 3, "nothing was written"
    pair.assert_equal()
    pair.step()
    pair.step()
    pair.assert_equal()
    pair.sound = True


def test_a_gradient_cannot_be_set_after_its_step(pairs: Callable[[str], Pair]) -> None:
    pair = pairs(DELAYED)
    engine, model = pair.arms[True]
    (_, param), *_ = chosen(model)
    before = read_grads(engine, model)
    for call in (fragments.safe_set_full_grad, fragments.safe_set_local_grad):
        with pytest.raises(RuntimeError, match=f"{call.__name__}: train_batch has decided the step"):
            call(param, new_value(param.ds_numel))
    with pytest.raises(RuntimeError, match="safe_update_full_grad_vectorized: train_batch has decided"):
        fragments.safe_update_full_grad_vectorized([param], lambda grad, _: grad)
    assert not differing(before, read_grads(engine, model))


@pytest.mark.parametrize("write", [write_full_master, write_local_master, write_full_moments, write_local_moments])
def test_state_cannot_be_set_within_a_step(tmp_path: Path, write: Route) -> None:
    """What the step has read of it by then would come back over it. The step that was left can be taken again."""
    config = small_buffers(config_in(tmp_path, clip=0.0, section={"optimizer_delay": 0.5}, params="nvme"), 1_100_000)
    with running(config, build_model, vertical=True) as (engine, model):
        first, second = token_batches(2, NUM_MICRO_BATCHES)
        engine.train_batch(iter(first))
        before = gathered(engine, model, tmp_path)
        hook = model.blocks[1].register_forward_pre_hook(lambda *_: write(engine, model, tmp_path) and None)
        with pytest.raises(RuntimeError, match="safe_set_.*: called within a step or an evaluation"):
            engine.train_batch(iter(second))
        hook.remove()
        assert not differing(before, gathered(engine, model, tmp_path))
        engine.train_batch(iter(second))


def test_a_share_of_another_size_is_refused(pairs: Callable[[str], Pair]) -> None:
    _, param = chosen(pairs(DELAYED).arms[True][1])[0]
    with pytest.raises(ValueError, match="got 3 elements for this rank's share of 262144"):
        fragments.safe_set_local_fp32_param(param, torch.ones(3))


# ---- generation and the end of training


def test_generate(tmp_path: Path) -> None:
    scores = []
    for vertical in (False, True):
        config = small_buffers(config_in(tmp_path, clip=0.05, section={"optimizer_delay": 1.0}, params="nvme"), 1_100_000)
        with running(config, partial(tiny_gpt2, 2), vertical=vertical) as (engine, model):
            for step in token_batches(2, NUM_MICRO_BATCHES):
                engine.train_batch(iter(step))
            assert not vertical or engine.optimizer.driver.backlog.pending
            model.eval()
            ids = token_ids()
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=2,
                do_sample=False,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
            scores.append({f"{i}": score for i, score in enumerate(found.scores)})
    assert len(scores[0]) == 2 and not differing(*scores)


@pytest.mark.parametrize("regime", [DELAYED, EARLY])
def test_destroying_the_engine_takes_the_steps_that_were_left(tmp_path: Path, regime: str) -> None:
    batches = token_batches(2, NUM_MICRO_BATCHES)
    ends = []
    for flushes in (True, False):
        engine, model = build_engine(config_in(tmp_path, **REGIMES[regime]), build_model, vertical=True)
        for step in batches:
            engine.train_batch(iter(step))
        assert engine.optimizer.driver.backlog.pending
        if flushes:
            ends.append(contents(engine, model))
        else:
            engine.destroy()
            ends.append(contents(engine, model))
        dispose(engine)
    assert not differing(*ends)


END_OF_PROCESS = """
import atexit, sys
in_flight = []
atexit.register(lambda: print("in flight:", [how_many() for how_many in in_flight]))  # the first: called last
sys.path[:0] = [{support!r}]
from harness import build_engine
from late import LateReads, LateSteps
from models import token_batches
from regimes import DELAYED, REGIMES, build_model, config_in
from pathlib import Path

engine, model = build_engine(config_in(Path({folder!r}), **REGIMES[{regime!r}]), build_model, vertical=True)
reads, steps = LateReads.of(engine), LateSteps(engine)
for step in token_batches(2, 2):
    engine.train_batch(iter(step))
in_flight += [lambda: len(reads.left), lambda: steps.num_left]
print("before:", [how_many() > 0 for how_many in in_flight])
{last}
print("the last line")
"""


@pytest.mark.parametrize(
    ("regime", "last"),
    [
        (DELAYED, ""),
        pytest.param(EARLY, "raise SystemExit(3)", marks=pytest.mark.slow),
        pytest.param(ALL_EARLY, "", marks=pytest.mark.slow),
    ],
)
def test_a_process_may_end_with_steps_left_and_reads_under_way(tmp_path: Path, regime: str, last: str) -> None:
    script = END_OF_PROCESS.format(support=str(SUPPORT), folder=str(tmp_path), regime=regime, last=last)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250)
    assert done.returncode == (3 if last else 0), done.stderr[-3000:]
    assert ("the last line" in done.stdout) == (not last)
    assert f"before: {[regime != DELAYED, regime != ALL_EARLY]}" in done.stdout
    assert "in flight: [0, 0]" in done.stdout
    assert "Traceback" not in done.stderr and not list(tmp_path.rglob("*.swp")), "swap files are left"
