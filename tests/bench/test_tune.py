"""`fastattn tune` with backends that are wrong, hang, crash, leak and lie, and the command around it."""

import json
import sys
import textwrap
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastattn import Mask
from fastattn.__main__ import main
from fastattn.backends import aten, choice, cpu, hopper, record, triton
from fastattn.backends.triton import configs
from fastattn.bench import tune, tune_child
from fastattn.bench.tune import CallClass, Limits
from fastattn.bench.tune_child import SHAPES
from fastattn.spec import Spec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLASS = CallClass("cpu", "float32", 64, 128, "padding", training=False)
FAULTS = {  # what stands before `return o, lse` of a backend that is otherwise right, and what is said of it
    "wrong_numbers": ("o.view(-1)[::1000] += 0.2", "is off by"),
    "nan_with_padding": (
        "if spec.mask.real_keys is not None: o[0, 0, 0, 0] = float('nan')",
        "and real_keys is off by nan",
    ),
    "other_bits": ("o += 1e-7 * torch.rand(())", "has other bits in the second call"),
    "hanging": ("time.sleep(3600)", "hangs: no answer in 5 s"),
    "crashing": ("os.kill(os.getpid(), signal.SIGSEGV)", "ends its process: SIGSEGV"),
    "leaking": ("kept.append(b'x' * 2**22)", "calls left"),
    "lingering": (
        "threading.Thread(target=time.sleep, args=(1000,)).start(); raise KeyError('to the end')",
        "ends its process: it lingers, KeyError: 'to the end'",
    ),
    "raising": ("raise LookupError('no kernel\\nPass -v')", "ends its process: exit code 1, LookupError: no kernel"),
    "spoiling": ("math.isfinite = None; raise RuntimeError('all memory is lost')", "RuntimeError: all memory is lost"),
    "wrong_in_long_calls": ("if q.shape[2] == 128: o += 1", "in float32, head dim up to 64, up to 128 keys, padding"),
    "lying": ("time.perf_counter = lambda: 0.0; time.sleep(0.05)", ""),
}
FULL = "raise torch.OutOfMemoryError('CUDA out of memory')"
NOT_THERE = "def unavailable(device): return 'needs a compiler'"  # which is asked first


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Backends with these faults, as modules that a child process imports too."""
    monkeypatch.syspath_prepend(tmp_path)
    modules = []
    faults = {name: fault for name, (fault, _) in FAULTS.items()} | {"not_there": "", "full": FULL}
    faults |= {"full_in_long_calls": f"if q.shape[2] == 128 and spec.mask.features(): {FULL}"}
    for name, fault in faults.items():
        text = f"""\
            import math, os, signal, threading, time
            import torch
            from fastattn.backends import aten
            from fastattn.backends.aten import *

            NAME, kept = {name!r}, []

            def forward(q, k, v, spec):
                o, lse = aten.forward(q, k, v, spec)
                {fault}
                return o, lse

            {NOT_THERE if name == "not_there" else ""}
            """
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        modules.append(__import__(name))
    yield tuple(modules)
    for name in faults:
        del sys.modules[name]


def test_each_fault_costs_its_backend_and_is_told(faulty, monkeypatch):
    ask = tune._Child.ask

    def impatient(child, request, limit=None, **arguments):
        """The others may be slow on a busy machine."""
        return ask(child, request, limit / 20 if arguments.get("module") == "hanging" else limit, **arguments)

    monkeypatch.setattr(tune._Child, "ask", impatient)
    monkeypatch.setattr(tune, "_END_S", 5.0)
    right_at_hand = (backend for backend in faulty if backend.NAME in FAULTS)
    findings = tune.tune([CLASS], (*right_at_hand, aten), Limits(check=100, other=60))
    for name, (_, sentence) in FAULTS.items():
        why = findings.record.families[f"{name} float32 forward"]
        assert sentence in why if sentence else why == "", f"{name}: {why}"
    ms = findings.record.classes[CLASS]
    assert set(ms) == {"lying", "torch"}
    assert ms["lying"] > 50
    assert choice.ranked(ms)[0] == "torch"
    told = "wrong_numbers float32 forward: NOT USED: o of [2, 4, 80, 64] with 80 keys and no mask is off by 0.2"
    assert told in str(findings)


@pytest.mark.parametrize(
    "measure", [lambda: tune.tune([CLASS], (aten,)), lambda: tune.time_tiles(DEVICE, "forward 64", ("a", "b"))]
)
def test_no_child_outlives_an_interruption(measure, monkeypatch):
    children = []

    def interrupted(child, *args, **kwargs):
        child._start()
        children.append(child.process)
        raise KeyboardInterrupt

    monkeypatch.setattr(tune._Child, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt) as interruption:  # which has the child in its frames
        measure()
    assert children[0].poll() is not None, interruption


def test_a_child_that_ends_between_two_questions_is_a_fault_and_started_again():
    with closing(tune._Child(Limits())) as child:
        assert child.ask("problem", **CLASS._asdict()) == {}
        child.process.kill()
        child.process.wait()
        with pytest.raises(tune.FaultError, match="ends its process: SIGKILL"):
            child.ask("problem", **CLASS._asdict())
        assert child.ask("problem", **CLASS._asdict()) == {}


def test_what_is_not_there_is_told_and_not_timed(faulty):
    not_there = next(backend for backend in faulty if backend.NAME == "not_there")
    findings = tune.tune([CLASS], (not_there, aten))
    assert findings.missing == {"not_there": "needs a compiler"}
    assert findings.record.classes == {}
    assert "not_there cannot be had here: needs a compiler" in str(findings)


def test_full_memory_is_nobodys_fault(faulty):
    """It costs the check, or the class of calls, of the candidate that wanted it."""
    full = (backend for backend in faulty if backend.NAME.startswith("full"))
    findings = tune.tune([CLASS], (*full, aten))
    assert findings.missing == {"full": "CUDA out of memory", str(CLASS): "CUDA out of memory"}
    assert findings.record.families == {"full_in_long_calls float32 forward": "", "torch float32 forward": ""}


def test_a_problem_that_cannot_be_made_costs_itself_alone(monkeypatch):
    def ask(child, request, limit=None, **arguments):
        if request == "problem":
            raise tune.FaultError("ends its process: exit code 1, torch.OutOfMemoryError")
        return {"fault": None}

    monkeypatch.setattr(tune._Child, "ask", ask)
    findings = tune.tune([CLASS], (cpu, aten))
    assert findings.record == record.Record({"cpu float32 forward": "", "torch float32 forward": ""})
    assert f"{CLASS} cannot be had here: ends its process: exit code 1, torch.OutOfMemoryError" in str(findings)
    times = tune.time_tiles(DEVICE, "forward 64", ("a", "b"))
    assert times == dict.fromkeys("ab", "ends its process: exit code 1, torch.OutOfMemoryError")


@pytest.mark.parametrize("backends", [("torch", "cpu"), ("cpu", "torch")], ids=str)
def test_the_default_one_is_that_of_the_table(backends, monkeypatch):
    """The first of these times is what another one has to gain upon."""
    monkeypatch.setattr(choice, "DEFAULT", (choice.Preference("cpu", backends, "so it is", measured=True),))
    monkeypatch.setattr(tune, "_times", lambda child, runs: dict.fromkeys(runs, 1.0))
    assert tuple(tune.tune([CLASS], (cpu, aten)).record.classes[CLASS]) == backends


@pytest.mark.parametrize("device", SHAPES)
def test_shapes_are_of_the_lengths_that_they_stand_for(device):
    for length, (B, H, n_q, n_k) in SHAPES[device].items():
        q, k = (torch.empty(B, H, n, 64, device="meta") for n in (n_q, n_k))
        assert CallClass.of(q, k, k, Spec(Mask(), 1.0), training=False).length == length


@pytest.mark.parametrize("has_hopper", [True, False])
def test_kernels_for_a_gpu_are_compiled_ahead_of_all_classes(has_hopper, monkeypatch):
    """In one request, of what Triton compiles; where that fails, the classes are timed nevertheless."""
    asked = []

    class Child:
        def __init__(self, limits):
            pass

        def ask(self, request, limit=None, **arguments):
            asked.append((request, arguments))
            if request == "compile":
                raise tune.FaultError("hangs")
            if arguments.get("module") == hopper.__name__ and not has_hopper:
                return {"missing": "no Gluon"}
            return {"fault": None, "takes": False}

        def close(self):
            pass

    classes = [CallClass("cuda", "bfloat16", 64, length, "none", training=False) for length in (128, 0)]
    monkeypatch.setattr(tune, "_Child", Child)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with FakeTensorMode():
        tune.tune(classes, (hopper, triton, aten))
    requests = [request for request, _ in asked]
    assert requests[:5] == ["check"] * 3 + ["compile", "problem"]
    assert requests.count("compile") == 1
    modules = [hopper.__name__, triton.__name__][not has_hopper :]
    assert sorted(asked[3][1]["modules"]) == modules
    assert asked[3][1]["problems"] == [x._asdict() for x in classes]


def test_the_child_compiles_what_each_backend_takes(monkeypatch):
    stages, child = [], tune_child.Child()

    @contextmanager
    def compiled_at_once():
        stages.append("compiles")
        yield
        stages.append("has compiled")

    monkeypatch.setattr(tune_child, "compiled_at_once", compiled_at_once)
    monkeypatch.setattr(
        child, "_compute", lambda backend, inputs, *_: stages.append((backend.NAME, inputs[0].shape[2]))
    )
    problems = [CLASS._replace(length=length)._asdict() for length in (128, 1)]
    assert child.compile([hopper.__name__, cpu.__name__], problems) == {}
    assert stages == ["compiles", ("cpu", 128), ("cpu", 1), "has compiled"]


@pytest.fixture
def some_tiles_wrong(tmp_path, monkeypatch):
    """Triton's backend, which crashes with the second tile of the forward and computes nonsense with the third."""
    default, crashes, is_wrong = tune.tiles_to_try(DEVICE)["forward 64"]
    text = f"""\
        import os, signal
        from fastattn.backends import triton
        from fastattn.backends.triton import *
        from fastattn.backends.triton import configs

        def forward(q, k, v, spec):
            o, lse = triton.forward(q, k, v, spec)
            tile = configs.in_place_of["forward 64"]
            if tile == {crashes!r}:
                os.kill(os.getpid(), signal.SIGSEGV)
            return o + (tile == {is_wrong!r}), lse
        """
    (tmp_path / "some_tiles_wrong.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tune, "triton", SimpleNamespace(__name__="some_tiles_wrong"))
    return default, crashes, is_wrong


@pytest.fixture
def quick_calls(monkeypatch):
    monkeypatch.setattr(tune, "_MOST_ROUNDS", 1)


def test_each_tile_is_timed_in_training_too(quick_calls):
    tiles = tune.tiles_to_try(DEVICE)["dk_dv 64"]
    times = tune.time_tiles(DEVICE, "dk_dv 64", tiles)
    assert [*times] == [*tiles]
    assert all(ms > 0 for ms in times.values())
    of_none = tune.time_tiles(DEVICE, "dk_dv 64", ["another"])
    assert of_none["another"].startswith("ends its process: exit code 1, ValueError: dk_dv 64 has the tiles")


def test_a_tile_that_crashes_or_is_wrong_costs_itself_alone(quick_calls, some_tiles_wrong):
    default, crashes, is_wrong = some_tiles_wrong
    times = tune.time_tiles(DEVICE, "forward 64", some_tiles_wrong)
    assert times[default] > 0
    assert times[crashes] == "ends its process: SIGSEGV"
    assert times[is_wrong].startswith("o of a timed call is off by")
    assert f"{crashes} NOT USED: ends its process" in tune.tiles_as_text("forward 64", times)


def test_a_device_that_wakes_up_misleads_about_nobody(monkeypatch):
    """The first calls of an H100 took three times as long, and the first tile was given up for it."""
    asked = []

    def ask(child, name, request, **arguments):
        asked.append(name)
        time.sleep(0.05 if len(asked) <= 3 else 0.002)
        return {"fault": ""}

    monkeypatch.setattr(tune, "_ask", ask)
    ms = tune._times(None, {"first": {}, "second": {}})
    assert max(ms.values()) < 10


def test_a_tile_serves_where_it_is_right_and_gains_enough():
    times = {
        "gains": {"default": 1.0, "a": 0.9, "b": 0.95},
        "too little": {"default": 1.0, "a": 0.98},
        "is wrong": {"default": 1.0, "a": "is off", "b": 0.9},
        "default is wrong": {"default": "is off", "a": 0.5},
    }
    assert tune.faster_tiles(times) == {"gains": "a", "is wrong": "b"}


def test_the_command_keeps_the_fastest_tiles(cache, monkeypatch, capsys):
    kernel, (default, other, _) = next(iter(tune.tiles_to_try(DEVICE).items()))
    name, _, head_dim = kernel.partition(" ")
    q = torch.empty(0, dtype=torch.bfloat16, device=DEVICE)

    def tile() -> str:
        return str(configs.config_for(name, q, int(head_dim), heavy_terms=0))

    monkeypatch.setattr(tune, "tune", lambda classes: tune.Findings(record.Record()))
    for times, expected in (({default: 2.0, other: 1.0}, other), ({default: 1.0, other: "is off"}, default)):
        monkeypatch.setattr(tune, "times_of_all_tiles", lambda device, times=times: {kernel: times})
        assert main(["tune", "--device", DEVICE.type]) == 0
        assert f"tiles of {kernel}: {default}" in capsys.readouterr().out
        record.read_again(DEVICE)
        assert tile() == expected
        assert main(["tune", "--quick", "--device", DEVICE.type]) == 0  # times none, and keeps them
        assert tile() == expected
    record.update(DEVICE, lambda old: replace(old, tiles={kernel: "of another version"}))
    assert tile() == default


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("FASTATTN_RECORD")
    record.read_again(torch.device("cpu"))
    yield tmp_path / "fastattn"
    monkeypatch.undo()
    record.read_again(torch.device("cpu"))


def test_the_command_keeps_what_was_found_before_an_interruption(cache, monkeypatch, capsys):
    device, other, later = torch.device("cpu"), CLASS._replace(length=0), CLASS._replace(length=1)
    record.update(device, lambda _: record.Record({}, {other: {"cpu": 4.0}, later: {"cpu": 5.0}}))

    def times(child, call_class, names, backends):
        if call_class == other:
            raise KeyboardInterrupt
        return {"torch": 1.0, "cpu": 2.0}

    monkeypatch.setattr(tune._Child, "ask", lambda *_, **__: {"fault": None})
    monkeypatch.setattr(tune, "_times_of_backends", times)
    monkeypatch.setattr(tune, "classes_of", lambda device, quick: [CLASS, other, later])
    assert main(["tune", "--quick", "--device", "cpu"]) == 130
    assert "interrupted: 1 of 3 classes of calls have times" in capsys.readouterr().out
    record.update(device, lambda old: replace(old, classes={x: ms for x, ms in old.classes.items() if x != CLASS}))
    nobody_reads = mock.Mock(side_effect=EOFError)  # as with `| head -0`
    monkeypatch.setattr("fastattn.__main__.print", nobody_reads, raising=False)
    with pytest.raises(EOFError):
        main(["tune", "--quick", "--device", "cpu"])
    kept = record.read_again(device).classes
    assert kept == {CLASS: {"torch": 1.0, "cpu": 2.0}, other: {"cpu": 4.0}, later: {"cpu": 5.0}}


def test_the_command_says_where_nothing_is_kept(cache, monkeypatch, capsys):
    monkeypatch.setattr(tune, "tune", lambda classes: tune.Findings(record.Record({}, {CLASS: {"cpu": 2.0}})))
    assert main(["tune", "--quick", "--device", "cpu"]) == 0
    assert f"kept in {record.path(torch.device('cpu'))}" in capsys.readouterr().out
    monkeypatch.setenv("FASTATTN_RECORD", "0")
    record.path(torch.device("cpu")).unlink()
    assert main(["tune", "--quick", "--device", "cpu"]) == 0
    assert "not kept: " in capsys.readouterr().out


def test_the_command_keeps_shares_and_shows_what_it_found(cache, tmp_path, monkeypatch, capsys):
    found = record.Record(
        {"cpu float32 forward": "", "torch float32 forward": "is off"}, {CLASS: {"cpu": 2.0, "torch": 1.0}}
    )
    monkeypatch.setattr(tune, "tune", lambda classes: tune.Findings(found))
    assert main(["tune", "--quick", "--device", "cpu", "--share", str(tmp_path / "found.json")]) == 0
    text = capsys.readouterr().out
    assert "torch float32 forward: NOT USED: is off" in text
    assert (
        "the default choice is best in 0\n  float32, head dim up to 64, up to 128 keys, padding, forward: torch 1 ms"
        in text
    )
    assert record.path(torch.device("cpu")).read_text() == (tmp_path / "found.json").read_text()
    assert record.read_again(torch.device("cpu")) == found
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "  cpu: checked on this machine: float32 forward; timed in 1 classes of calls\n" in text
    assert "  cpu: not used for float32 forward: is off; timed in 1 classes of calls\n" in text


def test_a_quick_run_adds_to_what_a_longer_one_found(cache, monkeypatch):
    other = CLASS._replace(dtype="float16")
    longer = record.Record({"cpu float16 forward": "is off"}, {CLASS: {"torch": 2.0}, other: {"cpu": 2.0}}, {"a": "b"})
    record.update(torch.device("cpu"), lambda _: longer)
    found = record.Record({"cpu float32 forward": ""}, {})
    monkeypatch.setattr(tune, "tune", lambda classes: tune.Findings(found))
    assert main(["tune", "--quick", "--device", "cpu"]) == 0
    kept = record.Record(longer.families | found.families, {other: {"cpu": 2.0}}, {"a": "b"})
    assert record.read_again(torch.device("cpu")) == kept


def test_classes_of_the_command_are_those_of_calls():
    """Each is the class of the call that stands for it, so that what was measured is found again."""
    for call_class in tune.classes_of(torch.device("cpu"), quick=False):
        if call_class.length in (1, 128):
            child = tune_child.Child()
            child.problem(**call_class._asdict())
            assert CallClass.of(*child.inputs, child.spec, call_class.training) == call_class


def test_the_quick_classes_are_some_of_all():
    every, quick = (tune.classes_of(torch.device("cpu"), quick) for quick in (False, True))
    assert set(quick) < set(every)
    assert json.loads(json.dumps([list(x) for x in every])) == [list(x) for x in every]
