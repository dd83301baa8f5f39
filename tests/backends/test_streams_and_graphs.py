"""Streams, CUDA graphs and several GPUs."""

import dataclasses

import pytest
import torch
from places import WITH_ANY_MASK, place_id

from fastattn.backends import reference
from fastattn.testing import CASES, assert_right, make_inputs, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CASE = next(case for case in CASES if case.name == "pad-queries-causal")
on_a_gpu = pytest.mark.parametrize(
    ("backend", "device"),
    [place for place in WITH_ANY_MASK if place[1] == "cuda" and place[0] is not reference],
    ids=place_id,
)
SLEEP = 100_000_000  # cycles: about 50 ms, in which the host has queued everything


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@on_a_gpu
def test_work_is_queued_on_the_current_stream(backend, device):
    """Queries that arrive late on a side stream are waited for there, while the default stream is idle."""
    inputs = make_inputs(CASE, torch.float16, device)
    expected = run(inputs, backend.NAME)
    late = dataclasses.replace(inputs, q=torch.zeros_like(inputs.q))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        late.q.copy_(inputs.q)
        actual = run(late, backend.NAME)
    side.synchronize()
    assert_same_bits(actual, expected)


@on_a_gpu
def test_a_graph_computes_what_its_inputs_hold_at_the_replay(backend, device):
    inputs, others = (make_inputs(CASE, torch.float16, device, seed=seed) for seed in (0, 1))
    expected = [run(x, backend.NAME) for x in (inputs, others)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(inputs, backend.NAME)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = run(inputs, backend.NAME)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(actual, expected[0])
    for name in ("q", "k", "v", "do", "dlse"):
        getattr(inputs, name).copy_(getattr(others, name))
    for name in ("real_keys", "real_queries"):
        getattr(inputs.mask, name).copy_(getattr(others.mask, name))
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(actual, expected[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@on_a_gpu
def test_a_gpu_that_is_not_the_current_one_computes(backend, device):
    for number in reversed(range(torch.cuda.device_count())):
        inputs = make_inputs(CASE, torch.float16, f"{device}:{number}")
        outputs = run(inputs, backend.NAME)
        assert {x.device for x in outputs.values()} == {inputs.q.device}
        assert torch.cuda.current_device() == 0
        assert_right(inputs, outputs)
