"""The times of fastattn and its rivals, job by job. The telling jobs come first, for runs that are cut off."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastattn.backends.compiling import compile_only
from fastattn.bench.cases import DTYPES, PASSES, Job, Problem, inputs_of, make_problem
from fastattn.bench.report import rounded, row_as_dict, timing_as_dict
from fastattn.bench.rivals import Contender, RefusalError, sdpa_by_itself
from fastattn.bench.run import Row, measure_problem, try_out
from fastattn.bench.timing import Call, interleave, matmul
from fastattn.testing import CASES, Case

from .record import Rows, finished
from .rivals import gpu_contenders

DTYPE = "bf16"
LAUNCH = "launch"
_BUDGET_S = {"cuda": 0.8, "cpu": 0.0}  # for all rounds of one job
_COPIED_BYTES = {"cuda": 2**32, "cpu": 2**20}
_WHOLE_MODELS = "bert"  # the case that a layer and an encoder are trained on
_OF_CUDA = re.compile(r"D(64|128)-N(2048|4096|16384)-(full|causal|pad)|bert|launch")  # what its targets are about
_ONLY = {  # of a backend, where it is measured alone
    "cuda": _OF_CUDA,
    "cpu": _OF_CUDA,  # which stands in for it in a dry run
    "hopper": re.compile(r"(?!bias|dropout).*"),  # what it takes
}
_DRY = ("D128-N4096-causal", "bert", "launch", "left-causal", "bias-N1024")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives each job to `test_speed`, and the last one of each case to `test_compile`, for all passes."""
    if "job" in metafunc.fixturenames:
        selected = jobs(metafunc.config.option.device, metafunc.config.option.only)
        if metafunc.function is test_compile and (share := metafunc.config.option.share):
            timed = finished(Path(share["path"]), share["stage"], share["sources"])
            selected = [job for job in selected if f"benchmarks/gpu/speed.py::test_speed[{job}]" not in timed]
        by_name = {str(job) if metafunc.function is test_speed else job.case.name: job for job in selected}
        metafunc.parametrize("job", by_name.values(), ids=by_name)


def test_compile(job: Job, pytestconfig: pytest.Config) -> None:
    """Compiles what attention runs in a case, and keeps nothing else."""
    torch.set_num_threads(1)
    device, only = pytestconfig.option.device, pytestconfig.option.only
    inputs = inputs_of(job.case, job.dtype, device, drawn_there=True)
    problem = Problem(replace(job, level="attention"), inputs, {}, {}, 0.0, {})
    for contender in gpu_contenders(problem, only):
        _compile(contender, job.case)


def test_ceilings(pytestconfig: pytest.Config, record_property: Callable[[str, object], None]) -> None:
    """Records what the machine does at best."""
    for row in _ceilings(pytestconfig.option.device):
        record_property("row", row)


def test_speed(job: Job, pytestconfig: pytest.Config, record_property: Callable[[str, object], None]) -> None:
    """Records a row for each contender, which says so where its answer is wrong."""
    device, only = pytestconfig.option.device, pytestconfig.option.only
    if device == "cuda":
        torch.cuda.empty_cache()  # of what the last job held
    for row in _launch(job, device, only) if job.level == LAUNCH else _measure(job, device, only):
        record_property("row", row)


def jobs(device: str, only: str | None = None) -> list[Job]:
    """Every job in order; on the CPU in a small size, and those of one backend fewer."""
    dry = device == "cpu"
    cases = [case for case in CASES if case.timed == "gpu" and (not dry or case.name in _DRY)]
    if only:
        cases = [case for case in cases if _ONLY[only].fullmatch(case.name)]
    selected: list[Job] = []
    for case in map(_shrunk, cases) if dry else cases:
        if case.name == LAUNCH:
            selected.append(Job(LAUNCH, case, DTYPE, "forward"))
            continue
        selected += [Job("attention", case, DTYPE, timed) for timed in (PASSES if case.n_q > 1 else ("forward",))]
        if case.name == _WHOLE_MODELS and not only:  # modules choose for themselves
            selected += [Job(level, case, DTYPE, "forward+backward") for level in ("layer", "encoder")]
    return selected


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
    row = {"level": "ceilings", "family": "ceiling", "verdict": "right", "note": ""}
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
    actual = (captured,) if timed == "forward" else captured
    for (name, value), replayed in zip(expected.items(), actual, strict=True):
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
    fields = row_as_dict(row)
    gflops = fields.pop("gflops")
    return fields | {"tflops": None if gflops is None else rounded(gflops / 1e3)}
