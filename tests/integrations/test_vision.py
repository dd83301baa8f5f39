"""timm and open_clip: switches, relative positions, shifted windows, dropout, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from model_cases import calls_seen, compared
from torch import nn

import fastattn
from fastattn.testing import compare

open_clip = pytest.importorskip("open_clip", reason="make installs it apart, without its dependencies")
timm = pytest.importorskip("timm", reason="make installs it apart, without its dependencies")
import vision_cases  # noqa: E402

CASES = {str(case): case for case in vision_cases.CASES}
SWIN = CASES["timm: Swin"]


def state_of(model: nn.Module) -> list[tuple[type, dict]]:
    """The class and the attributes of every module, but for the cache of TinyViT."""
    return [
        (type(part), {name: value for name, value in vars(part).items() if name != "attention_bias_cache"})
        for part in model.modules()
    ]


@torch.no_grad()
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_unswap_gives_the_original_back(name, fused):
    model = CASES[name].make().eval()
    for part in model.modules():
        if hasattr(part, "fused_attn"):
            part.fused_attn = fused
    for parameter in model.parameters():  # CoCa leaves some as they are in memory
        parameter.normal_(std=0.2)
    before = state_of(model)
    expected = CASES[name].run(model, None)
    saved = copy.deepcopy(model.state_dict())
    fastattn.swap(model)
    torch.testing.assert_close(model.state_dict(), saved, rtol=0, atol=0)
    copied = copy.deepcopy(model)
    with calls_seen() as calls:
        actual = CASES[name].run(model, None)
        torch.testing.assert_close(CASES[name].run(copied, None), actual, rtol=0, atol=0)
    assert calls.backends == {"cpu"}
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    fastattn.unswap(model)
    assert state_of(model) == before
    torch.testing.assert_close(CASES[name].run(model, None), expected, rtol=0, atol=0)


@pytest.mark.parametrize("make", [timm.layers.Attention, timm.models.swin_transformer.WindowAttention])
def test_dropout_drops_weights_in_training_alone(make):
    torch.manual_seed(0)
    options = {"window_size": (2, 2)} if make is not timm.layers.Attention else {}
    model = make(8, num_heads=2, attn_drop=0.5, **options)
    nn.init.normal_(model.qkv.weight)
    fastattn.swap(model)
    x = torch.randn(1, 4, 8)
    expected = model.eval()(x)
    assert torch.equal(model(x), expected)
    model.train()
    with torch.no_grad(), calls_seen() as calls:
        torch.manual_seed(1)
        outputs = model(x.expand(20000, -1, -1))
        torch.manual_seed(1)
        assert torch.equal(model(x.expand(20000, -1, -1)), outputs)
    assert "dropout" in calls.features
    assert len(outputs.unique(dim=0)) > 100
    deviation = (outputs.mean(0) - expected[0]) / (outputs.std(0) / len(outputs) ** 0.5)
    assert deviation.abs().max() < 5


def test_gradient_checkpointing_of_timm():
    models = compared(SWIN)
    x = vision_cases.images(models.swapped)
    expected = models.swapped(x)
    wanted = torch.autograd.grad(expected.sum(), tuple(models.swapped.parameters()))
    models.swapped.train().set_grad_checkpointing()
    actual = models.swapped(x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), tuple(models.swapped.parameters())), wanted)


def test_autocast():
    models = compared(SWIN)
    x = vision_cases.images(models.swapped)
    with torch.autocast("cpu", torch.bfloat16):
        actual, naive = models.swapped(x), models.eager(x)
    error = compare("logits", actual, naive.to(actual), models.exact(x.double()))
    assert error.right, str(error)


def of_einsum() -> nn.Module:
    module = timm.layers.MultiQueryAttention2d(8, num_heads=2)
    module.einsum = True
    return module


def forgetting() -> nn.Module:
    """Of XCiT, whose code for the fused kernel has no dropout, and is off by default."""
    return timm.models.xcit.XCA(8, num_heads=2, attn_drop=0.1)


REFUSED = {
    "no such name": (
        lambda: timm.models.convit.MHSA(8, 2),
        "timm.models.convit.MHSA computes attention by code of its own",
    ),
    "einsum": (of_einsum, "with einsum=True it does not call scaled_dot_product_attention"),
    "dropout": (forgetting, "with fused_attn=True, which it needs, it would forget its dropout of 0.1"),
    "scaled cosine": (
        lambda: open_clip.transformer.Attention(8, 2, scaled_cosine=True),
        "with scaled_cosine=True it does not call scaled_dot_product_attention",
    ),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name):
    make, why = REFUSED[name]
    model = nn.ModuleDict({"good": timm.layers.Attention(8, 2), "bad": make()})
    before = state_of(model["bad"])
    report = fastattn.swap(model)
    assert report.swapped == {"good": "Attention"}
    assert report.refused == {"bad": why}
    assert state_of(model["bad"]) == before


def test_without_dropout_the_switch_of_xcit_is_set():
    model = timm.models.xcit.XCA(8, num_heads=2).eval()
    x = torch.randn(2, 5, 8)
    expected = model(x)
    assert not model.fused_attn
    assert fastattn.swap(model).swapped == {"": "XCA"}
    assert model.fused_attn
    with calls_seen() as calls:
        torch.testing.assert_close(model(x), expected)
    assert calls.backends == {"cpu"}
    fastattn.unswap(model)
    assert not model.fused_attn
