"""The verb ``factorize``: fits a matrix factorization of graded feedback, as a reward and as a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Literal

from recpo.artifacts import output_directory, write_resolved
from recpo.data.prepared import Period, Prepared
from recpo.evaluation.beyond_accuracy import Exposure
from recpo.evaluation.cautions import alike
from recpo.factorization.factors import Factors
from recpo.factorization.graded import FactorOptions
from recpo.factorization.selection import fit_factors, validation_batches

_LISTED_USERS = 1000


def factorize(
    prepared: Prepared | str | PathLike[str],
    out: str | PathLike[str] | None = None,
    *,
    method: Literal["variational", "als"] = FactorOptions.method,
    ranks: Sequence[int] | None = None,
    ridges: Sequence[float] = FactorOptions.ridges,
    sweeps: int = FactorOptions.sweeps,
    seed: int = 0,
    max_history: int | None = None,
    uncertainty: bool = True,
    lower_bound: float = FactorOptions.lower_bound,
    period: Period = FactorOptions.period,
    overwrite: bool = False,
    progress: bool = False,
) -> Factors:
    """Fits ``grade(user, item) = mean + p · q + user bias + item bias`` on the graded events of the training period.

    One shard is in memory at a time. If several ranks and ridges are given, the one with the smallest squared error on
    the validation period is chosen; users are folded in from the history before it. The grade of an event is the middle
    of its feedback level's quartile, 0 for a dislike (``recpo.feedback.GRADES``).

    Args:
        prepared: prepared data, or its directory.
        out: output directory; None = keep the model in memory only.
        method: "variational" keeps a posterior of every user and item and learns their priors from the data (Lim and
            Teh, 2007); "als" is alternating least squares with one ridge.
        ranks: numbers of factors to try; None = 8 and 16, with "als" also 4; for a held-out period, 8.
        ridges: ridges that "als" tries: the weight of the squared factors and biases, relative to a weight of 1 per
            event.
        sweeps: number of passes over the training events per model.
        seed: seed of the initial item factors.
        max_history: number of history events that a fold-in reads; null = ``max_context`` of the prepared data.
        uncertainty: keep the covariances that lower bounds need.
        lower_bound: the model's own lists rank by the expected grade minus this many standard deviations; 0 without
            uncertainty. ``tilt`` and ``FactorReward`` have separate options for bounds.
        period: period whose events are fitted. A model of "valid" is independent of the events that policies and
            rewards learned from ("train"), so it can compare their lists as a ``FactorReward``.
        overwrite: replace ``out`` if it exists.
        progress: show a progress bar on a terminal.

    Returns:
        The model: it recommends, folds in any history, and is a reward (``FactorReward``).

    Raises:
        RecpoError: ``out`` exists, no event has a grade, or no validation event can select rank and ridge.
    """
    tried = None if ranks is None else tuple(ranks)
    options = FactorOptions(method, tried, tuple(ridges), sweeps, seed, max_history, uncertainty, lower_bound, period)
    data = prepared if isinstance(prepared, Prepared) else Prepared.open(str(prepared))
    if out is None:
        return fit_factors(data, options, progress=progress)
    with output_directory(Path(out), kind="factors", overwrite=overwrite, inputs=[data.root]) as partial:
        factors = fit_factors(data, options, progress=progress)
        factors.write_files(partial)
        write_resolved(partial / "resolved.yaml")
    return factors


def similar_lists(factors: Factors, data: Prepared, k: int = 10) -> str | None:
    """A warning if the model's lists hardly differ between users (``recpo.evaluation.cautions.alike``); None if not.

    Of up to 1,000 users of the validation period, without the items of their past.

    Args:
        factors: the model.
        data: prepared data of the same items.
        k: length of the lists.
    """
    k = min(k, data.num_items)
    exposure, users = Exposure(data.num_items, [k]), 0
    for batch in validation_batches(data, factors.max_history, _LISTED_USERS):
        exposure.add(factors.recommend(batch.feedback.histories, k, batch.exclude).item_ids)
        users += len(batch.user_ids)
    totals = exposure.totals()
    shares = {"coverage": totals[f"coverage@{k}"], "overlap": totals[f"overlap@{k}"]}
    return alike("factors", k=k, users=users, items=data.num_items, **shares)
