"""What loops do besides the plain three calls: raw calls of the model, micro-batches left out, two engines in turn, signals."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from models import MixerModel
from torch import nn

import ds_vertical
from ds_vertical import interrupts
from ds_vertical.engine.train_loop import seeded
from ds_vertical.errors import LoopError
from ds_vertical.model.batch import stream_seed

M = 3  # micro-batches of a step
SKIPPED_WHOLE = r'call engine\.backward\(loss\) whatever the loss is, and a step .* skipped whole.*"on_nonfinite": "skip"'


class Noting(MixerModel):
    """Writes an attribute in each forward, and drops some of what it computes."""

    def __init__(self) -> None:
        super().__init__(num_layers=2)
        self.seen = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        self.seen = int(input_ids[0, 0])
        out = super().forward(input_ids, labels)
        assert self.seen == int(input_ids[0, 0])
        return out


class Dropping(MixerModel):
    """With dropout ahead of its layers, in them and behind them."""

    def __init__(self) -> None:
        super().__init__(num_layers=2)
        self.embed.register_forward_hook(lambda _, __, out: nn.functional.dropout(out, 0.1, self.training))
        for block in (*self.blocks, self.norm):
            block.register_forward_hook(lambda _, __, out: nn.functional.dropout(out, 0.1, self.training))


def make_config(folder: Path, section: dict[str, Any] | None = None) -> dict[str, Any]:
    """The self-check learns ahead of the first step that `Noting` writes an attribute."""
    checked = {"self_check": True} | (section or {})
    return harness.small_buffers(harness.base_config(folder, num_micro_batches=M, dtype="fp32", section=checked))


def rows(num_steps: int = 2, seed: int = 3) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 257, (num_steps * M, 2, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": each, "labels": each} for each in ids]


def loader_of(batches: list[Any], vertical: bool = True) -> Any:
    return ds_vertical.look_ahead(batches) if vertical else iter(batches)


def micro_batch(engine: Any, batch: Any) -> float:
    loss = engine(**batch)
    engine.backward(loss)
    engine.step()
    return loss.item()


def is_in_order() -> bool:
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    return not hooks and interrupts.num_open() == interrupts.num_shields() == 0


# ---- raw calls of the model


def test_a_raw_call_of_the_model_in_the_middle_of_a_step_is_refused_and_the_step_goes_on(tmp_path: Path) -> None:
    found = []
    for vertical in (False, True):
        with harness.running(make_config(tmp_path / str(vertical)), Noting, vertical=vertical) as (engine, model):
            loader = loader_of(rows(), vertical)
            for index, batch in enumerate(loader):
                loss = engine(**batch)
                if vertical and index == 1:
                    with pytest.raises(
                        LoopError, match=r"engine\.module\(\.\.\.\): called past .* micro-batch 2 of 3.*call engine"
                    ):
                        engine.module(**batch)
                    with torch.no_grad(), pytest.raises(LoopError, match=r"a LayerNorm of engine\.module\(\.\.\.\)"):
                        model.norm(torch.ones(2, 12, model.norm.weight.ds_numel))  # type: ignore[operator,union-attr]
                engine.backward(loss)
                engine.step()
            with torch.no_grad():  # between steps it is DeepSpeed's own order, in both
                found.append((engine.module(**rows()[0]).item(), harness.digest(harness.contents(engine, model))))
    assert found[0] == found[1]
    assert is_in_order()


def test_an_attribute_that_a_loop_sets_in_the_middle_of_a_step_is_refused_and_the_step_goes_on(tmp_path: Path) -> None:
    """The blocks have run for all micro-batches: stock's next forward would see the attribute, and ours would not."""
    found = []
    for meddling in (False, True):
        with harness.running(make_config(tmp_path / str(meddling)), Noting, vertical=True) as (engine, model):
            model.scale = 1.0  # type: ignore[assignment]
            for index, batch in enumerate(loader_of(rows())):
                loss = engine(**batch)
                if meddling and index % M < M - 1:
                    said = rf"Noting\.scale: set in the middle of a step, .* micro-batch {index % M + 1} of 3"
                    with pytest.raises(LoopError, match=rf"{said}.*behind its engine\.step"):
                        model.scale = -1.0  # type: ignore[assignment]
                    assert model.scale != -1.0
                engine.backward(loss)
                if index % M == M - 1:
                    model.scale = float(index)  # type: ignore[assignment]
                model.train()
                engine.step()
            found.append(harness.digest(harness.contents(engine, model)))
    assert found[0] == found[1]
    assert is_in_order()


# ---- micro-batches that a loop leaves out


@pytest.mark.slow
def test_a_loop_that_leaves_a_micro_batch_out_is_told_what_to_write(tmp_path: Path) -> None:
    with harness.running(make_config(tmp_path), Noting, vertical=True) as (engine, model):
        before = harness.digest(harness.contents(engine, model))
        with pytest.raises(LoopError, match=f"micro-batch 2 of 3, without engine.backward.*{SKIPPED_WHOLE}"):
            for index, batch in enumerate(loader_of(rows())):
                loss = engine(**batch)
                if index == 1:
                    continue  # its loss is not finite, say
                engine.backward(loss)
                engine.step()
        assert engine.global_steps == engine.micro_steps == 0 and is_in_order()
        assert harness.digest(harness.contents(engine, model)) == before
        micro_steps = [lambda: engine(**rows()[0]) for _ in range(M)]
        with pytest.raises(LoopError, match=f"micro-step 0 .* has not called engine.backward.*{SKIPPED_WHOLE}"):
            engine.train_window(micro_steps, rows()[:M])


@pytest.mark.slow
def test_a_micro_batch_left_out_at_the_end_of_a_loader_is_told_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with harness.running(make_config(tmp_path), Noting, vertical=True) as (engine, _):
        for index, batch in enumerate(loader_of(rows(1))):
            loss = engine(**batch)
            if index < M - 1:
                engine.backward(loss)
                engine.step()
        for batch in loader_of(rows(1, seed=4)):
            micro_batch(engine, batch)
        assert engine.global_steps == 1
    said = capfd.readouterr()
    assert "gone on to other batches in the middle of a step, behind engine(...) of micro-batch 3 of 3" in said.out + said.err


@pytest.mark.slow
def test_a_loop_that_leaves_nothing_out_skips_a_step_that_is_not_finite_as_stock_does(tmp_path: Path) -> None:
    found = []
    for vertical in (False, True):
        with harness.running(make_config(tmp_path / str(vertical)), Noting, vertical=vertical) as (engine, model):
            losses = []
            for index, batch in enumerate(loader_of(rows(3), vertical)):
                loss = engine(**batch)
                engine.backward(loss * float("nan") if index == M else loss)
                engine.step()
                losses.append(loss.item())
            found.append((losses, engine.skipped_steps, harness.digest(harness.contents(engine, model))))
    assert found[1][1] == 1
    assert found[0][0][: 2 * M] == found[1][0][: 2 * M]


# ---- two engines


@pytest.mark.slow
def test_two_engines_whose_steps_take_turns_have_stocks_bits(tmp_path: Path) -> None:
    """The second one lags a micro-batch behind, so that their steps begin and end in turn."""
    found = []
    for vertical in (False, True):
        setter = nn.Module.__setattr__
        with ExitStack() as stack:
            folder = tmp_path / str(vertical)
            made = [harness.running(make_config(folder / str(i)), Noting, vertical=vertical) for i in range(2)]
            engines = [stack.enter_context(each) for each in made]
            data = [rows(3, seed) for seed in (3, 4)]
            data[0], data[1] = [*data[0], None], [None, *data[1]]
            loaders = [loader_of([batch for batch in each if batch is not None], vertical) for each in data]
            losses = []
            for index, both in enumerate(zip(*data, strict=True)):
                for (engine, _), loader, batch in zip(engines, loaders, both, strict=True):
                    if batch is not None:
                        losses.append(micro_batch(engine, next(loader)))
                if vertical and index == M:  # the second one's step has ended, the first one's is under way
                    with pytest.raises(LoopError, match=r"Noting\.seen: set in the middle of a step"):
                        engines[0][1].seen = -1
            found.append((losses, [harness.digest(harness.contents(*each)) for each in engines]))
        assert nn.Module.__setattr__ is setter and is_in_order()
    assert found[0] == found[1]


@pytest.mark.slow
def test_two_engines_whose_steps_begin_in_one_pass_are_told_what_helps(tmp_path: Path) -> None:
    with ExitStack() as stack:
        made = [harness.running(make_config(tmp_path / str(i)), Noting, vertical=True) for i in range(2)]
        engines = [stack.enter_context(each)[0] for each in made]
        loaders = [loader_of(rows(3, seed)) for seed in (3, 4)]
        with pytest.raises(LoopError, match="let one engine's step begin a micro-batch behind the other's"):
            for batches in zip(*loaders, strict=True):
                for engine, batch in zip(engines, batches, strict=True):
                    micro_batch(engine, batch)


# ---- signals


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_signal_in_the_middle_of_a_step_saves_what_was_before_it(tmp_path: Path, where: str) -> None:
    config = make_config(tmp_path / "ssd", section={"on_signal": {"save_dir": str(tmp_path / "saved")}})
    with harness.running(config, Noting, vertical=True) as (engine, model):
        for batch in loader_of(rows(3)):
            micro_batch(engine, batch)
        expected = harness.digest(harness.contents(engine, model))
    with harness.running(config, Noting, vertical=True) as (engine, model):
        loader = loader_of(rows(3))
        for _ in range(M + 1):
            micro_batch(engine, next(loader))
        with pytest.raises(SystemExit) as ended:
            signalled(engine, next(loader), where)
        assert ended.value.code == 128 + signal.SIGTERM
        assert engine.global_steps == 1 and (tmp_path / "saved" / "global_step1").is_dir() and is_in_order()
    with harness.running(config, Noting, vertical=True) as (engine, model):
        engine.load_checkpoint(str(tmp_path / "saved"))
        for batch in loader_of(rows(3)[M:]):
            micro_batch(engine, batch)
        assert harness.digest(harness.contents(engine, model)) == expected


def signalled(engine: Any, batch: Any, where: str) -> None:
    """SIGTERM comes ahead of that call; the last one of the step is two calls away."""
    for name in ("forward", "backward", "step"):
        if name == where:
            os.kill(os.getpid(), signal.SIGTERM)
        if name == "forward":
            loss = engine(**batch)
        elif name == "backward":
            engine.backward(loss)
        else:
            engine.step()


@pytest.mark.slow
def test_a_signal_in_a_micro_step_leaves_the_step(tmp_path: Path) -> None:
    config = make_config(tmp_path / "ssd", section={"on_signal": {"save_dir": str(tmp_path / "saved")}})
    with harness.running(config, Noting, vertical=True) as (engine, model):
        batches = rows(2)

        def window(step: int, signalled_at: int | None = None) -> None:
            def run(index: int) -> None:
                if index == signalled_at:
                    os.kill(os.getpid(), signal.SIGTERM)
                micro_batch(engine, batches[step * M + index])

            runs = [lambda index=index: run(index) for index in range(M)]  # type: ignore[misc]
            engine.train_window(runs, batches[step * M : step * M + M])

        window(0)
        before = harness.digest(harness.contents(engine, model))
        with pytest.raises(SystemExit) as ended:
            window(1, signalled_at=1)
        assert ended.value.code == 128 + signal.SIGTERM and engine.global_steps == 1
        assert harness.digest(harness.contents(engine, model)) == before and (tmp_path / "saved" / "global_step1").is_dir()


# ---- random numbers


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_dropout_is_stocks_where_that_seeds_its_micro_batches(tmp_path: Path, own: bool) -> None:
    """`own`: the loop draws random numbers, too: from the caller's stream, in both."""
    found = []
    for vertical in (False, True):
        config = make_config(tmp_path / str(vertical), section={"seed": 42})
        with harness.running(config, Dropping, vertical=vertical) as (engine, model):
            torch.manual_seed(7)
            losses = []
            for index, batch in enumerate(loader_of(rows(), vertical)):
                with ExitStack() as stack:
                    if not vertical:
                        stack.enter_context(seeded(stream_seed(42, engine.global_steps, index % M, 0)))
                    loss = engine(**batch)
                engine.backward(loss * (torch.rand(()) if own else 1.0))
                engine.step()
                losses.append(loss.item())
            found.append((losses, torch.rand(()).item(), harness.digest(harness.contents(engine, model))))
    assert found[0] == found[1]
    assert len(set(found[0][0])) == 2 * M
