"""RAD-DPO: codes that a rejected item shares with the chosen one are excluded from the rejected side."""

import pytest
import torch

from recpo.objectives.likelihood import Likelihood
from recpo.objectives.listwise_dpo import SoftmaxDPO
from recpo.training.contradictions import validate_shared_prefix
from recpo.training.rollout import without_shared_prefix
from tests.refusals import refused


def first(tokens):
    return (torch.arange(tokens.shape[1]) == 0).expand(tokens.shape[:2])


def test_the_chosen_item_may_stand_anywhere():
    tokens, mask = torch.randint(0, 3, (20, 5, 3)), torch.rand(20, 5, 3) < 0.9
    kept = without_shared_prefix(mask, tokens, first(tokens))
    order = torch.tensor([3, 1, 4, 0, 2])
    moved = without_shared_prefix(mask[:, order], tokens[:, order], first(tokens)[:, order])
    assert torch.equal(moved, kept[:, order])
    assert torch.equal(without_shared_prefix(mask, tokens, torch.zeros(20, 5, dtype=torch.bool)), mask)


def test_only_the_common_prefix_is_masked_and_only_on_the_rejected_side():
    tokens = torch.tensor([[[3, 1, 2], [3, 1, 4], [3, 0, 2], [5, 1, 2], [3, 1, 4]]])
    mask = torch.ones(1, 5, 1, dtype=torch.bool)
    mask[0, 4] = False  # padding stays padding
    kept = without_shared_prefix(mask, tokens, first(tokens))
    expected = [[1, 1, 1], [0, 0, 1], [0, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert kept.int().tolist() == [expected]


def test_every_list_is_compared_with_its_own_chosen_item():
    tokens = torch.tensor([[[1, 2], [1, 3]], [[1, 3], [2, 3]]])
    kept = without_shared_prefix(torch.ones(2, 2, 1, dtype=torch.bool), tokens, first(tokens))
    assert kept.int().tolist() == [[[1, 1], [0, 1]], [[1, 1], [1, 1]]]


@pytest.mark.parametrize(("num_tokens", "objective"), [(1, SoftmaxDPO()), (3, Likelihood())])
def test_refused_where_nothing_can_be_shared(num_tokens, objective):
    policy = type("Policy", (), {"num_tokens": num_tokens})()
    with refused("unused_option", "mask_shared_prefix"):
        validate_shared_prefix(policy, objective)
