"""MultiHeadAttention is torch.nn.MultiheadAttention in parameters, answers, gradients and refusals, but never NaN."""

import copy
import gc
import inspect
import io
import math
import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.testing._internal.common_modules import module_db
from torch.utils.checkpoint import checkpoint

from fastattn import Mask, MultiHeadAttention, RelativeBias
from fastattn.nn import KVCache, RotaryPositions, masks
from fastattn.nn import attention as module_file
from fastattn.nn.masks import from_torch
from fastattn.testing import compare

# Modules are compared in float64 and with masks of every kind, which not every fused kernel takes.
pytestmark = pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")

causal_mask = nn.Transformer.generate_square_subsequent_mask
assert_same = torch.testing.assert_close  # in float64, where its defaults leave room for rounding alone


def pair(
    *sizes: int, dtype: torch.dtype = torch.float64, **options
) -> tuple[nn.MultiheadAttention, MultiHeadAttention]:
    """torch's module and ours, with the same random parameters (biases too).

    They are small, so that no softmax saturates: there autograd cancels exactly what fused backwards round.
    """
    theirs = nn.MultiheadAttention(*sizes, **options, dtype=dtype)
    ours = MultiHeadAttention(*sizes, **options, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def results(module: nn.Module, *inputs: Tensor, **options) -> dict[str, Tensor]:
    """Output, weights, and the gradients of a random function of both by the inputs and parameters."""
    leaves = {id(x): x.detach().clone().requires_grad_() for x in inputs}  # one leaf where inputs are one tensor
    output, weights = module(*(leaves[id(x)] for x in inputs), **options)
    outputs = {"output": output} | ({} if weights is None else {"weights": weights})
    loss = sum((x * normal(*x.shape, seed=1).to(x.dtype)).sum() for x in outputs.values())
    by = {f"input {i}": x for i, x in enumerate(leaves.values())} | dict(module.named_parameters())
    gradients = torch.autograd.grad(loss, list(by.values()))
    return outputs | {f"gradient of {name}": g for name, g in zip(by, gradients, strict=True)}


def assert_within_budget(actual: dict[str, Tensor], naive: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """One budget for what goes forward and one for all gradients, which owe each other their rounding errors."""
    for gradients in (False, True):
        names = [name for name in exact if name.startswith("gradient") == gradients]
        flat = (torch.cat([tensors[name].flatten() for name in names]) for tensors in (actual, naive, exact))
        error = compare(", ".join(names), *flat)
        assert error.right, str(error)


def padded(*lengths: int) -> Tensor:
    """The key_padding_mask of samples of these lengths: True after their end."""
    return torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]


def as_float(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -math.inf)


def mask_of(kind: str | None, *shape: int) -> Tensor | None:
    """A mask in torch's polarity that leaves the first key to every query, so that torch has an answer."""
    if kind is None:
        return None
    hidden = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.4
    hidden[..., 0] = False
    if kind in ("causal", "causal float"):
        hidden = torch.ones(shape).triu(1).bool()
    if kind == "float":
        return normal(*shape, seed=3)
    if kind == "negative float":  # nowhere above 0, yet more than hiding
        return -normal(*shape, seed=3).abs().masked_fill(hidden, math.inf)
    return hidden if kind in ("bool", "causal") else as_float(hidden)


# ---- torch's answers


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torchs_own_module_inputs(dtype, requires_grad, training):
    info = next(info for info in module_db if info.module_cls is nn.MultiheadAttention)
    torch.manual_seed(1)
    samples = info.module_inputs_func(info, "cpu", dtype, requires_grad, training)
    assert len(samples) == 64
    for sample in samples:
        theirs, ours = pair(*sample.constructor_input.args, dtype=dtype, **sample.constructor_input.kwargs)
        inputs, options = sample.forward_input.args, sample.forward_input.kwargs
        actual, naive = (results(m.train(training), *inputs, **options) for m in (ours, theirs))
        if dtype == torch.float64:
            assert_same(actual, naive)
        else:
            assert_within_budget(actual, naive, results(theirs.double(), *(x.double() for x in inputs), **options))


@given(st.data())
@settings(max_examples=200, derandomize=True, deadline=None)
def test_every_flag(data):
    def draw(name: str, *choices):
        return data.draw(st.sampled_from(choices), label=name)

    kdim, vdim = draw("kdim, vdim", (None, None), (5, 3), (8, 3))
    batch_first, training = draw("batch_first", False, True), draw("training", False, True)
    flags = {name: draw(name, False, True) for name in ("bias", "add_bias_kv", "add_zero_attn")}
    theirs, ours = pair(8, draw("num_heads", 1, 2, 4), kdim=kdim, vdim=vdim, batch_first=batch_first, **flags)

    B, L, S = draw("batch", None, 1, 3), draw("L", 1, 4, 7), draw("S", 1, 4, 6)
    batch = () if B is None else (B,)
    query, key, value = normal(*batch, L, 8), normal(*batch, S, kdim or 8, seed=4), normal(*batch, S, vdim or 8, seed=5)
    if B is not None and not batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    if key.shape == value.shape and draw("key is value", False, True):
        value = key
    if key.shape == query.shape and draw("query is key", False, True):
        query = key

    attn_mask_shape = draw("attn_mask", (L, S), ((B or 1) * ours.num_heads, L, S))
    kinds = (None, "bool", "hiding float", "float", "negative float")
    options = {
        "key_padding_mask": mask_of(draw("key_padding_mask", *kinds), *batch, S),
        "attn_mask": mask_of(draw("attn_mask", *kinds, "causal", "causal float"), *attn_mask_shape),
        "need_weights": draw("need_weights", False, True),
        "average_attn_weights": draw("average_attn_weights", False, True),
    }
    actual, expected = (results(m.train(training), query, key, value, **options) for m in (ours, theirs))
    assert_same(actual, expected)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, need_weights):
    theirs, ours = pair(32, 4, dtype=dtype, batch_first=True)
    x = normal(3, 10, 32).to(dtype)
    options = {"key_padding_mask": padded(10, 4, 7), "need_weights": need_weights}
    actual, naive = (results(module, x, x, x, **options) for module in (ours, theirs))
    assert_within_budget(actual, naive, results(theirs.double(), *[x.double()] * 3, **options))
    assert {result.dtype for result in actual.values()} == {dtype}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(("N", "L", "S"), [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_empty(N, L, S, need_weights):
    theirs, ours = pair(8, 2, batch_first=True)
    inputs = normal(N, L, 8), normal(N, S, 8), normal(N, S, 8)
    actual, expected = (results(module, *inputs, need_weights=need_weights) for module in (ours, theirs))
    assert_same(actual, expected)


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize("key_padding_mask", [None, padded(5, 3)])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("attn_mask", [causal_mask(5).double(), mask_of("bool", 5, 5), mask_of("float", 4, 5, 5)])
def test_the_hint_is_trusted_where_torch_trusts_it(attn_mask, need_weights, key_padding_mask, options):
    theirs, ours = pair(8, 2, batch_first=True, **options)
    x = normal(2, 5, 8)
    options = {"attn_mask": attn_mask, "need_weights": need_weights, "key_padding_mask": key_padding_mask}
    actual, expected = (results(module, x, x, x, is_causal=True, **options) for module in (ours, theirs))
    assert_same(actual, expected)


def test_a_trusted_hint_takes_a_mask_of_any_shape():
    theirs, ours = pair(8, 2, batch_first=True)
    x, longer = normal(2, 5, 8), causal_mask(7).double()
    options = {"attn_mask": longer, "is_causal": True, "need_weights": False}
    assert_same(results(ours, x, x, x, **options), results(theirs, x, x, x, **options))


@pytest.mark.parametrize("which", [(0, 0, 0), (0, 1, 1), (0, 0, 1), (0, 1, 0), (0, 1, 2)])
def test_inputs_that_are_one_tensor(which):
    theirs, ours = pair(8, 2, batch_first=True)
    tensors = [normal(2, 5, 8, seed=seed) for seed in range(3)]
    actual, expected = (results(module, *(tensors[i] for i in which)) for module in (ours, theirs))
    assert_same(actual, expected)


def test_float32_masks_go_with_every_dtype():
    _, ours = pair(8, 2, dtype=torch.bfloat16, batch_first=True)
    x, mask = normal(2, 5, 8).bfloat16(), normal(5, 5).bfloat16()
    expected = results(ours, x, x, x, attn_mask=mask)
    assert_same(results(ours, x, x, x, attn_mask=mask.float()), expected, rtol=0, atol=0)


# ---- where torch gives NaN


@pytest.mark.parametrize(
    "options",
    [
        {"key_padding_mask": padded(4, 0)},
        {"key_padding_mask": as_float(padded(4, 0))},
        {"attn_mask": torch.tensor([[True] * 4, *[[False] * 4] * 3])},
        {"key_padding_mask": torch.tensor([[True, False, False, False]] * 2), "attn_mask": causal_mask(4).double()},
    ],
    ids=["sample", "sample, float", "query", "left padding, causal"],
)
def test_queries_that_see_nothing(options):
    theirs, ours = pair(8, 2, batch_first=True)
    x = normal(2, 4, 8)
    assert theirs(x, x, x, **options)[0].isnan().any()
    expected = results(theirs, x, x, x, need_weights=False, **options)  # torch's one path with an answer
    assert_same(results(ours, x, x, x, need_weights=False, **options), expected)

    with_weights = results(ours, x, x, x, **options)
    assert torch.equal(with_weights["output"], ours(x, x, x, need_weights=False, **options)[0])
    assert all(result.isfinite().all() for result in with_weights.values())
    blind = with_weights["weights"].sum(-1) == 0
    assert blind.any()
    assert_same(with_weights["weights"].sum(-1)[~blind], torch.ones_like(x[..., 0])[~blind])
    assert torch.equal(with_weights["output"][blind], ours.out_proj.bias.expand(int(blind.sum()), -1))


@pytest.mark.parametrize("need_weights", [True, False])
def test_padding_is_never_read(need_weights):
    _, ours = pair(8, 2, batch_first=True)
    query, key, key_padding_mask = normal(2, 3, 8), normal(2, 5, 8), padded(5, 2)
    poisoned = key.masked_fill(key_padding_mask[..., None], math.nan)
    options = {"key_padding_mask": key_padding_mask, "need_weights": need_weights}
    assert torch.equal(ours(query, poisoned, poisoned, **options)[0], ours(query, key, key, **options)[0])


# ---- masks arrive as what they are


@pytest.fixture
def attended(monkeypatch) -> list[dict]:
    """The arguments and the result of each call of `attention` by a module."""
    calls = []
    attention = module_file.attention

    def spy(*args, **options):
        given = inspect.signature(attention).bind(*args, **options).arguments
        calls.append(given | {"o": attention(*args, **options)})
        return calls[-1]["o"]

    monkeypatch.setattr(module_file, "attention", spy)
    return calls


@pytest.mark.parametrize(
    ("options", "features"),
    [
        ({}, set()),
        ({"key_padding_mask": padded(4, 2)}, {"real_keys"}),
        ({"key_padding_mask": as_float(padded(4, 2))}, {"real_keys"}),
        ({"attn_mask": causal_mask(4).double()}, {"causal"}),
        ({"attn_mask": causal_mask(4).double(), "is_causal": True}, {"causal"}),
        ({"attn_mask": causal_mask(4) != 0}, {"causal"}),
        ({"attn_mask": (causal_mask(4) != 0).expand(4, 4, 4)}, {"causal"}),
        ({"attn_mask": causal_mask(4).double(), "key_padding_mask": as_float(padded(4, 2))}, {"causal", "real_keys"}),
        ({"attn_mask": mask_of("bool", 4, 4)}, {"dense"}),
        ({"attn_mask": mask_of("hiding float", 4, 4, 4)}, {"dense"}),
        ({"attn_mask": mask_of("float", 4, 4)}, {"bias"}),
        ({"attn_mask": mask_of("negative float", 4, 4)}, {"bias"}),
        ({"attn_mask": mask_of("float", 4, 4), "key_padding_mask": padded(4, 2)}, {"bias", "real_keys"}),
    ],
)
def test_what_reaches_the_kernels(attended, options, features):
    _, ours = pair(8, 2, batch_first=True)
    x = normal(2, 4, 8)
    ours(x, x, x, need_weights=False, **options)
    (call,) = attended
    mask = Mask() if call["mask"] is None else call["mask"]
    assert mask.features() | ({"bias"} if call["bias"] is not None else set()) == features


def inputs_of_out_proj(module: MultiHeadAttention) -> list[Tensor]:
    """A list to which each call of the module adds what it projects last."""
    inputs, forward = [], module.out_proj.forward
    module.out_proj.forward = lambda o: inputs.append(o) or forward(o)
    return inputs


def test_heads_are_views(attended):
    _, ours = pair(8, 2, batch_first=True)
    merged = inputs_of_out_proj(ours)
    x = normal(2, 4, 8)
    ours(x, x, x, need_weights=False)
    (call,) = attended
    assert len({call[name].untyped_storage().data_ptr() for name in "qkv"}) == 1
    assert merged[0].data_ptr() == call["o"].data_ptr()


def test_one_mask_object_is_looked_at_once(monkeypatch):
    monkeypatch.setattr(masks, "_remembered", lambda mask: True)  # as on a GPU, where a look waits for the device
    shape, mask = (1, 1, 3, 3), as_float(padded(2, 3, 1))
    assert from_torch(None, mask, shape)[1] is None
    mask.data.fill_(1.0)  # unseen by the version counter
    assert from_torch(None, mask, shape)[1] is None
    mask.fill_(1.0)
    assert from_torch(None, mask, shape)[1] is mask
    del mask
    gc.collect()
    assert len(masks._SEEN) == 0


def test_a_changed_mask_is_looked_at_again():
    shape, mask = (1, 1, 3, 3), as_float(padded(2, 3, 1))
    assert from_torch(None, mask, shape)[1] is None
    mask.data.fill_(1.0)
    assert from_torch(None, mask, shape)[1] is mask
    with torch.inference_mode():  # no version counter here
        assert from_torch(None, causal_mask(3), shape)[0].causal


@pytest.mark.parametrize("appended", [{"add_bias_kv": True}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@pytest.mark.parametrize(
    ("mask", "hidden"),
    [
        (Mask(causal=True), None),
        (Mask(window=(1, 0)), None),
        (Mask(real_keys=~padded(5, 2)), padded(5, 2).repeat_interleave(2, 0)[:, None].expand(4, 5, 5)),
        (Mask(dense=torch.eye(5).bool()), None),
        (Mask(causal=True), padded(5, 3)),
    ],
    ids=["causal", "window", "padding", "dense", "causal and padding"],
)
def test_every_query_sees_the_keys_that_are_appended(appended, mask, hidden):
    theirs, ours = pair(8, 2, batch_first=True, **appended)
    x, more = normal(2, 5, 8), {}
    if hidden is None or hidden.dim() == 2:
        hidden, more = ~mask.keep(5, 5)[0, 0], {} if hidden is None else {"key_padding_mask": hidden}
    assert_same(ours(x, x, x, attn_mask=mask, **more), theirs(x, x, x, attn_mask=hidden, **more))


def test_a_mask_over_appended_keys_is_refused():
    module, x = MultiHeadAttention(8, 2, batch_first=True, add_bias_kv=True), torch.ones(2, 5, 8)
    with pytest.raises(ValueError, match=re.escape("mask.real_keys must be [2, 5], got [2, 6]")):
        module(x, x, x, attn_mask=Mask(real_keys=torch.ones(2, 6).bool()))


@pytest.mark.parametrize("shape", [(1, 5), (2, 1)], ids=str)
def test_a_mask_is_not_broadcast_beside_padding(shape):
    module, x = MultiHeadAttention(8, 2, batch_first=True), torch.ones(2, 5, 8)
    with pytest.raises(ValueError, match=re.escape(f"mask.real_keys must fit that of the other mask, got {[*shape]}")):
        module(x, x, x, ~padded(5, 2), attn_mask=Mask(real_keys=torch.ones(shape).bool()))


def test_a_mask_without_causal_is_not_hinted_to_be_causal():
    module, x = pair(8, 2, batch_first=True)[1], normal(2, 5, 8)
    mask = Mask(causal=True, window=(1, None))
    assert_same(module(x, x, x, attn_mask=mask, is_causal=True), module(x, x, x, attn_mask=mask))
    with pytest.raises(ValueError, match="is_causal must be False beside a Mask without causal, got True; write Mask"):
        module(x, x, x, attn_mask=Mask(window=(1, None)), is_causal=True)


def test_a_learned_mask_gets_its_gradient():
    theirs, ours = pair(8, 2, batch_first=True)
    x = normal(2, 4, 8)
    masks = {"attn_mask": torch.zeros(4, 4).double(), "key_padding_mask": torch.zeros(2, 4).double()}

    def gradients(module: nn.Module) -> tuple[Tensor, ...]:
        leaves = {name: mask.clone().requires_grad_() for name, mask in masks.items()}
        output, _ = module(x, x, x, **leaves)
        return torch.autograd.grad((output * normal(2, 4, 8, seed=1)).sum(), list(leaves.values()))

    assert_same(gradients(ours), gradients(theirs))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("attn_mask", [None, torch.ones(5, 7, dtype=torch.bool).triu(3), Mask(causal=True, q_offset=2)])
def test_a_bias_by_distance_is_a_float_mask(attn_mask, need_weights, batch_first):
    module = MultiHeadAttention(8, 2, batch_first=batch_first)
    table = torch.randn(2, 5, requires_grad=True)
    query, memory = (torch.randn(*((3, n) if batch_first else (n, 3)), 8) for n in (5, 7))
    offset = attn_mask.q_offset if isinstance(attn_mask, Mask) else 0

    def bucket(distance: Tensor) -> Tensor:
        return distance.clamp(-2, 2) + 2

    distance = torch.arange(7) - torch.arange(5)[:, None] - offset
    dense = table[:, bucket(distance)].repeat(3, 1, 1)
    hidden = distance > 0 if isinstance(attn_mask, Mask) else attn_mask
    expected = module(
        query, memory, memory, attn_mask=dense if hidden is None else dense.masked_fill(hidden, -math.inf),
        need_weights=need_weights,
    )  # fmt: skip
    actual = module(
        query, memory, memory, attn_mask=attn_mask, need_weights=need_weights,
        position_bias=RelativeBias(table, bucket),
    )  # fmt: skip
    torch.testing.assert_close(actual, expected)
    cotangent = torch.randn_like(actual[0])
    gradients = [torch.autograd.grad((x[0] * cotangent).sum(), table)[0] for x in (actual, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("options", "given", "error", "why"),
    [
        ({}, {"position_bias": torch.ones(5, 5)}, TypeError, "RelativeBias or None, got Tensor; a Tensor is attn_mask"),
        ({}, {"attn_mask": torch.ones(5, 5)}, ValueError, "beside a mask that is added to the scores"),
        ({"add_zero_attn": True}, {}, ValueError, "nested tensors, pages or appended keys"),
    ],
)
def test_what_a_bias_by_distance_cannot_be(options, given, error, why):
    module, x = MultiHeadAttention(8, 2, **options), torch.randn(5, 3, 8)
    with pytest.raises(error, match=why):
        module(x, x, x, **{"position_bias": RelativeBias(torch.zeros(2, 9)), **given})


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_no_tensor_is_refused_by_name(name):
    x = torch.ones(5, 3, 8)
    with pytest.raises(TypeError, match=f"{name} must be a Tensor, got list"):
        MultiHeadAttention(8, 2)(**{**dict.fromkeys(("query", "key", "value"), x), name: [1.0]})


def test_a_mask_has_its_tangent():
    theirs, ours = pair(8, 2, batch_first=True)
    x, mask, tangent = normal(2, 4, 8), torch.zeros(4, 4).double(), normal(4, 4, seed=1)

    def tangents(module: nn.Module) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(lambda mask: module(x, x, x, attn_mask=mask), (mask,), (tangent,))[1]

    assert_same(tangents(ours), tangents(theirs))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(mask, tangent)
        assert from_torch(None, dual, (2, 2, 4, 4))[1] is dual


def test_vmap_over_masks():
    theirs, ours = pair(8, 2, batch_first=True)
    x, masks = normal(2, 4, 8), torch.stack([mask_of(kind, 4, 4) for kind in ("hiding float", "float", "causal float")])
    actual = torch.func.vmap(lambda mask: ours(x, x, x, attn_mask=mask, need_weights=False)[0])(masks)
    assert_same(actual, torch.stack([theirs(x, x, x, attn_mask=mask)[0] for mask in masks]))


# ---- refusals


def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


SELF = (zeros(2, 3, 8),) * 3
UNBATCHED = (zeros(3, 8),) * 3
SEPARATE = {"kdim": 5, "vdim": 6}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("construct", "inputs", "options"),
    [
        ({}, (zeros(8),) * 3, {}),
        ({}, (zeros(1, 2, 3, 8),) * 3, {}),
        ({}, (zeros(3, 8), zeros(2, 3, 8), zeros(2, 3, 8)), {}),
        ({}, (zeros(2, 3, 8), zeros(2, 3, 8), zeros(3, 8)), {}),
        ({}, (zeros(2, 3, 7), zeros(2, 3, 8), zeros(2, 3, 8)), {}),
        ({}, (zeros(2, 3, 8), zeros(2, 3, 7), zeros(2, 3, 7)), {}),
        ({}, (zeros(2, 3, 8), zeros(2, 3, 8), zeros(2, 3, 7)), {}),
        ({}, (zeros(2, 3, 8), zeros(2, 4, 8), zeros(2, 3, 8)), {}),
        ({}, (zeros(2, 3, 8), zeros(1, 3, 8), zeros(1, 3, 8)), {}),
        (SEPARATE, (zeros(2, 3, 8), zeros(2, 3, 4), zeros(2, 3, 6)), {}),
        (SEPARATE, (zeros(2, 3, 8), zeros(2, 3, 5), zeros(2, 3, 5)), {}),
        (SEPARATE, (zeros(2, 3, 8), zeros(2, 3, 5), zeros(2, 4, 6)), {}),
        ({}, SELF, {"is_causal": True}),
        ({}, SELF, {"is_causal": True, "attn_mask": zeros(3)}),
        ({}, SELF, {"attn_mask": zeros(3)}),
        ({}, SELF, {"attn_mask": zeros(1, 2, 3, 3)}),
        ({}, SELF, {"attn_mask": zeros(2, 3)}),
        ({}, SELF, {"attn_mask": zeros(2, 3, 3)}),
        ({}, SELF, {"attn_mask": zeros(3, 3, dtype=torch.int64)}),
        ({}, SELF, {"attn_mask": zeros(3, 3, dtype=torch.float16)}),
        ({}, SELF, {"key_padding_mask": zeros(3)}),
        ({}, SELF, {"key_padding_mask": zeros(2, 4)}),
        ({}, SELF, {"key_padding_mask": zeros(1, 3)}),
        ({}, SELF, {"key_padding_mask": zeros(2, 3, dtype=torch.int64)}),
        ({}, SELF, {"key_padding_mask": zeros(2, 3, dtype=torch.float16)}),
        ({}, UNBATCHED, {"key_padding_mask": zeros(1, 3)}),
        ({}, UNBATCHED, {"key_padding_mask": zeros(2)}),
        ({}, UNBATCHED, {"attn_mask": zeros(1, 3, 3)}),
        ({}, UNBATCHED, {"attn_mask": zeros(2, 3)}),
    ],
)
def test_what_torch_refuses_is_refused_by_its_exception(construct, inputs, options, need_weights):
    theirs, ours = pair(8, 2, batch_first=True, **construct)
    with pytest.raises((AssertionError, RuntimeError)) as torchs:
        theirs(*inputs, need_weights=need_weights, **options)
    with pytest.raises(torchs.type, match=r"^(query|key|value|key_padding_mask|attn_mask) must .*, got ") as refusal:
        ours(*inputs, need_weights=need_weights, **options)
    assert refusal.type is torchs.type


@pytest.mark.parametrize("sizes", [(0, 1), (8, 0), (8, 3)])
def test_sizes_that_torch_refuses(sizes):
    with pytest.raises((AssertionError, ValueError)) as torchs:
        nn.MultiheadAttention(*sizes)
    with pytest.raises(torchs.type):
        MultiHeadAttention(*sizes)


# ---- parameters


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kdim": 5, "vdim": 6}, {"add_bias_kv": True, "add_zero_attn": True}]
)
def test_parameters_are_torchs(options):
    states = []
    for cls in (nn.MultiheadAttention, MultiHeadAttention):
        torch.manual_seed(0)
        states.append(cls(8, 2, **options).state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(a, b) for a, b in zip(*(state.values() for state in states), strict=True))
    for cls, state in zip((MultiHeadAttention, nn.MultiheadAttention), states, strict=True):
        cls(8, 2, **options).load_state_dict(state, strict=True)


def test_the_constructor_is_torchs():
    theirs, ours = (inspect.signature(cls).parameters.values() for cls in (nn.MultiheadAttention, MultiHeadAttention))
    positional = [(p.name, p.default) for p in ours if p.kind is not p.KEYWORD_ONLY]
    assert positional == [(p.name, p.default) for p in theirs]
    module = MultiHeadAttention(8, 2, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}


def test_copies_compute_the_same():
    _, ours = pair(8, 2, batch_first=True)
    x, file = normal(2, 3, 8), io.BytesIO()
    expected = ours(x, x, x)[0]
    torch.save(ours, file)
    file.seek(0)
    old = MultiHeadAttention.__new__(MultiHeadAttention)  # as pickled by torch 1.1, without the attribute
    old.__setstate__({name: value for name, value in vars(ours).items() if name != "_qkv_same_embed_dim"})
    copies = (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(file, weights_only=False), old)
    for module in copies:
        assert torch.equal(module(x, x, x)[0], expected)
        assert module._qkv_same_embed_dim


# ---- dropout


@pytest.mark.parametrize("batch_first", [True, False])
def test_weights_and_output_share_the_dropout(batch_first):
    p, (N, L, E, H) = 0.3, (4, 40, 8, 2)
    _, ours = pair(E, H, dropout=p, batch_first=batch_first)
    x = normal(N, L, E)
    inputs = x if batch_first else x.transpose(0, 1)
    output, weights = ours(inputs, inputs, inputs, average_attn_weights=False)
    v = nn.functional.linear(x, ours.in_proj_weight[2 * E :], ours.in_proj_bias[2 * E :]).unflatten(-1, (H, -1))
    expected = ours.out_proj((weights @ v.transpose(1, 2)).transpose(1, 2).flatten(-2))
    assert_same(output if batch_first else output.transpose(0, 1), expected)

    kept = weights != 0
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.double().mean() - (1 - p)) < 5 * deviation
    undropped = copy.deepcopy(ours).eval()(inputs, inputs, inputs, average_attn_weights=False)[1]
    assert_same(weights[kept], undropped[kept] / (1 - p))


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_follows_the_seed_and_the_mode(need_weights):
    theirs, ours = pair(8, 2, dropout=0.5, batch_first=True)
    x = normal(2, 6, 8)

    def output(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return ours(x, x, x, need_weights=need_weights)[0]

    assert torch.equal(output(0), output(0))
    assert not torch.equal(output(0), output(1))
    ours.eval()
    assert_same(output(0), theirs.eval()(x, x, x)[0])


# ---- PyTorch's machinery


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"key_padding_mask": padded(5, 3)},
        {"attn_mask": causal_mask(5).double(), "is_causal": True},
        {"key_padding_mask": as_float(padded(5, 3)), "attn_mask": causal_mask(5).double()},
    ],
    ids=["plain", "padded", "causal", "float masks"],
)
def test_compiles_to_one_graph(options, need_weights):
    _, ours = pair(8, 2, batch_first=True)
    x = normal(2, 5, 8)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    actual = results(compiled, x, x, x, need_weights=need_weights, **options)
    expected = results(ours, x, x, x, need_weights=need_weights, **options)
    assert_same({name.replace("_orig_mod.", ""): result for name, result in actual.items()}, expected)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("attn_mask", [None, causal_mask(5), normal(5, 5).bfloat16()], ids=["none", "causal", "half"])
def test_autocast(attn_mask, need_weights):
    theirs, ours = pair(8, 2, dtype=torch.float32, batch_first=True)
    x = normal(2, 5, 8)
    options = {"need_weights": need_weights}
    x32 = x.float()
    with torch.autocast("cpu", torch.bfloat16):
        actual, naive = (results(m, x32, x32, x32, attn_mask=attn_mask, **options) for m in (ours, theirs))
    assert {name: value.dtype for name, value in actual.items()} == {n: value.dtype for n, value in naive.items()}
    wide = None if attn_mask is None else attn_mask.double()
    assert_within_budget(actual, naive, results(theirs.double(), x, x, x, attn_mask=wide, **options))


def test_checkpointing_repeats_the_dropout():
    _, ours = pair(8, 2, dropout=0.5, batch_first=True)

    class Checkpointed(nn.Module):
        def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
            return checkpoint(ours, *inputs, use_reentrant=False)

    x = normal(2, 5, 8)
    torch.manual_seed(1)
    expected = results(ours, x, x, x)
    torch.manual_seed(1)
    actual = results(Checkpointed(), x, x, x)
    assert all(torch.equal(actual[name], expected[name]) for name in actual)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inserted", ["before the stack is built", "into the built stack"])
def test_a_transformer_calls_it_in_every_mode(attended, inserted, grad, training):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).train(training)

    def insert(layer: nn.TransformerEncoderLayer) -> nn.TransformerEncoderLayer:
        ours = MultiHeadAttention(8, 2, batch_first=True, dtype=torch.float64)
        ours.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = ours
        return layer

    if inserted == "into the built stack":
        ours = copy.deepcopy(theirs)
        for each in ours.layers:
            insert(each)
    else:
        ours = nn.TransformerEncoder(insert(copy.deepcopy(layer)), 2, enable_nested_tensor=True)
    ours.train(training)

    x, key_padding_mask = normal(3, 5, 8), padded(5, 2, 1)
    with torch.set_grad_enabled(grad):
        actual, expected = (module(x, src_key_padding_mask=key_padding_mask) for module in (ours, theirs))
    assert len(attended) == 2
    assert all("real_keys" in call["mask"].features() and call["bias"] is None for call in attended)
    assert_same(actual[~key_padding_mask], expected[~key_padding_mask])


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_nested_self_attention(need_weights, average):
    theirs, ours = pair(8, 2, batch_first=True)
    nested = torch.nested.as_nested_tensor([normal(3, 8), normal(5, 8, seed=1)])
    options = {"need_weights": need_weights, "average_attn_weights": average}
    with torch.no_grad():
        (actual, weights), (expected, torchs) = (m.eval()(nested, nested, nested, **options) for m in (ours, theirs))
    assert_same([*actual.unbind()], [*expected.unbind()])
    assert_same(weights, torchs)


def test_nested_samples_without_tokens():
    nested = torch.nested.as_nested_tensor([normal(0, 8)] * 2)
    output, weights = pair(8, 2, batch_first=True)[1](nested, nested, nested)
    assert [sample.shape for sample in output.unbind()] == [(0, 8)] * 2
    assert weights.shape == (2, 0, 0)


@pytest.mark.parametrize(
    ("construct", "options"),
    [
        ({"batch_first": False}, {}),
        ({"add_bias_kv": True}, {}),
        ({"add_zero_attn": True}, {}),
        ({}, {"attn_mask": torch.zeros(5, 5)}),
        ({}, {"key_padding_mask": torch.zeros(2, 5)}),
    ],
)
def test_nested_tensors_that_torch_refuses(construct, options):
    nested = torch.nested.as_nested_tensor([normal(3, 8), normal(5, 8)])
    for module in pair(8, 2, **({"batch_first": True} | construct)):
        with pytest.raises(AssertionError), torch.no_grad():
            module.eval()(nested, nested, nested, **options)


def jagged(*lengths: int, seed: int = 0) -> Tensor:
    parts = [normal(n, 8, seed=seed + i) for i, n in enumerate(lengths)]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


@pytest.mark.parametrize("mask", [None, Mask(causal=True), Mask(window=(1, 0))], ids=["", "causal", "window"])
@pytest.mark.parametrize("own_keys", [False, True])
def test_jagged_tensors_are_packed_documents(own_keys, mask):
    ours = pair(8, 2, batch_first=True)[1]
    x = jagged(3, 5, 1).detach().requires_grad_()
    keys = jagged(4, 2, 3, seed=3) if own_keys else x
    merged = inputs_of_out_proj(ours)
    output, weights = ours(x, keys, keys, attn_mask=mask, need_weights=False)
    assert weights is None
    assert [o.shape[:-1].numel() for o in merged] == [9]  # there is no padding
    assert (output + x).shape == x.shape  # it has the lengths of the queries, not only as many
    one_by_one = [
        ours(sample[None], of[None], of[None], attn_mask=mask, need_weights=False)[0][0]
        for sample, of in zip(x.unbind(), keys.unbind(), strict=True)
    ]
    assert_same([*output.unbind()], one_by_one)
    gradients = [torch.autograd.grad(torch.cat(o).square().sum(), x)[0] for o in ([*output.unbind()], one_by_one)]
    assert_same(*(gradient.values() for gradient in gradients))


def test_queries_are_rotated_beside_keys_that_are_complete():
    module, x = pair(8, 2, batch_first=True)[1], normal(1, 4, 8)
    memory, rotation = KVCache(1, 8).memory(0), RotaryPositions(4)(torch.arange(4))
    with torch.no_grad():
        expected = module(x, x, x, need_weights=False, rotation=rotation)[0]
        for _ in range(2):  # the first call fills the cache
            options = {"attn_mask": Mask(), "rotation": rotation, "cache": memory}
            assert_same(module(x, x, x, need_weights=False, **options)[0], expected)


WITH_HOLES = torch.nested.nested_tensor_from_jagged(
    normal(10, 8), offsets=torch.tensor([0, 5, 10]), lengths=torch.tensor([3, 5])
)


@pytest.mark.parametrize(
    ("construct", "options", "why"),
    [
        ({"batch_first": False}, {}, "query must not be nested without batch_first"),
        ({"add_bias_kv": True}, {}, "with appended keys"),
        ({}, {"need_weights": True}, "need_weights must be False where query is nested"),
        ({}, {"attn_mask": torch.zeros(5, 5)}, "attn_mask must be a fastattn.Mask where query is nested"),
        ({}, {"key_padding_mask": torch.zeros(2, 5)}, "key_padding_mask must be None where query is nested"),
        ({}, {"is_causal": True}, "attn_mask must be given with is_causal"),
        ({}, {"is_causal": True, "attn_mask": Mask()}, "is_causal must be False beside a Mask without causal"),
        ({}, {"key": normal(2, 3, 8)}, "key must be nested"),
        ({}, {"value": jagged(4, 4)}, "v must be nested with the lengths of k"),
        ({}, {"query": WITH_HOLES}, "query must be nested without holes"),
        ({}, {"key": WITH_HOLES}, "key must be nested without holes"),
        ({}, {"rotation": RotaryPositions(4)(torch.arange(5))}, "rotation must be None where query is nested"),
        ({}, {"attn_mask": Mask(q_offset=1)}, "mask must be a fastattn.Mask of causal and window"),
    ],
)
def test_what_jagged_tensors_cannot_have(construct, options, why):
    module, x = pair(8, 2, **({"batch_first": True} | construct))[1], jagged(3, 5)
    with pytest.raises((AssertionError, RuntimeError, ValueError), match=why):
        module(**({"query": x, "key": x, "value": x, "need_weights": False} | options))


def test_nested_tensors_of_two_kinds_are_refused():
    jagged = torch.nested.as_nested_tensor([normal(3, 8), normal(5, 8)], layout=torch.jagged)
    nested = torch.nested.as_nested_tensor([normal(3, 8), normal(5, 8)])
    for module in pair(8, 2, batch_first=True):
        for inputs in ((jagged, nested, jagged), (nested, jagged, jagged), (nested, nested.clone(), nested)):
            with pytest.raises(AssertionError), torch.no_grad():
                module.eval()(*inputs)
