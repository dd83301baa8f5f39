"""The choice among backends: the default table, what was measured on this machine, and checks of unknown machines."""

import os
import re
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fastattn
from fastattn import Mask, backends, machine
from fastattn.backends import BACKENDS, aten, backend_by_name, build, choice, cpu, record, select, selfcheck
from fastattn.backends.choice import CallClass
from fastattn.backends.record import Record
from fastattn.plan import forget_plans, short_ways
from fastattn.spec import Spec
from fastattn.testing import DTYPES

CPU = torch.device("cpu")
X = torch.randn(1, 2, 64, 64)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    """An empty cache folder, and no plans of others."""
    build.CPU.load()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("FASTATTN_RECORD")
    record.read_again(CPU)
    forget_plans()
    yield
    monkeypatch.undo()
    record.read_again(CPU)
    forget_plans()


def know(families: dict[str, str] | None = None, **ms: float) -> None:
    """Keeps a record, as `fastattn tune` does, with these times of calls like that of X without a mask."""
    call_class = CallClass("cpu", "float32", 64, 128, "none", training=False)
    record.update(CPU, lambda _: Record(families or {}, {call_class: ms} if ms else {}))
    forget_plans()


def test_the_key_of_a_record_asks_git_once(monkeypatch):
    asked = []
    monkeypatch.setattr(machine, "_output_of", lambda *command: (asked.append(command), "abc")[1])
    machine._commit.cache_clear()
    assert record.key(CPU) == record.key(CPU)
    machine._commit.cache_clear()
    assert len(asked) == 1


def test_each_gpu_of_a_process_has_the_record_of_its_kind(monkeypatch):
    names = ["H100", "RTX 3060"]
    kind = lambda device: SimpleNamespace(name=names[torch.device(device).index], major=9, minor=device.index)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", kind)
    monkeypatch.setattr(record, "_records", {})
    first, second = (torch.device("cuda", i) for i in range(2))
    record.update(first, lambda _: Record({"triton float16 forward": ""}))
    assert record.of(second) == Record()
    record.update(second, lambda _: Record({"triton float16 forward": "is off by nan"}))
    assert record.of(first).families == {"triton float16 forward": ""}


class TestDefaultTable:
    @pytest.mark.parametrize(
        ("call", "capability", "first"),
        [
            ({"device": "cpu"}, None, "cpu"),
            ({"device": "cpu", "mask": "other"}, None, "cpu"),
            ({}, (8, 0), "torch"),
            ({"mask": "padding"}, (8, 0), "triton"),
            ({"mask": "padding"}, (9, 0), "hopper"),
            ({"mask": "padding", "length": 1024}, (9, 0), "triton"),
            ({}, (9, 0), "torch"),
            ({"length": 1024}, (9, 0), "torch"),
            ({"length": 128}, (9, 0), "triton"),
            ({"training": True}, (9, 0), "hopper"),
            ({"training": True, "length": 1024}, (9, 0), "triton"),
            ({"training": True, "head_dim": 0}, (9, 0), "torch"),
            ({"dtype": "float32"}, (8, 0), "torch"),
            ({"dtype": "float32"}, (9, 0), "triton"),
            ({"dtype": "float32", "training": True}, (9, 0), "triton"),
            ({"dtype": "float32", "training": True}, (8, 6), "triton"),
        ],
        ids=str,
    )
    def test_says_who_is_first(self, call, capability, first):
        usual = CallClass("cuda", "float16", 128, 0, "causal", training=False)
        call_class = usual._replace(**call)
        assert choice.default_order(call_class.device, call_class, capability).backends[0] == first

    def test_is_asked_about_the_call(self, monkeypatch):
        """Tensors of a GPU without memory: what stands in the call and in the device."""
        monkeypatch.setattr(choice, "capability_of", lambda device: (9, 0) if device.type == "cuda" else None)
        with FakeTensorMode():
            x = torch.empty(1, 2, 2048, 64, dtype=torch.bfloat16, device="cuda")
            for training, first in ((True, "hopper"), (False, "torch")):
                assert choice.order(x, x, x, Spec(Mask(causal=True), 1.0), training).backends[0] == first

    def test_names_backends_and_fields_and_says_of_each_entry_whether_it_was_measured(self, monkeypatch):
        for entry in choice.DEFAULT:
            assert all(backend_by_name(name) in BACKENDS for name in entry.backends)
            assert set(entry.calls or {}) <= set(CallClass._fields)
            monkeypatch.setattr(choice, "DEFAULT", (entry,))
            why = choice.default_order(entry.device, None, None).why
            assert why.endswith("(measured)" if entry.measured else "(not measured)")

    def test_devices_without_an_entry_have_the_order_of_the_registry(self):
        x = torch.empty(1, 1, 2, 8, device="meta")
        assert choice.order(x, x, x, Spec(Mask(), 1.0), False).backends == ()

    @pytest.mark.parametrize(
        ("mask", "named"),
        [
            (Mask(), "none"),
            (Mask(causal=True), "causal"),
            (Mask(causal=True, q_offset=1), "padding"),
            (Mask(causal=True, real_keys=torch.ones(1, 64, dtype=torch.bool)), "padding"),
            (Mask(window=(3, None)), "other"),
        ],
    )
    def test_classes_of_masks(self, mask, named):
        assert CallClass.of(X, X, X, Spec(mask, 1.0), training=True).mask == named

    @pytest.mark.parametrize(("n_q", "n_k", "length"), [(1, 5000, 1), (5, 128, 128), (64, 129, 1024), (64, 1025, 0)])
    def test_classes_of_lengths(self, n_q, n_k, length):
        q, k = X.new_empty(1, 1, n_q, 80), X.new_empty(1, 1, n_k, 80)
        found = CallClass.of(q, k, k, Spec(Mask(), 1.0), training=False)
        assert (found.length, found.head_dim) == (length, 128)


class TestWhatWasMeasured:
    def test_chooses(self):
        assert fastattn.explain(X, X, X).backend == "cpu"
        know(cpu=2.0, torch=1.0)
        explanation = fastattn.explain(X, X, X)
        assert explanation.backend == "torch"
        assert explanation.order.endswith("no mask, forward: torch 1 ms, cpu 2 ms")
        assert next(iter(explanation.objections)) == "torch"

    def test_holds_for_its_class_alone(self):
        know(cpu=2.0, torch=1.0)
        assert fastattn.explain(X, X, X, Mask(causal=True)).backend == "cpu"
        assert fastattn.explain(X.clone().requires_grad_(), X, X).backend == "cpu"
        assert fastattn.explain(X.half(), X.half(), X.half()).backend == "cpu"

    def test_leaves_the_default_where_the_gain_is_small(self):
        know(cpu=1.02, torch=1.0)
        assert fastattn.explain(X, X, X).backend == "cpu"

    @pytest.mark.parametrize("before", [False, True], ids=["first call", "after a short call"])
    def test_is_what_calls_are_computed_by(self, before, monkeypatch):
        if before:
            fastattn.attention(X, X, X)
            assert short_ways
        know(cpu=2.0, torch=1.0)
        called = []
        monkeypatch.setattr(aten, "forward", lambda *args, forward=aten.forward: (called.append(1), forward(*args))[1])
        for _ in range(2):
            fastattn.attention(X, X, X)
        assert called == [1, 1]

    def test_is_what_compiled_calls_are_computed_by(self):
        know(cpu=2.0, torch=1.0)
        graphs = []

        def keep(graph, _):
            graphs.append([node.args[-1] for node in graph.graph.nodes if node.args])
            return graph

        with_ops = aot_autograd(fw_compiler=keep)
        torch.compile(lambda x: fastattn.attention(x, x, x), backend=with_ops, fullgraph=True)(X)
        torch._dynamo.reset()
        assert "torch" in graphs[0]

    def test_lets_a_backend_serve_that_does_so_by_name_only(self, monkeypatch):
        monkeypatch.setattr(aten, "by_name_only", lambda device: "is shy")
        know(cpu=2.0, torch=1.0)
        assert select(X, X, X, Spec(Mask(), 1.0)) is aten
        assert fastattn.explain(X, X, X).backend == "torch"

    @pytest.mark.parametrize("ms", [{}, {"cpu": 1.0, "torch": 2.0}], ids=["untimed", "timed before it was wrong"])
    def test_refuses_what_was_wrong_here(self, ms):
        know({"cpu float32 forward": "o is off by 3"}, **ms)
        why = r"failed its check on this machine \(cpu float32 forward: o is"
        with pytest.warns(fastattn.FallbackWarning, match=why):
            fastattn.attention(X, X, X)
        assert "off by 3" in "; ".join(fastattn.explain(X, X, X).objections["cpu"])
        assert select(X, X, X, Spec(Mask(), 1.0), "cpu") is cpu, "what is named is used"


class TestRecord:
    def test_is_read_as_it_was_written(self):
        know({"cpu float32 forward": ""}, cpu=2.0, torch=1.0)
        before = record.of(CPU)
        assert record.read_again(CPU) == before
        assert len(before.classes) == 1

    @pytest.mark.parametrize(
        "damage",
        [
            lambda text: text[: len(text) // 2],
            lambda text: "",
            lambda text: text.replace('"schema": 2', '"schema": 1'),
            lambda text: text.replace("2.0", '"fast"'),
            lambda text: text.replace("2.0", "NaN"),
            lambda text: text.replace("2.0", "1" + 400 * "0"),
            lambda text: text.replace('"ms": {', '"ns": {'),
            lambda text: "[]",
        ],
        ids=["truncated", "empty", "another schema", "a word", "NaN", "no float", "another name", "a list"],
    )
    def test_that_is_damaged_is_ignored_with_a_warning(self, damage):
        know(cpu=2.0, torch=1.0)
        path = record.path(CPU)
        path.write_text(damage(path.read_text()))
        with pytest.warns(UserWarning, match="is not a record that `fastattn tune` wrote, and is ignored"):
            assert record.read_again(CPU) == Record()

    def test_of_a_gpu_asks_nothing_of_torch_that_a_version_lacks(self, monkeypatch):
        gpu = SimpleNamespace(name="a GPU", major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        found = record.key(torch.device("cuda"))
        assert (found["gpu"], found["compute capability"]) == ("a GPU", "9.0")
        assert found["driver"].isdigit() or not torch.cuda.is_available()

    @pytest.mark.parametrize("name", ["fastattn", "torch", "triton", "cpu", "capability", None], ids=str)
    def test_of_anything_else_is_another_file_and_can_be_ignored(self, name, monkeypatch):
        know(cpu=2.0, torch=1.0)
        here = record.key(CPU)
        with monkeypatch.context() as patch:
            if name is None:
                patch.setenv("FASTATTN_RECORD", "0")
            else:
                patch.setattr(record, "key", lambda device: here | {name: "another"})
            assert record.read_again(CPU) == Record()
            know(cpu=3.0, torch=2.0)
        assert list(record.read_again(CPU).classes.values()) == [{"cpu": 2.0, "torch": 1.0}], "two machines, one home"

    def test_that_cannot_be_written_holds_for_this_process(self, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
        with pytest.warns(UserWarning, match="cannot be written, so this process alone knows it"):
            know(cpu=2.0, torch=1.0)
        assert fastattn.explain(X, X, X).backend == "torch"

    @pytest.mark.skipif(os.name != "posix", reason="file modes of POSIX")
    def test_of_another_user_can_be_read_and_one_in_a_closed_folder_is_none(self, monkeypatch):
        before = os.umask(0o077)
        try:
            know(cpu=2.0, torch=1.0)
        finally:
            os.umask(before)
        assert record.path(CPU).stat().st_mode & 0o777 == 0o644

        def closed(*_):
            raise PermissionError(13, "Permission denied")

        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("error")
            patch.setattr(Path, "glob", closed)
            assert record.read_again(CPU) == Record()

    def test_that_a_full_disk_cuts_off_leaves_the_old_one(self, monkeypatch):
        know(cpu=2.0, torch=1.0)

        def fail(_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.warns(UserWarning, match="No space left on device"):
            know(cpu=5.0, torch=1.0)
        assert list(record.read_again(CPU).classes.values()) == [{"cpu": 2.0, "torch": 1.0}]
        assert [path.suffix for path in record.path(CPU).parent.iterdir()] in ([".json", ".lock"], [".lock", ".json"])


FAULTS = {
    "one in a thousand": lambda o, *_: o.view(-1)[::1000].add_(0.2),
    "NaN beside padding": lambda o, spec, _: spec.mask.real_keys is not None and o[0, 0, 0].fill_(torch.nan),
    "other bits": lambda o, *_: o.add_(1e-7 * torch.rand(())),
    "lse": lambda o, _, lse: lse.add_(0.01),
}


class TestSelfCheck:
    """On a machine that no test has run on."""

    @pytest.fixture(autouse=True)
    def _unknown(self, monkeypatch):
        monkeypatch.setattr(selfcheck, "_KNOWN_INSTRUCTION_SETS", frozenset())

    @pytest.mark.parametrize(("backend", "dtypes"), [(cpu, DTYPES), (aten, (*DTYPES, torch.float64))])
    @pytest.mark.parametrize("training", [False, True])
    def test_passes_what_is_right(self, backend, dtypes, training):
        for dtype in dtypes:
            assert selfcheck.find_fault(backend, CPU, dtype, training) is None

    def test_comes_once_and_is_kept(self, monkeypatch):
        checked = []
        monkeypatch.setattr(selfcheck, "find_fault", lambda *family: checked.append(family[2:]))
        for x in (X, X[:, :1], X.clone().requires_grad_(), X):
            assert fastattn.explain(x, x, x).backend == "cpu"
            fastattn.attention(x, x, x)
        assert len(checked) == len(set(checked)) == 8, "each dtype and pass, since the short way takes all"
        assert set(record.read_again(CPU).families.values()) == {""}

    def test_that_lacks_a_compiler_is_kept_by_this_process_alone(self, monkeypatch):
        monkeypatch.setattr(selfcheck, "_lacking", set())
        checks = iter(["RuntimeError: Failed to find C compiler. Please specify via CC environment variable"])
        monkeypatch.setattr(selfcheck, "find_fault", lambda *family: next(checks))  # of one check
        for _ in range(2):
            why = selfcheck.objection(cpu, CPU, torch.float32, training=False)
            assert why.startswith("needs a C compiler (")
        assert record.read_again(CPU).families == {}

    @pytest.mark.parametrize("fault", FAULTS)
    def test_refuses_a_fault_with_a_sentence_and_an_address(self, fault, monkeypatch):
        def forward(q, k, v, spec, right=cpu.forward):
            o, lse = right(q, k, v, spec)
            FAULTS[fault](o, spec, lse)
            return o, lse

        monkeypatch.setattr(cpu, "forward", forward)
        why = r"cpu: failed its check on this machine \(cpu float32 forward: .*\); please report it at https://"
        with pytest.warns(fastattn.FallbackWarning, match=why):
            o = fastattn.attention(X, X, X)
        assert torch.equal(o, fastattn.attention(X, X, X, backend="torch"))

    @pytest.mark.parametrize(
        ("fault", "why"),
        [
            (lambda dq, lse: dq + (0 * (-lse).exp())[..., None], "dq of .* is off by nan"),
            (lambda dq, lse: dq * (1 + 1e-6 * torch.rand(())), "dq of .* has other bits in the second call"),
        ],
        ids=["a key beyond the end overflows", "sums in another order"],
    )
    def test_finds_what_only_other_scores_and_many_tiles_show(self, fault, why, monkeypatch):
        def backward(*args, right=cpu.backward):
            dq, *others = right(*args)
            return fault(dq, args[6]) if args[3].shape[2] > 256 else dq, *others

        monkeypatch.setattr(cpu, "backward", backward)
        assert re.match(why, selfcheck.find_fault(cpu, CPU, torch.float32, training=True))

    def test_refuses_a_wrong_gradient_for_training_alone(self, monkeypatch):
        def backward(*args, right=cpu.backward):
            dq, *others = right(*args)
            return dq * 1.01, *others

        monkeypatch.setattr(cpu, "backward", backward)
        assert fastattn.explain(X, X, X).backend == "cpu"
        leaf = X.clone().requires_grad_()
        assert "dq of" in selfcheck.find_fault(cpu, CPU, torch.float32, training=True)
        with pytest.warns(fastattn.FallbackWarning, match="dq of"):
            fastattn.attention(leaf, leaf, leaf)

    @pytest.mark.parametrize(
        ("make", "said"),
        [
            (lambda: pytest.importorskip("triton").OutOfResources(300, 200, "shared memory"), "OutOfResources: out of"),
            (lambda: subprocess.CalledProcessError(1, "gcc"), "CalledProcessError: .*gcc"),
            (lambda: FileNotFoundError("gcc"), "FileNotFoundError: gcc"),
        ],
        ids=["kernel", "compiler", "no compiler"],
    )
    def test_refuses_what_triton_and_its_compiler_raise(self, make, said, monkeypatch):
        monkeypatch.setattr(cpu, "forward", mock.Mock(side_effect=make()))
        assert re.match(said, selfcheck.find_fault(cpu, CPU, torch.float32, training=False))

    def test_waits_for_faults_that_a_gpu_tells_later(self, monkeypatch):
        problem = next(selfcheck._problems(cpu, CPU, torch.float32, training=False))
        monkeypatch.setattr(selfcheck, "_problems", lambda *_: [problem])
        lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock(side_effect=lost))
        why = selfcheck.find_fault(cpu, torch.device("cuda"), torch.float32, training=False)
        assert why == "AcceleratorError: CUDA error: an illegal memory access was encountered"

    def test_is_made_again_where_memory_was_full(self, monkeypatch):
        with monkeypatch.context() as full:
            full.setattr(cpu, "forward", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
            with pytest.raises(torch.OutOfMemoryError):
                fastattn.attention(X, X, X)
        assert fastattn.explain(X, X, X).backend == "cpu"

    def test_shows_on_a_gpu_what_it_does(self, monkeypatch, capsys):
        monkeypatch.setattr(selfcheck, "_calls", lambda *_: [None] * 2)
        monkeypatch.setattr(selfcheck, "find_fault", lambda *of, after_each: (after_each(), after_each(), "is off")[2])
        monkeypatch.setattr(build, "_SECONDS_BETWEEN_LINES", 0)
        assert selfcheck._found(cpu, torch.device("cuda"), torch.float16, training=True) == "is off"
        assert capsys.readouterr().err.splitlines() == [
            "fastattn: checking cpu float16 training on this GPU, once; it may compile kernels",
            "fastattn: 50 % of the check is done",
            "fastattn: 100 % of the check is done",
        ]

    def test_can_be_switched_off(self, monkeypatch):
        monkeypatch.setenv("FASTATTN_SELF_CHECK", "0")
        monkeypatch.setattr(selfcheck, "find_fault", lambda *_: pytest.fail("checked"))
        fastattn.attention(X, X, X)

    def test_is_not_made_for_a_backend_that_is_named(self, monkeypatch):
        monkeypatch.setattr(selfcheck, "find_fault", lambda *_: pytest.fail("checked"))
        fastattn.attention(X, X, X, backend="cpu")

    @pytest.mark.parametrize(
        "attend_in",
        [
            lambda attend: torch.vmap(attend)(X[None]),
            lambda attend: torch.func.grad(lambda x: attend(x).sum())(X),
            lambda attend: torch.func.jvp(attend, (X,), (X,)),
            lambda attend: torch.func.functionalize(attend)(X),
            lambda attend: make_fx(attend)(X),
        ],
        ids=["vmap", "grad", "jvp", "functionalize", "trace"],
    )
    def test_sees_no_transform_around_the_first_call(self, attend_in, monkeypatch):
        few = selfcheck._calls(CPU, training=True)[:2]
        monkeypatch.setattr(selfcheck, "_calls", lambda *_: few)
        attend_in(lambda x: fastattn.attention(x, x, x))
        assert set(record.read_again(CPU).families.values()) == {""}

    def test_is_not_made_inside_a_graph(self, monkeypatch):
        monkeypatch.setattr(selfcheck, "find_fault", lambda *_: pytest.fail("checked"))
        with pytest.warns(UserWarning, match="cpu float32 forward has not been checked on this machine"):
            torch.compile(lambda x: fastattn.attention(x, x, x), backend="aot_eager", fullgraph=True)(X)
        torch._dynamo.reset()

    def test_is_not_made_of_fake_tensors(self, monkeypatch):
        monkeypatch.setattr(selfcheck, "find_fault", lambda *_: "is not what it should be")
        with FakeTensorMode() as mode, pytest.warns(UserWarning, match="has not been checked on this machine"):
            fastattn.attention(*[mode.from_tensor(X)] * 3)
        with pytest.warns(fastattn.FallbackWarning, match="is not what it should be"):
            fastattn.attention(X, X, X)

    def test_takes_less_than_two_seconds(self):
        start = time.perf_counter()
        selfcheck.find_fault(cpu, CPU, torch.float32, training=True)
        assert time.perf_counter() - start < 2 * (1 + os.getloadavg()[0])

    def test_is_made_by_one_of_many_processes(self, tmp_path):
        """All start at once; the others wait for the first, and have its verdict."""
        program = f"""
            import time, torch, fastattn
            from fastattn.backends import selfcheck

            def check(*_):
                open({str(tmp_path / "checks")!r}, "a").write("x")
                time.sleep(0.2)

            selfcheck._is_unknown, selfcheck.find_fault = lambda *_: True, check
            x = torch.randn(1, 1, 4, 8, dtype=torch.float64)
            fastattn.attention(x, x, x)
        """
        command = [sys.executable, "-c", textwrap.dedent(program)]
        running = [subprocess.Popen(command) for _ in range(3)]
        assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
        assert (tmp_path / "checks").read_text() == "x"


PAGES = (*torch.randn(2, 2, 16, 2, 64), torch.tensor([[0], [1]]), torch.tensor([3, 4]))
CHOICES = (
    lambda patch: know(cpu=2.0, torch=1.0),
    lambda patch: know({"cpu float32 forward": "is off by nan"}),
    lambda patch: patch.setenv("FASTATTN_SELF_CHECK", "0"),
    lambda patch: patch.setattr(cpu, "unavailable", lambda device: "no compiler"),
)


@pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")
@pytest.mark.parametrize(
    ("function", "changes"),
    [
        (lambda x: fastattn.attention(x, x, x), CHOICES),
        (lambda x: fastattn.attention_weights(x, x), ()),
        (lambda x: fastattn.attention_paged(x[0, :, :2].transpose(0, 1), *PAGES), ()),
    ],
    ids=["attention", "weights", "pages"],
)
def test_a_graph_on_disk_is_of_this_code_and_choice(function, changes, monkeypatch):
    """PyTorch knows an op by its name and arguments, and would go on with what another release made of it."""

    def found() -> bool:
        torch._dynamo.reset()
        counters.clear()
        torch.testing.assert_close(torch.compile(function)(X), function(X))
        return bool(counters["aot_autograd"]["autograd_cache_hit"])

    with fresh_cache():
        assert [found(), found()] == [False, True]
        for change in (lambda patch: patch.setattr(backends, "_code", lambda: "another release"), *changes):
            change(monkeypatch)
            assert [found(), found()] == [False, True]
