"""PyTorch's kernels as a backend: what it asks of them where no test can run them, and what it does for them."""

import warnings
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fastattn
from fastattn import Mask
from fastattn.backends import aten, cpu, objections
from fastattn.spec import Spec
from fastattn.testing import CASES, make_inputs, run

NAMED = {case.name: case for case in CASES}


@pytest.mark.parametrize(
    ("capability", "dtype", "H_kv", "kernel"),
    [
        ((9, 0), torch.bfloat16, 2, "_scaled_dot_product_flash_attention"),
        ((8, 0), torch.float32, 2, "_scaled_dot_product_efficient_attention"),
        ((7, 5), torch.float16, 4, "_scaled_dot_product_efficient_attention"),
    ],
    ids=str,
)
def test_calls_of_kernels_for_gpus_fit_their_schemas(capability, dtype, H_kv, kernel):
    """On tensors without memory: PyTorch's own shape functions accept every argument, and say what shapes come out."""
    called = []

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func.name())
            return func(*args, **(kwargs or {}))

    spec = Spec(Mask(causal=True), 0.125)
    with mock.patch("torch.cuda.get_device_capability", return_value=capability), Calls():
        q, do = (torch.empty(2, 4, 50, 64, dtype=dtype, device="meta") for _ in range(2))
        k, v = (torch.empty(2, H_kv, 50, 64, dtype=dtype, device="meta") for _ in range(2))
        o, lse = aten.forward(q, k, v, spec)
        assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, dtype, (2, 4, 50), torch.float32)
        gradients = aten.backward(do, lse, q, k, v, o, lse, spec, (True, True, True, False, False, False))
        assert [(x.shape, x.dtype) for x in gradients[:3]] == [(x.shape, dtype) for x in (q, k, v)]
    assert f"aten::{kernel}" in called
    assert f"aten::{kernel}_backward" in called


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": torch.float64}, "q must be float32, bfloat16 or float16 on a GPU"),
        ({"D": 36}, "the head dims must be equal, multiples of 8 and at most 256, got 36 and 36"),
        ({"n_k": 60}, "a causal mask must have as many queries as keys on a GPU, got 50 and 60"),
    ],
    ids=lambda x: str(x),
)
def test_what_its_kernels_for_gpus_do_not_mean_is_refused(change, why):
    n_k, D, dtype = change.get("n_k", 50), change.get("D", 64), change.get("dtype", torch.float16)
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)), FakeTensorMode():
        q, k = (torch.empty(1, 2, n, D, dtype=dtype, device="cuda") for n in (50, n_k))
        assert any(why in sentence for sentence in aten.unsupported(q, k, k, Spec(Mask(causal=True), 1.0)))


def test_deterministic_mode_is_what_it_was_before():
    with aten._deterministic(torch.device("cuda"), wanted=True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with aten._deterministic(torch.device("cuda"), wanted=False):
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("case", ["plain", "causal", "wide-values", "grouped-heads"])
def test_output_has_the_bits_of_torchs_own_function(case):
    inputs = make_inputs(NAMED[case], torch.float32)
    o = run(inputs, "torch")["o"]
    q, k, v = inputs.q, *(x.repeat_interleave(inputs.q.shape[1] // x.shape[1], 1) for x in (inputs.k, inputs.v))
    v = torch.nn.functional.pad(v, (0, max(0, q.shape[3] - v.shape[3])))
    q, k = (torch.nn.functional.pad(x, (0, v.shape[3] - x.shape[3])) for x in (q, k))
    scale = inputs.options["scale"]
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=inputs.mask.causal, scale=scale)
    assert torch.equal(o, theirs[..., : o.shape[3]])


def test_a_bias_is_not_rounded():
    x, bias = torch.ones(1, 1, 4, 8, dtype=torch.bfloat16), torch.zeros(4, 4)
    assert objections(aten, x, x, x, Spec(Mask(), 1.0, bias=bias)) == [
        "bias must not be rounded, got torch.float32 beside torch.bfloat16"
    ]


def test_it_serves_fp64_in_silence_and_warns_where_it_stands_in(monkeypatch):
    x = torch.randn(1, 2, 9, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fastattn.explain(x.double(), x.double(), x.double()).backend == "torch"
        fastattn.attention(x.double(), x.double(), x.double())
    monkeypatch.setattr(cpu, "unavailable", lambda device: "needs a compiler")
    with pytest.warns(fastattn.FallbackWarning, match="skips padding is missing here: cpu: needs a compiler"):
        fastattn.attention(x, x, x)
