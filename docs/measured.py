"""Measured figures, files of benchmarks/results/, as charts and as tables: python -m docs.measured TABLE MACHINE."""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from statistics import median, quantiles

from fastattn.bench import chart

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
_ZEN4 = "epyc-zen4-2-cores"
_MASKS = {"none": "no mask", "causal": "causal", "pad": "padding", "both": "causal and padding"}
_OURS = ("fastattn", "swapped", "packed")
_OTHERS = ("SDPA", "OpenVINO", "onnxruntime", "zentorch", "FlexAttention")


def attention(machine: str) -> str:
    """Speed-ups over torch's scaled_dot_product_attention, forward / backward, by dtype, shape and mask."""
    document = _read(machine, "limit")
    rows = [row for row in document["rows"] if row["rival"].startswith("SDPA")]
    ratio = {(row["case"], row["dtype"], row["pass"]): f"{row['ratio']:.2f}" for row in rows}
    shapes = {row["case"].split("-")[0]: row["shape"] for row in rows if row["case"].endswith("-none")}
    tables = [_about(document)]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        lines = []
        for length, shape in shapes.items():
            pairs = ([ratio[f"{length}-{mask}", dtype, p] for p in ("forward", "backward")] for mask in _MASKS)
            name = f"{length} B{shape['B']} H{shape['H']} D{shape['D']}"
            lines.append((name, *(" / ".join(pair) for pair in pairs)))
        tables.append(_table((dtype, *_MASKS), lines))
    others = [row for row in rows if row["case"] in ("decode", "L512-dropout")]
    lines = [(_shape(row), row["dtype"], row["pass"], f"{row['ratio']:.2f}") for row in others]
    return "\n\n".join([*tables, _table(("other calls", "dtype", "pass", "speed-up"), lines)])


def rivals(machine: str) -> str:
    """Times of attention by other libraries, forward, over fastattn's; a dash where one does not compute it."""
    document = _read(machine, "rivals")
    about = _about(document, *(name for name in document["versions"] if name in _OTHERS))
    others = [name for name in _OTHERS if any(row["contender"].startswith(name) for row in document["rows"])]
    lines = []
    for (dtype, name), of_job in groupby(document["rows"], lambda row: (row["dtype"], row["case"])):
        ms = {row["contender"]: row["time_ms"]["median"] for row in of_job if row["time_ms"]}
        best = [min((t for who, t in ms.items() if who.startswith(other)), default=None) for other in others]
        cells = ("-" if time is None else f"{time / ms['fastattn cpu']:.2f}" for time in best)
        lines.append((f"{dtype} {name}", f"{ms['fastattn cpu']:.3g}", *cells))
    return f"{about}\n\n{_table(('', 'fastattn, ms', *others), lines)}"


def layers(machine: str) -> str:
    """Speed-ups of MultiHeadAttention over torch.nn.MultiheadAttention, by shape, dtype and mode."""
    document = _read(machine, "layers")
    ratio = {(f"L{row['L']} B{row['B']} {row['dtype']}", row["mode"]): row["ratio"] for row in document["rows"]}
    return f"{_about(document)}\n\n{_table_of_pairs('layer', ratio)}"


def encoder(machine: str) -> str:
    """Times of an encoder on a padded batch in ms, and speed-ups over torch.nn's."""
    return _times(_read(machine, "padding-free"), "mode", ("torch", "torch padded", "fastattn", "swapped"))


def packed(machine: str) -> str:
    """Times of a model of transformers on padded batches in ms, and speed-ups over the model as it was."""
    return _times(_read(machine, "packed-transformers"), "what", ("transformers", "swapped", "packed"))


def generation(machine: str) -> str:
    """Time per generated token with sdpa over that with fastattn, by dtype, batch, padding and cached tokens."""
    document = _read(machine, "generation")
    speed_up = {
        (f"{row['dtype']}, batch {row['batch']}, {row['real']:.0%} real", row["cached"]): (
            median(row["seconds_per_token"]["sdpa"]) / median(row["seconds_per_token"]["fastattn"])
        )
        for row in document["rows"]
    }
    return f"{_about(document)}\n\n{_table_of_pairs('cached tokens', speed_up)}"


def recipes(machine: str, name: str = "") -> str:
    """A recipe of docs/recipes.md beside the naive way, in time and memory; without a name, what it was measured on."""
    document = _read(machine, "recipes")
    if not name:
        return _about(document)
    row = next(row for row in document["rows"] if row["what"] == name)
    ms = {who: 1e3 * median(row["seconds"][who]) for who in ("fastattn", "naive")}
    cost = [f"{ms[who]:.{1 if ms[who] < 100 else 0}f} ms, {row['peak_bytes'][who] / 2**20:.1f} MiB" for who in ms]
    low, middle, high = _quartiles(row["seconds"], "naive", "fastattn")
    speed_up = f"{middle:.1f} times as fast ({low:.1f}-{high:.1f})"
    return f"**{cost[0]}**, the naive way {cost[1]}: {speed_up}. {row['shape']}, fp32."


def _times(document: dict, what: str, names: tuple[str, ...]) -> str:
    """Median times of contenders in ms, and how many times as fast as the first fastattn's are, with quartiles."""
    ours = [name for name in names if name in _OURS]
    lines = []
    for row in document["rows"]:
        ms = {name: 1e3 * median(row["seconds"][name]) for name in names}
        quartiles = (_quartiles(row["seconds"], names[0], name) for name in ours)
        speed_ups = (f"{middle:.2f} ({low:.2f}-{high:.2f})" for low, middle, high in quartiles)
        lines.append((row[what], *(f"{ms[name]:.0f}" for name in names), *speed_ups))
    headings = ("", *(f"{name}, ms" for name in names), *(f"{name}, speed-up" for name in ours))
    fills = {row["fill"] for row in document["rows"] if "fill" in row}
    about = "".join(f" Fill {fill:.3f} = 1 / {1 / fill:.2f}." for fill in fills)
    rounds = [len(row["seconds"][names[0]]) for row in document["rows"]]
    about += f" Medians of {min(rounds)} to {max(rounds)} rounds; speed-ups: median and quartiles of those in a round."
    return f"{_about(document)}{about}\n\n{_table(headings, lines)}"


def _quartiles(seconds: dict[str, list[float]], before: str, after: str) -> list[float]:
    """All three of how many times as fast it is in a round; the ratio of two medians need not lie between them."""
    in_a_round = [a / b for a, b in zip(seconds[before], seconds[after], strict=True)]
    return quantiles(in_a_round, method="inclusive")


def chart_of_times(document: dict, title: str, what: str, *names: str) -> str:
    """Bars of how many times as fast each is as the last of the names, a group for each row; thin lines: quartiles."""
    groups = {}
    for row in document["rows"]:
        groups[row[what]] = []
        for name in names:
            low, middle, high = _quartiles(row["seconds"], names[-1], name)
            text = f"{middle:.2f}x, {1e3 * median(row['seconds'][name]):.0f} ms"
            line = None if name == names[-1] else (low, high)
            groups[row[what]].append(chart.Bar(name, middle, text, "ours" if name in _OURS else "other", line))
    fills = {f" {row['fill']:.0%} of the batches are tokens." for row in document["rows"] if "fill" in row}
    return chart.draw(title, groups, f"Medians; thin lines: quartiles.{''.join(fills)} {_about(document)}")


def chart_of_attention(document: dict, dtype: str) -> str:
    """Bars of the forward speed-ups over torch's scaled_dot_product_attention in a dtype, a group for each mask."""
    groups = {title: [chart.Bar("PyTorch", 1.0, "1.00x", "other")] for title in _MASKS.values()}
    for row in document["rows"]:
        length, _, mask = row["case"].partition("-")
        if mask in _MASKS and (row["dtype"], row["pass"]) == (dtype, "forward") and row["rival"].startswith("SDPA"):
            groups[_MASKS[mask]].append(chart.Bar(length, row["ratio"], f"{row['ratio']:.2f}x"))
    title = f"Attention in {dtype}, forward: times as fast as PyTorch"
    return chart.draw(title, groups, f"L: tokens of a sequence. {_about(document)}")


CHARTS = {
    "packed.svg": lambda: chart_of_times(
        _read(_ZEN4, "packed-transformers"),
        "MiniLM on padded batches: times as fast",
        "what",
        *("packed", "swapped", "transformers"),
    ),
    "encoder.svg": lambda: chart_of_times(
        _read(_ZEN4, "padding-free"),
        "An encoder of 6 layers on padded batches: times as fast",
        "mode",
        *("fastattn", "swapped", "torch padded", "torch"),
    ),
    "attention-fp32.svg": lambda: chart_of_attention(_read(_ZEN4, "limit"), "fp32"),
    "attention-bf16.svg": lambda: chart_of_attention(_read(_ZEN4, "limit"), "bf16"),
}
"""The functions that draw files of pictures/ from measured figures."""

TABLES = {
    "attention": attention,
    "layers": layers,
    "encoder": encoder,
    "packed": packed,
    "generation": generation,
    "recipes": recipes,
    "rivals": rivals,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.measured", description="Prints a table of measured figures.")
    parser.add_argument("table", choices=TABLES)
    machines = {path.name.rpartition("-cores-")[0] + "-cores" for path in RESULTS.glob("*-cores-*.json")}
    parser.add_argument("machine", choices=sorted(machines))
    parser.add_argument("name", nargs="*", help="of the recipe")
    args = parser.parse_args()
    print(TABLES[args.table](args.machine, *args.name))


def _read(machine: str, suite: str) -> dict:
    return json.loads((RESULTS / f"{machine}-{suite}.json").read_text())


def _about(document: dict, *others: str) -> str:
    """The machine, the commit of the figures, and the versions of torch, Python and `others`."""
    machine, versions = document["machine"], document["versions"]
    threads = machine["torch_threads"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("fastattn", "torch", *others))
    return (
        f"{machine['cpu']}, {threads} thread{'s' * (threads > 1)} on {machine['cores']} cores; {named}, "
        f"Python {versions['python']}."
    )


def _shape(row: dict) -> str:
    shape = row["shape"]
    return f"{row['case']}: n_q {shape['n_q']}, n_k {shape['n_k']}, B{shape['B']} H{shape['H']} D{shape['D']}"


def _table_of_pairs(corner: str, numbers: dict[tuple[str, object], float]) -> str:
    """A table of numbers by row and column."""
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*numbers, strict=True))
    lines = [(row, *(f"{numbers[row, column]:.2f}" for column in columns)) for row in rows]
    return _table((corner, *map(str, columns)), lines)


def _table(headings: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    rule = ("---", *("--:" for _ in headings[1:]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *lines))


if __name__ == "__main__":
    main()
