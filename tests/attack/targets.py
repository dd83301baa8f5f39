"""The targets of the attack: each function makes a random call from a `Draw`, and yields the errors of its outputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from draws import DEVICE, POISONS, Draw, Errors, arguments, drawn_call, errors_of, holds, judged, naive_dtype
from formula import Call, attend, compared
from hostile import refused_by_name
from torch import Tensor, nn

import fastattn
from fastattn.paged import quantized
from fastattn.validation import QUANTIZED


def attention(draw: Draw) -> Errors:
    """Output, lse and gradients, and the same bits when it is computed again by another number of threads."""
    call = drawn_call(draw)
    yield from of_attention(draw, call, fastattn.attention)


def of_attention(draw: Draw, call: Call, function: Callable[..., tuple[Tensor, Tensor]]) -> Errors:
    """The errors of a function with the arguments of `fastattn.attention`."""
    wanted = [name for name in call.learned() if draw.chance(0.8)]
    use_lse, again = draw.chance(0.7), draw.chance(0.3)

    def computed() -> dict[str, Tensor]:
        learned = {n: x.detach().requires_grad_(n in wanted) for n, x in call.learned().items()}
        now = call.replaced(learned)
        o, lse = function(now.q, now.k, now.v, **arguments(draw, now), return_lse=True)
        result = {"o": o.detach(), "lse": lse.detach()}
        if wanted:
            outs = ([o, lse], [call.do, call.dlse.to(lse.dtype)]) if use_lse else ([o], [call.do])
            grads = torch.autograd.grad(outs[0], [learned[n] for n in wanted], outs[1])
            result |= {f"d{n}": g for n, g in zip(wanted, grads, strict=True)}
        return result

    actual = computed()
    yield from errors_of(draw, call if use_lse else replace(call, dlse=torch.zeros_like(call.dlse)), actual)
    if again:
        # torch's own sums depend on threads, and so does which rectangles its kernels are called for
        others = draw.backend not in ("reference", "torch") and draw.dtype != torch.float64
        torch.set_num_threads(4 - draw.threads if others else draw.threads)
        for name, x in computed().items():
            same = torch.equal(x.nan_to_num(), actual[name].nan_to_num())
            yield holds(f"{name} computed again by {torch.get_num_threads()} threads", same)


def blind_queries(draw: Draw) -> Errors:
    """A query that the mask shows nothing has 0, -inf and gradients of 0, whatever the keys that others see hold."""
    call = drawn_call(draw)
    alone = replace(call, options={name: x for name, x in call.options.items() if name != "bias"})
    blind = attend(alone.to(torch.float64)).lse == -math.inf
    poison = draw.choice(POISONS)
    poisoned = [x.clone() for x in (call.k, call.v, call.do)]
    for x in poisoned:
        if draw.chance(0.5):
            x[:, :, draw.randint(0, 3) :: 4] = poison
    k, v, do = poisoned
    q = call.q.detach().requires_grad_()
    o, lse = fastattn.attention(q, k, v, **arguments(draw, call), return_lse=True)
    (dq,) = torch.autograd.grad((o, lse), q, (do, call.dlse.to(lse.dtype)))
    for name, x, value in (("o", o, 0), ("lse", lse, -math.inf), ("dq", dq, 0)):
        yield holds(f"{name} of a query that sees nothing", (x[blind] == value).all())


def varlen(draw: Draw) -> Errors:
    """`attention_varlen` against documents in `segment_ids` of one sample."""
    call = drawn_call(draw, "causal window scale softcap sinks dropout", B=1, same_lengths=draw.chance(0.5))
    own, documents = call.q.shape[2] == call.k.shape[2] and draw.chance(0.5), draw.choice((0, 1, 3, 20))
    ends = [draw.integers(0, n, documents).sort().values for n in (call.q.shape[2], call.k.shape[2])]
    cu_q, cu_k = (F.pad(x, (1, 0)) for x in (ends[0], ends[0] if own else ends[1]))
    ids = [
        torch.arange(n, device=DEVICE).unsqueeze(1).ge(x[1:]).sum(1)
        for n, x in ((call.q.shape[2], cu_q), (call.k.shape[2], cu_k))
    ]
    ids = [x.masked_fill(x == documents, -1)[None] for x in ids]
    align = draw.choice(("start", "end"))
    mask = call.mask | {"segment_ids": tuple(ids)}
    if align == "end":
        mask["q_offset"] = F.pad(cu_k.diff() - cu_q.diff(), (0, 1))[ids[0]]
    mask_of_call = dict(call.mask)

    def function(q: Tensor, k: Tensor, v: Tensor, mask: object, return_lse: bool, **options: object) -> tuple:
        o, lse = fastattn.attention_varlen(
            *(x[0].transpose(0, 1) for x in (q, k, v)), cu_q, None if own else cu_k, align=align,
            return_lse=return_lse, **mask_of_call, **options,
        )  # fmt: skip
        return o.transpose(0, 1)[None], lse[None]

    yield from of_attention(draw, replace(call, mask=mask), function)


def paged(draw: Draw) -> Errors:
    """`attention_paged` against attention to the keys of each request, of which pages have no more than it needs."""
    call = drawn_call(draw, "causal window scale softcap alibi_slopes sinks", B=draw.randint(1, 3))
    (B, H, n_q, _), n_k, size = call.q.shape, call.k.shape[2], draw.choice((1, 3, 16, 100))
    with_tree = n_q <= n_k and draw.chance(0.3)
    counts = torch.full((B,), n_q) if with_tree else draw.integers(0, min(n_q, n_k), B).cpu().long()
    lengths = counts + (draw.table(B, p=0.8).cpu() * (n_k - counts) * torch.rand(B, generator=draw.of_numbers)).long()
    slopes_of_each = call.options.get("alibi_slopes", torch.ones(H)).dim() == 2
    prefix = 0 if slopes_of_each or draw.chance(0.7) else int((lengths - counts).min()) // size * size
    k, v = (torch.cat([x[:1, :, :prefix].expand(B, -1, -1, -1), x[:, :, prefix:]], 2) for x in (call.k, call.v))
    stored = k, v
    if k.dtype in (torch.float32, torch.float64) and draw.chance(0.3):
        of_pages = draw.choice((*QUANTIZED,))
        (k8, k_scales), (v8, v_scales) = quantized(k, of_pages), quantized(v, of_pages)
        stored = k8, v8, k_scales[..., None], v_scales[..., None]
        k, v = (x.to(k.dtype) * scales.to(k.dtype) for x, scales in zip(stored[:2], stored[2:], strict=True))
    mask = call.mask | {"q_offset": lengths - counts, "real_keys": torch.arange(n_k) < lengths[:, None]}
    mask |= {"real_queries": torch.arange(n_q) < counts[:, None]}
    options, tree = dict(call.options), None
    if with_tree:
        tree = draw.table(*draw.choice(((n_q, n_q), (B, n_q, n_q))))
        at = torch.arange(n_k) - (lengths - counts)[:, None, None]
        inside = tree.expand(B, n_q, n_q).gather(2, at.clamp(0, max(n_q - 1, 0)).expand(B, n_q, n_k)) if n_q else at < 0
        mask = {**mask, "dense": ((at < 0) | inside)[:, None], "causal": False}
    used = -(-lengths // size)
    of_prefix, places = prefix // size, torch.randperm(int(used.sum()) + 3, generator=draw.of_numbers)
    table = torch.full((B, int(used.max()) + draw.randint(0, 2)), draw.choice((-1, 10**6)))
    begin = of_prefix
    for b, n in enumerate(used.tolist()):
        table[b, :of_prefix] = places[:of_prefix]
        table[b, of_prefix:n] = places[begin : begin + n - of_prefix]
        begin += n - of_prefix
    real, written = mask["real_queries"], draw.chance(0.5)
    b, row = mask["real_keys"].nonzero(as_tuple=True)
    new = row >= (lengths - counts)[b]
    nothing = [math.nan if x.is_floating_point() else 99 for x in stored]
    pages = [x.new_full((len(places), size, x.shape[1], x.shape[3]), n) for x, n in zip(stored, nothing, strict=True)]
    if draw.chance(0.5):
        pages = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in pages]
    for to, x, n in zip(pages, stored, nothing, strict=True):
        to[table[b, row // size], row % size] = x[b, :, row].masked_fill((new & written)[:, None, None], n)
    scales = {name: x[..., 0] for name, x in zip(("k_scales", "v_scales"), pages[2:], strict=False)}
    tokens = [x[b[new], :, row[new]] for x in (k, v)] if written else (None, None)
    cu_seqlens = None if (counts == 1).all() and draw.chance(0.5) else F.pad(counts.cumsum(0), (1, 0))
    o, lse = fastattn.attention_paged(
        call.q.transpose(1, 2)[real], *pages[:2], table, lengths, cu_seqlens, k=tokens[0], v=tokens[1], tree=tree,
        prefix=prefix, causal=call.mask.get("causal", False), window=call.mask.get("window", (None, None)),
        return_lse=True, backend=draw.backend, **options, **scales,
    )  # fmt: skip
    actual = {"o": o.new_zeros(B, n_q, *o.shape[1:]), "lse": lse.new_full((B, n_q, H), -math.inf)}
    actual["o"][real], actual["lse"][real] = o, lse.T
    yield from errors_of(draw, replace(call, k=k, v=v, mask=mask), {n: x.transpose(1, 2) for n, x in actual.items()})


def weights(draw: Draw) -> Errors:
    """The weights in every form, and the gradients of one of them."""
    call = drawn_call(draw)
    learned = {n: x.detach().requires_grad_(n != "v") for n, x in call.learned().items()}
    now = call.replaced(learned)
    form = draw.choice(("averaged", "heads", "with o", "received", "top"))
    given = arguments(draw, now, dropout=form not in ("received", "top"))
    call = call if "dropout_p" in given else replace(call, kept=None, dropout_p=0.0)
    top_k = draw.choice((1, 3, draw.randint(1, 50)))
    keys = None
    if form == "received":
        actual = fastattn.attention_received(now.q, now.k, **given)
    elif form == "top":
        actual, keys = fastattn.top_keys(now.q, now.k, **given, top_k=top_k)
        few = keys.lt(0)
        yield holds(
            "order of top_keys", (actual.diff() <= 0).all() and not actual[few].any() and keys.shape[-1] == top_k
        )
    elif form == "with o":
        o, actual = fastattn.attention_with_weights(now.q, now.k, now.v, **given)
        yield from errors_of(draw, call, {"o": o})
    else:
        actual = fastattn.attention_weights(now.q, now.k, **given, average_heads=form == "averaged")

    def formed(dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The same of the formula in this dtype, and its gradients."""
        tensors = {n: x.detach().to(dtype).requires_grad_() for n, x in learned.items()}
        result = attend(call.to(dtype).replaced(tensors))
        x = result.weights.mean(1) if form in ("averaged", "with o") else result.weights
        x = x.sum(2) if form == "received" else x
        if form == "top":
            x = F.pad(x, (0, 1)).gather(-1, keys.where(keys >= 0, x.shape[-1]))
        names = [n for n in learned if n != "v"]
        grads = torch.autograd.grad(x, [tensors[n] for n in names], arriving.to(dtype))
        return x, *grads

    arriving = torch.randn(actual.shape, generator=draw.of_numbers).to(DEVICE, actual.dtype)
    names = [n for n in learned if n != "v"]
    found = [actual, *torch.autograd.grad(actual, [learned[n] for n in names], arriving)]
    exact, naive = list(formed(torch.float64)), list(formed(naive_dtype(draw)))
    lse = attend(call.to(torch.float64)).lse
    if form == "top":  # those that were chosen are the largest
        p = attend(call.to(torch.float64)).p
        best = F.pad(p, (0, top_k)).sort(-1, descending=True).values[..., :top_k]
        found.append(actual), exact.append(best), naive.append(naive[0]), names.append("largest")
    for name, *three in zip([form, *(f"d{n} of {form}" for n in names)], found, naive, exact, strict=True):
        error = compared(name, *three, draw.dtype, least=1, lse=lse)
        yield judged(draw, error)


def merge(draw: Draw) -> Errors:
    """`merge` of the results for two sets of keys against the formula for all of them."""
    call = drawn_call(draw, "causal q_offset window segment_ids real_queries bias softcap scale sinks")
    sinks = call.options.get("sinks")
    first = draw.table(call.q.shape[0], call.k.shape[2], p=draw.choice((0.0, 0.5, 0.9)))
    halves = []
    for real in (first, ~first):
        options = {name: x for name, x in call.options.items() if name != "sinks"}
        part = replace(call, mask=call.mask | {"real_keys": real}, options=options)
        halves += fastattn.attention(call.q, call.k, call.v, **arguments(draw, part), return_lse=True)
    o, lse = fastattn.merge(*halves, sinks=sinks)
    yield from errors_of(draw, call, {"o": o, "lse": lse})


def sdpa(draw: Draw) -> Errors:
    """torch's function as fastattn has it, and patched, in as many dimensions as torch takes."""
    call = drawn_call(draw, draw.choice(("causal scale", "dense scale", "bias scale")), B=draw.choice((1, 2, 4)))
    lead = (lambda x: x[0]) if len(call.q) == 1 else (lambda x: x.unflatten(0, (-1, 2))) if draw.chance(0.3) else None
    q, k, v = (x if lead is None else lead(x) for x in (call.q, call.k, call.v))
    attn_mask = call.mask.get("dense", call.options.get("bias"))
    if attn_mask is not None and (lead is not None or attn_mask.dim() < 2):
        attn_mask = attn_mask.expand(*call.q.shape[:3], call.k.shape[2])
        attn_mask = attn_mask if lead is None else lead(attn_mask)
    options = {"scale": call.options.get("scale"), "is_causal": "causal" in call.mask, "enable_gqa": q.shape != k.shape}
    o = fastattn.scaled_dot_product_attention(q, k, v, attn_mask, **options)
    with fastattn.patch_sdpa() as patch:
        patched = F.scaled_dot_product_attention(q, k, v, attn_mask, **options)
    for x in (o, patched) if patch.computed else (o,):
        yield from errors_of(draw, call, {"o": x.reshape(*call.q.shape[:3], call.v.shape[3])})


def derivatives(draw: Draw) -> Errors:
    """Forward mode and second order against autograd through the formula."""
    draw.dtype, draw.extreme = torch.float32, False  # the directions are not
    call = drawn_call(draw, "causal window real_keys segment_ids dense bias softcap alibi_slopes sinks scale dropout")
    if (bias := call.options.get("bias")) is not None:  # shared by all keys it has no derivatives but rounding
        call.options["bias"] = bias.expand(*bias.shape[:-1], call.k.shape[2]).clone()
    names = list(call.learned())
    directions = [torch.randn(x.shape, generator=draw.of_numbers).to(DEVICE) for x in call.learned().values()]

    def found(dtype: torch.dtype, function: Callable[[Call], Tensor]) -> list[Tensor]:
        def of(*tensors: Tensor) -> Tensor:
            return function(call.to(dtype).replaced(dict(zip(names, tensors, strict=True))))

        tensors = tuple(x.detach().to(dtype).clone() for x in call.learned().values())
        along = tuple(x.to(dtype) for x in directions)
        tangent = torch.func.jvp(of, tensors, along)[1]
        leaves = [x.requires_grad_() for x in tensors]
        firsts = torch.autograd.grad(of(*leaves), leaves, call.do.nan_to_num().to(dtype), create_graph=True)
        seconds = torch.autograd.grad(sum((a * b).sum() for a, b in zip(firsts, along, strict=True)), leaves)
        return [tangent, *seconds]

    actual = found(torch.float32, lambda now: fastattn.attention(now.q, now.k, now.v, **arguments(draw, now)))
    naive, exact = (found(dtype, lambda now: attend(now).o) for dtype in (torch.float32, torch.float64))
    for name, *three in zip(
        ["tangent of o", *(f"second order of {n}" for n in names)], actual, naive, exact, strict=True
    ):
        error = compared(name, *three, draw.dtype)
        yield judged(draw, error)


def compiled(draw: Draw) -> Errors:
    """`torch.compile` of a call and its gradients."""
    call = drawn_call(draw)
    torch._dynamo.reset()
    given = arguments(draw, call, dropout=False)
    call = replace(call, kept=None, dropout_p=0.0, dlse=torch.zeros_like(call.dlse))
    function = torch.compile(lambda q, k, v: fastattn.attention(q, k, v, **given), backend="aot_eager")
    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    o = function(*leaves)
    grads = torch.autograd.grad(o, leaves, call.do)
    yield from errors_of(draw, call, dict(zip(("o", "dq", "dk", "dv"), (o.detach(), *grads), strict=True)))


def against_torch(draw: Draw, ours: nn.Module, theirs: nn.Module, inputs: list, options: dict, real: Tensor) -> Errors:
    """A module against torch's in fp64, by the outputs at `real` places and the gradients of all parameters."""
    torch.set_num_threads(1)
    found = []
    for module, dtype in ((ours, draw.dtype), (theirs, draw.dtype), (theirs, torch.float64)):
        module = copy.deepcopy(module).to(dtype)
        now = {n: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for n, x in options.items()}
        o = module(*(x.to(dtype) for x in inputs), **now)
        o, w = o if isinstance(o, tuple) else (o, None)
        o[real].nan_to_num().square().sum().backward()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        found.append([o[real], w if w is not None else o.new_zeros(0), grads])
    most = max((g.nan_to_num().abs().max() for g in found[2][2]), default=0)
    for each in found:  # as one, each in proportion to the largest number in it
        each[2] = torch.cat(
            [
                (g / (x.nan_to_num().abs().max() + most / 1000 + 1e-30)).flatten()
                for g, x in zip(each[2], found[2][2], strict=True)
            ]
        )
    for name, *three in zip(("output", "weights", "gradients"), *found, strict=True):
        yield holds(f"{name} is finite", three[0].isfinite().all())
        if name != "gradients" or found[2][0].isfinite().all():  # torch has NaN where a query sees nothing
            known = three[2].isfinite()
            yield compared(f"{name} of {type(ours).__name__}", *(x[known] for x in three), draw.dtype)


def multi_head_attention(draw: Draw) -> Errors:
    """`MultiHeadAttention` against torch's with the same parameters."""
    draw.dtype = draw.choice((torch.float32, torch.bfloat16))
    N, L, S, H, E = (
        draw.randint(1, 3),
        draw.randint(1, 40),
        draw.randint(1, 70),
        draw.randint(1, 4),
        draw.randint(1, 20),
    )
    made = {n: True for n in ("bias", "add_bias_kv", "add_zero_attn", "batch_first") if draw.chance(0.4)}
    widths = {n: draw.randint(1, 30) for n in ("kdim", "vdim") if draw.chance(0.2)}
    same = not widths and draw.chance(0.5)
    theirs = nn.MultiheadAttention(H * E, H, **{"bias": False} | made, **widths)
    ours = fastattn.MultiHeadAttention(H * E, H, **{"bias": False} | made, **widths)
    ours.load_state_dict(theirs.state_dict())
    S = L if same else S
    shapes = [(N, n, w) for n, w in ((L, H * E), (S, widths.get("kdim", H * E)), (S, widths.get("vdim", H * E)))]
    inputs = [draw.normal(*(shape if "batch_first" in made else (shape[1], shape[0], shape[2]))) for shape in shapes]
    options = {"need_weights": draw.chance(0.5), "average_attn_weights": draw.chance(0.5)}

    def as_mask(hidden: Tensor) -> Tensor:
        kind = draw.choice(("bool", "-inf", "numbers"))
        if kind == "numbers":
            return draw.normal(*hidden.shape)
        return hidden if kind == "bool" else torch.zeros_like(hidden, dtype=draw.dtype).masked_fill(hidden, -math.inf)

    if draw.chance(0.5):
        options["key_padding_mask"] = as_mask(draw.table(N, S, p=draw.choice((0.2, 1.0))))
    if draw.chance(0.5):
        options["attn_mask"] = as_mask(draw.table(*draw.choice(((L, S), (N * H, L, S))), p=0.3))
    if draw.chance(0.2) and L == S:
        options["attn_mask"] = torch.ones(L, L, dtype=torch.bool).triu(1)
    o_shape = (N, L) if "batch_first" in made else (L, N)
    inputs = [inputs[0]] * 3 if same else inputs
    yield from against_torch(draw, ours, theirs, inputs, options, torch.ones(o_shape, dtype=torch.bool))


def transformer(draw: Draw) -> Errors:
    """`Transformer`, and torch's after `swap`, against torch's, with padding that is packed away or not."""
    draw.dtype = torch.float32
    N, S, T, H, E = draw.randint(1, 3), draw.randint(1, 40), draw.randint(1, 40), draw.randint(1, 4), draw.randint(1, 9)
    made = {"norm_first": draw.chance(0.5), "batch_first": True, "dropout": 0.0, "bias": draw.chance(0.8)}
    sizes = (H * E, H, draw.randint(1, 2), draw.randint(1, 2), 8)
    theirs = nn.Transformer(*sizes, **made)
    ours = copy.deepcopy(theirs) if draw.chance(0.3) else fastattn.Transformer(*sizes, **made)
    ours.load_state_dict(theirs.state_dict())
    if type(ours) is nn.Transformer:
        fastattn.swap(ours)
    theirs.encoder.enable_nested_tensor = False
    options, real = {}, torch.ones(N, T, dtype=torch.bool)
    first = torch.arange(max(S, T)) == 0  # the first token is real, so that no query is blind
    if draw.chance(0.7):
        padding = ~(draw.table(N, S, p=draw.choice((0.3, 0.95))) | first[:S])
        options |= {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    if draw.chance(0.5):
        real = draw.table(N, T, p=draw.choice((0.3, 0.95))) | first[:T]
        options["tgt_key_padding_mask"] = ~real
    if draw.chance(0.6):
        options["tgt_mask"] = torch.ones(T, T, dtype=torch.bool).triu(1)
    yield from against_torch(draw, ours, theirs, [draw.normal(N, S, H * E), draw.normal(N, T, H * E)], options, real)


def packed(draw: Draw) -> Errors:
    """A small BERT of transformers, swapped and packed, against itself before."""
    import transformers

    draw.dtype = torch.float32
    H, L, N = draw.randint(1, 3), draw.randint(1, 40), draw.randint(1, 4)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8 * H, num_hidden_layers=2, num_attention_heads=H, intermediate_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    theirs = transformers.BertModel(config, add_pooling_layer=False)
    ours = copy.deepcopy(theirs)
    fastattn.swap(ours, packed=draw.chance(0.7))
    real = draw.table(N, L, p=draw.choice((0.3, 0.95))) | (torch.arange(L) == 0)
    ids = draw.integers(0, 29, N, L).long()
    found = [
        copy.deepcopy(model).to(dtype)(ids, attention_mask=real.long()).last_hidden_state[real]
        for model, dtype in ((ours, torch.float32), (theirs, torch.float32), (theirs, torch.float64))
    ]
    yield compared("last_hidden_state", *found, draw.dtype)


@torch.no_grad()
def generation(draw: Draw) -> Errors:
    """Logits step by step from a `KVCache`, and `generate`, over pages too, against passes over the prompt in fp64."""
    draw.dtype = torch.float32
    H, E, vocab = draw.randint(1, 3), 2 * draw.randint(1, 4), draw.randint(2, 30)
    choices = {"positions": ("sinusoidal", "learned", "rotary"), "norm": ("layer", "rms"), "num_kv_heads": (None, 1)}
    choices |= {"activation": ("relu", "gelu", "swiglu"), "norm_first": (True, False), "tie_embeddings": (True, False)}
    config = fastattn.nn.TransformerConfig(
        vocab, H * E, H, 2, dim_feedforward=8, dropout=0.0, **{n: draw.choice(values) for n, values in choices.items()}
    )
    model = fastattn.nn.LanguageModel(config).eval()
    in64 = copy.deepcopy(model).double()
    B, L, n = draw.randint(1, 3), draw.randint(1, 12), draw.randint(1, 8)
    real = torch.arange(L) >= draw.integers(0, L - 1, B)[:, None]
    real = real.flip(1) if draw.chance(0.5) else real
    ids = draw.integers(0, vocab - 1, B, L).long()
    cache = fastattn.nn.KVCache(B, L)
    splits = sorted(draw.randint(0, L) for _ in range(2))
    parts = [slice(a, b) for a, b in zip([0, *splits], [*splits, L], strict=True)]
    logits = torch.cat([model(ids[:, part], real[:, part], cache) for part in parts], 1)
    yield compared("logits", logits[real], model(ids, real)[real], in64(ids, real)[real], torch.float32, least=1)
    eos = draw.choice((None, draw.randrange(vocab)))
    tokens = in64.generate(ids, real, max_new_tokens=n, eos_token_id=eos, pad_token_id=0)
    for b, prompt in enumerate(ids):
        prompt, ended = prompt[real[b]], False
        for token in tokens[b].tolist():
            best = int(in64(prompt[None])[0, -1].argmax())
            yield holds("token of generate()", token == (0 if ended else best))
            prompt, ended = torch.cat([prompt, torch.tensor([token])]), ended or token == eos
    page_size = draw.randint(1, 5)
    cache = fastattn.nn.PagedCache(-(-(L + n) // page_size) * draw.randint(1, B), page_size)
    in_pages = in64.generate(ids, real, cache=cache, max_new_tokens=n, eos_token_id=eos, pad_token_id=0)
    yield holds("tokens of generate() over pages", torch.equal(in_pages, tokens) and cache.free == cache.pages)
    kind = {"num_beams": draw.randint(2, 4)} if draw.chance(0.5) else {"do_sample": True, "top_p": draw.uniform(0.1, 1)}
    tokens = model.generate(ids, real, max_new_tokens=n, eos_token_id=eos, **kind)
    yield holds(f"tokens of generate({kind})", tokens.shape[1] <= n and (tokens >= 0).all() and (tokens < vocab).all())


TARGETS: dict[str, tuple[float, Callable[[Draw], Errors]]] = {  # how often, and what makes a draw of it
    "attention": (30, attention),
    "blind queries": (4, blind_queries),
    "varlen": (8, varlen),
    "paged": (8, paged),
    "weights": (12, weights),
    "merge": (5, merge),
    "sdpa": (6, sdpa),
    "derivatives": (3, derivatives),
    "compiled": (0.3, compiled),
    "MultiHeadAttention": (5, multi_head_attention),
    "Transformer": (4, transformer),
    "packed": (2, packed),
    "generation": (3, generation),
    "hostile": (60, refused_by_name),
}
