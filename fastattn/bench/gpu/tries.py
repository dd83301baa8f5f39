"""The first calls of a backend on a GPU: every kind of kernel that it has, from one tile to more than the GPU holds.

Each is a task of its own, since a kernel whose barriers do not fit together never ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

import fastattn
from fastattn.backends import backend_by_name, objections
from fastattn.testing import Case, Inputs, errors, make_inputs, run

from .compiling import compile_only
from .crew import Rows, Task
from .speed import gpu_answers

LIMIT_S = 30.0
_SIZES = {  # what is simplest comes first
    "tile": {"B": 1, "H": 1, "n_q": 64},
    "head": {"B": 1, "H": 1, "n_q": 700},
    "grid": {"B": 8, "H": 8, "H_kv": 4, "n_q": 700},
}
_HEAD_DIMS = (128, 64, 256)
_MASKS = {
    "full": {},
    "causal": {"causal": True},
    "padded": {"keys": "right", "queries": True},
    "documents": {"causal": True, "segments": True},
}
_FORWARD, _IN_ANY_ORDER = "forward", "backward, deterministic=False"
_PASSES = (_FORWARD, "backward", _IN_ANY_ORDER)
_ALL = {
    f"try {which}: {size} D{D} {mask}": (Case(f"{size}-D{D}-{mask}", "a first call", D=D, **sizes, **options), which)
    for (size, sizes), D, (mask, options), which in product(_SIZES.items(), _HEAD_DIMS, _MASKS.items(), _PASSES)
}


def tasks(dry: bool) -> list[Task]:
    """Each by its name, which says what is called; few in a dry run."""
    return [Task(name, LIMIT_S) for name in (list(_ALL)[: len(_PASSES)] if dry else _ALL)]


def serve(
    names: Iterator[str], answer: Callable[[Rows], None], device: str, only: str, compiling: bool = False
) -> None:
    """Makes the calls, and holds what comes of them to the error budget.

    Args:
        only: the backend that is called.
        compiling: only compile what the calls launch; nothing is answered then.
    """
    for name in names:
        case, which = _ALL[name]
        inputs = make_inputs(case, torch.bfloat16, device)
        inputs.options["deterministic"] = which != _IN_ANY_ORDER
        if compiling:
            with compile_only():
                _results(inputs, only, which)
            answer([])
            continue
        if why := objections(backend_by_name(only), inputs.q, inputs.k, inputs.v, inputs.spec()):
            answer([{"verdict": "n/a", "note": "; ".join(why)}])
            continue
        wrong = "; ".join(str(error) for error in errors(inputs, _results(inputs, only, which)) if not error.right)
        answer([{"verdict": "wrong" if wrong else "right", "note": wrong}])
        if device == "cuda" and not gpu_answers():
            return


def _results(inputs: Inputs, backend: str, which: str) -> dict[str, Tensor]:
    """Outputs, and gradients where the pass is a backward one."""
    if which != _FORWARD:
        return run(inputs, backend)
    options = inputs.options | {"return_lse": True, "backend": backend}
    o, lse = fastattn.attention(inputs.q, inputs.k, inputs.v, inputs.mask, **options)
    return {"o": o, "lse": lse}
