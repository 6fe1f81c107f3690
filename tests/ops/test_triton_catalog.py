"""The fused kernels of the catalog softmax against dense ones in float64 and against the plain path.

Without a GPU the checks run in Triton's interpreter: it has to be asked for before triton is imported, so in a process
of its own, which ``test_in_the_interpreter`` starts. On a GPU the same checks are ordinary tests, marked ``gpu``.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recpo.errors import RecpoError
from recpo.ops import kernels
from recpo.ops.catalog_passes import catalog_passes, why_not_fused
from recpo.ops.linear_logprob import linear_entropy, linear_logprob
from recpo.ops.row_shard import RowShard
from recpo.ops.sharded_logprob import sharded_entropy, sharded_logprob
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.types import FeedbackBatch, Histories, Slates

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="triton is not installed (requirements/gpu.lock brings it)")
outside = pytest.mark.skipif(INTERPRETED, reason="this process is the interpreter's")


def on_device(check: Callable) -> Callable:
    """Marks a check that needs the interpreter or a GPU."""
    return needs_triton(check if INTERPRETED else pytest.mark.gpu(check))


@pytest.fixture(params=["highest", "high"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def problem(n: int, v: int, d: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * 1000 + v)
    states, table = torch.randn(n, d, generator=generator), torch.randn(v, d, generator=generator)
    return tuple(part.to(DEVICE, dtype).requires_grad_() for part in (states, table))


def draw(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(high), device="cpu").to(DEVICE)


def dense(states: Tensor, table: Tensor, padding_rows: int, temperature: float = 1.0) -> Tensor:
    return (states @ table[padding_rows:].T / temperature).log_softmax(-1)


def close(found: object, expected: object, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


@on_device
@pytest.mark.parametrize(
    ("n", "v", "d", "padding_rows", "programs"),
    [(150, 300, 20, 1, 512), (150, 300, 20, 0, 1), (1, 2, 3, 1, 512), (33, 131, 128, 1, 8), (70, 200, 64, 1, 6)],
)
def test_log_probabilities_entropy_and_gradients(
    n: int, v: int, d: int, padding_rows: int, programs: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recpo.ops import triton_catalog

    monkeypatch.setattr(triton_catalog, "PROGRAMS", programs)
    states, table = problem(n, v, d)
    wide = [part.detach().double().requires_grad_() for part in (states, table)]
    targets, weights = draw(padding_rows, v, n, 3), torch.randn(n, 3, dtype=torch.float64, device=DEVICE)
    options = {"temperature": d**0.5, "padding_rows": padding_rows, "kernel": "fused"}

    logp, entropy = linear_logprob(states, table, targets, **options), linear_entropy(states, table, **options)
    of_all = dense(*wide, padding_rows, d**0.5)
    expected, wanted = of_all.gather(1, targets - padding_rows), -(of_all.exp() * of_all).sum(1)
    assert logp.dtype == entropy.dtype == torch.float32
    close((logp, entropy), (expected, wanted))
    close(
        torch.autograd.grad((logp * weights).sum(), (states, table)),
        torch.autograd.grad((expected * weights).sum(), wide, retain_graph=True),
    )
    close(
        torch.autograd.grad((entropy * weights[:, 0]).sum(), (states, table)),
        torch.autograd.grad((wanted * weights[:, 0]).sum(), wide),
    )


@on_device
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 70), st.integers(1, 70), st.integers(1, 17), st.integers(0, 90))
def test_any_target_of_any_state(n: int, v: int, d: int, m: int) -> None:
    states, table = problem(n, v + 1, d)
    m = m if n else 0
    index, targets = draw(0, max(n, 1), m), draw(1, v + 1, m)
    results = []
    for kernel in ("fused", "plain"):
        logp = linear_logprob(states, table, targets, index, kernel=kernel)
        results.append((logp, *torch.autograd.grad(logp.square().sum(), (states, table))))
    close(*results, 1e-4)


@on_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    states, table = problem(40, 90, 16, dtype)
    targets = draw(1, 90, 40)
    results = []
    for kernel in ("fused", "plain"):
        logp, entropy = (
            linear_logprob(states, table, targets, kernel=kernel),
            linear_entropy(states, table, kernel=kernel),
        )
        assert logp.dtype == torch.float32
        results.append((logp, entropy, *torch.autograd.grad((logp + entropy).sum(), (states, table))))
    close(results[0][:2], results[1][:2])
    for fused, plain in zip(results[0][2:], results[1][2:], strict=True):
        assert fused.dtype == dtype
        close(fused, plain, 2e-2)  # rounded to its own type


@on_device
def test_states_without_a_gradient_are_left_out() -> None:
    """A state that is not a number shows it: a product with 0 would not be 0."""
    states, table = problem(130, 100, 8)
    broken = torch.arange(130, device=DEVICE) % 3 == 0
    with torch.no_grad():
        states[broken] = torch.nan
    whole = states.detach()[~broken].requires_grad_()
    got = torch.autograd.grad(entropy_of(states, table)[~broken].sum(), (states, table))
    expected = torch.autograd.grad(entropy_of(whole, table).sum(), (whole, table))
    assert not got[0][broken].any()
    close((got[0][~broken], got[1]), expected)

    passes, gradient = catalog_passes("fused", states, table), torch.zeros_like(table)
    sums = passes.sum_over_catalog(states.detach(), table, 1, want_expected_row=False)
    passes.add_softmax_gradient(gradient, (~broken).float(), states.detach(), table.detach(), 1, sums)
    close(gradient[1:], dense(whole, table, 1).exp().T @ whole, 1e-4)


def entropy_of(states: Tensor, table: Tensor) -> Tensor:
    return linear_entropy(states, table, kernel="fused")


@on_device
def test_equal_inputs_give_equal_bits() -> None:
    def outcome() -> list[Tensor]:
        states, table = problem(300, 200, 12)
        logp, entropy = linear_logprob(states, table, draw(1, 200, 300), kernel="fused"), entropy_of(states, table)
        return [logp, entropy, *torch.autograd.grad((logp - entropy).sum(), (states, table))]

    for one, other in zip(outcome(), outcome(), strict=True):
        assert torch.equal(one, other)


@on_device
def test_survives_extreme_logits() -> None:
    states, table = problem(70, 90, 4)
    large = (states.detach() * 1e4).requires_grad_()
    logp, entropy = linear_logprob(large, table, draw(1, 90, 70), kernel="fused"), entropy_of(large, table)
    gradients = torch.autograd.grad((logp + entropy).sum(), (large, table))
    assert all(value.isfinite().all() for value in (logp, entropy, *gradients))
    expected = dense(large.double(), table.double(), 1).gather(1, draw(1, 90, 70)[:, None] - 1)[:, 0]
    torch.testing.assert_close(logp.double(), expected, rtol=1e-5, atol=1e-2)


@on_device
def test_either_gradient_alone_and_rows_that_are_not_adjacent() -> None:
    states, table = problem(40, 60, 8)
    targets = draw(1, 60, 40)
    both = torch.autograd.grad(linear_logprob(states, table, targets, kernel="fused").sum(), (states, table))
    apart = [part.detach().repeat(1, 2)[:, :8] for part in (states, table)]  # rows 16 numbers apart
    columns = [part.detach().T.contiguous().T for part in (states, table)]  # columns in one piece, rows in none
    for views in (apart, columns):
        for alone in range(2):
            views[alone].requires_grad_()
            logp = linear_logprob(*views, targets, kernel="fused")
            close(torch.autograd.grad(logp.sum(), views[alone])[0], both[alone])
            views[alone].requires_grad_(False)


@on_device
def test_nothing_to_score() -> None:
    states, table = problem(5, 1, 8)
    passes = catalog_passes("fused", states, table)
    sums = passes.sum_over_catalog(states, table, 1, want_expected_row=True)  # a rank whose only row is the padding
    assert (sums.lse == -torch.inf).all()
    assert sums.expected_row is not None
    assert not sums.expected_row.any()
    gradient = torch.ones_like(table)
    passes.add_softmax_gradient(gradient, torch.ones(5, device=DEVICE), states, table, 1, sums)
    assert (gradient == 1).all()
    no_states, items = problem(0, 9, 8)
    assert linear_entropy(no_states, items, kernel="fused").shape == (0,)


@on_device
def test_a_policy_and_its_gradients() -> None:
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(90, dim=16, dropout=0.0, max_history=8, softmax_kernel="fused").to(DEVICE)
    ids, lengths = draw(1, 91, 6, 8), draw(2, 9, 6)
    histories = Histories(ids * (torch.arange(8, device=DEVICE) < lengths[:, None]), lengths)
    scored = torch.ones(6, 3, dtype=torch.bool, device=DEVICE)
    batch = FeedbackBatch(
        histories, Slates(draw(1, 91, 6, 3), lengths[:, None].expand(6, 3), scored), torch.arange(6, device=DEVICE)
    )

    def outcome() -> list[Tensor]:
        logp = policy.log_prob(batch)
        entropy = policy.entropy(batch)
        learned = [p for p in policy.parameters() if p.requires_grad]
        return [logp, entropy, *torch.autograd.grad(logp.mean() + entropy.mean(), learned, allow_unused=True)]

    fused = outcome()
    with kernels.reference_kernels():
        plain = outcome()
    close(fused, plain, 1e-4)


@on_device
def test_a_table_that_is_cut_over_ranks(tmp_path: Path) -> None:
    backend = "gloo" if DEVICE == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        states, table = problem(20, 41, 8)
        targets, shard = draw(1, 41, 20), RowShard(table, 0, 41)
        logp = sharded_logprob(states, shard, targets, kernel="fused")
        entropy = sharded_entropy(states, shard, kernel="fused")
        got = torch.autograd.grad((logp + entropy).sum(), (states, table))
    finally:
        dist.destroy_process_group()
    plain, of_plain = linear_logprob(states, table, targets), linear_entropy(states, table)
    close((logp, entropy), (plain, of_plain))
    close(got, torch.autograd.grad((plain + of_plain).sum(), (states, table)))


@on_device
def test_refuses_what_it_does_not_compute() -> None:
    states, table = problem(4, 9, 129)
    assert "at most 128" in (why_not_fused(states, table) or "")
    assert "float64" in (why_not_fused(states[:, :4].double(), table[:, :4]) or "")
    with pytest.raises(ValueError, match="float64"):
        linear_entropy(states[:, :4].double(), table[:, :4], kernel="fused")


@outside
def test_is_refused_on_a_cpu_where_it_would_train_and_plain_where_it_is_evaluated() -> None:
    states, table = torch.randn(3, 4), torch.randn(6, 4)
    for function in (linear_entropy, lambda h, e, kernel: linear_logprob(h, e, torch.ones(3).long(), kernel=kernel)):
        with pytest.raises(ValueError, match=r"triton|NVIDIA GPU"):
            function(states, table, kernel="fused")
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(5, dim=4, softmax_kernel="fused")
    with pytest.raises(RecpoError, match=r"set policy\.softmax_kernel to plain"):
        policy.item_table.log_prob(states, torch.ones(3).long())
    policy.eval()
    assert torch.equal(policy.item_table.entropy(states), linear_entropy(states, policy.output_vectors()))
    with pytest.raises(RecpoError, match=r"policy\.normalizer to full"):
        CatalogSoftmaxPolicy(5, dim=4, softmax_kernel="fused", normalizer="sampled")


def fresh(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")} | environment
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600, env=env, check=False)


@outside
@needs_triton
@pytest.mark.slow
def test_in_the_interpreter() -> None:
    result = fresh("-m", "pytest", "-p", "no:cacheprovider", __file__, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-4000:]
    assert "passed" in result.stdout


@outside
@needs_triton
@pytest.mark.slow
def test_trains_through_the_command_line_as_the_plain_kernels_do(prepared: Path, tmp_path: Path) -> None:
    command = ["-m", "recpo.cli.main", "train", "--config", str(Path(__file__).parents[2] / "configs/pretrain.yaml")]
    command += ["--data.prepared", str(prepared), "--policy.init_args.dim", "16", "--trainer.max_steps", "3"]
    command += ["--trainer.accelerator", "cpu", "--policy.init_args.dropout", "0"]
    weights = []
    for kernel in ("fused", "plain"):
        out = tmp_path / kernel
        options = ["--out", str(out), "--policy.init_args.softmax_kernel", kernel]
        result = fresh(*command, *options, TRITON_INTERPRET="1")
        assert result.returncode == 0, result.stderr[-2000:]
        weights.append(torch.load(out / "checkpoints/last.ckpt")["state_dict"])
    refused = fresh(*command, "--out", str(tmp_path / "none"), "--policy.init_args.softmax_kernel", "fused")
    assert refused.returncode == 1
    assert "policy.softmax_kernel" in refused.stderr
    close(*weights, 1e-3)


COMPILE = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from recpo.ops import triton_catalog

capability, dim, precision, dtype, shared = *map(int, sys.argv[1:3]), *sys.argv[3:5], int(sys.argv[5])

class Absent:  # what a driver says of its device
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device: 0
    get_current_target = lambda self: GPUTarget("cuda", capability, 32)

class Compiled:  # compiles a kernel for the arguments it is called with, instead of starting it
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def compile(*arguments, **options):
            used = self.kernel.warmup(*arguments, grid=grid, **options).metadata.shared
            assert used <= shared, f"{used} bytes of shared memory"
            print("compiled")

        return compile

triton.runtime.driver.set_active(Absent())
torch.set_float32_matmul_precision(precision)
tiles_for = triton_catalog.tiles_for
triton_catalog.tiles_for = lambda dim, _, precision: tiles_for(dim, capability // 10, precision)
for name in ("_sum_over_items", "_gradient_of_table", "_gradient_of_states"):
    setattr(triton_catalog, name, Compiled(getattr(triton_catalog, name)))
states, table, weights = torch.randn(150, dim), torch.randn(301, dim).to(getattr(torch, dtype)), torch.randn(150)
sums = triton_catalog.sum_over_catalog(states, table, 1, want_expected_row=True)
triton_catalog.add_softmax_gradient(torch.zeros(301, dim), weights, states, table, 1, sums)
triton_catalog.entropy_gradients(weights, states, table, 1, sums.lse, sums.lse, True, True)
"""


@outside
@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dim", "precision", "dtype", "shared"),
    # shared memory of a block: 64 KiB on Turing, 99 on consumer Ampere, 227 on Hopper
    [(75, 64, "high", "float32", 65_536), (86, 128, "high", "float32", 101_376), (90, 64, "high", "bfloat16", 232_448),
     (90, 128, "high", "float32", 232_448), (90, 128, "highest", "float16", 101_376)],
)  # fmt: skip
def test_compiles_for_devices_that_are_not_here(
    capability: int, dim: int, precision: str, dtype: str, shared: int, tmp_path: Path
) -> None:
    arguments = [str(capability), str(dim), precision, dtype, str(shared)]
    (tmp_path / "compile.py").write_text(COMPILE)
    result = fresh(str(tmp_path / "compile.py"), *arguments, TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("compiled") == 4
