"""Directories that are filled in place, such as a run during training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from recpo.artifacts.disk import flush, flush_tree
from recpo.artifacts.kinds import MARKER, Kind, marker
from recpo.artifacts.leavings import ASIDE, UNFINISHED, discard, remove_tree, remove_unfinished, settle_leavings, unused
from recpo.artifacts.locks import lock, locked_parent
from recpo.artifacts.os_errors import WRITING, os_errors
from recpo.artifacts.outputs import output_directory, parents


@contextmanager
def directory_in_place(
    target: Path | str,
    *,
    kind: Kind,
    start: Callable[[Path], None] | None,
    check: Callable[[], object],
) -> Iterator[Callable[[], None]]:
    """Keeps other writers out of a directory that is filled in place, such as a run during training.

    A new directory replaces the existing one, which is kept under another name. If the block fails before the yielded
    function was called, the old directory is restored; if the process is killed, the next call for the same target
    restores it.

    Args:
        target: the directory, or a symbolic link to it.
        kind: what the directory will be.
        start: writes the first files of a new directory; None = ``target`` exists and is continued.
        check: raises if ``target`` may not be created, replaced or continued; called when no other process can write
            it.

    Yields:
        A function to call when the new directory should be kept; it removes the replaced directory.

    Raises:
        RecpoError: another process writes the directory, or it cannot be written.
    """
    place = Path(os.path.realpath(target))
    with os_errors(place, WRITING), parents(place), ExitStack() as locks:
        with locked_parent(place):
            settle_leavings(place)
            check()
            if start is None:
                lock(place, place, locks)
                remove_unfinished(place)
                aside = None
            else:
                aside = _begin(place, kind, start, locks)
        kept = False

        def keep() -> None:
            nonlocal kept
            kept = True
            if aside is not None:
                discard(aside, place)

        try:
            yield keep
        except BaseException:
            if start is not None and not kept:
                with suppress(OSError):
                    discard(place, place, aside)
            raise


@contextmanager
def directory_of_steps(target: Path | str, *, kind: Kind, overwrite: bool) -> Iterator[None]:
    """An empty directory that other outputs fill one by one, such as a demo. One process at a time may fill it.

    The lock is on its ``recpo.json`` instead of the directory, because those outputs lock their parent directory.

    Args:
        target: the directory; a symbolic link is followed.
        kind: what the directory will be.
        overwrite: replace a ``target`` of the same kind immediately.

    Raises:
        RecpoError: another process fills it, or it may not be created or replaced.
    """
    place = Path(os.path.realpath(target))
    with ExitStack() as locks:
        if (place / MARKER).is_file():
            lock(place / MARKER, place, locks)
        with output_directory(place, kind=kind, overwrite=overwrite):
            pass
        lock(place / MARKER, place, locks)
        yield


def _begin(place: Path, kind: Kind, start: Callable[[Path], None], locks: ExitStack) -> Path | None:
    """Moves a new directory to ``place``. Returns where the existing directory was moved, None if there was none."""
    working, aside = unused(place, UNFINISHED), None
    working.mkdir()
    try:
        lock(working, place, locks)
        (working / MARKER).write_text(marker(kind), encoding="utf-8")
        start(working)
        flush_tree(working)
        if place.exists() and any(place.iterdir()):
            lock(place, place, locks)  # so that it is not mistaken for the leftovers of a dead process
            aside = unused(place, ASIDE)
            os.rename(place, aside)
        try:
            os.rename(working, place)
        except OSError:
            if aside is not None:
                os.rename(aside, place)
            raise
        flush(place.parent)
    except BaseException:
        remove_tree(working)
        raise
    return aside
