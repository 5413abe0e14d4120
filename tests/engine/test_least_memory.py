"""The least host memory that `initialize` names is what the run then takes: a process of its own, at that least."""

from __future__ import annotations

import ctypes
import functools
import inspect
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import base_config, running, small_buffers, start_process_group
from models import MixerModel, token_batches
from places import ROOT
from torch import nn

from ds_vertical.engine import api
from ds_vertical.engine.budget.kernel_copies import sums_in_fp32
from ds_vertical.errors import LayerError
from ds_vertical.io import host
from ds_vertical.planner import memory_budget

MIB = 1 << 20
ALONE = "DS_VERTICAL_TEST_ALONE"
DIMS = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 64_000,  # whose gradients are larger than what the C library keeps by itself
    "tie_word_embeddings": False,
}
VOCAB = 401  # of a model 64 wide: the gradients of its ends are larger than all that a layer's backward frees
BELOW = 96 * MIB  # of the formula: what libraries may load at their first use, and did not


needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library has no mallinfo2")


@pytest.fixture
def heap() -> Iterator[None]:
    """What `prepare` sets for the whole process ends with the test."""
    yield
    host.keep_freed_memory(0)


def trained(folder: Path, host_memory_bytes: int, steps: int) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit status, log and records of the steps of a training process."""
    folder.mkdir()
    config = json.loads((ROOT / "configs" / "gpt_101m_cpu.json").read_text())
    config |= {"gradient_clipping": 0.0, "vertical_schedule": {"enabled": True, "host_memory_bytes": host_memory_bytes}}
    for name in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][name]["nvme_path"] = str(folder / "swap")
    config["zero_optimization"]["offload_param"] |= {"buffer_count": 4, "buffer_size": 512 * 64_000}
    (folder / "ds.json").write_text(json.dumps(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = ["--deepspeed_config", str(folder / "ds.json"), "--model", "llama", "--steps", str(steps), "--seq", "8"]
    words += ["--dims", *(f"{key}={json.dumps(value)}" for key, value in DIMS.items()), "--out", str(folder / "out")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "train.py"), *words],
        env=os.environ | ranks | {"DS_VERTICAL_METRICS": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
    )
    metrics = folder / "rank0.jsonl"
    records = metrics.read_text().splitlines() if metrics.exists() else []
    return done.returncode, done.stdout + done.stderr, [json.loads(line) for line in records]


class SharedMixer(MixerModel):
    """Every block adds the same parameter."""

    def __init__(self, vocab: int) -> None:
        super().__init__(width=64, vocab=vocab)
        self.shared = nn.Parameter(torch.zeros(64))
        for block in self.blocks:
            block.shared = self.shared
            block.forward = partial(_with_shared, block)  # type: ignore[method-assign]


def _with_shared(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return type(block).forward(block, x) + block.shared


@pytest.mark.parametrize(
    ("limit", "keeps_freed", "spare", "count"),
    [
        (None, True, 10.0, 0),
        (8 << 30, True, memory_budget.SPARE_SHARE, 0),
        (8 << 30, True, 1000.0, 3),
        (8 << 30, False, 1000.0, 3 + 2 * 3),
    ],
    ids=["no limit", "room", "limit", "short"],
)
@pytest.mark.parametrize("build", [partial(MixerModel, width=64, vocab=VOCAB), partial(SharedMixer, VOCAB)], ids=["", "shared"])
def test_a_run_at_its_least_gives_freed_memory_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
    keeps_freed: bool,
    spare: float,
    count: int,
    build: Callable[[], nn.Module],
) -> None:
    """Ahead of the REDUCE of the last layer, of the first and of what is outside them, where little is left of a limit; and
    where less is left behind each backward of an end of the model, of three micro-batches. `spare`: in place of a tenth."""
    chosen = partial(replace, keeps_freed=keeps_freed)
    monkeypatch.setattr(memory_budget, "with_room", lambda terms, *_: chosen(terms))
    monkeypatch.setattr(api, "SPARE_SHARE", spare)
    config = small_buffers(base_config(tmp_path, dtype="fp32", section={"host_memory_bytes": limit}))
    batches, trimmed, trim = token_batches(2, 3), [], host.trim
    with running(config, build, vertical=True) as (engine, _):
        engine.train_batch(iter(batches[0]))  # with the self-check
        monkeypatch.setattr(host, "trim", lambda: trimmed.append(trim()))
        engine.train_batch(iter(batches[1]))
    assert len(trimmed) == count


class Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2; `hblks`: how many blocks lie outside the heap."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", *"vwxyz")]


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test run in a process of its own: blocks go into holes of the heap that other tests have left in this one."""

    @functools.wraps(test)
    def run(request: pytest.FixtureRequest, **given: Any) -> None:
        if os.environ.get(ALONE):
            test(**given)
            return
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::{request.node.name}"]
        done = subprocess.run(command, env=os.environ | {ALONE: "1"}, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]

    first = inspect.signature(run, follow_wrapped=False).parameters["request"]
    vars(run)["__signature__"] = inspect.Signature([first, *inspect.signature(test).parameters.values()])
    return run


def lies_in_the_heap(num_bytes: int) -> bool:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes, libc.mallinfo2.restype = ctypes.c_void_p, [ctypes.c_void_p], Mallinfo
    before = libc.mallinfo2().hblks
    block = libc.malloc(num_bytes)
    after = libc.mallinfo2().hblks
    libc.free(block)
    return after == before


@alone
@needs_glibc
@pytest.mark.parametrize(
    "environment",
    [{}, pytest.param({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432"}, marks=pytest.mark.slow)],
    ids=["", "users"],
)
def test_only_an_engine_or_an_error_of_initialize_ends_what_prepare_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], heap: None
) -> None:
    import ds_vertical

    start_process_group()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    lies_in_the_heap(16 << 20)  # its free raises glibc's threshold, as long as nobody has set one
    prepared = ds_vertical.prepare(base_config(tmp_path / "swap"))
    assert lies_in_the_heap(8 << 20) == bool(environment)
    with pytest.raises(LayerError):
        ds_vertical.initialize(model=nn.Linear(4, 4), config=prepared)
    assert lies_in_the_heap(8 << 20)


TOP = """
import ctypes, resource, types
import torch
from ds_vertical.engine.assembly import Assembly
from ds_vertical.io import host

host.map_blocks_from(host.MAPPED_AHEAD)
optimizer = types.SimpleNamespace(optimizer_swapper=None)
Assembly.give_memory_back(types.SimpleNamespace(module=torch.nn.Module(), optimizer=optimizer))
libc, size = ctypes.CDLL(None), 15 << 20
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(size) for _ in range(4)]  # together no hole of the imports holds them, and nothing lies behind them
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@needs_glibc
def test_an_engine_keeps_what_is_freed_at_the_heaps_top_from_its_first_step_on() -> None:
    done = subprocess.run([sys.executable, "-c", TOP], capture_output=True, text=True, check=True, timeout=200)
    assert int(done.stdout.split()[-1]) < 600  # of 15360 pages


@pytest.mark.slow
@alone
@needs_glibc
def test_no_large_block_lies_in_the_heap_while_the_model_is_built(tmp_path: Path, heap: None) -> None:
    """Each of these is freed while small ones behind it are in use, which would leave a hole of its size."""
    import ds_vertical

    start_process_group()
    ds_vertical.prepare(base_config(tmp_path / "swap"))
    libc, num_bytes = ctypes.CDLL(None), 8 << 20
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    libc.free(libc.malloc(num_bytes))  # from then on blocks of this size would lie in the heap
    before, blocks = host.resident_bytes(), []
    for _ in range(20):
        blocks.append((libc.malloc(num_bytes), libc.malloc(100)))
        ctypes.memset(blocks[-1][0], 1, num_bytes)
    for large, _ in blocks:
        libc.free(large)
    assert host.resident_bytes() < before + 2 * num_bytes
    for _, small in blocks:
        libc.free(small)


def test_the_gradients_of_one_end_count_at_a_time() -> None:
    """Those of the head have been added to their sum by the time that the embedding's are made."""
    from planned_runs import Setting

    setting = Setting("llama, small layers", "bf16", 0.0, 2)
    found = setting.candidate(4e9)
    assert found is not None
    shape = setting.forecast(setting.config(found, 4e9)).shape
    embedding, norm = 128 * 3001, 128
    assert 2 * embedding <= shape.pre_elements <= 2 * embedding + 2 * norm
    copied = 4 * embedding * sums_in_fp32(torch.bfloat16)
    assert shape.freed.most == 2 * (embedding + norm) + copied == shape.working_bytes
    assert 0 < shape.freed.of_layers < shape.freed.most
    planned = found.shape.freed  # which knows what autograd keeps of a layer's forward, since it knows the tokens
    assert replace(planned, in_layers=0) == replace(shape.freed, in_layers=0)
    assert planned.in_layers > shape.freed.in_layers == shape.freed.of_layers


def test_what_is_faster_is_given_up_in_the_order_of_what_it_brings() -> None:
    """Gradients in pairs without kept memory take more than the other way round where layers are large."""
    terms, least = memory_budget.BudgetTerms(4, one_memory=True), {(True, True): 9, (False, False): 4}
    expected = {9: (True, True), 8: (True, False), 5: (False, False), 1: (False, False)}
    check(terms, least | {(True, False): 6, (False, True): 7}, expected)
    check(terms, least | {(True, False): 8, (False, True): 7}, expected | {7: (False, True), 6: (False, False)})


def check(
    terms: memory_budget.BudgetTerms, taken: dict[tuple[bool, bool], int], expected: dict[int, tuple[bool, bool]]
) -> None:
    for room, (pairs, keeps_freed) in expected.items():

        def fits(each: memory_budget.BudgetTerms, room: int = room) -> bool:
            return taken[each.pairs, each.keeps_freed] <= room

        found = memory_budget.with_room(terms, fits)
        assert (found.pairs, found.keeps_freed) == (pairs, keeps_freed)
        assert memory_budget.with_room(terms, fits, trims=False).keeps_freed  # jemalloc, musl


@pytest.mark.slow
def test_a_run_takes_what_the_least_says_and_no_more(tmp_path: Path) -> None:
    _, refusal, _ = trained(tmp_path / "refused", 1, 1)
    (least,) = set(re.findall(r'"vertical_schedule.host_memory_bytes": (\d+)', refusal))
    status, log, records = trained(tmp_path / "least", int(least), 5)
    assert status == 0, log[-3000:]
    (total,) = re.findall(r"ds_vertical: host +total +([0-9.]+)$", log, re.M)
    formula, peak = round(float(total) * MIB), records[-1]["peak_host_bytes"]
    assert formula <= int(least)
    assert 0.9 * formula - BELOW <= peak <= int(least), (formula, peak, least)
