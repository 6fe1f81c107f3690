"""Column mappings of well-known logs; ``plain`` is the standard names themselves."""

from __future__ import annotations

from typing import Final, Literal

from recpo.data.schema import ColumnMapping, Columns

PresetName = Literal["plain", "kuairand", "movielens"]

PRESETS: Final[dict[str, ColumnMapping]] = {
    "plain": ColumnMapping(
        **{column: column for column in Columns.ALL},
        time_unit="ms",
        watch_time_unit="s",
        duration_unit="s",
    ),
    # KuaiRand (Gao et al., CIKM 2022, arXiv 2208.08696): log_standard_*.csv, log_random_*.csv; kuairand.com
    "kuairand": ColumnMapping(
        user_id="user_id",
        item_id="video_id",
        timestamp="time_ms",
        watch_time="play_time_ms",
        duration="duration_ms",
        dislike="is_hate",
        label="long_view",
        is_random="is_rand",
        time_unit="ms",
        watch_time_unit="ms",
        duration_unit="ms",
    ),
    # MovieLens (Harper and Konstan, 2015): ratings.csv of ml-latest, ml-25m, ml-32m; grouplens.org/datasets/movielens
    "movielens": ColumnMapping(
        user_id="userId",
        item_id="movieId",
        timestamp="timestamp",
        label="rating",
        time_unit="s",
        watch_time_unit="s",
        duration_unit="s",
    ),
}
