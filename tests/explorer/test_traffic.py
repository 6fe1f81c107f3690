"""What a server logged, against pandas."""

import numpy as np
import pandas as pd
import pytest

from recpo.explorer.survey import traffic
from tests.refusals import refused


def expected(group):
    group = group.assign(value=np.minimum(1, group["watch_time"] / group["duration"]))
    known = group.dropna(subset=["value"])
    mean = known["value"].mean()
    of_users = group.assign(error=group["value"] - mean).groupby("user_id")["error"].sum()  # nan = 0
    users = group["user_id"].nunique()
    half = 1.96 * np.sqrt((of_users**2).sum() * users / (users - 1)) / len(known)
    lengths = group.groupby("request_id").size()
    return mean, half, users, lengths


def test_rates_by_variant_and_over_time(server_log, data):
    found = traffic(server_log, data)
    log = pd.concat([pd.read_parquet(file) for file in sorted(server_log.glob("*.parquet"))])
    assert [one.name for one in found.by_variant] == ["A", "B"]
    groups = dict(iter(log.groupby("variant")))
    for one in found.by_variant:
        mean, half, users, lengths = expected(groups[one.name])
        group = groups[one.name]
        assert (one.requests, one.exposures, one.users) == (len(lengths), len(group), users)
        assert one.value == pytest.approx(mean)
        assert one.half_width == pytest.approx(half, rel=1e-3)
        assert one.explored == pytest.approx(group["is_random"].mean())
        assert one.disliked == pytest.approx(group["dislike"].mean())
        assert one.answered == pytest.approx(group["watch_time"].notna().mean())
        assert one.short_lists == pytest.approx((lengths < lengths.max()).mean())
    known = {*data.item_ids().to_external(range(1, data.num_items + 1)).to_pylist()}
    unknown = sum(one.unknown_items * one.exposures for one in found.by_variant)
    assert unknown == pytest.approx((~log["item_id"].isin(known)).sum())
    assert unknown >= 1
    hours = log["timestamp"] // 3_600_000
    assert found.unit == "hour"
    assert [one.exposures for one in found.over_time] == hours.value_counts().sort_index().tolist()
    assert found.over_time[0].name == f"{pd.to_datetime(hours.min(), unit='h'):%Y-%m-%d %H:%M}"


def test_a_long_log_is_shown_by_day_and_labels_are_its_value(server_log, data, tmp_path):
    log = pd.read_parquet(server_log / "1.parquet").drop(columns=["variant", "watch_time", "duration"])
    log["label"] = np.linspace(0, 1, len(log))
    log["timestamp"] = log["timestamp"].min() + np.arange(len(log)) * 3_600_000
    log.to_parquet(tmp_path / "log.parquet", index=False)
    found = traffic(tmp_path, data)
    assert found.unit == "day"
    assert found.value_of == "label"
    (one,) = found.by_variant
    assert one.value == pytest.approx(log["label"].mean())


def test_files_of_a_log_that_got_variants_and_outcomes_later_are_read_together(server_log, data, tmp_path):
    log = pd.read_parquet(server_log / "1.parquet")
    before = log.drop(columns=["variant", "watch_time", "duration", "dislike", "is_random"])
    before.assign(request_id="before-" + before["request_id"].astype(str)).to_parquet(
        tmp_path / "0.parquet", index=False
    )
    log.to_parquet(tmp_path / "1.parquet", index=False)
    found = traffic(tmp_path, data)
    counts = log["variant"].value_counts()
    expected = {**counts, "no variant": len(log)}
    assert {one.name: one.exposures for one in found.by_variant} == expected
    assert found.value_of == "watched share of an item, at most 1"
    before.to_parquet(tmp_path / "1.parquet", index=False)
    (one,) = traffic(tmp_path, data).by_variant
    assert (one.name, one.disliked, one.explored, one.value) == ("all exposures", 0.0, 0.0, None)


def test_one_user_has_no_interval_and_no_outcome_has_no_value(server_log, data, tmp_path):
    log = pd.read_parquet(server_log / "1.parquet").head(4).assign(user_id=1, watch_time=np.nan)
    log.to_parquet(tmp_path / "log.parquet", index=False)
    (one,) = traffic(tmp_path, data).by_variant
    assert one.value is None
    assert one.half_width is None
    assert one.users == 1


def test_what_is_no_log_is_refused(data, tmp_path):
    with refused("empty", "server_log"):
        traffic(tmp_path, data)
    pd.DataFrame({"user_id": [1]}).to_parquet(tmp_path / "log.parquet")
    with refused("missing_column", "server_log"):
        traffic(tmp_path, data)
    (tmp_path / "log.parquet").write_bytes(b"nothing")
    with refused("damaged", "server_log"):
        traffic(tmp_path, data)
