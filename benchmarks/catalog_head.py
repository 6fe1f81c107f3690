"""Exact preference updates over a large catalog: time, memory and gradient error of the softmax head.

One update (forward and backward, no optimizer) of GBPO over 1,024 logged items of which 277 have an advantage, and of
softmax-DPO over 64 lists of one chosen and 20 rejected items, at V = 1,000,000, d = 64, float32, one thread. Every
contender runs in a process of its own, so that its peak resident size (torch included) is its own; the error is the
relative norm of the difference from the gradient in float64. Prints one JSON line per contender.

    python benchmarks/catalog_head.py            # the full size; the dense contender takes 12 GiB
    python benchmarks/catalog_head.py --quick    # V = 2,000
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from recpo.objectives.grpo import gbpo_loss
from recpo.objectives.listwise_dpo import softmax_dpo_loss
from recpo.ops.linear_logprob import linear_logprob

ROWS, INFORMATIVE, LISTS, REJECTED = 1024, 277, 64, 20


class Problem(NamedTuple):
    """One update: the loss of the log-probabilities of ``targets [N, K]``; ``relevant [N]`` has a gradient at all."""

    states: Tensor
    table: Tensor
    targets: Tensor
    relevant: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


def gbpo_problem(items: int, dim: int) -> Problem:
    """1,024 logged items: 256 watched to the end, 21 disliked, the others neutral."""
    advantages = torch.zeros(ROWS)
    informative = torch.randperm(ROWS)[:INFORMATIVE]
    advantages[informative] = 1.0
    advantages[informative[:21]] = -1.0

    def loss(logp: Tensor, rows: Tensor) -> Tensor:
        return gbpo_loss(logp, advantages[rows].to(logp.dtype)).sum() / ROWS

    return Problem(*_head(ROWS, items, dim), torch.randint(1, items + 1, (ROWS, 1)), advantages != 0, loss)


def dpo_problem(items: int, dim: int) -> Problem:
    """64 lists of one chosen and 20 rejected items."""
    reference = torch.randn(LISTS, 1 + REJECTED) * 0.1 - 14.0

    def loss(logp: Tensor, rows: Tensor) -> Tensor:
        anchor = reference[rows].to(logp.dtype)
        return softmax_dpo_loss(logp[:, 0], logp[:, 1:], anchor[:, 0], anchor[:, 1:]).mean()

    targets = torch.randint(1, items + 1, (LISTS, 1 + REJECTED))
    return Problem(*_head(LISTS, items, dim), targets, torch.ones(LISTS, dtype=torch.bool), loss)


def _head(rows: int, items: int, dim: int) -> tuple[Tensor, Tensor]:
    table = torch.empty(items + 1, dim).normal_(std=dim**-0.5)
    return torch.randn(rows, dim).requires_grad_(), table.requires_grad_()


def dense(problem: Problem, rows: Tensor) -> Tensor:
    """The usual code: a log-softmax over all logits."""
    logits = problem.states[rows] @ problem.table[1:].T
    return problem.loss(logits.log_softmax(-1).gather(1, problem.targets[rows] - 1), rows)


def chunked(problem: Problem, rows: Tensor) -> Tensor:
    """Recpo's head, which makes the softmax again in the backward pass."""
    return problem.loss(linear_logprob(problem.states[rows], problem.table, problem.targets[rows]), rows)


def everything(problem: Problem) -> Tensor:
    """All rows."""
    return torch.arange(len(problem.targets))


def informative(problem: Problem) -> Tensor:
    """Only the rows with a gradient."""
    return problem.relevant.nonzero().squeeze(1)


CONTENDERS = {
    "gbpo: dense, all rows": (gbpo_problem, dense, everything),
    "gbpo: dense, rows with A != 0": (gbpo_problem, dense, informative),
    "gbpo: chunked, all rows": (gbpo_problem, chunked, everything),
    "gbpo: recpo (chunked, rows with A != 0)": (gbpo_problem, chunked, informative),
    "softmax-dpo: dense": (dpo_problem, dense, everything),
    "softmax-dpo: recpo": (dpo_problem, chunked, everything),
}


def reference_gradients(problem: Problem, block: int = 50_000) -> tuple[Tensor, Tensor]:
    """Gradients in float64 in the states and the table, by explicit loops over blocks of items."""
    rows = informative(problem)
    states, targets = problem.states.detach()[rows].double(), problem.targets[rows]
    table = problem.table.detach()
    blocks = [(start, table[start : start + block].double()) for start in range(1, len(table), block)]
    lse = torch.stack([(states @ items.T).logsumexp(1) for _, items in blocks]).logsumexp(0)
    logp = (states[:, None] * table[targets].double()).sum(-1) - lse[:, None]
    logp.requires_grad_()
    (weights,) = torch.autograd.grad(problem.loss(logp, rows), logp)
    grad_table = torch.zeros(len(table), table.shape[1], dtype=torch.float64)
    of_rows = (weights[..., None] * table[targets].double()).sum(1)
    for start, items in blocks:
        softmax = (states @ items.T - lse[:, None]).exp() * weights.sum(1, keepdim=True)
        of_rows -= softmax @ items
        grad_table[start : start + block] -= softmax.T @ states
    grad_table.index_add_(0, targets.reshape(-1), (weights[..., None] * states[:, None]).reshape(-1, states.shape[1]))
    grad_states = torch.zeros(len(problem.targets), states.shape[1], dtype=torch.float64)
    grad_states[rows] = of_rows
    return grad_states, grad_table


def measure(name: str, items: int, dim: int, repeats: int, threads: int) -> dict[str, object]:
    """Runs one contender in this process."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    make, head, select = CONTENDERS[name]
    problem = make(items, dim)
    rows = select(problem)
    seconds = []
    for _ in range(repeats):
        problem.states.grad = problem.table.grad = None
        start = time.process_time()
        head(problem, rows).backward()
        seconds.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    errors = {
        f"relative_error_{part}": float(f"{float((got.double() - exact).norm() / exact.norm()):.2e}")
        for part, got, exact in zip(
            ("states", "table"), (problem.states.grad, problem.table.grad), reference_gradients(problem), strict=True
        )
        if got is not None
    }
    times = {"cpu_s": statistics.median(seconds), "cpu_s_min": min(seconds), "cpu_s_max": max(seconds)}
    return {
        "contender": name, "items": items, "dim": dim, "rows": len(rows), "threads": threads,
        **{key: round(value, 4) for key, value in times.items()}, "peak_rss_mib": round(peak), **errors,
        "torch": torch.__version__,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="V = 2,000")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="contenders whose name contains this")
    parser.add_argument("--contender", choices=list(CONTENDERS), help="measure this one in this process")
    args = parser.parse_args()
    items = 2_000 if args.quick else args.items
    if args.contender:
        print(json.dumps(measure(args.contender, items, args.dim, args.repeats, args.threads)))
        return
    options = [f"--{key}={getattr(args, key)}" for key in ("dim", "repeats", "threads")]
    for name in CONTENDERS:
        if args.only in name:
            command = [sys.executable, __file__, f"--contender={name}", f"--items={items}", *options]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            failure = {"contender": name, "items": items, "failed": f"exit status {result.returncode}"}
            print(result.stdout.strip() if result.returncode == 0 else json.dumps(failure), flush=True)


if __name__ == "__main__":
    main()
