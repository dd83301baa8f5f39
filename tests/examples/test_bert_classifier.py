"""The BERT classifier: its checkpoints against transformers' eager BertModel, and the program around it."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn

from examples import rt_polarity, training
from examples.bert_classifier import __main__ as program
from examples.bert_classifier import checkpoint
from examples.bert_classifier.model import Bert, BertClassifier, Config
from fastattn.testing import compare

SIZES = {"vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 40, "max_position_embeddings": 20}


def theirs_and_folder(folder: Path, cls: type = transformers.BertModel, **config: object) -> transformers.BertModel:
    """A random BERT of transformers, eager, that is saved in the folder; its biases and norms are random too."""
    torch.manual_seed(0)
    model = cls(transformers.BertConfig(**{**SIZES, **config}, attn_implementation="eager"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model.eval()


def batch(vocab_size: int, lengths: list[int], seed: int = 1) -> dict[str, Tensor]:
    """Random tokens of two texts each, padded on the right."""
    torch.manual_seed(seed)
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, vocab_size, real.shape) * real
    types = (torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None] // 2) & real
    return {"input_ids": ids, "attention_mask": real.long(), "token_type_ids": types.long()}


def assert_same_hidden_states(ours: Bert, theirs: nn.Module, inputs: dict[str, Tensor]) -> None:
    """After the last layer (of the packed batch), and after each layer (seen through hooks, which prevent packing)."""
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        naive, exact = (
            [x[real] for x in model(**inputs, output_hidden_states=True).hidden_states]
            for model in (theirs, copy.deepcopy(theirs).double())
        )
        last = ours(**inputs)
        assert (error := compare("last", last[real], naive[-1], exact[-1])).right, error
        assert (last[~real] == 0).all()
        seen = []
        hooks = [
            layer.register_forward_hook(lambda module, arguments, output: seen.append(output[real]))
            for layer in ours.encoder.layers
        ]
        ours(**inputs)
        for hook in hooks:
            hook.remove()
    assert len(seen) == len(naive) - 1
    for i, states in enumerate(zip(seen, naive[1:], exact[1:], strict=True)):
        assert (error := compare(f"layer {i}", *states)).right, error


@pytest.mark.parametrize("lengths", [[20, 3, 1, 11], [7, 7], [1]], ids=str)
def test_hidden_states_are_those_of_transformers(tmp_path, lengths):
    theirs = theirs_and_folder(tmp_path)
    ours = checkpoint.load(tmp_path, num_labels=2).eval().bert
    assert_same_hidden_states(ours, theirs, batch(60, lengths))


def test_hidden_states_of_minilm():
    folder = checkpoint.minilm()
    theirs = transformers.BertModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    ours = checkpoint.load(folder, num_labels=2).eval().bert
    tokenizer = checkpoint.read_tokenizer(folder, max_length=128)
    texts = [review.text for review in rt_polarity.load(rt_polarity.TINY, seed=0)[0][:6]]
    encodings = tokenizer.encode_batch([*texts, "no", " ".join(texts)])
    assert max(len(e.ids) for e in encodings) > 4 * min(len(e.ids) for e in encodings)
    padded = [nn.utils.rnn.pad_sequence([torch.tensor(x) for x in columns], batch_first=True)
              for columns in ([e.ids for e in encodings], [e.attention_mask for e in encodings])]  # fmt: skip
    assert_same_hidden_states(ours, theirs, {"input_ids": padded[0], "attention_mask": padded[1]})


def test_long_texts_are_cut_but_keep_their_end_token():
    tokenizer = checkpoint.read_tokenizer(checkpoint.minilm(), max_length=8)
    assert tokenizer.encode("good " * 20).tokens == ["[CLS]", *["good"] * 6, "[SEP]"]


def test_padding_on_the_left_stands_where_transformers_has_it(tmp_path):
    theirs = theirs_and_folder(tmp_path)
    inputs = {name: x.flip(1) for name, x in batch(60, [9, 4]).items()}
    assert_same_hidden_states(checkpoint.load(tmp_path, num_labels=2).eval().bert, theirs, inputs)


def test_logits_and_gradients_are_those_of_a_classifier_of_transformers(tmp_path):
    """In training mode without dropout, three labels; the checkpoint says `bert.` before most names."""
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    theirs = theirs_and_folder(tmp_path, transformers.BertForSequenceClassification, num_labels=3, **no_dropout).train()
    assert any(name.startswith("bert.") for name in load_file(tmp_path / "model.safetensors"))
    ours = checkpoint.load(tmp_path, num_labels=3).train()
    inputs = batch(60, [12, 5, 8])
    labels = torch.tensor([2, 0, 1])

    def learned_from(model: nn.Module, names_of) -> tuple[Tensor, Tensor]:
        """The logits, and the gradients by all parameters in the order of ours."""
        output = model(**inputs)
        logits = output if isinstance(output, Tensor) else output.logits
        nn.functional.cross_entropy(logits, labels).backward()
        by_name = {name: p.grad for name, p in model.named_parameters()}
        gradients = [by_name.pop(part).flatten() for name, _ in ours.named_parameters() for part in names_of(name)]
        assert not by_name
        return logits.detach(), torch.cat(gradients)

    def in_transformers(name: str) -> list[str]:
        prefix = "" if name.startswith("classifier") else "bert."
        return [prefix + part for part in checkpoint.their_names(name)]

    logits, gradients = learned_from(ours, lambda name: [name])
    naive_logits, naive = learned_from(theirs, in_transformers)
    exact_logits, exact = learned_from(copy.deepcopy(theirs).double(), in_transformers)
    assert (error := compare("logits", logits, naive_logits, exact_logits)).right, error
    assert (error := compare("gradients", gradients, naive, exact)).right, error


def test_norms_of_old_checkpoints(tmp_path):
    theirs_and_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    before = checkpoint.load(tmp_path, num_labels=2).bert.state_dict()
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(path).items()
    }
    assert any(name.endswith("gamma") for name in renamed)
    save_file(renamed, path)
    after = checkpoint.load(tmp_path, num_labels=2).bert.state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


def test_what_a_checkpoint_lacks_is_initialised(tmp_path):
    theirs_and_folder(tmp_path, add_cross_attention=False)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file({name: x for name, x in weights.items() if not name.startswith("pooler")}, path)
    model = checkpoint.load(tmp_path, num_labels=5)
    assert 0.01 < model.pooler.weight.std() < 0.03
    assert model.classifier.weight.shape == (5, 24)
    assert not model.classifier.bias.any()
    assert torch.equal(model.bert.words.weight, weights["embeddings.word_embeddings.weight"])


def test_base_size_is_the_default():
    with torch.device("meta"):
        model = BertClassifier(Config(), num_labels=4)
    assert model.bert.words.weight.shape == (30522, 768)
    assert model.bert.positions.weight.shape == (512, 768)
    layers = model.bert.encoder.layers
    assert (len(layers), layers[0].self_attn.num_heads, layers[0].linear1.weight.shape) == (12, 12, (3072, 768))
    encoder_and_pooler = sum(p.numel() for p in model.parameters()) - 4 * 769
    assert encoder_and_pooler == 109_482_240  # bert-base-uncased


def test_initialisation():
    torch.manual_seed(0)
    model = BertClassifier(Config(**SIZES), num_labels=2)
    weights = torch.cat(
        [p.flatten() for name, p in model.named_parameters() if name.endswith("weight") and p.dim() > 1]
    )
    torch.testing.assert_close(weights.std().item(), 0.02, rtol=0.03, atol=0)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    assert (model.bert.norm.weight == 1).all()
    assert not model.bert.words.weight[0].any()
    layers = model.bert.encoder.layers
    assert not torch.equal(layers[0].linear1.weight, layers[1].linear1.weight)


def test_dropout_is_where_bert_has_it():
    torch.manual_seed(0)
    inputs = batch(60, [12, 5])
    attention_only = Bert(Config(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5)).train()
    assert not torch.equal(attention_only(**inputs), attention_only(**inputs))
    hidden_only = Bert(Config(**SIZES, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.0)).train()
    x = torch.randn(2, 5, 24)
    layer = hidden_only.encoder.layers[0]
    assert torch.equal(layer._feed_forward(x), layer._feed_forward(x))
    assert not torch.equal(layer(x), layer(x))
    none = Bert(Config(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).train()
    assert torch.equal(none(**inputs), none(**inputs))


# Checkpoints that are none.


@pytest.fixture
def folder(tmp_path) -> Path:
    theirs_and_folder(tmp_path)
    return tmp_path


def lose_a_half_of_the_norm(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["embeddings.LayerNorm.bias"]
    save_file(weights, folder / "model.safetensors")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


WRONG_SIZE = r"encoder.layer.0.intermediate.dense.weight in .* must be \[41, 24\], got \[40, 24\]"
BAD = {  # other values in config.json, or what else is done to the folder; what is said of it
    "another model": ({"model_type": "roberta"}, "model_type .* must be 'bert', got 'roberta'"),
    "another activation": ({"hidden_act": "relu"}, "hidden_act .* must be 'gelu', got 'relu'"),
    "no JSON": (lambda f: cut(f / "config.json"), "config.json must be the configuration of a BERT, got"),
    "no object": (lambda f: (f / "config.json").write_text("[]"), "config.json must be the configuration of a BERT"),
    "no width": ({"hidden_size": "x"}, "config.json must have sizes that a BERT can have, got"),
    "no divisor": ({"num_attention_heads": 7}, "config.json must have sizes that a BERT can"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors must be a file of safetensors"),
    "damaged": (lambda f: cut(f / "model.safetensors"), "model.safetensors must be a file of safetensors, got"),
    "other sizes": ({"intermediate_size": 41}, WRONG_SIZE),
    "fewer layers": ({"num_hidden_layers": 4}, "must have encoder.layer.3.*, got no such tensor"),
    "more layers": ({"num_hidden_layers": 2}, "must have nothing but .* got encoder.layer.2"),
    "a half of the norm": (lose_a_half_of_the_norm, "must have embeddings.LayerNorm.bias, got no such tensor"),
}


@pytest.mark.parametrize(("spoil", "why"), BAD.values(), ids=BAD)
def test_a_checkpoint_that_is_none_is_one_sentence(folder, spoil, why):
    if isinstance(spoil, dict):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | spoil))
    else:
        spoil(folder)
    with pytest.raises(training.InputError, match=why):
        checkpoint.load(folder, num_labels=2)


def test_a_damaged_tokenizer(folder):
    for content in (None, "{"):
        if content is not None:
            (folder / "tokenizer.json").write_text(content)
        with pytest.raises(training.InputError, match=r"tokenizer.json must be a tokenizer of the tokenizers library"):
            checkpoint.read_tokenizer(folder, 8)


# The program.


def add_tokenizer(folder: Path) -> int:
    """Gives the folder a tokenizer of the words of the shipped sentences, and returns how many tokens it has."""
    train, test = rt_polarity.load(rt_polarity.TINY, seed=0)
    words = sorted({word for review in train + test for word in review.text.split()})
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return len(vocabulary)


@pytest.fixture
def tiny(tmp_path) -> Path:
    """A folder with a random BERT for the shipped sentences."""
    theirs_and_folder(tmp_path, vocab_size=add_tokenizer(tmp_path))
    return tmp_path


def test_tiny_data_is_learnt_by_heart(capsys, tiny):
    options = ("--checkpoint", str(tiny), "--output", str(tiny / "run"), "--max-length", "20")
    assert program.main([*options, "--epochs", "30", "--batch-size", "12", "--lr", "0.003"]) == 0
    metrics = json.loads((tiny / "run" / "metrics.json").read_text())
    losses = [entry["train_loss"] for entry in metrics["history"]]
    assert losses[0] > 0.6
    assert losses[-1] < 0.05
    said = re.search(r"accuracy = (\d\.\d+) on 4 test sentences after 30 epochs", capsys.readouterr().out)[1]
    assert float(said) == metrics["history"][-1]["accuracy"]


def test_minilm_is_the_default_checkpoint(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for ending in ("pos", "neg"):
        lines = (rt_polarity.TINY / f"rt-polarity.{ending}").read_text("iso-8859-1").splitlines(True)
        (data / f"rt-polarity.{ending}").write_text("".join(lines[:8]), "iso-8859-1")
    options = ("--data", str(data), "--output", str(tmp_path / "run"), "--epochs", "4", "--batch-size", "7")
    assert program.main([*options, "--lr", "3e-4"]) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["settings"]["checkpoint"] == str(checkpoint.minilm())
    losses = [entry["train_loss"] for entry in metrics["history"]]
    assert losses[-1] < 0.5 * losses[0]


def test_other_reviews_do_not_resume(error_of, tiny):
    data = shutil.copytree(rt_polarity.TINY, tiny / "data")
    options = ["--data", str(data), "--checkpoint", str(tiny), "--output", str(tiny / "run"), "--max-length", "20"]
    assert program.main([*options, "--epochs", "1"]) == 0
    for path in data.iterdir():
        path.write_bytes(path.read_bytes().replace(b"comedy", b"tragedy"))
    assert "training_data_sha256 must be" in error_of(lambda: program.main([*options, "--epochs", "1"]))


def test_bad_options_are_one_sentence(error_of, tiny):
    for options, why in (
        (("--checkpoint", str(tiny), "--max-length", "21"), "--max-length must be at most 20 for this checkpoint"),
        (("--data", str(tiny)), "rt-polarity.neg must be a file with a sentence a line, got No such file"),
        (("--checkpoint", str(tiny / "x")), "config.json must be the configuration of a BERT"),
    ):
        assert why in error_of(lambda of=options: program.main([*of, "--output", str(tiny / "run")]))
