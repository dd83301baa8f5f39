"""Continuous batching: requests for tokens that come and go, with one call of the model for all that run."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .checks import check_ids, check_ints, check_tensor
from .generation import GenerationOptions, choose
from .pages import PagedCache, PagedSequence, PagedStep

if TYPE_CHECKING:
    from .models import LanguageModel


class Request:
    """A prompt, and the tokens that follow it so far; `ContinuousBatch.add` makes it.

    Attributes:
        ids: the tokens of the prompt, and then the new ones.
        options: the options of the generation.
        finish_reason: None while the request waits or runs; then "stop" after a token of `eos_token_id`, "length" after
            `max_new_tokens`, or "cancelled".
    """

    def __init__(self, prompt: list[int], options: GenerationOptions) -> None:
        self.ids, self.options = prompt, options
        self.finish_reason: str | None = None
        self._prompt_length = len(prompt)
        self._sequence: PagedSequence | None = None  # where it runs

    @property
    def tokens(self) -> list[int]:
        """The new tokens."""
        return self.ids[self._prompt_length :]

    @property
    def max_length(self) -> int:
        """The largest number of tokens that it has in the cache: the last one is not read any more."""
        return self._prompt_length + self.options.max_new_tokens - 1

    @property
    def running(self) -> bool:
        """Whether it has pages."""
        return self._sequence is not None

    def _append(self, token: int) -> None:
        self.ids.append(token)
        if token in self.options.eos_ids:
            self._finish("stop")
        elif len(self.ids) > self.max_length:
            self._finish("length")

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        if self._sequence is not None:
            self._sequence.close()
            self._sequence = None


class ContinuousBatch:
    """Requests to a language model that come and go: every `step` is one call of the model for all that run.

    A request runs once there are pages for all tokens that it may have, in the order of `add`; so it always ends. A
    step reads one token of every request that generates, and then as much of the prompts as may be read in a step. The
    tokens of a request are those of `LanguageModel.generate` with its prompt alone and an `attention_mask` of ones, as
    far as rounding does not decide between two of them; also those that its own `generator` draws.

    It is not safe for threads: call one method at a time.

    Args:
        model: the model; in eval mode, unless it has no dropout.
        cache: the cache, which is to have no other user.
        max_tokens_per_step: the largest number of tokens that a step reads.

    Raises:
        TypeError, ValueError: an argument of the constructor or of a method is not what is said there.

    Example:
        >>> import torch, fastattn
        >>> config = fastattn.nn.TransformerConfig(vocab_size=100, d_model=16, nhead=2, num_layers=2)
        >>> model = fastattn.nn.LanguageModel(config).eval()
        >>> batch = fastattn.nn.ContinuousBatch(model, fastattn.nn.PagedCache(pages=64))
        >>> first = batch.add([1, 5, 7], max_new_tokens=4)
        >>> len(batch.step()), len(first.tokens)
        (1, 1)
        >>> second = batch.add(torch.tensor([3]), max_new_tokens=2, do_sample=True)
        >>> while batch:
        ...     ended = [request for request in batch.step() if request.finish_reason]
        >>> len(first.tokens), len(second.tokens), second.finish_reason
        (4, 2, 'length')
    """

    def __init__(self, model: LanguageModel, cache: PagedCache, *, max_tokens_per_step: int = 512) -> None:
        from .models import LanguageModel  # which has a method that makes a batch

        if not isinstance(model, LanguageModel):
            raise TypeError(f"model must be a LanguageModel, got {type(model).__name__}")
        if not isinstance(cache, PagedCache):
            raise TypeError(f"cache must be a PagedCache, got {type(cache).__name__}")
        check_ints(1, max_tokens_per_step=max_tokens_per_step)
        self.model, self.cache, self.max_tokens_per_step = model, cache, max_tokens_per_step
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    def __len__(self) -> int:
        """Number of requests that wait or run."""
        return len(self._waiting) + len(self._running)

    def add(self, input_ids: Sequence[int] | Tensor, **options: object) -> Request:
        """A request for the tokens that follow a prompt, which waits until a step admits it.

        Args:
            input_ids: the prompt, ints or an int32 or int64 Tensor [n], where `padding_idx` is a token like others.
            options: the fields of `GenerationOptions`, but for beam search. Without a `generator` of its own, what a
                request draws depends on the others.

        Raises:
            TypeError, ValueError: an argument is not what is said above, the prompt is empty, or with `max_new_tokens`
                it is longer than the positions of the model or than all pages together.
        """
        model, given = self.model, GenerationOptions(**options)
        if given.num_beams > 1:
            raise ValueError(f"num_beams must be 1 for requests that come and go, got {given.num_beams}")
        if isinstance(input_ids, Tensor):
            check_tensor("input_ids", input_ids, "integer", ("n",))
            if input_ids.is_meta:
                raise ValueError("input_ids must hold numbers, got a meta tensor")
            input_ids = input_ids.tolist()
        elif not isinstance(input_ids, (list, tuple)):
            raise TypeError(f"input_ids must be a list of ints or a Tensor, got {type(input_ids).__name__}")
        for i in input_ids:
            check_ids(model.config.vocab_size, **{"each of input_ids": i})
        given.check_vocabulary(model.config.vocab_size)
        if not len(input_ids):
            raise ValueError("input_ids must have at least 1 token, got none")
        request = Request(list(input_ids), given)
        model.check_length("input_ids and max_new_tokens together", len(request.ids) + given.max_new_tokens)
        if self.cache.pages_of(request.max_length) > self.cache.pages:
            room = self.cache.pages * self.cache.page_size + 1
            got = request.max_length + 1
            raise ValueError(
                f"input_ids and max_new_tokens together must be at most the {room} tokens of all pages, got {got}"
            )
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request, whose pages are free at once. One that has ended already stays as it is."""
        if not isinstance(request, Request):
            raise TypeError(f"request must be a Request, got {type(request).__name__}")
        if request.finish_reason is not None:
            return
        requests = self._running if request.running else self._waiting
        if request not in requests:
            raise ValueError("request must be of this batch, got one of another")
        requests.remove(request)
        request._finish("cancelled")

    @torch.no_grad()
    def step(self, only: Collection[Request] | None = None) -> list[Request]:
        """Calls the model once, and returns the requests that have a token more: none where only prompts were read.

        After an error all requests are as before, and so are their generators.

        Args:
            only: which of the running requests take part, while no other is admitted, such as one alone to learn
                whether it is the one that fails; None lets all take part.

        Raises:
            TypeError: `only` is not what is said above.
            RuntimeError: nothing can run, as the pages are not the batch's own.
        """
        if only is None:
            self._admit()
        elif not isinstance(only, Collection):
            raise TypeError(f"only must be a list of requests or None, got {type(only).__name__}")
        left, counts = self.max_tokens_per_step, {}
        for request in self._running:  # by admission, so those that generate stand before those that read their prompts
            if only is not None and request not in only:
                continue
            if n := min(left, len(request.ids) - request._sequence.length):
                counts[request] = n
                left -= n
        if not counts:
            return []
        step = self.cache.step({request._sequence: n for request, n in counts.items()})
        with ExitStack() as after_errors:
            after_errors.callback(step.undo)
            ends = step.cu_seqlens[1:].tolist()
            wanted = {r: end - 1 for r, end in zip(counts, ends, strict=True) if r._sequence.length == len(r.ids)}
            ids = [i for r, n in counts.items() for i in r.ids[r._sequence.length - n : r._sequence.length]]
            tokens = self._next(ids, step, wanted)
            after_errors.pop_all()
        for request, token in zip(wanted, tokens, strict=True):
            request._append(token)
        self._running = [request for request in self._running if request.running]
        return list(wanted)

    def _admit(self) -> None:
        """Lets waiting requests run, as long as there are pages for the whole of the next one."""
        while self._waiting and self.cache.pages_of(self._waiting[0].max_length) <= self.cache.free:
            request = self._waiting.popleft()
            request._sequence = self.cache.open(request.max_length)
            self._running.append(request)
        if self._waiting and not self._running:
            needed = self.cache.pages_of(self._waiting[0].max_length)
            raise RuntimeError(
                f"cache must have {needed} free pages for the next request while none runs, got {self.cache.free}"
            )

    def _next(self, ids: list[int], step: PagedStep, wanted: dict[Request, int]) -> list[int]:
        """Reads these tokens, and returns the next one of each request that is wanted at a place among them."""
        row = torch.tensor([ids], device=self.model.embedding.weight.device)
        x = self.model.hidden(row, torch.ones_like(row), step)
        if not wanted:
            return []
        logits = self.model.head(x[0, list(wanted.values())])
        tokens = logits.argmax(dim=-1).tolist()
        with ExitStack() as after_errors:
            for i, request in enumerate(wanted):
                if not request.options.do_sample:
                    continue
                if (generator := request.options.generator) is not None:
                    after_errors.callback(generator.set_state, generator.get_state())
                tokens[i] = int(choose(logits[i : i + 1], request.options))
            after_errors.pop_all()
        return tokens


def generate_in_pages(model: LanguageModel, prompts: list[Tensor], cache: PagedCache, **options: object) -> Tensor:
    """The tokens that follow each prompt [n], as `LanguageModel.generate` returns them."""
    batch = ContinuousBatch(model, cache)
    requests = [batch.add(prompt, **options) for prompt in prompts]
    try:
        while batch:
            batch.step()
    finally:  # after an error, the cache is the caller's again
        for request in requests:
            batch.cancel(request)
    padding = GenerationOptions(**options).padding(model.config.padding_idx)
    longest = max((len(request.tokens) for request in requests), default=1)
    rows = [request.tokens + [padding] * (longest - len(request.tokens)) for request in requests]
    return torch.tensor(rows, dtype=torch.int64, device=model.embedding.weight.device).view(len(rows), longest)
