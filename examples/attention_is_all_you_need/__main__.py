"""Trains the Transformer as taught on parallel text; without options, a small one learns 32 made-up pairs by heart."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from examples import training
from examples.translation.batches import Batch, bucketed, collate, encode
from examples.translation.text import EOS, PAD, SOS, BytePairs, Vocabularies, Words, read_parallel
from examples.translation.translator import bleu, most_tokens, translated

from .model import Transformer

TINY = Path(__file__).parent / "data"
MODEL = ("d_model", "d_inner", "n_layers", "n_head", "d_k", "d_v")  # options, and arguments of the model


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.attention_is_all_you_need", description=__doc__)
    text = parser.add_argument_group("text")
    text.add_argument(
        "--data", default=str(TINY), metavar="FOLDER", help="with {train,val}.LANGUAGE.txt; default: 32 made-up pairs"
    )
    text.add_argument("--source", default="de", metavar="LANGUAGE", help="default: de")
    text.add_argument("--target", default="en", metavar="LANGUAGE", help="default: en")
    text.add_argument("--vocabulary", choices=(Words.kind, BytePairs.kind), default=Words.kind, help="default: words")
    training.add_number(text, "--min-frequency", 2)
    training.add_number(text, "--max-size", 10000)
    training.add_number(text, "--max-length", 100)
    model = parser.add_argument_group("model")
    for name, default in zip(MODEL, (64, 128, 2, 4, 16, 16), strict=True):
        training.add_number(model, f"--{name.replace('_', '-')}", default)
    model.add_argument("--dropout", type=training.probability, default=0.1, help="default: 0.1")
    optimisation = parser.add_argument_group("optimisation")
    training.add_number(optimisation, "--tokens", 2000)
    # The made-up pairs are one batch, so an epoch is a step: the paper's 4000 would learn nothing in hundreds.
    training.add_number(optimisation, "--warmup", 100)
    optimisation.add_argument("--label-smoothing", type=training.probability, default=0.1, help="default: 0.1")
    training.add_arguments(parser, output="runs/attention_is_all_you_need", epochs=200)
    args = parser.parse_args(arguments)
    return training.exit_code(lambda: train(args))


def train(args: argparse.Namespace) -> None:
    """Trains as the arguments say, and prints some translations, and BLEU on sentences learnt from and on new ones."""
    training.seed_everything(args.seed)
    pairs, valid = (
        read_parallel(*(Path(args.data) / f"{part}.{language}.txt" for language in (args.source, args.target)))
        for part in ("train", "val")
    )
    vocabularies = Vocabularies.of(
        pairs, kind=args.vocabulary, min_frequency=args.min_frequency, max_size=args.max_size, lowercase=True
    )
    data, valid_data = (encode(side, vocabularies, args.max_length) for side in (pairs, valid))
    if not data or not valid_data:
        raise training.InputError(f"--max-length must leave some pairs of {args.data}, got {args.max_length}")
    sources, targets = zip(*valid, strict=True)
    longest = max(args.max_length, *(len(vocabularies.source.encode(source)) for source in sources)) + 1  # EOS
    model = Transformer(
        len(vocabularies.source),
        len(vocabularies.target),
        len_max_seq=most_tokens(longest),
        dropout=args.dropout,
        share_embeddings=vocabularies.joint,
        **{name: getattr(args, name) for name in MODEL},
    ).to(args.device)
    highest_lr = (args.d_model * args.warmup) ** -0.5
    optimizer = torch.optim.Adam(model.parameters(), lr=highest_lr, betas=(0.9, 0.98), eps=1e-9)

    def loss(indices: list[int]) -> training.Loss:
        return batch_loss(model, collate([data[i] for i in indices]).to(args.device), args.label_smoothing)

    def evaluate(epoch: int) -> dict[str, float]:
        batches = [collate([valid_data[i] for i in some]).to(args.device) for some in bucketed(valid_data, args.tokens)]
        losses = [batch_loss(model, batch) for batch in batches]
        return {
            "valid_loss": sum(x.mean.item() * x.count for x in losses) / sum(x.count for x in losses),
            "valid_bleu": bleu(translate(model, vocabularies, sources), targets, lowercase=True)[0].score,
        }

    metrics = training.train(
        model,
        optimizer,
        run=training.Run.from_arguments(args, data),
        batches=lambda generator: bucketed(data, args.tokens, generator),
        loss=loss,
        evaluate=evaluate,
        schedule=training.inverse_sqrt(optimizer, args.warmup),
    )
    for source, translation in zip(sources[:3], translate(model, vocabularies, sources[:3]), strict=True):
        print(f"{source} -> {translation}")
    kept = (pair for pair in pairs if encode([pair], vocabularies, args.max_length))
    learnt, references = zip(*islice(kept, 100), strict=True)
    by_heart = bleu(translate(model, vocabularies, learnt), references, lowercase=True)[0].score
    score, size = metrics["history"][-1]["valid_bleu"], metrics["parameters"] / 1e6
    print(
        f"BLEU = {score:.1f} on {len(valid)} validation sentences (greedy, lower-cased), "
        f"{by_heart:.1f} on {len(learnt)} that it learnt from, {size:.1f} M parameters, "
        f"{metrics['epochs']} epochs, {metrics['seconds']} s, {metrics['tokens_per_second']} tokens/s"
    )


def batch_loss(model: Transformer, batch: Batch, label_smoothing: float = 0.0) -> training.Loss:
    """The cross-entropy of the real target tokens."""
    real = batch.target_out != PAD
    logits = model(batch.source, batch.target_in)
    mean = F.cross_entropy(logits[real], batch.target_out[real], label_smoothing=label_smoothing)
    targets = int(real.sum())
    return training.Loss(mean, targets, targets + int((batch.source != PAD).sum()))


def translate(model: Transformer, vocabularies: Vocabularies, sentences: Sequence[str]) -> list[str]:
    """The greedy translations, in the order of the sentences."""

    def generate(source: Tensor) -> Tensor:
        most = most_tokens(source.shape[1])
        return model.generate(source, decoder_start_token_id=SOS, eos_token_id=EOS, max_new_tokens=most)

    encoded = [vocabularies.source.encode(sentence) for sentence in sentences]
    return translated(generate, encoded, vocabularies.target.decode, model.tgt_embedding.words.weight.device)


if __name__ == "__main__":
    sys.exit(main())
