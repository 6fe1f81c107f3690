"""The likelihood of whole items that pre-training of semantic ids adds to that of their codes."""

import numpy as np
import pytest
import torch

import recpo
from recpo.batches.datamodule import FeedbackDataModule
from recpo.batches.slates import SequenceLayout
from recpo.objectives.likelihood import Likelihood
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.semantic_id import SemanticIdPolicy
from recpo.training.inputs import InputBuilder, item_log_prob
from recpo.training.module import PreferenceModule
from recpo.training.networks import Networks
from recpo.training.options import LearningOptions
from tests.refusals import refused


@pytest.fixture(scope="module")
def codes(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp("codes") / "codes"
    recpo.tokenize(prepared, out, codebook_size=8)
    return out


@pytest.fixture
def policy(prepared, codes):
    torch.manual_seed(3)
    items = recpo.Prepared.open(prepared).num_items
    return SemanticIdPolicy(items, codes=codes, dim=8, layers=1, heads=1, decoder_layers=1, max_history=12).eval()


@pytest.fixture
def batch(prepared):
    data = FeedbackDataModule(prepared, batch_size=6, layout=SequenceLayout(12), seed=5)
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def test_it_is_the_softmax_of_states_and_item_vectors(policy, batch):
    with torch.no_grad():
        states = policy.encode(batch.histories)
        found = item_log_prob(policy, states, batch.slates).numpy()
        vectors = policy.item_vectors(torch.arange(policy.num_items + 1)).double().numpy()
    mask, items, visible = (part.numpy() for part in (batch.slates.mask, batch.slates.item_ids, batch.slates.visible))
    assert mask.any()
    for row, column in np.ndindex(mask.shape):
        if not mask[row, column]:
            assert found[row, column] == 0
            continue
        scores = vectors[1:] @ states[row, visible[row, column]].double().numpy()
        expected = scores[items[row, column] - 1] - np.log(np.exp(scores).sum())
        assert found[row, column] == pytest.approx(expected, abs=1e-4)


def test_with_a_weight_of_one_an_item_counts_as_much_as_its_codes(policy, batch):
    options = LearningOptions(objective=Likelihood(), item_coef=1.0)
    step = InputBuilder(Networks.of(policy, options), options)(batch)
    module = PreferenceModule(policy, options)
    module.log, module.log_dict, module._trainer = (lambda *_, **__: None), (lambda *_, **__: None), Alone()
    kept = batch.slates.mask[..., None].expand_as(step.objective.logp.policy)
    with torch.no_grad():
        together = module.training_step(batch, 0)
        codes = -(step.objective.logp.policy * kept).sum() / kept.sum()
        items = -step.items.sum() / kept.sum()
    torch.testing.assert_close(together, codes + items)
    assert items > 0.1


class Alone:
    """A trainer of one process."""

    world_size, accumulate_grad_batches, barebones = 1, 1, False


def test_what_has_no_codes_or_learns_from_feedback_is_refused(policy):
    with refused("unsupported", "item_coef"):
        PreferenceModule(CatalogSoftmaxPolicy(20, dim=8), LearningOptions(item_coef=0.5))
    positives = Likelihood(positive_only=True)
    options = LearningOptions(objective=positives, advantage=recpo.TernaryAdvantage(), item_coef=0.5)
    with refused("conflicting_options", "item_coef"):
        PreferenceModule(policy, options)
    with refused("out_of_range", "item_coef"):
        LearningOptions(item_coef=-1.0)
