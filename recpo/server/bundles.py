"""Versions of a bundle: which version serves, and how another version replaces it.

``recpo serve`` takes a bundle, or a directory of bundles whose names are their versions::

    versions/2026-11-21/   a bundle
    versions/2026-11-22/   a bundle
    versions/active.json   the version that serves, and the versions that served before it

Every worker of every server watches ``active.json``. A bundle takes over after it was loaded, its checksums were
verified, it answered its golden requests, and it has the item attributes by which the server re-ranks. Each batch is
ranked by a single bundle.
"""

import logging
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import pyarrow as pa

from recpo.artifacts.checksums import described, kind_of, sha256
from recpo.artifacts.documents import read_json
from recpo.artifacts.outputs import locked_parent, write_json
from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import FittedFeatures
from recpo.base.features import Categories, Category, Feature, Number, Vector
from recpo.lists.reranking import ItemAttributes, Reranker, RerankOptions
from recpo.serving.bundle import Bundle, bundle_item_vectors, check_golden
from recpo.serving.histories import ITEM_ID
from recpo.serving.manifest import MANIFEST, ONNX_PROGRAM
from recpo.serving.recommending import ATTRIBUTES
from recpo.serving.runtimes import CPU_PROVIDER

ACTIVE: Final = "active.json"
_SMALL_PROGRAM: Final = 1 << 26  # bytes
_KEPT: Final = 100  # number of names in the list of versions that served before
_LOG = logging.getLogger("recpo.server")
_REMEDY: Final = f"remove {ACTIVE}: the newest version serves then"


@dataclass(frozen=True)
class Reranking:
    """A method and its options.

    Attributes:
        method: chooses slates.
        options: the shortlist, and the file of item attributes.
    """

    method: Reranker
    options: RerankOptions

    def known(self, bundle: Bundle) -> ItemAttributes:
        """What the method reads of the items of a bundle.

        Raises:
            RecpoError: an attribute, its file or the item vectors are missing.
        """
        options = self.options
        if options.attributes is None and ATTRIBUTES in bundle.manifest.files:
            options = replace(options, attributes=bundle.root / ATTRIBUTES, item_id=ITEM_ID)
        known = options.read(self.method.attributes, bundle.items)
        if self.method.reads_vectors and known.vectors is None:
            known = known.with_vectors(bundle_item_vectors(bundle.root, bundle.manifest))
        return known


@dataclass(frozen=True)
class LoadedBundle:
    """A bundle that has answered its golden requests.

    Attributes:
        name: name of the model.
        version: name of the bundle's directory; for a single bundle, the first digits of its checksum.
        checksum: SHA-256 of its manifest, which contains the checksums of all its files.
        golden: number of golden requests that it answered; 0 = it has none.
        bundle: the bundle.
        known: what re-ranking reads of its items; None = nothing.
    """

    name: str
    version: str
    checksum: str
    golden: int
    bundle: Bundle
    known: ItemAttributes | None = None

    @classmethod
    def load(
        cls,
        path: Path,
        name: str,
        version: str | None = None,
        *,
        threads: int = 0,
        reranking: Reranking | None = None,
        provider: str = CPU_PROVIDER,
    ) -> Self:
        """Verifies, loads and tests a bundle.

        Args:
            path: the bundle.
            name: name of the model.
            version: name of the version; None = from the checksum.
            threads: threads of ONNX Runtime; 0 = one for a program below 64 MiB, for which a second one takes more
                processor time than it saves, otherwise one per core.
            reranking: how complete slates are chosen; None = in the policy's order.
            provider: execution provider of ONNX Runtime.

        Raises:
            RecpoError: it is not a bundle, was altered, answers its golden requests differently than at export, or
                lacks item attributes that re-ranking needs.
        """
        size = sum(file.stat().st_size for file in path.glob(f"{ONNX_PROGRAM}*"))
        bundle = Bundle.open(path, threads=threads or int(size < _SMALL_PROGRAM), provider=provider)
        checksum = sha256(path / MANIFEST)
        golden = check_golden(bundle)
        known = None if reranking is None else reranking.known(bundle)
        return cls(name, version or checksum[:12], checksum, golden, bundle, known)


class Versions:
    """The bundle that serves, and the other versions.

    Args:
        path: a bundle, or a directory of bundles.
        name: name of the model; None = the name of the directory.
        on_change: called with each bundle that starts to serve.
        shortlist: minimum list length of a bundle, for exploration and re-ranking.
        load: loads a bundle: ``LoadedBundle.load``, with options of its own.

    Raises:
        RecpoError: there is no bundle, or the one that should serve cannot.
    """

    def __init__(
        self,
        path: Path,
        name: str | None = None,
        on_change: Callable[[LoadedBundle], None] = lambda _: None,
        shortlist: int = 0,
        load: Callable[[Path, str, str | None], LoadedBundle] = LoadedBundle.load,
    ) -> None:
        self.path = path
        self.name = name or path.resolve().name
        self._alone = kind_of(path) == "bundle" or (path / MANIFEST).is_file()
        self._loading = threading.Lock()
        self._on_change = on_change
        self._tried: str | None = None
        self._shortlist, self._load_bundle = shortlist, load
        self.current = self._load(None if self._alone else self._state()[0] or _newest(path))
        on_change(self.current)

    @property
    def names(self) -> list[str]:
        """All versions, oldest first: sorted by name, with numbers in names sorted by value."""
        return [self.current.version] if self._alone else _versions(self.path)

    @property
    def previous(self) -> list[str]:
        """Versions that served before, the latest last."""
        return [] if self._alone else self._state()[1]

    def follow(self) -> LoadedBundle:
        """Switches to the version in ``active.json``. If it cannot serve, the current version continues.

        Every worker calls this periodically; this is how a swap reaches all workers.
        """
        if self._alone:
            return self.current
        try:
            wanted = self._state()[0]  # no file means no swap so far: a newer directory may be half copied
            if wanted is not None and wanted not in (self.current.version, self._tried):
                self._tried = wanted  # a version that cannot serve is tried once, until another version is requested
                self._serve(self._load(wanted))
            if wanted == self.current.version:
                self._tried = None
        except RecpoError as error:
            _LOG.error("the bundle stays %s: %s", self.current.version, error)
        return self.current

    def swap(self, version: str | None = None) -> LoadedBundle:
        """Switches to another version: here at once, and in other workers with their next check.

        Args:
            version: the version; None = the newest. For a single bundle, the bundle that is now at its path.

        Raises:
            RecpoError: there is no such version, or it cannot serve; the current one continues.
        """
        if self._alone:
            if version not in (None, self.current.version):
                raise RecpoError(
                    f"{self.path} is a bundle, not a directory of versions: serve the directory that holds the bundles",
                    code="wrong_file",
                    field=str(self.path),
                )
            return self._serve(self._load(None))
        version = _newest(self.path) if version is None else version
        if version not in self.names:
            message = f"{self.path} has no version {version!r}, it has {', '.join(self.names)}"
            raise RecpoError(message, code="unknown_name", field="version")
        loaded = self._load(version)  # it must pass its tests before other workers see it
        with locked_parent(self.path / ACTIVE):
            active, previous = self._state()
            before = active or self.current.version
            if before != version:
                self._write(version, [*previous, before])
        return self._serve(loaded)

    def rollback(self) -> LoadedBundle:
        """Switches to the version that served before the current one.

        Raises:
            RecpoError: there was none, or it cannot serve; the current one continues.
        """
        previous = self.previous
        if not previous:
            message = f"{self.path}: no version served before {self.current.version}: swap to one by its name"
            raise RecpoError(message, code="empty", field="previous")
        loaded = self._load(previous[-1])
        with locked_parent(self.path / ACTIVE):
            if self._state()[1] != previous:
                message = f"{self.path}: another swap has just happened: look at the versions, and ask again"
                raise RecpoError(message, code="in_use", field=ACTIVE)
            self._write(previous[-1], previous[:-1])
        return self._serve(loaded)

    def _load(self, version: str | None) -> LoadedBundle:
        with self._loading:
            place = self.path if version is None else self.path / version
            loaded = self._load_bundle(place, self.name, version)
        if loaded.bundle.k < self._shortlist:
            message = (
                f"{place} lists {loaded.bundle.k} items, exploration or re-ranking takes {self._shortlist}: set "
                f"--exploration.shortlist or --rerank_options.shortlist {loaded.bundle.k}, or export with a larger --k"
            )
            raise RecpoError(message, code="out_of_range", field="k")
        if hasattr(self, "current") and log_kind(loaded) != log_kind(self.current):
            message = (
                f"version {loaded.version} has other item ids, feedback, features or behaviors than "
                f"{self.current.version} ({log_kind(loaded)}, not {log_kind(self.current)}): give it a server and a "
                "log of its own"
            )
            raise RecpoError(message, code="mismatch", field="version")
        return loaded

    def _serve(self, loaded: LoadedBundle) -> LoadedBundle:
        self.current = loaded  # running batches keep the bundle they started with
        self._tried = None
        self._on_change(loaded)
        _LOG.info("bundle %s %s serves (%s)", loaded.name, loaded.version, loaded.checksum[:12])
        return loaded

    def _state(self) -> tuple[str | None, list[str]]:
        """The version that serves according to ``active.json``, and the versions before it."""
        place = self.path / ACTIVE
        if not place.is_file():
            return None, []
        content = read_json(place, _REMEDY)
        active, previous = content.get("active"), content.get("previous")
        names = [active, *previous] if isinstance(previous, list) else [None]
        if not all(isinstance(name, str) and re.fullmatch(r"[^/\0]+", name) and name[0] != "." for name in names):
            message = f"{place} is damaged: active and previous are names of versions; {_REMEDY}"
            raise RecpoError(message, code="damaged", field=ACTIVE)
        return active, previous  # type: ignore[return-value]  # a list, as checked

    def _write(self, active: str, previous: Sequence[str]) -> None:
        write_json(self.path / ACTIVE, {"active": active, "previous": list(previous)[-_KEPT:]})


def log_kind(loaded: LoadedBundle) -> tuple[object, ...]:
    """The properties that the log's columns and the requests depend on."""
    known = loaded.bundle.features
    sources = [(one.source, getattr(one, "width", None)) for one in (*known.user.features, *known.context.features)]
    return (
        "strings" if loaded.bundle.items.is_text else "integers",
        loaded.bundle.feedback.levels_from,
        *known.behaviors,
        *feature_kinds(known.user),
        *feature_kinds(known.context),
        *sources,
    )


def _versions(path: Path) -> list[str]:
    if not path.is_dir():
        message = f"{path}: no such directory: give a bundle (`recpo export`), or a directory of bundles"
        raise RecpoError(message, code="missing_file", field=str(path))
    names = [child.name for child in path.iterdir() if child.name[0] not in "._" and (child / MANIFEST).is_file()]
    parts = {name: re.findall(r"[0-9]+|[^0-9]+", name) for name in names}
    return sorted(names, key=lambda name: [(int(part), "") if part.isdecimal() else (-1, part) for part in parts[name]])


def _newest(path: Path) -> str:
    names = _versions(path)
    if not names and (kind := kind_of(path)) is not None:
        message = f"{path} is not a bundle but {described(kind)}: make a bundle with `recpo export`"
        raise RecpoError(message, code="wrong_file", field=str(path))
    if not names:
        message = f"{path} is not a bundle and contains none: make one with `recpo export --out {path}/VERSION`"
        raise RecpoError(message, code="empty", field=str(path))
    return names[-1]


def feature_kinds(fitted: FittedFeatures) -> tuple[tuple[str, str], ...]:
    """Name and kind of value of each feature, in JSON and in the log."""
    return tuple((one.name, _value_kind(one, fitted)) for one in fitted.features)


def _value_kind(feature: Feature, fitted: FittedFeatures) -> str:
    if isinstance(feature, Number):
        return "number"
    if isinstance(feature, Vector):
        return "vector"
    kind = "string" if pa.types.is_string(fitted.vocabularies[feature.name].values.type) else "integer"
    if isinstance(feature, Category):
        return kind
    assert isinstance(feature, Categories)
    return f"{kind}s" if feature.separator is None else "string"
