"""What objectives, advantage estimators and rewards need: the vocabulary of their ``requires``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple, Self

from recpo.base.errors import RecpoError

_SET_POLICY: Final = "set policy, e.g. class_path: CatalogSoftmaxPolicy"
_PREPARE_LABEL: Final = "prepare the log again with the columns that --label reads, or with another --label"


class _Definition(NamedTuple):
    """A member of ``Requirement``, which documents the fields."""

    name: str
    use: str
    remedy: str
    option: str
    fields: Mapping[str, str | None] = {}
    implies: Iterable[str] = ()


class Requirement(StrEnum):
    """What an objective, an advantage estimator or a reward needs beyond ``logp.policy``.

    Training computes the inputs of an objective from these (``recpo.training.inputs``), and refuses options and logs
    that cannot supply them before the first step (``recpo.training.contradictions``). A member equals its name, so
    ``frozenset({"advantages", "old"})`` says the same as the members.

    Attributes:
        use: what a component does with it, as the rest of a sentence that begins with the name of the component.
        remedy: how to supply it.
        option: the option that supplies it.
        fields: the fields of ``ObjectiveInputs`` that an objective reads, each with the column of ``Slates`` that it
            copies; None = training computes it. ``old`` and ``reference`` are fields of ``LogProbs``.
        implies: further requirements that it needs itself.
    """

    use: str
    remedy: str
    option: str
    fields: Mapping[str, str | None]
    implies: frozenset[str]

    def __new__(cls, *definition: object) -> Self:
        """A text with attributes."""
        defined = _Definition(*definition)  # type: ignore[arg-type]  # enum unpacks the tuple
        member = str.__new__(cls, defined.name)
        member._value_ = defined.name
        member.use, member.remedy, member.option = defined.use, defined.remedy, defined.option
        member.fields, member.implies = defined.fields, frozenset(defined.implies)
        return member

    ADVANTAGES = _Definition(
        "advantages",
        use="weights its loss by advantages",
        remedy="set advantage, e.g. class_path: TernaryAdvantage",
        option="advantage",
        fields={"advantages": None},
    )
    REWARDS = _Definition(
        "rewards",
        use="needs rewards",
        remedy="set reward, e.g. class_path: LoggedReward",
        option="reward",
        fields={"rewards": "reward"},
    )
    CHOSEN = _Definition(
        "chosen",
        use="compares a chosen item with rejected ones",
        remedy="set data.layout to class_path: PreferenceListLayout, or with a rollout its preference to best_vs_rest",
        option="data.layout",
        fields={"chosen": "chosen"},
    )
    CATALOG = _Definition(
        "catalog",
        use="reads the whole catalog, in the order of the ids",
        remedy="set rollout.candidates to catalog",
        option="rollout.candidates",
    )
    RANKS = _Definition(
        "ranks",
        use="reads the ranks of candidates, in descending order of probability",
        remedy="set rollout.candidates to draws or beam",
        option="rollout.candidates",
    )
    PROPENSITIES = _Definition(
        "propensities",
        use="divides by the propensities of the log, as the old policy",
        remedy="set old_policy to logged, or objective.init_args.ips_power to 0",
        option="old_policy",
        implies=["old"],
    )
    OLD = _Definition(
        "old",
        use="weights or clips by the ratio to an old policy, and against the current one every ratio is 1",
        remedy="set old_policy to snapshot, or to logged where the log has propensities; without an old policy use "
        "class_path: Reinforce",
        option="old_policy",
        fields={"old": None},
    )
    REFERENCE = _Definition(
        "reference",
        use="compares the policy with a reference policy",
        remedy="set reference to frozen, or to snapshot with old_policy: snapshot",
        option="reference",
        fields={"reference": None},
    )
    DIVERGENCE = _Definition(
        "divergence",
        use="compares the policy with a reference policy, over all items",
        remedy="set reference to frozen, or objective.init_args.kl_kind to an estimator, e.g. k3",
        option="reference",
        fields={"divergence": None},
    )
    ENTROPY = _Definition(
        "entropy",
        use="reads the entropy of the policy at its states",
        remedy=_SET_POLICY,
        option="policy",
        fields={"entropy": None},
    )
    VALUE = _Definition(
        "value",
        use="needs the state values of a critic and their targets",
        remedy="set advantage to class_path: GAEAdvantage and objective to class_path: PPO, or without a critic "
        "objective.init_args.value_coef to 0",
        option="advantage",
        fields={"values": None, "values_old": None, "returns": None},
    )
    Q_VALUE = _Definition(
        "q_value",
        use="trains a head of Q-values with a target network",
        remedy=_SET_POLICY,
        option="policy",
        fields={"q_values": None, "q_targets": None},
        implies=["rewards"],
    )
    SCORE = _Definition(
        "score", use="trains a head of scores", remedy=_SET_POLICY, option="policy", fields={"scores": None}
    )
    LABELS = _Definition(
        "labels", use="learns from labels", remedy=_PREPARE_LABEL, option="label", fields={"label": "label"}
    )
    STEP_LABELS = _Definition(
        "step_labels",
        use="compares labels over the whole optimizer step",
        remedy=_PREPARE_LABEL,
        option="label",
        implies=["labels"],
    )
    DISLIKES = _Definition(
        "dislikes",
        use="learns from dislikes too",
        remedy="if the log has such a column, name it with --columns.dislike",
        option="columns.dislike",
        fields={"dislike": "dislike"},
    )
    GRADES = _Definition(
        "grades",
        use="learns from the graded feedback of the log",
        remedy=_PREPARE_LABEL,
        option="label",
        fields={"grades": "grade"},
        implies=["labels", "dislikes"],
    )
    POSITIVES = _Definition(
        "positives",
        use="learns from positive events",
        remedy="prepare the log again with another --label or a lower --feedback.positive_threshold",
        option="label",
        fields={"positive": "positive"},
    )
    BEHAVIORS = _Definition(
        "behaviors",
        use="learns from behaviors of the log",
        remedy="name their columns in --behaviors of recpo prepare",
        option="behaviors",
        fields={"behaviors": "behaviors"},
    )

    def missing(self, component: object, found: str = "") -> RecpoError:
        """The error that ``component`` does not get it; ``found`` says what there is instead."""
        message = f"{type(component).__name__} {self.use}{found}: {self.remedy}"
        return RecpoError(message, code="missing_option", field=self.option)
