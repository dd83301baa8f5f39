"""Prints what each backend computes, feature by feature and function by function: python -m docs.features."""

from __future__ import annotations

from dataclasses import fields

import torch

from fastattn.backends import BACKENDS
from fastattn.spec import FEATURES, Mask

_MEANINGS = {
    "causal": "keys at the query's own position and before it",
    "q_offset": "where the first query stands: for all, for each sample, or for each query",
    "window": "so many keys to the left and to the right",
    "real_keys": "padding among the keys, in any pattern",
    "real_queries": "padding among the queries",
    "segment_ids": "several documents in a row, in any order",
    "dense": "any boolean mask",
    "bias": "any float added to the scores, with its gradient",
    "relative_bias": "a small table by the distance from query to key, with its gradient",
    "softcap": "bounded scores: softcap * tanh(score / softcap)",
    "alibi_slopes": "a penalty by distance, with its gradient",
    "sinks": "one more logit for each head, with its gradient",
    "dropout": "weights dropped at random, the same ones on every backend",
}
_ARGUMENTS = {"dropout": "dropout_p=...", "relative_bias": "bias=RelativeBias(...)"}
_FUNCTIONS = {
    "forward": "`attention` and what is built on it, forward",
    "backward": "the same, backward",
    "weights": "`attention_weights`, `attention_with_weights`",
    "received": "`attention_received`",
    "top_keys": "`top_keys`",
    "forward_paged": "`attention_paged`, without copies",
    "forward_quantized": "the same with pages of int8 and float8_e4m3fn",
}


def main() -> None:
    names = [f"`{backend.NAME}`" for backend in BACKENDS]
    device = torch.device("cpu")  # each backend gives the same answers for every device
    of_mask = [field.name for field in fields(Mask)]
    rows = []
    for name in [*of_mask, *sorted(FEATURES - set(of_mask))]:
        argument = f"`Mask({name}=...)`" if name in of_mask else f"`{_ARGUMENTS.get(name, f'{name}=...')}`"
        rows.append((argument, _MEANINGS[name], *(_answer(name in b.features(device)) for b in BACKENDS)))
    _print_table(("argument", "what it is", *names), rows)
    print()
    rows = [(what, *(_answer(name not in b.lacks(device)) for b in BACKENDS)) for name, what in _FUNCTIONS.items()]
    _print_table(("function", *names), rows)


def _answer(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _print_table(headings: tuple[str, ...], rows: list[tuple]) -> None:
    for cells in (headings, ["---"] * len(headings), *rows):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
