"""A draw of the attack: a random valid call of `fastattn.attention`, where it runs, and the errors of its outputs."""

from __future__ import annotations

import math
import os
import platform
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from formula import Call, Error, compared, outputs
from torch import Tensor

import fastattn
from fastattn import plan
from fastattn.backends import BACKENDS

CAPABILITIES = (  # what a machine lacks is the next one it has
    ("neon_bf16", "neon")
    if platform.machine() in ("aarch64", "arm64")
    else ("amx", "avx512_bf16", "avx512", "avx2", "portable")
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOW = frozenset(() if DEVICE == "cuda" else ("triton",))  # Triton's interpreter: few draws, and small ones
NAMES = [b.NAME for b in BACKENDS if not (DEVICE == "cpu" and b.NAME in ("hopper", "cuda"))]
LENGTHS = [n + d for n in (16, 32, 48, 64, 96, 128, 256) for d in (-1, 0, 1)]
LARGEST_SCORE = 34  # a power of ten: less than fp32 can hold
LARGEST_VALUE = 37.5  # times the largest of many normal numbers
LEAST_WIDTH = 0  # of a head
POISONS = (1000.0, math.nan, math.inf)  # what a query that sees nothing must not notice
Errors = Iterator[Error]


class Draw(random.Random):
    """The source of all that is random in a draw.

    What kind of call it is depends on the seed alone, and the numbers in its tensors on `attempt` too.
    """

    def __init__(self, seed: int, attempt: int = 0) -> None:
        super().__init__(seed)
        self.of_numbers = torch.Generator().manual_seed(seed * 64 + attempt)
        self.backend = self.choices([None, *NAMES], [8, *(0.1 if name in SLOW else 3 for name in NAMES)])[0]
        self.dtype = self.choice((torch.float32, torch.float16, torch.bfloat16))
        if self.chance(0.03) and self.backend in (None, "reference"):
            self.dtype = torch.float64
        self.extreme = self.chance(0.08)
        self.capability, self.threads = self.choice(CAPABILITIES), self.choice((1, 1, 1, 1, 2, 3))
        self.warm = self.chance(0.5)

    def chance(self, p: float) -> bool:
        return self.random() < p

    def normal(self, *shape: int, magnitude: float = 1.0) -> Tensor:
        """A tensor of the draw's dtype."""
        dtype, most = self.dtype, torch.finfo(self.dtype).max
        x = torch.randn(shape, generator=self.of_numbers, dtype=torch.float64) * magnitude
        return x.clamp(-most, most).to(DEVICE, dtype)

    def table(self, *shape: int, p: float = 0.6) -> Tensor:
        """A bool tensor, True with probability p."""
        return (torch.rand(shape, generator=self.of_numbers) < p).to(DEVICE)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """An integer tensor in [low, high]."""
        dtype = self.choice((torch.int32, torch.int64))
        return torch.randint(low, high + 1, shape, generator=self.of_numbers, dtype=dtype).to(DEVICE)

    def length(self) -> int:
        """A number of tokens."""
        if self.backend in SLOW:
            return self.randint(0, 20)
        kinds = (self.randint(0, 140), self.choice(LENGTHS), self.randint(1, 3), self.randint(0, 600))
        return self.choices(kinds, (6, 3, 2, 1))[0]

    def broadcast(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to this one."""
        return tuple(self.choice((1, n)) for n in shape)[self.randint(0, len(shape)) :]

    def laid_out(self, x: Tensor) -> Tensor:
        """x [B, H, N, D] in some order in memory, as a part of something larger, NaN between its numbers."""
        order = self.sample(range(4), 4)
        back = [order.index(i) for i in range(4)]
        x = x.permute(order)
        wide = x.new_full([n + self.randint(0, 3) for n in x.shape], math.nan)
        part = wide[tuple(slice(-n, None) if n else slice(0, 0) for n in x.shape)]
        return part.copy_(x).permute(back) if self.chance(0.5) else x.permute(back)


@contextmanager
def environment(draw: Draw) -> Iterator[None]:
    """The instruction set, the number of threads and the plans that a draw computes with."""
    os.environ["FASTATTN_CPU_CAPABILITY"] = draw.capability
    torch.set_num_threads(draw.threads)
    torch.manual_seed(draw.randint(0, 2**32))
    plan.forget_plans()
    if draw.warm:  # calls of this backend then go the short way
        fastattn.attention(*[torch.ones(1, 1, 1, 1, device=DEVICE)] * 3)
    yield


def drawn_call(draw: Draw, allowed: str = "", B: int | None = None, same_lengths: bool = False) -> Call:
    """A call of `fastattn.attention`.

    Args:
        allowed: the features that it may have, by name; "" for all.
    """

    def has(name: str, p: float = 0.25) -> bool:
        return draw.chance(p) and (not allowed or name in allowed.split())

    B = draw.choice((0, 1, 1, 2, 3)) if B is None else B
    n_q, n_k = draw.length(), draw.length()
    n_k = n_q if same_lengths else n_k
    most = 3 if B * n_q * n_k < 30000 else 1
    H_kv, group = draw.randint(1, most), draw.randint(1, most)
    H, widths = (
        H_kv * group,
        [draw.randint(1, 80), draw.choice((8, 16, 32, 64, 128)), draw.choice((LEAST_WIDTH, 1, 200))],
    )
    D, d_v = draw.choices(widths, (4, 4, 1))[0], draw.choices(widths, (4, 4, 1))[0]
    d_v = d_v if draw.chance(0.3) else D
    mask, options = {}, {}
    if has("causal", 0.4):
        mask["causal"] = True
    if has("q_offset"):
        far = 2**40 if draw.chance(0.05) else 700
        start = draw.randint(-far, far)
        mask["q_offset"] = draw.choice(
            [draw.integers(-200, 200, B), draw.integers(-200, 200, B, n_q), start, n_k - n_q]
        )
    if has("window"):
        mask["window"] = tuple(draw.choice((None, 0, draw.randint(0, 140))) for _ in range(2))
    for name, n in (("real_keys", n_k), ("real_queries", n_q)):
        if has(name):
            lengths = draw.integers(0, n, B)[:, None]
            index = torch.arange(n, device=DEVICE)
            tables = (index < lengths, index >= lengths, draw.table(B, n), draw.table(B, n, p=0))
            mask[name] = draw.choices(tables, (4, 4, 4, 1))[0]
    if has("segment_ids"):
        most, in_order = draw.choice((0, 3, 30)), draw.chance(0.7)
        ids = [draw.integers(-1, most, B, n) for n in (n_q, n_k)]
        mask["segment_ids"] = tuple(x.sort(1, descending=draw.chance(0.5)).values if in_order else x for x in ids)
    if has("dense"):
        mask["dense"] = draw.table(*draw.broadcast((B, H, n_q, n_k)), p=draw.choice((0.0, 0.3, 0.7, 0.99)))
    if has("scale", 0.4):
        options["scale"] = draw.choice((0.0, 0.05, 1.0, -0.3, 3))
    if has("bias"):
        options["bias"] = draw.normal(*draw.broadcast((B, H, n_q, n_k)), magnitude=draw.choice((1, 20)))
        if draw.chance(0.3):
            options["bias"].masked_fill_(draw.table(*options["bias"].shape, p=0.3), -math.inf)
    if has("softcap"):
        options["softcap"] = draw.uniform(0.25, 64)
    if has("alibi_slopes"):
        options["alibi_slopes"] = draw.normal(*draw.choice(((H,), (B, H)))).float().abs() / 8
        if not torch.is_tensor(mask.get("q_offset", 0)) and abs(mask.get("q_offset", 0)) > 1000:
            del mask["q_offset"]
    if has("sinks"):
        options["sinks"] = draw.normal(H, magnitude=draw.choice((1, 10))).float()
    shapes = ((B, H, n_q, D), (B, H_kv, n_k, D), (B, H_kv, n_k, d_v), (B, H, n_q, d_v))
    sizes = extreme_sizes(draw) if draw.extreme else [draw.choice((1.0, 1.0, 1.0, 0.01, 10.0))] * 4
    seen = fastattn.Mask(**mask)
    rows = (seen.readable_queries(), seen.readable_keys(), seen.readable_keys(), seen.readable_queries())
    tensors = []
    for shape, magnitude, real in zip(shapes, sizes, rows, strict=True):
        x = draw.normal(*shape, magnitude=magnitude)
        if real is not None and draw.chance(0.8):
            x.masked_fill_(~real[:, None, :, None], math.nan)  # in what no one may read
        tensors.append(draw.laid_out(x))
    q, k, v, do = tensors
    if draw.chance(0.05) and B and not {"real_keys", "segment_ids"} & mask.keys():
        k, v = (x[:, :, :, :1].expand_as(x) if draw.chance(0.5) else x[:1].expand_as(x) for x in (k, v))
    call = Call(q, k, v, do, draw.normal(B, H, n_q).float(), mask, options)
    return with_dropout(draw, call) if has("dropout", 0.2) else call


def extreme_sizes(draw: Draw) -> list[float]:
    """Magnitudes of q, k, v and do up to the largest number, with which scores and gradients are finite in fp32."""
    most = math.log10(torch.finfo(draw.dtype).max)
    while True:
        q, k, v, do = (draw.uniform(-most, most) if draw.chance(0.7) else 0 for _ in range(4))
        if q + k < LARGEST_SCORE and v < LARGEST_VALUE and v + do + max(q, k, 0) < 34:
            return [10**x for x in (q, k, v, do)]


def with_dropout(draw: Draw, call: Call) -> Call:
    """The call with dropout, and the weights that its seed keeps: those of equal scores that are not 0."""
    p, (B, H, n_q, _), n_k = draw.choice((0.1, 0.5, 1.0)), call.q.shape, call.k.shape[2]
    q, k = (torch.zeros(B, H, n, 1, dtype=torch.float64, device=DEVICE) for n in (n_q, n_k))
    kept = fastattn.attention_weights(
        q, k, dropout_p=p, generator=generator(draw), average_heads=False, backend="reference"
    )
    return replace(call, dropout_p=p, kept=kept > 0)


def generator(draw: Draw) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(draw.of_numbers.initial_seed())


def arguments(draw: Draw, call: Call, dropout: bool = True, backend: bool = True) -> dict[str, object]:
    """The arguments of `fastattn.attention` after q, k and v."""
    given = {"mask": fastattn.Mask(**call.mask) if call.mask or draw.chance(0.5) else None, **call.options}
    if dropout and call.dropout_p:
        given |= {"dropout_p": call.dropout_p, "generator": generator(draw)}
    return given | ({"backend": draw.backend} if backend and draw.backend else {})


def naive_dtype(draw: Draw) -> torch.dtype:
    """The dtype of the naive formula: the draw's, or fp32 where that overflows, and for fp64, which is exact."""
    return torch.float32 if draw.extreme or draw.dtype == torch.float64 else draw.dtype


def errors_of(draw: Draw, call: Call, actual: dict[str, Tensor]) -> Errors:
    """The errors of these outputs of a call, by the names of `formula.outputs`."""
    torch.set_num_threads(1)
    exact = outputs(call, torch.float64)
    naive = outputs(call, naive_dtype(draw))
    for name, x in actual.items():
        lse = exact["lse"] if name.startswith("d") else None
        error = compared(name, x, naive[name], exact[name], draw.dtype, least=name == "lse", lse=lse)
        yield judged(draw, error)


def judged(draw: Draw, error: Error) -> Error:
    """The error, whose budget is unlimited in an extreme draw: there a number is asked for, and no more."""
    return error._replace(budget=math.inf) if draw.extreme and math.isfinite(error.largest) else error


def holds(what: str, right: object) -> Error:
    """An error that is none if `right`."""
    return Error(what, 0.0 if right else math.inf, 0.0)
