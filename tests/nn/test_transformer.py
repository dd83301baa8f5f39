"""The Transformer of fastattn.nn: torch's answers and state_dict, no work on padding, causality, its own options."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import jvp, linearize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import module as hooks_of_all
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune
from torch_samples import TORCH_MODULES, assert_same, outputs_and_gradients, samples, without_fast_path, zero_at_padding

import fastattn
from fastattn import Mask
from fastattn.nn import (
    KVCache,
    Packing,
    RotaryPositions,
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
    swiglu,
)

# The tests compute in fp64, which no fused backend takes.
pytestmark = pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")

B, L, S, E, H = 3, 7, 5, 16, 4
PADDINGS = {  # True hides
    "right": torch.arange(L) >= torch.tensor([[7], [3], [5]]),
    "left": torch.arange(L) < torch.tensor([[0], [4], [2]]),
    "holes": torch.tensor([[0, 1, 0, 0, 1, 0, 0], [1, 1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0]]).bool(),
    "a whole sample": torch.arange(L) >= torch.tensor([[7], [0], [4]]),
}
OPTIONS = {
    "post-norm": {},
    "pre-norm, gelu, no bias": {"norm_first": True, "activation": "gelu", "bias": False},
    "rms, swiglu, grouped heads": {"norm": "rms", "activation": "swiglu", "num_kv_heads": 2, "norm_first": True},
    "sequence first": {"batch_first": False},
}


def layer_of(cls: type[nn.Module], **options: object) -> nn.Module:
    torch.manual_seed(0)
    return cls(E, H, 32, **({"dropout": 0.0, "batch_first": True, "dtype": torch.float64} | options))


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def randomised(module: nn.Module) -> nn.Module:
    """The module with other parameters in each layer."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module


class Rows:
    """How many rows each Linear of a module was given: what its layers computed. Hooks on them would see padding."""

    def __init__(self, module: nn.Module) -> None:
        self.seen: set[int] = set()
        self.parts = {part for part in module.modules() if type(part) is nn.Linear}
        register_module_forward_hook(self.look)

    def look(self, part: nn.Module, args: tuple, _: object) -> None:
        if part in self.parts:
            self.seen.add(args[0].shape[:-1].numel())


@pytest.fixture(autouse=True)
def _no_rows_are_looked_at_later() -> Iterator[None]:
    yield
    hooks_of_all._global_forward_hooks.clear()


@pytest.mark.parametrize("hooked", [lambda layer: layer, lambda layer: layer.linear2, lambda layer: layer.norm1])
def test_hooks_see_the_batch_as_it_came(hooked):
    """What they change is changed where it is in torch's layers."""
    ours = TransformerEncoder(layer_of(TransformerEncoderLayer), 2)
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 32, 0.0, batch_first=True, dtype=torch.float64), 2)
    theirs.load_state_dict(randomised(ours).state_dict())
    for encoder in (ours, theirs):
        hooked(encoder.layers[0]).register_forward_hook(lambda _, __, out: out.index_fill(1, torch.tensor([0]), 0.0))
    x, padding = normal(B, L, E), PADDINGS["right"]
    actual, expected = (encoder(x, src_key_padding_mask=padding) for encoder in (ours, theirs))
    assert_same(actual, expected.masked_fill(padding[..., None], 0))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("argument", ["layer's mask", "attn_mask", "key_padding_mask"])
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_hooks_that_set_a_mask_leave_the_others(stack, argument, padded):
    of_stack = {"encoder": "src_mask", "decoder": "tgt_mask"}[stack]
    name = of_stack if argument == "layer's mask" else argument
    real = torch.arange(9) < torch.tensor([[9], [5]])
    far = (torch.arange(9)[:, None] - torch.arange(9)).abs() > 1
    if stack == "encoder":
        theirs = nn.TransformerEncoder(layer_of(nn.TransformerEncoderLayer), 2)
    else:
        theirs = nn.TransformerDecoder(layer_of(nn.TransformerDecoderLayer), 2)

    def put(_, args, kwargs):
        assert name in kwargs  # and the others are by position, as in PyTorch
        assert len(args) == (3 if name != of_stack else 1 if stack == "encoder" else 2)
        return args, kwargs | {name: ~real if argument == "key_padding_mask" else far}

    for layer in theirs.layers:
        (layer if name == of_stack else layer.self_attn).register_forward_pre_hook(put, with_kwargs=True)
    ours = copy.deepcopy(theirs)
    fastattn.swap(ours)
    x, padding = normal(2, 9, E), ~real if padded else None
    if stack == "encoder":
        o, expected = (module(x, src_key_padding_mask=padding) for module in (ours, theirs))
    else:
        o, expected = (module(x, x, tgt_key_padding_mask=padding) for module in (ours, theirs))
    assert_same(o[real], expected[real])


def test_hooks_of_pytorch_leave_the_masks_of_a_stack_prepared(monkeypatch):
    encoder, masks = TransformerEncoder(layer_of(TransformerEncoderLayer), 2), []
    forward = TransformerEncoderLayer.forward

    def look(self, src, **options):
        masks.append(options["src_mask"])
        return forward(self, src, **options)

    monkeypatch.setattr(TransformerEncoderLayer, "forward", look)
    for layer in encoder.layers:
        prune.identity(layer.self_attn, "in_proj_weight")
    encoder(normal(2, 9, E), src_key_padding_mask=torch.arange(9) >= torch.tensor([[9], [5]]))
    assert masks
    assert all(isinstance(mask, Mask) and mask.real_queries is not None for mask in masks)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_see_the_gradients_as_the_batch_came(register):
    encoder, seen = TransformerEncoder(layer_of(TransformerEncoderLayer), 2), []
    getattr(encoder.layers[0].linear1, register)(lambda _, *gradients: seen.append(gradients[-1][0].shape[:-1]))
    encoder(normal(B, L, E), src_key_padding_mask=PADDINGS["right"]).sum().backward()
    assert seen == [(B, L)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cls", [TransformerEncoderLayer, TransformerDecoderLayer])
def test_a_layer_with_a_forward_of_its_own_is_given_the_masks_that_the_stack_was_given(cls, padded):
    given = []

    class Looking(cls):
        def forward(self, *args, **kwargs):
            given.append(kwargs)
            return super().forward(*args, **kwargs)

    causal, padding = torch.ones(L, L).triu(1).bool(), PADDINGS["right"] if padded else None
    x, is_decoder = normal(B, L, E), cls is TransformerDecoderLayer
    (own, looking), masks = (layer_of(cls), layer_of(Looking)), {"src_mask": causal, "src_key_padding_mask": padding}
    if is_decoder:
        names = "tgt_mask", "tgt_key_padding_mask", "memory_mask", "memory_key_padding_mask"
        masks = dict(zip(names, (causal, padding) * 2, strict=True))
    stacks = [(TransformerDecoder if is_decoder else TransformerEncoder)(layer, 2) for layer in (own, looking)]
    stacks[1].load_state_dict(randomised(stacks[0]).state_dict())
    call = masks if is_decoder else {"mask": causal, "src_key_padding_mask": padding}
    expected, actual = (stack(*(x,) * (1 + is_decoder), **call) for stack in stacks)
    real = torch.ones(B, L, dtype=torch.bool) if padding is None else ~padding
    assert_same(actual[real], expected[real])
    assert len(given) == 2
    for options in given:
        assert all(options[name] is mask for name, mask in masks.items())


@pytest.mark.parametrize("name", [*TORCH_MODULES, "TransformerDecoder"])
def test_constructors_begin_with_torchs_arguments(name):
    theirs = inspect.signature(getattr(nn, name)).parameters.values()
    ours = inspect.signature(getattr(fastattn.nn, name)).parameters.values()
    positional = [(p.name, p.default) for p in ours if p.kind is not p.KEYWORD_ONLY]
    assert positional == [(p.name, p.default) for p in theirs]
    assert issubclass(getattr(fastattn.nn, name), getattr(nn, name))


def settings(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> dict:
    """The arguments that a layer of torch's was made with."""
    return {
        "d_model": layer.self_attn.embed_dim,
        "nhead": layer.self_attn.num_heads,
        "dim_feedforward": layer.linear1.out_features,
        "dropout": layer.dropout.p,
        "activation": layer.activation,
        "batch_first": layer.self_attn.batch_first,
        "norm_first": layer.norm_first,
        "bias": layer.linear1.bias is not None,
    }


def ours_for(module: nn.Module) -> nn.Module:
    """A module of ours, built anew, with the parameters of this one of torch's."""
    if isinstance(module, nn.TransformerEncoder):
        layer = TransformerEncoderLayer(**settings(module.layers[0]))
        ours = TransformerEncoder(layer, module.num_layers, enable_nested_tensor=module.enable_nested_tensor)
    elif isinstance(module, nn.Transformer):
        layers = {"num_encoder_layers": module.encoder.num_layers, "num_decoder_layers": module.decoder.num_layers}
        ours = Transformer(**settings(module.encoder.layers[0]), **layers)
    else:
        ours = getattr(fastattn.nn, type(module).__name__)(**settings(module))
    ours.double().load_state_dict(module.state_dict(), strict=True)
    return ours


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", TORCH_MODULES)
def test_torchs_own_samples(name):
    for module, args, kwargs in samples(name):
        ours = ours_for(module)
        zero_at_padding(module)
        assert_same(outputs_and_gradients(ours, args, kwargs), outputs_and_gradients(module, args, kwargs))
        with torch.no_grad(), without_fast_path():
            assert_same(ours.eval()(*args, **kwargs), module.eval()(*args, **kwargs))


def packed_and_padded(
    packs: nn.Module, inputs: list[Tensor], kwargs: dict, padding: Tensor, options: dict
) -> tuple[dict[str, Tensor], Tensor]:
    """What a stack gives of the real tokens alone, which is what it gives of the batch; and where the others are."""
    pads = copy.deepcopy(randomised(packs))
    for layer in pads.layers:
        layer.register_forward_hook(lambda *_: None)  # who looks at a layer sees the batch as it came
    hidden = padding
    if not options.get("batch_first", True):
        hidden, inputs = padding.T, [x.detach().transpose(0, 1).requires_grad_() for x in inputs]
    rows = {model: Rows(model) for model in (packs, pads)}
    actual, expected = (outputs_and_gradients(model, tuple(inputs), kwargs) for model in (packs, pads))
    assert_same(actual, expected)
    assert rows[packs].seen == {int((~padding).sum())}
    assert rows[pads].seen == {B * L}
    assert actual["output"][hidden].abs().max() == 0
    return actual, hidden


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("options", OPTIONS)
def test_an_encoder_computes_the_real_tokens_only(options, padding, rotary, causal):
    options, padding = OPTIONS[options], PADDINGS[padding]
    rotary = RotaryPositions(E // H) if rotary else None
    layer = layer_of(TransformerEncoderLayer, **options)
    encoder = TransformerEncoder(layer, 2, nn.LayerNorm(E, dtype=torch.float64), rotary=rotary)
    kwargs = {"mask": Mask(causal=True) if causal else None, "src_key_padding_mask": padding}
    actual, hidden = packed_and_padded(encoder, [normal(B, L, E)], kwargs, padding, options)
    assert actual["input 0"][hidden].abs().max() == 0


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_decoder_computes_the_real_tokens_only(options, padding, rotary):
    options, padding = OPTIONS[options], PADDINGS[padding]
    memory_padding = torch.arange(S) >= torch.tensor([[2], [5], [3]])
    rotary = RotaryPositions(E // H) if rotary else None
    decoder = TransformerDecoder(layer_of(TransformerDecoderLayer, **options), 2, rotary=rotary)
    masks = {"tgt_key_padding_mask": padding, "memory_key_padding_mask": memory_padding}
    inputs = [normal(B, L, E), normal(B, S, E, seed=1)]
    packed_and_padded(decoder, inputs, {"tgt_mask": Mask(causal=True)} | masks, padding, options)


def test_the_memory_alone_may_be_padded():
    decoder = randomised(TransformerDecoder(layer_of(TransformerDecoderLayer), 2))
    x, memory = normal(B, L, E), normal(B, S, E, seed=1)
    padding = torch.arange(S) >= torch.tensor([[2], [1], [3]])
    actual = decoder(x, memory, memory_key_padding_mask=padding)
    for b in range(B):
        assert_same(actual[b], decoder(x[b : b + 1], memory[b : b + 1, ~padding[b]])[0])


@pytest.mark.parametrize("stack", [TransformerEncoder, TransformerDecoder])
def test_padding_is_never_read(stack):
    layer = layer_of(TransformerEncoderLayer if stack is TransformerEncoder else TransformerDecoderLayer)
    model, padding = randomised(stack(layer, 2)), PADDINGS["right"]
    masked = ["src"] if stack is TransformerEncoder else ["tgt", "memory"]
    kwargs, inputs = {f"{of}_key_padding_mask": padding for of in masked}, normal(2, B, L, E)[: len(masked)]
    poisoned = [x.detach().masked_fill(padding[..., None], torch.nan).requires_grad_() for x in inputs]
    actual, expected = (outputs_and_gradients(model, tuple(xs), kwargs) for xs in (poisoned, inputs))
    assert_same(actual, expected)


def test_what_is_more_than_padding_and_causality_is_not_packed():
    encoder = randomised(TransformerEncoder(layer_of(TransformerEncoderLayer), 2))
    x, padding = normal(B, L, E), PADDINGS["right"]
    rows = Rows(encoder)
    bias = torch.randn(L, L, dtype=torch.float64)
    dense = torch.rand(L, L) < 0.3
    theirs = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(E, H, 32, 0.0, batch_first=True, dtype=torch.float64), 2, enable_nested_tensor=False
    )
    theirs.load_state_dict(encoder.state_dict())
    for mask in (bias, dense.fill_diagonal_(False)):
        actual = encoder(x, mask, padding)
        expected = theirs(x, mask, padding)
        assert_same(actual, expected.masked_fill(padding[..., None], 0))
    window = encoder(x, Mask(window=(1, 1)), padding)
    assert_same(window, encoder(x, ~Mask(window=(1, 1)).keep(L, L)[0, 0], padding))
    assert rows.seen == {B * L}


class Centred(nn.Module):
    """What it gives for a token depends on the others of the sample, padding among them."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("activation", "part", "norm"),
    [
        (lambda x: x.softmax(1), None, None),
        (lambda x: F.normalize(x, dim=2), None, None),
        (F.relu, None, nn.LayerNorm((L, E), dtype=torch.float64)),
        (F.relu, None, Centred()),
        *((F.relu, part, None) for part in ("norm1", "dropout1", "activation")),
    ],
    ids=["softmax", "dim 2", "norm of tokens", "norm", "norm1", "dropout1", "activation"],
)
@pytest.mark.parametrize("name", ["Encoder", "Decoder"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_what_computes_tokens_together_gets_them_as_in_torch(name, activation, part, norm):
    stacks = []
    for package in (fastattn.nn, nn):
        torch.manual_seed(0)
        options = {"batch_first": True, "dtype": torch.float64, "activation": activation}
        layer = getattr(package, f"Transformer{name}Layer")(E, H, 32, 0.0, **options)
        stacks.append(getattr(package, f"Transformer{name}")(layer, 1, norm))
    stacks[1].load_state_dict(stacks[0].state_dict())
    for stack in stacks if part else ():
        setattr(stack.layers[0], part, Centred())
    x, padding = normal(B, L, E), PADDINGS["right"]
    masks = {f"{of}_key_padding_mask": padding for of in (["src"] if name == "Encoder" else ["tgt", "memory"])}
    ours, theirs = (stack(x, *[x][: len(masks) - 1], **masks) for stack in stacks)
    assert_same(ours[~padding], theirs[~padding])


@pytest.mark.parametrize("activation", [F.silu, functools.partial(F.gelu, approximate="tanh"), nn.Mish()])
def test_activations_of_elements_are_packed(activation):
    encoder = TransformerEncoder(layer_of(TransformerEncoderLayer, activation=activation), 1)
    rows = Rows(encoder)
    encoder(normal(B, L, E), src_key_padding_mask=PADDINGS["right"])
    assert rows.seen == {int((~PADDINGS["right"]).sum())}


@pytest.mark.parametrize(
    "wrap", [checkpoint_wrapper, functools.partial(torch.compile, backend="eager")], ids=["checkpoint", "compile"]
)
@pytest.mark.parametrize("name", ["Encoder", "Decoder"])
@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_wrapped_layers_are_packed(name, wrap, request):
    request.addfinalizer(torch._dynamo.reset)
    stack = getattr(fastattn.nn, f"Transformer{name}")(layer_of(getattr(fastattn.nn, f"Transformer{name}Layer")), 2)
    x, padding = normal(B, L, E), PADDINGS["right"]
    masks = {f"{of}_key_padding_mask": padding for of in (["src"] if name == "Encoder" else ["tgt", "memory"])}
    inputs = [x] * len(masks)
    expected = stack(*inputs, **masks)
    for i, layer in enumerate(stack.layers):
        stack.layers[i] = wrap(layer)
    rows = Rows(stack)
    assert_same(stack(*inputs, **masks), expected)
    assert rows.seen == {int((~padding).sum())}


def test_little_padding_is_not_packed():
    encoder = TransformerEncoder(layer_of(TransformerEncoderLayer), 2)
    rows = Rows(encoder)
    padding = torch.zeros(B, L, dtype=torch.bool)
    padding[0, -1] = True
    assert encoder(normal(B, L, E), src_key_padding_mask=padding)[0, -1].abs().max() == 0
    assert rows.seen == {B * L}


def test_a_batch_that_does_not_fit_is_refused():
    decoder = TransformerDecoder(layer_of(TransformerDecoderLayer), 2)
    with pytest.raises(RuntimeError, match="memory must have a batch of 3 like tgt, got 2"):
        decoder(normal(B, L, E), normal(2, L, E), tgt_key_padding_mask=PADDINGS["right"])
    encoder = TransformerEncoder(layer_of(TransformerEncoderLayer), 2)
    with pytest.raises(AssertionError, match=r"key_padding_mask must be \[3, 7\], got \[3, 5\]"):
        encoder(normal(B, L, E), src_key_padding_mask=PADDINGS["right"][:, :5])


@pytest.mark.parametrize("hooked", ["a module", "all modules"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_activation_leaves_what_a_hook_has_seen(activation, hooked):
    layer = TransformerEncoderLayer(E, H, activation=activation, batch_first=True).eval()
    x, seen = torch.randn(B, L, E), []
    with torch.no_grad():
        expected = layer(x)
        register = layer.linear1.register_forward_hook if hooked == "a module" else register_module_forward_hook
        hook = register(lambda module, _, output: seen.append((module, output)))
        try:
            torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
        finally:
            hook.remove()
    assert any(module is layer.linear1 and (output < -0.5).any() for module, output in seen)


@pytest.mark.parametrize("name", ["dropout", "dropout1", "dropout2"])
def test_dropout_that_is_trained_or_watched_is_called(name):
    layer, x = TransformerEncoderLayer(E, H, dropout=0.5, batch_first=True).eval(), torch.randn(B, L, E)
    dropout, called = layer.get_submodule(name), []
    expected = layer(x)
    for register in (dropout.register_forward_hook, dropout.register_forward_pre_hook, register_module_forward_hook):
        hook = register(lambda module, *_: called.append(module))
        try:
            torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
        finally:
            hook.remove()
        assert dropout in called
        called.clear()
    dropout.train()  # as for Monte Carlo dropout
    assert not torch.equal(layer(x), layer(x))
    setattr(layer, name, nn.Tanh().eval())
    assert not torch.equal(layer(x), expected)


def test_swiglu():
    x = normal(2, 6)
    assert_same(swiglu(x), x[:, :3] * torch.sigmoid(x[:, :3]) * x[:, 3:])
    layer = layer_of(TransformerEncoderLayer, activation="swiglu")
    assert layer.linear1.out_features == 2 * layer.linear2.in_features == 64


def test_grouped_heads_are_repeated_heads():
    """H_kv heads of keys and values, each repeated for the queries that share it, are plain attention."""
    torch.manual_seed(0)
    grouped = fastattn.MultiHeadAttention(E, H, batch_first=True, num_kv_heads=2, dtype=torch.float64)
    plain = fastattn.MultiHeadAttention(E, H, batch_first=True, dtype=torch.float64)
    assert grouped.in_proj_weight.shape == (E + 2 * 2 * E // H, E)

    def repeated(rows: Tensor) -> Tensor:
        q, k, v = rows.split([E, E // 2, E // 2])
        k, v = (x.unflatten(0, (2, E // H)).repeat_interleave(H // 2, dim=0).flatten(0, 1) for x in (k, v))
        return torch.cat([q, k, v])

    with torch.no_grad():
        plain.in_proj_weight.copy_(repeated(grouped.in_proj_weight))
        plain.in_proj_bias.copy_(repeated(grouped.in_proj_bias.normal_()))
        plain.out_proj.load_state_dict(grouped.out_proj.state_dict())
    x, memory = normal(B, L, E), normal(B, S, E, seed=1)
    for inputs in ((x, x, x), (x, memory, memory), (x, memory, memory.clone())):
        for actual, expected in zip(grouped(*inputs), plain(*inputs), strict=True):
            assert_same(actual, expected)


def test_rotary_scores_depend_on_distance_alone():
    rotary = RotaryPositions(8)
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=1)

    def score(at: int, other: int) -> Tensor:
        return (rotary(torch.tensor([at]))(q) * rotary(torch.tensor([other]))(k)).sum()

    torch.testing.assert_close(score(3, 1), score(103, 101), rtol=1e-4, atol=1e-5)
    assert (score(3, 1) - score(3, 2)).abs() > 1e-3
    shifted = normal(2, H, L, 8)
    assert_same(rotary(torch.zeros(2, L, dtype=torch.int64))(shifted), shifted)


def test_rotary_is_that_of_llama():
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb

    positions = torch.tensor([[0, 5, 9], [2, 3, 400]])
    q, k = normal(2, H, 3, 8), normal(2, 2, 3, 8, seed=1)
    theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=8 * H, num_attention_heads=H))
    expected = apply_rotary_pos_emb(q, k, *theirs(q, positions))
    rotation = RotaryPositions(8)(positions)
    for actual, x in zip((rotation(q), rotation(k)), expected, strict=True):
        torch.testing.assert_close(actual, x, rtol=1e-4, atol=1e-4)  # their angles are fp32: 400 of them is 3e-5 off


@pytest.mark.parametrize("padding", PADDINGS)
def test_packing_goes_there_and_back(padding):
    packing = Packing(~PADDINGS[padding])
    x = normal(B, L, E)
    packed = packing.pack(x)
    assert torch.equal(packed, x[packing.real])
    assert torch.equal(packing.unpack(packed), x.masked_fill(~packing.real[..., None], 0))
    assert torch.equal(packing.documents[0], packing.real.nonzero()[:, 0])
    assert torch.autograd.gradcheck(lambda x: packing.unpack(packing.pack(x)), x)


def test_a_transformer_rotates_in_both_stacks():
    rotary = RotaryPositions(E // H)
    model = Transformer(E, H, 1, 1, 32, rotary=rotary)
    assert model.encoder.rotary is model.decoder.rotary is rotary


@pytest.mark.parametrize("cls", [TransformerEncoder, TransformerDecoder])
def test_layers_of_others_run_as_in_torch(cls):
    layer = getattr(nn, f"{cls.__name__}Layer")(E, H, 32, 0.0, batch_first=True, dtype=torch.float64)
    theirs, ours = getattr(nn, cls.__name__)(layer, 2), cls(layer, 2)
    x = normal(B, L, E)
    memory = () if cls is TransformerEncoder else (normal(B, S, E, seed=1),)
    assert_same(ours(x, *memory), theirs(x, *memory))


def test_torch_compile():
    torch.manual_seed(0)
    model = Transformer(E, H, 1, 1, 32, 0.0, batch_first=True)
    padding = PADDINGS["right"]
    kwargs = {"tgt_mask": Mask(causal=True), "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    inputs = tuple(normal(B, L, E).float().detach().requires_grad_() for _ in range(2))
    expected = outputs_and_gradients(model, inputs, kwargs)
    model.compile(fullgraph=True, backend="aot_eager")
    actual = outputs_and_gradients(model, inputs, kwargs)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("name", ["Encoder", "Decoder"])
def test_compiled_stacks_take_float_padding_as_eager_ones(name, batched, request):
    """They are 0 at -inf where a mask has no other values than 0 and -inf, of which a graph cannot know."""
    request.addfinalizer(torch._dynamo.reset)
    stack = getattr(fastattn.nn, f"Transformer{name}")(layer_of(getattr(fastattn.nn, f"Transformer{name}Layer")), 1)
    compiled = torch.compile(stack, fullgraph=True, backend="eager")
    x, padding = normal(B, L, E), torch.zeros(B, L, dtype=torch.float64).masked_fill(PADDINGS["right"], -torch.inf)
    x, padding = (x, padding) if batched else (x[1], padding[1])
    inputs, argument = ([x], "src_key_padding_mask") if name == "Encoder" else ([x, x], "tgt_key_padding_mask")
    for mask in (padding, padding + 0.5):
        assert_same(compiled(*inputs, **{argument: mask}), stack(*inputs, **{argument: mask}))


def test_autocast_and_bf16():
    torch.manual_seed(0)
    encoder = TransformerEncoder(TransformerEncoderLayer(E, H, 32, 0.0, batch_first=True), 2)
    x, padding = normal(B, L, E).float().detach(), PADDINGS["right"]
    expected = encoder(x, src_key_padding_mask=padding)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = encoder(x, src_key_padding_mask=padding)
    half = encoder.bfloat16()(x.bfloat16(), src_key_padding_mask=padding)
    assert half.dtype == torch.bfloat16
    for actual in (cast, half):
        torch.testing.assert_close(actual.float(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("cls", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
@pytest.mark.parametrize("block", ["_sa_block", "_mha_block", "_ff_block"])
def test_an_override_that_would_not_be_called_is_refused(cls, block):
    """Layers of torch.nn call these methods, so that code written for them may override one."""
    ours = getattr(fastattn.nn, cls.__name__)
    assert issubclass(type("Changed", (ours,), {"forward": lambda self, x: x}), cls)
    with pytest.raises(TypeError, match=f"Changed must override forward, got {block}, which torch.nn's layers"):
        type("Changed", (ours,), {block: lambda self, x: x})


def stack_of(name: str, package: ModuleType = fastattn.nn, **options: object) -> nn.Module:
    layer = getattr(package, f"Transformer{name}Layer")(E, H, 32, 0.0, batch_first=True)
    return getattr(fastattn.nn, f"Transformer{name}")(layer, 1, **options)


@pytest.mark.parametrize("name", ["Encoder", "Decoder"])
@pytest.mark.parametrize(
    ("made", "given", "why"),
    [
        ({"package": nn, "rotary": RotaryPositions(4)}, {}, "rotary must be None with layers of other classes"),
        ({"package": nn}, {"cache": KVCache(2, 5)}, "cache must be None with layers of other classes"),
        ({"rotary": RotaryPositions(4)}, {"cache": KVCache(2, 5), "positions": torch.arange(5)}, "None with a cache"),
        ({}, {"positions": torch.arange(5)}, "positions must be None without rotary"),
        ({"rotary": RotaryPositions(4)}, {"positions": [0, 1, 2, 3, 4]}, "positions must be a Tensor, got list"),
        ({"rotary": RotaryPositions(4)}, {"positions": torch.ones(1, 1, 5)}, "positions must be [2, 5] or [5], got"),
    ],
)
def test_nothing_that_is_given_to_a_stack_is_ignored(name, made, given, why):
    x = torch.ones(2, 5, E)
    with pytest.raises((ValueError, TypeError), match=re.escape(why)):
        stack_of(name, **made)(x, *[x] * (name == "Decoder"), **given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_what_nested_tensors_cannot_have(layout):
    x = torch.nested.nested_tensor([torch.ones(5, E), torch.ones(2, E)], layout=layout)
    for made, given in (({"rotary": RotaryPositions(4)}, {}), ({}, {"cache": KVCache(2, 5)})):
        with pytest.raises(ValueError, match="must be None where src is nested, got a"):
            stack_of("Encoder", **made)(x, **given)
    with pytest.raises(ValueError, match="tgt must be dense, got a nested Tensor"):
        stack_of("Decoder")(x, x)
    rotation = RotaryPositions(4)(torch.arange(5))
    with pytest.raises(AssertionError, match="rotation must be None where query is nested, got Rotation"):
        layer_of(TransformerEncoderLayer, batch_first=True)(x.double(), rotation=rotation)
    if layout == torch.strided:
        with pytest.raises(ValueError, match="mask must be None where src is nested, got a Mask"):
            stack_of("Encoder")(x, Mask(causal=True))
    else:
        with pytest.raises(ValueError, match="is_causal must be None beside a Mask, got a bool"):
            stack_of("Encoder")(x, Mask(causal=True), is_causal=True)


@pytest.mark.parametrize("trace", [lambda f, x: make_fx(f)(x), lambda f, x: linearize(f, x)[1]])
def test_a_padded_batch_is_traced(trace):
    """What is traced is of every batch: nothing may depend on which tokens are padding."""
    encoder, x = randomised(TransformerEncoder(layer_of(TransformerEncoderLayer), 2)), normal(B, L, E)

    def output(x: Tensor) -> Tensor:
        return encoder(x, src_key_padding_mask=PADDINGS["right"])

    given = normal(B, L, E, seed=1)
    expected = output(given) if isinstance(traced := trace(output, x), nn.Module) else jvp(output, (x,), (given,))[1]
    assert_same(traced(given), expected)


@pytest.mark.parametrize("name", ["Encoder", "Decoder"])
def test_what_is_no_batch_of_tokens_is_refused_by_name(name):
    stack, x = stack_of(name), torch.ones(2, 5, E)
    first, mask = ("src", "mask") if name == "Encoder" else ("tgt", "tgt_mask")
    with pytest.raises(AssertionError, match=rf"{first} must have 3 dimensions, or 2 without a batch, got \[16\]"):
        stack(x[0, 0], *[x] * (name == "Decoder"), **{mask: Mask(causal=True)})
    with pytest.raises(TypeError, match=f"{first} must be a Tensor, got NoneType"):
        stack(None, *[x] * (name == "Decoder"))
    with pytest.raises(ValueError, match=r"mask.real_keys must be \[2, 5\], got \[1, 5\]"):
        stack(x, *[x] * (name == "Decoder"), **{mask: Mask(real_keys=torch.arange(5)[None] < 2)})


@pytest.mark.parametrize("name", ["Encoder", "Decoder"])
def test_a_mask_does_not_lose_what_stands_beside_it(name):
    stack, x, mask = stack_of(name), torch.ones(2, 5, E), "mask" if name == "Encoder" else "tgt_mask"
    padding = {"src_key_padding_mask" if name == "Encoder" else "tgt_key_padding_mask": torch.zeros(2, 5).bool()}
    with pytest.raises(ValueError, match=r"mask.real_queries must fit that of the other mask, got \[1, 5\]"):
        stack(x, *[x] * (name == "Decoder"), **{mask: Mask(real_queries=torch.arange(5)[None] < 2)}, **padding)
    with pytest.raises(ValueError, match="is_causal must be False beside a Mask without causal, got True"):
        stack(x, *[x] * (name == "Decoder"), **{mask: Mask(), mask.replace("mask", "is_causal"): True})


def test_activations_need_no_hash():
    class Doubled:
        __hash__ = None

        def __call__(self, x: Tensor) -> Tensor:
            return 2 * x

    layer, x = TransformerEncoderLayer(E, H, 32, 0.0, Doubled(), batch_first=True), torch.randn(2, 5, E)
    with torch.no_grad():
        without_gradients = layer(x)
    assert_same(without_gradients, layer(x))


@pytest.mark.parametrize("mask", [None, Mask(causal=True, window=(1, None))], ids=str)
def test_an_encoder_takes_jagged_tensors(mask):
    encoder = stack_of("Encoder", norm=nn.LayerNorm(E))
    x = [torch.randn(5, E), torch.randn(2, E)]
    nested = encoder(torch.nested.nested_tensor(x, layout=torch.jagged), mask)
    for actual, alone in zip(nested.unbind(), x, strict=True):
        assert_same(actual, encoder(alone, mask))


@pytest.mark.parametrize("shape", [(1, 3), (1, 1), (3, 5)], ids=str)
def test_a_rotation_is_of_the_tokens(shape):
    layer, rotation = layer_of(TransformerEncoderLayer), RotaryPositions(4)(torch.ones(shape).long())
    with pytest.raises(ValueError, match=re.escape(f"rotation must be [2 or 1, 1, 5, 4], got [{shape[0]}, 1, ")):
        layer(normal(2, 5, E), rotation=rotation)
