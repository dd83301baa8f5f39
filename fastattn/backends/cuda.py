"""The CUDA backend (csrc/cuda/): for GPUs that Triton does not compile for, and for machines without Triton."""

from __future__ import annotations

import dataclasses
import functools
import math
from types import ModuleType

import torch
from torch import Tensor

from ..spec import FEATURES, LOG2E, Spec, empty_output
from . import build
from .diagonals import n_diagonals, sums_of_diagonals
from .gradients import RowStats, Sums, learned_gradients, wanted_sums

NAME = "cuda"
WHERE = "NVIDIA GPUs of compute capability 7.5 and newer"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST_HEAD_DIM = 256
_FIRST_OF_TRITON = (8, 0)  # that it compiles for
_ALIGNMENT = 16  # bytes: of what the kernels copy at a time
_FAR = 2**61  # positions are cut off here: kFar in csrc/mask.h
_MOST_TOKENS = 2**30  # tokens are numbered by 32-bit integers inside the kernels


def features(device: torch.device) -> frozenset[str]:
    """Every feature, on every device."""
    return FEATURES


def lacks(device: torch.device) -> frozenset[str]:
    """Names of all optional functions, on every device."""
    return frozenset({"weights", "received", "top_keys"})


def unsupported(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> list[str]:
    """Sentences about the device, the dtype, the head dims and the lengths."""
    result = _device_objections(q.device)
    if q.dtype not in _DTYPES:
        result.append(f"q must be float32, bfloat16 or float16, got {q.dtype}")
    if not result and q.dtype == torch.bfloat16:
        capability = torch.cuda.get_device_capability(q.device)
        if (code := build.CUDA.code_for(capability)) < build.FIRST_WITH_BF16:
            got = _text(capability) if code == capability else f"code for {_text(code)} by TORCH_CUDA_ARCH_LIST"
            result.append(f"needs compute capability {_text(build.FIRST_WITH_BF16)} or later for bfloat16, got {got}")
    for name, dim in (("q and k", q.shape[3]), ("v", v.shape[3])):
        if not 1 <= dim <= _LARGEST_HEAD_DIM:
            result.append(f"takes head dims from 1 to {_LARGEST_HEAD_DIM}, got {dim} for {name}")
    if max(q.shape[2], k.shape[2]) > _MOST_TOKENS:
        result.append(f"n_q and n_k must be at most {_MOST_TOKENS}, got {q.shape[2]} and {k.shape[2]}")
    return result


def unavailable(device: torch.device) -> str | None:
    """One sentence where the C++ module cannot be had for that GPU; builds it if that has not been done."""
    return build.CUDA.unavailable_on(torch.cuda.get_device_capability(device))


def by_name_only(device: torch.device) -> str | None:
    """One sentence where the Triton backend runs."""
    if (
        _device_objections(device)
        or torch.cuda.get_device_capability(device) < _FIRST_OF_TRITON
        or not _triton_is_there()
    ):
        return None
    return f"serves by name where Triton runs: on compute capability {_text(_FIRST_OF_TRITON)} and later"


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """o [B, H, n_q, d_v] in the dtype of q, and lse [B, H, n_q] in fp32."""
    return _forward(q, _readable(k), _readable(v), spec, v.shape[3], k.shape[2])


def forward_paged(q: Tensor, k: Tensor, v: Tensor, table: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """As `forward`, for keys and values in pages [pages, H_kv, page_size, D or d_v].

    Args:
        table: int32 or int64 [B, pages of a sample], whose keys are those of its pages one after the other. No load
            leaves the pages, whatever it says.
    """
    return _forward(q, k, v, spec, v.shape[3], table.shape[1] * k.shape[2], table.int().contiguous())


def forward_quantized(
    q: Tensor, k: Tensor, v: Tensor, k_scales: Tensor, v_scales: Tensor, table: Tensor, spec: Spec
) -> tuple[Tensor, Tensor]:
    """As `forward_paged`, for keys and values of int8 or float8_e4m3fn, each row times its scale.

    They are rounded to the dtype of q, as copies would be.

    Args:
        k_scales, v_scales: fp32 [pages, H_kv, page_size].
    """
    n_k = table.shape[1] * k.shape[2]
    return _forward(q, k, v, spec, v.shape[3], n_k, table.int().contiguous(), k_scales, v_scales)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    d_v: int,
    n_k: int,
    table: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    module = build.CUDA.load()
    o = empty_output(q, d_v)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    written = _writable(o)
    given = _readable(q), k, v, table, k_scales, v_scales
    module.forward(*given, written, lse, *_described(module, q, n_k, spec))
    return _copied_back(o, written), lse


def backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: Spec,
    output_mask: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, bias, alibi_slopes and sinks, in their dtypes; dk and dv come together."""
    module = build.CUDA.load()
    wants_dq, wants_dk, wants_dv, _, wants_dalibi, _ = output_mask
    do = torch.zeros_like(o) if do is None else do
    if dlse is not None:
        dlse = dlse.masked_fill(lse == -math.inf, 0)  # a constant there, whatever arrives
    wanted = wanted_sums(spec, output_mask, rounded=True)

    def table_or_none(is_wanted: bool, *shape: int) -> Tensor | None:
        return lse.new_empty(shape) if is_wanted else None

    dq = torch.empty_like(q) if wants_dq or wanted.of_queries else None
    dk, dv = (torch.empty_like(x) if wants_dk or wants_dv or wanted.of_keys else None for x in (k, v))
    written = [None if x is None else _writable(x) for x in (dq, dk, dv)]
    n_q, n_k = q.shape[2], k.shape[2]
    of_bias = ()
    if wanted.of_pairs and spec.bias_by_distance:
        tile = module.bias_tile(q, v)
        of_bias = (1, len(spec.bias), n_diagonals(n_q, n_k, *tile), *tile)
    elif wanted.of_pairs:
        of_bias = (*(1, 1, *spec.bias.shape)[-4:-2], n_q, n_k)
    sums = Sums(
        of_pairs=table_or_none(wanted.of_pairs, *of_bias),
        of_keys=table_or_none(wanted.of_keys, *lse.shape[:2], n_k),
        of_queries=table_or_none(wanted.of_queries, *lse.shape),
        by_distance=table_or_none(wanted.by_distance, *lse.shape),
    )
    p_by_distance = table_or_none(wants_dalibi, *lse.shape)
    stats = module.backward(
        _readable(do),
        None if dlse is None else dlse.contiguous(),
        *map(_readable, (q, k, v, o)),
        lse.contiguous(),
        module.Gradients(
            dq=written[0],
            dk=written[1],
            dv=written[2],
            ds_of_keys=sums.of_keys,
            ds_of_queries=sums.of_queries,
            ds_by_distance=sums.by_distance,
            p_by_distance=p_by_distance,
            d_bias=sums.of_pairs,
        ),
        *_described(module, q, n_k, spec),
    )
    dq, dk, dv = (x if x is None else _copied_back(x, y) for x, y in zip((dq, dk, dv), written, strict=True))
    if wanted.of_pairs and spec.bias_by_distance:
        sums = sums._replace(of_pairs=sums_of_diagonals(sums.of_pairs[0], n_q, n_k))
    reference, rest_log2, delta = stats.unbind(2)  # in nats where there are sinks, which alone read it
    rows = RowStats(reference.double() * LOG2E, rest_log2, delta, dlse, spec.sinks, sums.of_queries)
    return dq, dk, dv, *learned_gradients(spec, output_mask, sums, rows, p_by_distance)


def _device_objections(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return [f"q must be on an NVIDIA GPU, got {device.type}"]
    if torch.version.cuda is None:
        return [f"needs a torch for NVIDIA GPUs, got torch {torch.__version__}"]
    if (capability := torch.cuda.get_device_capability(device)) < build.OLDEST_CAPABILITY:
        return [f"needs compute capability {_text(build.OLDEST_CAPABILITY)} or later, got {_text(capability)}"]
    return []


def _described(module: ModuleType, q: Tensor, n_k: int, spec: Spec) -> tuple[object, object]:
    """The arguments that tell the module what to compute."""
    mask, shape = spec.mask, (*q.shape[:3], n_k)
    documents, positions, q_offset = (None, None), (None, None), mask.q_offset
    if mask.segment_ids is not None or (isinstance(q_offset, Tensor) and q_offset.dim() == 2):
        near = q_offset.long().clamp(-_FAR, _FAR) if isinstance(q_offset, Tensor) else max(-_FAR, min(q_offset, _FAR))
        positions = dataclasses.replace(mask, q_offset=near).positions(*shape[2:], q.device)
        positions = [p.expand(shape[0], -1).contiguous() for p in positions]
        documents, q_offset = mask.segment_ids or documents, 0
    elif isinstance(q_offset, Tensor):
        q_offset = q_offset.long().contiguous()
    real = mask.readable_queries(), mask.readable_keys()
    sides = [
        module.Side(
            real=None if r is None else r.contiguous(),
            documents=None if d is None else d.long().contiguous(),
            positions=p,
        )
        for r, d, p in zip(real, documents, positions, strict=True)
    ]
    left, right = mask.window
    described_mask = module.Mask(
        causal=mask.causal,
        left=left,
        right=right,
        q_offset=q_offset,
        queries=sides[0],
        keys=sides[1],
        dense=None if mask.dense is None else mask.dense.expand(shape),
    )
    bias, slopes, sinks = spec.bias, spec.alibi_slopes, spec.sinks
    if bias is not None:
        bias = bias if bias.dtype in _DTYPES else bias.float()
        bias = bias.expand(*shape[:2], 1, -1) if spec.bias_by_distance else bias.expand(shape)
    scores = module.Scores(
        scale=spec.scale,
        softcap=spec.softcap,
        bias=bias,
        bias_by_distance=spec.bias_by_distance,
        alibi_slopes=None if slopes is None else slopes.float().expand(shape[:2]).contiguous(),
        sinks=None if sinks is None else sinks.float().contiguous(),
        dropout_p=spec.dropout_p,
        seed=spec.seed,
        places=None if spec.places is None else spec.places.contiguous(),
    )
    return described_mask, scores


def _is_aligned(x: Tensor) -> bool:
    in_bytes = (x.data_ptr(), *(n * x.element_size() for n in (x.shape[3], *x.stride()[:3])))
    return x.stride(3) == 1 and all(n % _ALIGNMENT == 0 for n in in_bytes)


def _padding(x: Tensor) -> int:
    """How many columns `x` lacks until its rows are multiples of what is copied at a time."""
    return -x.shape[3] % (_ALIGNMENT // x.element_size())


def _readable(x: Tensor) -> Tensor:
    """`x`, copied where its rows do not lie as the kernels read them; zeros stand in the columns that are added."""
    if _is_aligned(x):
        return x
    padded = x.new_zeros(*x.shape[:3], x.shape[3] + _padding(x))
    padded[..., : x.shape[3]] = x
    return padded


def _writable(x: Tensor) -> Tensor:
    """`x`, or what stands in for it where its rows do not lie as the kernels write them."""
    return x if _is_aligned(x) else x.new_empty(*x.shape[:3], x.shape[3] + _padding(x))


def _copied_back(x: Tensor, written: Tensor) -> Tensor:
    return x if written is x else x.copy_(written[..., : x.shape[3]])


@functools.cache
def _triton_is_there() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _text(capability: tuple[int, int]) -> str:
    return "{}.{}".format(*capability)
