"""The Transformer as taught: blocks with their residual and LayerNorm inside, that return their attention maps.

Letters: B batch, H heads, n_q queries, n_k keys. Source: Vaswani et al., Attention Is All You Need (2017). Sizes are
named as in the paper, parameters as in the early PyTorch implementations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn
from fastattn import Mask
from fastattn.nn import SinusoidalPositions, TokenEmbedding
from fastattn.nn.generation import Generation, generate

PAD = 0


class MultiHeadAttention(nn.Module):
    """LayerNorm(q + dropout(concat_h(softmax(q_h k_h^T / temperature) v_h) W_o)), and the maps softmax(...).

    Args:
        n_head: number of heads H.
        d_model: width of inputs and output.
        d_k: width of a head's queries and keys.
        d_v: width of a head's values.
        dropout: probability to drop a weight of the attention, and an element before the residual is added.
        temperature: divisor of the scores; None is sqrt(d_model), as taught (the paper has sqrt(d_k)).

    Example:
        >>> block = MultiHeadAttention(n_head=2, d_model=8, d_k=3, d_v=5)
        >>> x = torch.ones(4, 6, 8)
        >>> hidden = torch.ones(6, 6, dtype=torch.bool).triu(1).expand(4, 6, 6)
        >>> output, maps = block(x, x, x, hidden)
        >>> output.shape, maps.shape
        (torch.Size([4, 6, 8]), torch.Size([8, 6, 6]))
    """

    def __init__(
        self, n_head: int, d_model: int, d_k: int, d_v: int, dropout: float = 0.1, temperature: float | None = None
    ) -> None:
        super().__init__()
        self.n_head = n_head
        self.temperature = d_model**0.5 if temperature is None else temperature
        self.w_qs = nn.Linear(d_model, n_head * d_k)
        self.w_ks = nn.Linear(d_model, n_head * d_k)
        self.w_vs = nn.Linear(d_model, n_head * d_v)
        self.fc = nn.Linear(n_head * d_v, d_model)
        for projection in (self.w_qs, self.w_ks, self.w_vs, self.fc):
            nn.init.xavier_normal_(projection.weight)
        self.dropout = nn.Dropout(dropout)
        self.layer_norm = nn.LayerNorm(d_model)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Mask | None = None, return_attns: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """(output [B, n_q, d_model], maps [H * B, n_q, n_k] or None): map h * B + b is that of head h and sample b.

        A query from which everything is hidden attends to nothing: its map is 0, never NaN.

        Args:
            q: [B, n_q, d_model]; k, v: [B, n_k, d_model].
            mask: bool [B, n_q, n_k], True *hides* the key, or [B, 1, n_k] where it is the same for every query (faster:
                padding is skipped work); or a `fastattn.Mask`, where True means *may see*.
            return_attns: also return the maps, after dropout; it changes nothing in the output.

        Raises:
            ValueError: `mask` is of another shape or dtype.
        """
        heads = (self._split(w(x)) for w, x in ((self.w_qs, q), (self.w_ks, k), (self.w_vs, v)))
        q_h, k_h, v_h = heads
        mask = _as_mask(mask, q.shape[0], q.shape[1], k.shape[1])
        scale, dropout_p = 1 / self.temperature, self.dropout.p if self.training else 0.0
        maps = None
        if return_attns:
            o, weights = fastattn.attention_with_weights(
                q_h, k_h, v_h, mask, scale=scale, dropout_p=dropout_p, average_heads=False
            )
            maps = weights.transpose(0, 1).flatten(0, 1)
        else:
            o = fastattn.attention(q_h, k_h, v_h, mask, scale=scale, dropout_p=dropout_p)
        output = self.fc(o.transpose(1, 2).flatten(2))
        return self.layer_norm(q + self.dropout(output)), maps

    def _split(self, x: Tensor) -> Tensor:
        """[B, H, n, d] of [B, n, H * d], without a copy."""
        return torch.unflatten(x, -1, (self.n_head, -1)).transpose(1, 2)


def _as_mask(mask: Tensor | Mask | None, B: int, n_q: int, n_k: int) -> Mask | None:
    if mask is None or isinstance(mask, Mask):
        return mask
    if mask.dtype != torch.bool or mask.shape not in ((B, n_q, n_k), (B, 1, n_k)):
        raise ValueError(
            f"mask must be bool {[B, n_q, n_k]} or {[B, 1, n_k]} (True hides) or a fastattn.Mask, "
            f"got {mask.dtype} {list(mask.shape)}"
        )
    if mask.shape[1] == 1:
        return Mask(real_keys=~mask[:, 0])
    return Mask(dense=~mask[:, None])


class PositionwiseFeedForward(nn.Module):
    """LayerNorm(x + dropout(relu(x W_1 + b_1) W_2 + b_2))."""

    def __init__(self, d_model: int, d_inner: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_inner)
        self.w_2 = nn.Linear(d_inner, d_model)
        self.dropout = nn.Dropout(dropout)
        self.layer_norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d_model] of x [..., d_model]."""
        output: Tensor = self.layer_norm(x + self.dropout(self.w_2(F.relu(self.w_1(x)))))
        return output


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward."""

    def __init__(self, d_model: int, d_inner: int, n_head: int, d_k: int, d_v: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.slf_attn = MultiHeadAttention(n_head, d_model, d_k, d_v, dropout)
        self.pos_ffn = PositionwiseFeedForward(d_model, d_inner, dropout)

    def forward(
        self, enc_input: Tensor, slf_attn_mask: Tensor | Mask | None = None, return_attns: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """(output [B, n, d_model], maps or None), with the masks of `MultiHeadAttention`."""
        output, maps = self.slf_attn(enc_input, enc_input, enc_input, slf_attn_mask, return_attns)
        return self.pos_ffn(output), maps


class DecoderLayer(nn.Module):
    """Self-attention, attention to the source, then the feed-forward."""

    def __init__(self, d_model: int, d_inner: int, n_head: int, d_k: int, d_v: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.slf_attn = MultiHeadAttention(n_head, d_model, d_k, d_v, dropout)
        self.enc_attn = MultiHeadAttention(n_head, d_model, d_k, d_v, dropout)
        self.pos_ffn = PositionwiseFeedForward(d_model, d_inner, dropout)

    def forward(
        self,
        dec_input: Tensor,
        enc_output: Tensor,
        slf_attn_mask: Tensor | Mask | None = None,
        dec_enc_attn_mask: Tensor | Mask | None = None,
        return_attns: bool = True,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(output [B, n, d_model], maps of the self-attention, maps to the source), the maps None unless asked for."""
        output, slf_maps = self.slf_attn(dec_input, dec_input, dec_input, slf_attn_mask, return_attns)
        output, enc_maps = self.enc_attn(output, enc_output, enc_output, dec_enc_attn_mask, return_attns)
        return self.pos_ffn(output), slf_maps, enc_maps


class Embedding(nn.Module):
    """dropout(sqrt(d_model) E[token] + position): words stand at 1, 2, ..., padding at 0, and its vector is 0."""

    def __init__(self, n_vocab: int, d_model: int, len_max_seq: int, dropout: float) -> None:
        super().__init__()
        self.words = TokenEmbedding(n_vocab, d_model, padding_idx=PAD, scaled=True)
        self.positions = SinusoidalPositions(d_model, max_length=len_max_seq + 1, padding_idx=0)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, n, d_model] of tokens, integers [B, n].

        Raises:
            ValueError: a sentence has more tokens than there are positions.
        """
        real = tokens != PAD
        x: Tensor = self.dropout(self.words(tokens) + self.positions(real.cumsum(1) * real))
        return x


class Transformer(nn.Module):
    """The encoder-decoder; its default sizes are the paper's base model.

    Args:
        n_src_vocab: number of source tokens; token 0 is padding.
        n_tgt_vocab: number of target tokens; token 0 is padding.
        len_max_seq: most tokens of a sentence.
        d_model: width of the model.
        d_inner: width inside the feed-forward.
        n_layers: number N of layers in the encoder, and in the decoder.
        n_head: number of heads.
        d_k: width of a head's queries and keys.
        d_v: width of a head's values.
        dropout: probability, everywhere.
        share_embeddings: source and target are one vocabulary with one embedding. The target embedding is always the
            weight of the last layer too.

    Raises:
        ValueError: `share_embeddings` with vocabularies of different sizes.

    Example:
        >>> model = Transformer(10, 12, d_model=16, d_inner=32, n_layers=1, n_head=2, d_k=8, d_v=8)
        >>> model(torch.tensor([[5, 6, 7, 0]]), torch.tensor([[2, 3]])).shape
        torch.Size([1, 2, 12])
    """

    def __init__(
        self,
        n_src_vocab: int,
        n_tgt_vocab: int,
        len_max_seq: int = 256,
        d_model: int = 512,
        d_inner: int = 2048,
        n_layers: int = 6,
        n_head: int = 8,
        d_k: int = 64,
        d_v: int = 64,
        dropout: float = 0.1,
        share_embeddings: bool = False,
    ) -> None:
        super().__init__()
        if share_embeddings and n_src_vocab != n_tgt_vocab:
            raise ValueError(f"n_tgt_vocab must be {n_src_vocab} like n_src_vocab to share, got {n_tgt_vocab}")
        sizes = (d_model, d_inner, n_head, d_k, d_v, dropout)
        self.src_embedding = Embedding(n_src_vocab, d_model, len_max_seq, dropout)
        self.tgt_embedding = Embedding(n_tgt_vocab, d_model, len_max_seq, dropout)
        if share_embeddings:
            self.src_embedding.words = self.tgt_embedding.words
        self.encoder = nn.ModuleList(EncoderLayer(*sizes) for _ in range(n_layers))
        self.decoder = nn.ModuleList(DecoderLayer(*sizes) for _ in range(n_layers))

    def encode(self, src_seq: Tensor, return_attns: bool = False) -> tuple[Tensor, list[Tensor | None]]:
        """(output [B, n_src, d_model], the maps of each layer) of src_seq, integers [B, n_src]."""
        real = src_seq != PAD
        mask = Mask(real_keys=real, real_queries=real)
        output, maps = self.src_embedding(src_seq), []
        for layer in self.encoder:
            output, slf_maps = layer(output, mask, return_attns)
            maps.append(slf_maps)
        return output, maps

    def decode(
        self, tgt_seq: Tensor, src_seq: Tensor, enc_output: Tensor, return_attns: bool = False
    ) -> tuple[Tensor, list[tuple[Tensor | None, Tensor | None]]]:
        """(logits [B, n_tgt, n_tgt_vocab], each layer's maps to the target and to the source)."""
        real, real_src = tgt_seq != PAD, src_seq != PAD
        slf_mask = Mask(causal=True, real_keys=real, real_queries=real)
        enc_mask = Mask(real_keys=real_src, real_queries=real)
        output, maps = self.tgt_embedding(tgt_seq), []
        for layer in self.decoder:
            output, *layer_maps = layer(output, enc_output, slf_mask, enc_mask, return_attns)
            maps.append(tuple(layer_maps))
        return F.linear(output, self.tgt_embedding.words.weight), maps

    def forward(self, src_seq: Tensor, tgt_seq: Tensor) -> Tensor:
        """The logits [B, n_tgt, n_tgt_vocab] of the token after each of tgt_seq.

        Args:
            src_seq: integers [B, n_src], 0 is padding.
            tgt_seq: integers [B, n_tgt] that begin with the start token, 0 is padding.
        """
        return self.decode(tgt_seq, src_seq, self.encode(src_seq)[0])[0]

    @torch.no_grad()
    def generate(self, src_seq: Tensor, *, decoder_start_token_id: int, **options: object) -> Tensor:
        """The target of each source, int64 [B, at most max_new_tokens], without its start token.

        Args:
            src_seq: integers [B, n_src], 0 is padding.
            decoder_start_token_id: the token that every target begins with.
            options: the fields of `fastattn.nn.GenerationOptions`, as in `fastattn.nn.Seq2SeqModel.generate`.
        """

        def begin(max_new_tokens: int) -> Generation:
            source, enc_output = src_seq, self.encode(src_seq)[0]
            tokens = source.new_empty(len(source), 0)

            def step(ids: Tensor) -> Tensor:
                nonlocal tokens
                tokens = torch.cat([tokens, ids[:, None]], dim=1)
                return self.decode(tokens, source, enc_output)[0][:, -1]

            def select(samples: Tensor) -> None:
                nonlocal source, enc_output, tokens
                source, enc_output, tokens = source[samples], enc_output[samples], tokens[samples]

            return Generation(step(source.new_full((len(source),), decoder_start_token_id)), step, select)

        return generate(begin, PAD, **options)
