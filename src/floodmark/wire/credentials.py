"""The credentials of a client: a token, and a certificate with its key."""

import os
from dataclasses import dataclass, field
from ssl import SSLContext, create_default_context

from floodmark.model.errors import InvalidArgument, InvalidConfiguration
from floodmark.model.names import require_path

PathLike = str | os.PathLike[str]


class Token:
    """A bearer token, as a text or in a file that may be replaced while it is in use."""

    def __init__(self, token: str | None, file: PathLike | None) -> None:
        if token is not None and file is not None:
            raise InvalidArgument("pass token or token_file, not both")
        self._file = None if file is None else require_path(file, "a token file")
        self._token = self._read() if self._file is not None else _checked(token)

    def __repr__(self) -> str:
        return "Token(…)" if self._token else "Token(None)"

    @property
    def text(self) -> str | None:
        """The token; None if there is none."""
        return self._token

    def reload(self) -> str | None:
        """The token, after its file was read again."""
        if self._file is not None:
            self._token = self._read()
        return self._token

    def _read(self) -> str | None:
        assert self._file is not None
        return _checked(read_file(self._file, "token").decode(errors="replace").strip() or None)


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """PEM texts for TLS: the root certificates, and the client's certificate and key."""

    root: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    # The paths of the certificate and its key, which Python's TLS reads itself.
    files: tuple[PathLike, PathLike] | None = None

    def context(self) -> SSLContext:
        """The context of a TLS connection of Python's `ssl` module."""
        made = create_default_context(cadata=None if self.root is None else self.root.decode())
        if self.files is not None:
            made.load_cert_chain(*self.files)
        return made

    @classmethod
    def load(
        cls, root: PathLike | None, certificate: PathLike | None, key: PathLike | None
    ) -> "Certificates":
        """Read the named files.  A certificate needs its key."""
        if (certificate is None) != (key is None):
            raise InvalidArgument("tls_certificate and tls_key belong together; pass both or neither")
        return cls(
            root=None if root is None else read_file(root, "certificate"),
            certificate=None if certificate is None else read_file(certificate, "certificate"),
            key=None if key is None else read_file(key, "key"),
            files=None if certificate is None or key is None else (certificate, key),
        )


def read_file(path: PathLike, what: str) -> bytes:
    """The content of a file that the user named."""
    file = require_path(path, f"a {what} file")
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidConfiguration(f"cannot read the {what} file {file}: {error.strerror}") from error


def _checked(token: str | None) -> str | None:
    """The token, if it fits into a header: printable ASCII.  The error does not repeat it."""
    if token is not None and not (
        isinstance(token, str) and token and token.isascii() and token.isprintable() and " " not in token
    ):
        raise InvalidArgument("a token is printable ASCII text without blanks")
    return token
