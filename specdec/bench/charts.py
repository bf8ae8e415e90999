"""Charts as SVG: no script, no font or file from elsewhere, colours from the page's own variables.

Drawn 360 units wide, so that letters stay readable on a phone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 360
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 10, 34
HEIGHT = 220
COLOURS = 8
"""How many colours of series the style sheet has: `s0` to `s7`."""


@dataclass(frozen=True)
class Series:
    """A line, or points, in one colour.

    Attributes:
        points: `(x, y)`; `spread` gives each its `(low, high)`.
        colour: index of a colour of the style sheet.
        marks: draw dots, and no line between them.
    """

    label: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    spread: Sequence[tuple[float, float]] = ()
    marks: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Bar:
    """One horizontal bar; `low` and `high` are its interval, `parts` make it a stack."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    colour: int = 0
    parts: Sequence[tuple[str, float]] = ()
    text: str = ""


def bars(title: str, items: Sequence[Bar], reference: float | None = None) -> str:
    """Horizontal bars, the label above each, one under the other."""
    step, thick = 34, 13
    height = step * len(items) + 22
    most = max([item.high or item.value for item in items] + [reference or 0.0]) or 1.0
    scale = (WIDTH - 70) / most
    out = []
    if reference is not None:
        x = reference * scale
        out.append(_line(x, 0, x, height - 18, "axis dashed"))
        out.append(_text(x, height - 5, f"{reference:g}", "middle"))
    for index, item in enumerate(items):
        y = index * step + 4
        out.append(_text(0, y + 9, item.label, "start"))
        y += 14
        x = 0.0
        for part, (name, value) in enumerate(item.parts or [(item.label, item.value)]):
            colour = part if item.parts else item.colour
            out.append(
                f'<rect class="fill s{colour % COLOURS}" x="{x:.1f}" y="{y}" '
                f'width="{max(value * scale, 0):.1f}" height="{thick}">'
                f"<title>{escape(name)}: {value:.2f}</title></rect>"
            )
            x += value * scale
        end = x
        if item.low is not None and item.high is not None:
            middle = y + thick / 2
            out.append(_line(item.low * scale, middle, item.high * scale, middle, "whisker"))
            end = max(end, item.high * scale)
        out.append(_text(end + 5, y + 11, item.text or f"{item.value:.2f}", "start"))
    return _svg(title, height, out)


def lines(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    y_most: float | None = None,
    diagonal: bool = False,
    at: tuple[float, str] | None = None,
) -> str:
    """Lines and points over common axes that begin at 0.

    Args:
        diagonal: draw y = x.
        at: a vertical line: where, and what it says.
    """
    points = [point for each in series for point in each.points]
    x_most = max([x for x, _ in points], default=1.0) or 1.0
    tops = [y for _, y in points] + [high for each in series for _, high in each.spread]
    y_most = y_most or max(tops, default=1.0) * 1.05 or 1.0
    frame = _Frame(x_most, y_most)
    out = frame.axes(x_label, y_label)
    if diagonal:
        end = min(x_most, y_most)
        out.append(_line(*frame.at(0, 0), *frame.at(end, end), "axis dashed"))
    if at is not None and at[0] <= x_most:
        x, top = frame.at(at[0], y_most)
        out.append(_line(x, top, x, HEIGHT - BOTTOM, "axis dashed"))
        beside = (x - 4, "end") if x > WIDTH / 2 else (x + 4, "start")
        out.append(_text(beside[0], top + 10, at[1], beside[1]))
    for each in series:
        out.extend(_drawn(each, frame))
    return _svg(title, HEIGHT, out)


def legend(labels: Sequence[tuple[str, int]]) -> str:
    """The colours and what they stand for, as HTML."""
    items = (
        f'<li><span class="swatch s{colour % COLOURS}"></span>{escape(label)}</li>'
        for label, colour in labels
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


class _Frame:
    """From values to places."""

    def __init__(self, x_most: float, y_most: float) -> None:
        self.x_most, self.y_most = x_most, y_most

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / self.x_most * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - min(y, self.y_most) / self.y_most * (HEIGHT - TOP - BOTTOM)
        return across, down

    def axes(self, x_label: str, y_label: str) -> list[str]:
        out = [f'<text class="label" x="{LEFT}" y="{HEIGHT - 3}">{escape(x_label)}</text>']
        middle = (HEIGHT - BOTTOM + TOP) / 2
        out.append(
            f'<text class="label" text-anchor="middle" transform="translate(9 {middle}) '
            f'rotate(-90)">{escape(y_label)}</text>'
        )
        for value in ticks(self.y_most):
            _, y = self.at(0, value)
            out.append(_line(LEFT, y, WIDTH - RIGHT, y, "grid"))
            out.append(_text(LEFT - 4, y + 4, f"{value:g}", "end"))
        for value in ticks(self.x_most):
            x, _ = self.at(value, 0)
            out.append(_text(x, HEIGHT - BOTTOM + 14, f"{value:g}", "middle"))
        out.append(_line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "axis"))
        return out


def ticks(most: float, wanted: int = 5) -> list[float]:
    """Round numbers from 0 to `most`."""
    step = 10.0**-6
    while True:
        for factor in (1, 2, 5):
            if most / (step * factor) <= wanted:
                size = step * factor
                return [round(size * i, 6) for i in range(int(most / size + 1e-9) + 1)]
        step *= 10


def _drawn(series: Series, frame: _Frame) -> list[str]:
    out = []
    places = [frame.at(x, y) for x, y in series.points]
    colour = f"s{series.colour % COLOURS}"
    for (x, _), (low, high) in zip(series.points, series.spread, strict=False):
        out.append(_line(*frame.at(x, low), *frame.at(x, high), f"stroke {colour}"))
    if not series.marks:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dashed = " dashed" if series.dashed else ""
        out.append(
            f'<polyline class="stroke {colour}{dashed}" points="{path}">'
            f"<title>{escape(series.label)}</title></polyline>"
        )
    if series.marks or len(places) <= 24:
        for (x, y), (value_x, value_y) in zip(places, series.points, strict=True):
            if not series.dashed:
                out.append(
                    f'<circle class="fill {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"><title>'
                    f"{escape(series.label)}: {value_x:g}, {value_y:.2f}</title></circle>"
                )
    return out


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    name = escape(title, quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{name}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
