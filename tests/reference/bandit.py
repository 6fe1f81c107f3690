"""A contextual bandit with known contexts, expected rewards, logging policy and target policy."""

import numpy as np


class Bandit:
    """``contexts`` contexts, equally likely, and ``actions`` actions with rewards 0 or 1.

    ``mean_reward``, ``logging`` and ``target`` are ``[contexts, actions]``; ``value`` is the target policy's.
    """

    def __init__(self, contexts=5, actions=8, seed=0, sharpness=1.0):
        rng = np.random.default_rng(seed)
        self.mean_reward = rng.uniform(0.05, 0.95, (contexts, actions))
        # the logging policy likes what is rewarded, so plain averages are confounded
        self.logging = softmax(sharpness * (2 * self.mean_reward + rng.standard_normal((contexts, actions))))
        self.target = softmax(sharpness * rng.standard_normal((contexts, actions)))
        self.value = float((self.target * self.mean_reward).sum(1).mean())

    def draw(self, rows, seed=0):
        """Contexts, actions and rewards of ``rows`` exposures."""
        rng = np.random.default_rng(seed)
        context = rng.integers(0, len(self.logging), rows)
        action = (rng.random((rows, 1)) > self.logging.cumsum(1)[context]).sum(1).clip(max=self.logging.shape[1] - 1)
        return context, action, (rng.random(rows) < self.mean_reward[context, action]).astype(float)


def softmax(logits):
    exponential = np.exp(logits - logits.max(-1, keepdims=True))
    return exponential / exponential.sum(-1, keepdims=True)
