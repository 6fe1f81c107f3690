"""A training step under autocast to bfloat16, compared with float32: what may be rounded, and what must not be."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from recpo.artifacts.semantic_codes import Codes
from tests.training.single_steps import Step, policy_of

#: One of each kind: what is read beside log-probabilities, and how it is weighed.
KINDS = [
    "likelihood", "gbpo", "weighted_likelihood_ips", "kto", "dpo", "simpo", "softmax_dpo_hard", "ppo", "gspo",
    "reinforce", "mpo_dual", "q_learning", "pairwise_reward", "pointwise_reward", "mpo_old", "catalog_policy_gradient",
    "grpo_rollout",
]  # fmt: skip
OF_CODES = ["likelihood", "gbpo", "dpo", "softmax_dpo_hard", "ppo", "q_learning", "pairwise_reward", "grpo_rollout"]
FAST = {("catalog", "ppo"), ("semantic", "likelihood")}
CASES = [
    (family, name) if (family, name) in FAST else pytest.param(family, name, marks=pytest.mark.slow)
    for family, names in (("catalog", KINDS), ("semantic", OF_CODES))
    for name in names
]
#: bfloat16 keeps 8 bits: products of the encoder round to 0.4 % of their size, most of which cancels in a mean.
TOLERANCE = 0.01
#: The candidates of a rollout are drawn from rounded probabilities, so that they are others: nothing to compare.
DRAWS = {"grpo_rollout"}


@pytest.fixture(scope="module")
def policies(data, tmp_path_factory):
    codes, items = tmp_path_factory.mktemp("codes"), np.arange(data.num_items)
    table = np.stack([items // 8, items % 8], 1)
    Codes(table, (data.num_items // 8 + 1, 8), "any").save(codes, pa.array(items), {})
    return {"catalog": policy_of(data.num_items), "semantic": policy_of(data.num_items, codes)}


def stepped(name, prepared, policy, *, rounds):
    """The inputs of the objective, its loss and the gradients."""
    step = Step.of(name, prepared, policy)
    batch = next(iter(step.data.train_dataloader()))
    with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
        inputs = step.inputs(batch).objective
        loss = step.objective(inputs).loss
    loss.backward()
    return inputs, loss.detach(), step.gradients()


@pytest.mark.parametrize(("family", "name"), CASES)
def test_autocast_rounds_the_products_and_nothing_that_a_loss_reads(prepared, policies, family, name):
    _, expected, exact = stepped(name, prepared, policies[family], rounds=False)
    inputs, loss, gradients = stepped(name, prepared, policies[family], rounds=True)
    read = {
        key: value for key, value in {**inputs._asdict(), **inputs.logp._asdict()}.items() if torch.is_tensor(value)
    }
    narrow = {key: value.dtype for key, value in read.items() if value.is_floating_point()}
    assert set(narrow.values()) == {torch.float32}, narrow
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert gradients.keys() == exact.keys()
    assert all(one.dtype == torch.float32 and one.isfinite().all() for one in gradients.values())
    if name not in DRAWS:
        torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=TOLERANCE)
        ours, theirs = (torch.cat([one.flatten() for one in each.values()]) for each in (gradients, exact))
        assert torch.cosine_similarity(ours, theirs, 0) > 0.99
    assert any(not torch.equal(gradients[key], exact[key]) for key in exact)  # it did round
