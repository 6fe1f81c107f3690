"""Off-policy value of plain arrays: of a log that recpo has not prepared, and of a policy that it does not know."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from recpo.base.errors import RecpoError
from recpo.evaluation.off_policy.estimators import Rows
from recpo.evaluation.off_policy.options import OffPolicyOptions
from recpo.evaluation.off_policy.results import OffPolicyResult, result_of_rows


def value(
    rewards: ArrayLike,
    propensities: ArrayLike,
    target_probabilities: ArrayLike,
    *,
    users: ArrayLike | None = None,
    q_hat: ArrayLike | None = None,
    v_hat: ArrayLike | None = None,
    options: OffPolicyOptions = OffPolicyOptions(),  # noqa: B008  frozen
) -> OffPolicyResult:
    """Off-policy value of a policy from plain arrays, by every estimator, with intervals and warnings.

    ::

        found = recpo.off_policy.value(rewards, propensities, target_probabilities, users=user_ids)
        found.to_pandas()
        found.differences(recpo.off_policy.value(rewards, propensities, others, users=user_ids))

    Args:
        rewards: ``[N]`` reward of every exposure.
        propensities: ``[N]`` probability of the shown item under the logging policy.
        target_probabilities: ``[N]`` probability of the shown item under the policy whose value is estimated.
        users: ``[N]`` user of every exposure, of any type; exposures of different users are independent. None = every
            exposure is, which makes intervals too narrow if users have several.
        q_hat: ``[N]`` a reward model's prediction for the shown item, for the estimators that need one.
        v_hat: ``[N]`` the model's value of the policy, ``sum_a pi(a | x) q_hat(x, a)``.
        options: clip, threshold, level, resamples and so on; options about prepared data are ignored.

    Raises:
        RecpoError: arrays of different lengths; ``q_hat`` without ``v_hat``; a propensity outside (0, 1], a probability
            outside [0, 1], or a reward that is not finite.
    """
    given: dict[str, ArrayLike | None] = {
        "rewards": rewards,
        "target_probabilities": target_probabilities,
        "propensities": propensities,
        "q_hat": q_hat,
        "v_hat": v_hat,
        "users": users,
    }
    arrays = {name: np.asarray(one) for name, one in given.items() if one is not None}
    count = arrays["rewards"].shape[:1]
    for name, one in arrays.items():
        if one.ndim != 1 or one.shape != count:
            raise RecpoError(
                f"off-policy value: {name} has the shape {one.shape}, expected one number per reward, {count}",
                code="wrong_shape",
                field=name,
            )
    if ("q_hat" in arrays) != ("v_hat" in arrays):
        missing = "v_hat" if "q_hat" in arrays else "q_hat"
        raise RecpoError(
            f"off-policy value: a reward model needs both q_hat and v_hat, and {missing} is missing",
            code="missing_value",
            field=missing,
        )
    owner = arrays.pop("users", np.arange(count[0]))
    rows = Rows(*(one.astype(np.float64) for one in arrays.values()))
    return result_of_rows(rows, np.unique(owner, return_inverse=True)[1], options)
