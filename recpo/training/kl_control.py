"""Adaptive coefficient of the KL penalty, and early end of a phase that moved too far from its snapshot."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from recpo.base.contracts import Objective
from recpo.base.errors import RecpoError
from recpo.base.types import LogProbs
from recpo.ops.kl import kl_estimate
from recpo.ops.reduce import zero_masked
from recpo.training.options import KLTarget, LearningOptions
from recpo.training.rollout import catalog_divergence

MAX_ERROR = 0.2
"""Bound on the proportional error, so that an outlier cannot change the coefficient too much (arXiv 1909.08593)."""


def adapted_kl_coef(value: float, target: KLTarget, measured_kl: float, num_samples: int) -> float:
    """The coefficient of the KL penalty after a measurement, so that the divergence approaches the target.

    ``c <- c (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon)`` after ``n`` samples (arXiv 1909.08593, section 2.2).

    Args:
        value: the coefficient before; above 0.
        target: the divergence to maintain, and over how many samples the coefficient may change by about e^0.2.
        measured_kl: mean over the samples, in nats.
        num_samples: number of samples.
    """
    error = min(max(measured_kl / target.target - 1.0, -MAX_ERROR), MAX_ERROR)
    return value * (1.0 + error * min(1.0, num_samples / target.horizon))  # beyond the horizon it could turn negative


class KLControl:
    """Measures divergences over complete optimizer steps, adjusts the coefficient, and stops a phase that went too far.

    Args:
        options: the objective with the ``kl_coef`` of the loss; the target divergence (``adaptive_kl``), without which
            the coefficient is constant; and the rollout. Its ``max_kl`` limits KL(old || policy), by the k3 estimate
            over items drawn from the old policy; over the complete catalog the divergence is exact, and a context
            counts as one item. With a ``kl_coef`` of the rewards above 0, the target adjusts this one.

    Attributes:
        stopped: the phase went too far. A new snapshot begins the next one, and sets it back.

    Raises:
        RecpoError: a target without a coefficient, or with two.
    """

    def __init__(self, options: LearningOptions) -> None:
        self._objective, self._target, rollout = options.objective, options.adaptive_kl, options.rollout
        self._max_kl = None if rollout is None else rollout.max_kl
        self._catalog = rollout is not None and rollout.candidates == "catalog"
        self._reward_coef = 0.0 if rollout is None else rollout.kl_coef
        self._value = 0.0 if self._target is None else _initial_kl_coef(self._objective, self._reward_coef)
        self._sums: Tensor | None = None
        self.stopped = False

    @property
    def objective(self) -> Objective:
        """The objective with the current coefficient."""
        if self._target is None or self._reward_coef:
            return self._objective
        return replace(self._objective, kl_coef=self._value)  # type: ignore[type-var]

    @property
    def reward_coef(self) -> float:
        """The current coefficient of the penalty in the rewards; 0 = none."""
        return self._value if self._target is not None and self._reward_coef else self._reward_coef

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics for the logs."""
        metrics = {} if self._target is None else {"kl_coef": self._value}
        return metrics if self._max_kl is None else metrics | {"step_skipped": float(self.stopped)}

    @torch.no_grad()
    def measure(self, logp: LogProbs, metrics: dict[str, Tensor]) -> None:
        """Adds a micro-batch."""
        if self._target is None and self._max_kl is None:
            return
        tokens, items = logp.mask.sum(), (logp.mask.any(1) if self._catalog else logp.mask.any(-1)).sum()
        moved = torch.zeros_like(tokens, dtype=torch.float32)
        if logp.old is not None and self._catalog:
            moved = catalog_divergence(logp)
        elif logp.old is not None:
            old, policy = zero_masked(logp.old, logp.mask), zero_masked(logp.policy.detach(), logp.mask)
            moved = kl_estimate(old, policy).sum()
        if self._reward_coef:
            assert logp.old is not None
            assert logp.reference is not None
            from_reference = zero_masked(logp.old - logp.reference, logp.mask).sum()
        else:
            from_reference = metrics.get("kl_reference", torch.zeros_like(moved)) * tokens
        sums = torch.stack([moved.double(), items.double(), from_reference.double(), tokens.double()])
        self._sums = sums if self._sums is None else self._sums + sums

    def end_step(self, reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """Decides from the measurements of every micro-batch on every rank, so all ranks decide the same."""
        if self._sums is None:
            return
        moved, items, from_reference, tokens = reduce_sum(self._sums).tolist()
        self._sums = None
        if self._max_kl is not None and moved > self._max_kl * items:
            self.stopped = True
        elif self._target is not None and tokens:
            self._value = adapted_kl_coef(self._value, self._target, from_reference / tokens, int(items))

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        return {"stopped": float(self.stopped), "value": self._value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores what ``state_dict`` returned."""
        self.stopped, self._value = bool(state["stopped"]), state.get("value", 0.0)


def _initial_kl_coef(objective: Objective, reward_coef: float) -> float:
    value: float = getattr(objective, "kl_coef", 0.0)
    if value > 0 and reward_coef > 0:
        raise RecpoError(
            f"adaptive_kl moves one coefficient, and both objective.init_args.kl_coef ({value}) and rollout.kl_coef "
            f"({reward_coef}) are above 0: set one of them to 0, or leave adaptive_kl out",
            code="conflicting_options",
            field="adaptive_kl",
        )
    if value <= 0 and reward_coef <= 0:
        raise RecpoError(
            f"adaptive_kl moves the coefficient of a KL penalty, which {type(objective).__name__} lacks: set "
            "objective.init_args.kl_coef above 0, or rollout.kl_coef, or leave adaptive_kl out",
            code="missing_option",
            field="adaptive_kl",
        )
    return value or reward_coef
