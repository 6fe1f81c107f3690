"""A policy and a second model as one policy: ``pi(i | h) ∝ base(i | h) exp(g(h, i) / temperature)``.

It maximizes ``E_pi[g] - temperature KL(pi || base)`` over all policies, where ``g(h, i)`` is the grade that a factor
model expects, or a lower confidence bound of it, or the score of a baseline. Users are folded in from the given
history, so new users need nothing else.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from recpo.base.contracts import DotProductPolicy, Policy
from recpo.base.errors import RecpoError, validate_range
from recpo.base.features import FeatureSchema
from recpo.base.types import Features, FeedbackBatch, Histories, Recommendations, SamplingOptions, ScoringPlan, Slates
from recpo.ops.kernels import without_autocast
from recpo.ops.linear_logprob import linear_logprob
from recpo.policies import catalog_search, sampling
from recpo.policies.baseline import BaselinePolicy
from recpo.policies.encoder import readable_ids
from recpo.policies.grade_factors import GradeFactors, GradeFactorsOptions, validate_temperature
from recpo.policies.sampling import HISTORIES_AT_ONCE, planned_items, prefixes, scoring_plan, spread

T = TypeVar("T")
_LOGITS_AT_ONCE = 1 << 18  # 1 MiB


class PolicyWithBase(Policy):
    """A policy that tilts another one, its base, by the scores of a second model.

    Attributes:
        base: the policy that is tilted.
        temperature: difference in score that moves the log-odds of two items by 1.
    """

    base: Policy
    temperature: float
    _cache: dict[tuple[object, ...], tuple[Histories, Any]] | None = None
    """Within ``caching_histories``, what was computed from histories. It keeps these, so that their ids stay unique."""

    def __init__(self, num_items: int, base: Callable[[int], Policy], temperature: float) -> None:
        """Creates the base. A subclass creates the scorer next, and then calls ``_read_for_both``."""
        validate_temperature(temperature)
        Policy.__init__(self)  # not BaselinePolicy.__init__, which takes other arguments
        self.base, self.temperature, self.num_items = base(num_items), temperature, num_items

    @property
    @abstractmethod
    def scorer(self) -> GradeFactors | BaselinePolicy:
        """The model whose scores tilt the base: grades of a factor model, or scores of a baseline."""

    def set_schema(self, schema: FeatureSchema, behaviors: Sequence[str] = ()) -> None:
        """See ``Policy.set_schema``."""
        self.base.set_schema(schema, behaviors)
        self.scorer.set_schema(schema, behaviors)

    def set_item_features(self, features: Features) -> None:
        """See ``Policy.set_item_features``."""
        self.base.set_item_features(features)

    def precompute_item_vectors(self) -> None:
        """See ``Policy.precompute_item_vectors``."""
        self.base.precompute_item_vectors()
        self._read_for_both()

    @abstractmethod
    def kl_from_base(self, histories: Histories) -> Tensor:
        """``KL(pi || base)`` in nats after the complete history: ``[B]``."""

    @contextmanager
    def caching_histories(self) -> Iterator[None]:
        """Caches what is computed from histories, for calls at several temperatures.

        ``temperature`` may change between calls, but weights must not. Histories are looked up by identity.
        """
        self._cache = {}
        try:
            yield
        finally:
            self._cache = None

    def _cached(self, compute: Callable[[], T], histories: Histories, *arguments: object) -> T:
        """``compute()``, which depends on histories and ``arguments``; within ``caching_histories`` called once.

        Args:
            compute: what is cached.
            histories: compared by identity.
            arguments: compared by value.
        """
        if self._cache is None:
            return compute()
        values = (one.cpu().numpy().tobytes() if isinstance(one, Tensor) else one for one in arguments)
        key = (id(histories), *values)
        if key not in self._cache:
            self._cache[key] = histories, compute()
        found: T = self._cache[key][1]
        return found

    def _read_for_both(self) -> None:
        """Reads what the base and the scorer read."""
        base = self.base
        self.max_history = max(base.max_history, self.scorer.max_history)
        self.reads = base.reads | self.scorer.reads
        self.reads_timestamps, self.reads_item_features = base.reads_timestamps, base.reads_item_features


class _ExactlyTilted(PolicyWithBase):
    """A policy that tilts a base which scores the whole catalog.

    Within ``caching_histories``, the scores of all items by the base and by the scorer are computed once: ``[B, V]``
    each, so batches must be small if the catalog is large. ``kl_from_base`` needs both at any time.
    """

    base: DotProductPolicy

    @abstractmethod
    def _all_scores(self, histories: Histories) -> tuple[Tensor, Tensor]:
        """Logits of the base and scores of the scorer after the complete histories, ``[B, V]`` each."""

    def kl_from_base(self, histories: Histories) -> Tensor:
        """See ``PolicyWithBase.kl_from_base``; exact over the catalog."""
        return self._sums(histories)[1]

    def _kept(self, histories: Histories) -> tuple[Tensor, Tensor]:
        return self._cached(lambda: self._all_scores(histories), histories)

    def _pieces(self, base: Tensor, scores: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Logits of a few rows at a time, which stay in the cache, and which rows these are."""
        size = max(1, _LOGITS_AT_ONCE // self.num_items)
        for begin in range(0, len(base), size):
            rows = slice(begin, begin + size)
            yield rows, torch.add(base[rows], scores[rows], alpha=1 / self.temperature)

    def _sums(self, histories: Histories) -> tuple[Tensor, Tensor]:
        """Log-sum-exp of the logits, and ``KL(pi || base)``: ``[B]`` each."""
        return self._cached(lambda: self._summed(histories), histories, self.temperature)

    @torch.no_grad()
    def _summed(self, histories: Histories) -> tuple[Tensor, Tensor]:
        base, scores = self._kept(histories)
        of_base, sums = self._cached(lambda: base.logsumexp(1), histories, "base"), list[tuple[Tensor, Tensor]]()
        for rows, logits in self._pieces(base, scores):
            most = logits.amax(1, keepdim=True)
            weights = logits.sub_(most).exp_()
            total = weights.sum(1)
            sums.append((total.log() + most[:, 0], weights.mul_(scores[rows]).sum(1) / total))
        lse, mean = (torch.cat(column) for column in zip(*sums, strict=True))
        return lse, mean / self.temperature - lse + of_base

    def _kept_lists(self, histories: Histories, k: int, exclude: Tensor | None) -> Recommendations:
        """``recommend`` from the scores that were kept."""
        lse, lists = self._sums(histories)[0][:, None], list[Recommendations]()
        for rows, logits in self._pieces(*self._kept(histories)):
            logits = F.pad(logits, (1, 0), value=-torch.inf)
            out = None if exclude is None else exclude[rows]
            lists.append(catalog_search.best_of_scores(logits, lse[rows], k, out))
        return Recommendations(*(torch.cat(column) for column in zip(*lists, strict=True)))

    def _kept_log_prob(self, batch: FeedbackBatch, plan: ScoringPlan) -> Tensor:
        """Log-probabilities ``[P]`` of the plan's items, all after the complete histories, from what was kept."""
        context = (plan.rows // (batch.histories.item_ids.shape[1] + 1))[plan.states]
        base, scores = (of[context, planned_items(plan, batch.slates) - 1] for of in self._kept(batch.histories))
        return base + scores / self.temperature - self._sums(batch.histories)[0][context]

    def _is_kept(self, batch: FeedbackBatch, plan: ScoringPlan) -> bool:
        """Whether scores are kept, and all items are scored after the complete histories, as in an evaluation."""
        if self._cache is None:
            return False
        width = batch.histories.item_ids.shape[1] + 1
        return bool((plan.rows % width == batch.histories.lengths[plan.rows // width]).all())


class TiltedPolicy(_ExactlyTilted):
    """``base(i | h) exp(grade(h, i) / temperature)``, normalized exactly, of a base that is a ``DotProductPolicy``.

    With the state ``[state / base temperature; p / temperature; 1 / temperature]`` and the item vector ``[vector; q;
    b]``, its logit is one dot product; the part that all items of a context share (``mean + b(h)``) cancels. For
    ``temperature`` toward infinity it is the base, and toward 0 it ranks like the factor model. With a lower bound, the
    logit is that product minus the root of a second product with ``(r + 1) (r + 2)`` more columns, and probabilities of
    given items require all scores of a context at once.

    Args:
        num_items: catalog size V.
        base: creates the policy to tilt.
        factors: numbers of the factor model. The base reads its own number of events, and the policy's ``max_history``
            is the larger of the two.
        temperature: the grade that is worth one nat of log-probability; above 0.
    """

    base: DotProductPolicy
    factors: GradeFactors

    def __init__(
        self,
        num_items: int,
        *,
        base: Callable[[int], DotProductPolicy],
        factors: GradeFactorsOptions,
        temperature: float,
    ) -> None:
        super().__init__(num_items, base, temperature)
        _validate_base(self.base)
        self.factors = GradeFactors(num_items, factors)
        self._read_for_both()
        self.dim = self.base.dim + factors.rank + 1 + self.factors.variance_columns

    @property
    def scorer(self) -> GradeFactors:
        """See ``PolicyWithBase.scorer``."""
        return self.factors

    def output_vectors(self) -> Tensor:
        """The vectors ``[V + 1, d]`` that multiply states (``catalog_search.scores_of``); row 0 is not an item."""
        return torch.cat([self.base.output_vectors(), self.factors.item_vectors()], 1)

    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None) -> Tensor:
        """See ``Policy.log_prob``."""
        plan = scoring_plan(batch, needed)
        if self._is_kept(batch, plan):
            return spread(plan, self._kept_log_prob(batch, plan))[..., None]
        states, targets = self._states_at(batch.histories, plan.rows), planned_items(plan, batch.slates)
        if self.factors.options.lower_bound:
            logp = self._bounded_log_prob(states, targets, plan.state_index)
        else:
            logp = linear_logprob(states, self.output_vectors(), targets, plan.state_index)
        return spread(plan, logp)[..., None]

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``. If ``B x V`` is large, the catalog is scored in blocks."""
        catalog_search.validate_list_length(k, self.num_items)
        if self._cache is not None:
            return self._kept_lists(histories, k, exclude)
        states, table = self.last_states(histories), self.output_vectors()
        return catalog_search.top_k(states, table, k, exclude, self.factors.variance_columns)

    @torch.no_grad()
    def sample(
        self, histories: Histories, group_size: int, options: SamplingOptions = SamplingOptions()
    ) -> tuple[Tensor, Tensor]:
        """See ``Policy.sample``."""
        states = self.last_states(histories)
        if not self.factors.options.lower_bound:
            ids, logp = sampling.draw(states, self.output_vectors(), group_size, options)
            return ids, logp[..., None]
        sampling.validate_sampling(group_size, options)
        drawn = [
            sampling.draw_from_scores(part / options.temperature, group_size, options) for part in self._scores(states)
        ]
        ids, logp = (torch.cat(column) for column in zip(*drawn, strict=True))
        return ids, logp[..., None]

    def _all_scores(self, histories: Histories) -> tuple[Tensor, Tensor]:
        states, users = self._read(histories)
        of_items, columns = self.factors.item_vectors()[1:], self.factors.variance_columns
        with without_autocast(states.device):
            base = catalog_search.product(states.float(), self.base.output_vectors()[1:].float())
            return base, catalog_search.scores_of(self.factors.tilt(users, 1.0), of_items, columns)

    def _scores(self, states: Tensor) -> Iterator[Tensor]:
        """Scores ``[n, V]`` of all items, a few contexts at a time."""
        table = self.output_vectors()[1:]
        for part in states.split(sampling.contexts_at_once(self.num_items)):
            with without_autocast(states.device):
                scores = catalog_search.scores_of(
                    part.float(), table, self.factors.variance_columns, catalog_search.product
                )
            yield scores

    def _bounded_log_prob(self, states: Tensor, targets: Tensor, state_index: Tensor | None) -> Tensor:
        """``linear_logprob`` for scores that are not a dot product."""
        lse = torch.cat([scores.logsumexp(1) for scores in self._scores(states)])
        of_target, lse = (states, lse) if state_index is None else (states[state_index], lse[state_index])
        vectors, own = self.output_vectors()[targets], self.dim - self.factors.variance_columns
        variance = (of_target[:, own:] * vectors[:, own:]).detach().sum(1)
        return (of_target[:, :own] * vectors[:, :own]).sum(1) - variance.clamp_min(0.0).sqrt() - lse

    def last_states(self, histories: Histories) -> Tensor:
        """States ``[B, d]`` after the complete history."""
        readable_ids(histories, self.max_history)
        return self._joined(*self._read(histories))

    def _read(self, histories: Histories) -> tuple[Tensor, Tensor]:
        return self.base.last_states(histories.recent(self.base.max_history)), self.factors.fold_in(histories)

    def _states_at(self, histories: Histories, rows: Tensor) -> Tensor:
        """The states ``[N, d]`` of the prefixes ``rows``: ``context * (H + 1) + visible``."""
        width = readable_ids(histories, self.max_history).shape[1]
        context, visible = rows // (width + 1), rows % (width + 1)
        if bool((visible == histories.lengths[context]).all()):  # as in an evaluation
            return self.last_states(histories)[context]
        states = self.base.states_at(histories, context, visible)
        users = [self.factors.fold_in(part) for part in prefixes(histories, context, visible)]
        return self._joined(states, torch.cat(users))

    def _joined(self, states: Tensor, users: Tensor) -> Tensor:
        return torch.cat([states, self.factors.tilt(users, self.temperature)], 1)


class _RankedCandidates(NamedTuple):
    """Candidates of N histories.

    Attributes:
        scorer_states: ``[N, ...]``, see ``_Reranked._scorer_states``.
        item_ids: ``[N, C]``; 0 if the base lists fewer.
        base_logp: ``[N, C]`` log-probabilities under the base; -inf for id 0.
        logits: ``[N, C]`` log-probabilities under the base, plus scores divided by the temperature.
        lse: ``[N]`` log-sum-exp of the logits.
    """

    scorer_states: Tensor
    item_ids: Tensor
    base_logp: Tensor
    logits: Tensor
    lse: Tensor


class _Reranked(PolicyWithBase):
    """``base(i | h) exp(g(h, i) / temperature)``, normalized over the best items of the base's own search.

    For policies that cannot score the complete catalog, such as policies over semantic ids. Their beam search finds the
    candidates, and base and scorer together rank them. Lists and draws are exact for the distribution over these
    candidates. The log-probability of a given item is an estimate, because items outside the candidates are missing in
    the normalizer.
    """

    has_exact_log_prob = False

    def __init__(
        self,
        num_items: int,
        base: Callable[[int], Policy],
        temperature: float,
        candidates: int,
    ) -> None:
        super().__init__(num_items, base, temperature)
        validate_range(candidates >= 1, "candidates", "must be at least 1", candidates)
        self.candidates, self.catalog_checksum = candidates, self.base.catalog_checksum

    @abstractmethod
    def _scorer_states(self, histories: Histories) -> Tensor:
        """What the scorer computes from histories before it scores items, ``[N, ...]``."""

    @abstractmethod
    def _scores(self, scorer_states: Tensor, item_ids: Tensor) -> Tensor:
        """Scores of items ``[N, C]``, up to a constant per history."""

    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None) -> Tensor:
        """See ``Policy.log_prob``. This is an estimate, normalized over the candidates and the item itself."""
        plan, width = scoring_plan(batch, needed), batch.histories.item_ids.shape[1] + 1
        items, state, rows = planned_items(plan, batch.slates), plan.states, plan.rows
        found = [self._ranked(part) for part in prefixes(batch.histories, rows // width, rows % width)]
        ranked = _RankedCandidates(*(torch.cat(column) for column in zip(*found, strict=True)))
        parts = [
            self._log_prob_of(some, of_state, ranked, batch.histories, rows[of_state])
            for some, of_state in zip(items.split(HISTORIES_AT_ONCE), state.split(HISTORIES_AT_ONCE), strict=True)
        ]
        return spread(plan, torch.cat(parts))[..., None]

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``. Scores are log-probabilities among the candidates that are not excluded."""
        catalog_search.validate_list_length(k, self.num_items)
        ranked = self._ranked(histories, max(self.candidates, k), exclude)
        # ordered by id, so that equal scores stay in this order
        ids, order = ranked.item_ids.sort(1)
        best, place = ranked.logits.gather(1, order).topk(k, 1)
        ids = catalog_search.ties_to_smaller_id(best, ids.gather(1, place), self.num_items + 1)
        return Recommendations(ids.masked_fill(best == -torch.inf, 0), best - ranked.lse[:, None])

    @torch.no_grad()
    def sample(
        self, histories: Histories, group_size: int, options: SamplingOptions = SamplingOptions()
    ) -> tuple[Tensor, Tensor]:
        """See ``Policy.sample``. The temperature divides the scores of the candidates."""
        sampling.validate_sampling(group_size, options)
        ranked = self._ranked(histories)
        places, logp = sampling.draw_from_scores(ranked.logits / options.temperature, group_size, options)
        ids = F.pad(ranked.item_ids, (1, 0)).gather(1, places)
        return ids, logp[..., None]

    @torch.no_grad()
    def kl_from_base(self, histories: Histories) -> Tensor:
        """``KL(pi || base)`` in nats after the complete history, both restricted to the candidates: ``[B]``."""
        ranked = self._ranked(histories)
        logp, base = ranked.logits - ranked.lse[:, None], ranked.base_logp.log_softmax(1)
        return torch.where(ranked.item_ids > 0, logp.exp() * (logp - base), 0.0).sum(1)

    def _ranked(
        self, histories: Histories, size: int | None = None, exclude: Tensor | None = None
    ) -> _RankedCandidates:
        size = min(self.num_items, self.candidates if size is None else size)
        listed, states = self._cached(lambda: self._read(histories, size, exclude), histories, size, exclude)
        logits = listed.scores + self._scores(states, listed.item_ids) / self.temperature
        # finite even if no item remains
        lse = logits.logsumexp(1).clamp_min(torch.finfo(logits.dtype).min)
        return _RankedCandidates(states, listed.item_ids, listed.scores, logits, lse)

    def _read(self, histories: Histories, size: int, exclude: Tensor | None) -> tuple[Recommendations, Tensor]:
        """The candidates of the base, and the states of the scorer."""
        listed = self.base.recommend(histories.recent(self.base.max_history), size, exclude)
        return listed, self._scorer_states(histories)

    def _log_prob_of(
        self, items: Tensor, state: Tensor, ranked: _RankedCandidates, histories: Histories, rows: Tensor
    ) -> Tensor:
        """Log-probabilities ``[N]`` of items ``[N]``, each after its own prefix."""
        width = histories.item_ids.shape[1] + 1
        (prefix,) = prefixes(histories, rows // width, rows % width)
        recent, one = prefix.recent(self.base.max_history), items[:, None]
        slates = Slates(one, recent.lengths[:, None], torch.ones_like(one, dtype=torch.bool))
        base = self.base.log_prob(FeedbackBatch(recent, slates, torch.arange(len(items), device=items.device)))
        own = base[:, 0].sum(1) + self._scores(ranked.scorer_states[state], one)[:, 0] / self.temperature
        lse = ranked.lse[state]
        return own - torch.where((ranked.item_ids[state] == one).any(1), lse, torch.logaddexp(lse, own))


class RerankedPolicy(_Reranked):
    """``base(i | h) exp(grade(h, i) / temperature)`` over the best items of a base that cannot score the catalog.

    Args:
        num_items: catalog size V.
        base: creates the policy to tilt.
        factors: numbers of the factor model. The base reads its own number of events, and the policy's ``max_history``
            is the larger of the two.
        temperature: the grade that is worth one nat of log-probability; above 0.
        candidates: number of the base's items to rerank; at least ``k``.
    """

    factors: GradeFactors

    def __init__(
        self,
        num_items: int,
        *,
        base: Callable[[int], Policy],
        factors: GradeFactorsOptions,
        temperature: float,
        candidates: int = 200,
    ) -> None:
        super().__init__(num_items, base, temperature, candidates)
        self.factors = GradeFactors(num_items, factors)
        self._read_for_both()

    @property
    def scorer(self) -> GradeFactors:
        """See ``PolicyWithBase.scorer``."""
        return self.factors

    def _scorer_states(self, histories: Histories) -> Tensor:
        return self.factors.fold_in(histories)

    def _scores(self, scorer_states: Tensor, item_ids: Tensor) -> Tensor:
        return self.factors.relative_grades(scorer_states, item_ids)


class RerankedProductPolicy(_Reranked):
    """``base(i | h) exp(score(h, i) / temperature)`` over the best items of a base that cannot score the catalog.

    Args:
        num_items: catalog size V.
        base: creates the policy to tilt.
        scored: creates the baseline. Its own temperature is not used.
        temperature: difference in score that moves the log-odds of two items by 1; above 0.
        candidates: number of the base's items to rerank; at least ``k``.
    """

    scored: BaselinePolicy

    def __init__(
        self,
        num_items: int,
        *,
        base: Callable[[int], Policy],
        scored: Callable[[int], BaselinePolicy],
        temperature: float,
        candidates: int = 200,
    ) -> None:
        super().__init__(num_items, base, temperature, candidates)
        self.scored = scored(num_items)
        self._read_for_both()

    @property
    def scorer(self) -> BaselinePolicy:
        """See ``PolicyWithBase.scorer``."""
        return self.scored

    def _scorer_states(self, histories: Histories) -> Tensor:
        return F.pad(self.scored.scores(histories), (1, 0))

    def _scores(self, scorer_states: Tensor, item_ids: Tensor) -> Tensor:
        return scorer_states.gather(1, item_ids)


class ProductPolicy(_ExactlyTilted, BaselinePolicy):
    """``base(i | h) exp(score(h, i) / temperature)``, normalized: a policy tilted by the scores of a baseline.

    A product of experts (Hinton, Neural Computation 2002): one generalizes from embeddings, the other remembers which
    item followed which.

    Args:
        num_items: catalog size V.
        base: creates the policy to tilt.
        scored: creates the baseline. Its own temperature is not used.
        temperature: difference in score that moves the log-odds of two items by 1; above 0.
    """

    base: DotProductPolicy
    scored: BaselinePolicy

    def __init__(
        self,
        num_items: int,
        *,
        base: Callable[[int], DotProductPolicy],
        scored: Callable[[int], BaselinePolicy],
        temperature: float,
    ) -> None:
        super().__init__(num_items, base, temperature)
        _validate_base(self.base)
        self.scored = scored(num_items)
        self._read_for_both()

    @property
    def scorer(self) -> BaselinePolicy:
        """See ``PolicyWithBase.scorer``."""
        return self.scored

    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None) -> Tensor:
        """See ``Policy.log_prob``."""
        plan = scoring_plan(batch, needed)
        if self._is_kept(batch, plan):
            return spread(plan, self._kept_log_prob(batch, plan))[..., None]
        return super().log_prob(batch, needed)

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``."""
        if self._cache is not None:
            return self._kept_lists(histories, k, exclude)
        return super().recommend(histories, k, exclude)

    def scores(self, histories: Histories) -> Tensor:
        """The score plus the temperature times the logits of the base."""
        base, scores = self._all_scores(histories)
        return scores + self.temperature * base

    def _all_scores(self, histories: Histories) -> tuple[Tensor, Tensor]:
        states = self.base.last_states(histories.recent(self.base.max_history))
        return catalog_search.product(states, self.base.output_vectors()[1:]), self.scored.scores(histories)


def _validate_base(base: Policy) -> None:
    if not isinstance(base, DotProductPolicy):
        raise RecpoError(
            f"base makes a {type(base).__name__}, which cannot score the whole catalog: take RerankedPolicy, or with a "
            "baseline RerankedProductPolicy",
            code="wrong_class",
            field="base",
        )
