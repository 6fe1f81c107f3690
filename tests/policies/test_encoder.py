"""The history encoder: profiles and fold-ins of all events, and blocks that only read recent events."""

import pytest
import torch
from torch.nn.functional import gelu

from recpo.base.feedback import HIGHEST
from recpo.base.types import FeedbackBatch, Histories, Slates
from recpo.policies.blocks import HSTUBlock, SASRecBlock
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.encoder import EncoderOptions, FoldIn, HistoryEncoder, Profile
from tests.refusals import refused

DIM, LENGTH = 8, 7


def encoder_of(block=SASRecBlock, attention_length=None, **options):
    torch.manual_seed(0)
    options = EncoderOptions(dim=DIM, block=block, dropout=0.0, **{"max_history": LENGTH, **options})
    encoder = HistoryEncoder(options, attention_length=attention_length).double()
    if encoder.profile is not None:
        torch.nn.init.normal_(encoder.profile.contract.weight)
    if encoder.fold_in is not None:
        shake(encoder.fold_in)
    return encoder


def shake(fold_in):
    """Every parameter away from where it starts."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in fold_in.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def histories(lengths, length=LENGTH):
    """Item vectors ``[B, H, d]`` (zero where padded), feedback levels, times and lengths."""
    lengths = torch.tensor(lengths)
    real = torch.arange(length) < lengths[:, None]
    generator = torch.Generator().manual_seed(1)
    items = torch.randn(len(lengths), length, DIM, generator=generator, dtype=torch.float64) * real[..., None]
    levels = torch.randint(0, HIGHEST + 1, real.shape, generator=generator) * real
    times = torch.randint(1, 10**6, real.shape, generator=generator).cumsum(1) * real
    return items, levels, times, lengths


def known(levels, times, lengths):
    """What an encoder reads beside item vectors."""
    return Histories(levels, lengths, levels, times)


def test_a_profile_is_the_network_over_the_weighed_mean_by_hand():
    torch.manual_seed(0)
    profile = Profile(DIM, HIGHEST + 1).double()
    torch.nn.init.normal_(profile.contract.weight)
    items, levels, _, lengths = histories([3, 0])
    total = sum(profile.gain.weight[levels[0, j]] * items[0, j] for j in range(3)) / (3 + 5)
    hidden = gelu(profile.expand.weight @ total + profile.expand.bias)
    expected = profile.contract.weight @ hidden + profile.contract.bias
    torch.testing.assert_close(profile.last(items, levels, lengths)[0], expected)
    torch.testing.assert_close(profile(items, levels)[0, 3], expected)
    nothing = profile.contract.weight @ gelu(profile.expand.bias) + profile.contract.bias
    torch.testing.assert_close(profile.last(items, levels, lengths)[1], nothing)


def test_an_untrained_profile_adds_nothing_and_learns_at_once():
    torch.manual_seed(0)
    profile = Profile(DIM, HIGHEST + 1).double()
    items, levels, _, lengths = histories([3, 5])
    output = profile.last(items, levels, lengths)
    assert (output == 0).all()
    output.sum().backward()
    assert profile.contract.weight.grad.abs().sum() > 0


def test_without_feedback_all_events_of_a_profile_weigh_alike():
    items, _, _, lengths = histories([3, 5])
    for levels in (0, HIGHEST + 1):
        profile = Profile(DIM, levels).double()
        torch.nn.init.normal_(profile.contract.weight)
        plain = profile.last(items * profile.gain.weight[0], None, lengths) if levels else None
        unknown = profile.last(items, None, lengths)
        both = profile.last(items, torch.zeros(items.shape[:2], dtype=torch.int64), lengths)
        torch.testing.assert_close(unknown, both)
        assert plain is None or not torch.equal(plain, unknown)


@pytest.mark.parametrize("block", [SASRecBlock, HSTUBlock])
@pytest.mark.parametrize("options", [{}, {"profile": True}, {"fold_in": 3}])
def test_the_last_state_is_a_row_of_all_states_and_no_later_event_changes_an_earlier_one(block, options):
    encoder = encoder_of(block, **options)
    items, levels, times, lengths = histories([0, 1, 4, 7])
    states = encoder(items, known(levels, times, lengths))
    rows = torch.arange(4)
    torch.testing.assert_close(states[rows, lengths], encoder.last(items, known(levels, times, lengths)))
    shorter = encoder(items[:, :4], known(levels[:, :4], times[:, :4], lengths.clamp_max(4)))
    torch.testing.assert_close(states[3, :5], shorter[3])


@pytest.mark.parametrize("block", [SASRecBlock, HSTUBlock])
def test_blocks_read_the_last_events_as_if_there_were_no_others(block):
    short, long = encoder_of(block, max_history=3), encoder_of(block, attention_length=3)
    long.load_state_dict(short.state_dict())
    items, levels, times, lengths = histories([0, 2, 3, 5, 7])
    states = long(items, known(levels, times, lengths))
    begin = (lengths - 3).clamp_min(0)
    place = (begin[:, None] + torch.arange(3)).clamp_max(LENGTH - 1)
    rows = torch.arange(5)[:, None]
    nearest = known(levels[rows, place], times[rows, place], lengths.clamp_max(3))
    expected = short.last(items[rows, place], nearest)
    torch.testing.assert_close(states[rows.squeeze(1), lengths], expected)
    torch.testing.assert_close(long.last(items, known(levels, times, lengths)), expected)
    assert states[4, 1:7].isnan().all(), "only the first and the last state are known"
    first = items[:, :3], known(levels[:, :3], times[:, :3], lengths.clamp_max(3))
    torch.testing.assert_close(states[:, 0], short(*first)[:, 0])
    torch.testing.assert_close(long(*first), short(*first))


def fold_in_of(rank=3):
    torch.manual_seed(0)
    fold_in = FoldIn(DIM, rank, HIGHEST + 1).double()
    shake(fold_in)
    return fold_in


def test_a_fold_in_is_the_ridge_regression_of_feedback_on_item_vectors():
    fold_in, (items, levels, _, lengths) = fold_in_of(), histories([0, 1, 4, 7])
    last = fold_in.last(items, levels)
    for row, length in enumerate(lengths.tolist()):
        matrix, right = torch.diag(fold_in.log_ridge.exp()), torch.zeros(4, dtype=torch.float64)
        for item, level in zip(items[row, :length], levels[row, :length].tolist(), strict=True):
            if level:
                vector = torch.cat([fold_in.project.weight @ item + fold_in.project.bias, torch.ones(1).double()])
                weight = fold_in.log_weight[level - 1].exp()
                matrix = matrix + weight * torch.outer(vector, vector)
                right = right + weight * fold_in.grade[level] * vector
        expected = fold_in.contract.weight @ torch.linalg.solve(matrix, right) + fold_in.contract.bias
        torch.testing.assert_close(last[row], expected)
    torch.testing.assert_close(fold_in(items, levels)[torch.arange(4), lengths], last)


def test_gradients_of_a_fold_in_are_those_of_finite_differences():
    fold_in, (items, levels, _, _) = fold_in_of(rank=2), histories([5, 3], length=5)
    names, values = zip(*fold_in.named_parameters(), strict=True)

    def folded(items, *parameters):
        state = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(fold_in, state, (items, levels))

    assert torch.autograd.gradcheck(folded, (items.requires_grad_(), *values))


def test_an_untrained_fold_in_adds_nothing_and_needs_feedback():
    items, levels, times, lengths = histories([7, 3])
    options = EncoderOptions(dim=DIM, dropout=0.0, max_history=LENGTH, fold_in=2)
    plain, untrained = encoder_of(), HistoryEncoder(options).double()
    untrained.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(plain(items, known(levels, times, lengths)), untrained(items, known(levels, times, lengths)))
    untrained.last(items, known(levels, times, lengths)).sum().backward()
    assert untrained.fold_in.contract.weight.grad.abs().sum() > 0
    for options in ({"fold_in": 2, "feedback_levels": 0}, {"fold_in": -1}):
        with refused("out_of_range", "policy.fold_in"):
            encoder_of(**options)


def test_a_fold_in_of_events_that_blocks_do_not_read():
    encoder = encoder_of(attention_length=3, fold_in=2)
    items, levels, times, lengths = histories([7, 0])
    states = encoder(items, known(levels, times, lengths))
    torch.testing.assert_close(states[torch.arange(2), lengths], encoder.last(items, known(levels, times, lengths)))
    torch.testing.assert_close(states[0, 0], states[1, 0])
    levels[0, 0] = 1 + levels[0, 0] % 5
    assert not torch.allclose(states[0, 7], encoder.last(items, known(levels, times, lengths))[0])


def test_a_profile_reads_what_the_blocks_do_not():
    encoder = encoder_of(attention_length=3, profile=True)
    items, levels, times, lengths = histories([7])
    before = encoder.last(items, known(levels, times, lengths))
    levels[0, 0] = 1 + levels[0, 0] % 5
    assert not torch.allclose(before, encoder.last(items, known(levels, times, lengths)))
    blind = encoder_of(attention_length=3)
    seen = blind.last(items, known(levels, times, lengths))
    levels[0, 0] = 1 + levels[0, 0] % 5
    assert torch.equal(seen, blind.last(items, known(levels, times, lengths))), (
        "without a profile it is not read at all"
    )


def test_an_attention_length_of_nothing_is_an_error_and_max_history_caps_it():
    with refused("out_of_range", "policy.attention_length"):
        CatalogSoftmaxPolicy(9, dim=8, attention_length=0)
    assert encoder_of(attention_length=8).attention_length == LENGTH


def test_a_policy_of_recent_events_scores_after_the_whole_history_only():
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(9, dim=8, heads=2, max_history=6, attention_length=2, profile=True).eval()
    ids, mask = torch.tensor([[1, 2, 3, 4], [5, 0, 0, 0]]), torch.ones(2, 3, dtype=torch.bool)
    lengths, targets = torch.tensor([4, 1]), torch.tensor([[7, 8, 9], [1, 2, 3]])
    read = Histories(ids, lengths, (ids > 0) * 3, ids * 1000)
    slates = Slates(targets, lengths[:, None].expand(2, 3), mask)
    logp = policy.log_prob(FeedbackBatch(read, slates, lengths))
    best = policy.recommend(read, 9)
    torch.testing.assert_close(logp[0, 0, 0], best.scores[0][best.item_ids[0] == 7][0], atol=1e-5, rtol=0)
    with refused("out_of_range", "policy.attention_length"):
        policy.log_prob(FeedbackBatch(read, slates._replace(visible=slates.visible - 1), lengths))
