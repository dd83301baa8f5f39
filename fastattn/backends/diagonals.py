"""The gradient of a bias by distance, of which a kernel sums dS up along the diagonals of tiles."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from ..spec import sums_by_distance


def n_diagonals(n_q: int, n_k: int, rows: int, columns: int) -> int:
    """Diagonals of tiles of `rows` queries, a multiple of the `columns` keys.

    On each, the first key of a tile is as far from its first query as in the others.
    """
    return -(-n_k // columns) + (-(-n_q // rows) - 1) * rows // columns


def sums_of_diagonals(tiles: Tensor, n_q: int, n_k: int) -> Tensor:
    """The gradient, fp32 [H or 1, 1, n_q + n_k - 1].

    Args:
        tiles: dS summed over each diagonal of tiles, fp32 [H or 1, `n_diagonals`, rows, columns].
    """
    rows, columns = tiles.shape[2:]
    of_tiles = pad(sums_by_distance(tiles)[:, :, 0], (0, 1))
    # The sums of a diagonal of tiles begin `columns` distances after those of the one before, and are longer than that.
    parts = of_tiles.unflatten(2, (-1, columns)).permute(0, 3, 2, 1)
    sums = sums_by_distance(parts.flip(2))[:, :, 0].mT.flatten(1)
    first = -n_q % rows
    return sums[:, None, first : first + n_q + n_k - 1]
