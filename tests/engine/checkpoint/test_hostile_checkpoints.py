"""Checkpoints with right checksums and wrong content: refused by name before the first write to the live state."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import contents, differing, running
from models import MixerModel
from places import RECORDED
from resuming import BATCHES, config_in, model_of, train

from ds_vertical.engine.checkpoint import manifest
from ds_vertical.engine.checkpoint.zero_to_fp32 import ExportError, get_fp32_state_dict_from_zero_checkpoint
from ds_vertical.errors import CheckpointError
from ds_vertical.io.checksums import checksum, read_pieces

slow = pytest.mark.slow
WEIGHT = "blocks.0.up.weight"  # in a file of its own
BIAS = "blocks.0.up.bias"  # with others in memory.bin
Change = Callable[[dict[str, Any]], object]


def copied(tag: Path, name: str) -> Path:
    """The checkpoint once more, with the same files."""
    return Path(shutil.copytree(tag, tag.with_name(name), copy_function=os.link))


def rewrite(tag: Path, change: Change) -> None:
    """Change what the rank's manifest says, and let the folder's have the checksum of that."""
    path = manifest.rank_folder(tag, 0) / manifest.NAME
    found = json.loads(path.read_bytes())
    change(found)
    data = json.dumps(found).encode()
    replace(path, data)
    rewrite_folder(tag, lambda folder: folder["ranks"].update({"0": {"num_bytes": len(data), "checksum": checksum(data)}}))


def rewrite_folder(tag: Path, change: Change) -> None:
    found = json.loads((tag / manifest.NAME).read_bytes())
    change(found)
    replace(tag / manifest.NAME, json.dumps(found).encode())


def replace(path: Path, data: bytes) -> None:
    path.unlink()  # a second name of the good one's
    path.write_bytes(data)


def rewrite_loose(tag: Path, change: Change) -> None:
    """Change what rests in loose.pt, with its checksums."""
    path = manifest.rank_folder(tag, 0) / "loose.pt"
    found = torch.load(path, weights_only=True)
    path.unlink()
    torch.save(found if change(found) is not NotImplemented else [], path)
    size = path.stat().st_size
    pieces = [list(piece) for piece in read_pieces(path, 0, size)]
    rewrite(tag, lambda entry: entry["files"].update({"loose.pt": {"num_bytes": size, "pieces": pieces}}))


def at(*keys: Any, value: Any) -> Change:
    """Put a value in that place; `...`: leave the key out."""

    def change(entry: dict[str, Any]) -> None:
        for key in keys[:-1]:
            entry = entry[key]
        if value is ...:
            del entry[keys[-1]]
        else:
            entry[keys[-1]] = value

    return change


def renamed(old: str, new: str) -> Change:
    """A file under another name, everywhere in the manifest."""

    def change(entry: dict[str, Any]) -> None:
        entry["files"][new] = entry["files"].pop(old)
        for tensor in entry["tensors"].values():
            for ranges in tensor["places"].values():
                for each in ranges:
                    each[0] = new if each[0] == old else each[0]

    return change


def shifted(by: int) -> Change:
    """The range of a bias begins elsewhere: in its neighbour's bytes."""

    def change(entry: dict[str, Any]) -> None:
        entry["tensors"][BIAS]["places"]["weight"][0][1] += by

    return change


def without_piece(entry: dict[str, Any]) -> None:
    """Bytes that nobody has a checksum of."""
    file = entry["tensors"][WEIGHT]["places"]["master"][0][0]
    entry["files"][file]["pieces"].pop()


def at_step(step: int, *, powers: int | None = None, of_one_group: bool = False) -> Change:
    """All parameters are at that step, or those of a group that they are divided into; the powers of beta at theirs."""

    def change(entry: dict[str, Any]) -> None:
        tensors = list(entry["tensors"].values())
        for tensor in tensors[1:] if of_one_group else tensors:
            tensor["step"] = step
            tensor["group"] = int(of_one_group)
        if of_one_group:
            entry["numbers"]["groups"] *= 2
        if powers is not None:
            entry["numbers"]["powers"] |= {"step": powers, "anchor": 0}

    return change


def cases() -> dict[str, tuple[Change, str]]:
    """By name: what of the rank's manifest is changed, and what is said."""
    tensor, place = partial(at, "tensors", WEIGHT), partial(at, "tensors", WEIGHT, "places", "weight", 0)
    state, number = partial(at, "tensors", WEIGHT, "places"), partial(at, "numbers")
    return {
        "negative offset": (place(1, value=-4096), "greater than or equal to 0"),
        "negative size": (place(2, value=-4), "greater than or equal to 0"),
        "odd size": (place(2, value=4095), "weight: 4095 bytes, and 262144 elements of 4 are 1048576"),
        "short range": (place(2, value=4096), "weight: 4096 bytes, and 262144 elements of 4 are 1048576"),
        "range past the end": (place(1, value=1 << 40), "not all of them are in the file, with a checksum"),
        "range past what has checksums": (without_piece, "not all of them are in the file, with a checksum"),
        "another's bytes": (shifted(-4), "are those of .* as well"),
        "file that is not listed": (place(0, value="nobody.bin"), "a file that is not listed"),
        "file elsewhere": (renamed("memory.bin", "../../../outside"), "names a file elsewhere: '../../../outside'"),
        "file of an absolute name": (renamed("memory.bin", "/etc/hostname"), "names a file elsewhere: '/etc/hostname'"),
        "text for a number": (place(1, value="0"), "valid integer, got '0'"),
        "one step more": (tensor("step", value=9), "step 9, and embed.weight of the same group has 1"),
        "all at another step": (at_step(9), r"embed\.weight: step 9 in group 0, and numbers\.powers\.step is 1"),
        "a group at another step": (at_step(9, of_one_group=True), "step 9 in group 1, and numbers.powers.step is 1"),
        "the powers of another": (at_step(1, powers=9), "step 1 in group 0, and numbers.powers.step is 9"),
        "groups apart": (at_step(9, powers=0, of_one_group=True), "step 9 in group 1, and another group has 1"),
        "no steps": (at_step(0), "step 0 in group 0, and numbers.powers.step is 1"),
        "negative step": (tensor("step", value=-1), "greater than or equal to 0"),
        "fraction of a step": (tensor("step", value=1.5), "valid integer"),
        "no second moment": (state("exp_avg_sq", value=...), "exp_avg_sq is missing"),
        "no master": (state("master", value=...), "master is missing"),
        "no weight": (state("weight", value=...), "weight is missing"),
        "a moment of another kind": (state("exp_avg_cube", value=[]), "places.exp_avg_cube"),
        "a moment of nothing": (state("exp_avg", value=[]), "exp_avg: 0 bytes, and 262144 elements of 4"),
        "not trained but with state": (tensor("group", value=None), "not trained, but with master, exp_avg"),
        "unknown group": (tensor("group", value=3), "group 3, and there are 1"),
        "huge share": (tensor("numel", value=1 << 60), "elements of 4 are"),
        "small share": (tensor("numel", value=1), "less than its shape"),
        "unknown dtype": (tensor("dtype", value="float99"), "dtype 'float99' is not known"),
        "no powers": (number("powers", value=...), "numbers.powers: Field required"),
        "powers of nothing": (number("powers", value={}), "numbers.powers.step: Field required"),
        "powers of later": (number("powers", "anchor", value=99), "anchor 99 is after step"),
        "no counters": (number("counters", value=...), "numbers.counters: Field required"),
        "no global steps": (number("counters", "global_steps", value=...), "counters.global_steps: Field required"),
        "a module as a counter": (number("counters", "module", value=7), "counters.module: Extra inputs are not permitted"),
        "a counter of nobody's": (number("counters", "more", value=7), "counters.more: Extra inputs are not permitted"),
        "parameters of a group": (number("groups", 0, "params", value=[]), "groups.0: .*no save writes a group's parameters"),
        "no groups": (number("groups", value=[]), "group 0, and there are 0"),
        "no learning rate": (number("groups", 0, "lr", value=...), "groups.0.lr: Field required"),
        "infinite learning rate": (number("groups", 0, "lr", value=float("inf")), "finite number"),
        "three betas": (number("groups", 0, "betas", value=[0.9, 0.99, 0.9]), "groups.0.betas"),
        "scheduler maybe": (number("has_scheduler", value="yes"), "has_scheduler: .*boolean"),
        "half a loss scaler": (number("loss_scaler", value={"cur_scale": 1.0}), "loss_scaler"),
        "no settings": (at("settings", value=...), "settings: Field required"),
        "another rank's": (at("rank", value=1), "rank 1 of 1: the folder's manifest has it as 0 of 1"),
        "another world's": (at("world_size", value=2), "rank 0 of 2: the folder's manifest has it as 0 of 1"),
        "a piece past the end": (at("files", "loose.pt", "pieces", 0, 1, value=1 << 40), "loose.pt: a piece of bytes 0 to"),
        "nested": (at("settings", "nested", value=[[0]]), "settings.nested"),
    }


def refused(engine: Any, model: Any, folder: Path, tag: str | None, said: str) -> None:
    """The load is refused with these words, and weights, masters and moments have the bits that they had."""
    before, steps = contents(engine, model), engine.global_steps
    rates, powers = [group["lr"] for group in engine.optimizer.optimizer.param_groups], engine.optimizer.driver.powers
    random = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=said):
        engine.load_checkpoint(str(folder), tag=tag)
    assert differing(before, contents(engine, model)) == [], tag
    assert engine.global_steps == steps and engine.optimizer.driver.powers == powers
    assert [group["lr"] for group in engine.optimizer.optimizer.param_groups] == rates
    assert torch.equal(torch.get_rng_state(), random)


def test_a_manifest_that_makes_no_sense_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        losses = train(engine, range(1))
        engine.save_checkpoint(str(saved), tag="good")
        losses += train(engine, range(1, 2))
        for name, (change, said) in cases().items():
            rewrite(copied(saved / "good", name), change)
            where = f"{name}/rank0/ds_vertical.json: not a manifest that can be loaded"
            refused(engine, model, saved, name, f"{where}(.|\n)*{said}")
        losses += train(engine, range(2, 4))
        engine.load_checkpoint(str(saved), tag="good")
        assert train(engine, range(1, 4)) == losses[1:], "the refused loads have changed the run"


@slow
@pytest.mark.parametrize("name", [name for name in cases() if name not in ("another rank's", "another world's")])
def test_the_export_script_refuses_or_takes_what_it_needs(tmp_path: Path, name: str) -> None:
    """It needs no moments and no counters; whatever it gives has the right values, and nothing comes from elsewhere."""
    (tmp_path / "outside").write_bytes(bytes(1 << 21))
    source = RECORDED / "checkpoint_c81cdc9"
    folder = Path(shutil.copytree(source, tmp_path / "saved"))
    good = get_fp32_state_dict_from_zero_checkpoint(folder)
    rewrite(folder / "of_c81cdc9", cases()[name][0])
    try:
        found = get_fp32_state_dict_from_zero_checkpoint(folder)
    except ExportError:
        return
    assert differing(good, found) == []


def loose_cases() -> Iterator[tuple[Change, str]]:
    for key in ("lr_scheduler", "random", "buffers", "client_state"):
        yield at(key, value=...), f"loose.pt: {key}: missing, or of another kind"
    yield at("random", "torch", value=torch.zeros(3, dtype=torch.uint8)), "random: torch: no state of a generator"
    yield at("random", "python", value=(3, (1, 2), None)), "random: python: no state of a generator"
    yield at("random", "numpy", value=("MT19937", [1], 0, 0, 0.0)), "random: numpy: no state of a generator"
    yield at("buffers", value={"seen": 3}), "buffers: not all of them are tensors"
    yield (lambda found: NotImplemented), "missing, or of another kind"


def test_loose_ends_that_are_missing_are_found_before_anything_is_touched(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        train(engine, range(1))
        engine.save_checkpoint(str(saved), tag="good")
        losses = train(engine, range(1, 2))
        for index, (change, said) in enumerate(loose_cases()):
            rewrite_loose(copied(saved / "good", f"loose{index}"), change)
            refused(engine, model, saved, f"loose{index}", said)
        copied(saved / "good", "none")
        path = saved / "none" / "rank0" / "loose.pt"
        replace(path, b"PK" + bytes(1000))
        pieces = [list(piece) for piece in read_pieces(path, 0, 1002)]
        rewrite(saved / "none", at("files", "loose.pt", value={"num_bytes": 1002, "pieces": pieces}))
        refused(engine, model, saved, "none", "loose.pt: (cannot be loaded|holds more than)")
        engine.load_checkpoint(str(saved), tag="good")
        assert train(engine, range(1, 2)) == losses


# ---- `latest`, and what else is read


def latest_cases() -> dict[str, tuple[bytes | str, str]]:
    return {
        "elsewhere": (b"../outside/tag", "names '../outside/tag', which is no folder beside it"),
        "absolute": (b"/etc", "names '/etc', which is no folder"),
        "above": (b"..", r"names '\.\.', which is no folder"),
        "empty": (b" \n", "names '', which is no folder"),
        "not text": (b"\xff\xfe\x00", "latest: not a tag .*codec can't decode"),
        "NUL": (b"one\0two", "which is no folder"),
        "long": (b"t" * 300, "which is no folder"),
        "endless": (b"t" * 100_000, "latest: read: it has more than 4096 bytes"),
        "folder": ("folder", "latest: read: it is a folder, not a regular file"),
        "fifo": ("fifo", "latest: read: it is a FIFO, not a regular file"),
        "absent tag": (b"nobody", "there is no such checkpoint; complete ones in"),
    }


def put(path: Path, content: bytes | str) -> None:
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    if content == "fifo":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def damaged_cases() -> dict[str, tuple[Callable[[Path], object], str]]:
    """By name: what is put in a tag's folder, and what is said."""
    nested = b"[" * 200_000
    return {
        "weight fifo": (lambda tag: put(tag / "rank0" / "weight3.bin", "fifo"), "weight3.bin: it is a FIFO"),
        "weight folder": (lambda tag: put(tag / "rank0" / "weight3.bin", "folder"), "weight3.bin: it is a folder"),
        "manifest fifo": (lambda tag: put(tag / manifest.NAME, "fifo"), "it is a FIFO"),
        "rank manifest fifo": (lambda tag: put(tag / "rank0" / manifest.NAME, "fifo"), "it is a FIFO"),
        "manifest folder": (lambda tag: put(tag / manifest.NAME, "folder"), "it is a folder"),
        "deep manifest": (lambda tag: put(tag / manifest.NAME, nested), "not a manifest .nested too deeply"),
        "deep rank manifest": (deep_rank, "not a manifest .nested too deeply"),
        "manifest not text": (lambda tag: put(tag / manifest.NAME, b"\xff\xfe"), "not a manifest"),
        "manifest of nothing": (lambda tag: put(tag / manifest.NAME, b'{"format": 1}'), "world_size: Field required"),
        "no ranks": (lambda tag: rewrite_folder(tag, at("ranks", value={})), "ranks: of world size 1"),
        "ranks of another kind": (lambda tag: rewrite_folder(tag, at("ranks", "0", value=[])), "ranks.0"),
    }


def deep_rank(tag: Path) -> None:
    data = b"[" * 200_000
    put(tag / "rank0" / manifest.NAME, data)
    rewrite_folder(tag, at("ranks", "0", value={"num_bytes": len(data), "checksum": checksum(data)}))


@pytest.mark.timeout(120)  # what waits for a FIFO waits for ever
def test_what_is_no_regular_file_or_no_manifest_is_told_and_nobody_waits(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        train(engine, range(1))
        engine.save_checkpoint(str(saved), tag="good")
        before = contents(engine, model)
        shutil.copytree(saved / "good", tmp_path / "outside" / "tag")
        for name, (content, said) in latest_cases().items():
            put(saved / "latest", content)
            with pytest.raises(CheckpointError, match=said):
                engine.load_checkpoint(str(saved))
            with pytest.raises(ExportError, match="latest|no such checkpoint"):
                get_fp32_state_dict_from_zero_checkpoint(saved)
            assert name
        for name, (damage, said) in damaged_cases().items():
            damage(copied(saved / "good", name))
            with pytest.raises(CheckpointError, match=said):
                engine.load_checkpoint(str(saved), tag=name)
            if not name.startswith("weight"):  # it takes the masters
                with pytest.raises(ExportError):
                    get_fp32_state_dict_from_zero_checkpoint(saved, name)
        for tag in ("../outside/tag", str(tmp_path / "outside" / "tag"), "t" * 300, "a\0b", ""):
            with pytest.raises(CheckpointError, match="no name of a folder in"):
                engine.load_checkpoint(str(saved), tag=tag)
            with pytest.raises(ExportError):
                get_fp32_state_dict_from_zero_checkpoint(saved, tag)
        assert differing(before, contents(engine, model)) == []
        train(engine, range(1, 2))


# ---- earlier versions


def small_model() -> MixerModel:
    return MixerModel(2, 8, dropout=0.1)


def test_a_checkpoint_of_an_earlier_version_loads(tmp_path: Path) -> None:
    """Recorded with c81cdc9 after two steps; the digest is of all weights, masters and moments then."""
    recorded = RECORDED / "checkpoint_c81cdc9"
    made = config_in(tmp_path / "ssd", section={"layers": ["blocks"]})
    with running(made, small_model, vertical=True) as (engine, model):
        path, _ = engine.load_checkpoint(str(recorded))
        assert path == str(recorded / "of_c81cdc9" / manifest.NAME) and engine.global_steps == 2
        found = contents(engine, model)
        data = b"".join(found[name].contiguous().numpy().tobytes() for name in sorted(found))
        assert hashlib.sha256(data).hexdigest() == "618e8faf263a4d95a92e29e9f42c57a0f8d73f9eb4b22b97aea3323f4641a78f"
        engine.train_batch(iter(BATCHES[2]))
