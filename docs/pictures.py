"""Draws pictures of masks, in SVG, from what `Mask.keep` says; they are legible on light and dark grounds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastattn import Mask

CELL, GAP = 22, 34  # px: a query-key pair; the space to the left of a panel and above it
_GREY = "#808080"  # 3.9 : 1 on white, and on the dark ground of the site
_STYLE = f"""<style>
text {{ font: 600 11px system-ui, sans-serif; fill: {_GREY}; text-anchor: middle; dominant-baseline: central }}
text.left {{ text-anchor: start }}
rect {{ stroke: {_GREY}; stroke-opacity: .55; fill: none }}
.seen {{ fill: #2f7fd0 }}
.padding {{ fill: url(#hatching) }}
.edge {{ fill: #2f7fd0; fill-opacity: .4 }}
.tile {{ stroke-opacity: 1; stroke-width: 2.5 }}
</style>
<defs><pattern id="hatching" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<path d="M0 0V6" stroke="#d9730d" stroke-width="3"/></pattern></defs>"""


def draw_mask(page: dict[str, object]) -> str:
    """The picture of `mask` over `n_q` queries and `n_k` keys, one panel a sample."""
    mask, n_q, n_k = page["mask"], page["n_q"], page["n_k"]
    keep, padding = mask.keep(n_q, n_k), _padding(mask, n_q, n_k)
    panels = []
    for sample in range(len(keep)):
        names_q, names_k = (_names(mask, side, sample, n) for side, n in enumerate((n_q, n_k)))
        kinds = [
            ["seen" if keep[sample, 0, i, j] else "padding" if padding[sample % len(padding), i, j] else "hidden"
             for j in range(n_k)] for i in range(n_q)
        ]  # fmt: skip
        title = f"sample {sample}" if len(keep) > 1 else ""
        panels.append(_panel(names_q, names_k, title, lambda i, j, kinds=kinds: f'class="{kinds[i][j]}"'))
    legend = [('class="seen"', "may be seen"), ('class="hidden"', "hidden")]
    if padding.any():
        legend.append(('class="padding"', "padding, never read"))
    return _picture(panels, n_q, n_k, legend)


def draw_bias(page: dict[str, object]) -> str:
    """The picture of `bias` [n_q, n_k], whose largest entry is 0, under `mask`: the fainter, the more is subtracted."""
    bias, mask = page["bias"], page["mask"]
    n_q, n_k = bias.shape
    keep, least = mask.keep(n_q, n_k)[0, 0], float(bias.min())

    def shade(i: int, j: int) -> str:
        return f'class="seen" fill-opacity="{1 - 0.9 * float(bias[i, j]) / least:.2f}"' if keep[i, j] else ""

    panel = _panel([str(i) for i in range(n_q)], [str(j) for j in range(n_k)], "", shade)
    legend = [('class="seen"', "+ 0"), ('class="seen" fill-opacity="0.10"', f"{least:+g}"), ("", "hidden")]
    return _picture([panel], n_q, n_k, legend)


def draw_tiles(page: dict[str, object]) -> str:
    """The picture of `mask` cut into tiles of `tile` x `tile` pairs: which are full, on an edge, or skipped."""
    mask, n_q, n_k, tile = page["mask"], page["n_q"], page["n_k"], page["tile"]
    keep = mask.keep(n_q, n_k)[0, 0]
    whole = keep.unfold(0, tile, tile).unfold(1, tile, tile).flatten(2)  # [rows of tiles, columns of tiles, pairs]
    kinds = torch.where(whole.all(-1), 2, whole.any(-1).long())

    def kind(i: int, j: int) -> str:
        return ("", 'class="edge"', 'class="seen"')[int(kinds[i // tile, j // tile]) if keep[i, j] else 0]

    side = tile * CELL
    outlines = "".join(
        f'<rect class="tile" x="{GAP + column * side}" y="{GAP + row * side}" width="{side}" height="{side}"/>'
        for row in range(n_q // tile) for column in range(n_k // tile)
    )  # fmt: skip
    panel = _panel([str(i) for i in range(n_q)], [str(j) for j in range(n_k)], "", kind) + outlines
    full, edge, skipped = (int((kinds == value).sum()) for value in (2, 1, 0))
    legend = [
        ('class="seen"', f"{full} full tiles: no mask arithmetic"),
        ('class="edge"', f"{edge} edge tiles: masked"),
        ("", f"{skipped} tiles skipped: never loaded"),
    ]
    return _picture([panel], n_q, n_k, legend)


DRAWN_BY: dict[str, Callable[[dict[str, object]], str]] = {"alibi.svg": draw_bias, "tiles.svg": draw_tiles}
"""The functions that draw files of pictures/ from the namespace of their page, where that is not `draw_mask`."""


def draw(name: str, page: dict[str, object]) -> str:
    """The file of that name, as the page that shows it says."""
    return DRAWN_BY.get(name, draw_mask)(page)


def _padding(mask: Mask, n_q: int, n_k: int) -> Tensor:
    """bool [B or 1, n_q, n_k]: pairs of which one is padding."""
    queries, keys = mask.readable_queries(), mask.readable_keys()
    padding = torch.zeros(1, n_q, n_k, dtype=torch.bool)
    padding = padding if queries is None else padding | ~queries[:, :, None]
    return padding if keys is None else padding | ~keys[:, None, :]


def _names(mask: Mask, side: int, sample: int, n: int) -> list[str]:
    """The labels of the queries (side 0) or of the keys (side 1): their indices, or the letters of their documents."""
    if mask.segment_ids is None:
        return [str(index) for index in range(n)]
    return ["-" if id < 0 else chr(ord("A") + int(id)) for id in mask.segment_ids[side][sample]]


def _panel(queries: list[str], keys: list[str], title: str, attributes: Callable[[int, int], str]) -> str:
    """The grid of all pairs, with the names of the queries and keys."""
    n_q, n_k = len(queries), len(keys)
    parts = [_text(GAP + n_k * CELL / 2, 8, "keys" + (f" of {title}" if title else ""))]
    parts.append(f'<g transform="rotate(-90)">{_text(-GAP - n_q * CELL / 2, 8, "queries")}</g>')
    parts += [_text(GAP + (j + 0.5) * CELL, GAP - 10, name) for j, name in enumerate(keys)]
    parts += [_text(GAP - 10, GAP + (i + 0.5) * CELL, name) for i, name in enumerate(queries)]
    for i in range(n_q):
        parts += [_cell(GAP + j * CELL, GAP + i * CELL, attributes(i, j)) for j in range(n_k)]
    return "\n".join(parts)


def _picture(panels: list[str], n_q: int, n_k: int, legend: list[tuple[str, str]]) -> str:
    panel_width = GAP + n_k * CELL + 12
    top = GAP + n_q * CELL + 14
    marks = "\n".join(
        f'{_cell(GAP, y, attributes)}<text class="left" x="{GAP + 30}" y="{y + CELL / 2:g}">{words}</text>'
        for y, (attributes, words) in zip(range(top, top + 24 * len(legend), 24), legend, strict=True)
    )
    width = max(len(panels) * panel_width, GAP + 40 + 7 * max(len(words) for _, words in legend))
    height = top + 24 * len(legend) + 2
    moved = (f'<g transform="translate({i * panel_width})">\n{panel}\n</g>' for i, panel in enumerate(panels))
    body = "\n".join([_STYLE, *moved, marks])
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">\n{body}\n</svg>\n'


def _cell(x: float, y: float, attributes: str) -> str:
    return f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" rx="3" {attributes}/>'


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:g}" y="{y:g}">{words}</text>'
