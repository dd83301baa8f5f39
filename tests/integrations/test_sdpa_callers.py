"""Modules that call scaled_dot_product_attention themselves: swapped, they answer as before, by fastattn alone."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from model_cases import calls_seen
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint as ckpt
from torch_samples import assert_refused, state_of

import fastattn
from fastattn.integrations import sdpa_callers

E, HEADS = 16, 2


class Heads(nn.Module):
    """Self-attention of [B, L, E] for a `compute` of [B, HEADS, L, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(E, 3 * E)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind()


class ByFunctional(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.split(x), is_causal=True).transpose(1, 2).flatten(2)


class ByWholeName(Heads):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        o = torch.nn.functional.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True)
        return o.transpose(1, 2).flatten(2)


class ByImportedName(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(*self.split(x), is_causal=True).transpose(1, 2).flatten(2)


class ByOtherName(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return sdpa(*self.split(x), is_causal=True).transpose(1, 2).flatten(2)


class ByMethod(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return self.compute(*self.split(x)).transpose(1, 2).flatten(2)

    @staticmethod
    def compute(*qkv: Tensor) -> Tensor:
        return next(F.scaled_dot_product_attention(*qkv, is_causal=causal) for causal in (True,))


class ByDecorated(Heads):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.split(x), is_causal=True).transpose(1, 2).flatten(2)


class Inheriting(ByFunctional):
    pass


class Overriding(Inheriting):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class ByMethodOfThatName(Heads):
    """As litgpt's."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled_dot_product_attention(*self.split(x)).transpose(1, 2).flatten(2)

    def scaled_dot_product_attention(self, *qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*qkv, is_causal=True)


class ByHand(ByFunctional):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        later = torch.ones(2 * x.shape[1:2], dtype=torch.bool).triu(1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Optional(ByHand):
    """With a switch that fastattn does not know."""

    fast = True

    def forward(self, x: Tensor) -> Tensor:
        return ByFunctional.forward(self, x) if self.fast else super().forward(x)

    def unused(self) -> None:
        F.scaled_dot_product_attention()


CALLERS = (
    *(ByFunctional, ByWholeName, ByImportedName, ByOtherName, ByMethod, ByDecorated, Inheriting, Overriding),
    ByMethodOfThatName,
)


def two_layers(make: Callable[[], nn.Module] = ByFunctional) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(make(), nn.GELU(), make())


def inputs() -> Tensor:
    return torch.randn(3, 7, E, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, output: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output.square().sum(), tuple(model.parameters()))


@pytest.mark.parametrize("make", CALLERS)
def test_their_calls_are_computed_by_fastattn(make):
    model = two_layers(make)
    by_hand = copy.deepcopy(model)
    for part in (by_hand[0], by_hand[2]):
        part.__class__ = ByHand
    report = fastattn.swap(model)
    assert report.swapped == {"0": make.__name__, "2": make.__name__}
    assert str(report) == f"swapped: 2 {make.__name__}"
    with calls_seen() as calls:
        actual = model(inputs())
    assert calls.features == {"causal"}
    assert calls.backends == {"cpu"}
    expected = by_hand(inputs())
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(model, actual), gradients(by_hand, expected), rtol=1e-4, atol=1e-5)


def test_everything_but_the_class_stays():
    model = two_layers()
    before = [vars(part).copy() for part in model.modules()]
    fastattn.swap(model)
    for part, attributes in zip(model.modules(), before, strict=True):
        assert {name: value for name, value in vars(part).items() if name != "_before_fastattn"} == attributes
    assert isinstance(model[0], ByFunctional)
    assert inspect.signature(model[0].forward) == inspect.signature(ByFunctional().forward)
    assert repr(model) == repr(two_layers())


def test_twice_changes_nothing():
    model = two_layers()
    first = fastattn.swap(model)
    before = state_of(model)
    assert fastattn.swap(model) == fastattn.SwapReport(already=first.swapped)
    assert state_of(model) == before


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, through_pickle, through_file])
def test_copies_are_swapped_too(copied):
    model = two_layers()[0]
    fastattn.swap(model)
    twin = copied(model)
    assert type(twin) is type(model)
    with calls_seen() as calls:
        assert torch.equal(twin(inputs()), model(inputs()))
    assert calls.backends == {"cpu"}
    fastattn.unswap(twin)
    assert type(twin) is ByFunctional
    assert isinstance(model, sdpa_callers.SDPACaller)


class MadeByItsClass(ByFunctional):
    def __reduce__(self):
        return type(self), (), vars(self)


class MadeByAFunction(ByFunctional):
    def __reduce__(self):
        return loaded, (self.state_dict(),)


def loaded(state: dict) -> nn.Module:
    module = MadeByAFunction()
    module.load_state_dict(state)
    return module


@pytest.mark.parametrize("cls", [MadeByItsClass, MadeByAFunction])
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, through_pickle, through_file])
def test_a_class_that_says_how_it_is_copied_is_copied_so(copied, cls):
    model = cls()
    fastattn.swap(model)
    assert isinstance(model, sdpa_callers.SDPACaller)
    twin = copied(model)
    assert type(twin) is cls
    torch.testing.assert_close(twin(inputs()), model(inputs()))


def test_other_calls_are_not_routed():
    model = two_layers()[0]
    fastattn.swap(model)
    inside, answered = threading.Event(), threading.Event()
    model.qkv.register_forward_hook(lambda *_: (inside.set(), answered.wait(10))[:0] or None)
    q = torch.randn(1, 1, 3, 4)
    with calls_seen() as calls:
        thread = threading.Thread(target=model, args=(inputs(),))
        thread.start()
        assert inside.wait(10)
        F.scaled_dot_product_attention(q, q, q)  # while another thread is in the forward
        assert not calls.backends
        answered.set()
        thread.join()
        assert calls.backends == {"cpu"}
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(inputs()[..., 1:])
        calls.backends.clear()
        F.scaled_dot_product_attention(q, q, q)  # after an exception in the forward
        two_layers()(inputs())  # in another module of the class
        assert not calls.backends


def test_threads_do_not_disturb_each_other():
    model = two_layers()
    expected = model(inputs())
    fastattn.swap(model)
    with ThreadPoolExecutor(4) as threads:
        for output in threads.map(lambda _: model(inputs()), range(80)):
            torch.testing.assert_close(output, expected)


def test_patch_sdpa_and_swap_together():
    model = two_layers()
    expected = model(inputs())
    fastattn.swap(model)
    with warnings.catch_warnings(), fastattn.patch_sdpa() as patch:
        warnings.simplefilter("error")
        torch.testing.assert_close(model(inputs()), expected)
    assert patch.computed == 2


class OfNested(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_nested_tensors_stay_with_torch():
    model = OfNested()
    x = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])
    expected = model(x).to_padded_tensor(0.0)
    assert fastattn.swap(model).swapped == {"": "OfNested"}
    with calls_seen() as calls:
        assert torch.equal(model(x).to_padded_tensor(0.0), expected)
    assert not calls.backends


def test_jagged_nested_tensors_are_computed_by_fastattn():
    model, parts = OfNested(), [torch.randn(3, 2, 4), torch.randn(5, 2, 4)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    expected = model(x)
    fastattn.swap(model)
    with calls_seen() as calls:
        torch.testing.assert_close(model(x).values(), expected.values())
    assert calls.features == {"segment_ids"}


def test_causal_biases_are_computed_by_fastattn():
    class OfLast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x[..., 2:, :], x, x, causal_lower_right(x.shape[-2] - 2, x.shape[-2]))

    model = OfLast()
    x = torch.randn(2, 3, 5, 4)
    expected = model(x)
    fastattn.swap(model)
    with calls_seen() as calls:
        torch.testing.assert_close(model(x), expected)
    assert (calls.backends, calls.features) == ({"cpu"}, {"causal", "q_offset"})


def test_what_fastattn_refuses_stays_with_torch():
    class Unscaled(nn.Module):
        def forward(self, x: Tensor, scale: object) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, scale=scale)

    model, x = Unscaled(), torch.randn(2, 3, 5, 4)
    expected = model(x, float("inf"))
    fastattn.swap(model)
    with calls_seen() as calls:
        torch.testing.assert_close(model(x, float("inf")), expected, rtol=0, atol=0, equal_nan=True)
        with pytest.raises(TypeError, match="argument 'scale' must be float, not str"):
            model(x, "1")
    assert not calls.backends


def test_what_no_kernel_of_ours_takes_is_computed_by_those_of_torch():
    model = two_layers().double()
    x = inputs().double()
    expected = model(x)
    fastattn.swap(model)
    torch.testing.assert_close(model(x), expected)


def test_a_switch_that_is_not_known_cannot_lie():
    model = Optional()
    assert fastattn.swap(model).swapped == {"": "Optional"}
    model(inputs())
    model.fast = False
    name = r"test_sdpa_callers\.Optional was swapped, but ran without scaled_dot_product_attention"
    with pytest.warns(UserWarning, match=name):
        model(inputs())


class Compiled(nn.Module):
    @torch.compile(backend="eager")
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.filterwarnings("error:.*was swapped, but ran without")
def test_a_module_that_compiles_its_own_code_is_not_called_a_liar():
    model, x = Compiled(), torch.randn(1, 2, 8, 4)
    expected = model(x)
    assert fastattn.swap(model).swapped == {"": "Compiled"}
    torch.testing.assert_close(model(x), expected)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_it_compiles_and_exports():
    model = two_layers()
    fastattn.swap(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    actual, expected = compiled(inputs()), model(inputs())
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(gradients(model, actual), gradients(model, expected))
    for strict in (False, True):
        exported = torch.export.export(model, (inputs(),), strict=strict)
        operators = {str(node.target) for part in exported.graph_module.modules() for node in part.graph.nodes}
        assert "fastattn.attention.default" in operators
        assert not any("scaled_dot_product" in operator for operator in operators)
        torch.testing.assert_close(exported.module()(inputs()), expected)


def test_checkpointing():
    model = two_layers()
    expected = gradients(model, model(inputs()))
    fastattn.swap(model)
    x = inputs()
    for part in model:
        x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)
    torch.testing.assert_close(gradients(model, x), expected, rtol=1e-4, atol=1e-5)


def once_more(function: Callable, *args: Tensor) -> Tensor:
    """As helpers of libraries do that checkpoint or not."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


class CheckpointingByAnother(ByMethod):
    def forward(self, x: Tensor) -> Tensor:
        return once_more(self.compute, *self.split(x)).transpose(1, 2).flatten(2)


def test_a_method_that_is_called_without_the_forward_is_routed_too():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ByMethod()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.compute(*self.inner.split(x)).transpose(1, 2).flatten(2)

    for make in (Outer, CheckpointingByAnother):
        torch.manual_seed(0)
        model = make()
        expected = gradients(model, model(inputs()))
        assert len(fastattn.swap(model).swapped) == 1
        computed = mock.patch.object(sdpa_callers, "computed", wraps=sdpa_callers.computed)
        with computed as calls, warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            actual = gradients(model, model(inputs()))
        assert calls.call_count == (1 if make is Outer else 2)  # a checkpoint calls it once more
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def with_own_forward() -> nn.Module:
    module = ByFunctional()
    module.forward = ByHand().forward
    return module


class Checkpointing(ByMethod):
    def forward(self, x: Tensor) -> Tensor:
        o = torch.utils.checkpoint.checkpoint(self.compute, *self.split(x), use_reentrant=False)
        return o.transpose(1, 2).flatten(2)


class CheckpointingByOtherName(ByMethod):
    def forward(self, x: Tensor) -> Tensor:
        return ckpt(lambda *args: self.compute(*args), *self.split(x), use_reentrant=False).transpose(1, 2).flatten(2)


class MemoryEfficientAttention(nn.Module):
    """As those are that call a kernel of xformers or flash_attn."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.xformers.memory_efficient_attention(q, k, v)


class OwnMethodAttention(ByMethodOfThatName):
    """Its attention has the name of torch's function."""

    def scaled_dot_product_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return by_hand(q, k, v)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


class OwnFunctionAttention(Heads):
    """So has a function beside it."""

    forward = types.FunctionType(ByImportedName.forward.__code__, {"scaled_dot_product_attention": by_hand})


class OperatorAttention(Heads):
    """It calls PyTorch's operator, which no mode for functions sees."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.scaled_dot_product_attention(*self.split(x)).transpose(1, 2).flatten(2)


class Processor:
    """As diffusers' are: the module holds an object, or a function, that calls torch's function."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class ProcessedAttention(Heads):
    def __init__(self, processor: Callable) -> None:
        super().__init__()
        self.processor = processor

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(*self.split(x)).transpose(1, 2).flatten(2)


CONFIG = types.SimpleNamespace(attention_logit_softcapping=None)


class Switched(Heads):
    """With a switch of another library."""

    def __init__(self, **switches: object) -> None:
        super().__init__()
        vars(self).update({"flash": True, "use_flash_attention": True, "config": CONFIG} | switches)

    def forward(self, x: Tensor) -> Tensor:
        softcap = self.config.attention_logit_softcapping
        compute = F.scaled_dot_product_attention if self.flash and self.use_flash_attention and not softcap else by_hand
        return compute(*self.split(x)).transpose(1, 2).flatten(2)


class Weighted(ByFunctional):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(E, E))


class Scripted(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


class ScriptedAttention(Scripted):
    pass


REFUSED = {
    "own forward": (with_own_forward, "its forward was replaced on the module itself"),
    "checkpoint": (Checkpointing, "it checkpoints parts of its own forward; fastattn.patch_sdpa() takes its calls"),
    "checkpoint by another name": (CheckpointingByOtherName, "it checkpoints parts of its own forward"),
    "parametrised": (lambda: weight_norm(Weighted(), "weight"), "its class was replaced by PyTorch's"),
    "subclass by hand": (ByHand, "test_sdpa_callers.ByHand computes attention by code of its own"),
    "unknown kernel": (MemoryEfficientAttention, "MemoryEfficientAttention computes attention by code of its own"),
    "own method": (OwnMethodAttention, "OwnMethodAttention computes attention by code of its own"),
    "own function": (OwnFunctionAttention, "OwnFunctionAttention computes attention by code of its own"),
    "operator": (OperatorAttention, "OperatorAttention computes attention by code of its own"),
    "flash": (lambda: Switched(flash=False), "with flash=False it does not call scaled_dot_product_attention"),
    "monai": (lambda: Switched(use_flash_attention=False), "with use_flash_attention=False it does not call"),
    "litgpt": (
        lambda: Switched(config=types.SimpleNamespace(attention_logit_softcapping=5.0)),
        "with attention_logit_softcapping=5.0 it does not call",
    ),
    "scripted": (lambda: torch.jit.script(ScriptedAttention()), "it is compiled by TorchScript; swap the model before"),
    "quantised": (lambda: torch.ao.nn.quantized.MultiheadAttention(8, 2), "MultiheadAttention is quantised"),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    make, why = REFUSED[name]
    assert_refused(ByFunctional(), make(), why)


def test_patch_sdpa_takes_the_calls_of_a_module_that_checkpoints_itself():
    model = Checkpointing()
    expected = gradients(model, model(inputs()))
    with fastattn.patch_sdpa() as patch:
        actual = gradients(model, model(inputs()))
    assert patch.computed  # once, and once more in part: as soon as all is there, torch stops the second forward
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def a_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("processor", [Processor(), a_call, partial(a_call)], ids=["object", "function", "partial"])
def test_what_patch_sdpa_would_compute_is_named(processor):
    model = ProcessedAttention(processor)
    (why,) = fastattn.swap(model).refused.values()
    assert "; fastattn.patch_sdpa() takes the calls of scaled_dot_product_attention" in why
    with fastattn.patch_sdpa() as patch:
        model(inputs())
    assert patch.computed == 1
    (why,) = fastattn.swap(ProcessedAttention(by_hand)).refused.values()
    assert "patch_sdpa" not in why


def test_a_switch_that_is_on_is_no_objection():
    model = Switched()
    assert fastattn.swap(model).swapped == {"": "Switched"}
    with calls_seen() as calls:
        model(inputs())
    assert calls.backends


def test_what_holds_attention_is_not_named():
    class AttentionBlock(nn.Module):
        def __init__(self, attention: nn.Module) -> None:
            super().__init__()
            self.attention = attention

    blocks = nn.ModuleList(AttentionBlock(part) for part in (ByFunctional(), nn.MultiheadAttention(8, 2), ByHand()))
    report = fastattn.swap(blocks)
    assert report.swapped == {"0.attention": "ByFunctional", "1.attention": "MultiheadAttention"}
    assert list(report.refused) == ["2.attention"]


def test_a_model_without_known_attention_is_told_of_patch_sdpa():
    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)

    class Model(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return attend(q)

    report = fastattn.swap(Model())
    assert report == fastattn.SwapReport()
    assert "fastattn.patch_sdpa() may reach them" in str(report)
    with fastattn.patch_sdpa() as patch:
        Model()(torch.randn(1, 1, 3, 4))
    assert patch.computed == 1


def test_a_class_that_notes_its_subclasses_notes_none_of_ours():
    noted = []

    class Noting(nn.Module):
        def __init_subclass__(cls, *, name: str, **kwargs: object) -> None:
            super().__init_subclass__(**kwargs)
            noted.append((name, cls))

    class Attention(Noting, name="own"):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model, x = nn.Sequential(Attention()), torch.randn(1, 2, 5, 8)
    expected = model(x)
    assert str(fastattn.swap(model)).startswith("swapped: 1")
    torch.testing.assert_close(model(x), expected)
    assert noted == [("own", Attention)]
