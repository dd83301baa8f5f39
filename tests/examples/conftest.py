"""How the tests of the examples see a command fail."""

from collections.abc import Callable

import pytest


@pytest.fixture
def error_of(capsys) -> Callable[[Callable[[], int]], str]:
    """Runs a command that must end with 1, and gives back the one line that it says."""

    def said(command: Callable[[], int]) -> str:
        capsys.readouterr()
        assert command() == 1
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return said
