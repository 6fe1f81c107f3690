from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from recpo.evaluation.document import label_summary
from recpo.log.prepared import Prepared


@pytest.mark.parametrize("split", ["train", "test"])
def test_counts_are_those_of_the_shards(prepared, split):
    data = Prepared.open(prepared)
    events = pd.concat([pd.read_parquet(file) for file in sorted((prepared / split).iterdir())])
    events = events[events["is_target"]]
    groups = {group["name"]: group for group in label_summary(data, split)}
    assert groups["all"]["events"] == len(events)
    bucket = np.floor(np.log2(events["duration"].astype(float) + 1e-6)).astype(int)
    for number, rows in events.groupby(bucket):
        found = groups.pop(f"{2**number} to {2 ** (number + 1)} s")
        label, disliked = rows["label"].astype(float), rows["dislike"]
        assert found["negative"] == disliked.sum()
        assert found["positive"] == ((label >= 0.75) & ~disliked).sum()
        assert found["unlabeled"] == (label.isna() & ~disliked).sum()
        assert found["neutral"] == found["events"] - sum(found[k] for k in ("negative", "positive", "unlabeled"))
        edges = np.arange(11) / 10 + 1e-5
        edges[0] = -1
        assert found["histogram"] == np.histogram(label.dropna(), edges)[0].tolist()
    assert list(groups) == ["all"]


def test_unknown_durations_and_labels_have_their_own_place(prepared, monkeypatch):
    data = Prepared.open(prepared)
    columns = {
        "label": np.array([np.nan, 1.0, 0.0, 0.1], np.float32),
        "dislike": np.array([False, True, False, False]),
        "duration": np.array([np.nan, -1.0, 3.0, 0.0], np.float32),
        "is_target": np.array([True, True, True, True]),
    }
    monkeypatch.setattr(Prepared, "columns", lambda self, split, shard, names: {name: columns[name] for name in names})
    monkeypatch.setattr(Prepared, "num_shards", lambda self, split: 1)
    everything, unknown, known = label_summary(data, "train")
    assert (unknown["name"], known["name"]) == ("unknown", "2 to 4 s")
    kinds = ("positive", "neutral", "negative", "unlabeled")
    assert [unknown[kind] for kind in kinds] == [0, 1, 1, 1]
    assert [known[kind] for kind in kinds] == [0, 1, 0, 0]
    assert everything["histogram"] == [2, 0, 0, 0, 0, 0, 0, 0, 0, 1]
