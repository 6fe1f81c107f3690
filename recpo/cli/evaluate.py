"""``recpo evaluate``: full-catalogue ranking of held-out users by trained policies and baselines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from rich.console import Console
from tqdm import tqdm

from recpo import __version__
from recpo.atomic import write_json
from recpo.cli.config import save_resolved
from recpo.cli.true_rewards import true_rewards
from recpo.data.datamodule import evaluation_batches
from recpo.data.prepared import Prepared
from recpo.errors import RecpoError
from recpo.evaluation.baselines import Popularity, UniformlyRandom
from recpo.evaluation.held_out import RankingResult, evaluate_ranking
from recpo.evaluation.measures import Measure, Recommender
from recpo.evaluation.report import Contender, differences_table, metrics_document, metrics_table
from recpo.evaluation.segments import history_length
from recpo.training.run import load_policy, read_finished
from recpo.types import EvaluationBatch

Baseline = Literal["popularity", "positives", "random"]


def evaluate(
    prepared: Path,
    out: Path,
    run: list[Path] | Path = [],  # noqa: B006  jsonargparse prints it
    baselines: list[Baseline] = ["popularity"],  # noqa: B006
    split: Literal["valid", "test"] = "test",
    ks: list[int] = [10, 50],  # noqa: B006
    positive_threshold: float = 0.75,
    exclude_seen: bool = True,
    truth: Path | None = None,
    checkpoint: Literal["best", "last"] = "best",
    batch_size: int = 512,
    device: str = "auto",
) -> None:
    """Ranks the whole catalogue for every held-out user and reports accuracy, dislikes and coverage with intervals.

    Several contenders are evaluated on the same users; their differences get paired intervals. Writes one JSON document
    and prints tables.

    Args:
        prepared: directory written by ``recpo prepare``.
        out: JSON document to write; an existing one is replaced.
        run: run directory written by ``recpo train``, or a list of them, ``[runs/a, runs/b]``, on the same items.
        baselines: popularity (training events), positives (training positives), random.
        split: held-out period.
        ks: list lengths; the tables show the first.
        positive_threshold: watch quantile from which a held-out event is positive, unless its item was disliked.
        exclude_seen: leave a user's earlier items out of the lists, and such held-out events out of the targets.
        truth: directory that ``recpo simulate`` wrote: adds the true expected reward and the true probability of a
            dislike, means over the first k places, on the first day of the period.
        checkpoint: which checkpoint of the runs.
        batch_size: users scored at once.
        device: where policies run: auto (a GPU if there is one), cpu, cuda, cuda:1 and so on.
    """
    data = Prepared.open(prepared)
    target = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    measures = () if truth is None else (true_rewards(truth, data, split, ks),)
    setting = _Setting(data, split, ks, positive_threshold, exclude_seen, measures, batch_size, target)
    runs = [run] if isinstance(run, Path) else run
    for path in runs:
        if read_finished(path)["catalogue_checksum"] != data.catalogue_checksum:
            raise RecpoError(
                f"{path} was trained on other items than {prepared} holds: name its own prepared directory"
            )
    contenders = [Contender(name, "baseline", setting.evaluate(_baseline(name, data), 1, name)) for name in baselines]
    for name, path in zip(_names(runs), runs, strict=True):
        policy = load_policy(path, checkpoint).to(target)
        recommender = Recommender(policy.recommend, policy.log_prob)
        contenders.append(Contender(name, "run", setting.evaluate(recommender, policy.max_history, name)))
        del policy
    if not contenders:
        raise RecpoError("nothing to evaluate: name at least one --run or one of --baselines")
    write_json(out, metrics_document(contenders, setting=setting.described()))
    save_resolved(out)
    _print(contenders, setting, out)


@dataclass(frozen=True)
class _Setting:
    """What all contenders share."""

    data: Prepared
    split: Literal["valid", "test"]
    ks: Sequence[int]
    positive_threshold: float
    exclude_seen: bool
    measures: Sequence[Measure]
    batch_size: int
    device: torch.device

    def evaluate(self, recommender: Recommender, max_history: int, name: str) -> RankingResult:
        return evaluate_ranking(
            recommender,
            self._batches(max_history, name),
            num_items=self.data.num_items,
            ks=self.ks,
            positive_threshold=self.positive_threshold,
            exclude_seen=self.exclude_seen,
            measures=self.measures,
            user_segments=[history_length()],
        )

    def _batches(self, max_history: int, name: str) -> Iterator[EvaluationBatch]:
        users = sum(shard["users"] for shard in self.data.manifest["shards"][self.split])
        with tqdm(total=users, desc=f"evaluate {name}", unit="user", disable=None, leave=False) as bar:
            for batch in evaluation_batches(self.data.root, self.split, max_history, self.batch_size):
                yield move_data_to_device(batch, self.device)
                bar.update(len(batch.seen))

    def described(self) -> dict[str, object]:
        return {
            "recpo_version": __version__,
            "split": self.split,
            "ks": list(self.ks),
            "positive_threshold": self.positive_threshold,
            "exclude_seen": self.exclude_seen,
            "num_items": self.data.num_items,
            "catalogue_checksum": self.data.catalogue_checksum,
            "max_context": self.data.manifest["max_context"],
        }


def _baseline(name: Baseline, data: Prepared) -> Recommender:
    if name == "random":
        return Recommender(UniformlyRandom(data.num_items).recommend)
    counts = data.item_counts("train_count" if name == "popularity" else "train_positives")
    return Recommender(Popularity(torch.from_numpy(counts)).recommend)


def _names(runs: Sequence[Path]) -> list[str]:
    """The directories' own names where they differ, whole paths otherwise."""
    names = [path.resolve().name for path in runs]
    names = names if len(set(names)) == len(names) else [str(path) for path in runs]
    if len(set(names)) < len(names):
        raise RecpoError(f"run: the same directory is named twice: {', '.join(names)}")
    return names


def _print(contenders: Sequence[Contender], setting: _Setting, out: Path) -> None:
    counts, console = contenders[0].result.counts, Console()
    k = setting.ks[0]
    title = f"{setting.split} period, {counts['users']:,} users, {setting.data.num_items:,} items, all ranked"
    console.print(metrics_table(contenders, k, title=title))
    if len(contenders) > 1:
        console.print(differences_table(contenders, k))
    removed = counts["positive_events_removed_as_seen"]
    seen = f"excluded ({removed:,} positive events of seen items removed)" if setting.exclude_seen else "kept"
    console.print(
        f"seen items: {seen}; positives: watch quantile >= {setting.positive_threshold:g} and not disliked, "
        f"{counts['users_with_positives']:,} users have some; {counts['users_with_dislikes']:,} have dislikes"
    )
    console.print(f"{out}", highlight=False, soft_wrap=True)
