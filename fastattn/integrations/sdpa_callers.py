"""Modules that call torch.nn.functional.scaled_dot_product_attention themselves: timm's, open_clip's, or a user's own.

The class of such a module is replaced by a subclass, whose forward, and other methods that call torch's function, run
the same code, but with these calls routed to fastattn's. What else the module computes does not matter. Nothing of
these libraries is named; it was tried with their versions in constraints.txt.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import CodeType, FunctionType, SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode

from .. import blocks
from ..sdpa import RefusedError, causal_bias, computed, parsed
from ..spec import is_jagged

TORCHS_OWN = torch._C._nn.scaled_dot_product_attention  # patch_sdpa() may have put another one into torch.nn
_PLAIN = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)  # the last two while torch.export traces

SWITCHES = ("fused_attn", "use_fsdpa")
"""Attributes by which timm (where Swin's is False by default) and open_clip choose the code that calls the function."""

_WAYS_AROUND = {
    "einsum": True,
    "scaled_cosine": True,
    "flash": False,
    "use_flash_attention": False,
    "attention_logit_softcapping": True,
}
"""Attributes, of the module or its config, by which modules of timm, open_clip, x-transformers, monai and litgpt choose
other code, and whether they do so where it is true or where it is not."""


class SDPACaller(nn.Module):
    """The first base, before the original class, of the class that `adopt` gives to a module."""

    def __init_subclass__(cls, **_: object) -> None:
        """Nothing: what the original class does of its subclasses, such as noting them, is not for this one."""

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Copies and pickles by the original class, since the class of the module itself is in no file.

        What a `__reduce__` of the original class makes is a module as that class makes it, which is not swapped.
        """
        make, arguments, *state = super().__reduce_ex__(max(protocol, 2))
        if make not in (copyreg.__newobj__, copyreg.__newobj_ex__):
            return (original_class(self) if make is type(self) else make, arguments, *state)
        return (_new, (original_class(self),), *state)


class ToFastattn(TorchFunctionMode):
    """While it is entered, calls of torch's scaled_dot_product_attention in this thread go to fastattn's.

    Those on tensors of a subclass (distributed, or nested but not jagged) stay with torch, and those that fastattn
    refuses.
    """

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        if func is TORCHS_OWN:
            if not torch.compiler.is_compiling():
                _calls_seen.number += 1
            plain = (*_PLAIN, *causal_bias())
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            if all((type(x) in plain and not x.is_nested) or is_jagged(x) for x in tensors):
                try:
                    return computed(parsed(*args, **kwargs), None)
                except RefusedError as refusal:
                    blocks.refuse(f"a call of scaled_dot_product_attention that fastattn leaves to torch ({refusal})")
            else:
                blocks.refuse("scaled_dot_product_attention of tensors of a subclass")
        if func is Tensor.unflatten:  # Dynamo cannot call this one method from here
            func = torch.unflatten
        return func(*args, **kwargs)


class _CallsSeen(threading.local):
    """How many calls of torch's function modes have seen in this thread."""

    number = 0


_calls_seen = _CallsSeen()
_FUNCTION = "scaled_dot_product_attention"


def calls_sdpa(module: nn.Module) -> bool:
    """Whether the class of this module calls the function in its own code."""
    return any(_calls(function) for function in _functions_of(type(module)))


def leads_to_sdpa(module: nn.Module) -> bool:
    """Whether code of its own package that this module names, or holds, calls the function, as far as names tell."""
    cls, held = type(module), (getattr(x, "func", x) for x in vars(module).values())  # `func` of a partial
    package = cls.__module__.partition(".")[0]
    return _lead_to_sdpa(package, frozenset({cls, *(x if inspect.isfunction(x) else type(x) for x in held)}))


def original_class(module: SDPACaller) -> type[nn.Module]:
    """The class that the module had before `adopt`."""
    return type(module).__bases__[1]


def objection(module: nn.Module) -> str | None:
    """Why fastattn would not compute the attention of this module, whose class calls the function; None if it would."""
    names = names_in_code_of(type(module))
    if type(module).__module__.partition(".")[0] == "torch":
        return "its class was replaced by PyTorch's, as by fully_shard or a parametrization; swap the model before"
    if "forward" in vars(module):
        return "its forward was replaced on the module itself"
    if _checkpoints(type(module)):  # the second time a part of the forward runs without the forward around it
        return f"it checkpoints parts of its own forward; fastattn.patch_sdpa() takes its calls of {_FUNCTION}"
    for attribute, around in _WAYS_AROUND.items():
        owner = module if hasattr(module, attribute) else getattr(module, "config", None)
        if attribute in names and bool(getattr(owner, attribute, not around)) is around:
            return f"with {attribute}={getattr(owner, attribute)} it does not call {_FUNCTION}"
    for switch in _switches_off(module):
        dropout_p = getattr(getattr(module, "attn_drop", None), "p", 0.0)
        if dropout_p and "dropout_p" not in names:
            return f"with {switch}=True, which it needs, it would forget its dropout of {dropout_p}"
    return None


def adopt(module: nn.Module) -> None:
    """Lets fastattn compute this module's attention: the same object with another class, and its switch on."""
    for switch in _switches_off(module):
        setattr(module, switch, True)
    module.__class__ = _subclass(type(module))


def _switches_off(module: nn.Module) -> list[str]:
    names = names_in_code_of(type(module))
    return [switch for switch in SWITCHES if switch in names and not getattr(module, switch, True)]


@functools.cache
def _subclass(cls: type[nn.Module]) -> type[SDPACaller]:
    @functools.wraps(cls.forward)  # so that it has the signature, which trainers ask for
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        is_traced = torch.compiler.is_compiling()
        before = 0 if is_traced else _calls_seen.number
        with ToFastattn():
            output = cls.forward(self, *args, **kwargs)
        known = _calls_seen.number > before or F.scaled_dot_product_attention is not TORCHS_OWN
        if not (is_traced or known):
            parts = (*methods.values(), *vars(self).values())  # of one the calls may be in a graph of torch.compile
            if not any(hasattr(part, "_torchdynamo_orig_callable") for part in parts):
                warnings.warn(f"{full_name(cls)} was swapped, but ran without {_FUNCTION}", stacklevel=1)
        return output

    methods = {name: inspect.getattr_static(cls, name) for name in dir(cls)}
    # Methods that are called from outside, or once more by a checkpoint, without the forward around them.
    calling = {}
    for name, method in methods.items():
        function = getattr(method, "__func__", method)  # of static and class methods
        if inspect.isfunction(function) and _calls(inspect.unwrap(function)):
            calling[name] = _routed(function) if function is method else type(method)(_routed(function))
    likeness = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (SDPACaller, cls), likeness | calling | {"forward": forward})


def _routed(method: FunctionType) -> Callable:
    """The method, with its calls of torch's function routed to fastattn's."""

    @functools.wraps(method)
    def routed(*args: object, **kwargs: object) -> object:
        with ToFastattn():
            return method(*args, **kwargs)

    return routed


def _new(cls: type[nn.Module]) -> SDPACaller:
    """An empty module of the subclass of `cls`, for its state to be put in."""
    return _subclass(cls).__new__(_subclass(cls))


@functools.cache
def names_in_code_of(cls: type[nn.Module]) -> frozenset[str]:
    """Every attribute, global and keyword that the methods of this class name."""
    return frozenset().union(*(_names_in(function.__code__) for function in _functions_of(cls)))


def _checkpoints(cls: type[nn.Module]) -> bool:
    """Whether the methods of this class name PyTorch's checkpointing, by whatever name."""
    named = (f.__globals__.get(name) for f in _functions_of(cls) for name in _names_in(f.__code__))
    return "checkpoint" in names_in_code_of(cls) or any(
        inspect.isfunction(x) and x.__module__ == "torch.utils.checkpoint" for x in named
    )


@functools.cache
def _functions_of(cls: type) -> tuple[FunctionType, ...]:
    """The methods of a class, with those of its bases that they reach by super()."""
    functions: list[FunctionType] = []
    for name in dir(cls):
        for method in (vars(base)[name] for base in cls.__mro__ if name in vars(base)):
            method = getattr(method, "__func__", method)  # of static and class methods
            if not inspect.isfunction(method):
                break
            functions.append(inspect.unwrap(method))
            if name == "__init__" or "super" not in _names_in(functions[-1].__code__):
                break
    return tuple(functions)


_BEFORE_ALL = SimpleNamespace(argval=None)  # code of Python 3.11 and newer begins with RESUME


@functools.cache
def _calls(function: FunctionType) -> bool:
    """Whether the code names torch's function, also by another name, and not one of its own that has the same name."""
    code, named = function.__code__, function.__globals__.get(_FUNCTION)
    own = inspect.isfunction(named) and named is not F.scaled_dot_product_attention
    own = own and (named is function or not _calls(named))
    itself = code.co_varnames[: min(1, code.co_argcount)]
    return any(
        (at.opname == "LOAD_GLOBAL" and function.__globals__.get(at.argval) is TORCHS_OWN)
        or (
            at.argval == _FUNCTION
            and at.opname != "LOAD_CONST"
            and not (own if at.opname == "LOAD_GLOBAL" else before.argval in (*itself, "aten"))  # torch.ops.aten's too
        )
        for part in _codes_in(code)
        for before, at in pairwise((_BEFORE_ALL, *dis.get_instructions(part)))
    )


@functools.cache
def _lead_to_sdpa(package: str, starts: frozenset[object]) -> bool:
    seen, todo = set(), list(starts)
    while todo:
        x = todo.pop()
        if id(x) in seen or (getattr(x, "__module__", None) or "").partition(".")[0] != package:
            continue
        seen.add(id(x))
        if inspect.isclass(x):  # which may have a table of functions
            todo += [of for table in vars(x).values() if isinstance(table, dict) for of in table.values()]
        for function in _functions_of(x) if inspect.isclass(x) else [x] * inspect.isfunction(x):
            names = _names_in(function.__code__)
            if _calls(function) or "multi_head_attention_forward" in names:
                return True
            named = [function.__globals__.get(name) for name in names]
            for _ in range(2):  # modules, and modules in these
                named += [vars(of).get(name) for of in named if inspect.ismodule(of) for name in names]
            todo += named
    return False


def _names_in(code: CodeType) -> set[str]:
    names: set[str] = set()
    for part in _codes_in(code):
        names.update(part.co_names)
        for constant in part.co_consts:
            if isinstance(constant, tuple):  # among them the keywords of calls
                names |= {name for name in constant if isinstance(name, str)}
    return names


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def class_of_forward(cls: type[nn.Module]) -> type[nn.Module]:
    """The class whose forward this one has: not that which fully_shard or a parametrization puts on top."""
    return next(base for base in cls.__mro__ if "forward" in vars(base))


def full_name(cls: type) -> str:
    """The name of a class, with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"
