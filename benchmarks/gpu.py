"""Share of a GPU's memory bandwidth and peak matrix throughput that the parts of a training step reach.

Bytes and floating-point operations are those that a part cannot do without, by formula: every operand is read once and
every result written once, whatever is made again or moved twice, so that a share is one of the useful work. The peaks
are measured in the same run, by a large copy and large matrix products; where the data sheet of the device is known,
its numbers stand beside them. Times are by CUDA events, medians of ``--repeats`` after two that warm up. Prints one
JSON line per part; the greater of its two shares is what bounds it. ``peak_mib`` is the memory that a part allocates
beside its inputs.

    python benchmarks/gpu.py            # V = 1,000,000, d = 64
    python benchmarks/gpu.py --quick    # V = 20,000
    python benchmarks/gpu.py --all      # and everything else that only a GPU can tell, within eight minutes

``--all`` runs these parts in order, each in a process of its own and within its seconds: every objective against the
CPU; the shares above; steps per second; the catalog softmax against torch's ``linear_cross_entropy``; sharded tables
over NCCL; 10^8 rows; export and serving (``gpu_parts.py``). Each line is added to ``--out`` at once, and each part ends
with a line of its ``status``: a part that fails or takes too long leaves what it has, and the next one begins.
``--device cpu --small`` tries all of it without a GPU, at sizes that say nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from recpo.artifacts.semantic_codes import Codes
from recpo.base.types import Histories
from recpo.ops.linear_logprob import linear_entropy, linear_logprob
from recpo.policies.catalog_search import top_k
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.item_table import ItemTable
from recpo.policies.semantic_id import SemanticIdPolicy
from recpo.sharding.lookup_tables import TableOptions
from recpo.sharding.memory import TableOptimizerName

Line = dict[str, object]
FLOAT, CODEBOOKS, LAYERS, HISTORY = 4, (256, 256, 256), 2, 50


class Sheet(NamedTuple):
    """The manufacturer's numbers of a device, without sparsity."""

    bytes_per_s: float
    float32_flops: float
    bfloat16_flops: float


#: by a part of the device's name, the first that fits
SHEETS = {
    "H200": Sheet(4.8e12, 67e12, 989e12),
    "H100 PCIe": Sheet(2.0e12, 51e12, 756e12),
    "H100": Sheet(3.35e12, 67e12, 989e12),
    "A100-SXM4-80GB": Sheet(2.039e12, 19.5e12, 312e12),
    "A100": Sheet(1.555e12, 19.5e12, 312e12),
    "L40S": Sheet(0.864e12, 91.6e12, 362e12),
    "L4": Sheet(0.3e12, 30.3e12, 121e12),
    "A10": Sheet(0.6e12, 31.2e12, 125e12),
    "T4": Sheet(0.32e12, 8.1e12, 0.0),
    "V100": Sheet(0.9e12, 15.7e12, 0.0),
}


class Part(NamedTuple):
    """A part of a step.

    Attributes:
        name: of the part.
        run: does it once.
        moved: bytes read and written.
        operations: a multiplication with an addition is two.
        precision: of its matrix products.
    """

    name: str
    run: Callable[[], object]
    moved: float
    operations: float
    precision: str = "float32"


def milliseconds(run: Callable[[], object], repeats: int, device: str = "cuda") -> list[float]:
    """How long the GPU takes, by events on its stream; a CPU by its clock."""
    times = []
    for _ in range(repeats + 2):
        if device == "cpu":
            begin = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begin))
            continue
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return times[2:]


def peak_mib(run: Callable[[], object], device: str = "cuda") -> float | None:
    """Most memory that a run allocates beyond what is allocated already; None on a CPU."""
    if device == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def peaks(device: str, size: int, count: int) -> list[Part]:
    """A copy of ``count`` floats, and products of square matrices of ``size``."""
    source, target = torch.randn(count, device=device), torch.empty(count, device=device)
    parts = [Part("copy", lambda: target.copy_(source), 2 * FLOAT * count, 0.0)]
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        made = torch.empty_like(left)
        name = str(dtype).removeprefix("torch.")

        def product(left: Tensor = left, right: Tensor = right, made: Tensor = made) -> Tensor:
            return torch.matmul(left, right, out=made)

        parts.append(Part(f"product, {name}", product, 3 * left.element_size() * size**2, 2.0 * size**3, name))
    return parts


def softmax_operations(states: float, items: float, dim: int) -> float:
    """Of one product of states and the vectors of all items."""
    return 2 * states * items * dim


def encoder_operations(events: float, dim: int) -> float:
    """Of a forward pass of SASRec: ``24 d²`` per event and layer, and ``4 H d`` for attention."""
    return events * LAYERS * (24 * dim**2 + 4 * HISTORY * dim)


def decoder_operations(items: float, dim: int, codebooks: tuple[int, ...]) -> float:
    """Of a forward pass: per item ``T layers (28 d² + 4 d (H + 1 + T))``, and ``2 d K`` for every code."""
    tokens = len(codebooks)
    return items * (tokens * LAYERS * (28 * dim**2 + 4 * dim * (HISTORY + 1 + tokens)) + 2 * dim * sum(codebooks))


def catalog_parts(device: str, items: int, dim: int, states: int, k: int) -> list[Part]:
    """The exact softmax over the catalog and its entropy, forward and backward, and search in it."""
    table = torch.randn(items + 1, dim, device=device).mul_(dim**-0.5).requires_grad_()
    vectors = torch.randn(states, dim, device=device, requires_grad=True)
    targets = torch.randint(1, items + 1, (states,), device=device)
    of_table, of_states = FLOAT * items * dim, FLOAT * states * dim
    once = softmax_operations(states, items, dim)

    def gradients(of_entropy: bool) -> None:
        value = linear_entropy(vectors, table) if of_entropy else linear_logprob(vectors, table, targets)
        torch.autograd.grad(value.sum(), (vectors, table))

    parts = [Part("softmax, top k", lambda: top_k(vectors, table, k, None), of_table + of_states, once)]
    # logits, gradients of the states, gradients of the table; the table is read forward and backward
    moved, operations = 3 * of_table + 3 * of_states, 3 * once
    for what, of_entropy in (("softmax", False), ("entropy", True)):
        parts.append(Part(f"{what}, forward and backward", partial(gradients, of_entropy), moved, operations))
    return parts


def table_parts(device: str, items: int, dim: int, lookups: int) -> list[Part]:
    """Looking rows up, and moving them by each table optimizer."""
    table = ItemTable(items, dim).to(device)
    ids = torch.randperm(items, device=device)[:lookups] + 1
    rows, gradient = ids.sort().values, torch.randn(len(ids), dim, device=device)
    weight, of_rows = table.weight.detach(), FLOAT * len(ids) * dim

    def looked_up() -> Tensor:
        with torch.no_grad():
            return table(ids)

    def by(optimizer: TableOptimizerName) -> Callable[[], None]:
        options = TableOptions(optimizer)
        return partial(options.update, weight, options.empty_state(weight), rows, gradient, 1e-3, 1)

    return [
        Part("lookup", looked_up, 2 * of_rows + 8 * len(ids), 0.0),
        Part("sgd", by("sgd"), 3 * of_rows + 8 * len(ids), 0.0),
        Part("rowwise_adagrad", by("rowwise_adagrad"), 3 * of_rows + (8 + 2 * FLOAT) * len(ids), 0.0),
        Part("adam", by("adam"), 7 * of_rows + 8 * len(ids), 0.0),
    ]


def codes_of(items: int) -> Codes:
    """Different random tuples."""
    keys = np.random.default_rng(0).choice(np.prod(CODEBOOKS), items, replace=False)
    return Codes(np.stack(np.unravel_index(keys, CODEBOOKS), 1), CODEBOOKS, "synthetic")


def decoding_parts(device: str, items: int, dim: int, contexts: int, k: int) -> list[Part]:
    """Lists of ``k`` items: by beam search in the trie, and by scoring the whole catalog."""
    with tempfile.TemporaryDirectory() as folder:
        codes_of(items).save(Path(folder), pa.array(range(items)), {})
        semantic = SemanticIdPolicy(items, codes=Path(folder), dim=dim, id_vectors=False, beam_width=k)
    softmax = CatalogSoftmaxPolicy(items, dim=dim)
    ids = torch.randint(1, items + 1, (contexts, HISTORY), device=device)
    histories = Histories(ids, torch.full((contexts,), HISTORY, device=device), ids % 6)
    encoder = encoder_operations(contexts * HISTORY, dim)
    # the first code of a context is predicted once, the others for every prefix of the beam
    beams = decoder_operations(contexts * k, dim, CODEBOOKS[1:])
    beams += decoder_operations(contexts, dim, CODEBOOKS[:1])
    scores = softmax_operations(contexts, items, dim)
    parts = []
    for name, policy, operations in (("beam search", semantic, beams), ("all items", softmax, scores)):
        policy.to(device).eval()
        read = FLOAT * sum(parameter.numel() for parameter in policy.parameters())

        def recommend(policy: SemanticIdPolicy | CatalogSoftmaxPolicy = policy) -> object:
            with torch.no_grad():
                return policy.recommend(histories, k)

        parts.append(Part(f"{contexts} lists of {k}, {name}", recommend, read, encoder + operations))
    return parts


def sheet_of(device: str) -> Sheet | None:
    """The data sheet of the device, if it is known."""
    name = torch.cuda.get_device_name(device)
    return next((sheet for part, sheet in SHEETS.items() if part in name), None)


def line_of(part: Part, times: list[float], measured: dict[str, float], sheet: Sheet | None) -> dict[str, object]:
    """What is printed: the work per second, and its shares of the peaks by name."""
    seconds = statistics.median(times) / 1e3
    bandwidth, rate = part.moved / seconds, part.operations / seconds
    line: dict[str, object] = {"part": part.name, "precision": part.precision, "ms": round(1e3 * seconds, 4)}
    line |= {"ms_min": round(min(times), 4), "ms_max": round(max(times), 4)}
    line |= {"gb_per_s": round(bandwidth / 1e9, 1), "tflops": round(rate / 1e12, 3)}
    shares = {"bandwidth": bandwidth / measured["copy"]} if "copy" in measured else {}
    if part.precision in measured:
        shares["product"] = rate / measured[part.precision]
    if sheet is not None:
        shares["sheet_bandwidth"] = bandwidth / sheet.bytes_per_s
        flops = sheet.float32_flops if part.precision == "float32" else sheet.bfloat16_flops
        shares |= {"sheet_product": rate / flops} if flops else {}
    return line | {f"share_of_{name}": round(share, 4) for name, share in shares.items()}


def shares(device: str, items: int, dim: int, repeats: int, *, quick: bool, small: bool = False) -> Iterator[Line]:
    """The lines of all parts of a step."""
    on_gpu = device == "cuda"
    torch.manual_seed(0)
    measured: dict[str, float] = {}
    sheet, name = (sheet_of(device), torch.cuda.get_device_name(device)) if on_gpu else (None, "cpu")
    about = {"device": name, "items": items, "dim": dim, "torch": torch.__version__}
    side, count, states, contexts = 8192, 1 << 29, 1024, 64
    if quick or small:
        side, count = (64, 1 << 10) if small else (2048, 1 << 24)
        states, contexts = (16, 4) if small else (states, contexts)
    makers: list[Callable[[], list[Part]]] = [
        lambda: peaks(device, side, count),
        lambda: catalog_parts(device, items, dim, states, 50),
        lambda: table_parts(device, items, dim, min(items, 1 << 18)),
        lambda: decoding_parts(device, items, dim, contexts, 50),
    ]
    for make in makers:
        for part in make():
            times, peak = milliseconds(part.run, repeats, device), peak_mib(part.run, device)
            if make is makers[0]:
                work = part.moved if part.name == "copy" else part.operations
                measured["copy" if part.name == "copy" else part.precision] = work / statistics.median(times) * 1e3
            yield line_of(part, times, measured, sheet) | {"peak_mib": peak} | about
        if on_gpu:
            torch.cuda.empty_cache()


def everything(device: str, *, small: bool, seconds: float, out: Path) -> int:
    """Runs all parts, each in a process, and keeps their lines; the number of parts that did not end well."""
    from gpu_parts import BUDGETS

    deadline, ended_badly = time.monotonic() + seconds, 0
    root = Path(__file__).resolve().parents[1]
    paths = [str(root), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    with out.open("w", encoding="utf-8") as file:

        def keep(line: dict[str, object]) -> None:
            text = json.dumps(line)
            print(text, flush=True)
            file.write(text + "\n")
            file.flush()

        for name, budget in BUDGETS.items():
            limit = min(budget, deadline - time.monotonic())
            begin, status, failure = time.monotonic(), "skipped", ""
            if limit > 0:
                command = [sys.executable, __file__, "--part", name, "--device", device, *["--small"] * small]
                with tempfile.TemporaryFile("w+") as errors:
                    process = subprocess.Popen(
                        command, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=errors, text=True
                    )
                    timer = threading.Timer(limit, process.kill)
                    timer.start()
                    for text in process.stdout or ():
                        if text.startswith("{"):
                            keep({"of": name} | json.loads(text))
                    code = process.wait()
                    in_time = timer.is_alive()
                    timer.cancel()
                    errors.seek(0)
                    failure = errors.read()[-1000:] if code else ""
                status = "done" if not code else "failed" if in_time else "out of time"
            ended_badly += status != "done"
            spent = {"seconds": round(time.monotonic() - begin, 1), "budget_s": budget}
            keep({"of": name, "status": status} | spent | ({"error": failure} if status == "failed" else {}))
    return ended_badly


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="V = 20,000")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--all", action="store_true", help="everything that only a GPU can tell")
    parser.add_argument("--part", help="one part of --all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes of a trial")
    parser.add_argument("--seconds", type=float, default=460, help="of --all together")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="where --all keeps its lines")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a CUDA device, and torch sees none: see `recpo doctor`")
    if args.all:
        sys.exit(everything(args.device, small=args.small, seconds=args.seconds, out=args.out.resolve()) > 0)
    if args.part in (None, "shares"):
        items, repeats = 20_000 if args.quick else args.items, args.repeats
        items, repeats = (500, 2) if args.small else (items, repeats)
        lines = shares(args.device, items, args.dim, repeats, quick=args.quick, small=args.small)
    else:
        from gpu_parts import PARTS

        lines = PARTS[args.part](args.device, args.small)
    for line in lines:
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
