"""torch's own test inputs for its Transformer modules, and what is held to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import module_db

import fastattn

TORCH_MODULES = ("TransformerEncoderLayer", "TransformerDecoderLayer", "TransformerEncoder", "Transformer")


def samples(name: str) -> list[tuple[nn.Module, tuple, dict]]:
    """torch's own test inputs for one of its modules: (module, args, kwargs) in fp64."""
    info = next(info for info in module_db if info.module_cls is getattr(nn, name))
    torch.manual_seed(0)
    result = []
    for sample in info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=True):
        module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).double()
        result.append((module, sample.forward_input.args, sample.forward_input.kwargs))
    assert result
    return result


def zero_at_padding(module: nn.Module) -> nn.Module:
    """The module, whose stacks of layers now return 0 at padding in every mode, as torch's do in their fast path.

    Not those that were told to have none, by `enable_nested_tensor=False`.
    """

    def hook(stack: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor:
        padding = kwargs.get("src_key_padding_mask", kwargs.get("tgt_key_padding_mask"))
        if padding is None:
            return output
        padding = padding if padding.dim() == 1 or stack.layers[0].self_attn.batch_first else padding.T
        return output.masked_fill(padding[..., None], 0.0)

    for part in module.modules():
        if isinstance(part, nn.TransformerEncoder | nn.TransformerDecoder) and getattr(
            part, "enable_nested_tensor", True
        ):
            part.register_forward_hook(hook, with_kwargs=True)
    return module


@contextmanager
def without_fast_path() -> Iterator[None]:
    """torch's modules as they are in training: their fast path writes 0 into padding, which a decoder then reads."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def outputs_and_gradients(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, Tensor]:
    """The output, and its gradients by inputs and parameters under fixed random weights."""
    output = module(*args, **kwargs)
    by = {f"input {i}": x for i, x in enumerate(args)} | dict(module.named_parameters())
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    gradients = torch.autograd.grad(output, list(by.values()), cotangent)
    return {"output": output.detach()} | dict(zip(by, gradients, strict=True))


def state_of(model: nn.Module) -> list[tuple[type, dict]]:
    """What swapping may change of each module."""
    return [(type(part), dict(vars(part))) for part in model.modules()]


def assert_refused(good: nn.Module, bad: nn.Module, why: str) -> None:
    """Swapping takes the one, and leaves the other as it is, with that reason."""
    model = nn.ModuleDict({"good": good, "block": nn.ModuleDict({"bad": bad})})
    kind, before = type(good).__name__, state_of(model["block"])
    report = fastattn.swap(model)
    assert report.swapped == {"good": kind}
    assert list(report.refused) == ["block.bad"]
    assert why in report.refused["block.bad"]
    assert f"not swapped: block.bad: {report.refused['block.bad']}" in str(report)
    assert state_of(model["block"]) == before
    assert fastattn.swap(model).refused == report.refused


def assert_same(actual: object, expected: object) -> None:
    """Equal up to the rounding of float64."""
    torch.testing.assert_close(actual, expected)
