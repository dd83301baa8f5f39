"""The only place PyTorch is told about attention and its weights: op pairs, their fakes and vmap rule, the Functions.

Eager calls go through `_Attention`, whose backward applies `_AttentionBackward` where it is to be differentiated, so
that every derivative of every order exists (the second from `derivatives.py`). Graphs of Dynamo and of torch.export,
which cannot hold such a pair, hold `fastattn::attention` and `fastattn::attention_weights`: ops that later stages, and
transforms, take apart as they do eager calls. In what they make of it the name of the backend is a constant string.
Attention to pages, which has no gradients, is an op of `paged.py`.

The dispatcher, which takes as long as a short call itself, is left out of eager calls that nobody watches: where no
mode, transform, trace or profiler looks on, it would do nothing but call the backend.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable
from types import ModuleType, NoneType

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad, profiler
from torch.compiler import is_compiling

from . import backends, derivatives
from .backends import backend_by_name
from .backends.record import are_fake
from .plan import Plan, drawn, is_plain, nothing_to_see, places_from, prepare, short_ways
from .spec import NO_WINDOW, DropoutSeed, Mask, RelativeBias, Spec, accumulation_dtype, empty_output
from .validation import EVERYTHING, check_fit, check_numbers, check_tensors, in_spec

_MASK = (
    "Tensor? q_offsets, Tensor? real_keys, Tensor? real_queries, Tensor? segment_ids_q, Tensor? segment_ids_k, "
    "Tensor? dense, Tensor? seed, Tensor? places, bool causal, SymInt q_offset, SymInt? window_left, "
    "SymInt? window_right"
)
_NUMBERS = "float? softcap, float dropout_p, bool deterministic, bool bias_by_distance"
_SPEC = f"{_MASK}, float scale, {_NUMBERS}, str backend"
_LEARNED = "Tensor? bias, Tensor? alibi_slopes, Tensor? sinks"
_WANTED = ", ".join(f"bool {name}_wanted" for name in ("dq", "dk", "dv", "dbias", "dalibi", "dsinks"))

torch.library.define(
    "fastattn::attention",
    f"(Tensor q, Tensor k, Tensor v, {_LEARNED}, {_MASK}, float? scale, {_NUMBERS}, str? backend, bool lse_wanted, "
    "bool? average_heads, str made_by) -> (Tensor o, Tensor lse, Tensor weights)",
)
torch.library.define(
    "fastattn::forward", f"(Tensor q, Tensor k, Tensor v, {_LEARNED}, {_SPEC}) -> (Tensor o, Tensor lse)"
)
torch.library.define(
    "fastattn::backward",
    "(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_LEARNED}, {_WANTED}, {_SPEC}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dalibi, Tensor dsinks)",
)

for _name, _more in (("attention_weights", ", str made_by"), ("weights", "")):
    torch.library.define(
        f"fastattn::{_name}",
        f"(Tensor q, Tensor k, Tensor? lse, {_LEARNED}, str form, SymInt top_k, {_SPEC}{_more}) "
        "-> (Tensor weights, Tensor keys)",
    )
torch.library.define(
    "fastattn::weights_backward",
    f"(Tensor d_weights, Tensor keys, Tensor q, Tensor k, Tensor? lse, {_LEARNED}, str form, {_SPEC}) "
    "-> (Tensor dq, Tensor dk, Tensor dbias, Tensor dalibi, Tensor dsinks)",
)

_TENSOR = "a tensor stood here"


def attention(q: Tensor, k: Tensor, v: Tensor, spec: Spec, plan: Plan) -> tuple[Tensor, Tensor | None]:
    """o [B, H, n_q, d_v] and lse [B, H, n_q] of a prepared call; None where that was prepared for its "output"."""
    if is_compiling():
        arguments = (spec.bias, spec.alibi_slopes, spec.sinks, *_flatten(spec, plan.backend), plan.lse_wanted)
        return torch.ops.fastattn.attention(q, k, v, *arguments, None, backends.made_by(q.device))[:2]
    return _of_plan(q, k, v, spec, plan)


def _of_plan(q: Tensor, k: Tensor, v: Tensor, spec: Spec, plan: Plan) -> tuple[Tensor, Tensor | None]:
    if plan.output_only:
        return plan.backend.output(q, k, v, spec), None
    learned = (spec.bias, spec.alibi_slopes, spec.sinks)
    if plan.plain and plan.pairs and not is_watched():
        if plan.training:
            return _apply_directly(q, k, v, *learned, spec, plan.backend)
        return plan.backend.forward(q, k, v, spec)
    arguments = (q, k, v, *learned, *_flatten(spec, plan.backend))
    if not torch.jit.is_tracing() and _derivative_wanted(arguments[:6]):  # no file keeps a Function of Python
        return _Attention.apply(*arguments)
    return _forward(*arguments) if _onnx_exports() else torch.ops.fastattn.forward(*arguments)


def attention_in_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    scale: float | None,
    bias: Tensor | RelativeBias | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    dropout_p: float,
    generator: torch.Generator | DropoutSeed | None,
    deterministic: bool,
    backend: str | None,
    lse_wanted: bool,
    average_heads: bool | None = None,
) -> tuple[Tensor, Tensor] | None:
    """(o, lse) of a call that Dynamo traces, as one op: to trace what Python does in it takes far longer.

    Or (o, weights), where `average_heads` is not None.

    It stands for Python's checks and its choice too, which are made where the op is taken apart. None for a call whose
    checks are to be traced: a malformed one, and one of "fused", whose caller computes what is refused.
    """
    well_formed = (  # in a form that is traced quickly
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and isinstance(mask, (Mask, NoneType))
        and isinstance(bias, (Tensor, RelativeBias, NoneType))
        and isinstance(alibi_slopes, (Tensor, NoneType))
        and isinstance(sinks, (Tensor, NoneType))
        and isinstance(generator, (DropoutSeed, NoneType))
        and isinstance(deterministic, bool)
        and isinstance(backend, (str, NoneType))
    )
    if not well_formed or backend == "fused":
        return None
    check_numbers(scale, softcap, dropout_p)  # here, where Dynamo ends its graph before numbers that it does not know
    bias, by_distance = in_spec(bias, q, k, mask)
    seed = places = None
    if dropout_p > 0:
        seed, places, first = drawn(q.device, generator)
        if places is None and first != (0, 0):
            places = places_from(first, q.shape[2], k.shape[2], q.device)
    of_mask = _flat_mask(EVERYTHING if mask is None else mask, seed, places)
    numbers = (scale, softcap, dropout_p, deterministic, by_distance)
    wanted = lse_wanted, average_heads, backends.made_by(q.device)
    arguments = (bias, alibi_slopes, sinks, *of_mask, *numbers, backend, *wanted)
    o, lse, of_weights = torch.ops.fastattn.attention(q, k, v, *arguments)
    return o, lse if average_heads is None else of_weights


def _attention(q, k, v, bias, alibi_slopes, sinks, *rest):
    of_mask, (scale, softcap, dropout_p, deterministic, by_distance, backend, *wanted) = rest[:12], rest[12:]
    lse_wanted, average_heads, _ = wanted
    mask, seed, places = _mask_of(of_mask)
    if by_distance:
        bias = RelativeBias(bias[:, 0] if bias.dim() == 3 else bias)  # as it was given, in a malformed call
    drawn_by = None if seed is None else DropoutSeed(seed, places)
    terms = (scale, bias, softcap, alibi_slopes, sinks, dropout_p, drawn_by, deterministic, backend)
    function = "with weights" if average_heads is not None else "forward" if lse_wanted else "output"
    try:
        prepared = prepare(q, k, v, mask, *terms, function)
    except ValueError as error:
        if are_fake():  # Dynamo then ends its graph before the call, which is refused where it runs
            raise NotImplementedError(*error.args) from error
        raise
    o, lse = _of_plan(*prepared)
    if average_heads is None:
        return o, q.new_empty(0) if lse is None else lse, q.new_empty(0)
    q, k, _, spec, plan = prepared
    return o, lse, _weights_of_plan(_form(average_heads), 0, q, k, lse.detach(), spec, plan)[0]


def short_way(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    scale: float | None,
    bias: Tensor | RelativeBias | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    with_lse: bool,
    average_heads: bool | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """(o, lse) of a call on the CPU that concerns nothing of PyTorch but autograd; None for any other.

    For a query against 16 keys, what Python does on the general road takes longer than PyTorch's own function from
    beginning to end (`benchmarks/short_calls.py`). So one function in C++ judges and computes such a call, once the
    general road has chosen the CPU backend for another one; what it refuses goes the general road.

    Args:
        with_lse: lse is not None.
        average_heads: the second is the weights instead, as `attention_with_weights` has them.
    """
    known = short_functions()
    if known is None or not (mask is None or isinstance(mask, Mask)):
        return None
    attend, backward, _, backend = known
    outputs = attend(q, k, v, mask, scale, bias, softcap, alibi_slopes, sinks, with_lse, average_heads)
    if outputs is None:
        return None
    o, lse, weights, gradients_wanted = outputs
    other = lse if with_lse else weights
    if gradients_wanted:
        terms = (mask, scale, bias, softcap, alibi_slopes, sinks)
        result = _apply_short(q, k, v, (o, lse, other, average_heads, terms, backward, backend))
        return (result, None) if other is None else result
    return o, other


def short_functions() -> tuple | None:
    """An entry of `plan.short_ways`; None where there is none yet, or where PyTorch has to do with every call."""
    return None if is_compiling() or _any_autocast() or is_watched() else short_ways.get(backends.BACKENDS)


def _spec(q: Tensor, mask: Mask | None, scale: float | None, *terms) -> Spec:
    return Spec(EVERYTHING if mask is None else mask, q.shape[-1] ** -0.5 if scale is None else scale, *terms)


class _DirectAttention(Function):
    """Attention in a call that nobody watches: the backend is called without the dispatcher."""

    boxed_grads_call = False  # PyTorch asks for it in each call, and takes longer where a class does not have it

    @staticmethod
    def forward(ctx, q, k, v, bias, alibi_slopes, sinks, spec, backend):
        o, lse = backend.forward(q, k, v, spec)
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.backend, ctx.constants, of_spec = spec, backend, None, () if spec.kind is spec else spec.tensors()
        large = not (spec.bias is spec.mask.dense is None)
        if large or (of_spec and _hooks_of_saving(False) is not None):  # autograd may give away what it is given
            flat = _flatten(spec, backend)
            of_spec, ctx.constants = (bias, alibi_slopes, sinks, *flat[: _TENSORS - 6]), flat[_TENSORS - 6 :]
            ctx.spec = spec.kind
        ctx.save_for_backward(q, k, v, o, lse, *_to_save(of_spec))
        ctx.forms = _forms(q, k, v, o, lse, *of_spec)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, o, lse, *of_spec = ctx.saved_tensors  # which refuses those that were changed since
        spec, backend, wanted = ctx.spec, ctx.backend, ctx.needs_input_grad[:6]
        if ctx.constants is not None:
            spec, _ = _unflatten(of_spec[:3], (*of_spec[3:], *ctx.constants))
            spec.kind = ctx.spec
        # An assignment to q.data, a hook, or a call of this very function may give a tensor another form.
        as_known = _forms(q, k, v, o if do is None else do, lse if dlse is None else dlse, *of_spec) == ctx.forms
        plain = as_known and (do is None or is_plain(do)) and (dlse is None or is_plain(dlse))
        if not plain or _grad_enabled() or is_compiling() or is_watched():
            result = _gradients_of_call(do, dlse, q, k, v, o, lse, spec, backend, wanted)
        else:
            result = backend.backward(do, dlse, q, k, v, o, lse, spec, wanted)
        return *result, None, None


def _to_save(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """These tensors, of which PyTorch saves none that was made in inference mode, such as a mask that a model keeps."""
    return [x.clone() if x is not None and x.is_inference() else x for x in tensors]


def _forms(*tensors: Tensor | None) -> list[tuple | None]:
    return [None if x is None else (x.shape, x.dtype, x.get_device()) for x in tensors]


def _gradients_of_call(do, dlse, q, k, v, o, lse, spec, backend, wanted) -> list[Tensor | None]:
    """The gradients that are wanted, as functions of all these where derivatives of them are."""
    of_call = (spec.bias, spec.alibi_slopes, spec.sinks, *wanted, *_flatten(spec, backend))
    result = gradients((do, dlse, q, k, v, o, lse, *of_call))
    return [g if w else None for g, w in zip(result, wanted, strict=True)]


class _ShortAttention(Function):
    """Attention whose gradients are wanted, of q, k and v and of nothing else, in a call that nobody watches.

    Its forward is given what is computed already: o, lse, and which of lse and the weights is the second output, or
    None.
    """

    boxed_grads_call = False

    @staticmethod
    def forward(ctx, q, k, v, call):
        o, lse, other, average_heads, (mask, scale, bias, softcap, alibi_slopes, sinks), *of_backend = call
        of_terms, numbers = (), ()
        if not (mask is bias is alibi_slopes is sinks is None):
            of_mask = () if mask is None else mask.tensors().values()
            if mask is not None and mask.dense is not None:  # large, as a bias is: autograd may give it away
                flat = _flat_mask(mask, None, None)
                mask, of_mask, numbers = None, flat[:8], flat[8:]
            of_terms = (bias, alibi_slopes, sinks, *of_mask)
        ctx.constants = average_heads, mask, numbers, scale, softcap, *of_backend
        ctx.save_for_backward(q, k, v, o, lse, *_to_save(of_terms))
        if other is None:
            return o
        ctx.set_materialize_grads(False)
        return o, other

    @staticmethod
    def backward(ctx, do, d_other=None):
        q, k, v, o, lse, *of_terms = ctx.saved_tensors  # which refuses those that were changed since
        average_heads, mask, numbers, scale, softcap, backward, backend = ctx.constants
        bias, alibi_slopes, sinks, *of_mask = of_terms or (None, None, None)
        if numbers:
            mask, *_ = _mask_of((*of_mask, *numbers))
        terms, wanted = (mask, scale, bias, softcap, alibi_slopes, sinks), ctx.needs_input_grad[:3]
        dlse, d_weights = (d_other, None) if average_heads is None else (None, d_other)
        result, of_weights = None, (None, None, None)
        unwatched = not (_grad_enabled() or is_watched())
        if do is dlse is None:
            result = of_weights
        elif unwatched:
            result = backward(do, dlse, q, k, v, o, lse, *terms, wanted)
        if result is None:
            of_six = *wanted, False, False, False
            result = _gradients_of_call(do, dlse, q, k, v, o, lse, _spec(q, *terms), backend, of_six)[:3]
        if d_weights is not None:
            spec = _spec(q, *terms)
            if unwatched and is_plain(d_weights):
                of_pairs = derivatives.of_pairs(d_weights, _form(average_heads), q.shape[1])
                of_weights = backend.weights_backward(of_pairs, q, k, lse, spec)[:3]
            else:
                primals = (q, k, None, spec.bias, spec.alibi_slopes, spec.sinks)
                of_weights = derivatives.weights_gradients(d_weights, None, primals, spec, _form(average_heads))[:3]
        return *map(_sum, result, of_weights), None


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x + y


def weights(q: Tensor, k: Tensor, lse: Tensor | None, spec: Spec, plan: Plan, *, average_heads: bool) -> Tensor:
    """The weights after dropout, [B, n_q, n_k] or [B, H, n_q, n_k]; `lse` is that of the same call, or None."""
    return _in_form(_form(average_heads), 0, q, k, lse, spec, plan)[0]


def _form(average_heads: bool) -> str:
    return "averaged" if average_heads else "each head"


def received(q: Tensor, k: Tensor, spec: Spec, plan: Plan) -> Tensor:
    """The sum of the weights over the queries, [B, H, n_k]."""
    return _in_form("received", 0, q, k, None, spec, plan)[0]


def top_keys(q: Tensor, k: Tensor, spec: Spec, top_k: int, plan: Plan) -> tuple[Tensor, Tensor]:
    """The largest weights of each query and their keys, both [B, H, n_q, top_k]."""
    return _in_form("top_keys", top_k, q, k, None, spec, plan)


def _in_form(
    form: str, top_k: int, q: Tensor, k: Tensor, lse: Tensor | None, spec: Spec, plan: Plan
) -> tuple[Tensor, Tensor]:
    if is_compiling():
        learned = (spec.bias, spec.alibi_slopes, spec.sinks)
        flat = *_flatten(spec, plan.by_weights), backends.made_by(q.device)
        return torch.ops.fastattn.attention_weights(q, k, lse, *learned, form, top_k, *flat)
    return _weights_of_plan(form, top_k, q, k, lse, spec, plan)


def _weights_of_plan(
    form: str, top_k: int, q: Tensor, k: Tensor, lse: Tensor | None, spec: Spec, plan: Plan
) -> tuple[Tensor, Tensor]:
    learned = (spec.bias, spec.alibi_slopes, spec.sinks)
    if plan.plain and not (_derivative_wanted((q, k, *learned)) or is_watched()):
        return _weights_in_form(q, k, lse, spec, plan.by_weights, form, top_k)
    return _attention_weights(q, k, lse, *learned, form, top_k, *_flatten(spec, plan.by_weights))


def _attention_weights(*arguments):
    if not torch.jit.is_tracing() and _derivative_wanted((*arguments[:2], *arguments[3:6])):
        return _Weights.apply(*arguments)
    return _weights(*arguments) if _onnx_exports() else torch.ops.fastattn.weights(*arguments)


def _in_forward_mode() -> bool:
    return forward_ad._current_level >= 0  # PyTorch has no public way to ask


def _derivative_wanted(tensors: tuple[Tensor | None, ...]) -> bool:
    forward_mode, transforms = _in_forward_mode(), _transforms()
    if _KIND.Functionalize in transforms and not {_KIND.Grad, _KIND.Jvp}.isdisjoint(transforms):
        raise NotImplementedError(
            "torch.func.functionalize is not available around or inside of torch.func.grad, vjp and jvp: PyTorch has "
            "no rule for an autograd.Function there"
        )
    if transforms.count(_KIND.Jvp) > 1:
        raise NotImplementedError(
            "forward mode inside forward mode is not available: PyTorch's autograd.Function would give zeros. Nest "
            "torch.func.grad or torch.func.vjp inside one torch.func.jvp instead (torch.func.hessian does)."
        )
    if forward_mode or not torch.is_grad_enabled():
        return forward_mode
    if transforms and _KIND.Functionalize not in transforms:
        return True  # a tensor of torch.vmap does not say whether what it wraps requires grad
    return any([x is not None and x.requires_grad for x in tensors])  # noqa: C419  a generator takes longer


def is_watched() -> bool | int:
    """Whether forward mode, another mode, a transform, a trace or the profiler has to see each op in the dispatcher."""
    modes = _bits_of(_keys_of_modes()) & _MODES
    return modes or _any_function_mode() or profiler._is_profiler_enabled or forward_ad._current_level >= 0


# By names of their own, since torch's are in large dictionaries, which a short call would look up in no cache.
_keys_of_modes, _bits_of = torch._C._dispatch_tls_local_include_set, torch._C.DispatchKeySet.raw_repr
_any_function_mode, _any_autocast = torch._C._is_torch_function_mode_enabled, torch._C._is_any_autocast_enabled
_hooks_of_saving = torch._C._autograd._top_saved_tensors_default_hooks
_grad_enabled, _innermost_transform = torch.is_grad_enabled, torch._C._functorch.peek_interpreter_stack
_MODES = ~_bits_of(_keys_of_modes())
_KIND = torch._C._functorch.TransformType


def _transforms() -> list[torch._C._functorch.TransformType]:
    """The kinds of the transforms of torch.func that the call is in."""
    return [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]


def _onnx_exports() -> bool:
    """Whether the call is being written down as ONNX, which has no ops of ours: only the formula in torch's will do."""
    if torch.jit.is_tracing() and torch.onnx.is_in_onnx_export():
        raise NotImplementedError(
            "torch.onnx.export(dynamo=False) cannot write attention of fastattn down: leave dynamo=True, its default, "
            "or call fastattn.unswap(model) first"
        )
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


def _flatten(spec: Spec, backend: ModuleType) -> tuple:
    """The arguments that `_SPEC` declares."""
    return (
        *_flat_mask(spec.mask, spec.seed, spec.places),
        spec.scale,
        spec.softcap,
        spec.dropout_p,
        spec.deterministic,
        spec.bias_by_distance,
        "reference" if _onnx_exports() else backend.NAME,
    )


def _flat_mask(mask: Mask, seed: Tensor | None, places: Tensor | None) -> tuple:
    """The arguments that `_MASK` declares."""
    several = isinstance(mask.q_offset, Tensor)
    return (
        mask.q_offset if several else None,
        mask.real_keys,
        mask.real_queries,
        *(mask.segment_ids or (None, None)),
        mask.dense,
        seed,
        places,
        mask.causal,
        0 if several else mask.q_offset,
        *mask.window,
    )


def _mask_of(flat: tuple) -> tuple[Mask, Tensor | None, Tensor | None]:
    """What `_flat_mask` was given."""
    q_offsets, real_keys, real_queries, segment_ids_q, segment_ids_k, dense, seed, places = flat[:8]
    causal, q_offset, left, right = flat[8:]
    mask = Mask(
        causal=causal,
        q_offset=q_offset if q_offsets is None else q_offsets,
        window=NO_WINDOW if left is right is None else (left, right),
        real_keys=real_keys,
        real_queries=real_queries,
        segment_ids=None if segment_ids_q is None else (segment_ids_q, segment_ids_k),
        dense=dense,
    )
    return mask, seed, places


def _unflatten(learned: tuple[Tensor | None, ...], flat: tuple) -> tuple[Spec, ModuleType]:
    """The spec and the backend that `_flatten` was given."""
    of_numbers = type(flat[9]) is int and all([x is None for x in (*learned, *flat[:8], *flat[10:12])])  # noqa: C419
    return (_made_once if of_numbers and not is_compiling() else _made)(learned, flat)


def _made(learned: tuple[Tensor | None, ...], flat: tuple) -> tuple[Spec, ModuleType]:
    mask, seed, places = _mask_of(flat[:12])
    scale, softcap, dropout_p, deterministic, by_distance, backend = flat[12:]
    bias, alibi_slopes, sinks = learned
    spec = Spec(mask, scale, bias, softcap, alibi_slopes, sinks, dropout_p, seed, deterministic, places, by_distance)
    return spec, backend_by_name(backend)


_made_once = functools.lru_cache(1024)(_made)
"""For calls of graphs that have numbers alone, for which to make a spec takes as long as a short call's kernel."""


class _Attention(Function):
    """Attention with derivatives of every order; its backward is itself a Function."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return torch.ops.fastattn.forward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        tensors, ctx.constants = inputs[:_TENSORS], inputs[_TENSORS:]
        q, k, v, *others = _to_save(tensors)
        tensors = q, k, v, *output, *others  # in the order of the others, by which a checkpoint may compute it again
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)  # the same: vmap remembers what was saved last

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, o, lse, *others = ctx.saved_tensors  # which refuses those that were changed since
        wanted = ctx.needs_input_grad[:6]
        result = gradients((do, dlse, q, k, v, o, lse, *others[:3], *wanted, *others[3:], *ctx.constants))
        return *(g if w else None for g, w in zip(result, wanted, strict=True)), *_NO_GRADIENTS

    @staticmethod
    def jvp(ctx, *tangents):
        q, k, v, _, _, *others = ctx.saved_tensors
        primals, spec = _primals((q, k, v, *others, *ctx.constants))
        return derivatives.forward_tangents(primals, tangents[:6], spec)


_TENSORS = 14  # so many of the arguments of `fastattn::forward` are tensors or None, and come first
_NO_GRADIENTS = (None,) * 18  # of its other arguments than the six that are differentiated
_apply_directly, _apply_short = (super(Function, function).apply for function in (_DirectAttention, _ShortAttention))
"""Their `apply` for calls that nobody watches. Function.apply binds the arguments to the signature of `forward` in
each call, which takes longer than all the rest of it."""


def gradients(arguments: tuple) -> tuple[Tensor | None, ...]:
    """The outputs of `fastattn::backward`, as functions of its arguments where derivatives of them are wanted."""
    if _derivative_wanted((*arguments[:5], *arguments[7:10])):
        return _AttentionBackward.apply(*arguments)
    return torch.ops.fastattn.backward(*arguments)


class _AttentionBackward(Function):
    """The gradients of attention; o and lse are functions of the other inputs, so no gradient is due to them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return torch.ops.fastattn.backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        tensors, ctx.constants = _split(inputs)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, *cotangents):
        do, dlse, q, k, v, _, _, *others = _join(ctx.saved_tensors, ctx.constants)
        primals, spec = _primals((q, k, v, *others[:3], *others[9:]))
        ddo, ddlse, gradients = derivatives.second_order(do, dlse, primals, cotangents, spec)
        return ddo, ddlse, *gradients[:3], None, None, *gradients[3:], *(None for _ in others[3:])

    @staticmethod
    def jvp(ctx, do_t, dlse_t, q_t, k_t, v_t, _o_t, _lse_t, bias_t, alibi_t, sinks_t, *_):
        do, dlse, q, k, v, o, lse, *others = _join(ctx.saved_tensors, ctx.constants)
        learned, wanted, flat = others[:3], others[3:9], others[9:]
        primals, spec = _primals((q, k, v, *learned, *flat))
        tangents = (q_t, k_t, v_t, bias_t, alibi_t, sinks_t)
        _, _, along_inputs = derivatives.second_order(do, dlse, primals, tangents, spec)
        along_do = gradients((do_t, dlse_t, q, k, v, o, lse, *learned, *wanted, *flat))
        return tuple(
            a + b if w else torch.zeros_like(b) for a, b, w in zip(along_inputs, along_do, wanted, strict=True)
        )


class _Weights(Function):
    """The weights in any form, with derivatives of every order: those of plain torch, for every backend."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return torch.ops.fastattn.weights(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        tensors, ctx.constants = _split(inputs)
        ctx.save_for_backward(*tensors, output[1])
        ctx.save_for_forward(*tensors, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, d_weights, _):
        *tensors, keys = ctx.saved_tensors
        q, k, lse, bias, alibi_slopes, sinks, form, _, *flat = _join(tensors, ctx.constants)
        inputs = (q, k, bias, alibi_slopes, sinks)
        if _derivative_wanted((d_weights, *inputs)):
            primals, spec = _primals((q, k, None, bias, alibi_slopes, sinks, *flat))
            dq, dk, _, *learned = derivatives.weights_gradients(d_weights, keys, primals, spec, form)
        else:
            gradients = torch.ops.fastattn.weights_backward(d_weights, keys, q, k, lse, *inputs[2:], form, *flat)
            dq, dk, *learned = (None if x is None else g for x, g in zip(inputs, gradients, strict=True))
        return dq, dk, None, *learned, None, None, *(None for _ in flat)

    @staticmethod
    def jvp(ctx, q_t, k_t, _lse_t, bias_t, alibi_t, sinks_t, *_):
        *tensors, keys = ctx.saved_tensors
        q, k, _, bias, alibi_slopes, sinks, form, _, *flat = _join(tensors, ctx.constants)
        primals, spec = _primals((q, k, None, bias, alibi_slopes, sinks, *flat))
        tangents = (q_t, k_t, None, bias_t, alibi_t, sinks_t)
        weights_t = derivatives.weights_tangents(keys, primals, tangents, spec, form)
        return weights_t.to(_weights_dtype(q, form)), None


for _function in (_Attention, _AttentionBackward, _Weights):  # in every call apply() works it out where it is missing
    _function.forward.__signature__ = inspect.signature(_function.forward)


def _split(arguments: tuple) -> tuple[list[Tensor], list]:
    """The tensors among the arguments, for save_for_backward, and the arguments with `_TENSOR` where they stood."""
    tensors = _to_save(a for a in arguments if isinstance(a, Tensor))
    return tensors, [_TENSOR if isinstance(a, Tensor) else a for a in arguments]


def _join(tensors, constants: list) -> list:
    """What `_split` took apart."""
    tensors = iter(tensors)
    return [next(tensors) if c is _TENSOR else c for c in constants]


def _primals(arguments: list) -> tuple[tuple[Tensor | None, ...], Spec]:
    """(q, k, v, bias, alibi_slopes, sinks) and the spec of the arguments of `fastattn::forward`."""
    primals = tuple(arguments[:6])
    return primals, _unflatten(primals[3:], tuple(arguments[6:]))[0]


def _forward(q, k, v, bias, alibi_slopes, sinks, *flat):
    spec, backend = _unflatten((bias, alibi_slopes, sinks), flat)
    if hasattr(backend, "short_way") and spec.dropout_p == 0 and not spec.bias_by_distance:
        attend, *_ = backend.short_way()
        terms = (spec.mask, spec.scale, bias, spec.softcap, alibi_slopes, sinks)
        if (outputs := attend(q, k, v, *terms, True, None)) is not None:  # after checks that take Python far longer
            return outputs[:2]
    check_fit(q, k, v)
    return _computed(q, k, v, spec, backend)


def _computed(q: Tensor, k: Tensor, v: Tensor, spec: Spec, backend: ModuleType) -> tuple[Tensor, Tensor]:
    if nothing_to_see(q, k):
        return empty_output(q, v.shape[3]).zero_(), _empty_lse(q).fill_(-math.inf)
    _check_spec(q, k, spec)
    return backend.forward(q, k, v, spec)


def _check_spec(q: Tensor, k: Tensor, spec: Spec) -> None:
    """Raises ValueError where a tensor of it has no number for a token or a head: kernels would read beyond it."""
    if spec.tensors():
        check_tensors(q, k, spec.mask, spec.bias, spec.alibi_slopes, spec.sinks, spec.bias_by_distance)


def _backward(do, dlse, q, k, v, o, lse, bias, alibi_slopes, sinks, *rest):
    inputs, learned = (q, k, v, bias, alibi_slopes, sinks), (bias, alibi_slopes, sinks)
    gradients = _computed_gradients(do, dlse, q, k, v, o, lse, *_unflatten(learned, rest[6:]), rest[:6])
    return tuple(q.new_empty(0) if g is None else _as_promised(g, x) for g, x in zip(gradients, inputs, strict=True))


def _as_promised(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of `x` in the memory order that the fake promises."""
    promised = torch.empty_like(x)
    return gradient if gradient.stride() == promised.stride() else promised.copy_(gradient)


def _computed_gradients(do, dlse, q, k, v, o, lse, spec, backend, wanted) -> list[Tensor | None]:
    check_fit(q, k, v, o=o, lse=lse, do=do, dlse=dlse)  # also because v.data may be another one since forward
    if nothing_to_see(q, k):
        inputs = (q, k, v, spec.bias, spec.alibi_slopes, spec.sinks)
        return [torch.zeros_like(x) if w else None for x, w in zip(inputs, wanted, strict=True)]
    _check_spec(q, k, spec)
    gradients = backend.backward(do, dlse, q, k, v, o, lse, spec, wanted)
    return [g if w else None for g, w in zip(gradients, wanted, strict=True)]


def _weights(q, k, lse, bias, alibi_slopes, sinks, form, top_k, *flat):
    check_fit(q, k, k, lse=lse)
    spec, backend = _unflatten((bias, alibi_slopes, sinks), flat)
    _check_spec(q, k, spec)
    return _weights_in_form(q, k, lse, spec, backend, form, top_k)


def _weights_in_form(
    q: Tensor, k: Tensor, lse: Tensor | None, spec: Spec, backend: ModuleType, form: str, top_k: int
) -> tuple[Tensor, Tensor]:
    if nothing_to_see(q, k):
        weights, keys = _fake_weights(q, k, lse, None, None, None, form, top_k)
        return weights.zero_(), keys.fill_(-1)
    if form == "top_keys":
        return backend.top_keys(q, k, spec, top_k)
    no_keys = q.new_empty(0, dtype=torch.int64)
    if form == "received":
        return backend.received(q, k, spec), no_keys
    return backend.weights(q, k, lse, spec, form == "averaged"), no_keys


def _weights_backward(d_weights, keys, q, k, lse, bias, alibi_slopes, sinks, form, *flat):
    check_fit(q, k, k, lse=lse)
    spec, backend = _unflatten((bias, alibi_slopes, sinks), flat)
    _check_spec(q, k, spec)
    if form == "top_keys" or not hasattr(backend, "weights_backward") or nothing_to_see(q, k):
        primals = (q, k, None, bias, alibi_slopes, sinks)
        dq, dk, _, *learned = derivatives.weights_gradients(d_weights, keys, primals, spec, form)
    elif d_weights.any():
        of_pairs = derivatives.of_pairs(d_weights, form, q.shape[1])
        dq, dk, _, *learned = backend.weights_backward(of_pairs, q, k, lse, spec)
    else:  # as where a graph gives back the weights, and nobody uses them
        return tuple(q.new_empty(0) if x is None else torch.zeros_like(x) for x in (q, k, bias, alibi_slopes, sinks))
    inputs = (q, k, bias, alibi_slopes, sinks)
    gradients = zip((dq, dk, *learned), inputs, strict=True)
    return tuple(q.new_empty(0) if g is None else _as_promised(g, x) for g, x in gradients)


def _weights_dtype(q: Tensor, form: str) -> torch.dtype:
    """That of q where a weight stands for each pair; sums, and weights in an order, are not rounded to it."""
    return q.dtype if form in ("averaged", "each head") else accumulation_dtype(q.dtype)


def _empty_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


def _fake_forward(q, k, v, *_):
    return empty_output(q, v.shape[3]), _empty_lse(q)


def _fake_backward(do, dlse, q, k, v, o, lse, bias, alibi_slopes, sinks, *rest):
    inputs = (q, k, v, bias, alibi_slopes, sinks)
    return tuple(torch.empty_like(x) if w else q.new_empty(0) for x, w in zip(inputs, rest[:6], strict=True))


def _fake_weights(q, k, _lse, _bias, _alibi_slopes, _sinks, form, top_k, *_):
    (B, H, n_q, _), n_k = q.shape, k.shape[2]
    of_queries = (B, H, n_q, top_k)
    shape = {"averaged": (B, n_q, n_k), "received": (B, H, n_k), "top_keys": of_queries}.get(form, (B, H, n_q, n_k))
    keys = of_queries if form == "top_keys" else (0,)
    return q.new_empty(shape, dtype=_weights_dtype(q, form)), q.new_empty(keys, dtype=torch.int64)


def _fake_weights_backward(d_weights, keys, q, k, lse, bias, alibi_slopes, sinks, *_):
    return tuple(q.new_empty(0) if x is None else torch.empty_like(x) for x in (q, k, bias, alibi_slopes, sinks))


def _have_tangents(arguments: tuple) -> bool:
    """Whether one of them has a tangent in forward mode, which is off inside of a Function."""
    if not _in_forward_mode() or not torch._C._is_fwd_grad_enabled():
        return False
    return any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments)


def _with_derivative(op, kernel, function, keys, *arguments):
    """An op outside of its Function, as graphs and exported programs call it: with derivatives too."""
    if _have_tangents(arguments) or (_grad_enabled() and torch._C._any_requires_grad(*arguments)):
        if function is None:
            raise NotImplementedError(
                "the second derivative of attention weights is not available in graphs: compute it without "
                "torch.compile"
            )
        if _innermost_transform() is not None:  # which would not see the Function
            raise NotImplementedError(
                f"torch.func.grad, vjp and jvp of {op} are not available: call attention itself in them, or an "
                "exported program before its run_decompositions"
            )
        return function.apply(*arguments)
    return without_derivative(op, kernel, keys, *arguments)


def without_derivative(op, kernel, keys, *arguments):
    """An op outside of its Function, of whose arguments none is to be differentiated."""
    with torch._C._AutoDispatchBelowAutograd():
        if keys.raw_repr() in _OF_PLAIN_TENSORS:
            return kernel(*arguments)  # which is all that is left to the dispatcher, and takes it longer
        return op.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


_OF_PLAIN_TENSORS = {
    (torch._C.DispatchKeySet(on) | torch._C.DispatchKeySet(autograd)).raw_repr()
    for on, autograd in (
        (torch._C.DispatchKey.CPU, torch._C.DispatchKey.AutogradCPU),
        (torch._C.DispatchKey.CUDA, torch._C.DispatchKey.AutogradCUDA),
    )
}
"""Dispatch keys of a call that concerns no mode, transform or subclass."""


def _over_samples(op, in_dims, arguments):
    """vmap of any of the ops: one call a sample.

    Folding the mapped dimension into B would be one call in all, but changes what dropout, sinks and slopes mean.
    """

    def sample(i: int) -> list:
        return [a if d is None else a.select(d, i) for a, d in zip(arguments, in_dims, strict=True)]

    size = next(a.shape[d] for a, d in zip(arguments, in_dims, strict=True) if d is not None)
    if size == 0:  # one of zeros tells the shapes of the results
        arguments = [
            a if d is None else a.new_zeros(*a.shape[:d], 1, *a.shape[d + 1 :])
            for a, d in zip(arguments, in_dims, strict=True)
        ]
    outputs = [op(*sample(i)) for i in range(max(size, 1))]
    stacked = tuple(torch.stack(column)[:size] for column in zip(*outputs, strict=True))
    return stacked, (0,) * len(stacked)


_LIBRARY = torch.library.Library("fastattn", "FRAGMENT")  # which takes its kernels back where it is forgotten
_of_graphs = lambda *arguments: _attention_weights(*arguments[:-1])  # noqa: E731  without `made_by`, the last
for _name, _kernel in (("attention", _attention), ("attention_weights", _of_graphs)):
    for _key in ("CompositeImplicitAutograd", "FuncTorchDynamicLayerFrontMode"):  # transforms see what is inside
        _LIBRARY.impl(_name, _kernel, _key)
for _name, _kernel, _fake, _function in (
    ("forward", _forward, _fake_forward, _Attention),
    ("backward", _backward, _fake_backward, _AttentionBackward),
    ("weights", _weights, _fake_weights, _Weights),
    ("weights_backward", _weights_backward, _fake_weights_backward, None),
):
    _qualified = f"fastattn::{_name}"
    torch.library.impl(_qualified, "CompositeExplicitAutograd", _kernel)
    torch.library.register_fake(_qualified, _fake)
    _op = getattr(torch.ops.fastattn, _name)
    _LIBRARY.impl(
        _name, functools.partial(_with_derivative, _op.default, _kernel, _function), "Autograd", with_keyset=True
    )
    torch.library.register_vmap(
        _qualified, lambda info, in_dims, *arguments, op=_op: _over_samples(op, in_dims, arguments)
    )
