"""The manifest of a bundle: its contents, its origin, its features, and a checksum of every file and of itself.

::

    bundle/vocabularies/item_author.parquet   the values of a category, in the order of their codes
    bundle/item_encoders.safetensors          weights that compute vectors from the features of new items

NumPy and Arrow only; nothing is unpickled, and nothing names code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

import numpy as np

from recpo.artifacts.artifact import Artifact
from recpo.artifacts.checksums import MARKER, verify
from recpo.base.errors import RecpoError, reading
from recpo.base.features import SIDES, Categories, Category, Feature, FeatureSchema, Number, Reads, Vector, of_type
from recpo.base.feedback import FeedbackDefinition
from recpo.serving.histories import EncodedHistories

if TYPE_CHECKING:
    from recpo.policies.catalog_search import Precision


ITEM_ENCODERS: Final = "item_encoders.safetensors"
MANIFEST = "manifest.json"
ITEMS = "items.parquet"
ONNX_PROGRAM = "model.onnx"
WEIGHTS = "policy.safetensors"
CODES = "codes"
INDEX = "index.faiss"
VECTORS = "vectors.npy"
_PRECISIONS = ("float32", "float16", "int8")
_SIZES = ("num_items", "max_history", "k")
_TYPES: dict[str, type] = {  # of the facts, as JSON has them
    **dict.fromkeys(_SIZES, int),
    **dict.fromkeys(("reads_timestamps", "mask", "repeats"), bool),
    **dict.fromkeys(("feedback", "policy", "origin", "versions", "files", "features", "agreement", "index"), dict),
    "item_precision": str,
    "behaviors": list,
}
_OPTIONAL = ("agreement", "index")


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
        agreement: agreement of its lists with the policy's, if it rounds them (``recpo.serving.program``).
        index: measurements of the approximate index (``recpo.serving.program``); None = the complete catalog is
            scored.
        features: fitted features of the sides that the bundle reads: of items, for vectors of new ones (``recpo export
            --refresh``); of users and requests, for the program.
        behaviors: names of the behaviors that the program reads, in the order of their bits.
        mask: the program takes a mask of the items that may be listed (``recpo.serving.recommending``).
        repeats: items of the history may be listed again; only the items that a request excludes are left out.
    """

    kind: ClassVar = "bundle"
    version: ClassVar = 10
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
        features, feedback = self.features.to_json(), self.feedback.to_json()
        parts = {"features": features, "feedback": feedback, "program": program_interface(self)}
        self.write_facts(root, vars(self) | parts, _visible(root) - {MANIFEST, MARKER})

    @classmethod
    def _read(cls, root: Path) -> Self:
        """Reads the manifest and verifies every file of the bundle."""
        content = cls.facts_of(root)
        manifest = cls._parsed(content, root / MANIFEST)
        verify(root, manifest.files, cls.remedy())
        if unlisted := _visible(root) - {MANIFEST, MARKER, *manifest.files}:
            message = f"{root / min(unlisted)} is no file of this bundle (it has no checksum): remove it"
            raise RecpoError(message, code="untrusted", field=min(unlisted))
        return manifest

    @classmethod
    def _parsed(cls, content: dict[str, Any], path: Path) -> Self:
        def damaged(what: str, field: str) -> RecpoError:
            return RecpoError(f"{path} is damaged: {what}; {cls.remedy()}", code="damaged", field=field)

        found: dict[str, Any] = {name: content.get(name) for name in _TYPES}
        for name, kind in _TYPES.items():
            if type(found[name]) is not kind and not (name in _OPTIONAL and found[name] is None):
                raise damaged(f"{name} is {found[name]!r}, expected {kind.__name__}", name)
        sizes = {name: found[name] for name in _SIZES}
        policy, index = found["policy"], found["index"]
        if min(sizes.values()) < 1 or sizes["k"] > sizes["num_items"]:
            raise damaged(f"{sizes} are impossible", "sizes")
        if type(policy.get("class")) is not str or not isinstance(policy.get("options", 0), dict | None):
            raise damaged("policy has no class, or options that are none", "policy")
        if found["item_precision"] not in _PRECISIONS:
            raise damaged(f"item_precision is {found['item_precision']!r}", "item_precision")
        counts = [index.get(key) for key in ("probes", "oversampling")] if index is not None else []
        if not all(type(count) is int and count >= 1 for count in counts):
            raise damaged(f"index has probes and oversampling {counts}", "index")
        features = FeatureSchema.from_json(found["features"], f"{path}: features")
        unfitted = [one for side in SIDES for one in features.of(side) if not one.is_fitted]
        if unfitted or not all(type(name) is str for name in found["behaviors"]):
            raise damaged("features or behaviors are none that were fitted", "features")
        feedback = FeedbackDefinition.from_json(found["feedback"], f"{path}: feedback")
        parts = {"features": features, "feedback": feedback, "behaviors": tuple(found["behaviors"])}
        return cls(**found | parts)


#: ``reading`` of a file of a bundle.
readable: Final = partial(reading, remedy=BundleManifest.remedy())


EXCLUDE: Final = "exclude"
ALLOWED: Final = "allowed"


@dataclass(frozen=True)
class ProgramReads:
    """What a program reads of a request beyond items, feedback and what is excluded.

    Attributes:
        timestamps: times of events.
        behaviors: behaviors, as a bit set of each event.
        user: features of the user.
        context: features of the requests of the events, and of the one that is answered.
        mask: number of places of a mask of the items that may be listed; 0 = it has none, and takes them as ids to
            exclude.
        repeats: items of the history may be listed again; only what is excluded is not.
    """

    timestamps: bool = False
    behaviors: bool = False
    user: tuple[Feature, ...] = ()
    context: tuple[Feature, ...] = ()
    mask: int = 0
    repeats: bool = False

    @property
    def batches(self) -> Reads:
        """The parts that batches of prepared data have to contain for the program."""
        return Reads(self.behaviors, bool(self.user), bool(self.context))


@dataclass(frozen=True)
class ProgramInput:
    """One tensor.

    Attributes:
        name: in the program.
        shape: behind the users; a word is a size that each request chooses.
        type: of its numbers.
        meaning: for those who run the program without recpo.
        value: returns the input of encoded histories; None if they do not have it.
    """

    name: str
    shape: tuple[int | str, ...]
    type: Literal["int64", "float32", "bool"]
    meaning: str
    value: Callable[[EncodedHistories], np.ndarray | None]

    def of(self, inputs: EncodedHistories) -> np.ndarray:
        """The tensor, checked.

        Raises:
            RecpoError: it is missing, or of another shape or type.
        """
        found = self.value(inputs)
        if found is None:
            message = f"this policy reads {self.name}, and {self.name} are missing: hand them over with the histories"
            raise RecpoError(message, code="missing_value", field=self.name)
        sizes = [size if isinstance(size, int) else found.shape[-1] for size in self.shape]
        expected = (len(inputs.item_ids), *sizes)
        if found.dtype != self.type or found.shape != expected:
            message = f"{self.name}: expected {self.type} {list(expected)}, got {found.dtype} {list(found.shape)}"
            raise RecpoError(message, code="wrong_shape", field=self.name)
        return found


def program_inputs(max_history: int, reads: ProgramReads, exclude: bool = True) -> tuple[ProgramInput, ...]:
    """The tensors of a program, in their order.

    Args:
        max_history: H.
        reads: what it reads.
        exclude: whether it lists items, of which some are excluded.
    """

    def of_events(name: str, meaning: str) -> ProgramInput:
        return ProgramInput(name, (max_history,), "int64", meaning, attrgetter(name))

    found = [
        of_events("item_ids", "item_index, oldest first, 0 pads on the right"),
        of_events("feedback", "feedback level 0..5 of each event, 0 unknown"),
    ]
    if exclude:
        meaning = "item_index not to list, 0 pads"
        found.append(ProgramInput(EXCLUDE, (EXCLUDE,), "int64", meaning, attrgetter(EXCLUDE)))
    if reads.timestamps:
        found.append(of_events("timestamps", "milliseconds since the epoch, 0 pads"))
    if reads.behaviors:
        found.append(of_events("behaviors", "bit b: the user did the b-th of the manifest's behaviors"))
    found += _of_side("user", (), reads.user)
    found += _of_side("context", (max_history + 1,), reads.context)
    if exclude and reads.mask:
        meaning = "whether the item may be listed, place 0 is padding"
        found.append(ProgramInput(ALLOWED, (reads.mask,), "bool", meaning, lambda h: _mask(h, reads.mask)))
    return tuple(found)


def _mask(histories: EncodedHistories, places: int) -> np.ndarray:
    if histories.allowed is not None:
        return histories.allowed
    return np.broadcast_to(np.True_, (len(histories.item_ids), places))  # one byte, which ONNX Runtime copies to all


def _of_side(side: str, lead: tuple[int, ...], features: tuple[Feature, ...]) -> list[ProgramInput]:
    """Codes, lists, numbers and vectors of one side, those of which there are any."""
    at = "of the user" if side == "user" else "of the request of event j; behind the last one, of the one answered now"

    def part(name: str, width: int, kind: Literal["int64", "float32"], says: str, change: Any) -> ProgramInput:
        def value(histories: EncodedHistories) -> np.ndarray | None:
            arrays = getattr(histories, side)
            return None if arrays is None else change(arrays)

        return ProgramInput(f"{side}_{name}", (*lead, width), kind, f"{says}, {at}", value)

    categories, numbers = of_type(features, Category), of_type(features, Number)
    found: list[ProgramInput] = []
    if categories:
        names = ", ".join(one.name for one in categories)
        says = f"codes of {names}: 0 missing, 1 unknown, from 2 on the vocabulary"
        found.append(part("codes", len(categories), "int64", says, lambda a: a.codes))
    for place, listed in enumerate(of_type(features, Categories)):
        says = f"codes of {listed.name}, 0 pads"
        found.append(part(f"list_{listed.name}", listed.length, "int64", says, lambda a, p=place: a.lists[p]))
    if numbers:
        names = ", ".join(one.name for one in numbers)
        says = f"{names}, standardized; nan missing"
        found.append(part("numbers", len(numbers), "float32", says, lambda a: a.numbers))
    for place, vector in enumerate(of_type(features, Vector)):
        says = f"{vector.name}; nan missing"
        found.append(part(f"vector_{vector.name}", vector.width or 0, "float32", says, lambda a, p=place: a.vectors[p]))
    return found


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
