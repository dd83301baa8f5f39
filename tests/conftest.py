"""Set-up of the whole suite: Triton kernels run in the interpreter wherever there is no GPU."""

import importlib.util
import os
from collections.abc import Callable, Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported, so before any test is
# Or inductor compiles and runs a program for each instruction set. For every test, since it keeps what it found for the
# whole process, and graphs on disk for all of them.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
os.environ["FASTATTN_RECORD"] = "0"  # what `fastattn tune` found on this machine is nothing to a test

import torchvision_import  # noqa: F401  for whatever imports torchvision
from modelled_gpu import CUDA_MACHINES, PTX_MACHINES, backend, hopper_gpu  # noqa: F401  fixtures; imports Triton's kernels

from fastattn import plan
from fastattn.backends import build

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:  # not on macOS
    import quick_interpreter

    quick_interpreter.install()
build.CPU.unavailable(whole=True)  # tests choose among the instruction sets, of which the first use compiles some only
collect_ignore = ["bench/faulty_suite.py"]  # which test_gpu_stages.py runs
if not PTX_MACHINES:  # these are for `make ptx`
    of_compiled = ("test_hopper_forward.py", "test_hopper_backward.py", "test_hopper_fused.py", "test_hopper_faults.py")
    collect_ignore += ["gpu_models/test_ptx_kernels.py", *(f"backends/{name}" for name in of_compiled)]
if not CUDA_MACHINES:
    collect_ignore.append("gpu_models/test_cuda_kernels.py")


@pytest.fixture(autouse=True)
def _no_plans_of_other_tests() -> None:
    """Tests replace what plans depend on."""
    plan.forget_plans()


@pytest.fixture(autouse=True)
def _threads_of_other_tests() -> Iterator[None]:
    """A test may set PyTorch's number of threads; bits of MKL's products depend on it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def error_of(capsys) -> Callable[[Callable[[], int]], str]:
    """Runs a command of an example that must end with 1, and gives back the one line that it says."""

    def said(command: Callable[[], int]) -> str:
        capsys.readouterr()
        assert command() == 1
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return said
