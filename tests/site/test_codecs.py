"""Handles with a codec: text as keys, and text, JSON or a caller's own kind as values."""

import pydoc
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from typing import Any

import pytest
from tests.contracts.site.base import open_in_memory

import floodmark
from floodmark import (
    Codec,
    InvalidArgument,
    InvalidKey,
    InvalidValue,
    KeyNotFound,
    NamespaceExists,
    NamespaceNotFound,
    Site,
)
from floodmark.codec.objects import CODECS
from floodmark.testing.clock import SimulatedTime


@pytest.fixture
def site() -> Iterator[Site]:
    with open_in_memory(SimulatedTime()) as site:
        yield site


def test_text_is_stored_as_utf8_and_read_back(site: Site) -> None:
    users = site.create_namespace("users", codec="text")
    first = users.put("åse", "førstedame")
    users.put_many({"bo": "baker", "åse": "president"})
    assert (users.get("åse"), users.as_of(first).get("åse")) == ("president", "førstedame")
    assert users.get_many(["bo", "none"]) == ["baker", None]
    assert list(users.scan()) == [("bo", "baker"), ("åse", "president")]
    assert list(users.scan("b", "c", limit=1)) == list(users.scan(prefix="b")) == [("bo", "baker")]
    assert users.stored.get("åse".encode()) == b"president"
    users.delete("bo")
    assert "bo" not in users


def test_json_is_stored_as_text_and_read_back(site: Site) -> None:
    users = site.create_namespace("users", codec="json")
    value = {"name": "Ada", "born": 1815, "tags": ["a", None, 1.5]}
    users.put("ada", value)
    assert users["ada"] == value
    assert site.namespace("users").get(b"ada") == b'{"name":"Ada","born":1815,"tags":["a",null,1.5]}'


def test_counters_of_a_json_handle_are_numbers(site: Site) -> None:
    visits = site.create_namespace("visits", merge="counter", codec="json")
    visits.add("home", 3)
    visits.add("home", -1)
    assert (visits["home"], visits.get("away"), dict(visits.scan())) == (2, None, {"home": 2})
    assert type(visits["home"]) is int


def test_fields_of_a_json_handle_are_merged(site: Site) -> None:
    users = site.create_namespace("users", merge="fields", codec="json")
    users.put("ada", {"name": "Ada", "city": "London"})
    users.update("ada", {"city": None, "title": "countess"})
    assert users["ada"] == {"name": "Ada", "title": "countess"}


def test_a_codec_of_the_callers_own_is_used(site: Site) -> None:
    days = site.create_namespace(
        "days",
        codec=Codec(lambda day: day.isoformat().encode(), lambda text: date.fromisoformat(text.decode())),
    )
    days.put("moon", date(1969, 7, 20))
    assert days["moon"].year == 1969


def test_compare_and_set_compares_values_and_not_their_bytes(site: Site) -> None:
    users = site.create_namespace("users", codec="json")
    assert users.compare_and_set("ada", None, {"a": 1, "b": 2})
    assert not users.compare_and_set("ada", None, {})
    assert not users.compare_and_set("ada", {"a": 1}, {})
    assert users.compare_and_set("ada", {"b": 2, "a": 1}, {"a": 2})
    assert users.compare_and_set("ada", {"a": 2}, None)
    assert "ada" not in users


def test_compare_and_set_compares_again_if_another_writer_was_faster(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = site.create_namespace("users", codec="json")
    users.put("ada", 1)
    get = users.stored.get

    def overtaken(key: bytes) -> bytes | None:
        found = get(key)
        monkeypatch.setattr(users.stored, "get", get)
        users.put("ada", 2)
        return found

    monkeypatch.setattr(users.stored, "get", overtaken)
    assert not users.compare_and_set("ada", 1, 3)
    assert users["ada"] == 2


def test_writers_and_transactions_take_what_the_handle_takes(site: Site) -> None:
    users = site.create_namespace("users", codec="json")
    with users.writer() as writer:
        writer.put("ada", [1])
        writer.put("bob", [2])
        writer.delete("bob")
    with site.transaction() as transaction:
        transaction.put(users, "eve", {"three": 3})
        transaction.delete(users, "ada")
    assert dict(users.scan()) == {"eve": {"three": 3}}


@pytest.mark.parametrize("value", [None, float("nan"), {"a": date(2026, 1, 1)}, "\ud800"])
def test_a_value_without_json_form_is_refused_and_nothing_is_written(site: Site, value: object) -> None:
    users = site.create_namespace("users", codec="json")
    with pytest.raises(InvalidValue, match="'ada'"):
        users.put("ada", value)
    with pytest.raises(InvalidValue, match="'ada'"), users.writer() as writer:
        writer.put("ada", value)
    assert list(users.scan()) == []


@pytest.mark.parametrize("key", [b"ada", 1, "\ud800", ""])
def test_a_key_that_is_no_text_is_refused(site: Site, key: str) -> None:
    users = site.create_namespace("users", codec="text")
    for use in (users.get, users.delete, lambda key: users.put(key, "x"), lambda key: key in users):
        with pytest.raises(InvalidKey):
            use(key)


def test_bytes_that_the_codec_cannot_read_are_an_error_that_says_what_to_do(site: Site) -> None:
    site.create_namespace("users").put(b"ada", b"\xff")
    for codec in CODECS:
        users = site.namespace("users", codec=CODECS[codec])
        with pytest.raises(InvalidValue, match="handle without codec"):
            users.get("ada")
        with pytest.raises(InvalidValue, match="handle without codec"):
            list(users.scan())


def test_an_unknown_codec_is_refused_before_anything_is_made(site: Site) -> None:
    codecs: list[Any] = ["yaml", 1, []]
    for codec in codecs:
        with pytest.raises(InvalidArgument, match="json or text"):
            site.create_namespace("users", codec=codec)
    assert site.namespaces() == []


def test_keys_are_looked_up_as_in_a_mapping(site: Site) -> None:
    users = site.create_namespace("users")
    before = users.put(b"ada", b"countess")
    users.delete(b"ada")
    assert b"ada" not in users
    assert b"ada" in users.as_of(before)
    assert users.as_of(before)[b"ada"] == b"countess"
    with pytest.raises(KeyError) as raised:
        users[b"ada"]
    assert isinstance(raised.value, KeyNotFound)
    assert str(raised.value).startswith("Namespace('users') has no key b'ada'")


def test_a_namespace_that_is_there_is_returned_where_that_is_allowed(site: Site) -> None:
    made = site.create_namespace("visits", merge="counter")
    made.add(b"home")
    assert site.create_namespace("visits", merge="counter", exist_ok=True).get(b"home") == 1
    with pytest.raises(NamespaceExists):
        site.create_namespace("visits", merge="counter")
    with pytest.raises(NamespaceExists, match="merges by 'counter', not 'fields'"):
        site.create_namespace("visits", merge="fields", exist_ok=True)
    with pytest.raises(NamespaceNotFound):
        site.namespace("others", codec="json")


def test_the_package_shows_what_it_offers() -> None:
    assert floodmark.__version__ == version("floodmark")
    assert set(floodmark.__all__) | {"__version__"} <= set(dir(floodmark))
    shown = pydoc.plain(pydoc.render_doc(floodmark))
    for words in (
        "connect(url",
        "open(path",
        "class NamespaceNotFound",
        f"VERSION\n    {floodmark.__version__}",
    ):
        assert words in shown
    with pytest.raises(AttributeError, match="no attribute 'shut'"):
        _ = floodmark.shut
