"""The benchmarks: nothing wrong is timed, nobody is left out without a reason, and the figures mean what they say."""

import dataclasses
import importlib.metadata
import io
import json
import os
import sys
from itertools import count
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import fresh_python
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import fastattn
from fastattn import machine
from fastattn.backends import BACKENDS
from fastattn.bench import cases, chart, report, rivals, run, third_party, timing
from fastattn.testing import CASES, Case

SVG = "{http://www.w3.org/2000/svg}"
TINY = Case("tiny-both", "small enough for a test", B=3, H=2, n_q=20, D=8, causal=True, keys="right", timed="standard")


@pytest.fixture(scope="module", autouse=True)
def hurried():
    """One thread and few short samples: these tests read no figures."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "SAMPLE_S", 1e-5)
        yield
    torch.set_num_threads(threads)


def job(level="attention", timed="forward", case=TINY):
    return cases.Job(level, case, "fp32", timed)


@pytest.fixture(scope="module")
def rows():
    """Every level and pass of the tiny case."""
    groups = [run.measure(job(level, timed), "cpu", 0.0) for level in cases.LEVELS for timed in cases.PASSES]
    return [row for group in groups for row in group]


@pytest.fixture(scope="module")
def measured(rows):
    return report.Report.of(rows, "cpu")


def named(rows, contender, level="attention", timed="forward"):
    (row,) = (r for r in rows if (r.contender, r.job.level, r.job.timed) == (contender, level, timed))
    return row


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"keys": "right"}, {"causal": True, "keys": "right"}], ids=str)
def test_other_libraries_compute_the_same_or_say_why_not(mask, monkeypatch):
    monkeypatch.setattr(third_party, "_compiled_flex", lambda: flex_attention)  # compiled, it takes half a minute
    case = Case("of-others", "", B=3, H=2, n_q=20, D=16, **mask)
    right = {
        row.contender: row for row in run.measure(job(case=case), "cpu", 0.0, third_party=True) if row.family == "other"
    }
    assert right.keys() == third_party.LIBRARIES.keys()
    expected = {name for name in right if third_party.find_spec(third_party._MODULES[name.split()[0]])}
    if not case.causal:
        expected -= {"onnxruntime GroupQueryAttention"}
    assert {"FlexAttention", "onnxruntime Attention", "onnxruntime MultiHeadAttention"} <= expected
    assert {name for name, row in right.items() if row.verdict == "right"} == expected
    assert all(row.note for row in right.values() if row.contender not in expected)


def test_other_libraries_refuse_in_a_sentence(monkeypatch):
    monkeypatch.setattr(third_party, "_compiled_flex", lambda: flex_attention)

    def note(name, dtype="fp32", **terms):
        of_case = dataclasses.replace(job(), case=Case("of-others", "", n_q=20, D=16, **terms), dtype=dtype)
        (row,) = (row for row in run.measure(of_case, "cpu", 0.0, third_party=True) if row.contender == name)
        assert row.verdict == "n/a"
        return row.note

    assert note("onnxruntime MultiHeadAttention", keys="left") == "takes padding on the right"
    assert note("onnxruntime Attention", "bf16") == "is timed in fp32, got torch.bfloat16"
    assert note("FlexAttention", window=(3, 0)) == "is timed on the CPU, causal and with padding"
    assert note("FlexAttention", bias=(1, 2, 20, 20)) == "is timed without other terms and grouped heads"
    lacking = {"FlexAttention": mock.Mock(side_effect=AttributeError("no such function"))}  # as in an older version
    monkeypatch.setattr(third_party, "LIBRARIES", third_party.LIBRARIES | lacking)
    assert note("FlexAttention") == "AttributeError: no such function"
    monkeypatch.setattr(third_party, "find_spec", lambda module: None)
    assert note("zentorch") == "zentorch is not installed"


@pytest.mark.parametrize("timed", cases.PASSES)
def test_rivals_stand_next_to_every_backend(rows, timed):
    contenders = {row.contender for row in rows if row.job == job(timed=timed)}
    assert contenders == {"naive", "SDPA math", "SDPA flash"} | {f"fastattn {backend.NAME}" for backend in BACKENDS}
    layers = [row for row in rows if row.job == job("layer", timed)]
    assert {row.contender for row in layers} == {"fastattn.MultiHeadAttention", "torch.nn.MultiheadAttention"}


def test_right_rows_are_timed_and_fastest_first(rows):
    for level in cases.LEVELS:
        for timed in cases.PASSES:
            right = [row for row in rows if row.job == job(level, timed) and row.verdict == "right"]
            medians = [row.timing.median for row in right]
            assert len(right) >= 2
            assert medians == sorted(medians)
            fastest = min(row.timing.median for row in right if row.family == "torch")
            assert [row.speedup for row in right] == pytest.approx([fastest / median for median in medians])


def test_a_refusal_is_a_row_with_the_backends_own_sentence(rows):
    row = named(rows, "fastattn triton")
    assert (row.verdict, row.timing) == ("n/a", None)
    q = torch.zeros(1, 1, 2, 8)
    assert row.note == "; ".join(fastattn.explain(q, q, q).objections["triton"])
    assert row.note != ""
    assert not row.failed


@pytest.mark.parametrize("timed", cases.PASSES)
def test_a_wrong_backend_is_not_timed(monkeypatch, timed):
    right = fastattn.attention
    monkeypatch.setattr(fastattn, "attention", lambda *args, **options: right(*args, **options) * 1.001)
    row = named(run.measure(job(timed=timed), "cpu", 0.0), "fastattn reference", timed=timed)
    assert (row.verdict, row.timing, row.speedup, row.failed) == ("wrong", None, None, True)
    assert {"forward": "o: max error", "backward": "dq: max error"}[timed] in row.note


def test_a_backend_that_fails_where_it_did_not_object_is_wrong(monkeypatch):
    monkeypatch.setattr(fastattn, "attention", lambda *_, **__: refuse("out of luck"))
    row = named(run.measure(job(), "cpu", 0.0), "fastattn reference")
    assert (row.verdict, row.note, row.failed) == ("wrong", "out of luck", True)


def test_a_wrong_rival_is_shown_and_not_the_one_to_beat(monkeypatch):
    right = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **options: right(*args, **options) * torch.nan,
    )
    timed = run.measure(job(), "cpu", 0.0)
    flash, ours = named(timed, "SDPA flash"), named(timed, "fastattn reference")
    assert (flash.verdict, flash.timing, flash.failed) == ("wrong", None, False)
    assert "max error nan" in flash.note
    assert (ours.verdict, ours.speedup) == ("right", None)


def test_a_rivals_refusal_is_its_own_sentence():
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(rivals.RefusalError, match="the sizes do not fit"):
        rivals.Contender("r", "torch", lambda: refuse("the sizes do not fit"), {}, q).trial("forward")
    with pytest.raises(rivals.RefusalError, match="undefined symbol"):  # as of a package for another torch
        rivals.Contender("r", "package", mock.Mock(side_effect=ImportError("undefined symbol")), {}, q).trial("forward")
    for fault in (AssertionError("no such layout"), TypeError("no such argument"), KeyError("no such kernel")):
        raising = mock.Mock(side_effect=fault)
        with pytest.raises(rivals.RefusalError, match="no such"):
            rivals.Contender("r", "other", raising, {}, q).trial("forward")
        with pytest.raises(type(fault)):  # a defect of ours ends the benchmark
            rivals.Contender("ours", "fastattn", raising, {}, q).trial("forward")


def refuse(why):
    raise RuntimeError(f"{why}\nmore")


def test_visible_pairs_are_the_useful_ones():
    inputs = cases.make_inputs(TINY, torch.float32)
    lengths = inputs.mask.real_keys.sum(1).tolist()
    assert len(set(lengths)) > 1
    by_hand = sum(min(i + 1, length) for length in lengths for i in range(TINY.n_q)) * TINY.H
    assert cases.visible_pairs(inputs) == by_hand
    problem = cases.make_problem(job(timed="backward"), "cpu")
    assert problem.flops == 2.5 * 4 * by_hand * TINY.D
    unmasked = Case("plain", "", B=3, H=2, n_q=5, n_k=7, D=8)
    assert cases.visible_pairs(cases.make_inputs(unmasked, torch.float32)) == 3 * 2 * 5 * 7


def test_padding_of_the_timed_cases_is_padding():
    for case in CASES:
        if case.timed and case.timed != "gpu" and case.keys:
            assert not cases.make_inputs(case, torch.float32).mask.real_keys.all(), case


def test_heads_are_independent_in_every_timed_case():
    """What lets the oracle take one head at a time; under dropout it takes all."""
    for case in CASES:
        if case.timed and case.timed != "gpu" and case.name != "L512-dropout":
            assert not any((case.H_kv, case.dense, case.bias, case.alibi, case.sinks, case.dropout_p)), case


class Clock:
    """time.perf_counter, where only naps take time."""

    def __init__(self):
        self.now = 0.0

    def nap(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    return clock


def test_rounds_go_there_and_back(clock):
    seen = []
    calls = {name: timing.Call(lambda name=name: (seen.append(name), clock.nap(1))) for name in "abc"}
    timings = timing.interleave(calls, 0.0, "cpu")
    assert "".join(seen) == "abc" + "abc" + "cba" + "abc"  # the first round only estimates
    assert {len(t.seconds) for t in timings.values()} == {timing.MIN_ROUNDS}


def test_short_calls_are_repeated_and_the_budget_is_kept(clock, monkeypatch):
    monkeypatch.setattr(timing, "SAMPLE_S", 0.01)
    calls = {"short": timing.Call(lambda: clock.nap(0.001)), "long": timing.Call(lambda: clock.nap(0.09))}
    timings = timing.interleave(calls, 1.0, "cpu")
    assert {name: t.repetitions for name, t in timings.items()} == {"short": 10, "long": 1}
    assert {name: t.median for name, t in timings.items()} == pytest.approx({"short": 0.001, "long": 0.09})
    assert {len(t.seconds) for t in timings.values()} == {10}  # of 0.1 s each


def test_what_fails_after_its_first_call_costs_itself_alone(monkeypatch):
    """As where the memory of the device is full by then."""
    problem = cases.make_problem(job(), "cpu")
    contenders = {x.name: x for x in rivals.contenders(problem)}
    calls = count()

    def compute(of=contenders["naive"].compute):
        if next(calls):
            raise torch.OutOfMemoryError("CUDA out of memory.\nSee the documentation")
        return of()

    contenders["naive"] = dataclasses.replace(contenders["naive"], compute=compute)
    monkeypatch.setattr(run, "peak_bytes", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.")))
    rows = run.measure_problem(problem, [*contenders.values()], "cpu", 0.0)
    report.print_table(report.Report.of(rows, "cpu"))
    assert named(rows, "fastattn cpu").peak_mib is None
    assert named(rows, "naive").verdict == "n/a"
    assert named(rows, "naive").note == "OutOfMemoryError: CUDA out of memory."
    assert named(rows, "fastattn cpu").timing


def test_the_quick_form_times_what_serves_the_pass(monkeypatch):
    training = []
    explain = rivals.fastattn.explain
    monkeypatch.setattr(
        rivals.fastattn, "explain", lambda **call: (training.append(call["q"].requires_grad), explain(**call))[1]
    )
    for timed in cases.PASSES:
        rivals.contenders(cases.make_problem(job(timed=timed), "cpu"), quick=True)
    assert training == [timed != "forward" for timed in cases.PASSES]


def test_statistics():
    taken = timing.Timing((5.0, 1.0, 2.0, 4.0, 3.0), 1)
    assert (taken.median, taken.percentile(25), taken.percentile(75)) == (3.0, 2.0, 4.0)


def test_peak_memory_sees_what_is_freed_again():
    def call():
        return torch.zeros(3 * 2**18).sum() + torch.zeros(2**18).sum()  # 3 MiB, freed, then 1 MiB

    assert timing.peak_bytes(timing.Call(call), "cpu") == pytest.approx(3 * 2**20, rel=0.01)


def test_json_holds_every_row_and_sample(measured):
    document = json.loads(report.as_json(measured))
    assert document["schema"] == report.SCHEMA
    assert set(document) == {"schema", "date", "device", "machine", "versions", "method", "rows"}
    assert len(document["rows"]) == len(measured.rows)
    for row, written in zip(measured.rows, document["rows"], strict=True):
        assert (written["contender"], written["verdict"]) == (row.contender, row.verdict)
        if row.verdict == "right":
            assert len(written["time_ms"]["samples"]) == len(row.timing.seconds)
            assert written["time_ms"]["median"] == pytest.approx(row.timing.median * 1e3, rel=1e-4)
            assert written["gflops"] > 0
        else:
            assert written["note"]
            assert written["time_ms"] is None
    assert document["rows"][0]["shape"] == {"B": 3, "H": 2, "H_kv": 2, "n_q": 20, "n_k": 20, "D": 8, "d_v": 8}


def test_plain_table_names_every_row(measured, capsys):
    report.print_table(measured)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    for row in measured.rows:
        assert str(row.job) in text
        assert row.note in text
    median = f"{named(measured.rows, 'naive').timing.median * 1e3:.3g}"
    (line,) = (x for x in text.split("\n\n")[1].splitlines() if x.split()[0] == "naive")
    assert line.split()[1] == median


def test_a_narrow_terminal_without_unicode_shows_all_of_a_table(measured, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), "ascii", newline="\n")
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(output, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    report.print_table(measured)
    output.flush()
    printed = "".join(output.buffer.getvalue().decode().split())
    for row in measured.rows:
        for cell in report._cells(row)[1:-1]:
            assert cell in printed


def test_picture_has_bars_of_rivals_beside_ours_in_every_group(measured):
    drawn = ElementTree.fromstring(report.as_svg(measured))
    groups = [[rect.get("class") for rect in group.iter(f"{SVG}rect")] for group in drawn.iter(f"{SVG}g")]
    assert len(groups) == len({row.job for row in measured.rows})
    assert all({"ours", "other"} == set(kinds) for kinds in groups)
    for rect in drawn.iter(f"{SVG}rect"):
        assert 0 < float(rect.get("x")) < float(rect.get("x")) + float(rect.get("width")) < float(drawn.get("width"))
    for text in drawn.iter(f"{SVG}text"):
        assert text.get("class") == "right" or float(text.get("x")) + 7 * len(text.text) < float(drawn.get("width"))
    words = [text.text for text in drawn.iter(f"{SVG}text")]
    ours = named(measured.rows, "fastattn torch")
    assert f"{ours.speedup:.2f}x, {ours.timing.median * 1e3:.3g} ms" in words
    assert "fastattn reference" not in words


@pytest.mark.parametrize("length", [1, 57, 200])
def test_bars_have_room_beside_labels_of_any_length(length):
    drawn = chart.draw("title", {"a": [chart.Bar("x" * length, 1, "1 < 2"), chart.Bar("y", 2, "z" * length)]}, "")
    widths = [float(bar.get("width")) for bar in ElementTree.fromstring(drawn).iter() if bar.tag.endswith("rect")]
    assert max(widths) >= 2 * min(widths) > 90


def test_flex_attention_is_compiled_anew_for_each_job(monkeypatch):
    """Or Dynamo's limit would leave the plain formula from the ninth on."""
    counts = []
    monkeypatch.setattr(torch, "compile", lambda f, **_: counts.append(len(counts)) or f)
    monkeypatch.setattr(torch.compiler, "reset", lambda: counts.append("reset"))
    for _ in range(2):
        third_party._compiled_flex()
    assert counts == ["reset", 1, "reset", 3]


def test_the_state_is_that_of_the_gpu_that_torch_uses(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mock.Mock(uuid="4c3a"))
    monkeypatch.setattr(machine, "_output_of", lambda *command: (asked.append(command), "1, 2, 3, 4, 5")[1])
    assert machine.gpu_state("cuda")["clocks.mem"] == "2"
    assert "--id=GPU-4c3a" in asked[0]


def test_versions_of_distributions_that_have_other_names_are_unknown(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(third_party, "find_spec", lambda name: name)
    assert set(third_party.versions().values()) == {"unknown"}
    assert machine.versions()["triton"] in ("unknown", "not installed")


def test_long_charts_have_columns_and_none_is_empty():
    one = chart.draw("title", {"a": [chart.Bar("x", 1, "1 < 2")]}, "words")
    many = chart.draw("title", {f"{i}": [chart.Bar("x", i, "")] * 9 for i in range(1, 9)}, "words")
    widths = [float(ElementTree.fromstring(text).get("width")) for text in (one, many)]
    assert widths[1] == 2 * widths[0]
    for groups in ({}, {"a": []}):
        with pytest.raises(ValueError, match="nothing to draw"):
            chart.draw("title", groups, "")


def test_nothing_to_draw_is_an_error(measured):
    rivals_only = [row for row in measured.rows if row.family != "fastattn"]
    with pytest.raises(ValueError, match="nothing to draw"):
        report.as_svg(dataclasses.replace(measured, rows=rivals_only))


def test_the_quick_form_has_only_rows_that_can_run():
    rows = run.measure(job(timed="backward"), "cpu", 0.0, quick=True)
    q = torch.zeros(1, 1, 2, 8)
    chosen = fastattn.explain(q, q, q).backend
    assert {row.contender for row in rows} == {f"fastattn {chosen}", "SDPA math", "SDPA flash"}
    assert {row.verdict for row in rows} == {"right"}


def test_words_choose_jobs():
    chosen = cases.jobs(["fp32", "bf16"], words="attention L512-pad bf16")
    assert [str(job) for job in chosen] == ["attention L512-pad bf16 forward", "attention L512-pad bf16 backward"]
    quick = cases.jobs(["fp32"], quick=True)
    assert {job.level for job in quick} == set(cases.LEVELS)
    assert len(quick) < len(cases.jobs(["fp32"]))
    assert {job.case.timed for job in cases.jobs(list(cases.DTYPES))} == {"standard"}


def test_the_pytest_benchmarks_run_each_contender_of_a_case():
    root = Path(__file__).parents[2]
    chosen = ["-k", "L128-none and fp32 and forward", "--benchmark-disable", "-p", "no:cacheprovider", "-q", "-rs"]
    alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # two threads wait long on a busy machine
    done = fresh_python.run_module("pytest", "benchmarks", *chosen, cwd=root, environment=os.environ | alone)
    assert done.returncode == 0, done.stdout
    contenders = len(rivals.names("attention", "cpu")) + len(rivals.names("layer", "cpu"))
    assert f"{contenders - 3} passed, 3 skipped" in done.stdout
    assert "n/a: needs an NVIDIA GPU, got cpu" in done.stdout
    assert "n/a: interprets its kernels on the CPU" in done.stdout
