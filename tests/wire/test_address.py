"""Addresses of servers: what is understood, and what is refused without repeating a secret."""

import pytest

from floodmark.model.errors import InvalidArgument
from floodmark.wire.address import Address, parse_address, parse_addresses


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("grpc://oslo:7100", Address("oslo", 7100, False)),
        ("grpc+tls://oslo:7100", Address("oslo", 7100, True)),
        ("floodmark://oslo:1", Address("oslo", 1, False)),
        ("floodmark+tls://oslo", Address("oslo", 7100, True)),
        ("grpc://127.0.0.1:7100/", Address("127.0.0.1", 7100, False)),
        ("grpc://[::1]:7100", Address("::1", 7100, False)),
    ],
)
def test_a_url_names_host_port_and_encryption(url: str, address: Address) -> None:
    assert parse_address(url) == address
    assert parse_address(address.url) == address


@pytest.mark.parametrize(
    ("url", "urls"),
    [
        ("grpc://oslo:7100", ["grpc://oslo:7100"]),
        ("grpc://oslo-1:7100, oslo-2", ["grpc://oslo-1:7100", "grpc://oslo-2:7100"]),
        ("grpc+tls://[::1]:1,[::2]:2", ["grpc+tls://[::1]:1", "grpc+tls://[::2]:2"]),
        ("grpc://oslo:7100,oslo", ["grpc://oslo:7100"]),
    ],
)
def test_a_url_may_name_several_nodes(url: str, urls: list[str]) -> None:
    assert [address.url for address in parse_addresses(url)] == urls


@pytest.mark.parametrize(
    "url", ["grpc://oslo,", "grpc://,", "grpc://oslo,grpc://bergen", "oslo,bergen", None]
)
def test_a_list_with_something_else_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="looks like grpc://host:port"):
        parse_addresses(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "oslo:7100",
        "http://oslo:7100",
        "grpc://",
        "grpc://:7100",
        "grpc://oslo:port",
        "grpc://oslo:70000",
        "grpc://oslo:7100/users",
        "grpc://oslo:7100?token=x",
        "grpc://oslo:7100#x",
        None,
        7100,
    ],
)
def test_anything_else_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match="looks like grpc://host:port"):
        parse_address(url)


def test_a_secret_in_a_url_is_not_repeated() -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_address("grpc://sesame@oslo:7100")
    assert "sesame" not in str(refused.value)
    assert "token_file" in str(refused.value)


@pytest.mark.parametrize("url", ["grpc://host:7100?token=hush", "grpc://host:7100/?a=1#hush"])
def test_what_stands_behind_a_question_mark_is_not_repeated(url: str) -> None:
    with pytest.raises(InvalidArgument, match="token_file=") as refusal:
        parse_address(url)
    assert "hush" not in str(refusal.value)
    assert "grpc://host:7100" in str(refusal.value)
