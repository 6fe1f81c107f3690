"""Dates that are not written as in ISO 8601, such as 31.01.2026, 1/31/2026 6:30 PM, 20260131 or 31-Jan-2026."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

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
#: Hours, minutes and seconds behind a date, and also as the last digits of 20260131183000.
CLOCK: Final = r"[T, ]([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?"
DIGITS: Final = r"(?:[T ]|^[0-9]{8})([0-9]{1,2}):?([0-9]{2}):?([0-9]{2})?"
HALF: Final = r"(?i)[0-9] ?([ap])\.?m\b"
OFFSET: Final = r":[0-9]{2}(?:\.[0-9]+)? ?([+-][0-9]{2}:?[0-9]{2})\b"
_MOSTLY: Final = 0.5  # of the texts, more than this share, are written so
_WRONG: Final = 0.005  # of the dates, at most, are none
_FEW: Final = 20
_FIRST, _END = 19_950_101, 20_400_101  # days that digits may be


def forms_of(texts: pa.ChunkedArray) -> tuple[str, ...]:
    """The forms in which most of the texts are dates; a number above twelve is no month."""
    distinct = [str(one) for one in texts.drop_null().unique().to_pylist()]
    return tuple(form for form in DATE_FORMS if _are_written(distinct[:_FEW], form) and _are_written(distinct, form))


def _are_written(texts: Sequence[str], form: str) -> bool:
    pattern, (_, month, day) = PATTERNS[form]
    found = [one for text in texts if (one := re.search(pattern, text)) is not None]
    wrong = sum((one[month].isdigit() and int(one[month]) > 12) or int(one[day]) > 31 for one in found)
    return len(found) > _MOSTLY * len(texts) and wrong <= _WRONG * len(found)


def has_half_days(text: str) -> bool:
    """Whether a text ends with AM or PM."""
    return re.search(HALF, text) is not None


def are_dates(numbers: np.ndarray) -> bool:
    """Whether whole numbers are digits of dates, such as 20260131, 202601311830 and 20260131183000."""
    for after in (1, 10**4, 10**6):
        day = numbers // after
        month, of_month = day // 100 % 100, day % 100
        is_month, is_day = (month >= 1) & (month <= 12), (of_month >= 1) & (of_month <= 31)
        if ((day >= _FIRST) & (day < _END) & is_month & is_day).all():
            return True
    return False
