"""patch_sdpa: torch's function goes through fastattn where a fused backend takes the call, and comes back untouched."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn

TORCHS_OWN = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _torchs_own_stands_before_and_after():
    assert F.scaled_dot_product_attention is TORCHS_OWN
    yield
    assert F.scaled_dot_product_attention is TORCHS_OWN


def qkv(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 4, 7, 8, dtype=dtype, requires_grad=True) for _ in range(3))


def masks() -> dict[str, dict]:
    torch.manual_seed(1)
    return {
        "none": {},
        "causal": {"is_causal": True},
        "padding": {"attn_mask": (torch.arange(7) < torch.tensor([[7], [3]]))[:, None, None]},
        "bool": {"attn_mask": torch.rand(7, 7) < 0.8},
        "bias": {"attn_mask": torch.randn(4, 7, 7)},
        "scale": {"scale": 0.3},
    }


@pytest.mark.parametrize("name", masks())
def test_calls_are_computed_by_fastattn(name):
    q, k, v = qkv()
    expected = F.scaled_dot_product_attention(q, k, v, **masks()[name])
    with fastattn.patch_sdpa() as patch:
        actual = F.scaled_dot_product_attention(q, k, v, **masks()[name])
    assert (patch.computed, patch.left.total()) == (1, 0)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for a, e in zip(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (actual, expected)), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


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
    assert "native: q must be float32, bfloat16 or float16, got torch.float64" in why
    assert str(patch).startswith(
        "computed by fastattn: 0 calls of scaled_dot_product_attention\nleft to torch: 3 calls"
    )


def test_a_kernel_that_was_chosen_is_respected():
    q, k, v = qkv()
    with fastattn.patch_sdpa() as patch, sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), TORCHS_OWN(q, k, v))
    assert dict(patch.left) == {"sdpa_kernel() chooses among torch's kernels": 1}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_subclasses_are_left_to_torch():
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 5, 8)])

    class Mine(Tensor):
        pass

    mine = torch.randn(1, 2, 3, 8).as_subclass(Mine)
    with fastattn.patch_sdpa() as patch:
        F.scaled_dot_product_attention(nested, nested, nested)
        assert type(F.scaled_dot_product_attention(mine, mine, mine)) is Mine
    assert dict(patch.left) == {"the tensors are nested, or of a subclass of torch.Tensor": 2}


def test_what_torch_refuses_is_refused():
    q, k, v = qkv()
    with fastattn.patch_sdpa(), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k[:, :, :, :4], v)


def test_patches_nest_and_survive_exceptions():
    q, k, v = qkv()
    outer = fastattn.patch_sdpa()
    with outer:
        inner = fastattn.patch_sdpa()
        with pytest.raises(RuntimeError), inner, outer:
            F.scaled_dot_product_attention(q, k, v[..., :3, :])
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


def test_threads():
    q, k, v = (x.detach() for x in qkv())
    patches = [fastattn.patch_sdpa() for _ in range(4)]

    def work(patch):
        for _ in range(25):
            with patch:
                F.scaled_dot_product_attention(q, k, v)

    threads = [threading.Thread(target=work, args=(patch,)) for patch in patches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(25 <= patch.computed <= 100 for patch in patches)
    assert not any(patch.left for patch in patches)


def test_compiled_calls_are_computed_too():
    q, k, v = qkv()

    def attend(q):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with fastattn.patch_sdpa():
        eager = attend(q)
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(q)
    assert torch.equal(compiled, eager)
    assert not torch.equal(eager, TORCHS_OWN(q, k, v, is_causal=True))  # else this shows nothing


@pytest.mark.skipif(not hasattr(nn.attention, "register_flash_attention_impl"), reason="this torch has no registry")
def test_torchs_registry_of_flash_attention():
    assert "fastattn" in nn.attention.list_flash_attention_impls()
    nn.attention.activate_flash_attention_impl("fastattn")
    try:
        assert F.scaled_dot_product_attention is not TORCHS_OWN
        q, k, v = qkv()
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), TORCHS_OWN(q, k, v), rtol=1e-4, atol=1e-5)
    finally:
        nn.attention.restore_flash_attention_impl()
