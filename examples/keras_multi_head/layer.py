"""The multi-head layer of keras-multi-head, with weights that convert to and from `keras.layers.MultiHeadAttention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import fastattn
from fastattn import Mask

if TYPE_CHECKING:
    import keras  # type: ignore[import-untyped]  # Keras has no types
    import numpy as np


class MultiHeadAttention(nn.Module):
    """act(concat_h(a_h v_h) Wo + bo) with q, k, v = act(x W + b), and a = e / sum(e), e = exp(q k^T / sqrt(D)) * masks.

    The activation follows all four projections. Weights have the names and the layout of Keras: W is [in, out].

    Each mask multiplies the exponentials. So a key whose key mask or value mask is 0 has the weight 0; a query whose
    mask is 0, or that no key is left for, attends to nothing and has the output act(bo).

    Args:
        feature_num: width of the projections and of the output, head_num times the width D of a head.
        head_num: number of heads.
        query_num: width of the query, if not feature_num.
        key_num: width of the key, if not feature_num.
        value_num: width of the value, if not feature_num.
        activation: function of a tensor, as `torch.relu` (keras-multi-head's default), or None.
        use_bias: whether the projections have one.
        history_only: a query sees no key that stands after its own position.

    Raises:
        ValueError: `head_num` does not divide `feature_num`.

    Sources:
        keras-multi-head and keras-self-attention, by Zhao HG; Vaswani et al., Attention Is All You Need (2017).

    Example:
        >>> layer = MultiHeadAttention(feature_num=8, head_num=2, activation=torch.relu)
        >>> real = torch.tensor([[True, True, False]])
        >>> layer(torch.ones(1, 3, 8), real).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        feature_num: int,
        head_num: int,
        *,
        query_num: int | None = None,
        key_num: int | None = None,
        value_num: int | None = None,
        activation: Callable[[Tensor], Tensor] | None = None,
        use_bias: bool = True,
        history_only: bool = False,
    ) -> None:
        super().__init__()
        if head_num < 1 or feature_num % head_num:
            raise ValueError(f"head_num must divide feature_num, which is {feature_num}, got {head_num}")
        self.head_num = head_num
        self.activation = activation
        self.history_only = history_only
        for name, width in {"q": query_num, "k": key_num, "v": value_num, "o": None}.items():
            self.register_parameter(f"W{name}", nn.Parameter(torch.empty(width or feature_num, feature_num)))
            self.register_parameter(f"b{name}", nn.Parameter(torch.zeros(feature_num)) if use_bias else None)
        for name in "qkvo":
            nn.init.xavier_normal_(getattr(self, f"W{name}"))

    def forward(
        self, inputs: Tensor | Sequence[Tensor], mask: Tensor | Sequence[Tensor | None] | None = None
    ) -> Tensor:
        """The output [B, n_q, feature_num].

        Args:
            inputs: [B, n, feature_num] for self-attention; or query [B, n_q, query_num], key [B, n_k, key_num] and
                value [B, n_k, value_num].
            mask: for self-attention [B, n]; or those of query [B, n_q], key and value [B, n_k], each may be None. bool,
                True is real; or float, factors of at least 0 (a query's counts only as 0 or not: any other cancels).
        """
        query, key, value = (inputs,) * 3 if isinstance(inputs, Tensor) else inputs
        masks = (mask,) * 3 if mask is None or isinstance(mask, Tensor) else mask
        q, k, v = (
            torch.unflatten(self._project(x, name), -1, (self.head_num, -1)).transpose(1, 2)
            for name, x in (("q", query), ("k", key), ("v", value))
        )
        visible, bias = self._masking(*masks)
        o = fastattn.attention(q, k, v, visible, bias=bias)
        return self._project(o.transpose(1, 2).flatten(2), "o")

    def _project(self, x: Tensor, name: str) -> Tensor:
        x = x @ getattr(self, f"W{name}")
        bias = getattr(self, f"b{name}")
        x = x if bias is None else x + bias
        return x if self.activation is None else self.activation(x)

    def _masking(
        self, query_mask: Tensor | None, key_mask: Tensor | None, value_mask: Tensor | None
    ) -> tuple[Mask, Tensor | None]:
        """The masks as `mask` and `bias` of `fastattn.attention`: e * factor is exp(score + log(factor))."""
        factor = None
        for mask in (key_mask, value_mask):
            factor = mask if factor is None else factor if mask is None else factor * mask
        bias = None
        if factor is not None and factor.is_floating_point():
            bias = factor.where(factor != 0, 1).log()[:, None, None]
        real_queries, real_keys = (None if x is None else x != 0 for x in (query_mask, factor))
        return Mask(causal=self.history_only, real_keys=real_keys, real_queries=real_queries), bias

    @classmethod
    def from_keras(cls, layer: keras.layers.MultiHeadAttention, **options: Any) -> MultiHeadAttention:
        """A layer with the weights of a built `keras.layers.MultiHeadAttention`.

        Args:
            layer: a layer whose heads are feature_num / head_num wide, and its output as wide as all heads together.
            options: `activation` and `history_only`, which Keras's layer does not have.

        Raises:
            ValueError: the layer is not built, or has widths that this layer cannot have.
        """
        if not (weights := layer.get_weights()):
            raise ValueError(f"{layer.name} must be built, so that it has weights, got one that is not")
        if window := layer.get_config().get("sliding_window"):
            raise ValueError(f"{layer.name} must not have a sliding_window, got {window}")
        kernels = weights[:: 2 if layer.use_bias else 1]
        query_num, key_num, value_num = (kernel.shape[0] for kernel in kernels[:3])
        ours = cls(
            layer.num_heads * layer.key_dim, layer.num_heads, query_num=query_num, key_num=key_num,
            value_num=value_num, use_bias=layer.use_bias, **options,
        )  # fmt: skip
        ours.load_keras_weights(weights)
        return ours

    def load_keras_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Loads the weights that `get_weights()` of Keras's layer, or of keras-multi-head's, returns.

        Args:
            weights: W and b (unless `use_bias=False`) of query, key, value and output, in this order. With the heads as
                an axis of their own ([in, H, D], [H, D], [H, D, out]), or without.

        Raises:
            ValueError: there are more or fewer of them, or one has another shape.
        """
        shapes = self._keras_shapes()
        if len(weights) != len(shapes):
            raise ValueError(f"weights must be {len(shapes)} arrays ({', '.join(shapes)}), got {len(weights)}")
        for (name, shape), array in zip(shapes.items(), weights, strict=True):
            allowed = dict.fromkeys((shape, tuple(getattr(self, name).shape)))
            if tuple(array.shape) not in allowed:
                wanted = " or ".join(str(list(shape)) for shape in allowed)
                raise ValueError(f"{name} must be {wanted}, got {list(array.shape)}")
        with torch.no_grad():
            for name, array in zip(shapes, weights, strict=True):
                parameter = getattr(self, name)
                parameter.copy_(torch.from_numpy(array).reshape(parameter.shape))

    def keras_weights(self) -> list[np.ndarray]:
        """The weights as `set_weights()` of a built `keras.layers.MultiHeadAttention` takes them."""
        return [getattr(self, name).detach().cpu().numpy().reshape(s) for name, s in self._keras_shapes().items()]

    def _keras_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape that each parameter has in Keras, by name, in Keras's order."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in ("Wq", "bq", "Wk", "bk", "Wv", "bv", "Wo", "bo"):
            if (parameter := getattr(self, name)) is not None:
                *first, last = parameter.shape
                per_head = (self.head_num, last // self.head_num)
                if name == "Wo":
                    shapes[name] = (*per_head, last)
                else:
                    shapes[name] = (last,) if name == "bo" else (*first, *per_head)
        return shapes
