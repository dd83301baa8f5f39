"""The stage "bench": every task and what it measures. The telling tasks come first, for runs that are cut off."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from fastattn.testing import CASES, Case

from ..cases import DTYPES, PASSES, Job, Problem, inputs_of, make_problem
from ..report import rounded, row_as_dict, timing_as_dict
from ..rivals import Contender, RefusalError, sdpa_by_itself
from ..run import Row, measure_problem, try_out
from ..timing import Call, interleave, matmul
from .compiling import compile_only
from .crew import Rows, Task
from .rivals import gpu_contenders

DTYPE = "bf16"
CEILINGS = "ceilings"
LAUNCH = "launch"
LIMIT_S = 90.0  # of one task: the largest shapes take fp64 and the plain formula some seconds
_BUDGET_S = {"cuda": 0.8, "cpu": 0.0}  # for all rounds of one job
_COPIED_BYTES = {"cuda": 2**32, "cpu": 2**20}
_WHOLE_MODELS = "bert"  # the case that a layer and an encoder are trained on
_ONLY = {  # of a backend, where it is measured alone
    "native": re.compile(r"D(64|128)-N(2048|4096|16384)-(full|causal|pad)|bert|launch"),  # what its targets are about
    "hopper": re.compile(r"(?!bias|dropout).*"),  # what it takes
}
_DRY = ("D128-N4096-causal", "bert", "launch", "left-causal", "bias-N1024")


def tasks(device: str, dry: bool, only: str | None = None) -> list[Task]:
    """Every task by its name, a dry run's in a small size, and those of one backend fewer."""
    return [Task(name, LIMIT_S) for name in [CEILINGS, *_jobs(dry, only)]]


def to_compile(tasks: list[Task], dry: bool) -> list[Task]:
    """One of the tasks for each case: its passes are compiled together."""
    jobs = _jobs(dry)
    return list({jobs[task.name].case.name: task for task in tasks if task.name != CEILINGS}.values())


def serve(
    names: Iterator[str], answer: Callable[[Rows], None], device: str, dry: bool, only: str | None = None
) -> None:
    """Measures each task. Ends early when the GPU is lost to this process.

    Args:
        only: the backend of fastattn to measure, None for all that serve by themselves.
    """
    jobs = _jobs(dry, only)
    for name in names:
        if name == CEILINGS:
            answer(_ceilings(device))
        elif jobs[name].level == LAUNCH:
            answer(_launch(jobs[name], device, only))
        else:
            answer(_measure(jobs[name], device, only))
        if device == "cuda" and not gpu_answers():
            return


def serve_compiling(names: Iterator[str], answer: Callable[[Rows], None], device: str, dry: bool, only=None) -> None:
    """Compiles what attention runs in the case of each task, and keeps nothing else."""
    torch.set_num_threads(1)
    jobs = _jobs(dry)
    for name in names:
        job = replace(jobs[name], level="attention")
        problem = Problem(job, inputs_of(job.case, job.dtype, device, drawn_there=True), {}, {}, 0.0, {})
        for contender in gpu_contenders(problem, only):
            _compile(contender, job.case)
        answer([])


def gpu_answers() -> bool:
    """Whether the GPU still does anything for this process."""
    try:
        torch.cuda.empty_cache()
        return torch.ones(2, device="cuda").sum().item() == 2
    except RuntimeError:
        return False


def _jobs(dry: bool, only: str | None = None) -> dict[str, Job]:
    """The jobs by name, in order."""
    cases = [case for case in CASES if case.timed == "gpu" and (not dry or case.name in _DRY)]
    if only:
        cases = [case for case in cases if _ONLY[only].fullmatch(case.name)]
    found: list[Job] = []
    for case in map(_shrunk, cases) if dry else cases:
        if case.name == LAUNCH:
            found.append(Job(LAUNCH, case, DTYPE, "forward"))
            continue
        found += [Job("attention", case, DTYPE, timed) for timed in (PASSES if case.n_q > 1 else ("forward",))]
        if case.name == _WHOLE_MODELS and not only:  # modules choose for themselves
            found += [Job(level, case, DTYPE, "forward+backward") for level in ("layer", "encoder")]
    return {str(job): job for job in found}


def _shrunk(case: Case) -> Case:
    """The same with few tokens and channels."""
    n_q, n_k = (n if n is None else min(n, 24) for n in (case.n_q, case.n_k))
    bias = None if case.bias is None else (2, n_q, n_k or n_q)
    return replace(case, B=min(case.B, 3), H=2, H_kv=case.H_kv and 1, n_q=n_q, n_k=n_k, D=16, bias=bias)


def _measure(job: Job, device: str, only: str | None) -> Rows:
    problem = make_problem(job, device, outer_heads=device == "cuda", drawn_there=True)
    candidates = gpu_contenders(problem, only)
    return [_as_dict(row) for row in measure_problem(problem, candidates, device, _BUDGET_S[device])]


def _ceilings(device: str) -> Rows:
    """What the machine does at best: the two rates that every other figure is read beside."""
    name, product, operations = matmul(DTYPES[DTYPE], device)
    source = torch.randn(_COPIED_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    copy_name = f"copy of {source.nbytes // 2**20} MiB"
    timings = interleave({name: product, copy_name: Call(lambda: target.copy_(source))}, _BUDGET_S[device], device)
    rates = {
        name: {"dtype": DTYPE, "tflops": rounded(operations / timings[name].median / 1e12)},
        copy_name: {"dtype": "fp32", "gbps": rounded(2 * source.nbytes / timings[copy_name].median / 1e9)},
    }
    row = {"level": CEILINGS, "family": "ceiling", "verdict": "right", "note": ""}
    return [row | rates[which] | {"contender": which, "time_ms": timing_as_dict(timings[which])} for which in rates]


def _launch(job: Job, device: str, only: str | None) -> Rows:
    """What a caller waits for a call so small that the GPU has nothing to do, and what a CUDA graph makes of it."""
    problem = make_problem(replace(job, level="attention"), device, drawn_there=True)
    backends = [c for c in gpu_contenders(problem, only) if c.family == "fastattn" and not c.refusal]
    rows: Rows = []
    for timed in ("forward", "forward+backward"):
        timed_job = replace(job, timed=timed)
        # The results are checked pass by pass: a forward trial has the output, the other one the gradients.
        tried = try_out(replace(problem, job=timed_job), [*backends, *sdpa_by_itself(problem)])
        calls = dict(tried.calls)
        rows += [_as_dict(row) for row in tried.untimed]
        graphs = {}
        for name, contender in tried.right.items():
            if contender.family == "fastattn":
                try:
                    graphs[f"{name}, CUDA graph"] = _captured(contender, timed, device)
                except RefusalError as refusal:
                    failed = device == "cuda"
                    row = Row(timed_job, f"{name}, CUDA graph", "fastattn", "wrong" if failed else "n/a", str(refusal))
                    rows.append(_as_dict(row))
        timings = interleave(calls | graphs, _BUDGET_S[device], device, by_host=True)
        for name, timing in timings.items():
            family = tried.right[name].family if name in tried.right else "fastattn"
            rows.append(_as_dict(Row(timed_job, name, family, "right", "by the host's clock", timing)))
    return rows


def _captured(contender: Contender, timed: str, device: str) -> Call:
    """The replay of a contender's pass as a CUDA graph.

    Raises:
        RefusalError: it cannot be captured, or the replay has other bits than the call.
    """
    if device != "cuda":
        raise RefusalError("CUDA graphs need a GPU")
    call, expected = contender.trial(timed)
    graph = torch.cuda.CUDAGraph()
    try:
        side = torch.cuda.Stream()  # a few calls on another stream first, as PyTorch's manual asks
        side.wait_stream(torch.cuda.current_stream())
        with call.context(), torch.cuda.stream(side):
            for _ in range(3):
                call.run()
        torch.cuda.current_stream().wait_stream(side)
        with call.context(), torch.cuda.graph(graph):
            captured = call.run()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise RefusalError(f"cannot be captured: {str(error).partition(chr(10))[0]}") from error
    found = (captured,) if timed == "forward" else captured
    for (name, value), replayed in zip(expected.items(), found, strict=True):
        if not torch.equal(value, replayed):
            raise RefusalError(f"the graph's {name} has other bits than the call's")
    return Call(graph.replay)


def _compile(contender: Contender, case: Case) -> None:
    """Compiles our kernels without a launch, and FlexAttention's by its first call; others come compiled."""
    try:
        for timed in ("forward", "forward+backward") if case.n_q > 1 else ("forward",):
            if contender.family == "fastattn" and not contender.refusal:
                with compile_only():
                    contender.trial(timed)
            elif contender.name == "FlexAttention":
                contender.trial(timed)
    except RefusalError:
        return  # the stage itself will say it


def _as_dict(row: Row) -> dict[str, object]:
    """A row of the standard report, in TFLOP/s."""
    found = row_as_dict(row)
    gflops = found.pop("gflops")
    return found | {"tflops": None if gflops is None else rounded(gflops / 1e3)}
