"""The machine, the versions and the time of a measurement."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from pathlib import Path

import torch

import fastattn

_REPOSITORY = Path(fastattn.__file__).resolve().parents[1]


def machine(device: str) -> dict[str, str | int]:
    """The processor, and the GPU for "cuda", by name of the property."""
    result = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cpu_capability_of_torch": torch.backends.cpu.get_cpu_capability(),
        "os": platform.platform(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        result |= {
            "gpu": properties.name,
            "gpu_memory_mib": properties.total_memory // 2**20,
            "gpu_multiprocessors": properties.multi_processor_count,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "driver": _told_by_nvidia_smi("driver_version") or "unknown",
        }
    return result


def versions() -> dict[str, str]:
    """The versions of fastattn (with its commit, in a checkout), torch, its CUDA and cuDNN, triton and Python."""
    commit = _commit()
    return {
        "fastattn": fastattn.__version__ + (f" ({commit})" if commit else ""),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "cudnn": str(torch.backends.cudnn.version() or "none"),
        "triton": version_of("triton") if importlib.util.find_spec("triton") else "not installed",
        "python": platform.python_version(),
    }


def version_of(module: str) -> str:
    """The version of the distribution of a module that can be imported, as far as it has the name of the module."""
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:  # as of onnxruntime-gpu and of nightly builds
        return "unknown"


def gpu_state(device: str) -> dict[str, str]:
    """Clocks, temperature, power and why clocks are held down, by nvidia-smi's names; {} where there is none."""
    names = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.active")
    told = ""
    if device == "cuda" and torch.cuda.is_available():
        told = _told_by_nvidia_smi(*names, gpu=f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    return dict(zip(names, told.split(", "), strict=True)) if told else {}


def now() -> str:
    """The date and time, ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def cpu_model() -> str:
    """The processor as Linux names it, with family, model and stepping: virtual machines often hide the name."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return platform.processor() or platform.machine()
    first = cpuinfo.read_text().partition("\n\n")[0]
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    if "model name" not in fields:  # Arm
        return platform.machine()
    numbers = "/".join(fields.get(key, "?") for key in ("cpu family", "model", "stepping"))
    return f"{fields['model name']} (family/model/stepping {numbers})"


def _told_by_nvidia_smi(*names: str, gpu: str | None = None) -> str:
    """Properties of a GPU of this machine, None for the first one, comma-separated."""
    query = [f"--query-gpu={','.join(names)}", "--format=csv,noheader", *([] if gpu is None else [f"--id={gpu}"])]
    return _output_of("nvidia-smi", *query).partition("\n")[0]


@functools.cache  # it is a process of git, and what is imported does not change
def _commit() -> str:
    """The commit of the checkout that this package is imported from, marked when files differ; "" outside one."""
    if not (_REPOSITORY / ".git").exists():
        return ""
    return _output_of("git", "-C", str(_REPOSITORY), "describe", "--always", "--dirty", "--exclude=*")


def _output_of(*command: str) -> str:
    """The output of a command; "" where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
