"""Loops of `engine(batch)`, `engine.backward(loss)`, `engine.step()`: stock's bits, and refusals that leave all as it was."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from models import MixerModel
from torch import nn
from torch.utils.data import DataLoader

import ds_vertical
from ds_vertical import interrupts
from ds_vertical.engine.integrations import three_calls
from ds_vertical.errors import LoopError

M = 3  # micro-batches of a step
Loop = Callable[[Any, Any], Iterator[torch.Tensor]]  # engine, loader -> the loss of each micro-batch


def make_model() -> nn.Module:
    return MixerModel(num_layers=2)


def make_config(folder: Path, **options: Any) -> dict[str, Any]:
    return harness.small_buffers(harness.base_config(folder, num_micro_batches=M, **options))


def make_loader(num_steps: int = 2, extra: int = 0, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 257, (2 * (num_steps * M + extra), 12), generator=generator)
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    return DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(4), **options)


def by_name(engine: Any, loader: Any) -> Iterator[torch.Tensor]:
    for batch in loader:
        loss = engine(**batch)
        engine.backward(loss)
        engine.step()
        yield loss


def by_position_with_own_loss(engine: Any, loader: Any) -> Iterator[torch.Tensor]:
    for batch in loader:
        ids = batch["input_ids"]
        logits = engine(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        engine.backward(loss * torch.rand(()))  # the loop's own random numbers
        engine.step()
        yield loss


def with_a_boundary_of_its_own(engine: Any, loader: Any) -> Iterator[torch.Tensor]:
    for index, batch in enumerate(loader):
        engine.set_gradient_accumulation_boundary(index % M == M - 1)
        loss = engine(**batch)
        engine.backward(loss)
        if index % M == M - 1:
            for group in engine.optimizer.param_groups:
                group["lr"] *= 0.5  # counts: nothing steps ahead of engine.step()
            engine.step()
        yield loss


def changed_on_the_way(engine: Any, loader: Any) -> Iterator[torch.Tensor]:
    for batch in loader:
        loss = engine(**shortened(batch))
        engine.backward(loss)
        engine.step()
        yield loss


def shortened(batch: Any) -> dict[str, torch.Tensor]:
    return {name: tensor[:, :-2].flip(0) for name, tensor in batch.items()}


def modes_on() -> list[Any]:
    """This thread's function modes."""
    return torch.overrides._get_current_function_mode_stack()


def with_modes_and_reads_of_its_own(engine: Any, loader: Any) -> Iterator[torch.Tensor]:
    for batch in loader:
        with torch.device("cpu"):
            loss = engine(**batch)
        assert modes_on() == []
        assert all(engine.module.get_parameter(name).detach().norm() >= 0 for name in ("embed.weight", "head.weight"))
        with torch.device("cpu"):
            engine.backward(loss)
            assert len(modes_on()) == 1
        assert modes_on() == []
        engine.step()
        yield loss


def by_deepspeeds_loader(engine: Any, _: Any) -> Iterator[torch.Tensor]:
    """Which `initialize(training_data=...)` makes, too."""
    yield from by_name(engine, engine.deepspeed_io(make_loader().dataset, batch_size=2))


def run_arm(config: dict[str, Any], vertical: bool, loop: Loop, loader: Any, epochs: int = 2) -> dict[str, Any]:
    inputs = {"inputs": shortened} if loop is changed_on_the_way else {}
    found: dict[str, Any] = {"losses": [], "norms": [], "lr": [], "boundaries": []}
    with harness.running(config, make_model, vertical=vertical) as (engine, model):
        torch.manual_seed(7)
        for _ in range(epochs):
            for loss in loop(engine, ds_vertical.look_ahead(loader, **inputs) if vertical else loader):
                found["losses"].append(loss.item())
                found["norms"].append(engine.get_global_grad_norm())
                found["lr"].append(engine.get_lr())
                found["boundaries"].append(engine.is_gradient_accumulation_boundary())
        found["random"] = torch.rand(()).item()
        names = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
        found["counters"] = {name: getattr(engine, name) for name in names}
        found["contents"] = harness.digest(harness.contents(engine, model))
    return found


def compare(tmp_path: Path, loop: Loop, make: Callable[[], Any] = make_loader, **options: Any) -> None:
    stock = run_arm(make_config(tmp_path / "stock", **options), False, loop, make())
    vertical = run_arm(make_config(tmp_path / "vertical", **options), True, loop, make())
    assert stock["counters"]["global_steps"] == 4
    for name, found in stock.items():
        assert vertical[name] == found, name


@pytest.mark.parametrize("loop", [by_position_with_own_loss, with_a_boundary_of_its_own, changed_on_the_way])
def test_three_calls_have_stocks_bits(tmp_path: Path, loop: Loop) -> None:
    compare(tmp_path, loop, dtype="fp32")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("loop", [by_name, by_position_with_own_loss, with_a_boundary_of_its_own])
@pytest.mark.parametrize("section", [{}, {"self_check": True}, {"optimizer_delay": 0.5}, {"order": "horizontal"}], ids=str)
def test_every_kind_of_loop_has_stocks_bits(tmp_path: Path, loop: Loop, section: dict[str, Any], dtype: str) -> None:
    compare(tmp_path, loop, section=section, dtype=dtype)


@pytest.mark.slow
def test_deepspeeds_own_loader_is_looked_ahead_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)  # puts it back at the end
    three_calls.see_torch_loaders()  # as `ds_vertical.patch()` does
    compare(tmp_path, by_deepspeeds_loader, dtype="fp32")


FETCHED = {"outside_layers": "fetched"}


def test_ends_that_are_away_are_not_watched_in_the_loops_turn(tmp_path: Path) -> None:
    compare(tmp_path, with_modes_and_reads_of_its_own, section=FETCHED, dtype="fp32")


# ---- what is refused, and what a loop may leave


@pytest.mark.parametrize("is_behind_backward", [False, True])
def test_a_loop_that_breaks_off_leaves_no_watch_behind(tmp_path: Path, is_behind_backward: bool) -> None:
    with harness.running(make_config(tmp_path, section=FETCHED), make_model, vertical=True) as (engine, model):
        rig = Rig(engine, model)
        rig.train()
        assert engine.ran.outside.apart == ("pre", "suf")
        for batch in ahead():
            loss = engine(**batch)
            if is_behind_backward:
                engine.backward(loss)
            break
        assert modes_on() == []
        with pytest.raises(LoopError, match="micro-batch 1 of 3"):
            engine.eval_batch(ahead())
        assert modes_on() == []


def test_a_snake_is_refused_ahead_of_the_step(tmp_path: Path) -> None:
    with harness.running(make_config(tmp_path, section={"snake": True}), make_model, vertical=True) as (engine, _):
        batch = next(ds_vertical.look_ahead(make_loader()))
        with pytest.raises(LoopError, match='vertical_schedule.snake: got true.*write "snake": false'):
            engine(**batch)
        assert engine.global_steps == engine.micro_steps == 0 and interrupts.num_open() == interrupts.num_shields() == 0


class Rig:
    """One vertical engine, and what shows that a step that was refused or left has not been."""

    def __init__(self, engine: Any, model: nn.Module) -> None:
        self.engine = engine
        self.model = model

    def micro_batch(self, batch: Any) -> torch.Tensor:
        loss = self.engine(**batch)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def train(self, count: int = M) -> None:
        """`count` micro-batches of a loader of its own."""
        for _, batch in zip(range(count), ds_vertical.look_ahead(make_loader()), strict=False):
            self.micro_batch(batch)

    def marks(self) -> tuple[Any, ...]:
        engine = self.engine
        return engine.global_steps, engine.micro_steps, harness.digest(harness.contents(engine, self.model))


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Which has taken one step."""
    with harness.running(make_config(tmp_path_factory.mktemp("rig")), make_model, vertical=True) as (engine, model):
        made = Rig(engine, model)
        made.train()
        yield made


@pytest.fixture
def unchanged(rig: Rig) -> Iterator[None]:
    """The test's steps have not been, nothing of them is open, and the next one runs."""
    before = rig.marks()
    yield
    assert interrupts.num_open() == interrupts.num_shields() == 0
    assert rig.marks() == before
    rig.train()
    assert rig.engine.global_steps == before[0] + 1


def ahead(**options: Any) -> Any:
    return ds_vertical.look_ahead(make_loader(**options))


def half_a_step(rig: Rig) -> Any:
    """A loader, whose first micro-batch is trained."""
    loader = ahead()
    rig.micro_batch(next(loader))
    return loader


@pytest.mark.usefixtures("unchanged")
class TestRefusals:
    def test_a_batch_from_no_known_loader(self, rig: Rig) -> None:
        with pytest.raises(LoopError, match=r"ds_vertical\.look_ahead\(loader\)"):
            rig.micro_batch({"input_ids": torch.full((2, 5), 123)})

    def test_a_call_that_differs_from_its_prediction(self, rig: Rig) -> None:
        loader = half_a_step(rig)
        batch = next(loader)
        with pytest.raises(LoopError, match="micro-batch 2 of 3: argument labels is not what the data loader has told"):
            rig.engine(input_ids=batch["input_ids"], labels=batch["labels"].flip(1))

    def test_two_forwards_before_a_backward(self, rig: Rig) -> None:
        loader = ahead()
        rig.engine(**next(loader))
        with pytest.raises(LoopError, match=r"without engine\.backward\(loss\) in between"):
            rig.engine(**next(loader))

    def test_a_backward_that_the_engine_does_not_see(self, rig: Rig) -> None:
        loader = ahead()
        loss = rig.engine(**next(loader))
        with pytest.raises(LoopError, match=r"outside of engine\.backward\(loss\)"):
            loss.backward()
        with pytest.raises(LoopError, match=r"call engine\.backward\(loss\), not loss\.backward\(\)"):
            rig.engine.step()

    def test_a_second_backward(self, rig: Rig) -> None:
        loader = ahead()
        loss = rig.engine(**next(loader))
        rig.engine.backward(loss)
        with pytest.raises(LoopError, match="a second time for micro-batch 1 of 3"):
            rig.engine.backward(loss)

    @pytest.mark.parametrize("count, said", [(1, True), (M, False)])
    def test_a_boundary_that_is_not_the_windows_last(self, rig: Rig, count: int, said: bool) -> None:
        loader = ahead()
        with pytest.raises(LoopError, match=f"micro-batch {count} of 3: the loop says that it is"):
            for index, batch in enumerate(loader):
                loss = rig.engine(**batch)
                rig.engine.set_gradient_accumulation_boundary(said if index == count - 1 else False)
                rig.engine.backward(loss)
        rig.engine._is_gradient_accumulation_boundary = None

    def test_one_more_forward_before_the_step(self, rig: Rig) -> None:
        loader = ahead()
        for _ in range(M):
            rig.engine.backward(rig.engine(**next(loader)))
        with pytest.raises(LoopError, match="the last one of the step"):
            rig.engine(**next(loader))

    def test_a_loader_that_ends_inside_a_step(self, rig: Rig) -> None:
        loader = ahead(num_steps=0, extra=2)
        with pytest.raises(LoopError, match="ends 1 micro-batches before the step does"):
            rig.micro_batch(next(loader))

    def test_an_input_that_requires_grad(self, rig: Rig) -> None:
        with pytest.raises(LoopError, match="argument number 1 requires grad"):
            rig.engine(torch.ones(2, 5, requires_grad=True))

    def test_a_forward_without_gradients(self, rig: Rig) -> None:
        with torch.no_grad(), pytest.raises(LoopError, match=r"call engine\.eval\(\)"):
            rig.engine(**next(ahead()))

    def test_calls_without_a_forward(self, rig: Rig) -> None:
        with pytest.raises(LoopError, match=r"no engine\(\.\.\.\) in training mode before it"):
            rig.engine.backward(torch.ones((), requires_grad=True))
        with pytest.raises(LoopError, match=r"no engine\(\.\.\.\) in training mode before it"):
            rig.engine.step()

    @pytest.mark.parametrize("call", ["eval_batch", "train_batch", "save_checkpoint", "load_checkpoint", "forward", "gather"])
    def test_other_calls_in_the_middle_of_a_step(self, rig: Rig, call: str, tmp_path: Path) -> None:
        loader = half_a_step(rig)
        with pytest.raises(LoopError, match=r"in the middle of a step, behind engine\.backward of micro-batch 1 of 3"):
            if call == "forward":
                rig.engine.eval()
                try:
                    rig.engine(**next(loader))
                finally:
                    rig.engine.train()
            elif call == "gather":
                harness.read_weights(rig.model)
            else:
                getattr(rig.engine, call)(*((str(tmp_path), "tag") if "checkpoint" in call else (ahead(),)))
        assert not list(tmp_path.iterdir())

    def test_a_loop_that_is_left_is_saved_as_of_before_the_step(self, rig: Rig, tmp_path: Path) -> None:
        try:
            half_a_step(rig)
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            rig.engine.save_checkpoint(str(tmp_path), "left")
        assert (tmp_path / "left").is_dir()

    def test_the_next_loop_begins_a_step_of_its_own(self, rig: Rig) -> None:
        before = rig.engine.global_steps
        for batch in ahead():
            rig.micro_batch(batch)
            break
        for batch in ahead():  # the next one, behind a backward
            rig.engine(**batch)
            break
        loader = ahead()
        for _ in range(M - 1):  # and behind a forward
            rig.micro_batch(next(loader))
        assert rig.engine.global_steps == before
        with pytest.raises(LoopError, match="micro-batch 2 of 3"):
            rig.engine.eval_batch(loader)

    def test_an_error_in_the_model(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        loader = half_a_step(rig)

        def fail(*_: Any) -> None:
            raise ArithmeticError("here")

        handle = rig.model.norm.register_forward_hook(fail)  # type: ignore[union-attr]
        try:
            with pytest.raises(ArithmeticError, match="here"):
                rig.micro_batch(next(loader))
        finally:
            handle.remove()


def test_ctrl_c_cuts_the_loops_own_code_at_once(rig: Rig, unchanged: None) -> None:
    loader = ahead()
    loss = rig.engine(**next(loader))
    assert interrupts.num_open() == interrupts.num_shields() == 0  # nothing of the step is the loop's
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            loss = loss + 0
    rig.engine.backward(loss)  # the step goes on
    with pytest.raises(LoopError, match="micro-batch 1 of 3"):
        rig.engine.eval_batch(loader)


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_ctrl_c_within_a_call_ends_the_step(rig: Rig, unchanged: None, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = half_a_step(rig)
    loss = rig.engine(**next(loader))
    monkeypatch.setattr(three_calls.Hub, "_hand_over", interrupting(three_calls.Hub._hand_over, at))
    with pytest.raises(KeyboardInterrupt):
        rig.engine.backward(loss)
        rig.engine(**next(loader))
    monkeypatch.undo()
    assert rig.engine._three_calls._step is None


def interrupting(hand_over: Any, at: str) -> Any:
    """Presses Ctrl-C in the hub as it hands over to the loop within that call."""

    def wrapped(self: Any, value: Any) -> Any:
        if (value is None) == (at == "backward"):
            os.kill(os.getpid(), signal.SIGINT)
        return hand_over(self, value)

    return wrapped


def test_destroy_in_the_middle_of_a_step(tmp_path: Path) -> None:
    with harness.running(make_config(tmp_path), make_model, vertical=True) as (engine, model):
        half_a_step(Rig(engine, model))
    assert interrupts.num_open() == interrupts.num_shields() == 0
    assert nn.Module.__setattr__.__qualname__ == "Module.__setattr__"


class Counting(MixerModel):
    """Keeps a number that each forward changes."""

    def __init__(self) -> None:
        super().__init__(num_layers=2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        out = super().forward(input_ids, labels)
        self.seen += 1
        return out


@pytest.mark.slow
@pytest.mark.parametrize("self_check", [True, False])
def test_state_is_learnt_ahead_of_the_first_step(tmp_path: Path, self_check: bool) -> None:
    config = make_config(tmp_path, section={"self_check": self_check})
    with harness.running(config, Counting, vertical=True) as (engine, model):
        rig = Rig(engine, model)
        if not self_check:  # the first step shows it, too late
            with pytest.raises(LoopError, match='"self_check": true'):
                rig.train()
            return
        rig.train()
        assert model.seen.item() == M  # type: ignore[union-attr,operator]


def test_torchs_own_loaders_are_seen_once_installed(rig: Rig, unchanged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoader, "__iter__", DataLoader.__iter__)  # put back at the end
    three_calls.see_torch_loaders()
    three_calls.see_torch_loaders()
    loader = make_loader(num_workers=1)
    for batch in loader:
        rig.micro_batch(batch)
        break
    with pytest.raises(LoopError, match="micro-batch 1 of 3"):
        rig.engine.eval_batch(loader)
