"""The features of items, users and requests: the meaning of a column, and the values that were fitted for it.

A feature is declared with a name and, if it differs, a column. ``recpo prepare`` fits it (vocabulary, mean and standard
deviation, width) on the train period alone and writes the result to the manifest. All readers of features take their
order, codes and sizes from there.

Codes of categories: 0 missing, 1 unknown (a value that the train period did not contain), from 2 on the values of the
vocabulary by descending count, then by value.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeVar

from recpo.errors import RecpoError

Side = Literal["item", "user", "context"]
"""The owner of a feature: an item, a user, or the request that showed an event."""
SIDES: Final[tuple[Side, ...]] = ("item", "user", "context")


class Reads(NamedTuple):
    """What batches contain besides items, feedback and times. Parts that are not read are not loaded.

    Attributes:
        behaviors: bit sets of behaviors.
        user: features of users.
        context: features of requests.
    """

    behaviors: bool = False
    user: bool = False
    context: bool = False

    def __or__(self, other: tuple[object, ...]) -> Reads:
        """The parts that at least one of the two reads."""
        return Reads(*(bool(own or their) for own, their in zip(self, other, strict=True)))


MISSING, UNKNOWN, FIRST_CODE = 0, 1, 2
_REMEDY: Final = "prepare the log again"
_F = TypeVar("_F", bound="Feature")


class Feature(ABC):
    """A column with a meaning. Implementations are frozen dataclasses.

    Attributes:
        name: name of the feature in the manifest and on disk.
        column: its column in the table or log; None = ``name``.
        fitted: fields that ``recpo prepare`` fills in and users must not give.
    """

    name: str
    column: str | None
    fitted: ClassVar[tuple[str, ...]] = ()

    @property
    def source(self) -> str:
        """The column that it is read from."""
        return self.name if self.column is None else self.column

    @property
    def is_fitted(self) -> bool:
        """Whether ``recpo prepare`` has filled in the fitted fields."""
        return all(getattr(self, field) is not None for field in self.fitted)

    def to_json(self) -> dict[str, Any]:
        """The input of ``feature_from_json``."""
        return {"type": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class Category(Feature):
    """One value from a vocabulary: an author, a language, a device; integers, strings or booleans.

    Args:
        name: name of the feature.
        column: its column; null = ``name``.
        min_count: values with fewer items (users, events) in the train period are unknown.
        num_codes: fitted, leave it out; missing, unknown and the vocabulary.
    """

    name: str
    column: str | None = None
    min_count: int = 1
    num_codes: int | None = None

    fitted: ClassVar[tuple[str, ...]] = ("num_codes",)


@dataclass(frozen=True)
class Categories(Feature):
    """A set of values from one vocabulary: genres, tags. An empty list is missing.

    Args:
        name: name of the feature.
        column: its column, of lists, or of strings with a separator; null = ``name``.
        separator: separator between the values of a string, such as ``|``; null = the column contains lists.
        length: maximum number of values to keep; the most frequent ones come first.
        min_count: values with fewer items (users, events) in the train period are unknown.
        num_codes: fitted, leave it out; missing, unknown and the vocabulary.
    """

    name: str
    column: str | None = None
    separator: str | None = None
    length: int = 16
    min_count: int = 1
    num_codes: int | None = None

    fitted: ClassVar[tuple[str, ...]] = ("num_codes",)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise RecpoError(f"feature {self.name}: length {self.length} must be at least 1")
        if self.separator == "":
            raise RecpoError(f"feature {self.name}: the separator is empty; null = the column holds lists")


@dataclass(frozen=True)
class Number(Feature):
    """A number, standardized: ``(x - mean) / std``; nan = missing.

    Args:
        name: name of the feature.
        column: its column; null = ``name``.
        log: apply ``sign(x) * log(1 + |x|)`` first, for counts and durations over several orders of magnitude.
        mean: fitted, leave it out.
        std: fitted, leave it out; standard deviation of the population, 1 if all values are equal.
    """

    name: str
    column: str | None = None
    log: bool = False
    mean: float | None = None
    std: float | None = None

    fitted: ClassVar[tuple[str, ...]] = ("mean", "std")


@dataclass(frozen=True)
class Vector(Feature):
    """A dense vector, such as a text or image embedding, unchanged; a row of nan = missing.

    Args:
        name: name of the feature.
        column: its column, with lists of numbers of equal length; null = ``name``.
        width: number of components; null = the length of the first vector.
    """

    name: str
    column: str | None = None
    width: int | None = None

    fitted: ClassVar[tuple[str, ...]] = ("width",)


FEATURE_TYPES: Final[tuple[type[Feature], ...]] = (Category, Categories, Number, Vector)


@dataclass(frozen=True)
class FeatureSchema:
    """The features of a prepared directory, in the order of ``recpo.types.Features``.

    Attributes:
        item: features of items.
        user: features of users.
        context: features of the request that showed an event.
    """

    item: tuple[Feature, ...] = ()
    user: tuple[Feature, ...] = ()
    context: tuple[Feature, ...] = ()

    def __post_init__(self) -> None:
        for side in SIDES:
            names = [feature.name for feature in self.of(side)]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise RecpoError(f"features: two {side} features have the name {twice[0]!r}; rename one")

    def of(self, side: Side) -> tuple[Feature, ...]:
        """The features of one side."""
        found: tuple[Feature, ...] = getattr(self, side)
        return found

    def __bool__(self) -> bool:
        """Whether there is any feature."""
        return bool(self.item or self.user or self.context)

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """The input of ``from_json``: the features by side."""
        return {side: [feature.to_json() for feature in self.of(side)] for side in SIDES}

    @classmethod
    def from_json(cls, content: Any, source: str = "features") -> FeatureSchema:
        """Reads the output of ``to_json``; None gives a schema without features.

        Args:
            content: the parsed JSON.
            source: the name of its file, for messages.

        Raises:
            RecpoError: a key is missing, or a type or field is unknown.
        """
        if content is None:
            return cls()
        try:
            sides = {side: tuple(feature_from_json(one) for one in content[side]) for side in SIDES}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RecpoError(f"{source} is damaged ({error!r}): {_REMEDY}") from error
        return cls(**sides)


def feature_from_json(content: dict[str, Any]) -> Feature:
    """Reads the output of ``Feature.to_json``.

    Raises:
        ValueError: the type is unknown.
        TypeError: a field is unknown or missing.
    """
    kinds = {kind.__name__: kind for kind in FEATURE_TYPES}
    if content["type"] not in kinds:
        raise ValueError(f"type {content['type']!r}, expected one of {', '.join(kinds)}")
    kind = kinds[content["type"]]
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if missing := known - content.keys():
        raise ValueError(f"{content['type']} without {', '.join(sorted(missing))}")
    return kind(**{name: value for name, value in content.items() if name != "type"})


def of_type(features: Sequence[Feature], kind: type[_F]) -> tuple[_F, ...]:
    """The features of one type, in order."""
    return tuple(feature for feature in features if isinstance(feature, kind))
