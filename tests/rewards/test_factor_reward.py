"""The factor model as a reward, its lower bound, and ensembles."""

import itertools
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

import recpo
from recpo.base.contracts import RewardFunction, RewardScope
from recpo.base.types import Histories, Slates
from recpo.batches.slates import HeldOutBatches, Rank
from recpo.log.prepared import Prepared
from recpo.rewards.factors import Factors, posterior_variance
from recpo.rewards.graded import FactorOptions
from recpo.rewards.rewards import EnsembleReward, FactorReward, ValidityReward, WeightedSum, validate_identity
from recpo.rewards.selection import fit_factors
from recpo.training.options import RolloutOptions
from tests.refusals import refused


@pytest.fixture(scope="module")
def place(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp("factors") / "factors"
    fit_factors(Prepared.open(prepared), FactorOptions(method="als", ranks=(3,), ridges=(2.0,), sweeps=3)).save(out)
    return out


@pytest.fixture(scope="module")
def model(place):
    return Factors.open(place)


@pytest.fixture(scope="module")
def batch(prepared):
    return next(iter(HeldOutBatches(Prepared.open(prepared), "test", 20, 16, Rank()))).feedback


def candidates_of(items):
    return Slates(items, torch.zeros_like(items), items > 0)


@pytest.fixture(scope="module")
def some(batch):
    items = torch.randint(0, 61, (len(batch.user_ids), 3), generator=torch.Generator().manual_seed(0))
    items[0] = torch.tensor([0, 5, 60])
    return candidates_of(items)


@pytest.fixture(scope="module")
def catalog(batch):
    return candidates_of(torch.arange(1, 61).repeat(len(batch.user_ids), 1))


@pytest.mark.parametrize("users", ["trained", "folded"])
@pytest.mark.parametrize("lower_bound", [0.0, 1.5])
def test_the_reward_is_the_formula_candidate_by_candidate(place, model, batch, some, catalog, users, lower_bound):
    reward = FactorReward(place, users, lower_bound)
    folded, covariance = model.fold_in_with_covariance(batch.histories)
    weights = (folded if users == "folded" else model.user_factors[batch.user_ids]).double().numpy()
    for candidates in (some, catalog):
        got = reward(batch, candidates)
        assert got.dtype == torch.float32
        for row, column in np.ndindex(*got.shape):
            item = int(candidates.item_ids[row, column]) - 1
            if item < 0:
                assert got[row, column].isnan()
                continue
            of_item = np.r_[model.item_factors[item].double().numpy(), 1.0]
            of_user = np.r_[weights[row, :-1], 1.0]
            expected = model.mean + weights[row] @ of_item + float(model.item_bias[item])
            known = of_user @ model.item_covariance[item].double().numpy() @ of_user
            known += of_item @ covariance[row].double().numpy() @ of_item
            expected -= lower_bound * np.sqrt(model.noise * known)
            assert float(got[row, column]) == pytest.approx(expected, abs=2e-5)


def test_masked_candidates_are_unknown_and_rewards_have_no_gradient(place, batch, some):
    masked = some._replace(mask=torch.zeros_like(some.mask))
    assert FactorReward(place)(batch, masked).isnan().all()
    assert not FactorReward(place, "folded", 1.0)(batch, some).requires_grad


def test_a_bound_is_tighter_for_whom_more_is_known(place, model):
    items, levels = torch.arange(1, 25)[None], torch.full((1, 24), 4)
    widths = []
    for length in (0, 1, 6, 24):
        users, covariance = model.fold_in_with_covariance(Histories(items, torch.tensor([length]), levels))
        # the user's own factors held still: the bound is to shrink with events, not with the taste
        variance = posterior_variance(model, torch.zeros_like(users), covariance, torch.arange(1, 61)[None])
        widths.append(variance[0])
    for before, after in itertools.pairwise(widths):
        assert (after < before).all()


def test_a_bound_is_tighter_for_items_of_which_more_is_known(model):
    covariance = model.item_covariance.clone()
    covariance[7] *= 0.25
    surer = Factors(**{**vars(model), "item_covariance": covariance})
    user, none = torch.zeros(1, 4), torch.zeros(1, 4, 4)
    ratio = posterior_variance(surer, user, none, torch.tensor([[8]])) / posterior_variance(
        model, user, none, torch.tensor([[8]])
    )
    assert float(ratio) == pytest.approx(0.25)


def test_faults_are_reported_immediately(place, model, batch, some, tmp_path):
    with refused("out_of_range", "FactorReward.lower_bound"):
        FactorReward(place, lower_bound=-1)
    with refused("unknown_name", "FactorReward.users"):
        FactorReward(place, users="fitted")
    with refused("wrong_file", "manifest.json"):
        FactorReward(tmp_path)
    replace(model, user_factors=None, item_covariance=None, lower_bound=0.0).save(tmp_path / "plain")
    with refused("unsupported", "FactorReward.users"):
        FactorReward(tmp_path / "plain")
    with refused("unsupported", "FactorReward.lower_bound"):
        FactorReward(tmp_path / "plain", "folded", 1.0)
    with refused("unsupported", "uncertainty"):
        posterior_variance(Factors.open(tmp_path / "plain"), torch.zeros(1, 4), torch.zeros(1, 4, 4), some.item_ids)
    with refused("missing_value", "user_ids"):
        FactorReward(place)(batch._replace(user_ids=None), some)
    with refused("mismatch", "FactorReward.users"):
        FactorReward(place)(batch._replace(user_ids=batch.user_ids + 10_000), some)
    assert FactorReward(place).scopes[0].catalog_checksum == model.catalog_checksum


def test_trained_users_are_only_those_of_the_data(place, model, prepared, tmp_path):
    data = Prepared.open(prepared)
    strange = replace(model, users_checksum="others")
    strange.save(tmp_path / "strange")
    own, other = FactorReward(place), FactorReward(tmp_path / "strange")
    folded = FactorReward(tmp_path / "strange", users="folded")
    for reward in (own, folded, EnsembleReward([own, folded]), WeightedSum([own, folded], [1.0, 1.0])):
        validate_identity(reward, "reward", data)
    assert [one.users_checksum for one in own.scopes + folded.scopes] == [data.users_checksum, None]
    for reward in (other, EnsembleReward([other, folded]), WeightedSum([other, folded], [1.0, 1.0])):
        with refused("mismatch", "monitor_reward") as caught:
            validate_identity(reward, "monitor_reward", data)
        assert "users.parquet" in str(caught.value)
    with refused("mismatch", "reward"):
        validate_identity(EnsembleReward([own, other]), "reward", data)
    replace(model, users_checksum=None).save(tmp_path / "unknown")
    validate_identity(FactorReward(tmp_path / "unknown"), "reward", data)


@pytest.mark.slow
def test_runs_calibration_and_tilting_refuse_rewards_of_other_users(model, prepared, tmp_path):
    replace(model, users_checksum="others").save(tmp_path / "strange")
    reward = FactorReward(tmp_path / "strange")
    with refused("mismatch", "FactorReward") as caught:
        recpo.calibrate(prepared, [reward])
    assert "users.parquet" in str(caught.value)
    options = {"policy": partial(recpo.CatalogSoftmaxPolicy, dim=8, heads=1, layers=1, max_history=10)}
    options |= {"data.layout": recpo.ImpressionLayout(history_length=10, slate_length=6), "objective": recpo.MPO()}
    options |= {"rollout": RolloutOptions(candidates="catalog", batches=1, epochs=1), "old_policy": "snapshot"}
    for name, given in (
        ("reward", {"reward": reward}),
        ("validation_reward", {"reward": ValidityReward(), "validation_reward": reward}),
        (
            "rollout.monitor_reward",
            {"reward": ValidityReward(), "rollout": replace(options["rollout"], monitor_reward=reward)},
        ),
    ):
        with refused("mismatch", name):
            recpo.train(prepared, out=tmp_path / "run", **options | given)
    assert not (tmp_path / "run").exists()


def test_the_last_user_is_known_and_the_next_one_is_not(place, model, batch, some):
    users = len(model.user_factors)
    last = torch.full_like(batch.user_ids, users - 1)
    assert FactorReward(place)(batch._replace(user_ids=last), some)[0, 1].isfinite()
    with refused("mismatch", "FactorReward.users"):
        FactorReward(place)(batch._replace(user_ids=last + 1), some)
    nobody = batch._replace(user_ids=batch.user_ids[:0])
    assert FactorReward(place)(nobody, candidates_of(some.item_ids[:0])).shape == (0, 3)


def test_defaults_of_a_factor_reward(place, batch, some):
    assert FactorReward(place) == FactorReward(place, users="trained", lower_bound=0.0)
    reward = FactorReward(place)
    assert reward.model() is reward.model("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        cast = FactorReward(place, "folded", 1.0)(batch, some)
    torch.testing.assert_close(cast, FactorReward(place, "folded", 1.0)(batch, some), equal_nan=True)


@dataclass(frozen=True)
class Given(RewardFunction):
    """The same rewards whatever is asked."""

    values: tuple[tuple[float, ...], ...]
    checksum: str | None = None

    @property
    def scopes(self):
        return (RewardScope(self.checksum),)

    def __call__(self, batch, candidates):
        return torch.tensor(self.values)


def test_an_ensemble_is_its_mean_less_its_disagreement(batch):
    nan = float("nan")
    members = [Given(((0.2, 1.0, nan),)), Given(((0.6, 1.0, 0.5),)), Given(((0.1, 1.0, 0.5),))]
    got = EnsembleReward(members, lower_bound=2.0)(batch, None)
    assert got[0, :2].tolist() == pytest.approx([0.3 - 2 * np.std([0.2, 0.6, 0.1]), 1.0])
    assert got[0, 2].isnan()
    assert EnsembleReward(members)(batch, None)[0, 0].item() == pytest.approx(0.3)


@dataclass(frozen=True)
class Precise(Given):
    """Rewards in double precision, which need dislikes."""

    @property
    def requires(self):
        return frozenset({"dislikes"})

    def __call__(self, batch, candidates):
        return torch.tensor(self.values, dtype=torch.float64)


def test_what_an_ensemble_has_of_its_members(batch):
    ensemble = EnsembleReward([Precise(((1.0,),)), Given(((0.0,),))])
    assert ensemble == EnsembleReward(ensemble.members, 0.0)
    assert ensemble.requires == {"dislikes"} | Given(((0.0,),)).requires
    assert EnsembleReward([Precise(((1.0,),))] * 2)(batch, None).dtype == torch.float32
    assert EnsembleReward(ensemble.members, 1.0)(batch, None).tolist() == [[0.0]]


def test_ensembles_that_make_no_sense_are_refused(data):
    one = Given(((0.0,),), "a")
    with refused("out_of_range", "EnsembleReward.members"):
        EnsembleReward([one])
    with refused("out_of_range", "EnsembleReward.lower_bound"):
        EnsembleReward([one, one], float("nan"))
    with refused("mismatch", "reward"):
        validate_identity(EnsembleReward([Given(((0.0,),)), one]), "reward", data)
