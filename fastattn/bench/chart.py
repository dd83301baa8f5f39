"""Bar charts in SVG, without any library, legible on light and dark grounds."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from html import escape

GREY, BLUE, ORANGE = "#808080", "#2f7fd0", "#d9730d"  # about 4 : 1 on white, and on the dark grounds of sites
_WIDTH, _BAR, _STEP, _LETTER = 500, 15, 20, 8.1  # px: a column at least, the height of a bar, bar to bar, a letter
_TALLEST = 1500  # px: groups beyond it begin another column
_LEAST_ROOM = 200  # px: the longest bar
_STYLE = f"""<style>
text {{ font: 600 13px system-ui, sans-serif; fill: {GREY}; dominant-baseline: central }}
.right {{ text-anchor: end }}
.title {{ font-size: 16px }}
.caption {{ font-size: 11px }}
.ours {{ fill: {BLUE} }}
.other {{ fill: {GREY}; fill-opacity: .55 }}
.missed {{ fill: {ORANGE} }}
path {{ stroke: {GREY}; fill: none; stroke-width: 1.5 }}
</style>"""


@dataclass(frozen=True)
class Bar:
    """A bar: its length, and what is written beside it.

    label: at its left.
    text: at its end.
    kind: "ours", "other" or "missed", which choose its colour.
    spread: quartiles or percentiles of the value, a thin line; None draws none.
    mark: the value of a short line across it, such as a target.
    """

    label: str
    value: float
    text: str
    kind: str = "ours"
    spread: tuple[float, float] | None = None
    mark: float | None = None


def draw(title: str, groups: dict[str, list[Bar]], caption: str) -> str:
    """The chart: each group of bars stands under its name, and all have one scale.

    Raises:
        ValueError: a group has no bars.
    """
    if not groups or not all(groups.values()):
        raise ValueError("there is nothing to draw: every group of a chart must have bars")
    every = [bar for group in groups.values() for bar in group]
    left = 14 + _LETTER * max(len(bar.label) for bar in every)
    texts = 16 + _LETTER * max(len(bar.text) for bar in every)
    column = max(_WIDTH, left + texts + _LEAST_ROOM, 16 + _LETTER * max(map(len, groups)), 16 + 10 * len(title))
    room = column - left - texts
    scale = room / max(max(bar.value, *(bar.spread or ()), bar.mark or 0) for bar in every)

    parts, x, y, lowest = [], 0, 44, 0
    for name, group in groups.items():
        height = 30 + _STEP * len(group)
        if y > 44 and y + height > _TALLEST:
            x, y = x + column, 44
        parts.append(f'<g transform="translate({x:g} {y})">\n{_group(name, group, left, scale)}\n</g>')
        y += height
        lowest = max(lowest, y)
    width = x + column
    lines = textwrap.wrap(caption, int(width / 7))
    parts = [_text(8, 18, title, "title"), *parts]
    parts += [_text(8, lowest + 12 + 16 * i, line, "caption") for i, line in enumerate(lines)]
    height = lowest + 12 + 16 * len(lines)
    body = "\n".join([_STYLE, *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}">\n{body}\n</svg>\n'
    )


def _group(name: str, bars: list[Bar], left: float, scale: float) -> str:
    parts = [_text(8, 10, name)]
    for bar, y in zip(bars, range(24, 24 + _STEP * len(bars), _STEP), strict=True):
        middle, end = y + _BAR / 2, max(bar.value, *(bar.spread or ()), bar.mark or 0)
        parts += [
            _text(left - 6, middle, bar.label, "right"),
            f'<rect class="{bar.kind}" x="{left:.1f}" y="{y}" width="{scale * bar.value:.1f}" height="{_BAR}" rx="2"/>',
            _text(left + scale * end + 6, middle, bar.text),
        ]
        if bar.spread:
            low, high = (left + scale * value for value in bar.spread)
            parts.append(f'<path d="M{low:.1f} {middle}H{high:.1f}"/>')
        if bar.mark:
            parts.append(f'<path d="M{left + scale * bar.mark:.1f} {y - 1}v{_BAR + 2}"/>')
    return "\n".join(parts)


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text{of_kind} x="{x:.1f}" y="{y:g}">{escape(words)}</text>'
