"""The report's charts as PNG. No pyplot: nothing global, no display. Colours are the palette's."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

from ds_vertical.cli.report.colors import ARM_COLORS, FAINT, INK, STALL, colour
from ds_vertical.cli.report.stalls import Stall
from ds_vertical.cli.report.summary import Overlap, Rate
from ds_vertical.cli.report.timeline import Work, cut
from ds_vertical.errors import ConfigError
from ds_vertical.planner.bound import Bound
from ds_vertical.schedule.trace import RESOURCES, StepTrace
from ds_vertical.types import Tier, per_tier

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Given = ParamSpec("_Given")
WIDTH_IN = 11.0
DPI = 150
TITLES = {
    "compute": "compute",
    "copy_in": "copy in",
    "copy_out": "copy out",
    "ssd_read": "SSD read",
    "ssd_write": "SSD write",
    "adam": "CPU Adam",
    "host_cores": "host cores",
    "ssd": "SSD, both ways",
}
_TIERS = per_tier({Tier.DEVICE: "device memory", Tier.HOST: "host memory", Tier.SSD: "SSD"})
_TIER_TITLES = {tier.value: title for tier, title in _TIERS.items()}
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "text.parse_math": False,  # names of files may hold a $
    "hatch.linewidth": 0.7,
}
_PIXEL = 1 / 1400  # of a chart's width: gaps below it cannot be seen


def _chart(draw: Callable[_Given, Figure]) -> Callable[_Given, bytes]:
    """The PNG of what `draw` draws. Raises ConfigError where matplotlib is missing."""

    @functools.wraps(draw)
    def drawn(*args: _Given.args, **options: _Given.kwargs) -> bytes:
        try:
            import matplotlib
        except ImportError as error:
            raise ConfigError("the report's charts need matplotlib: pip install 'ds-vertical[plot]'") from error
        with matplotlib.rc_context(_STYLE):
            figure = draw(*args, **options)
            data = io.BytesIO()
            figure.savefig(data, format="png", dpi=DPI, facecolor="white")
        return data.getvalue()

    return drawn


def _figure(height_in: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def title(resource: str) -> str:
    """A resource's name for people."""
    return TITLES.get(resource, resource)


# ---- the step


@_chart
def draw_timeline(panels: Sequence[tuple[str, StepTrace, Sequence[tuple[int, Stall]]]]) -> Figure:
    """Draws rows of busy time per resource. Each panel has its title, a step, and the stalls to number in it."""
    used = {span.resource for _, step, _ in panels for span in step.spans}
    rows = [name for name in RESOURCES if name in used]
    figure = _figure(len(panels) * (0.34 * (len(rows) + 1) + 0.75))
    length = max(step.end - step.start for _, step, _ in panels)
    for axes, (head, step, numbered) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        axes.set_title(head)
        _rows(axes, step, rows, length)
        _stalls(axes, step, len(rows), numbered, length)
        axes.set_xlim(0, length)
        axes.set_ylim(len(rows) + 0.5, -0.7)
        axes.set_yticks(range(len(rows) + 1), [*map(title, rows), "not computing"])
        axes.tick_params(length=0)
        axes.grid(axis="x")
        axes.set_xlabel("seconds into the step")
    return figure


def _rows(axes: Axes, step: StepTrace, rows: Sequence[str], length: float) -> None:
    for y, name in enumerate(rows):
        spans = [span for span in step.spans if span.resource == name]
        busy = merged(cut(step, spans), 0.0)
        bars = [(start - step.start, end - start) for start, end in merged(busy, length * _PIXEL)]
        axes.broken_barh(bars, (y - 0.36, 0.72), facecolors=colour(name), linewidth=0)
        seconds = sum(end - start for start, end in busy)
        text = f"{seconds:.2f} s, {seconds / (step.end - step.start):.0%}"
        axes.text(1.01, y, text, transform=axes.get_yaxis_transform(), va="center")
    backward = [span.start for span in step.spans if span.resource == "compute" and span.name.startswith("sufHEAD")]
    if backward:
        at = min(backward) - step.start
        axes.axvline(at, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.text(at, -0.66, " backward", va="center", fontsize=8.5)
        axes.text(at, -0.66, "forward ", va="center", ha="right", fontsize=8.5)


def _stalls(axes: Axes, step: StepTrace, y: int, numbered: Sequence[tuple[int, Stall]], length: float) -> None:
    busy = [span for span in step.spans if span.resource == "compute"]
    spans, reached, idle = merged(cut(step, busy), 0.0), step.start, []
    for start, end in [*spans, (step.end, step.end)]:
        if start > reached:
            idle.append((reached, start))
        reached = end
    bars = [(start - step.start, max(end - start, length * _PIXEL / 2)) for start, end in idle if end - start > 1e-4 * length]
    axes.broken_barh(bars, (y - 0.36, 0.4), facecolors=STALL, linewidth=0)
    total = sum(end - start for start, end in idle)
    text = f"{total:.2f} s, {total / (step.end - step.start):.0%}"
    axes.text(1.01, y, text, transform=axes.get_yaxis_transform(), va="center")
    seen = [
        (number, (stall.start + stall.end) / 2 - step.start) for number, stall in numbered if stall.seconds > length * _PIXEL
    ]
    for numbers, at in clusters(seen, length / 45):
        text, edge = ", ".join(map(str, sorted(numbers))), 0.03 * length
        side = "left" if at < edge else "right" if at > length - edge else "center"
        place = 0 if side == "left" else length if side == "right" else at
        axes.text(place, y + 0.3, text, ha=side, va="center", fontsize=8, color=STALL, fontweight="bold")


def merged(intervals: Iterable[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """The union of intervals; those less than `gap` apart become one."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start - found[-1][1] <= gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def clusters(points: Sequence[tuple[int, float]], distance: float) -> list[tuple[list[int], float]]:
    """Joins numbers whose places are nearer to each other than `distance`, and puts them in the middle of their places."""
    found: list[list[tuple[int, float]]] = []
    for point in sorted(points, key=lambda point: point[1]):
        if found and point[1] - found[-1][-1][1] < distance:
            found[-1].append(point)
        else:
            found.append([point])
    return [([number for number, _ in each], sum(at for _, at in each) / len(each)) for each in found]


@_chart
def by_kind(pairs: Mapping[str, tuple[Work | None, Work | None]]) -> Figure:
    """Seconds in a step per kind of event: measured, and below it, hatched, predicted."""
    figure = _figure(0.42 * len(pairs) + 0.9)
    axes = figure.subplots()
    both = any(predicted for _, predicted in pairs.values())
    largest = max(work.seconds for pair in pairs.values() for work in pair if work)
    for y, pair in enumerate(pairs.values()):
        for work, offset, hatch in zip(pair, (-0.19 * both, 0.19), (None, "////"), strict=True):
            if work is None:
                continue
            face = "white" if hatch else colour(work.resource)
            style = {"facecolor": face, "edgecolor": colour(work.resource), "hatch": hatch, "linewidth": 0.8}
            axes.barh(y + offset, work.seconds, height=0.34 if both else 0.6, **style)
            axes.text(work.seconds + largest * 0.006, y + offset, f"{work.seconds:.3f}", va="center", fontsize=8)
    axes.set_yticks(range(len(pairs)), list(pairs))
    axes.set_ylim(len(pairs) - 0.4, -0.6)
    axes.set_xlim(0, largest * 1.08)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.set_xlabel("seconds of the step" + (": solid measured, hatched predicted" if both else ", measured"))
    return figure


@_chart
def throughput(found: Mapping[str, Rate]) -> Figure:
    """GB/s over the step, one panel per direction, with the drive's limits."""
    figure = _figure(1.75 * len(found) + 0.3)
    panels = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (lane, rate) in zip(panels, found.items(), strict=True):
        width = rate.step_s / len(rate.over_time)
        edges = [index * width for index in range(len(rate.over_time) + 1)]
        values = [value / 1e9 for value in rate.over_time]
        axes.stairs(values, edges, fill=True, color=colour(lane), linewidth=0)
        limits = [(rate.alone, "alone"), (rate.together, "both ways at once")]
        known = [(value / 1e9, what) for value, what in limits if value]
        top = max([*values, *(value for value, _ in known), 1e-3]) * 1.12
        if len(known) == 2 and known[0][0] - known[1][0] < 0.12 * top:
            known = [(known[0][0], "alone, and both ways at once")]
        for value, what in known:
            axes.axhline(value, color=INK, linewidth=1, linestyle=(0, (5, 3)))
            axes.text(1.005, value, f"{value:.2f} {what}", transform=axes.get_yaxis_transform(), va="center", fontsize=8.5)
        axes.set_title(f"{title(lane)}: {rate.while_busy / 1e9:.2f} GB/s while busy, {rate.over_step / 1e9:.2f} over the step")
        axes.set_ylim(0, top)
        axes.set_xlim(0, rate.step_s)
        axes.set_ylabel("GB/s")
        axes.grid(axis="y")
    panels[-1].set_xlabel("seconds into the step")
    return figure


# ---- the run


@_chart
def draw_bound(limit: Bound, marks: Mapping[str, float], seconds: Mapping[str, Sequence[float]]) -> Figure:
    """What each resource needs at least, with the step's seconds as lines; beside it the arms' steps."""
    order = sorted(limit.busy_s, key=limit.of, reverse=True)
    figure = _figure(max(2.6, 0.5 * len(order) + 1.6))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2)) if seconds else (figure.subplots(), None)
    for y, name in enumerate(order):
        start = 0.0
        for part, alpha in ((limit.busy_s, 1.0), (limit.fill_s, 0.45), (limit.drain_s, 0.45)):
            left.barh(y, part[name], left=start, height=0.6, color=colour(name), alpha=alpha, linewidth=0)
            start += part[name]
        blank = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}  # a line may be behind it
        offset = {"xytext": (4, 0), "textcoords": "offset points"}
        left.annotate(f"{limit.of(name):.2f} s", (start, y), **offset, va="center", fontsize=8.5, bbox=blank)
    for (what, value), style in zip(marks.items(), ("-", (0, (5, 3))), strict=False):
        left.axvline(value, color=INK, linewidth=1.2, linestyle=style, label=f"{what} {value:.2f} s")
    left.set_yticks(range(len(order)), [title(name) for name in order])
    left.set_ylim(len(order) - 0.4, -0.6)
    left.set_xlim(0, max([*map(limit.of, order), *marks.values()]) * 1.13)
    left.tick_params(axis="y", length=0)
    left.grid(axis="x")
    left.set_xlabel("seconds; pale: fill and drain")
    if marks:
        left.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8.5)
    if right is not None:
        _steps(right, seconds, limit.seconds)
    return figure


def _steps(axes: Axes, seconds: Mapping[str, Sequence[float]], limit_s: float) -> None:
    for arm, values in seconds.items():
        axes.plot(
            range(1, len(values) + 1), values, marker="o", markersize=3.5, color=ARM_COLORS[arm], label=arm, linewidth=1.4
        )
    axes.axhline(limit_s, color=STALL, linewidth=1.2, label="bound")
    axes.set_ylim(0, max([limit_s, *(value for values in seconds.values() for value in values)]) * 1.1)
    _whole_steps(axes)
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.grid(axis="y")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8.5)


def _whole_steps(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


@_chart
def draw_memory(tiers: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], step_s: Mapping[str, float]) -> Figure:
    """MB per tier over the step: {tier: {"measured" or "simulated": (seconds, bytes) ...}}, each to the end of its own step."""
    figure = _figure(1.9 * len(tiers) + 0.3)
    panels = figure.subplots(len(tiers), 1, sharex=True, squeeze=False)[:, 0]
    styles = {"measured": (1.4, INK), "simulated": (1.0, "#8A6BBE")}
    for axes, (tier, lines) in zip(panels, tiers.items(), strict=True):
        for kind, points in lines.items():
            width, ink = styles[kind]
            times, values = zip(*points, strict=True)
            times, values = (*times, step_s[kind]), (*values, values[-1])
            label = f"{kind}, at most {max(values) / 1e6:,.0f} MB"
            axes.plot(times, [v / 1e6 for v in values], drawstyle="steps-post", color=ink, linewidth=width, label=label)
        axes.set_title(_TIER_TITLES.get(tier, tier))
        axes.set_ylim(bottom=0)
        axes.margins(x=0, y=0.12)
        axes.set_xlim(left=0)
        axes.set_ylabel("MB")
        axes.grid(axis="y")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8.5, borderaxespad=0.1)
    panels[-1].set_xlabel("seconds into the step")
    return figure


@_chart
def draw_losses(curves: Mapping[str, Sequence[float]]) -> Figure:
    """The arms' losses on one axis; the vertical arm's thin on top, so that both are seen where they are equal."""
    figure = _figure(3.0)
    axes = figure.subplots()
    widths = {"stock": 5.0, "vertical": 1.4}
    for arm, values in curves.items():
        marker = {"marker": "o", "markersize": 2 + widths[arm]}
        axes.plot(range(1, len(values) + 1), values, color=ARM_COLORS[arm], linewidth=widths[arm], label=arm, **marker)
    _whole_steps(axes)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(axis="y")
    axes.legend(loc="upper right")
    return figure


@_chart
def draw_overlap(found: Mapping[str, Overlap]) -> Figure:
    """The optimizer's seconds, beside computation and not."""
    figure = _figure(0.5 * len(found) + 1.0)
    axes = figure.subplots()
    for y, each in enumerate(found.values()):
        alone = each.total_s - each.beside_s
        label = ("beside computation", "while nothing is computed") if y == 0 else (None, None)
        axes.barh(y, each.beside_s, height=0.6, color=colour("adam"), label=label[0])
        axes.barh(y, alone, left=each.beside_s, height=0.6, color=STALL, label=label[1])
        axes.text(each.total_s, y, f" {each.share:.0%} of {each.total_s:.2f} s", va="center", fontsize=8.5)
    axes.set_yticks(range(len(found)), list(found))
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlim(0, max(each.total_s for each in found.values()) * 1.16)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.set_xlabel("seconds of the step in which optimizer state moves or CPU Adam computes")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, fontsize=8.5, borderaxespad=0.1)
    return figure
