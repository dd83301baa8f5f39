"""Training: the model, the loss of a batch, the figures of an epoch, and the mean of the last epochs' weights."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn.nn

from ..training import (
    InputError,
    Loss,
    Run,
    add_arguments,
    add_number,
    inverse_sqrt,
    non_negative,
    probability,
    seed_everything,
    train,
)
from .batches import Batch, Pair, bucketed, collate, encode
from .text import PAD, BytePairs, Vocabularies, Words, read_parallel
from .translator import Translator, bleu, load_model

CLIP_NORM = 1.0
POSITIONS = 1024  # the least that a model has, to translate sentences longer than those it has learned from


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `train` to the parser; their defaults give the figures in docs/systems.md."""
    add_model_arguments(parser)
    group = parser.add_argument_group("training")
    add_files_argument(group, "--valid", "val", "for validation")
    add_number(group, "--warmup", 800, "steps")
    add_number(group, "--label-smoothing", 0.1, "probability spread over all tokens", probability)
    add_number(group, "--average", 5, "the model is the mean of the weights after so many epochs, the last ones")
    add_number(group, "--valid-sentences", 200, "translated after each epoch for a BLEU (greedy)")
    add_arguments(parser, output="runs/translation", epochs=14)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the model and of its batches to the parser."""
    add_data_argument(parser)
    group = parser.add_argument_group("text")
    add_files_argument(group, "--train", "train", "to train on")
    group.add_argument(
        "--vocabulary", choices=(BytePairs.kind, Words.kind), default=BytePairs.kind,
        help="joint byte-pair encoding, or the words of each side; default: bpe",
    )  # fmt: skip
    add_number(group, "--max-size", 4000, "largest vocabulary")
    add_number(group, "--min-frequency", 2, "of a word or pair in the vocabulary")
    group.add_argument("--keep-case", action="store_true", help="do not lower-case")
    add_number(group, "--max-length", 100, "tokens of a sentence; longer pairs are left out")

    group = parser.add_argument_group("model")
    add_number(group, "--d-model", 256, "width")
    add_number(group, "--nhead", 4, "heads")
    add_number(group, "--num-layers", 3, "layers of the encoder, and of the decoder")
    add_number(group, "--dim-feedforward", 512, "inner width of the feed-forward networks")
    add_number(group, "--dropout", 0.2, "of embeddings, attention weights and residuals", probability)

    group = parser.add_argument_group("steps")
    add_number(group, "--tokens", 1200, "of a batch on either side, padding included")
    add_number(
        group, "--learning-rate", 1.2e-3, "at the end of the warm-up; falls with 1 / sqrt(step) then", non_negative
    )


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, metavar="FOLDER", help="of the text files")


def add_files_argument(group: argparse._ActionsContainer, name: str, default: str, purpose: str) -> None:
    """An option for two parallel files."""
    group.add_argument(
        name, nargs=2, metavar=("SOURCE", "TARGET"), default=[f"{default}.de.txt", f"{default}.en.txt"],
        help=f"two parallel files in the folder, {purpose}; default: {default}.de.txt {default}.en.txt",
    )  # fmt: skip


def run_train(args: argparse.Namespace) -> None:
    """Trains the model that the options describe. Its folder can be used to translate after the first epoch."""
    valid_pairs = read_pairs(args.data, args.valid)
    seed_everything(args.seed)
    pairs, vocabularies, data = training_data(args)
    valid = encode_some(args.valid, valid_pairs, vocabularies, args.max_length)
    print(f"{len(data)} of {len(pairs)} pairs; {vocabularies}", flush=True)
    model = make_model(args, vocabularies).to(args.device)
    optimizer = make_optimizer(model, args.learning_rate)
    run = Run.from_arguments(args, data)
    translator = Translator(model, vocabularies)
    positions = model.config.max_length
    short = (pair for pair in valid_pairs if len(vocabularies.source.encode(pair[0])) < positions)
    sources, references = zip(*islice(short, args.valid_sentences), strict=True)

    def evaluate(epoch: int) -> dict[str, float]:
        save_average(translator, run.folder, epoch, args.average)
        score, _ = bleu(translator.translate(sources), references, lowercase=not args.keep_case)
        return {"valid_loss": mean_loss(model, valid, args.tokens, args.device), "valid_bleu_greedy": score.score}

    train(
        model,
        optimizer,
        run=run,
        batches=lambda generator: bucketed(data, args.tokens, generator),
        loss=lambda indices: batch_loss(model, _batch(data, indices, args.device), args.label_smoothing),
        evaluate=evaluate,
        schedule=inverse_sqrt(optimizer, args.warmup),
        clip_norm=CLIP_NORM,
    )


def read_pairs(folder: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of lines of the files with these two names; a name with a path of its own need not be in the folder."""
    return read_parallel(*(Path(folder) / name for name in names))


def encode_some(
    names: Sequence[str], pairs: list[tuple[str, str]], vocabularies: Vocabularies, max_length: int
) -> list[Pair]:
    """`encode` of the pairs in the files with these names.

    Raises:
        InputError: none is left.
    """
    if not (data := encode(pairs, vocabularies, max_length)):
        raise InputError(f"{names[0]} must have a sentence of 1 to {max_length} tokens, got none")
    return data


def training_data(args: argparse.Namespace) -> tuple[list[tuple[str, str]], Vocabularies, list[Pair]]:
    """The pairs to train on as text, their vocabularies, and those that are not too long as ids.

    Args:
        args: the options of `add_model_arguments`.
    """
    pairs = read_pairs(args.data, args.train)
    vocabularies = Vocabularies.of(
        pairs, kind=args.vocabulary, min_frequency=args.min_frequency, max_size=args.max_size,
        lowercase=not args.keep_case,
    )  # fmt: skip
    return pairs, vocabularies, encode_some(args.train, pairs, vocabularies, args.max_length)


def make_model(args: argparse.Namespace, vocabularies: Vocabularies) -> fastattn.nn.Seq2SeqModel:
    """A pre-norm model with tied output layer, and with one embedding for both sides of a joint vocabulary."""
    if args.d_model % args.nhead:
        raise InputError(f"--nhead must divide --d-model, got {args.nhead} and {args.d_model}")
    return fastattn.nn.Seq2SeqModel(
        fastattn.nn.TransformerConfig(
            vocab_size=len(vocabularies.source),
            tgt_vocab_size=None if vocabularies.joint else len(vocabularies.target),
            d_model=args.d_model,
            nhead=args.nhead,
            num_layers=args.num_layers,
            dim_feedforward=args.dim_feedforward,
            dropout=args.dropout,
            padding_idx=PAD,
            max_length=max(POSITIONS, args.max_length + 1),  # and EOS or SOS
        )
    )


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.Adam:
    """Adam with the betas of Vaswani et al. (2017), section 5.3."""
    return torch.optim.Adam(model.parameters(), learning_rate, betas=(0.9, 0.98), fused=True)


class Model(Protocol):
    """What `batch_loss` needs of a model: the input of `head` for source and target, and `head`."""

    head: nn.Linear

    def hidden(self, source: Tensor, target: Tensor, /) -> Tensor: ...


def batch_loss(model: Model, batch: Batch, label_smoothing: float = 0.0) -> Loss:
    """The cross-entropy over the real target tokens; logits are computed for these only."""
    real = batch.target_out != PAD
    logits = model.head(model.hidden(batch.source, batch.target_in)[real])
    mean = F.cross_entropy(logits, batch.target_out[real], label_smoothing=label_smoothing)
    return Loss(mean, len(logits), len(logits) + int((batch.source != PAD).sum()))


def mean_loss(model: fastattn.nn.Seq2SeqModel, data: list[Pair], tokens: int, device: str) -> float:
    """The cross-entropy per target token, without smoothing."""
    losses = [batch_loss(model, _batch(data, indices, device)) for indices in bucketed(data, tokens)]
    return sum(loss.mean.item() * loss.count for loss in losses) / sum(loss.count for loss in losses)


def _batch(data: list[Pair], indices: list[int], device: str) -> Batch:
    return collate([data[i] for i in indices]).to(device)


def save_average(translator: Translator, folder: Path, epoch: int, average: int) -> None:
    """Saves the weights of this epoch, and the mean of the last few epochs' weights as the model of the folder."""
    weights = folder / "weights"
    weights.mkdir(exist_ok=True)
    paths = [weights / f"epoch-{e}.safetensors" for e in range(max(1, epoch - average + 1), epoch + 1)]
    fastattn.nn.save(translator.model, paths[-1])
    for path in set(weights.glob("epoch-*.safetensors")) - set(paths):
        path.unlink()
    try:
        models = [load_model(path) for path in paths]
    except (OSError, ValueError) as error:
        raise InputError(f"{weights} must hold the weights of the last {average} epochs, got {error}") from error
    set_mean([list(model.parameters()) for model in models])
    Translator(models[0], translator.vocabularies).save(folder)


@torch.no_grad()
def set_mean(parameters: Sequence[Sequence[Tensor]]) -> None:
    """Sets the parameters of the first model to their mean over all models."""
    for same in zip(*parameters, strict=True):
        same[0].copy_(torch.stack(same).mean(0))
