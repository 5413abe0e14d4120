"""The memory budget of a real run: what it says is what is allocated, too little is refused before anything is, and stock's
own buffers hold no memory while nobody uses them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import base_config, build_engine, dispose, read_weights, running, small_buffers, start_process_group
from models import MixerModel, token_batches
from pages import resident_pages
from places import ROOT
from processes import status

from ds_vertical.config.resolve import resolve
from ds_vertical.config.section import load_section
from ds_vertical.engine import memory_check
from ds_vertical.engine.assembly import bytes_by_tier
from ds_vertical.errors import MemoryBudgetError
from ds_vertical.io import host
from ds_vertical.model.layers import map_layers
from ds_vertical.offload.grad_accumulator import LARGE
from ds_vertical.offload.param_shards import ParamUpdates
from ds_vertical.planner.memory_budget import budget, layer_buffers

MIB = 1 << 20


def stock_buffers(engine: Any) -> list[torch.Tensor]:
    swapper = next(param.nvme_swapper for param in engine.module.parameters())
    return [
        swapper.buffers,
        swapper.partitioned_swap_buffer,
        *engine.optimizer.optimizer_swapper.swap_buffer_manager.all_buffers,
    ]


# ------------------------------------------------------------------------------------------------- what is really allocated


@pytest.mark.parametrize(
    ("settings", "section"),
    [
        ({"clip": 1.0}, {}),
        ({"clip": 0.0, "sub_group_size": 300_001}, {"prefetch_layers": 0, "optimizer_delay": 0.5}),
        ({"clip": 0.0, "max_in_cpu": 600_000}, {"prefetch_layers": 4}),
        ({"clip": 1.0, "optimizer": "cpu"}, {"optimizer_delay": 1.0}),
        ({"clip": 0.0, "sub_group_size": 300_001}, {"overlap": False, "optimizer_delay": 0.5}),
        ({"clip": 0.0}, {"optimizer_host_share": 0.6, "optimizer_delay": 0.5}),
        ({"clip": 1.0}, {"optimizer_host_share": 1.0}),
    ],
    ids=[
        *("speculating", "early, small chunks", "some in host memory", "state in host memory", "one at a time"),
        *("state shared", "state shared whole"),
    ],
)
def test_the_budget_is_what_is_allocated(tmp_path: Path, settings: dict[str, Any], section: dict[str, Any]) -> None:
    from ds_vertical.engine.memory_check import Forecast, groups_of

    config = small_buffers(base_config(tmp_path, dtype="fp32", section=section, **settings))
    locked = status("VmLck")
    with running(config, partial(MixerModel, 5), vertical=True) as (engine, model):
        forecast = Forecast(engine.layers, groups_of(model, None, None), config, engine.vertical)
        items = {item.what: item.num_bytes for item in budget(forecast.shape, forecast.terms)}
        optimizer, tiers = engine.optimizer, bytes_by_tier(engine.layers)
        slots = [slot.numel() for slot in optimizer.slots]
        assert [list(chunk.params) for chunk in forecast.chunks] == optimizer.fp16_groups
        assert items["parameter buffers"] == engine._params.host_bytes > 0
        assert items.get("optimizer slots", 0) == sum(slots)
        assert len(slots) <= 1 or engine.vertical.overlap
        assert items.get("parameters at rest", 0) == tiers["host"] + tiers["device"]
        resting = [i for i in range(len(optimizer.fp16_groups)) if not optimizer._swappable_optimizer_subgroup(i)]
        assert items.get("optimizer state at rest", 0) == 12 * sum(
            optimizer.fp16_partitioned_groups_flat_numel[i] for i in resting
        )
        if forecast.terms.held_share == 1:
            assert items["gradients"] == 4 * sum(param.ds_numel for param in model.parameters())
        assert 0 < status("VmLck") - locked <= (items["parameter buffers"] + sum(slots)) / 1024 + 4 * (len(slots) + 9)


@pytest.mark.parametrize("max_in_cpu", [600_000, 2_300_000])
def test_max_in_cpu_is_of_all_groups_of_the_optimizer_together(tmp_path: Path, max_in_cpu: int) -> None:
    """As stock lays them out, which gives the first group as much of it as that has."""
    from ds_vertical.engine.memory_check import Forecast, groups_of

    def groups(model: Any) -> list[dict[str, Any]]:
        first = [*model.blocks[0].parameters(), *model.blocks[1].parameters()]
        ids = set(map(id, first))
        return [{"params": first}, {"params": [p for p in model.parameters() if id(p) not in ids]}]

    config = small_buffers(base_config(tmp_path, dtype="fp32", clip=0.0, max_in_cpu=max_in_cpu, sub_group_size=300_001))
    engine, model = build_engine(config, partial(MixerModel, 5), vertical=True, groups=groups)
    try:
        forecast = Forecast(engine.layers, groups_of(model, groups(model), None), config, engine.vertical)
        assert [list(chunk.params) for chunk in forecast.chunks] == engine.optimizer.fp16_groups
        items = {item.what: item.num_bytes for item in budget(forecast.shape, forecast.terms)}
        tiers = bytes_by_tier(engine.layers)
        assert items["parameters at rest"] == tiers["host"] + tiers["device"] and tiers["ssd"] > 0
        assert items["parameter buffers"] == engine._params.host_bytes
    finally:
        dispose(engine)


@pytest.mark.parametrize(
    ("resting", "left"), [(6, [0.5] * 6), (9, [0.5, 0.0] * 3), (11, [0.5, 0.0, 0.0, 0.0, 0.0, 0.0])], ids=str
)
def test_max_in_cpu_keeps_as_much_of_every_layer_in_host_memory(tmp_path: Path, resting: int, left: list[float]) -> None:
    """To within one parameter, of two matrices a layer: what a layer has no room for, the next ones make up for. The buffers
    shrink with the largest. What no file is large enough for takes no part."""
    matrix, sizes = 512 * 512, dict[int, list[int]]()
    for count in (0, resting):
        config = small_buffers(base_config(tmp_path, dtype="fp32", max_in_cpu=count * matrix))
        with running(config, partial(MixerModel, 6), vertical=True) as (engine, _):
            found = engine.param_store.files.sizes
            sizes[count] = [found[layer] for layer in range(6)]
            assert engine.param_store.host_bytes == max(sizes[count]) * layer_buffers(1, sum(map(bool, sizes[count])))
    assert sizes[0] == [2 * 4 * matrix] * 6 and [size / (2 * 4 * matrix) for size in sizes[resting]] == left


@pytest.mark.parametrize(
    ("settings", "section"),
    [
        ({"clip": 0.0, "params": "cpu"}, {"optimizer_delay": 0.0}),
        ({"clip": 0.0, "params": "cpu"}, {"optimizer_delay": 0.0, "on_nonfinite": "stop"}),
        ({"clip": 1e9, "params": "cpu"}, {"optimizer_delay": 0.0, "optimizer_speculation": True}),
        ({"clip": 0.0, "params": "cpu"}, {"optimizer_delay": 0.0, "optimizer_host_share": 0.5}),
        ({"clip": 0.0, "params": "cpu"}, {"optimizer_delay": 0.25}),
        ({"clip": 0.0, "max_in_cpu": 1_000_000}, {"optimizer_delay": 0.0}),
        ({"clip": 0.0}, {"optimizer_delay": 0.0}),
        ({"clip": 1.0, "params": "cpu"}, {"optimizer_delay": 1.0}),
    ],
    ids=str,
)
def test_early_values_of_parameters_that_rest_in_memory_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], section: dict[str, Any]
) -> None:
    """They lie beside the values of before until the norm says that they count."""
    from ds_vertical.engine.memory_check import Forecast, groups_of

    found, commit = [0], ParamUpdates.commit

    def note(updates: ParamUpdates) -> None:
        found.append(sum(count * copy.element_size() for _, copy, (_, count) in updates._copies))
        commit(updates)

    monkeypatch.setattr(ParamUpdates, "commit", note)
    config = base_config(tmp_path, dtype="fp32", section=section, **settings)
    config = config if settings.get("params") == "cpu" else small_buffers(config)
    with running(config, partial(MixerModel, 3), vertical=True) as (engine, model):
        forecast = Forecast(engine.layers, groups_of(model, None, None), config, engine.vertical)
        items = {item.what: item.num_bytes for item in budget(forecast.shape, forecast.terms)}
        engine.train_batch(iter(token_batches(1, 3, rows=1, shortest=4)[0]))
    counted, exact = items.get("early values of parameters", 0), section["optimizer_delay"] != 0.25
    assert max(found) == counted if exact else 0.7 * counted < max(found) <= counted, "to the nearest place for a cut"


def test_clipping_that_is_not_written_counts_as_deepspeeds_own(tmp_path: Path) -> None:
    """It clips to 1 there, so that no early step is final and every gradient waits."""
    from ds_vertical.engine.memory_check import Forecast, groups_of

    config = small_buffers(base_config(tmp_path, dtype="fp32"))
    del config["gradient_clipping"]
    with running(config, MixerModel, vertical=True) as (engine, model):
        forecast = Forecast(engine.layers, groups_of(model, None, None), config, engine.vertical)
        assert forecast.timing.certain is engine.optimizer.timing.certain is False
        assert forecast.terms.held_share == 1


def test_stocks_buffers_hold_memory_only_while_they_are_used(tmp_path: Path) -> None:
    import deepspeed

    config = small_buffers(base_config(tmp_path, dtype="fp32"))
    batches = token_batches(2, 3, rows=1, shortest=4)
    with running(config, partial(MixerModel, 3), vertical=True) as (engine, model):
        assert [resident_pages(buffer) for buffer in stock_buffers(engine)] == [0] * 6
        before = read_weights(model)
        pages = resident_pages(stock_buffers(engine)[0])
        assert pages > 0
        engine.train_batch(iter(batches[0]))
        assert [resident_pages(buffer) for buffer in stock_buffers(engine)] == [0] * 6
        weight = model.blocks[0].up.weight
        with deepspeed.zero.GatheredParameters([weight]):
            engine.optimizer.optimizer_swapper.swap_buffer_manager.allocate(1, 1, torch.float32)[0].fill_(1.0)
            from ds_vertical.compat.swap_buffers import rest_stock_buffers

            rest_stock_buffers(model.parameters(), engine.optimizer)  # what is in use is left alone
            assert torch.equal(weight.ds_tensor, weight.flatten()) and not torch.equal(weight, before["blocks.0.up.weight"])
            assert sum(map(resident_pages, stock_buffers(engine)[2:])) == 1


# ---------------------------------------------------------------------------------------------------------------- refusals


def test_too_small_a_budget_is_refused_before_anything_is_made_and_the_advice_helps(tmp_path: Path) -> None:
    import ds_vertical

    start_process_group()
    section = {"host_memory_bytes": 100 * MIB}
    config = base_config(tmp_path / "swap", section=section, num_micro_batches=2)
    small_buffers(config, 1_100_000)
    model = MixerModel(3, width=1024)
    locked, weights = status("VmLck"), [param.detach().clone() for param in model.parameters()]
    with pytest.raises(MemoryBudgetError) as caught:
        ds_vertical.initialize(model=model, model_parameters=model.parameters(), config=config)
    assert not (tmp_path / "swap").exists() and status("VmLck") == locked
    assert all(torch.equal(param, kept) for param, kept in zip(model.parameters(), weights, strict=True))
    first = str(caught.value).splitlines()[0]
    needed, allowed = (int(number) for number in re.findall(r"needs (\d+) bytes, (\d+) are allowed", first)[0])
    assert allowed == 100 * MIB < needed
    advised = partial(re.findall, r'"vertical_schedule.host_memory_bytes": (\d+)')
    config["vertical_schedule"]["host_memory_bytes"] = int(advised(first)[0])
    try:
        train_one_step(config)
    except MemoryBudgetError as error:  # more of this process is resident now than a moment ago, on a machine short of memory
        config["vertical_schedule"]["host_memory_bytes"] = int(advised(str(error))[0])
        train_one_step(config)


def test_a_share_of_the_state_that_does_not_fit_is_refused_with_the_largest_that_does(tmp_path: Path) -> None:
    from ds_vertical.engine import memory_check
    from ds_vertical.model.layers import map_layers

    start_process_group()
    model = MixerModel(3, width=1024)
    layers, groups = map_layers(model, None), memory_check.groups_of(model, None, None)

    def needed(share: float, limit: int) -> int:
        config = base_config(tmp_path, section={"optimizer_host_share": share, "optimizer_delay": 0.5}, clip=0.0)
        forecast = memory_check.Forecast(layers, groups, config, resolve(load_section(config), 0))
        return memory_check.check_memory(forecast, model.parameters(), limit)[1]

    none, most = needed(0.0, 8 << 30), needed(0.8, 8 << 30)
    assert most - none > 12 * 4 * 1024**2  # four of the six matrices; gradients wait in memory, too
    limit = (none + most) // 2
    with pytest.raises(MemoryBudgetError) as refused:
        needed(0.8, limit)
    first, *table = str(refused.value).splitlines()
    assert any(re.match(r"host +optimizer state at rest .* vertical_schedule.optimizer_host_share$", line) for line in table)
    (advised,) = re.findall(r'"vertical_schedule.optimizer_host_share": (\S+) \(now 0.8\)', first)
    assert 0.2 < float(advised) < 0.7 and needed(float(advised), limit) <= limit
    with pytest.raises(MemoryBudgetError):
        needed(float(advised) + 0.05, limit)


def test_parameters_in_host_memory_that_do_not_fit_are_refused_with_as_many_as_do(tmp_path: Path) -> None:
    start_process_group()
    with torch.device("meta"):
        model = MixerModel(16, width=1024)
    layers, groups = map_layers(model, None), memory_check.groups_of(model, None, None)

    def forecast(max_in_cpu: int) -> memory_check.Forecast:
        config = base_config(tmp_path, dtype="fp32", max_in_cpu=max_in_cpu)
        return memory_check.Forecast(layers, groups, config, resolve(load_section(config), 0))

    def needed(max_in_cpu: int) -> int:
        found = forecast(max_in_cpu).paired((0, 0))
        items = budget(found.shape, found.terms, found.further(0))
        return max(sum(item.num_bytes for item in items), found.setup_bytes)

    elements = 40_000_000  # more than there are
    none, everything = needed(0), needed(elements)
    assert everything - none > 64 * MIB
    room = ((none + everything) // 2, 0)
    message = memory_check._fault(forecast(elements).paired(room), room, None, 1)
    assert message is not None
    path = "zero_optimization.offload_param.max_in_cpu"
    (advised,) = re.findall(rf'"{path}": (\d+) \(now {elements}\)', message.splitlines()[0])
    assert 0 < int(advised) < elements and memory_check._fault(forecast(int(advised)).paired(room), room, None, 1) is None


@pytest.mark.parametrize(("clip", "section"), [(1.0, {}), (0.0, {"keep_gradients": True})], ids=str)
def test_early_values_that_do_not_fit_are_refused_with_a_delay_that_needs_none(
    tmp_path: Path, clip: float, section: dict[str, Any]
) -> None:
    start_process_group()
    with torch.device("meta"):
        model = MixerModel(16, width=1024)
    layers, groups = map_layers(model, None), memory_check.groups_of(model, None, None)

    def forecast(room: tuple[int, int], **changed: Any) -> memory_check.Forecast:
        config = base_config(tmp_path, clip=clip, params="cpu", section={"gradient_host_share": 1.0} | section | changed)
        return memory_check.Forecast(layers, groups, config, resolve(load_section(config), 0)).paired(room)

    early, late = (memory_check._needed(forecast((0, 0), **each), 0) for each in ({}, {"optimizer_delay": 1.0}))
    assert early - late > 24 * MIB, "three quarters of the weights"
    message = memory_check._fault(forecast((late, 0)), (late, 0), None, 1)
    assert message is not None
    assert '"vertical_schedule.optimizer_delay": 1 (now 0.25)' in message.splitlines()[0]
    assert memory_check._fault(forecast((late, 0), optimizer_delay=1.0), (late, 0), None, 1) is None
    message = memory_check._fault(forecast((late - 1, 0)), (late - 1, 0), None, 1)
    assert message is not None and "optimizer_delay" not in message.splitlines()[0]


def train_one_step(config: dict[str, Any]) -> None:
    with running(config, partial(MixerModel, 3, width=1024), vertical=True) as (engine, _):
        engine.train_batch(iter(token_batches(1, 2, rows=1, shortest=4)[0]))


def test_the_ranks_of_a_host_share_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ds_vertical
    from ds_vertical.distributed import ranks as distributed_ranks

    start_process_group()
    monkeypatch.setattr(distributed_ranks, "ranks_on_this_host", lambda: 4)
    config = base_config(tmp_path / "swap", section={"host_memory_bytes": 100 * MIB})
    with pytest.raises(MemoryBudgetError, match=f"{25 * MIB} are allowed"):
        ds_vertical.initialize(model=MixerModel(3, width=1024), config=config)


def test_the_machines_own_limit_is_kept_where_none_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ds_vertical

    start_process_group()
    monkeypatch.setattr(host, "available_bytes", lambda: MIB)
    with pytest.raises(
        MemoryBudgetError,
        match=r"^host memory: needs \d+ bytes, .* too few \(most is .*too many as well",
    ):
        ds_vertical.initialize(model=MixerModel(3, width=1024), config=base_config(tmp_path / "swap"))
    monkeypatch.undo()
    monkeypatch.setattr(host, "lockable_bytes", lambda: MIB)
    with pytest.raises(MemoryBudgetError, match=r"locked memory: .*ulimit -l"):
        ds_vertical.initialize(model=MixerModel(3, width=1024), config=base_config(tmp_path / "swap"))
    assert not (tmp_path / "swap").exists()


@pytest.mark.parametrize(
    ("one_memory", "backend", "counts"), [(True, "", True), (False, "native", True), (False, "torch", False)]
)
def test_memory_that_a_device_locks_is_not_held_against_the_users_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_memory: bool, backend: str, counts: bool
) -> None:
    from ds_vertical.compat import accelerator
    from ds_vertical.engine import disk_check, memory_check
    from ds_vertical.model.layers import map_layers

    start_process_group()
    model, config = MixerModel(3, width=1024), base_config(tmp_path)
    config["zero_optimization"]["offload_param"]["buffer_count"] = 1
    section = resolve(load_section(config), 0)
    forecast = memory_check.Forecast(map_layers(model, None), memory_check.groups_of(model, None, None), config, section)
    monkeypatch.setattr(accelerator, "is_one_memory", lambda: one_memory)
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", backend)
    stock = sum(disk_check._locked_by_stock(forecast, config).values())  # on any device
    monkeypatch.setattr(host, "lockable_bytes", lambda: stock)
    with pytest.raises(MemoryBudgetError, match="ulimit -l") if counts else contextlib.nullcontext():
        disk_check.check_locked(forecast, config)
    monkeypatch.setattr(host, "lockable_bytes", lambda: stock - 1)
    with pytest.raises(MemoryBudgetError, match=f"locked memory: needs {stock} bytes for" if not counts else "ulimit -l"):
        disk_check.check_locked(forecast, config)


@pytest.mark.parametrize("limit", [None, 8 << 30])
def test_a_device_with_too_little_free_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    from ds_vertical.compat import accelerator
    from ds_vertical.engine import memory_check
    from ds_vertical.model.layers import map_layers

    start_process_group()
    model, config = MixerModel(3, width=1024), base_config(tmp_path)
    section = resolve(load_section(config), 0)
    monkeypatch.setattr(accelerator, "is_one_memory", lambda: False)
    forecast = memory_check.Forecast(map_layers(model, None), memory_check.groups_of(model, None, None), config, section)
    monkeypatch.setattr(accelerator, "free_device_bytes", lambda: 20 * MIB)
    with pytest.raises(MemoryBudgetError, match=r"^device memory: needs \d+ bytes, 20971520 are allowed") as refused:
        memory_check.check_memory(forecast, model.parameters(), limit)
    assert "host_memory_bytes" not in str(refused.value).splitlines()[0]
    monkeypatch.setattr(accelerator, "free_device_bytes", lambda: 1 << 30)
    memory_check.check_memory(forecast, model.parameters(), limit)


def test_the_budget_counts_the_micro_batches_that_deepspeed_derives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_vertical.engine import memory_check
    from ds_vertical.model.layers import map_layers

    start_process_group()
    monkeypatch.setattr(memory_check.distributed_ranks, "world_size", lambda: 2)
    for section, most in (({}, 32), ({"elastic": {"min_micro_batches": 4}}, 60)):
        model, config = MixerModel(3, width=1024), base_config(tmp_path, section=section, train_batch_size=64)
        del config["gradient_accumulation_steps"]
        resolved = resolve(load_section(config), 0)
        forecast = memory_check.Forecast(map_layers(model, None), memory_check.groups_of(model, None, None), config, resolved)
        assert forecast.terms.num_micro_batches == most


def test_activations_may_take_what_the_budget_leaves(tmp_path: Path) -> None:
    from ds_vertical.engine import memory_check
    from ds_vertical.model.layers import map_layers

    start_process_group()
    model, config = MixerModel(3, width=1024), base_config(tmp_path)
    section = resolve(load_section(config), 0)
    forecast = memory_check.Forecast(map_layers(model, None), memory_check.groups_of(model, None, None), config, section)
    limit = 8 << 30
    _, needed, left = memory_check.check_memory(forecast, model.parameters(), limit)
    assert 0 < needed < limit and limit - needed <= left < limit


@pytest.mark.parametrize("in_fp32", [False, True])
def test_a_layers_backward_has_its_small_gradients_a_large_one_and_an_fp32_copy_where_kernels_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_fp32: bool
) -> None:
    from ds_vertical.engine.budget import kernel_copies
    from ds_vertical.engine.memory_check import Forecast, groups_of
    from ds_vertical.model.layers import map_layers

    monkeypatch.setattr(kernel_copies, "sums_in_fp32", lambda _: in_fp32)
    start_process_group()
    model, config = MixerModel(3, width=1024), base_config(tmp_path, dtype="bf16")
    forecast = Forecast(map_layers(model, None), groups_of(model, None, None), config, resolve(load_section(config), 0))
    sizes = [param.numel() for param in model.blocks[0].parameters()]
    around = sum(param.numel() for name, param in model.named_parameters() if not name.startswith("blocks"))
    at_once = sum(size for size in sizes if size < LARGE) + max(sizes)
    assert sum(sizes) > at_once > around, "nothing that this could show"
    working = 2 * at_once + 4 * in_fp32 * max(param.numel() for param in model.parameters())
    items = {item.what: item.num_bytes for item in budget(forecast.shape, forecast.terms, forecast.further(0))}
    assert items["freed memory that is kept"] == working
    pairs = 2 * 2 * sum(sizes)  # all of the layer's, and those of the micro-batch before, which wait for them
    assert items["one layer's backward"] == working + pairs
    one = replace(forecast.terms, num_micro_batches=1)
    assert {item.what: item.num_bytes for item in budget(forecast.shape, one)}["one layer's backward"] == working


SUMS = """
import resource, sys, torch
from ds_vertical.engine.budget.kernel_copies import sums_in_fp32
from ds_vertical.io import host

host.map_blocks_from(4 << 20)
dtype = getattr(torch, sys.argv[1])
left, right = torch.ones(8, 8192, dtype=dtype), torch.ones(8, 1024, dtype=dtype)
left.t() @ right
open("/proc/self/clear_refs", "w").write("5")  # the peak is what is resident
before = host.resident_bytes()
made = left.t() @ right
peak = 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(sums_in_fp32(dtype), peak - before > 4 * made.numel() + made.nbytes // 2)
"""


@pytest.mark.parametrize(
    "most", [pytest.param("", id="all instructions"), pytest.param("AVX2", id="few", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(each, marks=pytest.mark.slow) for each in ("float16", "float32"))]
)
def test_a_kernels_copy_is_counted_where_it_takes_memory(dtype: str, most: str) -> None:
    """oneDNN takes no instructions beyond `ONEDNN_MAX_CPU_ISA`; what AVX2 lacks for bf16 and fp16 is summed in fp32."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": most} if most else dict(os.environ)
    command = [sys.executable, "-c", SUMS, dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=200)
    counted, taken = (word == "True" for word in done.stdout.split())
    assert counted == taken
    assert not counted if dtype == "float32" else counted or not most


def test_kernels_other_than_those_of_products_count_with_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution's weight, or all experts of a layer in one parameter."""
    from ds_vertical.engine.budget import kernel_copies

    monkeypatch.setattr(kernel_copies, "sums_in_fp32", lambda _: False)
    matrices, small, large = [(4096, 4096), (4096,)], (16, 16, 3, 3), (512, 512, 3, 3)
    assert not kernel_copies.are_summed_in_fp32([*matrices, small], [torch.bfloat16])
    assert kernel_copies.are_summed_in_fp32([*matrices, large], [torch.bfloat16])


@pytest.mark.parametrize(
    ("bytes_of_tries", "copied"),
    [((6, 6, 6), True), ((6, 6, 2), False), ((2.5, 9, 9), False), ((1, 0, 6), True)],
    ids=["copy", "other threads take pages at first", "once", "old pages"],
)
def test_one_try_without_a_copy_shows_that_a_kernel_makes_none(
    monkeypatch: pytest.MonkeyPatch, bytes_of_tries: tuple[float, ...], copied: bool
) -> None:
    """`bytes_of_tries`: which each try takes anew, an element of the result."""
    from ds_vertical.engine.budget import kernel_copies

    taken = dict(zip(kernel_copies._TRIES, bytes_of_tries, strict=True))
    pages = {rows: each * rows * kernel_copies._COLUMNS // mmap.PAGESIZE for rows, each in taken.items()}
    monkeypatch.setattr(kernel_copies.host, "is_trimmed", lambda: True)
    monkeypatch.setattr(kernel_copies, "_product", lambda rows, _: pages.get(rows, 0))
    assert kernel_copies.sums_in_fp32.__wrapped__(torch.bfloat16) == copied


class Pinned(torch.Tensor):
    """Host memory that a driver says to have locked."""

    def is_pinned(self, device: Any = None) -> bool:
        return True


def test_buffers_that_a_driver_has_locked_keep_their_pages() -> None:
    from ds_vertical.compat import swap_buffers

    buffer = torch.ones(1 << 20)
    swapper = SimpleNamespace(
        aligned_elements_per_buffer=1 << 18, param_buffer_count=4, available_buffer_ids=[0, 1, 2, 3], buffers=buffer
    )
    swapper.partitioned_swap_buffer, swapper.pending_writes = buffer.as_subclass(Pinned), 0
    with pytest.raises(RuntimeError, match="page-locked by the device's driver"):
        swap_buffers.rest_stock_buffers([SimpleNamespace(nvme_swapper=swapper)])
    assert bool((buffer == 1).all())


# ------------------------------------------------------------------------------------------------------- the host's memory


def test_what_was_freed_while_the_model_was_built_is_not_counted() -> None:
    """The C library keeps it: it lies below memory that is in use."""
    libc, num_bytes = ctypes.CDLL(None), 100_000
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(num_bytes) for _ in range(2000)]
    for block in blocks:
        ctypes.memset(block, 1, num_bytes)
    for block in blocks[:-1]:
        libc.free(block)
    before = host.resident_bytes()
    _, baseline = memory_check.host_room([], 1 << 40)
    assert baseline < before - 150_000_000
    libc.free(blocks[-1])


def test_a_control_groups_limit_counts_in_both_versions(tmp_path: Path) -> None:
    def group(folder: Path, limit: str, used: int, names: tuple[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / names[0]).write_text(limit)
        (folder / names[1]).write_text(str(used))
        (folder / "memory.stat").write_text("anon 1\ninactive_file 30\n")

    v1, v2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
    group(tmp_path / "memory" / "job", "1000", 600, v1)
    group(tmp_path / "memory", str(2**63 - 4096), 600, v1)
    group(tmp_path / "user" / "task", "max", 0, v2)
    group(tmp_path / "user", "500", 700, v2)
    membership = tmp_path / "membership"
    membership.write_text("5:cpu:/other\n4:cpuset,memory:/job\n0::/user/task\n")
    assert list(host._group_bytes(tmp_path, membership)) == [430, 0]
    membership.write_text("0::/gone\n")
    assert list(host._group_bytes(tmp_path, membership)) == []


def test_resting_gives_whole_pages_back_and_leaves_the_rest() -> None:
    with mmap.mmap(-1, 4 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        data = torch.frombuffer(pages, dtype=torch.uint8)
        data.fill_(7)
        host.rest_pages(data.data_ptr() + 100, 3 * mmap.PAGESIZE)
        assert data.view(4, -1).sum(1).tolist() == [7 * mmap.PAGESIZE, 0, 0, 7 * mmap.PAGESIZE]
        data.fill_(3)
        host.rest_pages(data.data_ptr() + 100, 100)
        assert data.sum() == 3 * data.numel()
        with pytest.raises(OSError, match="giving"):
            host.rest_pages(1 << 46, mmap.PAGESIZE)
        del data


def test_what_the_machine_has_is_no_more_than_it_says() -> None:
    total = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert 0 < host.available_bytes() < 1024 * total
    assert 0 < host.resident_bytes() < 1024 * total
    assert host.lockable_bytes() is None or host.lockable_bytes() >= 0  # type: ignore[operator]
    host.trim()


# ----------------------------------------------------------------------------------------------------- the peak of real runs


def train(folder: Path, enabled: bool) -> tuple[int, int | None]:
    """(peak of host memory, total of the budget printed) of the demo's model, M = 4, in a process of its own."""
    config = json.loads((ROOT / "configs" / "gpt_13m_cpu.json").read_text())
    for name in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][name]["nvme_path"] = str(folder / "swap")
    config["vertical_schedule"]["enabled"] = enabled
    (folder / "ds.json").write_text(json.dumps(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    script = [str(ROOT / "scripts" / "train.py"), "--deepspeed_config", str(folder / "ds.json"), "--steps", "3"]
    environment = os.environ | ranks | {"DS_VERTICAL_METRICS": str(folder)}
    done = subprocess.run([sys.executable, *script], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    last = (folder / "rank0.jsonl").read_text().splitlines()[-1]
    totals = re.findall(r"ds_vertical: host +total +([0-9.]+)$", done.stdout, re.M)
    return json.loads(last)["peak_host_bytes"], round(float(totals[0]) * MIB) if totals else None


@pytest.mark.slow
def test_peak_host_memory_is_within_a_tenth_of_its_formula_and_below_stocks(tmp_path: Path) -> None:
    (tmp_path / "stock").mkdir()
    (tmp_path / "vertical").mkdir()
    stock, _ = train(tmp_path / "stock", enabled=False)
    vertical, formula = train(tmp_path / "vertical", enabled=True)
    assert formula is not None and abs(vertical - formula) <= 0.1 * formula
    assert vertical < stock


# ---------------------------------------------------------------------------------------------------------- freed memory

FAULTS = """
import resource, sys
import torch
from ds_vertical.io import host

if int(sys.argv[1]):
    host.keep_freed_memory(int(sys.argv[1]))
for _ in range(16):  # a layer's gradients; an aligned block fits into a larger one only, so the heap grows a few times first
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gradients = [torch.empty(int(count) << 20, dtype=torch.uint8).fill_(1) for count in sys.argv[2:]]
    del gradients
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_freed_memory_is_used_again_instead_of_mapped_anew() -> None:
    def faults(kept_bytes: int, *mib: int) -> int:
        command = [sys.executable, "-c", FAULTS, *map(str, (kept_bytes, *mib))]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout)

    pages = (48 << 20) // mmap.PAGESIZE
    assert faults(128 << 20, 48, 16, 4, 12, 16) < pages // 10
    assert faults(0, 48) >= pages  # glibc by itself maps what is larger than 32 MiB anew each time
    assert faults(1, 24) < pages // 20  # however little was asked for, not less than glibc keeps by itself


HEAPS = """
import ctypes, resource, threading
from ds_vertical.distributed import ranks
from ds_vertical.io import host

ranks.limit_heaps()
host.keep_freed_memory(128 << 20)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def take(turn, taken):
    turn.wait()
    block = libc.malloc(24 << 20)
    ctypes.memset(block, 1, 24 << 20)
    libc.free(block)
    taken.set()
    end.wait()

end = threading.Event()
threads = [(threading.Event(), threading.Event()) for _ in range(5)]
for events in threads:
    threading.Thread(target=take, args=events, daemon=True).start()
for number, (turn, taken) in enumerate(threads):
    if number == 1:  # whoever comes first takes the pages
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    turn.set()
    taken.wait()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_threads_of_ranks_share_a_heap_whose_memory_is_kept() -> None:
    """Of several ranks alone, and unless the user has named a number of heaps."""

    def faults(**variables: str) -> int:
        environment = {key: each for key, each in os.environ.items() if key != "MALLOC_ARENA_MAX"} | variables
        command = [sys.executable, "-c", HEAPS]
        return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=200).stdout)

    pages = (24 << 20) // mmap.PAGESIZE
    assert faults(WORLD_SIZE="2") < pages // 10
    assert faults(WORLD_SIZE="1") >= 4 * pages
    assert faults(WORLD_SIZE="2", MALLOC_ARENA_MAX="8") >= 4 * pages


END = """
import ctypes, resource, sys
from ds_vertical.io import host

host.keep_freed_memory(1, int(sys.argv[1]))
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
sizes = [int(count) << 20 for count in sys.argv[2:]]
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(size) for size in sizes]
    for block, size in zip(blocks, sizes):
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_more_is_kept_at_the_heaps_end_than_a_piece_may_have() -> None:
    def faults(behind: int, *mib: int) -> int:
        command = [sys.executable, "-c", END, *map(str, (behind, *mib))]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout)

    many, pages = [24] * 8, (8 * 24 << 20) // mmap.PAGESIZE
    assert faults(0, *many) > pages // 2  # by itself glibc keeps less than these
    assert faults(256 << 20, *many) < pages // 10
    assert faults(256 << 20, 48) >= (48 << 20) // mmap.PAGESIZE  # a larger piece is mapped anew all the same


def test_an_engine_keeps_what_backward_frees_once_its_own_memory_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    monkeypatch.setattr(host, "keep_freed_memory", lambda num_bytes, *_: kept.append(num_bytes))
    config = small_buffers(base_config(tmp_path, dtype="fp32"))
    with running(config, MixerModel, vertical=True) as (engine, model):
        assert kept == [0]  # in place of what `prepare` has set
        kept.clear()
        engine.train_batch(iter(token_batches(1, config["gradient_accumulation_steps"])[0]))
        layer = sum(param.ds_numel for param in model.blocks[0].parameters())  # pyright: ignore
        assert len(kept) == 1 and kept[0] >= 4 * layer
