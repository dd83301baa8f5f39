"""The Hopper backend on tensors in the CPU's memory, by the model of Gluon in tests/gpu_models/gluon_model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fastattn.backends import hopper

MULTIPROCESSORS = 3  # few, so that a program has several work items


class GluonModel:
    """Stands among the backends that tests are parametrized with, for the fixture `backend` to find."""

    NAME = "gluon_model"


@contextmanager
def hopper_computes_for_the_cpu(multiprocessors: int = MULTIPROCESSORS) -> Iterator[None]:
    """Calls of the Hopper backend on CPU tensors are computed by its kernels, on a model of a GPU."""
    from gluon_model import modelled  # which imports triton, and this file is imported where there is none too

    copy, gpu = modelled("hopper"), SimpleNamespace(multi_processor_count=multiprocessors)
    with (
        mock.patch.object(hopper, "_device_objections", side_effect=lambda device: []),  # a new list each time
        mock.patch.object(hopper, "forward", copy.forward),
        mock.patch.object(hopper, "backward", copy.backward),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
    ):
        yield


@pytest.fixture
def gluon_model() -> Iterator[None]:
    """What is on the CPU is computed by the Hopper backend on the model of Gluon."""
    with hopper_computes_for_the_cpu():
        yield
