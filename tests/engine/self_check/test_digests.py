"""What digests tell of two tensors: how far they are apart, wherever they differ, and which gradients are wrong."""

from __future__ import annotations

import math

import pytest
import torch

from ds_vertical.engine.self_check.digests import Digest, digest, distance_from_sum, wrong_gradients

LARGE = 300_000  # elements: several pieces, and a rest


def values(numel: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("numel", "one", "other"), [(7, 2, 4), (LARGE, 5, 5 + 4096), (LARGE, 5, 5 + 16 * 4096), (LARGE, 1, 299_999)]
)
def test_swapped_elements_are_apart(numel: int, one: int, other: int) -> None:
    x = values(numel)
    x[one], x[other] = 1.0, 2.0
    y = x.clone()
    y[one], y[other] = 2.0, 1.0
    assert digest(x).distance(digest(y)) * float(x.norm()) == pytest.approx(math.sqrt(2), rel=0.6)


@pytest.mark.parametrize("numel", [3, 1000, LARGE])
@pytest.mark.parametrize("kind", ["one", "all", "permuted", "negated"])
def test_the_distance_is_that_of_the_elements(numel: int, kind: str) -> None:
    x = values(numel)
    y = x.clone()
    if kind == "one":
        y[numel // 2] += 0.1
    elif kind == "all":
        y += 1e-3 * values(numel, seed=2)
    else:
        y = x.roll(1) if kind == "permuted" else -x
    true = float((x - y).norm() / max(x.norm(), y.norm()))
    assert 0.3 * true < digest(x).distance(digest(y)) < 1.8 * true


def test_rounding_alone_is_small_and_equal_values_are_equal() -> None:
    x = values(LARGE)
    assert digest(x).distance(digest(x.clone())) == 0
    assert 0 < digest(x).distance(digest(x * (1 + 2**-23))) < 1e-6
    assert digest(torch.zeros(3)).distance(digest(-torch.zeros(3))) == 0
    assert digest(torch.empty(0)).distance(digest(torch.empty(0))) == 0


def test_what_cannot_be_compared_is_infinitely_far() -> None:
    x = torch.ones(4)
    broken = torch.tensor([1, 1, 1, math.nan])
    for other in (broken, x.view(2, 2), x.double()):
        assert digest(x).distance(digest(other)) == digest(other).distance(digest(x)) == math.inf
    assert digest(torch.tensor([1, 2])).distance(digest(torch.tensor([2, 1]))) == math.inf


def test_a_digest_depends_on_the_values_alone() -> None:
    x, state, first = values(LARGE), torch.get_rng_state(), digest(values(LARGE))
    torch.manual_seed(9)
    torch.set_default_dtype(torch.float64)
    try:
        again = digest(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert again.bits == first.bits and again.projections == pytest.approx(first.projections, rel=1e-12)
    torch.set_rng_state(state)
    digest(x)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 2.0**-9), (torch.float32, 1.25e-6)])
def test_a_gradient_is_held_against_itself_or_an_eighth_of_its_modules(dtype: torch.dtype, least: float) -> None:
    """See [Note: small gradients]: a key bias may be wholly another as far as rounding goes, and no further."""

    def found(bias: float, weight_error: float = 0.0) -> list[str]:
        weight = values(4096, seed=5).double()
        weight /= weight.norm()
        unit = torch.nn.functional.normalize(values(64, seed=6), dim=0)
        ours, theirs = (
            {
                "layer.k.weight": digest((weight * (1 + weight_error * sign)).to(dtype)),
                "layer.k.bias": digest((sign * bias / 2 * unit).to(dtype)),
                "layer.large.weight": digest((1000 * weight).to(dtype)),
            }
            for sign in (1, -1)
        )
        return list(wrong_gradients(ours, theirs))

    assert found(0.4 * least) == []
    assert found(4 * least) == ["layer.k.bias"]  # however large the layer's other gradients are
    assert found(0, 8 * least) == ["layer.k.weight"] if dtype == torch.float32 else True
    assert found(0, 0.02) == ["layer.k.weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_rounding_leaves_beside_the_largest_gradient_is_none(dtype: torch.dtype) -> None:
    """A module's only gradients differ wholly; see [Note: small gradients]."""
    ours, theirs = ({"q.weight": digest(values(4096, seed).to(dtype)), "q.bias": digest(values(64, seed))} for seed in (1, 2))
    size, least = theirs["q.weight"].norm, 2.0**-59 if dtype == torch.float64 else 2.0**-30
    assert wrong_gradients(ours, theirs).keys() == {"q.weight", "q.bias"}
    assert "q.weight" not in wrong_gradients(ours, theirs, 4 * size / least)
    assert "q.weight" in wrong_gradients(ours, theirs, size / least / 4)
    assert wrong_gradients(ours, {}, 1e300).keys() == {"q.weight", "q.bias"}


def test_a_gradient_that_one_order_makes_alone_is_wrong_unless_both_have_none() -> None:
    one: dict[str, Digest] = {"a.weight": digest(values(5))}
    assert wrong_gradients(one, {}) == wrong_gradients({}, one) == {"a.weight": math.inf}
    assert wrong_gradients({}, {}) == {}


def test_what_parametrizes_a_weight_belongs_to_its_module() -> None:
    both = [
        {"k.parametrizations.weight.original0": digest(values(99)), "k.bias": digest(1e-7 * values(3, seed))} for seed in (1, 2)
    ]
    assert wrong_gradients(*both) == {}


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-6, 1e-7, 1e-8, 1e-9])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_rounding_to_fp16_is_no_difference_of_a_sum_however_small(scale: float, count: int) -> None:
    """But one left out is, as far as fp16 has numbers for it."""
    parts = [values(3000, seed) * scale for seed in range(count)]
    rounded = [part.half().float() for part in parts]
    total = digest(sum(rounded, torch.zeros(3000)), torch.float16)
    assert distance_from_sum(total, [digest(part) for part in parts]) <= total.tolerance
    less = digest(sum(rounded[1:], torch.zeros(3000)), torch.float16)
    assert scale < 1e-5 or distance_from_sum(less, [digest(part) for part in parts]) > 0.2
