"""Which bytes of a file lie on which SSD: each exactly once, in the shares that were asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_vertical.io.runs import stripes
from ds_vertical.io.runs.stripes import SEGMENT_BYTES, Stripe

MIB = 1 << 20


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Path]]:
    """The folders of a run with these shares."""
    folders = [tmp_path / f"ssd{number}" / "run" for number in range(len(request.param))]
    stripes.open_run(folders, request.param)
    yield folders
    stripes.close_run(folders[0])


SHARES = [(0.5, 0.5), (0.7, 0.2, 0.1), (0.999, 0.001), tuple([1 / 12] * 12)]


@pytest.mark.parametrize("run", SHARES, indirect=True)
@pytest.mark.parametrize("num_bytes", [MIB, 5 * MIB + 1024, 37 * MIB])
@pytest.mark.parametrize("whole", [False, True])
def test_every_byte_lies_in_one_place_and_each_ssd_has_its_share(
    run: list[Path], request: pytest.FixtureRequest, num_bytes: int, whole: bool
) -> None:
    shares = request.node.callspec.params["run"]
    path = run[0] / "zero_stage_3" / "file.swp"
    stripes.spread_file(path, num_bytes, whole)
    sizes = stripes.sizes_of(path, num_bytes)
    assert list(sizes) == stripes.files_of(path) and sum(sizes.values()) == num_bytes
    for number, folder in enumerate(run):
        size = sizes[folder / "zero_stage_3" / f"file.swp.ssd{number}"]
        assert abs(size - shares[number] * num_bytes) <= 8192 * (2 + num_bytes // (len(run) * SEGMENT_BYTES))
    everything = stripes.stripes_of(path, 0, num_bytes)
    taken = {(piece.path, place): piece.start + place - piece.offset for piece in everything for place in places(piece)}
    assert sorted(taken.values()) == [position * 512 for position in range(-(-num_bytes // 512))]
    draw = random.Random(num_bytes)
    for _ in range(20):
        start = draw.randrange(0, num_bytes, 512)
        count = draw.randrange(0, num_bytes - start, 512) + 512
        pieces = stripes.stripes_of(path, start, min(count, num_bytes - start))
        assert all(
            taken[piece.path, place] == start + piece.start + place - piece.offset
            for piece in pieces
            for place in places(piece)
        )
        assert sum(piece.num_bytes for piece in pieces) == min(count, num_bytes - start)
        assert all(piece.path.endswith(f".ssd{piece.lane}") for piece in pieces)


def places(piece: Stripe) -> range:
    """The bytes of a piece in its file, one of each sector."""
    return range(piece.offset, piece.offset + piece.num_bytes, 512)


@pytest.mark.parametrize("run", [(0.5, 0.5)], indirect=True)
def test_what_is_small_elsewhere_or_there_already_stays_one_file(run: list[Path], tmp_path: Path) -> None:
    there = run[0] / "there"
    there.parent.mkdir(parents=True)
    there.touch()
    for path, num_bytes in ((run[0] / "small", 4096), (tmp_path / "elsewhere", MIB), (there, MIB)):
        stripes.spread_file(path, num_bytes)
        assert stripes.files_of(path) == [path]
        assert stripes.stripes_of(path, 512, 1024) == [Stripe(str(path), 512, 1024)]


@pytest.mark.parametrize("run", [(0.5, 0.5)], indirect=True)
def test_a_file_that_takes_anothers_place_lies_as_it_does_and_a_closed_run_is_forgotten(run: list[Path]) -> None:
    first, second = run[0] / "one", run[0] / "one.1"
    stripes.spread_file(first, 9 * MIB)
    stripes.spread_as(second, first)
    pairs = zip(stripes.stripes_of(first, 0, 9 * MIB), stripes.stripes_of(second, 0, 9 * MIB), strict=True)
    assert all(one._replace(path=other.path) == other for one, other in pairs)
    stripes.close_run(run[0])
    assert stripes.files_of(first) == [first] and stripes.run_of(first) is None
