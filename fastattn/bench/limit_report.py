"""The report of the suite "limit": tables, a JSON document, a picture."""

from __future__ import annotations

from . import chart
from .limit import Figure
from .report import Report, Table, document, job_as_dict, print_tables, rounded, timing_as_dict

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
        return name, figure.verdict, figure.duel.rival_name, "", "", target, "not met", *[""] * 5, figure.note
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


def as_svg(report: Report[Figure]) -> str:
    """Every ratio as a bar that a short line at its target crosses, a group for each section, and the shares.

    Raises:
        ValueError: no line has a ratio.
    """
    figures = [figure for figure in report.rows if figure.verdict == "right"]
    groups = {
        section: [
            _bar(_label(f), f.ratio, f"{f.ratio:.2f}x", f.target, f.ratio_met)
            for f in figures
            if _section(f) == section
        ]
        for section in dict.fromkeys(map(_section, figures))
    }
    if shares := [f for f in figures if f.duel.ceiling_share]:
        groups["useful work as a share of the FMA ceiling"] = [
            _bar(str(f.job).removeprefix("attention "), share, f"{share:.0%}", f.duel.ceiling_share, f.share_met)
            for f in shares
            for share in (f.ceiling_share,)
        ]
    return chart.draw(
        "fastattn's CPU kernels: times as fast as the rival",
        groups,
        f"Short lines: targets; orange misses one. {report.caption()}",
    )


def _bar(label: str, value: float, text: str, target: float, met: bool) -> chart.Bar:
    return chart.Bar(label, value, text, "ours" if met else "missed", mark=target)


def _label(figure: Figure) -> str:
    """The label of a figure in the group of its section."""
    job, rival = figure.job, figure.duel.rival
    if rival:
        return f"{job.case} {job.timed} vs {figure.duel.rival_name}"
    return f"{job.case} {job.dtype}" if job.case.timed == "limit" else str(job.case)
