"""Sinusoidal, learned and rotary positions of tokens, and the embedding of the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from .checks import check_dense, check_ints, check_numbers, check_range, check_tensor, checked_index

if TYPE_CHECKING:
    from .checks import called_as


def positions_of(real: Tensor) -> Tensor:
    """The position of each token in its sample, not counting padding.

    So a sample has the same positions with padding left, right or between tokens, and without padding.

    Args:
        real: bool [B, L], False at padding.

    Returns:
        int64 [B, L]: the number of real tokens before each token. The positions of padding have no meaning.

    Example:
        >>> positions_of(torch.tensor([[False, True, True]]))
        tensor([[0, 0, 1]])
    """
    check_tensor("real", real, "bool", ("B", "L"))
    return (real.cumsum(-1) - 1).clamp(min=0)


class TokenEmbedding(nn.Embedding):
    """A vector for each token id: [..., d_model] from int32 or int64 ids [...].

    Args:
        num_embeddings: size of the vocabulary.
        d_model: width of the vectors.
        padding_idx: id of padding, whose vector begins as 0 and gets no gradient here, as in nn.Embedding; a negative
            one counts from the end.
        scaled: multiply by sqrt(d_model), so that positions of size 1 do not drown them (Vaswani et al. 2017, 3.4).
        device, dtype: device and dtype of the weight.

    Example:
        >>> TokenEmbedding(100, 8, padding_idx=0)(torch.tensor([[5, 0]])).shape
        torch.Size([1, 2, 8])
    """

    def __init__(
        self,
        num_embeddings: int,
        d_model: int,
        padding_idx: int | None = None,
        *,
        scaled: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_ints(1, num_embeddings=num_embeddings, d_model=d_model)
        padding_idx = checked_index("padding_idx", padding_idx, num_embeddings)
        self.embed_scale = math.sqrt(d_model) if scaled else 1.0  # by this name peft looks for it
        super().__init__(num_embeddings, d_model, padding_idx, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draws from N(0, 1 / d_model), so that as the weight of an output layer it gives logits of size 1."""
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)
        self._fill_padding_idx_with_zero()

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.embed_scale

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...


class SinusoidalPositions(nn.Module):
    """A fixed vector for each position: sin(p / 10000^(2i / d_model)) in column 2i, the cosine in column 2i + 1.

    Args:
        d_model: width of the vectors.
        max_length: number of positions.
        padding_idx: a position that stands for padding, whose vector is 0, or a negative one, which counts from the
            end; None if there is none.
        device, dtype: device and dtype of the table, which is not part of the state_dict.

    Raises:
        ValueError: from `forward`, positions are neither int32 nor int64, or on the CPU one is not below `max_length`.

    Sources:
        Vaswani et al., Attention Is All You Need (2017), section 3.5.

    Example:
        >>> SinusoidalPositions(4)(torch.tensor([0, 1]))
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])
    """

    def __init__(
        self,
        d_model: int,
        max_length: int = 5000,
        padding_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_ints(1, d_model=d_model, max_length=max_length)
        self.d_model, self.max_length = d_model, max_length
        self.padding_idx = checked_index("padding_idx", padding_idx, max_length)
        table = self._computed(device, dtype or torch.get_default_dtype())
        self.register_buffer("table", table, persistent=False)

    def _computed(self, device: torch.device | str | None, dtype: torch.dtype) -> Tensor:
        angles = torch.arange(self.max_length, dtype=torch.float64)[:, None] * _frequencies(self.d_model, 10000.0)
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, : self.d_model]
        if self.padding_idx is not None:
            table[self.padding_idx] = 0
        return table.to(device, dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SinusoidalPositions:
        """As in nn.Module; a table that had another dtype, or no memory, is computed: no state_dict has it."""
        before = self.table
        super()._apply(fn, recurse)
        if not self.table.is_meta and (before.is_meta or before.dtype != self.table.dtype):
            self.table = self._computed(self.table.device, self.table.dtype)
        return self

    def forward(self, positions: Tensor) -> Tensor:
        """[..., d_model] for int32 or int64 positions [...]."""
        _check_positions(positions, self.max_length)
        if self.table.is_meta and not positions.is_meta:  # the weights may have been assigned
            self.table = self._computed(positions.device, self.table.dtype)
        return self.table[positions]

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...


class LearnedPositions(nn.Embedding):
    """A learned vector for each position: [..., d_model] for int32 or int64 positions [...].

    Args:
        d_model: width of the vectors.
        max_length: number of positions.
        device, dtype: device and dtype of the weight.

    Raises:
        ValueError: from `forward`, positions are neither int32 nor int64, or on the CPU one is not below `max_length`.

    Example:
        >>> LearnedPositions(8, max_length=512)(torch.arange(3)).shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        d_model: int,
        max_length: int = 512,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_ints(1, d_model=d_model, max_length=max_length)
        super().__init__(max_length, d_model, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    def forward(self, input: Tensor) -> Tensor:
        _check_positions(input, self.num_embeddings)
        return super().forward(input)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...


class Rotation(NamedTuple):
    """The rotation of queries or keys at given positions, which `RotaryPositions` computes once for all layers.

    cos, sin: [N or 1, 1, L, D].
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, H, L, D], with columns i and i + D/2 of each vector rotated by an angle proportional to position."""
        (N, _, L, D), (n, _, length, width) = x.shape, self.cos.shape
        if (length, width) != (L, D) or (n != 1 and n != N):
            raise ValueError(f"rotation must be [{N} or 1, 1, {L}, {D}], got {list(self.cos.shape)}")
        left, right = x.chunk(2, dim=-1)
        return x * self.cos.to(x.dtype) + torch.cat([-right, left], dim=-1) * self.sin.to(x.dtype)


class RotaryPositions(nn.Module):
    """Positions as rotations of queries and keys, so that a score depends on the distance of its two tokens alone.

    Args:
        head_dim: head dim D, even.
        base: base of the wavelengths, which are 2 pi base^(2i / D) tokens.

    Raises:
        ValueError: `head_dim` is odd.

    Sources:
        Su et al., RoFormer (2021), with the columns paired as in Llama: i with i + D/2.

    Example:
        >>> rotation = RotaryPositions(head_dim=8)(torch.tensor([7]))
        >>> rotation(torch.ones(1, 1, 1, 8)).norm()  # a rotation keeps lengths
        tensor(2.8284)
    """

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        check_ints(1, head_dim=head_dim)
        check_numbers("above 0 and finite", lambda x: 0 < x < math.inf, base=base)
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")
        self.head_dim, self.base = head_dim, base

    def forward(self, positions: Tensor) -> Rotation:
        """The rotation of the tokens at these positions, int32 or int64 [N, L] or [L]."""
        _check_positions(positions)
        if positions.dim() not in (1, 2):
            raise ValueError(f"positions must be [N, L] or [L], got {list(positions.shape)}")
        frequencies = _frequencies(self.head_dim, self.base).to(positions.device)
        angles = (positions[..., None] * frequencies).repeat((1,) * positions.dim() + (2,))
        angles = angles[None, None] if positions.dim() == 1 else angles[:, None]
        return Rotation(angles.cos().float(), angles.sin().float())

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, base={self.base}"


def _frequencies(width: int, base: float) -> Tensor:
    """float64 [ceil(width / 2)]: radians for each step of one position, from 1 to nearly 1 / base."""
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)


def _check_positions(positions: Tensor, max_length: int | None = None) -> None:
    """Refuses what are no positions, or none in a table, as far as that needs no synchronisation with a device."""
    check_dense("positions", positions)
    if positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"positions must be int32 or int64, got {positions.dtype}")
    if max_length is not None:
        check_range("positions", positions, max_length, "max_length = {}")
