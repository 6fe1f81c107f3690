"""Texts in columns of a log that state an opinion (up, down, liked, 👎) or a flag (yes, no)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from recpo.log.column_names import words

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
_DOWNS: Final = frozenset(
    {"down", "negative", "neg", "bad", "hide", "hidden", "block", "blocked", "report", "reported"}
)
_NEITHER: Final = frozenset(
    {"", "none", "null", "nan", "na", "neutral", "nothing", "unknown", "nofeedback", "noreaction"}
)
_NAMES: Final = frozenset(
    {"thumb", "thumbs", "feedback", "reaction", "vote", "rating", "sentiment", "opinion", "like", "dislike", "verdict"}
)


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


def opinions(name: str, texts: Sequence[str]) -> Opinions | None:
    """The opinions in a column; None if no text is one.

    Args:
        name: name of the column.
        texts: its distinct texts.
    """
    plain = {text: _plain(text) for text in texts}
    likes = tuple(text for text, word in plain.items() if word in _LIKES | _UPS)
    dislikes = tuple(text for text, word in plain.items() if word in _DISLIKES | _DOWNS)
    if not likes and not dislikes:
        return None
    rest = [word for text, word in plain.items() if text not in likes and text not in dislikes]
    is_clear = any(plain[text] in _LIKES | _DISLIKES for text in (*likes, *dislikes)) or bool(_NAMES & set(words(name)))
    return Opinions(likes, dislikes, is_clear and all(word in _NEITHER for word in rest))


def true_texts(texts: Sequence[str]) -> tuple[str, ...]:
    """The texts that mean true, such as "yes", if all texts mean true or false; else empty."""
    plain = {text: _plain(text) for text in texts}
    if not all(word in _TRUE | _FALSE | _NEITHER for word in plain.values()):
        return ()
    return tuple(text for text, word in plain.items() if word in _TRUE)


def _plain(text: str) -> str:
    """A text without case, spaces, separators, and the colors of emoji."""
    return "".join(letter for letter in text.lower() if letter.isalnum() or letter in "👍👎❤")
