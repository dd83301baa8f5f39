"""The translation example on the few sentences that it ships: text, batches, masks, and the program from end to end."""

import io
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import fastattn
from examples.training import InputError
from examples.translation import parallel
from examples.translation.__main__ import main
from examples.translation.batches import bucketed, collate, encode
from examples.translation.speed import OnTorch, check
from examples.translation.text import (
    EOS,
    PAD,
    SOS,
    UNK,
    BytePairs,
    Vocabularies,
    Words,
    lines_of,
    read_lines,
    read_parallel,
)
from examples.translation.train import batch_loss, make_model, mean_loss, set_mean
from examples.translation.translator import Translator, bleu

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples/translation/data"
REAL_DATA = Path(os.environ.get("FASTATTN_DATA", ROOT.parent / "shared/data")) / "multi30k"
SMALL = ["--d-model", "64", "--nhead", "2", "--num-layers", "2", "--dim-feedforward", "128", "--max-size", "300"]


@pytest.fixture(scope="module")
def pairs():
    return read_parallel(DATA / "train.de.txt", DATA / "train.en.txt")


@pytest.fixture(scope="module")
def vocabularies(pairs):
    return Vocabularies.of(pairs, kind="bpe", min_frequency=2, max_size=250, lowercase=True)


@pytest.fixture(scope="module")
def data(pairs, vocabularies):
    return encode(pairs, vocabularies, 100)


@pytest.fixture
def model(vocabularies):
    torch.manual_seed(0)
    sizes = Namespace(d_model=32, nhead=4, num_layers=2, dim_feedforward=64, dropout=0.1, max_length=100)
    return make_model(sizes, vocabularies).eval()


# Text


def test_words_are_the_most_frequent_ones_in_a_fixed_order():
    lines = ["Der Hund, der Hund!", "die Katze; der Hund", "ein Hund"]
    words = Words.of(lines, min_frequency=2, max_size=100, lowercase=True)
    assert words.tokens == ["<pad>", "<unk>", "<sos>", "<eos>", "hund", "der"]
    assert words.encode("DER Hund bellt") == [5, 4, UNK]
    assert words.decode([SOS, 5, 4, UNK, EOS, PAD]) == "der hund <unk>"
    assert Words.of(lines, min_frequency=1, max_size=6, lowercase=True).tokens == words.tokens
    assert len(Words.of(lines, min_frequency=1, max_size=100, lowercase=True)) == 4 + 8
    assert Words.of(lines, min_frequency=2, max_size=100, lowercase=False).encode("Hund hund") == [4, UNK]


def test_words_keep_hyphens_and_apostrophes_and_part_with_punctuation():
    words = Words.of(["a t-shirt, isn't (it)?"], min_frequency=1, max_size=100, lowercase=True)
    assert sorted(words.tokens[4:]) == sorted(["a", "t-shirt", ",", "isn't", "(", "it", ")", "?"])
    assert words.decode(words.encode("a t-shirt, isn't (it)?")) == "a t-shirt, isn't (it)?"


def test_byte_pairs_give_back_what_they_encode(pairs, vocabularies):
    joint = vocabularies.source
    assert joint is vocabularies.target
    assert len(joint) == 250
    for pair in pairs:
        for line in pair:
            assert joint.decode(joint.encode(line)) == line.lower()
    assert joint.encode("  EIN \t Hund ") == joint.encode("ein hund")
    assert joint.lowercase


def test_byte_pairs_obey_their_limits(pairs):
    lines = [line for pair in pairs for line in pair]
    characters = len(BytePairs.of(lines, min_frequency=1000, max_size=300, lowercase=True))
    assert characters < len(BytePairs.of(lines, min_frequency=10, max_size=300, lowercase=True)) < 300
    for max_size in (4, 10):  # fewer than there are characters
        assert len(BytePairs.of(lines, min_frequency=1, max_size=max_size, lowercase=True)) == max_size
    cased = BytePairs.of(lines, min_frequency=2, max_size=300, lowercase=False)
    assert cased.decode(cased.encode("Ein Hund")) == "Ein Hund"
    assert not cased.lowercase


@pytest.mark.parametrize("kind", ["bpe", "words"])
def test_special_tokens_in_a_text_are_plain_characters(pairs, kind):
    vocabularies = Vocabularies.of(pairs, kind=kind, min_frequency=1, max_size=300, lowercase=True)
    assert not {PAD, SOS, EOS} & set(vocabularies.source.encode("ein <eos> <pad> <sos> hund"))


@pytest.mark.parametrize("kind", ["bpe", "words"])
def test_vocabularies_survive_being_saved(pairs, kind):
    before = Vocabularies.of(pairs, kind=kind, min_frequency=1, max_size=300, lowercase=True)
    after = Vocabularies.from_json(json.loads(json.dumps(before.to_json())))
    assert after.joint == before.joint == (kind == "bpe")
    for source, target in pairs:
        assert after.source.encode(source) == before.source.encode(source)
        ids = before.target.encode(target)
        assert after.target.encode(target) == ids
        assert after.target.decode(ids) == before.target.decode(ids)
    assert "<eos>" not in after.source.decode(after.source.encode("ein hund <eos>")) or kind == "bpe"


def test_lines_end_at_line_feeds_only(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("\ufeffeins\r\nzwei\u2028drei\n\nvier".encode())
    assert read_lines(path) == ["eins", "zwei\u2028drei", "", "vier"]
    assert lines_of(b"", "nothing") == []


def test_files_that_do_not_fit_are_refused(tmp_path):
    for name, content in (("two", b"a\nb\n"), ("three", b"a\nb\nc\n"), ("empty", b""), ("latin", b"gr\xfcn\n")):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=r"three must have 2 lines like .*two, .* got 3"):
        read_parallel(tmp_path / "two", tmp_path / "three")
    with pytest.raises(InputError, match="must have at least one line"):
        read_parallel(tmp_path / "two", tmp_path / "empty")
    with pytest.raises(InputError, match="must be text in UTF-8"):
        read_parallel(tmp_path / "two", tmp_path / "latin")
    with pytest.raises(InputError, match="must be a file that can be read"):
        read_parallel(tmp_path / "two", tmp_path / "missing")


# Batches


def test_a_batch_has_its_special_tokens_where_they_belong():
    batch = collate([([5, 6, 7], [8]), ([9], [10, 11])])
    assert batch.source.tolist() == [[5, 6, 7, EOS], [9, EOS, PAD, PAD]]
    assert batch.target_in.tolist() == [[SOS, 8, PAD], [SOS, 10, 11]]
    assert batch.target_out.tolist() == [[8, EOS, PAD], [10, 11, EOS]]


def test_pairs_that_are_empty_or_too_long_are_left_out(vocabularies):
    long = "hund " * 30
    kept = encode([("ein hund", "a dog"), ("", "a dog"), ("ein hund", " "), (long, "a dog")], vocabularies, 20)
    assert kept == [(vocabularies.source.encode("ein hund"), vocabularies.target.encode("a dog"))]


def random_pairs(n=500):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (n, 2), generator=generator).tolist()
    return [([7] * source, [8] * target) for source, target in lengths]


def places_of(batches, pairs):
    """Tokens and padding of the target side."""
    return sum(len(batch) * max(len(pairs[i][1]) + 1 for i in batch) for batch in batches)


def test_buckets_hold_every_pair_once_within_the_budget():
    pairs = random_pairs()
    batches = bucketed(pairs, 200, torch.Generator().manual_seed(1))
    assert sorted(i for batch in batches for i in batch) == list(range(len(pairs)))
    for batch in batches:
        collated = collate([pairs[i] for i in batch])
        assert max(collated.source.numel(), collated.target_out.numel()) <= 200
    real = sum(len(target) + 1 for _, target in pairs)
    assert places_of(batches, pairs) < 1.05 * real
    in_file_order = [list(range(start, start + 5)) for start in range(0, len(pairs), 5)]
    assert places_of(in_file_order, pairs) > 1.4 * real


def test_buckets_are_drawn_from_the_generator():
    pairs = random_pairs()
    first, again, other = (bucketed(pairs, 200, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert sorted(map(sorted, first)) != sorted(map(sorted, other))  # not only another order of the batches
    lengths = [max(len(pairs[i][1]) for i in batch) for batch in bucketed(pairs, 200)]
    assert lengths == sorted(lengths)


def test_a_pair_beyond_the_budget_is_a_batch_of_its_own():
    pairs = [([7] * 3, [8] * 3), ([7] * 50, [8] * 3), ([7] * 3, [8] * 50)]
    assert sorted(bucketed(pairs, 10)) == [[0], [1], [2]]


# The model and its masks


def test_the_loss_is_the_mean_over_real_target_tokens(model, data):
    batch = collate(data[:5])
    loss = batch_loss(model, batch)
    probabilities = model(batch.source, batch.target_in).log_softmax(-1)
    each = -probabilities.gather(-1, batch.target_out[..., None])[..., 0]
    real = batch.target_out != PAD
    torch.testing.assert_close(loss.mean, each[real].mean())
    assert loss.count == real.sum() == sum(len(target) + 1 for _, target in data[:5])
    assert loss.tokens == loss.count + sum(len(source) + 1 for source, _ in data[:5])
    assert mean_loss(model, data[:5], 20, "cpu") == pytest.approx(loss.mean.item(), rel=1e-5)


def test_label_smoothing_is_part_of_the_training_loss(model, data):
    batch = collate(data[:5])
    probabilities = model(batch.source, batch.target_in).log_softmax(-1)[batch.target_out != PAD]
    plain = batch_loss(model, batch).mean
    torch.testing.assert_close(batch_loss(model, batch, 0.1).mean, 0.9 * plain - 0.1 * probabilities.mean())


def test_embeddings_are_shared_where_the_vocabulary_is(pairs):
    sizes = Namespace(d_model=32, nhead=4, num_layers=1, dim_feedforward=64, dropout=0.1, max_length=100)
    for kind in ("bpe", "words"):
        vocabularies = Vocabularies.of(pairs, kind=kind, min_frequency=1, max_size=300, lowercase=True)
        model = make_model(sizes, vocabularies)
        assert model.head.weight is model.tgt_embedding.weight
        assert (model.embedding.weight is model.tgt_embedding.weight) == (kind == "bpe")
        assert model.embedding.num_embeddings == len(vocabularies.source)
        assert model.head.out_features == len(vocabularies.target)


def test_the_mean_of_weights():
    parameters = [[torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 6.0])]]
    set_mean(parameters)
    assert parameters[0][0].tolist() == [2.0, 4.0]


def test_the_model_on_torch_layers_is_the_same_and_another_one_is_found_out(model, data):
    batches = [collate(data[:6]), collate(data[6:20])]
    twin = OnTorch(model).eval()
    check({"torch.nn": twin, "fastattn.nn": model}, batches)
    with torch.no_grad():
        model.decoder.layers[1].linear1.bias += 1e-3
    with pytest.raises(InputError, match=r"losses on fastattn\.nn must be within"):
        check({"torch.nn": twin, "fastattn.nn": model}, batches)


# The program


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that knows the shipped sentences by heart."""
    folder = tmp_path_factory.mktemp("translation")
    assert main([*train_command(folder, epochs=40)]) == 0
    return folder


def train_command(folder, epochs, *more):
    return ["train", "--data", str(DATA), "--output", str(folder), "--epochs", str(epochs), *SMALL, "--dropout", "0",
            "--tokens", "150", "--learning-rate", "3e-3", "--warmup", "40", "--label-smoothing", "0", "--average", "2",
            "--valid-sentences", "2", *more]  # fmt: skip


def test_the_program_learns_the_shipped_sentences_by_heart(trained, capsys):
    assert (
        main(["evaluate", "--model", str(trained), "--data", str(DATA), "--test", "train.de.txt", "train.en.txt"]) == 0
    )
    said = capsys.readouterr().out
    kept = json.loads((trained / "evaluation.json").read_text())
    assert kept["bleu"] > 99
    assert said.startswith(f"BLEU = {kept['bleu']:.2f}")
    assert "case:lc" in kept["signature"]
    assert "tok:13a" in kept["signature"]
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["epochs"] == 40
    assert metrics["history"][-1]["train_loss"] < 0.1
    assert set(metrics["history"][0]) >= {"valid_loss", "valid_bleu_greedy"}
    assert {path.name for path in (trained / "weights").iterdir()} == {"epoch-39.safetensors", "epoch-40.safetensors"}


def test_a_file_is_translated_line_by_line(trained, tmp_path, pairs):
    """Whatever the order of lengths; an empty line stays one."""
    wanted = [*pairs[:6], ("", ""), *pairs[30:]]
    (tmp_path / "in").write_text("".join(f"{source}\n" for source, _ in wanted))
    assert main(["translate", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--model", str(trained)]) == 0
    assert (tmp_path / "out").read_text() == "".join(f"{target.lower()}\n" for _, target in wanted)


def test_a_pipe_is_translated(trained, pairs):
    ended = subprocess.run(
        [sys.executable, "-m", "examples.translation", "translate", "--model", str(trained), "--num-beams", "1"],
        input="".join(f"{source}\n" for source, _ in pairs[:3]), capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "".join(f"{target.lower()}\n" for _, target in pairs[:3])


def test_what_is_typed_is_translated_until_the_end_of_the_input(trained, pairs, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{pairs[0][0]}\n{pairs[1][0]}\n"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["translate", "--model", str(trained)]) == 0
    assert capsys.readouterr().out.replace("> ", "").split("\n")[:2] == [target.lower() for _, target in pairs[:2]]


def test_a_bad_line_is_an_error_and_what_is_typed_next_is_translated(trained, pairs, monkeypatch, capsys):
    long = "Hund " * 1024
    typed = iter([UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "\udcff", long, pairs[0][0], EOFError()])

    def type_line(prompt):
        if isinstance(line := next(typed), Exception):
            raise line
        return line

    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", type_line)
    assert main(["translate", "--model", str(trained)]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == pairs[0][1].lower()
    *undecoded, too_long = said.err.splitlines()
    assert len(undecoded) == 2
    assert all(line.startswith("error: a line must be in the encoding of the terminal, got") for line in undecoded)
    assert too_long.startswith("error: sentence 1 must have fewer than 1024 tokens")


def test_batches_do_not_change_translations(trained, pairs):
    translator = Translator.load(trained)
    sentences = [source for source, _ in pairs[:10]]
    together = translator.translate(sentences, num_beams=3)
    assert together == [translator.translate([sentence], num_beams=3)[0] for sentence in sentences]


def test_a_run_that_was_stopped_goes_on(trained, tmp_path):
    """With the same data and options only."""
    assert main(train_command(tmp_path, 2, "--checkpoint-every", "1")) == 0
    assert main(train_command(tmp_path, 4)) == 0
    resumed = json.loads((tmp_path / "metrics.json").read_text())["history"]
    whole = json.loads((trained / "metrics.json").read_text())["history"]
    assert resumed == whole[:4]


def test_a_validation_sentence_longer_than_the_positions_is_left_out(tmp_path):
    files = []
    for name in ("val.de.txt", "val.en.txt"):
        files.append(str(tmp_path / name))
        (tmp_path / name).write_text("a " * 1024 + "\n" + (DATA / name.replace("val", "train")).read_text())
    assert main(train_command(tmp_path / "run", 1, "--valid", *files)) == 0
    assert json.loads((tmp_path / "run/metrics.json").read_text())["history"][0]["valid_bleu_greedy"] >= 0


def test_another_run_does_not_resume(trained, tmp_path, error_of):
    assert "warmup must be 40" in error_of(lambda: main(train_command(trained, 41, "--warmup", "41")))
    for path in DATA.iterdir():
        (tmp_path / path.name).write_text(path.read_text().replace("meadow", "field"))
    said = error_of(lambda: main(train_command(trained, 41, "--data", str(tmp_path))))
    assert "training_data_sha256 must be" in said


@pytest.mark.parametrize("command", ["translate", "evaluate", "train", "speed"])
def test_files_that_are_not_there_are_one_sentence(command, tmp_path, error_of):
    options = [] if command == "translate" else ["--data", str(tmp_path / "nowhere")]
    options += ["--model", str(tmp_path)] if command in ("translate", "evaluate") else []
    error_of(lambda: main([command, *options]))


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (["--nhead", "3"], "--nhead must divide --d-model, got 3 and 64"),
        (["--max-length", "1"], "train.de.txt must have a sentence of 1 to 1 tokens, got none"),
        (["--output", str(DATA / "train.de.txt")], "must be a folder"),
    ],
)
def test_options_that_cannot_be_are_one_sentence(options, wrong, tmp_path, error_of):
    assert wrong in error_of(lambda: main(train_command(tmp_path, 1, *options)))


def test_speed_of_no_sentences_is_refused(error_of):
    said = error_of(lambda: main(["speed", "--data", str(DATA), "--max-length", "1"]))
    assert "train.de.txt must have a sentence of 1 to 1 tokens, got none" in said


def test_parallel_training_of_no_sentences_is_refused_and_does_not_hang():
    args = parallel.make_parser().parse_args(["--data", str(DATA), "--max-length", "1"])
    with pytest.raises(InputError, match="must have a sentence of 1 to 1 tokens, got none"):
        next(parallel.losses(args, None))


def test_parallel_training_without_torchrun_is_refused(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        parallel.main(["--data", str(DATA)])
    assert "must be started by torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("train", "--dropout", "1.5"),
        ("train", "--device", "nowhere"),
        ("train", "--epochs", "0"),
        ("train", "--learning-rate", "nan"),
        ("train", "--seed", "9" * 20),
        *(("translate", "--length-penalty", value) for value in ("nan", "inf", "33", "x")),
    ],
)
def test_values_out_of_range_are_refused_at_once(command, option, value, capsys):
    with pytest.raises(SystemExit):
        main([command, option, value])
    assert f"argument {option}: " in capsys.readouterr().err


def test_a_sentence_longer_than_the_positions_is_refused(trained):
    translator = Translator.load(trained)
    long = "Hund " * translator.model.config.max_length
    with pytest.raises(InputError, match=r"sentence 2 must have fewer than 1024 tokens, got \d+"):
        translator.translate(["Ein Hund.", long])


def test_a_damaged_model_is_one_sentence(trained, tmp_path, error_of):
    (tmp_path / "vocabulary.json").write_bytes((trained / "vocabulary.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((trained / "model.safetensors").read_bytes()[:1000])
    said = error_of(lambda: main(["evaluate", "--model", str(tmp_path), "--data", str(DATA)]))
    assert said.startswith(f"{tmp_path} must hold a trained model, got ")
    (tmp_path / "model.safetensors").write_bytes((trained / "model.safetensors").read_bytes())
    words = {"kind": "words", "tokens": ["a"], "lowercase": True}
    for content in ([], {"source": 3}, {"source": words}, {"source": {"kind": "bpe", "tokenizer": "{}"}}):
        (tmp_path / "vocabulary.json").write_text(json.dumps(content))
        with pytest.raises(InputError, match=f"{tmp_path} must hold "):
            Translator.load(tmp_path)
    (tmp_path / "vocabulary.json").write_bytes((trained / "vocabulary.json").read_bytes())
    other = fastattn.nn.LanguageModel(fastattn.nn.TransformerConfig(9, d_model=8, nhead=2))
    fastattn.nn.save(other, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.safetensors must be of a Seq2SeqModel, got a LanguageModel"):
        Translator.load(tmp_path)


def test_bleu_is_that_of_sacrebleu_in_lower_case_or_not():
    translations, references = ["A dog runs across the meadow ."], ["a dog runs across the meadow."]
    assert bleu(translations, references, lowercase=True)[0].score == pytest.approx(100)
    assert bleu(translations, references, lowercase=False)[0].score < 95


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="Multi30k is not here: FASTATTN_DATA says where")
def test_multi30k_is_read_and_given_back():
    pairs = read_parallel(REAL_DATA / "val.de.txt", REAL_DATA / "val.en.txt")
    assert len(pairs) == 1014
    joint = Vocabularies.of(pairs, kind="bpe", min_frequency=2, max_size=2000, lowercase=True).source
    for source, target in pairs:
        for line in (source, target):
            assert joint.decode(joint.encode(line)) == " ".join(line.lower().split())
