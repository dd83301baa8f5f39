"""Attention over many processes: tokens shared out by what a mask shows, and exchanged by torch.distributed."""

from .context import context_parallel
from .plans import Plan, plan
from .tensors import HeadwiseParallel, tensor_parallel_plan

__all__ = ["HeadwiseParallel", "Plan", "context_parallel", "plan", "tensor_parallel_plan"]
