"""On-policy candidates: a frozen snapshot of the policy draws a group of items per context, and a reward scores them.

Instead of draws, the candidates may be the snapshot's top-ranked items, or the complete catalog.

A rollout is a pure function of the snapshot, the contexts and a seed, so it need not be stored: a run that resumes in
the middle of a phase draws the same candidates again. Training has phases. The snapshot is refreshed at the start of a
phase, and the batches of the phase are visited several times with the candidates of the first visit.

The changes that training makes to slates are here too: hard negatives, preference lists, masks of shared codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection, apply_to_collections
from torch import Tensor

from recpo.base.contracts import Policy, RewardFunction, StatePolicy
from recpo.base.types import FeedbackBatch, LogProbs, Slates, catalog_slates
from recpo.objectives.advantages import group_normalized_advantage
from recpo.objectives.inputs import masked_mean
from recpo.ops.ranking import first_places, is_member
from recpo.ops.reduce import zero_masked
from recpo.training.options import RolloutOptions


class Rollout(NamedTuple):
    """The values that a phase keeps for a batch.

    Attributes:
        slates: the candidates and their rewards.
        logp: ``[B, S, T]`` under the distribution that they were drawn from, ``pi_old``; for the complete catalog,
            under the snapshot; None if nothing reads it.
        metrics: metrics of the draws.
        reference: ``[B, S, T]`` under the reference policy, if the objective needs it.
        values: ``[B, S]`` of the snapshot's critic, if there is one.
        monitored: ``[B, S]`` monitor rewards of the complete catalog, if there are any.
    """

    slates: Slates
    logp: Tensor | None
    metrics: dict[str, Tensor]
    reference: Tensor | None = None
    values: Tensor | None = None
    monitored: Tensor | None = None


class Rollouts:
    """The rollouts of the current phase: created on the first visit of a batch, and kept until the phase ends.

    Args:
        seed: together with the phase, the rows of the batch and the snapshot, it determines the candidates.
        keep: batches are visited again in their phase.
    """

    def __init__(self, seed: int, keep: bool = True) -> None:
        self._seed, self._keep = seed, keep
        self._phase: tuple[int, ...] = ()
        self._kept: dict[tuple[int, ...], Rollout] = {}

    def begin(self, *phase: int) -> None:
        """Sets the phase, identified by numbers that no other phase of the run has."""
        if phase != self._phase:
            self._phase = phase
            self._kept.clear()

    def of(self, batch: FeedbackBatch, make: Callable[[FeedbackBatch], Rollout]) -> Rollout:
        """The rollout of ``batch``, created by ``make`` with the random numbers of that batch."""
        planned = None if batch.plan is None else batch.plan.contexts
        key = context_numbers(batch) if planned is None else tuple(planned)  # pinning makes lists of tuples
        if key in self._kept:
            return self._kept[key]
        device = batch.context_ids.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(int(np.random.SeedSequence([self._seed, *self._phase, *key]).generate_state(1)[0]))
            rollout = make(batch)
        if self._keep:
            self._kept[key] = rollout
        return rollout


def context_numbers(batch: FeedbackBatch) -> tuple[int, ...]:
    """The contexts of a batch, which seed its random numbers; 0 for an empty row of a last step."""
    rows = (batch.context_ids + 1) * batch.slates.mask.any(-1)
    return tuple(rows.tolist())


@torch.no_grad()
def roll_out(
    policy: Policy, batch: FeedbackBatch, options: RolloutOptions, reward: RewardFunction, scores_catalog: bool = True
) -> Rollout:
    """Draws and scores a group of candidates for every context, at the state after its complete history.

    Args:
        policy: the snapshot, in evaluation mode.
        batch: contexts, and their logged slates.
        options: the kind of candidates.
        reward: scores them.
        scores_catalog: the snapshot scores the complete catalog; False = nothing reads these scores.
    """
    if options.candidates == "catalog":
        rollout = _whole_catalog(policy, batch, options, reward)
        if not scores_catalog:
            return rollout
        assert isinstance(policy, StatePolicy)
        logp = policy.catalog_log_prob(batch)
        return rollout._replace(logp=logp, metrics=catalog_metrics(rollout, logp))
    drawn = _scored(policy, batch, options, reward)
    metrics = _draw_metrics(drawn, batch, options)
    if options.resamples or options.preference is not None:
        drawn, of_groups = _informative(drawn, policy, batch, options, reward)
        metrics |= of_groups
    if options.preference is not None:
        drawn = as_preference_list(drawn, worst_only=options.preference == "best_vs_worst")
    if options.monitor_reward is not None:
        monitored = options.monitor_reward(batch, drawn.slates)
        metrics["monitor_reward_mean"] = masked_mean(monitored, drawn.slates.mask & ~monitored.isnan())
    return Rollout(drawn.slates, drawn.logp, metrics)


def _whole_catalog(policy: Policy, batch: FeedbackBatch, options: RolloutOptions, reward: RewardFunction) -> Rollout:
    """Every item as a candidate, with rewards but without log-probabilities."""
    contexts = batch.slates.mask.any(-1, keepdim=True)
    slates = catalog_slates(batch.histories, policy.num_items)
    slates = _without_feedback(slates._replace(mask=contexts.expand_as(slates.mask)))
    monitored = None if options.monitor_reward is None else options.monitor_reward(batch, slates)
    return Rollout(rewarded(slates, reward(batch, slates)), None, {}, monitored=monitored)


def rewarded(slates: Slates, rewards: Tensor) -> Slates:
    """Slates with their rewards. A position with an unknown reward leaves its slate."""
    known = slates.mask & ~rewards.isnan()
    return slates._replace(reward=torch.where(known, rewards.detach(), 0.0), mask=known)


def _without_feedback(slates: Slates) -> Slates:
    """Candidates of which nothing is known; each is a step of its own, whose continuation is unknown."""
    no, unknown = slates.mask.new_zeros(()), slates.visible.new_full((), torch.nan, dtype=torch.float32)
    columns = dict.fromkeys(("dislike", "positive", "is_logged"), no.expand_as(slates.mask))
    columns |= dict.fromkeys(("label", "grade"), unknown.expand_as(slates.mask))
    return slates._replace(**columns, ends_session=(~no).expand_as(slates.mask))


@torch.no_grad()
def catalog_metrics(rollout: Rollout, logp: Tensor) -> dict[str, Tensor]:
    """The metrics that are means over a group of draws, as expectations over the complete catalog.

    Args:
        rollout: a rollout of the catalog.
        logp: ``[B, V, 1]`` of the policy for the expectation.
    """
    slates, contexts = rollout.slates, rollout.slates.mask.any(-1, keepdim=True)
    probability = logp[..., 0].exp() * contexts

    def expected(rewards: Tensor, known: Tensor) -> Tensor:
        share = zero_masked(probability, known)
        return (share * zero_masked(rewards, known)).sum() / share.sum().clamp(min=torch.finfo(share.dtype).tiny)

    assert slates.reward is not None
    metrics = {
        "reward_mean": expected(slates.reward, slates.mask),
        "draw_entropy": -(probability * logp[..., 0]).sum() / contexts.sum().clamp(min=1),
    }
    if rollout.monitored is not None:
        metrics["monitor_reward_mean"] = expected(rollout.monitored, contexts & ~rollout.monitored.isnan())
    return metrics


@torch.no_grad()
def catalog_divergence(logp: LogProbs) -> Tensor:
    """``KL(old || policy)`` in nats, exact over the whole catalog, summed over the contexts; a scalar.

    Args:
        logp: ``[B, V, 1]`` each, with ``old``.
    """
    assert logp.old is not None
    return zero_masked(logp.old.exp() * (logp.old - logp.policy), logp.mask).sum()


def _scored(policy: Policy, batch: FeedbackBatch, options: RolloutOptions, reward: RewardFunction) -> Candidates:
    slates, logp = _drawn(policy, batch, options)
    return Candidates(rewarded(slates, reward(batch, slates)), logp)


def _drawn(policy: Policy, batch: FeedbackBatch, options: RolloutOptions) -> Candidates:
    """Sorts groups by descending probability, as rewards that read ranks require."""
    histories, size = batch.histories, options.group_size
    if options.candidates == "beam":
        item_ids = policy.recommend(histories, min(size, policy.num_items)).item_ids
        logp = item_ids.new_zeros(*item_ids.shape, policy.num_tokens, dtype=torch.float32)
    else:
        item_ids, logp = policy.sample(histories, size, options.sampling)
    # a draw that is not an item stays, because a reward may score it as a miss
    kept = batch.slates.mask.any(-1, keepdim=True).expand_as(item_ids)
    slates = _without_feedback(Slates(item_ids * kept, histories.lengths[:, None] * kept, kept))
    slates = with_logged(slates, batch.slates, options.num_logged)
    assert slates.is_logged is not None
    if options.candidates == "beam" or options.num_logged:
        unscored = (slates.mask if options.candidates == "beam" else slates.is_logged) & (slates.item_ids > 0)
        own = policy.log_prob(batch._replace(slates=slates), unscored)
        logp = torch.where(unscored[..., None], own, logp)
    slates, logp = most_probable_first(Candidates(slates, logp))
    if options.duplicates == "drop":
        slates = slates._replace(mask=first_places(slates.item_ids, slates.mask))
    return Candidates(slates, zero_masked(logp, items_of(slates)[..., None]))


def _informative(
    drawn: Candidates, policy: Policy, batch: FeedbackBatch, options: RolloutOptions, reward: RewardFunction
) -> tuple[Candidates, dict[str, Tensor]]:
    """Redraws groups of equal rewards a limited number of times, and leaves out those that are still equal."""
    contexts = batch.slates.mask.any(-1)
    again = torch.zeros((), device=contexts.device)
    constant = _is_constant(drawn) & contexts
    for _ in range(options.resamples):
        rows = constant.nonzero().squeeze(1)
        if not len(rows):
            break
        again = again + len(rows)
        drawn = put_rows(drawn, rows, _scored(policy, take_rows(batch, rows), options, reward))
        constant = _is_constant(drawn) & contexts
    slates = drawn.slates._replace(mask=drawn.slates.mask & ~constant[:, None])
    metrics = {
        "resamples_per_group": again / contexts.sum().clamp(min=1),
        "dropped_group_share": masked_mean(constant, contexts),
    }
    return drawn._replace(slates=slates), metrics


def _is_constant(drawn: Candidates) -> Tensor:
    """``[B]``: True if all rewards of the group are equal, or if there is at most one."""
    assert drawn.slates.reward is not None
    return (group_normalized_advantage(drawn.slates.reward, drawn.slates.mask, scale=False) == 0).all(-1)


def _draw_metrics(drawn: Candidates, batch: FeedbackBatch, options: RolloutOptions) -> dict[str, Tensor]:
    """Shares of valid and unique draws, share of groups with an item that the user liked, and the entropy."""
    slates, logged = drawn.slates, batch.slates
    assert slates.is_logged is not None
    generated = logged.mask.any(-1, keepdim=True) & ~slates.is_logged
    valid = generated & (slates.item_ids > 0)
    unique = first_places(slates.item_ids, valid)
    metrics = {
        "valid_share": masked_mean(valid, generated),
        "unique_share": unique.sum() / valid.sum().clamp(min=1),
    }
    if logged.positive is not None:
        hit = valid & is_member(slates.item_ids, logged.item_ids, logged.mask & logged.positive)
        metrics["hit_group_share"] = masked_mean(hit.any(-1), logged.mask.any(-1))
    if options.candidates == "draws":
        # -log p of a draw is an unbiased estimate of the entropy of its distribution
        metrics["draw_entropy"] = masked_mean(-drawn.logp.sum(-1), valid & slates.mask)
    return metrics


class Candidates(NamedTuple):
    """Groups of candidates ``[B, S]`` and their log-probabilities ``[B, S, T]`` under what they were drawn from."""

    slates: Slates
    logp: Tensor


def items_of(slates: Slates) -> Tensor:
    """``[B, S]``: kept positions that hold an item. A draw may be none; it counts in its group, but has no tokens."""
    return slates.mask & (slates.item_ids > 0)


def with_logged(slates: Slates, logged: Slates, count: int) -> Slates:
    """Puts up to ``count`` random items of the logged slate, with their labels, into the first places of each group.

    Args:
        slates: ``[B, G]`` generated candidates, which hold every column that is not None below.
        logged: ``[B, S]`` what the log shows for the same contexts.
        count: at most G.
    """
    if not count:
        return slates
    order = torch.rand(logged.mask.shape, device=logged.mask.device).masked_fill(~logged.mask, -1.0)
    index = order.argsort(1, descending=True)[:, :count]
    there = logged.mask.gather(1, index)

    def placed(own: Tensor, other: Tensor) -> Tensor:
        head = torch.where(there, other.gather(1, index).to(own.dtype), own[:, : index.shape[1]])
        return torch.cat([head, own[:, index.shape[1] :]], 1)

    sources = logged._replace(is_logged=logged.mask, reward=None, logp_behavior=None, ends_session=None)._asdict()
    pairs = {name: (own, sources[name]) for name, own in slates._asdict().items()}
    both = {name: pair for name, pair in pairs.items() if pair[0] is not None and pair[1] is not None}
    return slates._replace(**{name: placed(*pair) for name, pair in both.items()})


def take_rows(batch: FeedbackBatch, rows: Tensor) -> FeedbackBatch:
    """The contexts ``rows`` of a batch."""
    per_context = batch.slates, batch.context_ids, batch.known_positives, batch.user_ids
    slates, ids, known, users = apply_to_collection(per_context, Tensor, lambda column: column[rows])
    taken = batch._replace(histories=batch.histories.rows(rows), slates=slates, plan=None)
    return taken._replace(context_ids=ids, known_positives=known, user_ids=users)


def put_rows(candidates: Candidates, rows: Tensor, others: Candidates) -> Candidates:
    """Replaces the groups ``rows`` by ``others``, which have the same columns."""
    put: Candidates = apply_to_collections(
        candidates, others, Tensor, lambda own, other: own.index_copy(0, rows, other)
    )
    return put


def as_preference_list(candidates: Candidates, *, worst_only: bool) -> Candidates:
    """Sorts every group by reward: the best candidate first, as the chosen item, and those with less as the rejected.

    Candidates whose reward equals the best one's leave the list; a group without any rejected item is masked.

    Args:
        candidates: with rewards.
        worst_only: keep one rejected item, that of the lowest reward.
    """
    slates = candidates.slates
    assert slates.reward is not None
    ranked = slates.reward.masked_fill(~slates.mask, -torch.inf)
    index = ranked.argsort(stable=True, dim=1, descending=True)
    if worst_only:
        last = (slates.mask.sum(1, keepdim=True) - 1).clamp(min=0)
        index = torch.cat([index[:, :1], index.gather(1, last)], 1)
    ordered = _ordered(candidates, index)
    reward = ordered.slates.reward
    assert reward is not None
    rejected = ordered.slates.mask & (reward < reward[:, :1])
    kept = rejected.clone()
    kept[:, 0] = rejected.any(1)
    return ordered._replace(slates=ordered.slates._replace(mask=kept, chosen=kept & ~rejected))


def most_probable_first(candidates: Candidates) -> Candidates:
    """Sorts every group by the probability of what was drawn; ties stay in their order."""
    logp = candidates.logp.sum(-1).masked_fill(~candidates.slates.mask, -torch.inf)
    return _ordered(candidates, logp.argsort(stable=True, dim=1, descending=True))


def _ordered(candidates: Candidates, index: Tensor) -> Candidates:
    """The places ``index [B, K]`` of every group."""
    slates, logp = candidates
    slates = apply_to_collection(slates, Tensor, lambda column: column.gather(1, index))
    return Candidates(slates, logp.gather(1, index[..., None].expand(-1, -1, logp.shape[2])))


def side_by_side(slates: Slates, others: Slates) -> Slates:
    """The items of two slates of the same contexts, to be scored at once."""
    return Slates(*(torch.cat([own, other], 1) for own, other in zip(slates[:3], others[:3], strict=True)))


@torch.no_grad()
def with_hard_negatives(batch: FeedbackBatch, policy: Policy, count: int) -> FeedbackBatch:
    """Appends the policy's ``count`` top ranks after the whole history to every slate, as rejected items.

    Left out: what the slate holds already, and what the user is known to like. The policy ranks in evaluation mode.
    """
    slates, was_training = batch.slates, policy.training
    exclude = slates.item_ids
    if batch.known_positives is not None:
        exclude = torch.cat([exclude, batch.known_positives], 1)
    policy.eval()
    items = policy.recommend(batch.histories, min(count, policy.num_items), exclude).item_ids
    policy.train(was_training)
    assert slates.chosen is not None  # only preference lists ask for hard negatives
    kept = (items > 0) & (slates.chosen & slates.mask).any(1, keepdim=True)

    fills = {"item_ids": items * kept, "visible": batch.histories.lengths[:, None] * kept, "mask": kept}

    def appended(name: str, values: Tensor) -> Tensor:
        # what is not known of an appended item: nan where a column can say so, else False
        missing = values.new_full(items.shape, torch.nan if values.is_floating_point() else 0)
        return torch.cat([values, fills.get(name, missing)], 1)

    columns = {name: values for name, values in slates._asdict().items() if values is not None}
    slates = slates._replace(**{name: appended(name, v) for name, v in columns.items()})
    return batch._replace(slates=slates)


def without_shared_prefix(mask: Tensor, tokens: Tensor, chosen: Tensor) -> Tensor:
    """Keeps of every rejected item the tokens from the first one on in which it differs from the chosen item.

    The chosen and a rejected item are generated through the same first codes, so pushing these down for one pushes them
    down for the other (RAD-DPO, arXiv 2602.23964).

    Args:
        mask: ``[B, S, T]`` or ``[B, S, 1]``, True keeps.
        tokens: ``[B, S, T]``.
        chosen: ``[B, S]`` bool, one item at most; a list without any is left as it is.
    """
    of_chosen = (tokens * chosen[..., None]).sum(1, keepdim=True)
    shared = (tokens == of_chosen).long().cumprod(-1).bool()
    return mask & ~(shared & ~chosen[..., None] & chosen.any(1)[:, None, None])
