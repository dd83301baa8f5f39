"""The report of the standard suite: a table, a JSON document, a picture."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

from ..machine import machine, now, versions
from . import chart, third_party
from .cases import Job
from .run import Row
from .timing import Timing

SCHEMA = 1
METHOD = (
    "Each contender is checked against fp64 (error at most 2 naive errors + 4 eps), then all take turns. "
    "forward: without autograd. backward: torch.autograd.grad alone, over a kept graph. GFLOP/s: useful work only, "
    "4 B H (visible pairs) D forward, x2.5 backward, plus the projections of a layer (x2 backward). peak: by torch's "
    "allocator, above the inputs, over both passes for backward. vs torch: torch's fastest right median over this one."
)
_MASK_TITLES = {"none": "no mask", "causal": "causal", "pad": "padding", "both": "causal and padding"}
_HEADINGS = ("contender", "median ms", "p20-p80", "GFLOP/s", "of matmul", "peak MiB", "vs torch", "note")
AnyRow = TypeVar("AnyRow")


@dataclass(frozen=True)
class Report(Generic[AnyRow]):
    """Rows in the order in which they were measured, with the machine, the versions and the date of machine.py."""

    rows: list[AnyRow]
    device: str
    machine: dict[str, str | int]
    versions: dict[str, str]
    date: str

    @classmethod
    def of(cls, rows: list[AnyRow], device: str) -> Report[AnyRow]:
        """The report of rows that were just measured here."""
        has_others = any(isinstance(row, Row) and row.family == "other" for row in rows)
        return cls(rows, device, machine(device), versions() | (third_party.versions() if has_others else {}), now())

    def caption(self) -> str:
        """The machine, torch and the day, for below a picture."""
        hardware = self.machine.get("gpu", f"{self.machine['cpu']}, {self.machine['torch_threads']} threads")
        return f"{hardware}; torch {self.versions['torch']}; {self.date[:10]}"


@dataclass(frozen=True)
class Table:
    """Cells under headings, with a style for each line; the columns `words` hold words, the others figures."""

    title: str
    headings: tuple[str, ...]
    words: tuple[int, ...]
    lines: list[tuple[str, ...]]
    styles: list[str]


def print_table(report: Report[Row]) -> None:
    """Writes the report to stdout: with colours and rules to a terminal, as aligned plain text elsewhere."""
    print_tables(report, METHOD, [_table(job, list(rows)) for job, rows in groupby(report.rows, lambda row: row.job)])


def print_tables(report: Report, method: str, tables: list[Table]) -> None:
    """Writes where it was measured, how, and the tables to stdout, as `print_table` does."""
    head = [
        ", ".join(f"{name} {value}" for name, value in report.machine.items()),
        ", ".join(f"{name} {value}" for name, value in report.versions.items()) + f", {report.date}",
        method,
    ]
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _print_rich(head, tables)
    else:
        print("\n".join(head), end="\n\n")
        print("\n\n".join(map(_plain, tables)))


def as_json(report: Report[Row]) -> str:
    """The report as a JSON document with the statistics and samples of every row; times in ms, `schema` = SCHEMA."""
    return document(report, METHOD, [row_as_dict(row) for row in report.rows])


def document(report: Report, method: str, rows: list[dict[str, object]]) -> str:
    """A JSON document of these rows, with where and how they were measured."""
    about = {name: getattr(report, name) for name in ("date", "device", "machine", "versions")}
    return json.dumps({"schema": SCHEMA, **about, "method": method, "rows": rows}, indent=1)


def as_svg(report: Report[Row]) -> str:
    """The rates of fastattn's kernels and of their rivals as bars, a group for each job; torch's fastest is 1.

    Raises:
        ValueError: no fused backend of fastattn was timed next to torch's attention.
    """
    rows = [row for row in report.rows if row.speedup and row.contender != "fastattn reference"]
    groups = {
        _title(job): [_bar(row) for row in of_job]
        for job, of_job in ((job, list(of_job)) for job, of_job in groupby(rows, lambda row: row.job))
        if any(row.family == "fastattn" for row in of_job)
    }
    return chart.draw(
        "Times as fast as torch's fastest kernel",
        groups,
        f"Longer is faster; thin lines: p20 to p80 of the time. {report.caption()}",
    )


def _title(job: Job) -> str:
    (B, H, _, D), *_ = job.case.shapes()
    name, _, mask = job.case.name.partition("-")
    what, shape = ("attention", f" (B{B} H{H} D{D})") if job.level == "attention" else (f"{job.level} of {H * D}", "")
    return f"{what}, {name}, {_MASK_TITLES.get(mask, mask)}, {job.dtype}: {job.timed}{shape}"


def _bar(row: Row) -> chart.Bar:
    slow, fast = (row.speedup * row.timing.median / row.timing.percentile(percent) for percent in (80, 20))
    text = f"{row.speedup:.2f}x, {row.timing.median * 1e3:.3g} ms"
    kind = "ours" if row.family == "fastattn" else "other"
    return chart.Bar(row.contender, row.speedup, text, kind, (slow, fast))


def _table(job: Job, rows: list[Row]) -> Table:
    (B, H, n_q, D), (_, _, n_k, _), _ = job.case.shapes()
    title = f"{job}  (B{B} H{H} L{n_q}{'' if n_q == n_k else f'x{n_k}'} D{D})"
    styles = [
        {"n/a": "dim", "wrong": "red"}.get(row.verdict) or ("bold" if row.family == "fastattn" else "") for row in rows
    ]
    return Table(title, _HEADINGS, (0, len(_HEADINGS) - 1), list(map(_cells, rows)), styles)


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
        "" if row.peak_mib is None else f"{row.peak_mib:.1f}",
        "" if row.speedup is None else f"{row.speedup:.2f}x",
        row.note,
    )


def _plain(table: Table) -> str:
    lines = [table.headings, *table.lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines = [
        "  ".join(
            f"{cell:<{w}}" if i in table.words else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([table.title, *(f"  {line}".rstrip() for line in lines)])


def _print_rich(head: list[str], tables: list[Table]) -> None:
    from rich import box
    from rich import table as rich_table
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for line in head:
        console.print(line, style="dim", highlight=False, markup=False)
    for table in tables:
        drawn = rich_table.Table(
            title=table.title, title_justify="left", title_style="bold", header_style="bold",
            box=box.SIMPLE_HEAD, padding=0,  # for terminals of 80 columns
        )  # fmt: skip
        for i, heading in enumerate(table.headings):
            drawn.add_column(heading, justify="left" if i in table.words else "right", overflow="fold")
        for line, style in zip(table.lines, table.styles, strict=True):
            drawn.add_row(*map(Text, line), style=style)
        console.print(drawn)


def row_as_dict(row: Row) -> dict[str, object]:
    """A row, for JSON."""
    said = {name: getattr(row, name) for name in ("contender", "family", "verdict", "note")}
    names = ("max_error", "gflops", "gbps", "matmul_share", "peak_mib", "speedup")
    figures = {name: rounded(getattr(row, name)) for name in names}
    return {**job_as_dict(row.job), **said, **figures, "time_ms": timing_as_dict(row.timing)}


def job_as_dict(job: Job) -> dict[str, object]:
    """A job, for JSON."""
    (B, H, n_q, D), (_, H_kv, n_k, _), (*_, d_v) = job.case.shapes()
    return {
        "level": job.level,
        "case": job.case.name,
        "shape": {"B": B, "H": H, "H_kv": H_kv, "n_q": n_q, "n_k": n_k, "D": D, "d_v": d_v},
        "dtype": job.dtype,
        "pass": job.timed,
    }


def timing_as_dict(timing: Timing | None) -> dict[str, object] | None:
    """The statistics and samples in ms, for JSON."""
    return timing and {
        "median": _ms(timing.median),
        "p20": _ms(timing.percentile(20)),
        "p80": _ms(timing.percentile(80)),
        "repetitions": timing.repetitions,
        "samples": [_ms(seconds) for seconds in timing.seconds],
    }


def rounded(value: float | None) -> float | None:
    """The value to five digits, more than any measurement has."""
    return None if value is None else float(f"{value:.5g}")


def _ms(seconds: float) -> float:
    return rounded(seconds * 1e3)
