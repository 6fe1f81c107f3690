"""Ridge regression and elimination of small systems, against NumPy and by hand."""

import numpy as np
import pytest
import torch

from recpo.ops.small_systems import solve_positive_definite
from recpo.rewards.factors import ridge_regression


def test_a_ridge_regression_by_hand():
    # rows 1 and 2 with targets 3 and 5; a third one that is not known: w = (1 * 3 + 2 * 5) / (1 + 4 + 2)
    rows = torch.tensor([[[1.0], [2.0], [7.0]], [[1.0], [2.0], [7.0]]])
    targets = torch.tensor([[3.0, 5.0, float("nan")], [float("nan")] * 3])
    known = torch.tensor([[True, True, False], [False] * 3])
    weights, covariance = ridge_regression(rows, targets, known, torch.tensor([2.0]), torch.zeros(2, 1))
    assert weights.dtype == covariance.dtype == torch.float64
    torch.testing.assert_close(weights, torch.tensor([[13 / 7], [0.0]], dtype=torch.float64))
    torch.testing.assert_close(covariance, torch.tensor([[[1 / 7]], [[0.5]]], dtype=torch.float64))


def test_ridge_regressions_of_many_problems_are_those_of_numpy():
    rng = np.random.default_rng(0)
    rows, targets, known = rng.normal(size=(4, 6, 3)), rng.normal(size=(4, 6)), rng.random((4, 6)) < 0.6
    for ridge in (np.array([0.3, 1.0, 2.0]), rng.random((4, 3)) + 0.1):  # of every weight, of each problem
        pull = rng.normal(size=(4, 3))
        weights, covariance = ridge_regression(*map(torch.from_numpy, (rows, targets, known, ridge, pull)))
        for b in range(4):
            kept = rows[b][known[b]]
            own = np.broadcast_to(ridge, (4, 3))[b]
            inverse = np.linalg.inv(kept.T @ kept + np.diag(own))
            np.testing.assert_allclose(covariance[b], inverse, rtol=1e-5)
            np.testing.assert_allclose(weights[b], inverse @ (kept.T @ targets[b][known[b]] + pull[b]), rtol=1e-5)


def test_an_elimination_by_hand():
    matrix = torch.tensor([[[4.0, 2.0], [2.0, 3.0]]])
    torch.testing.assert_close(solve_positive_definite(matrix, torch.tensor([[10.0, 9.0]])), torch.tensor([[1.5, 2.0]]))
    one = solve_positive_definite(torch.tensor([[[4.0]], [[2.0]]]), torch.tensor([[10.0], [9.0]]))
    assert one.tolist() == [[2.5], [4.5]]


@pytest.mark.parametrize("size", [3, 4, 7])
def test_eliminations_are_those_of_numpy(size):
    rng = np.random.default_rng(size)
    half, right = rng.normal(size=(5, size + 2, size)), rng.normal(size=(5, size))
    matrix = half.swapaxes(1, 2) @ half + 0.1 * np.eye(size)
    found = solve_positive_definite(torch.from_numpy(matrix), torch.from_numpy(right))
    np.testing.assert_allclose(found, np.linalg.solve(matrix, right[..., None])[..., 0])
