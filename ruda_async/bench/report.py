"""The results as one HTML file with plots, which needs nothing else; light or dark as the reader's system."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from .plan import format_size
from .results import Report, Row
from .shown import LEGEND, Section, bandwidth, cells, columns, seconds, sections, times
from .svg import COLORS, Line, line_style, plot
from .table import remarks

__all__ = ["to_html"]

#: Categorical colours whose neighbours stay apart with colour-blind eyes too, for light and for dark ground.
_LIGHT = ("#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#e87ba4", "#008300", "#4a3aa7", "#e34948")
_DARK = ("#3987e5", "#d95926", "#199e70", "#c98500", "#d55181", "#008300", "#9085e9", "#e66767")

_STYLE = """
:root { color-scheme: light dark; --ground: #fcfcfb; --ink: #0b0b0b; --soft: #52514e; --rule: #e1e0d9;
  --good: #006300; --bad: #b3261e; %(light)s }
@media (prefers-color-scheme: dark) { :root { --ground: #1a1a19; --ink: #ffffff; --soft: #c3c2b7;
  --rule: #383835; --good: #0ca30c; --bad: #f0716b; %(dark)s } }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 1200px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 44px 0 8px; }
h3 { font-size: 14px; font-weight: 600; margin: 0 0 4px; }
p { margin: 6px 0; } .soft, figcaption { color: var(--soft); } .wrong { color: var(--bad); font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%%), 1fr)); gap: 24px; }
figure { margin: 0; } svg { width: 100%%; height: auto; display: block; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 12px; padding: 0; list-style: none; }
.legend svg { display: inline; width: 28px; height: 10px; vertical-align: middle; margin-right: 6px; }
.grid { stroke: var(--rule); stroke-width: 1; } .axis { fill: var(--soft); font-size: 12px; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.ours1 { stroke-dasharray: 2 4; } .ours2 { stroke-dasharray: 12 3; } .ours3 { stroke-dasharray: 12 3 2 3; }
.peer0 { stroke-dasharray: 6 4; } .peer1 { stroke-dasharray: 6 3 2 3; }
.peer2 { stroke-dasharray: 6 3 2 3 2 3; } .peer3 { stroke-dasharray: 4 2 4 6; }
.point { stroke: var(--ground); stroke-width: 2; } .reach { fill: transparent; }
g:hover .point { r: 6px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 3px 12px; white-space: nowrap; }
th { color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--rule); }
th:nth-child(2), td:nth-child(2) { text-align: left; } tr.first td { border-top: 1px solid var(--rule); }
tr.ours td:nth-child(2) { font-weight: 600; } .good { color: var(--good); } .bad { color: var(--bad); }
summary { cursor: pointer; margin: 10px 0 6px; }
"""


def to_html(report: Report) -> str:
    """The whole page."""
    colors = {row.subject: 0 for row in report.rows}
    colors = {subject: i for i, subject in enumerate(colors)}
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>ruda-async bench</title><style>{_style()}</style></head><body>",
        "<h1>ruda-async bench</h1>",
        f'<p class="soft">{_about(report)}</p>',
        *(_remark(line) for line in remarks(report)),
        f'<p class="soft">{escape(LEGEND)}</p>',
    ]
    for section in sections(report):
        parts += _section(section, colors)
    return "\n".join([*parts, "</body></html>\n"])


def _style() -> str:
    light, dark = (
        " ".join(f"--c{i}: {color};" for i, color in enumerate(palette)) for palette in (_LIGHT, _DARK)
    )
    series = "\n".join(
        f".line.c{i} {{ stroke: var(--c{i}); }} .point.c{i} {{ fill: var(--c{i}); }}" for i in range(COLORS)
    )
    return _STYLE % {"light": light, "dark": dark} + series


def _about(report: Report) -> str:
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return escape(f"{machine.line}. {machine.date}. {versions}")


def _remark(line: str) -> str:
    kind = "wrong" if line.startswith("WRONG") else "soft"
    return f'<p class="{kind}">{escape(line)}</p>'


def _section(section: Section, colors: dict[str, int]) -> list[str]:
    parts = [f"<section><h2>{escape(section.title)}</h2>"]
    plotted = len({row.nbytes for row in section.rows}) > 1
    if plotted:
        parts += [_legend(section, colors), '<div class="plots">']
        parts.append(_figure(section, colors, "Median time per call", lambda row: row.median, seconds))
        bus = "Bus bandwidth"
        parts.append(_figure(section, colors, bus, lambda row: row.bus_bandwidth, bandwidth))
        parts.append("</div><details><summary>All figures</summary>")
    parts.append(_table(section))
    return [*parts, "</details></section>" if plotted else "</section>"]


def _legend(section: Section, colors: dict[str, int]) -> str:
    items = []
    for subject, row in {row.subject: row for row in section.rows}.items():
        style = line_style(colors[subject], row.name != "ruda")
        mark = f'<path class="line {style}" d="M0 5H28"/>'
        items.append(f'<li><svg viewBox="0 0 28 10" aria-hidden="true">{mark}</svg>{escape(subject)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _figure(
    section: Section,
    colors: dict[str, int],
    title: str,
    figure: Callable[[Row], float],
    text: Callable[[float], str],
) -> str:
    lines = []
    for subject, first in {row.subject: row for row in section.rows}.items():
        points = [(row.nbytes, figure(row)) for row in section.rows if row.subject == subject]
        lines.append(Line(subject, colors[subject], first.name != "ruda", points))
    image = plot(lines, f"{title}, {section.title}", lambda x: format_size(int(x)), text)
    return f"<figure><h3>{escape(title)}</h3>{image}</figure>"


def _table(section: Section) -> str:
    peers = section.peers
    head = "".join(f"<th>{escape(name)}</th>" for name in columns(peers))
    lines = [f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>']
    former = None
    for row in section.rows:
        texts = [f"<td>{escape(cell)}</td>" for cell in cells(row, ())]
        texts += [_ratio(row.ratios.get(peer)) for peer in peers]
        kinds = ["first"] * (former not in (None, row.nbytes)) + ["ours"] * (row.name == "ruda")
        former = row.nbytes
        lines.append(f'<tr class="{" ".join(kinds)}">{"".join(texts)}</tr>')
    return "\n".join([*lines, "</tbody></table></div>"])


def _ratio(ratio: float | None) -> str:
    kind = "" if ratio is None else ' class="good"' if ratio >= 1 else ' class="bad"'
    return f"<td{kind}>{times(ratio)}</td>"
