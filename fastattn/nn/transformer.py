"""The Transformer: layers, encoder, decoder and both together, with the arguments and the state_dict of torch.nn's.

Each class extends the one of the same name in torch.nn, by keyword-only arguments and by `fastattn.Mask` wherever torch
takes a mask (True means visible there). Where there is much padding, a stack of layers computes real tokens only: it
packs a batch before the first layer and unpacks it after the last, and `Mask.segment_ids` keeps the samples apart in
attention. A stack returns 0 at padding, in every mode, as torch's stacks do in their fast path; an encoder that may not
pack (`enable_nested_tensor=False`) returns there what torch's does, and so does a stack with a part or an activation
that is not known to compute each token by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module

from .. import blocks
from ..spec import Mask, is_jagged
from .attention import MultiHeadAttention, call_me
from .cache import AttentionCache, KVCache
from .checks import check_bools, check_dense, check_heads, check_ints, check_numbers, check_probability
from .masks import canonical_mask, real_tokens
from .packing import Packing, worth_packing
from .pages import PagedLayer, PagedStep
from .positions import RotaryPositions, Rotation

if TYPE_CHECKING:
    from .checks import called_as


def swiglu(x: Tensor) -> Tensor:
    """The SwiGLU activation, silu(gate) * value.

    Args:
        x: gate and value side by side, [..., 2 F].

    Returns:
        [..., F].

    Sources:
        Shazeer, GLU Variants Improve Transformer (2020).
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x must be [..., 2 F], got {list(x.shape)}")
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "swiglu": swiglu}
Activation = str | Callable[[Tensor], Tensor]
_IN_PLACE = ((F.relu, torch.relu_), (F.gelu, torch.ops.aten.gelu_))


def make_norm(name: str, d_model: int, eps: float, bias: bool, **where: object) -> nn.Module:
    """A norm of the last dimension: "layer" is LayerNorm, "rms" RMSNorm, which has no bias."""
    if not isinstance(name, str) or name not in NORMS:
        raise ValueError(f"norm must be {_listed(NORMS)}, got {name!r}")
    check_numbers("at least 0 and finite", lambda x: 0 <= x < math.inf, layer_norm_eps=eps)
    return NORMS[name](d_model, eps=eps, **({"bias": bias} if name == "layer" else {}), **where)


def _is_alone(linear: nn.Module) -> bool:
    """Whether the caller alone holds what `linear` returns: no gradient, hook or other class keeps it."""
    if type(linear) is not nn.Linear or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not (linear._forward_hooks or module._global_forward_hooks or "forward" in vars(linear))


def _dropped(dropout: nn.Module, x: Tensor) -> Tensor:
    """x after a module of dropout, whose call is left out where it changes nothing and no hook waits for it."""
    if type(dropout) is not nn.Dropout or dropout.training or dropout._forward_hooks or dropout._forward_pre_hooks:
        return dropout(x)
    return dropout(x) if module._global_forward_hooks or module._global_forward_pre_hooks else x


BLOCKS_OF_TORCH = frozenset({"_sa_block", "_mha_block", "_ff_block"})  # of its layers, which subclasses override


class _TransformerLayer(nn.Module):
    """Base class of the layers: their parts, the feed-forward network and the residual.

    The residual is x + block(norm(x)) with `norm_first` (pre-norm), and norm(x + block(x)) without (post-norm).
    """

    _ATTENTIONS: ClassVar[tuple[str, ...]] = ("self_attn",)
    """The names of the attentions: a norm and a dropout belong to each, and one more to the feed-forward network."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if blocks := BLOCKS_OF_TORCH & vars(cls).keys():
            raise TypeError(f"{cls.__name__} must override forward, got {min(blocks)}, which torch.nn's layers call")

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        norm: str = "layer",
    ) -> None:
        nn.Module.__init__(self)  # torch's own would make its parts first
        check_heads(d_model=d_model, nhead=nhead)
        check_ints(0, dim_feedforward=dim_feedforward)
        check_probability(dropout=dropout)
        where = {"device": device, "dtype": dtype}
        for name in self._ATTENTIONS:
            attention = MultiHeadAttention(
                d_model, nhead, dropout, bias, batch_first=batch_first, num_kv_heads=num_kv_heads, **where
            )
            self.add_module(name, attention)
        self._make_feed_forward(d_model, dim_feedforward, dropout, activation, bias, **where)
        self.norm_first = norm_first
        places = range(1, len(self._ATTENTIONS) + 2)
        for place in places:
            self.add_module(f"norm{place}", make_norm(norm, d_model, layer_norm_eps, bias, **where))
        for place in places:
            self.add_module(f"dropout{place}", nn.Dropout(dropout))

    def _make_feed_forward(
        self, d_model: int, width: int, dropout: float, activation: Activation, bias: bool, **where: object
    ) -> None:
        if not callable(activation) and not (isinstance(activation, str) and activation in ACTIVATIONS):
            raise RuntimeError(f"activation must be {_listed(ACTIVATIONS)} or a function, got {activation!r}")
        self.activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation
        gated = self.activation is swiglu
        self.linear1 = nn.Linear(d_model, 2 * width if gated else width, bias, **where)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(width, d_model, bias, **where)

    def _feed_forward(self, x: Tensor) -> Tensor:
        x, activation = self.linear1(x), self.activation
        if _is_alone(self.linear1):
            activation = next((in_place for known, in_place in _IN_PLACE if activation is known), activation)
        return self.linear2(_dropped(self.dropout, activation(x)))

    def _residual(self, x: Tensor, norm: nn.Module, block: Callable[[Tensor], Tensor]) -> Tensor:
        return x + block(norm(x)) if self.norm_first else norm(x + block(x))


class TransformerEncoderLayer(_TransformerLayer, nn.TransformerEncoderLayer):
    """Self-attention and a feed-forward network, each with a residual and a norm; torch.nn's of the same name.

    Args:
        d_model: width E of the tokens.
        nhead: number of heads.
        dim_feedforward: inner width of the feed-forward network.
        dropout: probability to drop an attention weight, and an element of what enters a residual or leaves
            `activation`.
        activation: "relu", "gelu", "swiglu" (whose linear1 is twice as wide), or a function.
        layer_norm_eps: eps of the norms.
        batch_first: tokens are [N, L, E], not [L, N, E].
        norm_first: pre-norm instead of post-norm.
        bias: whether linear layers and LayerNorm have one.
        device, dtype: device and dtype of the parameters.
        num_kv_heads: heads of keys and values, for grouped-query attention; None is `nhead`.
        norm: "layer" or "rms".

    Raises:
        RuntimeError: `activation` is not known.
        TypeError: a size, a number of heads or `dropout` is of another type.
        ValueError: `norm` is not known, or a number is out of range.
        AssertionError: `nhead` does not divide `d_model`.

    Sources:
        Vaswani et al., Attention Is All You Need (2017), 3.1. Xiong et al., On Layer Normalization in the Transformer
        Architecture (2020), for pre-norm. Zhang and Sennrich, Root Mean Square Layer Normalization (2019).

    Example:
        >>> import torch, fastattn
        >>> layer = fastattn.nn.TransformerEncoderLayer(8, nhead=2, batch_first=True, norm_first=True)
        >>> layer(torch.ones(1, 3, 8), fastattn.Mask(causal=True)).shape
        torch.Size([1, 3, 8])
    """

    activation_relu_or_gelu = 0  # torch's encoder asks: this layer has no fast path that goes around it

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | Mask | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        rotation: Rotation | None = None,
        cache: AttentionCache | PagedLayer | None = None,
    ) -> Tensor:
        """The tokens after this layer, laid out as `src`; arguments as `MultiHeadAttention.forward` has them."""

        def attend(x: Tensor) -> Tensor:
            x, _ = self.self_attn(
                x, x, x, key_padding_mask=src_key_padding_mask, need_weights=False, attn_mask=src_mask,
                is_causal=is_causal, rotation=rotation, cache=cache,
            )  # fmt: skip
            return _dropped(self.dropout1, x)

        x = self._residual(src, self.norm1, attend)
        return self._residual(x, self.norm2, lambda x: _dropped(self.dropout2, self._feed_forward(x)))

    if TYPE_CHECKING:
        self_attn: MultiHeadAttention

        @called_as(forward)
        def __call__(self) -> None: ...


class TransformerDecoderLayer(_TransformerLayer, nn.TransformerDecoderLayer):
    """Self-attention, attention to the encoder's output and a feed-forward network; torch.nn's of the same name.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device,
        dtype, num_kv_heads, norm: as in `TransformerEncoderLayer`.

    Example:
        >>> import torch, fastattn
        >>> layer = fastattn.nn.TransformerDecoderLayer(8, nhead=2, batch_first=True)
        >>> layer(torch.ones(1, 3, 8), torch.ones(1, 5, 8), fastattn.Mask(causal=True)).shape
        torch.Size([1, 3, 8])
    """

    _ATTENTIONS = ("self_attn", "multihead_attn")

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | Mask | None = None,
        memory_mask: Tensor | Mask | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        rotation: Rotation | None = None,
        cache: AttentionCache | PagedLayer | None = None,
        memory_cache: AttentionCache | None = None,
    ) -> Tensor:
        """The target's tokens after this layer, laid out as `tgt`; arguments as `MultiHeadAttention.forward` has them.

        `rotation` and `cache` belong to the self-attention; `memory_cache` keeps what is projected of `memory`.
        """

        def attend_to_itself(x: Tensor) -> Tensor:
            x, _ = self.self_attn(
                x, x, x, key_padding_mask=tgt_key_padding_mask, need_weights=False, attn_mask=tgt_mask,
                is_causal=tgt_is_causal, rotation=rotation, cache=cache,
            )  # fmt: skip
            return _dropped(self.dropout1, x)

        def attend_to_memory(x: Tensor) -> Tensor:
            x, _ = self.multihead_attn(
                x, memory, memory, key_padding_mask=memory_key_padding_mask, need_weights=False, attn_mask=memory_mask,
                is_causal=memory_is_causal, cache=memory_cache,
            )  # fmt: skip
            return _dropped(self.dropout2, x)

        x = self._residual(tgt, self.norm1, attend_to_itself)
        x = self._residual(x, self.norm2, attend_to_memory)
        return self._residual(x, self.norm3, lambda x: _dropped(self.dropout3, self._feed_forward(x)))

    if TYPE_CHECKING:
        self_attn: MultiHeadAttention
        multihead_attn: MultiHeadAttention

        @called_as(forward)
        def __call__(self) -> None: ...


class _Stack(nn.Module):
    """Base class of encoder and decoder: when a batch is packed, and the rotation and the norm around the layers."""

    def _may_pack(self, x: Tensor, cache: KVCache | PagedStep | None) -> bool:
        """Whether x may be packed, if its layers take it: a batch without a cache."""
        return x.dim() == 3 and cache is None and blocks.current() is None

    def _is_by_token(self) -> bool:
        """Whether the layers and the norm are made of modules that are known to compute each token by itself."""
        return all(_is_by_element(layer.activation) for layer in self.layers) and all(
            ("forward" not in vars(part) and _inherits_known_forward(type(part)) and is_of_one_token(part))
            or _unwrapped(part) is not part
            for part in self._parts()
        )

    def _is_hooked(self) -> bool:
        """Whether there is a hook on a layer, the norm or a part of them, which might expect padding."""
        return any(
            part._forward_hooks
            or part._backward_hooks
            or part._backward_pre_hooks
            or any(hook is not call_me for hook in part._forward_pre_hooks.values())
            for part in self._parts()
        )

    def _parts(self) -> Iterator[nn.Module]:
        for layer in self.layers:
            yield from layer.modules()
        if self.norm is not None:
            yield from self.norm.modules()

    def _rotation(self, x: Tensor, positions: Tensor | None, packing: Packing | None = None) -> Rotation | None:
        """The rotation of the tokens x [N, L, E] or [L, E], or of those that `packing` keeps."""
        if self.rotary is None:
            return None
        if positions is None:
            positions = blocks.positions(x.shape[-2], x.device)
        check_dense("positions", positions)
        *batch, length = positions.shape if positions.dim() in (1, 2) else (0, 0)
        if length != x.shape[-2] or (batch and batch[0] != 1 and batch != [*x.shape[:-2]]):
            raise ValueError(f"positions must be {list(x.shape[:-1])} or [{x.shape[-2]}], got {list(positions.shape)}")
        return self.rotary(positions if packing is None else packing.pack(positions.expand(x.shape[:2])))

    def _rotated(self, x: Tensor, positions: Tensor | None) -> dict[str, Rotation]:
        """The argument `rotation` of the layers, where there is one: those of subclasses may have torch's alone."""
        rotation = self._rotation(x, positions)
        return {} if rotation is None else {"rotation": rotation}

    def _normed(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)


class TransformerEncoder(_Stack, nn.TransformerEncoder):
    """A stack of encoder layers that computes no padding; torch.nn's of the same name.

    Args:
        encoder_layer: the layer that is copied; as in torch.nn, all copies begin with its parameters.
        num_layers: number of layers.
        norm: applied after the last layer, or None.
        enable_nested_tensor: pack padded batches, where torch.nn makes nested tensors of them. A batch is packed if it
            has enough padding, the layers are those of this module, no part has hooks, the activation is known
            to be one of each element, the mask is padding or causal only, and there is neither a cache nor
            torch.compile. With False, padding is computed as torch does, not 0.
        mask_check: without effect.
        rotary: rotary positions for the attention of every layer; or None.

    Example:
        >>> import torch, fastattn
        >>> layer = fastattn.nn.TransformerEncoderLayer(8, nhead=2, batch_first=True)
        >>> encoder = fastattn.nn.TransformerEncoder(layer, num_layers=2)
        >>> encoder(torch.ones(1, 3, 8), src_key_padding_mask=torch.tensor([[False, False, True]]))[0, 2]
        tensor([0., 0., 0., 0., 0., 0., 0., 0.], grad_fn=<SelectBackward0>)
    """

    def __init__(
        self,
        encoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
        *,
        rotary: RotaryPositions | None = None,
    ) -> None:
        check_ints(1, num_layers=num_layers)
        _check_rotary(rotary, encoder_layer)
        super().__init__(encoder_layer, num_layers, norm, enable_nested_tensor=False, mask_check=mask_check)
        self.enable_nested_tensor = enable_nested_tensor
        self.rotary = rotary

    @classmethod
    def adopt(cls, module: nn.TransformerEncoder) -> None:
        """Turns a torch.nn.TransformerEncoder into this class, in place."""
        module.__class__ = cls
        module.use_nested_tensor = False
        module.rotary = None

    def forward(
        self,
        src: Tensor,
        mask: Tensor | Mask | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        *,
        positions: Tensor | None = None,
        cache: KVCache | PagedStep | None = None,
    ) -> Tensor:
        """The tokens after all layers, laid out as `src`, 0 at padding with `enable_nested_tensor`.

        Args:
            src: [N, L, E] with `batch_first`, else [L, N, E]; or [L, E] without a batch.
            mask: [L, L] or [N * H, L, L], bool (True hides) or float (added); or a `Mask` (True means visible).
            src_key_padding_mask: [N, L] or [L], bool (True hides) or float (added).
            is_causal: hint that `mask` is causal; None lets its values decide.
            positions: positions of the tokens for `rotary`, int64 [N, L] or [L]; None is 0, 1, 2, ...
            cache: the cache of the tokens before, in which `KVCache.extend` has made room for these, or a `PagedStep`
                for them. `mask` is then a causal `Mask`, and the cache knows the padding.

        Raises:
            AssertionError, RuntimeError: whichever of them torch raises for the same call.
        """
        if (block := blocks.current()) is not None and block.source is not None:
            with blocks.of_source(block):
                return self.forward(src, mask, src_key_padding_mask, is_causal, positions=positions, cache=cache)
        if not (isinstance(src, Tensor) and src.is_nested):
            _check_tokens("src", src)
        own = _are(TransformerEncoderLayer, self.layers)
        if src.is_nested or not own:
            why = "where src is nested" if own else "with layers of other classes"
            _check_absent(why, rotary=self.rotary, positions=positions, cache=cache)
            if isinstance(mask, Mask) and own and is_jagged(src):
                _check_absent("beside a Mask", src_key_padding_mask=src_key_padding_mask, is_causal=is_causal or None)
                for layer in self.layers:
                    src = layer(src, mask)
                return self._normed(src)
            _check_absent(why, mask=mask if isinstance(mask, Mask) else None)
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        if self.rotary is None:
            _check_absent("without rotary", positions=positions)
        unmasked = mask is src_key_padding_mask is None and (is_causal is None or is_causal is False)
        if unmasked and cache is self.rotary is None:
            for layer in self.layers:
                src = layer(src, src_mask=None, src_key_padding_mask=None, is_causal=False)  # what hooks of it look for
            return self._normed(src)
        attention = self.layers[0].self_attn
        x = _batch_first(src, attention)
        seen, bias = _canonical_mask(attention, x, x, mask, src_key_padding_mask, is_causal)
        real = real_tokens(seen, src_key_padding_mask)
        packs = self.enable_nested_tensor and self._may_pack(x, cache) and bias is None and seen.features() <= _PACKABLE
        if real is not None and not self._is_by_token():  # what stands at padding may count for other tokens
            real = None
        if packs and worth_packing(real) and not self._is_hooked():
            packing = _packing(x, real)
            options = {
                "src_mask": Mask(causal=seen.causal, segment_ids=(packing.documents, packing.documents)),
                "rotation": self._rotation(x, positions, packing),
            }
            x = packing.pack(x)
            for layer in self.layers:
                x = layer(x, **options)
            return _batch_first(packing.unpack(self._normed(x)), attention)

        if cache is not None:
            _check_absent("with a cache, which knows them", positions=positions)
            seen, positions = cache.mask(seen), cache.positions
        real = real if self.enable_nested_tensor else None
        options = {"src_mask": seen.with_padding(real_queries=real)} | self._rotated(x, positions)
        if bias is not None or (cache is None and any(map(_wants_masks_as_given, self.layers))):
            options |= {"src_mask": mask, "src_key_padding_mask": src_key_padding_mask, "is_causal": bool(is_causal)}
        x = src
        for i, layer in enumerate(self.layers):
            x = layer(x, **options, **({} if cache is None else {"cache": cache.layer(i)}))
        return _zero_at_padding(self._normed(x), real, attention)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...


class TransformerDecoder(_Stack, nn.TransformerDecoder):
    """A stack of decoder layers that computes no padding; torch.nn's of the same name.

    Args:
        decoder_layer: the layer that is copied; as in torch.nn, all copies begin with its parameters.
        num_layers: number of layers.
        norm: applied after the last layer, or None.
        rotary: rotary positions for the self-attention of every layer; or None.

    Example:
        >>> import torch, fastattn
        >>> layer = fastattn.nn.TransformerDecoderLayer(8, nhead=2, batch_first=True)
        >>> decoder = fastattn.nn.TransformerDecoder(layer, num_layers=2)
        >>> decoder(torch.ones(1, 3, 8), torch.ones(1, 5, 8), fastattn.Mask(causal=True)).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        decoder_layer: nn.Module,
        num_layers: int,
        norm: nn.Module | None = None,
        *,
        rotary: RotaryPositions | None = None,
    ) -> None:
        check_ints(0, num_layers=num_layers)
        _check_rotary(rotary, decoder_layer)
        super().__init__(decoder_layer, num_layers, norm)
        self.rotary = rotary

    @classmethod
    def adopt(cls, module: nn.TransformerDecoder) -> None:
        """Turns a torch.nn.TransformerDecoder into this class, in place."""
        module.__class__ = cls
        module.rotary = None

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | Mask | None = None,
        memory_mask: Tensor | Mask | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The target's tokens after all layers, laid out as `tgt`, 0 at padding.

        Args:
            tgt: [N, L, E] with `batch_first`, else [L, N, E]; or [L, E] without a batch.
            memory: the encoder's output, [N, S, E], [S, N, E] or [S, E].
            tgt_mask: [L, L] or [N * H, L, L], bool (True hides) or float (added); or a `Mask` (True means visible).
            memory_mask: the same with [L, S].
            tgt_key_padding_mask: [N, L] or [L], bool (True hides) or float (added).
            memory_key_padding_mask: [N, S] or [S], the same.
            tgt_is_causal: hint that `tgt_mask` is causal; None lets its values decide.
            memory_is_causal: the same for `memory_mask`.
            positions: positions of the target's tokens for `rotary`, int64 [N, L] or [L]; None is 0, 1, 2, ...
            cache: the cache of the target's tokens before, in which `KVCache.extend` has made room for these, and of
                `memory`, which is projected once. `tgt_mask` is then a causal `Mask`, and the cache knows the padding.

        Raises:
            AssertionError, RuntimeError: whichever of them torch raises for the same call.
        """
        if not _are(TransformerDecoderLayer, self.layers):
            _check_absent("with layers of other classes", rotary=self.rotary, positions=positions, cache=cache)
            return super().forward(
                tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, tgt_is_causal,
                memory_is_causal,
            )  # fmt: skip
        if self.rotary is None:
            _check_absent("without rotary", positions=positions)
        _check_tokens("tgt", tgt)
        _check_tokens("memory", memory)
        if isinstance(cache, PagedStep):
            raise TypeError("cache must be a KVCache or None in a decoder, got a PagedStep")
        attention = self.layers[0].self_attn
        x, keys = _batch_first(tgt, attention), _batch_first(memory, attention)
        if x.dim() == 3 and keys.shape[0] != x.shape[0]:
            raise RuntimeError(f"memory must have a batch of {x.shape[0]} like tgt, got {keys.shape[0]}")
        seen, bias = _canonical_mask(attention, x, x, tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        seen_of_memory, memory_bias = _canonical_mask(
            attention, x, keys, memory_mask, memory_key_padding_mask, memory_is_causal
        )
        real, real_memory = real_tokens(seen, tgt_key_padding_mask), seen_of_memory.real_keys
        packs = self._may_pack(x, cache) and bias is None and memory_bias is None
        packs = packs and seen.features() <= _PACKABLE and seen_of_memory.features() <= {"real_keys"}
        if (real is not None or real_memory is not None) and not self._is_by_token():
            real, packs = None, False  # what stands at padding may count for other tokens
        if packs and worth_packing(real, real_memory) and not self._is_hooked():
            packing, memory_packing = _packing(x, real), _packing(keys, real_memory)
            options = {
                "tgt_mask": Mask(causal=seen.causal, segment_ids=(packing.documents, packing.documents)),
                "memory_mask": Mask(segment_ids=(packing.documents, memory_packing.documents)),
                "rotation": self._rotation(x, positions, packing),
            }
            x, keys = packing.pack(x), memory_packing.pack(keys)
            for layer in self.layers:
                x = layer(x, keys, **options)
            return _batch_first(packing.unpack(self._normed(x)), attention)

        if cache is not None:
            _check_absent("with a cache, which knows them", positions=positions)
            seen, positions = cache.mask(seen), cache.positions
        options = {
            "tgt_mask": seen.with_padding(real_queries=real),
            "memory_mask": seen_of_memory.with_padding(real_queries=real),
        } | self._rotated(x, positions)
        as_given = cache is None and any(map(_wants_masks_as_given, self.layers))
        if bias is not None or as_given:
            options |= {"tgt_mask": tgt_mask, "tgt_key_padding_mask": tgt_key_padding_mask}
            options |= {"tgt_is_causal": bool(tgt_is_causal)}
        if memory_bias is not None or as_given:
            options |= {"memory_mask": memory_mask, "memory_key_padding_mask": memory_key_padding_mask}
            options |= {"memory_is_causal": memory_is_causal}
        x = tgt
        for i, layer in enumerate(self.layers):
            caches = {} if cache is None else {"cache": cache.layer(i), "memory_cache": cache.memory(i)}
            x = layer(x, memory, **options, **caches)
        return _zero_at_padding(self._normed(x), real, attention)

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...


class Transformer(nn.Transformer):
    """Encoder and decoder: [N, T, E] from a source [N, S, E] and a target [N, T, E]; torch.nn's of the same name.

    The arguments of a call are those of torch.nn.Transformer; each of `src_mask`, `tgt_mask` and `memory_mask` may also
    be a `fastattn.Mask`.

    Args:
        d_model, nhead, num_encoder_layers, num_decoder_layers, dim_feedforward, dropout, activation, custom_encoder,
        custom_decoder, layer_norm_eps, batch_first, norm_first, bias, device, dtype: as in torch.nn.Transformer.
        num_kv_heads, norm: as in `TransformerEncoderLayer`.
        rotary: rotary positions for the self-attention of every layer; or None.

    Sources:
        Vaswani et al., Attention Is All You Need (2017).

    Example:
        >>> import torch, fastattn
        >>> model = fastattn.Transformer(8, 2, 1, 1, 32, batch_first=True)
        >>> padding = torch.tensor([[False, False, True]])
        >>> model(torch.ones(1, 3, 8), torch.ones(1, 4, 8), tgt_mask=fastattn.Mask(causal=True),
        ...       src_key_padding_mask=padding, memory_key_padding_mask=padding).shape
        torch.Size([1, 4, 8])
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = F.relu,
        custom_encoder: nn.Module | None = None,
        custom_decoder: nn.Module | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        norm: str = "layer",
        rotary: RotaryPositions | None = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        sizes = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias)

        def stack(
            cls: type[nn.Module], layer: type[nn.Module], num_layers: int
        ) -> TransformerEncoder | TransformerDecoder:
            layer = layer(*sizes, **where, num_kv_heads=num_kv_heads, norm=norm)
            return cls(layer, num_layers, make_norm(norm, d_model, layer_norm_eps, bias, **where), rotary=rotary)

        if custom_encoder is None:
            check_ints(1, num_encoder_layers=num_encoder_layers)
            custom_encoder = stack(TransformerEncoder, TransformerEncoderLayer, num_encoder_layers)
        if custom_decoder is None:
            check_ints(0, num_decoder_layers=num_decoder_layers)
            custom_decoder = stack(TransformerDecoder, TransformerDecoderLayer, num_decoder_layers)
        super().__init__(
            d_model, nhead, custom_encoder=custom_encoder, custom_decoder=custom_decoder, batch_first=batch_first
        )

    if TYPE_CHECKING:

        def __call__(
            self,
            src: Tensor,
            tgt: Tensor,
            src_mask: Tensor | Mask | None = None,
            tgt_mask: Tensor | Mask | None = None,
            memory_mask: Tensor | Mask | None = None,
            src_key_padding_mask: Tensor | None = None,
            tgt_key_padding_mask: Tensor | None = None,
            memory_key_padding_mask: Tensor | None = None,
            src_is_causal: bool | None = None,
            tgt_is_causal: bool | None = None,
            memory_is_causal: bool = False,
        ) -> Tensor: ...


_PACKABLE = {"causal", "real_keys"}
"""The fields of a mask that have the same meaning in a packed batch."""
_OWN_LAYERS = (TransformerEncoderLayer, TransformerDecoderLayer)
BY_TOKEN = (
    *(MultiHeadAttention, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU),
    *(nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.ReLU6, nn.Hardswish, nn.Softplus, nn.Sigmoid, nn.Tanh),
)
"""Modules whose output for a token depends on that token alone; of attention, which knows the documents, on those of
its sample."""


_BY_ELEMENT = (
    *(*ACTIVATIONS.values(), F.silu, F.mish, F.elu, F.selu, F.celu, F.leaky_relu, F.relu6, F.hardswish, F.softplus),
    *(F.sigmoid, F.tanh, F.hardtanh, F.logsigmoid, torch.relu, torch.sigmoid, torch.tanh),
)
"""Functions of each element, in a tensor of any shape."""


def _is_by_element(activation: Activation) -> bool:
    """Whether an activation is a function that is known to be one of each element, or a module, which is judged so."""
    function = activation.func if isinstance(activation, functools.partial) else activation
    return isinstance(activation, nn.Module) or any(function is known for known in _BY_ELEMENT)


def is_of_one_token(part: nn.Module) -> bool:
    """Whether a norm is over one dimension."""
    return len(vars(part).get("normalized_shape", (1,))) == 1  # for which nn.Module would search long


def _inherits_known_forward(cls: type[nn.Module]) -> bool:
    return next(base for base in cls.__mro__ if "forward" in vars(base)) in (*BY_TOKEN, *_OWN_LAYERS)


def _check_rotary(rotary: RotaryPositions | None, layer: nn.Module) -> None:
    if rotary is None:
        return
    if not isinstance(rotary, RotaryPositions):
        raise TypeError(f"rotary must be a RotaryPositions or None, got {type(rotary).__name__}")
    if isinstance(layer, _TransformerLayer) and rotary.head_dim != layer.self_attn.head_dim:
        raise ValueError(f"rotary must be of head_dim {layer.self_attn.head_dim} like the layer, got {rotary.head_dim}")


def _check_tokens(name: str, x: object) -> None:
    """Raises where x is not what a stack takes: a dense Tensor of 2 or 3 dimensions."""
    check_dense(name, x)
    if x.dim() not in (2, 3):
        raise AssertionError(f"{name} must have 3 dimensions, or 2 without a batch, got {list(x.shape)}")


def _check_absent(why: str, **given: object) -> None:
    """Raises where an argument is given that would be ignored."""
    for name, x in given.items():
        if x is not None:
            raise ValueError(f"{name} must be None {why}, got a {type(x).__name__}")


_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Where modules of PyTorch that call another one with their own arguments keep it."""


def _are(cls: type[nn.Module], layers: nn.ModuleList) -> bool:
    """Whether the layers are of this class, also inside of what torch.compile, checkpointing and FSDP wrap them in."""
    return all(isinstance(layer, cls) or isinstance(_unwrapped(layer), cls) for layer in layers)


def _unwrapped(layer: nn.Module) -> nn.Module:
    inner = next((part for name, part in layer.named_children() if name in _WRAPPED), None)
    return layer if inner is None else _unwrapped(inner)


def _wants_masks_as_given(layer: nn.Module) -> bool:
    """Whether a layer computes more than those of this module, or a hook may read its masks or set others."""
    inner = layer if type(layer) in _OWN_LAYERS else _unwrapped(layer)
    if "forward" in vars(inner) or not _inherits_known_forward(type(inner)):
        return True
    given_masks = (layer, inner, *[getattr(inner, name) for name in inner._ATTENTIONS])
    return any(_may_change_masks(hook) for part in given_masks for hook in part._forward_pre_hooks.values())


def _may_change_masks(hook: object) -> bool:
    """Whether a forward pre-hook is not PyTorch's own, such as those of pruning and of fully_shard."""
    return not getattr(hook, "__module__", "").startswith("torch.")


def _batch_first(x: Tensor, attention: MultiHeadAttention) -> Tensor:
    """x as [N, L, E], from the layout of this attention, or back into it; [L, E] is returned as it is."""
    return x if attention.batch_first or x.dim() == 2 else x.transpose(0, 1)


def _canonical_mask(
    attention: MultiHeadAttention,
    x: Tensor,
    keys: Tensor,
    mask: Tensor | Mask | None,
    padding: Tensor | None,
    is_causal: bool | None,
) -> tuple[Mask, Tensor | None]:
    """`masks.canonical_mask` for queries x and keys, [N, L, E] or [L, E]."""
    if is_causal is not None:
        check_bools(is_causal=is_causal)
    B = x.shape[0] if x.dim() == 3 else 1
    shape = (B, attention.num_heads, x.shape[-2], keys.shape[-2])
    return canonical_mask(padding, mask, shape, x, batched=x.dim() == 3, is_causal=bool(is_causal))


def _packing(x: Tensor, real: Tensor | None) -> Packing:
    if real is not None and real.shape != x.shape[:2]:
        raise ValueError(f"mask.real_keys must be {list(x.shape[:2])}, got {list(real.shape)}")
    return Packing(torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if real is None else real)


def _zero_at_padding(x: Tensor, real: Tensor | None, attention: MultiHeadAttention) -> Tensor:
    """x in the layout of this attention, 0 where `real` [N, L] is False."""
    if real is None:
        return x
    padding = ~(real[0] if x.dim() == 2 else real if attention.batch_first else real.T)
    return x.masked_fill(padding[..., None], 0.0)


def _listed(names: dict[str, object]) -> str:
    return ", ".join(repr(name) for name in names)
