"""torch.nn.functional.scaled_dot_product_attention, computed by fastattn without touching the model that calls it."""

from __future__ import annotations

import threading
from collections import Counter
from types import TracebackType

import torch
import torch.nn.functional as F
from torch import Tensor

from ..api import scaled_dot_product_attention
from ..backends import NoBackendError, while_tracing

_lock = threading.RLock()
_started: list[SDPAPatch] = []
_inner = F.scaled_dot_product_attention  # what `_routed` stands in front of: torch's own, or what somebody put there
_around = None  # what somebody put around `_routed` while it stood there, which goes on calling it


class SDPAPatch:
    """A patch that routes calls of torch's scaled_dot_product_attention to fastattn, where a fused backend takes them.

    It is in force in the whole process, in every thread. Several may be started at once, and one several times: the
    last `stop` restores torch's function. Code that has imported the function itself, by `from torch.nn.functional
    import scaled_dot_product_attention`, before the patch, keeps torch's; torch.nn's own modules do not.

    Attributes:
        computed: number of calls that fastattn computed since this patch was first started.
        left: number of calls left to torch, by reason. Neither counts calls inside torch.compile.

    Example:
        >>> import torch, fastattn
        >>> q = k = v = torch.ones(1, 1, 2, 4, dtype=torch.float64)
        >>> with fastattn.patch_sdpa() as patch:
        ...     o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> patch.computed, patch.left.total()
        (0, 1)
    """

    def __init__(self) -> None:
        self.computed = 0
        self.left: Counter[str] = Counter()

    def start(self) -> SDPAPatch:
        """Routes calls to fastattn from now on."""
        global _inner
        with _lock:
            _started.append(self)
            if F.scaled_dot_product_attention not in (_routed, _around):
                _inner = F.scaled_dot_product_attention
                F.scaled_dot_product_attention = _routed
        return self

    def stop(self) -> None:
        """Undoes one `start`.

        Raises:
            RuntimeError: it is not started.
        """
        global _around
        with _lock:
            if self not in _started:
                raise RuntimeError("stop() must follow a start(), got one without")
            _started.remove(self)
            if _started:
                return
            if F.scaled_dot_product_attention is _routed:
                F.scaled_dot_product_attention = _inner
            else:  # whoever put that there keeps it: what is inside only passes calls on from now on
                _around = F.scaled_dot_product_attention

    def remove(self) -> None:
        """`stop`, under the name that torch's registry of flash attention calls it by."""
        self.stop()

    def __enter__(self) -> SDPAPatch:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def __str__(self) -> str:
        lines = [f"computed by fastattn: {self.computed} calls of scaled_dot_product_attention"]
        return "\n".join(lines + [f"left to torch: {count} calls: {why}" for why, count in self.left.most_common()])


def patch_sdpa() -> SDPAPatch:
    """A patch of torch.nn.functional.scaled_dot_product_attention: for a `with`, or for `start()` and `stop()`.

    A call that no fused backend takes, one on tensors of a subclass (nested, distributed), and one whose kernel
    `torch.nn.attention.sdpa_kernel` chooses is left to torch as it is. All other results are fastattn's: 0 for queries
    that may see nothing, and other random numbers under dropout.

    Returns:
        The patch, which counts both kinds of calls.

    Example:
        >>> import torch, fastattn
        >>> with fastattn.patch_sdpa():
        ...     output = torch.nn.MultiheadAttention(8, 2)(*3 * [torch.ones(3, 8)])
    """
    return SDPAPatch()


def register_flash_implementation() -> None:
    """Lets torch.nn.attention.activate_flash_attention_impl("fastattn") start a patch, where torch has that."""
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is not None:
        register("fastattn", register_fn=lambda: patch_sdpa().start())


def _routed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function, computed by fastattn where it takes the call."""
    arguments = (query, key, value, attn_mask, dropout_p, is_causal)
    options = {"scale": scale, "enable_gqa": enable_gqa}
    why = _objection(query, key, value, attn_mask)
    if why is None:
        try:
            o = scaled_dot_product_attention(*arguments, **options, backend="fused")
        except NoBackendError as refusal:
            why = refusal.reasons
    _count(why)
    return o if why is None else _inner(*arguments, **options)


def _objection(*tensors: Tensor | None) -> str | None:
    """Why this call is left to torch, whatever backend could compute it."""
    if not _started:
        return "the patch was stopped"
    if any(type(x) not in (Tensor, torch.nn.Parameter) or x.is_nested for x in tensors if x is not None):
        return "the tensors are nested, or of a subclass of torch.Tensor"
    return "sdpa_kernel() chooses among torch's kernels" if _kernel_is_chosen() else None


@while_tracing
def _kernel_is_chosen() -> bool:
    kernels = torch.backends.cuda
    enabled = (kernels.flash_sdp_enabled, kernels.math_sdp_enabled, kernels.mem_efficient_sdp_enabled)
    return not all(of_kernel() for of_kernel in (*enabled, kernels.cudnn_sdp_enabled))


def _count(why: str | None) -> None:
    """Notes one call: computed, or left for that reason."""
    if torch.compiler.is_compiling():
        return
    with _lock:
        for patch in set(_started):
            if why is None:
                patch.computed += 1
            else:
                patch.left[why] += 1
