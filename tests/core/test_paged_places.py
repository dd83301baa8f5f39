"""Where keys of `attention_paged` and `flash_attn_with_kvcache` lie: shared rows, and requests without queries."""

import pytest
import torch
from torch import Tensor

import fastattn
from fastattn.flash_attn import flash_attn_with_kvcache

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


def by_paged(k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor) -> None:
    fastattn.attention_paged(drawn(2, 4, D), k_pages, v_pages, TABLE, LENGTHS, k=k, v=v)


def by_kvcache(k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor) -> None:
    flash_attn_with_kvcache(
        drawn(2, 1, 4, D), k_pages, v_pages, k[:, None], v[:, None], cache_seqlens=LENGTHS - 1, block_table=TABLE
    )


@pytest.mark.parametrize("call", [by_paged, by_kvcache])
def test_nothing_is_written_where_values_lie_in_the_pages(call):
    (k_pages, v_pages), new = pages(), drawn(2, H_KV, D)
    before = k_pages.clone(), v_pages.clone()
    for _ in range(2):  # as in later layers too
        for k, v in ((new, v_pages[2, 1:3]), (new, k_pages[2, 1:3]), (k_pages[2, 1:3], new)):
            with pytest.raises(RuntimeError, match=r"must not lie in [kv]_.*single memory location"):
                call(k_pages, v_pages, k, v)
        assert torch.equal(k_pages, before[0])
        assert torch.equal(v_pages, before[1])
        fastattn.attention_paged(drawn(2, 4, D), k_pages, v_pages, TABLE, LENGTHS)


@pytest.mark.parametrize("call", [by_paged, by_kvcache, torch.compile(by_paged, backend="eager")])
def test_nothing_is_written_to_expanded_pages(call):
    k_pages, v_pages = pages()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"v_.* must not be expanded where new tokens are written to it, got"):
            call(k_pages, v_pages[:, :, :1].expand_as(v_pages), drawn(2, H_KV, D), drawn(2, H_KV, D))
        fastattn.attention_paged(drawn(2, 4, D), k_pages, v_pages, TABLE, LENGTHS)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_no_row_is_quantized_as_a_key_and_as_a_value(stored):
    latent, scales = torch.zeros(PAGES, PAGE_SIZE, 1, D).to(stored), [torch.zeros(PAGES, PAGE_SIZE, 1) for _ in "kv"]
    q, k = drawn(2, 4, D), drawn(2, 1, D)
    call = {"k_scales": scales[0], "v_scales": scales[1]}
    for _ in range(2):
        with pytest.raises(ValueError, match="v_pages must have rows of its own to be quantized to torch"):
            fastattn.attention_paged(q, latent, latent[..., :8], TABLE, LENGTHS, k=k, v=k[..., :8], **call)
        assert not latent.float().any()
        fastattn.attention_paged(q, latent, latent[..., :8], TABLE, LENGTHS, **call)  # written elsewhere
    both = torch.zeros(PAGES, PAGE_SIZE, 1, 2, D).to(stored)  # side by side
    fastattn.attention_paged(q, both[..., 0, :], both[..., 1, :], TABLE, LENGTHS, k=k, v=k, **call)
    assert torch.equal(both[..., 0, :].float(), both[..., 1, :].float())
