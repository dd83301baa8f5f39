"""Hostile calls of the attack: a right call of each public function, with one argument that is something else."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable

import numpy as np
import torch
from draws import Draw, Errors, holds
from torch import Tensor, nn

import fastattn
from fastattn.nn import ContinuousBatch, KVCache, LanguageModel, Packing, PagedCache, TransformerConfig

NAMED = (ValueError, TypeError, NotImplementedError)
AS_TORCH = (*NAMED, RuntimeError, AssertionError, IndexError)  # what torch refuses has torch's class
CONFIG = TransformerConfig(11, d_model=8, nhead=2, num_layers=1, dim_feedforward=8, max_length=16)
REAL = torch.tensor([[True, True, True], [False, True, True]])


def attention_under_mask(**fields: object) -> Tensor:
    """Attention of two samples of three tokens under `Mask(**fields)`."""
    q = torch.ones(2, 2, 3, 8)
    return fastattn.attention(q, q, q, fastattn.Mask(**fields))


def attention_under_two_masks(**fields: object) -> Tensor:
    """The same under what that mask and one of padding both show."""
    q = torch.ones(2, 2, 3, 8)
    return fastattn.attention(q, q, q, fastattn.Mask(**fields) & fastattn.Mask(real_keys=REAL))


CALLS: dict[str, tuple[Callable[[], Callable], Callable[[], Callable] | None]] = {
    # name -> what makes the function that is called, and torch's where the exceptions are torch's
    **{
        name: (lambda name=name: getattr(fastattn, name), None)
        for name in (
            "attention", "attention_varlen", "attention_paged", "attention_weights", "attention_with_weights",
            "attention_received", "top_keys", "merge", "explain", "swap", "unswap",
        )
    },
    **{
        name: (lambda name=name: getattr(fastattn.flash_attn, name), None)
        for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
    },
    "scaled_dot_product_attention": (
        lambda: fastattn.scaled_dot_product_attention, lambda: nn.functional.scaled_dot_product_attention,
    ),
    "Mask": (lambda: attention_under_mask, None),
    "Mask &": (lambda: attention_under_two_masks, None),
    "Mask.from_lengths": (lambda: fastattn.Mask.from_lengths, None),
    "Mask.from_flex": (lambda: fastattn.Mask.from_flex, None),
    "Mask.show": (lambda: fastattn.Mask(real_keys=REAL).show, None),
    "MultiHeadAttention": (lambda: fastattn.MultiHeadAttention, lambda: nn.MultiheadAttention),
    "MultiHeadAttention.forward": (
        lambda: fastattn.MultiHeadAttention(8, 2, batch_first=True).forward,
        lambda: nn.MultiheadAttention(8, 2, batch_first=True).forward,
    ),
    "Transformer": (lambda: fastattn.Transformer, lambda: nn.Transformer),
    "Transformer.forward": (
        lambda: fastattn.Transformer(8, 2, 1, 1, 8, batch_first=True).forward,
        lambda: nn.Transformer(8, 2, 1, 1, 8, batch_first=True).forward,
    ),
    "TransformerConfig": (lambda: TransformerConfig, None),
    "LanguageModel": (lambda: LanguageModel, None),
    "LanguageModel.forward": (lambda: LanguageModel(CONFIG).forward, None),
    "LanguageModel.generate": (lambda: LanguageModel(CONFIG).eval().generate, None),
    "KVCache": (lambda: KVCache, None),
    "KVCache.extend": (lambda: KVCache(2, 8).extend, None),
    "KVCache.select": (lambda: KVCache(2, 8).select, None),
    "PagedCache": (lambda: PagedCache, None),
    "PagedCache.open": (lambda: PagedCache(4).open, None),
    "ContinuousBatch": (lambda: ContinuousBatch, None),
    "ContinuousBatch.add": (lambda: ContinuousBatch(LanguageModel(CONFIG), PagedCache(4)).add, None),
    "Packing": (lambda: Packing, None),
    "Packing.pack": (lambda: Packing(REAL).pack, None),
    "RotaryPositions": (lambda: fastattn.nn.RotaryPositions, None),
    "save": (lambda: fastattn.nn.save, None),
    "load": (lambda: fastattn.nn.load, None),
}  # fmt: skip


def right_arguments(name: str, function: Callable) -> dict[str, object]:
    """A right value for each argument of the function, or its default."""
    x, lse, ids = torch.ones(2, 2, 3, 8), torch.ones(2, 2, 3), torch.full((2, 3), 3)
    right = {
        "q": x, "k": x, "v": x, "query": x, "key": x, "value": x, "o1": x, "o2": x, "lse1": lse, "lse2": lse,
        "top_k": 2, "input_ids": ids, "max_new_tokens": 2, "batch_size": 2, "max_length": 8, "samples": REAL[0].long(),
        "real": REAL, "n": 3, "x": x[:, 0], "embed_dim": 8, "num_heads": 2, "head_dim": 8, "vocab_size": 11,
        "d_model": 8, "nhead": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 8,
        "config": CONFIG, "model": nn.MultiheadAttention(8, 2), "src": x[:, 0], "tgt": x[:, 0],
        "path": "model.safetensors", "num_layers": 1, "lengths": torch.tensor([1, 3]), "B": 2, "H": 2, "Q_LEN": 3,
        "pages": 4, "KV_LEN": 3, "mask_mod": lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, "n_q": 3, "n_k": 3,
    }  # fmt: skip
    if "varlen" in name:
        packed, cu_seqlens = torch.ones(6, 2, 8), torch.tensor([0, 2, 6])
        right |= {"q": packed, "k": packed, "v": packed, "cu_seqlens_q": cu_seqlens}
    if name == "attention_paged":
        right |= dict.fromkeys("qkv", torch.ones(4, 2, 8)) | dict.fromkeys(
            ("k_pages", "v_pages"), x.new_ones(4, 2, 2, 8)
        )
        right |= {"block_table": torch.tensor([[0, 1], [0, 3]]), "lengths": ids[:, 0] + 1, "prefix": 2}
        right |= {"cu_seqlens_q": torch.tensor([0, 2, 4]), "tree": torch.ones(2, 2).tril() > 0}
    if name == "flash_attn_varlen_func":
        right |= {"cu_seqlens_k": cu_seqlens, "max_seqlen_q": 4, "max_seqlen_k": 4}
    if name == "flash_attn_with_kvcache":
        right |= dict.fromkeys(("k_cache", "v_cache"), x.repeat(1, 3, 1, 1)) | {"cache_seqlens": ids[:, 0]}
        right |= dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(6, 4)) | {"cache_leftpad": ids[:, 0]}
        right |= {"cache_batch_idx": ids[:, 0] - 2}
    if name == "ContinuousBatch":
        right |= {"model": LanguageModel(CONFIG), "cache": PagedCache(4)}
    if name == "ContinuousBatch.add":
        right |= {"input_ids": ids[0]}
    if name == "MultiHeadAttention.forward":
        right |= dict.fromkeys(("query", "key", "value"), x[:, 0])
    parameters = inspect.signature(function).parameters.values()
    given = {p.name: right.get(p.name, p.default) for p in parameters if p.kind != p.VAR_KEYWORD}
    if name in ("Mask", "Mask &"):
        given = {p: right.get(p) for p in inspect.signature(fastattn.Mask).parameters}
        given |= {"causal": False, "q_offset": 0, "window": (None, None)}
    if name in ("explain", "LanguageModel.generate", "ContinuousBatch.add"):
        like = fastattn.attention if name == "explain" else fastattn.nn.GenerationOptions
        options = {p.name: right.get(p.name, p.default) for p in inspect.signature(like).parameters.values()}
        given = options | given
        for other in ("return_lse", "backend", "plan", "top_k", "unknown") if name == "explain" else ("top_k",):
            given.pop(other, None)
    return given


def hostile_value(draw: Draw, right: object) -> object:
    """Something else than the right value: junk of any type, or a tensor that is nearly right."""
    junk = [
        None, True, False, "x", "", b"x", [], {}, (), object(), 1j, -1, 0, 1.5, -0.5, math.nan, math.inf, -math.inf,
        2**63, -(2**63) - 1, 2**200, 1e300, 5e-324, (1, 2), (None, -1), (0, math.nan), [1, 2], REAL[:1], (REAL, REAL),
        torch.ones(()), torch.ones(0), torch.ones(3), torch.ones(2, 3), torch.tensor(math.nan), REAL.char(),
        torch.ones(2, 3, device="meta"), torch.full((2, 3), 2**62), torch.full((2, 3), -1), torch.Generator(),
        np.float32(0.5), np.ones((2, 3)), nn.Identity(), print, "cpu", torch.float32, KVCache(1, 1),
        fastattn.Mask(causal=True), (REAL.long(), None), (REAL.long(), REAL.long()[:, 1:]),
    ]  # fmt: skip
    if not torch.is_tensor(right) or draw.chance(0.4):
        return draw.choice(junk)
    changes = (
        lambda x: x[:0], lambda x: x[0], lambda x: x[None], lambda x: x[..., :0], lambda x: x[:, :1],
        lambda x: x[..., :1], lambda x: torch.cat([x, x]), lambda x: torch.cat([x, x], -1), lambda x: x.mT,
        lambda x: x.to("meta"), lambda x: x.to_sparse(), lambda x: torch.nested.nested_tensor(list(x)),
        lambda x: x.int(), lambda x: x.bool(), lambda x: x.double(), lambda x: x.half(), lambda x: x.cfloat(),
        lambda x: x.to(torch.float8_e4m3fn), lambda x: x.numpy(), lambda x: x.tolist(), lambda x: -x,
        lambda x: x * 2**40, lambda x: x.long() + 2**40,
    )  # fmt: skip
    return draw.choice(changes)(right)


def refused_by_name(draw: Draw) -> Errors:
    """A call with a hostile argument gives an answer, or an exception that names the argument."""
    name = draw.choice(list(CALLS))
    make, make_torchs = CALLS[name]
    function = make()
    given = right_arguments(name, function)
    if name == "load":
        fastattn.nn.save(given["model"], given["path"])
    argument = draw.choice(list(given))
    try:
        given[argument] = value = hostile_value(draw, given[argument])
    except (RuntimeError, TypeError, IndexError):  # no such tensor can be made
        return
    if name == "Transformer" and type(value) is int and value >= 2**63:  # it makes as many layers
        return
    if argument == "mask_mod" and callable(value):  # whose exceptions are its own
        return
    if name == "Transformer.forward" and torch.is_tensor(value) and value.is_nested:  # for torch's own code
        return
    try:
        function(**given)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        short = argument.split("_", 1)[-1]  # src_mask may be an attn_mask
        by_name = re.search(rf"\b(\w+_)?({argument}|{short})\b", str(error))
        by_name = by_name or re.match(
            rf"(mask\.)?({'|'.join(given)}|memory)\b", str(error)
        )  # the other that it does not fit
        classes = AS_TORCH if make_torchs else (*NAMED, OSError) if argument == "path" else NAMED
        right = by_name and isinstance(error, classes)
        right = right or (make_torchs and raises_too(make_torchs(), given, type(error)))
        yield holds(f"{name}({argument}={str(value)[:100]}) raises {said[:300]}", right)


def raises_too(function: Callable, given: dict[str, object], cls: type[Exception]) -> bool:
    """Whether torch's function raises an exception of this class too, for those of the arguments that it has."""
    known = inspect.signature(function).parameters if function.__module__ != "torch._C._nn" else {}
    try:
        function(**{n: x for n, x in given.items() if (n in known if known else n != "backend")})
    except cls:
        return True
    except Exception:
        return False
    return False
