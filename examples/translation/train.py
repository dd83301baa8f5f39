"""Training: what the loss, the batches and the figures of an epoch are."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import sacrebleu
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from ..training import InputError, Loss, Run, inverse_sqrt, seed_everything, train, write_json
from .batches import Batch, Pair, bucketed, collate, encode
from .decode import translate
from .model import Seq2Seq
from .text import PAD, Vocabularies, read_parallel


def program(args: argparse.Namespace) -> None:
    """Trains the model that the options describe; its folder can be used after the first epoch."""
    torch.set_num_threads(args.threads or torch.get_num_threads())
    names = {part: [Path(args.data) / f"{name}.{lang}.txt" for lang in (args.source, args.target)]
             for part, name in (("train", args.train), ("valid", args.valid))}  # fmt: skip
    pairs, valid_pairs = (read_parallel(*names[part]) for part in ("train", "valid"))
    seed_everything(args.seed)
    vocabularies = Vocabularies.of(
        pairs, kind=args.vocabulary, min_frequency=args.min_frequency, max_size=args.max_size,
        lowercase=not args.keep_case,
    )  # fmt: skip
    data, valid = (encode(p, vocabularies, args.max_length) for p in (pairs, valid_pairs))
    print(f"{len(data)} of {len(pairs)} pairs, {len(vocabularies.source)} source and {len(vocabularies.target)} "
          f"target tokens{', joint' if vocabularies.joint else ''}")  # fmt: skip
    sizes = {"d_model": args.d_model, "nhead": args.nhead, "num_layers": args.num_layers,
             "dim_feedforward": args.dim_feedforward, "dropout": args.dropout}  # fmt: skip
    model = build(vocabularies, sizes).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), args.learning_rate, betas=(0.9, 0.98), fused=True)
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "translation.json", {"sizes": sizes, "vocabularies": vocabularies.to_json()})

    def loss(indices: list[int]) -> Loss:
        return batch_loss(model, collate([data[i] for i in indices]).to(args.device), args.label_smoothing)

    def evaluate(epoch: int) -> dict[str, float]:
        save_average(model, folder, epoch, args.average)
        some = valid_pairs[: args.valid_sentences]
        hypotheses = translate(model, vocabularies, [source for source, _ in some])
        return {
            "valid_loss": mean_loss(model, valid, args.tokens, args.device),
            "valid_bleu_greedy": bleu(hypotheses, [target for _, target in some], args.keep_case).score,
        }

    settings = {name: value for name, value in vars(args).items() if name not in _NOT_SETTINGS}
    train(
        model, optimizer, run=Run.from_arguments(args, settings), loss=loss, evaluate=evaluate, clip_norm=1.0,
        batches=lambda generator: bucketed(data, args.tokens, generator), schedule=inverse_sqrt(optimizer, args.warmup),
    )  # fmt: skip


_NOT_SETTINGS = ("command", "program", "output", "epochs", "seed", "checkpoint_every", "device", "threads", "data")


def build(vocabularies: Vocabularies, sizes: dict) -> Seq2Seq:
    return Seq2Seq(len(vocabularies.source), len(vocabularies.target), vocabularies.joint, **sizes)


def batch_loss(model: Seq2Seq, batch: Batch, label_smoothing: float = 0.0) -> Loss:
    """Cross-entropy over the real target tokens; padding costs no logits."""
    real = batch.target_out != PAD
    logits = model.logits(model.hidden(batch.source, batch.target_in)[real])
    mean = F.cross_entropy(logits, batch.target_out[real], label_smoothing=label_smoothing)
    return Loss(mean, len(logits), len(logits) + int((batch.source != PAD).sum()))


def mean_loss(model: Seq2Seq, data: list[Pair], tokens: int, device: str) -> float:
    """Per target token, without smoothing."""
    found = [batch_loss(model, collate([data[i] for i in b]).to(device)) for b in bucketed(data, tokens)]
    return sum(x.mean.item() * x.count for x in found) / sum(x.count for x in found)


def bleu(hypotheses: list[str], references: list[str], keep_case: bool) -> sacrebleu.BLEUScore:
    """sacrebleu's, with its default tokenizer."""
    return sacrebleu.corpus_bleu(hypotheses, [references], lowercase=not keep_case)


def save_average(model: Seq2Seq, folder: Path, epoch: int, average: int) -> None:
    """Writes the weights of this epoch, and as `model.safetensors` the mean of the last few epochs' weights."""
    weights = folder / "weights"
    weights.mkdir(exist_ok=True)
    save_file(dict(model.state_dict()), weights / f"epoch-{epoch}.safetensors")
    kept = [weights / f"epoch-{e}.safetensors" for e in range(max(1, epoch - average + 1), epoch + 1)]
    for path in set(weights.glob("*.safetensors")) - set(kept):
        path.unlink()
    states = [load_file(path) for path in kept]
    mean = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
    save_file(mean, folder / "model.partial")
    (folder / "model.partial").replace(folder / "model.safetensors")


def load(folder: str | Path, device: str = "cpu") -> tuple[Seq2Seq, Vocabularies]:
    """The trained model, for evaluation, and its vocabularies.

    Raises:
        InputError: the folder is not one that `train` has made, or has not finished an epoch.
    """
    folder = Path(folder)
    try:
        content = json.loads((folder / "translation.json").read_text(encoding="utf-8"))
        vocabularies = Vocabularies.from_json(content["vocabularies"])
        model = build(vocabularies, content["sizes"])
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(f"{folder} must hold a trained model, got {error}") from error
    return model.to(device).eval(), vocabularies
