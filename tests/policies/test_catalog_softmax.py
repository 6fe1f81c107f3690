"""The policy as a distribution: normalized, causal, independent of padding, and equal on every code path."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from recpo.base.feedback import HIGHEST
from recpo.base.types import FeedbackBatch, Histories, Slates
from recpo.policies.blocks import Block, HSTUBlock, SASRecBlock
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from tests.refusals import refused

V, H = 40, 9
BLOCKS = [SASRecBlock, HSTUBlock]


def policy(block: type[Block] = SASRecBlock, **options: Any) -> CatalogSoftmaxPolicy:
    torch.manual_seed(0)
    settings_ = {"dim": 16, "max_history": H, "block": block, **options}
    made = CatalogSoftmaxPolicy(V, **settings_)
    with torch.no_grad():
        # far from the symmetric start, so that every input matters
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        for table in (made.item_table, made.output_table):
            if table is not None:
                table.weight[0] = 0
    return made.eval()


def histories(lengths: list[int], seed: int = 0, padding: int = 0, width: int = H) -> Histories:
    generator = torch.Generator().manual_seed(seed)
    size = (len(lengths), width)
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.where(valid, torch.randint(1, V + 1, size, generator=generator), padding)
    feedback = torch.where(valid, torch.randint(0, HIGHEST + 1, size, generator=generator), padding and HIGHEST)
    times = torch.randint(0, 10**9, size, generator=generator).cumsum(1)
    return Histories(ids, torch.tensor(lengths), feedback, torch.where(valid, times, padding * 10**12))


def slates(item_ids: Tensor, visible: Tensor, mask: Tensor | None = None) -> Slates:
    return Slates(item_ids, visible, torch.ones_like(item_ids, dtype=torch.bool) if mask is None else mask)


def batch(known: Histories, scored: Slates) -> FeedbackBatch:
    return FeedbackBatch(known, scored, torch.arange(len(known.lengths)))


def whole_catalog(known: Histories, visible: int | None = None) -> FeedbackBatch:
    rows = len(known.lengths)
    seen = known.lengths if visible is None else torch.full((rows,), visible)
    return batch(known, slates(torch.arange(1, V + 1).expand(rows, V), seen[:, None].expand(rows, V)))


def every_position(known: Histories, item: Tensor) -> FeedbackBatch:
    visible = torch.arange(H + 1).expand(len(known.lengths), H + 1)
    return batch(known, slates(item, visible))


@pytest.mark.parametrize("options", [{}, {"similarity": "cosine", "temperature": 0.1}, {"tie_weights": False},
                                     {"normalizer": "sampled"}, {"feedback_levels": 0}])  # fmt: skip
@pytest.mark.parametrize("block", BLOCKS)
def test_probabilities_sum_to_one(block: type[Block], options: dict[str, Any]) -> None:
    logp = policy(block, **options).log_prob(whole_catalog(histories([H, 4, 1, 0])))
    assert logp.shape == (4, V, 1)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp.exp().sum(1), torch.ones(4, 1), rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(BLOCKS),
    st.lists(st.integers(0, H), min_size=1, max_size=4),
    st.integers(0, H - 1),
    st.sampled_from(["item_ids", "feedback", "timestamps"]),
)
def test_no_state_knows_a_later_event(block: type[Block], lengths: list[int], event: int, field: str) -> None:
    made, known = policy(block), histories(lengths)
    changed = getattr(known, field).clone()
    changed[:, event] = {"item_ids": changed[:, event] % V + 1, "feedback": HIGHEST - changed[:, event]}.get(
        field, changed[:, event] + 10**7
    )
    before, after = made.encode(known), made.encode(known._replace(**{field: changed}))
    torch.testing.assert_close(before[:, : event + 1], after[:, : event + 1], rtol=0, atol=1e-6)
    if field == "item_ids":  # states behind the last event may be those of the padding
        real = known.lengths > event
        assert ((before[real, event + 1] - after[real, event + 1]).abs().amax(1) > 1e-4).all()


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(BLOCKS), st.lists(st.integers(0, H), min_size=1, max_size=4), st.integers(1, V))
def test_padding_has_no_influence(block: type[Block], lengths: list[int], junk: int) -> None:
    made = policy(block)
    clean, dirty = histories(lengths), histories(lengths, padding=junk)
    longest = max(1, *lengths)
    short = Histories(
        clean.item_ids[:, :longest], clean.lengths, clean.feedback[:, :longest], clean.timestamps[:, :longest]
    )
    scores = [made.log_prob(whole_catalog(known)) for known in (clean, dirty, short)]
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(scores[2], scores[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_position_of_a_sequence_equals_scoring_its_prefix(block: type[Block]) -> None:
    made, known = policy(block), histories([H, 6])
    items = torch.randint(1, V + 1, (2, H + 1))
    together = made.log_prob(every_position(known, items))
    for v in range(H + 1):
        prefix = Histories(known.item_ids[:, :v], torch.full((2,), v), known.feedback[:, :v], known.timestamps[:, :v])
        if v == 0:
            prefix = histories([0, 0])
        alone = made.log_prob(batch(prefix, slates(items[:, v : v + 1], torch.full((2, 1), v))))
        torch.testing.assert_close(together[:, v : v + 1], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("block", BLOCKS)
def test_positions_that_share_a_state_equal_separate_ones_in_value_and_gradient(block: type[Block]) -> None:
    made, known = policy(block), histories([H, 3, 0])
    items = torch.randint(1, V + 1, (3, 8))
    visible = torch.tensor([[4] * 8, [0, 0, 3, 3, 1, 1, 3, 3], [0] * 8])
    mask = torch.tensor([[True] * 8, [True, False] * 4, [False] * 8])
    weights = torch.randn(3, 8, 1)
    together = made.log_prob(batch(known, slates(items, visible, mask)))
    separate = torch.cat(
        [made.log_prob(batch(known, slates(items[:, [s]], visible[:, [s]], mask[:, [s]]))) for s in range(8)], 1
    )
    torch.testing.assert_close(together, separate, rtol=0, atol=1e-5)
    assert (together[~mask] == 0).all()
    parameters = list(made.parameters())
    got = torch.autograd.grad((together * weights).sum(), parameters, allow_unused=True)
    expected = torch.autograd.grad((separate * weights).sum(), parameters, allow_unused=True)
    for one, other in zip(got, expected, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_needed_positions_are_scored_and_no_others() -> None:
    made, known = policy(), histories([H, 3])
    scored = every_position(known, torch.randint(1, V + 1, (2, H + 1)))
    needed = torch.rand(2, H + 1) < 0.4
    full, part = made.log_prob(scored), made.log_prob(scored, needed)
    torch.testing.assert_close(part[needed], full[needed], rtol=0, atol=1e-6)
    assert (part[~needed] == 0).all()
    nothing = made.log_prob(scored, torch.zeros_like(needed))
    assert (nothing == 0).all()
    nothing.sum().backward()


@pytest.mark.parametrize("block", BLOCKS)
def test_gradients_equal_those_of_a_dense_softmax(block: type[Block]) -> None:
    made, known = policy(block, temperature=0.5), histories([H, 4])
    items = torch.randint(1, V + 1, (2, H + 1))
    parameters = list(made.parameters())
    ours = made.log_prob(every_position(known, items))[..., 0]
    dense = (made.encode(known) @ made.item_table.weight[1:].T / 0.5).log_softmax(-1).gather(2, items[..., None] - 1)
    got = torch.autograd.grad(ours.square().sum(), parameters)
    expected = torch.autograd.grad(dense.square().sum(), parameters)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    of_items = got[[name for name, _ in made.named_parameters()].index("item_table.weight")]
    assert (of_items[0] == 0).all()


def test_gradcheck_in_float64() -> None:
    made = policy().double()
    known = histories([3, 1], width=3)
    scored = batch(known, slates(torch.tensor([[3, 5], [7, 7]]), torch.tensor([[0, 3], [1, 1]])))
    weight = made.item_table.weight

    def score(rows: Tensor) -> Tensor:
        table = torch.cat([weight.detach()[:1], rows, weight.detach()[4:]])
        return torch.func.functional_call(made, {"item_table.weight": table}, (scored,))

    made.forward = made.log_prob  # type: ignore[method-assign]
    assert torch.autograd.gradcheck(score, weight.detach()[1:4].requires_grad_(), fast_mode=True)


def test_entropy_of_every_position() -> None:
    made, known = policy(temperature=0.7), histories([H, 2, 0])
    scored = whole_catalog(known)
    logp = made.log_prob(scored)[..., 0]
    got = made.entropy(scored)
    torch.testing.assert_close(got, -(logp.exp() * logp).sum(1, keepdim=True).expand(3, V), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_divergence_at_every_position(similarity: Literal["dot", "cosine"]) -> None:
    made, known = policy(temperature=0.7, similarity=similarity), histories([H, 2, 0])
    reference = copy.deepcopy(made)
    with torch.no_grad():
        reference.item_table.weight[1:] += torch.randn(V, made.dim)
    scored = whole_catalog(known)
    logp, other = made.log_prob(scored), reference.log_prob(scored)
    want = (logp.exp() * (logp - other.detach())).sum(1, keepdim=True).expand(3, V, 1)
    needed = scored.slates.mask & (torch.arange(V) < 3)
    got = made.divergence(scored, reference, needed, made.encode(known))
    torch.testing.assert_close(got, want * needed[..., None], rtol=1e-4, atol=1e-5)
    weight = made.item_table.weight
    gradients = [torch.autograd.grad(value.sum(), weight)[0] for value in (got, want * needed[..., None])]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    assert all(parameter.grad is None for parameter in reference.parameters())
    assert made.divergence(scored, made).abs().max() < 1e-5


def test_the_padding_row_stays_zero_in_training() -> None:
    made = policy(tie_weights=False).train()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (-made.log_prob(every_position(histories([H, 2]), torch.randint(1, V + 1, (2, H + 1)))).mean()).backward()
        optimizer.step()
    assert made.output_table is not None
    assert (made.item_table.weight[0] == 0).all()
    assert (made.output_table.weight[0] == 0).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_autocast_gives_float32_log_probabilities(block: type[Block]) -> None:
    made, scored = policy(block), whole_catalog(histories([H, 2]))
    plain = made.log_prob(scored)
    with torch.autocast("cpu", torch.bfloat16):
        cast = made.log_prob(scored)
        (-cast.mean()).backward()
    assert cast.dtype == torch.float32
    torch.testing.assert_close(cast.exp().sum(1), torch.ones(2, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cast, plain, rtol=0.05, atol=0.2)


class TestSampledNormalizer:
    @pytest.mark.parametrize("tie_weights", [True, False])
    def test_many_negatives_approach_the_exact_value(self, tie_weights: bool) -> None:
        made = policy(normalizer="sampled", num_negatives=200_000, dropout=0.0, tie_weights=tie_weights)
        scored = whole_catalog(histories([H, 3]))
        exact = made.log_prob(scored)
        torch.testing.assert_close(made.train().log_prob(scored), exact, rtol=0, atol=0.03)
        assert not made.has_exact_log_prob

    def test_lookups_give_sparse_gradients(self) -> None:
        made = policy(normalizer="sampled", num_negatives=5, sparse=True).train()
        made.log_prob(whole_catalog(histories([2]))).sum().backward()
        assert made.item_table.weight.grad is not None
        assert made.item_table.weight.grad.is_sparse

    def test_popularity_needs_counts(self) -> None:
        made = policy(normalizer="sampled", num_negatives=100_000, proposal="popularity", dropout=0.0)
        scored = whole_catalog(histories([H]))
        exact = made.log_prob(scored)
        made.train()
        with refused("missing_option", "item_counts"):
            made.log_prob(scored)
        made.set_item_counts(torch.arange(V))
        torch.testing.assert_close(made.log_prob(scored), exact, rtol=0, atol=0.05)


def test_refuses_what_cannot_work() -> None:
    with refused("out_of_range", "max_history"):
        policy().log_prob(whole_catalog(histories([3], width=H + 1)))
    with refused("mismatch", "policy.heads"):
        CatalogSoftmaxPolicy(5, dim=10, heads=3)
    with refused("out_of_range", "k"):
        policy().recommend(histories([3]), V + 1)
    with refused("empty", "num_items"):
        CatalogSoftmaxPolicy(0)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("lengths", [[0, 1, 3, 0, H], [H] * 4, [0]])
def test_the_last_state_alone_is_that_of_the_whole_history(block: type[Block], lengths: list[int]) -> None:
    made, known = policy(block), histories(lengths, padding=7)
    with torch.no_grad():
        every = made.encode(known)
        vectors = made.item_table(known.item_ids)
        last = made.encoder.last(vectors, known)
    torch.testing.assert_close(last, every[torch.arange(len(lengths)), known.lengths], rtol=1e-4, atol=1e-5)
