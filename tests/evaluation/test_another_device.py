"""What follows training on a device that is not the CPU: the same numbers as on the CPU, and nothing mixes devices.

The cases run on ``tests.computing_device``, in a process of their own.
"""

import copy
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.optim import Adam

from recpo.artifacts.semantic_codes import Codes
from recpo.batches.slates import evaluation_batches
from recpo.evaluation.contenders import BaselineOptions, Contender, baseline
from recpo.evaluation.held_out_pass import HeldOutPass, RankingOptions
from recpo.evaluation.measures import Recommender
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.semantic_id import SemanticIdPolicy
from recpo.rewards.rewards import HitReward
from recpo.serving.bundle import Bundle
from recpo.serving.export import BundleOptions, PolicyFacts, export_bundle
from recpo.serving.histories import EncodedHistories, HistoryReader, Request
from recpo.serving.saved_policy import PolicyRuntime
from recpo.training.options import LearningOptions
from recpo.training.validation import ValidationMetrics
from tests.computing_device import DEVICE, Device, moved, register
from tests.forks import forked
from tests.training.fake_device import place_of

pytestmark = pytest.mark.slow

HISTORY = 20
FAMILIES = ["catalog", "semantic"]
CASES = ["evaluate", "validate", "serve", "sample", "export", "resume"]
#: Transfers to the CPU in the pass over one batch of held-out users, its estimate from the log included. They do not
#: depend on the number of users.
MOST_TRANSFERS = 80


@pytest.fixture(scope="module")
def results(prepared, world, tmp_path_factory):
    """Case to error; None = it ran, with the numbers of the CPU."""
    root = tmp_path_factory.mktemp("after_training")
    (root / "codes").mkdir()
    items = np.arange(Prepared.open(prepared).num_items)
    table = np.stack([items // 8, items % 8], 1)
    Codes(table, (len(items) // 8 + 1, 8), "any").save(root / "codes", pa.array(items), {})
    return forked(cases_on_a_device, prepared, root / "codes", world / "truth", root)


def test_evaluation_and_serving_on_a_device_give_the_numbers_of_the_cpu(results):
    tried = {f"{family} {case}" for family in FAMILIES for case in CASES} | {"baselines", "mixing"}
    assert {*results} == tried
    assert "mixes devices" in results.pop("mixing")
    assert {case: error for case, error in results.items() if error is not None} == {}


def evaluated(data, truth, policy, device):
    """Metrics of every user, counts, totals and off-policy values of one pass."""
    held_out = HeldOutPass.of(data, RankingOptions(truth=truth, ks=[5, 10]), torch.device(device))
    how = {"name": "policy", "scores_are_logp": True, "max_history": HISTORY, "policy": policy}
    asked = Recommender(policy.recommend, policy.log_prob, **how)
    found = held_out.evaluate(Contender("policy", "policy", lambda: asked))
    result = found.result
    return {
        **result.per_user, **result.totals, **result.counts, "users": result.user_ids,
        **{f"{name} {key}": values for name, one in result.item_segments.items() for key, values in one.items()},
        **{f"{name} {key}": inside for name, one in result.user_segments.items() for key, inside in one.items()},
        "off_policy": [value.value for value in found.value.estimates],
    }  # fmt: skip


def of_baselines(data, truth, device):
    """The metrics of contenders that lie on the CPU, for users on the device."""
    held_out = HeldOutPass.of(data, RankingOptions(truth=truth), torch.device(device))
    names = ("popularity", "recency", "sequential_rules", "factorization", "ease")
    loaded = [held_out.evaluate(baseline(name, data, BaselineOptions())) for name in names]
    return {name: one.result.per_user for name, one in zip(names, loaded, strict=True)}


def validated(data, policy, device):
    """The metrics of the validation period."""
    options = LearningOptions(validation_k=5, validation_reward=HitReward(), monitor="AUC_mixed")
    metrics = ValidationMetrics(options, data.num_items, torch.from_numpy(data.item_counts()))
    for batch in batches_of(data, device):
        metrics.update(policy, batch)
    return metrics.compute(lambda value: value)


def batches_of(data, device):
    """Held-out users on the device."""
    batches = evaluation_batches(data.root, "valid", HISTORY, 32)
    return [torch.utils._pytree.tree_map_only(torch.Tensor, lambda part: part.to(device), one) for one in batches]


def served(data, policy, k=7):
    """Lists and scores of encoded histories, which are arrays on the CPU."""
    generator = np.random.default_rng(0)
    ids = generator.integers(1, data.num_items + 1, (9, HISTORY)) * (np.arange(HISTORY) < np.arange(9)[:, None])
    inputs = EncodedHistories(ids, np.minimum(ids, 2), generator.integers(0, data.num_items + 1, (9, 3)))
    runtime = PolicyRuntime(policy)
    return [*runtime.recommend(inputs, k), runtime.score(inputs, ids[:, ::-1].copy())]


def sampled(data, policy, device):
    """Draws with the same random numbers."""
    torch.manual_seed(1)
    return [policy.sample(batch.feedback.histories, 4) for batch in batches_of(data, device)]


def exported(data, policy, device, out):
    """The first list of a bundle, whose policy stays where it is; on the CPU, of the policy itself."""
    items = IdMap(pa.array([f"i{item}" for item in range(1, data.num_items + 1)]))
    events = [{"item_id": f"i{item}", "timestamp": item} for item in (3, 5)]
    if device == "cpu":
        asked = HistoryReader(items, data.feedback, HISTORY, reads_timestamps=False).read_request(Request(events))
        ids, scores = PolicyRuntime(policy).recommend(asked, 5)
        return list(zip(ids[0].tolist(), scores[0].tolist(), strict=True))
    before = [weight.device.type for weight in policy.parameters()]
    export_bundle(policy, items, PolicyFacts(data.feedback), out, BundleOptions(k=5))
    assert [weight.device.type for weight in policy.parameters()] == before
    return [(int(item[1:]), score) for item, score in Bundle.open(out).recommend_one(events, k=5)]


def resumed(policy):
    """The policy after one step from weights and a state of the optimizer that were saved on the CPU."""
    kept = {name: value.cpu().clone() for name, value in policy.state_dict().items()}
    policy.load_state_dict({name: value * 0.5 if value.is_floating_point() else value for name, value in kept.items()})
    optimizer = Adam(policy.parameters(), lr=0.1)
    weights = [*policy.parameters()]
    moments = {"step": torch.tensor(3.0)}
    state = {
        index: moments | {name: torch.full(weight.shape, 0.2) for name in ("exp_avg", "exp_avg_sq")}
        for index, weight in enumerate(weights)
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    return [weight.detach() for weight in weights]


def on_cpu(found):
    """Tensors on the CPU."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda part: part.detach().cpu(), found)


def compared(case, of_cpu, of_device, most=None):
    """None if both find the same, or the error."""
    try:
        expected = on_cpu(of_cpu())
        with nullcontext() if case.endswith("export") else Device():  # tracing makes no tensors on the device
            found, transfers = of_device(), Device.transfers
            found = on_cpu(found)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
        if most is not None:
            assert transfers <= most, f"{transfers} transfers"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]} at {place_of(error)}"
    return None


def cases_on_a_device(prepared, codes, truth, out):
    """Case to error; None = it ran, with the numbers of the CPU."""
    register()
    found = {}
    data = Prepared.open(prepared)
    torch.manual_seed(0)
    options = {"num_items": data.num_items, "dim": 16, "layers": 1, "heads": 1, "max_history": HISTORY, "dropout": 0.0}
    semantic = SemanticIdPolicy(codes=codes, decoder_layers=1, **options)
    policies = {"catalog": CatalogSoftmaxPolicy(**options), "semantic": semantic}
    for family, policy in policies.items():
        policy.eval()
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(torch.randn_like(weight) * 0.2)
        other = moved(copy.deepcopy(policy))
        cases = {
            "evaluate": lambda one, device: evaluated(data, truth, one, device),
            "validate": lambda one, device: validated(data, one, device),
            "serve": lambda one, device: served(data, one),
            "sample": lambda one, device: sampled(data, one, device),
            "export": lambda one, device, name=family: exported(data, one, device, out / name),
            "resume": lambda one, device: resumed(one),
        }
        for case, run in cases.items():
            most = MOST_TRANSFERS if case == "evaluate" else None
            found[f"{family} {case}"] = compared(
                f"{family} {case}",
                lambda run=run, policy=policy: run(policy, "cpu"),
                lambda run=run, other=other: run(other, DEVICE),
                most,
            )
    found["baselines"] = compared(
        "baselines", lambda: of_baselines(data, truth, "cpu"), lambda: of_baselines(data, truth, DEVICE)
    )
    found["mixing"] = compared("mixing", lambda: torch.ones(2), lambda: torch.ones(2, device=DEVICE) + torch.ones(2))
    return found
