"""Runs transformers' own tests of its models twice: as they are, and with fastattn under the name "sdpa".

    python tests/integrations/transformers_suite.py CHECKOUT bert llama t5 [options of pytest]

CHECKOUT holds the tests of transformers, which are not in its package, in the version that is installed. Many of them
compare the implementation "sdpa" with "eager", so in the second run they compare fastattn with it. What passes in the
first run and not in the second is listed, and makes the exit status 1. Besides what fastattn needs, the tests want
pytest, pytest-subtests where pytest is older than 9, parameterized, httpx and timeout-decorator. Those that download
something fail in both runs. One process counts the calls, so pytest-xdist is of no use here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

PLUGIN = Path(__file__).stem


def main() -> int:
    """1 if a test fails with fastattn that passes without it, or a model has none that passes, else 0."""
    parser = argparse.ArgumentParser(usage="%(prog)s CHECKOUT MODEL [MODEL ...] [options of pytest]")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("models", nargs="+", help="names of folders in tests/models")
    arguments, options = parser.parse_known_args()
    files = []
    for model in arguments.models:
        files.append(file := Path("tests", "models", model, f"test_modeling_{model}.py"))
        if not (arguments.checkout / file).is_file():
            parser.error(f"CHECKOUT must be one of transformers with its tests, but has no {file}")
    nothing_passed = False
    before = outcomes(arguments.checkout, files, options, as_sdpa=False)
    after = outcomes(arguments.checkout, files, options, as_sdpa=True)
    for file in files:
        for title, outcomes_of in (("transformers alone", before), ("with fastattn", after)):
            counts = Counter(
                outcome for test, outcome in outcomes_of.items() if test.startswith(f"{file.as_posix()}::")
            )
            if not counts["passed"]:
                print(f"no test of {file} passed, {title}; what pytest says stands above")
                nothing_passed = True
            shown = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
            print(f"{file.parent.name}, {title}: {shown}")
    broken = [test for test in before if before[test] == "passed" != after.get(test)]
    for test in broken:
        print(f"{after.get(test, 'not run')} with fastattn: {test}")
    print(f"{len(broken)} of {Counter(before.values())['passed']} tests that pass without fastattn do not with it")
    return bool(broken) or nothing_passed


def outcomes(checkout: Path, files: list[Path], options: list[str], *, as_sdpa: bool) -> dict[str, str]:
    """By test, "passed", "failed" or "skipped"."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "outcomes.json")
        command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-q", "--outcomes", file]
        subprocess.run(
            [*command, *(["--as-sdpa"] if as_sdpa else []), *files, *options],
            cwd=checkout,
            env={"HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            check=False,
        )
        if not file.is_file():
            sys.exit("no test has run, or with fastattn none has called it; what pytest says stands above")
        return json.loads(file.read_text())


# From here on the plugin that both runs of pytest load.

_FOUND: dict[str, str] = {}
_CALLS: Counter[str] = Counter()


def pytest_addoption(parser) -> None:
    parser.addoption("--outcomes", help="the file to write the outcome of each test to")
    parser.addoption("--as-sdpa", action="store_true", help='put fastattn under the name "sdpa"')


def pytest_configure(config) -> None:
    if config.getoption("--as-sdpa"):
        from transformers import AttentionInterface, AttentionMaskInterface

        from fastattn.integrations.transformers import attention_forward, attention_mask

        AttentionInterface.register("sdpa", _counting(attention_forward))
        AttentionMaskInterface.register("sdpa", _counting(attention_mask))


def _counting(function):
    import torch

    def call(*args, **kwargs):
        if not torch.compiler.is_compiling():  # a count in the graph would change with every call
            _CALLS[function.__name__] += 1
        return function(*args, **kwargs)

    return call


def pytest_runtest_setup(item) -> None:
    import torch

    torch.manual_seed(0)
    if common := sys.modules.get("tests.test_modeling_common"):
        common.global_rng.seed(0)  # both runs draw the same inputs: for some, a test fails in both


def pytest_runtest_logreport(report) -> None:
    worst = {"skipped": 0, "passed": 1, "failed": 2}  # of set-up, call, tear-down and subtests
    ran = report.when == "call" or report.outcome != "passed"
    if ran and worst[report.outcome] >= worst[_FOUND.get(report.nodeid, "skipped")]:
        _FOUND[report.nodeid] = report.outcome


def pytest_sessionfinish(session) -> None:
    if _CALLS or not session.config.getoption("--as-sdpa"):
        Path(session.config.getoption("--outcomes")).write_text(json.dumps(_FOUND))


def pytest_terminal_summary(terminalreporter, config) -> None:
    if config.getoption("--as-sdpa"):
        terminalreporter.write_line(f"calls of fastattn: {dict(_CALLS)}")


if __name__ == "__main__":
    sys.exit(main())
