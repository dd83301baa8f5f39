"""Prints how long short calls on the CPU take beside PyTorch's own, as ratios: their time is what surrounds the kernel.

    python benchmarks/short_calls.py [--rounds 200] [--filter "forward"]

Each sample is the CPU time of one thread, in which other work on the machine disturbs little; both libraries take
turns, and the ratio of a row is the median over the rounds. Every answer is compared with PyTorch's before it is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn
from fastattn import Mask
from fastattn.bench.cases import has_words
from fastattn.bench.writing import positive_int

B, H, D = 1, 8, 64
TERMS = ("plain", "padding", "bias", "ALiBi")


@dataclass(frozen=True)
class Pair:
    """One call in both libraries.

    name: what is called. limit: the most that `ours` may take, in units of the time of `torchs`.
    """

    name: str
    limit: float
    ours: Callable[[], Tensor | tuple[Tensor, ...]]
    torchs: Callable[[], Tensor | tuple[Tensor, ...]]


def attention_pair(terms: str, n_q: int, n_k: int, backward: bool) -> Pair:
    """`fastattn.attention` beside `scaled_dot_product_attention`, which takes every term as its attn_mask."""
    q, k, v = (torch.randn(B, H, n, D, requires_grad=backward) for n in (n_q, n_k, n_k))
    do = torch.randn(B, H, n_q, D)
    mask, terms_of_call, attn_mask = None, {}, None
    if terms == "padding":
        real_keys = (torch.arange(n_k) < n_k - n_k // 4).expand(B, n_k).contiguous()
        mask, attn_mask = Mask(real_keys=real_keys), real_keys[:, None, None]
    elif terms == "bias":
        attn_mask = torch.randn(B, H, n_q, n_k)
        terms_of_call = {"bias": attn_mask}
    elif terms == "ALiBi":
        slopes = 2.0 ** -torch.arange(1.0, H + 1)
        distance = (torch.arange(n_q)[:, None] - torch.arange(n_k)).abs()
        terms_of_call, attn_mask = {"alibi_slopes": slopes}, (-slopes[:, None, None] * distance)[None]

    def with_gradients(call: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(call(), (q, k, v), do)

    def ours() -> Tensor:
        return fastattn.attention(q, k, v, mask, **terms_of_call)

    def torchs() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask)

    what = "forward and backward" if backward else "forward"
    if backward:
        ours, torchs = with_gradients(ours), with_gradients(torchs)
    return Pair(f"n_q {n_q}, n_k {n_k}, {terms}, {what}", 1.0 if terms == "plain" else 1.3, ours, torchs)


def module_pair(padding: bool, need_weights: bool, backward: bool) -> Pair:
    """MultiHeadAttention, B1 L16 E256, beside torch.nn.MultiheadAttention with the same parameters."""
    E, L = 256, 16
    torchs = nn.MultiheadAttention(E, H, batch_first=True).train(backward)
    ours = fastattn.MultiHeadAttention(E, H, batch_first=True).train(backward)
    ours.load_state_dict(torchs.state_dict())
    x = torch.randn(B, L, E)
    options = {"need_weights": need_weights}
    if padding:
        options["key_padding_mask"] = (torch.arange(L) >= L - 4).expand(B, L).contiguous()

    def call(module: nn.Module) -> Callable[[], tuple[Tensor, ...]]:
        parameters = list(module.parameters())

        def output() -> tuple[Tensor, ...]:
            return tuple(y for y in module(x, x, x, **options) if y is not None)

        return (lambda: torch.autograd.grad(output()[0].sum(), parameters)) if backward else output

    words = ("padding" * padding, "weights" * need_weights, "forward and backward" if backward else "forward")
    name = ", ".join([f"MultiHeadAttention B{B} L{L} E{E}", *filter(None, words)])
    return Pair(name, 1.0, call(ours), call(torchs))


def paged_pair() -> Pair:
    """A layer of a step of generation for four requests: pages, beside a row of memory for each request."""
    requests, page, pages = 4, 16, 8
    lengths = torch.tensor([20, 60, 128, 7])
    table = torch.arange(requests * pages, dtype=torch.int32).view(requests, pages)
    q, k, v = (torch.randn(requests, H, D) for _ in range(3))
    k_rows, v_rows = (torch.randn(requests, H, pages * page, D) for _ in range(2))
    k_pages, v_pages = (
        x.unflatten(2, (pages, page)).transpose(1, 2).flatten(0, 1).transpose(1, 2).clone() for x in (k_rows, v_rows)
    )
    newest = torch.arange(requests), slice(None), lengths - 1
    seen = (torch.arange(pages * page) < lengths[:, None])[:, None, None]

    def ours() -> Tensor:
        return fastattn.attention_paged(q, k_pages, v_pages, table, lengths, k=k, v=v)

    def torchs() -> Tensor:
        k_rows[newest], v_rows[newest] = k, v
        return F.scaled_dot_product_attention(q[:, :, None], k_rows, v_rows, seen)[:, :, 0]

    return Pair(f"attention_paged, {requests} requests with new tokens, forward", 1.0, ours, torchs)


def pairs() -> list[Pair]:
    """Every pair, without gradients wherever the name does not have them."""
    lengths = [(1, 16, False), (1, 512, False), (16, 16, True)]
    calls = [attention_pair(terms, *of_call) for of_call in lengths for terms in TERMS]
    modules = [
        (False, False, False),
        (True, False, False),
        (False, True, False),
        (False, False, True),
        (True, False, True),
    ]
    return [*calls, *(module_pair(*of_module) for of_module in modules), paged_pair()]


def check(pair: Pair) -> None:
    """Raises AssertionError where the two answers differ by more than rounding."""
    torch.testing.assert_close(pair.ours(), pair.torchs(), rtol=1e-4, atol=1e-5)


def seconds(call: Callable[[], object], calls: int) -> float:
    """The CPU time of this thread for one call, as the mean of so many."""
    start = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - start) / calls


def in_turns(
    ours: Callable[[], object], theirs: Callable[[], object], rounds: int, calls: int
) -> tuple[float, float, float]:
    """Median `seconds` of two calls in so many rounds, and the median ratio; after a round that does not count."""
    seconds(ours, calls), seconds(theirs, calls)
    samples = [(seconds(ours, calls), seconds(theirs, calls)) for _ in range(rounds)]
    return *map(statistics.median, zip(*samples, strict=True)), statistics.median(a / b for a, b in samples)


def main() -> None:
    """Prints a row for each pair: both times in microseconds, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive_int, default=200)
    parser.add_argument("--calls", type=positive_int, default=50, help="calls in each sample")
    parser.add_argument("--filter", default="", metavar="WORDS", help="only rows with these words in their name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'call':58} {'fastattn':>9} {'PyTorch':>9} {'ratio':>6} {'limit':>6}")
    for pair in pairs():
        if not has_words(pair.name, options.filter):
            continue
        with torch.set_grad_enabled("backward" in pair.name):
            check(pair)
            ours, torchs, ratio = in_turns(pair.ours, pair.torchs, options.rounds, options.calls)
        print(f"{pair.name:58} {ours * 1e6:8.1f}u {torchs * 1e6:8.1f}u {ratio:6.2f} {pair.limit:6.1f}", flush=True)


if __name__ == "__main__":
    main()
