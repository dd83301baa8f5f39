"""The server: answers to many at once are the model's own, those who leave free their pages, and what is refused."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import httpx
import pytest
import torch
import uvicorn
from fresh_python import wait_until

from examples.serving import load
from examples.serving.__main__ import main
from examples.serving.load import Answer, Question, ask_all, check, percentiles, questions
from examples.serving.model import ATTENTIONS, MAX_LENGTH, PAGE_SIZE, make_cache, make_model
from examples.serving.server import MOST_BYTES, Engine, application
from examples.training import InputError
from fastattn.nn import ContinuousBatch

MODEL = make_model(64, 2)
PAGES = 128  # of which the questions below need more, so that some wait


class Served:
    """A batch behind HTTP, in a thread of this process."""

    def __init__(self, attention: str = "fastattn") -> None:
        self.batch = ContinuousBatch(MODEL, make_cache(attention, PAGES))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(application(self.batch), log_level="critical"))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))
        self.thread.start()
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def ask(self, **fields: object) -> httpx.Response:
        return self.client.post("/generate", json={"input_ids": [3, 4, 5], "max_new_tokens": 6} | fields)

    def tokens(self, **fields: object) -> list[int]:
        return [event["token"] for event in events(self.ask(**fields))]

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join()
        self.socket.close()


@pytest.fixture(scope="module", params=ATTENTIONS)
def either(request) -> Iterator[Served]:
    served = Served(request.param)
    yield served
    served.close()


@pytest.fixture(scope="module")
def _served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


@pytest.fixture
def served(_served) -> Iterator[Served]:
    yield _served
    wait_until(lambda: not _served.batch)
    assert _served.batch.cache.free == PAGES


@pytest.fixture
def slow(served, monkeypatch) -> Served:
    """The server with steps of 10 ms at least, so that requests for hundreds of tokens do not end by themselves."""
    step = served.batch.step
    monkeypatch.setattr(served.batch, "step", lambda *only: time.sleep(0.01) or step(*only))
    return served


def events(response: httpx.Response) -> list[dict[str, object]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]


def test_many_requests_at_once_have_the_answers_of_the_model(either):
    asked = [replace(question, max_new_tokens=1 + i % 30) for i, question in enumerate(questions(60))]
    begin = time.process_time()
    answered = asyncio.run(ask_all(either.url, asked))
    answers = answered.answers
    check(MODEL, asked, answers)
    assert answered.tokens == sum(question.max_new_tokens for question in asked)
    assert 0 < answered.processor_seconds < time.process_time() - begin
    assert max(answer.seconds[-1] for answer in answers) < answered.seconds
    assert all(sorted(answer.seconds) == list(answer.seconds) for answer in answers)
    wait_until(lambda: not either.batch)
    assert either.batch.cache.free == either.batch.cache.pages


@torch.no_grad()
def test_every_token_of_a_prompt_matters_to_the_answer():
    """Or the checks above would not see a page of another request."""
    prompt = torch.randint(1000, (1, 40), generator=torch.Generator().manual_seed(0))
    answer = MODEL.generate(prompt, max_new_tokens=20)
    assert len({*answer[0].tolist()}) > 5
    for i in range(0, 40, 3):
        changed = prompt.clone()
        changed[0, i] ^= 1
        assert not torch.equal(MODEL.generate(changed, max_new_tokens=20), answer)


@pytest.mark.parametrize("spoil", ["swapped", "lost", "cut off", "other token"])
@torch.no_grad()
def test_the_check_finds_answers_that_are_lost_or_mixed_up(spoil):
    asked = [Question(q.input_ids, 8) for q in questions(3)]
    answers = []
    for question in asked:
        tokens = MODEL.generate(torch.tensor([question.input_ids]), max_new_tokens=8)[0].tolist()
        answers.append(Answer(tuple(tokens), (0.0,) * 8))
    check(MODEL, asked, answers)
    if spoil == "swapped":
        answers[:2] = answers[1::-1]
    else:
        tokens = {"lost": (), "cut off": tokens[:7], "other token": (*tokens[:5], tokens[5] ^ 1, *tokens[6:])}[spoil]
        answers[2] = Answer(tuple(tokens), ())
    sentence = {"swapped": "token 1 of the answer to request 1 must be", "other token": "token 6 of the answer to"}
    with pytest.raises(InputError, match=sentence.get(spoil, "the answer to request 3 must have 8 tokens, got")):
        check(MODEL, asked, answers)


@torch.no_grad()
def test_the_request_with_a_wrong_answer_of_the_second_server_is_named(error_of, monkeypatch):
    answers = []
    for question in questions(3):
        ids = torch.tensor([question.input_ids])
        tokens = MODEL.generate(ids, max_new_tokens=question.max_new_tokens)[0].tolist()
        answers.append(Answer(tuple(tokens), tuple(range(len(tokens)))))

    def ask(url: str, asked: list[Question]) -> load.Round:
        right = answers[: len(asked)]
        wrong = replace(right[1], tokens=(right[1].tokens[0] ^ 1, *right[1].tokens[1:]))
        return load.Round(right if url == "fastattn" else [right[0], wrong, *right[2:]], 1.0, 1.0)

    monkeypatch.setattr(load, "server", lambda args, name: nullcontext(name))
    monkeypatch.setattr(load, "_run", ask)
    said = error_of(lambda: main(["load", "--d-model", "64", "--layers", "2", "--requests", "3", "--rounds", "1"]))
    assert said.startswith("token 1 of the answer to request 2 must be")


def test_tokens_stream_as_they_come(slow):
    with slow.client.stream("POST", "/generate", json={"input_ids": [7], "max_new_tokens": MAX_LENGTH - 1}) as response:
        lines = (line for line in response.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        (request,) = slow.batch._running
        assert first == {"token": request.tokens[0], "finish_reason": None}
        assert request.finish_reason is None  # hundreds of steps before the last


def test_a_client_that_leaves_frees_its_pages(slow):
    left = []
    with httpx.Client(base_url=slow.url, trust_env=False) as client:
        body = {"input_ids": [7] * 50, "max_new_tokens": MAX_LENGTH - 50}
        with client.stream("POST", "/generate", json=body) as response:
            next(response.iter_lines())
            left += slow.batch._running
            health = slow.client.get("/health").json()
            assert health.pop("processor_seconds") > 0
            assert health == {"requests": 1, "pages": PAGES, "free": PAGES - MAX_LENGTH // PAGE_SIZE}
    wait_until(lambda: slow.batch.cache.free == PAGES)
    (request,) = left
    assert request.finish_reason == "cancelled"
    assert len(request.tokens) < MAX_LENGTH - 50
    assert len(slow.tokens()) == 6


def test_a_client_that_leaves_while_it_waits_for_pages(slow):
    body = {"input_ids": [7], "max_new_tokens": MAX_LENGTH - 1}  # of which four run
    raw = [socket.create_connection(slow.socket.getsockname()) for _ in range(6)]
    content = json.dumps(body).encode()
    for connection in raw:
        head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode()
        connection.sendall(head + content)
    wait_until(lambda: len(slow.batch) == 6 and len(slow.batch._running) == 4)
    for connection in raw:
        connection.close()
    wait_until(lambda: not slow.batch)
    assert slow.batch.cache.free == PAGES


def test_draws_depend_on_the_seed_alone(served):
    drawing = {"do_sample": True, "temperature": 2.0, "top_k": 50, "max_new_tokens": 20}
    expected = [served.tokens(seed=seed, **drawing) for seed in (1, 2)]
    assert expected[0] != expected[1]
    with ThreadPoolExecutor(12) as threads:
        found = threads.map(lambda i: served.tokens(seed=i % 4, **drawing), range(12))
    for i, tokens in enumerate(found):
        assert i % 4 in (0, 3) or tokens == expected[i % 4 - 1]


def test_the_end_of_a_stream_says_why(served):
    whole = events(served.ask(max_new_tokens=9))
    assert [event["finish_reason"] for event in whole] == [None] * 8 + ["length"]
    token = whole[2]["token"]
    n = [event["token"] for event in whole].index(token) + 1
    ended = events(served.ask(max_new_tokens=9, eos_token_id=token))
    assert ended == [*whole[: n - 1], {"token": token, "finish_reason": "stop"}]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"input_ids": [3] * MAX_LENGTH}, "input_ids and max_new_tokens together must be at most max_length = 2048"),
        ({"input_ids": "hello"}, "input_ids must be a list of ints or a Tensor, got str"),
        ({"num_beams": 4}, "num_beams must be 1 for requests that come and go, got 4"),
        ({"seed": "x"}, "seed must be an int from 0 to 2**63 - 1, got 'x'"),
        ({"seed": -1}, "seed must be an int from 0 to 2**63 - 1, got -1"),
        ({"generator": 3}, "generator must be a torch.Generator or None, got 3"),
        ({"color": 3}, "unexpected keyword argument 'color'"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(served, fields, sentence):
    response = served.ask(**fields)
    assert response.status_code == 400
    assert sentence in response.json()["error"]
    assert len(served.batch) == 0


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ("", 400, "the body must be JSON, got Expecting value"),
        ('{"input_ids": [3', 400, "the body must be JSON, got"),
        ("[" * 100_000, 400, "the body must be JSON, got"),
        (b"\xff", 400, "the body must be JSON, got"),
        ("[3]", 400, "the body must be a JSON object, got list"),
        (r'{"input_ids": [3], "\ud800": 1}', 400, r"unexpected keyword argument '\ud800'"),
        ("{}", 400, "missing 1 required positional argument: 'input_ids'"),
        ('{"input_ids": [3]}', 400, "missing 1 required positional argument: 'max_new_tokens'"),
        (b"[" + b"3," * MOST_BYTES + b"3]", 413, f"the body must have at most {MOST_BYTES} bytes, got more"),
    ],
    ids=["empty", "malformed", "deep", "no text", "no object", "half a character", "no prompt", "no end", "huge"],
)
def test_bodies_that_are_no_request(served, body, status, sentence):
    response = served.client.post("/generate", content=body)
    assert (response.status_code, sentence in response.json()["error"]) == (status, True), response.text
    assert served.client.get("/generate").status_code == 405


def test_requests_come_and_go_between_steps_only(monkeypatch):
    served = Served()
    inside, overlaps = [], []

    def alone(name: str) -> None:
        real = getattr(served.batch, name)

        def call(*args: object, **kwargs: object) -> object:
            overlaps.extend(inside)
            inside.append(name)
            time.sleep(0.002)
            result = real(*args, **kwargs)
            inside.remove(name)
            return result

        monkeypatch.setattr(served.batch, name, call)

    for name in ("add", "cancel", "step"):
        alone(name)
    asyncio.run(ask_all(served.url, [Question((3, 4), 2 + i) for i in range(20)]))
    with served.client.stream("POST", "/generate", json={"input_ids": [3], "max_new_tokens": 900}) as response:
        next(response.iter_lines())
    wait_until(lambda: not served.batch)
    assert overlaps == []
    served.close()


def test_a_step_that_fails_ends_its_requests_and_not_the_server(monkeypatch):
    served = Served()
    with monkeypatch.context() as patch:
        patch.setattr(served.batch, "_next", lambda *_: (_ for _ in ()).throw(MemoryError))
        assert events(served.ask()) == [{"token": None, "finish_reason": "cancelled"}]
    assert len(served.tokens()) == 6
    assert served.batch.cache.free == PAGES
    served.close()


def test_a_client_that_leaves_during_a_step_that_fails_leaves_the_others_alone(monkeypatch):
    """Those that wait for its pages, since none else runs."""
    batch, inside, left = ContinuousBatch(MODEL, make_cache("fastattn", 1)), threading.Event(), threading.Event()
    read = batch._next

    def fail_once(ids: list[int], *rest: object) -> list[int]:
        if 999 in ids:
            inside.set()
            left.wait(60)
            raise MemoryError
        return read(ids, *rest)

    monkeypatch.setattr(batch, "_next", fail_once)

    async def answers() -> list[dict[str, object]]:
        engine = Engine(batch)
        failing = await engine.add(input_ids=[3, 999], max_new_tokens=5)
        waiting = await engine.add(input_ids=[3, 4], max_new_tokens=3)
        running = asyncio.create_task(engine.run())
        await asyncio.to_thread(inside.wait, 60)
        await engine.leave(failing)
        left.set()
        result = [event async for event in engine.events(waiting)]
        running.cancel()
        return result

    assert [event["finish_reason"] for event in asyncio.run(answers())] == [None, None, "length"]
    assert batch.cache.free == 1


def test_a_client_that_leaves_before_its_body_has_come_is_no_error(served, monkeypatch):
    errors = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "error", lambda *said, **_: errors.append(said))
    with socket.create_connection(served.socket.getsockname()) as client:
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    assert len(served.tokens()) == 6
    assert errors == []


def test_requests_that_no_step_can_admit_end(served):
    held = served.batch.cache.open(PAGES * served.batch.cache.page_size)
    assert events(served.ask()) == [{"token": None, "finish_reason": "cancelled"}]
    held.close()
    assert len(served.tokens()) == 6


def test_a_request_of_which_the_model_fails_ends_alone(slow, monkeypatch):
    asked = [{"max_new_tokens": 60}, {"max_new_tokens": 60, "do_sample": True, "temperature": 2.0, "seed": 1}]
    alone = [slow.tokens(**fields) for fields in asked]
    read = slow.batch._next

    def read_or_fail(ids: list[int], *rest: object) -> list[int]:
        if 999 in ids:
            raise MemoryError
        return read(ids, *rest)

    monkeypatch.setattr(slow.batch, "_next", read_or_fail)
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda fields: slow.tokens(**fields), asked)
        wait_until(lambda: sum(len(request.tokens) > 5 for request in slow.batch._running) == 2)
        assert events(slow.ask(input_ids=[3, 999])) == [{"token": None, "finish_reason": "cancelled"}]
        assert len(slow.batch) == 2
    assert [*found] == alone


def test_the_load_test_starts_a_server_checks_and_prints(capsys):
    small = ["--d-model", "64", "--layers", "1", "--requests", "8", "--rounds", "2", "--attention", "fastattn"]
    assert main(["load", *small]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "8 requests at once, 2 rounds, every answer is the model's own"
    number = r"\s+\d+\.\d+"
    assert re.fullmatch(rf"fastattn\s+\d+\s+\d+{number * 6}", said[3])


def test_a_server_of_another_model_is_found_out(served, capsys):
    address = ["--url", served.url, "--requests", "4", "--rounds", "1"]
    assert main(["load", "--d-model", "64", "--layers", "2", *address]) == 0
    assert main(["load", "--d-model", "64", "--layers", "3", *address]) == 1
    assert re.search(r"error: token \d+ of the answer to request \d+ must be \d+, which is", capsys.readouterr().err)


def test_mistakes_on_the_command_line_are_one_sentence(error_of, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("true"))  # a server that ends at once
    for arguments, sentence in [
        (["serve", "--d-model", "65"], "--d-model must be a multiple of 64, got 65"),
        (["serve", "--pages", "1", "--attention", "sdpa"], "--pages must be at least 32 with sdpa, got 1"),
        (["serve", "--port", "99999"], "--host and --port must be an address to listen at, got"),
        (["load", "--url", "http://127.0.0.1:9", "--d-model", "64"], "--url must be of a server that answers, got"),
        (["load", "--url", "http://[::", "--d-model", "64"], "--url must be of a server that answers, got"),
        (["load", "--d-model", "64"], "the server must start, got an end"),
    ]:
        assert error_of(lambda of=arguments: main(of)).startswith(sentence)


def test_percentiles():
    assert percentiles(range(101)) == pytest.approx((50, 95, 99))
    assert percentiles([3.0]) == (3.0, 3.0, 3.0)
