"""Training on several processes, which share each batch (data parallel), its tokens (context parallel) and the weights.

    torchrun --nproc-per-node 2 -m examples.translation.parallel --data examples/translation/data --context 2

The losses that it prints are those of one process, within rounding: the tokens of a sentence are on `--context`
processes, whose attention reaches all of them by `fastattn.parallel`, and `fully_shard` keeps of each weight a part on
each of them. On GPUs, the same with the group "nccl" and a mesh of "cuda".
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastattn
from fastattn import Mask

from ..training import InputError, exit_code, inverse_sqrt, positive_int, seed, seed_everything
from .batches import Batch, bucketed, collate
from .text import PAD
from .train import CLIP_NORM, add_model_arguments, make_model, make_optimizer, training_data


def make_parser() -> argparse.ArgumentParser:
    """The options of the program."""
    parser = argparse.ArgumentParser(prog="torchrun -m examples.translation.parallel", description=__doc__)
    add_model_arguments(parser)
    parser.set_defaults(dropout=0.0)
    group = parser.add_argument_group("training")
    group.add_argument("--context", type=positive_int, default=1, metavar="N", help="processes that share a sentence")
    group.add_argument("--steps", type=positive_int, default=100, metavar="N", help="default: 100")
    group.add_argument("--warmup", type=positive_int, default=800, metavar="N", help="steps; default: 800")
    group.add_argument("--seed", type=seed, default=0, metavar="N", help="default: 0")
    return parser


def losses(args: argparse.Namespace, mesh: DeviceMesh | None) -> Iterator[float]:
    """The loss of each step: the cross-entropy of the target tokens of a whole batch, the same on every process.

    Args:
        args: the options of `make_parser`.
        mesh: its dimension "samples" shares out the sentences of a batch, and "tokens" those of a sentence. None is
            plain training on one process.
    """
    if args.dropout:
        raise InputError(f"--dropout must be 0 on several processes, got {args.dropout}")
    seed_everything(args.seed)  # so that all processes begin with the same weights
    _, vocabularies, data = training_data(args)
    model = make_model(args, vocabularies)
    if mesh is not None:
        for layer in (*model.encoder.layers, *model.decoder.layers):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model, args.learning_rate)
    schedule = inverse_sqrt(optimizer, args.warmup)
    generator = torch.Generator().manual_seed(args.seed)
    batches = chain.from_iterable(bucketed(data, args.tokens, generator) for _ in count())
    for indices in islice(batches, args.steps):
        batch = collate([data[i] for i in indices])
        tokens = (batch.target_out != PAD).sum()
        loss = _loss(model, batch, mesh) / tokens
        # Gradients of sharded weights are means over the processes, each of which has a part of the sum.
        torch.autograd.backward(loss * (1 if mesh is None else mesh.size()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss = loss.detach()
        for group in () if mesh is None else mesh.get_all_groups():
            dist.all_reduce(loss, group=group)
        yield loss.item()


def _loss(model: fastattn.nn.Seq2SeqModel, batch: Batch, mesh: DeviceMesh | None) -> Tensor:
    """The sum of the cross-entropy over the target tokens that this process has of a batch."""
    block: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if mesh is not None:
        ranks, rank = mesh["samples"].size(), mesh["samples"].get_local_rank()
        batch = Batch(*(F.pad(x, (0, 0, 0, -len(x) % ranks), value=PAD).chunk(ranks)[rank] for x in batch))
        real = (batch.source != PAD, batch.target_in != PAD)
        plan_source, plan = (
            fastattn.parallel.plan(Mask(causal, real_keys=x, real_queries=x), x.shape[1], mesh["tokens"])
            for causal, x in zip((False, True), real, strict=True)
        )
        batch = Batch(plan_source.shard(batch.source, 1), *(plan.shard(x, 1) for x in batch[1:]))
        block = fastattn.parallel.context_parallel(plan, source=plan_source)
    with block:
        logits = model(batch.source, batch.target_in)
    return F.cross_entropy(logits.flatten(0, 1), batch.target_out.flatten(), ignore_index=PAD, reduction="sum")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program on the processes that torchrun has started, and returns its exit code."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("it must be started by torchrun, got none of its variables, such as RANK")
    dist.init_process_group("gloo")
    world = dist.get_world_size()

    def program() -> None:
        if world % args.context:
            raise InputError(f"--context must divide the {world} processes, got {args.context}")
        mesh = init_device_mesh("cpu", (world // args.context, args.context), mesh_dim_names=("samples", "tokens"))
        for step, loss in enumerate(losses(args, mesh)):
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss:.5f}", flush=True)

    try:
        return exit_code(program)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    # Not sys.exit: while Python ends, threads of gloo groups may abort the process (pytorch/pytorch#190489).
    os._exit(main())
