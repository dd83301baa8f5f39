"""Where keys of `attention_paged` and `flash_attn_with_kvcache` lie: shared rows, and requests without queries."""

import pytest
import torch
from torch import Tensor

import fastattn

PAGES, PAGE_SIZE, H_KV, D = 8, 4, 2, 16
TABLE, LENGTHS = torch.tensor([[1, 2], [3, 4]]), torch.tensor([6, 7])


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def pages() -> tuple[Tensor, Tensor]:
    return drawn(PAGES, PAGE_SIZE, H_KV, D), drawn(PAGES, PAGE_SIZE + 1, H_KV, D)[:, 1:]


@pytest.mark.parametrize("unused", [0, 99])
def test_a_prefix_is_that_of_the_requests_with_queries(unused):
    table = torch.tensor([[unused, unused], [1, 2], [1, 4]])
    call = drawn(3, 4, D), *pages(), table, torch.tensor([0, 6, 7]), torch.tensor([0, 0, 1, 3])
    torch.testing.assert_close(
        fastattn.attention_paged(*call, prefix=PAGE_SIZE), fastattn.attention_paged(*call), rtol=1e-5, atol=1e-5
    )


def test_requests_with_other_numbers_of_queries_have_the_same_prefix():
    with pytest.raises(ValueError, match="block_table must begin with the same 1 pages in each row with a prefix"):
        fastattn.attention_paged(drawn(3, 4, D), *pages(), TABLE, LENGTHS, torch.tensor([0, 1, 3]), prefix=PAGE_SIZE)


@pytest.mark.parametrize("ends", [[0, 1, 1], [0, 0, 1]])
def test_as_many_tokens_of_padding_as_requests_without_queries(ends):
    q, tensors = drawn(2, 4, D), pages()
    o, lse = fastattn.attention_paged(q, *tensors, TABLE, LENGTHS, torch.tensor(ends), return_lse=True)
    assert (o.shape, lse.shape) == ((2, 4, D), (4, 2))
    i = ends.index(1) - 1
    assert torch.equal(o[:1], fastattn.attention_paged(q[:1], *tensors, TABLE[i : i + 1], LENGTHS[i : i + 1]))
    assert not o[1].any()
