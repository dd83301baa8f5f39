"""Continuous batching of transformers (`generate_batch`, `transformers serve`): attention over its paged cache.

A step has some tokens of each request, one after the other: they are the documents of `attention_varlen`, so that the
mask of all tokens and all keys, which transformers makes for "sdpa", is made nowhere. What is read of transformers'
internals was tried with the versions in constraints.txt.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache

from ..api import attention_varlen


def keeping(implementation: str, packed: str) -> Callable[[Callable], Callable]:
    """A wrapper of `ContinuousBatchingManager.switch_to_cb_friendly_attn`, which refuses names that it does not know.

    Args:
        implementation: the name that a model may keep.
        packed: the name of the same for padded batches, of which there are none here: it becomes the other one, until
            transformers gives the model back what it had.
    """

    def wrapper(switch: Callable) -> Callable:
        def switch_unless_ours(
            manager: ContinuousBatchingManager, model: PreTrainedModel, *args: object, **kwargs: object
        ) -> None:
            before = model.config._attn_implementation
            if before == packed:
                model.set_attn_implementation(implementation)
                manager._original_attn_impl = before
            elif before != implementation:
                switch(manager, model, *args, **kwargs)

        return switch_unless_ours

    return wrapper


def attention_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedAttentionCache,
    cu_seq_lens_q: Tensor,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    where: dict[str, object],
) -> Tensor:
    """Output [1, tokens, H, d_v] of the queries of all requests of a step, causal in each.

    Args:
        query: [1, H, tokens, D]; key, value: [1, H_kv, tokens, D or d_v], of the new tokens.
        cache: takes key and value, and gives those of all tokens of the requests so far.
        cu_seq_lens_q: int32 [requests + 1], where the new tokens of each request begin.
        window: how many keys a query may see, itself included; None is all.
        where: the keyword arguments by which the cache finds the pages of each layer.
    """
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=where)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    left = None if window is None else window - 1
    o = attention_varlen(
        q, k, v, cu_seq_lens_q, where["cu_seq_lens_k"], causal=True, align="end", window=(left, None), scale=scale,
        softcap=softcap, sinks=sinks,
    )  # fmt: skip
    return o[None].contiguous()
