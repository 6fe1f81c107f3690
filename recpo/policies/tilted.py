"""A policy and a second model as one policy: ``pi(i | h) ∝ base(i | h) exp(g(h, i) / temperature)``.

It maximizes ``E_pi[g] - temperature KL(pi || base)`` over all policies, where ``g(h, i)`` is the grade that a factor
model expects, or a lower confidence bound of it, or the score of a baseline. Users are folded in from the given
history, so new users need nothing else.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from recpo.base.contracts import DotProductPolicy, Policy
from recpo.base.errors import RecpoError, validate_range
from recpo.base.features import FeatureSchema
from recpo.base.types import Features, FeedbackBatch, Histories, Recommendations, SamplingOptions, Slates
from recpo.ops.kernels import without_autocast
from recpo.ops.linear_logprob import linear_logprob
from recpo.policies import catalog_search, sampling
from recpo.policies.baseline import BaselinePolicy
from recpo.policies.encoder import readable_ids
from recpo.policies.grade_factors import GradeFactors, GradeFactorsOptions, validate_temperature
from recpo.policies.sampling import HISTORIES_AT_ONCE, planned_items, prefixes, scoring_plan, spread

T = TypeVar("T")


class OnBase(Policy):
    """A policy that tilts another one, its base, by a second model, and passes on to both what it receives.

    Attributes:
        base: the policy that is tilted.
        temperature: difference in grade or score that moves the log-odds of two items by 1.
    """

    base: Policy
    temperature: float
    _second: ClassVar[str]
    _kept: dict[tuple[object, ...], tuple[Histories, Any]] | None = None
    """Within ``keeping_histories``, what was read of histories, at any temperature; beside them, so that ids stay."""

    def __init__(
        self, num_items: int, base: Callable[[int], Policy], second: GradeFactors | BaselinePolicy, temperature: float
    ) -> None:
        validate_temperature(temperature)
        Policy.__init__(self)  # not that of BaselinePolicy, which would be told what follows here
        self.base, self.temperature = base(num_items), temperature
        setattr(self, self._second, second)
        self.num_items, self.max_history = num_items, max(self.base.max_history, second.max_history)
        self._read_as_base()

    @property
    def second(self) -> GradeFactors | BaselinePolicy:
        """What tilts the base: a factor model of grades, or a baseline with its scores."""
        model: GradeFactors | BaselinePolicy = getattr(self, self._second)
        return model

    def set_schema(self, schema: FeatureSchema, behaviors: Sequence[str] = ()) -> None:
        """See ``Policy.set_schema``."""
        self.base.set_schema(schema, behaviors)
        self.second.set_schema(schema, behaviors)

    def set_item_features(self, features: Features) -> None:
        """See ``Policy.set_item_features``."""
        self.base.set_item_features(features)

    def precompute_item_vectors(self) -> None:
        """See ``Policy.precompute_item_vectors``."""
        self.base.precompute_item_vectors()
        self._read_as_base()

    @abstractmethod
    def kl_from_base(self, histories: Histories) -> Tensor:
        """``KL(pi || base)`` in nats after the complete history: ``[B]``."""

    @contextmanager
    def keeping_histories(self) -> Iterator[None]:
        """Within it, the same histories are read once, for calls at several temperatures.

        ``temperature`` may change between calls, and weights may not. Histories are the same if they are one object.
        """
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def _once(self, read: Callable[[], T], histories: Histories, *how: object) -> T:
        """What ``read`` reads of histories; within ``keeping_histories`` once for each ``how``, tensors by value."""
        if self._kept is None:
            return read()
        key = (id(histories), *(one.cpu().numpy().tobytes() if isinstance(one, Tensor) else one for one in how))
        if key not in self._kept:
            self._kept[key] = histories, read()
        found: T = self._kept[key][1]
        return found

    def _read_as_base(self) -> None:
        base = self.base
        self.reads = base.reads | self.second.reads
        self.reads_timestamps, self.reads_item_features = base.reads_timestamps, base.reads_item_features


class TiltedPolicy(OnBase):
    """``base(i | h) exp(grade(h, i) / temperature)``, normalized: of a softmax over products, exact.

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
    _second = "factors"

    def __init__(
        self,
        num_items: int,
        *,
        base: Callable[[int], DotProductPolicy],
        factors: GradeFactorsOptions,
        temperature: float,
    ) -> None:
        super().__init__(num_items, base, GradeFactors(num_items, factors), temperature)
        _validate_base(self.base)
        self.dim = self.base.dim + factors.rank + 1 + self.factors.rooted

    def output_vectors(self) -> Tensor:
        """The vectors ``[V + 1, d]`` that multiply states (``catalog_search.scores_of``); row 0 is not an item."""
        return torch.cat([self.base.output_vectors(), self.factors.item_vectors()], 1)

    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None) -> Tensor:
        """See ``Policy.log_prob``."""
        plan = scoring_plan(batch, needed)
        states, targets = self._states_at(batch.histories, plan.rows), planned_items(plan, batch.slates)
        if self.factors.rooted:
            logp = self._bounded_log_prob(states, targets, plan.state_index)
        else:
            logp = linear_logprob(states, self.output_vectors(), targets, plan.state_index)
        return spread(plan, logp)[..., None]

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``. If ``B x V`` is large, the catalog is scored in blocks."""
        catalog_search.validate_list_length(k, self.num_items)
        states, rooted = self.last_states(histories), self.factors.rooted
        return catalog_search.top_k(states, self.output_vectors(), k, exclude, rooted)

    @torch.no_grad()
    def sample(
        self, histories: Histories, group_size: int, options: SamplingOptions = SamplingOptions()
    ) -> tuple[Tensor, Tensor]:
        """See ``Policy.sample``."""
        states = self.last_states(histories)
        if not self.factors.rooted:
            ids, logp = sampling.draw(states, self.output_vectors(), group_size, options)
            return ids, logp[..., None]
        sampling.validate_sampling(group_size, options)
        drawn = [
            sampling.draw_from_scores(part / options.temperature, group_size, options) for part in self._scores(states)
        ]
        ids, logp = (torch.cat(column) for column in zip(*drawn, strict=True))
        return ids, logp[..., None]

    @torch.no_grad()
    def kl_from_base(self, histories: Histories) -> Tensor:
        """``KL(pi || base)`` in nats after the complete history, exact over the catalog: ``[B]``."""
        states, own = self.last_states(histories), self.base.dim
        table, parts = self.base.output_vectors()[1:], []
        for part, scores in zip(states.split(self._at_once), self._scores(states), strict=True):
            logp, base = scores.log_softmax(1), (part[:, :own] @ table.T).log_softmax(1)
            parts.append((logp.exp() * (logp - base)).sum(1))
        return torch.cat(parts)

    @property
    def _at_once(self) -> int:
        return sampling.contexts_at_once(self.num_items)

    def _scores(self, states: Tensor) -> Iterator[Tensor]:
        """Scores ``[n, V]`` of all items, a few contexts at a time."""
        table = self.output_vectors()[1:]
        for part in states.split(self._at_once):
            with without_autocast(states.device):
                scores = catalog_search.scores_of(part.float(), table, self.factors.rooted, catalog_search.product)
            yield scores

    def _bounded_log_prob(self, states: Tensor, targets: Tensor, state_index: Tensor | None) -> Tensor:
        """``linear_logprob`` for scores that are not a dot product."""
        lse = torch.cat([scores.logsumexp(1) for scores in self._scores(states)])
        of_target, lse = (states, lse) if state_index is None else (states[state_index], lse[state_index])
        vectors, own = self.output_vectors()[targets], self.dim - self.factors.rooted
        variance = (of_target[:, own:] * vectors[:, own:]).detach().sum(1)
        return (of_target[:, :own] * vectors[:, :own]).sum(1) - variance.clamp_min(0.0).sqrt() - lse

    def last_states(self, histories: Histories) -> Tensor:
        """States ``[B, d]`` after the complete history."""
        readable_ids(histories, self.max_history)
        return self._joined(*self._once(lambda: self._read(histories), histories))

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


class _Ranked(NamedTuple):
    """Candidates of N histories.

    Attributes:
        known: what the second model knows of them.
        item_ids: ``[N, C]``; 0 if the base lists fewer.
        base: ``[N, C]`` the base's log-probabilities; -inf for id 0.
        scores: ``[N, C]`` with ``g`` divided by temperature added.
        lse: ``[N]`` log-sum-exp of the scores.
    """

    known: Tensor
    item_ids: Tensor
    base: Tensor
    scores: Tensor
    lse: Tensor


class _Reranked(OnBase):
    """``base(i | h) exp(g(h, i) / temperature)``, normalized over the best items of the base's own search.

    For policies that cannot score the complete catalog, such as policies over semantic ids. Their beam search finds the
    candidates, and base and second model together rank them. Lists and draws are exact for the distribution over these
    candidates. The log-probability of a given item is an estimate, because items outside the candidates are missing in
    the normalizer.
    """

    has_exact_log_prob = False

    def __init__(
        self,
        num_items: int,
        base: Callable[[int], Policy],
        second: GradeFactors | BaselinePolicy,
        temperature: float,
        candidates: int,
    ) -> None:
        super().__init__(num_items, base, second, temperature)
        validate_range(candidates >= 1, "candidates", "must be at least 1", candidates)
        self.candidates, self.catalog_checksum = candidates, self.base.catalog_checksum

    @abstractmethod
    def _known(self, histories: Histories) -> Tensor:
        """What the second model knows of the histories, ``[N, ...]``."""

    @abstractmethod
    def _gains(self, known: Tensor, item_ids: Tensor) -> Tensor:
        """``g`` of items ``[N, C]``, up to a number per history."""

    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None) -> Tensor:
        """See ``Policy.log_prob``. This is an estimate, normalized over the candidates and the item itself."""
        plan, width = scoring_plan(batch, needed), batch.histories.item_ids.shape[1] + 1
        items, state, rows = planned_items(plan, batch.slates), plan.states, plan.rows
        found = [self._ranked(part) for part in prefixes(batch.histories, rows // width, rows % width)]
        ranked = _Ranked(*(torch.cat(column) for column in zip(*found, strict=True)))
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
        best, place = ranked.scores.gather(1, order).topk(k, 1)
        ids = catalog_search.ties_to_smaller_id(best, ids.gather(1, place), self.num_items + 1)
        return Recommendations(ids.masked_fill(best == -torch.inf, 0), best - ranked.lse[:, None])

    @torch.no_grad()
    def sample(
        self, histories: Histories, group_size: int, options: SamplingOptions = SamplingOptions()
    ) -> tuple[Tensor, Tensor]:
        """See ``Policy.sample``. The temperature divides the scores of the candidates."""
        sampling.validate_sampling(group_size, options)
        ranked = self._ranked(histories)
        places, logp = sampling.draw_from_scores(ranked.scores / options.temperature, group_size, options)
        ids = F.pad(ranked.item_ids, (1, 0)).gather(1, places)
        return ids, logp[..., None]

    @torch.no_grad()
    def kl_from_base(self, histories: Histories) -> Tensor:
        """``KL(pi || base)`` in nats after the complete history, both restricted to the candidates: ``[B]``."""
        ranked = self._ranked(histories)
        logp, base = ranked.scores - ranked.lse[:, None], ranked.base.log_softmax(1)
        return torch.where(ranked.item_ids > 0, logp.exp() * (logp - base), 0.0).sum(1)

    def _ranked(self, histories: Histories, size: int | None = None, exclude: Tensor | None = None) -> _Ranked:
        size = min(self.num_items, self.candidates if size is None else size)
        listed, known = self._once(lambda: self._read(histories, size, exclude), histories, size, exclude)
        scores = listed.scores + self._gains(known, listed.item_ids) / self.temperature
        # finite even if no item remains
        lse = scores.logsumexp(1).clamp_min(torch.finfo(scores.dtype).min)
        return _Ranked(known, listed.item_ids, listed.scores, scores, lse)

    def _read(self, histories: Histories, size: int, exclude: Tensor | None) -> tuple[Recommendations, Tensor]:
        """What the base lists after histories, and what the second model knows of them."""
        return self.base.recommend(histories.recent(self.base.max_history), size, exclude), self._known(histories)

    def _log_prob_of(self, items: Tensor, state: Tensor, ranked: _Ranked, histories: Histories, rows: Tensor) -> Tensor:
        """Log-probabilities ``[N]`` of items ``[N]``, each after its own prefix."""
        width = histories.item_ids.shape[1] + 1
        (prefix,) = prefixes(histories, rows // width, rows % width)
        recent, one = prefix.recent(self.base.max_history), items[:, None]
        slates = Slates(one, recent.lengths[:, None], torch.ones_like(one, dtype=torch.bool))
        base = self.base.log_prob(FeedbackBatch(recent, slates, torch.arange(len(items), device=items.device)))
        own = base[:, 0].sum(1) + self._gains(ranked.known[state], one)[:, 0] / self.temperature
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
    _second = "factors"

    def __init__(
        self,
        num_items: int,
        *,
        base: Callable[[int], Policy],
        factors: GradeFactorsOptions,
        temperature: float,
        candidates: int = 200,
    ) -> None:
        super().__init__(num_items, base, GradeFactors(num_items, factors), temperature, candidates)

    def _known(self, histories: Histories) -> Tensor:
        return self.factors.fold_in(histories)

    def _gains(self, known: Tensor, item_ids: Tensor) -> Tensor:
        return self.factors.relative_grades(known, item_ids)


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
    _second = "scored"

    def __init__(
        self,
        num_items: int,
        *,
        base: Callable[[int], Policy],
        scored: Callable[[int], BaselinePolicy],
        temperature: float,
        candidates: int = 200,
    ) -> None:
        super().__init__(num_items, base, scored(num_items), temperature, candidates)

    def _known(self, histories: Histories) -> Tensor:
        return F.pad(self.scored.scores(histories), (1, 0))

    def _gains(self, known: Tensor, item_ids: Tensor) -> Tensor:
        return known.gather(1, item_ids)


class ProductPolicy(OnBase, BaselinePolicy):
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
    _second = "scored"

    def __init__(
        self,
        num_items: int,
        *,
        base: Callable[[int], DotProductPolicy],
        scored: Callable[[int], BaselinePolicy],
        temperature: float,
    ) -> None:
        super().__init__(num_items, base, scored(num_items), temperature)
        _validate_base(self.base)

    def scores(self, histories: Histories) -> Tensor:
        """The score plus the temperature times the logits of the base."""
        return self.scored.scores(histories) + self.temperature * self._of_base(histories)

    @torch.no_grad()
    def kl_from_base(self, histories: Histories) -> Tensor:
        """See ``OnBase.kl_from_base``; exact over the catalog."""
        every, parts = torch.arange(len(histories.lengths), device=histories.lengths.device), []
        for rows in every.split(sampling.contexts_at_once(self.num_items)):
            part = histories.rows(rows)
            base, tilt = self._of_base(part), self.scored.scores(part) / self.temperature
            logits = base + tilt
            gain = (logits.softmax(1) * tilt).sum(1)
            parts.append(gain - logits.logsumexp(1) + base.logsumexp(1))
        return torch.cat(parts)

    def _of_base(self, histories: Histories) -> Tensor:
        states = self.base.last_states(histories.recent(self.base.max_history))
        return catalog_search.product(states, self.base.output_vectors()[1:])


def _validate_base(base: Policy) -> None:
    if not isinstance(base, DotProductPolicy):
        raise RecpoError(
            f"base makes a {type(base).__name__}, which cannot score the whole catalog: take RerankedPolicy, or with a "
            "baseline RerankedProductPolicy",
            code="wrong_class",
            field="base",
        )
