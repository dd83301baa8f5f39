"""Training and evaluation of the classifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from fastattn.nn import SequenceClassifier

from .. import training
from ..training import Loss, Run
from . import model as models
from .reviews import Review
from .tokens import PADDING, SPECIAL, UNKNOWN, tokenize


@dataclass(frozen=True)
class Examples:
    """Token ids of texts, and their labels."""

    ids: list[Tensor]
    labels: Tensor

    @classmethod
    def of(cls, reviews: list[Review], tokenizer: Tokenizer, max_tokens: int = models.MAX_TOKENS) -> Examples:
        tokenized = tokenize(tokenizer, [review.text for review in reviews], max_tokens)
        return cls([torch.tensor(each.ids) for each in tokenized], torch.tensor([review.label for review in reviews]))

    def batch(self, which: list[int]) -> tuple[Tensor, Tensor]:
        """ids [B, n], padded at their ends, and labels [B]."""
        ids = nn.utils.rnn.pad_sequence([self.ids[i] for i in which], batch_first=True, padding_value=PADDING)
        return ids, self.labels[which]

    def batches(self, size: int, generator: torch.Generator) -> list[list[int]]:
        """The examples of each batch, which have about the same length."""
        return training.batches_of_alike([len(ids) for ids in self.ids], size, generator)


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of training.

    word_dropout: the share of words that become unknown ones, drawn anew each time a text is read.
    label_smoothing: the share of a label that is spread over all labels.
    bf16: compute products in bf16.
    """

    batch_size: int = 32
    learning_rate: float = 5e-4
    weight_decay: float = 0.01
    warmup: int = 400
    word_dropout: float = 0.1
    label_smoothing: float = 0.0
    bf16: bool = False


def fit(
    model: SequenceClassifier,
    tokenizer: Tokenizer,
    train: Examples,
    held_out: Examples,
    recipe: Recipe,
    run: Run,
    about: dict[str, Any],
) -> None:
    """Trains the model, resuming the run, and saves the model of the epoch with the best held-out accuracy.

    Args:
        about: what `models.save` writes about the model besides its accuracy.
    """
    device = next(model.parameters()).device
    if not run.checkpoint.exists():
        (run.folder / models.ABOUT).unlink(missing_ok=True)  # of another run
    products = torch.autocast(device.type, torch.bfloat16, enabled=recipe.bf16)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        learned, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay, fused=True
    )

    def loss(batch: list[int]) -> Loss:
        ids, labels = (x.to(device) for x in train.batch(batch))
        with products:
            logits = model(forget(ids, recipe.word_dropout))
        mean = nn.functional.cross_entropy(logits.float(), labels, label_smoothing=recipe.label_smoothing)
        return Loss(mean, len(batch), int((ids != PADDING).sum()))

    def evaluate(epoch: int) -> dict[str, float]:
        with products:
            figures = {f"held_out_{name}": value for name, value in judge(model, held_out).items()}
        best = models.about(run.folder)
        if best is None or figures["held_out_accuracy"] > best["held_out_accuracy"]:
            models.save(model, tokenizer, run.folder, {**about, "epoch": epoch, **figures})
        return figures

    training.train(
        model,
        optimizer,
        run=run,
        batches=lambda generator: train.batches(recipe.batch_size, generator),
        loss=loss,
        evaluate=evaluate,
        schedule=training.inverse_sqrt(optimizer, recipe.warmup),
        clip_norm=1.0,
    )


def forget(ids: Tensor, share: float) -> Tensor:
    """Token ids, each of them unknown with that probability, except the special ones."""
    forgotten = torch.rand(ids.shape, device=ids.device) < share
    return ids.masked_fill(forgotten & (ids >= len(SPECIAL)), UNKNOWN)


@torch.no_grad()
def judge(model: SequenceClassifier, examples: Examples) -> dict[str, float]:
    """The accuracy, and as loss the mean cross-entropy in nats."""
    device = next(model.parameters()).device
    model.eval()
    right, loss = 0, 0.0
    for which in examples.batches(64, torch.Generator()):
        ids, labels = (x.to(device) for x in examples.batch(which))
        logits = model(ids).float()
        right += int((logits.argmax(-1) == labels).sum())
        loss += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
    return {"accuracy": right / len(examples.ids), "loss": loss / len(examples.ids)}
