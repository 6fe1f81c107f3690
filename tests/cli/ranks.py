"""Verbs on two ranks that are there already, as under torchrun: a new process takes seconds to import torch."""

import torch.distributed as dist

from recpo.cli.main import main
from tests.sharding.tables import as_torchrun


def on_this_rank(words):
    """Runs a verb; for ``Ranks.run``."""
    from lightning.pytorch.utilities import rank_zero_only

    as_torchrun()
    rank_zero_only.rank = dist.get_rank()
    assert main(words) == 0
    dist.barrier()
