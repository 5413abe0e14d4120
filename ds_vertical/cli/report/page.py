"""A report as one HTML page that needs nothing else: styles and images are in it, and it has no script.

`page.html.j2` is the page; jinja2 escapes all text that it puts in.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ds_vertical.cli.report.colors import RESOURCE_COLORS

_TEMPLATE = "page.html.j2"


@dataclass(frozen=True)
class Table:
    """A table of a section. Cells are text. `words`: the columns, besides the first, that are words and stand to the left."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ReportSection:
    """One section of a run.

    `key`: names its anchor and its chart's file. `missing`: how to get what the section lacks; empty where it lacks nothing.
    `data`: the section's figures, for JSON. `chart`: a PNG. `about`: what the chart shows, for those who do not see it.
    """

    key: str
    title: str
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    chart: bytes | None = None
    about: str = ""
    missing: str = ""
    data: object = field(default_factory=dict)

    @property
    def chart_base64(self) -> str:
        """The chart as a data URL holds it; empty where there is none."""
        return base64.b64encode(self.chart or b"").decode("ascii")


@dataclass(frozen=True)
class RunReport:
    """All sections of one run. `slug`: its name in anchors and file names."""

    name: str
    slug: str
    lines: Sequence[str]
    sections: Sequence[ReportSection]


def page(runs: Sequence[RunReport], compared: Table, titles: Mapping[str, str], made: str) -> str:
    """The whole document. `compared`: a row for each run; `titles`: what people call each resource; `made`: when, and by which
    version."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("ds_vertical.cli.report", "")
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(_TEMPLATE)
    name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    legend = [(title, RESOURCE_COLORS[resource]) for resource, title in titles.items()]
    return template.render(name=name, made=made, compared=compared, legend=legend, runs=runs) + "\n"
