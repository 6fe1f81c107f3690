"""What every directory that recpo wrote has in common: a kind, a version, and facts in one sealed JSON document.

``load`` opens any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import recpo
from recpo.artifacts.checksums import DOCUMENTS, MARKER, Kind, described, kind_of, seal, sha256, unseal
from recpo.artifacts.documents import read_json
from recpo.artifacts.outputs import write_json
from recpo.base.errors import RecpoError


class Artifact:
    """A directory that recpo wrote. A subclass says what it is; how it is recognized is written here, once.

    The document is written last. It holds the version, the facts of the kind, and checksums of the other files and of
    its own values.
    """

    kind: ClassVar[Kind]
    """what ``recpo.json`` calls the directory"""
    version: ClassVar[int]
    """version of the format; others are refused"""
    made_by: ClassVar[str]
    """the command that makes such a directory, for messages"""

    @classmethod
    def open(cls, root: Self | Path | str) -> Self:
        """Opens a directory of this kind; what is open already is returned as it is.

        Raises:
            RecpoError: it is no such directory, is unfinished or damaged, or has another format version.
        """
        if isinstance(root, cls):
            return root
        if isinstance(root, Artifact):
            message = f"expected {described(cls.kind)}, found {described(root.kind)}; make it with `{cls.made_by}`"
            raise RecpoError(message, code="wrong_file", field=cls.kind)
        return cls._read(Path(root))

    @classmethod
    def _read(cls, root: Path) -> Self:
        """Reads a directory; see ``open``."""
        raise NotImplementedError

    @classmethod
    def facts_of(cls, root: Path | str) -> dict[str, Any]:
        """The facts that ``write_facts`` wrote.

        Raises:
            RecpoError: a directory of another kind or none of recpo's (code ``wrong_file``), of another version
                (``old_format``), or with a document that was changed (``damaged``).
        """
        root = Path(root)
        cls.recognize(root)
        file = root / DOCUMENTS[cls.kind]
        return facts_in(read_json(file, cls.remedy()), file, cls.version, cls.remedy())

    @classmethod
    def recognize(cls, root: Any) -> None:
        """Raises ``RecpoError`` (code ``wrong_file``) if a path, here or in an object store, is no such directory."""
        found, name = kind_of(root) if isinstance(root, Path) else None, DOCUMENTS[cls.kind]
        if found not in (None, cls.kind) or not (root / name).is_file():
            lacking = f"{name} is missing" if found in (None, cls.kind) else f"found {described(found)}"
            raise RecpoError(
                f"{root}: expected {described(cls.kind)}, {lacking}; make it with `{cls.made_by}`",
                code="wrong_file",
                field=name,
            )

    @classmethod
    def write_facts(cls, directory: Path, facts: Mapping[str, Any], files: Iterable[str] = ()) -> None:
        """Writes the document into a directory whose other files are complete.

        Args:
            directory: where to.
            facts: of the kind.
            files: those whose checksums become the fact ``files``.
        """
        content = {"format_version": cls.version, **facts}
        if checksums := {name: sha256(directory / name) for name in files}:
            content["files"] = checksums
        write_json(directory / DOCUMENTS[cls.kind], seal(content))

    @classmethod
    def remedy(cls) -> str:
        """What to do about a damaged directory; the end of a message."""
        return f"copy it again, or make it again with `{cls.made_by}`"


def facts_in(content: Mapping[str, Any], file: object, version: int, remedy: str) -> dict[str, Any]:
    """The facts in the content of a sealed document, which ``file`` is for messages.

    Raises:
        RecpoError: it is of another version (code ``old_format``), or was changed (``damaged``).
    """
    if (found := content.get("format_version")) != version:
        raise RecpoError(
            f"{file}: format_version {found!r}, this recpo reads {version}; {remedy}",
            code="old_format",
            field="format_version",
        )
    facts = unseal(content, file, remedy)
    del facts["format_version"]
    return facts


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
) -> (
    recpo.Prepared
    | recpo.Run
    | recpo.Codes
    | recpo.Factors
    | recpo.Bundle
    | recpo.Evaluation
    | recpo.Comparison
    | recpo.LoopResult
    | recpo.Decision
    | recpo.Simulation
):
    """Opens a directory that recpo wrote, of any kind; its ``recpo.json`` names the kind.

    Imports only what the kind needs: a bundle opens without torch.

    Args:
        path: the directory; for prepared data also an address in an object store.
        trust: packages, in addition to recpo, whose classes the configuration of a run may name; naming a package lets
            its code run.

    Raises:
        RecpoError: there is no such directory, recpo did not write it, or it is damaged or of another version.
    """
    place = fspath(path)
    kind: Kind | None = "prepared" if "://" in place else kind_of(place)
    if kind is None or kind not in _CLASSES:
        readable, found = ", ".join(map(described, _CLASSES)), _found(Path(place), kind)
        raise RecpoError(f"{path}: expected {readable}; found {found}", code="wrong_file")
    artifact = getattr(recpo, _CLASSES[kind])
    return artifact.open(place, trust=trust) if kind == "run" else artifact.open(place)


def _found(place: Path, kind: Kind | None) -> str:
    if kind is not None:
        return f"a {kind} directory, whose parts can be opened: {', '.join(sorted(p.name for p in place.iterdir()))}"
    if not place.exists():
        return "nothing there"
    if not place.is_dir():
        return "a file"
    return f"a directory without {MARKER}, which recpo did not write, or an older recpo: then make it again"
