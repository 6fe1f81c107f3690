"""Off-policy value within the pass over held-out users, with its setting from prepared data, and of plain arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from recpo.base.contracts import Policy, RewardFunction
from recpo.base.errors import RecpoError, validate_range
from recpo.base.types import FeedbackBatch, Histories, Slates
from recpo.evaluation.candidates import HeldOut
from recpo.evaluation.measures import Measure, Observed
from recpo.evaluation.off_policy import results
from recpo.evaluation.off_policy.estimators import (
    LOGGED_MEAN,
    AdditiveRewardModel,
    OffPolicyOptions,
    RewardedExposures,
    Rows,
)
from recpo.log.prepared import Period, Prepared
from recpo.log.schema import Derived
from recpo.ops.ranking import is_member
from recpo.rewards.graded import Chunk, chunks_of, repeated
from recpo.rewards.prior_features import of_consumption

#: Draws ``(histories, n) -> [B, n]`` items from the policy, with replacement; 0 = not an item.
Sampler = Callable[[Histories, int], Tensor]


class OffPolicyMeasure(Measure):
    """Estimates the earnings that a contender would have had in the held-out period; one instance per contender.

    The policy is frozen at the start of the period: its choices depend on the user's history up to then, and it makes
    one choice per exposure of the period. This context is valid for any logging policy, even one that learned during
    the period. The targets are ``policy``, an item drawn from the policy, if it gives exact probabilities (a draw that
    is not an item, or not a candidate, shows nothing and earns 0); ``top_k``, an item drawn uniformly from its list of
    k, whose value is the mean reward over the k places; and, with ``depth``, ``discounted_k``, an item drawn from a
    deep list with probabilities ``discounted``. The first k places have a large part of its value, and all others of
    the exposures, so its estimate has less variance than that of ``top_k``, and orders recommenders almost alike.

    Memory: some numbers per user and per item. ``result`` returns the estimates; ``update`` and ``totals`` are empty.
    """

    def __init__(self, setting: OffPolicySetting, sample: Sampler | None = None) -> None:
        """``sample`` draws from the policy; None = the estimators that need a reward model only for lists."""
        self._setting, self._options, self._model, self._sample = setting, setting.options, setting.model, sample
        self._targets: dict[str, results.TargetSums] = {
            results.LOGGING_POLICY: results.TargetSums([LOGGED_MEAN], setting.num_items)
        }
        self._without_reward = self._without_propensity = self._batches = 0

    def update(self, observed: Observed) -> Mapping[str, Tensor]:
        """Adds a batch; there are no per-user metrics."""
        batch = observed.batch.feedback
        slates = batch.slates
        logged = slates.mask if slates.is_logged is None else slates.mask & slates.is_logged
        reward = self._setting.reward(batch, slates).double()
        propensity = self._setting.propensities(observed.batch.user_ids, slates)
        rewarded = logged & ~reward.isnan()
        usable = rewarded & ~propensity.isnan()
        self._without_reward += int((logged & ~rewarded).sum())
        self._without_propensity += int((rewarded & ~usable).sum())
        self._check_range(reward[rewarded])
        users, one = observed.batch.user_ids[:, None].expand_as(slates.item_ids), torch.ones_like(reward)
        who, what, *columns = _numpy(rewarded, users, slates.item_ids, reward, one, one)
        self._targets[results.LOGGING_POLICY].update(who, what, Rows(*columns))
        predicted = [] if self._model is None else [self._model(observed.batch.user_ids, slates.item_ids)]
        for name, probability, items, v_hat in self._choices(observed):
            # without v_hat, the reward model gives no value of the target
            model = [] if v_hat is None else [*predicted, v_hat[:, None].expand_as(reward)]
            who, what, *columns = _numpy(usable, users, slates.item_ids, reward, probability, propensity, *model)
            estimators = self._options.estimators(bool(model))
            sums = self._targets.setdefault(name, results.TargetSums(estimators, self._setting.num_items))
            sums.update(who, what, Rows(*columns))
            if items is not None:
                chosen = items.flatten() if name == results.POLICY else items[items > 0]
                sums.add_choices(chosen.cpu().numpy())
        self._batches += 1
        return {}

    def result(self) -> results.OffPolicyResult:
        """The estimates from all batches so far.

        Raises:
            RecpoError: no row has both a reward and a propensity.
        """
        totals = {
            name: sums.compute(
                by_user=self._options.average == "user",
                rows_without_reward=self._without_reward,
                rows_without_propensity=0 if name == results.LOGGING_POLICY else self._without_propensity,
            )
            for name, sums in self._targets.items()
        }
        if not any(total.diagnostics.rows for name, total in totals.items() if name != results.LOGGING_POLICY):
            raise RecpoError(
                f"off-policy value refused: none of the held-out exposures has both a reward and a propensity "
                f"({self._without_reward:,} lack a reward, {self._without_propensity:,} a propensity of the kind "
                f"'{self._options.propensity}'); choose another kind of propensity",
                code="empty",
                field="off_policy.propensity",
            )
        return results.result_of(totals, self._options)

    def _choices(self, observed: Observed) -> Iterator[tuple[str, Tensor, Tensor | None, Tensor | None]]:
        """Each target, with its probability of the logged items, the items that it would show, and its value.

        In the contexts of the batch: ``[B, S]`` float64; ``[B, n]``, each equally likely, 0 = not an item, None = it
        cannot be sampled; ``[B]`` by the reward model, None = there is no model, or it cannot be sampled.
        """
        batch, lists = observed.batch.feedback, observed.lists.item_ids
        if observed.logp is not None:
            drawn, probability = self._draw(batch.histories), observed.logp.double().exp()
            if observed.unavailable is not None:
                absent = is_member(batch.slates.item_ids, observed.unavailable)
                probability = probability.masked_fill(absent, 0.0)
                drawn = None if drawn is None else drawn * ~is_member(drawn, observed.unavailable)
            # a draw that is not an item (codes without an item, if normalized over the codebook), or an item that was
            # not a candidate, earns nothing
            yield results.POLICY, probability, drawn, self._value(observed.batch.user_ids, drawn)
        for k in self._options.top_k or self._setting.ks:
            longest = lists.shape[1]
            fits = longest >= min(k, self._setting.num_items)
            validate_range(fits, "off_policy.top_k", f"must be at most {longest}, the length of the lists", k)
            first = lists[:, :k]
            filled = (first > 0).sum(1)
            probability = is_member(batch.slates.item_ids, first).double() / filled.clamp_min(1)[:, None]
            yield f"top_{k}", probability, first, self._value(observed.batch.user_ids, first, filled)
            if observed.deep is not None and self._options.depth is not None:
                deep = observed.deep.item_ids[:, : self._options.depth]
                yield results.DISCOUNTED.format(k=k), discounted(deep, batch.slates.item_ids, k), None, None

    def _draw(self, histories: Histories) -> Tensor | None:
        if self._sample is None:
            return None
        with torch.random.fork_rng(devices=[histories.item_ids.device] if histories.item_ids.is_cuda else []):
            torch.manual_seed(self._options.seed + self._batches)
            return self._sample(histories, self._options.samples)

    def _value(self, users: Tensor, items: Tensor | None, number: Tensor | None = None) -> Tensor | None:
        """``[B]`` sum of the model's rewards of ``items [B, n]`` (0 = not an item, worth 0) over ``number [B]``.

        For draws, ``number`` is n, which gives ``sum_a pi(a) q_hat(a)`` also if the probabilities of the items sum to
        less than 1. For a list, it is the number of filled places, one of which is shown.
        """
        if self._model is None or items is None:
            return None
        total = (self._model(users, items) * (items > 0)).sum(1)
        return total / (items.shape[1] if number is None else number.clamp_min(1))

    def _check_range(self, reward: Tensor) -> None:
        if self._options.reward_range is None or not len(reward):
            return
        (low, high), least, most = self._options.reward_range, float(reward.min()), float(reward.max())
        rule = f"must contain every possible reward, such as those from {least:g} to {most:g}"
        fits = low <= least and most <= high
        validate_range(fits, "off_policy.reward_range", rule, self._options.reward_range)


def discounted(lists: Tensor, items: Tensor, k: int) -> Tensor:
    """``(1 / (k + place)) / sum_filled (1 / (k + place'))`` of items at places 0, 1, ... of lists, ``[B, S]`` float64.

    The discount is one half at place k. An item that is not in the list, and no item (0), have probability 0.

    Args:
        lists: ``[B, D]`` recommended items, best first, 0 = empty place.
        items: ``[B, S]``.
        k: the place of half the discount.
    """
    places = torch.arange(lists.shape[1], device=lists.device)
    weight = 1.0 / (k + places).double()
    total = ((lists > 0) * weight).sum(1, keepdim=True).clamp_min(weight[-1:].min())
    ascending, order = lists.sort(1)
    found = torch.searchsorted(ascending, items.contiguous()).clamp_max(lists.shape[1] - 1)
    is_listed = (ascending.gather(1, found) == items) & (items > 0)
    return (weight[order.gather(1, found)] / total).masked_fill(~is_listed, 0.0)


def _numpy(kept: Tensor, *columns: Tensor) -> list[NDArray[Any]]:
    return [column[kept].cpu().numpy() for column in columns]


@dataclass(frozen=True)
class OffPolicySetting:
    """The setting that all contenders share; ``measure`` creates the measure of each.

    Attributes:
        options: how values are estimated.
        reward: reward of logged items; nan = unknown.
        num_items: V.
        ks: list lengths, unless the options name others.
        model: reward model, fitted on the training period; None = without the estimators that need it.
        exposures: whom the log shows what, for estimated propensities.
    """

    options: OffPolicyOptions
    reward: RewardFunction
    num_items: int
    ks: Sequence[int]
    model: AdditiveRewardModel | None = None
    exposures: ExposureModel | None = None

    def measure(self, policy: Policy | None = None) -> OffPolicyMeasure:
        """The measure of a policy that can be sampled, or of a contender that only has lists."""
        return OffPolicyMeasure(self, None if policy is None else lambda histories, n: policy.sample(histories, n)[0])

    def propensities(self, users: Tensor, slates: Slates) -> Tensor:
        """The probability of every slate item under the logging policy, ``[B, S]`` float64 in (0, 1]; nan = unknown.

        - ``logged``: the propensity column of the log, ``exp(Slates.logp_behavior)``.
        - ``uniform``: ``1 / pool_size`` for exposures that the log marks as random; the others have none.
        - ``estimated``: that of ``ExposureModel``, from who was shown what. It corrects for popularity, and for
          whom the log shows which kind of items, as far as a few features know; the intervals do not contain its error.
          Exposures that the log marks as random have ``1 / pool_size``.

        Args:
            users: ``[B]``, the users of the slates.
            slates: the exposures.

        Raises:
            RecpoError: the log lacks the column, or a logged probability is above 1.
        """
        if self.options.propensity == "estimated":
            assert self.exposures is not None
            found = self.exposures(users, slates.item_ids)
            return found if slates.is_random is None else torch.where(slates.is_random, self._by_chance, found)
        if self.options.propensity == "uniform":
            if slates.is_random is None:
                message = "off-policy value: propensity uniform needs the log's is_random column"
                raise RecpoError(message, code="missing_column", field="is_random")
            return torch.where(slates.is_random, self._by_chance, torch.nan).double()
        if slates.logp_behavior is None:
            raise RecpoError(
                "off-policy value: these slates have no logged propensities; map the log's propensity column in "
                "`recpo prepare`, or take propensity uniform (random exposures) or estimated",
                code="missing_column",
                field="propensity",
            )
        logged = slates.logp_behavior.double()
        if bool((logged > 1e-6).any()):
            message = f"off-policy value: a logged propensity is {logged.max().exp():.6g}, expected at most 1"
            raise RecpoError(message, code="out_of_range", field="propensity")
        return torch.where(torch.isneginf(logged), torch.nan, logged.exp())

    @property
    def _by_chance(self) -> float:
        return 1.0 / (self.options.pool_size or self.num_items)


def off_policy_setting(
    options: OffPolicyOptions,
    data: Prepared,
    split: HeldOut,
    reward: RewardFunction,
    ks: Sequence[int],
) -> OffPolicySetting:
    """Fits the reward model, and that of exposures if propensities are estimated, in passes over the shards.

    Raises:
        RecpoError: no training event has a reward.
    """
    reward = reward.for_behaviors(data.behaviors)

    def training() -> Iterator[RewardedExposures]:
        return (rewarded(data, "train", shard, reward) for shard in range(data.num_shards("train")))

    model = AdditiveRewardModel.fit(training, num_users=int(data.manifest["num_users"]), num_items=data.num_items)
    exposures = ExposureModel.fit(data, split) if options.propensity == "estimated" else None
    return OffPolicySetting(options, reward, data.num_items, ks, model, exposures)


def propensity_share(data: Prepared, split: HeldOut) -> float:
    """Share of the held-out events of a period that have a logged propensity; 0 without events."""
    shards = (data.columns(split, shard, ["propensity", "is_target"]) for shard in range(data.num_shards(split)))
    known = [~np.isnan(shard["propensity"][shard["is_target"]]) for shard in shards]
    return sum(int(one.sum()) for one in known) / max(1, sum(map(len, known)))


def rewarded(data: Prepared, split: Period, shard: int, reward: RewardFunction) -> RewardedExposures:
    """The rewards of a shard's targets, each as a separate slate."""
    names = ["item_index", "label", "dislike"] + [Derived.BEHAVIORS] * bool(reward.reads.behaviors and data.behaviors)
    columns = data.columns(split, shard, ["user_index", "is_target", *names])
    users, targets = columns["user_index"], columns["is_target"]
    items, label, dislike, *behaviors = (torch.from_numpy(columns[name][targets])[:, None] for name in names)
    items, mask = items.long(), torch.ones_like(items, dtype=torch.bool)
    slates = Slates(items, torch.zeros_like(items), mask, label, dislike, is_logged=mask)
    if behaviors:
        slates = slates._replace(behaviors=behaviors[0].long())
    nothing = torch.zeros_like(items[:, :0])
    batch = FeedbackBatch(Histories(nothing, torch.zeros(len(items), dtype=torch.long)), slates, items[:, 0])
    return RewardedExposures(users[targets], items[:, 0].numpy(), reward(batch, slates)[:, 0].double().numpy())


def value(
    rewards: ArrayLike,
    propensities: ArrayLike,
    target_probabilities: ArrayLike,
    *,
    users: ArrayLike | None = None,
    q_hat: ArrayLike | None = None,
    v_hat: ArrayLike | None = None,
    options: OffPolicyOptions = OffPolicyOptions(),  # noqa: B008  frozen
) -> results.OffPolicyResult:
    """Off-policy value of a policy from plain arrays, by every estimator, with intervals and warnings.

    ::

        found = recpo.off_policy.value(rewards, propensities, target_probabilities, users=user_ids)
        found.to_pandas()
        found.differences(recpo.off_policy.value(rewards, propensities, others, users=user_ids))

    Args:
        rewards: ``[N]`` reward of every exposure.
        propensities: ``[N]`` probability of the shown item under the logging policy.
        target_probabilities: ``[N]`` probability of the shown item under the policy whose value is estimated.
        users: ``[N]`` user of every exposure, of any type; exposures of different users are independent. None = every
            exposure is, which makes intervals too narrow if users have several.
        q_hat: ``[N]`` a reward model's prediction for the shown item, for the estimators that need one.
        v_hat: ``[N]`` the model's value of the policy, ``sum_a pi(a | x) q_hat(x, a)``.
        options: clip, threshold, level, resamples and so on; options about prepared data are ignored.

    Raises:
        RecpoError: arrays of different lengths; ``q_hat`` without ``v_hat``; a propensity outside (0, 1], a probability
            outside [0, 1], or a reward that is not finite.
    """
    given: dict[str, ArrayLike | None] = {
        "rewards": rewards,
        "target_probabilities": target_probabilities,
        "propensities": propensities,
        "q_hat": q_hat,
        "v_hat": v_hat,
        "users": users,
    }
    arrays = {name: np.asarray(one) for name, one in given.items() if one is not None}
    count = arrays["rewards"].shape[:1]
    for name, one in arrays.items():
        if one.ndim != 1 or one.shape != count:
            message = f"off-policy value: {name} has the shape {one.shape}, expected one number per reward, {count}"
            raise RecpoError(message, code="wrong_shape", field=name)
    if ("q_hat" in arrays) != ("v_hat" in arrays):
        missing = "v_hat" if "q_hat" in arrays else "q_hat"
        message = f"off-policy value: a reward model needs both q_hat and v_hat, and {missing} is missing"
        raise RecpoError(message, code="missing_value", field=missing)
    owner = arrays.pop("users", np.arange(count[0]))
    rows = Rows(*(one.astype(np.float64) for one in arrays.values()))
    return results.result_of_rows(rows, np.unique(owner, return_inverse=True)[1], options)


_FEATURES: Final = 16
_SEED: Final = 0  # of the singular vectors, and of the users that are fitted if the catalog is large
_CHANCE: Final = 0.1  # share of the exposures that are drawn uniformly
_STEPS: Final = 50  # of L-BFGS; about twenty suffice
_COLUMNS: Final = ("user_index", "item_index", "is_target", "is_random")
_CELLS_AT_ONCE: Final = 1 << 24  # of a users x items matrix; users whose exposures are fitted, times V


@dataclass(frozen=True)
class ExposureModel:
    """Whom the log shows what: propensities of a log that has none.

        p(i | u) = .9 softmax_i(s_0 log(n_i + 1/2) + sum_k s_k x_uk g_ik) + .1 / V

    with the training exposures ``n_i`` of an item, and the consumption features ``x_u`` and ``g_i`` of a user and an
    item (``recpo.rewards.prior_features``): who was shown what, whatever the grades were. The slopes s maximize the
    likelihood of the exposures of the held-out period that are not marked as random, which is concave in them. They are
    so few that the same exposures may be weighted with the result, and what was true of the training period alone gets
    a small slope. The last term bounds importance weights: no model of this kind knows how seldom something is shown.

    Attributes:
        users: ``[U, m + 1]`` float32, 1 and the features of every user.
        items: ``[V, m + 1]`` float32, ``log(n_i + 1/2)`` and the features of every item, times their slopes.
    """

    users: Tensor
    items: Tensor

    @classmethod
    def fit(cls, data: Prepared, period: Period) -> Self:
        """Fits the features to the training exposures, and the slopes to those of a held-out period.

        Args:
            data: prepared data.
            period: whose exposures are to be weighted.
        """
        parts = repeated(partial(_training_exposures, data), lambda _: None)
        features = of_consumption(parts, data.num_items, _FEATURES, _SEED)
        users = np.zeros((int(data.manifest["num_users"]), 1 + features.num_user_columns), np.float32)
        users[:, 0] = 1.0
        for chunk in parts():
            users[chunk.users, 1:] = features.of_users(chunk)
        popularity = np.log(data.item_counts() + 0.5)
        items = np.concatenate([popularity[:, None], features.items], 1).astype(np.float32)
        unscaled = cls(torch.from_numpy(users), torch.from_numpy(items))
        slopes = unscaled._slopes(*_exposures(data, period, unscaled._rows_at_once))
        return cls(unscaled.users, unscaled.items * slopes)

    def __call__(self, users: Tensor, items: Tensor) -> Tensor:
        """``[B, S]`` float64, the probabilities of ``items [B, S]`` (1..V; nan for 0) for ``users [B]``."""
        known = users < len(self.users)
        of_users = self.users.to(users.device)[users.where(known, 0)] * known[:, None]
        of_items, place = self.items.to(users.device), (items - 1).clamp_min(0)
        parts = []
        for rows, places in zip(*(part.split(self._rows_at_once) for part in (of_users, place)), strict=True):
            logits = rows @ of_items.T
            parts.append((logits.gather(1, places) - logits.logsumexp(1, keepdim=True)).double().exp())
        shown = (1 - _CHANCE) * torch.cat(parts) + _CHANCE / len(of_items)
        return shown.masked_fill(items == 0, torch.nan)

    @property
    def _rows_at_once(self) -> int:
        return max(1, _CELLS_AT_ONCE // len(self.items))

    def _slopes(self, users: Tensor, items: Tensor) -> Tensor:
        """The slopes ``[m + 1]`` of greatest likelihood of the exposures ``users [N]``, ``items [N]`` (0..V - 1)."""
        shown, place = users.unique(return_inverse=True)
        rows = self.users[shown]
        slopes = torch.zeros(rows.shape[1])
        slopes[0] = 1.0
        slopes.requires_grad_()
        optimizer = torch.optim.LBFGS([slopes], max_iter=_STEPS, line_search_fn="strong_wolfe")

        def loss() -> float:
            optimizer.zero_grad()
            found = -((rows * slopes) @ self.items.T).log_softmax(1)[place, items].mean()
            found.backward()
            return found.item()

        if len(users):
            optimizer.step(loss)
        return slopes.detach()


def _training_exposures(data: Prepared) -> Iterator[Chunk]:
    """All events of the training period, in chunks with all events of their users; grades are 0."""
    for user, item, is_target in (one.values() for one in data.train_columns(_COLUMNS[:3])):
        users, items = user[is_target], item[is_target] - 1
        yield from chunks_of(users, items, np.zeros(len(users)), data.num_items)


def _exposures(data: Prepared, period: Period, most: int) -> tuple[Tensor, Tensor]:
    """Users ``[N]`` and items ``[N]`` (0..V - 1) that the log did not show at random, of at most so many users."""

    def shown() -> Iterator[tuple[NDArray[np.integer], NDArray[np.integer]]]:
        for shard in range(data.num_shards(period)):
            user, item, is_target, is_random = data.columns(period, shard, _COLUMNS).values()
            kept = is_target & ~is_random
            yield user[kept], item[kept] - 1

    present = np.unique(np.concatenate([np.unique(user) for user, _ in shown()]))
    if len(present) > most:
        present = np.random.default_rng(_SEED).choice(present, most, replace=False)
    parts = [(user[kept], item[kept]) for user, item in shown() for kept in [np.isin(user, present)]]
    users, items = (torch.from_numpy(np.concatenate(column).astype(np.int64)) for column in zip(*parts, strict=True))
    return users, items
