"""``recpo export``: writes a trained policy as a bundle for serving."""

from __future__ import annotations

from recpo.cli.verb_results import VerbResult, command
from recpo.serving.bundle import Bundle
from recpo.serving.manifest import BundleManifest
from recpo.serving.refresh import Refreshed
from recpo.verbs.export import Export


def show(verb: Export, result: Bundle | Refreshed) -> VerbResult:
    """Prints what the bundle lists; it is served next."""
    following = command("serve", "--bundle", verb.out)
    if isinstance(result, Refreshed):
        print(
            f"{verb.out}: {result.listed:,} items may be listed, {result.later:,} of them later (available_from); "
            f"{result.retired:,} are retired; {result.added:,} new ones are added, {result.left_out:,} left out"
        )
        counts = {"items": result.listed, "retired": result.retired, "left_out": result.left_out}
        return VerbResult((str(verb.out),), following, counts)
    print(f"{verb.out}: {len(result.items):,} items, lists of {result.k}; {_verified(result.manifest)}")
    if verb.compiled is not None:
        print(f"{verb.compiled}: machine code for this kind of machine; its lists are the policy's")
    facts = {"items": len(result.items), "k": result.k, "agreement": result.manifest.agreement}
    return VerbResult((str(verb.out),), following, facts)


def _verified(manifest: BundleManifest) -> str:
    if manifest.index is not None:
        facts = manifest.index
        return (
            f"the index looks into {facts['probes']} of {facts['lists']} lists and finds {facts['recall_10']:.3f} of "
            f"the 10 best items of {facts['users']} random histories"
        )
    if manifest.agreement is not None:
        facts = manifest.agreement
        return (
            f"{manifest.item_precision}: of the 10 best items of {facts['users']} random histories "
            f"{facts['overlap_10']:.3f} are the policy's; log-probabilities differ by up to "
            f"{facts['largest_difference']:.2g}"
        )
    return "every engine gives the policy's lists and scores"
