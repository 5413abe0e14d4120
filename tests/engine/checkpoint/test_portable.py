"""save_checkpoint(portable=True): stock DeepSpeed loads what our engine has trained on SSD, and goes on with it.

Bits: weights, masters and moments are the same after the load. What comes then differs in one thing from a run that did not
stop: stock's CPU Adam takes its powers of beta from pow() at the first step after a load, and multiplied them before (the
contract's N3). So stock's next steps are compared bit for bit with ours from the same powers, and with our own within what
follows: beta2^t is off by at most 2^-24, and an update, divided by the root of 1 - beta2^t, by that over 1 - beta2^t, of which
a parameter that starts at zero consists. In 16 bits a weight may then be rounded to the next number, and gradients follow.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import failing_worker
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import zero_to_fp32 as stock_script
from faults import small_files
from harness import (
    base_config,
    build_engine,
    contents,
    counters,
    differing,
    dispose,
    largest_relative,
    running,
    small_buffers,
)
from models import MixerModel, token_batches
from places import SUPPORT
from processes import start_ranks
from tied import FROZEN, TiedModel, config_in, masters, train
from torch import nn

from ds_vertical.compat import zero_params
from ds_vertical.engine.checkpoint import manifest, save, zero_to_fp32
from ds_vertical.errors import StorageError, TornStateError
from ds_vertical.io import files
from ds_vertical.io.aio import DiskError
from ds_vertical.offload.cpu_adam import Powers

HOST = {"params": "cpu", "optimizer": "cpu"}
BETAS = (0.9, 0.999)
Tensors = dict[str, torch.Tensor]
slow = pytest.mark.slow


def with_buffers(engine: Any, model: nn.Module) -> Tensors:
    return contents(engine, model) | dict(model.named_buffers())


def saved_counters(engine: Any) -> dict[str, Any]:
    """Those that DeepSpeed's format has."""
    return {name: value for name, value in counters(engine).items() if name != "micro_steps"}


def decaying(model: nn.Module) -> Any:
    """Two parameter groups: the second is small and its state stays in host memory."""
    trained = [param for param in model.parameters() if param.requires_grad]
    flat = [param for param in trained if len(getattr(param, "ds_shape", param.shape)) < 2]
    return [
        {"params": [param for param in trained if all(param is not each for each in flat)]},
        {"params": flat, "weight_decay": 0.0, "lr": 5e-4},
    ]


def stock_from(tmp_path: Path, folder: Path, dtype: str, **options: Any) -> tuple[Any, nn.Module, Any]:
    """A stock engine in host memory with the checkpoint in it, and the client state."""
    config = config_in(tmp_path / "host", dtype, **HOST, **options)
    engine, model = build_engine(config, partial(TiedModel, dtype, False), vertical=False, groups=decaying)
    torch.manual_seed(999)
    path, client_state = engine.load_checkpoint(str(folder))
    assert path is not None and type(engine).__name__ == "DeepSpeedEngine"
    return engine, model, client_state


def assert_stock_goes_on(tmp_path: Path, dtype: str, num_steps: int, **options: Any) -> dict[str, Any]:
    """Our engine saves twice after `num_steps`, in stock's format and in ours, and takes two steps more: as it is, and, from
    its own save, with the powers of beta that stock takes then. Stock loads and takes the same two steps. Returns the
    counters saved."""
    tiers = {key: options.pop(key) for key in ("params", "optimizer") if key in options}
    config = config_in(tmp_path / "ssd", dtype, **tiers, **options)
    portable, own, more = str(tmp_path / "portable"), str(tmp_path / "own"), range(num_steps, num_steps + 2)
    engine, model = build_engine(config, partial(TiedModel, dtype, False), vertical=True, groups=decaying)
    train(engine, range(num_steps))
    saved, numbers = with_buffers(engine, model), saved_counters(engine)
    assert engine.save_checkpoint(portable, client_state={"note": [1, "two"]}, portable=True)
    assert differing(saved, with_buffers(engine, model)) == []
    engine.save_checkpoint(own)
    train(engine, more)
    uninterrupted = with_buffers(engine, model)
    engine.load_checkpoint(own)
    engine.optimizer.driver.powers = Powers.made_with(BETAS)  # as in a new process of stock's
    losses, expected, ends = train(engine, more), with_buffers(engine, model), saved_counters(engine)
    dispose(engine)

    stock, model, client_state = stock_from(tmp_path, Path(portable), dtype, **options)
    assert client_state["note"] == [1, "two"]
    assert differing(saved, with_buffers(stock, model)) == []
    assert saved_counters(stock) == numbers
    assert train(stock, more) == losses
    found = with_buffers(stock, model)
    assert differing(expected, found) == []
    assert saved_counters(stock) == ends
    state = {name for name in found if name.endswith(("/master", "/exp_avg", "/exp_avg_sq"))}
    gaps = largest_relative({name: uninterrupted[name] for name in state}, found)
    assert max(gaps.values()) < (2**-24 / (1 - BETAS[1] ** (num_steps + 1)) if dtype == "fp32" else 1e-2)
    dispose(stock)
    return numbers


def test_stock_loads_it_and_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    assert_stock_goes_on(tmp_path, "fp32", 2)


@slow
@pytest.mark.parametrize(
    ("dtype", "num_steps", "options"),
    [
        ("bf16", 2, {"clip": 0.05}),
        ("bf16", 5, {"clip": 0.0, "section": {"optimizer_delay": 1.0}}),
        ("fp32", 5, {"clip": 0.05, "sub_group_size": 300_001}),
        ("fp32", 5, {"sub_group_size": 10**9}),
        ("fp32", 2, {"optimizer": "cpu"}),
        ("fp32", 2, HOST),
        ("fp32", 2, {"persistence": None}),
    ],
    ids=str,
)
def test_every_dtype_and_tier(tmp_path: Path, dtype: str, num_steps: int, options: dict[str, Any]) -> None:
    assert_stock_goes_on(tmp_path, dtype, num_steps, **options)


@slow
def test_a_loss_scale_that_has_moved_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not get_accelerator().is_fp16_supported():
        monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda _: True)
    scale = {"enabled": True, "initial_scale_power": 21, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 1}
    numbers = assert_stock_goes_on(tmp_path, "fp16", 5, fp16=scale)
    assert 0 < numbers["skipped_steps"] < 5


# ---- the same weights by both scripts


@slow
def test_stocks_script_makes_the_same_files_of_it_as_ours_of_our_own(tmp_path: Path) -> None:
    portable, own = tmp_path / "portable", tmp_path / "own"
    with running(config_in(tmp_path / "ssd"), TiedModel, vertical=True) as (engine, model):
        train(engine, range(2))
        engine.save_checkpoint(str(own))
        engine.save_checkpoint(str(portable), portable=True)
        engine.save_checkpoint(str(portable), tag="trained", portable=True, exclude_frozen_parameters=True)
        expected = masters(engine, model)
    assert sorted(path.name for path in portable.iterdir()) == [
        "global_step2",
        "latest",
        "trained",
        "zero_to_fp32.py",
        "zero_to_torch.py",
    ]
    assert (portable / "zero_to_fp32.py").read_bytes() == Path(stock_script.__file__).read_bytes()
    for words in ({}, {"exclude_frozen_parameters": True}, {"max_shard_size": "1MB"}):
        ours, theirs = tmp_path / f"ours{len(words)}{words}", tmp_path / f"theirs{len(words)}{words}"
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(own, ours, **words)
        tag = "trained" if "exclude_frozen_parameters" in words else "global_step2"
        stock_script.convert_zero_checkpoint_to_fp32_state_dict(str(portable), str(theirs), tag=tag, **words)
        assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
        for path in ours.glob("*.bin"):
            found, wanted = (torch.load(folder / path.name, weights_only=True) for folder in (ours, theirs))
            assert list(found) == list(wanted) and differing(found, wanted) == []
            assert differing({name: expected[name] for name in found}, found) == []
        for path in ours.glob("*.json"):
            assert json.loads(path.read_text()) == json.loads((theirs / path.name).read_text())
    assert len(list(ours.glob("*.bin"))) > 3
    frozen = torch.load(portable / "trained" / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    assert frozen["frozen_param_fragments"] is None and not frozen["module"].keys() & set(FROZEN)


# ---- complete or absent, beside ours


class Stopped(Exception):
    """Raised in a save on purpose."""


def gathered(model: nn.Module) -> list[str]:
    """Parameters that are there whole."""
    return [name for name, param in model.named_parameters() if not zero_params.is_partitioned(param)]


def test_a_due_step_that_cannot_be_taken_fails_the_save_and_tears_the_state(tmp_path: Path) -> None:
    made = small_buffers(base_config(tmp_path / "ssd", num_micro_batches=2, dtype="fp32", clip=0.5))
    made["vertical_schedule"] |= {"optimizer_delay": 1.0}
    with running(made, partial(MixerModel, 4, 512), vertical=True) as (engine, _):
        engine.train_batch(iter(token_batches(1, 2)[0]))
        assert engine.optimizer.driver.backlog.due
        failing_worker.cut_state(engine)
        with pytest.raises(DiskError, match="the file ends at byte"):
            engine.save_checkpoint(str(tmp_path / "saved"), portable=True)
        with pytest.raises(TornStateError):
            engine.save_checkpoint(str(tmp_path / "saved"), portable=True)
    assert not (tmp_path / "saved").exists()


def test_it_is_complete_or_absent_and_leaves_the_run_and_our_checkpoints_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"

    def stop_at(point: str, reached: str) -> None:
        if reached == point:
            raise Stopped(point)

    made = config_in(tmp_path / "ssd", persistence=None)
    with running(made, partial(TiedModel, "fp32", False), vertical=True) as (engine, model):
        train(engine, range(1))
        engine.save_checkpoint(str(folder), tag="one")
        there = gathered(model)
        assert there, "no parameter stays on the device"
        before = with_buffers(engine, model)
        for point in ("folder made", "folder complete"):
            monkeypatch.setattr(save, "reach", partial(stop_at, point))
            with pytest.raises(Stopped):
                engine.save_checkpoint(str(folder), tag="one", portable=True)
        monkeypatch.undo()
        monkeypatch.setattr(files, "free_bytes", lambda path: 4096)
        with pytest.raises(StorageError, match="a portable checkpoint needs .* bytes for this rank until it is complete"):
            engine.save_checkpoint(str(folder), tag="two", portable=True)
        monkeypatch.undo()
        with small_files(6_000_000), pytest.raises(StorageError, match="optim_states.pt: write: .*free space there"):
            engine.save_checkpoint(str(folder), tag="two", portable=True)
        with pytest.raises(Exception, match="pickle"):
            engine.save_checkpoint(str(folder), tag="two", client_state={"f": lambda: None}, portable=True)
        assert gathered(model) == there
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "one", "zero_to_fp32.py"]
        manifest.check_manifest(folder / "one", manifest.read_rank(folder / "one", 0))
        engine.save_checkpoint(str(folder), tag="two", portable=True, save_latest=False)
        assert (folder / "latest").read_text() == "one" and manifest.complete_tags(folder) == ["one"]
        assert (folder / "zero_to_fp32.py").read_bytes() == save.SCRIPT.read_bytes(), "the script of the others is gone"
        assert sorted(path.name for path in (folder / "two").iterdir()) == [
            "ds_vertical.portable",
            "zero_pp_rank_0_mp_rank_00_model_states.pt",
            "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        ]
        assert {path.stat().st_mode & 0o777 for path in folder.rglob("*")} == {0o600, 0o700}
        assert gathered(model) == there
        assert differing(before, with_buffers(engine, model)) == []
        engine.load_checkpoint(str(folder), tag="two")
        assert differing(before, with_buffers(engine, model)) == []
        engine.load_checkpoint(str(folder), tag="one")
        expected = train(engine, range(1, 3))
        engine.load_checkpoint(str(folder))
        assert train(engine, range(1, 3)) == expected


# ---- two ranks


@slow
@pytest.mark.timeout(1000)
def test_both_ways_out_with_two_ranks(tmp_path: Path) -> None:
    """Odd sizes, so that the last rank's share ends with padding."""
    worker = SUPPORT / "rank_worker.py"
    description = tmp_path / "job.json"
    description.write_text(json.dumps({"folder": str(tmp_path / "swap"), "out": str(tmp_path), "exits": ["fp32", "bf16"]}))
    start_ranks([sys.executable, str(worker), str(description)], tmp_path)
    ranks = [torch.load(tmp_path / f"rank{number}.pt", weights_only=True) for number in range(2)]
    for dtype in ("fp32", "bf16"):
        for rank in ranks:
            assert rank[dtype]["differing"] == [] and rank[dtype]["goes on"] == {}
        exported, weights = ranks[0][dtype]["exported"], ranks[0][dtype]["weights"]
        assert exported.keys() == weights.keys()
        shares = [rank[dtype]["masters"] for rank in ranks]
        for name, weight in weights.items():
            whole = torch.cat([share[f"{name}/master"] for share in shares])[: weight.numel()]
            assert torch.equal(exported[name], whole.view_as(weight)), name
        assert differing(exported, ranks[0][dtype]["by stock"]) == []
