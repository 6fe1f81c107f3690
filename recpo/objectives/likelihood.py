"""Maximum likelihood: next-item pre-training, and behavior cloning of positive items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from recpo.base.contracts import Objective
from recpo.base.types import LossOutput, ObjectiveInputs
from recpo.objectives.inputs import required, validate_log_probs
from recpo.ops.reduce import aggregate, denominator, zero_masked


@dataclass(frozen=True)
class Likelihood(Objective):
    """Negative log-likelihood of the kept tokens: ``-logp``, averaged.

    Gradient: ``-1`` on ``grad logp`` of every kept token. With ``positive_only`` it is filtered behavior cloning: all
    other positions leave both the loss and its denominator.

    Attributes:
        positive_only: count only positions with a positive advantage; needs an advantage estimator.
        aggregation: how token losses become one number; ``seq-mean-token-sum`` is the likelihood per item.
    """

    positive_only: bool = False
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        return frozenset({"advantages"} if self.positive_only else ())

    @property
    def zero_advantage_is_inert(self) -> bool:
        """See ``Objective.zero_advantage_is_inert``."""
        return self.positive_only

    def _mask(self, inputs: ObjectiveInputs) -> Tensor:
        mask = inputs.logp.mask.bool()
        if self.positive_only:
            mask = mask & (required(inputs.advantages, "advantages", self) > 0).unsqueeze(-1)
        return mask

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Counted tokens, or items, by ``aggregation``."""
        return denominator(self._mask(inputs), self.aggregation)

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        validate_log_probs(inputs.logp, self)
        mask = self._mask(inputs)
        logp = zero_masked(inputs.logp.policy, mask)
        loss = aggregate(-logp, mask, self.aggregation, count=inputs.denominator)
        with torch.no_grad():
            metrics = {"nll": aggregate(-logp, mask, "seq-mean-token-sum")}
        return LossOutput(loss, metrics)
