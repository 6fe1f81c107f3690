"""Rejects options that do not fit together, before training starts, with a message that names the option to change."""

from __future__ import annotations

from collections.abc import Mapping

from recpo.base.contracts import (
    AdvantageEstimator,
    Objective,
    Policy,
    ReturnEstimator,
    RewardFunction,
    StatePolicy,
    TokenAdvantageEstimator,
)
from recpo.base.errors import RecpoError
from recpo.base.feedback import FEEDBACK_KINDS
from recpo.base.types import SlateTraits
from recpo.objectives.likelihood import Likelihood, WeightedLikelihood
from recpo.objectives.policy_gradient import PolicyGradientObjective
from recpo.training.options import LearningOptions, RolloutOptions

KNOWN = frozenset(
    {"advantages", "rewards", "chosen", "old", "reference", "value", "entropy", "q_value", "score", "labels", "grades"}
    | {"behaviors", "positives", "divergence"}
)
OF_STATES = frozenset({"value", "entropy", "divergence", "q_value", "score"})
"""Requirements that are computed from the states of the policy."""
COMPARED = frozenset({"reference", "divergence"})
"""Requirements that compare the policy with the reference policy."""


def all_requirements(objective: Objective, advantage: AdvantageEstimator | None) -> frozenset[str]:
    """The requirements of the objective, and the requirements that follow from them."""
    requires = objective.requires
    if "advantages" in requires and advantage is not None:
        requires |= advantage.requires
    return requires | ({"rewards"} if "q_value" in requires else frozenset())


def requirements_of(options: LearningOptions) -> frozenset[str]:
    """The requirements of everything that a policy learns from."""
    requires = all_requirements(options.objective, options.advantage)
    penalized = options.rollout is not None and options.rollout.kl_coef > 0
    return requires | ({"reference"} if penalized else frozenset())


def validate_options(policy: Policy, options: LearningOptions, slates: SlateTraits) -> None:
    """Raises if policy, options and data do not fit together.

    Args:
        policy: the policy to train.
        options: what it learns from.
        slates: properties of the data's slates.

    Raises:
        RecpoError: names the option to change.
    """
    objective, rollout = options.objective, options.rollout
    if objective.reads_catalog and (rollout is None or rollout.candidates != "catalog"):
        raise RecpoError(
            f"objective {type(objective).__name__} reads the whole catalog: set rollout.candidates to catalog"
        )
    validate_policy(policy, objective)
    validate_feedback(objective, options.advantage, options.reward)
    validate_old_policy(objective, options.old_policy)
    if rollout is not None:
        validate_rollout(objective, rollout, slates, options.reward, options.old_policy)
        if rollout.candidates == "catalog":
            validate_catalog(policy, objective, options.reward)
        if rollout.kl_coef:
            validate_penalized_rewards(options)
        slates = SlateTraits(is_preference_list=rollout.preference is not None, resampled=True)
    validate_slates(objective, slates, options.reference, 0.0 if rollout else options.anchor_coef)
    validate_snapshot_reference(objective, options.reference, options.old_policy)
    if options.mask_shared_prefix:
        validate_shared_prefix(policy, objective)
    if options.item_coef:
        validate_item_likelihood(policy, objective)


def validate_item_likelihood(policy: Policy, objective: Objective) -> None:
    """Raises if the policy has no codes, or if the objective is not the likelihood of all exposures."""
    if not isinstance(policy, StatePolicy) or policy.num_tokens == 1:
        raise RecpoError(
            f"item_coef adds the likelihood of whole items to that of their codes, and {type(policy).__name__} has no "
            "codes: leave it out, or set policy to class_path: SemanticIdPolicy"
        )
    if not isinstance(objective, Likelihood) or objective.positive_only:
        raise RecpoError(
            f"item_coef adds the likelihood of every logged item to that of its codes, which objective "
            f"{type(objective).__name__} does not follow: leave it out, or set objective to class_path: Likelihood"
        )


def validate_policy(policy: Policy, objective: Objective) -> None:
    """Raises if the policy cannot compute what the objective requires."""
    name = type(objective).__name__
    asked = objective.requires & OF_STATES
    if asked and not isinstance(policy, StatePolicy):
        raise RecpoError(
            f"objective {name} asks for {', '.join(sorted(asked))}, which {type(policy).__name__} has no states for: "
            "set policy, e.g. class_path: CatalogSoftmaxPolicy"
        )
    if "divergence" in asked and getattr(type(policy), "divergence", None) is StatePolicy.divergence:
        raise RecpoError(
            f"objective {name} with kl_kind full compares distributions, and {type(policy).__name__} has no method "
            "divergence: set objective.init_args.kl_kind to an estimator, e.g. k3"
        )
    if not policy.has_exact_log_prob and objective.reads_log_prob and not isinstance(objective, Likelihood):
        raise RecpoError(
            f"objective {name} needs exact log-probabilities, the policy's normalizer is an estimate: set its "
            "normalizer to full (a policy pre-trained with sampled negatives loads as it is)"
        )


def validate_feedback(
    objective: Objective, advantage: AdvantageEstimator | None, reward: RewardFunction | None
) -> None:
    """Raises if advantages, rewards or values are required and not given."""
    name, requires = type(objective).__name__, objective.requires
    if requires - KNOWN:
        raise RecpoError(f"objective {name} asks for {sorted(requires - KNOWN)}, which training does not know")
    if "advantages" in requires and advantage is None:
        raise RecpoError(f"objective {name} weighs by advantages: set advantage, e.g. class_path: TernaryAdvantage")
    if "rewards" in all_requirements(objective, advantage) and reward is None:
        asker = name if advantage is None else type(advantage).__name__
        raise RecpoError(f"{asker} needs rewards: set reward, e.g. class_path: LoggedReward")
    if "value" in requires and not isinstance(advantage, ReturnEstimator):
        raise RecpoError(
            f"objective {name} trains a critic, which {type(advantage).__name__} has no targets for: set advantage to "
            "class_path: GAEAdvantage, or objective.init_args.value_coef to 0"
        )
    if isinstance(advantage, TokenAdvantageEstimator) and not isinstance(objective, PolicyGradientObjective):
        raise RecpoError(
            f"{type(advantage).__name__} tells the tokens of an item apart, and objective {name} weighs items as a "
            "whole: set objective to class_path: GRPO, or advantage to class_path: GroupNormalizedAdvantage"
        )
    if advantage is not None and "value" in advantage.requires - requires:
        raise RecpoError(
            f"{type(advantage).__name__} needs the values of a critic, which objective {name} does not train: set "
            "objective to class_path: PPO, or advantage to class_path: GroupNormalizedAdvantage"
        )


def validate_old_policy(objective: Objective, old_policy: str) -> None:
    """Raises if all ratios would be 1.

    For a single step on the policy's own samples, ratios of 1 are correct; that is what ``Reinforce`` (and ``GBPO``
    without an old policy) computes. An objective that uses the ratio must be told which policy is the old one.
    """
    name = type(objective).__name__
    if isinstance(objective, WeightedLikelihood) and objective.ips_power and old_policy != "logged":
        raise RecpoError(
            f"objective {name} with ips_power above 0 divides by the propensities of the log, and old_policy is "
            f"{old_policy}: set it to logged, or objective.init_args.ips_power to 0"
        )
    if "old" in objective.requires and old_policy == "current":
        raise RecpoError(
            f"objective {name} weighs or clips by the ratio to an old policy, and against the current one every ratio "
            "is 1: set old_policy to snapshot, or to logged where the log has propensities; without an old policy use "
            "class_path: Reinforce"
        )


def validate_slates(objective: Objective, slates: SlateTraits, reference: str, anchor_coef: float) -> None:
    """Raises if the slates of the data are not of the kind that the objective compares."""
    name, wants_lists = type(objective).__name__, "chosen" in objective.requires
    if wants_lists and not slates.is_preference_list:
        raise RecpoError(
            f"objective {name} compares a chosen item with rejected ones: set data.layout to "
            "class_path: PreferenceListLayout, or with a rollout its preference to best_vs_rest"
        )
    if slates.is_preference_list and not wants_lists:
        raise RecpoError(
            f"objective {name} takes every item of a slate for feedback, but PreferenceListLayout holds sampled "
            "rejected items: set data.layout to class_path: SequenceLayout or ImpressionLayout"
        )
    if reference == "cached" and "divergence" in objective.requires:
        raise RecpoError(
            f"reference: cached keeps log-probabilities of the logged items, and objective {name} with kl_kind full "
            "compares all items: set reference to frozen, or objective.init_args.kl_kind to an estimator, e.g. k3"
        )
    if slates.resampled and reference == "cached" and "reference" in objective.requires:
        raise RecpoError(
            "reference: cached keeps the log-probabilities of fixed slates, but data.layout samples other items in "
            "every epoch: set reference to frozen"
        )
    if slates.is_preference_list and anchor_coef:
        raise RecpoError(
            "anchor_coef adds the likelihood of every item of a slate, rejected ones too: set "
            "objective.init_args.nll_coef instead, which adds that of the chosen item"
        )


def validate_rollout(
    objective: Objective, rollout: RolloutOptions, slates: SlateTraits, reward: RewardFunction | None, old_policy: str
) -> None:
    """Raises if candidates cannot be drawn, scored or learned from."""
    if not slates.one_request:
        raise RecpoError(
            "rollout draws candidates at the moment of a request: set data.layout to class_path: ImpressionLayout"
        )
    if reward is None:
        raise RecpoError("rollout scores candidates: set reward, e.g. class_path: LearnedReward")
    if old_policy != "snapshot":
        raise RecpoError(f"rollout draws candidates from a snapshot: set old_policy to snapshot, not {old_policy}")
    if objective.requires & {"q_value", "score", "labels", "grades"}:
        raise RecpoError(
            f"objective {type(objective).__name__} learns from what the log shows, not from candidates: leave rollout "
            "out"
        )
    validate_draws(objective, rollout)
    if rollout.preference is not None and "chosen" not in objective.requires:
        raise RecpoError(
            f"rollout.preference makes preference lists, which {type(objective).__name__} does not compare: leave it "
            "out, or take e.g. class_path: SoftmaxDPO"
        )


def validate_penalized_rewards(options: LearningOptions) -> None:
    """Raises if nothing learns from the KL penalty in the rewards, or if there is no other policy to stay close to."""
    objective, advantage = options.objective, options.advantage
    unweighted = advantage is None or "advantages" not in objective.requires
    if unweighted or "rewards" not in all_requirements(objective, advantage):
        learner = type(objective if unweighted else advantage).__name__
        raise RecpoError(
            f"rollout.kl_coef subtracts a KL penalty from rewards, from which {learner} computes no advantages: set it "
            "to 0, or use e.g. objective GRPO with advantage GroupNormalizedAdvantage"
        )
    if options.reference != "frozen":
        raise RecpoError(
            "rollout.kl_coef keeps draws close to the policy that training starts from, and reference is "
            f"{options.reference}: set reference to frozen, or rollout.kl_coef to 0"
        )


def validate_draws(objective: Objective, rollout: RolloutOptions) -> None:
    """Raises if the objective expects draws and gets distinct candidates, or the other way round."""
    wanted, drawn = objective.reads_draws, rollout.candidates == "draws"
    if wanted is None:
        return
    name = type(objective).__name__
    if wanted != drawn:
        raise RecpoError(
            f"objective {name} takes its candidates {'for draws' if wanted else 'to stand there once each'}, and "
            f"rollout.candidates is {rollout.candidates}: set objective.init_args.candidates_are_draws to "
            f"{'true' if drawn else 'false'}, or change rollout.candidates"
        )
    if wanted and (not rollout.replacement or rollout.duplicates == "drop" or rollout.num_logged):
        raise RecpoError(
            f"objective {name} reads how often an item was drawn: set rollout.replacement to true, duplicates to keep "
            "and logged_share to 0"
        )


def validate_catalog(policy: Policy, objective: Objective, reward: RewardFunction | None) -> None:
    """Raises if the complete catalog cannot be the slate of a context."""
    if not isinstance(policy, StatePolicy) or policy.num_tokens > 1:
        raise RecpoError(
            f"rollout.candidates: catalog scores every item at once, and {type(policy).__name__} has "
            f"{policy.num_tokens} tokens per item: set candidates to beam or draws, or policy to class_path: "
            "CatalogSoftmaxPolicy"
        )
    if not policy.has_exact_log_prob:
        raise RecpoError("rollout.candidates: catalog needs exact log-probabilities: set policy.normalizer to full")
    if "value" in objective.requires:
        raise RecpoError(
            f"objective {type(objective).__name__} trains a critic at every candidate, and over the whole catalog the "
            "expectation is known: set rollout.candidates to draws"
        )
    if reward is not None and reward.reads_ranks:
        raise RecpoError(
            f"reward {type(reward).__name__} reads the ranks of candidates, and with rollout.candidates: catalog "
            "they stand in the order of the ids: set candidates to draws or beam"
        )


def validate_snapshot_reference(objective: Objective, reference: str, old_policy: str) -> None:
    """Raises if the snapshot that should be the reference does not exist."""
    if reference == "snapshot" and objective.requires & COMPARED and old_policy != "snapshot":
        raise RecpoError(
            f"reference: snapshot takes the old policy's copy: set old_policy to snapshot, not {old_policy}"
        )


def validate_shared_prefix(policy: Policy, objective: Objective) -> None:
    """Raises if a rejected item cannot share a prefix with the chosen one."""
    if policy.num_tokens == 1 or "chosen" not in objective.requires:
        raise RecpoError(
            "mask_shared_prefix leaves out codes that a rejected item shares with the chosen one: it needs a policy of "
            f"several codes per item and an objective over preference lists, got {type(policy).__name__} and "
            f"{type(objective).__name__}; set it to false"
        )


def feedback_warnings(
    objective: Objective,
    advantage: AdvantageEstimator | None,
    reward: RewardFunction | None,
    counts: Mapping[str, int],
) -> list[str]:
    """A warning about feedback that the objective learns from and that is rare in the log.

    Args:
        objective: the objective.
        advantage: its advantages.
        reward: its rewards.
        counts: train events of each of ``FEEDBACK_KINDS``.

    Raises:
        RecpoError: nothing can be learned: no train event is positive, or none is labeled.
    """
    askers = {type(part).__name__: part.learns_from for part in (advantage, reward) if part is not None}
    if objective.requires & {"labels", "grades"}:
        learned = {"labels", "dislikes"} | ({"positives"} & objective.requires)
        askers[type(objective).__name__] = frozenset(learned)
    found = ", ".join(f"{counts[kind]:,} {kind}" for kind in FEEDBACK_KINDS)
    warnings = []
    for asker, kinds in askers.items():
        if "positives" in kinds and not counts["positive"]:
            raise RecpoError(
                f"{asker} learns from positive events, and the train period has none (its events: {found}): prepare "
                "the log again with another --label or a lower --feedback.positive_threshold"
            )
        if "labels" in kinds and not sum(counts[kind] for kind in ("positive", "neutral", "skipped")):
            raise RecpoError(
                f"{asker} learns from labels, and no event of the train period has one (its events: {found}): prepare "
                "the log again with the columns that --label reads, or with another --label"
            )
        if "labels" in kinds and not counts["positive"]:
            warnings.append(f"no train event is positive by the log's own definition (its events: {found})")
        if "dislikes" in kinds and not counts["disliked"]:
            warnings.append(
                f"{asker} learns from dislikes too, and the train period has none (its events: {found}): nothing is "
                "pushed down for being disliked; if the log has such a column, name it with --columns.dislike"
            )
    return warnings
