"""`python -m fastattn.bench.gpu` as far as a CPU goes: its machinery in a dry run, and what it makes of figures."""

import itertools
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from crews import serve, serve_verdicts

import fastattn
from fastattn import testing
from fastattn.backends import hopper
from fastattn.bench import cases, run, timing
from fastattn.bench.gpu import __main__ as command
from fastattn.bench.gpu import render, rivals, speed, stages, targets, tries, truth
from fastattn.bench.gpu.crew import Crew, CrewError, Task, answers
from fastattn.bench.gpu.results import Results, file_name, is_failure
from fastattn.testing import CASES, make_inputs

ROOT = Path(__file__).parent.parent
ENCODERS = ("torch.nn.TransformerEncoder", "torch.nn.TransformerEncoder, fastattn.swap")


def soon(seconds=250.0):
    return time.monotonic() + seconds


def test_a_worker_that_dies_or_hangs_costs_one_task():
    tasks = [Task(name, 1.0 if name == "hangs" else 200.0) for name in ("a", "dies", "b", "hangs", "c", "leaves", "d")]
    found = {answer.task.name: answer for answer in answers([Crew(serve, tasks, options={"begin": "I "})], soon())}
    assert list(found) == [task.name for task in tasks]
    assert [answer.rows[0]["said"] for answer in found.values()] == [f"I {task.name}" for task in tasks]
    assert found["dies"].failure == "died: exit code 7; out of ink"
    assert found["hangs"].failure.startswith("hung: no answer in 1 s")
    assert not any(found[name].failure for name in ("a", "b", "c", "leaves", "d"))
    workers = [answer.rows[0]["by"] for answer in found.values()]
    replaced = [before != after for before, after in itertools.pairwise(workers)]
    assert replaced == [False, True, False, True, False, True]  # after dies, hangs, leaves


def test_workers_share_the_tasks_of_a_crew():
    found = list(answers([Crew(serve, [Task(str(n)) for n in range(4)], workers=2), Crew(serve, [])], soon()))
    assert sorted(answer.task.name for answer in found) == ["0", "1", "2", "3"]


def test_the_deadline_stops_all():
    start = time.monotonic()
    assert list(answers([Crew(serve, [Task("hangs")])], soon(2.5))) == []
    assert time.monotonic() - start < 30


def test_a_crew_that_cannot_start_says_why():
    with pytest.raises(CrewError, match="died: exit code 3; there is no paper"):
        list(answers([Crew(serve, [Task("a")], options={"begin": "fails"})], soon()))


def dry_run(stage, folder, monkeypatch):
    """All that a stage wrote."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two threads wait long on a busy machine
    assert command.main([stage, "--device", "cpu", "--out", str(folder)]) == 0
    (path,) = folder.glob("*.json")
    document = json.loads(path.read_text())
    assert [(run["stage"], run["left"]) for run in document["runs"]] == [(stage, 0)]
    assert [row for row in document["rows"] if row["verdict"] not in ("right", "n/a")] == []  # of rivals too
    return document["rows"]


def test_a_dry_run_of_truth_tests_each_backend(tmp_path, monkeypatch):
    tests = {row["test"] for row in dry_run("truth", tmp_path, monkeypatch)}
    for backend in set(truth.backend_names()) - {hopper.NAME}:  # which runs on the CPU only as gluon_model
        for case in ("plain-torch.bfloat16", "one-query-torch.float16"):
            assert f"tests/test_conformance.py::test_case_is_right_or_refused[{backend}-cpu-{case}]" in tests
        assert f"tests/test_truth.py::test_case_of_pytorch_196678[{backend}-cpu]" in tests


def test_a_dry_run_of_bench_measures_every_task(tmp_path, monkeypatch):
    rows = dry_run("bench", tmp_path, monkeypatch)
    assert {row["task"] for row in rows} == {task.name for task in speed.tasks("cpu", dry=True)}
    assert {row["contender"] for row in rows if row["level"] == "encoder"} == set(ENCODERS)
    own = [row for row in rows if row["contender"] == "fastattn native"]
    assert {row["level"] for row in own} == {"attention", "launch"}
    for row in own:
        assert row["verdict"] == "right"
        assert row["time_ms"]["p20"] <= row["time_ms"]["median"] <= row["time_ms"]["p80"]
        if row["level"] == "attention":
            assert min(row[name] for name in ("tflops", "gbps", "peak_mib", "max_error")) > 0


def test_a_dry_run_of_cuda_builds_tests_and_measures_native_alone(tmp_path, monkeypatch):
    rows = dry_run("cuda", tmp_path, monkeypatch)
    tasks = {row["task"] for row in rows}
    assert {"build", "build for 7.5+PTX"} <= tasks
    own_code = {row["task"] for row in rows if "test" in row and row["task"] == row["test"]}
    older_code = {row["task"] for row in rows if "test" in row and row["task"] == f"{row['test']} for 7.5+PTX"}
    cases = ("case_is_right_or_refused[native-cpu-one-query-torch.float16]", "case_of_pytorch_196678[native-cpu]")
    for found in (own_code, older_code):
        assert all(any(case in task for task in found) for case in cases)
    assert own_code | older_code == {row["task"] for row in rows if "test" in row}
    assert all("[native-cpu" in task for task in own_code | older_code)

    timed = [row for row in rows if "contender" in row]
    assert {row["task"] for row in timed} == {task.name for task in speed.tasks("cpu", dry=True, only="native")}
    assert {row["level"] for row in timed} == {"ceilings", "attention", "launch"}
    of_attention = {row["contender"] for row in timed if row["level"] == "attention"}
    assert of_attention == {"fastattn native", "SDPA flash"}
    assert all(row["verdict"] == "right" for row in timed if row["contender"] == "fastattn native")


def test_a_dry_run_of_hopper_tries_and_measures_that_alone(tmp_path, monkeypatch):
    """On a CPU, which the backend refuses: each of its rows says so."""
    rows = dry_run("hopper", tmp_path, monkeypatch)
    why = "needs an NVIDIA GPU, got cpu"
    tried = [row for row in rows if row["task"].startswith("try ")]
    assert [row["task"] for row in tried] == [task.name for task in tries.tasks(dry=True)]
    assert {(row["verdict"], row["note"]) for row in tried} == {("n/a", why)}

    timed = [row for row in rows if "contender" in row]
    assert {row["task"] for row in timed} == {task.name for task in speed.tasks("cpu", dry=True, only="hopper")}
    assert len(tried) + len(timed) == len(rows)
    of_backward = [row for row in timed if row.get("pass") == "backward"]
    expected = {"fastattn hopper", "fastattn hopper, deterministic=False"}
    assert {row["contender"] for row in of_backward if row["family"] == "fastattn"} == expected
    assert {(row["verdict"], row["note"]) for row in timed if row["family"] == "fastattn"} == {("n/a", why)}
    assert {row["verdict"] for row in timed if row["contender"] == "SDPA flash"} == {"right"}


def test_first_calls_are_held_to_the_error_budget(monkeypatch):
    """By another backend, since the one that they are for needs a GPU."""
    names = [task.name for task in tries.tasks(dry=False)]
    assert len(names) == len(set(names)) == 3 * 3 * 4 * 3
    first = [name for name in names if ": tile D64 " in name] + ["try backward: head D128 documents"]
    rows = []
    tries.serve(iter(first), rows.extend, "cpu", only="native")
    assert [(row["verdict"], row["note"]) for row in rows] == [("right", "")] * 13
    right, asked = fastattn.attention, []

    def wrong(*args, backend, deterministic, **options):
        asked.append((backend, deterministic))
        factor = 1.1 if backend == "native" else 1.0
        return tuple(factor * x for x in right(*args, backend=backend, **options))

    monkeypatch.setattr(testing, "attention", wrong)
    rows.clear()
    tries.serve(iter(["try backward, deterministic=False: tile D64 full"]), rows.extend, "cpu", only="native")
    assert ("native", False) in asked
    assert rows[0]["verdict"] == "wrong"
    assert rows[0]["note"].startswith("o: max error")


def test_a_stage_about_a_backend_that_refuses_the_gpu_says_so(tmp_path):
    stage = stages.Stage("hopper", Results(tmp_path, "cpu"), "cpu", 10.0)
    stage.dry = False
    with pytest.raises(stages.StageError, match="hopper needs an NVIDIA GPU, got cpu"):
        stage.run()


def test_backward_on_hopper_is_timed_in_any_order_too(monkeypatch):
    case = speed._shrunk(next(case for case in CASES if case.name == "D128-N4096-causal"))
    problem = cases.make_problem(cases.Job("attention", case, "bf16", "backward"), "cpu")
    found = {c.name: c for c in rivals.gpu_contenders(problem, "hopper") if c.family == "fastattn"}
    asked = []
    monkeypatch.setattr(fastattn, "attention", lambda *args, **options: asked.append(options))
    for contender in found.values():
        contender.compute()
    assert list(found) == ["fastattn hopper", "fastattn hopper, deterministic=False"]
    assert [options["backend"] for options in asked] == ["hopper", "hopper"]
    assert [options.get("deterministic", True) for options in asked] == [True, False]
    forward = replace(problem, job=replace(problem.job, timed="forward"))
    assert not any("deterministic" in c.name for c in rivals.gpu_contenders(forward, "hopper"))


def test_what_native_is_promised_on_a_gpu_is_timed():
    cases = {task.name.split()[1] for task in speed.tasks("cuda", dry=False, only="native") if " " in task.name}
    promised = {found.promise.split()[0].rstrip(",") for found in targets.outcomes([{"stage": "cuda", "verdict": "x"}])}
    assert cases - {"launch"} == promised - {"forward", "forward+backward"}


def test_a_stage_is_about_native_on_the_gpu_or_all_but_that():
    for id_ in ("t.py::a[native-cuda]", "t.py::a[right-native-cuda]", "t.py::a[native-cuda-plain-torch.float16]"):
        assert truth.belongs(id_, "native", "cuda")
        assert not truth.belongs(id_, None, "cuda")
    for id_ in ("t.py::a[native-cpu]", "t.py::a[triton-cuda]", "t.py::native_cuda", "t.py::a[native-x-cuda]"):
        assert not truth.belongs(id_, "native", "cuda")
        assert truth.belongs(id_, None, "cuda")


def test_the_older_code_is_asked_for_in_the_worker_alone(monkeypatch, tmp_path):
    file = tmp_path / "test_older.py"
    file.write_text("import os\ndef test_a(): assert os.environ['TORCH_CUDA_ARCH_LIST'] == '7.5+PTX'\n")
    monkeypatch.setattr(truth, "TEST_FILES", (str(file),))
    monkeypatch.setattr(truth, "REPOSITORY", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv(truth.ARCH_LIST, "9.0")  # so that it is undone
    rows = []
    truth.serve(iter([truth.named("test_older.py::test_a", "7.5+PTX")]), rows.extend, "cpu", archs="7.5+PTX")
    assert [(row["test"], row["verdict"]) for row in rows] == [("test_older.py::test_a", "right")]


def test_a_build_that_fails_ends_the_stage_with_what_the_compiler_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler is there
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "modules"))
    (tmp_path / "modules" / "fastattn").mkdir(parents=True)
    (tmp_path / "modules" / "fastattn" / "x.log").write_text("ptxas: out of registers")
    monkeypatch.delenv("CXX", raising=False)
    assert command.main(["cuda", "--device", "cpu", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "cuda: the native module was not built: exit code 1; ptxas: out of registers" in said
    (path,) = (tmp_path / "out").glob("*.json")
    assert {(row["task"], row["verdict"]) for row in json.loads(path.read_text())["rows"]} == {
        ("build", "wrong"), ("build for 7.5+PTX", "wrong"),
    }  # fmt: skip


@pytest.fixture
def three_tasks(monkeypatch):
    """The stage "bench" has a task that is right, one that is wrong, and one whose worker dies."""
    monkeypatch.setattr(speed, "serve", serve_verdicts)
    monkeypatch.setattr(speed, "tasks", lambda device, dry, only: [Task(name) for name in ("right", "wrong", "dies")])


def test_a_stage_goes_on_where_it_stopped_and_tells_what_failed(three_tasks, tmp_path, capsys, monkeypatch):
    def bench(*options):
        code = command.main(["bench", "--device", "cpu", "--out", str(tmp_path), *options])
        (path,) = tmp_path.glob("*.json")
        said = capsys.readouterr().err
        rows = json.loads(path.read_text())["rows"]
        return code, said, {row["task"]: row["verdict"] for row in rows if row.get("family") != "torch"}

    monkeypatch.setattr(render, "render", lambda path: [])
    monkeypatch.setattr(render, "summary", lambda document, stage: "")
    code, said, verdicts = bench()
    assert (code, verdicts) == (1, {"right": "right", "wrong": "wrong", "dies": "died"})
    assert "2 of 6 rows are failures" in said
    assert "wrong: it is wrong" in said
    assert "dies: died: exit code 7" in said
    assert "3 of 3 tasks to do" in said
    code, said, verdicts_then = bench()
    assert (code, verdicts_then) == (1, verdicts)
    assert "0 of 3 tasks to do" in said
    assert "2 of 3 tasks to do" in bench("--again")[1]
    monkeypatch.setattr("fastattn.bench.gpu.results.sources", lambda: "others")
    assert "3 of 3 tasks to do" in bench()[1]


def test_a_stage_that_runs_out_of_time_is_not_done(three_tasks, tmp_path, capsys):
    assert command.main(["bench", "--device", "cpu", "--out", str(tmp_path), "--seconds", "0"]) == 1
    assert "bench: 3 tasks are left; the same command goes on with them" in capsys.readouterr().err


def test_a_stage_without_its_backend_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(truth, "backend_names", lambda: ["triton", "native"])
    assert command.main(["hopper", "--device", "cpu", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "hopper: stage hopper needs a backend of that name, and there are only triton, native" in said
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_a_stage_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["truth"]) == 1
    assert "torch sees no CUDA device here" in capsys.readouterr().err


def test_a_wrong_answer_of_ours_is_a_failure(monkeypatch):
    right = fastattn.attention
    monkeypatch.setattr(fastattn, "attention", lambda *args, **options: right(*args, **options) * 1.1)
    rows = []
    speed.serve(iter(["attention D128-N4096-causal bf16 forward"]), rows.extend, "cpu", dry=True)
    verdicts = {row["contender"]: (row["verdict"], is_failure(row)) for row in rows}
    assert verdicts["fastattn native"] == ("wrong", True)
    assert verdicts["SDPA flash"] == ("right", False)


def test_only_some_heads_are_checked_where_heads_are_grouped():
    case = replace(next(case for case in CASES if case.name == "grouped-causal"), B=2, H=6, H_kv=3, n_q=20, D=8)
    problem = cases.make_problem(cases.Job("attention", case, "fp32", "backward"), "cpu", outer_heads=True)
    assert problem.key_heads == [0, 2]
    results = testing.run(problem.inputs, "reference")
    assert run.wrong(run.errors(problem, results)) == ""
    for name, heads in (("dq", (0, 1, 4, 5)), ("dk", (0, 2))):
        for head in range(results[name].shape[1]):
            broken = results[name].clone()
            broken[:, head] += 1
            assert bool(run.wrong(run.errors(problem, {name: broken}))) == (head in heads)


def test_bytes_count_each_tensor_once_and_no_padding():
    case = replace(CASES[0], B=2, H=4, H_kv=2, n_q=8, D=16, keys="right", queries=True)
    inputs = make_inputs(case, torch.float16)
    tokens = int(inputs.mask.real_keys.sum())
    assert tokens < 2 * 8
    forward = 2 * tokens * 16 * (4 + 2 + 2 + 4)  # q, k, v, o
    assert cases.least_bytes(inputs, "forward") == pytest.approx(forward)
    assert cases.least_bytes(inputs, "backward") == pytest.approx(2 * forward)  # and the gradient of each
    with_bias = make_inputs(replace(CASES[0], n_q=8, bias=(2, 8, 8)), torch.float16)
    without = make_inputs(replace(CASES[0], n_q=8), torch.float16)
    assert cases.least_bytes(with_bias, "forward") - cases.least_bytes(without, "forward") == 2 * 2 * 8 * 8


def test_who_makes_tables_is_refused_where_they_fill_the_gpu(monkeypatch):
    case = replace(CASES[0], B=2, H=3, n_q=4, n_k=5, D=8)
    problem = cases.make_problem(cases.Job("attention", case, "bf16", "forward"), "cpu")
    for largest, expected in ((2 * 3 * 4 * 5 * 2, set()), (2 * 3 * 4 * 5 * 2 - 1, {"SDPA math", "naive"})):
        monkeypatch.setattr(rivals, "_LARGEST_TABLE_BYTES", largest)
        refusals = {c.name: c.refusal for c in rivals.gpu_contenders(problem)}
        assert {name for name, why in refusals.items() if why and why.startswith("makes tables")} == expected


def test_sentences_are_short_on_average():
    real = make_inputs(next(case for case in CASES if case.name == "bert"), torch.float16, seed=1).mask.real_keys
    lengths = real.sum(1)
    assert 120 < lengths.float().mean() < 140
    assert (lengths.min(), lengths.max()) == (1, 512)


def test_tests_are_run_by_name_and_their_failures_told(monkeypatch, tmp_path):
    file = tmp_path / "test_it.py"
    file.write_text(
        "import pytest\n"
        "def test_a(record_property): record_property('torch', 'all NaN')\n"
        "def test_b(): assert 1 == 2, 'they differ'\n"
        "def test_c(): pytest.skip('no time')\n"
    )
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # so that it is undone
    monkeypatch.setattr(truth, "TEST_FILES", (str(file),))
    monkeypatch.setattr(truth, "REPOSITORY", tmp_path)
    rows = []
    truth.serve(
        iter([truth.FIRST, "test_it.py::test_b", "test_it.py::test_c", "test_it.py::test_a"]), rows.extend, "cpu"
    )
    assert rows[0] == {"ids": [f"test_it.py::test_{x}" for x in "abc"]}
    assert [row["verdict"] for row in rows[1:]] == ["wrong", "skipped", "right"]
    assert rows[1]["note"].startswith("AssertionError: they differ")
    assert "no time" in rows[2]["note"]
    assert rows[3]["note"] == "torch: all NaN"

    compiled = []
    truth.serve(iter(["test_it.py::test_b", "test_it.py::test_a"]), compiled.append, "cpu", compiling=True)
    assert compiled == [[], []]


@pytest.mark.parametrize(
    ("exit_code", "verdict", "note"),
    [
        (0, "right", "ERROR SUMMARY: 1 error"),
        (99, "wrong", "COMPUTE-SANITIZER; Invalid __global__ read; ERROR SUMMARY: 1 error"),
        (1, "n/a", "exit code 1; COMPUTE-SANITIZER; Invalid __global__ read; ERROR SUMMARY: 1 error; no device\n"),
    ],
    ids=["clean", "errors", "broken"],
)
def test_the_sanitizer_is_heard(tmp_path, monkeypatch, exit_code, verdict, note):
    said = ["COMPUTE-SANITIZER", "Invalid __global__ read", "ERROR SUMMARY: 1 error"]
    program = tmp_path / "compute-sanitizer"
    lines = [*(f"echo '========= {line}'" for line in said), "echo hello", "echo no device >&2", f"exit {exit_code}"]
    program.write_text("\n".join(["#!/bin/sh", f"echo $@ > {tmp_path}/called", *lines]))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    rows = []
    truth.serve_sanitizer(iter([task.name for task in truth.sanitizer_tasks(["triton"])]), rows.extend)
    assert rows == [{"verdict": verdict, "note": note}] * 3
    assert (tmp_path / "called").read_text().split()[:2] == ["--tool", "initcheck"]


def test_kernels_are_compiled_for_the_tests_that_launch_some():
    assert truth.compiles("tests/a.py::test_b[triton-plain-torch.float16]", ["triton"])
    assert truth.compiles("tests/a.py::test_b[q-triton]", ["triton"])
    assert not truth.compiles("tests/a.py::test_triton[native-plain]", ["triton"])


def test_flex_attention_is_given_the_same_mask():
    from torch.nn.attention.flex_attention import create_mask

    for case in (case for case in CASES if case.timed == "gpu"):
        small = speed._shrunk(case)
        inputs = make_inputs(small, torch.float32)
        if not inputs.mask.features():
            continue
        n_k = inputs.k.shape[2]
        told = create_mask(rivals._mask_mod(inputs.mask), small.B, None, small.n_q, n_k, "cpu")
        assert torch.equal(told, inputs.mask.keep(small.n_q, n_k).expand_as(told)), case


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_given_the_same_scores():
    job = cases.Job(
        "attention", speed._shrunk(next(case for case in CASES if case.name == "bias-N1024")), "fp32", "forward"
    )
    problem = cases.make_problem(job, "cpu")
    flex = rivals._flex(problem.inputs)
    flex.tensors.update({name: x.detach_() for name, x in flex.tensors.items()})  # on the CPU it has no backward
    torch.testing.assert_close(flex.compute().double(), problem.exact["o"], rtol=1e-4, atol=1e-4)


def test_the_gpu_clock_starts_with_a_cold_cache_and_a_busy_gpu(monkeypatch):
    happened, now = [], [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]
            happened.append("event")

        def elapsed_time(self, end):
            return 1e3 * (end.at - self.at)

    class Scratch:
        def zero_(self):
            happened.append("flush")
            now[0] += 0.001

    def call():
        happened.append("call")
        now[0] += 0.003

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: Scratch())
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    found = timing.interleave({"a": timing.Call(call)}, 0.0, "cuda")["a"]
    assert found.repetitions == 1
    assert found.seconds == pytest.approx((0.003,) * timing.MIN_ROUNDS)
    # The host took 3 ms to queue the call, and one overwriting takes 1 ms: 1 + 1.5 * 3 of them keep the GPU busy.
    assert happened[-10:] == ["wait", *["flush"] * 6, "event", "call", "event", "wait"][-10:]
    assert "".join(x[0] for x in happened).endswith("w" + "f" * 6 + "ecew")


def row(case, timed, contender, median, tflops=1.0, level="attention", **more):
    family = "fastattn" if contender.startswith("fastattn") else "torch"
    shape = {"B": 4, "H": 16, "H_kv": 16, "n_q": 4096, "n_k": 4096, "D": 128, "d_v": 128}
    return {
        "stage": "bench", "task": f"{level} {case} bf16 {timed}", "level": level, "case": case, "pass": timed,
        "contender": contender, "family": family, "verdict": "right", "note": "", "tflops": tflops, "shape": shape,
        "gbps": 2.0, "max_error": 0.01, "peak_mib": 64.25, "time_ms": {"median": median, "p20": median, "p80": median},
    } | more  # fmt: skip


def outcome(rows, start):
    (found,) = (found for found in targets.outcomes(rows) if found.promise.startswith(start))
    return found.figure, found.met


def test_promises_are_held_against_the_figures():
    case = "D128-N4096-full"
    assert outcome([], "D128 N4096 full forward") == ("not measured", None)
    for rate, met in ((431, True), (429, False)):
        rows = [row(case, "forward", "fastattn triton", 1, rate)]
        assert outcome(rows, "D128 N4096 full forward") == (f"{rate} TFLOP/s", met)
    two = [row(case, "forward", f"fastattn {name}", ms, rate) for name, ms, rate in (("a", 2, 300), ("b", 1, 600))]
    assert outcome(two, "D128 N4096 full forward") == ("600 TFLOP/s", True)
    assert outcome([row(case, "forward", "SDPA cudnn", 1, 600)], "D128 N4096 full forward")[1] is None

    padded = [
        row("D128-N2048-pad", "forward", "fastattn triton", 1, 89),
        row("D128-N2048-full", "forward", "fastattn triton", 1, 100),
    ]
    assert outcome(padded, "D128-N2048-pad forward") == ("89 %", False)
    both = [
        row("bert", timed, name, ms)
        for name, ms in (("fastattn triton", 1), ("SDPA cudnn", 1.3))
        for timed in cases.PASSES
    ]
    assert outcome(both, "bert, both passes: at least 1.2 times as fast as SDPA cudnn") == ("1.3x", True)
    assert outcome(both[:3], "bert, both passes: at least 1.2 times as fast as SDPA cudnn")[1] is None


def test_native_is_held_against_kernels_that_are_made_for_the_gpu():
    def timed(case, which, name, ms):
        return row(case, which, name, ms, stage="cuda")

    case = "D64-N2048-causal"
    for ms, figure, met in ((1.0, "0.71x", True), (1.1, "0.645x", False)):
        rows = [timed(case, "forward", "fastattn native", ms), timed(case, "forward", "SDPA flash", 0.71)]
        assert outcome(rows, f"{case} forward: at least 0.7 times") == (figure, met)
        assert outcome(rows, f"{case} backward: at least 0.6 times") == ("not measured", None)
    rows = [
        timed("D128-N2048-pad", which, name, ms)
        for which, ms in (("forward", 1.0), ("backward", 2.0))
        for name, ms in (("fastattn native", ms), ("SDPA efficient", 1.6 * ms))
    ]
    assert outcome(rows, "D128-N2048-pad, both passes: at least 1.5 times as fast as SDPA eff") == ("1.6x", True)
    graph = timed("launch", "forward", "fastattn native, CUDA graph", 0.01) | {"level": "launch"}
    assert outcome([graph], "forward in a CUDA graph") == ("10 us a replay", True)
    assert not any("TFLOP/s" in found.promise for found in targets.outcomes(rows))


def test_hopper_is_held_against_cudnn():
    def timed(case, which, name, ms, **more):
        return row(case, which, name, ms, stage="hopper", **more)

    lengths, promise = (1024, 2048, 4096, 8192, 16384), "D128 causal forward: on average at least 1.03 times"
    rows = [timed(f"D128-N{N}-causal", "forward", "SDPA cudnn", 1.0) for N in lengths]
    rows += [timed(f"D128-N{N}-causal", "forward", "fastattn hopper", 1.0) for N in lengths]
    assert outcome(rows, promise) == ("1x", False)
    assert outcome(rows[:-1], promise) == ("not measured", None)
    rows[-1]["time_ms"]["median"] = 1 / 2**5  # whose mean with four ones is 2
    assert outcome(rows, promise) == ("2x", True)

    names = {"fastattn hopper": 2.0, "fastattn hopper, deterministic=False": 1.0, "SDPA cudnn": 1.1}
    rows = [timed(f"D64-N{N}-full", "backward", name, ms) for N in lengths for name, ms in names.items()]
    promise = "D64 full backward: on average at least 1.05 times as fast as SDPA cudnn"
    assert outcome(rows, promise) == ("1.1x, and 0.55x with the same bits each time", True)
    assert targets.ours(rows, "D64-N1024-full", "backward")["contender"] == "fastattn hopper"

    rivals_of_256 = {"fastattn hopper": 1.0, "SDPA cudnn": 3.0, "SDPA flash": 0.9}
    rows = [timed(f"D256-N{N}-full", "forward", name, ms) for N in lengths for name, ms in rivals_of_256.items()]
    assert outcome(rows, "D256 full forward") == ("0.9x", False)

    rows = [timed("D64-N2048-pad", "forward", name, ms) for name, ms in names.items()]
    rows += [timed("D64-N2048-pad", "backward", name, ms) for name, ms in names.items()]
    assert outcome(rows, "D64-N2048-pad, both passes: at least 2.0 times") == ("0.733x", False)  # 2.2 / (2 + 1)

    ceiling = {"stage": "hopper", "family": "ceiling", "verdict": "right", "contender": "matmul", "tflops": 700.0}
    longest = timed("D128-N16384-full", "forward", "fastattn hopper", 1.0, tflops=630.0)
    assert outcome([longest, ceiling], "D128 N16384 full forward") == ("90 %", True)
    assert outcome([longest], "D128 N16384 full forward") == ("not measured", None)


def test_what_hopper_is_promised_is_timed():
    names = {task.name for task in speed.tasks("cuda", dry=False, only="hopper")}
    for case in (f"D{D}-N{N}-{mask}" for D in (64, 128, 256) for N in (1024, 16384) for mask in ("full", "causal")):
        assert {f"attention {case} bf16 forward", f"attention {case} bf16 backward"} <= names
    assert "attention D64-N2048-pad bf16 backward" in names
    assert not any("bias" in name or "dropout" in name or "encoder" in name for name in names)


def test_launches_and_memory_are_held_against_theirs():
    small = [
        row("launch", "forward", name, ms, level="launch") for name, ms in (("fastattn triton", 0.061), ("SDPA", 0.03))
    ]
    assert outcome(small, "launch of forward: ") == ("31 us more", False)
    graph = row("launch", "forward", "fastattn triton, CUDA graph", 0.01, level="launch")
    assert outcome([*small, graph], "launch of forward: ") == ("31 us more", False)
    assert outcome([*small, graph], "forward in a CUDA graph") == ("10 us a replay", True)
    # o is 64 MiB in bf16 and lse 1 MiB in fp32; one MiB is for the allocator.
    for peak, met in ((66.0, True), (66.5, False)):
        rows = [row("D128-N4096-causal", "forward", "fastattn triton", 1, peak_mib=peak)]
        assert outcome(rows, "D128-N4096-causal forward: no memory") == (f"{peak:.3g} MiB", met)


def document_of(rows, device="cuda"):
    run = {"stage": "bench", "date": "2026-01-02", "commit": "0.1.0 (abc)", "sources": "s", "done": 1, "left": 0}
    state = {"clocks.sm": "1980 MHz", "power.draw": "700 W"}
    return {
        "schema": 1, "device": device, "machine": {"gpu": "NVIDIA H200", "cpu": "?"}, "rows": rows,
        "versions": {"torch": "2.11.0", "triton": "3.6.0"}, "runs": [run | {"state_before": state, "state_after": {}}],
    }  # fmt: skip


def test_the_table_of_readme_has_a_line_for_each_measured_case(tmp_path):
    assert render.for_readme(tmp_path) == render.NOT_MEASURED
    rows = [
        row("D128-N4096-full", "forward", "fastattn triton", 1, 431.4),
        row("D128-N4096-full", "backward", "fastattn triton", 1, 288.6),
        row("D128-N4096-full", "forward", "SDPA cudnn", 1, 640),
        row("D128-N4096-full", "forward", "SDPA flash", 1, 640, verdict="wrong"),
    ]
    (tmp_path / "nvidia-h200.json").write_text(json.dumps(document_of(rows)))
    (tmp_path / "dry.json").write_text(json.dumps(document_of(rows, "cpu")))
    text = render.for_readme(tmp_path)
    assert "On an NVIDIA H200, torch 2.11.0, Triton 3.6.0" in text
    assert "(fastattn 0.1.0 (abc))" in text
    assert [line for line in text.splitlines() if line.startswith("| D")] == [
        "| D128-N4096-full | 431 / 289 | 640 / - | - / - | - / - | - / - |"
    ]


def test_markdown_and_pictures_are_made_of_a_results_file(tmp_path):
    images = pytest.importorskip("matplotlib.image")
    names = ("fastattn triton", "SDPA cudnn")
    rows = [row(f"D64-N{N}-full", "forward", name, 1, N / 10) for N in (512, 1024) for name in names]
    rows += [row("bert", "forward", name, ms) for name, ms in zip(names, (1.0, 2.0), strict=True)]
    rows += [row("bert", "forward", "FlexAttention", 1, verdict="n/a", note="has | no time", time_ms=None)]
    rows += [{"stage": "truth", "task": "t::a", "verdict": "right", "note": "torch: all NaN"}]
    rows += [{"stage": "truth", "task": "t::b", "verdict": "died", "note": "exit code -11"}]
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(document_of(rows)))
    written = render.render(path)
    assert [x.name for x in written] == ["gpu.md", "gpu-lengths.png", "gpu-cases.png"]
    text = written[0].read_text()
    for line in (
        "| bench | 2026-01-02 | 0.1.0 (abc) | 1980 MHz, 700 W |  | 1 | 0 |",
        "* t::b: died: exit code -11",
        "* t::a: torch: all NaN",
        "| bert | 1 | 1 | n/a |",
        "| attention bert forward | fastattn triton | 1 | 1-1 | 1 | 2 | 64.2 | 0.01 | SDPA cudnn 2 ms (2.00x) |",
        "* attention bert bf16 forward: FlexAttention: has | no time",
    ):
        assert line in text, line
    for picture in written[1:]:
        pixels = images.imread(picture)
        blue = (pixels[..., 2] > 0.5) & (pixels[..., 0] < 0.2)
        assert blue.sum() > 30


def test_results_are_named_after_what_they_ran_on(tmp_path):
    assert file_name("NVIDIA H200", "2.11.0+cu130", "3.6.0") == "nvidia-h200-2.11.0-3.6.0.json"
    results = Results(tmp_path, "cpu", commit="abc")
    assert results.versions["fastattn"] == f"{fastattn.__version__} (abc)"
    results.add("bench", "a", [{"verdict": "right"}, {"verdict": "wrong"}])
    results.add("bench", "a", [{"verdict": "right"}])
    results.save()
    again = Results(tmp_path, "cpu")
    assert [row["verdict"] for row in again.rows("bench")] == ["right"]
    assert again.finished("bench") == {"a"}
    assert again.finished("truth") == set()


def test_the_command_needs_torch_alone_until_it_runs():
    code = "import sys; sys.modules |= dict.fromkeys(('pytest', 'matplotlib', 'rich', 'hypothesis', 'triton'))\n"
    code += "from fastattn.bench.gpu.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "truth" in done.stdout
