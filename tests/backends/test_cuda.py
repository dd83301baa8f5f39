"""Calls that the CUDA backend takes, asked with tensors that have no memory: no GPU is needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import fresh_python
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastattn.backends import OPTIONAL, aten, build, cpu, cuda, hopper, objections, select
from fastattn.spec import FEATURES, Mask, Spec

SPEC = Spec(Mask(), 1.0)


@pytest.fixture
def gpu(monkeypatch) -> Iterator:
    """A function that makes the GPU one of a compute capability; the CUDA module is there, and no kernel runs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(build.CudaModule, "unavailable_on", lambda self, capability: None)
    monkeypatch.setenv("FASTATTN_SELF_CHECK", "0")
    monkeypatch.setattr(aten, "unavailable", lambda device: "it would be first without a mask")

    def of(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    with FakeTensorMode():
        yield of


def on_gpu(dtype: torch.dtype = torch.float16, head_dim: int = 64) -> torch.Tensor:
    return torch.empty(1, 2, 3, head_dim, dtype=dtype, device="cuda")


def refusals(q: torch.Tensor, v: torch.Tensor | None = None, **options: object) -> list[str]:
    return objections(cuda, q, q, q if v is None else v, SPEC, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_and_head_dims_that_are_taken(gpu, dtype):
    gpu(8, 0)
    for head_dim in range(1, 257):
        assert refusals(on_gpu(dtype, head_dim)) == []


def test_every_feature_is_computed():
    assert cuda.features(torch.device("cuda")) == FEATURES


def test_what_is_refused_is_a_sentence(gpu):
    gpu(7, 5)
    assert refusals(on_gpu()) == refusals(on_gpu(torch.float32)) == []
    assert refusals(on_gpu(torch.bfloat16)) == ["needs compute capability 8.0 or later for bfloat16, got 7.5"]
    assert refusals(on_gpu(torch.float64)) == ["q must be float32, bfloat16 or float16, got torch.float64"]
    assert refusals(on_gpu(head_dim=257)) == [
        "takes head dims from 1 to 256, got 257 for q and k",
        "takes head dims from 1 to 256, got 257 for v",
    ]
    for function, what in OPTIONAL.items():
        expected = [] if function.startswith("forward") else [f"does not compute {what} on cuda"]
        assert refusals(on_gpu(), function=function) == expected
    gpu(7, 0)
    assert refusals(on_gpu()) == ["needs compute capability 7.5 or later, got 7.0"]


def test_bf16_is_refused_where_the_code_is_for_older_gpus(gpu, monkeypatch):
    """There its kernels are empty, and would leave the outputs as they were allocated."""
    gpu(9, 0)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5+PTX")
    assert refusals(on_gpu()) == refusals(on_gpu(torch.float32)) == []
    (why,) = refusals(on_gpu(torch.bfloat16))
    assert why == "needs compute capability 8.0 or later for bfloat16, got code for 7.5 by TORCH_CUDA_ARCH_LIST"
    for chosen in ("8.0+PTX", "7.5+PTX;9.0", "7.5;8.6+PTX", "Hopper"):  # the last is refused when it is to be built
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", chosen)
        assert refusals(on_gpu(torch.bfloat16)) == []


def test_rocm_is_refused(gpu, monkeypatch):
    gpu(9, 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    (why,) = refusals(on_gpu())
    assert why.startswith("needs a torch for NVIDIA GPUs, got torch")


def test_other_devices_are_refused_before_anything_is_asked_of_a_gpu():
    x = torch.empty(1, 2, 3, 64, dtype=torch.bfloat16)
    assert refusals(x) == ["q must be on an NVIDIA GPU, got cpu"]
    assert cuda.by_name_only(x.device) is None


@pytest.mark.parametrize(
    ("capability", "triton_is_there", "served_by"),
    [((7, 5), True, "cuda"), ((8, 0), True, "triton"), ((7, 5), False, "cuda"), ((9, 0), False, "cuda")],
)
def test_it_serves_where_triton_does_not(gpu, monkeypatch, capability, triton_is_there, served_by):
    gpu(*capability)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if not triton_is_there:
        monkeypatch.setitem(sys.modules, "triton", None)  # which makes its import fail
        monkeypatch.setattr(hopper, "unavailable", lambda device: "needs Triton")  # which it would, if not imported yet
    cuda._triton_is_there.cache_clear()
    try:
        assert served_by == select(on_gpu(), on_gpu(), on_gpu(), SPEC).NAME
        assert select(on_gpu(), on_gpu(), on_gpu(), SPEC, "cuda") is cuda
        by_name_only = refusals(on_gpu(), named=False)
    finally:
        cuda._triton_is_there.cache_clear()
    expected = "serves by name where Triton runs: on compute capability 8.0 and later"
    assert by_name_only == ([] if served_by == "cuda" else [expected])


def test_a_module_that_cannot_be_had_is_an_objection(gpu, monkeypatch):
    gpu(7, 5)
    monkeypatch.setattr(build.CudaModule, "unavailable_on", lambda self, capability: f"no code for {capability}")
    assert refusals(on_gpu()) == ["no code for (7, 5)"]


def test_a_call_on_one_device_builds_nothing_for_the_other(gpu, monkeypatch):
    built = []
    monkeypatch.setattr(build.CudaModule, "unavailable_on", lambda self, capability: built.append(self))
    monkeypatch.setattr(build.CompiledModule, "unavailable", lambda self: built.append(self))
    gpu(7, 5)
    for x, backend, module in ((on_gpu(), cuda, build.CUDA), (torch.empty(1, 2, 3, 64), cpu, build.CPU)):
        assert select(x, x, x, SPEC) is backend
        assert built == [module]
        built.clear()


def test_it_needs_no_triton():
    code = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ImportError(f"{name} is forbidden here")

sys.meta_path.insert(0, Forbidden())
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
import fastattn
from fastattn.backends import build
torch.version.cuda = "13.0"
torch.cuda.get_device_capability = lambda device: (9, 0)
build.CudaModule.unavailable_on = lambda self, capability: None
with FakeTensorMode():
    q = torch.empty(1, 2, 3, 64, device="cuda")
    print(fastattn.explain(q, q, q).backend)
"""
    done = fresh_python.run(code)
    assert (done.stdout, done.returncode) == ("cuda\n", 0), done.stderr
