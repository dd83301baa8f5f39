"""The choice among backends that may compute a call: which are asked first, and why.

Whatever was measured on this machine by `fastattn tune` comes first, then `DEFAULT`, then the order of BACKENDS.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import Spec
from . import record

GAIN = 0.03
"""A backend that was measured takes the place of the default one if it needs less time by at least this part."""


class CallClass(NamedTuple):
    """A class of calls, for all of which one order of backends holds.

    device: type of the device. dtype: as "float32".
    head_dim: the smallest of `HEAD_DIMS` that is not below those of the call, or 0 above all.
    length: 1 for `FEW_QUERIES` at most; else as head_dim, of `LENGTHS` and n_k.
    mask: "none", "causal" (without an offset), "padding" (any mask of padding and documents, causal or not) or "other".
    training: gradients are wanted.
    """

    device: str
    dtype: str
    head_dim: int
    length: int
    mask: str
    training: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, spec: Spec, training: bool) -> CallClass:
        """The class of a call."""
        length = 1 if q.shape[2] <= FEW_QUERIES else _first_above(k.shape[2], LENGTHS)
        head_dim = _first_above(max(q.shape[3], v.shape[3]), HEAD_DIMS)
        return cls(q.device.type, str(q.dtype).removeprefix("torch."), head_dim, length, _mask_of(spec), training)

    def __str__(self) -> str:
        length = "few queries" if self.length == 1 else f"up to {self.length} keys" if self.length else "more keys"
        head_dim = f"head dim up to {self.head_dim}" if self.head_dim else "wider heads"
        mask = {"none": "no mask", "causal": "causal", "padding": "padding", "other": "other masks"}[self.mask]
        return f"{self.dtype}, {head_dim}, {length}, {mask}, {'training' if self.training else 'forward'}"


HEAD_DIMS = (64, 128)
LENGTHS = (128, 1024)
FEW_QUERIES = 4
MASKS = ("none", "causal", "padding", "other")
_OF_PADDING = frozenset({"causal", "q_offset", "real_keys", "real_queries", "segment_ids"})


class Preference(NamedTuple):
    """An entry of the default table: the backends that are asked first for some classes of calls, and why.

    device: type of the device.
    measured: whether the reason is a measurement.
    calls: by fields of `CallClass`, the values that they have in these classes; a field that is left out has any. None
        is for all classes of the device.
    capability: the compute capability of the GPU, or None for every device of the type.
    """

    device: str
    backends: tuple[str, ...]
    why: str
    measured: bool
    calls: dict[str, tuple] | None = None
    capability: tuple[int, int] | None = None

    def holds_for(self, call_class: CallClass, capability: tuple[int, int] | None) -> bool:
        """Whether this is an entry for such calls on such a GPU."""
        return self.capability in (None, capability) and all(
            getattr(call_class, name) in values for name, values in (self.calls or {}).items()
        )


_PLAIN = {"mask": ("none", "causal")}
_16_BITS = {"dtype": ("float16", "bfloat16"), "head_dim": HEAD_DIMS}
_PLAIN_16_BITS = _PLAIN | _16_BITS
_PLAIN_FLOAT32 = _PLAIN | {"dtype": ("float32",)}
_LONG = {"length": (0,)}
_FORWARD, _TRAINING = {"training": (False,)}, {"training": (True,)}
_HOPPER = (9, 0)

DEFAULT = (
    Preference("cpu", ("cpu",), "ahead of PyTorch's kernels in benchmarks/results, on AVX-512 and AMX", measured=True),
    Preference(
        "cuda", ("hopper", "triton", "torch"),
        "ahead of PyTorch's deterministic kernels on an H100, in benchmarks/results", measured=True,
        calls=_PLAIN_16_BITS | _LONG | _TRAINING, capability=_HOPPER,
    ),
    Preference(
        "cuda", ("triton", "torch"), "a short call takes half the time of PyTorch's deterministic kernels on an H100",
        measured=True, calls=_PLAIN_16_BITS | {"length": (1, 128)} | _TRAINING, capability=_HOPPER,
    ),
    Preference(
        "cuda", ("triton", "torch"), "ahead of PyTorch's deterministic kernels in longer calls and in shorter ones",
        measured=False, calls=_PLAIN_16_BITS | {"length": (1024,)} | _TRAINING, capability=_HOPPER,
    ),
    Preference(
        "cuda", ("triton", "torch"), "a short call takes half the time of PyTorch's kernels with an lse on an H100",
        measured=True, calls=_PLAIN_16_BITS | {"length": (1, 128)} | _FORWARD, capability=_HOPPER,
    ),
    Preference(
        "cuda", ("torch",), "PyTorch takes cuDNN's kernel, the fastest on an H100 in benchmarks/results",
        measured=True, calls=_PLAIN_16_BITS | _FORWARD, capability=_HOPPER,
    ),
    Preference(
        "cuda", ("triton", "torch"), "ahead of PyTorch's kernels on an H100, since it multiplies fp32 on tensor cores",
        measured=True, calls=_PLAIN_FLOAT32 | {"head_dim": HEAD_DIMS} | _FORWARD, capability=_HOPPER,
    ),
    Preference(
        "cuda", ("triton", "torch"), "PyTorch multiplies fp32 in three products of TF32 from capability 8.0 on, "
        "whose gradients were 2 to 4 times as far off as they may be on an H100", measured=True,
        calls=_PLAIN_FLOAT32 | _TRAINING,
    ),
    Preference(
        "cuda", ("torch",),
        "PyTorch's kernels are proven, and estimated to be faster where no mask can be profited from", measured=False,
        calls=_PLAIN,
    ),
    Preference(
        "cuda", ("hopper", "triton"), "ahead of all that PyTorch has on an H100, in benchmarks/results: it computes no "
        "hidden tiles", measured=True, calls=_16_BITS | {"mask": ("padding",)} | _LONG, capability=_HOPPER,
    ),
    Preference(
        "cuda", ("triton", "hopper"), "computes no hidden tiles, and builds no table of the mask", measured=False,
    ),
)  # fmt: skip


class Order(NamedTuple):
    """The backends that are asked first, and the reason.

    trusted: whether those among them that serve by name only may serve.
    """

    backends: tuple[str, ...]
    why: str
    trusted: bool = False


def order(q: Tensor, k: Tensor, v: Tensor, spec: Spec, training: bool) -> Order:
    """The order for this call."""
    device, call_class = q.device, None
    if record.is_tuned(device) or any(entry.calls is not None for entry in DEFAULT if entry.device == device.type):
        call_class = CallClass.of(q, k, v, spec, training)  # only here: lengths are guards of torch.compile
    if record.is_tuned(device):
        measured = _measured_order(device, *call_class)
        if measured is not None:
            shown = _shown(device, call_class)
            return Order(measured, f"measured here by `fastattn tune` for {call_class}: {shown}", True)
    return default_order(device.type, call_class, capability_of(device))


def default_order(device: str, call_class: CallClass | None, capability: tuple[int, int] | None) -> Order:
    """The order of the default table for such calls; without a class, of a device where all are treated alike."""
    for entry in DEFAULT:
        if entry.device == device and (call_class is None or entry.holds_for(call_class, capability)):
            return Order(entry.backends, f"{entry.why} ({'measured' if entry.measured else 'not measured'})")
    return Order((), "the first that takes it")


@record.while_tracing
def capability_of(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.cuda.is_available() else None


def default_is_best(device: torch.device) -> bool:
    """Whether no class of calls on this device has another first backend than the default table says."""
    if not record.is_tuned(device):
        return True
    first = {entry.backends[0] for entry in DEFAULT if entry.device == device.type}
    return all(ranked(ms)[0] in first for ms in record.of(device).classes.values())


def _mask_of(spec: Spec) -> str:
    features = spec.features()
    if features <= {"causal"}:
        return "causal" if features else "none"
    return "padding" if features <= _OF_PADDING else "other"


def _first_above(n: int, limits: tuple[int, ...]) -> int:
    return next((limit for limit in limits if n <= limit), 0)


@record.while_tracing
def _measured_order(device: torch.device, *call_class: object) -> tuple[str, ...] | None:
    ms = record.of(device).classes.get(CallClass(*call_class))
    return ranked(ms) if ms else None


def ranked(ms: dict[str, float]) -> tuple[str, ...]:
    """Backends by their time; the first that was measured, which is the default one, unless another gains enough."""
    default = next(iter(ms))
    return tuple(sorted(ms, key=lambda name: ms[name] * (1 - GAIN if name == default else 1)))


def _shown(device: torch.device, call_class: CallClass) -> str:
    ms = record.of(device).classes[call_class]
    return ", ".join(f"{name} {ms[name]:.3g} ms" for name in ranked(ms))
