"""Measurements for people and programs: a table, a JSON document, a picture."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby
from pathlib import Path

from .machine import machine, now, versions
from .run import Row

SCHEMA = 1
METHOD = (
    "Each contender is checked against fp64 (error at most 2 naive errors + 4 eps), then all take turns. "
    "forward: without autograd. backward: torch.autograd.grad alone, over a kept graph. GFLOP/s: useful work only, "
    "4 B H (visible pairs) D forward, x2.5 backward, plus the projections of a layer (x2 backward). peak: by torch's "
    "allocator, above the inputs, over both passes for backward. vs torch: torch's fastest right median over this one."
)
_MASK_TITLES = {"none": "no mask", "causal": "causal", "pad": "padding", "both": "causal and padding"}
# Colours of Okabe and Ito, which colour-blind readers tell apart.
_STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"))
_HEADINGS = ("contender", "median ms", "p20-p80", "GFLOP/s", "of matmul", "peak MiB", "vs torch", "note")
_LEFT = (0, len(_HEADINGS) - 1)  # columns of words; the others are figures


@dataclass(frozen=True)
class Report:
    """What was measured where: `rows` in the order they were measured; the rest as in machine.py."""

    rows: list[Row]
    device: str
    machine: dict[str, str | int]
    versions: dict[str, str]
    date: str

    @classmethod
    def of(cls, rows: list[Row], device: str) -> Report:
        """The report of rows that were just measured here."""
        return cls(rows, device, machine(device), versions(), now())


def print_table(report: Report) -> None:
    """Writes the report to stdout: with colours and rules to a terminal, as aligned plain text elsewhere."""
    head = [
        ", ".join(f"{name} {value}" for name, value in report.machine.items()),
        ", ".join(f"{name} {value}" for name, value in report.versions.items()) + f", {report.date}",
        METHOD,
    ]
    if sys.stdout.isatty() and _has_rich():
        _print_rich(head, report.rows)
    else:
        print("\n".join(head), end="\n\n")
        print("\n\n".join(_plain(title, rows) for title, rows in _groups(report.rows)))


def as_json(report: Report) -> str:
    """The report as a JSON document with the statistics and samples of every row; times in ms, `schema` = SCHEMA."""
    document = {
        "schema": SCHEMA,
        "date": report.date,
        "device": report.device,
        "machine": report.machine,
        "versions": report.versions,
        "method": METHOD,
        "rows": [_row_as_dict(row) for row in report.rows],
    }
    return json.dumps(document, indent=1)


def plot(report: Report, path: Path) -> None:
    """Draws the speed-up of fastattn's fused backends by length, one panel for each pass and mask, as PNG or SVG.

    Raises:
        ValueError: no row has such a speed-up.
    """
    from matplotlib.figure import Figure  # no pyplot: nothing here needs a window
    from matplotlib.ticker import FuncFormatter, NullFormatter

    rows = [row for row in report.rows if row.job.level == "attention" and row.family == "fastattn" and row.speedup]
    rows = [row for row in rows if row.contender != "fastattn reference"]
    if not rows:
        raise ValueError("there is nothing to draw: no fused backend of fastattn was timed next to torch's attention")
    passes = list(dict.fromkeys(row.job.timed for row in rows))
    masks = sorted({_mask(row) for row in rows}, key=list(_MASK_TITLES).index)
    series = list(dict.fromkeys((row.contender, row.job.dtype) for row in rows))
    lengths = list(dict.fromkeys(_shape(row) for row in rows))

    figure = Figure(figsize=(1.6 + 2.6 * len(masks), 1.9 + 2.5 * len(passes)), layout="constrained")
    panels = figure.subplots(len(passes), len(masks), sharex=True, sharey=True, squeeze=False)
    for line, timed in zip(panels, passes, strict=True):
        for panel, mask in zip(line, masks, strict=True):
            for (contender, dtype), (colour, marker) in zip(series, cycle(_STYLES), strict=False):
                drawn = [
                    row
                    for row in rows
                    if (row.job.timed, _mask(row), row.contender, row.job.dtype) == (timed, mask, contender, dtype)
                ]
                _draw_series(panel, drawn, lengths, f"{contender}, {dtype}", colour, marker)
            panel.axhline(1, color="black", linewidth=1)
            panel.set_title(f"{timed}, {_MASK_TITLES[mask]}", fontsize=9)
            panel.set_yscale("log", base=2)
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
            panel.yaxis.set_minor_formatter(NullFormatter())
            panel.set_xticks(range(len(lengths)), lengths, fontsize=7)
            panel.margins(x=0.2, y=0.15)
            panel.grid(axis="y", color="0.85", linewidth=0.6)
            panel.spines[["top", "right"]].set_visible(False)
    figure.supylabel("speed-up over torch's fastest attention", fontsize=9)
    figure.suptitle("fastattn next to torch.scaled_dot_product_attention, in the same run", fontsize=11)
    hardware = report.machine.get("gpu", f"{report.machine['cpu']}, {report.machine['torch_threads']} threads")
    caption = f"{hardware}; torch {report.versions['torch']}; {report.date[:10]}. Line at 1x: torch. Bars: p20 to p80."
    handles, labels = panels[0, 0].get_legend_handles_labels()
    columns = min(len(series), 3)
    legend = {"loc": "outside lower center", "ncols": columns, "frameon": False, "fontsize": 8, "title_fontsize": 7}
    figure.legend(handles, labels, title=caption, **legend)
    figure.savefig(path, dpi=160)


def _draw_series(panel, rows: list[Row], lengths: list[str], label: str, colour: str, marker: str) -> None:
    x = [lengths.index(_shape(row)) for row in rows]
    y = [row.speedup for row in rows]
    spread = [
        [row.speedup - row.speedup * row.timing.median / row.timing.percentile(80) for row in rows],
        [row.speedup * row.timing.median / row.timing.percentile(20) - row.speedup for row in rows],
    ]
    panel.errorbar(x, y, spread, label=label, color=colour, marker=marker, markersize=5, linewidth=1.2, capsize=2)
    for x_value, y_value in zip(x, y, strict=True):
        panel.annotate(
            f"{y_value:.1f}",
            (x_value, y_value),
            (6, 4),
            textcoords="offset points",
            fontsize=7,
            color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},  # readable on the line
        )


def _mask(row: Row) -> str:
    return row.job.case.name.partition("-")[2]


def _shape(row: Row) -> str:
    (B, H, n_q, D), *_ = row.job.case.shapes()
    return f"L{n_q}\nB{B} H{H}\nD{D}"


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The title and the rows of each job."""
    for job, group in groupby(rows, key=lambda row: row.job):
        (B, H, n_q, D), (_, _, n_k, _), _ = job.case.shapes()
        yield f"{job}  (B{B} H{H} L{n_q}{'' if n_q == n_k else f'x{n_k}'} D{D})", list(group)


def _cells(row: Row) -> tuple[str, ...]:
    if row.verdict != "right":
        return (row.contender, row.verdict, "", "", "", "", "", row.note)
    low, high = (row.timing.percentile(percent) * 1e3 for percent in (20, 80))
    return (
        row.contender,
        f"{row.timing.median * 1e3:.3g}",
        f"{low:.3g}-{high:.3g}",
        f"{row.gflops:.0f}",
        f"{row.matmul_share:.0%}",
        f"{row.peak_mib:.1f}",
        "" if row.speedup is None else f"{row.speedup:.2f}x",
        row.note,
    )


def _plain(title: str, rows: list[Row]) -> str:
    table = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            f"{cell:<{w}}" if i in _LEFT else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    ]
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])


def _print_rich(head: list[str], rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for line in head:
        console.print(line, style="dim", highlight=False, markup=False)
    for title, group in _groups(rows):
        table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", expand=False)
        for i, heading in enumerate(_HEADINGS):
            table.add_column(heading, justify="left" if i in _LEFT else "right", no_wrap=heading not in ("note",))
        for row in group:
            style = {"n/a": "dim", "wrong": "red"}.get(row.verdict) or ("bold" if row.family == "fastattn" else "")
            table.add_row(*map(Text, _cells(row)), style=style)
        console.print(table)


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def _row_as_dict(row: Row) -> dict[str, object]:
    case = row.job.case
    (B, H, n_q, D), (_, H_kv, n_k, _), (*_, d_v) = case.shapes()
    timing = row.timing
    return {
        "level": row.job.level,
        "case": case.name,
        "shape": {"B": B, "H": H, "H_kv": H_kv, "n_q": n_q, "n_k": n_k, "D": D, "d_v": d_v},
        "dtype": row.job.dtype,
        "pass": row.job.timed,
        "contender": row.contender,
        "family": row.family,
        "verdict": row.verdict,
        "note": row.note,
        "gflops": _rounded(row.gflops),
        "matmul_share": _rounded(row.matmul_share),
        "peak_mib": _rounded(row.peak_mib),
        "speedup": _rounded(row.speedup),
        "time_ms": timing
        and {
            "median": _ms(timing.median),
            "p20": _ms(timing.percentile(20)),
            "p80": _ms(timing.percentile(80)),
            "repetitions": timing.repetitions,
            "samples": [_ms(seconds) for seconds in timing.seconds],
        },
    }


def _rounded(value: float | None) -> float | None:
    """Five digits, which is more than any of these means."""
    return None if value is None else float(f"{value:.5g}")


def _ms(seconds: float) -> float:
    return _rounded(seconds * 1e3)
