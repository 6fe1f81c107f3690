from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import recpo
from recpo.base.errors import RecpoError
from recpo.base.feedback import HIGHEST
from recpo.base.types import FeedbackBatch, Histories, Slates
from recpo.serving.bundle import Bundle
from recpo.serving.histories import EncodedHistories
from recpo.serving.manifest import BundleManifest, program_interface
from tests.cutoffs import LEVELS, quarters
from tests.refusals import refused
from tests.serving.conftest import served_by
from tests.serving.test_bundle_safety import sign

pytestmark = pytest.mark.slow

NUM_ITEMS, MAX_HISTORY, K = 120, 12, 20
#: Watch times of some levels, for the cutoffs of conftest.
WATCHED = dict(zip((0, 1, *LEVELS), (np.nan, np.nan, 1.0, 3.0, 5.0, 8.0), strict=True))
T0 = 1_650_000_000_000
ELEMENT_TYPES = {"int64": onnx.TensorProto.INT64, "float32": onnx.TensorProto.FLOAT}


def external(number):
    return f"item-{NUM_ITEMS + 1 - number}"


def frame_of(ids, levels, times):
    """The raw events of internal histories; users are u0, u1, ..."""
    rows = [
        (f"u{user}", external(item), time, WATCHED[level], 10.0, level == 1)
        for user, columns in enumerate(zip(ids, levels, times, strict=True))
        for item, level, time in zip(*columns, strict=True)
    ]
    names = ["user_id", "item_id", "timestamp", "watch_time", "duration", "dislike"]
    return pd.DataFrame(rows, columns=names)


def random_histories(users=41, longest=MAX_HISTORY, seed=0):
    """Internal histories (the first is empty), the frame that a server would be given, and all users."""
    rng = np.random.default_rng(seed)
    lengths = [0, longest, *rng.integers(0, longest + 1, users - 2)]
    ids = [rng.integers(1, NUM_ITEMS + 1, n).tolist() for n in lengths]
    levels = [rng.choice(list(WATCHED), n).tolist() for n in lengths]
    times = [(T0 + rng.integers(1, 10**9, n).cumsum()).tolist() for n in lengths]
    return (ids, levels, times), frame_of(ids, levels, times), [f"u{row}" for row in range(users)]


def as_histories(policy, ids, levels, times):
    width = max(map(len, ids))
    padded = [torch.tensor([[*row, *[0] * (width - len(row))] for row in rows]) for rows in (ids, levels, times)]
    lengths = torch.tensor([len(row) for row in ids])
    return Histories(padded[0], lengths, padded[1], padded[2] if policy.reads_timestamps else None)


def lists_of(frame):
    return {user: group.item_id.tolist() for user, group in frame.groupby("user_id", sort=False)}


def history(*items, user="u"):
    return {"user_id": [user] * len(items), "item_id": list(items), "timestamp": [T0 + n for n in range(len(items))]}


@pytest.fixture(scope="module")
def bundle(bundle_path):
    return Bundle.open(bundle_path)


@pytest.mark.parametrize("engine", ["onnx", "torch"])
@pytest.mark.parametrize("users", [2, 41])
def test_bundle_gives_the_policys_lists_and_scores(exported, engine, users):
    policy, path = exported
    internal, frame, names = random_histories(users)
    histories = as_histories(policy, *internal)
    with torch.inference_mode():
        expected = policy.recommend(histories, 10, exclude=histories.item_ids)
    shuffled = frame.sample(frac=1.0, random_state=0)  # rows in any order
    served = Bundle.open(path, engine).recommend(shuffled, k=10, users=names)
    assert served["item_id"].tolist() == [external(i) for i in expected.item_ids.flatten().tolist()]
    np.testing.assert_allclose(served["score"], expected.scores.flatten(), atol=1e-4)
    assert served["rank"].tolist() == list(range(1, 11)) * users
    assert served["user_id"].tolist() == np.repeat(names, 10).tolist()


def test_scores_of_candidates_are_the_policys(exported):
    policy, path = exported
    internal, frame, names = random_histories(9)
    rng = np.random.default_rng(1)
    items = rng.integers(1, NUM_ITEMS + 1, (9, 4))
    histories, slate = as_histories(policy, *internal), torch.from_numpy(items)
    slates = Slates(slate, histories.lengths[:, None].expand(-1, 4), slate > 0)
    with torch.inference_mode():
        expected = policy.log_prob(FeedbackBatch(histories, slates, torch.arange(9))).sum(-1).flatten().numpy()
    candidates = pd.DataFrame({"user_id": np.repeat(names, 4), "item_id": [external(i) for i in items.flatten()]})
    order = rng.permutation(len(candidates))
    scored = Bundle.open(path, "torch").score(frame, candidates.iloc[order])
    np.testing.assert_allclose(scored["score"], expected[order], atol=1e-4)
    assert scored["item_id"].tolist() == candidates["item_id"].iloc[order].tolist()


def test_scores_of_unknown_candidates_and_of_the_onnx_engine(bundle_path, bundle):
    candidates = {"user_id": ["u", "new", "u"], "item_id": ["?", external(1), external(2)]}
    scored = Bundle.open(bundle_path, "torch").score(history(external(5)), candidates)
    assert scored["score"].isna().tolist() == [True, False, False]
    assert scored.attrs["counts"]["unknown_candidates"] == 1
    with refused("unsupported", "engine"):
        bundle.score(history(external(5)), candidates)


def test_the_answer_does_not_depend_on_the_batch(bundle):
    _, frame, names = random_histories()
    whole = served_by(bundle, frame, users=names)
    for batch_size in (1, 7):
        parts = served_by(bundle, frame, users=names, batch_size=batch_size)
        assert lists_of(parts.to_pandas()) == lists_of(whole.to_pandas())
        assert parts.counts == whole.counts


def test_history_and_excluded_items_are_not_recommended(bundle):
    (ids, _, _), frame, names = random_histories()
    favorites = lists_of(bundle.recommend(frame, users=names))
    exclude = pd.DataFrame(
        [(user, item) for user, items in favorites.items() for item in [*items[:4], "no such item"]],
        columns=["user_id", "item_id"],
    )
    served = bundle.recommend(frame, exclude=exclude, users=names)
    for row, (user, items) in enumerate(lists_of(served).items()):
        assert not {external(i) for i in ids[row]} & set(items)
        assert not set(favorites[user][:4]) & set(items)
        assert items[: K - 4] == favorites[user][4:]
    assert served.attrs["counts"]["unknown_excluded"] == len(ids)


def test_unknown_items_are_skipped_with_their_feedback_and_counted(bundle):
    known = history(external(3), external(8)) | {"watch_time": [8.0, 1.0], "duration": [10.0, 10.0]}
    mixed = history("?", external(3), "!", external(8)) | {"watch_time": [1.0, 8.0, 5.0, 1.0], "duration": [10.0] * 4}
    plain, with_unknown = served_by(bundle, known), served_by(bundle, mixed)
    assert with_unknown.table.equals(plain.table)
    assert with_unknown.counts.unknown_items == 2


def test_every_form_of_an_empty_history_has_the_same_answer(bundle):
    served = bundle.recommend(history("?", user="stranger"), users=["stranger", "nobody"])
    lists = lists_of(served)
    assert len(lists["stranger"]) == K
    assert lists["stranger"] == lists["nobody"] == [item for item, _ in bundle.recommend_one([])]
    assert served.attrs["counts"]["empty_histories"] == 2


def test_long_histories_keep_the_most_recent_events_and_hide_the_older_ones(bundle):
    order = np.random.default_rng(1).permutation(NUM_ITEMS)[: MAX_HISTORY + 30] + 1
    items = [external(i) for i in order]
    long = served_by(bundle, history(*items))
    older = {"user_id": ["u"] * 30, "item_id": items[:-MAX_HISTORY]}
    assert long.table.equals(served_by(bundle, history(*items[-MAX_HISTORY:]), exclude=older).table)
    assert long.counts.truncated_histories == 1


def test_a_list_is_short_where_hardly_anything_is_allowed(bundle):
    exclude = {"user_id": ["u"] * (NUM_ITEMS - 3), "item_id": [external(i) for i in range(1, NUM_ITEMS - 2)]}
    served = bundle.recommend(history(external(NUM_ITEMS)), exclude=exclude)
    assert sorted(served["item_id"]) == sorted(external(i) for i in (NUM_ITEMS - 2, NUM_ITEMS - 1))
    assert served.attrs["counts"]["short_lists"] == 1


def test_one_request_is_answered_as_a_frame_is(exported):
    _, path = exported
    bundle = Bundle.open(path)
    _, frame, _ = random_histories(5)
    for user, rows in frame.groupby("user_id"):
        events = rows.drop(columns="user_id").to_dict("records")
        excluded = bundle.recommend(rows, k=2)["item_id"].tolist()
        listed = bundle.recommend_one(events[::-1], k=7, exclude=excluded)
        expected = bundle.recommend(rows, k=7, exclude={"user_id": [user] * 2, "item_id": excluded})
        assert [item for item, _ in listed] == expected["item_id"].tolist()
        np.testing.assert_allclose([score for _, score in listed], expected["score"], atol=1e-5)


def test_no_users_at_all_give_a_frame_with_its_columns(bundle):
    _, frame, _ = random_histories(5)
    assert served_by(bundle, frame.iloc[:0].astype({"user_id": str})).table.num_rows == 0
    assert list(bundle.recommend(frame.iloc[:0])) == ["user_id", "rank", "item_id", "score"]


def test_a_result_can_be_written_to_parquet(bundle, tmp_path):
    served = bundle.recommend(history(external(3)), k=4)
    served.to_parquet(tmp_path / "lists.parquet")
    assert pd.read_parquet(tmp_path / "lists.parquet").equals(served)


@pytest.mark.parametrize("k", [0, -1, K + 1, 3.0, "3", True, np.float32(3)])
def test_list_lengths_that_are_not_integers_in_range_are_refused(bundle, k):
    with refused(("out_of_range", "wrong_type"), "k"):
        bundle.recommend(history(external(3)), k=k)
    with refused(("out_of_range", "wrong_type"), "k"):
        bundle.recommend_one([], k=k)


@pytest.mark.parametrize("engine", ["foo", "ONNX", "", None, 1, ["onnx"]])
def test_an_unknown_engine_is_refused(bundle_path, engine):
    with refused("unknown_name", "engine"):
        Bundle.open(bundle_path, engine=engine)


@pytest.mark.parametrize("engine", ["onnx", "torch"])
@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("item_ids", -1, ("out_of_range", "item_ids")),
        ("item_ids", NUM_ITEMS + 1, ("out_of_range", "item_ids")),
        ("feedback", -1, ("out_of_range", "feedback")),
        ("feedback", HIGHEST + 1, ("out_of_range", "feedback")),
        ("exclude", -1, ("out_of_range", "exclude")),
        ("exclude", NUM_ITEMS + 1, ("out_of_range", "exclude")),
    ],
)
def test_values_out_of_range_never_reach_a_program(bundle_path, engine, column, value, message):
    runtime = Bundle.open(bundle_path, engine).runtime
    inputs = EncodedHistories(*(np.zeros((1, width), np.int64) for width in (MAX_HISTORY, MAX_HISTORY, 2)))
    getattr(inputs, column)[0, 0] = value
    with refused(*message):
        runtime.recommend(inputs, 3)


def test_shapes_and_types_of_inputs_are_checked(bundle):
    right = [np.zeros((1, width), np.int64) for width in (MAX_HISTORY, MAX_HISTORY, 2)]
    for wrong in (np.zeros((1, 3), np.int64), np.zeros((1, MAX_HISTORY)), np.zeros(MAX_HISTORY, np.int64)):
        with refused("wrong_shape", "feedback"):
            bundle.runtime.recommend(EncodedHistories(right[0], wrong, right[2]), 3)


@pytest.mark.parametrize("level", [-1, HIGHEST + 1])
def test_the_program_itself_takes_a_level_out_of_range_for_unknown(bundle, level):
    """Whoever runs model.onnx without recpo: -1 was served as the last level, the best."""
    items = np.zeros((1, MAX_HISTORY), np.int64)
    items[0, :2] = 3, 8
    none = np.zeros((1, 1), np.int64)
    strange, unknown, best = (
        bundle.runtime.run(EncodedHistories(items, feedback, none))
        for feedback in (np.full_like(items, level), np.zeros_like(items), np.where(items, HIGHEST, 0))
    )
    np.testing.assert_array_equal(strange[1], unknown[1])
    assert not np.array_equal(strange[1], best[1])


def test_a_bundle_says_where_it_comes_from(bundle_path, bundle):
    assert bundle.manifest.origin == {"run": "run-0", "checkpoint": "best", "weights": "0" * 64}
    assert bundle.feedback.cutoffs == {3: quarters(2.0, 4.0, 6.0)}
    assert bundle.manifest.policy["class"] == "recpo.policies.catalog_softmax.CatalogSoftmaxPolicy"
    content = json.loads((bundle_path / "manifest.json").read_text())
    assert content["versions"]["torch"] == torch.__version__
    assert set(content["program"]["inputs"]) == {"item_ids", "feedback", "exclude"}


def test_a_policy_that_reads_time_is_given_the_times(export_once):
    _, path = export_once("hstu")
    bundle = Bundle.open(path)
    assert bundle.manifest.reads_timestamps
    near, far = (
        {"user_id": ["u"] * 2, "item_id": [external(3), external(8)], "timestamp": [T0, T0 + gap]}
        for gap in (1000, 10**9)
    )
    assert not np.allclose(bundle.recommend(near, k=5)["score"], bundle.recommend(far, k=5)["score"])
    inputs = EncodedHistories(*(np.zeros((1, width), np.int64) for width in (MAX_HISTORY, MAX_HISTORY, 2)))
    with refused("missing_value", "timestamps"):
        bundle.runtime.recommend(inputs, 3)


def test_arrow_and_pandas_frames_say_the_same(bundle):
    _, frame, _ = random_histories(5)
    assert bundle.recommend(pa.Table.from_pandas(frame)).equals(bundle.recommend(frame))


def test_the_manifest_has_the_types_and_shapes_of_the_program(exported):
    bundle = exported[1]
    graph = onnx.load(bundle / "model.onnx").graph
    interface = program_interface(BundleManifest.open(bundle))
    for values, tensors in ((graph.input, interface["inputs"]), (graph.output, interface["outputs"])):
        assert {value.name for value in values} == tensors.keys()
        for value in values:
            tensor, of_program = tensors[value.name], value.type.tensor_type
            assert of_program.elem_type == ELEMENT_TYPES[tensor["type"]]
            sizes = [dim.dim_value or -1 for dim in of_program.shape.dim][1:]
            assert sizes == [size if isinstance(size, int) else -1 for size in tensor["shape"][1:]]
            assert of_program.shape.dim[0].dim_param  # the number of users is free


def test_no_file_of_a_bundle_is_executable_by_its_format(export_once):
    """No archive, no pickle: ONNX, safetensors, Parquet, JSON, and the text of the model card."""
    for kind in ("sasrec", "hstu"):
        names = {path.name for path in export_once(kind)[1].iterdir()}
        assert names == {
            "model.onnx",
            "policy.safetensors",
            "items.parquet",
            "golden.json",
            "README.md",
            "manifest.json",
            "recpo.json",
        }


def test_altered_codes_are_refused(export_once, tmp_path):
    for change in ("missing", "reversed", "text", "repeated"):
        root = Path(shutil.copytree(export_once("semantic")[1], tmp_path / change))
        Bundle.open(root, engine="torch")
        file = root / "codes" / "codes.parquet"
        codes = pq.read_table(file).to_pandas()
        names = [name for name in codes if name.startswith("code_")]
        if change == "missing":
            codes = codes.drop(columns=names[-1])
        elif change == "text":
            codes[names[0]] = "x"
        else:
            codes[names] = codes[names].to_numpy()[::-1] if change == "reversed" else 0
        codes.to_parquet(file)
        with refused("damaged", "codes/codes.parquet"):
            Bundle.open(root, engine="torch")
        sign(root)
        with pytest.raises(RecpoError):
            Bundle.open(root, engine="torch")


def test_codes_are_needed_for_items_of_semantic_ids(export_once, tmp_path):
    pq.write_table(pa.table({"item_id": ["item-1", "new"]}), tmp_path / "items.parquet")
    with refused("unsupported", "items"):
        recpo.export(refresh=export_once("semantic")[1], items=tmp_path / "items.parquet", out=tmp_path / "fresh")
