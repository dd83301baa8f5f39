"""Models in safetensors files: what comes back is what was saved, and a file that does not fit changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fastattn
from fastattn.nn import LanguageModel, Seq2SeqModel, SequenceClassifier, TransformerConfig, load, save

CONFIG = TransformerConfig(vocab_size=11, d_model=16, nhead=4, num_layers=2, dim_feedforward=32, positions="learned")


def models() -> dict[str, nn.Module]:
    return {
        "classifier": SequenceClassifier(CONFIG, num_classes=5),
        "tied": LanguageModel(CONFIG),
        "free": LanguageModel(replace(CONFIG, tie_embeddings=False, num_kv_heads=2, activation="swiglu")),
        "two vocabularies": Seq2SeqModel(replace(CONFIG, tgt_vocab_size=7, positions="rotary", norm="rms")),
        "of torch": fastattn.Transformer(16, 4, 1, 1, 32),
    }


def inputs(model: nn.Module) -> tuple:
    if isinstance(model, nn.Transformer):
        return torch.ones(3, 2, 16), torch.ones(4, 2, 16)
    ids = torch.tensor([[3, 4, 5], [6, 5, 3]])
    return (ids, ids) if isinstance(model, Seq2SeqModel) else (ids,)


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("name", models())
def test_what_comes_back_is_what_was_saved(name, tmp_path):
    torch.manual_seed(0)
    model, path = models()[name].eval(), tmp_path / "model.safetensors"
    save(model, path)
    torch.manual_seed(1)
    if name == "of torch":
        with pytest.raises(ValueError, match=r"model must be given for .*model\.safetensors, which does not say what"):
            load(path)
        loaded = load(path, models()[name])
    else:
        loaded = load(path)
        assert type(loaded) is type(model)
        assert loaded.arguments() == model.arguments()
    assert same(loaded, model)
    assert torch.equal(loaded.eval()(*inputs(model)), model(*inputs(model)))
    tied = {id(p) for p in loaded.parameters()}
    assert len(tied) == len({id(p) for p in model.parameters()})
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_new_model_has_the_dtype_of_the_file(dtype, tmp_path):
    model = LanguageModel(CONFIG).to(dtype)
    save(model, tmp_path / "model.safetensors")
    assert same(load(tmp_path / "model.safetensors"), model)
    model = LanguageModel(CONFIG)  # in dtypes of its own, which filling it leaves
    assert {x.dtype for x in load(tmp_path / "model.safetensors", model).state_dict().values()} == {torch.float32}
    model.decoder.to(dtype)
    save(model, tmp_path / "mixed.safetensors")
    assert {x.dtype for x in load(tmp_path / "mixed.safetensors").state_dict().values()} == {torch.float32}


@pytest.fixture
def saved(tmp_path) -> Path:
    torch.manual_seed(0)
    save(LanguageModel(CONFIG), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def assert_refused(path: Path, sentence: str, model: nn.Module | None = None) -> None:
    """The file is refused, and the model left as it was."""
    model = LanguageModel(CONFIG) if model is None else model
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=sentence):
        load(path, model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("keep", [0, 4, 100, -1], ids=["empty", "no header", "half a header", "a byte too few"])
def test_a_damaged_file_is_refused(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    assert_refused(saved, "model.safetensors is damaged, or no safetensors file")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load(saved)


def test_a_file_of_another_shape_is_refused(saved):
    assert_refused(
        saved,
        r"embedding.weight must be \[12, 16\], got \[11, 16\] in .*model.safetensors",
        LanguageModel(replace(CONFIG, vocab_size=12)),
    )


def test_a_file_of_another_model_is_refused(saved):
    assert_refused(saved, "must hold decoder.layers.2.*which it lacks", LanguageModel(replace(CONFIG, num_layers=3)))
    assert_refused(saved, r"model must have .*, got a Linear without it", nn.Linear(2, 2))
    tensors = load_file(saved)
    dropped = "decoder.layers.1.linear2.bias"
    save_file({name: x for name, x in tensors.items() if name != dropped}, saved)
    assert_refused(saved, rf"must hold {dropped} \[16\], which it lacks")


@pytest.mark.parametrize(
    "description",
    ["no JSON", "null", '{"class": "Oracle", "config": {}}', '{"class": "LanguageModel", "config": {"speed": 9}}'],
)
def test_a_file_of_another_version_is_refused(saved, description):
    save_file(load_file(saved), saved, {"fastattn": description})
    with pytest.raises(
        ValueError, match=r"model\.safetensors describes its model as .*, which this version cannot build"
    ):
        load(saved)


def test_a_failed_save_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        save(LanguageModel(CONFIG), saved)
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == ["model.safetensors"]


def test_both_names_of_a_tied_weight_are_refused(tmp_path):
    config = TransformerConfig(vocab_size=11, d_model=16, nhead=2, num_layers=1)
    save(LanguageModel(replace(config, tie_embeddings=False)), tmp_path / "untied.safetensors")
    sentence = "must hold one of embedding.weight and head.weight, which are one weight of the model, got both"
    assert_refused(tmp_path / "untied.safetensors", sentence, LanguageModel(config))


@pytest.mark.parametrize("cls", [LanguageModel, Seq2SeqModel])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_on_the_meta_device_is_refused(tmp_path, cls, tied):
    model = cls(replace(CONFIG, tie_embeddings=tied))
    save(model, tmp_path / "model.safetensors")
    with torch.device("meta"):
        other = cls(model.config)
    with pytest.raises(
        ValueError, match=r"model must have memory for .*, as to_empty gives it, got a weight on the meta"
    ):
        load(tmp_path / "model.safetensors", other)
    assert same(load(tmp_path / "model.safetensors", other.to_empty(device="cpu")), model)
    assert len([*other.parameters()]) == len([*model.parameters()])


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("cls", [LanguageModel, Seq2SeqModel])
def test_tied_weights_that_are_assigned_are_one(tmp_path, cls, wrapped):
    model, other = (nn.Sequential(x) if wrapped else x for x in (cls(CONFIG), cls(CONFIG)))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt"), assign=True)
    assert same(other, model)
    assert len([*other.parameters()]) == len([*model.parameters()])
    inner = other[0] if wrapped else other
    inner.head.weight = nn.Parameter(inner.head.weight.detach().clone())  # somebody unties it
    assert len([*other.double().parameters()]) == len([*model.parameters()]) + 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
def test_weights_of_another_dtype_may_be_assigned(positions, dtype, device):
    config = replace(CONFIG, positions=positions)
    model = LanguageModel(config).to(dtype).eval()
    with torch.device(device):
        other = LanguageModel(config).eval()
    other.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(other(*inputs(model)), model(*inputs(model)))


def test_sizes_may_be_numbers_of_numpy(tmp_path):
    config = replace(CONFIG, vocab_size=np.int64(11), num_kv_heads=np.int32(2), dropout=np.float32(0.5))
    save(SequenceClassifier(config, np.int64(3)), tmp_path / "model.safetensors")
    loaded = load(tmp_path / "model.safetensors")
    assert (loaded.config, loaded.num_classes) == (config, 3)
