"""Calls made of a protocol: arguments and results travel by their types, whatever these are."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import msgspec
import pytest

from floodmark.host.ports import PORTS, Port
from floodmark.model.access import Role
from floodmark.model.actions import Action
from floodmark.model.errors import InvalidArgument, InvalidName
from floodmark.wire.messages import Method, port_methods


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Settings:
    lifetime: timedelta = timedelta(0)
    name: str = "x"

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidName("a name must not be empty", name=self.name)


class Point(NamedTuple):
    left: int
    right: bytes


class Row(msgspec.Struct, frozen=True):
    moment: datetime
    points: list[Point]
    sums: Mapping[int, Point]


class SomePort(Protocol):
    @Action(Role.READ, repeatable=True)
    def nothing(self) -> None:
        """No argument, no result."""

    @Action(Role.WRITE)
    def mixed(
        self, key: bytes, settings: Settings, *, colour: Colour = Colour.RED, at: int | None = None
    ) -> Row:
        """All kinds of arguments."""
        ...


class Target:
    """Does what the port says, and remembers how it was called."""

    def __init__(self) -> None:
        self.called: list[object] = []

    def nothing(self) -> None:
        self.called.append(())

    def mixed(
        self, key: bytes, settings: Settings, *, colour: Colour = Colour.RED, at: int | None = None
    ) -> Row:
        self.called.append((key, settings, colour, at))
        return ROW


ROW = Row(datetime(2020, 1, 1, tzinfo=UTC), [Point(1, b"\xff")], {7: Point((1 << 64) - 1, b"")})


def through_the_wire(method: Method[Any], target: object, *args: object, **kwargs: object) -> object:
    request = method.decode_request(method.encode_request(method.request(*args, **kwargs)))
    result = getattr(target, method.call)(**msgspec.structs.asdict(request))
    return method.decode_reply(method.encode_reply(result))


@pytest.fixture
def methods() -> Mapping[str, Method[Any]]:
    return port_methods(SomePort, "port")


def test_methods_get_names_with_the_prefix(methods: Mapping[str, Method[Any]]) -> None:
    assert sorted(methods) == ["port.mixed", "port.nothing"]


def test_arguments_and_results_come_as_they_were_given(methods: Mapping[str, Method[Any]]) -> None:
    target = Target()
    settings = Settings(lifetime=timedelta(days=1, microseconds=3), name="ada")
    assert through_the_wire(methods["port.mixed"], target, b"\x00\xff", settings, at=(1 << 64) - 1) == ROW
    assert (
        through_the_wire(methods["port.mixed"], target, key=b"", settings=Settings(), colour=Colour.RED)
        == ROW
    )
    assert through_the_wire(methods["port.nothing"], target) is None
    assert target.called == [
        (b"\x00\xff", settings, Colour.RED, (1 << 64) - 1),
        (b"", Settings(), Colour.RED, None),
        (),
    ]


def test_only_what_is_said_to_be_repeatable_is_repeated(methods: Mapping[str, Method[Any]]) -> None:
    assert methods["port.mixed"].writes
    assert not methods["port.nothing"].writes


def test_wrong_arguments_fail_at_the_call(methods: Mapping[str, Method[Any]]) -> None:
    with pytest.raises(TypeError):
        methods["port.nothing"].request(1)
    with pytest.raises(TypeError):
        methods["port.mixed"].request(b"x")


@pytest.mark.parametrize(
    "arguments", [{}, {"key": 1}, {"key": b"x", "settings": {}, "colour": "blue"}, [1, 2], None]
)
def test_arguments_of_other_types_are_refused(methods: Mapping[str, Method[Any]], arguments: object) -> None:
    with pytest.raises(InvalidArgument, match=r"port\.mixed"):
        methods["port.mixed"].decode_request(msgspec.msgpack.encode(arguments))


def test_what_a_type_says_about_itself_is_what_the_caller_hears(methods: Mapping[str, Method[Any]]) -> None:
    body = msgspec.msgpack.encode({"key": b"x", "settings": {"name": ""}})
    with pytest.raises(InvalidName, match="must not be empty") as refused:
        methods["port.mixed"].decode_request(body)
    assert refused.value.details == {"name": ""}


def test_what_cannot_travel_is_found_when_the_port_is_offered() -> None:
    class Collecting(Protocol):
        @Action(Role.READ)
        def collect(self, *keys: bytes) -> None: ...

    with pytest.raises(TypeError, match="collects"):
        port_methods(Collecting, "port")


def test_a_method_without_a_declaration_is_not_offered() -> None:
    class Careless(Protocol):
        @Action(Role.READ)
        def read(self) -> None: ...

        def wipe(self) -> None: ...

    with pytest.raises(TypeError, match=r"wipe declares no role"):
        port_methods(Careless, "port")


@pytest.mark.parametrize("port", PORTS, ids=lambda port: port.attribute)
def test_the_ports_of_a_site_can_travel_and_have_a_dozen_methods_at_most(port: Port) -> None:
    assert 2 <= len(port_methods(port.protocol, port.prefix)) <= 12
