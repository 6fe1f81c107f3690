"""Off-policy value: 1,000,000 logged rows over 100,000 items, and the dense formulas of the Open Bandit Pipeline.

    python benchmarks/off_policy.py
    python benchmarks/off_policy.py --quick               # tiny

Prints one JSON line per row and contender, each in a process of its own with the peak resident size of that process.
All data are random, so only times and memory are meaningful. Making batches is not timed.

- ``both fit``: 100,000 rows over 1,000 items. The target is a list of 10, so that the estimates of both contenders are
  exact, and they must agree. ``dense`` is NumPy on arrays ``[rows, items]``, as OBP's estimators ask for; they need a
  reward model's prediction for every item. recpo also gives intervals over users (normal and 1,000 bootstrap
  resamples), which ``dense`` does not.
- ``large``: recpo alone, with lists of 10 and 50 and a softmax policy with 32 draws per user; ``dense`` would need two
  arrays of 800 GB.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from recpo.base.types import EvaluationBatch, FeedbackBatch, Histories, Recommendations, Slates
from recpo.evaluation.measures import Observed
from recpo.evaluation.off_policy.estimators import AdditiveRewardModel, OffPolicyOptions
from recpo.evaluation.off_policy.measure import OffPolicyMeasure, OffPolicySetting
from recpo.rewards.rewards import LoggedReward

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.reference import off_policy_dense

ROWS_PER_USER, BATCH, LIST = 10, 512, 10
SIZES = {"both fit": (100_000, 1000), "large": (1_000_000, 100_000)}
LIMIT = 20.0


def random_log(rows: int, items: int, places: int) -> Iterator[Observed]:
    """Users with ten rows each, and lists that hold a tenth of what was shown."""
    generator = torch.Generator().manual_seed(0)
    users = rows // ROWS_PER_USER
    for begin in range(0, users, BATCH):
        size = min(BATCH, users - begin)
        shown = torch.randint(1, items + 1, (size, ROWS_PER_USER), generator=generator)
        slates = Slates(
            shown,
            torch.zeros_like(shown),
            shown > 0,
            label=torch.rand(shown.shape, generator=generator),
            logp_behavior=torch.log(torch.rand(shown.shape, generator=generator) * 0.2 + 0.001),
        )
        # an order of the catalog that begins at a shown item: distinct items, cheap to draw
        lists = (shown[:, :1] - 1 + torch.arange(places)) % items + 1
        histories = Histories(shown, torch.full((size,), ROWS_PER_USER))
        batch = FeedbackBatch(histories, slates, torch.arange(begin, begin + size))
        logp = slates.logp_behavior + 0.5 * torch.randn(shown.shape, generator=generator)
        yield Observed(
            EvaluationBatch(batch, shown[:, :0], shown[:, :0]), Recommendations(lists, lists.float()), None, logp
        )


def random_model(rows: int, items: int) -> AdditiveRewardModel:
    generator = torch.Generator().manual_seed(1)
    users = 0.2 * torch.rand(rows // ROWS_PER_USER, generator=generator).double()
    effects = 0.5 * torch.rand(items + 1, generator=generator).double()
    return AdditiveRewardModel(0.1, users, effects)


def streamed(rows: int, items: int, *, whole: bool) -> dict:
    """The measure of recpo; ``whole`` asks for the softmax policy and a second list too."""
    setting = OffPolicySetting(
        OffPolicyOptions(clip=LIMIT, switch_threshold=LIMIT),
        reward=LoggedReward(),
        num_items=items,
        ks=[LIST, 50] if whole else [LIST],
        model=random_model(rows, items),
    )
    measure = OffPolicyMeasure(setting, lambda histories, n: torch.randint(1, items + 1, (len(histories.lengths), n)))
    spent = np.zeros(2)
    for observed in random_log(rows, items, 50):
        begin = clocks()
        measure.update(observed if whole else observed._replace(logp=None))
        spent += clocks() - begin
    begin = clocks()
    result = measure.result()
    intervals = clocks() - begin
    estimates = {e.estimator: e.value for e in result.estimates if e.target == f"top_{LIST}"}
    return {
        **dict(zip(("seconds", "cpu_seconds"), (spent + intervals).tolist(), strict=True)),
        "cpu_seconds_of_intervals": intervals[1].item(),
        "targets": len(result.totals),
        "estimates": estimates,
    }


def dense(rows: int, items: int) -> dict:
    """OBP's formulas over the same log."""
    model, columns = random_model(rows, items), []
    for observed in random_log(rows, items, LIST):
        batch, slates = observed.batch.feedback, observed.batch.feedback.slates
        user = batch.context_ids.repeat_interleave(ROWS_PER_USER)
        lists = observed.lists.item_ids.repeat_interleave(ROWS_PER_USER, 0)
        flat = (slates.label, slates.item_ids - 1, slates.logp_behavior.double().exp())
        columns.append([column.flatten().numpy() for column in flat] + [user.numpy(), lists.numpy() - 1])
    reward, action, propensity, user, lists = (np.concatenate(part) for part in zip(*columns, strict=True))
    pi = np.zeros((rows, items))
    np.put_along_axis(pi, lists, 1 / LIST, axis=1)
    q = model.mean + model.user_effect.numpy()[user, None] + model.item_effect.numpy()[1:]
    begin = clocks()
    found = off_policy_dense.estimates(reward.astype(np.float64), action, propensity, pi, q, LIMIT, LIMIT)
    return {**dict(zip(("seconds", "cpu_seconds"), (clocks() - begin).tolist(), strict=True)), "estimates": found}


def clocks() -> np.ndarray:
    """Seconds on the wall and of this process's cores."""
    return np.array([time.perf_counter(), time.process_time()])


def measured(row: str, contender: str, quick: bool) -> dict:
    rows, items = (2000, 100) if quick else SIZES[row]
    found = dense(rows, items) if contender == "dense" else streamed(rows, items, whole=row == "large")
    numbers = {name: round(value, 4) for name, value in found.items() if isinstance(value, float)}
    return {
        "benchmark": "off_policy",
        "row": row,
        "contender": contender,
        "rows": rows,
        "items": items,
        **found,
        **numbers,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "numpy")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--row", choices=list(SIZES), help="this row alone, with --contender, in this process")
    parser.add_argument("--contender", choices=["recpo", "dense"])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.row:
        print(json.dumps(measured(options.row, options.contender, options.quick)), flush=True)
        return
    answers = []
    for row, contender in (("both fit", "dense"), ("both fit", "recpo"), ("large", "recpo")):
        command = [sys.executable, __file__, *sys.argv[1:], "--row", row, "--contender", contender]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode:
            sys.exit(f"{row}, {contender} failed:\n{answer.stderr[-4000:]}")
        print(answer.stdout, end="", flush=True)
        answers.append(json.loads(answer.stdout.splitlines()[-1])["estimates"])
    for name, value in answers[0].items():
        if abs(answers[1][name] - value) > 1e-6 * max(1.0, abs(value)):
            sys.exit(f"{name}: recpo finds {answers[1][name]}, the dense formula {value}")


if __name__ == "__main__":
    main()
