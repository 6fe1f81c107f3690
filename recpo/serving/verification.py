"""Compares an exported program with the policy before the export is published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.base.features import Categories, Category, Feature, FeatureArrays, Number, Vector, of_type
from recpo.base.feedback import HIGHEST, UNKNOWN
from recpo.policies.catalog_search import Precision
from recpo.serving.bundle import TOLERANCE
from recpo.serving.encoded_histories import EncodedHistories, ProgramReads
from recpo.serving.program import CatalogSearch, ServingProgram
from recpo.serving.runtimes import PolicyRuntime, Runtime, TorchProgramRuntime

ROUNDING: Final = {"float16": 0.02, "int8": 0.25}
"""Largest allowed difference of natural-log probabilities from rounding the item matrix."""

_CHECKED_USERS = (1, 33)  # batch sizes that differ from the example's
_COMPARED_USERS = 64
_SHORT = 10
_BEHAVIOR_SETS, _MISSING = 8, 0.2  # bit sets of random histories, and the share of missing features
_FIRST_TIME_MS, _LONGEST_GAP_MS = 1_600_000_000_000, 10 * 86_400_000  # times of random histories


def verify_runtime(
    runtime: Runtime, policy: Policy, k: int, *, reference: Runtime | None = None, seed: int = 0
) -> None:
    """Compares a runtime with the policy on random histories; the first one is empty, the last one full.

    The lists must be equal, except that items whose scores differ by less than 1e-4 may swap places.

    Args:
        runtime: the runtime to check.
        policy: the policy that it was made from.
        k: length of the lists.
        reference: computes the expected results instead of the policy itself.
        seed: of the histories.

    Raises:
        RecpoError: they differ.
    """
    generator = torch.Generator().manual_seed(seed)
    reference = reference or PolicyRuntime(policy, reads=runtime.reads)
    for users in _CHECKED_USERS:
        inputs = random_inputs(policy, users, generator, runtime.reads)
        expected_items, expected_scores = map(torch.from_numpy, reference.recommend(inputs, k))
        top_items, scores = map(torch.from_numpy, runtime.recommend(inputs, k))
        gap = (scores - expected_scores).abs().nan_to_num(0.0)  # -inf against -inf, if the list is short
        if scores.isnan().any() or gap.max() > TOLERANCE:
            raise RecpoError(
                f"the exported program's scores are nan or differ from the policy's, by {gap.max().item():.2g}",
                code="mismatch",
                field="scores",
            )
        moved = top_items != expected_items
        own = _score_of(top_items, expected_items, expected_scores)
        if bool((moved & ((own - scores).abs() > TOLERANCE)).any()):
            raise RecpoError(
                f"the exported program recommends other items than the policy ({int(moved.sum())} places)",
                code="mismatch",
                field="items",
            )


def verify_rounded(
    runtime: Runtime, program: ServingProgram, policy: Policy, k: int, precision: Precision
) -> dict[str, Any]:
    """Compares a runtime with the rounded policy, and the rounded policy with the policy.

    Args:
        runtime: the runtime to check.
        program: the torch program that it was made from.
        policy: the policy without rounding.
        k: length of the lists.
        precision: number format of the item matrix.

    Returns:
        Agreement of the lists of 64 random histories with the policy's lists: ``users``, ``overlap_10`` and
        ``overlap_k`` (mean share of common items in lists of 10 and k), ``mean_difference`` and ``largest_difference``
        (of the natural-log probabilities of common items), ``tolerance`` (for the latter).

    Raises:
        RecpoError: the runtime computes something else, or rounding changes more than ``ROUNDING``.
    """
    verify_runtime(runtime, policy, k, reference=TorchProgramRuntime(program, runtime))
    inputs = random_inputs(policy, _COMPARED_USERS, torch.Generator().manual_seed(1), runtime.reads)
    found, expected = runtime.recommend(inputs, k), PolicyRuntime(policy, reads=runtime.reads).recommend(inputs, k)
    agreement = {"users": _COMPARED_USERS, **_agreement(found, expected, k), "tolerance": ROUNDING[precision]}
    if not agreement["largest_difference"] <= ROUNDING[precision]:
        raise RecpoError(
            f"item_precision {precision}: log-probabilities differ from the policy's by up to "
            f"{agreement['largest_difference']:.2g}, {ROUNDING[precision]:g} is allowed (overlap of the first "
            f"{_SHORT} items {agreement[f'overlap_{_SHORT}']:.3f}): export with "
            f"{'float16 or ' if precision == 'int8' else ''}float32",
            code="mismatch",
            field="item_precision",
        )
    return agreement


def overlap(found: np.ndarray, expected: np.ndarray) -> float:
    """Mean share of the items of ``expected [B, n]`` that are in ``found [B, n]``; 0 is not an item."""
    shared = ((found[:, :, None] == expected[:, None, :]) & (expected > 0)[:, None, :]).any(1)
    return float((shared.sum(1) / np.maximum((expected > 0).sum(1), 1)).mean())


def random_inputs(
    policy: Policy | CatalogSearch, users: int, generator: torch.Generator, reads: ProgramReads | None = None
) -> EncodedHistories:
    """Histories of random items, the first empty and the last full, with three items to exclude each.

    Behaviors and features are random too; a fifth of the values are missing, and some are unknown.
    """
    reads = ProgramReads(policy.reads_timestamps) if reads is None else reads
    lengths = torch.randint(policy.max_history + 1, (users,), generator=generator)
    lengths[-1], lengths[0] = policy.max_history, 0
    real = torch.arange(policy.max_history) < lengths[:, None]
    item_ids = torch.randint(1, policy.num_items + 1, real.shape, generator=generator) * real
    feedback = torch.randint(UNKNOWN, HIGHEST + 1, real.shape, generator=generator) * real
    exclude = torch.randint(policy.num_items + 1, (users, 3), generator=generator)
    gaps = torch.randint(_LONGEST_GAP_MS, real.shape, generator=generator)
    times = ((_FIRST_TIME_MS + gaps.cumsum(1)) * real).numpy() if reads.timestamps else None
    bits = torch.randint(_BEHAVIOR_SETS, real.shape, generator=generator) * real if reads.behaviors else None
    answered = torch.arange(policy.max_history + 1) <= lengths[:, None]
    return EncodedHistories(
        item_ids.numpy(),
        feedback.numpy(),
        exclude.numpy(),
        times,
        None if bits is None else bits.numpy(),
        random_features(reads.user, (users,), generator) if reads.user else None,
        random_features(reads.context, tuple(answered.shape), generator).where(answered.numpy())
        if reads.context
        else None,
        _random_masks(users, reads.mask, generator) if reads.mask else None,
    )


def _random_masks(users: int, places: int, generator: torch.Generator) -> np.ndarray:
    """A third of the items may be listed; for the last user, all of them."""
    kept: np.ndarray = (torch.rand(users, places, generator=generator) < 1 / 3).numpy()
    kept[-1], kept[:, 0] = True, True
    return kept


def random_features(features: Sequence[Feature], shape: tuple[int, ...], generator: torch.Generator) -> FeatureArrays:
    """Random features with the leading ``shape``: codes of the vocabulary, unknown codes, and a fifth missing."""

    def codes(sizes: Sequence[int | None]) -> Tensor:
        drawn = [torch.randint(1, int(size or 2), shape, generator=generator) for size in sizes]
        return torch.stack(drawn, -1) if drawn else torch.zeros(*shape, 0, dtype=torch.long)

    def known(width: int) -> Tensor:
        return torch.rand(*shape, width, generator=generator) > _MISSING

    categories, numbers = of_type(features, Category), of_type(features, Number)
    lists = [
        (codes([one.num_codes] * one.length) * known(1)).sort(-1, descending=True).values
        for one in of_type(features, Categories)
    ]
    vectors = [
        torch.randn(*shape, one.width or 0, generator=generator).masked_fill(~known(1), torch.nan)
        for one in of_type(features, Vector)
    ]
    numeric = torch.randn(*shape, len(numbers), generator=generator).masked_fill(~known(len(numbers)), torch.nan)
    coded = codes([one.num_codes for one in categories]) * known(len(categories))
    return FeatureArrays(
        coded.numpy(), tuple(one.numpy() for one in lists), numeric.numpy(), tuple(one.numpy() for one in vectors)
    )


def _agreement(
    found: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray], k: int
) -> dict[str, float]:
    same = (found[0][:, :, None] == expected[0][:, None, :]) & (expected[0] > 0)[:, None, :]
    row, place, other = np.nonzero(same)
    gaps = np.abs(found[1][row, place] - expected[1][row, other])
    return {
        f"overlap_{_SHORT}": overlap(found[0][:, :_SHORT], expected[0][:, :_SHORT]),
        "overlap_k": overlap(found[0], expected[0]),
        "mean_difference": float(gaps.mean()) if len(gaps) else float("inf"),
        "largest_difference": float(gaps.max()) if len(gaps) else float("inf"),
    }


def _score_of(item_ids: Tensor, listed: Tensor, scores: Tensor) -> Tensor:
    """The score of ``item_ids [B, k]`` in the list that ranks ``listed [B, k]``, or the score of its last place."""
    same = item_ids[:, :, None] == listed[:, None, :]
    return torch.where(same.any(2), scores.gather(1, same.int().argmax(2)), scores[:, -1:])
