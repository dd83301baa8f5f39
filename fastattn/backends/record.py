"""Memory of this machine: which families of kernels passed their checks on it, and how fast they were.

One file in the cache folder for each kind of device, named after what it was found with: processor or GPU, driver,
torch, Triton, Python and fastattn. A file of anything else has another name, and is never read. With FASTATTN_RECORD=0
none is read or written.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .. import machine
from .build import cache_dir, only_holder_of

_SCHEMA = 2


@dataclass(frozen=True)
class Record:
    """What was found on one kind of device.

    families: by the name of a family of kernels, "" where it passed its check, or the sentence why it did not.
    classes: by class of calls (`CallClass` of choice.py, as a tuple), milliseconds by name of a backend, the one that
        serves by default first.
    tiles: by the name of a Triton kernel, that which is faster than its default tile, as configs.py writes them.
    """

    families: dict[str, str] = field(default_factory=dict)
    classes: dict[tuple, dict[str, float]] = field(default_factory=dict)
    tiles: dict[str, str] = field(default_factory=dict)


def while_tracing(function: Callable) -> Callable:
    """`function`, which torch.compile then calls once, while it traces, and takes for a constant."""
    function._dynamo_marked_constant = True  # all that torch.compiler.assume_constant_result does but import dynamo
    return function


def is_traced() -> bool:
    """Whether a graph is made, or tensors stand for others: nothing that is computed means anything."""
    return torch.compiler.is_compiling() or are_fake()


@while_tracing
def are_fake() -> bool:
    """Whether tensors are FakeTensors, as where Dynamo asks an op for its outputs."""
    return _mode(_FAKE) is not None


_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE


def key(device: torch.device) -> dict[str, str]:
    """Everything that a record depends on, by name."""
    known = machine.versions()
    found = {name: known[name] for name in ("fastattn", "torch", "triton", "python")}
    if device.type == "cpu":  # a smaller set of instructions is another processor
        return found | {"cpu": machine.cpu_model(), "capability": os.environ.get("FASTATTN_CPU_CAPABILITY", "")}
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "gpu": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "driver": _driver(),
    }


@functools.cache
def _driver() -> str:
    """The CUDA that the driver serves, such as 13000; "" where there is no driver. PyTorch has no public way to ask."""
    version, library = ctypes.c_int(), "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return ""
    return str(version.value)


def path(device: torch.device) -> Path:
    """The file of the record."""
    digest = hashlib.sha256(json.dumps(key(device), sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / f"record-{device.type}-{digest}.json"


@while_tracing
def is_tuned(device: torch.device) -> bool:
    """Whether classes of calls were measured on this device."""
    return bool(of(device).classes)


_records: dict[torch.device, Record] = {}  # of this process


def of(device: torch.device) -> Record:
    """The record of this device: empty where there is none, or none that can be read."""
    place = _place(device)
    if place not in _records:
        _records[place] = _read(device)
    return _records[place]


def _place(device: torch.device) -> torch.device:
    """The device with its index: a process may have two kinds of GPU."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def read_again(device: torch.device) -> Record:
    """The record as another process may have written it meanwhile."""
    _records.pop(_place(device), None)
    return of(device)


def update(device: torch.device, change: Callable[[Record], Record]) -> Record:
    """Replaces the record by what `change` makes of it, with no other process in between; and returns it.

    Where it cannot be written, it holds for this process alone.
    """
    with exclusively(device):
        record = _records[_place(device)] = change(of(device) if _is_off() else read_again(device))
        try:
            if not _is_off():
                _write(path(device), as_json(device, record))
        except OSError as error:
            warnings.warn(f"{path(device)} cannot be written, so this process alone knows it: {error}", stacklevel=2)
    return record


@contextmanager
def exclusively(device: torch.device) -> Iterator[None]:
    """Lets one thread of one process on at a time, as far as the cache folder can be written."""
    with ExitStack() as stack:
        try:
            cache_dir().mkdir(0o755, parents=True, exist_ok=True)
            stack.enter_context(only_holder_of(path(device)))
        except OSError:
            pass
        yield


def as_json(device: torch.device, record: Record) -> str:
    """The file of a record."""
    classes = [{"class": list(call_class), "ms": ms} for call_class, ms in record.classes.items()]
    found = {"families": record.families, "classes": classes, "tiles": record.tiles}
    return json.dumps({"schema": _SCHEMA, "key": key(device)} | found, indent=1)


def _read(device: torch.device) -> Record:
    if _is_off() or not _has_any(device):  # quicker to ask than the key
        return Record()
    try:
        return _parsed(path(device).read_text())
    except FileNotFoundError:
        return Record()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        warnings.warn(
            f"{path(device)} is not a record that `fastattn tune` wrote, and is ignored ({type(error).__name__}: "
            f"{error}); it is replaced when that runs again",
            stacklevel=2,
        )
        return Record()


def _has_any(device: torch.device) -> bool:
    with suppress(OSError):  # as where the folder of another user is closed
        return any(cache_dir().glob(f"record-{device.type}-*.json"))
    return False


def _is_off() -> bool:
    return os.environ.get("FASTATTN_RECORD") == "0"


def _parsed(text: str) -> Record:
    written = json.loads(text)
    if written["schema"] != _SCHEMA:
        raise ValueError(f"its schema is {written['schema']}, not {_SCHEMA}")
    families = {str(name): str(why) for name, why in written["families"].items()}
    classes = {tuple(x["class"]): {str(name): _time(ms) for name, ms in x["ms"].items()} for x in written["classes"]}
    if not all(classes.values()):
        raise ValueError("a class without a time")
    return Record(families, classes, {str(name): str(tile) for name, tile in written["tiles"].items()})


def _time(ms: object) -> float:
    if not isinstance(ms, (int, float)) or not 0 < ms < math.inf:
        raise ValueError(f"a time must be above 0, got {ms!r}")
    return float(ms)


def _write(target: Path, text: str) -> None:
    """Replaces a file whole, also if the machine stops in between."""
    with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=f".{target.name}", delete=False) as part:
        try:
            part.write(text)
            part.flush()
            os.fsync(part.fileno())
            os.chmod(part.name, 0o644)  # as the modules beside it: the folder may be that of several users
            os.replace(part.name, target)
        except OSError:
            os.unlink(part.name)
            raise
