"""The Transformer as taught: its blocks against the taught formula in plain PyTorch, and the program around it."""

from __future__ import annotations

import copy
import json
import re
import shutil

import pytest
import torch
from torch import Tensor, nn

import fastattn
from examples.attention_is_all_you_need import __main__ as program
from examples.attention_is_all_you_need import model as taught
from fastattn.testing import compare

B, H, N_Q, N_K, D_MODEL = 3, 2, 5, 7, 16


def formula(block: taught.MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None):
    """(output, maps) of the block without dropout, heads by heads; a row of only hidden keys is 0.

    Map h * B + b belongs to head h and sample b: heads first, unlike PyTorch's masks.
    """
    H = block.n_head

    def heads(projection: nn.Linear, x: Tensor) -> Tensor:
        return torch.cat(projection(x).chunk(H, dim=-1))  # [H * B, n, d]

    scores = heads(block.w_qs, q) @ heads(block.w_ks, k).mT / q.shape[-1] ** 0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden.repeat(H, 1, 1), -torch.inf)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    maps = scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
    o = torch.cat((maps @ heads(block.w_vs, v)).chunk(H), dim=-1)
    return block.layer_norm(q + block.fc(o)), maps


def hidden_pairs() -> Tensor:
    """bool [B, n_q, n_k]: padded keys in sample 0, anything in the others, and rows where all is hidden."""
    torch.manual_seed(1)
    hidden = torch.rand(B, N_Q, N_K) < 0.4
    hidden[0] = torch.arange(N_K) >= 4
    hidden[1, 2] = True
    hidden[2, 0] = hidden[2, 4] = True
    return hidden


MASKS = {
    "no mask": None,
    "pairs": hidden_pairs(),
    "keys": hidden_pairs()[:, 1:2],
    "everything": torch.ones(B, N_Q, N_K, dtype=torch.bool),
}


@pytest.fixture
def block() -> taught.MultiHeadAttention:
    torch.manual_seed(0)
    return taught.MultiHeadAttention(H, D_MODEL, d_k=3, d_v=5).eval()


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(B, n, D_MODEL).to(dtype).requires_grad_() for n in (N_Q, N_K, N_K)]


def learned_from(compute, block: nn.Module, hidden: Tensor | None) -> dict[str, Tensor]:
    """Output, maps, and the gradients of a loss over both by the inputs and by every parameter, one after the other.

    All gradients are one vector because that by the bias of the keys is 0 but for rounding, which has no scale.
    """
    qkv = inputs(next(block.parameters()).dtype)
    output, maps = compute(block, *qkv, hidden)
    torch.manual_seed(3)
    weights = [torch.randn(x.shape).to(x) for x in (output, maps)]
    loss = (output * weights[0]).sum() + (maps * weights[1]).sum()
    gradients = torch.autograd.grad(loss, [*qkv, *block.parameters()])
    together = torch.cat([gradient.flatten() for gradient in gradients])
    return {"output": output.detach(), "maps": maps.detach(), "gradients": together}


@pytest.mark.parametrize("name", MASKS)
def test_block_is_the_taught_formula(block, name):
    hidden = MASKS[name]
    actual = learned_from(lambda b, *x: b(*x), block, hidden)
    expanded = None if hidden is None else hidden.expand(B, N_Q, N_K)
    naive = learned_from(formula, block, expanded)
    exact = learned_from(formula, copy.deepcopy(block).double(), expanded)
    for part, value in actual.items():
        assert (error := compare(part, value, naive[part], exact[part])).right, error


def test_hidden_keys_and_rows_weigh_exactly_nothing(block):
    hidden = hidden_pairs()
    output, maps = block(*inputs(), hidden)
    assert (maps[hidden.repeat(H, 1, 1)] == 0).all()
    q = inputs()[0]
    torch.testing.assert_close(output[1, 2], block.layer_norm(q + block.fc.bias)[1, 2])


def test_true_hides_and_a_fastattn_mask_shows(block):
    hidden = hidden_pairs()
    by_tensor = block(*inputs(), hidden)[0]
    assert torch.equal(by_tensor, block(*inputs(), fastattn.Mask(dense=~hidden[:, None]))[0])


def test_maps_are_optional_and_change_nothing(block):
    for training in (False, True):
        block.train(training)
        outputs = []
        for return_attns in (True, False):
            torch.manual_seed(4)
            output, maps = block(*inputs(), hidden_pairs(), return_attns=return_attns)
            assert (maps is not None) == return_attns
            outputs.append(output)
        assert torch.equal(*outputs)


def test_maps_are_those_after_dropout(block):
    block.dropout.p = 0.5
    plain = block(*inputs())[1]
    maps = block.train()(*inputs())[1]
    dropped = maps == 0
    assert 0.3 < dropped.float().mean() < 0.7
    torch.testing.assert_close(maps[~dropped], 2 * plain[~dropped])


def test_scores_are_divided_by_the_root_of_d_model_unless_told_otherwise():
    assert taught.MultiHeadAttention(2, 64, 8, 8).temperature == 8.0
    torch.manual_seed(0)
    hot = taught.MultiHeadAttention(2, 16, 4, 4, temperature=1e9).eval()
    maps = hot(*inputs())[1]
    torch.testing.assert_close(maps, torch.full_like(maps, 1 / N_K))


def test_initialisation_is_xavier_normal():
    torch.manual_seed(0)
    block = taught.MultiHeadAttention(n_head=4, d_model=256, d_k=96, d_v=32)
    for projection in (block.w_qs, block.w_ks, block.w_vs, block.fc):
        weight = projection.weight
        torch.testing.assert_close(weight.std().item(), (2 / sum(weight.shape)) ** 0.5, rtol=0.02, atol=0)
        normal = weight.abs().median() / weight.std()  # 0.674 for a normal distribution, 0.866 for a uniform one
        torch.testing.assert_close(normal.item(), 0.6745, rtol=0.03, atol=0)


@pytest.mark.parametrize(
    "mask", [torch.zeros(N_Q, N_K).bool(), torch.zeros(B, N_Q, N_K), torch.zeros(B, N_Q, N_K + 1).bool()]
)
def test_a_mask_of_another_form_is_refused(block, mask):
    with pytest.raises(ValueError, match=r"mask must be bool \[3, 5, 7\] or \[3, 1, 7\].*got"):
        block(*inputs(), mask)


# The whole model.


@pytest.fixture
def transformer() -> taught.Transformer:
    torch.manual_seed(0)
    sizes = {"d_model": 24, "d_inner": 32, "n_layers": 2, "n_head": 3, "d_k": 8, "d_v": 5, "len_max_seq": 9}
    return taught.Transformer(11, 13, **sizes).eval()


SRC = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 3, 4, 0, 0, 0]])
TGT = torch.tensor([[2, 5, 6, 7, 8], [2, 9, 10, 0, 0]])


def test_base_size():
    with torch.device("meta"):
        model = taught.Transformer(37000, 37000, share_embeddings=True)
    assert (len(model.encoder), len(model.decoder)) == (6, 6)
    assert model.encoder[0].slf_attn.w_qs.weight.shape == (512, 512)
    assert model.encoder[0].slf_attn.n_head == 8
    assert model.decoder[5].pos_ffn.w_1.weight.shape == (2048, 512)
    assert 62e6 < sum(p.numel() for p in model.parameters()) < 66e6  # the paper's table 3: 65 million


def test_one_layer_of_the_decoder_attends_to_target_then_source(transformer):
    layer = transformer.decoder[0]
    x, source = torch.randn(2, 5, 24), torch.randn(2, 6, 24)
    output, slf_maps, enc_maps = layer(x, source)
    first, first_maps = formula(layer.slf_attn, x, x, x, None)
    second, second_maps = formula(layer.enc_attn, first, source, source, None)
    torch.testing.assert_close(output, layer.pos_ffn(second))
    torch.testing.assert_close(slf_maps, first_maps)
    torch.testing.assert_close(enc_maps, second_maps)


def test_feed_forward(transformer):
    ffn, x = transformer.encoder[0].pos_ffn, torch.randn(2, 24)
    inner = (x @ ffn.w_1.weight.T + ffn.w_1.bias).clamp(min=0)
    torch.testing.assert_close(ffn(x), ffn.layer_norm(x + inner @ ffn.w_2.weight.T + ffn.w_2.bias))


def test_padding_has_no_vector_and_counts_no_position(transformer):
    embedding = transformer.src_embedding
    right, left = embedding(torch.tensor([[3, 4, 0]])), embedding(torch.tensor([[0, 3, 4]]))
    assert (right[0, 2] == 0).all()
    assert torch.equal(right[0, :2], left[0, 1:])
    angles = 2 / 10000 ** (torch.arange(0, 24, 2) / 24)  # the second word stands at 2
    torch.testing.assert_close(right[0, 1, 0::2], embedding.words.weight[4, 0::2] * 24**0.5 + angles.sin())
    torch.testing.assert_close(right[0, 1, 1::2], embedding.words.weight[4, 1::2] * 24**0.5 + angles.cos())


def test_future_tokens_change_nothing(transformer):
    logits = transformer(SRC, TGT)
    for t in range(1, TGT.shape[1]):
        changed = TGT.clone()
        changed[:, t:] = 12
        actual = transformer(SRC, changed)
        torch.testing.assert_close(actual[:, :t], logits[:, :t])
        assert not torch.allclose(actual[0, t], logits[0, t])


def test_padding_changes_nothing(transformer):
    logits = transformer(SRC, TGT)
    alone = transformer(SRC[1:, :3], TGT[1:, :3])
    torch.testing.assert_close(alone, logits[1:, :3])
    real = transformer(SRC, TGT)[0]
    longer = transformer(nn.functional.pad(SRC, (0, 2)), nn.functional.pad(TGT, (0, 3)))
    torch.testing.assert_close(longer[0, :5], real)
    on_the_left = transformer(nn.functional.pad(SRC[:1], (1, 0)), nn.functional.pad(TGT[:1], (2, 0)))
    torch.testing.assert_close(on_the_left[0, 2:], real)


def test_every_source_token_matters(transformer):
    logits = transformer(SRC, TGT)
    for s in range(SRC.shape[1]):
        changed = SRC.clone()
        changed[0, s] = 10
        assert not torch.allclose(transformer(changed, TGT)[0], logits[0])


def test_maps_of_every_layer(transformer):
    enc_output, enc_maps = transformer.encode(SRC, return_attns=True)
    logits, maps = transformer.decode(TGT, SRC, enc_output, return_attns=True)
    assert torch.equal(logits, transformer(SRC, TGT))
    assert [m.shape for m in enc_maps] == [(3 * 2, 6, 6)] * 2
    assert [tuple(m.shape for m in pair) for pair in maps] == [((3 * 2, 5, 5), (3 * 2, 5, 6))] * 2
    for slf_maps, source_maps in maps:
        assert (slf_maps.triu(1) == 0).all()
        assert (source_maps[1::2, :, 3:] == 0).all()  # sample 1 of each head: its padded source
        assert (source_maps[1::2, 3:] == 0).all()  # its padded queries
    assert transformer.encode(SRC)[1] == [None, None]
    assert transformer.decode(TGT, SRC, enc_output)[1] == [(None, None)] * 2


def test_embeddings_are_shared(transformer):
    logits = transformer(SRC, TGT)
    with torch.no_grad():
        transformer.tgt_embedding.words.weight[12] *= 2  # a token that is in no sentence
    torch.testing.assert_close(transformer(SRC, TGT)[..., 12], 2 * logits[..., 12])
    shared = taught.Transformer(11, 11, d_model=8, d_inner=8, n_layers=1, n_head=1, d_k=8, d_v=8, share_embeddings=True)
    assert shared.src_embedding.words.weight is shared.tgt_embedding.words.weight
    with pytest.raises(ValueError, match="n_tgt_vocab must be 11 like n_src_vocab to share, got 13"):
        taught.Transformer(11, 13, share_embeddings=True)


def test_a_sentence_that_is_too_long(transformer):
    with pytest.raises(ValueError, match="positions must be below max_length = 10, got 10"):
        transformer(torch.ones(1, 10).long(), TGT[:1])


def test_generation_is_that_of_the_whole_sentence(transformer):
    """Each token is the likeliest one after those before it, in a batch with padding as alone."""
    options = {"decoder_start_token_id": 2, "max_new_tokens": 6}
    generated = transformer.generate(SRC, **options)
    assert generated.shape == (2, 6)
    for row, src_seq in zip(generated, (SRC[:1], SRC[1:, :3]), strict=True):
        assert torch.equal(transformer.generate(src_seq, **options), row[None])
        logits = transformer(src_seq, torch.cat([torch.tensor([2]), row[:-1]])[None])
        assert torch.equal(logits[0].argmax(-1), row)


def test_beam_search_finds_what_is_likelier(transformer):
    """With a beam as wide as the vocabulary, two tokens are the likeliest two of all."""
    generated = transformer.generate(SRC, decoder_start_token_id=2, max_new_tokens=2, num_beams=13)
    for row, src_seq in zip(generated.tolist(), (SRC[:1], SRC[1:, :3]), strict=True):
        starts = torch.tensor([[2, first] for first in range(13)])
        logp = transformer(src_seq.expand(13, -1), starts).log_softmax(-1)
        together = logp[0, 0][:, None] + logp[:, 1]  # [first, second]
        assert together[tuple(row)] == together.max()


# The program.

SMALL = "--d-model 32 --d-inner 64 --n-layers 2 --n-head 2 --d-k 16 --d-v 8 --dropout 0 --tokens 400 --warmup 60"


def run(*options: str) -> int:
    return program.main([*SMALL.split(), "--min-frequency", "1", *options])


def test_the_made_up_pairs_are_learnt_by_heart_with_the_defaults(capsys, tmp_path):
    assert program.main(["--output", str(tmp_path), "--epochs", "120"]) == 0  # of 200
    printed = capsys.readouterr().out
    assert "Eine Katze schläft im Park. -> a cat sleeps in the park." in printed
    by_heart = re.search(r"on 4 validation sentences \(greedy, lower-cased\), (\S+) on 32 that it learnt from", printed)
    assert float(by_heart[1]) > 95
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["history"][0]["valid_bleu"] < 20 < 80 < metrics["history"][-1]["valid_bleu"]
    assert metrics["settings"]["d_v"] == 16
    assert program.main(["--output", str(tmp_path), "--epochs", "121"]) == 0
    assert "resumed at step 120 (epoch 121)" in capsys.readouterr().err


@pytest.mark.parametrize("vocabulary", ["words", "bpe"])
def test_the_shipped_data_trains_with_either_vocabulary(tmp_path, vocabulary):
    assert run("--output", str(tmp_path), "--vocabulary", vocabulary, "--epochs", "6") == 0
    losses = [entry["valid_loss"] for entry in json.loads((tmp_path / "metrics.json").read_text())["history"]]
    assert losses[-1] < 0.9 * losses[0]


def test_a_long_sentence_is_translated_though_none_like_it_was_learnt(capsys, tmp_path):
    for part, text in (("train", "a " * 200 + "\n" + "a b .\n" * 4), ("val", "a b .\n" + "a " * 60 + "\n")):
        for language in ("de", "en"):
            (tmp_path / f"{part}.{language}.txt").write_text(text)
    options = ("--data", str(tmp_path), "--output", str(tmp_path / "run"), "--epochs", "1")
    assert run(*options, "--max-length", "5") == 0
    printed = capsys.readouterr().out
    assert "on 2 validation sentences" in printed
    assert "on 4 that it learnt from" in printed  # not the one that --max-length left out
    assert run(*options, "--max-length", "2") == 1
    assert "--max-length must leave some pairs" in capsys.readouterr().err


def test_a_run_resumes_over_the_same_data_wherever_they_lie_and_over_no_other(error_of, tmp_path):
    options = ["--output", str(tmp_path / "run"), "--max-size", "20", "--epochs"]
    assert run(*options, "1") == 0
    moved = shutil.copytree(program.TINY, tmp_path / "moved")
    assert run(*options, "2", "--data", str(moved)) == 0
    for path in moved.iterdir():
        path.write_text(" ".join(word[::-1] for word in path.read_text().split(" ")))
    assert "training_data_sha256 must be" in error_of(lambda: run(*options, "3", "--data", str(moved)))
