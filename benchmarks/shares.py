"""Where the time goes: the largest shares of every step from a log to lists, beside the limits of the machine.

    python benchmarks/shares.py --work runs/shares
    python benchmarks/shares.py --work runs/shares_large --users 100000 --items 20000 --events 10000000
    python benchmarks/shares.py --quick

Simulates a log (of the demo's size by default) and runs ``prepare``, ``factorize``, pre-training, MPO and GRPO with
rollouts for ``--steps`` steps, ``evaluate``, ``export`` and ``recommend`` of a bundle, each in a process of its own on
one thread. Prints a JSON line for the machine and one for each step. ``--only`` repeats some steps of a finished work
directory. ``--most`` ends ``evaluate`` and ``recommend`` after so many CPU seconds.

- Shares are of the CPU time after the verb and its libraries are imported (``import_cpu_seconds``); what is imported
  later is the part ``importing``. A thread looks at the stack of Python calls, and the CPU time since its last look
  goes to the part of the innermost call that has one (``PARTS``). So a call of a library counts as a whole.
- ``products``: matrix products of three more training steps: their share of a step, and their rate (over the CPU time
  of a step) beside the largest that one product of this process reaches.
- ``passes``: all other operators on tensors: the bytes that they read and write at least, beside the rate of copying
  a large array. Above 1, their data were in the cache.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from verbs import call, configurations

CONFIGS = Path(__file__).parents[1] / "configs"
STEPS = ("prepare", "factorize", "pretrain", "mpo", "grpo", "evaluate", "export", "recommend")
LARGEST, LOOK_SECONDS, PROFILED = 5, 0.005, 3
LARGE, SMALL = 2048, 256  # rows of the matrices that the limits of the machine are measured with
#: The part of a call: the first row whose words are in ``file:function`` of the innermost call that any row fits.
PARTS = (
    ("importing", "<frozen importlib"),
    ("log: counting and checking", "log/prepare.py:_check", "validate.py:", "inspection.py:"),
    ("log: indices of users and items", "log/prepare.py:_keep", "log/prepare.py:_write_catalog"),
    ("log: positions and labels", "log/prepare.py:_label", "log/prepare.py:_outside"),
    ("log: periods", "log/prepare.py:_split"),
    ("log: shards", "log/prepare.py:_write_period"),
    ("log: histories for serving", "log/prepare.py:_write_histories"),
    ("log: what an extension needs", "log/prepare.py:_write_for_extension"),
    ("checksums", "checksums.py:", "artifacts/outputs.py:"),
    ("reading prepared data", "log/prepared.py:", "recpo/batches/", "utils/data/"),
    ("factors: equations", "graded.py:", "variational.py:", "scipy/sparse"),
    ("factors: validation", "selection.py:"),
    ("encoder", "policies/encoder.py:", "policies/blocks.py:", "policies/feature_policy.py:"),
    ("softmax over the catalog", "linear_logprob.py:", "item_table.py:", "catalog_search.py:", "kernels.py:sum_over"),
    ("drawing candidates", "policies/sampling.py:", "training/rollout.py:"),
    ("rewards", "recpo/rewards/"),
    ("objective", "recpo/objectives/"),
    ("gradients of encoder and tables", "autograd/graph.py:_engine_run_backward"),
    ("optimizer", "torch/optim/", "training/optimizers.py:", "training/kl_control.py:measure"),
    ("trainer", "lightning/"),
    ("metrics of lists", "ops/ranking.py:", "catalog_ranking.py:", "evaluation/segments.py:", "beyond_accuracy.py:"),
    ("off-policy values", "evaluation/off_policy/"),
    ("means, intervals, differences", "estimates.py:", "evaluation/document.py:"),
    ("report", "evaluation/html_report", "jinja2/"),
    ("baselines", "evaluation/contenders.py:", "policies/baseline.py:"),
    ("graph of the program", "serving/program.py:exported_program"),
    ("ONNX program of the graph", "serving/onnx_program.py:save_onnx"),
    ("comparison with the policy", "program.py:verify_", "program.py:overlap"),
    ("program in ONNX Runtime", "runtimes.py:run"),
    ("histories of users", "serving/histories.py:", "recommend.py:_blocks", "frames.py:"),
    ("lists to ids and Parquet", "serving/recommending.py:", "id_map.py:", "recommend.py:_write"),
    ("configuration", "jsonargparse/", "cli/main.py:"),
)
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise")


def part_of(frame: FrameType | None) -> str:
    """The named part that a stack of calls is in."""
    while frame is not None:
        code = frame.f_code
        place = f"{code.co_filename}:{code.co_name}"
        if code.co_name != "<module>":  # a module that is being imported: the import below it says so
            for name, *words in PARTS:
                if any(word in place for word in words):
                    return name
        frame = frame.f_back
    return "other"


class Enough(BaseException):
    """A step that nothing else needs has run for long enough to know its shares."""


class Shares:
    """CPU seconds of this process by part; ends a step after ``most`` of them.

    A thread looks at the stack of the one that works. A signal handler would itself be traced by torch's compiler.
    """

    def __init__(self, most: float) -> None:
        self.seconds, self._last, self._most = Counter[str](), 0.0, most
        self._ended, self._watching = threading.Event(), threading.Thread()

    def start(self) -> None:
        """Begins, for the thread that calls."""
        self._last = time.process_time()
        self._watching = threading.Thread(target=self._watch, args=(threading.get_ident(),), daemon=True)
        self._watching.start()

    def stop(self) -> None:
        """Ends; what was not seen, all of a work shorter than the time between two looks, counts too."""
        self._ended.set()
        self._watching.join()
        self._add(sys._getframe(1))

    def _watch(self, thread: int) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._add(sys._current_frames().get(thread))
            if sum(self.seconds.values()) > self._most:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Enough))
                return

    def _add(self, frame: FrameType | None) -> None:
        now = time.process_time()
        self.seconds[part_of(frame)] += now - self._last
        self._last = now

    def as_json(self) -> dict[str, Any]:
        """All seconds, and the largest shares of them."""
        total = sum(self.seconds.values())
        largest = {name: round(spent / total, 3) for name, spent in self.seconds.most_common(LARGEST)}
        return {"cpu_seconds": round(total, 2), "shares": largest}


def best_rate(work: Callable[[], object], amount: float) -> float:
    """``amount`` per CPU second, the median of five."""
    spent = []
    for _ in range(5):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return amount / statistics.median(spent)


def limits(size: int) -> dict[str, float]:
    """The rates of one large product and of one large copy on one thread."""
    import torch  # not at the top: prepare works without it

    torch.set_num_threads(1)
    square, large = torch.randn(size, size), torch.ones(size * size * 8)
    target = torch.empty_like(large)
    products = [lambda: square @ square]
    if torch.backends.mkldnn.is_available():
        products.append(lambda: torch.ops.mkldnn._linear_pointwise(square, square, None, "none", [], ""))
    gflops = max(best_rate(work, 2 * size**3) for work in products) / 1e9
    return {"gflops": gflops, "copy_gb_per_s": best_rate(lambda: target.copy_(large), 8 * large.numel()) / 1e9}


class Watch:
    """Makes a callback of the trainer that takes the shares of ``steps`` steps, and counts products of a few more."""

    def __init__(self, shares: Shares, steps: int, size: int) -> None:
        self.shares, self.steps, self.size, self.found = shares, steps, size, dict[str, Any]()

    def callback(self) -> Any:
        """The callback."""
        from lightning.pytorch.callbacks import Callback
        from torch.profiler import ProfilerActivity, profile

        shares, steps, size, found = self.shares, self.steps, self.size, self.found
        counted = profile(activities=[ProfilerActivity.CPU], record_shapes=True)

        class Steps(Callback):
            def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
                step = trainer.global_step
                if step == 1:  # the first step also compiles and imports
                    shares.start()
                if step == steps + 1:
                    shares.stop()
                    counted.start()
                if step == steps + 1 + PROFILED:
                    counted.stop()
                    found.update(operators(counted, sum(shares.seconds.values()) / steps, limits(size)))

        return Steps()


def operators(counted: Any, step_seconds: float, peak: dict[str, float]) -> dict[str, Any]:
    """The share and the rate of products and of all other operators in ``PROFILED`` training steps."""
    spent, flops, moved = Counter[str](), 0.0, 0.0
    for event in counted.key_averages(group_by_input_shape=True):
        kind = "products" if event.key in PRODUCTS else "passes"
        spent[kind] += event.self_cpu_time_total
        shapes = [shape for shape in event.input_shapes if shape and all(isinstance(size, int) for size in shape)]
        if kind == "products":
            flops += event.count * flops_of(event.key, shapes)
        elif event.self_cpu_time_total > 0 and shapes:  # what is read, and one result of the largest shape
            sizes = [math.prod(shape) for shape in shapes]
            moved += event.count * 4 * (sum(sizes) + max(sizes))
    total = sum(spent.values())
    share = {kind: seconds / total for kind, seconds in spent.items()}
    gflops = flops / 1e9 / PROFILED / (share["products"] * step_seconds)
    gigabytes = moved / 1e9 / PROFILED / (share["passes"] * step_seconds)
    return {
        "cpu_ms_per_step": round(1e3 * step_seconds, 1),
        "products": {"share": round(share["products"], 3), "gflops": round(gflops, 1),
                     "of_peak": round(gflops / peak["gflops"], 2)},
        "passes": {"share": round(share["passes"], 3), "gb_per_s": round(gigabytes, 2),
                   "of_copy": round(gigabytes / peak["copy_gb_per_s"], 2)},
    }  # fmt: skip


def flops_of(name: str, shapes: list[list[int]]) -> float:
    """Floating-point operations of one product of matrices of these shapes."""
    left, right = shapes[1:3] if name in ("aten::addmm", "aten::baddbmm") else shapes[:2]
    width = right[0] if name == "mkldnn::_linear_pointwise" else right[-1]  # there the right matrix is transposed
    return 2.0 * math.prod(left) * width


def training(name: str, work: Path, steps: int, batch: int, watch: Watch) -> None:
    """Trains ``steps`` steps and a few more; of a validation only one batch."""
    from recpo.verbs.train import train

    start = {} if name == "pretrain" else {"init_from": work / "pretrain", "reward.init_args.factors": work / "factors"}
    options = {"trainer.max_steps": steps + 2 + PROFILED, "trainer.limit_val_batches": 1, "data.batch_size": batch}
    files = configurations(CONFIGS, name)
    train(
        work / "prepared",
        config=files,
        out=work / name,
        callbacks=[watch.callback()],
        overwrite=True,
        **start,
        **options,
    )


def run_step(name: str, work: Path, flags: argparse.Namespace) -> dict[str, Any]:
    """Runs one step in this process, and tells where its time went."""
    verbs = {
        "prepare": {"log": work / "log" / "log", "out": work / "prepared", "overwrite": True},
        "factorize": {"prepared": work / "prepared", "ranks": "[8]", "consumption": "[0]", "sweeps": 5,
                      "out": work / "factors", "overwrite": True},
        "evaluate": {"prepared": work / "prepared", "contenders": work / "pretrain", "baselines": False,
                     "out": work / "evaluation", "overwrite": True},
        "export": {"run": work / "pretrain", "out": work / "bundle", "overwrite": True},
        "recommend": {"source": work / "bundle", "histories": work / "prepared" / "histories.parquet",
                      "out": work / "lists.parquet"},
    }  # fmt: skip
    module = name if name in verbs else "train"
    verb = getattr(import_module(f"recpo.verbs.{module}"), module)
    most = flags.most if name in ("evaluate", "recommend") else math.inf
    imported, shares = time.process_time(), Shares(most)
    watch = Watch(shares, flags.steps, SMALL if flags.quick else LARGE)
    if name in verbs:
        with suppress(Enough):
            shares.start()
            call(verb, **verbs[name])
            shares.stop()
    else:
        training(name, work, flags.steps, flags.batch, watch)
    return {"step": name, **shares.as_json(), **watch.found, "import_cpu_seconds": round(imported, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("users", 2000), ("items", 1000), ("events", 200_000), ("steps", 40), ("batch", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--work", type=Path, help="directory to keep the log and what is made of it in")
    parser.add_argument("--most", type=float, default=math.inf, help="CPU seconds of evaluate and of recommend")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS, help="these steps")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--step", choices=("machine", *STEPS), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.step == "machine":
        rates = limits(SMALL if flags.quick else LARGE)
        print(json.dumps({"machine": {name: round(rate, 1) for name, rate in rates.items()}}))
        return
    if flags.step:
        print(json.dumps(run_step(flags.step, flags.work, flags)), flush=True)
        return
    if flags.quick:
        flags.users, flags.items, flags.events, flags.steps, flags.batch = 100, 60, 5000, 3, 8
    with tempfile.TemporaryDirectory() as folder:
        work = flags.work or Path(folder)
        if not (work / "log").exists():
            from recpo.verbs.simulate import simulate

            sizes = {"users": flags.users, "items": flags.items, "events": flags.events}
            call(simulate, out=work / "log", **sizes)
        for name in ("machine", *flags.only):
            command = [sys.executable, __file__, "--step", name, "--work", str(work)]
            command += ["--steps", str(flags.steps), "--batch", str(flags.batch), "--most", str(flags.most)]
            command += ["--quick"] * flags.quick
            threads = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=threads)
            line = result.stdout.splitlines()[-1]
            print(line, flush=True)


if __name__ == "__main__":
    main()
