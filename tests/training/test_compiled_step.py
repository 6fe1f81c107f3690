"""``torch.compile`` of a training step: one graph, the numbers of the plain step, and no program per batch size."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch._dynamo.utils import counters

from recpo.artifacts.semantic_codes import Codes
from tests.training.single_steps import Step, policy_of

pytestmark = pytest.mark.slow

#: One program for the sizes of the first batch, one for any sizes, and one for batches whose padding is not skipped.
MOST_PROGRAMS = 3
BATCHES = 5
CASES = [("catalog", "softmax_dpo", "aot_eager"), ("semantic", "gbpo", "eager")]


@pytest.fixture
def compiler():
    """A compiler that has compiled nothing yet."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("family", "name", "backend"), CASES)
def test_a_step_is_one_graph_for_batches_of_all_sizes(data, prepared, tmp_path, compiler, family, name, backend):
    codes, items = None, np.arange(data.num_items)
    if family == "semantic":
        codes, table = tmp_path, np.stack([items // 8, items % 8], 1)
        Codes(table, (data.num_items // 8 + 1, 8), "any").save(codes, pa.array(items), {})
    step = Step.of(name, prepared, policy_of(data.num_items, codes))
    batches = [batch for batch, _ in zip(step.data.train_dataloader(), range(BATCHES), strict=False)]
    sizes = {(batch.plan.scored.positions.shape, batch.histories.event_indices.indices.shape) for batch in batches}
    assert len(sizes) > 2

    def loss_of(batch):
        return step.objective(step.inputs(batch).objective).loss

    def learned(run, batch):
        step.networks.policy.zero_grad()
        loss = run(batch)
        loss.backward()
        return [loss.detach(), *(one.clone() for one in step.gradients().values())]

    compiled = torch.compile(loss_of, backend=backend, fullgraph=True)
    for batch in batches:
        torch.testing.assert_close(learned(compiled, batch), learned(loss_of, batch), rtol=1e-4, atol=1e-6)
    assert counters["stats"]["unique_graphs"] <= MOST_PROGRAMS
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in reversed(batches):
            learned(compiled, batch)
