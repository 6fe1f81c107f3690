"""What the columns of an unknown log may be: facts about their values, common names, units, and texts of opinions."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from typing import Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recpo.base.features import is_text
from recpo.log.schema import DATED, MILLISECONDS_PER_UNIT, Derived, LogColumns

Kind = Literal["whole", "number", "flag", "text", "time", "other"]

#: clock times of a log lie in these years
_FIRST_MS: Final = datetime(1995, 1, 1, tzinfo=UTC).timestamp() * 1000
_LAST_MS: Final = datetime(2040, 1, 1, tzinfo=UTC).timestamp() * 1000
MOSTLY: Final = 0.5  # minimum share of text values with a date in a column of times
_EXAMPLES: Final = 3
FEW: Final = 20

_WEEKDAY: Final = r"^\s*(?:(?i:mon|tue|wed|thu|fri|sat|sun)[a-z]*,? )?"
_DAY, _YEAR = r"([0-9]{1,2})", r"((?:19|20)[0-9]{2})"
_MONTH = r"([0-9]{1,2}|(?i:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[A-Za-z]*)"
#: Form -> a pattern of the date, and which of its groups are year, month and day. The year may stand at the end, as in
#: ``Sat Jan 31 18:30:00 +0000 2026``.
PATTERNS: Final[Mapping[str, tuple[str, tuple[int, int, int]]]] = {
    "day_first": (rf"{_WEEKDAY}{_DAY}[./ -]{_MONTH}\.?[./ -]{_YEAR}(?:[^0-9]|$)", (3, 2, 1)),
    "month_first": (rf"{_WEEKDAY}{_MONTH}\.?[./ -]{_DAY},?[./ -](?:.* )?{_YEAR}(?:[^0-9]|$)", (3, 1, 2)),
    "year_first": (
        rf"^\s*{_YEAR}[./-]?([0-9]{{2}})[./-]?([0-9]{{2}})(?:[^0-9]|$|[0-9]{{4}}(?:[0-9]{{2}})?$)",
        (1, 2, 3),
    ),
}
DATE_FORMS: Final = tuple(PATTERNS)
MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
#: Hours, minutes and seconds behind a date, and also as the last digits of 20260131183000.
CLOCK: Final = r"[T, ]([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?"
DIGITS: Final = r"(?:[T ]|^[0-9]{8})([0-9]{1,2}):?([0-9]{2}):?([0-9]{2})?"
HALF: Final = r"(?i)[0-9] ?([ap])\.?m\b"
OFFSET: Final = r":[0-9]{2}(?:\.[0-9]+)? ?([+-][0-9]{2}:?[0-9]{2})\b"
_WRONG: Final = 0.005  # of the dates, at most, are none
_MANY: Final = 10_000  # distinct texts, at most, are looked at
_FIRST, _END = 19_950_101, 20_400_101  # days that digits may be
_MOST_SECONDS: Final = {"watch_time": (0.5, 7_200.0, 28_800.0), "duration": (1.0, 14_400.0, 86_400.0)}


@dataclass(frozen=True)
class ColumnFacts:
    """Facts about the values of one column.

    Attributes:
        name: name of the column.
        kind: whole numbers, numbers with fractions, flags (booleans, or 0 and 1 alone), text, times, or anything else.
        rows: number of inspected values, including nulls.
        nulls: number of missing values; nan counts as missing.
        distinct: number of distinct values.
        least: the smallest number; None if there are no numbers.
        median: median of the numbers above 0.
        high: the 99th percentile.
        most: the largest number.
        few: the distinct numbers, ascending, if there are at most 20.
        dated: share of text values that begin with a date.
        forms: the other forms in which they are dates (``DATE_FORMS``).
        examples: the first values, as text.
        texts: the distinct texts, sorted, if there are at most 20.
        positive: number of numbers above 0.
    """

    name: str
    kind: Kind
    rows: int
    nulls: int
    distinct: int
    least: float | None = None
    median: float | None = None
    high: float | None = None
    most: float | None = None
    few: tuple[float, ...] | None = None
    dated: float = 0.0
    forms: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    positive: int = 0

    @property
    def is_sparse(self) -> bool:
        """Whether most events have no value."""
        return 2 * self.nulls > self.rows

    @property
    def is_number(self) -> bool:
        """Whether the values are integers, numbers with fractions, or flags."""
        return self.kind in ("whole", "number", "flag")

    @property
    def clock_units(self) -> list[str]:
        """The units since 1970 for which all numbers are times of the years 1995 to 2039, or the forms of dates."""
        if self.forms:
            return list(self.forms)
        if not self.is_number or self.least is None or self.most is None:
            return []
        factors = {unit: MILLISECONDS_PER_UNIT[unit] for unit in ("s", "ms", "us", "ns")}
        return [unit for unit, one in factors.items() if self.least * one >= _FIRST_MS and self.most * one < _LAST_MS]

    @property
    def has_digits(self) -> bool:
        """Whether these are texts that begin with a digit, such as ``73%`` or ``00:15:23``, but no dates."""
        return self.kind == "text" and self.dated < MOSTLY and all(one[:1].isdigit() for one in self.examples)

    @property
    def has_clock_end(self) -> bool:
        """Whether the smallest or the largest number alone would be a time in some unit."""
        ends = [replace(self, least=end, most=end) for end in (self.least, self.most) if end is not None]
        return any(one.clock_units for one in ends)

    @property
    def is_clock(self) -> bool:
        """Whether the values are times, and not one only."""
        is_time = self.kind == "time" or self.dated >= MOSTLY or bool(self.clock_units)
        return self.distinct > 1 and is_time

    @property
    def evidence(self) -> str:
        """A short description of the values: range, distinct values, nulls."""
        if self.is_number and self.least is not None and self.most is not None:
            shown = f"{_short(self.least)} to {_short(self.most)}"
        elif self.kind == "time":
            shown = f"{self.examples[0] if self.examples else '-'}, ..."
        else:
            shown = ", ".join(self.examples)
        nulls = f", {self.nulls / self.rows:.1%} null" if self.nulls else ""
        return f"{shown}; {self.distinct:,} distinct{nulls}"


def column_facts(name: str, values: pa.ChunkedArray) -> ColumnFacts:
    """Collects the facts about the values of one column."""
    kind, rows = values.type, len(values)
    if pa.types.is_dictionary(kind):
        values = values.cast(kind.value_type)
        kind = values.type
    of_numbers = pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal
    if any(of_number(kind) for of_number in of_numbers):
        return _number_facts(name, _numbers(values))
    examples = tuple(_text(value) for value in values.drop_null().unique()[:_EXAMPLES].to_pylist())
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return ColumnFacts(name, "time", rows, values.null_count, pc.count_distinct(values).as_py(), examples=examples)
    if not is_text(kind):
        return ColumnFacts(name, "other", rows, values.null_count, 0, examples=examples)
    known = values.drop_null()
    dated = pc.match_substring_regex(known, DATED).cast(pa.int64())
    share = (pc.sum(dated).as_py() or 0) / max(1, len(known))
    distinct = pc.count_distinct(known).as_py()
    texts = tuple(sorted(map(str, known.unique().to_pylist()))) if distinct <= FEW else ()
    first = map(str, known.unique()[:_EXAMPLES].to_pylist())
    forms = _forms_of(known) if share < MOSTLY else ("year_first",) if any(map(_has_half_days, first)) else ()
    facts = ColumnFacts(name, "text", rows, values.null_count, distinct, examples=examples, texts=texts)
    return replace(facts, dated=share, forms=forms)


def days_of_texts(values: pa.ChunkedArray, form: str | None) -> np.ndarray:
    """The days of dates since 1970, as they are written ``[N]`` float64, nan = no date.

    Args:
        values: texts, or whole numbers that are digits of dates.
        form: see ``DATE_FORMS``; None = as in ISO 8601.
    """
    pattern, places = (DATED, (1, 2, 3)) if form is None else PATTERNS[form]
    group = count(1)
    named = re.sub(r"\((?!\?)", lambda _: f"(?P<g{next(group)}>", pattern)
    if pa.types.is_floating(values.type):
        values = values.cast(pa.int64(), safe=False)
    parts = pc.extract_regex(values.cast(pa.string()).combine_chunks(), named)
    year, month, day = (pc.struct_field(parts, f"g{place}") for place in places)
    word = pc.index_in(pc.utf8_slice_codeunits(pc.utf8_lower(month), 0, 3), value_set=pa.array(MONTHS))
    number = pc.if_else(pc.match_substring_regex(month, "^[0-9]+$"), month, None).cast(pa.int32())
    month = pc.coalesce(number, pc.add(word, 1))
    year, month, day = (one.cast(pa.float64()).to_numpy(zero_copy_only=False) for one in (year, month, day))
    known = (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)
    months = np.where(known, (year - 1970) * 12 + month - 1, 0).astype("datetime64[M]")
    days: np.ndarray = months.astype("datetime64[D]").astype(np.float64) + day - 1
    return np.where(known, days, np.nan)


def _forms_of(texts: pa.ChunkedArray) -> tuple[str, ...]:
    """The forms in which most of the texts are dates; a number above twelve is no month."""
    found = texts.drop_null().unique()
    distinct = [str(one) for one in found.take(np.arange(0, len(found), len(found) // _MANY + 1)).to_pylist()]
    return tuple(form for form in DATE_FORMS if _are_written(distinct[:FEW], form) and _are_written(distinct, form))


def _are_written(texts: Sequence[str], form: str) -> bool:
    pattern, (_, month, day) = PATTERNS[form]
    found = [one for text in texts if (one := re.search(pattern, text)) is not None]
    wrong = sum((one[month].isdigit() and int(one[month]) > 12) or int(one[day]) > 31 for one in found)
    return len(found) > MOSTLY * len(texts) and wrong <= _WRONG * len(found)


def _has_half_days(text: str) -> bool:
    """Whether a text ends with AM or PM."""
    return re.search(HALF, text) is not None


def _are_dates(numbers: np.ndarray) -> bool:
    """Whether whole numbers are digits of dates, such as 20260131, 202601311830 and 20260131183000."""
    for after in (1, 10**4, 10**6):
        day = numbers // after
        month, of_month = day // 100 % 100, day % 100
        is_month, is_day = (month >= 1) & (month <= 12), (of_month >= 1) & (of_month <= 31)
        if ((day >= _FIRST) & (day < _END) & is_month & is_day).all():
            return True
    return False


def _numbers(values: pa.ChunkedArray) -> np.ndarray:
    whole = values.cast(pa.int8()) if pa.types.is_boolean(values.type) else values
    numbers: np.ndarray = whole.cast(pa.float64(), safe=False).to_numpy().astype(np.float64)
    return numbers


def _number_facts(name: str, numbers: np.ndarray) -> ColumnFacts:
    known = numbers[np.isfinite(numbers)]
    rows, nulls = len(numbers), len(numbers) - len(known)
    if not len(known):
        return ColumnFacts(name, "other", rows, nulls, 0)
    distinct = np.unique(known)
    few = tuple(distinct.tolist()) if len(distinct) <= FEW else None
    whole = bool((known == np.floor(known)).all())
    kind: Kind = "flag" if few is not None and set(few) <= {0.0, 1.0} else "whole" if whole else "number"
    positive = known[known > 0]
    return ColumnFacts(
        name,
        kind,
        rows,
        nulls,
        len(distinct),
        least=float(known.min()),
        median=float(np.median(positive)) if len(positive) else 0.0,
        high=float(np.quantile(known, 0.99)),
        most=float(known.max()),
        few=few,
        forms=("year_first",) if whole and _are_dates(distinct) else (),
        examples=tuple(_short(value) for value in known[:_EXAMPLES]),
        positive=len(positive),
    )


def length_units(facts: ColumnFacts, role: str) -> list[str]:
    """The units (seconds, milliseconds, microseconds) for which the numbers are plausible watch times or durations.

    Watch times are plausible if their median is half a second to two hours and the 99th percentile is under eight
    hours; durations, if their median is a second to four hours and they are under a day. Numbers with fractions are
    read as seconds if possible, because players count whole milliseconds.

    Args:
        facts: facts about the column.
        role: ``watch_time`` or ``duration``.
    """
    if facts.median is None or facts.high is None or not facts.is_number:
        return []
    units = [unit for unit in ("s", "ms", "us") if is_plausible(facts, role, unit)]
    return ["s"] if facts.kind == "number" and "s" in units else units


def is_plausible(facts: ColumnFacts, role: str, unit: str) -> bool:
    """Whether the numbers are plausible watch times or durations in a unit, by the rule of ``length_units``."""
    low, middle, high = _MOST_SECONDS[role]
    seconds = MILLISECONDS_PER_UNIT[unit] / 1000.0
    median, most = (facts.median or 0.0) * seconds, (facts.high or 0.0) * seconds
    return low <= median <= middle and most <= high


def read_as(facts: ColumnFacts, unit: str) -> str:
    """The median in a unit, for people: ``33 min in s``."""
    seconds = (facts.median or 0.0) * MILLISECONDS_PER_UNIT[unit] / 1000.0
    if seconds < 90:
        return f"{seconds:.3g} s in {unit}"
    return f"{seconds / 60:.3g} min in {unit}" if seconds < 5400 else f"{seconds / 3600:.3g} h in {unit}"


def _short(value: float) -> str:
    if value == int(value) and abs(value) < 1e18:
        return str(int(value)) if abs(value) >= 1e8 else f"{int(value):,}"
    return f"{value:.4g}"


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else text[:21] + "..."


#: of the shares: range of the median of those above 0, least 95th percentile, largest 99th percentile
_MEDIAN: Final = (0.02, 1.5)
_HIGH: Final = 0.3
_MOST: Final = 5.0
_WITHIN: Final = 0.75  # at least this part of the shares is at most 1 (with 5 % tolerance)
_CORRELATION: Final = 0.1  # least correlation of watch times with durations
_ENDS: Final = 0.02  # or: least part of plays that end exactly with the item
_LEAST_ROWS: Final = 50


class WatchShare(NamedTuple):
    """A column whose values are shares of the duration in one unit.

    Attributes:
        column: its name.
        unit: the unit of its values.
        within: part of the values that are at most the duration.
        is_certain: the values also follow the durations, or often equal them, and an item has many values.
    """

    column: str
    unit: str
    within: float
    is_certain: bool


def watch_shares(
    table: pa.Table, columns: Sequence[str], duration: str, duration_unit: str, item: str | None
) -> list[WatchShare]:
    """The columns of a log that could be watch times, by their values beside the durations.

    Args:
        table: rows of the log.
        columns: columns of numbers to consider.
        duration: column of the durations.
        duration_unit: their unit.
        item: column of the items; a number that each item has once, such as its tempo, is no watch time.
    """
    seconds = _numbers(table[duration]) * MILLISECONDS_PER_UNIT[duration_unit] / 1000.0
    found = []
    for column in columns:
        numbers = _numbers(table[column])
        for unit in ("s", "ms", "us", "min"):
            one = _share(column, unit, numbers * MILLISECONDS_PER_UNIT[unit] / 1000.0, seconds)
            if one is not None and not is_fixed(table, column, item):
                found.append(one)
    return found


def _share(column: str, unit: str, watched: np.ndarray, duration: np.ndarray) -> WatchShare | None:
    known = np.isfinite(watched) & np.isfinite(duration) & (duration > 0)
    watched, duration = watched[known], duration[known]
    if len(watched) < _LEAST_ROWS or watched.min() < 0 or not watched.any():
        return None
    shares = watched / duration
    within, median = float((shares <= 1.05).mean()), float(np.median(shares[shares > 0]))
    high, most = np.quantile(shares, [0.95, 0.99])
    if not (_MEDIAN[0] <= median <= _MEDIAN[1] and high >= _HIGH and most <= _MOST and within >= _WITHIN):
        return None
    ends = float((np.abs(shares - 1.0) < 0.005).mean())
    varied = watched.std() > 0 and duration.std() > 0
    follows = varied and float(np.corrcoef(watched, duration)[0, 1]) >= _CORRELATION
    return WatchShare(column, unit, within, bool(follows or ends >= _ENDS))


def is_fixed(table: pa.Table, column: str, key: str | None, least_rows: int = 2) -> bool:
    """Whether nearly every item, or user, has one value, with so many rows for each in the mean."""
    if key is None:
        return False
    pairs, keys = (table.group_by(names).aggregate([]).num_rows for names in ([key, column], [key]))
    return bool(keys * least_rows < table.num_rows and pairs <= 1.1 * keys)


#: What items are called, parts before wholes; with a unit of time or "length" after it, it is the item's duration.
_ITEMS: Final = (
    *("item", "video", "movie", "product", "article", "track", "song", "episode", "film", "book", "lesson", "lecture"),
    *("clip", "game", "recipe", "hotel", "restaurant", "podcast", "course", "anime", "manga", "joke", "banner"),
)
#: What items are called in an id only: alone these are other things as often, such as the text of a post.
ITEMS_WITH_ID: Final = (
    *("photo", "content", "news", "post", "ad", "app", "business", "poi", "feed", "show", "stream", "audiobook"),
    *("coupon", "voucher", "deal", "room", "property", "prop", "dish", "wine", "beer", "question", "exercise", "ep"),
    *("reel", "listing", "place", "venue", "job", "offer", "image", "pin", "asset", "story", "title", "creative"),
)

#: What users are called, alone or with "id" after it.
_PEOPLE: Final = (
    *("customer", "member", "msno", "visitor", "listener", "viewer", "reader", "reviewer", "buyer", "player"),
    *("shopper", "subscriber", "account", "profile", "client", "learner", "student", "guest", "traveler", "applicant"),
    *("candidate", "patron", "person", "participant", "respondent", "rater", "taster", "contact", "recipient", "card"),
    *("borrower", "voter", "follower", "swiper", "bidder", "investor", "donor"),
)
#: Last words of ids; "id" in the tables of names.
_IDS: Final = ("id", "guid", "uuid", "code", "no", "nr", "number", "hash", "key", "uri", "slug", "ref")

#: What has an id beside items.
_NO_ITEMS: Final = frozenset(
    {"user", "category", "session", "request", "order", "transaction", "event", "device", "tag", "genre", "author"}
    | {"artist", "brand", "review", "row", "parent", "city", "country", "region", "group", "page", "tab", "campaign"}
    | {"zip", "postal", "post", "status", "error", "phone", "house", "version", "currency", "language", "promo"}
    | {"auction", "visit", "impression", "slate", "query", "search", "placement", "experiment", "variant"}
    | {"invoice", "basket", "receipt", "display", "brewery", "winery", "publisher", "studio", "manufacturer"}
)

#: Words of ratings that are not the user's.
_OF_OTHERS: Final = frozenset({"avg", "average", "mean", "median", "content", "age", "predicted", "imdb", "critic"})

#: How often people played something, in logs of triples.
_COUNTS: Final = ("plays", "playcount", "numplays", "totalplays", "listens", "listencount", "scrobbles")

#: Names of labels that are the model's, or the item's, as often: they count where nothing says what users did.
MODEL_SCORES: Final = ("score", "relevance", "target", "weight", "points", *_COUNTS)

#: Words of the time of an event, where another column says when it ended or was received.
BEGINS: Final = frozenset({"start", "started", "begin", "began", "sent", "event", "created", "shown", "occurred"})

#: What users do for a while; with a unit of time after it, or "time" or "duration", it is the watch time.
_USES: Final = (
    *("watch", "watched", "play", "played", "listen", "listened", "stream", "streamed", "view", "viewed", "read"),
    *("dwell", "stay", "spent", "heard", "consumed", "engaged", "engagement", "attention", "reading", "listening"),
    *("watching", "viewing", "playing", "session", "timespent"),
)

#: Names of each standard column, the most reliable first; compared without case, separators, units and RecBole's types.
NAMES: Final[dict[str, tuple[str, ...]]] = {
    LogColumns.USER_ID: (
        *("userid", "uid", "user", "username", "useridx", "userindex", "userpseudoid", "distinctid", "anonymousid"),
        *("domainuserid", "fullvisitorid", "cookieid", "email"),
        *(f"{name}{end}" for end in ("id", "") for name in _PEOPLE),
        *("householdkey", "householdid", "deviceid", "sessionid", "session"),
    ),
    LogColumns.ITEM_ID: (
        *("itemid", "iid", "vid", "aid", "item", "itemidx", "itemindex"),
        *(f"{name}id" for name in (*_ITEMS, *ITEMS_WITH_ID)),
        *("asin", "parentasin", "sku", "goodsid", "isbn", "gtin", "upc", "productcode", "itemcode"),
        *_ITEMS,
        *("artistid", "artist"),
    ),
    LogColumns.TIMESTAMP: (
        *("timestamp", "ts", "time", "eventtime", "eventtimestamp", "datetime", "unixtime", "unixreviewtime"),
        *("reviewtime", "createdat", "created", "showtime", "clicktime", "ratedat", "viewedat", "playedat"),
        *("watchedat", "startedat", "listenedat", "purchasedat", "orderedat", "date", "eventdate", "eventts"),
        *("eventat", "showntime", "shownts", "shownat", "actiontime", "actionts", "actionat", "sentat"),
        *("sessionstart", "entertime"),
        *("position", "pos", "order", "seq", "step", "daynumber", "dayno", "dayindex"),
    ),
    LogColumns.WATCH_TIME: (
        *("watchtime", "playtime", "playingtime", "playduration", "played", "watchduration", "watched", "dwelltime"),
        *("dwell", "staytime", "stayduration", "viewtime", "viewduration", "listeningtime", "listentime", "listened"),
        *("sessionlen", "sessionlength", "sessionduration", "sessiontime", "visitduration", "timeonpage"),
        *("readingtime", *(f"{use}time" for use in _USES), *(f"time{use}" for use in _USES)),
    ),
    LogColumns.DURATION: (
        *("duration", "videoduration", "itemduration", "tracklength", "videolength", "length", "runtime"),
        *(f"{name}{length}" for name in (*_ITEMS, *ITEMS_WITH_ID) for length in ("duration", "length", "runtime")),
    ),
    LogColumns.DISLIKE: (
        *("dislike", "disliked", "hate", "hated", "thumbsdown", "thumbdown", "downvote", "notinterested", "hide"),
        *("hidden", "negativefeedback", "blocked", "reported", "dismissed", "uninterested"),
    ),
    LogColumns.LABEL: (
        *("rating", "ratings", "score", "stars", "overall", "grade", "reviewscore", "label", "target", "reward"),
        *("outcome", "response", "success", "relevance", "vote"),
        *("watchratio", "playedratiopct", "playedratio", "completion", "completionrate", "longview", "feedback"),
        *("percentwatched", "watchedpercent", "watchpercent", "pctwatched", "watchedpct", "completedpct", "progress"),
        *("progresspct", "progresspercent", "percentcomplete", "percentcompleted", "points"),
        *_COUNTS,
    ),
    LogColumns.PROPENSITY: (
        *("propensity", "propensityscore", "pscore", "loggingprobability", "behaviorprobability", "probability"),
        *("actionprob", "loggingprob", "showprob", "shownprob", "displayprob", "selectionprob", "exposureprob"),
    ),
    LogColumns.IS_RANDOM: (
        *("israndom", "israndomized", "rand", "israndomexposure", "random", "randomexposure", "randomized"),
        *("randomsort", "randomranking", "randomorder"),
    ),
    LogColumns.REQUEST_ID: (
        *("requestid", "reqid", "impressionid", "slateid", "searchid", "pageviewid", "traceid"),
        *("auctionid", "visitid", "queryid"),
    ),
}

#: Words in the names of the times from which and until which an item is available.
_BOUNDS: Final = {
    Derived.AVAILABLE_FROM: frozenset(
        {"availablefrom", "availablesince", "validfrom", "onlinesince", "published", "publish", "publication", "pub"}
        | {"posted", "post", "listed", "listing", "originallisted", "created", "creation", "release", "released"}
        | {"uploaded", "upload", "added", "launch", "launched", "opens", "opened", "firstpublished"}
    ),
    Derived.AVAILABLE_UNTIL: frozenset(
        {"availableuntil", "availableto", "validuntil", "validto", "validthrough", "expires", "expire", "expired"}
        | {"expiry", "expiration", "closed", "closes", "closing", "close", "ended", "ends", "end", "removed"}
        | {"delisted", "unlisted", "deadline", "applicationdeadline", "sold", "deleted", "withdrawn", "retired"}
        | {"archived", "discontinued", "deactivated", "offlinesince", "bookinguntil", "onlineuntil", "saleend"}
        | {"salesend"}
    ),
}
#: Words for times, which may follow these.
OF_TIMES: Final = frozenset({"at", "on", "date", "time", "timestamp", "ts", "dt", "datetime", "utc", "day"})

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
    """The words of a column name, in lower case: ``playedMs`` and ``played_ms`` give the same words.

    Of a field of a record, such as ``payload.item_id``, those of the field.
    """
    return [word.lower() for word in _WORD.findall(_TYPE.sub("", name).rpartition(".")[2])]


def unit_of_name(name: str) -> str | None:
    """The unit that a name states, such as ``ms`` for ``play_time_ms``; None = none or several."""
    said = {_UNITS[word] for word in words(name) if word in _UNITS}
    return said.pop() if len(said) == 1 else None


#: First and last words of flags that add nothing.
_BEFORE_FLAGS, _AFTER_FLAGS = ("is", "has", "was", "did", "had", "my"), ("bool", "flag", "ind", "indicator", "yn")


def plain_name(name: str) -> str:
    """A name without case, separators, units, and what only says that it is a flag, as in the tables above."""
    kept = [word for word in words(name) if word not in _UNITS]
    kept = kept[1:] if len(kept) > 1 and kept[0] in _BEFORE_FLAGS else kept
    kept = kept[:-1] if len(kept) > 1 and kept[-1] in _AFTER_FLAGS else kept
    return "".join(kept or words(name))


def is_called_id(name: str) -> bool:
    """Whether a name ends as that of an id."""
    said = words(name)
    return len(said) > 1 and said[-1] in _IDS


def is_id_of_something(name: str) -> bool:
    """Whether a name ends as that of an id, and not of what items have in common or what happens to them."""
    return is_called_id(name) and may_be_id(name)


def may_be_id(name: str) -> bool:
    """Whether a name says nothing that items have in common, and nothing that happens to them."""
    return not _NO_ITEMS & set(words(name))


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
    said, variants = words(name), [full] if is_measure else [full, plain]
    if column in (LogColumns.ITEM_ID, LogColumns.USER_ID) and len(said) > 1 and said[-1] in _IDS:
        named = said[:-2] if len(said) > 2 and said[-2] in _IDS else said[:-1]
        variants.append("".join(named) + "id")  # member_no, gameCode, session_id_hash
    found = next((names.index(one) for one in variants if one in names), None)
    if column == LogColumns.LABEL and unit_of_name(name) is not None:
        return None  # response_seconds
    if found is not None or column != LogColumns.LABEL or _OF_OTHERS & set(words(name)):
        return found
    said = [word for word in said if not word.isdigit()]
    return len(names) if said[-1:] in (["rating"], ["stars"]) else None  # Book-Rating, Rating (1-5)


def may_be_label(facts: ColumnFacts) -> bool:
    """Whether the values of a column differ, and are no points that people earn: as a rating they are at most 100."""
    return facts.distinct > 1 and (plain_name(facts.name) != "points" or (facts.most or 0.0) <= 100)


def of_most_events(named: Sequence[ColumnFacts]) -> ColumnFacts:
    """The first of columns that are called like labels; where most events have none, the next that most have.

    People rate what they feel like rating, and every event says how much of it they used.
    """
    first, known = named[0], [one for one in named if not one.is_sparse]
    others = (one for one in known if plain_name(one.name) not in MODEL_SCORES)
    return first if first in known else next(others, first)


def bound_of(name: str) -> str | None:
    """The bound of an item's availability that a column of times is called; None = neither."""
    said = [word for word in words(name) if word not in OF_TIMES and word not in _UNITS]
    said = said[1:] if len(said) > 1 and said[0] in (*_ITEMS, *ITEMS_WITH_ID) else said
    return next((bound for bound, names in _BOUNDS.items() if "".join(said) in names), None)
