"""Process groups that the files here share, because importing torchrec takes seconds per process."""

import os
import tempfile

import pytest
import torch.distributed as dist

from tests.sharding.ranks import Ranks


@pytest.fixture(scope="session")
def two():
    """Two ranks."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def alone():
    """This process as the only rank of a group."""
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()
    os.environ.clear()  # of what as_torchrun sets
    os.environ.update(environment)
