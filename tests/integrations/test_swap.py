"""A swapped model answers as it did before, by fastattn, in every mode; what cannot be swapped is named."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable

import pytest
import torch
from model_cases import calls_seen
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrizations import weight_norm
from torch_samples import (
    TORCH_MODULES,
    assert_refused,
    assert_same,
    outputs_and_gradients,
    samples,
    state_of,
    without_fast_path,
    zero_at_padding,
)

import fastattn
from fastattn.backends import build
from fastattn.nn import MultiHeadAttention

# The decorator of tests whose masks have no fused kernel on every machine; the others fail where one would be missing.
may_fall_back = pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")


@pytest.fixture
def calls(monkeypatch) -> list[MultiHeadAttention]:
    """Every MultiHeadAttention that was called."""
    recorded = []
    forward = MultiHeadAttention.forward

    def counted(self, *args, **kwargs):
        recorded.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(MultiHeadAttention, "forward", counted)
    return recorded


def attentions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]


@may_fall_back
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", TORCH_MODULES)
def test_torchs_own_samples(name, calls):
    for module, args, kwargs in samples(name):
        swapped = copy.deepcopy(module)
        zero_at_padding(module)
        fastattn.swap(swapped)
        calls.clear()
        actual = outputs_and_gradients(swapped, args, kwargs)
        assert calls == attentions(swapped)
        assert_same(actual, outputs_and_gradients(module, args, kwargs))
        with torch.no_grad():
            actual = swapped.eval()(*args, **kwargs)
            with without_fast_path():
                assert_same(actual, module.eval()(*args, **kwargs))
        assert calls == 2 * attentions(swapped)


@may_fall_back
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_calls_its_attention_in_every_mode(training, grad, nested, norm_first, batch_first, calls):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, norm_first=norm_first, batch_first=batch_first).double()
    model = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=nested).train(training)
    swapped = copy.deepcopy(model)
    assert fastattn.swap(swapped).zero_at_padding == ({"": "TransformerEncoder"} if nested else {})
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    x = x if batch_first else x.transpose(0, 1)
    padding = torch.arange(7) >= torch.tensor([[6], [3]])  # the longest is shorter than the batch
    causal = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        for options in ({}, {"src_key_padding_mask": padding}, {"mask": causal}):
            calls.clear()
            actual = swapped(x, **options)
            assert calls == attentions(swapped)
            assert actual.shape == x.shape
            wanted = ~padding if nested and "src_key_padding_mask" in options else torch.ones_like(padding)
            wanted = wanted if batch_first else wanted.T
            assert_same(actual[wanted], model(x, **options)[wanted])


@may_fall_back
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("part", ["layers", "activation", "norm"])
def test_a_report_names_no_stack_that_writes_no_zeros(part):
    activation = (lambda x: nn.functional.relu(x)) if part == "activation" else "relu"
    norm = nn.Sequential(nn.LayerNorm(16)) if part == "norm" else None
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, 0.0, activation, batch_first=True), 2, norm)
    report, padding = fastattn.swap(model), torch.arange(7) >= torch.tensor([[7], [2]])
    has_zeros = bool((model(torch.randn(2, 7, 16), src_key_padding_mask=padding)[padding] == 0).all())
    assert ("" in report.zero_at_padding) is has_zeros is (part == "layers")


@may_fall_back
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_encoder_and_decoder_compute_no_padding(training, batch_first):
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": batch_first, "dtype": torch.float64}
    model = nn.Transformer(16, 4, 2, 2, 32, **options).train(training)
    swapped = copy.deepcopy(model)
    report = fastattn.swap(swapped)
    assert "\n0 at padding: the output of 1 TransformerDecoder, 1 TransformerEncoder" in str(report)
    assert report.zero_at_padding.keys() == {"encoder", "decoder"}
    assert not fastattn.swap(swapped).zero_at_padding
    rows = {"encoder": set(), "decoder": set()}
    rows_of = {part: seen for name, seen in rows.items() for part in getattr(swapped, name).modules()}

    def look(part: nn.Module, args: tuple, _: object) -> None:
        if type(part) is nn.Linear and part in rows_of:
            rows_of[part].add(args[0].shape[:-1].numel())

    source_padding = torch.arange(7) >= torch.tensor([[7], [2]])
    target_padding = torch.arange(5) >= torch.tensor([[1], [4]])
    source, target = torch.randn(2, 7, 16, dtype=torch.float64), torch.randn(2, 5, 16, dtype=torch.float64)
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    masks = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64),
        "src_key_padding_mask": source_padding,
        "tgt_key_padding_mask": target_padding,
        "memory_key_padding_mask": source_padding,
    }
    with register_module_forward_hook(look):  # hooks on the parts would have the batch not packed
        actual, expected = swapped(source, target, **masks), model(source, target, **masks)
    hidden = target_padding if batch_first else target_padding.T
    assert_same(actual, expected.masked_fill(hidden[..., None], 0))
    assert rows == {"encoder": {9}, "decoder": {5}}  # tokens that are real


@pytest.mark.parametrize("block", ["forward", "_sa_block", "_ff_block"])
def test_a_layer_that_somebody_changed_stays(block, calls):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
    changed = model.layers[0]
    setattr(changed, block, lambda x, *args, **kwargs: 0 * x)
    swapped = copy.deepcopy(model)
    fastattn.swap(swapped)
    classes = [type(part) for part in (swapped, *swapped.layers)]
    assert classes == [nn.TransformerEncoder, nn.TransformerEncoderLayer, fastattn.nn.TransformerEncoderLayer]
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(swapped(x), model(x))


@may_fall_back
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_everything_but_the_class_stays():
    model = nn.Transformer(16, 4, 1, 1, 32, dtype=torch.float64).eval()
    seen = []
    model.encoder.layers[0].self_attn.register_forward_hook(lambda module, args, output: seen.append(module))
    before, parameters = copy.deepcopy(model.state_dict()), dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    modules = dict(model.named_modules())
    report = fastattn.swap(model)
    assert dict(model.named_modules()) == modules
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert not any(module.training for module in model.modules())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert report.swapped == dict.fromkeys(
        ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"],
        "MultiheadAttention",
    )
    x = torch.randn(3, 2, 16, dtype=torch.float64)
    model(x, x)[..., 0].sum().backward()  # the sum over all channels is constant after a LayerNorm
    assert seen == [model.encoder.layers[0].self_attn]
    optimizer.step()
    name = "decoder.layers.0.multihead_attn.in_proj_weight"
    assert not torch.equal(model.state_dict()[name], before[name])


class Caller(nn.Module):
    """It calls scaled_dot_product_attention itself."""

    def __init__(self):
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, query, key, value):
        return nn.functional.scaled_dot_product_attention(query @ self.in_proj_weight, key, value), None


either_kind = pytest.mark.parametrize("make", [lambda: nn.MultiheadAttention(8, 2), Caller])


@either_kind
def test_shared_modules_stay_shared(make):
    shared = make()
    model, cls = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}), type(shared)
    assert str(fastattn.swap(model)) == f"swapped: 1 {cls.__name__}"
    assert model["a"] is model["b"][0] is shared
    assert type(shared) is not cls


def test_the_model_itself():
    model = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True, add_zero_attn=True, bias=False)
    assert fastattn.swap(model).swapped == {"": "MultiheadAttention"}
    assert type(model) is MultiHeadAttention


def test_a_swapped_module_has_what_a_new_one_has():
    swapped = nn.MultiheadAttention(8, 2)
    fastattn.swap(swapped)
    new = MultiHeadAttention(8, 2)
    assert vars(swapped).keys() == vars(new).keys() | {"_before_fastattn"}
    assert [*swapped.out_proj._forward_pre_hooks.values()] == [*new.out_proj._forward_pre_hooks.values()]
    fastattn.unswap(swapped)
    assert not swapped.out_proj._forward_pre_hooks


@pytest.mark.parametrize("name", ["attention", "encoder"])
def test_fx_traces_before_the_swap(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = originals()[name].eval()

        def forward(self, x):
            return self.part(x, x, x)[0] if name == "attention" else self.part(x)

    model, x = Model(), torch.randn(2, 3, 8)
    traced, expected = torch.fx.symbolic_trace(model), model(x)
    assert fastattn.swap(traced).swapped
    torch.testing.assert_close(traced(x), expected, rtol=1e-5, atol=1e-5)
    fastattn.swap(model)
    for swapped in (model, model.part):
        with pytest.raises(
            NotImplementedError, match=r"torch\.fx cannot trace modules of fastattn: trace the model of"
        ):
            torch.fx.symbolic_trace(swapped)


class OwnLayer(nn.TransformerEncoderLayer):
    pass


def originals() -> dict[str, nn.Module]:
    options = {"dropout": 0.0, "batch_first": True}
    return {
        "attention": nn.MultiheadAttention(8, 2),
        "caller": Caller(),
        "encoder": nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, **options), 2),
        "encoder of a subclass": nn.TransformerEncoder(OwnLayer(8, 2, 16, **options), 2),
        "transformer": nn.Transformer(8, 2, 1, 1, 16, **options),
    }


@pytest.mark.parametrize("name", originals())
def test_unswap_gives_the_original_back(name):
    model = originals()[name].eval()
    x = torch.randn(2, 3, 8)
    args = (x,) if name.startswith("encoder") else (x, x) if name == "transformer" else (x, x, x)
    with torch.no_grad():
        expected = model(*args)
    before = state_of(model)
    for _ in range(2):
        fastattn.swap(model)
    assert state_of(model) != before
    with torch.no_grad(), calls_seen() as calls:
        model(*args)
    assert calls.backends
    swapped = copy.deepcopy(model)
    for _ in range(2):
        fastattn.unswap(model)
    assert state_of(model) == before
    with torch.no_grad(), calls_seen() as calls:
        assert_same(model(*args), expected)
    assert not calls.backends
    fastattn.unswap(swapped)  # a copy remembers, too
    assert [type(part) for part in swapped.modules()] == [type(part) for part in model.modules()]


@either_kind
def test_unswap_leaves_what_others_put_on_top(make):
    model, x = make(), torch.randn(2, 3, 8)
    before = type(model)
    fastattn.swap(model)
    torch.nn.utils.parametrize.register_parametrization(model, "in_proj_weight", nn.Softplus())
    expected = model(x, x, x)[0]
    fastattn.unswap(model)
    torch.testing.assert_close(model(x, x, x)[0], expected, rtol=1e-4, atol=1e-5)
    torch.nn.utils.parametrize.remove_parametrizations(model, "in_proj_weight")
    assert type(model) is before


def test_unswap_leaves_what_was_built_as_ours():
    model = nn.ModuleList([MultiHeadAttention(8, 2), nn.MultiheadAttention(8, 2)])
    fastattn.swap(model)
    fastattn.unswap(model)
    assert [type(part) for part in model] == [MultiHeadAttention, nn.MultiheadAttention]
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, got int"):
        fastattn.unswap(3)


def test_twice_changes_nothing(calls):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True), 2)
    first, before, second = fastattn.swap(model), state_of(model), fastattn.swap(model)
    assert state_of(model) == before
    assert second == fastattn.SwapReport(already=dict.fromkeys(first.swapped, "MultiHeadAttention"))
    assert str(second) == "swapped: nothing\nswapped before: 2 MultiHeadAttention"
    model(torch.randn(1, 3, 8))
    assert calls == attentions(model)


class DoublingLayer(nn.TransformerEncoderLayer):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


class OwnEncoder(nn.TransformerEncoder):
    pass


class OwnDecoderLayer(nn.TransformerDecoderLayer):
    pass


class RenamedAttention(nn.MultiheadAttention):
    pass


SIZES = {"d_model": 16, "nhead": 4, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True, "dtype": torch.float64}


def encoder(layer: nn.Module | None = None, place: int = 1) -> nn.TransformerEncoder:
    """Three layers, one of them this one, or the first once more."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(**SIZES), 3)
    model.layers[place] = layer or model.layers[0]
    return model


def layers_in_a_sequential() -> nn.Module:
    layer = nn.TransformerEncoderLayer(**SIZES)
    return nn.Sequential(layer, nn.Linear(16, 16, dtype=torch.float64), layer)


def layer_with_a_refused_attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(**SIZES)
    layer.self_attn = RenamedAttention(16, 4, batch_first=True, dtype=torch.float64)
    return layer


def transformer_with_its_own_encoder() -> nn.Module:
    own = OwnEncoder(DoublingLayer(**SIZES), 2)
    return nn.Transformer(**SIZES, num_encoder_layers=1, num_decoder_layers=1, custom_encoder=own)


STRUCTURES = {  # how many attention modules are swapped; the names of those that padding has in a call
    layers_in_a_sequential: (1, ()),
    lambda: encoder(place=2): (2, ("src_key_padding_mask",)),
    lambda: encoder(DoublingLayer(**SIZES)): (3, ("src_key_padding_mask",)),
    lambda: encoder(layer_with_a_refused_attention()): (2, ("src_key_padding_mask",)),
    lambda: OwnEncoder(nn.TransformerEncoderLayer(**SIZES), 2): (2, ("src_key_padding_mask",)),
    lambda: nn.TransformerDecoder(OwnDecoderLayer(**SIZES), 2): (4, ("tgt_key_padding_mask",)),
    transformer_with_its_own_encoder: (4, ("src_key_padding_mask", "memory_key_padding_mask")),
}


@may_fall_back
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", STRUCTURES)
def test_structures(make, training, grad, calls):
    torch.manual_seed(0)
    model = make().train(training)
    swapped = copy.deepcopy(model)
    count, names = STRUCTURES[make]
    assert len(fastattn.swap(swapped).swapped) == count
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    hidden = torch.arange(7) >= torch.tensor([[6], [3]])
    args = (x, x.flip(1)) if isinstance(model, nn.Transformer | nn.TransformerDecoder) else (x,)
    real = ~hidden if names and not isinstance(model, nn.Transformer) else ...  # that one pads its source alone
    with torch.set_grad_enabled(grad):
        actual, expected = (m(*args, **dict.fromkeys(names, hidden)) for m in (swapped, model))
    assert len(set(calls)) == count
    assert_same(actual[real], expected[real])
    if grad:
        gradients = (
            torch.autograd.grad(o[real].square().sum(), tuple(m.parameters()))
            for o, m in ((actual, swapped), (expected, model))
        )
        assert_same(*gradients)


class OwnAttention(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return None, None


def with_changed(name: str, value: object) -> nn.Module:
    module = nn.MultiheadAttention(8, 2)
    setattr(module, name, value)
    return module


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: OwnAttention(8, 2), "OwnAttention is a subclass of nn.MultiheadAttention"),
        (lambda: torch.ao.nn.quantizable.MultiheadAttention(8, 2), "quantised"),
        (lambda: torch.jit.script(nn.MultiheadAttention(8, 2)), "TorchScript"),
        (lambda: weight_norm(nn.MultiheadAttention(8, 2), "in_proj_weight"), "ParametrizedMultiheadAttention is a sub"),
        (lambda: with_changed("forward", lambda *args, **kwargs: None), "forward was replaced"),
        (
            lambda: with_changed("out_proj", nn.Sequential(nn.Linear(8, 8))),
            "out_proj is a torch.nn.modules.container.Sequential, not a torch.nn.Linear",
        ),
    ],
)
def test_refused_with_the_reason(make: Callable[[], nn.Module], why):
    assert_refused(nn.MultiheadAttention(8, 2), make(), why)


def test_a_refused_layer_keeps_its_fast_path():
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    layer.self_attn = OwnAttention(8, 2, batch_first=True)
    before = dict(vars(layer))
    fastattn.swap(layer)
    assert vars(layer) == before


def test_a_model_without_attention():
    report = fastattn.swap(nn.Linear(2, 2))
    assert report == fastattn.SwapReport()
    assert str(report).startswith("nothing to swap: the model has no attention that fastattn knows. ")


def test_a_report_that_is_taken_for_the_model_says_so():
    report = fastattn.swap(nn.MultiheadAttention(8, 2))
    how = r"write fastattn.swap\(model\), not model = \.\.\."
    with pytest.raises(TypeError, match=how):
        report(torch.ones(1))
    with pytest.raises(AttributeError, match=f"SwapReport has no attribute 'eval': .*{how}"):
        report.eval()
    assert pickle.loads(pickle.dumps(report)) == copy.deepcopy(report) == report


def test_what_is_no_module_is_refused():
    with pytest.raises(ValueError, match=r"model must be a torch.nn.Module, got str"):
        fastattn.swap("bert-base-uncased")


def test_nothing_is_swapped_where_nothing_would_be_faster(monkeypatch):
    monkeypatch.setattr(type(build.CPU), "missing", lambda self: "there is no C++ compiler")
    model = nn.TransformerEncoderLayer(8, 2)
    report = fastattn.swap(model)
    assert type(model.self_attn) is nn.MultiheadAttention
    assert str(report) == (
        "swapped: nothing\nnot swapped: the model: it would not be faster, since no kernel of fastattn serves on its "
        "device, cpu (cpu: there is no C++ compiler)"
    )
    with torch.device("meta"):
        assert fastattn.swap(nn.MultiheadAttention(8, 2)).swapped, "nobody knows where it will be"


def test_a_model_that_may_move_to_a_gpu_with_kernels_is_swapped(monkeypatch):
    monkeypatch.setattr(type(build.CPU), "missing", lambda self: "there is no C++ compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        sys.modules["fastattn.swap"], "missing_kernels", lambda device: None if device.type == "cuda" else "no compiler"
    )
    assert fastattn.swap(nn.MultiheadAttention(8, 2)).swapped


class MeanAttention(nn.Module):
    batch_first = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, is_causal=False):
        return self.linear(value.mean(1, keepdim=True).expand_as(query)), None


@pytest.mark.parametrize("names", [("self_attn",), ("multihead_attn",), ("self_attn", "multihead_attn")], ids=str)
def test_a_layer_with_an_attention_of_somebody_elses_stays(names):
    layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True).eval()
    for name in names:
        setattr(layer, name, MeanAttention())
    x = torch.randn(2, 6, 8)
    expected = layer(x, x)
    fastattn.swap(layer)
    assert type(layer) is nn.TransformerDecoderLayer
    torch.testing.assert_close(layer(x, x), expected)


class OfTorchsArguments(fastattn.nn.TransformerEncoderLayer):
    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        return super().forward(src, src_mask, src_key_padding_mask, is_causal)


def test_layers_may_take_the_arguments_of_torchs_alone():
    stack = fastattn.nn.TransformerEncoder(OfTorchsArguments(8, 2, 16, batch_first=True), 2).eval()
    own = fastattn.nn.TransformerEncoder(fastattn.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    own.load_state_dict(stack.state_dict())
    x, padding = torch.randn(2, 6, 8), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 2:] = True
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    for arguments in ({"mask": mask}, {"src_key_padding_mask": padding}, {"mask": torch.randn(6, 6)}):
        torch.testing.assert_close(stack(x, **arguments)[~padding], own(x, **arguments)[~padding])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masks_of_autocast(dtype):
    model, x = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval(), torch.randn(2, 6, 8)
    padding = torch.zeros(2, 6, dtype=dtype)
    padding[1, 3:] = -torch.inf
    with torch.autocast("cpu", dtype=dtype):
        mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=dtype)
        arguments = {"tgt_mask": mask, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        expected = model(x, x, **arguments)
        fastattn.swap(model)
        torch.testing.assert_close(model(x, x, **arguments), expected, rtol=0.05, atol=0.05)
