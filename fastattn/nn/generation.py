"""Generation of tokens by greedy search, sampling or beam search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..spec import accumulation_dtype, explaining
from .checks import check_bools, check_ids, check_ints, check_numbers


@dataclass
class Generation:
    """The state of a model that generates B sequences.

    logits: the logits of the next token of each sequence, [B, vocab_size].
    step: appends a token to each sequence, int64 [B], and returns the logits of the token after it.
    select: keeps the sequences with these numbers, int64 [B'].
    """

    logits: Tensor
    step: Callable[[Tensor], Tensor]
    select: Callable[[Tensor], None]


@dataclass(frozen=True)
class GenerationOptions:
    """The options of `generate`, with the names of Hugging Face transformers.

    Args:
        max_new_tokens: the largest number of new tokens.
        eos_token_id: the token that ends a sequence, and is part of it, or a list or a Tensor of several, any of which
            ends one; None if there is none.
        pad_token_id: the token after the end of a sequence; None is the model's `padding_idx`, or else the first
            `eos_token_id`.
        do_sample: draw tokens, instead of taking the likeliest.
        temperature: divides the logits before drawing.
        top_k: draw from this number of the likeliest tokens only.
        top_p: draw only from the smallest set of likeliest tokens that has this probability together.
        generator: the generator to draw from; None is PyTorch's default generator.
        num_beams: above 1, beam search over this number of sequences.
        length_penalty: beam search ranks a finished sequence of n tokens by log p / n ** length_penalty; above 0
            prefers long ones.
        early_stopping: stop as soon as `num_beams` sequences have ended, not only when no other can be worth more.

    Raises:
        TypeError: an option is of another type.
        ValueError: an option is out of its range, or two options exclude each other.

    Sources:
        Holtzman et al., The Curious Case of Neural Text Degeneration (2020), for top_p. Wu et al., Google's Neural
        Machine Translation System (2016), section 7, for the penalty.
    """

    max_new_tokens: int
    eos_token_id: int | list[int] | tuple[int, ...] | Tensor | None = None
    pad_token_id: int | None = None
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        check_ints(1, max_new_tokens=self.max_new_tokens, num_beams=self.num_beams)
        check_ints(1, top_k=1 if self.top_k is None else self.top_k)
        check_numbers("from 1e-37 to 1e37", lambda x: 1e-37 <= x <= 1e37, temperature=self.temperature)
        check_numbers("above 0 and at most 1", lambda x: 0 < x <= 1, top_p=1 if self.top_p is None else self.top_p)
        check_numbers("from -32 to 32", lambda x: -32 <= x <= 32, length_penalty=self.length_penalty)
        check_bools(do_sample=self.do_sample, early_stopping=self.early_stopping)
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator or None, got {self.generator!r}")
        check_ints(0, pad_token_id=0 if self.pad_token_id is None else self.pad_token_id)
        for i in self.eos_ids:
            check_ints(0, eos_token_id=i)
        drawing = [name for name in ("temperature", "top_k", "top_p") if getattr(self, name) not in (None, 1.0)]
        drawing += [] if self.generator is None else ["generator"]
        if drawing and not self.do_sample:
            raise ValueError(f"do_sample must be True with {drawing[0]}, got False")
        if self.do_sample and self.num_beams > 1:
            raise ValueError(f"num_beams must be 1 with do_sample, got {self.num_beams}")

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a sequence."""
        ids = self.eos_token_id
        if isinstance(ids, Tensor):
            if ids.is_meta:
                raise ValueError("eos_token_id must hold numbers, got a meta tensor")
            ids = ids.tolist()
        return () if ids is None else tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)

    def check_vocabulary(self, size: int) -> None:
        """Raises where a token is not one of a vocabulary of this size."""
        if self.pad_token_id is not None:
            check_ids(size, pad_token_id=self.pad_token_id)
        for i in self.eos_ids:
            check_ids(size, eos_token_id=i)

    def padding(self, padding_idx: int | None) -> int:
        """The token after the end of a sequence, for a model with this `padding_idx`."""
        return next((x for x in (self.pad_token_id, padding_idx, *self.eos_ids) if x is not None), 0)

    def ends(self, tokens: Tensor) -> Tensor:
        """bool, which of the tokens end a sequence."""
        return torch.isin(tokens, torch.tensor(self.eos_ids, dtype=torch.int64, device=tokens.device))


_TOKENS = "max_new_tokens=..., which counts no token of the prompt"
GenerationOptions.__init__ = explaining(GenerationOptions, {"max_length": _TOKENS, "max_tokens": _TOKENS})


def generate(begin: Callable[[int], Generation], padding_idx: int | None, **options: object) -> Tensor:
    """Generates tokens by the options of `GenerationOptions`.

    Args:
        begin: makes the `Generation`, given `max_new_tokens`.
        padding_idx: the default of `pad_token_id`.
        options: the fields of `GenerationOptions`.

    Returns:
        The new tokens, int64 [B, n]; n is `max_new_tokens`, or less if every sequence has ended before.
    """
    options = GenerationOptions(**options)
    padding = options.padding(padding_idx)
    generation = begin(options.max_new_tokens)
    options.check_vocabulary(generation.logits.shape[-1])
    search = _beam_search if options.num_beams > 1 else _one_by_one
    return search(generation, options, padding)


def _one_by_one(generation: Generation, options: GenerationOptions, padding: int) -> Tensor:
    """The tokens of each sequence on its own, greedily or by sampling."""
    logits = generation.logits
    ended = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    tokens: list[Tensor] = []
    while True:
        chosen = choose(logits, options)
        tokens.append(chosen.masked_fill(ended, padding))
        if options.eos_ids:
            ended = ended | options.ends(chosen)
        if len(tokens) == options.max_new_tokens or bool(ended.all()):
            return torch.stack(tokens, dim=1)
        logits = generation.step(tokens[-1])


def choose(logits: Tensor, options: GenerationOptions) -> Tensor:
    """The next token of each sequence, int64 [B], from logits [B, vocab_size]: the likeliest one, or a drawn one."""
    if not options.do_sample:
        return logits.argmax(dim=-1)
    logits = logits.to(accumulation_dtype(logits.dtype))  # or many ids would be equal, and sums of probabilities off
    temperature = float(options.temperature)  # as an int or a fraction it may be too large for PyTorch
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # which no temperature makes infinite
    probabilities = filtered(scaled, options.top_k, options.top_p).softmax(dim=-1)
    return torch.multinomial(probabilities, 1, generator=options.generator).squeeze(1)


def filtered(logits: Tensor, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Logits [..., vocab_size] with -inf for what may not be drawn; of equal logits the smaller ids come first.

    Example:
        >>> filtered(torch.tensor([0.5, 0.3, 0.2]).log(), top_p=0.6).exp()
        tensor([0.5000, 0.3000, 0.0000])
    """
    if top_k is None and top_p is None:
        return logits
    descending, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    drop = rank >= (logits.shape[-1] if top_k is None else top_k)
    if top_p is not None:
        probabilities = descending.masked_fill(drop, -torch.inf).softmax(dim=-1)
        likelier = probabilities.cumsum(dim=-1) - probabilities  # the sum over the likelier tokens
        drop = drop | ((likelier >= float(top_p)) & (rank > 0))  # a top_p may be 0 in fp32
    drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, drop.expand_as(logits))
    return logits.masked_fill(drop, -torch.inf)


def _beam_search(generation: Generation, options: GenerationOptions, padding: int) -> Tensor:
    """The best sequence of each sample, of all that stayed among its `num_beams` likeliest beginnings.

    With K beams, running sequences are tokens [B, K, n] with scores [B, K], the sum of their log p. The K best
    sequences that have ended are kept in `ended`, with their final scores in `worth`.
    """
    B, vocab_size = generation.logits.shape
    device, K, n_max = generation.logits.device, options.num_beams, options.max_new_tokens
    sample = torch.arange(B, device=device)[:, None]
    generation.select(sample.expand(B, K).flatten())
    logits = generation.logits[:, None].expand(B, K, vocab_size)
    scores = torch.full((B, K), -torch.inf, device=device)
    scores[:, 0] = 0  # the K beams of a sample are still equal, and only one of them counts
    tokens = torch.empty(B, K, 0, dtype=torch.int64, device=device)
    ended = torch.full((B, K, n_max), padding, device=device)
    worth = torch.full((B, K), -torch.inf, device=device)
    done = torch.zeros(B, 1, dtype=torch.bool, device=device)  # samples that would have stopped by themselves

    def keep_best(new: Tensor, new_worth: Tensor) -> None:
        """Puts new sequences [B, X, n] among the K ended ones."""
        nonlocal ended, worth
        new = torch.nn.functional.pad(new, (0, n_max - new.shape[2]), value=padding)
        worth, best = torch.cat([worth, new_worth.masked_fill(done, -torch.inf)], dim=1).topk(K, dim=1)
        ended = torch.cat([ended, new], dim=1)[sample, best]

    for n in range(1, n_max + 1):
        total = scores[..., None] + logits.float().log_softmax(dim=-1)
        # With E ids that end a sequence at most E * K candidates end, so K are left to run.
        wanted = K * (1 + max(1, len(options.eos_ids)))
        candidates, index = total.flatten(1).topk(min(wanted, K * vocab_size), dim=1)
        beam, token = index // vocab_size, index % vocab_size
        sequences = torch.cat([tokens[sample, beam], token[..., None]], dim=2)
        if options.eos_ids:
            ends = options.ends(token)
            ends_well = ends & (torch.arange(candidates.shape[1], device=device) < K)
            keep_best(sequences, (candidates / n**options.length_penalty).masked_fill(~ends_well, -torch.inf))
            candidates = candidates.masked_fill(ends, -torch.inf)
        scores, running = candidates.topk(K, dim=1)
        tokens, beam = sequences[sample, running], beam[sample, running]
        if n == n_max:
            break
        done = done | _settled(scores, worth, n, options)[:, None]
        if bool(done.all()):
            break
        generation.select((sample * K + beam).flatten())
        logits = generation.step(tokens[:, :, -1].flatten()).unflatten(0, (B, K))
    if n == n_max:  # those that have not ended count as they stand
        keep_best(tokens, scores / n**options.length_penalty)
    best = ended[:, 0]
    if not options.eos_ids:
        return best
    length = 1 + (~options.ends(best)).int().cumprod(dim=1).sum(dim=1).clamp(max=n_max - 1)
    return best[:, : int(length.max()) if B else 1]


def _settled(scores: Tensor, worth: Tensor, n: int, options: GenerationOptions) -> Tensor:
    """bool [B], whether no running sequence can come to be worth more than the K ended ones."""
    if options.early_stopping:
        return worth[:, -1] > -torch.inf
    # log p only falls. Divided by a power of the length that grows, it is worth most at the greatest length.
    length = options.max_new_tokens if options.length_penalty > 0 else n
    return worth[:, -1] >= scores[:, 0] / length**options.length_penalty
