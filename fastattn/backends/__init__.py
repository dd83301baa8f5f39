"""The registry and the policy: `BACKENDS`, why one refuses a call, and which one serves it.

A backend is a module with these names, and nothing else is asked of it:

    NAME                                  how users call it
    WHERE                                 what it runs on, in words
    features(device) -> frozenset[str]    the features of spec.py it computes there; what is not listed is refused
    unsupported(q, k, v, spec)            sentences about dtype, head dims or device it does not take; [] means yes
    lacks(device) -> frozenset[str]       the functions in `OPTIONAL` that it does not have there, and so refuses
    unavailable(device) -> str | None     one sentence why nothing runs there on this machine (asked last: may build)
    by_name_only(device) -> str | None    one sentence why it is used there only when named
    forward(q, k, v, spec) -> (o, lse)
    backward(do, dlse, q, k, v, o, lse, spec, output_mask) -> (dq, dk, dv, dbias, dalibi_slopes, dsinks)

`do` and `dlse` may each be None (no gradient arrives through that output). Of the six gradients those whose entry in
`output_mask` is False may be None. The functions in `OPTIONAL`:

    weights(q, k, lse, spec, average_heads) -> weights
    received(q, k, spec) -> sums of the weights over the queries
    top_keys(q, k, spec, top_k) -> (weights, keys)
    forward_paged(q, k, v, table, spec) -> (o, lse)
    forward_quantized(q, k, v, k_scales, v_scales, table, spec) -> (o, lse)

as reference.py defines the first three. `lse` is that of `forward` for the same call, or None. The spec of `received`
and `top_keys` has no dropout. Their derivatives are those of derivatives.py where nothing else is said. The last two
are `forward` for keys and values [pages, H_kv, page_size, D or d_v], of which sample b has those in the pages
table[b]: in any strides, and reading none but real ones; of int8 or float8_e4m3fn each row is to be multiplied by its
scale, fp32 [pages, H_kv, page_size]. Where a backend lacks "forward", since it has no lse there, it has this in its
place, for calls of which neither an lse nor a derivative is wanted:

    output(q, k, v, spec) -> o

Two more may be absent:

    weights_backward(d_weights, q, k, lse, spec) -> gradients as of `backward`, None for v; `d_weights` broadcasts to
        [B, H, n_q, n_k]
    short_way() -> what `short_way` of fastattn/ops.py calls, and its backward; and what `_short_way` of paged.py calls
"""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ..spec import Mask, Spec
from . import aten, build, choice, cpu, cuda, hopper, record, reference, selfcheck, triton
from .record import while_tracing

BACKENDS: tuple[ModuleType, ...] = (hopper, triton, cuda, cpu, aten, reference)

OPTIONAL = {
    "forward": "attention with its lse",
    "weights": "weights",
    "received": "the weights that keys receive",
    "top_keys": "the keys of the largest weights",
    "forward_paged": "attention to pages where they lie",
    "forward_quantized": "attention to pages of int8 or float8_e4m3fn where they lie",
}
"""Functions that a backend may lack, and what they compute, for the objection."""


class FallbackWarning(UserWarning):
    """A call is computed by PyTorch's kernels, or the reference, for want of a kernel of this package."""


def backend_by_name(name: str) -> ModuleType:
    """The backend called `name`; ValueError that lists the known names otherwise."""
    for backend in BACKENDS:
        if name == backend.NAME:
            return backend
    known = ", ".join(repr(name) for name in ("fused", *(backend.NAME for backend in BACKENDS)))
    raise ValueError(f"backend must be one of {known}, got {name!r}")


def objections(
    backend: ModuleType,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    *,
    function: str = "forward",
    named: bool = True,
    training: bool = False,
) -> list[str]:
    """Why `backend` does not compute this call, in sentences; an empty list means it does.

    Args:
        function: which of its functions the call needs: "forward", which stands for "backward" too, "output" for
            either that or `output`, or another name in `OPTIONAL`; those that return weights have a `v` of width 0.
        named: the user asked for this backend, so one that serves only by name, or that has failed its check here, has
            no objection.
        training: gradients are wanted.
    """
    if refusals := list(_refusals(backend, q, k, v, spec, spec.features(), function, named)):
        return refusals
    why = _unavailable(backend.NAME, q.device)  # last, since it may have to build the backend
    if not why and not named:
        why = selfcheck.objection(backend, q.device, q.dtype, training, may_check=False)
    return [why] if why else []


def order_of(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, training: bool
) -> tuple[tuple[ModuleType, ...], choice.Order]:
    """The backends in the order in which an automatic choice asks them for a call, and the reason.

    Args:
        training: gradients are wanted.
    """
    order = choice.order(q, k, v, spec, training)
    first = [backend for name in order.backends for backend in BACKENDS if name == backend.NAME]
    return (*first, *(backend for backend in BACKENDS if backend not in first)), order


def _refusals(
    backend: ModuleType,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    features: frozenset[str],
    function: str,
    named: bool,
) -> Iterator[str]:
    willing = True
    if function in backend.lacks(q.device):
        willing = False
        yield f"does not compute {OPTIONAL[function]} on {q.device.type}"
    if not features <= (supported := backend.features(q.device)):
        willing = False
        for name in sorted(features - supported):
            yield f"does not support {name} on {q.device.type}"
    for why in backend.unsupported(q, k, v, spec):
        willing = False
        yield why
    if willing and not named and (why := backend.by_name_only(q.device)):
        yield why


class NoBackendError(NotImplementedError):
    """No backend, or not the named one, computes a well-formed call.

    reasons: of each backend, a line each; the message has them too.
    """

    @property
    def reasons(self) -> str:
        return self.args[1]

    def __str__(self) -> str:
        return "\n".join(self.args)


def select(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    name: str | None = None,
    *,
    function: str = "forward",
    training: bool = False,
) -> ModuleType:
    """The backend that computes this call.

    Args:
        name: None takes the first backend without objections, in the order of `order_of`; "fused" the first of this
            package's kernels; any other name that backend or nothing.
        function: as in `objections`.
        training: as in `order_of`.

    Raises:
        ValueError: there is no backend of that name.
        NoBackendError: every backend asked objects.
    """
    if name is None or name == "fused":
        candidates, order = order_of(q, k, v, spec, training)
        candidates = [backend for backend in candidates if name is None or backend not in (aten, reference)]
        named, trusted = False, order.backends if order.trusted else ()
    else:
        named, candidates, trusted = True, (backend_by_name(name),), ()
    features = spec.features()
    missing: dict[str, str] = {}  # of those that would have served, if this machine had them
    for backend in candidates:
        asked = named or backend.NAME in trusted
        if not asked and backend.by_name_only(q.device):  # the quickest to ask
            continue
        for _ in _refusals(backend, q, k, v, spec, features, function, asked):
            break  # one is enough: the rest is worked out only for somebody who reads it
        else:
            why = _unavailable(backend.NAME, q.device)
            if not why and not named:
                why = selfcheck.objection(backend, q.device, q.dtype, training)
            if why:
                missing[backend.NAME] = why
                continue
            if name is None and backend is reference:
                fused = [backend for backend in candidates if backend is not reference]
                _warn_of_fallback(_listed_objections(fused, q, k, v, spec, function, named, training))
            elif name is None and backend is aten and missing:
                _warn_of_torch("; ".join(f"{name}: {why}" for name, why in missing.items()))
            return backend
    who = f"backend {name!r} does not compute" if named else "no fused backend computes"
    raise NoBackendError(f"{who} this call:", _listed_objections(candidates, q, k, v, spec, function, named, training))


@while_tracing
def _unavailable(name: str, device: torch.device) -> str | None:
    return backend_by_name(name).unavailable(device)


@while_tracing
def _warn_of_fallback(reasons: str) -> None:
    # The stack level is ours on purpose: Python then shows each distinct reason once, not once per line of user code.
    warnings.warn(
        "the reference computes this attention, in O(n_q * n_k) memory, since no fused backend takes it:\n"
        f'{reasons}\nbackend="reference" asks for it without this warning; backend="fused" refuses instead.',
        FallbackWarning,
        stacklevel=1,
    )


@while_tracing
def _warn_of_torch(reasons: str) -> None:
    warnings.warn(
        f"PyTorch's own kernels compute this attention, since no kernel of this package can run here: {reasons}",
        FallbackWarning,
        stacklevel=1,
    )


@while_tracing
def warn_of_copies(name: str, why: str) -> None:
    """Warns that no backend reads the pages of a call where they lie, and why; the one named computes of copies."""
    warnings.warn(
        f"keys and values in pages are copied for this attention, which the backend {name} computes: {why}",
        FallbackWarning,
        stacklevel=1,
    )


def _listed_objections(
    backends: Iterable[ModuleType],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: Spec,
    function: str,
    named: bool,
    training: bool,
) -> str:
    about = {"function": function, "named": named, "training": training}
    reasons = {b.NAME: objections(b, q, k, v, spec, **about) for b in backends}
    return "\n".join(f"  {name}: {'; '.join(why)}" for name, why in reasons.items())


def missing_kernels(device: torch.device) -> str | None:
    """Why no kernel of this package serves on a device, as far as is known without compiling, or None."""
    x, reasons = torch.empty(1, 1, 1, 64, dtype=torch.float16, device=device), []
    for backend in BACKENDS:
        if backend in (aten, reference) or backend.by_name_only(device) or backend.unsupported(x, x, x, _ANY):
            continue
        module = build.MODULES.get(backend.NAME)
        why = backend.unavailable(device) if module is None else module.missing()
        if why is None:
            return None
        reasons.append(f"{backend.NAME}: {why}")
    return "; ".join(reasons) or f"there are none for {device.type}"


_ANY = Spec(Mask(), scale=1.0)


@while_tracing
def made_by(device: torch.device) -> str:
    """A digest of this code, and of what it chooses by on this device; "" where a program is exported.

    The ops of graphs have it as an argument: PyTorch keeps on disk what it has made of a graph, and knows an op by its
    name and arguments alone. So it would go on with what another release, or another choice, once made of it.
    """
    if torch.compiler.is_exporting():
        return ""
    found: tuple = (_code(),)
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available()):
        known, check = record.of(device), os.environ.get("FASTATTN_SELF_CHECK")
        failed = {name: why for name, why in known.families.items() if why}
        missing = cpu.unavailable(device) if device.type == "cpu" else None  # of others the key tells
        found += record.key(device), failed, known.classes, check, missing
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


@functools.cache
def _code() -> str:
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
