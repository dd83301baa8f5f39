"""Measurements of `python -m benchmarks.gpu` and their evaluation, as far as a CPU can tell."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fresh_python
import pytest
import torch

import fastattn
from benchmarks.gpu import render, rivals, speed, targets
from benchmarks.gpu.record import append, file_name, finished, forget, is_failure, load
from fastattn import testing
from fastattn.bench import cases, run, timing
from fastattn.testing import CASES, make_inputs

ROOT = Path(__file__).parents[2]


def test_backward_on_hopper_is_timed_in_any_order_too(monkeypatch):
    case = speed._shrunk(next(case for case in CASES if case.name == "D128-N4096-causal"))
    problem = cases.make_problem(cases.Job("attention", case, "bf16", "backward"), "cpu")
    contenders = {c.name: c for c in rivals.gpu_contenders(problem, "hopper") if c.family == "fastattn"}
    asked = []
    monkeypatch.setattr(fastattn, "attention", lambda *args, **options: asked.append(options))
    for contender in contenders.values():
        contender.compute()
    assert list(contenders) == ["fastattn hopper", "fastattn hopper, deterministic=False"]
    assert [options["backend"] for options in asked] == ["hopper", "hopper"]
    assert [options.get("deterministic", True) for options in asked] == [True, False]
    forward = replace(problem, job=replace(problem.job, timed="forward"))
    assert not any("deterministic" in c.name for c in rivals.gpu_contenders(forward, "hopper"))


def test_what_cuda_is_promised_on_a_gpu_is_timed():
    timed = {job.case.name for job in speed.jobs("cuda", "cuda")}
    promised = {each.promise.split()[0].rstrip(",") for each in targets.outcomes([{"stage": "cuda", "verdict": "x"}])}
    assert timed - {"launch"} == promised - {"forward", "forward+backward"}


def test_a_wrong_answer_of_ours_is_a_failure(monkeypatch):
    right = fastattn.attention
    monkeypatch.setattr(fastattn, "attention", lambda *args, **options: right(*args, **options) * 1.1)
    (job,) = (job for job in speed.jobs("cpu") if str(job) == "attention D128-N4096-causal bf16 forward")
    rows = []
    on_cpu = SimpleNamespace(option=SimpleNamespace(device="cpu", only=None))
    speed.test_speed(job, on_cpu, lambda name, row: rows.append(row))
    verdicts = {row["contender"]: (row["verdict"], is_failure(row)) for row in rows}
    assert verdicts["fastattn cpu"] == ("wrong", True)
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
    happened, now, waited = [], [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]
            happened.append("event")

        def query(self):
            return waited.pop() if waited else False

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
    timed = timing.interleave({"a": timing.Call(call)}, 0.0, "cuda")["a"]
    assert timed.repetitions == 1
    assert timed.seconds == pytest.approx((0.003,) * timing.MIN_ROUNDS)
    # The host took 3 ms to queue the call, and one overwriting takes 1 ms: 1 + 1.5 * 3 of them keep the GPU busy.
    assert happened[-10:] == ["wait", *["flush"] * 6, "event", "call", "event", "wait"][-10:]
    assert "".join(x[0] for x in happened).endswith("w" + "f" * 6 + "ecew")

    happened.clear()
    waited[:] = [True, True]
    assert timing._GPUWatch.sample(SimpleNamespace(scratch=Scratch()), timing.Call(call), 6) == pytest.approx(0.003)
    assert "".join(x[0] for x in happened) == "".join("w" + "f" * n + "ecew" for n in (6, 12, 24))
    waited[:] = [True] * 9
    assert timing._GPUWatch.sample(SimpleNamespace(scratch=Scratch()), timing.Call(call), 6) == pytest.approx(0.003)
    assert len(waited) == 9 - 5, "it may be the call that waits"


def row(case, timed, contender, median, tflops=1.0, level="attention", **more):
    family = "fastattn" if contender.startswith("fastattn") else "torch"
    shape = {"B": 4, "H": 16, "H_kv": 16, "n_q": 4096, "n_k": 4096, "D": 128, "d_v": 128}
    return {
        "stage": "bench", "test": f"{level} {case} bf16 {timed}", "level": level, "case": case, "pass": timed,
        "contender": contender, "family": family, "verdict": "right", "note": "", "tflops": tflops, "shape": shape,
        "gbps": 2.0, "max_error": 0.01, "peak_mib": 64.25, "time_ms": {"median": median, "p20": median, "p80": median},
    } | more  # fmt: skip


def outcome(rows, start):
    (result,) = (result for result in targets.outcomes(rows) if result.promise.startswith(start))
    return result.figure, result.met


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


def test_cuda_is_held_against_kernels_that_are_made_for_the_gpu():
    def timed(case, which, name, ms):
        return row(case, which, name, ms, stage="cuda")

    case = "D64-N2048-causal"
    for ms, figure, met in ((1.0, "0.71x", True), (1.1, "0.645x", False)):
        rows = [timed(case, "forward", "fastattn cuda", ms), timed(case, "forward", "SDPA flash", 0.71)]
        assert outcome(rows, f"{case} forward: at least 0.7 times") == (figure, met)
        assert outcome(rows, f"{case} backward: at least 0.6 times") == ("not measured", None)
    rows = [
        timed("D128-N2048-pad", which, name, ms)
        for which, ms in (("forward", 1.0), ("backward", 2.0))
        for name, ms in (("fastattn cuda", ms), ("SDPA efficient", 1.6 * ms))
    ]
    assert outcome(rows, "D128-N2048-pad, both passes: at least 1.5 times as fast as SDPA eff") == ("1.6x", True)
    graph = timed("launch", "forward", "fastattn cuda, CUDA graph", 0.01) | {"level": "launch"}
    assert outcome([graph], "forward in a CUDA graph") == ("10 us a replay", True)
    assert not any("TFLOP/s" in each.promise for each in targets.outcomes(rows))


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
    names = set(map(str, speed.jobs("cuda", "hopper")))
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


def recorded(path, rows, device="cuda"):
    """Writes the record of a run with these rows; what it says."""
    state = {"clocks.sm": "1980 MHz", "power.draw": "700 W"}
    versions = {"fastattn": "0.1.0 (abc)", "torch": "2.11.0", "triton": "3.6.0"}
    machine = {"gpu": "NVIDIA H200", "cpu": "?"}
    begin = {"stage": "bench", "date": "2026-01-02", "sources": "s", "device": device, "machine": machine}
    append(path, {"begin": begin | {"versions": versions, "state_before": state}})
    for test in dict.fromkeys((row["stage"], row["test"]) for row in rows):
        of_test = [row for row in rows if (row["stage"], row["test"]) == test]
        append(path, dict(zip(("stage", "test"), test, strict=True)) | {"sources": "s", "rows": of_test})
    append(path, {"end": {"state_after": {}, "complete": True}})
    return load(path)


def test_the_table_of_the_docs_has_a_line_for_each_measured_case(tmp_path):
    assert render.for_docs(tmp_path) == render.NOT_MEASURED
    rows = [
        row("D128-N4096-full", "forward", "fastattn triton", 1, 431.4),
        row("D128-N4096-full", "backward", "fastattn triton", 1, 288.6),
        row("D128-N4096-full", "forward", "SDPA cudnn", 1, 640),
        row("D128-N4096-full", "forward", "SDPA flash", 1, 640, verdict="wrong"),
    ]
    recorded(tmp_path / "nvidia-h200.jsonl", rows)
    recorded(tmp_path / "dry.jsonl", rows, "cpu")
    text = render.for_docs(tmp_path)
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
    rows += [{"stage": "truth", "test": "t::a", "verdict": "right", "note": "torch: all NaN"}]
    rows += [{"stage": "truth", "test": "t::b", "verdict": "died", "note": "exit code -11"}]
    path = tmp_path / "gpu.jsonl"
    recorded(path, rows)
    written = render.render(path)
    assert [x.name for x in written] == ["gpu.md", "gpu-lengths.png", "gpu-cases.png"]
    text = written[0].read_text()
    for line in (
        "| bench | 2026-01-02 | 0.1.0 (abc) | 1980 MHz, 700 W |  | yes |",
        "* t::b: died: exit code -11",
        "* t::a: torch: all NaN",
        "| bert | 1 | 1 | n/a |",
        "| attention bert forward | fastattn triton | 1 | 1-1 | 1 | 2 | 64.2 | 0.01 | SDPA cudnn 2 ms (2.00x) |",
        "* attention bert forward: FlexAttention: has | no time",
    ):
        assert line in text, line
    for picture in written[1:]:
        pixels = images.imread(picture)
        blue = (pixels[..., 2] > 0.5) & (pixels[..., 0] < 0.2)
        assert blue.sum() > 30


def test_a_record_counts_the_last_line_of_a_test(tmp_path):
    assert file_name("NVIDIA H200", "2.11.0+cu130", "3.6.0") == "nvidia-h200-2.11.0-3.6.0.jsonl"
    path = tmp_path / "record.jsonl"
    rows = [{"stage": "bench", "test": test, "verdict": verdict} for test, verdict in (("a", "wrong"), ("b", "right"))]
    recorded(path, [*rows, rows[1] | {"stage": "truth", "verdict": "died"}])
    append(path, {"stage": "bench", "test": "a", "sources": "others", "rows": [{"verdict": "right"}] * 2})
    assert [(row["stage"], row["test"], row["verdict"]) for row in load(path)["rows"]] == [
        ("bench", "a", "right"), ("bench", "a", "right"), ("bench", "b", "right"), ("truth", "b", "died"),
    ]  # fmt: skip
    with path.open("a") as file:
        file.write('{"stage": "bench", "test": "cut')  # as by a full disk
    append(path, {"stage": "bench", "test": "c", "sources": "s", "rows": []})
    assert finished(path, "bench", "s") == {"a", "b", "c"}
    assert len(load(path)["rows"]) == 4
    assert finished(path, "bench", "others") == {"a"}
    forget(path, "bench", lambda test, rows: any(map(is_failure, rows)))
    assert finished(path, "bench", "s") == {"b", "c"}
    assert finished(path, "truth", "s") == {"b"}


def test_the_command_needs_torch_alone_until_it_runs():
    code = "import sys; sys.modules |= dict.fromkeys(('pytest', 'matplotlib', 'rich', 'hypothesis', 'triton'))\n"
    code += "from benchmarks.gpu.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    done = fresh_python.run(code, cwd=ROOT)
    assert "truth" in done.stdout


def test_of_what_two_stages_timed_the_latest_stands():
    job = {"level": "attention", "case": "a", "dtype": "bf16", "pass": "forward", "verdict": "right"}
    rows = [
        job | {"stage": "bench", "contender": "fastattn hopper", "sources": "new", "tflops": 2.0},
        job | {"stage": "hopper", "contender": "fastattn hopper", "sources": "old", "tflops": 1.0},
        job | {"stage": "hopper", "contender": "SDPA", "sources": "old", "tflops": 3.0},
        job | {"stage": "hopper", "case": "b", "contender": "SDPA", "sources": "old", "tflops": 4.0},
    ]
    document = {"runs": [{"sources": "old"}, {"sources": "new"}], "rows": rows}
    shown = [row["tflops"] for row in render._timed_rows(document)]
    assert sorted(shown) == [2.0, 4.0], "none beside one of another run, in which the GPU may have been slower"
