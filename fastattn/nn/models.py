"""Whole models from tokens to logits: a classifier of sequences, a language model, and a sequence-to-sequence model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from .. import blocks
from ..spec import Mask
from .attention import MultiHeadAttention
from .batching import generate_in_pages
from .cache import KVCache
from .checks import (
    check_bools,
    check_heads,
    check_ids,
    check_ints,
    check_numbers,
    check_probability,
    check_range,
    check_tensor,
    checked_index,
)
from .generation import Generation, generate
from .pages import PagedCache, PagedStep, check_cache
from .positions import LearnedPositions, RotaryPositions, SinusoidalPositions, TokenEmbedding, positions_of
from .transformer import (
    ACTIVATIONS,
    NORMS,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
    make_norm,
)

if TYPE_CHECKING:
    from .checks import called_as

    Stack = TypeVar("Stack", TransformerEncoder, TransformerDecoder)


@dataclass(frozen=True)
class TransformerConfig:
    """The sizes and options of a model: plain values, which are saved beside the weights.

    Args:
        vocab_size: number of token ids.
        d_model: width E of the tokens.
        nhead: number of heads.
        num_layers: layers of the encoder, or of a language model.
        num_decoder_layers: layers of the decoder; None is `num_layers`.
        dim_feedforward: inner width of the feed-forward networks.
        dropout: probability to drop an attention weight, and an element of embeddings and of what enters a residual.
        activation: "relu", "gelu" or "swiglu".
        norm: "layer" or "rms".
        norm_first: pre-norm, with one more norm after the last layer, instead of post-norm.
        layer_norm_eps: eps of the norms.
        bias: whether linear layers and LayerNorm have one.
        num_kv_heads: heads of keys and values, for grouped-query attention; None is `nhead`.
        positions: "sinusoidal" or "learned", added to the embeddings; or "rotary", in every self-attention.
        max_length: number of positions, if they are learned or sinusoidal.
        padding_idx: id of padding, whose embedding begins as 0 and gets no gradient but that of a tied output layer;
            where no mask is given, its tokens are the padding. A negative one counts from the end.
        scale_embeddings: multiply embeddings by sqrt(d_model) before positions are added.
        tie_embeddings: the output layer has the weight of the (target) embedding.
        tgt_vocab_size: number of target ids, with an embedding of their own; None is one vocabulary, and one embedding,
            for both sides.

    Raises:
        TypeError: an argument is of another type.
        ValueError: `positions`, `activation` or `norm` is not known, or a number is out of range.
    """

    vocab_size: int
    d_model: int = 512
    nhead: int = 8
    num_layers: int = 6
    num_decoder_layers: int | None = None
    dim_feedforward: int = 2048
    dropout: float = 0.1
    activation: str = "relu"
    norm: str = "layer"
    norm_first: bool = True
    layer_norm_eps: float = 1e-5
    bias: bool = True
    num_kv_heads: int | None = None
    positions: str = "sinusoidal"
    max_length: int = 1024
    padding_idx: int | None = None
    scale_embeddings: bool = True
    tie_embeddings: bool = True
    tgt_vocab_size: int | None = None

    def __post_init__(self) -> None:
        check_ints(1, vocab_size=self.vocab_size, num_layers=self.num_layers, max_length=self.max_length)
        names = ("num_decoder_layers", "num_kv_heads", "tgt_vocab_size")
        check_ints(1, **{name: x for name in names if (x := getattr(self, name)) is not None})
        check_heads(ValueError, d_model=self.d_model, nhead=self.nhead)
        check_ints(0, dim_feedforward=self.dim_feedforward)
        check_probability(dropout=self.dropout)
        check_numbers("at least 0 and finite", lambda x: 0 <= x < math.inf, layer_norm_eps=self.layer_norm_eps)
        if self.num_kv_heads is not None and self.nhead % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide nhead = {self.nhead}, got {self.num_kv_heads}")
        names = ("norm_first", "bias", "scale_embeddings", "tie_embeddings")
        check_bools(**{name: getattr(self, name) for name in names})
        object.__setattr__(self, "padding_idx", checked_index("padding_idx", self.padding_idx, self.vocab_size))
        if None not in (self.padding_idx, self.tgt_vocab_size):
            check_ids(self.tgt_vocab_size, padding_idx=self.padding_idx)
        for name, known in (("activation", ACTIVATIONS), ("norm", NORMS)):
            if not isinstance(x := getattr(self, name), str) or x not in known:
                raise ValueError(f"{name} must be {', '.join(map(repr, known))}, got {x!r}")
        if not isinstance(self.positions, str) or self.positions not in ("sinusoidal", "learned", "rotary"):
            raise ValueError(f"positions must be 'sinusoidal', 'learned' or 'rotary', got {self.positions!r}")


class Model(nn.Module):
    """Base class of the models: makes the parts that a config describes."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        if not isinstance(config, TransformerConfig):
            raise TypeError(f"config must be a TransformerConfig, got {type(config).__name__}")
        self.config = config
        self.register_load_state_dict_post_hook(_follow_what_was_assigned)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Model:
        """As in nn.Module; a tied head stays tied, also where `to_empty` makes a new weight for each name of one."""
        embedding = self._embedding_of_head()
        tied = self.head.weight is embedding.weight
        super()._apply(fn, recurse)
        if tied:
            self.head.weight = embedding.weight
        return self

    def _embedding_of_head(self) -> TokenEmbedding:
        return getattr(self, "tgt_embedding", self.embedding)

    def arguments(self) -> dict[str, object]:
        """The arguments of the constructor, by name."""
        return {"config": self.config}

    def _embedding(self, vocab_size: int) -> TokenEmbedding:
        config = self.config
        return TokenEmbedding(vocab_size, config.d_model, config.padding_idx, scaled=config.scale_embeddings)

    def _positions(self) -> SinusoidalPositions | LearnedPositions | None:
        """The module of the positions that are added to embeddings; None for rotary positions."""
        kinds = {"sinusoidal": SinusoidalPositions, "learned": LearnedPositions}
        kind = kinds.get(self.config.positions)
        return None if kind is None else kind(self.config.d_model, self.config.max_length)

    def _stack(self, cls: type[Stack], layer: type[nn.Module], num_layers: int) -> Stack:
        config = self.config
        layer = layer(
            config.d_model, config.nhead, config.dim_feedforward, config.dropout, config.activation,
            config.layer_norm_eps, batch_first=True, norm_first=config.norm_first, bias=config.bias,
            num_kv_heads=config.num_kv_heads, norm=config.norm,
        )  # fmt: skip
        last_norm = None
        if config.norm_first:
            last_norm = make_norm(config.norm, config.d_model, config.layer_norm_eps, config.bias)
        rotary = RotaryPositions(config.d_model // config.nhead) if config.positions == "rotary" else None
        stack = cls(layer, num_layers, last_norm, rotary=rotary)
        for part in stack.modules():  # a stack begins with copies of one layer
            if isinstance(part, MultiHeadAttention):
                part._reset_parameters()
                nn.init.xavier_uniform_(part.out_proj.weight)
            elif type(part) is nn.Linear:
                nn.init.xavier_uniform_(part.weight)
        return stack

    def _head(self, embedding: TokenEmbedding) -> nn.Linear:
        """The output layer, from hidden states to logits of the ids of this embedding."""
        head = nn.Linear(self.config.d_model, embedding.num_embeddings, bias=False)
        nn.init.normal_(head.weight, std=self.config.d_model**-0.5)
        if self.config.tie_embeddings:
            head.weight = embedding.weight
        return head

    def _real(self, ids: Tensor, attention_mask: Tensor | None, of: str = "") -> Tensor | None:
        """bool [B, L], False at padding; None where no token is known to be padding. `of` is the prefix of the names.

        Raises:
            TypeError, ValueError: they are no ids and no mask of them.
        """
        check_tensor(f"{of}input_ids", ids, "integer", ("B", "L"))
        size = (of and self.config.tgt_vocab_size) or self.config.vocab_size
        check_range(f"{of}input_ids", ids, size, "the vocabulary's size {}")
        if attention_mask is not None:
            if not isinstance(attention_mask, Tensor):
                raise TypeError(f"{of}attention_mask must be a Tensor, got {type(attention_mask).__name__}")
            if attention_mask.is_floating_point():  # which elsewhere is added to scores: 0 for real tokens
                got = attention_mask.dtype
                raise ValueError(f"{of}attention_mask must be bool or integer, True or 1 for real tokens, got {got}")
            if attention_mask.shape != ids.shape:
                got = list(attention_mask.shape)
                raise ValueError(f"{of}attention_mask must be {list(ids.shape)} like the ids, got {got}")
            return attention_mask.bool()
        return None if self.config.padding_idx is None else ids != self.config.padding_idx

    def check_length(self, what: str, length: int) -> None:
        """Raises a ValueError where a length is beyond the table of positions; `what` is that which has it."""
        if self.positions is not None and length > self.config.max_length:
            raise ValueError(f"{what} must be at most max_length = {self.config.max_length} tokens, got {length}")

    def _to_rotate(self, positions: Tensor) -> Tensor | None:
        """The positions for the layers; None where they are added to the embeddings."""
        return positions if self.positions is None else None

    def _embed(self, ids: Tensor, positions: Tensor, embedding: TokenEmbedding) -> Tensor:
        x = embedding(ids)
        if self.positions is not None:
            x = x + self.positions(positions).to(x.dtype)  # as where weights are cast for a call, but no buffers
        return self.dropout(x)


def _follow_what_was_assigned(model: Model, _: object) -> None:
    """Completes `load_state_dict(assign=True)`: a tied head is one weight again, and a table of positions like all."""
    head, weight = model.head.weight, model._embedding_of_head().weight
    if type(head) is type(weight) is nn.Parameter and not head.is_meta and head.is_set_to(weight):
        model.head.weight = weight
    positions, kinds = model.positions, {(x.device, x.dtype) for x in model.parameters()}
    if isinstance(positions, SinusoidalPositions) and len(kinds) == 1:
        device, dtype = kinds.pop()
        if (positions.table.device, positions.table.dtype) != (device, dtype):
            positions.table = positions._computed(device, dtype)


def _hidden(real: Tensor | None) -> Tensor | None:
    """The key_padding_mask in torch's polarity, True at padding."""
    return None if real is None else ~real


def _positions_in(ids: Tensor, real: Tensor | None) -> Tensor:
    """The positions of the tokens, int64 [B or 1, L]."""
    if (block := blocks.current()) is not None:
        real = None if real is None else block.own.mask.readable_keys()
        here = block.own.positions(device=ids.device)
        return here[None] if real is None else positions_of(real.to(ids.device))[:, here]
    return torch.arange(ids.shape[1], device=ids.device)[None] if real is None else positions_of(real)


class SequenceClassifier(Model):
    """Logits [B, num_classes] of sequences: an encoder, and a linear layer on its first real token.

    Args:
        config: sizes and options of the model.
        num_classes: number of labels.

    Example:
        >>> import torch, fastattn
        >>> config = fastattn.nn.TransformerConfig(vocab_size=100, d_model=16, nhead=2, num_layers=2)
        >>> fastattn.nn.SequenceClassifier(config, num_classes=3)(torch.tensor([[1, 5, 7]])).shape
        torch.Size([1, 3])
    """

    def __init__(self, config: TransformerConfig, num_classes: int) -> None:
        super().__init__(config)
        check_ints(1, num_classes=num_classes)
        self.num_classes = num_classes
        self.embedding = self._embedding(config.vocab_size)
        self.positions = self._positions()
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = self._stack(TransformerEncoder, TransformerEncoderLayer, config.num_layers)
        self.head = nn.Linear(config.d_model, num_classes)

    def arguments(self) -> dict[str, object]:
        return {"config": self.config, "num_classes": self.num_classes}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits [B, num_classes].

        Args:
            input_ids: int32 or int64 [B, L].
            attention_mask: [B, L], True or 1 for real tokens; None: all but `padding_idx`.
        """
        blocks.refuse("the first token of each sample, which SequenceClassifier reads,")
        real = self._real(input_ids, attention_mask)
        _check_not_empty(input_ids)
        positions = _positions_in(input_ids, real)
        x = self._embed(input_ids, positions, self.embedding)
        x = self.encoder(x, src_key_padding_mask=_hidden(real), positions=self._to_rotate(positions))
        if real is None:
            return self.head(x[:, 0])
        first = real.int().argmax(dim=1)
        return self.head(x[torch.arange(x.shape[0], device=x.device), first])  # torch.export takes len(x) for fixed

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...


class LanguageModel(Model):
    """Logits [B, L, vocab_size] of the token after each token: a stack of layers under a causal mask.

    Args:
        config: sizes and options of the model.

    Example:
        >>> import torch, fastattn
        >>> config = fastattn.nn.TransformerConfig(
        ...     vocab_size=100, d_model=16, nhead=2, num_layers=2, positions="rotary", activation="swiglu", norm="rms")
        >>> model = fastattn.nn.LanguageModel(config).eval()
        >>> model(torch.tensor([[1, 5, 7]])).shape
        torch.Size([1, 3, 100])
        >>> model.generate(torch.tensor([[1, 5, 7]]), max_new_tokens=4).shape
        torch.Size([1, 4])
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.embedding = self._embedding(config.vocab_size)
        self.positions = self._positions()
        self.dropout = nn.Dropout(config.dropout)
        self.decoder = self._stack(TransformerEncoder, TransformerEncoderLayer, config.num_layers)
        self.head = self._head(self.embedding)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, cache: KVCache | PagedStep | None = None
    ) -> Tensor:
        """Logits [B, L, vocab_size].

        Args:
            input_ids: int32 or int64 [B, L]; with a cache, the tokens after those in it.
            attention_mask: [B, L], True or 1 for real tokens; None: all but `padding_idx`.
            cache: the cache of the tokens before, to which this call adds its own. With a step of a `PagedCache`, B is
                1, and the tokens are those of its sequences one after the other.
        """
        return self.head(self.hidden(input_ids, attention_mask, cache))

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, cache: KVCache | PagedStep | None = None
    ) -> Tensor:
        """The input of `head`, [B, L, d_model], which without a cache is 0 at padding; arguments as in `forward`.

        After an error a `KVCache` is as before.
        """
        real = self._real(input_ids, attention_mask)
        check_cache(cache)
        if cache is None:
            positions = _positions_in(input_ids, real)
            x = self._embed(input_ids, positions, self.embedding)
            return self.decoder(x, Mask(causal=True), _hidden(real), positions=self._to_rotate(positions))
        if isinstance(cache, KVCache) and len(input_ids) != cache.batch_size:
            raise ValueError(f"input_ids must be [{cache.batch_size}, L] with this cache, got {list(input_ids.shape)}")
        positions, done = cache.extend(input_ids.shape[1], real, input_ids.device), False
        try:
            x = self.decoder(self._embed(input_ids, positions, self.embedding), Mask(causal=True), cache=cache)
            done = True
        finally:
            if not done and isinstance(cache, KVCache):  # a step in pages is that of its caller, who may repeat it
                cache.undo()
        return x

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        cache: PagedCache | None = None,
        **options: object,
    ) -> Tensor:
        """The tokens that follow each prompt, int64 [B, at most max_new_tokens]; the prompt is not among them.

        In eval mode the same prompts give the same tokens, however they are padded. The model itself is not called, so
        neither `model.compile()` nor its hooks take part: compile `model.decoder`, which is.

        Args:
            input_ids: prompts, int32 or int64 [B, L], padded left or right.
            attention_mask: [B, L], True or 1 for real tokens; None: all but `padding_idx`.
            cache: pages for the keys and values, which sequences that have ended leave to those that have yet to begin;
                not for beam search. None is room for all of them at once.
            options: the fields of `GenerationOptions`.
        """
        real = self._real(input_ids, attention_mask)
        _check_not_empty(input_ids)
        if real is not None and not real.any(1).all():
            row = int(real.any(1).int().argmin())
            raise ValueError(f"input_ids must have a real token in each sample, got only padding in sample {row}")
        if cache is not None:
            prompts = input_ids if real is None else map(torch.masked_select, input_ids, real)
            return generate_in_pages(self, list(prompts), cache, **options)

        def begin(max_new_tokens: int) -> Generation:
            length = max_new_tokens + (input_ids.shape[1] if real is None else max(real.sum(1).tolist(), default=0))
            self.check_length("input_ids and max_new_tokens together", length)
            cache = KVCache(len(input_ids), length)
            x = self.hidden(input_ids, real, cache)
            last = x[:, -1] if real is None else _last_real(x, real)
            return Generation(self.head(last), lambda ids: self.head(self._next(ids, cache)), cache.select)

        return generate(begin, self.config.padding_idx, **options)

    def _next(self, ids: Tensor, cache: KVCache) -> Tensor:
        """The input of `head` [B, d_model] for one more token of each sample, int64 [B]; none of them is padding."""
        x = self._embed(ids[:, None], cache.extend(1, device=ids.device), self.embedding)
        return self.decoder(x, Mask(causal=True), cache=cache)[:, 0]


class Seq2SeqModel(Model):
    """Logits [B, T, vocab_size] of the target token after each target token: an encoder, and a decoder that reads it.

    Args:
        config: sizes and options of the model.

    Sources:
        Vaswani et al., Attention Is All You Need (2017).

    Example:
        >>> import torch, fastattn
        >>> config = fastattn.nn.TransformerConfig(vocab_size=100, d_model=16, nhead=2, num_layers=2, padding_idx=0)
        >>> model = fastattn.nn.Seq2SeqModel(config).eval()
        >>> source = torch.tensor([[5, 7, 9], [5, 8, 0]])
        >>> model(source, torch.tensor([[1, 4], [1, 4]])).shape
        torch.Size([2, 2, 100])
        >>> model.generate(source, decoder_start_token_id=1, max_new_tokens=4, num_beams=3).shape
        torch.Size([2, 4])
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.embedding = self._embedding(config.vocab_size)
        self.tgt_embedding = self.embedding
        if config.tgt_vocab_size is not None:
            self.tgt_embedding = self._embedding(config.tgt_vocab_size)
        self.positions = self._positions()
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = self._stack(TransformerEncoder, TransformerEncoderLayer, config.num_layers)
        num_decoder_layers = config.num_layers if config.num_decoder_layers is None else config.num_decoder_layers
        self.decoder = self._stack(TransformerDecoder, TransformerDecoderLayer, num_decoder_layers)
        self.head = self._head(self.tgt_embedding)

    def forward(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, vocab_size].

        Args:
            input_ids: source, int32 or int64 [B, S].
            decoder_input_ids: target, int32 or int64 [B, T].
            attention_mask: [B, S], True or 1 for real tokens; None: all but `padding_idx`.
            decoder_attention_mask: [B, T], the same.
        """
        return self.head(self.hidden(input_ids, decoder_input_ids, attention_mask, decoder_attention_mask))

    if TYPE_CHECKING:

        @called_as(forward)
        def __call__(self) -> None: ...

    def hidden(
        self,
        input_ids: Tensor,
        decoder_input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The input of `head`, [B, T, d_model], 0 at padding; arguments as in `forward`."""
        real = self._real(input_ids, attention_mask)
        real_target = self._real(decoder_input_ids, decoder_attention_mask, "decoder_")
        positions = _positions_in(decoder_input_ids, real_target)
        return self.decoder(
            self._embed(decoder_input_ids, positions, self.tgt_embedding),
            self.encode(input_ids, attention_mask),
            Mask(causal=True),
            tgt_key_padding_mask=_hidden(real_target),
            memory_key_padding_mask=_hidden(real),
            positions=self._to_rotate(positions),
        )

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The encoder's output [B, S, d_model], 0 at padding; arguments as in `forward`."""
        real = self._real(input_ids, attention_mask)
        with blocks.of_source(blocks.current()):
            positions = _positions_in(input_ids, real)
            x = self._embed(input_ids, positions, self.embedding)
            return self.encoder(x, src_key_padding_mask=_hidden(real), positions=self._to_rotate(positions))

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        decoder_start_token_id: int,
        **options: object,
    ) -> Tensor:
        """The target of each source, int64 [B, at most max_new_tokens], without its start token.

        The model itself is not called, so neither `model.compile()` nor its hooks take part: compile `model.encoder`
        and `model.decoder`, which are.

        Args:
            input_ids: source, int32 or int64 [B, S].
            attention_mask: [B, S], True or 1 for real tokens; None: all but `padding_idx`.
            decoder_start_token_id: the token that every target begins with.
            options: the fields of `GenerationOptions`.
        """
        real = self._real(input_ids, attention_mask)
        check_ids(self.head.out_features, decoder_start_token_id=decoder_start_token_id)
        if decoder_start_token_id == self.config.padding_idx:
            raise ValueError(
                f"decoder_start_token_id must not be padding_idx = {decoder_start_token_id}, which forward() leaves "
                "out; with padding_idx=None, attention masks tell the two apart"
            )

        def begin(max_new_tokens: int) -> Generation:
            self.check_length("max_new_tokens", max_new_tokens)
            cache = KVCache(len(input_ids), 1 + max_new_tokens)
            memory, padding = self.encode(input_ids, attention_mask), _hidden(real)

            def step(ids: Tensor) -> Tensor:
                x = self._embed(ids[:, None], cache.extend(1, device=ids.device), self.tgt_embedding)
                x = self.decoder(x, memory, Mask(causal=True), memory_key_padding_mask=padding, cache=cache)
                return self.head(x[:, 0])

            def select(samples: Tensor) -> None:
                nonlocal memory, padding
                cache.select(samples)
                memory, padding = memory[samples], None if padding is None else padding[samples]

            start = input_ids.new_full((len(input_ids),), decoder_start_token_id)
            return Generation(step(start), step, select)

        return generate(begin, self.config.padding_idx, **options)


def _last_real(x: Tensor, real: Tensor) -> Tensor:
    """The rows [B, E] of x for the last token of each sample that is not padding."""
    last = real.shape[1] - 1 - real.flip(1).int().argmax(dim=1)
    return x[torch.arange(x.shape[0], device=x.device), last]


def _check_not_empty(ids: Tensor) -> None:
    if ids.shape[1] == 0:
        raise ValueError(f"input_ids must have at least 1 token in each sample, got {list(ids.shape)}")
