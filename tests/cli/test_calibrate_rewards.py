"""``recpo calibrate`` over any rewards: against independent loops, from Python and from the command line."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from scipy.stats import spearmanr

import recpo
from recpo.base.contracts import RewardFunction
from recpo.base.feedback import GRADES
from recpo.base.types import FeedbackBatch, Slates
from recpo.batches.slates import evaluation_batches
from recpo.cli.main import main
from recpo.evaluation.calibration import greedy_lists
from recpo.evaluation.true_rewards import TrueReward
from recpo.log.prepared import Prepared
from tests.refusals import refused


@dataclass(frozen=True)
class SineReward(RewardFunction):
    """A number of its own for every pair; items above ``known`` are unknown."""

    known: int = 60
    scale: float = 1.0

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> torch.Tensor:
        items = candidates.item_ids
        reward = self.scale * torch.sin(items.float() * 1.7 + batch.user_ids[:, None])
        return reward.masked_fill(~candidates.mask | (items == 0) | (items > self.known), torch.nan)


@pytest.fixture(scope="module")
def factors(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp("calibrated") / "factors"
    recpo.factorize(prepared, out, method="als", ranks=[3], ridges=[2.0], sweeps=3)
    return out


@dataclass(frozen=True)
class RareItems(RewardFunction):
    """The items of few events first, which hardly anybody has in the past: the same lists for almost every user."""

    counts: tuple[int, ...]

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> torch.Tensor:
        items = candidates.item_ids
        reward = -torch.tensor([0, *self.counts], dtype=torch.float32)[items]
        return reward.masked_fill(~candidates.mask | (items == 0), torch.nan)


def test_greedy_lists_that_hardly_differ_between_users_are_noted(prepared):
    counts = tuple(Prepared.open(prepared).item_counts().tolist())
    report = recpo.calibrate(prepared, {"sine": SineReward(), "rare": RareItems(counts)}, k=2, resamples=2)
    (note,) = [note for note in report.content["notes"] if "hardly differ" in note]
    users, lists = Prepared.open(prepared).manifest["counts"]["splits"]["test"]["users"], report.content["rewards"]
    assert note.startswith("rare: ")
    assert f"The first 2 places of {users} users come from " in note
    assert f"share {lists['rare']['lists']['overlap']:.0%} of their lists" in note
    assert lists["sine"]["lists"]["overlap"] < 0.2


def test_errors_are_those_of_a_loop_over_the_prepared_events(prepared):
    report = recpo.calibrate(prepared, {"sine": SineReward(), "scaled": SineReward(scale=-40.0)}, resamples=20)
    pairs = {}
    for split in ("valid", "test"):
        rows = []
        data = Prepared.open(prepared)
        for shard in range(data.num_shards(split)):
            events = data.load(split, shard)
            kept = events.is_target
            rows.append(np.stack([events.user_index[kept], events.item_index[kept], events.feedback[kept]], 1))
        user, item, level = np.concatenate(rows).T
        grade = np.array(GRADES)[level]
        reward = np.sin(item.astype(np.float32) * 1.7 + user)
        pairs[split] = [column[~np.isnan(grade)] for column in (reward, grade, user)]
    slope, shift = np.polyfit(*pairs["valid"][:2], 1)
    reward, grade, user = pairs["test"]
    found = report.content["rewards"]["sine"]["test"]["all"]
    assert found["exposures"] == len(grade)
    assert found["users"] == len(set(user.tolist()))
    assert found["rmse"]["value"] == pytest.approx(np.sqrt(np.mean((slope * reward + shift - grade) ** 2)), abs=1e-6)
    assert found["rank_correlation"]["value"] == pytest.approx(spearmanr(slope * reward, grade).statistic, abs=1e-4)
    assert "dislike_auc" not in found
    scaled = report.content["rewards"]["scaled"]["test"]["all"]  # units do not matter, and neither does the sign
    assert scaled["rmse"]["value"] == pytest.approx(found["rmse"]["value"], abs=1e-6)


def test_greedy_lists_are_those_of_a_loop(prepared):
    reward = SineReward(known=50)
    batch = next(evaluation_batches(prepared, "test", 20, 16))
    lists = greedy_lists(reward, batch, 60, 7, batch.exclude).item_ids
    for row, user in enumerate(batch.user_ids.tolist()):
        past = set(batch.exclude[row].tolist())
        worth = {item: float(torch.sin(torch.tensor(item * 1.7) + user)) for item in range(1, 51) if item not in past}
        best = sorted(worth, key=lambda item: -worth[item])[:7]
        assert lists[row].tolist() == best + [0] * (7 - len(best))
    absent = lists[:, :2]  # were no candidates
    fewer = greedy_lists(reward, batch, 60, 5, torch.cat([batch.exclude, absent], 1)).item_ids
    assert fewer.tolist() == lists[:, 2:].tolist()


def test_lists_are_worth_what_the_truth_and_the_log_say(prepared, world, factors):
    report = recpo.calibrate(prepared, factors, truth=world, k=5, resamples=20)
    found = report.content["rewards"]["factors"]["lists"]
    data, users, items = Prepared.open(prepared), [], []
    expected = replace(recpo.Factors.open(factors), lower_bound=0.0)  # as the reward has none
    names = data.item_ids()
    for batch in evaluation_batches(prepared, "test", 200, 64):
        best = expected.recommend(batch.feedback.histories, 5, batch.exclude).item_ids
        external = data.table("users.parquet", ["user_id"]).column(0).to_numpy()[batch.user_ids.numpy()]
        for row, user in enumerate(external):
            items += names.to_external(best[row].numpy()).to_pylist()
            users += [user] * 5
    truth = TrueReward(world, prepared)._known
    rows = np.array(items, dtype=np.int64).reshape(-1, 5)
    begin = float(truth.truth.day_of(data.manifest["boundaries"]["test_start_ms"]))
    value = truth.truth.expected_reward(np.array(users, dtype=np.int64)[::5], rows, begin).mean()
    assert found["true_reward"]["value"] == pytest.approx(value, abs=1e-5)
    assert found["off_policy"]["low"] < found["off_policy"]["value"] < found["off_policy"]["high"]
    logged = report.content["logging_policy"]
    assert 0 < logged["true_reward"]["value"] < 1
    assert logged["off_policy"]["value"] == pytest.approx(mean_logged_reward(data), abs=1e-6)


def mean_logged_reward(data):
    rewards = []
    for shard in range(data.num_shards("test")):
        events = data.load("test", shard)
        label, kept = np.nan_to_num(events.label), events.is_target
        known = kept & (~np.isnan(events.label) | events.dislike)
        rewards.append((label - recpo.LoggedReward().dislike_cost * events.dislike)[known])
    return float(np.concatenate(rewards).mean())


def test_command_line_and_python_agree(prepared, world, factors, tmp_path, capsys):
    out = tmp_path / "report.json"
    ensemble = json.dumps([{"class_path": "FactorReward", "init_args": {"factors": str(factors), "lower_bound": 1.0}}])
    arguments = [f"--prepared={prepared}", f"--rewards={factors}", f"--rewards={ensemble}", f"--truth={world}"]
    assert main(["calibrate", *arguments, f"--out={out}", "--resamples=20"]) == 0
    said = capsys.readouterr().out
    assert "greedy lists of 10" in said
    assert "logging policy" in said
    again = recpo.calibrate(
        prepared, [factors, recpo.FactorReward(factors, lower_bound=1.0)], truth=world, resamples=20, out=tmp_path / "b"
    )
    assert json.loads(out.read_text()) == again.content == json.loads((tmp_path / "b").read_text())
    table = again.to_pandas()
    assert set(table.reward) == {"factors", "FactorReward"}
    assert {"all", "random", "lists"} == set(table.shown)


@pytest.mark.slow
def test_a_log_without_propensities_has_no_value_from_the_log_and_says_so(world, tmp_path):
    log = pq.read_table(world / "log").drop_columns(["propensity"])
    pq.write_table(log, tmp_path / "log.parquet")
    data = recpo.prepare(tmp_path / "log.parquet", tmp_path / "prepared")
    report = recpo.calibrate(data, SineReward(), resamples=5)
    assert report.content["rewards"]["SineReward"]["lists"].keys() == {"users", "coverage", "overlap"}
    assert "no propensities" in report.content["notes"][0]


def test_mistakes_are_named(prepared, factors, tmp_path):
    for rewards, code, field in (
        ([], "empty", "rewards"),
        ([factors, factors], "duplicate", str(factors)),
        ({"unknown": SineReward(known=0)}, "empty", "unknown"),
    ):
        with refused(code, field):
            recpo.calibrate(prepared, rewards)
    with refused("wrong_file", "run.json"):
        recpo.calibrate(prepared, [tmp_path])
    with refused("out_of_range", "k"):
        recpo.calibrate(prepared, factors, k=0)
