"""Numbers in 8 and 4 bits: what each element may lose, and that the compiled kernel and torch give the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from adam_gap import MAX_UPDATES, ticking
from rounding import error_bound

from ds_vertical.compat.ops import load
from ds_vertical.distributed.quantize import Quantizer
from ds_vertical.errors import ConfigError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 2, 3, 255, 256, 257, 1000, 40_001)
BLOCKS = (2, 64, 256, 300, 1024)
INF, NAN = float("inf"), float("nan")


def values(numel: int, dtype: torch.dtype, rows: int = 2, scale: float = 1.0) -> torch.Tensor:
    """Of magnitudes that differ from block to block."""
    random = torch.Generator().manual_seed(numel)
    made = torch.randn(rows, numel, generator=random) * 10 ** torch.linspace(-3, 3, numel)
    return (made * scale).to(dtype)


def round_trip(quantizer: Quantizer, rows: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    back = torch.empty_like(rows, dtype=dtype or rows.dtype)
    quantizer.dequantize(quantizer.quantize(rows), back)
    return back


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Nan counts as nan, whatever its bits."""
    integer = torch.int32 if first.dtype == torch.float32 else torch.int16
    of_numbers = torch.where(first.isnan(), 0, first.view(integer)), torch.where(second.isnan(), 0, second.view(integer))
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(*of_numbers)


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What runs on other devices, here."""
    with monkeypatch.context() as patch:
        patch.setattr(load, "block_quantizer", lambda: None)
        yield


# ------------------------------------------------------------------------------------------------------------- the bounds


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_element_loses_more_than_half_a_code(bits: int, dtype: torch.dtype) -> None:
    for numel in SIZES:
        for block in BLOCKS:
            quantizer, rows = Quantizer(bits, block), values(numel, dtype)
            for result in {dtype, torch.float32}:
                back = round_trip(quantizer, rows, result)
                error = (back.double() - rows.double()).abs()
                assert (error <= error_bound(rows, quantizer, result)).all(), (numel, block, result)


def test_the_bound_is_absmax_over_254_and_over_14() -> None:
    rows = values(512, torch.float32)
    for bits, divisor in ((8, 254), (4, 14)):
        expected = rows.view(2, 2, 256).abs().amax(2).repeat_interleave(256, 1).double() / divisor
        assert torch.allclose(error_bound(rows, Quantizer(bits)), expected, rtol=2**-13, atol=0)


@pytest.mark.parametrize(("bits", "block", "expected"), [(8, 256, 0.0070), (4, 256, 0.126), (4, 64, 0.108)])
def test_what_normal_numbers_lose_on_the_whole(bits: int, block: int, expected: float) -> None:
    rows = torch.randn(1, 1 << 18, generator=torch.Generator().manual_seed(0))
    lost = ((round_trip(Quantizer(bits, block), rows) - rows).norm() / rows.norm()).item()
    assert lost == pytest.approx(expected, rel=0.03)
    size = Quantizer(bits, block).row_bytes(rows.numel()) / rows.numel()
    assert size == bits / 8 + 4 / block  # 1.016 and 0.516 bytes for a block of 256


def test_ties_go_to_the_even_code_and_the_largest_comes_back_as_it_is() -> None:
    rows = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -127.0, 3.0]])
    assert round_trip(Quantizer(8, 256), rows).tolist() == [[127, 0, 2, 2, 0, -2, -2, 126, -127, 3]]
    rows = torch.tensor([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.5, -7.0]])
    assert round_trip(Quantizer(4, 256), rows).tolist() == [[7, 0, 2, 2, 0, -2, -2, 6, -7]]


# ---------------------------------------------------------------------------------------------------- what a row consists of


@pytest.mark.parametrize("kernel", [True, False])
def test_a_rows_bytes_are_these(kernel: bool, request: pytest.FixtureRequest) -> None:
    if not kernel:
        request.getfixturevalue("without_kernel")
    rows = torch.tensor([[127.0, -1.0, 254.0, 0.0, -2.0]])
    one, two = [0, 0, 128, 63], [0, 0, 0, 64]  # 1.0 and 2.0 in fp32
    assert Quantizer(8, 2).quantize(rows).tolist()[0][4:8] == two  # the second block's scale
    assert Quantizer(8, 2).quantize(rows[:, :4]).tolist() == [[*one, *two, 127, 255, 127, 0]]
    assert Quantizer(8, 4).quantize(rows[:, :2]).tolist() == [[*one, 127, 255, 0, 0]]
    rows = torch.tensor([[7.0, -1.0, 14.0, 0.0, -14.0]])
    assert Quantizer(4, 2).quantize(rows[:, :4]).tolist() == [[*one, *two, 15 | 7 << 4, 15 | 8 << 4, 0, 0]]
    assert Quantizer(4, 2, (2, 3)).quantize(rows).tolist() == [
        [*one, 15 | 7 << 4, 0, 0, 0, *two, *two, 15 | 8 << 4, 1 | 8 << 4, 0, 0]
    ]


def test_a_segment_is_not_rounded_by_its_neighbours() -> None:
    rows = torch.cat([torch.full((2, 40), 1000.0), torch.full((2, 24), 0.01)], dim=1)
    assert (round_trip(Quantizer(8), rows)[:, 40:] == 0).all()
    apart = round_trip(Quantizer(8, segments=(40, 24)), rows)
    assert torch.allclose(apart, rows, rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------------------------ odd numbers


def odd_rows(dtype: torch.dtype) -> torch.Tensor:
    """Blocks of 8 with every kind of odd number."""
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    blocks = [
        [0.0] * 8,
        [-0.0] * 8,
        [-0.0, 1.0, -1.0, 1e-7, -1e-7, 0.0, 0.25, -0.25],
        [INF, 1.0, 0.0, -1.0, 2.0, 3.0, 4.0, 5.0],
        [-INF, INF, 0.0, -1.0, 2.0, 3.0, 4.0, 5.0],
        [1.0, NAN, 0.0, -1.0, 2.0, 3.0, 4.0, 5.0],
        [most, -most, most / 2, 1.0, 0.0, -1.0, most / 3, -most / 200],
        [least, -least / 2, least / 4, 0.0, least / 128, 3 * least, -least, least / 3],
        [1e-38, 1e-40, -1e-42, 1e-45, 0.0, 3e-39, -5e-39, 6e-39],
        [1e-45, -1e-45, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    ]
    return torch.tensor([sum(blocks, [])], dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", [True, False])
def test_odd_numbers(bits: int, dtype: torch.dtype, kernel: bool, request: pytest.FixtureRequest) -> None:
    if not kernel:
        request.getfixturevalue("without_kernel")
    quantizer, rows = Quantizer(bits, 8), odd_rows(dtype)
    back = round_trip(quantizer, rows)
    finite = rows.view(-1, 8).isfinite().all(1)
    assert back.view(-1, 8)[~finite].isnan().all(), "a block with inf or nan is nan"
    assert back.view(-1, 8)[finite].isfinite().all()
    error = (back.double() - rows.double()).abs().view(-1, 8)[finite]
    assert (error <= error_bound(rows, quantizer).view(-1, 8)[finite]).all()
    zeros = back.view(-1)[:16]
    assert (zeros == 0).all() and not zeros.signbit().any(), "-0 comes back as +0"


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_and_torch_give_the_same_bits(bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load.block_quantizer() is not None, "the kernel was not built"
    cases = [(values(numel, dtype), Quantizer(bits, block)) for numel in SIZES for block in BLOCKS]
    cases += [(odd_rows(dtype), Quantizer(bits, 8)), (odd_rows(dtype), Quantizer(bits, 6, (5, 1, 82)))]
    cases += [(values(100, dtype, rows=6)[::2, 3:98], Quantizer(bits, 64))]  # parts of longer rows
    cases += [(values(1000, dtype, scale=1e-37), Quantizer(bits, 64))]
    totals = [torch.randn(rows.shape, generator=torch.Generator().manual_seed(1)) for rows, _ in cases]

    def outcome() -> Iterator[tuple[torch.Tensor, ...]]:
        for (rows, quantizer), total in zip(cases, totals, strict=True):
            packed, added = quantizer.quantize(rows), total.clone()
            quantizer.add(packed, added)
            yield packed, round_trip(quantizer, rows), round_trip(quantizer, rows, torch.float32), added

    kernels = list(outcome())
    monkeypatch.setattr(load, "block_quantizer", lambda: None)
    for (rows, quantizer), ours, theirs in zip(cases, kernels, outcome(), strict=True):
        where = f"{rows.shape}, {quantizer}"
        assert ours[0].numel() == len(rows) * quantizer.row_bytes(rows.shape[1])
        # a scale that is nan may have other bits
        assert torch.equal(ours[0], theirs[0]) or rows.isfinite().logical_not().any(), where
        assert all(same_bits(mine, other) for mine, other in zip(ours[1:], theirs[1:], strict=True)), where


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 4])
def test_a_gpu_gives_the_same_bits(bits: int) -> None:
    for dtype in DTYPES:
        rows, quantizer = values(40_001, dtype), Quantizer(bits)
        packed = quantizer.quantize(rows.cuda())
        assert torch.equal(packed.cpu(), quantizer.quantize(rows))
        back = torch.empty_like(rows, device="cuda")
        quantizer.dequantize(packed, back)
        assert same_bits(back.cpu(), round_trip(quantizer, rows))


def test_threads_give_the_bits_of_one() -> None:
    rows = values(300_001, torch.bfloat16)
    before = torch.get_num_threads()
    found = []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append((Quantizer(8).quantize(rows), round_trip(Quantizer(4), rows)))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_other_threads_run_while_the_kernel_computes() -> None:
    """See [Note: ticks] in adam_gap: no time is measured."""
    rows = torch.ones(1, 16 << 20)
    with ticking() as count:
        for _ in range(MAX_UPDATES):
            before = count()
            packed = Quantizer(8).quantize(rows)
            if count() > before:
                break
        else:
            raise AssertionError("no other thread ran while the kernel computed")
        for _ in range(MAX_UPDATES):
            before = count()
            Quantizer(8).dequantize(packed, rows)
            if count() > before:
                return
    raise AssertionError("no other thread ran while the kernel computed")


# ---------------------------------------------------------------------------------------------------------------- refusals


def test_what_is_no_quantizer_is_refused() -> None:
    for bits in (0, 2, 16):
        with pytest.raises(ConfigError, match=r"gradient_bits: .*write 8 or 4"):
            Quantizer(bits)
    for block in (0, -2, 255):
        with pytest.raises(ConfigError, match=r"levels\.block: .*even number"):
            Quantizer(8, block)


def test_rows_that_do_not_fit_are_refused() -> None:
    rows = torch.ones(2, 64)
    with pytest.raises(ValueError, match="segments"):
        Quantizer(8, segments=(60, 5)).quantize(rows)
    with pytest.raises(ValueError, match="does not fit"):
        Quantizer(8).dequantize(Quantizer(4).quantize(rows), rows)
    with pytest.raises(ValueError, match="fp32, bf16 or fp16"):
        Quantizer(8).quantize(rows.double())
    with pytest.raises(ValueError, match="neighbours in memory"):
        Quantizer(8).quantize(rows.t())
    with pytest.raises(ValueError, match="totals are fp32"):
        Quantizer(8).add(Quantizer(8).quantize(rows), rows.bfloat16())
    with pytest.raises(ValueError, match="as many rows"):
        Quantizer(8).dequantize(Quantizer(8).quantize(rows)[:1], rows)


def test_other_flags_are_another_op() -> None:
    assert replace(load.BLOCK_QUANTIZE, flags=()).build_name != load.BLOCK_QUANTIZE.build_name
