"""Pictures of masks, as SVG that is legible on light and dark grounds, and in characters for terminals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_CELLS = 32  # along a side; more tokens share cells
CELL, GAP = 22, 34  # px: a query-key pair; the space to the left of a panel and above it
_SMALL_CELL = 12  # px: where there are many
_GREY = "#808080"  # 3.9 : 1 on white, and on the dark ground of the site
_STYLE = f"""<style>
.fastattn text {{ font: 600 11px system-ui, sans-serif; fill: {_GREY}; text-anchor: middle }}
.fastattn text {{ dominant-baseline: central }}
.fastattn text.left {{ text-anchor: start }}
.fastattn rect {{ stroke: {_GREY}; stroke-opacity: .55; fill: none }}
.fastattn .cells {{ stroke: {_GREY}; stroke-opacity: .25; fill: none }}
.fastattn .seen {{ fill: #2f7fd0 }}
.fastattn .padding {{ fill: url(#hatching) }}
.fastattn .edge {{ fill: #2f7fd0; fill-opacity: .4 }}
.fastattn .tile {{ stroke-opacity: 1; stroke-width: 2.5 }}
</style>
<defs><pattern id="hatching" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<path d="M0 0V6" stroke="#d9730d" stroke-width="3"/></pattern></defs>"""
_LEGEND = {"seen": "may be seen", "edge": "some of them", "hidden": "hidden", "padding": "padding, never read"}
_CHARACTERS = {"seen": "██", "edge": "▒▒", "hidden": " ·", "padding": "//"}
_ASCII = _CHARACTERS | {"seen": "##", "edge": "++", "hidden": " ."}  # where stdout can print no others


@dataclass(frozen=True, repr=False)
class MaskPicture:
    """Picture of a mask: `str()` is its characters, `svg` the text of a file, which notebooks show by themselves.

    panels: for each sample its title, the names of its rows, those of its columns, and a table of the kinds of its
        cells: "seen", "edge" where a block of pairs may be seen in part, "hidden" or "padding".
    step: how many queries, and keys, a cell stands for.
    """

    panels: tuple[tuple[str, list[str], list[str], list[list[str]]], ...]
    step: int

    @property
    def svg(self) -> str:
        """The text of an SVG file."""
        size = CELL if self.step == 1 and max(map(len, self.panels[0][1:3])) <= MOST_CELLS / 2 else _SMALL_CELL
        left = GAP + 7 * max(0, *(len(name) - 2 for name in self.panels[0][1]))
        panels = [
            panel(queries, keys, title, lambda i, j, kinds=kinds: f'class="{kinds[i][j]}"', size, left)
            for title, queries, keys, kinds in self.panels
        ]
        legend = [(f'class="{kind}"', words) for kind, words in self._legend()]
        return picture(panels, len(self.panels[0][1]), len(self.panels[0][2]), legend, size, left)

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        characters = _characters()
        lines = []
        for title, queries, keys, kinds in self.panels:
            lines += [f"{title}:"] if title else []
            width = max(map(len, queries))
            if self.step == 1 and max(map(len, keys)) <= 2:
                every = max(map(len, keys))  # so that two digits stand apart
                shown = (name if j % every == 0 else "" for j, name in enumerate(keys))
                lines.append(" " * (width + 1) + "".join(f"{name:>2}" for name in shown).rstrip())
            for name, row in zip(queries, kinds, strict=True):
                lines.append(f"{name:>{width}} {''.join(characters[kind] for kind in row)}")
        lines.append("  ".join(f"{characters[kind]} {words}" for kind, words in self._legend()))
        return "\n".join(lines)

    __repr__ = __str__

    def _legend(self) -> list[tuple[str, str]]:
        shown = {"seen", "hidden", *(kind for *_, kinds in self.panels for row in kinds for kind in row)}
        legend = [(kind, words) for kind, words in _LEGEND.items() if kind in shown]
        if self.step > 1:
            legend[0] = ("seen", f"may be seen: all {self.step} x {self.step} pairs of a cell")
        return legend


def _characters() -> dict[str, str]:
    try:
        "".join(_CHARACTERS.values()).encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return _ASCII
    return _CHARACTERS


def picture_of(
    keep: Callable[[slice], Tensor],
    lengths: tuple[int, int],
    real: tuple[Tensor | None, Tensor | None],
    segment_ids: tuple[Tensor, Tensor] | None,
    samples: range,
    head: int,
) -> MaskPicture:
    """The picture of a mask over so many queries and keys.

    Args:
        keep: the bool [B or 1, H or 1, rows, n_k] of some of its rows.
        real: bool [B or 1, n_q] and [B or 1, n_k], False at padding.
        segment_ids: the documents of queries and keys, whose letters are the names of tokens.
        samples: those that are drawn.
        head: the head that is drawn.
    """
    step = -(-max(lengths) // MOST_CELLS)
    padded = [_padded_blocks(x, n, step) for x, n in zip(real, lengths, strict=True)]
    kinds: dict[int, list[list[str]]] = {sample: [] for sample in samples}
    for i in range(-(-lengths[0] // step)):
        rows = keep(slice(i * step, (i + 1) * step))
        for sample, table in kinds.items():
            hidden = [
                "padding" if _of(padded[0], sample)[i] or padding else "hidden" for padding in _of(padded[1], sample)
            ]
            blocks = _of(_of(rows, sample), head).split(step, -1)
            table.append([
                "seen" if block.all() else "edge" if block.any() else kind
                for block, kind in zip(blocks, hidden, strict=True)
            ])  # fmt: skip
    panels = []
    for sample, table in kinds.items():
        names = (
            _names(None if segment_ids is None else _of(segment_ids[side], sample), n, step)
            for side, n in enumerate(lengths)
        )
        panels.append((f"sample {sample}" if len(kinds) > 1 else "", *names, table))
    return MaskPicture(tuple(panels), step)


def panel(
    queries: list[str],
    keys: list[str],
    title: str,
    attributes: Callable[[int, int], str],
    size: int = CELL,
    left: int = GAP,
) -> str:
    """The grid of all pairs in SVG, with the names of queries and keys; `size` of a cell, and `left` of all, in px."""
    n_q, n_k = len(queries), len(keys)
    parts = [_text(left + n_k * size / 2, 8, "keys" + (f" of {title}" if title else ""))]
    parts.append(f'<g transform="rotate(-90)">{_text(-GAP - n_q * size / 2, 8, "queries")}</g>')
    parts += [_text(left + (j + 0.5) * size, GAP - 10, name) for j, name in enumerate(keys) if name]
    parts += [_text(left / 2 + 7, GAP + (i + 0.5) * size, name) for i, name in enumerate(queries) if name]
    if size == CELL:
        parts += [_cell(left + j * CELL, GAP + i * CELL, attributes(i, j)) for i in range(n_q) for j in range(n_k)]
        return "\n".join(parts)
    places: dict[str, str] = {}  # where there are many, those that look alike are one path
    for i in range(n_q):
        for j in range(n_k):
            square = f"M{left + j * size + 1} {GAP + i * size + 1}h{size - 2}v{size - 2}h{2 - size}z"
            places[attributes(i, j)] = places.get(attributes(i, j), "") + square
    cells = (f'<path {kind} d="{squares}"/>' for kind, squares in places.items())
    return "\n".join([*parts, '<g class="cells">', *cells, "</g>"])


def picture(
    panels: list[str], n_q: int, n_k: int, legend: list[tuple[str, str]], size: int = CELL, left: int = GAP
) -> str:
    """The text of an SVG file: panels of n_q x n_k cells side by side, and below them what each kind of cell means."""
    panel_width = left + n_k * size + 12
    top = GAP + n_q * size + 14
    marks = "\n".join(
        f'{_cell(left, y, attributes)}<text class="left" x="{left + 30}" y="{y + CELL / 2:g}">{words}</text>'
        for y, (attributes, words) in zip(range(top, top + 24 * len(legend), 24), legend, strict=True)
    )
    width = max(len(panels) * panel_width, left + 40 + 7 * max(len(words) for _, words in legend))
    height = top + 24 * len(legend) + 2
    moved = (f'<g transform="translate({i * panel_width})">\n{panel}\n</g>' for i, panel in enumerate(panels))
    body = "\n".join([_STYLE, *moved, marks])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fastattn" viewBox="0 0 {width} {height}" width="{width}">\n'
        f"{body}\n</svg>\n"
    )


def _of(table: Tensor, index: int) -> Tensor:
    """The entry of a sample or head, of which a table may have one for all."""
    return table[index % len(table)]


def _padded_blocks(real: Tensor | None, n: int, step: int) -> Tensor:
    """bool [B or 1, blocks]: blocks of tokens that are all padding."""
    real = torch.ones(1, n, dtype=torch.bool, device="cpu") if real is None else real
    return torch.stack([~block.any(-1) for block in real.split(step, -1)], -1)


def _names(ids: Tensor | None, n: int, step: int) -> list[str]:
    """The names of rows or columns: the letters of their documents, or their indices, of which many are left out."""
    if ids is not None and step == 1 and ids.max() < 26:
        return ["-" if id < 0 else chr(ord("A") + id) for id in ids.tolist()]
    every = 1 if n <= MOST_CELLS / 2 else 4
    return [str(i * step) if i % every == 0 else "" for i in range(-(-n // step))]


def _cell(x: float, y: float, attributes: str) -> str:
    return f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" rx="3" {attributes}/>'


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:g}" y="{y:g}">{words}</text>'
