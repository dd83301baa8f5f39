"""Every kind of argument of scaled_dot_product_attention, given to torch's, to the patched one and to fastattn's.

The patched function answers as torch's own does, or raises the same class. fastattn's function does so too, or names
the argument that it refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.masked import masked_tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing._internal.two_tensor import TwoTensor

import fastattn

TORCHS_OWN = F.scaled_dot_product_attention
TOLERANCES = {  # of a value that two kernels round in another order
    torch.float64: {"rtol": 1e-7, "atol": 1e-7},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}


def outcome(function, arguments: tuple, options: dict) -> Tensor | type[Exception]:
    try:
        return function(*arguments, **options)
    except Exception as error:
        return type(error)


def assert_same_outcome(actual: object, expected: object, dropped: bool = False) -> None:
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        assert actual is expected
        return
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if not dropped:
        torch.testing.assert_close(actual, expected, equal_nan=True, **TOLERANCES[expected.dtype])


# --- random calls

RARELY = st.sampled_from([False] * 11 + [True])  # integers() would prefer the ends of its range
SELDOM = st.sampled_from([False] * 3 + [True])
DTYPES = st.sampled_from([torch.float32] * 5 + [torch.float64, torch.float16, torch.bfloat16])
LENGTHS = st.sampled_from([1] * 4 + [2, 3, 4, 5, 7, 8] * 3 + [0])
FLAGS = (0, 1, None, np.bool_(True), torch.tensor(True), 1.0)  # none of which torch takes for a bool
DROPOUTS = (0, False, np.float32(0), np.float64(0), np.int64(0), np.bool_(False), torch.tensor(0.0), torch.tensor(0))
DROPOUTS += (0.5, torch.tensor(0.5), np.float16(0.5), 1.0, True)
NO_DROPOUTS = (1.5, -0.5, math.nan, None, "0", 0j, [0.0], torch.zeros(1), np.zeros(()))
NO_DROPOUTS += (torch.tensor(0.0, requires_grad=True),)
# All are positive: torch's causal kernel on the CPU answers NaN to others.
SCALES = (0.5, 2, True, np.float32(0.5), np.float64(2), np.int32(2), np.bool_(True), np.longdouble(0.5))
SCALES += (torch.tensor(0.5), torch.tensor(2), torch.tensor(True), torch.nn.Parameter(torch.tensor(0.5), False))
NO_SCALES = (math.nan, math.inf, 10**400, "1", 1j, torch.ones(1), np.ones(()), torch.tensor(0.5, requires_grad=True))
MASK_DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8)


@st.composite
def shapes_that_broadcast(draw: st.DrawFn, target: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to this one: with dimensions missing from the left, or of 1."""
    kept = target[draw(st.sampled_from(range(len(target) + 1))) :] if draw(st.booleans()) else target
    return tuple(1 if draw(SELDOM) else n for n in kept)


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple, dict]:
    """Positional and keyword arguments, most of them right."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(DTYPES)
    leading = tuple(
        draw(st.sampled_from([1, 2, 3] * 10 + [0])) for _ in range(draw(st.sampled_from([0, 1, 2, 2, 2, 3])))
    )
    L, S, E, E_v = (draw(LENGTHS) for _ in range(4))
    of_q, of_k, of_v = (draw(shapes_that_broadcast(leading)) if draw(SELDOM) else leading for _ in range(3))
    enable_gqa = draw(SELDOM)
    if enable_gqa and min(len(x) for x in (of_q, of_k, of_v)):
        leading = (*leading[:-1], 4)
        heads = [draw(st.sampled_from([1, 2, 4])) for _ in range(2)] if draw(SELDOM) else [2, 2]
        of_q, of_k, of_v = ((*x[:-1], n) for x, n in zip((of_q, of_k, of_v), (4, *heads), strict=True))

    def random(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(of)

    query, key, value = random(*of_q, L, E), random(*of_k, S, E), random(*of_v, S, E_v)
    wrong = draw(st.sampled_from(range(5))) if draw(RARELY) else None
    if wrong is not None:
        query, key, value = [
            (query, random(*of_k, S, E + 1), value), (query, key, random(*of_v, S + 1, E_v)),
            (query, key, value.double()), (query.sum(-1), key, value), ([1.0], key, value),
        ][wrong]  # fmt: skip
    options = {}
    if draw(st.booleans()):
        scores = (*leading, L, S)
        mask_dtype = (
            draw(st.sampled_from(MASK_DTYPES)) if draw(RARELY) else dtype if draw(st.booleans()) else torch.bool
        )
        shape = (1, *scores) if draw(RARELY) else draw(shapes_that_broadcast(scores))
        values = random(*shape, of=torch.float32)
        mask = (values if mask_dtype.is_floating_point else values > 0).to(mask_dtype)
        if mask.is_floating_point():
            mask = mask.masked_fill(values > 0.5, -math.inf) if draw(SELDOM) else mask
            mask.requires_grad_(draw(SELDOM))
        options["attn_mask"] = mask
    if draw(SELDOM):
        options["dropout_p"] = draw(st.sampled_from(NO_DROPOUTS if draw(SELDOM) else DROPOUTS))
    if draw(SELDOM):
        options["is_causal"] = draw(st.sampled_from(FLAGS)) if draw(RARELY) else True
    positional = (query, key, value)
    for name in ("attn_mask", "dropout_p", "is_causal"):
        if name not in options or draw(st.booleans()):
            break
        positional += (options.pop(name),)
    if draw(SELDOM):
        options["scale"] = draw(st.sampled_from(NO_SCALES if draw(SELDOM) else SCALES))
    if enable_gqa:
        options["enable_gqa"] = draw(st.sampled_from(FLAGS)) if draw(RARELY) else True
    return positional, options


def dropout_of(arguments: tuple, options: dict) -> object:
    return arguments[4] if len(arguments) > 4 else options.get("dropout_p", 0.0)


@settings(max_examples=300, deadline=None)
@given(calls())
def test_patched_calls_end_as_torchs_do(call):
    arguments, options = call
    expected = outcome(TORCHS_OWN, arguments, options)
    with fastattn.patch_sdpa() as patch:
        actual = outcome(F.scaled_dot_product_attention, arguments, options)
    dropped = isinstance(expected, Tensor) and 0 < float(dropout_of(arguments, options)) < 1
    assert_same_outcome(actual, expected, dropped)
    assert patch.computed + patch.left.total() == 1
    event(
        "by fastattn"
        if patch.computed
        else ("left: " if isinstance(expected, Tensor) else "refused: ") + str(next(iter(patch.left)))[:60]
    )


NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
NAMED = f"^({'|'.join((*NAMES, 'query, key and value', 'the heads of key and value', 'k and v'))}) must "
NAMED_OR_HUGE = f"{NAMED}|^int too large to convert to float"


@pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")
@settings(max_examples=300, deadline=None)
@given(calls())
def test_fastattns_own_function_ends_as_torchs_does_or_names_the_argument(call):
    arguments, options = call
    expected = outcome(TORCHS_OWN, arguments, options)
    actual = outcome(fastattn.scaled_dot_product_attention, arguments, options)
    if not isinstance(actual, Tensor):
        with pytest.raises((RuntimeError, TypeError, IndexError, OverflowError), match=NAMED_OR_HUGE):
            fastattn.scaled_dot_product_attention(*arguments, **options)
        return
    by_name = dict(zip(NAMES, arguments, strict=False)) | options
    if not isinstance(expected, Tensor):
        assert by_name["is_causal"]
        assert by_name["attn_mask"] is not None
    elif actual.shape == expected.shape or all(by_name[name].numel() for name in NAMES[:3]):
        assert_same_outcome(actual, expected, 0 < float(by_name.get("dropout_p", 0)) < 1)
    else:  # torch does not broadcast then
        end = -3 if by_name.get("enable_gqa") else -2
        leading = torch.broadcast_shapes(*(by_name[name].shape[:end] for name in NAMES[:3]))
        assert actual.shape == (*leading, *by_name["query"].shape[end:-1], by_name["value"].shape[-1])


Q, K = (torch.randn(2, 4, n, 8, generator=torch.Generator().manual_seed(n)) for n in (5, 7))
TAKEN = {  # what fastattn could refuse, and computes
    **{f"dropout_p={x!r} of {type(x).__name__}": ((Q, K, K, None, x), {}) for x in DROPOUTS if not 0 < float(x) < 1},
    **{f"scale={x!r} of {type(x).__name__}": ((Q, K, K), {"scale": x}) for x in SCALES},
    "mask of 1 dimension": ((Q[0], K[0], K[0], K[0, 0, :, 0]), {}),
    "bool mask of 1 dimension": ((Q[0, 0], K[0, 0], K[0, 0], torch.arange(7) < 4), {}),
    "mask of no dimension": ((Q[0], K[0], K[0], torch.tensor(False)), {}),
    "mask over no keys": ((Q, K[:, :, :0], K[:, :, :0], torch.ones(1, 1, 0).bool()), {}),
    "mask over the batch and no keys": ((Q, K[:, :, :0], K[:, :, :0], torch.ones(2, 1, 1, 0).bool()), {}),
    "no queries": ((Q[:, :, :0], K, K, torch.ones(0, 7).bool()), {}),
    "no heads": ((Q[:, :0], K[:, :0], K[:, :0], torch.ones(2, 1, 5, 7)), {}),
    "no samples": ((Q[:0], K[:0], K[:0], torch.ones(5, 7)), {"is_causal": False}),
    "grouped heads, broadcast batch": ((Q[:, :, :1], K[:1, :2], K[:, :2]), {"enable_gqa": True}),
    "grouped heads, fewer of keys": ((Q, K[:, :1], K[:, :2]), {"enable_gqa": True}),
    "grouped heads, fewer of values": ((Q[0], K[0], K[0, :2]), {"enable_gqa": True}),
    "five dimensions, mask of five": (
        (
            *(x.expand(3, *x.shape) for x in (Q, K, K)),
            torch.randn(3, 1, 1, 5, 7, generator=torch.Generator().manual_seed(0)),
        ),
        {},
    ),
    "five dimensions, mask of four": (
        (
            *(x.expand(3, *x.shape) for x in (Q, K, K)),
            torch.randn(2, 1, 1, 7, generator=torch.Generator().manual_seed(0)) < 0.7,
        ),
        {},
    ),
    "more dimensions of values": ((Q[0], K[0], K), {}),
    "more dimensions of queries": ((Q, K[0, 0], K[0, :1]), {}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name):
    if name == "no heads" and torch.__version__ < "2.13":
        pytest.skip("torch 2.10 and 2.11 divide by the number of heads, and the process ends")
    arguments, options = TAKEN[name]
    expected = TORCHS_OWN(*arguments, **options)
    assert_same_outcome(fastattn.scaled_dot_product_attention(*arguments, **options), expected)
    with fastattn.patch_sdpa() as patch:
        assert_same_outcome(F.scaled_dot_product_attention(*arguments, **options), expected)
    assert patch.computed == all(x.numel() for x in arguments[:3])


def test_a_mask_with_is_causal_hides_what_both_hide():
    """torch does so too, by some of its kernels; the patch leaves it to torch."""
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) < 0.7
    for attn_mask in (mask, torch.where(mask, 0.5, -math.inf)):
        expected = TORCHS_OWN(Q, K, K, mask.tril())
        torch.testing.assert_close(fastattn.scaled_dot_product_attention(Q, K, K, attn_mask, is_causal=True), expected)


# --- every type of tensor


class Plain(Tensor):
    """As users write one, to tell their tensors apart."""


class Switched(Tensor):
    """Without a __torch_function__."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def random(*shape: int) -> Tensor:
    return torch.randn(shape or (2, 4, 6, 8), generator=torch.Generator().manual_seed(math.prod(shape)))


def three(convert: Callable[[Tensor], object] = lambda x: x, of: Callable[[], Tensor] = random) -> Callable:
    """A call whose query, key and value are all of a kind."""
    return lambda attend: attend(*(convert(of() + i) for i in range(3)))


def fake(attend: Callable, inside: bool) -> Tensor:
    with FakeTensorMode():
        tensors = [random() for _ in range(3)]
        if inside:
            return attend(*tensors)
    return attend(*tensors)


def functional(attend: Callable, inside: bool) -> Tensor:
    plain = [random() + i for i in range(3)]
    with FunctionalTensorMode():
        tensors = [FunctionalTensor.to_functional(x) for x in plain]
        if inside:
            return torch._from_functional_tensor(attend(*tensors).elem)
    return attend(*tensors)


def inferred(attend: Callable) -> Tensor:
    with torch.inference_mode():
        return three()(attend)


def nested(layout: torch.layout, attend: Callable) -> Tensor:
    parts = [random(n, 4, 8) for n in (3, 5)]
    return attend(*(torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2) for _ in range(3)))


def of_one_nested(attend: Callable) -> Tensor:
    x = torch.nested.nested_tensor([random(n, 4, 8) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)
    return attend(x, x, x, dropout_p=0.0, scale=0.7)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(str(tmp_path_factory.mktemp("gloo") / "store"), 1),
        rank=0,
        world_size=1,
    )
    yield
    torch.distributed.destroy_process_group()


def distributed(attend: Callable) -> Tensor:
    mesh = init_device_mesh("cpu", (1,))
    # Of sharded ones torch takes half a minute to find out where to compute them.
    return three(lambda x: distribute_tensor(x, mesh, [Replicate()]))(attend)


COMPUTED, LEFT = "computed by fastattn", "left to torch"
COMPUTES, REFUSES, AS_TORCH = "computes", "refuses by name", "raises as torch does"
TENSORS = {  # who computes it under the patch, and what fastattn's own function does: the calls
    (COMPUTED, COMPUTES): {
        "torch.Tensor": three(),
        "Parameter": three(nn.Parameter),
        "Buffer": three(nn.Buffer),
        "in inference mode": inferred,
        "negative bit": three(lambda x: torch.complex(x, x).conj().imag),
        "expanded": three(lambda x: x[:, :1].expand(2, 4, 6, 8)),
        "functionalised": torch.func.functionalize(three()),
        "vmap": lambda attend: torch.vmap(attend)(*(random(3, 2, 4, 6, 8) for _ in range(3))),
        "vmap of a mask": lambda attend: torch.vmap(partial(attend, random(), random(), random()))(random(3, 6, 6)),
        "grad": lambda attend: torch.func.grad(lambda q: attend(q, q, q).square().sum())(random()),
        "grad of vmap": lambda attend: torch.vmap(torch.func.grad(lambda q: attend(q, q, q).square().sum()))(random()),
        **{
            make.__name__: partial(lambda make, attend: attend(random(), *[random(2, 4, 9, 8)] * 2, make(6, 9)), make)
            for make in (causal_upper_left, causal_lower_right)
        },
        "nested, jagged": partial(nested, torch.jagged),
        "nested, jagged, all one": of_one_nested,
    },
    (LEFT, COMPUTES): {
        "subclass": three(lambda x: x.as_subclass(Plain)),
        "subclass without __torch_function__": three(lambda x: x.as_subclass(Switched)),
        "wrapper subclass": three(lambda x: TwoTensor(x, 2 * x)),
        "wrapper subclass for a mask": lambda attend: three()(
            partial(attend, attn_mask=TwoTensor(random(6, 6), random(6, 6) + 1))
        ),
        "fake": partial(fake, inside=True),
        "fake, outside of its mode": partial(fake, inside=False),
        "functional": partial(functional, inside=True),
        "meta": three(lambda x: x.to("meta")),
    },
    (LEFT, REFUSES): {
        "nested, strided": partial(nested, torch.strided),
        "nested, jagged, with a mask": lambda attend: of_one_nested(partial(attend, attn_mask=torch.zeros(5, 5))),
        "DTensor": distributed,
        "CausalBias for a query": lambda attend: attend(causal_upper_left(6, 8), random(6, 8), random(6, 8)),
        "sparse": three(Tensor.to_sparse),
        "sparse mask": lambda attend: three()(partial(attend, attn_mask=random(6, 6).to_sparse())),
        "compressed sparse rows": three(Tensor.to_sparse_csr, lambda: random(6, 6)),
        "mkldnn": three(Tensor.to_mkldnn),
        "quantised": three(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
        "complex": three(lambda x: torch.complex(x, x)),
        "conjugate bit": three(lambda x: torch.complex(x, x).conj()),
        "int64": three(Tensor.long),
        "bool": three(lambda x: x > 0),
        "an array of NumPy": three(Tensor.numpy),
    },
    (LEFT, AS_TORCH): {
        "MaskedTensor": three(lambda x: masked_tensor(x, x > 0)),
        "functional, outside of its mode": partial(functional, inside=False),
    },
}
KINDS = {kind: (call, *ends) for ends, calls in TENSORS.items() for kind, call in calls.items()}


def parts(x: object) -> list[object]:
    """What is compared of a result: its type and its plain tensors."""
    unpack = {
        TwoTensor: lambda: [x.a, x.b],
        DTensor: lambda: [x.to_local(), x.placements],
        FakeTensor: lambda: [x.shape, x.dtype, x.device],
    }.get(type(x))
    if unpack is None and isinstance(x, Tensor):
        unpack = x.unbind if x.is_nested else lambda: [x.as_subclass(Tensor) if x.device.type == "cpu" else x.shape]
    return [type(x), *(unpack() if unpack else [x])]


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings(
    "ignore::fastattn.FallbackWarning", "ignore:The PyTorch API of (nested tensors|MaskedTensors)", "ignore:Sparse"
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_of_tensor(kind):
    attend, who, own = KINDS[kind]
    expected = outcome(attend, (TORCHS_OWN,), {})
    with fastattn.patch_sdpa() as patch:
        actual = outcome(attend, (F.scaled_dot_product_attention,), {})
    assert (patch.computed, patch.left.total()) == ((1, 0) if who == COMPUTED else (0, 1))
    assert_same_parts(actual, expected)
    if own == COMPUTES:
        assert_same_parts(attend(fastattn.scaled_dot_product_attention), expected)
        return
    torchs = expected if isinstance(expected, type) else Exception
    with pytest.raises((RuntimeError, TypeError, ValueError), match=NAMED if own == REFUSES else None) as error:
        attend(fastattn.scaled_dot_product_attention)
    assert issubclass(torchs, error.type) or torchs is Exception


def assert_same_parts(actual: object, expected: object) -> None:
    for a, e in zip(parts(actual), parts(expected), strict=True):
        if isinstance(e, Tensor):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
        else:
            assert a == e
