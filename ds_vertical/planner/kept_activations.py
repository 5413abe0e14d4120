"""What a layer's forward keeps for its backward: the choices that a block offers, and how much of which rests in which tier.

An example: the backward of a GPT block at 512 tokens computes 9 MB of matrix products again, unless they are kept. Kept on SSD,
they are written once and read once.

A cell is the call of one layer for one micro-batch. Of M micro-batches and L layers M (L - 1) cells can keep: the last layer's
backward follows its forward at once, and never computes anything again. Cells of the last two layers do not go to SSD, where
they would have to be read before they are written.

[Note: concave] A menu has the policies that save most seconds for their bytes: of its points, fewest bytes first, each saves
fewer seconds per further byte than the one before. A mixture of two policies over the cells then lies on the line between
them, and the linear program needs no whole numbers (LoHan, arXiv 2403.06504, orders tensors by this ratio, its "offloading
benefit").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ds_vertical.errors import CostsError
from ds_vertical.planner.activation_policy import spread
from ds_vertical.schedule.activations import LOOK_AHEAD
from ds_vertical.types import HOLDING, IN_FILES, ActivationPolicy, Tier, check_number, check_share, refuse

Cell = tuple[int, int]  # a layer and a micro-batch
ON_DEVICE: Final = LOOK_AHEAD + 2  # cells there at a time of those that move: one that is made or used, and those loaded ahead
IN_TRANSIT: Final = 3  # cells in host buffers on their way to SSD: one is filled while two are written
_MOST_POINTS: Final = 6  # of a menu
_NO_CELLS_ON_SSD: Final = 2  # last layers


@dataclass(frozen=True)
class PolicyPoint:
    """One way to keep. `num_bytes` that rest of a cell, `saved_s` of its recompute that they save. `outputs`: of "products",
    how many of the products are kept, those that save most for their bytes (None: all, as the policy of that name does)."""

    policy: ActivationPolicy
    num_bytes: float
    saved_s: float
    outputs: int | None = None

    def __post_init__(self) -> None:
        check_number("policy", "num_bytes", self.num_bytes, 0.0, "bytes of a cell, 0 or more")
        check_number("policy", "saved_s", self.saved_s, 0.0, "seconds of a cell, 0 or more")
        if self.num_bytes and self.policy not in HOLDING:
            raise refuse("policy", "num_bytes", self.num_bytes, f'0 for the policy "{self.policy}", which keeps no bytes')

    @property
    def name(self) -> str:
        """Of the point: the policy, and the number of products where it is not all."""
        return self.policy if self.outputs is None else f"{self.policy}_{self.outputs}"


NOTHING: Final = PolicyPoint("none", 0.0, 0.0)


@dataclass(frozen=True)
class KeepMenu:
    """What the blocks of one kind offer, see [Note: concave]: bytes and seconds of one cell. `num_layers`: of the model, those
    of this kind. Raises CostsError for points that are not concave."""

    kind: str
    num_layers: int
    points: tuple[PolicyPoint, ...]

    def __post_init__(self) -> None:
        if self.points != concave(self.points):
            raise CostsError(f"the menu of {self.kind} is not concave: {self.points}; take `concave` of them")

    def only(self, policy: ActivationPolicy) -> KeepMenu:
        """The points that the JSON's `activations.keep` can say with one policy: what it keeps of some cells, and what it
        leaves out of the recompute of the others."""
        named = (p for p in self.points if p.outputs is None and p.policy in ({"free", policy} - {"none"}))
        return replace(self, points=() if policy == "none" else concave(named))

    def point(self, policy: ActivationPolicy) -> PolicyPoint | None:
        """The point of a policy; None where others save more for as many bytes."""
        return next((p for p in self.points if p.policy == policy and p.outputs is None), None)


def concave(points: Iterable[PolicyPoint]) -> tuple[PolicyPoint, ...]:
    """The points above the line between any two others and "none", fewest bytes first."""
    hull = [NOTHING]
    for point in sorted(points, key=lambda p: (p.num_bytes, -p.saved_s)):
        if point.saved_s <= hull[-1].saved_s:
            continue
        while len(hull) > 1 and _benefit(hull[-2], hull[-1]) <= _benefit(hull[-2], point):
            hull.pop()
        hull.append(point)
    return tuple(hull[1:])


def _benefit(less: PolicyPoint, more: PolicyPoint) -> float:
    """Seconds saved for each further byte."""
    num_bytes, saved_s = more.num_bytes - less.num_bytes, more.saved_s - less.saved_s
    return saved_s / num_bytes if num_bytes else float("inf") if saved_s > 0 else 0.0


def thinned(points: Sequence[PolicyPoint], most: int = _MOST_POINTS) -> tuple[PolicyPoint, ...]:
    """At most `most` points of a concave menu: those without which it loses least go. Whole policies stay."""
    kept = list(points)
    while len(kept) > most:
        losses = [(_loss(kept, i), i) for i, point in enumerate(kept) if point.outputs is not None]
        if not losses:
            break
        del kept[min(losses)[1]]
    return tuple(kept)


def _loss(points: Sequence[PolicyPoint], i: int) -> float:
    """Seconds by which the point lies above the line between its neighbours."""
    before, point = points[i - 1] if i else NOTHING, points[i]
    if i + 1 == len(points):
        return point.saved_s - before.saved_s
    return point.saved_s - before.saved_s - _benefit(before, points[i + 1]) * (point.num_bytes - before.num_bytes)


def mean_menu(menus: Sequence[KeepMenu]) -> KeepMenu | None:
    """One menu for layers of several kinds, where all cells follow one policy: bytes and seconds of the mean cell. A policy
    that a kind lacks keeps nothing there. None where there are no layers."""
    count = sum(menu.num_layers for menu in menus)
    if not count:
        return None
    if len(menus) == 1:
        return menus[0]
    names = dict.fromkeys(point.policy for menu in menus for point in menu.points if point.outputs is None)
    points = []
    for name in names:
        own = [(menu.num_layers / count, menu.point(name) or NOTHING) for menu in menus]
        points.append(PolicyPoint(name, sum(w * p.num_bytes for w, p in own), sum(w * p.saved_s for w, p in own)))
    return KeepMenu(" and ".join(menu.kind for menu in menus), count, concave(points))


@dataclass(frozen=True)
class KeptShare:
    """What a plan keeps: the shares of the M (L - 1) cells that follow `point`, by the tier where their bytes rest until the
    backward. `other`: what the other cells follow, which keeps no bytes. Raises CostsError."""

    point: PolicyPoint
    device: float = 0.0
    host: float = 0.0
    ssd: float = 0.0
    other: PolicyPoint = NOTHING

    def __post_init__(self) -> None:
        for tier in Tier:
            check_share(f"kept.{tier}", self.share(tier))
        if self.total > 1 + 1e-9:
            raise refuse("kept", "ssd", self.ssd, f"{1 - self.device - self.host} or less: shares add up to 1 at most")
        if self.other.num_bytes:
            raise refuse("kept", "other", self.other.name, '"none" or "free", which keep no bytes')

    def share(self, tier: Tier) -> float:
        """Of the cells, those whose bytes rest in `tier`."""
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.SSD: self.ssd}[tier]

    @property
    def total(self) -> float:
        """Of the cells, those that follow `point`."""
        return self.device + self.host + self.ssd

    @property
    def moves(self) -> bool:
        """Whether bytes leave the device."""
        return bool(self.point.num_bytes and self.host + self.ssd)

    def policies(self, num_layers: int, num_micro_batches: int) -> Mapping[Cell, Tier]:
        """The cells that follow `point`, and where their bytes rest."""
        return kept_cells(num_layers, num_micro_batches, {tier: self.share(tier) for tier in Tier})


def num_cells(num_layers: int, num_micro_batches: int, tier: Tier = Tier.DEVICE) -> int:
    """Cells that can keep in a tier."""
    return num_micro_batches * max(0, num_layers - (_NO_CELLS_ON_SSD if IN_FILES[tier] else 1))


def kept_cells(num_layers: int, num_micro_batches: int, shares: Mapping[Tier, float]) -> dict[Cell, Tier]:
    """The cells that keep, and where: spread evenly over all that can, in the order in which they run. `shares`: of these, per
    tier. A cell of the last two layers whose turn it is for SSD keeps nothing; see the module's notes."""
    tiers = [tier for tier in Tier if shares.get(tier, 0.0) > 0]
    chosen = spread(num_cells(num_layers, num_micro_batches), [shares[tier] for tier in tiers])
    cells = ((divmod(number, num_micro_batches), index) for number, index in enumerate(chosen) if index >= 0)
    last = num_layers - _NO_CELLS_ON_SSD
    return {cell: tiers[index] for cell, index in cells if not (IN_FILES[tiers[index]] and cell[0] >= last)}


def rounded(kept: KeptShare, num_layers: int, num_micro_batches: int) -> KeptShare:
    """Shares of whole cells, never more than those given: what a plan has room for stays enough."""
    count = num_cells(num_layers, num_micro_batches)
    shares = {tier.value: int(kept.share(tier) * count + 1e-6) / count if count else 0.0 for tier in Tier}
    return replace(kept, **shares)


def kept_bytes(kept: KeptShare | None, num_layers: int, num_micro_batches: int) -> Iterator[tuple[Tier, float, bool]]:
    """(tier, bytes, whether they are buffers that bytes only pass through): what is kept takes so much of each tier."""
    if kept is None or not kept.point.num_bytes:
        return
    each = kept.point.num_bytes
    for tier in Tier:
        yield tier, num_cells(num_layers, num_micro_batches, tier) * kept.share(tier) * each, False
    yield from ((tier, each * cells, True) for tier, cells in _buffers(kept.host > 0, kept.ssd > 0))


def _buffers(to_host: bool, to_ssd: bool) -> Iterator[tuple[Tier, int]]:
    if to_host or to_ssd:
        yield Tier.DEVICE, ON_DEVICE
    if to_ssd:
        yield Tier.HOST, IN_TRANSIT


def buffer_bytes(tier: Tier, each: float, tiers: Iterable[Tier]) -> float:
    """Of a tier, the bytes of the buffers for cells of `each` bytes that go to `tiers`."""
    going = set(tiers)
    return sum(each * cells for own, cells in _buffers(Tier.HOST in going, Tier.SSD in going) if own is tier)
