"""Softmax and lookups over a sharded table against the whole table: values and gradients, also without rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from recpo.ops import kernels
from recpo.ops.linear_logprob import check_states, linear_divergence, linear_entropy, linear_logprob
from recpo.ops.sharded_logprob import RowShard, sharded_divergence, sharded_entropy, sharded_logprob, sharded_lookup
from tests.refusals import refused
from tests.sharding.ranks import Ranks

pytestmark = pytest.mark.slow


class Case(NamedTuple):
    """A table of ``cut[-1]`` rows of which rank r has rows ``cut[r]`` to ``cut[r + 1]``, and ``states[r]`` states."""

    cut: tuple[int, ...]
    states: tuple[int, ...]
    per_state: int | None = None  # targets per state; None: any number of targets of any state
    cosine: bool = False
    keep_bytes: int = 0
    block_rows: int = 7
    dim: int = 3
    scale: float = 1.0
    seed: int = 0
    dtype: torch.dtype = torch.float64
    device: str = "cpu"


class Problem(NamedTuple):
    """One rank's states, targets, their states and the weights of their log-probabilities and entropies in its loss."""

    states: Tensor
    targets: Tensor
    state_index: Tensor | None
    weights: Tensor
    entropy_weights: Tensor


def problems(case: Case) -> tuple[Tensor, list[Problem]]:
    """The table and the problem of each rank."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.device, case.dtype)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(case.device)

    found = []
    for n in case.states:
        if case.per_state is None:
            m = int(whole(0, 9)) if n else 0
            targets, index = whole(1, case.cut[-1], m), whole(0, max(n, 1), m)
        else:
            targets, index = whole(1, case.cut[-1], *((n,) if case.per_state == 1 else (n, case.per_state))), None
        found.append(Problem(normal(n, case.dim) * case.scale, targets, index, normal(*targets.shape), normal(n)))
    return normal(case.cut[-1], case.dim), found


def shard_of(case: Case, rows: Tensor, group: Any = None) -> RowShard:
    first = case.cut[dist.get_rank(group)]
    return RowShard(rows, first if len(rows) else case.cut[-1], case.cut[-1], group)


def loss_over_all(case: Case, table: Tensor, problem: Problem) -> Tensor:
    """A rank's loss with the whole table at hand."""
    table = F.normalize(table, dim=-1) if case.cosine else table
    logp = linear_logprob(problem.states, table, problem.targets, problem.state_index)
    entropy = linear_entropy(problem.states, table)
    reference = reference_of(problem.states), reference_of(table)
    divergence = linear_divergence(problem.states, table, *reference)
    return (logp * problem.weights).sum() + ((entropy + divergence) * problem.entropy_weights).sum()


def reference_of(values: Tensor) -> Tensor:
    """Other states or rows, which depend on each row alone."""
    return 0.5 * values.detach().sin()


def loss_over_ranks(case: Case, rows: Tensor, problem: Problem, group: Any = None) -> Tensor:
    """The same with its rows of it."""
    shard = shard_of(case, F.normalize(rows, dim=-1) if case.cosine else rows, group)
    logp = sharded_logprob(problem.states, shard, problem.targets, problem.state_index)
    entropy = sharded_entropy(problem.states, shard)
    reference = reference_of(problem.states), shard._replace(rows=reference_of(shard.rows))
    divergence = sharded_divergence(problem.states, shard, *reference)
    assert logp.shape == problem.targets.shape
    return (logp * problem.weights).sum() + ((entropy + divergence) * problem.entropy_weights).sum()


def check_softmax(case: Case, in_pairs: bool = False) -> None:
    """Run by each rank: loss and gradients equal those of the whole table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "KEEP_BYTES", case.keep_bytes)
        patch.setattr(kernels, "BLOCK_ROWS_OF_TABLE", case.block_rows)
        group = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2] if in_pairs else None
        rank, count = dist.get_rank(group), dist.get_world_size(group)
        table, every = problems(case)
        own = every[rank]._replace(states=every[rank].states.requires_grad_())
        rows = table[case.cut[rank] : case.cut[rank + 1]].clone().requires_grad_()
        loss = loss_over_ranks(case, rows, own, group)
        got = torch.autograd.grad(loss, (own.states, rows))

        table.requires_grad_()
        losses = [loss_over_all(case, table, problem) for problem in every]
        (grad_states,) = torch.autograd.grad(losses[rank], own.states, retain_graph=True)
        (grad_table,) = torch.autograd.grad(sum(losses) / count, table)
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if case.dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-4}
    torch.testing.assert_close(loss, losses[rank], **tolerance)
    torch.testing.assert_close(got[0], grad_states, **tolerance)
    torch.testing.assert_close(got[1], grad_table[case.cut[rank] : case.cut[rank + 1]], **tolerance)


def cases(world_size: int) -> st.SearchStrategy[Case]:
    def build(rows: int, inner: list[int], **options: Any) -> Case:
        return Case((0, *sorted(min(cut, rows) for cut in inner), rows), **options)

    return st.builds(
        build,
        st.integers(2, 40),
        st.lists(st.integers(0, 40), min_size=world_size - 1, max_size=world_size - 1),
        states=st.tuples(*[st.integers(0, 9)] * world_size),
        per_state=st.sampled_from([None, 1, 3]),
        cosine=st.booleans(),
        keep_bytes=st.sampled_from([0, 1 << 20]),
        seed=st.integers(0, 1000),
    )


@settings(max_examples=40)
@given(case=cases(2))
def test_any_cut_gives_values_and_gradients_of_the_whole_table(two: Ranks, case: Case) -> None:
    two.run(check_softmax, case)


def test_no_states_anywhere_and_all_rows_on_one_rank(two: Ranks) -> None:
    two.run(check_softmax, Case((0, 3, 9), (0, 0)))
    two.run(check_softmax, Case((0, 0, 9), (4, 0), 3))
    two.run(check_softmax, Case((0, 9, 9), (0, 4), 1))


@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
def test_float32_in_blocks_of_the_usual_size(two: Ranks, keep_bytes: int) -> None:
    two.run(
        check_softmax,
        Case((0, 9000, 20_001), (150, 90), 2, dim=16, keep_bytes=keep_bytes, block_rows=8192, dtype=torch.float32),
    )


def check_extremes() -> None:
    case = Case((0, 17, 41), (40, 30), 1, scale=1e4, dtype=torch.float32)
    table, every = problems(case)
    rank, own = dist.get_rank(), every[dist.get_rank()]
    own.states.requires_grad_()
    rows = table[case.cut[rank] : case.cut[rank + 1]].clone().requires_grad_()
    logp = sharded_logprob(own.states, shard_of(case, rows), own.targets)
    gradients = torch.autograd.grad(logp.sum(), (own.states, rows))
    assert all(value.isfinite().all() for value in (logp, *gradients))
    torch.testing.assert_close(logp, linear_logprob(own.states, table, own.targets), rtol=1e-5, atol=1e-2)


def test_row_0_is_padding_where_it_is_held() -> None:
    rows = torch.zeros(3, 2)
    assert [RowShard(part, first, 6).padding_rows for part, first in ((rows, 0), (rows, 3), (rows[:0], 0))] == [1, 0, 0]


def test_a_table_has_one_item_at_least() -> None:
    check_states(torch.zeros(4, 2), torch.zeros(2, 2), 1)
    for states, rows, items in (((4, 2), (2, 2), 0), ((4, 3), (2, 2), 1), ((4,), (2, 2), 1), ((4, 2), (2,), 1)):
        with refused("wrong_shape", "states"):
            check_states(torch.zeros(states), torch.zeros(rows), items)


def test_survives_extreme_logits(two: Ranks) -> None:
    two.run(check_extremes)


def check_precision() -> None:
    case = Case((0, 200, 501), (64, 60), 1, dim=16, dtype=torch.float32)
    table, every = problems(case)
    rank, own = dist.get_rank(), every[dist.get_rank()]
    rows = table[case.cut[rank] : case.cut[rank + 1]]
    plain = sharded_logprob(own.states, shard_of(case, rows), own.targets)
    torch.testing.assert_close(plain, linear_logprob(own.states, table, own.targets))
    entropy = sharded_entropy(own.states, shard_of(case, rows))
    # a difference of two numbers of the size of the largest logit, each of them a sum in another order
    rounding = 16 * float((own.states @ table[1:].T).abs().max()) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(entropy, linear_entropy(own.states, table), rtol=1e-4, atol=rounding)
    with torch.autocast("cpu", torch.bfloat16):
        cast = sharded_logprob(own.states, shard_of(case, rows), own.targets)
    assert torch.equal(cast, plain)
    half = sharded_logprob(own.states.bfloat16(), shard_of(case, rows.bfloat16()), own.targets)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, linear_logprob(own.states.bfloat16(), table.bfloat16(), own.targets))


def test_autocast_and_bfloat16_inputs_are_summed_in_float32(two: Ranks) -> None:
    two.run(check_precision)


def check_either_gradient_alone() -> None:
    case = Case((0, 12, 30), (5, 3), 2)
    table, every = problems(case)
    rank, own = dist.get_rank(), every[dist.get_rank()]
    rows = table[case.cut[rank] : case.cut[rank + 1]].clone()
    both = own._replace(states=own.states.clone().requires_grad_()), rows.clone().requires_grad_()
    expected = torch.autograd.grad(loss_over_ranks(case, both[1], both[0]), (both[0].states, both[1]))
    of_rows = torch.autograd.grad(loss_over_ranks(case, both[1], own), both[1])
    of_states = torch.autograd.grad(loss_over_ranks(case, rows, both[0]), both[0].states)
    torch.testing.assert_close((*of_states, *of_rows), expected)
    with torch.no_grad():
        assert not loss_over_ranks(case, both[1], own).requires_grad


def test_either_gradient_alone(two: Ranks) -> None:
    two.run(check_either_gradient_alone)


def check_lookup(cut: tuple[int, ...], counts: tuple[int, ...], seed: int, device: str = "cpu") -> None:
    """Run by each rank: vectors and gradients are those of an embedding of the whole table."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(cut[-1], 3, generator=generator, dtype=torch.float64).to(device)
    ids = [torch.randint(0, cut[-1], (2, n), generator=generator).to(device) for n in counts]
    weights = [torch.randn(2, n, 3, generator=generator, dtype=torch.float64).to(device) for n in counts]
    rank = dist.get_rank()
    rows = table[cut[rank] : cut[rank + 1]].clone().requires_grad_()
    got = sharded_lookup(ids[rank], RowShard(rows, cut[rank], cut[-1]))
    table[0] = 0
    table.requires_grad_()
    losses = [(F.embedding(i, table, padding_idx=0) * w).sum() for i, w in zip(ids, weights, strict=True)]
    assert torch.equal(got, F.embedding(ids[rank], table))
    (expected,) = torch.autograd.grad(sum(losses) / len(counts), table)
    (gradient,) = torch.autograd.grad((got * weights[rank]).sum(), rows)
    torch.testing.assert_close(gradient, expected[cut[rank] : cut[rank + 1]], rtol=1e-12, atol=1e-12)


@settings(max_examples=30)
@given(st.integers(2, 12), st.integers(0, 12), st.tuples(*[st.integers(0, 20)] * 2), st.integers(0, 1000))
def test_lookup_is_an_embedding_of_the_whole_table(
    two: Ranks, rows: int, cut: int, counts: tuple[int, int], seed: int
) -> None:
    two.run(check_lookup, (0, min(cut, rows), rows), counts, seed)


def check_with_ddp() -> None:
    """Encoder in DDP, its table cut: gradients and one step are those of the mean loss of the ranks in one process."""
    case = Case((0, 5, 20), (6, 2), 2)
    table, every = problems(case)
    torch.manual_seed(0)
    encoder = nn.Linear(3, 3).double()
    rank, own = dist.get_rank(), every[dist.get_rank()]
    rows = table[case.cut[rank] : case.cut[rank + 1]].clone().requires_grad_()
    wrapped = DistributedDataParallel(encoder)
    shard = shard_of(case, rows)
    inputs = sharded_lookup(own.targets[:, 0], shard)
    (sharded_logprob(wrapped(inputs), shard, own.targets) * own.weights).sum().backward()
    got = [rows.grad, *(parameter.grad.clone() for parameter in encoder.parameters())]

    encoder.zero_grad()
    table.requires_grad_()
    losses = [
        (linear_logprob(encoder(F.embedding(p.targets[:, 0], table)), table, p.targets) * p.weights).sum()
        for p in every
    ]
    (sum(losses) / 2).backward()
    expected = [table.grad[case.cut[rank] : case.cut[rank + 1]], *(p.grad for p in encoder.parameters())]
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_gradients_are_the_mean_that_ddp_leaves(two: Ranks) -> None:
    two.run(check_with_ddp)


class _LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def largest_tensor() -> int:
    case = Case((0, 15_000, 30_001), (1200, 800), 1, dim=4, dtype=torch.float32)
    table, every = problems(case)
    rank, own = dist.get_rank(), every[dist.get_rank()]
    own.states.requires_grad_()
    rows = table[case.cut[rank] : case.cut[rank + 1]].clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch, _LargestTensor() as largest:
        patch.setattr(kernels, "KEEP_BYTES", 0)
        sharded_logprob(own.states, shard_of(case, rows), own.targets).sum().backward()
    return largest.numel


def test_never_makes_an_n_by_v_tensor(two: Ranks) -> None:
    for numel in two.run(largest_tensor):
        assert numel * 4 <= 2 * kernels.BLOCK_BYTES["cpu"] < 2000 * 15_000 * 4 / 5


def check_faults() -> None:
    """A mistake of rank 1 is an error of all."""
    rank = dist.get_rank()
    shard = RowShard(torch.zeros(5, 2), 5 * rank, 10)
    for wrong in (10, -1):
        with pytest.raises(IndexError, match=r"by rank: \[0, 1\]"):
            sharded_logprob(torch.zeros(1, 2), shard, torch.tensor([wrong if rank else 1]))
        with pytest.raises(IndexError, match=r"by rank: \[0, 1\]"):
            sharded_lookup(torch.tensor([wrong if rank else 1]), shard)
        with pytest.raises(IndexError, match=r"by rank: \[0, 1\]"):
            sharded_logprob(torch.zeros(1, 2), shard, torch.tensor([1]), torch.tensor([wrong if rank else 0]))
    for other in (shard._replace(first=4 + rank), shard._replace(num_rows=11), shard._replace(rows=torch.zeros(4, 2))):
        with refused("mismatch", "blocks"):
            sharded_entropy(torch.zeros(1, 2), other)
    with refused("wrong_shape", "states"):
        sharded_logprob(torch.zeros(1, 3), shard, torch.tensor([1]))
    with refused("wrong_shape", "targets"):
        sharded_logprob(torch.zeros(1, 2), shard, torch.tensor([1, 2]))


def test_a_mistake_of_one_rank_is_an_error_of_all(two: Ranks) -> None:
    two.run(check_faults)


@pytest.mark.gpu
def test_on_a_gpu_with_nccl() -> None:
    with Ranks(1, "nccl", timeout=120) as one:
        one.run(check_softmax, Case((0, 40), (9,), 3, device="cuda"))
        one.run(check_softmax, Case((0, 20_001), (500,), None, dim=64, dtype=torch.float32, device="cuda"))
        one.run(check_lookup, (0, 12), (20,), 0, "cuda")
