"""Policies that read features: both families, every normalizer, and equality without features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from recpo.artifacts.semantic_codes import Codes
from recpo.base.contracts import StatePolicy
from recpo.base.features import FeatureSchema
from recpo.base.types import FeedbackBatch, Histories, Slates
from recpo.policies.blocks import HSTUBlock
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.feature_policy import gap_buckets
from recpo.policies.item_features import ItemFeatureOptions
from recpo.policies.semantic_id import SemanticIdPolicy
from tests.policies.synthetic_features import BEHAVIORS, SCHEMA, random_features, random_histories
from tests.refusals import refused

ITEMS, LENGTH = 40, 6
READS = {"user_features": True, "context_features": True, "behaviors": True, "time_gaps": True}
ALL = READS | {"item_features": ItemFeatureOptions(hidden=8)}


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("codes")
    table = np.stack(np.unravel_index(np.random.default_rng(0).permutation(64)[:ITEMS], (4, 4, 4)), 1)
    Codes(table.astype(np.int64), (4, 4, 4), "").save(root, np.arange(ITEMS), {})
    return root


def policy_of(family: str, codes: Path, *, trained: bool = True, **options) -> StatePolicy:
    torch.manual_seed(0)
    common = {"dim": 8, "layers": 1, "max_history": LENGTH, "dropout": 0.0, **options}
    policy = (
        SemanticIdPolicy(ITEMS, codes=codes, **common)
        if family == "semantic"
        else CatalogSoftmaxPolicy(ITEMS, **common)
    )
    policy.set_schema(SCHEMA, BEHAVIORS)
    policy.set_item_features(random_features(SCHEMA.item, ITEMS + 1))
    if trained:
        torch.manual_seed(1)
        for name, parameter in policy.named_parameters():
            if "history_features" in name or "features.encoder.output" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    return policy.eval()


def batch_of(histories: Histories, size: int = 4) -> FeedbackBatch:
    generator = torch.Generator().manual_seed(3)
    shape = (len(histories.lengths), size)
    visible = (torch.rand(shape, generator=generator) * (histories.lengths[:, None] + 1)).long()
    items = torch.randint(1, ITEMS + 1, shape, generator=generator)
    return FeedbackBatch(histories, Slates(items, visible, torch.ones(shape, dtype=torch.bool)), torch.arange(shape[0]))


FAMILIES = pytest.mark.parametrize("family", ["catalog", "semantic"])


@FAMILIES
def test_untrained_encoders_change_nothing(family, codes) -> None:
    batch = batch_of(random_histories(ITEMS, 5, LENGTH))
    reading, plain = policy_of(family, codes, trained=False, **ALL), policy_of(family, codes, trained=False)
    shared = reading.load_state_dict(plain.state_dict(), strict=False)
    assert not shared.unexpected_keys
    assert all("features" in name for name in shared.missing_keys)
    torch.testing.assert_close(reading.log_prob(batch), plain.log_prob(batch))


@FAMILIES
def test_everything_that_is_read_matters_and_nothing_else(family, codes) -> None:
    histories = random_histories(ITEMS, 5, LENGTH)
    other = random_histories(ITEMS, 5, LENGTH, seed=9)
    columns = {
        "behaviors": "behaviors",
        "user_features": "user",
        "context_features": "context",
        "time_gaps": "timestamps",
    }
    for option, column in columns.items():
        for reads in (True, False):
            policy = policy_of(family, codes, **{**READS, option: reads})
            changed = histories._replace(**{column: getattr(other, column)})
            before, after = (policy.log_prob(batch_of(one)) for one in (histories, changed))
            assert torch.allclose(before, after) == (not reads)


@FAMILIES
def test_no_position_reads_a_later_event_or_request(family, codes) -> None:
    policy, histories = policy_of(family, codes, **ALL), random_histories(ITEMS, 5, LENGTH)
    histories = histories._replace(lengths=torch.full((5,), LENGTH))
    states = policy.encode(histories)
    for visible in range(LENGTH + 1):
        cut = histories.up_to(torch.full((5,), visible))
        torch.testing.assert_close(policy.encode(cut)[:, visible], states[:, visible])
        changed = random_histories(ITEMS, 5, LENGTH, seed=4)
        later = torch.arange(LENGTH) >= visible
        mixed = histories._replace(
            item_ids=torch.where(later, changed.item_ids, histories.item_ids),
            behaviors=torch.where(later, changed.behaviors, histories.behaviors),
        )
        torch.testing.assert_close(policy.encode(mixed)[:, visible], states[:, visible])


@pytest.mark.parametrize("options", [{}, {"attention_length": 3, "profile": True, "fold_in": 2}, {"block": HSTUBlock}])
def test_the_last_state_is_that_of_the_whole_pass(codes, options) -> None:
    policy, histories = policy_of("catalog", codes, **ALL, **options), random_histories(ITEMS, 5, LENGTH)
    rows = torch.arange(5)
    torch.testing.assert_close(
        policy.last_states(histories), policy.scaled(policy.encode(histories)[rows, histories.lengths])
    )


@FAMILIES
@pytest.mark.parametrize("options", [{}, {"profile": True, "fold_in": 2}, {"block": HSTUBlock}])
def test_a_batch_of_users_without_an_event_has_states(family, codes, options) -> None:
    """As many as beside a user with one; the validation of a log with new users has such batches."""
    policy, histories = policy_of(family, codes, **ALL, **options), random_histories(ITEMS, 5, LENGTH)
    padded = histories.up_to(torch.zeros(5, dtype=torch.long))
    none = padded._replace(
        item_ids=padded.item_ids[:, :0],
        feedback=padded.feedback[:, :0],
        timestamps=padded.timestamps[:, :0],
        behaviors=padded.behaviors[:, :0],
        context=padded.context.map(lambda column: column[:, :1]),
    )
    states = policy.encode(none)
    torch.testing.assert_close(states, policy.encode(padded)[:, :1])
    found, expected = (policy.recommend(one, 3) for one in (none, padded))
    assert torch.equal(found.item_ids, expected.item_ids)


def test_gradients_are_numbers_where_the_blocks_read_a_part(codes) -> None:
    policy = policy_of("catalog", codes, attention_length=3, **ALL).train()
    histories = random_histories(ITEMS, 5, LENGTH)
    batch = batch_of(histories)
    batch = batch._replace(slates=batch.slates._replace(visible=histories.lengths[:, None].expand(-1, 4)))
    policy.log_prob(batch).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in policy.parameters() if parameter.grad is not None)
    assert policy.history_features.expand.weight.grad.any()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_the_sampled_softmax_with_every_item_estimates_the_full_one(codes, tied, similarity) -> None:
    options = {"tie_weights": tied, "similarity": similarity, "temperature": 0.5, **ALL}
    full = policy_of("catalog", codes, **options)
    sampled = policy_of("catalog", codes, normalizer="sampled", num_negatives=20_000, **options).train()
    sampled.load_state_dict(full.state_dict())
    batch = batch_of(random_histories(ITEMS, 5, LENGTH))
    torch.manual_seed(0)
    torch.testing.assert_close(sampled.log_prob(batch), full.log_prob(batch), atol=0.05, rtol=0.05)
    sampled.begin_step(3)  # encodes the sampled rows only, with the id rows of the step
    sampled.log_prob(batch).sum().backward()
    for table in sampled.item_tables():
        assert table.features.encoder.output.weight.grad.any()


@FAMILIES
def test_precomputed_vectors_answer_as_the_policy_did(family, codes) -> None:
    policy, histories = (
        policy_of(family, codes, tie_weights=False, **ALL) if family == "catalog" else policy_of(family, codes, **ALL),
        random_histories(ITEMS, 5, LENGTH),
    )
    policy.set_item_counts(torch.arange(ITEMS) % 5)
    batch, before = batch_of(histories), policy.recommend(histories, 5)
    logp = policy.log_prob(batch)
    policy.precompute_item_vectors()
    assert not policy.reads_item_features
    assert not [name for name in policy.state_dict() if ".features." in name]
    torch.testing.assert_close(policy.log_prob(batch), logp)
    assert torch.equal(policy.recommend(histories, 5).item_ids, before.item_ids)


@FAMILIES
def test_what_is_asked_for_and_not_there_is_an_error(family, codes) -> None:
    policy, histories = policy_of(family, codes, **ALL), random_histories(ITEMS, 2, LENGTH)
    for column in ("behaviors", "user", "context", "timestamps"):
        with refused("missing_value", column):
            policy.encode(histories._replace(**{column: None}))
    for option in ("item_features", "user_features", "context_features", "behaviors"):
        asking = _asking(family, codes, option)
        with refused("mismatch", f"policy.{option}"):
            asking.set_schema(FeatureSchema(), ())
    unset = _asking(family, codes, "behaviors")
    with refused("missing_option", "schema"):
        unset.encode(histories)


def _asking(family: str, codes: Path, option: str) -> StatePolicy:
    options = {"dim": 8, "layers": 1, "max_history": LENGTH, option: ALL[option]}
    return (
        SemanticIdPolicy(ITEMS, codes=codes, **options)
        if family == "semantic"
        else CatalogSoftmaxPolicy(ITEMS, **options)
    )


def test_buckets_of_the_time_since_the_event_before() -> None:
    times: Tensor = torch.tensor([[10, 10, 11, 14, 10, 0]])
    assert gap_buckets(times).tolist() == [[0, 0, 1, 2, 0, 0]]
