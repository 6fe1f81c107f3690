"""Items without training events: features rank them well, ids alone cannot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recpo.base.features import Category, FeatureSchema, Vector
from recpo.base.types import Features, FeedbackBatch, Histories, Slates
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.item_features import ItemFeatureOptions

GROUPS, PER_GROUP, NEW, LENGTH = 5, 12, 3, 8
ITEMS = GROUPS * PER_GROUP
SCHEMA = FeatureSchema(item=(Category("genre", num_codes=GROUPS + 2), Vector("text", width=6)))
ITEM_GROUP = torch.arange(ITEMS) % GROUPS
IS_NEW = torch.arange(ITEMS) >= ITEMS - NEW * GROUPS


def features() -> Features:
    """The genre of half of the items, and a noisy vector of their group; row 0 is missing."""
    torch.manual_seed(0)
    centers = torch.randn(GROUPS, 6)
    codes = torch.where(torch.rand(ITEMS) < 0.5, ITEM_GROUP + 2, 0)
    vectors = centers[ITEM_GROUP] + 0.5 * torch.randn(ITEMS, 6)
    return Features(
        torch.cat([torch.zeros(1, 1, dtype=torch.long), codes[:, None]]),
        (),
        torch.zeros(ITEMS + 1, 0),
        (torch.cat([torch.full((1, 6), torch.nan), vectors]),),
    )


def batch_of(groups: Tensor, generator: torch.Generator) -> FeedbackBatch:
    """Users who like one group and see old items only."""
    old = PER_GROUP - NEW
    items = groups[:, None] + GROUPS * torch.randint(0, old, (len(groups), LENGTH), generator=generator) + 1
    visible = torch.arange(LENGTH).expand(items.shape)
    slates = Slates(items, visible, torch.ones_like(items, dtype=torch.bool))
    return FeedbackBatch(Histories(items, torch.full((len(items),), LENGTH)), slates, torch.arange(len(items)))


def trained(item_features: ItemFeatureOptions | None) -> CatalogSoftmaxPolicy:
    torch.manual_seed(1)
    policy = CatalogSoftmaxPolicy(
        ITEMS, dim=16, layers=1, heads=1, max_history=LENGTH, dropout=0.0, item_features=item_features
    )
    policy.set_schema(SCHEMA)
    policy.set_item_features(features())
    policy.set_item_counts((~IS_NEW).long())
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(2)
    for step in range(60):
        policy.begin_step(step)
        batch = batch_of(torch.randint(0, GROUPS, (32,), generator=generator), generator)
        loss = -policy.log_prob(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy.eval()


def separation(policy: CatalogSoftmaxPolicy) -> float:
    """Probability that a new item of the user's group ranks above a new one of another group; chance is 0.5."""
    groups = torch.arange(GROUPS).repeat(20)
    batch = batch_of(groups, torch.Generator().manual_seed(3))
    with torch.no_grad():
        scores = policy.catalog_log_prob(batch)[..., 0][:, IS_NEW]
    own = groups[:, None] == ITEM_GROUP[IS_NEW]
    pairs = scores[:, :, None] > scores[:, None, :]
    return pairs[own[:, :, None] & ~own[:, None, :]].double().mean().item()


@pytest.mark.slow
def test_new_items_rank_where_their_features_put_them() -> None:
    assert separation(trained(ItemFeatureOptions(hidden=16, id_dropout=0.2))) > 0.95
    assert separation(trained(None)) == pytest.approx(0.5, abs=0.2)
