"""Candidates of a period, new items, and ages; and a living world, evaluated end to end."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import recpo
from recpo.base.features import Category
from recpo.base.types import Recommendations
from recpo.cli.main import main
from recpo.evaluation.candidates import NEVER, Candidates, CandidateTable, begin_of, candidates_of
from recpo.evaluation.catalog_ranking import Ranking, evaluate_ranking
from recpo.evaluation.measures import Recommender
from recpo.evaluation.off_policy.estimators import OffPolicyOptions
from recpo.evaluation.off_policy.measure import OffPolicyMeasure, OffPolicySetting
from recpo.evaluation.segments import NewItems, item_age, item_ages, new_items
from recpo.evaluation.true_rewards import true_rewards
from recpo.log.feature_columns import FeatureColumns
from recpo.log.prepared import Prepared
from recpo.log.schema import ALWAYS
from recpo.verbs.evaluate import evaluate
from recpo.worlds.log import Simulation
from tests.evaluation.off_policy.test_off_policy_measure import ITEMS, PLACES, Contender, Given, log
from tests.evaluation.test_catalog_ranking import batch_of
from tests.reference import ranking_loops
from tests.refusals import refused


def by_number(item_count):
    """Ranks items by their number, the largest first, without what is excluded."""

    def recommend(histories, k, exclude):
        rows = len(histories.item_ids)
        scores = torch.arange(item_count + 1).double().expand(rows, -1).clone()
        scores[:, 0] = -math.inf
        if exclude is not None:
            scores.scatter_(1, exclude, -math.inf)
        top = scores.topk(min(k, item_count))
        return Recommendations(top.indices * top.values.isfinite(), top.values)

    return Recommender(recommend, name="by number")


def spans(begin, **until):
    """Candidates of items 1.. with these first moments; ``until`` by item, as ``i3=7``."""
    end = np.full(len(begin) + 1, NEVER)
    for name, value in until.items():
        end[int(name[1:])] = value
    return lambda at: Candidates(np.array([ALWAYS, *begin]), end, at, "a test")


def test_what_is_unavailable_is_found_as_in_a_loop():
    rng = np.random.default_rng(0)
    begin, end = rng.integers(0, 20, 31), rng.integers(5, 30, 31)
    at = rng.integers(0, 25, 12)
    users = torch.tensor([3, 3, 0, 11, 7])
    for moment in (at, 9):
        candidates = Candidates(begin, end, moment, "a test")
        found = candidates.unavailable(users)
        assert found.shape[1] <= candidates.most_unavailable
        for row, user in enumerate(users.tolist()):
            when = moment if isinstance(moment, int) else moment[user]
            expected = {item for item in range(1, 31) if not begin[item] <= when < end[item]}
            assert set(found[row].tolist()) - {0} == expected
        moments = [9] if moment is not at else at
        somebody = {i for i in range(1, 31) if begin[i] <= max(moments) and end[i] > min(moments)}
        assert set(torch.nonzero(candidates.is_candidate).flatten().tolist()) == somebody


def test_what_did_not_exist_is_neither_listed_nor_a_target():
    batch = batch_of([[6, 5, 2, 4]], [[0.9, 0.9, 0.9, 0.1]], [[False, False, False, True]], seen=[[3]])
    available = spans([0, 0, 0, 5, 0, 9])(4)  # items 4 and 6 come later
    result = evaluate_ranking(by_number(6), [batch], Ranking(num_items=6, ks=(2, 4), candidates=available))
    counts = result.counts
    assert (counts["positive_events"], counts["positive_events_unavailable"]) == (3, 1)
    assert (counts["disliked_events"], counts["disliked_events_unavailable"]) == (1, 1)
    assert counts["positive_events_excluded"] == 0
    # without the past (3) and what comes later, the list is 5, 2, 1
    assert result.per_user["Recall@2"].tolist() == [1.0]
    expected = ranking_loops.metrics([5, 2, 1], [5, 2], 4)["NDCG"]
    assert result.per_user["NDCG@4"].item() == pytest.approx(expected)
    assert result.totals["coverage@4"] == pytest.approx(3 / 4), "of the four candidates"
    everything = evaluate_ranking(by_number(6), [batch], Ranking(num_items=6, ks=(2,)))
    assert everything.counts["positive_events_unavailable"] == 0
    assert everything.totals["coverage@2"] == pytest.approx(2 / 6)


def test_every_user_has_the_candidates_of_the_own_moment():
    batch = batch_of([[2], [2]], [[0.9], [0.9]])
    available = spans([0, 5, 0], i3=6)(np.array([4, 6]))
    result = evaluate_ranking(by_number(3), [batch], Ranking(num_items=3, ks=(1,), candidates=available))
    assert result.counts["positive_events_unavailable"] == 1
    assert result.per_user["HitRate@1"][1] == 1.0
    assert math.isnan(result.per_user["HitRate@1"][0])


def test_a_contender_that_lists_what_does_not_exist_is_refused():
    stubborn = Recommender(lambda histories, k, exclude: Recommendations(torch.tensor([[2]]), torch.zeros(1, 1)))
    batches = [batch_of([[1]], [[0.9]])]
    with refused("bad_value", "candidates"):
        evaluate_ranking(stubborn, batches, Ranking(num_items=3, ks=(1,), candidates=spans([0, 7, 0])(3)))


def test_draws_of_what_does_not_exist_earn_nothing():
    """Exposures of such items have weight 0 and stay in the denominator: a mean over all of them, as without any."""
    contender, absent = Contender(), [2, 5]
    candidates = Candidates(
        np.array([ALWAYS, *(9 if item in absent else 0 for item in range(1, ITEMS + 1))]),
        np.full(ITEMS + 1, NEVER),
        4,
        "a test",
    )
    setting = OffPolicySetting(OffPolicyOptions(resamples=20), Given(), ITEMS, [PLACES])
    measure = OffPolicyMeasure(setting, contender.sample)

    def recommend(histories, k, exclude):
        known = torch.nn.functional.pad(contender.logp[histories.item_ids[:, 0] - 1], (1, 0))
        scores = known.scatter(1, exclude, -math.inf)[:, 1:]
        top = scores.topk(k)
        return Recommendations(top.indices + 1, top.values)

    batches = list(log())
    evaluate_ranking(
        Recommender(recommend, contender.log_prob),
        batches,
        Ranking(num_items=ITEMS, ks=[PLACES], candidates=candidates),
        measures=[measure],
    )
    found = measure.result()
    weighted, weight, size = 0.0, 0.0, 0
    for batch in batches:
        slates, rows = batch.feedback.slates, batch.feedback.context_ids
        pi = contender.log_prob(batch.feedback)[..., 0].exp()
        w = pi / slates.logp_behavior.exp() * ~torch.isin(slates.item_ids, torch.tensor(absent))
        weighted += float((w * slates.reward)[slates.mask].sum())
        weight += float(w[slates.mask].sum())
        size += int(slates.mask.sum())
        assert len(rows)
    assert found.estimate("policy", "IPS").value == pytest.approx(weighted / size)
    assert found.estimate("policy", "SNIPS").value == pytest.approx(weighted / weight)
    share = contender.logp.exp()[:, [1, 4]].sum(1).mean()
    assert found.estimate("policy", "IPS").diagnostics.no_item_share == pytest.approx(float(share), abs=0.08)
    assert found.estimate("logging policy", "mean").diagnostics.rows == size


def test_new_items_are_measured_as_in_a_loop():
    train_count = torch.tensor([0, 4, 0, 1, 0, 0, 2, 0])
    available = spans([0, 0, 0, 0, 9, 0, 0])(4)
    is_new = new_items(train_count, available.is_candidate)
    assert is_new.tolist() == [False, False, True, False, True, False, False, True]
    assert new_items(train_count, None).sum() == 4
    batch = batch_of([[7, 1, 2, 5], [3, 6, 0, 0]], [[0.9, 0.9, 0.9, 0.9], [0.9, 0.9, 0.0, 0.0]])
    result = evaluate_ranking(
        by_number(7),
        [batch],
        Ranking(num_items=7, ks=(1, 3), candidates=available),
        measures=[NewItems(is_new, (1, 3))],
    )
    lists = [7, 6, 4, 3, 2, 1]
    for k in (1, 3):
        share = sum(bool(is_new[item]) for item in lists[:k]) / k
        assert result.per_user[f"new_share@{k}"].tolist() == pytest.approx([share, share])
        expected = ranking_loops.metrics(lists, [7, 2], k)
        for name in ("Recall", "NDCG", "HitRate"):
            mine = result.per_user[f"new_{name}@{k}"]
            assert mine[0].item() == pytest.approx(expected[name])
            assert math.isnan(mine[1]), "no target of the second user is new"
    assert "new_true_reward@1" not in result.per_user


def test_ages_are_cut_into_bins():
    days = torch.tensor([0, 0.0, 0.99, 1, 7, 29.9, math.inf, math.nan, -0.5])
    segment = item_age(days)
    named = ["-" if label < 0 else segment.bins[label] for label in segment.label.tolist()]
    expected = ["under 1 day", "under 1 day", "1 to 3 days", "7 to 30 days", "7 to 30 days", "30 days and more"]
    assert named == ["-", *expected, "no event in training", "-"]
    assert "3 to 7 days" not in segment.bins


def test_without_times_of_birth_an_item_is_as_old_as_its_first_event(prepared):
    data = Prepared.open(prepared)
    days, first = item_ages(data, "test", None), {}
    for shard in range(data.num_shards("train")):
        item, time = data.columns("train", shard, ["item_index", "timestamp"]).values()
        for i, t in zip(item.tolist(), time.tolist(), strict=True):
            first[i] = min(t, first.get(i, t))
    begin = data.manifest["boundaries"]["test_start_ms"]
    some = list(first)[:50]
    assert days[some].tolist() == pytest.approx([(begin - first[item]) / 86_400_000 for item in some])


@pytest.fixture(scope="module")
def living(tmp_path_factory):
    """A small world that lives and its log, prepared, with two days held out."""
    root = tmp_path_factory.mktemp("living")
    options = {"users": 60, "items": 80, "events": 4000, "days": 8, "births": 0.06}
    world = recpo.simulate(root / "world", world="living", **options)
    return world, recpo.prepare(
        world.log,
        root / "prepared",
        items=world.items,
        catalog="items",
        features=FeatureColumns(item=(Category("category"),), available_from="available_from"),
        split=recpo.TemporalSplit(valid_days=1, test_days=2),
    )


def test_a_table_of_candidates_is_read_by_its_columns(living):
    world, data = living
    table, begin = pq.read_table(world.items), data.manifest["boundaries"]["test_start_ms"]
    known = candidates_of(data, "test", table)
    ids = data.item_ids().to_external(np.arange(1, data.num_items + 1)).to_pylist()
    births = dict(zip(table["item_id"].to_pylist(), table["available_from"].to_pylist(), strict=True))
    assert known.begin == begin == begin_of(data, "test")
    assert known.is_candidate[1:].tolist() == [births[item] <= begin for item in ids]
    assert known.source == "a frame in memory"
    default = candidates_of(data, "test", None)
    assert np.array_equal(default.available_from, known.available_from), "the prepared data say the same"
    assert np.array_equal(data.item_ids().available[0], default.available_from[1:]), "as do the items of a run"
    renamed = table.rename_columns(["video", "born", *table.column_names[2:]])
    other = candidates_of(data, "test", CandidateTable(renamed, "video", "born"))
    assert torch.equal(other.is_candidate, known.is_candidate)
    # a list of items without times; and the times as the clock has them
    first = candidates_of(data, "test", {"item_id": ids[:7]})
    assert torch.nonzero(first.is_candidate).flatten().tolist() == list(range(1, 8))
    stamped = table.set_column(1, "available_from", table["available_from"].cast(pa.timestamp("ms", "UTC")))
    assert np.array_equal(candidates_of(data, "test", stamped).available_from, known.available_from)
    until = {"item_id": ids, "available_until": [begin, begin + 1, *[None] * (len(ids) - 2)]}
    assert candidates_of(data, "test", until).is_candidate[1:].tolist() == [False, *[True] * (len(ids) - 1)]
    assert candidates_of(data, "test", "all") is None


def test_items_whose_end_the_prepared_data_know_are_no_candidates(living, tmp_path):
    world, data = living
    begin, table = data.manifest["boundaries"]["test_start_ms"], pq.read_table(world.items)
    ends = pa.array([begin if item % 3 else None for item in range(len(table))])
    features = FeatureColumns(item=(), available_until="ends")
    split, items = recpo.TemporalSplit(valid_days=1, test_days=2), table.append_column("ends", ends)
    made = recpo.prepare(world.log, tmp_path / "prepared", items=items, features=features, split=split)
    ended = dict(zip(table["item_id"].to_pylist(), ends.to_pylist(), strict=True))
    shown = pq.read_table(world.log).filter(pc.field("timestamp") >= begin)["item_id"].to_pylist()
    ids = made.item_ids().to_external(np.arange(1, made.num_items + 1)).to_pylist()
    found = candidates_of(made, "test", None).is_candidate[1:].tolist()
    assert found == [ended[item] is None or item in shown for item in ids]
    assert 0 < sum(found) < len(ids)
    assert made.item_ids().unlisted(begin).tolist() == [place for place, one in enumerate(found, 1) if not one]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"item_id": [-1, -2]}, ("mismatch", "item_id")),
        ({"item": [1]}, ("missing_column", "item_id")),
        (CandidateTable({"item_id": [1002]}, available_from="born"), ("missing_column", "born")),
        ("nowhere.parquet", ("wrong_file",)),
    ],
)
def test_faults_of_a_table_are_named(living, given, message):
    with refused(*message):
        candidates_of(living[1], "test", given)


def test_an_item_with_two_rows_is_refused(living):
    item = living[1].item_ids().to_external(np.array([3]))[0].as_py()
    with refused("duplicate", "item_id") as raised:
        candidates_of(living[1], "test", {"item_id": [item, item]})
    assert f"item {item} " in str(raised.value)


def test_no_list_of_candidates_is_worth_more_than_the_oracles(living):
    world, data = living
    found = evaluate(data, ["popularity", "recency", "random"], ks=[5], truth=world.root)
    contenders = found.document["contenders"]
    for metric in ("true_reward@5", "new_true_reward@5"):
        values = {one["name"]: one["metrics"][metric]["mean"] for one in contenders if metric in one["metrics"]}
        assert values["oracle"] > max(value for name, value in values.items() if name != "oracle")
        assert {"popularity", "random"} <= values.keys()
    assert found.document["new_items"]["items"] > 2
    shares = {
        one["name"]: one["metrics"]["new_share@5"]["mean"] for one in contenders if one["metrics"].get("new_share@5")
    }
    assert shares["popularity"] == 0 < shares["random"] < shares["oracle"], "users like what is fresh"
    assert found.document["candidates"]["source"] == "availability of the items in the prepared data"
    assert found.options["candidates"] is None
    left_out = found.document["candidates"]["items_left_out"]
    born = np.array(pq.read_table(world.items)["available_from"])
    begin = data.manifest["boundaries"]["test_start_ms"]
    ids = data.item_ids().to_external(np.arange(1, data.num_items + 1)).to_numpy()
    later = np.isin(ids, pq.read_table(world.items)["item_id"].to_numpy()[born > begin])
    assert left_out == later.sum()
    shown = found.html()
    assert f"{left_out:,} were not" in shown
    assert "have no event in training" in shown
    segments = found.document["setting"]["segments"]["item age"]
    assert segments[-1] in ("7 to 30 days", "30 days and more")


@pytest.mark.slow
def test_the_command_line_takes_a_file_and_repeats_itself(living, tmp_path, capsys):
    world, data = living
    common = ["evaluate", "--prepared", str(data.root), "--ks", "[5]", "--contenders", '["popularity","random"]']
    common += ["--segments", "false", "--off_policy", "null", "--bootstrap_resamples", "20"]
    assert main([*common, "--candidates", str(world.items), "--out", str(tmp_path / "first")]) == 0
    printed = capsys.readouterr().out
    assert "items were candidates at 2026" in printed
    options = yaml.safe_load((tmp_path / "first" / "resolved.yaml").read_text())
    options["out"] = str(tmp_path / "second")
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(options))
    assert main(["evaluate", "--config", str(tmp_path / "again.yaml")]) == 0
    first, second = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("first", "second"))
    assert first["candidates"] == second["candidates"]
    assert first["contenders"] == second["contenders"]
    nested = ["--candidates.source", str(world.items), "--candidates.available_from", "available_from"]
    assert main([*common, *nested, "--out", str(tmp_path / "third")]) == 0
    assert json.loads((tmp_path / "third" / "metrics.json").read_text())["contenders"] == first["contenders"]
    assert main([*common, "--candidates", "all", "--out", str(tmp_path / "fourth")]) == 0
    assert json.loads((tmp_path / "fourth" / "metrics.json").read_text())["candidates"] is None


def test_best_new_items_are_worth_what_the_truth_says(living):
    """Half of the catalog is declared new: the lists of new items alone, and what they are worth."""
    world, data = living
    known = true_rewards(world.root, data, "test", [3])
    is_new = torch.arange(data.num_items + 1) % 2 == 1
    measure = NewItems(is_new, (3,), known)
    assert measure.others.tolist() == [item for item in range(1, data.num_items + 1) if item % 2 == 0]
    batch = batch_of([[1], [2]], [[0.9], [0.9]])
    result = evaluate_ranking(
        by_number(data.num_items),
        [batch],
        Ranking(num_items=data.num_items, ks=(3,), new_items_among=measure.others),
        measures=[measure],
    )
    best = [item for item in range(data.num_items, 0, -1) if item % 2 == 1][:3]
    expected = known.of_lists(torch.arange(2), torch.tensor([best, best]))["true_reward@3"]
    assert result.per_user["new_true_reward@3"].tolist() == pytest.approx(expected.tolist())


def test_a_world_that_lives_opens_with_its_tables(living):
    world, _ = living
    opened = Simulation.open(world.root)
    assert opened.items == world.items
    assert opened.users.is_file()
