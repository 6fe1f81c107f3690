"""The generating policy as a distribution: normalized over the trie, causal, and equal on every code path."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from scipy import stats
from torch import Tensor

from recpo.artifacts.semantic_codes import Codes
from recpo.base.errors import RecpoError
from recpo.base.feedback import HIGHEST
from recpo.base.types import FeedbackBatch, Histories, SamplingOptions, Slates
from recpo.policies.blocks import HSTUBlock
from recpo.policies.lazy_decoder import DecoderOptions, LazyDecoder, Placement
from recpo.policies.semantic_id import SemanticIdPolicy
from tests.refusals import refused

V, H, SIZES = 40, 9, (5, 4, 6)


def save_codes(root: Path, num_items: int = V, sizes: tuple[int, ...] = SIZES, seed: int = 0) -> Path:
    """A directory of random different codes."""
    tuples = np.random.default_rng(seed).permutation(int(np.prod(sizes)))[:num_items]
    codes = np.stack(np.unravel_index(tuples, sizes), 1)
    root.mkdir(parents=True)
    Codes(codes, sizes, "checksum").save(root, pa.array(range(num_items)), {})
    return root


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_codes(tmp_path_factory.mktemp("codes") / "codes")


def policy(codes: Path, **options: Any) -> SemanticIdPolicy:
    torch.manual_seed(0)
    made = SemanticIdPolicy(V, codes=codes, **{"dim": 16, "max_history": H, "beam_width": V, **options})
    with torch.no_grad():
        # far from the symmetric start, so that every input matters
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        for table in (made.item_table, made.code_table):
            if table is not None:
                table.weight[0] = 0
    return made.eval()


def histories(lengths: list[int], seed: int = 0, padding: int = 0) -> Histories:
    generator = torch.Generator().manual_seed(seed)
    size = (len(lengths), H)
    valid = torch.arange(H) < torch.tensor(lengths)[:, None]
    ids = torch.where(valid, torch.randint(1, V + 1, size, generator=generator), padding)
    feedback = torch.where(valid, torch.randint(0, HIGHEST + 1, size, generator=generator), padding and HIGHEST)
    times = torch.randint(0, 10**9, size, generator=generator).cumsum(1)
    return Histories(ids, torch.tensor(lengths), feedback, torch.where(valid, times, padding * 10**12))


def scored(known: Histories, item_ids: Tensor, visible: Tensor, mask: Tensor | None = None) -> FeedbackBatch:
    kept = torch.ones_like(item_ids, dtype=torch.bool) if mask is None else mask
    return FeedbackBatch(known, Slates(item_ids, visible, kept), torch.arange(len(known.lengths)))


def whole_catalog(known: Histories) -> FeedbackBatch:
    rows = len(known.lengths)
    return scored(known, torch.arange(1, V + 1).expand(rows, V), known.lengths[:, None].expand(rows, V))


def item_logp(made: SemanticIdPolicy, known: Histories) -> Tensor:
    """``[B, V]``: of every item, by teacher forcing."""
    with torch.no_grad():
        return made.log_prob(whole_catalog(known)).sum(-1)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"block": HSTUBlock, "id_vectors": False, "heads": 4, "kv_groups": 2, "decoder_layers": 3, "kv_layers": 2},
    {"heads": 4, "kv_groups": 4, "decoder_layers": 1},
]


@pytest.mark.parametrize("options", VARIANTS)
def test_probabilities_sum_to_one_over_the_trie(codes, options):
    logp = item_logp(policy(codes, **options), histories([0, 4, H]))
    assert torch.allclose(logp.exp().sum(1), torch.ones(3), atol=1e-5)
    assert logp.std(1).min() > 0.1


@pytest.mark.slow
def test_over_the_codebook_the_rest_of_the_probability_belongs_to_no_item(codes):
    made = policy(codes, normalizer="codebook")
    logp = item_logp(made, histories([0, 4, H]))
    total = logp.exp().sum(1)
    assert (total < 0.9).all()
    within = policy(codes)
    within.load_state_dict(made.state_dict())
    assert (item_logp(within, histories([0, 4, H])) >= logp).all()


@pytest.mark.parametrize("options", VARIANTS)
def test_a_beam_as_wide_as_the_catalog_is_the_exact_ranking(codes, options):
    made, known = policy(codes, **options), histories([0, 3, H, 7])
    exclude = torch.tensor([[3, 0, 9], [0, 0, 0], [V, 1, 2], [5, 5, 0]])
    logp = item_logp(made, known)
    barred = torch.zeros(4, V + 1, dtype=torch.bool).scatter(1, exclude, True)[:, 1:]
    best, order = logp.masked_fill(barred, -torch.inf).sort(1, descending=True)
    with torch.no_grad():
        found = made.recommend(known, 25, exclude)
    assert torch.equal(found.item_ids, order[:, :25] + 1)
    assert torch.allclose(found.scores, best[:, :25], atol=1e-5)


def test_a_narrow_beam_scores_what_it_finds_exactly(codes):
    made, known = policy(codes, beam_width=3), histories([2, 6])
    with torch.no_grad():
        found = made.recommend(known, 3)
    assert torch.allclose(found.scores, item_logp(made, known).gather(1, found.item_ids - 1), atol=1e-5)


def test_searching_a_batch_in_parts_changes_nothing(codes, monkeypatch):
    made, known = policy(codes), histories([0, 3, H, 7, 1])
    exclude = torch.tensor([[1], [2], [3], [0], [0]])
    with torch.no_grad():
        whole = [made.recommend(known, 5, exclude), made.recommend(known, 5)]
        monkeypatch.setattr("recpo.policies.semantic_id._BEAMS_AT_ONCE", 2 * V)
        parts = [made.recommend(known, 5, exclude), made.recommend(known, 5)]
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.item_ids, other.item_ids)
        assert torch.allclose(one.scores, other.scores, atol=1e-6)


@pytest.mark.parametrize("options", VARIANTS[:2])
def test_no_position_sees_a_later_event(codes, options):
    made, known = policy(codes, **options), histories([H])
    later = known.item_ids.clone()
    later[0, 5:] = (later[0, 5:] % V) + 1
    visible = torch.arange(H + 1)[None]
    items = torch.full((1, H + 1), 7)
    with torch.no_grad():
        before = made.log_prob(scored(known, items, visible))
        after = made.log_prob(scored(known._replace(item_ids=later), items, visible))
    assert torch.allclose(before[:, :6], after[:, :6], atol=1e-5)
    assert (before[:, 6:] - after[:, 6:]).abs().sum() > 1e-2


def test_padding_and_other_rows_change_nothing(codes):
    made = policy(codes)
    one = item_logp(made, histories([4, H]))
    noisy = item_logp(made, histories([4, H], padding=3))
    assert torch.allclose(one, noisy, atol=1e-5)
    short = histories([4, H])
    alone = short.rows(torch.tensor([0])).first(4)
    assert torch.allclose(item_logp(made, alone), one[:1], atol=1e-5)


def test_only_needed_positions_are_scored_and_masked_ones_are_zero(codes):
    made, known = policy(codes), histories([4, H, 2])
    items = torch.randint(1, V + 1, (3, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.rand(3, 6, generator=torch.Generator().manual_seed(2)) > 0.3
    mask[2] = False
    batch = scored(known, items * mask, torch.minimum(torch.arange(6), known.lengths[:, None]), mask)
    full = made.log_prob(batch)
    needed = torch.tensor([[1, 0, 0, 1, 0, 1]] * 3, dtype=torch.bool)
    part = made.log_prob(batch, needed)
    assert torch.allclose(part, full * (needed & mask)[..., None], atol=1e-6)
    assert not full[~mask].any()
    assert made.log_prob(batch, torch.zeros_like(mask)).abs().sum() == 0


def test_states_at_hand_are_used(codes):
    made, known = policy(codes), histories([4, H])
    batch = whole_catalog(known)
    assert torch.equal(made.log_prob(batch), made.log_prob(batch, states=made.encode(known)))


def test_every_parameter_learns(codes):
    made, known = policy(codes), histories([4, H])
    made.log_prob(whole_catalog(known)).sum().backward()
    still = [name for name, p in made.named_parameters() if p.grad is None or not p.grad.any()]
    # the last code of an item is told, never read by the decoder; but the encoder reads it
    assert still == []
    assert made.code_table.weight.grad is not None
    assert not made.code_table.weight.grad[0].any()


def test_the_entropy_along_items_of_the_policy_is_its_entropy(codes):
    made, known = policy(codes), histories([0, 5])
    batch = whole_catalog(known)
    with torch.no_grad():
        logp, along = made.log_prob(batch).sum(-1), made.entropy(batch)
    assert torch.allclose((logp.exp() * along).sum(1), -(logp.exp() * logp).sum(1), atol=1e-4)


def compared(codes, **options):
    """A policy and a reference with other codes, and a slate of every item."""
    made = policy(codes, **options)
    reference = copy.deepcopy(made)
    with torch.no_grad():
        reference.code_table.weight.mul_(-1.0)
    return made, reference, whole_catalog(histories([0, 5]))


def test_the_divergence_along_items_of_the_policy_is_that_over_the_catalog(codes):
    made, reference, batch = compared(codes)
    got = made.divergence(batch, reference)
    assert got.shape == (2, V, len(SIZES))
    logp, other = made.log_prob(batch).sum(-1), reference.log_prob(batch).sum(-1).detach()
    along = (logp.exp() * got.sum(-1)).sum(1)
    over_items = (logp.exp() * (logp - other)).sum(1)  # the expected k1 over all items
    torch.testing.assert_close(along, over_items, rtol=1e-4, atol=1e-5)
    gradients = [
        torch.autograd.grad(x.sum(), made.code_table.weight, retain_graph=True)[0] for x in (along, over_items)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("normalizer", ["trie", "codebook"])
def test_the_divergence_is_that_of_the_codes_of_a_token(codes, normalizer):
    made, reference, batch = compared(codes, normalizer=normalizer)
    got = made.divergence(batch, reference)
    assert (got > -1e-6).all()
    assert torch.allclose(got[:, :1, 0], got[..., 0], atol=1e-6)  # nothing is before the first code of an item
    assert made.divergence(batch, made).abs().max() < 1e-6
    first = batch.slates.mask & (batch.slates.item_ids == 1)
    some = made.divergence(batch, reference, first, made.encode(batch.histories))
    torch.testing.assert_close(some, got * first[..., None])


@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(0.7, 0.8), SamplingOptions(replacement=False)])
def test_samples_carry_their_own_log_probability(codes, options):
    made, known = policy(codes), histories([0, 5, H])
    torch.manual_seed(3)
    ids, logp = made.sample(known, 12, options)
    assert ids.shape == (3, 12)
    assert logp.shape == (3, 12, len(SIZES))
    if options.temperature == 1.0:
        batch = scored(known, ids, known.lengths[:, None].expand(3, 12))
        assert torch.allclose(logp, made.log_prob(batch).detach(), atol=1e-5)
    if not options.replacement:
        assert all(len(set(row)) == 12 for row in ids.tolist())


def test_sampled_frequencies_are_the_probabilities(codes):
    made, known = policy(codes), histories([5])
    torch.manual_seed(0)
    ids, _ = made.sample(known, 20_000)
    expected = item_logp(made, known)[0].exp().double().numpy()
    observed = np.bincount(ids[0].numpy(), minlength=V + 1)[1:]
    assert stats.chisquare(observed, expected / expected.sum() * 20_000).pvalue > 1e-3


def test_a_codebook_sample_without_an_item_has_id_zero(codes):
    made, known = policy(codes, normalizer="codebook"), histories([5])
    torch.manual_seed(0)
    ids, logp = made.sample(known, 5_000)
    valid = item_logp(made, known).exp().sum()
    assert abs((ids > 0).float().mean() - valid) < 0.03
    assert logp.isfinite().all()


def test_tokens_are_the_codes(codes):
    made = policy(codes)
    assert torch.equal(made.tokens(torch.tensor([1, V])), torch.from_numpy(Codes.open(codes).codes[[0, V - 1]]))


def test_a_checkpoint_of_other_codes_is_refused(codes, tmp_path):
    other = policy(save_codes(tmp_path / "other", seed=1))
    with refused("mismatch", "codes"):
        other.load_state_dict(policy(codes).state_dict())


def test_codes_of_another_catalog_are_refused(codes):
    with refused("mismatch", "codes"):
        SemanticIdPolicy(V + 1, codes=codes)
    with refused("wrong_file", "manifest.json"):
        SemanticIdPolicy(V, codes=codes / "nothing")


@pytest.mark.parametrize("faults", [{"heads": 3}, {"heads": 4, "kv_groups": 3}, {"kv_layers": 5}, {"beam_width": 0}])
def test_options_that_do_not_fit_are_refused(codes, faults):
    with pytest.raises(RecpoError):
        policy(codes, **faults)


def test_stepwise_decoding_equals_teacher_forcing():
    torch.manual_seed(0)
    options = DecoderOptions(dim=16, heads=4, decoder_layers=2, kv_groups=2, kv_layers=2, dropout=0.0)
    decoder = LazyDecoder(SIZES, options).eval()
    states, codes = torch.randn(3, 6, 16), torch.randn(6, 2, 16)
    context = decoder.read(states)
    placement = Placement(torch.tensor([[5, 2], [0, 0], [3, 5]]))
    hidden = decoder(codes, context, placement)
    cache = None
    for level in range(3):
        previous = None if level == 0 else codes[:, level - 1]
        logits, cache = decoder.step(level, previous, context, placement, cache)
        assert torch.allclose(logits, decoder.logits(level, hidden[:, level]), atol=1e-5)
