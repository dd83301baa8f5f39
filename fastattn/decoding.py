"""Documents of one query each, as in a step of generation for many requests, on a CPU: samples that share their keys.

The kernels make tiles of the queries of a document, of which a tile of one query takes the time of a full one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .spec import Mask, accumulation_dtype, can_be_read, empty_output

_AT_ONCE = 8  # documents, whose lists of keys are as long as the keys of all of them


def is_needed(tensors: tuple[Tensor | None, ...], cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, dropout_p: float) -> bool:
    """Whether there is a document of one query, in a call of plain tensors of which nobody asks for gradients.

    What `attention` writes to may have no place for what torch.vmap maps over, nor may autograd around it write there;
    and DTensors are not written to by tables of places.
    """
    return (
        all(can_be_read(x) for x in (cu_seqlens_q, cu_seqlens_k, *tensors) if isinstance(x, Tensor))
        and isinstance(dropout_p, (int, float))  # else it is for others to judge
        and dropout_p == 0  # which draws by the place of a query
        and not (torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors))
        and bool((cu_seqlens_q.diff() == 1).any())
    )


def attention(
    attend: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    q_offset: Tensor,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of attention in documents, those of one query by calls of their own.

    Args:
        attend: `fastattn.attention` with everything but q, k, v and mask.
        q: [1, H, total_q, D]; k, v: [1, H_kv, total_k, D or d_v].
        mask: that of all documents, numbered by their order in `cu_seqlens_q` and `cu_seqlens_k`.
        q_offset: int64 [documents], the position of the first query of each document among its keys.
    """
    lengths, documents = cu_seqlens_q.diff(), mask.segment_ids[0]
    alone, others = (lengths == 1).nonzero()[:, 0], (lengths > 1).nonzero()[:, 0]
    if len(others):
        o, lse = attend(q, k, v, replace(mask, real_queries=torch.isin(documents, others)))
    else:
        o = empty_output(q, v.shape[3]).zero_()
        lse = torch.full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device)
    for some in alone.split(_AT_ONCE):
        rows, begin, end = cu_seqlens_q[some], cu_seqlens_k[some], cu_seqlens_k[some + 1]
        first, last = int(begin[0]), int(end[-1])
        keys = torch.arange(first, last, device=q.device)
        own = Mask(
            mask.causal,
            q_offset=begin - first + q_offset[some],
            window=mask.window,
            real_keys=(begin[:, None] <= keys) & (keys < end[:, None]),
        )
        shared = (x[:, :, first:last].expand(len(some), -1, -1, -1) for x in (k, v))
        o_of_some, lse_of_some = attend(q[0, :, rows, None].transpose(0, 1), *shared, own)
        o[0, :, rows] = o_of_some[:, :, 0].transpose(0, 1)
        lse[0, :, rows] = lse_of_some[:, :, 0].T
    return o, lse
