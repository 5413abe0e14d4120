"""Models that write the tensors that they are given in place: once, however often their forwards run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import differing, read_weights, running
from stateful import Base, M, batches, config_in

from ds_vertical.errors import LayerError


class InPlace(Base):
    """Scales what it is given in place, and notes that, so that its first run starts over."""

    uncounted = False

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            (x.data if self.uncounted else x).mul_(1.5)
        self.notes.append(x.abs().mean().item())
        return super().forward(x)


class Uncounted(InPlace):
    uncounted = True


class Late(InPlace):
    """Scales, and notes, from the second step on."""

    is_late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.is_late else Base.forward(self, x)


def config(folder: Path, wanted: bool | None) -> dict[str, Any]:
    return config_in(folder, section={"self_check": wanted, "seed": 4})


def written(step: Any) -> list[torch.Tensor]:
    return [micro_batch["x"].clone() for micro_batch in step]


@pytest.mark.parametrize("case", [InPlace, Uncounted])
@pytest.mark.parametrize("wanted", [False, None])
def test_evaluations_write_once(tmp_path: Path, case: type[InPlace], wanted: bool | None) -> None:
    """The first one, one that is as long as it, and one behind a step."""
    (first, *further), found = batches(3), []
    with running(config(tmp_path, wanted), case, vertical=True) as (engine, model):
        plain = case()
        plain.load_state_dict(read_weights(model))
        plain.eval()
        for step in (first, *further):
            losses: list[float] = []
            expected = [{"x": micro_batch["x"].clone()} for micro_batch in step]
            with torch.no_grad():
                right = [plain(**micro_batch).item() for micro_batch in expected]
            engine.eval_batch(iter(step), lambda loss, _, losses=losses: losses.append(loss.item()) or loss)
            assert losses[-M:] == right
            assert all(map(torch.equal, written(step), written(expected)))
            found.append(len(model.notes))
        assert found == [M, 2 * M, 3 * M]


@pytest.mark.parametrize("case", [InPlace, Uncounted])
@pytest.mark.parametrize("wanted", [False, None])
def test_training_writes_once(tmp_path: Path, case: type[InPlace], wanted: bool | None) -> None:
    ends = []
    for vertical in (False, True):
        steps = batches(3)
        with running(config(tmp_path, wanted), case, vertical=vertical) as (engine, model):
            losses = [engine.train_batch(iter(step)).item() for step in steps]
            evaluated = engine.eval_batch(iter(batches(1, seed=8)[0])).item()
            given = {f"{m} of {n}": x for n, step in enumerate(steps) for m, x in enumerate(written(step))}
            ends.append((losses, evaluated, model.notes, read_weights(model) | given))
    (*stock, weights), (*ours, own) = ends
    assert stock == ours and not differing(weights, own)


def test_what_is_written_for_the_first_time_as_a_step_starts_over_is_refused_by_name(tmp_path: Path) -> None:
    """And the next step, of which there are copies, is right."""
    steps = batches(3)
    with running(config(tmp_path, False), Late, vertical=True) as (engine, model):
        engine.train_batch(iter(steps[0]))
        before, model.is_late = read_weights(model), True
        with pytest.raises(LayerError, match=r"micro-batch 0: the forward has written a tensor of shape \(2, 3, 48\).*a copy"):
            engine.train_batch(iter(steps[1]))
        assert engine.global_steps == 1 and not differing(before, read_weights(model)) and not model.notes
        expected = [x * 1.5 for x in written(steps[2])]
        engine.train_batch(iter(steps[2]))
        assert all(map(torch.equal, written(steps[2]), expected)) and len(model.notes) == M
