"""patch_sdpa: torch's function goes through fastattn where a fused backend takes the call, and comes back untouched."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from model_cases import calls_seen
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode
from torch.testing._internal.common_methods_invocations import op_db

import fastattn
from fastattn.backends import cpu

TORCHS_OWN = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _torchs_own_stands_before_and_after():
    assert F.scaled_dot_product_attention is TORCHS_OWN
    yield
    assert F.scaled_dot_product_attention is TORCHS_OWN


def qkv(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 4, 7, 8, dtype=dtype, requires_grad=True) for _ in range(3))


def test_calls_of_torchs_own_modules_go_through():
    layer = nn.MultiheadAttention(8, 2, batch_first=True).train()
    x = torch.randn(2, 3, 8)
    expected = layer(x, x, x, need_weights=False)[0]
    with fastattn.patch_sdpa() as patch:
        actual = layer(x, x, x, need_weights=False)[0]
    assert patch.computed == 1
    torch.testing.assert_close(actual, expected)


def test_what_no_fused_backend_takes_is_left_to_torch_and_counted_with_its_reason():
    q, k, v = qkv(torch.float64)
    with fastattn.patch_sdpa() as patch:
        for _ in range(3):
            assert torch.equal(F.scaled_dot_product_attention(q, k, v), TORCHS_OWN(q, k, v))
    assert patch.computed == 0
    (why,) = patch.left
    assert patch.left[why] == 3
    assert "cpu: q must be float32, bfloat16 or float16, got torch.float64" in why
    assert str(patch).startswith(
        "computed by fastattn: 0 calls of scaled_dot_product_attention\nleft to torch: 3 calls"
    )


def test_a_call_that_lacks_an_argument_is_counted_under_the_name_that_was_called():
    with fastattn.patch_sdpa() as patch, pytest.raises(TypeError):
        F.scaled_dot_product_attention(torch.ones(2, 3), torch.ones(2, 3))
    assert "scaled_dot_product_attention() missing 1 required" in str(patch)


def test_a_kernel_that_was_chosen_is_respected():
    q, k, v = qkv()
    with fastattn.patch_sdpa() as patch, sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), TORCHS_OWN(q, k, v))
    assert dict(patch.left) == {"sdpa_kernel() chooses among torch's kernels": 1}


@pytest.mark.parametrize("switch", ["cudnn", "mem_efficient"])
def test_switches_of_kernels_for_cuda_choose_nothing_on_a_cpu(switch):
    q, k, v = qkv()
    enable = getattr(torch.backends.cuda, f"enable_{switch}_sdp")
    enable(False)
    try:
        with fastattn.patch_sdpa() as patch:
            F.scaled_dot_product_attention(q, k, v)
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
                F.scaled_dot_product_attention(q, k, v)
            with torch.device("meta"):  # a default device is no reason to leave a call to torch
                F.scaled_dot_product_attention(*torch.empty(3, 1, 2, 4, 8))
    finally:
        enable(True)
    assert patch.computed == 2
    assert dict(patch.left) == {"sdpa_kernel() chooses among torch's kernels": 1}


class Seeing(TorchFunctionMode):
    """Notes every call of torch's function, which it knows as torch's own classes do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            assert func is torch._C._nn.scaled_dot_product_attention is TORCHS_OWN
            self.seen.append((args, kwargs))
        return func(*args, **(kwargs or {}))


class Answering(Tensor):
    """With an attention of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            assert func is torch._C._nn.scaled_dot_product_attention is TORCHS_OWN
            return args, kwargs
        return super().__torch_function__(func, types, args, kwargs)


def test_torch_function_sees_what_it_sees_without_the_patch():
    q, k, v = qkv()
    mask, own = torch.rand(7, 7).as_subclass(Answering), q.detach().as_subclass(Answering)
    calls = [((own, k, v), {}), ((q, k, v, mask, 0.0), {"scale": 2}), ((q, k), {"value": own})]

    def seen() -> list[object]:
        """All objects that handlers of any kind are given, in order."""
        with Seeing() as mode:
            F.scaled_dot_product_attention(q, k, value=v, scale=0.5)
        answers = mode.seen + [F.scaled_dot_product_attention(*args, **kwargs) for args, kwargs in calls]
        return [x for args, kwargs in answers for x in (*args, *(kwargs or {}).items())]

    def flat(items: list[object]) -> list[int]:
        return [id(x) for item in items for x in (item if isinstance(item, tuple) else [item])]

    expected = seen()
    with fastattn.patch_sdpa() as patch:
        assert flat(seen()) == flat(expected)
    assert dict(patch.left) == {
        "a TorchFunctionMode sees the call first": 1,
        "the tensors are nested, or of a subclass of torch.Tensor": 3,
    }


def test_what_a_torch_function_does_to_the_patch_holds():
    q, k, v = qkv()
    patch, more = fastattn.patch_sdpa(), fastattn.patch_sdpa()

    class Meddling(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.nn.functional.scaled_dot_product_attention:
                args[0].does()
            return super().__torch_function__(func, types, args, kwargs)

    def call(does: Callable) -> None:
        x = q.detach().as_subclass(Meddling)
        x.does = does
        F.scaled_dot_product_attention(x, k, v)

    def fail() -> None:
        raise KeyError

    patch.start()
    routed = F.scaled_dot_product_attention
    assert routed is not TORCHS_OWN
    with pytest.raises(KeyError):
        call(fail)
    assert F.scaled_dot_product_attention is routed
    call(more.start)
    assert F.scaled_dot_product_attention is routed
    call(lambda: call(more.stop))
    assert F.scaled_dot_product_attention is routed
    call(patch.stop)
    assert F.scaled_dot_product_attention is TORCHS_OWN


def padded_keys() -> Tensor:
    return torch.rand(7).masked_fill(torch.arange(7) > 4, -torch.inf).requires_grad_()


COMPUTED_BY_TORCH = {  # what fastattn refuses
    "scale": ({"scale": float("nan")}, "scale must be a finite number that fp32 can hold, 2.35e+38 at most, got nan"),
    "dropout": ({"dropout_p": -0.5, "attn_mask": padded_keys()[None]}, "dropout_p must be between 0 and 1, got -0.5"),
    "a mask of one dimension": ({"attn_mask": padded_keys()}, "attn_mask must have at least 2 dimensions, got 1"),
    "empty": ({"value": torch.zeros(2, 4, 7, 0)}, "a tensor is empty"),
    "no heads": (dict.fromkeys(("query", "key", "value"), torch.zeros(2, 0, 7, 8)), "a tensor is empty"),
    "mask and is_causal": (
        {"attn_mask": torch.rand(7, 7) < 0.8, "is_causal": True},
        "torch's kernels differ on is_causal=True with an attn_mask",
    ),
}


@pytest.mark.parametrize("name", COMPUTED_BY_TORCH)
def test_what_torch_computes_is_computed(name):
    if name == "no heads" and torch.__version__ < "2.13":
        pytest.skip("torch 2.10 and 2.11 divide by the number of heads, and the process ends")
    changed, why = COMPUTED_BY_TORCH[name]
    arguments = dict(zip(("query", "key", "value"), qkv(), strict=True)) | changed
    expected = TORCHS_OWN(**arguments)
    with fastattn.patch_sdpa() as patch:
        actual = F.scaled_dot_product_attention(**arguments)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    ((reason, count),) = patch.left.items()
    assert (patch.computed, count) == (0, 1)
    assert reason.startswith(why)


REFUSED_BY_TORCH = {
    "nothing": {"query": None},
    "lengths": {"query": torch.ones(2, 7, 8), "value": torch.ones(2, 3, 8)},
    "head dims": {"key": torch.ones(2, 4, 7, 4)},
    "heads": {"key": torch.ones(2, 2, 7, 8)},
    "heads that do not divide": {"query": torch.ones(2, 3, 7, 8), "enable_gqa": True},
    "dtypes": {"key": torch.ones(2, 4, 7, 8, dtype=torch.float64)},
    "devices": {"key": torch.ones(2, 4, 7, 8, device="meta")},
    "mask": {"attn_mask": torch.ones(3, 3)},
    "mask over samples of value alone": {
        "query": torch.ones(4, 7, 8),
        "key": torch.ones(4, 7, 8),
        "attn_mask": torch.ones(2, 1, 7, 7).bool(),
    },
    "integers for a mask": {"attn_mask": torch.ones(7, 7).long()},
    "a list for a mask": {"attn_mask": [True]},
    "is_causal": {"is_causal": 1},
    "enable_gqa": {"enable_gqa": torch.tensor(True)},
    "dropout": {"dropout_p": 1.5},
    "scale": {"scale": torch.ones(1)},
    "argument": {"nonsense": 1},
    "mask of one dimension": {"attn_mask": torch.ones(7, dtype=torch.bool)},
    "half mask": {"attn_mask": torch.ones(7, 7, dtype=torch.float16)},
    "one dimension": {"query": torch.ones(8)},
    "CausalBias and is_causal": {"attn_mask": causal_upper_left(7, 7), "is_causal": True},
    "CausalBias of other lengths": {"attn_mask": causal_lower_right(3, 4)},
}


@pytest.mark.parametrize("name", REFUSED_BY_TORCH)
def test_what_torch_refuses_is_refused_by_torch(name):
    arguments = dict(zip(("query", "key", "value"), qkv(), strict=True)) | REFUSED_BY_TORCH[name]
    with pytest.raises((TypeError, ValueError, RuntimeError, IndexError)) as expected:
        TORCHS_OWN(**arguments)
    with fastattn.patch_sdpa() as patch, pytest.raises(expected.type) as actual:
        F.scaled_dot_product_attention(**arguments)
    assert (type(actual.value), str(actual.value)) == (type(expected.value), str(expected.value))
    assert (patch.computed, patch.left.total()) == (0, 1)
    with pytest.raises(expected.type, match=r" must |unexpected keyword argument") as own:
        fastattn.scaled_dot_product_attention(**arguments)
    assert own.type is expected.type


def test_positions_are_torchs():
    with (
        fastattn.patch_sdpa(),
        pytest.raises(TypeError, match="takes from 3 to 6 positional arguments but 7 were given"),
    ):
        F.scaled_dot_product_attention(*qkv(), None, 0.0, False, 0.5)


@pytest.mark.parametrize("error", [TypeError, ValueError, RuntimeError, IndexError, NotImplementedError, KeyError])
def test_what_a_kernel_raises_is_no_refusal(error, monkeypatch):
    def broken(*args: object, **kwargs: object) -> None:
        raise error("a bug")

    monkeypatch.setattr(cpu, "forward", broken)
    with fastattn.patch_sdpa() as patch:
        with pytest.raises(error, match="a bug"):
            F.scaled_dot_product_attention(*qkv(), torch.rand(7, 7))
        with pytest.raises(error, match="a bug"):
            fastattn.scaled_dot_product_attention(*qkv(), torch.rand(7, 7))
    assert (patch.computed, patch.left.total()) == (0, 0)


def causal_calls() -> dict[str, tuple[Callable[[], CausalBias], tuple[int, int], dict]]:
    """By name: the CausalBias, the numbers of queries and keys, and the other arguments."""
    cases = {}
    for make in (causal_upper_left, causal_lower_right):
        for lengths in ((5, 9), (9, 5), (7, 7), (1, 6), (6, 1), (6, 2)):
            cases[f"{make.__name__}{lengths}"] = (make, lengths, lengths, {})
    cases["upper left, of other lengths"] = (causal_upper_left, (3, 4), (5, 9), {})
    cases["square, of other lengths"] = (causal_lower_right, (3, 3), (5, 9), {})
    for name, options in {
        "scale": {"scale": 0.3},
        "no dropout": {"dropout_p": 0},
        "all dropped": {"dropout_p": 1.0},
        "grouped heads": {"enable_gqa": True},
    }.items():
        cases[name] = (causal_lower_right, (5, 9), (5, 9), options)
    return cases


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", causal_calls())
def test_causal_bias(name, dtype):
    make, said, (L, S), options = causal_calls()[name]
    bias, heads = make(*said), 2 if "enable_gqa" in options else 4
    torch.manual_seed(0)
    wide = [torch.randn(2, *shape, 8) for shape in ((4, L), (heads, S), (heads, S))]
    do = torch.randn(2, 4, L, 8)

    def outputs(attend: Callable, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in wide]
        o = attend(*leaves, bias, **options)
        return o, *torch.autograd.grad(o, leaves, do.to(dtype))

    exact, torchs = outputs(TORCHS_OWN, torch.float64), outputs(TORCHS_OWN, dtype)
    with fastattn.patch_sdpa() as patch, calls_seen() as calls:
        by_caller = {
            "patched": outputs(F.scaled_dot_product_attention, dtype),
            "fastattn's": outputs(fastattn.scaled_dot_product_attention, dtype),
        }
    assert (patch.computed, patch.left.total()) == (1, 0)
    assert calls.backends == {"cpu"}
    assert "causal" in calls.features
    assert calls.features <= {"causal", "q_offset", "dropout"}
    with fastattn.patch_sdpa():
        by_caller["by a name from before"] = outputs(TORCHS_OWN, dtype)
    for who, mine in by_caller.items():
        for output, *values in zip(("o", "dq", "dk", "dv"), mine, torchs, exact, strict=True):
            error = fastattn.testing.compare(output, *(x.detach() for x in values))
            # Of a single key torch's softmax has a gradient of exactly 0, so there is no budget; O is rounded in delta.
            almost_zero = S == 1 and output in ("dq", "dk") and error.largest < 4 * torch.finfo(torch.float32).eps
            assert error.right or almost_zero, f"{who}: {error}"


@pytest.mark.parametrize("why", ["needs float16 or bfloat16, got float64", "sdpa_kernel", "must be causal_lower_right"])
def test_causal_bias_left_to_torch(why):
    q, k, v = (x.detach() for x in qkv(torch.float64 if "float64" in why else torch.float32))
    bias = causal_lower_right(1 if "must be" in why else 7, 9)
    k, v = (torch.cat([x, x[:, :, :2]], 2) for x in (k, v))
    with sdpa_kernel(SDPBackend.MATH) if why == "sdpa_kernel" else nullcontext():
        expected = TORCHS_OWN(q, k, v, bias)
        with fastattn.patch_sdpa() as patch:
            assert torch.equal(F.scaled_dot_product_attention(q, k, v, bias), expected)
    assert patch.computed == 0
    assert list(patch.left.values()) == [1]
    assert why in next(iter(patch.left))


def test_patches_nest_and_survive_exceptions():
    q, k, v = qkv()
    outer = fastattn.patch_sdpa()
    with outer:
        inner = fastattn.patch_sdpa()
        with pytest.raises(RuntimeError), inner, outer:
            F.scaled_dot_product_attention(q, k[..., :3], v)
        F.scaled_dot_product_attention(q, k, v)
    F.scaled_dot_product_attention(q, k, v)
    assert (outer.computed, inner.computed) == (1, 0)


def test_permanent():
    patch = fastattn.patch_sdpa().start()
    try:
        F.scaled_dot_product_attention(*qkv())
    finally:
        patch.stop()
    assert patch.computed == 1
    with pytest.raises(RuntimeError, match=r"stop\(\) must follow a start\(\), got one without"):
        patch.stop()


def test_what_others_put_there_stays(monkeypatch):
    seen = []

    def wrapper(inner, name):
        def wrapped(*args, **kwargs):
            seen.append(name)
            return inner(*args, **kwargs)

        return wrapped

    q, k, v = qkv(torch.float64)
    monkeypatch.setattr(F, "scaled_dot_product_attention", wrapper(TORCHS_OWN, "before"))
    patch = fastattn.patch_sdpa().start()
    F.scaled_dot_product_attention(q, k, v)
    assert seen == ["before"]
    outside = wrapper(F.scaled_dot_product_attention, "around")
    F.scaled_dot_product_attention = outside
    patch.stop()
    assert F.scaled_dot_product_attention is outside
    seen.clear()
    for started in (False, True):  # it goes on through what is inside, patched or not
        if started:
            patch.start()
        F.scaled_dot_product_attention(q, k, v)
        assert seen == ["around", "before"]
        seen.clear()
    patch.stop()
    assert F.scaled_dot_product_attention is outside


def test_what_others_put_there_meanwhile_calls_what_was_there(monkeypatch):
    q, k, v = qkv(torch.float64)
    with fastattn.patch_sdpa():
        inside = F.scaled_dot_product_attention
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: inside(*args, **kwargs))
        with fastattn.patch_sdpa() as second:
            assert torch.equal(F.scaled_dot_product_attention(q, k, v), TORCHS_OWN(q, k, v))
        monkeypatch.undo()
    assert second.left.total() == 1


def test_what_is_left_to_torch_is_freed_at_once():
    q, k, v = qkv(torch.float64)
    freed = weakref.ref(q)
    gc.disable()
    try:
        with fastattn.patch_sdpa() as patch:
            F.scaled_dot_product_attention(q, k, v)
            F.scaled_dot_product_attention(q, k, v, scale=float("inf"))
        del q
        assert freed() is None
    finally:
        gc.enable()
    assert patch.left.total() == 2


def test_threads():
    q, k, v = (x.detach() for x in qkv())
    patches = [fastattn.patch_sdpa() for _ in range(4)]

    def work(patch):
        for _ in range(25):
            with patch:
                F.scaled_dot_product_attention(q, k, v)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, patches))
    assert all(25 <= patch.computed <= 100 for patch in patches)
    assert not any(patch.left for patch in patches)


def compiled_calls() -> dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]]:
    """By name: a call, and whether fastattn computes it."""
    upper, lower, dense = causal_upper_left(7, 7), causal_lower_right(5, 7), torch.rand(7, 7) < 0.8

    def attend(*arguments: object, **options: object) -> Tensor:
        return F.scaled_dot_product_attention(*arguments, **options)

    by_fastattn = {
        "causal": lambda q, k, v: attend(q, k, v, is_causal=True),
        "dense": lambda q, k, v: attend(q, k, v, dense),
        "dense, of known lengths": lambda q, k, v: attend(q, k, v, torch.ones(7, 7).tril(1) > 0),
        "upper left": lambda q, k, v: attend(q, k, v, upper),
        "lower right": lambda q, k, v: attend(q[:, :, 2:], k, v, lower),
        "by its name before": lambda q, k, v: TORCHS_OWN(q[:, :, 2:], k, v, lower),
    }
    by_torch = {
        "left to torch": lambda q, k, v: attend(q.double(), k.double(), v.double()),
        "left, lower right": lambda q, k, v: attend(q[:, :, 2:].double(), k.double(), v.double(), lower),
        "refused": lambda q, k, v: attend(q[0], k, v, dense[None, None], dropout_p=-1.0),
        "differing": lambda q, k, v: attend(q, k, v, dense, is_causal=True),
    }
    return {name: (call, calls is by_fastattn) for calls in (by_fastattn, by_torch) for name, call in calls.items()}


# Of a mask, of a CausalBias and of what is left to torch, whose own function of a CausalBias takes half a minute.
OF_ANY_LENGTHS = [(name, True) for name in ("dense", "lower right", "left to torch")]


@pytest.mark.parametrize(("name", "dynamic"), [*product(compiled_calls(), [False]), *OF_ANY_LENGTHS])
def test_compiled_calls(name, dynamic, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: torch.compiler.is_dynamo_compiling())  # as torch 2.10
    call, by_fastattn = compiled_calls()[name]
    tensors = [x.detach() for x in qkv()]
    expected = call(*tensors)
    with fastattn.patch_sdpa():
        eager = call(*tensors)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*tensors)
    assert torch.equal(compiled, eager)
    assert torch.equal(eager, expected) is not by_fastattn
    torch.testing.assert_close(compiled, expected, rtol=1e-4, atol=1e-5)


def test_torch_function_sees_the_same_in_compiled_calls():
    q, k, v = (x.detach() for x in qkv())

    class Doubling(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            o = func(*args, **(kwargs or {}))
            return 2 * o if func is torch.nn.functional.scaled_dot_product_attention else o

    def call(q: Tensor) -> Tensor:
        with Doubling():
            return F.scaled_dot_product_attention(q, k, v)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with fastattn.patch_sdpa():
        assert torch.equal(compiled(q), 2 * TORCHS_OWN(q, k, v))
        assert F.scaled_dot_product_attention is not TORCHS_OWN
    assert torch.equal(compiled(q), 2 * TORCHS_OWN(q, k, v))


class Attending(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated", "ignore:torch.jit.* is not supported")
def test_what_is_written_down_is_torchs():
    """So that it runs where fastattn is not, and without a patch."""
    tensors = tuple(x.detach() for x in qkv())
    expected = Attending()(*tensors)
    with fastattn.patch_sdpa() as patch:
        programs = {
            "script": torch.jit.script(Attending()),
            "trace": torch.jit.trace(Attending(), tensors, check_trace=False),
            "export": torch.export.export(Attending(), tensors).module(),
            "strict export": torch.export.export(Attending(), tensors, strict=True).module(),
            "fx": torch.fx.symbolic_trace(Attending()),
        }
        assert patch.computed == 0
    for name, program in programs.items():
        assert "scaled_dot_product_attention" in str(program.graph), name
        assert not re.search(r"fastattn(::|\.forward)", str(program.graph)), name
        assert torch.equal(program(*tensors), expected), name


def test_forward_mode_inside_forward_mode_is_torchs():
    q, k, v = (x.detach()[0] for x in qkv())  # three dimensions, which torch's differentiable kernel takes

    def second_derivative(attend: Callable) -> Tensor:
        def derivative(q: Tensor) -> Tensor:
            return torch.func.jvp(lambda q: attend(q, k, v), (q,), (k,))[1]

        return torch.func.jvp(derivative, (q,), (v,))[1]

    expected = second_derivative(TORCHS_OWN)
    with fastattn.patch_sdpa() as patch:
        assert torch.equal(second_derivative(F.scaled_dot_product_attention), expected)
        assert list(patch.left) == ["its derivative is taken in forward mode inside forward mode"]


@pytest.mark.parametrize("outer", [torch.func.functionalize, torch.func.grad])
def test_functionalized_derivatives_are_torchs(outer):
    inner = ({torch.func.functionalize, torch.func.grad} - {outer}).pop()
    q, k, v = (x.detach() for x in qkv())

    def derivative(attend: Callable) -> Tensor:
        return outer(inner(lambda q: attend(q, k, v).square().sum()))(q)

    expected = derivative(TORCHS_OWN)
    with fastattn.patch_sdpa() as patch:
        assert torch.equal(derivative(F.scaled_dot_product_attention), expected)
        assert list(patch.left) == ["its derivative is taken inside or around torch.func.functionalize"]
    with pytest.raises(NotImplementedError, match="functionalize is not available around or inside"):
        derivative(fastattn.attention)


(SDPA,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")


@pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_torchs_own_samples(dtype):
    """By the patch, which leaves fp64 to torch, and by fastattn's own function."""
    computed, samples = 0, list(SDPA.sample_inputs("cpu", dtype, requires_grad=True))
    for sample in samples:
        # torch's samples have scores of hundreds, whose gradients are nothing but cancellation below fp64
        tensors = [x.detach() * scale for x, scale in zip((sample.input, *sample.args), (0.02, 1, 1), strict=True)]

        def outputs(
            attend: Callable, to: torch.dtype = dtype, tensors=tensors, kwargs=sample.kwargs
        ) -> tuple[Tensor, ...]:
            leaves = [x.to(to).requires_grad_() for x in tensors]
            if (attn_mask := kwargs.get("attn_mask")) is not None and attn_mask.is_floating_point():
                kwargs = kwargs | {"attn_mask": attn_mask.detach().to(to)}
            torch.manual_seed(0)
            o = attend(*leaves, **kwargs)
            do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(to)
            return o.detach(), *torch.autograd.grad(o, leaves, do)

        torchs, exact = outputs(TORCHS_OWN), outputs(TORCHS_OWN, torch.float64)
        with fastattn.patch_sdpa() as patch:
            patched = outputs(F.scaled_dot_product_attention)
        assert patch.computed + patch.left.total() == 1
        assert patch.computed or all(map(torch.equal, patched, torchs))
        for ours in (patched, outputs(fastattn.scaled_dot_product_attention)):
            for output, actual, theirs, right in zip(("o", "dq", "dk", "dv"), ours, torchs, exact, strict=True):
                assert (actual.shape, actual.dtype) == (theirs.shape, theirs.dtype)
                if sample.kwargs.get("dropout_p"):  # from other random numbers
                    continue
                if dtype == torch.float64:
                    torch.testing.assert_close(actual, right)
                else:
                    error = fastattn.testing.compare(output, actual, theirs, right)
                    assert error.right, f"{list(tensors[0].shape)}, {sample.kwargs}: {error}"
        computed += patch.computed
    assert len(samples) >= 10
    assert computed >= (0 if dtype == torch.float64 else 10)


@pytest.mark.skipif(not hasattr(nn.attention, "restore_flash_attention_impl"), reason="this torch has no way back")
def test_torchs_registry_of_flash_attention():
    assert "fastattn" in nn.attention.list_flash_attention_impls()
    nn.attention.activate_flash_attention_impl("fastattn")
    try:
        assert F.scaled_dot_product_attention is not TORCHS_OWN
        q, k, v = qkv()
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), TORCHS_OWN(q, k, v), rtol=1e-4, atol=1e-5)
    finally:
        nn.attention.restore_flash_attention_impl()
