"""The training loop of the examples: seeded, resumed to the bit after being killed, with its figures in a JSON file.

A program says what its model, batches and loss are; `train` does the rest. In the run's folder it keeps
`checkpoint.pt`, all that the run needs to go on, and `metrics.json`, what the run is and what it has reached.
The same command resumes a run that was stopped, at its last checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import os
import pickle
import random
import shlex
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from fastattn.bench.writing import positive_int as positive_int
from fastattn.machine import machine, now, versions

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Batch = TypeVar("Batch")
_Parts = dict[str, nn.Module | Optimizer | LRScheduler]
_OF_THE_RUN = ("program", "data", "output", "epochs", "seed", "checkpoint_every", "device")


class InputError(Exception):
    """An input of the user cannot be used; the message is one sentence on what it must be and what it was."""


@dataclass(frozen=True)
class Loss:
    """The loss of one batch.

    mean: the scalar that is differentiated.
    count: the number of target tokens or examples of which it is the mean, its weight in the mean of an epoch.
    tokens: the number of real tokens that the model read, for the speed.
    """

    mean: Tensor
    count: int
    tokens: int


@dataclass(frozen=True)
class Run:
    """One training run.

    folder: the folder of its files; made if missing.
    epochs: number of passes over all batches; a finished run goes on if this grows.
    seed: seed of all random numbers.
    checkpoint_every: optimizer steps between checkpoints; there is one at the end of each epoch, too.
    settings: everything else that decides the outcome, as JSON values. A run does not resume under other settings.
    """

    folder: Path
    epochs: int
    seed: int = 0
    checkpoint_every: int = 200
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_arguments(cls, args: argparse.Namespace, data: object, **settings: Any) -> Run:
        """The run that the options of `add_arguments` describe; all others, `settings` and the data are its settings.

        Args:
            args: the options; those in `_OF_THE_RUN` may change between stop and resume, as long as the data do not.
            data: what it trains on, as plain Python data.
            settings: others, or other values of some.
        """
        settings = {name: value for name, value in vars(args).items() if name not in _OF_THE_RUN} | settings
        settings["training_data_sha256"] = fingerprint(data)
        return cls(Path(args.output), args.epochs, args.seed, args.checkpoint_every, settings)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.json"


def add_arguments(parser: argparse.ArgumentParser, *, output: str, epochs: int) -> None:
    """Adds the options of every training run to the parser.

    Args:
        output: default folder of the run.
        epochs: default number of epochs.
    """
    group = parser.add_argument_group("the run", "the same command resumes a run that was stopped")
    group.add_argument("--output", default=output, metavar="FOLDER", help=f"files of the run; default: {output}")
    group.add_argument("--epochs", type=positive_int, default=epochs, metavar="N", help=f"default: {epochs}")
    group.add_argument("--seed", type=seed, default=0, metavar="N", help="default: 0")
    group.add_argument("--checkpoint-every", type=positive_int, default=200, metavar="STEPS", help="default: 200")
    group.add_argument("--device", type=device, default="cpu", help="default: cpu")


def add_number(
    group: argparse._ActionsContainer, name: str, default: float, meaning: str = "",
    kind: Callable[[str], float] | None = None,
) -> None:  # fmt: skip
    """Adds an option for a number to the parser, `positive_int` unless `kind` says another one."""
    told, metavar = f"{meaning}; " * bool(meaning) + "default: %(default)s", "X" if kind else "N"
    group.add_argument(name, type=kind or positive_int, default=default, metavar=metavar, help=told)


def seed(text: str) -> int:
    """A whole number that seeds every generator, also that of an epoch, for argparse."""
    with suppress(ValueError):
        if abs(value := int(text)) <= 2**32:
            return value
    raise argparse.ArgumentTypeError(f"must be a whole number from -2**32 to 2**32, got {text}")


def non_negative(text: str, below: float = math.inf) -> float:
    """A number of at least 0 and below `below`, for argparse."""
    with suppress(ValueError):
        if 0 <= (value := float(text)) < below:
            return value
    raise argparse.ArgumentTypeError(f"must be a number of at least 0 and below {below:g}, got {text}")


def probability(text: str) -> float:
    """A number of at least 0 and below 1, for argparse."""
    return non_negative(text, below=1)


def device(text: str) -> str:
    """A device that torch can compute on here, for argparse."""
    try:
        torch.zeros(1, device=text).item()  # "meta" has tensors, but no numbers
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        why = _first_line(error)  # others are a list of all that torch has
        raise argparse.ArgumentTypeError(f"must be one that torch can use here, got {text}: {why}") from error
    return text


def fingerprint(data: object) -> str:
    """The sha256 of plain Python data, for the settings of a run: other data may come to lie at the same path."""
    return hashlib.sha256(repr(data).encode()).hexdigest()


def seed_everything(seed: int) -> None:
    """Seeds torch, on every device, and Python's random. Call it before the model is made."""
    random.seed(seed)
    torch.manual_seed(seed)


def batches_of_alike(lengths: Sequence[int], size: int, generator: torch.Generator) -> list[list[int]]:
    """Random batches of examples of about one length each, so that there is little padding.

    Args:
        lengths: of the examples; a batch has indices into them.
        size: examples in a batch; the last one drawn may have fewer.
    """
    order = torch.randperm(len(lengths), generator=generator).tolist()
    pool = 50 * size  # long enough to find alike lengths in, short enough for batches to differ between epochs
    result = []
    for start in range(0, len(order), pool):
        alike = sorted(order[start : start + pool], key=lambda i: lengths[i])
        result += [alike[i : i + size] for i in range(0, len(alike), size)]
    return [result[i] for i in torch.randperm(len(result), generator=generator).tolist()]


def inverse_sqrt(optimizer: Optimizer, warmup: int) -> LambdaLR:
    """The schedule that climbs in a line to the optimizer's learning rate and then falls with 1 / sqrt(step).

    With the learning rate (d_model * warmup) ** -0.5 it is the one of section 5.3 of the source.

    Args:
        warmup: steps until the learning rate is reached.

    Sources:
        Vaswani et al., Attention Is All You Need (2017), section 5.3.
    """
    return LambdaLR(optimizer, lambda step: min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5))


def train(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    run: Run,
    batches: Callable[[torch.Generator], Sequence[Batch]],
    loss: Callable[[Batch], Loss],
    evaluate: Callable[[int], dict[str, float]],
    schedule: LRScheduler | None = None,
    clip_norm: float | None = None,
) -> dict[str, Any]:
    """Trains the model in place; a run that was stopped resumes.

    A run that was killed and resumed has the same weights, to the bit, as one that was not, as long as `batches`,
    `loss` and `evaluate` draw only from the generator they are given, from torch, or from Python's random.

    Args:
        model: on its device.
        optimizer: of the model's parameters.
        batches: the batches of one epoch, in order, with every random number from the generator. Costly work may wait
            until a batch is taken by its index: a resumed run does not take the batches before its checkpoint.
        loss: of one batch, with the model in training mode.
        evaluate: figures at the end of an epoch, whose number it is given, from 1 on; the model is in evaluation mode,
            and gradients are off. It may also save the weights: being killed can repeat the call, with the same model.
        schedule: steps after each optimizer step.
        clip_norm: largest norm of all gradients together; None does not clip.

    Returns:
        The content of `metrics.json` at the end.

    Raises:
        InputError: the checkpoint is damaged, or was made by other settings or for another model; or the folder cannot
            be made, or another process trains in it.
        FloatingPointError: the loss, a weight or a figure is no longer finite; the last checkpoint is from before that.
    """
    parts: _Parts = {"model": model, "optimizer": optimizer}
    if schedule is not None:
        parts["schedule"] = schedule
    settings = {"seed": run.seed, **run.settings}
    with _alone_in(run.folder), _Display(run.epochs) as display:
        place = _restore(run.checkpoint, parts, settings) if run.checkpoint.exists() else _Place()
        started, seconds_before = time.perf_counter(), place.seconds

        def check_weights() -> None:
            """Before they are kept or judged: a loss tells of the step before it, and a last step has none after it."""
            if not all(bool(weight.isfinite().all()) for weight in model.parameters()):
                raise FloatingPointError(f"the weights must be finite, got others at step {place.step}")

        def keep() -> None:
            check_weights()
            place.seconds = seconds_before + time.perf_counter() - started
            _save(run.checkpoint, parts, settings, place)

        if place.step:
            display.say(f"resumed at step {place.step} (epoch {place.epoch}) from {run.checkpoint}")
        while place.epoch <= run.epochs:
            generator = torch.Generator().manual_seed(run.seed * 1_000_003 + place.epoch)  # no two epochs share it
            epoch = batches(generator)
            model.train()
            for index in range(place.batch, len(epoch)):
                batch_loss = loss(epoch[index])
                value = batch_loss.mean.item()
                if not abs(value) < float("inf"):  # also when it is NaN
                    raise FloatingPointError(f"the loss must be finite, got {value} at step {place.step}")
                optimizer.zero_grad()
                batch_loss.mean.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
                optimizer.step()
                if schedule is not None:
                    schedule.step()
                place.count_batch(value, batch_loss)
                display.show(place, len(epoch), seconds_before + time.perf_counter() - started)
                if place.step % run.checkpoint_every == 0:
                    keep()
            check_weights()
            model.eval()
            with torch.no_grad():
                figures = evaluate(place.epoch)
            if wrong := [f"{name} = {value}" for name, value in figures.items() if not math.isfinite(value)]:
                raise FloatingPointError(f"the figures must be finite, got {', '.join(wrong)} in epoch {place.epoch}")
            display.say(place.end_epoch(figures))
            keep()
            _write_metrics(run, model, place)
        model.eval()
        return _write_metrics(run, model, place)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """The folder, made if missing, for no other process within this block: two would overwrite each other's files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} must be a folder, or a place for one, got {error}") from error
    if fcntl is None:
        yield
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # of a file system without locks
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(f"{folder} must be of one run at a time, got a second one") from error
        yield
    finally:
        os.close(opened)


@dataclass
class _Place:
    """The progress of a run: `batch` batches of `epoch` are done, with the counts so far."""

    epoch: int = 1
    batch: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    loss_count: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def mean_loss(self) -> float:
        """The mean loss over the batches of this epoch so far."""
        return self.loss_sum / max(self.loss_count, 1)

    def count_batch(self, value: float, loss: Loss) -> None:
        self.batch += 1
        self.step += 1
        self.tokens += loss.tokens
        self.loss_sum += value * loss.count
        self.loss_count += loss.count

    def end_epoch(self, figures: dict[str, float]) -> str:
        """Goes to the next epoch, and returns a line on this one."""
        entry = {"epoch": self.epoch, "step": self.step, "train_loss": self.mean_loss, **figures}
        self.history.append(entry)
        self.epoch, self.batch, self.loss_sum, self.loss_count = self.epoch + 1, 0, 0.0, 0
        return ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                         for name, value in entry.items())  # fmt: skip


def _save(path: Path, parts: _Parts, settings: dict[str, Any], place: _Place) -> None:
    """Writes a checkpoint atomically: a run that is killed meanwhile keeps the one before."""
    state = {name: part.state_dict() for name, part in parts.items()}
    rng = {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all(), "python": random.getstate()}
    state |= {"settings": settings, "place": vars(place), "rng": rng}
    temporary = path.with_suffix(".partial")
    try:
        torch.save(state, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # the latter where the disk is full
        raise InputError(f"{path} must be a file that can be written, got {_first_line(error)}") from error


def _restore(path: Path, parts: _Parts, settings: dict[str, Any]) -> _Place:
    """Loads the parts from a checkpoint, and returns the progress of its run."""
    state = _read(path)
    # In this order: an option that changes how the data are read is named, not the fingerprint of these.
    different = [name for name in settings | state["settings"] if settings.get(name) != state["settings"].get(name)]
    if different:
        name = different[0]
        raise InputError(
            f"{name} must be {state['settings'].get(name)!r}, with which {path} was made, got {settings.get(name)!r}; "
            "use that, or another folder for another run"
        )
    try:
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except (RuntimeError, ValueError, KeyError) as error:
        raise InputError(f"{path} must be of this model, got another one: {_first_line(error)}") from error
    torch.set_rng_state(state["rng"]["torch"])
    if len(state["rng"]["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["rng"]["cuda"])
    random.setstate(state["rng"]["python"])
    return _Place(**state["place"])


def _read(path: Path) -> dict[str, Any]:
    """A checkpoint, after a check of all its checksums: torch itself does not compare those of tensors."""
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        _ = {**state["settings"]}, {**state["place"]}, {**state["rng"]}  # which are dicts
    except (OSError, zipfile.BadZipFile, RuntimeError, pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} must be a checkpoint of this program, got a file that is damaged or something else "
            f"({_first_line(error)}); move it away to start anew"
        ) from error
    return state


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _write_metrics(run: Run, model: nn.Module, place: _Place) -> dict[str, Any]:
    """Writes and returns the description of a run and its results."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name.removesuffix(".__main__")] if spec else sys.argv[:1]  # or its file
    metrics = {
        "command": shlex.join(["python", *program, *sys.argv[1:]]),
        "seed": run.seed,
        "settings": run.settings,
        "machine": machine(next(model.parameters()).device.type),
        "versions": versions(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "written": now(),
        "epochs": place.epoch - 1,
        "steps": place.step,
        "tokens": place.tokens,
        "seconds": round(place.seconds, 1),
        "tokens_per_second": round(place.tokens / max(place.seconds, 1e-9)),
        "history": place.history,
    }
    write_json(run.metrics, metrics)
    return metrics


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file atomically, like a checkpoint.

    Raises:
        FloatingPointError: a number is not finite, which JSON has none of.
    """
    temporary = path.with_suffix(".partial")
    try:
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise FloatingPointError(f"{path} must have finite numbers, got others") from error
    temporary.write_text(f"{text}\n", encoding="utf-8")
    os.replace(temporary, path)


class _Display(Progress):
    """A progress bar where stderr is a terminal, and a line every 100 steps elsewhere."""

    def __init__(self, epochs: int) -> None:
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.epochs, self.task = epochs, self.add_task("")

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if isinstance(raised[1], KeyboardInterrupt):
            self.say("the same command resumes this run at its last checkpoint")

    def show(self, place: _Place, batches: int, seconds: float) -> None:
        line = (
            f"epoch {place.epoch}/{self.epochs}  loss {place.mean_loss:.3f}  "
            f"{place.tokens / max(seconds, 1e-9):.0f} tokens/s"
        )
        self.update(self.task, description=line, completed=place.batch, total=batches)
        if self.disable and place.step % 100 == 0:
            self.say(f"{line}  batch {place.batch}/{batches}")

    def say(self, line: str) -> None:
        self.console.print(line, markup=False)


def exit_code(program: Callable[[], None]) -> int:
    """Runs a program, and returns its exit code.

    It is 0; 1 with a sentence on stderr about a wrong input, or a file that cannot be read or written; 130 if it was
    interrupted; or 141, without a word, if nobody reads its output any more.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # not where it is closed
        sys.stdout.reconfigure(errors="backslashreplace")  # it may lack characters of the data
    try:
        program()
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still flushes at its end
        return 141  # 128 + SIGPIPE, as shells have it
    except (InputError, FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0
