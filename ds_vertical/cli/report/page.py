"""A report as one HTML page that needs nothing else: styles and images are in it, there is no script, all text is escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from ds_vertical.cli.report.colors import RESOURCE_COLORS

_STYLE = """
:root { color-scheme: light }
body { margin: 0 auto; max-width: 1120px; padding: 24px 24px 64px; background: #fff; color: #1f2430;
       font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif }
h1 { font-size: 26px; margin: 0 0 4px }
h2 { font-size: 21px; margin: 48px 0 8px; padding-top: 12px; border-top: 2px solid #1f2430; overflow-wrap: anywhere }
h3 { font-size: 17px; margin: 30px 0 6px }
p { margin: 6px 0; max-width: 88ch; overflow-wrap: anywhere }
.faint, caption { color: #5b6270 }
.missing { padding: 6px 12px; background: #f4f5f8; border-left: 3px solid #c9cdd6 }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: 10px 0 14px; font-size: 13.5px; font-variant-numeric: tabular-nums }
caption { text-align: left; padding: 0 0 4px }
th, td { padding: 3px 14px 3px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e7ec }
th { font-weight: 600; border-bottom-color: #9aa1af }
th:first-child, td:first-child, th.text, td.text { text-align: left }
img { display: block; width: 100%; height: auto; margin: 8px 0 }
nav a, .chip { margin-right: 16px; white-space: nowrap }
.chip i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px }
a { color: #0b5394 }
"""


@dataclass(frozen=True)
class Table:
    """Cells are text. `words`: the columns, besides the first, that are words and stand to the left."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ReportSection:
    """`key`: its anchor and its chart's file. `missing`: what to do for it to have content, where it has none. `data`: what it
    says, as JSON. `about`: what the chart shows, for those who do not see it."""

    key: str
    title: str
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    chart: bytes | None = None
    about: str = ""
    missing: str = ""
    data: Any = field(default_factory=dict)


@dataclass(frozen=True)
class RunReport:
    """All sections of one run. `slug`: its name in anchors and file names."""

    name: str
    slug: str
    lines: Sequence[str]
    sections: Sequence[ReportSection]


def page(runs: Sequence[RunReport], compared: Table, titles: dict[str, str], made: str) -> str:
    """The whole document. `titles`: resources as people call them; `made`: when and by what."""
    name = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    chips = "".join(
        f'<span class="chip"><i style="background:{RESOURCE_COLORS[key]}"></i>{_(titles[key])}</span>' for key in titles
    )
    links = "".join(f'<a href="#{_(run.slug)}">{_(run.name)}</a>' for run in runs)
    parts = [
        f'<h1>ds_vertical: {_(name)}</h1><p class="faint">{_(made)}</p>',
        _table(compared),
        f"<nav>{links}</nav>" if len(runs) > 1 else "",
        f'<p class="faint">One colour per resource throughout: {chips}</p>',
        *(_run(run) for run in runs),
    ]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>ds_vertical: {_(name)}</title>'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style>'
    )
    body = "\n".join(part for part in parts if part)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _run(run: RunReport) -> str:
    lines = "".join(f'<p class="faint">{_(line)}</p>' for line in run.lines)
    links = "".join(f'<a href="#{_(run.slug)}-{_(section.key)}">{_(section.title)}</a> ' for section in run.sections)
    sections = "\n".join(_section(run, section) for section in run.sections)
    return f'<h2 id="{_(run.slug)}">{_(run.name)}</h2>{lines}<nav>{links}</nav>\n{sections}'


def _section(run: RunReport, section: ReportSection) -> str:
    parts = [f"<h3>{_(section.title)}</h3>"]
    parts += [f"<p>{_(line)}</p>" for line in section.lines]
    if section.missing:
        parts.append(f'<p class="missing">{_(section.missing)}</p>')
    if section.chart:
        data = base64.b64encode(section.chart).decode("ascii")
        parts.append(f'<img alt="{_(section.about)}" src="data:image/png;base64,{data}">')
    parts += map(_table, section.tables)
    return f'<section id="{_(run.slug)}-{_(section.key)}">{"".join(parts)}</section>'


def _table(table: Table) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        made = (f"<{tag}{_class(index in table.words)}>{_(cell)}</{tag}>" for index, cell in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    head, rows = row(table.head, "th"), "\n".join(row(cells, "td") for cells in table.rows)
    caption = f"<caption>{_(table.caption)}</caption>" if table.caption else ""
    return f'<div class="wide"><table>{caption}<thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _class(words: bool) -> str:
    return ' class="text"' if words else ""


def _(text: str) -> str:
    return escape(text, quote=True)
