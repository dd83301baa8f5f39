"""Models of Hugging Face transformers answer by fastattn what their own eager attention answers, from a Mask alone.

Models are compared where tokens are real. At padding they may differ: padded queries are not computed here, and their
attention is 0, while eager attention computes something there that nothing reads.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fresh_python
import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from model_cases import PADDINGS, Compared, L, at_real, compared, differences, objections, outputs_and_gradients
from sentence_cases import save_bert
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers_cases import (
    BART,
    BY_FAMILY,
    DEEPSEEK_V3_2,
    GEMMA_4,
    QWEN_2_MOE,
    REFUSED,
    SIZES,
    as_decoder,
    as_encoder,
    as_seq2seq,
    ids,
    mirrored,
)

import fastattn
from fastattn import Mask
from fastattn.integrations import register_with_transformers
from fastattn.integrations import transformers as integration

# The decorator of tests whose masks have no fused kernel on every machine; the others fail where one would be missing.
may_fall_back = pytest.mark.filterwarnings("ignore::fastattn.FallbackWarning")

DECODERS = ("GPT-2", "Llama", "Mistral")
ENCODERS = ("ALBERT", "BERT", "CamemBERT", "DistilBERT", "ELECTRA", "RoBERTa", "XLM-RoBERTa")


@pytest.fixture
def received(monkeypatch) -> Iterator[list[object]]:
    """The mask of every attention call that fastattn served."""
    masks = []
    forward = integration.attention_forward

    def seen(module, query, key, value, attention_mask, **options):
        masks.append(attention_mask)
        return forward(module, query, key, value, attention_mask, **options)

    monkeypatch.setattr(integration, "attention_forward", seen)
    integration.register()
    yield masks
    monkeypatch.undo()
    integration.register()


def of(family: str) -> Compared:
    """The models of a family with its own eager attention, swapped, and in fp64."""
    return compared(BY_FAMILY[family])


def assert_within_budget(actual: Tensor, naive: Tensor, exact: Tensor) -> None:
    wrong = differences({"o": actual}, {"o": naive}, {"o": exact})
    assert not wrong, wrong


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_padded_queries_are_skipped(family, received):
    models, real = of(family), PADDINGS["holes" if family in ENCODERS else "right"]
    models.case.run(models.swapped, real)
    assert received
    assert all(torch.equal(mask.real_queries, real) for mask in received)


def test_every_encoder_whose_padded_queries_are_skipped_is_tested():
    assert {BY_FAMILY[family].make().config.model_type for family in ENCODERS} == integration._SELF_ATTENTION_ONLY


@pytest.mark.parametrize("packed", [False, True])
def test_layers_whose_arguments_accelerate_moves_get_the_mask(packed, received):
    """It asks whatever has a method `to` to move to the layer's device."""
    models = of("Mistral")
    model = copy.deepcopy(models.swapped)
    fastattn.swap(model, packed=packed)
    for layer in model.model.layers:
        add_hook_to_module(layer, AlignDevicesHook("cpu", io_same_device=True))
    real = PADDINGS["right"]
    assert not differences(*(models.case.run(m, real) for m in (model, models.eager, models.exact)))
    assert received
    assert all(isinstance(mask, Mask) and mask.dense is None for mask in received)
    assert {x.device.type for mask in received for x in mask.to("meta").tensors().values()} == {"meta"}


@may_fall_back
def test_a_model_that_takes_rows_of_the_mask_gets_them(received):
    """Gemma 4 computes its last layers for those tokens alone whose logits are wanted."""
    models, real = compared(GEMMA_4), PADDINGS["left"]
    call = as_decoder(models.swapped, real)
    rows = [model(**call, logits_to_keep=2).logits for model in (models.swapped, models.eager, models.exact)]
    assert [getattr(mask, "dense", mask).shape[-2:] for mask in received[2:]] == [(2, L)] * 2
    assert_within_budget(*(logits[real[:, -2:]] for logits in rows))
    for padding in GEMMA_4.paddings:
        assert not objections(models, outputs_and_gradients, padding)


@may_fall_back
def test_only_the_keys_that_an_indexer_chose_are_seen():
    models = compared(DEEPSEEK_V3_2)
    for padding in DEEPSEEK_V3_2.paddings:
        assert not objections(models, outputs_and_gradients, padding)


@may_fall_back
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("case", [GEMMA_4, DEEPSEEK_V3_2], ids=str)
def test_generation_where_the_mask_is_taken_for_a_tensor(case, cache):
    models = compared(case)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    call = {"input_ids": ids(), "attention_mask": PADDINGS["left"].long()}
    actual = models.swapped.generate(**call, **options)
    assert actual.shape == (3, L + 8)
    assert torch.equal(actual, models.eager.generate(**call, **options))


@may_fall_back
@pytest.mark.parametrize("padding", PADDINGS)
def test_a_router_that_reads_the_mask_reads_it_as_with_eager_attention(padding):
    """NLLB-MoE's, which gives no expert to tokens that are not 0 in the mask."""
    experts = {"num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
    config = transformers.NllbMoeConfig(**BART, **experts, attn_implementation="eager")
    torch.manual_seed(0)
    eager, real = transformers.NllbMoeModel(config).eval(), PADDINGS[padding]
    swapped, call = copy.deepcopy(eager), as_seq2seq(eager, real)
    assert set(fastattn.swap(swapped).swapped.values()) == {"NllbMoeAttention"}
    with torch.no_grad():
        expected, actual = (model(**call) for model in (eager, swapped))
    for name, rows in (("encoder_last_hidden_state", real), ("last_hidden_state", mirrored(real))):
        torch.testing.assert_close(*(at_real(x[name], rows) for x in (actual, expected)), rtol=1e-4, atol=1e-5)


@may_fall_back
@pytest.mark.parametrize("padding", PADDINGS)
def test_keys_that_a_layer_adds_are_seen_as_it_says(padding):
    """DeepSeek-V4 appends compressed tokens to the keys, and to a mask that is a Tensor which of them may be seen."""
    sizes = SIZES | {"head_dim": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "o_groups": 2, "o_lora_rank": 8}
    sizes |= {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 2, "n_routed_experts": 2, "num_experts_per_tok": 2}
    sizes |= {"moe_intermediate_size": 16, "experts_implementation": "eager", "sliding_window": 5, "pad_token_id": 0}
    types = ["compressed_sparse_attention", "heavily_compressed_attention"]
    config = transformers.DeepseekV4Config(**sizes, layer_types=types, compress_rates=dict.fromkeys(types, 3))
    torch.manual_seed(0)
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    real = PADDINGS[padding]
    model.set_attn_implementation("eager")
    naive = at_real(model(**as_decoder(model, real)).logits, real)
    assert fastattn.swap(model).swapped
    torch.testing.assert_close(at_real(model(**as_decoder(model, real)).logits, real), naive, rtol=1e-3, atol=1e-3)


def test_a_mask_for_other_lengths_is_refused():
    q, k = torch.randn(2, 3, 8), torch.randn(2, 7, 8)
    mask = integration.attention_mask(1, 3, 5, q_offset=2)
    with pytest.raises(NotImplementedError, match="a mask made for 3 queries and 5 keys came with 3 and 7"):
        integration.attention_forward(nn.Identity(), q[None], k[None], k[None], mask)


def test_a_mask_that_hides_nothing_fits_other_lengths():
    """As peft's prefix tuning and guidance of encoder-decoders need: transformers itself makes no such mask."""
    q, k = torch.randn(2, 3, 8), torch.randn(2, 7, 8)
    bidirectional = integration.masking_utils.bidirectional_mask_function
    mask = integration.attention_mask(1, 3, 5, 2, 0, bidirectional, torch.ones(1, 5, dtype=torch.bool))
    o, _ = integration.attention_forward(nn.Identity(), q[None], k[None], k[None], mask)
    torch.testing.assert_close(o[0], fastattn.attention(q[None], k[None], k[None])[0].transpose(0, 1))


@may_fall_back
def test_chosen_keys_are_seen_only_where_the_mask_lets_them():
    q, k, v = torch.randn(3, 2, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    indices = torch.tensor([[0, 4]]).expand(2, 5, 2)
    o, _ = integration.attention_forward(nn.Identity(), q, k, v, Mask(causal=True), indices=indices)
    lower = torch.ones(5, 5, dtype=torch.bool).tril() & torch.tensor([True, False, False, False, True])
    expected = fastattn.attention(q, k, v, Mask(dense=lower)).transpose(1, 2)
    assert torch.equal(o, expected)
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    assert torch.equal(integration.attention_forward(nn.Identity(), q, k, v, allowed, indices=indices)[0], expected)


def test_the_mask_is_a_tensor_to_whoever_takes_it_for_one():
    mask = integration.attention_mask(
        2, 3, 5, q_offset=2, attention_mask=torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()
    )
    keep = mask.keep(3, 5)
    scores = torch.randn(1, 4, 3, 5, generator=torch.Generator().manual_seed(0))
    lowest = torch.finfo(torch.float32).min
    assert (mask.shape, mask.dtype, mask.dim()) == (keep.shape, torch.bool, 4)
    assert torch.equal(mask[:, :, -1:], keep[:, :, -1:])
    assert torch.equal(mask & keep[:, :, :1], keep & keep[:, :, :1])
    assert torch.equal(~mask, ~keep)
    assert torch.equal(torch.where(mask, 1, 2), torch.where(keep, 1, 2))
    for sum_of_both in (scores + mask, mask + scores, torch.add(scores, mask)):
        assert torch.equal(sum_of_both, torch.where(keep, scores, lowest))
    with pytest.raises(AttributeError, match="PreparedMask has no attribute 'nonsense'"):
        mask.nonsense  # noqa: B018


@may_fall_back
@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_packed_sequences_do_not_see_each_other(family, received):
    models = of(family)
    call = as_decoder(models.swapped, None) | {"position_ids": torch.tensor([*range(7), *range(5)]).expand(3, -1)}
    assert_within_budget(*(model(**call).logits for model in (models.swapped, models.eager, models.exact)))
    assert received
    assert all(mask.segment_ids is not None and mask.dense is None for mask in received)


@pytest.mark.parametrize("given", ["return_flash_attn_kwargs", "return_seq_idx"])
def test_what_a_collator_says_of_documents_is_held_to_the_mask(given):
    """The masks of transformers tell documents by position_ids in some models alone, and never beside a cache."""
    models = of("Llama")
    collate = transformers.DataCollatorWithFlattening(return_tensors="pt", **{given: True})
    samples = [{"input_ids": row.tolist()} for row in (ids()[0, :7], ids()[1, :5])]
    packed, alone = collate(samples), [models.eager(torch.tensor([sample["input_ids"]])).logits for sample in samples]
    packed.pop("labels")
    logits = models.swapped(**packed, use_cache=False).logits
    torch.testing.assert_close(logits, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match=r"came without a mask that separates .* with use_cache=False"):
        models.swapped(**packed, use_cache=True)
    assert models.swapped(**collate(samples[:1]), use_cache=True).logits.isfinite().all()


def test_a_module_that_says_which_calls_are_causal_is_followed():
    """Moonshine's decoder says is_causal=False beside its causal mask."""
    torch.manual_seed(0)
    sizes = {
        f"{of}_{name}": n
        for of in ("encoder", "decoder")
        for name, n in (("num_hidden_layers", 1), ("num_attention_heads", 4))
    }
    config = transformers.MoonshineConfig(vocab_size=32, hidden_size=32, intermediate_size=64, **sizes)
    model = transformers.MoonshineModel._from_config(config, attn_implementation="eager").eval()
    call = {"input_values": torch.randn(2, 4000), "decoder_input_ids": torch.tensor([[1, 5, 6], [1, 2, 3]])}
    with torch.no_grad():
        expected = model(**call).last_hidden_state
        assert fastattn.swap(model).swapped
        torch.testing.assert_close(model(**call).last_hidden_state, expected, rtol=1e-4, atol=1e-5)


@may_fall_back
@pytest.mark.parametrize("as_float", [True, False])
@pytest.mark.parametrize("family", ["BERT", "Llama"])
def test_a_users_own_4d_mask(family, as_float):
    models = of(family)
    keep = torch.rand(3, 1, L, L, generator=torch.Generator().manual_seed(3)) < 0.5
    keep |= torch.eye(L, dtype=torch.bool)
    additive = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    boolean, additive = ({"input_ids": ids(), "attention_mask": mask} for mask in (keep, additive))
    actual = models.swapped(**additive if as_float else boolean)[0]
    assert_within_budget(actual, models.eager(**additive)[0], models.exact(**boolean)[0])


@may_fall_back
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["BERT", "Llama"])
def test_a_users_2d_mask_of_any_dtype_says_what_is_real(family, dtype):
    """Also a float one: where it is not 0, as transformers reads it, and is never added to the scores."""
    models, keep = of(family), torch.arange(L) < torch.tensor([[L], [3], [5]])
    call = {"input_ids": ids(), "attention_mask": keep.to(dtype)}
    assert_within_budget(*(model(**call)[0][keep] for model in (models.swapped, models.eager, models.exact)))


def functions_of_transformers() -> list[tuple[str, Callable, bool]]:
    """(name, mask function, whether a Mask says it without `dense`)."""
    integration.register()
    m = masking_utils
    packed = torch.tensor([[0] * 4 + [1] * 5, [0] * 7 + [1] * 2])
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0, 1]])
    blocks = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1], [-1] * 4 + [0] * 5])
    causal, left_padding = m.causal_mask_function, torch.tensor([0, 2])
    window, local = m.sliding_window_causal_mask_function(3), m.sliding_window_bidirectional_mask_function(2)

    remapped = []
    if hasattr(m, "remap_positions_for_packed_sequence"):  # not in 5.20, the last for Python 3.10
        of_positions = m.remap_positions_for_packed_sequence(causal, position_ids)
        with_more = m.and_masks(m.bidirectional_mask_function, of_positions)
        remapped = [("remapped, not packed", of_positions), ("remapped and more, not packed", with_more)]

    def in_pack(function: Callable) -> Callable:
        if remapped:
            return m.packed_sequence_compatibility_function(function, position_ids, packed)
        return m.and_masks(function, m.packed_sequence_mask_function(packed))

    def own(batch, head, q, k):
        return (q + k) % 2 == 0

    return [
        ("causal", causal, True),
        ("bidirectional", m.bidirectional_mask_function, True),
        ("window", window, True),
        ("local", local, True),
        ("packed", in_pack(causal), True),
        ("packed window", in_pack(window), True),
        *((name, function, False) for name, function in remapped),
        ("window of no key", m.sliding_window_causal_mask_function(0), False),
        ("two windows", m.and_masks(window, local), False),
        ("chunked", m.chunked_causal_mask_function(4, left_padding), False),
        ("blocks", m.or_masks(causal, m.blockwise_overlay(blocks)), False),
        ("own", own, False),
        ("causal and own", m.and_masks(causal, own), False),
    ]


WINDOWED = ("Mistral", "Gemma 2", "Gemma 3", "ModernBERT", "Cohere 2", "gpt-oss")


@may_fall_back
@pytest.mark.parametrize(
    ("family", "padding"),  # by turns; BEiT knows no padding
    zip((*WINDOWED, "BEiT", "Llama", "Qwen2", "Phi-3"), itertools.cycle(("none", "right")), strict=False),
)
def test_compiles_to_one_graph(family, padding):
    """As transformers' sdpa does; and while Dynamo traces, masks are known as well as they are without it."""
    models, graphs = of(family), []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable:
        graphs.append(graph)
        return graph.forward

    if family == "gpt-oss":
        models.swapped.set_experts_implementation("grouped_mm")  # the one of its case has a loop over experts
    torch._dynamo.reset()
    models.swapped.forward = torch.compile(models.swapped.forward, fullgraph=True, backend=backend)
    with torch.no_grad():
        results = [models.case.run(model, PADDINGS[padding]) for model in (models.swapped, models.eager, models.exact)]
    torch._dynamo.reset()
    assert not differences(*results)
    (graph,) = graphs
    names = [argument.name for argument in torch.ops.fastattn.attention.default._schema.arguments]
    nodes = [node for node in graph.graph.nodes if str(node.target) == "fastattn.attention"]
    calls = [dict(zip(names, node.args, strict=True)) for node in nodes]
    assert all(call["dense"] is None for call in calls)
    assert any(call["window_left"] is not None for call in calls) == (family in WINDOWED)


WHOLE = (9, 9, 0, 0)  # q_length, kv_length, q_offset, kv_offset
CACHED = [(1, 9, 8, 0), (3, 6, 6, 3), (4, 9, 5, 0), (5, 9, 0, 0)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("function", "known", "lengths"),
    [
        pytest.param(function, known, lengths, id=f"{name}-{lengths}")
        for name, function, known in functions_of_transformers()
        for lengths in ([WHOLE] if "packed" in name else [WHOLE, *CACHED])  # packed sequences come without a cache
    ],
)
def test_the_mask_is_that_of_transformers(function, known, lengths, padded):
    q_length, kv_length, q_offset, kv_offset = lengths
    real = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1]]).bool() if padded else None
    call = {"batch_size": 2, "mask_function": function, "attention_mask": real}
    call |= {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    mask = integration.attention_mask(**call)
    expected = masking_utils.sdpa_mask(**call, allow_is_causal_skip=False)
    if mask.real_queries is not None:
        assert torch.equal(mask.real_queries, real[:, q_offset:][:, :q_length])
        expected = expected & mask.real_queries[:, None, :, None]
    assert torch.equal(mask.keep(q_length, kv_length).expand(2, 1, q_length, kv_length), expected)
    assert (mask.dense is None) == known


def test_a_mask_that_no_layer_reads_is_made(received):
    """Qwen2-MoE without windows makes a mask of windows of no key, which its layers leave alone."""
    models = compared(QWEN_2_MOE)
    for padding in QWEN_2_MOE.paddings:
        assert not objections(models, outputs_and_gradients, padding)
    assert received
    assert all(mask.dense is None for mask in received)


@may_fall_back
def test_a_users_mask_function_is_not_forgotten(monkeypatch, received):
    models = of("Llama")
    create = masking_utils.create_causal_mask

    def with_prefix(*args, **kwargs):
        return create(*args, **kwargs, or_mask_function=lambda batch, head, q, k: k < 4)

    monkeypatch.setattr(transformers.models.llama.modeling_llama, "create_causal_mask", with_prefix)
    results = (models.case.run(model, PADDINGS["right"]) for model in (models.swapped, models.eager, models.exact))
    assert not differences(*results)
    assert all(mask.dense is not None for mask in received)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"head_mask": torch.ones(4)}, "the option head_mask is not supported"),
        ({"block_indices": torch.ones(1), "cache": object()}, "the option block_indices, cache is not supported"),
        ({"sliding_window": 2}, "sliding_window=2 came without a mask"),
        ({"cu_seq_lens_q": torch.tensor([0, 1, 3])}, "transformers makes one of position_ids"),
        ({"attention_mask": Mask(causal=True), "is_causal": False}, "is_causal=False came with a causal mask"),
    ],
)
def test_options_that_change_the_result_are_refused(options, why):
    q = torch.ones(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match=why):
        integration.attention_forward(nn.Identity(), q, q, q, **{"attention_mask": None} | options)


def test_what_a_model_was_given_for_others_is_ignored():
    """MusicGen's `generate` hands what it was given to its text encoder, whose eager attention does not read it."""
    models = of("T5")
    given = {"input_ids": ids(), "guidance_scale": 3.0, "of_the_future": torch.ones(2)}
    encoded = [model.get_encoder()(**given).last_hidden_state for model in (models.swapped, models.eager)]
    torch.testing.assert_close(*encoded, rtol=1e-4, atol=1e-5)


def test_a_window_without_a_mask_is_none_where_everything_is_seen():
    """As DiffusionGemma calls it for prompts without padding."""
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 7, 8)
    o, _ = integration.attention_forward(nn.Identity(), q, k, k, None, sliding_window=4, is_causal=False)
    torch.testing.assert_close(o.transpose(1, 2), fastattn.attention(q, k, k))


def test_options_without_effect_are_ignored():
    q = torch.ones(1, 2, 3, 4)
    options = {
        "use_cache": True,
        "shift_labels": torch.ones(1, 3),
        "input_ids": torch.ones(1, 3, dtype=torch.int64),  # which GLM-5-Next hands to all layers
        "position_ids": torch.arange(3),
        "head_mask": None,
        "cu_seq_lens_q": torch.tensor([0, 3]),
    }
    o, weights = integration.attention_forward(nn.Identity(), q, q, q, None, **options)
    assert torch.equal(o, q.transpose(1, 2))
    assert weights is None


@pytest.mark.parametrize(
    ("module_says", "call_says", "causal"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_without_a_mask_the_module_says_whether_it_is_causal(module_says, call_says, causal):
    module = nn.Identity()
    module.is_causal = module_says
    q = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    o, _ = integration.attention_forward(module, q, q, q, None, is_causal=call_says)
    assert torch.equal(o, fastattn.attention(q, q, q, Mask(causal=causal)).transpose(1, 2))


@may_fall_back
def test_dropout_only_in_training():
    swapped = of("GPT-2").swapped
    call = as_decoder(swapped, None)
    assert torch.equal(swapped(**call).logits, swapped(**call).logits)
    for module in swapped.modules():
        if isinstance(module, nn.Dropout) and module is not swapped.transformer.h[0].attn.attn_dropout:
            module.p = 0.0
    swapped.train()
    assert not torch.equal(swapped(**call).logits, swapped(**call).logits)


def test_malformed_masks_are_refused():
    q = torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"a 4-D attention_mask must be bool or floating, got torch.int64"):
        integration.attention_forward(nn.Identity(), q, q, q, torch.ones(1, 1, 3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, n\] or \[B, H, n_q, n_k\], got \[1, 3, 3\]"):
        integration.attention_mask(1, 3, 3, attention_mask=torch.ones(1, 3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attention_mask \[B, n\] must be bool, False at padding, got torch.float32"):
        integration.attention_mask(1, 3, 3, attention_mask=torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"attention_mask must be \[2 or 1, n\], got \[3, 5\]"):
        integration.attention_mask(2, 5, 5, attention_mask=torch.ones(3, 5, dtype=torch.bool))


NAMES = ("fastattn", "fastattn_packed")


def test_both_functions_are_registered_once():
    functions = (PreTrainedModel.post_init, masking_utils.and_masks)
    for _ in range(2):
        integration.register()
    assert functions == (PreTrainedModel.post_init, masking_utils.and_masks)
    for name in NAMES:
        assert AttentionInterface()[name] is integration.attention_forward
        assert AttentionMaskInterface()[name] is integration.attention_mask


@pytest.mark.parametrize(
    "imports",
    [
        "import fastattn; assert 'transformers' not in sys.modules; from transformers import BertModel",
        "import transformers; assert 'transformers.modeling_utils' not in sys.modules; import fastattn",
        "from transformers import BertModel; import fastattn",
        "import fastattn, importlib.util; importlib.util.find_spec('transformers.modeling_utils')",
        "import fastattn.integrations.transformers",
        "import fastattn.integrations.serving",
    ],
)
def test_its_names_are_known_whichever_is_imported_first(imports):
    program = f"import sys; {imports}; import transformers; config = transformers.BertConfig(**{SIZES})\n"
    for name in NAMES:
        program += f"assert transformers.AutoModel.from_config(config, attn_implementation={name!r})\n"
    run = fresh_python.run(program)
    assert run.returncode == 0, run.stderr


def test_a_transformers_that_it_does_not_know_goes_on_without(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastattn.integrations.transformers", None)  # whose import fails then
    monkeypatch.delattr(fastattn.integrations, "transformers")
    register_with_transformers()
    model = nn.ModuleDict({"plain": nn.MultiheadAttention(8, 2), "bert": BY_FAMILY["BERT"].make()})
    report = fastattn.swap(model)
    assert report.swapped == {"plain": "MultiheadAttention"}
    assert report.refused == {"bert": "it is of a transformers before version 5"}
    fastattn.unswap(model)
    assert type(model["plain"]) is nn.MultiheadAttention


def by_set_attn_implementation(folder: Path, name: str) -> PreTrainedModel:
    model = transformers.AutoModel.from_pretrained(folder)
    model.set_attn_implementation(name)
    return model


def by_a_saved_configuration(folder: Path, name: str) -> PreTrainedModel:
    WAYS["from_pretrained"](folder, name).save_pretrained(folder)
    file = folder / "config.json"
    assert name not in file.read_text()  # transformers saves none
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_implementation": name}))
    return transformers.AutoModel.from_pretrained(folder)


WAYS: dict[str, Callable[[Path, str], PreTrainedModel]] = {
    "constructor": lambda _, name: transformers.BertModel(transformers.BertConfig(**SIZES, attn_implementation=name)),
    "from_pretrained": lambda folder, name: transformers.AutoModel.from_pretrained(folder, attn_implementation=name),
    "from_config": lambda _, name: transformers.AutoModel.from_config(
        transformers.BertConfig(**SIZES), attn_implementation=name
    ),
    "set_attn_implementation": by_set_attn_implementation,
    "saved configuration": by_a_saved_configuration,
    "pipeline": lambda folder, name: (
        transformers.pipeline("feature-extraction", str(folder), model_kwargs={"attn_implementation": name}).model
    ),
    "sentence_transformers": lambda folder, name: (
        SentenceTransformer(str(folder), model_kwargs={"attn_implementation": name})[0].model
    ),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_a_model_by_name(way, name, tmp_path, received):
    save_bert(tmp_path)
    original, model = transformers.AutoModel.from_pretrained(tmp_path).eval(), WAYS[way](tmp_path, name).eval()
    model.load_state_dict(original.state_dict())
    call, real = as_encoder(model, PADDINGS["holes"]), PADDINGS["holes"]
    with torch.no_grad():
        actual, expected = model(**call)[0], original(**call)[0]
    assert model.config._attn_implementation == name
    assert len(received) == 2
    assert all(isinstance(mask, integration.PackedMask) == (name == "fastattn_packed") for mask in received)
    torch.testing.assert_close(actual[real], expected[real], rtol=1e-4, atol=1e-5)
    assert bool((actual[~real] == 0).all()) == (name == "fastattn_packed")
    assert fastattn.swap(model).already


def test_a_model_by_name_is_packed_until_it_has_another(received):
    model = WAYS["constructor"](Path(), "fastattn_packed").eval()
    report, call = fastattn.swap(model, packed=True), as_encoder(model, PADDINGS["right"])
    model(**call)
    assert report.calls.packed == 1
    model.set_attn_implementation("fastattn")
    model(**call)
    model.set_attn_implementation("fastattn_packed")
    model(**call)
    assert [isinstance(mask, integration.PackedMask) for mask in received] == [True] * 2 + [False] * 2 + [True] * 2


def test_a_model_that_was_packed_by_name_is_so_after_unswap(received):
    model = WAYS["constructor"](Path(), "fastattn_packed").eval()
    fastattn.unswap(model)
    model(**as_encoder(model, PADDINGS["right"]))
    assert received
    assert all(isinstance(mask, integration.PackedMask) for mask in received)


def test_all_stacks_of_a_model_by_name_count_together():
    model = BY_FAMILY["T5"].make()
    model = type(model)._from_config(model.config, attn_implementation="fastattn_packed").eval()
    report = fastattn.swap(model, packed=True)
    BY_FAMILY["T5"].run(model, PADDINGS["right"])
    assert report.calls.packed == 2


def test_what_cannot_be_packed_by_name_is_named():
    config = BY_FAMILY["ViT"].make().config
    with pytest.warns(UserWarning, match="ViTModel: layers: not packed: vit is not among the models"):
        transformers.ViTModel._from_config(config, attn_implementation="fastattn_packed")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_a_name_that_a_model_would_ignore_is_refused(case, name):
    model = case.make()
    why = f'attn_implementation must be "eager" or another one of {type(model).__name__}, got "{name}"'
    with pytest.raises(ValueError, match=why):
        type(model)._from_config(model.config, attn_implementation=name)


def test_the_report_names_attention_modules_inside_a_larger_model():
    parts = {"text": BY_FAMILY["BERT"].make(), "head": nn.TransformerEncoderLayer(8, 2), "no": nn.Linear(1, 1)}
    model = nn.ModuleDict(parts | {"own": next(case for case in REFUSED if case.family == "BLOOM").make()})
    report = fastattn.swap(model)
    assert report.refused == {"own": "BloomModel does not use the AttentionInterface of transformers"}
    assert model["own"].config._attn_implementation == "eager"
    layers = [f"text.encoder.layer.{i}.attention.self" for i in range(2)]
    assert report.swapped == dict.fromkeys(layers, "BertSelfAttention") | {"head.self_attn": "MultiheadAttention"}
    assert str(report).startswith("swapped: 2 BertSelfAttention, 1 MultiheadAttention\nnot swapped: own: BloomModel")
    assert fastattn.swap(model).already == dict.fromkeys(layers, "BertSelfAttention") | {
        "head.self_attn": "MultiHeadAttention"
    }
    model["text"].set_attn_implementation("sdpa")
    assert fastattn.swap(model).swapped == dict.fromkeys(layers, "BertSelfAttention")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_unswap_gives_the_implementation_back(implementation):
    model = nn.ModuleDict({"clip": BY_FAMILY["CLIP"].make(), "bert": BY_FAMILY["BERT"].make()})
    for part in model.values():
        part.set_attn_implementation(implementation)
    pretrained = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    saved = [module.config.to_json_string() for module in pretrained]
    for _ in range(2):
        fastattn.swap(model)
    assert {module.config._attn_implementation for module in pretrained} == {"fastattn"}
    assert [module.config.to_json_string() for module in pretrained] == saved  # a saved model does not need fastattn
    fastattn.unswap(model)
    assert {module.config._attn_implementation for module in pretrained} == {implementation}
    assert not any("fastattn" in name for module in model.modules() for name in vars(module))


def test_unswap_gives_parts_theirs_back_in_any_order():
    """The decoder has the configuration of the whole, which sets those of the backbones that come before it."""
    with torch.device("meta"):
        config = transformers.GroundingDinoConfig(backbone_config=transformers.SwinConfig(out_indices=[2, 3, 4]))
        model = transformers.GroundingDinoModel(config)
    pretrained = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    before = [module.config._attn_implementation for module in pretrained]
    assert set(before) == {"sdpa", "eager"}
    fastattn.swap(model)
    fastattn.unswap(model)
    assert [module.config._attn_implementation for module in pretrained] == before


def test_unswap_gives_each_tower_its_own_back():
    model = BY_FAMILY["CLIP"].make()
    model.text_model.set_attn_implementation("fastattn")
    model.vision_model.set_attn_implementation("eager")
    pretrained = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    before = [module.config._attn_implementation for module in pretrained]
    assert set(before) == {"sdpa", "fastattn", "eager"}
    fastattn.swap(model)
    fastattn.unswap(model)
    assert [module.config._attn_implementation for module in pretrained] == before


def test_a_forward_of_its_own_is_refused_and_called_as_before():
    model = BY_FAMILY["BERT"].make()
    attention = model.encoder.layer[1].attention.self
    attention.forward = attention.forward
    report = fastattn.swap(model)
    why = "the forward of encoder.layer.1.attention.self was replaced on the module itself"
    assert report == fastattn.SwapReport(refused={"": why})
    assert model.config._attn_implementation == "sdpa"


def test_attention_of_a_class_that_pytorch_has_put_on_top_is_swapped():
    model = BY_FAMILY["BERT"].make()
    attention = model.encoder.layer[0].attention.self
    attention.__class__ = type("FSDPBertSelfAttention", (type(attention),), {"__module__": "torch.distributed.fsdp"})
    assert sorted(fastattn.swap(model).swapped.values()) == ["BertSelfAttention", "FSDPBertSelfAttention"]


def test_a_configuration_that_transformers_does_not_reach():
    model = BY_FAMILY["BERT"].make()
    attention = model.encoder.layer[0].attention.self
    attention.config = copy.deepcopy(model.config)
    report = fastattn.swap(model)
    why = "transformers did not set the configuration of BertSelfAttention"
    assert report.refused == {"encoder.layer.0.attention.self": why}
    assert report.swapped == {"encoder.layer.1.attention.self": "BertSelfAttention"}
    assert attention.config._attn_implementation == "sdpa"


class OneTower(transformers.CLIPPreTrainedModel):
    """A model whose attention looks in a configuration that is no model's."""

    def __init__(self, config: transformers.CLIPConfig) -> None:
        super().__init__(config)
        self.attention = transformers.models.clip.modeling_clip.CLIPAttention(config.vision_config)
        self.post_init()


def test_unswap_gives_back_a_configuration_that_is_no_models():
    model = OneTower(BY_FAMILY["CLIP"].make().config)
    assert fastattn.swap(model).swapped == {"attention": "CLIPAttention"}
    assert model.config.vision_config._attn_implementation == "fastattn"
    assert fastattn.swap(model).already == {"attention": "CLIPAttention"}
    fastattn.unswap(model)
    assert model.config.vision_config._attn_implementation == "sdpa"


def test_a_model_whose_attention_has_an_option_of_its_own_is_left_alone():
    sizes = SIZES | {"head_dim": 8, "num_key_value_heads": 2, "index_n_heads": 2, "index_head_dim": 8}
    sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1, "index_block_size": 2, "index_topk_blocks": 2}
    config = transformers.MiniMaxM3VLTextConfig(**sizes, layer_types=["full_attention", "minimax_m3_sparse"])
    model = transformers.MiniMaxM3VLForCausalLM(config).eval()
    report = fastattn.swap(model)
    why = "its attention has the option block_indices, which is not supported"
    assert report == fastattn.SwapReport(refused={"": why})
    assert model(ids()).logits.isfinite().all()


class Unindented(transformers.models.bert.modeling_bert.BertSelfAttention):
    def forward(self, *args, **kwargs):
        assert """
ALL_ATTENTION_FUNCTIONS.get_interface(
"""
        return super().forward(*args, **kwargs)


def test_source_with_lines_that_are_not_indented_is_read():
    model = BY_FAMILY["BERT"].make()
    model.encoder.layer[0].attention.self.__class__ = Unindented
    assert sorted(fastattn.swap(model).swapped.values()) == ["BertSelfAttention", "Unindented"]


def test_a_model_that_refuses_halfway_is_put_back(monkeypatch):
    model = BY_FAMILY["CLIP"].make()

    def refuse(self, *args, **kwargs):
        raise ValueError("the vision tower needs sdpa")

    tower = type(next(m for m in model.vision_model.modules() if isinstance(m, PreTrainedModel)))
    monkeypatch.setattr(tower, "get_correct_attn_implementation", refuse)
    report = fastattn.swap(model)
    assert report == fastattn.SwapReport(refused={"": "the vision tower needs sdpa"})
    assert str(report) == "swapped: nothing\nnot swapped: the model: the vision tower needs sdpa"
    pretrained = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    assert {module.config._attn_implementation for module in pretrained} == {"sdpa"}


def test_columns_of_a_data_set_that_say_nothing_of_attention_are_left_alone():
    model = BY_FAMILY["Llama"].make().eval()
    columns = dict.fromkeys(("token_type_ids", "special_tokens_mask"), torch.zeros_like(ids())) | {"return_loss": True}
    expected = model(ids(), **columns).logits
    fastattn.swap(model)
    torch.testing.assert_close(model(ids(), **columns).logits, expected)


@pytest.mark.parametrize("distil", [False, True])
def test_attention_of_an_informer_that_stays_keeps_its_mask(distil):
    config = transformers.InformerConfig(
        prediction_length=6, context_length=8, lags_sequence=[1, 2], num_time_features=1, distil=distil, d_model=32,
        encoder_layers=2, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
    )  # fmt: skip
    model = transformers.InformerModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    past, future = torch.randn(1, 10), torch.randn(1, 6)
    times = {"past_time_features": torch.randn(1, 10, 1), "future_time_features": torch.randn(1, 6, 1)}

    def output() -> Tensor:
        torch.manual_seed(1)  # it samples keys
        call = {"past_values": past, "past_observed_mask": torch.ones(1, 10), "future_values": future}
        return model(**call, **times).last_hidden_state

    expected = output()
    fastattn.swap(model)
    torch.testing.assert_close(output(), expected, rtol=1e-4, atol=1e-5)


def test_attention_to_sound_of_gemma_4_keeps_its_mask():
    config = transformers.Gemma4AudioConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, output_proj_dims=16
    )
    model = transformers.Gemma4AudioModel._from_config(config, attn_implementation="eager").eval()
    x, real = torch.randn(2, 200, 128), torch.arange(200) < torch.tensor([[200], [120]])
    expected = model(x, attention_mask=real)
    model.set_attn_implementation("fastattn")
    actual = model(x, attention_mask=real)
    of_real = expected.attention_mask
    torch.testing.assert_close(
        actual.last_hidden_state[of_real], expected.last_hidden_state[of_real], rtol=1e-4, atol=1e-5
    )
