"""The parts of ``benchmarks/gpu.py --all``: generators of the JSON lines that it prints and keeps.

Each takes the device and whether sizes are to be small, so that everything runs on a CPU too. The benchmark runs each
part in a process of its own, which may end at any line.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from torch.optim import AdamW

from recpo.base.contracts import Objective
from recpo.base.feedback import FeedbackDefinition
from recpo.base.types import FeedbackBatch, Histories, Slates
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared
from recpo.objectives import GBPO, Likelihood
from recpo.objectives.advantages import TernaryAdvantage
from recpo.ops.linear_logprob import linear_logprob
from recpo.ops.sharded_logprob import RowShard, sharded_logprob, sharded_lookup
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.serving.bundle import Bundle
from recpo.serving.export import BundleOptions, PolicyFacts, export_bundle
from recpo.serving.histories import EncodedHistories
from recpo.serving.runtimes import Runtime
from recpo.serving.saved_policy import PolicyRuntime
from recpo.sharding.lookup_tables import TableOptions
from recpo.training.inputs import InputBuilder
from recpo.training.networks import Networks
from recpo.training.options import LearningOptions
from recpo.training.planning import StepPlanner
from recpo.verbs.prepare import prepare
from recpo.verbs.simulate import simulate

Line = dict[str, Any]
DIM, HISTORY, REPEATS = 64, 50, 10
#: Of the loss, and of the norm of the gradient's difference relative to its norm.
TOLERANCE = 1e-3


def milliseconds(device: str, run: Callable[[], object], repeats: int = REPEATS) -> float:
    """The median time of a run after two that warm up, until the device is done."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(times[2:]), 4)


def peak_mib(device: str, run: Callable[[], object]) -> float | None:
    """Most memory that a run allocates beyond what there is; None on a CPU."""
    if device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def correctness(device: str, small: bool) -> Iterator[Line]:
    """A step of every objective: loss and gradients on the device against those on the CPU.

    The candidates of rollouts are drawn with the numbers of the device: there, the loss has to be finite.
    """
    from tests.training.single_steps import CASES, Step, policy_of

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        simulate(root / "world", users=80, items=60, events=5000, days=10)
        prepare(str(root / "world" / "log"), root / "prepared")
        policy = policy_of(Prepared.open(root / "prepared").num_items)
        for name in list(CASES)[:: 3 if small else 1]:
            found = []
            for where in ("cpu", device):
                step = Step.of(name, root / "prepared", policy)
                for network in (step.networks.policy, step.networks.reference, step.networks.old, step.networks.critic):
                    if network is not None:
                        network.to(where)
                batch = move_data_to_device(next(iter(step.data.train_dataloader())), torch.device(where))
                loss = step.objective(step.inputs(batch).objective).loss
                loss.backward()
                gradient = torch.cat([one.flatten().cpu() for one in step.gradients().values()])
                found.append((float(loss.detach()), gradient))
            (expected, exact), (loss_here, gradient) = found
            error = float((gradient - exact).norm() / exact.norm().clamp_min(1e-9))
            close = abs(loss_here - expected) <= TOLERANCE * max(1.0, abs(expected)) and error <= TOLERANCE
            is_right = bool(gradient.isfinite().all()) if name.endswith("rollout") else close
            line = {"case": name, "right": is_right, "loss": loss_here, "loss_cpu": expected}
            yield line | {"gradient_error": round(error, 8)}


def training(device: str, small: bool) -> Iterator[Line]:
    """Steps per second of pre-training and of GBPO over the full catalog, in float32 and under bfloat16.

    Of 256 full histories and, for pre-training, of as many as have about 1,024 positions.
    """
    items = 500 if small else 1_000_000
    ternary = {"advantage": TernaryAdvantage()}
    for objective, more, contexts in ((Likelihood(), {}, 20), (Likelihood(), {}, 256), (GBPO(), ternary, 256)):
        torch.manual_seed(0)
        policy = CatalogSoftmaxPolicy(items, dim=DIM, max_history=HISTORY)
        batch = batch_of(items, 8 if small else contexts)
        policy.to(device).train()
        options = LearningOptions(objective=objective, **more)
        planned = move_data_to_device(StepPlanner(policy, options)(batch), torch.device(device))
        inputs = InputBuilder(Networks.of(policy, options), options)
        optimizer = AdamW(policy.parameters(), lr=1e-4, fused=True)
        for dtype in (torch.float32, torch.bfloat16):
            step = partial(_step, device, dtype, objective, inputs, planned, optimizer)
            each = milliseconds(device, step)
            case = f"{type(objective).__name__.lower()}, {str(dtype).removeprefix('torch.')}"
            line = {"case": case, "ms": each, "items": items}
            scored = int(planned.plan.scored.positions.numel())
            yield line | {"steps_per_s": round(1e3 / each, 2), "scored": scored, "peak_mib": peak_mib(device, step)}


def _step(
    device: str,
    dtype: torch.dtype,
    objective: Objective,
    inputs: InputBuilder,
    batch: FeedbackBatch,
    optimizer: AdamW,
) -> None:
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = objective(inputs(batch).objective).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def batch_of(items: int, contexts: int) -> FeedbackBatch:
    """Full histories of random items, every event scored after those before it; each fourth is liked."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, items + 1, (contexts, HISTORY), generator=generator)
    histories = Histories(ids, torch.full((contexts,), HISTORY), ids % 6)
    liked, visible = ids % 4 == 0, torch.arange(HISTORY).expand(contexts, -1).contiguous()
    slates = Slates(ids, visible, torch.ones_like(liked), positive=liked, dislike=ids % 7 == 0)
    return FeedbackBatch(histories, slates, torch.arange(contexts))


def softmax(device: str, small: bool) -> Iterator[Line]:
    """The exact softmax of recpo against torch's own: dense, compiled, and ``linear_cross_entropy`` by its options."""
    items, states = (500, 16) if small else (1_000_000, 1024)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(items + 1, DIM, generator=generator).mul_(DIM**-0.5).to(device).requires_grad_()
    vectors = torch.randn(states, DIM, generator=generator).to(device).requires_grad_()
    targets = torch.randint(1, items + 1, (states,), generator=generator).to(device)

    def dense(vectors: Tensor, table: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(vectors @ table[1:].T, targets - 1, reduction="sum")

    contenders: dict[str, Callable[..., Tensor]] = {
        "recpo": lambda *given: -linear_logprob(*given).sum(),
        "dense": dense,
    }
    if hasattr(F, "linear_cross_entropy"):
        fused = partial(F.linear_cross_entropy, reduction="sum")
        contenders["torch.linear_cross_entropy"] = lambda h, rows, to: fused(h, rows[1:], to - 1)
        if hasattr(torch.nn, "LinearCrossEntropyOptions"):
            chunks = torch.nn.LinearCrossEntropyOptions()
            contenders["torch.linear_cross_entropy, chunks"] = lambda h, rows, to: fused(
                h, rows[1:], to - 1, options=chunks
            )
    if device == "cuda":
        contenders["dense, compiled"] = torch.compile(dense)
    exact = None
    for name, loss_of in contenders.items():

        def gradients(loss_of: Callable[..., Tensor] = loss_of) -> tuple[Tensor, ...]:
            return torch.autograd.grad(loss_of(vectors, table, targets), (vectors, table))

        try:
            of_states = gradients()[0]
            exact = of_states if exact is None else exact
            error = float((of_states - exact).norm() / exact.norm())
            line = {"case": name, "items": items, "states": states, "ms": milliseconds(device, gradients)}
            yield line | {"peak_mib": peak_mib(device, gradients), "difference": round(error, 8)}
        except (RuntimeError, TypeError, ValueError) as fault:  # out of memory, or an option that this torch lacks
            yield {"case": name, "failed": f"{type(fault).__name__}: {str(fault).splitlines()[0][:200]}"}


def sharded(device: str, small: bool) -> Iterator[Line]:
    """The softmax and the lookups of sharded tables, with the collectives of one rank, against the whole table."""
    items, states = (500, 16) if small else (1_000_000, 1024)
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=store, rank=0, world_size=1)
        table = torch.randn(items + 1, DIM, device=device).mul_(DIM**-0.5).requires_grad_()
        vectors = torch.randn(states, DIM, device=device, requires_grad=True)
        targets = torch.randint(1, items + 1, (states,), device=device)
        shard = RowShard(table, 0, items + 1)
        runs: dict[str, Callable[[], Tensor]] = {
            "softmax, whole": lambda: linear_logprob(vectors, table, targets),
            "softmax, sharded": lambda: sharded_logprob(vectors, shard, targets),
            "lookup, whole": lambda: F.embedding(targets, table),
            "lookup, sharded": lambda: sharded_lookup(targets, shard),
        }
        values: dict[str, Tensor] = {}
        for name, run in runs.items():

            def step(run: Callable[[], Tensor] = run) -> None:
                run().sum().backward()
                table.grad = vectors.grad = None

            values[name] = run().detach()
            whole = values[name.partition(",")[0] + ", whole"]
            line = {"case": name, "items": items, "ms": milliseconds(device, step)}
            yield line | {"difference": float((values[name] - whole).abs().max()), "backend": dist.get_backend()}
        dist.destroy_process_group()


def rows(device: str, small: bool) -> Iterator[Line]:
    """Lookups and updates of 10^8 rows, or of as many as fit in half of the memory."""
    count, lookups = (10_000, 100) if small else (100_000_000, 1 << 18)
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        count = min(count, free // 2 // (4 * DIM))
    weight = torch.empty(count, DIM, device=device)
    for part in weight.split(1 << 20):
        part.normal_(std=0.02)
    ids = torch.randint(1, count, (lookups,), device=device).unique()
    gradient = torch.randn(len(ids), DIM, device=device)
    runs = {"lookup": lambda: F.embedding(ids, weight)}
    for options in (TableOptions("sgd"), TableOptions("rowwise_adagrad")):
        state = options.empty_state(weight)
        runs[options.optimizer] = partial(options.update, weight, state, ids, gradient, 1e-3, 1)
    for name, run in runs.items():
        each = milliseconds(device, run)
        line = {"case": name, "rows": count, "gib": round(weight.nbytes / 2**30, 2), "ms": each}
        yield line | {"million_rows_per_s": round(len(ids) / each / 1e3, 2)}


def serving(device: str, small: bool) -> Iterator[Line]:
    """An export of a policy on the device; lists by the policy there, and by the program in ONNX Runtime."""
    items, users, k = (500, 8, 5) if small else (100_000, 256, 50)
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(items, dim=DIM, max_history=HISTORY).to(device).eval()
    generator = np.random.default_rng(0)
    ids = generator.integers(1, items + 1, (users, HISTORY))
    inputs = EncodedHistories(ids, ids % 3, np.zeros((users, 1), np.int64))
    with tempfile.TemporaryDirectory() as folder:
        start, out = time.perf_counter(), Path(folder) / "bundle"
        facts = PolicyFacts(FeedbackDefinition(cutoffs={3: tuple(np.linspace(0.5, 7.5, 15))}))
        export_bundle(policy, IdMap(pa.array(range(items))), facts, out, BundleOptions(k=k))
        yield {"case": "export", "items": items, "seconds": round(time.perf_counter() - start, 2)}
        runtimes: dict[str, Runtime] = {
            f"torch, {device}": PolicyRuntime(policy),
            "onnx, cpu": Bundle.open(out).runtime,
        }
        first = None
        for name, runtime in runtimes.items():
            lists = runtime.recommend(inputs, k)[0]
            first = lists if first is None else first
            each = milliseconds(device, partial(runtime.recommend, inputs, k))
            line = {"case": f"{users} lists, {name}", "items": items, "ms": each}
            yield line | {"users_per_s": round(1e3 * users / each), "same_items": float((lists == first).mean())}


#: Parts in their order, and the seconds that each may take; ``shares`` is ``gpu.py`` itself.
BUDGETS = {
    "correctness": 100, "shares": 70, "training": 50, "softmax": 60, "sharded": 40, "rows": 40, "serving": 90,
}  # fmt: skip
PARTS = {
    "correctness": correctness, "training": training, "softmax": softmax, "sharded": sharded, "rows": rows,
    "serving": serving,
}  # fmt: skip
