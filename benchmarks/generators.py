"""Logs of other makers: their users, tastes and loggers share nothing with the worlds of `recpo simulate`.

`recpo fit` is judged on them as on any log (``decisions.py --logs books carts groceries``): what it reads, what it
decides, and what its lists are worth. Each function returns the log as a frame, the true value of every
item for every user ``[users, items]``, and tables that lie beside the log, by name.

- ``banners``: impressions of a Thompson sampler with propensities; a table of users explains most of the taste.
- ``books``: ratings of 1 to 5 stars that people give to what they chose themselves, with a table of genres.
- ``carts``: views, carts and purchases as rows of a shop.
- ``clips``: watch times of people with several interests; half of them are shown what suits them.
- ``groceries``: purchases of things that people buy again, and of new ones.
- ``jobs``: views and applications; a table says when a posting begins and ends.
- ``market``: the same of a shop where what is put into a cart is liked, and what is bought is also affordable.
- ``news``: impressions and clicks; articles age, and half of a feed is personal.
- ``podcasts``: seconds heard of episodes, whose lengths are in a table.
- ``shop``: purchases alone, of which one leads to the next.
- ``songs``: plays of the radio and of a library, most of them to the end of the track.
- ``thumbs``: thumbs up or down for offers of a bandit that knows no persons.
- ``trends``: clips are liked or not, and what everybody likes changes within days.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import pandas as pd
from scipy.special import expit

START_MS: Final = 1_700_000_000_000
DAY_MS: Final = 86_400_000
KINDS: Final = dict(enumerate(("view", "cart", "purchase")))
Array = np.ndarray
Made = tuple[pd.DataFrame, Array, dict[str, pd.DataFrame]]
Events = Iterator[tuple[Array, ...]]


def banners(draw: np.random.Generator, users: int = 6_000, items: int = 80) -> Made:
    """Three places of a page, with a few clicks in a hundred; the true value is the probability of one in the first."""
    kind, segment, age = draw.integers(0, 8, items), draw.integers(0, 5, users), draw.integers(0, 5, users)
    taste = draw.normal(0, 0.6, (5, 8))[segment] + draw.normal(0, 0.4, (5, 8))[age] + draw.normal(0, 0.25, (users, 8))
    click = expit(taste[:, kind] + draw.normal(0, 0.4, items) - 4.1)
    clicked, missed, places = np.ones(items), np.full(items, 40.0), np.array([1, 0.8, 0.65])
    shown: list[list[tuple[Array, ...]]] = [[] for _ in range(users)]
    for day in range(28):
        drawn = np.argsort(-draw.beta(clicked, missed, (2_000, items)))[:, :3]
        chance = np.stack([np.bincount(place, minlength=items) for place in drawn.T]) / len(drawn)
        for user in np.flatnonzero(draw.random(users) < 0.3):
            item = drawn[draw.integers(len(drawn))]
            did = draw.random(3) < click[user, item] * places
            np.add.at(clicked, item, did)
            np.add.at(missed, item, ~did)
            moment = np.full(3, START_MS + day * DAY_MS + draw.integers(DAY_MS))
            shown[user].append((item, moment, did, chance[range(3), item]))
    nothing = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0))
    visits = (tuple(map(np.concatenate, zip(nothing, *own, strict=True))) for own in shown)
    people = {"segment": [f"segment {one}" for one in segment], "age": [f"age {one}" for one in age]}
    tables = {"items": pd.DataFrame({"item_id": np.arange(items), "kind": [f"kind {one}" for one in kind]})}
    tables["users"] = pd.DataFrame({"user_id": np.arange(users), **people})
    return frame(visits, "click", "propensity"), click, tables


def books(draw: np.random.Generator, users: int = 3_000, items: int = 2_000) -> Made:
    """What is rated is chosen by fame and by taste; the true value is the expected rating, from 0 to 1."""
    genres = 20
    genre = draw.choice(genres, items, p=draw.dirichlet(np.full(genres, 2.0)))
    quality = draw.normal(0, 0.6, items)
    fame = draw.normal(0, 1.3, items) + 0.4 * quality
    by_genre = draw.normal(0, 0.9, (users, genres))[:, genre]
    affinity = by_genre + draw.normal(0, 0.35, (users, 6)) @ draw.normal(size=(6, items)) + quality
    rating = 3.2 + 0.9 * affinity + draw.normal(0, 0.4, (users, 1))

    def events() -> Events:
        for user, number in enumerate(draw.lognormal(3.4, 0.8, users).clip(8, items / 4).astype(int)):
            item = draw.permutation(top(fame + 0.7 * affinity[user], number, draw))
            yield item, times(number, 120, draw), (rating[user, item] + draw.normal(0, 0.7, number)).round().clip(1, 5)

    table = pd.DataFrame({"item_id": np.arange(items), "genre": [f"genre {number}" for number in genre]})
    return frame(events(), "rating"), ((rating - 1) / 4).clip(0, 1), {"items": table}


def carts(draw: np.random.Generator, users: int = 2_500, items: int = 1_500) -> Made:
    """Views, and what follows some of them, as rows; the true value is how probable a purchase is."""
    kinds = 25
    kind, taste = draw.integers(0, kinds, items), draw.dirichlet(np.full(kinds, 0.25), users)
    affinity = 0.6 * np.log(taste[:, kind] + 0.01) + 0.5 * draw.normal(size=(users, 8)) @ draw.normal(size=(8, items))
    bought = expit(0.9 * (affinity - affinity.mean()) + draw.normal(0, 0.8, items) - 3.2)
    fame = draw.normal(0, 1, items)

    def events() -> Events:
        for user, number in enumerate(draw.lognormal(3.2, 0.7, users).clip(6, items / 4).astype(int)):
            viewed, moment = draw.permutation(top(fame + 0.6 * affinity[user], number, draw)), times(number, 30, draw)
            yield steps(viewed, moment, np.sqrt(bought[user, viewed]) > draw.random((2, number)))

    return frame(events(), "event_type").replace({"event_type": KINDS}), bought, {}


def clips(draw: np.random.Generator, users: int = 2_000, items: int = 2_500) -> Made:
    """The true value is the expected share of the duration that is watched; likes are rare."""
    centers = draw.normal(size=(40, 12))
    vectors = centers[draw.integers(0, 40, items)] + 0.6 * draw.normal(size=(items, 12))
    affinity = np.zeros((users, items))
    for _ in range(3):
        interest = centers[draw.integers(0, 40, users)] + 0.5 * draw.normal(size=(users, 12))
        squares = (interest**2).sum(1)[:, None] + (vectors**2).sum(1) - 2 * interest @ vectors.T
        affinity = np.maximum(affinity, np.exp(-squares / 16))
    quality = draw.normal(0, 0.5, items)
    share = expit(-1.3 + 4 * affinity + quality)
    fame = draw.normal(0, 1, items) + 0.5 * quality
    known = (draw.random(users) < 0.5)[:, None] * affinity
    duration = np.exp(draw.normal(3, 0.7, items)) * 1000

    def events() -> Events:
        for user, number in enumerate(draw.lognormal(3.3, 0.6, users).clip(6, items / 4).astype(int)):
            item = draw.permutation(top(fame + 4 * known[user], number, draw))
            mean = share[user, item].clip(0.02, 0.98)
            watched = draw.beta(2.2 * mean, 2.2 * (1 - mean)) * duration[item]
            yield item, times(number, 21, draw), watched, duration[item], draw.random(number) < 0.08 * mean

    return frame(events(), "watch_ms", "duration_ms", "like"), share, {}


def groceries(draw: np.random.Generator, users: int = 2_000, items: int = 1_200) -> Made:
    """Baskets of staples and new things; the true value is how probable an item is in the next basket."""
    kinds, new = 40, 2.0
    kind, taste = draw.integers(0, kinds, items), draw.dirichlet(np.full(kinds, 0.3), users)
    affinity = 0.7 * np.log(taste[:, kind] + 0.005) + draw.normal(0, 1, items)
    chosen = np.exp(affinity)
    chosen /= chosen.sum(1, keepdims=True)
    bought = 1 - np.exp(-new * chosen)
    rates = []
    for user, number in enumerate(draw.poisson(12, users).clip(4, items // 4)):
        staples, rate = top(affinity[user], number, draw), draw.beta(1.5, 3, number)
        bought[user, staples] = 1 - (1 - bought[user, staples]) * (1 - rate)
        rates.append((staples, rate))

    def events() -> Events:
        for user, (staples, rate) in enumerate(rates):
            baskets, moments = [], []
            for day in np.sort(draw.choice(84, draw.integers(6, 14), replace=False)):
                others = draw.choice(items, draw.poisson(new), p=chosen[user])
                baskets.append(draw.permutation(np.union1d(staples[draw.random(len(staples)) < rate], others)))
                begin = START_MS + day * DAY_MS + draw.integers(DAY_MS // 2)
                moments.append(begin + 1_000 * np.arange(len(baskets[-1])))
            yield np.concatenate(baskets), np.concatenate(moments)

    return frame(events()), bought, {}


def jobs(draw: np.random.Generator, users: int = 3_000, items: int = 2_000) -> Made:
    """The true value is the probability of an application, and 0 where a posting has ended when lists are made."""
    fields, days, asked_at = 20, 60, 56
    field, taste = draw.integers(0, fields, items), draw.dirichlet(np.full(fields, 0.25), users)
    fit = 0.7 * np.log(taste[:, field] + 0.01) + 0.6 * draw.normal(size=(users, 6)) @ draw.normal(size=(6, items))
    apply = expit(0.8 * (fit - fit.mean()) + draw.normal(0, 0.6, items) - 2.5)
    begin = draw.uniform(-20, days, items)
    end, fame = begin + draw.choice([7, 14, 30, 45], items), draw.normal(0, 0.8, items)

    def events() -> Events:
        for user in range(users):
            visits = []
            for day in np.sort(draw.uniform(0, days, max(2, draw.poisson(7)))):
                item = top(fame + 0.5 * fit[user] - 1e9 * ((begin > day) | (end <= day)), 5, draw)
                moment = START_MS + int(day * DAY_MS) + 20_000 * np.arange(5)
                visits.append((item, moment, draw.random(5) < apply[user, item]))
            yield tuple(map(np.concatenate, zip(*visits, strict=True)))

    moments = {
        f"{name}_at": pd.to_datetime(START_MS + day * DAY_MS, unit="ms")
        for name, day in (("posted", begin), ("expires", end))
    }
    table = pd.DataFrame({"item_id": np.arange(items), "field": [f"field {one}" for one in field], **moments})
    return frame(events(), "applied"), apply * ((begin <= asked_at) & (end > asked_at)), {"items": table}


def market(draw: np.random.Generator, users: int = 2_500, items: int = 1_500) -> Made:
    """Prices and purses differ; the true value is how probable a purchase is."""
    style = draw.normal(size=(30, 6))[draw.integers(0, 30, items)]
    liked = 0.45 * draw.normal(size=(users, 6)) @ (style + 0.7 * draw.normal(size=(items, 6))).T
    price, purse = draw.normal(0, 1, items), draw.normal(0, 0.7, users)
    put = expit(liked + draw.normal(0, 0.5, items) - 2)
    bought = expit(0.4 * liked - 0.9 * (price - purse[:, None]) - 0.6)
    fame = draw.normal(0, 1, items) - 0.3 * price

    def events() -> Events:
        for user, number in enumerate(draw.lognormal(3.3, 0.7, users).clip(6, items / 4).astype(int)):
            viewed, moment = draw.permutation(top(fame + 0.5 * liked[user], number, draw)), times(number, 30, draw)
            yield steps(viewed, moment, np.stack([put[user, viewed], bought[user, viewed]]) > draw.random((2, number)))

    return frame(events(), "event_type").replace({"event_type": KINDS}), put * bought, {}


def news(draw: np.random.Generator, users: int = 3_000, items: int = 1_200) -> Made:
    """The true value is the probability of a click in the first place of a feed of six."""
    topics = 15
    about, taste = draw.dirichlet(np.full(topics, 0.15), items), draw.dirichlet(np.full(topics, 0.4), users)
    click = expit(4 * np.sqrt(taste) @ np.sqrt(about).T - 4.2 + draw.normal(0, 0.6, items))
    believed = 0.5 * draw.dirichlet(np.full(topics, 0.4), users) + 0.5 * taste
    score = 3.2 * np.sqrt(believed) @ np.sqrt(about).T + draw.normal(0, 1, items)
    born, attention = draw.uniform(0, 14, items), np.array([1, 0.95, 0.9, 0.85, 0.8, 0.75])

    def events() -> Events:
        for user in range(users):
            feeds = []
            for day in draw.uniform(1, 14, max(1, draw.poisson(7))):
                item = top(score[user] - 0.5 * np.maximum(day - born, 0) - 1e9 * (born > day), 6, draw)
                moment = np.full(6, START_MS + int(day * DAY_MS))
                feeds.append((item, moment, draw.random(6) < click[user, item] * attention))
            yield tuple(np.concatenate(column) for column in zip(*feeds, strict=True))

    return frame(events(), "click"), click, {}


def podcasts(draw: np.random.Generator, users: int = 2_500, items: int = 1_500) -> Made:
    """The true value is the expected share of the episode that is heard; half of what is heard is of followed shows."""
    shows, topics = max(20, items // 12), 10
    show, topic = draw.integers(0, shows, items), draw.integers(0, topics, shows)
    like = np.log(draw.dirichlet(np.full(topics, 0.3), users)[:, topic[show]] + 0.02) + 1.8
    like += draw.normal(0, 0.9, (users, shows))[:, show] + draw.normal(0, 0.5, items)
    share, minutes, fame = expit(like), draw.lognormal(3.4, 0.6, items).round(1), draw.normal(0, 1, shows)[show]

    def events() -> Events:
        for user, number in enumerate(draw.lognormal(3.5, 0.7, users).clip(6, items / 4).astype(int)):
            score = np.where(draw.random(shows)[show] < 0.5, like[user], 0) + fame + draw.gumbel(size=items)
            item = draw.permutation(np.argsort(-score)[:number])
            mean = share[user, item].clip(0.02, 0.98)
            heard = np.where(draw.random(number) < 0.5 * mean, 1.0, draw.beta(2 * mean, 2.5 * (1 - mean)))
            yield item, times(number, 40, draw), (60 * minutes[item] * heard).round()

    names = {"show": [f"show {one}" for one in show], "episode_minutes": minutes}
    return frame(events(), "listened_seconds"), share, {"items": pd.DataFrame({"item_id": np.arange(items), **names})}


def shop(draw: np.random.Generator, users: int = 4_000, items: int = 1_500) -> Made:
    """The true value is the root of how probable a purchase is next, relative to the most probable one."""
    kinds = 30
    kind, follower = draw.integers(0, kinds, items), draw.permutation(kinds)
    taste = draw.dirichlet(np.full(kinds, 0.15), users)
    wish = np.log(taste[:, kind] + 1e-3) + draw.normal(0, 1.2, items)
    followers = np.zeros((users, items))  # of what a user bought last

    def events() -> Events:
        for user in range(users):
            bought: list[int] = []
            for _ in range(max(3, draw.poisson(10))):
                scores = wish[user] + followers[user]
                scores[bought] = -1e9
                bought.append(int(top(scores, 1, draw)[0]))
                followers[user] = 1.5 * (kind == follower[kind[bought[-1]]])
            yield np.array(bought), times(len(bought), 60, draw)

    log, scores = frame(events()), wish + followers
    return log, np.exp((scores - scores.max(1, keepdims=True)) / 2), {}


def songs(draw: np.random.Generator, users: int = 2_500, items: int = 2_000) -> Made:
    """The true value is the expected share of the track that is heard; artists matter, and a library is heard again."""
    genres, artists = 12, max(20, items // 8)
    artist = draw.choice(artists, items, p=draw.dirichlet(np.full(artists, 1.0)))
    genre, taste = draw.integers(0, genres, artists)[artist], draw.dirichlet(np.full(genres, 0.3), users)
    like = np.log(taste[:, genre] + 0.02) + 2 + draw.normal(0, 0.8, (users, artists))[:, artist]
    like += draw.normal(0, 0.5, items) + draw.normal(0, 0.5, (users, items))
    whole, length, fame = expit(like), draw.lognormal(12.25, 0.25, items).astype(int), draw.normal(0, 1, items)

    def events() -> Events:
        for user, number in enumerate(draw.lognormal(4.1, 0.8, users).clip(8, 1_000).astype(int)):
            library = top(fame + 1.6 * like[user], min(items // 4, draw.integers(8, 40)), draw)
            radio = draw.choice(items, number, p=np.exp(fame) / np.exp(fame).sum())
            item = np.where(draw.random(number) < draw.beta(2, 2), radio, draw.choice(library, number))
            heard = np.minimum(length[item], 1_500 + draw.exponential(0.12 * length[item]).astype(int))
            yield item, times(number, 56, draw), np.where(draw.random(number) < whole[user, item], length[item], heard)

    log = frame(events(), "ms_played").assign(duration_ms=lambda made: length[made.item_id])
    names = {"artist": [f"artist {one}" for one in artist], "genre": [f"genre {one}" for one in genre]}
    return log, 0.12 + 0.88 * whole, {"items": pd.DataFrame({"item_id": np.arange(items), **names})}


def thumbs(draw: np.random.Generator, users: int = 1_500, items: int = 800) -> Made:
    """A bandit offers three items a visit by how often each was liked; the true value is the probability of a like."""
    affinity = 0.6 * draw.normal(size=(users, 5)) @ draw.normal(size=(5, items))
    like = expit(affinity + draw.normal(0, 0.7, items) - 0.2)
    liked, offered = np.ones(items), np.full(items, 2.0)
    shown: list[list[tuple[Array, ...]]] = [[] for _ in range(users)]
    for day in range(30):
        belief = draw.beta(liked, np.maximum(offered - liked, 0.5))
        for user in np.flatnonzero(draw.random(users) < 0.35):
            item = top(6 * belief, 3, draw)
            up = draw.random(3) < like[user, item]
            np.add.at(liked, item, up)
            np.add.at(offered, item, 1)
            shown[user].append((item, np.full(3, START_MS + day * DAY_MS + draw.integers(DAY_MS)), up, ~up))
    nothing = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0, bool))
    visits = (tuple(map(np.concatenate, zip(nothing, *own, strict=True))) for own in shown)
    return frame(visits, "like", "dislike"), like, {}


def trends(draw: np.random.Generator, users: int = 3_000, items: int = 1_200) -> Made:
    """Clips come into fashion and go out of it; the true value is the probability of a like at the end."""
    days = 30
    affinity = 0.5 * draw.normal(size=(users, 5)) @ draw.normal(size=(5, items)) + draw.normal(0, 0.5, items)
    begin, strength = draw.uniform(-10, days, items), draw.gamma(3, 1, items)

    def fashion(day: float) -> Array:
        return np.where(day < begin, 0, strength * np.exp(-(day - begin).clip(0) / 4))

    def events() -> Events:
        for user in range(users):
            moments = np.sort(draw.uniform(0, days, max(3, draw.poisson(40))))
            known, item = 0.5 * affinity[user] + draw.normal(0, 0.5, items), np.zeros(len(moments), np.int64)
            like = np.zeros(len(moments))
            for place, day in enumerate(moments):
                there = np.where(day < begin - 2, -1e9, 0.6 * fashion(day))
                there[item[:place]] = -1e9
                item[place] = top(known + there, 1, draw)[0]
                like[place] = expit(affinity[user, item[place]] + fashion(day)[item[place]] - 2)
            yield item, START_MS + (moments * DAY_MS).astype(np.int64), draw.random(len(item)) < like

    return frame(events(), "like"), expit(affinity + fashion(days) - 2), {}


GENERATORS: Final[dict[str, Callable[..., Made]]] = {
    one.__name__: one
    for one in (banners, books, carts, clips, groceries, jobs, market, news, podcasts, shop, songs, thumbs, trends)
}


def top(scores: Array, number: int, draw: np.random.Generator) -> Array:
    """Different items, drawn one after the other with probabilities proportional to ``exp(score)``."""
    return np.argsort(-(scores + draw.gumbel(size=len(scores))))[:number]


def steps(viewed: Array, moment: Array, reached: Array) -> tuple[Array, ...]:
    """Items, moments and kinds of the rows of views and of what follows them, a view, a cart and a purchase."""
    made = [np.ones(len(viewed), bool), reached[0], reached.all(0)]
    parts = [(viewed[of], moment[of] + 300_000 * kind, of[of] * kind) for kind, of in enumerate(made)]
    rows = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return tuple(column[np.argsort(rows[1], kind="stable")] for column in rows)


def times(number: int, days: int, draw: np.random.Generator) -> Array:
    """Ascending moments in a period, in milliseconds."""
    return np.sort(draw.integers(0, days * DAY_MS, number)) + START_MS


def frame(events: Events, *columns: str) -> pd.DataFrame:
    """The events of one user after the other as a log; flags are 0 and 1."""
    parts = [(np.full(len(part[0]), user), *part) for user, part in enumerate(events)]
    names = ("user_id", "item_id", "timestamp", *columns)
    joined = dict(zip(names, map(np.concatenate, zip(*parts, strict=True)), strict=True))
    return pd.DataFrame({name: values * 1 if values.dtype == bool else values for name, values in joined.items()})
