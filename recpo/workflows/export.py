"""The verb ``export``: a trained policy as a bundle for serving."""

from __future__ import annotations

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
) -> Bundle:
    """Writes the policy of a run as a bundle; nothing but the run is needed.

    Every engine is compared with the policy before the bundle appears.

    Args:
        run: the run, or its directory.
        out: bundle directory to make.
        k: length of the lists that the bundle serves; a smaller catalog caps it.
        checkpoint: which checkpoint of the run.
        overwrite: replace ``out`` where it is a bundle.

    Raises:
        RecpoError: no run, a run that has changed since it was written, ``out`` is in the way, or an engine differs
            from the policy.
    """
    return Run.open(run).export(out, k, checkpoint=checkpoint, overwrite=overwrite)
