"""Prints what a quantized cache changes: the loss of a small decoder, which is trained here, and its tokens a second.

    python benchmarks/quantized_cache.py [--steps 150] [--requests 32] [--threads 2]

The decoder has the sizes of MiniLM: 6 layers of 384, 12 heads of 32, fp32. It learns the bytes of this repository's
files, but for every twentieth block of them, on which its loss is measured: each token then reads those before it from
the cache. For the tokens a second every request has 8192 tokens in the cache, and the caches take turns.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch.nn.functional import cross_entropy

from fastattn.bench.timing import Call, interleave
from fastattn.nn import LanguageModel, PagedCache, PagedStep, TransformerConfig

CONFIG = TransformerConfig(
    vocab_size=256, d_model=384, nhead=12, num_layers=6, dim_feedforward=1536, dropout=0.0, activation="gelu",
    positions="rotary", scale_embeddings=False,
)  # fmt: skip
BLOCK, BATCH, HELD_OUT = 512, 16, 20
PAGE, CHUNK, CACHED = 64, 64, 8192
QUANTIZED = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
DTYPES = {"fp32": None, **QUANTIZED}


def blocks() -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [n, BLOCK + 1] of bytes to learn, and others to measure the loss on."""
    root = Path(__file__).parents[1]
    paths = sorted(
        path for pattern in ("docs/*.md", "fastattn/**/*.py", "tests/**/*.py") for path in root.glob(pattern)
    )
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)
    every = text[: len(text) // (BLOCK + 1) * (BLOCK + 1)].view(-1, BLOCK + 1)
    held_out = torch.arange(len(every)) % HELD_OUT == 0
    return every[~held_out], every[held_out]


def trained(text: torch.Tensor, steps: int) -> LanguageModel:
    """The decoder after so many steps over the text."""
    model = LanguageModel(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    for _ in track(range(steps), "training", console=Console(stderr=True)):
        batch = text[torch.randint(len(text), (BATCH,))].long()
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def logits(model: LanguageModel, ids: torch.Tensor, cache: PagedCache) -> torch.Tensor:
    """Logits [n, L, 256] of sequences [n, L] that are read in chunks, each of all sequences together."""
    sequences, result = [cache.open(ids.shape[1]) for _ in ids], []
    for chunk in ids.split(CHUNK, dim=1):
        step = cache.step(dict.fromkeys(sequences, chunk.shape[1]))
        result.append(model(chunk.reshape(1, -1), cache=step).view(len(ids), -1, CONFIG.vocab_size))
    for sequence in sequences:
        sequence.close()
    return torch.cat(result, dim=1)


def decoding(model: LanguageModel, text: torch.Tensor, requests: int, dtype: torch.dtype | None) -> Call:
    """One token more of each request, with CACHED before it; the pages of all have the content of the first one's."""
    cache = PagedCache(requests * (CACHED // PAGE + 1), PAGE, dtype)
    sequences = [cache.open(CACHED + 1) for _ in range(requests)]
    for chunk in text.flatten()[:CACHED].long().split(512):
        model(chunk[None], cache=cache.step({sequences[0]: len(chunk)}))
    for layer in cache._layers.values():
        for x in layer.values():
            for sequence in sequences[1:]:
                x[sequence.pages] = x[sequences[0].pages]
    for sequence in sequences:
        sequence.length = CACHED
    ids = text.flatten()[:requests].long()[None]

    def once() -> torch.Tensor:
        step: PagedStep = cache.step(dict.fromkeys(sequences, 1))
        result = model(ids, cache=step)
        step.undo()
        return result

    return Call(once)


@torch.no_grad()
def main() -> None:
    """Prints the loss in bits a byte, how often the likeliest byte is the same, and the tokens a second."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="of training")
    parser.add_argument("--requests", type=int, default=32, help="that generate together")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the comparison of speeds")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    to_learn, held_out = blocks()
    with torch.enable_grad():
        model = trained(to_learn, options.steps)
    ids = held_out[:64].long()
    of_each = {name: logits(model, ids[:, :-1], PagedCache(64 * BLOCK // PAGE, PAGE, d)) for name, d in DTYPES.items()}
    for name, x in of_each.items():
        bits = cross_entropy(x.double().flatten(0, 1), ids[:, 1:].flatten()) / torch.log(torch.tensor(2.0))
        print(f"{name}: {bits:.5f} bits a byte of {ids[:, 1:].numel()} that were held out")
    for name in QUANTIZED:
        same = (of_each["fp32"].argmax(-1) == of_each[name].argmax(-1)).double().mean()
        print(f"{name}: the likeliest byte is that of fp32 in {100 * same:.2f} % of all places")
    calls = {name: decoding(model, held_out, options.requests, dtype) for name, dtype in DTYPES.items()}
    exact, *of_quantized = (call.run() for call in calls.values())
    for rounded in of_quantized:
        assert ((rounded - exact).norm() / exact.norm()).item() < 0.05
    timings = interleave(calls, options.seconds, "cpu")
    for name, timing in timings.items():
        print(
            f"{name}: {options.requests / timing.median:.1f} tokens a second, {options.requests} requests of {CACHED}"
        )
    for name in QUANTIZED:
        ratio = statistics.median(a / b for a, b in zip(timings["fp32"].seconds, timings[name].seconds, strict=True))
        print(f"{name} / fp32: {ratio:.2f}")


if __name__ == "__main__":
    main()
