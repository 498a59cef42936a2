"""Tokens and certificates: where they come from, and that nobody gets to see them."""

from pathlib import Path
from typing import Any

import pytest

from floodmark.model.errors import InvalidArgument, InvalidConfiguration
from floodmark.wire import Connection
from floodmark.wire.credentials import Certificates, Token

SECRET = "sesame-0123456789"


def test_a_token_is_text_or_the_content_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n", "utf-8")
    assert Token(SECRET, None).text == SECRET
    assert Token(None, file).text == SECRET
    assert Token(None, None).text is None


def test_a_token_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first", "utf-8")
    token = Token(None, file)
    file.write_text("second", "utf-8")
    assert token.text == "first"
    assert token.reload() == "second"
    assert Token(SECRET, None).reload() == SECRET


def test_text_and_file_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="not both"):
        Token(SECRET, tmp_path)


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "smørbrød", 7])
def test_what_no_header_can_hold_is_refused_and_not_repeated(token: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Token(token, None)
    assert not token or str(token) not in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="absent"):
        Token(None, tmp_path / "absent")
    with pytest.raises(InvalidConfiguration, match=r"absent\.pem"):
        Certificates.load(tmp_path / "absent.pem", None, None)


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="belong together"):
        Certificates.load(None, tmp_path / "client.pem", None)


def test_certificates_need_an_encrypted_connection(tmp_path: Path) -> None:
    root = tmp_path / "root.pem"
    root.write_bytes(b"x")
    with pytest.raises(InvalidArgument, match="grpc\\+tls"):
        Connection("grpc://127.0.0.1:1", tls_root=root)


def test_secrets_show_in_no_repr(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.write_text(SECRET, "utf-8")
    certificates = Certificates.load(None, key, key)
    connection = Connection("grpc://127.0.0.1:1", token=SECRET)
    shown = [repr(Token(SECRET, None)), repr(Certificates(key=certificates.key)), repr(connection)]
    assert not any(SECRET in text for text in shown)
    assert not any(SECRET in repr(value) for value in vars(connection).values())


@pytest.mark.parametrize("timeout_seconds", [0, -1, float("nan")])
def test_a_timeout_is_positive(timeout_seconds: float) -> None:
    with pytest.raises(InvalidArgument, match="timeout"):
        Connection("grpc://127.0.0.1:1", timeout_seconds=timeout_seconds)


@pytest.mark.parametrize("path", ["", 5, b"token", "a\0b"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(InvalidArgument, match="token file"):
        Token(None, path)
    with pytest.raises(InvalidArgument, match="certificate file"):
        Certificates.load(path, None, None)
