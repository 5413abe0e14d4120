"""What a layer's forward keeps for its backward: the choices that a block offers, and how much of which rests in which tier.

An example: the backward of a GPT block at 512 tokens computes 9 MB of matrix products again, unless they are kept. Kept on SSD,
they are written once and read once.

A cell is the call of one layer for one micro-batch. Of M micro-batches and L layers M (L - 1) cells can keep: the last layer's
backward follows its forward at once, and never computes anything again. Of the layer before it no cell goes to SSD, where it
would have to be read before it is written: it rests in host memory instead.

[Note: concave] A menu has the policies that save most seconds for their bytes: of its points, fewest bytes first, each saves
fewer seconds per further byte than the one before. A mixture of two policies over the cells then lies on the line between
them, and the linear program needs no whole numbers (LoHan, arXiv 2403.06504, orders tensors by this ratio, its "offloading
benefit").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from ds_vertical.errors import CostsError
from ds_vertical.planner.activation_tiers import spread
from ds_vertical.schedule.activations import LOOK_AHEAD
from ds_vertical.schedule.events import MAX_SAVES, Cell
from ds_vertical.types import BELOW, HOLDING, IN_FILES, ActivationPolicy, Tier, check_number, check_share, point_name, refuse

ON_DEVICE: Final = LOOK_AHEAD + 2  # cells there at a time of those that move: one that is made or used, and those loaded ahead
IN_TRANSIT: Final = MAX_SAVES + LOOK_AHEAD + 1  # cells in host buffers on their way to SSD, and back
_MOST_POINTS: Final = 6  # of a menu
_NOT_ON_SSD: Final = 2  # last layers


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
        """Of the point: see `types.point_name`."""
        return point_name(self.policy, self.outputs)


NOTHING: Final = PolicyPoint("none", 0.0, 0.0)


def named_point(name: str, num_bytes: float, saved_s: float) -> PolicyPoint:
    """The point of this name, as `PolicyPoint.name` has it."""
    policy, _, outputs = name.partition("_")
    assert policy in ("none", *BELOW)
    return PolicyPoint(cast(ActivationPolicy, policy), num_bytes, saved_s, int(outputs) if outputs else None)


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

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the points that keep a part of the products, which a run can have and no key of the JSON asks for."""
        return tuple(point.name for point in self.points if point.outputs is not None)

    def only(self, name: str) -> KeepMenu:
        """The one point of this name, such as the policy that the JSON's `activations.keep` asks for; none for "none" and for
        what others do better."""
        return replace(self, points=tuple(point for point in self.points if point.name == name))

    def times(self, count: int) -> KeepMenu:
        """The menu of a layer of so many such blocks."""
        points = (replace(p, num_bytes=count * p.num_bytes, saved_s=count * p.saved_s) for p in self.points)
        return replace(self, points=tuple(points), num_layers=-(-self.num_layers // count))

    def point(self, policy: ActivationPolicy) -> PolicyPoint | None:
        """The point of a policy; None where others save more for as many bytes."""
        return next((p for p in self.points if p.policy == policy and p.outputs is None), None)

    def at_most(self, policy: ActivationPolicy) -> PolicyPoint:
        """The point of a policy, or of the next lower one that there is."""
        while policy != "none":
            if (point := self.point(policy)) is not None:
                return point
            policy = BELOW[policy]
        return NOTHING


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
    """One menu for layers of several kinds, where all cells follow one policy: bytes and seconds of the mean cell. A kind that
    lacks the policy follows the next lower one that it has. None where there are no layers."""
    count = sum(menu.num_layers for menu in menus)
    if not count:
        return None
    if len(menus) == 1:
        return menus[0]
    names: dict[ActivationPolicy, None] = {p.policy: None for menu in menus for p in menu.points if p.outputs is None}
    points = []
    for name in names:
        own = [(menu.num_layers / count, menu.at_most(name)) for menu in menus]
        points.append(PolicyPoint(name, sum(w * p.num_bytes for w, p in own), sum(w * p.saved_s for w, p in own)))
    return KeepMenu(" and ".join(menu.kind for menu in menus), count, concave(points))


@dataclass(frozen=True)
class KeptShare:
    """What a plan keeps: the shares of the M (L - 1) cells that follow `point`, by the tier where their bytes rest until the
    backward. The other cells keep nothing. Raises CostsError."""

    point: PolicyPoint
    device: float = 0.0
    host: float = 0.0
    ssd: float = 0.0

    def __post_init__(self) -> None:
        for tier in Tier:
            check_share(f"kept.{tier}", self.share(tier))
        if self.total > 1 + 1e-9:
            raise refuse("kept", "ssd", self.ssd, f"{1 - self.device - self.host} or less: shares add up to 1 at most")

    def share(self, tier: Tier) -> float:
        """Of the cells, those whose bytes rest in `tier`."""
        return {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.SSD: self.ssd}[tier]

    @property
    def total(self) -> float:
        """Of the cells, those that follow `point`."""
        return self.device + self.host + self.ssd

    def cells(self, num_layers: int, num_micro_batches: int, one_memory: bool) -> dict[Cell, Tier]:
        """The cells that follow `point`, and where their bytes rest; with `one_memory` the device stands for host memory."""
        return kept_cells(num_layers, num_micro_batches, {tier: self.share(tier) for tier in Tier}, one_memory)

    def resting_bytes(self, num_layers: int, num_micro_batches: int) -> dict[Tier, float]:
        """Bytes that rest in each tier at most."""
        shares = tier_shares(num_layers, {tier: self.share(tier) for tier in Tier})
        return {tier: num_cells(num_layers, num_micro_batches) * self.point.num_bytes * shares[tier] for tier in Tier}

    def buffer_bytes(self) -> dict[Tier, float]:
        """Bytes of each tier's buffers, through which what moves passes."""
        tiers = [tier for tier in Tier if self.share(tier) > 0]
        return {tier: buffer_bytes(tier, self.point.num_bytes, tiers) for tier in Tier}


def keep_keys(kept: KeptShare | None, one_memory: bool) -> dict[str, Any]:
    """The keys of the JSON's `activations` that ask for a plan's way to keep; None: nothing. Where there is `one_memory`, what
    stays on the device beside an SSD is what rests in host memory. Raises CostsError for three tiers, which have no keys."""
    if kept is None or not kept.total:
        return {"keep": "none"}
    keys: dict[str, Any] = {"keep": kept.point.policy}
    if not kept.point.num_bytes:
        return keys | _share_key(kept.total)
    beside = kept.host + (kept.device if one_memory and kept.ssd else 0.0)
    if kept.ssd and kept.device and not one_memory:
        raise refuse("kept", "device", kept.device, "0: what does not rest on SSD rests in host memory")
    tier = Tier.SSD if kept.ssd else Tier.DEVICE if kept.device else Tier.HOST
    share = round(kept.share(tier), 6)
    keys |= {"keep_device": tier.value} | _share_key(share)
    if tier is not Tier.HOST and beside:
        keys["keep_host_share"] = round(min(beside, 1 - share), 6)
    return keys


def _share_key(share: float) -> dict[str, float]:
    """`keep_share`, where it is not the default."""
    return {} if round(share, 6) >= 1 else {"keep_share": round(share, 6)}


def num_cells(num_layers: int, num_micro_batches: int) -> int:
    """Cells that can keep."""
    return num_micro_batches * max(0, num_layers - 1)


def kept_cells(
    num_layers: int, num_micro_batches: int, shares: Mapping[Tier, float], one_memory: bool = False
) -> dict[Cell, Tier]:
    """The cells that keep, and where: spread evenly over all that can, in the order in which they run. `shares`: of these, per
    tier. What the layer before the last keeps rests in host memory in the place of SSD, which would not have it written before
    it is used; with `one_memory` the device stands for host memory."""
    tiers = [tier for tier in Tier if shares.get(tier, 0.0) > 0]
    chosen = spread(num_cells(num_layers, num_micro_batches), [shares[tier] for tier in tiers])
    cells = {divmod(number, num_micro_batches): tiers[index] for number, index in enumerate(chosen) if index >= 0}
    late = num_layers - _NOT_ON_SSD
    cells = {cell: Tier.HOST if IN_FILES[tier] and cell[0] >= late else tier for cell, tier in cells.items()}
    return {cell: Tier.DEVICE if one_memory and tier is Tier.HOST else tier for cell, tier in cells.items()}


def tier_shares(num_layers: int, shares: Mapping[Tier, float]) -> dict[Tier, float]:
    """Of all cells, those in each tier: of what is to go to SSD the last layer's part is in host memory."""
    late = 1 / (num_layers - 1) if num_layers > 1 else 0.0
    moved = {tier: shares.get(tier, 0.0) * (1 - late if IN_FILES[tier] else 1.0) for tier in Tier}
    moved[Tier.HOST] += sum(shares.get(tier, 0.0) * late for tier in Tier if IN_FILES[tier])
    return moved


def rounded(kept: KeptShare, num_layers: int, num_micro_batches: int) -> KeptShare:
    """Shares of whole cells, never more than those given: what a plan has room for stays enough."""
    count = num_cells(num_layers, num_micro_batches)
    shares = {tier: int(kept.share(tier) * count + 1e-6) / count if count else 0.0 for tier in Tier}
    return KeptShare(kept.point, shares[Tier.DEVICE], shares[Tier.HOST], shares[Tier.SSD])


def buffer_bytes(tier: Tier, each: float, tiers: Iterable[Tier]) -> float:
    """Of a tier, the bytes of the buffers for cells of `each` bytes that go to `tiers`."""
    going = set(tiers) - {Tier.DEVICE}
    cells = {Tier.DEVICE: ON_DEVICE if going else 0, Tier.HOST: IN_TRANSIT if Tier.SSD in going else 0, Tier.SSD: 0}
    return each * cells[tier]
