"""Draws the pictures of the pages: masks as `Mask.show` does, and what else is drawn over their pairs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastattn.picture import CELL, GAP, panel, picture


def draw_mask(page: dict[str, object]) -> str:
    """The picture of `mask` over `n_q` queries and `n_k` keys, one panel a sample."""
    return page["mask"].show(page["n_q"], page["n_k"]).svg


def draw_bias(page: dict[str, object]) -> str:
    """The picture of `bias`, whose largest entry is 0, under `mask`: the fainter, the more is subtracted."""
    bias = page["bias"]
    least = float(bias.min())
    legend = [('class="seen"', "+ 0"), ('class="seen" fill-opacity="0.10"', f"{least:+.3g}")]
    return _shades(page, 1 - 0.9 * bias / least, legend)


def draw_weights(page: dict[str, object]) -> str:
    """The picture of `weights` under `mask`: the fainter, the less weight; those below 0 have a colour of their own."""
    weights = page["weights"]
    most = float(weights.abs().max())
    legend = [('class="seen"', f"weight {most:.2f}")]
    legend += [(f'class="seen" {_NEGATIVE}', f"weight {-most:.2f}")] * bool((weights < 0).any())
    return _shades(page, weights / most, legend)


_NEGATIVE = 'style="fill:#d9730d"'


def _shades(page: dict[str, object], shades: Tensor, legend: list[tuple[str, str]]) -> str:
    """The picture of shades [n_q, n_k], or [heads, n_q, n_k] with a panel a head, from -1 to 1."""
    n_q, n_k = shades.shape[-2:]
    keep = page["mask"].keep(n_q, n_k)[0, 0]

    def attributes(shade: Tensor) -> Callable[[int, int], str]:
        return lambda i, j: (
            f'class="seen" fill-opacity="{abs(shade[i, j]):.2f}"{f" {_NEGATIVE}" * bool(shade[i, j] < 0)}'
            if keep[i, j] else ""
        )  # fmt: skip

    heads = shades.reshape(-1, n_q, n_k)
    titles = [f"head {head}" if len(heads) > 1 else "" for head in range(len(heads))]
    names = [str(i) for i in range(n_q)], [str(j) for j in range(n_k)]
    panels = [panel(*names, title, attributes(head)) for title, head in zip(titles, heads, strict=True)]
    return picture(panels, n_q, n_k, [*legend, *[("", "hidden")] * (not keep.all())])


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
    grid = panel([str(i) for i in range(n_q)], [str(j) for j in range(n_k)], "", kind) + outlines
    full, edge, skipped = (int((kinds == value).sum()) for value in (2, 1, 0))
    legend = [
        ('class="seen"', f"{full} full tiles: no mask arithmetic"),
        ('class="edge"', f"{edge} edge tiles: masked"),
        ("", f"{skipped} tiles skipped: never loaded"),
    ]
    return picture([grid], n_q, n_k, legend)


DRAWN_BY: dict[str, Callable[[dict[str, object]], str]] = {
    **dict.fromkeys(("alibi.svg", "alibi-heads.svg", "t5-bias.svg"), draw_bias),
    **dict.fromkeys(("attention-map.svg", "differential.svg"), draw_weights),
    "tiles.svg": draw_tiles,
}
"""The functions that draw files of pictures/ from the namespace of their page, where that is not `draw_mask`."""


def draw(name: str, page: dict[str, object]) -> str:
    """The file of that name, as the page that shows it says."""
    return DRAWN_BY.get(name, draw_mask)(page)
