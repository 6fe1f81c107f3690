from __future__ import annotations

import torch

from recpo.evaluation.beyond_accuracy import Exposure


def test_coverage_counts_distinct_items_of_all_lists():
    exposure = Exposure(num_items=8, ks=[1, 2])
    exposure.add(torch.tensor([[1, 2], [1, 3]]))
    exposure.add(torch.tensor([[4, 1], [0, 0]]))
    totals = exposure.totals()
    assert totals["coverage@1"] == 2 / 8
    assert totals["coverage@2"] == 4 / 8
