"""An fp32 number comes back from its low half and its rounding to bf16 with every bit, whatever its bits are."""

from __future__ import annotations

import pytest
import torch

from ds_vertical.offload.masters.halves import BLOCK_ELEMENTS, Exceptions, join, split

PATTERNS = 1 << 32
CHUNK = 1 << 24


def numbers(patterns: torch.Tensor) -> torch.Tensor:
    """fp32 numbers with these bits (int64)."""
    return patterns.to(torch.int32).view(torch.float32)  # wraps


def there_and_back(master: torch.Tensor, rounded: list[torch.Tensor], most: int | None = None) -> Exceptions | None:
    """Compress and restore in one memory, as a slot does; every bit must be there again."""
    before, low = master.clone(), torch.empty(master.numel(), dtype=torch.int16)
    exceptions = split(master, rounded, low, master.numel() if most is None else most)
    assert torch.equal(master.view(torch.int32), before.view(torch.int32)), "the masters have changed"
    if exceptions is not None:
        memory = torch.full_like(before, float("nan"))
        memory.view(torch.int16)[: low.numel()] = low
        join(memory.view(torch.int16)[: low.numel()], rounded, exceptions, memory)
        assert torch.equal(memory.view(torch.int32), before.view(torch.int32))
    return exceptions


def special_patterns() -> torch.Tensor:
    """Around each power of two, zero, infinity and the largest number, both signs, ties and NaN payloads among them."""
    high = torch.tensor([0, 1, 2, 0x7F, 0x80, 0x81, 0x3F7F, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FFF])
    low = torch.tensor([0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    positive = ((high << 16)[:, None] | low[None, :]).flatten()
    return torch.cat([positive, positive | 0x80000000])


@pytest.mark.parametrize("numel", [1, 1000, 3 * BLOCK_ELEMENTS + 17])
def test_any_bits_come_back(numel: int) -> None:
    drawn = torch.randint(0, PATTERNS, (numel,), generator=torch.Generator().manual_seed(numel))
    drawn[: special_patterns().numel()] = special_patterns()[:numel]
    master = numbers(drawn)
    there_and_back(master, [master.to(torch.bfloat16)])


def test_only_ties_that_were_rounded_down_and_nan_are_exceptions() -> None:
    patterns = special_patterns()
    master = numbers(patterns)
    exceptions = there_and_back(master, [master.to(torch.bfloat16)])
    assert exceptions is not None
    odd = set(exceptions.places.tolist())
    ties = {i for i, bits in enumerate(patterns.tolist()) if bits & 0x1FFFF == 0x8000}
    nan = set(master.isnan().nonzero().flatten().tolist())
    assert ties - nan <= odd <= ties | nan


def test_training_masters_have_some_ten_exceptions_in_a_mebi() -> None:
    master = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    exceptions = there_and_back(master, [master.to(torch.bfloat16)])
    assert exceptions is not None and 1 <= exceptions.places.numel() < 40


def test_a_value_that_is_not_the_rounding_is_an_exception_as_a_whole() -> None:
    master = torch.randn(1000)
    other = [torch.zeros(400, dtype=torch.bfloat16), torch.ones(600, dtype=torch.bfloat16)]
    assert there_and_back(master, other, most=900) is None
    exceptions = there_and_back(master, other)
    assert exceptions is not None and exceptions.places.numel() > 900


def test_values_of_several_parameters_stand_one_behind_the_other() -> None:
    sizes = [5, BLOCK_ELEMENTS, 3, 2 * BLOCK_ELEMENTS + 1]
    master = torch.randn(sum(sizes))
    there_and_back(master, list(master.to(torch.bfloat16).split(sizes)), most=1000)


def test_exceptions_are_counted_over_all_blocks() -> None:
    master = torch.zeros(2 * BLOCK_ELEMENTS)
    master.view(torch.int32)[[0, 1, BLOCK_ELEMENTS + 7]] = 0x8000  # ties that are rounded down to zero
    rounded = [master.to(torch.bfloat16)]
    assert there_and_back(master, rounded, most=2) is None
    exceptions = there_and_back(master, rounded, most=3)
    assert exceptions is not None and exceptions.places.tolist() == [0, 1, BLOCK_ELEMENTS + 7]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_pattern_of_fp32_comes_back() -> None:
    """All 2^32 of them."""
    for start in range(0, PATTERNS, CHUNK):
        master = numbers(torch.arange(start, start + CHUNK))
        there_and_back(master, [master.to(torch.bfloat16)])
