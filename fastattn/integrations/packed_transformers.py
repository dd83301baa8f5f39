"""Hugging Face transformers without padding: every layer computes the real tokens of a batch, one after the other.

Hooks pack the input of each layer and unpack the output of the last one, so embeddings, heads, poolers and losses see
the padded batch. A hook depends only on the arguments of a call, among which is a `PreparedMask` with the padding. A
call that asks for something that packing would change runs as it would without the hooks.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from .. import blocks
from ..nn.packing import Packing, worth_packing
from ..nn.transformer import BY_TOKEN, is_of_one_token
from .sdpa_callers import class_of_forward
from .transformers import PackedMask, PreparedMask, attention_modules, has_other_forward

MODEL_TYPES = frozenset(
    {"albert", "bert", "camembert", "clip_text_model", "distilbert", "electra", "ernie", "eurobert"}
    | {"hubert", "modernbert", "roberta", "wav2vec2", "xlm-roberta"}
    | {"cohere", "cohere2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_bigcode", "gpt_neox"}
    | {"gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3"}
    | {"qwen3_moe", "smollm3", "starcoder2"}
    | {"bart", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5", "t5_gemma_module"}
)
"""Models whose layers, as tests show, take all information on positions from their arguments."""

_COUNT_TOKENS = frozenset({"mt5", "t5"})
"""Exceptions, whose first layer makes a position bias for as many tokens as it sees, unless it is given one."""

_OF_TOKENS = ("position_ids", "position_embeddings")
_MASKS = ("attention_mask", "encoder_attention_mask")
_OF_PLACES = ("position_bias", "encoder_decoder_position_bias")
_ASKED_FOR = ("output_attentions", "output_hidden_states")
_WITHOUT_TOKENS = ("is_causal", "num_items_in_batch", "output_router_logits", "return_dict", "use_cache")
_KNOWN = frozenset({*_OF_TOKENS, *_MASKS, *_OF_PLACES, *_ASKED_FOR, *_WITHOUT_TOKENS, "encoder_hidden_states"})


@dataclass
class PackedCalls:
    """Counts of the passes through stacks of layers that were packed and, by reason, of those that were not."""

    packed: int = 0
    unpacked: Counter[str] = field(default_factory=Counter)

    def count(self, why: str | None) -> None:
        """Notes a pass, packed or not for that reason."""
        if why is None:
            self.packed += 1
        else:
            self.unpacked[why] += 1

    def __str__(self) -> str:
        lines = [f"packed: {self.packed} passes through a stack of layers"]
        return "\n".join(lines + [f"not packed: {count}: {why}" for why, count in self.unpacked.most_common()])


class PackedPass:
    """Packing of one pass of a padded batch through a stack of layers.

    mask: the mask of the self-attention.
    cross_mask: the mask of the attention to the encoder's output, if there is one.
    """

    def __init__(self, mask: PackedMask, cross_mask: PackedMask | None) -> None:
        self.mask, self.cross_mask = mask, cross_mask
        self._packed: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def of(cls, x: Tensor, arguments: dict[str, object]) -> PackedPass | str:
        """The pass of a layer with these arguments, or the reason why it is not packed."""
        mask, states = arguments["attention_mask"], arguments.get("encoder_hidden_states")
        cross_mask = None if states is None else arguments.get("encoder_attention_mask")
        packings = []
        for of, tokens in ((mask, x),) if states is None else ((mask, x), (cross_mask, states)):
            if not isinstance(of, PreparedMask):
                return "the mask for the encoder's output is none of fastattn's"
            real = of.real_keys
            packings.append(Packing(tokens.new_ones(tokens.shape[:2], dtype=torch.bool) if real is None else real))
        if not worth_packing(*(packing.real for packing in packings)):
            forgotten = mask.real_keys is None and (states is None or cross_mask.real_keys is None)
            return "no attention_mask was given" if forgotten else "the batch has little padding, or none"
        if not all(packing.index.numel() for packing in packings):  # layers of transformers take no sequence of none
            return "all tokens are padding"
        masks = (PackedMask.of(of, packings[0], keys) for of, keys in zip((mask, cross_mask), packings, strict=False))
        return cls(next(masks), next(masks, None))

    def arguments(self, arguments: dict[str, object]) -> dict[str, object]:
        """The arguments of a layer, packed."""
        result = arguments | {"attention_mask": self.mask}
        for name in _OF_TOKENS:
            if (given := arguments.get(name)) is not None:
                parts = [self._once(part) for part in (given if isinstance(given, tuple) else (given,))]
                result[name] = tuple(parts) if isinstance(given, tuple) else parts[0]
        if self.cross_mask is not None:
            result["encoder_attention_mask"] = self.cross_mask
            result["encoder_hidden_states"] = _packed(arguments["encoder_hidden_states"], self.cross_mask.keys)
        return result

    def _once(self, positions: Tensor) -> Tensor:
        """The positions, packed once for all layers, which are given the same tensor."""
        if id(positions) not in self._packed:
            self._packed[id(positions)] = positions, _packed(positions, self.mask.queries)
        return self._packed[id(positions)][1]


class PackedStack:
    """The hooks on the layers of one stack.

    parent: the module whose attribute `name` is the list of layers, which it calls one after the other, each with the
        output of the one before for its first argument.
    counts_tokens: whether the first layer must be given a position bias.
    calls: the counts of passes.
    """

    def __init__(self, parent: nn.Module, name: str, counts_tokens: bool, calls: PackedCalls) -> None:
        layers = getattr(parent, name)
        self.name, self.counts_tokens, self.calls = name, counts_tokens, calls
        self.first, self.last = layers[0], layers[-1]
        self.why: str | None = None
        self.handles = [layer.register_forward_pre_hook(self.pack, with_kwargs=True) for layer in layers]
        self.handles.append(self.last.register_forward_hook(self.unpack, with_kwargs=True))
        self.handles.append(parent.register_forward_pre_hook(self.look))

    def look(self, parent: nn.Module, args: tuple) -> None:
        """Notes why this pass might leave out a layer between the first and the last one with a hook."""
        if torch.compiler.is_compiling():  # what is asked below would be traced, for a pass that is not packed
            self.why = "the model is compiled"
            return
        layers = getattr(parent, self.name)
        self.why = None
        if not layers or layers[0] is not self.first or layers[-1] is not self.last:
            self.why = "the stack of layers was changed after the swap"
        elif not _is_of_libraries(class_of_forward(type(parent))) or has_other_forward(parent):
            self.why = "the stack is not as transformers has it"
        elif not all(map(_is_as_transformers_has_it, layers)):
            self.why = "a layer is not as transformers has it"
        elif any(layer._compiled_call_impl is not None for layer in layers):
            self.why = "a layer is compiled by itself"
        elif parent.training and any(getattr(of, "layerdrop", 0.0) for of in (parent, getattr(parent, "config", None))):
            self.why = "layers are left out at random (layerdrop)"

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self.handles:
            handle.remove()

    def pack(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """The arguments of a layer, packed; None leaves them as they are, in all layers of the same pass."""
        if torch.compiler.is_compiling():  # a graph is for every batch; one that counts would be compiled at each call
            return None
        names = _positional(layer.forward) if "forward" in vars(layer) else _positional_of(type(layer))
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if self.why is not None or not isinstance(arguments.get("attention_mask"), PreparedMask):
            if layer is self.first:
                self.calls.count(self.why or "the mask is none of fastattn's")
            return None
        x = arguments.pop(names[0])
        decision = self._decision(layer, x, arguments)
        if isinstance(decision, str):
            return None
        arguments = decision.arguments(arguments)
        if layer is self.first and self.counts_tokens:  # which would make this bias for a padded batch
            compute_bias, L = layer.layer[0].SelfAttention.compute_bias, x.shape[1]
            arguments["position_bias"] = compute_bias(L, L, device=x.device)
        queries = decision.mask.queries
        arguments[names[0]] = _packed(x, queries) if x.shape[:2] == queries.real.shape else x
        # What came by position stays there: activation checkpointing differentiates by nothing else.
        return tuple(arguments.pop(name) for name in names[: len(args)]), arguments

    def unpack(self, layer: nn.Module, args: tuple, kwargs: dict, output: Tensor | tuple) -> Tensor | tuple | None:
        """The last layer's output in the layout of the padded batch, 0 at padding."""
        mask = next((x for x in (*args, *kwargs.values()) if isinstance(x, PackedMask)), None)
        if mask is None:
            return None
        if isinstance(output, tuple):
            return (mask.queries.unpack(output[0][0]), *output[1:])
        return mask.queries.unpack(output[0])

    def _decision(self, layer: nn.Module, x: Tensor, arguments: dict[str, object]) -> PackedPass | str:
        """Packing of the pass of this layer, or the reason for none: one decision for all layers with the same mask."""
        mask = arguments["attention_mask"]
        if (decision := getattr(mask, "packed", None)) is None:
            decision = self._objection(arguments) or PackedPass.of(x, arguments)
            object.__setattr__(mask, "packed", decision)
            if layer is self.first:
                self.calls.count(decision if isinstance(decision, str) else None)
        return decision

    def _objection(self, arguments: dict[str, object]) -> str | None:
        """Why a pass in which a layer has these arguments cannot be packed."""
        if blocks.current() is not None:
            return "the tokens of a sample are on several ranks"
        if _active_collector.get() or any(arguments.get(name) for name in _ASKED_FOR):
            return "hidden states or attentions are asked for"
        if arguments.get("past_key_values") is not None:
            return "the call has a cache, past_key_values; use_cache=False does without"
        if given := sorted(name for name in arguments.keys() - _KNOWN if arguments[name] is not None):
            return f"the call has {', '.join(given)}"
        return None


def pack(model: nn.Module, calls: PackedCalls) -> dict[str, str]:
    """Packs every stack of layers in `model` from now on, and returns by name of a stack why it cannot be packed."""
    refused = {}
    for name, owner in _stacks(model).items():
        parent = model.get_submodule(name.rpartition(".")[0])
        if why := _objection_to_zeros(model, owner.config):
            unpack(parent)  # a part of the model, which did not know of the whole
        elif (model_type := owner.config.model_type) not in MODEL_TYPES:
            why = f"{model_type} is not among the models whose layers are known to take it"
        elif _MEMORY in vars(parent):
            vars(parent)[_MEMORY].calls = calls
        else:
            vars(parent)[_MEMORY] = PackedStack(parent, name.rpartition(".")[2], model_type in _COUNT_TOKENS, calls)
        if why:
            refused[name] = f"not packed: {why}"
    return refused


def _objection_to_zeros(model: nn.Module, config: PreTrainedConfig) -> str | None:
    """What of this model reads the output of its layers at padding, which means nothing but is not 0."""
    classes = (type(part).__name__ for part in model.modules())
    if answering := next((name for name in classes if "ForQuestionAnswering" in name), None):
        return f"{answering} weighs the tokens of a sample with its padding"
    return "its adapter reads the frames at padding" if getattr(config, "add_adapter", False) else None


def calls_of(model: nn.Module) -> PackedCalls:
    """The counts of a model that is packed already, or new ones."""
    return next((vars(part)[_MEMORY].calls for part in model.modules() if _MEMORY in vars(part)), PackedCalls())


def pack_or_warn(model: PreTrainedModel) -> None:
    """Packs a model whose `attn_implementation` says so. `swap(model, packed=True)` then counts its passes."""
    for name, why in pack(model, calls_of(model)).items():
        warnings.warn(f"{type(model).__name__}: {name}: {why}", stacklevel=1)


def unpack(model: nn.Module) -> None:
    """Undoes `pack`."""
    for module in model.modules():
        if _MEMORY in vars(module):
            vars(module).pop(_MEMORY).remove()


_MEMORY = "_packed_by_fastattn"


def _stacks(model: nn.Module) -> dict[str, PreTrainedModel]:
    """Lists of layers with attention modules of transformers in `model`, by name, with the model of each list."""
    stacks = {}
    for name, (_, owner) in attention_modules(model).items():
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
        stack = next((prefix for prefix in prefixes if isinstance(model.get_submodule(prefix), nn.ModuleList)), None)
        if stack is not None:
            stacks[stack] = owner
    return stacks


def _is_as_transformers_has_it(module: nn.Module) -> bool:
    """Whether this and all modules in it, and their forwards, are of libraries that compute each token by itself."""
    if not _is_of_libraries(type(module)) or has_other_forward(module) or not is_of_one_token(module):
        return False
    hooks = module._forward_pre_hooks.values()
    if hooks and any(getattr(hook, "keywords", {}).keys() & _OF_SAMPLES for hook in hooks):
        return False
    parts = module._modules.values()  # each pass asks, and nn.Module.modules() is slow
    return all([_is_as_transformers_has_it(part) for part in parts if part is not None])  # noqa: C419


@functools.cache
def _is_of_libraries(cls: type[nn.Module]) -> bool:
    if cls.__module__.startswith("torch.nn.modules."):
        return cls in BY_TOKEN or issubclass(cls, _HOLDING)
    return cls.__module__.partition(".")[0] in _LIBRARIES


_HOLDING = (nn.Linear, nn.Embedding, nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
_OF_SAMPLES = frozenset({"adapter_names", "alora_offsets"})
"""What the hooks of peft say of each sample."""
_LIBRARIES = ("transformers", "torch", "peft", "bitsandbytes", "accelerate")


def _packed(x: Tensor, packing: Packing) -> Tensor:
    """[1, tokens, ...] from [B, L, ...], or [1, L, ...] for all samples."""
    return packing.pack(x.expand(*packing.real.shape, *x.shape[2:]))[None]


def _positional(function: Callable) -> tuple[str, ...]:
    """The names of the parameters that may be given by position."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


@functools.cache
def _positional_of(cls: type[nn.Module]) -> tuple[str, ...]:
    """The names of the parameters of a class's forward that may be given by position."""
    return _positional(cls.forward)[1:]
