"""Attention over many processes: tokens shared out by what a mask shows, and exchanged by torch.distributed."""

from .context import context_parallel
from .plans import Plan, plan

__all__ = ["Plan", "context_parallel", "plan"]
