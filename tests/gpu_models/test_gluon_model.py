"""The model of Gluon: what is right runs, and gives the same in every order; every kind of fault is found in each."""

import ast
import dataclasses
import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from faulty_kernels import ROWS, SIZE, kernel
from gluon_model import ORDERS, TIMINGS, KernelError, gluon, modelled, running_with
from gluon_model.gluon import TensorDescriptor, gl, jit
from gluon_model.modules import instead_of_triton
from gluon_model.protocol import Arrive, Await, Come, End, Recording, Step, Wait, explore

from fastattn.backends import hopper
from fastattn.backends.triton import preparation

WAYS = list(itertools.product(ORDERS, TIMINGS))


def descriptor(x, block):
    bits = gl.float32 if x.dtype == torch.float32 else gl.float16
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, bits))


def run(fault: str = "none", n_tiles: int = 5, slots: int = 2) -> None:
    """Launches the small kernel and holds its outcome against the formula."""
    x = torch.randint(-3, 4, (n_tiles * ROWS, SIZE), generator=torch.Generator().manual_seed(0)).half()
    sums, total = torch.full((2, ROWS, SIZE), torch.nan), torch.ones(ROWS, SIZE)
    described = descriptor(x, [ROWS, SIZE]), x, descriptor(sums, [1, ROWS, SIZE]), descriptor(total, [ROWS, SIZE])
    kernel[(1,)](*described, n_tiles, slots, fault, num_warps=4)
    expected = x.float().sum(0).expand(ROWS, SIZE)
    assert torch.equal(sums, expected.expand(2, ROWS, SIZE))
    assert torch.equal(total, expected + 1)


@pytest.mark.parametrize(("order", "timing"), WAYS)
def test_what_is_right_runs_in_every_order(order, timing):
    for slots, n_tiles, seed in ((1, 3, 0), (2, 5, 1), (3, 4, 2), (3, 1, 3)):
        with running_with(order=order, timing=timing, seed=seed):
            run(n_tiles=n_tiles, slots=slots)


FAULTS = {  # and what is said of each, whatever the order
    "no release": r"deadlock:\n(.*\n){2}.*produce at [\w.]+:\d+ waits for phase 0 \(parity 0\) of empty\[0\]",
    "count too high": "deadlock",
    "release before the wait": r"tiles\[\d\] is written while it may still be read",
    "no wait for the release": r"tiles\[\d\] is written (while it may still be read|twice at a time)|arrivals at full",
    "no wait for the load": r"tiles\[\d\] is read before (it is filled|anything was written)",
    "producer has the other phase": "deadlock",
    "consumer has the other phase": r"tiles\[0\] is read before (it is filled|anything was written)|deadlock",
    "too few bytes": r"deadlock:(?s:.*)-4096 bytes to come",
    "too many bytes": r"deadlock:(?s:.*)8192 bytes to come",
    "copy not waited for": r"tiles\[1\] is read before it is filled(?s:.*)cp.async",
    "no fence after the copy": r"no fence_async_shared between the cp.async of tiles\[1\]",
    "load that nobody waits for": r"ends without waiting for TMA load of tiles\[0\]",
    "store at the end": r"tiles\[0\] is written twice at a time",
    "fp32 operand": "a must have 16 bits, was fp32",
    "outcome used before the wait": "is used before a wait",
    "wait for too few": r"tiles\[0\] is written while it may still be read",
    "too many releases": r"3 arrivals at empty\[0\], which waits for [12]",
    "release that comes twice": r"tiles\[0\] is (written while it may still be read|read before it is filled)|deadlock",
    "both store to one place": r"t_out\[0\] is written twice at a time",
    "no fence": r"no fence_async_shared between the store of t_out\[0\] by consume 0",
    "named barrier of Triton": "ID of a named barrier must be 9 to 15, was 3",
    "never comes": r"deadlock:(?s:.*)consume 0 at [\w.]+:\d+ waits at named barrier 9: 128 of 256 threads",
    "comes twice": "comes (twice|with 128 of 256 threads) to named barrier 9|deadlock",
    "store while it is read": r"t_out\[0\] is written while it may still be read(?s:.*)TMA store of t_out\[0\]",
    "no wait for the store": "consume 0 ends without waiting for the TMA store",
    "wait for too few stores": "consume 0 ends without waiting for the TMA reduce-add",
    "barrier without init": r"empty\[0\] is used as an mbarrier without init",
    "read of nothing": r"tiles\[0\] is read before anything was written to it",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_every_order(fault):
    for order, timing in WAYS:
        with running_with(order=order, timing=timing), pytest.raises(KernelError, match=FAULTS[fault]):
            run(fault)


def recorded(fault: str = "none", **sizes: int) -> Recording:
    """The steps of the small kernel, run in an order in which many a fault does no harm."""
    recording = Recording()
    with running_with(recording=recording, unordered=True, order="round robin", timing="early"):
        run(fault, **sizes)
    return recording


def test_all_orders_of_what_is_right():
    """The more slots, the further the partitions drift apart."""
    counts = [explore(recorded(slots=slots)) for slots in (1, 2, 3)]
    assert counts == [62, 166, 310]


FOUND_BY_EXPLORING = {
    "one wait more": r"deadlock:(?s:.*)consume \d waits for phase 0 of full\[0\]",
    "release before the wait": r"produce begins the TMA load of tiles\[0\].*, and not over is the wgmma of tiles\[0\]",
    "copy not waited for": r"begins the wgmma of tiles\[1\].*, and not over is the cp.async of tiles\[1\]",
    "store while it is read": r"begins the store of t_out\[0\].*, and not over is the TMA store of t_out\[0\]",
}


@pytest.mark.parametrize("fault", FOUND_BY_EXPLORING)
def test_a_fault_that_did_no_harm_is_found_by_exploring(fault):
    with pytest.raises(KernelError, match=FOUND_BY_EXPLORING[fault]):
        explore(recorded(fault))


def changed(recording: Recording, partition: int, position: int, *steps: Step) -> Recording:
    """The same with other steps in the place of one."""
    result = Recording()
    result.names, result.steps = recording.names, [list(steps) for steps in recording.steps]
    result.steps[partition][position : position + 1] = steps
    return result


def test_no_step_at_a_barrier_can_be_left_out():
    """But for the first waits of the producer, which find every slot empty, and the last releases."""
    recording, spare = recorded(), []
    for p, i, step in recording.of((Arrive, Wait, Come, Await)):
        try:
            explore(changed(recording, p, i))
        except KernelError:
            continue
        spare.append(f"{recording.names[p]} {step}")
    first = [f"produce waits for phase -1 of empty[{slot}]" for slot in (0, 1)]
    last = [f"consume {group} arrives at empty[{slot}]" for group in (0, 1) for slot in (1, 0)]
    assert sorted(spare) == sorted(first + last)


PROBLEMS = ("deadlock", r".* and passes in phase", r".* and not over is", r".* where \d are to come")


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
def test_no_wait_can_be_for_another_phase(shift):
    recording = recorded()
    for p, i, step in recording.of(Wait):
        with pytest.raises(KernelError, match=f"^({'|'.join(PROBLEMS)})"):
            explore(changed(recording, p, i, dataclasses.replace(step, phase=step.phase + shift)))


def test_no_arrival_can_come_twice_or_before_its_access_is_over():
    """The last ones of all may: nobody comes after them."""
    recording, last = recorded(), {}
    for p, i, step in recording.of(Arrive):
        last[p, step.barrier] = i
    for p, i, step in recording.of(Arrive):
        if i != last[p, step.barrier]:
            with pytest.raises(KernelError):
                explore(changed(recording, p, i, step, step))
            if isinstance(before := recording.steps[p][i - 1], End):
                with pytest.raises(KernelError, match="not over"):
                    explore(changed(changed(recording, p, i), p, i - 1, step, before))


def test_descriptors_that_tma_refuses():
    x = torch.zeros(64, 72, dtype=torch.float16)
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    right = {"base": x, "shape": [64, 64], "strides": [72, 1], "block_shape": [64, 64], "layout": layout}
    TensorDescriptor(**right)
    for change, why in (
        ({"base": x.flatten()[1:]}, "base must be aligned to 16 bytes"),
        ({"strides": [71, 1]}, "multiples of 16 bytes"),
        ({"strides": [72, 8]}, "the last stride must be 1"),
        ({"shape": [0, 64]}, "no dimension may be 0"),
        ({"block_shape": [512, 64]}, "1 to 256 entries"),
        ({"block_shape": [48, 64]}, "a power of two"),
        ({"block_shape": [64, 4]}, "16 bytes in its last dimension"),
        ({"shape": [65, 64]}, "ends beyond its tensor"),
        ({"shape": [1] * 6, "strides": [8] * 5 + [1], "block_shape": [1] * 5 + [64]}, "rank must be 1 to 5, was 6"),
    ):
        with pytest.raises(KernelError, match=why):
            TensorDescriptor(**right | change)


@jit
def reads_and_writes(x, i, j, N: gl.constexpr):
    o = gl.arange(0, N)
    gl.store(x + j + o, gl.load(x + i + o, mask=o < 4, other=0.0), mask=o < 4)


def test_only_the_elements_of_a_tensor_are_read_and_written():
    x = torch.zeros(3, 8)[:, :4]
    reads_and_writes[(1,)](x, 0, 16, 8)
    for i, j, what in ((1, 0, "load"), (0, 5, "store"), (-1, 0, "load"), (0, 24, "store")):
        with pytest.raises(KernelError, match=rf"{what} of x \[3, 4\] outside of its elements, at test_gluon_model"):
            reads_and_writes[(1,)](x, i, j, 8)


@jit
def far(n):
    n * 2**20 * 4


def test_whole_numbers_that_overflow_are_found():
    far[(1,)](2**8)
    with pytest.raises(KernelError, match="2147483648 does not fit into int32"):
        far[(1,)](2**9)


@jit
def past_the_cache(x):
    gl.store(x, gl.load(x, cache_modifier=".cg"))


def test_an_argument_that_the_model_does_not_know_is_an_error():
    with pytest.raises(TypeError, match="cache_modifier"):
        past_the_cache[(1,)](torch.zeros(1))


@pytest.fixture(scope="module")
def arithmetic():
    """The kernels of arithmetic_kernel.py: (interpreted by Triton, on the model)."""
    file = Path(__file__).with_name("arithmetic_kernel.py")

    def imported():
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    interpreted = imported()
    with instead_of_triton():
        return interpreted, imported()


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_arithmetic_is_that_of_triton(arithmetic):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(-50, 50, (2, 16), generator=generator, dtype=torch.int32)
    x[0], y[0], y[1:][y[1:] == 0] = 1, 16, 7
    reals = torch.randn(16, generator=generator).masked_fill(torch.arange(16) == 5, torch.nan)
    results = []
    for module in arithmetic:
        wholes, floats = torch.zeros(6 * 16, dtype=torch.int32), torch.zeros(10 * 16)
        module.whole_numbers[(1,)](x, y, wholes, 16)
        module.real_numbers[(1,)](reals, floats, 0.7, 16)
        results.append((wholes, floats))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], equal_nan=True)


def test_what_is_visible_is_that_of_the_interpreter():
    """The functions that the Hopper kernels share with the Triton backend."""
    real = torch.rand(5, 300, generator=torch.Generator().manual_seed(0)) < 0.7
    real[1], real[2, :40], real[3, 200:] = False, False, False
    assert torch.equal(modelled("triton.preparation").real_spans(real), preparation.real_spans(real))


def test_the_model_has_the_names_of_the_shim():
    shim = Path(hopper.__file__).with_name("gluon.py").read_text()
    names = next(ast.literal_eval(node.value) for node in ast.parse(shim).body if getattr(node, "targets", None))
    assert sorted(names) == sorted(gluon.__all__)
