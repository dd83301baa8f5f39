"""What a plan knows of a mask, and the mask of a part of it, against `Mask.keep`."""

import pytest
import torch

from fastattn import Mask
from fastattn.parallel.masks import Visibility, part_of, runs_of, with_gaps_filled


def drawn(seed: int) -> tuple[Mask, int, int, int]:
    """A mask of random fields, samples, queries and keys."""
    g = torch.Generator().manual_seed(seed)

    def chance(p: float = 0.5) -> bool:
        return torch.rand((), generator=g).item() < p

    def integer(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g)

    def table(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=g) < 0.7

    B, n_q, n_k = (int(integer(low, high)) for low, high in ((1, 4), (1, 30), (1, 40)))
    offsets = (0, int(integer(-5, 20)), integer(-5, 20, B), integer(-n_q, n_k, B, n_q))
    widths = tuple(int(integer(0, 9)) if chance() else None for _ in "lr")
    ids = (integer(-1, 4, B, n_q), integer(-1, 4, B, n_k)) if chance() else None
    if ids is not None and chance():
        ids = tuple(x.sort(1).values for x in ids)
    dense = None
    if chance(0.3):
        dense = table(*(n if chance(0.7) else 1 for n in (B, 2, n_q, n_k)))[0 if chance(0.2) else slice(None)]
    mask = Mask(
        chance(), q_offset=offsets[int(integer(0, 4))], window=widths if chance() else (None, None), segment_ids=ids,
        real_keys=table(B, n_k) if chance(0.4) else None, real_queries=table(B, n_q) if chance(0.4) else None,
        dense=dense,
    )  # fmt: skip
    return mask, B, n_q, n_k


@pytest.mark.parametrize("seed", range(300))
def test_against_keep(seed):
    mask, B, n_q, n_k = drawn(seed)
    visibility, keep = Visibility(mask, n_q, n_k), mask.keep(n_q, n_k)
    samples = visibility.samples
    assert samples in (1, B)
    keep = keep.expand(samples, -1, -1, -1)
    assert torch.equal(visibility.pairs, keep.double().mean(1).sum((0, 2)))
    generator = torch.Generator().manual_seed(seed)
    group = torch.randint(0, 3, (n_q,), generator=generator)
    seen = keep.any(1)
    need = visibility.needed(group, 3)
    assert torch.equal(need, torch.stack([seen[:, group == g].any(1) for g in range(3)]))
    owner = torch.randint(0, 3, (n_k,), generator=generator)
    elsewhere = (owner != torch.arange(3)[:, None])[:, None]
    assert torch.equal(visibility.received(group, owner, 3), (need & elsewhere).sum((1, 2)))

    rows = (group == 0).nonzero()[:, 0]
    there, there_too = need[0].expand(B, -1), keep.expand(B, -1, -1, -1)
    keys = there.any(0).nonzero()[:, 0]
    if len(keys) == 0 or len(rows) == 0:
        return
    for positional in {mask.causal or mask.window != (None, None), True}:
        for run in [with_gaps_filled(keys, mask, n_k), *(torch.arange(r[0], r[-1] + 1) for r in runs_of(keys))]:
            run = run if positional else keys
            part = part_of(mask, n_q, n_k, rows, run, there[:, run], positional)
            actual = part.keep(len(rows), len(run))
            expected = there_too[:, :, rows][..., run] & there[:, None, None, run]
            assert torch.equal(actual.expand_as(expected), expected)
            if positional:  # distances, as ALiBi has them
                q, k = part.positions(len(rows), len(run))
                global_q, global_k = mask.positions(n_q, n_k)
                local = (q[:, :, None] - k[:, None])[:, None].expand_as(expected)
                far = (global_q[:, rows, None] - global_k[:, None, run])[:, None].expand_as(expected)
                assert torch.equal(local[expected], far[expected])


def test_gaps_that_one_sample_fills_in_another():
    ids = torch.tensor([[0, 1, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1]])
    mask = Mask(segment_ids=(ids, ids))
    assert with_gaps_filled(torch.tensor([0, 5]), mask, 6).tolist() == [0, 2, 3, 4, 5]
    assert with_gaps_filled(torch.tensor([1, 3]), Mask(segment_ids=(ids[:1], ids[:1])), 6).tolist() == [1, 3]
    assert with_gaps_filled(torch.tensor([1, 3]), Mask(), 6).tolist() == [1, 2, 3]
