"""Files spread over several SSDs: the bits of stock with one, in training, in stock's own calls, saved, loaded and exported."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from harness import assert_identical, base_config, contents, differing, run_arm, running, small_buffers
from models import MixerModel, token_batches
from places import SUPPORT
from processes import start_ranks
from resuming import CLIP, config_in, loaded, model_of, train

from ds_vertical.engine import machine_cache
from ds_vertical.engine.checkpoint import zero_to_fp32
from ds_vertical.engine.checkpoint.manifest import read_rank

BUILD = partial(MixerModel, 3)
SSDS = ("ssd0", "ssd1", "ssd2")
EVERYTHING_ON_SSD = {"device": "ssd", "keep": "everything", "keep_device": "ssd"}
slow = pytest.mark.slow


def with_paths(config: dict[str, Any], folder: Path, count: int = 2) -> dict[str, Any]:
    """The configuration, which has its files in `folder / "ssd0"`, with them spread over so many folders."""
    paths = [str(folder / ssd) for ssd in SSDS[:count]]
    return config | {"vertical_schedule": config["vertical_schedule"] | {"nvme_paths": paths}}


def files_below(folder: Path) -> list[Path]:
    """All but locks."""
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.parametrize(
    ("count", "shares", "section"),
    [
        (2, (0.5, 0.5), {"gradient_host_share": 0.5, "activations": EVERYTHING_ON_SSD, "verify": True}),
        pytest.param(3, (0.7, 0.2, 0.1), {"gradient_host_share": 0.0}, marks=slow),
        pytest.param(2, (0.9, 0.1), {"order": "horizontal"}, marks=slow),
        pytest.param(2, (0.25, 0.75), {"overlap": False, "activations": {"device": "ssd"}}, marks=slow),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=slow)])
def test_several_ssds_give_stocks_bits_and_every_file_lies_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, count: int, shares: tuple[float, ...], section: dict[str, Any]
) -> None:
    monkeypatch.setattr(machine_cache, "shares_of", lambda folders: shares)
    build, batches = partial(MixerModel, 3, 512 if dtype == "fp32" else 768), token_batches(3, 3)
    found: list[Path] = []
    stock = run_arm(small_buffers(base_config(tmp_path / "stock", dtype=dtype), 700_000), build, batches, vertical=False)
    config = small_buffers(base_config(tmp_path / "ssd0", dtype=dtype, section=section), 700_000)
    vertical = run_arm(
        with_paths(config, tmp_path, count),
        build,
        batches,
        vertical=True,
        between=lambda engine, step: found.extend(files_below(tmp_path) if step == 1 else ()),
    )
    assert_identical(stock, vertical)
    found = [path for path in found if not path.is_relative_to(tmp_path / "stock")]
    names = [{p.relative_to(tmp_path / ssd).with_suffix("") for p in found if p.suffix == f".{ssd}"} for ssd in SSDS[:count]]
    assert all(each == names[0] for each in names) and len(found) == count * len(names[0])
    patterns = ["*_param.tensor.swp", "exp_avg-*.swp"]
    patterns += ["gradients.swp"] if "gradient_host_share" in section else []
    patterns += ["activations/rank0.bin"] if "activations" in section else []
    patterns += ["kept/kept0.bin"] if section.get("activations") == EVERYTHING_ON_SSD else []
    for pattern in patterns:
        assert any(name.match(pattern) for name in names[0]), pattern
    fixed = [path for path in found if not {"activations", "kept"} & set(path.parts)]  # the others grow
    sizes = [sum(path.stat().st_size for path in fixed if path.suffix == f".{ssd}") for ssd in SSDS]
    for size, share in zip(sizes, shares, strict=False):
        assert abs(size / sum(sizes) - share) < 0.02


@slow
def test_stocks_own_calls_read_and_write_what_lies_on_two_ssds(tmp_path: Path) -> None:
    """Between two steps: state by its parameter, weights gathered and changed, in one folder and in two."""
    found = []
    for name in ("one", "two"):
        config = config_in(tmp_path / name / "ssd0")
        config = with_paths(config, tmp_path / name) if name == "two" else config
        with running(config, model_of, vertical=True) as (engine, model):
            train(engine, range(2))
            params = list(model.parameters())
            read = [safe_get_full_fp32_param(param) for param in params]
            read += [safe_get_full_optimizer_state(param, "exp_avg") for param in params]
            safe_set_full_fp32_param(params[1], read[1] * 2)
            with deepspeed.zero.GatheredParameters(params[2], modifier_rank=0):
                params[2].data.mul_(0.5)
            losses = train(engine, range(2, 4))
            found.append((losses, read, contents(engine, model)))
    (losses, read, state), (others, others_read, others_state) = found
    assert losses == others and differing(state, others_state) == []
    assert all(torch.equal(one, other) for one, other in zip(read, others_read, strict=True))


@slow
@pytest.mark.parametrize("clip", [0.0, CLIP])
@pytest.mark.parametrize(("first", "then"), [(2, 2), (2, 1), (1, 2), (2, 3)])
def test_a_run_resumes_on_other_ssds_with_the_same_bits(tmp_path: Path, clip: float, first: int, then: int) -> None:
    with running(config_in(tmp_path / "whole", clip=clip), model_of, vertical=True) as (engine, model):
        losses = train(engine, range(5))
        expected = contents(engine, model)
    saved = tmp_path / "saved"
    with running(with_paths(config_in(tmp_path / "a" / "ssd0", clip=clip), tmp_path / "a", first), model_of, vertical=True) as (
        engine,
        model,
    ):
        found = train(engine, range(2))
        engine.save_checkpoint(str(saved))
        assert any(".ssd1." in name for name in read_rank(saved / "global_step2", 0).files) == (first > 1)
        found += train(engine, range(2, 3))
        engine.save_checkpoint(str(saved))
        assert found + train(engine, range(3, 5)) == losses
        assert differing(expected, contents(engine, model)) == []
    config = with_paths(config_in(tmp_path / "b" / "ssd0", clip=clip), tmp_path / "b", then)
    with loaded(config, saved, tag="global_step2") as (engine, model):
        assert train(engine, range(2, 5)) == losses[2:]
        assert differing(expected, contents(engine, model)) == []
    exported = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(saved, tag="global_step3")
    with loaded(config, saved, tag="global_step3") as (engine, model):
        masters = {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
    assert all(torch.equal(masters[name], exported[name]) for name in masters)


@slow
def test_two_ranks_have_the_same_bits_on_one_folder_and_on_two(tmp_path: Path) -> None:
    """Trained, saved, and resumed on the other number of folders; each rank's files lie in both."""
    start_ranks([sys.executable, str(SUPPORT / "ssd_rank_worker.py"), str(tmp_path)], tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["on 1"] == found["on 2"] == found["resumed from 1"] == found["resumed from 2"]
        assert found["files on 1"] == [0, 0] and found["files on 2"][0] == found["files on 2"][1] > 6
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".ssd0", ".ssd1") and "saved" not in str(path)]
