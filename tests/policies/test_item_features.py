"""Vectors of items as the sum of id rows and encoded features, against dense arithmetic."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from recpo.base.types import SamplingOptions
from recpo.policies import item_features
from recpo.policies.item_features import ItemFeatureOptions, ItemFeatures, drawn
from recpo.policies.item_table import ItemTable, TableUse
from tests.policies.synthetic_features import FEATURES, random_features
from tests.refusals import refused

ITEMS, DIM = 23, 4


def table_of(*, use: TableUse = "softmax", rate: float = 0.0, untrained: int = 0) -> ItemTable:
    """A table with features that say something; the last ``untrained`` items had no training event."""
    torch.manual_seed(1)
    table = ItemTable(ITEMS, DIM, std=1.0, use=use)
    table.features = ItemFeatures(FEATURES, ITEMS, DIM, ItemFeatureOptions(hidden=6, id_dropout=rate))
    torch.nn.init.normal_(table.features.encoder.output.weight)
    table.features.assign(random_features(FEATURES, ITEMS + 1))
    table.features.trained[ITEMS + 1 - untrained :] = False
    return table.double()


def dense(table: ItemTable, kept: Tensor | None = None) -> Tensor:
    """The vectors of all items by the formula, in one piece."""
    assert table.features is not None
    kept = table.features.trained if kept is None else kept
    encoded = table.features.encoder(random_features(FEATURES, ITEMS + 1))
    return (table.weight * kept[:, None] + encoded) * (torch.arange(ITEMS + 1) > 0)[:, None]


def loss_of(vectors: Tensor, states: Tensor, history: Tensor, targets: Tensor) -> Tensor:
    """A softmax over the catalog and a use of the histories' vectors."""
    logp = (states @ vectors[1:].T).log_softmax(1).gather(1, targets[:, None] - 1)
    return logp.sum() + vectors[history].square().sum()


@pytest.mark.parametrize("block", [5, 1 << 15])
def test_matrix_and_gradients_are_those_of_dense_arithmetic(monkeypatch, block) -> None:
    monkeypatch.setattr(item_features, "BLOCK_ITEMS", block)
    table = table_of(untrained=3)
    states, history = torch.randn(7, DIM).double(), torch.randint(0, ITEMS + 1, (3, 6))
    targets = torch.randint(1, ITEMS + 1, (7,))
    parameters = list(table.parameters())
    expected = torch.autograd.grad(loss_of(dense(table), states, history, targets), parameters)
    for announced in (False, True):  # once per look-up, and once for the whole step
        if announced:
            table.begin_step(3)
        loss = table.log_prob(states, targets).sum() + table(history).square().sum()
        torch.testing.assert_close(loss, loss_of(dense(table), states, history, targets))
        for found, other in zip(torch.autograd.grad(loss, parameters), expected, strict=True):
            torch.testing.assert_close(found, other)


def test_a_step_computes_the_matrix_once(monkeypatch) -> None:
    table, calls = table_of(rate=0.5), []
    matrix = ItemFeatures.matrix
    monkeypatch.setattr(ItemFeatures, "matrix", lambda *args, **kw: calls.append(1) or matrix(*args, **kw))
    states, history, targets = torch.randn(7, DIM).double(), torch.randint(1, ITEMS + 1, (3, 6)), torch.arange(1, 8)
    for step in range(3):
        table.begin_step(step)
        loss = table(history).sum() + table.log_prob(states, targets).sum() + table.entropy(states).sum()
        loss.backward()
    assert len(calls) == 3
    # what is computed after the backward pass, or with other weights, is computed anew
    table.log_prob(states, targets)
    with torch.no_grad():
        table.weight.mul_(2.0)
    torch.testing.assert_close(table.vectors(), dense(table, table.features.kept(torch.arange(ITEMS + 1))))
    assert len(calls) == 5
    copy.deepcopy(table)  # with a matrix at hand, which has a gradient


@pytest.mark.parametrize("cosine", [False, True])
def test_the_whole_interface_reads_the_sum(cosine) -> None:
    table = table_of(untrained=3).eval()
    table.cosine = cosine
    plain = ItemTable(ITEMS, DIM, cosine=cosine).double().eval()
    plain.weight.data.copy_(dense(table).detach())
    states, targets, index = torch.randn(5, DIM).double(), torch.randint(1, ITEMS + 1, (9,)), torch.randint(0, 5, (9,))
    torch.testing.assert_close(table(targets), plain(targets))
    for ask in (
        lambda one: one.log_prob(states, targets, index),
        lambda one: one.entropy(states),
        lambda one: one.catalog_log_prob(states),
        lambda one: one.top_k(states.float(), 5, targets[:5, None]).scores,
        lambda one: one.top_k(states.float(), 5, None).item_ids,
    ):
        torch.testing.assert_close(ask(table), ask(plain), check_dtype=False)
    for one in (table, plain):
        torch.manual_seed(0)
        one.drawn = one.draw(states.float(), 4, SamplingOptions())
    assert torch.equal(table.drawn[0], plain.drawn[0])


def test_id_rows_are_left_out_alike_for_everybody_and_only_in_training_steps() -> None:
    table = table_of(rate=0.5)
    ids = torch.arange(ITEMS + 1)
    assert table.features.kept(ids).all()  # no step has begun
    seen = []
    for seed in (5, 6, 5):
        table.begin_step(seed)
        kept = table.features.kept(ids)
        seen.append(kept)
        assert torch.equal(table.features.kept(ids.flip(0)), kept.flip(0))
        torch.testing.assert_close(table.vectors(), dense(table, kept))
        torch.testing.assert_close(table(ids[:2]), dense(table, kept)[:2])
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    table.eval()
    assert table.features.kept(ids).all()


def test_draws_are_uniform_in_ids_and_seeds() -> None:
    ids = torch.arange(100_000)
    for seed in (0, 1, 2**32 - 1):
        assert drawn(ids, seed, 0.3).double().mean().item() == pytest.approx(0.3, abs=0.005)
    one = torch.stack([drawn(ids[:50], seed, 0.3) for seed in range(2000)]).double()
    assert one.mean(0).sub(0.3).abs().max() < 0.05
    both = (drawn(ids, 3, 0.3) & drawn(ids, 4, 0.3)).double().mean().item()
    assert both == pytest.approx(0.09, abs=0.005)
    assert not drawn(ids, 3, 0.0).any()


def test_an_untrained_item_has_the_vector_of_its_features() -> None:
    table = table_of(untrained=2).eval()
    features = random_features(FEATURES, ITEMS + 1)
    encoded = table.features.encoder(features)
    torch.testing.assert_close(table(torch.tensor([ITEMS])), encoded[ITEMS:])
    torch.testing.assert_close(table.vectors()[ITEMS - 1 :], encoded[ITEMS - 1 :])
    assert not torch.allclose(table.vectors()[1 : ITEMS - 1], encoded[1 : ITEMS - 1])


def test_no_features_are_refused() -> None:
    table = table_of()
    table.features = ItemFeatures(FEATURES, ITEMS, DIM, ItemFeatureOptions())
    with refused("missing_option", "item_features"):
        table(torch.tensor([1]))
    with refused("out_of_range", "item_features.id_dropout"):
        ItemFeatureOptions(id_dropout=1.0)
