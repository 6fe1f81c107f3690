"""What users did, by names of columns and by texts: behaviors, kinds of events, opinions, and texts that mean true."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from recpo.log.column_facts import OF_TIMES, plain_name, words
from recpo.log.schema import FlagColumn

#: What users do with items: name of the behavior -> names of flag columns.
_CONVERSIONS: Final = ("conversion", "converted")
BEHAVIORS: Final[dict[str, tuple[str, ...]]] = {
    "click": ("click", "clicked", "clk"),
    "complete": ("complete", "completed", "finish", "finished"),
    "like": (
        *("like", "liked", "superlike", "superliked", "thumbsup", "upvote", "recommend", "recommended"),
        *("helpful", "useful"),
    ),
    "follow": ("follow", "followed", "subscribe", "subscribed"),
    "share": ("share", "shared", "forward", "forwarded"),
    "comment": ("comment", "commented"),
    "save": (
        *("save", "saved", "fav", "favorite", "favorited", "bookmark", "bookmarked"),
        *("collect", "addtolist", "wishlist", "addtowishlist", "shortlist", "shortlisted"),
    ),
    "cart": ("cart", "addtocart", "addedtocart", "atc"),
    "purchase": ("purchase", "purchased", "buy", "bought", "order", "ordered", "transaction", *_CONVERSIONS),
    "download": ("download", "downloaded", "install", "installed"),
    "profile": ("profileenter", "profilevisit"),
    "open": ("open", "opened"),
    "book": ("booking", "booked", "reservation", "reserved"),
    "apply": ("apply", "applied", "application"),
    "enroll": ("enroll", "enrolled", "signup", "signedup"),
    "contact": ("contact", "contacted", "message", "messaged", "reply", "replied"),
    "accept": ("accept", "accepted", "redeem", "redeemed"),
    "cook": ("cook", "cooked"),
    "attend": ("attend", "attended", "attendance"),
}

#: What users come for; a label of it is worth more than one of clicks, if there are enough.
CONVERSIONS: Final = ("purchase", "book", "apply", "enroll", "contact", "accept", "download", "cook", "attend")
ENOUGH_CONVERSIONS: Final = 1_000

#: Columns that state the kind of event of a row.
EVENT_KINDS: Final = (
    *("event", "eventtype", "eventname", "eventkind", "action", "actiontype", "behavior", "behaviortype"),
    *("type", "kind", "interaction", "interactiontype", "activity", "activitytype"),
)

#: Beginnings of kinds of events that take something back.
_UNDONE: Final = (
    *("remove", "delete", "cancel", "return", "refund", "unlike", "unsave", "unfollow", "unsubscribe", "uninstall"),
    *("churn", "lost", "expire", "withdraw"),
)

#: Flags of events that the user did not want, and their values for all others: numbers, booleans, texts of files.
SKIPS: Final = ("skip", "skipped", "bounce", "bounced")
UNSKIPPED: Final = ("0", "false", "False", "FALSE")


def behavior_of(name: str, *, at: bool = False) -> str | None:
    """The behavior that the name of a flag column states; None = no known behavior.

    Args:
        name: name of the column.
        at: the column has times at which it happened, as ``clicked_at`` has.
    """
    said = words(name)
    plain = "".join(said[:-1]) if at and said[-1:] and said[-1] in OF_TIMES else plain_name(name)
    plain = plain.replace("our", "or")  # as spelled in the US
    return next((behavior for behavior, names in BEHAVIORS.items() if plain in names), None)


_TRUE: Final = frozenset({"yes", "y", "true", "t", "on", "1"})
_FALSE: Final = frozenset({"no", "n", "false", "f", "off", "0"})
#: words that state an opinion in any column
_LIKES: Final = frozenset(
    {"like", "liked", "thumbsup", "thumbup", "upvote", "upvoted", "love", "loved", "favorite", "👍", "❤"}
)
_DISLIKES: Final = frozenset(
    {"dislike", "disliked", "thumbsdown", "thumbdown", "downvote", "downvoted", "hate", "hated", "notinterested", "👎"}
)
#: words that state one only in a column that is called so: elsewhere "up" may be a direction
_UPS: Final = frozenset({"up", "positive", "pos", "good"})
_REPORTS: Final = frozenset({"hide", "hidden", "block", "blocked", "report", "reported"})
_DOWNS: Final = frozenset({"down", "negative", "neg", "bad"}) | _REPORTS
_NEITHER: Final = frozenset(
    {"", "none", "null", "nan", "na", "neutral", "nothing", "unknown", "nofeedback", "noreaction"}
)
_NAMES: Final = frozenset(
    {"thumb", "thumbs", "feedback", "reaction", "vote", "rating", "sentiment", "opinion", "like", "dislike", "verdict"}
)


#: What kinds of events say that are no behavior -> words for it, compared without case, spaces and separators.
_OTHER_KINDS: Final = {
    "dislike": _DISLIKES | _REPORTS | {"spam", "complaint", "disable", "disabled", "mute", "muted", "optout"},
    # what was offered
    "offer": {
        *("impression", "impressions", "exposure", "exposed", "shown", "show", "display", "displayed", "sent"),
        *("served", "offered", "offer", "seen"),
    },
    # an exposure where there are kinds for what follows, and else all that is known
    "view": {"view", "views", "viewed", "pageview", "pageviews", "pv", "itemview", "productview", "detail"},
    # that an offer was not taken
    "decline": {
        *("pass", "passed", "skip", "skipped", "reject", "rejected", "decline", "declined", "ignore", "ignored"),
        *("dismiss", "dismissed", "nope", "left", "swipeleft", "noaction", "noclick", "noresponse", "noreply"),
        *("unanswered", "noshow"),
    },
    # what was offered, unless it is what was bought
    "delivery": {"delivered", "received"},
}


class Opinions(NamedTuple):
    """The texts of a column that state an opinion.

    Attributes:
        likes: those that mean that the user liked the item.
        dislikes: those that mean that the user disliked it.
        is_certain: the others mean neither, and the words or the name of the column say that these are opinions.
    """

    likes: tuple[str, ...]
    dislikes: tuple[str, ...]
    is_certain: bool


def opinions(name: str, texts: Sequence[str]) -> Opinions:
    """The opinions in a column.

    Args:
        name: name of the column.
        texts: its distinct texts.
    """
    plain = {text: _plain(text) for text in texts}
    likes = tuple(text for text, word in plain.items() if word in _LIKES | _UPS)
    dislikes = tuple(text for text, word in plain.items() if word in _DISLIKES | _DOWNS)
    rest = [word for text, word in plain.items() if text not in likes and text not in dislikes]
    is_clear = any(plain[text] in _LIKES | _DISLIKES for text in (*likes, *dislikes)) or bool(_NAMES & set(words(name)))
    return Opinions(likes, dislikes, is_clear and all(word in _NEITHER for word in rest))


def offers(texts: Sequence[str]) -> tuple[str, ...]:
    """The kinds of events among ``texts`` that only say what was offered, declined, taken back, or disliked.

    A view is an offer where another kind says what followed, such as a purchase, unless there are impressions; so is a
    click, unless there are impressions or views.
    """
    kinds = {text: event_kind(text) for text in texts}
    followed = {kind for kind in kinds.values() if kind in BEHAVIORS}
    delivery = None if "purchase" in followed else "offer"
    kinds = {text: delivery if kind == "delivery" else kind for text, kind in kinds.items()}
    views = ["view"] if followed else []
    offered = next((one for one in ("offer", *views) if one in kinds.values()), "click" if len(followed) > 1 else None)
    found = {text for text, kind in kinds.items() if kind in (offered, "decline") and kind is not None}
    return tuple(text for text, kind in kinds.items() if text in found or (found and kind in ("undone", "dislike")))


def are_kinds(texts: Sequence[str]) -> bool:
    """Whether the texts of a column, whatever it is called, are kinds of events: offers, and what followed."""
    offered = offers(texts)
    outcomes = [event_kind(text) for text in texts if text not in offered]
    return bool(offered and outcomes) and all(kind in BEHAVIORS for kind in outcomes)


def event_kind(text: str) -> str | None:
    """What a kind of event says: a behavior, undone, dislike, offer, view, decline or delivery; None = nothing known.

    It may be one word among others, as in ``ad_view`` or ``contact_seller``.
    """
    plain = _plain(text)
    if plain.startswith(_UNDONE):
        return "undone"
    for one in (text, plain.removesuffix("s"), *words(text), *(word.removesuffix("s") for word in words(text))):
        if (behavior := behavior_of(one)) is not None:
            return behavior
        if kind := next((kind for kind, names in _OTHER_KINDS.items() if _plain(one) in names), None):
            return kind
    return None


def outcome_grades(texts: Sequence[str]) -> dict[str, float]:
    """Grade of each kind of event that is no offer: 1; where there are conversions, other outcomes have half of theirs.

    So has a message that was opened, where others were clicked, because programs open messages by themselves. Kinds
    that are not known, such as ``scroll`` or ``bounce``, have a grade only if no other followed.

    Grades are by value in simulated shops: of a view, a cart and a purchase 0, 0.5 and 1 give policies that are worth
    more, by the probability of a purchase, than 0, 1 and 1, and as much as 0, 0 and 1 (docs/your_own_log.md).
    """
    offered = offers(texts)
    outcomes = [text for text in texts if text not in offered]
    outcomes = [text for text in outcomes if event_kind(text) is not None] or outcomes
    bought = [text for text in outcomes if event_kind(text) in CONVERSIONS]
    bought = bought or [text for text in outcomes if event_kind(text) != "open"]
    return {text: 0.5 if bought and text not in bought else 1.0 for text in outcomes}


def true_texts(texts: Sequence[str]) -> tuple[str, ...]:
    """The texts that mean true, such as "yes", if all texts mean true or false; else empty."""
    plain = {text: _plain(text) for text in texts}
    if not all(word in _TRUE | _FALSE | _NEITHER for word in plain.values()):
        return ()
    return tuple(text for text, word in plain.items() if word in _TRUE)


def _plain(text: str) -> str:
    """A text without case, spaces, separators, and the colors of emoji."""
    return "".join(letter for letter in text.lower() if letter.isalnum() or letter in "👍👎❤")


def flag_of(column: str, texts: tuple[str, ...]) -> FlagColumn:
    """The flag that is true for these texts of a column."""
    return FlagColumn(column, texts[0] if len(texts) == 1 else texts)


def either(texts: Sequence[str]) -> str:
    """The texts for people: ``'up' or 'down'``."""
    return " or ".join(f"'{text}'" for text in texts)
