"""A world that replays the rewards of real people: who likes what is a given matrix, all else is as in other worlds.

The matrix is a table with a reward in [0, 1] for pairs of a user and an item. A user with a reward for every item is
complete: every list has a known value for that user. The others only train: the log shows them items of which their
reward is known, and no session of theirs begins in the last three days (``recpo.worlds.log.draw_sessions``).

**Link.** The true expected reward of a pair is the number in the matrix, r, exactly. What happens in an exposure
follows from the affinity a of the user model, by the formula that makes the reward of an ordinary item r:

    a - dislike_cost * dislike_base (1 - a)^2 = r,    so    1 - a = 2 (1 - r) / (1 + sqrt(1 + 4 c (1 - r)))

with ``c = dislike_cost * dislike_base``. The affinity grows with r, and is 1 where r is 1. Watch times and dislikes
depend on it as in every world (``recpo.worlds.log.draw_watch_time``, ``recpo.worlds.preferences``).

**Logging policy.** A mixture as in the other worlds, in which each item is its own topic:

    p(i | u) = random_share / V_u + (1 - random_share) softmax_i(logit_ui)
    logit_ui = topic_sharpness (r_ui + topic_noise z_ui) + popularity_i
    popularity_i = popularity_spread z_i + popularity_quality * (standardized mean reward of the item)

over the V_u items of which the user's reward is known, with z ~ N(0, 1) drawn once. So the logger knows a part of the
tastes, and never more than what ``topic_noise`` leaves.

Rewards and the logger's estimates are dense ``[U, V]`` arrays in memory and in ``truth/users.parquet``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recpo.base.errors import RecpoError
from recpo.base.frames import require_columns
from recpo.worlds.parameters import WORLDS, LifeParameters, SimulationParameters
from recpo.worlds.preferences import FloatArray, IntArray, Items, Preferences, Users, draw_activity, draw_durations

REPLAY: Final = "replay"
EVENTS_PER_USER: Final = 20
"""Mean number of events of a user in the log, unless ``events`` is given."""

_TABLE_KEYS: Final = {"item_table": "item_id", "user_table": "user_id"}
_REPLAY_STREAM: Final = 9
_COLUMNS: Final = ("user_id", "item_id", "reward")
#: parameters of the user model that a matrix replaces
_REPLACED: Final = (
    *("users", "items", "topics", "drift", "latent_dim", "topic_share", "taste_scale", "quality_scale"),
    *("affinity_bias", "clickbait_share", "clickbait_boost", "clickbait_dislike"),
    *LifeParameters.__dataclass_fields__,
)


@dataclass(frozen=True)
class RewardMatrix:
    """Rewards of users for items.

    Attributes:
        user_ids: ``[U]`` int64, ascending.
        item_ids: ``[V]`` int64, ascending.
        rewards: ``[U, V]`` float64 in [0, 1], nan = not known. At least one row has no nan.
    """

    user_ids: IntArray
    item_ids: IntArray
    rewards: FloatArray

    @classmethod
    def read(cls, file: Path | str) -> Self:
        """Reads a Parquet file with the columns user_id, item_id (whole numbers) and reward, a row per known pair.

        Raises:
            RecpoError: the file is missing or no Parquet file; a column is missing or has another type; a value is
                missing, not finite or outside of [0, 1]; a pair occurs twice; or no user has a reward for every item.
        """
        users, items, reward = _columns(Path(file))
        user_ids, user_rows = np.unique(users, return_inverse=True)
        item_ids, item_rows = np.unique(items, return_inverse=True)
        pair = user_rows * len(item_ids) + item_rows
        order = np.argsort(pair, kind="stable")
        if len(again := np.flatnonzero(pair[order[1:]] == pair[order[:-1]])):
            first, second = (int(order[again[0] + one]) for one in (0, 1))
            message = (
                f"{file}: rows {first + 1} and {second + 1} both have the reward of user_id {users[first]} for item_id "
                f"{items[first]}, as {len(again):,} pairs in all have: keep one row per pair"
            )
            raise RecpoError(message, code="duplicate", field="user_id, item_id")
        rewards = np.full((len(user_ids), len(item_ids)), np.nan)
        rewards[user_rows, item_rows] = reward
        if np.isnan(rewards).any(axis=1).all():
            raise RecpoError(f"{file}: {_nobody_complete(~np.isnan(rewards))}", code="missing_value", field="reward")
        return cls(user_ids, item_ids, rewards)

    def presets(self) -> Mapping[str, float]:
        """The parameters that a world which replays this matrix starts from."""
        users, items = self.rewards.shape
        return {**WORLDS["replay"], "users": users, "items": items, "topics": items, "events": EVENTS_PER_USER * users}

    def preferences(self, parameters: SimulationParameters) -> Preferences:
        """Users and items of this matrix, and what the logging policy knows about them.

        Raises:
            RecpoError: a parameter that the matrix replaces differs from ``presets`` and from the defaults.
        """
        self._validate(parameters)
        rng = parameters.generator(_REPLAY_STREAM)
        users, items = self.rewards.shape
        known = ~np.isnan(self.rewards)
        mean = np.nansum(self.rewards, axis=0) / known.sum(axis=0)
        quality = (mean - mean.mean()) / max(float(mean.std()), np.finfo(np.float64).tiny)
        popularity = parameters.popularity_spread * rng.standard_normal(items) + parameters.popularity_quality * quality
        believed = self.rewards + parameters.topic_noise * rng.standard_normal(self.rewards.shape)
        logit = np.where(known, parameters.topic_sharpness * believed + popularity, -np.inf)
        nothing = np.zeros((users, parameters.latent_dim), np.float32)
        return Preferences(
            parameters,
            Users(
                user_id=self.user_ids,
                taste=nothing,
                direction=nothing,
                rate=np.zeros(users, np.float32),
                activity=draw_activity(parameters, rng),
                topic_logit=logit.astype(np.float32),
                rewards=self.rewards,
            ),
            Items(
                item_id=self.item_ids,
                topic=np.arange(items, dtype=np.int32),
                latent=np.zeros((items, parameters.latent_dim), np.float32),
                quality=quality.astype(np.float32),
                clickbait=np.zeros(items, bool),
                duration=draw_durations(parameters, rng),
                popularity=popularity.astype(np.float32),
            ),
        )

    def _validate(self, parameters: SimulationParameters) -> None:
        expected = SimulationParameters(**self.presets())  # type: ignore[arg-type]  # numbers of options
        for name in _REPLACED:
            if (found := getattr(parameters, name)) != (own := getattr(expected, name)):
                message = f"simulate: {name} is {found!r}, but the matrix decides it ({own!r}): leave it out"
                raise RecpoError(message, code="conflicting_options", field=name)


def presets_of(world: str, matrix: Path | str | None) -> Mapping[str, float]:
    """The parameters from which a world starts, with the file of rewards if it replays them; of an unknown one none."""
    if world == REPLAY and matrix is not None:
        return RewardMatrix.read(matrix).presets()
    return WORLDS.get(world, {})  # type: ignore[call-overload]  # a name that is checked later


def validate_files(verb: str, world: str, files: Mapping[str, Path | str | None]) -> None:
    """Checks that the files that a verb was given fit the world and each other.

    Args:
        verb: its name.
        world: preset of parameters.
        files: by option: ``matrix``, and ``item_table`` and ``user_table`` if the verb has them; None = not given.

    Raises:
        RecpoError: there is no such world; the world replays rewards and has no matrix, or a file is given for another
            world; or a table is not readable or lacks its key.
    """
    if world not in WORLDS:
        message = f"{verb}: world is {world!r}, expected one of {', '.join(WORLDS)}"
        raise RecpoError(message, code="unknown_name", field="world")
    if world == REPLAY and files["matrix"] is None:
        message = (
            f"{verb}: world is {REPLAY} and matrix is None, expected a Parquet file with the columns "
            f"{', '.join(_COLUMNS)}"
        )
        raise RecpoError(message, code="missing_option", field="matrix")
    given = {name: file for name, file in files.items() if file is not None}
    for name in given if world != REPLAY else ():
        message = f"{verb}: {name} is given and world is {world}: only the world {REPLAY} reads it"
        raise RecpoError(message, code="conflicting_options", field=name)
    for name, file in given.items():
        key = _TABLE_KEYS.get(name)
        if key is not None and key not in (found := _read(Path(file), name)).column_names:
            message = f"{file} has no column {key}, only {', '.join(found.column_names)}"
            raise RecpoError(message, code="missing_column", field=name)


def _read(file: Path, option: str) -> pa.Table:
    try:
        return pq.read_table(file)
    except FileNotFoundError as error:
        raise RecpoError(f"{file} is missing: {option} is a Parquet file", code="missing_file", field=option) from error
    except (pa.ArrowException, OSError) as error:
        message = f"{file} is not a Parquet file ({error}), as {option} has to be"
        raise RecpoError(message, code="wrong_file", field=option) from error


def _nobody_complete(known: NDArray[np.bool_]) -> str:
    """What to do with a matrix ``[U, V]`` of which no row is complete."""
    number = known.sum(axis=1)
    fullest = known[np.argsort(-number, kind="stable")[: max(1, len(known) // 10)]]
    return (
        f"no user has a reward for each of the {known.shape[1]:,} items (at most {number.max():,}), so no list has a "
        f"known value: leave out the items that few users know (the {len(fullest):,} users with the most rewards all "
        f"know the same {fullest.all(axis=0).sum():,} items), or give the unknown rewards of some users, where you can "
        "tell them, such as 0 for what a user refuses to see"
    )


def _columns(file: Path) -> tuple[IntArray, IntArray, FloatArray]:
    table = _read(file, "matrix")
    require_columns(table, _COLUMNS, str(file))
    if not table.num_rows:
        raise RecpoError(f"{file} has no rows, expected one per known reward", code="empty", field="matrix")
    for name, expected in zip(_COLUMNS, ("whole numbers", "whole numbers", "numbers"), strict=True):
        column = table[name]
        if not (pa.types.is_integer(column.type) or (expected == "numbers" and pa.types.is_floating(column.type))):
            remedy = ": number them, for example with pandas.factorize" if expected == "whole numbers" else ""
            message = f"{file}: {name} has type {column.type}, expected {expected}{remedy}"
            raise RecpoError(message, code="wrong_type", field=name)
        if column.null_count:
            row = int(np.argmax(pc.is_null(column).to_numpy()))
            message = f"{file}: row {row + 1} has no {name}: leave out the rows of unknown rewards"
            raise RecpoError(message, code="missing_value", field=name)
    users, items = (table[name].cast(pa.int64()).to_numpy() for name in ("user_id", "item_id"))
    reward = table["reward"].cast(pa.float64()).to_numpy()
    if (wrong := ~((reward >= 0) & (reward <= 1))).any():  # written so that nan is wrong too
        row = int(np.argmax(wrong))
        message = (
            f"{file}: row {row + 1} (user_id {users[row]}, item_id {items[row]}) has the reward {reward[row]:g}, and "
            f"{int(wrong.sum()):,} rows in all are not from 0 to 1: rescale the rewards, and leave out unknown ones"
        )
        raise RecpoError(message, code="out_of_range", field="reward")
    return users, items, reward
