"""Translation by a Transformer that learns from two parallel text files, by default German to English."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from fastattn.machine import machine, versions
from fastattn.nn import GenerationOptions

from ..training import InputError, device, exit_code, positive_int, write_json
from .speed import add_speed_arguments, run_speed
from .text import lines_of, read_lines
from .train import add_data_argument, add_files_argument, add_train_arguments, read_pairs, run_train
from .translator import Translator, bleu


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program, and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.translation", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, add, run, purpose in (
        ("train", add_train_arguments, run_train, "train a model, or go on with a run that was stopped"),
        ("translate", _add_translate_arguments, run_translate, "translate a file, a pipe, or what you type"),
        ("evaluate", _add_evaluate_arguments, run_evaluate, "BLEU on two parallel files, by beam search"),
        ("speed", add_speed_arguments, run_speed, "time training steps beside the same model on torch.nn's layers"),
    ):
        command = commands.add_parser(name, help=purpose, description=run.__doc__)
        add(command)
        command.set_defaults(program=run)
    args = parser.parse_args(arguments)
    return exit_code(lambda: args.program(args))


def _add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    default = "runs/translation"
    parser.add_argument("--model", default=default, metavar="FOLDER", help=f"of a training run; default: {default}")
    parser.add_argument("--num-beams", type=positive_int, default=5, metavar="N", help="1 is greedy; default: 5")
    parser.add_argument("--length-penalty", type=length_penalty, default=1.0, metavar="X", help="default: 1.0")
    parser.add_argument("--device", type=device, default="cpu", help="default: cpu")


def length_penalty(text: str) -> float:
    """A number that `generate` takes, for argparse."""
    try:
        return GenerationOptions(1, length_penalty=float(text)).length_penalty
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _add_translate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="one sentence a line; default: standard input")
    parser.add_argument("--output", metavar="FILE", help="default: standard output")
    _add_decoding_arguments(parser)


def run_translate(args: argparse.Namespace) -> None:
    """Translates line by line; at a terminal, each line as it is typed, until the end of the input (Ctrl-D)."""
    translator = Translator.load(args.model, args.device)
    decoding = {"num_beams": args.num_beams, "length_penalty": args.length_penalty}
    if args.file is None and sys.stdin.isatty():
        while True:
            try:
                if (line := _typed("> ")) is None:
                    return
                print(*translator.translate([line], **decoding))
            except InputError as error:  # of this line
                print(f"error: {error}", file=sys.stderr)
    lines = read_lines(args.file) if args.file else lines_of(sys.stdin.buffer.read(), "standard input")
    with _progress("translating", len(lines)) as advance:
        translations = translator.translate(lines, **decoding, advance=advance)
    text = "".join(f"{line}\n" for line in translations)
    if args.output is None:
        sys.stdout.write(text)
        return
    try:
        Path(args.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--output must be a file that can be written, got {error}") from error


def _typed(prompt: str) -> str | None:
    """A line from the terminal, None at its end.

    Raises:
        InputError: it is in another encoding.
    """
    try:
        line = input(prompt)
        line.encode()  # Python lets bytes that are no text pass in the locale C
    except EOFError:
        print()
        return None
    except UnicodeError as error:
        raise InputError(f"a line must be in the encoding of the terminal, got {error}") from error
    return line


def _add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add_data_argument(parser)
    add_files_argument(parser, "--test", "test2016", "to translate and to compare with")
    _add_decoding_arguments(parser)


def run_evaluate(args: argparse.Namespace) -> None:
    """Prints the BLEU of the translations (lower-cased if the model is) and keeps it in the model's evaluation.json."""
    translator = Translator.load(args.model, args.device)
    sources, references = zip(*read_pairs(args.data, args.test), strict=True)
    start = time.perf_counter()
    with _progress("translating", len(sources)) as advance:
        translations = translator.translate(
            sources, num_beams=args.num_beams, length_penalty=args.length_penalty, advance=advance
        )
    seconds = time.perf_counter() - start
    score, signature = bleu(translations, references, lowercase=translator.vocabularies.target.lowercase)
    print(f"{score}\n{signature}\n{len(sources)} sentences in {seconds:.0f} s")
    content = {
        "bleu": score.score,
        "signature": signature,
        "test": args.test,
        "num_beams": args.num_beams,
        "length_penalty": args.length_penalty,
        "seconds": round(seconds, 1),
        "machine": machine(args.device),
        "versions": versions(),
    }
    write_json(Path(args.model) / "evaluation.json", content)


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of sentences that are done; a progress bar where stderr is a terminal."""
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


if __name__ == "__main__":
    sys.exit(main())
