"""The child process of `fastattn tune`, which checks and runs backends as it is told: a crash ends it alone.

One request a line on stdin, as JSON: the name of a function of `Child` and its arguments. One answer a line on stdout.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import IO

import torch
from torch import Tensor

from fastattn import Mask
from fastattn.backends import reference, selfcheck
from fastattn.backends.compiling import compiled_at_once
from fastattn.spec import Spec

_LEAK_BYTES, _CALLS_FOR_A_LEAK = 2**25, 24
Shape = tuple[int, int, int, int]
SHAPES: dict[str, dict[int, Shape]] = {
    "cpu": {1: (8, 8, 1, 1024), 128: (8, 8, 128, 128), 1024: (2, 8, 512, 512), 0: (1, 8, 1536, 1536)},
    "cuda": {1: (16, 16, 1, 4096), 128: (32, 16, 128, 128), 1024: (8, 16, 1024, 1024), 0: (4, 16, 4096, 4096)},
}
"""By type of the device, B, H, n_q and n_k of the calls that stand for a length of `CallClass`: of some milliseconds on
a core, and of enough programs for a large GPU."""


class Child:
    """The state of the process: the problem that is timed, and the latest results."""

    def check(self, module: str, device: str, dtype: str, training: bool) -> dict[str, str | None]:
        """What is wrong with a family of kernels, as `fault`, or why it cannot be had, as `missing`."""
        backend, place = importlib.import_module(module), torch.device(device)
        if why := backend.unavailable(place):
            return {"missing": why}
        fault = selfcheck.find_fault(backend, place, getattr(torch, dtype), training)
        return {"fault": fault or self._leak(module, device, dtype, training)}

    def problem(
        self, device: str, dtype: str, head_dim: int, length: int, mask: str, training: bool, shape: Shape | None = None
    ) -> dict:
        """Draws the tensors of a class of calls, of that shape or that which stands for its length."""
        (B, H, n_q, n_k), D = shape or SHAPES[torch.device(device).type][length], head_dim
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(getattr(torch, dtype))

        self.device, self.training = torch.device(device), training
        self.inputs = normal(B, H, n_q, D), normal(B, H, n_k, D), normal(B, H, n_k, D)
        self.do, self.results = normal(B, H, n_q, D), []
        lengths = torch.linspace(n_k / 4, n_k, B).long() if B > 1 else torch.tensor([5 * n_k // 8])
        masks = {
            "none": Mask,
            "causal": lambda: Mask(causal=True),
            "padding": lambda: Mask(real_keys=(torch.arange(n_k) < lengths[:, None]).to(device)),
            "other": lambda: Mask(dense=torch.rand(B, 1, n_q, n_k, generator=generator, device=device) < 0.7),
        }
        self.spec = Spec(masks[mask](), D**-0.5)
        return {}

    def compile(self, modules: list[str], problems: list[dict[str, object]]) -> dict:
        """Compiles side by side what these backends of Triton's kernels run in these classes of calls."""
        with compiled_at_once():
            for problem in problems:
                self.problem(**problem)
                for module in modules:
                    if self.takes(module)["takes"]:
                        self._compute(importlib.import_module(module), self.inputs, self.do, self.spec)
        return {}

    def takes(self, module: str) -> dict[str, bool]:
        """Whether a backend has no objection to the problem."""
        backend = importlib.import_module(module)
        known = self.spec.features() <= backend.features(self.device)
        return {"takes": known and not backend.unsupported(*self.inputs, self.spec)}

    def run(self, module: str, times: int, tile: tuple[str, str] | None = None) -> dict:
        """Computes the problem so many times, and waits for the device.

        Args:
            tile: the name of a Triton kernel and a tile of `tiles_to_try`, which it has from now on.
        """
        backend = importlib.import_module(module)
        if tile is not None:
            self._use(*tile)
        for _ in range(times):
            self.results = self._compute(backend, self.inputs, self.do, self.spec)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return {}

    def compare(self) -> dict[str, str | None]:
        """What is wrong with the latest results, of the first head and the last, as `fault`."""
        q, k, v = self.inputs
        for b, h in {(0, 0), (q.shape[0] - 1, q.shape[1] - 1)}:
            one = (slice(b, b + 1), slice(h, h + 1))
            mask = self.spec.mask
            if mask.real_keys is not None:
                mask = Mask(real_keys=mask.real_keys[one[0]])
            elif mask.dense is not None:
                mask = Mask(dense=mask.dense[one[0]])
            inputs = [x[one].double() for x in (q, k, v)]
            right = self._compute(reference, inputs, self.do[one].double(), Spec(mask, self.spec.scale))
            for name, x, exact in zip(selfcheck.OUTPUTS, self.results, right, strict=False):
                if why := selfcheck.difference(x[one], exact, q.dtype):
                    return {"fault": f"{name} of a timed call {why}"}
        return {"fault": None}

    def _compute(self, backend: ModuleType, inputs: list[Tensor], do: Tensor, spec: Spec) -> list[Tensor]:
        o, lse = backend.forward(*inputs, spec)
        if not self.training:
            return [o, lse]
        wanted = (True, True, True, False, False, False)
        return [o, lse, *backend.backward(do, None, *inputs, o, lse, spec, wanted)[:3]]

    def _use(self, kernel: str, tile: str) -> None:
        from fastattn.backends.triton import configs, launches

        if configs.in_place_of.get(kernel) != tile:
            if tile not in (known := configs.tiles_to_try(self.inputs[0]).get(kernel, ())):
                raise ValueError(f"{kernel} has the tiles {known}, not {tile}")
            configs.in_place_of[kernel] = tile
            launches.forget()

    def _leak(self, module: str, device: str, dtype: str, training: bool) -> str | None:
        """A sentence that says how memory grows from call to call, if it does."""
        self.problem(device, dtype, 64, 128, "none", training)
        self.run(module, 4)
        before = _resident_bytes()
        self.run(module, _CALLS_FOR_A_LEAK)
        grown = _resident_bytes() - before
        return None if grown < _LEAK_BYTES else f"{_CALLS_FOR_A_LEAK} calls left {grown >> 20} MiB behind"


def _resident_bytes() -> int:
    """Memory of this process, where Linux tells it; 0 elsewhere."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.is_file() else 0


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answers requests until there are no more."""
    child = Child()
    for line in requests:
        name, arguments = json.loads(line)
        try:
            answer = getattr(child, name)(**arguments)
        except torch.OutOfMemoryError as error:
            answer = {"full": str(error).partition("\n")[0]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as only_answers:
        os.dup2(2, 1)  # what a backend prints is no answer
        torch.set_grad_enabled(False)
        torch.backends.cuda.matmul.fp32_precision = "ieee"  # which `compare` expects, whatever the environment says
        serve(sys.stdin, only_answers)
