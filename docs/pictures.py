"""Draws the pictures of the pages: masks as `Mask.show` does, and what else is drawn over their pairs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fastattn.picture import CELL, GAP, panel, picture


def draw_mask(page: dict[str, object]) -> str:
    """The picture of `mask` over `n_q` queries and `n_k` keys, one panel a sample."""
    return page["mask"].show(page["n_q"], page["n_k"]).svg


def draw_bias(page: dict[str, object]) -> str:
    """The picture of `bias` [n_q, n_k], whose largest entry is 0, under `mask`: the fainter, the more is subtracted."""
    bias, mask = page["bias"], page["mask"]
    n_q, n_k = bias.shape
    keep, least = mask.keep(n_q, n_k)[0, 0], float(bias.min())

    def shade(i: int, j: int) -> str:
        return f'class="seen" fill-opacity="{1 - 0.9 * float(bias[i, j]) / least:.2f}"' if keep[i, j] else ""

    grid = panel([str(i) for i in range(n_q)], [str(j) for j in range(n_k)], "", shade)
    legend = [('class="seen"', "+ 0"), ('class="seen" fill-opacity="0.10"', f"{least:+g}"), ("", "hidden")]
    return picture([grid], n_q, n_k, legend)


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


DRAWN_BY: dict[str, Callable[[dict[str, object]], str]] = {"alibi.svg": draw_bias, "tiles.svg": draw_tiles}
"""The functions that draw files of pictures/ from the namespace of their page, where that is not `draw_mask`."""


def draw(name: str, page: dict[str, object]) -> str:
    """The file of that name, as the page that shows it says."""
    return DRAWN_BY.get(name, draw_mask)(page)
