"""Process groups that the files here share, because importing torchrec takes seconds per process."""

import pytest

from tests.sharding.ranks import shared
from tests.sharding.tables import only_rank


@pytest.fixture(scope="session")
def two():
    """Two ranks."""
    with shared(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def alone():
    """This process as the only rank of a group."""
    with only_rank():
        yield
