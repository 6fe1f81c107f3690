"""Item biases that change with time: against dense NumPy, and what they are worth where tastes of all people change."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm

import recpo
from recpo.base.feedback import GRADES
from recpo.log.shaping import BinaryColumn
from recpo.log.splits import TrainOnly
from recpo.rewards.graded import FactorOptions
from recpo.rewards.recent_biases import _SHRINKAGES, _shrinkage, with_recent_biases
from recpo.rewards.selection import fit_factors
from recpo.verbs.factorize import Factorize
from tests.refusals import refused

DAY = 86_400_000
FEW = {"ranks": (2,), "consumption": (0,), "sweeps": 5}


def log_of(changes: bool) -> pd.DataFrame:
    """Ten days of 200 users on 40 items; where biases change, half of the items go out of fashion, others into it."""
    draw = np.random.default_rng(0)
    user, day = np.repeat(np.arange(200), 30), draw.uniform(0, 10, 6000)
    item = draw.integers(0, 40, 6000)
    trend = np.where(item % 2, 1, -1) * (day - 5) / 12 if changes else np.linspace(-0.3, 0.3, 40)[item]
    like = draw.random(6000) < 0.5 + trend
    columns = {"user_id": user, "item_id": item, "timestamp": 1_700_000_000_000 + (day * DAY).astype(np.int64)}
    return pd.DataFrame({**columns, "like": like * 1})


@pytest.fixture(scope="module")
def changing(tmp_path_factory):
    out = tmp_path_factory.mktemp("changing") / "prepared"
    return recpo.prepare(log_of(True), out, columns=recpo.Columns(label="like"), label=BinaryColumn())


def test_biases_are_shrunk_means_of_what_is_left_of_weighted_events(data):
    model = fit_factors(data, FactorOptions(**FEW))
    end = data.manifest["boundaries"]["valid_start_ms"]
    names = ["user_index", "item_index", "timestamp", "feedback"]
    rows = pd.concat(pd.DataFrame(one) for one in data.train_columns(names))
    rows["grade"] = np.array(GRADES)[rows["feedback"]]
    rows = rows.dropna()
    user, item = (torch.tensor(rows[name].to_numpy()) for name in names[:2])
    users, factors = model.user_factors[user], model.item_factors[item - 1]
    left = rows["grade"] - (model.mean + users[:, -1] + (users[:, :-1] * factors).sum(1)).numpy()
    weight = 0.5 ** ((end - rows["timestamp"]) / (2 * DAY))
    sums = [np.bincount(item - 1, one, data.num_items) for one in (weight, weight**2, weight * left)]
    expected = sums[2] / (sums[0] + _shrinkage(*sums, model.noise))
    found = with_recent_biases(model, data, [1.0, 2.0])
    assert (list(found), found[None]) == ([None, 1.0, 2.0], model)
    torch.testing.assert_close(found[2.0].item_bias, torch.from_numpy(expected).float())


def test_the_shrinkage_has_the_largest_likelihood():
    draw, noise = np.random.default_rng(1), 0.2
    weight = draw.uniform(1, 30, 500)
    squared = weight / 2
    biases = draw.normal(0, 0.2, 500)  # their variance is a fifth of the noise
    mean = biases + draw.normal(size=500) * np.sqrt(noise * squared) / weight
    found = _shrinkage(weight, squared, mean * weight, noise)
    deviations = np.sqrt(noise / _SHRINKAGES[:, None] + noise * squared / weight**2)
    assert found == _SHRINKAGES[norm.logpdf(mean, 0, deviations).sum(1).argmax()]
    assert 3.5 < found < 7
    assert _shrinkage(weight, squared, (mean - biases) * weight, noise) > 100


def test_where_fashion_changes_the_last_events_count_most(changing, tmp_path):
    model = recpo.factorize(changing, tmp_path / "factors", **FEW)
    values = {one["half_life"]: one["AUC_mixed"] for one in model.facts["half_lives_tried"]}
    chosen = model.facts["half_life"]
    assert values[chosen] == max(values.values()) > values[None] + 0.1
    ids = changing.item_ids().to_external(np.arange(1, changing.num_items + 1)).to_numpy()
    rises = torch.from_numpy(ids % 2 == 1)
    assert model.item_bias[rises].min() > model.item_bias[~rises].max()
    verb = Factorize(changing, tmp_path / "again", sweeps=5).of(model)  # the same, without a choice
    assert verb.half_lives == (chosen,)
    again = verb.execute()
    assert again.facts["half_life"] == chosen
    assert torch.equal(again.item_bias, model.item_bias)
    static = recpo.factorize(changing, half_lives=(), **FEW)
    assert (static.facts["half_life"], Factorize(changing).of(static).half_lives) == (None, ())


def test_where_nothing_changes_all_events_count_alike(tmp_path):
    columns = recpo.Columns(label="like")
    data = recpo.prepare(log_of(False), tmp_path / "prepared", columns=columns, label=BinaryColumn())
    assert recpo.factorize(data, **FEW).facts["half_life"] is None


def test_all_events_are_fitted_by_the_options_that_were_chosen(changing, tmp_path):
    chosen = recpo.factorize(changing, **FEW)
    how = {"columns": recpo.Columns(label="like"), "label": BinaryColumn(), "split": TrainOnly()}
    whole = recpo.prepare(log_of(True), tmp_path / "prepared", **how)
    assert (whole.holds_out, whole.ends_at_once) == (False, False)
    model = Factorize(whole).of(chosen).execute()
    assert model.facts["half_life"] == chosen.facts["half_life"]
    assert recpo.factorize(whole, ranks=(2,), consumption=(0,)).facts["half_life"] is None
    with refused("empty"):
        recpo.factorize(whole, ranks=(2, 4))


@pytest.mark.parametrize("options", [{"method": "als", "ranks": (2,), "ridges": (1.0,)}, {"period": "valid"}])
def test_other_models_try_none(changing, options):
    found = recpo.factorize(changing, **options, sweeps=2)
    assert found.facts["half_lives_tried"] == [{"half_life": None}]


def test_where_no_user_compares_all_events_count_alike(tmp_path):
    log = log_of(True)
    day = log["timestamp"] // DAY
    late = log[day > day.max() - 2].drop_duplicates("user_id")  # one held-out event of each user
    columns = recpo.Columns(label="like")
    log = pd.concat([log[day <= day.max() - 2], late])
    data = recpo.prepare(log, tmp_path / "prepared", columns=columns, label=BinaryColumn())
    recpo.factorize(data, tmp_path / "factors", popularity=(0.0, 0.1), **FEW)
    facts = recpo.load(tmp_path / "factors").facts
    assert (facts["half_life"], facts["popularity"]) == (None, 0.0)
    assert not any("AUC_mixed" in one for one in facts["half_lives_tried"] + facts["popularity_tried"])


def test_half_lives_without_a_meaning_are_refused(changing):
    with refused("out_of_range", "half_lives"):
        recpo.factorize(changing, half_lives=(0.0,))
    with refused("conflicting_options", "half_lives"):
        recpo.factorize(changing, half_lives=(1.0,), period="valid")
