"""The machine in C++, compiled at first use, and programs that were parsed for it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fastattn.backends import build

_FOLDER = Path(__file__).parent
BUILDS = _FOLDER.parents[2] / "build" / "ptx_machine"
_MESSAGE_BYTES = 1 << 16


class PtxError(Exception):
    """A kernel does what the PTX manual leaves undefined, or holds what the machine does not know."""


class Launch(ctypes.Structure):
    """As in machine.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("counting", ctypes.c_uint32),
    )


class Counts(ctypes.Structure):
    """As in machine.h."""

    NAMES = (
        *("warps", "lanes", "global_bytes", "sectors", "fewest_sectors"),
        *("shared_bytes", "wavefronts", "fewest_wavefronts"),
    )
    _fields_ = tuple((name, ctypes.c_uint64) for name in NAMES)


class Program:
    """A kernel of a PTX module.

    Args:
        text: the module.
        kernel: its name; where the module has one, an empty one will do.

    Raises:
        PtxError: it holds what the machine does not know.
    """

    def __init__(self, text: str, kernel: str = "") -> None:
        self.text = text
        self._library, message = _library(), ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._handle = self._library.ptx_parse(text.encode(), kernel.encode(), message, _MESSAGE_BYTES)
        if not self._handle:
            raise PtxError(message.value.decode())
        self.sizes: list[int] = []  # of the parameters
        while size := self._library.ptx_parameter_bytes(self._handle, len(self.sizes)):
            self.sizes.append(size)

    def __del__(self) -> None:
        self._library.ptx_free(self._handle)

    def launch(
        self,
        grid: Sequence[int],
        threads: int,
        shared: int,
        values: Sequence[bytes],
        ranges: np.ndarray | Sequence[tuple[int, int]],
        seed: int,
        counting: bool = False,
    ) -> None:
        """Runs it.

        Args:
            shared: bytes of dynamic shared memory.
            values: of the parameters.
            ranges: the addresses at which each piece of memory that it may use begins and ends.
            seed: of all that is left open: the order of blocks and warps.
            counting: whether bytes and wavefronts are counted.

        Raises:
            PtxError: it does something wrong.
        """
        if len(self.sizes) != len(values):
            raise PtxError(f"{len(values)} values for {len(self.sizes)} parameters")
        both = zip(values, self.sizes, strict=True)
        padded = [ctypes.create_string_buffer(value, max(size, len(value))) for value, size in both]
        pointers = (ctypes.c_void_p * len(padded))(*map(ctypes.addressof, padded))
        ranges = np.ascontiguousarray(ranges, dtype=np.uint64)
        launch = Launch((ctypes.c_uint32 * 3)(*grid), threads, shared, seed, counting)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        if self._library.ptx_launch(
            self._handle, ctypes.byref(launch), pointers, ranges.ctypes.data, len(ranges), message, _MESSAGE_BYTES
        ):
            raise PtxError(message.value.decode())

    def counts(self) -> Iterator[tuple[str, Counts]]:
        """The text of each instruction, and what was counted of it since the program was parsed."""
        i, counts = 0, Counts()
        while (text := self._library.ptx_counts(self._handle, i, ctypes.byref(counts))) is not None:
            yield text.decode(), Counts.from_buffer_copy(counts)
            i += 1


@functools.lru_cache(maxsize=64)  # some take 10 MB
def program(text: str, kernel: str = "") -> Program:
    """The program of that text, parsed once."""
    return Program(text, kernel)


@functools.cache
def _library() -> ctypes.CDLL:
    sources = sorted([*_FOLDER.glob("*.h"), _FOLDER / "machine.cpp"])
    flags = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fno-trapping-math", "-shared", "-fPIC")
    contents = [repr(flags).encode(), *(source.read_bytes() for source in sources)]
    digest = hashlib.sha256(b"".join(contents)).hexdigest()[:16]
    target = BUILDS / f"machine-{digest}.so"
    BUILDS.mkdir(parents=True, exist_ok=True)
    with build.only_holder_of(target):  # by one process at a time
        if not target.is_file():
            unfinished = target.with_suffix(".unfinished")
            command = ["g++", *flags, str(_FOLDER / "machine.cpp"), "-o", str(unfinished)]
            subprocess.run(command, check=True)
            unfinished.replace(target)
    library = ctypes.CDLL(str(target))
    library.ptx_parse.restype = ctypes.c_void_p
    library.ptx_parse.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
    library.ptx_free.argtypes, library.ptx_free.restype = (ctypes.c_void_p,), None
    library.ptx_parameter_bytes.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.ptx_parameter_bytes.restype = ctypes.c_size_t
    library.ptx_counts.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    library.ptx_counts.restype = ctypes.c_char_p
    library.ptx_launch.argtypes = (
        *(ctypes.c_void_p,) * 4, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t,
    )  # fmt: skip
    return library
