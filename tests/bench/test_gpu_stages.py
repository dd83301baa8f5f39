"""The stages of `python -m benchmarks.gpu` as far as a CPU goes: what crashes and hangs, what is resumed, dry runs."""

import itertools
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _pytest.mark.expression import Expression
from fresh_python import wait_until

import fastattn
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import first_calls, render, speed, stages
from benchmarks.gpu.record import append, load
from benchmarks.gpu.stages import Part
from benchmarks.gpu.supervisor import StartError, Suite, run
from fastattn import testing
from fastattn.backends import BACKENDS, cuda, hopper
from fastattn.bench import tune
from fastattn.testing import make_inputs

ROOT = Path(__file__).parents[2]
PASSES = ("forward", "backward", "backward, deterministic=False")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the tests of the faulty suite leave traces."""
    monkeypatch.setenv("FASTATTN_FAULTY_SUITE", str(tmp_path))
    return tmp_path


def faulty(chosen, *options, **limits):
    """A part of the suite in tests/bench/faulty_suite.py; its limit is one that holds on a busy machine."""
    arguments = ("--device=cpu", "--noconftest", "tests/bench/faulty_suite.py", "-k", chosen, *options)
    return Suite(arguments, **{"limit_s": 200.0} | limits)


def rows_of(folder, *suites, seconds=250.0):
    """The rows of each test by its name, in the order they are recorded."""
    path, rows = folder / "record.jsonl", {}
    append(path, {"begin": {"device": "cpu", "machine": {}, "versions": {}}})
    assert run(list(suites), path, "truth", "sources", time.time() + seconds)
    for row in load(path)["rows"]:
        rows.setdefault(row["test"].partition("::test_")[2], []).append(row)
    return rows


def verdicts_of(rows_by_test):
    return [(test, row["verdict"]) for test, rows in rows_by_test.items() for row in rows]


def begun(folder):
    """The name and the process of each test that has begun."""
    file = folder / "begun"
    return [tuple(line.rsplit(" ", 1)) for line in (file.read_text().splitlines() if file.exists() else [])]


def is_alive(process):
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


def test_what_crashes_or_hangs_costs_the_others_nothing(folder):
    rows_by_test = rows_of(folder, faulty("right or killed or wrong or exits or hang or skipped", limit_s=5.0))
    assert verdicts_of(rows_by_test) == [
        ("right", "right"), ("right", "wrong"), ("killed", "died"), ("wrong", "wrong"), ("exits", "died"),
        ("hang", "hung"), ("skipped", "skipped"),
    ]  # fmt: skip
    notes = {test: rows[0]["note"] for test, rows in rows_by_test.items()}
    assert re.fullmatch(r"(?s)exit code -9; .*out of ink", notes["killed"])
    assert notes["wrong"] == "AssertionError: they differ"
    assert notes["exits"].startswith("exit code 0; ")
    assert notes["hang"].startswith("no end in 5 s; ")
    assert notes["skipped"] == "no time"
    processes = dict(begun(folder))
    assert list(processes) == list(rows_by_test)
    assert processes["right"] == processes["killed"]
    assert processes["wrong"] == processes["exits"]
    assert len(set(processes.values())) == 4
    assert not any(map(is_alive, processes.values()))


def test_a_process_whose_gpu_is_lost_is_replaced(folder):
    rows_by_test = rows_of(folder, faulty("spoils or skipped", "--device=cuda"))
    assert verdicts_of(rows_by_test) == [
        ("spoils[0]", "wrong"), ("spoils[1]", "right"), ("spoils[1]", "wrong"), ("skipped", "skipped"),
    ]  # fmt: skip
    for rows in ("spoils[0]", "spoils[1]"):
        assert rows_by_test[rows][-1]["note"] == "the GPU does not answer after it"
    assert len(set(dict(begun(folder)).values())) == 3


def test_suites_and_processes_run_at_the_same_time(folder, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    own = faulty("meet", workers=2)
    rows_by_test = rows_of(folder, own, replace(own, arguments=("--archs=7.5+PTX", *own.arguments)))
    notes = {test: rows[0]["note"] for test, rows in rows_by_test.items()}
    assert notes == {f"meet[{n}]": "archs: 9.0" for n in (0, 1)} | {
        f"meet[{n}] for 7.5+PTX": "archs: 7.5+PTX" for n in (0, 1)
    }


def test_the_deadline_ends_all(folder, monkeypatch):
    """That which comes when the test has begun."""
    path, now = folder / "record.jsonl", time.time
    path.touch()
    monkeypatch.setattr(time, "time", lambda: now() + (150.0 if begun(folder) else 0.0))
    assert not run([faulty("hang")], path, "truth", "sources", now() + 150.0)
    ((name, process),) = begun(folder)
    assert (name, is_alive(process), path.read_text()) == ("hang", False, "")


def test_a_process_that_cannot_start_says_why(folder, monkeypatch):
    with pytest.raises(StartError, match=r"(?s)a process of pytest died: exit code 4; .*no-such-option"):
        rows_of(folder, faulty("right", "--no-such-option"))
    monkeypatch.setattr("benchmarks.gpu.supervisor.os", SimpleNamespace(**vars(os) | {"getpid": lambda: 1}))
    with pytest.raises(StartError, match="the supervisor has ended already"):
        rows_of(folder, faulty("right"))
    monkeypatch.setattr("benchmarks.gpu.supervisor.START_LIMIT_S", 0.1)
    with pytest.raises(StartError, match="a process of pytest hung: no end in 0 s"):
        rows_of(folder, faulty("right"))
    monkeypatch.undo()  # so that the file cannot be imported
    with pytest.raises(StartError, match=r"(?s)a process of pytest died: exit code 2; .*FASTATTN_FAULTY_SUITE"):
        rows_of(folder, faulty("right"))


def test_kernels_are_compiled_and_not_launched(folder):
    assert verdicts_of(rows_of(folder, faulty("compiled", "--compile-only"))) == [("compiled", "right")]


@pytest.fixture
def bench(folder, monkeypatch, capsys):
    """A function that runs a stage with a part: its exit code, what it says, the verdicts, and what has begun."""
    monkeypatch.setattr(render, "render", lambda path: [])
    monkeypatch.setattr(render, "summary", lambda document, stage: "")

    def run_bench(part, *options):
        monkeypatch.setattr(stages, "parts", lambda stage, device: {"times": part})
        (folder / "begun").unlink(missing_ok=True)
        code = command.main(["bench", "--device", "cpu", "--out", str(folder), *options])
        (path,) = folder.glob("*.jsonl")
        verdicts = [(row["test"].partition("::test_")[2], row["verdict"]) for row in load(path)["rows"]]
        return code, capsys.readouterr().err, verdicts, [name for name, _ in begun(folder)]

    return run_bench


def test_a_stage_goes_on_where_it_stopped_and_tells_what_failed(bench, monkeypatch):
    part, tests = Part([faulty("right or killed or wrong")]), ["right", "killed", "wrong"]
    code, said, verdicts, began = bench(part, "--seconds", "0")
    assert (code, verdicts, began) == (1, [], [])
    assert "bench: there was no time left for times; the same command goes on there" in said

    code, said, verdicts, began = bench(part)
    assert (code, began) == (1, tests)
    assert verdicts == [("right", "right"), ("right", "wrong"), ("killed", "died"), ("wrong", "wrong")]
    assert "2 of 4 rows are failures" in said
    assert "test_wrong: wrong: AssertionError: they differ" in said
    assert "test_killed: died: exit code -9" in said
    code, said, verdicts_then, began = bench(part)
    assert (code, verdicts_then, began) == (1, verdicts, [])
    assert "2 of 4 rows are failures" in said
    assert bench(part, "--again")[3] == ["killed", "wrong"]
    monkeypatch.setattr(stages, "sources", lambda: "others")
    assert bench(part)[3] == tests


def test_what_is_compiled_is_no_result(bench):
    code, said, verdicts, began = bench(Part([faulty("skipped")], to_compile=faulty("right or killed")))
    assert (code, verdicts, began) == (0, [("skipped", "skipped")], ["right", "killed", "skipped"])
    assert "test_killed: died: exit code -9" in said


def test_compiling_leaves_each_part_time_to_run(folder, monkeypatch):
    """Also where it takes all that it may, and a part before has done so."""
    clock, left = [0.0], {}

    def until_deadline(suites, path, stage, sources, deadline):
        left[suites[0]] = deadline - clock[0]
        clock[0] = deadline
        return False

    tiles, times, kernels = (Suite((name,)) for name in ("tiles", "times", "kernels"))
    parts = {"tiles": Part([tiles], share=0.4), "times": Part([times], to_compile=kernels)}
    monkeypatch.setattr(stages, "parts", lambda stage, device: parts)
    monkeypatch.setattr(stages, "run", until_deadline)
    monkeypatch.setattr(stages, "time", SimpleNamespace(time=lambda: clock[0]))
    with pytest.raises(stages.StageError, match="no time left for tiles, times"):
        stages.run_stage("bench", "cpu", folder / "record.jsonl", {}, 500.0)
    assert left == {tiles: 200.0, kernels: pytest.approx(210.0), times: pytest.approx(90.0)}


def test_tiles_that_another_machine_has_timed_serve(folder, monkeypatch):
    path, kept, times = folder / "record.jsonl", [], {"default": 2.0, "a": 1.0}
    row = {"verdict": "right", "note": "", "kernel": "forward 64", "times": times}
    append(path, {"stage": "bench", "test": "tiles", "sources": stages.sources(), "rows": [row]})
    monkeypatch.setattr(tune, "keep_faster_tiles", lambda device, times: kept.append((device.type, times)))
    monkeypatch.setattr(stages, "parts", lambda stage, device: {})
    stages.run_stage("bench", "cpu", path, {}, 10.0)
    assert kept == [("cpu", {"forward 64": times})]


def test_what_has_been_timed_is_not_compiled_again(folder):
    path, about, every, generated = folder / "record.jsonl", {"stage": "bench", "sources": "s"}, speed.jobs("cpu"), {}
    for job in every:
        if job.case == every[0].case:
            append(path, about | {"test": f"benchmarks/gpu/speed.py::test_speed[{job}]", "rows": []})
    option = SimpleNamespace(device="cpu", only=None, share=about | {"path": str(path)})
    for test in (speed.test_compile, speed.test_speed):

        def keep(name, jobs, ids, test=test):
            generated[test] = list(jobs)

        config = SimpleNamespace(option=option)
        metafunc = SimpleNamespace(function=test, fixturenames=["job"], config=config, parametrize=keep)
        speed.pytest_generate_tests(metafunc)
    assert generated[speed.test_speed] == every
    assert {job.case for job in generated[speed.test_compile]} == {job.case for job in every} - {every[0].case}


def test_a_stage_that_is_killed_takes_its_processes_along_and_resumes(folder):
    code = f"""
from benchmarks.gpu import __main__, stages, supervisor
stages.parts = lambda stage, device: {{"times": stages.Part([supervisor.{faulty("right or hang")}])}}
raise SystemExit(__main__.main(["bench", "--device=cpu", "--out={folder}"]))
"""
    command = [sys.executable, "-c", code]
    killed = subprocess.Popen(command, cwd=ROOT)
    wait_until(lambda: len(begun(folder)) == 2, seconds=60.0)
    ((_, process),) = begun(folder)[1:]
    assert is_alive(process)
    killed.kill()
    killed.wait()
    wait_until(lambda: not is_alive(process), seconds=10.0)
    (folder / "kernels_end").touch()
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    assert [name for name, _ in begun(folder)] == ["right", "hang", "hang"]


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    """A function that runs all of a stage: the names of its tests, and the rows of contenders."""

    def run_dry(stage):
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two threads wait long on a busy machine
        assert command.main([stage, "--device", "cpu", "--out", str(tmp_path)]) == 0
        document = load(next(tmp_path.glob("*.jsonl")))
        assert [(run["stage"], run["complete"]) for run in document["runs"]] == [(stage, True)]
        assert {row["verdict"] for row in document["rows"]} <= {"right", "n/a", "skipped"}  # of rivals too
        timed = [row for row in document["rows"] if "contender" in row]
        speed_tests = ["ceilings", *(f"speed[{job}]" for job in speed.jobs("cpu", stages.only_of(stage, "cpu")))]
        assert {row["test"] for row in timed} == {
            f"benchmarks/gpu/speed.py::test_{name}" for name in speed_tests if stage != "truth"
        }
        return [row["test"] for row in document["rows"] if "contender" not in row], timed

    return run_dry


def test_a_dry_run_of_truth_tests_each_backend(dry_run):
    tests, _ = dry_run("truth")
    for backend in {backend.NAME for backend in BACKENDS} - {cuda.NAME, hopper.NAME}:  # whose kernels run as models
        for case in ("plain-torch.bfloat16", "one-query-torch.float16"):
            assert f"tests/backends/test_conformance.py::test_case_is_right_or_refused[{backend}-cpu-{case}]" in tests
        assert f"tests/backends/test_truth.py::test_case_of_pytorch_196678[{backend}-cpu]" in tests


def test_a_dry_run_of_bench_measures_whole_models_too(dry_run):
    _, timed = dry_run("bench")
    encoders = {"torch.nn.TransformerEncoder", "torch.nn.TransformerEncoder, fastattn.swap"}
    assert {row["contender"] for row in timed if row["level"] == "encoder"} == encoders
    own = [row for row in timed if row["contender"] == "fastattn cpu"]
    assert {(row["level"], row["verdict"]) for row in own} == {("attention", "right"), ("launch", "right")}
    for row in own:
        assert row["time_ms"]["p20"] <= row["time_ms"]["median"] <= row["time_ms"]["p80"]
        if row["level"] == "attention":
            assert min(row[name] for name in ("tflops", "gbps", "peak_mib", "max_error")) > 0


def test_a_dry_run_of_cuda_tests_and_measures_one_backend_alone(dry_run):
    """The one on the CPU, in its place."""
    tests, timed = dry_run("cuda")
    assert all("[cpu-cpu" in test for test in tests)
    for case in ("case_is_right_or_refused[cpu-cpu-one-query-torch.float16]", "case_of_pytorch_196678[cpu-cpu]"):
        assert {test.partition(case)[2] for test in tests if case in test} == {"", " for 7.5+PTX"}
    assert {row["level"] for row in timed} == {"ceilings", "attention", "launch"}
    assert {row["contender"] for row in timed if row["level"] == "attention"} == {"fastattn cpu", "SDPA flash"}
    assert {row["verdict"] for row in timed if row["contender"] == "fastattn cpu"} == {"right"}


def test_a_dry_run_of_hopper_calls_and_measures_that_alone(dry_run):
    """On a CPU, which the backend refuses."""
    calls, timed = dry_run("hopper")
    first = "benchmarks/gpu/first_calls.py::test_first_call[tile-128-full"
    assert calls == [f"{first}-{which}]" for which in PASSES]
    own = [row for row in timed if row["family"] == "fastattn"]
    expected = {"fastattn hopper", "fastattn hopper, deterministic=False"}
    assert {row["contender"] for row in own if row["pass"] == "backward"} == expected
    assert {(row["verdict"], row["note"]) for row in own} == {("n/a", "needs an NVIDIA GPU, got cpu")}
    assert {row["verdict"] for row in timed if row["contender"] == "SDPA flash"} == {"right"}


@pytest.mark.parametrize("name", ["truth.py::test_x[triton-cuda-fp32]", "triton.py::test_keys_in_parts[bf16]"])
def test_truth_runs_what_has_no_device_in_its_name_too(name):
    (suite,) = (suite for suite in stages.parts("truth", "cuda")["tests"].suites if "-k" in suite.arguments)
    chosen = Expression.compile(suite.arguments[suite.arguments.index("-k") + 1])
    assert chosen.evaluate(lambda word, **_: word in f"tests/backends/test_{name}")
    assert not chosen.evaluate(lambda word, **_: word in "tests/backends/test_truth.py::test_x[reference-cuda-fp32]")


def test_first_calls_are_held_to_the_error_budget(monkeypatch):
    """By another backend, since the one that they are for needs a GPU."""
    on_cpu = SimpleNamespace(option=SimpleNamespace(device="cpu", only="cpu"))
    for mask, which in itertools.product(first_calls.MASKS, PASSES):
        first_calls.test_first_call("tile", 64, mask, which, on_cpu)
    first_calls.test_first_call("head", 128, "documents", "backward", on_cpu)
    right, asked = fastattn.attention, []

    def wrong(*args, backend, deterministic, **options):
        asked.append((backend, deterministic))
        factor = 1.1 if backend == "cpu" else 1.0
        return tuple(factor * x for x in right(*args, backend=backend, **options))

    monkeypatch.setattr(testing, "attention", wrong)
    with pytest.raises(AssertionError, match="o: max error"):
        first_calls.test_first_call("tile", 64, "full", "backward, deterministic=False", on_cpu)
    assert ("cpu", False) in asked


def test_a_build_that_fails_ends_the_stage_with_what_the_compiler_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler is there
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "fastattn").mkdir()
    (tmp_path / "fastattn" / "x.log").write_text("ptxas: out of registers")
    monkeypatch.delenv("CXX", raising=False)
    assert command.main(["cuda", "--device", "cpu", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "cuda: the module was not built: benchmarks/gpu/build.py::test_build[" in said
    assert "]: wrong: exit code 1; ptxas: out of registers" in said
    assert load(next((tmp_path / "out").glob("*.jsonl")))["rows"] == []


@pytest.mark.parametrize(
    ("exit_code", "verdict", "note"),
    [
        (0, "right", "compute-sanitizer: ERROR SUMMARY: 1 error"),
        (99, "wrong", "COMPUTE-SANITIZER; Invalid __global__ read; ERROR SUMMARY: 1 error"),
        (1, "skipped", "exit code 1; COMPUTE-SANITIZER; Invalid __global__ read; ERROR SUMMARY: 1 error; no device"),
    ],
    ids=["clean", "errors", "broken"],
)
def test_the_sanitizer_is_heard(tmp_path, monkeypatch, exit_code, verdict, note):
    said = ["COMPUTE-SANITIZER", "Invalid __global__ read", "ERROR SUMMARY: 1 error"]
    program = tmp_path / "compute-sanitizer"
    lines = [*(f"echo '========= {line}'" for line in said), "echo hello", "echo no device >&2", f"exit {exit_code}"]
    program.write_text("\n".join(["#!/bin/sh", f"echo $@ >> {tmp_path}/called", *lines]))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    rows_by_test = rows_of(
        tmp_path, Suite(("--device=cpu", "--only=triton", "benchmarks/gpu/sanitizer.py"), limit_s=200.0)
    )
    assert [(row["verdict"], row["note"].strip()) for rows in rows_by_test.values() for row in rows] == [
        (verdict, note)
    ] * 3
    called = [line.split() for line in (tmp_path / "called").read_text().splitlines()]
    assert [words[:2] for words in called] == [["--tool", tool] for tool in ("memcheck", "racecheck", "initcheck")]
    assert all(words[-3:] == ["-m", "benchmarks.gpu.sanitizer", "triton"] for words in called)


def test_a_stage_that_the_machine_cannot_run_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stages, "make_inputs", lambda case, dtype, device: make_inputs(case, dtype, "cpu"))
    with pytest.raises(stages.StageError, match="hopper needs an NVIDIA GPU, got cpu"):
        stages.run_stage("hopper", "cuda", tmp_path / "record.jsonl", {}, 10.0)
    monkeypatch.setattr(hopper, "unsupported", lambda *call: [])
    monkeypatch.setattr(hopper, "unavailable", lambda device: "needs Gluon")
    with pytest.raises(stages.StageError, match="hopper needs Gluon"):
        stages.run_stage("hopper", "cuda", tmp_path / "record.jsonl", {}, 10.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["truth"]) == 1
    assert "torch sees no CUDA device here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
