"""PyTorch's kernels as a backend: what it asks of them where no test can run them, and what it does for them."""

import itertools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn import Mask
from fastattn.backends import aten, blocked, cpu, kept_results, objections, rectangles, selfcheck
from fastattn.plan import forget_plans
from fastattn.spec import Spec
from fastattn.testing import CASES, assert_right, make_inputs, run

table, keep = aten._table, Spec.dropout_keep
REAL_CHOICE = torch._fused_sdp_choice
NAMED = {case.name: case for case in CASES}


FLASH, EFFICIENT, CUDNN = (f"aten::_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn"))


class Calls(TorchDispatchMode):
    """The arguments of each operator that is called in it, by name: the last ones."""

    def __enter__(self):
        self.arguments = {}
        super().__enter__()
        return self.arguments

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.arguments[func.name()] = args
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("capability", "dtype", "H_kv", "n", "taken", "forward", "backward"),
    [
        ((9, 0), torch.bfloat16, 2, 150, SDPBackend.FLASH_ATTENTION, FLASH, FLASH),
        ((9, 0), torch.bfloat16, 2, 150, SDPBackend.CUDNN_ATTENTION, CUDNN, FLASH),
        ((9, 0), torch.bfloat16, 2, 127, SDPBackend.CUDNN_ATTENTION, FLASH, FLASH),
        ((7, 5), torch.float32, 2, 150, SDPBackend.EFFICIENT_ATTENTION, EFFICIENT, EFFICIENT),
        ((7, 5), torch.float16, 4, 150, SDPBackend.EFFICIENT_ATTENTION, EFFICIENT, EFFICIENT),
    ],
    ids=str,
)
def test_calls_of_kernels_for_gpus_fit_their_schemas(capability, dtype, H_kv, n, taken, forward, backward):
    """On tensors without memory: PyTorch's own shape functions accept every argument, and say what shapes come out."""
    spec = Spec(Mask(causal=True), 0.125, deterministic=False)
    choice = mock.patch("torch._fused_sdp_choice", return_value=taken.value)
    with mock.patch("torch.cuda.get_device_capability", return_value=capability), choice as asked, Calls() as called:
        q, do = (torch.empty(2, 4, n, 64, dtype=dtype, device="meta") for _ in range(2))
        k, v = (torch.empty(2, H_kv, n, 64, dtype=dtype, device="meta") for _ in range(2))
        o, lse = aten.forward(q, k, v, spec)
        assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, dtype, (2, 4, n), torch.float32)
        gradients = aten.backward(do, lse, q, k, v, o, lse, spec, (True, True, True, False, False, False))
        assert [(x.shape, x.dtype) for x in gradients[:3]] == [(x.shape, dtype) for x in (q, k, v)]
    assert forward in called
    assert f"{backward}_backward" in called
    assert f"{CUDNN}_backward" not in called
    if forward is CUDNN:  # of grouped heads, causal
        (arguments, options) = asked.call_args
        REAL_CHOICE(*arguments, **options)  # that it takes them
        assert arguments[3:] == (None, 0.0, True)
        assert options == {"scale": 0.125, "enable_gqa": True}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_kernels_for_gpus_get_rows_of_16_bytes_each(dtype):
    """They load them at once: on an H100 others ended the process, "misaligned address"."""
    spec = Spec(Mask(), 0.125, deterministic=False)
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)), Calls() as called:
        q, k, v, do = (torch.empty(2, 4, 50, 65 + 2 * i, dtype=dtype, device="meta")[..., :64] for i in range(4))
        choice = mock.patch("torch._fused_sdp_choice", return_value=SDPBackend.FLASH_ATTENTION.value)
        with choice:
            o, lse = aten.forward(q, k, v, spec)
        aten.backward(do, None, q, k, v, o, lse, spec, (True, True, True, False, False, False))
    kernel = FLASH if dtype == torch.float16 else EFFICIENT
    for x in (*called[kernel][:3], *called[f"{kernel}_backward"][:4]):
        assert x.stride()[1:] == (50 * 64, 64, 1)
    aligned = torch.empty(2, 50, 4, 72, dtype=dtype, device="meta")[..., :64].transpose(1, 2)
    assert aten._as_kernels_read(aligned) is aligned
    of_cpu = torch.empty(65)[1:]
    assert aten._as_kernels_read(of_cpu) is of_cpu


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gradients_that_tensor_cores_would_round_are_those_of_the_reference(capability, dtype, monkeypatch):
    monkeypatch.setattr(aten.reference, "backward", lambda *_: "the reference's")
    with mock.patch("torch.cuda.get_device_capability", return_value=capability), FakeTensorMode():
        q, lse = torch.empty(1, 2, 50, 64, dtype=dtype, device="cuda"), torch.empty(1, 2, 50, device="cuda")
        is_rounded = aten._rounds_fp32(q)
        if is_rounded:
            call = (q, None, q, q, q, q, lse, Spec(Mask(), 0.125), (True,) * 3 + (False,) * 3)
            assert aten.backward(*call) == "the reference's"
    assert is_rounded == (capability >= (8, 0) and dtype == torch.float32)


@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_causal_call_with_a_scale_that_is_not_above_0(mask, scale, monkeypatch):
    """Their kernels for CPUs multiply the -inf of what is hidden by the scale, which makes NaN of it."""
    monkeypatch.setattr(aten, "_is_quicker", lambda *_: True)
    ids = torch.tensor([[0] * 9 + [-1] * 4 + [1] * 7])
    fields = {} if mask == "causal" else {"segment_ids": (ids, ids)}
    tensors, sinks = torch.randn(4, 1, 2, 20, 8, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    if mask == "documents":
        tensors[..., 9:13, :] = torch.nan
    results = []
    for backend in ("torch", "reference"):
        leaves = [x.clone().requires_grad_() for x in (*tensors[:3], sinks)]
        terms = {"sinks": leaves[3], "scale": scale, "return_lse": True, "backend": backend}
        o, lse = fastattn.attention(*leaves[:3], Mask(causal=True, **fields), **terms)
        seen = lse.masked_fill(lse == -torch.inf, 0)
        results.append((o, lse, *torch.autograd.grad((o, seen), leaves, (tensors[3], torch.ones_like(seen)))))
    for x, y in zip(*results, strict=True):
        assert_close(x, y)
    assert aten._Call.of(*tensors[:3], Spec(Mask(causal=True, **fields), scale)).table is not None


def test_gradient_of_sinks_beside_rectangles_reads_no_padding(monkeypatch):
    monkeypatch.setattr(aten, "_is_quicker", lambda *_: True)
    q, k, v, do = torch.randn(4, 1, 2, 20, 8)
    sinks, real = torch.randn(2, requires_grad=True), torch.arange(20)[None] < 15
    o = fastattn.attention(q, k, v, Mask(real_keys=real, real_queries=real), sinks=sinks, backend="torch")
    expected = torch.autograd.grad(o, sinks, do.masked_fill(~real[:, None, :, None], 0), retain_graph=True)
    assert_close(torch.autograd.grad(o, sinks, do.masked_fill(~real[:, None, :, None], torch.nan)), expected)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": torch.float64}, "q must be float32, bfloat16 or float16 on a GPU"),
        ({"D": 36}, "the head dims must be equal, multiples of 8 and at most 256, got 36 and 36"),
        ({"scale": -1.0}, "scale must be above 0 on cuda, got -1"),
        ({"scale": 0.0, "causal": False}, "scale must be above 0 on cuda, got 0"),
        ({"n_k": 60}, "a causal mask must have as many queries as keys on cuda, got 50 and 60"),
    ],
    ids=lambda x: str(x),
)
def test_what_its_kernels_for_gpus_do_not_mean_is_refused(change, why):
    n_k, D, dtype = change.get("n_k", 50), change.get("D", 64), change.get("dtype", torch.float16)
    with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)), FakeTensorMode():
        q, k = (torch.empty(1, 2, n, D, dtype=dtype, device="cuda") for n in (50, n_k))
        spec = Spec(Mask(causal=change.get("causal", True)), change.get("scale", 1.0))
        assert any(why in sentence for sentence in aten.unsupported(q, k, k, spec))


@pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fake_tensors_of_a_gpu_need_none(dtype):
    with FakeTensorMode():
        q = torch.empty(1, 2, 5, 8, device="cuda", dtype=dtype)
        assert fastattn.attention(q, q, q).device.type == "cuda"
    assert torch.cuda.is_available() or selfcheck.objection(aten, torch.device("cuda"), dtype, training=False) is None


def test_deterministic_mode_is_what_it_was_before():
    with aten._deterministic(torch.device("cuda"), wanted=True):
        assert _mode() == (True, False, False), "kernels that only warn add up in any order"
    assert _mode() == (False, False, True)
    with aten._deterministic(torch.device("cuda"), wanted=False):
        assert _mode() == (False, False, True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with aten._deterministic(torch.device("cuda"), wanted=True):
            assert _mode() == (True, False, False)
        assert _mode() == (True, True, True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_mode_is_what_it_was_before_several_threads():
    """The first to come is the first to go, and the second would have put back what the first had set."""
    inside, may_go = threading.Event(), threading.Event()

    def first():
        with aten._deterministic(torch.device("cuda"), wanted=True):
            inside.set()
            may_go.wait(60)

    def second():
        inside.wait(60)
        threading.Timer(0.2, may_go.set).start()
        with aten._deterministic(torch.device("cuda"), wanted=True):
            assert may_go.is_set()
            modes.append(_mode())

    modes = []
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda function: function(), (first, second)))
    assert modes == [(True, False, False)]
    assert _mode() == (False, False, True)


def _mode() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.mark.parametrize("case", ["plain", "causal", "wide-values", "grouped-heads"])
def test_output_has_the_bits_of_torchs_own_function(case):
    inputs = make_inputs(NAMED[case], torch.float32)
    o = run(inputs, "torch")["o"]
    q, k, v = inputs.q, *(x.repeat_interleave(inputs.q.shape[1] // x.shape[1], 1) for x in (inputs.k, inputs.v))
    v = torch.nn.functional.pad(v, (0, max(0, q.shape[3] - v.shape[3])))
    q, k = (torch.nn.functional.pad(x, (0, v.shape[3] - x.shape[3])) for x in (q, k))
    scale = inputs.options["scale"]
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=inputs.mask.causal, scale=scale)
    assert torch.equal(o, theirs[..., : o.shape[3]])


def test_heads_of_a_wider_tensor_give_the_same_bits():
    """Which lie in memory as [B, H, n, D], but for what stands between the samples."""
    apart = [x[:, :3] for x in torch.randn(4, 2, 5, 40, 16)]
    results = []
    for q, k, v, do in (apart, [x.clone() for x in apart]):
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = fastattn.attention(*leaves, Mask(causal=True), backend="torch")
        results.append((o, *torch.autograd.grad(o, leaves, do)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_a_bias_is_not_rounded():
    x, bias = torch.ones(1, 1, 4, 8, dtype=torch.bfloat16), torch.zeros(4, 4)
    assert objections(aten, x, x, x, Spec(Mask(), 1.0, bias=bias)) == [
        "bias must not be rounded, got torch.float32 beside torch.bfloat16"
    ]


@pytest.mark.parametrize(
    "shape", [(8,), (1, 1), (5, 8), (2, 5, 8), (2, 5, 1), (3, 1, 1, 8), (1, 2, 5, 8), (3, 2, 5, 8)]
)
@pytest.mark.parametrize("layout", ["rows", "columns", "part of rows"])
def test_a_bias_of_any_shape_and_layout_is_right(layout, shape):
    """PyTorch's kernel takes those of four dimensions alone, and reads each row as it should lie in memory."""
    q, k, v = (torch.randn(3, 2, n, 16, dtype=torch.float64, requires_grad=True) for n in (5, 8, 8))
    bias = torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64)[..., : shape[-1]]
    if layout != "part of rows":
        bias = bias.contiguous() if layout == "rows" or len(shape) == 1 else bias.mT.contiguous().mT

    def outputs(backend):
        o = fastattn.attention(q, k, v, bias=bias, backend=backend)
        return o, *torch.autograd.grad(o.sin().sum(), (q, k, v))

    assert_close(outputs("torch"), outputs("reference"), rtol=1e-12, atol=1e-12)


def test_it_serves_fp64_in_silence_and_warns_where_it_stands_in(monkeypatch):
    x = torch.randn(1, 2, 9, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fastattn.explain(x.double(), x.double(), x.double()).backend == "torch"
        fastattn.attention(x.double(), x.double(), x.double())
    monkeypatch.setattr(cpu, "unavailable", lambda device: "needs a compiler")
    with pytest.warns(fastattn.FallbackWarning, match="no kernel of this package can run here: cpu: needs a compiler"):
        fastattn.attention(x, x, x)


@pytest.mark.parametrize("seed", range(4))
def test_rectangles_hold_what_a_mask_shows_and_nothing_else(seed):
    """Random masks of neighbours: padding at both ends, documents, diagonals from anywhere, samples that differ."""
    torch.manual_seed(seed)
    found = 0
    for _ in range(300):
        B, n_q, n_k, rare = *torch.randint(1, 9, (3,)).tolist(), torch.rand(6) < 0.3
        offset = torch.randint(-3, 6, (B,)) if rare[0] else [0, n_k - n_q, 1, -2][torch.randint(4, ()).item()]
        if rare[1]:
            ids = [torch.randint(0, 3, (B, n)).cumsum(1) // 2 - int(rare[2]) for n in (n_q, n_k)]
            fields = {"segment_ids": (ids[0], ids[0] if n_q == n_k else ids[1])}
        else:
            real_keys, real_queries = _neighbours(B, n_k), None if rare[3] else _neighbours(B, n_q)
            fields = {"real_keys": torch.rand(B, n_k) < 0.7 if rare[4] else real_keys, "real_queries": real_queries}
        mask = Mask(not rare[5], q_offset=offset, **fields)
        of_tensor = (offset, 0) if isinstance(offset, torch.Tensor) else (None, offset)
        tensors = (mask.real_queries, mask.real_keys, *(mask.segment_ids or (None, None)), of_tensor[0])
        parts = rectangles.of_mask(*tensors, mask.causal, of_tensor[1], B, n_q, n_k)
        if parts is None:
            continue
        found += len(parts) > 0
        seen = torch.zeros(B, n_q, n_k, dtype=torch.int64)
        for samples, queries, keys, causal in parts:
            pairs = torch.ones(queries.stop - queries.start, keys.stop - keys.start, dtype=torch.int64)
            seen[samples, queries, keys] += pairs.tril() if causal else pairs
        assert torch.equal(seen, mask.keep(n_q, n_k)[:, 0].long().expand(B, -1, -1)), (mask, parts)
    assert found > 100


def _neighbours(B: int, n: int) -> torch.Tensor:
    """bool [B, n], True in one run of each sample, or nowhere."""
    first, last = torch.randint(0, n + 1, (2, B, 1))
    return (torch.arange(n) >= first) & (torch.arange(n) < last)


_IN_RECTANGLES = [
    case
    for case in CASES
    if (case.causal or case.q_offset or case.keys or case.queries or case.segment_ids)
    and not (case.timed or case.window != (None, None) or case.dense or case.bias or case.relative_bias or case.alibi)
    and not (case.softcap or case.dropout_p)
]


@pytest.mark.parametrize("sign", [1, -1])
def test_products_that_overflow_in_pytorchs_kernel_are_right(sign):
    """In fp16, where what arrives is as large as with a scale of the loss."""
    q, k, v = ((torch.randn(1, 2, 40, 128) * size).half().requires_grad_() for size in (1e-3, 1e-3, 1))
    do = sign * torch.full_like(q, 1e4)
    for backend, mask in itertools.product(("torch", "cpu"), (Mask(), Mask(causal=True))):
        gradients = torch.autograd.grad(fastattn.attention(q, k, v, mask, backend=backend), (q, k, v), do)
        o = fastattn.attention(*(x.double() for x in (q, k, v)), mask, backend="reference")
        for x, exact in zip(gradients, torch.autograd.grad(o, (q, k, v), do.double()), strict=True):
            torch.testing.assert_close(x.double(), exact.double(), rtol=0.02, atol=0.02 * exact.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", _IN_RECTANGLES, ids=str)
def test_rectangle_by_rectangle_means_the_same(case, dtype, monkeypatch):
    monkeypatch.setattr(aten, "_is_quicker", lambda *_: True)
    inputs = make_inputs(case, dtype)
    assert_right(inputs, run(inputs, "torch"), 1.5)


@pytest.mark.parametrize(
    ("of_mask", "n", "table", "parts"),
    [
        ({"real_keys": [512, 512]}, 512, False, None),
        ({"real_keys": [300, 512]}, 512, False, 2),
        ({"real_keys": [300, 300], "causal": True}, 512, False, 1),
        ({"real_keys": [32, 32]}, 32, False, None),
        ({"real_keys": [30, 32]}, 32, True, None),
        ({"segment_ids": [200, 512]}, 512, False, 3),
        ({"real_keys": [300, 512], "window": (9, 0)}, 512, True, None),
    ],
    ids=["nothing hidden", "padding", "the same in both", "short, nothing hidden", "short", "documents", "window"],
)  # fmt: skip
def test_padding_and_documents_are_left_out_where_that_is_quicker(of_mask, n, table, parts):
    ends = torch.tensor(of_mask.pop("real_keys", None) or of_mask["segment_ids"])[:, None]
    before = torch.arange(n) < ends
    if "segment_ids" in of_mask:
        fields = of_mask | {"segment_ids": (before.long(),) * 2}
    else:
        fields = of_mask | {"real_keys": before}
    x = torch.randn(2, 4, n, 64)
    call = aten._Call.of(x, x, x, Spec(Mask(**fields), 0.125))
    assert (call.table is not None) is table
    assert (call.parts and len(call.parts)) == parts


@pytest.mark.parametrize("way", ["fused", "in blocks", "in rectangles"])
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_what_is_no_number_in_the_padding_of_one_head_changes_nothing(name, way, monkeypatch):
    """Only the first head is looked at before the kernels run: they must show what stands in the others."""
    torch.manual_seed(0)
    dropout_p = 0.5 if way == "in blocks" else 0.0
    monkeypatch.setattr(aten, "_is_quicker", lambda *_: way == "in rectangles")
    tensors = {x: torch.randn(2, 3, 40, 16) for x in ("q", "k", "v", "do")}
    real = torch.ones(2, 40, dtype=torch.bool)
    real[1, 30:] = False

    def results(**tensors):
        do = tensors.pop("do")
        leaves = [x.clone().requires_grad_() for x in tensors.values()]
        o, lse = fastattn.attention(
            *leaves, Mask(real_keys=real, real_queries=real), backend="torch", return_lse=True, dropout_p=dropout_p,
            generator=torch.Generator().manual_seed(1),
        )  # fmt: skip
        lse = lse.masked_fill(~real[:, None], 0)
        return o, lse, *torch.autograd.grad((o, lse), leaves, (do, lse.detach()))

    expected = results(**tensors)
    for number in (float("nan"), float("inf")):
        tensors[name][1, 2, 30:] = number
        for x, y in zip(results(**tensors), expected, strict=True):
            assert torch.equal(x, y)


def test_a_table_is_made_once_for_all_layers_and_passes():
    real, made = torch.arange(40) < torch.tensor([[40], [30]]), []
    with mock.patch.object(aten, "_table", side_effect=lambda *args: made.append(args) or table(*args)):
        for _ in range(3):
            x = torch.randn(2, 3, 40, 16, requires_grad=True)
            fastattn.attention(x, x, x, Mask(causal=True, real_keys=real), backend="torch").sum().backward()
        assert len(made) == 1
        real[0, 39] = False
        y = fastattn.attention(x, x, x, Mask(causal=True, real_keys=real), backend="torch")
        assert len(made) == 2
    assert_close(y, fastattn.attention(x, x, x, Mask(causal=True, real_keys=real), backend="reference"))


@pytest.mark.parametrize("by", ["numpy", "data"])
@pytest.mark.parametrize("name", ["real_keys", "dense", "slopes"])
def test_what_changes_without_a_new_version_counts_as_it_is_now(name, by):
    tensors = {
        "real_keys": torch.ones(2, 40, dtype=torch.bool),
        "dense": torch.ones(40, 40, dtype=torch.bool),
        "slopes": torch.ones(3),
    }
    x, changed, slopes = torch.randn(2, 3, 40, 16), tensors[name], tensors.pop("slopes")

    def o(backend: str) -> torch.Tensor:
        mask = Mask(**{field: t for field, t in tensors.items() if field == name})
        return fastattn.attention(x, x, x, mask, alibi_slopes=slopes if name == "slopes" else None, backend=backend)

    o("torch")
    (changed.numpy() if by == "numpy" else changed.data)[..., 1:] = 0
    assert_close(o("torch"), o("reference"))


@pytest.mark.parametrize("real", ["neighbours", "holes"])
def test_rectangles_are_looked_for_once_for_all_layers_and_passes(real):
    real_keys = torch.arange(40) < torch.tensor([[40], [30]])
    if real == "holes":
        real_keys[1, 7] = False
    with mock.patch.object(rectangles, "of_mask", side_effect=rectangles.of_mask) as look:
        for _ in range(3):
            x = torch.randn(2, 3, 40, 16, requires_grad=True)
            fastattn.attention(x, x, x, Mask(real_keys=real_keys), backend="torch").sum().backward()
    assert look.call_count == 1


def test_what_dropout_keeps_is_drawn_once_and_gone_with_the_graph(monkeypatch):
    x, drawn = torch.randn(2, 3, 40, 16, requires_grad=True), []
    monkeypatch.setattr(Spec, "dropout_keep", lambda *args: drawn.append(1) or keep(*args))
    monkeypatch.setattr(kept_results, "_known", {})
    o = fastattn.attention(x, x, x, dropout_p=0.5, backend="torch")
    o.sum().backward(retain_graph=True)
    assert len(drawn) == 1
    assert len(kept_results._known) == 1
    del o
    assert not kept_results._known


@pytest.mark.parametrize("case", [x for x in CASES if not x.timed and (x.dropout_p or x.softcap)], ids=str)
def test_blocks_of_any_size_mean_the_same(case, monkeypatch):
    monkeypatch.setattr(blocked, "_PAIRS", 1)  # one head and 16 queries
    monkeypatch.setattr(blocked, "_LARGEST_KEPT", 0)
    inputs = make_inputs(case, torch.float32)
    assert_right(inputs, run(inputs, "torch"), 1.5)


@pytest.mark.parametrize("with_lse", [False, True])
def test_graph_has_no_gradient_of_an_lse_that_nobody_has(with_lse):
    """Zeros in its place would have PyTorch's kernels compute a second forward and a second backward."""
    leaf, calls = torch.randn(1, 2, 9, 8, requires_grad=True), []

    def attend(x):
        result = fastattn.attention(x, x, x, backend="torch", return_lse=with_lse)
        return result[0].sum() + result[1].sum() if with_lse else result.sum()

    with mock.patch.object(
        aten, "backward", side_effect=lambda *args, of=aten.backward: calls.append(args) or of(*args)
    ):
        torch.compile(attend, backend="aot_eager", fullgraph=True)(leaf).backward()
    assert [dlse is not None for _, dlse, *_ in calls] == [with_lse]
    gradient, leaf.grad = leaf.grad, None
    attend(leaf).backward()
    assert_close(leaf.grad, gradient)


class TestOtherDevices:
    """Where PyTorch's own function chooses the kernel, of which no lse is known: such as Macs' GPUs and Intel's.

    The CPU plays one, and devices without memory show what is refused.
    """

    @pytest.fixture
    def _on_another_device(self, monkeypatch):
        forget_plans()
        monkeypatch.setattr(aten, "lacks", lambda device, of_all=aten.lacks: of_all(torch.device("xpu")))
        monkeypatch.setattr(aten, "features", lambda device, of_all=aten.features: of_all(torch.device("xpu")))
        monkeypatch.setattr(cpu, "unsupported", lambda *_: ["q must be on the CPU, got xpu"])
        yield
        forget_plans()

    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    @pytest.mark.parametrize("case", ["plain", "causal", "wide-values", "grouped-heads"])
    @pytest.mark.usefixtures("_on_another_device")
    def test_right_without_a_warning(self, case, compiled):
        inputs = make_inputs(NAMED[case], torch.float32)
        attend = torch.compile(fastattn.attention, backend="eager", fullgraph=True) if compiled else fastattn.attention
        terms = {"mask": Mask(inputs.mask.causal), "scale": inputs.options["scale"]}
        assert fastattn.explain(inputs.q, inputs.k, inputs.v, **terms).backend == "torch"
        with warnings.catch_warnings():
            warnings.simplefilter("error", fastattn.FallbackWarning)
            o = attend(inputs.q, inputs.k, inputs.v, **terms)
        assert_close(
            o, fastattn.attention(inputs.q, inputs.k, inputs.v, **terms, backend="reference"), rtol=1e-5, atol=1e-5
        )

    @pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")
    @pytest.mark.usefixtures("_on_another_device")
    def test_derivatives_are_left_to_the_reference(self):
        x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
        attend = lambda x: fastattn.attention(x, x, x, Mask(causal=True))  # noqa: E731
        assert torch.autograd.gradgradcheck(attend, x)
        assert torch.autograd.gradcheck(attend, x, check_forward_ad=True)
        leaf = x.detach()
        of_call, of_reference = (
            torch.func.jvp(function, (leaf,), (torch.ones_like(leaf),))
            for function in (attend, lambda x: fastattn.attention(x, x, x, Mask(causal=True), backend="reference"))
        )
        assert_close(of_call, of_reference)

    @pytest.mark.usefixtures("_on_another_device")
    def test_lse_and_padding_are_left_to_the_reference(self):
        x, real = torch.randn(1, 2, 9, 8), torch.arange(9)[None] < 5
        with pytest.warns(fastattn.FallbackWarning, match="torch: does not compute attention with its lse on cpu"):
            o, lse = fastattn.attention(x, x, x, return_lse=True)
        assert_close(lse, (x @ x.mT / 8**0.5).logsumexp(-1))
        assert_close(o, fastattn.attention(x, x, x))
        with pytest.warns(fastattn.FallbackWarning, match="torch: does not support real_keys on cpu"):
            fastattn.attention(x, x, x, Mask(real_keys=real))
        with pytest.raises(NotImplementedError, match="torch: does not compute attention with its lse on cpu"):
            fastattn.attention(x, x, x, return_lse=True, backend="torch")

    def test_what_it_refuses_on_devices_without_memory(self):
        q = torch.empty(2, 4, 5, 8, device="meta")
        k = q[:, :2, :3]
        assert fastattn.explain(q, k, k).backend == "torch"
        assert fastattn.attention(q, k, k).shape == q.shape
        causal, scale = Mask(causal=True), 1.0
        assert objections(aten, q, k, k, Spec(causal, scale), function="output") == [
            "a causal mask must have as many queries as keys on meta, got 5 and 3"
        ]
        assert objections(aten, q, k[:, :, :0], k[:, :, :0], Spec(Mask(), scale), function="output") == [
            "v must have elements, got [2, 2, 0, 8]"
        ]


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_sink_of_infinity_takes_all(backend):
    """As on the CPU backend; and the weights, with their derivatives."""
    q, k, v = (torch.randn(1, 2, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = torch.full((2,), torch.inf, dtype=torch.float64, requires_grad=True)
    o, lse = fastattn.attention(q, k, v, sinks=sinks, return_lse=True, backend=backend)
    assert (lse == torch.inf).all()
    weights = fastattn.attention_weights(q, k, sinks=sinks, backend="reference")
    gradients = torch.autograd.grad(o.sum() + lse.sum() + weights.sum(), [q, k, v, sinks])
    for x in (o, weights, *gradients[:3], gradients[3] - 4):  # the gradient of an lse is the sink's, of 4 queries
        assert_close(x, torch.zeros_like(x))


@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
@pytest.mark.parametrize("fields", [{"causal": True, "q_offset": -2}, {"dense": torch.ones(4, 4).tril(-1).bool()}])
def test_nan_that_arrives_at_a_query_that_sees_nothing_is_not_read(backend, fields):
    leaves = [torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3)]
    sinks = torch.zeros(2, requires_grad=True)
    o, lse = fastattn.attention(*leaves, Mask(**fields), sinks=sinks, return_lse=True, backend=backend)
    do = torch.where((lse == -torch.inf)[..., None], torch.nan, torch.ones_like(o))
    for gradient in torch.autograd.grad(o, [*leaves, sinks], do):
        assert gradient.isfinite().all()
