"""The re-ranked contenders of an evaluation: every run, bundle and factor model with every method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from recpo.base.contracts import Policy, StatePolicy
from recpo.base.errors import RecpoError
from recpo.evaluation.contenders import Contender, Loaded
from recpo.evaluation.reranked import reranked_contender
from recpo.lists.reranking import FloatArray, Reranker, RerankOptions
from recpo.log.prepared import Prepared
from recpo.policies.tilted import RerankedPolicy, TiltedPolicy
from recpo.serving.item_index import bundle_item_vectors

_RERANKED = ("run", "bundle", "factors")


def reranked_contenders(
    contenders: Sequence[Contender],
    methods: Sequence[Reranker],
    options: RerankOptions,
    data: Prepared,
    ks: Sequence[int],
) -> list[Contender]:
    """Every run, bundle and factor model among the contenders, re-ranked by every method: slates of the first k.

    Raises:
        RecpoError: nothing can be re-ranked; an attribute or the file of attributes is missing; a shortlist below k.
    """
    if not methods:
        return []
    bases = [one for one in contenders if one.kind in _RERANKED]
    if not bases:
        raise RecpoError("rerank: no run, bundle or factor model is given whose lists can be re-ranked; name one")
    if options.shortlist < ks[0]:
        raise RecpoError(
            f"rerank_options.shortlist is {options.shortlist}, and lists of {ks[0]} are chosen from it: name more"
        )
    known = options.read([name for method in methods for name in method.attributes], data.item_ids())
    found = []
    for base in bases:
        shortlist = min(options.shortlist, data.num_items, int(base.facts.get("k", data.num_items)))

        def vectors_of(loaded: Loaded, base: Contender = base) -> FloatArray | None:
            if base.kind == "bundle":
                return bundle_item_vectors(Path(str(base.facts["path"])))
            return None if loaded.policy is None else policy_item_vectors(loaded.policy)

        found += [
            reranked_contender(base, method, known, vectors_of, k=ks[0], shortlist=shortlist) for method in methods
        ]
    return found


def policy_item_vectors(policy: Policy) -> FloatArray | None:
    """The item vectors that the encoder of a policy reads, ``[V + 1, d]``; None if it has no such vectors."""
    base = policy.base if isinstance(policy, TiltedPolicy | RerankedPolicy) else policy
    if not isinstance(base, StatePolicy):
        return None
    device = next((parameter.device for parameter in base.parameters()), torch.device("cpu"))
    with torch.inference_mode():
        vectors = base.item_vectors(torch.arange(base.num_items + 1, device=device))
    found: FloatArray = vectors.float().cpu().numpy()
    return found
