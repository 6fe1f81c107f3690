"""Requests and answers as JSON, with their limits, and the features and behaviors of requests that a bundle accepts.

The OpenAPI page is generated from them.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, NotRequired, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator
from typing_extensions import TypedDict

from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import PolicyFeatures
from recpo.base.features import Side, Vector
from recpo.base.frames import LATEST_MS, are_seconds
from recpo.server.bundles import feature_kinds
from recpo.server.impressions import ID_PATTERN

_INT64 = 2**63

Id = Annotated[StrictInt, Field(ge=-_INT64, lt=_INT64)] | Annotated[StrictStr, Field(max_length=512)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Grade = Annotated[float, Field(strict=True, ge=0, le=1)]
_Text = Annotated[StrictStr, Field(max_length=512)]
_Single = StrictBool | StrictInt | Finite | _Text
#: The bundle determines the type for a feature: for a category an integer or a string, as in its vocabulary.
FeatureValue = _Single | Annotated[list[StrictInt | Finite | _Text], Field(max_length=4096)] | None
Features = Annotated[dict[str, FeatureValue], Field(max_length=256)]
Filter = Annotated[
    dict[str, Annotated[list[StrictBool | StrictInt | _Text], Field(max_length=10_000)]], Field(max_length=64)
]
Behaviors = Annotated[dict[str, StrictBool], Field(max_length=62)]


Time = Annotated[StrictInt, Field(ge=0, lt=LATEST_MS)]


class Event(TypedDict):
    """An event of the user's past."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]  # pydantic's way for a TypedDict

    item_id: Annotated[Id, Field(description="your id of the item, of the catalog's type")]
    timestamp: Annotated[Time, Field(description="when it was shown, milliseconds since 1970")]
    watch_time: NotRequired[Annotated[Finite | None, Field(description="seconds")]]
    duration: NotRequired[Annotated[Finite | None, Field(description="seconds")]]
    dislike: NotRequired[Annotated[StrictBool | None, Field(description="an explicit negative signal")]]
    label: NotRequired[Annotated[Grade | None, Field(description="how good it was, where there are no watch times")]]
    behaviors: NotRequired[
        Annotated[Behaviors | None, Field(description="what else the user did, by the names of the bundle's behaviors")]
    ]
    context: NotRequired[
        Annotated[Features | None, Field(description="features of the request in which it was shown, by their names")]
    ]


class RecommendRequest(BaseModel):
    """A request: the user, the user's past, and the number of items."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "user_id": 17,
                    "history": [
                        {
                            "item_id": 3,
                            "timestamp": 1767225600000,
                            "watch_time": 9.5,
                            "duration": 12.0,
                            "dislike": False,
                        }
                    ],
                    "k": 5,
                }
            ]
        },
    )

    user_id: Id
    history: list[Event] = Field(default=[], description="raw events in any order; feedback levels are computed here")
    k: Annotated[StrictInt, Field(ge=1)] | None = Field(
        default=None, description="how many items, at most the bundle's own k; null = that"
    )
    exclude: list[Id] = Field(default=[], description="items that must not be listed, beside those of the history")
    user: Features | None = Field(
        default=None, description="features of the user by their names, where the bundle reads them; null = not known"
    )
    context: Features | None = Field(
        default=None, description="features of this request by their names, where the bundle reads them"
    )
    allow: Filter | None = Field(
        default=None, description="attribute -> values: only items that have one of them in each attribute"
    )
    deny: Filter | None = Field(default=None, description="attribute -> values: no items that have one of them")
    explore: StrictBool | None = Field(
        default=None, description="draw the slate instead of taking the best items; null = as the server was started"
    )

    @model_validator(mode="after")
    def _times(self) -> Self:
        if any(are_seconds(event["timestamp"]) for event in self.history):
            raise ValueError("seconds? expected milliseconds since 1970")
        return self


class RecommendedItem(BaseModel):
    """An item of a slate."""

    item_id: int | str
    score: float | None = Field(
        description="natural-log probability under the policy, for a bundle with an index up to a constant of the "
        "request; null where it was not asked"
    )
    propensity: float | None = Field(
        description="probability of the item at a place of the slate that is drawn at random; null where it has no "
        "closed form, in probabilistic interleaving"
    )
    explored: bool = Field(description="it is none of the best items, which would be shown without exploration")
    team: str | None = Field(default=None, description="the variant that contributed it, in an interleaved slate only")


class Recommendation(BaseModel):
    """A slate, best first."""

    request_id: str | None = Field(
        description="id of this slate, in feedback and in the rows of the log; null where the server logs nothing, or "
        "no item is left to show"
    )
    bundle: str
    version: str
    checksum: str
    variant: str | None = Field(
        default=None,
        description="the variant that ranked it, of a server with variants; null where two are interleaved",
    )
    items: list[RecommendedItem]


class ItemOutcome(BaseModel):
    """The outcome of an item that was shown. Omitted values stay unknown."""

    model_config = ConfigDict(extra="forbid")

    item_id: Id
    watch_time: Finite | None = Field(default=None, ge=0, description="seconds")
    duration: Finite | None = Field(default=None, gt=0, description="seconds")
    dislike: StrictBool | None = None
    label: Grade | None = None
    behaviors: Behaviors | None = Field(default=None, description="what else the user did, or did not do")

    def values(self) -> dict[str, Any]:
        """The known values; behaviors by name."""
        return self.model_dump(exclude={"item_id", "behaviors"}, exclude_none=True) | (self.behaviors or {})


class FeedbackRequest(BaseModel):
    """Outcomes of one slate. More may follow; a later value replaces an earlier one."""

    model_config = ConfigDict(extra="forbid")

    request_id: Annotated[str, Field(pattern=ID_PATTERN, description="of the answer with the slate")]
    outcomes: list[ItemOutcome] = Field(min_length=1, max_length=1000)


class FeedbackAnswer(BaseModel):
    """Number of outcomes on disk."""

    accepted: int


class SwapRequest(BaseModel):
    """The version that should serve."""

    model_config = ConfigDict(extra="forbid")

    version: Annotated[str, Field(min_length=1, max_length=255)] | None = Field(
        default=None, description="name of the version; null = the newest"
    )


class VersionsAnswer(BaseModel):
    """The version that serves, and the other versions."""

    name: str
    version: str
    checksum: str
    golden_requests: int = Field(description="how many it has answered; 0 = it was exported without them")
    versions: list[str]
    previous: list[str] = Field(description="what served before, the latest last: where a rollback leads")


class Fault(BaseModel):
    """The error, in words for the sender of the request."""

    detail: str
    x_request_id: str = Field(description="of this HTTP request, as in the header X-Request-ID and the process log")


def known_features(
    known: PolicyFeatures, side: Side, values: Mapping[str, Any] | None, where: str
) -> dict[str, Any] | None:
    """The features of a request by name, in the form of columns; None if none are given or read.

    Args:
        known: the fitted features of the bundle.
        side: whose features.
        values: the values of the request; features that are not named are missing.
        where: the field of the request, for messages.

    Raises:
        RecpoError: a feature that the bundle does not read, or an invalid value.
    """
    fitted = known.of(side)
    if values is None:
        return None
    kinds = dict(feature_kinds(fitted))
    validate_names(values, kinds, "features", where)
    widths = {one.name: one.width for one in fitted.features if isinstance(one, Vector)}
    return {name: _value(kinds[name], value, widths.get(name), f"{where}.{name}") for name, value in values.items()}


def validate_names(values: Mapping[str, Any], known: Collection[str], what: str, where: str) -> None:
    """Raises ``RecpoError`` if the field ``where`` of a request names features or behaviors that the bundle lacks."""
    strange = next((name for name in values if name not in known), None)
    if strange is not None:
        read = f"the {what} {', '.join(known)}" if known else f"no such {what}"
        message = f"{where}.{strange:.80}: this bundle reads {read}"
        raise RecpoError(message, code="unknown_name", field=f"{where}.{strange}")


def _value(kind: str, value: Any, width: int | None, where: str) -> Any:
    if value is None:
        return None
    if kind in ("integers", "strings", "vector"):
        if not isinstance(value, list) or (width is not None and len(value) != width):
            message = f"{where}: expected a list{'' if width is None else f' of {width} numbers'}"
            raise RecpoError(message, code="wrong_type", field=where)
        one = {"integers": "integer", "strings": "string", "vector": "number"}[kind]
        return [_single(one, part, where) for part in value]
    return _single(kind, value, where)


def _single(kind: str, value: Any, where: str) -> Any:
    if kind == "string" and isinstance(value, str):
        return value
    if kind == "integer" and isinstance(value, int) and -_INT64 <= value < _INT64:
        return int(value)  # true and false are 1 and 0, as in a column of flags
    if kind == "number" and isinstance(value, int | float) and abs(value) < 1e38:
        return float(value)
    message = f"{where}: expected {'an integer' if kind == 'integer' else f'a {kind}'}"
    raise RecpoError(message, code="wrong_type", field=where)
