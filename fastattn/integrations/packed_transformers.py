"""Hugging Face transformers without padding: every layer works on the real tokens of a batch, one after the other.

Hooks pack what enters a layer and unpack what leaves the last one, so embeddings, heads, poolers and losses see the
batch as it came. They know nothing but what a call brings along: a `PreparedMask` with padding in it. Where a call asks
for what packing would change, it runs as it would without the hooks.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from ..nn.packing import Packing, worth_packing
from .transformers import PreparedMask, attention_modules

MODEL_TYPES = frozenset(
    {"bert", "camembert", "distilbert", "electra", "gpt2", "llama", "mistral", "modernbert", "qwen2", "qwen3"}
    | {"roberta", "xlm-roberta"}
)
"""Models whose layers, as tests show, take all they know of positions from what they are given: a layer that counted
its tokens itself (T5, for its position bias) would count those of all samples."""

_PACKABLE = frozenset({"causal", "window", "real_keys", "real_queries"})
_WITHOUT_TOKENS = frozenset({"use_cache", "output_attentions", "output_router_logits", "num_items_in_batch"})


@dataclass
class PackedCalls:
    """How many passes through a stack of layers were packed, and, by reason, how many were not."""

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


class PackedMask(PreparedMask):
    """What the tokens of a packed batch see, and how the batch was packed."""

    __slots__ = ("packing",)
    packing: Packing

    @classmethod
    def of(cls, mask: PreparedMask) -> PackedMask | str:
        """The mask of the packed batch, or why that would not be right, or not pay; found once for each mask."""
        if (found := getattr(mask, "packed", None)) is None:
            found = cls._made_of(mask)
            object.__setattr__(mask, "packed", found)
        return found

    @classmethod
    def _made_of(cls, mask: PreparedMask) -> PackedMask | str:
        if mask.features() - _PACKABLE:
            return f"the mask has {', '.join(sorted(mask.features() - _PACKABLE))}"
        if not worth_packing(mask.real_keys):
            return "there is little padding, or none"
        packing = Packing(mask.real_keys)
        if not packing.contiguous:  # without it tokens would be nearer to each other, which a window counts
            return "there is padding between tokens"
        found = cls(causal=mask.causal, window=mask.window, segments=(packing.documents, packing.documents))
        object.__setattr__(found, "packing", packing)
        return found


class PackedStack:
    """The hooks on the layers of one stack.

    parent: the module whose attribute `name` is the list of layers, which it calls one after the other, each with the
        output of the one before for its first argument.
    calls: where to count.
    """

    def __init__(self, parent: nn.Module, name: str, calls: PackedCalls) -> None:
        layers = getattr(parent, name)
        self.name, self.calls = name, calls
        self.first, self.last = layers[0], layers[-1]
        self.whole = True
        self.handles = [layer.register_forward_pre_hook(self.pack, with_kwargs=True) for layer in layers]
        self.handles.append(self.last.register_forward_hook(self.unpack, with_kwargs=True))
        self.handles.append(parent.register_forward_pre_hook(self.look))

    def look(self, parent: nn.Module, args: tuple) -> None:
        """Notes whether the layers that have the hooks are still those of the parent."""
        layers = getattr(parent, self.name)
        self.whole = len(layers) > 0 and layers[0] is self.first and layers[-1] is self.last

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self.handles:
            handle.remove()

    def pack(self, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """The arguments of a layer, packed; None leaves them as they are, in all layers of the same pass."""
        arguments = _by_name(layer, args, kwargs)
        if not isinstance(mask := arguments.get("attention_mask"), PreparedMask):
            return None
        first_name, x = next(iter(arguments.items()))
        del arguments[first_name]
        why = self._objection(arguments)
        if why is None and isinstance(mask := PackedMask.of(mask), str):
            why = mask
        if layer is self.first:
            self.calls.count(why)
        if why is not None:
            return None

        def packed(tokens: Tensor) -> Tensor:
            real = mask.packing.real
            return mask.packing.pack(tokens.expand(*real.shape, *tokens.shape[2:]))[None]

        arguments["attention_mask"] = mask
        if arguments.get("position_ids") is not None:
            arguments["position_ids"] = packed(arguments["position_ids"])
        if arguments.get("position_embeddings") is not None:
            arguments["position_embeddings"] = tuple(packed(part) for part in arguments["position_embeddings"])
        return (packed(x) if layer is self.first else x,), arguments

    def unpack(self, layer: nn.Module, args: tuple, kwargs: dict, output: Tensor | tuple) -> Tensor | tuple | None:
        """The last layer's output as the batch came, 0 at padding."""
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, PackedMask):
            return None
        if isinstance(output, tuple):
            return (mask.packing.unpack(output[0][0]), *output[1:])
        return mask.packing.unpack(output[0])

    def _objection(self, arguments: dict[str, object]) -> str | None:
        """Why a pass in which a layer has these arguments cannot be packed."""
        if not self.whole:
            return "the stack of layers was changed after the swap"
        if _active_collector.get() or arguments.get("output_attentions"):
            return "hidden states or attentions are asked for"
        others = arguments.keys() - {"attention_mask", "position_ids", "position_embeddings", *_WITHOUT_TOKENS}
        if given := sorted(name for name in others if arguments[name] is not None):
            return f"the call has {', '.join(given)}"
        return None


def pack(model: nn.Module, calls: PackedCalls) -> dict[str, str]:
    """Packs every stack of layers in `model` from now on; by the name of a stack, the sentence why that cannot be."""
    refused = {}
    for name, owner in _stacks(model).items():
        parent = model.get_submodule(name.rpartition(".")[0])
        if _MEMORY in vars(parent):
            continue
        if (model_type := owner.config.model_type) in MODEL_TYPES:
            vars(parent)[_MEMORY] = PackedStack(parent, name.rpartition(".")[2], calls)
        else:
            refused[name] = f"not packed: {model_type} is not among the models whose layers are known to take it"
    return refused


def unpack(model: nn.Module) -> None:
    """Undoes `pack`."""
    for module in model.modules():
        if _MEMORY in vars(module):
            vars(module).pop(_MEMORY).remove()


_MEMORY = "_packed_by_fastattn"


def _stacks(model: nn.Module) -> dict[str, PreTrainedModel]:
    """By name, the lists of layers that hold the attention modules of transformers in `model`, and whose they are."""
    found = {}
    for name, (_, owner) in attention_modules(model).items():
        parts = name.split(".")
        prefixes = (".".join(parts[:length]) for length in range(1, len(parts)))
        stack = next((prefix for prefix in prefixes if isinstance(model.get_submodule(prefix), nn.ModuleList)), None)
        if stack is not None:
            found[stack] = owner
    return found


def _by_name(layer: nn.Module, args: tuple, kwargs: dict) -> dict[str, object]:
    """The arguments of a call of this layer, each by its name, in the order of its parameters."""
    signature = inspect.signature(layer.forward)
    bound = signature.bind(*args, **kwargs).arguments
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound |= bound.pop(parameter.name, {})
    return dict(bound)
