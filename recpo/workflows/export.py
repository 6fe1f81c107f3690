"""The verb ``export``: a trained policy as a bundle for serving."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from recpo.serving.bundle import Bundle
from recpo.training.run import Run


def export(
    run: Run | Path | str,
    out: Path | str,
    *,
    k: int = 100,
    checkpoint: Literal["best", "last"] = "best",
    overwrite: bool = False,
    trust: Sequence[str] = (),
) -> Bundle:
    """Writes the policy of a run as a bundle; nothing but the run is needed.

    Every engine is compared with the policy before the bundle appears.

    Args:
        run: the run, or its directory.
        out: bundle directory to make.
        k: length of the lists that the bundle serves; a smaller catalog caps it.
        checkpoint: which checkpoint of the run.
        overwrite: replace ``out`` where it is a bundle.
        trust: packages beside recpo whose classes the configuration of the run may name.

    Raises:
        RecpoError: no run, a run that has changed since it was written, ``out`` is in the way, or an engine differs
            from the policy.
    """
    return Run.open(run, trust).export(out, k, checkpoint=checkpoint, overwrite=overwrite)
