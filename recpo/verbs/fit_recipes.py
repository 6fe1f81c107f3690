"""How ``fit`` trains policies and reward models, and which of them it wants most; ``init`` writes the first of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from recpo.log.inspection import LogCounts
from recpo.log.shaping import WatchQuantiles
from recpo.training.sizes import sizes_of

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
        options: dict[str, Any] = {"data.batch_size": sizes.batch_size, "trainer.max_epochs": sizes.epochs}
        if self.after is None:
            options |= {"policy.init_args.dim": sizes.dim, "policy.init_args.max_history": sizes.max_history}
        if self.sizes == "ranking":
            options |= {"policy.init_args.layers": sizes.layers, "policy.init_args.dropout": sizes.dropout}
            options |= {"weight_averaging.decay": sizes.averaging_decay, "patience": sizes.patience}
        elif self.after is None:
            options["policy.init_args.attention_length"] = sizes.history_length
        longest = sizes.max_history if self.sizes == "mpo" else sizes.history_length
        options["data.layout.init_args.history_length"] = longest
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
