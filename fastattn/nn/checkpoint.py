"""Saving and loading models as safetensors files, from which the models of `fastattn.nn` can also be built."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import TypeVar, overload

import torch
from torch import nn

from .models import LanguageModel, Model, Seq2SeqModel, SequenceClassifier, TransformerConfig

MODELS: dict[str, type[Model]] = {cls.__name__: cls for cls in (LanguageModel, Seq2SeqModel, SequenceClassifier)}
AnyModule = TypeVar("AnyModule", bound=nn.Module)
_FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KEY = "fastattn"  # the key of our entry in the metadata of a file


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes the weights of a module to a safetensors file, which appears whole or not at all.

    A shared weight is written once. With a model of `fastattn.nn`, the file also has what `load` needs to build it.

    Args:
        model: any module.
        path: the file to write.

    Raises:
        TypeError: `model` is no module, or `path` no path.
        OSError: `path` cannot be written.
        ImportError: the package safetensors is not installed.

    Example:
        >>> import tempfile, fastattn
        >>> config = fastattn.nn.TransformerConfig(vocab_size=100, d_model=16, nhead=2, num_layers=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fastattn.nn.save(fastattn.nn.LanguageModel(config), f"{folder}/model.safetensors")
        ...     type(fastattn.nn.load(f"{folder}/model.safetensors")).__name__
        'LanguageModel'
    """
    path = _checked_path(path)
    _check_module(model)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path must be in an existing folder, got {path}")
    if path.is_dir():
        raise IsADirectoryError(f"path must be a file, got the folder {path}")
    metadata = {"format": "pt"}
    if type(model) in MODELS.values():
        arguments = model.arguments()
        description = arguments | {"class": type(model).__name__, "config": asdict(arguments["config"])}
        metadata[_KEY] = json.dumps(description, default=lambda number: number.item())  # of numpy
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        _safetensors().torch.save_model(model, str(part), metadata)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@overload
def load(path: str | os.PathLike[str], model: None = ...) -> LanguageModel | Seq2SeqModel | SequenceClassifier: ...
@overload
def load(path: str | os.PathLike[str], model: AnyModule) -> AnyModule: ...
def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Loads the weights of a safetensors file into a model, or into a new one that is built as the file says.

    Args:
        path: the file to read.
        model: the model to fill; None builds the model of `fastattn.nn` that was saved.

    Returns:
        `model`, in its own dtypes; or the new model, on the CPU, in training mode and in the dtype of its weights in
        the file, if that is the same for all.

    Raises:
        TypeError: `model` is no module, or `path` no path.
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or its weights are not those of the model, which is then unchanged; or `model`
            is None and the file does not say what to build.
        ImportError: the package safetensors is not installed.
    """
    path = _checked_path(path)
    if model is not None:
        _check_module(model)
    shapes, dtypes, metadata = _read_header(path)
    if model is None:
        if _KEY not in metadata:
            raise ValueError(f"model must be given for {path}, which does not say what it holds the weights of")
        model = _built(path, metadata[_KEY])
        if len(dtypes) == 1 and (dtype := _FLOATING.get(*dtypes)):
            model.to(dtype)
    _check_fit(path, shapes, model)
    _safetensors().torch.load_model(model, str(path))
    return model


def _checked_path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or an os.PathLike, got {type(path).__name__}")
    return Path(path)


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _read_header(path: Path) -> tuple[dict[str, list[int]], set[str], dict[str, str]]:
    """Shapes of the tensors in a file, by name, the dtypes that they have there, and its metadata."""
    safetensors = _safetensors()
    if not path.is_file():
        raise FileNotFoundError(f"path must be a file, got {path}")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: x.get_shape() for name, x in tensors.items()}
            return shapes, {x.get_dtype() for x in tensors.values()}, file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged, or no safetensors file ({error})") from error


def _built(path: Path, description: str) -> Model:
    """A new model, built from the description that `save` wrote."""
    try:
        arguments = json.loads(description)
        cls = MODELS[arguments.pop("class")]
        return cls(**arguments | {"config": TransformerConfig(**arguments["config"])})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} describes its model as {description}, which this version cannot build") from error


def _check_fit(path: Path, shapes: dict[str, list[int]], model: nn.Module) -> None:
    """Raises ValueError about the first weight in which a file does not fit the model."""
    expected = model.state_dict()
    for name, tensor in expected.items():
        if tensor.is_meta:
            raise ValueError(
                f"model must have memory for {name}, as to_empty gives it, got a weight on the meta device"
            )
    for name in shapes.keys() - expected.keys():
        raise ValueError(f"model must have {name}, which {path} holds, got a {type(model).__name__} without it")
    tied: dict[int, str] = {}
    for name in sorted(shapes):
        tensor = expected[name]
        if tensor.numel() and (other := tied.setdefault(tensor.data_ptr(), name)) != name:
            raise ValueError(f"{path} must hold one of {other} and {name}, which are one weight of the model, got both")
    for name, tensor in expected.items():
        if name in shapes:
            if list(tensor.shape) != shapes[name]:
                raise ValueError(f"{name} must be {list(tensor.shape)}, got {shapes[name]} in {path}")
        elif not any(expected[other].data_ptr() == tensor.data_ptr() for other in shapes):  # tied weights are one
            raise ValueError(f"{path} must hold {name} {list(tensor.shape)}, which it lacks")


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("saving and loading need the package safetensors: pip install safetensors") from error
    return safetensors
