"""The report's sections: from a run's findings to words, tables and charts; a line says how to get what is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from ds_vertical.cli.common import JsonObject
from ds_vertical.cli.report import charts, hosts
from ds_vertical.cli.report import summary as findings
from ds_vertical.cli.report.charts import title
from ds_vertical.cli.report.page import ReportSection, Table
from ds_vertical.cli.report.run_folder import LIMITS, TO_TRACE
from ds_vertical.cli.report.stalls import BETWEEN, ISSUING, Reason, Stall, reasons, stalls
from ds_vertical.cli.report.summary import Findings
from ds_vertical.cli.report.timeline import by_time
from ds_vertical.engine.metrics import ARMS, Agreement
from ds_vertical.schedule.trace import StepTrace, summarize
from ds_vertical.types import Tier

NONE = "–"
_TOP = 8
_SEEN = 1e-3  # of a step: kinds of work below it have a row in the table and no bar
_NO_TRACE = f"Nothing was traced: {TO_TRACE}, and run again."
_NO_RATES = f"No prediction: it needs the schedule that ran and the machine's rates, which `ds-vertical ab` leaves ({LIMITS})."


def sections(found: Findings) -> list[ReportSection]:
    """All sections of a run, in the order of the page."""
    makers: tuple[Callable[[Findings], ReportSection], ...] = (timeline, kinds, rates, bound, memory, arms, losses, overlap)
    of_hosts = hosts.compared(found.folder)
    return [make(found) for make in makers] + ([] if of_hosts is None else [_hosts(of_hosts)])


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number as the page shows it; a dash where there is none."""
    return NONE if value is None else f"{value:,.{digits}f}{unit}"


def share(value: float | None) -> str:
    """A share as a percentage; a dash where there is none."""
    return NONE if value is None else f"{value:.1%}"


def megabytes(value: float | None) -> str:
    """Bytes as MB, without the unit; a dash where there are none."""
    return NONE if value is None else f"{value / 1e6:,.0f}"


def _shown(found: Findings) -> list[tuple[str, StepTrace]]:
    steps = (("measured", found.measured), ("simulated", found.predicted))
    return [(kind, step) for kind, step in steps if step is not None]


# ---- a step


def timeline(found: Findings) -> ReportSection:
    """The step shown, as measured and as simulated, and the times in which nothing was computed, by their causes."""
    key, head = "timeline", "Timeline of a step, and why nothing was computed"
    shown = _shown(found)
    if not shown:
        return ReportSection(key, head, missing=_NO_TRACE)
    pieces = {kind: stalls(step) for kind, step in shown}
    top = {kind: sorted(each, key=lambda stall: -stall.seconds)[:_TOP] for kind, each in pieces.items()}
    panels = [(_panel_title(found, kind, step), step, list(enumerate(top[kind], start=1))) for kind, step in shown]
    first = shown[0][0]
    tables = [
        _reasons({kind: reasons(each) for kind, each in pieces.items()}, {k: findings.step_s(s) for k, s in shown}),
        *(_top_stalls(f"The longest, {kind}, as numbered in the chart", top[kind], step) for kind, step in shown),
    ]
    idle = sum(stall.seconds for stall in pieces[first])
    lines = [
        f"Nothing was computed in {idle:.3f} s of this step ({idle / findings.step_s(shown[0][1]):.1%}). Each such gap is "
        "put to what the issuing thread did in it: the event it waited for, and the resource that this one kept busy longest."
    ]
    account = found.folder.account
    if account is not None and not account.facts.one_memory:
        lines.append("The device computes behind the host: measured computation is the time in which the host issued it.")
    missing = _NO_TRACE if found.measured is None else "" if found.predicted is not None else _NO_RATES
    data = {kind: [vars(reason) for reason in reasons(each)] for kind, each in pieces.items()}
    about = "Busy time of each resource over a step, with the times in which nothing was computed"
    return ReportSection(key, head, lines, tables, charts.draw_timeline(panels), about, missing, data)


def _panel_title(found: Findings, kind: str, step: StepTrace) -> str:
    if kind == "simulated":
        return f"simulated: {findings.step_s(step):.2f} s, the same schedule at the machine's rates"
    run = next(iter(found.folder.traces))
    return f"measured: {findings.step_s(step):.2f} s, step {step.step} of {run}, rank 0"


def _reasons(by_kind: dict[str, list[Reason]], seconds: dict[str, float]) -> Table:
    keys = list(dict.fromkeys((reason.what, reason.resource) for each in by_kind.values() for reason in each))
    rows = []
    for key in keys:
        row, found = [*_words(*key)], [_reason(each, key) for each in by_kind.values()]
        if all(
            reason is None or reason.seconds < _SEEN / 2 * seconds[kind] for kind, reason in zip(by_kind, found, strict=True)
        ):
            continue
        for kind, reason in zip(by_kind, found, strict=True):
            row += [number(reason and reason.seconds, 3), share(reason and reason.seconds / seconds[kind])]
            row += [str(reason.count) if reason else NONE]
        rows.append(row)
    head = ["waited for", "up to", *(cell for kind in by_kind for cell in (f"{kind} s", "of step", "times"))]
    return Table("Why nothing was computed; less than 0.05 % of the step is left out", head, rows, frozenset({1}))


def _reason(reasons: Sequence[Reason], key: tuple[str, str]) -> Reason | None:
    return next((reason for reason in reasons if (reason.what, reason.resource) == key), None)


def _words(what: str, resource: str) -> tuple[str, str]:
    means = {"fetch": "parameters", "step": "an optimizer step", "load": "activations", "save": "activations to leave"}
    means |= {"load kept": "what is kept for the backward", "save kept": "what is kept to leave"}
    means |= {"hold": "gradients to be written", ISSUING: "(issuing events)", BETWEEN: "(between events)"}
    return means.get(what, what), title(resource) if resource else NONE


def _top_stalls(caption: str, top: Sequence[Stall], step: StepTrace) -> Table:
    rows = [
        [
            str(index),
            number(stall.start - step.start, 3),
            number(stall.seconds, 4),
            share(stall.seconds / findings.step_s(step)),
        ]
        + [stall.cause, stall.by or NONE, title(stall.resource) if stall.resource else NONE]
        for index, stall in enumerate(top, start=1)
    ]
    head = ["", "at s", "seconds", "of step", "waited for", "which this needed", "up to"]
    return Table(caption, head, rows, frozenset({4, 5, 6}))


def kinds(found: Findings) -> ReportSection:
    """Seconds and bytes of each kind of event, measured beside predicted."""
    key, head = "kinds", "Measured and predicted, per kind of event"
    if found.measured is None:
        return ReportSection(key, head, missing=_NO_TRACE)
    pairs = findings.work_compared(found)
    least = _SEEN * findings.step_s(found.measured)
    drawn = {name: pair for name, pair in pairs.items() if max(work.seconds for work in pair if work) >= least}
    rows, data = [], {}
    for name, (measured, predicted) in pairs.items():
        ratio = measured.seconds / predicted.seconds if measured and predicted and predicted.seconds else None
        works = (measured, predicted)
        rows.append(
            [name, title(next(work.resource for work in works if work))]
            + [number(work and work.seconds, 3) for work in works]
            + [number(ratio)]
            + [megabytes(work.bytes) if work and work.bytes else NONE for work in works]
        )
        data[name] = {kind: work and vars(work) for kind, work in zip(("measured", "predicted"), works, strict=True)}
    columns = ["", "resource", "measured s", "predicted s", "ratio", "measured MB", "predicted MB"]
    lines = ["Seconds in which any event of the kind was under way; the prediction is the simulated step above."]
    missing = "" if found.predicted is not None else _NO_RATES
    table = Table("", columns, rows, frozenset({1}))
    about = "Seconds of a step per kind of event, measured beside predicted"
    return ReportSection(key, head, lines, [table], charts.by_kind(drawn), about, missing, data)


def rates(found: Findings) -> ReportSection:
    """What the SSD read and wrote per second in the step, beside what the drive can do."""
    key, head = "rates", "SSD throughput against the drive's limits"
    step = found.measured or found.predicted
    known = findings.measured_rates(step, found) if step else {}
    if found.measured is None or not known:
        return ReportSection(
            key, head, missing=_NO_TRACE if found.measured is None else "Nothing moved to or from SSD in this step."
        )
    rows, data = [], {}
    for lane, rate in known.items():
        limits = [rate.alone, rate.together]
        numbers = {"GB_per_s_while_busy": rate.while_busy / 1e9, "GB_per_s_over_step": rate.over_step / 1e9}
        rows.append(
            [title(lane), megabytes(rate.num_bytes), number(rate.busy_s), *(number(value) for value in numbers.values())]
            + [number(limit and limit / 1e9) for limit in limits]
            + [share(rate.while_busy / rate.alone if rate.alone else None)]
        )
        data[lane] = numbers | {"limits_GB_per_s": [limit and limit / 1e9 for limit in limits], "bytes": rate.num_bytes}
    columns = ["", "MB", "busy s", "GB/s while busy", "GB/s over step", "drive alone", "drive both ways", "busy / alone"]
    limited = found.ab.get("ssd_limit")
    lines = [f"The disk was limited for this run: {_limit(limited)}."] if limited else []
    missing = (
        "" if found.folder.limits else f"No limits beside it: `ds-vertical limits --path DISK --out {LIMITS}` measures them."
    )
    about = "Bytes per second read from and written to SSD over a step, with what the drive can do"
    return ReportSection(key, head, lines, [Table("", columns, rows)], charts.throughput(known), about, missing, data)


def _limit(limited: JsonObject) -> str:
    """Of several disks each has these rates."""
    rates = f"{megabytes(limited['read_bytes_per_s'])} MB/s read, {megabytes(limited['write_bytes_per_s'])} MB/s written"
    return f"{rates}, each of {len(limited['disks'])} disks" if len(limited.get("disks") or ()) > 1 else rates


# ---- the run


def bound(found: Findings) -> ReportSection:
    """The step's seconds beside what each resource needs at least for it."""
    key, head = "bound", "The step against its bound"
    if found.bound is None:
        return ReportSection(key, head, missing=_NO_RATES.replace("prediction", "bound"))
    measured, limit = found.steady_s.get(ARMS[1]), found.bound
    marks = {} if measured is None else {"measured": measured}
    marks |= {} if found.predicted is None else {"simulated": findings.step_s(found.predicted)}
    lines = [f"No order of the same events takes less than {limit.seconds:.3f} s; {title(limit.resource)} decide that."]
    if measured is not None:
        ratio = measured / limit.seconds
        lines.append(f"Measured {measured:.3f} s (median, first steps left out): {ratio:.2f} times the bound.")
        if ratio < 1:
            lines.append("A step below its bound: the machine was slower while its rates were measured than in the run.")
    rows = [
        [title(name), number(limit.busy_s[name], 3), number(limit.fill_s[name], 3), number(limit.drain_s[name], 3)]
        + [number(limit.of(name), 3), share(limit.of(name) / measured if measured else None)]
        for name in sorted(limit.busy_s, key=limit.of, reverse=True)
    ]
    table = Table("Seconds per resource", ["", "busy", "fill", "drain", "sum", "of the measured step"], rows)
    data = {"bound_s": limit.seconds, "resource": limit.resource, "measured_s": measured, "seconds": found.seconds}
    about = "What each resource needs at least for a step, beside the step's seconds"
    return ReportSection(key, head, lines, [table], charts.draw_bound(limit, marks, found.seconds), about, data=data)


def memory(found: Findings) -> ReportSection:
    """Bytes in each tier over the step, and the run's peak beside the memory formula."""
    key, head = "memory", "Memory per tier over a step"
    tiers: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for kind, step in _shown(found):
        for tier, points in findings.memory_points(step).items():
            tiers.setdefault(tier, {})[kind] = points
    peak, account = found.peak_bytes.get(ARMS[1]), found.folder.account
    formula = account.facts.host_bytes * account.facts.num_shards if account else None
    lines = [f"Peak resident memory of the run, all ranks: {megabytes(peak)} MB."] if peak else []
    lines += [f"The memory formula at start: {megabytes(formula)} MB."] if formula else []
    kept = account.steps[-1].kept if account else None
    lines += [f"Kept for the backward in the last step, on rank 0: {kept.describe()}."] if kept else []
    if not tiers:
        return ReportSection(key, head, lines, missing=_NO_TRACE, data={"peak_bytes": peak, "formula_bytes": formula})
    measured = any("measured" in each for each in tiers.values())
    lines.append(
        "Simulated is what the schedule moves and what rests between steps; measured host memory is the whole process, with "
        "interpreter and libraries."
    )
    order = sorted(tiers, key=lambda tier: list(Tier).index(Tier(tier)) if tier in list(Tier) else len(Tier))
    rows = [
        [
            tier,
            *(
                megabytes(max((value for _, value in tiers[tier].get(kind, [])), default=None))
                for kind in ("measured", "simulated")
            ),
        ]
        for tier in order
    ]
    table = Table("Most in a step, MB", ["", "measured", "simulated"], rows)
    chart = charts.draw_memory(
        {tier: tiers[tier] for tier in order}, {kind: findings.step_s(step) for kind, step in _shown(found)}
    )
    data = {"peak_bytes": peak, "formula_bytes": formula, "rows": rows}
    missing = "" if measured else _NO_TRACE if found.measured is None else "No memory in this trace, an older one: run again."
    return ReportSection(key, head, lines, [table], chart, "Bytes per tier over a step", missing, data)


def arms(found: Findings) -> ReportSection:
    """Stock and vertical side by side, as `ds-vertical ab` compared them."""
    key, head = "arms", "Stock and vertical"
    told = found.ab.get("arms", {})
    if len(told) < 2:
        return ReportSection(
            key, head, missing="One arm only: `ds-vertical ab` without --vertical-only runs both and compares them."
        )
    quantities = (
        ("step, s", "step_s", 1.0, 3),
        ("tokens / s", "tokens_per_s", 1.0, 1),
        ("SSD read per step, MB", "read_bytes_per_step", 1e-6, 0),
        ("SSD written per step, MB", "write_bytes_per_step", 1e-6, 0),
        ("peak host memory, MB", "peak_host_bytes", 1e-6, 0),
        ("peak device memory, MB", "peak_device_bytes", 1e-6, 0),
    )
    rows = []
    for words, name, scale, digits in quantities:
        if name == "peak_device_bytes" and not any(name in told[arm] for arm in ARMS):
            continue  # the device computes in host memory
        values = [told[arm].get(name) for arm in ARMS]
        ratio = values[0] / values[1] if all(values) else None
        rows.append([words, *(number(None if value is None else value * scale, digits) for value in values), number(ratio)])
    settings = (
        f"{found.ab.get('steps', NONE)} steps, {found.ab.get('repeats', NONE)} repeats, {found.ab.get('ranks', NONE)} ranks"
    )
    table = Table(f"Medians without the first step; {settings}", ["", *ARMS, "stock / vertical"], rows)
    lines = [f"Losses: {found.agreement}."]
    if found.agreement == Agreement.DIFFERENT.value:
        lines = ["The losses differ beyond the contract: the arms do not compute the same thing, and no speed is shown."]
    return ReportSection(key, head, lines, [table], data={"speedup": found.ab.get("speedup"), "losses": found.agreement})


def losses(found: Findings) -> ReportSection:
    """The training loss of each arm, step by step."""
    key, head = "losses", "Loss of both arms"
    curves = {arm: found.losses[arm] for arm in ARMS if found.losses.get(arm)}
    if not curves:
        missing = (
            "No losses were recorded: `ds-vertical ab` records them, DS_VERTICAL_METRICS=FOLDER does in a run of one's own."
        )
        return ReportSection(key, head, missing=missing)
    lines = [f"{len(next(iter(curves.values())))} steps; last: " + ", ".join(f"{arm} {v[-1]:.4f}" for arm, v in curves.items())]
    lines[0] += f"; {found.agreement}." if found.agreement else "."
    missing = "" if len(curves) == 2 else "One arm only: `ds-vertical ab` without --vertical-only has both."
    return ReportSection(key, head, lines, [], charts.draw_losses(curves), "Training loss by step", missing, curves)


def _hosts(found: hosts.HostsCompared) -> ReportSection:
    """What each of several hosts did in a step, and which one the others waited for."""
    busy = [f"{title(resource)} s" for resource in hosts.COMPARED]
    rates = [f"{title(resource)} MB/s" for resource in hosts.SSD]
    rows = [
        [each.host, ", ".join(map(str, each.ranks)), *(number(each.busy_s[name], 3) for name in hosts.COMPARED)]
        + [megabytes(each.rates.get(name)) for name in hosts.SSD]
        for each in found.hosts
    ]
    table = Table(
        "Busy seconds of a traced step, of each host's slowest rank (medians)", ["host", "ranks", *busy, *rates], rows
    )
    data = {
        "hosts": [vars(each) for each in found.hosts],
        "slowest": found.slowest,
        "resource": found.resource,
        "told": found.describe(),
    }
    return ReportSection("hosts", "Hosts", [found.describe()], [table], data=data)


def overlap(found: Findings) -> ReportSection:
    """How much of the optimizer's work went on beside computation."""
    key, head = "overlap", "Optimizer overlap achieved"
    known = {kind: each for kind, step in _shown(found) if (each := findings.overlap_of(step)) is not None}
    if found.measured is None:
        return ReportSection(key, head, missing=_NO_TRACE)
    if "measured" not in known:
        return ReportSection(key, head, missing="The optimizer did nothing in this step; --step chooses another.")
    steps = [findings.overlap_of(step) for step in by_time(found.folder.timelines()[0].steps)[1:]]
    shares = [each.share for each in steps if each is not None]
    lines = [f"Over all traced steps but the first: {median(shares):.1%} (median)."] if shares else []
    summary = summarize(found.measured)
    lines.append(
        f"In the step shown no resource was busy for {summary.outside_s:.3f} s ({summary.outside_s / summary.step_s:.1%})."
    )
    data = {kind: vars(each) | {"share": each.share} for kind, each in known.items()}
    about = "Seconds of the optimizer's work beside computation and alone"
    return ReportSection(key, head, lines, [], charts.draw_overlap(known), about, data=data)
