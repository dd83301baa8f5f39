"""Pages: the keys and values of requests that come and go, in memory that all of them share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..paged import QUANTIZED, attention_paged
from ..spec import Mask, is_exporting
from .cache import KVCache, check_causal, check_export
from .checks import check_ints


class PagedCache:
    """Keys and values of every layer in pages, each of which belongs to one sequence at a time.

    `open` reserves all pages that a sequence may need, so that one which has begun can always end. `step` says how many
    tokens of which sequences come next, and what it returns is the `cache` of a model or a stack of layers. The first
    pass allocates the pages, in the dtype and on the device of its keys.

    Args:
        pages: number of pages of each layer.
        page_size: tokens of a page. Small pages leave fewer places empty, and CPUs read them slower.
        dtype: torch.int8 and torch.float8_e4m3fn keep keys and values in a quarter of the memory of fp32, each row with
            a scale of its own, and rounded; see `attention_paged`. None keeps them as they are.

    Raises:
        TypeError, ValueError: an argument of the constructor or of a method is not what is said there.

    Attributes:
        free: number of pages that belong to no sequence.

    Example:
        >>> import torch, fastattn
        >>> config = fastattn.nn.TransformerConfig(vocab_size=100, d_model=16, nhead=2, num_layers=2)
        >>> model = fastattn.nn.LanguageModel(config).eval()
        >>> cache = fastattn.nn.PagedCache(pages=8, page_size=4)
        >>> first, second = cache.open(10), cache.open(5)
        >>> with torch.no_grad():  # three tokens of one, two of the other
        ...     model(torch.tensor([[1, 5, 7, 2, 3]]), cache=cache.step({first: 3, second: 2})).shape
        torch.Size([1, 5, 100])
        >>> first.close()
        >>> first.length, second.length, cache.free
        (0, 2, 6)
    """

    def __init__(self, pages: int, page_size: int = 64, dtype: torch.dtype | None = None) -> None:
        check_ints(1, pages=pages, page_size=page_size)
        if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype in QUANTIZED)):
            raise ValueError(f"dtype must be torch.int8, torch.float8_e4m3fn or None, got {dtype!r}")
        self.pages, self.page_size, self.dtype = pages, page_size, dtype
        self._free = list(range(pages))
        self._layers: dict[int, dict[str, Tensor]] = {}
        self._is_of_export = is_exporting()

    @property
    def free(self) -> int:
        """Number of pages that belong to no sequence."""
        return len(self._free)

    def pages_of(self, length: int) -> int:
        """Number of pages that hold this number of tokens."""
        check_ints(0, length=length)
        return -(-length // self.page_size)

    def open(self, max_length: int) -> PagedSequence:
        """A sequence without tokens yet, and with pages for `max_length` of them.

        Raises:
            TypeError, ValueError: `max_length` is no int of at least 1, or there are too few free pages for it.
        """
        check_ints(1, max_length=max_length)
        if (count := self.pages_of(max_length)) > self.free:
            most = self.free * self.page_size
            raise ValueError(f"max_length must be at most {most}, for which there are free pages, got {max_length}")
        pages = self._free[-count:]
        del self._free[-count:]
        return PagedSequence(self, max_length, pages)

    def step(self, counts: Mapping[PagedSequence, int]) -> PagedStep:
        """The `cache` of a pass that adds tokens: these numbers of them, of these sequences, one after the other.

        The sequences are that much longer at once. `PagedStep.undo` is for a pass that was not.

        Raises:
            TypeError, ValueError: a number is no int of at least 1, or a sequence has no room for it or is not open in
                this cache.
            NotImplementedError: torch.export traces this call, and not the constructor.
        """
        check_export(self)
        if not isinstance(counts, Mapping):
            raise TypeError(f"counts must be a mapping from sequences to numbers, got {type(counts).__name__}")
        for sequence, n in counts.items():
            if not isinstance(sequence, PagedSequence):
                raise TypeError(f"counts must have a PagedSequence for each number, got {type(sequence).__name__}")
            check_ints(1, **{"each number in counts": n})
            if sequence.cache is not self or not sequence.pages:
                raise ValueError("counts must have sequences that are open in this cache, got another one")
            if sequence.length + n > sequence.max_length:
                raise ValueError(
                    f"max_length of a sequence must be at least {sequence.length + n}, got {sequence.max_length}"
                )
        return PagedStep(self, counts)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pages: dict[str, Tensor],
        step: PagedStep,
        window: tuple[int | None, int | None],
    ) -> Tensor:
        """o [n, H, D] of the tokens of a step in one layer, whose k and v [n, H_kv, D] are written to the pages first.

        A subclass may attend in another way, over `pages` that nothing else reads: the arguments k_pages and v_pages of
        `attention_paged`, and with a dtype of the cache k_scales and v_scales.
        """
        ends = None if len(q) == len(step.lengths) else step.cu_seqlens  # one token of each is the cheaper call
        options = {**pages, "k": k, "v": v, "window": window}
        return attention_paged(q, block_table=step.table, lengths=step.lengths, cu_seqlens_q=ends, **options)

    def _pages_in_layer(self, i: int, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """The pages of layer i, in which the rows of a head lie side by side, for keys and values like k and v."""
        if i not in self._layers:
            pages = {}
            with torch.inference_mode(False):  # or nothing could be written to them outside of it
                for name, x in (("k", k), ("v", v)):
                    rows = self.pages, x.shape[1], self.page_size
                    pages[f"{name}_pages"] = x.new_zeros(*rows, x.shape[2], dtype=self.dtype).transpose(1, 2)
                    if self.dtype is not None:
                        pages[f"{name}_scales"] = x.new_zeros(rows, dtype=torch.float32).transpose(1, 2)
            self._layers[i] = pages
        return self._layers[i]


class PagedSequence:
    """The tokens of one request in a `PagedCache`, which `PagedCache.open` makes.

    Attributes:
        cache: the cache.
        max_length: the largest number of tokens.
        length: the number of tokens.
        pages: the pages that are its own; none once it is closed.
    """

    def __init__(self, cache: PagedCache, max_length: int, pages: list[int]) -> None:
        self.cache, self.max_length, self.length, self.pages = cache, max_length, 0, pages

    def close(self) -> None:
        """Forgets the tokens, and gives the pages back. A closed sequence stays closed."""
        self.cache._free += self.pages
        self.pages, self.length = [], 0


class PagedStep:
    """New tokens of sequences in a `PagedCache`, and so the cache of one pass over them, which lie in one row.

    Attributes:
        sequences: those that have new tokens.
        positions: int64 [1, n], the positions of the tokens in their sequences.
        table: int32 [B, most pages of a sequence], the pages of each sequence, and then anything.
        lengths: int64 [B], the tokens of each sequence, the new ones included.
        cu_seqlens: int64 [B + 1], on the CPU: 0, and then where the new tokens of each sequence end.
    """

    def __init__(self, cache: PagedCache, counts: Mapping[PagedSequence, int]) -> None:
        self.cache, self.sequences, self._added = cache, tuple(counts), dict(counts)
        before = torch.tensor([sequence.length for sequence in counts], dtype=torch.int64, device="cpu")
        n = torch.tensor([*counts.values()], dtype=torch.int64, device="cpu")
        self.cu_seqlens = torch.nn.functional.pad(n.cumsum(0), (1, 0))
        self.lengths = before + n
        token = torch.arange(int(n.sum()), device="cpu")
        self.positions = (token + (before - self.cu_seqlens[:-1]).repeat_interleave(n))[None]
        most = max((len(sequence.pages) for sequence in counts), default=0)
        rows = [sequence.pages + [0] * (most - len(sequence.pages)) for sequence in counts]
        self.table = torch.tensor(rows, dtype=torch.int32, device="cpu").view(len(counts), most)
        for sequence, more in self._added.items():
            sequence.length += more

    def undo(self) -> None:
        """Takes the tokens back, which no pass has added, or none to its end; those of closed sequences are gone."""
        for sequence, n in self._added.items():
            if sequence.pages:
                sequence.length -= n
        self._added = {}

    def extend(self, n: int, real: Tensor | None = None, device: torch.device | str | None = None) -> Tensor:
        """Begins a pass over the tokens: `positions`, on this device.

        Args:
            n: the number of tokens.
            real: bool [1, n], None or True everywhere: there is no padding in pages.
            device: device of the pass; None leaves it.

        Raises:
            ValueError: there are other numbers of tokens, or there is padding among them.
            NotImplementedError: torch.export traces this call, and did not make the cache.
        """
        check_export(self.cache)
        if n != self.positions.shape[1]:
            raise ValueError(f"with this step there must be 1 row of {self.positions.shape[1]} new tokens, got {n}")
        if real is not None and not real.all():
            raise ValueError("attention_mask must be True for every token in pages, got padding")
        self.positions, self.table, self.lengths = (x.to(device) for x in (self.positions, self.table, self.lengths))
        return self.positions

    def mask(self, mask: Mask) -> Mask:
        """The mask of the new tokens in each layer: `mask`, which there must be causal."""
        return mask

    def layer(self, i: int) -> PagedLayer:
        """The cache of the self-attention of layer i."""
        return PagedLayer(self, i)


class PagedLayer:
    """The pages of one layer in a step, which attend by themselves: that is cheaper than to put keys together first."""

    def __init__(self, step: PagedStep, i: int) -> None:
        self.step, self.i = step, i

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """o [1, H, n, D] for queries of this shape and new keys and values [1, H_kv, n, D or d_v].

        Raises:
            ValueError: these are not the tokens of the step, a sequence of it is closed, the mask is not causal, or
                gradients are wanted.
        """
        check_causal(mask)
        if not all(sequence.pages for sequence in self.step.sequences):  # others may have them now
            raise ValueError("the step must be of open sequences, got one with a closed one")
        n = self.step.positions.shape[1]
        if (q.shape[0], q.shape[2]) != (1, n):
            raise ValueError(f"with this step there must be 1 row of {n} new tokens, got {q.shape[0]} of {q.shape[2]}")
        if q.requires_grad or k.requires_grad or v.requires_grad:
            raise ValueError("gradients must be off with pages, as under torch.no_grad(), got tensors that need them")
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        cache = self.step.cache
        o = cache.attend(q, k, v, cache._pages_in_layer(self.i, k, v), self.step, mask.window)
        return o.transpose(0, 1)[None]


def check_cache(cache: object) -> None:
    """Raises where `cache` is neither a `KVCache` nor a `PagedStep` nor None."""
    if cache is not None and not isinstance(cache, (KVCache, PagedStep)):
        raise TypeError(f"cache must be a KVCache, a PagedStep or None, got {type(cache).__name__}")
