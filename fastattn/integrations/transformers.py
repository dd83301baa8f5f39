"""Hugging Face transformers: the attention implementations "fastattn" and "fastattn_packed".

Two functions are registered under each name, and a model needs both: `attention_mask`, which transformers calls once
a forward pass to make its mask, and `attention_forward`, which each attention module calls with that mask. With the
second alone transformers would make no mask at all, and padding would be attended to silently.

A call of transformers is either computed as its own eager attention does, or refused in a sentence. One thing differs
on purpose: where it is certain that the queries are the tokens of the keys, padded queries are not computed, and their
attention output is 0 (as with its flash_attention_2). The output of a model at padding has no meaning.

All that is read of transformers' internals stands here (what its mask functions are made of, the source of a forward);
it was tried with the versions in constraints.txt.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.utils.output_capturing import _active_collector

from .. import blocks
from ..api import attention, attention_with_weights
from ..backends.record import while_tracing
from ..nn.packing import Packing
from ..spec import Mask, RelativeBias, rows_by_distance
from .continuous_batching import ContinuousBatchingManager, PagedAttentionCache, attention_paged, keeping
from .sdpa_callers import class_of_forward

IMPLEMENTATION = "fastattn"
PACKED = "fastattn_packed"
"""The same for a model whose layers compute no padding, as `swap(model, packed=True)` makes them."""

_MEMORY = "_implementation_before_fastattn"
"""An attribute of models that were switched, a `_Before`. It is not in their config, which is saved with them."""

_SELF_ATTENTION_ONLY = frozenset({"albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"})
"""Model types without `add_cross_attention` in which a mask that is not causal belongs to self-attention. It cannot be
told from the call: a cross-attention whose queries happen to be as many as its keys looks the same."""

_DECODER_ALONE_ASKS = frozenset({"bigbird_pegasus", "longt5", "pegasus_x"})
"""Model types whose encoder has attention of its own, which would ignore the name of an implementation."""

_TAKE_TENSORS_ALONE = frozenset({"deepseek_v4", "gemma4_audio", "informer", "nllb-moe"})
"""Model types that need the tensor of "eager": the attention of the first writes into a mask that is a Tensor, and
leaves every other one as it is; that of the next two, which `swap` leaves, reshapes a float mask; the router of the
last takes 0 for a real token."""

_KEEPING_TO_ATTENTION = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "mlp", "sparse", "dense"}
)
"""Kinds of layers, in `layer_types` of a config, in which tokens meet in the attention function alone."""

_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "deterministic",
        "encoder_attention_mask",
        "encoder_hidden_states",
        "input_ids",
        "kernel_options",
        "labels",
        "logits_indices",
        "logits_processor_args",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "return_loss",
        "shift_labels",
        "special_tokens_mask",
        "token_type_ids",
        "tokenizer",
        "use_cache",
    }
)
"""Keyword arguments that transformers passes down to attention, and that its eager attention does not read; positions
and padding are in the mask already."""

_OF_PAGES = ("block_table", "max_length_k", "read_index", "write_index")
"""Those that continuous batching adds, for its cache to read."""


class PreparedMask(Mask):
    """A `Mask` that goes through transformers in place of the 4-D tensor it expects a mask function to make.

    Nearly all models pass it on unchanged. For the operations of others (BEiT adds it to its position bias, Gemma 4
    takes the last rows) it behaves as the tensor that they get under "sdpa", or "eager" where they add it.
    """

    # lengths: (B, n_q, n_k). packed: what `packed_transformers` makes of it. within: the plan, if made in a block.
    __slots__ = ("lengths", "packed", "within")
    ndim = 4

    @classmethod
    def for_lengths(cls, lengths: tuple[int, int, int], **fields: object) -> PreparedMask:
        """The mask with these fields, for B samples of n_q queries and n_k keys."""
        mask = cls(**fields)
        object.__setattr__(mask, "lengths", lengths)
        return mask

    def tensor(self) -> Tensor:
        """bool [B, 1, n_q, n_k], or with H in place of 1, True where a query may see a key."""
        if getattr(self, "within", None) is not None:
            raise NotImplementedError("a model that reads its mask cannot run in a context_parallel block")
        B, n_q, n_k = self.lengths
        keep = self.keep(n_q, n_k)
        return keep.expand(B, *keep.shape[1:])

    def contiguous(self) -> PreparedMask:
        """Itself: `generate` asks this of the masks that it makes ahead for a static cache."""
        return self

    def to(self, *args: object, **kwargs: object) -> PreparedMask | Tensor:
        """Itself on another device, as accelerate asks of each argument of a layer; else what the tensor gives."""
        device = kwargs.get("device", args[0] if args else None)
        others = args[1:] or kwargs.keys() - {"device", "non_blocking"}
        if others or not isinstance(device, (int, str, torch.device)):
            return self.tensor().to(*args, **kwargs)
        if all(x.device == torch.device(device) for x in self.tensors().values()):
            return self
        return self._moved(torch.device(device))

    def _moved(self, device: torch.device) -> PreparedMask:
        given = {name: getattr(self, name) for name in self.__dataclass_fields__}
        moved = type(self)(**tree_map_only(Tensor, lambda x: x.to(device), given))
        for name in ("lengths", "within"):
            if hasattr(self, name):
                object.__setattr__(moved, name, getattr(self, name))
        return moved

    def __getitem__(self, index: object) -> Tensor:
        return self.tensor()[index]

    def __and__(self, other: Tensor) -> Tensor:
        return self.tensor() & other

    def __invert__(self) -> Tensor:
        return ~self.tensor()

    def __add__(self, scores: Tensor) -> Tensor:
        return torch.where(self.tensor().to(scores.device), scores, torch.finfo(scores.dtype).min)

    def __getattr__(self, name: str) -> object:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if function in (Tensor.add, Tensor.__add__, torch.add) and len(args) == 2 and isinstance(args[1], cls):
            return args[1].__add__(args[0])  # not `+`: Dynamo would come here again
        args, kwargs = tree_map_only(cls, cls.tensor, (args, kwargs or {}))
        return function(*args, **kwargs)


class PackedMask(PreparedMask):
    """The mask of a packed batch, in which tokens see those of the same sample only.

    queries: the packing of the queries.
    keys: the packing of the keys.
    padded: the mask of the padded batch.
    """

    __slots__ = ("keys", "padded", "queries")

    @classmethod
    def of(cls, padded: PreparedMask, queries: Packing, keys: Packing) -> PackedMask:
        """The packed mask with the meaning of `padded`."""
        documents = queries.documents, keys.documents
        lengths = 1, documents[0].shape[1], documents[1].shape[1]
        packed = cls.for_lengths(lengths, causal=padded.causal, window=padded.window, segment_ids=documents)
        of_batch = copy.copy(padded)  # which does not know this one: nothing waits for the collector of cycles
        for name, value in (("queries", queries), ("keys", keys), ("padded", of_batch)):
            object.__setattr__(packed, name, value)  # a Mask is frozen
        return packed

    def _moved(self, device: torch.device) -> PackedMask:
        moved = super()._moved(device)
        for name in ("queries", "keys"):
            object.__setattr__(moved, name, Packing(getattr(self, name).real.to(device)))
        object.__setattr__(moved, "padded", self.padded._moved(device))
        return moved

    def needs_places(self, position_bias: Tensor | RelativeBias | None) -> bool:
        """Whether the attention depends on places in the padded batch, so that it has to be computed unpacked."""
        if isinstance(position_bias, RelativeBias):
            if not self.queries.contiguous:
                return True
        elif position_bias is not None and position_bias.shape[-2:].numel() > 1:
            return True
        asked = self.padded.features() - {"causal", "real_keys", "real_queries"}
        return bool(asked - {"window"}) or (bool(asked) and not self.queries.contiguous)


def register() -> None:
    """Makes `attn_implementation="fastattn"` and "fastattn_packed" known to transformers.

    To import this module does it, and so does `import fastattn`. Doing it again changes nothing.
    """
    for implementation in (IMPLEMENTATION, PACKED):
        AttentionInterface.register(implementation, attention_forward)
        AttentionMaskInterface.register(implementation, attention_mask)
    for maker in _MAKERS:
        put_around(masking_utils, maker, _telling)
    put_around(masking_utils, "_preprocess_mask_arguments", _checking_positions)
    put_around(PreTrainedModel, "get_correct_attn_implementation", _checking)
    put_around(PreTrainedModel, "post_init", _packing)
    put_around(ContinuousBatchingManager, "switch_to_cb_friendly_attn", keeping(IMPLEMENTATION, PACKED))


def put_around(owner: object, name: str, wrapper: Callable[[Callable], Callable]) -> None:
    """Puts a function in the place of one of transformers that it calls, once."""
    function = getattr(owner, name, None)
    if function is not None and not hasattr(function, _AROUND):
        outer = functools.wraps(function)(wrapper(function))
        setattr(outer, _AROUND, function)
        setattr(owner, name, outer)


_AROUND = "_fastattn_is_around"


def _checking(correct: Callable) -> Callable:
    """transformers' check of an implementation: refuses ours where it would have no effect, and packs or unpacks."""

    def check(model: PreTrainedModel, requested: str | None, is_init_check: bool = False) -> str:
        if is_init_check and requested in (IMPLEMENTATION, PACKED) and not _obeys(type(model)):
            raise ValueError(
                f'attn_implementation must be "eager" or another one of {type(model).__name__}, got "{requested}", for '
                "which its attention does not ask the AttentionInterface of transformers"
            )
        implementation = correct(model, requested, is_init_check)
        if implementation in (IMPLEMENTATION, PACKED):
            _let_biases_be_relative(type(model))
        if not is_init_check:
            from . import packed_transformers

            if implementation == PACKED:
                packed_transformers.pack_or_warn(model)
            elif model.config._attn_implementation == PACKED:
                packed_transformers.unpack(model)
        return implementation

    return check


def _packing(post_init: Callable) -> Callable:
    """The end of a model's construction: packs it, if it was asked for by the name of its implementation."""

    def pack(model: PreTrainedModel) -> None:
        post_init(model)
        if model.config._attn_implementation == PACKED:
            from . import packed_transformers

            packed_transformers.pack_or_warn(model)

    return pack


@functools.cache
def _obeys(cls: type[PreTrainedModel]) -> bool:
    """Whether all of a model's attention looks its implementation up among those registered, as far as is known."""
    if not cls._can_set_attn_implementation() or getattr(cls.config_class, "model_type", None) in _DECODER_ALONE_ASKS:
        return False
    return "[config._attn_implementation]" not in _source(sys.modules[cls.__module__])  # a table of its own


_WITH_RELATIVE_BIASES = ("MT5Attention", "T5Attention", "UMT5Attention")
NO_BIAS = object()
"""The position bias of cross-attention in T5 and mT5, in place of a tensor of zeros for each pair."""


def _let_biases_be_relative(cls: type[PreTrainedModel]) -> None:
    """Makes the attention modules of T5 and the like hand on a `RelativeBias` while they compute by fastattn."""
    modules = [sys.modules.get(base.__module__) for base in cls.__mro__]
    for name, module in itertools.product(_WITH_RELATIVE_BIASES, modules):
        if (attention := getattr(module, name, None)) is not None:
            put_around(attention, "compute_bias", _by_distance)
            put_around(attention, "forward", _without_zeros)


def _computes_here(attention: nn.Module) -> bool:
    return attention.config._attn_implementation in (IMPLEMENTATION, PACKED)


def _by_distance(compute_bias: Callable) -> Callable:
    """T5's function that makes [1, H, n_q, n_k] of its table: a row for a query that sees each distance once will do.

    Not under reentrant checkpoints, through which gradients of what is in no tensor are lost.
    """

    def compute(
        attention: nn.Module,
        query_length: int,
        key_length: int,
        device: torch.device | None = None,
        past_seen_tokens: int | Tensor = 0,
    ) -> Tensor | RelativeBias:
        checkpoint = getattr(attention, "_gradient_checkpointing_func", None)  # of no UMT5, which hands on no bias
        in_checkpoint = attention.training and getattr(attention, "gradient_checkpointing", False)
        reentrant = getattr(checkpoint, "keywords", {}).get("use_reentrant", True)
        if (in_checkpoint and reentrant) or not _computes_here(attention):
            return compute_bias(attention, query_length, key_length, device, past_seen_tokens)
        before = query_length - 1
        row = compute_bias(attention, 1, before + key_length, device, past_seen_tokens + before)
        return RelativeBias(row[0, :, 0].contiguous())

    return compute


def _without_zeros(forward: Callable) -> Callable:
    """T5's attention, which without a position bias and a table would make zeros for each pair."""

    def attend(attention: nn.Module, *args: object, **kwargs: object) -> tuple:
        takes_bias = "position_bias" in kwargs and kwargs["position_bias"] is None
        if takes_bias and not attention.has_relative_attention_bias and _computes_here(attention):
            kwargs["position_bias"] = NO_BIAS
        return forward(attention, *args, **kwargs)

    return attend


@dataclass(frozen=True)
class _Before:
    """The implementation that `switch_back` restores; unpickling it imports this module, which registers fastattn's."""

    implementation: str


def switch(model: nn.Module) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Sets the transformers models in `model` to fastattn.

    Returns:
        swapped: by qualified name, the class of each attention module that now computes by fastattn.
        already: the same for those that did before.
        refused: by qualified name of a module or a whole model, the sentence why not.
    """
    swapped: dict[str, str] = {}
    already: dict[str, str] = {}
    refused: dict[str, str] = {}
    for prefix, outermost in _outermost_models(model).items():
        before = {module: module.config._attn_implementation for module in _holders_of_configs(outermost)}
        attention = _attention_modules_of(outermost)
        ours = {
            _deciding_config(*entry)._attn_implementation in (IMPLEMENTATION, PACKED) for entry in attention.values()
        }
        if options := sorted(set().union(*(_options(type(module)) for module, _ in attention.values())) - _KNOWN):
            refused[prefix] = f"its attention has the option {', '.join(options)}, which is not supported"
            continue
        if own := sorted(name for name, (module, _) in attention.items() if has_other_forward(module)):
            refused[prefix] = f"the forward of {own[0]} was replaced on the module itself"
            continue
        try:
            if False in ours:
                outermost.set_attn_implementation(IMPLEMENTATION)
        except (ValueError, ImportError) as error:
            _restore(before)
            refused[prefix] = str(error)
            continue
        if any(implementation != module.config._attn_implementation for module, implementation in before.items()):
            for module, implementation in before.items():  # of all: setting one sets those inside of it
                vars(module).setdefault(_MEMORY, _Before(implementation))
        implementations = {id(module.config): implementation for module, implementation in before.items()}
        for name, (module, owner) in attention.items():
            config = _deciding_config(module, owner)
            if config._attn_implementation in (IMPLEMENTATION, PACKED):
                done = already if implementations[id(config)] == config._attn_implementation else swapped
                done[_joined(prefix, name)] = type(module).__name__
            elif owner._can_set_attn_implementation():
                refused[_joined(prefix, name)] = (
                    f"transformers did not set the configuration of {type(module).__name__}"
                )
        for name, (module, owner_name, owner) in _other_attention_of(outermost).items():
            if owner._can_set_attn_implementation():
                refused[_joined(prefix, name)] = f"{type(module).__name__} computes its attention by code of its own"
            else:
                why = f"{type(owner).__name__} does not use the AttentionInterface of transformers"
                refused[_joined(prefix, owner_name)] = why
    return swapped, already, refused


def switch_back(model: nn.Module) -> None:
    """Gives every model of transformers in `model` the implementation that it had before `switch`, and unpacks it."""
    from . import packed_transformers

    changed = [module for module in model.modules() if _MEMORY in vars(module)]
    _restore({module: vars(module).pop(_MEMORY).implementation for module in changed})
    packed_transformers.unpack(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation == PACKED:  # by name, by no swap
            packed_transformers.pack(module, packed_transformers.calls_of(module))


def _restore(before: dict[nn.Module, str]) -> None:
    """Gives the config of each module this implementation: the outer ones first, since each sets those inside of it."""
    for module, implementation in sorted(before.items(), key=lambda entry: -_size(entry[0].config)):
        module.config._attn_implementation = implementation


def _size(config: PreTrainedConfig) -> int:
    """How many configs a config is made of."""
    inner = (getattr(config, name, None) for name in config.sub_configs)
    return 1 + sum(_size(x) for x in inner if isinstance(x, PreTrainedConfig))


def has_other_forward(module: nn.Module) -> bool:
    """Whether somebody replaced the forward on the module itself; accelerate calls that of the class."""
    return "forward" in vars(module) and not hasattr(module, "_hf_hook")


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _outermost_models(model: nn.Module) -> dict[str, PreTrainedModel]:
    """Models of transformers in `model` that are in no other one, by name."""
    models: dict[str, PreTrainedModel] = {}
    for name, module in model.named_modules():
        inside = any(outer == "" or name.startswith(f"{outer}.") for outer in models)
        if isinstance(module, PreTrainedModel) and not inside:
            models[name] = module
    return models


def attention_modules(model: nn.Module) -> dict[str, tuple[nn.Module, PreTrainedModel]]:
    """Modules in `model` that ask transformers for their implementation, by name, each with the model it belongs to."""
    return {
        _joined(prefix, name): entry
        for prefix, outermost in _outermost_models(model).items()
        for name, entry in _attention_modules_of(outermost).items()
    }


def _attention_modules_of(model: PreTrainedModel) -> dict[str, tuple[nn.Module, PreTrainedModel]]:
    """Modules of a model that ask transformers for their implementation, by name, each with the model it belongs to."""
    return {
        name: (module, owner) for name, (module, _, owner) in _owned(model) if _asks_for_implementation(type(module))
    }


def _other_attention_of(model: PreTrainedModel) -> dict[str, tuple[nn.Module, str, PreTrainedModel]]:
    """Attention modules of transformers that do not ask, by name, each with the name of its model and the model."""
    asking = {part for module, _ in _attention_modules_of(model).values() for part in module.modules()}
    result = {}
    for name, (module, owner_name, owner) in _owned(model):
        cls = type(module)
        if "Att" not in cls.__name__ or not cls.__module__.startswith("transformers."):
            continue
        if module in asking or asking.intersection(module.modules()):
            continue
        if not owner._can_set_attn_implementation() or _weighs_by_itself(cls):
            result[name] = module, owner_name, owner
    return result


def _owned(model: PreTrainedModel) -> Iterator[tuple[str, tuple[nn.Module, str, PreTrainedModel]]]:
    """Modules that are no models, by name, each with the name of the model it belongs to and that model."""
    owners: dict[str, tuple[str, PreTrainedModel]] = {}
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            owners[name] = name, module
        else:
            owners[name] = owners[name.rpartition(".")[0]]
            yield name, (module, *owners[name])


def _deciding_config(module: nn.Module, owner: PreTrainedModel) -> PreTrainedConfig:
    """The configuration in which an attention module looks its implementation up."""
    config = getattr(module, "config", None)
    return config if isinstance(config, PreTrainedConfig) else owner.config


def _holders_of_configs(model: PreTrainedModel) -> list[nn.Module]:
    """Every model in `model`, and one module for each configuration that is no model's."""
    holders = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    seen = {id(module.config) for module in holders}
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig) and id(config) not in seen:
            seen.add(id(config))
            holders.append(module)
    return holders


@functools.cache
def _asks_for_implementation(cls: type[nn.Module]) -> bool:
    """Whether the forward of this class looks its implementation up; transformers itself finds out in the same way."""
    if class_of_forward(cls).__module__.startswith("torch."):
        return False
    return "ALL_ATTENTION_FUNCTIONS.get_interface(" in _source(cls.forward)


@functools.cache
def _options(cls: type[nn.Module]) -> frozenset[str]:
    """The options that the forward of this class hands to attention by name."""
    source = inspect.getsource(cls.forward)
    nodes = ast.walk(ast.parse(f"if True:\n{source}" if source[0].isspace() else source))  # indented, as in a class
    calls = [x for x in nodes if isinstance(x, ast.Call) and getattr(x.func, "id", "") == "attention_interface"]
    return frozenset(keyword.arg for call in calls for keyword in call.keywords)


@while_tracing
def _decides_causality(cls: type[nn.Module]) -> bool:
    """Whether the forward of this class says of each call whether it is causal, so that no caller of the model can."""
    return _asks_for_implementation(cls) and "is_causal" in _options(cls)


@while_tracing
def _may_read(cls: type[nn.Module], option: str) -> bool:
    """Whether eager attention of this class may read an option: not one of `generate`, say, that came along unnamed."""
    return not _asks_for_implementation(cls) or option in _options(cls)


_WEIGHING = ("softmax", "Softmax", "scaled_dot_product_attention", "multi_head_attention_forward")


@functools.cache
def _weighs_by_itself(cls: type[nn.Module]) -> bool:
    """Whether this class, which does not ask for an implementation, has attention of its own in its source."""
    source = _source(cls)
    return any(f"{call}(" in source for call in _WEIGHING)


def _source(x: object) -> str:
    """The source of a class, a function or a module; "" where there is none to read."""
    try:
        return inspect.getsource(x)
    except (OSError, TypeError):
        return ""


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | Mask | None = None,
    config: PreTrainedConfig | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: object,
) -> Mask | Tensor:
    """The `Mask` of one forward pass; it never allocates [q_length, kv_length] for the mask functions of transformers.

    A function that is not known here, such as a user's own, is evaluated by transformers itself into `Mask.dense`, and
    every one for the models of `_TAKE_TENSORS_ALONE`, into the tensor of "eager".

    Args:
        batch_size: B.
        q_length: n_q.
        kv_length: n_k.
        q_offset: position of the first query in the sequence; a tensor with a static cache.
        kv_offset: position of the first key in the sequence; above 0 where a sliding cache has dropped the older ones.
        mask_function: (batch, head, query position, key position) -> may see.
        attention_mask: bool [B, n], False at padding; positions from n on are padding too.
        config: that of the model.
        use_vmap: `mask_function` works on single indices only, so it is the user's own.
        options: arguments for other implementations.
    """
    if isinstance(attention_mask, Mask):  # `generate` has made it ahead of the forward pass, for a static cache
        return attention_mask
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"attention_mask must be [B, n] or [B, H, n_q, n_k], got {list(attention_mask.shape)}")
    if attention_mask is not None and attention_mask.dtype != torch.bool:  # which transformers makes of every dtype
        raise ValueError(f"attention_mask [B, n] must be bool, False at padding, got {attention_mask.dtype}")
    # Not `in`, of which Dynamo makes a comparison of numbers that it does not know to be equal yet.
    if attention_mask is not None and attention_mask.shape[0] != batch_size and attention_mask.shape[0] != 1:
        raise ValueError(f"attention_mask must be [{batch_size} or 1, n], got {list(attention_mask.shape)}")
    lengths, fields = (batch_size, q_length, kv_length), None if use_vmap else _fields(mask_function)
    if (block := blocks.current()) is not None:
        return _mask_in_block(block, lengths, q_offset, fields, attention_mask, config)
    of_theirs = (*lengths, q_offset, kv_offset, mask_function, attention_mask)
    if getattr(config, "model_type", None) in _TAKE_TENSORS_ALONE:
        return masking_utils.eager_mask(*of_theirs, use_vmap=use_vmap, device=device, **options)
    real_keys = None
    if attention_mask is not None:
        padded = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        real_keys = padded[:, kv_offset : kv_offset + kv_length].expand(batch_size, -1)

    if fields is None:
        whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        dense = masking_utils.sdpa_mask(*of_theirs, **whole, use_vmap=use_vmap, device=device)
        return PreparedMask.for_lengths(lengths, dense=dense, real_keys=real_keys)

    if "dense" in fields:
        fields["dense"] = fields["dense"].to(device)
    q_offset = q_offset - kv_offset  # among the keys that are given
    if isinstance(q_offset, Tensor):  # a static cache, longer than the sequence so far
        q_offset = q_offset.to(device).expand(batch_size) if fields else 0
        return PreparedMask.for_lengths(lengths, **fields, q_offset=q_offset, real_keys=real_keys)
    real_queries = None
    if q_offset + q_length == kv_length:  # the queries are the last tokens of the keys, unless this is cross-attention
        if q_length == 1:
            fields.pop("causal", None)  # the last token sees every key
        elif real_keys is not None:
            own = getattr(config, "model_type", None) in _SELF_ATTENTION_ONLY
            if fields.get("causal") or (own and not getattr(config, "add_cross_attention", False)):
                real_queries = real_keys[:, q_offset:]
    q_offset = q_offset if fields else 0
    return PreparedMask.for_lengths(
        lengths, **fields, q_offset=q_offset, real_keys=real_keys, real_queries=real_queries
    )


def _mask_in_block(
    block: blocks.Block,
    lengths: tuple[int, int, int],
    q_offset: int | Tensor,
    fields: dict[str, object] | None,
    real: Tensor | None,
    config: PreTrainedConfig | None,
) -> PreparedMask:
    """The mask of a forward pass with the tokens of one rank; `fields` are those of the mask function, if known."""
    objection = None
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        objection = f"{config.model_type} attends to an encoder's tokens, which no context_parallel block does for it"
    elif isinstance(q_offset, Tensor) or q_offset or lengths[1] != lengths[2]:
        objection = "past_key_values must be None in a context_parallel block, and attention_mask of the local tokens"
    elif fields is None:
        objection = "a mask function of one's own must be in the plan's mask, which has all tokens"
    elif "segment_ids" in fields:
        objection = block.objection_to_documents(fields["segment_ids"][0])
    if kinds := {*(getattr(config, "layer_types", None) or ())} - _KEEPING_TO_ATTENTION:
        objection = (
            f"{config.model_type} has layers of {', '.join(sorted(kinds))}, which see the tokens of one rank alone"
        )
    kept = {name: x for name, x in (fields or {}).items() if name != "segment_ids"}
    mask = PreparedMask.for_lengths(lengths, **kept, real_keys=real)
    object.__setattr__(mask, "within", block.within(objection=objection))
    return mask


def _checking_positions(prepare: Callable) -> Callable:
    """A function of transformers that sees the positions of a forward pass, and in a block what is wrong with them."""

    def check(config, inputs_embeds, attention_mask, past_key_values, position_ids, *others, **more):
        block = blocks.current()
        if block is not None and isinstance(position_ids, Tensor):
            block.objection = block.objection_to_positions(position_ids)
        elif block is not None and "mrope_section" in (getattr(config, "rope_parameters", None) or {}):
            block.objection = (  # what the model turns its queries and keys by is seen by no layer
                "position_ids must be [4, B, n] in a context_parallel block, the first those of text, as "
                f"plan.positions().expand(4, B, -1), for {config.model_type}, got positions without those of text"
            )
        return prepare(config, inputs_embeds, attention_mask, past_key_values, position_ids, *others, **more)

    return check


def _fields(function: Callable) -> dict[str, object] | None:
    """The fields of `Mask` with the meaning of a mask function of transformers; None for a function not known here."""
    if function is masking_utils.bidirectional_mask_function:
        return {}
    if function is masking_utils.causal_mask_function:
        return {"causal": True}
    maker, given = getattr(function, _MADE_BY, (None, ()))
    if maker == "and_masks":
        return _all_of(given)
    if len(given) != 1:  # `match` would say it shorter, of which torch 2.10 traces constants alone
        return None
    (argument,) = given
    if maker == "sliding_window_overlay":
        if argument == 0:  # as Qwen2-MoE makes one that no layer reads
            return {"dense": torch.tensor(False, device="cpu")}
        return {"window": (argument - 1, None)}
    if maker == "sliding_window_bidirectional_overlay":
        return {"window": (argument, argument)}
    if maker == "packed_sequence_mask_function":
        return {"segment_ids": (argument, argument)}
    return None


def _all_of(functions: tuple[Callable, ...]) -> dict[str, object] | None:
    """The fields with the meaning of all these functions together; None where fields cannot express it."""
    merged: dict[str, object] = {}
    for function in functions:
        maker, given = getattr(function, _MADE_BY, (None, ()))
        if "segment_ids" in merged and maker == "remap_positions_for_packed_sequence":
            function = given[0]  # in a Mask, positions count within the segment anyway
        fields = _fields(function)
        if fields is None or fields.keys() & merged.keys():
            return None
        merged |= fields
    return merged


_MADE_BY = "_made_by"  # an attribute of mask functions: the name of the function that made it, and what that was given
_MAKERS = (
    "and_masks",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
    "sliding_window_bidirectional_overlay",
    "sliding_window_overlay",
)


def _telling(maker: Callable) -> Callable:
    """A maker of mask functions that notes on each what it was made of: Dynamo traces that, but reads no closure."""

    def tell(*args: object, **kwargs: object) -> Callable:
        function = maker(*args, **kwargs)
        if not kwargs:
            setattr(function, _MADE_BY, (maker.__name__, args))
        return function

    return tell


def _are_several(starts_q: Tensor | None, starts_k: Tensor | None, seq_idx: Tensor | None) -> bool:
    """Whether these say that sequences are packed: by where each starts, or by that which each token is in."""
    if any(x is not None and x.numel() > 2 for x in (starts_q, starts_k)):
        return True
    return seq_idx is not None and (is_compiling() or bool((seq_idx != seq_idx[..., :1]).any()))


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | RelativeBias | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
    seq_idx: Tensor | None = None,
    cache: object | None = None,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    """Computes a call of an attention module: (output [B, n_q, H, d_v], weights [B, H, n_q, n_k] or None).

    Args:
        module: the attention module that calls.
        query: [B, H, n_q, D].
        key: [B, H_kv, n_k, D].
        value: [B, H_kv, n_k, d_v].
        attention_mask: what `attention_mask` returned, or what a user or a model made: bool (True may see) or float
            (added), broadcastable to [B, H, n_q, n_k]. None is causal where the module says so, else everything.
        dropout: probability to drop a weight; without effect unless the module is in training.
        scaling: factor on query key^T; None is 1 / sqrt(D).
        is_causal: overrides `module.is_causal`, when there is no mask.
        position_bias: added to the scores; `NO_BIAS` is none.
        softcap: bound on the scores.
        s_aux: [H], attention sinks.
        sliding_window: the window that the mask has already.
        indices: int [B, n_q, any number], the only keys that a query may see of those that the mask lets it see, as an
            indexer chose them (DeepSeek-V3.2). None is all of them.
        cu_seq_lens_q: with `cu_seq_lens_k`, where packed sequences start, which the mask has already; seq_idx: which
            of them each token is in.
        cache: the paged cache of continuous batching, whose options say where the requests are; there is no mask then.
        options: `_WITHOUT_EFFECT`, what the module does not name itself, or None.

    Raises:
        NotImplementedError: an option that would change the result is not known here, or tokens are on several ranks
            without a plan of ours.
    """
    zeros = type(module).__name__ == "UMT5Attention" and not module.has_relative_attention_bias  # for each pair
    position_bias = None if zeros or position_bias is NO_BIAS else position_bias
    paged = isinstance(cache, PagedAttentionCache)
    if paged:
        where = {"cu_seq_lens_k": cu_seq_lens_k} | {name: options.pop(name, None) for name in _OF_PAGES}
        options |= {"position_bias": position_bias, "indices": indices}
    else:
        options["cache"] = cache
    unknown = [name for name, value in options.items() if value is not None and name not in _WITHOUT_EFFECT]
    if not paged:
        unknown = [name for name in unknown if name == "cache" or _may_read(type(module), name)]
    if unknown:
        raise _refusal(module, f"the option {', '.join(sorted(unknown))} is not supported")
    if not is_compiling() and "_context_parallel" in str(F.scaled_dot_product_attention.__module__):
        why = "context_parallel of torch, as of accelerate's cp_size, exchanges keys in torch's attention alone"
        raise _refusal(module, f"{why}; fastattn.parallel.context_parallel has a block for this one")
    if paged:
        terms = sliding_window, scaling, softcap, s_aux
        return attention_paged(module, query, key, value, cache, cu_seq_lens_q, *terms, where), None
    if isinstance(attention_mask, PackedMask) and attention_mask.needs_places(position_bias):
        queries, keys, mask = attention_mask.queries, attention_mask.keys, attention_mask.padded
        padded = (
            packing.unpack(x[0].transpose(0, 1)).transpose(1, 2)
            for packing, x in ((queries, query), (keys, key), (keys, value))
        )
        terms = (mask, dropout, scaling, is_causal, position_bias, softcap, s_aux, sliding_window)
        return queries.pack(attention_forward(module, *padded, *terms)[0])[None], None

    n_q, n_k = query.shape[2], key.shape[2]
    if attention_mask is None:
        if sliding_window is not None and sliding_window < n_k and is_causal is not False:  # as DiffusionGemma says
            raise _refusal(module, f"sliding_window={sliding_window} came without a mask that has it")
        causal = n_q > 1 and bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
        mask, bias = Mask(causal=causal), None
    elif isinstance(attention_mask, Mask):
        mask, bias = attention_mask, None
        _, *made = getattr(mask, "lengths", (0, n_q, n_k))  # which copies of a mask forget
        if made != [n_q, n_k]:
            if mask.features() and not mask.keep(*made).all():
                why = f"a mask made for {made[0]} queries and {made[1]} keys came with {n_q} and {n_k}"
                raise _refusal(module, why)
            mask = Mask()  # transformers itself makes none that hides nothing
        if mask.causal and is_causal is False and n_q > 1 and not _decides_causality(type(module)):
            raise _refusal(module, "is_causal=False came with a causal mask; set config.is_causal = False instead")
    else:
        is_float = attention_mask.is_floating_point()
        if not is_float and attention_mask.dtype != torch.bool:
            raise ValueError(f"a 4-D attention_mask must be bool or floating, got {attention_mask.dtype}")
        mask, bias = (Mask(), attention_mask) if is_float else (Mask(dense=attention_mask), None)
    separated = mask.segment_ids is not None or mask.dense is not None or bias is not None
    if not separated and _are_several(cu_seq_lens_q, cu_seq_lens_k, seq_idx):
        why = (
            "came without a mask that separates the sequences; transformers makes one of position_ids, without "
            "attention_mask and with use_cache=False, for models that look at them, and any model takes a 4-D "
            "attention_mask"
        )
        raise _refusal(module, f"{'seq_idx' if seq_idx is not None else 'cu_seq_lens'} {why}")
    if indices is not None:
        chosen = torch.zeros(query.shape[0], 1, n_q, n_k, dtype=torch.bool, device=query.device)
        chosen.scatter_(-1, indices[:, None].long(), True)
        mask = replace(mask, dense=chosen if mask.dense is None else chosen & mask.dense)
    if isinstance(position_bias, RelativeBias):
        position_bias = _fitting(position_bias, query, bias, n_k if isinstance(attention_mask, PackedMask) else None)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias

    terms = {"scale": scaling, "bias": bias, "softcap": softcap, "sinks": s_aux}
    terms["dropout_p"] = dropout if module.training else 0.0
    # Some models (GPT-2) keep the option to themselves and collect the weights by a hook, which would then find None.
    collected = _active_collector.get() or ()
    if options.get("output_attentions") or any(name.endswith("attentions") for name in collected):
        o, weights = attention_with_weights(query, key, value, mask, **terms, average_heads=False)
    else:
        o, weights = attention(query, key, value, mask, **terms, plan=_plan_of(attention_mask, options)), None
    return o.transpose(1, 2).contiguous(), weights


_KNOWN = _WITHOUT_EFFECT | {None, *inspect.signature(attention_forward).parameters}  # keywords of a call


def _fitting(relative: RelativeBias, query: Tensor, bias: Tensor | None, packed: int | None) -> Tensor | RelativeBias:
    """The bias of T5 for these queries: written out beside another one, and for so many tokens if they are packed.

    For one query it is a row, which needs none of the checks of a `RelativeBias`: most of a short call.
    """
    table = relative.table.to(query.device)  # that of the first layer
    if packed is not None:
        missing = packed - (table.shape[1] + 1) // 2  # for distances that no two tokens of a sample have
        return RelativeBias(F.pad(table, (missing, missing)))
    if bias is not None or query.shape[2] == 1:
        return rows_by_distance(table[:, None], table.shape[1] - query.shape[2] + 1)
    return RelativeBias(table)


def _plan_of(attention_mask: object, options: dict[str, object]) -> blocks.Within | None:
    """The plan of the block in which a mask was made, with what is wrong with the positions that a layer was given."""
    within, block = getattr(attention_mask, "within", None), blocks.current()
    if within is None or within.objection or block is None or not isinstance(options.get("position_ids"), Tensor):
        return within
    return within._replace(objection=block.objection_to_positions(options["position_ids"]))


def _refusal(module: nn.Module, why: str) -> NotImplementedError:
    return NotImplementedError(
        f'fastattn in {type(module).__name__}: {why}. model.set_attn_implementation("eager") goes back to transformers.'
    )


register()
