"""The tensors that a bundle's program is given: which ones, in which order, and what they are of encoded histories.

Export, runtimes, manifest and metadata all come through here. NumPy only; torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import numpy as np

from recpo.base.errors import RecpoError
from recpo.base.features import Categories, Category, Feature, FeatureArrays, Number, Reads, Vector, of_type
from recpo.serving.encoded_histories import EncodedHistories

EXCLUDE: Final = "exclude"
ALLOWED: Final = "allowed"
_T = TypeVar("_T")


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
            raise RecpoError(
                f"this policy reads {self.name}, and {self.name} are missing: hand them over with the histories",
                code="missing_value",
                field=self.name,
            )
        sizes = [size if isinstance(size, int) else found.shape[-1] for size in self.shape]
        expected = (len(inputs.item_ids), *sizes)
        if found.dtype != self.type or found.shape != expected:
            raise RecpoError(
                f"{self.name}: expected {self.type} {list(expected)}, got {found.dtype} {list(found.shape)}",
                code="wrong_shape",
                field=self.name,
            )
        return found


def program_inputs(max_history: int, reads: ProgramReads, exclude: bool = True) -> tuple[ProgramInput, ...]:
    """The tensors of a program, in their order.

    Args:
        max_history: H.
        reads: what it reads.
        exclude: whether it lists items, of which some are excluded.
    """
    history = (max_history,)
    found = [
        ProgramInput(
            "item_ids", history, "int64", "item_index, oldest first, 0 pads on the right", lambda h: h.item_ids
        ),
        ProgramInput(
            "feedback", history, "int64", "feedback level 0..5 of each event, 0 unknown", lambda h: h.feedback
        ),
    ]
    if exclude:
        meaning = "item_index not to list, 0 pads"
        found.append(ProgramInput(EXCLUDE, (EXCLUDE,), "int64", meaning, lambda h: h.exclude))
    if reads.timestamps:
        meaning = "milliseconds since the epoch, 0 pads"
        found.append(ProgramInput("timestamps", history, "int64", meaning, lambda h: h.timestamps))
    if reads.behaviors:
        meaning = "bit b: the user did the b-th of the manifest's behaviors"
        found.append(ProgramInput("behaviors", history, "int64", meaning, lambda h: h.behaviors))
    found += _of_side("user", (), reads.user, lambda h: h.user)
    found += _of_side("context", (max_history + 1,), reads.context, lambda h: h.context)
    if exclude and reads.mask:
        meaning = "whether the item may be listed, place 0 is padding"
        found.append(ProgramInput(ALLOWED, (reads.mask,), "bool", meaning, lambda h: _mask(h, reads.mask)))
    return tuple(found)


def features_of(
    side: str, features: tuple[Feature, ...], tensors: Mapping[str, _T], nothing: Callable[[str], _T]
) -> Any:
    """The fields of ``recpo.base.types.Features`` of one side, out of the tensors of a program by name.

    Args:
        side: ``user`` or ``context``.
        features: its features.
        tensors: by the names of ``program_inputs``.
        nothing: makes a tensor of width 0 of a type, where there is no feature of the kind.

    Returns:
        ``codes, lists, numbers, vectors``.
    """
    codes, numbers = f"{side}_codes", f"{side}_numbers"
    return (
        tensors[codes] if codes in tensors else nothing("int64"),
        tuple(tensors[f"{side}_list_{one.name}"] for one in of_type(features, Categories)),
        tensors[numbers] if numbers in tensors else nothing("float32"),
        tuple(tensors[f"{side}_vector_{one.name}"] for one in of_type(features, Vector)),
    )


def _mask(histories: EncodedHistories, places: int) -> np.ndarray:
    if histories.allowed is not None:
        return histories.allowed
    return np.ones((len(histories.item_ids), places), bool)


def _of_side(
    side: str,
    lead: tuple[int, ...],
    features: tuple[Feature, ...],
    arrays: Callable[[EncodedHistories], FeatureArrays | None],
) -> list[ProgramInput]:
    """Codes, lists, numbers and vectors of one side, those of which there are any."""
    at = "of the user" if side == "user" else "of the request of event j; behind the last one, of the one answered now"

    def given(change: Callable[[FeatureArrays], np.ndarray]) -> Callable[[EncodedHistories], np.ndarray | None]:
        return lambda histories: None if (found := arrays(histories)) is None else change(found)

    def part(name: str, width: int, kind: Literal["int64", "float32"], says: str, change: Any) -> ProgramInput:
        return ProgramInput(f"{side}_{name}", (*lead, width), kind, f"{says}, {at}", given(change))

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
