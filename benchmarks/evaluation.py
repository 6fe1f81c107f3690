"""Evaluation: the ranking metrics alone against other libraries, and whole passes over the catalog with their memory.

    python benchmarks/evaluation.py --peer replay=ENV/bin/python --peer rectools=ENV/bin/python
    python benchmarks/evaluation.py --rows large          # the rows whose names begin so
    python benchmarks/evaluation.py --quick               # tiny

Prints one JSON line per contender: medians over ``repeats`` with the least and the largest, and the peak resident size
of the process, each row in a process of its own. All data are random, so only times and memory mean anything.

- ``metrics``: NDCG, Recall and MRR at 10 and 100 of given lists of 100 for 100,000 users, with one and with ten targets
  each. Libraries take turns; their means must agree. RecTools starts from data frames, the others from arrays.
- ``small``: recpo's whole pass over 6,000 users and 3,400 items: recommendation, rankings, segments. ``everything``
  adds log-probabilities of the held-out slates, beyond accuracy by vectors and by tags.
- ``large``: the same over 1,000,000 items with popularity for 100,000 users and with a policy for ``--policy-users``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from recpo.base.feedback import FeedbackRule
from recpo.base.types import EvaluationBatch, FeedbackBatch, Histories, Slates
from recpo.evaluation.beyond_accuracy import BeyondAccuracy, ItemFacts
from recpo.evaluation.catalog_ranking import Ranking, evaluate_ranking
from recpo.evaluation.measures import Recommender
from recpo.evaluation.segments import item_segments
from recpo.lists.reranking import Tags
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.rewards.counted import popularity_of

HERE = Path(__file__).resolve().parent
LIBRARIES = {"recpo": "", "numpy": "", "replay": "replay", "rectools": "rectools"}  # and the environment they need
KS, HISTORY, SEEN, HELD_OUT, BATCH, DIM, TAGS = (10, 100), 50, 100, 12, 512, 64, 40
GROWTH = (
    "per-user metrics and labels (users x metrics x 4 bytes), one count per item and k, facts of the items; scores of "
    "one batch, in blocks of the catalog"
)


def metrics(options: argparse.Namespace, targets: int) -> Iterator[dict]:
    """The metrics of given lists, libraries in turns."""
    users, items, length = (2000, 500, 100) if options.quick else (100_000, 5000, 100)
    given = dict(peer.split("=", 1) for peer in options.peer)
    pythons = {name: given.get(needed) if needed else sys.executable for name, needed in LIBRARIES.items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lists.npz"
        np.savez(file, **random_lists(users, items, length, targets))
        present = [name for name, python in pythons.items() if python]
        for name in pythons.keys() - set(present):
            yield {"contender": name, "skipped": f"no --peer {name}=PYTHON"}
        answers: dict[str, list[dict]] = {name: [] for name in present}
        for _ in range(options.turns):
            for name in present:
                answers[name].append(ask(pythons[name], name, file, options))
    for name, turns in answers.items():
        agree = all(abs(value - answers["numpy"][0]["means"][key]) < 1e-5 for key, value in turns[0]["means"].items())
        if not agree or len(turns[0]["means"]) != 6:
            sys.exit(f"{name} finds other means than plain NumPy: {turns[0]['means']}, {answers['numpy'][0]['means']}")
        yield {
            "contender": name,
            "users": users,
            "lists_of": length,
            "targets_per_user": targets,
            **spread([second for turn in turns for second in turn["seconds"]]),
            "cpu_seconds": round(statistics.median(second for turn in turns for second in turn["cpu_seconds"]), 4),
            "peak_rss_mib": max(turn["peak_rss_mib"] for turn in turns),
            "means": {key: round(value, 5) for key, value in sorted(turns[0]["means"].items())},
            "memory": "the given lists and targets, comparisons of one batch of users",
            "versions": turns[0]["versions"],
        }


def ask(python: str | None, library: str, file: Path, options: argparse.Namespace) -> dict:
    command = [str(python), str(HERE / "peers" / "ranking_metrics.py"), library, str(file), str(options.repeats)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(options), check=False)
    if result.returncode:
        sys.exit(f"{library} failed:\n{result.stderr[-4000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def random_lists(users: int, items: int, length: int, targets: int) -> dict[str, np.ndarray]:
    """Distinct items of every user: rotations of random orders, which are cheap to draw."""
    rng = np.random.default_rng(0)
    order, wanted = rng.permutation(items), rng.permutation(items)
    begin = rng.integers(0, items, (2, users, 1))
    return {
        "lists": order[(begin[0] + np.arange(length)) % items] + 1,
        "targets": wanted[(begin[1] + np.arange(targets)) % items] + 1,
    }


def whole_pass(options: argparse.Namespace, size: str, contender: str, everything: bool) -> Iterator[dict]:
    """One recommender over all users, including the time to make batches."""
    users, items = {"small": (6000, 3400), "large": (100_000, 1_000_000)}[size]
    users = min(users, options.policy_users) if (size, contender) == ("large", "policy") else users
    users, items = (300, 500) if options.quick else (users, items)
    facts, recommender = random_facts(items), random_recommender(contender, items, everything)
    batches = list(random_batches(users, items)) if size == "small" else None
    seconds, cpu = [], []
    for _ in range(options.repeats if size == "small" else 1):
        start = time.perf_counter(), time.process_time()
        result = evaluate_ranking(
            recommender,
            random_batches(users, items) if batches is None else batches,
            Ranking(num_items=items, ks=KS, by_history=True, item_segments=item_segments(facts)),
            measures=[BeyondAccuracy(facts, KS)] if everything else [],
        )
        seconds.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    yield {
        "contender": contender + (", everything" if everything else ", rankings"),
        "users": users,
        "items": items,
        "metrics": len(result.per_user) + len(result.totals),
        **spread(seconds),
        "cpu_seconds": round(statistics.median(cpu), 4),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "memory": GROWTH,
        "versions": {"torch": version("torch")},
    }


def random_recommender(contender: str, items: int, scores: bool) -> Recommender:
    if contender == "popularity":
        return Recommender(popularity_of(np.arange(items)).recommend)
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(items, dim=DIM, max_history=HISTORY).eval()
    return Recommender(policy.recommend, policy.log_prob if scores else None)


def random_facts(items: int) -> ItemFacts:
    generator = torch.Generator().manual_seed(0)
    tags = torch.randint(0, TAGS // 2, (items, 2), generator=generator) + torch.tensor([0, TAGS // 2])
    return ItemFacts(
        train_count=(torch.rand(items + 1, generator=generator) ** 4 * 500).long(),
        duration=torch.rand(items + 1, generator=generator) * 100,
        tags=Tags.from_pairs(np.arange(1, items + 1).repeat(2), tags.flatten().numpy(), items),
        vectors=torch.randn(items + 1, DIM, generator=generator),
    )


def random_batches(users: int, items: int) -> Iterator[EvaluationBatch]:
    generator = torch.Generator().manual_seed(0)
    for begin in range(0, users, BATCH):
        rows = min(BATCH, users - begin)
        seen = torch.randint(1, items + 1, (rows, SEEN), generator=generator)
        held_out = torch.randint(1, items + 1, (rows, HELD_OUT), generator=generator)
        label = torch.rand(rows, HELD_OUT, generator=generator)
        dislike = torch.rand(rows, HELD_OUT, generator=generator) < 0.05
        positive = FeedbackRule().positive(label, dislike)
        visible = torch.full_like(held_out, HISTORY)
        slates = Slates(held_out, visible, held_out > 0, label=label, dislike=dislike, positive=positive)
        histories = Histories(seen[:, -HISTORY:].contiguous(), torch.full((rows,), HISTORY))
        yield EvaluationBatch(FeedbackBatch(histories, slates, torch.arange(begin, begin + rows)), seen, seen)


ROWS: dict[str, Callable[[argparse.Namespace], Iterator[dict]]] = {
    "metrics, 1 target": lambda options: metrics(options, 1),
    "metrics, 10 targets": lambda options: metrics(options, 10),
    "small, popularity": lambda options: whole_pass(options, "small", "popularity", everything=False),
    "small, policy": lambda options: whole_pass(options, "small", "policy", everything=False),
    "small, policy, everything": lambda options: whole_pass(options, "small", "policy", everything=True),
    "large, popularity, everything": lambda options: whole_pass(options, "large", "popularity", everything=True),
    "large, policy": lambda options: whole_pass(options, "large", "policy", everything=False),
}


def spread(seconds: list[float]) -> dict[str, float | int]:
    """Median, least and largest."""
    return {
        "seconds": round(statistics.median(seconds), 4),
        "seconds_min": round(min(seconds), 4),
        "seconds_max": round(max(seconds), 4),
        "repeats": len(seconds),
    }


def environment(options: argparse.Namespace) -> dict[str, str]:
    threads = str(options.threads)
    root = str(HERE.parent)
    return {
        **os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": root,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="replay or rectools")
    parser.add_argument("--rows", default="", help="rows whose names begin with this")
    parser.add_argument("--row", choices=list(ROWS), help="this row alone, in this process")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--repeats", type=int, default=5, help="of every measurement but those of a large catalog")
    parser.add_argument("--turns", type=int, default=3, help="turns of every library, each with all repeats")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--policy-users", type=int, default=2000, help="users of the policy on a large catalog")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.turns, options.threads = 2, 1, 1
    if options.row:
        torch.set_num_threads(options.threads)
        for line in ROWS[options.row](options):
            facts = {"threads": options.threads, "machine": platform.machine(), "python": platform.python_version()}
            print(json.dumps({"benchmark": "evaluation", "row": options.row, **line, **facts}), flush=True)
        return
    for row in ROWS:
        if row.startswith(options.rows):
            command = [sys.executable, __file__, *sys.argv[1:], "--row", row]
            if subprocess.run(command, env=environment(options), check=False).returncode:
                sys.exit(f"{row} failed")


if __name__ == "__main__":
    main()
