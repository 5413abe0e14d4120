"""The model of stock's step: its bytes by hand, and that layer-major order wins where it should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_vertical.planner.closed_forms import horizontal_step, stock_placement
from ds_vertical.planner.machine import Machine
from ds_vertical.planner.model_shape import ModelShape
from ds_vertical.types import Placement

SHAPE = ModelShape(0, (10**9,) * 4, 1.0, 2.0, 10**6, placement=Placement())
FAST = Machine(1e30, 1e30, 1e30, 8, False, 1e30, 1e30)


def test_each_resource_alone_takes_its_bytes_over_its_rate() -> None:
    def seconds(**rates: float) -> float:
        return horizontal_step(replace(SHAPE, forward_s=0, backward_s=0), replace(FAST, **rates), 8).seconds

    parameters = 4 * 10**9 * 2
    gradients = 2 * parameters
    state = 6 * parameters
    assert seconds(ssd_read_bytes_per_s=1e9) == pytest.approx((16 * parameters + state) / 1e9)
    assert seconds(ssd_write_bytes_per_s=1e9) == pytest.approx((state + parameters) / 1e9)
    assert seconds(copy_in_bytes_per_s=1e9) == pytest.approx((16 * parameters + 7 * gradients) / 1e9)
    assert seconds(copy_out_bytes_per_s=1e9) == pytest.approx(8 * gradients / 1e9)
    assert horizontal_step(SHAPE, FAST, 8).seconds == pytest.approx(8 * 4 * 4.0)


def test_gradients_come_first_into_host_memory_then_parameters() -> None:
    assert stock_placement(SHAPE, None) == Placement.of(parameters_on_ssd=0.0)
    assert stock_placement(SHAPE, 16e9 + 4e9) == Placement.of(parameters_on_ssd=0.5)
    assert stock_placement(SHAPE, 4e9) == Placement.of(parameters_on_ssd=0.5, gradients_on_ssd=1.0)
    assert stock_placement(SHAPE, 1e12) == Placement.of(parameters_on_ssd=0.0)


def test_gradients_on_ssd_are_written_and_read_once() -> None:
    slow = replace(FAST, ssd_read_bytes_per_s=1e9, ssd_write_bytes_per_s=1e9)
    shape = replace(SHAPE, forward_s=0, backward_s=0)
    waiting = replace(shape, placement=Placement.of(gradients_on_ssd=1.0))
    more = horizontal_step(waiting, slow, 8).seconds - horizontal_step(shape, slow, 8).seconds
    assert 16 <= more <= 32  # 16 GB written ahead of the step; read beside what it writes anyway


def test_what_is_frozen_has_no_gradients_and_no_state() -> None:
    """Of four layers one is trained."""
    adapted = replace(SHAPE, forward_s=0, backward_s=0, gradients=(0, 10**9, 0, 0, 0))
    assert stock_placement(adapted, 4e9 + 4e9) == Placement.of(parameters_on_ssd=0.5)

    def seconds(**rates: float) -> float:
        return horizontal_step(adapted, replace(FAST, **rates), 8).seconds

    assert seconds(ssd_read_bytes_per_s=1e9) == pytest.approx(16 * 8 + 12)
    assert seconds(ssd_write_bytes_per_s=1e9) == pytest.approx(12 + 2)
    assert seconds(copy_out_bytes_per_s=1e9) == pytest.approx(8 * 4)
    assert seconds(copy_in_bytes_per_s=1e9) == pytest.approx(16 * 8 + 7 * 4)
    assert seconds(adam_elements_per_s=1e9) == pytest.approx(1)
