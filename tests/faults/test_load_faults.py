"""A load that fails: before it touches anything the run goes on; after that the live state is torn. The checkpoint loads."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import small_files
from harness import contents, differing, read_weights, running
from resuming import config_in, model_of, train

from ds_vertical.engine.checkpoint import manifest
from ds_vertical.engine.checkpoint.manifest import SavedFile
from ds_vertical.errors import CheckpointError, StorageError, TornStateError
from ds_vertical.io.checksums import checksum, read_pieces


@pytest.mark.parametrize(
    ("limit", "file"),
    [(1 << 19, "param"), pytest.param((1 << 20) + 4096, "optimizer", marks=pytest.mark.slow)],
    ids=["parameters", "state"],
)
def test_a_write_that_is_refused_tears_the_state_and_the_checkpoint_loads(tmp_path: Path, limit: int, file: str) -> None:
    """The kernel refuses it in the middle of the load."""
    saved = str(tmp_path / "saved")
    made = partial(config_in, tmp_path / "ssd", persistence=None)
    with running(made(), model_of, vertical=True) as (engine, model):
        train(engine, range(1))
        engine.save_checkpoint(saved, tag="one")
        staying = [param for param in model.parameters() if param.numel()]
        losses, expected = train(engine, range(1, 3)), contents(engine, model)
        said = rf"{tmp_path}/ssd/.*({file}).*: write: File too large"
        with small_files(limit), pytest.raises(StorageError, match=said) as raised:
            engine.load_checkpoint(saved)
        notes = "".join(raised.value.__notes__)
        assert staying and all(param.numel() for param in staying), "what stays on the device does not"
        assert "part of it is a checkpoint's, the rest is not" in notes and 'the last good tag is "one"' in notes
        for route in (partial(train, engine, range(1)), partial(engine.load_checkpoint, saved), partial(read_weights, model)):
            with pytest.raises(TornStateError, match="File too large"):
                route()
        with pytest.raises(TornStateError):
            engine.save_checkpoint(saved, tag="two")
    assert manifest.complete_tags(tmp_path / "saved") == ["one"]
    with running(made(), model_of, vertical=True) as (engine, model):
        engine.load_checkpoint(saved)
        assert train(engine, range(1, 3)) == losses
        assert differing(expected, contents(engine, model)) == []


class Gadget:
    """What unpickling would run: makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.path,)


def replace_loose(tag: Path, content: Any) -> None:
    """Put other content into a checkpoint's loose.pt, with every checksum right."""
    rank = manifest.rank_folder(tag, 0)
    torch.save(content, rank / "loose.pt")
    found = manifest.read_rank(tag, 0)
    size = (rank / "loose.pt").stat().st_size
    found.files["loose.pt"] = SavedFile(size, tuple(read_pieces(rank / "loose.pt", 0, size)))  # type: ignore[index]
    data = found.to_json()
    (rank / manifest.NAME).write_bytes(data)
    whole = json.loads((tag / manifest.NAME).read_text())
    whole["ranks"]["0"] = {"num_bytes": len(data), "checksum": checksum(data)}
    (tag / manifest.NAME).write_text(json.dumps(whole))


def test_nothing_in_a_checkpoint_is_unpickled(tmp_path: Path) -> None:
    """Not even where somebody has made one whose checksums are right."""
    saved, mark = tmp_path / "saved", tmp_path / "it has run"
    with running(config_in(tmp_path / "ssd"), model_of, vertical=True) as (engine, model):
        train(engine, range(1))
        engine.save_checkpoint(str(saved), tag="good")
        before = contents(engine, model)
        shutil.copytree(saved / "good", saved / "made")
        loose = torch.load(manifest.rank_folder(saved / "good", 0) / "loose.pt", weights_only=True)
        replace_loose(saved / "made", loose | {"client_state": {"x": Gadget(mark)}})
        with pytest.raises(CheckpointError, match=r"rank0/loose.pt: holds more than tensors.*not unpickled"):
            engine.load_checkpoint(str(saved), tag="made")
        assert not mark.exists()
        assert differing(before, contents(engine, model)) == []
        replace_loose(saved / "made", loose)  # as it was: what is refused above is the content
        engine.load_checkpoint(str(saved), tag="made")
        torch.load(torch_saved(tmp_path, mark), weights_only=False)
        assert mark.exists(), "the gadget does nothing"


def torch_saved(tmp_path: Path, mark: Path) -> Path:
    torch.save(Gadget(mark), tmp_path / "gadget.pt")
    return tmp_path / "gadget.pt"
