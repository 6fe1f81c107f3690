from __future__ import annotations

import signal
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pytest
import torch

import recpo
from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.base.feedback import FeedbackDefinition
from recpo.base.types import Histories, Recommendations
from recpo.log.id_map import IdMap
from recpo.policies.baseline import SequentialRulesPolicy
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.serving import export
from recpo.serving.bundle import Bundle
from recpo.serving.export import BundleOptions, PolicyFacts, export_bundle
from recpo.serving.program import verify_runtime
from recpo.serving.saved_policy import PolicyRuntime
from tests.forks import FORKS
from tests.refusals import refused

SEVEN = IdMap(pa.array(range(10, 17)))
FEEDBACK = FeedbackDefinition()
REPOSITORY = Path(recpo.__file__).parent.parent


class Counting(Policy):
    """Scores items by how often the history holds them; 7 items."""

    num_items = 7
    max_history = 3

    def log_prob(self, batch, needed=None):
        raise NotImplementedError

    def sample(self, histories, group_size):
        raise NotImplementedError

    def recommend(self, histories, k, exclude=None):
        one_hot = torch.nn.functional.one_hot(histories.item_ids, self.num_items + 1)
        scores = one_hot.sum(1).float() - 0.01 * torch.arange(self.num_items + 1)
        scores = scores.scatter(1, torch.cat([exclude, torch.zeros_like(exclude[:, :1])], 1), -torch.inf)
        top = scores.log_softmax(1).topk(k)
        return Recommendations(top.indices.masked_fill(top.values == -torch.inf, 0), top.values)


class Unusual(Counting):
    """Uses what ONNX has no operation for, also in place: torch has to decompose it."""

    def recommend(self, histories, k, exclude=None):
        items, scores = super().recommend(histories, k, exclude)
        scores = scores.nan_to_num(neginf=-9.0)
        scores = scores + torch.nn.functional.rms_norm(scores, scores.shape[-1:])  # without weights
        torch.nn.functional.hardtanh(scores[:, 1:], -9.0, 9.0, inplace=True)
        return Recommendations(items, scores)


class Drifting(Counting):
    """Is not the same policy once it is exported."""

    def recommend(self, histories, k, exclude=None):
        items, scores = super().recommend(histories, k, exclude)
        return Recommendations(items, scores + 0.001 if torch.compiler.is_exporting() else scores)


class Changed(PolicyRuntime):
    """A runtime whose answers are changed."""

    def __init__(self, policy, change):
        super().__init__(policy)
        self.change = change

    def _recommend(self, inputs, k):
        return self.change(*(values.copy() for values in super()._recommend(inputs, k)))


@pytest.mark.slow
def test_any_policy_can_be_exported_and_unused_inputs_do_no_harm(tmp_path):
    export_bundle(
        Counting(), SEVEN, PolicyFacts(FEEDBACK, options={"unknown": "class"}), tmp_path / "bundle", BundleOptions(k=7)
    )
    bundle = Bundle.open(tmp_path / "bundle")
    served = bundle.recommend({"user_id": [1, 1], "item_id": [12, 10], "timestamp": [1, 2]})
    assert served["item_id"].tolist() == [11, 13, 14, 15, 16]
    assert served.attrs["counts"]["short_lists"] == 1
    assert set(bundle.manifest.files) == {"README.md", "golden.json", "items.parquet", "model.onnx"}
    with refused("unsupported", "engine"):
        Bundle.open(tmp_path / "bundle", engine="torch")


def test_operations_that_onnx_does_not_have_are_decomposed(tmp_path):
    export_bundle(Unusual(), SEVEN, PolicyFacts(FEEDBACK), tmp_path / "bundle", BundleOptions(k=7))
    found = Bundle.open(tmp_path / "bundle").recommend_one([{"item_id": 12, "timestamp": 1}], k=3)
    with torch.no_grad():
        expected = Unusual().recommend(Histories(torch.tensor([[3, 0, 0]]), torch.tensor([1])), 7, torch.tensor([[3]]))
    assert [item - 9 for item, _ in found] == expected.item_ids[0, :3].tolist()
    assert [score for _, score in found] == pytest.approx(expected.scores[0, :3].tolist(), abs=1e-4)


@pytest.mark.slow
def test_a_program_that_differs_from_its_policy_never_becomes_a_bundle(tmp_path):
    with refused("mismatch", "scores"):
        export_bundle(Drifting(), SEVEN, PolicyFacts(FEEDBACK), tmp_path / "bundle", BundleOptions(k=3))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"temperature": 0.5}, {"dim": 8}])
def test_options_that_are_not_the_policys_never_become_a_bundle(tmp_path, options):
    policy = CatalogSoftmaxPolicy(7, dim=4, max_history=3, layers=1)
    with refused(("mismatch", "damaged"), ...):
        export_bundle(
            policy,
            SEVEN,
            PolicyFacts(FEEDBACK, options={"dim": 4, "max_history": 3, "layers": 1} | options),
            tmp_path / "b",
            BundleOptions(k=3),
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options", [{"dim": "4"}, {"dimension": 4}, {"blocks": "os.system"}, {"sparse": 1}, {"temperature": True}]
)
def test_options_that_the_class_does_not_have_are_refused(tmp_path, options):
    with refused("damaged", ...):
        export_bundle(
            CatalogSoftmaxPolicy(7, dim=4),
            SEVEN,
            PolicyFacts(FEEDBACK, options=options),
            tmp_path / "b",
            BundleOptions(k=3),
        )


@pytest.mark.slow
def test_a_bundle_that_repeats_lists_the_history_again_and_nothing_that_is_excluded(parts, tmp_path):
    policy, options = parts.policy("sasrec")
    export_bundle(
        policy,
        parts.items,
        PolicyFacts(parts.feedback, options=options),
        tmp_path / "b",
        BundleOptions(k=20, repeats=True),
    )
    best = Bundle.open(tmp_path / "b").recommend_one([], 3)
    history = [{"item_id": best[0][0], "timestamp": number} for number in range(14)]  # longer than the policy reads
    for engine in ("onnx", "torch"):
        bundle = Bundle.open(tmp_path / "b", engine=engine)
        listed = [item for item, _ in bundle.recommend_one(history, 20)]
        assert bundle.manifest.repeats
        assert history[0]["item_id"] in listed
        again = [item for item, _ in bundle.recommend_one(history, 20, [listed[0], listed[3]])]
        assert again[:17] == [item for item in listed if item not in (listed[0], listed[3])][:17]


NULLS = {"dim": 4, "max_history": 3, "layers": 1, "attention_length": None, "profile": True, "fold_in": 2}


@pytest.fixture(scope="module")
def dot(tmp_path_factory):
    """A bundle of a policy without its options, to which all items are the same."""
    policy = CatalogSoftmaxPolicy(1000, dim=4, max_history=3)
    with torch.no_grad():
        policy.item_table.weight[1:] = policy.item_table.weight[1]
    out, items = tmp_path_factory.mktemp("dot") / "b", IdMap(pa.array(range(1000)))
    export_bundle(policy, items, PolicyFacts(FEEDBACK), out, BundleOptions(k=5))
    return out


@pytest.mark.slow
def test_a_program_names_no_file_of_the_machine_that_exported_it(dot):
    program = (dot / "model.onnx").read_bytes()
    assert str(REPOSITORY).encode() not in program
    assert b"site-packages" not in program


@pytest.mark.slow
def test_a_large_catalog_of_nearly_equal_scores_is_normalized_exactly(tmp_path):
    """A sum of float32, one after the other, was wrong by .0003: rules of Amazon Beauty could not be exported."""
    policy = SequentialRulesPolicy(200_000, neighbors=1, decay=0.5, max_history=3)
    policy.popularity.copy_(torch.rand(200_000, generator=torch.Generator().manual_seed(0)) / 1000)
    items = IdMap(pa.array(range(200_000)))
    export_bundle(policy.eval(), items, PolicyFacts(FEEDBACK), tmp_path / "bundle", BundleOptions(k=10))


@pytest.fixture(scope="module")
def cosine(tmp_path_factory):
    """A bundle with options that are null."""
    options = NULLS | {"similarity": "cosine"}
    policy, items = CatalogSoftmaxPolicy(1000, **options), IdMap(pa.array(range(1000)))
    out = tmp_path_factory.mktemp("cosine") / "b"
    export_bundle(policy, items, PolicyFacts(FEEDBACK, options=options), out, BundleOptions(k=3))
    return out


@pytest.mark.slow
def test_options_that_may_be_null_are_kept(cosine):
    assert Bundle.open(cosine, engine="torch").manifest.options["attention_length"] is None


@pytest.mark.slow
def test_a_policy_without_its_options_has_the_onnx_engine_only(dot):
    with refused("unsupported", "engine"):
        Bundle.open(dot, engine="torch")


@pytest.mark.slow
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_a_program_makes_one_score_matrix_and_overwrites_it(request, similarity):
    """Ranking held the scores of the whole catalog twice, and their sorted, masked and shifted copies."""
    graph = onnx.load(request.getfixturevalue(similarity) / "model.onnx").graph
    widths = {info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in graph.value_info}
    makers = [node for node in graph.node if any(widths.get(name, [])[1:] == [1001] for name in node.output)]
    makers = [node for node in makers if widths[node.output[0]][0] == 0]  # for each user; the table is a constant
    assert [node.op_type for node in makers] == ["MatMul", "ScatterElements", "ScatterElements"]
    for before, after in pairwise(makers):
        assert after.input[0] == before.output[0]


@pytest.mark.slow
def test_ties_of_a_program_go_to_the_smaller_id(dot):
    listed = Bundle.open(dot).recommend_one([], k=5, exclude=[1])
    assert [item for item, _ in listed] == [0, 2, 3, 4, 5]


@pytest.mark.slow
def test_k_catalog_and_existing_output_are_checked(tmp_path):
    for k in (8, 0, 3.0, True):
        with refused(("out_of_range", "wrong_type"), "k"):
            export_bundle(Counting(), SEVEN, PolicyFacts(FEEDBACK), tmp_path / "bundle", BundleOptions(k=k))
    other = Counting()
    other.num_items = 8
    with refused("mismatch", "items"):
        export_bundle(other, SEVEN, PolicyFacts(FEEDBACK), tmp_path / "bundle", BundleOptions(k=3))
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "thesis.tex").touch()
    for overwrite, code in ((False, "exists"), (True, "wrong_file")):
        with refused(code, ...):
            export_bundle(
                Counting(), SEVEN, PolicyFacts(FEEDBACK), tmp_path / "bundle", BundleOptions(k=3), overwrite=overwrite
            )
    with refused("conflicting_options"):
        export_bundle(
            Counting(),
            SEVEN,
            PolicyFacts(FEEDBACK),
            tmp_path / "run" / "bundle",
            BundleOptions(k=3),
            inputs=[tmp_path / "run"],
        )


def swap_first(items, scores):
    items[:, [0, 1]] = items[:, [1, 0]]
    return items, scores


def test_verification_tells_ties_from_differences():
    policy = Counting()
    exact = PolicyRuntime(policy)
    verify_runtime(exact, exact)
    with refused("mismatch", "items"):
        verify_runtime(Changed(policy, swap_first), exact)
    with refused("mismatch", "scores"):
        verify_runtime(Changed(policy, lambda items, scores: (items, scores * np.nan)), exact)

    class Tied(Counting):
        def recommend(self, histories, k, exclude=None):
            items = torch.arange(1, k + 1).expand(len(histories.item_ids), -1)
            return Recommendations(items, torch.full(items.shape, -2.0))

    verify_runtime(Changed(Tied(), swap_first), PolicyRuntime(Tied()))


def export_slowly(out, verified):
    """Sends a word for each of the two engines, and stays in the verification of the second one."""

    def verify(runtime, reference):
        verified.send(type(runtime).__name__)
        time.sleep(600 * sleeps.pop(0))

    sleeps, options = [0, 1], {"dim": 4, "layers": 1, "max_history": 3}
    export.verify_runtime = verify
    policy = CatalogSoftmaxPolicy(7, **options)
    export_bundle(policy, SEVEN, PolicyFacts(FEEDBACK, options=options), out, BundleOptions(k=3))


@pytest.mark.slow
def test_an_export_killed_while_its_last_engine_is_verified_leaves_nothing_that_loads(tmp_path):
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=export_slowly, args=(tmp_path / "bundle", theirs))
    process.start()
    theirs.close()  # or a process that fails would not end the wait
    for _ in range(2):
        assert "Runtime" in ours.recv()
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    leavings = list(tmp_path.iterdir())
    assert leavings
    for path in leavings:
        with pytest.raises(RecpoError):
            Bundle.open(path)
