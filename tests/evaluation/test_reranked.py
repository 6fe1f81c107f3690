"""Re-ranked contenders: the lists of a run, a bundle or factors, with slates that are chosen as a whole."""

from functools import partial

import numpy as np
import pytest
import torch
import yaml

import recpo
from recpo.base.types import EvaluationBatch, FeedbackBatch, Histories, Recommendations
from recpo.cli.main import main
from recpo.evaluation.beyond_accuracy import ItemFeatures
from recpo.evaluation.contenders import Contender, reranked_contender
from recpo.evaluation.measures import Recommender
from recpo.lists.reranking import AttributeCap, Calibration, ItemAttributes, MaximalMarginalRelevance, Tags
from recpo.log.prepared import Prepared
from recpo.serving.bundle import bundle_item_vectors
from recpo.verbs.contenders import policy_item_vectors
from tests.refusals import refused

TINY = {"data.batch_size": 16, "trainer.accelerator": "cpu", "trainer.max_epochs": 1, "trainer.limit_train_batches": 2}


@pytest.fixture(scope="module")
def run(prepared, tmp_path_factory):
    policy = partial(recpo.CatalogSoftmaxPolicy, dim=8, heads=1, layers=1, max_history=50)
    return recpo.train(Prepared.open(prepared), policy=policy, out=tmp_path_factory.mktemp("run") / "run", **TINY)


@pytest.fixture(scope="module")
def attributes(world):
    return world / "truth" / "items.parquet"


def counting_down(histories, k, exclude):
    """Items 1..9, best first, whoever asks; 0 behind the last one."""
    items = torch.arange(1, k + 1).clamp_max(9) * (torch.arange(k) < 9)
    scores = torch.where(items > 0, -torch.arange(k).float(), -torch.inf)
    return Recommendations(items.repeat(2, 1), scores.repeat(2, 1))


def two_users():
    """Users without a history."""
    none = torch.zeros(2, 4, dtype=torch.long)
    return EvaluationBatch(FeedbackBatch(Histories(none, none[:, 0]), None, torch.arange(2)), none, none)


def test_the_first_k_are_chosen_from_the_shortlist_and_the_rest_follows_by_relevance():
    pairs = np.arange(1, 10), np.array([0, 0, 0, 1, 1, 2, 3, 4, 5])
    known = ItemAttributes({"author": Tags.from_pairs(*pairs, 9)})
    base = Contender("run", "run", lambda: Recommender(counting_down, name="run", scores_are_logp=True))
    contender = reranked_contender(base, AttributeCap("author", 1), known, lambda loaded: None, k=3, shortlist=7)
    assert (contender.name, contender.kind) == ("run + author at most 1", "reranked")
    recommender = contender.load()
    lists = recommender.lists(two_users(), 9, torch.zeros(2, 1, dtype=torch.long))
    assert lists.item_ids.tolist() == [[1, 4, 6, 2, 3, 5, 7, 8, 9]] * 2
    assert lists.scores.tolist() == [[-float(i) for i in range(9)]] * 2
    assert recommender.lists(two_users(), 2, None).item_ids.tolist() == [[1, 4]] * 2
    assert recommender.lists(two_users(), 11, None).item_ids.tolist() == [[1, 4, 6, 2, 3, 5, 7, 8, 9, 0, 0]] * 2


def test_calibration_reads_the_whole_past():
    known = ItemAttributes({"topic": Tags.from_pairs(np.arange(1, 10), np.arange(1, 10) % 3, 9)})
    base = Contender("run", "run", lambda: Recommender(counting_down, name="run"))
    reranker = Calibration("topic", 0.01)
    contender = reranked_contender(base, reranker, known, lambda loaded: None, k=3, shortlist=9)
    past = torch.tensor([[2, 5, 0], [3, 6, 9]])
    lists = contender.load().lists(two_users()._replace(past=past, exclude=past), 3).item_ids
    assert (lists % 3).tolist() == [[2, 2, 2], [0, 0, 0]]


@pytest.mark.slow
def test_a_run_and_its_bundle_have_the_same_item_vectors(run, tmp_path):
    bundle = recpo.export(run, out=tmp_path / "bundle", k=5)
    vectors = bundle_item_vectors(bundle.root)
    assert vectors.shape == (bundle.manifest.num_items + 1, 8)
    assert np.array_equal(vectors, policy_item_vectors(run.policy("best")))


def test_evaluation_of_a_run_and_its_reranked_lists(run, prepared, attributes):
    options = recpo.RerankOptions(shortlist=30, attributes=attributes)
    methods = [MaximalMarginalRelevance(1.0), MaximalMarginalRelevance(0.3), AttributeCap("topic", 1)]
    features = ItemFeatures(attributes, tags="topic", vectors="latent")
    found = recpo.evaluate(
        prepared,
        [run],
        ks=[5, 10],
        baselines=False,
        rerank=methods,
        rerank_options=options,
        item_features=features,
        off_policy=None,
    )
    contenders = {one["name"]: one["metrics"] for one in found.document["contenders"]}
    assert list(contenders) == ["run", "run + mmr 1", "run + mmr 0.3", "run + topic at most 1"]
    assert {one["kind"] for one in found.document["contenders"]} == {"run", "reranked"}
    same = {name for name in contenders["run"] if not name.startswith("AUC")}
    assert all(contenders["run"][name] == contenders["run + mmr 1"][name] for name in same)
    # at most one item of a topic: as many topics as places
    assert contenders["run + topic at most 1"]["tag_diversity@5"]["mean"] == pytest.approx(1)
    assert contenders["run + topic at most 1"]["tag_entropy@5"]["mean"] == pytest.approx(np.log(5), rel=1e-6)
    assert contenders["run"]["tag_entropy@5"]["mean"] < np.log(5)


@pytest.mark.slow
def test_the_command_line_takes_methods_and_its_resolved_options_repeat_them(
    run, prepared, attributes, tmp_path, capsys
):
    options = {"prepared": prepared, "contenders": run.root, "out": tmp_path / "one", "baselines": "false", "ks": "[5]"}
    options |= {"off_policy": "null", "rerank_options.attributes": attributes, "segments": "false"}
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    flags += ["--rerank", "{class_path: AttributeCap, init_args: {attribute: topic}}"]
    flags += ["{class_path: Determinantal, init_args: {relevance_weight: 0.5}}"]
    assert main(["evaluate", *flags]) == 0
    assert "topic" in capsys.readouterr().out
    resolved = yaml.safe_load((tmp_path / "one" / "resolved.yaml").read_text())
    assert [one["class_path"].split(".")[-1] for one in resolved["rerank"]] == ["AttributeCap", "Determinantal"]
    assert resolved["contenders"] == str(run.root)
    assert main(["evaluate", "--config", str(tmp_path / "one" / "resolved.yaml"), "--out", str(tmp_path / "two")]) == 0
    one, two = (recpo.Evaluation.open(tmp_path / name).document for name in ("one", "two"))
    assert one == two


def test_what_cannot_be_reranked_is_refused_before_anything_is_loaded(run, prepared, attributes):
    evaluate = partial(recpo.evaluate, prepared, ks=[5], off_policy=None)
    with refused("unused_option", "rerank"):
        evaluate(["popularity"], rerank=[MaximalMarginalRelevance()])
    with refused("unknown_name", "topic"):
        evaluate([run], rerank=[Calibration("topic")])
    with refused("missing_column", "author"):
        evaluate([run], rerank=[AttributeCap("author")], rerank_options=recpo.RerankOptions(attributes=attributes))
    with refused("out_of_range", "rerank_options.shortlist"):
        evaluate([run], rerank=[MaximalMarginalRelevance()], rerank_options=recpo.RerankOptions(shortlist=3))
    with refused("duplicate", "run + mmr 0.7"):
        evaluate([run], rerank=[MaximalMarginalRelevance()] * 2)
