"""The plug points: what recpo asks of a policy, an objective, an advantage estimator and a reward function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from recpo.features.schema import FeatureSchema, Reads
from recpo.types import (
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
        max_history: ``H``, the most history events it can read; callers keep the most recent ones.
        has_exact_log_prob: False where ``log_prob`` is an estimate (a sampled normalizer).
        reads_timestamps: it uses ``Histories.timestamps``, so whoever serves it must hand them over too.
        reads_behaviors: it uses ``Histories.behaviors``.
        reads_user: it uses ``Histories.user``.
        reads_context: it uses ``Histories.context``.
        reads_item_features: it is to be given the features of its items (``set_item_features``).
        catalog_checksum: of the items that it was built for, where that is fixed before training (semantic ids);
            None = any catalog of ``num_items``.
    """

    num_items: int
    max_history: int
    num_tokens: int = 1
    has_exact_log_prob: bool = True
    reads_timestamps: bool = False
    reads_behaviors: bool = False
    reads_user: bool = False
    reads_context: bool = False
    reads_item_features: bool = False
    catalog_checksum: str | None = None

    @property
    def reads(self) -> Reads:
        """What batches have to hold for it beyond items, feedback and times."""
        return Reads(self.reads_behaviors, self.reads_user, self.reads_context)

    def set_item_counts(self, counts: Tensor) -> None:
        """Hands over the training counts ``[V]`` of the items 1..V, for policies that use them; others ignore them."""

    def set_schema(self, schema: FeatureSchema, behaviors: Sequence[str] = ()) -> None:
        """Makes the parts of a policy that read features or behaviors: after its construction, before its weights.

        Policies that read neither ignore it.

        Args:
            schema: the fitted features of the prepared data.
            behaviors: its behaviors, in the order of their bits.

        Raises:
            RecpoError: the policy reads what the data does not have.
        """

    def set_item_features(self, features: Features) -> None:
        """Hands over the features of the items, leading shape ``[V + 1]``, for policies that read them; see above."""

    def precompute_item_vectors(self) -> None:
        """Replaces id rows and encoded features by their sum, for serving: the policy reads no item features then."""

    def begin_step(self, seed: int) -> None:
        """Says that a training step begins; what must be drawn alike on every rank is drawn from ``seed``."""

    def tokens(self, item_ids: Tensor) -> Tensor:
        """The tokens ``[..., T]`` of items ``[...]``: their codes, or the items themselves where T = 1."""
        return item_ids[..., None]

    @abstractmethod
    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None) -> Tensor:
        """Log-probability of every slate item given the first ``visible`` events of its history.

        Args:
            batch: contexts and items.
            needed: ``[B, S]`` bool; positions outside it are not scored and come back as 0. None = ``slates.mask``.

        Returns:
            ``[B, S, T]`` float32; masked positions are 0.
        """

    @abstractmethod
    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """The ``k`` most probable items after the whole history, best first; ties go to the smaller id.

        Args:
            histories: contexts; an empty history is allowed.
            k: list length; at most ``num_items``.
            exclude: ``[B, M]`` item ids that must not be recommended, 0 pads.
        """

    @abstractmethod
    def sample(
        self,
        histories: Histories,
        group_size: int,
        options: SamplingOptions = SamplingOptions(),  # noqa: B008  immutable
    ) -> tuple[Tensor, Tensor]:
        """Draws ``group_size`` items per context.

        Returns:
            ids ``[B, G]``, 0 where fewer than G items can be drawn or a draw is no item, and their log-probabilities
            ``[B, G, T]`` under the distribution that ``options`` describe, from which one item is drawn (without
            replacement: the first); no gradient.
        """


class StatePolicy(Policy):
    """A policy that scores items from one state per number of visible events, which a critic may read too.

    Attributes:
        dim: width ``d`` of the states.
    """

    dim: int

    @abstractmethod
    def encode(self, histories: Histories) -> Tensor:
        """States ``[B, H + 1, d]``: state v is what the policy knows after the first v events."""

    @abstractmethod
    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        """See ``Policy.log_prob``; ``states`` are those of ``encode``, where they are at hand already."""

    def catalog_log_prob(self, batch: FeedbackBatch, states: Tensor | None = None) -> Tensor:
        """Log-probability of every item after the whole history, ``[B, V, T]`` float32, with gradient.

        Column ``i - 1`` is item ``i``. The slates of ``batch`` are not read. Here it is ``log_prob`` of a slate of all
        items; a policy that has a shorter way overrides it.

        Args:
            batch: contexts.
            states: those of ``encode``, where they are at hand already.
        """
        return self.log_prob(batch._replace(slates=catalog_slates(batch.histories, self.num_items)), states=states)

    @abstractmethod
    def item_vectors(self, item_ids: Tensor) -> Tensor:
        """What the encoder reads of the items ``[...]``, ``[..., d]``; zero for id 0."""

    @abstractmethod
    def entropy(self, batch: FeedbackBatch, needed: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        """Entropy in nats of the policy at the state of every slate position, ``[B, S]``.

        Arguments as in ``log_prob``; positions that are masked or not needed are 0.
        """


class Objective(ABC):
    """A loss over ``ObjectiveInputs``; implementations are frozen dataclasses whose fields are the hyper-parameters."""

    @property
    def requires(self) -> frozenset[str]:
        """What the module must compute beyond ``logp.policy``.

        Out of ``{"advantages", "rewards", "chosen", "old", "reference", "value", "entropy", "q_value", "score",
        "labels", "grades", "behaviors"}``; it may depend on the fields (no reference is scored for a KL penalty of 0).
        """
        return frozenset()

    @property
    def num_scores(self) -> int:
        """``K``, how many scores per item it asks for with "score"."""
        return 1

    @property
    def reads(self) -> Reads:
        """What batches have to hold for it beyond items, feedback and times."""
        return Reads()

    def for_behaviors(self, names: tuple[str, ...]) -> Objective:
        """Itself for data whose behavior number b is ``names[b]``.

        Raises:
            RecpoError: it learns from a behavior that the data lacks.
        """
        return self

    @property
    def reads_log_prob(self) -> bool:
        """False where the loss does not depend on ``logp.policy``: then it is 0 throughout."""
        return True

    @property
    def reads_catalog(self) -> bool:
        """True where the slate must be the whole catalog in the order of the ids (``rollout.candidates: catalog``)."""
        return False

    @property
    def reads_draws(self) -> bool | None:
        """Which candidates of a rollout it takes.

        True: draws of the old policy, each as often as it was drawn. False: candidates that stand there once, whatever
        their probability (beam, catalog). None: either.
        """
        return None

    @property
    def zero_advantage_is_inert(self) -> bool:
        """Positions with ``advantage == 0`` change nothing but the denominator: the module need not score them."""
        return False

    @abstractmethod
    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """The denominator that this batch adds to the optimizer step: tokens, sequences or lists; a scalar tensor."""

    @abstractmethod
    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """The loss, divided by ``inputs.denominator`` where given and by ``self.count(inputs)`` otherwise."""


class AdvantageEstimator(ABC):
    """Turns feedback, rewards and values into advantages; implementations are frozen dataclasses."""

    @property
    def requires(self) -> frozenset[str]:
        """What it reads beyond labels and dislikes, out of ``{"rewards", "value"}``."""
        return frozenset()

    @property
    def reads_step_labels(self) -> bool:
        """It reads ``FeedbackBatch.step_labels``: what it gives depends on the whole optimizer step."""
        return False

    @property
    def learns_from(self) -> frozenset[str]:
        """Which feedback of the log it cannot do without, out of ``{"positives", "labels", "dislikes"}``."""
        return frozenset()

    @abstractmethod
    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """Returns advantages ``[B, S]``, 0 at masked positions, without gradient."""


class ReturnEstimator(AdvantageEstimator):
    """An advantage estimator that also gives what a critic of state values learns."""

    @abstractmethod
    def advantages_and_returns(self, batch: FeedbackBatch, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """The advantages and the value targets, each ``[B, S]``, without gradient."""


class TokenAdvantageEstimator(AdvantageEstimator):
    """An advantage estimator that tells the tokens of an item apart."""

    @abstractmethod
    def token_advantages(self, batch: FeedbackBatch, tokens: Tensor) -> Tensor:
        """Returns advantages ``[B, S, T]``, 0 at masked positions, without gradient.

        Args:
            batch: the slates, with rewards.
            tokens: ``[B, S, T]`` of the slate items (``Policy.tokens``).
        """

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """The advantages ``[B, S]`` of items that are one token each; ``values`` is not used."""
        return self.token_advantages(batch, batch.slates.item_ids.unsqueeze(-1)).squeeze(-1)


class RewardFunction(ABC):
    """Scores candidates: those of the log, or those that the policy generated; implementations are dataclasses."""

    @property
    def catalog_checksum(self) -> str | None:
        """Of the items that it was made for; None = any."""
        return None

    @property
    def users_checksum(self) -> str | None:
        """Of the users whose rewards it keeps by ``FeedbackBatch.user_ids``; None = any, it reads histories."""
        return None

    @property
    def learns_from(self) -> frozenset[str]:
        """Which feedback of the log it cannot do without, out of ``{"positives", "labels", "dislikes"}``."""
        return frozenset()

    @property
    def reads_ranks(self) -> bool:
        """Candidates of a group must stand in descending probability."""
        return False

    @property
    def reads(self) -> Reads:
        """What batches have to hold for it beyond items, feedback and times."""
        return Reads()

    def for_behaviors(self, names: tuple[str, ...]) -> RewardFunction:
        """Itself for data whose behavior number b is ``names[b]``.

        Raises:
            RecpoError: it weighs a behavior that the data lacks.
        """
        return self

    @abstractmethod
    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """Returns rewards ``[B, S]``, without gradient; nan = unknown: the candidate is left out of its slate."""
