"""Cost of a list as the catalog grows: beam search inside a trie against scoring every item.

The 50 best items for 64 histories of 50 events, d = 64, two encoder and two decoder layers, codes of 3 levels of 256,
one thread, over catalogs of 10^4 to 10^7 items with random different codes. Contenders:

    recpo        ``SemanticIdPolicy.recommend``: beam search of width 50 in the flat trie
    dictionary   the same search with the trie as Python dictionaries
    softmax      ``CatalogSoftmaxPolicy.recommend``: blockwise top-k over the item table

Every contender runs in a process of its own, so that its peak resident size (torch included) is its own;
``mask_cpu_ms`` and ``child_cpu_ms`` are the parts of the time spent in masks and child look-ups, ``output_mb`` is what
grows with the catalog: the trie (of the dictionaries: the resident memory that building them took) or the item table.
The first two must give the same ``lists``. Prints one JSON line per contender and size, with ``times_recpo`` = its CPU
time over recpo's.

    python benchmarks/decoding.py            # 10^7 items take 4 GiB
    python benchmarks/decoding.py --quick
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from recpo.artifacts.semantic_codes import Codes
from recpo.base.types import Histories
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.semantic_id import SemanticIdPolicy
from recpo.policies.semantic_search import Trie
from recpo.training.callbacks import tune_allocator

BATCH, HISTORY, K = 64, 50, 50
CONTENDERS = ("recpo", "dictionary", "softmax")
SIZES = (256, 256, 256)


def random_codes(items: int) -> Tensor:
    """Different random tuples, ``[items, 3]``, in random order."""
    rng = np.random.default_rng(0)
    keys = rng.choice(np.prod(SIZES), items, replace=False, shuffle=True)
    return torch.from_numpy(np.stack(np.unravel_index(keys, SIZES), 1))


class DictionaryTrie(nn.Module):
    """The trie as nested dictionaries, walked prefix by prefix; nodes are numbered as the search meets them."""

    def __init__(self, codes: Tensor, codebook_sizes: Sequence[int]) -> None:
        super().__init__()
        self.codebook_sizes, self.depth, self.num_items = tuple(codebook_sizes), len(codebook_sizes), len(codes)
        self._codes, self.device = codes, torch.device("cpu")
        self.level_sizes = [1, *np.minimum(np.cumprod(self.codebook_sizes), len(codes)).tolist()]
        root: dict[int, Any] = {}
        for item, tuple_ in enumerate(map(tuple, codes.numpy()), start=1):
            node = root
            for code in tuple_[:-1]:
                node = node.setdefault(int(code), {})
            node[int(tuple_[-1])] = item
        self._root, self._met = root, [root]

    def codes(self, item_ids: Tensor) -> Tensor:
        """As ``Trie.codes``, for items without padding."""
        return self._codes[item_ids - 1]

    def allowed(self, level: int, nodes: Tensor) -> Tensor:
        """As ``Trie.allowed``."""
        if level == 0:
            self._met = [self._root]
        mask = torch.zeros(*nodes.shape, self.codebook_sizes[level], dtype=torch.bool)
        rows = mask.view(-1, mask.shape[-1])
        for row, node in enumerate(nodes.reshape(-1).tolist()):
            rows[row, list(self._met[node])] = True
        return mask

    def find(self, level: int, nodes: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """As ``Trie.find``, for allowed codes."""
        met = [
            self._met[node][code] for node, code in zip(nodes.flatten().tolist(), codes.flatten().tolist(), strict=True)
        ]
        self._met = met
        return torch.arange(len(met)).view(nodes.shape), torch.ones_like(nodes, dtype=torch.bool)

    def items(self, leaves: Tensor) -> Tensor:
        """As ``Trie.items``."""
        return torch.tensor(self._met).view(leaves.shape)


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def generating_policy(trie: nn.Module, dim: int) -> SemanticIdPolicy:
    """A policy over the trie's items; without item vectors none of its parameters depends on how many there are."""
    few = Codes(random_codes(256).numpy(), SIZES, "synthetic")
    with tempfile.TemporaryDirectory() as root:
        few.save(Path(root), pa.array(range(few.num_items)), {})
        policy = SemanticIdPolicy(few.num_items, codes=Path(root), dim=dim, id_vectors=False, beam_width=K)
    policy.trie, policy.num_items = trie, trie.num_items
    return policy


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """The function, which adds the CPU time of its calls to the last of ``spent``."""

    def call(*arguments: Any) -> Any:
        start = time.process_time()
        result = function(*arguments)
        spent[-1] += time.process_time() - start
        return result

    return call


def build(contender: str, items: int, dim: int) -> tuple[nn.Module, dict[str, float]]:
    """The policy, how long its trie took to build and what of it grows with the catalog."""
    if contender == "softmax":
        policy = CatalogSoftmaxPolicy(items, dim=dim)
        return policy, {"output_mb": policy.item_table.weight.nbytes / 1e6}
    codes = random_codes(items)
    before, start = resident_mb(), time.process_time()
    trie = (Trie if contender == "recpo" else DictionaryTrie)(codes, SIZES)
    built, grown = time.process_time() - start, resident_mb() - before
    size = sum(buffer.nbytes for buffer in trie.buffers()) / 1e6 if contender == "recpo" else grown
    return generating_policy(trie, dim), {"build_cpu_s": built, "output_mb": size}


def measure(contender: str, items: int, dim: int, repeats: int) -> dict[str, object]:
    """Runs one contender in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy, facts = build(contender, items, dim)
    tune_allocator()  # otherwise a process that has freed something large before is a quarter faster
    torch.manual_seed(0)
    for parameter in (p for name, p in policy.named_parameters() if "table" not in name):
        nn.init.normal_(parameter, std=0.2)
    policy.eval()
    ids = torch.randint(1, items + 1, (BATCH, HISTORY), generator=torch.Generator().manual_seed(1))
    histories = Histories(ids, torch.full((BATCH,), HISTORY), ids % 6)
    parts: dict[str, list[float]] = {"cpu_ms": [], "wall_ms": []}
    if contender != "softmax":
        for name, method in (("mask_cpu_ms", "allowed"), ("child_cpu_ms", "find")):
            parts[name] = []
            setattr(policy.trie, method, timed(getattr(policy.trie, method), parts[name]))
    with torch.no_grad():
        for _ in range(repeats + 1):
            for spent in parts.values():
                spent.append(0.0)
            start, cpu_start = time.perf_counter(), time.process_time()
            best = policy.recommend(histories, K)
            parts["cpu_ms"][-1] = time.process_time() - cpu_start
            parts["wall_ms"][-1] = time.perf_counter() - start
    # the first one warms up
    facts |= {name: 1e3 * statistics.median(spent[1:]) for name, spent in parts.items()}
    facts["cpu_ms_min"] = 1e3 * min(parts["cpu_ms"][1:])
    return {
        "contender": contender, "items": items, "dim": dim,
        **{key: round(value, 3) for key, value in facts.items()},
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6),
        "lists": hashlib.sha256(best.item_ids.numpy().tobytes()).hexdigest()[:12],
        "torch": torch.__version__,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="500 items")
    parser.add_argument("--items", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--contender", choices=CONTENDERS, help="measure it in this process")
    args = parser.parse_args()
    if args.contender:
        print(json.dumps(measure(args.contender, 500 if args.quick else args.items[0], args.dim, args.repeats)))
        return
    for items in [500] if args.quick else args.items:
        base = None
        for contender in args.contenders:
            command = [sys.executable, __file__, f"--contender={contender}", f"--items={items}"]
            command += [f"--dim={args.dim}", f"--repeats={args.repeats}"]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            line = {"contender": contender, "items": items, "failed": f"exit status {result.returncode}"}
            if result.returncode == 0:
                line = json.loads(result.stdout)
                base = line["cpu_ms"] if contender == "recpo" else base
                line |= {"times_recpo": round(line["cpu_ms"] / base, 2)} if base else {}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
