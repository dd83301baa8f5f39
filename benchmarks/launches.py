"""Prints how long the CPU takes for a call of a backend of Triton's kernels, in launches of one that does nothing.

    python benchmarks/launches.py [--backend hopper] [--rounds 50] [--filter "forward"]

A short call on a GPU takes as long as its launches, unless they are captured in a graph. No GPU is needed: Triton
compiles for one that need not be there, and the launch ends where it would hand the kernel to the driver. So what the
driver takes is in none of these times, nor is PyTorch's allocation of memory on a GPU: tensors are on the CPU. Each
sample is the CPU time of one thread; the calls take turns, and a row is the median over the rounds. "The backend alone"
is without what `attention` and autograd do around it; "a Function alone" is what autograd takes for a Function that
saves as much and computes nothing, which no call can be below that has a gradient. Needs Triton.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

import fastattn
from benchmarks.gpu.compiling import NoGPU
from benchmarks.short_calls import in_turns
from fastattn import Mask
from fastattn.backends import backend_by_name
from fastattn.bench.cases import has_words
from fastattn.bench.writing import positive_int
from fastattn.spec import Spec

B, H, N, D = 2, 8, 128, 64
ARCHS = {"triton": 80, "hopper": 90}
"""What the kernels of each backend are compiled for."""


@triton.jit
def nothing_kernel(x, n):
    """Does nothing with a tensor and a number."""
    tl.static_assert(True)


class Nothing(torch.autograd.Function):
    """Saves what attention saves, and computes nothing."""

    @staticmethod
    def forward(ctx, q, k, v, lse):
        o = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


@contextlib.contextmanager
def handed_to(take: Callable[..., None], module: ModuleType, arch: int) -> Iterator[None]:
    """In this block launches of a backend on tensors in the CPU's memory, as for a GPU of that arch, end at the driver.

    Args:
        take: called instead with the compiled kernel and what Triton would hand over: three lengths of the grid, the
            stream, five things that are the kernel's, and its arguments.
    """
    properties = SimpleNamespace(multi_processor_count=132)

    def no_handles(self: CompiledKernel) -> None:
        """Plain, since a mock would take as long as a launch."""

    driver.set_active(NoGPU(arch))
    with (
        mock.patch.object(CompiledKernel, "_init_handles", no_handles),
        mock.patch.object(CompiledKernel, "run", property(lambda kernel: functools.partial(take, kernel))),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(arch, 10)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(torch.cuda, "device_of", contextlib.nullcontext),
        mock.patch.object(module, "_device_objections", return_value=[]),
    ):
        yield


def calls(module: ModuleType) -> dict[str, Callable[[], object]]:
    """What is timed of a backend, by name: "training" is a forward that gradients are wanted of."""
    q, k, v = (torch.randn(B, H, N, D, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    do = torch.randn(B, H, N, D, dtype=torch.bfloat16)
    real = torch.ones(B, N, dtype=torch.bool)
    documents = real.long()
    masks = {
        "plain": None,
        "causal": Mask(causal=True),
        "padding": Mask(real_keys=real),
        "documents": Mask(causal=True, segment_ids=(documents, documents)),
    }

    def backward(o: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)

    named: dict[str, Callable[[], object]] = {}
    for name, mask in masks.items():
        attend = functools.partial(fastattn.attention, q, k, v, mask, backend=module.NAME)
        named |= {f"forward, {name}": attend, f"training, {name}": attend, f"backward, {name}": backward(attend())}
    spec, wanted = Spec(Mask(), D**-0.5), (True, True, True, False, False, False)
    inputs = tuple(x.detach() for x in (q, k, v))
    o, lse = module.forward(*inputs, spec)
    named["forward, the backend alone"] = lambda: module.forward(*inputs, spec)
    named["backward, the backend alone"] = lambda: module.backward(do, None, *inputs, o, lse, spec, wanted)
    nothing = functools.partial(Nothing.apply, q, k, v, lse)
    return named | {"training, a Function alone": nothing, "backward, a Function alone": backward(nothing())}


def main() -> None:
    """Prints a row for each call: launches of Triton, microseconds, and the ratio to a launch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=ARCHS, default="triton")
    parser.add_argument("--rounds", type=positive_int, default=50)
    parser.add_argument("--calls", type=positive_int, default=50, help="calls in each sample")
    parser.add_argument("--filter", default="", metavar="WORDS", help="only rows with these words in their name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    launched = 0

    def count(*_: object) -> None:
        nonlocal launched
        launched += 1

    module = backend_by_name(options.backend)
    with handed_to(count, module, ARCHS[options.backend]):
        x = torch.zeros(16)
        bare = lambda: nothing_kernel[(1,)](x, 7, num_warps=4)  # noqa: E731
        print(f"{'call':28} {'launches':>8} {'time':>8} {'ratio':>6}")
        for name, call in calls(module).items():
            if not has_words(name, options.filter):
                continue
            with torch.set_grad_enabled(name.startswith("training")):
                call()
                before = launched
                call()
                launches = launched - before
                time, _, ratio = in_turns(call, bare, options.rounds, options.calls)
            print(f"{name:28} {launches:8} {time * 1e6:7.1f}u {ratio:6.1f}", flush=True)


if __name__ == "__main__":
    main()
