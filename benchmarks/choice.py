"""Prints what the automatic choice of a backend costs, as ratios: beside the fastest right backend, and beside PyTorch.

    python benchmarks/choice.py [--dtype fp32 fp64] [--filter "L128 backward"] [--no-kernels] [--compile]

`chosen/fastest` is the time of `attention()` over that of the fastest backend called by name; `chosen/torch` over that
of scaled_dot_product_attention as users call it. Every answer is checked against fp64 before it is timed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import warnings
from dataclasses import replace

import torch

import fastattn
import fastattn.testing
from fastattn.backends import aten, cpu
from fastattn.bench import cases, rivals, run, timing
from fastattn.bench.cases import Job

DTYPES = {**cases.DTYPES, "fp64": torch.float64}


def measure(job: Job, compiled: bool, budget_s: float) -> tuple[str, float, float]:
    """The chosen backend, and the ratios of its time to the fastest one's and to PyTorch's."""
    torch.compiler.reset()  # after eight kinds of calls it would compile no more
    problem = cases.make_problem(job, "cpu")
    problem = replace(problem, inputs=rivals.without_nan(problem.inputs))  # PyTorch's function would answer with NaN
    if job.dtype == "fp64":  # in which the right answer was computed as well
        problem = replace(problem, naive=cases.make_problem(replace(job, dtype="fp32"), "cpu").naive)
    named = [x for x in rivals.contenders(problem) if x.name in (f"fastattn {cpu.NAME}", f"fastattn {aten.NAME}")]
    sdpa, inputs = rivals.sdpa_by_itself(problem)[0], problem.inputs
    options = {} if "dropout_p" not in inputs.options else {"dropout_p": inputs.options["dropout_p"]}
    leaves = rivals.leaves_of(**inputs.learned())
    attend = torch.compile(fastattn.attention) if compiled else fastattn.attention
    chosen = replace(
        sdpa, name="chosen", family="fastattn", tensors=leaves, is_comparable=not options,
        compute=lambda: attend(**leaves, mask=inputs.mask, **options),
    )  # fmt: skip
    tried = run.try_out(problem, [chosen, sdpa, *named])
    if "chosen" not in tried.right:
        raise SystemExit(f"{job}: wrong: {'; '.join(f'{row.contender}: {row.note}' for row in tried.untimed)}")
    took = {name: t.median for name, t in timing.interleave(tried.calls, budget_s, "cpu").items()}
    fastest = min((took[x.name] for x in named if x.name in took), default=took["chosen"])
    explained = fastattn.explain(**leaves, mask=inputs.mask, **options).backend
    return explained, took["chosen"] / fastest, took["chosen"] / took.get(sdpa.name, math.nan)  # which may refuse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--filter", default="", help="only what has every word of this in its name")
    parser.add_argument("--no-kernels", action="store_true", help="as on a machine without a compiler")
    parser.add_argument("--compile", action="store_true", help="attention() under torch.compile")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    args = parser.parse_args()
    cases.DTYPES.update(DTYPES)
    if args.no_kernels:
        warnings.simplefilter("ignore", fastattn.FallbackWarning)
        cpu.unavailable = lambda device: "no compiler"
    timed = [case for case in fastattn.testing.CASES if case.timed in ("standard", "limit")]
    jobs = [Job("attention", case, dtype, p) for case in timed for dtype in args.dtype for p in cases.PASSES]
    ratios, jobs = [], [job for job in jobs if cases.has_words(job, args.filter)]
    if not jobs:
        parser.error(f"--filter must be words of a case, such as 'L128 backward', got {args.filter!r}")
    for job in jobs:
        chosen, to_fastest, to_torch = measure(job, args.compile, args.seconds)
        print(f"{job}: {chosen}, chosen/fastest {to_fastest:.2f}, chosen/torch {to_torch:.2f}", flush=True)
        ratios.append((to_fastest, to_torch))
    to_fastest, to_torch = zip(*ratios, strict=True)
    to_torch = [x for x in to_torch if not math.isnan(x)]
    within, slower = (sum(x <= limit for x in column) for column, limit in ((to_fastest, 1.05), (to_torch, 1.03)))
    print(f"{within} of {len(to_fastest)} within 5 % of the fastest backend")
    print(f"{slower} of {len(to_torch)} at most 3 % slower than PyTorch")
    if to_torch:
        print(f"median over PyTorch's time: {statistics.median(to_torch):.2f}")


if __name__ == "__main__":
    main()
