"""Sentiment of reviews: trains a classifier, judges it, and shows the evidence for its verdicts."""

from __future__ import annotations

import argparse
import random
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from .. import training
from ..training import InputError, Run, add_number, non_negative, positive_int, probability
from . import evidence, model, page, picture, reviews, tokens
from .learning import Examples, Recipe, fit, judge
from .reviews import CORPORA, LABELS, Review

SIZES = {"d_model": 300, "nhead": 1, "num_layers": 2, "dim_feedforward": 300}
# Where another value suits a corpus better than the one that suits IMDb.
PRESETS: dict[str, dict[str, Any]] = {
    "imdb": {},
    "rt-polarity": {"epochs": 10, "max_tokens": 100, "min_frequency": 2},
    "chabsa": {"epochs": 12, "unit": "character", "max_tokens": 512, "min_frequency": 2, "warmup": 100},
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the program, and returns its exit status."""
    args = _parser().parse_args(arguments)
    return training.exit_code(lambda: args.program(args))


def train(args: argparse.Namespace) -> None:
    """Trains a model, and judges the epoch that was best on the held-out part by the test part."""
    if args.max_tokens > model.MAX_TOKENS:
        raise InputError(f"max_tokens must be at most {model.MAX_TOKENS}, got {args.max_tokens}")
    corpus = reviews.load(args.corpus, args.data, args.seed)
    texts = [review.text for review in corpus.train]
    tokenizer = tokens.train(texts, args.unit, args.vocabulary, args.min_frequency)
    training.seed_everything(args.seed)
    classifier = model.build(tokenizer.get_vocab_size(), **{name: getattr(args, name) for name in (*SIZES, "dropout")})
    if args.vectors:
        known = model.use_vectors(classifier, args.vectors, tokenizer.get_vocab())
        print(f"{known} of {tokenizer.get_vocab_size()} tokens have a vector in {args.vectors}")
    examples = Examples.of(corpus.train, tokenizer, args.max_tokens)
    held_out = Examples.of(corpus.held_out, tokenizer)
    data = [([ids.tolist() for ids in part.ids], part.labels.tolist()) for part in (examples, held_out)]
    run = Run.from_arguments(args, data, vectors=args.vectors and str(args.vectors))
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in fields(Recipe)})
    about = {"corpus": args.corpus, "seed": args.seed}
    fit(classifier.to(args.device), tokenizer, examples, held_out, recipe, run, about)
    args.model = run.folder
    test(args)


def test(args: argparse.Namespace) -> None:
    """Judges a trained model by the test part of its corpus, and writes the figures into its folder."""
    classifier, tokenizer, about = model.load(args.model)
    corpus = reviews.load(about["corpus"], args.data, about["seed"])
    figures = judge(classifier.to(args.device), Examples.of(corpus.test, tokenizer))
    figures |= {"majority": reviews.majority(corpus.test), "reviews": len(corpus.test)} | about
    training.write_json(args.model / "test.json", figures)
    print(
        f"accuracy = {figures['accuracy']:.4f} on the {len(corpus.test)} test reviews of {about['corpus']} "
        f"(majority class {figures['majority']:.4f}) after epoch {about['epoch']}"
    )


def show(args: argparse.Namespace) -> None:
    """Writes the evidence for the verdict on each review, as a web page and a picture."""
    classifier, tokenizer, about = model.load(args.model)
    args.output.mkdir(parents=True, exist_ok=True)
    for review in _chosen(args, about):
        (tokenized,) = tokens.tokenize(tokenizer, [review.text])
        if len(tokenized.ids) == 1:
            raise InputError(f"review must have a token to shade, got {review.text!r}")
        if len(tokenized.ids) > model.MAX_TOKENS:
            raise InputError(f"{review.name} must have fewer than {model.MAX_TOKENS} tokens, got {len(tokenized.ids)}")
        seen, spans = evidence.collect(classifier, torch.tensor(tokenized.ids)).on_text(tokenized.spans)
        stem = re.sub(r"[^\w.-]+", "-", review.name)
        (args.output / f"{stem}.html").write_text(page.render(review, spans, seen), encoding="utf-8")
        picture.draw(review, spans, seen, args.output / f"{stem}.png")
        verdict = int(seen.probabilities.argmax())
        print(f"{args.output / stem}.html: {LABELS[verdict]}, {100 * float(seen.probabilities[verdict]):.1f} %")


def _chosen(args: argparse.Namespace, about: dict[str, Any]) -> list[Review]:
    """The reviews that the arguments name, or a few of the test part."""
    if args.text is not None:
        try:
            args.text.encode()
        except UnicodeEncodeError as error:  # bytes of the command line that Python could not decode
            raise training.InputError(f"--text must be in the encoding of the terminal, got {error}") from error
        return [Review("text", args.text, None)]
    corpus = reviews.load(about["corpus"], args.data, about["seed"])
    if args.review:
        return [corpus.find(name) for name in args.review]
    return random.Random(args.seed).sample(corpus.test, min(args.count, len(corpus.test)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.sentiment", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    trainer = commands.add_parser("train", help="train a model", description=train.__doc__)
    corpora = trainer.add_subparsers(required=True, metavar="CORPUS", dest="corpus")
    for corpus in CORPORA:
        _add_train_arguments(corpora.add_parser(corpus, help=(CORPORA[corpus].__doc__ or "").split("\n")[0]), corpus)

    tester = commands.add_parser("test", help="judge a trained model", description=test.__doc__)
    tester.set_defaults(program=test)
    tester.add_argument("--data", type=Path, required=True, metavar="PATH", help="folder or archive of its corpus")
    tester.add_argument("--device", type=training.device, default="cpu", help="default: cpu")

    shower = commands.add_parser("show", help="show the evidence for verdicts", description=show.__doc__)
    shower.set_defaults(program=show)
    what = shower.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", help="a review of your own")
    what.add_argument("--data", type=Path, metavar="PATH", help="folder or archive of the model's corpus")
    shower.add_argument("--review", action="append", metavar="NAME", help="one in the data: test/pos/7_9.txt, say")
    shower.add_argument("--count", type=positive_int, default=5, metavar="N", help="else this many; default: 5")
    shower.add_argument("--seed", type=training.seed, default=0, metavar="N", help="which ones; default: 0")
    shower.add_argument("--output", type=Path, default=Path("evidence"), metavar="FOLDER", help="default: evidence")

    for command in (tester, shower):
        command.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="where training wrote it")
    return parser


def _add_train_arguments(parser: argparse.ArgumentParser, corpus: str) -> None:
    preset = PRESETS[corpus]
    parser.description = train.__doc__

    texts = parser.add_argument_group("the texts")
    texts.add_argument("--data", type=Path, required=True, metavar="PATH", help="folder or archive of the corpus")
    units = ("word", "character", "subword")
    texts.add_argument("--unit", default="word", choices=units, help="what a token is; default: %(default)s")
    add_number(texts, "--vocabulary", 25000, "most tokens in it")
    add_number(texts, "--min-frequency", 5, "how often each must occur")
    add_number(texts, "--max-tokens", 256, "tokens of a text, while training")
    texts.add_argument("--vectors", type=Path, metavar="FILE", help="frozen word vectors: word2vec, GloVe or fastText")

    sizes = parser.add_argument_group("the model")
    for name, size in SIZES.items():
        add_number(sizes, "--" + name.replace("_", "-"), size, f"{name} of fastattn.nn.TransformerConfig")
    add_number(sizes, "--dropout", 0.3, "of embeddings, attention and residuals", probability)

    learning = parser.add_argument_group("learning")
    defaults = Recipe()
    add_number(learning, "--batch-size", defaults.batch_size, "texts")
    add_number(learning, "--learning-rate", defaults.learning_rate, "highest", non_negative)
    add_number(learning, "--weight-decay", defaults.weight_decay, "of AdamW", non_negative)
    add_number(learning, "--warmup", defaults.warmup, "steps until the learning rate")
    add_number(learning, "--word-dropout", defaults.word_dropout, "share of words that become unknown", probability)
    add_number(learning, "--label-smoothing", defaults.label_smoothing, "share of a label given to all", probability)
    learning.add_argument("--bf16", action="store_true", help="products in bf16, where the processor is quick at them")
    training.add_arguments(parser, output=f"runs/sentiment-{corpus}", epochs=preset.get("epochs", 4))
    parser.set_defaults(program=train, **preset)


if __name__ == "__main__":
    sys.exit(main())
