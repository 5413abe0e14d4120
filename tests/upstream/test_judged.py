"""The adapter through which DeepSpeed's own tests meet our engine, and what their runner makes of their reports."""

from __future__ import annotations

from pathlib import Path

import judge
import judged
import pytest
import torch
from harness import base_config, contents, differing, running
from models import MixerModel
from torch import nn


class Regression(MixerModel):
    """Called with positional inputs, as DeepSpeed's test models are."""

    def __init__(self) -> None:
        super().__init__(2, 128)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


def test_the_three_calls_take_the_steps_of_stocks(tmp_path: Path) -> None:
    config = base_config(tmp_path, num_micro_batches=2, dtype="fp32", params="cpu", optimizer="cpu")
    generator = torch.Generator().manual_seed(3)
    batches = [(torch.randn(2, 4, 128, generator=generator), torch.randn(2, 4, 128, generator=generator)) for _ in range(4)]
    found, boundaries = [], []
    for vertical in (False, True):
        with running(config, Regression, vertical=vertical) as (engine, model):
            caller = judged.Judged(engine) if vertical else engine
            for inputs in batches:
                loss = caller(*inputs)
                caller.backward(loss)
                boundaries.append(caller.is_gradient_accumulation_boundary())
                caller.step()
            found.append(contents(engine, model))
            assert engine.global_steps == 2
    assert differing(*found) == [] and boundaries == [False, True] * 4


def test_configurations_are_those_of_this_processor() -> None:
    given = {"fp16": {"enabled": True, "initial_scale_power": 8}, "zero_optimization": {"stage": 3}}
    made = judged.translated(given, vertical=False)
    assert made == {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    assert "fp16" in given and judged.translated(given, vertical=True)["vertical_schedule"]["enabled"]
    with pytest.raises(pytest.skip.Exception, match="ZeRO stage 2"):
        judged.translated({"zero_optimization": {"stage": 2}}, vertical=True)


def test_reports_are_read_and_put_side_by_side(tmp_path: Path) -> None:
    report = tmp_path / "arm.xml"
    case = '<testcase classname="unit.a.TestA" name="{}">{}</testcase>'
    cases = [case.format("fine", ""), case.format("bad", '<failure message="ValueError: no&#10;more" />')]
    cases += [case.format("left", '<skipped message="" />')]
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    found = judge.read_report(report)
    assert found == {
        "TestA::fine": ("passed", ""),
        "TestA::bad": ("failed", "ValueError: no"),
        "TestA::left": ("skipped", ""),
    }
    rows = judge.together({"stock": found, "vertical": {"TestA::fine": ("failed", "why")}})
    assert judge.table(rows)[2:] == [
        "| TestA::fine | passed | failed why |",
        "| TestA::bad | failed ValueError: no | missing |",
        "| TestA::left | skipped | missing |",
    ]
