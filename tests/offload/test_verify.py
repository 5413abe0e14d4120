"""`"verify": true`: other bytes than were written are noticed before anything is computed from them, and tear the state."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_set_full_fp32_param
from faults import flip
from harness import base_config, contents, differing, running, small_buffers
from models import MixerModel, token_batches

from ds_vertical.errors import TornStateError
from ds_vertical.io.checksums import ChecksumError, Checksums

LAST = 2  # the layer that is spoilt: nothing of its next step is under way between two train_batch calls
WIDTH = {"fp32": 512, "bf16": 1024}  # square matrices of 1 MiB and more, that a boundary can cut
BATCHES = token_batches(8, 2, rows=1, shortest=5)
CLIP = 0.05  # acts on every step
slow = pytest.mark.slow


# ---- what is compared


def bytes_of(number: int, count: int) -> bytes:
    return bytes([number]) * count


def test_pieces_inside_a_read_are_checked_and_bytes_that_nobody_knows_are_learned() -> None:
    sums = Checksums(verify=True)
    sums.note("file", 100, bytes_of(1, 50))
    sums.note("file", 200, bytes_of(2, 50))
    data = bytearray(bytes_of(0, 300))
    data[100:150], data[200:250] = bytes_of(1, 50), bytes_of(2, 50)
    sums.check("file", 0, data)
    assert (sums.num_checked_bytes, sums.num_learned_bytes, sums.num_passed_bytes) == (100, 200, 0)
    sums.check("file", 0, data)
    assert (sums.num_checked_bytes, sums.num_learned_bytes, sums.num_passed_bytes) == (400, 200, 0)
    for place in (0, 149, 200, 299):
        spoilt = bytearray(data)
        spoilt[place] ^= 1
        with pytest.raises(ChecksumError, match="the disk has returned other bytes than were written"):
            sums.check("file", 0, spoilt)
    sums.check("other", 0, bytes_of(9, 10))
    assert sums.num_learned_bytes == 210


def test_a_piece_read_in_part_is_neither_checked_nor_learned() -> None:
    sums = Checksums(verify=True)
    sums.note("file", 0, bytes_of(1, 100))
    sums.check("file", 50, bytes_of(7, 100))  # of which 50 are the piece's
    assert (sums.num_checked_bytes, sums.num_learned_bytes, sums.num_passed_bytes) == (0, 50, 50)
    with pytest.raises(ChecksumError) as raised:
        sums.check("file", 0, bytes_of(7, 150))
    assert (raised.value.path, raised.value.offset, raised.value.num_bytes) == ("file", 0, 100)


def test_without_verify_nothing_is_compared() -> None:
    sums = Checksums()
    sums.note("file", 0, bytes_of(1, 100))
    sums.check("file", 0, bytes_of(2, 100))
    assert (sums.num_checked_bytes, sums.num_learned_bytes, sums.num_passed_bytes) == (0, 0, 0)


# ---- a bit flips on the disk


def config_in(folder: Path, dtype: str = "fp32", clip: float = 0.0, **section: Any) -> dict[str, Any]:
    section = {"optimizer_delay": 0.6, "seed": 7, "verify": True} | section
    made = base_config(folder, num_micro_batches=2, dtype=dtype, clip=clip, section=section)
    return small_buffers(made, 1_100_000)


def model_of(dtype: str = "fp32") -> MixerModel:
    return MixerModel(LAST + 1, WIDTH[dtype])


def train(engine: Any, steps: range) -> list[float]:
    return [engine.train_batch(iter(BATCHES[step])).item() for step in steps]


def spoil(engine: Any, model: Any, what: str) -> tuple[Path, int, Any]:
    """Flip a bit of the last layer's: the file, the offset, and the part that must not be computed with it."""
    optimizer = engine.optimizer
    optimizer.pipeline.wait_idle()
    if what.startswith("parameters"):
        if what == "parameters, whole":
            engine.flush()  # else they go to the next forward in memory
        param = model.blocks[LAST].up.weight
        (shard,) = (shard for shard in engine.param_store.files.shards() if shard.param is param)
        path, offset, part = Path(shard.path), 100, None  # in the part that is stepped early
    else:
        share = "early" if what == "early state" else "delayed"
        chunks = [optimizer.stepper.chunks[index] for index in optimizer.chunks_of(LAST)]
        part = next(part for chunk in chunks for part in chunk.parts(share))
        extents = optimizer.gradients.extents(part) if what == "gradients" else optimizer.stepper.generations.source(part)
        path, offset = extents[-1].path, extents[-1].offset + part.numel * 2
    flip(path, offset)
    return path, offset, part


def computed_by(engine: Any) -> list[Any]:
    """The parts that CPU Adam computes from now on."""
    stepper, computed = engine.optimizer.stepper, []
    update = stepper.kernel.update

    def recorded(settings: Any, part: Any, *args: Any) -> None:
        computed.append(part)
        update(settings, part, *args)

    stepper.kernel = SimpleNamespace(update=recorded)
    return computed


WHATS = ["early state", "delayed state", "parameters, beside", "parameters, whole", "gradients"]


def section_of(what: str) -> dict[str, Any]:
    return {"optimizer_delay": 1.0, "gradient_host_share": 0.0} if what == "gradients" else {}


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=slow)])
def test_a_bit_that_flips_on_the_disk_is_noticed_and_tears_the_state(tmp_path: Path, dtype: str, what: str) -> None:
    made = config_in(tmp_path / "ssd", dtype, CLIP if what == "gradients" else 0.0, **section_of(what))
    with running(made, partial(model_of, dtype), vertical=True) as (engine, model):
        train(engine, range(2))
        engine.save_checkpoint(str(tmp_path / "saved"), tag="good")
        train(engine, range(2, 4))
        path, offset, part = spoil(engine, model, what)
        computed = computed_by(engine)
        with pytest.raises(ChecksumError, match="other bytes than were written") as raised:
            train(engine, range(4, 5))
        error = raised.value
        assert error.path == str(path) and error.offset <= offset < error.offset + error.num_bytes
        assert part not in computed, "a step was taken from it"
        told = "".join(error.__notes__)
        assert "live state is torn: part of it is not on the disk any more" in told
        assert f'the last good tag is "good" in {tmp_path / "saved"}' in told
        for use in (lambda: engine.save_checkpoint(str(tmp_path / "saved"), tag="torn"), lambda: train(engine, range(4, 5))):
            with pytest.raises(TornStateError, match="other bytes than were written"):
                use()
        assert not (tmp_path / "saved" / "torn").exists()


def test_without_verify_nobody_notices(tmp_path: Path) -> None:
    with running(config_in(tmp_path, verify=False), model_of, vertical=True) as (engine, model):
        train(engine, range(2))
        for what in ("early state", "delayed state", "parameters, beside"):
            spoil(engine, model, what)
        train(engine, range(2, 4))
        assert engine.optimizer.checksums.num_learned_bytes == 0


# ---- and nothing else is taken for damage


def amounts(engine: Any) -> tuple[int, int, int]:
    """Bytes read by steps, bytes checked, bytes learned or passed."""
    pipeline, sums = engine.optimizer.pipeline, engine.optimizer.checksums
    engine.flush()  # takes the steps whose state has been read ahead
    read = engine.param_store.reads.num_read_bytes + pipeline.reader.num_read_bytes
    return read, sums.num_checked_bytes, sums.num_learned_bytes + sums.num_passed_bytes


@pytest.mark.parametrize(
    ("clip", "section"),
    [
        (0.0, {}),
        (CLIP, {"optimizer_delay": 1.0, "gradient_host_share": 0.5}),
        pytest.param(CLIP, {"optimizer_speculation": True}, marks=slow),
        pytest.param(0.0, {"on_nonfinite": "stop", "optimizer_delay": 0.0}, marks=slow),
        pytest.param(0.0, {"overlap": False, "prefetch_layers": 0}, marks=slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=slow)])
def test_every_byte_that_steps_read_is_checked_and_no_bit_changes(
    tmp_path: Path, dtype: str, clip: float, section: dict[str, Any]
) -> None:
    ends = []
    for verify in (True, False):
        made = config_in(tmp_path, dtype, clip, **section, verify=verify)
        with running(made, partial(model_of, dtype), vertical=True) as (engine, model):
            losses = train(engine, range(3))
            before = amounts(engine)
            losses += train(engine, range(3, 6))
            read, checked, others = (now - then for now, then in zip(amounts(engine), before, strict=True))
            assert read > 20 << 20
            assert (checked, others) == (read if verify else 0, 0)
            ends.append(contents(engine, model) | {"losses": torch.tensor(losses)})
    assert not differing(*ends)


def test_what_is_written_or_dropped_between_steps_is_no_damage(tmp_path: Path) -> None:
    """Reads ahead that nobody uses, the user's own writes, saves and loads."""
    with running(config_in(tmp_path / "ssd", optimizer_delay=0.0), model_of, vertical=True) as (engine, model):

        def write() -> None:
            assert engine._params.ahead, "nothing was read ahead"
            with deepspeed.zero.GatheredParameters([model.blocks[0].up.weight], modifier_rank=0):
                model.blocks[0].up.weight.data.fill_(0.25)

        def between(number: int) -> None:
            write()
            safe_set_full_fp32_param(model.blocks[LAST].up.weight, torch.full((512, 512), 0.5))
            if number % 2:
                engine.save_checkpoint(str(tmp_path / "saved"), tag=f"tag{number}")

        for number in range(4):
            train(engine, range(number, number + 1))
            between(number)
        for tag in ("tag1", "tag3"):
            train(engine, range(4, 5))
            engine.load_checkpoint(str(tmp_path / "saved"), tag=tag)
            train(engine, range(5, 8))
        before = amounts(engine)
        train(engine, range(1))
        assert amounts(engine)[1] > before[1] and amounts(engine)[2] == before[2]
