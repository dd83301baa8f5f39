"""The processes that the tests of this folder share."""

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()
