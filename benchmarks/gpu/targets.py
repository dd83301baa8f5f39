"""Targets of the kernels on an H200, and what a results file says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import geometric_mean

from .record import Row, Rows

IN_ANY_ORDER = ", deterministic=False"
"""Ends the name of a contender whose gradients are summed in any order."""

_TFLOPS = {  # head dim, pass, mask: at least, from 4096 tokens on
    (128, "forward", "full"): 430,
    (128, "forward", "causal"): 390,
    (64, "forward", "full"): 370,
    (64, "forward", "causal"): 340,
    (128, "backward", "full"): 280,
    (128, "backward", "causal"): 280,
    (64, "backward", "full"): 260,
    (64, "backward", "causal"): 260,
}
_LENGTHS = (4096, 8192, 16384)
_BOTH_PASSES = ("forward", "backward")
_PADDED = {"D128-N2048-pad": "D128-N2048-full", "D64-N2048-pad": "D64-N2048-full"}  # and the same without padding
_PADDED_SHARE = 0.9
_PADDED_SPEED_UPS = {"SDPA efficient": 2.5, "SDPA cudnn": 1.2}  # over both passes together
_LAUNCH_US = {"forward": 30.0, "forward+backward": 60.0}  # beyond what SDPA takes
_CUDA_SHARE_OF_FLASH = {"forward": 0.7, "backward": 0.6}
_CUDA_LENGTHS = (2048, 4096, 16384)
_CUDA_PADDED_SPEED_UP = 1.5  # over SDPA efficient, both passes together
_HOPPER_LENGTHS = (1024, 2048, 4096, 8192, 16384)
_HOPPER_SPEED_UPS = {  # head dim, pass, mask: at least so many times as fast, on average over these lengths
    (128, "forward", "full"): 1.0,
    (128, "forward", "causal"): 1.03,
    (64, "forward", "full"): 1.1,
    (64, "forward", "causal"): 1.1,
    (256, "forward", "full"): 1.0,
    (256, "forward", "causal"): 1.0,
    (128, "backward", "full"): 1.0,
    (128, "backward", "causal"): 1.0,
    (64, "backward", "full"): 1.05,
    (64, "backward", "causal"): 1.05,
}
_HOPPER_RIVALS = {64: ("SDPA cudnn",), 128: ("SDPA cudnn",), 256: ("SDPA cudnn", "SDPA flash", "SDPA efficient")}
_HOPPER_PADDED_SPEED_UP = 2.0  # over SDPA cudnn with the mask, both passes together
_HOPPER_SHARE_OF_MATMUL = 0.85
_ROUNDING_MIB = 1.0  # of the allocator


@dataclass(frozen=True)
class Outcome:
    """A promise and its figure, both in words; `met` is None where the figure was not measured."""

    promise: str
    figure: str
    met: bool | None


def outcomes(rows: Rows) -> list[Outcome]:
    """Every promise, held against the rows of one stage."""
    right = [row for row in rows if row["verdict"] == "right" and "case" in row]
    if any(row["stage"] == "cuda" for row in rows):
        return [*_cuda(right), *_graphs(right)]
    if any(row["stage"] == "hopper" for row in rows):
        return [*_hopper(right, rows), *_graphs(right), *_memory(right)]
    return [*_rates(right), *_padding(right), *_launch(right), *_graphs(right), *_memory(right)]


def ours(rows: Rows, case: str, timed: str, level: str = "attention") -> Row | None:
    """The fastest row of fastattn in a job that is no replay of a graph, and has the same bits each time."""
    candidates = [row for row in _of(rows, level, case, timed) if row["family"] == "fastattn"]
    candidates = [row for row in candidates if not _is_graph(row) and not row["contender"].endswith(IN_ANY_ORDER)]
    return min(candidates, key=median_ms, default=None)


def ours_in_any_order(rows: Rows, case: str, timed: str) -> Row | None:
    """The row of fastattn in a job that need not have the same bits each time; a forward pass has them anyway."""
    if timed == "forward":
        return ours(rows, case, timed)
    candidates = [row for row in _of(rows, "attention", case, timed) if row["contender"].endswith(IN_ANY_ORDER)]
    return min(candidates, key=median_ms, default=None)


def of_contender(rows: Rows, contender: str, case: str, timed: str, level: str = "attention") -> Row | None:
    """The row of a contender in a job."""
    return next((row for row in _of(rows, level, case, timed) if row["contender"] == contender), None)


def median_ms(row: Row) -> float:
    """Of a row that was timed."""
    return row["time_ms"]["median"]


def _of(rows: Rows, level: str, case: str, timed: str) -> Rows:
    wanted = (level, case, timed, "right")
    return [row for row in rows if (row.get("level"), row.get("case"), row.get("pass"), row["verdict"]) == wanted]


def _is_graph(row: Row) -> bool:
    return "graph" in row["contender"]


def _compared(promise: str, figure: float | None, unit: str, least: float = 0.0, most: float = float("inf")) -> Outcome:
    if figure is None:
        return Outcome(promise, "not measured", None)
    return Outcome(promise, f"{figure:.3g}{unit}", least <= figure <= most)


def _rates(rows: Rows) -> Iterator[Outcome]:
    for (D, timed, mask), least in _TFLOPS.items():
        for N in _LENGTHS:
            row = ours(rows, f"D{D}-N{N}-{mask}", timed)
            figure = row and row["tflops"]
            yield _compared(f"D{D} N{N} {mask} {timed}: at least {least} TFLOP/s", figure, " TFLOP/s", least)


def _padding(rows: Rows) -> Iterator[Outcome]:
    yield from _padding_shares(rows)
    yield from _padded_speed_ups(rows, _PADDED_SPEED_UPS)


def _padding_shares(rows: Rows) -> Iterator[Outcome]:
    for padded, unpadded in _PADDED.items():
        for timed in _BOTH_PASSES:
            pair = [ours(rows, case, timed) for case in (padded, unpadded)]
            share = pair[0]["tflops"] / pair[1]["tflops"] if all(pair) else None
            promise = f"{padded} {timed}: useful TFLOP/s at least {_PADDED_SHARE:.0%} of those without padding"
            yield _compared(promise, None if share is None else 100 * share, " %", 100 * _PADDED_SHARE)


def _padded_speed_ups(rows: Rows, speed_ups: dict[str, float]) -> Iterator[Outcome]:
    for case in (*_PADDED, "bert"):
        for rival, least in speed_ups.items():
            figure = _speed_up(rows, rival, case, _BOTH_PASSES)
            yield _compared(f"{case}, both passes: at least {least} times as fast as {rival}", figure, "x", least)


def _speed_up(rows: Rows, rival: str, case: str, passes: tuple[str, ...]) -> float | None:
    """How many times as fast as a rival we are in these passes together; None where one was not measured."""
    return _ratio([(of_contender(rows, rival, case, timed), ours(rows, case, timed)) for timed in passes])


def _ratio(pairs: list[tuple[Row | None, Row | None]]) -> float | None:
    """The time of the first rows of some pairs over that of the second ones; None where one was not measured."""
    if not all(map(all, pairs)):
        return None
    return sum(median_ms(theirs) for theirs, _ in pairs) / sum(median_ms(our) for _, our in pairs)


def _cuda(rows: Rows) -> Iterator[Outcome]:
    """The targets of the CUDA backend on a GPU that has faster ones."""
    for timed, least in _CUDA_SHARE_OF_FLASH.items():
        for case in (f"D{D}-N{N}-{mask}" for D in (128, 64) for N in _CUDA_LENGTHS for mask in ("full", "causal")):
            figure = _speed_up(rows, "SDPA flash", case, (timed,))
            yield _compared(f"{case} {timed}: at least {least} times as fast as SDPA flash", figure, "x", least)
    yield from _padded_speed_ups(rows, {"SDPA efficient": _CUDA_PADDED_SPEED_UP})


def _hopper(rows: Rows, all_rows: Rows) -> Iterator[Outcome]:
    """The targets of the Hopper backend."""
    for (D, timed, mask), least in _HOPPER_SPEED_UPS.items():
        rivals, cases = _HOPPER_RIVALS[D], [f"D{D}-N{N}-{mask}" for N in _HOPPER_LENGTHS]
        fastest = " or ".join(rivals)
        average = _average_speed_up(rows, rivals, cases, timed, ours_in_any_order)
        outcome = _compared(
            f"D{D} {mask} {timed}: on average at least {least} times as fast as {fastest}", average, "x", least
        )
        if timed == "backward" and (same_bits := _average_speed_up(rows, rivals, cases, timed, ours)):
            outcome = replace(outcome, figure=f"{outcome.figure}, and {same_bits:.3g}x with the same bits each time")
        yield outcome
    yield from _padding_shares(rows)
    for case in _PADDED:
        pairs = [(of_contender(rows, "SDPA cudnn", case, x), ours_in_any_order(rows, case, x)) for x in _BOTH_PASSES]
        promise = f"{case}, both passes: at least {_HOPPER_PADDED_SPEED_UP} times as fast as SDPA cudnn"
        yield _compared(promise, _ratio(pairs), "x", _HOPPER_PADDED_SPEED_UP)
    longest = ours(rows, f"D128-N{_HOPPER_LENGTHS[-1]}-full", "forward")
    matmul = next((row["tflops"] for row in all_rows if row.get("family") == "ceiling" and "tflops" in row), None)
    share = 100 * longest["tflops"] / matmul if longest and matmul else None
    promise = f"D128 N{_HOPPER_LENGTHS[-1]} full forward: at least {_HOPPER_SHARE_OF_MATMUL:.0%} of the matmul rate"
    yield _compared(promise, share, " %", 100 * _HOPPER_SHARE_OF_MATMUL)


def _average_speed_up(
    rows: Rows, rivals: tuple[str, ...], cases: list[str], timed: str, own: Callable[[Rows, str, str], Row | None]
) -> float | None:
    """The geometric mean over cases of how many times as fast as the fastest rival we are; None where one lacks."""
    ratios = []
    for case in cases:
        theirs = [row for rival in rivals if (row := of_contender(rows, rival, case, timed))]
        row = own(rows, case, timed)
        if not theirs or not row:
            return None
        ratios.append(min(map(median_ms, theirs)) / median_ms(row))
    return geometric_mean(ratios)


def _launch(rows: Rows) -> Iterator[Outcome]:
    for timed, most in _LAUNCH_US.items():
        pair = ours(rows, "launch", timed, "launch"), of_contender(rows, "SDPA", "launch", timed, "launch")
        figure = 1e3 * (median_ms(pair[0]) - median_ms(pair[1])) if all(pair) else None
        yield _compared(f"launch of {timed}: at most SDPA's and {most:.0f} us", figure, " us more", -1e9, most)


def _graphs(rows: Rows) -> Iterator[Outcome]:
    for timed in _LAUNCH_US:
        graphs = [row for row in _of(rows, "launch", "launch", timed) if _is_graph(row)]
        figure = min((1e3 * median_ms(row) for row in graphs), default=None)
        yield _compared(f"{timed} in a CUDA graph: captured, with the bits of the call", figure, " us a replay")


def _memory(rows: Rows) -> Iterator[Outcome]:
    for timed in ("forward", "backward"):
        case = "D128-N4096-causal"
        row = ours(rows, case, timed)
        least = row and _outputs_mib(row["shape"], timed)
        promise = f"{case} {timed}: no memory but outputs, lse and delta"
        yield _compared(promise + (f" ({least:.0f} MiB)" if row else ""), row and row["peak_mib"], " MiB",
                        most=least + _ROUNDING_MIB if row else 0.0)  # fmt: skip


def _outputs_mib(shape: dict[str, int], timed: str) -> float:
    """What bf16 outputs and the fp32 rows beside them take."""
    rows_q, rows_k = shape["B"] * shape["H"] * shape["n_q"], shape["B"] * shape["H_kv"] * shape["n_k"]
    forward = 2 * rows_q * shape["d_v"] + 4 * rows_q
    backward = 2 * (rows_q * shape["D"] + rows_k * (shape["D"] + shape["d_v"])) + 4 * rows_q
    return (forward if timed == "forward" else forward + backward) / 2**20
