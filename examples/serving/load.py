"""The load test: many requests at once, every answer checked against the model, and how long tokens took."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx
import torch

from fastattn.nn import LanguageModel

from ..training import InputError, positive_int
from .model import ATTENTIONS, VOCABULARY, make_model

PROMPTS, NEW_TOKENS = (16, 1024), (16, 256)
ROUNDING = 1e-4  # of logits, whose size is 1


@dataclass(frozen=True)
class Question:
    """A prompt, and how many tokens are to follow it."""

    input_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Answer:
    """The tokens that followed, and when each arrived, in seconds after the request was sent."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.seconds[0]

    @property
    def between(self) -> float:
        """Seconds for each token after the first."""
        return (self.seconds[-1] - self.seconds[0]) / (len(self.seconds) - 1)


@dataclass(frozen=True)
class Round:
    """The answers to questions that were asked at once, the seconds until all had come, and those of the processor."""

    answers: list[Answer]
    seconds: float
    processor_seconds: float

    @property
    def tokens(self) -> int:
        """The number of tokens in all answers."""
        return sum(len(answer.tokens) for answer in self.answers)


def questions(count: int) -> list[Question]:
    """The same ones in every run: prompts of few tokens are as frequent as those of many, on a logarithmic scale."""
    generator = torch.Generator().manual_seed(1)
    low, high = PROMPTS
    lengths = (low * (high / low) ** torch.rand(count, generator=generator)).int().tolist()
    new = torch.randint(NEW_TOKENS[0], NEW_TOKENS[1] + 1, (count,), generator=generator).tolist()
    prompts = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return [Question(tuple(prompt), n) for prompt, n in zip(prompts, new, strict=True)]


async def ask_all(url: str, asked: Sequence[Question]) -> Round:
    """Sends all questions at once, and waits for the answers."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:
        before, begin = await client.get("/health"), time.perf_counter()
        answers = await asyncio.gather(*(_ask(client, question) for question in asked))
        seconds, after = time.perf_counter() - begin, await client.get("/health")
        worked = after.json()["processor_seconds"] - before.json()["processor_seconds"]
        return Round(answers, seconds, worked)


async def _ask(client: httpx.AsyncClient, question: Question) -> Answer:
    body = {"input_ids": question.input_ids, "max_new_tokens": question.max_new_tokens}
    tokens, seconds, begin = [], [], time.perf_counter()
    async with client.stream("POST", "/generate", json=body) as response:
        if response.status_code != 200:
            raise InputError(f"{response.url} must answer with tokens, got {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            if line:
                tokens.append(json.loads(line.removeprefix("data: "))["token"])
                seconds.append(time.perf_counter() - begin)
    return Answer(tuple(tokens), tuple(seconds))


@torch.no_grad()
def check(model: LanguageModel, asked: Sequence[Question], *rounds: Sequence[Answer]) -> None:
    """Compares every answer with what the model finds likeliest after each token of the prompt and the answer.

    Equal answers to a question are compared once.

    Raises:
        InputError: an answer is lost, cut off, or another one.
    """
    numbers: dict[tuple[Question, tuple[int, ...]], int] = {}
    for answers in rounds:
        for number, (question, answer) in enumerate(zip(asked, answers, strict=True), start=1):
            numbers.setdefault((question, answer.tokens), number)
    for (question, tokens), number in numbers.items():
        n = len(tokens)
        if n != question.max_new_tokens:
            raise InputError(f"the answer to request {number} must have {question.max_new_tokens} tokens, got {n}")
        logits = model(torch.tensor([question.input_ids + tokens]))[0, -n - 1 : -1]
        given = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        if (wrong := (logits.amax(1) - given > ROUNDING).nonzero()).numel():
            i = int(wrong[0])
            raise InputError(
                f"token {i + 1} of the answer to request {number} must be {int(logits[i].argmax())}, "
                f"which is the likeliest, got {tokens[i]}"
            )


@contextlib.contextmanager
def server(args: argparse.Namespace, attention: str) -> Iterator[str]:
    """The address of a server at a free port, which ends with the block."""
    sizes = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in ("d-model", "layers", "pages")]
    command = [sys.executable, "-m", "examples.serving", "serve", "--port=0", f"--attention={attention}", *sizes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not (url := process.stdout.readline().strip()):
                raise InputError("the server must start, got an end instead, of which it tells above")
            yield url
        finally:
            process.terminate()


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `load` to the parser, but for those of the model."""
    parser.add_argument("--requests", type=positive_int, default=200, metavar="N", help="at once; default: 200")
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="for each server; default: 3")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--attention", choices=ATTENTIONS, help="default: both, in turns")
    where.add_argument("--url", help="of a server that runs, of a model of these sizes; default: starts its own")


def run_load(args: argparse.Namespace) -> None:
    """Asks all requests at once, checks every answer against the model, and prints speed and latency.

    Each attention has a server of its own with the same memory for keys and values, and they take turns. "sdpa" is the
    same model and scheduler with PyTorch's attention, which reads one row of memory for each request that runs.
    """
    model, asked = make_model(args.d_model, args.layers), questions(args.requests)
    with contextlib.ExitStack() as servers:
        if args.url:
            urls = {args.url: args.url}
        else:
            chosen = [args.attention] if args.attention else ATTENTIONS
            urls = {name: servers.enter_context(server(args, name)) for name in chosen}
        runs: dict[str, list[Round]] = {name: [] for name in urls}
        for url in urls.values():
            _run(url, asked[:2])  # the first calls of a process are slow
        for _ in range(args.rounds):
            for name, url in urls.items():
                runs[name].append(_run(url, asked))
    check(model, asked, *(x.answers for rounds in runs.values() for x in rounds))
    print(f"{args.requests} requests at once, {args.rounds} rounds, every answer is the model's own")
    print("tokens/s by the clock and by the processor; of requests 50, 95 and 99 % had, seconds and milliseconds:")
    print(f"{'':10}{'clock':>8}{'processor':>11}{'first token':>21}{'each further one':>25}")
    for name, rounds in runs.items():
        clock = statistics.median(x.tokens / x.seconds for x in rounds)
        processor = statistics.median(x.tokens / x.processor_seconds for x in rounds)
        firsts, betweens = (
            percentiles([getattr(answer, what) for x in rounds for answer in x.answers])
            for what in ("first", "between")
        )
        first = "".join(f"{x:8.2f}" for x in firsts)
        between = "".join(f"{1e3 * x:8.1f}" for x in betweens)
        print(f"{name:10}{clock:8.0f}{processor:11.0f}{first} {between}")


def _run(url: str, asked: Sequence[Question]) -> Round:
    try:
        return asyncio.run(ask_all(url, asked))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:  # of another server
        raise InputError(f"--url must be of a server that answers, got {url}: {error!r}") from error


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The values that 50, 95 and 99 % of them do not exceed."""
    p50, p95, p99 = torch.tensor(values).double().quantile(torch.tensor([0.5, 0.95, 0.99]).double()).tolist()
    return p50, p95, p99
