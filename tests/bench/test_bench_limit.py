"""The suite "limit": every promised figure is there with its target, and a ratio is what it says."""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_bench import hurried  # noqa: F401

import fastattn
from fastattn.backends import build, cpu
from fastattn.bench import cases, limit, limit_report, report, run, timing
from fastattn.testing import Case

PAD = Case("tiny-pad", "small enough for a test", B=3, H=3, n_q=20, D=8, keys="right", timed="limit")
PAD_QUERIES = replace(PAD, name="tiny-pad-queries", queries=True)
DROPOUT = replace(PAD, name="tiny-dropout", keys=None, dropout_p=0.3)

RECORD = Path(__file__).parents[2] / "benchmarks/results/epyc-zen4-2-cores-limit.json"


def tiny(case=PAD, timed="forward", target=2.0, **options):
    return limit.Duel(cases.Job("attention", case, "fp32", timed), target, **options)


def against_padded_keys(timed="forward"):
    rival = cases.Job("attention", PAD, "fp32", timed)
    return tiny(PAD_QUERIES, timed, rival=rival, rival_name="keys", per_useful_pair=True)


@pytest.fixture(scope="module")
def figures():
    backward, dropout = tiny(timed="backward", ceiling_share=0.5), tiny(DROPOUT, "forward+backward")
    return list(limit.measure_all([tiny(), backward, dropout, against_padded_keys()], budget_s=0.0))


def visible_share(case):
    inputs = cases.make_inputs(case, torch.float32)
    return cases.visible_pairs(inputs) / (case.B * case.H * case.n_q**2)


def test_lines_shapes_rivals_and_targets_are_those_that_were_measured():
    for duel, row in zip(limit.jobs(), json.loads(RECORD.read_text())["rows"], strict=True):
        assert report.job_as_dict(duel.job).items() <= row.items()
        assert row["rival_job"] == (duel.rival and report.job_as_dict(duel.rival))
        assert row["rival"] == duel.rival_name or duel.rival is None
        assert row["ceiling_share_target"] == duel.ceiling_share
        shown = visible_share(duel.job.case) if duel.over_visible_share else 1.0
        assert row["target"] == pytest.approx(duel.target / shown, rel=1e-4)
        assert duel.per_useful_pair == ("pad-queries" in str(duel))
        assert duel.fp32_arithmetic == (duel.job.dtype == "fp16")
        if duel.rival_name[0] in "DN":  # of another size, and nothing else
            assert replace(duel.rival.case, name="", D=0, n_q=0) == replace(duel.job.case, name="", D=0, n_q=0)


def test_words_and_dtypes_choose():
    assert [str(duel) for duel in limit.jobs(["bf16"], "decode")] == ["attention decode bf16 forward against torch"]
    assert {duel.job.dtype for duel in limit.jobs(["bf16"])} == {"bf16"}


def test_a_ratio_is_the_rivals_time_over_ours(figures):
    forward, backward, dropout, _ = figures
    for figure in (forward, backward, dropout):
        assert figure.verdict == "right"
        assert figure.rival == "SDPA"
        assert figure.ratio == pytest.approx(figure.rival_timing.median / figure.timing.median)
        assert figure.ceiling_share == pytest.approx(figure.gflops / figure.ceiling_gflops)
    pairs = visible_share(PAD) * PAD.B * PAD.H * PAD.n_q**2
    assert backward.gflops == pytest.approx(2.5 * 4 * pairs * PAD.D / backward.timing.median / 1e9)
    assert dropout.gflops == pytest.approx(3.5 * 4 * 3 * 3 * 400 * 8 / dropout.timing.median / 1e9)


def test_the_rival_is_what_torch_chooses(monkeypatch):
    seconds = {limit.OURS: 1.0, "SDPA": 2.0, "SDPA math": 1.5, "SDPA flash": 1.95, "FMA ceiling": 1.0}

    def told(calls, budget_s, device):
        return {name: timing.Timing((seconds[name],) * 3, 1) for name in calls}

    monkeypatch.setattr(limit, "interleave", told)
    figure = limit.measure(tiny(ceiling_share=0.5), 0.0)
    assert (figure.rival, figure.ratio, figure.ratio_met, figure.share_met) == ("SDPA", 2.0, True, False)
    assert figure.note == "SDPA math, by force: 1.5e+03 ms"
    _, _, operations = timing.fma_ceiling()
    assert figure.ceiling_gflops == pytest.approx(operations / 1e9)
    assert operations == build.CPU.load().fma_ceiling(timing.CEILING_STEPS)
    shares = {0.49: False, 0.5: True, 1.0: True, 1.01: False}
    assert {share: replace(figure, ceiling_share=share).share_met for share in shares} == shares
    assert not limit.measure(tiny(target=2.01), 0.0).ratio_met
    assert limit.measure(tiny(), 0.0).share_met is None


@pytest.mark.parametrize("n_wrong", [0, 1, 2])  # by itself, by force math, by force flash
def test_a_wrong_rival_is_out_of_the_running(monkeypatch, n_wrong):
    right = torch.nn.functional.scaled_dot_product_attention
    calls = []

    def one_wrong(*args, **options):
        calls.append(None)
        return right(*args, **options) * (1.001 if len(calls) == n_wrong + 1 else 1)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", one_wrong)
    figure = limit.measure(tiny(), 0.0)
    name = ["SDPA", "SDPA math", "SDPA flash"][n_wrong]
    assert (figure.verdict, figure.failed) == ("n/a" if name == "SDPA" else "right", False)
    assert figure.note.startswith(f"{name}: o: max error")


def test_time_per_useful_pair(figures):
    figure = figures[-1]
    padded, square = visible_share(PAD), visible_share(PAD_QUERIES)
    assert square < padded < 1
    assert figure.ratio == pytest.approx(figure.rival_timing.median / figure.timing.median * square / padded)


def test_the_target_of_padding_grows_with_what_is_hidden():
    figure = limit.measure(tiny(target=1.2, over_visible_share=True), 0.0)
    assert figure.target == pytest.approx(1.2 / visible_share(PAD))


@pytest.mark.parametrize("duel", [tiny(), tiny(DROPOUT, "forward+backward"), against_padded_keys("backward")], ids=str)
def test_a_wrong_answer_is_not_timed(monkeypatch, duel):
    right = fastattn.attention
    monkeypatch.setattr(fastattn, "attention", lambda *args, **options: right(*args, **options) * 1.001)
    figure = limit.measure(duel, 0.0)
    assert (figure.verdict, figure.failed, figure.ratio, figure.ratio_met) == ("wrong", True, None, False)
    assert "max error" in figure.note


def test_a_missing_kernel_is_said(monkeypatch):
    monkeypatch.setattr(cpu, "unsupported", lambda *args: ["it is Sunday"])
    figure = limit.measure(tiny(), 0.0)
    assert (figure.verdict, figure.failed, figure.ratio_met) == ("n/a", False, False)
    assert "it is Sunday" in figure.note


def test_long_cases_are_checked_in_their_outer_heads():
    problem = cases.make_problem(tiny().job, "cpu", outer_heads=True)
    assert problem.key_heads == [0, 2]
    o = {"o": torch.cat([problem.naive["o"][:, :1], problem.naive["o"]], 1)}
    assert run.wrong(run.errors(problem, o)) == ""
    for head, is_checked in ((0, True), (1, False), (2, True)):
        broken = o["o"].clone()
        broken[:, head] += 1
        assert bool(run.wrong(run.errors(problem, {"o": broken}))) == is_checked


def test_sixteen_bits_are_compared_without_native_support(monkeypatch):
    level = "FASTATTN_CPU_CAPABILITY"
    monkeypatch.delenv(level, raising=False)
    monkeypatch.setattr(cpu, "capability", lambda: os.environ.get(level, "avx512_bf16"))
    assert limit.measure(tiny(fp32_arithmetic=True), 0.0).instruction_set == "avx512"
    assert level not in os.environ
    assert limit.measure(tiny(), 0.0).instruction_set == "avx512_bf16"
    monkeypatch.setenv(level, "portable")  # what the user chose is not raised
    assert limit.measure(tiny(fp32_arithmetic=True), 0.0).instruction_set == "portable"
    assert os.environ[level] == "portable"


@pytest.mark.parametrize("level", build.CPU.load().build_info()["runs_here"])
def test_the_ceiling_is_work_that_was_done(monkeypatch, level):
    monkeypatch.setenv("FASTATTN_CPU_CAPABILITY", level)
    threads, steps = torch.get_num_threads() + 1, 300_000
    lanes = {"avx2": 8, "neon_bf16": 4, "neon": 4, "portable": 4}.get(level, 16)
    chains = 12 if level in ("avx2", "portable") else 24
    torch.set_num_threads(threads)
    start = time.perf_counter()
    operations = build.CPU.load().fma_ceiling(steps)
    elapsed = time.perf_counter() - start
    assert operations == threads * steps * 2 * chains * lanes
    assert operations / elapsed < threads * 2 * 2 * lanes * 8e9  # two FMAs a cycle, at a clock that no machine has


def test_json_holds_targets_ratios_and_shares(figures):
    document = json.loads(limit_report.as_json(report.Report.of(figures, "cpu")))
    assert document["method"] == limit_report.METHOD
    assert len(document["rows"]) == len(figures)
    for figure, row in zip(figures, document["rows"], strict=True):
        assert row["case"] == figure.job.case.name
        assert row["ratio"] == pytest.approx(figure.ratio, rel=1e-4)
        assert row["ceiling_share"] == pytest.approx(figure.ceiling_share, rel=1e-4)
        assert (row["target"], row["met"]) == (2.0, figure.ratio_met)
        assert len(row["time_ms"]["samples"]) == len(row["rival_time_ms"]["samples"]) == timing.MIN_ROUNDS
    assert [row["ceiling_share_target"] for row in document["rows"]] == [None, 0.5, None, None]
    assert document["rows"][-1]["rival_job"]["case"] == "tiny-pad"


def test_table_shows_each_figure_beside_its_target(figures, capsys):
    missed, met = replace(figures[0], ratio=1.5), replace(figures[1], ratio=2.5, ceiling_share=0.6)
    absent = replace(figures[3], verdict="n/a", ratio=None, note="no rival")
    limit_report.print_table(report.Report.of([missed, met, absent], "cpu"))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    first, second, third = (line for line in lines if line.startswith("tiny-pad"))
    assert "1.50x 2x not met" in first
    assert "2.50x 2x met" in second
    assert "60% 50% met" in second
    assert third == "tiny-pad-queries fp32 forward n/a keys 2x not met no rival"
    assert lines[-1] == "2 of 4 targets met"


def test_picture_marks_what_misses_its_target(figures):
    for ratio, kind in ((2.5, "ours"), (1.5, "missed")):
        drawn = limit_report.as_svg(report.Report.of([replace(figure, ratio=ratio) for figure in figures[2:]], "cpu"))
        assert set(re.findall(r'<rect class="(\w+)"', drawn)) == {kind}
        assert drawn.count("<path") == len(figures[2:])  # the targets


def test_nothing_to_draw_is_an_error(figures):
    missing = report.Report.of([replace(figures[0], verdict="n/a", note="no rival")], "cpu")
    with pytest.raises(ValueError, match="nothing to draw"):
        limit_report.as_svg(missing)
