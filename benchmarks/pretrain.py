"""Sequential pre-training: positions per second and ranking quality after equal processor time.

SASRec, d = 64, 2 blocks, 2 heads, L = 50, batches of 128, dropout 0.2, full softmax, Adam (1e-3, betas 0.9 and 0.98).
Each user's last event is the test, the one before it is not trained on but stands in the history that is recommended
from. The whole catalog is ranked without the items of the history; HR@10 and NDCG@10 (one target: 1 / log2(1 + rank))
are computed here, from the lists of every contender.

With several ``--cpu-seconds``, every contender stops for an evaluation at each of them, which its clock does not count.

Contenders run in processes of their own and take turns of a few seconds, so that a busy machine is equally busy for
all (their threads wait for each other without spinning, which a busy machine punishes); compare the ratios. Speed is
measured with --threads threads in wall time and with one thread in processor time; the turns of the latter add up to
the training whose quality is reported. Memory is the peak up to the first evaluation. Peers run in environments of
their own (``pip install torch==2.13.0 "replay-rec[torch]==0.22.0" lightning``, and another one with
``"rectools[torch]==0.19.0"``):

    python benchmarks/pretrain.py --ratings ratings.dat --peer replay=ENV/bin/python --peer rectools=ENV/bin/python
    python benchmarks/pretrain.py --contenders recpo yardstick replay --cpu-seconds 30 60 180
    python benchmarks/pretrain.py              # no ratings: a simulated log of the same shape; no peers
    python benchmarks/pretrain.py --quick      # tiny, recpo and the yardstick only
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ratings import Sequences, read_ratings, simulate

from recpo.log.prepare import Preparation
from recpo.log.schema import Columns
from recpo.log.shaping import EveryEvent
from recpo.log.splits import LeaveLastOut
from recpo.log.writing import Output, Sources

HERE = Path(__file__).resolve().parent
YARDSTICK = "yardstick"


class Contender(NamedTuple):
    """A script under ``peers/``, its variant, how it makes windows, and the environment it needs ("" = this one)."""

    script: str
    variant: str
    windows: str
    environment: str = ""


ONE, EVERY = "one per user: the last length + 1 events", "every length events of a user"
CONTENDERS = {
    "recpo": Contender("recpo_sasrec.py", "trainer+last", ONE),
    "recpo, every window": Contender("recpo_sasrec.py", "trainer+every", EVERY),
    "recpo, plain loop": Contender("recpo_sasrec.py", "loop+last", ONE),
    YARDSTICK: Contender("yardstick_sasrec.py", "plain", ONE),
    "yardstick, tuned allocator": Contender("yardstick_sasrec.py", "allocator", ONE),
    "replay": Contender("replay_sasrec.py", "", ONE, "replay"),
    "rectools": Contender("rectools_sasrec.py", "", ONE, "rectools"),
}
FULL = {"dim": 64, "layers": 2, "heads": 2, "length": 50, "batch": 128, "dropout": 0.2, "rate": 1e-3}
QUICK = {**FULL, "dim": 16, "length": 20, "batch": 64}


class Running:
    """A contender's process."""

    def __init__(self, name: str, python: str, setting: dict[str, float], data: Path, threads: int, seed: int) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=data.parent)
        self.folder = Path(self._folder.name)
        for file in data.iterdir():
            (self.folder / file.name).symlink_to(file)
        script, variant, *_ = CONTENDERS[name]
        flags = {"folder": self.folder, **setting, "seed": seed, "variant": variant}
        # contenders of this environment run the recpo that runs here
        path = str(HERE) if CONTENDERS[name].environment else f"{HERE}{os.pathsep}{HERE.parent}"
        environment = {
            **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "passive",
        }  # fmt: skip
        self._log = (self.folder / "messages").open("w")
        self._process = subprocess.Popen(
            [python, str(HERE / "peers" / script), *(f"--{key}={value}" for key, value in flags.items())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment,
        )  # fmt: skip
        self.name = name
        self.setup_cpu_s: float = self._answer()["setup_cpu_s"]

    def turn(self, clock: str, seconds: float) -> dict[str, float]:
        """Lets it train for so long by the ``wall`` or the ``cpu`` clock: positions, steps, seconds, cpu_seconds."""
        self._say({"clock": clock, "seconds": seconds})
        return self._answer()

    def lists(self) -> np.ndarray:
        """What it recommends by now, ``[U, 10]``."""
        self._say({"recommend": True})
        self._answer()
        return np.load(self.folder / "lists.npy")

    def finish(self) -> dict[str, object]:
        """Stops the training; its last words."""
        self._say({})
        return self._answer()

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()
        self._folder.cleanup()

    def _say(self, command: dict[str, object]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            sys.exit(f"{self.name} failed:\n" + (self.folder / "messages").read_text()[-4000:])
        return json.loads(line)


def write_data(sequences: Sequences, data: Path) -> np.ndarray:
    """Writes what contenders read; returns the test items ``[U]``."""
    log = data.parent / "log.parquet"
    sequences.frame().to_parquet(log)
    data.mkdir()
    columns = Columns(time_unit="order")
    preparation = Preparation(
        columns=columns, split=LeaveLastOut(), label=EveryEvent(), max_context=10_000, catalog="log"
    )
    preparation.write(Sources(str(log)), Output(data / "prepared", progress=False))
    last = sequences.offsets[1:] - 1
    offsets = sequences.offsets - np.arange(len(sequences.offsets))
    np.savez(
        data / "histories.npz", items=np.delete(sequences.items, last), offsets=offsets, num_items=sequences.num_items
    )
    return sequences.items[last]


def quality(lists: np.ndarray, test: np.ndarray) -> dict[str, float]:
    """Hit rate and NDCG at 10 with their standard errors over users."""
    hit = lists == test[:, None]
    gains = {"hr@10": hit.any(1).astype(float), "ndcg@10": (hit / np.log2(np.arange(2, 12))).sum(1)}
    values = {}
    for name, gain in gains.items():
        values[name] = round(float(gain.mean()), 4)
        values[f"{name}_standard_error"] = round(float(gain.std() / len(gain) ** 0.5), 4)
    return values


def spread(name: str, values: list[float]) -> dict[str, int]:
    return {
        name: round(statistics.median(values)),
        f"{name}_min": round(min(values)),
        f"{name}_max": round(max(values)),
    }


class Figures(NamedTuple):
    """What is known of a contender: its printed facts, and its rates turn by turn under either clock."""

    facts: dict[str, object]
    wall: list[float]
    cpu: list[float]


def start(pythons: dict[str, str], args: argparse.Namespace, data: Path, threads: int) -> list[Running]:
    return [Running(name, python, args.setting, data, threads, args.seed) for name, python in pythons.items()]


def measure_speed(figures: dict[str, Figures], running: list[Running], turns: int, seconds: float) -> None:
    """Positions per second of wall time."""
    for turn in range(turns + 1):
        for contender in running:
            done = contender.turn("wall", seconds)
            if turn:  # the first one warms up
                figures[contender.name].wall.append(done["positions"] / done["seconds"])
    for contender in running:
        figures[contender.name].facts.update(spread("positions_per_s", figures[contender.name].wall))


def deadlines(points: list[float], turns: int) -> list[tuple[float, bool]]:
    """The CPU-seconds at which turns end, and whether an evaluation follows: about ``turns`` equal turns in all."""
    ends, before = [], 0.0
    for point in points:
        parts = max(1, round((point - before) / points[-1] * turns))
        ends += [(before + (point - before) * part / parts, part == parts) for part in range(1, parts + 1)]
        before = point
    return ends


def measure_training(
    figures: dict[str, Figures], running: list[Running], turns: int, points: list[float], test: np.ndarray
) -> None:
    """Positions per second of processor time, and what the training was good for at every point."""
    done = {contender.name: [contender.turn("cpu", 0)] for contender in running}  # one step to warm up
    found: dict[str, dict[str, dict[str, float]]] = {contender.name: {} for contender in running}
    for end, evaluate in deadlines(points, turns):
        for contender in running:
            left = end - sum(turn["cpu_seconds"] for turn in done[contender.name])
            if left > 0:
                turn = contender.turn("cpu", left)
                done[contender.name].append(turn)
                figures[contender.name].cpu.append(turn["positions"] / turn["cpu_seconds"])
            if evaluate:
                if not found[contender.name]:
                    figures[contender.name].facts["peak_rss_mib"] = done[contender.name][-1]["peak_rss_mib"]
                found[contender.name][f"{end:g}"] = gains = quality(contender.lists(), test)
                line = {"benchmark": "pretrain", "contender": contender.name, "cpu_seconds": end, **gains}
                rates = spread("positions_per_cpu_s", figures[contender.name].cpu)
                print(json.dumps(line | rates | {"peak_rss_mib": done[contender.name][-1]["peak_rss_mib"]}), flush=True)
    for contender in running:
        last_words = contender.finish()
        contender.end()
        of_points = found[contender.name]
        figures[contender.name].facts.update(
            spread("positions_per_cpu_s", figures[contender.name].cpu)
            | of_points[f"{points[-1]:g}"]
            | {
                "after_cpu_s": of_points,
                "trained_cpu_s": round(sum(turn["cpu_seconds"] for turn in done[contender.name]), 1),
                "trained_positions": int(sum(turn["positions"] for turn in done[contender.name])),
                "setup_cpu_s": round(contender.setup_cpu_s, 1),
            }
            | last_words
        )


def ratio(own: list[float], base: list[float]) -> str:
    """Median, least and largest ratio to the yardstick in the same turn."""
    ratios = [a / b for a, b in zip(own, base, strict=False)]  # the last turn may have been spared one of them
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def table(figures: dict[str, Figures], threads: int, points: list[float]) -> str:
    """Ratios to the yardstick, and quality."""
    keys = [f"{point:g}" for point in points]
    ndcg = [f"NDCG@10, {key} CPU-s" for key in keys]
    head = ("contender", f"positions/s, {threads} threads", "positions/CPU-s", "peak RSS MiB", *ndcg, "HR@10")
    base, rows = figures[YARDSTICK], [head]
    for name, own in figures.items():
        memory = f"{own.facts['peak_rss_mib']} ({own.facts['peak_rss_mib'] / base.facts['peak_rss_mib']:.2f})"
        gains = [f"{own.facts['after_cpu_s'][key]['ndcg@10']:.4f}" for key in keys]
        values = (ratio(own.wall, base.wall), ratio(own.cpu, base.cpu), memory, *gains, f"{own.facts['hr@10']:.4f}")
        rows.append((name, *values))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratings", type=Path, help="ratings.dat of MovieLens-1M; without it a log is simulated")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="replay or rectools")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME",
                        help=f"of: {', '.join(CONTENDERS)}; the yardstick always takes part")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--threads", type=int, default=2, help="of the first measurement")
    parser.add_argument("--turns", type=int, default=7, help="turns of every contender in each measurement")
    parser.add_argument("--turn-seconds", type=float, default=3.0, help="of the first measurement; 0 = leave it out")
    parser.add_argument("--cpu-seconds", type=float, nargs="+", default=[60.0],
                        help="of training with one thread, after which quality is measured; ascending")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.setting = FULL
    if args.quick:
        args.setting, args.turns, args.turn_seconds, args.cpu_seconds = QUICK, 2, 0.1, [0.2, 0.4]
        args.threads = 1
    if args.cpu_seconds != sorted(set(args.cpu_seconds)) or args.cpu_seconds[0] <= 0:
        parser.error(f"--cpu-seconds must ascend from above 0, got {args.cpu_seconds}")
    return args


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} x {names[0]}" if names else f"{os.cpu_count()} processors"


def chosen(args: argparse.Namespace) -> dict[str, str]:
    """The interpreter of every contender that takes part."""
    given = dict(peer.split("=", 1) for peer in args.peer)
    pythons = {}
    for name, contender in CONTENDERS.items():
        if name not in (*args.contenders, YARDSTICK):
            continue
        if contender.environment and contender.environment not in given:
            reason = f"no --peer {contender.environment}=PYTHON"
            print(json.dumps({"benchmark": "pretrain", "contender": name, "skipped": reason}), flush=True)
            continue
        pythons[name] = given.get(contender.environment, sys.executable)
    return pythons


def main() -> None:
    args = arguments()
    pythons = chosen(args)
    if args.ratings:
        sequences = read_ratings(args.ratings)
    else:
        sequences = simulate(200, 300, 8_000) if args.quick else simulate(6_040, 3_416, 1_000_209)
    log = {
        "log": sequences.source, "sha256": sequences.sha256[:16], "users": len(sequences.offsets) - 1,
        "items": sequences.num_items, "events": len(sequences.items),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        test = write_data(sequences, data)
        figures = {name: Figures({}, [], []) for name in pythons}
        running = []
        if args.turn_seconds:
            running = start(pythons, args, data, args.threads)
            measure_speed(figures, running, args.turns, args.turn_seconds)
        if not (running and args.quick):  # there, the same processes go on: to start them is nearly all of the time
            for contender in running:
                contender.end()
            running = start(pythons, args, data, 1)
        measure_training(figures, running, args.turns, args.cpu_seconds, test)
    for name, own in figures.items():
        about = {**log, **args.setting, "threads": args.threads, "windows": CONTENDERS[name].windows}
        print(json.dumps({"benchmark": "pretrain", "contender": name, **about, **own.facts}))
    print("\nspeed and memory over the yardstick's, speed in the same turn; HR@10 after the last evaluation")
    print(f"log: {sequences.source}; load average {os.getloadavg()[0]:.1f} on {processor()}")
    print(table(figures, args.threads, args.cpu_seconds))


if __name__ == "__main__":
    main()
