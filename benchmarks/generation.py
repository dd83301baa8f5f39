"""Prints the time that generating a token takes with fastattn, as a share of the time with sdpa, on the CPU.

A small Llama, swapped and as it was with attention "sdpa", take turns: each continues a batch of sequences, whose keys
and values are in its cache, by a few tokens of greedy `generate()`. Before anything is timed, both are held to the same
model in fp64, in two steps: the logits of the swapped one are at most twice as far off as those of sdpa, plus 4 eps.

    python benchmarks/generation.py [--json FILE] [--seconds 4] [--only fp32]
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import fastattn
from fastattn.bench.timing import Call, interleave
from fastattn.bench.writing import file_to_write, write_rows
from fastattn.testing import compare

LAYERS, WIDTH, HEADS, INNER, VOCABULARY = 4, 512, 8, 1408, 8192
CACHED = (128, 512, 1024, 2048)
BATCHES = (1, 8)
TOKENS = 8  # in a sample
CHECKED = 2  # steps
PLACEMENTS = 4  # times that the caches are made anew: where they happen to lie in memory makes 2 % of a difference
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
AIM_FROM = 512  # cached tokens, from which on no token should take longer than with sdpa


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="keep every sample here")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each line (default: %(default)s)")
    parser.add_argument("--only", choices=DTYPES, help="this dtype alone")
    args = parser.parse_args()
    torch.set_num_threads(2)
    lines = [
        (dtype, batch, padded, cached)
        for dtype in ([args.only] if args.only else DTYPES)
        for batch in BATCHES
        for padded in (False, True)
        for cached in CACHED
    ]
    table = Table("dtype", "batch", "cached", "real", "sdpa", "fastattn", "fastattn / sdpa", "aim")
    rows = []
    for dtype, batch, padded, cached in track(lines, "generating", console=Console(stderr=True)):
        mask = attention_mask(batch, cached, padded)
        samples = {"sdpa": [], "fastattn": []}  # seconds a token
        for _ in range(PLACEMENTS):
            timings = interleave(calls(models_of(DTYPES[dtype]), mask), args.seconds / PLACEMENTS, "cpu")
            for name, timing in timings.items():
                samples[name] += [taken / TOKENS for taken in timing.seconds]
        sdpa, ours = (statistics.median(samples[name]) for name in ("sdpa", "fastattn"))
        real = mask.float().mean().item()
        aim = "" if cached < AIM_FROM else "met" if ours <= sdpa else "not met"
        numbers = (f"{real:.0%}", f"{1e3 * sdpa:.2f} ms", f"{1e3 * ours:.2f} ms", f"{ours / sdpa:.3f}")
        table.add_row(dtype, str(batch), str(cached), *numbers, aim)
        rows.append({"dtype": dtype, "batch": batch, "cached": cached, "real": real, "seconds_per_token": samples})
    Console(width=100).print(table)
    write_rows(args.json, rows)


def attention_mask(batch: int, cached: int, padded: bool) -> Tensor:
    """[batch, cached + 1], 0 at padding, which is on the left; the lengths are spread from all to nearly nothing."""
    length = cached + 1
    padding = torch.arange(1, batch + 1) * length // (batch + 1) if padded else torch.zeros(batch, dtype=torch.long)
    return (torch.arange(length) >= padding[:, None]).long()


@functools.cache
def models_of(dtype: torch.dtype) -> dict[str, PreTrainedModel]:
    """The contenders, and "exact", the same model in fp64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=2 * max(CACHED),
        pad_token_id=0,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval().to(dtype)
    model.set_attn_implementation("sdpa")
    swapped, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    fastattn.swap(swapped)
    # The same weights in memory: where a copy happens to lie makes more of a difference than what is compared here.
    swapped.load_state_dict(model.state_dict(), assign=True)
    return {"sdpa": model, "fastattn": swapped, "exact": exact}


@torch.no_grad()
def calls(models: dict[str, PreTrainedModel], mask: Tensor) -> dict[str, Call]:
    """The call of each contender: both continue the same sequences, from caches that hold the same."""
    torch.manual_seed(0)
    dtype = models["sdpa"].dtype
    ids = torch.randint(1, VOCABULARY, mask.shape)
    keys_and_values = torch.randn(LAYERS, 2, len(mask), HEADS, mask.shape[1] - 1, WIDTH // HEADS).to(dtype)
    ends = [0, -1]  # of the batch: with the least padding, and with the most
    _check(models, ids[ends], mask[ends], keys_and_values[:, :, ends])
    contenders = {name: (models[name], _filled(keys_and_values)) for name in ("sdpa", "fastattn")}
    return {name: Call(functools.partial(_generate, *contender, ids, mask)) for name, contender in contenders.items()}


def _filled(keys_and_values: Tensor) -> DynamicCache:
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(keys_and_values):
        cache.update(keys, values, layer)
    return cache


def _generate(model: PreTrainedModel, cache: DynamicCache, ids: Tensor, mask: Tensor) -> None:
    """Generates TOKENS tokens, from a cache that is put back first: which copies nothing."""
    if added := cache.get_seq_length() - (ids.shape[1] - 1):
        cache.crop(-added)
    model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=TOKENS, do_sample=False)


def _check(models: dict[str, PreTrainedModel], ids: Tensor, mask: Tensor, keys_and_values: Tensor) -> None:
    """Stops everything if the logits of some step are not as near to fp64 as those of sdpa."""
    caches = {name: _filled(keys_and_values.to(model.dtype)) for name, model in models.items()}
    token = ids[:, -1:]
    for _ in range(CHECKED):
        positions = mask.sum(1, keepdim=True) - 1
        logits = {
            name: model(token, attention_mask=mask, position_ids=positions, past_key_values=caches[name]).logits
            for name, model in models.items()
        }
        error = compare("logits", logits["fastattn"], logits["sdpa"], logits["exact"])
        if not error.right:
            raise SystemExit(str(error))
        token = logits["exact"].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)


if __name__ == "__main__":
    main()
