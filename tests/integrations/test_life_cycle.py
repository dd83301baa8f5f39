"""The life of a model after `fastattn.swap`: it is saved, copied, moved, traced, compiled, exported, taken back."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fresh_python
import onnxruntime
import pytest
import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers_cases import SIZES, made

import fastattn

WIDTH = SIZES["hidden_size"]


class TokensOf(nn.Module):
    """A model of transformers that takes and returns tensors, as exporters and tracers want it."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.model(x, attention_mask=(~hidden).long(), return_dict=False)[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.attention(x, x, x, key_padding_mask=hidden)[0]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=hidden)


def bert() -> nn.Module:
    return TokensOf(made("BertModel", SIZES))


def llama() -> nn.Module:
    return TokensOf(made("LlamaForCausalLM", SIZES | {"num_key_value_heads": 2, "use_cache": False}))


MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "attention": (Attention, False),
    "encoder": (Encoder, False),
    "bert": (bert, False),
    "llama": (llama, False),
    "bert, packed": (bert, True),
    "llama, packed": (llama, True),
}
every_model = pytest.mark.parametrize("name", MODELS)


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """The model as it was, and swapped; it computes by plain torch, or by the model's own eager attention."""
    torch.manual_seed(0)
    make, packed = MODELS[name]
    original = make().eval()
    swapped = copy.deepcopy(original)
    assert fastattn.swap(swapped, packed=packed).swapped
    if isinstance(original, TokensOf):
        original.model.set_attn_implementation("eager")
    return original, swapped


def inputs(model: nn.Module, *lengths: int) -> tuple[Tensor, Tensor]:
    """Tokens, ids or vectors, and True where there is padding; the first length is the longest."""
    shape, hidden = (len(lengths), lengths[0]), torch.arange(lengths[0]) >= torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(sum(lengths))
    if isinstance(model, TokensOf):
        return torch.randint(3, 99, shape, generator=generator), hidden
    return torch.randn(*shape, WIDTH, generator=generator), hidden


SHORT, LONG = (9, 5, 7), (11, 4, 11, 2)


def assert_same(actual: Callable, expected: nn.Module, *batches: tuple[int, ...]) -> None:
    """Both give the same at real tokens."""
    for lengths in batches:
        x, hidden = inputs(expected, *lengths)
        with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            results = [f(x, hidden)[~hidden] for f in (actual, expected)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def traces(model: nn.Module) -> list[str]:
    """What `unswap` must not leave behind: classes, attributes and hooks of ours."""
    result = []
    for part in model.modules():
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        result += [str(trace) for trace in (type(part).__module__, *vars(part), *hooks) if "fastattn" in str(trace)]
    return result


IN_A_FRESH_PROCESS = """
    import sys
    from pathlib import Path

    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "fastattn":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    if "without fastattn" in sys.argv:
        sys.meta_path.insert(0, Hidden())
    import torch, transformers

    folder = Path(sys.argv[1])
    x = torch.load(folder / "inputs.pt")
    model = transformers.BertModel.from_pretrained(folder / "pretrained")
    torch.save(model(**x)[0], folder / "loaded.pt")
    assert "fastattn" not in sys.modules
    for name in sys.argv[2].split("+"):
        try:
            model = torch.load(folder / f"{name}.pt", weights_only=False)
        except ModuleNotFoundError as error:
            print(error)
            continue
        torch.save(model(**x)[0], folder / f"{name} run.pt")
"""


def in_a_fresh_process(folder: Path, *arguments: str) -> str:
    run = fresh_python.run(IN_A_FRESH_PROCESS, str(folder), *arguments)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture
def saved(tmp_path) -> tuple[Path, Tensor]:
    """Where one model is saved in every form, and what it answers."""
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
    ids, hidden = inputs(TokensOf(model), *SHORT)
    batch = {"input_ids": ids, "attention_mask": (~hidden).long()}
    torch.save(batch, tmp_path / "inputs.pt")
    expected = model(**batch)[0][~hidden].detach()
    packed = copy.deepcopy(model)
    fastattn.swap(packed, packed=True)
    torch.save(packed, tmp_path / "packed.pt")
    fastattn.swap(model)
    torch.save(model, tmp_path / "swapped.pt")
    model.save_pretrained(tmp_path / "pretrained")
    return tmp_path, expected


def answer(folder: Path, name: str) -> Tensor:
    return torch.load(folder / name)[torch.load(folder / "inputs.pt")["attention_mask"].bool()]


def test_a_fresh_process_goes_on_with_a_pickled_model(saved):
    """`weights_only=False` is all it takes: nobody there has imported fastattn, or swapped anything."""
    folder, expected = saved
    assert in_a_fresh_process(folder, "swapped+packed") == ""
    for name in ("loaded.pt", "swapped run.pt", "packed run.pt"):
        torch.testing.assert_close(answer(folder, name), expected, rtol=1e-4, atol=1e-5)
    rows = torch.load(folder / "packed run.pt")[torch.load(folder / "inputs.pt")["attention_mask"] == 0]
    assert (rows == 0).all()  # which only packing gives


def test_without_fastattn_a_pickled_model_asks_for_it_and_a_saved_one_does_not(saved):
    folder, expected = saved
    said = in_a_fresh_process(folder, "swapped+packed", "without fastattn").splitlines()
    assert said == ["No module named 'fastattn'"] * 2
    torch.testing.assert_close(answer(folder, "loaded.pt"), expected, rtol=1e-4, atol=1e-5)


@every_model
def test_what_was_pickled_can_be_taken_back(name):
    original, swapped = pair(name)
    file = io.BytesIO()
    torch.save(swapped, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert traces(loaded)
    assert not fastattn.swap(loaded, packed=MODELS[name][1]).swapped
    assert_same(loaded, original, SHORT)
    fastattn.unswap(loaded)
    assert not traces(loaded)
    assert_same(loaded, original, SHORT)
    assert traces(swapped)


FAST_PATH = torch.ops.aten._transformer_encoder_layer_fwd.default


@pytest.fixture
def compiled() -> Iterator[tuple[Callable, list[bool]]]:
    """A backend of torch.compile, and of each graph that it was given whether fastattn is in it."""
    graphs: list[bool] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable:
        graphs.append(any(str(node.target).startswith("fastattn.") for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    yield backend, graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["attention", "encoder", "bert", "llama, packed"])
def test_compiles_whole_and_once_for_every_size(name, compiled):
    original, swapped = pair(name)
    backend, graphs = compiled
    whole = torch.compile(swapped, fullgraph=True, dynamic=True, backend=backend)
    assert_same(whole, original, SHORT, LONG, SHORT)
    assert graphs == [True]


@pytest.mark.parametrize("name", ["encoder", "bert"])
def test_a_compiled_model_can_be_swapped_and_taken_back(name, compiled):
    if name == "encoder" and FAST_PATH not in torch._decomp.meta_table:
        pytest.skip(f"torch {torch.__version__} compiles no padding in its own encoder")
    original, _ = pair(name)
    model = copy.deepcopy(original)
    backend, graphs = compiled
    whole = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    assert_same(whole, original, SHORT)
    assert graphs == [False]
    assert fastattn.swap(whole).swapped
    assert_same(whole, original, SHORT, LONG)
    assert graphs == [False, True]
    fastattn.unswap(whole)
    assert not traces(model)
    torch._dynamo.reset()
    assert_same(whole, original, SHORT, LONG)
    assert graphs == [False, True, False]


@pytest.mark.parametrize(
    ("name", "strict", "named"),
    [
        ("attention", False, False),
        ("attention", True, True),
        ("encoder", False, True),
        ("encoder", True, False),
        ("llama, packed", False, False),
        ("bert, packed", True, False),
    ],
)
def test_exports_for_every_size(name, strict, named):
    """Also by names that say of a size that it is any, so that a condition on it is an error."""
    original, swapped = pair(name)
    Dim = torch.export.Dim
    sizes = {0: Dim("batch"), 1: Dim("length")} if named else {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    program = torch.export.export(swapped, inputs(swapped, *SHORT), dynamic_shapes=(sizes, sizes), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert_same(torch.export.load(file).module(), original, SHORT, LONG)


@pytest.mark.filterwarnings("ignore")
def test_dynamic_quantisation_leaves_attention_as_it_is():
    original, swapped = pair("encoder")
    quantised = torch.ao.quantization.quantize_dynamic(swapped, {nn.Linear}, dtype=torch.qint8)
    layer, (x, hidden) = quantised.encoder.layers[0], inputs(original, *SHORT)
    assert type(layer.linear1) is torch.ao.nn.quantized.dynamic.Linear
    assert {weight.dtype for weight in layer.self_attn.parameters()} == {torch.float32}
    actual, expected = (model(x, hidden)[~hidden] for model in (quantised, original))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("name", ["attention", "bert, packed", "llama"])
def test_onnx_for_every_size(name):
    original, swapped = pair(name)
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.onnx.export(swapped, inputs(swapped, *SHORT), dynamic_shapes=(sizes, sizes), verbose=False)
    file = io.BytesIO()
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    names = [given.name for given in session.get_inputs()]

    def run(*batch: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, dict(zip(names, (x.numpy() for x in batch), strict=True)))[0])

    assert_same(run, original, SHORT, LONG)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["attention", "encoder", "bert", "llama, packed"])
def test_the_old_exporter_to_onnx_is_refused(name):
    _, swapped = pair(name)
    with pytest.raises(NotImplementedError, match=r"leave dynamo=True, its default, or call fastattn\.unswap\(model\)"):
        torch.onnx.export(swapped, inputs(swapped, *SHORT), io.BytesIO(), dynamo=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["attention", "encoder"])
def test_torchscript_compiles_it_only_when_taken_back(name):
    original, swapped = pair(name)
    with pytest.raises(NotImplementedError, match=r"call fastattn\.unswap\(model\) first"):
        torch.jit.script(swapped)
    fastattn.unswap(swapped)
    assert_same(torch.jit.script(swapped), original, SHORT)


@pytest.mark.filterwarnings("ignore")
@every_model
def test_a_trace_is_right_for_other_padding(name):
    original, swapped = pair(name)
    with torch.no_grad():
        traced = torch.jit.trace(swapped, inputs(swapped, *SHORT))
    assert_same(traced, original, SHORT, LONG, (6, 6))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_trace_is_right_for_other_masks(tmp_path, weights, gradients):
    """Loaded from a file, and with its gradients where these were on in tracing."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.attention(x, x, x, attn_mask=mask, need_weights=weights)[int(weights)]

    model = Masked().eval()
    swapped = copy.deepcopy(model)
    fastattn.swap(swapped)
    x = torch.randn(2, 7, WIDTH)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    other = torch.randn(7, 7)
    with torch.set_grad_enabled(gradients):
        torch.jit.trace(swapped, (x, causal)).save(tmp_path / "traced.pt")
        traced = torch.jit.load(tmp_path / "traced.pt")
        for mask in (causal, other):
            answers = [net(x, mask) for net in (traced, model)]
            torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-5)
            if gradients:
                of_weights = [
                    torch.autograd.grad(answer.square().sum(), net.attention.in_proj_weight)
                    for answer, net in zip(answers, (traced, model), strict=True)
                ]
                torch.testing.assert_close(*of_weights, rtol=1e-3, atol=1e-4)


@every_model
def test_functional_call_its_gradient_and_vmap(name):
    original, swapped = pair(name)
    x, hidden = inputs(swapped, *SHORT)
    gradients = []
    for model in (original, swapped):

        def loss(parameters: dict[str, Tensor], model: nn.Module = model) -> Tensor:
            return torch.func.functional_call(model, parameters, (x, hidden))[~hidden].square().sum()

        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            gradients.append(torch.func.grad(loss)(dict(model.named_parameters())))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-4)
    mapped = torch.func.vmap(swapped)

    def first_of_two(x: Tensor, hidden: Tensor) -> Tensor:
        return mapped(torch.stack([x, x.flip(0)]), torch.stack([hidden, hidden.flip(0)]))[0]

    assert_same(first_of_two, original, SHORT)


@every_model
def test_swapped_on_the_meta_device_and_loaded_later(name):
    make, packed = MODELS[name]
    original, _ = pair(name)
    with init_empty_weights(include_buffers=False):
        model = make().eval()
        assert fastattn.swap(model, packed=packed).swapped
    assert all(parameter.is_meta for parameter in model.parameters())
    model.load_state_dict(original.state_dict(), assign=True)
    assert_same(model, original, SHORT)


@every_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moves_to_another_dtype(name, dtype):
    original, swapped = (model.to(dtype) for model in pair(name))
    x, hidden = inputs(swapped, *SHORT)
    x = x if isinstance(swapped, TokensOf) else x.to(dtype)
    exact, naive, actual = (
        model(x.to(kind) if x.is_floating_point() else x, hidden)
        for model, kind in ((copy.deepcopy(original).double(), torch.float64), (original, dtype), (swapped, dtype))
    )
    assert actual.dtype == dtype
    error, allowed = ((output - exact)[~hidden].abs().max() for output in (actual, naive))
    assert error <= 2 * allowed + 4 * torch.finfo(dtype).eps * exact[~hidden].abs().max()


@every_model
def test_inference_mode_leaves_nothing_that_training_stumbles_over(name):
    original, swapped = pair(name)
    x, hidden = inputs(swapped, *SHORT)
    with torch.inference_mode():
        swapped(x.clone(), hidden.clone())
        swapped(x, hidden)
    swapped(x, hidden).sum().backward()
    assert all(p.grad is not None for n, p in swapped.named_parameters() if "pooler" not in n)
    assert_same(swapped, original, SHORT)


@every_model
def test_one_model_in_several_threads(name):
    _, swapped = pair(name)
    batches = [inputs(swapped, *lengths) for lengths in (SHORT, (9, 3, 8), (9, 9, 1), LONG)]

    def run(x: Tensor, hidden: Tensor) -> Tensor:
        with torch.no_grad():  # a thread has its own
            return swapped(x, hidden)

    expected = [run(*batch) for batch in batches]
    together = threading.Barrier(8)

    def work(number: int) -> list[bool]:
        together.wait()
        turns = [turn % 4 for turn in range(number, number + 20)]
        return [torch.equal(run(*batches[turn]), expected[turn]) for turn in turns]

    with ThreadPoolExecutor(8) as threads:
        assert all(map(all, threads.map(work, range(8))))
