"""The extension points: the interfaces of a policy, an objective, an advantage estimator and a reward function.

``Requirement`` is the vocabulary in which objectives, advantages and rewards say what they need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, NamedTuple, Self

from torch import Tensor, nn

from recpo.base.errors import RecpoError, validate_ranges
from recpo.base.features import FeatureSchema, Reads
from recpo.base.feedback import FeedbackDefinition
from recpo.base.types import (
    Features,
    FeedbackBatch,
    Histories,
    LossOutput,
    ObjectiveInputs,
    Recommendations,
    SamplingOptions,
    Slates,
    catalog_slates,
)


class Policy(nn.Module, ABC):
    """A distribution over the catalog given a history.

    Attributes:
        num_items: catalog size ``V``; valid item ids are 1..V.
        num_tokens: ``T``, tokens per item.
        max_history: ``H``, the maximum number of history events it can read; callers keep the most recent ones.
        has_exact_log_prob: False if ``log_prob`` is an estimate (a sampled normalizer).
        reads: what batches must contain for it, beyond items, feedback and times.
        reads_timestamps: it uses ``Histories.timestamps``, so a server must provide them too.
        reads_item_features: it needs the features of its items (``set_item_features``).
        catalog_checksum: checksum of the items it was built for, if they are fixed before training (semantic ids);
            None = any catalog of ``num_items``.
    """

    num_items: int
    max_history: int
    num_tokens: int = 1
    has_exact_log_prob: bool = True
    reads: Reads = Reads()
    reads_timestamps: bool = False
    reads_item_features: bool = False
    catalog_checksum: str | None = None

    def set_item_counts(self, counts: Tensor) -> None:
        """Sets the training counts ``[V]`` of the items 1..V. Policies that do not use counts ignore them."""

    def set_schema(self, schema: FeatureSchema, behaviors: Sequence[str] = ()) -> None:
        """Creates the layers that read features or behaviors. Call it after construction and before loading weights.

        Policies that read neither ignore it.

        Args:
            schema: the fitted features of the prepared data.
            behaviors: the behaviors of the prepared data, in the order of their bits.

        Raises:
            RecpoError: the policy reads a feature or behavior that the data does not have.
        """

    def set_item_features(self, features: Features) -> None:
        """Sets the features of the items, leading shape ``[V + 1]``. Policies that do not read them ignore them."""

    def precompute_item_vectors(self) -> None:
        """Replaces id rows and encoded features with their sum, for serving. The policy then reads no item features."""

    def begin_step(self, seed: int) -> None:
        """Starts a training step. Random numbers that must be equal on every rank are drawn from ``seed``."""

    def tokens(self, item_ids: Tensor) -> Tensor:
        """The tokens ``[..., T]`` of items ``[...]``: their codes, or the items themselves if T = 1."""
        return item_ids[..., None]

    @abstractmethod
    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None) -> Tensor:
        """Log-probability of every slate item given the first ``visible`` events of its history.

        Args:
            batch: contexts and items.
            needed: ``[B, S]`` bool; other positions are not scored and are 0 in the result. None = ``slates.mask``.

        Returns:
            ``[B, S, T]`` float32; masked positions are 0.
        """

    @abstractmethod
    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """The ``k`` most probable items after the complete history, best first. Ties are ordered by item id.

        Args:
            histories: contexts; an empty history is allowed.
            k: list length; at most ``num_items``.
            exclude: ``[B, M]`` item ids that must not be recommended, padded with 0.
        """

    @abstractmethod
    def sample(
        self, histories: Histories, group_size: int, options: SamplingOptions = SamplingOptions()
    ) -> tuple[Tensor, Tensor]:
        """Draws ``group_size`` items per context.

        Returns:
            Item ids ``[B, G]`` and their log-probabilities ``[B, G, T]``, without gradient. An id is 0 if fewer than G
            items can be drawn or if a draw is not an item. The log-probabilities are under the distribution that
            ``options`` describes for a single draw (without replacement: the first draw).
        """


class StatePolicy(Policy):
    """A policy that scores items from one state per number of visible events. A critic can read the same states.

    Attributes:
        dim: width ``d`` of the states.
    """

    dim: int

    @abstractmethod
    def encode(self, histories: Histories) -> Tensor:
        """States ``[B, H + 1, d]``. State v summarizes the first v events."""

    @abstractmethod
    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        """See ``Policy.log_prob``. ``states`` is the result of ``encode`` if the caller already has it."""

    def catalog_log_prob(self, batch: FeedbackBatch, states: Tensor | None = None) -> Tensor:
        """Log-probability of every item after the complete history, ``[B, V, T]`` float32, with gradient.

        Column ``i - 1`` is item ``i``. The slates of ``batch`` are not read. The default is ``log_prob`` of a slate of
        all items; a policy with a faster way overrides it.

        Args:
            batch: contexts.
            states: the result of ``encode`` if the caller already has it.
        """
        return self.log_prob(batch._replace(slates=catalog_slates(batch.histories, self.num_items)), states=states)

    @abstractmethod
    def item_vectors(self, item_ids: Tensor) -> Tensor:
        """The vectors ``[..., d]`` that the encoder reads for the items ``[...]``; zero for id 0."""

    @abstractmethod
    def entropy(self, batch: FeedbackBatch, needed: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        """Entropy of the policy, in nats, at the state of every slate position, ``[B, S]``.

        The arguments are those of ``log_prob``. Positions that are masked or not needed are 0.
        """

    def divergence(
        self,
        batch: FeedbackBatch,
        reference: StatePolicy,
        needed: Tensor | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """Exact ``KL(self || reference)`` in nats over all choices of every token, ``[B, S, T]``, with gradient.

        For one token per item it is the divergence over the catalog; otherwise, at token t, that over the codes which
        may follow the item's codes before it. Its sum over the tokens, averaged over items drawn from the policy, is
        the divergence over the catalog.

        Args:
            batch: see ``log_prob``.
            reference: a policy of the same class and the same items; no gradient flows into it.
            needed: see ``log_prob``. Positions that are masked or not needed are 0.
            states: see ``log_prob``.

        Raises:
            RecpoError: this policy has no such method.
        """
        raise RecpoError(
            f"{type(self).__name__} has no method divergence: set objective.init_args.kl_kind to an estimator, e.g. k3",
            code="unsupported",
            field="objective.init_args.kl_kind",
        )


class DotProductPolicy(Policy):
    """A softmax over the catalog whose logits are dot products of one state with one vector per item.

    A grade of a factor model is such a product too, so a tilted policy of this kind is exact (``TiltedPolicy``).

    Attributes:
        dim: width ``d`` of states and vectors.
    """

    dim: int

    @abstractmethod
    def last_states(self, histories: Histories) -> Tensor:
        """States ``[B, d]`` after the complete histories: their products with ``output_vectors`` are the logits."""

    @abstractmethod
    def states_at(self, histories: Histories, context: Tensor, visible: Tensor) -> Tensor:
        """States ``[N, d]`` after the first ``visible [N]`` events of the histories ``context [N]``."""

    @abstractmethod
    def output_vectors(self) -> Tensor:
        """The vectors ``[V + 1, d]`` that states are multiplied with; row 0 is not an item."""


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


class Component:
    """What objectives, advantage estimators and rewards have in common: options, and what they require and read."""

    def __post_init__(self) -> None:
        """Checks the fields whose types are ranges (``recpo.base.errors``)."""
        validate_ranges(self, f"{type(self).__name__}.")

    @property
    def requires(self) -> frozenset[str]:
        """What it needs beyond ``logp.policy``: members of ``Requirement``, or their names.

        It may depend on the fields: with a KL penalty of 0, for example, no reference is scored. With ``STEP_LABELS``
        an advantage depends on the complete optimizer step (``FeedbackBatch.step_labels``).
        """
        return frozenset()

    @property
    def reads(self) -> Reads:
        """What batches must contain for it, beyond items, feedback and times."""
        return Reads()

    def for_behaviors(self, names: tuple[str, ...]) -> Self:
        """Itself or a copy, adapted to data whose behavior number b is ``names[b]``.

        Raises:
            RecpoError: it reads a behavior that the data lacks.
        """
        return self


class Objective(Component, ABC):
    """A loss over ``ObjectiveInputs``; implementations are frozen dataclasses whose fields are the hyper-parameters."""

    @property
    def num_scores(self) -> int:
        """``K``, the number of scores per item that "score" requests."""
        return 1

    @property
    def reads_log_prob(self) -> bool:
        """False if the loss does not depend on ``logp.policy``; ``logp.policy`` is then 0 everywhere."""
        return True

    @property
    def reads_token_advantages(self) -> bool:
        """True if advantages may differ between the tokens of an item."""
        return False

    @property
    def accepted_candidates(self) -> Literal["any", "draws", "distinct"]:
        """Which candidates of a rollout it accepts.

        draws: draws of the old policy, each as often as it was drawn. distinct: every candidate once, whatever its
        probability (beam, catalog).
        """
        return "any"

    @property
    def zero_advantage_is_inert(self) -> bool:
        """True if positions with ``advantage == 0`` change only the denominator, so that they need no scores."""
        return False

    @abstractmethod
    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """This batch's part of the denominator of the optimizer step (tokens, sequences or lists), a scalar tensor."""

    @abstractmethod
    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """The loss, divided by ``inputs.denominator`` if given, else by ``self.count(inputs)``."""


@dataclass(frozen=True)
class AdvantageEstimator(Component, ABC):
    """Turns feedback, rewards and values into advantages; implementations are frozen dataclasses.

    Attributes:
        whiten: ``(A - mean) / (std + 1e-8)`` over all items (or tokens) of the optimizer step, over its micro-batches
            and ranks (``objectives.advantages.whitened_advantage``). Training applies it to what the estimator
            returns, so an advantage of 0 is in general no longer 0.
    """

    whiten: bool = field(default=False, kw_only=True)

    @abstractmethod
    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """Returns advantages ``[B, S]``, 0 at masked positions, without gradient."""


class ReturnEstimator(AdvantageEstimator):
    """An advantage estimator that also computes the targets of a critic of state values."""

    @abstractmethod
    def advantages_and_returns(self, batch: FeedbackBatch, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """The advantages and the value targets, each ``[B, S]``, without gradient.

        Advantages are ``[B, S, T]`` if they differ between the tokens of an item.
        """


class TokenAdvantageEstimator(AdvantageEstimator):
    """An advantage estimator whose advantages differ between the tokens of an item."""

    @abstractmethod
    def token_advantages(self, batch: FeedbackBatch, tokens: Tensor) -> Tensor:
        """Returns advantages ``[B, S, T]``, 0 at masked positions, without gradient.

        Args:
            batch: the slates, with rewards.
            tokens: ``[B, S, T]`` of the slate items (``Policy.tokens``).
        """

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """The advantages ``[B, S]`` of items with one token each; ``values`` is not used."""
        return self.token_advantages(batch, batch.slates.item_ids.unsqueeze(-1)).squeeze(-1)


class RewardScope(NamedTuple):
    """The data that a reward can score: those that it was fitted or trained on.

    Attributes:
        catalog_checksum: of the items; None = any items.
        users_checksum: of the users whose rewards it looks up by ``FeedbackBatch.user_ids``; None = it reads histories.
        user_features_checksum: of the features of users that it reads (``Prepared.features_checksum``); None = not
            known.
        feedback: defines the feedback levels that it reads from histories; None = it reads none.
    """

    catalog_checksum: str | None = None
    users_checksum: str | None = None
    user_features_checksum: str | None = None
    feedback: FeedbackDefinition | None = None


class RewardFunction(Component, ABC):
    """Scores candidates, which come from the log or from the policy. Implementations are dataclasses."""

    @property
    def scopes(self) -> tuple[RewardScope, ...]:
        """The data that it can score, one scope for every reward that it is computed from; empty = any data."""
        return ()

    @property
    def needs_only_slates(self) -> bool:
        """Whether it copies rewards from logged slates, so that they are computed where batches are made."""
        return False

    @abstractmethod
    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """Returns rewards ``[B, S]``, without gradient. A candidate with reward nan (unknown) leaves its slate."""
