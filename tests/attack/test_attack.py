"""The attack finds a wrong number, an exception that names nothing, a crash and a hang, and where none is, nothing."""

import os
import re
import time

import attack
import draws
import fresh_python
import pytest
import torch
from formula import attend

import fastattn

SEED = 208  # whose call of attention is a plain one in fp32


@pytest.fixture(autouse=True, scope="module")
def _children_find_torch_imported() -> None:
    fresh_python.forks()


def do_nothing() -> None:
    """The kernels are as they are."""


def perturb() -> None:
    """One column of each output is a little larger."""
    right = fastattn.attention

    def wrong(*args: object, **kwargs: object) -> object:
        result = right(*args, **kwargs)
        if not kwargs.get("return_lse"):
            return result
        o, lse = result
        return o.index_add(3, torch.tensor([0]), o[..., :1], alpha=0.1), lse

    fastattn.attention = wrong


def raise_unnamed() -> None:
    """A valid call raises."""

    def wrong(*args: object, **kwargs: object) -> None:
        raise KeyError("no such thing")

    draws.fastattn.attention = wrong


def abort() -> None:
    """The process dies as by a fault in a kernel."""
    draws.fastattn.attention = lambda *args, **kwargs: os.abort()


def hang() -> None:
    """A call never ends."""
    draws.fastattn.attention = lambda *args, **kwargs: [time.sleep(1) for _ in iter(int, 1)]


@pytest.mark.parametrize(
    ("prepare", "finding"),
    [
        (perturb, r"o: error .*, budget "),
        (raise_unnamed, "KeyError: 'no such thing'"),
        (abort, "the process died: SIGABRT"),
        (hang, "hangs: no answer in [34] s"),
    ],
)
def test_a_defect_is_found_with_its_seed(prepare, finding):
    (found,) = attack.attack(SEED, 0, only="attention", patience=3, prepare=prepare)
    assert re.search(finding, found)
    assert found.endswith(f"make attack SEED={SEED} DRAWS=1 TARGET=attention")


def test_an_attack_goes_on_after_a_crash():
    found = attack.attack(SEED, 200, 2, only="attention", prepare=abort)
    assert [f"SEED={SEED + n} " in line for n, line in enumerate(found)] == [True, True]


@pytest.mark.parametrize("target", ["attention", "hostile"])
def test_nothing_is_found_where_nothing_is_wrong(target):
    """Of other targets `make attack` says that, as .ci/run calls it."""
    assert attack.attack(SEED, 0, only=target, prepare=do_nothing) == []


def test_a_draw_is_a_function_of_its_seed():
    first, again = (draws.drawn_call(draws.Draw(SEED)) for _ in range(2))
    other = draws.drawn_call(draws.Draw(SEED, attempt=1))
    assert torch.equal(first.q, again.q)
    assert first.q.shape == other.q.shape
    assert not torch.equal(first.q, other.q)


@pytest.mark.parametrize("seed", range(20))
def test_the_gradients_of_the_formula_are_those_of_autograd(seed):
    call = draws.drawn_call(draws.Draw(seed)).to(torch.float64)
    leaves = {name: x.requires_grad_() for name, x in call.learned().items()}
    result = attend(call.replaced(leaves))
    lse, do = result.lse.masked_fill(result.lse.isinf(), 0), call.do.nan_to_num()
    expected = torch.autograd.grad((result.o, lse), list(leaves.values()), (do, call.dlse))
    for actual, wanted in zip(result.gradients().values(), expected, strict=True):
        torch.testing.assert_close(actual, wanted)
