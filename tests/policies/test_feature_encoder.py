"""The feature encoder against a NumPy loop over items and features."""

from __future__ import annotations

import math

import numpy as np
import torch

from recpo.base.features import Category, Vector
from recpo.base.types import Features
from recpo.policies.item_features import FeatureEncoder
from tests.policies.synthetic_features import FEATURES, random_features
from tests.refusals import refused


def encoder_of(features=FEATURES, dim=4, seed=0):
    torch.manual_seed(seed)
    return FeatureEncoder(features, dim, hidden=6, starts_at_zero=False).double()


def one_by_one(encoder: FeatureEncoder, features: Features) -> np.ndarray:
    """The formula of the class, item by item and feature by feature; the parts stand in the order of their kinds."""
    table, dense = (part.detach().numpy() for part in (encoder.table, encoder.dense))
    bias = encoder.bias.detach().numpy()
    weight, offset = encoder.output.weight.detach().numpy(), encoder.output.bias.detach().numpy()
    first = {"author": 0, "language": 7, "tags": 11}  # rows of the table: categories, then lists
    rows = []
    for i in range(len(features.codes)):
        total = bias.copy()
        total += table[first["author"] + features.codes[i, 0]] + table[first["language"] + features.codes[i, 1]]
        tags = [int(code) for code in features.lists[0][i] if code > 0] or [0]
        total += np.mean([table[first["tags"] + code] for code in tags], 0)
        for place, number in enumerate(features.numbers[i].tolist()):
            total += dense[:, 2 + place] if math.isnan(number) else dense[:, place] * number
        vector = features.vectors[0][i].double().numpy()
        if np.isnan(vector).any():
            total += dense[:, 9]
        else:
            total += dense[:, 4:9] @ (vector / math.sqrt((vector**2).mean()))
        gelu = np.array([x * 0.5 * (1 + math.erf(x / math.sqrt(2))) for x in total])
        rows.append(weight @ gelu + offset)
    return np.stack(rows)


def test_the_sum_is_that_of_a_loop_over_features() -> None:
    encoder, features = encoder_of(), random_features(FEATURES, 40)
    assert (features.codes == 0).any()
    assert (features.codes == 1).any()
    assert (features.lists[0].sum(1) == 0).any()
    assert features.numbers.isnan().any()
    assert features.vectors[0].isnan().any()
    np.testing.assert_allclose(encoder(features).detach().numpy(), one_by_one(encoder, features), rtol=1e-6, atol=1e-6)


def test_no_rows_are_encoded_to_no_rows() -> None:
    """A batch of users without an event has requests and no events."""
    assert encoder_of()(random_features(FEATURES, 3, 0)).shape == (3, 0, 4)
    assert encoder_of(FEATURES[:1])(random_features(FEATURES[:1], 3, 0)).shape == (3, 0, 4)


def test_gradients_are_those_of_look_ups_one_by_one(monkeypatch) -> None:
    encoder, features = encoder_of(), random_features(FEATURES, 3, 5)
    weights = torch.randn(3, 5, 4, dtype=torch.double)
    found = torch.autograd.grad((encoder(features) * weights).sum(), encoder.parameters())
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)  # the sum of look-ups that is exported
    expected = torch.autograd.grad((encoder(features) * weights).sum(), encoder.parameters())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_missing_and_unknown_have_separate_rows_and_codes_from_outside_are_unknown() -> None:
    encoder = encoder_of((Category("author", num_codes=3),))
    codes = torch.tensor([[0], [1], [2], [3], [-1]])
    nothing = Features(codes, (), torch.zeros(5, 0), ())
    missing, unknown, named, beyond, below = encoder(nothing)
    assert not torch.allclose(missing, unknown)
    assert not torch.allclose(unknown, named)
    assert torch.equal(beyond, unknown)
    assert torch.equal(below, unknown)


def test_the_length_of_a_vector_says_nothing_and_its_start_is_zero() -> None:
    features = (Vector("text", width=8),)
    encoder = encoder_of(features)
    vectors = torch.randn(4, 8)
    codes, numbers = torch.zeros(4, 0, dtype=torch.long), torch.zeros(4, 0)
    short, long = (encoder(Features(codes, (), numbers, (size * vectors,))) for size in (0.01, 100.0))
    torch.testing.assert_close(short, long, rtol=1e-5, atol=1e-6)
    untrained = FeatureEncoder(FEATURES, 4)
    assert not untrained(random_features(FEATURES, 10)).any()


def test_what_does_not_fit_is_refused() -> None:
    with refused("unfinished", "author"):
        FeatureEncoder((Category("author"),), 4)
