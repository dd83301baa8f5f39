"""The command line: what it prints, what it leaves behind, and how it says no."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import fresh_python
import pytest
import torch

import fastattn
from fastattn.__main__ import main
from fastattn.backends import BACKENDS, build, cpu, hopper
from fastattn.bench import cases, limit, report, run, timing, writing
from fastattn.testing import Case

TINY = Case("tiny-pad", "small enough for a test", B=2, H=1, n_q=12, D=8, keys="right", timed="standard")


@pytest.fixture
def tiny_jobs(monkeypatch):
    """`fastattn bench` has two small jobs instead of its own."""
    jobs = [cases.Job("attention", TINY, "fp32", timed) for timed in cases.PASSES]
    monkeypatch.setattr(timing, "SAMPLE_S", 1e-5)  # nobody reads these figures
    monkeypatch.setattr(cases, "jobs", lambda dtypes, quick, words: [job for job in jobs if words in str(job)])


@pytest.fixture
def tiny_duel(monkeypatch):
    """`fastattn bench --suite limit` has one small line instead of its own."""
    duel = limit.Duel(cases.Job("attention", TINY, "fp32", "forward"), target=2.0)
    monkeypatch.setattr(timing, "SAMPLE_S", 1e-5)
    monkeypatch.setattr(limit, "jobs", lambda dtypes, words: [duel] if words in str(duel) else [])
    torch.set_num_threads(limit.THREADS + 1)


def refused(capsys, *argv):
    """What stands on stderr after a wrong call."""
    with pytest.raises(SystemExit) as exit_:
        main(list(argv))
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_runs_as_a_module_and_imports_nothing_for_help():
    code = """
import runpy, sys; sys.argv = ['fastattn', '--help']
try: runpy.run_module('fastattn', run_name='__main__')
except SystemExit: print(sorted({'matplotlib', 'rich', 'triton', 'fastattn.bench.run'} & set(sys.modules)))
"""
    done = fresh_python.run(code)
    assert done.stdout.endswith("[]\n")
    assert all(command in done.stdout for command in ("info", "build", "demo", "serve", "bench"))


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"fastattn {fastattn.__version__}\n"


def test_info_names_every_backend_its_dtypes_and_its_refusals(capsys, monkeypatch):
    assert hopper.unavailable(torch.device("cpu")) is None  # Gluon has to be imported in the mode that Triton was
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text
    about = {block.partition(":")[0]: block for block in text.split("\n\n")[1:]}
    assert set(about) == {backend.NAME for backend in BACKENDS}
    assert "cpu: float32, bfloat16, float16, float64; " in about["reference"]
    assert "float64" not in about["cpu"]
    assert "real_keys" in about["cpu"]
    assert "cpu: no: runs on the CPU only in Triton's interpreter" in about["triton"]
    assert about["hopper"] == "hopper: not for this machine\n  cpu: no: needs an NVIDIA GPU, got cpu"
    for name, block in about.items():  # ready, and nothing that it computes: no user understands that
        assert ("ready" in block) <= ("cpu: float32" in block), name


def test_table_of_the_docs_is_what_the_backends_say(capsys, monkeypatch):
    """The table is the same on every machine, with Triton's interpreter and without."""
    page = (Path(__file__).parents[2] / "docs" / "features.md").read_text()
    written = page.partition("<!-- run: fastattn info --markdown -->\n")[2].partition("<!-- end -->")[0]
    for interpret in ("0", "1"):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        assert main(["info", "--markdown"]) == 0
        assert capsys.readouterr().out == written


def test_table_tells_a_backend_that_takes_less(capsys, monkeypatch):
    monkeypatch.setattr(cpu, "features", lambda device: frozenset({"window", "causal"}))
    monkeypatch.setattr(cpu, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(hopper, "_HEAD_DIM_STEP", 16)
    assert main(["info", "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert f"| `cpu` | {cpu.WHERE} | causal, window | fp32 | all |\n" in printed
    assert "| fp16, bf16 | multiples of 16 up to 256 |\n" in printed


def test_info_builds_nothing(monkeypatch, capsys):
    def never(*args):
        raise AssertionError("info must not build")

    monkeypatch.setattr(build.CompiledModule, "load", never)
    monkeypatch.setattr(build.CompiledModule, "unavailable", never)
    monkeypatch.setattr(build.CompiledModule, "state", lambda self: "not built yet: `fastattn build` builds it")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for name in build.MODULES:
        assert f"\n{name}: not built yet: `fastattn build` builds it\n" in text


def test_build_says_where_the_module_is_and_how_long_it_took(capsys):
    assert main(["build"]) == 0
    text = capsys.readouterr().out
    assert build.CPU.file_name() in text
    assert f"instruction set {cpu.capability()}" in text


def test_build_fails_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(build.CompiledModule, "unavailable", lambda self, whole: "there is no C++ compiler")
    assert main(["build"]) == 1
    assert capsys.readouterr().err == "fastattn: there is no C++ compiler\n"


def test_bench_writes_table_json_and_picture(tiny_jobs, tmp_path, capsys):
    document, picture = tmp_path / "out.json", tmp_path / "out.svg"
    assert main(["bench", "--quick", "--device", "cpu", "--json", str(document), "--plot", str(picture)]) == 0
    assert "attention tiny-pad fp32 backward  (B2 H1 L12 D8)" in capsys.readouterr().out
    contenders = {row["contender"] for row in json.loads(document.read_text())["rows"]}
    assert contenders == {"SDPA flash", "SDPA math", "fastattn cpu"}
    assert picture.read_text().rstrip().endswith("</svg>")


@pytest.mark.parametrize("suite", ["standard", "limit"])
def test_results_that_cannot_be_written_after_all_are_printed(
    tiny_jobs, tiny_duel, tmp_path, capsys, monkeypatch, suite
):
    """A full disk: the file is what it was before, and nothing is left beside it."""
    document = tmp_path / "out.json"
    document.write_text("before")

    def replace(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    assert main(["bench", "--suite", suite, "--json", str(document)]) == 1
    out, err = capsys.readouterr()
    assert json.JSONDecoder().raw_decode(out)[0]["rows"]
    assert f"{document} could not be written, so the results are printed above (No space left on device)" in err
    assert document.read_text() == "before"
    assert list(tmp_path.iterdir()) == [document]


def test_an_interrupted_bench_shows_what_it_measured(tiny_jobs, tmp_path, monkeypatch, capsys):
    document, measure = tmp_path / "out.json", run.measure
    document.write_text("before")

    def interrupted(job, *args):
        if job.timed == "backward":
            raise KeyboardInterrupt
        return measure(job, *args)

    monkeypatch.setattr(run, "measure", interrupted)
    assert main(["bench", "--quick", "--device", "cpu", "--json", str(document)]) == 130
    assert "SDPA flash" in capsys.readouterr().out
    assert document.read_text() == "before"


def test_results_are_written_although_nobody_reads_the_table(tiny_jobs, tmp_path, monkeypatch):
    def broken(*_):
        raise BrokenPipeError

    monkeypatch.setattr(report, "print_table", broken)
    document = tmp_path / "out.json"
    with pytest.raises((BrokenPipeError, SystemExit)):
        raise SystemExit(main(["bench", "--quick", "--device", "cpu", "--json", str(document)]))
    assert json.loads(document.read_text())["rows"]


def test_files_of_results_that_are_links_or_pipes_stay_what_they_are(tmp_path):
    target, link, pipe = (tmp_path / name for name in ("target", "link", "pipe"))
    link.symlink_to(target)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (link, pipe):
        writing.write(writing.file_to_write(str(path)), "results")
    assert (link.is_symlink(), target.read_text()) == (True, "results")
    assert (pipe.is_fifo(), os.read(reader, 99)) == (True, b"results")
    os.close(reader)


def test_bench_fails_on_a_wrong_answer(tiny_jobs, monkeypatch, capsys):
    monkeypatch.setattr(run, "wrong", lambda compared: "o: max error 1, budget 0")
    assert main(["bench", "--quick", "--device", "cpu", "--filter", "forward"]) == 1
    output = capsys.readouterr()
    progress, complaint = output.err.splitlines()
    assert progress == "[1/1] attention tiny-pad fp32 forward"
    assert complaint.startswith("fastattn: wrong answers, which were not timed: fastattn cpu in attention tiny-pad")
    assert "SDPA flash" in output.out


@pytest.mark.parametrize(("options", "threads"), [([], limit.THREADS), (["--threads", "1"], 1)])
def test_limit_suite_writes_table_json_and_picture(tiny_duel, tmp_path, capsys, options, threads):
    path, picture = tmp_path / "out.json", tmp_path / "out.svg"
    assert main(["bench", "--suite", "limit", "--json", str(path), "--plot", str(picture), *options]) == 0
    output = capsys.readouterr()
    assert "[1/1] attention tiny-pad fp32 forward against torch" in output.err
    assert output.out.endswith(" of 1 targets met\n")
    document = json.loads(path.read_text())
    assert document["machine"]["torch_threads"] == threads
    assert [(row["case"], row["target"]) for row in document["rows"]] == [("tiny-pad", 2.0)]
    assert picture.read_text().rstrip().endswith("</svg>")


def test_limit_suite_fails_on_a_wrong_answer_but_not_on_a_missed_target(tiny_duel, monkeypatch, capsys):
    command = ["bench", "--suite", "limit"]
    monkeypatch.setattr(limit.Figure, "ratio_met", False)
    assert main(command) == 0
    assert capsys.readouterr().out.endswith("\n0 of 1 targets met\n")
    monkeypatch.setattr(run, "wrong", lambda compared: "o: max error 1, budget 0")
    assert main(command) == 1
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert complaint.startswith("fastattn: wrong answers, which were not timed: fastattn cpu in attention tiny-pad")


def test_limit_suite_needs_the_cpu_backend(monkeypatch, capsys):
    monkeypatch.setattr(cpu, "unavailable", lambda device: "there is no C++ compiler")
    assert main(["bench", "--suite", "limit"]) == 1
    assert capsys.readouterr().err.endswith("cannot be had: there is no C++ compiler\n")


def test_bench_takes_a_real_case():
    arguments = ["bench", "--quick", "--device", "cpu", "--filter", "L128-both forward"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # two would wait for each other on a busy machine
    done = fresh_python.run_module("fastattn", *arguments, environment=one_thread)
    assert done.returncode == 0, done.stderr
    assert "attention L128-both fp32 forward" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "required: COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["bench", "--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["bench", "--filter", "L127"], "--filter must leave something to time, got 'L127'"),
        (["bench", "--suite", "limit", "--filter", "L127"], "--filter must leave something to time, got 'L127'"),
        (["bench", "--suite", "limit", "--quick"], "--quick is for --suite standard"),
        (["bench", "--suite", "limit", "--rivals", "all"], "--rivals all is for --suite standard"),
        (["bench", "--suite", "fastest"], "invalid choice: 'fastest'"),
        (["bench", "--threads", "0"], "must be at least 1, got 0"),
        (["bench", "--threads", "9" * 20], "must be at most 4096, got 99999999999999999999"),
        (["bench", "--json", "out.svg", "--plot", "./out.svg"], "--json and --plot must be two files, got out.svg"),
        (["bench", "--json", "/nowhere/out.json"], "must be in an existing folder, got /nowhere/out.json"),
        (["bench", "--json", "/"], "must be a file, got the folder /"),
        (["bench", "--json", "x" * 300], "xxx (File name too long)"),
        (["bench", "--json", f"{'x' * 300}/out.json"], "out.json (File name too long)"),
        (["bench", "--plot", f"{'x' * 300}.svg"], "xxx.svg (File name too long)"),
        (["bench", "--plot", "out.gif"], "must end in .svg, got out.gif"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_calls_are_refused_in_a_sentence(argv, sentence, capsys, monkeypatch):
    monkeypatch.setattr(run, "measure_all", None)  # nothing is measured before
    assert sentence in refused(capsys, *argv)


def test_serve_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers.cli.transformers", None)
    assert main(["serve"]) == 1
    assert capsys.readouterr().err.endswith("pip install 'fastattn[serve]' brings what the server needs\n")


@pytest.mark.parametrize(
    ("suite", "there", "why"), [("standard", False, "here"), ("limit", True, "for --suite limit, got cuda")]
)
def test_a_gpu_that_is_missing_or_of_no_use_is_a_wrong_call(suite, there, why, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert f"--device must be cpu {why}" in refused(capsys, "bench", "--suite", suite, "--device", "cuda")


@pytest.mark.parametrize(
    ("output", "ends"), [("closed", (141, "")), ("full", (1, "fastattn: [Errno 28] No space left on device\n"))]
)
def test_an_output_that_takes_nothing_is_no_traceback(output, ends):
    if output == "full" and not os.path.exists("/dev/full"):
        pytest.skip("the system has no /dev/full")
    read, write = os.pipe()
    os.close(read)
    with open(write if output == "closed" else "/dev/full", "wb") as file:
        ended = subprocess.run([sys.executable, "-m", "fastattn", "info"], stdout=file, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr.decode()) == ends


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_output_is_no_error(name, tiny_jobs, monkeypatch):
    monkeypatch.setattr(sys, name, None)
    assert main(["bench", "--quick", "--device", "cpu", "--filter", "forward"]) == 0


def test_a_wrong_variable_of_the_environment_is_a_sentence():
    done = subprocess.run(
        [sys.executable, "-m", "fastattn", "info"],
        env=os.environ | {"FASTATTN_CPU_CAPABILITY": "bogus"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("fastattn: FASTATTN_CPU_CAPABILITY must be one of 'amx', ")
    assert "Traceback" not in done.stderr
