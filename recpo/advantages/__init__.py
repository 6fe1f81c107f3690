"""Advantages: how much better each slate position is than expected.

Pure functions on tensors, and the estimators that read a ``FeedbackBatch``. Shapes: ``[B, S]``, ``B`` contexts and
``S`` slate positions; the slate axis is the group of GRPO and the time axis of a session. Nothing here carries a
gradient.
"""

from recpo.advantages.gae import GAEAdvantage, generalized_advantage_estimate
from recpo.advantages.gate import GatedAdvantage, reward_gate
from recpo.advantages.graded import GradedAdvantage, graded_advantage
from recpo.advantages.group import (
    GroupNormalizedAdvantage,
    LeaveOneOutAdvantage,
    group_normalized_advantage,
    leave_one_out_advantage,
)
from recpo.advantages.prefix import PrefixGroupAdvantage, prefix_group_advantage
from recpo.advantages.ternary import TernaryAdvantage, share_threshold, ternary_advantage
from recpo.advantages.whitening import whitened_advantage, whitening_sums

__all__ = [
    "GAEAdvantage",
    "GatedAdvantage",
    "GradedAdvantage",
    "GroupNormalizedAdvantage",
    "LeaveOneOutAdvantage",
    "PrefixGroupAdvantage",
    "TernaryAdvantage",
    "generalized_advantage_estimate",
    "graded_advantage",
    "group_normalized_advantage",
    "leave_one_out_advantage",
    "prefix_group_advantage",
    "reward_gate",
    "share_threshold",
    "ternary_advantage",
    "whitened_advantage",
    "whitening_sums",
]
