"""Common column names in logs, and the units that column names state."""

from __future__ import annotations

import re
from typing import Final

from recpo.log.schema import LogColumns

#: What items are called, parts before wholes; with a unit of time or "length" after it, it is the item's duration.
_ITEMS: Final = (
    *("item", "video", "movie", "product", "article", "track", "song", "episode", "film", "book", "lesson", "lecture"),
    *("clip", "game", "recipe", "hotel", "restaurant", "podcast", "course"),
)
#: What items are called in an id only: alone these are other things as often, such as the text of a post.
_ITEMS_WITH_ID: Final = (
    *("photo", "content", "news", "post", "ad", "app", "business", "poi", "feed", "show", "stream", "audiobook"),
    *("reel", "listing", "place", "venue", "job", "offer", "image", "pin", "asset", "story", "title"),
)

#: What users do for a while; with a unit of time after it, or "time" or "duration", it is the watch time.
_USES: Final = (
    *("watch", "watched", "play", "played", "listen", "listened", "stream", "streamed", "view", "viewed", "read"),
    *("dwell", "stay", "spent", "heard", "consumed", "engaged", "engagement", "attention"),
)

#: Names of each standard column, the most reliable first; compared without case, separators, units and RecBole's types.
NAMES: Final[dict[str, tuple[str, ...]]] = {
    LogColumns.USER_ID: (
        *("userid", "uid", "user", "useridx", "userindex", "customerid", "customer", "memberid", "visitorid"),
        *("listener", "viewer", "visitor", "reader", "buyer", "player", "shopper", "member", "subscriber"),
        *("viewerid", "reviewerid", "accountid", "profileid", "listenerid", "readerid", "buyerid", "playerid"),
        *("shopperid", "subscriberid", "householdkey", "householdid", "clientid", "deviceid", "sessionid"),
    ),
    LogColumns.ITEM_ID: (
        *("itemid", "iid", "item", "itemidx", "itemindex", *(f"{name}id" for name in (*_ITEMS, *_ITEMS_WITH_ID))),
        *("asin", "parentasin", "sku", "goodsid", "isbn", "gtin", "upc", "productcode", "itemcode"),
        *_ITEMS,
        *("artistid", "artist"),
    ),
    LogColumns.TIMESTAMP: (
        *("timestamp", "ts", "time", "eventtime", "eventtimestamp", "datetime", "unixtime", "unixreviewtime"),
        *("reviewtime", "createdat", "created", "showtime", "clicktime", "ratedat", "viewedat", "playedat"),
        *("watchedat", "startedat", "listenedat", "purchasedat", "orderedat", "date", "eventdate"),
        *("position", "pos", "order", "seq", "step"),
    ),
    LogColumns.WATCH_TIME: (
        *("watchtime", "playtime", "playingtime", "playduration", "played", "watchduration", "watched", "dwelltime"),
        *("dwell", "staytime", "stayduration", "viewtime", "viewduration", "listeningtime", "listentime", "listened"),
        *("readingtime", *(f"{use}time" for use in _USES), *(f"time{use}" for use in _USES)),
    ),
    LogColumns.DURATION: (
        *("duration", "videoduration", "itemduration", "tracklength", "videolength", "length", "runtime"),
        *(f"{name}{length}" for name in (*_ITEMS, *_ITEMS_WITH_ID) for length in ("duration", "length", "runtime")),
    ),
    LogColumns.DISLIKE: (
        *("dislike", "disliked", "hate", "hated", "thumbsdown", "thumbdown", "downvote", "notinterested", "hide"),
        *("hidden", "negativefeedback", "blocked", "reported", "dismissed", "uninterested"),
    ),
    LogColumns.LABEL: (
        *("rating", "ratings", "score", "stars", "overall", "grade", "reviewscore", "label", "target"),
        *("watchratio", "playedratiopct", "playedratio", "completion", "completionrate", "longview"),
    ),
    LogColumns.PROPENSITY: (
        *("propensity", "propensityscore", "pscore", "loggingprobability", "behaviorprobability", "probability"),
        *("actionprob", "loggingprob"),
    ),
    LogColumns.IS_RANDOM: ("israndom", "israndomized", "rand", "israndomexposure", "random", "randomexposure"),
    LogColumns.REQUEST_ID: ("requestid", "reqid", "impressionid", "slateid", "searchid", "pageviewid", "traceid"),
}

#: What users do with items: name of the behavior -> names of flag columns.
BEHAVIORS: Final[dict[str, tuple[str, ...]]] = {
    "click": ("click", "clicked", "clk"),
    "like": ("like", "liked", "thumbsup", "upvote"),
    "follow": ("follow", "followed", "subscribe", "subscribed"),
    "share": ("share", "shared", "forward", "forwarded"),
    "comment": ("comment", "commented"),
    "save": ("save", "saved", "favorite", "favorited", "bookmark", "bookmarked", "collect", "addtolist"),
    "cart": ("cart", "addtocart", "addedtocart", "atc"),
    "purchase": ("purchase", "purchased", "buy", "bought", "order", "ordered", "conversion", "converted"),
    "download": ("download", "downloaded", "install", "installed"),
    "profile": ("profileenter", "profilevisit"),
}

#: Columns that state the kind of event of a row.
EVENT_KINDS: Final = ("event", "eventtype", "action", "actiontype", "behavior", "behaviortype", "type")

_UNITS: Final[dict[str, str]] = {
    **dict.fromkeys(("ns", "nanos", "nanoseconds"), "ns"),
    **dict.fromkeys(("us", "micros", "microseconds"), "us"),
    **dict.fromkeys(("ms", "msec", "msecs", "millis", "milliseconds"), "ms"),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), "min"),
}
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_TYPE: Final = re.compile(r":(token|float|token_seq|float_seq)$")  # type suffixes in RecBole's atomic files


def words(name: str) -> list[str]:
    """The words of a column name, in lower case: ``playedMs`` and ``played_ms`` give the same words."""
    return [word.lower() for word in _WORD.findall(_TYPE.sub("", name))]


def unit_of_name(name: str) -> str | None:
    """The unit that a name states, such as ``ms`` for ``play_time_ms``; None = none or several."""
    said = {_UNITS[word] for word in words(name) if word in _UNITS}
    return said.pop() if len(said) == 1 else None


def plain_name(name: str) -> str:
    """A name without case, separators, units and a leading "is", as in the tables above."""
    kept = [word for word in words(name) if word not in _UNITS]
    joined = "".join(kept[1:] if kept[:1] == ["is"] and len(kept) > 1 else kept)
    return joined or "".join(words(name))


def rank_as(column: str, name: str) -> int | None:
    """How well a name matches a standard column: 0 is best; None = not one of its names."""
    names, full, plain = NAMES[column], "".join(words(name)), plain_name(name)
    if column == LogColumns.WATCH_TIME:
        plain = plain.removeprefix("total")
    if column == LogColumns.DURATION and plain in _ITEMS and unit_of_name(name) is not None:
        return len(names) + _ITEMS.index(plain)  # episode_minutes
    if column == LogColumns.WATCH_TIME and plain in _USES and unit_of_name(name) is not None:
        return len(names) + _USES.index(plain)  # play_seconds
    is_measure = column == LogColumns.ITEM_ID and unit_of_name(name) is not None
    return next((names.index(one) for one in ((full,) if is_measure else (full, plain)) if one in names), None)


def behavior_of(name: str) -> str | None:
    """The behavior that the name of a flag column states; None = no known behavior."""
    plain = plain_name(name)
    return next((behavior for behavior, names in BEHAVIORS.items() if plain in names), None)
