"""Rejects options that do not fit together, before training starts, with a message that names the option to change."""

from collections.abc import Mapping

from recpo.base.contracts import (
    AdvantageEstimator,
    Objective,
    Policy,
    Requirement,
    ReturnEstimator,
    RewardFunction,
    StatePolicy,
    TokenAdvantageEstimator,
)
from recpo.base.errors import RecpoError
from recpo.base.feedback import FEEDBACK_KINDS
from recpo.base.types import SlateTraits
from recpo.objectives.likelihood import Likelihood
from recpo.training.options import LearningOptions, RolloutOptions

OF_STATES = frozenset(
    {Requirement.VALUE, Requirement.ENTROPY, Requirement.DIVERGENCE, Requirement.Q_VALUE, Requirement.SCORE}
)
"""Requirements that are computed from the states of the policy."""
COMPARED = frozenset({Requirement.REFERENCE, Requirement.DIVERGENCE})
"""Requirements that compare the policy with the reference policy."""
OF_LOG = frozenset({Requirement.Q_VALUE, Requirement.SCORE, Requirement.LABELS, Requirement.GRADES})
"""Requirements that the log supplies for its own items only, not for candidates."""


def all_requirements(objective: Objective, advantage: AdvantageEstimator | None) -> frozenset[str]:
    """The requirements of the objective, and the requirements that follow from them."""
    requires = objective.requires
    if Requirement.ADVANTAGES in requires and advantage is not None:
        requires |= advantage.requires
    return with_implied(requires)


def with_implied(requires: frozenset[str]) -> frozenset[str]:
    """Requirements, and those that they imply."""
    return requires.union(*(one.implies for one in Requirement if one in requires))


def requirements_of(options: LearningOptions) -> frozenset[str]:
    """The requirements of everything that a policy learns from."""
    requires = all_requirements(options.objective, options.advantage)
    penalized = options.rollout is not None and options.rollout.kl_coef > 0
    return requires | ({Requirement.REFERENCE} if penalized else frozenset())


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
    learned = slates  # the slates that the objective compares: the logged ones, or candidates
    if rollout is not None:
        learned = SlateTraits(is_preference_list=rollout.preference is not None, resampled=True)
    _validate_policy(policy, objective)
    _validate_requirements(options, learned)
    _validate_advantages(objective, options.advantage)
    if rollout is not None:
        _validate_rollout(options, rollout, slates)
        if rollout.candidates == "catalog":
            _validate_catalog(policy, objective, options.reward)
        if rollout.kl_coef:
            _validate_penalized_rewards(options)
    _validate_slates(options, learned)
    if options.mask_shared_prefix:
        validate_shared_prefix(policy, objective)
    if options.item_coef:
        _validate_item_likelihood(policy, objective)


def _validate_requirements(options: LearningOptions, slates: SlateTraits) -> None:
    """Raises if the options do not supply what objective, advantage and rewards require.

    Feedback of the log is another matter, since only the log says whether it has any (``feedback_warnings``). For a
    single step on the policy's own samples, ratios of 1 to the current policy are correct; that is what ``Reinforce``
    and ``GBPO`` compute. An objective that requires the old policy must be told which one it is.
    """
    objective, advantage, rollout = options.objective, options.advantage, options.rollout
    if unknown := sorted(objective.requires - set(Requirement)):
        raise RecpoError(
            f"objective {type(objective).__name__} asks for {unknown}, which training does not know: it knows "
            f"{', '.join(Requirement)}",
            code="unknown_name",
            field="objective",
        )
    supplied = {
        Requirement.ADVANTAGES: advantage is not None,
        Requirement.REWARDS: options.reward is not None,
        Requirement.CATALOG: rollout is not None and rollout.candidates == "catalog",
        Requirement.CHOSEN: slates.is_preference_list,
        Requirement.OLD: options.old_policy != "current",
        Requirement.PROPENSITIES: options.old_policy == "logged",
        Requirement.VALUE: isinstance(advantage, ReturnEstimator),
    }
    for requirement in Requirement:
        if requirement in objective.requires and not supplied.get(requirement, True):
            raise requirement.missing(objective)
    if Requirement.REWARDS in all_requirements(objective, advantage) and options.reward is None:
        raise Requirement.REWARDS.missing(objective if advantage is None else advantage)


def _validate_policy(policy: Policy, objective: Objective) -> None:
    """Raises if the policy cannot compute what the objective requires."""
    name = type(objective).__name__
    asked = objective.requires & OF_STATES
    if asked and not isinstance(policy, StatePolicy):
        raise RecpoError(
            f"objective {name} asks for {', '.join(sorted(asked))}, which {type(policy).__name__} has no states for: "
            "set policy, e.g. class_path: CatalogSoftmaxPolicy",
            code="unsupported",
            field="policy",
        )
    if Requirement.DIVERGENCE in asked and getattr(type(policy), "divergence", None) is StatePolicy.divergence:
        raise RecpoError(
            f"objective {name} with kl_kind full compares distributions, and {type(policy).__name__} has no method "
            "divergence: set objective.init_args.kl_kind to an estimator, e.g. k3",
            code="unsupported",
            field="objective.init_args.kl_kind",
        )
    if not policy.has_exact_log_prob and objective.reads_log_prob and not isinstance(objective, Likelihood):
        raise RecpoError(
            f"objective {name} needs exact log-probabilities, the policy's normalizer is an estimate: set its "
            "normalizer to full (a policy pre-trained with sampled negatives loads as it is)",
            code="conflicting_options",
            field="policy.normalizer",
        )


def _validate_advantages(objective: Objective, advantage: AdvantageEstimator | None) -> None:
    """Raises if the advantages are not of the kind that the objective reads."""
    name, estimator = type(objective).__name__, type(advantage).__name__
    if isinstance(advantage, TokenAdvantageEstimator) and not objective.reads_token_advantages:
        raise RecpoError(
            f"{estimator} tells the tokens of an item apart, and objective {name} weighs items as a whole: set "
            "objective to class_path: GRPO, or advantage to class_path: GroupNormalizedAdvantage",
            code="conflicting_options",
            field="advantage",
        )
    if advantage is not None and Requirement.VALUE in advantage.requires - objective.requires:
        raise RecpoError(
            f"{estimator} needs the values of a critic, which objective {name} does not train: set objective to "
            "class_path: PPO, or advantage to class_path: GroupNormalizedAdvantage",
            code="conflicting_options",
            field="objective",
        )


def _validate_slates(options: LearningOptions, slates: SlateTraits) -> None:
    """Raises if the slates are not of the kind that the objective compares, or there is no reference for them."""
    name, requires, reference = type(options.objective).__name__, options.objective.requires, options.reference
    if slates.is_preference_list and Requirement.CHOSEN not in requires:
        raise RecpoError(
            f"objective {name} takes every item of a slate for feedback, but PreferenceListLayout holds sampled "
            "rejected items: set data.layout to class_path: SequenceLayout or ImpressionLayout",
            code="conflicting_options",
            field="data.layout",
        )
    if reference == "cached" and Requirement.DIVERGENCE in requires:
        raise RecpoError(
            f"reference: cached keeps log-probabilities of the logged items, and objective {name} with kl_kind full "
            "compares all items: set reference to frozen, or objective.init_args.kl_kind to an estimator, e.g. k3",
            code="conflicting_options",
            field="reference",
        )
    if slates.resampled and reference == "cached" and Requirement.REFERENCE in requires:
        raise RecpoError(
            "reference: cached keeps the log-probabilities of fixed slates, but data.layout samples other items in "
            "every epoch: set reference to frozen",
            code="conflicting_options",
            field="reference",
        )
    if slates.is_preference_list and options.anchor_coef and options.rollout is None:
        raise RecpoError(
            "anchor_coef adds the likelihood of every item of a slate, rejected ones too: set "
            "objective.init_args.nll_coef instead, which adds that of the chosen item",
            code="conflicting_options",
            field="anchor_coef",
        )
    if reference == "snapshot" and requires & COMPARED and options.old_policy != "snapshot":
        raise RecpoError(
            f"reference: snapshot takes the old policy's copy: set old_policy to snapshot, not {options.old_policy}",
            code="conflicting_options",
            field="old_policy",
        )


def _validate_item_likelihood(policy: Policy, objective: Objective) -> None:
    """Raises if the policy has no codes, or if the objective is not the likelihood of all exposures."""
    if not isinstance(policy, StatePolicy) or policy.num_tokens == 1:
        raise RecpoError(
            f"item_coef adds the likelihood of whole items to that of their codes, and {type(policy).__name__} has no "
            "codes: leave it out, or set policy to class_path: SemanticIdPolicy",
            code="unsupported",
            field="item_coef",
        )
    if not isinstance(objective, Likelihood) or objective.positive_only:
        raise RecpoError(
            f"item_coef adds the likelihood of every logged item to that of its codes, which objective "
            f"{type(objective).__name__} does not follow: leave it out, or set objective to class_path: Likelihood",
            code="conflicting_options",
            field="item_coef",
        )


def _validate_rollout(options: LearningOptions, rollout: RolloutOptions, slates: SlateTraits) -> None:
    """Raises if candidates cannot be drawn, scored or learned from; ``slates`` are those of the log."""
    objective = options.objective
    if not slates.one_request:
        raise RecpoError(
            "rollout draws candidates at the moment of a request: set data.layout to class_path: ImpressionLayout",
            code="conflicting_options",
            field="data.layout",
        )
    if options.reward is None:
        raise RecpoError(
            "rollout scores candidates: set reward, e.g. class_path: LearnedReward",
            code="missing_option",
            field="reward",
        )
    if options.old_policy != "snapshot":
        raise RecpoError(
            f"rollout draws candidates from a snapshot: set old_policy to snapshot, not {options.old_policy}",
            code="conflicting_options",
            field="old_policy",
        )
    if objective.requires & OF_LOG:
        raise RecpoError(
            f"objective {type(objective).__name__} learns from what the log shows, not from candidates: leave rollout "
            "out",
            code="conflicting_options",
            field="rollout",
        )
    _validate_draws(objective, rollout)
    if rollout.preference is not None and Requirement.CHOSEN not in objective.requires:
        raise RecpoError(
            f"rollout.preference makes preference lists, which {type(objective).__name__} does not compare: leave it "
            "out, or take e.g. class_path: SoftmaxDPO",
            code="unused_option",
            field="rollout.preference",
        )


def _validate_penalized_rewards(options: LearningOptions) -> None:
    """Raises if nothing learns from the KL penalty in the rewards, or if there is no other policy to stay close to."""
    objective, advantage = options.objective, options.advantage
    unweighted = advantage is None or Requirement.ADVANTAGES not in objective.requires
    if unweighted or Requirement.REWARDS not in all_requirements(objective, advantage):
        learner = type(objective if unweighted else advantage).__name__
        raise RecpoError(
            f"rollout.kl_coef subtracts a KL penalty from rewards, from which {learner} computes no advantages: set it "
            "to 0, or use e.g. objective GRPO with advantage GroupNormalizedAdvantage",
            code="unused_option",
            field="rollout.kl_coef",
        )
    if options.reference != "frozen":
        raise RecpoError(
            "rollout.kl_coef keeps draws close to the policy that training starts from, and reference is "
            f"{options.reference}: set reference to frozen, or rollout.kl_coef to 0",
            code="conflicting_options",
            field="reference",
        )


def _validate_draws(objective: Objective, rollout: RolloutOptions) -> None:
    """Raises if the objective expects draws and gets distinct candidates, or the other way round."""
    accepted, drawn = objective.accepted_candidates, rollout.candidates == "draws"
    if accepted == "any":
        return
    name, wants_draws = type(objective).__name__, accepted == "draws"
    if wants_draws != drawn:
        raise RecpoError(
            f"objective {name} expects {'draws' if wants_draws else 'every candidate once'}, and rollout.candidates is "
            f"{rollout.candidates}: set objective.init_args.candidates_are_draws to {'true' if drawn else 'false'}, or "
            "change rollout.candidates",
            code="conflicting_options",
            field="objective.init_args.candidates_are_draws",
        )
    if wants_draws and (not rollout.replacement or rollout.duplicates == "drop" or rollout.num_logged):
        raise RecpoError(
            f"objective {name} reads how often an item was drawn: set rollout.replacement to true, duplicates to keep "
            "and logged_share to 0",
            code="conflicting_options",
            field="rollout",
        )


def _validate_catalog(policy: Policy, objective: Objective, reward: RewardFunction | None) -> None:
    """Raises if the complete catalog cannot be the slate of a context."""
    if not isinstance(policy, StatePolicy) or policy.num_tokens > 1:
        raise RecpoError(
            f"rollout.candidates: catalog scores every item at once, and {type(policy).__name__} has "
            f"{policy.num_tokens} tokens per item: set candidates to beam or draws, or policy to class_path: "
            "CatalogSoftmaxPolicy",
            code="unsupported",
            field="rollout.candidates",
        )
    if not policy.has_exact_log_prob:
        raise RecpoError(
            "rollout.candidates: catalog needs exact log-probabilities: set policy.normalizer to full",
            code="conflicting_options",
            field="policy.normalizer",
        )
    if Requirement.VALUE in objective.requires:
        raise RecpoError(
            f"objective {type(objective).__name__} trains a critic at every candidate, and over the whole catalog the "
            "expectation is known: set rollout.candidates to draws",
            code="conflicting_options",
            field="rollout.candidates",
        )
    if reward is not None and Requirement.RANKS in reward.requires:
        raise Requirement.RANKS.missing(reward, ", and those of the catalog are in the order of the ids")


def validate_shared_prefix(policy: Policy, objective: Objective) -> None:
    """Raises if a rejected item cannot share a prefix with the chosen one."""
    if policy.num_tokens == 1 or Requirement.CHOSEN not in objective.requires:
        raise RecpoError(
            "mask_shared_prefix leaves out codes that a rejected item shares with the chosen one: it needs a policy of "
            f"several codes per item and an objective over preference lists, got {type(policy).__name__} and "
            f"{type(objective).__name__}; set it to false",
            code="unused_option",
            field="mask_shared_prefix",
        )


def feedback_warnings(options: LearningOptions, counts: Mapping[str, int]) -> list[str]:
    """A warning about feedback that the objective learns from and that is rare in the log.

    Args:
        options: what the policy learns from.
        counts: train events of each of ``FEEDBACK_KINDS``.

    Raises:
        RecpoError: nothing can be learned: no train event is positive, or none is labeled.
    """
    found = ", ".join(f"{counts[kind]:,} {kind}" for kind in FEEDBACK_KINDS)
    none = f", and the train period has none (its events: {found})"
    labeled = sum(counts[kind] for kind in ("positive", "neutral", "skipped"))
    warnings = []
    for part in (options.advantage, options.reward, options.objective):
        requires = frozenset() if part is None else with_implied(part.requires)
        if Requirement.POSITIVES in requires and not counts["positive"]:
            raise Requirement.POSITIVES.missing(part, none)
        if Requirement.LABELS in requires and not labeled:
            raise Requirement.LABELS.missing(part, none)
        if Requirement.LABELS in requires and not counts["positive"]:
            warnings.append(f"no train event is positive by the log's own definition (its events: {found})")
        if Requirement.DISLIKES in requires and not counts["disliked"]:
            warnings.append(f"{Requirement.DISLIKES.missing(part, none)}; nothing is pushed down for being disliked")
    return warnings
