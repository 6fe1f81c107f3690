"""Behaviors, users and context in the batches of training and evaluation, against loops over the shards."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from recpo.base.features import Reads
from recpo.base.types import EvaluationBatch, FeedbackBatch, Histories, Recommendations, Slates
from recpo.batches.datamodule import Contents, TrainBatches
from recpo.batches.preference_lists import PreferenceListLayout
from recpo.batches.slates import HeldOutBatches, ImpressionLayout, Rank, SequenceLayout
from recpo.evaluation.measures import BehaviorRates, Observed
from recpo.rewards.rewards import LoggedReward, WeightedSum
from tests.log.test_features import prepare, rich_log
from tests.refusals import refused

ALL = Reads(True, True, True)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    log = rich_log()
    # a request's events stand together, at one time: the context of a request is that of its first event
    first = np.arange(log.num_rows) // 3 * 3
    log = log.set_column(2, "timestamp", log["timestamp"].take(first)).take(pa.array(np.arange(900)))
    return prepare(tmp_path_factory.mktemp("batches") / "out", log)


def raw_events(data, period):
    """Of every shard row: user, item, time, bits, surface code, standardized hour."""
    names = ["user_index", "item_index", "timestamp", "request", "behaviors", "context_surface", "context_hour"]
    return [data.columns(period, shard, names) for shard in range(data.num_shards(period))]


def check_histories(histories, user_ids, data, columns):
    """Every event of a history has the bits and context of its row, and the row after the last is the next request."""
    users = data.user_features()
    for row, user in enumerate(user_ids.tolist()):
        mine = np.flatnonzero(columns["user_index"] == user)
        length = int(histories.lengths[row])
        events = list(zip(histories.item_ids[row].tolist(), histories.timestamps[row].tolist(), strict=True))[:length]
        log = list(zip(columns["item_index"][mine].tolist(), columns["timestamp"][mine].tolist(), strict=True))
        starts = [s for s in range(len(log) - length) if log[s : s + length] == events]
        assert starts
        codes, hours = histories.context.codes[row, :, 0], histories.context.numbers[row, :, 0]

        def agrees(start, row=row, mine=mine, length=length, codes=codes, hours=hours):
            index = mine[start : start + length + 1]
            return (
                codes[: length + 1].tolist() == columns["context_surface"][index].tolist()
                and np.array_equal(hours[: length + 1].numpy(), columns["context_hour"][index], equal_nan=True)
                and histories.behaviors[row, :length].tolist() == columns["behaviors"][index[:-1]].tolist()
            )

        assert any(agrees(start) for start in starts)
        assert not codes[length + 1 :].any()
        assert hours[length + 1 :].isnan().all()
        assert histories.user.codes[row].tolist() == users.codes[user].tolist()
        np.testing.assert_array_equal(histories.user.numbers[row], users.numbers[user])


@pytest.mark.parametrize("layout", [SequenceLayout(8), ImpressionLayout(8), PreferenceListLayout(8)], ids=type)
def test_train_batches_hold_what_is_read(data, layout):
    (columns,) = raw_events(data, "train")
    for batch in TrainBatches(data, layout, 16, 0, Rank(), contents=Contents(ALL)):
        if not batch.slates.mask.any():
            continue
        check_histories(batch.histories, batch.user_ids, data, columns)
        for row, user in enumerate(batch.user_ids.tolist()):
            mine = columns["user_index"] == user
            logged = batch.slates.is_logged[row]
            for item, bits in zip(batch.slates.item_ids[row][logged], batch.slates.behaviors[row][logged], strict=True):
                assert bits in columns["behaviors"][mine & (columns["item_index"] == int(item))]
        assert not batch.slates.behaviors[~batch.slates.is_logged].any()
    plain = next(iter(TrainBatches(data, layout, 16, 0, Rank())))
    assert (plain.histories.behaviors, plain.histories.user, plain.histories.context) == (None, None, None)
    assert plain.slates.behaviors is None


def test_held_out_batches_stand_at_the_first_request_of_the_period(data):
    columns = raw_events(data, "test")
    (columns,) = columns
    for batch in HeldOutBatches(data, "test", 8, 16, Rank(), reads=ALL):
        check_histories(batch.feedback.histories, batch.user_ids, data, columns)
        for row, user in enumerate(batch.user_ids.tolist()):
            mine = np.flatnonzero(columns["user_index"] == user)
            kept = batch.feedback.slates.mask[row]
            bits = batch.feedback.slates.behaviors[row][kept].tolist()
            assert bits == columns["behaviors"][mine[-len(bits) :]].tolist()


def slates_of(behaviors, label=(0.5, np.nan, np.nan), dislike=(False, False, True)):
    items = torch.tensor([[1, 2, 3]])
    return Slates(
        items,
        torch.zeros_like(items),
        items > 0,
        torch.tensor([label]),
        torch.tensor([dislike]),
        behaviors=None if behaviors is None else torch.tensor([behaviors]),
    )


def test_a_logged_reward_weighs_behaviors():
    reward = LoggedReward(behaviors={"share": 2.0, "like": 0.25})
    assert reward.reads == Reads(behaviors=True)
    known = WeightedSum([reward, LoggedReward()], [1.0, 0.0]).for_behaviors(("like", "follow", "share"))
    assert known.reads == Reads(behaviors=True)
    found = known(None, slates_of([0b101, 0b100, 0b001]))
    torch.testing.assert_close(found, torch.tensor([[0.5 + 2.25, 2.0, 0.25 - 1.0]]))
    unweighted = reward.for_behaviors(("like", "follow", "share"))(None, slates_of([0b010, 0b010, 0]))
    torch.testing.assert_close(unweighted, torch.tensor([[0.5, torch.nan, -1.0]]), equal_nan=True)
    with refused("unknown_name", "LoggedReward.behaviors"):
        reward.for_behaviors(("like",))
    with refused("missing_value", "behaviors"):
        reward.for_behaviors(("like", "share"))(None, slates_of(None))


def test_behavior_rates_are_shares_of_the_shown_items():
    slates = slates_of([0b01, 0b11, 0b00])
    histories = Histories(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, dtype=torch.long))
    batch = EvaluationBatch(FeedbackBatch(histories, slates, torch.zeros(1)), torch.zeros(1, 0), torch.zeros(1, 0))

    def rates(lists, k):
        observed = Observed(batch, Recommendations(torch.tensor([lists]), torch.zeros(1, len(lists))), None, None)
        return {name: value.tolist() for name, value in BehaviorRates(("like", "share"), k).update(observed).items()}

    assert rates([9, 3, 2, 1], 3) == {"like_rate@3": [0.5], "share_rate@3": [0.5]}
    assert np.isnan(rates([9, 8, 0, 0], 3)["like_rate@3"]).all()
