"""Validation while training: head and tail of the catalog, coverage, over ranks."""

import pytest
import torch

from recpo.data.datamodule import FeedbackDataModule
from recpo.data.slates import SequenceLayout
from recpo.evaluation.targets import held_out_targets
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.training.validation import ValidationMetrics, tail_items


def test_the_tail_holds_a_fifth_of_the_events():
    counts = torch.tensor([5, 50, 0, 25, 10, 10])
    # 50 + 25 = 75 of 100 events, + 10 = 85: the tail begins behind the item that reaches 80
    assert tail_items(counts).tolist() == [False, True, False, True, False, False, True]


def test_head_tail_and_coverage_equal_a_loop_and_add_up_over_ranks(prepared):
    data = FeedbackDataModule(prepared, layout=SequenceLayout(history_length=12), evaluation_batch_size=16)
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(data.prepared.num_items, dim=8, layers=1, heads=1, max_history=12).eval()
    torch.nn.init.normal_(policy.item_table.weight[1:])
    counts = torch.from_numpy(data.prepared.item_counts())
    tail = tail_items(counts)
    ranks = [ValidationMetrics(10, data.prepared.num_items, counts) for _ in range(2)]
    shown, recalls = set(), {True: [], False: []}
    for number, batch in enumerate(data.val_dataloader()):
        ranks[number % 2].update(policy, batch)
        lists = policy.recommend(batch.feedback.histories, 10, batch.exclude).item_ids
        targets = held_out_targets(batch).without(batch.exclude)
        for row, items in enumerate(lists.tolist()):
            shown |= set(items)
            liked = set(targets.item_ids[row][targets.positive[row]].tolist())
            for in_tail, found in recalls.items():
                wanted = {item for item in liked if bool(tail[item]) == in_tail}
                if wanted:
                    found.append(len(wanted & set(items)) / len(wanted))
    sums = [rank._sums for rank in ranks]
    seen = [rank._shown for rank in ranks]
    answers = iter([sums[0] + sums[1], seen[0] + seen[1]])
    metrics = ranks[0].compute(lambda value: next(answers))
    assert metrics["coverage@10"].item() == pytest.approx(len(shown - {0}) / data.prepared.num_items)
    for name, in_tail in (("Recall_head@10", False), ("Recall_tail@10", True)):
        assert metrics[name].item() == pytest.approx(sum(recalls[in_tail]) / len(recalls[in_tail]), rel=1e-5)
