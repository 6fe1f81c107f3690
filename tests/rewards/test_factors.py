"""The fitted model as an object and as a directory: predictions, recommendations, and errors of reading."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from recpo.artifacts.checksums import kind_of
from recpo.base.feedback import GRADES, HIGHEST
from recpo.base.types import Histories
from recpo.batches.slates import HeldOutBatches, Rank
from recpo.ops.kernels import column_blocks
from recpo.policies import catalog_search
from recpo.rewards.factors import MANIFEST, Factors
from recpo.rewards.graded import FactorOptions
from tests.refusals import refused


@pytest.fixture(scope="module")
def histories():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0, 1, 7, 12])
    item_ids = torch.randint(1, 61, (4, 12), generator=generator)
    item_ids[torch.arange(12) >= lengths[:, None]] = 0
    return Histories(item_ids, lengths, torch.randint(0, HIGHEST + 1, (4, 12), generator=generator))


def folded_by_hand(factors, histories, user):
    """Ridge regression over the last events whose grade is known, one user at a time."""
    rows, targets, variance = [], [], np.zeros(factors.rank + 1)
    length = int(histories.lengths[user])
    for place in range(max(0, length - factors.max_history), length):
        item, level = int(histories.item_ids[user, place]) - 1, int(histories.feedback[user, place])
        if level:
            rows.append([*factors.item_factors[item].tolist(), 1.0])
            targets.append(GRADES[level] - factors.mean - float(factors.item_bias[item]))
            variance[:-1] += factors.factor_variance[item].numpy()
    rows, targets = np.array(rows).reshape(-1, factors.rank + 1), np.array(targets)
    prior = np.array([factors.ridge] * factors.rank + [factors.bias_ridge])
    matrix = rows.T @ rows + np.diag(prior + variance)
    return np.linalg.solve(matrix, rows.T @ targets), np.linalg.inv(matrix)


@pytest.mark.parametrize("max_history", [200, 5])
@pytest.mark.parametrize("variance", [0.0, 0.3])
def test_a_fold_in_is_the_ridge_regression_of_the_last_graded_events(factors, histories, max_history, variance):
    uncertain = variance * torch.rand(60, 3, generator=torch.Generator().manual_seed(1))
    model = replace(factors, max_history=max_history, factor_variance=uncertain, bias_ridge=0.7)
    weights, covariance = model.fold_in_with_covariance(histories)
    assert torch.equal(weights, model.fold_in(histories))
    for user in range(4):
        expected = folded_by_hand(model, histories, user)
        np.testing.assert_allclose(weights[user], expected[0], atol=1e-6)
        np.testing.assert_allclose(covariance[user], expected[1], atol=1e-6)
    assert not weights[0].any()


def test_a_fold_in_in_parts_is_the_same(factors, histories, monkeypatch):
    whole = factors.fold_in(histories)
    monkeypatch.setattr("recpo.rewards.factors._FOLD_IN_BYTES", 1)
    assert torch.equal(factors.fold_in(histories), whole)


def test_scores_and_grades_are_the_formula(factors, histories):
    users = factors.fold_in(histories)
    expected = factors.mean + users[:, :-1] @ factors.item_factors.T + users[:, -1:] + factors.item_bias
    torch.testing.assert_close(factors.scores(users), expected)
    torch.testing.assert_close(factors.grades(users, torch.arange(1, 61).expand(4, -1)), expected)
    some = torch.tensor([[3, 1], [60, 2], [5, 5], [7, 9]])
    torch.testing.assert_close(factors.grades(users, some), expected.gather(1, some - 1))


def test_the_best_items_are_recommended_and_excluded_ones_are_not(factors, histories):
    exclude = torch.tensor([[1, 2, 0], [0, 0, 0], [60, 5, 0], [7, 0, 0]])
    factors = replace(factors, lower_bound=0.0)
    lists = factors.recommend(histories, 10, exclude)
    scores = factors.scores(factors.fold_in(histories))
    for user in range(4):
        barred = set(exclude[user].tolist()) - {0}
        allowed = [item for item in range(1, 61) if item not in barred]
        best = sorted(allowed, key=lambda item: (-float(scores[user, item - 1]), item))[:10]
        assert lists.item_ids[user].tolist() == best
        torch.testing.assert_close(lists.scores[user], scores[user, lists.item_ids[user] - 1])


def bounded_by_hand(factors, histories, user, bound):
    """Grades less ``bound`` standard deviations, item by item."""
    weights, covariance = folded_by_hand(factors, histories, user)
    known, found = np.array([*weights[:-1], 1.0]), []
    for item in range(60):
        row = np.array([*factors.item_factors[item].tolist(), 1.0])
        variance = known @ factors.item_covariance[item].double().numpy() @ known + row @ covariance @ row
        grade = factors.mean + weights @ row + float(factors.item_bias[item])
        found.append(grade - bound * np.sqrt(factors.noise * variance))
    return np.array(found)


@pytest.mark.parametrize("bound", [0.0, 0.7, 3.0])
def test_lists_are_those_of_the_lower_bounds(factors, histories, monkeypatch, bound):
    model = replace(factors, lower_bound=bound)
    exclude = torch.tensor([[1, 2, 0], [0, 0, 0], [60, 5, 0], [7, 0, 0]])
    lists = model.recommend(histories, 10, exclude)
    ranked = model.bounded_grades(histories, torch.arange(1, 61).expand(4, -1))
    few = torch.tensor([[3, 1], [60, 2], [5, 5], [7, 9]])
    torch.testing.assert_close(model.bounded_grades(histories, few), ranked.gather(1, few - 1))
    for user in range(4):
        expected = bounded_by_hand(model, histories, user, bound)
        np.testing.assert_allclose(ranked[user], expected, atol=1e-5)
        barred = set(exclude[user].tolist())
        best = sorted((i for i in range(1, 61) if i not in barred), key=lambda i: -expected[i - 1])[:10]
        assert lists.item_ids[user].tolist() == best
        np.testing.assert_allclose(lists.scores[user], expected[np.array(best) - 1], atol=1e-5)
    monkeypatch.setattr(
        catalog_search, "score_blocks", lambda states, table, padding: list(column_blocks(len(table), padding, 7))
    )
    in_blocks = model.recommend(histories, 10, exclude)
    assert torch.equal(in_blocks.item_ids, lists.item_ids)
    torch.testing.assert_close(in_blocks.scores, lists.scores)


def test_bounds_need_what_they_are_computed_from(factors, tmp_path):
    for change in ({"item_covariance": None, "lower_bound": 1.0}, {"lower_bound": -1.0}, {"lower_bound": float("nan")}):
        with refused("out_of_range", "lower_bound"):
            replace(factors, **change)
    with refused("out_of_range", "lower_bound"):
        FactorOptions(lower_bound=-1.0)
    with refused("conflicting_options", "lower_bound"):
        FactorOptions(lower_bound=1.0, uncertainty=False)
    kinds = [{}, {"method": "als"}, {"uncertainty": False}, {"method": "als", "lower_bound": 0.5}]
    assert [FactorOptions(**kind).bound for kind in kinds] == [1.0, 2.0, 0.0, 0.5]


def test_ties_go_to_the_smaller_id_and_empty_places_are_0(factors, histories):
    flat = replace(factors, item_factors=torch.zeros(60, 3), item_bias=torch.zeros(60), lower_bound=0.0)
    assert flat.recommend(histories, 5).item_ids.tolist() == [[1, 2, 3, 4, 5]] * 4
    barred = torch.arange(1, 59).expand(4, -1)
    lists = flat.recommend(histories, 4, barred)
    assert lists.item_ids.tolist() == [[59, 60, 0, 0]] * 4
    assert (lists.scores[:, 2:] == -torch.inf).all()


def test_recommend_takes_held_out_batches(factors, data):
    batch = next(iter(HeldOutBatches(data, "test", factors.max_history, 8, Rank())))
    lists = factors.recommend(batch.feedback.histories, 5, batch.exclude)
    assert not (lists.item_ids[..., None] == batch.exclude[:, None]).any(-1)[lists.item_ids > 0].any()


def test_saved_and_opened_it_is_the_same(factors, histories, tmp_path):
    factors.save(tmp_path / "factors")
    opened = Factors.open(tmp_path / "factors")
    assert Factors.open(opened) is opened
    assert kind_of(tmp_path / "factors") == "factors"
    assert opened.tensors.keys() == factors.tensors.keys()
    assert all(torch.equal(opened.tensors[name], tensor) for name, tensor in factors.tensors.items())
    for name in ("mean", "ridge", "noise", "lower_bound", "catalog_checksum", "max_history", "facts"):
        assert getattr(opened, name) == getattr(factors, name)
    assert torch.equal(opened.recommend(histories, 5).item_ids, factors.recommend(histories, 5).item_ids)
    with refused("exists"):
        factors.save(tmp_path / "factors")


def test_without_users_and_covariances_it_is_smaller(factors, tmp_path):
    plain = Factors(**{**vars(factors), "user_factors": None, "item_covariance": None, "lower_bound": 0.0})
    plain.save(tmp_path / "factors")
    opened = Factors.open(tmp_path / "factors")
    assert opened.user_factors is None
    assert opened.item_covariance is None


@pytest.mark.parametrize("name", ["factors.safetensors", MANIFEST])
def test_what_was_changed_is_refused(factors, tmp_path, name):
    factors.save(tmp_path / "factors")
    file = tmp_path / "factors" / name
    content = bytearray(file.read_bytes())
    place = content.index(b'"mean": 0.') + 12 if name == MANIFEST else len(content) - 3
    content[place] = ord("1") if content[place] != ord("1") else ord("2")
    file.write_bytes(content)
    with refused("damaged", name):
        Factors.open(tmp_path / "factors")


def test_what_is_open_is_opened_and_another_kind_is_refused(factors, data):
    assert Factors.open(factors) is factors
    with refused("wrong_file", "factors"):
        Factors.open(data)


def test_no_factors_another_version_and_a_missing_file_are_refused(factors, tmp_path):
    with refused("wrong_file", "manifest.json"):
        Factors.open(tmp_path)
    factors.save(tmp_path / "factors")
    (tmp_path / "factors" / "factors.safetensors").unlink()
    with refused("damaged", "factors.safetensors"):
        Factors.open(tmp_path / "factors")
    manifest = json.loads((tmp_path / "factors" / MANIFEST).read_text()) | {"format_version": 99}
    (tmp_path / "factors" / MANIFEST).write_text(json.dumps(manifest))
    with refused("old_format", "format_version"):
        Factors.open(tmp_path / "factors")


def test_tensors_that_do_not_belong_together_are_refused(factors):
    for name, tensor in {"item_bias": torch.zeros(59), "user_factors": torch.zeros(5, 3)}.items():
        with refused("wrong_shape", name):
            Factors(**{**vars(factors), name: tensor})


def test_another_catalog_is_refused(factors, data):
    factors.validate_items(data.catalog_checksum, data.root)
    with refused("mismatch", "items.parquet"):
        factors.validate_items("another", "elsewhere")


def test_histories_without_feedback_are_refused(factors, histories):
    with refused("missing_value", "feedback"):
        factors.fold_in(histories._replace(feedback=None))
