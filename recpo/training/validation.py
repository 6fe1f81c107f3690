"""Metrics of the validation period, the monitor among them.

Metrics are those of rankings of the full catalog, or of the scores of a reward model. The monitor is the one that early
stopping, ``best.ckpt`` and the final report follow. NDCG on logged positives rewards agreement with the logging policy,
so it selects pre-trained policies well and aligned policies badly. Policies that learn from feedback are selected by
held-out feedback.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpo.base.contracts import Objective, Policy, RewardFunction, StatePolicy
from recpo.base.errors import RecpoError
from recpo.base.types import EvaluationBatch, FeedbackBatch, Slates
from recpo.evaluation.beyond_accuracy import POPULARITY_BINS, popularity_bins
from recpo.evaluation.off_policy.measure import propensity_share
from recpo.log.prepared import Prepared
from recpo.objectives.likelihood import Likelihood
from recpo.objectives.preference import PreferenceObjective
from recpo.objectives.reward_model import PointwiseReward
from recpo.ops.exposures import Targets, exposure_auc, held_out_targets, unseen_auc, with_unseen
from recpo.ops.ranking import first_places, hit_rate, ndcg, precision, ranked_hits, recall
from recpo.training.networks import ItemScore, item_scores
from recpo.training.options import LearningOptions, Monitor

MAX_WEIGHT = 100.0
"""Bound on the importance weights of SNIPS. Clipping them biases the estimate toward the logging policy."""


def tail_items(item_counts: Tensor) -> Tensor:
    """The items 0..V that are in the tail or have no event, ``[V + 1]`` bool, from their training counts ``[V]``.

    The tail is defined by ``popularity_bins``: the least popular items, after those that have 80 % of the events.
    """
    return popularity_bins(torch.nn.functional.pad(item_counts, (1, 0))) >= POPULARITY_BINS.index("tail")


class ValidationMetrics:
    """Means over users of NDCG@k and HitRate@k on positives, and of the disliked share of the lists.

    Items that must not be listed (``EvaluationBatch.exclude``) are no targets. Users without a positive target are left
    out of the first two means, and users without a held-out dislike out of the third. ``coverage@k`` is the share of
    the catalog on at least one list. With ``item_counts``, ``Recall_head@k`` and ``Recall_tail@k`` are the recalls of
    the positives outside and inside the tail of the catalog (``tail_items``).

    Metrics of the held-out exposures do not depend on the lists (``metrics_of_exposures``, ``exposure_sums``). With a
    ``validation_reward``, ``reward@k`` is its mean over the lists of all users with held-out events. Each of these
    metrics is left out if it cannot be computed (no user with both kinds of exposures, no propensity).

    Args:
        options: ``validation_k``, limited by a smaller catalog, though the names of the metrics keep it; and what else
            is measured.
        num_items: catalog size.
        item_counts: ``[V]`` training events of the items 1..V.
    """

    def __init__(self, options: LearningOptions, num_items: int, item_counts: Tensor | None = None) -> None:
        k, self._reward = options.validation_k, options.validation_reward
        self._asked, self._k = k, min(k, num_items)
        self._tail = None if item_counts is None else tail_items(item_counts)
        means = ["NDCG", "HitRate", "disliked"] + ["Recall_head", "Recall_tail"] * (item_counts is not None)
        self._names = [f"{name}@{k}" for name in means]
        self._of_exposures, self._num_items = metrics_of_exposures(options), num_items
        self._optional = self._of_exposures + [f"reward@{k}"] * (self._reward is not None)
        size = len(self._names) + len(self._optional)
        self._sums = torch.zeros(size, 2, dtype=torch.float64)  # (numerator, denominator) of each metric
        self._shown = torch.zeros(num_items + 1, dtype=torch.float64)

    @property
    def names(self) -> list[str]:
        """Names of all metrics."""
        return [*self._names, *self._optional, f"coverage@{self._asked}"]

    @torch.no_grad()
    def update(self, policy: Policy, batch: EvaluationBatch) -> None:
        """Adds the users of ``batch``."""
        items = policy.recommend(batch.feedback.histories, self._k, batch.exclude).item_ids
        targets = held_out_targets(batch).without(batch.exclude)
        liked = ranked_hits(items, targets.item_ids, targets.positive)
        disliked = ranked_hits(items, targets.item_ids, targets.disliked)
        columns = [metric(liked, [self._k]) for metric in (ndcg, hit_rate)] + [precision(disliked, [self._k])]
        if self._tail is not None:
            in_tail = self._tail.to(items.device)[targets.item_ids]
            parts = [targets.positive & ~in_tail, targets.positive & in_tail]
            columns += [recall(ranked_hits(items, targets.item_ids, part), [self._k]) for part in parts]
        per_user = torch.cat(columns, 1).T.cpu().double()
        known = per_user.isfinite()
        sums = [torch.stack([per_user.nan_to_num(0.0).sum(1), known.sum(1).double()], 1)]
        sums.append(exposure_sums(policy, batch, self._of_exposures, self._num_items))
        if self._reward is not None:
            sums.append(_list_reward(self._reward, batch.feedback, items))
        self._sums += torch.cat(sums)
        self._shown[items.flatten().cpu()] = 1.0

    def compute(self, reduce_sum: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The means over the users of all ranks, 0 if there are none. Resets the sums."""
        totals, shown = reduce_sum(self._sums), reduce_sum(self._shown)
        self._sums, self._shown = torch.zeros_like(self._sums), torch.zeros_like(self._shown)
        always, denominators = len(self._names), totals[:, 1].clone()
        denominators[:always].clamp_(min=1.0)
        means = dict(zip([*self._names, *self._optional], (totals[:, 0] / denominators).float(), strict=True))
        known = {name: value for name, value in means.items() if value.isfinite()}
        return known | {f"coverage@{self._asked}": (shown[1:] > 0).double().mean().float()}


def exposure_sums(policy: Policy, batch: EvaluationBatch, names: Sequence[str], num_items: int) -> Tensor:
    """Numerators and denominators ``[len(names), 2]`` float64, on the CPU, of ``names`` over a batch of users.

    Let ``l(i)`` be the log-probability of an item at the start of the period, P a user's positives and N the other
    exposures (``held_out_targets``), each item once:

    - ``AUC_other``: the mean over users of ``exposure_auc``.
    - ``AUC_mixed``: the mean over users of ``unseen_auc``. It scores 50 more items per user.
    - ``pair_loss``: the mean over users of the mean over ``P x N`` of ``-log sigmoid(l(p) - l(n))``.
    - ``SNIPS``: ``sum w r / sum w`` over exposures with a propensity ``p0`` and a grade or a dislike, with ``w =
      min(exp(l) / p0, MAX_WEIGHT)``, where ``r`` is the grade, minus 1 for a dislike: the mean logged reward of the
      items that the policy would draw (Swaminathan and Joachims, 2015).
    """
    slates, targets = batch.feedback.slates, held_out_targets(batch)
    rewarded = torch.zeros_like(slates.mask)
    reward = behavior = slates.mask.float()
    if slates.grade is not None and slates.logp_behavior is not None:
        dislike = rewarded if slates.dislike is None else slates.dislike.bool()
        reward, behavior = slates.grade.nan_to_num(0.0) - dislike.float(), slates.logp_behavior
        rewarded = slates.mask & behavior.isfinite() & (dislike | ~slates.grade.isnan())
    needed = targets.positive | targets.other | rewarded
    scored, logged = batch.feedback, slates.item_ids.shape[1]
    if "AUC_mixed" in names:
        scored = with_unseen(batch, num_items)
        needed = torch.cat([needed, scored.slates.mask[:, logged:]], 1)
    logp, of_unseen = policy.log_prob(scored, needed).sum(-1).tensor_split([logged], 1)
    weight = (logp - behavior)[rewarded].double().exp().clamp(max=MAX_WEIGHT)
    sums = {
        "AUC_other": _over_users(exposure_auc(logp, targets)["AUC_other"].double()),
        "SNIPS": torch.stack([(weight * reward[rewarded].double()).sum(), weight.sum()]),
    }
    if "AUC_mixed" in names:
        mixed = unseen_auc(logp, of_unseen, targets, scored.slates.item_ids[:, logged:])["AUC_mixed"]
        sums["AUC_mixed"] = _over_users(mixed.double())
    if "pair_loss" in names:
        sums["pair_loss"] = _over_users(exposure_pair_loss(logp, targets))
    return torch.stack([sums[name] for name in names]).cpu()


def _over_users(metric: Tensor) -> Tensor:
    """Sum over the users with a known value, and their number."""
    return torch.stack([metric.nansum(), metric.isfinite().sum().double()])


def exposure_pair_loss(logp: Tensor, targets: Targets) -> Tensor:
    """``-log sigmoid(l(p) - l(n))``, the mean over each user's pairs, ``[B]`` float64; nan for users without a pair.

    Args:
        logp: ``[B, S]`` scores ``l`` of the slate items.
        targets: the positives ``p`` and the others ``n``; a repeated item counts once.
    """
    positive = first_places(targets.item_ids, targets.positive).cpu()
    negative = first_places(targets.item_ids, targets.other).cpu()
    logp, device = logp.cpu(), logp.device  # user by user, which on another device would be a wait for each
    losses = logp.new_full((len(logp),), torch.nan, dtype=torch.float64)
    for row in (positive.any(1) & negative.any(1)).nonzero().squeeze(1).tolist():
        own = logp[row].double()
        losses[row] = torch.nn.functional.softplus(own[negative[row]][None] - own[positive[row]][:, None]).mean()
    return losses.to(device)


def _list_reward(reward: RewardFunction, batch: FeedbackBatch, items: Tensor) -> Tensor:
    """Sum over users of the mean known reward of their lists ``[B, k]``, and the number of users, ``[1, 2]``."""
    kept = (items > 0) & batch.slates.mask.any(1, keepdim=True)
    rewards = reward(batch, Slates(items * kept, batch.histories.lengths[:, None] * kept, kept)).double()
    per_user = rewards.masked_fill(~kept, torch.nan).nanmean(1)
    return _over_users(per_user)[None].cpu()


class ScoreMetrics:
    """Validation metrics of a reward model, on the held-out exposures of the validation split.

    ``log_likelihood``, for a pointwise model, is the mean over known targets. ``AUC_other`` is the mean over users of
    the probability that the first score ranks a positive item above another labeled one. A metric is left out if it
    cannot be computed (no known target, no user with both kinds of items).

    Args:
        objective: the trained objective.
        head: its scores.
    """

    def __init__(self, objective: Objective, head: ItemScore) -> None:
        self._pointwise = objective if isinstance(objective, PointwiseReward) else None
        self._head = head
        self._sums = torch.zeros(len(self.names), 2, dtype=torch.float64)  # (sum, number) of each metric

    @property
    def names(self) -> list[str]:
        """Names of the metrics, in the order of ``compute``."""
        return ["AUC_other"] if self._pointwise is None else ["log_likelihood", "AUC_other"]

    @torch.no_grad()
    def update(self, policy: Policy, batch: EvaluationBatch) -> None:
        """Adds the users of ``batch``."""
        assert isinstance(policy, StatePolicy)
        slates = batch.feedback.slates
        scores = item_scores(policy, self._head, batch.feedback.histories, slates)
        sums = []
        if self._pointwise is not None:
            assert slates.grade is not None
            assert slates.dislike is not None
            targets, known = self._pointwise.targets(slates.grade, slates.dislike, slates.behaviors, slates.positive)
            known = known & slates.mask[..., None]
            likelihood = -self._pointwise.losses(scores, targets, known).double().sum()
            sums.append(torch.stack([likelihood, known.sum().double()]))
        sums.append(_over_users(exposure_auc(scores[..., 0], held_out_targets(batch))["AUC_other"].double()))
        self._sums += torch.stack(sums).cpu()

    def compute(self, reduce_sum: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The known means over the users of all ranks. Resets the sums."""
        totals = reduce_sum(self._sums)
        self._sums = torch.zeros_like(self._sums)
        known = zip(self.names, *totals.unbind(1), strict=True)
        return {name: (total / number).float() for name, total, number in known if number}


LOWER_IS_BETTER: frozenset[Monitor] = frozenset({"pair_loss"})
MIN_PROPENSITY_SHARE = 0.5
"""Minimum share of validation events with a propensity for SNIPS as the default."""


class HeldOutFacts(NamedTuple):
    """Which metrics the validation period supports.

    Attributes:
        propensity_share: share of its events with a logged propensity.
        comparing_users: users with both a positive event and another labeled or disliked one.
    """

    propensity_share: float = 0.0
    comparing_users: int = 0


def held_out_facts(prepared: Prepared) -> HeldOutFacts:
    """Counts over the validation shards, one in memory at a time."""
    comparing = 0
    for shard in range(prepared.num_shards("valid")):
        columns = prepared.columns("valid", shard, ["user_index", "label", "dislike", "is_target"])
        target, dislike = columns["is_target"].astype(bool), columns["dislike"].astype(bool)
        positive = prepared.feedback.rule.positive(columns["label"], dislike) & target
        other = target & ~positive & (dislike | ~np.isnan(columns["label"]))
        users = columns["user_index"]
        comparing += len(np.intersect1d(users[positive], users[other]))
    return HeldOutFacts(propensity_share(prepared, "valid"), comparing)


def default_monitor(options: LearningOptions, facts: HeldOutFacts) -> Monitor:
    """The default metric for an objective.

    - A reward model: its held-out log-likelihood, or ``AUC_other`` if it has no probabilities.
    - Pre-training (``Likelihood`` of all events): ``NDCG``.
    - Objectives that learn from feedback: ``reward`` if ``validation_reward`` is given; ``AUC_other`` for preference
      lists of logged events; otherwise ``SNIPS`` if at least ``MIN_PROPENSITY_SHARE`` of the validation events have a
      propensity, else ``AUC_other``. If the period has nothing to compare: ``NDCG``, with a warning.
    """
    objective = options.objective
    if "score" in objective.requires:
        return "log_likelihood" if isinstance(objective, PointwiseReward) else "AUC_other"
    if isinstance(objective, Likelihood) and not objective.positive_only and options.rollout is None:
        return "NDCG"
    if options.validation_reward is not None:
        return "reward"
    compares_logged = "chosen" in objective.requires and options.rollout is None
    if facts.propensity_share >= MIN_PROPENSITY_SHARE and not compares_logged:
        return "SNIPS"
    if facts.comparing_users:
        return "AUC_other"
    warnings.warn(
        "no user of the validation period has a positive event and another labeled one, and it has no propensities: "
        "the best checkpoint is chosen by NDCG, which rewards agreeing with the log; give validation_reward",
        stacklevel=2,
    )
    return "NDCG"


def metrics_of_exposures(options: LearningOptions) -> list[str]:
    """The metrics of held-out exposures for these options; ``AUC_mixed`` only as the monitor, as it takes longer."""
    names = ["AUC_other", *["pair_loss"] * has_pair_loss(options.objective), "SNIPS"]
    return names + ["AUC_mixed"] * (options.monitor == "AUC_mixed")


def has_pair_loss(objective: Objective) -> bool:
    """Whether ``pair_loss`` is meaningful for a policy that the objective trains.

    Objectives for preference lists have a ``beta`` and a reference, which ``pair_loss`` ignores: it rises while the
    value of the lists rises (docs/training.md).
    """
    return not isinstance(objective, PreferenceObjective)


def validate_monitor(monitor: Monitor, options: LearningOptions, facts: HeldOutFacts) -> None:
    """Raises ``RecpoError`` if the metric cannot be computed."""
    name = type(options.objective).__name__
    scores = "score" in options.objective.requires
    known = {"log_likelihood", "AUC_other"} if isinstance(options.objective, PointwiseReward) else {"AUC_other"}
    if scores and monitor not in known:
        raise RecpoError(
            f"monitor: {monitor} is a metric of policies, and objective {name} trains a reward model: set monitor to "
            f"{' or '.join(sorted(known))}, or leave it out",
            code="conflicting_options",
            field="monitor",
        )
    if not scores and monitor == "log_likelihood":
        raise RecpoError(
            f"monitor: log_likelihood is a metric of reward models, and objective {name} trains a policy: leave it out",
            code="conflicting_options",
            field="monitor",
        )
    if monitor == "reward" and options.validation_reward is None:
        raise RecpoError(
            "monitor: reward is the value of lists under a reward: set validation_reward",
            code="missing_option",
            field="validation_reward",
        )
    if monitor == "SNIPS" and not facts.propensity_share:
        raise RecpoError(
            "monitor: SNIPS weighs held-out exposures by logged propensities, and no validation event has one: set "
            "monitor to AUC_other, or map the log's propensity column in `recpo prepare`",
            code="missing_column",
            field="propensity",
        )
    if monitor == "pair_loss" and not has_pair_loss(options.objective):
        raise RecpoError(
            f"monitor: pair_loss rises while {name} trains a better policy, as it has neither its beta nor its "
            "reference: set monitor to AUC_other, or leave it out",
            code="conflicting_options",
            field="monitor",
        )
    if monitor in ("AUC_other", "AUC_mixed", "pair_loss") and not facts.comparing_users:
        raise RecpoError(
            f"monitor: {monitor} compares a user's positive events with the user's others, and no user of the "
            "validation period has both: set monitor to NDCG, or prepare the log with a longer validation period",
            code="empty",
            field="monitor",
        )
