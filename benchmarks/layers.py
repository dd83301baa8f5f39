"""Prints how much faster fastattn.MultiHeadAttention is than torch.nn.MultiheadAttention, on padded batches on the CPU.

Both have the same weights and take turns. Before it is timed, the output of ours is held to fp64: at most twice as far
off as that of torch, plus 4 eps. Under dropout the two drop different weights, and only the other modes are compared.

    python benchmarks/layers.py [--json FILE]
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor, nn

import fastattn
from fastattn.bench.timing import Call, interleave
from fastattn.bench.writing import file_to_write, write_rows
from fastattn.testing import compare

WIDTH, HEADS = 768, 12
SHAPES = ((8, 128), (4, 512))  # batch, length
DTYPES = (torch.float32, torch.bfloat16)
MODES = ("eval", "train forward", "forward+backward", "forward+backward, dropout 0.1")
SECONDS = 4.0  # for each line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="keep every sample here")
    path = parser.parse_args().json
    torch.set_num_threads(2)
    rows = []
    print(f"{'B':>2} {'L':>4} {'dtype':9} {'mode':30} {'torch ms':>9} {'ours ms':>9} {'ratio':>6}")
    for B, L in SHAPES:
        for dtype in DTYPES:
            for mode in MODES:
                timings = interleave(calls(B, L, dtype, mode), SECONDS, "cpu")
                theirs, ours = (timings[name].median * 1e3 for name in ("torch", "fastattn"))
                name = str(dtype).removeprefix("torch.")
                print(f"{B:2} {L:4} {name:9} {mode:30} {theirs:9.2f} {ours:9.2f} {theirs / ours:5.2f}x", flush=True)
                samples = {name: timing.seconds for name, timing in timings.items()}
                rows.append({"B": B, "L": L, "dtype": name, "mode": mode, "ratio": theirs / ours, "seconds": samples})
    write_rows(path, rows)


def calls(B: int, L: int, dtype: torch.dtype, mode: str) -> dict[str, Call]:
    """The call of each of the two layers, on inputs that are the same each time."""
    torch.manual_seed(0)
    lengths = torch.randint(L // 4, L + 1, (B, 1))
    lengths[-1] = L
    padding = torch.arange(L) >= lengths
    x = torch.randn(B, L, WIDTH, dtype=dtype)
    dropout = 0.1 if "dropout" in mode else 0.0
    settings = {"dropout": dropout, "batch_first": True, "dtype": dtype}
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **settings).train(mode != "eval")
    ours = fastattn.MultiHeadAttention(WIDTH, HEADS, **settings).train(mode != "eval")
    ours.load_state_dict(theirs.state_dict())

    forward = partial(_forward, x=x, padding=padding)
    if not dropout:
        with torch.no_grad():
            naive, actual = forward(theirs), forward(ours)
            exact = _forward(theirs.double(), x.double(), padding)
        theirs.to(dtype)
        error = compare("output", actual, naive, exact)
        if not error.right:
            raise SystemExit(f"{mode}, {dtype}: {error}")
    both_ways = partial(_both_ways, x=x, padding=padding)
    run = {"eval": torch.no_grad()(forward), "train forward": forward}.get(mode, both_ways)
    return {"torch": Call(partial(run, theirs)), "fastattn": Call(partial(run, ours))}


def _forward(layer: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    return layer(x, x, x, key_padding_mask=padding, need_weights=False)[0].masked_fill(padding[..., None], 0)


def _both_ways(layer: nn.Module, x: Tensor, padding: Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    _forward(layer, x, padding).sum().backward()


if __name__ == "__main__":
    main()
