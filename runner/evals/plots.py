"""Plots as SVG text: lines, points and heat maps, without a plotting library.

Colours are classes of a style in each plot, which has others for dark pages.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 480, 360  # without the legend, which is to the right
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 30, 18, 44
_BAR = 96  # the height of a colour bar
_LETTER = 6.5  # the width of a letter in pixels, on average at most
# Of series, on white and on dark paper.
_COLOURS = (
    ("#1b6ca8", "#6db6ee"),
    ("#d1495b", "#f28b98"),
    ("#3c887e", "#6cc9bc"),
    ("#b0711a", "#f0b860"),
    ("#6a4c93", "#b79ce0"),
    ("#7f5539", "#cfa283"),
    ("#4d4d4d", "#bbbbbb"),
    ("#c71f8e", "#f07ac8"),
    ("#3f7d0e", "#8fd35a"),
    ("#007f99", "#4fd0e8"),
)
# The classes of shapes: ink, grid, paper, the ramp of heat maps (drawn more opaque for more).
_SHADES = {
    "ink": ("#333", "#ddd"),
    "grid": ("#ddd", "#444"),
    "paper": ("#fff", "#161616"),
    "ramp": ("#0b3d91", "#8ec5ff"),
} | {f"s{i}": shades for i, shades in enumerate(_COLOURS)}


def _style(dark: int) -> str:
    return "".join(
        f".{name}{{fill:{shades[dark]}}}.{name}-line{{stroke:{shades[dark]};fill:none}}"
        for name, shades in _SHADES.items()
    )


_STYLE = f"<style>{_style(0)}@media(prefers-color-scheme:dark){{{_style(1)}}}</style>"


class Point(NamedTuple):
    """A value with its interval; low = high = y if there is none."""

    x: float
    y: float
    low: float
    high: float


class Axis(NamedTuple):
    """The range and title of an axis. log: equal ratios are equally far apart."""

    title: str
    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float, start: float, end: float) -> float:
        """The position of a value between two pixels."""
        a, b, c = (math.log(v) if self.log else v for v in (value, self.low, self.high))
        return start + (end - start) * (0.5 if c == b else (a - b) / (c - b))


def axis_of(title: str, values: Sequence[float], *, log: bool = False) -> Axis:
    """An axis that holds the values: from 0, or with log from the least to the largest."""
    if log:
        ticks = tuple(sorted(set(values)))
        return Axis(title, ticks[0] / 1.1, ticks[-1] * 1.1, ticks, log=True)
    most = max([*values, 1e-9])
    step = 10.0 ** math.floor(math.log10(most))
    step *= next(f for f in (0.2, 0.5, 1, 2) if most / (f * step) <= 6)
    n = math.ceil(most / step - 1e-9)
    return Axis(title, 0.0, n * step, tuple(round(i * step, 10) for i in range(n + 1)))


SHARE = Axis("", 0.0, 1.0, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0))


def chart(series: Mapping[str, Sequence[Point]], x: Axis, y: Axis, *, lines: bool) -> str:
    """Points of each series with their intervals, optionally joined by lines."""
    parts = [*_axes(x, y)]
    for i, (name, points) in enumerate(series.items()):
        colour = f"s{i % len(_COLOURS)}"
        # Slightly apart, so that equal values and their intervals can be told apart.
        shift = 3 * (i - (len(series) - 1) / 2) if lines else 0
        places = [(_x(x, p.x) + shift, _y(y, p.y), _y(y, p.low), _y(y, p.high)) for p in points]
        if lines and len(places) > 1:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _, _ in places)
            parts.append(f'<polyline points="{path}" class="{colour}-line"/>')
        for p, (a, b, low, high) in zip(points, places, strict=True):
            parts.append(_line(a, low, a, high, colour))
            said = f"{name}: {p.y:.3f} ({p.low:.3f} to {p.high:.3f}) at {p.x:g}"
            parts.append(
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" class="{colour}">'
                f"<title>{escape(said)}</title></circle>"
            )
        at = _TOP + 8 + 16 * i
        parts.append(f'<circle cx="{WIDTH}" cy="{at - 4}" r="4" class="{colour}"/>')
        parts.append(_text(WIDTH + 10, at, name))
    legend = 20 + math.ceil(_LETTER * max(map(len, series), default=0))
    return _svg(parts, WIDTH + legend, max(HEIGHT, _TOP + 16 * len(series) + 16))


def heat_map(rows: Sequence[Sequence[float]], title: str) -> str:
    """Values from 0 to 1, one row per layer and one column per KV head, with a colour bar.

    The stronger a cell stands out from the paper, the larger its value.
    """
    cell_w, cell_h = max(12, min(40, 240 // max(1, len(rows[0])))), 12
    n_col = len(rows[0])
    parts = [_text(0, 12, title), *_colour_bar(30 + cell_w * n_col + 14, 34)]
    for i, row in enumerate(rows):
        top = 34 + cell_h * i
        if i % 4 == 0:
            parts.append(_text(24, top + 10, str(i), anchor="end"))
        for j, value in enumerate(row):
            place = f'x="{30 + cell_w * j}" y="{top}" width="{cell_w - 1}" height="{cell_h - 1}"'
            parts.append(
                f'<rect {place} class="ramp" fill-opacity="{min(max(value, 0.0), 1.0):.3f}">'
                f"<title>layer {i}, KV head {j}: {value:.3f}</title></rect>"
            )
    parts.append(_text(30, 28, "KV heads; layers downwards"))
    width = max(200, 100 + cell_w * n_col, math.ceil(_LETTER * len(title)))
    return _svg(parts, width, 40 + max(cell_h * len(rows), _BAR + 12))


def _colour_bar(left: float, top: float) -> list[str]:
    """The colours of values from 0 to 1, with their numbers."""
    n = 16
    height = _BAR / n
    parts = [
        f'<rect x="{left}" y="{top + i * height}" width="12" height="{height}" class="ramp" '
        f'fill-opacity="{1 - i / (n - 1):.3f}"/>'
        for i in range(n)
    ]
    parts.append(f'<rect x="{left}" y="{top}" width="12" height="{_BAR}" class="grid-line"/>')
    for value in (0, 0.5, 1):
        parts.append(_text(left + 17, top + 4 + _BAR * (1 - value), f"{value:g}"))
    return parts


def _axes(x: Axis, y: Axis) -> list[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = [
        _line(_LEFT, bottom, right, bottom),
        _line(_LEFT, _TOP, _LEFT, bottom),
        _text((_LEFT + right) / 2, HEIGHT - 8, x.title, anchor="middle"),
        f'<g transform="rotate(-90 14 {HEIGHT / 2})">'
        f"{_text(14, HEIGHT / 2, y.title, anchor='middle')}</g>",
    ]
    for tick in x.ticks:
        parts.append(_line(_x(x, tick), bottom, _x(x, tick), bottom + 4))
        parts.append(_text(_x(x, tick), bottom + 17, f"{tick:g}", anchor="middle"))
    for tick in y.ticks:
        parts.append(_line(_LEFT, _y(y, tick), right, _y(y, tick), "grid"))
        parts.append(_text(_LEFT - 6, _y(y, tick) + 4, f"{tick:g}", anchor="end"))
    return parts


def _x(axis: Axis, value: float) -> float:
    return axis.place(value, _LEFT, WIDTH - _RIGHT)


def _y(axis: Axis, value: float) -> float:
    return axis.place(value, HEIGHT - _BOTTOM, _TOP)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "ink") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} class="{colour}-line"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="ink">{escape(text)}</text>'


def _svg(parts: Sequence[str], width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
        f'{_STYLE}<rect width="100%" height="100%" class="paper"/>{"".join(parts)}</svg>'
    )
