"""Adaptive coefficient of the KL penalty."""

from __future__ import annotations

MAX_ERROR = 0.2
"""Bound on the proportional error, so that one outlying batch cannot blow the coefficient up (arXiv 1909.08593)."""


class AdaptiveKLCoefficient:
    """Steers the coefficient of the KL penalty so that the measured divergence approaches ``target``.

    ``c <- c (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon)`` after ``n`` samples (arXiv 1909.08593, section 2.2).

    Args:
        value: the initial coefficient.
        target: the divergence to hold, in nats.
        horizon: number of samples over which the coefficient may change by a factor of about e^0.2.
    """

    def __init__(self, value: float = 0.2, target: float = 6.0, horizon: int = 10_000) -> None:
        if value <= 0 or target <= 0 or horizon <= 0:
            raise ValueError(f"value, target and horizon must be above 0, got {value}, {target} and {horizon}")
        self.value = value
        self.target = target
        self.horizon = horizon

    def update(self, measured_kl: float, num_samples: int) -> float:
        """Takes one measurement over ``num_samples`` samples and returns the new coefficient."""
        error = min(max(measured_kl / self.target - 1.0, -MAX_ERROR), MAX_ERROR)
        self.value *= 1.0 + error * num_samples / self.horizon
        return self.value

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores what ``state_dict`` returned."""
        self.value = state["value"]
