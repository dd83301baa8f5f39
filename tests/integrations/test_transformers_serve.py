"""`fastattn serve` in a process of its own: the server answers what eager attention generates after each prompt."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fresh_python
import httpx
import pytest
from decoder_cases import CONFIGS, GREEDY, PROMPTS, SIZES, alone, model_of, text_of, tokenizer_of_letters
from transformers.cli.serving.model_manager import ModelManager
from transformers.utils.import_utils import is_serve_available

from fastattn.__main__ import main

ROOT = Path(__file__).parents[2]
NAMES = [name for name in CONFIGS if "qwen2" not in name]  # transformers reads any tokenizer as one of bytes there
MODES = {
    "one after the other": [],
    "continuous batching": ["--continuous-batching", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "128"],
}
WAYS = [("completions", False), ("completions", True), ("chat/completions", False), ("chat/completions", True)]
NEW_TOKENS = GREEDY.max_new_tokens

needs_packages = pytest.mark.skipif(not is_serve_available(), reason="needs transformers[serving]")

# The command line, in a process that ends with the one that started it. It writes down how many queries each call of
# fastattn has, and what fastattn would compute by its slow reference is an error, as in all tests.
SERVER = """
import os, sys, threading, warnings

import fastattn.__main__
from fastattn.integrations import continuous_batching, transformers

threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
warnings.filterwarnings("error", "the reference computes this attention")
calls = open(sys.argv.pop(1), "w", buffering=1)

def writing_down(attend, dim):
    def attend_and_write(q, *args, **kwargs):
        o = attend(q, *args, **kwargs)
        print(attend.__name__, q.shape[dim], file=calls)
        return o
    return attend_and_write

transformers.attention = writing_down(transformers.attention, 2)
continuous_batching.attention_varlen = writing_down(continuous_batching.attention_varlen, 0)
sys.exit(fastattn.__main__.main())
"""


def save(name: str, folder: Path) -> None:
    """The model and its tokenizer, as `from_pretrained` takes them."""
    model = model_of(name)
    model.generation_config = GREEDY
    model.save_pretrained(folder)
    tokenizer_of_letters().save_pretrained(folder)


class Server:
    """`fastattn serve` with these options, on a free port."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        folder.mkdir()
        self.said, self.calls = folder / "said", folder / "calls"
        command = [sys.executable, "-c", SERVER, str(self.calls), "serve", "--host", "127.0.0.1", "--port", "0"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with self.said.open("w") as said:
            self.process = subprocess.Popen(
                [*command, "--device", "cpu", *options],
                cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=said, stderr=said,
            )  # fmt: skip

    def wait(self) -> None:
        """Waits until it answers."""
        end = time.monotonic() + 120
        while (url := re.search(r"running on (http://127\.0\.0\.1:\d+)", self.said.read_text())) is None:
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < end
            time.sleep(0.05)
        self.client = httpx.Client(base_url=url[1], timeout=120, trust_env=False)  # no proxy
        assert self.client.get("/health").json() == {"status": "ok"}

    def ask(self, model: str, prompt: str, endpoint: str, stream: bool) -> tuple[str, str]:
        """The text of an answer, and why it ended; of a stream, each event of which has to be a token."""
        asked = {"messages": [{"role": "user", "content": prompt}]} if "chat" in endpoint else {"prompt": prompt}
        asked |= {"model": model, "max_tokens": NEW_TOKENS, "temperature": 0.0, "stream": stream}
        response = self.client.post(f"/v1/{endpoint}", json=asked)
        assert response.status_code == 200, self.said.read_text()
        if not stream:
            (choice,) = response.json()["choices"]
            return choice["message"]["content"] if "chat" in endpoint else choice["text"], choice["finish_reason"]
        events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
        choices = [choice for event in events for choice in event["choices"]]
        texts = [choice["delta"].get("content") if "chat" in endpoint else choice["text"] for choice in choices]
        assert [len(text) for text in texts if text] == [1] * NEW_TOKENS
        return "".join(text or "" for text in texts), choices[-1]["finish_reason"]

    def queries(self) -> dict[str, int]:
        """How many queries each function has computed so far."""
        counts: dict[str, int] = {}
        for line in self.calls.read_text().splitlines():
            function, queries = line.split()
            counts[function] = counts.get(function, 0) + int(queries)
        return counts

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[dict[str, Server]]:
    folder, running = tmp_path_factory.mktemp("servers"), {}
    try:
        for mode, options in MODES.items():  # all of them start while the first is waited for
            running[mode] = Server(folder / mode, options)
        for server in running.values():
            server.wait()
        yield running
    finally:
        for server in running.values():
            server.end()


@needs_packages
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_the_answers_are_those_of_eager_attention(name, mode, servers, tmp_path):
    server, before = servers[mode], servers[mode].queries()
    save(name, tmp_path)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = [
            pool.submit(server.ask, str(tmp_path), text_of(prompt), *way)
            for prompt, way in zip(PROMPTS, WAYS, strict=True)
        ]
        answers = [answer.result() for answer in asked]
    assert answers == [(text_of(tokens), "length") for tokens in alone(name)]
    queries = SIZES["num_hidden_layers"] * sum(len(prompt) + NEW_TOKENS - 1 for prompt in PROMPTS)
    function = "attention_varlen" if mode == "continuous batching" else "attention"
    assert server.queries() == before | {function: before.get(function, 0) + queries}


@pytest.mark.parametrize("name", ["fastattn", "fastattn_packed"])
def test_the_server_takes_the_names_and_still_checks_the_rest(name):
    assert ModelManager(attn_implementation=name).attn_implementation == name
    with pytest.raises(ValueError, match="Unsupported quantization method: 'bits'"):
        ModelManager(attn_implementation=name, quantization="bits")
    with pytest.raises(ValueError, match="Unsupported attention implementation: 'fastattn_"):
        ModelManager(attn_implementation="fastattn_2")


@pytest.mark.parametrize("imports", ["import fastattn; {}", "{}; import fastattn"])
def test_importing_fastattn_is_enough_for_the_server(imports):
    imports = imports.format("from transformers.cli.serving.model_manager import ModelManager")
    run = fresh_python.run(f"{imports}\nModelManager(attn_implementation='fastattn')")
    assert run.returncode == 0, run.stderr


@needs_packages
@pytest.mark.parametrize(
    ("options", "expected"), [([], "fastattn"), (["--attn-implementation", "eager"], "eager")], ids=str
)
def test_the_command_asks_for_fastattn_unless_it_is_told_otherwise(options, expected, monkeypatch):
    asked = []
    monkeypatch.setattr(ModelManager, "__init__", lambda self, **kwargs: asked.append(kwargs) or sys.exit(0))
    with pytest.raises(SystemExit):
        main(["serve", "a-model", "--continuous-batching", *options])
    assert asked[0]["attn_implementation"] == expected
    assert asked[0]["force_model"] == "a-model"
    assert asked[0]["continuous_batching"]


def test_missing_packages_are_told_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr("transformers.cli.serve.is_serve_available", lambda: False)
    assert main(["serve"]) == 1
    assert capsys.readouterr().err.startswith("fastattn: Missing dependencies for serving. Install with `pip install")


@needs_packages
def test_a_model_that_is_not_there_is_told_in_a_sentence(tmp_path, capsys):
    assert main(["serve", str(tmp_path / "none"), "--host", "127.0.0.1", "--port", "0"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("fastattn: ")
    assert str(tmp_path / "none") in error
