"""Codes of items: recpo's residual k-means and unique pass against the k-means of scikit-learn and faiss.

3 levels of 256 codes for vectors of 64 dimensions, float32, one thread. "gaussian" vectors have no structure;
"clusters" are 10,000 tight clusters whose sizes follow Zipf's law, the hard case: the largest holds a tenth of the
items, far more than there are tuples near it. Only recpo makes the tuples unique; of the others, the collisions are
counted. Errors are mean squared errors over the variance, times are CPU seconds. Every contender runs in a process of
its own, so that its peak resident size (libraries and vectors included) is its own. Prints one JSON line per contender;
faiss is skipped where it is not installed.

    python benchmarks/semantic_codes.py            # 100,000 and 1,000,000 items
    python benchmarks/semantic_codes.py --quick    # 5,000 items
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch
from torch import Tensor

from recpo.items.residual_kmeans import Codebooks, ResidualKMeans, subtract
from recpo.items.tokenization import collision_statistics, nearest_free, reconstruction_errors

LEVELS, CODES, DIM, CLUSTERS = 3, 256, 64, 10_000
CONTENDERS = {"recpo": "torch", "recpo, unbalanced": "torch", "sklearn": "scikit-learn", "faiss": "faiss-cpu"}


def item_vectors(items: int, data: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(items, DIM, generator=generator)
    if data == "gaussian":
        return noise
    sizes = 1 / torch.arange(1, CLUSTERS + 1, dtype=torch.float64)
    centers = torch.randn(CLUSTERS, DIM, generator=generator)
    return centers[torch.multinomial(sizes, items, replacement=True, generator=generator)] + 0.1 * noise


def with_recpo(vectors: Tensor, name: str) -> tuple[Codebooks, Tensor]:
    options = ResidualKMeans(levels=LEVELS, codebook_size=CODES, normalize="none")
    if "unbalanced" in name:
        options = replace(options, capacity_slack=None)
    return options.fit(vectors, seed=0)


def with_peer(vectors: Tensor, name: str) -> tuple[Codebooks, Tensor]:
    """The k-means of another library, level after level on what is left."""
    residual, centroids, codes = vectors.clone(), [], []
    for _ in range(LEVELS):
        found, code = {"sklearn": sklearn_level, "faiss": faiss_level}[name](residual.numpy())
        centroids.append(torch.from_numpy(found))
        codes.append(torch.from_numpy(code.astype(np.int64)))
        subtract(residual, centroids[-1], codes[-1])
    return Codebooks(torch.stack(centroids), torch.zeros(DIM), torch.ones(DIM), torch.tensor(False)), torch.stack(
        codes, 1
    )


def sklearn_level(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.cluster import MiniBatchKMeans

    model = MiniBatchKMeans(CODES, batch_size=4096, n_init=1, random_state=0).fit(points)
    return model.cluster_centers_, model.labels_


def faiss_level(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    import faiss

    model = faiss.Kmeans(points.shape[1], CODES, niter=25, seed=0)
    model.train(points)
    return model.centroids, model.index.search(points, 1)[1][:, 0]


def measure(name: str, items: int, data: str) -> dict[str, object]:
    """Runs one contender in this process."""
    torch.set_num_threads(1)
    vectors = item_vectors(items, data)
    started = time.process_time()
    if name.startswith("recpo"):
        books, codes = with_recpo(vectors, name)
    else:
        books, codes = with_peer(vectors, name)
    seconds = {"fit_and_encode_cpu_s": time.process_time() - started}
    line = {"error": reconstruction_errors(vectors, books, codes)[-1]}
    unique = codes
    if name.startswith("recpo"):
        started = time.process_time()
        unique = nearest_free(vectors, books, codes)
        seconds["unique_cpu_s"] = time.process_time() - started
        line["error_unique"] = reconstruction_errors(vectors, books, unique)[-1]
    moves = collision_statistics(codes, unique, items)
    line |= {"collisions": moves["collisions"] / items, "moved": moves["moved_share"]}
    line["prefix_changed"] = moves["prefix_changed"] / items
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "benchmark": "semantic_codes", "contender": name, "data": data, "items": items,
        **{key: round(value, 2) for key, value in seconds.items()}, "peak_rss_mib": round(peak),
        **{key: round(value, 4) for key, value in line.items()}, "version": version(CONTENDERS[name]),
    }  # fmt: skip


def installed(contender: str) -> bool:
    try:
        version(CONTENDERS[contender])
    except PackageNotFoundError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5,000 items")
    parser.add_argument("--items", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--data", choices=["gaussian", "clusters"], help="measure the only contender in this process")
    args = parser.parse_args()
    if args.data:
        print(json.dumps(measure(args.contenders[0], args.items[0], args.data)))
        return
    for items in [5_000] if args.quick else args.items:
        for data in ("gaussian", "clusters"):
            for name in args.contenders:
                if not installed(name):
                    print(
                        json.dumps({"contender": name, "skipped": f"{CONTENDERS[name]} is not installed"}), flush=True
                    )
                    continue
                command = [sys.executable, __file__, "--contenders", name, "--items", str(items), "--data", data]
                one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
                result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=one_thread)
                failure = {"contender": name, "items": items, "failed": f"exit status {result.returncode}"}
                print(result.stdout.strip() if result.returncode == 0 else json.dumps(failure), flush=True)


if __name__ == "__main__":
    main()
