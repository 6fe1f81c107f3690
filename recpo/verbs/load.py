"""Opens whatever recpo wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Final

import recpo
from recpo.artifacts.checksums import MARKER, Kind, described, kind_of
from recpo.base.errors import RecpoError
from recpo.log.locations import locate

if TYPE_CHECKING:
    from recpo.artifacts.semantic_codes import Codes
    from recpo.evaluation.comparison import Comparison
    from recpo.evaluation.evaluation import Evaluation
    from recpo.log.prepared import Prepared
    from recpo.rewards.factors import Factors
    from recpo.serving.bundle import Bundle
    from recpo.training.run import Run
    from recpo.verbs.fit import Decision
    from recpo.verbs.loop import LoopResult
    from recpo.worlds.log import Simulation

#: The public class of every kind; its module is imported when the kind is opened.
_CLASSES: Final[Mapping[Kind, str]] = {
    "prepared": "Prepared",
    "bundle": "Bundle",
    "run": "Run",
    "codes": "Codes",
    "factors": "Factors",
    "evaluation": "Evaluation",
    "variants": "VariantEvaluation",
    "comparison": "Comparison",
    "loop": "LoopResult",
    "decision": "Decision",
    "simulation": "Simulation",
}


def load(
    path: str | PathLike[str], trust: Sequence[str] = ()
) -> Prepared | Run | Codes | Factors | Bundle | Evaluation | Comparison | LoopResult | Decision | Simulation:
    """Opens a directory that recpo wrote, of any kind; its ``recpo.json`` names the kind.

    Imports only what the kind needs: a bundle opens without torch.

    Args:
        path: the directory; for prepared data also an address in an object store.
        trust: packages, in addition to recpo, whose classes the configuration of a run may name; naming a package lets
            its code run.

    Raises:
        RecpoError: there is no such directory, recpo did not write it, or it is damaged or of another version.
    """
    place = locate(fspath(path))
    kind = kind_of(place) if isinstance(place, Path) else "prepared"
    if kind is None or kind not in _CLASSES:
        readable, found = ", ".join(map(described, _CLASSES)), _found(Path(fspath(path)))
        raise RecpoError(f"{path}: expected {readable}; found {found}", code="wrong_file")
    artifact = getattr(recpo, _CLASSES[kind])
    return artifact.open(place, trust=trust) if kind == "run" else artifact.open(place)


def _found(place: Path) -> str:
    kind = kind_of(place)
    if kind is not None:
        return f"a {kind} directory, whose parts can be opened: {', '.join(sorted(p.name for p in place.iterdir()))}"
    if not place.exists():
        return "nothing there"
    if not place.is_dir():
        return "a file"
    return f"a directory without {MARKER}, which recpo did not write, or an older recpo: then make it again"
