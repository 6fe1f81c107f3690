"""Tilted policies: the reward moves every logit by grade / temperature, and nothing else does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from recpo.artifacts.semantic_codes import Codes
from recpo.base.feedback import GRADES, HIGHEST
from recpo.base.types import FeedbackBatch, Histories, SamplingOptions, Slates
from recpo.ops.small_systems import solve_positive_definite
from recpo.policies import catalog_search, sampling
from recpo.policies.baseline import ImplicitPolicy, SequentialRulesPolicy
from recpo.policies.blocks import HSTUBlock
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.encoder import solve_by_cholesky
from recpo.policies.grade_factors import GradeFactors, GradeFactorsOptions
from recpo.policies.semantic_id import SemanticIdPolicy
from recpo.policies.tilted import ProductPolicy, RerankedPolicy, TiltedPolicy
from recpo.rewards.factors import Factors
from recpo.serving.program import CatalogSearch
from tests.refusals import refused

V, READS, H, RANK, MEAN, RIDGE, BIAS_RIDGE, TEMPERATURE, NOISE, BOUND = 40, 5, 9, 3, 0.4, 1.5, 2.5, 0.2, 0.3, 1.5
OPTIONS = GradeFactorsOptions(rank=RANK, mean=MEAN, ridge=RIDGE, bias_ridge=BIAS_RIDGE, max_history=H)


def base(**options: Any) -> CatalogSoftmaxPolicy:
    torch.manual_seed(0)
    made = CatalogSoftmaxPolicy(V, **{"dim": 16, "max_history": READS, **options})
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        for table in (made.item_table, made.output_table):
            if table is not None:
                table.weight[0] = 0
    return made.eval()


def semantic_base(root: Any, **options: Any) -> SemanticIdPolicy:
    tuples = np.random.default_rng(0).permutation(4 * 5 * 3)[:V]
    codes = Codes(np.stack(np.unravel_index(tuples, (4, 5, 3)), 1), (4, 5, 3), "checksum")
    codes.save(root, pa.array(range(V)), {})
    torch.manual_seed(1)
    made = SemanticIdPolicy(V, codes=root, dim=16, max_history=READS, beam_width=V, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made.eval()


def tensors(factors: Tensor, bias: Tensor, variance: Tensor, prior: Tensor) -> dict[str, Tensor]:
    return {"item_factors": factors, "item_bias": bias, "factor_variance": variance, "history_prior": prior}


def with_factors(policy: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    factors, bias = torch.randn(V, RANK, generator=generator) * 0.4, torch.randn(V, generator=generator) * 0.1
    variance = torch.rand(V, RANK, generator=generator) * 0.2
    prior = torch.randn(V, RANK + 1, generator=generator)
    policy.factors.assign(tensors(factors, bias, variance, prior) | {"item_covariance": covariance()}, NOISE)
    return policy.eval()


def covariance() -> Tensor:
    rows = torch.randn(V, RANK + 1, RANK + 1, generator=torch.Generator().manual_seed(6))
    return torch.linalg.inv(rows @ rows.mT + torch.eye(RANK + 1))


def tilted(tilt: float = TEMPERATURE, bound: float = 0.0, **options: Any) -> TiltedPolicy:
    numbers = replace(OPTIONS, lower_bound=bound)
    policy = TiltedPolicy(V, base=lambda _: base(**options), factors=numbers, temperature=tilt)
    made: TiltedPolicy = with_factors(policy)
    return made


def histories(lengths: list[int], seed: int = 0, padding: int = 0, width: int = H) -> Histories:
    generator = torch.Generator().manual_seed(seed)
    size = (len(lengths), width)
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.where(valid, torch.randint(1, V + 1, size, generator=generator), padding)
    feedback = torch.where(valid, torch.randint(0, HIGHEST + 1, size, generator=generator), padding and HIGHEST)
    times = torch.randint(0, 10**9, size, generator=generator).cumsum(1)
    return Histories(ids, torch.tensor(lengths), feedback, torch.where(valid, times, padding * 10**12))


def whole_catalog(known: Histories, visible: Tensor | None = None) -> FeedbackBatch:
    rows = len(known.lengths)
    seen = known.lengths if visible is None else visible
    items = torch.arange(1, V + 1).expand(rows, V)
    slates = Slates(items, seen[:, None].expand(rows, V), torch.ones_like(items, dtype=torch.bool))
    return FeedbackBatch(known, slates, torch.arange(rows))


def expected_users(factors: GradeFactors, known: Histories) -> tuple[np.ndarray, np.ndarray]:
    """Ridge regression event by event, in NumPy, and the inverses of its normal matrices."""
    users, inverses = [], []
    names = ("item_factors", "item_bias", "factor_variance", "history_prior")
    q, b, v, prior = (getattr(factors, name).double().numpy() for name in names)
    assert known.feedback is not None
    for items, length, levels in zip(known.item_ids, known.lengths, known.feedback, strict=True):
        matrix, right, means = np.diag([*[RIDGE] * RANK, BIAS_RIDGE]), np.zeros(RANK + 1), [np.zeros(RANK + 1)] * 20
        for item, level in zip(items[:length].tolist(), levels[:length].tolist(), strict=True):
            if level == 0:
                continue
            row = np.append(q[item], 1.0)
            matrix += np.outer(row, row) + np.diag([*v[item], 0.0])
            right += row * (GRADES[level] - MEAN - b[item])
            means.append(prior[item])
        right += np.array([*[RIDGE] * RANK, BIAS_RIDGE]) * np.mean(means, 0)
        users.append(np.linalg.solve(matrix, right))
        inverses.append(np.linalg.inv(matrix))
    return np.stack(users), np.stack(inverses)


def expected_grades(factors: GradeFactors, known: Histories, bound: float = 0.0) -> np.ndarray:
    """Grades less ``bound`` standard deviations, pair by pair."""
    users, inverses = expected_users(factors, known)
    q, b, of_items = factors.item_factors[1:].double().numpy(), factors.item_bias[1:].numpy(), covariance().numpy()
    grades = np.zeros((len(users), V))
    for user, weights in enumerate(users):
        x = np.append(weights[:-1], 1.0)
        for item in range(V):
            y = np.append(q[item], 1.0)
            variance = NOISE * (x @ of_items[item] @ x + y @ inverses[user] @ y)
            grades[user, item] = MEAN + weights @ y + b[item] - bound * np.sqrt(variance)
    return grades


@given(st.integers(1, 33), st.integers(0, 60), st.floats(0.05, 10), st.integers(0, 10**6))
def test_elimination_solves_what_linalg_solves(size: int, rows: int, ridge: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(3, rows, size, generator=generator)
    matrix = factors.mT @ factors + ridge * torch.eye(size)
    right = torch.randn(3, size, generator=generator)
    exact = torch.linalg.solve(matrix.double(), right.double())
    torch.testing.assert_close(solve_positive_definite(matrix.double(), right.double()), exact, rtol=1e-8, atol=1e-10)
    several = torch.cat([right[..., None], torch.eye(size).expand_as(matrix)], 2).double()
    solved = solve_positive_definite(matrix.double(), several)
    torch.testing.assert_close(solved[..., 0], exact, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(solved[..., 1:], torch.linalg.inv(matrix.double()), rtol=1e-8, atol=1e-10)
    # it reads the lower triangle, which rounding has made differ from the upper one
    symmetric = matrix.double().tril() + matrix.double().tril(-1).mT
    by_cholesky, same = solve_by_cholesky(symmetric, right.double()), torch.linalg.solve(symmetric, right.double())
    torch.testing.assert_close(by_cholesky, same, rtol=1e-8, atol=1e-10)
    close = 1e-5 * float(torch.linalg.cond(matrix.double()).max())
    assert (solve_positive_definite(matrix, right) - exact).norm() <= close * exact.norm() + 1e-6


def test_gradients_of_both_solvers_are_those_of_linalg() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    right, gradient = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)

    def gradients(solve: Any) -> tuple[torch.Tensor, ...]:
        given = rows.clone().requires_grad_(), right.clone().requires_grad_()
        solution = solve(given[0].mT @ given[0] + torch.eye(4), given[1])
        return torch.autograd.grad(solution, given, gradient)

    exact = gradients(torch.linalg.solve)
    for solve in (solve_by_cholesky, solve_positive_definite):
        for found, expected in zip(gradients(solve), exact, strict=True):
            torch.testing.assert_close(found, expected)


def test_users_are_the_ridge_regression_of_their_graded_events() -> None:
    factors, known = tilted().factors, histories([H, 4, 1, 0])
    users = factors.fold_in(known)
    np.testing.assert_allclose(users.numpy(), expected_users(factors, known)[0], rtol=1e-5, atol=1e-6)
    bounded = tilted(bound=BOUND).factors.fold_in(known)
    torch.testing.assert_close(bounded[:, : RANK + 1], users, rtol=0, atol=1e-6)
    assert users[3].eq(0).all()
    unknown = known._replace(feedback=torch.zeros_like(known.item_ids))
    assert factors.fold_in(unknown).eq(0).all()
    assert factors.fold_in(known._replace(feedback=None)).eq(0).all()


@pytest.mark.parametrize("options", [{}, {"block": HSTUBlock}, {"similarity": "cosine", "temperature": 0.1},
                                     {"tie_weights": False}, {"max_history": H + 3},
                                     {"profile": True, "max_history": H, "attention_length": 4}])  # fmt: skip
@pytest.mark.parametrize("bound", [0.0, BOUND])
def test_the_log_ratio_to_the_base_is_the_grade_over_the_temperature_but_for_a_constant(
    options: dict[str, Any], bound: float
) -> None:
    policy, known = tilted(bound=bound, **options), histories([H, 6, 2, 0])
    logp = policy.log_prob(whole_catalog(known))[..., 0]
    torch.testing.assert_close(logp.exp().sum(1), torch.ones(4))
    reference = policy.base.log_prob(whole_catalog(known.recent(policy.base.max_history)))[..., 0]
    grades = expected_grades(policy.factors, known, bound)
    rest = (logp - reference).detach().double().numpy() - grades / TEMPERATURE
    np.testing.assert_allclose(rest - rest.mean(1, keepdims=True), 0, atol=2e-5)


@pytest.mark.parametrize("bound", [0.0, BOUND])
def test_temperatures_that_share_what_is_known_of_histories_give_what_they_give_alone(bound: float) -> None:
    policy, known, others = tilted(bound=bound), histories([H, 6, 2, 0]), histories([3, H, 1], seed=1)
    calls = []
    read = policy.factors.fold_in
    policy.factors.fold_in = lambda histories: calls.append(len(histories.lengths)) or read(histories)  # type: ignore[method-assign,func-returns-value]

    def answers(temperature: float) -> tuple[Tensor, ...]:
        policy.temperature = temperature
        logp = policy.log_prob(whole_catalog(known))
        return (*policy.recommend(known, 5), logp, policy.kl_from_base(known))

    with policy.caching_histories():
        shared = {temperature: answers(temperature) for temperature in (TEMPERATURE, 10.0)}
        assert calls == [4]
        policy.recommend(others, 5)
        assert calls == [4, 3]
    for temperature, found in shared.items():
        for one, alone in zip(found, answers(temperature), strict=True):
            torch.testing.assert_close(one, alone, rtol=1e-5, atol=1e-6)
    assert len(calls) == 2 + 6


@pytest.mark.parametrize("options", [{}, {"block": HSTUBlock}, {"profile": True},
                                     {"profile": True, "max_history": H, "attention_length": 4}])  # fmt: skip
@pytest.mark.parametrize("bound", [0.0, BOUND])
def test_every_prefix_is_scored_as_a_separate_history(options: dict[str, Any], bound: float) -> None:
    policy, known = tilted(bound=bound, **options), histories([H, 7, 3], padding=9)
    visible = torch.arange(H + 1).minimum(known.lengths[:, None])
    items = torch.randint(1, V + 1, visible.shape, generator=torch.Generator().manual_seed(3))
    slates = Slates(items, visible, torch.ones_like(items, dtype=torch.bool))
    logp = policy.log_prob(FeedbackBatch(known, slates, torch.arange(3)))[..., 0]
    for seen in range(H + 1):
        prefix = known.up_to(known.lengths.clamp_max(seen))
        alone = policy.log_prob(whole_catalog(prefix))[..., 0]
        torch.testing.assert_close(
            alone.gather(1, items[:, seen : seen + 1] - 1)[:, 0], logp[:, seen], rtol=0, atol=2e-5
        )


@pytest.mark.parametrize("bound", [0.0, BOUND])
def test_lists_draws_and_divergence_are_those_of_the_log_probabilities(
    bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, known = tilted(bound=bound), histories([H, 6, 2, 0])
    monkeypatch.setattr(catalog_search, "SCORE_BYTES", 32 * V * 3)  # three contexts at a time
    logp = policy.log_prob(whole_catalog(known))[..., 0]
    exclude = torch.tensor([[1, 2], [3, 0], [0, 0], [7, 7]])
    kept = torch.nn.functional.pad(logp, (1, 0)).scatter(1, exclude, -torch.inf)[:, 1:]
    lists = policy.recommend(known, 6, exclude)
    best = kept.topk(6, 1)
    assert torch.equal(lists.item_ids, best.indices + 1)
    torch.testing.assert_close(lists.scores, best.values, rtol=0, atol=1e-5)
    torch.manual_seed(0)
    ids, drawn = policy.sample(known, 4000)
    torch.testing.assert_close(drawn[..., 0], logp.gather(1, ids - 1), rtol=0, atol=1e-5)
    share = torch.stack([row.bincount(minlength=V + 1)[1:] for row in ids]) / ids.shape[1]
    torch.testing.assert_close(share, logp.exp(), rtol=0, atol=0.03)
    base_logp = policy.base.log_prob(whole_catalog(known.recent(READS)))[..., 0]
    expected = (logp.exp() * (logp - base_logp)).sum(1)
    torch.testing.assert_close(policy.kl_from_base(known), expected, rtol=1e-4, atol=1e-5)
    for options in (SamplingOptions(temperature=0.5, replacement=False), SamplingOptions(top_p=0.7)):
        ids, drawn = policy.sample(known, V, options)
        scaled = (logp / options.temperature).log_softmax(1)
        kept = sampling.nucleus(scaled, options.top_p)
        found = torch.where(ids > 0, kept.gather(1, (ids - 1).clamp_min(0)), 0.0)
        torch.testing.assert_close(drawn[..., 0], found, rtol=0, atol=2e-5)
        assert options.replacement or ids.sort(1).values.eq(torch.arange(1, V + 1)).all()
    with refused("out_of_range", "k"):
        policy.recommend(known, V + 1)
    with refused("out_of_range", "max_history"):
        policy.recommend(histories([H + 1], width=H + 1), 3)


@pytest.mark.parametrize("bound", [0.0, BOUND])
def test_implicit_als_is_tilted_exactly(bound: float) -> None:
    torch.manual_seed(2)
    implicit = ImplicitPolicy(V, rank=4, unobserved=0.1, ridge=0.02, nu=0.5, max_history=READS)
    implicit.item_factors.copy_(torch.randn(V, 4))
    numbers = replace(OPTIONS, lower_bound=bound)
    policy = with_factors(TiltedPolicy(V, base=lambda _: implicit, factors=numbers, temperature=TEMPERATURE))
    known = histories([H, 6, 2, 0])
    ratio = (policy.log_prob(whole_catalog(known)) - implicit.log_prob(whole_catalog(known)))[..., 0].detach().numpy()
    grades = expected_grades(policy.factors, known, bound) / TEMPERATURE
    np.testing.assert_allclose(ratio - ratio.mean(1, keepdims=True), grades - grades.mean(1, keepdims=True), atol=1e-4)
    assert policy.log_prob(whole_catalog(known)).exp().sum(1).allclose(torch.ones(4, 1))
    listed = policy.recommend(known, V)
    logp = policy.log_prob(whole_catalog(known))[..., 0]
    assert torch.allclose(logp.gather(1, listed.item_ids - 1), listed.scores, atol=1e-4)
    seen = torch.tensor([4, 6, 1, 0])  # prefixes, the first two longer than what implicit ALS reads
    of_prefix = policy.log_prob(whole_catalog(known, seen))
    assert torch.allclose(of_prefix, policy.log_prob(whole_catalog(known.up_to(seen))), atol=1e-5)
    nothing = torch.zeros(4, 1, dtype=torch.long)
    in_blocks = CatalogSearch(policy, "float32", block_rows=12).recommend(known, 10, nothing)
    assert torch.equal(in_blocks.item_ids, listed.item_ids[:, :10])


def test_beta_goes_from_the_factor_model_to_the_base() -> None:
    known = histories([H, 6, 2])
    far, near = tilted(1e6), tilted(1e-3)
    recent = known.recent(READS)
    torch.testing.assert_close(far.recommend(known, V).scores, far.base.recommend(recent, V).scores, rtol=0, atol=1e-4)
    grades = expected_grades(near.factors, known)
    # one nat of the base is worth a thousandth of a grade
    listed = near.recommend(known, 10).item_ids.numpy() - 1
    np.testing.assert_allclose(np.take_along_axis(grades, listed, 1), -np.sort(-grades, 1)[:, :10], atol=0.02)


@pytest.mark.parametrize("bound", [0.0, BOUND])
def test_the_factors_are_folded_in_and_ranked_as_by_themselves(bound: float) -> None:
    policy, known = tilted(1e-3, bound), histories([H, 6, 2, 0])
    alone = Factors(
        mean=MEAN,
        item_factors=policy.factors.item_factors[1:],
        item_bias=policy.factors.item_bias[1:],
        factor_variance=policy.factors.factor_variance[1:],
        history_prior=policy.factors.history_prior[1:],
        ridge=RIDGE,
        bias_ridge=BIAS_RIDGE,
        user_factors=None,
        item_covariance=covariance(),
        noise=NOISE,
        catalog_checksum="",
        max_history=H,
        lower_bound=bound,
    )
    torch.testing.assert_close(policy.factors.fold_in(known)[:, : RANK + 1], alone.fold_in(known), rtol=0, atol=1e-6)
    numbers = replace(OPTIONS, lower_bound=bound)
    without_base = with_factors(TiltedPolicy(V, base=lambda _: flat(), factors=numbers, temperature=1e-2))
    assert torch.equal(without_base.recommend(known, 8).item_ids, alone.recommend(known, 8).item_ids)


def flat() -> CatalogSoftmaxPolicy:
    """All items are as probable."""
    made = base(tie_weights=False)
    assert made.output_table is not None
    made.output_table.weight.data.zero_()
    return made


@pytest.mark.parametrize("bound", [0.0, BOUND])
def test_gradients_reach_the_base_and_not_the_factors(bound: float) -> None:
    policy = tilted(bound=bound).train()
    batch = whole_catalog(histories([H, 0]))
    (policy.log_prob(batch)[..., 0] * torch.randn(2, V, generator=torch.Generator().manual_seed(1))).sum().backward()
    gradient = policy.base.item_table.weight.grad
    assert gradient is not None
    assert gradient.isfinite().all()
    assert gradient.any()
    assert {name for name, _ in policy.named_parameters()} == {f"base.{n}" for n, _ in policy.base.named_parameters()}
    assert {"factors.item_factors", "factors.item_bias"} <= policy.state_dict().keys()


def test_the_most_recent_events_are_kept() -> None:
    known = histories([H, 6, 2, 0], padding=0)
    recent = known.recent(READS)
    for row, length in enumerate(known.lengths.tolist()):
        begin, end = max(0, length - READS), length
        for now, before in zip((recent.item_ids, recent.feedback, recent.timestamps), (known[0], known[2], known[3]),
                               strict=True):  # fmt: skip
            assert now is not None
            assert before is not None
            assert now[row, : end - begin].tolist() == before[row, begin:end].tolist()
            assert now[row, end - begin :].eq(0).all()
    assert recent.lengths.tolist() == [5, 5, 2, 0]


@pytest.fixture(scope="module")
def reranked(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> RerankedPolicy:
    """All items are candidates, so that it is exact."""
    root, bound = tmp_path_factory.mktemp("codes"), getattr(request, "param", 0.0)
    numbers = replace(OPTIONS, lower_bound=bound)
    made = RerankedPolicy(V, base=lambda _: semantic_base(root), factors=numbers, temperature=TEMPERATURE, candidates=V)
    policy: RerankedPolicy = with_factors(made)
    return policy


@pytest.mark.parametrize("reranked", [0.0, BOUND], indirect=True)
def test_a_reranked_beam_of_all_items_is_the_tilted_policy(reranked: RerankedPolicy) -> None:
    known = histories([H, 6, 2, 0])
    logp = reranked.log_prob(whole_catalog(known)).sum(-1)
    torch.testing.assert_close(logp.exp().sum(1), torch.ones(4))
    reference = reranked.base.log_prob(whole_catalog(known.recent(READS))).sum(-1)
    grades = expected_grades(reranked.factors, known, reranked.factors.options.lower_bound)
    rest = (logp - reference).detach().double().numpy() - grades / TEMPERATURE
    np.testing.assert_allclose(rest - rest.mean(1, keepdims=True), 0, atol=5e-5)
    lists = reranked.recommend(known, 7)
    assert torch.equal(lists.item_ids, logp.topk(7, 1).indices + 1)
    torch.testing.assert_close(lists.scores, logp.topk(7, 1).values, rtol=0, atol=2e-5)
    expected = (logp.exp() * (logp - reference)).sum(1)
    torch.testing.assert_close(reranked.kl_from_base(known), expected, rtol=1e-3, atol=1e-4)
    torch.manual_seed(0)
    ids, drawn = reranked.sample(known, 500, SamplingOptions())
    assert drawn.shape == (4, 500, 1)
    torch.testing.assert_close(drawn.sum(-1), logp.gather(1, ids - 1), rtol=0, atol=2e-5)


def test_temperatures_share_what_a_beam_search_finds(reranked: RerankedPolicy, monkeypatch: Any) -> None:
    known, others, exclude, searches = histories([H, 6, 2, 0]), histories([3], seed=1), torch.ones(4, 1).long(), []
    search = reranked.base.recommend
    monkeypatch.setattr(reranked.base, "recommend", lambda *given: searches.append(given) or search(*given))

    def answers(temperature: float) -> tuple[Tensor, ...]:
        monkeypatch.setattr(reranked, "temperature", temperature)
        return (*reranked.recommend(known, 5, exclude.clone()), reranked.kl_from_base(known))

    with reranked.caching_histories():
        shared = {temperature: answers(temperature) for temperature in (TEMPERATURE, 10.0)}
        assert len(searches) == 2, "with what is excluded, and with everything"
        reranked.recommend(others, 5)
        assert len(searches) == 3
    for temperature, found in shared.items():
        for one, alone in zip(found, answers(temperature), strict=True):
            torch.testing.assert_close(one, alone, rtol=0, atol=0)
    assert len(searches) == 3 + 4


def test_few_candidates_bound_what_a_reranked_policy_lists(reranked: RerankedPolicy) -> None:
    known, before = histories([H, 6, 2]), reranked.candidates
    try:
        reranked.candidates = 4
        lists = reranked.recommend(known, 3)
        beam = reranked.base.recommend(known.recent(READS), 4)
        assert all(
            set(row.tolist()) <= set(found.tolist()) for row, found in zip(lists.item_ids, beam.item_ids, strict=True)
        )
        assert (lists.scores.exp().sum(1) <= 1 + 1e-5).all()
        logp = reranked.log_prob(whole_catalog(known)).sum(-1)
        assert (logp <= 1e-6).all()
        torch.testing.assert_close(logp.gather(1, lists.item_ids - 1), lists.scores, rtol=0, atol=2e-5)
        few = reranked.recommend(known, 3, torch.arange(1, V + 1)[None, 1:].expand(3, -1))
        assert few.item_ids.tolist() == [[1, 0, 0]] * 3
        none = reranked.recommend(known, 3, torch.arange(1, V + 1)[None].expand(3, -1))
        assert none.item_ids.eq(0).all()
        assert none.scores.eq(-torch.inf).all()
    finally:
        reranked.candidates = before


def nothing(items: int) -> dict[str, Tensor]:
    factors = torch.zeros(items, RANK)
    return tensors(factors, factors[:, 0], factors, torch.zeros(items, RANK + 1))


def rules() -> SequentialRulesPolicy:
    made, generator = SequentialRulesPolicy(V, neighbors=4, decay=0.7, max_history=H), torch.Generator().manual_seed(7)
    made.followers[1:] = torch.randint(1, V + 1, (V, 4), generator=generator).int()
    made.weights[1:] = torch.rand(V, 4, generator=generator)
    return made.eval()


@pytest.mark.parametrize("options", [{}, {"similarity": "cosine", "temperature": 0.1}])
def test_a_product_is_the_log_probability_of_its_base_plus_the_score_over_the_temperature(
    options: dict[str, Any],
) -> None:
    of_base, scored = base(**options), rules()
    policy = ProductPolicy(V, base=lambda _: of_base, scored=lambda _: scored, temperature=TEMPERATURE).eval()
    known = histories([0, 1, READS, H])
    recent = known.recent(READS)
    before = of_base.log_prob(whole_catalog(recent))[..., 0]
    logp = (before + scored.scores(known) / TEMPERATURE).log_softmax(1)
    torch.testing.assert_close(policy.log_prob(whole_catalog(known))[..., 0], logp, atol=1e-5, rtol=1e-4)
    ranked = policy.recommend(known, V)
    torch.testing.assert_close(ranked.scores, logp.gather(1, ranked.item_ids - 1), atol=1e-5, rtol=1e-4)
    divergence = (logp.exp() * (logp - before)).sum(1)
    torch.testing.assert_close(policy.kl_from_base(known), divergence, atol=1e-5, rtol=1e-4)
    drawn, chances = policy.sample(known, 3)
    torch.testing.assert_close(chances[..., 0], logp.gather(1, drawn - 1), atol=1e-5, rtol=1e-4)
    assert policy.max_history == H
    exclude = torch.tensor([[1, 2], [3, 0], [0, 0], [5, 7]])
    alone = policy.recommend(known, 4, exclude)
    with policy.caching_histories():  # a temperature is not kept, what the base and the scorer say is
        policy.temperature = 10.0
        assert (policy.kl_from_base(known) < divergence).any()
        policy.temperature = TEMPERATURE
        torch.testing.assert_close(policy.log_prob(whole_catalog(known))[..., 0], logp, atol=1e-5, rtol=1e-4)
        lists = policy.recommend(known, 4, exclude)
        torch.testing.assert_close(policy.kl_from_base(known), divergence, atol=1e-5, rtol=1e-4)
    assert torch.equal(lists.item_ids, alone.item_ids)
    torch.testing.assert_close(lists.scores, alone.scores, atol=1e-5, rtol=1e-4)


def test_impossible_options_are_refused() -> None:
    for temperature in (0.0, -1.0, float("inf"), float("nan")):
        with refused("out_of_range", "temperature"):
            tilted(temperature)
    for wrong in ({"ridge": 0.0}, {"bias_ridge": 0.0}, {"ridge": float("inf")}, {"rank": -1}, {"max_history": 0}):
        with refused("out_of_range", next(iter(wrong))):
            replace(OPTIONS, **wrong)
    with refused("wrong_class", "base"):
        TiltedPolicy(V, base=lambda _: tilted(), factors=OPTIONS, temperature=1.0)
    with refused("out_of_range", "candidates"):
        RerankedPolicy(V, base=lambda _: base(), factors=OPTIONS, temperature=1.0, candidates=0)
    with refused("out_of_range", "lower_bound"):
        tilted(bound=-1.0)
    with refused("missing_value", "lower_bound"):
        tilted(bound=1.0).factors.assign(nothing(V), NOISE)
