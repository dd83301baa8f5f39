"""The form of a case: a small model of another library with random weights, and how to call it.

The cases themselves are in one file for each group of libraries. `tests/integrations/test_models.py` compares each one,
swapped, with the library's own attention, and docs/models.md is rendered from the results
(`tests/integrations/model_table.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor, nn

import fastattn
from fastattn import ops
from fastattn.plan import Plan
from fastattn.spec import Spec
from fastattn.testing import compare

L = 12  # tokens in each sample of a model that takes padding
PADDINGS: dict[str, Tensor | None] = {  # bool [3, L], True is real; None: the model is called without a mask
    "none": None,
    "right": torch.arange(L) < torch.tensor([[8], [3], [L]]),
    "left": torch.arange(L) >= torch.tensor([[4], [9], [0]]),
    "holes": torch.tensor(
        [[1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0], [0, 0] + [1] * 10]
    ).bool(),
}


@dataclass(frozen=True)
class Library:
    """Where models come from.

    name: as in the table.
    use_eager: sets a model, in place, to the attention that the library itself writes out.
    use_exact: the same to one that computes in the dtype of the model throughout, for a model in fp64.
    """

    name: str
    use_eager: Callable[[nn.Module], object]
    use_exact: Callable[[nn.Module], object]


@dataclass(frozen=True)
class ModelCase:
    """One family of models: a row of the table.

    library: whose it is.
    family: its name, as people know it.
    make: a small one, with dropout or without: it is compared in eval mode.
    run: (model, real) -> its outputs by name, where they mean something. `real` is a value of `PADDINGS`.
    needs: what its attention asks of fastattn besides padding, in names of `fastattn.spec.FEATURES`.
    paddings: the keys of `PADDINGS` that it takes.
    run_with_weights: like `run`, for the attention weights of every layer; None if the model does not offer them.
    """

    library: Library
    family: str
    make: Callable[[], nn.Module]
    run: Callable[[nn.Module, Tensor | None], dict[str, Tensor]]
    needs: frozenset[str] = frozenset()
    paddings: tuple[str, ...] = ("none",)
    run_with_weights: Callable[[nn.Module, Tensor | None], dict[str, Tensor]] | None = None

    def __str__(self) -> str:
        return f"{self.library.name}: {self.family}"


@dataclass(frozen=True)
class RefusedCase:
    """A model that keeps an attention of its own, or has one beside others that are swapped: a row of the second table.

    library, family, make: as in `ModelCase`.
    run: the model -> what it returns, which swapping does not change by a bit where nothing was swapped.
    swapped: the classes of its modules that are swapped.
    refused: by qualified name, why others are not.
    """

    library: Library
    family: str
    make: Callable[[], nn.Module]
    run: Callable[[nn.Module], Tensor]
    refused: dict[str, str]
    swapped: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.library.name}: {self.family}"

    def row(self) -> str:
        """The line of the table."""
        cells = (self.library.name, self.family, ", ".join(sorted(self.swapped)) or "-")
        return f"| {' | '.join(cells)} | {'; '.join(dict.fromkeys(self.refused.values()))} |"


def at_real(output: Tensor, real: Tensor | None) -> Tensor:
    """The rows of `output` [B, L, ...] at real tokens. What stands at padding means nothing, but must be finite."""
    assert output.isfinite().all()
    return output if real is None else output[real]


def random_like(model: nn.Module, *shape: int) -> Tensor:
    """Inputs for a model: the same for every dtype, but for rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(next(model.parameters()))


@dataclass(frozen=True)
class Compared:
    """One case in one dtype: the same parameters as they were made, and under three attentions."""

    case: ModelCase
    untouched: nn.Module
    eager: nn.Module
    swapped: nn.Module
    exact: nn.Module
    report: fastattn.SwapReport


def compared(case: ModelCase, dtype: torch.dtype = torch.float32) -> Compared:
    """The model with the library's own attention, a swapped copy, and one in fp64."""
    torch.manual_seed(0)
    model = case.make().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that attention is far from uniform, and no bias is 0
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.to(dtype)
    eager, swapped, exact = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model).double()
    case.library.use_eager(eager)
    case.library.use_exact(exact)
    report = fastattn.swap(swapped)
    assert report.swapped  # or the model would be compared with itself
    return Compared(case, model, eager, swapped, exact, report)


def outputs_and_gradients(case: ModelCase, model: nn.Module, real: Tensor | None) -> dict[str, Tensor]:
    """The outputs, and the gradients of a loss over them as one vector."""
    outputs = case.run(model, real)
    generator = torch.Generator().manual_seed(2)
    cotangents = [torch.randn(output.shape, generator=generator).to(output) for output in outputs.values()]
    model.zero_grad()
    torch.autograd.backward(list(outputs.values()), cotangents)
    result = {name: output.detach() for name, output in outputs.items()}
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return result | {"gradients": torch.cat([gradient.flatten() for gradient in gradients])}


def weights(case: ModelCase, model: nn.Module, real: Tensor | None) -> dict[str, Tensor]:
    """The attention weights of every layer."""
    with torch.no_grad():
        return case.run_with_weights(model, real)


def objections(
    models: Compared, results: Callable[[ModelCase, nn.Module, Tensor | None], dict[str, Tensor]], padding: str
) -> list[str]:
    """What is wrong with these results of the swapped model, each in a sentence that names the padding."""
    actual, naive, exact = (
        results(models.case, model, PADDINGS[padding]) for model in (models.swapped, models.eager, models.exact)
    )
    return [f"{padding}: {why}" for why in differences(actual, naive, exact)]


def differences(actual: dict[str, Tensor], naive: dict[str, Tensor], exact: dict[str, Tensor]) -> list[str]:
    """What is outside the error budget that `naive` sets, each in a sentence."""
    if not actual.keys() == naive.keys() == exact.keys():
        return [f"got {sorted(actual)} instead of {sorted(naive)}"]
    wrong = []
    for name in exact:
        error = compare(name, actual[name], naive[name], exact[name].double())
        if not error.budget < 2 * torch.finfo(actual[name].dtype).eps ** 0.5 * exact[name].abs().max():
            wrong.append(f"naive and exact disagree, {error}")  # such a budget would hide a wrong answer
        elif not error.right:
            wrong.append(str(error))
    return wrong


@dataclass
class Calls:
    """What fastattn was asked for.

    features: what any of the calls needed.
    backends: the names of those that computed them.
    """

    features: set[str] = field(default_factory=set)
    backends: set[str] = field(default_factory=set)


@contextmanager
def calls_seen() -> Iterator[Calls]:
    """Notes every attention that is computed meanwhile."""
    calls, attention = Calls(), ops.attention

    def noted(q: Tensor, k: Tensor, v: Tensor, spec: Spec, decided: Plan) -> tuple[Tensor, Tensor]:
        calls.features |= spec.features()
        calls.backends.add(decided.backend.NAME)
        return attention(q, k, v, spec, decided)

    with mock.patch.object(ops, "attention", noted), mock.patch.object(ops, "short_way", return_value=None):
        yield calls
