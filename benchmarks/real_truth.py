"""True value on real people's tastes: a world that replays a complete matrix of ratings, several loggers.

    python benchmarks/real_truth.py --ratings ratings.parquet --work runs/real_truth                    # for reporting
    python benchmarks/real_truth.py --ratings ratings.parquet --work runs/choices --loggers 0 1 2 3 4   # for choices

Made for Jester (Goldberg, Roeder, Gupta and Perkins, "Eigentaste", Information Retrieval 2001): 100 jokes, ratings from
-10 to 10, and thousands of people who rated all of them. recpo ships none of it: download it from its authors
(https://eigentaste.berkeley.edu/dataset/) and save the sheet of the first data set as CSV. The ratings are one of

- a CSV file without a header, one row per user: the number of ratings, then a column per item, 99 = not rated;
- a Parquet file with the columns user_id, item_id and rating.

Writes ``matrix.parquet`` with rewards (rating - low) / (high - low). For every logger, a seed, ``recpo simulate
--world replay`` shows each user about ``--events_per_user`` items, and the contenders of ``value.py`` are trained and
evaluated. Users with a rating of every item are tested: the value of their lists is known. The others only train.

With ``--grades``, the log has the ratings themselves instead of watch times: of a tested user the first
``--events_per_user`` different items that the logger shows, the last quarter of them in the validation period, and as
many in the test period; and all ratings of the others, at random times of the training period. Propensities are not
known then.

With ``--texts``, the items have features: TF-IDF of their texts, reduced to 16 numbers each by a truncated singular
value decomposition. The factorization then reads them: compare its row with that of a run without texts. Without
training seeds (``--seeds`` alone) only baselines and the reward model are compared.

Prints what ``value.py`` prints, and per contender the share of listed items with a reward below ``--bad`` and the
number of distinct items in the lists of all users. Nothing is selected by these values: loggers 0 to 4 are for choices
that are made outside, loggers 5 to 9 for the table that is reported.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize
from value import ALLRANK, BASELINES, METRICS, REWARD_MODEL, World, add_arguments, measured, table
from verbs import call

from recpo.log.prepared import Prepared
from recpo.verbs.prepare import prepare
from recpo.verbs.recommend import recommend
from recpo.verbs.simulate import simulate
from recpo.worlds.log import Simulation
from recpo.worlds.parameters import MILLISECONDS_PER_DAY
from recpo.worlds.replay import REPLAY

NOT_RATED = 99.0
GRADES = "grades.parquet"
MANY_EVENTS = 4  # simulated events of a user, per event before the test period: items are shown more than once
TEXT_NUMBERS = 16
COLUMNS = {
    "true_reward@10": "true value",
    "bad": "bad items",
    "distinct": "distinct items",
    **{name: title for name, title in METRICS.items() if name in ("NDCG@10", "SNIPS")},
}


def ratings_of(file, users):
    """Users ``[N]``, items ``[N]`` and ratings ``[N]`` of the first users of a file."""
    if file.suffix == ".parquet":
        rows = pq.read_table(file, columns=["user_id", "item_id", "rating"])
        user, item = (np.unique(rows[name].to_numpy(), return_inverse=True)[1] for name in ("user_id", "item_id"))
        rating = rows["rating"].to_numpy()
    else:
        matrix = np.loadtxt(file, delimiter=",", ndmin=2)[:, 1:]
        user, item = np.nonzero(matrix != NOT_RATED)
        rating = matrix[user, item]
    kept = np.ones(len(user), bool) if users is None else user < users
    return user[kept], item[kept], rating[kept]


def write_matrix(options):
    """Writes the rewards of the ratings; the number of users."""
    user, item, rating = ratings_of(options.ratings, options.users)
    low, high = options.scale
    reward = np.clip((rating - low) / (high - low), 0.0, 1.0)
    options.work.mkdir(parents=True, exist_ok=True)
    columns = {"user_id": user.astype(np.int64) + 1, "item_id": item.astype(np.int64) + 1, "reward": reward}
    pq.write_table(pa.table(columns), options.matrix)
    return len(np.unique(user))


def write_texts(options):
    """Writes a table of items with a vector of each text; the texts are in the order of the item ids."""
    texts = pq.read_table(options.texts, columns=["text"])["text"].to_pylist()
    words = TfidfVectorizer(sublinear_tf=True, stop_words="english").fit_transform(texts)
    numbers = TruncatedSVD(min(TEXT_NUMBERS, len(texts) - 1), random_state=0).fit_transform(words)
    vectors = [row.tolist() for row in normalize(numbers).astype(np.float32)]
    columns = {"item_id": np.arange(len(texts)) + 1, "text": pa.array(vectors, pa.list_(pa.float32()))}
    pq.write_table(pa.table(columns), options.work / "texts.parquet")
    return options.work / "texts.parquet"


def prepare_grades(world, options):
    """Prepares a log of ratings, of the items that a simulation shows."""
    root = options.work / f"{world.kind}-{world.seed}"
    if (root / "prepared" / "manifest.json").is_file():
        return
    sizes = options.simulation | {"events": MANY_EVENTS * options.simulation["events"]}
    call(simulate, out=root / "log", world=world.kind, seed=world.seed, overwrite="true", **sizes)
    simulation, matrix = Simulation.open(root / "log"), pq.read_table(options.matrix).to_pandas()
    shown = simulation.to_pandas()[["user_id", "item_id", "timestamp"]].sort_values("timestamp", kind="stable")
    is_complete = matrix.groupby("user_id").size() == matrix["item_id"].nunique()
    complete = is_complete.index[is_complete]
    begin = (shown["timestamp"].min() // MILLISECONDS_PER_DAY + simulation.days[-1] - 1) * MILLISECONDS_PER_DAY
    shown = shown[shown["user_id"].isin(complete)].drop_duplicates(["user_id", "item_id"])
    place, known = shown.groupby("user_id").cumcount(), options.events_per_user
    period = (place >= known - known // 4).astype(int) + (place >= known)  # 0 trains, 1 validates, 2 tests
    shown["timestamp"] = begin + (period - 1) * MILLISECONDS_PER_DAY + place * 60_000
    others = matrix.loc[~matrix["user_id"].isin(complete), ["user_id", "item_id"]]
    times = np.random.default_rng(world.seed).integers(shown["timestamp"].min(), begin, len(others))
    log = pd.concat([shown[place < 2 * known], others.assign(timestamp=times)]).merge(matrix, on=["user_id", "item_id"])
    log.rename(columns={"reward": "label"}).to_parquet(root / GRADES, index=False)
    label = {"label": "NumericColumn", "label__low": 0.0, "label__high": 1.0}
    tables = {"items": root / "log" / "items.parquet"} if options.texts else {}
    call(prepare, log=root / GRADES, out=root / "prepared", overwrite="true", **label, **tables)


def add_lists(world, found, options):
    """Adds to every contender the share of bad items and the number of distinct items in the lists of tested users."""
    root = options.work / f"{world.kind}-{world.seed}"
    simulation, data = Simulation.open(root / "log"), Prepared.open(root / "prepared")
    log = pd.read_parquet(root / GRADES) if options.grades else simulation.to_pandas()
    start = data.manifest["boundaries"]["test_start_ms"]
    users = np.unique(log.loc[log["timestamp"] >= start, "user_id"])
    past = log[(log["timestamp"] < start) & log["user_id"].isin(users)]
    past = past.drop(columns=["propensity", "is_random"], errors="ignore")
    truth, day = simulation.truth, float(simulation.days[-1])
    for name, metrics in found.items():
        metrics |= {"bad": np.nan, "distinct": np.nan}
        source = name if name in (*BASELINES, ALLRANK) else root / name
        if name in (*BASELINES, ALLRANK, REWARD_MODEL) or source.is_dir():
            known = {"prepared": data} if name in (*BASELINES, ALLRANK, REWARD_MODEL) else {}
            listed = recommend(source, past, 10, users=users.tolist(), **known)
            reward = truth.expected_reward(listed["user_id"].to_numpy(), listed[["item_id"]].to_numpy(), day)
            metrics |= {"bad": float((reward < options.bad).mean()), "distinct": float(listed["item_id"].nunique())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratings", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/real_truth"))
    parser.add_argument("--loggers", type=int, nargs="+", default=[5, 6, 7, 8, 9], help="seeds of the simulations")
    parser.add_argument("--random_share", type=float, help="of the exposures; null = as in the world replay")
    parser.add_argument("--grades", action="store_true", help="the log has the ratings instead of watch times")
    parser.add_argument("--texts", type=Path, help="Parquet file with a column text, one row per item, in their order")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="of training")
    parser.add_argument("--events_per_user", type=int, default=20)
    parser.add_argument("--users", type=int, help="only the first so many users of the file")
    parser.add_argument("--scale", type=float, nargs=2, default=[-10.0, 10.0], help="lowest and highest rating")
    parser.add_argument("--bad", type=float, default=0.3, help="an item with a smaller reward is a bad one")
    add_arguments(parser)
    options = parser.parse_args()
    if options.quick:
        options.loggers, options.seeds = options.loggers[:1], options.seeds[:1]
    options.matrix = options.work / "matrix.parquet"
    users = write_matrix(options)
    options.worlds = [World(REPLAY, seed) for seed in options.loggers]
    options.simulation = {"matrix": options.matrix, "events": options.events_per_user * users}
    if options.random_share is not None:
        options.simulation["random_share"] = options.random_share
    if options.texts is not None:
        options.simulation["item_table"] = write_texts(options)
    for world in options.worlds if options.grades else []:
        prepare_grades(world, options)
    table("replayed ratings", measured(options, add_lists), options.seeds, COLUMNS)


if __name__ == "__main__":
    main()
