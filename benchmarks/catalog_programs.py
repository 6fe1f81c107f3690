"""Serving programs over a large catalog: time and memory of one search, compared with the plain program in one run.

The catalog is made up: clusters of items, some tight and some wide, and an untrained encoder; ``--run`` takes a trained
policy instead. Every form is exported and opened in a process of its own, one thread. Prints a JSON line for each form:

- ``cpu_ms``, ``wall_ms`` by the number of users in a call; smallest of several. Processor time says more where others
  use the machine as well.
- ``read_cpu_ms``: a plain read of as many bytes as the item matrix has in float32, in the same process just after:
  ``times_read`` is the search of one user divided by it.
- ``load_mb``, ``search_mb``: resident memory that loading adds, and the most that a call with 32 users adds to it.
- ``file_mb``: of what the form needs on disk; ``overlap_10``, ``recall_10``: from the manifest.
- ``refused``: what an export said that found its program too far from the policy: it ends there.

    python benchmarks/catalog_programs.py                     10^5 and 10^6 items; some ten minutes
    python benchmarks/catalog_programs.py --run runs/mpo      a trained policy
    python benchmarks/catalog_programs.py --items 10000 100000 --forms plain blocks torch compiled
                                                              ONNX Runtime, the torch engine, AOTInductor
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from recpo.base.errors import RecpoError
from recpo.base.feedback import HIGHEST

DIM, HISTORY, K = 64, 50, 100
FORMS = ("plain", "blocks", "float16", "int8", "index")
FILES = ("model.onnx", "model.onnx.data", "index.faiss", "vectors.npy")
COMPILED = "compiled.pt2"  # beside the bundle


def make_policy(items: int) -> tuple[Any, dict[str, Any]]:
    """An untrained policy whose items lie in clusters."""
    import torch

    from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy

    torch.manual_seed(0)
    options = {"dim": DIM, "max_history": HISTORY}
    policy = CatalogSoftmaxPolicy(items, **options).eval()
    with torch.no_grad():
        centers = torch.randn(max(8, items // 500), DIM)
        cluster = torch.randint(len(centers), (items,))
        spread = torch.rand(len(centers))[cluster, None]
        policy.item_table.weight[1:] = (centers[cluster] + spread * torch.randn(items, DIM)) * 0.3
    return policy, options


def export(policy: Any, options: dict[str, Any], form: str, out: Path) -> None:
    """The policy in one of the forms; only what the form needs, without the torch engine."""
    import pyarrow as pa

    from recpo.base.feedback import FeedbackDefinition
    from recpo.log.id_map import IdMap
    from recpo.serving import export as exporting
    from recpo.serving.program import ranker_of
    from recpo.serving.runtimes import IndexOptions

    exporting.ranker_of = (lambda policy, precision: policy) if form == "plain" else ranker_of
    arguments: dict[str, Any] = {"item_precision": form} if form in ("float16", "int8") else {}
    arguments |= {"index": IndexOptions()} if form == "index" else {}
    items = IdMap(pa.array(np.arange(policy.num_items, dtype=np.int64)))
    facts = exporting.PolicyFacts(FeedbackDefinition(), options=options if form in ("torch", "compiled") else None)
    exporting.export_bundle(policy, items, facts, out, exporting.BundleOptions(k=K, **arguments))
    if form == "compiled":
        from recpo.serving.export import write_compiled

        write_compiled(out, out.parent / COMPILED)


def resident_mb(field: str = "VmRSS") -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return float("nan")


def smallest(call: Any, repeats: int) -> tuple[float, float]:
    """Processor and wall milliseconds."""
    call()
    found = []
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        call()
        found.append((time.process_time() - cpu, time.perf_counter() - wall))
    return tuple(round(min(column) * 1000, 2) for column in zip(*found, strict=True))  # type: ignore[return-value]


def measure(root: Path, form: str, repeats: int) -> dict[str, Any]:
    """In a process of its own, whose memory is the program's alone."""
    from recpo.serving.bundle import load_runtime
    from recpo.serving.histories import EncodedHistories
    from recpo.serving.manifest import BundleManifest

    manifest = BundleManifest.open(root)
    before = resident_mb()
    if form == "compiled":
        from recpo.serving.export import load_compiled

        runtime = load_compiled(root, root.parent / COMPILED).runtime
    else:
        runtime = load_runtime(root, manifest, "torch" if form == "torch" else "onnx", threads=1)
    generator, found = np.random.default_rng(0), {"form": form, "items": manifest.num_items}
    found["load_mb"] = round(resident_mb() - before)
    for users in (1, 32):
        shape = (users, manifest.max_history)
        ids = generator.integers(1, manifest.num_items + 1, shape)
        inputs = EncodedHistories(ids, generator.integers(1, HIGHEST + 1, shape), ids[:, :3] * 0)
        at_rest = resident_mb()
        cpu, wall = smallest(lambda inputs=inputs: runtime.recommend(inputs, 10), repeats)
        found |= {f"cpu_ms_{users}": cpu, f"wall_ms_{users}": wall}
    found["search_mb"] = round(resident_mb("VmHWM") - at_rest)
    table = np.ones(manifest.num_items * DIM // 2, np.int64)  # as many bytes
    cpu, wall = smallest(lambda: table.max(), repeats)
    found |= {"read_cpu_ms": cpu, "read_wall_ms": wall, "times_read": round(found["cpu_ms_1"] / cpu, 2)}
    found["file_mb"] = round(sum((root / name).stat().st_size for name in FILES if (root / name).exists()) / 2**20, 1)
    found |= (
        {key: manifest.agreement[key] for key in ("overlap_10", "largest_difference")} if manifest.agreement else {}
    )
    return found | (dict(manifest.index) if manifest.index else {})


def measure_search(items: int, precision: str, repeats: int) -> dict[str, Any]:
    """The search alone, of random states in a random table, in ONNX Runtime."""
    import onnxruntime
    import torch

    from recpo.policies.catalog_search import BlockedTable

    torch.manual_seed(0)
    table = BlockedTable(torch.randn(items + 1, DIM) * 0.3, precision)

    class Search(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, states: torch.Tensor, exclude: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            top = self.table.top_k(states, K, exclude)
            return top.item_ids, top.scores

    users, width = torch.export.Dim("users", min=1), torch.export.Dim("exclude", min=1)
    example = torch.randn(2, DIM), torch.randint(items, (2, 53))
    exported = torch.export.export(Search(), example, dynamic_shapes=({0: users}, {0: users, 1: width}))
    program = torch.onnx.export(exported, input_names=["states", "exclude"], dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)
    found: dict[str, Any] = {"form": f"search {precision}", "items": items}
    for users_ in (1, 32):
        given = {"states": torch.randn(users_, DIM).numpy(), "exclude": torch.randint(items, (users_, 53)).numpy()}
        cpu, wall = smallest(lambda given=given: session.run(None, given), repeats)
        found |= {f"cpu_ms_{users_}": cpu, f"wall_ms_{users_}": wall}
    plain = np.ones(items * DIM // 2, np.int64)
    found["read_cpu_ms"] = smallest(lambda: plain.max(), repeats)[0]
    return found | {"times_read": round(found["cpu_ms_1"] / found["read_cpu_ms"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--items", type=int, nargs="*")
    parser.add_argument("--run", type=Path, help="a trained policy instead of a made-up one")
    parser.add_argument("--forms", nargs="*", default=FORMS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--search", action="store_true", help="the search alone, without policy, bundle and checks")
    parser.add_argument("--bundle", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bundle:
        print(json.dumps(measure(arguments.bundle, arguments.forms[0], arguments.repeats)))
        return
    sizes = arguments.items or ([10_000] if arguments.quick else [100_000, 1_000_000])
    for items in sizes if arguments.search else ():
        for precision in ("float32", "float16", "int8"):
            print(json.dumps(measure_search(items, precision, arguments.repeats)), flush=True)
    sizes = [] if arguments.search else [0] if arguments.run else sizes
    for items in sizes:
        if arguments.run:
            from recpo.training.run import Run

            policy, options = Run.open(arguments.run).policy(), {}
        else:
            policy, options = make_policy(items)
        for form in arguments.forms:
            with tempfile.TemporaryDirectory() as work:
                begun = time.process_time()
                try:
                    export(policy, options, form, Path(work) / "bundle")
                except RecpoError as error:
                    print(json.dumps({"form": form, "items": policy.num_items, "refused": str(error)}), flush=True)
                    continue
                seconds = round(time.process_time() - begun, 1)
                flags = ["--bundle", f"{work}/bundle", "--forms", form, "--repeats", str(arguments.repeats)]
                child = subprocess.run([sys.executable, __file__, *flags], capture_output=True, text=True, check=True)
                print(json.dumps({**json.loads(child.stdout), "export_cpu_s": seconds}), flush=True)


if __name__ == "__main__":
    main()
