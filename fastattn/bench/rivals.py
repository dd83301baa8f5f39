"""The contenders of a problem: fastattn's backends, torch's kernels and the naive formula, each a call or a refusal."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastattn
from fastattn.backends import BACKENDS
from fastattn.backends.selfcheck import failures
from fastattn.testing import Inputs

from .cases import Problem, make_encoder, naive_attention, run_encoder
from .timing import Call

_SDPA = {
    "SDPA math": SDPBackend.MATH,
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA cudnn": SDPBackend.CUDNN_ATTENTION,
}
SDPA_BY_ITSELF = "SDPA"
_LAYERS = {
    "fastattn.MultiHeadAttention": ("fastattn", fastattn.MultiHeadAttention),
    "torch.nn.MultiheadAttention": ("torch", torch.nn.MultiheadAttention),
}
_ENCODERS = {  # name -> family, and whether fastattn is put into it
    "torch.nn.TransformerEncoder, fastattn.swap": ("fastattn", True),
    "torch.nn.TransformerEncoder": ("torch", False),
}


DEFECTS = (AssertionError, TypeError, AttributeError, LookupError)
"""What other libraries raise, by defects of theirs, for tensors that they do not expect."""


class RefusalError(Exception):
    """A contender does not compute a problem; the message is a sentence that says why."""


@dataclass(frozen=True)
class Contender:
    """One way to compute a problem.

    family: "fastattn"; "torch", whose fastest right member is the one to beat; "naive"; or "other", another library.
    compute: the output, from `tensors`.
    tensors: the tensors that get a gradient, by name.
    do: the gradient of the output.
    context: the context in which the forward pass runs.
    refusal: the sentence why it computes nothing; the rest is empty then.
    is_comparable: whether its answer can be compared; not so where it draws random numbers of its own.
    """

    name: str
    family: str
    compute: Callable[[], Tensor] | None = None
    tensors: dict[str, Tensor] | None = None
    do: Tensor | None = None
    context: Callable[[], AbstractContextManager] = nullcontext
    refusal: str | None = None
    is_comparable: bool = True

    def call(self, timed: str) -> Call:
        """The call that is timed: forward without autograd, backward alone over a kept graph, or both in turn."""
        if timed == "forward":
            return Call(self.compute, self._inference)
        leaves = list(self.tensors.values())
        if timed == "forward+backward":
            return Call(lambda: torch.autograd.grad(self.compute(), leaves, self.do), self.context)
        with self.context():
            o = self.compute()
        return Call(lambda: torch.autograd.grad(o, leaves, self.do, retain_graph=True))

    def whole(self, timed: str) -> Call:
        """The call whose memory is measured: the forward pass, or both, since backward needs what forward keeps."""
        return self.call("forward" if timed == "forward" else "forward+backward")

    def trial(self, timed: str) -> tuple[Call, dict[str, Tensor]]:
        """The call and its results by name: "o", or a gradient for each of `tensors`.

        Raises:
            RefusalError: it cannot be computed; the message is the reason in short.
        """
        if self.refusal:
            raise RefusalError(self.refusal)
        refusals = failures() if self.family == "fastattn" else (*failures(), *DEFECTS)
        with warnings.catch_warnings(record=True) as caught:  # torch says in warnings why it refuses
            warnings.simplefilter("always")
            try:
                call = self.call(timed)
                with call.context():
                    results = call.run()
            except refusals as error:
                raise RefusalError(_in_short(error, [str(warning.message) for warning in caught])) from error
        if timed == "forward":
            return call, {"o": results}
        return call, {f"d{name}": gradient for name, gradient in zip(self.tensors, results, strict=True)}

    @contextmanager
    def _inference(self):
        with torch.no_grad(), self.context():
            yield


def names(level: str, device: str) -> list[str]:
    """The names of all contenders of a problem of this level on a device, in the order of `contenders`."""
    if level == "layer":
        return list(_LAYERS)
    return [*(f"fastattn {backend.NAME}" for backend in BACKENDS), *_sdpa_names(device), "naive"]


def contenders(problem: Problem, quick: bool = False) -> list[Contender]:
    """Contenders of a problem, those that refuse it included; the quick form has one backend, and torch's."""
    if problem.job.level == "attention":
        of_torch = _sdpa(problem.inputs)
        return [*_fastattn(problem, quick), *of_torch, *([] if quick else [_naive(problem.inputs)])]
    if problem.job.level == "encoder":
        return [_encoder(problem, name) for name in _ENCODERS]
    return [_layer(problem, name, *_LAYERS[name]) for name in _LAYERS]


def _fastattn(problem: Problem, quick: bool) -> list[Contender]:
    inputs = problem.inputs
    tensors = inputs.learned() if problem.job.timed == "forward" else leaves_of(**inputs.learned())
    explained = fastattn.explain(**tensors, mask=inputs.mask, **_dropout(inputs))
    chosen = explained.backend if quick else None
    objections = {chosen: []} if chosen else explained.objections

    def contender(backend: str) -> Contender:
        leaves = leaves_of(**inputs.learned())
        return Contender(
            f"fastattn {backend}",
            "fastattn",
            lambda: fastattn.attention(**leaves, mask=inputs.mask, backend=backend, **_dropout(inputs)),
            leaves,
            inputs.do,
            refusal="; ".join(objections[backend]) or None,
        )

    return [contender(backend) for backend in objections]


def sdpa_by_itself(problem: Problem) -> list[Contender]:
    """scaled_dot_product_attention as users call it: torch chooses which of its kernels computes the problem."""
    return _sdpa(problem.inputs, forced=False)


def _sdpa(inputs: Inputs, forced: bool = True) -> list[Contender]:
    inputs, dropout = without_nan(inputs), inputs.options.get("dropout_p", 0.0)
    options = _sdpa_mask(inputs) | {"dropout_p": dropout, "enable_gqa": inputs.q.shape[1] != inputs.k.shape[1]}

    def contender(name: str, context: Callable[[], AbstractContextManager]) -> Contender:
        leaves = leaves_of(**inputs.learned())
        with_bias = {"attn_mask": leaves["bias"]} if "bias" in leaves else {}
        return Contender(
            name,
            "torch",
            lambda: F.scaled_dot_product_attention(*(leaves[x] for x in "qkv"), **(options | with_bias)),
            leaves,
            inputs.do,
            context,
            is_comparable=not dropout,
        )

    if not forced:
        return [contender(SDPA_BY_ITSELF, nullcontext)]
    return [contender(name, lambda name=name: sdpa_kernel(_SDPA[name])) for name in _sdpa_names(inputs.q.device.type)]


def _sdpa_names(device: str) -> list[str]:
    """The kernels torch has for the device."""
    return ["SDPA math", "SDPA flash"] if device == "cpu" else list(_SDPA)


def _naive(inputs: Inputs) -> Contender:
    inputs, refusal = without_nan(inputs), "drops no weights" if "dropout_p" in inputs.options else None
    leaves, keep = leaves_of(**inputs.learned()), keep_for_rivals(inputs)
    return Contender("naive", "naive", lambda: naive_attention(**leaves, keep=keep), leaves, inputs.do, refusal=refusal)


def _layer(problem: Problem, name: str, family: str, module_class: type) -> Contender:
    x, mask, H = problem.x.detach().requires_grad_(), problem.inputs.mask, problem.inputs.q.shape[1]
    module = module_class(x.shape[2], H, batch_first=True, device=x.device, dtype=x.dtype)
    module.load_state_dict(problem.weights)
    options: dict[str, object] = {"need_weights": False}  # with torch.nn's polarity: True hides
    if mask.causal:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        options |= {"attn_mask": hidden, "is_causal": True}
    if mask.real_keys is not None:
        options["key_padding_mask"] = ~mask.real_keys
    module.eval()  # without autograd that allows torch its fast path
    tensors = {"x": x} | {name: module.get_parameter(name) for name in problem.weights}
    return Contender(name, family, lambda: module(x, x, x, **options)[0], tensors, problem.do)


def _encoder(problem: Problem, name: str) -> Contender:
    x, padding, encoder = problem.x.detach().requires_grad_(), ~problem.inputs.mask.real_keys, make_encoder(problem)
    (family, is_ours), refusal = _ENCODERS[name], None
    if is_ours and (report := fastattn.swap(encoder)).refused:
        refusal = str(report)
    tensors = {"x": x} | dict(encoder.named_parameters())
    return Contender(name, family, lambda: run_encoder(encoder, x, padding), tensors, problem.do, refusal=refusal)


def leaves_of(**tensors: Tensor) -> dict[str, Tensor]:
    return {name: x.detach().requires_grad_() for name, x in tensors.items()}


def _dropout(inputs: Inputs) -> dict[str, object]:
    """The arguments of `attention` that make it drop the same weights in each call."""
    if "dropout_p" not in inputs.options:
        return {}
    return {"dropout_p": inputs.options["dropout_p"], "generator": inputs.options["generator"].clone_state()}


def without_nan(inputs: Inputs) -> Inputs:
    """The inputs with zeros in padding: rivals multiply padding by zero, and NaN would spread from it."""
    return replace(inputs, **{name: getattr(inputs, name).nan_to_num(0.0) for name in ("q", "k", "v", "do")})


def _sdpa_mask(inputs: Inputs) -> dict[str, object]:
    """The mask in the form with which SDPA is fastest: is_causal, a mask over keys, or both merged into one table."""
    mask, features = inputs.mask, inputs.mask.features() - {"real_queries"}
    if features <= {"causal"}:
        return {"is_causal": mask.causal}
    if features == {"real_keys"}:
        return {"attn_mask": mask.real_keys[:, None, None, :]}
    return {"attn_mask": keep_for_rivals(inputs)}


def keep_for_rivals(inputs: Inputs) -> Tensor:
    """The mask as a table; a query that sees no key sees all of them, as in transformers: else its softmax is NaN."""
    keep = inputs.mask.keep(inputs.q.shape[2], inputs.k.shape[2], inputs.q.device)
    return keep | ~keep.any(-1, keepdim=True)


def _in_short(error: Exception, warned: list[str]) -> str:
    """The reason on one line: torch's warnings where they name it, else the error."""
    reasons = [text.partition(" (Triggered internally")[0].strip() for text in warned]
    reasons = [text for text in reasons if not text.endswith("because:") and "runtime disabled" not in text]
    return " ".join(dict.fromkeys(reasons)) or str(error).partition("\n")[0]
