"""The process group of tests/sharding: starting another one takes seconds per process."""

import pytest

from tests.sharding.ranks import shared


@pytest.fixture(scope="session")
def two():
    """Two ranks."""
    with shared(2) as ranks:
        yield ranks
