"""Description of a call: `Mask` says which keys each query may see, `Spec` adds everything else that a backend needs.

This file is the definition. A backend is right when it agrees with `Mask.keep`, `Mask.positions` and
`Spec.dropout_keep`; it is free in how it gets there. True always means *may see*.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, FrozenInstanceError, dataclass, field, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad
from torch.utils import _pytree as pytree

from .picture import MaskPicture, picture_of

LOG2E = math.log2(math.e)
NO_WINDOW = (None, None)


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """Visibility of keys to queries; every field that is set hides more, and all of them combine.

    `one & other` is the mask that shows what both show; what cannot be said in one mask is refused by a ValueError.

    Letters: B batch, H heads, n_q queries, n_k keys. `position` is where a token stands among the keys: key j
    stands at j, query i at `q_offset + i`; with `segment_ids`, both are counted within the token's own document.

    Args:
        causal: a query sees only keys at its own position or before it.
        q_offset: position of query 0 among the keys: 0 is PyTorch's `is_causal` (aligned top left), `n_k - n_q` is
            FlashAttention's (aligned bottom right), the cache length when decoding. An int; or int32 or int64 on the
            device of q, [B] for samples that differ, or [B, n_q] for queries that do: query i of sample b then stands
            at `q_offset[b, i] + i` (with `segment_ids`, + its rank in its document). From -2**61 to 2**61, which is not
            checked in tensors.
        window: how far to the (left, right) of its own position a query may look; None is no limit.
        real_keys: bool [B, n_k]; False marks padding, in any pattern.
        real_queries: bool [B, n_q]; a False row is never read: its output is 0, its lse -inf, its gradient 0.
        segment_ids: int32 or int64 document ids ([B, n_q], [B, n_k]); a query sees only keys of its own document, a
            negative id is padding.
        dense: bool, broadcastable to [B, H, n_q, n_k]: the general case.

    On GPUs, what is computed from these tensors alone is kept for as long as they live, for the other layers of a model
    and for the backward, until an operation of PyTorch changes them. A tensor that is written in another way, such as
    by a kernel of your own or a CUDA graph that is replayed, needs `torch.autograd.graph.increment_version(x)` then.

    Raises:
        ValueError: a field is not of the type, dtype or range that is said here. Lengths and devices are compared with
            those of q and k by the functions that take a mask.

    Example:
        >>> import torch, fastattn
        >>> fastattn.Mask(causal=True, q_offset=1).keep(2, 3)[0, 0].int()
        tensor([[1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
    """

    causal: bool = False
    _: KW_ONLY
    q_offset: int | Tensor = 0
    window: tuple[int | None, int | None] = NO_WINDOW
    real_keys: Tensor | None = None
    real_queries: Tensor | None = None
    segment_ids: tuple[Tensor, Tensor] | None = None
    dense: Tensor | None = None

    def __post_init__(self) -> None:
        if type(self.causal) is not bool:
            how = "; write real_keys=... or dense=..." if isinstance(self.causal, Tensor) else ""
            raise ValueError(f"mask.causal must be a bool, got {_shown(self.causal)}{how}")
        if not is_int(self.q_offset):
            object.__setattr__(self, "q_offset", as_int(self.q_offset))
        if not is_int(self.q_offset):
            if not isinstance(self.q_offset, Tensor):
                raise ValueError(f"mask.q_offset must be an int or an integer Tensor, got {_shown(self.q_offset)}")
            _check_table("q_offset", self.q_offset, _INTEGERS, (1, 2))
        elif not (isinstance(self.q_offset, torch.SymInt) or abs(self.q_offset) <= 2**61):  # kFar in csrc/mask.h
            raise ValueError(f"mask.q_offset must be an int from -2**61 to 2**61, got {self.q_offset}")
        if not isinstance(self.window, (tuple, list)) or len(self.window) != 2:
            raise ValueError(f"mask.window must be a pair (left, right), got {_shown(self.window)}")
        if isinstance(self.window, list) or not self.window[0] is self.window[1] is None:
            object.__setattr__(self, "window", tuple(as_int(width) for width in self.window))
            for side, width in zip(("left", "right"), self.window, strict=True):
                if width is not None and not (is_int(width) and _is_within_64_bits(width, 0)):
                    raise ValueError(
                        f"mask.window's {side} must be None or an int from 0 to 2**63 - 1, got {_shown(width)}"
                        + "; None is no limit" * (is_int(width) and width == -1)
                    )
        if self.real_keys is not None:
            _check_table("real_keys", self.real_keys, _BOOL, (2,))
        if self.real_queries is not None:
            _check_table("real_queries", self.real_queries, _BOOL, (2,))
        if self.segment_ids is not None:
            if not isinstance(self.segment_ids, tuple) or len(self.segment_ids) != 2:
                raise ValueError(
                    f"mask.segment_ids must be a pair of Tensors (of queries, of keys), got {_shown(self.segment_ids)}"
                )
            for i, ids in enumerate(self.segment_ids):
                _check_table(f"segment_ids[{i}]", ids, _INTEGERS, (2,))
        if self.dense is not None:
            _check_table("dense", self.dense, _BOOL, (0, 1, 2, 3, 4))

    def features(self) -> frozenset[str]:
        """The names of the fields in use: what a backend must list to be given this mask."""
        in_use = {
            "causal": self.causal,
            "q_offset": isinstance(self.q_offset, (Tensor, torch.SymInt)) or self.q_offset != 0,
            "window": self.window[0] is not None or self.window[1] is not None,
            "real_keys": self.real_keys is not None,
            "real_queries": self.real_queries is not None,
            "segment_ids": self.segment_ids is not None,
            "dense": self.dense is not None,
        }
        return frozenset(name for name, used in in_use.items() if used)

    def positions(self, n_q: int, n_k: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Positions of queries and keys among the keys: two int64 tensors, [B or 1, n_q] and [B or 1, n_k]."""
        if self.segment_ids is None:
            rank_q = torch.arange(n_q, device=device)[None]
            rank_k = torch.arange(n_k, device=device)[None]
        else:
            rank_q, rank_k = (_rank_in_document(ids) for ids in self.segment_ids)
        per_sample = isinstance(self.q_offset, Tensor) and self.q_offset.dim() == 1
        return rank_q + (self.q_offset[:, None] if per_sample else self.q_offset), rank_k

    def keep(self, n_q: int, n_k: int, device: torch.device | str | None = None, rows: slice | None = None) -> Tensor:
        """bool [B or 1, H or 1, n_q, n_k], True where the query may see the key. THE definition of every field.

        Args:
            rows: only these of the n_q queries.

        Raises:
            ValueError: a length is not that of the tensors of this mask.
        """
        rows = slice(None) if rows is None else rows  # no default, which torch 2.10 cannot trace
        for name, n, known in zip(("n_q", "n_k"), (n_q, n_k), self._lengths(), strict=True):
            if any(n != length for length in known):
                lengths = ", ".join(map(str, known))
                raise ValueError(f"{name} must be {lengths} as in the tensors of this mask, got {_shown(n)}")
        position_q, position_k = self.positions(n_q, n_k, device)
        behind = position_q[:, rows, None] - position_k[:, None, :]  # how far the key lies behind the query
        left, right = self.window
        keep = torch.ones_like(behind, dtype=torch.bool)
        if self.causal:
            keep = keep & (behind >= 0)
        if left is not None:
            keep = keep & (behind <= left)
        if right is not None:
            keep = keep & (behind >= -right)
        if self.real_keys is not None:
            keep = keep & self.real_keys[:, None, :]
        if self.real_queries is not None:
            keep = keep & self.real_queries[:, rows, None]
        if self.segment_ids is not None:
            ids_q, ids_k = self.segment_ids
            keep = keep & (ids_q[:, rows, None] == ids_k[:, None, :]) & (ids_k >= 0)[:, None, :]
        keep = keep[:, None]
        return keep if self.dense is None else keep & _rows_of(self.dense, rows)

    def __and__(self, other: Mask) -> Mask:
        """The mask that shows what both show: its `keep` is that of one and that of the other.

        Windows become the narrower one, documents those of tokens that share both, and nothing of size n_q * n_k is
        made that was not there. Two `dense` are broadcast to each other.

        Raises:
            ValueError: fields do not fit each other, or one mask counts positions where the other does not: from
                another `q_offset`, or over all tokens beside `segment_ids`. (`causal` at `q_offset=0` is the same in
                documents and over all tokens, where the ids of queries and keys are one tensor.)

        Example:
            >>> import torch, fastattn
            >>> real = fastattn.Mask.from_lengths([2], 3)
            >>> (fastattn.Mask(causal=True) & real).keep(3, 3)[0, 0].int()
            tensor([[1, 0, 0],
                    [1, 1, 0],
                    [1, 1, 0]], dtype=torch.int32)
        """
        if not isinstance(other, Mask):
            return NotImplemented
        segment_ids = _shared_documents(self.segment_ids, other.segment_ids)
        placed = [mask for mask in (self, other) if mask.features() & {"causal", "q_offset", "window"}]
        q_offset = placed[0].q_offset if placed else 0
        for mask in placed:
            if mask.q_offset is not q_offset and not (
                is_int(mask.q_offset) and is_int(q_offset) and mask.q_offset == q_offset
            ):
                got = " and ".join(_shown(mask.q_offset) for mask in placed)
                raise ValueError(f"mask.q_offset must be one int or one Tensor in both masks, got {got}")
            by_order = mask.features().isdisjoint({"q_offset", "window"}) and segment_ids and _is_one(segment_ids)
            if not by_order and not _are_same(mask.segment_ids, segment_ids):
                positional = sorted(mask.features() & {"causal", "q_offset", "window"})
                raise ValueError(
                    f"mask.segment_ids must be the same in both masks where one has {', '.join(positional)}, since "
                    "positions count in the document, got others or none; "
                    "Mask(dense=mask.keep(n_q, n_k)) says such a mask without positions"
                )
        return Mask(
            self.causal or other.causal,
            q_offset=q_offset,
            window=tuple(map(_narrower, self.window, other.window)),
            real_keys=_both_fitting("real_keys", self.real_keys, other.real_keys),
            real_queries=_both_fitting("real_queries", self.real_queries, other.real_queries),
            segment_ids=segment_ids,
            dense=_both_fitting("dense", self.dense, other.dense),
        )

    def __bool__(self) -> bool:
        raise TypeError(
            "a Mask is neither true nor false: `one & other` shows what both show, and `mask is None` tells"
        )

    @classmethod
    def from_lengths(
        cls, lengths: Tensor | Iterable[int], n: int, *, padding_side: str = "right", of: str = "keys"
    ) -> Mask:
        """A mask of the padding of samples with these lengths, that are padded to `n` tokens.

        Args:
            lengths: int32 or int64 [B], or that many ints, each from 0 to n; on a GPU their range is not checked.
            n: tokens of each sample, real and padding.
            padding_side: "right" or "left", as in `torch.nn.utils.rnn.pad_sequence`.
            of: what these tokens are: "keys", "queries", or "both" in self-attention, where the output at padding is
                then 0.

        Returns:
            A mask with `real_keys`, `real_queries` or both, on the device of `lengths`.

        Raises:
            ValueError: an argument is not what is said here.

        Example:
            >>> import fastattn
            >>> fastattn.Mask.from_lengths([1, 3], 4, padding_side="left").real_keys.int()
            tensor([[0, 0, 0, 1],
                    [0, 1, 1, 1]], dtype=torch.int32)
        """
        n = as_int(n)
        if not _is_length(n):
            raise ValueError(f"n must be an int, at least 0, got {_shown(n)}")
        if not isinstance(lengths, Tensor):
            lengths = list(lengths) if isinstance(lengths, Iterable) else [lengths]
            if not all(_is_length(as_int(length)) for length in lengths):
                got = ", ".join(map(_shown, lengths))
                raise ValueError(f"lengths must be an integer Tensor, or ints from 0 to n = {n}, got {got}")
            lengths = torch.tensor([as_int(length) for length in lengths], dtype=torch.int64)
        if not is_dense(lengths) or lengths.dtype not in _INTEGERS or lengths.dim() != 1:
            got = f"{lengths.dtype} {list(lengths.shape)}" if is_dense(lengths) else "one that is not dense"
            raise ValueError(f"lengths must be int32 or int64 [B], got {got}")
        for name, value, words in (("padding_side", padding_side, _SIDES), ("of", of, _PADDED)):
            if not isinstance(value, str) or value not in words:
                raise ValueError(f"{name} must be {' or '.join(map(repr, words))}, got {_shown(value)}")
        if can_be_read(lengths) and ((lengths < 0) | (lengths > n)).any():
            raise ValueError(f"lengths must be from 0 to n = {n}, got {lengths.tolist()}")
        token = torch.arange(n, device=lengths.device)
        real = token < lengths[:, None] if padding_side == "right" else token >= n - lengths[:, None]
        return cls(real_keys=real if of != "queries" else None, real_queries=real if of != "keys" else None)

    @classmethod
    def from_flex(
        cls,
        mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        B: int | None,
        H: int | None,
        Q_LEN: int,
        KV_LEN: int,
        device: torch.device | str | None = None,
    ) -> Mask:
        """A mask from a `mask_mod` of FlexAttention, with the arguments of its `create_block_mask`.

        The result is `dense`, B * H * Q_LEN * KV_LEN bytes (B and H count as 1 where they are None), and it is computed
        over blocks of queries, so that little more is in memory at a time. Where fields of `Mask` can say the same they
        take O(Q_LEN + KV_LEN), and nothing is read for each pair.

        Args:
            mask_mod: a function of the indices b, h, q_idx and kv_idx, integer tensors without dimensions, that returns
                a bool one: True where the query may see the key. `torch.vmap` runs it over all indices.
            B: samples; None where the mask is the same in all.
            H: heads; None where the mask is the same in all.
            Q_LEN: queries.
            KV_LEN: keys.
            device: where the indices and the result lie; None is torch's default device.

        Returns:
            A mask whose `dense` is bool [B or 1, H or 1, Q_LEN, KV_LEN].

        Raises:
            ValueError: an argument is not what is said here, or `mask_mod` returns another dtype.

        Example:
            >>> import fastattn
            >>> fastattn.Mask.from_flex(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, None, None, 2, 3).dense[0, 0].int()
            tensor([[1, 0, 0],
                    [1, 1, 0]], dtype=torch.int32)
        """
        if not callable(mask_mod):
            raise ValueError(f"mask_mod must be a function of (b, h, q_idx, kv_idx), got {_shown(mask_mod)}")
        sizes = {"B": as_int(B), "H": as_int(H), "Q_LEN": as_int(Q_LEN), "KV_LEN": as_int(KV_LEN)}
        for name, size in sizes.items():
            if not _is_length(size, 1) and not (size is None and name in "BH"):
                raise ValueError(f"{name} must be an int, at least 1{', or None' * (name in 'BH')}, got {_shown(size)}")
        try:
            device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"device must be a device of torch, got {_shown(device)}: {error}") from error
        b, h, i, j = (torch.arange(size or 1, device=device) for size in sizes.values())

        def of_pairs(*indices: Tensor) -> Tensor:
            seen = mask_mod(*indices)
            if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
                raise ValueError(
                    f"mask_mod must return a bool Tensor, got {getattr(seen, 'dtype', type(seen).__name__)}"
                )
            return seen

        for dim in (3, 2, 1, 0):
            of_pairs = torch.vmap(of_pairs, in_dims=tuple(0 if n == dim else None for n in range(4)))
        dense = torch.empty(len(b), len(h), len(i), len(j), dtype=torch.bool, device=device)
        with _reads_of_tables():
            for rows in i.split(max(1, _PAIRS_AT_ONCE // (len(b) * len(h) * len(j)))):
                dense[:, :, rows] = of_pairs(b, h, rows, j)
        return cls(dense=dense)

    def show(
        self, n_q: int | None = None, n_k: int | None = None, *, sample: int | None = None, head: int = 0
    ) -> MaskPicture:
        """A picture of this mask: notebooks show it as SVG, `print` and a terminal in characters.

        A row is a query and a column a key. Where there are many, a cell stands for a block of them.

        Args:
            n_q: queries; None is what the tensors of this mask say, or else as many as keys, or else 8.
            n_k: keys; None is what the tensors of this mask say, or else as many as queries.
            sample: the sample to draw; None is the first four.
            head: the head to draw, where `dense` tells heads apart.

        Returns:
            A picture, whose `str()` is its characters, and `.svg` the text of a file.

        Raises:
            ValueError: an argument is no such number, or not the length that the tensors of this mask have.

        Example:
            >>> import fastattn
            >>> fastattn.Mask(causal=True).show(3)
               0 1 2
            0 ██ · ·
            1 ████ ·
            2 ██████
            ██ may be seen   · hidden
        """
        n_q, n_k, sample, head = map(as_int, (n_q, n_k, sample, head))
        n_q, n_k = (known if n is None else [n] for n, known in zip((n_q, n_k), self._lengths(), strict=True))
        n_q, n_k = (n_q or n_k or [8])[0], (n_k or n_q or [8])[0]
        for name, n in (("n_q", n_q), ("n_k", n_k)):
            if not _is_length(n, 1):
                raise ValueError(f"{name} must be an int, at least 1, got {_shown(n)}")
        device = next((x.device for x in self.tensors().values()), None)
        B, H = self.keep(n_q, n_k, device, slice(1)).shape[:2]
        if B == 0 or H == 0:
            raise ValueError(f"mask must have samples and heads to be shown, got {B} and {H}")
        for name, value, n in (("sample", 0 if sample is None else sample, B), ("head", head, H)):
            if not is_int(value) or not 0 <= value < n:
                raise ValueError(f"{name} must be an int from 0 to {n - 1}, got {_shown(value)}")
        samples = range(min(B, 4)) if sample is None else range(sample, sample + 1)
        return picture_of(
            lambda rows: self.keep(n_q, n_k, device, rows), (n_q, n_k),
            (self.readable_queries(), self.readable_keys()), self.segment_ids, samples, head,
        )  # fmt: skip

    def _lengths(self) -> tuple[list[int], list[int]]:
        """What its tensors say of n_q and of n_k."""
        ids_q, ids_k = self.segment_ids or (None, None)
        offsets = self.q_offset if isinstance(self.q_offset, Tensor) and self.q_offset.dim() == 2 else None
        rows, columns = (1, 1, *(() if self.dense is None else self.dense.shape))[-2:]
        known_q = [x.shape[1] for x in (self.real_queries, ids_q, offsets) if x is not None] + [rows] * (rows != 1)
        known_k = [x.shape[1] for x in (self.real_keys, ids_k) if x is not None] + [columns] * (columns != 1)
        return known_q, known_k

    def readable_keys(self) -> Tensor | None:
        """bool [B, n_k], False for keys that are padding to every query, and so never read. None without padding."""
        in_document = None if self.segment_ids is None else self.segment_ids[1] >= 0
        return _both(self.real_keys, in_document)

    def readable_queries(self) -> Tensor | None:
        """bool [B, n_q], False for queries that are padding, and so never read. None without padding."""
        in_document = None if self.segment_ids is None else self.segment_ids[0] >= 0
        return _both(self.real_queries, in_document)

    def with_padding(self, real_keys: Tensor | None = None, real_queries: Tensor | None = None) -> Mask:
        """A copy of this mask that also hides what `real_keys` [B, n_k] and `real_queries` [B, n_q] mark as padding."""
        return replace(
            self,
            real_keys=_both_fitting("real_keys", self.real_keys, real_keys),
            real_queries=_both_fitting("real_queries", self.real_queries, real_queries),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of this mask, by the name of its field (for checks of device and dtype)."""
        tensors = {}
        if isinstance(self.q_offset, Tensor):
            tensors["q_offset"] = self.q_offset
        if self.real_keys is not None:
            tensors["real_keys"] = self.real_keys
        if self.real_queries is not None:
            tensors["real_queries"] = self.real_queries
        if self.segment_ids is not None:
            tensors["segment_ids[0]"], tensors["segment_ids[1]"] = self.segment_ids
        if self.dense is not None:
            tensors["dense"] = self.dense
        return tensors


@dataclass(frozen=True, slots=True, eq=False)
class RelativeBias:
    """A bias that depends on the head and on how far a key is from a query alone, as a small table that may be learned.

    To the score of query i and key j it adds table[h, bucket(d)], with d = j - (i + mask.q_offset), the position of the
    key minus that of the query. Nothing of size n_q * n_k is made of it, and its gradient takes O(n_q + n_k) memory
    too. Where documents are packed, each has to lie in one piece: d counts all tokens in between.

    Args:
        table: floating [H, buckets], or [1, buckets] or [buckets], the same for all heads.
        bucket: a function of int64 distances [n] that returns the index in the table of each, int64 [n]: T5's
            `_relative_position_bucket`, for instance. None where the table has an entry for each distance in turn,
            n_q + n_k - 1 of them: that of the last query and the first key stands first. With a function,
            `mask.q_offset` must be an int.

    Raises:
        ValueError: an argument is not what is said here.

    Sources:
        Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer (2020).

    Example:
        >>> import torch, fastattn
        >>> q = k = v = torch.ones(1, 2, 6, 8)
        >>> table = torch.zeros(2, 5, requires_grad=True)
        >>> bias = fastattn.RelativeBias(table, lambda distance: distance.clamp(-2, 2) + 2)
        >>> fastattn.attention(q, k, v, bias=bias).sum().backward()
        >>> table.grad.shape
        torch.Size([2, 5])
    """

    table: Tensor
    bucket: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        x = self.table
        if not isinstance(x, Tensor) or not is_dense(x) or not x.is_floating_point() or x.dim() not in (1, 2):
            got = f"{list(x.shape)} of {x.dtype}" if isinstance(x, Tensor) and is_dense(x) else type(x).__name__
            raise ValueError(f"table must be a floating Tensor, [buckets] or [H, buckets], got {got}")
        if self.bucket is not None and not callable(self.bucket):
            raise ValueError(f"bucket must be a function of distances, or None, got {_shown(self.bucket)}")

    def by_distance(self, n_q: int, n_k: int, q_offset: int = 0) -> Tensor:
        """[H or 1, 1, n_q + n_k - 1]: what it adds at each distance, from the least one on; differentiable.

        Raises:
            ValueError: the table has another width, or `bucket` returns something else than is said above.
        """
        table, width = self.table[(None,) * (2 - self.table.dim())], max(n_q + n_k - 1, 0)
        if self.bucket is None:
            if table.shape[1] != width:
                got = list(self.table.shape)
                raise ValueError(f"bias.table must have n_q + n_k - 1 = {width} columns without a bucket, got {got}")
            return table[:, None]
        index = self.bucket(torch.arange(width, device=table.device) + (1 - n_q - q_offset))
        if not isinstance(index, Tensor) or index.shape != (width,) or index.dtype not in _INTEGERS:
            got = f"{list(index.shape)} of {index.dtype}" if isinstance(index, Tensor) else type(index).__name__
            raise ValueError(f"bias.bucket must return int64 [{width}] for as many distances, got {got}")
        if can_be_read(index) and ((index < 0) | (index >= table.shape[1])).any():
            raise ValueError(f"bias.bucket must return from 0 to {table.shape[1] - 1}, as its table has, got others")
        # An embedding, whose gradient is added up in a fixed order, and in fp64: many distances share a bucket.
        has_fp64 = table.device.type != "mps"
        values = embedding(index, table.mT.to(torch.float64 if has_fp64 else accumulation_dtype(table.dtype)))
        return values.mT.to(table.dtype).contiguous()[:, None]


def _reads_of_tables() -> AbstractContextManager:
    """The context in which torch.vmap takes `table[b, q_idx]`: of torch 2.10, which does not by itself."""
    if torch.__version__ >= "2.11":
        return nullcontext()
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


_PAIRS_AT_ONCE = 2**22  # that `Mask.from_flex` evaluates: 32 MiB for each int64 that is computed of them
_COUNTERS_IN_CACHE = 2**14  # that dropout draws by at a time on CPUs: 128 KiB for each int64 that is computed of them
_SIDES, _PADDED = ("right", "left"), ("keys", "queries", "both")
_BOOL, _INTEGERS = (torch.bool,), (torch.int32, torch.int64)


def _check_table(name: str, x: object, dtypes: tuple[torch.dtype, ...], dims: tuple[int, ...]) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"mask.{name} must be a Tensor, got {_shown(x)}")
    if not is_dense(x):
        raise ValueError(f"mask.{name} must be dense, got {'a nested Tensor' if x.is_nested else x.layout}")
    if x.dtype not in dtypes:
        meaning = "bool (True is real)" if dtypes is _BOOL else "int32 or int64"
        if name == "dense":
            meaning = "bool (True may see; a float mask is a bias)"
        how = f"; .bool() makes it so where 1 is {'real' if name != 'dense' else 'seen'}"
        integers = dtypes is _BOOL and not x.is_floating_point()
        raise ValueError(f"mask.{name} must be {meaning}, got {x.dtype}{how * integers}")
    if all(x.dim() != n for n in dims):  # `in` is false of it in a graph of dynamic shapes
        raise ValueError(f"mask.{name} must have {' or '.join(map(str, dims))} dimensions, got {x.dim()}")


def is_dense(x: Tensor) -> bool:
    """Whether a tensor is neither nested nor sparse."""
    return x.layout is torch.strided and not x.is_nested


def can_be_read(x: Tensor) -> bool:
    """Whether a check may look at the values: at once, as on the CPU alone, and not of what stands for others."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    dispatches = torch._C._dispatch_keys(x).has(torch._C.DispatchKey.Python)  # as fake tensors do, and distributed ones
    return not dispatches and torch.func.debug_unwrap(x) is x


def is_above(n: int, limit: int) -> bool:
    """Whether n is above limit, without a guard: False of a symbolic length that may be, as far as is known.

    A comparison would be a guard of the graph, which torch.export refuses where a length is a plain `Dim`.
    """
    if not isinstance(n, torch.SymInt):  # torch.jit.trace has tensors for lengths
        return bool(n > limit)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # of a module that SymInts come from

    return statically_known_true(n > limit)


def is_exporting() -> bool:
    """Whether torch.export traces: in graphs of torch.compile too, where torch 2.10 says so of every one."""
    return torch.compiler.is_exporting()


is_exporting._dynamo_marked_constant = True  # Dynamo calls it then, rather than answer for torch's own function


def is_jagged(x: object) -> bool:
    """Whether `x` is a nested tensor of layout torch.jagged: samples one after the other, without padding."""
    return isinstance(x, Tensor) and x.is_nested and x.layout is torch.jagged


def is_int(x: object) -> bool:
    """Whether `x` is an integer, of Python's or one that torch.compile traces, but not a bool."""
    return type(x) is int or (isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool))


def _is_within_64_bits(x: int | torch.SymInt, least: int) -> bool:
    """Whether an integer is from `least` to 2**63 - 1, which one that a graph reads of a tensor does not tell."""
    return isinstance(x, torch.SymInt) or least <= x < 2**63


def _is_length(x: object, least: int = 0) -> bool:
    """Whether `x` is an integer that can be a length: larger ones overflow where they are multiplied."""
    return is_int(x) and least <= x < 2**31


def as_int(x: object) -> object:
    """An integer of NumPy's, or a tensor of no dimensions that holds one, as Python's int; anything else as it is."""
    if is_int(x) or isinstance(x, bool):
        return x
    is_one = x.dim() == 0 and x.dtype in _INTEGERS if isinstance(x, Tensor) else isinstance(x, numbers.Integral)
    return int(x) if is_one else x


def as_number(x: object) -> object:
    """A number of NumPy's, or a tensor of no dimensions that no gradient is wanted of, as a float; else as it is."""
    if x is None or type(x) is float:
        return x
    if isinstance(x, Tensor):
        is_one = x.dim() == 0 and not (x.requires_grad or x.dtype == torch.bool or x.is_complex() or x.is_meta)
    else:
        is_one = isinstance(x, numbers.Real) and not isinstance(x, (bool, int))
    return float(x) if is_one else x


_ELSEWHERE = {
    "is_causal": "causal",
    "mask": "dense",
    "attn_mask": "dense",
    "attention_mask": "real_keys",
    "key_padding_mask": "real_keys",
    "src_key_padding_mask": "real_keys",
    "window_size": "window",
    "sliding_window": "window",
    "softmax_scale": "scale",
    "scaling": "scale",
    "dropout": "dropout_p",
    "attn_bias": "bias",
    "position_bias": "bias",
}
_REMARKS = {
    "dense": ", bool, True where a query may see a key; a float mask is attention's bias=...",
    "real_keys": ", bool, True where a token is real",
    "window": ", (left, right), each an int or None for no limit",
}
_NEEDLESS = ("enable_gqa", "max_seqlen_k", "max_seqlen_q")


def refuse_unknown(
    function: Callable, unknown: Iterable[str], instead: Mapping[str, str] = {}, options: Iterable[str] = ()
) -> None:
    """Raises TypeError for the first of these names, and says what to write where other libraries have it.

    instead: what to write for the names that mean something else here than in `attention`.
    options: what the function takes beside what its signature names.
    """
    for name in unknown:
        here, known = _ELSEWHERE.get(name, name), {*inspect.signature(function).parameters, *options}
        written, how = f"{here}={'True' if here == 'causal' else '...'}", ""
        if name in instead:
            how = f"; write {instead[name]}"
        elif name in _NEEDLESS:
            how = "; leave it out"
        elif here in known:
            how = f"; write {written}{_REMARKS.get(here, '')}"
        elif here in _FIELDS and "mask" in known:
            how = f"; write mask=fastattn.Mask({written}){_REMARKS.get(here, '')}"
        raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}{how}")


def _shown(x: object) -> str:
    """`x` in a message: a number as it is, anything else by its type."""
    return repr(x) if isinstance(x, (bool, int, float, str, tuple)) else type(x).__name__


def _rank_in_document(ids: Tensor) -> Tensor:
    """int64 [B, n]: how many tokens of the same document stand before each token."""
    sorted_ids, order = ids.contiguous().sort(dim=-1, stable=True)
    start_of_document = torch.searchsorted(sorted_ids, sorted_ids)
    rank = torch.arange(ids.shape[-1], device=ids.device) - start_of_document
    return torch.empty_like(rank).scatter_(-1, order, rank)


def _rows_of(table: Tensor, rows: slice) -> Tensor:
    """The query rows `rows` of a table that is broadcastable to [B, H, n_q, n_k]."""
    return table if table.dim() < 2 or table.shape[-2] == 1 else table[..., rows, :]


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a & b


def _both_fitting(name: str, a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is not None and b is not None and a.shape != b.shape and not (name == "dense" and _broadcast(a, b)):
        raise ValueError(f"mask.{name} must fit that of the other mask, got {list(a.shape)} and {list(b.shape)}")
    return _both(a, b)


def _narrower(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else min(a, b)


def _broadcast(a: Tensor, b: Tensor) -> bool:
    return all(n == m or 1 in (n, m) for n, m in zip(reversed(a.shape), reversed(b.shape), strict=False))


_Documents = tuple[Tensor, Tensor] | None


def _are_same(a: _Documents, b: _Documents) -> bool:
    if a is None or b is None:
        return a is None and b is None
    return a[0] is b[0] and a[1] is b[1]


def _is_one(documents: _Documents) -> bool:
    """Whether queries and keys have the same ids because they have the same tensor: ranks order them like indices."""
    return documents is not None and documents[0] is documents[1]


def _shared_documents(a: _Documents, b: _Documents) -> _Documents:
    """Ids that are equal where both ids are, and -1 where one is negative."""
    if a is None or b is None or _are_same(a, b):
        return a if b is None else b
    if any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        shapes = " and ".join(str([list(x.shape) for x in ids]) for ids in (a, b))
        raise ValueError(f"mask.segment_ids must fit those of the other mask, got {shapes}")
    values = [torch.cat(ids, dim=1).long().sort().values for ids in (a, b)]
    shared = []
    for x, y in list(zip(a, b, strict=True))[: 1 if _is_one(a) and _is_one(b) else 2]:
        # The place of an id among the sorted ones stands for it, so that no pair is too large for int64.
        rank_x, rank_y = (torch.searchsorted(v, ids.long().contiguous()) for v, ids in zip(values, (x, y), strict=True))
        shared.append((rank_x * values[1].shape[1] + rank_y).masked_fill((x < 0) | (y < 0), -1))
    return shared[0], shared[-1]


@dataclass(slots=True, eq=False)  # not frozen: one is made for every call, and frozen ones take longer
class Spec:
    """Everything a backend is told about a call besides q, k and v. Nobody changes one.

    score = softcap * tanh(scale * q k^T / softcap) + bias - slope * |position_q - position_k|, then the mask; `bias`
    of -inf counts as masked. lse = log(sum over keys of exp(score), and of exp(sink)). Weights exp(score - lse) are
    multiplied by keep / (1 - dropout_p) after that.

    Args:
        mask: which keys each query may see.
        scale: factor on q k^T.
        bias: float, broadcastable to [B, H, n_q, n_k].
        softcap: bound on |scale * q k^T|, or None.
        alibi_slopes: float [H] or [B, H].
        sinks: float [H], one more logit a head, whose value is zero.
        dropout_p: probability to drop a weight.
        seed: int64 scalar tensor on the device of q; None when dropout_p is 0.
        deterministic: same inputs give the same bits.
        places: int32 [2 + n_q + ceil(n_k / 4)] on the device of q, where this call is a part of one that other
            processes compute too: by which sample, head, queries and keys its dropout is drawn. See `dropout_keep`.
        bias_by_distance: bias is that of `RelativeBias.by_distance`, [H or 1, 1, n_q + n_k - 1]: query i and key j have
            its entry n_q - 1 - i + j. It is read where it lies, as if each row began an entry before the last one.
        kind: stands for the spec, but for how its tensors lie in memory, as a key for what a backend remembers: one
            object for all calls of a kind, the spec itself where it has no tensors; None where plan.py has not set it,
            as in what `dataclasses.replace` makes.
    """

    mask: Mask
    scale: float
    bias: Tensor | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None
    deterministic: bool = True
    places: Tensor | None = None
    bias_by_distance: bool = False
    kind: Spec | None = field(init=False, default=None)

    def features(self) -> frozenset[str]:
        """The names of everything in use, the mask's fields among them: what a backend must list to take this call."""
        in_use = {
            "bias": self.bias is not None and not self.bias_by_distance,
            "relative_bias": self.bias_by_distance,
            "softcap": self.softcap is not None,
            "alibi_slopes": self.alibi_slopes is not None,
            "sinks": self.sinks is not None,
            "dropout": self.dropout_p > 0.0,
        }
        return self.mask.features() | frozenset(name for name, used in in_use.items() if used)

    def tensors(self) -> list[Tensor]:
        """Every tensor of it, the mask's among them."""
        given = (self.bias, self.alibi_slopes, self.sinks, self.seed, self.places)
        return [*self.mask.tensors().values(), *[x for x in given if x is not None]]

    def bias_rows(self, n_k: int, rows: slice = slice(None)) -> Tensor | None:
        """The bias of these query rows, broadcastable to [B, H, rows, n_k]."""
        if self.bias is None or not self.bias_by_distance:
            return None if self.bias is None else _rows_of(self.bias, rows)
        return rows_by_distance(self.bias, n_k, rows)

    def summed_like_bias(self, ds: Tensor, rows: slice = slice(None)) -> Tensor:
        """dS [B, H, rows, n_k] of these query rows, summed over whatever shares an entry of their bias.

        In the shape of `bias_rows`, and in that of the whole bias where that is by distance.
        """
        if not self.bias_by_distance:
            return ds.sum_to_size(_rows_of(self.bias, rows).shape)
        n_q = self.bias.shape[-1] - ds.shape[-1] + 1
        first, stop, _ = rows.indices(n_q)
        sums = pad(sums_by_distance(ds.sum(0, dtype=torch.float64)), (n_q - stop, first))
        sums = sums[..., : self.bias.shape[-1]]  # one more where there are no tokens
        return sums.sum_to_size(self.bias.shape).to(ds.dtype)

    def bias_shared_along(self) -> str:
        """Whether the "keys" of a query share an entry of the bias, or else the "queries" of a key, or "neither" do."""
        rows, columns = (1, 1, *self.bias.shape)[-2:]
        return "neither" if self.bias_by_distance else "keys" if columns == 1 else "queries" if rows == 1 else "neither"

    def dropout_keep(self, B: int, H: int, n_q: int, n_k: int, first: tuple[int, int, int] = (0, 0, 0)) -> Tensor:
        """bool [B, H, n_q, n_k], False where dropout removes a weight. THE definition, the same bits on every device.

        Element (b, h, i, j) takes word j % 4 of Philox4x32-10 with key `seed` and counter (j // 4, i, h, b), and is
        kept when that word is at least floor(dropout_p * 2^32). `first` are the sample, head and query that come first
        here. Where there are `places`, the counter is that of the whole call: `places` has its sample of b = 0, its
        head of h = 0, then its row of each i, and its j // 4 of each four keys, which stand together in both.
        """
        device, fours = self.seed.device, (n_k + 3) // 4
        b, h, i = (torch.arange(start, start + n, device=device) for start, n in zip(first, (B, H, n_q), strict=True))
        j4 = torch.arange(fours, device=device)
        if self.places is not None:
            sample, head, rows, j4 = self.places.long().split([1, 1, len(self.places) - 2 - fours, fours])
            b, h, i = b + sample, h + head, rows[i]
        rows = torch.cartesian_prod(b, h, i)[:, :, None]
        keep = torch.empty(len(rows), fours, 4, dtype=torch.bool, device=device)
        of_block = max(1, (_COUNTERS_IN_CACHE if device.type == "cpu" else _PAIRS_AT_ONCE) // max(1, fours))
        for block, out in zip(rows.split(of_block), keep.split(of_block), strict=True):
            b, h, i = block.unbind(1)
            for word, bits in enumerate(philox(self.seed, (j4, i, h, b))):
                out[..., word] = bits >= math.floor(self.dropout_p * 2**32)
        return keep.view(B, H, n_q, 4 * fours)[..., :n_k]


class DropoutSeed(NamedTuple):
    """What the dropout of a call is drawn by, in place of a generator: parts of a batch then drop what it does whole.

    Args:
        seed: an int from -2^63 to 2^63 - 1, or an int64 scalar on the device of q.
        places: for calls that fastattn shares out among processes, which say more than `first`; leave it None.
        first: which sample and which head of the whole call the first ones of this call are.

    Example:
        >>> import torch, fastattn
        >>> x = torch.randn(6, 2, 16, 8)
        >>> whole = fastattn.attention(x, x, x, dropout_p=0.5, generator=fastattn.DropoutSeed(7))
        >>> seed = fastattn.DropoutSeed(7, first=(4, 0))
        >>> microbatch = fastattn.attention(x[4:], x[4:], x[4:], dropout_p=0.5, generator=seed)
        >>> torch.equal(microbatch, whole[4:])
        True
    """

    seed: int | Tensor
    places: Tensor | None = None
    first: tuple[int, int] = (0, 0)


FEATURES = frozenset(
    {f.name for f in fields(Mask)} | {"bias", "relative_bias", "softcap", "alibi_slopes", "sinks", "dropout"}
)
"""Every feature a call can use; a backend's `features()` is a subset of it."""


def philox(seed: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words (in int64 tensors) for each counter, by Philox4x32-10.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011), and its Random123 known answers.
    """
    low32 = 0xFFFFFFFF
    x0, x1, x2, x3 = (x.clone(memory_format=torch.contiguous_format) for x in torch.broadcast_tensors(*counter))
    product0, product1 = torch.empty_like(x0), torch.empty_like(x0)
    key0, key1 = seed & low32, (seed >> 32) & low32
    for _ in range(10):  # in place: a new tensor for each step would take several times as long
        torch.mul(x0, 0xD2511F53, out=product0)  # int64 wraps, which keeps all 64 bits of the product
        torch.mul(x2, 0xCD9E8D57, out=product1)
        # The high words with the others: what stands above 32 bits goes away at the end of each.
        torch.bitwise_right_shift(product1, 32, out=x0).bitwise_xor_(x1).bitwise_xor_(key0).bitwise_and_(low32)
        torch.bitwise_right_shift(product0, 32, out=x2).bitwise_xor_(x3).bitwise_xor_(key1).bitwise_and_(low32)
        x1, x3, product0, product1 = product1, product0, x1, x3
        key0, key1 = (key0 + 0x9E3779B9) & low32, (key1 + 0xBB67AE85) & low32
    return x0, x1.bitwise_and_(low32), x2, x3.bitwise_and_(low32)


def _register_as_pytree(cls: type) -> None:
    """Lets vmap, compile and export look through a frozen dataclass at the tensors inside it."""
    names = tuple(f.name for f in fields(cls))
    pytree.register_pytree_node(
        cls,
        lambda value: ([getattr(value, name) for name in names], None),
        lambda children, _: _of_fields(cls, names, children),
        serialized_type_name=f"fastattn.{cls.__name__}",
        flatten_with_keys_fn=lambda value: ([(pytree.GetAttrKey(name), getattr(value, name)) for name in names], None),
    )


def _of_fields(cls: type, names: tuple[str, ...], values: Iterable) -> object:
    """An instance with these values, whatever they are: transforms put dimensions and markers where tensors stand."""
    value = object.__new__(cls)
    for name, x in zip(names, values, strict=True):
        object.__setattr__(value, name, x)
    return value


_register_as_pytree(Mask)


def explaining(cls: type, instead: Mapping[str, str] = {}) -> Callable:
    """The constructor of a class, which refuses unknown names by `refuse_unknown`; its signature stays."""
    init = cls.__init__

    @functools.wraps(init)
    def __init__(self: object, *args: object, **kwargs: object) -> None:  # noqa: N807
        try:
            init(self, *args, **kwargs)
        except TypeError:
            refuse_unknown(cls, kwargs.keys() - inspect.signature(cls).parameters.keys(), instead)
            raise

    return __init__


def _refuse_change(self: object, name: str, value: object) -> None:
    """The `__setattr__` of frozen classes with slots: that of dataclasses fails for names that are no fields."""
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


Mask.__setattr__ = RelativeBias.__setattr__ = _refuse_change
_FIELDS = frozenset(f.name for f in fields(Mask))
Mask.__init__ = explaining(Mask)


def rows_by_distance(x: Tensor, n_k: int, rows: slice = slice(None)) -> Tensor:
    """[H or 1, rows, n_k], what `x` [H or 1, 1, n_q + n_k - 1] has for these query rows and each key."""
    n_q = x.shape[-1] - n_k + 1
    first, stop, _ = rows.indices(n_q)
    if first >= stop or n_k == 0:
        return x.new_zeros(len(x), max(stop - first, 0), n_k)
    return x[:, 0, n_q - stop : n_q - first + n_k - 1].unfold(-1, n_k, 1).flip(-2)


def sums_by_distance(x: Tensor) -> Tensor:
    """`x` [..., rows, columns] summed along its diagonals, [..., 1, rows + columns - 1]: the lower left one first."""
    rows, columns = x.shape[-2:]
    width = max(rows + columns - 1, 0)
    # Each row of the last one first, and an element further to the right than the row above it.
    skewed = pad(x.flip(-2), (0, rows)).flatten(-2)[..., : rows * width].unflatten(-1, (rows, width))
    return skewed.sum(-2, keepdim=True)


def summed_like(x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of `x`, in its memory order, from the gradient of what it was broadcast to."""
    if (gradient.shape, gradient.stride(), gradient.dtype) == (x.shape, x.stride(), x.dtype):
        return gradient
    shape = (1,) * (gradient.dim() - x.dim()) + tuple(x.shape)
    return torch.empty_like(x).copy_(gradient.sum_to_size(shape).view(x.shape))


def empty_output(q: Tensor, d_v: int) -> Tensor:
    """An uninitialised output [B, H, n_q, d_v] in the memory order of q: merging the heads again needs no copy."""
    B, H, n_q, _ = q.shape
    if _heads_inside_tokens(q):
        return q.new_empty(B, n_q, H, d_v).transpose(1, 2)
    return q.new_empty(B, H, n_q, d_v)


def as_output(o: Tensor, q: Tensor) -> Tensor:
    """`o` in the memory order of `empty_output`."""
    return o.transpose(1, 2).contiguous().transpose(1, 2) if _heads_inside_tokens(q) else o.contiguous()


def empty_gradient(x: Tensor, in_fp32: bool) -> Tensor:
    """An uninitialised gradient of `x`: in its memory order if the elements of a row lie side by side then."""
    result = torch.empty_like(x, dtype=torch.float32 if in_fp32 else x.dtype)
    return result if result.stride(-1) == 1 else torch.empty_like(result, memory_format=torch.contiguous_format)


def as_gradient(x: Tensor, result: Tensor) -> Tensor:
    """`result` of `empty_gradient` in the dtype and the memory order of empty_like."""
    like_x = torch.empty_like(x, device="meta")
    return result.to(x.dtype) if result.stride() == like_x.stride() else torch.empty_like(x).copy_(result)


def _heads_inside_tokens(q: Tensor) -> bool:
    """Whether [B, H, n, D] lies in memory as [B, n, H, D], as after a projection."""
    return q.stride(1) < q.stride(2)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax statistics, accumulators and lse: at least fp32."""
    return torch.promote_types(dtype, torch.float32)
