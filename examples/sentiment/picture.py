"""The evidence for a verdict as a picture, by matplotlib: every view as a row of a heat map, and the shaded text."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findSystemFonts, fontManager
from matplotlib.patches import Rectangle

from .evidence import Evidence
from .reviews import LABELS, Review

HEAT, INK, SOFT = "#f07d0a", "#1c1b19", "#5c5850"
WIDTH, MARGIN, LINE, ROW = 9.0, 0.35, 0.27, 0.24  # inches
SIZE = 11  # points
DPI = 110
MOST_COLUMNS = 400  # of the heat map, so that none is narrower than a pixel; of several tokens it shows the strongest
# The first one that is installed is used, and the next one for characters that it has no glyph for.
FAMILIES = ("DejaVu Sans", "Noto Sans CJK JP", "Noto Sans JP", "IPAexGothic", "Hiragino Sans", "Yu Gothic", "MS Gothic")


def draw(review: Review, spans: list[tuple[int, int]], evidence: Evidence, path: Path) -> None:
    """Writes the picture of a review, as PNG. The text is shaded by the first view, the whole roll-out.

    Args:
        spans: where in the text the tokens are, or the parts that `Evidence.on_text` makes; the first is empty.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _draw(review, spans, evidence, path)
    missing = [warning for warning in caught if "missing from font" in str(warning.message)]
    if missing:
        warnings.warn(
            f"no installed font has all signs of {review.name}, so {path} shows boxes; Noto Sans CJK has them",
            stacklevel=2,
        )
    for warning in caught:
        if warning not in missing:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _draw(review: Review, spans: list[tuple[int, int]], evidence: Evidence, path: Path) -> None:
    views = evidence.views()
    figure = Figure(dpi=DPI, facecolor="white")
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]  # matplotlib has no types for it
    font = FontProperties(family=_families(), size=SIZE)

    def width_of(text: str) -> float:
        width: float = renderer.get_text_width_height_descent(text, font, ismath=False)[0]
        return width / DPI

    pieces, lines = _lay_out(review.text, spans, width_of)
    top_of_map = 2 * MARGIN + 2 * LINE
    top_of_text = top_of_map + ROW * len(views) + MARGIN
    height = top_of_text + LINE * lines + MARGIN
    figure.set_size_inches(WIDTH, height)
    page = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))  # in inches, from the top
    page.axis("off")

    def write(x: float, y: float, text: str, **style: Any) -> None:
        style = {"color": INK, "va": "center_baseline", **style}
        page.text(x, y, text, fontproperties=font, parse_math=False, **style)

    predicted = int(evidence.probabilities.argmax())
    verdict = f"Prediction: {LABELS[predicted]}, {100 * float(evidence.probabilities[predicted]):.1f} %"
    truth = "not known" if review.label is None else LABELS[review.label]
    write(MARGIN, MARGIN + 0.5 * LINE, f"{verdict}     Truth: {truth}", weight="bold")
    write(MARGIN, MARGIN + 1.5 * LINE, review.name, color=SOFT)

    left_of_map = MARGIN + max(width_of(view.name) for view in views) + 0.1
    for row, view in enumerate(views):
        write(left_of_map - 0.1, top_of_map + ROW * (row + 0.5), view.name, ha="right")
    rows = torch.stack([view.shades()[1:] for view in views])
    columns = min(rows.shape[1], MOST_COLUMNS)
    page.imshow(
        torch.nn.functional.adaptive_max_pool1d(rows, columns).tolist(),
        extent=(left_of_map, WIDTH - MARGIN, top_of_map + ROW * len(views), top_of_map),
        aspect="auto",
        cmap=LinearSegmentedColormap.from_list("heat", ["white", HEAT]),
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    frame = (left_of_map, top_of_map), WIDTH - MARGIN - left_of_map, ROW * len(views)
    page.add_patch(Rectangle(*frame, fill=False, edgecolor=SOFT, linewidth=0.8))

    shades = views[0].shades().tolist()
    for text, token, x, line in pieces:
        y = top_of_text + LINE * line
        if token is not None:
            page.add_patch(Rectangle((x, y), width_of(text), 0.9 * LINE, color=HEAT, alpha=shades[token], linewidth=0))
        write(x, y + 0.45 * LINE, text)
    figure.savefig(path)


def _lay_out(
    text: str, spans: list[tuple[int, int]], width_of: Callable[[str], float]
) -> tuple[list[tuple[str, int | None, float, int]], int]:
    """Pieces of the text, and how many lines they fill; lines break before tokens, as Japanese allows too.

    A piece is its text, the number of its token if it is one, how far right it begins, in inches, and its line.
    """
    pieces: list[tuple[str, int | None, float, int]] = []
    x, line, end = MARGIN, 0, 0
    for token, (start, stop) in enumerate([*spans, (len(text), len(text))]):
        for number, gap in enumerate(text[end:start].split("\n")):
            if number:
                x, line = MARGIN, line + 1
            if gap.strip():
                pieces.append((gap, None, x, line))
            x += width_of(gap) if x > MARGIN else 0
        word = text[start:stop]
        if x + width_of(word) > WIDTH - MARGIN:
            x, line = MARGIN, line + 1
        if word:
            pieces.append((word, token, x, line))
        x, end = x + width_of(word), stop
    return pieces, line + 1


def _families() -> list[str]:
    """The families of `FAMILIES` that are installed, in that order."""
    known = {font.fname for font in fontManager.ttflist}
    for file in findSystemFonts():  # matplotlib itself does not see what was installed after its first use
        if file not in known:
            with contextlib.suppress(OSError, RuntimeError):  # a file that is no font
                fontManager.addfont(file)
    installed = {font.name for font in fontManager.ttflist}
    return [name for name in FAMILIES if name in installed]
