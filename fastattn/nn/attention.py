"""`MultiHeadAttention`: torch.nn.MultiheadAttention's parameters, arguments and answers, on fused attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import blocks
from ..api import attention, attention_with_weights
from ..spec import Mask, RelativeBias, explaining, is_jagged, refuse_unknown
from .cache import AttentionCache
from .checks import check_dense, check_heads, check_ints, check_probability
from .masks import canonical_mask, check_hint
from .pages import PagedLayer
from .positions import Rotation

if TYPE_CHECKING:
    from .checks import called_as

_IN_CONSTRUCTOR = {
    **dict.fromkeys(("d_model", "hidden_size", "dim"), "embed_dim=..."),
    **dict.fromkeys(("nhead", "n_heads", "num_attention_heads"), "num_heads=..."),
    "num_key_value_heads": "num_kv_heads=...",
    "dropout_p": "dropout=...",
    **dict.fromkeys(("causal", "is_causal"), "attn_mask=fastattn.Mask(causal=True) in each call"),
}
_IN_CALLS = {
    "causal": "attn_mask=fastattn.Mask(causal=True)",
    "mask": "attn_mask=..., bool, True hides a key, or a fastattn.Mask",
    "attention_mask": "key_padding_mask=attention_mask == 0, where 1 is a real token",
    "src_key_padding_mask": "key_padding_mask=...",
    **dict.fromkeys(("bias", "attn_bias"), "attn_mask=..., float, which is added to the scores"),
    **dict.fromkeys(("output_attentions", "return_attention_scores"), "need_weights=..."),
}


def _are_one_tensor(x: Tensor, y: Tensor) -> bool:
    """Whether x is y, or both are its view: hooks of gradients and fully_shard give each argument a view of its own."""
    if x is y or torch.compiler.is_compiling() or x._base is None or x._base is not y._base:
        return x is y
    return (x.shape, x.stride(), x.storage_offset()) == (y.shape, y.stride(), y.storage_offset())


class MultiHeadAttention(nn.MultiheadAttention):
    """A drop-in for torch.nn.MultiheadAttention: its parameters, initialisation, state_dict, arguments and answers.

    concat_h(softmax(q_h k_h^T / sqrt(D) + masks) v_h) W_out + b_out, with q, k, v = x W_in + b_in split into heads. It
    differs from torch's class where that is slow, or gives different answers in different modes:

    * Padding and causal masks, bool or float, are recognised as such, so that the fused kernels skip padding.
    * A query that may see nothing gets 0 (so `out_proj.bias` after the projection) and weights of 0. In torch it gets
      that or NaN, depending on `need_weights` and on `eval()`. Gradients are finite.
    * `need_weights` changes what is returned, not how the output is computed: the weights come beside it, under the
      same dropout.
    * It has no separate fast path in eval mode, and torch.nn.TransformerEncoderLayer calls it in eval mode too.
    * A float32 mask can be combined with inputs of every dtype, also with `need_weights`.

    torch.jit.script and static quantisation do not support it; `quantize_dynamic` leaves its weights as they are.

    Args:
        embed_dim: width E of query and of the output.
        num_heads: number of heads H, which divides E.
        dropout: probability to drop a weight while training.
        bias: whether the four projections have one.
        add_bias_kv: append a learned key and value, which every query sees.
        add_zero_attn: append a key and value of zeros, which every query sees.
        kdim: width of key, if not E.
        vdim: width of value, if not E.
        batch_first: inputs and output are [N, L, E], not [L, N, E].
        device: device of the parameters.
        dtype: dtype of the parameters.
        num_kv_heads: number of heads H_kv of keys and values, which divides H; None is H. Each serves H / H_kv heads
            of queries; `in_proj_weight` is [(H + 2 H_kv) D, E] then. torch.nn has no such argument.

    Raises:
        TypeError: a size, a number of heads or `dropout` is of another type.
        ValueError: a size is not positive, or `dropout` not between 0 and 1; `num_kv_heads` does not divide
            `num_heads`, or comes with another option that leaves no room for it.
        AssertionError: `num_heads` does not divide `embed_dim`.

    Sources:
        Vaswani et al., Attention Is All You Need (2017), section 3.2.2; torch.nn.MultiheadAttention. Ainslie et al.,
        GQA (2023).

    Example:
        >>> import torch, fastattn
        >>> layer = fastattn.MultiHeadAttention(embed_dim=8, num_heads=2, batch_first=True)
        >>> x = torch.ones(1, 3, 8)
        >>> padding = torch.tensor([[False, False, True]])
        >>> output, weights = layer(x, x, x, key_padding_mask=padding)
        >>> output.shape, weights[0, 0]
        (torch.Size([1, 3, 8]), tensor([0.5000, 0.5000, 0.0000], grad_fn=<SelectBackward0>))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
    ) -> None:
        check_heads(embed_dim=embed_dim, num_heads=num_heads)
        check_probability(dropout=dropout)
        optional = {"kdim": kdim, "vdim": vdim, "num_kv_heads": num_kv_heads}
        check_ints(1, **{name: x for name, x in optional.items() if x is not None})
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_kv_heads != num_heads:
            self._share_heads(device, dtype)
        self.out_proj.register_forward_pre_hook(call_me)

    @classmethod
    def adopt(cls, module: nn.MultiheadAttention) -> None:
        """Turns a torch.nn.MultiheadAttention into this class, in place: the same object with the same parameters."""
        module.__class__ = cls
        module.num_kv_heads = module.num_heads
        module.out_proj.register_forward_pre_hook(call_me)

    def give_back(self) -> None:
        """Undoes `adopt`, but for the class."""
        hooks = self.out_proj._forward_pre_hooks
        for number in [number for number, hook in hooks.items() if hook is call_me]:
            del hooks[number]

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuses torch.jit.script, which calls this method of each module before it compiles it."""
        raise NotImplementedError(
            "torch.jit.script cannot compile a MultiHeadAttention of fastattn: call fastattn.unswap(model) first, "
            "or use torch.compile or torch.export"
        )

    def _share_heads(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        """Replaces the input projection by one with fewer heads of keys and values."""
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads = {self.num_heads}, got {self.num_kv_heads}")
        if not self._qkv_same_embed_dim or self.bias_k is not None:
            raise ValueError(
                f"num_kv_heads must be {self.num_heads} with kdim, vdim or add_bias_kv, got {self.num_kv_heads}"
            )
        rows = self.embed_dim + 2 * self.num_kv_heads * self.head_dim
        self.in_proj_weight = nn.Parameter(torch.empty(rows, self.embed_dim, device=device, dtype=dtype))
        if self.in_proj_bias is not None:
            self.in_proj_bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype))
        self._reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | Mask | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        rotation: Rotation | None = None,
        position_bias: RelativeBias | None = None,
        cache: AttentionCache | PagedLayer | None = None,
        **unknown: NoReturn,  # type checkers allow none
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights after dropout or None), laid out as torch.nn.MultiheadAttention does.

        `is_causal` is torch's hint that `attn_mask` is the causal mask. It is trusted where torch trusts it, which is
        with `need_weights=False` and no `key_padding_mask`; everywhere else the values of `attn_mask` decide. So a hint
        that contradicts its mask gives, here as in torch, an answer that depends on `need_weights`. The hint only saves
        time, and only under torch.compile: elsewhere a causal `attn_mask` is recognised without it.

        Args:
            query: [L, N, E], [N, L, E] with `batch_first`, or [L, E] without a batch; or nested, [N, j, E] of layout
                torch.jagged, with `batch_first` and without weights.
            key: [S, N, kdim], [N, S, kdim] or [S, kdim].
            value: [S, N, vdim], [N, S, vdim] or [S, vdim].
            key_padding_mask: [N, S] or [S]; bool (True hides the key) or float (added to the scores).
            need_weights: also return the weights.
            attn_mask: [L, S] or [N * H, L, S]; bool (True hides the key) or float (added to the scores). Or a
                `fastattn.Mask`, where True means seen, over the S keys.
            average_attn_weights: average the weights over the heads; otherwise they are [N, H, L, S].
            is_causal: hint that `attn_mask` hides the keys after each query's own position, and nothing else.
            rotation: turns queries and keys by their positions (`RotaryPositions`).
            position_bias: added to the scores by the distance from query to key, beside masks that add nothing.
            cache: the keys and values of earlier calls, to which this call adds its own. `attn_mask` is then a `Mask`
                over all keys. With those of a `PagedCache` it is a causal one, there are neither weights nor gradients.

        Raises:
            AssertionError, RuntimeError: whichever of them torch raises for the same call.
            TypeError, ValueError: an argument that torch does not have is malformed.
        """
        if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
            for name, x in (("query", query), ("key", key), ("value", value)):
                check_dense(name, x)
        if unknown:
            refuse_unknown(MultiHeadAttention.forward, unknown, _IN_CALLS)
        if position_bias is not None:
            self._check_position_bias(query, position_bias, cache)
        alike = query is key and key is value
        if query.is_nested or (not alike and (key.is_nested or value.is_nested)):
            ignored = {"rotation": rotation, "cache": cache}
            ignored |= {"key_padding_mask": key_padding_mask} if is_jagged(query) else {}
            for name, x in ignored.items():
                if x is not None:
                    raise AssertionError(f"{name} must be None where query is nested, got {type(x).__name__}")
            if is_jagged(query):
                self._check_jagged(query, key, value, attn_mask, need_weights)
                check_hint(attn_mask, is_causal)
                return self._forward_jagged(query, key, value, attn_mask), None
            self._check_nested(query, key, value, key_padding_mask, attn_mask)
            return self._forward_nested(query, need_weights, average_attn_weights)

        batched = query.dim() == 3
        self._check_inputs(query, key, value)
        if rotation is not None and not isinstance(rotation, Rotation):
            raise TypeError(f"rotation must be a Rotation or None, got {type(rotation).__name__}")
        if isinstance(cache, PagedLayer):
            self._check_cached(key_padding_mask, attn_mask, cache)
            self._check_paged(need_weights)
            attend = cache.attend
            if torch.compiler.is_compiling():
                attend = torch.compiler.disable(attend)  # a graph ends before it: it depends on the values of lengths
            o = attend(*self.project(query, key, value, rotation), attn_mask)
            return self._project_output(self._merge_heads(o, batched)), None
        if cache is None:
            q, k, v = self.project(query, key, value, rotation)
            appended, mask, bias = self._appended_keys(), None, None
            if key_padding_mask is not None or attn_mask is not None or is_causal:
                mask, bias = canonical_mask(
                    key_padding_mask, attn_mask, (*q.shape[:3], k.shape[2]), q, batched=batched, is_causal=is_causal,
                    need_weights=need_weights, appended=appended,
                )  # fmt: skip
            if appended:
                k, v = self._append_keys(k, self.bias_k), self._append_keys(v, self.bias_v)
        else:
            self._check_cached(key_padding_mask, attn_mask, cache)
            if (complete := cache.complete()) is None:
                q, k, v = self.project(query, key, value, rotation)
                k, v = cache.update(k, v)
            else:
                q, (k, v) = self._project_query(query), complete
                q = q if rotation is None else rotation.__call__(q)
            mask, bias = attn_mask, None
        if position_bias is not None:
            if bias is not None:
                raise ValueError("position_bias must be None beside a mask that is added to the scores, got both")
            bias = position_bias
        plan = None
        if (block := blocks.current()) is not None:
            objection = None if cache is None else "cache must be None in a context_parallel block, got one"
            plan = block.within(cross=not _are_one_tensor(query, key), objection=objection)
        o, weights = self._attend(q, k, v, mask, bias, need_weights, average_attn_weights, plan)
        if weights is not None and not batched:
            weights = weights[0]
        return self._project_output(self._merge_heads(o, batched)), weights

    if TYPE_CHECKING:

        @overload
        def __call__(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            key_padding_mask: Tensor | None = ...,
            need_weights: Literal[True] = ...,
            attn_mask: Tensor | Mask | None = ...,
            average_attn_weights: bool = ...,
            is_causal: bool = ...,
            *,
            rotation: Rotation | None = ...,
            position_bias: RelativeBias | None = ...,
            cache: AttentionCache | PagedLayer | None = ...,
        ) -> tuple[Tensor, Tensor]: ...
        @overload
        @called_as(forward)
        def __call__(self) -> None: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def project(
        self, query: Tensor, key: Tensor, value: Tensor, rotation: Rotation | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [N, H, L, D], k and v [N, H_kv, S, D] as they enter the attention, without a copy; inputs as in `forward`.

        The keys of `add_bias_kv` and `add_zero_attn` are not among them.
        """
        q, k, v = self._project(query, key, value)
        if rotation is not None:
            q, k = rotation.__call__(q), rotation.__call__(k)  # PyTorch 2.10 cannot compile a call of a tuple itself
        return q, k, v

    def _project_query(self, query: Tensor) -> Tensor:
        """q [N, H, L, D] alone, for keys and values that were projected before."""
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight[: self.embed_dim]
        bias = None if self.in_proj_bias is None else self.in_proj_bias[: self.embed_dim]
        return self._split_heads(F.linear(query, weight, bias))

    def _forward_nested(
        self, x: Tensor, need_weights: bool, average_attn_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention of a nested tensor: the output is nested, the weights [N, L, L] are padded with zeros."""
        lengths = [len(sample) for sample in x.unbind()]
        padded = torch.nested.to_padded_tensor(x, 0.0) if any(lengths) else torch.stack(x.unbind())
        real = torch.arange(padded.shape[1], device=x.device) < torch.tensor(lengths, device=x.device)[:, None]
        q, k, v = self._project(padded, padded, padded)
        mask = Mask(real_keys=real, real_queries=real)
        o, weights = self._attend(q, k, v, mask, None, need_weights, average_attn_weights)
        output = self._project_output(self._merge_heads(o, batched=True))
        return torch.nested.as_nested_tensor([row[:n] for row, n in zip(output, lengths, strict=True)]), weights

    def _forward_jagged(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
        """Attention of nested tensors [N, j, E] without padding: only their tokens are projected."""
        tokens = {id(x): x.values()[None] for x in (query, key, value)}  # which are one where these are
        projected = self._project(*(tokens[id(x)] for x in (query, key, value)))
        nested = torch.nested.nested_tensor_from_jagged
        q, k, v = (
            nested(x[0].transpose(0, 1), of.offsets()).transpose(1, 2)
            for x, of in zip(projected, (query, key, value), strict=True)
        )
        o = attention(q, k, v, mask, dropout_p=self.dropout if self.training else 0.0)
        return nested(self._project_output(o.transpose(1, 2).values().flatten(1)), query.offsets())

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """q, k and v, each [N, heads, length, D] without a copy; inputs that are the same tensor share one product."""
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        packed_weight, packed_bias = self.in_proj_weight, self.in_proj_bias
        if packed_weight is not None and query is key and key is value:
            return self._split_heads(F.linear(query, packed_weight, packed_bias)).split_with_sizes(heads, 1)
        groups = ((query, heads[:1]), (key, heads[1:2]), (value, heads[2:]))
        if packed_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        else:
            if key is value:
                groups = ((query, heads[:1]), (key, heads[1:]))
            weights = self._rows_of_groups(packed_weight, groups)
        biases = (None,) * len(groups) if packed_bias is None else self._rows_of_groups(packed_bias, groups)
        result = []
        for (x, parts), weight, bias in zip(groups, weights, biases, strict=True):
            x = self._split_heads(F.linear(x, weight, bias))
            result += [x] if len(parts) == 1 else x.split_with_sizes(parts, 1)
        return result

    def _rows_of_groups(self, x: Tensor, groups: tuple) -> tuple[Tensor, ...]:
        """The rows of `in_proj_weight` or `in_proj_bias` that project each group of `_project`."""
        return x.split_with_sizes([sum(parts) * self.head_dim for _, parts in groups])

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        bias: Tensor | RelativeBias | None,
        need_weights: bool,
        average_heads: bool,
        plan: blocks.Within | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """o [N, H, L, D] and the weights, or None."""
        dropout_p = self.dropout if self.training else 0.0
        if need_weights:
            average = bool(average_heads)  # as torch takes it
            return attention_with_weights(q, k, v, mask, bias=bias, dropout_p=dropout_p, average_heads=average)
        return attention(q, k, v, mask, bias=bias, dropout_p=dropout_p, plan=plan), None

    def _split_heads(self, x: Tensor) -> Tensor:
        """[N, heads, L, D] of a projection, without a copy."""
        if x.dim() == 2:
            return self._split_heads(x[None] if self.batch_first else x[:, None])
        first, second, width = x.shape
        x = x.view(first, second, width // self.head_dim, self.head_dim)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _merge_heads(self, o: Tensor, batched: bool) -> Tensor:
        """The inverse of `_split_heads`: [L, E], or with a batch [N, L, E] or [L, N, E]."""
        if not batched:
            return o[0].transpose(0, 1).flatten(-2)
        return (o.transpose(1, 2) if self.batch_first else o.permute(2, 0, 1, 3)).flatten(-2)

    def _project_output(self, o: Tensor) -> Tensor:
        """The output projection, whose hooks do not run, as in torch.nn.MultiheadAttention."""
        return self.out_proj.forward(o)

    def _appended_keys(self) -> int:
        return (self.bias_k is not None) + self.add_zero_attn

    def _append_keys(self, x: Tensor, learned: Tensor | None) -> Tensor:
        """k or v [N, H, S, D] with the row of `add_bias_kv` [1, 1, E] and the one of `add_zero_attn` at its end."""
        shape = (x.shape[0], self.num_kv_heads, 1, self.head_dim)
        if learned is not None:
            x = torch.cat([x, learned.view(1, self.num_heads, 1, self.head_dim).expand(shape)], dim=2)
        if self.add_zero_attn:
            x = torch.cat([x, x.new_zeros(shape)], dim=2)
        return x

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Refuses what torch refuses, with its class; torch's own F.linear refuses the wrong dtype or device."""
        if query.dim() not in (2, 3):
            raise AssertionError(f"query must have 3 dimensions, or 2 without a batch, got {list(query.shape)}")
        if query is key and key is value and query.shape[-1] == self.embed_dim == self.kdim == self.vdim:
            return
        for name, x in (("key", key), ("value", value)):
            if x.dim() != query.dim():
                raise AssertionError(f"{name} must have {query.dim()} dimensions like query, got {list(x.shape)}")
            if x.device != query.device:
                raise RuntimeError(f"{name} must be on {query.device} like query, got {x.device}")
        if query.shape[-1] != self.embed_dim:
            raise AssertionError(f"query must be [..., {self.embed_dim}], got {list(query.shape)}")
        packed = self.in_proj_weight is not None  # all three inputs are E wide then
        if key.shape[:-1] != value.shape[:-1] or (packed and key.shape != value.shape):
            raise AssertionError(f"value must be {[*key.shape[:-1], self.vdim]} like key, got {list(value.shape)}")
        for name, x, width in (("key", key, self.kdim), ("value", value, self.vdim)):
            if x.shape[-1] != width:
                error = RuntimeError if packed else AssertionError
                raise error(f"{name} must be [..., {width}], got {list(x.shape)}")
        batch = 0 if self.batch_first else 1
        if query.dim() == 3 and key.shape[batch] != query.shape[batch]:
            raise RuntimeError(f"key must have a batch of {query.shape[batch]} like query, got {key.shape[batch]}")

    def _check_position_bias(self, query: Tensor, position_bias: object, cache: object) -> None:
        if not isinstance(position_bias, RelativeBias):
            got = f"{type(position_bias).__name__}; a Tensor is attn_mask=..."
            raise TypeError(f"position_bias must be a RelativeBias or None, got {got}")
        if query.is_nested or isinstance(cache, PagedLayer) or self._appended_keys():
            raise ValueError(
                "position_bias must be None with nested tensors, pages or appended keys, got a RelativeBias"
            )

    def _check_cached(self, key_padding_mask: Tensor | None, attn_mask: Tensor | Mask | None, cache: object) -> None:
        if not hasattr(cache, "complete") and not isinstance(cache, PagedLayer):
            raise TypeError(f"cache must be an AttentionCache, a PagedLayer or None, got {type(cache).__name__}")
        if key_padding_mask is not None or not isinstance(attn_mask, Mask):
            got = type(attn_mask).__name__ if key_padding_mask is None else "a key_padding_mask"
            raise ValueError(f"attn_mask must be a fastattn.Mask over all keys with a cache, got {got}")
        if self._appended_keys():
            raise ValueError("cache must be None with add_bias_kv or add_zero_attn, got one")

    def _check_paged(self, need_weights: bool) -> None:
        """Refuses what attention to pages does not have."""
        if need_weights:
            raise ValueError("need_weights must be False with pages, got True")
        if self.training and self.dropout:
            raise ValueError(f"dropout must be 0 with pages in training mode, got {self.dropout}")

    def _check_jagged(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | Mask | None, need_weights: bool
    ) -> None:
        """Refuses what jagged nested tensors cannot have."""
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not is_jagged(x):
                raise AssertionError(f"{name} must be nested, of layout torch.jagged, where query is, got {x.layout}")
            if x.lengths() is not None:
                raise AssertionError(f"{name} must be nested without holes between its samples, got one with lengths")
        if not self.batch_first or self._appended_keys():
            raise AssertionError("query must not be nested without batch_first or with appended keys, got a nested one")
        if need_weights:
            raise AssertionError("need_weights must be False where query is nested and jagged, got True")
        if attn_mask is not None and not isinstance(attn_mask, Mask):
            raise AssertionError(
                f"attn_mask must be a fastattn.Mask where query is nested, got {type(attn_mask).__name__}"
            )

    def _check_nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | Mask | None,
    ) -> None:
        """Refuses every nested tensor but those that torch.nn.TransformerEncoder makes of a padded batch."""
        if query is not key or key is not value:
            raise AssertionError("query, key and value must be one tensor when nested, got several")
        if query.layout != torch.strided:
            raise AssertionError(f"query must be of layout torch.strided when nested, got {query.layout}")
        if not self.batch_first or self.bias_k is not None or self.add_zero_attn:
            raise AssertionError("query must not be nested without batch_first or with appended keys, got a nested one")
        if key_padding_mask is not None or attn_mask is not None:
            raise AssertionError("key_padding_mask and attn_mask must be None when query is nested, got a mask")


MultiHeadAttention.__init__ = explaining(MultiHeadAttention, _IN_CONSTRUCTOR)


def call_me(module: nn.Module, arguments: tuple) -> None:
    """A hook that never runs, but whose presence makes torch.nn.TransformerEncoderLayer call its `self_attn`.

    In eval mode a layer in which no module has a hook computes attention from the parameters of `self_attn` itself.
    """
