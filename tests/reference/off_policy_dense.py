"""The published formulas of the Open Bandit Pipeline over dense ``[rows, actions]`` arrays.

``pi [N, A]`` is the target policy, ``q [N, A]`` the reward model, ``action [N]`` what was shown, with probability
``propensity [N]``, for ``reward [N]``.
"""

import numpy as np


def estimates(reward, action, propensity, pi, q, clip, threshold):
    rows = np.arange(len(reward))
    weight = pi[rows, action] / propensity
    baseline = np.average(q, weights=pi, axis=1)
    error = reward - q[rows, action]
    return {
        "IPS": (weight * reward).mean(),
        "clipped IPS": (np.minimum(weight, clip) * reward).mean(),
        "SNIPS": (weight / weight.mean() * reward).mean(),
        "DM": baseline.mean(),
        "DR": (baseline + weight * error).mean(),
        "SNDR": (baseline + weight / weight.mean() * error).mean(),
        "Switch-DR": (baseline + weight * (weight <= threshold) * error).mean(),
    }
