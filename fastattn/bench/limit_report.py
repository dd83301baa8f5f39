"""The report of the suite "limit": tables, a JSON document, a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .limit import Figure
from .report import STYLES, Report, Table, document, job_as_dict, print_tables, rounded, timing_as_dict

METHOD = (
    "Both sides of a line are checked against fp64 (error at most 2 naive errors + 4 eps; from L2048 on, the first "
    "and the last head), then take turns with the FMA ceiling. ratio: the rival's median over ours. SDPA: torch's "
    "scaled_dot_product_attention by the kernel it chooses (flash, and math under dropout, whose answer cannot be "
    "checked); where forcing the other one is faster the note says so. backward: torch.autograd.grad alone, over a "
    "kept graph; the math kernel is quick at it since its forward, three times as long, leaves it the weights. "
    "GFLOP/s: useful work only, 4 B H (visible pairs) D forward, x2.5 backward. of ceiling: the share of what "
    "multiply-adds on registers alone reach, in fp32 on all threads, in the same rounds. noise: p80 / p20 - 1 of the "
    "unsteadiest of the three; where it is large the machine was busy, and the line says little. Targets are for 2 "
    "threads."
)
_HEADINGS = (
    *("figure", "median ms", "rival", "its ms", "ratio", "target", ""),
    *("GFLOP/s", "of ceiling", "target", "", "noise", "note"),
)
_WORDS = (0, 2, 6, 10, 12)
_IN_WORDS = {True: "met", False: "not met", None: ""}


def print_table(report: Report[Figure]) -> None:
    """Writes the figures to stdout, by section, and last how many targets are met."""
    sections = dict.fromkeys(map(_section, report.rows))
    print_tables(report, METHOD, [_table(name, [f for f in report.rows if _section(f) == name]) for name in sections])
    outcomes = [met for row in report.rows for met in (row.ratio_met, row.share_met) if met is not None]
    print(f"\n{sum(outcomes)} of {len(outcomes)} targets met")


def as_json(report: Report[Figure]) -> str:
    """The report as a JSON document with targets, ratios, shares and the samples of both sides."""
    return document(report, METHOD, list(map(_figure_as_dict, report.rows)))


def _section(figure: Figure) -> str:
    job = figure.job
    if figure.duel.rival:
        return "fastattn against itself"
    if job.case.timed == "limit":
        return "decoding and dropout against torch"
    return f"{job.dtype} {job.timed} against torch"


def _table(section: str, figures: list[Figure]) -> Table:
    styles = ["red" if f.failed else "" if f.ratio_met and f.share_met is not False else "yellow" for f in figures]
    return Table(section, _HEADINGS, _WORDS, list(map(_cells, figures)), styles)


def _cells(figure: Figure) -> tuple[str, ...]:
    name = str(figure.job).partition(" ")[2]  # all of them are attention
    target = f"{figure.target:.3g}x"
    if figure.verdict != "right":
        return (
            name,
            figure.verdict,
            figure.duel.rival_name,
            "",
            "",
            target,
            "not met",
            "",
            "",
            "",
            "",
            "",
            figure.note,
        )
    promised = figure.duel.ceiling_share
    return (
        name,
        f"{figure.timing.median * 1e3:.3g}",
        figure.rival,
        f"{figure.rival_timing.median * 1e3:.3g}",
        f"{figure.ratio:.2f}x",
        target,
        _IN_WORDS[figure.ratio_met],
        f"{figure.gflops:.0f}",
        f"{figure.ceiling_share:.0%}",
        "" if promised is None else f"{promised:.0%}",
        _IN_WORDS[figure.share_met],
        f"{figure.noise:.0%}",
        figure.note,
    )


def _figure_as_dict(figure: Figure) -> dict[str, object]:
    return job_as_dict(figure.job) | {
        "contender": figure.contender,
        "instruction_set": figure.instruction_set,
        "rival": figure.rival or figure.duel.rival_name,
        "rival_job": None if figure.duel.rival is None else job_as_dict(figure.duel.rival),
        "verdict": figure.verdict,
        "note": figure.note,
        "ratio": rounded(figure.ratio),
        "target": rounded(figure.target),
        "met": figure.ratio_met,
        "gflops": rounded(figure.gflops),
        "ceiling_gflops": rounded(figure.ceiling_gflops),
        "ceiling_share": rounded(figure.ceiling_share),
        "ceiling_share_target": figure.duel.ceiling_share,
        "ceiling_share_met": figure.share_met,
        "noise": rounded(figure.noise),
        "time_ms": timing_as_dict(figure.timing),
        "rival_time_ms": timing_as_dict(figure.rival_timing),
    }


def plot(report: Report[Figure], path: Path) -> None:
    """Draws every ratio as a dot beside its target, one panel for each section, and the shares of the ceiling.

    Raises:
        ValueError: no line has a ratio.
    """
    from matplotlib.figure import Figure as Picture  # no pyplot: nothing here needs a window

    figures = [figure for figure in report.rows if figure.verdict == "right"]
    if not figures:
        raise ValueError("there is nothing to draw: no line of the suite has a ratio")
    panels = {
        section: [_Dot(_label(f), f.ratio, f.target, f.ratio_met) for f in figures if _section(f) == section]
        for section in dict.fromkeys(map(_section, figures))
    }
    if shares := [
        _Dot(str(f.job).removeprefix("attention "), f.ceiling_share, f.duel.ceiling_share, f.share_met)
        for f in figures
        if f.duel.ceiling_share
    ]:
        panels[_SHARES] = shares

    columns = _columns({title: len(dots) + 3 for title, dots in panels.items()})  # 3 for the title and the axis
    tallest = max(sum(heights.values()) for heights in columns)
    picture = Picture(figsize=(0.5 + 4.6 * len(columns), 1.2 + 0.19 * tallest), layout="constrained")
    for part, heights in zip(picture.subfigures(1, len(columns), squeeze=False)[0], columns, strict=True):
        axes = part.subplots(len(heights), 1, squeeze=False, height_ratios=list(heights.values()))[:, 0]
        for axis, title in zip(axes, heights, strict=True):
            _draw_dots(axis, title, panels[title])
    picture.suptitle("fastattn's CPU kernels beside their targets: how many times as fast as the rival", fontsize=12)
    handles, labels = _legend()
    legend = {"loc": "outside lower center", "ncols": 3, "frameon": False, "fontsize": 8, "title_fontsize": 8}
    picture.legend(handles, labels, title=report.caption(), **legend)
    picture.savefig(path, dpi=160)


@dataclass(frozen=True)
class _Dot:
    """A line of a panel: the measured value, its target, and whether the target is met."""

    label: str
    value: float
    target: float
    met: bool


_SHARES = "useful work as a share of the FMA ceiling"
_COLOURS = {True: STYLES[0][0], False: STYLES[1][0]}
_MARKERS = {True: "o", False: "X"}  # told apart without colours too


def _label(figure: Figure) -> str:
    """The label of a figure in the panel of its section."""
    job, rival = figure.job, figure.duel.rival
    if rival:
        return f"{job.case} {job.timed} vs {figure.duel.rival_name}"
    return f"{job.case} {job.dtype}" if job.case.timed == "limit" else str(job.case)


def _columns(heights: dict[str, int]) -> list[dict[str, int]]:
    """The panels and their heights in at most three columns that are about equally high."""
    columns: list[dict[str, int]] = [{} for _ in range(min(3, len(heights)))]
    for title in sorted(heights, key=heights.get, reverse=True):
        min(columns, key=lambda column: sum(column.values()))[title] = heights[title]
    return columns


def _draw_dots(axis, title: str, dots: list[_Dot]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for y, dot in enumerate(dots):
        axis.plot([dot.value, dot.target], [y, y], color="0.8", linewidth=1.5, zorder=1)
        axis.plot(dot.target, y, marker="|", markersize=9, markeredgewidth=1.8, color="black", zorder=2)
        axis.plot(dot.value, y, marker=_MARKERS[dot.met], markersize=5.5, color=_COLOURS[dot.met], zorder=3)
    axis.axvline(1, color="0.6", linewidth=0.8, zorder=0)  # as fast as the rival, or the ceiling
    if title == _SHARES:
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    else:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_yticks(range(len(dots)), [dot.label for dot in dots], fontsize=7)
    axis.set_ylim(len(dots) - 0.4, -0.6)  # the first on top
    axis.tick_params(axis="x", labelsize=7)
    axis.grid(axis="x", color="0.92", linewidth=0.6)
    axis.set_title(title, fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def _legend() -> tuple[list, list[str]]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linestyle="", marker=_MARKERS[met], color=_COLOURS[met]) for met in (True, False)]
    target = Line2D([], [], linestyle="", marker="|", markersize=9, markeredgewidth=1.8, color="black")
    return [*handles, target], ["measured, target met", "measured, target not met", "target"]
