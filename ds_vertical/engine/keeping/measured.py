"""What the first step of an engine has shown of its model and of its ranks' memory, as numbers that ranks can compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from ds_vertical.model.kept.probe import BlockTimes, Probe
from ds_vertical.model.layers import BlockKind, LayerMap, num_elements
from ds_vertical.planner.kept_activations import NOTHING, KeepMenu, PolicyPoint, concave, mean_menu, named_point, thinned
from ds_vertical.planner.model_shape import Seconds
from ds_vertical.schedule.events import Event, Op
from ds_vertical.schedule.trace import Tracer
from ds_vertical.types import BELOW, HOLDING, PRE, ActivationPolicy, Tier

_LEAST_S: Final = 1e-9  # that a policy which the JSON asks for saves of a call: a menu has none that saves nothing


class EventTimes(Tracer):
    """A tracer that also keeps the seconds of what computes in a step; every record goes on to `inner`."""

    def __init__(self, inner: Tracer) -> None:
        self.keeps = inner.keeps
        self._inner = inner
        self._seconds: dict[tuple[Op, bool], list[float]] = {}
        self.wait, self.count, self.step = inner.wait, inner.count, inner.step

    def span(
        self, resource: str, name: object, start: float, end: float, num_bytes: int = 0, *, issue: float | None = None
    ) -> None:
        """See `Tracer.span`."""
        if isinstance(name, Event) and name.op in (Op.F, Op.HEAD, Op.B):
            self._seconds.setdefault((name.op, name.layer == PRE), []).append(end - start)
        self._inner.span(resource, name, start, end, num_bytes, issue=issue)

    def median_s(self, op: Op, pre: bool = False) -> float:
        """Of the events of a kind, of `pre` or of layers; 0 where there are none."""
        return median(self._seconds.get((op, pre), [0.0]))


@dataclass(frozen=True)
class MeasuredStep:
    """Of one rank. `seconds`: of one micro-batch through a block and through what stands around them. `input_bytes`: of what
    passes to a block. `menu`: the mean block's (bytes, seconds saved) by the name of a point; empty where nothing was measured.
    `reasons`: why it lacks a policy. `room`: further bytes that what is kept may take of each tier; None: any number.
    `num_micro_batches`: of the step, on the rank with fewest; None: as many as a step may have."""

    seconds: Seconds
    input_bytes: int
    menu: Mapping[str, tuple[float, float]]
    reasons: tuple[str, ...]
    room: Mapping[Tier, float | None]
    num_micro_batches: int | None = None

    @property
    def points(self) -> tuple[PolicyPoint, ...]:
        """The menu's points, as the planner has them."""
        return thinned(concave(named_point(name, *point) for name, point in self.menu.items()))

    def keep_menu(self, num_layers: int, blocks_per_layer: int) -> KeepMenu:
        """What a layer of so many blocks offers."""
        return KeepMenu("block", blocks_per_layer * num_layers, self.points).times(blocks_per_layer)


def measured_step(
    probe: Probe,
    times: EventTimes | None,
    layers: LayerMap,
    room: Mapping[Tier, float | None],
    policy: ActivationPolicy | None = None,
) -> MeasuredStep:
    """What a step has measured on this rank. `times`: None where events run on after the host has issued them. `policy`: the
    one that the JSON asks for, which is then all of the menu; None: it leaves that open. A block of a kind that was not
    measured is taken for the measured one of its class that is nearest in size; of a class of which none was, no block has run
    a backward, and it is left out."""
    kinds = [block.kind for block in layers.keeping_blocks]
    counts = Counter(near for kind in kinds if (near := _nearest(kind, probe.found)) is not None)
    own = [(probe.found[kind], count) for kind, count in counts.items()]
    menu = {} if not own else _mean_points(own) if policy is None else _mean_point(own, policy)
    reasons = dict.fromkeys(reason for block, _ in own for reason in block.reasons)
    elements = [kind[1] for kind in kinds if _nearest(kind, counts) is not None]
    seconds = _seconds(own, times, layers, elements) if own else Seconds(0.0, 0.0, 0.0, 0.0, 0.0)
    return MeasuredStep(seconds, max((each.input_bytes for each, _ in own), default=0), menu, tuple(reasons), room)


def _nearest(kind: BlockKind, found: Iterable[BlockKind]) -> BlockKind | None:
    """Of the kinds found the one of the same class that is nearest in size."""
    return min((each for each in found if each[0] is kind[0]), key=lambda each: abs(each[1] - kind[1]), default=None)


def nothing_measured(reason: str, room: Mapping[Tier, float | None]) -> MeasuredStep:
    """Of a step that could not be measured."""
    return MeasuredStep(Seconds(0.0, 0.0, 0.0, 0.0, 0.0), 0, {}, (reason,), room)


def _mean_points(own: Sequence[tuple[BlockTimes, int]]) -> dict[str, tuple[float, float]]:
    """Bytes and seconds of the mean block; a kind that lacks a policy follows the next lower one, and one that has no more
    products than a part keeps all of them."""
    menus = [KeepMenu(str(n), count, concave(_policy_points(block))) for n, (block, count) in enumerate(own)]
    mean = mean_menu(menus)
    found = {p.name: (0.0, 0.0) for each, _ in own for p in each.points}
    for point in mean.points if mean is not None else ():
        found[point.name] = point.num_bytes, point.saved_s
    for name in {p.name for each, _ in own for p in each.points if p.outputs is not None}:
        found[name] = _mean([(_at_most(block, "products", name), number) for block, number in own])
    return found


def _mean(own: Sequence[tuple[PolicyPoint, int]]) -> tuple[float, float]:
    """Bytes and seconds of the mean of so many points each."""
    count = sum(number for _, number in own)
    return sum(n * p.num_bytes for p, n in own) / count, sum(n * p.saved_s for p, n in own) / count


def _mean_point(own: Sequence[tuple[BlockTimes, int]], policy: ActivationPolicy) -> dict[str, tuple[float, float]]:
    """Bytes and seconds of the mean block with the policy that the JSON asks for, also where others save more for their bytes.
    A kind that lacks it follows the next lower one, as its calls will; empty where none keeps any bytes."""
    num_bytes, saved_s = _mean([(_at_most(block, policy), number) for block, number in own])
    return {policy: (num_bytes, max(saved_s, _LEAST_S))} if num_bytes else {}


def _at_most(block: BlockTimes, policy: ActivationPolicy, part: str = "") -> PolicyPoint:
    """What a kind of block keeps that is asked for a policy, or a `part` of its products."""
    points = {point.name: point for point in _policy_points(block)}
    if part in points:
        return points[part]
    while policy != "none" and policy not in points:
        policy = BELOW[policy]
    return points.get(policy, NOTHING)


def _policy_points(block: BlockTimes) -> Iterator[PolicyPoint]:
    """Those that keep no bytes where they should, since all is held by other code, keep nothing that can be chosen."""
    for point in block.points:
        if point.num_bytes or point.policy not in HOLDING:
            yield PolicyPoint(point.policy, point.num_bytes, point.saved_s, point.outputs)


def _seconds(
    own: Sequence[tuple[BlockTimes, int]], times: EventTimes | None, layers: LayerMap, elements: Sequence[int]
) -> Seconds:
    """Of the mean block. What stands around the blocks is measured, or scaled by its elements: half of them are the head's.
    `elements`: of each block."""
    count = sum(number for _, number in own)
    forward = sum(n * each.forward_s for each, n in own) / count
    backward = sum(n * each.backward_s for each, n in own) / count
    if times is not None:
        per_layer = max(map(len, layers.layers))
        backward = max(0.0, times.median_s(Op.B) / per_layer - forward) or backward
        pre = times.median_s(Op.F, pre=True), times.median_s(Op.B, pre=True)
        return Seconds(forward, backward, *pre, times.median_s(Op.HEAD))
    each = sum(elements) / len(elements) or 1.0
    outside = sum(num_elements(param) for unit in layers.outside.units for param in layers.units[unit])
    return Seconds(forward, backward, 0.0, 0.0, 3 * forward * outside / 2 / each)


def agreed(steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """Of all ranks: the mean of seconds and bytes, the least room, and of the points those that each of them has."""
    count = len(steps)
    names = steps[0].seconds.pieces
    seconds = replace(steps[0].seconds, **{name: sum(s.seconds.pieces[name] for s in steps) / count for name in names})
    shared = [name for name in steps[0].menu if all(name in each.menu for each in steps)]
    menu = {p: (max(s.menu[p][0] for s in steps), sum(s.menu[p][1] for s in steps) / count) for p in shared}
    room = {tier: _least([each.room[tier] for each in steps]) for tier in Tier}
    reasons = dict.fromkeys(reason for each in steps for reason in each.reasons)
    fewest = min((each.num_micro_batches for each in steps if each.num_micro_batches is not None), default=None)
    return MeasuredStep(seconds, max(each.input_bytes for each in steps), menu, tuple(reasons), room, fewest)


def _least(rooms: Sequence[float | None]) -> float | None:
    return min((room for room in rooms if room is not None), default=None)
