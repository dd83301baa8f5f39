"""The evidence for a verdict as a picture, by matplotlib: every view as a row of a heat map, and the shaded text."""

from __future__ import annotations

import warnings
from pathlib import Path

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
# The first that is there, and where it has no glyph for a sign, the next.
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
    figure = Figure(dpi=DPI)
    renderer = FigureCanvasAgg(figure).get_renderer()
    font = FontProperties(family=_families(), size=SIZE)

    def width_of(text: str) -> float:
        return renderer.get_text_width_height_descent(text, font, ismath=False)[0] / DPI

    pieces, lines = _lay_out(review.text, spans, width_of)
    heat_map = ROW * len(views)
    height = 4 * MARGIN + 2 * LINE + heat_map + LINE * lines
    figure.set_size_inches(WIDTH, height)
    figure.set_facecolor("white")
    write = {"fontproperties": font, "parse_math": False, "va": "top", "color": INK}

    predicted = int(evidence.probabilities.argmax())
    verdict = f"Prediction: {LABELS[predicted]}, {100 * float(evidence.probabilities[predicted]):.1f} %"
    truth = "not known" if review.label is None else LABELS[review.label]
    figure.text(MARGIN / WIDTH, 1 - MARGIN / height, f"{verdict}     Truth: {truth}", **write, weight="bold")
    figure.text(MARGIN / WIDTH, 1 - (MARGIN + LINE) / height, review.name, **write | {"color": SOFT})

    names = max(width_of(view.name) for view in views) + 0.1
    top = 2 * MARGIN + 2 * LINE
    axes = figure.add_axes(
        (
            (MARGIN + names) / WIDTH,
            1 - (top + heat_map) / height,
            (WIDTH - 2 * MARGIN - names) / WIDTH,
            heat_map / height,
        )
    )
    axes.imshow(
        [view.shades()[1:].tolist() for view in views],
        aspect="auto",
        cmap=LinearSegmentedColormap.from_list("heat", ["white", HEAT]),
        vmin=0,
        vmax=1,
    )
    axes.set_xticks([])
    axes.set_yticks(range(len(views)), [view.name for view in views], fontproperties=font)
    axes.tick_params(length=0)

    page = figure.add_axes((0, 0, 1, 1))
    page.set_xlim(0, WIDTH)
    page.set_ylim(height, 0)
    page.axis("off")
    shades = views[0].shades().tolist()
    for text, token, x, line in pieces:
        y = top + heat_map + MARGIN + LINE * line
        if token is not None and shades[token] >= 0.005:
            box = Rectangle((x, y), width_of(text), 0.9 * LINE, facecolor=HEAT, alpha=shades[token], linewidth=0)
            page.add_patch(box)
        page.text(x, y + 0.45 * LINE, text, **write | {"va": "center_baseline"})
    figure.savefig(path)


def _lay_out(text, spans, width_of) -> tuple[list[tuple[str, int | None, float, int]], int]:
    """Pieces of the text, each with its token, if it is one, its place in its line, in inches, and its line; and how
    many lines there are. Lines break before tokens, as Japanese allows too."""
    pieces, x, line, end = [], MARGIN, 0, 0
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
    """Those of `FAMILIES` that are installed, in that order."""
    known = {font.fname for font in fontManager.ttflist}
    for file in findSystemFonts():  # matplotlib itself does not see what was installed after its first use
        if file not in known:
            fontManager.addfont(file)
    installed = {font.name for font in fontManager.ttflist}
    return [name for name in FAMILIES if name in installed]
