"""The times of the tiles that the model of the compiled code ranks first; the fastest of them serve on this machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fastattn.bench import tune


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives each kernel that has several tiles."""
    kernels = tune.tiles_to_try(torch.device(metafunc.config.option.device))
    metafunc.parametrize(("kernel", "tiles"), kernels.items(), ids=list(kernels))


def test_tiles(
    kernel: str, tiles: tuple[str, ...], pytestconfig: pytest.Config, record_property: Callable[[str, object], None]
) -> None:
    """Records the times, and keeps the fastest tile as `fastattn tune` does."""
    device = torch.device(pytestconfig.option.device)
    times = tune.time_tiles(device, kernel, tiles)
    tune.keep_faster_tiles(device, {kernel: times})
    verdict = "wrong" if isinstance(times[tiles[0]], str) else "right"
    note = tune.tiles_as_text(kernel, times)
    record_property("row", {"verdict": verdict, "note": note, "kernel": kernel, "times": times})
