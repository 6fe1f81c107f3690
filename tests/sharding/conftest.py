"""Groups of processes that the files here share: importing torchrec takes each of them seconds."""

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
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
            patch.delenv(name, raising=False)  # what as_torchrun sets is gone again afterwards
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()
