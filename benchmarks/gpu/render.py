"""Reports of the results of stages: Markdown and pictures from a record, and the part of a page of docs about GPUs."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from itertools import cycle
from pathlib import Path

from .record import Row, Rows, is_failure, load
from .targets import median_ms, of_contender, ours, outcomes

NOT_MEASURED = """\
**Not measured: any GPU.** The Triton kernels have run in Triton's interpreter against the whole suite, have been
compiled ahead of time for compute capabilities 8.0 to 12.0, and what was compiled for 8.0 and 9.0 has been executed on
the CPU, by a machine for PTX (`make ptx`); no GPU has executed them yet. `make gpu STAGE=truth` and `make gpu
STAGE=bench` check and time them on a machine that has one, and `make gpu STAGE=hopper` those for Hopper alone, which
have been compiled, and executed by that machine in what holds for every order of warps and loads."""
# Colours of Okabe and Ito, which colour-blind readers tell apart.
STYLES = (
    *(("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D")),
    *(("#E69F00", "v"), ("#56B4E9", "P"), ("#000000", "X"), ("#777777", "*")),
)
_TIMED = ("bench", "hopper", "cuda")
_COMPARED = ("bench", "hopper")  # cuda is about a backend that others are faster than
_OURS = "fastattn"
_IN_DOCS = (
    *(f"D{D}-N{N}-{mask}" for D in (128, 64) for N in (4096, 16384) for mask in ("full", "causal")),
    *("D128-N2048-pad", "bert", "left-causal", "grouped-causal", "bias-N1024"),
)
_RIVALS_IN_DOCS = ("SDPA cudnn", "SDPA flash", "SDPA efficient", "FlexAttention")
_NOT_DRAWN = ("SDPA math", "naive")  # an order of magnitude below the others
_SQUARE = re.compile(r"D(\d+)-N(\d+)-(full|causal)")
_FIGURES = {"tflops": "TFLOP/s", "gbps": "GB/s", "peak_mib": "peak MiB", "max_error": "max error"}
_OWN_HEADINGS = ("case", "contender", "median ms", "p20-p80", *_FIGURES.values(), "fastest rival")
_IN_WORDS = {True: "met", False: "not met", None: ""}


def results_files(folder: Path) -> list[Path]:
    """The results files of GPUs in a folder."""
    return [path for path in sorted(folder.glob("*.jsonl")) if load(path)["device"] == "cuda"]


def render(path: Path) -> list[Path]:
    """Writes Markdown and, where matplotlib is installed, pictures beside a results file; what was written."""
    document = load(path)
    text = path.with_suffix(".md")
    text.write_text(markdown(document) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        return [text]
    written = [text]
    for name, draw in (("lengths", _draw_lengths), ("cases", _draw_cases)):
        picture = path.with_name(f"{path.stem}-{name}.png")
        if draw(document, picture):
            written.append(picture)
    return written


def summary(document: dict, stage: str) -> str:
    """The short part of `markdown` about one stage."""
    rows = [row for row in document["rows"] if row["stage"] == stage]
    timed = [row for row in rows if "contender" in row]
    truth = [row for row in rows if "contender" not in row]
    return "\n\n".join([*([_truth(truth)] if truth else []), *(_figures(timed) if timed else [])])


def for_docs(folder: Path) -> str:
    """What docs/performance.md says of GPUs: a table for each results file with figures, or that there is none."""
    documents = {path: load(path) for path in results_files(folder)}
    measured = {path: document for path, document in documents.items() if _timed_rows(document)}
    if not measured:
        return NOT_MEASURED
    return "\n\n".join(_docs_table(path, document) for path, document in measured.items())


def markdown(document: dict) -> str:
    """All of a results file but its samples."""
    about = document["machine"], document["versions"]
    head = [f"# {_machine(document)}", *(", ".join(f"{name} {x}" for name, x in of.items()) for of in about)]
    runs = [(run["stage"], run["date"], run["versions"]["fastattn"], *_course(run)) for run in document["runs"]]
    run_headings = ("stage", "date", "commit", "clocks before", "clocks after", "complete")
    parts = [*head, "## Runs", _table(run_headings, runs)]
    truth = [row for row in document["rows"] if row["stage"] not in _TIMED or "contender" not in row]
    if truth:
        parts += ["## Verdicts", _truth(truth)]
    for stage in _TIMED:
        rows = [row for row in document["rows"] if row["stage"] == stage and "contender" in row]
        if rows:
            parts += [f"## Speed: {stage}", *_figures(rows), *_details(rows)]
    return "\n\n".join(parts)


def _machine(document: dict) -> str:
    machine, versions = document["machine"], document["versions"]
    return f"{machine.get('gpu', machine['cpu'])}, torch {versions['torch']}, Triton {versions['triton']}"


def _course(run: dict) -> tuple[str, str, str]:
    """The clocks before and after a run, and whether it has done all of its stage; one that was killed has no end."""
    names = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    before, after = (run.get(f"state_{when}", {}) for when in ("before", "after"))
    clocks = (", ".join(state[name] for name in names if name in state) for state in (before, after))
    return (*clocks, "yes" if run.get("complete") else "no")


def _truth(rows: Rows) -> str:
    counts = Counter((row["stage"], row["verdict"]) for row in rows)
    lines = [_table(("stage", "verdict", "rows"), [(*key, n) for key, n in sorted(counts.items())])]
    failures = [row for row in rows if is_failure(row)]
    lines += [f"* {row['test']}: {row['verdict']}: {row['note']}" for row in failures]
    remarks = dict.fromkeys(f"* {row['test']}: {row['note']}" for row in rows if row["note"] and row not in failures)
    return "\n".join([lines[0], "", *lines[1:], *remarks])


def _figures(rows: Rows) -> list[str]:
    """Ceilings, promises, and each job with all contenders."""
    parts = []
    ceilings = [row for row in rows if row["family"] == "ceiling"]
    if ceilings:
        rates = (f"{r['tflops']} TFLOP/s" if "tflops" in r else f"{r['gbps']} GB/s" for r in ceilings)
        named = (f"{row['contender']}: {rate}" for row, rate in zip(ceilings, rates, strict=True))
        parts.append(f"Ceilings: {'; '.join(named)}.")
    promised = [(o.promise, o.figure, _IN_WORDS[o.met]) for o in outcomes(rows) if o.met is not None]
    if promised:
        met = sum(words == "met" for *_, words in promised)
        heading = f"### Promises: {met} of {len(promised)} measured ones met"
        parts += [heading, _table(("promise", "figure", ""), promised)]
    timed = [row for row in rows if row["family"] != "ceiling"]
    for level in dict.fromkeys(row["level"] for row in timed):
        of_level = [row for row in timed if row["level"] == level]
        for which in dict.fromkeys(row["pass"] for row in of_level):
            shown = [row for row in of_level if row["pass"] == which]
            title, unit = ("us a call, host's clock", _us) if level == "launch" else ("useful TFLOP/s", _tflops)
            parts += [f"### {level} {which}: {title}", _matrix(shown, unit)]
    return parts


def _details(rows: Rows) -> list[str]:
    """Every figure of fastattn, and why others have none."""
    lines = [_own(row, rows) for row in rows if row["family"] == _OURS]
    untimed = (row for row in rows if row["verdict"] != "right")
    notes = dict.fromkeys(f"* {_job(row)}: {row['contender']}: {row['note']}" for row in untimed)
    return ["### Every row of fastattn", _table(_OWN_HEADINGS, lines), "### Not timed", "\n".join(notes) or "Nothing."]


def _us(row: dict) -> str:
    return f"{1e3 * median_ms(row):.1f}"


def _tflops(row: dict) -> str:
    return f"{row['tflops']:.0f}" if row["tflops"] >= 10 else f"{row['tflops']:.2g}"


def _matrix(rows: Rows, shown) -> str:
    """Cases down, contenders across."""
    contenders = sorted(dict.fromkeys(row["contender"] for row in rows), key=lambda name: not name.startswith(_OURS))
    said = [shown(row) if row["verdict"] == "right" else row["verdict"] for row in rows]
    cells = {(row["case"], row["contender"]): cell for row, cell in zip(rows, said, strict=True)}
    cases = dict.fromkeys(row["case"] for row in rows)
    return _table(("case", *contenders), [(case, *(cells.get((case, c), "") for c in contenders)) for case in cases])


def _own(row: dict, rows: Rows) -> tuple[object, ...]:
    if row["verdict"] != "right":
        return (_job(row), row["contender"], row["verdict"], *[""] * (len(_OWN_HEADINGS) - 3))
    time = row["time_ms"]
    rivals = [x for x in rows if _job(x) == _job(row) and x["family"] != _OURS and x["verdict"] == "right"]
    beside = ""
    if fastest := min(rivals, key=median_ms, default=None):
        speed_up = median_ms(fastest) / time["median"]
        beside = f"{fastest['contender']} {median_ms(fastest):.3g} ms ({speed_up:.2f}x)"
    figures = (row.get(name) for name in _FIGURES)
    shown = ("" if figure is None else f"{figure:.3g}" for figure in figures)
    times = (f"{time['median']:.4g}", f"{time['p20']:.4g}-{time['p80']:.4g}")
    return (_job(row), row["contender"], *times, *shown, beside)


def _job(row: dict) -> str:
    return f"{row['level']} {row.get('case', '')} {row.get('pass', '')}"


def _table(headings: tuple[str, ...], lines: list[tuple[object, ...]]) -> str:
    rows = [headings, ("---",) * len(headings), *lines]
    return "\n".join(f"| {' | '.join('' if x is None else str(x).replace('|', '/') for x in row)} |" for row in rows)


def _timed_rows(document: dict) -> Rows:
    """Right times of cases, of each job those of the latest sources that timed it: others are not compared to them."""
    age = {run["sources"]: i for i, run in enumerate(document["runs"])}
    rows = [r for r in document["rows"] if r["stage"] in _COMPARED and r["verdict"] == "right" and r.get("case")]
    latest: dict[tuple, int] = {}
    for row in rows:
        latest[_key(row)] = max(latest.get(_key(row), 0), age[row["sources"]])
    rows = [row for row in rows if age[row["sources"]] == latest[_key(row)]]
    return list({(*_key(row), row["contender"]): row for row in rows}.values())


def _key(row: Row) -> tuple:
    return tuple(map(row.get, ("level", "case", "dtype", "pass")))


def _docs_table(path: Path, document: dict) -> str:
    rows = _timed_rows(document)
    commits = dict.fromkeys(run["versions"]["fastattn"] for run in document["runs"] if run["stage"] in _COMPARED)
    lines = []
    for case in _IN_DOCS:
        passes = {timed: ours(rows, case, timed) for timed in ("forward", "backward")}
        if not any(passes.values()):
            continue
        rivals = [[of_contender(rows, rival, case, timed) for timed in passes] for rival in _RIVALS_IN_DOCS]
        cells = [" / ".join(_tflops(row) if row else "-" for row in pair) for pair in (passes.values(), *rivals)]
        lines.append((case, *cells))
    about = (
        f"On an {_machine(document)}, bf16, useful TFLOP/s forward / backward, medians of interleaved runs "
        f"(fastattn {', '.join(commits)}); `-` is refused, wrong or not run. Every row, with its spread, memory and "
        f"error: [{path.stem}](../benchmarks/results/{path.stem}.md)."
    )
    return f"{about}\n\n{_table(('case', 'fastattn', *_RIVALS_IN_DOCS), lines)}"


def _draw_lengths(document: dict, path: Path) -> bool:
    """TFLOP/s by length, a panel for each pass, head dim and mask; whether there was anything to draw."""
    from matplotlib.figure import Figure  # no pyplot: nothing here needs a window

    by_panel: dict[tuple, dict[str, list[tuple[int, float]]]] = {}
    drawn = (row for row in _timed_rows(document) if row["level"] == "attention" and row["contender"] not in _NOT_DRAWN)
    for row in drawn:
        if square := _SQUARE.fullmatch(row["case"]):
            D, N, mask = square.groups()
            panel = by_panel.setdefault((row["pass"], int(D), mask), {})
            panel.setdefault(row["contender"], []).append((int(N), row["tflops"]))
    if not by_panel:
        return False
    passes = sorted({key[0] for key in by_panel}, reverse=True)
    columns = sorted({key[1:] for key in by_panel}, key=lambda key: (key[0], key[1] == "causal"))
    names = {name for panel in by_panel.values() for name in panel}
    contenders = sorted(names, key=lambda name: not name.startswith(_OURS))
    figure = Figure(figsize=(1 + 2.6 * len(columns), 1.4 + 2.4 * len(passes)), layout="constrained")
    panels = figure.subplots(len(passes), len(columns), sharey="row", squeeze=False)
    for line, timed in zip(panels, passes, strict=True):
        for axis, (D, mask) in zip(line, columns, strict=True):
            for name, (colour, marker) in zip(contenders, cycle(STYLES), strict=False):
                points = sorted(by_panel.get((timed, D, mask), {}).get(name, []))
                axis.plot(*zip(*points, strict=True) if points else ([], []), color=colour, marker=marker, label=name)
            axis.set_xscale("log", base=2)
            axis.set_title(f"{timed}, D {D}, {mask}", fontsize=9)
            axis.tick_params(labelsize=7)
            axis.grid(axis="y", color="0.9", linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set_ylim(bottom=0)  # of the whole line, once all is drawn: it ends the scaling of its top
    _finish(figure, panels[0, 0], "useful TFLOP/s by length, 16k tokens, bf16", document, path)
    return True


def _draw_cases(document: dict, path: Path) -> bool:
    """How many times as fast as each rival fastattn is in all other cases; whether there was anything to draw."""
    from matplotlib.figure import Figure

    rows = [row for row in _timed_rows(document) if row["level"] != "launch" and not _SQUARE.fullmatch(row["case"])]
    jobs = dict.fromkeys((row["level"], row["case"], row["pass"]) for row in rows)
    ratios: dict[str, list[tuple[int, float]]] = {}
    labels = []
    for level, case, timed in jobs:
        own = ours(rows, case, timed, level)
        of_job = [r for r in rows if (r["level"], r["case"], r["pass"]) == (level, case, timed)]
        rivals = [row for row in of_job if row["family"] != _OURS]
        if own and rivals:
            for rival in rivals:
                ratios.setdefault(rival["contender"], []).append((len(labels), median_ms(rival) / median_ms(own)))
            labels.append(f"{level} {case} {timed}".removeprefix("attention "))
    if not labels:
        return False
    figure = Figure(figsize=(8, 1.6 + 0.3 * len(labels)), layout="constrained")
    axis = figure.subplots()
    for (name, points), (colour, marker) in zip(sorted(ratios.items()), cycle(STYLES), strict=False):
        y, x = zip(*points, strict=True)
        axis.plot(x, y, linestyle="", marker=marker, color=colour, label=name)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.grid(axis="x", color="0.9", linewidth=0.6)
    _finish(figure, axis, "how many times as fast as each rival fastattn is", document, path)
    return True


def _finish(figure, axis, title: str, document: dict, path: Path) -> None:
    figure.suptitle(title, fontsize=11)
    handles, labels = axis.get_legend_handles_labels()
    style = {"loc": "outside lower center", "ncols": 4, "frameon": False, "fontsize": 8, "title_fontsize": 7}
    figure.legend(handles, labels, title=_machine(document), **style)
    figure.savefig(path, dpi=130)
