"""A training step on 2, 8 and 64 ranks of PyTorch's fake process group: how often and how many bytes a rank sends.

The group answers every collective with what this rank gave, as if all ranks were alike. So the sizes that the ranks
tell each other are put right here, and ids that come back are made some of the rank's own; the tensors that are sent
have the sizes of a real run. The formulas of docs/scaling.md, which two real processes confirm, must hold exactly.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from recpo.base.types import FeedbackBatch, Histories, Slates
from recpo.ops import sharded_logprob
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.sharding.memory import row_blocks
from recpo.sharding.row_tables import RowTable
from tests.sharding.test_costs_of_runs import DIM, Sent, lookup_bytes, softmax_bytes

ROWS, CONTEXTS, HISTORY = 64 * 40, 8, 8
EVENTS = CONTEXTS * HISTORY
#: (bytes of numbers, collectives) with which a lookup and a softmax first tell each other their sizes.
SIZES_OF_LOOKUP, SIZES_OF_SOFTMAX = 8 * (4 + 1), 8 * 6
#: A lookup: sizes, ids per owner, ids, vectors, gradients. A softmax: sizes, states, targets, maximum, sums, gradients
#: of targets, gradients of states.
COLLECTIVES = 5 + 7


@pytest.fixture(params=[(2, 1), (8, 3), (64, 63)], ids=lambda each: f"rank {each[1]} of {each[0]}")
def ranks(request, monkeypatch):
    """Number of ranks, of which this process is one."""
    size, rank = request.param
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    told, exchanged = sharded_logprob.common_sizes, sharded_logprob.exchange_rows

    def common_sizes(shard, *counts, faults=None):
        alone = shard._replace(first=0, num_rows=len(shard.rows) * size)  # passes for a table of equal blocks
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_gather_single", in_order(len(shard.rows), dist.all_gather_single))
            _, told_counts = told(alone, *counts, faults=faults)
        return [0, *accumulate(rows for _, rows in row_blocks(ROWS, size))], told_counts

    def exchange_rows(values, send, receive, group):
        found = exchanged(values, send, receive, group)
        return found if found.is_floating_point() else torch.full_like(found, rank * (ROWS // size) + 1)

    monkeypatch.setattr(sharded_logprob, "common_sizes", common_sizes)
    monkeypatch.setattr(sharded_logprob, "exchange_rows", exchange_rows)
    yield size
    dist.destroy_process_group()


def in_order(rows, gather):
    """The gather, with blocks that follow each other."""

    def gathered(everyone, mine, group=None):
        work = gather(everyone, mine, group=group)
        table = everyone.view(-1, len(mine))
        table[:, 0] = torch.arange(len(table)) * rows
        return work

    return gathered


class Collectives(Sent):
    """Counts them too."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.namespace == "c10d"
        return super().__torch_dispatch__(function, types, args, kwargs)


def test_a_step_sends_what_the_formulas_say(ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    options = {"layers": 1, "heads": 1, "max_history": HISTORY, "dropout": 0.0}
    policy = CatalogSoftmaxPolicy(ROWS - 1, dim=DIM, **options)
    policy.item_table = RowTable(policy.item_table, mesh)
    assert policy.item_table.weight.to_local().shape == (ROWS // ranks, DIM)
    # as many events of the items of every owner, however many owners there are
    items = (torch.arange(EVENTS) * (ROWS // EVENTS) + 5)[torch.randperm(EVENTS)].view(CONTEXTS, HISTORY)
    histories = Histories(items, torch.full((CONTEXTS,), HISTORY), torch.ones_like(items))
    visible = torch.arange(HISTORY).expand(CONTEXTS, -1)
    slates = Slates(items, visible, torch.ones_like(items, dtype=torch.bool))
    with Collectives() as sent:
        policy.log_prob(FeedbackBatch(histories, slates, torch.arange(CONTEXTS))).sum().backward()
    others = ranks - 1
    expected = lookup_bytes(EVENTS, ROWS, "row_wise", ranks=ranks) + SIZES_OF_LOOKUP * others
    expected += softmax_bytes(EVENTS, EVENTS, ranks=ranks) + SIZES_OF_SOFTMAX * others
    assert sent.bytes == pytest.approx(expected, rel=1e-9)
    assert sent.count == COLLECTIVES
