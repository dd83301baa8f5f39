"""Rivals' kernels on the machine, in the place of a backend of ours: FlexAttention's, and those of Triton's tutorial.

PyTorch without CUDA can generate FlexAttention's for CUDA where nothing asks for a GPU: what does is replaced here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._dynamo import device_interface
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import compile_fx, graph, scheduler
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention
from torch.utils._pytree import tree_map_only

from fastattn.spec import Mask
from fastattn.testing import Inputs, run

from . import gpu
from .launch import Gpu

_ROWS = 8  # of the sum of dO * O, in a block


def flex(on: Gpu, inputs: Inputs) -> tuple[Tensor, ...]:
    """o and the gradients of q, k and v, by FlexAttention on that GPU; of the mask what it has words for.

    Raises:
        AssertionError: they are not those of the formula.
    """
    (B, _, n_q, _), n_k, shown = inputs.q.shape, inputs.k.shape[2], None
    if inputs.mask.features():
        shown = flex_attention.create_block_mask(_shown(inputs.mask, n_q, n_k), B, None, n_q, n_k, device="cpu")
    compiler = aot_autograd(
        fw_compiler=lambda traced, _: _Generated(on, traced),
        bw_compiler=lambda traced, _: _Generated(on, traced),
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()
    with mock.patch.object(flex_attention, "_validate_device", _allowed):  # that CPUs compute no gradients
        call = torch.compile(flex_attention.flex_attention, fullgraph=True, backend=compiler)
        return _right(inputs, lambda q, k, v: call(q, k, v, block_mask=shown))


def tutorial(path: Path, inputs: Inputs) -> tuple[Tensor, ...]:
    """o and the gradients of q, k and v, by 06-fused-attention.py of Triton's tutorials, on the GPU of Triton's driver.

    Args:
        path: of that file, https://github.com/triton-lang/triton/tree/main/python/tutorials.
        inputs: fp16, without padding, as many queries as keys; of masks causality.

    Raises:
        AssertionError: they are not those of the formula, or the tutorial has no word for the inputs.
    """
    assert inputs.mask.features() <= {"causal"}, "the tutorial has no mask but a causal one"
    with mock.patch.dict(os.environ, {"PYTEST_VERSION": "any"}):  # one configuration, in the place of tuning
        module = _imported(path.read_text())
    return _right(inputs, lambda q, k, v: module.attention(q, k, v, inputs.mask.causal, q.shape[3] ** -0.5, False))


def _right(inputs: Inputs, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
    """o and the gradients of q, k and v by a rival's call, where they are those of the formula."""
    # Padding is NaN in these tests, which FlexAttention multiplies by 0.
    q, k, v, do = (x.nan_to_num() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o = call(q, k, v)
    result = o.detach(), *torch.autograd.grad(o, (q, k, v), do)
    expected = run(replace(inputs, dlse=torch.zeros_like(inputs.dlse)), "reference")
    for actual, name in zip(result, ("o", "dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(actual, expected[name], rtol=0.05, atol=0.05 * expected[name].abs().max().item())
    return result


def _allowed(*tensors: Tensor) -> None:
    """In the place of a check; a mock would end Dynamo's trace."""


def _shown(mask: Mask, n_q: int, n_k: int) -> Callable:
    """The mask as a function of indices, in FlexAttention's words."""
    (left, right), documents = mask.window, mask.segment_ids
    assert mask.features() <= {"causal", "window", "real_queries", "real_keys", "segment_ids"}
    of_q, of_k = mask.positions(n_q, n_k, torch.device("cpu")) if documents else (None, None)

    def shows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        result = j >= 0
        if documents is not None:
            result = result & (documents[0][b, i] == documents[1][b, j]) & (documents[0][b, i] >= 0)
        if mask.real_queries is not None:
            result = result & mask.real_queries[b, i]
        if mask.real_keys is not None:
            result = result & mask.real_keys[b, j]
        if documents is not None:  # in which causality goes by the place in a document
            i, j = of_q[b, i], of_k[b, j]
        if mask.causal:
            result = result & (i >= j)
        if left is not None:
            result = result & (i - j <= left)
        if right is not None:
            result = result & (j - i <= right)
        return result

    return shows


class _Generated:
    """A graph in code for CUDA, which is generated in its first call, and runs on tensors of the CPU."""

    def __init__(self, on: Gpu, traced: torch.fx.GraphModule) -> None:
        self._on, self._traced, self._run = on, traced, None

    def __call__(self, *inputs: object) -> object:
        with _looks_like_cuda(self._on):
            if self._run is None:
                self._run = _imported(_generated(self._traced, inputs)).call
            return self._run([*inputs])


def _generated(traced: torch.fx.GraphModule, inputs: tuple) -> str:
    """The module that Inductor writes for a GPU."""

    def stop(of_graph: graph.GraphLowering) -> None:
        raise _Written(of_graph.codegen()[0].value)

    with FakeTensorMode(), torch.no_grad(), mock.patch.object(graph.GraphLowering, "compile_to_module", stop):
        for node in traced.graph.nodes:
            node.meta["val"] = tree_map_only(Tensor, _elsewhere, node.meta.get("val"))
            if node.target is torch.ops.higher_order.flex_attention:  # which leaves it out on CPUs
                node.update_arg(6, node.args[6] | {"OUTPUT_LOGSUMEXP": True})
        try:
            compile_fx.compile_fx_inner(traced, tree_map_only(Tensor, _elsewhere, inputs))
        except _Written as written:
            source = written.args[0]
    for here, instead in (
        ("from torch._C import _cuda_getCurrentRawStream as get_raw_stream", "get_raw_stream = int"),
        (
            "torch._C._dynamo.guards._empty_strided_cuda",
            "lambda *of, empty=torch.empty_strided: empty(*of[:2], dtype=of[2])",
        ),
    ):
        source = source.replace(here, instead)
    return re.sub(r""", eviction_policy=["']\w+["']""", "", source)  # hints for a cache, which the machine has not


class _Written(BaseException):
    """Ends Inductor's work where its code is written."""


def _elsewhere(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


def _imported(source: str) -> ModuleType:
    """The module of that text, as a file: Triton reads the source of its kernels again."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location("generated", file.name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    Path(file.name).unlink()
    return module


class _Template:
    """In the place of Inductor's launcher of a kernel with constant tiles: its last three arguments are the grid."""

    def __init__(self, num_warps: int, num_stages: int, **of_inductor: object) -> None:
        self._options = {"num_warps": num_warps, "num_stages": num_stages}

    def __call__(self, kernel: triton.JITFunction) -> _Template:
        self._kernel = kernel
        return self

    def run(self, *arguments: object, stream: int) -> None:
        self._kernel[arguments[-3:]](*arguments[:-3], **self._options)


class _Rows:
    """In the place of its launcher of a sum over rows."""

    def __init__(self, **of_inductor: object) -> None:
        pass

    __call__ = _Template.__call__

    def run(self, *arguments: object, stream: int) -> None:
        self._kernel[(triton.cdiv(arguments[-2], _ROWS),)](*arguments, XBLOCK=_ROWS, num_warps=2)


@contextlib.contextmanager
def _looks_like_cuda(on: Gpu) -> Iterator[None]:
    """In this block PyTorch takes that GPU to be there, as far as Inductor asks."""
    major, minor = divmod(on.arch, 10)
    properties = SimpleNamespace(
        name="", gcnArchName="", major=major, minor=minor, multi_processor_count=on.multiprocessors, warp_size=32,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=gpu.SHARED_BYTES[on.arch],
    )  # fmt: skip

    def here(*arguments: object) -> SimpleNamespace:
        return properties

    with contextlib.ExitStack() as stack:
        for where, name, value in (
            (torch.cuda, "get_device_properties", here),
            (torch.cuda, "_get_device_properties", here),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "set_device", lambda device: None),
            (torch.cuda, "_exchange_device", lambda device: 0),
            (torch.cuda, "_maybe_exchange_device", lambda device: 0),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "synchronize", lambda *device: None),
            (torch.cuda, "get_rng_state", lambda *device: torch.get_rng_state()),
            (torch.cuda, "set_rng_state", lambda *state: None),
            (device_interface.CudaInterface.Worker, "get_device_properties", staticmethod(here)),
            (device_interface.CudaInterface, "get_compute_capability", staticmethod(lambda *device: on.arch)),
            (device_interface.CudaInterface, "is_available", staticmethod(lambda: True)),
            (
                sys.modules["torch._higher_order_ops.flex_attention"],
                "_permute_strides",
                lambda x, strides: x,
            ),  # copies; as it is, it is contiguous
            (scheduler, "has_triton", lambda: True),
            (triton_helpers, "set_driver_to_gpu", lambda: None),
            (triton_heuristics, "template", _Template),
            (triton_heuristics, "persistent_reduction", _Rows),
            (AsyncCompile, "triton", lambda _, name, source, **options: getattr(_imported(source), name)),
        ):
            stack.enter_context(mock.patch.object(where, name, value, create=True))
        stack.enter_context(torch._inductor.config.patch(force_disable_caches=True, compile_threads=1))
        yield
