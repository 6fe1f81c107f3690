"""A bundle that serves simulated users in the same way as a server: histories, program, exploration."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from recpo.base.errors import RecpoError
from recpo.lists.exploration import Exploration, Pool, SlateBatch
from recpo.serving.bundle import Bundle
from recpo.serving.histories import ITEM_ID, USER_ID, EncodedHistories
from recpo.serving.recommending import BATCH_SIZE
from recpo.serving.runtimes import excluded
from recpo.worlds.next_days import Shown
from recpo.worlds.preferences import IntArray
from recpo.worlds.truth import Truth

BEST = Exploration(temperature=0.0, epsilon=0.0, shortlist=1)  # the best items in order, each with propensity 1 / n


@dataclass(frozen=True)
class BundleService:
    """Shows the slates of a bundle; see ``recpo.worlds.next_days.ShowSlates``.

    Attributes:
        bundle: ranks items. It skips the items of the histories unless it may repeat items.
        exploration: how slates are drawn; None = the best items in their order.
        users: the world's table of users, for a policy that reads their features; None = the world has none.
    """

    bundle: Bundle
    exploration: Exploration | None = None
    users: pa.Table | None = None

    def validate(self, truth: Truth, repeat_after: float | None = None) -> None:
        """Checks that this bundle can serve a simulation.

        Raises:
            RecpoError: items may be repeated but the bundle does not repeat items; the bundle lists items that the
                simulation does not have, or too few for exploration or a request; or its policy reads request values
                that simulated users do not send.
        """
        self._validate_repeats(repeat_after)
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
        needed = size if self.exploration is None else max(size, min(self.exploration.shortlist, len(items)))
        if bundle.k < needed:
            raise RecpoError(
                f"simulate: {bundle.root} lists {bundle.k} items, exploration or a request needs {needed}: export with "
                "a larger --k, or set a smaller --exploration.shortlist",
                code="out_of_range",
                field="k",
            )

    def _validate_repeats(self, repeat_after: float | None) -> None:
        if repeat_after is not None and not (math.isfinite(repeat_after) and repeat_after >= 0):
            raise RecpoError(
                f"simulate: repeat_after is {repeat_after}, expected days from 0 on, or null for never",
                code="out_of_range",
                field="repeat_after",
            )
        if repeat_after is not None and not self.bundle.manifest.repeats:
            raise RecpoError(
                f"simulate: repeat_after is {repeat_after:g}, and {self.bundle.root} never lists items of the "
                "history: export it with --repeats true, or leave repeat_after out",
                code="conflicting_options",
                field="repeat_after",
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
        bundle, longest = self.bundle, int(sizes.max())
        exploration = BEST if self.exploration is None else self.exploration
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
                pools = self._pools(inputs, rows) if exploration.epsilon > 0 else None
                slates = exploration.sample_batch(
                    top_items[rows, :cut], scores[rows, :cut], int(size), generator, pools
                )
                self._keep(found, part.start + rows, slates)
        return found

    def _pools(self, inputs: EncodedHistories, rows: IntArray) -> list[Pool]:
        """The pool of uniform slates: the bundle's items without excluded ones."""
        exclude = excluded(inputs, self.bundle.manifest.repeats)
        return [Pool.of(len(self.bundle.items), exclude=exclude[row]) for row in rows]

    def _keep(self, found: Shown, rows: IntArray, slates: SlateBatch) -> None:
        places = slice(slates.items.shape[1])
        filled = slates.items > 0
        external = np.zeros(slates.items.shape, np.int64)
        external[filled] = self.bundle.items.to_external(slates.items[filled]).to_numpy(zero_copy_only=False)
        found.item_ids[rows, places], found.propensity[rows, places] = external, slates.propensity
        found.explored[rows, places] = slates.explored
        found.is_random[rows], found.lengths[rows] = slates.is_random, slates.lengths
