"""Calls whose tensors are not on the default device, which torch.set_default_device and torch.device blocks name."""

import pytest
import torch
from test_paged import Requests

import fastattn
from fastattn import Mask
from fastattn.backends import cpu, selfcheck
from fastattn.flash_attn import flash_attn_with_kvcache

Q, K = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
ENDS, REAL = torch.tensor([0, 2, 5]), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
MODEL = fastattn.nn.LanguageModel(
    fastattn.nn.TransformerConfig(vocab_size=50, d_model=32, nhead=4, num_layers=2)
).eval()
IDS, PAGES, CACHE = torch.tensor([[1, 2, 3]]), Requests(), torch.zeros(2, 9, 2, 8)
SEQLENS, NEW, TABLE = torch.tensor([3, 1]), torch.randn(2, 4, 2, 8), torch.randn(4, 3)


def generated(paged: bool) -> torch.Tensor:
    cache = fastattn.nn.PagedCache(8, 4) if paged else None
    return MODEL.generate(IDS, max_new_tokens=3, do_sample=False, cache=cache)


CALLS = {
    "attention": lambda: fastattn.attention(Q, K, K, Mask(causal=True, real_keys=REAL)),
    "dropout": lambda: fastattn.attention(Q, K, K, dropout_p=0.2, generator=fastattn.DropoutSeed(3)),
    "dropout, drawn": lambda: fastattn.attention(Q, K, K, dropout_p=0.2),
    "a bias by distance": lambda: fastattn.attention(
        Q, K, K, bias=fastattn.RelativeBias(TABLE, lambda d: d.clamp(0, 2))
    ),
    "weights": lambda: fastattn.attention_with_weights(Q, K, K, Mask(causal=True))[1],
    "the largest weights": lambda: fastattn.top_keys(Q, K, top_k=2)[0],
    "documents": lambda: fastattn.attention_varlen(
        Q[0].mT.mT.transpose(0, 1), *[K[0].transpose(0, 1)] * 2, ENDS, causal=True
    ),
    "pages": lambda: PAGES.attend(),
    "pages copied": lambda: PAGES.attend(backend="reference"),
    "a cache": lambda: flash_attn_with_kvcache(
        Q.transpose(1, 2)[:, :4], CACHE, CACHE.clone(), NEW, NEW, cache_seqlens=SEQLENS, causal=True
    ),
    "generation": lambda: generated(paged=False),
    "generation over pages": lambda: generated(paged=True),
    "the problems of the check at first use": lambda: (
        next(selfcheck._problems(cpu, torch.device("cpu"), torch.float32, training=True)).q
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_default_device_does_not_matter(name):
    torch.manual_seed(0)
    with torch.device("meta"):
        actual = CALLS[name]()
    torch.manual_seed(0)
    torch.testing.assert_close(actual, CALLS[name]())
