"""The manifest of a bundle: its contents, its origin, its features, and a checksum of every file and of itself.

::

    bundle/vocabularies/item_author.parquet   the values of a category, in the order of their codes
    bundle/item_encoders.safetensors          weights that compute vectors from the features of new items

NumPy and Arrow only; nothing is unpickled, and nothing names code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from recpo.artifacts import MARKER, is_inside, sha256, verify
from recpo.artifacts.artifact import Artifact
from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import FittedFeatures, of_side
from recpo.base.features import SIDES, Categories, Category, Feature, FeatureSchema, Side
from recpo.base.feedback import FeedbackDefinition
from recpo.serving.encoded_histories import ProgramReads, program_inputs

if TYPE_CHECKING:
    from recpo.policies.catalog_search import Precision


ITEM_ENCODERS: Final = "item_encoders.safetensors"
# the policy whose weights say what the features of new items mean, without an encoder
_FACTORS: Final = "recpo.policies.baseline.FactorPolicy"
_FEATURE_REMEDY: Final = "copy or export the bundle again"


@dataclass(frozen=True)
class BundleFeatures:
    """The fitted features of each side that a bundle reads.

    Attributes:
        item: for the vectors of new items; None = the bundle has no item encoder.
        user: of the users; None = its policy does not read them.
        context: of the requests; None = its policy does not read them.
        behaviors: names of the behaviors that its policy reads, in the order of their bits.
    """

    item: FittedFeatures | None = None
    user: FittedFeatures | None = None
    context: FittedFeatures | None = None
    behaviors: tuple[str, ...] = ()

    @property
    def schema(self) -> FeatureSchema:
        """The features of these sides."""
        sides = ((self.of(side) or FittedFeatures((), {})).features for side in SIDES)
        return FeatureSchema(*sides)

    def of(self, side: Side) -> FittedFeatures | None:
        """The fitted features of one side."""
        found: FittedFeatures | None = getattr(self, side)
        return found

    def save(self, root: Path) -> None:
        """Writes the vocabularies into the directory of a bundle."""
        for side in SIDES:
            for name, vocabulary in (fitted.vocabularies if (fitted := self.of(side)) else {}).items():
                file = root / vocabulary_file(side, name)
                file.parent.mkdir(exist_ok=True)
                pq.write_table(pa.table({"value": vocabulary.values}), file)

    @classmethod
    def load(cls, root: Path, schema: FeatureSchema, behaviors: tuple[str, ...] = ()) -> BundleFeatures:
        """Reads the vocabularies of a bundle whose files are already verified.

        Raises:
            RecpoError: a vocabulary is missing or damaged.
        """
        found = {side: _fitted(root, side, schema.of(side)) for side in SIDES if schema.of(side)}
        return cls(found.get("item"), found.get("user"), found.get("context"), behaviors)


def vocabulary_files(schema: FeatureSchema) -> Iterator[str]:
    """The files of all vocabularies of a schema, relative to the directory."""
    return (vocabulary_file(side, name) for side in SIDES for name in schema.coded(side))


def vocabulary_file(side: Side, name: str) -> str:
    """The file of a vocabulary, relative to the directory, as in prepared data."""
    return f"vocabularies/{side}_{name}.parquet"


def _fitted(root: Path, side: Side, features: tuple[Feature, ...]) -> FittedFeatures:
    values = {}
    for feature in features:
        if isinstance(feature, Category | Categories):
            file = root / vocabulary_file(side, feature.name)
            try:
                values[feature.name] = pq.read_table(file, columns=["value"]).column(0).combine_chunks()
            except (OSError, pa.ArrowException) as error:
                raise RecpoError(
                    f"{file} cannot be read ({error}): {_FEATURE_REMEDY}", code="damaged", field=file.name
                ) from error
    fitted = of_side(features, values)
    for feature in features:
        if not isinstance(feature, Category | Categories):
            continue
        if fitted.vocabularies[feature.name].num_codes != feature.num_codes:
            raise RecpoError(
                f"{root / vocabulary_file(side, feature.name)} is no vocabulary of its schema: {_FEATURE_REMEDY}",
                code="damaged",
                field=feature.name,
            )
    return fitted


MANIFEST = "manifest.json"
ITEMS = "items.parquet"
ONNX_PROGRAM = "model.onnx"
WEIGHTS = "policy.safetensors"
CODES = "codes"
INDEX = "index.faiss"
VECTORS = "vectors.npy"
_REMEDY = "copy or export the bundle again"
_PRECISIONS = ("float32", "float16", "int8")
_T = TypeVar("_T")


@dataclass(frozen=True)
class BundleManifest(Artifact):
    """The content of ``manifest.json``.

    Attributes:
        num_items: catalog size V.
        max_history: H, events that the policy reads.
        k: length of the program's lists.
        reads_timestamps: the policy reads the time of events.
        feedback: how feedback levels are computed from raw events.
        policy: ``class``, the class of the policy, and ``options``, the constructor options for the torch engine;
            ``options`` is None if the policy is not recpo's own, so that the bundle has no torch engine.
        origin: where the policy comes from; for a run, ``run`` (the name of its directory), ``checkpoint``, ``weights``
            (SHA-256 of the checkpoint), ``catalog_checksum``, ``user_ids`` (integer or string, as in the data) and
            ``item_column`` (name of the item ids in the user's tables).
        versions: versions of recpo and torch at the time of export.
        files: SHA-256 of every other file, by its name in the bundle.
        item_precision: number format of the item vectors in the ONNX program: float32, float16 or int8.
        agreement: agreement of its lists with the policy's, if it rounds them (``recpo.serving.verification``).
        index: measurements of the approximate index (``recpo.serving.indexing``); None = the complete catalog is
            scored.
        features: fitted features of the sides that the bundle reads: of items, for vectors of new ones (``recpo export
            --refresh``); of users and requests, for the program.
        behaviors: names of the behaviors that the program reads, in the order of their bits.
        mask: the program takes a mask of the items that may be listed (``recpo.serving.attributes``).
        repeats: items of the history may be listed again; only the items that a request excludes are left out.
    """

    kind: ClassVar = "bundle"
    version: ClassVar = 7
    made_by: ClassVar = "recpo export"

    num_items: int
    max_history: int
    k: int
    reads_timestamps: bool
    feedback: FeedbackDefinition
    policy: Mapping[str, Any]
    origin: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    item_precision: Precision = "float32"
    agreement: Mapping[str, Any] | None = None
    index: Mapping[str, Any] | None = None
    features: FeatureSchema = field(default_factory=FeatureSchema)
    behaviors: tuple[str, ...] = ()
    mask: bool = False
    repeats: bool = False

    @property
    def reads(self) -> ProgramReads:
        """The program's inputs beyond items and feedback."""
        places = self.num_items + 1 if self.mask else 0
        return ProgramReads(
            self.reads_timestamps, bool(self.behaviors), self.features.user, self.features.context, places, self.repeats
        )

    @property
    def options(self) -> dict[str, Any] | None:
        """Constructor options of the policy; None if the bundle has no torch engine."""
        options: dict[str, Any] | None = self.policy["options"]
        return options

    def write(self, root: Path) -> None:
        """Completes a bundle: adds the SHA-256 of every file in ``root`` and of the manifest itself."""
        files = {name: sha256(root / name) for name in sorted(_visible(root) - {MANIFEST, MARKER})}
        content = {
            "num_items": self.num_items,
            "max_history": self.max_history,
            "k": self.k,
            "reads_timestamps": self.reads_timestamps,
            "feedback": self.feedback.to_json(),
            "policy": dict(self.policy),
            "origin": dict(self.origin),
            "versions": dict(self.versions),
            "item_precision": self.item_precision,
            "agreement": None if self.agreement is None else dict(self.agreement),
            "index": None if self.index is None else dict(self.index),
            "features": self.features.to_json(),
            "behaviors": list(self.behaviors),
            "mask": self.mask,
            "repeats": self.repeats,
            "files": files,
            "program": program_interface(self),
        }
        self.write_facts(root, content)

    @classmethod
    def read(cls, root: Path) -> BundleManifest:
        """Reads the manifest and verifies every file of the bundle.

        Raises:
            RecpoError: no bundle, an unfinished export, another format version, or a missing or altered file.
        """
        root = Path(root)
        content = cls.facts_of(root)
        manifest = cls._parsed(content, root / MANIFEST)
        verify(root, manifest.files, _REMEDY)
        if unlisted := _visible(root) - {MANIFEST, MARKER, *manifest.files}:
            raise RecpoError(
                f"{root / min(unlisted)} is no file of this bundle (it has no checksum): remove it",
                code="untrusted",
                field=min(unlisted),
            )
        return manifest

    @classmethod
    def _parsed(cls, content: dict[str, Any], path: Path) -> BundleManifest:
        def value(key: str, kind: type[_T]) -> _T:
            found = content.get(key)
            if type(found) is not kind:
                raise RecpoError(
                    f"{path} is damaged: {key} is {found!r}, expected {kind.__name__}; {_REMEDY}",
                    code="damaged",
                    field=key,
                )
            return found

        sizes = {key: value(key, int) for key in ("num_items", "max_history", "k")}
        if min(sizes.values()) < 1 or sizes["k"] > sizes["num_items"]:
            raise RecpoError(f"{path} is damaged: {sizes} are impossible; {_REMEDY}", code="damaged", field="sizes")
        policy = value("policy", dict)
        if type(policy.get("class")) is not str or not isinstance(policy.get("options", 0), dict | None):
            raise RecpoError(
                f"{path} is damaged: policy has no class, or options that are none; {_REMEDY}",
                code="damaged",
                field="policy",
            )
        files = value("files", dict)
        precision = value("item_precision", str)
        if precision not in _PRECISIONS:
            raise RecpoError(
                f"{path} is damaged: item_precision is {precision!r}; {_REMEDY}", code="damaged", field="item_precision"
            )
        index = None if content.get("index") is None else value("index", dict)
        counts = [index.get(key) for key in ("probes", "oversampling")] if index is not None else []
        if not all(type(count) is int and count >= 1 for count in counts):
            raise RecpoError(
                f"{path} is damaged: index has probes and oversampling {counts}; {_REMEDY}",
                code="damaged",
                field="index",
            )
        required = [ITEMS, ONNX_PROGRAM] + [WEIGHTS] * (policy["options"] is not None)
        required += [INDEX, VECTORS] * (index is not None)
        features = FeatureSchema.from_json(value("features", dict), f"{path}: features")
        encodes = bool(features.item) and policy["class"] != _FACTORS
        required += [*vocabulary_files(features), *[ITEM_ENCODERS] * encodes]
        behaviors = value("behaviors", list)
        unfitted = [one for side in SIDES for one in features.of(side) if not one.is_fitted]
        if unfitted or not all(type(name) is str for name in behaviors):
            raise RecpoError(
                f"{path} is damaged: features or behaviors are none that were fitted; {_REMEDY}",
                code="damaged",
                field="features",
            )
        if lacking := [name for name in required if name not in files]:
            raise RecpoError(
                f"{path} is damaged: no checksum of {lacking[0]}; {_REMEDY}", code="damaged", field=lacking[0]
            )
        if strange := [name for name, checksum in files.items() if not is_inside(name) or type(checksum) is not str]:
            raise RecpoError(
                f"{path} is damaged: {strange[0]!r} is no file of a bundle; {_REMEDY}",
                code="untrusted",
                field=strange[0],
            )
        return cls(
            **sizes,
            reads_timestamps=value("reads_timestamps", bool),
            feedback=FeedbackDefinition.from_json(value("feedback", dict), f"{path}: feedback"),
            policy=policy,
            origin=value("origin", dict),
            versions=value("versions", dict),
            files=files,
            item_precision=precision,  # type: ignore[arg-type]  # one of them, as checked
            agreement=None if content.get("agreement") is None else value("agreement", dict),
            index=index,
            features=features,
            behaviors=tuple(behaviors),
            mask=value("mask", bool),
            repeats=value("repeats", bool),
        )


def program_interface(manifest: BundleManifest) -> dict[str, dict[str, dict[str, Any]]]:
    """Inputs and outputs of ``model.onnx``, for use without recpo."""

    def tensor(kind: str, meaning: str, *shape: object) -> dict[str, Any]:
        return {"shape": ["users", *shape], "type": kind, "meaning": meaning}

    given = program_inputs(manifest.max_history, manifest.reads, exclude=manifest.index is None)
    inputs = {one.name: tensor(one.type, one.meaning, *one.shape) for one in given}
    if manifest.index is not None:
        meaning = f"a product with row i of {VECTORS} is the log-probability of item i up to a constant"
        return {"inputs": inputs, "outputs": {"states": tensor("float32", meaning, "dim")}}
    return {
        "inputs": inputs,
        "outputs": {
            "top_items": tensor("int64", "item_index, best first, 0 if no item is left", manifest.k),
            "scores": tensor("float32", "natural-log probabilities", manifest.k),
        },
    }


def _visible(root: Path) -> set[str]:
    """The files of a directory by their relative path, without hidden ones."""
    names = {file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()}
    return {name for name in names if not any(part.startswith(".") for part in name.split("/"))}
