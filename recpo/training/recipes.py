"""Recipes: the sizes of a training, by stated rules from the size of the log, and how policies are trained with them.

``recpo init`` writes the sizes and the first recipes into configurations, ``recpo fit`` trains all of them, and
``benchmarks/published.py`` trains with the sizes (docs/training.md). No rule names a data set: all that counts is how
many events, users and items a log has, and how many events most users have.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from recpo.log.inspection import LogCounts
from recpo.log.prepared import Prepared
from recpo.log.shaping import WatchQuantiles

_LENGTHS: Final = (20, 50, 100, 200)
_WINDOW: Final = 50  # events that the attention of a policy reads which is aligned and served
_SMALL_LOG: Final = 5_000  # events
_LARGE_CATALOG: Final = 200_000  # items
_HELD_IN: Final = 0.85  # share of the contexts in the training period
_STEPS: Final = {"pretrain": 2_000, "mpo": 850, "gbpo": 500}  # optimizer steps to reach with epochs of small logs
_MOST_EPOCHS: Final = {"pretrain": 12, "mpo": 8, "gbpo": 3}
_LEAST_EPOCHS: Final = {"pretrain": 3, "mpo": 1, "gbpo": 1}
_MOST_STEPS: Final = 3_000  # steps of MPO, each of which scores the full catalog
_RANKING_EPOCHS: Final = {"ranking": 30, "semantic": 20}
_BATCH_EVENTS: Final = {"ranking": 2_560, "semantic": 1_280}  # events of an optimizer step
_BATCHES: Final = (16, 256)  # contexts
_WIDE_LOG: Final = 50_000  # events
_FEW_EVENTS: Final = 20  # per user
_FULL_DROPOUT: Final = 16  # events per item
_DROPOUT: Final = {"ranking": (0.2, 0.5), "semantic": (0.1, 0.3)}
_PATIENCE: Final = (3, 10)
_AVERAGED_STEPS: Final = (100, 1_000)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one training configuration.

    Attributes:
        history_length: events of a window.
        max_history: events that the policy can read.
        dim: width of item vectors.
        layers: blocks of the encoder.
        dropout: probability of the encoder's dropout.
        batch_size: contexts of a batch.
        epochs: passes over the training period.
        steps: approximate number of optimizer steps.
        max_steps: training ends after this many steps; None = after the epochs.
        patience: validations without an improvement that end the training.
    """

    history_length: int
    max_history: int
    dim: int
    layers: int
    dropout: float
    batch_size: int
    epochs: int
    steps: int
    max_steps: int | None = None
    patience: int = _PATIENCE[0]

    @property
    def averaging_decay(self) -> float:
        """Decay of a moving average of the weights over half an epoch, but at least 100 steps and at most 1,000."""
        averaged = float(np.clip(self.steps / self.epochs / 2, *_AVERAGED_STEPS))
        return 1 - float(f"{1 / averaged:.0e}")  # one digit

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``recpo train``, by dotted name, of pre-training as an end in itself."""
        return {
            "data.batch_size": self.batch_size,
            "data.layout.init_args.history_length": self.history_length,
            "trainer.max_epochs": self.epochs,
            "policy.init_args.max_history": self.max_history,
            "policy.init_args.dim": self.dim,
            "policy.init_args.layers": self.layers,
            "policy.init_args.dropout": self.dropout,
            "weight_averaging.decay": self.averaging_decay,
            "patience": self.patience,
        }


def sizes_of(step: str, counts: LogCounts) -> Sizes:
    """Sizes of one training, from the size of the log.

    With E events, U users, V items and q, the 90th percentile of the events per user:

    - ``history_length``: the least of 20, 50, 100 and 200 that holds q events; "ranking": 2 q events. Policies that are
      aligned and served attend to at most 50.
    - ``layers``: 2; "ranking", "semantic": 1 if E / U < 20, since one layer relates what few events have to say.
    - ``dropout``: .2; none in "mpo", whose ratios it would disturb. "ranking": ``0.5 - 0.1 log2(E / 16 V)`` in steps of
      .05, from .2 to .5: a tenth less for every doubling of the events per item, because the vectors of items overfit
      first. "semantic": .2 less, from .1 to .3, as items share their codes.
    - ``dim``: 64, or 32 if E < 5,000. "ranking", "semantic": 128, or 64 if E < 50,000.
    - ``batch_size``: a power of two. "ranking": an optimizer step has up to 2,560 events ("semantic": 1,280), in 16 to
      256 contexts (8 to 128).
    - ``epochs``: "pretrain", "gbpo", "mpo": for about 2,000, 500 and 850 optimizer steps, within limits. "ranking": 30,
      "semantic": 20, of which ``patience`` leaves out what does not help.
    - ``patience``: 3; "ranking": ``300 / sqrt(U)`` from 3 to 10, because the mean over few held-out users is noisy;
      "semantic": one more.

    Args:
        step: "pretrain" and "gbpo" (windows of users) or "mpo" (requests), for a policy that is aligned and served;
            "ranking" (catalog softmax) and "semantic" (semantic ids): pre-training as an end in itself, for as long as
            validation improves.
        counts: size of the log.
    """
    return _ranking(step, counts) if step in _RANKING_EPOCHS else _aligned(step, counts)


def counts_of(data: Prepared) -> LogCounts:
    """The size of prepared data, as ``recpo init`` counts it in a log; requests and q are of the training period."""
    splits = data.manifest["counts"]["splits"]
    events = sum(int(counts["targets"]) for counts in splits.values())
    per_user, requests = [], 0
    for columns in data.train_columns(["user_index", "timestamp"]):
        user, moment = columns["user_index"], columns["timestamp"]
        per_user.append(np.unique(user, return_counts=True)[1])
        requests += int(len(user) and 1 + ((user[1:] != user[:-1]) | (moment[1:] != moment[:-1])).sum())
    found = np.concatenate(per_user) if per_user else np.zeros(1)
    return LogCounts(
        events,
        users=int(data.manifest["num_users"]),
        items=data.num_items,
        requests=requests,
        events_per_user=int(np.ceil(np.quantile(found, 0.9))),
        days=None,
    )


def _aligned(step: str, counts: LogCounts) -> Sizes:
    history = _at_least(min(counts.events_per_user, _LENGTHS[-1]))
    window = min(history, _WINDOW)
    windows = max(counts.events / window, min(_users(counts), counts.events / 2))
    contexts = max(1, int(_HELD_IN * (counts.requests if step == "mpo" else windows)))
    batch = _power_of_two(contexts / 16, 8, 128)
    if step == "mpo" and counts.items > _LARGE_CATALOG:
        batch = min(batch, 32)
    steps = -(-contexts // batch)
    epochs = max(_LEAST_EPOCHS[step], min(_MOST_EPOCHS[step], round(_STEPS[step] / steps)))
    most = _MOST_STEPS if step == "mpo" and epochs * steps > _MOST_STEPS else None
    return Sizes(
        history_length=window,
        max_history=history,
        dim=64 if counts.events >= _SMALL_LOG else 32,
        layers=2,
        dropout=0.0 if step == "mpo" else 0.2,
        batch_size=batch,
        epochs=epochs,
        steps=most or epochs * steps,
        max_steps=most,
    )


def _ranking(step: str, counts: LogCounts) -> Sizes:
    history = _at_least(counts.events_per_user * (2 if step == "ranking" else 1))
    users, events = _users(counts), max(1, counts.events)
    windows = max(users, events / (0.75 * history))  # windows overlap by a quarter; each user has at least one
    batch_events = _BATCH_EVENTS[step]
    scale = batch_events / _BATCH_EVENTS["ranking"]
    batch = _power_of_two(batch_events * windows / events, *(round(scale * size) for size in _BATCHES))
    epochs = _RANKING_EPOCHS[step]
    patience = int(np.clip(round(300 / math.sqrt(users)), *_PATIENCE))
    return Sizes(
        history_length=history,
        max_history=history,
        dim=128 if events >= _WIDE_LOG else 64,
        layers=2 if events >= _FEW_EVENTS * users else 1,
        dropout=_dropout(step, counts),
        batch_size=batch,
        epochs=epochs,
        steps=epochs * -(-int(windows) // batch),
        patience=patience + (step == "semantic"),
    )


def _users(counts: LogCounts) -> float:
    """The users of the whole log, at least one; only a part may have been inspected."""
    share = 1.0 if counts.is_whole else counts.events / max(1, counts.events_per_user)
    return max(1.0, counts.users * share)


def _dropout(step: str, counts: LogCounts) -> float:
    least, most = _DROPOUT[step]
    doublings = math.log2(max(counts.events, 1) / max(counts.items, 1) / _FULL_DROPOUT)
    return float(np.clip(round(20 * (most - 0.1 * doublings)) / 20, least, most))


def _at_least(events: float) -> int:
    return next((length for length in _LENGTHS if length >= events), _LENGTHS[-1])


def _power_of_two(value: float, least: int, most: int) -> int:
    power = least
    while power * 2 <= min(value, most):
        power *= 2
    return power


#: Directories beside the configurations of ``init``, and of a fit.
PREPARED: Final = "prepared"
RUNS: Final = "runs"
#: The reward model that is a factorization.
FACTORS: Final = "factors"
#: Recipes, by the names of their runs.
PRETRAIN: Final = "pretrain"
#: Pre-training as an end in itself, for logs of positives alone: wider, and for longer.
PRETRAIN_RANKING: Final = "pretrain_ranking"
MPO: Final = "mpo"
GBPO: Final = "gbpo"
VALUE_DPO: Final = "value_dpo"
VALUE_DPO_LIKELIHOOD: Final = "value_dpo_likelihood"
MPO_MODEL: Final = "mpo_reward_model"
GSPO: Final = "gspo"
#: The reward model that MPO_MODEL trains toward: it reads the features of items, users and requests.
REWARD_MODEL: Final = "reward_model"

#: Recipes whose policies are also tilted.
TILTED: Final = (PRETRAIN, PRETRAIN_RANKING, MPO, MPO_MODEL)
_LEAST_RECIPES: Final = 2
_LEAST_STEPS: Final = 20


class Recipe(NamedTuple):
    """How a policy or a reward model is trained.

    Attributes:
        configs: recpo's own configurations.
        sizes: the kind of its contexts (``sizes_of``); None = the configuration has its sizes.
        after: name of the run that it starts from.
        reward: ``FACTORS`` or ``REWARD_MODEL``, which it trains toward.
        changed: options that differ from the configurations, by dotted name.
    """

    configs: tuple[str, ...]
    sizes: str | None
    after: str | None = None
    reward: str | None = None
    changed: Mapping[str, Any] = MappingProxyType({})

    def options(self, root: Path, counts: LogCounts, label: str, share: float = 1.0) -> dict[str, Any]:
        """The options that differ from the configurations, by dotted name.

        Args:
            root: the directory with the runs and the factors.
            counts: size of the log.
            label: class of its label.
            share: of the full length of the training.
        """
        options: dict[str, Any] = {} if self.after is None else {"init_from": root / RUNS / self.after}
        if self.reward == FACTORS:
            options["reward.init_args.factors"] = root / FACTORS
        if self.reward == REWARD_MODEL:
            arguments = {"run": str(root / RUNS / REWARD_MODEL), "calibrated": False}
            options["reward"] = json.dumps({"class_path": "LearnedReward", "init_args": arguments})
        if self.configs == (GBPO,) and label != WatchQuantiles.__name__:  # no ranks, of which a quarter is positive
            options["advantage.init_args.positive_fraction"] = None
        return {**options, **self.changed, **self._sized(counts, share)}

    def full_length(self, counts: LogCounts) -> int:
        """Optimizer steps for a log of this size; with patience, training stops after about half of its epochs."""
        steps = sizes_of(self.sizes or "gbpo", counts).steps
        return steps // 2 if self.sizes == "ranking" else steps

    def _sized(self, counts: LogCounts, share: float) -> dict[str, Any]:
        """The options that follow from the size of the log and the length of the training."""
        if self.sizes is None:
            return {}
        sizes = sizes_of(self.sizes, counts)
        options = sizes.options
        if self.sizes != "ranking":
            longest = sizes.max_history if self.sizes == "mpo" else sizes.history_length
            options = {"data.batch_size": sizes.batch_size, "data.layout.init_args.history_length": longest}
            options["trainer.max_epochs"] = sizes.epochs
            if self.after is None:
                options |= {"policy.init_args.dim": sizes.dim, "policy.init_args.max_history": sizes.max_history}
                options["policy.init_args.attention_length"] = sizes.history_length
        most = sizes.max_steps if share >= 1 else max(_LEAST_STEPS, round(share * self.full_length(counts)))
        return options if most is None else {**options, "trainer.max_steps": most}


RECIPES: Final[Mapping[str, Recipe]] = {
    PRETRAIN: Recipe(("pretrain",), "pretrain"),
    MPO: Recipe(("mpo",), "mpo", PRETRAIN, FACTORS),
    # its probabilities spread farther over the catalog than the grades of a factorization, which are shrunk to their
    # mean: at the temperature of mpo.yaml, lists leave more of what the log supports (docs/features.md)
    MPO_MODEL: Recipe(("mpo",), "mpo", PRETRAIN, REWARD_MODEL, {"objective.init_args.temperature": 0.05}),
    GBPO: Recipe(("gbpo",), "gbpo", PRETRAIN),
    VALUE_DPO: Recipe(("preference_lists", "value_dpo"), "gbpo", PRETRAIN),
    # with features, what a list compares also moves items in no list: the likelihood holds them (docs/features.md)
    VALUE_DPO_LIKELIHOOD: Recipe(
        ("preference_lists", "value_dpo_kuairand"),
        "gbpo",
        PRETRAIN,
        changed={"objective.init_args.nll_coef": 0.1, "optimizer.init_args.weight_decay": 1.0},
    ),
    GSPO: Recipe(("on_policy", "gspo"), "mpo", PRETRAIN, FACTORS),
    REWARD_MODEL: Recipe(("features_reward_model",), None),
    PRETRAIN_RANKING: Recipe(("published_catalog",), "ranking", changed={"optimizer.init_args.lr": 0.002}),
}


class Recipes(NamedTuple):
    """Recipes to train, and which share of their full length is enough to train them all."""

    names: Sequence[str]
    enough: float = 0.5


def recipes_of(wanted: Sequence[str], spare: Sequence[str] = ()) -> list[Recipes]:
    """What to train, the most wanted first: all at full length, all that are wanted, and without the last ones.

    Args:
        wanted: the most promising recipe first.
        spare: recipes that promise no more than these.
    """
    least = min(_LEAST_RECIPES, len(wanted))
    kept = [Recipes(wanted[:number]) for number in range(len(wanted), least - 1, -1)]
    return [Recipes([*wanted, *spare], 1.0), *kept] if spare else kept


#: A log of positives alone: where not even half of the long training fits, the short one is better.
POSITIVES: Final = (Recipes([PRETRAIN_RANKING, PRETRAIN]), Recipes([PRETRAIN_RANKING]), Recipes([PRETRAIN]))
