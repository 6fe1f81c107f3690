"""A trained policy and a factor model of grades as one policy: ``pi(i | h) ∝ base(i | h) exp(g(h, i) / temperature)``.

It maximizes ``E_pi[g] - temperature KL(pi || base)`` over all policies, where ``g(h, i)`` is the grade that the factor
model expects, or a lower confidence bound of it. Users are folded in from the given history, so new users need nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.base.contracts import Policy, StatePolicy
from recpo.base.errors import RecpoError
from recpo.base.features import FeatureSchema
from recpo.base.feedback import GRADES
from recpo.base.types import Features, FeedbackBatch, Histories, Recommendations, SamplingOptions, Slates
from recpo.ops.kernels import take_rows
from recpo.ops.linear_algebra import damped_mean, item_forms, normal_equations, solve_positive_definite, user_forms
from recpo.ops.linear_logprob import linear_entropy, linear_log_softmax, linear_logprob
from recpo.policies import catalog_search, sampling
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.encoder import readable_ids
from recpo.policies.sampling import shared_states


class GradeFactors(nn.Module):
    """``grade(h, i) = mean + p(h) · q_i + b(h) + b_i``: the expected grade of an item (``recpo.base.feedback.GRADES``).

    ``(p, b)`` of a history is the ridge regression of the graded events among its last ``max_history`` on the factors
    of their items, as in ``recpo.rewards.factors.Factors.fold_in``. With a ``lower_bound``, the grade is reduced
    by that many standard deviations of its posterior, ``sqrt(s(h) · t_i)``. This is the variance of
    ``recpo.rewards.graded`` written as a dot product.

    Args:
        num_items: V.
        rank: r.
        mean: mean grade.
        ridge: weight of ``|p - c|^2``; above 0.
        bias_ridge: weight of ``(b - d)^2``; above 0.
        max_history: number of most recent events that ``fold_in`` reads; at least 1.
        lower_bound: standard deviations, at least 0.

    Attributes:
        item_factors: ``[V + 1, r]``, ``q``; row 0 is zero and not an item.
        item_bias: ``[V + 1]``.
        factor_variance: ``[V + 1, r]``, variance of the factors; 0 if they are treated as exact.
        history_prior: ``[V + 1, r + 1]``; its damped mean over a history is ``(c, d)``, the prior mean of ``(p, b)``.
        item_variances: ``[V + 1, rooted]``, ``t``.
        rooted: width of ``s`` and ``t``: ``(r + 1) (r + 2)``; 0 without a lower bound.
    """

    item_factors: Tensor
    item_bias: Tensor
    factor_variance: Tensor
    history_prior: Tensor
    item_variances: Tensor
    _grades: Tensor

    def __init__(
        self,
        num_items: int,
        *,
        rank: int,
        mean: float,
        ridge: float,
        bias_ridge: float,
        max_history: int,
        lower_bound: float = 0.0,
    ) -> None:
        if rank < 1 or not 0 < min(ridge, bias_ridge) <= max(ridge, bias_ridge) < float("inf"):
            raise RecpoError(
                f"rank must be at least 1, ridge and bias_ridge numbers above 0, got {rank}, {ridge} and {bias_ridge}",
                code="out_of_range",
                field="rank" if rank < 1 else "bias_ridge" if 0 < ridge < float("inf") else "ridge",
            )
        if max_history < 1:
            raise RecpoError(
                f"max_history of the factors is {max_history}; it is at least 1",
                code="out_of_range",
                field="max_history",
            )
        if not 0 <= lower_bound < float("inf"):
            raise RecpoError(
                f"lower_bound is {lower_bound}; it is at least 0", code="out_of_range", field="lower_bound"
            )
        super().__init__()
        self.mean, self.ridge, self.bias_ridge, self.lower_bound = mean, ridge, bias_ridge, lower_bound
        self.max_history = max_history
        self.rooted = (rank + 1) * (rank + 2) if lower_bound else 0
        self.register_buffer("item_factors", torch.zeros(num_items + 1, rank))
        self.register_buffer("item_bias", torch.zeros(num_items + 1))
        self.register_buffer("factor_variance", torch.zeros(num_items + 1, rank))
        self.register_buffer("history_prior", torch.zeros(num_items + 1, rank + 1))
        # nothing to store without a bound
        self.register_buffer("item_variances", torch.zeros(num_items + 1, self.rooted), persistent=self.rooted > 0)
        # the value for an unknown level is arbitrary: such an event has weight 0
        self.register_buffer("_grades", torch.tensor([0.0, *GRADES[1:]], dtype=torch.float64), persistent=False)

    def assign(
        self,
        item_factors: Tensor,
        item_bias: Tensor,
        factor_variance: Tensor,
        item_covariance: Tensor | None = None,
        noise: float = 0.0,
        history_prior: Tensor | None = None,
    ) -> None:
        """Sets the factors ``[V, r]`` and biases ``[V]`` of the items 1..V, and the values for their bounds.

        Args:
            item_factors: ``q``.
            item_bias: ``b_i``.
            factor_variance: ``[V, r]``.
            item_covariance: ``[V, r + 1, r + 1]``, inverses of the normal matrices; read only with a lower bound.
            noise: variance of the noise.
            history_prior: ``[V, r + 1]``; None = 0.

        Raises:
            RecpoError: wrong sizes, or missing covariances although there is a bound.
        """
        expected = (len(self.item_bias) - 1, self.item_factors.shape[1])
        if item_factors.shape != expected or item_bias.shape != expected[:1]:
            raise RecpoError(
                f"item_factors and item_bias have the shapes {tuple(item_factors.shape)} and {tuple(item_bias.shape)}, "
                f"expected {expected} and {expected[:1]}: take factors of the same items",
                code="wrong_shape",
                field="item_factors",
            )
        self.item_factors[1:], self.item_bias[1:], self.factor_variance[1:] = item_factors, item_bias, factor_variance
        if history_prior is not None:
            self.history_prior[1:] = history_prior
        if self.rooted and item_covariance is None:
            raise RecpoError(
                "these factors were fitted with uncertainty: false, so they have no bounds: fit them again, or set "
                "lower_bound to 0",
                code="missing_value",
                field="lower_bound",
            )
        if self.rooted and item_covariance is not None:
            self.item_variances[1:] = noise * item_forms(item_factors, item_covariance)

    def fold_in(self, histories: Histories) -> Tensor:
        """``(p, b)`` of every history and, with a lower bound, ``s``: ``[B, r + 1 + rooted]`` float32.

        ``argmin sum_h [(g_h - mean - b_i(h) - p · q_i(h) - b)^2 + sum_j v_i(h)j p_j^2] + ridge |p - c|^2 + bias_ridge
        (b - d)^2`` over the last ``max_history`` events, with the variances ``v`` of the factors, in float64. The
        result is zero if no event has a grade. Positions after ``lengths`` are ignored.
        """
        item_ids, feedback = histories.item_ids, histories.feedback
        if feedback is None:
            feedback = torch.zeros_like(item_ids)
        place = torch.arange(item_ids.shape[1], device=item_ids.device)
        lengths = histories.lengths[:, None]
        known = (place < lengths) & (place >= lengths - self.max_history) & (feedback > 0) & (item_ids > 0)
        rows = F.pad(self.item_factors[item_ids].double(), (0, 1), value=1.0)
        targets = self._grades[feedback] - self.mean - self.item_bias[item_ids]
        variance = (self.factor_variance[item_ids].double() * known[..., None]).sum(1)
        prior = F.pad(torch.full_like(variance, self.ridge), (0, 1), value=self.bias_ridge)
        pull = prior * damped_mean(self.history_prior[item_ids], known)
        system = normal_equations(rows, targets, known, F.pad(variance, (0, 1)) + prior, pull)
        if not self.rooted:
            return solve_positive_definite(system.matrix, system.right).float()
        identity = torch.eye(rows.shape[-1], dtype=rows.dtype, device=rows.device).expand_as(system.matrix)
        solved = solve_positive_definite(system.matrix, torch.cat([system.right[..., None], identity], 2))
        weights = solved[..., 0].float()
        variances = self.lower_bound**2 * user_forms(weights, solved[..., 1:].float())
        return torch.cat([weights, variances], 1)

    def tilt(self, users: Tensor, temperature: float) -> Tensor:
        """``[p / t, 1 / t, s / t^2]`` of folded-in users at the temperature t: the factor of ``item_vectors``.

        The part that all items share (``mean + b``) is left out.
        """
        rank = self.item_factors.shape[1]
        own = torch.cat([users[:, :rank], torch.ones_like(users[:, :1])], 1) / temperature
        return torch.cat([own, users[:, rank + 1 :] / temperature**2], 1) if self.rooted else own

    def item_vectors(self, item_ids: Tensor | None = None) -> Tensor:
        """``[q, b, t]`` of the items ``[...]``, ``[..., r + 1 + rooted]``; None = all items, including row 0."""
        columns = [self.item_factors, self.item_bias[:, None], *([self.item_variances] if self.rooted else [])]
        return torch.cat([column if item_ids is None else column[item_ids] for column in columns], -1)

    def relative_grades(self, users: Tensor, item_ids: Tensor) -> Tensor:
        """Grades of the items ``[B, C]`` minus the bound, up to a constant per user; ``users`` is from ``fold_in``."""
        rank = self.item_factors.shape[1]
        products = (self.item_factors[item_ids] @ users[:, :rank, None]).squeeze(-1) + self.item_bias[item_ids]
        if not self.rooted:
            return products
        variance = (self.item_variances[item_ids] @ users[:, rank + 1 :, None]).squeeze(-1)
        return products - variance.clamp_min(0.0).sqrt()


# Number of histories that are encoded or folded in at once; every prefix of a history counts as one.
_AT_ONCE = 1 << 10


class _OnBase(Policy):
    """A policy that passes the histories and features it receives on to its base."""

    base: Policy

    def set_schema(self, schema: FeatureSchema, behaviors: Sequence[str] = ()) -> None:
        """See ``Policy.set_schema``."""
        self.base.set_schema(schema, behaviors)

    def set_item_features(self, features: Features) -> None:
        """See ``Policy.set_item_features``."""
        self.base.set_item_features(features)

    def precompute_item_vectors(self) -> None:
        """See ``Policy.precompute_item_vectors``."""
        self.base.precompute_item_vectors()
        self._read_as_base()

    def _read_as_base(self) -> None:
        base = self.base
        self.reads_timestamps, self.reads_behaviors = base.reads_timestamps, base.reads_behaviors
        self.reads_user, self.reads_context = base.reads_user, base.reads_context
        self.reads_item_features = base.reads_item_features


class TiltedPolicy(_OnBase, StatePolicy):
    """``base(i | h) exp(grade(h, i) / temperature)``, normalized: of a catalog softmax, exact, and one itself.

    With the state ``[state / base temperature; p / temperature; 1 / temperature]`` and the item vector ``[vector; q;
    b]``, its logit is one dot product; the part that all items of a context share (``mean + b(h)``) cancels. For
    ``temperature`` toward infinity it is the base, and toward 0 it ranks like the factor model. With a lower bound, the
    logit is that product minus the root of a second product with ``(r + 1) (r + 2)`` more columns, and probabilities of
    given items require all scores of a context at once.

    Args:
        num_items: catalog size V.
        base: creates the policy to tilt.
        rank: rank of the factor model.
        mean: mean grade of the factor model.
        ridge: ridge of the factor model.
        bias_ridge: ridge of the user bias in the factor model.
        temperature: the grade that is worth one nat of log-probability; above 0.
        max_history: number of most recent events that the factor model folds in. The base reads its own number, and the
            policy's ``max_history`` is the larger of the two.
        lower_bound: reduce the grade by this many standard deviations of its posterior.
    """

    base: CatalogSoftmaxPolicy

    def __init__(
        self,
        num_items: int,
        *,
        base: Callable[[int], CatalogSoftmaxPolicy],
        rank: int,
        mean: float,
        ridge: float,
        bias_ridge: float,
        temperature: float,
        max_history: int,
        lower_bound: float = 0.0,
    ) -> None:
        validate_temperature(temperature)
        super().__init__()
        self.base, self.temperature = base(num_items), temperature
        if not isinstance(self.base, CatalogSoftmaxPolicy):
            raise RecpoError(
                f"base makes a {type(self.base).__name__}; TiltedPolicy tilts a CatalogSoftmaxPolicy, every other "
                "policy takes RerankedPolicy",
                code="wrong_class",
                field="base",
            )
        self.factors = GradeFactors(
            num_items,
            rank=rank,
            mean=mean,
            ridge=ridge,
            bias_ridge=bias_ridge,
            max_history=max_history,
            lower_bound=lower_bound,
        )
        self.num_items, self.dim = num_items, self.base.dim + rank + 1 + self.factors.rooted
        self.max_history = max(self.base.max_history, max_history)
        self._read_as_base()

    def set_item_counts(self, counts: Tensor) -> None:
        """See ``Policy.set_item_counts``."""
        self.base.set_item_counts(counts)

    def encode(self, histories: Histories) -> Tensor:
        """See ``StatePolicy.encode``. Prefixes that are longer than the base's attention are encoded one by one."""
        batch, states = len(histories.lengths), histories.item_ids.shape[1] + 1
        return self._states_at(histories, torch.arange(batch * states, device=histories.lengths.device)).view(
            batch, states, self.dim
        )

    def item_vectors(self, item_ids: Tensor) -> Tensor:
        """See ``StatePolicy.item_vectors``."""
        return torch.cat([self.base.item_vectors(item_ids), self.factors.item_vectors(item_ids)], -1)

    def output_vectors(self) -> Tensor:
        """The vectors ``[V + 1, d]`` that multiply states (``catalog_search.scores_of``); row 0 is not an item."""
        return torch.cat([self.base.output_vectors(), self.factors.item_vectors()], 1)

    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        """See ``StatePolicy.log_prob``."""
        wanted, positions, scored, state_index = self._scored(batch, needed, states)
        targets = batch.slates.item_ids.reshape(-1)[positions]
        if self.factors.rooted:
            logp = self._bounded_log_prob(scored, targets, state_index)
        else:
            logp = linear_logprob(scored, self.output_vectors(), targets, state_index)
        return logp.new_zeros(wanted.numel()).index_copy(0, positions, logp).view(*wanted.shape, 1)

    def entropy(self, batch: FeedbackBatch, needed: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        """See ``StatePolicy.entropy``."""
        wanted, positions, scored, state_index = self._scored(batch, needed, states)
        if self.factors.rooted:
            logps = (scores.log_softmax(1) for scores in self._scores(scored))
            entropy = torch.cat([-(logp.exp() * logp).sum(1) for logp in logps])
        else:
            entropy = linear_entropy(scored, self.output_vectors())
        entropy = entropy if state_index is None else entropy[state_index]
        return entropy.new_zeros(wanted.numel()).index_copy(0, positions, entropy).view(wanted.shape)

    def catalog_log_prob(self, batch: FeedbackBatch, states: Tensor | None = None) -> Tensor:
        """See ``StatePolicy.catalog_log_prob``."""
        histories = batch.histories
        if states is None:
            last = self.last_states(histories)
        else:
            last = states[torch.arange(len(states), device=states.device), histories.lengths]
        if self.factors.rooted:
            return torch.cat([scores.log_softmax(1) for scores in self._scores(last)])[..., None]
        return linear_log_softmax(last, self.output_vectors())[..., None]

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``. If ``B x V`` is large, the catalog is scored in blocks."""
        if not 1 <= k <= self.num_items:
            raise RecpoError(
                f"k must be between 1 and the {self.num_items} items of the catalog, got {k}",
                code="out_of_range",
                field="k",
            )
        states, rooted = self.last_states(histories), self.factors.rooted
        return catalog_search.top_k(states, self.output_vectors(), k, exclude, rooted)

    @torch.no_grad()
    def sample(
        self,
        histories: Histories,
        group_size: int,
        options: SamplingOptions = SamplingOptions(),  # noqa: B008  immutable
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
        """Scores ``[n, V]`` of all items, a few contexts at a time, with a gradient."""
        table = self.output_vectors()[1:]
        for part in states.split(self._at_once):
            with torch.autocast(states.device.type, enabled=False):
                scores = catalog_search.scores_of(part.float(), table, self.factors.rooted, catalog_search.product)
            yield scores

    def _bounded_log_prob(self, states: Tensor, targets: Tensor, state_index: Tensor | None) -> Tensor:
        """``linear_logprob`` for scores that are not a dot product."""
        lse = torch.cat([scores.logsumexp(1) for scores in self._scores(states)])
        of_target, lse = (states, lse) if state_index is None else (states[state_index], lse[state_index])
        vectors, own = self.output_vectors()[targets], self.dim - self.factors.rooted
        variance = (of_target[:, own:] * vectors[:, own:]).detach().sum(1)
        return (of_target[:, :own] * vectors[:, :own]).sum(1) - variance.clamp_min(0.0).sqrt() - lse

    def _scored(
        self, batch: FeedbackBatch, needed: Tensor | None, states: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The positions that are needed, their flat indices, the distinct states, and the state of each position."""
        slates = batch.slates
        wanted = slates.mask if needed is None else slates.mask & needed
        positions = wanted.reshape(-1).nonzero().squeeze(1)
        num_states = batch.histories.item_ids.shape[1] + 1
        rows, state_index = shared_states(slates, positions, num_states)
        scored = self._states_at(batch.histories, rows) if states is None else take_rows(states, rows)
        return wanted, positions, scored, state_index

    def last_states(self, histories: Histories) -> Tensor:
        """States ``[B, d]`` after the complete history."""
        readable_ids(histories, self.max_history)
        states = self.base.last_states(histories.recent(self.base.max_history))
        return self._joined(states, self.factors.fold_in(histories))

    def _states_at(self, histories: Histories, rows: Tensor) -> Tensor:
        """The states ``[N, d]`` of the prefixes ``rows``: ``context * (H + 1) + visible``."""
        width = readable_ids(histories, self.max_history).shape[1]
        context, visible = rows // (width + 1), rows % (width + 1)
        window = self.base.max_history
        # a single causal pass gives all states up to the length of the blocks' attention
        attended = min(self.base.encoder.attention_length, width)
        encoded = self.base.scaled(self.base.encode(histories.first(attended)))
        states = take_rows(encoded, context * (attended + 1) + visible.clamp_max(attended))
        longer = (visible > attended).nonzero().squeeze(1)
        if len(longer):
            parts = prefixes(histories, context[longer], visible[longer])
            last = torch.cat([self.base.last_states(part.recent(window)) for part in parts])
            states = states.index_copy(0, longer, last)
        users = [self.factors.fold_in(part) for part in prefixes(histories, context, visible)]
        return self._joined(states, torch.cat(users))

    def _joined(self, states: Tensor, users: Tensor) -> Tensor:
        return torch.cat([states, self.factors.tilt(users, self.temperature)], 1)


class RerankedPolicy(_OnBase):
    """``base(i | h) exp(grade(h, i) / temperature)``, normalized over the best items of the base's own search.

    For policies that cannot score the complete catalog, such as policies over semantic ids. Their beam search finds the
    candidates, and base and factor model together rank them. Lists and draws are exact for the distribution over these
    candidates. The log-probability of a given item is an estimate, because items outside the candidates are missing in
    the normalizer.

    Args:
        num_items: catalog size V.
        base: creates the policy to tilt.
        rank: rank of the factor model.
        mean: mean grade of the factor model.
        ridge: ridge of the factor model.
        bias_ridge: ridge of the user bias in the factor model.
        temperature: the grade that is worth one nat of log-probability; above 0.
        max_history: number of most recent events that the factor model folds in. The base reads its own number, and the
            policy's ``max_history`` is the larger of the two.
        candidates: number of the base's items to rerank; at least ``k``.
        lower_bound: reduce the grade by this many standard deviations of its posterior.
    """

    has_exact_log_prob = False

    def __init__(
        self,
        num_items: int,
        *,
        base: Callable[[int], Policy],
        rank: int,
        mean: float,
        ridge: float,
        bias_ridge: float,
        temperature: float,
        max_history: int,
        candidates: int = 200,
        lower_bound: float = 0.0,
    ) -> None:
        validate_temperature(temperature)
        if candidates < 1:
            raise RecpoError(
                f"candidates must be at least 1, got {candidates}", code="out_of_range", field="candidates"
            )
        super().__init__()
        self.base, self.temperature, self.candidates = base(num_items), temperature, candidates
        self.factors = GradeFactors(
            num_items,
            rank=rank,
            mean=mean,
            ridge=ridge,
            bias_ridge=bias_ridge,
            max_history=max_history,
            lower_bound=lower_bound,
        )
        self.num_items, self.num_tokens = num_items, self.base.num_tokens
        self.max_history = max(self.base.max_history, max_history)
        self.catalog_checksum = self.base.catalog_checksum
        self._read_as_base()

    def tokens(self, item_ids: Tensor) -> Tensor:
        """See ``Policy.tokens``."""
        return self.base.tokens(item_ids)

    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None) -> Tensor:
        """See ``Policy.log_prob``. This is an estimate, normalized over the candidates and the item itself.

        If T > 1, the last token contains the complete tilt.
        """
        slates, width = batch.slates, batch.histories.item_ids.shape[1] + 1
        wanted = slates.mask if needed is None else slates.mask & needed
        positions = wanted.reshape(-1).nonzero().squeeze(1)
        rows, state_index = shared_states(slates, positions, width)
        state = torch.arange(len(rows), device=rows.device) if state_index is None else state_index
        found = [self._ranked(part) for part in prefixes(batch.histories, rows // width, rows % width)]
        ranked = _Ranked(*(torch.cat(column) for column in zip(*found, strict=True)))
        parts = [
            self._log_prob_of(slates.item_ids.reshape(-1)[some], of_state, ranked, batch.histories, rows[of_state])
            for some, of_state in zip(positions.split(_AT_ONCE), state.split(_AT_ONCE), strict=True)
        ]
        logp = torch.cat(parts)
        return logp.new_zeros(wanted.numel(), self.num_tokens).index_copy(0, positions, logp).view(*wanted.shape, -1)

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``. Scores are log-probabilities among the candidates that are not excluded."""
        if not 1 <= k <= self.num_items:
            raise RecpoError(
                f"k must be between 1 and the {self.num_items} items of the catalog, got {k}",
                code="out_of_range",
                field="k",
            )
        ranked = self._ranked(histories, max(self.candidates, k), exclude)
        # ordered by id, so that equal scores stay in this order
        ids, order = ranked.item_ids.sort(1)
        best, place = ranked.scores.gather(1, order).topk(k, 1)
        ids = catalog_search.ties_to_smaller_id(best, ids.gather(1, place), self.num_items + 1)
        return Recommendations(ids.masked_fill(best == -torch.inf, 0), best - ranked.lse[:, None])

    @torch.no_grad()
    def sample(
        self,
        histories: Histories,
        group_size: int,
        options: SamplingOptions = SamplingOptions(),  # noqa: B008  immutable
    ) -> tuple[Tensor, Tensor]:
        """See ``Policy.sample``. The temperature divides the scores of the candidates."""
        sampling.validate_sampling(group_size, options)
        ranked = self._ranked(histories)
        places, logp = sampling.draw_from_scores(ranked.scores / options.temperature, group_size, options)
        ids = F.pad(ranked.item_ids, (1, 0)).gather(1, places)
        return ids, F.pad(logp[..., None], (self.num_tokens - 1, 0))

    @torch.no_grad()
    def kl_from_base(self, histories: Histories) -> Tensor:
        """``KL(pi || base)`` in nats after the complete history, both restricted to the candidates: ``[B]``."""
        ranked = self._ranked(histories)
        logp, base = ranked.scores - ranked.lse[:, None], ranked.base.log_softmax(1)
        return torch.where(ranked.item_ids > 0, logp.exp() * (logp - base), 0.0).sum(1)

    def _ranked(self, histories: Histories, size: int | None = None, exclude: Tensor | None = None) -> _Ranked:
        size = min(self.num_items, self.candidates if size is None else size)
        listed = self.base.recommend(histories.recent(self.base.max_history), size, exclude)
        users = self.factors.fold_in(histories)
        scores = listed.scores + self.factors.relative_grades(users, listed.item_ids) / self.temperature
        # finite even if no item remains
        lse = scores.logsumexp(1).clamp_min(torch.finfo(scores.dtype).min)
        return _Ranked(users, listed.item_ids, listed.scores, scores, lse)

    def _log_prob_of(self, items: Tensor, state: Tensor, ranked: _Ranked, histories: Histories, rows: Tensor) -> Tensor:
        """Log-probabilities ``[N, T]`` of items ``[N]``, each after its own prefix."""
        width = histories.item_ids.shape[1] + 1
        (prefix,) = prefixes(histories, rows // width, rows % width)
        recent, one = prefix.recent(self.base.max_history), items[:, None]
        slates = Slates(one, recent.lengths[:, None], torch.ones_like(one, dtype=torch.bool))
        tokens = self.base.log_prob(FeedbackBatch(recent, slates, torch.arange(len(items), device=items.device)))[:, 0]
        grade = self.factors.relative_grades(ranked.users[state], one)[:, 0] / self.temperature
        own, lse = tokens.sum(1) + grade, ranked.lse[state]
        lse = torch.where((ranked.item_ids[state] == one).any(1), lse, torch.logaddexp(lse, own))
        return torch.cat([tokens[:, :-1], (tokens[:, -1] + grade - lse)[:, None]], 1)


class _Ranked(NamedTuple):
    """Candidates of N histories.

    Attributes:
        users: ``[N, r + 1 + rooted]`` folded-in users.
        item_ids: ``[N, C]``; 0 if the base lists fewer.
        base: ``[N, C]`` the base's log-probabilities; -inf for id 0.
        scores: ``[N, C]`` with the grade divided by temperature added.
        lse: ``[N]`` log-sum-exp of the scores.
    """

    users: Tensor
    item_ids: Tensor
    base: Tensor
    scores: Tensor
    lse: Tensor


def validate_temperature(temperature: float) -> None:
    """Raises ``RecpoError`` unless ``temperature`` is a number above 0."""
    if not 0 < temperature < float("inf"):
        raise RecpoError(
            f"temperature is {temperature}, expected a number above 0: small follows the factors, large the policy",
            code="out_of_range",
            field="temperature",
        )


def prefixes(histories: Histories, context: Tensor, visible: Tensor) -> Iterator[Histories]:
    """The first ``visible [N]`` events of the histories ``context [N]``, a few histories at a time."""
    for rows, lengths in zip(context.split(_AT_ONCE), visible.split(_AT_ONCE), strict=True):
        yield histories.rows(rows).up_to(lengths)
