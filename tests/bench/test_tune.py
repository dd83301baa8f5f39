"""`fastattn tune` with backends that are wrong, hang, crash, leak and lie, and the command around it."""

import json
import sys
import textwrap

import pytest
import torch

from fastattn.__main__ import main
from fastattn.backends import aten, choice, record
from fastattn.bench import tune
from fastattn.bench.tune import CallClass, Limits

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
    "raising": ("raise KeyError('no such kernel')", "ends its process: exit code 1, KeyError: 'no such kernel'"),
    "wrong_in_long_calls": ("if q.shape[2] == 128: o += 1", "in float32, head dim up to 64, up to 128 keys, padding"),
    "lying": ("time.perf_counter = lambda: 0.0; time.sleep(0.05)", ""),
}
NOT_THERE = "def unavailable(device): return 'needs a compiler'"  # which is asked first


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Backends with these faults, as modules that a child process imports too."""
    monkeypatch.syspath_prepend(tmp_path)
    modules = []
    faults = {name: fault for name, (fault, _) in FAULTS.items()} | {"not_there": ""}
    for name, fault in faults.items():
        text = f"""\
            import math, os, signal, time
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
    right_at_hand = (backend for backend in faulty if backend.NAME in FAULTS)
    findings = tune.tune([CLASS], (*right_at_hand, aten), Limits(check=100, other=60))
    for name, (_, sentence) in FAULTS.items():
        why = findings.record.families[f"{name} float32 forward"]
        assert sentence in why if sentence else why == "", f"{name}: {why}"
    ms = findings.record.classes[CLASS]
    assert set(ms) == {"lying", "torch"}
    assert ms["lying"] > 50
    assert choice.ranked(ms)[0] == "torch"
    assert "wrong_numbers float32 forward: NOT USED: o of [2, 4, 80, 64] with 80 keys and no mask is off by 0.2" in str(
        findings
    )


def test_what_is_not_there_is_told_and_not_timed(faulty):
    not_there = next(backend for backend in faulty if backend.NAME == "not_there")
    findings = tune.tune([CLASS], (not_there, aten))
    assert findings.missing == {"not_there": "needs a compiler"}
    assert findings.record.classes == {}
    assert "not_there cannot be had here: needs a compiler" in str(findings)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("FASTATTN_RECORD")
    record.read_again(torch.device("cpu"))
    yield tmp_path / "fastattn"
    monkeypatch.undo()
    record.read_again(torch.device("cpu"))


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


def test_classes_of_the_command_are_those_of_calls():
    """Each is the class of the call that stands for it, so that what was measured is found again."""
    from fastattn.bench.tune_child import Child

    for call_class in tune.classes_of(torch.device("cpu"), quick=False):
        if call_class.length in (1, 128):
            child = Child()
            child.problem(**call_class._asdict())
            assert CallClass.of(*child.inputs, child.spec, call_class.training) == call_class


def test_the_quick_classes_are_some_of_all():
    every, quick = (tune.classes_of(torch.device("cpu"), quick) for quick in (False, True))
    assert set(quick) < set(every)
    assert json.loads(json.dumps([list(x) for x in every])) == [list(x) for x in every]
