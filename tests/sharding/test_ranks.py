"""The processes that tests start: errors, timeouts, and that they continue afterwards."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from tests.sharding.ranks import Ranks


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("of rank 1")
    dist.barrier()


def never_end() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def rank() -> int:
    print("nothing to do with the answer")
    return dist.get_rank()


@pytest.mark.slow
def test_the_harness_raises_what_a_rank_raised_and_continues() -> None:
    with Ranks(2, timeout=6) as two:
        with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2:.*fail_on_rank_1.*KeyError: 'of rank 1'"):
            two.run(fail_on_rank_1)
        assert two.run(rank) == [0, 1]
        with pytest.raises(TimeoutError, match=r"never_end takes ranks \[1\] over 6 s"):
            two.run(never_end)
