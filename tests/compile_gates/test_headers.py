"""Each C++ header includes what it uses, and nothing but kernels is compiled for an instruction set."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest
from torch.utils import cpp_extension

REPOSITORY = Path(__file__).resolve().parents[2]
HEADERS = sorted(path for folder in ("csrc", "csrc/cpu") for path in (REPOSITORY / folder).glob("*.h"))
"""Without those of csrc/cuda, for which `make cuda` does the same with nvcc."""
OF_KERNELS = {path for path in HEADERS if re.search("FASTATTN_(ISA|BF16|TILES)", path.read_text())}
"""The headers that are compiled once for each instruction set, whose macros they need."""

LEVELS = {"x86_64": ("amx", "portable"), "aarch64": ("neon_bf16", "neon")}.get(platform.machine(), ("portable",))
"""Instruction sets that between them include every header of the CPU kernels."""


def compiler(*options: str, source: str) -> subprocess.CompletedProcess[str]:
    """The outcome of the C++ compiler on a source."""
    include = [f"-isystem{path}" for path in (sysconfig.get_path("include"), *cpp_extension.include_paths())]
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-std=c++20", *include, *options, "-x", "c++", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True)


def errors_in(header: Path, *options: str) -> str:
    """The messages about a source that includes the header, twice, and nothing else; none where it compiles."""
    done = compiler("-fsyntax-only", *options, source=2 * f'#include "{header}"\n')
    return done.stderr if done.returncode != 0 else ""


def source_of(level: str) -> Path:
    return REPOSITORY / "csrc/cpu" / f"{level}.cpp"


def compiled_for(level: str) -> set[Path]:
    """The headers with code that is read after the source of that instruction set has chosen its target."""
    preprocessed = compiler("-E", source=f'#include "{source_of(level)}"\n').stdout
    start = preprocessed.index(f'# 1 "{source_of(level).parent / "kernels.h"}" 1')
    parts = re.split(r'^# \d+ "([^"]+)".*\n', preprocessed[start:], flags=re.MULTILINE)[1:]
    files = {Path(file).resolve() for file, code in zip(parts[::2], parts[1::2], strict=True) if code.strip()}
    return files - {source_of(level)}


def flags_of(level: str) -> list[str]:
    """The macros and the target of an instruction set as options, so that its source need not be included."""
    text = source_of(level).read_text()
    targets = re.findall(r'#define FASTATTN_TARGET "(.*)"', text)
    return [
        *(f"-D{name}={value}" for name, value in re.findall(r"#define (\w+) (\w+)", text)),
        *(f"-m{name}" for names in targets for name in names.split(",")),
    ]


@pytest.mark.parametrize(
    "header", sorted(set(HEADERS) - OF_KERNELS), ids=lambda path: str(path.relative_to(REPOSITORY))
)
def test_a_header_compiles_by_itself(header):
    assert errors_in(header) == ""


def test_the_headers_of_the_cpu_kernels_compile_by_themselves():
    level_of = {header: level for level in LEVELS for header in compiled_for(level)}
    errors = {header.name: errors_in(header, *flags_of(level)) for header, level in level_of.items()}
    assert {name: messages for name, messages in errors.items() if messages} == {}


@pytest.mark.parametrize("level", LEVELS)
def test_only_kernels_are_compiled_for_an_instruction_set(level):
    """The linker keeps one copy of an inline function: it must not be one that the machine cannot run."""
    assert compiled_for(level) <= OF_KERNELS
