"""Slow checks that have passed, and whether their sources are still what they were then; Python is enough.

`python .ci/passed.py CHECK ...` prints the checks whose sources have changed since; `--record CHECK` is what the check
says itself, in the Makefile, when it has passed.
"""

import argparse
import fcntl
import hashlib
import json
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")

_KERNELS = ("csrc/*.h", "csrc/cpu/*.[ch]*", "tests/cpu_kernels/*")
_OF_TRITON = (
    *("fastattn/backends/triton/*.py", "fastattn/backends/hopper/*.py", "benchmarks/gpu/compiling.py"),
    # The last of these says what compiles.
    *("tests/gpu_models/ptx/*.[chp]*", "tests/gpu_models/modelled_gpu.py", "constraints.txt"),
)
_AROUND = tuple(f"fastattn/backends/{name}.py" for name in ("build", "compiling", "diagonals", "gradients"))
_OF_CPU = tuple(f"tests/backends/test_{name}.py" for name in ("conformance", "properties", "cpu"))
SOURCES = {
    "cpu-test": _KERNELS,
    "sanitize": (*_KERNELS, *_OF_CPU, "fastattn/testing.py", "fastattn/backends/cpu.py"),
    "thread-sanitize": _KERNELS,
    "valgrind": _KERNELS,
    "aarch64": _KERNELS,
    "ptx": (
        *(*_OF_TRITON, "fastattn/backends/cuda.py", "csrc/*.h", "csrc/cuda/*.[ch]*", "tests/gpu_models/ptx/c10/cuda/*"),
        *("tests/gpu_models/test_*_kernels.py", "tests/backends/test_hopper_*.py"),
    ),
    "ptx-few": (
        *(*_AROUND, "fastattn/spec.py", "fastattn/testing.py", "tests/backends/places.py", "tests/core/test_paged.py"),
        *("tests/conftest.py", "tests/quick_interpreter.py"),
        *(f"tests/backends/test_{name}.py" for name in ("conformance", "properties", "triton")),
    ),
    "ptx-tritons": _OF_TRITON,
    "tools-test": (
        *("fastattn/backends/**/*.py", "fastattn/bench/*.py", "fastattn/__main__.py", "fastattn/machine.py"),
        *("csrc/**/*.[ch]*", "benchmarks/gpu/*.py", "tests/compile_gates/*", "tests/gpu_models/**/*.[chp]*"),
        *("tests/bench/*.py", "tests/conftest.py", "tests/backends/places.py"),
        *("tests/backends/*launches.py", "tests/packaging/test_build.py", "setup.py", "pyproject.toml"),
        "constraints.txt",
    ),
}


def digest(check: str) -> str:
    """Of all that a check compiles and runs."""
    result = hashlib.sha256()
    paths = {path for pattern in SOURCES[check] for path in REPOSITORY.glob(pattern) if path.is_file()}
    for path in sorted(paths):
        result.update(f"{path.relative_to(REPOSITORY)}\n{path.read_text()}".encode())
    return result.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="that these checks have passed")
    parser.add_argument("checks", metavar="CHECK", nargs="+", choices=SOURCES)
    options = parser.parse_args()
    now = {check: digest(check) for check in options.checks}
    with RECORD.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # checks that end at once
        file.seek(0)
        passed = json.loads(file.read() or "{}")
        if options.record:
            file.truncate(0)
            file.write(json.dumps(passed | now, indent=1, sort_keys=True) + "\n")
        else:
            print(*(check for check in now if passed.get(check) != now[check]))


if __name__ == "__main__":
    main()
