"""Line plots as SVG, for pages that must stand alone: small, and coloured by the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["COLORS", "PATTERNS", "Line", "line_style", "plot"]

#: Styles ``c0 … c7`` are expected in the page; lines beyond repeat them, in other patterns.
COLORS = 8
#: Styles ``ours0 … ours3`` and ``peer0 … peer3`` are expected too.
PATTERNS = 4

_WIDTH, _HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 44
#: What a text on the axis across takes.
_TEXT = 54


@dataclass(frozen=True, slots=True)
class Line:
    """One subject's points.

    Attributes:
        label: for people.
        color: an index that stays the subject's own over all plots of a page.
        dashed: for peers, so that colour is not all that tells lines apart.
        points: pairs of x and y, both above 0.
    """

    label: str
    color: int
    dashed: bool
    points: Sequence[tuple[float, float]]


def plot(
    lines: Sequence[Line], title: str, x_text: Callable[[float], str], y_text: Callable[[float], str]
) -> str:
    """An ``<svg>`` with both axes logarithmic. Points tell their values when pointed at.

    Args:
        title: what is plotted, for screen readers and above the plot.
        x_text, y_text: how values read on an axis.
    """
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    x_range, y_range = _range(xs), _range(ys)

    def at(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + _share(x, x_range) * (_WIDTH - _LEFT - _RIGHT)
        return across, _HEIGHT - _BOTTOM - _share(y, y_range) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">']
    for y in _ticks(y_range, 10):
        _, down = at(xs[0], y)
        parts.append(f'<path class="grid" d="M{_LEFT} {down:.1f}H{_WIDTH - _RIGHT}"/>')
        place = f'x="{_LEFT - 8}" y="{down + 4:.1f}" text-anchor="end"'
        parts.append(f'<text class="axis" {place}>{escape(y_text(y))}</text>')
    for across, x in _apart([(at(x, ys[0])[0], x) for x in sorted(set(xs))]):
        place = f'x="{across:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle"'
        parts.append(f'<text class="axis" {place}>{escape(x_text(x))}</text>')
    for line in lines:
        parts += _drawn(line, at, x_text, y_text)
    return "\n".join([*parts, "</svg>"])


def line_style(color: int, dashed: bool) -> str:
    """The classes of a line, in a plot and in its legend."""
    # Colours come again with another pattern; those of peers are others than ours.
    return f"c{color % COLORS} {'peer' if dashed else 'ours'}{color // COLORS % PATTERNS}"


def _drawn(
    line: Line,
    at: Callable[[float, float], tuple[float, float]],
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
) -> list[str]:
    places = [at(x, y) for x, y in line.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    parts = [f'<path class="line {line_style(line.color, line.dashed)}" d="{path}"/>']
    for (x, y), (across, down) in zip(line.points, places, strict=True):
        text = escape(f"{line.label}, {x_text(x)}: {y_text(y)}")
        parts.append(
            f'<g><title>{text}</title><circle class="reach" cx="{across:.1f}" cy="{down:.1f}" r="12"/>'
            f'<circle class="point c{line.color % COLORS}" cx="{across:.1f}" cy="{down:.1f}" r="4"/></g>'
        )
    return parts


def _range(values: Sequence[float]) -> tuple[float, float]:
    """A little more than the values, on a logarithmic scale."""
    low, high = math.log10(min(values)), math.log10(max(values))
    margin = max(0.04 * (high - low), 0.05)
    return low - margin, high + margin


def _share(value: float, logs: tuple[float, float]) -> float:
    low, high = logs
    return (math.log10(value) - low) / (high - low)


def _ticks(logs: tuple[float, float], most: int) -> list[float]:
    """Round values inside: powers of ten, with 2 and 5 where these are few."""
    decades = range(math.floor(logs[0]), math.ceil(logs[1]) + 1)
    for factors in ((1, 2, 5), (1,)):
        values = (factor * 10.0**decade for decade in decades for factor in factors)
        found = [value for value in values if logs[0] <= math.log10(value) <= logs[1]]
        if len(found) <= most:
            return found
    return found[:: -(-len(found) // most)]


def _apart(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those of ``(across, value)`` whose texts do not touch, from the last back; the first before others."""
    first, kept = places[0], [places[-1]]
    for place in reversed(places[:-1]):
        room = place is first or place[0] - first[0] >= _TEXT
        if room and kept[-1][0] - place[0] >= _TEXT:
            kept.append(place)
    return kept[::-1]
