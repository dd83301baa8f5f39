"""The server: POST /generate streams the tokens of a request as they come, GET /health says how much is to be done.

A request is a JSON object with `input_ids`, `max_new_tokens`, and what else `fastattn.nn.GenerationOptions` has; `seed`
stands for its generator. The answer is a stream of server-sent events, {"token": 5, "finish_reason": null}, of which
the last one has a reason. What cannot be served is refused with status 4xx and {"error": "a sentence"}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fastattn.nn import ContinuousBatch, Request

from ..training import InputError
from .model import ATTENTIONS, make_cache, make_model

MOST_BYTES = 1 << 20


class Engine:
    """A batch that steps in a thread of its own for as long as there are requests, which come and go between steps."""

    def __init__(self, batch: ContinuousBatch) -> None:
        self.batch = batch
        self._events: dict[Request, asyncio.Queue[dict[str, object]]] = {}
        self._left: list[Request] = []
        self._between_steps = asyncio.Lock()  # the batch is not safe for threads
        self._awake = asyncio.Event()

    async def add(self, **fields: Any) -> Request:
        """A request with the arguments of `ContinuousBatch.add`, which raises what that raises."""
        async with self._between_steps:
            request = self.batch.add(**fields)
        self._events[request] = asyncio.Queue()
        self._awake.set()
        return request

    async def events(self, request: Request) -> AsyncIterator[dict[str, object]]:
        """What the client is told, to the end of the request."""
        while True:
            event = await self._events[request].get()
            yield event
            if event["finish_reason"]:
                return

    async def leave(self, request: Request) -> None:
        """Ends the request before the next step, if it has not ended: its client is gone."""
        del self._events[request]
        self._left.append(request)
        self._awake.set()

    async def run(self) -> None:
        """Steps until it is cancelled."""
        with ThreadPoolExecutor(1) as thread:
            while True:
                await self._awake.wait()
                async with self._between_steps:
                    while self._left:
                        self.batch.cancel(self._left.pop())
                    advanced = await asyncio.get_running_loop().run_in_executor(thread, self._step)
                    if not self.batch:
                        self._awake.clear()
                for request in advanced:
                    token = None if request.finish_reason == "cancelled" else request.ids[-1]
                    if request in self._events:
                        self._events[request].put_nowait({"token": token, "finish_reason": request.finish_reason})

    def _step(self) -> list[Request]:
        """The requests that have a token more, or that cannot go on: after an error each of them takes a step alone."""
        try:
            return self.batch.step()
        except Exception:
            logging.getLogger("uvicorn.error").exception("a step failed; each of its requests is tried alone")
        advanced: list[Request] = []
        requests = [request for request in [*self._events] if request.finish_reason is None]
        if self._left:  # their pages are free before the next step
            return []
        if not any(request.running for request in requests):  # nor can any: a step would fail for ever
            for request in requests:
                self.batch.cancel(request)
            return requests
        for request in [request for request in requests if request.running]:
            try:
                advanced += self.batch.step([request])
            except Exception:
                self.batch.cancel(request)
                advanced.append(request)
        return advanced


def application(batch: ContinuousBatch) -> Starlette:
    """The server of a batch."""
    engine = Engine(batch)

    async def generate(http: HttpRequest) -> Response:
        try:
            request = await engine.add(**await _fields(http))
        except ClientDisconnect:
            return Response(status_code=499)  # which nobody reads
        except (TypeError, ValueError) as error:
            sentence = str(error).encode(errors="backslashreplace").decode()  # JSON may have halves of characters
            return JSONResponse({"error": sentence}, status_code=400)
        except OverflowError as error:
            return JSONResponse({"error": str(error)}, status_code=413)
        events = (f"data: {json.dumps(event)}\n\n" async for event in engine.events(request))
        leave = BackgroundTask(engine.leave, request)  # which also follows where the client is gone
        return StreamingResponse(events, media_type="text/event-stream", background=leave)

    async def health(http: HttpRequest) -> Response:
        state = {"requests": len(batch), "pages": batch.cache.pages, "free": batch.cache.free}
        return JSONResponse(state | {"processor_seconds": time.process_time()})

    @contextlib.asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(engine.run())
        yield
        task.cancel()

    routes = [Route("/generate", generate, methods=["POST"]), Route("/health", health)]
    return Starlette(routes=routes, lifespan=running)


async def _fields(http: HttpRequest) -> dict[str, Any]:
    """The arguments of `ContinuousBatch.add` that the body has.

    Raises:
        OverflowError: the body is too long.
        ValueError: it is no JSON object, or its seed is none.
    """
    body = b""
    async for chunk in http.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise OverflowError(f"the body must have at most {MOST_BYTES} bytes, got more")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body must be JSON, got {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"the body must be a JSON object, got {type(fields).__name__}")
    if (seed := fields.pop("seed", None)) is not None:
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise ValueError(f"seed must be an int from 0 to 2**63 - 1, got {seed!r}")
        fields["generator"] = torch.Generator().manual_seed(seed)
    return fields


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `serve` to the parser, but for those of the model."""
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0 is any free one; default: 8000")
    parser.add_argument("--attention", choices=ATTENTIONS, default="fastattn", help="default: fastattn")


def run_serve(args: argparse.Namespace) -> None:
    """Serves a model with random weights, and prints the address."""
    batch = ContinuousBatch(make_model(args.d_model, args.layers), make_cache(args.attention, args.pages))
    try:
        listening = socket.create_server((args.host, args.port))
    except (OSError, OverflowError) as error:
        raise InputError(f"--host and --port must be an address to listen at, got {error}") from error
    with listening:
        host, port = listening.getsockname()[:2]
        print(f"http://{host}:{port}", flush=True)
        uvicorn.Server(uvicorn.Config(application(batch), log_level="warning")).run([listening])
