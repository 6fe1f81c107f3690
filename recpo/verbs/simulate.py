"""The verb ``simulate``: simulates an interaction log with known truth, and later days that a policy serves.

On those days a bundle serves simulated users in the same way as a server: histories, program, exploration.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recpo.artifacts.checksums import sha256
from recpo.base.errors import NonNegativeFloat, RecpoError, validate_ranges
from recpo.lists.exploration import Exploration, Pool, SlateBatch
from recpo.serving.bundle import Bundle
from recpo.serving.histories import ITEM_ID, USER_ID
from recpo.serving.manifest import MANIFEST
from recpo.serving.recommending import BATCH_SIZE
from recpo.serving.runtimes import excluded
from recpo.verbs.verb import WritingVerb, function_of
from recpo.worlds.log import ServedDays, Simulation, write_simulation
from recpo.worlds.next_days import Shown, write_next_days
from recpo.worlds.parameters import SimulationParameters, World
from recpo.worlds.preferences import ITEM_TABLE, USER_TABLE, IntArray, Preferences
from recpo.worlds.replay import RewardMatrix, presets_of, validate_files
from recpo.worlds.truth import Truth

BEST = Exploration(temperature=0.0, epsilon=0.0, shortlist=1)  # the best items in order, each with propensity 1 / n


@dataclass(frozen=True, kw_only=True)
class WorldOptions(SimulationParameters):
    """A world, and how a policy serves it."""

    world: World = "default"
    """preset of parameters: default, confounded (popularity is independent of quality, more clickbait), skewed
    (little exploration), small (20,000 events of 500 users on 5,000 items), living (items are born and fade; tables
    of items and users beside the log), sparse (40 events of each of 1,500 users on 2,600 items, personal tastes) or
    replay (the rewards of ``matrix``). Parameters override the preset"""
    matrix: Path | str | None = None
    """Parquet file with the columns user_id, item_id (whole numbers) and reward (from 0 to 1), for the world replay.
    Its rewards are the true ones. Users without a reward for every item are only trained on"""
    exploration: Exploration | None = None
    """how the policy's slates are drawn; None = the best items in their order"""
    repeat_after: NonNegativeFloat | None = None
    """days after which the policy may show a user an item again (its bundle was exported with ``repeats``); None =
    never. The oracle follows the same rule. The lists of a loop's evaluation are then made without any exclusion"""

    @classmethod
    def presets(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The parameters of the named world."""
        return presets_of(given.get("world", "default"), given.get("matrix"))


@dataclass(frozen=True)
class Simulate(WorldOptions, WritingVerb[Simulation]):
    """Simulates an interaction log whose true preferences and exposure probabilities are known.

    Writes ``out/log/*.parquet`` (user_id, item_id, timestamp, watch_time, duration, dislike, propensity, is_random,
    request_id; sorted by user and time) and ``out/truth/``, from which the true value of any policy can be computed
    later. Equal arguments give equal bytes. In the world ``living``, ``out/items.parquet`` and ``out/users.parquet``
    are the item table (each item from its birth on) and the user table. The world ``replay`` has the users, the items
    and the true rewards of ``matrix`` (docs/evaluation.md).

    With ``policy`` and ``after``, a bundle replaces the simulator's own logging policy and serves the users of an
    existing world on the days after its log. ``out`` then also has ``served.json``: the true value of these days, of
    the logging policy and of the oracle (docs/exploration.md).

    Raises:
        RecpoError: ``out`` exists and ``overwrite`` is False, the world is unknown or a parameter is out of range. With
            a matrix: rewards that are not in [0, 1], duplicates, missing values, or no user with all rewards. With a
            policy: ``after`` is not a simulation or not consecutive days of one world, the bundle has another catalog
            or lists too few items.
    """

    first_day: ClassVar = ("out", "world", "users", "items", "events", "days", "seed", "matrix", "policy", "after")

    out: Path | str
    """output directory"""
    _: KW_ONLY
    item_table: Path | str | None = None
    """Parquet file with the column item_id and features of the items, of which the world replay keeps a copy"""
    user_table: Path | str | None = None
    """Parquet file with the column user_id and features of the users, of which the world replay keeps a copy"""
    policy: Path | str | Bundle | None = None
    """bundle that serves, or the directory of one; it was trained on logs of this world"""
    after: Path | str | Simulation | Sequence[Path | str | Simulation] | None = None
    """directory of the world that continues; or a list of the world and the days served since, in order"""

    def __post_init__(self) -> None:
        validate_ranges(self)
        if self.after is None:  # the parameters of a world that continues are known to fit each other
            super().__post_init__()

    @classmethod
    def presets(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The parameters of the named world, or of the world that continues."""
        after = given.get("after")
        if after is None:
            return super().presets(given)
        parameters = dataclasses.asdict(_opened(after)[0].truth.preferences.parameters)
        return {**parameters, "days": 1, "seed": 0}

    def execute(self) -> Simulation:
        """Draws a world and its log, or lets a policy serve the next days of one."""
        if self.policy is not None and self.after is not None:
            return self._serve(self.policy, _opened(self.after))
        for name in ("policy", "after", "exploration", "repeat_after"):
            if getattr(self, name) is not None:
                raise RecpoError(
                    f"simulate: {name} is given, expected policy and after together: a bundle, and the world that it "
                    "serves",
                    field=name,
                    code="missing_option",
                )
        parameters = self.part(SimulationParameters)
        validate_files("simulate", self.world, self._files)
        tables = {ITEM_TABLE: self.item_table, USER_TABLE: self.user_table}
        matrix = None if self.matrix is None else RewardMatrix.read(self.matrix)
        return write_simulation(
            Preferences.draw(parameters) if matrix is None else matrix.preferences(parameters),
            Path(self.out),
            world=self.world,
            tables={name: Path(file) for name, file in tables.items() if file is not None},
            overwrite=self.overwrite,
            progress=self.progress,
        )

    def _serve(self, policy: Path | str | Bundle, worlds: Sequence[Simulation]) -> Simulation:
        self._validate_world(worlds[0])
        validate_files("simulate", "default", self._files)  # the world that continues has its files
        bundle = Bundle.open(policy)
        users = None if worlds[0].users is None else pq.read_table(worlds[0].users)
        service = BundleService(bundle, self.exploration or BEST, users)
        service.validate(worlds[0].truth, self.repeat_after)
        who = {
            "bundle": bundle.root.resolve().name,
            "manifest": sha256(bundle.root / MANIFEST),
            "origin": dict(bundle.manifest.origin),
        }
        exploration = None if self.exploration is None else dataclasses.asdict(self.exploration)
        return write_next_days(
            worlds,
            Path(self.out),
            service,
            ServedDays(who, exploration, self.seed, repeat_after=self.repeat_after),
            days=self.days,
            overwrite=self.overwrite,
            progress=self.progress,
            inputs=[bundle.root],
        )

    @property
    def _files(self) -> dict[str, Path | str | None]:
        return {"matrix": self.matrix, "item_table": self.item_table, "user_table": self.user_table}

    def _validate_world(self, stands: Simulation) -> None:
        """The parameters of an existing world cannot change; those of its next days can."""
        truth = stands.truth
        if self.world not in ("default", truth.world):
            raise RecpoError(
                f"simulate: world is {self.world}, {stands.root} is {truth.world}: leave world out when a policy is "
                "given",
                field="world",
                code="conflicting_options",
            )
        for name, known in dataclasses.asdict(truth.preferences.parameters).items():
            value = getattr(self, name)
            if name not in ("days", "seed") and value != known:
                raise RecpoError(
                    f"simulate: {name} is {value!r}, {stands.root} has {known!r}: a policy serves an existing world; "
                    "give only days and seed",
                    field=name,
                    code="conflicting_options",
                )


def _opened(after: Path | str | Simulation | Sequence[Path | str | Simulation]) -> list[Simulation]:
    named = [after] if isinstance(after, Path | str | Simulation) else list(after)
    if not named:
        raise RecpoError(
            "simulate: after is an empty list, expected the world to continue", field="after", code="empty"
        )
    return [Simulation.open(one) for one in named]


@dataclass(frozen=True)
class BundleService:
    """Shows the slates of a bundle; see ``recpo.worlds.next_days.ShowSlates``.

    Attributes:
        bundle: ranks items. It skips the items of the histories unless it may repeat items.
        exploration: how slates are drawn.
        users: the world's table of users, for a policy that reads their features; None = the world has none.
    """

    bundle: Bundle
    exploration: Exploration = BEST
    users: pa.Table | None = None

    def validate(self, truth: Truth, repeat_after: float | None = None) -> None:
        """Checks that this bundle can serve a simulation.

        Raises:
            RecpoError: items may be repeated but the bundle does not repeat items; the bundle lists items that the
                simulation does not have, or too few for exploration or a request; or its policy reads request values
                that simulated users do not send.
        """
        if repeat_after is not None and not self.bundle.manifest.repeats:
            raise RecpoError(
                f"simulate: repeat_after is {repeat_after:g}, and {self.bundle.root} never lists items of the "
                "history: export it with --repeats true, or leave repeat_after out",
                code="conflicting_options",
                field="repeat_after",
            )
        self._validate_reads()
        items, bundle = self.bundle.items.to_external(np.arange(1, len(self.bundle.items) + 1)), self.bundle
        known = np.zeros(len(items), bool)
        if pa.types.is_integer(items.type):
            known = np.isin(items.to_numpy(zero_copy_only=False), truth.item_ids)
        if not known.all():
            raise RecpoError(
                f"simulate: {bundle.root} lists items that the simulation does not have, such as "
                f"{items[int(known.argmin())].as_py()!r}: name a bundle that was trained on logs of this simulation",
                code="mismatch",
                field="items",
            )
        size = min(truth.preferences.parameters.request_size, len(items))
        needed = max(size, min(self.exploration.shortlist, len(items)))
        if bundle.k < needed:
            raise RecpoError(
                f"simulate: {bundle.root} lists {bundle.k} items, exploration or a request needs {needed}: export with "
                "a larger --k, or set a smaller --exploration.shortlist",
                code="out_of_range",
                field="k",
            )

    def _validate_reads(self) -> None:
        reads = self.bundle.manifest.reads
        read = {
            "user features": bool(reads.user) and self.users is None,
            "context features": reads.context,
            "behaviors": reads.behaviors,
        }
        if asked := [name for name, one in read.items() if one]:
            raise RecpoError(
                f"simulate: the policy of {self.bundle.root} reads {' and '.join(asked)}, which this simulation does "
                "not have: use a bundle whose policy reads histories and item features alone, or, in a living world, "
                "user features too",
                code="unsupported",
                field="policy",
            )
        columns = () if self.users is None else self.users.column_names
        wanted = [feature.source for feature in self.bundle.manifest.features.user]
        if lacking := [name for name in wanted if name not in columns]:
            raise RecpoError(
                f"simulate: the policy of {self.bundle.root} reads the user features {', '.join(lacking)}, the world's "
                f"table of users has {', '.join(columns)}: use a bundle that was trained on this world",
                code="mismatch",
                field=lacking[0],
            )

    def __call__(
        self,
        histories: pa.Table,
        exclude: pa.Table,
        user_ids: IntArray,
        sizes: IntArray,
        generator: np.random.Generator,
    ) -> Shown:
        """See ``ShowSlates``."""
        bundle, exploration, longest = self.bundle, self.exploration, int(sizes.max())
        width = min(max(longest, exploration.shortlist), bundle.k)
        found = Shown(
            item_ids=np.zeros((len(sizes), longest), np.int64),
            propensity=np.full((len(sizes), longest), np.nan),
            explored=np.zeros((len(sizes), longest), bool),
            is_random=np.zeros(len(sizes), bool),
            lengths=np.zeros(len(sizes), np.int64),
        )
        users = self.users if bundle.manifest.features.user else None
        # a bundle that does not repeat items already skips the whole history
        barred = exclude.select([USER_ID, ITEM_ID]) if bundle.manifest.repeats else None
        read = bundle.reader.read(histories, exclude=barred, users=user_ids, user_features=users)
        for part, inputs in read.batches(BATCH_SIZE):
            top_items, scores = bundle.runtime.recommend(inputs, width)
            for size in np.unique(sizes[part]):
                rows = np.flatnonzero(sizes[part] == size)
                cut = min(width, max(size, exploration.shortlist))
                pools = None
                if exploration.epsilon > 0:  # uniform slates are of the bundle's items without excluded ones
                    left_out = excluded(inputs, bundle.manifest.repeats)[rows]
                    pools = [Pool.of(len(bundle.items), exclude=row) for row in left_out]
                slates = exploration.sample_batch(
                    top_items[rows, :cut], scores[rows, :cut], int(size), generator, pools
                )
                self._keep(found, part.start + rows, slates)
        return found

    def _keep(self, found: Shown, rows: IntArray, slates: SlateBatch) -> None:
        places = slice(slates.items.shape[1])
        filled = slates.items > 0
        external = np.zeros(slates.items.shape, np.int64)
        external[filled] = self.bundle.items.to_external(slates.items[filled]).to_numpy(zero_copy_only=False)
        found.item_ids[rows, places], found.propensity[rows, places] = external, slates.propensity
        found.explored[rows, places] = slates.explored
        found.is_random[rows], found.lengths[rows] = slates.is_random, slates.lengths


simulate = function_of(Simulate)
