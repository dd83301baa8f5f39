"""Faults put into the source of the Hopper kernels: each is found, whatever the order in which warps and loads come.

On the machine for PTX; `make ptx` runs it. Fences between the proxies are missed in none: where one is removed from the
source, Triton puts it there. tests/gpu_models/test_ptx_kernels.py removes those of the compiled kernels.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from ptx.machine import PtxError
from test_hopper_forward import config

from fastattn.backends import hopper
from fastattn.backends.hopper import flash_forward, fused_backward
from fastattn.backends.hopper.configs import FusedConfig
from fastattn.spec import Mask, Spec

SEEDS = range(1, 200, 10)
MODULES = ("rings", "flash_forward", "flash_backward", "fused_backward")  # each imports only those before it


@contextmanager
def edited(folder: Path, module: str, old: str, new: str) -> Iterator[None]:
    """The modules of the kernels, imported anew where a line of one has been replaced."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules))
        for name in MODULES:
            path = Path(hopper.__file__).with_name(f"{name}.py")
            if name == module:
                text = path.read_text()
                assert text.count(old) == 1, f"{old} stands {text.count(old)} times in {name}.py"
                path = folder / path.name
                path.write_text(text.replace(old, new))
            spec = importlib.util.spec_from_file_location(f"{hopper.__name__}.{name}", path)
            sys.modules[spec.name] = imported = importlib.util.module_from_spec(spec)
            stack.enter_context(mock.patch.object(hopper, name, imported, create=True))
            spec.loader.exec_module(imported)
        yield


def found(hopper_gpu, call: Callable[[], object]) -> list[str]:
    """What the machine says, for every seed that it finds something with."""
    hopper_gpu.multiprocessors = 1
    said = []
    for hopper_gpu.seed in SEEDS:
        try:
            call()
        except PtxError as error:
            said.append(str(error))
    return said


def forward() -> None:
    """Two work items of five tiles of keys, over rings of two slots."""
    q, k = (torch.randn(1, 2, n, 64).half() for n in (128, 320))
    with mock.patch.object(sys.modules[flash_forward.__name__], "forward_config", return_value=config(2, 2)):
        hopper.forward(q, k, k, Spec(Mask(), 1.0))


PHASE, RELEASE = "(n // SLOTS) & 1", "mbarrier.arrive(ring.empty.index(slot_of(n, ring)[0])"
WAITED, RELEASED = "b_o = warpgroup_mma_wait(0, deps=(b_o_coming,))", "release(n - 1, v_ring)"
LINE = "\n                "
FORWARD = {  # module, some of its lines, what stands there instead
    "other phase": ("rings", PHASE, "(n // SLOTS + 1) & 1"),
    "one phase": ("rings", PHASE, "0 * n"),
    "half as many phases": ("rings", PHASE, "(n // (2 * SLOTS)) & 1"),
    "no release": ("rings", f"{RELEASE}, count=1, pred=pred)", "pass"),
    "release of another slot": ("rings", RELEASE, RELEASE.replace("(n,", "(n + 1,")),
    "no wait for a full slot": ("rings", "mbarrier.wait(ring.full.index(slot), phase)", "pass"),
    "no wait for an empty slot": ("rings", "mbarrier.wait(ring.empty.index(slot), phase ^ 1)", "pass"),
    # Of K that would do no harm: before K of the next tile but one, the producer loads V of the next one, for which
    # there is room only after the product with this K is over.
    "V released too early": ("flash_forward", f"{WAITED}{LINE}{RELEASED}", f"{RELEASED}{LINE}{WAITED}"),
    "half of the bytes": ("rings", "ROWS * D * (desc.dtype", "ROWS // 2 * D * (desc.dtype"),
    "one release too few is waited for": ("rings", "count=RELEASES", "count=(RELEASES + 1) // 2"),
    "one release too many is waited for": ("rings", "count=RELEASES", "count=RELEASES + 1"),
    "barriers that the loads do not see": (
        "rings",
        "    fence_async_shared()\n    block_barrier()\n",
        "    block_barrier()\n",
    ),
}


@pytest.mark.parametrize("fault", FORWARD)
def test_a_fault_in_the_forward_is_found_in_every_order(hopper_gpu, tmp_path, fault):
    assert found(hopper_gpu, forward) == []
    with edited(tmp_path, *FORWARD[fault]):
        assert len(found(hopper_gpu, forward)) == len(SEEDS)


def fused(slots: tuple[int, int]) -> Callable[[], object]:
    """Two work items of three tiles of queries; the slots are of Q and of dO."""
    config = FusedConfig(64, *slots, 240, 24, 168, True)
    q, k = (torch.randn(1, 2, n, 128).half() for n in (192, 128))
    spec = Spec(Mask(), 1.0, deterministic=False)

    def call() -> None:
        with mock.patch.object(sys.modules[fused_backward.__name__], "fused_config", return_value=config):
            hopper.backward(q, None, q, k, k, q, torch.full(q.shape[:3], 30.0), spec, (True,) * 3 + (False,) * 3)

    return call


MEET, STORED = "wait_for_each_other()", "store_wait(0)"
FUSED = {  # some lines of fused_backward.py, and what stands there instead
    "groups that do not wait in a step": (f"    {MEET}\n    b_dq = dq", "    b_dq = dq"),
    "groups that do not wait after an item": (f"        {MEET}\n        store_item", "        store_item"),
    "room for dS of one step": ("[4, 1, 1, ROWS, BLOCK_M]", "[2, 1, 1, ROWS, BLOCK_M]"),
    "dQ written while it is added": (f"    {STORED}\n    add_to_dq(", "    add_to_dq("),
    "one place for both parts of dQ": ("    tile_in(I_GROUP, ring).store", "    tile_in(0, ring).store"),
    "no wait for what is added": (f"        {STORED}\n        release(I", "        store_wait(2)\n        release(I"),
    "dO released too early": (
        "    b_dv, b_dq = warpgroup_mma_wait(1, deps=(b_dv, b_dq))\n    release(n, do_ring)\n",
        "    release(n, do_ring)\n    b_dv, b_dq = warpgroup_mma_wait(1, deps=(b_dv, b_dq))\n",
    ),
    "Q released too early": (
        "    b_dk = warpgroup_mma_wait(0, deps=(b_dk,))\n    release(n, q_ring)\n",
        "    release(n, q_ring)\n    b_dk = warpgroup_mma_wait(0, deps=(b_dk,))\n",
    ),
    "dQ used before it is there": ("wait(1, deps=(b_dv", "wait(2, deps=(b_dv"),
    "K released before dK has left": (
        f"        {STORED}\n        release(I_GROUP, k_ring)\n",
        f"        release(I_GROUP, k_ring)\n        {STORED}\n",
    ),
    "K never released": ("        release(I_GROUP, k_ring)\n", ""),
    "the slot of the other group's K": ("store_item(i, I_GROUP, k_ring", "store_item(i, 1 - I_GROUP, k_ring"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FUSED)
def test_a_fault_in_the_fused_backward_is_found_in_every_order(hopper_gpu, tmp_path, fault):
    # With as many slots of dO as of Q, there is room for dO only after Q was released, which comes later.
    call = fused((2, 1) if fault.startswith("dO") else (2, 2))
    assert found(hopper_gpu, call) == []
    with edited(tmp_path, "fused_backward", *FUSED[fault]):
        assert len(found(hopper_gpu, call)) == len(SEEDS)
