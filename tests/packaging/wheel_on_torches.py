"""One wheel with several versions of Python and torch: the tests of the CPU backend, where nothing can be compiled.

`make wheel-test PYTHONS="python3.10 python3.12"` makes the wheel and gives each Python an environment of its own in
build/wheel_test, with the torch of TORCHS and the wheel. The tests run on a copy of theirs, since they would import the
package of the checkout. Of this file, `--is-current` exits with 0 or 1, and `--table` prints the record.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENTS = REPOSITORY / "build" / "wheel_test"
RECORD = Path(__file__).with_name("wheel_tested.json")

TORCHS = {"3.10": "2.10.0", "3.11": "2.13.0", "3.12": "2.11.0", "3.13": "2.15.0", "3.14": "2.15.0"}
"""By version of Python: the oldest that the package supports, the newest, and two between."""

_TOOLS = ("numpy", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "expecttest")
_TESTS = ("tests/backends/test_conformance.py", "tests/backends/test_cpu.py", "tests/core/test_plan.py")


def is_current() -> bool:
    """Whether the record is of a wheel with the kernels as they are."""
    sys.path.insert(0, str(REPOSITORY / "fastattn" / "backends"))
    import build

    return RECORD.is_file() and json.loads(RECORD.read_text())["module"] == build.CPU.file_name()


def table() -> str:
    """Markdown: a line for each Python and torch of the record."""
    rows = [(run["python"], run["torch"], run["passed"]) for run in json.loads(RECORD.read_text())["runs"]]
    return "\n".join(
        f"| {' | '.join(map(str, row))} |" for row in (("Python", "torch", "tests passed"), ("---",) * 3, *rows)
    )


def environment(python: str) -> tuple[str, Path]:
    """The version of a Python and that of an environment of it with its torch, which is made unless it is there."""
    show = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = subprocess.check_output([python, "-c", show], text=True).strip()
    if version not in TORCHS:
        raise SystemExit(f"--python must be one of {', '.join(TORCHS)}, got {version} ({python})")
    folder = ENVIRONMENTS / f"py{version}-torch{TORCHS[version]}"
    if not (folder / "ready").exists():
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
        install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, f"torch=={TORCHS[version]}", *_TOOLS], check=True)
        (folder / "ready").touch()
    return version, folder / "bin" / "python"


def copy_of_tests() -> Path:
    """A folder with the tests and their settings, and without the package."""
    folder = ENVIRONMENTS / "checkout"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(REPOSITORY / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    return folder


def counted(wheel: Path, python: Path, folder: Path) -> dict[str, int]:
    """How many tests passed, failed, and so on, by pytest's words."""
    install = [python, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    variables = {"CXX": "/nonexistent", "TORCH_EXTENSIONS_DIR": str(ENVIRONMENTS / "empty"), "OMP_NUM_THREADS": "1"}
    variables["LD_PRELOAD"] = "libstdc++.so.6"  # names of another C++ library come first, as torch 2.15 has it
    tests = ["-k", "cpu-cpu or not test_conformance.py", *_TESTS]
    run = subprocess.run(
        [python, "-m", "pytest", "--quiet", "--numprocesses=auto", *tests],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )
    print(run.stdout[-2000:], flush=True)
    return {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|errors?|skipped)\b", run.stdout)}


def main() -> None:
    """Prints what pytest says with each Python; exits with 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--is-current", action="store_true", help="whether the record is of the kernels as they are")
    parser.add_argument("--table", action="store_true", help="the record as a table, in Markdown")
    parser.add_argument("--record", action="store_true", help=f"in {RECORD.name}")
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--python", action="append", default=[])
    options = parser.parse_args()
    if options.is_current:
        sys.exit(not is_current())
    if options.table:
        print(table())
        return
    if options.wheel is None or not options.wheel.is_file():
        parser.error(f"--wheel must be a file, which `make wheel` leaves in dist, got {options.wheel}")
    rows, folder = [], copy_of_tests()
    for version, python in map(environment, options.python):
        print(f"Python {version}, torch {TORCHS[version]}", flush=True)
        rows.append({"python": version, "torch": TORCHS[version], **counted(options.wheel.resolve(), python, folder)})
    right = rows and all(row.keys() <= {"python", "torch", "passed", "skipped"} and row["passed"] for row in rows)
    if right and options.record:
        names = zipfile.ZipFile(options.wheel).namelist()
        (module,) = (Path(name).name for name in names if name.endswith(".so"))
        document = {"wheel": options.wheel.name, "module": module, "runs": rows}
        RECORD.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(not right)


if __name__ == "__main__":
    main()
