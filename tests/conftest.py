"""Set-up of the whole suite: Triton kernels run in the interpreter wherever there is no GPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are imported, so before any test is
