"""BERT: an encoder over word pieces, and a classifier on its first token.

Source: Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding (2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastattn.nn import LearnedPositions, TokenEmbedding, TransformerEncoder, TransformerEncoderLayer


@dataclass(frozen=True)
class Config:
    """Sizes, named as in a checkpoint's `config.json`; the defaults are those of BERT base."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    pad_token_id: int = 0


class Bert(nn.Module):
    """The hidden states after the last layer.

    Example:
        >>> bert = Bert(Config(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
        >>> bert(torch.tensor([[2, 5, 3, 0]]), torch.tensor([[1, 1, 1, 0]])).shape
        torch.Size([1, 4, 8])
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        E, dropout = config.hidden_size, config.hidden_dropout_prob
        self.config = config
        self.words = TokenEmbedding(config.vocab_size, E, padding_idx=config.pad_token_id)
        self.positions = LearnedPositions(E, config.max_position_embeddings)
        self.token_types = nn.Embedding(config.type_vocab_size, E)
        self.norm = nn.LayerNorm(E, config.layer_norm_eps)
        self.dropout = nn.Dropout(dropout)
        layer = TransformerEncoderLayer(
            E, config.num_attention_heads, config.intermediate_size, dropout, "gelu", config.layer_norm_eps,
            batch_first=True,
        )  # fmt: skip
        layer.self_attn.dropout = config.attention_probs_dropout_prob
        layer.dropout.p = 0.0  # BERT drops nothing between the two halves of the feed-forward
        self.encoder = TransformerEncoder(layer, config.num_hidden_layers)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """[B, L, hidden_size], 0 at padding.

        Args:
            input_ids: integers [B, L]; column j stands at position j, as in Hugging Face's BERT.
            attention_mask: [B, L], 1 is a real token and 0 is padding; None is all real.
            token_type_ids: integers [B, L], which of two texts a token belongs to; None is the first one everywhere.
        """
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        column = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.words(input_ids) + self.token_types(token_type_ids) + self.positions(column)
        padding = None if attention_mask is None else attention_mask == 0
        return self.encoder(self.dropout(self.norm(x)), src_key_padding_mask=padding)


class BertClassifier(nn.Module):
    """Logits [B, num_labels] of dropout(tanh(first hidden state W_p + b_p)) W_c + b_c.

    Args:
        config: sizes of the encoder.
        num_labels: how many classes there are.

    Example:
        >>> sizes = Config(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> BertClassifier(sizes, num_labels=5)(torch.tensor([[2, 5, 3]])).shape
        torch.Size([1, 5])
    """

    def __init__(self, config: Config, num_labels: int) -> None:
        super().__init__()
        self.bert = Bert(config)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, num_labels)
        self._reset_parameters(config.initializer_range)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """[B, num_labels]; arguments as in `Bert`."""
        first = self.bert(input_ids, attention_mask, token_type_ids)[:, 0]
        logits: Tensor = self.classifier(self.dropout(torch.tanh(self.pooler(first))))
        return logits

    def _reset_parameters(self, std: float) -> None:
        """Weights from N(0, std^2), biases 0, as BERT begins; norms as they are."""
        norms = {id(p) for m in self.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
        for parameter in self.parameters():
            if id(parameter) not in norms:
                nn.init.normal_(parameter, std=std) if parameter.dim() > 1 else nn.init.zeros_(parameter)
        with torch.no_grad():
            self.bert.words.weight[self.bert.words.padding_idx] = 0
