"""Attention over many processes: tokens shared out by what a mask shows, and exchanged by torch.distributed."""

from .plans import Plan, plan

__all__ = ["Plan", "plan"]
