"""The KV cache: keys and values of the tokens that a model has read, for generating the next ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..spec import Mask, is_exporting
from .checks import check_ints, check_tensor

if TYPE_CHECKING:
    from .pages import PagedCache


class AttentionCache(Protocol):
    """The keys and values that one attention layer keeps between calls, each [B, H_kv, n, D]."""

    def complete(self) -> tuple[Tensor, Tensor] | None:
        """k and v where calls no longer add any, so that nothing need be projected; None where this call adds some."""

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of this call and the earlier ones, from those of this call."""


class KVCache:
    """Keys and values of every layer, in buffers of a fixed length that the first call allocates.

    Each sample fills its buffers from the beginning and without gaps: padding is not kept, wherever it is in the input.
    So where `Mask.q_offset` is the number of tokens that a sample has in the cache, a causal mask hides the unwritten
    rest of a buffer.

    Args:
        batch_size: number of samples B.
        max_length: the largest number of tokens of a sample.

    Raises:
        TypeError, ValueError: an argument of the constructor, `extend`, `mask` or `select` is not what is said there.

    Attributes:
        positions: int64 [B or 1, n], the positions of the tokens that the current pass adds.

    Example:
        >>> cache = KVCache(batch_size=2, max_length=8)
        >>> cache.extend(3, torch.tensor([[True, True, True], [False, True, True]]))
        tensor([[0, 1, 2],
                [0, 0, 1]])
        >>> cache.extend(1)
        tensor([[3],
                [2]])
    """

    def __init__(self, batch_size: int, max_length: int) -> None:
        check_ints(0, batch_size=batch_size)
        check_ints(1, max_length=max_length)
        self.batch_size, self.max_length = batch_size, max_length
        self._length: int | Tensor = 0  # of each sample, int64 [B, 1]; an int as long as it is the same for all
        self._end = 0  # an upper bound of the lengths
        self.positions = _NO_POSITIONS  # of the tokens that this pass adds
        self._real: Tensor | None = None  # which of them are not padding
        self._before: tuple[int | Tensor, int] | None = None  # the lengths before the last `extend`
        self._layers: dict[int, _Growing] = {}
        self._memories: dict[int, _Memory] = {}
        self._is_of_export = is_exporting()

    def extend(self, n: int, real: Tensor | None = None, device: torch.device | str | None = None) -> Tensor:
        """Makes room for n tokens of each sample, which the next pass through the layers adds.

        Args:
            n: number of tokens.
            real: bool [B, n], False for padding; None if there is none.
            device: device of the positions, where `real` is None.

        Returns:
            The positions of these tokens, int64 [B or 1, n].

        Raises:
            TypeError, ValueError: there is no room for them, or an argument is not what is said above.
            NotImplementedError: torch.export traces this call, and not the constructor.
        """
        check_ints(0, n=n)
        check_export(self)
        if real is not None:
            check_tensor("real", real, "bool", (self.batch_size, n))
            if isinstance(self._length, Tensor) and real.device != self._length.device:
                raise ValueError(
                    f"real must be on {self._length.device} like that of the tokens before, got {real.device}"
                )
        length = self._length + (n if real is None else real.sum(-1, keepdim=True))
        end = self._end + n
        if end > self.max_length and isinstance(length, Tensor):
            end = int(length.max()) if length.numel() else 0  # without padding, for which a GPU is waited for
        if end > self.max_length:
            raise ValueError(f"max_length of the cache must be at least {end}, got {self.max_length}")
        if real is None:
            device = self._length.device if isinstance(self._length, Tensor) else device
            positions = self._length + torch.arange(n, device=device)[None]
        else:
            positions = self._length + (real.cumsum(-1) - 1).clamp(min=0)
        self._before = self._length, self._end
        self._length, self._end = length, end
        self.positions, self._real = positions, real
        for layer in self._layers.values():
            layer.has_room = True
        return positions

    def undo(self) -> None:
        """Takes the tokens of the last `extend` back, which no pass has added, or none to its end."""
        if self._before is not None:
            self._length, self._end = self._before
            self._before = None
            self.positions, self._real = _NO_POSITIONS, None

    def mask(self, mask: Mask) -> Mask:
        """The mask of the new tokens over all keys in the cache: `mask`, which must be causal, at their positions.

        Raises:
            ValueError: `mask` is not causal, or has fields other than `causal` and `window`.
        """
        check_causal(mask)
        n = self.positions.shape[1]
        if isinstance(self._length, int):
            return replace(mask, q_offset=self._length - n)
        q_offset = self.positions - torch.arange(n, device=self.positions.device)
        return replace(mask, q_offset=q_offset, real_queries=self._real)

    def write(self, buffer: Tensor, x: Tensor) -> Tensor:
        """Puts x [B, H_kv, n, D] of the new tokens into the buffer, and returns the part of it that is in use.

        Raises:
            ValueError: `extend` has not made room for exactly these.
        """
        wanted = self.batch_size, self.positions.shape[1]
        if (x.shape[0], x.shape[2]) != wanted:
            raise ValueError(
                f"with this cache there must be {wanted[0]} samples of {wanted[1]} new tokens, for which KVCache and "
                f"extend have made room, got {x.shape[0]} of {x.shape[2]}"
            )
        x = x.to(buffer.dtype)  # as where autocast begins in between: attention says so where the query is of another
        if isinstance(self._length, int):
            buffer[:, :, self._end - x.shape[2] : self._end] = x
        elif self._real is None:
            sample = torch.arange(self.batch_size, device=x.device)[:, None]
            buffer[sample, :, self.positions] = x.transpose(1, 2)
        else:
            sample, token = self._real.nonzero(as_tuple=True)  # for which a GPU is waited for
            buffer[sample, :, self.positions[sample, token]] = x[sample, :, token]
        return buffer[:, :, : self._end]

    def layer(self, i: int) -> AttentionCache:
        """The cache of the self-attention of layer i."""
        return self._layers.setdefault(i, _Growing(self))

    def memory(self, i: int) -> AttentionCache:
        """The cache of the attention of layer i to the encoder's output, which is projected once."""
        return self._memories.setdefault(i, _Memory())

    def select(self, samples: Tensor) -> None:
        """Keeps the samples with these numbers, int64 [B'], in this order; a sample may be left out or repeated."""
        check_tensor("samples", samples, "integer", ("B'",))
        if samples.device.type == "cpu" and len(samples) and not 0 <= samples.min() <= samples.max() < self.batch_size:
            raise ValueError(f"samples must be from 0 to {self.batch_size - 1}, got {samples.tolist()}")
        self.batch_size, self._before = len(samples), None
        if isinstance(self._length, Tensor):
            self._length = self._length[samples]
        for part in (*self._layers.values(), *self._memories.values()):
            part.select(samples)


_NO_POSITIONS = torch.empty(1, 0, dtype=torch.int64, device="cpu")


def check_causal(mask: Mask) -> None:
    """Raises where a mask is none, is not causal, or has fields other than `causal` and `window`."""
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a fastattn.Mask, got {type(mask).__name__}")
    if not mask.causal or mask.features() - {"causal", "window"}:
        raise ValueError(f"mask must be causal, with a window at most, with a cache, got {sorted(mask.features())}")


def check_export(cache: KVCache | PagedCache) -> None:
    """Raises where an exported program would begin every call with the tokens that a cache had during the export."""
    if is_exporting() and not cache._is_of_export:
        name = type(cache).__name__
        raise NotImplementedError(
            f"cache must be None or made in the model's forward for torch.export, whose programs cannot keep a {name}"
        )


class _KeysAndValues:
    """k and v [B, H_kv, n, D] of one attention layer, from its first call on."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def select(self, samples: Tensor) -> None:
        if self.k is not None:
            with torch.inference_mode(False):  # or nothing could be written outside of it
                self.k, self.v = self.k[samples], self.v[samples]


class _Growing(_KeysAndValues):
    """Keys and values of a self-attention, with room for max_length tokens."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self.cache = cache
        self.has_room = True  # for the next pass: once the last one has been written, only `extend` makes it
        self.may_be_saved = False  # by autograd, which wants them unchanged then

    def complete(self) -> None:
        return None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not self.has_room:
            raise ValueError("KVCache.extend must be called before each pass, got another pass since the last call")
        if self.k is None:
            with torch.inference_mode(False):  # or nothing could be written outside of it
                self.k, self.v = (x.new_zeros(*x.shape[:2], self.cache.max_length, x.shape[3]) for x in (k, v))
        elif self.may_be_saved:
            with torch.inference_mode(False), torch.enable_grad():
                self.k, self.v = self.k.clone(), self.v.clone()
        self.may_be_saved = torch.is_grad_enabled()
        written = self.cache.write(self.k, k), self.cache.write(self.v, v)
        self.has_room = False
        return written


class _Memory(_KeysAndValues):
    """Keys and values of an encoder's output, all of which the first call adds."""

    def complete(self) -> tuple[Tensor, Tensor] | None:
        return None if self.k is None else (self.k, self.v)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.k, self.v = k, v
        return k, v
