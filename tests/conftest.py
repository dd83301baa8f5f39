"""Set-up of the whole suite: Triton kernels run in the interpreter wherever there is no GPU."""

import os
import site
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported, so before any test is

# Where make puts torchvision and what needs it. Compiled for another build of torch, it cannot be loaded, and its
# import ends where it gives two of its operators a shape, unless they exist.
VISION = Path(sys.prefix) / "vision"
site.addsitedir(str(VISION))
for _compiled in VISION.glob("torchvision/_C.*"):
    try:
        torch.ops.load_library(_compiled)
    except OSError:
        _operators = torch.library.Library("torchvision", "FRAGMENT")
        for _name in ("nms", "qnms"):
            _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import quick_interpreter  # noqa: E402
from modelled_gpu import backend, gpu_model  # noqa: E402, F401  fixtures; it imports fastattn, and so Triton's kernels
from modelled_hopper import gluon_model  # noqa: E402, F401  a fixture

from fastattn import plan  # noqa: E402

quick_interpreter.install()
collect_ignore = ["faulty_suite.py"]  # which test_gpu_stages.py runs


@pytest.fixture(autouse=True)
def _no_plans_of_other_tests() -> None:
    """Tests replace what plans depend on."""
    plan.forget_plans()
