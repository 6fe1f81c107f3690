"""How ``PreferenceModule`` learns, declared, documented and validated in one place: a tree of frozen dataclasses.

``TrainOptions`` (``recpo.training.trainer``) adds the data, the policy and the trainer of a run. Flags, YAML keys and
the keyword arguments of ``recpo.train`` are its fields.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Literal

from torch.nn import Parameter
from torch.optim import Adam, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler

from recpo.base.contracts import AdvantageEstimator, Objective, Policy, RewardFunction
from recpo.base.errors import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    OpenUnitInterval,
    PositiveFloat,
    PositiveInt,
    RecpoError,
    Seed,
    validate_range,
    validate_ranges,
)
from recpo.base.features import Reads
from recpo.base.types import SamplingOptions
from recpo.objectives.likelihood import Likelihood

OldPolicy = Literal["current", "logged", "snapshot"]
ReferencePolicy = Literal["frozen", "cached", "snapshot"]
Preference = Literal["best_vs_rest", "best_vs_worst"]
CandidateSource = Literal["draws", "beam", "catalog"]
Monitor = Literal["NDCG", "AUC_other", "AUC_mixed", "SNIPS", "pair_loss", "reward", "log_likelihood"]
MatmulPrecision = Literal["highest", "high", "medium"]
OptimizerFactory = Callable[[Iterable[Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]
PolicyFactory = Callable[[int], Policy]


@dataclass(frozen=True)
class CriticOptions:
    """Options of the heads that the objective needs: state values (PPO), Q-values, or scores (a reward model).

    Attributes:
        hidden: width of their hidden layer.
        shares_encoder: their losses also train the encoder. false: they only read the encoder's states, which gives the
            better reward model if the policy was trained on the same log.
        gamma: discount factor of Q-learning; 0 = a regression on the rewards.
        double: double Q-learning: the online network chooses the best next item, and the target network evaluates it.
            false: the target network does both.
        target_every: optimizer steps between two updates of the target network (encoder and Q head).
        target_rate: how far an update moves it toward the online network; 1 = all the way.
    """

    hidden: PositiveInt = 64
    shares_encoder: bool = True
    gamma: float = 0.5
    double: bool = True
    target_every: PositiveInt = 1
    target_rate: float = 0.05

    def __post_init__(self) -> None:
        validate_ranges(self, "critic.")
        validate_range(0.0 <= self.gamma < 1.0, "critic.gamma", "must lie in [0, 1)", self.gamma)
        validate_range(0.0 < self.target_rate <= 1.0, "critic.target_rate", "must lie in (0, 1]", self.target_rate)


@dataclass(frozen=True)
class CollapseLimits:
    """Limits at which a run with a rollout counts as collapsed and stops. null disables a limit.

    Attributes:
        min_valid_share: minimum share of draws that are items.
        min_unique_share: minimum share of draws that are not repeats in their group.
        min_entropy: minimum entropy of the distribution that candidates are drawn from, in nats per item.
        max_kl: maximum mean of ``logp_old - logp``, in nats per token.
        zero_group_steps: number of consecutive steps in which no group has an advantage.
        min_ndcg_share: minimum validation NDCG, as a share of the highest one so far. With
            ``trainer.num_sanity_val_steps`` -1, the initial policy's value counts too.
    """

    min_valid_share: NonNegativeFloat | None = 0.5
    min_unique_share: NonNegativeFloat | None = 0.2
    min_entropy: NonNegativeFloat | None = 0.1
    max_kl: NonNegativeFloat | None = 2.0
    zero_group_steps: NonNegativeInt | None = 50
    min_ndcg_share: NonNegativeFloat | None = 0.3

    def __post_init__(self) -> None:
        validate_ranges(self, "rollout.collapse.")


@dataclass(frozen=True)
class RolloutOptions:
    """The candidates of a context, and how long the policy learns from them.

    Attributes:
        candidates: ``draws`` from the snapshot; its top-ranked items (``beam``); or every item 1..V in the order of the
            ids (``catalog``), for policies with one token per item. With ``catalog`` nothing is drawn, so the drawing
            options must keep their defaults, and a phase stores ``batches * batch_size * V`` rewards and
            log-probabilities (up to 13 bytes each; none with ``epochs: 1``).
        group_size: G, candidates per context; not used by ``catalog``.
        batches: optimizer steps in one pass over a phase, that is, the number of batches that share a snapshot.
        epochs: passes over a phase, with the same candidates; a phase has ``batches * epochs`` optimizer steps.
        temperature: divides the scores before the softmax (at every token). ``pi_old`` is the distribution that is
            drawn from, so with any value but 1, ratios do not start at 1.
        top_p: draw only from the smallest set of choices whose probability reaches this share; 1 = from all.
        replacement: false draws distinct items for a group, by Gumbel top-k: fewer repeats, but the gradient is no
            longer unbiased.
        logged_share: share of a group that is taken from the context's logged items instead of draws.
        duplicates: ``keep`` repeated draws of an item, which is correct for sampling with replacement, or ``drop`` all
            but the first from their group.
        resamples: dynamic sampling (DAPO, arXiv 2503.14476): groups whose rewards are all equal are redrawn up to this
            many times, and left out if they are still equal; 0 = they stay, without a gradient.
        preference: turn a scored group into a preference list for the DPO family: the candidate with the highest reward
            against all lower ones (``best_vs_rest``) or against the lowest (``best_vs_worst``).
        kl_coef: weight of the KL penalty in the reward of draws (arXiv 2203.02155; ``apply_kl_penalty`` of verl): every
            token gets ``-kl_coef (logp_old - logp_ref)``, and the last one the score too. ``GAEAdvantage`` reads the
            rewards of tokens, other advantages their sum. The objective's own kl_coef is the penalty in the loss; one
            of them may be 0, or none.
        max_kl: in nats per item. If the policy moves farther than this from the snapshot, measured by KL(old || policy)
            with the k3 estimate over an optimizer step, that step and the rest of the phase are skipped.
        monitor_reward: a second reward of the candidates, which is only logged. If it falls while the reward rises, the
            policy exploits errors of the reward.
        collapse: limits at which the run counts as collapsed and stops.
    """

    candidates: CandidateSource = "draws"
    group_size: int = 8
    batches: PositiveInt = 4
    epochs: PositiveInt = 2
    temperature: PositiveFloat = 1.0
    top_p: float = 1.0
    replacement: bool = True
    logged_share: ClosedUnitInterval = 0.0
    duplicates: Literal["keep", "drop"] = "keep"
    resamples: NonNegativeInt = 0
    preference: Preference | None = None
    kl_coef: NonNegativeFloat = 0.0
    max_kl: PositiveFloat | None = None
    monitor_reward: RewardFunction | None = None
    collapse: CollapseLimits = CollapseLimits()

    def __post_init__(self) -> None:
        validate_ranges(self, "rollout.")
        validate_range(self.group_size >= 2, "rollout.group_size", "must be at least 2", self.group_size)
        validate_range(0 < self.top_p <= 1, "rollout.top_p", "must lie in (0, 1]", self.top_p)
        if self.kl_coef and self.candidates != "draws":
            raise RecpoError(
                f"rollout.kl_coef estimates a divergence from draws, and rollout.candidates is {self.candidates}: set "
                "candidates to draws, or kl_coef to 0 and the kl_coef of the objective instead",
                code="conflicting_options",
                field="rollout.kl_coef",
            )
        if self.kl_coef and self.preference is not None:
            raise RecpoError(
                "rollout.kl_coef changes rewards after rollout.preference has sorted the candidates by them: leave one "
                "of them out",
                code="conflicting_options",
                field="rollout.preference",
            )
        if self.candidates == "beam" and self.resamples:
            raise RecpoError(
                "rollout.resamples draws groups again, but a beam is always the same: set rollout.candidates to draws, "
                "or resamples to 0",
                code="conflicting_options",
                field="rollout.resamples",
            )
        drawing = ("temperature", "top_p", "replacement", "logged_share", "duplicates", "resamples", "preference")
        defaults = {field.name: field.default for field in fields(self)}
        changed = [f"rollout.{name}" for name in drawing if getattr(self, name) != defaults[name]]
        if self.candidates == "catalog" and changed:
            raise RecpoError(
                f"rollout.candidates: catalog takes every item in the order of the ids, which leaves nothing to "
                f"{', '.join(changed)}: leave that out, or set candidates to draws",
                code="conflicting_options",
                field=changed[0],
            )

    @property
    def phase_steps(self) -> int:
        """Optimizer steps of a phase."""
        return self.batches * self.epochs

    @property
    def num_logged(self) -> int:
        """Number of places in a group that logged items may take."""
        return round(self.group_size * self.logged_share)

    @property
    def sampling(self) -> SamplingOptions:
        """How one item is drawn."""
        return SamplingOptions(self.temperature, self.top_p, self.replacement)


@dataclass(frozen=True)
class KLTarget:
    """Adjusts the ``kl_coef`` of the objective or of the rollout, which is then only the initial value.

    One of the two must be above 0, and the other 0.

    Attributes:
        target: divergence to maintain, in nats per token. In the loss: KL(policy || reference) by the objective's own
            estimator. In the reward: KL(old || reference), the mean of ``logp_old - logp_ref`` over the draws.
        horizon: number of items over which the coefficient may change by a factor of about e^0.2.
    """

    target: PositiveFloat
    horizon: PositiveInt = 10_000

    def __post_init__(self) -> None:
        validate_ranges(self, "adaptive_kl.")


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """What the policy learns, from which data, and how.

    Attributes:
        objective: the loss: Likelihood pre-trains, every other objective aligns.
        advantage: turns feedback into advantages, for objectives that use advantages.
        reward: turns feedback into rewards, for advantages and objectives that use rewards.
        optimizer: optimizer of the dense parameters.
        sparse_optimizer: optimizer of sparse embedding tables.
        lr_scheduler: learning-rate schedule, stepped once per optimizer step.
        old_policy: the source of old log-probabilities: none, so every ratio is 1 (current); the propensity column of
            the log (logged); or a frozen copy (snapshot).
        snapshot_every: optimizer steps between two refreshes of the snapshot. With a rollout, it is refreshed at the
            start of every phase instead.
        reference: keep a frozen copy of the initial policy (frozen), cache its log-probabilities of the training rows
            (cached), or use the snapshot of old_policy, which is the previous iterate (snapshot).
        rollout: learn from candidates that the snapshot draws for every request and that the reward scores; null =
            learn from the logged items.
        adaptive_kl: adjust the kl_coef of the objective, or of the rollout, to reach a given divergence from the
            reference policy.
        critic: heads that the objective trains beside the policy (state values, Q-values, scores).
        anchor_coef: weight of the likelihood of all logged positions of the same batches, added to the loss and divided
            by the same denominator as the objective (the number of candidates, with a rollout); 0 = none.
        item_coef: weight of the item likelihood in pre-training of semantic ids, added to the loss: a softmax over the
            catalog of the policy's states and item vectors. It is divided by the number of codes, so with 1 an item
            counts as much as all its codes together. Lists still come from the codes alone. 0 = none.
        mask_shared_prefix: for semantic ids, leave the codes that a rejected item shares with the chosen one out of the
            rejected side of a preference list (RAD-DPO, arXiv 2602.23964).
        validation_k: list length of the validation metrics. A smaller catalog shortens the lists, but the names of the
            metrics stay.
        monitor: validation metric that ``best.ckpt`` and ``patience`` follow. ``NDCG``: of lists against logged
            positives. ``SNIPS``: mean logged reward under the policy, weighted by propensities. ``AUC_other``:
            log-probability of a user's positives against the user's other exposures. ``AUC_mixed``: .6 of it and .4 of
            the same against items that the user was never shown. ``pair_loss``: logistic loss of
            the same pairs, lower is better; not for objectives of preference lists. ``reward``: mean of
            ``validation_reward`` over the lists. ``log_likelihood``: of a reward model. null = a default for the
            objective (docs/training.md); resolved.yaml records it.
        validation_reward: reward of the lists of held-out users, for example a reward model that the policy is not
            trained on.
        seed: seed of initialization, dropout and sampling. The order of the data has its own seed (data.seed).
    """

    objective: Objective = Likelihood()  # noqa: RUF009  frozen
    advantage: AdvantageEstimator | None = None
    reward: RewardFunction | None = None
    optimizer: OptimizerFactory = Adam
    sparse_optimizer: OptimizerFactory = SparseAdam
    lr_scheduler: SchedulerFactory | None = None
    old_policy: OldPolicy = "current"
    snapshot_every: PositiveInt = 100
    reference: ReferencePolicy = "frozen"
    rollout: RolloutOptions | None = None
    adaptive_kl: KLTarget | None = None
    critic: CriticOptions = field(default_factory=CriticOptions)
    anchor_coef: NonNegativeFloat = 0.0
    item_coef: NonNegativeFloat = 0.0
    mask_shared_prefix: bool = False
    validation_k: PositiveInt = 10
    monitor: Monitor | None = None
    validation_reward: RewardFunction | None = None
    seed: Seed = 0

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether logged positions whose advantage is 0 are not scored: neither the loss nor the anchor reads them."""
        return self.objective.zero_advantage_is_inert and not self.anchor_coef and self.rollout is None

    def __post_init__(self) -> None:
        validate_ranges(self)


def rewards_of(options: LearningOptions) -> dict[str, RewardFunction]:
    """The given rewards, by the names of their options."""
    rewards = {
        "reward": options.reward,
        "validation_reward": options.validation_reward,
        "rollout.monitor_reward": None if options.rollout is None else options.rollout.monitor_reward,
    }
    return {name: reward for name, reward in rewards.items() if reward is not None}


def reads_of(policy: Policy, options: LearningOptions) -> Reads:
    """What batches must contain for the policy, the objective and the rewards."""
    reads = policy.reads | options.objective.reads
    for reward in rewards_of(options).values():
        reads |= reward.reads
    return reads


@dataclass(frozen=True)
class WeightAverage:
    """An exponential moving average of the weights over optimizer steps (Polyak and Juditsky 1992).

    Attributes:
        decay: share of the average that a step keeps; the average covers about ``1 / (1 - decay)`` steps.
    """

    decay: OpenUnitInterval = 0.99

    def __post_init__(self) -> None:
        validate_ranges(self, "weight_averaging.")
