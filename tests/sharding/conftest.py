"""This process as a group."""

import pytest

from tests.sharding.tables import only_rank


@pytest.fixture(scope="module")
def alone():
    """This process as the only rank of a group."""
    with only_rank():
        yield
