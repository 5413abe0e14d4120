"""The zero_to_fp32.py beside our checkpoints: alone it gives the fp32 masters of all ranks, and nothing of what is damaged."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import zero_to_fp32 as stock_script
from faults import flip
from harness import differing, running
from safetensors.torch import load_file
from tied import FROZEN, Tensors, TiedModel, config_in, masters, train

from ds_vertical.engine.checkpoint import manifest, save, zero_to_fp32
from ds_vertical.engine.checkpoint.manifest import FileRange, RankManifest, SavedFile, TensorEntry
from ds_vertical.engine.checkpoint.zero_to_fp32 import ExportError, get_fp32_state_dict_from_zero_checkpoint
from ds_vertical.io import checksums

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """A checkpoint after two steps, and what is in it."""
    return checkpoint_of(tmp_path_factory.mktemp("export"), "fp32")


def checkpoint_of(folder: Path, dtype: str, **options: Any) -> tuple[Path, Tensors]:
    with running(config_in(folder / "ssd", dtype, **options), partial(TiedModel, dtype), vertical=True) as (engine, model):
        train(engine, range(2))
        engine.save_checkpoint(str(folder / "saved"), tag="one", client_state={"note": "mine"})
        train(engine, range(2, 3))  # what comes after the save is not in it
        engine.load_checkpoint(str(folder / "saved"))
        expected = masters(engine, model)
    return folder / "saved", expected


def alone(script: Path, *words: str | Path, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the script in a process that has torch and neither ds_vertical, DeepSpeed nor what else is named."""
    hidden = ("ds_vertical", "deepspeed", "huggingface_hub", "transformers", *without)
    code = f"import runpy, sys; sys.modules |= dict.fromkeys({hidden!r}); sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, str(script), *map(str, words)]
    return subprocess.run(command, cwd=script.parent, capture_output=True, text=True, timeout=200)


# ---- DeepSpeed's own


def test_deepspeeds_own_functions_read_it_where_ds_vertical_runs(tmp_path: Path, saved: tuple[Path, Tensors]) -> None:
    folder, expected = saved
    assert differing(expected, stock_script.get_fp32_state_dict_from_zero_checkpoint(str(folder))) == []
    stock_script.convert_zero_checkpoint_to_fp32_state_dict(str(folder), str(tmp_path), tag="one")
    assert differing(expected, torch.load(tmp_path / "pytorch_model.bin", weights_only=True)) == []
    assert stock_script.load_state_dict_from_zero_checkpoint(TiedModel(), str(folder)).embed.weight.dtype is torch.float32
    flipped = shutil.copytree(folder, tmp_path / "copy") / "one" / "rank0"
    flip(next(flipped.glob("chunk*.master.*")), 5000)
    with pytest.raises(ExportError, match="another checksum"):
        stock_script.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "copy"))


def test_deepspeeds_own_script_by_itself_ends_with_what_to_use(saved: tuple[Path, Tensors]) -> None:
    spec = importlib.util.spec_from_file_location("by_itself", stock_script.__file__)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with pytest.raises(ValueError, match=r"read_this_with_the_zero_to_fp32\.py_in_the_folder_above_model_states\.pt is not a"):
        script.get_fp32_state_dict_from_zero_checkpoint(str(saved[0]))


# ---- what it gives


def test_alone_it_gives_masters_frozen_weights_buffers_and_second_names(tmp_path: Path, saved: tuple[Path, Tensors]) -> None:
    folder, expected = saved
    script = folder / "zero_to_fp32.py"
    assert os.access(script, os.X_OK)
    done = alone(script, ".", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "checksums were not verified" not in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["pytorch_model.bin"]
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert differing(expected, found) == [] and "cache" not in found
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    untrained = TiedModel()
    assert not torch.equal(found["blocks.0.down.weight"], untrained.blocks[0].get_parameter("down.weight"))
    untrained.load_state_dict(found)


def test_without_xxhash_it_says_so_and_writes_numbered_files(tmp_path: Path, saved: tuple[Path, Tensors]) -> None:
    folder, expected = saved
    words = ("-t", "one", "--safe_serialization", "--max_shard_size", "2MB", "--exclude_frozen_parameters", "--debug")
    done = alone(folder / "zero_to_fp32.py", folder, tmp_path, *words, without=("xxhash",))
    assert done.returncode == 0, done.stderr
    assert "checksums were not verified: the package xxhash is not installed" in done.stderr
    assert "blocks.1.up.weight: [512, 512] from 1 ranks" in done.stdout
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found = {name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    assert found.keys() == expected.keys() - set(FROZEN)
    assert differing({name: expected[name] for name in found}, found) == []
    once = sum(tensor.nbytes for name, tensor in found.items() if name != "head.weight")
    assert index["metadata"]["total_size"] == once


def test_one_file_of_weights_is_in_memory_at_a_time(
    tmp_path: Path, saved: tuple[Path, Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: dict[int, int] = {}
    most: list[int] = []
    gather = zero_to_fp32.Checkpoint._gather

    def watched(self: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = gather(self, name, dtype)
        alive[id(tensor)] = tensor.nbytes
        weakref.finalize(tensor, alive.pop, id(tensor))
        most.append(sum(alive.values()))
        return tensor

    monkeypatch.setattr(zero_to_fp32.Checkpoint, "_gather", watched)
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(saved[0], tmp_path, max_shard_size="1100KB")
    assert len(list(tmp_path.glob("*.bin"))) > 4
    assert max(most) <= 1_100_000


def test_files_of_others_beside_its_own_stay(
    tmp_path: Path, saved: tuple[Path, Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with the name under which it once wrote, and all of a folder that is there; where the conversion fails, too."""
    out = tmp_path / "out"
    out.mkdir()
    theirs = {name: f"theirs: {name}" for name in (".pytorch_model.bin.part", ".model.safetensors.part", ".zero_to_fp32-1")}
    for name, text in theirs.items():
        (out / name).write_text(text)
    for safe in (False, True):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(saved[0], out, safe_serialization=safe)
    assert differing(saved[1], torch.load(out / "pytorch_model.bin", weights_only=True)) == []
    plain = tmp_path / "plain"
    plain.touch()
    assert (out / "pytorch_model.bin").stat().st_mode == plain.stat().st_mode
    expected = theirs.keys() | {"pytorch_model.bin", "model.safetensors"}
    assert {each.name for each in out.iterdir()} == expected

    def fails(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="no room"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(saved[0], out)
    assert {each.name for each in out.iterdir()} == expected
    assert all((out / name).read_text() == text for name, text in theirs.items())


def test_the_library_calls(saved: tuple[Path, Tensors]) -> None:
    folder, expected = saved
    assert differing(expected, get_fp32_state_dict_from_zero_checkpoint(folder)) == []
    lazy = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="one", lazy_mode=True)
    assert lazy["head.weight"] is lazy["embed.weight"] and lazy["order"].dtype == torch.int64
    assert {name: each.shape for name, each in lazy.items()} == {name: each.shape for name, each in expected.items()}
    assert differing(expected, {name: each.contiguous() for name, each in lazy.items()}) == []
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(TiedModel(), folder)
    assert differing({name: expected[name] for name in dict(model.named_parameters())}, dict(model.named_parameters())) == []


def test_the_script_stands_alone_and_knows_the_format() -> None:
    """It repeats what it cannot import."""
    source = ast.parse(save.SCRIPT.read_text())
    imported = {alias.name for node in ast.walk(source) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(source) if isinstance(node, ast.ImportFrom)}
    installed = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert installed == {"torch", "xxhash", "safetensors"}
    theirs = (zero_to_fp32.FORMAT, zero_to_fp32.NAME, zero_to_fp32.LATEST)
    assert theirs == (manifest.FORMAT, manifest.NAME, manifest.LATEST)
    assert (zero_to_fp32.ALGORITHM, zero_to_fp32.LOOSE) == (checksums.ALGORITHM, save.LOOSE)


@slow
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bf16", {}),
        ("bf16", {"optimizer": "cpu"}),
        ("fp32", {"params": "cpu"}),
        ("fp32", {"sub_group_size": 300_001, "section": {"optimizer_delay": 1.0}}),
        ("fp32", {"persistence": None, "max_in_cpu": 600_000}),
        ("fp32", {"section": {"optimizer_host_share": 0.6}}),
    ],
    ids=str,
)
def test_every_dtype_and_tier(tmp_path: Path, dtype: str, options: dict[str, Any]) -> None:
    folder, expected = checkpoint_of(tmp_path, dtype, **options)
    assert differing(expected, get_fp32_state_dict_from_zero_checkpoint(folder)) == []


# ---- what it refuses


@pytest.fixture
def copied(tmp_path: Path, saved: tuple[Path, Tensors]) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "saved"))


def convert(folder: Path, *words: str) -> int:
    return zero_to_fp32.main([str(folder), str(folder.parent / "out"), *words])


def damages(rank: Path) -> Iterator[tuple[str, Any]]:
    master = next(path for path in sorted(rank.glob("chunk*.master.0.bin")))
    yield f"{master.name}: bytes .* have another checksum than when saved", partial(flip, master, 5000)
    yield f"{master.name}: 4096 bytes, .* were saved", partial(os.truncate, master, 4096)
    yield f"{master.name}: no bytes", master.unlink
    yield "memory.bin: no bytes", (rank / save.MEMORY).unlink
    yield "loose.pt: bytes .* have another checksum", partial(flip, rank / "loose.pt", 300)
    yield "ds_vertical.json: (not as it was saved|cannot be read)", partial(flip, rank / manifest.NAME, 200)
    yield "rank0/ds_vertical.json: cannot be read .No such file", (rank / manifest.NAME).unlink
    yield "one: no ds_vertical.json in it: no checkpoint, or not a complete one", (rank.parent / manifest.NAME).unlink
    yield "a manifest in it is none", partial((rank.parent / manifest.NAME).write_text, '{"format": 1, "checksums": "xxh3_64"}')
    yield "ds_vertical.json: format 2", partial((rank.parent / manifest.NAME).write_text, '{"format": 2}')


@pytest.mark.parametrize("number", range(10))
def test_what_is_damaged_is_refused_by_name_and_nothing_is_written(
    copied: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    said, damage = list(damages(copied / "one" / "rank0"))[number]
    damage()
    assert convert(copied) == 1
    error = capsys.readouterr().err
    assert error.startswith("zero_to_fp32.py: error: ") and len(error.splitlines()) == 1
    assert re.search(said, error), error
    assert not (copied.parent / "out").exists()


def test_what_is_no_checkpoint_of_ours_is_refused_with_what_to_do(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "stock").mkdir()
    (copied / "stock" / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    assert convert(copied, "-t", "stock") == 1
    assert f"python -m deepspeed.utils.zero_to_fp32 {copied} OUTPUT_DIR -t stock" in capsys.readouterr().err
    assert convert(copied, "-t", "absent") == 1
    assert f"complete ones in {copied}: one" in capsys.readouterr().err
    assert convert(copied / "one") == 1
    assert "is the folder of one tag; give the one above it, and -t one" in capsys.readouterr().err
    (copied / "latest").unlink()
    assert convert(copied) == 1
    assert "latest: no such file; name a tag with -t (complete ones: one)" in capsys.readouterr().err
    assert convert(copied, "-t", "one", "--max_shard_size", "5") == 1
    assert "max_shard_size '5': write digits and one of TB, GB, MB, KB" in capsys.readouterr().err
    assert not (copied.parent / "out").exists()


def test_without_xxhash_sizes_are_still_looked_at(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero_to_fp32, "xxh3_64", None)
    flip(copied / "one" / "rank0" / "loose.pt", 0)
    assert convert(copied) == 1
    assert "loose.pt: cannot be loaded" in capsys.readouterr().err
    os.truncate(copied / "one" / "rank0" / save.MEMORY, 100)
    assert convert(copied) == 1
    assert "memory.bin: 100 bytes" in capsys.readouterr().err


# ---- several ranks, without an engine


def written_by(folder: Path, shares: list[torch.Tensor], shape: tuple[int, ...], file: str = "state.bin") -> None:
    """A checkpoint of one parameter, its masters in two ranges per rank, in the order of their ends."""
    told = []
    for number, share in enumerate(shares):
        rank = folder / f"rank{number}"
        rank.mkdir(parents=True)
        data, half = share.numpy().tobytes(), share.numel() // 2 * 4
        (rank / "state.bin").write_bytes(data[half:] + data[:half])
        torch.save({"buffers": {}}, rank / "loose.pt")
        places = {"master": (FileRange(file, len(data) - half, half), FileRange(file, 0, len(data) - half))}
        files = {
            path.name: SavedFile(path.stat().st_size, tuple(checksums.read_pieces(path, 0, path.stat().st_size)))
            for path in rank.iterdir()
        }
        files[file] = files["state.bin"]
        tensor = TensorEntry(shape, "bfloat16", share.numel(), 0, 1, places)
        made = RankManifest(number, len(shares), files, {"w": tensor}).to_json()
        (rank / manifest.NAME).write_bytes(made)
        told.append((len(made), checksums.checksum(made)))
    (folder / manifest.NAME).write_bytes(manifest.folder_manifest(folder.name, told))


def test_shares_of_all_ranks_are_joined_and_the_padding_is_cut(tmp_path: Path) -> None:
    whole = torch.randn(5, 7)
    padded = torch.cat([whole.flatten(), torch.full((1,), float("nan"))])
    written_by(tmp_path / "one", list(padded.split(18)), (5, 7))
    assert torch.equal(get_fp32_state_dict_from_zero_checkpoint(tmp_path, "one")["w"], whole)
    written_by(tmp_path / "short", [whole.flatten()[:18]], (5, 7))
    with pytest.raises(ExportError, match="w has 35 elements, the ranks' shares only 18"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "short")
    shutil.rmtree(tmp_path / "one" / "rank1")
    with pytest.raises(ExportError, match="rank1/ds_vertical.json: cannot be read .No such file"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "one")


def test_a_manifest_names_no_file_elsewhere(tmp_path: Path) -> None:
    written_by(tmp_path / "one", [torch.zeros(4)], (4,), "../../secret")
    with pytest.raises(ExportError, match="names a file elsewhere: ../../secret"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path, "one")
