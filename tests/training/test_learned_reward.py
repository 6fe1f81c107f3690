"""A reward model from `recpo train` to a reward: trained, calibrated, recomputed by hand, compared with the truth."""

import json
import shutil

import numpy as np
import pytest
import torch

import recpo
from recpo.artifacts.outputs import write_json
from recpo.base.types import Slates
from recpo.batches.slates import evaluation_batches
from recpo.cli.main import main
from recpo.evaluation.true_rewards import TrueReward
from recpo.log.id_map import IdMap
from recpo.objectives.reward_model import TARGETS
from recpo.rewards.rewards import WeightedSum, validate_identity
from recpo.training.learned_reward import CALIBRATION, LearnedReward, load_reward_model
from recpo.worlds.truth import Truth
from tests.conftest import resealed
from tests.refusals import refused

pytestmark = pytest.mark.slow

HISTORY = 20
POLICY = {"dim": 16, "layers": 1, "heads": 1, "max_history": HISTORY, "dropout": 0.0}
COMMON = {
    "policy.class_path": "CatalogSoftmaxPolicy",
    **{f"policy.init_args.{name}": value for name, value in POLICY.items()},
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": "false",
    "trainer.logger": "false",
    "allocator": "false",
    "data.batch_size": 32,
    "data.layout.init_args.history_length": HISTORY,
    "optimizer": "torch.optim.AdamW",
    "optimizer.init_args.lr": 5e-3,
    "critic.shares_encoder": "false",
}
SEQUENCES = {"data.layout": "SequenceLayout"}
POINTWISE = {"objective": "PointwiseReward", "trainer.max_epochs": 5, **SEQUENCES}
PAIRWISE = {
    "objective": "PairwiseReward",
    "trainer.max_epochs": 1,
    "data.layout": "PreferenceListLayout",
    "data.layout.init_args.popularity": 0,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Such small products only wait for each other on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """200 users, 80 items: big enough to learn something within seconds."""
    from recpo.verbs.prepare import prepare
    from recpo.verbs.simulate import simulate

    out = tmp_path_factory.mktemp("reward_world")
    simulate(out / "simulated", users=200, items=80, events=12_000, days=10)
    prepare(str(out / "simulated" / "log"), out / "prepared")
    return out


def train(world, out, **options):
    chosen = {**SEQUENCES, **COMMON, **options}
    first = [f"--{name}={chosen.pop(name)}" for name in ("data.layout", "policy.class_path", "optimizer")]
    arguments = [f"--{name}={value}" for name, value in chosen.items()]
    assert main(["train", f"--data.prepared={world / 'prepared'}", f"--out={out}", *first, *arguments]) == 0
    return out


@pytest.fixture(scope="module")
def policy_run(world):
    return train(world, world / "policy", objective="Likelihood", **{"trainer.max_epochs": 6})


@pytest.fixture(scope="module")
def pointwise_run(world, policy_run):
    out = train(world, world / "pointwise", init_from=policy_run, **POINTWISE)
    assert main(["calibrate", f"--rewards={out}", f"--prepared={world / 'prepared'}", "--resamples=50"]) == 0
    return out


@pytest.fixture(scope="module")
def pairwise_run(world, policy_run):
    return train(world, world / "pairwise", init_from=policy_run, **PAIRWISE)


@pytest.fixture(scope="module")
def batch(world):
    return next(evaluation_batches(world / "prepared", "valid", HISTORY, 1000)).feedback


def candidates_of(batch, items):
    visible = batch.histories.lengths[:, None].expand_as(items)
    return Slates(items, visible, torch.ones_like(items, dtype=torch.bool))


def every_item(world, batch):
    num_items = json.loads((world / "prepared" / "manifest.json").read_text())["num_items"]
    return candidates_of(batch, torch.arange(1, num_items + 1).expand(len(batch.context_ids), -1).contiguous())


def mean_correlation(first, second):
    """The mean over contexts of the correlation over their candidates."""
    first, second = ((x - x.mean(1, keepdim=True)).double() for x in (first, second))
    return float(((first * second).sum(1) / (first.norm(dim=1) * second.norm(dim=1)).clamp(min=1e-12)).mean())


def test_it_ranks_and_means_what_it_says_on_later_days(pointwise_run):
    report = json.loads((pointwise_run / CALIBRATION).read_text())["targets"]
    graded, disliked = (report[name]["test"]["all"] for name in ("grade", "dislike"))
    assert graded["rank_correlation"]["low"] > 0.35
    assert graded["rank_correlation_per_user"]["value"] > 0.35
    assert graded["rmse"]["value"] < 0.27  # 0.29 is that of the mean
    assert disliked["auc"]["value"] > 0.65
    assert disliked["calibration_error"]["value"] < 0.03
    assert set(disliked) >= {"base_rate", "log_loss", "log_loss_uncalibrated", "exposures", "happened", "users"}
    assert report["grade"]["test"]["random"]["exposures"] < graded["exposures"] / 5


def test_it_knows_the_truth_about_items_that_the_log_never_showed(world, pointwise_run, pairwise_run, batch):
    candidates = every_item(world, batch)
    truth = TrueReward(world / "simulated", world / "prepared")(batch, candidates)
    for run in (pointwise_run, pairwise_run):
        learned = LearnedReward(run)(batch, candidates)
        assert mean_correlation(learned, truth) > 0.4
        best = learned.topk(5, 1).indices
        assert truth.gather(1, best).mean() > truth.mean() + 0.2


def test_the_reward_is_recomputed_by_hand(pointwise_run, batch):
    items = torch.randint(1, 80, (len(batch.context_ids), 3))
    candidates = candidates_of(batch, items)
    reward = LearnedReward(pointwise_run, grade_weight=0.7, dislike_cost=1.5)(batch, candidates)
    saved = torch.load(pointwise_run / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    head = {n.removeprefix("critic.score."): v for n, v in saved.items() if n.startswith("critic.score.")}
    vectors = saved["policy.item_table.weight"][items]
    vectors = vectors / vectors.norm(dim=-1, keepdim=True)
    known = vectors @ head["adapt.weight"].T + head["adapt.bias"] + head["item_table.weight"][items]
    states = load_reward_model(pointwise_run).policy.encode(batch.histories)
    state = states[torch.arange(len(items)), batch.histories.lengths]

    def layers(name, x):
        x = torch.nn.functional.gelu(x @ head[f"{name}.0.weight"].T + head[f"{name}.0.bias"])
        return x @ head[f"{name}.2.weight"].T + head[f"{name}.2.bias"]

    of_state = layers("of_state", state).view(len(items), 1, 2, -1)
    scores = (of_state * known.unsqueeze(2)).sum(-1) + layers("of_item", known) + head["bias"][items]
    fitted = json.loads((pointwise_run / CALIBRATION).read_text())["targets"]
    expected = torch.zeros(items.shape)
    for k, (name, weight) in enumerate(zip(TARGETS, (0.7, -1.5), strict=True)):
        platt = fitted[name]["calibration"]
        expected += weight * torch.sigmoid(platt["scale"] * scores[..., k] + platt["shift"])
    torch.testing.assert_close(reward, expected, rtol=1e-4, atol=1e-5)


def test_ids_without_an_item_have_no_reward_and_change_nothing(pointwise_run, batch, monkeypatch):
    items = torch.randint(1, 80, (len(batch.context_ids), 4))
    reward = LearnedReward(pointwise_run)
    whole = reward(batch, candidates_of(batch, items))
    assert not whole.isnan().any()
    assert not whole.requires_grad
    assert torch.equal(whole, LearnedReward(pointwise_run)(batch, candidates_of(batch, items)))
    holed = candidates_of(batch, items.clone())
    holed.item_ids[:, 1] = 0
    holed.mask[:, 2] = False
    partly = reward(batch, holed)
    assert partly[:, 1:3].isnan().all()
    torch.testing.assert_close(partly[:, [0, 3]], whole[:, [0, 3]])
    monkeypatch.setattr("recpo.training.networks._POSITIONS_AT_ONCE", 7)
    torch.testing.assert_close(reward(batch, candidates_of(batch, items)), whole)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(reward(batch, candidates_of(batch, items)), whole)
    empty = candidates_of(batch, torch.zeros_like(items))
    assert reward(batch, empty).isnan().all()


def test_an_uncalibrated_or_a_changed_run_is_refused(pointwise_run, batch, tmp_path):
    candidates = candidates_of(batch, torch.ones(len(batch.context_ids), 1, dtype=torch.long))
    copy = tmp_path / "copy"
    shutil.copytree(pointwise_run, copy)
    shutil.copy(copy / "checkpoints" / "last.ckpt", copy / "checkpoints" / "best.ckpt")
    for refuses in (LearnedReward, load_reward_model):
        with refused("damaged", "checkpoints/best.ckpt"):
            refuses(copy)
    shutil.copy(pointwise_run / "checkpoints" / "best.ckpt", copy / "checkpoints" / "best.ckpt")
    content = json.loads((copy / CALIBRATION).read_text())
    write_json(copy / CALIBRATION, resealed({**content, "weights": {"checkpoints/best.ckpt": "0" * 64}}))
    with refused("mismatch", "calibration.json"):
        LearnedReward(copy)
    (copy / CALIBRATION).unlink()
    with refused("missing_file", "calibration.json"):
        LearnedReward(copy)
    raw = LearnedReward(copy, calibrated=False, dislike_cost=0.0)(batch, candidates)
    model = load_reward_model(copy)
    torch.testing.assert_close(raw, model(batch.histories, candidates)[..., 0].sigmoid())


def test_wrong_runs_are_refused(world, policy_run, pointwise_run, tmp_path, capsys, monkeypatch):
    with refused("wrong_file", "run.json"):
        LearnedReward(tmp_path)
    with refused("wrong_class", "run"):
        LearnedReward(policy_run)
    stale = tmp_path / "stale"
    shutil.copytree(pointwise_run, stale)
    fitted = json.loads((stale / CALIBRATION).read_text())
    fitted["targets"]["long_watch"] = fitted["targets"].pop("grade")
    write_json(stale / CALIBRATION, resealed(fitted))
    with refused("old_format", "calibration.json"):
        LearnedReward(stale)
    other = tmp_path / "other"
    shutil.copytree(pointwise_run, other)
    finished = json.loads((other / "run.json").read_text())
    write_json(other / "run.json", resealed({**finished, "catalog_checksum": "another"}))
    monkeypatch.setattr(IdMap, "equals", lambda *_: False)
    assert main(["calibrate", f"--rewards={other}", f"--prepared={world / 'prepared'}"]) == 1
    assert "other items" in capsys.readouterr().err
    with refused("mismatch", "reward"):
        both = WeightedSum([LearnedReward(pointwise_run), LearnedReward(other)], [1.0, 1.0])
        validate_identity(both, "reward", recpo.load(world / "prepared"))
    arguments = {**COMMON, "objective": "Reinforce", "advantage": "GroupNormalizedAdvantage", "reward": "LearnedReward"}
    first = [f"--{name}={arguments.pop(name)}" for name in ("policy.class_path", "optimizer", "reward")]
    rest = [f"--{name}={value}" for name, value in arguments.items() if not name.startswith("data.layout")]
    places = [f"--data.prepared={world / 'prepared'}", f"--out={tmp_path / 'run'}", f"--reward.init_args.run={other}"]
    assert main(["train", *first, *places, *rest]) == 1
    assert "other items" in capsys.readouterr().err


def test_a_longer_history_is_read_from_its_end(pointwise_run, batch, world):
    long = next(evaluation_batches(world / "prepared", "valid", 3 * HISTORY, 1000)).feedback
    assert long.histories.item_ids.shape[1] > HISTORY
    items = torch.randint(1, 80, (len(batch.context_ids), 3))
    reward = LearnedReward(pointwise_run)
    torch.testing.assert_close(reward(long, candidates_of(long, items)), reward(batch, candidates_of(batch, items)))
    middle = candidates_of(long, items)._replace(visible=torch.ones_like(items))
    with refused("unsupported", "history_length"):
        reward(long, middle)


def test_the_true_reward_is_that_of_the_simulation(world, batch):
    reward = TrueReward(world / "simulated", world / "prepared")
    items = torch.tensor([[3, 0, 7]]).expand(len(batch.context_ids), -1).contiguous()
    got = reward(batch, candidates_of(batch, items))
    assert got[:, 1].isnan().all()
    truth = Truth.load(world / "simulated")
    item_ids = IdMap.load(world / "prepared" / "items.parquet").to_external(np.array([3, 7])).cast("int64").to_numpy()
    users = reward._known.user_ids[batch.user_ids.numpy()]
    shown = np.broadcast_to(item_ids, (len(users), 2))
    expected = truth.expected_reward(users, shown, reward._known.day)
    torch.testing.assert_close(got[:, [0, 2]].double(), torch.from_numpy(expected), rtol=1e-6, atol=1e-6)
    with refused("missing_value", "user_ids"):
        reward(batch._replace(user_ids=None), candidates_of(batch, items))
