"""Functions that run on every rank of a group, with whole models: each beside the same model on one process."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jobs import agreed, error_of, mesh_of
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import fastattn
import fastattn.nn
from fastattn import Mask
from fastattn.parallel import Plan, context_parallel
from fastattn.parallel import plan as make_plan

N, LENGTHS = 27, (27, 16)
LAYOUTS = ("contiguous", "zigzag", "longest first")
DOCUMENTS = torch.tensor([[0] * 11 + [1] * 9 + [2] * 7])


def compared(
    group: dist.ProcessGroup, model: nn.Module, alone: Callable[[], Tensor], mine: Callable[[], Tensor]
) -> dict[str, Tensor]:
    """By name, what the ranks have together and what one process has: the loss and the gradients of the parameters.

    alone, mine: the loss of all tokens, and the part of it of this rank.
    """
    results = []
    for loss in (mine(), alone()):
        model.zero_grad()
        loss.backward()
        result = {"loss": loss.detach()}
        result |= {
            name: x.new_zeros(x.shape) if x.grad is None else x.grad.clone() for name, x in model.named_parameters()
        }
        results.append(result)
    for x in results[0].values():
        dist.all_reduce(x, group=group)
    return {name: torch.stack([x, results[1][name]]) for name, x in results[0].items()}


def mask_of(what: str, *, causal: bool) -> Mask:
    """The mask of the tokens of a model."""
    mask = Mask(causal)
    if what == "padding":
        mask &= Mask.from_lengths(LENGTHS, N, of="both")
    if what == "left padding":
        mask &= Mask.from_lengths(LENGTHS, N, padding_side="left", of="both")
    if what == "window":
        mask &= Mask(window=(4, 3), dense=torch.rand(N, N, generator=torch.Generator().manual_seed(2)) < 0.7)
    return mask & Mask(segment_ids=(DOCUMENTS, DOCUMENTS)) if what == "documents" else mask


def _hugging_face(kind: str) -> nn.Module:
    import torchvision_import  # noqa: F401
    import transformers as hf

    sizes = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "pad_token_id": 0,
        "attn_implementation": "fastattn", "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes))
    if kind == "gemma2":
        return hf.Gemma2ForCausalLM(hf.Gemma2Config(**sizes, sliding_window=6, attn_logit_softcapping=2.0))
    if kind == "gpt_oss":
        model = hf.GptOssForCausalLM(
            hf.GptOssConfig(**sizes, sliding_window=6, num_local_experts=2, num_experts_per_tok=2)
        )
        for name, x in model.named_parameters():
            if name.endswith("sinks"):
                nn.init.normal_(x)
        return model
    if kind == "qwen2_vl":
        turned = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1]}
        return hf.Qwen2VLTextModel(hf.Qwen2VLTextConfig(**sizes, rope_parameters=turned))
    if kind == "lfm2":
        return hf.Lfm2ForCausalLM(hf.Lfm2Config(**sizes, layer_types=["conv", "full_attention"]))
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return hf.BertForMaskedLM(hf.BertConfig(**sizes, **dropouts))


def hugging_face(group: dist.ProcessGroup, kind: str, what: str, **options: object) -> dict[str, Tensor]:
    """A model of transformers. options: of the model's calls, or "checkpointing"."""
    model, causal = _hugging_face(kind), kind != "bert"
    if checkpointing := options.pop("checkpointing", False):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train(checkpointing)
    B = 1 if what == "documents" else 2
    ids = torch.randint(1, 40, (B, N), generator=torch.Generator().manual_seed(1))
    labels = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous() if causal else ids
    positions, mask, batch = torch.arange(N).expand(B, -1), mask_of(what, causal=causal), {}
    if what == "documents":
        positions = Mask(segment_ids=(DOCUMENTS, DOCUMENTS)).positions(N, N)[1]
        labels = labels.masked_fill(F.pad(DOCUMENTS.diff() != 0, (0, 1)), -100)
        options |= {"use_cache": False}
    elif mask.real_keys is not None:
        batch["attention_mask"] = mask.real_keys.long()
        labels = labels.masked_fill(~mask.real_keys, -100)
        positions = fastattn.nn.positions_of(mask.real_keys)
    batch |= {"input_ids": ids, "position_ids": positions, "labels": labels}
    if causal:
        batch |= {"shift_labels": labels}

    def loss(batch: dict[str, Tensor]) -> Tensor:
        if causal:
            return model(**batch, num_items_in_batch=(labels >= 0).sum(), **options).loss
        logits = model(**{name: x for name, x in batch.items() if name != "labels"}, **options).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / labels.numel()

    plan = make_plan(mask, N, group, layout=LAYOUTS[len(kind + what) % 3])

    whole = dict(batch)
    if (kind, what) == ("gpt_oss", "documents"):  # of which transformers reads no documents from positions
        window = mask & Mask(True, window=(5, 0), segment_ids=mask.segment_ids)
        masks = {"full_attention": mask, "sliding_attention": window}
        whole["attention_mask"] = {name: each.keep(N, N) for name, each in masks.items()}

    def mine() -> Tensor:
        with context_parallel(plan):
            return loss({name: plan.shard(x, 1) for name, x in batch.items()})

    return compared(group, model, lambda: loss(whole), mine)


def _weighted(x: Tensor) -> Tensor:
    """A sum that tells tokens apart."""
    return (x * torch.linspace(-1, 1, x.shape[-1])).sin().sum()


def of_modules(
    group: dist.ProcessGroup, kind: str, what: str, product: bool = False, hooked: bool = False
) -> dict[str, Tensor]:
    """Models of fastattn.nn and torch.nn. product: of two algorithms, on a mesh of two dimensions.

    hooked: with hooks of gradients, which have a module compute with other tensors than those that it is called with.
    """
    torch.manual_seed(0)
    mask, layout = mask_of(what, causal="encoder" not in kind), LAYOUTS[len(kind + what) % 3]
    how = {"mesh": group}
    if product:
        how = {"mesh": mesh_of((2, 2)), "algorithm": ("heads", "gather")}
    plan = make_plan(mask, N, layout=layout, **how)
    B = 1 if what == "documents" else 2
    x, hidden = torch.randn(B, N, 16), None if mask.real_keys is None else ~mask.real_keys
    real = torch.ones(B, N, 1) if mask.real_keys is None else mask.real_keys[..., None].float()
    n = 19  # source tokens
    source_mask = Mask.from_lengths([n, 8][:B], n)
    if what == "documents":
        ids = torch.tensor([[0] * 5 + [1] * 6 + [2] * 8])
        source_mask = Mask(segment_ids=(ids, ids))
    source = make_plan(source_mask, n, **how)
    y, hidden_y = torch.randn(B, n, 16), None if source_mask.real_keys is None else ~source_mask.real_keys
    shard = lambda x, of=plan: None if x is None else of.shard(x, 1)  # noqa: E731
    sizes = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": True}
    package = nn if "torch" in kind else fastattn.nn
    rotary = {} if package is nn else {"rotary": fastattn.nn.RotaryPositions(4)}
    whole: dict[str, object] = {}  # what is said to one process beside padding

    if kind.endswith("encoder"):
        model, source = package.TransformerEncoder(package.TransformerEncoderLayer(16, 4, **sizes), 2, **rotary), None
        whole = {"mask": mask if what in ("documents", "window") else None}

        def call(shard: Callable, **masks: object) -> Tensor:
            return model(shard(x), src_key_padding_mask=shard(hidden), **masks)

    elif kind.endswith("transformer"):
        model = package.Transformer(16, 4, 1, 2, **sizes, **rotary)
        whole = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(N)}
        if what == "documents":
            cross = Mask(segment_ids=(mask.segment_ids[0], source_mask.segment_ids[1]))
            whole = {"src_mask": source_mask, "tgt_mask": mask, "memory_mask": cross}

        def call(shard: Callable, **masks: object) -> Tensor:
            padding = dict.fromkeys(("src_key_padding_mask", "memory_key_padding_mask"), shard(hidden_y, source))
            return model(shard(y, source), shard(x), **padding, tgt_key_padding_mask=shard(hidden), **masks)

    else:
        positions = {"language rotary": "rotary", "language learned": "learned"}.get(kind, "sinusoidal")
        config = fastattn.nn.TransformerConfig(
            30, 16, 4, 2, dim_feedforward=24, dropout=0.0, padding_idx=0, positions=positions
        )
        ids = torch.randint(1, 30, (B, N)) * real[..., 0].long()
        if kind == "seq2seq":
            model, of_y = fastattn.nn.Seq2SeqModel(config), torch.randint(1, 30, (B, n)) * ~hidden_y
        else:
            model, source = fastattn.nn.LanguageModel(config), None

        def call(shard: Callable) -> Tensor:
            return model(*([shard(of_y, source)] if source else []), shard(ids))

    if package is nn:
        fastattn.swap(model)
    for module in model.modules() if hooked else ():
        module.register_full_backward_hook(lambda *_: None)

    def mine() -> Tensor:
        with context_parallel(plan, source=source):
            return _weighted(call(shard) * shard(real))

    return compared(group, model, lambda: _weighted(call(lambda x, _=None: x, **whole) * real), mine)


def checkpointed(group: dist.ProcessGroup, use_reentrant: bool) -> dict[str, Tensor]:
    """A layer of fastattn.nn under activation checkpointing, whose backward after the block is refused."""
    torch.manual_seed(0)
    layer = fastattn.nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=True)
    mask, x = mask_of("padding", causal=True), torch.randn(2, N, 16, requires_grad=True)
    plan, real = make_plan(mask, N, group, layout="contiguous"), mask.real_keys[..., None]

    def loss() -> Tensor:
        with context_parallel(plan):
            o = checkpoint(layer, plan.shard(x, 1), use_reentrant=use_reentrant)
            loss = _weighted(o * plan.shard(real, 1))
            if within:
                loss.backward()
        return loss

    within = False
    message = error_of(lambda: loss().backward())
    assert message.startswith("the backward of a context_parallel block with activation checkpointing"), message
    alone = plan.shard(x, 1).detach().requires_grad_()  # which is of no block, though as long as what one had
    checkpoint(layer, alone, use_reentrant=use_reentrant).sum().backward()
    layer.zero_grad()
    within = True
    loss()
    actual = {name: x.grad.clone() for name, x in layer.named_parameters()}
    layer.zero_grad()
    _weighted(layer(x, mask) * real).backward()
    for gradient in actual.values():
        dist.all_reduce(gradient, group=group)
    return {name: torch.stack([actual[name], x.grad]) for name, x in layer.named_parameters()}


def refused(group: dist.ProcessGroup, what: str) -> str:
    """The error of a call that a block does not say; "local" differs on the last rank alone."""
    if what == "torch's own block":
        return in_torchs_block(group)
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    mask = Mask(True) & Mask.from_lengths(LENGTHS, N, of="both")
    plan = make_plan(mask, N, group, layout="zigzag")
    x = torch.randn(2, len(plan.positions()), 16)
    n, q = x.shape[1], torch.randn(2, 4, x.shape[1], 4)
    attention, cache = fastattn.nn.MultiHeadAttention(16, 4, batch_first=True), fastattn.nn.KVCache(2, N)
    cache.extend(n)
    padding, documents = ~plan.shard(mask.real_keys, 1), plan.shard(torch.arange(N).expand(2, -1) // 9, 1)
    padding[0, 0] |= last

    def attend(attn_mask: Tensor | Mask | None = None, **options: object) -> None:
        attention(x, x, x, need_weights=False, attn_mask=attn_mask, **options)

    @torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    def call_sdpa() -> None:
        with fastattn.patch_sdpa():
            F.scaled_dot_product_attention(q, q, q)

    calls = {
        "weights": lambda: attention(x, x, x),
        "other tokens": lambda: attention(x, x.clone(), x, need_weights=False),
        "more keys": lambda: fastattn.attention(q, *2 * [torch.cat([q, q], 2)]),
        "local dense": lambda: attend(torch.rand(n, n) < 0.5),
        "local padding": lambda: attend(key_padding_mask=padding),
        "local documents": lambda: attend(Mask(segment_ids=(documents, documents))),
        "offset": lambda: attend(Mask(True, q_offset=3)),
        "cache": lambda: attend(Mask(True), cache=cache.layer(0)),
        "classifier": lambda: fastattn.nn.SequenceClassifier(fastattn.nn.TransformerConfig(30, 16, 4, 1), 2)(
            torch.ones(2, n, dtype=torch.int64)
        ),
        "sdpa": call_sdpa,
    }

    def call() -> None:
        with context_parallel(plan):
            calls[what]() if what in calls else _refused_hugging_face(plan, what.removeprefix("hf "))

    message = error_of(call)
    assert fastattn.blocks.ENTERED == []
    agreed(group)  # the group goes on
    return message


def in_torchs_block(group: dist.ProcessGroup) -> str:
    """The error of a model of transformers in PyTorch's own context_parallel, which accelerate enters for cp_size."""
    from torch.distributed.tensor.experimental import context_parallel as torchs_context_parallel

    model, ids = _hugging_face("llama"), torch.ones(2, 16, dtype=torch.int64)
    with torchs_context_parallel(DeviceMesh.from_group(group, "cpu"), buffers=[ids], buffer_seq_dims=[1]):
        message = error_of(lambda: model(input_ids=ids))  # outside it would leave PyTorch's function replaced
    agreed(group)
    return message


def dropped(group: dist.ProcessGroup, how: str) -> float:
    """The largest error of output and gradient of a module that drops weights in a block, to those of one process."""
    torch.manual_seed(0)
    layer, x = fastattn.nn.MultiHeadAttention(16, 4, dropout=0.5, batch_first=True), torch.randn(2, N, 16)
    mask = Mask(True, real_keys=torch.arange(N) < torch.tensor([[N], [N - 7]]))

    def results(x: Tensor, padding: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        def attend(x: Tensor) -> Tensor:
            return layer(x, x, x, need_weights=False, key_padding_mask=padding, is_causal=True, attn_mask=Mask(True))[0]

        torch.manual_seed(seed)
        x = x.detach().requires_grad_()
        of_graph = torch.compile(attend, backend="aot_eager", fullgraph=True) if how == "compiled" else attend
        o = checkpoint(attend, x, use_reentrant=False) if how == "checkpointed" else of_graph(x)
        torch.manual_seed(seed + 1)  # which a checkpoint undoes
        return o.detach(), torch.autograd.grad(o.square().sum(), x)[0]

    plan = make_plan(mask, N, group)
    whole = results(x, ~mask.real_keys, 5)
    with context_parallel(plan):
        mine = results(plan.shard(x, 1), ~plan.shard(mask.real_keys, 1), 5 + dist.get_rank(group))
        both = [plan.unshard(part, 1) for part in mine]
    return max((a - b).abs().max().item() for a, b in zip(both, whole, strict=True))


def computed_again(group: dist.ProcessGroup, what: str) -> float:
    """The largest error of gradients where forwards that a backward in a block computes again were in other blocks."""
    torch.manual_seed(0)
    x, masks = torch.randn(2, N, 16), [Mask.from_lengths((N - i, N - 7), N) for i in (1, 9)]
    plans = [make_plan(mask, N, group) for mask in masks]
    layer = fastattn.nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    transformer = fastattn.Transformer(16, 4, 1, 1, 32, 0.0, batch_first=True)

    def gradients(call: Callable) -> Tensor:
        y = x.clone().requires_grad_()
        if what == "no block":
            local = call(layer, y[:, :5])
            with context_parallel(plans[0]):
                local.square().sum().backward()
        elif what == "two blocks":
            with context_parallel(plans[0]):
                first = call(layer, plans[0].shard(y, 1))
                with context_parallel(plans[1]):
                    (first.square().sum() + call(layer, plans[1].shard(y, 1)).square().sum()).backward()
        else:
            with context_parallel(plans[0], source=plans[1]):
                encoder, decoder = transformer.encoder, transformer.decoder
                memory = plans[1].shard(y, 1)
                with fastattn.blocks.of_source(fastattn.blocks.current()):
                    for part in encoder.layers:
                        memory = call(part, memory)
                decoder(plans[0].shard(y, 1), encoder.norm(memory)).square().sum().backward()
        return y.grad

    checkpointed = functools.partial(checkpoint, use_reentrant=False)
    return (gradients(checkpointed) - gradients(lambda module, *inputs: module(*inputs))).abs().max().item()


def without_tokens(group: dist.ProcessGroup) -> int:
    """How many outputs a rank has of PyTorch's function, patched, where there is a token for the first one alone."""
    plan = make_plan(Mask(True), 1, group)
    q = torch.randn(1, 2, len(plan.positions()), 4)
    with context_parallel(plan), fastattn.patch_sdpa():
        o = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(o, q)
    return o.shape[2]


def compiled_outside(group: dist.ProcessGroup) -> int:
    """How often a function is compiled that is called between blocks."""
    count, plan = CompileCounter(), make_plan(Mask(), N, group)
    attend = torch.compile(lambda q: fastattn.attention(q * 2, q, q), backend=count)
    for _ in range(5):
        attend(torch.randn(1, 2, 8, 4))
        with context_parallel(plan):
            pass
    agreed(group)
    return count.frame_count


def _refused_hugging_face(plan: Plan, what: str) -> None:
    import torchvision_import  # noqa: F401
    import transformers as hf

    ids = torch.ones(2, len(plan.positions()), dtype=torch.int64)
    batch = {
        "input_ids": ids, "position_ids": plan.positions().expand(2, -1),
        "attention_mask": plan.shard(plan.mask.real_keys, 1),
    }  # fmt: skip
    if what == "encoder and decoder":
        config = hf.T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, dropout_rate=0.0)
        hf.T5ForConditionalGeneration._from_config(config, attn_implementation="fastattn")(
            input_ids=ids, decoder_input_ids=ids
        )
        return
    model = _hugging_face(what.removesuffix(" without positions") if "without" in what or what == "lfm2" else "llama")
    if "without positions" in what:
        del batch["position_ids"]
    if what == "no padding":
        batch["attention_mask"] = torch.ones_like(ids)
    if what == "all tokens":
        batch["attention_mask"] = plan.mask.real_keys
    if what == "cache":
        batch["past_key_values"] = model(**batch, use_cache=True).past_key_values
        del batch["attention_mask"]
    if what == "positions again":
        batch = {"input_ids": ids, "position_ids": batch["position_ids"] % 3, "use_cache": False}
    model(**batch)


def positions_of_text(group: dist.ProcessGroup) -> float:
    """How far a model with M-RoPE is from one process, where it is given the positions of text too."""
    model, plan = _hugging_face("qwen2_vl").eval(), make_plan(Mask(True), N, group)
    ids = torch.randint(1, 40, (1, N), generator=torch.Generator().manual_seed(1))
    expected = model(ids, position_ids=torch.arange(N).expand(4, 1, -1)).last_hidden_state
    with context_parallel(plan):
        positions = plan.positions().expand(4, 1, -1)
        actual = model(plan.shard(ids, 1), position_ids=positions, use_cache=False).last_hidden_state
    return (actual - plan.shard(expected, 1)).abs().max().item()


def translation(group: dist.ProcessGroup, shape: tuple[int, int], options: list[str]) -> list[list[float]]:
    """The losses of examples/translation/parallel.py on a mesh of this shape, and on one process."""
    from examples.translation.parallel import losses, make_parser

    args = make_parser().parse_args(options)
    names = ("samples", "tokens")
    if shape[0] == 1 and dist.get_world_size(group) < dist.get_world_size():  # which only these ranks make
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        ranks = [dist.get_process_group_ranks(group)]
        mesh = DeviceMesh.from_group([alone, group], "cpu", ranks, mesh_dim_names=names)
    else:
        mesh = mesh_of(shape, names)
    return [list(losses(args, of)) for of in (mesh, None)]
