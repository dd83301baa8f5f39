"""Check of a family of kernels (a backend, a dtype, forward or training) on the machine that it is to serve on.

The tests of this package have not run on every machine. Where they have not, a family computes a few small calls before
its first by automatic choice, with padding and at the edges of tiles, and is compared with the reference in fp64. The
verdict is kept in the record of the machine. FASTATTN_SELF_CHECK=0 turns it off.
"""

from __future__ import annotations

import math
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..spec import Mask, Spec
from . import cpu, record, reference
from .build import progress_shown, say
from .compiling import compiled_at_once
from .record import while_tracing

_ADDRESS = "https://github.com/fastattn/fastattn/issues"
_KNOWN_INSTRUCTION_SETS = frozenset({"amx", "avx512_bf16", "avx512", "avx2"})  # on which the tests have run
OF_TRITON = frozenset({"triton", "hopper"})  # whose kernels Triton compiles when they are launched
_TOLERANCE = {torch.float64: 2**8, torch.float32: 2**7, torch.float16: 2**3, torch.bfloat16: 2**3}
"""How many eps of the dtype, times the largest number of the result, an error may have."""
_SHAPES = ((2, 4, 2, 80, 80, 64), (1, 4, 2, 130, 33, 64), (2, 4, 2, 1, 200, 64), (1, 2, 2, 65, 65, 128))
"""B, H, H_kv, n_q, n_k and D: edges of tiles, a query that decodes, a wide head. As few groups of heads and head dims
as can be, for each of which GPU kernels are compiled."""
_FAR_BELOW_ZERO = (1, 4, 2, 320, 320, 64)
"""A call with all scores near -120, where exp(-lse) is above the largest float, as a key beyond the end would make it;
in which the sums of several tiles of keys meet, in some order; and of enough queries for every kernel of PyTorch."""


def objection(
    backend: ModuleType, device: torch.device, dtype: torch.dtype, training: bool, may_check: bool = True
) -> str | None:
    """Why a family does not serve here, in one sentence, or None where it does; checks it if nobody has and it may."""
    if backend is reference or os.environ.get("FASTATTN_SELF_CHECK") == "0" or device.type not in ("cpu", "cuda"):
        return None
    if device.type == "cuda" and not torch.cuda.is_available():  # of fake tensors
        return None
    name = family(backend.NAME, dtype, training)
    if name in _lacking:
        return _LACKS_COMPILER
    why = _verdict(device, name)
    if why is None:
        if not may_check or not _is_unknown(backend.NAME, device.type):
            return None
        if record.is_traced() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            _warn_unchecked(name)
            return None
        # No transform or mode around the call is to see the check, whose tensors are none of it.
        with record.exclusively(device), _disable_current_modes(), torch._C._DisableFuncTorch():
            why = record.read_again(device).families.get(name)  # another process may have been first
            if why is None:
                why = _found(backend, device, dtype, training) or ""
                if _NO_COMPILER in why:  # which may be installed tomorrow
                    _lacking.add(name)
                    return _LACKS_COMPILER
                record.update(device, lambda old: replace(old, families=old.families | {name: why}))
    return f"failed its check on this machine ({name}: {why}); please report it at {_ADDRESS}" if why else None


_NO_COMPILER = "Failed to find C compiler"  # Triton says so
_LACKS_COMPILER = "needs a C compiler (gcc or clang on the PATH, or CC), without which Triton launches nothing"
_lacking: set[str] = set()
"""Families that this process could not check for want of it."""
OUTPUTS = ("o", "lse", "dq", "dk", "dv")


def serves_whole(backend: ModuleType, device: torch.device) -> bool:
    """Whether every family of a backend serves here."""
    kinds = ((dtype, training) for dtype in _TOLERANCE for training in (False, True))
    return not any(objection(backend, device, *kind) for kind in kinds)


def family(backend: str, dtype: torch.dtype, training: bool) -> str:
    """The name of a family."""
    return f"{backend} {str(dtype).removeprefix('torch.')} {'training' if training else 'forward'}"


@while_tracing
def _verdict(device: torch.device, name: str) -> str | None:
    return record.of(device).families.get(name)


@while_tracing
def _is_unknown(backend: str, device_type: str) -> bool:
    """Whether no tests of this package have run for this backend on a machine like this."""
    if device_type == "cpu":
        return backend == cpu.NAME and cpu.capability() not in _KNOWN_INSTRUCTION_SETS
    return True


@while_tracing
def _warn_unchecked(name: str) -> None:
    warnings.warn(
        f"{name} has not been checked on this machine, and cannot be while a graph is made: one eager call of "
        "attention() before, or `fastattn tune`, checks it",
        stacklevel=1,
    )


def _found(backend: ModuleType, device: torch.device, dtype: torch.dtype, training: bool) -> str | None:
    """`find_fault`, which shows progress on a GPU, where it may have to compile kernels."""
    if device.type != "cuda":
        return find_fault(backend, device, dtype, training)
    name = family(backend.NAME, dtype, training)
    say(f"checking {name} on this GPU, once; it may compile kernels")
    with progress_shown("the check", len(_calls(device, training))) as show_more:
        return find_fault(backend, device, dtype, training, after_each=lambda: show_more(1))


def _calls(device: torch.device, training: bool) -> list[tuple[tuple[int, ...], Mask, bool]]:
    """The calls of a check: shape, mask, and whether the same inputs are to give the same bits."""
    calls = []
    for shape in (*_SHAPES, _FAR_BELOW_ZERO):
        # GPUs may have other kernels for sums in any order.
        orders = (True, False) if shape is _FAR_BELOW_ZERO and training and device.type == "cuda" else (True,)
        B, _, _, n_q, n_k, D = shape
        masks = _masks(B, n_q, n_k, device)
        if D == 128:  # wide heads have kernels of their own: half of the masks, for the sake of who waits
            masks = masks[1::2]
        calls += [(shape, mask, in_order) for mask in masks for in_order in orders]
    return calls


class _Problem(NamedTuple):
    """A small call of a check.

    low: all scores are near -120.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    spec: Spec
    low: bool

    def results(self, backend: ModuleType, training: bool) -> list[Tensor]:
        """o and lse of a backend, and in training the gradients of q, k and v."""
        inputs, spec, wanted = (self.q, self.k, self.v), self.spec, (True, True, True, False, False, False)
        o, lse = backend.forward(*inputs, spec)
        if not training:
            return [o, lse]
        return [o, lse, *backend.backward(self.do, self.dlse, *inputs, o, lse, spec, wanted)[:3]]

    def exactly(self) -> _Problem:
        """The same in fp64."""
        return self._replace(**{name: getattr(self, name).double() for name in ("q", "k", "v", "do", "dlse")})

    def __str__(self) -> str:
        mask = " and ".join(sorted(self.spec.mask.features())) or "no mask"
        return f"{list(self.q.shape)} with {self.k.shape[2]} keys and {mask}"


def _problems(backend: ModuleType, device: torch.device, dtype: torch.dtype, training: bool) -> Iterator[_Problem]:
    """The calls of a check that the backend takes."""
    generator = torch.Generator().manual_seed(0)
    for (B, H, H_kv, n_q, n_k, D), mask, deterministic in _calls(device, training):
        low = (B, H, H_kv, n_q, n_k, D) == _FAR_BELOW_ZERO
        spec = Spec(mask, D**-0.5, deterministic=deterministic)
        shapes = ((B, H, n_q, D), (B, H_kv, n_k, D), (B, H_kv, n_k, D), (B, H, n_q, D), (B, H, n_q))
        tensors = [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for shape in shapes]
        if low:
            tensors[0] += 4
            tensors[1] -= 4
        q, k, v, do, dlse = (x.to(device, dtype) for x in tensors)
        if mask.real_keys is not None:  # which no kernel may read
            k, v = (x.masked_fill(~mask.real_keys[:, None, :, None], math.nan) for x in (k, v))
        if mask.features() <= backend.features(device) and not backend.unsupported(q, k, v, spec):
            yield _Problem(q, k, v, do, dlse.to(torch.promote_types(dtype, torch.float32)), spec, low)


def failures() -> tuple[type[Exception], ...]:
    """The exceptions of torch, its compiler, Triton and the C compiler that this calls, where they cannot compute."""
    known = RuntimeError, ValueError, ImportError, OSError, subprocess.SubprocessError
    try:
        from triton.errors import TritonError
    except ImportError:
        return known
    return (*known, TritonError)


def find_fault(
    backend: ModuleType,
    device: torch.device,
    dtype: torch.dtype,
    training: bool,
    after_each: Callable[[], None] = lambda: None,
) -> str | None:
    """The first fault that a family shows in a few small calls, in one sentence; None where there is none.

    Raises:
        torch.OutOfMemoryError: memory is full, which says nothing about the family.
    """
    with _no_tf32(device):
        return _first_fault(backend, device, dtype, training, after_each)


def _first_fault(
    backend: ModuleType, device: torch.device, dtype: torch.dtype, training: bool, after_each: Callable[[], None]
) -> str | None:
    if device.type == "cuda" and backend.NAME in OF_TRITON:
        _compile(backend, device, dtype, training)
    for problem in _problems(backend, device, dtype, training):
        try:
            results, again = (problem.results(backend, training) for _ in range(2))
            if device.type == "cuda":  # which tells of some faults later
                torch.cuda.synchronize(device)
        except torch.OutOfMemoryError:
            raise
        except failures() as error:
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        right = problem.exactly().results(reference, training)
        for output, x, repeated, exact in zip(OUTPUTS, results, again, right, strict=False):
            if why := difference(x, exact, dtype, slack=8 if problem.low else 1):  # scores are rounded by their size
                return f"{output} of {problem} {why}"
            if problem.spec.deterministic and not torch.equal(x, repeated):
                return f"{output} of {problem} has other bits in the second call"
        after_each()
    return None


@contextmanager
def _no_tf32(device: torch.device) -> Iterator[None]:
    """Computes fp32 in fp32 on a GPU, whatever the user has allowed, as the tolerance expects."""
    if device.type != "cuda":
        yield
        return
    of_products = torch.backends.cuda.matmul
    before, of_products.fp32_precision = of_products.fp32_precision, "ieee"
    try:
        yield
    finally:
        of_products.fp32_precision = before


def _compile(backend: ModuleType, device: torch.device, dtype: torch.dtype, training: bool) -> None:
    """Compiles the kernels of a check side by side; what goes wrong is left to the check, which says so."""
    with suppress(*failures()), compiled_at_once():
        for problem in _problems(backend, device, dtype, training):
            problem.results(backend, training)


def _masks(B: int, n_q: int, n_k: int, device: torch.device) -> list[Mask]:
    real_keys = torch.arange(n_k, device=device) < torch.tensor([[n_k], [(n_k + 2) // 3]], device=device)[:B]
    offset = n_k - n_q
    return [
        Mask(),
        Mask(causal=True),
        Mask(real_keys=real_keys),
        Mask(causal=True, q_offset=offset, real_keys=real_keys),
    ]


def difference(x: Tensor, exact: Tensor, dtype: torch.dtype, slack: int = 1) -> str | None:
    """How a result differs from the exact one, in words; None within `slack` times the tolerance."""
    x, exact = x.double(), exact.double()
    empty = exact == -math.inf
    if not torch.equal(x == -math.inf, empty):
        return "is not -inf exactly where a query sees nothing"
    x, exact = x.masked_fill(empty, 0), exact.masked_fill(empty, 0)
    error, limit = (x - exact).abs().max().item(), slack * _TOLERANCE[dtype] * torch.finfo(dtype).eps
    limit *= exact.abs().max().item()
    return None if error <= limit else f"is off by {error:.2g}, where {limit:.2g} is allowed"
