"""The pages as a browser gets them: whole, escaped, without scripts, with links that lead somewhere."""

from __future__ import annotations

import http.client
import re
import threading
from contextlib import contextmanager
from html.parser import HTMLParser

import pytest

from recpo.explorer.pages import ITEM_ORDERS, PageServer, answer
from recpo.explorer.survey import ORDERS
from tests.explorer.conftest import HOSTILE
from tests.refusals import refused

VOID = {"meta", "link", "input", "img", "br"}


class Read(HTMLParser):
    """Checks that elements are closed in order; notes links, ids and images."""

    def __init__(self, page):
        super().__init__()
        self.open, self.links, self.ids, self.images, self.text = [], [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "iframe", "object"), tag
        given = dict(attrs)
        assert not [name for name in given if name.startswith("on")]
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if tag == "a" else []
        self.images += [given["src"]] if tag == "img" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.text.append(text)


def body(pages, address):
    found = answer(pages, address)
    assert found.status == 200, address
    return found.body.decode()


@pytest.mark.slow
def test_every_link_of_every_page_leads_to_a_page(pages):
    seen, waiting = set(), ["/"]
    while waiting:
        address = waiting.pop()
        seen.add(address)
        read = Read(body(pages, address))
        assert len({*read.ids}) == len(read.ids)
        found = [one for one in read.links if not one.startswith("#")] + [one for one in read.images if one[0] == "/"]
        for one in found:
            kind = re.match(r"/(users|items)/\d+", one)
            if kind and sum(place.startswith(f"/{kind[1]}/") for place in seen) > 12:
                continue
            if one.startswith("/pictures"):
                assert answer(pages, one).status in (200, 404)
            elif one not in seen and one not in waiting:
                waiting.append(one)
    for order in ORDERS:
        assert f"/users?by={order}" in {re.sub("&.*", "", one) for one in seen}
    for order in ITEM_ORDERS:
        assert f"/items?by={order}" in {re.sub("&.*", "", one) for one in seen}


def test_what_is_in_the_data_is_text(pages):
    page = body(pages, "/items/1")
    assert HOSTILE in "".join(Read(page).text)
    for address in ("/items/1", "/items?q=script", "/policies", '/users?q="><script>', "/users?with=<b>&by=<i>"):
        page = body(pages, address)
        assert "<script" not in page
        assert "<b>" not in page
        Read(page)
    assert "here & <there>" in "".join(Read(body(pages, "/")).text)
    assert "Train <b>longer</b>." in "".join(Read(body(pages, "/policies")).text)


def test_the_page_of_a_user_has_every_list_and_every_event(pages, survey, people):
    user = int(survey.users[2])
    person, page = people.person(user), body(pages, f"/users/{user}")
    read = Read(page)
    for places in survey.lists_of(person):
        for place in places:
            assert f"/items/{place.item}" in read.links
    rows = page.split("did in the held-out period, first to last</span>")[1].split("</table>")[0].count("<tr>")
    assert rows == 1 + len(person.later)
    shown = {place.item for places in survey.lists_of(person) for place in places}
    assert page.count("shown later:") == sum(
        place.item in {event.item for event in person.later} for places in survey.lists_of(person) for place in places
    )
    assert shown


def test_the_page_of_an_item_has_its_place_in_the_trie(pages, codes):
    text = " ".join(" ".join(Read(body(pages, "/items/25")).text).split())
    assert "2 · 5" in text
    beside = sum(code == 2 for code in codes.codes[:, 0])
    assert re.search(rf"2 {beside} ", text)


def test_what_is_not_there_is_404(pages):
    for address in (
        "/users/99999999",
        "/items/0",
        "/items/99999999",
        "/nothing",
        "/pictures/2",
        "/users/x",
        "/items/-1",
    ):
        assert answer(pages, address).status == 404


@pytest.mark.slow
def test_the_file_stands_alone(pages):
    page = pages.one_file(12)
    read = Read(page)
    assert len({*read.ids}) == len(read.ids)
    assert {one for one in read.links if one.startswith("#")} <= {f"#{one}" for one in read.ids}
    assert all(one.startswith("#") for one in read.links)
    assert all(one.startswith(("data:image/png;base64,", "https://")) for one in read.images)
    assert "url(" not in page
    assert page.count('<article id="users-') == 12
    assert "<script" not in page


@contextmanager
def serving(pages):
    with PageServer(pages, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, method, path, host=None):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_address[1]}")
    connection.endheaders()
    found = connection.getresponse()
    content = found.read()
    connection.close()
    return found, content


def test_it_answers_this_machine_alone_and_changes_nothing(pages):
    with serving(pages) as server:
        found, content = ask(server, "GET", "/")
        assert found.status == 200
        assert int(found.headers["Content-Length"]) == len(content)
        assert "default-src 'none'" in found.headers["Content-Security-Policy"]
        assert "script-src" not in found.headers["Content-Security-Policy"]
        assert found.headers["X-Content-Type-Options"] == "nosniff"
        assert ask(server, "HEAD", "/users")[1] == b""
        assert ask(server, "GET", "/", host="localhost:80")[0].status == 200
        assert ask(server, "GET", "/", host="[::1]:80")[0].status == 200
        for host in ("evil.example", "evil.example:80", "10.0.0.1"):
            assert ask(server, "GET", "/", host=host)[0].status == 403
        for method in ("POST", "PUT", "DELETE"):
            assert ask(server, method, "/")[0].status == 501
        assert ask(server, "GET", "/pictures/1")[0].headers["Content-Type"] == "image/png"
        assert ask(server, "GET", "/" + "x" * 3000)[0].status == 414
        assert ask(server, "GET", "//[bad")[0].status in (400, 404)
        with refused("failed", "port"):
            PageServer(pages, "127.0.0.1", server.server_address[1])
    with refused("failed", "port"):
        PageServer(pages, "127.0.0.1", 70_000)


def test_pages_are_made_for_several_readers_at_once(pages, survey):
    users = [int(user) for user in survey.users[:6]]
    alone = {user: body(pages, f"/users/{user}") for user in users}
    with serving(pages) as server:
        together: dict[int, bytes] = {}
        threads = [
            threading.Thread(target=lambda one=user: together.update({one: ask(server, "GET", f"/users/{one}")[1]}))
            for user in users
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {user: content.decode() for user, content in together.items()} == alone


@pytest.mark.parametrize("names", [1, 2])
def test_fewer_contenders_have_pages_too(pages, names):
    from dataclasses import replace

    fewer = replace(pages.survey, contenders=pages.survey.contenders[:names], grades=None, tastes=None)
    made = replace(
        pages,
        survey=fewer,
        codes=None,
        traffic=None,
    )
    for address in ("/", "/users", "/items", "/policies", f"/users/{fewer.users[0]}", "/items/3"):
        Read(body(made, address))
    assert answer(made, "/server").status == 404
    Read(made.one_file(5))
