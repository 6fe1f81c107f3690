"""The pages: what each of them shows, rendered by templates that escape every string, and the server of them.

The same parts make the pages of a server and the one page of a file: only the addresses differ (``Address``). The
server listens on this machine, answers GET and HEAD, and changes nothing; no page runs a script.
"""

import ipaddress
import logging
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

import numpy as np
from jinja2 import Environment
from markupsafe import escape

from recpo import __version__
from recpo.artifacts.documents import describe_os_error
from recpo.artifacts.semantic_codes import Codes
from recpo.base.errors import RecpoError
from recpo.evaluation.html_report import svg
from recpo.evaluation.html_report.parts import environment
from recpo.evaluation.html_report.svg import Figure
from recpo.evaluation.reading import ends_of
from recpo.explorer.people_and_items import Catalog, Item, People, known
from recpo.explorer.survey import ORDERS, Listed, Survey, Traffic

#: Makes the address of a page from its kind (users, items) and its key; None = there is no such page.
Address = Callable[[str, Any], str | None]
_USERS: Final = 50
_ITEMS: Final = 30
_EVENTS: Final = 100
_OWNERS: Final = 30
_TRIE: Final = 8
_LARGEST_PICTURE: Final = 100_000  # bytes; a larger one is left out of a file
_NOTHING: Final = "\u2013"
ITEM_ORDERS: Final[Mapping[str, str]] = {
    "gain": "gaining exposure",
    "lose": "losing exposure",
    "listed": "recommended most",
    "new": "new items",
}


@dataclass(frozen=True)
class Pages:
    """The pages over one survey.

    Attributes:
        survey: the lists of the contenders.
        catalog: the items.
        people: the users.
        decision: content of ``decision.json``; None = no ``recpo fit`` led here.
        traffic: reads the server's log; None = there is none.
        codes: semantic ids of the items; None = there are none.
        address: of the pages.
        source: what the pages show, for the first line.
    """

    survey: Survey
    catalog: Catalog
    people: People
    decision: Mapping[str, Any] | None
    traffic: Callable[[], Traffic] | None
    codes: Codes | None
    source: str
    address: Address = lambda kind, key: f"/{kind}/{key}"

    def overview(self) -> str:
        """The answer, a picture, and where to go."""
        return self._page("overview.html.jinja", title="Overview", here="/", **self._overview())

    def users(self, search: str, order: str, other: str | None) -> str:
        """Users that a search finds, or that are first in an order."""
        order = order if order in ORDERS else "differ"
        place = self._place(other)
        if search:
            found = self.people.search(search)
            rows = self._rows([user for user, _ in found], place, dict(found))
        else:
            chosen = self.survey.ordered(order, place, _USERS)
            rows = self._rows([int(self.survey.users[row]) for row in chosen], place)
        content = {"rows": rows, "order": order, "orders": ORDERS, "search": search, "other": self.names[place]}
        return self._page("users.html.jinja", title="Users", here="/users", metrics=self._user_metrics, **content)

    def user(self, user: int) -> str | None:
        """One user: the lists side by side, then what the user did; None = there is no such user."""
        shown = self.person(user)
        return None if shown is None else self._part("of_user", f"User {shown['person'].user_id}", shown)

    def items(self, search: str, order: str, other: str | None) -> str:
        """Items that a search finds, or that are first in an order."""
        order = order if order in ITEM_ORDERS else "gain"
        place = self._place(other)
        found = self.catalog.search(search) if search else self._moved(order, place, _ITEMS)
        content = {"order": order, "orders": ITEM_ORDERS, "search": search, "other": self.names[place]}
        return self._page("items.html.jinja", title="Items", here="/items", rows=self.item_rows(found), **content)

    def item(self, index: int) -> str | None:
        """One item: who gets it, what is near it, where its codes are; None = there is no such item."""
        shown = self.thing(index)
        return None if shown is None else self._part("of_item", shown["item"].title, shown)

    def policies(self) -> str:
        """Who is helped, what moves, and how the training went."""
        return self._part("of_change", "Policies", self.change(), here="/policies")

    def server(self) -> str | None:
        """What a server logged; None = no log was given."""
        return None if self.traffic is None else self._part("of_server", "Server", self.served(), here="/server")

    def one_file(self, count: int) -> str:
        """One page that stands alone: the comparison, and users and items that are worth a look.

        Args:
            count: number of users.
        """
        users = self._worth_a_look(count)
        people = [shown for user in users if (shown := self.person(user)) is not None]
        moved = self._moved("gain", self._place(None), _ITEMS)
        moved += self._moved("lose", self._place(None), _ITEMS)
        kept = {("users", user) for user in users} | {("items", item) for item in moved}

        def address(kind: str, key: Any) -> str | None:
            if kind == "pictures":
                return self._embedded(key)
            return f"#{kind}-{key}" if (kind, key) in kept else None

        anchored = replace(self, address=address)
        things = [shown for item in dict.fromkeys(moved) if (shown := anchored.thing(item)) is not None]
        content = {**anchored._overview(), "change": anchored.change(), "people": people, "things": things}
        content |= {"rows": anchored._rows(users, self._place(None)), "metrics": self._user_metrics}
        served = None if self.traffic is None else anchored.served()
        return anchored._page("static.html.jinja", title="Lists", here="", served=served, **content)

    @property
    def names(self) -> list[str]:
        """The contenders, in the order of the columns."""
        return [one.name for one in self.survey.contenders]

    def person(self, user: int) -> dict[str, Any] | None:
        """What the page of a user shows."""
        person = self.people.person(user)
        if person is None:
            return None
        lists = self.survey.lists_of(person)
        known = self.catalog.items(
            [event.item for event in (*person.history[:_EVENTS], *person.later)]
            + [place.item for one in lists for place in one]
        )
        later = {event.item: event for event in reversed(person.later)}
        places = [
            [(one, known[one.item], len(self._at(lists, one.item)) > 1, later.get(one.item)) for one in own]
            for own in lists
        ]
        return {
            "person": person,
            "lists": list(zip(self.names, places, strict=True)),
            "history": [(event, known[event.item]) for event in person.history[:_EVENTS]],
            "later": [(event, known[event.item], self._at(lists, event.item)) for event in person.later],
            "has_grades": self.survey.grades is not None,
        }

    def thing(self, index: int) -> dict[str, Any] | None:
        """What the page of an item shows."""
        item = self.catalog.items([index]).get(index)
        if item is None:
            return None
        nearness, near = self.survey.neighbors(index)
        trie = [] if self.codes is None else _trie(self.codes, index)
        known = self.catalog.items([one for one, _ in near] + [one for level in trie for one in level[2]])
        owners = [self.survey.owners(place, index) for place in range(len(self.names))]
        ids = self.people.ids({user for users in owners for user in users[:_OWNERS]})
        return {
            "item": item,
            "exposure": [
                (name, int(self.survey.listed[place][index]), [(user, ids[user]) for user in owners[place][:_OWNERS]])
                for place, name in enumerate(self.names)
            ],
            "neighbors": [(known[one], value) for one, value in near],
            "neighbors_by": nearness,
            "codes": None if self.codes is None else self.codes.codes[index - 1].tolist(),
            "trie": [(prefix, count, [known[one] for one in some]) for prefix, count, some in trie],
        }

    def change(self) -> dict[str, Any]:
        """What the page of the policies shows."""
        pairs = []
        for place in range(1, len(self.names)):
            gaining, losing = (self._moved(order, place, 10) for order in ("gain", "lose"))
            shares = [self.survey.shares(place, metric) for metric in self.survey.metrics]
            pairs.append((self.names[place], shares, self.item_rows(gaining), self.item_rows(losing)))
        return {
            "pairs": pairs,
            "overlap": self.survey.overlaps(),
            "coverage": self.survey.coverage(self.catalog),
            "calibration": self.survey.calibration(self.catalog),
            "curves": self._curves,
            "advice": [(one.name, one.advice) for one in self.survey.contenders if one.advice],
        }

    def served(self) -> dict[str, Any]:
        """What the page of the server shows."""
        assert self.traffic is not None
        found = self.traffic()
        rows = [
            svg.IntervalRow(one.name, one.value, *ends_of(one.value, one.half_width), f"s{place % 8}")
            for place, one in enumerate(found.by_variant)
        ]
        return {
            "found": found,
            "value": svg.interval_chart("value", f"{found.value_of}, by variant", rows, found.value_of),
            "figures": [
                self._over_time(found, "lists", [one.requests for one in found.over_time]),
                self._over_time(found, "explored share", [one.explored for one in found.over_time]),
                self._over_time(found, "value", [one.value for one in found.over_time]),
            ],
        }

    def item_rows(self, items: Iterable[int]) -> list[tuple[Item, list[float]]]:
        """Items with the number of lists, of 1,000, that hold them, by contender."""
        found = list(items)
        known = self.catalog.items(found)
        sample = len(self.survey.users)
        counts = self.survey.listed
        return [(known[one], [1000 * float(count[one]) / sample for count in counts]) for one in found if one in known]

    def _moved(self, order: str, other: int, count: int) -> list[int]:
        return self.survey.moved_items(self.catalog, order, other, count)

    def _embedded(self, item: int) -> str | None:
        """The small picture of an item as a data address."""
        picture = self.catalog.picture(item)
        if picture is None or len(picture[0]) > _LARGEST_PICTURE:
            return None
        return f"data:{picture[1]};base64,{b64encode(picture[0]).decode()}"

    @property
    def _user_metrics(self) -> list[str]:
        return self.survey.metrics[:2]

    def _overview(self) -> dict[str, Any]:
        compared, drawn = [], []
        about = f"share of users for whom lists are better and worse than those of {self.names[0]}"
        for metric in self._user_metrics if len(self.names) > 1 else ():
            pairs = [(self.names[place], self.survey.shares(place, metric)) for place in range(1, len(self.names))]
            bars = [
                svg.Shares(
                    name,
                    [
                        ("positive", "better", one.helped),
                        ("neutral", "the same", one.unchanged),
                        ("negative", "worse", one.harmed),
                    ],
                    f"{one.users:,}",
                )
                for name, one in pairs
            ]
            compared += pairs
            drawn.append(svg.shares_chart(metric, about, bars, "and number of users"))
        return {
            "compared": compared,
            "drawn": drawn,
            "decision": self.decision,
            "facts": self._facts,
            "split": self.survey.split,
        }

    @property
    def _facts(self) -> list[tuple[str, str]]:
        counts, data = self.survey.data.manifest["counts"]["splits"], self.survey.data
        return [
            ("users", f"{int(data.manifest['num_users']):,}"),
            ("items", f"{data.num_items:,}"),
            *((f"events, {period}", f"{int(counts[period]['targets']):,}") for period in ("train", "valid", "test")),
            ("held-out users compared", f"{len(self.survey.users):,} of {self.survey.total:,}, {self.survey.split}"),
        ]

    @cached_property
    def _rows_of(self) -> dict[int, int]:
        return {int(user): row for row, user in enumerate(self.survey.users)}

    def _rows(self, users: Sequence[int], place: int, ids: Mapping[int, Any] | None = None) -> list[tuple[Any, ...]]:
        """Users in a table: index, id, length of the history, overlap, change, and values by metric and contender."""
        ids = self.people.ids(users) if ids is None else ids
        overlap, change = self.survey.overlap(0, place), self.survey.change(place)
        values = {
            metric: [self.survey.values(number, metric) for number in range(len(self.names))]
            for metric in self._user_metrics
        }
        rows: list[tuple[Any, ...]] = []
        for user in users:
            row = self._rows_of.get(user)
            if row is None:
                rows.append((user, ids[user], None, None, None, []))
                continue
            own = [[known(column[row]) for column in columns] for columns in values.values()]
            history = int(self.survey.histories[row])
            rows.append((user, ids[user], history, float(overlap[row]), known(change[row]), own))
        return rows

    def _worth_a_look(self, count: int) -> list[int]:
        """Users of every order in turn, each once."""
        place = self._place(None)
        orders = [self.survey.ordered(order, place, count) for order in ORDERS]
        turns = [rows[turn] for turn in range(count) for rows in orders if turn < len(rows)]
        return [int(self.survey.users[row]) for row in list(dict.fromkeys(turns))[:count]]

    def _place(self, other: str | None) -> int:
        """The contender that is compared with the first: the one named, or the second."""
        if other in self.names[1:]:
            return self.names.index(other)
        return min(1, len(self.names) - 1)

    def _at(self, lists: Sequence[Sequence[Listed]], item: int) -> list[tuple[str, int]]:
        return [
            (self.names[number], rank)
            for number, places in enumerate(lists)
            for rank, one in enumerate(places, 1)
            if one.item == item
        ]

    @property
    def _curves(self) -> list[Figure]:
        names = dict.fromkeys(metric for one in self.survey.contenders for metric in one.curves)
        figures = []
        for metric in names:
            lines = [
                svg.Line(one.name, [svg.Point(*point) for point in one.curves[metric]], f"s{place % 8}")
                for place, one in enumerate(self.survey.contenders)
                if metric in one.curves
            ]
            figures.append(svg.line_chart(metric, f"{metric} over the steps of training", lines, x_label="step"))
        return figures

    def _over_time(self, found: Traffic, title: str, values: Sequence[float | None]) -> Figure:
        points = [svg.Point(place, value) for place, value in enumerate(values) if value is not None]
        lines = [svg.Line(title, points, "s0")] if points else []
        by, label = f"by {found.unit}", f"{found.unit}s since the beginning"
        return svg.line_chart(title, f"{title} {by}", lines, by, x_label=label)

    def _part(self, part: str, title: str, shown: Mapping[str, Any], here: str = "") -> str:
        """A page of one part, by the name of its macro."""
        return self._page("part.html.jinja", title=title, here=here, part=part, shown=shown)

    def _page(self, template: str, **content: Any) -> str:
        return (
            _environment()
            .get_template(template)
            .render(
                source=self.source,
                names=self.names,
                address=self.address,
                has_server=self.traffic is not None,
                version=__version__,
                k=self.survey.k,
                sample=len(self.survey.users),
                **content,
            )
        )


def _trie(codes: Codes, index: int) -> list[tuple[list[int], int, list[int]]]:
    """For each level of the trie above an item: its prefix, the number of items below it, and the first of them."""
    own = codes.codes[index - 1]
    inside = np.ones(codes.num_items, bool)
    levels = []
    for level, code in enumerate(own):
        inside &= codes.codes[:, level] == code
        others = np.flatnonzero(inside) + 1
        some = [int(one) for one in others[: _TRIE + 1] if one != index][:_TRIE]
        levels.append((own[: level + 1].tolist(), len(others), some))
    return levels


@cache
def _environment() -> Environment:
    made = environment(("recpo.explorer", "templates"))
    made.filters |= {"number": _number, "percent": _percent, "moment": _moment, "seconds": _seconds, "signed": _signed}
    return made


def _number(value: float | None) -> str:
    return _NOTHING if value is None else svg.number_text(value)


def _signed(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:+.3f}".replace("-", "\u2212")


def _percent(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0%}"


def _moment(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M}"


def _seconds(value: float | None) -> str:
    if value is None:
        return _NOTHING
    minutes, rest = divmod(round(value), 60)
    return f"{minutes}:{rest:02d}" if minutes else f"{value:.0f} s"


_LOG = logging.getLogger("recpo.explorer")
_LONGEST_ADDRESS: Final = 2_000
#: No script runs, nothing is loaded from elsewhere; pictures may be, because tables of items name them by address.
_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data: http: https:; form-action 'self'; "
        "base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Answer(NamedTuple):
    """An answer to a request.

    Attributes:
        status: HTTP status.
        body: its content.
        kind: its content type.
    """

    status: HTTPStatus
    body: bytes
    kind: str = "text/html; charset=utf-8"


def answer(pages: Pages, address: str) -> Answer:
    """The answer to an address: a page, a picture, or status 404."""
    parts = urlsplit(address)
    given = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    asked = given.get("q", "").strip(), given.get("by", ""), given.get("with")
    found: str | None = None
    if parts.path == "/":
        found = pages.overview()
    elif parts.path == "/users":
        found = pages.users(*asked)
    elif parts.path == "/items":
        found = pages.items(*asked)
    elif parts.path == "/policies":
        found = pages.policies()
    elif parts.path == "/server":
        found = pages.server()
    elif named := re.fullmatch(r"/(users|items|pictures)/(\d{1,18})", parts.path):
        kind, key = named[1], int(named[2])
        if kind == "pictures":
            picture = pages.catalog.picture(key)
            return _missing() if picture is None else Answer(HTTPStatus.OK, *picture)
        found = pages.user(key) if kind == "users" else pages.item(key)
    return _missing() if found is None else Answer(HTTPStatus.OK, found.encode())


class PageServer(ThreadingHTTPServer):
    """Serves ``pages`` until ``shutdown``.

    Args:
        pages: the pages.
        host: address to listen on.
        port: 0 = any free one.

    Raises:
        RecpoError: the address is taken or is not one of this machine.
    """

    daemon_threads = True

    def __init__(self, pages: Pages, host: str, port: int) -> None:
        self.pages = pages
        self.is_local = _is_local(host)
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            said = describe_os_error(error, f"{host}:{port}") if isinstance(error, OSError) else str(error)
            message = f"cannot listen on {host}:{port} ({said}): choose another port; 0 = any free one"
            raise RecpoError(message, code="failed", field="port") from error

    @property
    def url(self) -> str:
        """The address of the first page."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "recpo"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if self.server.is_local and not _is_local(host.strip("[]")):
            # a page of another site, whose name was made to lead here, must not read what is shown here
            found = _failed(HTTPStatus.FORBIDDEN, "This page is for this machine alone: open it as 127.0.0.1.")
        elif len(self.path) > _LONGEST_ADDRESS:
            found = _failed(HTTPStatus.REQUEST_URI_TOO_LONG, "The address is too long.")
        else:
            found = self._page()
        self.send_response(found.status)
        for name, value in {**_HEADERS, "Content-Type": found.kind, "Content-Length": str(len(found.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(found.body)

    def _page(self) -> Answer:
        try:
            return answer(self.server.pages, self.path)
        except RecpoError as error:
            return _failed(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        except ValueError:
            return _failed(HTTPStatus.BAD_REQUEST, "The address cannot be read.")

    def log_message(self, format: str, *args: Any) -> None:
        _LOG.info(format, *args)


def _missing() -> Answer:
    return _failed(HTTPStatus.NOT_FOUND, "There is no such page.")


def _failed(status: HTTPStatus, message: str) -> Answer:
    body = f'<!doctype html><html lang="en"><title>{status.value}</title><p>{escape(message)} <a href="/">Overview</a>'
    return Answer(status, body.encode())


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
