"""Launches of Triton's kernels on the machine: a driver of Triton for a GPU that is not there.

Triton compiles, specialises, packs and launches as on a GPU. In the place of its functions in C, which call CUDA's
driver, stand those of `_Utils`; and a kernel ends as PTX, in the place of ptxas's code.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from benchmarks.gpu.compiling import NoGPU
from fastattn.backends import hopper
from fastattn.backends import triton as backend
from fastattn.backends.triton import launches
from fastattn.backends.triton.tiles import Table

from . import gpu

_IS_3_6 = hasattr(nvidia, "make_launcher")  # or older
_FORMATS = {"fp32": "f", "f32": "f", "fp64": "d", "i64": "q", "u64": "Q"}


class _Argument(NamedTuple):
    """In the place of Triton's PyKernelArg."""

    nested_tuple: object
    type: int


_CONSTEXPR, _KERNEL, _TUPLE = range(3)


class Gpu(gpu.Gpu):
    """A GPU of which Triton's launches are the machine's.

    Attributes:
        multiprocessors: few, so that a program has several work items.
    """

    def __init__(self, arch: int, counting: bool = False) -> None:
        super().__init__(arch, counting)
        self.multiprocessors = 3

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple:
        text = binary.decode()
        if _IS_3_6 and self.arch == 90:  # it leaves out a fence that 3.7 has, which Hopper GPUs do without
            text = re.sub(r"(cp\.async\.wait_group\s+\d+;)", r"\1 fence.proxy.async.shared::cta;", text)
        return None, (name, text), 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": gpu.SHARED_BYTES[self.arch]}

    def build_signature_metadata(self, signature: list[str]) -> list[str]:
        return signature

    def fill_tma_descriptor_tiled(
        self, address: int, swizzle: int, element: int, kind: int, box: list[int], shape: list[int], strides: list[int],
        padding: int,
    ) -> TensorMap:  # fmt: skip
        """What cuTensorMapEncodeTiled makes of a tensor, and refuses of it (CUDA Driver API, Tensor Map Object)."""
        rank, box, shape = len(shape), [*reversed(box)], [*reversed(shape)]
        in_bytes = [element * stride for stride in reversed(strides[:-1])]
        assert 1 <= rank <= 5
        assert address % 16 == 0
        assert padding == 0
        assert all(stride % 16 == 0 and 0 < stride < 2**40 for stride in in_bytes)
        assert all(0 < n <= 2**32 for n in shape)
        assert all(0 < n <= 256 for n in box)
        assert box[0] * element % 16 == 0
        assert swizzle == 0 or box[0] * element <= 16 << swizzle
        none = [0] * (5 - rank)
        sizes = *shape, *none, *box, *none, *in_bytes, *none
        words = struct.pack("<Q10I4Q4I", address, *sizes, rank, element, swizzle, kind)
        return TensorMap(gpu.pieces(address, shape, [element, *in_bytes], element), words)

    fill_tma_descriptor = fill_tma_descriptor_tiled  # as Triton 3.6 calls it

    @staticmethod
    def launch(*arguments: object) -> None:
        """What a compiled kernel keeps, in the place of a method: else it would keep the programs of this GPU, too."""
        driver.active.utils.run(*arguments)

    def run(
        self, x, y, z, stream, function, cooperative, pdl, packed, metadata, enter, leave, scratch, profile,
        annotations, signature, arguments,
    ) -> None:  # fmt: skip
        """What Triton's own function of that name does: src/third_party/nvidia/backend/driver.c."""
        assert packed[1] == 1, "clusters are not modelled"
        assert scratch is None, "scratch memory is not modelled"
        assert profile is None, "scratch memory is not modelled"
        name, text = function
        values = [*_flat(annotations, arguments), None, None]
        types = [*signature, "*i8", "*i8"]
        if x * y * z:
            packed_values = [_packed(t, value) for t, value in zip(types, values, strict=True)]
            ranges = np.concatenate(
                [gpu.NOWHERE, *map(ranges_of, values), *map(gpu.ranges_of, _by_distance(arguments))]
            )
            self.runs(name, text, (x, y, z), 32 * packed[0], packed[2], lambda program: packed_values, ranges)

    def _properties(self, device: object) -> SimpleNamespace:
        return SimpleNamespace(multi_processor_count=self.multiprocessors)

    @contextlib.contextmanager
    def computes_for_the_cpu(self) -> Iterator[None]:
        """Calls of the Triton and the Hopper backend on CPU tensors are computed on this GPU.

        Memory that they allocate is full of NaN.
        """
        if _IS_3_6:
            parts = {"make_launcher": _types_in_launcher, "compile_module_from_src": _Launcher, "library_dirs": list}
        else:
            parts = {"PyKernelArg": _Argument, "ARG_CONSTEXPR": _CONSTEXPR, "ARG_KERNEL": _KERNEL, "ARG_TUPLE": _TUPLE}
        runtime = triton.knobs.runtime
        with (
            mock.patch.multiple(nvidia, **parts),
            mock.patch.object(driver, "_active", _Driver(self)),
            mock.patch.object(runtime, "add_stages_inspection_hook", _ends_as_ptx),
            mock.patch.object(triton.knobs.compilation, "disable_line_info", True),
            mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(self.arch, 10)),
            mock.patch.object(torch.cuda, "device_of", contextlib.nullcontext),
            mock.patch.object(torch.cuda, "get_device_properties", self._properties),
            mock.patch.object(backend, "_device_objections", side_effect=lambda device: []),
            mock.patch.object(hopper, "_device_objections", side_effect=lambda device: []),
            mock.patch.dict(launches._known, clear=True),
            gpu.memory_full_of_nan(),
        ):
            yield


class _Driver(NoGPU):
    """Its launcher is Triton's own. What is compiled for one GPU is not taken for another: their numbers differ."""

    launcher_cls = nvidia.CudaLauncher

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu.arch)
        self.utils = gpu

    def get_current_device(self) -> int:
        return self.utils.arch

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class TensorMap(NamedTuple):
    """A descriptor of a tensor for TMA, in the place of a CUtensorMap."""

    ranges: np.ndarray
    words: bytes


class _Launcher:
    """In the place of what Triton 3.6 compiles for each signature: `src` are the types of the arguments."""

    def __init__(self, src: list, **options: object) -> None:
        self._annotations, self._types = _annotated(src), [*_flat(_annotated(src), src)]

    def launch(
        self, x, y, z, stream, function, cooperative, pdl, scratch, profile, packed, metadata, enter, leave, *arguments
    ) -> None:  # fmt: skip
        driver.active.utils.run(
            x, y, z, stream, function, cooperative, pdl, packed, metadata, enter, leave, scratch, profile,
            self._annotations, self._types, arguments,
        )  # fmt: skip


def _types_in_launcher(constants: dict, signature: dict[int, object], tensordesc_meta: list | None) -> list:
    """The types of all arguments, where each descriptor is followed by its shape and strides."""
    types = []
    for of in signature.values():
        is_descriptor = isinstance(of, str) and of.startswith("tensordesc")
        assert not is_descriptor or tensordesc_meta, "descriptors are only modelled for TMA"
        n = of[: of.index("]")].count(",") + 1 if is_descriptor else 0
        types += ["nvTmaDesc", *["i32"] * n, *["i64"] * n] if is_descriptor else [of]
    return types


def _annotated(types: tuple | list) -> list[_Argument]:
    nested = [_annotated(of) if isinstance(of, tuple) else None for of in types]
    kinds = [_TUPLE if isinstance(of, tuple) else _CONSTEXPR if of == "constexpr" else _KERNEL for of in types]
    return [*map(_Argument, nested, kinds)]


def _ends_as_ptx(*arguments: object) -> tuple[str, str] | None:
    """Of Triton's stages the last leaves PTX; without arguments what tells such kernels apart in its cache."""
    if not arguments:
        return "ends as PTX", "ends as PTX"
    stages = arguments[1]
    stages["cubin"] = lambda source, metadata: source.encode()
    return None


def _flat(annotations: list[_Argument], arguments: object) -> Iterator[object]:
    for annotation, argument in zip(annotations, arguments, strict=True):
        if annotation.type == _TUPLE:
            yield from _flat(annotation.nested_tuple, argument)
        elif annotation.type == _KERNEL:
            yield argument


def _by_distance(arguments: object) -> Iterator[Tensor]:
    """Each bias by distance from its first entry on: the kernels get it from that of query 0 and key 0 on."""
    if isinstance(arguments, Table) and arguments.by_distance is not None:
        x = arguments.data
        before = x.stride(0) - x.shape[2] if len(x) > 1 else x.storage_offset()
        yield x.as_strided((len(x), before + x.shape[2]), (x.stride(0), 1), x.storage_offset() - before)
    elif isinstance(arguments, tuple):
        for part in arguments:
            yield from _by_distance(part)


def _packed(of_type: str, value: object) -> bytes:
    if isinstance(value, TensorMap):
        return value.words
    if of_type[0] == "*":
        return struct.pack("Q", 0 if value is None else value.data_ptr())
    return struct.pack(_FORMATS.get(of_type, "q"), value)


def ranges_of(x: object) -> np.ndarray:
    """Where the elements of a tensor begin and end, uint64 [pieces, 2]."""
    if isinstance(x, TensorMap):
        return x.ranges
    return gpu.ranges_of(x) if isinstance(x, Tensor) else gpu.NOWHERE
