"""torch.nn.functional.scaled_dot_product_attention, computed by fastattn without touching the model that calls it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack, get_overridable_functions, has_torch_function
from torch.utils._device import DeviceContext

from .. import blocks
from ..backends import NoBackendError, while_tracing
from ..sdpa import Call, RefusedError, causal_bias, computed, parsed
from ..spec import is_exporting, is_jagged
from .sdpa_callers import TORCHS_OWN, ToFastattn

_lock = threading.RLock()
_started: list[SDPAPatch] = []
_inner = F.scaled_dot_product_attention  # what `_routed` stands in front of: torch's own, or what somebody put there
_around = None  # what somebody put around `_routed` while it stood there, which goes on calling it
_told: set[type] = set()  # the class that `_tell_causal_bias` has changed, once it has
_away = 0  # in how many calls that are torch's, and look for its function, `_routed` does not stand there


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
            if not _started and F.scaled_dot_product_attention not in (_routed, _around):
                _inner = F.scaled_dot_product_attention
                get_overridable_functions()  # it keeps what it finds in `F` when it is called first
            _started.append(self)
            _tell_causal_bias()
            _put_in_place()
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
            _put_in_place()
            if F.scaled_dot_product_attention is not _inner:  # whoever put that there keeps it, and what is inside it
                _around = F.scaled_dot_product_attention  # only passes calls on from now on

    def remove(self) -> None:
        """`stop`, under the name that torch's registry of flash attention calls it by."""
        self.stop()

    def __enter__(self) -> SDPAPatch:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __str__(self) -> str:
        lines = [f"computed by fastattn: {self.computed} calls of scaled_dot_product_attention"]
        return "\n".join(lines + [f"left to torch: {count} calls: {why}" for why, count in self.left.most_common()])


def patch_sdpa() -> SDPAPatch:
    """A patch of torch.nn.functional.scaled_dot_product_attention: for a `with`, or for `start()` and `stop()`.

    What fastattn refuses, or no fused backend takes, is left to torch as it is, and raises what torch raises. So are
    calls on tensors of a subclass (distributed; a CausalBias and jagged nested tensors are taken), calls that a
    TorchFunctionMode sees, that are traced or exported, or whose kernel `torch.nn.attention.sdpa_kernel` chooses.
    Answers are fastattn's otherwise, with other random numbers under dropout: a backward that computes its forward
    again (torch.utils.checkpoint) belongs in the patch too, and in no TorchFunctionMode, which torch leaves before it.

    A `__torch_function__` that compares its function with `torch.nn.functional.scaled_dot_product_attention` finds them
    the same, but not in a call by a name that was imported before the patch.

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


def _routed(*args: object, **kwargs: object) -> object:
    """torch's function, by fastattn where that takes the call."""
    arguments = (*args, *kwargs.values())
    _tell_causal_bias()
    why = _objection(arguments)
    if why is None:
        try:
            call = parsed(*args, **kwargs)
            why = _objection_to(call)
            if why is None:
                o = computed(call, "fused")
        except (NoBackendError, RefusedError) as refusal:
            why = ""  # of a compiled call, which counts nothing and cannot write every sentence
            if not torch.compiler.is_compiling():
                why = refusal.reasons if isinstance(refusal, NoBackendError) else str(refusal)
    if why is not None:
        blocks.refuse(f"a call of scaled_dot_product_attention that fastattn leaves to torch ({why})")
    _count(why)
    return o if why is None else _by_torch(args, kwargs)


# TorchScript, which compiles no function with **kwargs, writes torch's operator down instead.
torch.jit._builtins._register_builtin(_routed, "aten::scaled_dot_product_attention")


def _put_in_place() -> None:
    """Puts `_routed` where torch's function is or the other way round, as it should be now; leaves others' there."""
    if F.scaled_dot_product_attention in (_routed, _inner):
        F.scaled_dot_product_attention = _routed if _started and not _away else _inner


def _by_torch(args: tuple, kwargs: dict) -> object:
    """A call of torch's own function.

    It stands in its place while a `__torch_function__` runs that may compare what it is given with what stands there.
    Calls of other threads go to torch meanwhile.
    """
    global _away
    if not (has_torch_function((*args, *kwargs.values())) or _get_current_function_mode_stack()):
        return _inner(*args, **kwargs)
    if torch.compiler.is_compiling():  # which traces no lock, and one thread at a time
        standing, F.scaled_dot_product_attention = F.scaled_dot_product_attention, _inner
        try:
            return _inner(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = standing
    with _lock:
        _away += 1
        _put_in_place()
    try:
        return _inner(*args, **kwargs)
    finally:
        with _lock:
            _away -= 1
            _put_in_place()


@while_tracing
def _tell_causal_bias() -> None:
    """Makes torch's CausalBias recognise torch's function while `_routed` stands in its place.

    It compares the two, in calls by a name that was imported before and in compiled ones too, and would else be taken
    for a mask.
    """
    for cls in causal_bias():
        if cls in _told:
            return
        with _lock:
            if cls not in _told:
                cls.__torch_function__ = classmethod(_by_identity(cls.__torch_function__.__func__))
                _told.add(cls)


def _by_identity(torch_function: Callable) -> Callable:
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # noqa: N807
        if func is TORCHS_OWN:
            return cls._dispatch(*args, **(kwargs or {}))
        return torch_function(cls, func, types, args, kwargs)

    return __torch_function__


def _objection(arguments: tuple[object, ...]) -> str | None:
    """Why this call is torch's, whoever could compute it."""
    if not _started:
        return "the patch was stopped"
    plain = (Tensor, torch.nn.Parameter, *causal_bias())
    tensors = [x for x in arguments if isinstance(x, Tensor) and not is_jagged(x)]
    if any(type(x) not in plain or x.is_nested for x in tensors):
        return "the tensors are nested, or of a subclass of torch.Tensor"
    # torch 2.10 traces this, and not the quicker torch._C._is_torch_function_mode_enabled.
    if any(type(mode) not in (DeviceContext, ToFastattn) for mode in _get_current_function_mode_stack()):
        return "a TorchFunctionMode sees the call first"
    if torch.jit.is_tracing() or is_exporting():
        return "the call is traced or exported, to run where fastattn may not be"
    if forward_ad._current_level >= 0 and _transforms().count(_KIND.Jvp) > 1:
        return "its derivative is taken in forward mode inside forward mode"
    kinds = set() if torch.compiler.is_compiling() else set(_transforms())
    if _KIND.Functionalize in kinds and kinds & {_KIND.Grad, _KIND.Jvp}:
        return "its derivative is taken inside or around torch.func.functionalize"
    on_cpu = all(x.is_cpu for x in arguments if isinstance(x, Tensor))
    return "sdpa_kernel() chooses among torch's kernels" if _kernel_is_chosen(on_cpu) else None


def _objection_to(call: Call) -> str | None:
    """Why a call is torch's that fastattn could compute: what torch does with it depends on more than its arguments."""
    if call.mask.causal and (call.bias is not None or call.mask.tensors()):
        return "torch's kernels differ on is_causal=True with an attn_mask"
    if torch.compiler.is_compiling() or blocks.current() is not None:  # where this rank alone may have no tokens
        return None
    if any(x.numel() == 0 for x in (call.q, call.k, call.v)):
        return "a tensor is empty"
    return None


_KIND = torch._C._functorch.TransformType


def _transforms() -> list[torch._C._functorch.TransformType]:
    """The kinds of the transforms of torch.func that the call is in."""
    return [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]


@while_tracing
def _kernel_is_chosen(on_cpu: bool) -> bool:
    """Whether one of the kernels that there are for the device is switched off; on a CPU there are two."""
    kernels = torch.backends.cuda
    if not (kernels.flash_sdp_enabled() and kernels.math_sdp_enabled()):
        return True
    return not (on_cpu or (kernels.mem_efficient_sdp_enabled() and kernels.cudnn_sdp_enabled()))


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
