"""Replacement of the attention modules of an existing model, with a report of what was replaced, and what not."""

from __future__ import annotations

import re
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .backends import missing_kernels
from .integrations import sdpa_callers
from .integrations.sdpa_callers import class_of_forward, full_name, names_in_code_of
from .nn import (
    MultiHeadAttention,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from .nn.checks import check_bools
from .nn.transformer import BLOCKS_OF_TORCH

if TYPE_CHECKING:
    from .integrations.packed_transformers import PackedCalls


@dataclass(frozen=True)
class SwapReport:
    """Report of `swap`; `str()` of it is meant for people.

    swapped: by qualified name in the model ("" is the model itself), the class that each attention module had which
        computes by fastattn since this call.
    already: the same for those that did before.
    refused: by qualified name, the sentence why this one stays what it was.
    zero_at_padding: by qualified name, the class of each stack of layers whose output at padding, which means nothing,
        is 0 since this call.
    calls: with `packed=True`, counts as the model runs: `packed`, passes that computed no padding, and `unpacked`, a
        Counter of the others by reason.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    already: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    zero_at_padding: dict[str, str] = field(default_factory=dict)
    calls: PackedCalls | None = None

    def __str__(self) -> str:
        if not (self.swapped or self.already or self.refused):
            return (
                "nothing to swap: the model has no attention that fastattn knows. If functions of its own call "
                "scaled_dot_product_attention, fastattn.patch_sdpa() may reach them"
            )
        lines = [f"swapped: {_counted(self.swapped)}"]
        if self.already:
            lines.append(f"swapped before: {_counted(self.already)}")
        if self.zero_at_padding:
            lines.append(f"0 at padding: the output of {_counted(self.zero_at_padding)}")
        lines += [f"not swapped: {name or 'the model'}: {why}" for name, why in self.refused.items()]
        if self.calls is not None and (self.calls.packed or self.calls.unpacked):
            lines.append(str(self.calls))
        return "\n".join(lines)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(_NO_MODEL)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"SwapReport has no attribute {name!r}: {_NO_MODEL}")


_NO_MODEL = "swap() changes the model in place and returns a report: write fastattn.swap(model), not model = ..."


def swap(model: nn.Module, *, packed: bool = False) -> SwapReport:
    """Makes a model compute attention by fastattn: changes it in place, keeps its parameters, and returns a report.

    Every `nn.MultiheadAttention` becomes a `fastattn.MultiHeadAttention`: the same object with another class, so that
    parameters, optimizers, hooks, modes, and modules used in two places (or that are the model itself) need no care.
    So do `nn.TransformerEncoder` and `nn.TransformerDecoder` with their layers, which then compute no padding: what the
    stacks return there is 0, as in torch's fast path, and the report names them. Not so an encoder that was made with
    `enable_nested_tensor=False`, and a layer without a stack, which compute padding as before. Subclasses of them stay
    what they are, and leave their fast path, which would go around the attention module.
    Models of Hugging Face transformers are set to the attention implementation "fastattn", which
    `model.set_attn_implementation("sdpa")` takes back.
    Every other module whose class calls `torch.nn.functional.scaled_dot_product_attention` itself (those of timm and
    open_clip do, and many of one's own) has fastattn compute these calls, and keeps all the rest of its code; timm's
    `fused_attn` is set for that.
    Whatever cannot be replaced is left as it was, and listed in the report with the reason; so is what only has the
    name of an attention. Doing it again changes nothing. Where no kernel of fastattn serves on the model's device (for
    want of a compiler, say), nothing is replaced, since nothing would be faster, and the report says what is missing.

    What is saved as a `state_dict` or by `save_pretrained` says nothing of fastattn, and loads without it; a model that
    is pickled whole (`torch.save(model)`) asks for it. torch.compile, torch.export and torch.onnx.export take the
    swapped model; the ONNX file computes attention by plain operators. torch.jit.script needs `unswap` first,
    and torch.fx traces before the swap.

    Args:
        model: any module.
        packed: also let the layers of transformers' models compute no padding: a padded batch is packed before the
            first layer and unpacked after the last, whose output is 0 at padding then. The report says which stacks of
            layers are not known to take that, and `report.calls` how many passes were packed, and why others were not:
            those with a cache, or that are asked for hidden states or attentions. Under torch.compile none is packed,
            nor counted. torch.nn's encoders and decoders pack by themselves.

    Returns:
        A `SwapReport`: by name, the modules that were swapped, those that had been before, and those that were refused.

    Raises:
        ValueError: `model` is no torch.nn.Module.
        TypeError: `packed` is no bool.

    Example:
        >>> import torch, fastattn
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, batch_first=True), num_layers=3)
        >>> print(fastattn.swap(model))
        swapped: 3 MultiheadAttention
        0 at padding: the output of 1 TransformerEncoder
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_bools(packed=packed)
    if why := _no_gain(model):
        return SwapReport(refused={"": why})
    report = SwapReport()
    if (integration := _transformers()) is not None:
        report = SwapReport(*integration.switch(model))
        if packed:
            from .integrations import packed_transformers

            report = replace(report, calls=packed_transformers.calls_of(model))
            report.refused.update(packed_transformers.pack(model, report.calls))
    elif (old := sys.modules.get("transformers.modeling_utils")) is not None:
        models = (name for name, module in model.named_modules() if isinstance(module, old.PreTrainedModel))
        report.refused.update(dict.fromkeys(models, "it is of a transformers before version 5"))
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention):
            report.already[name] = type(module).__name__
        elif _is_torch_attention(module):
            if why := _objection(module):
                report.refused[name] = why
            else:
                report.swapped[name] = type(module).__name__
                _remember(module)
                MultiHeadAttention.adopt(module)
        elif isinstance(module, sdpa_callers.SDPACaller):
            report.already[name] = type(module).__name__
        elif _is_foreign(module) and sdpa_callers.calls_sdpa(module):
            if why := sdpa_callers.objection(module):
                report.refused[name] = why
            else:
                report.swapped[name] = type(module).__name__
                _remember(module)
                sdpa_callers.adopt(module)
    report.refused.update(_unknown(model, {*report.swapped, *report.already, *report.refused}))
    for name, module in reversed(list(model.named_modules())):  # layers before the stacks that hold them
        kind = type(module)
        if not _adopt(module):
            _leave_fast_path(module)
        elif kind in _STACKS and getattr(module, "enable_nested_tensor", True) and module._is_by_token():
            report.zero_at_padding[name] = kind.__name__
    return report


def _no_gain(model: nn.Module) -> str | None:
    """Why nothing of this model would be faster, in a sentence; None where something may be, here or on the GPU."""
    device = next((x.device for x in model.parameters()), torch.device("meta"))
    may_move = device.type == "cpu" and torch.cuda.is_available()
    if device.type == "meta" or (may_move and missing_kernels(torch.device("cuda")) is None):
        return None
    if why := missing_kernels(device):
        return f"it would not be faster, since no kernel of fastattn serves on its device, {device.type} ({why})"
    return None


def unswap(model: nn.Module) -> None:
    """Undoes `swap`: every module it changed has its class, its attributes and its implementation of attention back.

    Parameters stay as they are now. A module that was built as one of fastattn's stays one.

    Args:
        model: any module, swapped or not.

    Raises:
        ValueError: `model` is no torch.nn.Module.

    Example:
        >>> import torch, fastattn
        >>> model = torch.nn.MultiheadAttention(8, 2)
        >>> _ = fastattn.swap(model)
        >>> fastattn.unswap(model)
        >>> type(model)
        <class 'torch.nn.modules.activation.MultiheadAttention'>
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if (integration := _transformers()) is not None:
        integration.switch_back(model)
    for module in model.modules():
        if _MEMORY in vars(module):
            before, attributes = vars(module).pop(_MEMORY)
            if isinstance(module, MultiHeadAttention):
                module.give_back()
            module.__class__ = _taken_back(type(module), before)
            for name in _CHANGED:
                vars(module).pop(name, None)
            vars(module).update(attributes)


def _transformers() -> ModuleType | None:
    """The integration into transformers; None where no module can be one of its models, or it is before version 5."""
    if "transformers.modeling_utils" in sys.modules:
        with suppress(ImportError):
            from .integrations import transformers

            return transformers
    return None


_MEMORY = "_before_fastattn"  # an attribute of what was swapped: its class, and those of `_CHANGED` that it had
_CHANGED = ("num_kv_heads", "rotary", "use_nested_tensor", "activation_relu_or_gelu", *sdpa_callers.SWITCHES)


def _remember(module: nn.Module) -> None:
    """Keeps the class and the attributes that `unswap` gives back."""
    attributes = {name: vars(module)[name] for name in _CHANGED if name in vars(module)}
    vars(module).setdefault(_MEMORY, (type(module), attributes))


def _taken_back(cls: type, before: type) -> type:
    """A class with `before` in place of the one of the swap, on which parametrizations and FSDP may have put theirs."""
    ours = (MultiHeadAttention, *_LAYERS.values(), *_STACKS.values())
    if cls in (before, *ours) or sdpa_callers.SDPACaller in cls.__bases__:
        return before
    bases = tuple(_taken_back(base, before) for base in cls.__bases__)
    if bases == cls.__bases__:
        return cls
    return type(cls)(cls.__name__, bases, {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")})


def _is_torch_attention(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention) or getattr(module, "original_name", None) == "MultiheadAttention"


_SCRIPTED = "it is compiled by TorchScript; swap the model before torch.jit.script"


def _objection(module: nn.Module) -> str | None:
    """Why this nn.MultiheadAttention cannot become a fastattn.MultiHeadAttention; None if it can."""
    if not isinstance(module, nn.MultiheadAttention):
        return _SCRIPTED
    cls = type(module)
    if cls.__module__.startswith("torch.ao."):
        return f"{full_name(cls)} is quantised, or observed to be; swap a model in floating point"
    if cls is not nn.MultiheadAttention:
        return f"{full_name(cls)} is a subclass of nn.MultiheadAttention and may compute something else"
    if "forward" in vars(module):
        return "its forward was replaced on the module itself"
    if type(module.out_proj) not in (nn.Linear, NonDynamicallyQuantizableLinear):
        return f"its out_proj is a {full_name(type(module.out_proj))}, not a torch.nn.Linear"
    return None


def _is_foreign(module: nn.Module) -> bool:
    """Whether this is a module of neither torch nor transformers, which has its own way to choose attention.

    Also where fully_shard or a parametrization has given it a class of torch's, whose forward is its own.
    """
    classes = type(module), class_of_forward(type(module))
    return any(cls.__module__.partition(".")[0] not in ("torch", "transformers") for cls in classes)


_NAMED_ATTENTION = re.compile("attn|attention", re.IGNORECASE).search
_SOFTMAX = frozenset({"softmax", "num_heads"})  # in the code of those that are named otherwise


def _unknown(model: nn.Module, known: set[str]) -> dict[str, str]:
    """Reasons why other modules that look like attention, and hold none of `known`, stay what they are, by name."""
    unknown: dict[str, str] = {}
    for name, module in reversed(list(model.named_modules())):  # what is inside first
        scripted = getattr(module, "original_name", None)
        if not (_NAMED_ATTENTION(scripted or type(module).__name__) or names_in_code_of(type(module)) >= _SOFTMAX):
            continue
        inside = f"{name}." if name else ""
        if any(other == name or other.startswith(inside) for other in (*known, *unknown)):
            continue
        if scripted:
            unknown[name] = _SCRIPTED
        elif _is_foreign(module):
            unknown[name] = f"{full_name(type(module))} computes attention by code of its own"
            if sdpa_callers.leads_to_sdpa(module):
                unknown[name] += "; fastattn.patch_sdpa() takes the calls of scaled_dot_product_attention in it"
    return dict(reversed(unknown.items()))


_LAYERS = {
    nn.TransformerEncoderLayer: TransformerEncoderLayer,
    nn.TransformerDecoderLayer: TransformerDecoderLayer,
}
_STACKS = {nn.TransformerEncoder: TransformerEncoder, nn.TransformerDecoder: TransformerDecoder}


def _adopt(module: nn.Module) -> bool:
    """Makes a layer or a stack of torch's one of ours, unless somebody changed what it computes; whether it did."""
    if vars(module).keys() & {"forward", *BLOCKS_OF_TORCH}:
        return False
    if type(module) in _LAYERS:
        attentions = (module.self_attn, getattr(module, "multihead_attn", module.self_attn))
        if all(isinstance(part, MultiHeadAttention) for part in attentions):
            _remember(module)
            module.__class__ = _LAYERS[type(module)]
            return True
    elif type(module) in _STACKS and all(isinstance(layer, tuple(_LAYERS.values())) for layer in module.layers):
        _remember(module)
        _STACKS[type(module)].adopt(module)
        return True
    return False


def _leave_fast_path(module: nn.Module) -> None:
    """Makes torch's encoder call its attention module in every mode.

    In eval, without gradients, the layer would run one fused op on the module's weights, and the encoder would hand it
    nested tensors. These attributes serve that decision alone.
    """
    if type(module) in (*_LAYERS.values(), *_STACKS.values()):
        return
    if isinstance(module, nn.TransformerEncoderLayer) and isinstance(module.self_attn, MultiHeadAttention):
        _remember(module)
        module.activation_relu_or_gelu = 0
    if isinstance(module, nn.TransformerEncoder) and any(
        isinstance(part, MultiHeadAttention) for part in module.layers.modules()
    ):
        _remember(module)
        module.use_nested_tensor = False


def _counted(names: dict[str, str]) -> str:
    return ", ".join(f"{count} {cls}" for cls, count in sorted(Counter(names.values()).items())) or "nothing"
