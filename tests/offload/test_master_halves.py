"""An fp32 number comes back from its low half and its rounding to bf16 with every bit, whatever its bits are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from adam_gap import MAX_UPDATES, ticking

from ds_vertical.compat.ops import load
from ds_vertical.offload.masters.halves import BLOCK_ELEMENTS, Exceptions, join, split

PATTERNS = 1 << 32
CHUNK = 1 << 24
KERNEL_BLOCK, ALONE = 1 << 12, 1 << 17  # of the kernel: elements worked on at a time, and up to which one thread works


@pytest.fixture(autouse=True, params=["kernel", "torch"])
def codec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes in a test."""
    assert load.master_halves() is not None, "the kernel was not built"
    if request.param == "torch":
        monkeypatch.setattr(load, "master_halves", lambda: None)


kernel_alone = pytest.mark.parametrize("codec", ["kernel"], indirect=True)


def numbers(patterns: torch.Tensor) -> torch.Tensor:
    """fp32 numbers with these bits (int64)."""
    return patterns.to(torch.int32).view(torch.float32)  # wraps


def there_and_back(master: torch.Tensor, rounded: list[torch.Tensor], most: int | None = None) -> Exceptions | None:
    """Compress and restore in one memory, as a slot does; every bit must be there again."""
    before, low = master.clone(), torch.empty(master.numel(), dtype=torch.int16)
    exceptions = split(master, rounded, low, master.numel() if most is None else most)
    assert torch.equal(master.view(torch.int32), before.view(torch.int32)), "the masters have changed"
    if exceptions is not None:
        memory, apart = torch.full((2, before.numel()), float("nan"))
        memory.view(torch.int16)[: low.numel()] = low
        join(memory.view(torch.int16)[: low.numel()], rounded, exceptions, memory)
        join(low, rounded, exceptions, apart)
        for found in (memory, apart):
            assert torch.equal(found.view(torch.int32), before.view(torch.int32))
    return exceptions


def special_patterns() -> torch.Tensor:
    """Around each power of two, zero, infinity and the largest number, both signs, ties and NaN payloads among them."""
    high = torch.tensor([0, 1, 2, 0x7F, 0x80, 0x81, 0x3F7F, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FFF])
    low = torch.tensor([0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    positive = ((high << 16)[:, None] | low[None, :]).flatten()
    return torch.cat([positive, positive | 0x80000000])


@pytest.mark.parametrize("numel", [0, 1, 1000, KERNEL_BLOCK + 1, ALONE + 1, 3 * BLOCK_ELEMENTS + 17])
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


def compressed(master: torch.Tensor, rounded: Sequence[torch.Tensor], most: int) -> list[torch.Tensor] | None:
    """Low halves, places and high halves; None where exceptions are too many."""
    low = torch.empty(master.numel(), dtype=torch.int16)
    exceptions = split(master, rounded, low, most)
    return None if exceptions is None else [low, exceptions.places, exceptions.high]


@kernel_alone
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("first", [0, 1, 7])
def test_kernel_and_torch_give_the_same_bits(first: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any size, from any element on, for values in several tensors, with exceptions up to the number that is too many."""
    random = torch.Generator().manual_seed(first)
    cases = []
    for sizes in ([5], [KERNEL_BLOCK], [3, 0, 2 * ALONE + 1, 0], [70_000, 1, 1, 63, 200_001], [0], []):
        numel = sum(sizes)
        master = numbers(torch.randint(0, PATTERNS, (first + numel,), generator=random))[first:]
        values = torch.empty(first + numel, dtype=torch.bfloat16)[first:].copy_(master)
        values[:: max(1, numel // 20)] += 1
        cases.append((master, list(values.split(sizes)) if sizes else []))
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for case in cases:
            there_and_back(*case)
        full = [compressed(master, rounded, master.numel()) for master, rounded in cases]
        counts = [0 if found is None else found[1].numel() for found in full]
        scarce = [[compressed(*case, most) for most in (n, n - 1, 0)] for case, n in zip(cases, counts, strict=True)]
        monkeypatch.setattr(load, "master_halves", lambda: None)
        for case, number, found, others in zip(cases, counts, full, scarce, strict=True):
            expected = compressed(*case, case[0].numel())
            assert found is not None and expected is not None
            assert all(map(torch.equal, found, expected)) and found[1].dtype == expected[1].dtype == torch.int32
            assert others[0] is not None and all(map(torch.equal, others[0], expected))
            assert number == 0 or others[1:] == [None, None]
    finally:
        torch.set_num_threads(torch_threads)
    assert max(counts) > 1000


@kernel_alone
def test_other_threads_run_while_the_kernel_computes() -> None:
    """See [Note: ticks] in adam_gap: no time is measured."""
    master = torch.ones(16 << 20)
    rounded, low = [master.to(torch.bfloat16)], torch.empty(master.numel(), dtype=torch.int16)
    exceptions = split(master, rounded, low, 0)
    assert exceptions is not None
    with ticking() as count:
        for compute in (lambda: split(master, rounded, low, 0), lambda: join(low, rounded, exceptions, master)):
            before, calls = count(), 0
            while count() == before:
                assert calls < MAX_UPDATES, "no other thread ran while the kernel computed"
                compute()
                calls += 1


@kernel_alone
def test_what_the_kernel_would_misread_is_refused() -> None:
    master, low = torch.ones(64), torch.empty(64, dtype=torch.int16)
    rounded = master.to(torch.bfloat16)
    none = Exceptions(torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int16))
    inside = master.view(torch.int16)
    behind = Exceptions(torch.tensor([64], dtype=torch.int32), torch.zeros(1, dtype=torch.int16))
    for args, words in [
        ((master.double(), [rounded], low, 0), "masters in fp32"),
        ((torch.ones(128)[::2], [rounded], low, 0), "masters in fp32, contiguous"),
        ((master, [rounded.half()], low, 0), "numbers in bf16"),
        ((master, [rounded], low.int(), 0), "halves in int16"),
        ((master, [rounded[:63]], low, 0), "as many low halves"),
        ((master, [rounded], low[:63], 0), "as many low halves"),
        ((master, [rounded], inside[:64], 0), "would overwrite"),
    ]:
        with pytest.raises(ValueError, match=words):
            split(*args)
    with pytest.raises(ValueError, match="begin where these do"):
        join(inside[64:], [rounded], none, master)
    with pytest.raises(ValueError, match="place lies behind"):
        join(low, [rounded], behind, master)
    assert torch.equal(master, torch.ones(64))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_pattern_of_fp32_comes_back() -> None:
    """All 2^32 of them."""
    for start in range(0, PATTERNS, CHUNK):
        master = numbers(torch.arange(start, start + CHUNK))
        there_and_back(master, [master.to(torch.bfloat16)])


@kernel_alone
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_pattern_of_fp32_is_compressed_as_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 2^32 of them, beside what they are rounded to, and each 64th of them beside zero."""
    for start in range(0, PATTERNS, CHUNK):
        master = numbers(torch.arange(start, start + CHUNK))
        values = master.to(torch.bfloat16)
        values[start >> 24 & 63 :: 64] = 0
        found = compressed(master, [values], CHUNK)
        with monkeypatch.context() as patch:
            patch.setattr(load, "master_halves", lambda: None)
            expected = compressed(master, [values], CHUNK)
        assert found is not None and expected is not None and all(map(torch.equal, found, expected))
