"""The saved truth of a simulation: the exact value of lists and of the requests of a day, by external ids."""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from recpo.artifacts.artifact import facts_in
from recpo.artifacts.checksums import seal, sha256, verify
from recpo.artifacts.documents import read_json
from recpo.artifacts.outputs import write_json
from recpo.base.errors import RecpoError, reading, validate_range
from recpo.worlds.parameters import MILLISECONDS_PER_DAY, SimulationParameters
from recpo.worlds.preferences import FloatArray, IntArray, Items, LoggingPolicy, Preferences, Users

FORMAT_VERSION = 2
_REMEDY = "name what `recpo simulate` wrote, or simulate again"
_CELLS_PER_CHUNK = 1 << 20  # size of a users x items matrix: 8 MiB each, for any size of the catalog
_DAYS_IN_MEMORY = 64  # number of cached logging policies; enough for a log of two months


class Truth:
    """True expected rewards by external ids; users are processed in chunks, so memory does not grow with their number.

    The reward of an item is ``P(satisfied) - dislike_cost P(dislike)``, in (-dislike_cost, 1), a deterministic function
    of user, item and day (see ``recpo.worlds.preferences``). ``day`` counts from the log's first day, may have a
    fraction and may be after the log; for given items, there may be one per user. In a living world, an item that is
    not yet born on that day cannot be shown: its reward is 0, and it is not disliked. Where rewards are replayed, they
    are those of the matrix, and everything about a user with unknown rewards is nan.

    Args:
        preferences: users, items and all parameters.
        world: name of the world of ``recpo.worlds.parameters.WORLDS`` that the parameters are based on; ``Truth``
            itself only reads the parameters.
    """

    def __init__(self, preferences: Preferences, world: str = "default") -> None:
        self.preferences = preferences
        self.world = world
        self._unknown = ~preferences.complete
        self._policy_of_day = lru_cache(_DAYS_IN_MEMORY)(partial(LoggingPolicy.of, preferences))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads the truth of a simulation.

        Args:
            path: directory written by ``recpo simulate``, or the ``truth/`` in it.

        Raises:
            RecpoError: there is no truth, or it has another version or is damaged.
        """
        path = Path(path)
        directory = path / "truth" if (path / "truth").is_dir() else path
        file = directory / "truth.json"
        content = facts_in(read_json(file, _REMEDY), file, FORMAT_VERSION, _REMEDY)
        faults = KeyError, TypeError, AttributeError, ValueError, OSError, RecursionError, NotImplementedError
        with reading(directory, *faults, remedy=_REMEDY, field="truth"):
            verify(directory, content["files"], _REMEDY)
            parameters, world = SimulationParameters(**content["parameters"]), str(content["world"])
            users = Users(**_read_arrays(directory / "users.parquet"))
            items = Items(**_read_arrays(directory / "items.parquet"))
        whole = (len(users.user_id), len(items.item_id)) == (parameters.users, parameters.items)
        if not whole or (items.born is not None) != parameters.lives:
            message = f"{directory} is damaged (rows or columns are missing): {_REMEDY}"
            raise RecpoError(message, code="damaged", field="rows")
        return cls(Preferences(parameters, users, items), world)

    def save(self, directory: Path) -> None:
        """Writes ``users.parquet``, ``items.parquet`` and ``truth.json`` into the new ``directory``."""
        parameters, users, items = self.preferences
        directory.mkdir(parents=True)
        files = {}
        for file, part in (("users.parquet", users), ("items.parquet", items)):
            columns = {name: values for name, values in part._asdict().items() if values is not None}
            _write_arrays(directory / file, columns)
            files[file] = sha256(directory / file)
        described = {"world": self.world, "parameters": parameters.as_json(), "files": files}
        write_json(directory / "truth.json", seal({"format_version": FORMAT_VERSION, **described}))

    @property
    def user_ids(self) -> IntArray:
        """Every user ``[U]``, ascending; some may have no event in the log."""
        return self.preferences.users.user_id

    @property
    def item_ids(self) -> IntArray:
        """The full catalog ``[V]``, ascending; some items may never have been exposed."""
        return self.preferences.items.item_id

    def day_of(self, timestamp: ArrayLike) -> FloatArray:
        """Converts milliseconds since the epoch to days since the start of the log, with fraction."""
        elapsed = np.asarray(timestamp, dtype=np.int64) - self.preferences.parameters.start_ms
        return elapsed / MILLISECONDS_PER_DAY

    @property
    def lives(self) -> bool:
        """Whether items are born and fade."""
        return self.preferences.parameters.lives

    def available(self, day: float) -> NDArray[np.bool_]:
        """Which items ``[V]`` have been born on ``day``."""
        return self.preferences.exists(np.arange(len(self.item_ids)), day)

    def policy_on(self, day: float) -> LoggingPolicy:
        """The logging policy of a day; in a living world, it shows the items born by then."""
        return self._policy_of_day(int(day) if self.lives else 0)

    def expected_reward(self, user_ids: ArrayLike, item_ids: ArrayLike, day: ArrayLike) -> FloatArray:
        """True expected reward ``[N, k]`` of items ``[N, k]`` for users ``[N]``."""
        return self._by_pairs(self.preferences.reward, user_ids, item_ids, day)

    def dislike_probability(self, user_ids: ArrayLike, item_ids: ArrayLike, day: ArrayLike) -> FloatArray:
        """True probability of a dislike ``[N, k]`` of items ``[N, k]`` exposed to users ``[N]``."""
        return self._by_pairs(self.preferences.dislike_probability, user_ids, item_ids, day)

    def propensity(self, user_ids: ArrayLike, item_ids: ArrayLike, day: float | None = None) -> FloatArray:
        """Probability ``[N, k]`` of items ``[N, k]`` under the logging policy; only living worlds depend on the day.

        Raises:
            RecpoError: the world is living and ``day`` is None; unknown ids.
        """
        users, items = self._rows_of_pairs(user_ids, item_ids)
        if day is None and self.lives:
            message = "propensity: day is None, expected a day: in a living world, each day has its own items"
            raise RecpoError(message, code="missing_option", field="day")
        return self.policy_on(0 if day is None else day).propensity(users, items)

    def top_k_value(self, user_ids: ArrayLike, item_ids: ArrayLike, day: ArrayLike) -> FloatArray:
        """Value ``[N]`` of recommending the lists ``[N, k]``: the mean expected reward over the positions."""
        rewards = self.expected_reward(user_ids, item_ids, day)
        if rewards.shape[1] == 0:
            raise RecpoError("item_ids has no columns: an empty list has no value", code="empty", field="item_ids")
        return rewards.mean(axis=1)

    def logging_value(self, user_ids: ArrayLike, day: float) -> FloatArray:
        """Exact value ``[N]`` of the logging policy."""
        users = _rows(user_ids, self.user_ids, "user_ids")
        value = np.empty(len(users))
        for part, reward in self._reward_to_all(users, day):
            probability = self.policy_on(day).propensity_of_all(users[part])
            value[part] = np.einsum("nv,nv->n", probability, reward)
        return value

    def uniform_value(self, user_ids: ArrayLike, day: float) -> FloatArray:
        """Exact value ``[N]`` of recommending items uniformly at random."""
        users = _rows(user_ids, self.user_ids, "user_ids")
        value, there = np.empty(len(users)), self.available(day)
        for part, reward in self._reward_to_all(users, day):
            value[part] = reward.mean(axis=1, where=there) if self.lives else reward.mean(axis=1)
        return value

    def oracle_top_k(self, user_ids: ArrayLike, k: int, day: float) -> IntArray:
        """The ``k`` best item ids ``[N, k]`` by true reward, best first: no list of available items has a higher value.

        Raises:
            RecpoError: ``k`` is larger than the number of items available on the day; invalid ids or day.
        """
        users, there = _rows(user_ids, self.user_ids, "user_ids"), self.available(day)
        available = int(there.sum())
        validate_range(1 <= k <= available, "k", f"must be from 1 to {available}, the number of items", k)
        best = np.empty((len(users), k), dtype=np.int64)
        for part, reward in self._reward_to_all(users, day):
            reward = np.where(there, reward, -np.inf)
            top = np.argpartition(-reward, k - 1, axis=1)[:, :k]
            order = np.argsort(-np.take_along_axis(reward, top, axis=1), axis=1, kind="stable")
            best[part] = np.take_along_axis(top, order, axis=1)
        return self.item_ids[best]

    def _by_pairs(
        self,
        formula: Callable[[FloatArray, NDArray[np.bool_]], FloatArray],
        user_ids: ArrayLike,
        item_ids: ArrayLike,
        day: ArrayLike,
    ) -> FloatArray:
        users, items = self._rows_of_pairs(user_ids, item_ids)
        days = _days(day, len(users))
        result = np.empty(items.shape)
        latent_dim = self.preferences.parameters.latent_dim
        for part in _parts(len(users), items.shape[1] * latent_dim):
            affinity = self.preferences.affinity(users[part], items[part], days[part])
            values = formula(affinity, self.preferences.items.clickbait[items[part]])
            result[part] = np.where(self.preferences.exists(items[part], days[part][:, None]), values, 0.0)
        result[self._unknown[users]] = np.nan
        return result

    def _reward_to_all(self, users: IntArray, day: float) -> Iterator[tuple[slice, FloatArray]]:
        """The users in parts, with their rewards ``[n, V]`` on a day, also of items that are not born yet."""
        _days(day, 0)
        for part in _parts(len(users), len(self.item_ids)):
            reward = self.preferences.reward(
                self.preferences.affinity_to_all(users[part], day), self.preferences.items.clickbait
            )
            reward[self._unknown[users[part]]] = np.nan
            yield part, reward

    def _rows_of_pairs(self, user_ids: ArrayLike, item_ids: ArrayLike) -> tuple[IntArray, IntArray]:
        users, items = _rows(user_ids, self.user_ids, "user_ids"), _rows(item_ids, self.item_ids, "item_ids", 2)
        if len(users) != len(items):
            message = f"item_ids has {len(items)} rows, expected one per user ({len(users)})"
            raise RecpoError(message, code="wrong_shape", field="item_ids")
        return users, items


def _rows(ids: ArrayLike, known: IntArray, name: str, dimensions: int = 1) -> IntArray:
    ids = np.asarray(ids)
    if ids.ndim != dimensions or not (np.issubdtype(ids.dtype, np.integer) or ids.size == 0):
        message = f"{name} has shape {ids.shape} and type {ids.dtype}, expected {dimensions}-d integers"
        raise RecpoError(message, code="wrong_shape", field=name)
    rows = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    unknown = known[rows] != ids
    if unknown.any():
        first = ", ".join(map(str, np.unique(ids[unknown])[:5]))
        message = f"{name}: {int(unknown.sum())} unknown in this simulation, such as {first}"
        raise RecpoError(message, code="unknown_name", field=name)
    return rows


def _days(day: ArrayLike, users: int) -> FloatArray:
    days = np.asarray(day, dtype=np.float64)
    if days.shape not in ((), (users,)) or not (np.isfinite(days) & (days >= 0)).all():
        least = f", the least is {days.min()}" if days.size else ""
        message = f"day has shape {days.shape}{least}; expected one number >= 0"
        message += f", or one for each of the {users} users" if users else ""
        raise RecpoError(message, code="wrong_shape", field="day")
    return np.broadcast_to(days, (users,))


def _parts(users: int, cells_per_user: int) -> Iterator[slice]:
    step = max(1, _CELLS_PER_CHUNK // max(1, cells_per_user))
    for begin in range(0, users, step):
        yield slice(begin, min(begin + step, users))


def _write_arrays(file: Path, arrays: dict[str, NDArray[Any]]) -> None:
    columns = {
        name: pa.array(values)
        if values.ndim == 1
        else pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
        for name, values in arrays.items()
    }
    pq.write_table(pa.table(columns), file, compression="zstd")


def _read_arrays(file: Path) -> dict[str, NDArray[Any]]:
    table = pq.read_table(file).combine_chunks()
    arrays = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_fixed_size_list(column.type):
            flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
            arrays[name] = flat.reshape(-1, column.type.list_size)
        else:
            arrays[name] = column.to_numpy()
    return arrays


class RequestValues(NamedTuple):
    """True values per request ``[R]``, means over the places of its slate; nan if the slate is empty.

    Attributes:
        value: true expected reward of the items shown.
        dislikes: true dislike probability of the items shown.
        logging_value: expected reward of the logging policy for the user.
        logging_dislikes: dislike probability of the logging policy for the user.
        oracle_value: true reward of the best available items of the same number, without those of
            the user's past that were excluded.
    """

    value: FloatArray
    dislikes: FloatArray
    logging_value: FloatArray
    logging_dislikes: FloatArray
    oracle_value: FloatArray


def request_values(
    truth: Truth, day: float, user_rows: IntArray, slates: IntArray, excluded: tuple[IntArray, IntArray]
) -> tuple[RequestValues, FloatArray]:
    """True values of slates that were shown on ``day``.

    Args:
        truth: truth of the simulation.
        day: the day that determines tastes.
        user_rows: ``[R]`` users of the requests.
        slates: ``[R, k]`` rows of the items shown, none of them excluded; -1 pads on the right.
        excluded: requests ``[P]``, and rows ``[P]`` of items that must not be shown in them.

    Returns:
        The values, and the log of the probability ``[V]`` that the logging policy, with as many independent exposures
        for the same users, would not have shown the item.
    """
    preferences, policy, absent = truth.preferences, truth.policy_on(day), ~truth.available(day)
    clickbait = preferences.items.clickbait
    order = np.argsort(excluded[0], kind="stable")
    owner, barred = excluded[0][order], excluded[1][order]
    values, not_shown = RequestValues(*np.full((5, len(user_rows)), np.nan)), np.zeros(len(clickbait))
    for part in _parts(len(user_rows), len(clickbait)):
        users, shown = user_rows[part], slates[part]
        affinity = preferences.affinity_to_all(users, day)
        reward, dislike = preferences.reward(affinity, clickbait), preferences.dislike_probability(affinity, clickbait)
        probability = policy.propensity_of_all(users)
        filled = shown >= 0
        length = filled.sum(1)
        places = np.where(length > 0, length, np.nan)
        values.value[part] = (np.take_along_axis(reward, shown, 1) * filled).sum(1) / places
        values.dislikes[part] = (np.take_along_axis(dislike, shown, 1) * filled).sum(1) / places
        values.logging_value[part] = np.einsum("rv,rv->r", probability, reward)
        values.logging_dislikes[part] = np.einsum("rv,rv->r", probability, dislike)
        of_part = slice(*np.searchsorted(owner, [part.start, part.stop]))
        reward[owner[of_part] - part.start, barred[of_part]] = -np.inf
        reward[:, absent] = -np.inf
        values.oracle_value[part] = _best(reward, length)
        with np.errstate(divide="ignore"):
            not_shown += length @ np.log1p(-probability)
    return values, not_shown


def _best(reward: FloatArray, length: IntArray) -> FloatArray:
    """Mean ``[R]`` of the ``length [R]`` largest numbers of each row; nan if length is 0."""
    longest = int(length.max(initial=0))
    if not longest:
        return np.full(len(reward), np.nan)
    top = -np.sort(np.partition(-reward, longest - 1, axis=1)[:, :longest], axis=1)
    kept = np.arange(longest) < length[:, None]
    total = np.where(kept, top, 0.0).sum(1)
    return total / np.where(length > 0, length, np.nan)
