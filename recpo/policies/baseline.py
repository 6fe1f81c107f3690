"""Baselines as policies: a softmax over the scores that a model without training steps gives to every item.

A baseline that no trained policy beats is what a team should serve (``recpo fit``). As a policy it is exported,
verified and served like any other: popularity, popularity of segments, personal popularity, a factorization of grades,
implicit ALS, AllRank, EASE and sequential rules.
"""

import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from recpo.base.contracts import DotProductPolicy, Policy
from recpo.base.errors import RecpoError, validate_range
from recpo.base.features import UNKNOWN, Category, FeatureSchema, Reads, of_type
from recpo.base.feedback import GRADES, LEAST_POSITIVE_LEVEL
from recpo.base.types import FeedbackBatch, Histories, Recommendations, SamplingOptions
from recpo.ops import small_systems
from recpo.ops.ranking import first_allowed, first_places
from recpo.policies import catalog_search, grade_factors, sampling
from recpo.policies.sampling import planned_items, prefixes, scoring_plan, spread


class BaselinePolicy(Policy):
    """``pi(i | h) ∝ exp(score(h, i) / temperature)`` over the whole catalog.

    Args:
        num_items: catalog size V.
        max_history: number of most recent events that the model reads; at least 1.
        temperature: difference in score that moves the log-odds of two items by 1; above 0. Lists do not depend on it.

    Attributes:
        facts: how the model was fitted and selected; empty if it was only counted.
    """

    facts: Mapping[str, Any]

    def __init__(self, num_items: int, *, max_history: int, temperature: float) -> None:
        grade_factors.validate_temperature(temperature)
        validate_range(max_history >= 1, "max_history", "must be at least 1", max_history)
        super().__init__()
        self.num_items, self.max_history, self.temperature = num_items, max_history, temperature
        self.facts = {}

    @abstractmethod
    def scores(self, histories: Histories) -> Tensor:
        """``[B, V]`` float32 of the items 1..V after the complete histories."""

    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None) -> Tensor:
        """See ``Policy.log_prob``."""
        plan, width = scoring_plan(batch, needed), batch.histories.item_ids.shape[1] + 1
        state, columns = plan.states, planned_items(plan, batch.slates) - 1
        logp, begin = columns.new_zeros(len(columns), dtype=torch.float32), 0
        for some in plan.rows.split(sampling.contexts_at_once(self.num_items)):
            seen = prefixes(batch.histories, some // width, some % width)
            parts = [(self.scores(part) / self.temperature).log_softmax(1) for part in seen]
            here = (state >= begin) & (state < begin + len(some))
            logp[here] = torch.cat(parts)[state[here] - begin, columns[here]]
            begin += len(some)
        return spread(plan, logp)[..., None]

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``."""
        catalog_search.validate_list_length(k, self.num_items)
        if torch.compiler.is_exporting():
            return self._best(histories, k, exclude)
        every = torch.arange(len(histories.lengths), device=histories.lengths.device)
        lists = [
            self._best(histories.rows(part), k, None if exclude is None else exclude[part])
            for part in every.split(sampling.contexts_at_once(self.num_items))
        ]
        return Recommendations(*(torch.cat(column) for column in zip(*lists, strict=True)))

    @torch.no_grad()
    def sample(
        self, histories: Histories, group_size: int, options: SamplingOptions = SamplingOptions()
    ) -> tuple[Tensor, Tensor]:
        """See ``Policy.sample``."""
        sampling.validate_sampling(group_size, options)
        logits = self.scores(histories) / (self.temperature * options.temperature)
        ids, logp = sampling.draw_from_scores(logits, group_size, options)
        return ids, logp[..., None]

    def _best(self, histories: Histories, k: int, exclude: Tensor | None) -> Recommendations:
        logits = self.scores(histories) / self.temperature
        padded = F.pad(logits, (1, 0), value=-torch.inf)
        return catalog_search.best_of_scores(padded, catalog_search.log_sum_exp(logits), k, exclude)


class PopularityPolicy(BaselinePolicy):
    """The same score for every history: popularity, or the rate of positives of every item.

    Args:
        num_items: catalog size V.
        temperature: see ``BaselinePolicy``.

    Attributes:
        item_scores: ``[V]``.
    """

    item_scores: Tensor

    def __init__(self, num_items: int, *, temperature: float = 1.0) -> None:
        super().__init__(num_items, max_history=1, temperature=temperature)
        self.register_buffer("item_scores", torch.zeros(num_items))

    def scores(self, histories: Histories) -> Tensor:
        """See ``BaselinePolicy.scores``."""
        return self.item_scores.expand(histories.item_ids.shape[0], -1)

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``. All users share one ranking, so the cost hardly grows with the catalog."""
        if torch.compiler.is_exporting():
            return super().recommend(histories, k, exclude)
        catalog_search.validate_list_length(k, self.num_items)
        depth = min(self.num_items, k + (0 if exclude is None else exclude.shape[1]))
        ranking = catalog_search.block_top_k(self.item_scores[None], depth)[1] + 1
        item_ids = first_allowed(ranking.expand(len(histories.item_ids), -1), k, exclude)
        logits = self.item_scores / self.temperature
        logp = logits[(item_ids - 1).clamp_min(0)] - logits.logsumexp(0)
        return Recommendations(item_ids, logp.masked_fill(item_ids == 0, -torch.inf))


class SegmentPolicy(BaselinePolicy):
    """The same score for all users of a segment: popularity, or the rate of positives, among users with one value.

    Args:
        num_items: catalog size V.
        feature: the category of users whose values are the segments.
        num_codes: its codes, of which 0 (missing) and 1 (unknown) stand for all users.
        temperature: see ``BaselinePolicy``.

    Attributes:
        segment_scores: ``[num_codes, V]``.
    """

    segment_scores: Tensor

    def __init__(self, num_items: int, *, feature: str, num_codes: int, temperature: float = 1.0) -> None:
        super().__init__(num_items, max_history=1, temperature=temperature)
        self.feature, self.num_codes, self.reads = feature, num_codes, Reads(user=True)
        self._place = 0
        self.register_buffer("segment_scores", torch.zeros(num_codes, num_items))

    def set_schema(self, schema: FeatureSchema, behaviors: Sequence[str] = ()) -> None:
        """Finds the category. It reads no behaviors.

        Raises:
            RecpoError: the schema has no such category of users.
        """
        names = [one.name for one in of_type(schema.user, Category)]
        if self.feature not in names:
            raise RecpoError(
                f"the segments are values of {self.feature!r}, which is no category of the users here "
                f"({', '.join(names) or 'there is none'}): take the data that they were counted on",
                code="mismatch",
                field="user_features",
            )
        self._place = names.index(self.feature)

    def scores(self, histories: Histories) -> Tensor:
        """See ``BaselinePolicy.scores``.

        Raises:
            RecpoError: the histories have no features of users.
        """
        codes = grade_factors.user_features_of(histories).codes[..., self._place]
        return self.segment_scores[torch.where(codes < self.num_codes, codes, UNKNOWN)]


class FactorPolicy(BaselinePolicy):
    """The grade that a factor model expects, or its lower bound: the tilted policy (``tilted.py``) without a base.

    Args:
        num_items: catalog size V.
        factors: numbers of the factor model.
        temperature: see ``BaselinePolicy``.
    """

    def __init__(
        self, num_items: int, *, factors: grade_factors.GradeFactorsOptions, temperature: float = 0.05
    ) -> None:
        super().__init__(num_items, max_history=factors.max_history, temperature=temperature)
        self.factors = grade_factors.GradeFactors(num_items, factors)
        self.reads = self.factors.reads

    def set_schema(self, schema: FeatureSchema, behaviors: Sequence[str] = ()) -> None:
        """See ``Policy.set_schema``."""
        self.factors.set_schema(schema)

    def scores(self, histories: Histories) -> Tensor:
        """See ``BaselinePolicy.scores``; up to what all items of a history share."""
        states = self.factors.tilt(self.factors.fold_in(histories), 1.0)
        table = self.factors.item_vectors()[1:]
        return catalog_search.scores_of(states, table, self.factors.variance_columns, catalog_search.product)


class ImplicitPolicy(BaselinePolicy, DotProductPolicy):
    """Implicit ALS or AllRank (``recpo.rewards.implicit``): ``x · y_i``, with ``x`` folded in from the history.

    The fold-in is the user step of the fit. The logits are dot products, so a tilted policy on top of it is exact.

    Args:
        num_items: catalog size V.
        rank: number of factors r.
        unobserved: weight of the pairs without such an event.
        ridge: ridge of the users; above 0.
        nu: exponent of their frequency.
        max_history: number of most recent events that are read.
        graded: AllRank, which reads all graded events; False = implicit ALS, which reads positives.
        temperature: see ``BaselinePolicy``.

    Attributes:
        item_factors: ``[V, r]``.
    """

    item_factors: Tensor

    def __init__(
        self,
        num_items: int,
        *,
        rank: int,
        unobserved: float,
        ridge: float,
        nu: float,
        max_history: int,
        graded: bool = False,
        temperature: float = 0.1,
    ) -> None:
        super().__init__(num_items, max_history=max_history, temperature=temperature)
        self.graded, self.unobserved, self.ridge, self.nu = graded, unobserved, ridge, nu
        self.rank = self.dim = rank
        self.register_buffer("item_factors", torch.zeros(num_items, rank))

    def scores(self, histories: Histories) -> Tensor:
        """See ``BaselinePolicy.scores``."""
        return self.fold_in(histories) @ self.item_factors.T

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``."""
        catalog_search.validate_list_length(k, self.num_items)
        return catalog_search.top_k(self.last_states(histories), self.output_vectors(), k, exclude)

    def last_states(self, histories: Histories) -> Tensor:
        """See ``DotProductPolicy.last_states``."""
        return self.fold_in(histories) / self.temperature

    def states_at(self, histories: Histories, context: Tensor, visible: Tensor) -> Tensor:
        """See ``DotProductPolicy.states_at``: every prefix is folded in by itself."""
        return torch.cat([self.last_states(part) for part in prefixes(histories, context, visible)])

    def output_vectors(self) -> Tensor:
        """See ``DotProductPolicy.output_vectors``."""
        return F.pad(self.item_factors, (0, 0, 1, 0))

    def fold_in(self, histories: Histories) -> Tensor:
        """``x`` of the histories, ``[B, r]`` float32."""
        if self.graded:
            known, targets = graded_events(histories, self.max_history)
        else:
            known = distinct_positives(histories, self.max_history)
            targets = known.double()
        items = self.item_factors.double()
        rows = items[(histories.item_ids - 1).clamp_min(0)] * known[..., None]
        ridge = self.ridge * (known.sum(1).double() + self.unobserved * self.num_items) ** self.nu
        identity = torch.eye(items.shape[1], dtype=items.dtype, device=items.device)
        matrices = rows.transpose(1, 2) @ rows + self.unobserved * (items.T @ items) + ridge[:, None, None] * identity
        solve = small_systems.solve_positive_definite if torch.compiler.is_exporting() else torch.linalg.solve
        users: Tensor = solve(matrices, (rows * targets[..., None]).sum(1))
        return users.float()


class EasePolicy(BaselinePolicy):
    """EASE (``recpo.rewards.implicit``): the sum of ``B[j, i]`` over the positives j of the history.

    Args:
        num_items: catalog size V.
        max_history: number of most recent events that are read.
        temperature: see ``BaselinePolicy``.

    Attributes:
        weights: ``[V, V]``, ``B``.
    """

    weights: Tensor

    def __init__(self, num_items: int, *, max_history: int, temperature: float = 0.1) -> None:
        super().__init__(num_items, max_history=max_history, temperature=temperature)
        self.register_buffer("weights", torch.zeros(num_items, num_items))

    def scores(self, histories: Histories) -> Tensor:
        """See ``BaselinePolicy.scores``."""
        known = distinct_positives(histories, self.max_history)
        if not torch.compiler.is_exporting():
            row, once = (histories.item_ids - 1).clamp_min(0), known.to(self.weights.dtype)
            return F.embedding_bag(row, self.weights, mode="sum", per_sample_weights=once)
        ids = torch.where(known, histories.item_ids, 0)
        chosen = torch.zeros_like(self.weights[:1, :1]).expand(ids.shape[0], self.num_items + 1)
        return chosen.scatter(1, ids, 1.0)[:, 1:] @ self.weights


class SequentialRulesPolicy(BaselinePolicy):
    """Sequential rules (``recpo.rewards.counted``): what followed the positives of the history elsewhere.

    ``score(h, i) = sum over positives j of h of decay^age(j) weight(j -> i)``; the most recent positive has age 0.
    Items that no rule leads to follow in the order of ``popularity``, which is below every rule.

    Args:
        num_items: catalog size V.
        neighbors: rules N per item.
        decay: weight of a positive relative to the next one.
        max_history: number of most recent events that are read.
        temperature: see ``BaselinePolicy``.

    Attributes:
        followers: ``[V + 1, N]`` int32, the items that rules lead to, padded with 0.
        weights: ``[V + 1, N]``, 0 for padding.
        popularity: ``[V]``.
    """

    followers: Tensor
    weights: Tensor
    popularity: Tensor

    def __init__(
        self, num_items: int, *, neighbors: int, decay: float, max_history: int, temperature: float = 0.05
    ) -> None:
        super().__init__(num_items, max_history=max_history, temperature=temperature)
        self.neighbors, self.decay = neighbors, decay
        self.register_buffer("followers", torch.zeros(num_items + 1, neighbors, dtype=torch.int32))
        self.register_buffer("weights", torch.zeros(num_items + 1, neighbors))
        self.register_buffer("popularity", torch.zeros(num_items))

    def scores(self, histories: Histories) -> Tensor:
        """See ``BaselinePolicy.scores``."""
        known = distinct_positives(histories, self.max_history).long()
        age = known.sum(1, keepdim=True) - known.cumsum(1)
        ids = histories.item_ids * known
        weights = self.weights[ids] * (self.decay ** age.float())[..., None]
        followers = self.followers[ids].long().flatten(1)
        none = torch.zeros_like(self.weights[:1, :1]).expand(ids.shape[0], self.num_items + 1)
        return none.scatter_add(1, followers, weights.flatten(1))[:, 1:] + self.popularity


class PersonalPopularityPolicy(BaselinePolicy):
    """How often the user chose an item, newer choices counting more: "top personal", or "personal top frequency".

    ``score(h, i) = log(1 + sum over positives of i in h of decay^age)``; the most recent positive of h has age 0.
    Items that are not in the history follow in the order of ``popularity``, which is below every chosen item. Where
    people choose the same items again, few models list better (Li et al., "A Next Basket Recommendation Reality
    Check", TOIS 2023).

    Args:
        num_items: catalog size V.
        decay: weight of a positive relative to the next one.
        max_history: number of most recent events that are read.
        temperature: see ``BaselinePolicy``.

    Attributes:
        popularity: ``[V]``.
    """

    popularity: Tensor

    def __init__(
        self, num_items: int, *, decay: float = 0.98, max_history: int = 200, temperature: float = 0.2
    ) -> None:
        super().__init__(num_items, max_history=max_history, temperature=temperature)
        self.decay = decay
        self.register_buffer("popularity", torch.zeros(num_items))

    def scores(self, histories: Histories) -> Tensor:
        """See ``BaselinePolicy.scores``."""
        feedback, recent = grade_factors.recent_feedback(histories, self.max_history)
        positive = (recent & (feedback >= LEAST_POSITIVE_LEVEL)).long()
        age = positive.sum(1, keepdim=True) - positive.cumsum(1)
        none = torch.zeros_like(self.popularity[:1]).expand(positive.shape[0], self.num_items + 1)
        chosen = none.scatter_add(1, histories.item_ids * positive, self.decay ** age.float() * positive)
        return chosen[:, 1:].log1p() + self.popularity


def graded_events(histories: Histories, max_history: int) -> tuple[Tensor, Tensor]:
    """Which of the last ``max_history`` events have a grade, ``[B, H]`` bool, and the grades, float64, 0 elsewhere.

    An item that occurs several times counts each time.
    """
    feedback, recent = grade_factors.recent_feedback(histories, max_history)
    grades = torch.tensor([0.0, *GRADES[1:]], dtype=torch.float64, device=feedback.device)
    known = recent & (feedback > 0)
    return known, grades[feedback] * known


def distinct_positives(histories: Histories, max_history: int) -> Tensor:
    """``[B, H]`` bool: the last one of each item, of the last ``max_history`` events at one of the upper levels.

    Exported programs, which cannot sort in a stable way, compare all pairs.
    """
    item_ids, (feedback, recent) = histories.item_ids, grade_factors.recent_feedback(histories, max_history)
    known = recent & (feedback >= LEAST_POSITIVE_LEVEL)
    if not torch.compiler.is_exporting():
        return first_places(item_ids.flip(1), known.flip(1)).flip(1)
    place = torch.arange(item_ids.shape[1], device=item_ids.device)
    again = (item_ids[:, :, None] == item_ids[:, None, :]) & known[:, None, :] & (place[None, :] > place[:, None])
    return known & ~again.any(2)


def options_of(policy: BaselinePolicy) -> dict[str, Any]:
    """The constructor options of a baseline, which keeps each under its name; without ``num_items``."""
    names = inspect.signature(type(policy)).parameters
    return {name: getattr(policy, name) for name in names if name != "num_items"}
