"""Training speed of the model on fastattn.nn's layers and on torch.nn's: same weights, same batches, in turns."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn.nn
from fastattn.bench.timing import Call, interleave

from ..training import InputError, positive_int, seed, seed_everything
from .batches import Batch, bucketed, collate
from .text import PAD
from .train import CLIP_NORM, add_model_arguments, batch_loss, make_model, make_optimizer, training_data


def add_speed_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `speed` to the parser."""
    add_model_arguments(parser)
    parser.add_argument("--batches", type=positive_int, default=10, metavar="N", help="of each pass; default: 10")
    parser.add_argument("--seconds", type=positive_int, default=60, metavar="N", help="for all passes; default: 60")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="default: 0")


class OnTorch(nn.Module):
    """A Seq2SeqModel with torch.nn's encoder and decoder, and otherwise copies of its parts."""

    def __init__(self, model: fastattn.nn.Seq2SeqModel) -> None:
        super().__init__()
        config = model.config
        parts = copy.deepcopy(model)  # as a whole: tied weights stay tied
        assert parts.positions is not None  # `make_model` makes no rotary ones
        self.embedding, self.tgt_embedding, self.positions = parts.embedding, parts.tgt_embedding, parts.positions
        self.dropout, self.head = parts.dropout, parts.head
        sizes = (config.d_model, config.nhead, config.dim_feedforward, config.dropout)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(*sizes, batch_first=True, norm_first=True), config.num_layers,
            nn.LayerNorm(config.d_model), enable_nested_tensor=False,
        )  # fmt: skip
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(*sizes, batch_first=True, norm_first=True), config.num_layers,
            nn.LayerNorm(config.d_model),
        )  # fmt: skip
        self.encoder.load_state_dict(model.encoder.state_dict())
        self.decoder.load_state_dict(model.decoder.state_dict())

    def hidden(self, source: Tensor, target: Tensor) -> Tensor:
        """The input of `head`, [B, T, E]."""
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], target.device, torch.bool)
        memory = self.encoder(self._embed(source, self.embedding), src_key_padding_mask=source == PAD)
        x: Tensor = self.decoder(
            self._embed(target, self.tgt_embedding), memory, tgt_mask=causal, tgt_is_causal=True,
            tgt_key_padding_mask=target == PAD, memory_key_padding_mask=source == PAD,
        )  # fmt: skip
        return x

    def _embed(self, ids: Tensor, embedding: nn.Module) -> Tensor:
        x: Tensor = self.dropout(embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        return x


Model = OnTorch | fastattn.nn.Seq2SeqModel


def run_speed(args: argparse.Namespace) -> None:
    """Prints the tokens per second of both models, and their ratio."""
    seed_everything(args.seed)
    _, vocabularies, data = training_data(args)
    order = bucketed(data, args.tokens, torch.Generator().manual_seed(args.seed))
    batches = [collate([data[i] for i in indices]) for indices in order[: args.batches]]
    ours = make_model(args, vocabularies)
    models: dict[str, Model] = {"torch.nn": OnTorch(ours), "fastattn.nn": ours}
    check(models, batches)
    calls = {name: Call(training_pass(model, batches, args.learning_rate)) for name, model in models.items()}
    timings = interleave(calls, args.seconds, "cpu")
    tokens = sum(int((batch.source != PAD).sum() + (batch.target_out != PAD).sum()) for batch in batches)
    places = sum(batch.source.numel() + batch.target_out.numel() for batch in batches)
    rounds = len(timings["torch.nn"].seconds)
    print(
        f"{vocabularies}; {len(batches)} batches, {tokens} tokens in {places} places; {rounds} rounds, "
        f"{torch.get_num_threads()} threads"
    )
    for name, timing in timings.items():
        print(f"{name:12} {tokens / timing.median:6.0f} tokens/s")
    print(f"fastattn.nn trains {timings['torch.nn'].median / timings['fastattn.nn'].median:.2f} times as fast")


def training_pass(model: Model, batches: list[Batch], learning_rate: float) -> Callable[[], None]:
    """A call that trains on each batch once, with dropout."""
    optimizer = make_optimizer(model, learning_rate)
    model.train()

    def run() -> None:
        for batch in batches:
            optimizer.zero_grad()
            mean = batch_loss(model, batch, label_smoothing=0.1).mean
            mean.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()

    return run


@torch.no_grad()
def check(models: dict[str, Model], batches: list[Batch]) -> None:
    """Compares the loss of every token with fp64: its error may be twice torch's plus 4 eps, as that of every kernel.

    Raises:
        InputError: the error on fastattn.nn is larger.
    """
    exact_model = copy.deepcopy(models["torch.nn"]).double()
    errors, largest = dict.fromkeys(models, 0.0), 0.0
    for batch in batches:
        exact = _token_losses(exact_model, batch)
        largest = max(largest, exact.max().item())
        for name, model in models.items():
            errors[name] = max(errors[name], (_token_losses(model, batch) - exact).abs().max().item())
    allowed = 2 * errors["torch.nn"] + 4 * torch.finfo(torch.float32).eps * largest
    if not errors["fastattn.nn"] <= allowed:
        raise InputError(
            f"the losses on fastattn.nn must be within {allowed:.1e} of the exact ones, got {errors['fastattn.nn']:.1e}"
        )


def _token_losses(model: Model, batch: Batch) -> Tensor:
    real = batch.target_out != PAD
    logits = model.eval().head(model.hidden(batch.source, batch.target_in)[real])
    return F.cross_entropy(logits, batch.target_out[real], reduction="none").double()
